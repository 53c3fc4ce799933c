//! Keeps messages and state: one log a shard, and everything that is derived from it.
//!
//! Writing: `log` -> `dispatch` -> `queue`. Reading: `queue` -> `log`. Owns its threads and every file.
//! Knows no gRPC and calls nobody: news leaves through the [`News`] given to [`Store::open`].

mod adopt;
mod change;
mod check;
mod codec;
pub mod disk;
mod expiring;
mod frame;
mod index;
mod keeper;
mod keys;
mod log;
mod metrics;
mod options;
mod pending;
mod progress;
mod queue;
mod read;
mod recent;
mod recovery;
mod repair;
mod retention;
mod scan;
mod segment;
mod shard;
mod snapshot;
mod tables;
#[cfg(test)]
mod tests;
mod tx;

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use bytes::Bytes;
pub use check::{Report, check};
use opentelemetry::metrics::Meter;
pub use options::Options;
pub use pending::Pending;
pub use queue::Queue;
pub use repair::{Action, Repair, Step, repair};
use shard::Shard;
pub use tables::{Committed, Group, QueueMap, Topic};
pub use tx::Tx;

use crate::{
    model::{GroupName, LogPosition, QueueKey, TopicId, TopicName},
    runtime::Clock,
};

/// Changes of state in one frame.
const FRAME_CHANGES: usize = 1024;

/// Hears that queues have grown. Called by whoever published; must be quick and must not call back.
pub trait News: Send + Sync {
    /// Each queue is now readable up to (without) the offset beside it.
    fn grew(&self, ends: &[(QueueKey, u64)]);
    /// The topic is gone; whoever waits on its queues must be told.
    fn deleted(&self, topic: TopicId);
}

/// One shard: a log and its queues. Cheap to clone; all clones are the same shard.
#[derive(Clone)]
pub struct Store {
    shard: Arc<Shard>,
}

/// Why a store did not open.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

/// Why the store did not take or give something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// A write or sync failed; nothing more is written until a restart.
    #[error("the store is fenced after a failed write ({0}); restart the broker")]
    Fenced(String),
    /// Free disk space is below the floor.
    #[error("disk space is below the floor of {floor} bytes ({free} free); free some or lower retention")]
    DiskFull {
        /// Configured floor, bytes.
        floor: u64,
        /// Free now, bytes.
        free: u64,
    },
    /// Too much waits to be written.
    #[error("{bytes} bytes wait to be written, over the limit of {limit}; retry in {retry_ms} ms")]
    Busy {
        /// Waiting now.
        bytes: u64,
        /// Configured limit.
        limit: u64,
        /// A sensible pause.
        retry_ms: u64,
    },
    /// What waits to be written waits too long.
    #[error("the disk is behind by {waited_ms} ms, over the limit of {limit_ms}; retry in {retry_ms} ms")]
    Late {
        /// How long the oldest has waited.
        waited_ms: u64,
        /// Configured limit.
        limit_ms: u64,
        /// A sensible pause.
        retry_ms: u64,
    },
    /// The store is closing.
    #[error("the store is stopping")]
    Stopping,
    /// One frame may not be larger than a segment.
    #[error("{bytes} bytes do not fit into a log segment of {limit}")]
    TooLarge {
        /// Size of the frame.
        bytes: usize,
        /// Room in a segment.
        limit: usize,
    },
    /// The device failed to read.
    #[error("reading the log failed: {0}")]
    Read(String),
    /// A file of the key index was found damaged.
    #[error("a file of the key index is damaged and is being rebuilt from the log; retry")]
    Rebuilding,
}

/// Why a transaction did not happen: the caller's own decision, or the store's.
#[derive(Debug)]
pub enum TransactError<E> {
    /// What `decide` said.
    Decided(E),
    /// The store refused.
    Store(StoreError),
}

/// Who may write when room is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// New messages: refused when the disk or the inbox is full.
    Send,
    /// Commits, deletions and other small facts: use the spare room, so that a full disk can be read empty.
    State,
}

