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

use bytes::{Bytes, BytesMut};
use parking_lot::MutexGuard;

use super::{
    NewMessage, Pending, Place, Purpose, Queue, QueueMap, StoreError, Topic, TransactError,
    change::Change,
    codec::align8,
    frame::{
        FRAME_HEADER, FrameHeader, FrameKind, MAX_RECORDS, RECORD_HEADER, RELOCATED, RecordHeader,
        RecordKind, payload_crc, record_bytes,
    },
    index::Entry,
    progress::Stage,
    segment::{Segment, SegmentHeader},
    shard::Shard,
    tables::Group,
};
use crate::{
    model::{
        DurabilityLevel, GroupId, GroupName, GroupSettings, LogPosition, QueueKey, TopicId, TopicName,
        TopicSettings,
    },
    runtime::WakerSet,
};

/// Bytes that `seal` may add to a message.
const SEAL_BYTES: usize = 512;
/// Room for the record of a topic or group: names and a few numbers.
const MAX_CHANGE_BYTES: usize = 512;
/// A group is written in pieces of about this size.
const PIECE_BYTES: usize = 1 << 20;
/// An idle log gets its durable mark after this time.
const IDLE_MARK: Duration = Duration::from_millis(50);
/// Sends are refused when the oldest one waits longer than this.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Sizes of the ranges of offsets reserved for async queues; doubled while they are used up quickly.
const RESERVE_MIN: u64 = 1024;
const RESERVE_MAX: u64 = 1 << 20;
const RESERVE_QUICK: Duration = Duration::from_secs(1);

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
    group: OpenGroup,
    spare: BytesMut,
    /// Somebody is writing; the next group waits.
    writing: bool,
    /// The thread shall write the open group, whoever else might.
    handover: bool,
    /// Bytes that are appended and not yet written.
    waiting_bytes: u64,
    written: Written,
    reservations: HashMap<QueueKey, Reservation>,
    /// Durable mark of the newest frame.
    marked: u64,
    pub stopping: bool,
    closed: bool,
    pub fenced: Option<StoreError>,
}

/// What is written and waits for a sync.
#[derive(Debug, Default)]
struct Written {
    /// Newest group written, and its end.
    group: u64,
    end: u64,
    segments: Vec<Arc<Segment>>,
    bytes: u64,
    since: Option<Duration>,
    /// Somebody waits for the sync.
    wanted: bool,
}

/// What will be written together.
#[derive(Debug, Default)]
struct OpenGroup {
    number: u64,
    pieces: Vec<Piece>,
    batches: Vec<Batch>,
    entries: Vec<Entry>,
    lookups: Vec<(u64, u64)>,
    deleted: Vec<TopicId>,
    /// Something in it must be synced before its OK.
    sync: bool,
    /// When it was begun.
    since: Option<Duration>,
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
struct Piece {
    base: u64,
    position: u64,
    bytes: BytesMut,
}

/// Messages of one frame.
#[derive(Debug)]
struct Batch {
    queue: Arc<Queue>,
    first: u64,
    /// How many of the group's entries are its.
    entries: usize,
    /// Readers may see it before it is synced.
    early: bool,
    /// Entries of messages that are in the queue already and were copied forward.
    relocated: bool,
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
struct Reservation {
    /// Durable: offsets below may be shown early.
    until: u64,
    /// On its way: the range's end, and the group that carries it.
    next: Option<(u64, u64)>,
    range: u64,
    at: Duration,
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

/// Decisions under the lock that orders the log. What is pushed becomes one frame: all or nothing. The
/// tables it shows include what is still on its way to disk.
pub struct Tx<'a> {
    shard: &'a Shard,
    inner: &'a mut Inner,
    now_ms: u64,
    /// Where the frame begins in the last piece; `None` before anything was pushed.
    frame: Option<usize>,
    records: usize,
    /// How many ids of topics and groups were made so far.
    made: u64,
    topics: Vec<Arc<Topic>>,
    groups: Vec<Arc<Group>>,
    /// With the place in the frame.
    changes: Vec<(Change, u64)>,
    batches: Vec<Batch>,
    entries: Vec<Entry>,
    lookups: Vec<(u64, u64)>,
    sync: bool,
    error: Option<StoreError>,
}

impl Tx<'_> {
    /// Store time of this frame, milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// The topic of this name.
    pub fn topic(&self, name: &TopicName) -> Option<Arc<Topic>> {
        self.shard.tables.topic(name)
    }

