//! Messages: made for sending, and as they come back.

use std::{collections::BTreeMap, time::SystemTime};

use bytes::Bytes;
use prost::Message as _;

use crate::pb::v1 as pb;

/// A message to send. Rules and limits are the broker's; it names what it refuses.
#[derive(Clone, Debug, Default)]
pub struct OutgoingMessage {
    inner: pb::Message,
    system: pb::SystemProperties,
}

impl OutgoingMessage {
    /// A message with `body` (1 byte to 4 MiB), born now.
    pub fn new(body: impl Into<Bytes>) -> Self {
        Self {
            inner: pb::Message { body: body.into(), ..Default::default() },
            system: pb::SystemProperties {
                born_timestamp: Some(SystemTime::now().into()),
                ..Default::default()
            },
        }
    }

    /// Its id: 1 to 64 printable ASCII characters. The broker makes one when there is none.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.system.message_id = id.into();
        self
    }

    /// The tag that consumers filter by.
    #[must_use]
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.system.tag = Some(tag.into());
        self
    }

    /// One more key to find it by.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.system.keys.push(key.into());
        self
    }

    /// Messages of one group go to one queue and keep their order.
    #[must_use]
    pub fn message_group(mut self, group: impl Into<String>) -> Self {
        self.system.message_group = Some(group.into());
        self.system.message_type = pb::MessageType::Fifo.into();
        self
    }

    /// What the application wants to say beside the body.
    #[must_use]
    pub fn property(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.inner.user_properties.insert(key.into(), value.into());
        self
    }

    /// The application's own number.
    #[must_use]
    pub fn flag(mut self, flag: i32) -> Self {
        self.system.flag = flag;
        self
    }

    /// The host that made it, as it names itself.
    #[must_use]
    pub fn born_host(mut self, host: impl Into<String>) -> Self {
        self.system.born_host = host.into();
        self
    }

    /// Tracing context, e.g. a `traceparent`; carried byte for byte.
    #[must_use]
    pub fn trace_context(mut self, context: impl Into<String>) -> Self {
        self.system.trace_context = Some(context.into());
        self
    }

    /// Its size on the wire in bytes. A call takes at most 16 MiB.
    pub fn encoded_len(&self) -> usize {
        // Tag and length of the system properties inside the message, rounded up.
        const NESTING: usize = 6;
        self.inner.encoded_len() + self.system.encoded_len() + NESTING
    }

    pub(super) fn into_pb(self) -> pb::Message {
        pb::Message { system_properties: Some(self.system), ..self.inner }
    }
}

/// A stored message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Its id, from the producer or made by the broker.
    pub id: String,
    /// The payload.
    pub body: Bytes,
    /// Whether the producer compressed the body with gzip.
    pub gzip: bool,
    /// The tag that consumers filter by.
    pub tag: Option<String>,
    /// Keys to find it by.
    pub keys: Vec<String>,
    /// Group whose order is kept.
    pub message_group: Option<String>,
    /// What the application says beside the body.
    pub properties: BTreeMap<String, String>,
    /// The application's own number.
    pub flag: i32,
    /// When it was made, by the producer's clock.
    pub born: Option<SystemTime>,
    /// The producer's host; empty when it did not say.
    pub born_host: String,
    /// Tracing context.
    pub trace_context: Option<String>,
    /// Queue of the topic.
    pub queue: u32,
    /// Place in the queue.
    pub offset: u64,
    /// When it got its place, by the broker's clock.
    pub stored: Option<SystemTime>,
    /// Name of the shard that stored it.
    pub shard: String,
    /// Place in the shard's log, for order across queues.
    pub log_position: Option<u64>,
}

impl From<pb::Message> for Message {
    fn from(message: pb::Message) -> Self {
        let system = message.system_properties.unwrap_or_default();
        Self {
            gzip: system.body_encoding() == pb::Encoding::Gzip,
            id: system.message_id,
            body: message.body,
            tag: system.tag,
            keys: system.keys,
            message_group: system.message_group,
            properties: message.user_properties.into_iter().collect(),
            flag: system.flag,
            born: system.born_timestamp.and_then(|time| time.try_into().ok()),
            born_host: system.born_host,
            trace_context: system.trace_context,
            queue: u32::try_from(system.queue_id).unwrap_or(0),
            offset: offset(system.queue_offset.unwrap_or(0)),
            stored: system.store_timestamp.and_then(|time| time.try_into().ok()),
            shard: system.store_host,
            log_position: system.log_position,
        }
    }
}

/// An offset from the wire; the broker sends none below 0.
pub(super) fn offset(wire: i64) -> u64 {
    u64::try_from(wire).unwrap_or(0)
}

/// An offset for the wire; beyond its range is beyond the end of any queue.
pub(super) fn wire_offset(offset: u64) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_never_less_than_what_goes_on_the_wire() {
        for body in [1, 100, 200, 70_000, 4 << 20] {
            let message = OutgoingMessage::new(vec![7; body]).tag("t").key("k").property("a", "b").flag(-1);
            let said = message.encoded_len();
            let real = message.into_pb().encoded_len();
            assert!(said >= real && said <= real + 6, "{said} for {real}");
        }
    }

    #[test]
    fn what_was_sent_comes_back() {
        let sent = OutgoingMessage::new("body")
            .id("i")
            .tag("t")
            .key("a")
            .key("b")
            .message_group("g")
            .property("p", "q")
            .flag(-7)
            .born_host("h")
            .trace_context("00-1");
        let back = Message::from(sent.into_pb());
        assert_eq!((back.id.as_str(), &back.body[..], back.tag.as_deref()), ("i", &b"body"[..], Some("t")));
        assert_eq!(back.keys, ["a", "b"]);
        assert_eq!(back.message_group.as_deref(), Some("g"));
        assert_eq!(back.properties["p"], "q");
        assert_eq!(
            (back.flag, back.born_host.as_str(), back.trace_context.as_deref()),
            (-7, "h", Some("00-1"))
        );
        assert!(back.born.is_some());
    }
}
