//! Gives space back: moves the start of queues by age and size, then removes the oldest segments.
//!
//! Nothing that is live goes with a segment. Messages that stay and the newest record of every topic,
//! group, progress and queue are copied to the end of the log first, synced, and found there by the index
//! before the file is removed.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{
    Damage, FRAME_CHANGES, Purpose, Queue, TimeBound, Topic,
    change::Change,
    frame::Record,
    index::Lookup,
    segment::{HEADER_BYTES, Segment},
    shard::Shard,
    tables::Writer,
};
use crate::model::{GroupId, LogPosition, QueueKey, TopicId};

/// Wall clock and monotonic clock may drift apart this far before retention by age waits.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(600);
/// Changes and copies are appended in frames of about this size.
const FRAME_BYTES: usize = 1 << 20;
/// Segments removed in one pass; more wait for the next, so that deletion is paced.
const SEGMENTS_A_PASS: usize = 4;

/// What retention remembers between passes.
pub struct Retention {
    wall_ms: u64,
    monotonic: Duration,
    clock_warned: bool,
    /// No message of a topic was stored before this, milliseconds; spares looking at queues that cannot have
    /// anything to lose yet.
    oldest: HashMap<TopicId, u64>,
}

impl Retention {
    pub fn new(shard: &Shard) -> Self {
        Self {
            wall_ms: shard.clock.now_ms(),
            monotonic: shard.clock.monotonic(),
            clock_warned: false,
            oldest: HashMap::new(),
        }
    }

    /// Moves starts up. Answers whether a segment may be removable.
    pub fn pass(&mut self, shard: &Arc<Shard>) -> bool {
        let age_may_act = self.clocks_agree(shard);
        let mut moved = Vec::new();
        let topics = shard.tables.topics();
        for topic in &topics {
            if age_may_act {
                self.by_age(shard, topic, &mut moved);
            }
            by_size(shard, topic, &mut moved);
        }
        if self.oldest.len() > topics.len() {
            self.oldest.retain(|&id, _| shard.tables.topic_by_id(id).is_some());
        }
        by_disk_limit(shard, &mut moved);
        move_starts(shard, moved);
        oldest_sealed(shard).is_some_and(|segment| live_bytes(shard, &segment) <= segment.capacity / 2)
    }

    /// Whether time went by as it should since the last pass. A clock that was set years ahead must not
    /// take everything; when it is set back, or has proved right for long, age acts again.
    fn clocks_agree(&mut self, shard: &Shard) -> bool {
        let wall = shard.clock.now_ms();
        let expected = u64::try_from((shard.clock.monotonic().saturating_sub(self.monotonic)).as_millis())
            .unwrap_or(u64::MAX)
            .saturating_add(self.wall_ms);
        let apart = Duration::from_millis(wall.abs_diff(expected));
        let agree = apart <= CLOCK_TOLERANCE;
        if agree {
            self.clock_warned = false;
            // Small corrections are followed.
            self.wall_ms = wall;
            self.monotonic = shard.clock.monotonic();
        } else if !self.clock_warned {
            self.clock_warned = true;
            tracing::warn!(event = "storage.clock_jumped", apart = ?apart, "the wall clock jumped; retention by age waits until it agrees again or the broker is restarted");
        }
        agree
    }

    fn by_age(&mut self, shard: &Shard, topic: &Topic, moved: &mut Moved) {
        let Some(age) = topic.settings.retention.age else { return };
        let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let Some(cutoff) = shard.clock.now_ms().checked_sub(age) else { return };
        if self.oldest.get(&topic.id).is_some_and(|&oldest| oldest >= cutoff) {
            return;
        }
        // What is stored from now on is not older than this.
        let mut oldest = shard.inner.lock().last_ms;
        for queue in &topic.queues {
            let (start, end) = queue.bounds();
            let Some(first) = shard.store_ms_at(queue, start).filter(|_| start < end) else { continue };
            if first >= cutoff {
                oldest = oldest.min(first);
                continue;
            }
            let keep_from = shard.offset_by_time(queue, cutoff, TimeBound::FirstAtOrAfter);
            oldest = oldest.min(cutoff);
            if keep_from > start {
                moved.push((Arc::clone(queue), keep_from));
            }
        }
        self.oldest.insert(topic.id, oldest);
    }