    /// The group of this name.
    pub fn group(&self, name: &GroupName) -> Option<Arc<Group>> {
        self.shard.tables.group(name)
    }

    /// Makes a topic; the caller has checked that there is none. It can be used at once, in this frame
    /// too.
    pub fn create_topic(&mut self, name: TopicName, settings: TopicSettings) -> Arc<Topic> {
        let id = TopicId(self.new_id());
        let map = QueueMap { version: 1, queues: settings.queues };
        let queues = (0..settings.queues).map(|queue| Arc::new(Queue::new(QueueKey { topic: id, queue })));
        let position = LogPosition(self.inner.end);
        let topic = Arc::new(Topic {
            id,
            name: name.clone(),
            settings: settings.clone(),
            map,
            queues: queues.collect(),
            position,
            retired: Vec::new(),
        });
        self.topics.push(Arc::clone(&topic));
        self.change(Change::Topic { id, name, settings, map });
        topic
    }

    /// Replaces a topic's settings and queue map. Queues are made or dropped to fit `settings.queues`.
    pub fn update_topic(&mut self, topic: &Topic, settings: TopicSettings, map: QueueMap) {
        self.change(Change::Topic { id: topic.id, name: topic.name.clone(), settings, map });
    }

    /// Deletes a topic, its messages and all progress on it.
    pub fn delete_topic(&mut self, topic: &Topic) {
        self.change(Change::TopicDeleted { id: topic.id });
    }

    /// Makes a group; the caller has checked that there is none.
    pub fn create_group(&mut self, name: GroupName, settings: GroupSettings) -> Arc<Group> {
        let id = GroupId(self.new_id());
        let position = LogPosition(self.inner.end);
        let group = Arc::new(Group {
            id,
            name: name.clone(),
            settings: settings.clone(),
            position,
            progress: Arc::default(),
        });
        self.groups.push(Arc::clone(&group));
        self.change(Change::Group { id, name, settings });
        group
    }

    /// Replaces a group's settings.
    pub fn update_group(&mut self, group: &Group, settings: GroupSettings) {
        self.change(Change::Group { id: group.id, name: group.name.clone(), settings });
    }

    /// Deletes a group and its progress.
    pub fn delete_group(&mut self, group: &Group) {
        self.change(Change::GroupDeleted { id: group.id });
    }

    /// Sets a group's progress; the caller has checked range and direction.
    pub fn commit(&mut self, group: &Group, offsets: &[(QueueKey, u64)]) {
        self.change(Change::Progress { group: group.id, offsets: offsets.to_vec() });
    }

