//! The server over a real store, driven through sockets: by the generated client, and by bare HTTP/2 for
//! what no gRPC library would send.

use std::{future::poll_fn, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use opentelemetry::metrics::{Meter, MeterProvider};
use opentelemetry_sdk::metrics::SdkMeterProvider;
use prost::Message;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Code, Status, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};
use tonic_types::StatusExt;

use super::Server;
use crate::{
    broker::{Broker, Meters, news},
    config::{ApiConfig, BrokerConfig, HoldConfig},
    hold::Hold,
    pb::v1::{self, admin_client::AdminClient, broker_client::BrokerClient, send_stream_response::Outcome},
    runtime::SystemClock,
    store::{Options, Store, disk::RealDisk},
};

/// Longest wait for anything that should happen soon; it only ends tests that have failed anyway.
const SOON: Duration = Duration::from_secs(30);

/// A broker behind a server.
struct Node {
    /// Until it is stopped.
    server: Option<Server>,
    store: Store,
    registry: prometheus::Registry,
    _provider: SdkMeterProvider,
    _dir: TempDir,
}

impl Node {
    fn start() -> Self {
        Self::with(&ApiConfig { threads: 2, ..ApiConfig::default() })
    }

    fn with(config: &ApiConfig) -> Self {
        Self::on(SocketAddr::from(([127, 0, 0, 1], 0)), config).unwrap()
    }

