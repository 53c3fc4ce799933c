//! Threads, connections, and their end.
//!
//! One thread accepts and deals the connections round-robin to all threads: SO_REUSEPORT can put a handful of
//! connections on one core. Each thread runs a runtime of its own, so a call never leaves its core.
//!
//! Connections are served by hyper itself. tonic's transport would put a router, a timer for each deadline and
//! three boxes around every call, and would neither close who never speaks nor say when all are gone.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use futures_util::FutureExt;
use http::{Request, Response};
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use opentelemetry::metrics::Meter;
use tokio::{
    net::{TcpListener, TcpSocket},
    runtime::{Builder, Runtime},
    select,
    sync::{Semaphore, mpsc},
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::body::Body;
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};
use tonic_reflection::server as reflection;
use tower::util::BoxCloneSyncService;

use super::{
    connection::{Dealt, Ended, Open, Serving, TurnedAway, last_words, turn_away},
    door::{CallLimits, House},
    layers::{AnswerBudget, Budget, Framed},
    metrics::{Level, Metrics},
    native::{AdminApi, BrokerApi, StreamLimits},
};
use crate::{
    broker::Broker,
    config::ApiConfig,
    pb::{DESCRIPTORS, v1::admin_server::AdminServer},
    runtime::WakeHub,
};

/// Connections that may wait in the kernel to be accepted.
const BACKLOG: u32 = 1024;
/// Accepted connections that may wait for their thread.
const DEALT: usize = 256;
/// Threads of one runtime for reads that wait for the device.
const BLOCKING_THREADS: usize = 64;
/// Clients that are told at once why they are turned away; more hear nothing.
const TURNED_AWAY: usize = 256;
/// A pause after an accept that failed, most likely for want of file handles.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long clients may take to get their last answers and to close, at a stop.
const FAREWELL: Duration = Duration::from_secs(2);
/// How often it is looked, at a stop, whether calls are running.
const CALLS_LOOK: Duration = Duration::from_millis(10);
/// How long blocking work may take to end after the grace of a stop.
const LAST_WORK: Duration = Duration::from_secs(1);
/// Headers over the limit by less than this factor are read, so that the call can be told what is wrong.
const HARD_HEADERS: u64 = 4;
/// One in so many bytes for arriving requests is kept from sends, so that pulls and commits go on beside them.
const KEPT_FROM_SENDS: u64 = 8;
/// Services whose health is reported; the empty name stands for all of them.
const SERVICES: [&str; 3] = ["", "holdfast.v1.Broker", "holdfast.v1.Admin"];

/// A running gRPC server. Dropping it cuts all connections; [`Server::stop`] ends them in peace.
pub struct Server {
    local_addr: SocketAddr,
    broker: Broker,
    health: Health,
    metrics: Arc<Metrics>,
    /// Ends connections when their calls have ended.
    stop: CancellationToken,
    /// Ends the threads.
    kill: CancellationToken,
    connections: TaskTracker,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens on `listen` and serves `broker`, under the name `node`, on threads of its own. `meter` is of
    /// the scope `holdfast.rpc`.
    pub fn start(
        listen: SocketAddr,
        node: &str,
        broker: Broker,
        config: &ApiConfig,
        meter: &Meter,
    ) -> io::Result<Self> {
        let metrics = Arc::new(Metrics::new(meter));
        let (stop, kill) = (CancellationToken::new(), CancellationToken::new());
        let connections = TaskTracker::new();
        let health = Health(HealthReporter::new());
        // Nobody else knows it yet, so there is nothing to wait for.
        let _ready = health.set_serving(true).now_or_never();
        let house = Arc::new(house(node, &broker, config, &metrics, &health, &stop)?);
        let serving = Serving {
            house,
            http: http(config),
            handshake: config.handshake_timeout,
            answer_timeout: config.answer_timeout,
            stop: stop.clone(),
        };
        let core = Core { serving, kill: kill.clone() };

        let count = match usize::try_from(config.threads) {
            Ok(0) | Err(_) => thread::available_parallelism().map_or(1, usize::from),
            Ok(count) => count,
        };
        let runtimes = (0..count).map(|_| OwnRuntime::new()).collect::<io::Result<Vec<_>>>()?;
        let mut listener = match runtimes.first().and_then(|runtime| runtime.0.as_ref()) {
            Some(runtime) => {
                let _inside = runtime.enter();
                let listener = bind(listen).map_err(|error| {
                    io::Error::new(error.kind(), format!("cannot listen on {listen}: {error}"))
                })?;
                Some(listener)
            }
            None => None,
        };
        let Some(local_addr) = listener.as_ref().and_then(|listener| listener.local_addr().ok()) else {
            return Err(io::Error::other("the listener has no address"));
        };

        let (dealers, inboxes): (Vec<_>, Vec<_>) = (0..count).map(|_| mpsc::channel(DEALT)).unzip();
        let mut dealers = Some(dealers);
        let mut threads = Vec::with_capacity(count);
        for (number, (runtime, inbox)) in runtimes.into_iter().zip(inboxes).enumerate() {
            let core = core.clone();
            let accept = listener.take().zip(dealers.take()).map(|(listener, dealers)| Accept {
                listener,
                dealers,
                connections: connections.clone(),
                most: config.connections_max,
                metrics: Arc::clone(&metrics),
                stop: stop.clone(),
            });
            let serve = move || runtime.run(core.serve(inbox, accept));
            threads.push(thread::Builder::new().name(format!("api-{number}")).spawn(serve)?);
        }
        tracing::info!(address = %local_addr, threads = count, "serving gRPC");
        Ok(Self { local_addr, broker, health, metrics, stop, kill, connections, threads })
    }

