//! What callers ask of a broker, and what it answers. Plain values: raw as they came in, checked when
//! they come out.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::Error;
use crate::model::{
    DurabilityLevel, GroupId, GroupName, GroupSettings, Retention, StartFrom, TopicId, TopicName,
    TopicSettings, TopicType, Visibility,
};
pub use crate::store::{Damage, Reached, State, Status, TimeBound};

// ---- Send -----------------------------------------------------------------------------------

/// Messages for one queue of one topic.
#[derive(Clone, Debug, Default)]
pub struct SendCommand {
    /// Name of the topic.
    pub topic: String,
    /// Each an encoded `holdfast.v1.Message`, exactly as the client wrote it.
    pub messages: Vec<Bytes>,
    /// The queue to use; else chosen by message group, else by the broker.
    pub queue: Option<u32>,
    /// The version of the queue map that the sender relied on.
    pub map_version: Option<u64>,
}

/// Where the messages of one send are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Queue that took them.
    pub queue: u32,
    /// Offset of the first; the others follow without a gap.
    pub first_offset: u64,
    /// Their ids, in order.
    pub ids: MessageIds,
    /// Store time, milliseconds since 1970.
    pub store_ms: u64,
    /// What this OK promises.
    pub reached: Reached,
}

/// The ids of a batch, in one buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageIds {
    text: String,
    /// Length of each; an id has at most 64 bytes.
    lengths: Vec<u8>,
}

impl MessageIds {
    /// Room for `messages` ids of the usual length.
    pub(super) fn with_capacity(messages: usize) -> Self {
        Self {
            text: String::with_capacity(messages.saturating_mul(36)),
            lengths: Vec::with_capacity(messages),
        }
    }

    /// Adds the next id, which has been checked to have at most 255 bytes.
    pub(super) fn push(&mut self, id: &str) {
        self.text.push_str(id);
        self.lengths.push(u8::try_from(id.len()).unwrap_or(u8::MAX));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The ids in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut rest = self.text.as_str();
        self.lengths.iter().map(move |&length| {
            let (id, behind) = rest.split_at_checked(usize::from(length)).unwrap_or((rest, ""));
            rest = behind;
            id
        })
    }
}

impl<'a> FromIterator<&'a str> for MessageIds {
    fn from_iter<I: IntoIterator<Item = &'a str>>(ids: I) -> Self {
        let mut all = Self::default();
        ids.into_iter().for_each(|id| all.push(id));
        all
    }
}

// ---- Pull -----------------------------------------------------------------------------------

/// Reads one queue; limits as they came in.
#[derive(Clone, Debug, Default)]
pub struct PullCommand {
    /// Name of the topic.
    pub topic: String,
    /// Queue of the topic.
    pub queue: u32,
    /// First offset wanted.
    pub offset: i64,
    /// Most messages; 0 for the default.
    pub max_messages: u32,
    /// Most bytes of messages; 0 for the default.
    pub max_bytes: u32,
    /// How long to wait when there is nothing new; zero: not at all.
    pub wait: Duration,
    /// When the caller gives up; the answer comes a little before.
    pub deadline: Option<Instant>,
    /// Tags to deliver.
    pub tag_filter: String,
    /// Consumer group; empty: none.
    pub group: String,
    /// Names the caller among others of the group.
    pub client: String,
    /// Number of the connection the call came by, for its limit of held calls.
    pub connection: u64,
    /// Commit this progress of `group` on arrival.
    pub commit: Option<i64>,
}

/// What a pull found.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// What happened.
    pub outcome: PullOutcome,
    /// Offset to ask for next.
    pub next_offset: u64,
    /// First offset of the queue.
    pub min_offset: u64,
    /// End of the queue.
    pub max_offset: u64,
    /// What became of the commit that rode along.
    pub commit: Option<Commit>,
}

/// Kinds of answers to a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullOutcome {
    /// Stored messages, which are also what is served.
    Found(Vec<Bytes>),
    /// Nothing beyond the offset yet. With a delay when the hold was full.
    NoNewMessage(Option<Duration>),
    /// All that was looked at did not match the filter.
    NoMatchedMessage,
    /// The offset is below the first of the queue.
    BelowMin,
    /// The offset is beyond the end of the queue.
    BeyondMax,
    /// Messages from `begin` up to but without `end` are lost for good.
    DataLoss {
        /// First lost offset.
        begin: u64,
        /// Offset behind the last lost one.
        end: u64,
    },
}

