//! A file system in memory that knows what a crash may take: for tests that pull the plug at every write.
//!
//! Each file has a *durable* image and the writes since its last sync; names become durable with the sync of
//! their directory, apart from contents. Where nothing but zeros was written nothing is kept, so preparing a
//! segment of many megabytes costs next to nothing.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt, io, iter,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::{Mutex, MutexGuard};

use super::{Disk, DiskFile, Region};

/// What is copied when a byte is changed that durable and current image share.
const PAGE: usize = 4096;
/// What a device writes whole or not at all.
const SECTOR: u64 = 512;
/// Room on a disk for which no other capacity was asked.
const CAPACITY: u64 = 1 << 40;
const ZEROS: [u8; PAGE] = [0; PAGE];

/// What is left after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashKeeps {
    /// A power cut that takes all it may: synced contents under synced names.
    Synced,
    /// The end of the process only: everything written is there, and what was not synced still is not.
    Everything,
    /// As `Everything`, with a part from the beginning of the write that was cut short.
    Torn {
        /// Decides how much.
        seed: u64,
    },
    /// A power cut that takes any of what it may: each sector is left as it was after one of the writes since
    /// the last sync or before all of them (the write that was cut short included), each file gets one of the
    /// lengths it had since then, and each unsynced change of a name happens or does not.
    Sectors {
        /// Decides each of them.
        seed: u64,
    },
}

/// Files in memory. Clones are the same disk.
#[derive(Clone)]
pub struct MemoryDisk {
    machine: Arc<Machine>,
}

impl MemoryDisk {
    /// An empty disk that never crashes by itself.
    pub fn new() -> Self {
        Self { machine: Machine::new(State::default(), CAPACITY) }
    }

    /// An empty disk whose machine dies in place of the mutating call (write, sync, creation, renaming, removal,
    /// allocation, flush of a region) that follows the first `operations` of them. That call and all later ones
    /// fail.
    pub fn crash_at(operations: u64) -> Self {
        let disk = Self::new();
        disk.set_crash_at(Some(operations));
        disk
    }

    /// An empty disk of `bytes`.
    pub fn with_capacity(bytes: u64) -> Self {
        Self { machine: Machine::new(State::default(), bytes) }
    }

    /// Changes the size of the disk. It may be smaller than what is on it; then nothing more fits.
    pub fn set_capacity(&self, bytes: u64) {
        self.machine.space.capacity.store(bytes, Ordering::SeqCst);
    }

    /// As [`MemoryDisk::crash_at`], for a disk that has been in use: counted from its beginning.
    pub fn set_crash_at(&self, operations: Option<u64>) {
        self.machine.state.lock().crash_at = operations;
    }

    /// As [`MemoryDisk::crash_at`], counted from now.
    pub fn crash_in(&self, operations: u64) {
        let mut state = self.machine.state.lock();
        state.crash_at = Some(state.operations + operations);
    }

    /// Inverts the bits of `mask` in one byte of a file, durably and uncounted, as a failing device would.
    /// `false` where there is no such byte.
    pub fn flip(&self, path: &Path, at: u64, mask: u8) -> bool {
        let state = self.machine.state.lock();
        let Some(link) = state.names.get(path) else { return false };
        let mut content = link.inode.content.lock();
        let inside = at < content.current.len;
        if inside {
            let Content { current, durable, .. } = &mut *content;
            for image in [current, durable] {
                let mut byte = [0];
                image.copy(&mut byte, at);
                image.write(&byte.map(|byte| byte ^ mask), at);
            }
        }
        inside
    }

    /// Cuts a file to at most `len` bytes, durably and uncounted.
    pub fn cut(&self, path: &Path, len: u64) {
        let state = self.machine.state.lock();
        let Some(link) = state.names.get(path) else { return };
        let mut content = link.inode.content.lock();
        content.sync();
        if len < content.current.len {
            content.current.cut(len);
            content.durable.cut(len);
            link.charge.set(len);
        }
    }

    /// Crashes now.
    pub fn crash(&self) {
        let _state = self.machine.state.lock();
        self.machine.crashed.store(true, Ordering::SeqCst);
    }

