//! One shard: its log, its tables, its files and its threads.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    path::PathBuf,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

use super::{
    Damage, News, Options, State, Status, StoreError,
    disk::Disk,
    frame::Seed,
    index::IndexSpace,
    keys::KeyIndex,
    log::{Inner, UnpublishedQueue},
    metrics::Metrics,
    progress::Progress,
    recent::Recent,
    segment::{Segment, Segments},
    snapshot::Chain,
    tables::Tables,
};
use crate::{model::QueueKey, runtime::Clock};

/// Damaged places remembered one by one; more are only counted.
const MAX_DAMAGE: usize = 100;
/// A preparation that failed is tried again after this time.
const PREPARE_RETRY: Duration = Duration::from_millis(500);
/// How often the keeper looks for work.
const KEEPER_TICK: Duration = Duration::from_millis(200);
/// A segment is at most so many times as large as the one before.
const SEGMENT_GROWTH: u64 = 4;
/// Room in the last segment that sends leave to commits, deletions and copying forward when no next
/// segment can be made: an eighth, at most this.
const SPARE_BYTES: u64 = 4 << 20;

/// Everything of a shard. Shared by its threads and its users.
pub(super) struct Shard {
    pub options: Options,
    pub disk: Arc<dyn Disk>,
    pub clock: Arc<dyn Clock>,
    pub news: Arc<dyn News>,
    pub shard_id: u64,
    pub seed: Seed,
    pub segments: Segments,
    pub tables: Tables,
    pub space: IndexSpace,
    pub keys: KeyIndex,
    pub recent: Recent,
    pub progress: Progress,
    pub metrics: Metrics,
    pub inner: Mutex<Inner>,
    /// Wakes the writer's thread.
    pub work: Condvar,
    pub unpublished: Mutex<UnpublishedQueue>,
    /// Everything below is synced.
    pub durable: AtomicU64,
    /// Everything below is in the page cache.
    pub written: AtomicU64,
    /// Everything below is indexed.
    pub dispatched: AtomicU64,
    pub snapshot_position: AtomicU64,
    /// Queues whose index was found damaged and has to be rebuilt. Each is in it once.
    pub damaged_indexes: Mutex<Vec<QueueKey>>,
    /// The newest snapshot. The keeper's.
    pub chain: Mutex<Chain>,
    pub opening: Opening,
    pub recovery_ms: AtomicU64,
    /// Messages that a group has not read and retention will soon remove.
    pub unread_expiring: AtomicU64,
    pub space_left: SpaceLeft,
    preparing: Mutex<Preparing>,
    prepared: Condvar,
    damage: Mutex<DamageLog>,
    stop: Mutex<bool>,
    stopped: Condvar,
    threads: Mutex<Option<Threads>>,
    /// Held until the shard is stopped.
    lock: Mutex<Option<Box<dyn Send + Sync>>>,
}

#[derive(Debug)]
struct Threads {
    writer: JoinHandle<()>,
    preparer: JoinHandle<()>,
    keeper: JoinHandle<()>,
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a thread of the store ended by panic");
    }
}

/// What is known of the file system.
#[derive(Debug, Default)]
pub(super) struct SpaceLeft {
    pub free: AtomicU64,
    pub below_floor: AtomicBool,
    /// The queue index cannot grow.
    pub index_full: AtomicBool,
}

/// Segments to be made.
#[derive(Debug, Default)]
struct Preparing {
    /// By base: the capacity, and the epoch of whoever asked.
    wanted: BTreeMap<u64, (u64, u32)>,
    /// There was no space for the last one; it is tried again.
    no_space: bool,
    /// Why none can be made any more.
    broken: Option<String>,
    stop: bool,
}

#[derive(Debug, Default)]
struct DamageLog {
    places: VecDeque<Damage>,
    total: u64,
}

/// The parts that recovery has put together.
pub(super) struct Recovered {
    pub shard_id: u64,
    pub segments: Segments,
    pub tables: Tables,
    pub space: IndexSpace,
    pub keys: KeyIndex,
    pub inner: Inner,
    pub damage: Vec<Damage>,
    pub snapshot_position: u64,
    pub chain: Chain,
    pub opening: Opening,
}

