//! Where queue indexes live: blocks of entries, shared by all queues, in a few mapped files.
//!
//! An entry is 32 bytes, so an offset within a block is an address. The files are derived from the log
//! and expendable; the directory of blocks is in memory and in the snapshots.
//!
//! | at | bytes | entry | meaning |
//! |---:|---:|---|---|
//! |  0 | 7 | position | of the record in the log |
//! |  7 | 1 | flags | none yet; room for entries that point at a message stored earlier |
//! |  8 | 4 | length | of the record |
//! | 12 | 4 | check | CRC-32C of topic, queue, offset and the other fields; 1 where it is 0 |
//! | 16 | 8 | tag hash | 0: no tag |
//! | 24 | 8 | store time | milliseconds since 1970 |
//!
//! An entry of length 0 marks a lost message.

use std::{io, path::PathBuf, sync::Arc};

use parking_lot::{Mutex, RwLock};

use super::{
    codec::{Put, Reader},
    disk::{Disk, Region},
};
use crate::model::QueueKey;

/// Bits of a position; the rest are flags.
const POSITION_BITS: u32 = 56;
/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 32;
/// Entries of the smallest block; places count in these.
const UNIT: usize = 8;
/// Entries a block may have, smallest first. A queue's next block is larger while the queue grows.
pub const CLASSES: [u32; 4] = [8, 64, 512, 4096];
/// Entries of a chunk, which is cut into blocks of one class.
const CHUNK: usize = 4096;
/// Chunks of the first index file: 4 MiB, so that an idle broker is small.
const FIRST_CHUNKS: usize = 32;
/// Chunks of later files: 32 MiB.
const LATER_CHUNKS: usize = 256;
/// With fewer left the next file is made.
const SPARE_CHUNKS: usize = 8;
const CHUNK_UNITS: usize = CHUNK / UNIT;

/// One message in a queue's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub position: u64,
    pub length: u32,
    pub tag_hash: u64,
    pub store_ms: u64,
}

impl Entry {
    pub fn encode(&self, queue: QueueKey, offset: u64) -> [u8; ENTRY_BYTES] {
        let mut bytes = Vec::with_capacity(ENTRY_BYTES);
        bytes.put_u64(self.position);
        bytes.put_u32(self.length);
        bytes.put_u32(self.check(queue, offset));
        bytes.put_u64(self.tag_hash);
        bytes.put_u64(self.store_ms);
        bytes.try_into().unwrap_or([0; ENTRY_BYTES])
    }

    /// `None` when the bytes are not the entry of this place.
    pub fn decode(bytes: &[u8], queue: QueueKey, offset: u64) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let (position, length, check) = (reader.u64()?, reader.u32()?, reader.u32()?);
        let entry = Self { position, length, tag_hash: reader.u64()?, store_ms: reader.u64()? };
        (position >> POSITION_BITS == 0 && check == entry.check(queue, offset)).then_some(entry)
    }

    /// Never 0, so that an unwritten entry is none. Any change within four bytes shows.
    fn check(&self, queue: QueueKey, offset: u64) -> u32 {
        let place = u128::from(queue.topic.0) | u128::from(offset) << 64;
        let times = u128::from(self.tag_hash) | u128::from(self.store_ms) << 64;
        let record = u128::from(self.position) | u128::from(self.length) << 64;
        let record = record | u128::from(queue.queue) << 96;
        let crc = [place, record, times]
            .iter()
            .fold(0, |crc, fields| crc32c::crc32c_append(crc, &fields.to_le_bytes()));
        crc.max(1)
    }
}

/// A stretch of one queue's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset of its first entry.
    pub first: u64,
    /// Entries in use.
    pub len: u64,
    /// Where it lies, in units of 8 entries; [`HOLE`] for lost offsets, which have no entries.
    pub place: u32,
    /// Index into [`CLASSES`].
    pub class: u8,
}

/// The place of a block without entries: its offsets are lost.
pub const HOLE: u32 = u32::MAX;

