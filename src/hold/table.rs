//! One shard of the hold: who waits for which queue. Nodes live in a slab and are chained twice: those that
//! wait for a wake-up by queue, in the order they began to, and all of one client on one queue by age.

use std::{
    collections::{HashMap, hash_map},
    sync::Arc,
    task::{Poll, Waker},
    time::Instant,
};

use super::Event;
use crate::{
    model::QueueKey,
    runtime::{WakeHub, WakerSet},
};

/// No node.
const NONE: u32 = u32::MAX;
/// Free nodes that are kept when nobody waits.
const KEEP_NODES: usize = 64;

/// Number of a node in its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeId(u32);

#[derive(Debug)]
struct Node {
    key: QueueKey,
    /// Whose it is, for the limit per client.
    client: Option<u64>,
    replaced: bool,
    /// In the chain of its queue, with `waker`.
    armed: bool,
    /// Place in the order of arming.
    order: u64,
    /// End of the queue that the waiter has looked up to.
    seen: u64,
    waker: Option<Waker>,
    hub: Option<Arc<WakeHub>>,
    /// Chain of its queue; `next` chains free nodes too.
    previous: u32,
    next: u32,
    /// Chain of its client.
    older: u32,
    younger: u32,
}

/// What is known of a queue while somebody subscribes to it.
#[derive(Debug)]
struct Entry {
    subscribers: u32,
    /// Newest end that was published since somebody subscribed.
    end: u64,
    published: Instant,
    closed: bool,
    first: u32,
    last: u32,
    /// What the last sweep saw: nothing yet, an end, or that the queue is gone.
    swept: Swept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Swept {
    Never,
    End(u64),
    Gone,
}

#[derive(Debug)]
struct Chain {
    oldest: u32,
    youngest: u32,
    count: u32,
}

/// Waiters of some of the queues.
#[derive(Debug, Default)]
pub(super) struct Table {
    queues: HashMap<QueueKey, Entry>,
    clients: HashMap<(QueueKey, u64), Chain>,
    nodes: Vec<Node>,
    /// First free node, if `nodes` has any.
    free: Option<u32>,
    used: usize,
    order: u64,
}

impl Table {
    /// Adds a waiter. When its client has `per_client` on the queue already, the oldest is told to go.
    pub(super) fn subscribe(
        &mut self,
        key: QueueKey,
        client: Option<u64>,
        per_client: usize,
        wake: &mut WakerSet,
    ) -> (NodeId, bool) {
        let replaced = client.is_some_and(|client| self.replace_oldest(key, client, per_client, wake));
        let entry = self.queues.entry(key).or_insert_with(|| Entry {
            subscribers: 0,
            end: 0,
            published: Instant::now(),
            closed: false,
            first: NONE,
            last: NONE,
            swept: Swept::Never,
        });
        entry.subscribers = entry.subscribers.saturating_add(1);
        let id = self.allocate(Node {
            key,
            client,
            replaced: false,
            armed: false,
            order: 0,
            seen: 0,
            waker: None,
            hub: None,
            previous: NONE,
            next: NONE,
            older: NONE,
            younger: NONE,
        });
        if let Some(client) = client {
            self.chain_client(id, key, client);
        }
        (NodeId(id), replaced)
    }

    /// What has happened to `id` since it saw the queue end at `seen`; if nothing, wakes `waker` when it does.
    /// `old` gets the waker that this one takes the place of, to be dropped without the lock.
    pub(super) fn poll(
        &mut self,
        id: NodeId,
        seen: u64,
        stopped: bool,
        waker: &Waker,
        old: &mut Option<Waker>,
    ) -> Poll<Event> {
        let Some(node) = self.nodes.get_mut(id.0 as usize) else { return Poll::Ready(Event::Closed) };
        let Some(entry) = self.queues.get(&node.key) else { return Poll::Ready(Event::Closed) };
        let event = if stopped {
            Some(Event::Stopped)
        } else if node.replaced {
            Some(Event::Replaced)
        } else if entry.closed {
            Some(Event::Closed)
        } else if entry.end > seen {
            Some(Event::Grew { end: entry.end, published: entry.published })
        } else {
            None
        };
        if let Some(event) = event {
            self.disarm(id.0);
            return Poll::Ready(event);
        }
        node.seen = seen;
        if !node.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            *old = node.waker.replace(waker.clone());
            node.hub = WakeHub::current();
        }
        if !node.armed {
            self.arm(id.0);
        }
        Poll::Pending
    }

