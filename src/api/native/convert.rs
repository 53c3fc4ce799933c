//! Wire values to domain values and back. What has no meaning is refused with the name of its field.

use std::time::Duration;

use prost_types::Timestamp;

use super::status;
use crate::{
    broker::{
        self, Commit, CommitCommand, CommitOutcome, GroupChange, GroupDescription, GroupInfo, ListCommand,
        OffsetsCommand, QueryBy, QueryCommand, QueueInfo, QueueLag, ResetCommand, ResetTo, State, TimeBound,
        TopicChange, TopicDescription, TopicInfo,
    },
    model::{DurabilityLevel, Invalid, StartFrom, TopicType, Visibility},
    pb::v1,
};

/// `google.protobuf.Timestamp` is within the years 1 to 9999.
const SECONDS: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;
/// `google.protobuf.Duration` is within ± 10 000 years.
const DURATION_SECONDS_MAX: i64 = 315_576_000_000;
const NANOS: i32 = 1_000_000_000;
const NANOS_A_MS: u32 = 1_000_000;

type Checked<T> = Result<T, Invalid>;

// ---- Times ----------------------------------------------------------------------------------

/// Which millisecond a finer time stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    Down,
    Up,
}

/// Milliseconds since 1970; earlier times count as 1970, when nothing had been stored.
fn milliseconds(field: &str, time: Timestamp, round: Round) -> Checked<u64> {
    if !SECONDS.contains(&time.seconds) || !(0..NANOS).contains(&time.nanos) {
        return Err(Invalid::new(
            field,
            format!(
                "is no time (seconds {}, nanos {}); use the years 1 to 9999 and nanos 0 to 999999999",
                time.seconds, time.nanos
            ),
        ));
    }
    let (Ok(seconds), Ok(nanos)) = (u64::try_from(time.seconds), u32::try_from(time.nanos)) else {
        return Ok(0);
    };
    let part = match round {
        Round::Down => nanos / NANOS_A_MS,
        Round::Up => nanos.div_ceil(NANOS_A_MS),
    };
    Ok(seconds.saturating_mul(1000).saturating_add(u64::from(part)))
}

/// A wire duration that is not negative.
pub(super) fn duration(field: &str, seconds: i64, nanos: i32) -> Checked<Duration> {
    let in_range = (0..=DURATION_SECONDS_MAX).contains(&seconds) && (0..NANOS).contains(&nanos);
    match (u64::try_from(seconds), u32::try_from(nanos)) {
        (Ok(seconds), Ok(nanos)) if in_range => Ok(Duration::new(seconds, nanos)),
        _ => Err(Invalid::new(
            field,
            format!(
                "is no duration from now on (seconds {seconds}, nanos {nanos}); use seconds from 0 and nanos 0 to 999999999"
            ),
        )),
    }
}

/// As the wire has it.
pub(super) fn to_duration(duration: Duration) -> prost_types::Duration {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(DURATION_SECONDS_MAX).min(DURATION_SECONDS_MAX);
    prost_types::Duration { seconds, nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0) }
}

/// As the wire has it.
pub(super) fn to_timestamp(ms: u64) -> Timestamp {
    let seconds = i64::try_from(ms / 1000).unwrap_or(*SECONDS.end());
    Timestamp { seconds, nanos: i32::try_from(ms % 1000).unwrap_or(0).saturating_mul(1_000_000) }
}

/// Offsets and positions are far below the limit of the wire.
pub(super) fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// An enum number, `None` when it is unspecified.
fn choice<E: TryFrom<i32> + PartialEq, T>(
    field: &str,
    number: i32,
    known: impl FnOnce(E) -> Option<T>,
) -> Checked<Option<T>> {
    match E::try_from(number) {
        Ok(value) => Ok(known(value)),
        Err(_) => Err(Invalid::new(field, format!("is {number}, which is not one of its values"))),
    }
}

// ---- Offsets --------------------------------------------------------------------------------

pub(super) fn commit(request: v1::CommitOffsetsRequest) -> CommitCommand {
    let offsets = request
        .offsets
        .into_iter()
        .map(|entry| broker::QueueOffset { topic: entry.topic, queue: entry.queue_id, offset: entry.offset })
        .collect();
    CommitCommand { group: request.group, offsets }
}

