//! Pulls wait here until their queue grows; knows queues and offsets, nothing else.

use opentelemetry::metrics::Meter;

/// How many may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of one client and group on one queue; one more replaces the oldest.
    pub per_client: usize,
    /// By one connection.
    pub per_connection: usize,
    /// In all.
    pub total: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { per_client: 2, per_connection: 16_384, total: 200_000 }
    }
}

/// Where pulls wait. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Hold {}

#[allow(clippy::todo)]
impl Hold {
    /// An empty hold.
    pub fn new(_limits: Limits, _meter: &Meter) -> Self {
        todo!()
    }
}
