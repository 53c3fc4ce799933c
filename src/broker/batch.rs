//! The messages of one send, checked before any lock is taken.

use std::ops::Range;

use bytes::Bytes;
use uuid::{NoContext, Timestamp, Uuid, fmt::Hyphenated};

use super::{Error, MessageIds};
use crate::{
    config::SendConfig,
    model::{
        Envelope, EnvelopeError, Invalid, LookupKind, MAX_BATCH_MESSAGES, MessageKind, Parts, SystemPlace,
        TopicId, TopicName, group_hash, lookup_hash, merge_fragments, tag_hash,
    },
    store::NewMessage,
};

/// Highest random bit of an id's last part. Made 0, so that counting up within a batch stays in that part.
const COUNTING_ROOM: u128 = 1 << 61;

/// A batch that keeps every rule which does not depend on the topic's state.
#[derive(Debug)]
pub(super) struct Batch {
    checked: Vec<Checked>,
    lookups: Vec<u64>,
    /// Ids of all messages, in order.
    pub(super) ids: MessageIds,
    /// Hash of the message group they are all in, if they are in one.
    pub(super) group: Option<u64>,
    /// Bytes as the client encoded them.
    pub(super) bytes: usize,
}

#[derive(Debug)]
struct Checked {
    /// The message with its fragments merged, if it came in several.
    merged: Option<Bytes>,
    place: SystemPlace,
    crc: u32,
    tag_hash: u64,
    lookups: Range<usize>,
    made_id: bool,
}

impl Batch {
    /// Reads `messages` within `limits`. Ids that are missing are made of the time `now_ms`.
    pub(super) fn read(
        messages: &[Bytes],
        limits: &SendConfig,
        name: &TopicName,
        topic: TopicId,
        now_ms: u64,
    ) -> Result<Self, Error> {
        let bytes = check_size(messages, limits)?;
        let mut batch = Self {
            checked: Vec::with_capacity(messages.len()),
            lookups: Vec::with_capacity(messages.len()),
            ids: MessageIds::with_capacity(messages.len()),
            group: None,
            bytes,
        };
        let mut maker = IdMaker::new(now_ms);
        let mut first_group = None;
        for (at, message) in messages.iter().enumerate() {
            let envelope = Envelope::parse(message).map_err(|error| fault(at, error, limits))?;
            if envelope.body_bytes as u64 > limits.body_max {
                return Err(fault(at, EnvelopeError::BodyTooLarge(envelope.body_bytes), limits));
            }
            check_kind(&envelope, at, name)?;
            match first_group {
                None => {
                    first_group = Some(envelope.group);
                    batch.group = envelope.group.map(group_hash);
                }
                Some(first) if first != envelope.group => {
                    return Err(Invalid::new(
                        format!("messages[{at}].system_properties.message_group"),
                        "differs from that of messages[0]; one send goes to one queue, so send each group by itself",
                    )
                    .into());
                }
                Some(_) => {}
            }
            let from = batch.lookups.len();
            let made;
            let id = match envelope.id {
                Some(id) => id,
                None => {
                    made = maker.next();
                    made.as_str()
                }
            };
            batch.lookups.push(lookup_hash(topic, LookupKind::Id, id));
            batch.lookups.extend(envelope.keys().iter().map(|key| lookup_hash(topic, LookupKind::Key, key)));
            batch.ids.push(id);
            let merged = (envelope.fragments > 1).then(|| merge_fragments(message));
            let place = match &merged {
                Some(merged) => Envelope::parse(merged).map_err(|error| fault(at, error, limits))?.place,
                None => envelope.place,
            };
            let [before, behind] = place.split(merged.as_ref().unwrap_or(message)).others;
            batch.checked.push(Checked {
                place,
                crc: crc32c::crc32c_append(crc32c::crc32c(before), behind),
                tag_hash: tag_hash(envelope.tag),
                lookups: from..batch.lookups.len(),
                made_id: envelope.id.is_none(),
                merged,
            });
        }
        Ok(batch)
    }

    /// The messages as the store takes them.
    pub(super) fn new_messages<'a>(
        &'a self,
        messages: &'a [Bytes],
    ) -> impl ExactSizeIterator<Item = NewMessage<'a>> + Clone {
        messages.iter().zip(&self.checked).map(|(message, checked)| {
            let parts = checked.parts(message);
            NewMessage {
                parts: parts.others,
                crc: checked.crc,
                later_bytes: parts.system.len(),
                tag_hash: checked.tag_hash,
                lookups: self.lookups.get(checked.lookups.clone()).unwrap_or_default(),
            }
        })
    }

    /// For each message in order: its system properties as the client set them, and the id to append, `None`
    /// where the client set one.
    pub(super) fn seals<'a>(
        &'a self,
        messages: &'a [Bytes],
    ) -> impl Iterator<Item = (&'a [u8], Option<&'a str>)> {
        let ids = self.ids.iter().zip(&self.checked).map(|(id, checked)| checked.made_id.then_some(id));
        messages.iter().zip(&self.checked).map(|(message, checked)| checked.parts(message).system).zip(ids)
    }

    /// How many messages there are.
    pub(super) fn len(&self) -> usize {
        self.checked.len()
    }
}

