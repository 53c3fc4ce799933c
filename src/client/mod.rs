//! Our client over the native API. Knows no server setting and no storage.
//!
//! ```text
//! caller ──► Connection: send, pull, commit, admin … ──► one HTTP/2 connection ──► broker
//!        └─► SendStream: a window of sends in flight, answers matched by number
//! ```
//!
//! Everything here takes and gives plain values; what gRPC says about a failure becomes one [`Error`].
//!
//! **Units.** Times are [`std::time::SystemTime`], spans [`std::time::Duration`], sizes bytes. Offsets count
//! messages of one queue, from 0.
//!
//! **Cancellation.** Dropping the future of a call gives up the answer, not the effect: a send, a commit or an
//! admin call that has left this machine may still be carried out. Pulls and queries change nothing (a pull with
//! `commit` counts as a commit). [`SendStream::send`] is all or nothing: dropped before it returns, nothing was
//! handed over.
//!
//! **Retries** are the caller's business: an [`Error`] says whether trying again can help
//! ([`Error::retryable`]) and when ([`Error::retry_after`]). A send that failed without an answer may have been
//! stored; sending it again may store it twice.

mod admin;
mod connection;
mod error;
mod message;
mod offsets;
mod pull;
mod query;
mod send;
mod stream;

pub use admin::{
    Damage, Group, GroupDescription, NodeStatus, Page, QueueDescription, QueueLag, Reset, ResetTo,
    ShardState, ShardStatus, Topic, TopicChange, TopicDescription,
};
pub use connection::{Connection, DEFAULT_PORT, Endpoint};
pub use error::{Code, Error, Violation};
pub use message::{Message, OutgoingMessage};
pub use offsets::{Commit, CommitOutcome, Offsets, QueueOffset, TimeBound};
pub use pull::{OffsetIllegal, Pull, PullOutcome, Pulled};
pub use query::{By, Query, QueryResult};
pub use send::{Batch, Durability, Receipt, Sent};
pub use stream::{Answer, SendStream, Window};
