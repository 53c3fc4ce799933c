//! The node as its broker sees it, and its upkeep.

use std::time::Duration;

use super::{Broker, NodeStatus};

/// How often the safety net of the hold looks.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Sweeps between two refreshes of the lag that metrics show.
const SWEEPS_A_REFRESH: u32 = 3;

impl Broker {
    /// State of the node.
    pub fn node_status(&self) -> NodeStatus {
        let inner = &self.inner;
        NodeStatus {
            started_ms: inner.started_ms,
            shards: vec![inner.store.status()],
            held_pulls: inner.hold.held() as u64,
        }
    }

    /// Upkeep: refreshes the lag that metrics show, and looks for pulls that no news reached. Ends when the
    /// broker stops.
    pub async fn run(&self) {
        let mut sweeps = 0_u32;
        loop {
            if sweeps == 0 {
                self.refresh_lag().await;
                self.forget_counters();
            }
            sweeps = sweeps.saturating_add(1).checked_rem(SWEEPS_A_REFRESH).unwrap_or(0);
            tokio::select! {
                () = self.inner.stopping.notified() => return,
                () = tokio::time::sleep(SWEEP_INTERVAL) => {}
            }
            self.sweep();
            self.inner.metrics.set_node(&self.inner.store.status());
        }
    }

    /// Wakes pulls that no news has reached. There should be none, so finding some is worth a line.
    pub(super) fn sweep(&self) {
        let store = &self.inner.store;
        let missed = self.inner.hold.sweep(|key| {
            let topic = store.topic_by_id(key.topic)?;
            topic.queues.get(key.queue as usize).map(|queue| queue.bounds().1)
        });
        if missed > 0 {
            tracing::error!(missed, "the sweep woke held pulls that no news had reached; please report this");
        }
    }

    /// Answers all held pulls with [`super::Error::Stopping`], and holds none from now on.
    pub fn stop(&self) {
        self.inner.hold.stop();
        self.inner.stopping.notify_one();
    }
}
