//! Starts the real binary with a data directory of its own, and talks to it as a client would.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod random;
pub mod raw;

use std::{
    fs::{self, File},
    io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use holdfast::pb::v1::{
    CreateGroupRequest, CreateTopicRequest, GetNodeStatusRequest, GetOffsetsRequest, Message, NodeStatus,
    PullRequest, PullResponse, QueueOffsets, QueueRef, SendRequest, SendResponse, SystemProperties, Topic,
    TopicSettings, admin_client::AdminClient, broker_client::BrokerClient,
};
pub use random::Random;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_types::StatusExt;

/// Longest wait for anything that should happen soon. Generous: it only ends tests that have failed anyway.
pub const SOON: Duration = Duration::from_secs(30);
/// Largest answer a client takes.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// A broker process. Killed when dropped; what it wrote is shown if the test failed.
pub struct Broker {
    role: &'static str,
    settings: Vec<(String, String)>,
    dir: TempDir,
    port: u16,
    child: Option<Child>,
}

impl Broker {
    /// `standalone` as a person starts it.
    pub async fn start() -> Self {
        Self::start_with("standalone", &[]).await
    }

    /// With configuration keys, e.g. `("topics.auto_create", "false")`.
    pub async fn start_with(role: &'static str, settings: &[(&str, &str)]) -> Self {
        let settings = settings.iter().map(|&(key, value)| (key.into(), value.into())).collect();
        let dir = tempfile::Builder::new().prefix("holdfast-test-").tempdir().unwrap();
        let mut broker = Self { role, settings, dir, port: 0, child: None };
        broker.restart().await;
        broker
    }

    /// Starts the process again on the same data. Returns when it serves.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "still running");
        for _ in 0..5 {
            self.port = free_port();
            if self.try_start().await {
                return;
            }
        }
        panic!("the broker did not start:\n{}", self.output());
    }

    /// Starts the process and waits until it serves; false when it ended instead.
    async fn try_start(&mut self) -> bool {
        self.spawn();
        let begun = Instant::now();
        loop {
            if let Some(code) = self.exited() {
                eprintln!("the broker ended at its start with {code}");
                self.child = None;
                return false;
            }
            if self.serves().await {
                return true;
            }
            assert!(begun.elapsed() < SOON, "the broker does not serve:\n{}", self.output());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts the process without waiting for anything.
    pub fn spawn(&mut self) {
        let log = File::options().create(true).append(true).open(self.log_path()).unwrap();
        let child = Command::new(binary())
            .arg(self.role)
            .args(["--data-dir".as_ref(), self.data_dir().as_os_str()])
            .args(["--listen", &self.address()])
            // Of the tests, not of the broker.
            .env_remove("HOLDFAST_FUZZ_CALLS")
            .env(variable("listen.probe"), "127.0.0.1:0")
            .envs(self.settings.iter().map(|(key, value)| (variable(key), value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    async fn serves(&self) -> bool {
        let Ok(channel) = self.endpoint().connect().await else { return false };
        let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
        answer.is_ok_and(|answer| answer.into_inner().status == ServingStatus::Serving as i32)
    }

    /// Changes a setting for the next start.
    pub fn set(&mut self, key: &str, value: &str) {
        self.settings.retain(|(name, _)| name != key);
        self.settings.push((key.into(), value.into()));
    }

    /// `kill -9`, waited for.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("a running broker");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// The start of an orderly stop, as SIGTERM asks for it.
    pub fn send_term(&self) {
        kill_process(self.pid(), Signal::TERM).unwrap();
    }

    /// The process's id.
    pub fn pid(&self) -> Pid {
        Pid::from_child(self.child.as_ref().expect("a running broker"))
    }

    /// Bytes of memory that the process has in use.
    pub fn resident(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid().as_raw_nonzero())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    }

    /// How the process ended, once it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.as_mut().expect("a started broker").try_wait().unwrap()
    }

    /// Waits for the process to end by itself.
    pub async fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.exited() {
                self.child = None;
                return status;
            }
            assert!(begun.elapsed() < SOON, "the broker does not end:\n{}", self.output());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// SIGTERM, waited for; must end well.
    pub async fn stop(&mut self) {
        self.send_term();
        let status = self.wait().await;
        assert!(status.success(), "ended with {status}:\n{}", self.output());
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// `ADDR:PORT` of the API.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address())).unwrap().connect_timeout(SOON)
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("output.log")
    }

    /// What all processes on this data have written to stdout and stderr.
    pub fn output(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// A connection of its own.
    pub async fn client(&self) -> Client {
        Client::new(self.endpoint().connect().await.unwrap())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            let output = self.output();
            let from = output.len().saturating_sub(8000);
            let from = (from..output.len()).find(|&at| output.is_char_boundary(at)).unwrap_or(0);
            eprintln!("---- what the broker wrote ----\n{}\n----", &output[from..]);
        }
    }
}

/// The binary under test: `HOLDFAST_BIN`, else the one that cargo built with the tests.
pub fn binary() -> PathBuf {
    std::env::var_os("HOLDFAST_BIN").map_or_else(|| env!("CARGO_BIN_EXE_holdfast").into(), PathBuf::from)
}

/// The environment variable of a configuration key.
pub fn variable(key: &str) -> String {
    format!("HOLDFAST_{}", key.to_uppercase().replace('.', "__"))
}

/// A port that is free now, below those that the system hands to clients, and not given twice here.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 10_000 + (std::process::id() % 20_000) as u16;
    loop {
        let port = base.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed) % 2_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// One connection and both services on it.
#[derive(Clone)]
pub struct Client {
    pub channel: Channel,
    pub broker: BrokerClient<Channel>,
    pub admin: AdminClient<Channel>,
}

impl Client {
    pub fn new(channel: Channel) -> Self {
        Self {
            broker: BrokerClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES),
            admin: AdminClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES),
            channel,
        }
    }

    /// Makes a topic with this many queues and defaults otherwise.
    pub async fn topic(&self, topic: &str, queues: u32) -> Topic {
        self.topic_with(topic, TopicSettings { queues: Some(queues), ..TopicSettings::default() }).await
    }

    pub async fn topic_with(&self, topic: &str, settings: TopicSettings) -> Topic {
        let request = CreateTopicRequest { topic: topic.into(), settings: Some(settings) };
        self.admin.clone().create_topic(request).await.unwrap().into_inner()
    }

    pub async fn group(&self, group: &str) {
        let request = CreateGroupRequest { group: group.into(), settings: None };
        self.admin.clone().create_group(request).await.unwrap();
    }

    pub async fn try_send(&self, request: SendRequest) -> Result<SendResponse, Status> {
        self.broker.clone().send(request).await.map(tonic::Response::into_inner)
    }

    /// Sends bodies to one queue in one call.
    pub async fn send(&self, topic: &str, queue: u32, bodies: &[&str]) -> SendResponse {
        let messages = bodies.iter().map(|&body| message(body)).collect();
        self.send_messages(topic, queue, messages).await
    }

    pub async fn send_messages(&self, topic: &str, queue: u32, messages: Vec<Message>) -> SendResponse {
        let request = SendRequest { queue_id: Some(queue), ..send_request(topic, messages) };
        self.try_send(request).await.unwrap()
    }

    pub async fn try_pull(&self, request: PullRequest) -> Result<PullResponse, Status> {
        self.broker.clone().pull(request).await.map(tonic::Response::into_inner)
    }

    /// One pull that must be answered with OK.
    pub async fn pull(&self, request: PullRequest) -> PullResponse {
        self.try_pull(request).await.unwrap()
    }

    /// All of a queue from its first offset to its end, as the broker delivers it.
    pub async fn all(&self, topic: &str, queue: u32) -> Vec<Message> {
        let mut request = pull_request(topic, queue, self.offsets(topic, queue, "").await.min_offset);
        request.max_messages = 1024;
        request.max_bytes = 16 << 20;
        let mut found = Vec::new();
        loop {
            let answer = self.pull(request.clone()).await;
            if answer.messages.is_empty() {
                assert_eq!(answer.next_offset, answer.max_offset, "{answer:?}");
                return found;
            }
            found.extend(answer.messages);
            request.offset = answer.next_offset;
        }
    }

    /// Bounds of a queue, and the group's progress unless `group` is empty.
    pub async fn offsets(&self, topic: &str, queue: u32, group: &str) -> QueueOffsets {
        let queues = vec![QueueRef { topic: topic.into(), queue_id: queue }];
        let request = GetOffsetsRequest { queues, group: group.into(), ..GetOffsetsRequest::default() };
        let answer = self.broker.clone().get_offsets(request).await.unwrap().into_inner();
        answer.offsets.into_iter().next().unwrap()
    }

    pub async fn status(&self) -> NodeStatus {
        self.admin.clone().get_node_status(GetNodeStatusRequest {}).await.unwrap().into_inner()
    }

    /// Waits until this many pulls are held.
    pub async fn wait_held(&self, pulls: u64) {
        eventually(&format!("{pulls} held pulls"), async || self.status().await.held_pulls == pulls).await;
    }
}

/// Waits until `what` is so.
pub async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < SOON, "it never came about: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn message(body: impl AsRef<[u8]>) -> Message {
    Message { body: body.as_ref().to_vec().into(), ..Message::default() }
}

pub fn tagged(body: &str, tag: &str) -> Message {
    let system = SystemProperties { tag: Some(tag.into()), ..SystemProperties::default() };
    Message { system_properties: Some(system), ..message(body) }
}

pub fn grouped(body: &str, group: &str) -> Message {
    let system = SystemProperties { message_group: Some(group.into()), ..SystemProperties::default() };
    Message { system_properties: Some(system), ..message(body) }
}

pub fn send_request(topic: &str, messages: Vec<Message>) -> SendRequest {
    SendRequest { topic: topic.into(), messages, ..SendRequest::default() }
}

pub fn pull_request(topic: &str, queue: u32, offset: i64) -> PullRequest {
    PullRequest { topic: topic.into(), queue_id: queue, offset, ..PullRequest::default() }
}

/// The same pull, willing to wait.
pub fn waiting(request: PullRequest, wait: Duration) -> PullRequest {
    PullRequest { wait: Some(duration(wait)), ..request }
}

pub fn duration(value: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(value).unwrap()
}

pub fn millis(time: &prost_types::Timestamp) -> i64 {
    time.seconds * 1000 + i64::from(time.nanos) / 1_000_000
}

pub fn timestamp(ms: i64) -> prost_types::Timestamp {
    let nanos = i32::try_from(ms.rem_euclid(1000)).unwrap() * 1_000_000;
    prost_types::Timestamp { seconds: ms.div_euclid(1000), nanos }
}

/// Bodies as text.
pub fn bodies(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|message| String::from_utf8(message.body.to_vec()).unwrap()).collect()
}

