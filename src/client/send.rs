//! Sending, one call at a time.

use std::time::SystemTime;

use super::{Code, Connection, Error, OutgoingMessage, connection::request, message::offset};
use crate::pb::v1 as pb;

/// Messages for one queue of one topic: stored all or not at all, contiguous, visible together.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The topic.
    pub topic: String,
    /// 1 to 1024 messages, together at most 16 MiB.
    pub messages: Vec<OutgoingMessage>,
    /// The queue; `None`: chosen by message group, else by the broker.
    pub queue: Option<u32>,
    /// Version of the topic's queue map that `queue` was chosen by, to be refused when it is out of date.
    pub queue_map_version: Option<u64>,
}

impl Batch {
    /// `messages` for `topic`; the broker chooses the queue.
    pub fn new(topic: impl Into<String>, messages: Vec<OutgoingMessage>) -> Self {
        Self { topic: topic.into(), messages, queue: None, queue_map_version: None }
    }

    /// Its size on the wire in bytes, about.
    pub fn encoded_len(&self) -> usize {
        self.messages.iter().map(|message| message.encoded_len() + 6).sum::<usize>() + self.topic.len() + 24
    }

    pub(super) fn into_pb(self) -> pb::SendRequest {
        pb::SendRequest {
            topic: self.topic,
            messages: self.messages.into_iter().map(OutgoingMessage::into_pb).collect(),
            queue_id: self.queue,
            queue_map_version: self.queue_map_version,
        }
    }
}

/// Where the messages of a batch are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The queue that took them.
    pub queue: u32,
    /// One a message, in order.
    pub receipts: Vec<Receipt>,
    /// When they got their place, by the broker's clock.
    pub stored: Option<SystemTime>,
    /// What the OK promises.
    pub durability: Durability,
}

/// The place of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// Its id.
    pub message_id: String,
    /// Its offset in the queue.
    pub offset: u64,
}

/// What an OK promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A word that this client does not know.
    Unknown,
    /// Survives a power cut.
    Disk,
    /// Survives a crash of the broker, not a power cut.
    Memory,
}

impl Durability {
    /// The name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Disk => "DURABLE_DISK",
            Self::Memory => "DURABLE_MEMORY",
        }
    }
}

impl From<pb::SendResponse> for Sent {
    fn from(response: pb::SendResponse) -> Self {
        let durability = match response.durability() {
            pb::Durability::Unspecified => Durability::Unknown,
            pb::Durability::DurableDisk => Durability::Disk,
            pb::Durability::DurableMemory => Durability::Memory,
        };
        let receipts = response.receipts.into_iter();
        Self {
            queue: response.queue_id,
            receipts: receipts
                .map(|r| Receipt { message_id: r.message_id, offset: offset(r.offset) })
                .collect(),
            stored: response.store_timestamp.and_then(|time| time.try_into().ok()),
            durability,
        }
    }
}

impl Connection {
    /// Stores a batch and waits until it is as safe as the topic promises.
    pub async fn send(&self, batch: Batch) -> Result<Sent, Error> {
        let count = batch.messages.len();
        let response = self.broker().send(request(batch.into_pb())).await.map_err(|s| self.error(&s))?;
        checked(response.into_inner().into(), count)
    }
}

/// A receipt for each message, or it is no answer to this batch.
pub(super) fn checked(sent: Sent, count: usize) -> Result<Sent, Error> {
    if sent.receipts.len() == count {
        return Ok(sent);
    }
    let text = format!("the broker answered {count} messages with {} receipts", sent.receipts.len());
    Err(Error::new(Code::Internal, text))
}
