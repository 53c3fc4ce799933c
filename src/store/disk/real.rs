//! The operating system's files.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
    ptr,
    sync::Arc,
};

use memmap2::{MmapOptions, MmapRaw};

use super::{Disk, DiskFile, Region};

/// The operating system's files.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(RealFile(OpenOptions::new().read(true).write(true).open(path)?)))
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(RealFile(OpenOptions::new().read(true).write(true).create_new(true).open(path)?)))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        let made = path.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists()).count();
        // One that is there and empty may be as new: its maker may have died before the sync.
        let empty = made == 0 && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        fs::create_dir_all(path)?;
        for dir in path.ancestors().skip(1).take(made.max(usize::from(empty))) {
            match self.sync_dir(if dir.as_os_str().is_empty() { Path::new(".") } else { dir }) {
                // Where we may look inside but not list, as above a volume that was mounted for us.
                Err(error) if empty || error.kind() == io::ErrorKind::PermissionDenied => {
                    tracing::debug!(dir = %dir.display(), %error, "cannot sync a directory");
                }
                synced => synced?,
            }
        }
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                // A name that is not UTF-8 is none of ours.
                names.extend(entry.file_name().into_string());
            }
        }
        names.sort();
        Ok(names)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn free_bytes(&self, dir: &Path) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(dir)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn Send + Sync>> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Box::new(file)),
            Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// What a page of a file and a block of a device are, or a part of.
const PAGE_OF_ZEROS: [u8; 4096] = [0; 4096];
/// Zeros written past the page cache at once.
#[cfg(target_os = "linux")]
const DIRECT_BYTES: usize = 1 << 20;

#[derive(Debug)]
struct RealFile(File);

impl DiskFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn write_padded(&self, bytes: &[u8], zeros: usize, at: u64) -> io::Result<()> {
        let Some(padding) = PAGE_OF_ZEROS.get(..zeros) else { return self.0.write_all_at(bytes, at) };
        let both = [io::IoSlice::new(bytes), io::IoSlice::new(padding)];
        let written = rustix::io::retry_on_intr(|| rustix::io::pwritev(&self.0, &both, at))?;
        // What a short write left over; as a rule nothing.
        let rest = bytes.get(written..).unwrap_or_default();
        self.0.write_all_at(rest, at + written.min(bytes.len()) as u64)
    }

    #[cfg(target_os = "linux")]
    fn write_zeros(&self, at: u64, len: u64) -> io::Result<()> {
        // Zeros in the page cache would be copied there first and push out what is read.
        match write_zeros_directly(&self.0, at, len) {
            // A file system without direct writes, or with other ideas of what is aligned.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) =>
            {
                super::write_zeros_in_pieces(self, at, len)
            }
            outcome => outcome,
        }
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.0.read_exact_at(into, at)
    }

    #[cfg(target_os = "linux")]
    fn read_at_now(&self, into: &mut [u8], at: u64) -> io::Result<bool> {
        use rustix::io::{Errno, ReadWriteFlags};
        let wanted = into.len();
        match rustix::io::preadv2(&self.0, &mut [io::IoSliceMut::new(into)], at, ReadWriteFlags::NOWAIT) {
            Ok(read) => Ok(read == wanted),
            // Not in the page cache, or a file system that cannot tell.
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INTR | Errno::NOSYS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn read_at_now(&self, _into: &mut [u8], _at: u64) -> io::Result<bool> {
        Ok(false)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        use rustix::{fs::FallocateFlags, io::Errno};
        let old = self.len()?;
        if len <= old {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.0, FallocateFlags::empty(), old, len - old) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            outcome => return outcome.map_err(Into::into),
        }
        let zeros = vec![0; 1 << 20];
        let mut at = old;
        while at < len {
            let piece = usize::try_from(len - at).unwrap_or(usize::MAX).min(zeros.len());
            self.0.write_all_at(zeros.get(..piece).unwrap_or(&zeros), at)?;
            at += piece as u64;
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    #[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "there is no such call"))]
    fn will_need(&self, at: u64, len: u64) {
        #[cfg(target_os = "linux")]
        if let Some(len) = std::num::NonZeroU64::new(len) {
            let _ = rustix::fs::fadvise(&self.0, at, Some(len), rustix::fs::Advice::WillNeed);
        }
    }

    #[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "there is no such call"))]
    fn start_writeback(&self, at: u64, len: u64) {
        #[cfg(target_os = "linux")]
        sync_file_range(&self.0, at, len, libc::SYNC_FILE_RANGE_WRITE);
    }

    #[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "there is no such call"))]
    fn finish_writeback(&self, at: u64, len: u64) {
        #[cfg(target_os = "linux")]
        sync_file_range(
            &self.0,
            at,
            len,
            libc::SYNC_FILE_RANGE_WAIT_BEFORE
                | libc::SYNC_FILE_RANGE_WRITE
                | libc::SYNC_FILE_RANGE_WAIT_AFTER,
        );
    }

    fn map(&self) -> io::Result<Arc<dyn Region>> {
        Ok(Arc::new(Map(MmapOptions::new().map_raw(&self.0)?)))
    }
}

/// Past the page cache; piece by piece, so that others have the device in between.
#[cfg(target_os = "linux")]
fn write_zeros_directly(file: &File, at: u64, len: u64) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(same);
    let direct = direct.map_err(|_| io::ErrorKind::Unsupported)?;
    // A map, since its memory begins with a page.
    let zeros = MmapOptions::new().len(DIRECT_BYTES).map_anon()?;
    let (mut at, end) = (at, at.saturating_add(len));
    while at < end {
        let piece = usize::try_from(end - at).unwrap_or(usize::MAX).min(DIRECT_BYTES);
        let whole = piece - piece % PAGE_OF_ZEROS.len();
        if whole == 0 {
            return file.write_all_at(zeros.get(..piece).unwrap_or_default(), at);
        }
        direct.write_all_at(zeros.get(..whole).unwrap_or_default(), at)?;
        at += whole as u64;
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn sync_file_range(file: &File, at: u64, len: u64, flags: libc::c_uint) {
    let (Ok(at), Ok(len)) = (at.try_into(), len.try_into()) else { return };
    // SAFETY: takes no memory of ours; the descriptor is open as long as `file` is. It is a hint: what goes
    // wrong shows at the sync.
    unsafe { libc::sync_file_range(file.as_raw_fd(), at, len, flags) };
}

#[derive(Debug)]
struct Map(MmapRaw);

impl Map {
    /// Where `len` bytes at `at` are, if they are within the map.
    fn place(&self, at: usize, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        // SAFETY: `at` is within the mapped bytes, or just behind them when `len` is 0.
        (end <= self.0.len()).then(|| unsafe { self.0.as_mut_ptr().add(at) })
    }
}

impl Region for Map {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        let Some(from) = self.place(at, into.len()) else { return false };
        // SAFETY: `from` is valid for that many bytes, `into` is ours and elsewhere, and by the rule of
        // `Region` nobody changes bytes that somebody may read.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        true
    }

    fn write(&self, at: usize, bytes: &[u8]) -> bool {
        let Some(to) = self.place(at, bytes.len()) else { return false };
        // SAFETY: as above; nobody was told of these bytes yet.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        true
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
}
