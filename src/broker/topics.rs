//! Topics: made, changed, deleted, listed, described.

use std::{sync::Arc, time::Instant};

use super::{
    Broker, Error, ListCommand, Page, QueueInfo, TopicChange, TopicDescription, TopicInfo, offsets::Shown,
};
use crate::{
    model::{DurabilityLevel, GroupName, Invalid, QueueKey, TopicName, TopicSettings, Visibility},
    store::{Group, Pending, Purpose, QueueMap, Topic, TransactError},
};

/// Most entries of one page of a list, and how many there are when the caller names no number.
pub(super) const MAX_PAGE: u32 = 1000;
/// Longest prefix or page token: longer than any name.
const MAX_PREFIX_BYTES: usize = 255;
/// Groups looked at before others get a turn.
const SLICE_GROUPS: usize = 64;

impl From<&Topic> for TopicInfo {
    fn from(topic: &Topic) -> Self {
        Self {
            name: topic.name.clone(),
            id: topic.id,
            settings: topic.settings.clone(),
            map_version: topic.map.version,
            map_queues: topic.map.queues,
        }
    }
}

impl Broker {
    /// Makes a topic.
    pub async fn create_topic(&self, name: &str, change: TopicChange) -> Result<TopicInfo, Error> {
        let name = TopicName::new(name)?;
        let settings = change.apply(&self.default_topic());
        settings.check()?;
        let (topic, pending) = self.make_topic(&name, settings)?;
        pending.await?;
        Ok(TopicInfo::from(&*topic))
    }