// ---- Offsets --------------------------------------------------------------------------------

/// Commits progress of one group on several queues.
#[derive(Clone, Debug, Default)]
pub struct CommitCommand {
    /// Name of the group.
    pub group: String,
    /// Where it got to; each queue at most once.
    pub offsets: Vec<QueueOffset>,
}

/// An offset in a queue, as it came in.
#[derive(Clone, Debug, Default)]
pub struct QueueOffset {
    /// Name of the topic.
    pub topic: String,
    /// Queue of the topic.
    pub queue: u32,
    /// Offset of the next message to consume.
    pub offset: i64,
}

/// What became of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// What happened.
    pub outcome: CommitOutcome,
    /// The progress that is in force now.
    pub committed: Option<u64>,
}

/// Kinds of results of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// Durable.
    Committed,
    /// Below what is committed, which stands.
    Stale,
    /// Not an offset of the queue; nothing changed.
    OutOfRange,
    /// It could not be carried out.
    Failed(Error),
}

/// Asks for offsets of several queues.
#[derive(Clone, Debug, Default)]
pub struct OffsetsCommand {
    /// Topic and queue.
    pub queues: Vec<(String, u32)>,
    /// Group whose progress is wanted; empty: none.
    pub group: String,
    /// Also find the offset for this store time (milliseconds since 1970).
    pub at: Option<(u64, TimeBound)>,
}

/// Offsets of one queue, read together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueOffsets {
    /// Name of the topic.
    pub topic: TopicName,
    /// Queue of the topic.
    pub queue: u32,
    /// First offset.
    pub min_offset: u64,
    /// End of the queue.
    pub max_offset: u64,
    /// The group's progress, if it has any.
    pub committed: Option<u64>,
    /// For the time asked for.
    pub by_time: Option<u64>,
}

/// Sets a group's progress on a topic.
#[derive(Clone, Debug, Default)]
pub struct ResetCommand {
    /// Name of the group.
    pub group: String,
    /// Name of the topic.
    pub topic: String,
    /// Only this queue; else all.
    pub queue: Option<u32>,
    /// Where to; missing is an error.
    pub to: Option<ResetTo>,
    /// Show what would be done.
    pub dry_run: bool,
}

/// Where to set progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetTo {
    /// First offset there is.
    Earliest,
    /// End of the queue.
    Latest,
    /// This offset of one queue.
    Offset(i64),
    /// First message stored at or after, milliseconds since 1970.
    Time(u64),
}

/// What a reset did to one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetResult {
    /// Queue of the topic.
    pub queue: u32,
    /// Progress before.
    pub from: Option<u64>,
    /// Progress after.
    pub to: u64,
}

// ---- Look-up --------------------------------------------------------------------------------

/// Finds messages of one topic.
#[derive(Clone, Debug, Default)]
pub struct QueryCommand {
    /// Name of the topic.
    pub topic: String,
    /// What to look for; missing is an error.
    pub by: Option<QueryBy>,
    /// Stored at or after, milliseconds since 1970.
    pub begin_ms: Option<u64>,
    /// Stored before, milliseconds since 1970.
    pub end_ms: Option<u64>,
    /// Most messages; 0 for the default.
    pub limit: u32,
}

/// What to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueryBy {
    /// Message id.
    Id(String),
    /// One of the keys.
    Key(String),
    /// Exact place.
    Place {
        /// Queue of the topic.
        queue: u32,
        /// Offset in it.
        offset: i64,
    },
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Queried {
    /// Stored messages, newest first.
    pub messages: Vec<Bytes>,
    /// There may be more.
    pub truncated: bool,
}

// ---- Topics and groups ----------------------------------------------------------------------

