//! Time, handed in so that tests can set it.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Where time comes from. Wall time may jump; nothing may rely on it for safety.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Wall time in milliseconds since 1970.
    fn now_ms(&self) -> u64;

    /// Time since some moment before the start of this process; never jumps.
    fn monotonic(&self) -> Duration;
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// Monotonic time counts from here.
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

/// A clock that moves when it is told to. For tests.
#[derive(Debug)]
pub struct ManualClock {
    wall_ms: AtomicU64,
    monotonic_ms: AtomicU64,
}

impl ManualClock {
    /// Starts at `wall_ms`.
    pub fn new(wall_ms: u64) -> Self {
        Self { wall_ms: AtomicU64::new(wall_ms), monotonic_ms: AtomicU64::new(0) }
    }

    /// Lets time pass on both clocks.
    pub fn advance(&self, by: Duration) {
        let ms = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
        self.wall_ms.fetch_add(ms, Ordering::SeqCst);
        self.monotonic_ms.fetch_add(ms, Ordering::SeqCst);
    }

    /// Sets the wall clock, as an operator or NTP would.
    pub fn jump_to(&self, wall_ms: u64) {
        self.wall_ms.store(wall_ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.wall_ms.load(Ordering::SeqCst)
    }

    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.monotonic_ms.load(Ordering::SeqCst))
    }
}
