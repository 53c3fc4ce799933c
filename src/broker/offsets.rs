//! Progress of consumer groups: commits, what is committed, and resets.

use std::{collections::HashSet, sync::Arc};

use super::{
    Broker, Commit, CommitCommand, CommitOutcome, Error, OffsetsCommand, QueueOffsets, ResetCommand,
    ResetResult, ResetTo,
};
use crate::{
    model::{GroupName, Invalid, LogPosition, QueueKey, TopicName},
    store::{Group, Pending, Purpose, Queue, Store, TimeBound, TransactError, Tx},
};

/// Most queues of one call.
const MAX_QUEUES_A_CALL: usize = 1024;

/// Commits that are decided, and on their way to disk.
pub(super) struct Riding {
    results: Vec<Commit>,
    pending: Option<Pending>,
}

impl Riding {
    /// Waits for the disk.
    pub(super) async fn settle(self) -> Vec<Commit> {
        let Some(pending) = self.pending else { return self.results };
        match pending.await {
            Ok(_) => self.results,
            Err(error) => failed(self.results.len(), &error.into()),
        }
    }
}

fn failed(count: usize, error: &Error) -> Vec<Commit> {
    vec![Commit { outcome: CommitOutcome::Failed(error.clone()), committed: None }; count]
}

/// Why a transaction about commits appends nothing.
enum NoRecord {
    /// No progress changes.
    Nothing(Vec<Commit>, Shown),
    Error(Error),
}

/// The newest record of state that an answer shows. It may be on its way to disk still.
#[derive(Clone, Copy, Default)]
pub(super) struct Shown(Option<LogPosition>);

impl Shown {
    pub(super) fn note(&mut self, position: LogPosition) {
        self.0 = self.0.max(Some(position));
    }

    pub(super) fn pending(self, store: &Store) -> Option<Pending> {
        self.0.map(|position| store.settled(position))
    }

    /// Waits until it is on disk.
    pub(super) async fn settled(self, store: &Store) -> Result<(), Error> {
        if let Some(pending) = self.pending(store) {
            pending.await?;
        }
        Ok(())
    }
}

/// A group's progress on a queue that ends at `end`. Progress beyond the end (it would stand in the way of
/// every later commit) counts as being at the end.
pub(super) fn in_force(group: &Group, queue: QueueKey, end: u64, shown: &mut Shown) -> Option<u64> {
    let committed = group.committed(queue)?;
    shown.note(committed.position);
    Some(committed.offset.min(end))
}

impl Broker {
    /// Commits a group's progress; durable before the answer.
    pub async fn commit(&self, command: CommitCommand) -> Result<Vec<Commit>, Error> {
        let group = GroupName::new(&command.group)?;
        check_count("offsets", command.offsets.len())?;
        let (mut offsets, mut seen) = (Vec::with_capacity(command.offsets.len()), HashSet::new());
        for (at, wanted) in command.offsets.iter().enumerate() {
            let outer = format!("offsets[{at}]");
            let topic = TopicName::new(&wanted.topic).map_err(|invalid| invalid.within(&outer))?;
            if !seen.insert((topic.clone(), wanted.queue)) {
                let problem = "names a queue for the second time; name each once";
                return Err(Invalid::new(outer, problem).into());
            }
            offsets.push((topic, wanted.queue, wanted.offset));
        }
        let group = self.group_on_demand(&group)?;
        Ok(self.begin_commit(&group, &offsets).settle().await)
    }

    /// Decides commits now, in the order of calls.
    pub(super) fn begin_commit(&self, group: &Group, offsets: &[(TopicName, u32, i64)]) -> Riding {
        let store = &self.inner.store;
        let decided = store.transact(Purpose::State, |tx| {
            let group = tx
                .group(&group.name)
                .ok_or_else(|| NoRecord::Error(Error::GroupNotFound(group.name.clone())))?;
            let (mut accepted, mut shown) = (Vec::new(), Shown::default());
            let results = offsets
                .iter()
                .map(|wanted| decide(tx, &group, wanted, &mut accepted, &mut shown))
                .collect::<Vec<_>>();
            if accepted.is_empty() {
                return Err(NoRecord::Nothing(results, shown));
            }
            tx.commit(&group, &accepted);
            Ok(results)
        });
        match decided {
            Ok((results, pending)) => Riding { results, pending: Some(pending) },
            Err(TransactError::Decided(NoRecord::Nothing(results, shown))) => {
                Riding { results, pending: shown.pending(store) }
            }
            Err(TransactError::Decided(NoRecord::Error(error))) => {
                Riding { results: failed(offsets.len(), &error), pending: None }
            }
            Err(TransactError::Store(error)) => {
                Riding { results: failed(offsets.len(), &error.into()), pending: None }
            }
        }
    }

    /// Bounds, progress and offsets by time.
    pub async fn offsets(&self, command: OffsetsCommand) -> Result<Vec<QueueOffsets>, Error> {
        check_count("queues", command.queues.len())?;
        let store = &self.inner.store;
        let group = match command.group.as_str() {
            "" => None,
            name => {
                let name = GroupName::new(name)?;
                let group = store.group(&name);
                if group.is_none() && !self.inner.config.groups.auto_create {
                    return Err(Error::GroupNotFound(name));
                }
                group
            }
        };
        let (mut found, mut shown) = (Vec::with_capacity(command.queues.len()), Shown::default());
        for (at, (topic, number)) in command.queues.iter().enumerate() {
            let name = TopicName::new(topic).map_err(|invalid| invalid.within(&format!("queues[{at}]")))?;
            let (topic, queue) = self.queue(&name, *number)?;
            shown.note(topic.position);
            // Progress first: it was within the bounds then, and those only grow.
            let committed =
                group.as_ref().and_then(|group| in_force(group, queue.key(), u64::MAX, &mut shown));
            let (min_offset, max_offset) = queue.bounds();
            found.push(QueueOffsets {
                topic: name,
                queue: *number,
                min_offset,
                max_offset,
                committed: committed.map(|committed| committed.min(max_offset)),
                by_time: command
                    .at
                    .map(|(ms, bound)| store.offset_by_time(&queue, ms, bound).clamp(min_offset, max_offset)),
            });
        }
        shown.settled(store).await?;
        Ok(found)
    }

