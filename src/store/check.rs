//! Reads a whole data directory and tells what is damaged. Changes nothing.

use std::{collections::BTreeMap, io, path::Path, sync::Arc};

use super::{
    Damage, OpenError, Options,
    adopt::{self, Found},
    change::Change,
    disk::{Disk, RealDisk},
    frame::{Record, RecordHeader, RecordKind, Seed},
    index::{IndexSpace, Lookup},
    keys,
    recovery::{index_dir, keys_dir, log_dir, missing_front, note, snapshot_dir},
    repair::index_files,
    scan::{Scan, Sink},
    segment::Segments,
    snapshot,
    tables::Tables,
};

/// What [`check`] found.
#[derive(Clone, Debug)]
pub struct Report {
    /// Segments of the log, and their bytes.
    pub segments: u64,
    /// Bytes of the segments.
    pub log_bytes: u64,
    /// First position kept.
    pub log_start: u64,
    /// End of the log.
    pub log_end: u64,
    /// Epoch of the newest writer.
    pub epoch: u32,
    /// The newest writer ended cleanly.
    pub clean: bool,
    /// Set when something follows that was never acknowledged; the next start cuts it off.
    pub torn_until: Option<u64>,
    /// Intact records by kind.
    pub records: BTreeMap<&'static str, u64>,
    /// Snapshots by file: `None` when usable, else why not.
    pub snapshots: Vec<(String, Option<String>)>,
    /// Files of the key index: `None` when usable, else why not.
    pub keys: Vec<(String, Option<String>)>,
    /// Files of the queue index: `None` when usable, else why not.
    pub index: Vec<(String, Option<String>)>,
    /// Damaged places.
    pub damage: Vec<Damage>,
}

/// A report, with what a repair needs beside it.
pub(super) struct Examined {
    pub report: Report,
    pub segments: Segments,
    pub problems: Vec<Found>,
    /// Keeps brokers out.
    pub lock: Box<dyn Send + Sync>,
}

/// Reads the log of the shard in `dir` from its start, its snapshots and its key index. `progress` hears how many bytes
/// of how many are read.
///
/// # Errors
/// When the directory cannot be read, holds no log, is in use by a running broker, or is of a newer
/// version.
pub fn check(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Report, OpenError> {
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    examine(&disk, dir, progress).map(|examined| examined.report)
}

/// As [`check`], on any disk.
pub(super) fn examine(
    disk: &Arc<dyn Disk>,
    dir: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Examined, OpenError> {
    let options = Options::new(dir, "");
    let log = log_dir(&options);
    let failed = |error: io::Error| OpenError(format!("{}: {error}", log.display()));
    let segments = Segments::new(Arc::clone(disk), log.clone());
    let found = segments.find().map_err(failed)?;
    if found.is_empty() {
        return Err(OpenError(format!("{} holds no log; give the directory of a shard", log.display())));
    }
    let lock = disk.lock(&dir.join("lock")).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => OpenError(format!("{} is in use; stop the broker first", dir.display())),
        _ => failed(error),
    })?;
    let mut damage = Vec::new();
    let mut problems = Vec::new();
    let shard_id = adopt::segments(&options, disk, &segments, found, &mut damage, &mut problems)?;
    let (count, log_bytes) = segments.size();
    let log_start = segments.all().first().map_or(0, |segment| segment.base);
    let stop = segments.all().last().map_or(0, |segment| segment.end());
    let records = BTreeMap::new();
    let mut sink = Checker { trimmed: 0, records, damage, progress, from: log_start, to: stop };
    let end = Scan::new(&segments, Seed::new(shard_id), (0, 0), &mut sink)
        .run(log_start)
        .map_err(|error| OpenError(error.to_string()))?;
    let Checker { records, mut damage, trimmed, .. } = sink;
    if let Some(place) = missing_front(&segments, trimmed) {
        note(&mut damage, place);
    }
    // What a file lacks behind the log's end was never used.
    damage.retain(|place| place.begin == place.end || place.begin < end.position);
    damage.iter_mut().for_each(|place| place.end = place.end.min(end.position).max(place.begin));
    progress(stop - log_start, stop - log_start);
    let mut newest = None;
    let snapshots = snapshot::load_all(disk, &snapshot_dir(&options), shard_id)
        .map(|(file, loaded)| {
            let file = file.display().to_string();
            match loaded {
                Ok(loaded) => {
                    newest.get_or_insert(loaded.tables);
                    (file, None)
                }
                Err(problem) => (file, Some(problem)),
            }
        })
        .collect();
    let index = check_index(disk, &options, newest.as_ref());
    let keys = keys::check(disk, &keys_dir(&options), shard_id)
        .into_iter()
        .map(|(file, problem)| (file.display().to_string(), problem))
        .collect();
    let report = Report {
        segments: count,
        log_bytes,
        log_start,
        log_end: end.position,
        epoch: end.epoch,
        clean: end.clean,
        torn_until: end.torn,
        records,
        snapshots,
        keys,
        index,
        damage,
    };
    Ok(Examined { report, segments, problems, lock })
}