    fn on(listen: SocketAddr, config: &ApiConfig) -> std::io::Result<Self> {
        let dir = tempfile::tempdir().unwrap();
        let registry = prometheus::Registry::new();
        let exporter = opentelemetry_prometheus::exporter().with_registry(registry.clone()).build().unwrap();
        let provider = SdkMeterProvider::builder().with_reader(exporter).build();
        let meter: Meter = provider.meter("test");
        let clock = Arc::new(SystemClock::new());
        let hold = Hold::new((&HoldConfig::default()).into(), &meter);
        let mut options = Options::new(dir.path(), "main");
        options.disk_floor_bytes = 0;
        let store = Store::open(options, Arc::new(RealDisk), clock.clone(), news(&hold), &meter).unwrap();
        let mut broker_config = BrokerConfig::default();
        broker_config.topics.auto_create = true;
        broker_config.topics.default_queues = 1;
        let meters = Meters { rocketmq: meter.clone(), holdfast: meter.clone() };
        let broker = Broker::new(store.clone(), hold, broker_config, clock, &meters);
        let server = Server::start(listen, "node-1", broker, config, &meter)?;
        Ok(Self { server: Some(server), store, registry, _provider: provider, _dir: dir })
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    async fn stop(mut self, grace: Duration) {
        self.server.take().unwrap().stop(grace).await;
    }

    fn metrics(&self) -> String {
        prometheus::TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap()
    }

    async fn channel(&self) -> Channel {
        let url = format!("http://{}", self.server().local_addr());
        Channel::from_shared(url).unwrap().connect().await.unwrap()
    }

    async fn client(&self) -> BrokerClient<Channel> {
        BrokerClient::new(self.channel().await).max_decoding_message_size(64 << 20)
    }

    async fn held(&self) -> u64 {
        let mut admin = AdminClient::new(self.channel().await);
        admin.get_node_status(v1::GetNodeStatusRequest {}).await.unwrap().into_inner().held_pulls
    }

    async fn wait_held(&self, count: u64) {
        wait("held pulls", async || self.held().await == count).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.store.close();
    }
}

async fn wait(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let waited = timeout(SOON, async {
        while !done().await {
            sleep(Duration::from_millis(2)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("never came true: {what}"));
}

fn message(body: impl Into<Bytes>) -> v1::Message {
    v1::Message { body: body.into(), ..Default::default() }
}

fn send(topic: &str, messages: Vec<v1::Message>) -> v1::SendRequest {
    v1::SendRequest { topic: topic.into(), messages, ..Default::default() }
}

fn pull(topic: &str, offset: i64, wait: u64) -> v1::PullRequest {
    let wait = Some(prost_types::Duration { seconds: i64::try_from(wait).unwrap(), nanos: 0 });
    v1::PullRequest { topic: topic.into(), offset, wait, ..Default::default() }
}

fn reason(status: &Status) -> String {
    status.get_error_details().error_info().map(|info| info.reason.clone()).unwrap_or_default()
}

// ---- Bare HTTP/2 ----------------------------------------------------------------------------

type Sender = h2::client::SendRequest<Bytes>;

/// How a bare call ended.
#[derive(Debug)]
struct Ended {
    http: u16,
    code: Option<Code>,
    body: Vec<u8>,
}

async fn bare(node: &Node) -> Sender {
    let stream = TcpStream::connect(node.server().local_addr()).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn request(path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::post(format!("http://host{path}")).header("te", "trailers");
    if !headers.iter().any(|(name, _)| *name == "content-type") {
        request = request.header("content-type", "application/grpc");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap()
}

async fn ended(response: Response<h2::RecvStream>) -> Ended {
    let (parts, mut body) = response.into_parts();
    let mut bytes = Vec::new();
    while let Some(chunk) = body.data().await {
        let Ok(chunk) = chunk else { break };
        let _ = body.flow_control().release_capacity(chunk.len());
        bytes.extend_from_slice(&chunk);
    }
    let trailers = body.trailers().await.ok().flatten();
    let code = |headers: &HeaderMap| Status::from_header_map(headers).map(|status| status.code());
    let code = code(&parts.headers).or(trailers.as_ref().and_then(code));
    Ended { http: parts.status.as_u16(), code, body: bytes }
}

/// One call with these very bytes as its body.
async fn call(sender: &mut Sender, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Ended {
    let (response, mut stream) =
        sender.clone().ready().await.unwrap().send_request(request(path, headers), false).unwrap();
    stream.send_data(Bytes::copy_from_slice(body), true).unwrap();
    ended(timeout(SOON, response).await.unwrap().unwrap()).await
}

fn framed(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    let mut framed = vec![0];
    framed.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
    framed.extend(bytes);
    framed
}

const SEND: &str = "/holdfast.v1.Broker/Send";
const PULL: &str = "/holdfast.v1.Broker/Pull";

#[tokio::test]
async fn what_is_sent_is_pulled_with_what_the_broker_added() {
    let node = Node::start();
    let mut client = node.client().await;
    let sent = client.send(send("t", vec![message("one"), message("two")])).await.unwrap().into_inner();
    assert_eq!(sent.receipts.iter().map(|receipt| receipt.offset).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(sent.durability(), v1::Durability::DurableDisk);
    let pulled = client.pull(pull("t", 0, 0)).await.unwrap().into_inner();
    assert_eq!(pulled.outcome(), v1::PullOutcome::Found);
    assert_eq!((pulled.next_offset, pulled.min_offset, pulled.max_offset), (2, 0, 2));
    for (number, (found, receipt)) in pulled.messages.iter().zip(&sent.receipts).enumerate() {
        let system = found.system_properties.as_ref().unwrap();
        assert_eq!(system.message_id, receipt.message_id);
        assert_eq!(system.queue_offset, Some(i64::try_from(number).unwrap()));
        assert_eq!(system.store_timestamp, sent.store_timestamp);
    }
    let by = v1::query_messages_request::By::Place(v1::Place { queue_id: 0, offset: 1 });
    let query = v1::QueryMessagesRequest { topic: "t".into(), by: Some(by), ..Default::default() };
    let found = client.query_messages(query).await.unwrap().into_inner();
    assert_eq!(found.messages, pulled.messages[1..]);
}

#[tokio::test]
async fn reflection_lists_the_services_in_both_versions() {
    let node = Node::start();
    let mut client = ServerReflectionClient::new(node.channel().await);
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers =
        client.server_reflection_info(tokio_stream::once(ask.clone())).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) =
        answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list")
    };
    let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    for name in ["holdfast.v1.Broker", "holdfast.v1.Admin", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(answers.message().await.unwrap().is_none());

    let path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
    let old = call(&mut bare(&node).await, path, &[], &framed(&ask)).await;
    assert_eq!(old.code, Some(Code::Ok));
    assert!(old.body.windows(18).any(|window| window == b"holdfast.v1.Broker"));
}

#[tokio::test]
async fn health_is_told_by_its_handle_and_watchers_hear_of_a_stop() {
    let node = Node::start();
    let mut client = HealthClient::new(node.channel().await);
    let check = |service: &str| HealthCheckRequest { service: service.into() };
    for service in ["", "holdfast.v1.Broker", "holdfast.v1.Admin"] {
        node.server().health().set_serving(true).await;
        let answer = client.check(check(service)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
        node.server().health().set_serving(false).await;
        let answer = client.check(check(service)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::NotServing, "{service:?}");
    }
    assert_eq!(client.check(check("x")).await.unwrap_err().code(), Code::NotFound);

    node.server().health().set_serving(true).await;
    let mut watch = client.watch(check("")).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let stopping = tokio::spawn(node.stop(SOON));
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    assert_eq!(watch.message().await.unwrap_err().code(), Code::Unavailable);
    drop((watch, client));
    stopping.await.unwrap();
}

#[tokio::test]
async fn health_is_serving_from_the_start() {
    let node = Node::start();
    let mut client = HealthClient::new(node.channel().await);
    let check = HealthCheckRequest { service: "holdfast.v1.Broker".into() };
    assert_eq!(client.check(check).await.unwrap().into_inner().status(), ServingStatus::Serving);
}

#[tokio::test]
async fn a_timeout_header_that_is_broken_zero_or_twice_has_no_effect() {
    let node = Node::start();
    node.client().await.send(send("t", vec![message("x")])).await.unwrap();
    let mut bare = bare(&node).await;
    let body = framed(&send("t", vec![message("x")]));
    let held = framed(&pull("t", 1, 20));
    for value in ["abc", "5", "-1S", "999999999S", "1.5S", ""] {
        for (path, body) in [(SEND, &body), (PULL, &held)] {
            let ended = call(&mut bare, path, &[("grpc-timeout", value)], body).await;
            assert_eq!(ended.code, Some(Code::InvalidArgument), "{path} {value:?}");
        }
    }
    let twice = [("grpc-timeout", "1S"), ("grpc-timeout", "2S")];
    assert_eq!(call(&mut bare, SEND, &twice, &body).await.code, Some(Code::InvalidArgument));
    for value in ["0n", "1n"] {
        for (path, body) in [(SEND, &body), (PULL, &held)] {
            let ended = call(&mut bare, path, &[("grpc-timeout", value)], body).await;
            assert_eq!(ended.code, Some(Code::DeadlineExceeded), "{path} {value}");
        }
    }
    let end = node.client().await.pull(pull("t", 0, 0)).await.unwrap().into_inner().max_offset;
    assert_eq!(end, 1, "no call had an effect");
    assert_eq!(node.held().await, 0);
}

#[tokio::test]
async fn what_is_no_call_gets_a_client_error_and_the_connection_lives_on() {
    let node = Node::start();
    let mut bare = bare(&node).await;
    for method in super::door::METHODS {
        let path = format!("/{}", method.name);
        let stream = path.contains("SendStream") || path.contains("Reflection");
        if !stream {
            for body in [&[][..], &[0, 0], &[0, 0, 0, 0, 9, 1], &[7, 0, 0, 0, 0], &[0, 0, 0, 0, 0, 0]] {
                let ended = call(&mut bare, &path, &[], body).await;
                assert_eq!(ended.code, Some(Code::InvalidArgument), "{path} {body:?}");
            }
        }
        if path.contains("Reflection") {
            continue;
        }
        let ended = call(&mut bare, &path, &[], &[1, 0, 0, 0, 0]).await;
        assert_eq!(ended.code, Some(Code::Unimplemented), "{path}: compressed");
        let ended = call(&mut bare, &path, &[], &[0, 0xff, 0xff, 0xff, 0xff, 1]).await;
        assert_eq!(ended.code, Some(Code::InvalidArgument), "{path}: too long");
    }
    // The message is empty: each of these calls needs some field.
    for method in ["Send", "Pull", "CommitOffsets", "GetOffsets", "QueryMessages"] {
        let ended = call(&mut bare, &format!("/holdfast.v1.Broker/{method}"), &[], &[0; 5]).await;
        assert_eq!(ended.code, Some(Code::InvalidArgument), "{method}");
    }
    for path in ["/holdfast.v1.Broker/Nothing", "/x.Y/Z", "/"] {
        assert_eq!(call(&mut bare, path, &[], &[0; 5]).await.code, Some(Code::Unimplemented), "{path}");
    }
    let ended = call(&mut bare, SEND, &[("content-type", "text/html")], &[0; 5]).await;
    assert_eq!((ended.http, ended.code), (415, None));
    assert_eq!(call(&mut bare, PULL, &[], &framed(&pull("nothing", 0, 0))).await.code, Some(Code::NotFound));
    let metrics = node.metrics();
    assert!(metrics.contains("rpc_method=\"_OTHER\""), "{metrics}");
    assert!(!metrics.contains("holdfast_rpc_panics_total{"), "{metrics}");
}

/// Names of all methods of `holdfast.v1`, as `package.Service/Method`.
fn described() -> Vec<String> {
    let described = prost_types::FileDescriptorSet::decode(crate::pb::DESCRIPTORS).unwrap();
    let mut names = Vec::new();
    for file in described.file {
        for service in file.service {
            for method in service.method {
                names.push(format!(
                    "{}.{}/{}",
                    file.package.as_deref().unwrap(),
                    service.name.as_deref().unwrap(),
                    method.name.as_deref().unwrap()
                ));
            }
        }
    }
    names
}

#[test]
fn every_method_of_the_proto_has_its_line_at_the_door() {
    let here: Vec<_> = super::door::METHODS.iter().map(|method| method.name).collect();
    for name in described() {
        assert!(here.contains(&name.as_str()), "{name}");
    }
}

#[tokio::test]
async fn damaged_requests_are_never_an_internal_error() {
    let node = Node::start();
    node.client().await.send(send("t", vec![message("x")])).await.unwrap();
    let mut bare = bare(&node).await;
    let send = send("t", vec![message("abc")]);
    let bodies: [Vec<u8>; 4] = [
        send.encode_to_vec(),
        v1::SendStreamRequest { correlation: 3, send: Some(send) }.encode_to_vec(),
        v1::PullRequest { group: "g".into(), commit_offset: Some(1), ..pull("t", 0, 0) }.encode_to_vec(),
        v1::CommitOffsetsRequest {
            group: "g".into(),
            offsets: vec![v1::QueueOffset { topic: "t".into(), queue_id: 0, offset: 1 }],
        }
        .encode_to_vec(),
    ];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 32).unwrap()
    };
    for name in described() {
        for round in 0..40 {
            let mut body = bodies[round % bodies.len()].clone();
            for _ in 0..=random() % 3 {
                let at = random() % body.len();
                body[at] = random().to_le_bytes()[0];
            }
            let mut framed = vec![0];
            framed.extend(u32::try_from(body.len()).unwrap().to_be_bytes());
            framed.extend(&body);
            // A damaged pull may ask for a long wait.
            let ended = call(&mut bare, &format!("/{name}"), &[("grpc-timeout", "200m")], &framed).await;
            let code = ended.code.unwrap();
            assert!(![Code::Internal, Code::Unknown].contains(&code), "{name} {code:?} {body:?}");
        }
    }
    assert!(!node.metrics().contains("holdfast_rpc_panics_total{"), "{}", node.metrics());
}

#[tokio::test]
async fn a_call_of_the_largest_size_passes_and_a_larger_one_is_told_the_limit() {
    let node = Node::start();
    let mut client = node.client().await;
    let mut full = message(vec![7; 4 << 20]);
    full.user_properties = (0..16).map(|n| (format!("k{n:02}"), "v".repeat(1020))).collect();
    client.send(send("t", vec![full.clone()])).await.unwrap();
    let pulled = client.pull(pull("t", 0, 0)).await.unwrap().into_inner();
    assert_eq!(pulled.messages[0].user_properties, full.user_properties);
    assert_eq!(pulled.messages[0].body, full.body);

    let status = client.send(send("t", vec![message(vec![7; (4 << 20) + 1])])).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "BODY_TOO_LARGE"));
    assert!(status.message().contains("4194304"), "{status:?}");

    let status = client.send(send("t", vec![message(vec![7; 4 << 20]); 5])).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "BATCH_TOO_LARGE"));
    assert!(status.message().contains("16777216"), "{status:?}");
    client.pull(pull("t", 0, 0)).await.unwrap();
}

#[tokio::test]
async fn a_stream_answers_thousands_in_order_and_a_bad_frame_in_its_place() {
    let node = Node::start();
    let mut client = node.client().await;
    let requests = (0..5000_u64).map(|number| v1::SendStreamRequest {
        correlation: number,
        send: match number {
            1000 => None,
            2000 => Some(send("t", vec![message("")])),
            3000 => Some(send("no such name!", vec![message("x")])),
            _ => Some(send("t", vec![message(number.to_string())])),
        },
    });
    let mut answers = client.send_stream(tokio_stream::iter(requests)).await.unwrap().into_inner();
    let mut offset = 0;
    for number in 0..5000 {
        let answer = answers.message().await.unwrap().unwrap();
        assert_eq!(answer.correlation, number);
        match answer.outcome.unwrap() {
            Outcome::Sent(sent) => {
                assert_eq!(sent.receipts[0].offset, offset);
                offset += 1;
            }
            Outcome::Error(error) => {
                assert!([1000, 2000, 3000].contains(&number), "{error:?}");
                assert_eq!(error.code, i32::from(Code::InvalidArgument), "{error:?}");
            }
        }
    }
    assert_eq!(offset, 4997);
    assert!(answers.message().await.unwrap().is_none());
}

#[tokio::test]
async fn a_stream_frame_that_is_no_message_gets_its_error_and_the_stream_lives_on() {
    let node = Node::start();
    let good = |correlation| {
        framed(&v1::SendStreamRequest { correlation, send: Some(send("t", vec![message("x")])) })
    };
    let body = [good(1), vec![0, 0, 0, 0, 3, 0xff, 0xff, 0xff], good(2)].concat();
    let ended = call(&mut bare(&node).await, "/holdfast.v1.Broker/SendStream", &[], &body).await;
    assert_eq!(ended.code, Some(Code::Ok));
    let mut rest = ended.body.as_slice();
    let mut answers = Vec::new();
    while let Some((head, behind)) = rest.split_at_checked(5) {
        let length = u32::from_be_bytes(head[1..].try_into().unwrap()) as usize;
        answers.push(v1::SendStreamResponse::decode(&behind[..length]).unwrap());
        rest = &behind[length..];
    }
    assert!(matches!(answers[0].outcome, Some(Outcome::Sent(_))), "{answers:?}");
    assert!(matches!(answers[1].outcome, Some(Outcome::Error(_))), "{answers:?}");
    assert!(matches!(answers[2].outcome, Some(Outcome::Sent(_))), "{answers:?}");
    assert_eq!((answers[0].correlation, answers[2].correlation), (1, 2));
}

#[tokio::test]
async fn a_held_pull_ends_with_its_client() {
    let node = Node::start();
    let mut client = node.client().await;
    client.send(send("t", vec![message("x")])).await.unwrap();
    let held: Vec<_> = (0..20)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.pull(pull("t", 1, 20)).await })
        })
        .collect();
    node.wait_held(20).await;
    held.iter().for_each(tokio::task::JoinHandle::abort);
    node.wait_held(0).await;
}

