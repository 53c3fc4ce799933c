//! Files as the store sees them, so that a test can crash, fill or break the disk anywhere.
//!
//! What is durable: bytes of a file after [`DiskFile::sync_data`]; names (made, renamed, removed) after
//! [`Disk::sync_dir`] of their directory; directories at once. Until then a crash may keep any part of it.
//!
//! The broker runs on [`RealDisk`]. [`MemoryDisk`] crashes at any write, [`FaultDisk`] fails or stalls any call
//! of another disk; both are here, and not among the tests, for those who test what stands on the store.

mod fault;
mod memory;
mod real;

use std::{fmt, io, path::Path, sync::Arc};

pub use fault::{Fault, FaultDisk, Hold, Operation};
pub use memory::{CrashKeeps, MemoryDisk};
pub use real::RealDisk;

/// Zeros are written in pieces of this size.
const ZEROS_BYTES: u64 = 4 << 20;

/// A directory tree. Paths are absolute or relative as the caller likes, but always the same for the
/// same file.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Opens an existing file for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;

    /// Makes a new, empty file. Fails with `AlreadyExists` when there is one.
    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;

    /// Makes a directory and its parents, durably; fine when it exists.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;

    /// Names of the files (not directories) in `dir`, sorted. Empty when there is no such directory.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;

    /// Renames a file, replacing the target.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file. What has it open can go on reading.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes the names in `dir` durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// Bytes still free for us on the file system of `dir`.
    fn free_bytes(&self, dir: &Path) -> io::Result<u64>;

    /// Takes the lock file at `path` for this process, until the answer is dropped. Fails with
    /// `WouldBlock` when another holds it.
    fn lock(&self, path: &Path) -> io::Result<Box<dyn Send + Sync>>;
}

fn write_zeros_in_pieces(file: &(impl DiskFile + ?Sized), at: u64, len: u64) -> io::Result<()> {
    let zeros = vec![0; ZEROS_BYTES.min(len) as usize];
    let (mut at, end) = (at, at.saturating_add(len));
    while at < end {
        let piece = (end - at).min(ZEROS_BYTES);
        file.write_at(zeros.get(..piece as usize).unwrap_or(&zeros), at)?;
        file.start_writeback(at, piece);
        // Two pieces at a time: whoever syncs another file would wait behind all that is on its way.
        file.finish_writeback(at.saturating_sub(ZEROS_BYTES), ZEROS_BYTES);
        at += piece;
    }
    Ok(())
}

/// An open file. All calls may come from several threads at once.
pub trait DiskFile: fmt::Debug + Send + Sync {
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether the length is 0.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Writes all of `bytes` at `at`, growing the file if needed.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// As [`DiskFile::write_at`], with `zeros` bytes of zero behind, in one go. Where a write ends with a page
    /// the rest of the page need not be read from the device first.
    fn write_padded(&self, bytes: &[u8], zeros: usize, at: u64) -> io::Result<()> {
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len() + zeros, 0);
        self.write_at(&padded, at)
    }

    /// Writes zeros from `at` on, so that the range has blocks that were written to; leaves the device to
    /// others in between, and the page cache too where it can.
    fn write_zeros(&self, at: u64, len: u64) -> io::Result<()> {
        write_zeros_in_pieces(self, at, len)
    }

    /// Fills `into` from `at`; `UnexpectedEof` when the file ends before. May wait for the device.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;

    /// As [`DiskFile::read_at`], but never waits for the device: `Ok(false)` when it would have to
    /// (or cannot tell); `into` is then unspecified.
    fn read_at_now(&self, into: &mut [u8], at: u64) -> io::Result<bool>;

    /// Makes the file `len` bytes long and gives it its blocks, so that writing within it needs no new
    /// space. New bytes are zero.
    fn allocate(&self, len: u64) -> io::Result<()>;

    /// Makes content (and the length) durable.
    fn sync_data(&self) -> io::Result<()>;

    /// Asks for this range to be brought into memory, since it is read soon; a hint, no promise.
    fn will_need(&self, at: u64, len: u64);

    /// Asks for write-back of this range to begin; a hint for pacing, no promise.
    fn start_writeback(&self, at: u64, len: u64);

    /// As [`DiskFile::start_writeback`], and waits for its end, so that whoever fills a file leaves the device
    /// to others in between. No promise either.
    fn finish_writeback(&self, at: u64, len: u64);

    /// Maps the whole file into memory. The file must keep its length from now on.
    fn map(&self) -> io::Result<Arc<dyn Region>>;
}

/// A file in memory: shared, bounded, and of use only for what can be rebuilt.
///
/// Callers keep to one rule: bytes are written before anybody is told where they are, and not changed
/// while somebody may read them. Reads and writes outside the length are refused with `false`.
pub trait Region: fmt::Debug + Send + Sync {
    /// Length in bytes.
    fn len(&self) -> usize;

    /// Whether the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies out.
    #[must_use]
    fn read(&self, at: usize, into: &mut [u8]) -> bool;

    /// Copies in.
    #[must_use]
    fn write(&self, at: usize, bytes: &[u8]) -> bool;

    /// Makes all that was written so far durable.
    fn flush(&self) -> io::Result<()>;
}

#[cfg(test)]
mod tests;
