//! Whether the node is up, as the probes see it.

use std::{fmt, sync::Arc, time::Instant};

use parking_lot::{Mutex, RwLock};
use serde::Serialize;

/// Where a node is between its start and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Opening its store.
    Starting,
    /// Answering calls.
    Serving,
    /// Ending calls; takes no new ones.
    Draining,
    /// Closing its store.
    Stopping,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Self; 4] = [Self::Starting, Self::Serving, Self::Draining, Self::Stopping];

    /// As in metrics and answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Stopping => "stopping",
        }
    }
}

/// Says what is wrong, if anything is. Quick, but may wait for a lock; never called on a thread of the data plane.
type CheckFn = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Which probe a check is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probed {
    Live,
    Ready,
}

/// The state of the node, and checks that are made when a probe asks. All clones are the same.
#[derive(Clone)]
pub struct Health {
    inner: Arc<Inner>,
}

struct Inner {
    phase: RwLock<(Phase, Instant)>,
    checks: RwLock<Vec<Check>>,
}

struct Check {
    name: &'static str,
    probed: Probed,
    run: CheckFn,
    /// The last answer, and when it first was so.
    last: Mutex<(Result<(), String>, Instant)>,
}

/// One line of what a probe found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) name: &'static str,
    pub(super) ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) problem: Option<String>,
    /// Seconds since it has been so.
    pub(super) since_seconds: u64,
}

impl fmt::Debug for Health {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Health").field("phase", &self.phase()).finish_non_exhaustive()
    }
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

impl Health {
    /// A node that is starting.
    pub fn new() -> Self {
        let phase = RwLock::new((Phase::Starting, Instant::now()));
        Self { inner: Arc::new(Inner { phase, checks: RwLock::default() }) }
    }

    /// Where the node is.
    pub fn phase(&self) -> Phase {
        self.inner.phase.read().0
    }

    /// The node has gone on.
    pub fn enter(&self, phase: Phase) {
        *self.inner.phase.write() = (phase, Instant::now());
    }

    /// Adds a check that must pass for the node to be ready: for new work to be sent to it.
    pub fn ready_if(&self, name: &'static str, run: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.add(name, Probed::Ready, Arc::new(run));
    }

    /// Adds a check that must pass, and return at all, for the node to be alive: without it a restart is due.
    pub fn live_if(&self, name: &'static str, run: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.add(name, Probed::Live, Arc::new(run));
    }

    /// Forgets the checks; what they look at is closing.
    pub fn clear(&self) {
        self.inner.checks.write().clear();
    }

    fn add(&self, name: &'static str, probed: Probed, run: CheckFn) {
        let last = Mutex::new((Ok(()), Instant::now()));
        self.inner.checks.write().push(Check { name, probed, run, last });
    }

    /// Whether the start is over.
    pub(super) fn startup(&self) -> Vec<Finding> {
        vec![self.phase_finding("started", |phase| phase != Phase::Starting)]
    }

    /// Whether a restart would not help. May block.
    pub(super) fn live(&self) -> Vec<Finding> {
        self.run(Probed::Live)
    }

    /// Whether new work should be sent here. May block.
    pub(super) fn ready(&self) -> Vec<Finding> {
        let mut findings = vec![self.phase_finding("serving", |phase| phase == Phase::Serving)];
        findings.extend(self.run(Probed::Ready));
        findings
    }

    fn phase_finding(&self, name: &'static str, good: impl Fn(Phase) -> bool) -> Finding {
        let (phase, since) = *self.inner.phase.read();
        let ok = good(phase);
        let problem = (!ok).then(|| format!("the node is {}", phase.name()));
        Finding { name, ok, problem, since_seconds: since.elapsed().as_secs() }
    }

    fn run(&self, probed: Probed) -> Vec<Finding> {
        let checks = self.inner.checks.read();
        let wanted = checks.iter().filter(|check| check.probed == probed);
        wanted
            .map(|check| {
                let now = (check.run)();
                let mut last = check.last.lock();
                if last.0 != now {
                    *last = (now.clone(), Instant::now());
                }
                let since_seconds = last.1.elapsed().as_secs();
                Finding { name: check.name, ok: now.is_ok(), problem: now.err(), since_seconds }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_node_is_ready_only_while_it_serves_and_its_checks_pass() {
        let health = Health::new();
        assert!(!health.ready()[0].ok);
        assert!(!health.startup()[0].ok);
        let broken = Arc::new(AtomicBool::new(false));
        let look = Arc::clone(&broken);
        health.ready_if("storage", move || match look.load(Ordering::SeqCst) {
            true => Err("fenced".into()),
            false => Ok(()),
        });
        health.enter(Phase::Serving);
        assert!(health.ready().iter().all(|finding| finding.ok));
        broken.store(true, Ordering::SeqCst);
        let findings = health.ready();
        assert_eq!(findings[1].problem.as_deref(), Some("fenced"));
        health.enter(Phase::Draining);
        assert_eq!(health.ready()[0].problem.as_deref(), Some("the node is draining"));
        assert!(health.startup()[0].ok);
        assert!(health.live().is_empty(), "readiness is not liveness");
    }
}