    /// Whether the machine is gone.
    pub fn crashed(&self) -> bool {
        self.machine.crashed.load(Ordering::SeqCst)
    }

    /// Mutating calls that took effect so far.
    pub fn operations(&self) -> u64 {
        self.machine.state.lock().operations
    }

    /// The disk as the machine finds it when it starts again. This one stays as it is.
    pub fn after_crash(&self, keeps: CrashKeeps) -> Self {
        let state = self.machine.state.lock();
        let capacity = self.machine.space.capacity.load(Ordering::SeqCst);
        let disk = Self { machine: Machine::new(State::default(), capacity) };
        let mut found = disk.machine.state.lock();
        found.dirs = state.dirs.clone();
        found.inodes = state.inodes;
        let mut copies: HashMap<u64, Arc<Inode>> = HashMap::new();
        let mut copy = |inode: &Arc<Inode>| {
            let copy = copies.entry(inode.id).or_insert_with(|| {
                let content = inode.content.lock().after_crash(keeps, inode.id);
                Arc::new(Inode { id: inode.id, content: Mutex::new(content) })
            });
            Arc::clone(copy)
        };
        let mut durable = state.durable.clone();
        let names = match keeps {
            CrashKeeps::Everything | CrashKeeps::Torn { .. } => {
                found.durable = durable.iter().map(|(path, inode)| (path.clone(), copy(inode))).collect();
                let unsynced = state.unsynced.iter();
                found.unsynced = unsynced.map(|change| change.with(&mut copy)).collect();
                state.names.iter().map(|(path, link)| (path.clone(), copy(&link.inode))).collect()
            }
            CrashKeeps::Synced | CrashKeeps::Sectors { .. } => {
                if let CrashKeeps::Sectors { seed } = keeps {
                    for (number, change) in (0..).zip(&state.unsynced) {
                        if pick(seed, u64::MAX, number, 2) == 1 {
                            change.apply(&mut durable);
                        }
                    }
                }
                let left: BTreeMap<_, _> =
                    durable.iter().map(|(path, inode)| (path.clone(), copy(inode))).collect();
                found.durable.clone_from(&left);
                left
            }
        };
        for (path, inode) in names {
            let bytes = inode.content.lock().current.len;
            let charge = disk.machine.space.charge();
            charge.set(bytes);
            found.names.insert(path, Link { inode, charge });
        }
        drop(found);
        disk
    }
}

impl Default for MemoryDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDisk").field("crashed", &self.crashed()).finish_non_exhaustive()
    }
}

