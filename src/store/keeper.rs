//! Upkeep beside the writer: runs of the key index, snapshots, free space, rebuilt indexes, retention.
//! Every step is bounded; the thread looks for work a few times a second.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{
    expiring::Expiring,
    frame::{Record, RecordHeader, RecordKind},
    index::Entry,
    queue::Queue,
    retention::Retention,
    scan::{Scan, ScanError, Sink},
    shard::Shard,
    snapshot,
};
use crate::model::{QueueKey, TopicId};

const SPACE_INTERVAL: Duration = Duration::from_secs(1);
/// Every so many passes of retention what will go soon is counted.
const EXPIRING_PASSES: u64 = 6;
/// A repair that failed is tried again after this time.
const MEND_RETRY: Duration = Duration::from_secs(5);

/// A mark or two of an idle log are not worth a snapshot.
const WORTH_A_SNAPSHOT: u64 = 1024;

/// When things were done last.
pub struct Keeper {
    space_at: Duration,
    snapshot_at: Duration,
    retention_at: Duration,
    /// The last pass has removed something; the next follows at once.
    retention_goes_on: bool,
    retention: Retention,
    expiring: Expiring,
    /// Passes of retention so far.
    passes: u64,
    /// Damaged indexes are not mended before.
    mend_at: Duration,
    /// Where the log stood when a snapshot failed; not tried again before it has grown.
    snapshot_failed: Option<u64>,
}

impl Keeper {
    pub fn new(shard: &Shard) -> Self {
        let now = shard.clock.monotonic();
        Self {
            space_at: now,
            snapshot_at: now,
            mend_at: now,
            retention_at: now,
            retention_goes_on: false,
            retention: Retention::new(shard),
            expiring: Expiring::default(),
            passes: 0,
            snapshot_failed: None,
        }
    }

    /// One look at everything.
    pub fn tick(&mut self, shard: &Arc<Shard>) {
        let now = shard.clock.monotonic();
        if now.saturating_sub(self.space_at) >= SPACE_INTERVAL {
            self.space_at = now;
            shard.look_at_space();
        }
        if shard.inner.lock().fenced.is_some() {
            return;
        }
        shard.make_room_for_index();
        self.flush_keys(shard);
        if now >= self.mend_at && !mend(shard) {
            self.mend_at = now + MEND_RETRY;
        }
        if self.snapshot_due(shard, now) {
            self.snapshot(shard, now);
        }
        let retention_due = now.saturating_sub(self.retention_at) >= shard.options.retention_interval;
        if retention_due || self.retention_goes_on {
            self.retention_at = now;
            self.retention_goes_on = false;
            if self.passes.is_multiple_of(EXPIRING_PASSES) {
                self.expiring.look(shard);
            }
            self.passes = self.passes.wrapping_add(1);
            if self.retention.pass(shard) && !shard.stopping() {
                self.snapshot(shard, now);
                // While there is something to remove senders may be filling the disk as fast.
                self.retention_goes_on = self.retention.remove_segments(shard) > 0;
            }
        }
    }

    /// Saves what spares the next start most of its reading.
    pub fn finish(&mut self, shard: &Arc<Shard>) {
        if shard.inner.lock().fenced.is_some() {
            return;
        }
        let durable = shard.durable.load(Ordering::Acquire).min(shard.dispatched.load(Ordering::Acquire));
        if let Err(error) = shard.keys.flush(durable) {
            tracing::warn!(%error, "cannot write the key index; the next start reads more of the log");
        }
        let position = shard.snapshot_position.load(Ordering::Acquire);
        if shard.dispatched.load(Ordering::Acquire).saturating_sub(position) > WORTH_A_SNAPSHOT {
            self.snapshot(shard, shard.clock.monotonic());
        }
    }

    fn flush_keys(&mut self, shard: &Arc<Shard>) {
        // Runs must not name positions that a crash can take back.
        let durable = shard.durable.load(Ordering::Acquire).min(shard.dispatched.load(Ordering::Acquire));
        if !shard.keys.due(durable) {
            return;
        }
        if let Err(error) = shard.keys.flush(durable).and_then(|()| shard.keys.merge(durable)) {
            tracing::warn!(%error, "cannot write the key index; trying again");
        }
    }

    fn snapshot_due(&self, shard: &Shard, now: Duration) -> bool {
        let behind =
            shard.dispatched.load(Ordering::Acquire) - shard.snapshot_position.load(Ordering::Acquire);
        let overdue = now.saturating_sub(self.snapshot_at) >= shard.options.snapshot_interval;
        let anything = behind > WORTH_A_SNAPSHOT;
        let failed = self.snapshot_failed == Some(shard.dispatched.load(Ordering::Acquire));
        (behind >= shard.options.snapshot_bytes || (overdue && anything)) && !failed
    }

