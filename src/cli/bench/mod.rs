//! `holdfast bench`: how fast a broker is, with the figures one needs to judge it.
//!
//! [`send`], [`pull`] and [`roundtrip`] put load on a broker from tasks of this process; [`Meter`] counts what ends
//! within the measured time. [`probe`] measures the device that an OK waits for, [`cpu`] what a message costs.

mod cpu;
mod held;
mod meter;
pub mod probe;
mod process;
mod pull;
mod queues;
mod roundtrip;
mod send;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::{Args, Subcommand, ValueEnum};

use super::{
    Exit, Failure, Session, output,
    values::{self, Size, Span},
};
use crate::{
    client::{Code, Connection, Error, TopicChange},
    model::{DurabilityLevel, MAX_BATCH_BYTES, MAX_BODY_BYTES},
};
use meter::{Meter, Outcome};
use probe::Probe;

/// What a message takes on the wire beside its body, at most.
const OVERHEAD_BYTES: u64 = 64;
/// Topics made for a run keep little, so that a run does not fill the disk.
const KEPT: Duration = Duration::from_secs(3600);

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Send as fast as the broker takes it.
    #[command(after_help = SEND_HELP)]
    Send(Load),
    /// Read a topic over and over.
    #[command(after_help = PULL_HELP)]
    Pull(Load),
    /// Send a message, wait until a waiting pull has brought it back, send the next.
    #[command(after_help = ROUNDTRIP_HELP)]
    Roundtrip(Load),
    /// Let many pulls wait, then wake them all at once.
    #[command(after_help = HELD_HELP)]
    Held(held::Held),
    /// Make many topics, write to each queue, read each queue.
    #[command(after_help = QUEUES_HELP)]
    Queues(queues::Many),
    /// Write and sync a file: what the device gives without a broker.
    #[command(after_help = PROBE_HELP)]
    Probe {
        /// Where to write the file (128 MiB, removed afterwards).
        #[arg(value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
}

const SEND_HELP: &str = "\
Each call carries --batch messages. Without --streams, --in-flight calls run at once in all; with it, each stream
has that many batches in flight. Latency is that of a call: from handing it over to its OK.

The topic is made when it is not there (bench-sync or bench-async, kept for an hour).

Examples:
  holdfast bench send                                           one message at a time, synced
  holdfast bench send --in-flight 64
  holdfast bench send --batch 64 --in-flight 16 --durability async
  holdfast bench send --batch 64 --streams 4 --connections 4 --data-dir ./data --server-pid $(pidof holdfast)
  holdfast bench send --duration 30s --size 4KiB -o json > result.json";

const PULL_HELP: &str = "\
Each pull asks for --batch messages; --in-flight pulls run at once, spread over the queues.

Examples:
  holdfast bench send --batch 64 --in-flight 16 && holdfast bench pull --batch 64 --in-flight 4
  holdfast bench pull --topic orders --batch 1024";

const ROUNDTRIP_HELP: &str = "\
Shows two latencies: until the sender had its OK, and until a pull that was waiting had the message.

Examples:
  holdfast bench roundtrip
  holdfast bench roundtrip --in-flight 16 --durability async";

const HELD_HELP: &str = "\
Shows what a pull that waits costs the broker (with --server-pid), how fast all of them have a message that they
waited for, and what another client notices of it. Needs as many open files as --connections.

Example:
  holdfast bench held --pulls 100000 --connections 50 --server-pid $(pidof holdfast)";

const QUEUES_HELP: &str = "\
Shows the rate of each phase and, with --server-pid, what the broker's process holds after it.

Examples:
  holdfast bench queues --topics 10000 --queues 8 --server-pid $(pidof holdfast)
  holdfast bench queues --topics 10000 --queues 100 --phases create";

const PROBE_HELP: &str = "\
Writes 4 KiB, then 1 MiB at a time into a file filled with zeros, each write followed by fdatasync.

Example:
  holdfast bench probe ./data";

