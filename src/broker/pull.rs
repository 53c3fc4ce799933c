//! Pulling: look at the queue; if there is nothing, subscribe, look again, wait.
//!
//! What waits is small: the command's texts are gone by then, and the filter is a word. A filter's cursor is
//! kept from look to look, so that no entry is examined twice.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Instant,
};

use bytes::Bytes;

use super::{
    Broker, Commit, CommitOutcome, Error, Inner, PullCommand, PullOutcome, Pulled, metrics::Delivery,
    offsets::Riding,
};
use crate::{
    hold::{Event, HoldTicket, Outcome, Waiter},
    model::{Envelope, GroupName, Invalid, TagFilter, TopicName},
    store::{Fetched, Queue, ScanLimits, Slot},
};

/// Most index entries looked at before others get a turn.
const SLICE_ENTRIES: usize = 8192;
/// Most messages of one answer.
const MAX_MESSAGES: u32 = 1024;
/// Messages of an answer when the caller names no number.
const DEFAULT_MESSAGES: u32 = 32;
/// Most bytes of messages of one answer.
const MAX_BYTES: u32 = 16 * 1024 * 1024;
/// Bytes of an answer when the caller names no number.
const DEFAULT_BYTES: u32 = 1024 * 1024;
/// Longest client id in bytes.
const MAX_CLIENT_BYTES: usize = 255;

/// A pull that has been checked.
struct Pull {
    inner: Arc<Inner>,
    queue: Arc<Queue>,
    delivery: Arc<Delivery>,
    filter: TagFilter,
    /// First offset wanted by the caller, and first that has not been looked at.
    from: u64,
    cursor: u64,
    max_messages: u32,
    max_bytes: u32,
    /// When to stop waiting; `None`: do not wait.
    deadline: Option<Instant>,
    /// The offset wanted is negative.
    negative: bool,
    ticket: HoldTicket,
    riding: Option<Box<Riding>>,
    commit: Option<Box<Commit>>,
}

/// What ends a wait without an answer.
enum Ended {
    Stopped,
    QueueGone,
    Failed(Error),
}

/// What a look at the queue came to.
enum Look {
    Answer(Found),
    /// More entries are there than one slice.
    More,
    /// All of the queue has been looked at, up to this end.
    Nothing {
        start: u64,
        end: u64,
    },
    /// The log has to be read for these.
    Read(Vec<Slot>, Bounds),
}

struct Found {
    outcome: PullOutcome,
    next: u64,
    start: u64,
    end: u64,
}

/// Of the scan that slots come from.
#[derive(Clone, Copy)]
struct Bounds {
    next: u64,
    start: u64,
    end: u64,
}

impl Broker {
    /// Reads one queue, waiting for new messages if asked to. The command is worked off (and its commit
    /// applied) in the call itself; the future keeps only what it needs to wait.
    pub fn pull(&self, command: PullCommand) -> impl Future<Output = Result<Pulled, Error>> + Send + use<> {
        let pull = self.begin_pull(command).map_err(Box::new);
        async move {
            match pull {
                Ok(pull) => pull.run().await,
                Err(error) => Err(*error),
            }
        }
    }

