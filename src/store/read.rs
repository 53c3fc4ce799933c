//! Reading messages: by queue and offset, by key, by time.
//!
//! The newest messages come from memory, the rest from the log's files: without waiting if the page cache
//! has them, else on whatever thread the caller has for that.

use std::{io, sync::atomic::Ordering};

use bytes::{Bytes, BytesMut};

use super::{
    Damage, Fetched, Found, Place, Queue, Scan, ScanLimits, Slot, StoreError, TimeBound,
    frame::{RECORD_HEADER, Record, RecordHeader, RecordKind},
    index::Lookup,
    segment::Segment,
    shard::Shard,
};
use crate::model::{LogPosition, QueueKey, TopicId};

/// Entries looked at under one hold of the index lock.
const LOCK_ENTRIES: u64 = 512;
/// Records on disk are read in one go when no more than this lies between them …
const GAP_BYTES: u64 = 16 << 10;
/// … and no more than this is read in all.
const RUN_BYTES: u64 = 1 << 20;
/// A read of this many bytes is taken for that of somebody who catches up …
const AHEAD_WORTH_BYTES: u64 = 128 << 10;
/// … if what was read makes up a fair part of where it lies; then as much is asked for ahead, at most so much.
const AHEAD_SPREAD: u64 = 8;
const AHEAD_BYTES: u64 = 8 << 20;

impl Shard {
    /// See [`super::Store::scan`].
    pub fn scan(
        &self,
        queue: &Queue,
        from: u64,
        limits: ScanLimits,
        mut wanted: impl FnMut(u64) -> bool,
    ) -> Scan {
        let (start, end) = queue.bounds();
        let mut scan = Scan { slots: Vec::new(), next: from, start, end, lost: None };
        if from < start || from >= end {
            return scan;
        }
        let last = end.min(from.saturating_add(limits.entries as u64));
        let mut bytes = 0usize;
        let mut stop = false;
        let mut damaged = None;
        while scan.next < last && !stop {
            let to = last.min(scan.next + LOCK_ENTRIES);
            let before = scan.next;
            let index = queue.index().read();
            index.walk(&self.space, queue.key(), scan.next, to, |offset, seen| {
                match seen {
                    Lookup::Entry(entry) if wanted(entry.tag_hash) => {
                        let full = scan.slots.len() >= limits.messages
                            || (!scan.slots.is_empty() && bytes + entry.length as usize > limits.bytes);
                        if full {
                            stop = true;
                            return false;
                        }
                        bytes += entry.length as usize;
                        let position = LogPosition(entry.position);
                        let (length, store_ms) = (entry.length, entry.store_ms);
                        scan.slots.push(Slot { offset, position, length, store_ms });
                        scan.next = offset + 1;
                    }
                    Lookup::Entry(_) => scan.next = offset + 1,
                    Lookup::Lost(until) => {
                        // Told on its own, once what lies before it was handed out.
                        if scan.slots.is_empty() {
                            scan.lost = Some((offset, until));
                        }
                        stop = true;
                        return false;
                    }
                    Lookup::Damaged | Lookup::Outside => {
                        damaged = Some(offset);
                        stop = true;
                        return false;
                    }
                }
                true
            });
            if scan.next == before && !stop {
                damaged = Some(scan.next);
                break;
            }
        }
        if let Some(offset) = damaged {
            // Readers wait here until the keeper has rebuilt the index from the log.
            self.index_damaged(queue, offset);
        }
        scan
    }

    /// Stops readers of the queue before the damage, and has the index rebuilt.
    pub(super) fn index_damaged(&self, queue: &Queue, offset: u64) {
        let gone = self.tables.queue(queue.key()).is_none_or(|known| !std::ptr::eq(&*known, queue));
        if gone || queue.index_damaged().swap(true, Ordering::AcqRel) {
            return;
        }
        let key = queue.key();
        self.damaged_indexes.lock().push(key);
        self.note_damage(Damage {
            file: super::recovery::index_dir(&self.options).display().to_string(),
            begin: 0,
            end: 0,
            text: format!(
                "the index of queue {} of topic {} is damaged at offset {offset}; it is rebuilt from the log",
                key.queue, key.topic.0
            ),
        });
    }

