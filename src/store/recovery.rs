//! Opening a shard: find its files, load the newest snapshot, replay the log behind it.

use std::{collections::HashMap, io, path::Path, sync::Arc};

use super::{
    Damage, OpenError, Options,
    change::Change,
    codec::align8,
    disk::Disk,
    frame::{FORMAT, FRAME_HEADER, FrameHeader, RELOCATED, Record, RecordHeader, RecordKind, Seed},
    index::{Entry, IndexSpace},
    keys::KeyIndex,
    log::Inner,
    queue::Queue,
    scan::{End, Scan, ScanError, Sink},
    segment::{BadHeader, FoundSegment, HEADER_BYTES, SegmentHeader, Segments},
    shard::{Opening, Recovered, fence_mark},
    snapshot::{self, Chain, Snapshot},
    tables::{Reserved, Tables},
};
use crate::model::{QueueKey, TopicId};

/// Directories of a shard.
pub fn log_dir(options: &Options) -> std::path::PathBuf {
    options.dir.join("log")
}
pub fn index_dir(options: &Options) -> std::path::PathBuf {
    options.dir.join("index")
}
pub fn keys_dir(options: &Options) -> std::path::PathBuf {
    options.dir.join("keys")
}
pub fn snapshot_dir(options: &Options) -> std::path::PathBuf {
    options.dir.join("snapshots")
}

/// What recovery found, and what the new writer has to say first.
pub struct Opened {
    pub recovered: Recovered,
    /// First changes of the new epoch, beside `Opened`.
    pub changes: Vec<Change>,
}

fn failed(what: &Path) -> impl Fn(io::Error) -> OpenError + '_ {
    move |error| OpenError(format!("{}: {error}", what.display()))
}

/// Brings the shard back to where its log says it was.
pub fn recover(options: &Options, disk: &Arc<dyn Disk>) -> Result<Opened, OpenError> {
    let dir = log_dir(options);
    let segments = Segments::new(Arc::clone(disk), dir.clone());
    segments.tidy().map_err(failed(&dir))?;
    let found = segments.find().map_err(failed(&dir))?;
    let mut damage = Vec::new();
    let shard_id = adopt_segments(Some(&options.shard), &segments, found, &mut damage)?;
    let seed = Seed::new(shard_id);
    let log_start = segments.all().first().map_or(0, |segment| segment.base);

    let path = index_dir(options);
    let space = IndexSpace::open(Arc::clone(disk), path.clone()).map_err(failed(&path))?;
    let (tables, snapshot, chain) = load_snapshot(options, disk, &space, shard_id, log_start);
    let path = keys_dir(options);
    let (keys, covered) =
        KeyIndex::open(Arc::clone(disk), path.clone(), shard_id, options.key_run_bytes, log_start)
            .map_err(failed(&path))?;
    let known = snapshot.as_ref().map_or(log_start, |snapshot| snapshot.position);
    let floor = snapshot.as_ref().map_or((0, 0), |snapshot| (snapshot.position, snapshot.epoch));

    // The key index must not have a hole; if it is behind, replay from there does no harm to the rest.
    let from = known.min(covered).max(log_start);
    let mut sink = Replay {
        tables: &tables,
        space: &space,
        keys: &keys,
        damage: &mut damage,
        error: None,
        known,
        end: segments.all().last().map_or(0, |segment| segment.end()),
    };
    let from = if covered < known { frame_boundary(&segments, seed, from) } else { from };
    let mut end = Scan::new(&segments, seed, floor, &mut sink).run(from).map_err(|error| match error {
        ScanError::Newer { .. } => OpenError(format!("{error} (this version knows format {FORMAT})")),
        ScanError::Io { .. } => OpenError(error.to_string()),
    })?;
    if let Some(error) = sink.error {
        return Err(OpenError(format!("cannot rebuild the queue index: {error}")));
    }
    tables.recovered(&space);
    if let Some(snapshot) = &snapshot {
        end.epoch = end.epoch.max(snapshot.epoch);
        end.store_ms = end.store_ms.max(snapshot.store_ms);
        end.clean |= end.position <= snapshot.position && tables.writer().closed;
        if end.position < snapshot.position {
            let (begin, stop) = (end.position, snapshot.position);
            let text = "the log ends before the state that was saved of it; what is missing is lost";
            damage.push(Damage { file: dir.display().to_string(), begin, end: stop, text: text.into() });
            end.position = align8(usize::try_from(stop).unwrap_or(usize::MAX)) as u64;
        }
    }
    if let Some(torn) = end.torn {
        tracing::warn!(
            event = "storage.recovered",
            end = end.position,
            torn,
            "the log has a torn end; it was never acknowledged and is cut off"
        );
    }
    if !end.clean {
        rewrite_tail(&segments, &end).map_err(failed(&dir))?;
    }
    let first = tables.writer().epoch == 0;
    let opening = Opening { bytes: end.position.saturating_sub(from), clean: end.clean || first };
    let changes = lost_by_power_cut(options, disk, &tables, &end)?;
    let segment = place_end(options, &segments, shard_id, &mut end).map_err(failed(&dir))?;
    keys.cut(end.position).map_err(failed(&path))?;
    let inner = Inner::new(end.position, segment, end.epoch.saturating_add(1), end.store_ms);
    let snapshot_position = snapshot.map_or(0, |snapshot| snapshot.position);
    let recovered = Recovered {
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
    };
    Ok(Opened { recovered, changes })
}

