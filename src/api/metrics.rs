//! What the gRPC server counts. Recording a call allocates nothing: the attributes of every method and
//! outcome are made beforehand.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, Meter},
};

use super::{
    connection::{Ended, TurnedAway},
    door::METHODS,
};

/// Bounds of the duration histogram in seconds: those of the semantic conventions, and three finer ones.
const DURATIONS: [f64; 17] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];

/// Most failed calls that are named in the log, so that a broken client does not fill it.
const FAILURES_LOGGED_A_SECOND: u64 = 20;

/// Stands for all methods that are not there.
const OTHER: &str = "_OTHER";

/// Names of the gRPC status codes by number.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// A number that goes up and down, shown as a gauge.
#[derive(Clone, Debug, Default)]
pub(super) struct Level(Arc<AtomicU64>);

impl Level {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `by` and gives the sum.
    pub(super) fn add(&self, by: u64) -> u64 {
        self.0.fetch_add(by, Ordering::Relaxed).saturating_add(by)
    }

    pub(super) fn subtract(&self, by: u64) {
        self.0.fetch_sub(by, Ordering::Relaxed);
    }
}

/// Counts by reason; the reasons are a closed list.
#[derive(Clone, Debug)]
pub(super) struct Reasons(Arc<[(&'static str, AtomicU64)]>);

impl Reasons {
    fn new(meter: &Meter, name: &'static str, text: &'static str, reasons: &[&'static str]) -> Self {
        let counts: Arc<[_]> = reasons.iter().map(|&reason| (reason, AtomicU64::new(0))).collect();
        let shown = Self(Arc::clone(&counts));
        meter
            .u64_observable_counter(name)
            .with_unit("{connection}")
            .with_description(text)
            .with_callback(move |observer| {
                for (reason, count) in shown.list() {
                    observer.observe(count, &[KeyValue::new("reason", reason)]);
                }
            })
            .build();
        Self(counts)
    }

    /// One more for the reason with this number.
    pub(super) fn count(&self, reason: usize) {
        if let Some((_, count)) = self.0.get(reason) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All reasons with their counts.
    pub(super) fn list(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(reason, count)| (*reason, count.load(Ordering::Relaxed)))
    }
}

/// The instruments of the room.
#[derive(Debug)]
pub(super) struct Metrics {
    durations: Histogram<f64>,
    /// By method, then by code; the last method stands for unknown ones.
    attributes: Vec<Vec<Vec<KeyValue>>>,
    begun: Instant,
    /// Second since `begun` that `logged` counts failures of.
    log_second: AtomicU64,
    logged: AtomicU64,
    /// Panics of handlers that were caught; must stay 0.
    pub(super) panics: Counter<u64>,
    /// Connections closed as they came.
    pub(super) refused_connections: Reasons,
    /// Connections that have ended.
    pub(super) closed_connections: Reasons,
    /// Calls refused because the node had too much in its hands.
    pub(super) rejections: Level,
    /// Connections now.
    pub(super) connections: Level,
    /// Running calls.
    pub(super) calls: Level,
    /// Bytes of requests that are still arriving.
    pub(super) request_bytes: Level,
    /// Bytes of answers on their way to clients.
    pub(super) answer_bytes: Level,
}

impl Metrics {
    pub(super) fn new(meter: &Meter) -> Self {
        let gauge =
            |name: &'static str, unit: &'static str, text: &'static str, attributes: Vec<KeyValue>| {
                let level = Level::default();
                let shown = level.clone();
                meter
                    .u64_observable_gauge(name)
                    .with_unit(unit)
                    .with_description(text)
                    .with_callback(move |observer| observer.observe(shown.get(), &attributes))
                    .build();
                level
            };
        let listener = vec![KeyValue::new("listener", "api"), KeyValue::new("tls", false)];
        Self {
            begun: Instant::now(),
            log_second: AtomicU64::new(0),
            logged: AtomicU64::new(0),
            durations: meter
                .f64_histogram("rpc.server.call.duration")
                .with_unit("s")
                .with_description("How long calls took, waiting pulls included")
                .with_boundaries(DURATIONS.to_vec())
                .build(),
            attributes: METHODS.iter().map(|method| method.name).chain([OTHER]).map(attributes).collect(),
            panics: meter
                .u64_counter("holdfast.rpc.panics")
                .with_description("Panics of handlers that were caught; each is a bug")
                .build(),
            refused_connections: Reasons::new(
                meter,
                "holdfast.connections.refused",
                "Connections closed as they came",
                &TurnedAway::NAMES,
            ),
            closed_connections: Reasons::new(
                meter,
                "holdfast.connections.closed",
                "Connections that have ended",
                &Ended::NAMES,
            ),
            rejections: rejections(meter),
            connections: gauge("holdfast.connections", "{connection}", "Connections now", listener),
            calls: gauge("holdfast.rpc.active_calls", "{call}", "Calls running now", Vec::new()),
            request_bytes: gauge(
                "holdfast.rpc.request.memory",
                "By",
                "Bytes of requests that are still arriving",
                Vec::new(),
            ),
            answer_bytes: gauge(
                "holdfast.rpc.answer.memory",
                "By",
                "Bytes of answers on their way to clients",
                Vec::new(),
            ),
        }
    }

    /// Name of a method.
    pub(super) fn name(&self, method: usize) -> &'static str {
        METHODS.get(method).map_or(OTHER, |method| method.name)
    }

    /// A call has ended.
    pub(super) fn call(&self, method: usize, code: i32, took: Duration) {
        if code != 0 && tracing::enabled!(tracing::Level::DEBUG) {
            self.log(method, code);
        }
        let code = usize::try_from(code).unwrap_or(2).min(CODES.len() - 1);
        let of_method = self.attributes.get(method).or(self.attributes.last());
        if let Some(attributes) = of_method.and_then(|codes| codes.get(code)) {
            self.durations.record(took.as_secs_f64(), attributes);
        }
    }
}

impl Metrics {
    /// Names a failed call, if not too many have failed in this second.
    #[cold]
    fn log(&self, method: usize, code: i32) {
        let second = self.begun.elapsed().as_secs();
        if self.log_second.swap(second, Ordering::Relaxed) != second {
            self.logged.store(0, Ordering::Relaxed);
        }
        if self.logged.fetch_add(1, Ordering::Relaxed) < FAILURES_LOGGED_A_SECOND {
            let code = usize::try_from(code).ok().and_then(|code| CODES.get(code)).copied();
            tracing::debug!(method = self.name(method), code, "a call failed");
        }
    }
}

/// Refusals for want of memory, shown as a counter.
fn rejections(meter: &Meter) -> Level {
    let count = Level::default();
    let shown = count.clone();
    let attributes = [KeyValue::new("reason", "memory")];
    meter
        .u64_observable_counter("holdfast.flow.rejections")
        .with_description(
            "Calls refused, or answered with less, for want of room or because nothing can be written.",
        )
        .with_callback(move |observer| observer.observe(shown.get(), &attributes))
        .build();
    count
}

/// The attributes of one method, by code.
fn attributes(method: &'static str) -> Vec<Vec<KeyValue>> {
    let of_code = |code: &'static str| {
        let mut attributes = vec![
            KeyValue::new("rpc.system.name", "grpc"),
            KeyValue::new("rpc.method", method),
            KeyValue::new("rpc.status_code", code),
        ];
        if code != "OK" {
            attributes.push(KeyValue::new("error.type", code));
        }
        attributes
    };
    CODES.into_iter().map(of_code).collect()
}