    /// Forgets a waiter; its waker is to be dropped without the lock.
    pub(super) fn remove(&mut self, id: NodeId) -> Option<Waker> {
        self.disarm(id.0);
        let node = self.nodes.get_mut(id.0 as usize)?;
        let (key, client, waker) = (node.key, node.client, node.waker.take());
        if let Some(client) = client {
            self.unchain_client(id.0, key, client);
        }
        if let hash_map::Entry::Occupied(mut entry) = self.queues.entry(key) {
            let queue = entry.get_mut();
            queue.subscribers = queue.subscribers.saturating_sub(1);
            if queue.subscribers == 0 {
                entry.remove();
            }
        }
        self.release(id.0);
        waker
    }

    /// Notes that a queue has grown; true when somebody waits for that.
    pub(super) fn grew(&mut self, key: QueueKey, end: u64, now: Instant) -> bool {
        let Some(entry) = self.queues.get_mut(&key) else { return false };
        if end > entry.end {
            entry.end = end;
            entry.published = now;
        }
        entry.first != NONE
    }

    /// Notes that a queue is gone; true when somebody waits for it.
    pub(super) fn close(&mut self, key: QueueKey) -> bool {
        let Some(entry) = self.queues.get_mut(&key) else { return false };
        entry.closed = true;
        entry.first != NONE
    }

    /// The order that the next waiter to arm will get.
    pub(super) fn next_order(&self) -> u64 {
        self.order
    }

    /// Moves at most `most` wakers of a queue out, in the order of waiting, of those armed before `before`.
    /// False when there are no more.
    pub(super) fn take(&mut self, key: QueueKey, before: u64, most: usize, into: &mut WakerSet) -> bool {
        for _ in 0..most {
            let first = self.queues.get(&key).map_or(NONE, |entry| entry.first);
            let Some(node) = self.nodes.get(first as usize).filter(|node| node.order < before) else {
                return false;
            };
            debug_assert!(node.armed, "only armed nodes are chained");
            self.wake(first, into);
        }
        true
    }

    /// Queues that somebody waits for.
    pub(super) fn waited_for(&self) -> Vec<QueueKey> {
        self.queues.iter().filter(|(_, entry)| entry.first != NONE).map(|(&key, _)| key).collect()
    }

    /// Compares what waiters of a queue have seen with what a sweep saw: `end`, or `None` for a queue that is
    /// gone. Only what stays so from one sweep to the next was missed. Says how many waiters missed it.
    pub(super) fn sweep(&mut self, key: QueueKey, end: Option<u64>) -> usize {
        let Some(entry) = self.queues.get_mut(&key) else { return 0 };
        let before = entry.swept;
        entry.swept = end.map_or(Swept::Gone, Swept::End);
        let (known_end, mut at, mut missed) = (entry.end, entry.first, 0_usize);
        while let Some(node) = self.nodes.get(at as usize) {
            let late = match before {
                Swept::Never => false,
                Swept::End(end) => end > node.seen,
                Swept::Gone => end.is_none(),
            };
            missed = missed.saturating_add(usize::from(late));
            at = node.next;
        }
        if missed > 0 {
            match end {
                None => drop(self.close(key)),
                Some(end) => drop(self.grew(key, end.max(known_end), Instant::now())),
            }
        }
        missed
    }

