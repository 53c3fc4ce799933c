//! One frame in the making: what callers decide and append under the log's lock.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::{Bytes, BytesMut};

use super::{
    NewMessage, Place, Queue, QueueMap, StoreError, Topic,
    change::Change,
    codec::align8,
    frame::{
        FRAME_HEADER, FrameHeader, FrameKind, MAX_RECORDS, RECORD_HEADER, RELOCATED, RecordHeader,
        RecordKind, payload_crc, record_bytes,
    },
    index::Entry,
    log::{Batch, Inner, Piece, Reservation},
    progress::Stage,
    shard::Shard,
    tables::Group,
};
use crate::model::{
    DurabilityLevel, GroupId, GroupName, GroupSettings, LogPosition, QueueKey, TopicId, TopicName,
    TopicSettings,
};

/// Bytes that `seal` may add to a message.
const SEAL_BYTES: usize = 512;
/// Room for the record of a topic or group: names and a few numbers.
const MAX_CHANGE_BYTES: usize = 512;
/// A group is written in pieces of about this size.
const PIECE_BYTES: usize = 1 << 20;
/// Sizes of the ranges of offsets reserved for async queues; doubled while they are used up quickly.
const RESERVE_MIN: u64 = 1024;
const RESERVE_MAX: u64 = 1 << 20;
const RESERVE_QUICK: Duration = Duration::from_secs(1);

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

impl<'a> Tx<'a> {
    pub(super) fn new(shard: &'a Shard, inner: &'a mut Inner, now_ms: u64) -> Self {
        Self {
            shard,
            inner,
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
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.records == 0
    }

    pub(super) fn take_error(&mut self) -> Option<StoreError> {
        self.error.take()
    }

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
    /// rest of the client's bytes and the server's fields (at most 512 bytes). Answers the place of the first.
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
        let bound = messages.clone().map(|message| {
            let [before, behind] = message.parts;
            bound(message.lookups.len(), before.len() + behind.len() + message.later_bytes + SEAL_BYTES)
        });
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
            let length = self.record(header, message.lookups, message.parts, |into| seal(n, place, into));
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
        let length = self.record(header, lookups, [payload, &[]], |_| {});
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
        self.record(header, &[], [&payload, &[]], |_| {});
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
            let limit = self.shard.next_capacity(self.inner.segment);
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
        let from = self.inner.end;
        self.shard.roll(self.inner, self.now_ms);
        if let Some(begun) = begun {
            let mut bytes = BytesMut::with_capacity(wanted.max(PIECE_BYTES));
            bytes.extend_from_slice(&begun);
            let (base, position) = (self.inner.segment.0, self.inner.end);
            self.inner.group.pieces.push(Piece { base, position, bytes });
            self.frame = Some(0);
            self.moved(from, position);
        }
    }

    /// The records so far were written for a frame at `from`, which begins at `to` now. Their checksums cover
    /// their positions.
    fn moved(&mut self, from: u64, to: u64) {
        let seed = self.shard.seed;
        let mut at = FRAME_HEADER;
        while let Some(piece) = self.inner.group.pieces.last_mut()
            && let Some(record) = piece.bytes.get_mut(at..at + RECORD_HEADER)
            && let Ok(header) = RecordHeader::decode(seed, from + at as u64, record)
        {
            record.copy_from_slice(&header.encode(seed, to + at as u64));
            at += header.total();
        }
        let by = to - from;
        self.entries.iter_mut().for_each(|entry| entry.position += by);
        self.lookups.iter_mut().for_each(|(_, position)| *position += by);
    }

    /// Writes one record into room that was reserved. Answers its length.
    fn record(
        &mut self,
        mut header: RecordHeader,
        lookups: &[u64],
        payload: [&[u8]; 2],
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
        payload.iter().for_each(|part| bytes.extend_from_slice(part));
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
    pub(super) fn abandon(self) {
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
    pub(super) fn finish(mut self) -> Stage {
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
        let Inner { group, reservations, .. } = &mut *self.inner;
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
                reservations.retain(|queue, _| queue.topic != *id);
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
