//! `holdfast bench held`: what pulls that wait cost a broker, and how it wakes them all.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::task::JoinSet;

use super::{cpu, make_topic, process, send::join};
use crate::{
    cli::{
        Exit, Failure, Session, output,
        values::{self, Span},
    },
    client::{Batch, Connection, Endpoint, OutgoingMessage, Pull, TopicChange},
};

/// How long a pull waits before it is asked again.
const WAIT: Duration = Duration::from_secs(30);
/// A pause between two looks at the broker, and between two calls of the other client.
const TICK: Duration = Duration::from_millis(2);
/// Longest wait until the broker holds all pulls.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pulls that wait.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct Held {
    /// Pulls that wait at once.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pulls: u32,
    /// Connections to spread them over.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,
    /// The topic, made with one queue when it is not there; nobody else may use it.
    #[arg(long, short, default_value = "bench-held")]
    topic: String,
    /// How long they wait before they are woken.
    #[arg(long, value_name = "SPAN", default_value = "5s")]
    idle: Span,
    /// Process id of a broker on this machine, to show its memory and CPU time.
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
}

#[derive(Serialize)]
struct Report {
    pulls: u32,
    connections: u32,
    /// Until the broker held all of them.
    held_after_seconds: f64,
    /// Memory of the broker's own for each pull; with its share of a connection.
    bytes_a_pull: Option<u64>,
    /// Of one core, while all wait.
    idle_cpu_percent: Option<f64>,
    /// From the send until the last had its message.
    woken_after_seconds: f64,
    wakes_per_second: f64,
    /// Another client's calls while nothing happened, and while all were woken.
    other_p99_ms_before: f64,
    other_p99_ms_meanwhile: f64,
}

pub(super) async fn run(session: &Session, held: Held) -> Result<Exit, Failure> {
    let broker = &session.broker;
    let settings = TopicChange { queues: Some(1), ..TopicChange::default() };
    make_topic(broker, &held.topic, settings).await?;
    let ends = broker.offsets(&held.topic, &[0], None, None).await?;
    let end = ends.first().map_or(0, |queue| queue.max);

    let before = held.server_pid.and_then(process::holds);
    let begun = Instant::now();
    let woken = Arc::new(AtomicU64::new(0));
    let mut pulls = JoinSet::new();
    let mut connections = Vec::new();
    for _ in 0..held.connections {
        connections.push(Connection::new(broker.endpoint().clone())?);
    }
    for (number, connection) in (0..held.pulls).zip(connections.iter().cycle()) {
        let (connection, woken) = (connection.clone(), Arc::clone(&woken));
        let mut pull = Pull { wait: WAIT, ..Pull::new(held.topic.clone(), 0, end) };
        pull.client_id = format!("bench-{number}");
        pulls.spawn(async move {
            while connection.pull(&pull).await?.messages.is_empty() {}
            woken.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
    }
    while broker.node_status().await?.held_pulls < u64::from(held.pulls) {
        if let Some(ended) = pulls.try_join_next() {
            ended.map_err(failed)??;
        }
        if begun.elapsed() > PATIENCE {
            return Err(Failure::new(
                Exit::Failed,
                "the broker does not hold all of them; see its limits `pull.*`",
            ));
        }
        tokio::time::sleep(TICK).await;
    }
    let held_after_seconds = begun.elapsed().as_secs_f64();
    output::note(format!("{} pulls wait", values::count(u64::from(held.pulls))));
    let after = held.server_pid.and_then(process::holds);
    let bytes_a_pull = before.zip(after).map(|(before, after)| {
        after.anonymous_bytes.saturating_sub(before.anonymous_bytes) / u64::from(held.pulls)
    });

    let idle = cpu::read(held.server_pid);
    tokio::time::sleep(held.idle.0).await;
    let spent = idle.until(&cpu::read(held.server_pid)).server;
    let idle_cpu_percent =
        spent.map(|spent| 100.0 * spent.as_secs_f64() / held.idle.0.as_secs_f64().max(1e-9));

    let other = Other::start(broker.endpoint(), &held.topic);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let quiet = other.stop().await?;
    let other = Other::start(broker.endpoint(), &held.topic);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let begun = Instant::now();
    broker.send(Batch::new(held.topic.clone(), vec![OutgoingMessage::new("wake up")])).await?;
    tokio::select! {
        ended = join(pulls) => ended?,
        () = session.stop.cancelled() => return Err(Failure::quiet(Exit::Interrupted)),
    }
    let woken_after_seconds = begun.elapsed().as_secs_f64();
    let meanwhile = other.stop().await?;

    let report = Report {
        pulls: held.pulls,
        connections: held.connections,
        held_after_seconds,
        bytes_a_pull,
        idle_cpu_percent,
        woken_after_seconds,
        wakes_per_second: woken.load(Ordering::Relaxed) as f64 / woken_after_seconds.max(1e-9),
        other_p99_ms_before: p99_ms(&quiet),
        other_p99_ms_meanwhile: p99_ms(&meanwhile),
    };
    if session.is_json() {
        output::json(&report)?;
    } else {
        show(&report)?;
    }
    Ok(Exit::Ok)
}

fn show(report: &Report) -> Result<(), Failure> {
    let unknown = || "-".to_owned();
    output::line(format!(
        "{} pulls over {} connections: held after {:.2} s, {} a pull, {} of a core while they wait",
        values::count(u64::from(report.pulls)),
        report.connections,
        report.held_after_seconds,
        report.bytes_a_pull.map_or_else(unknown, values::size),
        report.idle_cpu_percent.map_or_else(unknown, |percent| format!("{percent:.1} %")),
    ))?;
    output::line(format!(
        "woken in {:.2} s, {} a second; another client's p99 {:.3} ms before, {:.3} ms meanwhile",
        report.woken_after_seconds,
        values::count(report.wakes_per_second as u64),
        report.other_p99_ms_before,
        report.other_p99_ms_meanwhile,
    ))
}

/// Another client, with a thread and a connection of its own, so that it notices the broker and not us.
struct Other {
    over: Arc<AtomicBool>,
    calls: tokio::task::JoinHandle<Result<Histogram<u64>, Failure>>,
}

impl Other {
    fn start(endpoint: &Endpoint, topic: &str) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (endpoint, topic, until) = (endpoint.clone(), topic.to_owned(), Arc::clone(&over));
        let calls = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(failed)?;
            runtime.block_on(async { calls(&Connection::new(endpoint)?, &topic, &until).await })
        });
        Self { over, calls }
    }

    /// Latencies of its calls, in microseconds.
    async fn stop(self) -> Result<Histogram<u64>, Failure> {
        self.over.store(true, Ordering::Relaxed);
        self.calls.await.map_err(failed)?
    }
}

/// One call after the other until it is over, and at least one.
async fn calls(broker: &Connection, topic: &str, over: &AtomicBool) -> Result<Histogram<u64>, Failure> {
    let mut latencies = Histogram::new(3).map_err(failed)?;
    // Connects.
    broker.offsets(topic, &[0], None, None).await?;
    loop {
        let begun = Instant::now();
        broker.offsets(topic, &[0], None, None).await?;
        latencies.saturating_record(u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX));
        if over.load(Ordering::Relaxed) {
            return Ok(latencies);
        }
        tokio::time::sleep(TICK).await;
    }
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Failed, error.to_string())
}

fn p99_ms(latencies: &Histogram<u64>) -> f64 {
    latencies.value_at_quantile(0.99) as f64 / 1000.0
}
