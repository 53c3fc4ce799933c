//! Pulls wait here until their queue grows; knows queues and offsets, nothing else.
//!
//! A pull subscribes, then looks at its queue, then waits: what is published in between is remembered, so no
//! wake-up is lost. A publication stands for all entries up to its end; whoever is woken looks at them itself.
//! Every wait ends by news, by its waiter being dropped (deadline, client gone), by a younger request of the
//! same client, by the end of the queue, or by [`Hold::stop`].

mod metrics;
mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, hash_map},
    fmt,
    future::poll_fn,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
    task::{Context, Poll},
    time::Instant,
};

use opentelemetry::metrics::Meter;
use parking_lot::Mutex;

use self::{
    metrics::Metrics,
    table::{NodeId, Table},
};
use crate::{
    model::{MAX_QUEUES, QueueKey, TopicId},
    runtime::WakerSet,
};

/// Parts of the table, each with its own lock.
const SHARDS: usize = 64;
/// Parts of the count by connection.
const CONNECTION_SHARDS: usize = 16;
/// Wakers taken out under one hold of a lock.
const SLICE: usize = 512;

/// How many may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of one client and group on one queue; one more replaces the oldest.
    pub per_client: usize,
    /// By one connection.
    pub per_connection: usize,
    /// In all.
    pub total: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { per_client: 2, per_connection: 16_384, total: 200_000 }
    }
}

/// Who wants to wait.
#[derive(Clone, Copy, Debug, Default)]
pub struct HoldTicket {
    /// From [`Hold::client_key`]; `None`: cannot be told from others, and replaces none.
    pub client: Option<u64>,
    /// Number of its connection.
    pub connection: u64,
}

/// Why somebody may not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Its connection holds as many as it may.
    Connection,
    /// The node does.
    Node,
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The queue has grown.
    Grew {
        /// Up to here.
        end: u64,
        /// When that was published.
        published: Instant,
    },
    /// A younger request of the same client took its place.
    Replaced,
    /// The queue is gone.
    Closed,
    /// The hold has stopped.
    Stopped,
}

/// How a held request ended, for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Answered with news.
    News,
    /// Answered at its deadline.
    TimedOut,
    /// Answered because a younger one took its place.
    Replaced,
    /// Its queue is gone.
    Closed,
    /// The broker stops.
    Stopped,
    /// The client went away.
    Cancelled,
}

impl Outcome {
    const ALL: [Self; 6] =
        [Self::News, Self::TimedOut, Self::Replaced, Self::Closed, Self::Stopped, Self::Cancelled];

