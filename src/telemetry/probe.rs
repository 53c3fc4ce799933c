//! The probe listener: plain HTTP/1.1 and HTTP/2 on one port, without business data.
//!
//! | path | answers |
//! |---|---|
//! | `/livez` | 200, or 503 where a restart is due |
//! | `/readyz` | 200, or 503 while new work should go elsewhere |
//! | `/startupz` | 200 once the start is over |
//! | `/metrics` | all series in Prometheus' text format |
//! | `/version` | what this is |
//!
//! With `?verbose` the first three answer a JSON list of their checks. Connections are bounded in number, in the
//! time until they say something, and in age.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Mutex, OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
    time::{sleep, timeout},
};

use super::{COMMIT, Health, Metrics, RUSTC, VERSION, health::Finding};

/// Open at once; more are closed again.
const MAX_CONNECTIONS: usize = 256;
/// Until the first byte, and until the end of each head.
const HEAD_MAX: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(5) };
/// Between two looks at a beginning that is not complete.
const PEEK_PAUSE: Duration = Duration::from_millis(10);
/// What HTTP/2 begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Age at which a connection is asked to end; clients open a new one.
const AGE_MAX: Duration = Duration::from_secs(300);
/// What it may still take to end.
const END_MAX: Duration = Duration::from_secs(5);
/// Answers at once on one HTTP/2 connection.
const MAX_STREAMS: u32 = 16;
/// Longest head.
const MAX_HEAD_BYTES: u32 = 16 << 10;
/// A check that takes longer has failed.
const CHECK_MAX: Duration = Duration::from_secs(1);
/// Checks running at once; each holds a thread while it does.
const MAX_CHECKS: usize = 4;
/// Pause after a failed accept, as when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound probe listener.
#[derive(Debug)]
pub struct Probe {
    listener: TcpListener,
    address: SocketAddr,
}

struct Shared {
    health: Health,
    metrics: Metrics,
    checks: Arc<Semaphore>,
    /// The last text, and when it was ready: whoever came before that shares it.
    scrape: Mutex<Option<(Instant, Bytes)>>,
}

impl Probe {
    /// Takes the address. On a tokio runtime only.
    pub async fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until it is dropped.
    pub async fn serve(self, health: Health, metrics: Metrics) {
        let checks = Arc::new(Semaphore::new(MAX_CHECKS));
        let shared = Arc::new(Shared { health, metrics, checks, scrape: Mutex::default() });
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    if let Ok(slot) = Arc::clone(&slots).try_acquire_owned() {
                        tokio::spawn(converse(stream, Arc::clone(&shared), slot));
                    } else {
                        tracing::warn!(
                            event = "limit.reached",
                            limit = MAX_CONNECTIONS,
                            "too many connections on the probe listener"
                        );
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the probe listener cannot accept");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// One connection from its first byte to its end.
async fn converse(stream: TcpStream, shared: Arc<Shared>, _slot: OwnedSemaphorePermit) {
    if !matches!(timeout(HEAD_MAX, spoken(&stream)).await, Ok(true)) {
        tracing::debug!("a probe connection said nothing and was closed");
        return;
    }
    let mut server = auto::Builder::new(TokioExecutor::new());
    server
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .max_buf_size(MAX_HEAD_BYTES as usize);
    server
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(HEAD_MAX);
    let service = service_fn(move |request| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(answer(request, &shared).await) }
    });
    let mut connection = pin!(server.serve_connection(TokioIo::new(stream), service));
    let ended = timeout(AGE_MAX, connection.as_mut()).await.is_ok();
    if !ended {
        connection.as_mut().graceful_shutdown();
        let _ = timeout(END_MAX, connection).await;
    }
}

/// Waits until the first bytes tell the version of HTTP: hyper waits for them without a limit. False when the
/// client has gone.
async fn spoken(stream: &TcpStream) -> bool {
    let mut first = [0; PREFACE.len()];
    loop {
        match stream.peek(&mut first).await {
            Ok(0) | Err(_) => return false,
            Ok(read) if read < PREFACE.len() && first.get(..read) == PREFACE.get(..read) => {
                // What has been seen stays readable, so there is no event to wait for.
                sleep(PEEK_PAUSE).await;
            }
            Ok(_) => return true,
        }
    }
}

async fn answer(request: Request<Incoming>, shared: &Shared) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered here\n");
        refused.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let verbose = request
        .uri()
        .query()
        .is_some_and(|query| query.split('&').any(|part| part == "verbose" || part.starts_with("verbose=")));
    match request.uri().path() {
        "/livez" => probe(shared, verbose, Health::live).await,
        "/readyz" => probe(shared, verbose, Health::ready).await,
        "/startupz" => probe(shared, verbose, Health::startup).await,
        "/metrics" => scrape(shared).await,
        "/version" => {
            let version = serde_json::json!({ "version": VERSION, "commit": COMMIT, "rustc": RUSTC });
            reply(StatusCode::OK, "application/json", format!("{version}\n"))
        }
        _ => text(StatusCode::NOT_FOUND, "try /livez, /readyz, /startupz, /metrics or /version\n"),
    }
}

async fn probe(
    shared: &Shared,
    verbose: bool,
    look: impl FnOnce(&Health) -> Vec<Finding> + Send + 'static,
) -> Response<Full<Bytes>> {
    let findings = checked(shared, look).await.unwrap_or_else(|problem| {
        vec![Finding { name: "checks", ok: false, problem: Some(problem), since_seconds: 0 }]
    });
    let bad: Vec<&Finding> = findings.iter().filter(|finding| !finding.ok).collect();
    let status = if bad.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    if verbose {
        let list = serde_json::json!({ "ok": bad.is_empty(), "checks": findings });
        return reply(status, "application/json", format!("{list}\n"));
    }
    if bad.is_empty() {
        return text(status, "ok\n");
    }
    let lines = bad
        .iter()
        .map(|finding| format!("{}: {}\n", finding.name, finding.problem.as_deref().unwrap_or("failed")));
    reply(status, PLAIN, lines.collect::<String>())
}

