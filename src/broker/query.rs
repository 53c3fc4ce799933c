//! Finding single messages: by id, by key, by place.

use bytes::Bytes;

use super::{Broker, Error, Queried, QueryBy, QueryCommand};
use crate::{
    model::{Envelope, Invalid, LookupKind, TopicName, check_id, check_key, lookup_hash},
    store::{Found, ScanLimits, Topic},
};

/// Most messages of one answer.
const MAX_MESSAGES: u32 = 64;
/// Messages of an answer when the caller names no number.
const DEFAULT_MESSAGES: u32 = 32;
/// Most bytes of messages of one answer; a first message comes alone if it is larger.
const MAX_BYTES: usize = 16 * 1024 * 1024;
/// Most records looked at by one look-up, so that a hot key cannot make it endless.
const MAX_CANDIDATES: usize = 1024;

/// What a look-up wants.
struct Wanted {
    kind: LookupKind,
    text: String,
    begin_ms: u64,
    end_ms: u64,
    limit: usize,
}

impl Broker {
    /// Finds messages by id, key or place.
    pub async fn query(&self, command: QueryCommand) -> Result<Queried, Error> {
        let name = TopicName::new(&command.topic)?;
        let limit = match command.limit {
            0 => DEFAULT_MESSAGES,
            limit if limit <= MAX_MESSAGES => limit,
            limit => {
                return Err(
                    Invalid::new("limit", format!("is {limit}; use 1 to {MAX_MESSAGES}, or 0")).into()
                );
            }
        };
        let (kind, text) = match command.by {
            None => return Err(Invalid::new("by", "is missing; name message_id, key or place").into()),
            Some(QueryBy::Place { queue, offset }) => return self.at_place(&name, queue, offset).await,
            Some(QueryBy::Id(id)) => {
                check_id("message_id", &id)?;
                (LookupKind::Id, id)
            }
            Some(QueryBy::Key(key)) => {
                check_key("key", &key)?;
                (LookupKind::Key, key)
            }
        };
        let (begin_ms, end_ms) = (command.begin_ms.unwrap_or(0), command.end_ms.unwrap_or(u64::MAX));
        if begin_ms > end_ms {
            return Err(Invalid::new("begin", "is behind `end`; swap them").into());
        }
        let topic = self.inner.store.topic(&name).ok_or(Error::TopicNotFound(name))?;
        let (store, wanted) =
            (self.inner.store.clone(), Wanted { kind, text, begin_ms, end_ms, limit: limit as usize });
        let find = move || {
            let hash = lookup_hash(topic.id, wanted.kind, &wanted.text);
            let (mut found, mut bytes) = (Queried::default(), 0_usize);
            let more = store.lookup(hash, MAX_CANDIDATES, |candidate| {
                if !wanted.fits(&topic, &candidate) {
                    return true;
                }
                bytes = bytes.saturating_add(candidate.payload.len());
                let full =
                    found.messages.len() >= wanted.limit || (bytes > MAX_BYTES && !found.messages.is_empty());
                if full {
                    found.truncated = true;
                    return false;
                }
                found.messages.push(candidate.payload);
                true
            })?;
            found.truncated |= more;
            Ok(found)
        };
        tokio::task::spawn_blocking(find).await.map_err(|error| Error::Internal(error.to_string()))?
    }

    async fn at_place(&self, name: &TopicName, number: u32, offset: i64) -> Result<Queried, Error> {
        let (_, queue) = self.queue(name, number)?;
        let offset = u64::try_from(offset)
            .map_err(|_| Invalid::new("place.offset", format!("is {offset}; offsets begin at 0")))?;
        let (start, end) = queue.bounds();
        if !(start..end).contains(&offset) {
            return Ok(Queried::default());
        }
        let store = self.inner.store.clone();
        let read = move || {
            let limits = ScanLimits { messages: 1, bytes: usize::MAX, entries: 1 };
            let scan = store.scan(&queue, offset, limits, |_| true);
            let slots: Vec<_> = scan.slots.into_iter().filter(|slot| slot.offset == offset).collect();
            let mut found = Vec::<Bytes>::new();
            for one in store.fetch(queue.key(), &slots)? {
                found.push(one.payload.ok_or_else(|| {
                    Error::ReadFailed(format!("the message at offset {offset} is damaged"))
                })?);
            }
            Ok(Queried { messages: found, truncated: false })
        };
        tokio::task::spawn_blocking(read).await.map_err(|error| Error::Internal(error.to_string()))?
    }
}

impl Wanted {
    /// Whether a candidate is one: hashes collide, and the index knows neither time nor retention.
    fn fits(&self, topic: &Topic, candidate: &Found) -> bool {
        if candidate.topic != topic.id || !(self.begin_ms..self.end_ms).contains(&candidate.place.store_ms) {
            return false;
        }
        let readable = topic.queues.get(candidate.place.queue as usize).is_some_and(|queue| {
            let (start, end) = queue.bounds();
            (start..end).contains(&candidate.place.offset)
        });
        readable
            && Envelope::parse_stored(&candidate.payload).is_some_and(|message| match self.kind {
                LookupKind::Id => message.id == Some(self.text.as_str()),
                LookupKind::Key => message.keys().contains(&self.text.as_str()),
            })
    }
}