    fn snapshot(&mut self, shard: &Arc<Shard>, now: Duration) {
        self.snapshot_at = now;
        match snapshot::save(shard, &mut shard.chain.lock()) {
            Ok(saved) => {
                self.snapshot_failed = None;
                shard.snapshot_position.store(saved.position, Ordering::Release);
            }
            Err(error) => {
                self.snapshot_failed = Some(shard.dispatched.load(Ordering::Acquire));
                tracing::warn!(%error, "cannot save a snapshot; the next start reads more of the log");
            }
        }
    }
}

/// Rebuilds from the log what was found damaged in indexes. Answers whether all of it could be.
pub fn mend(shard: &Arc<Shard>) -> bool {
    let queues = rebuild_indexes(shard)
        .inspect_err(|error| tracing::error!(%error, "cannot rebuild a damaged queue index; trying again"));
    let keys = mend_keys(shard)
        .inspect_err(|error| tracing::error!(%error, "cannot rebuild a damaged key index; trying again"));
    queues.is_ok() && keys.is_ok()
}

fn rebuild_indexes(shard: &Arc<Shard>) -> Result<(), ScanError> {
    let found = shard.damaged_indexes.lock().clone();
    let damaged: Vec<Arc<Queue>> = found.iter().filter_map(|&key| shard.tables.queue(key)).collect();
    if !damaged.is_empty() {
        let from = shard.segments.all().first().map_or(0, |segment| segment.base);
        let mut sink = Rebuild { shard, queues: &damaged };
        Scan::new(&shard.segments, shard.seed, (0, 0), &mut sink).run(from)?;
    }
    shard.damaged_indexes.lock().retain(|key| !found.contains(key));
    if damaged.is_empty() {
        return Ok(());
    }
    let mut ends = Vec::new();
    for queue in &damaged {
        queue.give_up_damaged(&shard.space);
        queue.index_damaged().store(false, Ordering::Release);
        ends.push((queue.key(), queue.bounds().1));
    }
    tracing::warn!(
        event = "storage.index_rebuilt",
        queues = damaged.len(),
        "rebuilt damaged queue indexes from the log"
    );
    shard.news.grew(&ends);
    Ok(())
}

fn mend_keys(shard: &Arc<Shard>) -> Result<(), String> {
    while let Some(part) = shard.keys.damaged_part() {
        shard.keys.mend(&part, |push| {
            let segment = shard.segments.holding(part.start).or_else(|| shard.segments.after(part.start));
            let Some(segment) = segment.filter(|segment| segment.base < part.end) else { return Ok(()) };
            let mut sink = LookUps { push };
            let scan = Scan::new(&shard.segments, shard.seed, (0, 0), &mut sink);
            scan.until(part.end).run(segment.base).map(|_| ()).map_err(|error| error.to_string())
        })?;
        tracing::warn!(
            event = "storage.index_rebuilt",
            begin = part.start,
            end = part.end,
            "rebuilt a damaged file of the key index from the log"
        );
    }
    Ok(())
}

/// Hands on the look-ups of messages.
struct LookUps<'a> {
    push: &'a mut dyn FnMut((u64, u64)),
}

impl Sink for LookUps<'_> {
    fn record(&mut self, record: &Record<'_>) {
        if record.header.kind == RecordKind::Message {
            record.hashes().for_each(|hash| (self.push)((hash, record.position)));
        }
    }
    fn lost_message(&mut self, _position: u64, _header: &RecordHeader) {}
    fn damage(&mut self, _file: String, _begin: u64, _end: u64, _text: &str) {}
    fn progress(&mut self, position: u64) {
        tracing::info!(position, "rebuilding a file of the key index from the log");
    }
}

/// Puts entries of damaged queues back where the log has their messages.
struct Rebuild<'a> {
    shard: &'a Arc<Shard>,
    queues: &'a [Arc<Queue>],
}

impl Sink for Rebuild<'_> {
    fn record(&mut self, record: &Record<'_>) {
        let header = &record.header;
        if header.kind != RecordKind::Message {
            return;
        }
        let key = QueueKey { topic: TopicId(header.topic), queue: header.queue };
        if let Some(queue) = self.queues.iter().find(|queue| queue.key() == key) {
            let entry = Entry {
                position: record.position,
                length: u32::try_from(header.total()).unwrap_or(u32::MAX),
                tag_hash: header.tag_hash,
                store_ms: header.store_ms,
            };
            queue.mend(&self.shard.space, header.offset, &entry);
        }
    }
    fn lost_message(&mut self, _position: u64, _header: &RecordHeader) {}
    fn damage(&mut self, _file: String, _begin: u64, _end: u64, _text: &str) {}
    fn progress(&mut self, position: u64) {
        tracing::info!(position, "rebuilding a queue index from the log");
    }
}