impl Block {
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.len)
    }

    pub fn is_hole(&self) -> bool {
        self.place == HOLE
    }

    fn capacity(&self) -> u64 {
        if self.is_hole() { 0 } else { CLASSES.get(usize::from(self.class)).map_or(0, |&n| u64::from(n)) }
    }
}

/// All index files of a shard.
#[derive(Debug)]
pub struct IndexSpace {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    files: RwLock<Vec<IndexFile>>,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct IndexFile {
    /// First unit of the file.
    first: usize,
    chunks: usize,
    region: Arc<dyn Region>,
}

/// What can be handed out.
#[derive(Debug, Default)]
struct Free {
    /// Places by class.
    blocks: [Vec<u32>; CLASSES.len()],
    /// Chunks not yet cut, by their first unit.
    chunks: Vec<u32>,
    /// Freed, but a snapshot may still name them.
    waiting: Vec<(u32, u8)>,
}

impl IndexSpace {
    /// Opens the files in `dir`; nothing is in use until [`IndexSpace::adopt`].
    pub fn open(disk: Arc<dyn Disk>, dir: PathBuf) -> io::Result<Self> {
        disk.create_dir_all(&dir)?;
        let space = Self { disk, dir, files: RwLock::new(Vec::new()), free: Mutex::new(Free::default()) };
        loop {
            let number = space.files.read().len();
            let path = space.path(number);
            let chunks = chunks_of(number);
            let Ok(file) = space.disk.open(&path) else { break };
            if file.len()? != (chunks * CHUNK * ENTRY_BYTES) as u64 {
                tracing::warn!(file = %path.display(), "index file has a wrong length; it is made anew");
                break;
            }
            space.add(file.map()?, chunks);
        }
        Ok(space)
    }

    /// Number of files, and bytes they take.
    pub fn size(&self) -> (usize, u64) {
        let files = self.files.read();
        (files.len(), files.iter().map(|file| file.region.len() as u64).sum())
    }

    /// Marks what the queues of a snapshot use; the rest becomes free. `false` when a block lies where
    /// there is no file or overlaps another: then the snapshot does not fit these files.
    pub fn adopt<'a>(&self, used: impl Iterator<Item = &'a Block>) -> bool {
        let files = self.files.read();
        let chunks: usize = files.iter().map(|file| file.chunks).sum();
        // For each chunk its class, and which of its blocks are taken.
        let mut taken: Vec<Option<(u8, Vec<bool>)>> = vec![None; chunks];
        for block in used.filter(|block| !block.is_hole()) {
            let place = block.place as usize;
            let Some(&entries) = CLASSES.get(usize::from(block.class)) else { return false };
            let units = entries as usize / UNIT;
            let (chunk, within) = (place / CHUNK_UNITS, place % CHUNK_UNITS);
            if within % units != 0 || block.len > u64::from(entries) {
                return false;
            }
            let Some(slot) = taken.get_mut(chunk) else { return false };
            let (class, blocks) = slot.get_or_insert_with(|| (block.class, vec![false; CHUNK_UNITS / units]));
            match blocks.get_mut(within / units) {
                Some(taken) if *class == block.class && !*taken => *taken = true,
                _ => return false,
            }
        }
        let mut free = Free::default();
        for (chunk, slot) in taken.iter().enumerate() {
            let first = chunk * CHUNK_UNITS;
            match slot {
                None => free.chunks.push(first as u32),
                Some((class, blocks)) => {
                    let units = CHUNK_UNITS / blocks.len();
                    let places = blocks.iter().enumerate().filter(|(_, taken)| !**taken);
                    let places = places.map(|(n, _)| (first + n * units) as u32);
                    if let Some(list) = free.blocks.get_mut(usize::from(*class)) {
                        list.extend(places);
                    }
                }
            }
        }
        free.chunks.reverse();
        *self.free.lock() = free;
        true
    }

