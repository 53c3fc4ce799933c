//! Opening a shard: find its files, load the newest snapshot, replay the log behind it.

use std::{collections::HashSet, io, path::Path, sync::Arc};

use super::{
    Damage, OpenError, Options, adopt,
    change::Change,
    codec::align8,
    disk::Disk,
    frame::{
        FORMAT, FRAME_HEADER, FrameHeader, RECORD_HEADER, RELOCATED, Record, RecordHeader, RecordKind, Seed,
    },
    index::{self, IndexSpace},
    keys::KeyIndex,
    log::Inner,
    queue::Queue,
    scan::{End, Scan, ScanError, Sink},
    segment::{SegmentHeader, Segments},
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

/// Adds a place, unless it lies in one that is named already.
pub(super) fn note(damage: &mut Vec<Damage>, place: Damage) {
    let inside =
        |known: &Damage| known.begin < known.end && known.begin <= place.begin && place.end <= known.end;
    if !damage.iter().any(inside) {
        damage.push(place);
    }
}

pub(super) fn failed(what: &Path) -> impl Fn(io::Error) -> OpenError + '_ {
    move |error| OpenError(format!("{}: {error}", what.display()))
}

/// Brings the shard back to where its log says it was.
pub fn recover(options: &Options, disk: &Arc<dyn Disk>) -> Result<Opened, OpenError> {
    let dir = log_dir(options);
    let segments = Segments::new(Arc::clone(disk), dir.clone());
    segments.tidy().map_err(failed(&dir))?;
    let found = segments.find().map_err(failed(&dir))?;
    let mut damage = Vec::new();
    let shard_id = adopt::segments(options, disk, &segments, found, &mut damage, &mut Vec::new())?;
    let seed = Seed::new(shard_id);
    let log_start = segments.all().first().map_or(0, |segment| segment.base);

    let path = index_dir(options);
    let space = IndexSpace::open(Arc::clone(disk), path.clone()).map_err(failed(&path))?;
    let path = snapshot_dir(options);
    disk.create_dir_all(&path).map_err(failed(&path))?;
    let (tables, snapshot, chain) = load_snapshot(options, disk, &space, shard_id, log_start)?;
    let path = keys_dir(options);
    let (keys, covered) =
        KeyIndex::open(Arc::clone(disk), path.clone(), shard_id, options.key_run_bytes, log_start)
            .map_err(failed(&path))?;
    let known = snapshot.as_ref().map_or(log_start, |snapshot| snapshot.position);
    let floor = snapshot.as_ref().map_or((0, 0), |snapshot| (snapshot.position, snapshot.epoch));

    // The key index must not have a hole; if it is behind, replay from there does no harm to the rest.
    let from = known.min(covered).max(log_start);
    let mut sink = Replay {
        unknown: Vec::new(),
        segments: &segments,
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
    let mut unknown = sink.unknown;
    if let Some(place) = missing_front(&segments, tables.trimmed()) {
        note(&mut damage, place);
    }
    let lost = damage.iter().any(|place| place.begin < place.end);
    let adopted = if lost { tables.adopt_unknown(&space) } else { Vec::new() };
    for change in &adopted {
        let text = match change {
            Change::Topic { id, name, .. } => {
                format!("the record of topic {} is lost; its messages are in `{name}`", id.0)
            }
            Change::Group { id, name, .. } => {
                format!("the record of group {} is lost; its progress is in `{name}`", id.0)
            }
            _ => continue,
        };
        damage.push(Damage { file: dir.display().to_string(), begin: 0, end: 0, text });
    }
    tables.recovered(&space);
    if let Some(snapshot) = &snapshot {
        end.epoch = end.epoch.max(snapshot.epoch);
        end.store_ms = end.store_ms.max(snapshot.store_ms);
        end.clean |= end.position <= snapshot.position && tables.writer().closed;
    }
    // Neither says more than was durable in the log.
    let saved = known.max(covered);
    let there = segments.all().last().map_or(log_start, |segment| segment.end()).min(end.position);
    if there < saved {
        let text = "the log ends before the state that was saved of it; what is missing is lost";
        let file = segments.file_of(there);
        note(&mut damage, Damage { file, begin: there, end: saved, text: text.into() });
        unknown.extend((saved > known).then_some((there.max(known), saved)));
        end.position = align8(usize::try_from(saved).unwrap_or(usize::MAX)) as u64;
    }
    // What a file lacks behind the log's end was never used.
    damage.retain(|place| place.begin == place.end || place.begin < end.position);
    damage.iter_mut().for_each(|place| place.end = place.end.min(end.position).max(place.begin));
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
    let mut changes = lost_by_power_cut(options, disk, &tables, &end)?;
    changes.extend(adopted);
    skip_unknown(&tables, &unknown, &mut changes);
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

/// The log begins behind where retention had come.
pub(super) fn missing_front(segments: &Segments, trimmed: u64) -> Option<Damage> {
    let begin = segments.all().first().map(|segment| segment.base).filter(|&base| base > trimmed)?;
    let text = "files are missing that retention did not remove; messages in them are lost".into();
    let file = segments.path(trimmed).display().to_string();
    Some(Damage { file, begin: trimmed, end: begin, text })
}

/// Where records are lost of which not even the queue is known, a reader may have seen any offset that they can
/// have had. No queue gives these out again: those that nothing later is known of go on behind.
fn skip_unknown(tables: &Tables, unknown: &[(u64, u64)], changes: &mut Vec<Change>) {
    if unknown.is_empty() {
        return;
    }
    let moved: HashSet<QueueKey> = changes
        .iter()
        .filter_map(|change| match change {
            Change::Bounds { queue, .. } => Some(*queue),
            _ => None,
        })
        .collect();
    for topic in tables.topics() {
        for queue in topic.queues.iter().filter(|queue| !moved.contains(&queue.key())) {
            let since = queue.changed().max(topic.id.0);
            let behind = unknown.iter().filter(|(begin, _)| *begin >= since);
            let records: u64 = behind.map(|(begin, end)| (end - begin) / RECORD_HEADER as u64).sum();
            if records > 0 {
                let (begin, end) = (queue.next(), queue.next() + records);
                let (queue, start) = (queue.key(), queue.start());
                changes.push(Change::Bounds { queue, start, end, lost: vec![(begin, end)] });
            }
        }
    }
    tracing::warn!(
        event = "storage.recovered",
        places = unknown.len(),
        "records are lost whose queues are not known; queues go on behind the offsets that these may have had"
    );
}

/// The newest snapshot that fits log and index files, or nothing.
fn load_snapshot(
    options: &Options,
    disk: &Arc<dyn Disk>,
    space: &IndexSpace,
    shard_id: u64,
    log_start: u64,
) -> Result<(Tables, Option<Snapshot>, Chain), OpenError> {
    let dir = snapshot_dir(options);
    let mut useless = Vec::new();
    let mut used = None;
    for (file, loaded) in snapshot::load_all(disk, &dir, shard_id) {
        match loaded {
            Ok(loaded)
                if loaded.snapshot.position >= log_start && space.adopt(loaded.tables.blocks().iter()) =>
            {
                used = Some(loaded);
                break;
            }
            Ok(_) => {
                tracing::warn!(file = %file.display(), "snapshot does not fit log and index; not used");
            }
            Err(text) => tracing::warn!(file = %file.display(), %text, "snapshot not used"),
        }
        useless.push(file);
    }
    // They name blocks of the index that are given to others from now on.
    snapshot::remove(disk, &dir, &useless).map_err(failed(&dir))?;
    if let Some(snapshot::Loaded { tables, snapshot, chain }) = used {
        return Ok((tables, Some(snapshot), chain));
    }
    space.adopt(std::iter::empty());
    Ok((Tables::default(), None, Chain::default()))
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
    let mark = fence_mark(&options.dir);
    let fenced = disk.open(&mark).is_ok();
    let lost = fenced || (!end.clean && tables.writer().boot_id != options.boot_id);
    let mut changes = Vec::new();
    if lost {
        for (key, Reserved { until, .. }) in tables.reserved_since(0) {
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
        segment.restore_length()?;
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
    /// Where records of any queue may be lost.
    unknown: Vec<(u64, u64)>,
    segments: &'a Segments,
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
        let entry = index::Entry {
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
            None => note(
                self.damage,
                Damage {
                    file: self.segments.file_of(record.position),
                    begin: record.position,
                    end: record.position + record.header.total() as u64,
                    text: format!(
                        "a {:?} record cannot be understood and is passed over",
                        record.header.kind
                    ),
                },
            ),
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

    fn unknown(&mut self, begin: u64, end: u64) {
        // What is below was known to the snapshot.
        if end > self.known {
            self.unknown.push((begin.max(self.known), end));
        }
    }

    fn damage(&mut self, file: String, begin: u64, end: u64, text: &str) {
        if begin >= self.known {
            note(self.damage, Damage { file, begin, end, text: text.into() });
        }
    }

    fn progress(&mut self, position: u64) {
        tracing::info!(event = "storage.recovering", position, end = self.end, "reading the log");
    }
}
