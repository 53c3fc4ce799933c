//! Counts what ends within the measured time, and shows it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::Serialize;

use super::{Rig, cpu::Spent, probe::Probe};
use crate::{
    cli::{
        Failure,
        output::{self, BOLD, DIM, WARN, paint},
        values,
    },
    model::DurabilityLevel,
};

/// Longest latency told apart, in microseconds.
const LONGEST_US: u64 = 120_000_000;

/// Counts for all tasks of a run.
pub(super) struct Meter {
    /// Measuring begins.
    pub(super) from: Instant,
    /// Measuring ends.
    pub(super) until: Instant,
    stopped: AtomicBool,
    counts: Mutex<Counts>,
}

struct Counts {
    total: Sums,
    calls: Latencies,
    deliveries: Latencies,
    /// Since the last line.
    recent: Sums,
    recent_calls: Latencies,
    recent_since: Instant,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    calls: u64,
    messages: u64,
    bytes: u64,
    refused: u64,
}

/// Latencies in microseconds.
#[derive(Clone)]
struct Latencies(Option<Histogram<u64>>);

impl Latencies {
    fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_US, 3).ok())
    }

    fn record(&mut self, latency: Duration) {
        if let Some(histogram) = &mut self.0 {
            histogram.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
        }
    }

    fn clear(&mut self) {
        if let Some(histogram) = &mut self.0 {
            histogram.reset();
        }
    }

    /// In milliseconds; `None` without any.
    fn quantiles(&self) -> Option<Quantiles> {
        let histogram = self.0.as_ref().filter(|histogram| !histogram.is_empty())?;
        let ms = |us: u64| Duration::from_micros(us).as_secs_f64() * 1e3;
        let at = |quantile: f64| ms(histogram.value_at_quantile(quantile));
        Some(Quantiles {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: ms(histogram.max()),
            mean: histogram.mean() / 1e3,
        })
    }
}

/// Latencies in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Quantiles {
    pub(super) p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
    mean: f64,
}

impl std::fmt::Display for Quantiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { p50, p99, p999, max, .. } = self;
        write!(f, "p50 {p50:.3} ms   p99 {p99:.3} ms   p99.9 {p999:.3} ms   max {max:.3} ms")
    }
}

/// What a run gave.
pub(super) struct Outcome {
    pub(super) interrupted: bool,
    seconds: f64,
    total: Sums,
    calls: Option<Quantiles>,
    deliveries: Option<Quantiles>,
    cpu: Spent,
}

impl Meter {
    /// Measures for `duration` after `warm_up` from now.
    pub(super) fn new(warm_up: Duration, duration: Duration) -> Self {
        let from = Instant::now() + warm_up;
        Self {
            from,
            until: from + duration,
            stopped: AtomicBool::new(false),
            counts: Mutex::new(Counts {
                total: Sums::default(),
                calls: Latencies::new(),
                deliveries: Latencies::new(),
                recent: Sums::default(),
                recent_calls: Latencies::new(),
                recent_since: Instant::now(),
            }),
        }
    }

    /// Whether tasks should end.
    pub(super) fn is_over(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || Instant::now() >= self.until
    }

    /// Tells tasks to end.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// A call that began at `begun` has ended well.
    pub(super) fn call(&self, begun: Instant, messages: u64, bytes: u64) {
        let now = Instant::now();
        let latency = now - begun;
        let mut counts = self.counts.lock();
        counts.recent.add(messages, bytes);
        counts.recent_calls.record(latency);
        if now >= self.from && now < self.until {
            counts.total.add(messages, bytes);
            counts.calls.record(latency);
        }
    }

    /// A message that left at `begun` has come back.
    pub(super) fn delivery(&self, begun: Instant, arrived: Instant) {
        if arrived >= self.from && arrived < self.until {
            self.counts.lock().deliveries.record(arrived - begun);
        }
    }

    /// A call was refused because the broker is busy.
    pub(super) fn refused(&self) {
        let mut counts = self.counts.lock();
        counts.recent.refused += 1;
        counts.total.refused += 1;
    }

