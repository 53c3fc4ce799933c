//! `holdfast status`: how the broker is.

use std::{collections::BTreeMap, time::SystemTime};

use serde::Serialize;

use super::{
    Exit, Failure, Session,
    output::{self, BAD, BOLD, DIM, GOOD, WARN, paint},
    values,
};
use crate::client::{Damage, ShardState, ShardStatus};

/// Bytes without sync that are worth a word.
const WORTH_A_WORD: u64 = 4 << 10;

/// Ends of connections that nobody needs to look at.
const ORDINARY: [&str; 2] = ["client", "stop"];

/// `status` takes global options only.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(super) struct Args {}

const HELP: &str = "\
Examples:
  holdfast status
  holdfast status --endpoint broker.example:8081 -o json";

pub(super) async fn run(session: Session, _args: Args) -> Result<Exit, Failure> {
    let node = session.broker.node_status().await?;
    if session.is_json() {
        output::json(&JsonNode {
            version: &node.version,
            node: &node.node,
            started: node.started.map(values::time),
            connections: node.connections,
            held_pulls: node.held_pulls,
            connections_closed: by_reason(&node.connections_closed),
            connections_refused: by_reason(&node.connections_refused),
            shards: node.shards.iter().map(JsonShard::from).collect(),
        })?;
        return Ok(Exit::Ok);
    }
    let up = node.started.and_then(|started| SystemTime::now().duration_since(started).ok());
    let up = up.map(|up| format!(", up {}", values::span(up))).unwrap_or_default();
    output::line(format_args!(
        "{}  holdfast {}{up}, {}, {}",
        paint(BOLD, if node.node.is_empty() { session.broker.endpoint().as_str() } else { &node.node }),
        node.version,
        values::plural(node.connections, "connection", "connections"),
        values::plural(node.held_pulls, "waiting pull", "waiting pulls"),
    ))?;
    for (what, counts) in [("closed", &node.connections_closed), ("refused", &node.connections_refused)] {
        let counts: Vec<String> = counts
            .iter()
            .filter(|(reason, count)| *count > 0 && !ORDINARY.contains(&reason.as_str()))
            .map(|(reason, count)| format!("{count} {reason}"))
            .collect();
        if !counts.is_empty() {
            output::line(format_args!("connections {what}: {}", paint(WARN, counts.join(", "))))?;
        }
    }
    node.shards.iter().try_for_each(show)?;
    Ok(Exit::Ok)
}

fn by_reason(counts: &[(String, u64)]) -> BTreeMap<&str, u64> {
    counts.iter().map(|(reason, count)| (reason.as_str(), *count)).collect()
}

fn show(shard: &ShardStatus) -> Result<(), Failure> {
    let state = match shard.state {
        ShardState::Writable => paint(GOOD, "writable"),
        ShardState::DiskFull => paint(WARN, "disk full: sends are refused"),
        ShardState::Fenced => paint(BAD, "fenced: all writes are refused until it is restarted"),
        ShardState::Stopping => paint(WARN, "stopping"),
        ShardState::Unknown => paint(WARN, "unknown state"),
    };
    output::line(format_args!(
        "\n{}  {state}{}{}",
        paint(BOLD, &shard.shard),
        if shard.state_reason.is_empty() { "" } else { ": " },
        shard.state_reason
    ))?;
    let field = |name: &str, value: String| {
        output::line(format_args!("  {}  {value}", paint(DIM, format_args!("{name:<8}"))))
    };
    field("data", shard.data_dir.clone())?;
    field(
        "holds",
        format!(
            "{}, {}, {}",
            values::plural(shard.topics, "topic", "topics"),
            values::plural(shard.queues, "queue", "queues"),
            values::plural(shard.groups, "group", "groups")
        ),
    )?;
    let not_synced = shard.log_end.saturating_sub(shard.log_durable);
    // An idle log ends in a mark that nothing waits for.
    let synced = if not_synced < WORTH_A_WORD {
        String::new()
    } else {
        format!(", {} not yet synced", values::size(not_synced))
    };
    field(
        "log",
        format!(
            "{} in {} at {} to {}{synced}, epoch {}, snapshot at {}",
            values::size(shard.log_bytes),
            values::plural(shard.segments, "segment", "segments"),
            shard.log_start,
            shard.log_end,
            shard.epoch,
            shard.snapshot_position,
        ),
    )?;
    let limit = if shard.disk_limit_bytes == 0 {
        "no limit".to_owned()
    } else {
        format!("limit {}", values::size(shard.disk_limit_bytes))
    };
    field(
        "disk",
        format!(
            "{} free, sends stop below {}, {limit}",
            values::size(shard.disk_free_bytes),
            values::size(shard.disk_floor_bytes)
        ),
    )?;
    if let Some(interval) = shard.flush_interval {
        field("async", format!("synced within {}", values::span(interval)))?;
    }
    field(
        "start",
        format!(
            "{}, {} of log read in {}",
            if shard.clean_start { "after a clean stop" } else { "after a kill or crash" },
            values::size(shard.recovery_bytes),
            values::span(shard.recovery_time.unwrap_or_default()),
        ),
    )?;
    if shard.damage_total > 0 {
        field("damage", paint(BAD, values::plural(shard.damage_total, "place", "places")))?;
        for Damage { file, begin, end, text } in &shard.damage {
            output::line(format_args!("    {file} {begin} to {end}: {text}"))?;
        }
    }
    Ok(())
}