/// Opens the files that belong to this shard. The shard's id is what most of them say.
pub(super) fn adopt_segments(
    shard: Option<&str>,
    segments: &Segments,
    found: Vec<FoundSegment>,
    damage: &mut Vec<Damage>,
) -> Result<u64, OpenError> {
    for segment in &found {
        if let Err(BadHeader::Newer(format)) = segment.header {
            return Err(OpenError(format!(
                "{} has format {format}, this version knows {FORMAT}; use the version that wrote it",
                segment.path.display()
            )));
        }
    }
    let mut votes: HashMap<u64, usize> = HashMap::new();
    for (header, _) in found.iter().filter_map(|segment| segment.header.as_ref().ok()) {
        *votes.entry(header.shard_id).or_default() += 1;
    }
    let first =
        found.iter().find_map(|segment| segment.header.as_ref().ok()).map(|(header, _)| header.shard_id);
    let elected = votes.iter().max_by_key(|(id, votes)| (**votes, Some(**id) == first)).map(|(id, _)| *id);
    let Some(shard_id) = elected else {
        return match found.first() {
            None => Ok(new_id()),
            Some(segment) => Err(OpenError(format!(
                "{}: the header of the log's only segment is damaged, so it cannot be told which shard it \
                 belongs to; restore the first 4096 bytes of the file from a copy, or look at it with \
                 `holdfast store check`",
                segment.path.display()
            ))),
        };
    };
    let mut end = 0;
    for segment in found {
        let file = segment.path.display().to_string();
        let (base, capacity) = match &segment.header {
            Ok((header, whole)) if header.shard_id == shard_id && header.base == segment.base => {
                if !whole {
                    let text = "one copy of the header is damaged; the other is used".into();
                    damage.push(Damage { file: file.clone(), begin: segment.base, end: segment.base, text });
                }
                if let Some(shard) = shard.filter(|shard| *shard != header.shard) {
                    return Err(OpenError(format!(
                        "{file} belongs to shard `{}`, not `{shard}`; check the data directory and the shard's name",
                        header.shard
                    )));
                }
                (header.base, header.capacity)
            }
            Ok((header, _)) => {
                let text = format!(
                    "belongs to shard {:016x} at {}; left alone and not read",
                    header.shard_id, header.base
                );
                damage.push(Damage { file, begin: segment.base, end: segment.base, text });
                continue;
            }
            Err(_) => {
                let capacity = segment.bytes.saturating_sub(HEADER_BYTES);
                let text = "the header is damaged; name and length of the file stand in for it".into();
                damage.push(Damage { file, begin: segment.base, end: segment.base, text });
                if capacity == 0 {
                    continue;
                }
                (segment.base, capacity & !7)
            }
        };
        if base < end {
            let text =
                format!("overlaps the segment before it, which ends at {end}; left alone and not read");
            damage.push(Damage { file: segment.path.display().to_string(), begin: base, end: base, text });
            continue;
        }
        if base > end && end > 0 {
            let text = "the file is missing; messages in it are lost".into();
            let file = segments.path(end).display().to_string();
            damage.push(Damage { file, begin: end, end: base, text });
        }
        end = base.saturating_add(capacity);
        segments.adopt(base, capacity).map_err(failed(&segment.path))?;
    }
    Ok(shard_id)
}

