//! Which files of the log's directory are the shard's, and where in the log each of them stands.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    Damage, OpenError, Options,
    disk::Disk,
    frame::{Bad, FORMAT, FRAME_HEADER, FrameHeader, Seed},
    keys,
    recovery::{failed, keys_dir, log_dir, snapshot_dir},
    segment::{BadHeader, FoundSegment, HEADER_BYTES, SegmentHeader, Segments},
    snapshot,
};

/// A file of the log that can be put right.
pub(super) struct Found {
    pub path: PathBuf,
    pub why: String,
    pub problem: FileProblem,
}

/// What there is to put right about a file of the log.
pub(super) enum FileProblem {
    /// It is not read.
    LeftAlone,
    /// It lacks this header, or one copy of it.
    Header(SegmentHeader),
    /// It begins here, not where its name says.
    Misnamed(u64),
}

/// Opens the files that belong to this shard: those whose header says so, whatever their names, and those
/// with a damaged header in which frames of this shard stand where the name says. The shard's id is what most
/// headers say; any name of the shard will do where `options` has none.
pub(super) fn segments(
    options: &Options,
    disk: &Arc<dyn Disk>,
    segments: &Segments,
    found: Vec<FoundSegment>,
    damage: &mut Vec<Damage>,
    problems: &mut Vec<Found>,
) -> Result<u64, OpenError> {
    for segment in &found {
        if let Err(BadHeader::Newer(format)) = segment.header {
            return Err(OpenError(format!(
                "{} has format {format}, this version knows {FORMAT}; use the version that wrote it",
                segment.path.display()
            )));
        }
    }
    let Some(shard_id) = elect(options, disk, &found)? else { return Ok(new_id()) };
    let mut adoption = Adoption { shard_id, ours: BTreeMap::new(), damage, problems };
    adoption.take(options, disk, found)?;
    adoption.open(segments)?;
    Ok(shard_id)
}

/// The files of a shard as they are found.
struct Adoption<'a> {
    shard_id: u64,
    /// By base. Of two files for the same one it is that whose name fits.
    ours: BTreeMap<u64, File>,
    damage: &'a mut Vec<Damage>,
    problems: &'a mut Vec<Found>,
}

/// A file that is the shard's.
struct File {
    path: PathBuf,
    capacity: u64,
    bytes: u64,
}

impl Adoption<'_> {
    /// Takes what is the shard's: files whose names fit, then those under other names, then those whose header
    /// is damaged, for which there may be room between the others.
    fn take(
        &mut self,
        options: &Options,
        disk: &Arc<dyn Disk>,
        found: Vec<FoundSegment>,
    ) -> Result<(), OpenError> {
        let shard = found.iter().find_map(|segment| {
            let (header, _) = segment.header.as_ref().ok()?;
            (header.shard_id == self.shard_id).then(|| header.shard.clone())
        });
        let (mut misnamed, mut headless) = (Vec::new(), Vec::new());
        for segment in found {
            let FoundSegment { path, base: named, bytes, header } = segment;
            let Ok((header, whole)) = header else {
                headless.push((path, named, bytes));
                continue;
            };
            if self.is_foreign(options, &path, named, &header, whole)? {
                continue;
            }
            if header.base == named && !self.ours.contains_key(&named) {
                self.ours.insert(named, File { path, capacity: header.capacity, bytes });
            } else {
                misnamed.push((path, named, header, bytes));
            }
        }
        for (path, named, header, bytes) in misnamed {
            self.take_misnamed(path, named, &header, bytes);
        }
        for (path, named, bytes) in headless {
            self.take_headless(disk, path, named, bytes, shard.as_deref())?;
        }
        Ok(())
    }

    /// Whether the file is another shard's. Refuses a shard of another name.
    fn is_foreign(
        &mut self,
        options: &Options,
        path: &Path,
        named: u64,
        header: &SegmentHeader,
        whole: bool,
    ) -> Result<bool, OpenError> {
        if header.shard_id != self.shard_id {
            let text = format!("belongs to shard {:016x}; left alone and not read", header.shard_id);
            self.leave_alone(path, named, text);
            return Ok(true);
        }
        if !options.shard.is_empty() && options.shard != header.shard {
            return Err(OpenError(format!(
                "{} belongs to shard `{}`, not `{}`; check the data directory and the shard's name",
                path.display(),
                header.shard,
                options.shard
            )));
        }
        if !whole {
            let text = "one copy of the header is damaged; the other is used";
            self.put_right(path, text, FileProblem::Header(header.clone()));
            self.note(path, header.base, header.base, text);
        }
        Ok(false)
    }

    fn take_misnamed(&mut self, path: PathBuf, named: u64, header: &SegmentHeader, bytes: u64) {
        let base = header.base;
        if self.ours.contains_key(&base) {
            let text = format!("another file for the log from {base} on; left alone and not read");
            return self.leave_alone(&path, named, text);
        }
        let text = format!("its header says that the file begins at {base}; it is used as that");
        self.put_right(&path, &text, FileProblem::Misnamed(base));
        self.note(&path, named, named, &text);
        self.ours.insert(base, File { path, capacity: header.capacity, bytes });
    }

    fn take_headless(
        &mut self,
        disk: &Arc<dyn Disk>,
        path: PathBuf,
        named: u64,
        bytes: u64,
        shard: Option<&str>,
    ) -> Result<(), OpenError> {
        let next = self.ours.range(named..).next().map_or(u64::MAX, |(base, _)| *base);
        let capacity = bytes.saturating_sub(HEADER_BYTES).min(next.saturating_sub(named)) & !7;
        let seed = Seed::new(self.shard_id);
        if capacity == 0 || !holds_frame(disk, &path, named, seed).map_err(failed(&path))? {
            let text = "the header is damaged and no frame of this shard is in it; left alone and not read";
            self.leave_alone(&path, named, text.into());
            return Ok(());
        }
        let text = "the header is damaged; name and length of the file stand in for it; `holdfast store \
                    repair` writes it anew";
        self.note(&path, named, named, text);
        if let Some(shard) = shard {
            let (shard_id, shard) = (self.shard_id, shard.to_owned());
            let header = SegmentHeader { shard_id, base: named, capacity, epoch: 0, shard };
            self.put_right(&path, "the header is damaged", FileProblem::Header(header));
        }
        self.ours.insert(named, File { path, capacity, bytes });
        Ok(())
    }

    /// Opens what was taken, in order, and names what is missing between.
    fn open(mut self, segments: &Segments) -> Result<(), OpenError> {
        let mut end = 0;
        for (base, File { path, capacity, bytes }) in std::mem::take(&mut self.ours) {
            if base < end {
                let text =
                    format!("overlaps the segment before it, which ends at {end}; left alone and not read");
                self.leave_alone(&path, base, text);
                continue;
            }
            if base > end && end > 0 {
                let text = "the file is missing; messages in it are lost";
                self.note(&segments.path(end), end, base, text);
            }
            end = base.saturating_add(capacity);
            let there = base.saturating_add(bytes.saturating_sub(HEADER_BYTES));
            if there < end {
                self.note(&path, there, end, "the file is cut off here; messages behind are lost");
            }
            segments.adopt(&path, base, capacity).map_err(failed(&path))?;
        }
        Ok(())
    }

    fn note(&mut self, path: &Path, begin: u64, end: u64, text: &str) {
        self.damage.push(Damage { file: path.display().to_string(), begin, end, text: text.to_owned() });
    }

    fn put_right(&mut self, path: &Path, why: &str, problem: FileProblem) {
        self.problems.push(Found { path: path.to_owned(), why: why.to_owned(), problem });
    }

    fn leave_alone(&mut self, path: &Path, at: u64, text: String) {
        self.put_right(path, &text, FileProblem::LeftAlone);
        self.note(path, at, at, &text);
    }
}