    /// Makes a topic because a message for it has come. Fine when somebody else was faster.
    pub(super) fn make_topic_on_demand(&self, name: &TopicName) -> Result<(), Error> {
        match self.make_topic(name, self.default_topic()) {
            Ok(_) => {
                tracing::info!(topic = %name, "topic made by its first send");
                Ok(())
            }
            Err(Error::TopicExists(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn default_topic(&self) -> TopicSettings {
        TopicSettings { queues: self.inner.config.topics.default_queues, ..TopicSettings::default() }
    }

    fn make_topic(&self, name: &TopicName, settings: TopicSettings) -> Result<(Arc<Topic>, Pending), Error> {
        let (store, limit, begun) = (&self.inner.store, self.inner.config.topics.max, Instant::now());
        let made = if store.topic(name).is_none() && store.status().topics >= limit {
            Err(Error::LimitReached { what: "topics", key: "topics.max", limit })
        } else {
            store
                .transact(Purpose::Send, |tx| {
                    if tx.topic(name).is_some() {
                        return Err(Error::TopicExists(name.clone()));
                    }
                    Ok(tx.create_topic(name.clone(), settings))
                })
                .map_err(Error::from)
        };
        self.inner.metrics.topic_made(made.is_ok(), begun.elapsed());
        made
    }

    /// Changes a topic's settings.
    pub async fn update_topic(&self, name: &str, change: TopicChange) -> Result<TopicInfo, Error> {
        let name = TopicName::new(name)?;
        let store = &self.inner.store;
        let known = store.topic(&name).ok_or_else(|| Error::TopicNotFound(name.clone()))?;
        let readers = match change.queues {
            Some(queues) if queues < known.settings.queues => self.readers_of(&known).await,
            _ => Vec::new(),
        };
        let decided = store.transact(Purpose::State, |tx| {
            let topic = tx
                .topic(&name)
                .filter(|now| now.id == known.id)
                .ok_or_else(|| Error::TopicNotFound(name.clone()))?;
            let settings = change.apply(&topic.settings);
            settings.check()?;
            if settings.queues < topic.settings.queues {
                // Groups that have come since then had nothing to read these queues by.
                check_spare(&topic, settings.queues, &readers)?;
            }
            let map = if settings.queues < topic.map.queues {
                QueueMap { version: topic.map.version.saturating_add(1), queues: settings.queues }
            } else {
                topic.map
            };
            let queues = (topic.settings.queues, settings.queues);
            tx.update_topic(&topic, settings, map);
            Ok(queues)
        });
        let ((before, after), pending) = decided.map_err(Error::from)?;
        if after < before {
            self.inner.hold.close_queues(known.id, after);
        }
        pending.await?;
        let topic = store.topic(&name).ok_or(Error::TopicNotFound(name))?;
        Ok(TopicInfo::from(&*topic))
    }

    /// Deletes a topic, its messages and all progress on it.
    pub async fn delete_topic(&self, name: &str) -> Result<(), Error> {
        let name = TopicName::new(name)?;
        let decided = self.inner.store.transact(Purpose::State, |tx| {
            let topic = tx.topic(&name).ok_or_else(|| Error::TopicNotFound(name.clone()))?;
            tx.delete_topic(&topic);
            Ok(topic.id)
        });
        let (_, pending) = decided.map_err(Error::from)?;
        pending.await?;
        self.forget_counters();
        Ok(())
    }

    /// Topics by name.
    pub async fn list_topics(&self, command: ListCommand) -> Result<Page<TopicInfo>, Error> {
        let store = &self.inner.store;
        let size = check_list(&command)?;
        let found = store.topics(&command.page_token, &command.prefix, size.saturating_add(1));
        let mut shown = Shown::default();
        found.iter().for_each(|topic| shown.note(topic.position));
        shown.settled(store).await?;
        Ok(page(found.iter().map(|topic| TopicInfo::from(&**topic)).collect(), size, |topic| {
            topic.name.as_str()
        }))
    }

    /// One topic with its queues.
    pub async fn describe_topic(&self, name: &str) -> Result<TopicDescription, Error> {
        let name = TopicName::new(name)?;
        let store = &self.inner.store;
        let topic = store.topic(&name).ok_or_else(|| Error::TopicNotFound(name.clone()))?;
        let mut shown = Shown::default();
        shown.note(topic.position);
        let mut groups: Vec<GroupName> =
            self.readers_of(&topic).await.iter().map(|group| group.name.clone()).collect();
        groups.sort();
        let queues = topic.queues.iter().map(|queue| {
            let (start, end) = queue.bounds();
            let newest = end.checked_sub(1).filter(|&newest| newest >= start);
            QueueInfo {
                queue: queue.key().queue,
                min_offset: start,
                max_offset: end,
                bytes: queue.bytes(),
                oldest_ms: newest.and_then(|_| store.store_ms_at(queue, start)),
                newest_ms: newest.and_then(|newest| store.store_ms_at(queue, newest)),
            }
        });
        let queues = queues.collect();
        shown.settled(store).await?;
        Ok(TopicDescription {
            promise: promise(&topic.settings, store.status().flush_interval_ms),
            topic: TopicInfo::from(&*topic),
            queues,
            groups,
        })
    }

    /// Groups that have progress on a topic.
    async fn readers_of(&self, topic: &Topic) -> Vec<Arc<Group>> {
        let mut readers = Vec::new();
        for (at, group) in self.inner.store.groups("", "", usize::MAX).into_iter().enumerate() {
            if topic.queues.iter().any(|queue| group.committed(queue.key()).is_some()) {
                readers.push(group);
            }
            if at % SLICE_GROUPS == SLICE_GROUPS - 1 {
                tokio::task::yield_now().await;
            }
        }
        readers
    }
}

/// Whether queues from number `keep` on can go: each is empty, or every group that reads the topic is through
/// with it and there is such a group.
fn check_spare(topic: &Topic, keep: u32, readers: &[Arc<Group>]) -> Result<(), Error> {
    for queue in topic.queues.iter().skip(keep as usize) {
        let key: QueueKey = queue.key();
        let (start, _) = queue.bounds();
        let end = queue.next();
        if start == end {
            continue;
        }
        let left = end.saturating_sub(start);
        let problem = if readers.is_empty() {
            format!(
                "queue {} holds {left} messages and no group has read the topic; read them, or let retention remove them",
                key.queue
            )
        } else {
            let behind = readers
                .iter()
                .find(|group| group.committed(key).is_none_or(|committed| committed.offset < end));
            let Some(group) = behind else { continue };
            let at = group.committed(key).map_or(start, |committed| committed.offset.max(start));
            format!(
                "queue {} holds {} messages that group `{}` has not read; let it read them, reset its offsets, or delete it",
                key.queue,
                end.saturating_sub(at),
                group.name
            )
        };
        return Err(Error::UnreadMessages {
            topic: topic.name.clone(),
            queues: topic.settings.queues,
            queue: key.queue,
            problem,
        });
    }
    Ok(())
}

fn promise(settings: &TopicSettings, flush_interval_ms: u64) -> String {
    match (settings.durability, settings.visibility) {
        (DurabilityLevel::Sync, _) => {
            "OK means synced to the device: the message survives a crash of the broker and a power cut. Readers see it from then on."
                .to_owned()
        }
        (DurabilityLevel::Async, visibility) => {
            let readers = match visibility {
                Visibility::Appended => {
                    "Readers see messages at once; those that a power cut takes back become a range that readers are told is lost."
                }
                Visibility::Flushed => "Readers see messages once they are synced.",
            };
            format!(
                "OK means in the page cache: the message survives a crash of the broker, but a power cut may take what was sent in the last {flush_interval_ms} ms. {readers}"
            )
        }
    }
}

/// Checks what a list is asked with; the number of entries wanted.
pub(super) fn check_list(command: &ListCommand) -> Result<usize, Error> {
    for (field, text) in [("page_token", &command.page_token), ("prefix", &command.prefix)] {
        if text.len() > MAX_PREFIX_BYTES {
            let problem = format!("has {} bytes, over the limit of {MAX_PREFIX_BYTES}", text.len());
            return Err(Invalid::new(field, problem).into());
        }
    }
    match command.page_size {
        0 => Ok(MAX_PAGE as usize),
        size if size <= MAX_PAGE => Ok(size as usize),
        size => Err(Invalid::new("page_size", format!("is {size}; use 1 to {MAX_PAGE}, or 0")).into()),
    }
}

/// The first `size` of `items`; the name of the last is the token of the next page if there are more.
pub(super) fn page<T>(mut items: Vec<T>, size: usize, name: impl Fn(&T) -> &str) -> Page<T> {
    let more = items.len() > size;
    items.truncate(size);
    let next = items.last().filter(|_| more).map_or_else(String::new, |last| name(last).to_owned());
    Page { items, next }
}

impl From<TransactError<Error>> for Error {
    fn from(error: TransactError<Error>) -> Self {
        match error {
            TransactError::Decided(error) => error,
            TransactError::Store(error) => error.into(),
        }
    }
}
