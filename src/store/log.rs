//! The end of the log: who may append, what is written together, and what is promised when.
//!
//! Callers take their place under one short lock and encode into the open group. For what must be on the
//! device the writer's thread takes the group: one write, one sync, publish, answer everybody, while
//! callers fill the next group. For what may stay in the page cache whoever waits first writes, if nobody
//! is writing. No timer: what is written together is what came meanwhile.
//!
//! Lock order: `inner` before everything else in the store. No lock is held during disk I/O.

use std::{
    collections::{HashMap, VecDeque},
    io, mem,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::BytesMut;
use parking_lot::MutexGuard;

use super::{
    Pending, Purpose, Queue, StoreError, TransactError, Tx,
    change::Change,
    frame::{FRAME_HEADER, FrameHeader, FrameKind},
    index::Entry,
    progress::Stage,
    segment::{Segment, SegmentHeader},
    shard::{Shard, is_no_space},
};
use crate::{
    model::{QueueKey, TopicId},
    runtime::WakerSet,
};

/// An idle log gets its durable mark after this time.
const IDLE_MARK: Duration = Duration::from_millis(50);
/// The next segment is made when this part of the one in use is full: filling a file with zeros takes longer
/// than half a segment lasts at full speed.
const PREPARE_AT: u64 = 16;
/// When to come again after a refusal: a few groups later.
const BUSY_RETRY_MS: u64 = 50;

/// The end of the log, under the lock.
#[derive(Debug)]
pub(super) struct Inner {
    /// Next position to give out.
    pub end: u64,
    /// The segment that `end` lies in: base and end.
    pub segment: (u64, u64),
    pub epoch: u32,
    /// Newest store time given out.
    pub last_ms: u64,
    pub group: OpenGroup,
    pub spare: BytesMut,
    /// Somebody is writing; the next group waits.
    pub writing: bool,
    /// The thread shall write the open group, whoever else might.
    pub handover: bool,
    /// Bytes that are appended and not yet written.
    pub waiting_bytes: u64,
    pub written: Written,
    pub reservations: HashMap<QueueKey, Reservation>,
    /// Durable mark of the newest frame.
    pub marked: u64,
    pub stopping: bool,
    pub closed: bool,
    pub fenced: Option<StoreError>,
}

/// What is written and waits for a sync.
#[derive(Debug, Default)]
pub(super) struct Written {
    /// Newest group written, and its end.
    pub group: u64,
    pub end: u64,
    pub segments: Vec<Arc<Segment>>,
    pub bytes: u64,
    pub since: Option<Duration>,
    /// Somebody waits for the sync.
    pub wanted: bool,
}

/// What will be written together.
#[derive(Debug, Default)]
pub(super) struct OpenGroup {
    pub number: u64,
    pub pieces: Vec<Piece>,
    pub batches: Vec<Batch>,
    pub entries: Vec<Entry>,
    pub lookups: Vec<(u64, u64)>,
    pub deleted: Vec<TopicId>,
    /// Something in it must be synced before its OK.
    pub sync: bool,
    /// When it was begun.
    pub since: Option<Duration>,
}

impl OpenGroup {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes.len() as u64).sum()
    }
}

/// Bytes that lie together in one segment.
#[derive(Debug)]
pub(super) struct Piece {
    pub base: u64,
    pub position: u64,
    pub bytes: BytesMut,
}

/// Messages of one frame.
#[derive(Debug)]
pub(super) struct Batch {
    pub queue: Arc<Queue>,
    pub first: u64,
    /// How many of the group's entries are its.
    pub entries: usize,
    /// Readers may see it before it is synced.
    pub early: bool,
    /// Entries of messages that are in the queue already and were copied forward.
    pub relocated: bool,
}

/// Appended, but readers may not see it yet, or would have to lose it again.
#[derive(Debug)]
pub(super) struct Unpublished {
    group: u64,
    queue: Arc<Queue>,
    first: u64,
    end: u64,
}

/// Offsets that readers of an async queue may see early.
#[derive(Debug)]
pub(super) struct Reservation {
    /// Durable: offsets below may be shown early.
    pub until: u64,
    /// On its way: the range's end, and the group that carries it.
    pub next: Option<(u64, u64)>,
    pub range: u64,
    pub at: Duration,
}