/// Looks whether the entries that the newest snapshot names are there. Without one the index is made anew anyway.
fn check_index(
    disk: &Arc<dyn Disk>,
    options: &Options,
    tables: Option<&Tables>,
) -> Vec<(String, Option<String>)> {
    let files = index_files(disk, options);
    let all = |problem: Option<String>| {
        files.iter().map(|file| (file.display().to_string(), problem.clone())).collect()
    };
    let Some(tables) = tables.filter(|_| !files.is_empty()) else { return all(None) };
    let space = match IndexSpace::open(Arc::clone(disk), index_dir(options)) {
        Ok(space) => space,
        Err(error) => return all(Some(error.to_string())),
    };
    if !space.adopt(tables.blocks().iter()) {
        return all(Some("the snapshot does not fit it".into()));
    }
    let mut damaged = 0_u64;
    for queue in tables.topics().iter().flat_map(|topic| topic.all_queues().cloned().collect::<Vec<_>>()) {
        queue.index().read().walk(&space, queue.key(), queue.start(), u64::MAX, |_, seen| {
            damaged += u64::from(seen == Lookup::Damaged);
            true
        });
    }
    all((damaged > 0).then(|| format!("{damaged} entries are damaged")))
}

struct Checker<'a> {
    trimmed: u64,
    records: BTreeMap<&'static str, u64>,
    damage: Vec<Damage>,
    progress: &'a mut dyn FnMut(u64, u64),
    from: u64,
    to: u64,
}

impl Sink for Checker<'_> {
    fn record(&mut self, record: &Record<'_>) {
        *self.records.entry(name(record.header.kind)).or_default() += 1;
        if let Some(Change::Trimmed { position }) = Change::decode(record.header.kind, record.payload) {
            self.trimmed = self.trimmed.max(position);
        }
    }

    fn lost_message(&mut self, _position: u64, header: &RecordHeader) {
        if let Some(damage) = self.damage.last_mut() {
            let (offset, queue, topic) = (header.offset, header.queue, header.topic);
            damage.text =
                format!("the message at offset {offset} of queue {queue} of topic {topic} is damaged");
        }
    }

    fn damage(&mut self, file: String, begin: u64, end: u64, text: &str) {
        note(&mut self.damage, Damage { file, begin, end, text: text.into() });
    }

    fn progress(&mut self, position: u64) {
        (self.progress)(position - self.from, self.to - self.from);
    }
}

fn name(kind: RecordKind) -> &'static str {
    match kind {
        RecordKind::Message => "message",
        RecordKind::Opened => "opened",
        RecordKind::Closed => "closed",
        RecordKind::Topic => "topic",
        RecordKind::TopicDeleted => "topic_deleted",
        RecordKind::Group => "group",
        RecordKind::GroupDeleted => "group_deleted",
        RecordKind::Progress => "progress",
        RecordKind::Bounds => "bounds",
        RecordKind::Reserved => "reserved",
        RecordKind::Trimmed => "trimmed",
    }
}