pub(super) fn committed(commit: &Commit) -> v1::CommitResult {
    let (outcome, error) = match &commit.outcome {
        CommitOutcome::Committed => (v1::CommitOutcome::Committed, None),
        CommitOutcome::Stale => (v1::CommitOutcome::CommitStale, None),
        CommitOutcome::OutOfRange => (v1::CommitOutcome::CommitOutOfRange, None),
        CommitOutcome::Failed(error) => (v1::CommitOutcome::CommitFailed, Some(status::call_error(error))),
    };
    v1::CommitResult { outcome: outcome.into(), committed: commit.committed.map(to_i64), error }
}

pub(super) fn offsets(request: v1::GetOffsetsRequest) -> Checked<OffsetsCommand> {
    let bound = choice("bound", request.bound, |bound: v1::TimestampBound| match bound {
        v1::TimestampBound::Unspecified | v1::TimestampBound::FirstAtOrAfter => {
            Some(TimeBound::FirstAtOrAfter)
        }
        v1::TimestampBound::LastAtOrBefore => Some(TimeBound::LastAtOrBefore),
    })?
    .unwrap_or(TimeBound::FirstAtOrAfter);
    let round = match bound {
        TimeBound::FirstAtOrAfter => Round::Up,
        TimeBound::LastAtOrBefore => Round::Down,
    };
    let at = match request.timestamp {
        None => None,
        Some(time) => Some((milliseconds("timestamp", time, round)?, bound)),
    };
    let queues = request.queues.into_iter().map(|queue| (queue.topic, queue.queue_id)).collect();
    Ok(OffsetsCommand { queues, group: request.group, at })
}

pub(super) fn queue_offsets(offsets: broker::QueueOffsets) -> v1::QueueOffsets {
    v1::QueueOffsets {
        topic: offsets.topic.as_str().to_owned(),
        queue_id: offsets.queue,
        min_offset: to_i64(offsets.min_offset),
        max_offset: to_i64(offsets.max_offset),
        committed: offsets.committed.map(to_i64),
        by_timestamp: offsets.by_time.map(to_i64),
    }
}

pub(super) fn reset(request: v1::ResetOffsetsRequest) -> Checked<ResetCommand> {
    use v1::reset_offsets_request::To;
    let to = match request.to {
        None => None,
        Some(To::Earliest(true)) => Some(ResetTo::Earliest),
        Some(To::Latest(true)) => Some(ResetTo::Latest),
        Some(To::Earliest(false)) => {
            return Err(Invalid::new("earliest", "is false; set it to true, or name another place"));
        }
        Some(To::Latest(false)) => {
            return Err(Invalid::new("latest", "is false; set it to true, or name another place"));
        }
        Some(To::Offset(offset)) => Some(ResetTo::Offset(offset)),
        Some(To::Timestamp(time)) => Some(ResetTo::Time(milliseconds("timestamp", time, Round::Up)?)),
    };
    Ok(ResetCommand {
        group: request.group,
        topic: request.topic,
        queue: request.queue_id,
        to,
        dry_run: request.dry_run,
    })
}

pub(super) fn was_reset(result: broker::ResetResult) -> v1::ResetResult {
    v1::ResetResult { queue_id: result.queue, from: result.from.map(to_i64), to: to_i64(result.to) }
}

// ---- Look-up --------------------------------------------------------------------------------

pub(super) fn query(request: v1::QueryMessagesRequest) -> Checked<QueryCommand> {
    use v1::query_messages_request::By;
    let by = request.by.map(|by| match by {
        By::MessageId(id) => QueryBy::Id(id),
        By::Key(key) => QueryBy::Key(key),
        By::Place(place) => QueryBy::Place { queue: place.queue_id, offset: place.offset },
    });
    let bound =
        |field, time: Option<Timestamp>| time.map(|time| milliseconds(field, time, Round::Up)).transpose();
    Ok(QueryCommand {
        topic: request.topic,
        by,
        begin_ms: bound("begin", request.begin)?,
        end_ms: bound("end", request.end)?,
        limit: request.limit,
    })
}

// ---- Topics ---------------------------------------------------------------------------------

