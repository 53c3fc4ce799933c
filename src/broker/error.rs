//! Why a broker did not do what it was asked to. Each variant carries the facts; each text names the field,
//! the limit, what was seen and what to do.

use std::time::Duration;

use crate::{
    model::{GroupName, Invalid, TopicName},
    store::StoreError,
};

/// Domain of [`Error::reason`].
pub const ERROR_DOMAIN: &str = "holdfast";

/// A call that was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A value that breaks a rule.
    #[error("{0}")]
    Invalid(#[from] Invalid),

    /// A message without a body.
    #[error("{field}: is empty; a message has a body of at least 1 byte")]
    BodyEmpty {
        /// Path of the body.
        field: String,
    },

    /// A body over the limit.
    #[error(
        "{field}: has {bytes} bytes, over the limit of {limit} (`send.body_max`); split the message or keep its content elsewhere"
    )]
    BodyTooLarge {
        /// Path of the body.
        field: String,
        /// Size seen.
        bytes: usize,
        /// The limit.
        limit: usize,
    },

    /// A batch over its limit of messages or bytes.
    #[error(
        "messages: {seen} {unit}, over the limit of {limit} a call{}; send them in several calls",
        batch_key(unit)
    )]
    BatchTooLarge {
        /// What was counted: `messages` or `bytes`.
        unit: &'static str,
        /// How many there are.
        seen: usize,
        /// The limit.
        limit: usize,
    },

    /// A tag expression that cannot be read.
    #[error("{0}")]
    FilterIllegal(Invalid),

    /// No such topic.
    #[error("topic `{0}` does not exist; create it first, or turn on `topics.auto_create` for sends")]
    TopicNotFound(TopicName),

    /// No such group.
    #[error("consumer group `{0}` does not exist; create it first, or turn on `groups.auto_create`")]
    GroupNotFound(GroupName),

    /// No such queue.
    #[error("topic `{topic}` has no queue {queue}; it has queues 0 to {}", queues.saturating_sub(1))]
    QueueNotFound {
        /// The topic.
        topic: TopicName,
        /// The queue asked for.
        queue: u32,
        /// How many it has.
        queues: u32,
    },

    /// The topic is there already.
    #[error("topic `{0}` exists already; use UpdateTopic to change it")]
    TopicExists(TopicName),

    /// The group is there already.
    #[error("consumer group `{0}` exists already; use UpdateGroup to change it")]
    GroupExists(GroupName),

    /// The sender relied on an old queue map.
    #[error(
        "queue_map_version: {given} is not the current version of topic `{topic}`, which is {current}; describe the topic and choose the queue again"
    )]
    QueueMapStale {
        /// The topic.
        topic: TopicName,
        /// What the sender named.
        given: u64,
        /// What is in force.
        current: u64,
        /// Queues of the map in force.
        queues: u32,
    },

    /// A message that the topic does not take.
    #[error("{field}: {problem}")]
    MessageTypeMismatch {
        /// The topic.
        topic: TopicName,
        /// Path of the field at fault.
        field: String,
        /// What does not fit, and what to do.
        problem: String,
    },

    /// Queues to be taken away are still needed.
    #[error("topic `{topic}` keeps its {queues} queues: {problem}")]
    UnreadMessages {
        /// The topic.
        topic: TopicName,
        /// How many queues it has.
        queues: u32,
        /// The first queue that is needed.
        queue: u32,
        /// Who needs it, and what to do.
        problem: String,
    },

    /// There are as many as the configuration allows.
    #[error("there are {limit} {what} already, the limit of `{key}`; delete some or raise it")]
    LimitReached {
        /// `topics` or `consumer groups`.
        what: &'static str,
        /// The configuration key.
        key: &'static str,
        /// Its value.
        limit: u64,
    },

    /// Free disk space is below the floor.
    #[error(
        "disk space is below the floor of {floor} bytes ({free} free), so new messages are refused; free some or lower retention"
    )]
    DiskFull {
        /// Configured floor, bytes.
        floor: u64,
        /// Free now, bytes.
        free: u64,
    },

    /// Too much is going on.
    #[error(
        "{seen} {what}, and the limit `{key}` is {limit}; retry in {} ms, or raise the limit",
        retry.as_millis()
    )]
    Busy {
        /// What there is too much of, as in "bytes wait to be written".
        what: &'static str,
        /// The configuration key.
        key: &'static str,
        /// How much there is.
        seen: u64,
        /// The key's value.
        limit: u64,
        /// A sensible pause.
        retry: Duration,
    },

    /// A request that did not arrive in time.
    #[error("the request did not arrive within {} ms (`api.request_timeout`); send it without pauses", after.as_millis())]
    RequestTimeout {
        /// The limit.
        after: Duration,
    },

    /// A write failed for good.
    #[error("the broker refuses writes after a failed one ({0}); restart it once the cause is gone")]
    Fenced(String),

    /// The broker is closing.
    #[error("the broker is stopping; retry, or use another one")]
    Stopping,

    /// A batch that does not fit into the log.
    #[error("messages: {bytes} bytes do not fit into a log segment of {limit}; send fewer in one call")]
    FrameTooLarge {
        /// Size with its headers.
        bytes: usize,
        /// Room in a segment.
        limit: usize,
    },

    /// The device failed to read.
    #[error("reading the log failed: {0}; look at the broker's log and the node status")]
    ReadFailed(String),

    /// A file of the key index was found damaged.
    #[error("a file of the key index is damaged and is being rebuilt from the log; retry")]
    Rebuilding,

    /// A bug.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

/// Where the limit of a batch is set, for the one that can be.
fn batch_key(unit: &str) -> &'static str {
    if unit == "bytes" { " (`send.batch_max`)" } else { "" }
}

