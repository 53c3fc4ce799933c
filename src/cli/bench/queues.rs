//! `holdfast bench queues`: what a broker makes of many topics and queues.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use serde::Serialize;
use tokio::task::JoinSet;

use super::{
    Level, make_topic,
    process::{self, Holds},
    send::join,
};
use crate::{
    cli::{
        Exit, Failure, Session, output,
        values::{self, Size},
    },
    client::{Batch, Code, Connection, OutgoingMessage, Pull, TopicChange},
};

/// Tries of a call that the broker refuses because it has too much to do.
const TRIES: u32 = 100;

/// Many topics on a broker.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct Many {
    /// Topics: PREFIX-0, PREFIX-1 and so on.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    topics: u32,
    /// Queues of each.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    queues: u32,
    /// What their names begin with.
    #[arg(long, value_name = "PREFIX", default_value = "bench-queues")]
    prefix: String,
    /// What to do, in this order.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "create,write,read")]
    phases: Vec<Phase>,
    /// Durability of topics that have to be made.
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "sync")]
    durability: Level,
    /// Bytes of a message's body.
    #[arg(long, value_name = "SIZE", default_value = "1KiB")]
    size: Size,
    /// Calls at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    in_flight: u32,
    /// Process id of a broker on this machine, to show its memory and open files.
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
}

/// One pass over all topics or queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Phase {
    /// Make the topics that are not there.
    Create,
    /// Send a message to each queue.
    Write,
    /// Pull once from each queue, from its start.
    Read,
    /// Delete the topics.
    Delete,
}

/// What a phase took.
#[derive(Serialize)]
struct Outcome {
    phase: Phase,
    calls: u64,
    messages: u64,
    seconds: f64,
    calls_per_second: f64,
    server: Option<Holds>,
}

impl Phase {
    fn calls(self, many: &Many) -> u64 {
        let topics = u64::from(many.topics);
        match self {
            Self::Create | Self::Delete => topics,
            Self::Write | Self::Read => topics * u64::from(many.queues),
        }
    }
}

/// Runs all phases.
pub(super) async fn run(session: &Session, many: Many) -> Result<Exit, Failure> {
    let many = Arc::new(many);
    for &phase in &many.phases {
        let outcome = one(session, &many, phase).await?;
        if session.is_json() {
            output::json(&outcome)?;
        } else {
            output::line(shown(&outcome))?;
        }
    }
    Ok(Exit::Ok)
}

fn shown(outcome: &Outcome) -> String {
    let phase = format!("{:?}", outcome.phase).to_lowercase();
    let (calls, rate) = (values::count(outcome.calls), values::count(outcome.calls_per_second as u64));
    let mut line = format!("{phase:<8} {calls:>10} calls   {:8.2} s   {rate:>8}/s", outcome.seconds);
    if let Some(server) = outcome.server {
        line.push_str(&format!(
            "   server: {} own memory, {} with maps, {} handles",
            values::size(server.anonymous_bytes),
            values::size(server.resident_bytes),
            server.handles
        ));
    }
    line
}

async fn one(session: &Session, many: &Arc<Many>, phase: Phase) -> Result<Outcome, Failure> {
    let total = phase.calls(many);
    let (next, found) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    let connections = many.in_flight.div_ceil(64).max(2);
    let mut connected = Vec::new();
    for _ in 0..connections {
        connected.push(Connection::new(session.broker.endpoint().clone())?);
    }
    for connection in connected.iter().cycle().take(many.in_flight as usize) {
        let (many, next, found, connection) =
            (Arc::clone(many), Arc::clone(&next), Arc::clone(&found), connection.clone());
        tasks.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= total {
                    return Ok(());
                }
                let messages = call(&connection, &many, phase, number).await?;
                found.fetch_add(messages, Ordering::Relaxed);
            }
        });
    }
    let mut all = std::pin::pin!(join(tasks));
    let mut ticks = tokio::time::interval(Duration::from_secs(2));
    ticks.tick().await;
    loop {
        tokio::select! {
            ended = &mut all => break ended?,
            () = session.stop.cancelled() => return Err(Failure::quiet(Exit::Interrupted)),
            _ = ticks.tick() => {
                let done = next.load(Ordering::Relaxed).min(total);
                output::note(format!("{phase:?} {} of {}", values::count(done), values::count(total)));
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    Ok(Outcome {
        phase,
        calls: total,
        messages: found.load(Ordering::Relaxed),
        seconds,
        calls_per_second: total as f64 / seconds.max(1e-9),
        server: many.server_pid.and_then(process::holds),
    })
}

/// The call with this number; messages sent or found.
async fn call(connection: &Connection, many: &Many, phase: Phase, number: u64) -> Result<u64, Failure> {
    let topics = u64::from(many.topics);
    // Neighbouring calls go to different topics, as they would in life.
    let topic = format!("{}-{}", many.prefix, number % topics);
    let queue = u32::try_from(number / topics).unwrap_or(u32::MAX);
    let mut refused = 0;
    loop {
        let outcome = match phase {
            Phase::Create => {
                let settings = TopicChange {
                    queues: Some(many.queues),
                    durability: Some(many.durability.into()),
                    ..TopicChange::default()
                };
                make_topic(connection, &topic, settings).await.map(|()| 0)
            }
            Phase::Delete => connection.delete_topic(&topic).await.map(|()| 0),
            Phase::Write => {
                let size = usize::try_from(many.size.0).unwrap_or(0);
                let messages = vec![OutgoingMessage::new(vec![b'x'; size])];
                let batch = Batch { queue: Some(queue), ..Batch::new(topic.clone(), messages) };
                connection.send(batch).await.map(|_| 1)
            }
            Phase::Read => {
                let pulled = connection.pull(&Pull::new(topic.clone(), queue, 0)).await;
                pulled.map(|pulled| pulled.messages.len() as u64)
            }
        };
        match outcome {
            Ok(messages) => return Ok(messages),
            Err(error) => match (error.code(), error.retry_after()) {
                (Code::ResourceExhausted, Some(pause)) if refused < TRIES => {
                    refused += 1;
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(error.into()),
            },
        }
    }
}
