//! Connections that do not behave: each is bounded, ended in time, and counted by the reason; the others notice
//! nothing. And the limits of what calls may take: each is named when it is reached.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use holdfast::pb::v1::{PullOutcome, PullRequest, PullResponse, ReasonCount, SendRequest};
use http::{HeaderMap, HeaderValue};
use prost::Message as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tonic::Code;

use crate::harness::{
    raw::{Raw, RawAnswer, framed},
    *,
};

const PULL: &str = "/holdfast.v1.Broker/Pull";
const SEND: &str = "/holdfast.v1.Broker/Send";
const MIB: usize = 1 << 20;

fn by_reason(counts: &[ReasonCount]) -> BTreeMap<&str, u64> {
    counts.iter().map(|count| (count.reason.as_str(), count.count)).collect()
}

/// How many connections ended for this reason.
async fn closed(client: &Client, reason: &str) -> u64 {
    by_reason(&client.status().await.connections_closed)[reason]
}

/// Lets this process have many files open; says how many.
fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(1 << 20).min(1 << 20);
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit }).unwrap();
    most
}

/// A client that gives the broker room for few bytes of an answer, and never for more.
async fn slow_reader(broker: &Broker) -> Raw {
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(1024);
    Raw::connect_with(&broker.address(), &mut builder).await
}

/// Asks for a pull and leaves the answer unread.
async fn pull_unread(raw: &Raw, request: PullRequest) -> (http::Response<()>, h2::RecvStream) {
    let mut call = raw.open(PULL, &HeaderMap::new()).await.unwrap();
    call.send(framed(&request.encode_to_vec()), true);
    call.head().await.unwrap()
}