pub fn system(message: &Message) -> &SystemProperties {
    message.system_properties.as_ref().expect("system properties")
}

/// A failed call as a program sees it.
#[derive(Debug)]
pub struct Refusal {
    pub code: Code,
    pub text: String,
    pub reason: String,
    pub metadata: std::collections::HashMap<String, String>,
    /// Fields that were named.
    pub fields: Vec<String>,
    pub retry: Option<Duration>,
}

impl Refusal {
    /// Reads a status; one without our details fails the test.
    pub fn of(status: &Status) -> Self {
        let details = status.get_error_details();
        let info = details.error_info().unwrap_or_else(|| panic!("no ErrorInfo: {status:?}"));
        assert_eq!(info.domain, "holdfast");
        assert!(!status.message().is_empty(), "an error without a text: {status:?}");
        let violations = details.bad_request().map(|bad| bad.field_violations.clone()).unwrap_or_default();
        Self {
            code: status.code(),
            text: status.message().into(),
            reason: info.reason.clone(),
            metadata: info.metadata.clone(),
            fields: violations.into_iter().map(|violation| violation.field).collect(),
            retry: details.retry_info().and_then(|info| info.retry_delay),
        }
    }

    /// The refusal of a bad field: INVALID_ARGUMENT that names `field`.
    #[track_caller]
    pub fn of_field(status: &Status, field: &str) -> Self {
        let refusal = Self::of(status);
        assert_eq!(refusal.code, Code::InvalidArgument, "{refusal:?}");
        assert!(refusal.fields.iter().any(|named| named == field), "`{field}` is not named: {refusal:?}");
        refusal
    }
}

/// Names of all files below `dir`, with their sizes.
pub fn files_below(dir: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let (mut found, mut dirs) = (Vec::new(), vec![dir.to_path_buf()]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            match entry.metadata()? {
                kind if kind.is_dir() => dirs.push(entry.path()),
                kind => found.push((entry.path(), kind.len())),
            }
        }
    }
    found.sort();
    Ok(found)
}
