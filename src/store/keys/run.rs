//! A file of the key index: the look-ups of one stretch of the log, sorted by hash.
//!
//! It consists of pages of 4096 bytes, each of which ends with its checksum: CRC-32C of shard id, first and
//! last position (8 bytes each), the page's number (4 bytes) and the page's bytes 0–4091. So a page of
//! another file or place never passes.
//!
//! | pages | content |
//! |---|---|
//! | 1 | header |
//! | b | Bloom filter |
//! | ⌈entries / 255⌉ | entries: hash (8), log position (8), sorted by both; 255 in each page but the last |
//! | ⌈entry pages / 511⌉ | index: the first hash (8) of each entry page; 511 in each page but the last |
//!
//! | at | bytes | header | meaning |
//! |---:|---:|---|---|
//! |  0 | 8 | magic | `HFKEYS01` |
//! |  8 | 8 | shard id | as in the log |
//! | 16 | 8 | first | first log position that the run covers |
//! | 24 | 8 | last | position behind the last that it covers |
//! | 32 | 8 | entries | how many |
//! | 40 | 4 | filter pages | b; 10 bits an entry, rounded up |
//! | 44 | 4 | level | 0 from memory; a merged run is one above its parts |
//! | 48 | 4 | index pages | how many |
//! | 52 | 4 | – | zero |
//! | 56 | 8 n | fences | first hash of each index page |
//! | 4092 | 4 | checksum | |
//!
//! Filter: a hash *h* belongs to page ⌊h·b / 2⁶⁴⌋, which has 32 736 bits, and sets seven of them there: with
//! m = h·9E3779B97F4A7C15₁₆ mod 2⁶⁴, m = m xor ⌊m / 2³²⌋, m = m·D6E8FEB86659FD93₁₆ mod 2⁶⁴, x the upper and
//! y the lower half of m with its lowest bit set, bit ⌊(x + i·y mod 2³²)·32736 / 2³²⌋ for i from 0 to 6.
//! Since pages follow the order of hashes, the filter of a run of any size is written with one page in memory.
//!
//! In memory stay the fences alone: 64 bytes per million entries. A look-up reads one page of the filter, and
//! for one hash in about a hundred that are not there, or one that is, an index page and an entry page.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::super::{
    codec::{Put, Reader},
    disk::{Disk, DiskFile},
};

/// A hash and the log position of a record that has it.
pub type Pair = (u64, u64);

const MAGIC: [u8; 8] = *b"HFKEYS01";
pub const PAGE: usize = 4096;
const BODY: usize = PAGE - 4;
const PAIR_BYTES: usize = 16;
/// Entries of a page.
pub const PAIRS: u64 = (BODY / PAIR_BYTES) as u64;
/// Hashes of an index page.
const HASHES: u64 = (BODY / 8) as u64;
const FENCES_AT: usize = 56;
/// Index pages whose first hashes fit into the header: some 65 million entries.
const MAX_FENCES: u64 = ((BODY - FENCES_AT) / 8) as u64;
const FILTER_BITS: u64 = BODY as u64 * 8;
const BITS_PER_ENTRY: u64 = 10;
const PROBES: u32 = 7;
/// Damaged entry pages of one hash that a look-up steps over before it gives up.
const MAX_DAMAGED: u32 = 16;
/// Pages written or read at once where a run goes by as a whole.
const BATCH: usize = 16;

/// What is in a run, as its header and name say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub shard_id: u64,
    /// First log position covered.
    pub first: u64,
    /// Position behind the last covered.
    pub last: u64,
    pub level: u32,
}

impl Extent {
    pub fn file_name(&self) -> String {
        format!("{:020}-{:020}.keys", self.first, self.last)
    }

    fn seed(&self) -> u32 {
        [self.shard_id, self.first, self.last]
            .iter()
            .fold(0, |crc, field| crc32c::crc32c_append(crc, &field.to_le_bytes()))
    }
}

/// First and last position, from a file's name.
pub fn positions_of(name: &str) -> Option<(u64, u64)> {
    let number = |text: &str| {
        (text.len() == 20 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
    };
    let (first, last) = name.strip_suffix(".keys")?.split_once('-')?;
    let (first, last) = (number(first)?, number(last)?);
    (first < last).then_some((first, last))
}

fn checksum(seed: u32, page: u32, body: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(seed, &page.to_le_bytes()), body)
}

