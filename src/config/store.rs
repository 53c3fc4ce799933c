//! `[store]`: how the log is cut, how much waits in memory, and what the disk must keep free.

use std::{ops::RangeInclusive, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    section::section,
    text::{duration, size},
};
use crate::model::{Invalid, MAX_BATCH_BYTES};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

section! {
/// `[store]`: how the log is cut, how much waits in memory, and what the disk must keep free.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreConfig {
    /// Size of a log segment; retention frees whole segments.
    #[serde(with = "size")]
    pub segment_size: u64,
    /// Size of the first log segment of a shard; small, so that an idle node takes little disk.
    #[serde(with = "size")]
    pub first_segment_size: u64,
    /// Most bytes that may wait to be written; beyond, sends are refused with a delay.
    #[serde(with = "size")]
    pub inbox_size: u64,
    /// Longest that the oldest of them may wait; beyond, sends are refused with a delay.
    #[serde(with = "duration")]
    pub inbox_wait: Duration,
    /// Bytes of recent log kept in memory for readers.
    #[serde(with = "size")]
    pub recent_size: u64,
    /// Longest time that what an `async` topic acknowledged may be without sync.
    #[serde(with = "duration")]
    pub flush_interval: Duration,
    /// Unsynced bytes at which a sync of `async` topics begins before its interval is over.
    #[serde(with = "size")]
    pub dirty_size: u64,
    /// Sends are refused while the file system has less free space than this.
    #[serde(with = "size")]
    pub disk_floor: u64,
    /// Most bytes of log kept, above the retention of all topics; 0 for no limit.
    #[serde(with = "size")]
    pub disk_limit: u64,
    /// How often retention looks for what may go.
    #[serde(with = "duration")]
    pub retention_interval: Duration,
    /// A snapshot of the state is due after this many bytes of log; a start reads at most this much again.
    #[serde(with = "size")]
    pub snapshot_size: u64,
    /// A snapshot of the state is due after this time, if anything was written.
    #[serde(with = "duration")]
    pub snapshot_interval: Duration,
    /// Bytes of log that one run of the key index covers; bounds the memory for keys of recent messages.
    #[serde(with = "size")]
    pub key_run_size: u64,
}
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            segment_size: 256 * MIB,
            first_segment_size: 8 * MIB,
            inbox_size: 64 * MIB,
            inbox_wait: Duration::from_secs(5),
            recent_size: 32 * MIB,
            flush_interval: Duration::from_millis(500),
            dirty_size: 8 * MIB,
            disk_floor: 512 * MIB,
            disk_limit: 0,
            retention_interval: Duration::from_secs(10),
            snapshot_size: 256 * MIB,
            snapshot_interval: Duration::from_secs(30),
            key_run_size: 32 * MIB,
        }
    }
}

impl StoreConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        // A frame never straddles segments: what does not fit the first begins the second, which is four times
        // as large and takes the largest batch.
        let first_min = (MAX_BATCH_BYTES as u64 + 4 * MIB) / 4;
        sized("store.segment_size", self.segment_size, 64 * MIB..=GIB)?;
        sized("store.first_segment_size", self.first_segment_size, first_min..=GIB)?;
        sized("store.inbox_size", self.inbox_size, MAX_BATCH_BYTES as u64..=4 * GIB)?;
        timed("store.inbox_wait", self.inbox_wait, ms(100)..=ms(60_000))?;
        sized("store.recent_size", self.recent_size, MIB..=16 * GIB)?;
        timed("store.flush_interval", self.flush_interval, ms(1)..=ms(60_000))?;
        sized("store.dirty_size", self.dirty_size, 64 << 10..=GIB)?;
        sized("store.disk_floor", self.disk_floor, 0..=1 << 50)?;
        timed("store.retention_interval", self.retention_interval, ms(10)..=ms(3_600_000))?;
        sized("store.snapshot_size", self.snapshot_size, MIB..=64 * GIB)?;
        timed("store.snapshot_interval", self.snapshot_interval, ms(100)..=ms(86_400_000))?;
        sized("store.key_run_size", self.key_run_size, MIB..=GIB)?;
        if self.first_segment_size > self.segment_size {
            return Err(Invalid::new(
                "store.first_segment_size",
                format!(
                    "is {}, above store.segment_size ({}); make it smaller",
                    size::show(self.first_segment_size),
                    size::show(self.segment_size)
                ),
            ));
        }
        let two_segments = 2 * self.segment_size;
        if self.disk_limit != 0 && self.disk_limit < two_segments {
            return Err(Invalid::new(
                "store.disk_limit",
                format!(
                    "is {}; use 0 for no limit, or at least two segments ({})",
                    size::show(self.disk_limit),
                    size::show(two_segments)
                ),
            ));
        }
        Ok(())
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn sized(key: &str, value: u64, range: RangeInclusive<u64>) -> Result<(), Invalid> {
    if range.contains(&value) {
        return Ok(());
    }
    let (from, to) = (size::show(*range.start()), size::show(*range.end()));
    Err(Invalid::new(key, format!("is {}; use {from} to {to}", size::show(value))))
}

fn timed(key: &str, value: Duration, range: RangeInclusive<Duration>) -> Result<(), Invalid> {
    if range.contains(&value) {
        return Ok(());
    }
    let (from, to) = (duration::show(*range.start()), duration::show(*range.end()));
    Err(Invalid::new(key, format!("is {}; use {from} to {to}", duration::show(value))))
}