#[derive(Serialize)]
struct JsonNode<'a> {
    version: &'a str,
    node: &'a str,
    started: Option<String>,
    connections: u64,
    held_pulls: u64,
    connections_closed: BTreeMap<&'a str, u64>,
    connections_refused: BTreeMap<&'a str, u64>,
    shards: Vec<JsonShard<'a>>,
}

#[derive(Serialize)]
struct JsonShard<'a> {
    shard: &'a str,
    epoch: u32,
    state: &'static str,
    state_reason: &'a str,
    data_dir: &'a str,
    log_start: u64,
    log_durable: u64,
    log_end: u64,
    segments: u64,
    log_bytes: u64,
    disk_free_bytes: u64,
    disk_floor_bytes: u64,
    disk_limit_bytes: u64,
    topics: u64,
    queues: u64,
    groups: u64,
    flush_interval_seconds: Option<f64>,
    snapshot_position: u64,
    recovery_seconds: Option<f64>,
    recovery_bytes: u64,
    clean_start: bool,
    damage_total: u64,
    damage: Vec<JsonDamage<'a>>,
}

#[derive(Serialize)]
struct JsonDamage<'a> {
    file: &'a str,
    begin: u64,
    end: u64,
    text: &'a str,
}

impl<'a> From<&'a ShardStatus> for JsonShard<'a> {
    fn from(shard: &'a ShardStatus) -> Self {
        let damage = shard.damage.iter();
        Self {
            shard: &shard.shard,
            epoch: shard.epoch,
            state: match shard.state {
                ShardState::Unknown => "UNKNOWN",
                ShardState::Writable => "WRITABLE",
                ShardState::DiskFull => "DISK_FULL",
                ShardState::Fenced => "FENCED",
                ShardState::Stopping => "STOPPING",
            },
            state_reason: &shard.state_reason,
            data_dir: &shard.data_dir,
            log_start: shard.log_start,
            log_durable: shard.log_durable,
            log_end: shard.log_end,
            segments: shard.segments,
            log_bytes: shard.log_bytes,
            disk_free_bytes: shard.disk_free_bytes,
            disk_floor_bytes: shard.disk_floor_bytes,
            disk_limit_bytes: shard.disk_limit_bytes,
            topics: shard.topics,
            queues: shard.queues,
            groups: shard.groups,
            flush_interval_seconds: shard.flush_interval.map(|interval| interval.as_secs_f64()),
            snapshot_position: shard.snapshot_position,
            recovery_seconds: shard.recovery_time.map(|time| time.as_secs_f64()),
            recovery_bytes: shard.recovery_bytes,
            clean_start: shard.clean_start,
            damage_total: shard.damage_total,
            damage: damage
                .map(|d| JsonDamage { file: &d.file, begin: d.begin, end: d.end, text: &d.text })
                .collect(),
        }
    }
}