    fn as_str(self) -> &'static str {
        match self {
            Self::News => "news",
            Self::TimedOut => "timed_out",
            Self::Replaced => "replaced",
            Self::Closed => "closed",
            Self::Stopped => "stopped",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Where pulls wait. Cheap to clone; all clones are the same.
///
/// No two of its locks are held at once.
#[derive(Clone)]
pub struct Hold {
    inner: Arc<Inner>,
}

struct Inner {
    limits: Limits,
    hasher: RandomState,
    shards: Box<[Mutex<Table>]>,
    connections: Box<[Mutex<HashMap<u64, usize>>]>,
    stopped: AtomicBool,
    metrics: Metrics,
}

impl Hold {
    /// An empty hold.
    pub fn new(limits: Limits, meter: &Meter) -> Self {
        let inner = Inner {
            limits,
            hasher: RandomState::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            connections: (0..CONNECTION_SHARDS).map(|_| Mutex::default()).collect(),
            stopped: AtomicBool::new(false),
            metrics: Metrics::new(meter),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Stands for a client of a group in this hold; `None` for one without a name.
    pub fn client_key(&self, group: &str, client: &str) -> Option<u64> {
        (!client.is_empty()).then(|| self.inner.hasher.hash_one((group, client)))
    }

    /// Begins to remember what happens to `key`. Look at the queue after this and before waiting.
    pub fn subscribe(&self, key: QueueKey, ticket: HoldTicket) -> Result<Waiter, Full> {
        let inner = &self.inner;
        inner.admit(ticket.connection).inspect_err(|&why| inner.metrics.refused(why))?;
        let mut wake = WakerSet::default();
        let (node, replaced) =
            inner.shard(key).lock().subscribe(key, ticket.client, inner.limits.per_client, &mut wake);
        wake.wake_all();
        if replaced {
            inner.metrics.counts.replaced.fetch_add(1, Ordering::Relaxed);
        }
        // Pairs with the fence in `publish`: either that sees this waiter, or we see what it published.
        fence(Ordering::SeqCst);
        Ok(Waiter {
            inner: Arc::clone(inner),
            key,
            node,
            connection: ticket.connection,
            since: Instant::now(),
            outcome: Outcome::Cancelled,
        })
    }

    /// Each queue can now be read up to the end beside it: wakes those who wait for it, in the order they
    /// began to wait, and each runtime once.
    pub fn publish(&self, ends: &[(QueueKey, u64)]) {
        fence(Ordering::SeqCst);
        if self.held() == 0 {
            return;
        }
        let (now, mut wake) = (Instant::now(), WakerSet::default());
        for &(key, end) in ends {
            self.inner.announce(key, &mut wake, |table| table.grew(key, end, now));
        }
        wake.wake_all();
    }

    /// A topic is gone: ends the wait for its queues.
    pub fn close_topic(&self, topic: TopicId) {
        self.close_queues(topic, 0);
    }

    /// The queues of a topic from number `first` on are gone: ends the wait for them.
    pub fn close_queues(&self, topic: TopicId, first: u32) {
        fence(Ordering::SeqCst);
        if self.held() == 0 {
            return;
        }
        let mut wake = WakerSet::default();
        for queue in first..MAX_QUEUES {
            let key = QueueKey { topic, queue };
            self.inner.announce(key, &mut wake, |table| table.close(key));
        }
        wake.wake_all();
    }

    /// Ends all waits, now and from now on.
    pub fn stop(&self) {
        self.inner.stopped.store(true, Ordering::SeqCst);
        let mut wake = WakerSet::default();
        for shard in &self.inner.shards {
            let keys = shard.lock().waited_for();
            for key in keys {
                self.inner.announce(key, &mut wake, |_| true);
            }
        }
        wake.wake_all();
    }

    /// Whether [`Hold::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.inner.stopped.load(Ordering::SeqCst)
    }

    /// How many wait.
    pub fn held(&self) -> usize {
        self.inner.metrics.counts.waiters.load(Ordering::SeqCst)
    }

    /// Safety net: compares what waiters know with `readable_end` (`None`: the queue is gone) and wakes those
    /// whom no news has reached since the last sweep. Counts and returns them; there should be none.
    pub fn sweep(&self, readable_end: impl Fn(QueueKey) -> Option<u64>) -> usize {
        let (mut missed, mut wake) = (0_usize, WakerSet::default());
        for shard in &self.inner.shards {
            let keys = shard.lock().waited_for();
            for key in keys {
                let end = readable_end(key);
                self.inner.announce(key, &mut wake, |table| {
                    let found = table.sweep(key, end);
                    missed = missed.saturating_add(found);
                    found > 0
                });
            }
        }
        wake.wake_all();
        self.inner.metrics.counts.swept.fetch_add(missed as u64, Ordering::Relaxed);
        missed
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("held", &self.held()).finish_non_exhaustive()
    }
}

impl Inner {
    fn shard(&self, key: QueueKey) -> &Mutex<Table> {
        pick(&self.shards, key.topic.0.wrapping_mul(31).wrapping_add(u64::from(key.queue)))
    }

    /// Lets `note` change the table; when it says that somebody waits, takes out their wakers, in slices so
    /// that others get at the lock.
    fn announce(&self, key: QueueKey, wake: &mut WakerSet, note: impl FnOnce(&mut Table) -> bool) {
        let mut table = self.shard(key).lock();
        if !note(&mut table) {
            return;
        }
        let before = table.next_order();
        while table.take(key, before, SLICE, wake) {
            parking_lot::MutexGuard::bump(&mut table);
        }
    }

    fn admit(&self, connection: u64) -> Result<(), Full> {
        let waiters = &self.metrics.counts.waiters;
        if waiters.fetch_add(1, Ordering::SeqCst) >= self.limits.total {
            waiters.fetch_sub(1, Ordering::SeqCst);
            return Err(Full::Node);
        }
        let mut connections = pick(&self.connections, connection).lock();
        let held = connections.entry(connection).or_insert(0);
        if *held >= self.limits.per_connection {
            drop(connections);
            waiters.fetch_sub(1, Ordering::SeqCst);
            return Err(Full::Connection);
        }
        *held = held.saturating_add(1);
        Ok(())
    }

    fn dismiss(&self, connection: u64) {
        self.metrics.counts.waiters.fetch_sub(1, Ordering::SeqCst);
        let mut connections = pick(&self.connections, connection).lock();
        if let hash_map::Entry::Occupied(mut entry) = connections.entry(connection) {
            let held = entry.get().saturating_sub(1);
            if held == 0 {
                entry.remove();
            } else {
                entry.insert(held);
            }
        }
    }
}

/// The part of `parts` that `number` belongs to.
#[allow(clippy::indexing_slicing)] // the remainder is an index
fn pick<T>(parts: &[T], number: u64) -> &T {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    &parts[mixed as usize % parts.len()]
}

/// One that waits for a queue. Dropping it forgets it at once.
pub struct Waiter {
    inner: Arc<Inner>,
    key: QueueKey,
    node: NodeId,
    connection: u64,
    since: Instant,
    outcome: Outcome,
}

impl Waiter {
    /// Waits for the queue to grow beyond `seen`, the end that the caller has looked up to.
    pub async fn changed(&mut self, seen: u64) -> Event {
        poll_fn(|cx| self.poll_changed(seen, cx)).await
    }

    /// As [`Waiter::changed`].
    pub fn poll_changed(&mut self, seen: u64, cx: &mut Context<'_>) -> Poll<Event> {
        let mut old = None; // dropped after the lock
        let mut table = self.inner.shard(self.key).lock();
        let stopped = self.inner.stopped.load(Ordering::SeqCst);
        table.poll(self.node, seen, stopped, cx.waker(), &mut old)
    }

    /// Woken, but there was nothing to answer: counted.
    pub fn woken_for_nothing(&self) {
        self.inner.metrics.counts.spurious.fetch_add(1, Ordering::Relaxed);
    }

    /// The request is answered. `news` says when what it is answered with was published.
    pub fn end(mut self, outcome: Outcome, news: Option<Instant>) {
        self.outcome = outcome;
        if let Some(published) = news {
            self.inner.metrics.answered(published.elapsed());
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let waker = self.inner.shard(self.key).lock().remove(self.node);
        drop(waker);
        self.inner.dismiss(self.connection);
        self.inner.metrics.ended(self.outcome, self.since.elapsed());
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("key", &self.key).finish_non_exhaustive()
    }
}
