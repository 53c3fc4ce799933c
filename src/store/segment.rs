//! The files of the log.
//!
//! A segment holds the positions from its base up to base + capacity; the next one begins there, so a
//! file can be made, with its final name, before the log reaches it. The first [`HEADER_BYTES`] describe
//! it; position `p` lies at `HEADER_BYTES + p - base`.
//!
//! | at | bytes | header | meaning |
//! |---:|---:|---|---|
//! |  0 | 8 | magic | `HFSEGMT` and the format's number |
//! |  8 | 8 | shard id | random, made with the shard |
//! | 16 | 8 | base | first position |
//! | 24 | 8 | capacity | bytes of log that fit |
//! | 32 | 4 | epoch | of the writer that made the file |
//! | 36 | 2+n | shard name | text |
//! | 2044 | 4 | checksum | CRC-32C of bytes 0–2043 |
//! | 2048 | 2048 | copy | the same again, so that one bad sector does not cost the shard its identity |

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::RwLock;

use super::{
    codec::{Put, Reader},
    disk::{Disk, DiskFile},
    frame::FORMAT,
};

/// Bytes before the first position of a file.
pub const HEADER_BYTES: u64 = 4096;
const COPY_BYTES: usize = HEADER_BYTES as usize / 2;
const CRC_AT: usize = COPY_BYTES - 4;
const MAGIC: [u8; 7] = *b"HFSEGMT";
/// Names tried for a new file where others are in the way.
const MAX_NAMES: u32 = 100;
/// Writes end with a page where they can: a page that is changed in part has to be read first.
const PAGE_BYTES: u64 = 4096;

/// What a segment's header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    pub shard_id: u64,
    pub base: u64,
    pub capacity: u64,
    pub epoch: u32,
    pub shard: String,
}

/// Why a header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadHeader {
    Damaged,
    Newer(u8),
}

impl SegmentHeader {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES as usize);
        bytes.put(&MAGIC);
        bytes.put_u8(FORMAT);
        bytes.put_u64(self.shard_id);
        bytes.put_u64(self.base);
        bytes.put_u64(self.capacity);
        bytes.put_u32(self.epoch);
        bytes.put_text(&self.shard);
        bytes.resize(CRC_AT, 0);
        let crc = crc32c::crc32c(&bytes);
        bytes.put_u32(crc);
        bytes.extend_from_within(..);
        bytes
    }

    /// The header, and whether both copies of it are whole.
    pub fn decode(bytes: &[u8]) -> Result<(Self, bool), BadHeader> {
        let mut copies = bytes.chunks(COPY_BYTES).take(2).map(Self::fields);
        match (copies.next().flatten(), copies.next().flatten()) {
            (None, None) => Err(BadHeader::Damaged),
            (Some(header), copy) => header.map(|header| (header, copy.is_some())),
            (None, Some(copy)) => copy.map(|header| (header, false)),
        }
    }

    fn fields(bytes: &[u8]) -> Option<Result<Self, BadHeader>> {
        let (body, crc) = bytes.get(..COPY_BYTES)?.split_at_checked(CRC_AT)?;
        if Reader::new(crc).u32()? != crc32c::crc32c(body) {
            return None;
        }
        let mut reader = Reader::new(body);
        if reader.array()? != MAGIC {
            return None;
        }
        let format = reader.u8()?;
        if format != FORMAT {
            return Some(Err(BadHeader::Newer(format)));
        }
        let (shard_id, base, capacity) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (epoch, shard) = (reader.u32()?, reader.text()?.to_owned());
        base.checked_add(capacity)?;
        Some(Ok(Self { shard_id, base, capacity, epoch, shard }))
    }
}

/// An open file of the log.
#[derive(Debug)]
pub struct Segment {
    pub base: u64,
    pub capacity: u64,
    pub path: PathBuf,
    file: Arc<dyn DiskFile>,
}

impl Segment {
    /// First position behind the file.
    pub fn end(&self) -> u64 {
        self.base + self.capacity
    }

    /// Gives a file that was cut its length back, before it is written on.
    pub fn restore_length(&self) -> io::Result<()> {
        let bytes = HEADER_BYTES + self.capacity;
        if self.file.len()? >= bytes {
            return Ok(());
        }
        self.file.allocate(bytes)?;
        self.file.sync_data()
    }

    /// Writes over what is there.
    pub fn write(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        self.file.write_at(bytes, self.at(position, bytes.len())?)
    }