#[tokio::test]
async fn who_does_not_speak_is_cut_off() {
    let config =
        ApiConfig { threads: 1, handshake_timeout: Duration::from_millis(100), ..ApiConfig::default() };
    let node = Node::with(&config);
    for greeting in [&b""[..], b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = TcpStream::connect(node.server().local_addr()).await.unwrap();
        stream.write_all(greeting).await.unwrap();
        let mut rest = Vec::new();
        // A reset is an end as well.
        let _ = timeout(SOON, stream.read_to_end(&mut rest)).await.expect("never cut off");
    }
    let mut sender = bare(&node).await;
    sleep(Duration::from_millis(300)).await;
    let ended = call(&mut sender, PULL, &[], &framed(&pull("t", 0, 0))).await;
    assert_eq!(ended.code, Some(Code::NotFound), "who has greeted may be silent");
    drop(sender);
    wait("no connection is left", async || node.server().connections() == 0).await;
}

#[tokio::test]
async fn connections_over_the_limit_are_refused_and_counted() {
    let node = Node::with(&ApiConfig { threads: 1, connections_max: 2, ..ApiConfig::default() });
    let first = bare(&node).await;
    let mut second = bare(&node).await;
    assert_eq!(call(&mut second, PULL, &[], &framed(&pull("t", 0, 0))).await.code, Some(Code::NotFound));
    wait("two connections", async || node.server().connections() == 2).await;
    let mut third = TcpStream::connect(node.server().local_addr()).await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(SOON, third.read_to_end(&mut rest)).await.expect("not refused");
    assert!(node.metrics().contains("holdfast_connections_refused_total"), "{}", node.metrics());
    drop(first);
    wait("one connection", async || node.server().connections() == 1).await;
    let mut again = bare(&node).await;
    assert_eq!(call(&mut again, PULL, &[], &framed(&pull("t", 0, 0))).await.code, Some(Code::NotFound));
}