/// The shard that most headers name. Without any, that which snapshots or the key index name and frames of the
/// log prove. `None` where there is no log at all.
fn elect(options: &Options, disk: &Arc<dyn Disk>, found: &[FoundSegment]) -> Result<Option<u64>, OpenError> {
    let headers = || found.iter().filter_map(|segment| segment.header.as_ref().ok());
    let mut votes: HashMap<u64, usize> = HashMap::new();
    for (header, _) in headers() {
        *votes.entry(header.shard_id).or_default() += 1;
    }
    let first = headers().next().map(|(header, _)| header.shard_id);
    let elected = votes.iter().max_by_key(|(id, votes)| (**votes, Some(**id) == first)).map(|(id, _)| *id);
    if elected.is_some() {
        return Ok(elected);
    }
    let mut derived = snapshot::shard_ids(disk, &snapshot_dir(options));
    derived.extend(keys::shard_ids(disk, &keys_dir(options)));
    let Some(segment) = found.first() else {
        if derived.is_empty() {
            return Ok(None);
        }
        return Err(OpenError(format!(
            "{} is empty, but there are files made from a log in {} or {}; look whether the file system with the log \
             is mounted, or put its files back. To begin anew without them, remove {0}'s neighbours snapshots, \
             index and keys",
            log_dir(options).display(),
            snapshot_dir(options).display(),
            keys_dir(options).display()
        )));
    };
    for id in derived {
        for segment in found {
            let path = &segment.path;
            if holds_frame(disk, path, segment.base, Seed::new(id)).map_err(failed(path))? {
                return Ok(Some(id));
            }
        }
    }
    Err(OpenError(format!(
        "{}: both copies of the segment's header (bytes 0 to 4095) are damaged and nothing else says which \
         shard the log belongs to; restore these bytes from a copy. `holdfast store check {}` tells what can \
         be read",
        segment.path.display(),
        options.dir.display()
    )))
}

/// Whether a file that is said to begin at `base` holds a frame of the shard at its place.
fn holds_frame(disk: &Arc<dyn Disk>, path: &Path, base: u64, seed: Seed) -> io::Result<bool> {
    const PIECE: usize = 1 << 20;
    let file = disk.open(path)?;
    let bytes = file.len()?;
    let mut buffer = Vec::new();
    let mut at = HEADER_BYTES;
    while at < bytes {
        // Pieces overlap by a frame's header.
        let length = usize::try_from(bytes - at).unwrap_or(PIECE).min(PIECE);
        buffer.resize(length, 0);
        file.read_at(&mut buffer, at)?;
        let position = base.saturating_add(at - HEADER_BYTES);
        let starts = buffer.windows(FRAME_HEADER).step_by(8);
        let found = (position..).step_by(8).zip(starts).any(|(position, bytes)| {
            bytes.starts_with(b"HF")
                && !matches!(FrameHeader::decode(seed, position, bytes), Err(Bad::Damaged))
        });
        if found || length <= FRAME_HEADER {
            return Ok(found);
        }
        at += (length - FRAME_HEADER) as u64 & !7;
        if length < PIECE {
            return Ok(false);
        }
    }
    Ok(false)
}

/// An id for a new shard.
fn new_id() -> u64 {
    xxhash_rust::xxh3::xxh3_64(uuid::Uuid::now_v7().as_bytes())
}