    /// What happened since the last line, for eyes.
    pub(super) fn line(&self) -> String {
        let now = Instant::now();
        let mut counts = self.counts.lock();
        let seconds = (now - counts.recent_since).as_secs_f64().max(1e-9);
        let recent = std::mem::take(&mut counts.recent);
        let latency = counts.recent_calls.quantiles();
        counts.recent_calls.clear();
        counts.recent_since = now;
        drop(counts);
        let phase = match now.checked_duration_since(self.from) {
            None => "warm-up".to_owned(),
            Some(passed) => format!("{:>6.0}s", passed.as_secs_f64()),
        };
        let latency = latency
            .map(|l| format!("   p50 {:.3} ms   p99 {:.3} ms   max {:.3} ms", l.p50, l.p99, l.max))
            .unwrap_or_default();
        let refused =
            if recent.refused > 0 { format!("   {} refused", recent.refused) } else { String::new() };
        let rates = rates(recent.messages, recent.bytes, seconds);
        format!("{}  {rates}{latency}{refused}", paint(DIM, phase))
    }

    /// The result.
    pub(super) fn outcome(&self, interrupted: bool, cpu: Spent) -> Outcome {
        let end = Instant::now().min(self.until);
        let counts = self.counts.lock();
        Outcome {
            interrupted,
            seconds: end.saturating_duration_since(self.from).as_secs_f64(),
            total: counts.total,
            calls: counts.calls.quantiles(),
            deliveries: counts.deliveries.quantiles(),
            cpu,
        }
    }
}

impl Sums {
    fn add(&mut self, messages: u64, bytes: u64) {
        self.calls += 1;
        self.messages += messages;
        self.bytes += bytes;
    }
}

#[expect(clippy::cast_precision_loss, reason = "rates are for reading")]
fn per(number: u64, seconds: f64) -> f64 {
    number as f64 / seconds.max(1e-9)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rates are for reading")]
fn whole(rate: f64) -> u64 {
    rate.round() as u64
}

fn rates(messages: u64, bytes: u64, seconds: f64) -> String {
    let count = values::count(whole(per(messages, seconds)));
    format!("{count:>9} messages/s  {:>6.1} MB/s", per(bytes, seconds) / 1e6)
}

/// A run and its result, for eyes and for scripts.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    bench: &'static str,
    topic: &'a str,
    durability: &'static str,
    size: u64,
    batch: u32,
    in_flight: u32,
    streams: u32,
    connections: u32,
    threads: u16,
    complete: bool,
    seconds: f64,
    calls: u64,
    messages: u64,
    bytes: u64,
    refused: u64,
    messages_per_second: f64,
    /// Of bodies, in 1 000 000 bytes.
    megabytes_per_second: f64,
    /// Of a call, in milliseconds.
    latency_ms: Option<Quantiles>,
    /// From handing a message over until a waiting pull had it.
    delivery_ms: Option<Quantiles>,
    client_cpu_us_per_message: Option<f64>,
    server_cpu_us_per_message: Option<f64>,
    client_cpu_cores: Option<f64>,
    server_cpu_cores: Option<f64>,
    probe_before: Option<Probe>,
    probe_after: Option<Probe>,
}