    /// Where it listens; tells the port when port 0 was asked for.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// What health checks are told.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Connections now.
    pub fn connections(&self) -> u64 {
        self.metrics.connections.get()
    }

    /// Takes no more connections, tells all clients to go elsewhere, has the broker answer held pulls, lets
    /// running calls end, and cuts what is left after `grace`.
    pub async fn stop(mut self, grace: Duration) {
        self.health.set_serving(false).await;
        self.stop.cancel();
        self.broker.stop();
        self.connections.close();
        let over = async {
            select! {
                () = sleep(grace) => {}
                () = farewell(&self.metrics.calls) => {}
            }
        };
        let all_gone = select! {
            () = self.connections.wait() => true,
            () = over => false,
        };
        if !all_gone {
            let left = self.connections.len();
            tracing::warn!(left, "connections were cut: their clients did not take leave in time");
        }
        self.kill.cancel();
        let threads = std::mem::take(&mut self.threads);
        let joined = tokio::task::spawn_blocking(move || {
            threads.into_iter().filter_map(|thread| thread.join().err()).count()
        });
        if let Ok(panicked @ 1..) = joined.await {
            tracing::error!(panicked, "threads of the gRPC server ended with a panic");
        }
    }
}

/// Returns when no call has been running for a while. A client that does not take leave then, frozen or gone without
/// a word, is not worth the grace that running calls get.
async fn farewell(calls: &Level) {
    while calls.get() > 0 {
        sleep(CALLS_LOOK).await;
    }
    sleep(FAREWELL).await;
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        self.kill.cancel();
    }
}

/// What health checks are told. All clones tell the same.
#[derive(Clone)]
pub struct Health(HealthReporter);

impl Health {
    /// Whether the node serves, for `grpc.health.v1`. It does from the start.
    pub async fn set_serving(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in SERVICES {
            self.0.set_service_status(service, status).await;
        }
    }
}

fn house(
    node: &str,
    broker: &Broker,
    config: &ApiConfig,
    metrics: &Arc<Metrics>,
    health: &Health,
    stop: &CancellationToken,
) -> io::Result<House> {
    let limits = StreamLimits {
        requests: usize::try_from(config.stream_requests_max).unwrap_or(usize::MAX),
        bytes: usize::try_from(config.stream_bytes_max).unwrap_or(usize::MAX),
    };
    let budget = |taken: &Level, limit, key, what| {
        Budget::new(taken.clone(), limit, metrics.rejections.clone()).named(key, what)
    };
    let answers = budget(
        &metrics.answer_bytes,
        config.answer_memory,
        "api.answer_memory",
        "bytes of answers wait to be read",
    );
    let answers =
        AnswerBudget::new(answers, config.answer_memory_per_connection, metrics.connections.clone());
    let describe = || {
        reflection::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let requests = budget(
        &metrics.request_bytes,
        config.request_memory,
        "api.request_memory",
        "bytes of requests are arriving",
    );
    let sends = requests.keeping_back(
        config.request_memory / KEPT_FROM_SENDS,
        "bytes of requests are arriving (an eighth is kept for other calls than sends)",
    );
    Ok(House {
        metrics: Arc::clone(metrics),
        requests,
        sends,
        answers: answers.clone(),
        limits: CallLimits {
            calls: config.calls_max,
            headers: config.headers_max,
            request_timeout: config.request_timeout,
        },
        broker: BrokerApi::new(broker.clone(), limits, answers, stop.clone()),
        admin: AdminServer::new(AdminApi::new(broker.clone(), node.to_owned(), Arc::clone(metrics))),
        health: HealthServer::new(HealthService::from_health_reporter(health.0.clone())),
        reflection: erased(describe().build_v1().map_err(io::Error::other)?),
        reflection_alpha: erased(describe().build_v1alpha().map_err(io::Error::other)?),
        stop: stop.clone(),
    })
}

fn erased<S>(
    service: S,
) -> BoxCloneSyncService<Request<Framed<hyper::body::Incoming>>, Response<Body>, Infallible>
where
    S: tower::Service<Request<Framed<hyper::body::Incoming>>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    BoxCloneSyncService::new(service)
}

