//! What the hold shows of itself.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use opentelemetry::{
    KeyValue,
    metrics::{Histogram, Meter},
};

use super::{Full, Outcome};

const DURATION: [f64; 11] = [0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0];
const WAKE_LATENCY: [f64; 13] =
    [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];

/// Counts that are cheap to change and read when metrics are collected.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) waiters: AtomicUsize,
    pub(super) spurious: AtomicU64,
    pub(super) replaced: AtomicU64,
    pub(super) full_connection: AtomicU64,
    pub(super) full_node: AtomicU64,
    pub(super) swept: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Metrics {
    pub(super) counts: Arc<Counts>,
    duration: Histogram<f64>,
    wake_latency: Histogram<f64>,
    outcomes: [[KeyValue; 1]; Outcome::ALL.len()],
}

impl Metrics {
    pub(super) fn new(meter: &Meter) -> Self {
        let counts = Arc::new(Counts::default());
        let seen = Arc::clone(&counts);
        let kind = [KeyValue::new("kind", "pull")];
        meter
            .u64_observable_gauge("holdfast.hold.waiters")
            .with_unit("{request}")
            .with_description("Requests held now.")
            .with_callback(move |to| to.observe(seen.waiters.load(Ordering::Relaxed) as u64, &kind))
            .build();
        let seen = Arc::clone(&counts);
        meter
            .u64_observable_counter("holdfast.hold.spurious_wakeups")
            .with_description("Wake-ups after which there was nothing to answer.")
            .with_callback(move |to| to.observe(seen.spurious.load(Ordering::Relaxed), &[]))
            .build();
        let seen = Arc::clone(&counts);
        let reasons = ["per_queue", "per_connection", "per_node"].map(|r| [KeyValue::new("reason", r)]);
        meter
            .u64_observable_counter("holdfast.hold.rejections")
            .with_description("Requests that were not held, or no longer, because of a limit.")
            .with_callback(move |to| {
                let [queue, connection, node] = &reasons;
                to.observe(seen.replaced.load(Ordering::Relaxed), queue);
                to.observe(seen.full_connection.load(Ordering::Relaxed), connection);
                to.observe(seen.full_node.load(Ordering::Relaxed), node);
            })
            .build();
        let seen = Arc::clone(&counts);
        meter
            .u64_observable_counter("holdfast.hold.swept")
            .with_description(
                "Held requests that no news had reached; found by the safety sweep. Must stay 0.",
            )
            .with_callback(move |to| to.observe(seen.swept.load(Ordering::Relaxed), &[]))
            .build();
        Self {
            counts,
            duration: meter
                .f64_histogram("holdfast.hold.duration")
                .with_unit("s")
                .with_description("How long requests were held, by how that ended.")
                .with_boundaries(DURATION.to_vec())
                .build(),
            wake_latency: meter
                .f64_histogram("holdfast.hold.wake.latency")
                .with_unit("s")
                .with_description("From new messages being readable to the answer of a held request.")
                .with_boundaries(WAKE_LATENCY.to_vec())
                .build(),
            outcomes: Outcome::ALL.map(|outcome| [KeyValue::new("outcome", outcome.as_str())]),
        }
    }

    pub(super) fn ended(&self, outcome: Outcome, held: Duration) {
        let attributes = self.outcomes.get(outcome as usize).map_or(&[][..], |one| one);
        self.duration.record(held.as_secs_f64(), attributes);
    }

    pub(super) fn answered(&self, after: Duration) {
        self.wake_latency.record(after.as_secs_f64(), &[]);
    }

    pub(super) fn refused(&self, why: Full) {
        match why {
            Full::Connection => &self.counts.full_connection,
            Full::Node => &self.counts.full_node,
        }
        .fetch_add(1, Ordering::Relaxed);
    }
}