    /// Appends messages to one queue of `topic`. `seal` is called once a message, in order, to append the
    /// server's fields (at most 512 bytes) to the client's bytes. Answers the place of the first.
    pub fn send<'m>(
        &mut self,
        topic: &Topic,
        queue: &Arc<Queue>,
        messages: impl ExactSizeIterator<Item = NewMessage<'m>> + Clone,
        mut seal: impl FnMut(usize, Place, &mut BytesMut),
    ) -> Place {
        let earlier = self.batches.iter().rev().find(|batch| Arc::ptr_eq(&batch.queue, queue));
        let first = earlier.map_or_else(|| queue.next(), |batch| batch.first + batch.entries as u64);
        let count = messages.len();
        let early = topic.visible_early() && self.reserve_offsets(queue.key(), first, count as u64);
        let mut place = Place {
            queue: queue.key().queue,
            offset: first,
            store_ms: self.now_ms,
            position: LogPosition(self.inner.end),
        };
        let bound =
            messages.clone().map(|message| bound(message.lookups.len(), message.client.len() + SEAL_BYTES));
        if self.records + count > MAX_RECORDS || !self.reserve(bound.sum()) {
            return place;
        }
        self.sync |= topic.settings.durability == DurabilityLevel::Sync;
        let answer = Place { position: LogPosition(self.position()), ..place };
        for (n, message) in messages.enumerate() {
            place.position = LogPosition(self.position());
            let header = RecordHeader {
                kind: RecordKind::Message,
                flags: 0,
                length: 0,
                payload_crc: message.crc,
                lookups: u8::try_from(message.lookups.len()).unwrap_or(u8::MAX),
                queue: place.queue,
                topic: topic.id.0,
                offset: place.offset,
                tag_hash: message.tag_hash,
                store_ms: self.now_ms,
                epoch: self.inner.epoch,
            };
            let length = self.record(header, message.lookups, message.client, |into| seal(n, place, into));
            self.entries.push(Entry {
                position: place.position.0,
                length,
                tag_hash: message.tag_hash,
                store_ms: self.now_ms,
            });
            place.offset += 1;
        }
        self.batches.push(Batch { queue: Arc::clone(queue), first, entries: count, early, relocated: false });
        answer
    }

    /// Copies a message forward: same offset, same store time, new position.
    pub(super) fn relocate(
        &mut self,
        queue: &Arc<Queue>,
        header: &RecordHeader,
        lookups: &[u64],
        payload: &Bytes,
    ) {
        if self.records + 1 > MAX_RECORDS || !self.reserve(bound(lookups.len(), payload.len())) {
            return;
        }
        let position = self.position();
        let header = RecordHeader {
            flags: RELOCATED,
            length: 0,
            payload_crc: crc32c::crc32c(payload),
            epoch: self.inner.epoch,
            ..*header
        };
        let length = self.record(header, lookups, payload, |_| {});
        let (tag_hash, store_ms) = (header.tag_hash, header.store_ms);
        self.entries.push(Entry { position, length, tag_hash, store_ms });
        self.sync = true;
        let queue = Arc::clone(queue);
        self.batches.push(Batch { queue, first: header.offset, entries: 1, early: false, relocated: true });
    }

    /// Records a change; it is folded when the frame is complete.
    pub(super) fn change(&mut self, change: Change) {
        let payload = change.encode();
        if self.records + 1 > MAX_RECORDS || !self.reserve(bound(0, payload.len())) {
            return;
        }
        let header = RecordHeader {
            kind: change.kind(),
            flags: 0,
            length: 0,
            payload_crc: crc32c::crc32c(&payload),
            lookups: 0,
            queue: 0,
            topic: 0,
            offset: 0,
            tag_hash: 0,
            store_ms: self.now_ms,
            epoch: self.inner.epoch,
        };
        let at = self.bytes() as u64;
        self.record(header, &[], &payload, |_| {});
        self.changes.push((change, at));
        self.sync = true;
    }

    /// The size of the frame so far.
    pub(super) fn bytes(&self) -> usize {
        self.frame.map_or(0, |start| self.piece_len() - start)
    }

    fn new_id(&mut self) -> u64 {
        // If the frame has to begin in the next segment, then now: ids and positions come from its place.
        self.reserve(MAX_CHANGE_BYTES);
        // No other frame begins here, and a frame is longer than the number of ids it can make: each id
        // takes a record.
        self.made += 1;
        self.inner.end + self.made
    }

    fn piece_len(&self) -> usize {
        self.inner.group.pieces.last().map_or(0, |piece| piece.bytes.len())
    }

    /// Where the next record will stand.
    fn position(&self) -> u64 {
        self.inner.end + self.bytes() as u64
    }