/// What an OK stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Synced to the device.
    Disk,
    /// In the page cache.
    Memory,
}

/// A message about to be stored.
#[derive(Clone, Copy, Debug)]
pub struct NewMessage<'a> {
    /// What is stored of it as it came, in this order.
    pub parts: [&'a [u8]; 2],
    /// CRC-32C of the parts, computed outside the lock.
    pub crc: u32,
    /// How many more of its bytes `seal` appends, beside what the server adds.
    pub later_bytes: usize,
    /// Hash of the tag; 0 when there is none.
    pub tag_hash: u64,
    /// Hashes under which the message can be found, at most 255.
    pub lookups: &'a [u64],
}

/// The place a message got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Queue of the topic.
    pub queue: u32,
    /// Offset in the queue.
    pub offset: u64,
    /// Store time in milliseconds; never goes backwards in a shard.
    pub store_ms: u64,
    /// Where the record was written first; orders messages across queues.
    pub position: LogPosition,
}

/// Limits of one scan.
#[derive(Clone, Copy, Debug)]
pub struct ScanLimits {
    /// Most messages found.
    pub messages: usize,
    /// Most bytes of messages found; a first message that is larger is found alone.
    pub bytes: usize,
    /// Most index entries looked at.
    pub entries: usize,
}

/// A message found in a queue's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Offset in the queue.
    pub offset: u64,
    /// Where its record starts.
    pub position: LogPosition,
    /// Length of its record.
    pub length: u32,
    /// Store time in milliseconds.
    pub store_ms: u64,
}

/// What a scan saw. `start` and `end` were read together with the slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// What matched, in order.
    pub slots: Vec<Slot>,
    /// Offset behind the last entry looked at.
    pub next: u64,
    /// First offset of the queue.
    pub start: u64,
    /// End of what readers may see.
    pub end: u64,
    /// Set when the scan met lost messages at `next` before it found any: the range lost.
    pub lost: Option<(u64, u64)>,
}

/// A message read from the log, or the news that it is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Offset in the queue.
    pub offset: u64,
    /// Store time in milliseconds.
    pub store_ms: u64,
    /// The stored message; `None` when the record is damaged.
    pub payload: Option<Bytes>,
}

/// A message found by look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its topic.
    pub topic: TopicId,
    /// Its place.
    pub place: Place,
    /// The stored message.
    pub payload: Bytes,
}

/// Which message a time stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeBound {
    /// First stored at or after; the end of the queue if none.
    FirstAtOrAfter,
    /// Last stored at or before; the start of the queue if none.
    LastAtOrBefore,
}

/// A damaged place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: String,
    /// First damaged position of the log (0 where it is not a log file).
    pub begin: u64,
    /// End of the damage.
    pub end: u64,
    /// What is wrong and what was done.
    pub text: String,
}

/// What the store does with writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Takes everything.
    Writable,
    /// Refuses sends; the reason.
    DiskFull(String),
    /// Refuses all writes; the reason.
    Fenced(String),
    /// Closing.
    Stopping,
}

/// The store as it sees itself.
#[derive(Clone, Debug)]
pub struct Status {
    /// Name of the shard.
    pub shard: String,
    /// Rises at every writable open.
    pub epoch: u32,
    /// What it does with writes.
    pub state: State,
    /// Where its files are.
    pub data_dir: String,
    /// First position kept.
    pub log_start: u64,
    /// End of what is synced.
    pub log_durable: u64,
    /// End of what is appended.
    pub log_end: u64,
    /// Log segments.
    pub segments: u64,
    /// Bytes of log files.
    pub log_bytes: u64,
    /// Free on the file system.
    pub disk_free_bytes: u64,
    /// Sends are refused below this much free space.
    pub disk_floor_bytes: u64,
    /// Most bytes of log kept; 0: no limit.
    pub disk_limit_bytes: u64,
    /// Number of topics.
    pub topics: u64,
    /// Number of queues.
    pub queues: u64,
    /// Number of groups.
    pub groups: u64,
    /// Longest time an async OK may be without sync, milliseconds.
    pub flush_interval_ms: u64,
    /// Position the newest snapshot stands at.
    pub snapshot_position: u64,
    /// Damage found since start, the first 100.
    pub damage: Vec<Damage>,
    /// Number of damaged places found since start.
    pub damage_total: u64,
    /// How long opening took, milliseconds.
    pub recovery_ms: u64,
    /// Bytes of log that opening had to read.
    pub recovery_bytes: u64,
    /// The process before ended in order, so nothing was torn.
    pub clean_start: bool,
}