impl Error {
    /// A word for programs, from a closed list.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "INVALID_FIELD",
            Self::BodyEmpty { .. } => "BODY_EMPTY",
            Self::BodyTooLarge { .. } => "BODY_TOO_LARGE",
            Self::BatchTooLarge { .. } | Self::FrameTooLarge { .. } => "BATCH_TOO_LARGE",
            Self::FilterIllegal(_) => "FILTER_ILLEGAL",
            Self::TopicNotFound(_) => "TOPIC_NOT_FOUND",
            Self::GroupNotFound(_) => "GROUP_NOT_FOUND",
            Self::QueueNotFound { .. } => "QUEUE_NOT_FOUND",
            Self::TopicExists(_) => "TOPIC_EXISTS",
            Self::GroupExists(_) => "GROUP_EXISTS",
            Self::QueueMapStale { .. } => "QUEUE_MAP_STALE",
            Self::MessageTypeMismatch { .. } => "MESSAGE_TYPE_MISMATCH",
            Self::UnreadMessages { .. } => "UNREAD_MESSAGES",
            Self::LimitReached { .. } => "LIMIT_REACHED",
            Self::DiskFull { .. } => "DISK_FULL",
            Self::Busy { .. } => "BUSY",
            Self::RequestTimeout { .. } => "REQUEST_TIMEOUT",
            Self::Fenced(_) => "FENCED",
            Self::Stopping => "STOPPING",
            Self::ReadFailed(_) => "READ_FAILED",
            Self::Rebuilding => "REBUILDING",
            Self::Internal(_) => "INTERNAL",
        }
    }

    /// How long to wait when a retry may help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry, .. } => Some(*retry),
            Self::DiskFull { .. } => Some(Duration::from_secs(5)),
            Self::Stopping | Self::Rebuilding => Some(Duration::from_secs(1)),
            _ => None,
        }
    }

    /// Path of the field at fault and what is wrong with it, when the request itself is at fault.
    pub fn field(&self) -> Option<(&str, String)> {
        match self {
            Self::Invalid(invalid) | Self::FilterIllegal(invalid) => {
                Some((invalid.field.as_str(), invalid.problem.clone()))
            }
            Self::BodyEmpty { field }
            | Self::BodyTooLarge { field, .. }
            | Self::MessageTypeMismatch { field, .. } => Some((field, self.to_string())),
            Self::BatchTooLarge { .. } | Self::FrameTooLarge { .. } => Some(("messages", self.to_string())),
            _ => None,
        }
    }

    /// Facts that a program may need.
    pub fn metadata(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::BodyTooLarge { bytes, limit, .. } => {
                vec![("bytes", bytes.to_string()), ("limit", limit.to_string())]
            }
            Self::BatchTooLarge { unit, seen, limit } => {
                vec![("unit", (*unit).to_owned()), ("seen", seen.to_string()), ("limit", limit.to_string())]
            }
            Self::FrameTooLarge { bytes, limit } => {
                vec![("unit", "bytes".to_owned()), ("seen", bytes.to_string()), ("limit", limit.to_string())]
            }
            Self::TopicNotFound(topic) | Self::TopicExists(topic) => vec![("topic", topic.to_string())],
            Self::GroupNotFound(group) | Self::GroupExists(group) => vec![("group", group.to_string())],
            Self::QueueNotFound { topic, queue, queues } => vec![
                ("topic", topic.to_string()),
                ("queue_id", queue.to_string()),
                ("queues", queues.to_string()),
            ],
            Self::QueueMapStale { topic, current, queues, .. } => vec![
                ("topic", topic.to_string()),
                ("queue_map_version", current.to_string()),
                ("queue_map_queues", queues.to_string()),
            ],
            Self::MessageTypeMismatch { topic, .. } => vec![("topic", topic.to_string())],
            Self::UnreadMessages { topic, queue, .. } => {
                vec![("topic", topic.to_string()), ("queue_id", queue.to_string())]
            }
            Self::LimitReached { key, limit, .. } => {
                vec![("key", (*key).to_owned()), ("limit", limit.to_string())]
            }
            Self::DiskFull { floor, free } => {
                vec![("floor_bytes", floor.to_string()), ("free_bytes", free.to_string())]
            }
            Self::Busy { key, seen, limit, .. } => {
                vec![("key", (*key).to_owned()), ("seen", seen.to_string()), ("limit", limit.to_string())]
            }
            Self::Invalid(_)
            | Self::BodyEmpty { .. }
            | Self::FilterIllegal(_)
            | Self::RequestTimeout { .. }
            | Self::Fenced(_)
            | Self::Stopping
            | Self::ReadFailed(_)
            | Self::Rebuilding
            | Self::Internal(_) => Vec::new(),
        }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Fenced(cause) => Self::Fenced(cause),
            StoreError::DiskFull { floor, free } => Self::DiskFull { floor, free },
            StoreError::Busy { bytes, limit, retry_ms } => {
                let (what, key) = ("bytes wait to be written", "store.inbox_size");
                Self::Busy { what, key, seen: bytes, limit, retry: Duration::from_millis(retry_ms) }
            }
            StoreError::Late { waited_ms, limit_ms, retry_ms } => {
                let (what, key) = ("ms is what the disk is behind", "store.inbox_wait");
                Self::Busy {
                    what,
                    key,
                    seen: waited_ms,
                    limit: limit_ms,
                    retry: Duration::from_millis(retry_ms),
                }
            }
            StoreError::Stopping => Self::Stopping,
            StoreError::TooLarge { bytes, limit } => Self::FrameTooLarge { bytes, limit },
            StoreError::Read(cause) => Self::ReadFailed(cause),
            StoreError::Rebuilding => Self::Rebuilding,
        }
    }
}
