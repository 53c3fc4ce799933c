//! Consumer groups: made, changed, deleted, listed, described with their lag.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Broker, Error, GroupChange, GroupDescription, GroupInfo, ListCommand, Page, QueueLag,
    metrics::LagRow,
    offsets::{Shown, in_force},
    topics::{check_list, page},
};
use crate::{
    model::{GroupName, GroupSettings, TopicName},
    store::{Group, Pending, Purpose},
};

/// Queues looked at before others get a turn.
const SLICE_QUEUES: usize = 256;
/// A refresh of the lag that takes longer is given up.
const LAG_REFRESH_MAX: Duration = Duration::from_secs(5);

impl From<&Group> for GroupInfo {
    fn from(group: &Group) -> Self {
        Self { name: group.name.clone(), id: group.id, settings: group.settings.clone() }
    }
}

impl Broker {
    /// Makes a consumer group.
    pub async fn create_group(&self, name: &str, change: GroupChange) -> Result<GroupInfo, Error> {
        let name = GroupName::new(name)?;
        let (group, pending) = self.make_group(&name, change.apply(&GroupSettings::default()))?;
        pending.await?;
        Ok(GroupInfo::from(&*group))
    }

    /// The group that a call names; made if it is not there and the configuration allows that.
    pub(super) fn group_on_demand(&self, name: &GroupName) -> Result<Arc<Group>, Error> {
        if let Some(group) = self.inner.store.group(name) {
            return Ok(group);
        }
        if !self.inner.config.groups.auto_create {
            return Err(Error::GroupNotFound(name.clone()));
        }
        match self.make_group(name, GroupSettings::default()) {
            Ok((group, _)) => {
                tracing::info!(group = %name, "consumer group made by its first use");
                Ok(group)
            }
            Err(Error::GroupExists(_)) => {
                self.inner.store.group(name).ok_or_else(|| Error::GroupNotFound(name.clone()))
            }
            Err(error) => Err(error),
        }
    }

    fn make_group(&self, name: &GroupName, settings: GroupSettings) -> Result<(Arc<Group>, Pending), Error> {
        let (store, limit, begun) = (&self.inner.store, self.inner.config.groups.max, Instant::now());
        let made = if store.group(name).is_none() && store.status().groups >= limit {
            Err(Error::LimitReached { what: "consumer groups", key: "groups.max", limit })
        } else {
            store
                .transact(Purpose::State, |tx| {
                    if tx.group(name).is_some() {
                        return Err(Error::GroupExists(name.clone()));
                    }
                    Ok(tx.create_group(name.clone(), settings))
                })
                .map_err(Error::from)
        };
        self.inner.metrics.group_made(made.is_ok(), begun.elapsed());
        made
    }

    /// Changes a group's settings.
    pub async fn update_group(&self, name: &str, change: GroupChange) -> Result<GroupInfo, Error> {
        let name = GroupName::new(name)?;
        let decided = self.inner.store.transact(Purpose::State, |tx| {
            let group = tx.group(&name).ok_or_else(|| Error::GroupNotFound(name.clone()))?;
            tx.update_group(&group, change.apply(&group.settings));
            Ok(())
        });
        let ((), pending) = decided.map_err(Error::from)?;
        pending.await?;
        let group = self.inner.store.group(&name).ok_or(Error::GroupNotFound(name))?;
        Ok(GroupInfo::from(&*group))
    }

    /// Deletes a group and its progress.
    pub async fn delete_group(&self, name: &str) -> Result<(), Error> {
        let name = GroupName::new(name)?;
        let decided = self.inner.store.transact(Purpose::State, |tx| {
            let group = tx.group(&name).ok_or_else(|| Error::GroupNotFound(name.clone()))?;
            tx.delete_group(&group);
            Ok(())
        });
        let ((), pending) = decided.map_err(Error::from)?;
        pending.await?;
        self.forget_counters();
        Ok(())
    }

    /// Groups by name.
    pub async fn list_groups(&self, command: ListCommand) -> Result<Page<GroupInfo>, Error> {
        let store = &self.inner.store;
        let size = check_list(&command)?;
        let found = store.groups(&command.page_token, &command.prefix, size.saturating_add(1));
        let mut shown = Shown::default();
        found.iter().for_each(|group| shown.note(group.position));
        shown.settled(store).await?;
        Ok(page(found.iter().map(|group| GroupInfo::from(&**group)).collect(), size, |group| {
            group.name.as_str()
        }))
    }

