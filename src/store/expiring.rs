//! Says beforehand that retention will take messages which a group has not read.

use std::{
    collections::{BTreeMap, HashSet},
    sync::atomic::Ordering,
};

use super::{Topic, retention::boundary_by_size, shard::Shard};
use crate::model::{QueueKey, TopicId};

/// The last part of its age or size in which a message counts as about to go: a tenth.
const HORIZON: u64 = 10;

/// What was warned of.
#[derive(Default)]
pub struct Expiring {
    warned: HashSet<TopicId>,
}

impl Expiring {
    /// Counts messages that a group has yet to read and that the topic's own limits will take before long. Costs a
    /// look at each progress, and more only for queues that have something unread.
    pub fn look(&mut self, shard: &Shard) {
        let mut behind: BTreeMap<QueueKey, u64> = BTreeMap::new();
        for group in shard.tables.groups() {
            for (key, committed) in group.progress() {
                let unread = shard.tables.queue(key).is_some_and(|queue| committed.offset < queue.bounds().1);
                if unread {
                    let read = behind.entry(key).or_insert(committed.offset);
                    *read = committed.offset.min(*read);
                }
            }
        }
        let mut counts: BTreeMap<TopicId, u64> = BTreeMap::new();
        let mut boundary = (TopicId(0), None);
        for (key, read) in behind {
            let Some(topic) = shard.tables.topic_by_id(key.topic) else { continue };
            if boundary.0 != topic.id {
                boundary = (topic.id, goes_soon(shard, &topic));
            }
            let (Some(before_ms), Some(queue)) = (boundary.1, shard.tables.queue(key)) else { continue };
            let stays = shard.offset_by_time(&queue, before_ms, super::TimeBound::FirstAtOrAfter);
            let unread = stays.saturating_sub(read.max(queue.start()));
            if unread > 0 {
                *counts.entry(topic.id).or_default() += unread;
            }
        }
        shard.unread_expiring.store(counts.values().sum(), Ordering::Relaxed);
        self.warned.retain(|id| counts.contains_key(id));
        for (id, unread) in counts {
            let Some(topic) = shard.tables.topic_by_id(id).filter(|_| self.warned.insert(id)) else {
                continue;
            };
            tracing::warn!(
                event = "storage.unread_expiring",
                topic = topic.name.as_str(),
                unread,
                "retention will soon remove messages that a group has not read"
            );
        }
    }
}

/// Messages stored before this are in the last part of their time.
fn goes_soon(shard: &Shard, topic: &Topic) -> Option<u64> {
    let retention = &topic.settings.retention;
    let by_age = retention.age.and_then(|age| {
        let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        shard.clock.now_ms().checked_sub(age - age / HORIZON)
    });
    let by_size = retention.bytes.and_then(|bytes| boundary_by_size(shard, topic, bytes - bytes / HORIZON));
    by_age.max(by_size)
}