pub(super) fn topic_change(settings: Option<v1::TopicSettings>) -> Checked<TopicChange> {
    let Some(settings) = settings else { return Ok(TopicChange::default()) };
    let kind = choice("settings.type", settings.r#type, |kind: v1::TopicType| match kind {
        v1::TopicType::Unspecified => None,
        v1::TopicType::TopicNormal => Some(TopicType::Normal),
        v1::TopicType::TopicFifo => Some(TopicType::Fifo),
        v1::TopicType::TopicMixed => Some(TopicType::Mixed),
    })?;
    let durability =
        choice("settings.durability", settings.durability, |level: v1::DurabilityLevel| match level {
            v1::DurabilityLevel::Unspecified => None,
            v1::DurabilityLevel::Sync => Some(DurabilityLevel::Sync),
            v1::DurabilityLevel::Async => Some(DurabilityLevel::Async),
        })?;
    let visibility =
        choice("settings.visibility", settings.visibility, |visibility: v1::Visibility| match visibility {
            v1::Visibility::Unspecified => None,
            v1::Visibility::Appended => Some(Visibility::Appended),
            v1::Visibility::Flushed => Some(Visibility::Flushed),
        })?;
    let retention_age = settings
        .retention_age
        .map(|age| duration("settings.retention_age", age.seconds, age.nanos))
        .transpose()?;
    Ok(TopicChange {
        queues: settings.queues,
        kind,
        durability,
        visibility,
        retention_age,
        retention_bytes: settings.retention_bytes,
    })
}

pub(super) fn topic(info: &TopicInfo) -> v1::Topic {
    let settings = &info.settings;
    let kind = match settings.kind {
        TopicType::Normal => v1::TopicType::TopicNormal,
        TopicType::Fifo => v1::TopicType::TopicFifo,
        TopicType::Mixed => v1::TopicType::TopicMixed,
    };
    let durability = match settings.durability {
        DurabilityLevel::Sync => v1::DurabilityLevel::Sync,
        DurabilityLevel::Async => v1::DurabilityLevel::Async,
    };
    let visibility = match settings.visibility {
        Visibility::Appended => v1::Visibility::Appended,
        Visibility::Flushed => v1::Visibility::Flushed,
    };
    v1::Topic {
        topic: info.name.as_str().to_owned(),
        topic_id: info.id.0,
        settings: Some(v1::TopicSettings {
            queues: Some(settings.queues),
            r#type: kind.into(),
            durability: durability.into(),
            visibility: visibility.into(),
            retention_age: Some(to_duration(settings.retention.age.unwrap_or_default())),
            retention_bytes: Some(settings.retention.bytes.unwrap_or_default()),
        }),
        queue_map_version: info.map_version,
        queue_map_queues: info.map_queues,
    }
}

pub(super) fn topic_description(description: TopicDescription) -> v1::TopicDescription {
    let queue = |queue: &QueueInfo| v1::QueueDescription {
        queue_id: queue.queue,
        min_offset: to_i64(queue.min_offset),
        max_offset: to_i64(queue.max_offset),
        bytes: queue.bytes,
        oldest: queue.oldest_ms.map(to_timestamp),
        newest: queue.newest_ms.map(to_timestamp),
    };
    v1::TopicDescription {
        topic: Some(topic(&description.topic)),
        queues: description.queues.iter().map(queue).collect(),
        groups: description.groups.iter().map(|group| group.as_str().to_owned()).collect(),
        promise: description.promise,
    }
}

// ---- Groups ---------------------------------------------------------------------------------

pub(super) fn group_change(settings: Option<v1::GroupSettings>) -> Checked<GroupChange> {
    let Some(settings) = settings else { return Ok(GroupChange::default()) };
    let start_from = choice("settings.start_from", settings.start_from, |from: v1::StartFrom| match from {
        v1::StartFrom::Unspecified => None,
        v1::StartFrom::Earliest => Some(StartFrom::Earliest),
        v1::StartFrom::Latest => Some(StartFrom::Latest),
    })?;
    Ok(GroupChange { start_from })
}

pub(super) fn group(info: &GroupInfo) -> v1::Group {
    let start_from = match info.settings.start_from {
        StartFrom::Earliest => v1::StartFrom::Earliest,
        StartFrom::Latest => v1::StartFrom::Latest,
    };
    v1::Group {
        group: info.name.as_str().to_owned(),
        group_id: info.id.0,
        settings: Some(v1::GroupSettings { start_from: start_from.into() }),
    }
}

