//! Settings of topics and groups, checked when made.

use std::time::Duration;

use super::Invalid;

/// Most queues of one topic in one shard.
pub const MAX_QUEUES: u32 = 4096;
/// Shortest retention by age: one pass of the cleaner and its margin.
const MIN_RETENTION_AGE: Duration = Duration::from_secs(1);

/// When an OK for a topic is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DurabilityLevel {
    /// After the device has it.
    #[default]
    Sync,
    /// When the page cache has it.
    Async,
}

/// When readers of an `Async` topic see a message. Readers of a `Sync` topic see what is synced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Visibility {
    /// As soon as it is in the page cache.
    #[default]
    Appended,
    /// When the device has it.
    Flushed,
}

/// Which messages a topic takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopicType {
    /// Messages without a message group.
    Normal,
    /// Messages with a message group.
    Fifo,
    /// Both.
    #[default]
    Mixed,
}

/// How long messages stay. `None` stands for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Messages older than this go.
    pub age: Option<Duration>,
    /// The oldest go when the topic takes more bytes of log than this.
    pub bytes: Option<u64>,
}

impl Default for Retention {
    /// Three days, as RocketMQ.
    fn default() -> Self {
        Self { age: Some(Duration::from_secs(72 * 3600)), bytes: None }
    }
}

/// Settings of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    /// Number of queues, 1 to [`MAX_QUEUES`].
    pub queues: u32,
    /// Which messages it takes.
    pub kind: TopicType,
    /// When an OK is given.
    pub durability: DurabilityLevel,
    /// When readers see a message.
    pub visibility: Visibility,
    /// How long messages stay.
    pub retention: Retention,
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self {
            queues: 4,
            kind: TopicType::default(),
            durability: DurabilityLevel::default(),
            visibility: Visibility::default(),
            retention: Retention::default(),
        }
    }
}

impl TopicSettings {
    /// Checks the ranges; the error names the field.
    pub fn check(&self) -> Result<(), Invalid> {
        if !(1..=MAX_QUEUES).contains(&self.queues) {
            return Err(Invalid::new(
                "settings.queues",
                format!("is {}; a topic has 1 to {MAX_QUEUES} queues", self.queues),
            ));
        }
        if self.retention.age.is_some_and(|age| age < MIN_RETENTION_AGE) {
            return Err(Invalid::new(
                "settings.retention_age",
                "is below 1 s; use at least 1 s, or 0 for no limit",
            ));
        }
        Ok(())
    }
}

/// Where a group without progress begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartFrom {
    /// The first message there is.
    #[default]
    Earliest,
    /// Only what comes from now on.
    Latest,
}

/// Settings of a consumer group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupSettings {
    /// Where it begins on a queue without progress.
    pub start_from: StartFrom,
}
