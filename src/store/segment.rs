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
/// Zeros are written in pieces of this size, each given to the device before the next.
const FILL_BYTES: u64 = 4 << 20;

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

    pub fn write(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        self.file.write_at(bytes, self.at(position, bytes.len())?)
    }

    pub fn read(&self, into: &mut [u8], position: u64) -> io::Result<()> {
        self.file.read_at(into, self.at(position, into.len())?)
    }

    pub fn read_now(&self, into: &mut [u8], position: u64) -> io::Result<bool> {
        self.file.read_at_now(into, self.at(position, into.len())?)
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
        for name in self.disk.list(&self.dir)?.iter().filter(|name| name.ends_with(".tmp")) {
            self.disk.remove(&self.dir.join(name))?;
        }
        Ok(())
    }

    /// Looks at all files. Opens and changes nothing.
    pub fn find(&self) -> io::Result<Vec<FoundSegment>> {
        let mut found = Vec::new();
        for name in self.disk.list(&self.dir)? {
            let path = self.dir.join(&name);
            if name.ends_with(".tmp") {
                continue;
            }
            let Some(base) = base_of(&name) else {
                tracing::warn!(file = %path.display(), "not a file of the log; left alone");
                continue;
            };
            let file = self.disk.open(&path)?;
            let bytes = file.len()?;
            let mut header = vec![0; HEADER_BYTES as usize];
            let header = match file.read_at(&mut header, 0) {
                Ok(()) => SegmentHeader::decode(&header),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(BadHeader::Damaged),
                Err(error) => return Err(error),
            };
            found.push(FoundSegment { path, base, bytes, header });
        }
        found.sort_by_key(|segment| segment.base);
        Ok(found)
    }

    /// Opens a file that was found.
    pub fn adopt(&self, base: u64, capacity: u64) -> io::Result<Arc<Segment>> {
        let path = self.path(base);
        let file = self.disk.open(&path)?;
        let segment = Arc::new(Segment { base, capacity, path, file });
        self.open.write().insert(base, Arc::clone(&segment));
        Ok(segment)
    }

    /// Makes a file: temporary name, zeros, header, sync, rename, directory sync. Zeros are really
    /// written, since syncing into unwritten extents is several times slower.
    pub fn prepare(&self, header: &SegmentHeader) -> io::Result<Arc<Segment>> {
        let path = self.path(header.base);
        if self.get(header.base).is_some() || self.disk.open(&path).is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{} is there already", path.display()),
            ));
        }
        let temporary = path.with_extension("tmp");
        let made = self.fill(&temporary, header);
        if made.is_err() {
            let _ = self.disk.remove(&temporary);
        }
        made?;
        self.disk.rename(&temporary, &path)?;
        self.disk.sync_dir(&self.dir)?;
        self.adopt(header.base, header.capacity)
    }

    fn fill(&self, path: &Path, header: &SegmentHeader) -> io::Result<()> {
        let file = self.disk.create(path)?;
        let bytes = HEADER_BYTES + header.capacity;
        file.allocate(bytes)?;
        file.write_at(&header.encode(), 0)?;
        let zeros = vec![0; FILL_BYTES as usize];
        let mut at = HEADER_BYTES;
        while at < bytes {
            let piece = (bytes - at).min(FILL_BYTES);
            file.write_at(zeros.get(..piece as usize).unwrap_or(&zeros), at)?;
            file.start_writeback(at, piece);
            // Two pieces at a time: the log's own syncs would wait behind all that is on its way.
            file.finish_writeback(at.saturating_sub(FILL_BYTES), FILL_BYTES);
            at += piece;
        }
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

    pub fn all(&self) -> Vec<Arc<Segment>> {
        self.open.read().values().cloned().collect()
    }

    /// Number and bytes of the files.
    pub fn size(&self) -> (u64, u64) {
        let open = self.open.read();
        (open.len() as u64, open.values().map(|segment| HEADER_BYTES + segment.capacity).sum())
    }

    /// Removes the file. Readers that have it open go on.
    pub fn remove(&self, base: u64) -> io::Result<()> {
        self.disk.remove(&self.path(base))?;
        self.disk.sync_dir(&self.dir)?;
        self.open.write().remove(&base);
        Ok(())
    }

    pub fn path(&self, base: u64) -> PathBuf {
        self.dir.join(format!("{base:020}.log"))
    }
}

fn base_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".log")?;
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