impl Disk for MemoryDisk {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let state = self.machine.look()?;
        let link = state.names.get(path).cloned().ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(MemoryFile { machine: Arc::clone(&self.machine), link }))
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.machine.change()?;
        let link = state.create(path, &self.machine.space)?;
        Ok(Arc::new(MemoryFile { machine: Arc::clone(&self.machine), link }))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        if self.machine.look()?.dirs.contains(path) {
            return Ok(());
        }
        let mut state = self.machine.change()?;
        if path.ancestors().any(|above| state.names.contains_key(above)) {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        state.dirs.extend(path.ancestors().map(Path::to_owned));
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let state = self.machine.look()?;
        let below = state.names.range(dir.to_owned()..).map(|(path, _)| path);
        let here = below.take_while(|path| path.starts_with(dir)).filter(|path| path.parent() == Some(dir));
        let mut names: Vec<String> =
            here.filter_map(|path| path.file_name()?.to_str().map(str::to_owned)).collect();
        names.sort();
        Ok(names)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.machine.change()?;
        state.parent(to)?;
        let link = state.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        let inode = Arc::clone(&link.inode);
        state.names.insert(to.to_owned(), link);
        let (from, to) = (from.to_owned(), to.to_owned());
        if from.parent() == to.parent() {
            state.unsynced.push(NameChange { unset: Some(from), set: Some((to, inode)) });
        } else {
            state.unsynced.push(NameChange { unset: None, set: Some((to, inode)) });
            state.unsynced.push(NameChange { unset: Some(from), set: None });
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.machine.change()?;
        state.names.remove(path).ok_or(io::ErrorKind::NotFound)?;
        state.unsynced.push(NameChange { unset: Some(path.to_owned()), set: None });
        Ok(())
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.machine.change()?;
        if !state.has_dir(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let State { unsynced, durable, .. } = &mut *state;
        unsynced.retain(|change| {
            let here = change.dir() == Some(dir);
            if here {
                change.apply(durable);
            }
            !here
        });
        Ok(())
    }

    fn free_bytes(&self, _dir: &Path) -> io::Result<u64> {
        drop(self.machine.look()?);
        Ok(self.machine.space.free())
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn Send + Sync>> {
        if !self.machine.look()?.names.contains_key(path) {
            self.machine.change()?.create(path, &self.machine.space)?;
        }
        let mut state = self.machine.look()?;
        if !state.locks.insert(path.to_owned()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(Lock { machine: Arc::clone(&self.machine), path: path.to_owned() }))
    }
}

/// The computer. Its state's lock is taken before that of a file's content.
struct Machine {
    state: Mutex<State>,
    crashed: AtomicBool,
    space: Arc<Space>,
}

impl Machine {
    fn new(state: State, capacity: u64) -> Arc<Self> {
        let space = Arc::new(Space { capacity: AtomicU64::new(capacity), used: AtomicU64::new(0) });
        Arc::new(Self { state: Mutex::new(state), crashed: AtomicBool::new(false), space })
    }

    /// For a call that changes nothing.
    fn look(&self) -> Result<MutexGuard<'_, State>, Gone> {
        let state = self.state.lock();
        if self.crashed.load(Ordering::SeqCst) { Err(Gone { now: false }) } else { Ok(state) }
    }

    /// For a call that changes something: the one that the crash may come before.
    fn change(&self) -> Result<MutexGuard<'_, State>, Gone> {
        let mut state = self.look()?;
        if state.crash_at == Some(state.operations) {
            self.crashed.store(true, Ordering::SeqCst);
            return Err(Gone { now: true });
        }
        state.operations += 1;
        Ok(state)
    }
}

/// The machine is gone; `now`: by this very call.
struct Gone {
    now: bool,
}

impl From<Gone> for io::Error {
    fn from(_: Gone) -> Self {
        Self::other("the machine has crashed")
    }
}

#[derive(Default)]
struct State {
    crash_at: Option<u64>,
    operations: u64,
    /// Number of files ever made.
    inodes: u64,
    dirs: BTreeSet<PathBuf>,
    names: BTreeMap<PathBuf, Link>,
    durable: BTreeMap<PathBuf, Arc<Inode>>,
    /// What has to happen to `durable` until it is like `names`.
    unsynced: Vec<NameChange>,
    locks: BTreeSet<PathBuf>,
}

impl State {
    fn has_dir(&self, dir: &Path) -> bool {
        self.dirs.contains(dir) || dir.parent().is_none()
    }