    /// See [`super::Store::fetch_now`].
    pub fn fetch_now(&self, key: QueueKey, slots: &[Slot]) -> Option<Vec<Fetched>> {
        let mut recent = Vec::with_capacity(slots.len());
        let places = slots.iter().map(|slot| (slot.position.0, slot.length as usize));
        self.recent.get_all(places, &mut recent);
        if recent.len() == slots.len() {
            let fetched = slots.iter().zip(recent).map(|(slot, bytes)| Fetched {
                offset: slot.offset,
                store_ms: slot.store_ms,
                payload: payload_of(&bytes),
            });
            return Some(fetched.collect());
        }
        self.fetch_with(key, slots, |segment, into, position| {
            if segment.read_now(into, position)? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
        })
        .ok()
    }

    /// See [`super::Store::fetch`].
    pub fn fetch(&self, key: QueueKey, slots: &[Slot]) -> Result<Vec<Fetched>, StoreError> {
        self.announce(slots);
        self.fetch_with(key, slots, Segment::read).map_err(|error| StoreError::Read(error.to_string()))
    }

    /// Tells the device of everything at once that is read bit by bit below, and of what a reader who catches up
    /// asks for next.
    fn announce(&self, slots: &[Slot]) {
        let (mut rest, mut bytes) = (slots, 0);
        while let Some(first) = rest.first() {
            let Some(segment) = self.segments.holding(first.position.0) else { return };
            let (run, behind) = rest.split_at(run_length(rest, &segment));
            rest = behind;
            let end = run.last().map_or(0, Slot::end);
            bytes += end - first.position.0;
            segment.will_need(first.position.0, end);
        }
        let (begin, end) =
            (slots.first().map_or(0, |slot| slot.position.0), slots.last().map_or(0, Slot::end));
        let span = end.saturating_sub(begin);
        if bytes >= AHEAD_WORTH_BYTES
            && span <= bytes.saturating_mul(AHEAD_SPREAD)
            && end < self.durable.load(Ordering::Acquire)
            && let Some(segment) = self.segments.holding(end)
        {
            segment.will_need(end, end.saturating_add(span.min(AHEAD_BYTES)));
        }
    }