    fn begin_pull(&self, command: PullCommand) -> Result<Box<Pull>, Error> {
        let inner = &self.inner;
        let name = TopicName::new(&command.topic)?;
        let max_messages = limit("max_messages", command.max_messages, DEFAULT_MESSAGES, MAX_MESSAGES)?;
        let max_bytes = limit("max_bytes", command.max_bytes, DEFAULT_BYTES, MAX_BYTES)?;
        let filter = TagFilter::parse(&command.tag_filter).map_err(Error::FilterIllegal)?;
        if command.client.len() > MAX_CLIENT_BYTES {
            let problem = format!("has {} bytes, over the limit of {MAX_CLIENT_BYTES}", command.client.len());
            return Err(Invalid::new("client_id", problem).into());
        }
        let group = match command.group.as_str() {
            "" if command.commit.is_some() => {
                return Err(Invalid::new("group", "is missing; commit_offset needs it").into());
            }
            "" => None,
            group => Some(GroupName::new(group)?),
        };
        let (topic, queue) = self.queue(&name, command.queue)?;
        let group = group.map(|group| self.group_on_demand(&group)).transpose()?;
        let riding = command.commit.zip(group.as_ref()).map(|(offset, group)| {
            Box::new(self.begin_commit(group, &[(name.clone(), command.queue, offset)]))
        });
        let now = Instant::now();
        let wait = command.wait.min(inner.config.pull.wait_max);
        let margin = inner.config.pull.deadline_margin;
        let deadline = now.checked_add(wait).filter(|_| !wait.is_zero()).map(|deadline| {
            let caller = command.deadline.and_then(|caller| caller.checked_sub(margin));
            caller.map_or(deadline, |caller| deadline.min(caller))
        });
        let delivery = inner
            .metrics
            .delivery((topic.id, &topic.name), group.as_ref().map(|group| (group.id, &group.name)));
        let from = u64::try_from(command.offset).unwrap_or(0);
        Ok(Box::new(Pull {
            inner: Arc::clone(inner),
            queue,
            delivery,
            filter,
            from,
            cursor: from,
            max_messages,
            max_bytes,
            deadline: deadline.filter(|&deadline| deadline > now),
            negative: command.offset < 0,
            ticket: HoldTicket {
                client: inner.hold.client_key(&command.group, &command.client),
                connection: command.connection,
            },
            riding,
            commit: None,
        }))
    }
}

fn limit(field: &str, given: u32, default: u32, max: u32) -> Result<u32, Error> {
    match given {
        0 => Ok(default),
        given if given <= max => Ok(given),
        given => Err(Invalid::new(field, format!("is {given}; use 1 to {max}, or 0 for {default}")).into()),
    }
}

impl Pull {
    async fn run(mut self: Box<Self>) -> Result<Pulled, Error> {
        if self.negative {
            // It stands below the first, as any other that is too small.
            let (start, end) = self.queue.bounds();
            return self.answer(Found { outcome: PullOutcome::BelowMin, next: start, start, end }).await;
        }
        let (start, end) = match self.look_until_nothing().await? {
            Ok(found) => return self.answer(found).await,
            Err(bounds) => bounds,
        };
        if self.deadline.is_none() {
            let found = self.nothing(start, end);
            return self.answer(found).await;
        }
        self.settle_commit().await;
        loop {
            let Ok(mut waiter) = self.inner.hold.subscribe(self.queue.key(), self.ticket) else {
                let mut found = self.nothing(start, end);
                if found.outcome == PullOutcome::NoNewMessage(None) {
                    found.outcome = PullOutcome::NoNewMessage(Some(self.inner.config.pull.full_retry));
                }
                return self.answer(found).await;
            };
            match self.hold(&mut waiter).await {
                Ok((found, outcome, news)) => {
                    waiter.end(outcome, news);
                    return self.answer(found).await;
                }
                Err(Ended::Stopped) => {
                    waiter.end(Outcome::Stopped, None);
                    return Err(Error::Stopping);
                }
                Err(Ended::Failed(error)) => {
                    waiter.end(Outcome::News, None);
                    return Err(error);
                }
                Err(Ended::QueueGone) => {
                    waiter.end(Outcome::Closed, None);
                    self.find_queue_again()?;
                }
            }
        }
    }