#[track_caller]
fn pulled(answer: &RawAnswer) -> PullResponse {
    assert_eq!(answer.status.code(), Code::Ok, "{answer:?}");
    PullResponse::decode(&answer.body[5..]).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_10_000_connections_the_ill_behaved_half_is_ended_by_reason_and_the_good_half_is_served() {
    // Every connection takes a file here and one in the broker, which keeps a quarter for its store.
    let most = (raise_open_files() / 4 * 3).saturating_sub(500).min(10_000);
    let each = most / 8;
    println!("{most} connections");
    let mut broker = Broker::start_with(
        "standalone",
        &[
            ("api.connections_max", "20000"),
            ("api.handshake_timeout", "3s"),
            ("api.answer_timeout", "3s"),
            ("api.keepalive_interval", "5s"),
            ("api.keepalive_timeout", "5s"),
        ],
    )
    .await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send_messages("t", 0, vec![message(vec![7; 20 << 10])]).await;

    let mut good = Vec::new();
    for _ in 0..each * 4 {
        good.push(Raw::connect(&broker.address()).await);
    }
    let (mut silent, mut frozen, mut slow) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..each {
        silent.push(TcpStream::connect(broker.address()).await.unwrap());
        // The preface alone, cut somewhere.
        let mut stream = TcpStream::connect(broker.address()).await.unwrap();
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        stream.write_all(&preface[..usize::try_from(n).unwrap() % preface.len() + 1]).await.unwrap();
        silent.push(stream);
        let raw = Raw::connect(&broker.address()).await;
        raw.call(PULL, &pull_request("t", 0, 1)).await.unwrap().unwrap();
        raw.freeze();
        frozen.push(raw);
        let raw = slow_reader(&broker).await;
        let answer = pull_unread(&raw, pull_request("t", 0, 0)).await;
        slow.push((raw, answer));
    }
    let ended = async |reason: &str, count: u64| {
        eventually(&format!("{count} ended as {reason}"), async || closed(&client, reason).await == count)
            .await;
    };
    ended("handshake_timeout", each * 2).await;
    ended("slow_reader", each).await;
    ended("keepalive_timeout", each).await;
    let status = client.status().await;
    assert_eq!(status.connections, each * 4 + 1, "{:?}", by_reason(&status.connections_closed));
    for raw in &good {
        let answer = raw.call(PULL, &pull_request("t", 0, 0)).await.unwrap().unwrap();
        assert_eq!(pulled(&answer).outcome(), PullOutcome::Found);
    }
    let counts = by_reason(&client.status().await.connections_closed).len();
    assert_eq!(counts, 7, "the list of reasons is closed");
    drop((silent, frozen, slow, good));
    broker.stop().await;
}

#[tokio::test]
async fn a_connection_too_many_is_told_the_limit_and_counted() {
    let broker = Broker::start_with("standalone", &[("api.connections_max", "3")]).await;
    let client = broker.client().await;
    eventually("only this connection is left", async || client.status().await.connections == 1).await;
    let before = by_reason(&client.status().await.connections_refused)["limit"];
    let others = [Raw::connect(&broker.address()).await, Raw::connect(&broker.address()).await];
    eventually("three connections", async || client.status().await.connections == 3).await;
    let mut refused = Raw::connect(&broker.address()).await;
    let error = refused.ended().await.unwrap_err();
    assert_eq!(error.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM));
    let text = error.to_string();
    assert!(text.contains("api.connections_max") && text.contains('3'), "{text}");
    assert_eq!(by_reason(&client.status().await.connections_refused)["limit"], before + 1);
    drop(others);
    eventually("there is room again", async || client.status().await.connections == 1).await;
    Raw::connect(&broker.address())
        .await
        .call(SEND, &send_request("t", vec![message("x")]))
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn answers_that_nobody_reads_take_no_more_memory_than_allowed_and_others_are_served() {
    const UNREAD: u64 = 40;
    let broker = Broker::start_with(
        "standalone",
        &[
            ("api.answer_memory", "32MiB"),
            ("api.answer_memory_per_connection", "24MiB"),
            ("api.answer_timeout", "20s"),
            ("store.recent_size", "1MiB"),
        ],
    )
    .await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for _ in 0..4 {
        client.send_messages("t", 0, vec![message(vec![7; 4 * MIB - 1024])]).await;
    }
    let before = broker.resident();
    // What these ask for would be 40 × 8 × 4 MiB.
    let mut slow = Vec::new();
    for _ in 0..UNREAD {
        let raw = slow_reader(&broker).await;
        let mut answers = Vec::new();
        for n in 0..8 {
            answers.push(pull_unread(&raw, pull_request("t", 0, n % 4)).await);
        }
        slow.push((raw, answers));
    }
    let grown = broker.resident().saturating_sub(before);
    println!("{} MiB more resident", grown / MIB);
    assert!(grown < 160 * MIB, "{grown} bytes");
    // Whoever reads is served, if only with a request to come again for what is large.
    let answer = client.pull(pull_request("t", 0, 0)).await;
    assert_eq!(answer.outcome(), PullOutcome::NoNewMessage);
    assert!(answer.retry_delay.is_some() && answer.next_offset == 0, "{answer:?}");
    client.send("t", 0, &["small"]).await;
    let small = client.pull(pull_request("t", 0, 4)).await;
    assert_eq!(bodies(&small.messages), ["small"]);
    // And when the others have gone, with all of it.
    drop(slow);
    eventually("there is room again", async || {
        client.pull(pull_request("t", 0, 0)).await.outcome() == PullOutcome::Found
    })
    .await;
}

#[tokio::test]
async fn a_connection_that_reads_no_answers_is_refused_further_calls_until_it_reads() {
    let broker = Broker::start_with("standalone", &[("api.answer_memory_per_connection", "17MiB")]).await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for _ in 0..5 {
        client.send_messages("t", 0, vec![message(vec![7; 4 * MIB - 1024])]).await;
    }
    let raw = slow_reader(&broker).await;
    let all = PullRequest { max_bytes: 16 << 20, ..pull_request("t", 0, 0) };
    let first = pull_unread(&raw, all.clone()).await;
    // No room for a second large answer on this connection; a small one fits.
    let (_, mut second) = pull_unread(&raw, PullRequest { offset: 1, ..all }).await;
    let mut bytes = second.data().await.unwrap().unwrap();
    let answer = PullResponse::decode(bytes.split_off(5)).unwrap();
    assert_eq!((answer.outcome(), answer.next_offset), (PullOutcome::NoNewMessage, 1));
    // Another connection has its own share.
    let answer = client.pull(pull_request("t", 0, 1)).await;
    assert_eq!(answer.outcome(), PullOutcome::Found);
    drop(first);
    eventually("the share is free", async || {
        let (_, mut body) = pull_unread(&raw, pull_request("t", 0, 1)).await;
        let mut head = body.data().await.unwrap().unwrap();
        u32::from_be_bytes(head.split_off(1)[..4].try_into().unwrap()) as usize > MIB
    })
    .await;
}

#[tokio::test]
async fn a_call_too_many_is_refused_with_the_limit_and_a_delay() {
    let broker = Broker::start_with("standalone", &[("api.calls_max", "5")]).await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let raw = Raw::connect(&broker.address()).await;
    let (mut held, mut refused) = (Vec::new(), None);
    // A pull may be the one that is refused, when it meets the send; so there is always one more.
    eventually("as many calls run as may", async || {
        let mut call = raw.open(PULL, &HeaderMap::new()).await.unwrap();
        call.send(framed(&waiting(pull_request("t", 0, 0), SOON).encode_to_vec()), true);
        held.push(call);
        refused = client.try_send(send_request("other", vec![message("x")])).await.err();
        refused.is_some()
    })
    .await;
    let refusal = Refusal::of(&refused.unwrap());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::ResourceExhausted, "BUSY"));
    assert!(refusal.text.contains("api.calls_max") && refusal.retry.is_some(), "{refusal:?}");
    assert_eq!(refusal.metadata["limit"], "5");
    drop(held);
    eventually("calls are taken again", async || {
        client.try_send(send_request("t", vec![message("x")])).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_connection_has_so_many_calls_at_once_and_the_next_one_waits_for_its_turn() {
    let broker = Broker::start_with("standalone", &[("api.calls_per_connection", "2")]).await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let raw = Raw::connect(&broker.address()).await;
    let request = framed(&waiting(pull_request("t", 0, 0), SOON).encode_to_vec());
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut call = raw.open(PULL, &HeaderMap::new()).await.unwrap();
        call.send(request.clone(), true);
        held.push(call);
    }
    client.wait_held(2).await;
    let mut third = raw.open(PULL, &HeaderMap::new()).await.unwrap();
    third.send(request, true);
    client.send("t", 0, &["x"]).await;
    for call in held.into_iter().chain([third]) {
        assert_eq!(pulled(&call.answer().await.unwrap()).outcome(), PullOutcome::Found);
    }
}

#[tokio::test]
async fn headers_over_the_limit_are_refused_with_the_limit() {
    let broker = Broker::start_with("standalone", &[("api.headers_max", "4KiB")]).await;
    let raw = Raw::connect(&broker.address()).await;
    for (bytes, taken) in [(2000, true), (4096, false), (9000, false)] {
        let mut headers = HeaderMap::new();
        headers.insert("x-much", HeaderValue::from_str(&"x".repeat(bytes)).unwrap());
        let mut call = raw.open(SEND, &headers).await.unwrap();
        call.send(framed(&send_request("t", vec![message("x")]).encode_to_vec()), true);
        let answer = call.answer().await.unwrap();
        if taken {
            assert_eq!(answer.status.code(), Code::Ok, "{answer:?}");
            continue;
        }
        let refusal = Refusal::of_field(&answer.status, "headers");
        assert!(refusal.text.contains("api.headers_max") && refusal.text.contains("4096"), "{refusal:?}");
    }
    // Far beyond the limit nobody reads on to tell what is wrong, and the connection lives on.
    let mut headers = HeaderMap::new();
    headers.insert("x-much", HeaderValue::from_str(&"x".repeat(60_000)).unwrap());
    let call = raw.open(SEND, &headers).await.unwrap();
    if let Ok(answer) = call.answer().await {
        assert_eq!(answer.http, http::StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    }
    let answer = raw.call(SEND, &send_request("t", vec![message("x")])).await.unwrap().unwrap();
    assert_eq!(answer.status.code(), Code::Ok);
}

#[tokio::test]
async fn a_request_that_does_not_arrive_is_refused_in_time_and_frees_its_memory() {
    let broker = Broker::start_with("standalone", &[("api.request_timeout", "300ms")]).await;
    let raw = Raw::connect(&broker.address()).await;
    let whole = framed(&send_request("t", vec![message("x")]).encode_to_vec());
    for arrived in [0, 3, whole.len() - 1] {
        let mut call = raw.open(SEND, &HeaderMap::new()).await.unwrap();
        call.send(whole.slice(..arrived), false);
        let refusal = Refusal::of(&call.answer().await.unwrap().status);
        assert_eq!((refusal.code, refusal.reason.as_str()), (Code::DeadlineExceeded, "REQUEST_TIMEOUT"));
        assert!(refusal.text.contains("api.request_timeout") && refusal.text.contains("300"), "{refusal:?}");
    }
    // A stream may pause as long as it likes, but not within a message.
    let mut stream = raw.open("/holdfast.v1.Broker/SendStream", &HeaderMap::new()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(600)).await;
    stream.send(Bytes::from_static(&[0, 0]), false);
    let refusal = Refusal::of(&stream.answer().await.unwrap().status);
    assert_eq!(refusal.reason, "REQUEST_TIMEOUT");
}

#[tokio::test]
async fn requests_that_are_arriving_have_so_much_memory_and_the_next_is_refused() {
    let broker = Broker::start_with("standalone", &[("api.request_memory", "20MiB")]).await;
    let raw = Raw::connect(&broker.address()).await;
    let large = framed(&send_request("t", vec![message(vec![1; 4 * MIB - 1024]); 3]).encode_to_vec());
    let other = Raw::connect(&broker.address()).await;
    let mut arriving = other.open(SEND, &HeaderMap::new()).await.unwrap();
    arriving.send_as_taken(large.slice(..large.len() - 1)).await;
    let mut refused = None;
    eventually("one is refused", async || {
        let answer = raw.call(SEND, &send_request("t", vec![message(vec![1; 3 * MIB]); 3])).await;
        let status = answer.unwrap().unwrap().status;
        refused = Some(status).filter(|status| status.code() != Code::Ok);
        refused.is_some()
    })
    .await;
    let refusal = Refusal::of(&refused.unwrap());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::ResourceExhausted, "BUSY"));
    assert!(refusal.text.contains("api.request_memory") && refusal.retry.is_some(), "{refusal:?}");
    arriving.send(large.slice(large.len() - 1..), true);
    assert_eq!(arriving.answer().await.unwrap().status.code(), Code::Ok, "what was accepted is finished");
}

#[tokio::test]
async fn the_largest_body_and_the_largest_call_are_as_configured_and_named_when_exceeded() {
    let settings = [("send.body_max", "1MiB"), ("send.batch_max", "2MiB")];
    let broker = Broker::start_with("standalone", &settings).await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for bytes in [MIB - 1, MIB] {
        client.send_messages("t", 0, vec![message(vec![7; bytes])]).await;
    }
    let over = send_request("t", vec![message(vec![7; MIB + 1])]);
    let refusal = Refusal::of_field(&client.try_send(over).await.unwrap_err(), "messages[0].body");
    assert!(
        ["1048576", "1048577", "send.body_max"].iter().all(|text| refusal.text.contains(text)),
        "{refusal:?}"
    );
    let over: SendRequest = send_request("t", vec![message(vec![7; MIB]); 2]);
    let refusal = Refusal::of_field(&client.try_send(over).await.unwrap_err(), "messages");
    assert!(["2097152", "send.batch_max"].iter().all(|text| refusal.text.contains(text)), "{refusal:?}");
    assert_eq!(client.offsets("t", 0, "").await.max_offset, 2);
}