impl Inner {
    pub fn new(end: u64, segment: (u64, u64), epoch: u32, last_ms: u64) -> Self {
        Self {
            end,
            segment,
            epoch,
            last_ms,
            group: OpenGroup { number: 1, ..OpenGroup::default() },
            spare: BytesMut::new(),
            writing: false,
            handover: false,
            waiting_bytes: 0,
            written: Written { end, ..Written::default() },
            reservations: HashMap::new(),
            marked: 0,
            stopping: false,
            closed: false,
            fenced: None,
        }
    }
}

impl Shard {
    /// See [`super::Store::transact`].
    pub fn transact<T, E>(
        self: &Arc<Self>,
        purpose: Purpose,
        decide: impl FnOnce(&mut Tx<'_>) -> Result<T, E>,
    ) -> Result<(T, Pending), TransactError<E>> {
        let mut inner = self.inner.lock();
        self.admit(&inner, purpose).map_err(TransactError::Store)?;
        let now_ms = self.clock.now_ms().max(inner.last_ms);
        let mut tx = Tx::new(self, &mut inner, now_ms);
        let answer = match decide(&mut tx) {
            Ok(answer) => answer,
            Err(refusal) => {
                tx.abandon();
                return Err(TransactError::Decided(refusal));
            }
        };
        if let Some(error) = tx.take_error() {
            tx.abandon();
            return Err(TransactError::Store(error));
        }
        if tx.is_empty() {
            tx.abandon();
            return Ok((answer, Pending::ready()));
        }
        let stage = tx.finish();
        let group = inner.group.number;
        if stage == Stage::Synced || inner.written.wanted {
            self.work.notify_one();
        }
        Ok((answer, Pending::new(Arc::clone(self), group, stage)))
    }

    /// Waits for everything below `position` to be synced.
    pub fn settled(self: &Arc<Self>, position: u64) -> Pending {
        if position < self.durable.load(Ordering::Acquire) {
            return Pending::ready();
        }
        let mut inner = self.inner.lock();
        let group = if position >= inner.end - inner.group.bytes() && !inner.group.is_empty() {
            inner.group.sync = true;
            inner.group.number
        } else {
            inner.written.wanted = true;
            inner.group.number - 1
        };
        self.work.notify_one();
        Pending::new(Arc::clone(self), group, Stage::Synced)
    }

    fn admit(&self, inner: &Inner, purpose: Purpose) -> Result<(), StoreError> {
        if let Some(error) = &inner.fenced {
            return Err(error.clone());
        }
        if inner.stopping {
            return Err(StoreError::Stopping);
        }
        if purpose == Purpose::State {
            return Ok(());
        }
        let room = inner.segment.1.saturating_sub(inner.end);
        self.check_space(room, inner.segment.1)?;
        let limit = self.options.inbox_bytes;
        let waits =
            inner.group.since.map_or(Duration::ZERO, |since| self.clock.monotonic().saturating_sub(since));
        let retry_ms = BUSY_RETRY_MS;
        let refused = if inner.waiting_bytes > limit {
            StoreError::Busy { bytes: inner.waiting_bytes, limit, retry_ms }
        } else if waits > self.options.inbox_wait {
            let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            StoreError::Late { waited_ms: ms(waits), limit_ms: ms(self.options.inbox_wait), retry_ms }
        } else {
            return Ok(());
        };
        self.metrics.refused_busy();
        Err(refused)
    }

    /// Begins the next segment.
    pub(super) fn roll(&self, inner: &mut Inner, now_ms: u64) {
        let (base, end) = inner.segment;
        if end - inner.end >= FRAME_HEADER as u64 {
            let pad = FrameHeader {
                kind: FrameKind::Pad,
                length: FRAME_HEADER as u32,
                position: inner.end,
                durable: self.durable.load(Ordering::Acquire),
                store_ms: now_ms,
                epoch: inner.epoch,
                records: 0,
            };
            let pad = pad.encode(self.seed);
            self.push_raw(inner, base, &pad);
        }
        let capacity = self.next_capacity(inner.segment);
        inner.segment = (end, end + capacity);
        inner.end = end;
        self.want_segment(end, capacity, inner.epoch);
    }

    /// Appends a frame without records.
    fn push_raw(&self, inner: &mut Inner, base: u64, frame: &[u8]) {
        let position = inner.end;
        let fits =
            inner.group.pieces.last().is_some_and(|piece| {
                piece.base == base && piece.position + piece.bytes.len() as u64 == position
            });
        if !fits {
            inner.group.pieces.push(Piece { base, position, bytes: BytesMut::with_capacity(frame.len()) });
        }
        if let Some(piece) = inner.group.pieces.last_mut() {
            piece.bytes.extend_from_slice(frame);
        }
        inner.end += frame.len() as u64;
        inner.waiting_bytes += frame.len() as u64;
    }

    /// The writer's thread.
    pub fn write_on(self: &Arc<Self>) {
        let mut inner = self.inner.lock();
        loop {
            if inner.fenced.is_some() {
                return;
            }
            let urgent = inner.group.sync || inner.handover || inner.stopping || inner.written.wanted;
            if !inner.group.is_empty() && !inner.writing && urgent {
                inner = self.write_group(inner, true);
            }
            if inner.fenced.is_some() {
                return;
            }
            if self.sync_due(&inner) {
                inner = self.sync_written(inner);
                continue;
            }
            if inner.closed && inner.group.is_empty() && !inner.writing {
                return;
            }
            let urgent = inner.group.sync || inner.handover || inner.stopping || inner.written.wanted;
            if inner.group.is_empty() || inner.writing || !urgent {
                self.wait_for_work(&mut inner);
            }
        }
    }

    /// Sleeps until there is work or something falls due; marks an idle log.
    fn wait_for_work(&self, inner: &mut MutexGuard<'_, Inner>) {
        let durable = self.durable.load(Ordering::Acquire);
        let idle = inner.group.is_empty() && !inner.writing && inner.written.bytes == 0;
        let unmarked = inner.marked < durable && !inner.closed;
        let timeout = match inner.written.since {
            Some(since) => {
                self.options.flush_interval.saturating_sub(self.clock.monotonic().saturating_sub(since))
            }
            None if idle && unmarked => IDLE_MARK,
            None => Duration::from_secs(3600),
        };
        let timeout = timeout.max(Duration::from_millis(1));
        let timed_out = self.work.wait_for(inner, timeout).timed_out();
        let still_idle = idle && inner.group.is_empty() && !inner.writing;
        let fits = inner.segment.1 - inner.end >= 2 * FRAME_HEADER as u64;
        if timed_out && still_idle && unmarked && fits {
            self.mark(inner, durable);
        }
    }

    fn mark(&self, inner: &mut Inner, durable: u64) {
        let mark = FrameHeader {
            kind: FrameKind::Mark,
            length: FRAME_HEADER as u32,
            position: inner.end,
            durable,
            store_ms: inner.last_ms,
            epoch: inner.epoch,
            records: 0,
        };
        let base = inner.segment.0;
        self.push_raw(inner, base, &mark.encode(self.seed));
        inner.marked = durable;
        inner.handover = true;
    }

    /// Writes the open group from whatever thread waits for it, unless somebody is writing already.
    pub fn write_inline(self: &Arc<Self>, group: u64) {
        let mut inner = self.inner.lock();
        if inner.group.number != group || inner.group.is_empty() || inner.fenced.is_some() {
            return;
        }
        // Whoever is writing now looks for this when he is done.
        let dirty = inner.written.bytes > self.options.dirty_bytes;
        let ready = inner.group.pieces.iter().all(|piece| self.segments.get(piece.base).is_some());
        if inner.writing || dirty || !ready {
            inner.handover = true;
            inner.written.wanted |= dirty;
            self.work.notify_one();
            return;
        }
        drop(self.write_group(inner, false));
    }

    /// Has the thread write the open group, since whoever should have done it went away.
    pub fn nudge(&self) {
        self.inner.lock().handover = true;
        self.work.notify_one();
    }

    /// Takes the open group, writes it, indexes it and shows what may be shown early.
    fn write_group<'a>(
        self: &'a Arc<Self>,
        mut inner: MutexGuard<'a, Inner>,
        thread: bool,
    ) -> MutexGuard<'a, Inner> {
        let number = inner.group.number;
        let next = OpenGroup { number: number + 1, ..OpenGroup::default() };
        let mut group = mem::replace(&mut inner.group, next);
        if let Some(last) = group.pieces.last_mut() {
            let rest = last.bytes.split_off(last.bytes.len());
            if rest.capacity() > inner.spare.capacity() {
                inner.spare = rest;
            }
        }
        let end = inner.end;
        let (sync, bytes) = (group.sync, group.bytes());
        let bare = group.batches.is_empty() && !group.sync;
        inner.writing = true;
        inner.handover = false;
        drop(inner);