impl Checked {
    fn parts<'a>(&'a self, message: &'a Bytes) -> Parts<'a> {
        self.place.split(self.merged.as_ref().unwrap_or(message))
    }
}

fn check_size(messages: &[Bytes], limits: &SendConfig) -> Result<usize, Error> {
    if messages.is_empty() {
        let problem = format!("is empty; send 1 to {MAX_BATCH_MESSAGES} messages");
        return Err(Invalid::new("messages", problem).into());
    }
    if messages.len() > MAX_BATCH_MESSAGES {
        return Err(Error::BatchTooLarge {
            unit: "messages",
            seen: messages.len(),
            limit: MAX_BATCH_MESSAGES,
        });
    }
    let bytes = messages.iter().fold(0_usize, |sum, message| sum.saturating_add(message.len()));
    let limit = usize::try_from(limits.batch_max).unwrap_or(usize::MAX);
    if bytes > limit {
        return Err(Error::BatchTooLarge { unit: "bytes", seen: bytes, limit });
    }
    Ok(bytes)
}

fn fault(at: usize, error: EnvelopeError, limits: &SendConfig) -> Error {
    let outer = format!("messages[{at}]");
    match error {
        EnvelopeError::Field(invalid) if invalid.field.is_empty() => {
            Invalid::new(outer, invalid.problem).into()
        }
        EnvelopeError::Field(invalid) => invalid.within(&outer).into(),
        EnvelopeError::BodyEmpty => Error::BodyEmpty { field: format!("{outer}.body") },
        EnvelopeError::BodyTooLarge(bytes) => {
            let limit = usize::try_from(limits.body_max).unwrap_or(usize::MAX);
            Error::BodyTooLarge { field: format!("{outer}.body"), bytes, limit }
        }
    }
}

fn check_kind(envelope: &Envelope<'_>, at: usize, topic: &TopicName) -> Result<(), Error> {
    let problem = match (envelope.kind, envelope.group.is_some()) {
        (MessageKind::Normal, true) => {
            "is NORMAL but the message has a message_group; use FIFO or leave it out"
        }
        (MessageKind::Fifo, false) => "is FIFO but the message has no message_group; set one",
        _ => return Ok(()),
    };
    Err(Error::MessageTypeMismatch {
        topic: topic.clone(),
        field: format!("messages[{at}].system_properties.message_type"),
        problem: problem.to_owned(),
    })
}

/// Makes UUIDs of version 7: random for a batch, counting up within it.
struct IdMaker {
    now_ms: u64,
    next: Option<u128>,
    text: [u8; Hyphenated::LENGTH],
}

impl IdMaker {
    fn new(now_ms: u64) -> Self {
        Self { now_ms, next: None, text: [0; Hyphenated::LENGTH] }
    }

    fn next(&mut self) -> MadeId {
        let value = self.next.unwrap_or_else(|| {
            let nanos = u32::try_from((self.now_ms % 1000).saturating_mul(1_000_000)).unwrap_or(0);
            let time = Timestamp::from_unix(NoContext, self.now_ms / 1000, nanos);
            Uuid::new_v7(time).as_u128() & !COUNTING_ROOM
        });
        self.next = Some(value.wrapping_add(1));
        Uuid::from_u128(value).hyphenated().encode_lower(&mut self.text);
        MadeId(self.text)
    }
}

struct MadeId([u8; Hyphenated::LENGTH]);

impl MadeId {
    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn made_ids_are_sorted_unique_uuids_of_version_7() {
        let mut maker = IdMaker::new(1_700_000_000_123);
        let ids: Vec<String> = (0..1024).map(|_| maker.next().as_str().to_owned()).collect();
        assert!(ids.is_sorted());
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 1024);
        for id in ids {
            let id: Uuid = id.parse().unwrap();
            assert_eq!((id.get_version_num(), id.get_variant()), (7, uuid::Variant::RFC4122));
            assert_eq!(id.get_timestamp().unwrap().to_unix().0, 1_700_000_000);
        }
        assert_ne!(IdMaker::new(5).next().0, IdMaker::new(5).next().0);
    }
}