    /// Whether offsets up to `first + count` may be shown before they are durable. Reserves more in time.
    fn reserve_offsets(&mut self, queue: QueueKey, first: u64, count: u64) -> bool {
        let now = self.shard.clock.monotonic();
        let group = self.inner.group.number;
        let end = first + count;
        let synced = |group| matches!(self.shard.progress.check(group, Stage::Synced), Some(Ok(())));
        let reservation = self.inner.reservations.entry(queue).or_insert(Reservation {
            until: 0,
            next: None,
            range: RESERVE_MIN,
            at: now,
        });
        if let Some((until, carried)) = reservation.next
            && synced(carried)
        {
            reservation.until = until;
            reservation.next = None;
        }
        let until = reservation.until;
        let ahead = reservation.next.map_or(until, |(until, _)| until);
        if end + reservation.range / 2 > ahead && reservation.next.is_none() {
            let quick = now.saturating_sub(reservation.at) < RESERVE_QUICK;
            reservation.range = if quick { (reservation.range * 2).min(RESERVE_MAX) } else { RESERVE_MIN };
            reservation.at = now;
            let until = end + reservation.range;
            reservation.next = Some((until, group));
            let sync = self.sync;
            self.change(Change::Reserved { queue, until });
            // Nobody waits for it.
            self.sync = sync;
            self.inner.written.wanted = true;
        }
        end <= until
    }

    /// Makes room for `bytes` more in the frame, in the next segment if need be.
    fn reserve(&mut self, bytes: usize) -> bool {
        if self.error.is_some() {
            return false;
        }
        let frame = self.bytes();
        let header = if self.frame.is_none() { FRAME_HEADER } else { 0 };
        let wanted = frame + header + bytes;
        if self.inner.end + wanted as u64 > self.inner.segment.1 {
            let limit = self.shard.next_capacity(self.inner.segment.1);
            if wanted as u64 > limit {
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                self.error = Some(StoreError::TooLarge { bytes: wanted, limit });
                return false;
            }
            self.roll(wanted);
        }
        let start = self.start_frame(header + bytes);
        self.frame = Some(start);
        true
    }

    /// Where the frame begins in the last piece, which has room for `bytes` more.
    fn start_frame(&mut self, bytes: usize) -> usize {
        let Inner { group, spare, segment, end, .. } = &mut *self.inner;
        if let (Some(start), Some(piece)) = (self.frame, group.pieces.last_mut()) {
            piece.bytes.reserve(bytes);
            return start;
        }
        let fits = group.pieces.last().is_some_and(|piece| {
            piece.base == segment.0 && piece.bytes.capacity() - piece.bytes.len() >= bytes
        });
        if !fits {
            let mut room = mem::take(spare);
            if room.capacity() < bytes {
                room = BytesMut::with_capacity(bytes.max(PIECE_BYTES));
            }
            group.pieces.push(Piece { base: segment.0, position: *end, bytes: room });
        }
        let Some(piece) = group.pieces.last_mut() else { return 0 };
        let start = piece.bytes.len();
        piece.bytes.extend_from_slice(&[0; FRAME_HEADER]);
        start
    }

    /// Leaves the segment: marks its rest unused and takes the frame begun so far along.
    fn roll(&mut self, wanted: usize) {
        let begun = self
            .frame
            .and_then(|start| self.inner.group.pieces.last_mut().map(|piece| piece.bytes.split_off(start)));
        self.shard.roll(self.inner, self.now_ms);
        if let Some(begun) = begun {
            let mut bytes = BytesMut::with_capacity(wanted.max(PIECE_BYTES));
            bytes.extend_from_slice(&begun);
            let (base, position) = (self.inner.segment.0, self.inner.end);
            self.inner.group.pieces.push(Piece { base, position, bytes });
            self.frame = Some(0);
        }
    }