/// Makes checks on a thread that may block, and does not wait for those that do.
async fn checked<T: Send + 'static>(
    shared: &Shared,
    look: impl FnOnce(&Health) -> T + Send + 'static,
) -> Result<T, String> {
    let permit = timeout(CHECK_MAX, Arc::clone(&shared.checks).acquire_owned());
    let Ok(Ok(permit)) = permit.await else { return Err("earlier checks have not returned".into()) };
    let health = shared.health.clone();
    let run = spawn_blocking(move || {
        let _permit = permit;
        look(&health)
    });
    match timeout(CHECK_MAX, run).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(format!("a check failed: {error}")),
        Err(_) => Err(format!("a check did not return within {CHECK_MAX:?}")),
    }
}

/// Gathers once for all who wait.
async fn scrape(shared: &Shared) -> Response<Full<Bytes>> {
    let arrived = Instant::now();
    let mut last = shared.scrape.lock().await;
    let ready = last.as_ref().filter(|(ready, _)| *ready >= arrived).map(|(_, bytes)| bytes.clone());
    let bytes = match ready {
        Some(bytes) => bytes,
        None => {
            let metrics = shared.metrics.clone();
            let gathered = spawn_blocking(move || metrics.text()).await.map_err(|error| error.to_string());
            match gathered.and_then(|text| text) {
                Ok(text) => {
                    let bytes = Bytes::from(text);
                    *last = Some((Instant::now(), bytes.clone()));
                    bytes
                }
                Err(error) => return reply(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, format!("{error}\n")),
            }
        }
    };
    reply(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", bytes)
}

const PLAIN: &str = "text/plain; charset=utf-8";

fn text(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    reply(status, PLAIN, text)
}

fn reply(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::{
        super::{Exporters, Identity, Phase, observe_node},
        *,
    };
    use crate::config::TelemetryConfig;

    async fn start(health: &Health) -> SocketAddr {
        let identity = Identity {
            service: "holdfast-broker",
            node_type: "broker",
            cluster: "demo".into(),
            node: "demo-0".into(),
            shard: "main".into(),
        };
        let environment = BTreeMap::new();
        let metrics =
            Metrics::new(&TelemetryConfig::default(), &identity, &Exporters::default(), &environment)
                .unwrap();
        observe_node(&metrics.scope("holdfast.node"), health, None);
        let probe = Probe::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let address = probe.address();
        tokio::spawn(probe.serve(health.clone(), metrics));
        address
    }

    /// Says something and reads until the other side closes.
    async fn say(address: SocketAddr, words: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(words).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn get(address: SocketAddr, path: &str) -> (u16, String) {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let answer = say(address, request.as_bytes()).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    #[tokio::test]
    async fn the_probes_follow_the_node_from_start_to_end() {
        let health = Health::new();
        let address = start(&health).await;
        assert_eq!(get(address, "/livez").await, (200, "ok\n".into()));
        assert_eq!(get(address, "/startupz").await.0, 503);
        assert_eq!(get(address, "/readyz").await, (503, "serving: the node is starting\n".into()));
        health.enter(Phase::Serving);
        assert_eq!(get(address, "/startupz").await.0, 200);
        assert_eq!(get(address, "/readyz").await.0, 200);
        health.ready_if("storage", || Err("fenced".into()));
        let (status, body) = get(address, "/readyz?verbose").await;
        let list: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &list["ok"]), (503, &false.into()));
        assert_eq!(list["checks"][1]["problem"], "fenced");
        assert_eq!(get(address, "/livez").await.0, 200, "a disk fault is no reason to restart");
        health.clear();
        health.enter(Phase::Draining);
        assert_eq!(get(address, "/readyz").await.0, 503);
        assert_eq!(get(address, "/startupz").await.0, 200);
    }

    #[tokio::test]
    async fn metrics_and_version_are_served_and_nothing_else() {
        let address = start(&Health::new()).await;
        let (status, text) = get(address, "/metrics").await;
        assert_eq!(status, 200);
        assert!(text.contains("holdfast_build_info"), "{text}");
        assert!(get(address, "/version").await.1.contains(VERSION));
        assert_eq!(get(address, "/").await.0, 404);
        let answer = say(address, b"POST /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
    }

    #[tokio::test]
    async fn http_2_without_tls_is_answered_on_the_same_port() {
        let address = start(&Health::new()).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        // Preface and empty SETTINGS; the server answers with its own.
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(head[3], 4, "a SETTINGS frame");
    }

    #[tokio::test]
    async fn who_says_nothing_or_half_a_word_is_closed() {
        let address = start(&Health::new()).await;
        assert_eq!(say(address, b"").await, "");
        assert_eq!(say(address, b"PRI * HTTP/2").await, "");
        let answer = say(address, b"GET /livez HTTP/1.1\r\nhost: x\r\n").await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");
        say(address, b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03").await;
        assert_eq!(get(address, "/livez").await.0, 200);
    }

    #[tokio::test]
    async fn a_check_that_hangs_fails_the_probe() {
        let health = Health::new();
        let address = start(&health).await;
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let wait = parking_lot::Mutex::new(wait);
        health.live_if("writer", move || wait.lock().recv().map_err(|error| error.to_string()));
        let (status, body) = get(address, "/livez").await;
        assert_eq!(status, 503);
        assert!(body.contains("did not return"), "{body}");
        drop(release);
    }
}