/// Load on a broker.
#[derive(Clone, Debug, Args)]
pub(super) struct Load {
    /// The topic; otherwise bench-sync or bench-async.
    #[arg(long, short)]
    topic: Option<String>,
    /// Durability of the topic, when it has to be made.
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "sync")]
    durability: Level,
    /// Queues of the topic, when it has to be made.
    #[arg(long, value_name = "N", default_value_t = 4)]
    queues: u32,
    /// Bytes of a message's body.
    #[arg(long, value_name = "SIZE", default_value = "1KiB")]
    size: Size,
    /// Messages in a call.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    batch: u32,
    /// Calls at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    in_flight: u32,
    /// Send over this many streams; 0: a call of its own for each batch.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=4096))]
    streams: u32,
    /// Connections to spread the load over.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    connections: u32,
    /// How long to measure.
    #[arg(long, short, value_name = "SPAN", default_value = "10s")]
    duration: Span,
    /// How long to run before measuring.
    #[arg(long, value_name = "SPAN", default_value = "500ms")]
    warm_up: Span,
    /// Threads of this process that make the load.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: u16,
    /// Process id of a broker on this machine, to show its CPU time.
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Data directory of a broker on this machine: measure its device before and after.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Level {
    Sync,
    Async,
}

impl From<Level> for DurabilityLevel {
    fn from(level: Level) -> Self {
        match level {
            Level::Sync => Self::Sync,
            Level::Async => Self::Async,
        }
    }
}

impl Command {
    /// Threads to run on.
    pub(super) fn threads(&self) -> u16 {
        match self {
            Self::Send(load) | Self::Pull(load) | Self::Roundtrip(load) => load.threads,
            Self::Probe { .. } | Self::Queues(_) | Self::Held(_) => 1,
        }
    }
}

pub(super) async fn run(session: Session, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Probe { dir } => {
            let probe = probe_of(&dir)?;
            if session.is_json() {
                output::json(&probe)?;
            } else {
                output::line(format_args!("4 KiB write and sync  {}", probe.small))?;
                output::line(format_args!("1 MiB write and sync  {}", probe.large))?;
            }
            Ok(Exit::Ok)
        }
        Command::Held(held) => held::run(&session, held).await,
        Command::Queues(many) => queues::run(&session, many).await,
        Command::Send(load) => measure(&session, load, "send", send::start).await,
        Command::Pull(load) => measure(&session, load, "pull", pull::start).await,
        Command::Roundtrip(load) => measure(&session, load, "roundtrip", roundtrip::start).await,
    }
}

/// What the tasks of a run share.
struct Rig {
    load: Load,
    topic: String,
    /// At least one.
    connections: Vec<Connection>,
    queues: Vec<u32>,
    meter: Meter,
}

impl Rig {
    /// The connection of the task with this number.
    fn connection(&self, number: u32) -> Option<Connection> {
        let count = self.connections.len().max(1);
        self.connections.get(usize::try_from(number).unwrap_or(0) % count).cloned()
    }

    fn body(&self) -> bytes::Bytes {
        // Text that does not compress to nothing, should anything on the way try.
        let size = usize::try_from(self.load.size.0).unwrap_or(0);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        (0..size)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                b'a' + u8::try_from(state % 26).unwrap_or(0)
            })
            .collect::<Vec<u8>>()
            .into()
    }
}

/// Sets a run up, lets its tasks run, and shows the result.
async fn measure<F>(
    session: &Session,
    load: Load,
    what: &'static str,
    start: impl FnOnce(Arc<Rig>) -> F,
) -> Result<Exit, Failure>
where
    F: Future<Output = Result<(), Failure>>,
{
    check(&load)?;
    let topic = load.topic.clone().unwrap_or_else(|| {
        match load.durability {
            Level::Sync => "bench-sync",
            Level::Async => "bench-async",
        }
        .to_owned()
    });
    let described = topic_for(session, &load, &topic).await?;
    let mut connections = vec![session.broker.clone()];
    for _ in 1..load.connections {
        connections.push(Connection::new(session.broker.endpoint().clone())?);
    }
    let before = load.data_dir.as_deref().map(probe_of).transpose()?;
    let rig = Arc::new(Rig {
        meter: Meter::new(load.warm_up.0, load.duration.0),
        queues: described.queues.iter().map(|queue| queue.queue).collect(),
        topic,
        connections,
        load,
    });
    let outcome = watch(session, &rig, start).await?;
    let after = rig.load.data_dir.as_deref().map(probe_of).transpose()?;
    let level = described.topic.settings.durability;
    let report = meter::Report::new(what, &rig, level, &outcome, before.zip(after));
    if session.is_json() {
        output::json(&report)?;
    } else {
        report.print()?;
    }
    match outcome.interrupted {
        true => Err(Failure::quiet(Exit::Interrupted)),
        false => Ok(Exit::Ok),
    }
}