pub(super) fn group_description(description: &GroupDescription) -> v1::GroupDescription {
    let queue = |lag: &QueueLag| v1::QueueLag {
        topic: lag.topic.as_str().to_owned(),
        queue_id: lag.queue,
        committed: to_i64(lag.committed),
        min_offset: to_i64(lag.min_offset),
        max_offset: to_i64(lag.max_offset),
        lag_messages: lag.lag_messages,
        lag_time: lag.lag_time.map(to_duration),
    };
    v1::GroupDescription {
        group: Some(group(&description.group)),
        queues: description.queues.iter().map(queue).collect(),
        lag_messages: description.lag_messages,
    }
}

pub(super) fn list(page_size: u32, page_token: String, prefix: String) -> ListCommand {
    ListCommand { page_size, page_token, prefix }
}

// ---- Node -----------------------------------------------------------------------------------

pub(super) fn shard(shard: broker::Status) -> v1::ShardStatus {
    let (state, state_reason) = match shard.state {
        State::Writable => (v1::ShardState::Writable, String::new()),
        State::DiskFull(reason) => (v1::ShardState::DiskFull, reason),
        State::Fenced(reason) => (v1::ShardState::Fenced, reason),
        State::Stopping => (v1::ShardState::Stopping, String::new()),
    };
    let damage = |damage: broker::Damage| v1::Damage {
        file: damage.file,
        begin: damage.begin,
        end: damage.end,
        text: damage.text,
    };
    v1::ShardStatus {
        shard: shard.shard,
        epoch: shard.epoch,
        state: state.into(),
        state_reason,
        data_dir: shard.data_dir,
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
        flush_interval: Some(to_duration(Duration::from_millis(shard.flush_interval_ms))),
        snapshot_position: shard.snapshot_position,
        damage: shard.damage.into_iter().map(damage).collect(),
        damage_total: shard.damage_total,
        recovery_time: Some(to_duration(Duration::from_millis(shard.recovery_ms))),
        recovery_bytes: shard.recovery_bytes,
        clean_start: shard.clean_start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finer_time_stands_for_the_millisecond_that_keeps_its_meaning() {
        let time = Timestamp { seconds: 1, nanos: 1_000_001 };
        assert_eq!(milliseconds("t", time, Round::Up), Ok(1002));
        assert_eq!(milliseconds("t", time, Round::Down), Ok(1001));
        let early = Timestamp { seconds: -62_135_596_800, nanos: 0 };
        assert_eq!(milliseconds("t", early, Round::Up), Ok(0), "the earliest time there is");
    }

    #[test]
    fn times_out_of_range_name_their_field() {
        for (seconds, nanos) in [(i64::MAX, 0), (i64::MIN, 0), (0, -1), (0, NANOS), (0, i32::MAX)] {
            let time = Timestamp { seconds, nanos };
            assert_eq!(milliseconds("begin", time, Round::Up).unwrap_err().field, "begin");
            assert_eq!(duration("wait", seconds, nanos).unwrap_err().field, "wait");
        }
        assert!(duration("wait", -1, 0).is_err() && duration("wait", 0, NANOS - 1).is_ok());
    }

    #[test]
    fn an_unknown_choice_names_its_field() {
        let settings = v1::TopicSettings { visibility: 77, ..Default::default() };
        assert_eq!(topic_change(Some(settings)).unwrap_err().field, "settings.visibility");
        let request = v1::GetOffsetsRequest { bound: -1, ..Default::default() };
        assert_eq!(offsets(request).unwrap_err().field, "bound");
        let request = v1::ResetOffsetsRequest {
            to: Some(v1::reset_offsets_request::To::Latest(false)),
            ..Default::default()
        };
        assert_eq!(reset(request).unwrap_err().field, "latest");
    }

    #[test]
    fn absent_settings_change_nothing() {
        assert_eq!(topic_change(None), Ok(TopicChange::default()));
        assert_eq!(topic_change(Some(v1::TopicSettings::default())), Ok(TopicChange::default()));
    }
}