    fn parent(&self, path: &Path) -> io::Result<()> {
        let there = path.parent().is_some_and(|dir| self.has_dir(dir));
        if there { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn create(&mut self, path: &Path, space: &Arc<Space>) -> io::Result<Link> {
        self.parent(path)?;
        if self.names.contains_key(path) || self.dirs.contains(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = Arc::new(Inode { id: self.inodes, content: Mutex::default() });
        self.inodes += 1;
        let link = Link { inode: Arc::clone(&inode), charge: space.charge() };
        self.names.insert(path.to_owned(), link.clone());
        self.unsynced.push(NameChange { unset: None, set: Some((path.to_owned(), inode)) });
        Ok(link)
    }
}

/// One step of a directory; both parts together or neither.
struct NameChange {
    unset: Option<PathBuf>,
    set: Option<(PathBuf, Arc<Inode>)>,
}

impl NameChange {
    fn dir(&self) -> Option<&Path> {
        self.unset.as_deref().or(self.set.as_ref().map(|(path, _)| path.as_path()))?.parent()
    }

    fn apply(&self, names: &mut BTreeMap<PathBuf, Arc<Inode>>) {
        if let Some(path) = &self.unset {
            names.remove(path);
        }
        if let Some((path, inode)) = &self.set {
            names.insert(path.clone(), Arc::clone(inode));
        }
    }

    fn with(&self, copy: &mut impl FnMut(&Arc<Inode>) -> Arc<Inode>) -> Self {
        let set = self.set.as_ref().map(|(path, inode)| (path.clone(), copy(inode)));
        Self { unset: self.unset.clone(), set }
    }
}

struct Lock {
    machine: Arc<Machine>,
    path: PathBuf,
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.machine.state.lock().locks.remove(&self.path);
    }
}

struct Space {
    capacity: AtomicU64,
    used: AtomicU64,
}

impl Space {
    fn free(&self) -> u64 {
        self.capacity.load(Ordering::SeqCst).saturating_sub(self.used.load(Ordering::SeqCst))
    }

    fn charge(self: &Arc<Self>) -> Arc<Charge> {
        Arc::new(Charge { space: Arc::clone(self), bytes: AtomicU64::new(0) })
    }
}

/// The room a file takes, given back when it has neither a name nor a user.
struct Charge {
    space: Arc<Space>,
    bytes: AtomicU64,
}

impl Charge {
    fn set(&self, bytes: u64) {
        let old = self.bytes.swap(bytes, Ordering::SeqCst);
        self.space.used.fetch_add(bytes.wrapping_sub(old), Ordering::SeqCst);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// How a name or an open file refers to a file.
#[derive(Clone)]
struct Link {
    inode: Arc<Inode>,
    charge: Arc<Charge>,
}

struct Inode {
    id: u64,
    content: Mutex<Content>,
}

#[derive(Clone, Default)]
struct Content {
    current: Image,
    durable: Image,
    /// Since the last sync, in order.
    writes: Vec<Write>,
    /// Lengths that the file got since the last sync.
    lengths: Vec<u64>,
    /// Sectors changed through a region since the last sync.
    mapped: BTreeSet<u64>,
    /// Pages that may differ between the images.
    dirty: BTreeSet<u64>,
    /// The write that the crash came before.
    torn: Option<Write>,
}

impl Content {
    fn write(&mut self, bytes: &[u8], at: u64) {
        if self.set(bytes, at) {
            self.writes.push(Write { at, bytes: bytes.into() });
        }
        self.grow(at + bytes.len() as u64);
    }

    /// Changes the current image; whether that made a difference.
    fn set(&mut self, bytes: &[u8], at: u64) -> bool {
        let mut changed = false;
        for (page, within, piece) in pieces(at, bytes.len()) {
            if self.current.put(page, within, bytes.get(piece).unwrap_or_default()) {
                self.dirty.insert(page);
                changed = true;
            }
        }
        changed
    }

    fn grow(&mut self, len: u64) {
        if len > self.current.len {
            self.current.len = len;
            self.lengths.push(len);
        }
    }

    fn sync(&mut self) {
        for page in std::mem::take(&mut self.dirty) {
            match self.current.pages.get(&page) {
                Some(bytes) => self.durable.pages.insert(page, Arc::clone(bytes)),
                None => self.durable.pages.remove(&page),
            };
        }
        self.durable.len = self.current.len;
        self.writes.clear();
        self.lengths.clear();
        self.mapped.clear();
    }

    fn after_crash(&self, keeps: CrashKeeps, id: u64) -> Self {
        let image = match keeps {
            CrashKeeps::Everything => return Self { torn: None, ..self.clone() },
            CrashKeeps::Torn { seed } => {
                let mut left = Self { torn: None, ..self.clone() };
                if let Some(torn) = &self.torn {
                    let kept = pick(seed, id, u64::MAX, torn.bytes.len() as u64 + 1);
                    let kept = usize::try_from(kept).unwrap_or_default();
                    left.write(torn.bytes.get(..kept).unwrap_or_default(), torn.at);
                }
                return left;
            }
            CrashKeeps::Synced => self.durable.clone(),
            CrashKeeps::Sectors { seed } => self.any_of(seed, id),
        };
        Self { current: image.clone(), durable: image, ..Self::default() }
    }

    /// The durable image with any of what came later.
    fn any_of(&self, seed: u64, id: u64) -> Image {
        let mut image = self.durable.clone();
        let mut sectors: BTreeMap<u64, Vec<&Write>> = BTreeMap::new();
        for write in self.writes.iter().chain(&self.torn) {
            for sector in write.at / SECTOR..write.end().div_ceil(SECTOR) {
                sectors.entry(sector).or_default().push(write);
            }
        }
        for sector in &self.mapped {
            sectors.entry(*sector).or_default();
        }
        for (sector, writes) in sectors {
            let mapped = self.mapped.contains(&sector);
            let versions = writes.len() + 1 + usize::from(mapped);
            let kept = usize::try_from(pick(seed, id, sector, versions as u64)).unwrap_or_default();
            let place = sector * SECTOR..(sector + 1) * SECTOR;
            for write in writes.iter().take(kept) {
                let (at, bytes) = write.within(&place);
                image.write(bytes, at);
            }
            if kept > writes.len() {
                let mut bytes = [0; SECTOR as usize];
                self.current.copy(&mut bytes, place.start);
                image.write(&bytes, place.start);
            }
        }
        let torn = self.torn.iter().map(Write::end).filter(|end| *end > self.current.len);
        let lengths: Vec<u64> =
            iter::once(self.durable.len).chain(self.lengths.iter().copied()).chain(torn).collect();
        let kept = pick(seed, id, u64::MAX, lengths.len() as u64);
        let kept = usize::try_from(kept).unwrap_or_default();
        image.cut(lengths.get(kept).copied().unwrap_or_default());
        image
    }
}

#[derive(Clone)]
struct Write {
    at: u64,
    bytes: Arc<[u8]>,
}

impl Write {
    fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }

    /// The part that lies in `place`.
    fn within(&self, place: &Range<u64>) -> (u64, &[u8]) {
        let (begin, end) = (self.at.max(place.start), self.end().min(place.end));
        let skip = usize::try_from(begin - self.at).unwrap_or_default();
        let len = usize::try_from(end.saturating_sub(begin)).unwrap_or_default();
        (begin, self.bytes.get(skip..skip + len).unwrap_or_default())
    }
}

/// A file's bytes; pages that are not there are zeros.
#[derive(Clone, Default)]
struct Image {
    len: u64,
    pages: BTreeMap<u64, Arc<[u8; PAGE]>>,
}

impl Image {
    /// Changes bytes of one page; whether that could make a difference.
    fn put(&mut self, page: u64, within: usize, bytes: &[u8]) -> bool {
        if !self.pages.contains_key(&page) && ZEROS.get(..bytes.len()) == Some(bytes) {
            return false;
        }
        let page = self.pages.entry(page).or_insert_with(|| Arc::new(ZEROS));
        if let Some(old) = Arc::make_mut(page).get_mut(within..within + bytes.len()) {
            old.copy_from_slice(bytes);
        }
        true
    }

    /// Writes without minding the length.
    fn write(&mut self, bytes: &[u8], at: u64) {
        for (page, within, piece) in pieces(at, bytes.len()) {
            self.put(page, within, bytes.get(piece).unwrap_or_default());
        }
    }

    fn copy(&self, into: &mut [u8], at: u64) {
        for (page, within, piece) in pieces(at, into.len()) {
            let Some(into) = into.get_mut(piece) else { continue };
            match self.pages.get(&page).and_then(|page| page.get(within..within + into.len())) {
                Some(bytes) => into.copy_from_slice(bytes),
                None => into.fill(0),
            }
        }
    }

    /// Gives it a length; nothing is kept behind it.
    fn cut(&mut self, len: u64) {
        self.len = len;
        let (last, within) = split(len);
        drop(self.pages.split_off(&(last + 1)));
        if let Some(bytes) = self.pages.get_mut(&last).and_then(|page| Arc::make_mut(page).get_mut(within..))
        {
            bytes.fill(0);
        }
    }
}

/// Page and place in it.
fn split(at: u64) -> (u64, usize) {
    (at / PAGE as u64, usize::try_from(at % PAGE as u64).unwrap_or_default())
}

/// The parts of `len` bytes at `at` by page: its number, the place in it, the part.
fn pieces(at: u64, len: usize) -> impl Iterator<Item = (u64, usize, Range<usize>)> {
    let mut done = 0;
    iter::from_fn(move || {
        let begin = done;
        let (page, within) = split(at + begin as u64);
        done = len.min(begin + PAGE - within);
        (begin < done).then_some((page, within, begin..done))
    })
}

/// A number below `below` (or 0), the same for the same arguments.
fn pick(seed: u64, a: u64, b: u64, below: u64) -> u64 {
    let mut mixed = seed;
    for part in [a, b] {
        // SplitMix64.
        mixed = (mixed ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
    }
    mixed % below.max(1)
}

struct MemoryFile {
    machine: Arc<Machine>,
    link: Link,
}

impl MemoryFile {
    /// Takes room for the file to be `len` long.
    fn charge(&self, content: &Content, len: u64) -> io::Result<()> {
        if len > content.current.len {
            if len - content.current.len > self.machine.space.free() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.link.charge.set(len);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let _state = self.machine.change()?;
        self.link.inode.content.lock().sync();
        Ok(())
    }
}

impl fmt::Debug for MemoryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryFile").field("id", &self.link.inode.id).finish_non_exhaustive()
    }
}

impl DiskFile for MemoryFile {
    fn len(&self) -> io::Result<u64> {
        drop(self.machine.look()?);
        Ok(self.link.inode.content.lock().current.len)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let end = at.checked_add(bytes.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let state = self.machine.change();
        let mut content = self.link.inode.content.lock();
        match state {
            Ok(_state) => {
                self.charge(&content, end)?;
                content.write(bytes, at);
                Ok(())
            }
            Err(gone) => {
                if gone.now {
                    content.torn = Some(Write { at, bytes: bytes.into() });
                }
                Err(gone.into())
            }
        }
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        if self.read_at_now(into, at)? { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn read_at_now(&self, into: &mut [u8], at: u64) -> io::Result<bool> {
        drop(self.machine.look()?);
        let content = self.link.inode.content.lock();
        let inside = at.checked_add(into.len() as u64).is_some_and(|end| end <= content.current.len);
        if inside {
            content.current.copy(into, at);
        }
        Ok(inside)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let _state = self.machine.change()?;
        let mut content = self.link.inode.content.lock();
        self.charge(&content, len)?;
        content.grow(len);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.sync()
    }

    fn will_need(&self, _at: u64, _len: u64) {}

    fn start_writeback(&self, _at: u64, _len: u64) {}

    fn finish_writeback(&self, _at: u64, _len: u64) {}

    fn map(&self) -> io::Result<Arc<dyn Region>> {
        let len = usize::try_from(self.len()?).map_err(io::Error::other)?;
        let file = Self { machine: Arc::clone(&self.machine), link: self.link.clone() };
        Ok(Arc::new(MemoryRegion { file, len }))
    }
}

#[derive(Debug)]
struct MemoryRegion {
    file: MemoryFile,
    len: usize,
}

impl MemoryRegion {
    fn inside(&self, at: usize, len: usize) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

impl Region for MemoryRegion {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        let inside = self.inside(at, into.len());
        if inside {
            self.file.link.inode.content.lock().current.copy(into, at as u64);
        }
        inside
    }

    fn write(&self, at: usize, bytes: &[u8]) -> bool {
        let inside = self.inside(at, bytes.len());
        let mut content = self.file.link.inode.content.lock();
        // What a dead machine's threads still do must not be found after its crash.
        if inside && !self.file.machine.crashed.load(Ordering::SeqCst) && content.set(bytes, at as u64) {
            let end = (at + bytes.len()) as u64;
            content.mapped.extend(at as u64 / SECTOR..end.div_ceil(SECTOR));
        }
        inside
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync()
    }
}
