//! What a store is told when it opens.

use std::{path::PathBuf, time::Duration};

/// Settings of one shard.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory of the shard.
    pub dir: PathBuf,
    /// Name of the shard, kept in its files.
    pub shard: String,
    /// Size of the first log segment, bytes. Small, so that an idle broker is.
    pub first_segment_bytes: u64,
    /// Size of later log segments, bytes.
    pub segment_bytes: u64,
    /// Most bytes that may wait to be written.
    pub inbox_bytes: u64,
    /// Longest that the oldest of them may wait.
    pub inbox_wait: Duration,
    /// Bytes of recent log kept in memory for readers.
    pub recent_bytes: u64,
    /// Longest time that an async OK may be without sync.
    pub flush_interval: Duration,
    /// Unsynced bytes at which an async writer hands over to the syncing thread.
    pub dirty_bytes: u64,
    /// Sends are refused while the file system has less free space than this.
    pub disk_floor_bytes: u64,
    /// Most bytes of log kept, above all topics' retention; 0: no limit.
    pub disk_limit_bytes: u64,
    /// How often retention looks.
    pub retention_interval: Duration,
    /// A snapshot is due after this many bytes of log …
    pub snapshot_bytes: u64,
    /// … or after this time, if anything was written.
    pub snapshot_interval: Duration,
    /// Log bytes per sorted run of the key index.
    pub key_run_bytes: u64,
    /// Identity of this boot of the machine: after a crash a new one means that the page cache is lost.
    pub boot_id: String,
}

impl Options {
    /// Defaults for a shard named `shard` in `dir`.
    pub fn new(dir: impl Into<PathBuf>, shard: impl Into<String>) -> Self {
        Self {
            dir: dir.into(),
            shard: shard.into(),
            first_segment_bytes: 8 << 20,
            segment_bytes: 256 << 20,
            inbox_bytes: 64 << 20,
            inbox_wait: Duration::from_secs(5),
            recent_bytes: 32 << 20,
            flush_interval: Duration::from_millis(500),
            dirty_bytes: 8 << 20,
            disk_floor_bytes: 512 << 20,
            disk_limit_bytes: 0,
            retention_interval: Duration::from_secs(10),
            snapshot_bytes: 256 << 20,
            snapshot_interval: Duration::from_secs(30),
            key_run_bytes: 32 << 20,
            boot_id: String::new(),
        }
    }
}
