//! One node as a process: telemetry around it, signals that end it.

use std::{collections::BTreeMap, io, net::SocketAddr, path::PathBuf, pin::pin, sync::Arc, time::Duration};

use tokio::{
    runtime::Builder,
    select,
    signal::unix::{Signal, SignalKind, signal},
};

use super::{Node, Parts, StartError, host};
use crate::{
    config::{Config, Loaded},
    runtime::SystemClock,
    store::{self, disk::RealDisk},
    telemetry::{Exporters, Identity, Logs, Metrics},
};

/// Threads for probes, upkeep and metrics, away from the data plane.
const BACKGROUND_THREADS: usize = 1;
/// Threads for what blocks there: opening, closing, checks.
const BLOCKING_THREADS: usize = 16;
/// What the background may take to end.
const LAST_WORK: Duration = Duration::from_secs(1);
/// Exit code after a second signal, as after an interruption.
const INTERRUPTED: i32 = 130;

/// A node that serves, for whoever announces it.
#[derive(Clone, Debug)]
pub struct Started {
    /// Where the gRPC API is.
    pub api: SocketAddr,
    /// Where the probes and metrics are.
    pub probe: SocketAddr,
    /// Where the data is.
    pub data_dir: PathBuf,
    /// What is kept.
    pub store: store::Status,
}

/// Runs a node until the process is told to stop. `started` hears when it serves.
pub(super) fn run(
    loaded: &Loaded,
    environment: &BTreeMap<String, String>,
    identity: &Identity,
    started: impl FnOnce(&Started),
) -> Result<(), StartError> {
    let config = &loaded.config;
    let exporters = Exporters::from_environment(environment)?;
    let logs = Logs::start(&config.telemetry, identity, environment).map_err(StartError::Telemetry)?;
    for warning in &exporters.warnings {
        tracing::warn!("{warning}");
    }
    let metrics =
        Metrics::new(&config.telemetry, identity, &exporters, environment).map_err(StartError::Telemetry)?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(BACKGROUND_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("background")
        .enable_all()
        .build()?;
    let parts = Parts {
        disk: Arc::new(RealDisk),
        clock: Arc::new(SystemClock::new()),
        metrics,
        logs: Some(logs.clone()),
    };
    let mut config = config.clone();
    config.api.connections_max =
        host::room_for_connections(config.api.connections_max, host::raise_open_files());
    let ended = runtime.block_on(live(config, parts, logs.clone(), started));
    runtime.shutdown_timeout(LAST_WORK);
    logs.flush();
    ended
}

async fn live(
    config: Config,
    parts: Parts,
    logs: Logs,
    started: impl FnOnce(&Started),
) -> Result<(), StartError> {
    let mut signals = Signals::new()?;
    tokio::spawn(logs.clone().summaries());
    let data_dir = config.node.data_dir.clone();
    let starting = pin!(Node::start(config, parts));
    let node = select! {
        node = starting => node?,
        // What is being opened survives a kill, so it survives this.
        () = signals.next() => {
            tracing::info!(event = "node.stopped", "stopped while starting");
            return Ok(());
        }
    };
    started(&Started { api: node.api(), probe: node.probe(), data_dir, store: node.store() });
    signals.next().await;
    select! {
        () = node.stop() => Ok(()),
        () = signals.next() => {
            tracing::warn!(event = "node.stopped", "told twice to stop: not waiting for running calls");
            logs.flush();
            std::process::exit(INTERRUPTED)
        }
    }
}

/// Ctrl-C and SIGTERM.
struct Signals(Signal, Signal);

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self(signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
    }

    async fn next(&mut self) {
        select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}