    /// Whether nobody is left and nothing is kept.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.clients.is_empty() && self.used == 0
    }

    fn replace_oldest(&mut self, key: QueueKey, client: u64, per_client: usize, wake: &mut WakerSet) -> bool {
        let Some(chain) = self.clients.get(&(key, client)) else { return false };
        if (chain.count as usize) < per_client {
            return false;
        }
        let oldest = chain.oldest;
        self.unchain_client(oldest, key, client);
        if let Some(node) = self.nodes.get_mut(oldest as usize) {
            node.client = None;
            node.replaced = true;
        }
        self.wake(oldest, wake);
        true
    }

    /// Takes an armed node out of its chain and hands its waker over.
    fn wake(&mut self, id: u32, into: &mut WakerSet) {
        self.disarm(id);
        if let Some(node) = self.nodes.get_mut(id as usize)
            && let Some(waker) = node.waker.take()
        {
            into.push_for(node.hub.take(), waker);
        }
    }

    fn arm(&mut self, id: u32) {
        let order = self.order;
        self.order = order.wrapping_add(1);
        let Some(key) = self.nodes.get(id as usize).map(|node| node.key) else { return };
        let Some(entry) = self.queues.get_mut(&key) else { return };
        let last = std::mem::replace(&mut entry.last, id);
        if entry.first == NONE {
            entry.first = id;
        }
        if let Some(node) = self.nodes.get_mut(last as usize) {
            node.next = id;
        }
        if let Some(node) = self.nodes.get_mut(id as usize) {
            (node.armed, node.order, node.previous, node.next) = (true, order, last, NONE);
        }
    }

    fn disarm(&mut self, id: u32) {
        let Some(node) = self.nodes.get_mut(id as usize).filter(|node| node.armed) else { return };
        node.armed = false;
        let (key, previous, next) = (node.key, node.previous, node.next);
        (node.previous, node.next) = (NONE, NONE);
        let Some(entry) = self.queues.get_mut(&key) else { return };
        match self.nodes.get_mut(previous as usize) {
            Some(node) => node.next = next,
            None => entry.first = next,
        }
        match self.nodes.get_mut(next as usize) {
            Some(node) => node.previous = previous,
            None => entry.last = previous,
        }
    }

    fn chain_client(&mut self, id: u32, key: QueueKey, client: u64) {
        let chain =
            self.clients.entry((key, client)).or_insert(Chain { oldest: NONE, youngest: NONE, count: 0 });
        let older = std::mem::replace(&mut chain.youngest, id);
        chain.count = chain.count.saturating_add(1);
        if chain.oldest == NONE {
            chain.oldest = id;
        }
        if let Some(node) = self.nodes.get_mut(older as usize) {
            node.younger = id;
        }
        if let Some(node) = self.nodes.get_mut(id as usize) {
            (node.older, node.younger) = (older, NONE);
        }
    }

    fn unchain_client(&mut self, id: u32, key: QueueKey, client: u64) {
        let Some(node) = self.nodes.get_mut(id as usize) else { return };
        let (older, younger) = (node.older, node.younger);
        (node.older, node.younger) = (NONE, NONE);
        let hash_map::Entry::Occupied(mut entry) = self.clients.entry((key, client)) else { return };
        let chain = entry.get_mut();
        match self.nodes.get_mut(older as usize) {
            Some(node) => node.younger = younger,
            None => chain.oldest = younger,
        }
        match self.nodes.get_mut(younger as usize) {
            Some(node) => node.older = older,
            None => chain.youngest = older,
        }
        chain.count = chain.count.saturating_sub(1);
        if chain.count == 0 {
            entry.remove();
        }
    }

    fn allocate(&mut self, node: Node) -> u32 {
        self.used = self.used.saturating_add(1);
        if let Some(id) = self.free.take()
            && let Some(place) = self.nodes.get_mut(id as usize)
        {
            self.free = Some(place.next).filter(|&next| next != NONE);
            *place = node;
            return id;
        }
        let id = u32::try_from(self.nodes.len()).unwrap_or(NONE);
        self.nodes.push(node);
        id
    }

    fn release(&mut self, id: u32) {
        self.used = self.used.saturating_sub(1);
        if self.used == 0 {
            // A crowd has gone: give its memory back.
            self.free = None;
            self.nodes.clear();
            self.nodes.shrink_to(KEEP_NODES);
            self.queues.shrink_to(KEEP_NODES);
            self.clients.shrink_to(KEEP_NODES);
            return;
        }
        if let Some(node) = self.nodes.get_mut(id as usize) {
            node.hub = None;
            node.next = self.free.unwrap_or(NONE);
            self.free = Some(id);
        }
    }
}