#[tokio::test]
async fn requests_that_never_end_fill_their_budget_and_no_more() {
    let config = ApiConfig { threads: 1, request_memory: 17 << 20, ..ApiConfig::default() };
    let node = Node::with(&config);
    let sender = bare(&node).await;
    let mut head = vec![0];
    head.extend((16_u32 << 20).to_be_bytes());
    let mut open = Vec::new();
    for number in 0..2 {
        let (response, mut stream) =
            sender.clone().ready().await.unwrap().send_request(request(SEND, &[]), false).unwrap();
        stream.send_data(head.clone().into(), false).unwrap();
        let mut left = 12 << 20;
        let refused = loop {
            let piece = 64 << 10;
            stream.reserve_capacity(piece);
            match timeout(SOON, poll_fn(|cx| stream.poll_capacity(cx))).await.unwrap() {
                Some(Ok(capacity)) if left > 0 => {
                    let bytes = capacity.min(left);
                    if stream.send_data(vec![0; bytes].into(), false).is_err() {
                        break true;
                    }
                    left -= bytes;
                }
                Some(Ok(_)) => break false,
                _ => break true,
            }
        };
        assert_eq!(refused, number == 1, "the second does not fit");
        open.push((response, stream));
    }
    let (response, _stream) = open.pop().unwrap();
    assert_eq!(ended(response.await.unwrap()).await.code, Some(Code::ResourceExhausted));
    assert!(node.metrics().contains("holdfast_flow_rejections_total{"), "{}", node.metrics());
    drop(open);
    wait("room for others", async || {
        let mut client = node.client().await;
        client.send(send("t", vec![message(vec![1; 4 << 20]); 2])).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn pulls_that_are_not_read_fill_their_budget_and_no_more() {
    let config = ApiConfig { threads: 1, answer_memory: 17 << 20, ..ApiConfig::default() };
    let node = Node::with(&config);
    let mut client = node.client().await;
    for _ in 0..3 {
        client.send(send("t", vec![message(vec![1; 4 << 20])])).await.unwrap();
    }
    let all = v1::PullRequest { max_bytes: 16 << 20, ..pull("t", 0, 0) };
    let sender = bare(&node).await;
    let (response, mut stream) =
        sender.clone().ready().await.unwrap().send_request(request(PULL, &[]), false).unwrap();
    stream.send_data(framed(&all).into(), true).unwrap();
    let unread = timeout(SOON, response).await.unwrap().unwrap();

    let refused = client.pull(all.clone()).await.unwrap().into_inner();
    assert_eq!(refused.outcome(), v1::PullOutcome::NoNewMessage);
    assert!(refused.retry_delay.is_some() && refused.messages.is_empty());
    assert_eq!((refused.next_offset, refused.max_offset), (0, 3));
    drop((unread, stream));
    wait("the memory to come back", async || {
        client.pull(all.clone()).await.unwrap().into_inner().messages.len() == 3
    })
    .await;
}

#[tokio::test]
async fn a_stop_answers_who_waits_and_hangs_on_nobody() {
    let node = Node::start();
    let mut client = node.client().await;
    client.send(send("t", vec![message("x")])).await.unwrap();
    let held: Vec<_> = (0..50)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.pull(pull("t", 1, 30)).await })
        })
        .collect();
    node.wait_held(50).await;
    let silent = TcpStream::connect(node.server().local_addr()).await.unwrap();
    let idle = bare(&node).await;
    let (requests, stream) = mpsc::channel(8);
    let mut answers = client.send_stream(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let frame = v1::SendStreamRequest { correlation: 1, send: Some(send("t", vec![])) };
    requests.send(frame).await.unwrap();
    assert_eq!(answers.message().await.unwrap().unwrap().correlation, 1);

    let stopping = tokio::spawn(node.stop(Duration::from_secs(600)));
    for pull in held {
        let status = pull.await.unwrap().unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "STOPPING"));
    }
    let status = timeout(SOON, answers.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "STOPPING"));
    timeout(SOON, stopping).await.expect("hangs on somebody").unwrap();
    drop((silent, idle, requests));
}