    fn fetch_with(
        &self,
        key: QueueKey,
        slots: &[Slot],
        read: impl Fn(&Segment, &mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<Vec<Fetched>> {
        let mut fetched = Vec::with_capacity(slots.len());
        let mut rest = slots;
        while let Some(first) = rest.first() {
            if let Some(bytes) = self.recent.get(first.position.0, first.length as usize) {
                fetched.push(self.checked(key, first, &bytes));
                rest = rest.get(1..).unwrap_or_default();
                continue;
            }
            let Some(segment) = self.segments.holding(first.position.0) else {
                fetched.extend(self.look_again(key, first)?);
                rest = rest.get(1..).unwrap_or_default();
                continue;
            };
            let (run, behind) = rest.split_at(run_length(rest, &segment));
            rest = behind;
            let (begin, end) = (first.position.0, run.last().map_or(0, Slot::end));
            let mut bytes = BytesMut::zeroed(usize::try_from(end - begin).map_err(io::Error::other)?);
            match read(&segment, &mut bytes, begin) {
                Ok(()) => {
                    let bytes = bytes.freeze();
                    fetched.extend(run.iter().map(|slot| {
                        let at = usize::try_from(slot.position.0 - begin).unwrap_or(usize::MAX);
                        let record = bytes.slice(at..at.saturating_add(slot.length as usize));
                        self.checked(key, slot, &record)
                    }));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
                // The file was cut, or a sector cannot be read: each for itself, since what is at fault may lie
                // between them or behind. What the device will not read is not called lost: it may come back.
                Err(_) => {
                    for slot in run {
                        let mut bytes = BytesMut::zeroed(slot.length as usize);
                        match read(&segment, &mut bytes, slot.position.0) {
                            Ok(()) => fetched.push(self.checked(key, slot, &bytes.freeze())),
                            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                                fetched.push(self.lost(key, slot));
                            }
                            Err(error) => return Err(self.unreadable(slot, &error)),
                        }
                    }
                }
            }
        }
        Ok(fetched)
    }

    /// Retention has removed the segment since the index was read: either the message is no longer in its
    /// queue, and is left out, or it stands elsewhere now.
    fn look_again(&self, key: QueueKey, slot: &Slot) -> io::Result<Option<Fetched>> {
        let Some(queue) = self.tables.queue(key).filter(|queue| queue.start() <= slot.offset) else {
            return Ok(None);
        };
        let seen = queue.index().read().get(&self.space, key, slot.offset);
        let moved = match seen {
            Lookup::Entry(entry) if entry.position != slot.position.0 => {
                let position = LogPosition(entry.position);
                self.record_bytes(entry.position)?
                    .map(|bytes| (Slot { position, length: entry.length, ..*slot }, bytes))
            }
            _ => None,
        };
        Ok(Some(match moved {
            Some((slot, bytes)) => self.checked(key, &slot, &bytes),
            None => self.lost(key, slot),
        }))
    }

    /// What the record says, if it is whole and the one that the index means.
    fn checked(&self, key: QueueKey, slot: &Slot, bytes: &Bytes) -> Fetched {
        let mut fetched = Fetched { offset: slot.offset, store_ms: slot.store_ms, payload: None };
        match Record::decode(self.seed, slot.position.0, bytes) {
            Ok(record)
                if record.header.topic == key.topic.0
                    && record.header.queue == key.queue
                    && record.header.offset == slot.offset =>
            {
                fetched.payload = Some(bytes.slice_ref(record.payload));
            }
            _ => return self.lost(key, slot),
        }
        fetched
    }

    fn unreadable(&self, slot: &Slot, error: &io::Error) -> io::Error {
        if error.kind() == io::ErrorKind::WouldBlock {
            return io::ErrorKind::WouldBlock.into();
        }
        let file = self.segments.file_of(slot.position.0);
        let text =
            format!("{file}: the message at offset {}, position {}: {error}", slot.offset, slot.position.0);
        tracing::error!(event = "storage.read_failed", file, position = slot.position.0, offset = slot.offset, %error, "cannot read a message");
        io::Error::new(error.kind(), text)
    }

    /// A message that cannot be had any more.
    fn lost(&self, key: QueueKey, slot: &Slot) -> Fetched {
        self.note_damage(Damage {
            file: self.segments.file_of(slot.position.0),
            begin: slot.position.0,
            end: slot.end(),
            text: format!(
                "the message at offset {} of queue {} of topic {} is damaged; its readers are told",
                slot.offset, key.queue, key.topic.0
            ),
        });
        Fetched { offset: slot.offset, store_ms: slot.store_ms, payload: None }
    }

    /// See [`super::Store::lookup`].
    pub fn lookup(
        &self,
        hash: u64,
        candidates: usize,
        mut see: impl FnMut(Found) -> bool,
    ) -> Result<bool, StoreError> {
        let mut positions = Vec::new();
        let more = self.keys.lookup(hash, candidates, &mut positions).map_err(|_| StoreError::Rebuilding)?;
        for position in positions {
            let found = self.record_at(position).map_err(|error| StoreError::Read(error.to_string()))?;
            if let Some(found) = found
                && !see(found)
            {
                return Ok(true);
            }
        }
        Ok(more)
    }

    /// The message whose record stands at `position`, if it is still in its queue and visible.
    fn record_at(&self, position: u64) -> io::Result<Option<Found>> {
        let Some(bytes) = self.record_bytes(position)? else { return Ok(None) };
        let Ok(record) = Record::decode(self.seed, position, &bytes) else { return Ok(None) };
        let header = record.header;
        if header.kind != RecordKind::Message {
            return Ok(None);
        }
        let topic = TopicId(header.topic);
        let Some(queue) = self.tables.queue(QueueKey { topic, queue: header.queue }) else { return Ok(None) };
        let (start, end) = queue.bounds();
        if !(start..end).contains(&header.offset) {
            return Ok(None);
        }
        let current = queue.index().read().get(&self.space, queue.key(), header.offset);
        if !matches!(current, Lookup::Entry(entry) if entry.position == position) {
            return Ok(None);
        }
        let place = Place {
            queue: header.queue,
            offset: header.offset,
            store_ms: header.store_ms,
            position: LogPosition(position),
        };
        Ok(Some(Found { topic, place, payload: bytes.slice_ref(record.payload) }))
    }

    /// All bytes of the record at `position`; `None` where there is none, as in a file that was cut.
    pub(super) fn record_bytes(&self, position: u64) -> io::Result<Option<Bytes>> {
        match self.try_record_bytes(position) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            read => read,
        }
    }

    fn try_record_bytes(&self, position: u64) -> io::Result<Option<Bytes>> {
        let Some(segment) = self.segments.holding(position) else { return Ok(None) };
        if segment.end() - position < RECORD_HEADER as u64 {
            return Ok(None);
        }
        let mut header = [0; RECORD_HEADER];
        segment.read(&mut header, position)?;
        let Ok(header) = RecordHeader::decode(self.seed, position, &header) else { return Ok(None) };
        let total = header.total();
        if total as u64 > segment.end() - position {
            return Ok(None);
        }
        let mut bytes = BytesMut::zeroed(total);
        segment.read(&mut bytes, position)?;
        Ok(Some(bytes.freeze()))
    }

    /// See [`super::Store::offset_by_time`].
    pub fn offset_by_time(&self, queue: &Queue, ms: u64, bound: TimeBound) -> u64 {
        let (start, end) = queue.bounds();
        let (mut low, mut high) = (start, end);
        // The first offset whose store time is at or behind `ms` (for the last: behind `ms`).
        let is_before = |store_ms| match bound {
            TimeBound::FirstAtOrAfter => store_ms < ms,
            TimeBound::LastAtOrBefore => store_ms <= ms,
        };
        while low < high {
            let middle = low + (high - low) / 2;
            // A lost offset has no time; the next one that has stands for it.
            match self.store_ms_between(queue, middle, high) {
                Some((offset, store_ms)) if is_before(store_ms) => low = offset + 1,
                _ => high = middle,
            }
        }
        match bound {
            TimeBound::FirstAtOrAfter => low,
            TimeBound::LastAtOrBefore => low.saturating_sub(1).max(start),
        }
    }

    /// See [`super::Store::store_ms_at`].
    pub fn store_ms_at(&self, queue: &Queue, offset: u64) -> Option<u64> {
        let (start, end) = queue.bounds();
        self.store_ms_between(queue, offset.max(start), end).map(|(_, store_ms)| store_ms)
    }

    fn store_ms_between(&self, queue: &Queue, from: u64, to: u64) -> Option<(u64, u64)> {
        let mut found = None;
        queue.index().read().walk(&self.space, queue.key(), from, to, |offset, seen| match seen {
            Lookup::Entry(entry) => {
                found = Some((offset, entry.store_ms));
                false
            }
            Lookup::Lost(_) => true,
            Lookup::Damaged | Lookup::Outside => false,
        });
        found
    }

    /// See [`super::Store::count`].
    pub fn count(&self, queue: &Queue, from: u64) -> u64 {
        let (start, end) = queue.bounds();
        let from = from.max(start);
        let lost = queue.index().read().lost(from, end);
        end.saturating_sub(from).saturating_sub(lost)
    }
}

impl Slot {
    fn end(&self) -> u64 {
        self.position.0 + u64::from(self.length)
    }
}

/// How many of `slots` are read in one go.
fn run_length(slots: &[Slot], segment: &Segment) -> usize {
    let begin = slots.first().map_or(0, |slot| slot.position.0);
    let near = slots.windows(2).take_while(|pair| match pair {
        [a, b] => {
            b.position.0 >= a.end()
                && b.position.0 - a.end() <= GAP_BYTES
                && b.end() - begin <= RUN_BYTES
                && b.end() <= segment.end()
        }
        _ => false,
    });
    (near.count() + 1).min(slots.len())
}

/// The payload of a record that was written by this process and kept in memory.
fn payload_of(record: &Bytes) -> Option<Bytes> {
    let length = u32::from_le_bytes(*record.first_chunk::<4>()?) as usize;
    let lookups = usize::from(*record.get(10)?);
    let begin = RECORD_HEADER.checked_add(lookups.checked_mul(8)?)?;
    let end = begin.checked_add(length)?;
    (end <= record.len()).then(|| record.slice(begin..end))
}