    /// Writes behind what was written so far: the rest of the last page becomes zero.
    pub fn append(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        let at = self.at(position, bytes.len())?;
        let end = at + bytes.len() as u64;
        let padding = (end.next_multiple_of(PAGE_BYTES) - end).min(HEADER_BYTES + self.capacity - end);
        self.file.write_padded(bytes, padding as usize, at)
    }

    pub fn read(&self, into: &mut [u8], position: u64) -> io::Result<()> {
        self.file.read_at(into, self.at(position, into.len())?)
    }

    pub fn read_now(&self, into: &mut [u8], position: u64) -> io::Result<bool> {
        self.file.read_at_now(into, self.at(position, into.len())?)
    }

    /// What lies between the positions is read soon.
    pub fn will_need(&self, begin: u64, end: u64) {
        let (begin, end) = (begin.max(self.base), end.min(self.end()));
        if begin < end {
            self.file.will_need(HEADER_BYTES + begin - self.base, end - begin);
        }
    }

    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn at(&self, position: u64, bytes: usize) -> io::Result<u64> {
        let within = position
            .checked_sub(self.base)
            .filter(|within| within.checked_add(bytes as u64).is_some_and(|end| end <= self.capacity));
        within.map(|within| HEADER_BYTES + within).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{bytes} bytes at {position} are not within {}", self.path.display()),
            )
        })
    }
}

/// The log's directory.
#[derive(Debug)]
pub struct Segments {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    open: RwLock<BTreeMap<u64, Arc<Segment>>>,
}

/// A file of the log's directory as it was found.
#[derive(Debug)]
pub struct FoundSegment {
    pub path: PathBuf,
    /// From the name.
    pub base: u64,
    /// Length of the file.
    pub bytes: u64,
    /// With whether both copies are whole.
    pub header: Result<(SegmentHeader, bool), BadHeader>,
}

impl Segments {
    pub fn new(disk: Arc<dyn Disk>, dir: PathBuf) -> Self {
        Self { disk, dir, open: RwLock::default() }
    }

    /// Makes the directory, or removes what a preparation left half done in it.
    pub fn tidy(&self) -> io::Result<()> {
        self.disk.create_dir_all(&self.dir)?;
        for name in self.disk.list(&self.dir)?.iter().filter(|name| base_of(name, ".tmp").is_some()) {
            self.disk.remove(&self.dir.join(name))?;
        }
        Ok(())
    }

    /// Looks at all files. Opens and changes nothing.
    pub fn find(&self) -> io::Result<Vec<FoundSegment>> {
        let mut found = Vec::new();
        for name in self.disk.list(&self.dir)? {
            let path = self.dir.join(&name);
            let Some(base) = base_of(&name, ".log") else {
                tracing::warn!(file = %path.display(), "not a file of the log; left alone");
                continue;
            };
            let in_file = |error: io::Error| io::Error::new(error.kind(), format!("{name}: {error}"));
            let file = self.disk.open(&path).map_err(in_file)?;
            let bytes = file.len().map_err(in_file)?;
            let mut header = vec![0; HEADER_BYTES as usize];
            let read = bytes.min(HEADER_BYTES) as usize;
            match file.read_at(header.get_mut(..read).unwrap_or_default(), 0) {
                // The first copy may be whole in a file that was cut.
                Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(in_file(error)),
                _ => {}
            }
            found.push(FoundSegment { path, base, bytes, header: SegmentHeader::decode(&header) });
        }
        found.sort_by(|a, b| (a.base, &a.path).cmp(&(b.base, &b.path)));
        Ok(found)
    }

    /// Opens a file that was found. It may have any name.
    pub fn adopt(&self, path: &Path, base: u64, capacity: u64) -> io::Result<Arc<Segment>> {
        let file = self.disk.open(path)?;
        let segment = Arc::new(Segment { base, capacity, path: path.to_owned(), file });
        self.open.write().insert(base, Arc::clone(&segment));
        Ok(segment)
    }