        let written = self.write_pieces(&mut group, thread);
        let mut wakers = WakerSet::default();
        let outcome = written.and_then(|segments| {
            self.written.store(end, Ordering::Release);
            self.dispatch(group)?;
            self.dispatched.store(end, Ordering::Release);
            Ok(segments)
        });

        let mut inner = self.inner.lock();
        inner.writing = false;
        inner.waiting_bytes = inner.waiting_bytes.saturating_sub(bytes);
        match outcome {
            Ok(segments) => {
                let now = self.clock.monotonic();
                let written = &mut inner.written;
                for segment in segments {
                    if !written.segments.iter().any(|known| known.base == segment.base) {
                        written.segments.push(segment);
                    }
                }
                written.group = number;
                written.end = end;
                written.wanted |= sync;
                if !bare || bytes > FRAME_HEADER as u64 {
                    written.bytes += bytes;
                    written.since.get_or_insert(now);
                }
                self.progress.reached(number, Stage::Written, &mut wakers);
                let more = !inner.group.is_empty() || inner.written.wanted;
                if more && !thread {
                    self.hand_on(&mut inner);
                }
                let (base, limit) = inner.segment;
                if inner.end - base >= (limit - base) / PREPARE_AT {
                    self.want_segment(limit, self.next_capacity(inner.segment), inner.epoch);
                }
            }
            Err(error) => self.fence(&mut inner, "writing the log", &error),
        }
        MutexGuard::unlocked(&mut inner, || wakers.wake_all());
        inner
    }

    /// What came while somebody else than the thread was writing.
    fn hand_on(&self, inner: &mut Inner) {
        // Callers that found somebody writing do not try again.
        inner.handover = !inner.group.is_empty();
        self.work.notify_one();
    }

    fn write_pieces(&self, group: &mut OpenGroup, may_wait: bool) -> io::Result<Vec<Arc<Segment>>> {
        let started = self.clock.monotonic();
        let mut segments: Vec<Arc<Segment>> = Vec::with_capacity(1);
        for piece in group.pieces.drain(..) {
            let segment = match segments.last() {
                Some(segment) if segment.base == piece.base => Arc::clone(segment),
                _ => {
                    let segment = self.segment_for_write(piece.base, may_wait)?;
                    segments.push(Arc::clone(&segment));
                    segment
                }
            };
            segment.append(&piece.bytes, piece.position)?;
            self.recent.push(piece.position, piece.bytes.freeze());
        }
        self.metrics.wrote(self.clock.monotonic().saturating_sub(started));
        Ok(segments)
    }

    /// Indexes what was written, in log order, and shows what may be shown before it is synced.
    fn dispatch(&self, group: OpenGroup) -> io::Result<()> {
        let mut early = Vec::new();
        let mut entries = group.entries.as_slice();
        for batch in group.batches {
            let (own, rest) = entries.split_at_checked(batch.entries).unwrap_or((entries, &[]));
            entries = rest;
            if batch.relocated {
                self.redirect(&batch, own)?;
                continue;
            }
            self.index(&batch, own)?;
            let end = batch.first + own.len() as u64;
            let mut unpublished = self.unpublished.lock();
            if batch.early {
                batch.queue.publish(end);
                early.push((batch.queue.key(), end));
            }
            unpublished.push_back(Unpublished {
                group: group.number,
                queue: batch.queue,
                first: batch.first,
                end,
            });
        }
        self.keys.insert_pairs(&group.lookups);
        if !early.is_empty() {
            self.news.grew(&early);
        }
        for topic in group.deleted {
            self.news.deleted(topic);
        }
        Ok(())
    }

    /// Adds entries to a queue's index. Where the index cannot grow for want of space, that is waited for: what
    /// is in the log already cannot be refused any more.
    fn index(&self, batch: &Batch, entries: &[Entry]) -> io::Result<()> {
        let (mut first, mut entries) = (batch.first, entries);
        loop {
            match batch.queue.append(&self.space, first, entries) {
                Err(error) if is_no_space(&error) && !self.wait_for_space() => {}
                outcome => return outcome,
            }
            let done = batch.queue.index().read().end().unwrap_or(first).saturating_sub(first);
            entries = entries.get(usize::try_from(done).unwrap_or(usize::MAX)..).unwrap_or_default();
            first += done;
        }
    }

    /// Points the index at copies, if the message is still there.
    fn redirect(&self, batch: &Batch, entries: &[Entry]) -> io::Result<()> {
        let key = batch.queue.key();
        for (offset, entry) in (batch.first..).zip(entries) {
            let mut index = batch.queue.index().write();
            index.replace(&self.space, key, offset, entry)?;
            batch.queue.touch(entry.position);
        }
        Ok(())
    }

    fn sync_due(&self, inner: &Inner) -> bool {
        let written = &inner.written;
        if written.segments.is_empty() {
            return false;
        }
        let overdue = written
            .since
            .is_some_and(|since| self.clock.monotonic().saturating_sub(since) >= self.options.flush_interval);
        written.wanted
            || overdue
            || written.bytes >= self.options.dirty_bytes
            || (inner.stopping && written.bytes > 0)
    }

    /// One sync for all that was written before it began; then everybody gets an answer.
    fn sync_written<'a>(self: &'a Arc<Self>, mut inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        let (group, end) = (inner.written.group, inner.written.end);
        let written = mem::replace(&mut inner.written, Written { group, end, ..Written::default() });
        let outcome = MutexGuard::unlocked(&mut inner, || {
            let started = self.clock.monotonic();
            let mut segments = written.segments;
            segments.sort_by_key(|segment| segment.base);
            segments.iter().try_for_each(|segment| segment.sync())?;
            self.metrics.synced(self.clock.monotonic().saturating_sub(started), written.bytes);
            Ok(())
        });
        match outcome {
            Ok(()) => MutexGuard::unlocked(&mut inner, || self.publish(group, end)),
            Err(error) => self.fence(&mut inner, "syncing the log", &error),
        }
        inner
    }

    /// Everything of groups up to `group` is durable: readers may see it, and senders get their OK.
    fn publish(&self, group: u64, end: u64) {
        self.durable.fetch_max(end, Ordering::AcqRel);
        let mut grown: Vec<(QueueKey, u64)> = Vec::new();
        {
            let mut unpublished = self.unpublished.lock();
            while let Some(batch) = unpublished.front().filter(|batch| batch.group <= group) {
                let before = batch.queue.bounds().1;
                if before < batch.end {
                    batch.queue.publish(batch.end);
                    let key = batch.queue.key();
                    match grown.last_mut() {
                        Some(last) if last.0 == key => last.1 = batch.end,
                        _ => grown.push((key, batch.end)),
                    }
                }
                unpublished.pop_front();
            }
        }
        let mut wakers = WakerSet::default();
        self.progress.reached(group, Stage::Synced, &mut wakers);
        if !grown.is_empty() {
            self.news.grew(&grown);
        }
        wakers.wake_all();
    }

    /// A write or sync failed: nothing is written any more, and readers see what is durable.
    fn fence(&self, inner: &mut Inner, what: &str, error: &io::Error) {
        let reason = format!("{what} failed: {error}");
        tracing::error!(event = "storage.state_changed", state = "failed", %reason, end = inner.end, "log closed: a failed write cannot be repeated");
        let error = StoreError::Fenced(reason);
        inner.fenced = Some(error.clone());
        for batch in self.unpublished.lock().drain(..).rev() {
            batch.queue.withdraw(batch.first);
        }
        self.metrics.fenced();
        self.progress.fail(error);
        self.leave_fence_mark();
        self.work.notify_all();
    }

    /// Appends the clean-stop record and ends the writer once all is synced.
    pub fn stop_writing(self: &Arc<Self>) {
        let closed = self.transact::<(), ()>(Purpose::State, |tx| {
            tx.change(Change::Closed);
            Ok(())
        });
        let mut inner = self.inner.lock();
        inner.stopping = true;
        inner.closed = true;
        self.work.notify_one();
        drop(inner);
        // Whoever joins the thread waits for it.
        drop(closed);
    }

    /// What a new segment's header says.
    pub(super) fn segment_header(&self, base: u64, capacity: u64, epoch: u32) -> SegmentHeader {
        SegmentHeader { shard_id: self.shard_id, base, capacity, epoch, shard: self.options.shard.clone() }
    }
}

/// Frames waiting to become visible, for the shard.
pub(super) type UnpublishedQueue = VecDeque<Unpublished>;
