//! One queue: which offsets there are, which readers may see, and where the messages stand in the log.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;

use super::index::{Entry, IndexSpace, Lookup, QueueIndex};
use crate::model::QueueKey;

/// One queue.
#[derive(Debug)]
pub struct Queue {
    key: QueueKey,
    /// Next offset to give out. Written under the log's lock.
    next: AtomicU64,
    /// First offset that is kept.
    start: AtomicU64,
    /// Readers may see what is below.
    visible: AtomicU64,
    /// Log bytes of the messages from `start` on.
    bytes: AtomicU64,
    /// Where the newest record of its bounds stands; 0: there is none.
    bounds_position: AtomicU64,
    /// Newest record that changed what a snapshot says of the queue.
    changed: AtomicU64,
    /// Found damaged; until it is rebuilt, readers stop before the damage.
    index_damaged: AtomicBool,
    /// Its topic was deleted; what is still on its way is not indexed.
    gone: AtomicBool,
    index: RwLock<QueueIndex>,
}

impl Queue {
    pub(super) fn new(key: QueueKey) -> Self {
        Self {
            key,
            next: AtomicU64::new(0),
            start: AtomicU64::new(0),
            visible: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            bounds_position: AtomicU64::new(0),
            changed: AtomicU64::new(0),
            index_damaged: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            index: RwLock::default(),
        }
    }

    /// From a snapshot.
    pub(super) fn restore(
        key: QueueKey,
        start: u64,
        next: u64,
        bytes: u64,
        bounds: u64,
        index: QueueIndex,
    ) -> Self {
        Self {
            key,
            next: AtomicU64::new(next),
            start: AtomicU64::new(start),
            visible: AtomicU64::new(next),
            bytes: AtomicU64::new(bytes),
            bounds_position: AtomicU64::new(bounds),
            changed: AtomicU64::new(0),
            index_damaged: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            index: RwLock::new(index),
        }
    }

    /// Which queue this is.
    pub fn key(&self) -> QueueKey {
        self.key
    }