    /// Writes one record into room that was reserved. Answers its length.
    fn record(
        &mut self,
        mut header: RecordHeader,
        lookups: &[u64],
        payload: &[u8],
        seal: impl FnOnce(&mut BytesMut),
    ) -> u32 {
        let position = self.position();
        let seed = self.shard.seed;
        let Some(piece) = self.inner.group.pieces.last_mut() else { return 0 };
        let bytes = &mut piece.bytes;
        let start = bytes.len();
        bytes.extend_from_slice(&[0; RECORD_HEADER]);
        for &hash in lookups.iter().take(usize::from(header.lookups)) {
            bytes.extend_from_slice(&hash.to_le_bytes());
            self.lookups.push((hash, position));
        }
        let body = bytes.len();
        bytes.extend_from_slice(payload);
        let sealed = bytes.len();
        seal(bytes);
        header.length = u32::try_from(bytes.len() - body).unwrap_or(u32::MAX);
        let crc = crc32c::crc32c_append(header.payload_crc, bytes.get(sealed..).unwrap_or_default());
        header.payload_crc = payload_crc(crc, bytes.get(start + RECORD_HEADER..body).unwrap_or_default());
        let total = record_bytes(header.lookups, header.length as usize);
        bytes.resize(start + total, 0);
        if let Some(place) = bytes.get_mut(start..start + RECORD_HEADER) {
            place.copy_from_slice(&header.encode(seed, position));
        }
        self.records += 1;
        u32::try_from(total).unwrap_or(u32::MAX)
    }

    /// Forgets the frame.
    fn abandon(self) {
        if let (Some(start), Some(piece)) = (self.frame, self.inner.group.pieces.last_mut()) {
            piece.bytes.truncate(start);
            if start == 0 {
                self.inner.group.pieces.pop();
            }
        }
        // Reservations that were only in this frame never happened.
        let group = self.inner.group.number;
        for (change, _) in &self.changes {
            if let Change::Reserved { queue, .. } = change
                && let Some(reservation) = self.inner.reservations.get_mut(queue)
                && reservation.next.is_some_and(|(_, carried)| carried == group)
            {
                reservation.next = None;
            }
        }
    }

    /// Completes the frame and folds it into the tables. Answers the stage that its OK stands for.
    fn finish(mut self) -> Stage {
        let Some(start) = self.frame else { return Stage::Synced };
        let position = self.inner.end;
        let durable = self.shard.durable.load(Ordering::Acquire);
        let length = align8(self.bytes());
        let header = FrameHeader {
            kind: FrameKind::Data,
            length: u32::try_from(length).unwrap_or(u32::MAX),
            position,
            durable,
            store_ms: self.now_ms,
            epoch: self.inner.epoch,
            records: u16::try_from(self.records).unwrap_or(u16::MAX),
        };
        let Inner { group, .. } = &mut *self.inner;
        if let Some(place) =
            group.pieces.last_mut().and_then(|piece| piece.bytes.get_mut(start..start + FRAME_HEADER))
        {
            place.copy_from_slice(&header.encode(self.shard.seed));
        }
        for topic in self.topics.drain(..) {
            self.shard.tables.insert_topic(topic);
        }
        for group in self.groups.drain(..) {
            self.shard.tables.insert_group(group);
        }
        for (change, at) in &self.changes {
            self.shard.tables.apply(&self.shard.space, change, position + at);
            if let Change::TopicDeleted { id } = change {
                group.deleted.push(*id);
            }
        }
        for batch in &self.batches {
            if !batch.relocated {
                batch.queue.take(batch.entries as u64);
            }
        }
        group.since.get_or_insert_with(|| self.shard.clock.monotonic());
        group.batches.append(&mut self.batches);
        group.entries.append(&mut self.entries);
        group.lookups.append(&mut self.lookups);
        group.sync |= self.sync;
        self.inner.end += length as u64;
        self.inner.waiting_bytes += length as u64;
        self.inner.last_ms = self.now_ms;
        self.inner.marked = durable;
        if self.sync { Stage::Synced } else { Stage::Written }
    }
}