fn filter_pages(entries: u64) -> u64 {
    entries.saturating_mul(BITS_PER_ENTRY).div_ceil(FILTER_BITS)
}

fn filter_page(hash: u64, pages: u32) -> u32 {
    // Below `pages`, so it fits.
    (u128::from(hash).wrapping_mul(u128::from(pages)) >> 64) as u32
}

/// The bits of a hash in its page of the filter.
fn filter_bits(hash: u64) -> impl Iterator<Item = usize> {
    let mixed = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    let (x, y) = ((mixed >> 32) as u32, mixed as u32 | 1);
    (0..PROBES).map(move |i| {
        let spread = u64::from(x.wrapping_add(i.wrapping_mul(y)));
        (spread.wrapping_mul(FILTER_BITS) >> 32) as usize
    })
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The `n`th hash of an index page's or the header's list.
fn hash_at(list: &[u8], n: u64) -> Option<u64> {
    let begin = usize::try_from(n).ok()?.checked_mul(8)?;
    Reader::new(list.get(begin..)?).u64()
}

/// The pairs of an entry page.
fn pairs(body: &[u8], count: u64) -> impl DoubleEndedIterator<Item = Pair> + '_ {
    let (pairs, _) = body.as_chunks::<PAIR_BYTES>();
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(pairs.len());
    pairs.get(..count).unwrap_or_default().iter().map(|pair| {
        let (hash, position) = pair.split_at(8);
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        (number(hash), number(position))
    })
}

/// An open run.
#[derive(Debug)]
pub struct Run {
    pub extent: Extent,
    pub entries: u64,
    pub path: PathBuf,
    file: Arc<dyn DiskFile>,
    seed: u32,
    filter_pages: u32,
    fences: Box<[u64]>,
    /// Something in it could not be read; told once.
    damaged: AtomicBool,
}

impl Run {
    /// Opens the run named by `extent`'s positions. Reads its header; the rest is checked when it is used.
    pub fn open(
        disk: &Arc<dyn Disk>,
        path: PathBuf,
        shard_id: u64,
        (first, last): (u64, u64),
    ) -> io::Result<Self> {
        let file = disk.open(&path)?;
        let mut page = vec![0; PAGE];
        file.read_at(&mut page, 0)?;
        let seed = Extent { shard_id, first, last, level: 0 }.seed();
        let body =
            checked(&page, seed, 0).ok_or_else(|| invalid("the header is damaged or not of this run"))?;
        let decode = || {
            let mut reader = Reader::new(body);
            if reader.array()? != MAGIC
                || (reader.u64()?, reader.u64()?, reader.u64()?) != (shard_id, first, last)
            {
                return None;
            }
            let (entries, filter_pages, level) = (reader.u64()?, reader.u32()?, reader.u32()?);
            let (fences, _) = (reader.u32()?, reader.u32()?);
            let fences: Option<Box<[u64]>> = (0..fences).map(|_| reader.u64()).collect();
            Some((entries, filter_pages, level, fences?))
        };
        let (entries, filter_pages, level, fences) =
            decode().ok_or_else(|| invalid("the header is of no run"))?;
        let extent = Extent { shard_id, first, last, level };
        let damaged = AtomicBool::new(false);
        let run = Self { extent, entries, path, file, seed, filter_pages, fences, damaged };
        let index_pages = run.entry_pages().div_ceil(HASHES);
        if index_pages != run.fences.len() as u64 || run.file.len()? != run.bytes() {
            return Err(invalid("the length is not what the header says"));
        }
        Ok(run)
    }

    pub fn bytes(&self) -> u64 {
        let pages = self.index_begin().saturating_add(self.fences.len() as u64);
        pages.saturating_mul(PAGE as u64)
    }

    pub fn is_damaged(&self) -> bool {
        self.damaged.load(Ordering::Acquire)
    }

    /// Says once that something in the run cannot be read; answers whether this was the first time.
    pub fn note_damage(&self, error: &io::Error) -> bool {
        let first = !self.damaged.swap(true, Ordering::AcqRel);
        if first {
            tracing::warn!(
                event = "storage.keys_damaged",
                file = %self.path.display(),
                %error,
                begin = self.extent.first,
                end = self.extent.last,
                "a file of the key index is damaged: it is rebuilt from the log, and look-ups that need it are \
                 refused until then"
            );
        }
        first
    }