/// An id for a new shard.
fn new_id() -> u64 {
    xxhash_rust::xxh3::xxh3_64(uuid::Uuid::now_v7().as_bytes())
}

/// The newest snapshot that fits log and index files, or nothing.
fn load_snapshot(
    options: &Options,
    disk: &Arc<dyn Disk>,
    space: &IndexSpace,
    shard_id: u64,
    log_start: u64,
) -> (Tables, Option<Snapshot>, Chain) {
    let dir = snapshot_dir(options);
    for (file, loaded) in snapshot::load_all(disk, &dir, shard_id) {
        match loaded {
            Ok(snapshot::Loaded { tables, snapshot, chain }) => {
                if snapshot.position >= log_start && space.adopt(tables.blocks().iter()) {
                    return (tables, Some(snapshot), chain);
                }
                tracing::warn!(file = %file.display(), "snapshot does not fit log and index; not used");
            }
            Err(text) => tracing::warn!(file = %file.display(), %text, "snapshot not used"),
        }
    }
    space.adopt(std::iter::empty());
    (Tables::default(), None, Chain::default())
}

/// The last place at or below `position` that is known to begin a frame: itself, or its segment's base.
fn frame_boundary(segments: &Segments, seed: Seed, position: u64) -> u64 {
    let Some(segment) = segments.holding(position) else { return position };
    let mut header = [0; FRAME_HEADER];
    let begins =
        segment.read(&mut header, position).is_ok() && FrameHeader::decode(seed, position, &header).is_ok();
    if begins { position } else { segment.base }
}

/// Bytes above the mark may be in the page cache only, or even marked clean there after a sync that
/// failed: write them again and sync before anybody reads them.
fn rewrite_tail(segments: &Segments, end: &End) -> io::Result<()> {
    let mut position = end.mark;
    let mut buffer = vec![0; 1 << 20];
    while position < end.position {
        let Some(segment) = segments.holding(position).or_else(|| segments.after(position)) else {
            return Ok(());
        };
        position = position.max(segment.base);
        let stop = end.position.min(segment.end());
        while position < stop {
            let length = buffer.len().min(usize::try_from(stop - position).unwrap_or(usize::MAX));
            let Some(piece) = buffer.get_mut(..length) else { return Ok(()) };
            match segment.read(piece, position) {
                Ok(()) => segment.write(piece, position)?,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
                Err(error) => return Err(error),
            }
            position += length as u64;
        }
        segment.sync()?;
    }
    Ok(())
}

