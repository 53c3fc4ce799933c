//! Load on a server from threads of this process, each with a connection of its own, and what it gave.

use std::{
    collections::BTreeMap,
    sync::{Barrier, OnceLock},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{
    Result,
    process::{self, Server},
};

/// Longest latency told apart, in microseconds.
const LONGEST_US: u64 = 120_000_000;

/// How long to run.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub warm_up: Duration,
    pub measured: Duration,
}

/// The measured time.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    from: Instant,
    until: Instant,
}

impl Span {
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    fn holds(&self, instant: Instant) -> bool {
        instant >= self.from && instant < self.until
    }
}

/// What one thread counts.
pub struct Tally {
    span: Span,
    calls: u64,
    messages: u64,
    latency: Histogram<u64>,
    delivery: Histogram<u64>,
    /// Of all calls, also those that reach over the measured time.
    longest: Duration,
}

impl Tally {
    pub fn new(span: Span) -> Result<Self> {
        let histogram = Histogram::new_with_bounds(1, LONGEST_US, 3)?;
        let (latency, delivery) = (histogram.clone(), histogram);
        Ok(Self { span, calls: 0, messages: 0, latency, delivery, longest: Duration::ZERO })
    }

    /// A call that began at `begun` has ended well.
    pub fn call(&mut self, begun: Instant, messages: u64) {
        let now = Instant::now();
        self.longest = self.longest.max(now - begun);
        if self.span.holds(now) {
            self.calls += 1;
            self.messages += messages;
            self.latency.saturating_record(us(now - begun));
        }
    }

    /// So many messages have been dealt with together; nobody asks how long each took.
    pub fn bulk(&mut self, calls: u64, messages: u64) {
        if self.span.holds(Instant::now()) {
            self.calls += calls;
            self.messages += messages;
        }
    }

    /// A message whose sending began at `begun` has reached who waited for it.
    pub fn delivery(&mut self, begun: Instant, arrived: Instant) {
        if self.span.holds(arrived) {
            self.delivery.saturating_record(us(arrived - begun));
        }
    }

    fn add(&mut self, other: &Self) -> Result<()> {
        self.calls += other.calls;
        self.messages += other.messages;
        self.longest = self.longest.max(other.longest);
        self.latency.add(&other.latency)?;
        self.delivery.add(&other.delivery)?;
        Ok(())
    }
}

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What a measurement gave.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    pub messages_per_second: f64,
    pub calls_per_second: f64,
    /// Of a call; none where calls are not timed one by one.
    pub latency: Option<Quantiles>,
    /// From the beginning of a send until a waiting reader had the message.
    pub delivery: Option<Quantiles>,
    /// The longest call, in milliseconds, also if it reached over the measured time.
    pub longest_ms: f64,
    /// CPU time of the server, µs.
    pub server_us_per_message: f64,
    pub server_us_per_call: f64,
    pub client_us_per_message: f64,
    /// The server's CPU time by kinds of its threads, µs a message.
    pub threads_us_per_message: BTreeMap<String, f64>,
    /// Shares of the whole machine, 0 to 1: the server, this process, everybody else (with what a hypervisor took).
    pub server_share: f64,
    pub client_share: f64,
    pub others_share: f64,
    /// Where the server tells.
    pub syncs_per_second: Option<f64>,
    pub messages_per_sync: Option<f64>,
    pub bytes_per_sync: Option<f64>,
}

/// Latencies in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quantiles {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Quantiles {
    fn of(histogram: &Histogram<u64>) -> Option<Self> {
        let ms = |us: u64| Duration::from_micros(us).as_secs_f64() * 1e3;
        let at = |quantile| ms(histogram.value_at_quantile(quantile));
        (!histogram.is_empty()).then(|| Self {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: ms(histogram.max()),
        })
    }
}