    /// Makes a file: temporary name, zeros, header, sync, rename, directory sync. Zeros are really
    /// written, since syncing into unwritten extents is several times slower.
    pub fn prepare(&self, header: &SegmentHeader) -> io::Result<Arc<Segment>> {
        if self.get(header.base).is_some() {
            let text = format!("there is a segment at {} already", header.base);
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        let path = self.free_path(header.base)?;
        let temporary = self.path(header.base).with_extension("tmp");
        let made = self.fill(&temporary, header);
        if made.is_err() {
            let _ = self.disk.remove(&temporary);
        }
        made?;
        self.disk.rename(&temporary, &path)?;
        self.disk.sync_dir(&self.dir)?;
        self.adopt(&path, header.base, header.capacity)
    }

    /// The name of a new file. What is in its way is not ours to remove: the next name is as good, since the
    /// header counts.
    pub fn free_path(&self, base: u64) -> io::Result<PathBuf> {
        let usual = self.path(base);
        let others = (1..MAX_NAMES).map(|n| self.dir.join(format!("{base:020}-{n}.log")));
        let free = |path: &PathBuf| matches!(self.disk.open(path), Err(error) if error.kind() == io::ErrorKind::NotFound);
        std::iter::once(usual.clone()).chain(others).find(free).ok_or_else(|| {
            let text = format!("{} and all names like it are taken", usual.display());
            io::Error::new(io::ErrorKind::AlreadyExists, text)
        })
    }

    fn fill(&self, path: &Path, header: &SegmentHeader) -> io::Result<()> {
        let file = self.disk.create(path)?;
        let bytes = HEADER_BYTES + header.capacity;
        file.allocate(bytes)?;
        file.write_at(&header.encode(), 0)?;
        file.write_zeros(HEADER_BYTES, header.capacity)?;
        file.sync_data()
    }

    /// The segment with this base.
    pub fn get(&self, base: u64) -> Option<Arc<Segment>> {
        self.open.read().get(&base).cloned()
    }

    /// The segment that holds `position`.
    pub fn holding(&self, position: u64) -> Option<Arc<Segment>> {
        let open = self.open.read();
        let (_, segment) = open.range(..=position).next_back()?;
        (position < segment.end()).then(|| Arc::clone(segment))
    }

    /// The first segment with a base at or above `position`.
    pub fn after(&self, position: u64) -> Option<Arc<Segment>> {
        self.open.read().range(position..).next().map(|(_, segment)| Arc::clone(segment))
    }

    /// The file that holds `position`, or should.
    pub fn file_of(&self, position: u64) -> String {
        let file = self.holding(position).map_or_else(|| self.path(position), |segment| segment.path.clone());
        file.display().to_string()
    }

    pub fn all(&self) -> Vec<Arc<Segment>> {
        self.open.read().values().cloned().collect()
    }

    /// Number and bytes of the files.
    pub fn size(&self) -> (u64, u64) {
        let open = self.open.read();
        (open.len() as u64, open.values().map(|segment| HEADER_BYTES + segment.capacity).sum())
    }

    /// Removes the file. Readers that have it open go on.
    pub fn remove(&self, segment: &Segment) -> io::Result<()> {
        match self.disk.remove(&segment.path) {
            // Somebody else was quicker.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.disk.sync_dir(&self.dir)?;
        self.open.write().remove(&segment.base);
        Ok(())
    }

    /// The usual name of the segment at `base`.
    pub fn path(&self, base: u64) -> PathBuf {
        self.dir.join(format!("{base:020}.log"))
    }
}

/// The base that a name says: 20 digits, and a number where the usual name was taken.
fn base_of(name: &str, suffix: &str) -> Option<u64> {
    let name = name.strip_suffix(suffix)?;
    let (digits, number) = name.split_once('-').unwrap_or((name, "1"));
    if number.parse::<u32>().is_err() {
        return None;
    }
    (digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> SegmentHeader {
        SegmentHeader { shard_id: 42, base: 24 << 20, capacity: 256 << 20, epoch: 3, shard: "default".into() }
    }

    #[test]
    fn the_bytes_on_disk_are_those_of_format_1() {
        let bytes = header().encode();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/segment-v1.bin");
        if std::env::var_os("HOLDFAST_WRITE_GOLDEN").is_some() {
            std::fs::write(path, &bytes).unwrap();
        }
        assert_eq!(bytes, std::fs::read(path).unwrap());
        assert_eq!(SegmentHeader::decode(&bytes), Ok((header(), true)));
    }

    #[test]
    fn a_flip_anywhere_in_the_header_is_seen_and_costs_one_copy() {
        let bytes = header().encode();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x10;
            assert_eq!(SegmentHeader::decode(&bytes), Ok((header(), false)), "byte {at}");
            bytes[(at + COPY_BYTES) % (2 * COPY_BYTES)] ^= 0x10;
            assert_eq!(SegmentHeader::decode(&bytes), Err(BadHeader::Damaged), "byte {at} of both");
        }
    }
}
