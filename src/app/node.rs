//! One node: the rooms, opened in order and closed in reverse.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use opentelemetry::metrics::Meter;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{MissedTickBehavior, interval},
};

use super::host;
use crate::{
    api,
    broker::{self, Broker},
    config::{Config, StoreConfig},
    hold::{self, Hold},
    runtime::Clock,
    store::{self, Options, Store, disk::Disk},
    telemetry::{ExportersError, Health, Logs, Metrics, Phase, Probe, observe_node},
};

/// How often it is looked whether the store still takes writes.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// A runtime that does not answer for this long is stuck.
const ANSWER_MAX: Duration = Duration::from_millis(800);

/// Why a node did not start. One line that says what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The environment asks for what is not there.
    #[error(transparent)]
    Exporters(#[from] ExportersError),
    /// Logs or metrics did not start.
    #[error("{0}")]
    Telemetry(String),
    /// Another process has the data.
    #[error(
        "the data directory {} is in use{}; stop that process, or choose another directory with --data-dir \
         (node.data_dir)",
        .dir.display(), by(*.pid)
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// Who has it, if that can be found out.
        pid: Option<u32>,
    },
    /// The store did not open.
    #[error("cannot open the data directory: {0}")]
    Store(String),
    /// An address could not be taken.
    #[error("cannot listen on {address} for the {what}: {error}; {hint}")]
    Listen {
        /// What was to be served.
        what: &'static str,
        /// Where.
        address: SocketAddr,
        /// What the system says.
        error: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// The system refuses threads, signals or the like.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

fn by(pid: Option<u32>) -> String {
    let Some(pid) = pid else { return " by another process".into() };
    match host::process_name(pid) {
        Some(name) => format!(" by process {pid} ({name})"),
        None => format!(" by process {pid}"),
    }
}

/// What a node does not make itself.
#[derive(Clone)]
pub struct Parts {
    /// Its files.
    pub disk: Arc<dyn Disk>,
    /// Its time.
    pub clock: Arc<dyn Clock>,
    /// Its metrics.
    pub metrics: Metrics,
    /// Its log, where it has one of its own.
    pub logs: Option<Logs>,
}

/// A node that serves. [`Node::stop`] ends it in order.
pub struct Node {
    config: Config,
    health: Health,
    store: Store,
    server: api::Server,
    probe: SocketAddr,
    tasks: Tasks,
}

/// Background tasks; they end with their owner.
struct Tasks(Vec<JoinHandle<()>>);

impl Tasks {
    /// Ends them and waits until they are gone, with what they listened on.
    async fn end(mut self) {
        for task in self.0.drain(..) {
            task.abort();
            let _ = task.await;
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

impl Node {
    /// Opens the rooms in order. Returns when the node serves.
    pub async fn start(config: Config, parts: Parts) -> Result<Self, StartError> {
        let begun = Instant::now();
        let health = Health::new();
        let meters = Meters::of(&parts.metrics);
        observe_node(&meters.node, &health, parts.logs.clone());

        let probe = Probe::bind(config.listen.probe).await.map_err(|error| {
            // Two nodes on one machine most likely meet here first, and often over the same data.
            already_running(&config, &error).unwrap_or(StartError::Listen {
                what: "probes and metrics",
                address: config.listen.probe,
                error,
                hint: "choose another address with listen.probe, as in --set listen.probe=127.0.0.1:9403; \
                       port 0 takes any",
            })
        })?;
        let probe_address = probe.address();
        let mut tasks = Tasks(vec![tokio::spawn(probe.serve(health.clone(), parts.metrics.clone()))]);

        let hold = Hold::new(hold::Limits::from(&config.hold), &meters.hold);
        let store = open_store(&config, &parts, &hold, meters.storage).await?;
        let limits = config.broker();
        let broker = Broker::new(store.clone(), hold, limits, Arc::clone(&parts.clock), &meters.broker);
        tasks.0.push(tokio::spawn({
            let broker = broker.clone();
            async move { broker.run().await }
        }));

        let server =
            api::Server::start(config.listen.api, &config.node.name, broker, &config.api, &meters.rpc)
                .map_err(|error| StartError::Listen {
                    what: "gRPC API",
                    address: config.listen.api,
                    error: io::Error::new(error.kind(), plain(&error)),
                    hint: "choose another address with --listen (listen.api)",
                });
        let server = match server {
            Ok(server) => server,
            Err(error) => {
                close(store).await;
                return Err(error);
            }
        };
        watch(&health, &store, &server, &mut tasks);
        health.enter(Phase::Serving);
        let node = Self { config, health, store, server, probe: probe_address, tasks };
        tracing::info!(
            event = "node.started",
            version = crate::telemetry::VERSION,
            data_dir = %node.config.node.data_dir.display(),
            api = %node.api(),
            probe = %node.probe(),
            took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            "the node serves"
        );
        Ok(node)
    }

    /// Where the gRPC API is.
    pub fn api(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Where the probes and metrics are.
    pub fn probe(&self) -> SocketAddr {
        self.probe
    }

    /// What is kept.
    pub fn store(&self) -> store::Status {
        self.store.status()
    }

    /// Closes the rooms in reverse: no new work, held pulls answered, running calls ended, everything on disk.
    pub async fn stop(self) {
        let Self { config, health, store, server, tasks, .. } = self;
        let begun = Instant::now();
        health.enter(Phase::Draining);
        tracing::info!(event = "node.draining", grace = ?config.shutdown.grace, "the node stops");
        server.stop(config.shutdown.grace).await;
        health.enter(Phase::Stopping);
        health.clear();
        close(store).await;
        tasks.end().await;
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(event = "node.stopped", took_ms, "the node has stopped");
    }
}

/// What each room makes its instruments with.
struct Meters {
    node: Meter,
    storage: Meter,
    hold: Meter,
    broker: broker::Meters,
    rpc: Meter,
}

impl Meters {
    fn of(metrics: &Metrics) -> Self {
        Self {
            node: metrics.scope("holdfast.node"),
            storage: metrics.scope("holdfast.storage"),
            hold: metrics.scope("holdfast.hold"),
            broker: broker::Meters {
                rocketmq: metrics.rocketmq(),
                holdfast: metrics.scope("holdfast.broker"),
            },
            rpc: metrics.scope("holdfast.rpc"),
        }
    }
}

/// The store's settings from the configuration's.
fn options(config: &Config) -> Options {
    let StoreConfig {
        segment_size,
        first_segment_size,
        inbox_size,
        inbox_wait,
        recent_size,
        flush_interval,
        dirty_size,
        disk_floor,
        disk_limit,
        retention_interval,
        snapshot_size,
        snapshot_interval,
        key_run_size,
    } = config.store;
    Options {
        first_segment_bytes: first_segment_size,
        segment_bytes: segment_size,
        inbox_bytes: inbox_size,
        inbox_wait,
        recent_bytes: recent_size,
        flush_interval,
        dirty_bytes: dirty_size,
        disk_floor_bytes: disk_floor,
        disk_limit_bytes: disk_limit,
        retention_interval,
        snapshot_bytes: snapshot_size,
        snapshot_interval,
        key_run_bytes: key_run_size,
        boot_id: host::boot_id(),
        ..Options::new(&config.node.data_dir, &config.node.shard)
    }
}

async fn open_store(config: &Config, parts: &Parts, hold: &Hold, meter: Meter) -> Result<Store, StartError> {
    let (options, news) = (options(config), broker::news(hold));
    let (disk, clock) = (Arc::clone(&parts.disk), Arc::clone(&parts.clock));
    let opened = spawn_blocking(move || Store::open(options, disk, clock, news, &meter)).await;
    let opened = opened.map_err(|error| StartError::System(io::Error::other(error)))?;
    opened.map_err(|error| {
        let dir = &config.node.data_dir;
        match in_use_by(dir) {
            Some(pid) => StartError::InUse { dir: dir.clone(), pid: Some(pid) },
            None => StartError::Store(format!("{error}{}", permission_hint(dir))),
        }
    })
}

async fn close(store: Store) {
    if let Err(error) = spawn_blocking(move || store.close()).await {
        tracing::error!(%error, "the store did not close");
    }
}

/// What the system says, without what the error said around it.
fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => "the address is in use".into(),
        io::ErrorKind::AddrNotAvailable => "this machine does not have the address".into(),
        io::ErrorKind::PermissionDenied => "permission denied (ports below 1024 need privileges)".into(),
        _ => error.to_string(),
    }
}

fn already_running(config: &Config, error: &io::Error) -> Option<StartError> {
    let dir = &config.node.data_dir;
    let pid = (error.kind() == io::ErrorKind::AddrInUse).then(|| in_use_by(dir))??;
    Some(StartError::InUse { dir: dir.clone(), pid: Some(pid) })
}

/// The other process that has locked a data directory.
fn in_use_by(dir: &Path) -> Option<u32> {
    host::lock_holder(&dir.join("lock")).filter(|pid| *pid != std::process::id())
}

fn permission_hint(dir: &Path) -> &'static str {
    use rustix::fs::{Access, access};
    let lacks = |path: &Path| access(path, Access::WRITE_OK) == Err(rustix::io::Errno::ACCESS);
    let nearest = dir.ancestors().find(|path| path.exists());
    match nearest {
        Some(path) if lacks(path) => {
            "; this user may not write there: choose another directory with --data-dir (node.data_dir)"
        }
        _ => "",
    }
}

/// Has the probes look at the node, and tells callers when the store takes no writes any more.
fn watch(health: &Health, store: &Store, server: &api::Server, tasks: &mut Tasks) {
    health.ready_if("storage", {
        let store = store.clone();
        move || writable(&store)
    });
    health.live_if("storage", {
        let store = store.clone();
        move || {
            // Returns at all: nobody holds the lock for ever.
            let _ = store.status();
            Ok(())
        }
    });
    let address = reachable(server.local_addr());
    health.live_if("api", move || answers(address));
    tasks.0.push(tokio::spawn(tell(store.clone(), server.health())));
}

/// A node whose store is fenced keeps answering reads, but no new work should be sent to it. A full disk is no
/// reason: it frees itself, and reads and commits go on.
fn writable(store: &Store) -> Result<(), String> {
    match store.status().state {
        store::State::Writable | store::State::DiskFull(_) => Ok(()),
        store::State::Fenced(reason) => Err(format!("the store is fenced: {reason}")),
        store::State::Stopping => Err("the store is closing".into()),
    }
}

/// Keeps `grpc.health.v1` true to the store.
async fn tell(store: Store, health: api::Health) {
    let mut tick = interval(WATCH_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        if let Err(reason) = writable(&store) {
            tracing::error!(event = "storage.state_changed", reason, "the node takes no new work");
            return health.set_serving(false).await;
        }
    }
}

/// Where to reach a listener on this machine.
fn reachable(listener: SocketAddr) -> SocketAddr {
    let ip = match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listener.port())
}

/// Whether the thread that gets the next connection says the first word of HTTP/2. Connections are dealt in turn, so
/// that probe after probe asks all threads. A connection that is closed as it comes was at least accepted.
fn answers(address: SocketAddr) -> Result<(), String> {
    const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let talk = || -> io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&address, ANSWER_MAX)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        stream.write_all(HELLO)?;
        stream.read(&mut [0]).map(drop)
    };
    match talk() {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(format!("{address} did not answer within {ANSWER_MAX:?}"))
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Err(format!("nobody listens on {address}"))
        }
        _ => Ok(()),
    }
}