    /// Looks and waits until there is an answer.
    async fn hold(&mut self, waiter: &mut Waiter) -> Result<(Found, Outcome, Option<Instant>), Ended> {
        let deadline = self.deadline.unwrap_or_else(Instant::now);
        let mut sleep = pin!(tokio::time::sleep_until(deadline.into()));
        let (mut news, mut told) = (None, 0);
        loop {
            let (start, end) = match self.look_until_nothing().await.map_err(Ended::Failed)? {
                Ok(found) => return Ok((found, Outcome::News, news)),
                Err(bounds) => bounds,
            };
            if news.is_some() {
                waiter.woken_for_nothing();
            }
            // What was told once is no news again, even if it was taken back (a failed sync of an async topic).
            let seen = end.max(told);
            let event = poll_fn(|cx| {
                if let Poll::Ready(event) = waiter.poll_changed(seen, cx) {
                    return Poll::Ready(Some(event));
                }
                sleep.as_mut().poll(cx).map(|()| None)
            })
            .await;
            match event {
                Some(Event::Grew { end, published }) => {
                    told = end;
                    news = Some(published);
                }
                Some(Event::Replaced) => return Ok((self.nothing(start, end), Outcome::Replaced, None)),
                Some(Event::Closed) => return Err(Ended::QueueGone),
                Some(Event::Stopped) => return Err(Ended::Stopped),
                None => return Ok((self.nothing(start, end), Outcome::TimedOut, None)),
            }
        }
    }

    /// Looks slice by slice until the deadline; one slice only when the caller does not wait. `Err` has the
    /// bounds of the queue when there was nothing.
    async fn look_until_nothing(&mut self) -> Result<Result<Found, (u64, u64)>, Error> {
        loop {
            let look = match self.look() {
                Look::Read(slots, bounds) => {
                    let first = slots.first().filter(|_| slots.len() > 1).copied();
                    match (self.read(slots).await, first) {
                        (Ok(fetched), _) => self.check(fetched, bounds),
                        // One that the device cannot read does not keep back those before it.
                        (Err(Error::ReadFailed(_)), Some(first)) => {
                            let fetched = self.read(vec![first]).await?;
                            self.check(fetched, Bounds { next: first.offset.saturating_add(1), ..bounds })
                        }
                        (Err(error), _) => return Err(error),
                    }
                }
                look => look,
            };
            match look {
                Look::Answer(found) => return Ok(Ok(found)),
                Look::Nothing { start, end } => return Ok(Err((start, end))),
                Look::More | Look::Read(..) => {}
            }
            if self.deadline.is_none_or(|deadline| deadline <= Instant::now()) {
                return Ok(Err(self.queue.bounds()));
            }
            tokio::task::yield_now().await;
        }
    }

    /// One slice.
    fn look(&mut self) -> Look {
        let limits = ScanLimits {
            messages: self.max_messages as usize,
            bytes: self.max_bytes as usize,
            entries: SLICE_ENTRIES,
        };
        let (start, end) = self.queue.bounds();
        if self.from > end {
            return Look::Answer(Found { outcome: PullOutcome::BeyondMax, next: end, start, end });
        }
        let filter = &self.filter;
        let scan = self.inner.store.scan(&self.queue, self.cursor, limits, |hash| filter.wants_hash(hash));
        let (start, end) = (scan.start, scan.end);
        if self.cursor < start {
            return self.below(start, end);
        }
        let bounds = Bounds { next: scan.next, start, end };
        if !scan.slots.is_empty() {
            return match self.inner.store.fetch_now(self.queue.key(), &scan.slots) {
                Some(fetched) => self.check(fetched, bounds),
                None => Look::Read(scan.slots, bounds),
            };
        }
        if let Some((begin, behind)) = scan.lost {
            let outcome = PullOutcome::DataLoss { begin, end: behind };
            return Look::Answer(Found { outcome, next: behind, start, end });
        }
        let moved = scan.next > self.cursor;
        self.cursor = scan.next.max(self.cursor);
        // Not moved: the index cannot be read just now. News will come when it can.
        if moved && self.cursor < end { Look::More } else { Look::Nothing { start, end } }
    }

    /// The cursor is below the first offset.
    fn below(&mut self, start: u64, end: u64) -> Look {
        if self.cursor == self.from {
            return Look::Answer(Found { outcome: PullOutcome::BelowMin, next: start, start, end });
        }
        // The filter has passed over what was wanted first, and retention has taken what followed.
        self.cursor = start;
        Look::More
    }

