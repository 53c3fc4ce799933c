//! One file of a snapshot: a header, then sections with a checksum each, so that neither writing nor
//! reading holds all of it in memory.
//!
//! | bytes | field |
//! |---:|---|
//! | 8 | magic `HFSNAP` and the format's number, two digits |
//! | 8 | shard id |
//! | 8 | position: everything below is in; more may be, which does no harm |
//! | 8 | position of the part that this one builds on; all ones: none, this one is whole |
//! | 8 | highest store time |
//! | 4 | highest epoch |
//! | 4 | CRC-32C of all before |
//! | … | sections: length u32 · CRC-32C of all sections up to here, going on from the header's · items |
//! | 8 | a section of length 0: the part is complete |

use std::{io, path::Path, sync::Arc};

use super::{
    super::{
        codec::{Put, Reader},
        disk::{Disk, DiskFile},
    },
    Snapshot,
};

const MAGIC: [u8; 8] = *b"HFSNAP01";
const HEADER_BYTES: usize = 48;
const SECTION_HEADER: usize = 8;
const NONE: u64 = u64::MAX;
/// A section is written when it has grown to this.
const SECTION_BYTES: usize = 256 << 10;
/// A section holds whole items, the largest of which is a queue with all its blocks.
const MAX_SECTION_BYTES: usize = 256 << 20;

/// What a part says of itself.
#[derive(Clone, Copy, Debug)]
pub struct PartHeader {
    pub shard_id: u64,
    pub snapshot: Snapshot,
    pub previous: Option<u64>,
}

impl PartHeader {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.put(&MAGIC);
        out.put_u64(self.shard_id);
        out.put_u64(self.snapshot.position);
        out.put_u64(self.previous.unwrap_or(NONE));
        out.put_u64(self.snapshot.store_ms);
        out.put_u32(self.snapshot.epoch);
        let crc = crc32c::crc32c(&out);
        out.put_u32(crc);
        out
    }

    /// The header and its checksum.
    fn decode(bytes: &[u8; HEADER_BYTES], shard_id: u64) -> Result<(Self, u32), &'static str> {
        let mut reader = Reader::new(bytes);
        let fields = (|| {
            let (magic, shard_id) = (reader.array::<8>()?, reader.u64()?);
            let (position, previous) = (reader.u64()?, reader.u64()?);
            let (store_ms, epoch, crc) = (reader.u64()?, reader.u32()?, reader.u32()?);
            let previous = Some(previous).filter(|&previous| previous != NONE);
            let snapshot = Snapshot { position, epoch, store_ms };
            Some((magic, Self { shard_id, snapshot, previous }, crc))
        })();
        let (magic, header, crc) = fields.ok_or("it is too short")?;
        if magic != MAGIC || header.shard_id != shard_id {
            return Err("it is of another format or shard");
        }
        let [body @ .., _, _, _, _] = bytes;
        if crc32c::crc32c(body) != crc || header.previous.is_some_and(|p| p >= header.snapshot.position) {
            return Err("its checksum does not fit");
        }
        Ok((header, crc))
    }
}

/// The shard that a file says it belongs to.
pub fn shard_id(disk: &Arc<dyn Disk>, path: &Path) -> Option<u64> {
    let mut bytes = [0; 16];
    disk.open(path).and_then(|file| file.read_at(&mut bytes, 0)).ok()?;
    let mut reader = Reader::new(&bytes);
    (reader.array()? == MAGIC).then(|| reader.u64())?
}

/// Writes one part.
pub struct PartWriter {
    file: Arc<dyn DiskFile>,
    at: u64,
    crc: u32,
    /// Room for the section's header, then its items.
    section: Vec<u8>,
}

impl PartWriter {
    pub fn new(file: Arc<dyn DiskFile>, header: &PartHeader) -> io::Result<Self> {
        let bytes = header.encode();
        file.write_at(&bytes, 0)?;
        let crc = bytes.last_chunk().map_or(0, |crc| u32::from_le_bytes(*crc));
        Ok(Self { file, at: HEADER_BYTES as u64, crc, section: vec![0; SECTION_HEADER] })
    }

    /// Appends an item, which `put` writes.
    pub fn item(&mut self, put: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        put(&mut self.section);
        if self.section.len() >= SECTION_BYTES { self.end_section() } else { Ok(()) }
    }

    fn end_section(&mut self) -> io::Result<()> {
        let Some((header, items)) = self.section.split_at_mut_checked(SECTION_HEADER) else { return Ok(()) };
        self.crc = crc32c::crc32c_append(self.crc, items);
        let length = u32::try_from(items.len()).unwrap_or(u32::MAX);
        header.copy_from_slice(&(u64::from(length) | u64::from(self.crc) << 32).to_le_bytes());
        self.file.write_at(&self.section, self.at)?;
        self.at += self.section.len() as u64;
        self.section.truncate(SECTION_HEADER);
        Ok(())
    }

    /// Completes and syncs the part; its length in bytes.
    pub fn finish(mut self) -> io::Result<u64> {
        if self.section.len() > SECTION_HEADER {
            self.end_section()?;
        }
        self.end_section()?;
        self.file.sync_data()?;
        Ok(self.at)
    }
}

/// Reads one part.
#[derive(Debug)]
pub struct PartReader {
    file: Arc<dyn DiskFile>,
    bytes: u64,
    header: PartHeader,
    crc: u32,
}

impl PartReader {
    pub fn open(disk: &Arc<dyn Disk>, path: &Path, shard_id: u64) -> Result<Self, String> {
        let read = || {
            let file = disk.open(path)?;
            let mut header = [0; HEADER_BYTES];
            file.read_at(&mut header, 0)?;
            let bytes = file.len()?;
            Ok::<_, io::Error>((file, bytes, header))
        };
        let (file, bytes, header) = read().map_err(|error| error.to_string())?;
        let (header, crc) = PartHeader::decode(&header, shard_id)?;
        Ok(Self { file, bytes, header, crc })
    }

    pub fn header(&self) -> &PartHeader {
        &self.header
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hands over the sections in order, each only after its checksum was compared. `take` answers whether
    /// it understood.
    pub fn each_section(mut self, mut take: impl FnMut(&[u8]) -> bool) -> Result<(), String> {
        let mut at = HEADER_BYTES as u64;
        loop {
            let mut header = [0; SECTION_HEADER];
            self.file.read_at(&mut header, at).map_err(|error| error.to_string())?;
            let both = u64::from_le_bytes(header);
            let (length, crc) = ((both & u64::from(u32::MAX)) as usize, (both >> 32) as u32);
            at += SECTION_HEADER as u64;
            if length > MAX_SECTION_BYTES || at.saturating_add(length as u64) > self.bytes {
                return Err("a section of it is cut off".into());
            }
            let mut section = vec![0; length];
            self.file.read_at(&mut section, at).map_err(|error| error.to_string())?;
            self.crc = crc32c::crc32c_append(self.crc, &section);
            if self.crc != crc {
                return Err("the checksum of a section does not fit".into());
            }
            if length == 0 {
                return Ok(());
            }
            if !take(&section) {
                return Err("a section of it cannot be understood".into());
            }
            at += length as u64;
        }
    }
}