/// What a start had to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opening {
    /// Bytes of log that were read.
    pub bytes: u64,
    /// The writer before ended in order.
    pub clean: bool,
}

impl Shard {
    pub fn new(
        options: Options,
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        news: Arc<dyn News>,
        metrics: Metrics,
        recovered: Recovered,
        lock: Box<dyn Send + Sync>,
    ) -> Arc<Self> {
        let Recovered {
            shard_id,
            segments,
            tables,
            space,
            keys,
            inner,
            damage,
            snapshot_position,
            chain,
            opening,
        } = recovered;
        let end = inner.end;
        let shard = Self {
            recent: Recent::new(options.recent_bytes),
            options,
            disk,
            clock,
            news,
            shard_id,
            seed: Seed::new(shard_id),
            segments,
            tables,
            space,
            keys,
            progress: Progress::default(),
            metrics,
            inner: Mutex::new(inner),
            work: Condvar::new(),
            unpublished: Mutex::default(),
            durable: AtomicU64::new(end),
            written: AtomicU64::new(end),
            dispatched: AtomicU64::new(end),
            snapshot_position: AtomicU64::new(snapshot_position),
            damaged_indexes: Mutex::default(),
            chain: Mutex::new(chain),
            opening,
            recovery_ms: AtomicU64::new(0),
            unread_expiring: AtomicU64::new(0),
            space_left: SpaceLeft::default(),
            preparing: Mutex::default(),
            prepared: Condvar::new(),
            damage: Mutex::default(),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
            threads: Mutex::default(),
            lock: Mutex::new(Some(lock)),
        };
        for place in damage {
            shard.note_damage(place);
        }
        shard.look_at_space();
        Arc::new(shard)
    }