    /// Appends positions of `hash` to `into`, newest first, until it holds `wanted`. Unreadable pages count
    /// as empty; the first error comes back.
    pub fn find(&self, hash: u64, wanted: usize, into: &mut Vec<u64>) -> io::Result<()> {
        let mut page = vec![0; PAGE];
        // A filter that cannot be read excludes nothing.
        let mut outcome = Ok(());
        match self.may_hold(hash, &mut page) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => outcome = Err(error),
        }
        let Some(mut at) = self.last_page_of(hash, &mut page)? else { return outcome };
        let mut damaged: u32 = 0;
        while into.len() < wanted {
            let goes_on = match self.read(self.entries_begin().saturating_add(at), &mut page) {
                Ok(body) => {
                    let found = pairs(body, self.pairs_in(at)).rev().skip_while(|pair| pair.0 > hash);
                    for (_, position) in found.take_while(|pair| pair.0 == hash) {
                        if into.len() >= wanted {
                            break;
                        }
                        push(into, position);
                    }
                    pairs(body, 1).next().is_some_and(|first| first.0 == hash)
                }
                Err(error) => {
                    outcome = outcome.and(Err(error));
                    damaged = damaged.saturating_add(1);
                    // Whether earlier pages have it too the index knows.
                    damaged < MAX_DAMAGED && self.first_hash(at, &mut page)? == Some(hash)
                }
            };
            match at.checked_sub(1) {
                Some(before) if goes_on => at = before,
                _ => break,
            }
        }
        outcome
    }

    fn may_hold(&self, hash: u64, page: &mut [u8]) -> io::Result<bool> {
        if self.entries == 0 {
            return Ok(false);
        }
        let filter = self.read(u64::from(filter_page(hash, self.filter_pages)).saturating_add(1), page)?;
        Ok(filter_bits(hash).all(|bit| filter.get(bit / 8).is_some_and(|byte| byte & (1 << (bit % 8)) != 0)))
    }

    /// The last entry page that can hold `hash`.
    fn last_page_of(&self, hash: u64, page: &mut [u8]) -> io::Result<Option<u64>> {
        let Some(index) = self.fences.partition_point(|fence| *fence <= hash).checked_sub(1) else {
            return Ok(None);
        };
        let index = index as u64;
        let begin = index.saturating_mul(HASHES);
        let count = self.entry_pages().saturating_sub(begin).min(HASHES);
        let body = self.read(self.index_begin().saturating_add(index), page)?;
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low.midpoint(high);
            if hash_at(body, middle).is_some_and(|first| first <= hash) {
                low = middle.saturating_add(1);
            } else {
                high = middle;
            }
        }
        Ok(low.checked_sub(1).map(|within| begin.saturating_add(within)))
    }

    /// First hash of an entry page, from the index.
    fn first_hash(&self, entry_page: u64, page: &mut [u8]) -> io::Result<Option<u64>> {
        let body = self.read(self.index_begin().saturating_add(entry_page / HASHES), page)?;
        Ok(hash_at(body, entry_page % HASHES))
    }

    fn entries_begin(&self) -> u64 {
        u64::from(self.filter_pages).saturating_add(1)
    }

    fn index_begin(&self) -> u64 {
        self.entries_begin().saturating_add(self.entry_pages())
    }

    fn entry_pages(&self) -> u64 {
        self.entries.div_ceil(PAIRS)
    }

    /// Pairs in an entry page.
    fn pairs_in(&self, entry_page: u64) -> u64 {
        self.entries.saturating_sub(entry_page.saturating_mul(PAIRS)).min(PAIRS)
    }

    /// Reads and checks one page.
    fn read<'a>(&self, number: u64, page: &'a mut [u8]) -> io::Result<&'a [u8]> {
        self.file.read_at(page, number.saturating_mul(PAGE as u64))?;
        self.checked(page, number)
    }

    fn checked<'a>(&self, page: &'a [u8], number: u64) -> io::Result<&'a [u8]> {
        let body = u32::try_from(number).ok().and_then(|number| checked(page, self.seed, number));
        body.ok_or_else(|| invalid(&format!("page {number} does not fit its checksum")))
    }

    /// Reads and checks every page.
    pub fn verify(&self) -> io::Result<()> {
        let mut page = vec![0; PAGE];
        let pages = self.index_begin().saturating_add(self.fences.len() as u64);
        (0..pages).try_for_each(|number| self.read(number, &mut page).map(|_| ()))
    }

    /// All pairs in order, for a merge.
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor {
            run: self,
            next: 0,
            pairs: Vec::new().into_iter(),
            buffer: vec![0; PAGE.saturating_mul(BATCH)],
        }
    }
}