    /// Hands out a block.
    pub fn allocate(&self, class: u8) -> io::Result<u32> {
        let mut free = self.free.lock();
        loop {
            if let Some(place) = free.blocks.get_mut(usize::from(class)).and_then(Vec::pop) {
                return Ok(place);
            }
            let Some(chunk) = free.chunks.pop() else {
                self.grow(&mut free)?;
                continue;
            };
            let units = CLASSES.get(usize::from(class)).map_or(CHUNK_UNITS, |&n| n as usize / UNIT);
            if let Some(list) = free.blocks.get_mut(usize::from(class)) {
                list.extend((0..CHUNK_UNITS / units).rev().map(|n| chunk + (n * units) as u32));
            }
        }
    }

    /// Grows in time, so that the writer does not have to.
    pub fn keep_spare(&self) -> io::Result<()> {
        let mut free = self.free.lock();
        if free.chunks.len() < SPARE_CHUNKS { self.grow(&mut free) } else { Ok(()) }
    }

    /// Takes a block back. It is handed out again after [`IndexSpace::recycle`].
    pub fn release(&self, block: &Block) {
        if !block.is_hole() {
            self.free.lock().waiting.push((block.place, block.class));
        }
    }

    /// How many blocks wait to be recycled; pass it to [`IndexSpace::recycle`] once a snapshot that was
    /// begun afterwards is durable, since no snapshot names them any more.
    pub fn waiting(&self) -> usize {
        self.free.lock().waiting.len()
    }

    /// Makes the first `count` released blocks free.
    pub fn recycle(&self, count: usize) {
        let free = &mut *self.free.lock();
        let count = count.min(free.waiting.len());
        for (place, class) in free.waiting.drain(..count) {
            if let Some(list) = free.blocks.get_mut(usize::from(class)) {
                list.push(place);
            }
        }
    }

    pub fn read(&self, place: u32, entry: u64, into: &mut [u8]) -> bool {
        self.with(place, entry, |region, at| region.read(at, into))
    }

    pub fn write(&self, place: u32, entry: u64, bytes: &[u8]) -> bool {
        self.with(place, entry, |region, at| region.write(at, bytes))
    }

    /// Makes all entries durable.
    pub fn flush(&self) -> io::Result<()> {
        let regions: Vec<_> = self.files.read().iter().map(|file| Arc::clone(&file.region)).collect();
        regions.iter().try_for_each(|region| region.flush())
    }

    fn with(&self, place: u32, entry: u64, act: impl FnOnce(&dyn Region, usize) -> bool) -> bool {
        let files = self.files.read();
        let place = place as usize;
        let at = files.partition_point(|file| file.first <= place).checked_sub(1);
        let Some(file) = at.and_then(|at| files.get(at)) else { return false };
        let at = (place - file.first) * UNIT * ENTRY_BYTES + entry as usize * ENTRY_BYTES;
        act(&*file.region, at)
    }

    fn grow(&self, free: &mut Free) -> io::Result<()> {
        let number = self.files.read().len();
        let path = self.path(number);
        let chunks = chunks_of(number);
        match self.disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = self.disk.create(&path)?;
        if let Err(error) = file.allocate((chunks * CHUNK * ENTRY_BYTES) as u64) {
            let _ = self.disk.remove(&path);
            return Err(error);
        }
        file.sync_data()?;
        self.disk.sync_dir(&self.dir)?;
        let first = self.add(file.map()?, chunks);
        free.chunks.extend((0..chunks).rev().map(|n| (first + n * CHUNK_UNITS) as u32));
        Ok(())
    }

    fn add(&self, region: Arc<dyn Region>, chunks: usize) -> usize {
        let mut files = self.files.write();
        let first = files.last().map_or(0, |last| last.first + last.chunks * CHUNK_UNITS);
        files.push(IndexFile { first, chunks, region });
        first
    }

    fn path(&self, number: usize) -> PathBuf {
        self.dir.join(format!("{number:06}.index"))
    }
}

fn chunks_of(file: usize) -> usize {
    if file == 0 { FIRST_CHUNKS } else { LATER_CHUNKS }
}

/// The index of one queue: blocks in order of offset, without gaps between them.
#[derive(Debug, Default)]
pub struct QueueIndex {
    blocks: Vec<Block>,
}