    /// One group with its lag on every queue it has progress on; only on `topic` unless that is empty.
    pub async fn describe_group(&self, name: &str, topic: &str) -> Result<GroupDescription, Error> {
        let name = GroupName::new(name)?;
        let store = &self.inner.store;
        let topic = match topic {
            "" => None,
            topic => {
                let topic = TopicName::new(topic)?;
                Some(store.topic(&topic).ok_or(Error::TopicNotFound(topic))?.name.clone())
            }
        };
        let group = store.group(&name).ok_or(Error::GroupNotFound(name))?;
        let mut shown = Shown::default();
        shown.note(group.position);
        let queues = self.lag_of(&group, topic.as_ref(), &mut shown).await;
        shown.settled(store).await?;
        let lag_messages = queues.iter().fold(0_u64, |sum, queue| sum.saturating_add(queue.lag_messages));
        Ok(GroupDescription { group: GroupInfo::from(&*group), queues, lag_messages })
    }

    /// Lag on each queue that is there still, by topic name and queue.
    async fn lag_of(&self, group: &Group, only: Option<&TopicName>, shown: &mut Shown) -> Vec<QueueLag> {
        let (store, now_ms) = (&self.inner.store, self.inner.clock.now_ms());
        let mut queues = Vec::new();
        for (at, (key, _)) in group.progress().into_iter().enumerate() {
            if at % SLICE_QUEUES == SLICE_QUEUES - 1 {
                tokio::task::yield_now().await;
            }
            let Some(topic) = store.topic_by_id(key.topic) else { continue };
            let Some(queue) = topic.queues.get(key.queue as usize) else { continue };
            if only.is_some_and(|only| *only != topic.name) {
                continue;
            }
            // Progress first: it was within the bounds then, and those only grow.
            let Some(committed) = in_force(group, key, u64::MAX, shown) else { continue };
            let (min_offset, max_offset) = queue.bounds();
            let committed = committed.min(max_offset);
            let next = committed.max(min_offset);
            let lag_messages = store.count(queue, next).min(max_offset.saturating_sub(next));
            let oldest = store.store_ms_at(queue, next).filter(|_| lag_messages > 0);
            queues.push(QueueLag {
                topic: topic.name.clone(),
                queue: key.queue,
                committed,
                min_offset,
                max_offset,
                lag_messages,
                lag_time: oldest.map(|ms| Duration::from_millis(now_ms.saturating_sub(ms))),
            });
        }
        queues.sort_by(|a, b| (&a.topic, a.queue).cmp(&(&b.topic, b.queue)));
        queues
    }

    /// Works out what metrics show of lag, for all groups.
    pub(super) async fn refresh_lag(&self) {
        let (begun, mut rows) = (Instant::now(), Vec::<LagRow>::new());
        for group in self.inner.store.groups("", "", usize::MAX) {
            for queue in self.lag_of(&group, None, &mut Shown::default()).await {
                let oldest = queue.lag_time.unwrap_or_default();
                match rows.last_mut() {
                    Some(row) if row.group == group.name && row.topic == queue.topic => {
                        row.messages = row.messages.saturating_add(queue.lag_messages);
                        row.oldest = row.oldest.max(oldest);
                    }
                    _ => rows.push(LagRow {
                        topic: queue.topic,
                        group: group.name.clone(),
                        messages: queue.lag_messages,
                        oldest,
                    }),
                }
            }
            if begun.elapsed() > LAG_REFRESH_MAX {
                self.inner.metrics.lag_skipped();
                return;
            }
            tokio::task::yield_now().await;
        }
        self.inner.metrics.set_lag(rows);
    }

    /// Drops the counters of topics and groups that are gone.
    pub(super) fn forget_counters(&self) {
        let store = &self.inner.store;
        self.inner.metrics.retain(
            |id| store.topic_by_id(id).is_some(),
            |name, id| store.group(name).is_some_and(|group| group.id == id),
        );
    }
}