/// The shard that a file says it belongs to.
pub fn shard_id(disk: &Arc<dyn Disk>, path: &Path) -> Option<u64> {
    let mut bytes = [0; 16];
    disk.open(path).and_then(|file| file.read_at(&mut bytes, 0)).ok()?;
    let mut reader = Reader::new(&bytes);
    (reader.array()? == MAGIC).then(|| reader.u64())?
}

fn checked(page: &[u8], seed: u32, number: u32) -> Option<&[u8]> {
    let (body, crc) = page.split_at_checked(BODY)?;
    (Reader::new(crc).u32()? == checksum(seed, number, body)).then_some(body)
}

/// Adds a position, unless it was the last: a message may have the same key twice.
pub fn push(into: &mut Vec<u64>, position: u64) {
    if into.last() != Some(&position) {
        into.push(position);
    }
}

/// Goes through a run with little memory. Stops at what it cannot read.
pub struct Cursor<'a> {
    run: &'a Run,
    /// Entry page to read next.
    next: u64,
    pairs: std::vec::IntoIter<Pair>,
    buffer: Vec<u8>,
}

impl Cursor<'_> {
    pub fn next(&mut self) -> io::Result<Option<Pair>> {
        loop {
            if let Some(pair) = self.pairs.next() {
                return Ok(Some(pair));
            }
            let left = self.run.entry_pages().saturating_sub(self.next);
            let pages = usize::try_from(left).unwrap_or(usize::MAX).min(BATCH);
            if pages == 0 {
                return Ok(None);
            }
            let begin = self.run.entries_begin().saturating_add(self.next);
            let bytes = self.buffer.get_mut(..pages.saturating_mul(PAGE)).unwrap_or_default();
            self.run.file.read_at(bytes, begin.saturating_mul(PAGE as u64))?;
            let mut read = Vec::new();
            for page in bytes.chunks_exact(PAGE) {
                let number = self.run.entries_begin().saturating_add(self.next);
                read.extend(pairs(self.run.checked(page, number)?, self.run.pairs_in(self.next)));
                self.next = self.next.saturating_add(1);
            }
            self.pairs = read.into_iter();
        }
    }
}