/// Runs `work` on `threads` threads over what `prepare` made in each, and measures both sides meanwhile.
pub fn measure<P>(
    server: &Server,
    threads: usize,
    timing: Timing,
    prepare: impl Fn(usize) -> Result<P> + Sync,
    work: impl Fn(P, Span) -> Result<Tally> + Sync,
) -> Result<Sample> {
    let span = OnceLock::new();
    let (prepared, begin) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    let run = |number| {
        // Nobody may leave before the barriers: the others would wait for ever.
        let ready = prepare(number);
        prepared.wait();
        begin.wait();
        let span = span.get().copied().ok_or("no time to measure was set")?;
        work(ready?, span)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let workers: Vec<_> = (0..threads).map(|number| scope.spawn(move || run(number))).collect();
        prepared.wait();
        let from = Instant::now() + timing.warm_up;
        let until = from + timing.measured;
        let span = *span.get_or_init(|| Span { from, until });
        begin.wait();
        std::thread::sleep(span.from.saturating_duration_since(Instant::now()));
        let before = Counters::read(server)?;
        std::thread::sleep(span.until.saturating_duration_since(Instant::now()));
        let after = Counters::read(server)?;
        let mut tally = Tally::new(span)?;
        for worker in workers {
            tally.add(&worker.join().map_err(|_| "a thread of the load panicked")??)?;
        }
        sample(&tally, &before, &after)
    })
}

/// What is read before and after.
struct Counters {
    at: Instant,
    server: Duration,
    threads: BTreeMap<String, Duration>,
    client: Duration,
    busy: Duration,
    stolen: Duration,
    syncs: Option<process::Syncs>,
}

impl Counters {
    fn read(server: &Server) -> Result<Self> {
        let syncs = server.syncs()?;
        let (busy, stolen) = process::machine()?;
        Ok(Self {
            at: Instant::now(),
            server: server.cpu()?,
            threads: server.threads()?,
            client: process::own_cpu()?,
            busy,
            stolen,
            syncs,
        })
    }
}

fn sample(tally: &Tally, before: &Counters, after: &Counters) -> Result<Sample> {
    let (messages, calls) = (number(tally.messages), number(tally.calls));
    if tally.messages == 0 {
        return Err("nothing ended within the measured time; take longer with --seconds".into());
    }
    let seconds = (tally.span.until - tally.span.from).as_secs_f64();
    let between = (after.at - before.at).as_secs_f64();
    let cores = number(u64::try_from(std::thread::available_parallelism()?.get())?);
    let used = |later: Duration, earlier: Duration| later.saturating_sub(earlier).as_secs_f64();
    let (server, client) = (used(after.server, before.server), used(after.client, before.client));
    let busy = used(after.busy, before.busy) + used(after.stolen, before.stolen);
    let syncs = after.syncs.zip(before.syncs).map(|(a, b)| (a.count - b.count, a.bytes - b.bytes));
    let syncs = syncs.filter(|&(count, _)| count > 0.0);
    let threads = after.threads.iter().map(|(name, &later)| {
        let earlier = before.threads.get(name).copied().unwrap_or_default();
        (name.clone(), used(later, earlier))
    });
    // CPU time was counted for a moment longer or shorter than messages were.
    let scale = 1e6 * seconds / between;
    Ok(Sample {
        messages_per_second: messages / seconds,
        calls_per_second: calls / seconds,
        latency: Quantiles::of(&tally.latency),
        delivery: Quantiles::of(&tally.delivery),
        longest_ms: tally.longest.as_secs_f64() * 1e3,
        server_us_per_message: server * scale / messages,
        server_us_per_call: server * scale / calls,
        client_us_per_message: client * scale / messages,
        threads_us_per_message: threads.map(|(name, used)| (name, used * scale / messages)).collect(),
        server_share: server / between / cores,
        client_share: client / between / cores,
        others_share: ((busy - server - client) / between / cores).max(0.0),
        syncs_per_second: syncs.map(|(count, _)| count / between),
        messages_per_sync: syncs.map(|(count, _)| messages / seconds * between / count),
        bytes_per_sync: syncs.map(|(count, bytes)| bytes / count),
    })
}

#[expect(clippy::cast_precision_loss, reason = "rates are for reading")]
pub fn number(count: u64) -> f64 {
    count as f64
}