impl QueueIndex {
    pub fn from_blocks(blocks: Vec<Block>) -> Option<Self> {
        let joined = blocks.windows(2).all(|pair| matches!(pair, [a, b] if a.end() == b.first));
        joined.then_some(Self { blocks })
    }

    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Offset behind the last entry; `None` when there is none.
    pub fn end(&self) -> Option<u64> {
        self.blocks.last().map(Block::end)
    }

    /// Appends the entry of `offset`, which must be the end.
    pub fn push(
        &mut self,
        space: &IndexSpace,
        queue: QueueKey,
        offset: u64,
        entry: &Entry,
    ) -> io::Result<()> {
        let full = self.blocks.last().is_none_or(|block| block.is_hole() || block.len >= block.capacity());
        if full {
            let last = self.blocks.last().filter(|block| !block.is_hole());
            let class = match last.map(|block| block.class) {
                None => 0,
                Some(class) => (class + 1).min(CLASSES.len() as u8 - 1),
            };
            let place = space.allocate(class)?;
            // Most queues stay small: room for one block, not for the four that a list begins with.
            if self.blocks.len() == self.blocks.capacity() {
                self.blocks.reserve_exact(self.blocks.len() / 2 + 1);
            }
            self.blocks.push(Block { first: offset, len: 0, place, class });
        }
        let Some(block) = self.blocks.last_mut() else { return Ok(()) };
        if block.end() != offset {
            return Err(io::Error::other(format!(
                "index of {queue:?} ends at {}, not {offset}",
                block.end()
            )));
        }
        if !space.write(block.place, block.len, &entry.encode(queue, offset)) {
            return Err(io::Error::other("index block outside its file"));
        }
        block.len += 1;
        Ok(())
    }

    /// Marks offsets from the end up to `to` as lost.
    pub fn push_hole(&mut self, from: u64, to: u64) {
        match self.blocks.last_mut() {
            Some(last) if last.is_hole() => last.len = to.saturating_sub(last.first),
            _ => {
                self.blocks.push(Block { first: from, len: to.saturating_sub(from), place: HOLE, class: 0 });
            }
        }
    }

    /// Points `offset`, which must lie within, at another entry: a message that was copied forward.
    pub fn replace(
        &mut self,
        space: &IndexSpace,
        queue: QueueKey,
        offset: u64,
        entry: &Entry,
    ) -> io::Result<()> {
        let Some(at) = self.position(offset) else { return Ok(()) };
        let Some(&block) = self.blocks.get(at) else { return Ok(()) };
        if !block.is_hole() {
            let _ = space.write(block.place, offset - block.first, &entry.encode(queue, offset));
            return Ok(());
        }
        // Fill the hole: at its front an earlier block may have room.
        let previous = at.checked_sub(1).and_then(|at| self.blocks.get_mut(at));
        if let Some(previous) = previous
            && block.first == offset
            && !previous.is_hole()
            && previous.len < previous.capacity()
        {
            let _ = space.write(previous.place, previous.len, &entry.encode(queue, offset));
            previous.len += 1;
            self.shrink_hole(at, offset + 1);
            return Ok(());
        }
        let class = (block.len > 64) as u8 + (block.len > 512) as u8;
        let filled = Block { first: offset, len: 1, place: space.allocate(class)?, class };
        let _ = space.write(filled.place, 0, &entry.encode(queue, offset));
        let before = Block { len: offset - block.first, ..block };
        let after = Block { first: offset + 1, len: block.end() - offset - 1, ..block };
        let parts = [before, filled, after].into_iter().filter(|part| part.len > 0);
        self.blocks.splice(at..=at, parts);
        Ok(())
    }

    fn shrink_hole(&mut self, at: usize, first: u64) {
        let Some(hole) = self.blocks.get_mut(at) else { return };
        hole.len = hole.end().saturating_sub(first);
        hole.first = first;
        if hole.len == 0 {
            self.blocks.remove(at);
        }
    }

