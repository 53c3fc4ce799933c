//! What the machine tells: its boot, who holds a lock.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

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