/// Offsets that readers of async queues may have seen before a power cut took the messages.
fn lost_by_power_cut(
    options: &Options,
    disk: &Arc<dyn Disk>,
    tables: &Tables,
    end: &End,
) -> Result<Vec<Change>, OpenError> {
    let writer = tables.writer();
    let mark = fence_mark(&options.dir);
    let fenced = disk.open(&mark).is_ok();
    let lost = fenced || (!end.clean && writer.boot_id != options.boot_id);
    let mut changes = Vec::new();
    if lost {
        for (key, Reserved { until, .. }) in writer.reserved {
            let Some(queue) = tables.queue(key) else { continue };
            let next = queue.next();
            if until > next {
                tracing::warn!(
                    event = "storage.recovered",
                    topic = key.topic.0,
                    queue = key.queue,
                    begin = next,
                    end = until,
                    "offsets that readers may have seen were lost with the page cache"
                );
                let (start, lost) = (queue.start(), vec![(next, until)]);
                changes.push(Change::Bounds { queue: key, start, end: until, lost });
            }
        }
    }
    if fenced {
        disk.remove(&mark).map_err(failed(&mark))?;
    }
    Ok(changes)
}

/// The segment that the log's end lies in; made if it is not there.
fn place_end(options: &Options, segments: &Segments, shard_id: u64, end: &mut End) -> io::Result<(u64, u64)> {
    if let Some(segment) = segments.holding(end.position) {
        return Ok((segment.base, segment.end()));
    }
    let capacity =
        if segments.all().is_empty() { options.first_segment_bytes } else { options.segment_bytes };
    let header = SegmentHeader {
        shard_id,
        base: end.position,
        capacity,
        epoch: end.epoch.saturating_add(1),
        shard: options.shard.clone(),
    };
    let segment = segments.prepare(&header)?;
    Ok((segment.base, segment.end()))
}

/// Folds the log into tables and indexes.
struct Replay<'a> {
    tables: &'a Tables,
    space: &'a IndexSpace,
    keys: &'a KeyIndex,
    damage: &'a mut Vec<Damage>,
    error: Option<io::Error>,
    /// Damage below was reported when the snapshot was made.
    known: u64,
    end: u64,
}

impl Replay<'_> {
    fn message(&mut self, queue: &Queue, record: &Record<'_>) -> io::Result<()> {
        let header = &record.header;
        let entry = Entry {
            position: record.position,
            length: u32::try_from(header.total()).unwrap_or(u32::MAX),
            tag_hash: header.tag_hash,
            store_ms: header.store_ms,
        };
        if queue.replay(self.space, header.offset, &entry, header.flags & RELOCATED != 0)? {
            // Also what the snapshot should have known and did not.
            queue.touch(record.position.max(self.known));
        }
        self.keys.insert_all(record.position, record.hashes());
        Ok(())
    }
}

impl Sink for Replay<'_> {
    fn record(&mut self, record: &Record<'_>) {
        if self.error.is_some() {
            return;
        }
        if record.header.kind == RecordKind::Message {
            let key = QueueKey { topic: TopicId(record.header.topic), queue: record.header.queue };
            if let Some(queue) = self.tables.queue_at_recovery(key) {
                self.error = self.message(&queue, record).err();
            }
            return;
        }
        match Change::decode(record.header.kind, record.payload) {
            Some(change) => self.tables.apply(self.space, &change, record.position),
            None => self.damage.push(Damage {
                file: String::new(),
                begin: record.position,
                end: record.position + record.header.total() as u64,
                text: format!("a {:?} record cannot be understood and is passed over", record.header.kind),
            }),
        }
    }

    fn lost_message(&mut self, position: u64, header: &RecordHeader) {
        let key = QueueKey { topic: TopicId(header.topic), queue: header.queue };
        if header.kind == RecordKind::Message
            && let Some(queue) = self.tables.queue_at_recovery(key)
        {
            queue.touch(position.max(self.known));
            queue.lose_up_to(header.offset + 1);
        }
    }

    fn damage(&mut self, file: String, begin: u64, end: u64, text: &str) {
        if begin >= self.known {
            self.damage.push(Damage { file, begin, end, text: text.into() });
        }
    }

    fn progress(&mut self, position: u64) {
        tracing::info!(event = "storage.recovering", position, end = self.end, "reading the log");
    }
}
