//! What the device gives without a broker: write and sync on a file filled with zeros.

use std::{
    fmt,
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
    path::Path,
    time::{Duration, Instant},
};

use serde::Serialize;

/// Size of the file.
const FILE_BYTES: u64 = 128 << 20;
/// A small write.
const SMALL_BYTES: usize = 4 << 10;
/// A large one.
const LARGE_BYTES: usize = 1 << 20;
/// Longest time for either kind.
const TIME_MAX: Duration = Duration::from_secs(1);

/// Both kinds of writes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Probe {
    /// 4 KiB at a time.
    #[serde(rename = "sync_4_kib")]
    pub small: Syncs,
    /// 1 MiB at a time.
    #[serde(rename = "sync_1_mib")]
    pub large: Syncs,
}

/// Writes of one size, each synced.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Syncs {
    /// How many.
    pub writes: u64,
    /// Half of them took at most this long.
    pub p50_ms: f64,
    /// 99 of 100 took at most this long.
    pub p99_ms: f64,
    /// The longest.
    pub max_ms: f64,
    /// In 1 000 000 bytes.
    pub megabytes_per_second: f64,
}

impl Probe {
    /// Whether two probes differ by less than a factor of two.
    pub fn agrees(&self, other: &Self) -> bool {
        let near = |a: f64, b: f64| a <= b * 2.0 && b <= a * 2.0;
        near(self.small.p50_ms, other.small.p50_ms) && near(self.large.p50_ms, other.large.p50_ms)
    }
}

impl fmt::Display for Syncs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { writes, p50_ms, p99_ms, max_ms, megabytes_per_second } = self;
        write!(
            f,
            "p50 {p50_ms:.3} ms   p99 {p99_ms:.3} ms   max {max_ms:.3} ms   {megabytes_per_second:.1} MB/s   ({writes} writes)"
        )
    }
}

/// Measures the device under `dir`; takes up to three seconds and blocks.
pub fn measure(dir: &Path) -> io::Result<Probe> {
    let path = dir.join(format!("holdfast-probe-{}.tmp", std::process::id()));
    let file = File::create_new(&path)?;
    let probe = try_measure(&file);
    fs::remove_file(&path).and(probe)
}

fn try_measure(file: &File) -> io::Result<Probe> {
    let zeros = vec![0; LARGE_BYTES];
    let mut at = 0;
    while at < FILE_BYTES {
        file.write_all_at(&zeros, at)?;
        at += u64::try_from(zeros.len()).unwrap_or(u64::MAX);
    }
    file.sync_all()?;
    let half = FILE_BYTES / 2;
    Ok(Probe {
        small: syncs(file, SMALL_BYTES, 0, half)?,
        large: syncs(file, LARGE_BYTES, half, FILE_BYTES)?,
    })
}

fn syncs(file: &File, size: usize, from: u64, to: u64) -> io::Result<Syncs> {
    let data = vec![0xa5; size];
    let step = u64::try_from(size).unwrap_or(u64::MAX);
    let mut took = Vec::new();
    let begun = Instant::now();
    let mut at = from;
    while at < to && begun.elapsed() < TIME_MAX {
        let write = Instant::now();
        file.write_all_at(&data, at)?;
        file.sync_data()?;
        took.push(write.elapsed());
        at += step;
    }
    let seconds = begun.elapsed().as_secs_f64().max(1e-9);
    took.sort_unstable();
    let count = took.len();
    let at = |part: usize, of: usize| {
        let place = (count * part / of).min(count.saturating_sub(1));
        took.get(place).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    };
    #[expect(clippy::cast_precision_loss, reason = "rates are for reading")]
    let megabytes = (at_bytes(count, step)) as f64 / 1e6;
    Ok(Syncs {
        writes: u64::try_from(count).unwrap_or(u64::MAX),
        p50_ms: at(1, 2),
        p99_ms: at(99, 100),
        max_ms: at(1, 1),
        megabytes_per_second: megabytes / seconds,
    })
}

fn at_bytes(count: usize, step: u64) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX).saturating_mul(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let probe = measure(dir.path()).unwrap();
        assert!(probe.small.writes > 0 && probe.large.writes > 0);
        assert!(probe.small.p50_ms <= probe.small.max_ms);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn probes_that_differ_by_more_than_twice_disagree() {
        let syncs = |p50_ms| Syncs { writes: 1, p50_ms, p99_ms: 0.0, max_ms: 0.0, megabytes_per_second: 0.0 };
        let probe = |small, large| Probe { small: syncs(small), large: syncs(large) };
        assert!(probe(1.0, 4.0).agrees(&probe(2.0, 2.0)));
        assert!(!probe(1.0, 4.0).agrees(&probe(2.1, 4.0)));
    }
}
