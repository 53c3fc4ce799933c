//! Reading queues.

use std::time::Duration;

use super::{
    Commit, Connection, Error, Message,
    connection::request_waiting,
    message::{offset, wire_offset},
};
use crate::pb::v1 as pb;

/// What to read from one queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pull {
    /// The topic.
    pub topic: String,
    /// Queue of the topic.
    pub queue: u32,
    /// First offset wanted.
    pub offset: u64,
    /// At most this many messages, 1 to 1024; 0: 32.
    pub max_messages: u32,
    /// At most this many bytes, up to 16 MiB; 0: 1 MiB. A first message that is larger comes alone.
    pub max_bytes: u32,
    /// How long the broker may wait for new messages, at most 30 s; zero: answer at once.
    pub wait: Duration,
    /// Tags wanted, e.g. `paid || shipped`; empty: all.
    pub filter: String,
    /// Group on whose behalf to read; needed by `commit`.
    pub group: String,
    /// Names this reader among others of its group.
    pub client_id: String,
    /// Progress to commit on arrival; the answer says what became of it.
    pub commit: Option<u64>,
}

impl Pull {
    /// Reads `queue` of `topic` from `offset`, without waiting.
    pub fn new(topic: impl Into<String>, queue: u32, offset: u64) -> Self {
        Self { topic: topic.into(), queue, offset, ..Self::default() }
    }
}

/// What a pull found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// What kind of answer; all of them are normal.
    pub outcome: PullOutcome,
    /// In the order of the queue; empty unless the outcome is `Found`.
    pub messages: Vec<Message>,
    /// Offset to ask for next.
    pub next_offset: u64,
    /// First offset of the queue.
    pub min_offset: u64,
    /// End of the queue.
    pub max_offset: u64,
    /// What became of the progress that rode along.
    pub commit: Option<Commit>,
}

/// Kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullOutcome {
    /// There are messages.
    Found,
    /// Nothing beyond the offset yet. With a delay: the broker holds too many pulls to wait with this one.
    NoNewMessage(Option<Duration>),
    /// Messages were passed over by the filter.
    NoMatchedMessage,
    /// The offset is not in the queue; the next offset is the nearest one that is.
    OffsetIllegal(OffsetIllegal),
    /// Messages from the first up to the second offset are lost for good.
    DataLoss(u64, u64),
    /// An answer that this client does not know.
    Unknown,
}

/// Why an offset is not in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffsetIllegal {
    /// Below the first one: removed by retention.
    BelowMin,
    /// Beyond the end.
    BeyondMax,
}

impl From<pb::PullResponse> for Pulled {
    fn from(response: pb::PullResponse) -> Self {
        let outcome = match response.outcome() {
            pb::PullOutcome::Unspecified => PullOutcome::Unknown,
            pb::PullOutcome::Found => PullOutcome::Found,
            pb::PullOutcome::NoNewMessage => {
                PullOutcome::NoNewMessage(response.retry_delay.and_then(|delay| delay.try_into().ok()))
            }
            pb::PullOutcome::NoMatchedMessage => PullOutcome::NoMatchedMessage,
            pb::PullOutcome::OffsetIllegal => PullOutcome::OffsetIllegal(match response.illegal_reason() {
                pb::OffsetIllegalReason::BeyondMax => OffsetIllegal::BeyondMax,
                pb::OffsetIllegalReason::BelowMin | pb::OffsetIllegalReason::Unspecified => {
                    OffsetIllegal::BelowMin
                }
            }),
            pb::PullOutcome::DataLoss => {
                let lost = response.lost.unwrap_or_default();
                PullOutcome::DataLoss(offset(lost.begin), offset(lost.end))
            }
        };
        Self {
            outcome,
            messages: response.messages.into_iter().map(Message::from).collect(),
            next_offset: offset(response.next_offset),
            min_offset: offset(response.min_offset),
            max_offset: offset(response.max_offset),
            commit: response.commit.map(Commit::from),
        }
    }
}

impl Connection {
    /// Reads one queue; waits at the broker when `pull` says so.
    pub async fn pull(&self, pull: &Pull) -> Result<Pulled, Error> {
        let message = pb::PullRequest {
            topic: pull.topic.clone(),
            queue_id: pull.queue,
            offset: wire_offset(pull.offset),
            max_messages: pull.max_messages,
            max_bytes: pull.max_bytes,
            wait: (!pull.wait.is_zero()).then(|| pull.wait.try_into().unwrap_or_default()),
            tag_filter: pull.filter.clone(),
            group: pull.group.clone(),
            client_id: pull.client_id.clone(),
            commit_offset: pull.commit.map(wire_offset),
        };
        let request = request_waiting(message, pull.wait);
        let response = self.broker().pull(request).await.map_err(|s| self.error(&s))?;
        Ok(response.into_inner().into())
    }
}