    /// Removes oldest segments in which nothing is live any more, after copying what is. Answers how many.
    pub fn remove_segments(&mut self, shard: &Arc<Shard>) -> usize {
        for removed in 0..SEGMENTS_A_PASS {
            let Some(segment) = oldest_sealed(shard) else { return removed };
            if shard.snapshot_position.load(Ordering::Acquire) < segment.end()
                || live_bytes(shard, &segment) > segment.capacity / 2
            {
                return removed;
            }
            if let Err(error) = copy_forward(shard, &segment).and_then(|()| remove(shard, &segment)) {
                tracing::warn!(%error, file = %segment.path.display(), "cannot remove a segment; trying again");
                return removed;
            }
        }
        SEGMENTS_A_PASS
    }
}

/// The oldest segment, if the log has left it for good.
fn oldest_sealed(shard: &Shard) -> Option<Arc<Segment>> {
    let segment = shard.segments.all().first().cloned()?;
    let through = shard.durable.load(Ordering::Acquire).min(shard.dispatched.load(Ordering::Acquire));
    (segment.end() <= through).then_some(segment)
}

type Moved = Vec<(Arc<Queue>, u64)>;

/// Drops the topic's oldest messages, whatever their queue, until it is within its size.
fn by_size(shard: &Shard, topic: &Topic, moved: &mut Moved) {
    let Some(limit) = topic.settings.retention.bytes else { return };
    let Some(before_ms) = boundary_by_size(shard, topic, limit) else { return };
    for queue in &topic.queues {
        let keep_from = shard.offset_by_time(queue, before_ms, TimeBound::FirstAtOrAfter);
        if keep_from > queue.start() {
            moved.push((Arc::clone(queue), keep_from));
        }
    }
}