/// Makes a run of at most `most` pairs, which `fill` gives sorted: temporary name, sync, rename, directory
/// sync. Nothing is left of it when it fails.
pub fn write(
    disk: &Arc<dyn Disk>,
    dir: &Path,
    extent: Extent,
    most: u64,
    fill: impl FnOnce(&mut Writer) -> io::Result<()>,
) -> io::Result<Run> {
    let path = dir.join(extent.file_name());
    let temporary = path.with_extension("tmp");
    match disk.remove(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = Writer::new(disk.create(&temporary)?, extent, most).and_then(|mut writer| {
        fill(&mut writer)?;
        writer.finish()
    });
    let renamed = written.and_then(|()| disk.rename(&temporary, &path));
    if renamed.is_err() {
        let _ = disk.remove(&temporary);
    }
    renamed?;
    disk.sync_dir(dir)?;
    Run::open(disk, path, extent.shard_id, (extent.first, extent.last))
}

/// Writes the pages of a run as its pairs come.
pub struct Writer {
    extent: Extent,
    file: Arc<dyn DiskFile>,
    seed: u32,
    entries: u64,
    previous: Option<Pair>,
    filter_pages: u32,
    filter: Pages,
    filter_body: Vec<u8>,
    pairs: Pages,
    pairs_body: Vec<u8>,
    /// First hash of each entry page.
    first_hashes: Vec<u64>,
}

impl Writer {
    fn new(file: Arc<dyn DiskFile>, extent: Extent, most: u64) -> io::Result<Self> {
        if most.div_ceil(PAIRS).div_ceil(HASHES) > MAX_FENCES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many entries for one run"));
        }
        let filter_pages = u32::try_from(filter_pages(most)).map_err(io::Error::other)?;
        let seed = extent.seed();
        Ok(Self {
            extent,
            seed,
            entries: 0,
            previous: None,
            filter_pages,
            filter: Pages::new(&file, seed, 1),
            filter_body: vec![0; BODY],
            pairs: Pages::new(&file, seed, filter_pages.saturating_add(1)),
            pairs_body: Vec::with_capacity(BODY),
            first_hashes: Vec::new(),
            file,
        })
    }

    /// Adds a pair; they come sorted. One that is there is passed over.
    pub fn push(&mut self, pair: Pair) -> io::Result<()> {
        if self.previous == Some(pair) {
            return Ok(());
        }
        self.previous = Some(pair);
        self.fill_filter_up_to(filter_page(pair.0, self.filter_pages))?;
        for bit in filter_bits(pair.0) {
            if let Some(byte) = self.filter_body.get_mut(bit / 8) {
                *byte |= 1 << (bit % 8);
            }
        }
        if self.pairs_body.is_empty() {
            self.first_hashes.push(pair.0);
        }
        self.pairs_body.put_u64(pair.0);
        self.pairs_body.put_u64(pair.1);
        self.entries = self.entries.saturating_add(1);
        if self.entries.is_multiple_of(PAIRS) {
            self.pairs.write(&mut self.pairs_body)?;
        }
        Ok(())
    }

    /// Writes the pages of the filter before `page`.
    fn fill_filter_up_to(&mut self, page: u32) -> io::Result<()> {
        while self.filter.next < page.saturating_add(1) {
            self.filter.write(&mut self.filter_body)?;
            self.filter_body.resize(BODY, 0);
        }
        Ok(())
    }

    /// Writes what is left and the header, and makes all of it durable.
    fn finish(mut self) -> io::Result<()> {
        self.fill_filter_up_to(self.filter_pages)?;
        self.filter.flush()?;
        if !self.pairs_body.is_empty() {
            self.pairs.write(&mut self.pairs_body)?;
        }
        let mut fences = Vec::new();
        for hashes in self.first_hashes.chunks(HASHES as usize) {
            fences.extend(hashes.first());
            let mut body = Vec::with_capacity(BODY);
            hashes.iter().for_each(|hash| body.put_u64(*hash));
            self.pairs.write(&mut body)?;
        }
        self.pairs.flush()?;
        let mut header = Pages::new(&self.file, self.seed, 0);
        header.write(&mut self.header(&fences)?)?;
        header.flush()?;
        self.file.sync_data()
    }

    fn header(&self, fences: &[u64]) -> io::Result<Vec<u8>> {
        let mut header = Vec::with_capacity(BODY);
        header.put(&MAGIC);
        header.put_u64(self.extent.shard_id);
        header.put_u64(self.extent.first);
        header.put_u64(self.extent.last);
        header.put_u64(self.entries);
        header.put_u32(self.filter_pages);
        header.put_u32(self.extent.level);
        header.put_u32(u32::try_from(fences.len()).map_err(io::Error::other)?);
        header.put_u32(0);
        fences.iter().for_each(|fence| header.put_u64(*fence));
        Ok(header)
    }
}

/// Pages that follow each other, written in batches.
struct Pages {
    file: Arc<dyn DiskFile>,
    seed: u32,
    /// Number of the next page.
    next: u32,
    buffer: Vec<u8>,
}

impl Pages {
    fn new(file: &Arc<dyn DiskFile>, seed: u32, next: u32) -> Self {
        Self { file: Arc::clone(file), seed, next, buffer: Vec::new() }
    }

    /// Takes the body, pads it, adds its checksum.
    fn write(&mut self, body: &mut Vec<u8>) -> io::Result<()> {
        body.resize(BODY, 0);
        self.buffer.put(body);
        self.buffer.put_u32(checksum(self.seed, self.next, body));
        body.clear();
        self.next = self.next.saturating_add(1);
        if self.buffer.len() >= BATCH.saturating_mul(PAGE) { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let end = u64::from(self.next).saturating_mul(PAGE as u64);
        let at = end.saturating_sub(self.buffer.len() as u64);
        self.file.write_at(&self.buffer, at)?;
        // So that the sync at the end, which the log's may wait for, finds little to do.
        self.file.start_writeback(at, self.buffer.len() as u64);
        self.buffer.clear();
        Ok(())
    }
}