impl<'a> Report<'a> {
    pub(super) fn new(
        bench: &'static str,
        rig: &'a Rig,
        durability: DurabilityLevel,
        outcome: &Outcome,
        probes: Option<(Probe, Probe)>,
    ) -> Self {
        let Outcome { seconds, total, .. } = *outcome;
        let a_message = |spent: Option<Duration>| {
            spent
                .filter(|_| total.messages > 0)
                .map(|spent| spent.as_secs_f64() * 1e6 / per(total.messages, 1.0))
        };
        let cores = |spent: Option<Duration>| spent.map(|spent| spent.as_secs_f64() / seconds.max(1e-9));
        Self {
            bench,
            topic: &rig.topic,
            durability: match durability {
                DurabilityLevel::Sync => "sync",
                DurabilityLevel::Async => "async",
            },
            size: rig.load.size.0,
            batch: rig.load.batch,
            in_flight: rig.load.in_flight,
            streams: rig.load.streams,
            connections: rig.load.connections,
            threads: rig.load.threads,
            complete: !outcome.interrupted,
            seconds,
            calls: total.calls,
            messages: total.messages,
            bytes: total.bytes,
            refused: total.refused,
            messages_per_second: per(total.messages, seconds),
            megabytes_per_second: per(total.bytes, seconds) / 1e6,
            latency_ms: outcome.calls,
            delivery_ms: outcome.deliveries,
            client_cpu_us_per_message: a_message(outcome.cpu.client),
            server_cpu_us_per_message: a_message(outcome.cpu.server),
            client_cpu_cores: cores(outcome.cpu.client),
            server_cpu_cores: cores(outcome.cpu.server),
            probe_before: probes.map(|(before, _)| before),
            probe_after: probes.map(|(_, after)| after),
        }
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        let streams = match self.streams {
            0 => "unary".to_owned(),
            streams => values::plural(streams.into(), "stream", "streams"),
        };
        output::line(format_args!(
            "{} {} ({}): {} a message, {} a call, {} in flight, {streams}, {}, {:.1}s",
            paint(BOLD, self.bench),
            self.topic,
            self.durability,
            values::size(self.size),
            self.batch,
            self.in_flight,
            values::plural(self.connections.into(), "connection", "connections"),
            self.seconds,
        ))?;
        let field = |name: &str, value: String| {
            output::line(format_args!("  {}  {value}", paint(DIM, format_args!("{name:<10}"))))
        };
        let rate = rates(self.messages, self.bytes, self.seconds);
        field("rate", format!("{}  {} in all", rate.trim_start(), values::count(self.messages)))?;
        if let Some(latency) = &self.latency_ms {
            field("call", latency.to_string())?;
        }
        if let Some(latency) = &self.delivery_ms {
            field("delivery", latency.to_string())?;
        }
        if let (Some(call), Some(delivery)) = (&self.latency_ms, &self.delivery_ms) {
            field("ratio", format!("{:.2} × the sender's own latency (p50)", delivery.p50 / call.p50))?;
        }
        if self.refused > 0 {
            field("refused", paint(WARN, values::plural(self.refused, "call", "calls")))?;
        }
        let cpu = |who: &str, us: Option<f64>, cores: Option<f64>| match (us, cores) {
            (Some(us), Some(cores)) => {
                Some(format!("{who} {us:.2} µs a message, {:.0} % of a core", cores * 100.0))
            }
            _ => None,
        };
        let server = cpu("server", self.server_cpu_us_per_message, self.server_cpu_cores);
        let client = cpu("client", self.client_cpu_us_per_message, self.client_cpu_cores);
        let cpu: Vec<String> = server.into_iter().chain(client).collect();
        if !cpu.is_empty() {
            field("cpu", cpu.join("; "))?;
        }
        if let (Some(before), Some(after)) = (&self.probe_before, &self.probe_after) {
            for (name, before, after) in
                [("4 KiB sync", before.small, after.small), ("1 MiB sync", before.large, after.large)]
            {
                field(name, format!("before: {before}"))?;
                field("", format!("after:  {after}"))?;
            }
            if !before.agrees(after) {
                output::warn("the device was more than twice as fast or slow after the run: do not trust it");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_ends_in_the_measured_time_counts() {
        let meter = Meter::new(Duration::from_secs(3600), Duration::from_secs(1));
        meter.call(Instant::now(), 5, 50);
        let outcome = meter.outcome(false, Spent::default());
        assert_eq!((outcome.total.messages, outcome.calls.is_some()), (0, false), "still warming up");
        assert!(meter.line().contains("warm-up"));

        let meter = Meter::new(Duration::ZERO, Duration::from_secs(3600));
        meter.call(Instant::now(), 5, 50);
        meter.call(Instant::now(), 7, 70);
        let outcome = meter.outcome(false, Spent::default());
        assert_eq!((outcome.total.calls, outcome.total.messages, outcome.total.bytes), (2, 12, 120));
        assert!(outcome.calls.is_some() && outcome.deliveries.is_none());
    }

    #[test]
    fn quantiles_are_in_milliseconds() {
        let mut latencies = Latencies::new();
        for us in 1..=1000 {
            latencies.record(Duration::from_micros(us * 1000));
        }
        let quantiles = latencies.quantiles().unwrap();
        assert!((quantiles.p50 - 500.0).abs() < 1.0, "{quantiles}");
        assert!((quantiles.max - 1000.0).abs() < 1.0, "{quantiles}");
    }
}
