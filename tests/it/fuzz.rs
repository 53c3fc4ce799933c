//! Every call with requests that no client would make. `HOLDFAST_SEED` repeats or changes the choices of a run,
//! `HOLDFAST_FUZZ_CALLS` makes it longer.

use bytes::Bytes;
use holdfast::pb::v1::*;
use http::{HeaderMap, HeaderName, HeaderValue};
use prost::Message as _;
use tokio::time::timeout;
use tonic::Code;

use crate::harness::{
    raw::{Raw, framed},
    *,
};

const MIB: usize = 1 << 20;
/// Calls of an ordinary run.
const CALLS: u64 = 3000;
/// What the broker may have grown by at the end.
const GROWTH: usize = 96 * MIB;
/// HTTP/2 bears at least so many malformed calls on a connection.
const CLOSED_AFTER: u64 = 1000;
/// Most levels of messages within messages.
const DEPTH: u32 = 4;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Every call that ends by itself, with a request that it takes.
fn calls() -> Vec<(&'static str, Vec<u8>)> {
    let settings = TopicSettings { queues: Some(2), ..TopicSettings::default() };
    let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 0, offset: 1 }];
    let queues = vec![QueueRef { topic: "t".into(), queue_id: 0 }];
    let mut message = grouped("body", "g");
    message.user_properties.insert("name".into(), "value".into());
    let send = send_request("t", vec![message, tagged("x", "tag")]);
    let pull = PullRequest { group: "g".into(), tag_filter: "a||b".into(), ..pull_request("t", 0, 0) };
    let by = Some(query_messages_request::By::Key("k".into()));
    let (topic, group) = ("t".to_string(), "g".to_string());
    vec![
        ("holdfast.v1.Broker/Send", send.encode_to_vec()),
        (
            "holdfast.v1.Broker/SendStream",
            SendStreamRequest { correlation: 7, send: Some(send) }.encode_to_vec(),
        ),
        ("holdfast.v1.Broker/Pull", pull.encode_to_vec()),
        (
            "holdfast.v1.Broker/CommitOffsets",
            CommitOffsetsRequest { group: group.clone(), offsets }.encode_to_vec(),
        ),
        (
            "holdfast.v1.Broker/GetOffsets",
            GetOffsetsRequest { queues, group: group.clone(), ..Default::default() }.encode_to_vec(),
        ),
        (
            "holdfast.v1.Broker/QueryMessages",
            QueryMessagesRequest { topic: topic.clone(), by, ..Default::default() }.encode_to_vec(),
        ),
        (
            "holdfast.v1.Admin/CreateTopic",
            CreateTopicRequest { topic: "made".into(), settings: Some(settings) }.encode_to_vec(),
        ),
        (
            "holdfast.v1.Admin/UpdateTopic",
            UpdateTopicRequest { topic: topic.clone(), settings: Some(settings) }.encode_to_vec(),
        ),
        ("holdfast.v1.Admin/DeleteTopic", DeleteTopicRequest { topic: "made".into() }.encode_to_vec()),
        (
            "holdfast.v1.Admin/ListTopics",
            ListTopicsRequest { page_size: 3, ..Default::default() }.encode_to_vec(),
        ),
        ("holdfast.v1.Admin/DescribeTopic", DescribeTopicRequest { topic }.encode_to_vec()),
        (
            "holdfast.v1.Admin/CreateGroup",
            CreateGroupRequest { group: "made".into(), settings: None }.encode_to_vec(),
        ),
        (
            "holdfast.v1.Admin/UpdateGroup",
            UpdateGroupRequest { group: group.clone(), ..Default::default() }.encode_to_vec(),
        ),
        ("holdfast.v1.Admin/DeleteGroup", DeleteGroupRequest { group: "made".into() }.encode_to_vec()),
        (
            "holdfast.v1.Admin/ListGroups",
            ListGroupsRequest { page_size: 3, ..Default::default() }.encode_to_vec(),
        ),
        (
            "holdfast.v1.Admin/DescribeGroup",
            DescribeGroupRequest { group: group.clone(), ..Default::default() }.encode_to_vec(),
        ),
        (
            "holdfast.v1.Admin/ResetOffsets",
            ResetOffsetsRequest { group, ..Default::default() }.encode_to_vec(),
        ),
        ("holdfast.v1.Admin/GetNodeStatus", Vec::new()),
        ("grpc.health.v1.Health/Check", Vec::new()),
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", vec![0x3a, 0]),
    ]
}

fn varint(mut value: u64, into: &mut Vec<u8>) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

fn number(random: &mut Random) -> u64 {
    const ENDS: [u64; 9] =
        [0, 1, 1024, 1025, i32::MAX as u64, u32::MAX as u64, i64::MAX as u64, 1 << 63, u64::MAX];
    match random.below(3) {
        0 => random.below(8),
        1 => ENDS[random.below(9) as usize],
        _ => random.next(),
    }
}

fn text(random: &mut Random) -> Vec<u8> {
    const TEXTS: [&[u8]; 14] = [
        b"t",
        b"g",
        b"made",
        b"",
        b"*",
        b"a||b",
        b"a||",
        b"../../x",
        b"%DLQ%g",
        b"\0",
        b"\xff\xfe",
        "ä".as_bytes(),
        b"a b",
        b"k",
    ];
    match random.below(4) {
        0 => vec![b'x'; random.below(300) as usize],
        1 => vec![b'x'; random.below(70_000) as usize],
        _ => TEXTS[random.below(TEXTS.len() as u64) as usize].to_vec(),
    }
}