    /// Sets a group's progress, backwards too.
    pub async fn reset_offsets(&self, command: ResetCommand) -> Result<Vec<ResetResult>, Error> {
        let (name, topic_name) = (GroupName::new(&command.group)?, TopicName::new(&command.topic)?);
        let to = command.to.ok_or_else(|| {
            Invalid::new("to", "is missing; name one of earliest, latest, offset, timestamp")
        })?;
        if matches!(to, ResetTo::Offset(_)) && command.queue.is_none() {
            return Err(Invalid::new("queue_id", "is missing; an offset is that of one queue").into());
        }
        let store = &self.inner.store;
        let topic = store.topic(&topic_name).ok_or_else(|| Error::TopicNotFound(topic_name.clone()))?;
        let queues: Vec<Arc<Queue>> = match command.queue {
            Some(number) => vec![self.queue(&topic_name, number)?.1],
            None => topic.queues.clone(),
        };
        // The index is searched before the lock is taken.
        let targets = queues
            .into_iter()
            .map(|queue| {
                let (start, end) = queue.bounds();
                let target = match to {
                    ResetTo::Earliest => start,
                    ResetTo::Latest => end,
                    ResetTo::Time(ms) => store.offset_by_time(&queue, ms, TimeBound::FirstAtOrAfter),
                    ResetTo::Offset(offset) => within(offset, start, end)?,
                };
                Ok((queue, target))
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let decided = store.transact(Purpose::State, |tx| {
            let group = tx.group(&name).ok_or_else(|| NoReset::Error(Error::GroupNotFound(name.clone())))?;
            tx.topic(&topic_name)
                .filter(|now| now.id == topic.id)
                .ok_or_else(|| NoReset::Error(Error::TopicNotFound(topic_name.clone())))?;
            let mut shown = Shown::default();
            let results = reset(&group, &targets, &mut shown);
            if command.dry_run {
                return Err(NoReset::DryRun(results, shown));
            }
            let offsets =
                results.iter().map(|result| (QueueKey { topic: topic.id, queue: result.queue }, result.to));
            tx.commit(&group, &offsets.collect::<Vec<_>>());
            Ok(results)
        });
        match decided {
            Ok((results, pending)) => {
                pending.await?;
                Ok(results)
            }
            Err(TransactError::Decided(NoReset::DryRun(results, shown))) => {
                shown.settled(store).await?;
                Ok(results)
            }
            Err(TransactError::Decided(NoReset::Error(error))) => Err(error),
            Err(TransactError::Store(error)) => Err(error.into()),
        }
    }
}

/// Why a reset appends nothing.
enum NoReset {
    DryRun(Vec<ResetResult>, Shown),
    Error(Error),
}

fn check_count(field: &str, count: usize) -> Result<(), Invalid> {
    if (1..=MAX_QUEUES_A_CALL).contains(&count) {
        return Ok(());
    }
    Err(Invalid::new(field, format!("has {count} entries; use 1 to {MAX_QUEUES_A_CALL}")))
}

fn within(offset: i64, start: u64, end: u64) -> Result<u64, Error> {
    u64::try_from(offset).ok().filter(|offset| (start..=end).contains(offset)).ok_or_else(|| {
        Invalid::new("offset", format!("is {offset}; the queue has offsets {start} to {end}")).into()
    })
}

fn reset(group: &Group, targets: &[(Arc<Queue>, u64)], shown: &mut Shown) -> Vec<ResetResult> {
    targets
        .iter()
        .map(|(queue, target)| {
            let (start, end) = queue.bounds();
            ResetResult {
                queue: queue.key().queue,
                from: in_force(group, queue.key(), end, shown),
                to: (*target).clamp(start, end),
            }
        })
        .collect()
}

/// What becomes of one commit; under the lock.
fn decide(
    tx: &mut Tx<'_>,
    group: &Group,
    (name, number, offset): &(TopicName, u32, i64),
    accepted: &mut Vec<(QueueKey, u64)>,
    shown: &mut Shown,
) -> Commit {
    let not_there = |error| Commit { outcome: CommitOutcome::Failed(error), committed: None };
    let Some(topic) = tx.topic(name) else { return not_there(Error::TopicNotFound(name.clone())) };
    let Some(queue) = topic.queues.get(*number as usize) else {
        return not_there(Error::QueueNotFound {
            topic: name.clone(),
            queue: *number,
            queues: u32::try_from(topic.queues.len()).unwrap_or(u32::MAX),
        });
    };
    let (start, end) = queue.bounds();
    let committed = in_force(group, queue.key(), end, shown);
    let outcome = match u64::try_from(*offset).ok().filter(|offset| (start..=end).contains(offset)) {
        None => CommitOutcome::OutOfRange,
        Some(offset) if committed.is_some_and(|committed| offset < committed) => CommitOutcome::Stale,
        Some(offset) => {
            if group.committed(queue.key()).is_none_or(|known| known.offset != offset) {
                accepted.push((queue.key(), offset));
            }
            return Commit { outcome: CommitOutcome::Committed, committed: Some(offset) };
        }
    };
    Commit { outcome, committed }
}
