//! What the machine tells and grants: its boot, who holds a lock, how many files may be open.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More open files than this are not asked for.
const WANTED_FILES: u64 = 1 << 20;
/// One in so many open files is kept for the log and its indexes, whatever the number of connections.
const FILES_OF_THE_STORE: u64 = 4;

/// Lets the process have as many files open as it may, and says how many.
pub(super) fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    let wanted = limit.maximum.unwrap_or(WANTED_FILES).min(WANTED_FILES);
    if wanted <= current {
        return current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit }) {
        Ok(()) => {
            tracing::info!(from = current, to = wanted, "raised the limit of open files");
            wanted
        }
        Err(error) => {
            tracing::warn!(%error, current, "the limit of open files could not be raised");
            current
        }
    }
}

/// How many of `wanted` connections `files` open files have room for, beside those of the store.
pub(super) fn room_for_connections(wanted: u64, files: u64) -> u64 {
    let room = files.saturating_sub(files / FILES_OF_THE_STORE).max(1);
    if wanted > room {
        tracing::warn!(
            wanted,
            room,
            files,
            "fewer connections than `api.connections_max`: each needs an open file; raise the limit of open \
             files (`ulimit -n`, LimitNOFILE)"
        );
    }
    wanted.min(room)
}

/// Identity of this boot of the machine; empty where there is none to read.
pub(super) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The process that holds the lock on this file, if the machine tells.
pub(super) fn lock_holder(path: &Path) -> Option<u32> {
    let inode = fs::metadata(path).ok()?.ino();
    holder_in(&fs::read_to_string("/proc/locks").ok()?, inode)
}

/// The name of a process.
pub(super) fn process_name(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim().to_owned())
}

/// Looks in the text of `/proc/locks`: `1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF`. Devices are named there in
/// ways that differ between file systems, so the inode alone has to do; who asks knows that the lock is held.
fn holder_in(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip_while(|word| *word != "WRITE").skip(1);
        let (pid, file) = (words.next()?, words.next()?);
        (file.rsplit(':').next()? == inode.to_string()).then(|| pid.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_to_the_store() {
        assert_eq!(room_for_connections(10_000, 20_000), 10_000);
        assert_eq!(room_for_connections(10_000, 1024), 768);
        assert_eq!(room_for_connections(10, 1), 1);
        assert!(raise_open_files() >= 1);
    }

    #[test]
    fn the_holder_of_a_lock_is_found_by_the_inode() {
        let locks = "1: FLOCK  ADVISORY  WRITE 812 fd:00:99 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 813 fd:00:99 0 EOF\n\
                     2: POSIX  ADVISORY  READ 9 00:1b:131 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF\n";
        assert_eq!(holder_in(locks, 131), Some(4711));
        assert_eq!(holder_in(locks, 99), Some(812));
        assert_eq!(holder_in(locks, 31), None);
    }

    #[test]
    fn a_lock_held_by_this_process_names_this_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = fs::File::create(&path).unwrap();
        file.try_lock().unwrap();
        // Where the machine tells nothing there is nothing to compare.
        if let Some(pid) = lock_holder(&path) {
            assert_eq!(pid, std::process::id());
        }
    }
}