/// A message that is well-formed by itself: any fields, any values.
fn fields(random: &mut Random, depth: u32, into: &mut Vec<u8>) {
    for _ in 0..random.below(8) {
        let field = if random.below(10) == 0 { 1 + random.below(120) } else { 1 + random.below(9) };
        let kind = [0, 1, 2, 2, 2, 5][random.below(6) as usize];
        varint(field << 3 | kind, into);
        match kind {
            0 => varint(number(random), into),
            1 => into.extend(number(random).to_le_bytes()),
            5 => into.extend((number(random) as u32).to_le_bytes()),
            _ if depth < DEPTH && random.below(2) == 0 => {
                let mut inner = Vec::new();
                fields(random, depth + 1, &mut inner);
                varint(inner.len() as u64, into);
                into.extend(inner);
            }
            _ => {
                let text = text(random);
                varint(text.len() as u64, into);
                into.extend(text);
            }
        }
    }
}

/// A valid request with some of its bytes changed, removed, repeated or put in.
fn mutated(random: &mut Random, mut bytes: Vec<u8>) -> Vec<u8> {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() as u64 + 1) as usize;
        match random.below(5) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => bytes.insert(at, random.next() as u8),
            _ => bytes.extend_from_within(at..),
        }
    }
    bytes
}

/// A request with its framing, right or not.
fn request(random: &mut Random, valid: &[u8]) -> Bytes {
    let bytes = match random.below(4) {
        0 => (0..random.below(200)).map(|_| random.next() as u8).collect(),
        1 => mutated(random, valid.to_vec()),
        2 => valid.iter().copied().chain(mutated(random, valid.to_vec())).collect(),
        _ => {
            let mut bytes = Vec::new();
            fields(random, 0, &mut bytes);
            bytes
        }
    };
    let mut whole = framed(&bytes).to_vec();
    if random.below(12) == 0 {
        let at = random.below(5) as usize;
        whole[at] = random.next() as u8;
    }
    whole.into()
}

fn headers(random: &mut Random) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("grpc-timeout", HeaderValue::from_static("300m"));
    const ODD: [(&str, &[u8]); 9] = [
        ("grpc-timeout", b"1x"),
        ("grpc-timeout", b"99999999H"),
        ("grpc-encoding", b"gzip"),
        ("grpc-accept-encoding", b"\xff\xfe"),
        ("content-type", b"application/grpc+json"),
        ("content-type", b"text/plain"),
        ("x-odd-bin", b"not base64!"),
        ("traceparent", b"00-zz-zz-zz"),
        ("content-length", b"3"),
    ];
    if random.below(6) == 0 {
        let (name, value) = ODD[random.below(ODD.len() as u64) as usize];
        headers.insert(HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap());
    }
    headers
}

#[tokio::test]
async fn no_request_whatever_it_holds_is_answered_as_a_fault_of_the_broker_or_hangs_it() {
    let (seed, count) = (setting("HOLDFAST_SEED", 1), setting("HOLDFAST_FUZZ_CALLS", CALLS));
    println!("HOLDFAST_SEED={seed} HOLDFAST_FUZZ_CALLS={count} repeats this run");
    let mut random = Random(seed);
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    client.group("g").await;
    client.send("t", 0, &["x", "y"]).await;
    let (calls, before) = (calls(), broker.resident());
    let mut raw = Raw::connect(&broker.address()).await;
    let mut refused_by_http2 = 0;
    let mut codes = std::collections::BTreeMap::new();
    for n in 0..count {
        let (path, valid) = &calls[random.below(calls.len() as u64) as usize];
        let (headers, bytes) = (headers(&mut random), request(&mut random, valid));
        let what = || format!("call {n} of seed {seed}: {path} {headers:?} {bytes:02x?}");
        let Ok(mut call) = raw.open(&format!("/{path}"), &headers).await else {
            raw = Raw::connect(&broker.address()).await;
            continue;
        };
        call.send(bytes.clone(), true);
        let answer = timeout(SOON, call.answer()).await;
        let Ok(answer) = answer else { panic!("no answer to {}", what()) };
        match answer {
            Ok(answer) if answer.http.is_client_error() => {}
            Ok(answer) => {
                let code = answer.status.code();
                let fault = matches!(code, Code::Internal | Code::Unknown | Code::DataLoss);
                assert!(!fault, "{:?} to {}", answer.status, what());
                *codes.entry(format!("{code:?}")).or_insert(0_u64) += 1;
            }
            // HTTP/2 itself refuses what is malformed on its level.
            Err(error) => {
                // A connection on which too much was malformed is closed by HTTP/2; a new one is as good as ever.
                if error.is_io() || error.is_go_away() {
                    assert!(refused_by_http2 >= CLOSED_AFTER, "{error} to {}", what());
                    refused_by_http2 = 0;
                    raw = Raw::connect(&broker.address()).await;
                    continue;
                }
                refused_by_http2 += 1;
                assert_ne!(error.reason(), Some(h2::Reason::INTERNAL_ERROR), "{error} to {}", what());
                *codes.entry("HTTP/2".to_string()).or_insert(0) += 1;
            }
        }
    }
    println!("{codes:?}");
    assert!(codes.contains_key("Ok") && codes.contains_key("InvalidArgument"), "too one-sided: {codes:?}");
    let grown = broker.resident().saturating_sub(before);
    assert!(grown < GROWTH, "grown by {grown} bytes");
    assert!(!broker.output().contains("panicked"), "{}", broker.output());
    client.try_send(send_request("well", vec![message("x")])).await.unwrap();
    client.wait_held(0).await;
}