/// Settings of a topic that a caller named; the others stay (or are the default).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicChange {
    /// Number of queues.
    pub queues: Option<u32>,
    /// Which messages it takes.
    pub kind: Option<TopicType>,
    /// When an OK is given.
    pub durability: Option<DurabilityLevel>,
    /// When readers see a message.
    pub visibility: Option<Visibility>,
    /// Messages older than this go; zero: no limit.
    pub retention_age: Option<Duration>,
    /// The oldest go above this many bytes; 0: no limit.
    pub retention_bytes: Option<u64>,
}

impl TopicChange {
    /// `settings` with what the caller named replaced.
    pub fn apply(&self, settings: &TopicSettings) -> TopicSettings {
        let age = self.retention_age.map(|age| (!age.is_zero()).then_some(age));
        let bytes = self.retention_bytes.map(|bytes| (bytes != 0).then_some(bytes));
        TopicSettings {
            queues: self.queues.unwrap_or(settings.queues),
            kind: self.kind.unwrap_or(settings.kind),
            durability: self.durability.unwrap_or(settings.durability),
            visibility: self.visibility.unwrap_or(settings.visibility),
            retention: Retention {
                age: age.unwrap_or(settings.retention.age),
                bytes: bytes.unwrap_or(settings.retention.bytes),
            },
        }
    }
}

/// Settings of a group that a caller named; the others stay (or are the default).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupChange {
    /// Where it begins on a queue without progress.
    pub start_from: Option<StartFrom>,
}

impl GroupChange {
    /// `settings` with what the caller named replaced.
    pub fn apply(&self, settings: &GroupSettings) -> GroupSettings {
        GroupSettings { start_from: self.start_from.unwrap_or(settings.start_from) }
    }
}

/// Asks for one page of a list.
#[derive(Clone, Debug, Default)]
pub struct ListCommand {
    /// Most entries; 0 for the default.
    pub page_size: u32,
    /// From the previous page; empty for the first.
    pub page_token: String,
    /// Only names that begin with this.
    pub prefix: String,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// By name.
    pub items: Vec<T>,
    /// Token of the next page; empty on the last.
    pub next: String,
}

/// A topic and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    /// Its name.
    pub name: TopicName,
    /// This life of it.
    pub id: TopicId,
    /// Its settings.
    pub settings: TopicSettings,
    /// Version of the map that message groups are placed by.
    pub map_version: u64,
    /// How many queues that map has.
    pub map_queues: u32,
}

/// A topic with its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicDescription {
    /// The topic.
    pub topic: TopicInfo,
    /// Its queues by number.
    pub queues: Vec<QueueInfo>,
    /// Groups that have progress on it, by name.
    pub groups: Vec<GroupName>,
    /// In plain words: what an OK on this topic survives.
    pub promise: String,
}

/// One queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueInfo {
    /// Its number.
    pub queue: u32,
    /// First offset.
    pub min_offset: u64,
    /// End.
    pub max_offset: u64,
    /// Bytes of log that its messages take.
    pub bytes: u64,
    /// Store time of the oldest message, milliseconds since 1970.
    pub oldest_ms: Option<u64>,
    /// Store time of the newest message, milliseconds since 1970.
    pub newest_ms: Option<u64>,
}

/// A group and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupInfo {
    /// Its name.
    pub name: GroupName,
    /// This life of it.
    pub id: GroupId,
    /// Its settings.
    pub settings: GroupSettings,
}

/// A group with its lag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupDescription {
    /// The group.
    pub group: GroupInfo,
    /// By topic name and queue.
    pub queues: Vec<QueueLag>,
    /// Sum over the queues.
    pub lag_messages: u64,
}

/// How far a group is behind on a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueLag {
    /// Name of the topic.
    pub topic: TopicName,
    /// Queue of the topic.
    pub queue: u32,
    /// The group's progress.
    pub committed: u64,
    /// First offset.
    pub min_offset: u64,
    /// End.
    pub max_offset: u64,
    /// Messages not yet consumed.
    pub lag_messages: u64,
    /// Age of the oldest of them.
    pub lag_time: Option<Duration>,
}

/// The node as its broker sees it.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// When the broker began, milliseconds since 1970.
    pub started_ms: u64,
    /// Its shards.
    pub shards: Vec<Status>,
    /// Pulls held now.
    pub held_pulls: u64,
}
