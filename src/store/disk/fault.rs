//! Breaks a disk on purpose.

use std::{
    collections::HashMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

use super::{Disk, DiskFile, Region};

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Disk::open`].
    Open,
    /// [`Disk::create`].
    Create,
    /// [`Disk::rename`]; either path may match.
    Rename,
    /// [`Disk::remove`].
    Remove,
    /// [`Disk::sync_dir`].
    SyncDir,
    /// [`DiskFile::write_at`].
    Write,
    /// [`DiskFile::read_at`] and [`DiskFile::read_at_now`].
    Read,
    /// [`DiskFile::allocate`].
    Allocate,
    /// [`DiskFile::sync_data`] and [`Region::flush`].
    Sync,
    /// [`DiskFile::map`].
    Map,
    /// [`Disk::free_bytes`].
    Free,
}

/// What goes wrong: an error, a delay, or both. Every matching call, unless [`Fault::nth`] or [`Fault::times`] say
/// less.
#[derive(Clone, Debug)]
pub struct Fault {
    operation: Operation,
    path: String,
    error: Option<Broken>,
    delay: Duration,
    skip: u64,
    times: u64,
    half: bool,
    /// Bytes of the file that a read or write has to touch.
    bytes: Range<u64>,
}

#[derive(Clone, Copy, Debug)]
enum Broken {
    Kind(io::ErrorKind),
    Os(i32),
}

impl Fault {
    /// Fails with `error`, `StorageFull` for one.
    pub fn error(operation: Operation, error: io::ErrorKind) -> Self {
        Self { error: Some(Broken::Kind(error)), ..Self::delay(operation, Duration::ZERO) }
    }

    /// Fails as the device does when it cannot read or write (EIO).
    pub fn device(operation: Operation) -> Self {
        let error = Some(Broken::Os(rustix::io::Errno::IO.raw_os_error()));
        Self { error, ..Self::delay(operation, Duration::ZERO) }
    }

    /// Takes this much longer and then works.
    pub fn delay(operation: Operation, delay: Duration) -> Self {
        let path = String::new();
        Self {
            operation,
            path,
            error: None,
            delay,
            skip: 0,
            times: u64::MAX,
            half: false,
            bytes: 0..u64::MAX,
        }
    }

    /// Only where the path contains `text`.
    #[must_use]
    pub fn on(mut self, text: &str) -> Self {
        text.clone_into(&mut self.path);
        self
    }

    /// Only the `n`-th matching call from now on; the next one is the first.
    #[must_use]
    pub fn nth(mut self, n: u64) -> Self {
        self.skip = n.saturating_sub(1);
        self.times = 1;
        self
    }

    /// Only this many matching calls.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    /// Only reads and writes that touch these bytes of a file, as with a bad sector.
    #[must_use]
    pub fn at(mut self, bytes: Range<u64>) -> Self {
        self.bytes = bytes;
        self
    }

    /// A failing write leaves its first half behind, as when the disk fills up in the middle.
    #[must_use]
    pub fn half(mut self) -> Self {
        self.half = true;
        self
    }

    fn matches(&self, operation: Operation, paths: &[&Path], bytes: &Range<u64>) -> bool {
        let touched = bytes.start < self.bytes.end && self.bytes.start < bytes.end;
        touched
            && self.operation == operation
            && paths.iter().any(|path| path.to_string_lossy().contains(&self.path))
    }
}

impl Broken {
    fn error(self) -> io::Error {
        match self {
            Self::Kind(kind) => kind.into(),
            Self::Os(code) => io::Error::from_raw_os_error(code),
        }
    }
}

/// Any disk, with faults that come and go at run time. Clones share them.
#[derive(Clone, Debug)]
pub struct FaultDisk {
    inner: Arc<dyn Disk>,
    faults: Arc<Faults>,
}

#[derive(Debug, Default)]
struct Faults {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    faults: Vec<Fault>,
    counts: HashMap<Operation, u64>,
    holds: Vec<Held>,
    next_hold: u64,
    cold: bool,
    free_bytes: Option<u64>,
}

#[derive(Debug)]
struct Held {
    number: u64,
    fault: Fault,
    waiting: usize,
}

/// While it lives, matching calls wait.
#[derive(Debug)]
pub struct Hold {
    faults: Arc<Faults>,
    number: u64,
}

impl Hold {
    /// Calls that wait now.
    pub fn waiting(&self) -> usize {
        let state = self.faults.state.lock();
        state.holds.iter().find(|held| held.number == self.number).map_or(0, |held| held.waiting)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.faults.state.lock().holds.retain(|held| held.number != self.number);
        self.faults.released.notify_all();
    }
}

impl FaultDisk {
    /// `inner` without any fault yet.
    pub fn new(inner: Arc<dyn Disk>) -> Self {
        Self { inner, faults: Arc::default() }
    }

    /// Adds a fault.
    pub fn inject(&self, fault: Fault) {
        self.faults.state.lock().faults.push(fault);
    }

    /// Makes calls on paths that contain `path` wait until the answer is dropped.
    pub fn hold(&self, operation: Operation, path: &str) -> Hold {
        let mut state = self.faults.state.lock();
        let number = state.next_hold;
        state.next_hold += 1;
        let fault = Fault::delay(operation, Duration::ZERO).on(path);
        state.holds.push(Held { number, fault, waiting: 0 });
        Hold { faults: Arc::clone(&self.faults), number }
    }

    /// Whether [`DiskFile::read_at_now`] finds nothing in memory.
    pub fn set_cold(&self, cold: bool) {
        self.faults.state.lock().cold = cold;
    }

    /// What the disk says of its free space; `None`: the truth.
    pub fn set_free_bytes(&self, bytes: Option<u64>) {
        self.faults.state.lock().free_bytes = bytes;
    }

    /// Removes all faults.
    pub fn clear(&self) {
        self.faults.state.lock().faults.clear();
    }

    /// Calls so far, those that failed too.
    pub fn count(&self, operation: Operation) -> u64 {
        self.faults.state.lock().counts.get(&operation).copied().unwrap_or(0)
    }

    fn file(&self, path: &Path, inner: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(FaultFile { inner, path: path.to_owned(), faults: Arc::clone(&self.faults) })
    }
}

impl Faults {
    /// Counts a call, and delays or fails it.
    fn meet(&self, operation: Operation, paths: &[&Path]) -> Result<(), Failed> {
        self.meet_at(operation, paths, &(0..u64::MAX))
    }

    fn meet_at(&self, operation: Operation, paths: &[&Path], bytes: &Range<u64>) -> Result<(), Failed> {
        let mut delay = Duration::ZERO;
        let mut failed = None;
        let mut state = self.state.lock();
        *state.counts.entry(operation).or_default() += 1;
        for fault in &mut state.faults {
            if !fault.matches(operation, paths, bytes) {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if fault.times > 0 {
                fault.times -= 1;
                delay += fault.delay;
                let error = fault.error.map(|error| Failed { error: error.error(), half: fault.half });
                failed = failed.or(error);
            }
        }
        while let Some(held) = state.holds.iter_mut().find(|held| held.fault.matches(operation, paths, bytes))
        {
            let number = held.number;
            held.waiting += 1;
            self.released.wait(&mut state);
            if let Some(held) = state.holds.iter_mut().find(|held| held.number == number) {
                held.waiting -= 1;
            }
        }
        drop(state);
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        failed.map_or(Ok(()), Err)
    }
}

struct Failed {
    error: io::Error,
    half: bool,
}

impl From<Failed> for io::Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

impl Disk for FaultDisk {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        self.faults.meet(Operation::Open, &[path])?;
        Ok(self.file(path, self.inner.open(path)?))
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        self.faults.meet(Operation::Create, &[path])?;
        Ok(self.file(path, self.inner.create(path)?))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir_all(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        self.inner.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.faults.meet(Operation::Rename, &[from, to])?;
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.faults.meet(Operation::Remove, &[path])?;
        self.inner.remove(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.faults.meet(Operation::SyncDir, &[dir])?;
        self.inner.sync_dir(dir)
    }

    fn free_bytes(&self, dir: &Path) -> io::Result<u64> {
        self.faults.meet(Operation::Free, &[dir])?;
        let told = self.faults.state.lock().free_bytes;
        told.map_or_else(|| self.inner.free_bytes(dir), Ok)
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn Send + Sync>> {
        self.inner.lock(path)
    }
}

/// A file knows the path that it was opened with, also after it was renamed.
#[derive(Debug)]
struct FaultFile {
    inner: Arc<dyn DiskFile>,
    path: PathBuf,
    faults: Arc<Faults>,
}

impl FaultFile {
    fn meet(&self, operation: Operation) -> Result<(), Failed> {
        self.faults.meet(operation, &[&self.path])
    }

    fn meet_at(&self, operation: Operation, at: u64, length: usize) -> Result<(), Failed> {
        self.faults.meet_at(operation, &[&self.path], &(at..at.saturating_add(length as u64)))
    }
}

impl DiskFile for FaultFile {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        if let Err(failed) = self.meet_at(Operation::Write, at, bytes.len()) {
            if failed.half {
                self.inner.write_at(bytes.get(..bytes.len() / 2).unwrap_or_default(), at)?;
            }
            return Err(failed.into());
        }
        self.inner.write_at(bytes, at)
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.meet_at(Operation::Read, at, into.len())?;
        self.inner.read_at(into, at)
    }

    fn read_at_now(&self, into: &mut [u8], at: u64) -> io::Result<bool> {
        if self.faults.state.lock().cold {
            return Ok(false);
        }
        self.meet_at(Operation::Read, at, into.len())?;
        self.inner.read_at_now(into, at)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.meet(Operation::Allocate)?;
        self.inner.allocate(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.meet(Operation::Sync)?;
        self.inner.sync_data()
    }

    fn will_need(&self, at: u64, len: u64) {
        self.inner.will_need(at, len);
    }

    fn start_writeback(&self, at: u64, len: u64) {
        self.inner.start_writeback(at, len);
    }

    fn finish_writeback(&self, at: u64, len: u64) {
        self.inner.finish_writeback(at, len);
    }

    fn map(&self) -> io::Result<Arc<dyn Region>> {
        self.meet(Operation::Map)?;
        let inner = self.inner.map()?;
        Ok(Arc::new(FaultRegion { inner, path: self.path.clone(), faults: Arc::clone(&self.faults) }))
    }
}

#[derive(Debug)]
struct FaultRegion {
    inner: Arc<dyn Region>,
    path: PathBuf,
    faults: Arc<Faults>,
}

impl Region for FaultRegion {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        self.inner.read(at, into)
    }

    fn write(&self, at: usize, bytes: &[u8]) -> bool {
        self.inner.write(at, bytes)
    }

    fn flush(&self) -> io::Result<()> {
        self.faults.meet(Operation::Sync, &[&self.path])?;
        self.inner.flush()
    }
}
