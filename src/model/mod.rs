//! The words of the domain: topic, group, queue, offset, settings, filter, message envelope.
//!
//! Values are checked when they are made, so holding one is proof that it was checked. No I/O.

mod envelope;
mod filter;
mod id;
mod invalid;
mod name;
mod settings;

pub use envelope::{
    Envelope, EnvelopeError, MAX_ID_BYTES, MAX_KEYS, MAX_TAG_BYTES, MessageKind, Parts, ServerFields,
    SystemPlace, append_server_fields, check_id, check_key, merge_fragments, server_fields_bytes_max,
};
pub use filter::{
    LookupKind, MAX_FILTER_BYTES, MAX_FILTER_TAGS, TagFilter, group_hash, lookup_hash, tag_hash,
};
pub use id::{GroupId, LogPosition, QueueKey, TopicId};
pub use invalid::Invalid;
pub use name::{GroupName, MAX_GROUP_BYTES, MAX_TOPIC_BYTES, TopicName};
pub use settings::{
    DurabilityLevel, GroupSettings, MAX_QUEUES, Retention, StartFrom, TopicSettings, TopicType, Visibility,
};

/// Most messages in one send.
pub const MAX_BATCH_MESSAGES: usize = 1024;
/// Most bytes in one send, as encoded on the wire.
pub const MAX_BATCH_BYTES: usize = 16 * 1024 * 1024;
/// Most bytes in a message body.
pub const MAX_BODY_BYTES: usize = 4 * 1024 * 1024;