    /// Starts the writer, the preparer of segments and the keeper.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let spawn = |name: &str, run: fn(&Arc<Self>)| {
            let shard = Arc::clone(self);
            thread::Builder::new().name(name.into()).spawn(move || run(&shard))
        };
        let writer = spawn("store-writer", Self::write_on)?;
        let preparer = spawn("store-prepare", |shard| shard.prepare_on())?;
        let keeper = spawn("store-keeper", Self::keep_on)?;
        *self.threads.lock() = Some(Threads { writer, preparer, keeper });
        Ok(())
    }

    /// Ends the threads: first what writes in the background, then the writer.
    pub fn stop(self: &Arc<Self>) {
        *self.stop.lock() = true;
        self.stopped.notify_all();
        let Some(Threads { writer, preparer, keeper }) = self.threads.lock().take() else { return };
        // The keeper saves what makes the next start quick, and needs the writer for it.
        join(keeper);
        self.stop_writing();
        join(writer);
        self.preparing.lock().stop = true;
        self.prepared.notify_all();
        join(preparer);
        drop(self.lock.lock().take());
    }

    /// What the store does with writes.
    pub fn state(&self) -> State {
        let inner = self.inner.lock();
        if let Some(error) = &inner.fenced {
            return State::Fenced(error.to_string());
        }
        if inner.stopping {
            return State::Stopping;
        }
        let room = inner.segment.1.saturating_sub(inner.end);
        match self.check_space(room, inner.segment.1) {
            Ok(()) => State::Writable,
            Err(error) => State::DiskFull(error.to_string()),
        }
    }

    /// See [`super::Store::status`].
    pub fn status(&self) -> Status {
        let state = self.state();
        let (epoch, log_end) = {
            let inner = self.inner.lock();
            (inner.epoch, inner.end)
        };
        let (segments, log_bytes) = self.segments.size();
        let (topics, groups) = self.tables.counts();
        let queues = self.tables.topics().iter().map(|topic| topic.queues.len() as u64).sum();
        let (damage, damage_total) = self.damage();
        Status {
            shard: self.options.shard.clone(),
            epoch,
            state,
            data_dir: self.options.dir.display().to_string(),
            log_start: self.segments.all().first().map_or(0, |segment| segment.base),
            log_durable: self.durable.load(Ordering::Acquire),
            log_end,
            segments,
            log_bytes,
            disk_free_bytes: self.space_left.free.load(Ordering::Relaxed),
            disk_floor_bytes: self.options.disk_floor_bytes,
            disk_limit_bytes: self.options.disk_limit_bytes,
            topics,
            queues,
            groups,
            flush_interval_ms: u64::try_from(self.options.flush_interval.as_millis()).unwrap_or(u64::MAX),
            snapshot_position: self.snapshot_position.load(Ordering::Acquire),
            damage,
            damage_total,
            recovery_ms: self.recovery_ms.load(Ordering::Relaxed),
            recovery_bytes: self.opening.bytes,
            clean_start: self.opening.clean,
        }
    }

    pub fn stopping(&self) -> bool {
        *self.stop.lock()
    }

    /// Capacity of the segment behind `segment` (base and end), made or to be made. A small one is followed by
    /// one that is a few times larger, which is ready before a burst has filled the first.
    pub fn next_capacity(&self, segment: (u64, u64)) -> u64 {
        let (base, end) = segment;
        let grown = end.saturating_sub(base).saturating_mul(SEGMENT_GROWTH);
        self.segments.get(end).map_or(grown.min(self.options.segment_bytes), |segment| segment.capacity)
    }

    /// Has the segment at `base` made, unless there is one.
    pub fn want_segment(&self, base: u64, capacity: u64, epoch: u32) {
        // Looked at under the lock: made in between, it would be made again, over what is written in it.
        let mut preparing = self.preparing.lock();
        if self.segments.get(base).is_some() {
            return;
        }
        if preparing.wanted.insert(base, (capacity, epoch)).is_none() {
            self.prepared.notify_all();
        }
    }

    /// The segment at `base`; waits for it to be made if `may_wait`.
    pub fn segment_for_write(&self, base: u64, may_wait: bool) -> io::Result<Arc<Segment>> {
        let mut preparing = self.preparing.lock();
        loop {
            if let Some(segment) = self.segments.get(base) {
                return Ok(segment);
            }
            if let Some(error) = &preparing.broken {
                return Err(io::Error::other(format!("the next segment cannot be made: {error}")));
            }
            if !may_wait || preparing.stop || (self.stopping() && preparing.no_space) {
                return Err(io::Error::other("the next segment is not there"));
            }
            self.prepared.wait_for(&mut preparing, PREPARE_RETRY);
        }
    }

    fn prepare_on(&self) {
        let mut preparing = self.preparing.lock();
        loop {
            if preparing.stop {
                return;
            }
            let Some((&base, &(capacity, epoch))) = preparing.wanted.first_key_value() else {
                self.prepared.wait(&mut preparing);
                continue;
            };
            let header = self.segment_header(base, capacity, epoch);
            let made = parking_lot::MutexGuard::unlocked(&mut preparing, || self.segments.prepare(&header));
            match made {
                Ok(_) => {
                    preparing.wanted.remove(&base);
                    preparing.no_space = false;
                }
                // Space comes back; until then whoever needs the segment waits.
                Err(error) if is_no_space(&error) => {
                    if !preparing.no_space {
                        tracing::warn!(event = "storage.state_changed", %error, base, "no space for the next log segment; trying on");
                    }
                    preparing.no_space = true;
                    self.prepared.wait_for(&mut preparing, PREPARE_RETRY);
                }
                Err(error) => {
                    tracing::error!(event = "storage.state_changed", %error, base, "cannot make the next log segment");
                    preparing.broken = Some(error.to_string());
                    preparing.wanted.clear();
                }
            }
            self.prepared.notify_all();
        }
    }

    /// Whether sends find room, in the file system and in the segment (`room` bytes are left in it).
    pub fn check_space(&self, room: u64, next_base: u64) -> Result<(), StoreError> {
        let full = || StoreError::DiskFull {
            floor: self.options.disk_floor_bytes,
            free: self.space_left.free.load(Ordering::Relaxed),
        };
        let SpaceLeft { below_floor, index_full, .. } = &self.space_left;
        if below_floor.load(Ordering::Relaxed) || index_full.load(Ordering::Relaxed) {
            return Err(full());
        }
        let spare = (self.options.segment_bytes / 8).min(SPARE_BYTES);
        if room < spare && self.segments.get(next_base).is_none() && self.preparing.lock().no_space {
            return Err(full());
        }
        Ok(())
    }

    /// Has room made for the queue index before it is needed. A broker without topics needs none.
    pub fn make_room_for_index(&self) {
        if self.tables.counts().0 == 0 {
            return;
        }
        let grown = self.space.keep_spare();
        let full = grown.as_ref().is_err_and(is_no_space);
        let before = self.space_left.index_full.swap(full, Ordering::Relaxed);
        if full != before {
            let state = if full { "disk_full" } else { "writable" };
            tracing::warn!(event = "storage.state_changed", state, "space for the queue index");
        }
        match grown {
            Err(error) if !full => {
                tracing::warn!(%error, "cannot make a file of the queue index; trying again")
            }
            _ => {}
        }
    }

    /// Waits a moment for space to come back. Answers whether the shard stops instead.
    pub fn wait_for_space(&self) -> bool {
        self.space_left.index_full.store(true, Ordering::Relaxed);
        let mut stop = self.stop.lock();
        if !*stop {
            self.stopped.wait_for(&mut stop, PREPARE_RETRY);
        }
        *stop
    }

    /// Looks how much space is free.
    pub fn look_at_space(&self) {
        let Ok(free) = self.disk.free_bytes(&self.options.dir) else { return };
        self.space_left.free.store(free, Ordering::Relaxed);
        let below = free < self.options.disk_floor_bytes;
        let before = self.space_left.below_floor.swap(below, Ordering::Relaxed);
        if below != before {
            let (floor, state) =
                (self.options.disk_floor_bytes, if below { "disk_full" } else { "writable" });
            tracing::warn!(event = "storage.state_changed", state, free, floor, "free disk space");
        }
    }

    fn keep_on(self: &Arc<Self>) {
        let mut keeper = super::keeper::Keeper::new(self);
        loop {
            {
                let mut stop = self.stop.lock();
                if !*stop {
                    self.stopped.wait_for(&mut stop, KEEPER_TICK);
                }
                if *stop {
                    break;
                }
            }
            keeper.tick(self);
        }
        keeper.finish(self);
    }

    /// Remembers and announces a damaged place.
    pub fn note_damage(&self, place: Damage) {
        {
            // Every reader of a damaged message meets it anew.
            let damage = self.damage.lock();
            let same = |known: &Damage| {
                (&known.file, known.begin, known.end) == (&place.file, place.begin, place.end)
            };
            if place.begin < place.end && damage.places.iter().any(same) {
                return;
            }
        }
        tracing::error!(event = "storage.corrupt_record", file = %place.file, begin = place.begin, end = place.end, "{}", place.text);
        self.metrics.damaged();
        let mut damage = self.damage.lock();
        damage.total += 1;
        if damage.places.len() < MAX_DAMAGE {
            damage.places.push_back(place);
        }
    }

    /// Damage found since start, and how much in all.
    pub fn damage(&self) -> (Vec<Damage>, u64) {
        let damage = self.damage.lock();
        (damage.places.iter().cloned().collect(), damage.total)
    }

    /// Tells the next start that what readers saw may be gone though the machine did not restart.
    pub fn leave_fence_mark(&self) {
        let _ = self.disk.create(&fence_mark(&self.options.dir));
    }
}

/// Space comes back; other errors are final.
pub(super) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// A file that a fenced writer leaves behind, if it can.
pub(super) fn fence_mark(dir: &std::path::Path) -> PathBuf {
    dir.join("fenced")
}

/// For instruments that look at the shard when they are read.
pub(super) type WeakShard = Weak<Shard>;