    /// The entry of `offset`.
    pub fn get(&self, space: &IndexSpace, queue: QueueKey, offset: u64) -> Lookup {
        let Some(block) = self.position(offset).and_then(|at| self.blocks.get(at)) else {
            return Lookup::Outside;
        };
        if block.is_hole() {
            return Lookup::Lost(block.end());
        }
        let mut bytes = [0; ENTRY_BYTES];
        if !space.read(block.place, offset - block.first, &mut bytes) {
            return Lookup::Damaged;
        }
        Lookup::of(Entry::decode(&bytes, queue, offset), offset)
    }

    /// Marks entries that cannot be read, and could not be had from the log either, as lost.
    pub fn give_up_damaged(&mut self, space: &IndexSpace, queue: QueueKey, from: u64) {
        let lost = Entry { position: 0, length: 0, tag_hash: 0, store_ms: 0 };
        for block in self.blocks.iter().filter(|block| !block.is_hole() && block.end() > from) {
            for offset in block.first.max(from)..block.end() {
                if self.get(space, queue, offset) == Lookup::Damaged {
                    let _ = space.write(block.place, offset - block.first, &lost.encode(queue, offset));
                }
            }
        }
    }

    /// Looks at the entries from `from` up to (without) `to` until `see` says stop.
    pub fn walk(
        &self,
        space: &IndexSpace,
        queue: QueueKey,
        from: u64,
        to: u64,
        mut see: impl FnMut(u64, Lookup) -> bool,
    ) {
        let mut buffer = [0u8; 64 * ENTRY_BYTES];
        let mut offset = from;
        while offset < to {
            let Some(block) = self.position(offset).and_then(|at| self.blocks.get(at)) else { return };
            if block.is_hole() {
                if !see(offset, Lookup::Lost(block.end().min(to))) {
                    return;
                }
                offset = block.end();
                continue;
            }
            let count = (block.end().min(to) - offset).min(64) as usize;
            let Some(bytes) = buffer.get_mut(..count * ENTRY_BYTES) else { return };
            let read = space.read(block.place, offset - block.first, bytes);
            for entry in bytes.chunks_exact(ENTRY_BYTES) {
                let entry = if read { Entry::decode(entry, queue, offset) } else { None };
                if !see(offset, Lookup::of(entry, offset)) {
                    return;
                }
                offset += 1;
            }
        }
    }

    /// Drops whole blocks below `start`.
    pub fn trim(&mut self, space: &IndexSpace, start: u64) {
        let gone = self.blocks.partition_point(|block| block.end() <= start);
        for block in self.blocks.drain(..gone) {
            space.release(&block);
        }
        if self.blocks.capacity() > 2 * self.blocks.len() + 4 {
            self.blocks.shrink_to_fit();
        }
    }

    /// Lost ranges at or above `start`.
    pub fn holes(&self, start: u64) -> Vec<(u64, u64)> {
        let holes = self.blocks.iter().filter(|block| block.is_hole() && block.end() > start);
        holes.map(|block| (block.first.max(start), block.end())).collect()
    }

    /// Lost offsets within [from, to).
    pub fn lost(&self, from: u64, to: u64) -> u64 {
        let holes = self.blocks.iter().filter(|block| block.is_hole());
        holes.map(|block| block.end().min(to).saturating_sub(block.first.max(from))).sum()
    }

    fn position(&self, offset: u64) -> Option<usize> {
        let at = self.blocks.partition_point(|block| block.first <= offset).checked_sub(1)?;
        self.blocks.get(at).filter(|block| offset < block.end()).map(|_| at)
    }
}

/// What the index says of an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// It is there.
    Entry(Entry),
    /// It and those up to (without) this are lost.
    Lost(u64),
    /// The index is damaged here.
    Damaged,
    /// Not within the index.
    Outside,
}

impl Lookup {
    /// An entry without length stands for a message that is lost.
    fn of(entry: Option<Entry>, offset: u64) -> Self {
        match entry {
            None => Self::Damaged,
            Some(entry) if entry.length == 0 => Self::Lost(offset + 1),
            Some(entry) => Self::Entry(entry),
        }
    }
}