/// The earliest time such that the topic is within `limit` without what was stored before it; `None` when it is
/// within it as it is.
pub(super) fn boundary_by_size(shard: &Shard, topic: &Topic, limit: u64) -> Option<u64> {
    let total = topic.bytes();
    if total <= limit {
        return None;
    }
    let excess = total - limit;
    let newest = shard.inner.lock().last_ms;
    let oldest = topic.queues.iter().filter_map(|queue| shard.store_ms_at(queue, queue.start())).min()?;
    let (mut low, mut high) = (oldest, newest.saturating_add(1));
    while low < high {
        let middle = low + (high - low) / 2;
        let freed: u64 = topic.queues.iter().map(|queue| bytes_before(shard, queue, middle, excess)).sum();
        if freed >= excess {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(low)
}

/// Bytes of messages stored before `ms`; not counted on once `enough`.
fn bytes_before(shard: &Shard, queue: &Queue, ms: u64, enough: u64) -> u64 {
    let (start, end) = queue.bounds();
    let mut bytes = 0;
    queue.index().read().walk(&shard.space, queue.key(), start, end, |_, seen| match seen {
        Lookup::Entry(entry) if entry.store_ms < ms => {
            bytes += u64::from(entry.length);
            bytes < enough
        }
        Lookup::Lost(_) => true,
        _ => false,
    });
    bytes
}

/// Above the shard's limit the oldest segment's messages go, read or not.
fn by_disk_limit(shard: &Shard, moved: &mut Moved) {
    let limit = shard.options.disk_limit_bytes;
    let (_, bytes) = shard.segments.size();
    if limit == 0 || bytes <= limit {
        return;
    }
    let Some(segment) = oldest_sealed(shard) else { return };
    let boundary = boundary_ms(shard, &segment);
    for queue in shard.tables.topics().iter().flat_map(|topic| topic.queues.clone()) {
        let mut keep_from = queue.start();
        let (start, end) = queue.bounds();
        queue.index().read().walk(&shard.space, queue.key(), start, end, |offset, seen| match seen {
            Lookup::Entry(entry) if entry.store_ms > boundary => false,
            Lookup::Entry(entry) => {
                if entry.position < segment.end() {
                    keep_from = offset + 1;
                }
                true
            }
            Lookup::Lost(_) => true,
            _ => false,
        });
        if keep_from > start {
            moved.push((queue, keep_from));
        }
    }
}

/// Store times in the segment are not above this.
fn boundary_ms(shard: &Shard, segment: &Segment) -> u64 {
    let next = shard.segments.holding(segment.end()).and_then(|next| {
        let mut header = [0; super::frame::FRAME_HEADER];
        next.read(&mut header, next.base).ok()?;
        super::frame::FrameHeader::decode(shard.seed, next.base, &header).ok()
    });
    next.map_or(u64::MAX, |frame| frame.store_ms)
}

fn move_starts(shard: &Arc<Shard>, moved: Moved) {
    for part in moved.chunks(FRAME_CHANGES) {
        let unread: u64 = part.iter().map(|(queue, start)| unread_below(shard, queue, *start)).sum();
        if unread > 0 {
            shard.metrics.unread_removed(unread);
            tracing::warn!(
                event = "storage.deleted",
                unread,
                "retention removes messages that a group has not read"
            );
        }
        let changed = shard.transact::<(), ()>(Purpose::State, |tx| {
            for (queue, start) in part {
                // Of a topic that was deleted meanwhile nothing more is said.
                if shard.tables.topic_by_id(queue.key().topic).is_none() {
                    continue;
                }
                let end = queue.next().max(*start);
                tx.change(Change::Bounds { queue: queue.key(), start: *start, end, lost: Vec::new() });
            }
            Ok(())
        });
        if changed.is_err() {
            return;
        }
    }
}

/// Messages below `start` that a group with progress on the queue has not read.
fn unread_below(shard: &Shard, queue: &Queue, start: u64) -> u64 {
    let read =
        shard.tables.groups().iter().filter_map(|group| group.committed(queue.key())).map(|c| c.offset).min();
    read.map_or(0, |read| start.saturating_sub(read.max(queue.start())))
}

/// Bytes of messages in the segment that are still wanted; not counted further once it is too many.
fn live_bytes(shard: &Shard, segment: &Segment) -> u64 {
    let boundary = boundary_ms(shard, segment);
    let mut bytes = 0;
    for topic in shard.tables.topics() {
        for queue in topic.all_queues() {
            let known = each_live(shard, queue, segment, boundary, |_, length| {
                bytes += u64::from(length);
                bytes <= segment.capacity / 2
            });
            if !known {
                return u64::MAX;
            }
            if bytes > segment.capacity / 2 {
                return bytes;
            }
        }
    }
    bytes
}

/// Offset, place and record length of the queue's messages that stand in the segment. `false` when the index is
/// damaged, so that it is not known which do; it will be rebuilt.
fn each_live(
    shard: &Shard,
    queue: &Queue,
    segment: &Segment,
    boundary_ms: u64,
    mut see: impl FnMut((u64, u64), u32) -> bool,
) -> bool {
    let mut damaged = None;
    let (start, end) = (queue.start(), queue.index().read().end().unwrap_or(0));
    queue.index().read().walk(&shard.space, queue.key(), start, end, |offset, seen| match seen {
        Lookup::Entry(entry) if entry.store_ms > boundary_ms => false,
        Lookup::Entry(entry) => {
            let here = (segment.base..segment.end()).contains(&entry.position);
            !here || see((offset, entry.position), entry.length)
        }
        Lookup::Lost(_) => true,
        Lookup::Damaged => {
            damaged = Some(offset);
            false
        }
        Lookup::Outside => false,
    });
    if let Some(offset) = damaged {
        shard.index_damaged(queue, offset);
    }
    damaged.is_none()
}

/// Appends everything live of the segment again and waits until it is durable.
fn copy_forward(shard: &Arc<Shard>, segment: &Segment) -> Result<(), String> {
    let boundary = boundary_ms(shard, segment);
    let mut last = None;
    for queue in
        shard.tables.topics().iter().flat_map(|topic| topic.all_queues().cloned().collect::<Vec<_>>())
    {
        let mut live = Vec::new();
        let known = each_live(shard, &queue, segment, boundary, |place, _| {
            live.push(place);
            true
        });
        if !known {
            return Err("the index of a queue is damaged and has to be rebuilt first".into());
        }
        let mut rest = live.as_slice();
        while !rest.is_empty() {
            let (copied, pending) = copy_messages(shard, segment, &queue, rest)?;
            rest = rest.get(copied..).unwrap_or_default();
            last = Some(pending);
        }
    }
    last = Some(copy_state(shard, segment)?).or(last);
    match last {
        Some(pending) => pending.wait().map(|_| ()).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}

/// Copies messages of one queue in one frame, as many as fit.
fn copy_messages(
    shard: &Arc<Shard>,
    segment: &Segment,
    queue: &Arc<Queue>,
    live: &[(u64, u64)],
) -> Result<(usize, super::Pending), String> {
    let mut records = Vec::new();
    let mut bytes = 0;
    for &(offset, position) in live {
        let record = shard.record_bytes(position).map_err(|error| error.to_string())?;
        bytes += record.as_ref().map_or(0, |record| record.len());
        records.push((offset, position, record));
        if bytes >= FRAME_BYTES || records.len() >= FRAME_CHANGES {
            break;
        }
    }
    let mut damaged = Vec::new();
    let appended = shard.transact::<(), ()>(Purpose::State, |tx| {
        if shard.tables.topic_by_id(queue.key().topic).is_none() {
            return Ok(());
        }
        for (offset, position, bytes) in &records {
            let decoded = bytes.as_ref().and_then(|bytes| {
                let record = Record::decode(shard.seed, *position, bytes).ok()?;
                let meant = record.header.topic == queue.key().topic.0
                    && record.header.queue == queue.key().queue
                    && record.header.offset == *offset;
                meant.then(|| (record, bytes.slice_ref(record.payload)))
            });
            let Some((record, payload)) = decoded else {
                damaged.push((*offset, *position));
                continue;
            };
            if *offset >= queue.start() {
                let lookups: Vec<u64> = record.hashes().collect();
                tx.relocate(queue, &record.header, &lookups, &payload);
            }
        }
        Ok(())
    });
    let (_, pending) = appended.map_err(|error| format!("{error:?}"))?;
    // What cannot be copied is lost with the segment; readers are told.
    for (offset, position) in damaged {
        shard.note_damage(Damage {
            file: segment.path.display().to_string(),
            begin: position,
            end: position + 1,
            text: format!(
                "the message at offset {offset} of queue {} of topic {} is damaged and goes with its segment",
                queue.key().queue,
                queue.key().topic.0
            ),
        });
        queue.lose(&shard.space, offset, position);
    }
    shard.metrics.relocated(bytes as u64);
    Ok((records.len(), pending))
}

/// Something whose newest record may stand in the segment that is to go.
enum Live {
    Topic(TopicId),
    Bounds(QueueKey),
    Group(GroupId),
    Progress(GroupId, QueueKey),
    Reserved(QueueKey),
}

/// Appends the newest record of everything whose newest record stands in the segment again. What that may
/// be is collected beside the writer; what it is, is decided under the log's lock, a bounded part at a
/// time, so that no older value can follow a newer one.
fn copy_state(shard: &Arc<Shard>, segment: &Segment) -> Result<super::Pending, String> {
    let opened = shard.transact::<(), ()>(Purpose::State, |tx| {
        let Writer { epoch, boot_id, .. } = shard.tables.writer();
        tx.change(Change::Opened { epoch, boot_id, version: env!("CARGO_PKG_VERSION").to_owned() });
        tx.change(Change::Trimmed { position: segment.end() });
        Ok(())
    });
    let ((), mut last) = opened.map_err(|error| format!("{error:?}"))?;
    for part in live_state(shard, segment).chunks(FRAME_CHANGES) {
        let appended = shard.transact::<(), ()>(Purpose::State, |tx| {
            part.iter().filter_map(|live| newest(shard, segment, live)).for_each(|change| tx.change(change));
            Ok(())
        });
        last = appended.map_err(|error| format!("{error:?}"))?.1;
    }
    Ok(last)
}

/// Everything whose newest record stands in the segment, or did a moment ago.
fn live_state(shard: &Shard, segment: &Segment) -> Vec<Live> {
    let here = |position: u64| (segment.base..segment.end()).contains(&position);
    let mut live = Vec::new();
    for topic in shard.tables.topics() {
        if here(topic.position.0) {
            live.push(Live::Topic(topic.id));
        }
        let bounds = topic.all_queues().filter(|queue| needs_bounds(queue, segment));
        live.extend(bounds.map(|queue| Live::Bounds(queue.key())));
    }
    for group in shard.tables.groups() {
        if here(group.position.0) {
            live.push(Live::Group(group.id));
        }
        let old = group.progress().into_iter().filter(|(_, committed)| here(committed.position.0));
        live.extend(old.map(|(queue, _)| Live::Progress(group.id, queue)));
    }
    let reserved = shard.tables.reserved_since(segment.base);
    live.extend(
        reserved.into_iter().filter(|(_, at)| here(at.position)).map(|(queue, _)| Live::Reserved(queue)),
    );
    live
}

/// Without a record of its bounds a queue lives on its messages, the newest of which may go.
fn needs_bounds(queue: &Queue, segment: &Segment) -> bool {
    queue.next() > 0 && queue.bounds_position() < segment.end()
}

/// The record that says of it what is now so; `None` when a newer one stands behind the segment already.
fn newest(shard: &Shard, segment: &Segment, live: &Live) -> Option<Change> {
    let here = |position: LogPosition| (segment.base..segment.end()).contains(&position.0);
    match *live {
        Live::Topic(id) => {
            let topic = shard.tables.topic_by_id(id).filter(|topic| here(topic.position))?;
            let (name, settings, map) = (topic.name.clone(), topic.settings.clone(), topic.map);
            Some(Change::Topic { id, name, settings, map })
        }
        Live::Bounds(key) => {
            let queue = shard.tables.queue(key).filter(|queue| needs_bounds(queue, segment))?;
            let lost = queue.index().read().holes(queue.start());
            Some(Change::Bounds { queue: key, start: queue.start(), end: queue.next(), lost })
        }
        Live::Group(id) => {
            let group = shard.tables.group_by_id(id).filter(|group| here(group.position))?;
            let (name, settings) = (group.name.clone(), group.settings.clone());
            Some(Change::Group { id, name, settings })
        }
        Live::Progress(id, queue) => {
            let group = shard.tables.group_by_id(id)?;
            let committed = group.committed(queue).filter(|committed| here(committed.position))?;
            Some(Change::Progress { group: id, offsets: vec![(queue, committed.offset)] })
        }
        Live::Reserved(queue) => {
            let reserved = shard.tables.reserved(queue).filter(|at| here(LogPosition(at.position)))?;
            Some(Change::Reserved { queue, until: reserved.until })
        }
    }
}

fn remove(shard: &Arc<Shard>, segment: &Segment) -> Result<(), String> {
    if live_bytes(shard, segment) > 0 {
        return Err("something in it is still live".into());
    }
    shard.segments.remove(segment).map_err(|error| error.to_string())?;
    shard.keys.remove_below(segment.end());
    shard.metrics.deleted(HEADER_BYTES + segment.capacity);
    tracing::info!(event = "storage.deleted", file = %segment.path.display(), bytes = segment.capacity, "removed a log segment");
    Ok(())
}