impl Store {
    /// Opens or makes the shard in `options.dir`. Blocks while it recovers.
    pub fn open(
        options: Options,
        disk: Arc<dyn disk::Disk>,
        clock: Arc<dyn Clock>,
        news: Arc<dyn News>,
        meter: &Meter,
    ) -> Result<Self, OpenError> {
        let started = clock.monotonic();
        let dir = options.dir.clone();
        let failed = |error: io::Error| OpenError(format!("{}: {error}", dir.display()));
        disk.create_dir_all(&options.dir).map_err(failed)?;
        let lock = disk.lock(&options.dir.join("lock")).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => OpenError(format!(
                "the data directory {} is in use by another process; stop it or choose another directory",
                dir.display()
            )),
            _ => failed(error),
        })?;
        let recovery::Opened { recovered, changes } = recovery::recover(&options, &disk)?;
        let metrics = metrics::Metrics::new(meter, &options.shard);
        let boot_id = options.boot_id.clone();
        let shard = Shard::new(options, disk, clock, news, metrics, recovered, lock);
        metrics::Metrics::observe(meter, &shard);
        shard.start().map_err(failed)?;
        let store = Self { shard };
        store.begin(boot_id, changes)?;
        let shard = &store.shard;
        let took = shard.clock.monotonic().saturating_sub(started);
        shard.recovery_ms.store(u64::try_from(took.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let status = store.status();
        tracing::info!(event = "storage.recovered", shard = %status.shard, epoch = status.epoch, log_start = status.log_start, log_end = status.log_end, topics = status.topics, damage = status.damage_total, took = ?took, "store is open");
        Ok(store)
    }

    /// The new epoch is durable before anything is served.
    fn begin(&self, boot_id: String, changes: Vec<change::Change>) -> Result<(), OpenError> {
        let epoch = self.shard.inner.lock().epoch;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let lost: Vec<QueueKey> = changes
            .iter()
            .filter_map(|change| match change {
                change::Change::Bounds { queue, .. } => Some(*queue),
                _ => None,
            })
            .collect();
        // The last frame says that the writer began, so that a crash before it finds all this again.
        let mut rest = changes;
        let opened = loop {
            let part: Vec<_> = rest.drain(..rest.len().min(FRAME_CHANGES)).collect();
            let last = rest.is_empty();
            let opened = self.shard.transact::<(), ()>(Purpose::State, |tx| {
                part.iter().for_each(|change| tx.change(change.clone()));
                if last {
                    let (boot_id, version) = (boot_id.clone(), version.clone());
                    tx.change(change::Change::Opened { epoch, boot_id, version });
                }
                Ok(())
            });
            if last || opened.is_err() {
                break opened;
            }
        };
        let outcome = match opened {
            Ok(((), pending)) => pending.wait().map(|_| ()),
            Err(TransactError::Store(error)) => Err(error),
            Err(TransactError::Decided(())) => Ok(()),
        };
        if let Err(error) = outcome {
            self.shard.stop();
            return Err(OpenError(error.to_string()));
        }
        for queue in lost.into_iter().filter_map(|key| self.shard.tables.queue(key)) {
            queue.publish(queue.next());
        }
        Ok(())
    }

    /// Writes the clean-stop record and ends the threads. Blocks. Later writes get `Stopping`.
    pub fn close(&self) {
        self.shard.stop();
    }

    /// The store as it sees itself.
    pub fn status(&self) -> Status {
        self.shard.status()
    }

    /// The topic of this name.
    pub fn topic(&self, name: &TopicName) -> Option<Arc<Topic>> {
        self.shard.tables.topic(name)
    }

    /// The topic with this id, if it still lives.
    pub fn topic_by_id(&self, id: TopicId) -> Option<Arc<Topic>> {
        self.shard.tables.topic_by_id(id)
    }

    /// Topics whose name is above `after` and begins with `prefix`, by name, at most `limit`.
    pub fn topics(&self, after: &str, prefix: &str, limit: usize) -> Vec<Arc<Topic>> {
        page(self.shard.tables.topics(), |topic| topic.name.as_str(), after, prefix, limit)
    }

    /// The group of this name.
    pub fn group(&self, name: &GroupName) -> Option<Arc<Group>> {
        self.shard.tables.group(name)
    }

    /// Groups, as [`Store::topics`].
    pub fn groups(&self, after: &str, prefix: &str, limit: usize) -> Vec<Arc<Group>> {
        page(self.shard.tables.groups(), |group| group.name.as_str(), after, prefix, limit)
    }

    /// Runs `decide` under the lock that orders the log and appends what it pushed as one frame. On `Err`
    /// nothing happens. `Pending` waits for the disk, unless every message in the frame is of an async
    /// topic and nothing else is in it.
    pub fn transact<T, E>(
        &self,
        purpose: Purpose,
        decide: impl FnOnce(&mut Tx<'_>) -> Result<T, E>,
    ) -> Result<(T, Pending), TransactError<E>> {
        self.shard.transact(purpose, decide)
    }

    /// Waits until everything below and at `position` is durable. For answers that show state which may
    /// still be on its way to disk (each entity says where its newest record stands).
    pub fn settled(&self, position: LogPosition) -> Pending {
        self.shard.settled(position.0)
    }

    /// Looks through a queue's index from `from`. Never waits for the log's device.
    pub fn scan(
        &self,
        queue: &Queue,
        from: u64,
        limits: ScanLimits,
        wanted: impl FnMut(u64) -> bool,
    ) -> Scan {
        self.shard.scan(queue, from, limits, wanted)
    }

    /// Reads messages that are in memory; `None` when some would have to wait for the device.
    pub fn fetch_now(&self, key: QueueKey, slots: &[Slot]) -> Option<Vec<Fetched>> {
        self.shard.fetch_now(key, slots)
    }

    /// Reads messages. May block on the device. Messages that retention has removed since the scan are
    /// left out.
    pub fn fetch(&self, key: QueueKey, slots: &[Slot]) -> Result<Vec<Fetched>, StoreError> {
        self.shard.fetch(key, slots)
    }

    /// Finds messages by look-up hash, newest first, until `see` says no or `candidates` records were
    /// looked at. The caller checks the key itself: hashes collide. Answers whether there may be more.
    /// Blocks on the device.
    pub fn lookup(
        &self,
        hash: u64,
        candidates: usize,
        see: impl FnMut(Found) -> bool,
    ) -> Result<bool, StoreError> {
        self.shard.lookup(hash, candidates, see)
    }

    /// Offset by store time. Reads the index only.
    pub fn offset_by_time(&self, queue: &Queue, ms: u64, bound: TimeBound) -> u64 {
        self.shard.offset_by_time(queue, ms, bound)
    }

    /// Store time of the first visible message at or after `offset`; `None` when there is none.
    pub fn store_ms_at(&self, queue: &Queue, offset: u64) -> Option<u64> {
        self.shard.store_ms_at(queue, offset)
    }

    /// Visible messages from `from` on that are not lost.
    pub fn count(&self, queue: &Queue, from: u64) -> u64 {
        self.shard.count(queue, from)
    }
}

fn page<T>(
    mut all: Vec<Arc<T>>,
    name: impl Fn(&T) -> &str,
    after: &str,
    prefix: &str,
    limit: usize,
) -> Vec<Arc<T>> {
    all.retain(|item| name(item) > after && name(item).starts_with(prefix));
    all.sort_by(|a, b| name(a).cmp(name(b)));
    all.truncate(limit);
    all
}