    /// Reads what is not in memory, where waiting for the device harms nobody.
    async fn read(&self, slots: Vec<Slot>) -> Result<Vec<Fetched>, Error> {
        let (store, key) = (self.inner.store.clone(), self.queue.key());
        let read = tokio::task::spawn_blocking(move || store.fetch(key, &slots));
        Ok(read.await.map_err(|error| Error::Internal(error.to_string()))??)
    }

    /// What becomes of messages that were read: equal hashes of other tags go, damage ends the answer.
    fn check(&mut self, fetched: Vec<Fetched>, bounds: Bounds) -> Look {
        let mut messages = Vec::with_capacity(fetched.len());
        let mut damaged: Option<(u64, u64)> = None;
        for one in fetched {
            match (one.payload, &mut damaged) {
                (Some(payload), None) => {
                    if self.wants(&payload) {
                        messages.push(payload);
                    }
                }
                (None, None) => damaged = Some((one.offset, one.offset.saturating_add(1))),
                (None, Some((_, end))) if *end == one.offset => *end = end.saturating_add(1),
                (_, Some(_)) => break,
            }
            if damaged.is_some() && !messages.is_empty() {
                break;
            }
        }
        let Bounds { next, start, end } = bounds;
        let next = damaged.map_or(next, |(begin, _)| begin);
        if !messages.is_empty() {
            return Look::Answer(Found { outcome: PullOutcome::Found(messages), next, start, end });
        }
        if let Some((begin, behind)) = damaged {
            let (start, end) = self.queue.bounds();
            if start > begin {
                return self.below(start, end); // not damaged: retention took it between index and log
            }
            let outcome = PullOutcome::DataLoss { begin, end: behind };
            return Look::Answer(Found { outcome, next: behind, start, end });
        }
        self.cursor = next.max(self.cursor);
        Look::More
    }

    fn wants(&self, payload: &Bytes) -> bool {
        self.filter.is_all()
            || Envelope::parse_stored(payload).is_some_and(|message| self.filter.wants_tag(message.tag))
    }

    /// The answer when there is nothing (more) to deliver.
    fn nothing(&self, start: u64, end: u64) -> Found {
        let outcome = if self.cursor > self.from {
            PullOutcome::NoMatchedMessage
        } else {
            PullOutcome::NoNewMessage(None)
        };
        Found { outcome, next: self.cursor, start, end }
    }

    /// After news that the queue is gone: it may have been made anew.
    fn find_queue_again(&mut self) -> Result<(), Error> {
        let key = self.queue.key();
        let Some(topic) = self.inner.store.topic_by_id(key.topic) else {
            return Err(Error::TopicNotFound(self.delivery.topic.clone()));
        };
        let queue = topic.queues.get(key.queue as usize).ok_or_else(|| Error::QueueNotFound {
            topic: topic.name.clone(),
            queue: key.queue,
            queues: u32::try_from(topic.queues.len()).unwrap_or(u32::MAX),
        })?;
        self.queue = Arc::clone(queue);
        Ok(())
    }

    async fn settle_commit(&mut self) {
        if let Some(riding) = self.riding.take() {
            let mut results = riding.settle().await;
            self.commit = Some(Box::new(results.pop().unwrap_or(Commit {
                outcome: CommitOutcome::Failed(Error::Internal("a commit has no result".to_owned())),
                committed: None,
            })));
        }
    }

    async fn answer(mut self: Box<Self>, found: Found) -> Result<Pulled, Error> {
        self.settle_commit().await;
        if let PullOutcome::Found(messages) = &found.outcome {
            let bytes = messages.iter().fold(0_usize, |sum, message| sum.saturating_add(message.len()));
            self.delivery.delivered(messages.len(), bytes);
        }
        Ok(Pulled {
            outcome: found.outcome,
            next_offset: found.next,
            min_offset: found.start,
            max_offset: found.end,
            commit: self.commit.take().map(|commit| *commit),
        })
    }
}

/// Bytes of what a pull keeps beside its future.
#[cfg(test)]
pub(super) fn boxed_bytes() -> usize {
    size_of::<Pull>()
}
