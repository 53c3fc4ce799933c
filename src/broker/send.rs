//! Sending: checks and hashes outside the lock, decides the queue inside it, answers after the disk.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use super::{Broker, Error, SendCommand, Sent, batch::Batch, metrics::Traffic};
use crate::{
    model::{ServerFields, TopicName, TopicType, append_server_fields},
    store::{Pending, Purpose, Reached, Topic, TransactError, Tx},
};

/// How often a send starts over because its topic was made again in between.
const MAX_TRIES: usize = 4;

/// A send that has its place in the log: resolves when the messages have reached what the topic promises.
/// Dropping it changes nothing about the append.
#[derive(Debug)]
pub struct SendTicket {
    pending: Pending,
    sent: Option<Sent>,
}

impl Future for SendTicket {
    type Output = Result<Sent, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let reached = ready!(Pin::new(&mut self.pending).poll(cx))?;
        let sent = self.sent.take().ok_or_else(|| Error::Internal("a ticket was asked twice".to_owned()))?;
        Poll::Ready(Ok(Sent { reached, ..sent }))
    }
}

/// Why a send did not get its place.
enum Refused {
    /// The topic is another one than looked at; look again.
    Changed,
    Error(Error),
}

impl Broker {
    /// Checks the messages and appends them now, in the order of calls; the ticket waits for the disk.
    /// Never waits itself: without room it answers [`Error::Busy`] with a delay.
    pub fn begin_send(&self, command: SendCommand) -> Result<SendTicket, Error> {
        self.place(command).inspect_err(|error| self.inner.metrics.refused(error))
    }

    /// [`Broker::begin_send`] and its ticket.
    pub async fn send(&self, command: SendCommand) -> Result<Sent, Error> {
        self.begin_send(command)?.await
    }

    fn place(&self, command: SendCommand) -> Result<SendTicket, Error> {
        let inner = &self.inner;
        let name = TopicName::new(&command.topic)?;
        for _ in 0..MAX_TRIES {
            let Some(topic) = inner.store.topic(&name) else {
                if !inner.config.topics.auto_create {
                    return Err(Error::TopicNotFound(name));
                }
                // A send that is refused must not leave a topic behind.
                Batch::read(&command.messages, &inner.config.send, &name, crate::model::TopicId(0), 0)?;
                self.make_topic_on_demand(&name)?;
                continue;
            };
            let (limits, now_ms) = (&inner.config.send, inner.clock.now_ms());
            let batch = Batch::read(&command.messages, limits, &name, topic.id, now_ms)?;
            let traffic = inner.metrics.traffic(topic.id, &name);
            let placed = inner.store.transact(Purpose::Send, |tx| {
                let now = tx.topic(&name).filter(|now| now.id == topic.id).ok_or(Refused::Changed)?;
                self.append(tx, &now, &batch, &command, &traffic).map_err(Refused::Error)
            });
            return match placed {
                Ok((mut sent, pending)) => {
                    traffic.stored(batch.group.is_some(), batch.len(), batch.bytes);
                    sent.ids = batch.ids;
                    Ok(SendTicket { pending, sent: Some(sent) })
                }
                Err(TransactError::Decided(Refused::Changed)) => continue,
                Err(TransactError::Decided(Refused::Error(error))) => Err(error),
                Err(TransactError::Store(error)) => Err(error.into()),
            };
        }
        Err(Error::TopicNotFound(name))
    }

    /// Chooses the queue and appends; under the lock.
    fn append(
        &self,
        tx: &mut Tx<'_>,
        topic: &Arc<Topic>,
        batch: &Batch,
        command: &SendCommand,
        traffic: &Traffic,
    ) -> Result<Sent, Error> {
        check_type(topic, batch.group.is_some())?;
        if let Some(given) = command.map_version
            && given != topic.map.version
        {
            return Err(Error::QueueMapStale {
                topic: topic.name.clone(),
                given,
                current: topic.map.version,
                queues: topic.map.queues,
            });
        }
        let count = u32::try_from(topic.queues.len()).unwrap_or(u32::MAX);
        let number = match (command.queue, batch.group) {
            (Some(queue), _) => queue,
            (None, Some(group)) => jump_hash(group, topic.map.queues),
            (None, None) => traffic.next_queue().checked_rem(count).unwrap_or(0),
        };
        let queue = topic.queues.get(number as usize).ok_or_else(|| Error::QueueNotFound {
            topic: topic.name.clone(),
            queue: number,
            queues: count,
        })?;
        let mut seals = batch.seals(&command.messages);
        let first = tx.send(topic, queue, batch.new_messages(&command.messages), |_, place, into| {
            let (system, id) = seals.next().unwrap_or_default();
            let fields = ServerFields {
                id,
                store_ms: place.store_ms,
                store_host: &self.inner.shard,
                queue: place.queue,
                offset: place.offset,
                position: place.position.0,
            };
            append_server_fields(&fields, system, into);
        });
        Ok(Sent {
            queue: number,
            first_offset: first.offset,
            ids: super::MessageIds::default(),
            store_ms: first.store_ms,
            reached: Reached::Memory,
        })
    }
}

fn check_type(topic: &Topic, grouped: bool) -> Result<(), Error> {
    let problem = match (topic.settings.kind, grouped) {
        (TopicType::Normal, true) => {
            "is set, but the topic takes messages without a group only; leave it out"
        }
        (TopicType::Fifo, false) => "is missing, but the topic takes messages with a group only; set one",
        _ => return Ok(()),
    };
    Err(Error::MessageTypeMismatch {
        topic: topic.name.clone(),
        field: "messages[0].system_properties.message_group".to_owned(),
        problem: problem.to_owned(),
    })
}

/// Spreads `key` over `buckets`; when their number changes as few keys move as can be.
/// Lamping and Veach, "A fast, minimal memory, consistent hash algorithm".
fn jump_hash(mut key: u64, buckets: u32) -> u32 {
    let (mut bucket, mut next) = (0_i64, 0_i64);
    while next < i64::from(buckets) {
        bucket = next;
        key = key.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(1);
        let scale = (1_u64 << 31) as f64 / ((key >> 33).saturating_add(1)) as f64;
        next = (bucket.saturating_add(1) as f64 * scale) as i64;
    }
    u32::try_from(bucket).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jump_hash_spreads_evenly_and_moves_little() {
        // Value of the authors' own code, so that clients in other languages can agree.
        assert_eq!(jump_hash(10_863_919_174_838_991, 11), 6);
        let mut moved = 0;
        let mut counts = [0_u32; 8];
        for key in 0..8000_u64 {
            let key = crate::model::tag_hash(Some(&key.to_string()));
            let eight = jump_hash(key, 8);
            counts[eight as usize] += 1;
            let nine = jump_hash(key, 9);
            moved += u32::from(eight != nine);
            assert!(eight == nine || nine == 8);
        }
        assert!(counts.iter().all(|&count| (800..1200).contains(&count)), "{counts:?}");
        assert!((600..1200).contains(&moved), "{moved}");
        assert_eq!(jump_hash(7, 1), 0);
    }
}