#[tokio::test]
async fn a_client_that_does_not_react_is_cut_off_after_the_grace() {
    let node = Node::start();
    // Greets, and never reads nor answers again.
    let mut deaf = TcpStream::connect(node.server().local_addr()).await.unwrap();
    deaf.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    wait("a connection", async || node.server().connections() == 1).await;
    timeout(SOON, node.stop(Duration::from_millis(50))).await.expect("hangs on the deaf");
}

#[tokio::test]
async fn the_node_and_its_calls_are_seen() {
    let node = Node::start();
    let mut client = node.client().await;
    client.send(send("t", vec![message("x")])).await.unwrap();
    client.pull(pull("nothing", 0, 0)).await.unwrap_err();
    let mut admin = AdminClient::new(node.channel().await);
    let status = admin.get_node_status(v1::GetNodeStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.node.as_str(), status.version.as_str()), ("node-1", env!("CARGO_PKG_VERSION")));
    assert_eq!((status.connections, status.shards.len()), (2, 1));
    assert_eq!(status.shards[0].state(), v1::ShardState::Writable);
    let metrics = node.metrics();
    let line = |parts: &[&str]| metrics.lines().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(
        line(&["rpc_server_call_duration_seconds_count", "\"holdfast.v1.Broker/Send\"", "=\"OK\"", " 1"]),
        "{metrics}"
    );
    assert!(
        line(&["rpc_server_call_duration_seconds_count", "Pull", "error_type=\"NOT_FOUND\"", " 1"]),
        "{metrics}"
    );
    assert!(line(&["holdfast_connections{", "listener=\"api\"", "} 2"]), "{metrics}");
}

#[tokio::test]
async fn an_address_that_is_taken_is_named() {
    let node = Node::start();
    let taken = node.server().local_addr();
    let Err(error) = Node::on(taken, &ApiConfig::default()) else { panic!("listens twice") };
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
}