    /// First offset, and end of what readers may see.
    pub fn bounds(&self) -> (u64, u64) {
        // The end first: it is never below a start read later than it by more than retention allows.
        let visible = self.visible.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Acquire);
        (start.min(visible), visible)
    }

    /// Bytes of log that its messages take.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn start(&self) -> u64 {
        self.start.load(Ordering::Acquire)
    }

    /// Offset that the next message gets; beyond the visible end while messages are on their way to disk.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }

    pub(super) fn take(&self, count: u64) -> u64 {
        self.next.fetch_add(count, Ordering::AcqRel)
    }

    pub(super) fn bounds_position(&self) -> u64 {
        self.bounds_position.load(Ordering::Relaxed)
    }

    pub(super) fn set_bounds_position(&self, position: u64) {
        self.bounds_position.store(position, Ordering::Relaxed);
    }

    /// Newest record that changed what a snapshot says of the queue; 0: none since it was loaded from one.
    pub(super) fn changed(&self) -> u64 {
        self.changed.load(Ordering::Acquire)
    }

    /// The record at `position` changes, or has changed, what a snapshot says of the queue.
    pub(super) fn touch(&self, position: u64) {
        self.changed.fetch_max(position, Ordering::AcqRel);
    }

    pub(super) fn index(&self) -> &RwLock<QueueIndex> {
        &self.index
    }

    pub(super) fn index_damaged(&self) -> &AtomicBool {
        &self.index_damaged
    }

    /// Lets readers see what is below `end`.
    pub(super) fn publish(&self, end: u64) {
        self.visible.fetch_max(end, Ordering::AcqRel);
    }

    /// Hides what is not below `end` again: the log was fenced before it became durable.
    pub(super) fn withdraw(&self, end: u64) {
        self.visible.fetch_min(end, Ordering::AcqRel);
    }

    /// Adds entries for offsets that were taken, in order.
    pub(super) fn append(&self, space: &IndexSpace, first: u64, entries: &[Entry]) -> std::io::Result<()> {
        let mut index = self.index.write();
        if self.gone.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(end) = index.end().filter(|&end| end < first) {
            index.push_hole(end, first);
        }
        let (mut bytes, mut outcome) = (0, Ok(()));
        for (offset, entry) in (first..).zip(entries) {
            outcome = index.push(space, self.key, offset, entry);
            if outcome.is_err() {
                break;
            }
            bytes += u64::from(entry.length);
            self.touch(entry.position);
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        outcome
    }

    /// A message as the log tells of it at recovery. `false` when it was known already.
    pub(super) fn replay(
        &self,
        space: &IndexSpace,
        offset: u64,
        entry: &Entry,
        relocated: bool,
    ) -> std::io::Result<bool> {
        let (start, next) = (self.start(), self.next());
        if offset < start {
            return Ok(false);
        }
        if offset >= next {
            if offset > next.max(start) {
                let mut index = self.index.write();
                let from = index.end().unwrap_or(next.max(start));
                index.push_hole(from, offset);
            }
            self.next.store(offset + 1, Ordering::Release);
            self.append(space, offset, std::slice::from_ref(entry))?;
            return Ok(true);
        }
        let mut index = self.index.write();
        let known = index.get(space, self.key, offset);
        let newer = match known {
            Lookup::Entry(known) => relocated && known.position < entry.position,
            Lookup::Lost(_) | Lookup::Damaged => true,
            Lookup::Outside => false,
        };
        if newer {
            index.replace(space, self.key, offset, entry)?;
            if matches!(known, Lookup::Lost(_)) {
                self.bytes.fetch_add(u64::from(entry.length), Ordering::Relaxed);
            }
        }
        Ok(newer)
    }

    /// Moves the start up and forgets what is below.
    pub(super) fn set_start(&self, space: &IndexSpace, start: u64) {
        let old = self.start();
        if start <= old {
            return;
        }
        let mut index = self.index.write();
        let mut gone = 0;
        index.walk(space, self.key, old, start.min(self.next()), |_, seen| {
            if let Lookup::Entry(entry) = seen {
                gone += u64::from(entry.length);
            }
            true
        });
        index.trim(space, start);
        let _ = self
            .bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bytes| Some(bytes.saturating_sub(gone)));
        self.start.store(start, Ordering::Release);
        self.next.fetch_max(start, Ordering::AcqRel);
    }

    /// The message before `end` and what is missing before it are lost.
    pub(super) fn lose_up_to(&self, end: u64) {
        self.set_end(end);
    }

    /// Moves the end up past lost offsets.
    pub(super) fn set_end(&self, end: u64) {
        let next = self.next();
        if end > next {
            let from = next.max(self.start());
            if end > from {
                self.index.write().push_hole(from, end);
            }
            self.next.store(end, Ordering::Release);
        }
    }

    /// Puts an entry back that was found in the log while the index is being rebuilt.
    pub(super) fn mend(&self, space: &IndexSpace, offset: u64, entry: &Entry) {
        if offset < self.start() {
            return;
        }
        let mut index = self.index.write();
        let older = match index.get(space, self.key, offset) {
            Lookup::Damaged => true,
            Lookup::Entry(known) => known.position < entry.position,
            Lookup::Lost(_) | Lookup::Outside => false,
        };
        if older && let Err(error) = index.replace(space, self.key, offset, entry) {
            tracing::error!(%error, "cannot mend a queue index");
        }
    }

    /// What the log does not have either is lost. Counts anew what is left.
    pub(super) fn give_up_damaged(&self, space: &IndexSpace) {
        let mut index = self.index.write();
        index.give_up_damaged(space, self.key, self.start());
        let mut bytes = 0;
        index.walk(space, self.key, self.start(), u64::MAX, |_, seen| {
            if let Lookup::Entry(entry) = seen {
                bytes += u64::from(entry.length);
            }
            true
        });
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// The message at `offset` cannot be read, and the place where it stood is given up.
    pub(super) fn lose(&self, space: &IndexSpace, offset: u64, position: u64) {
        let lost = Entry { position: 0, length: 0, tag_hash: 0, store_ms: 0 };
        let mut index = self.index.write();
        if let Lookup::Entry(entry) = index.get(space, self.key, offset)
            && entry.position == position
            && index.replace(space, self.key, offset, &lost).is_ok()
        {
            let length = u64::from(entry.length);
            let _ = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bytes| {
                Some(bytes.saturating_sub(length))
            });
        }
    }

    /// Gives its index blocks back.
    pub(super) fn clear(&self, space: &IndexSpace) {
        let mut index = self.index.write();
        self.gone.store(true, Ordering::Release);
        index.trim(space, u64::MAX);
    }
}