fn bound(lookups: usize, payload: usize) -> usize {
    RECORD_HEADER + lookups * 8 + payload + 8
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
        let mut tx = Tx {
            shard: self,
            inner: &mut inner,
            now_ms,
            frame: None,
            records: 0,
            made: 0,
            topics: Vec::new(),
            groups: Vec::new(),
            changes: Vec::new(),
            batches: Vec::new(),
            entries: Vec::new(),
            lookups: Vec::new(),
            sync: false,
            error: None,
        };
        let answer = match decide(&mut tx) {
            Ok(answer) => answer,
            Err(refusal) => {
                tx.abandon();
                return Err(TransactError::Decided(refusal));
            }
        };
        if let Some(error) = tx.error.take() {
            tx.abandon();
            return Err(TransactError::Store(error));
        }
        if tx.records == 0 {
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
        if inner.waiting_bytes > limit || waits > MAX_WAIT {
            self.metrics.refused_busy();
            return Err(StoreError::Busy { bytes: inner.waiting_bytes, limit, retry_ms: 50 });
        }
        Ok(())
    }

    /// Begins the next segment.
    fn roll(&self, inner: &mut Inner, now_ms: u64) {
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
        let capacity = self.next_capacity(end);
        inner.segment = (end, end + capacity);
        inner.end = end;
        self.want_segment(end, inner.epoch);
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
        if self.work.wait_for(inner, timeout).timed_out() && idle && inner.group.is_empty() && !inner.writing
        {
            if unmarked && inner.segment.1 - inner.end >= 2 * FRAME_HEADER as u64 {
                self.mark(inner, durable);
            }
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
        let inner = self.inner.lock();
        if inner.group.number != group || inner.writing || inner.group.is_empty() || inner.fenced.is_some() {
            return;
        }
        let ready = inner.group.pieces.iter().all(|piece| self.segments.get(piece.base).is_some());
        if !ready || inner.written.bytes > self.options.dirty_bytes {
            let mut inner = inner;
            inner.handover = true;
            inner.written.wanted |= inner.written.bytes > self.options.dirty_bytes;
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
                if inner.end - base >= (limit - base) / 2 {
                    self.want_segment(limit, inner.epoch);
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
            segment.write(&piece.bytes, piece.position)?;
            self.recent.push(piece.position, piece.bytes.freeze());
        }
        self.metrics.wrote(self.clock.monotonic().saturating_sub(started));
        Ok(segments)
    }

    /// Indexes what was written, in log order, and shows what may be shown before it is synced.
    fn dispatch(&self, group: OpenGroup) -> io::Result<()> {
        let mut early = Vec::new();
        let mut entries = group.entries.as_slice();
        let mut unpublished = self.unpublished.lock();
        for batch in group.batches {
            let (own, rest) = entries.split_at_checked(batch.entries).unwrap_or((entries, &[]));
            entries = rest;
            if batch.relocated {
                self.redirect(&batch, own)?;
                continue;
            }
            batch.queue.append(&self.space, batch.first, own)?;
            let end = batch.first + own.len() as u64;
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
        drop(unpublished);
        self.keys.insert_pairs(&group.lookups);
        if !early.is_empty() {
            self.news.grew(&early);
        }
        for topic in group.deleted {
            self.news.deleted(topic);
        }
        Ok(())
    }

    /// Points the index at copies, if the message is still there.
    fn redirect(&self, batch: &Batch, entries: &[Entry]) -> io::Result<()> {
        let key = batch.queue.key();
        for (offset, entry) in (batch.first..).zip(entries) {
            let mut index = batch.queue.index().write();
            index.replace(&self.space, key, offset, entry)?;
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
        if let Ok((_, pending)) = closed {
            mem::forget(pending);
        }
        self.work.notify_one();
    }

    /// What a new segment's header says.
    pub(super) fn segment_header(&self, base: u64, epoch: u32) -> SegmentHeader {
        SegmentHeader {
            shard_id: self.shard_id,
            base,
            capacity: self.next_capacity(base),
            epoch,
            shard: self.options.shard.clone(),
        }
    }
}

/// Frames waiting to become visible, for the shard.
pub(super) type UnpublishedQueue = VecDeque<Unpublished>;