/// The runtime of one thread.
struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    fn new() -> io::Result<Self> {
        let mut builder = Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(BLOCKING_THREADS).build().map(|runtime| Self(Some(runtime)))
    }

    fn run(mut self, work: impl Future<Output = ()>) {
        if let Some(runtime) = self.0.take() {
            runtime.block_on(work);
            runtime.shutdown_timeout(LAST_WORK);
        }
    }
}

/// Dropped without having run, possibly inside another runtime, where waiting is not allowed.
impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

fn bind(listen: SocketAddr) -> io::Result<TcpListener> {
    let socket = match listen {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(listen)?;
    socket.listen(BACKLOG)
}

fn http(config: &ApiConfig) -> http2::Builder<TokioExecutor> {
    // The configuration has been checked to fit.
    let bounded = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .adaptive_window(false)
        .initial_stream_window_size(bounded(config.stream_window))
        .initial_connection_window_size(bounded(config.connection_window))
        .max_frame_size(bounded(config.frame_max))
        .max_concurrent_streams(bounded(config.calls_per_connection))
        .max_header_list_size(bounded(config.headers_max.saturating_mul(HARD_HEADERS)))
        .keep_alive_interval(config.keepalive_interval)
        .keep_alive_timeout(config.keepalive_timeout)
        .auto_date_header(false);
    builder
}

/// Accepts and deals.
struct Accept {
    listener: TcpListener,
    dealers: Vec<mpsc::Sender<Dealt>>,
    connections: TaskTracker,
    most: u64,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
}

impl Accept {
    async fn run(self) {
        let mut number = 0_u64;
        let mut dealers = self.dealers.iter().cycle();
        let turning = Arc::new(Semaphore::new(TURNED_AWAY));
        let words = last_words(&format!(
            "{} connections, the most that `api.connections_max` allows; close some, or raise it",
            self.most
        ));
        loop {
            let accepted = select! {
                () = self.stop.cancelled() => return,
                accepted = self.listener.accept() => accepted,
            };
            let stream = match accepted.and_then(|(stream, _)| stream.into_std()) {
                Ok(stream) => stream,
                Err(error) => {
                    self.metrics.refused_connections.count(TurnedAway::AcceptFailed as usize);
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if self.metrics.connections.add(1) > self.most {
                self.metrics.connections.subtract(1);
                self.metrics.refused_connections.count(TurnedAway::Limit as usize);
                tracing::debug!(limit = self.most, "a connection was closed as it came: there are too many");
                if let Ok(place) = Arc::clone(&turning).try_acquire_owned() {
                    let turn_away = turn_away(stream, words.clone());
                    tokio::spawn(async move {
                        turn_away.await;
                        drop(place);
                    });
                }
                continue;
            }
            let open = Open {
                connections: self.metrics.connections.clone(),
                closed: self.metrics.closed_connections.clone(),
                ended: Ended::Cut,
                _tracked: self.connections.token(),
            };
            number = number.wrapping_add(1);
            let Some(dealer) = dealers.next() else { return };
            if dealer.send(Dealt { stream, number, open }).await.is_err() {
                return;
            }
        }
    }
}

/// What each thread does.
#[derive(Clone)]
struct Core {
    serving: Serving,
    kill: CancellationToken,
}

impl Core {
    async fn serve(self, mut inbox: mpsc::Receiver<Dealt>, accept: Option<Accept>) {
        WakeHub::install();
        if let Some(accept) = accept {
            tokio::spawn(accept.run());
        }
        loop {
            select! {
                () = self.kill.cancelled() => return,
                dealt = inbox.recv() => match dealt {
                    Some(dealt) => drop(tokio::spawn(self.serving.clone().serve(dealt))),
                    None => return self.kill.cancelled().await,
                },
            }
        }
    }
}
