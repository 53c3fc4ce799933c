//! Finding messages.

use std::time::SystemTime;

use super::{Connection, Error, Message, connection::request, message::wire_offset};
use crate::pb::v1 as pb;

/// What to look for in one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// The topic.
    pub topic: String,
    /// By what.
    pub by: By,
    /// By id or key: stored at or after.
    pub begin: Option<SystemTime>,
    /// By id or key: stored before.
    pub end: Option<SystemTime>,
    /// At most this many, 1 to 64; 0: 32.
    pub limit: u32,
}

/// How to look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum By {
    /// Message id; newest first.
    Id(String),
    /// One of the message's keys; newest first.
    Key(String),
    /// Queue and offset.
    Place(u32, u64),
}

/// What was found; nothing is no error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryResult {
    /// The messages.
    pub messages: Vec<Message>,
    /// There may be more than the limit or the effort of one look-up allowed.
    pub truncated: bool,
}

impl Connection {
    /// Finds messages by id, key or place.
    pub async fn query(&self, query: Query) -> Result<QueryResult, Error> {
        use pb::query_messages_request::By as Wire;
        let message = pb::QueryMessagesRequest {
            topic: query.topic,
            begin: query.begin.map(Into::into),
            end: query.end.map(Into::into),
            limit: query.limit,
            by: Some(match query.by {
                By::Id(id) => Wire::MessageId(id),
                By::Key(key) => Wire::Key(key),
                By::Place(queue_id, offset) => {
                    Wire::Place(pb::Place { queue_id, offset: wire_offset(offset) })
                }
            }),
        };
        let response =
            self.broker().query_messages(request(message)).await.map_err(|s| self.error(&s))?.into_inner();
        Ok(QueryResult {
            messages: response.messages.into_iter().map(Message::from).collect(),
            truncated: response.truncated,
        })
    }
}
