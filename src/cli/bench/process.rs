//! Memory and open files of a broker on the same machine, from `/proc`.

use std::fs;

/// What a process holds.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(super) struct Holds {
    /// Memory that is its own: resident, without mapped files.
    pub(super) anonymous_bytes: u64,
    /// Memory that is resident, with mapped files.
    pub(super) resident_bytes: u64,
    /// Open files and sockets.
    pub(super) handles: u64,
}

/// Reads it; `None` where it is not known.
pub(super) fn holds(pid: u32) -> Option<Holds> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let handles = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    Some(Holds {
        anonymous_bytes: kibibytes(&status, "RssAnon:")?,
        resident_bytes: kibibytes(&status, "VmRSS:")?,
        handles: u64::try_from(handles).unwrap_or(u64::MAX),
    })
}

fn kibibytes(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_found() {
        let status = "Name:\tholdfast\nVmRSS:\t   2048 kB\nRssAnon:\t    1024 kB\n";
        assert_eq!(kibibytes(status, "VmRSS:"), Some(2 << 20));
        assert_eq!(kibibytes(status, "RssAnon:"), Some(1 << 20));
        assert_eq!(kibibytes(status, "RssShmem:"), None);
    }
}