/// Runs the tasks with a line each second; ends early when interrupted.
async fn watch<F>(
    session: &Session,
    rig: &Arc<Rig>,
    start: impl FnOnce(Arc<Rig>) -> F,
) -> Result<Outcome, Failure>
where
    F: Future<Output = Result<(), Failure>>,
{
    let meter = &rig.meter;
    let mut tasks = std::pin::pin!(start(rig.clone()));
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.tick().await;
    let mut cpu_begin = None;
    let mut measuring = std::pin::pin!(tokio::time::sleep_until(meter.from.into()));
    let mut over = std::pin::pin!(tokio::time::sleep_until(meter.until.into()));
    let interrupted = loop {
        tokio::select! {
            // Before the tasks: what is measured begins and ends on time.
            biased;
            () = session.stop.cancelled() => break true,
            () = &mut over => break false,
            () = &mut measuring, if cpu_begin.is_none() => cpu_begin = Some(cpu::read(rig.load.server_pid)),
            _ = ticks.tick() => output::note(meter.line()),
            ended = &mut tasks => {
                ended?;
                break false;
            }
        }
    };
    let cpu = cpu_begin.map(|begin| begin.until(&cpu::read(rig.load.server_pid)));
    meter.stop();
    Ok(meter.outcome(interrupted, cpu.unwrap_or_default()))
}

fn probe_of(dir: &Path) -> Result<Probe, Failure> {
    probe::measure(dir)
        .map_err(|error| Failure::new(Exit::Failed, format!("probe of {}: {error}", dir.display())))
}

/// What cannot be sent is said before anything is.
fn check(load: &Load) -> Result<(), Failure> {
    let (size, most) = (load.size.0, u64::try_from(MAX_BODY_BYTES).unwrap_or(u64::MAX));
    if !(1..=most).contains(&size) {
        return Err(Failure::usage(format!("--size is {size} bytes; a message has 1 byte to 4 MiB")));
    }
    let call = (size + OVERHEAD_BYTES) * u64::from(load.batch);
    if call > u64::try_from(MAX_BATCH_BYTES).unwrap_or(u64::MAX) {
        return Err(Failure::usage(format!(
            "--size times --batch is {}; a call takes at most 16 MiB",
            values::size(call)
        )));
    }
    if load.duration.0.is_zero() {
        return Err(Failure::usage("--duration is 0; measure for 1s at least"));
    }
    Ok(())
}

/// Makes the topic; one that is there already is as good.
async fn make_topic(broker: &Connection, topic: &str, settings: TopicChange) -> Result<(), Error> {
    match broker.create_topic(topic, settings).await {
        Err(error) if error.code() == Code::AlreadyExists => Ok(()),
        made => made.map(drop),
    }
}

/// The topic, made if need be.
async fn topic_for(
    session: &Session,
    load: &Load,
    topic: &str,
) -> Result<crate::client::TopicDescription, Failure> {
    match session.broker.describe_topic(topic).await {
        Err(error) if error.code() == Code::NotFound => {
            let settings = TopicChange {
                queues: Some(load.queues),
                durability: Some(load.durability.into()),
                retention_age: Some(Some(KEPT)),
                ..TopicChange::default()
            };
            session.broker.create_topic(topic, settings).await?;
            Ok(session.broker.describe_topic(topic).await?)
        }
        found => Ok(found?),
    }
}
