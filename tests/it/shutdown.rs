//! A stop with much going on: whoever has called is answered, nobody holds it up, and the next start is quick.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use holdfast::pb::v1::{PullRequest, SendResponse};
use http::HeaderMap;
use prost::Message as _;
use tokio::net::TcpStream;
use tonic::Code;

use crate::harness::{
    raw::{Raw, RawAnswer, framed},
    *,
};

const PULL: &str = "/holdfast.v1.Broker/Pull";
const SEND: &str = "/holdfast.v1.Broker/Send";

const PULL_CONNECTIONS: u32 = 20;
const PULLS_PER_CONNECTION: u32 = 500;
const SEND_CONNECTIONS: u64 = 10;
const SENDERS_PER_CONNECTION: u64 = 100;

/// Most log that a start after a stop in order may have to read.
const QUICK_BYTES: u64 = 64 << 10;

/// The end that a stop gives to calls it does not carry out any more: retryable, and saying so.
#[track_caller]
fn assert_stopping(answer: &RawAnswer) {
    let refusal = Refusal::of(&answer.status);
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::Unavailable, "STOPPING"), "{refusal:?}");
    assert!(refusal.retry.is_some(), "says when to come again: {refusal:?}");
}

/// What became of the sends of one sender.
#[derive(Default)]
struct Sends {
    /// Bodies that were acknowledged, with their offsets.
    acknowledged: Vec<(i64, String)>,
    /// Bodies that the broker says it has not stored.
    refused: Vec<String>,
}

/// Sends one message after the other until the broker takes no more.
async fn send_until_refused(raw: Arc<Raw>, name: u64, acknowledged: Arc<AtomicU64>) -> Sends {
    let mut sends = Sends::default();
    for n in 0.. {
        let body = format!("{name}-{n}");
        let mut request = send_request("s", vec![message(&body)]);
        request.queue_id = Some(0);
        // The client has been told to go elsewhere: this call was never made.
        let Ok(answer) = raw.call(SEND, &request).await else { break };
        match answer {
            Ok(answer) if answer.status.code() == Code::Ok => {
                let sent = SendResponse::decode(&answer.body[5..]).unwrap();
                sends.acknowledged.push((sent.receipts[0].offset, body));
                acknowledged.fetch_add(1, Ordering::Relaxed);
            }
            Ok(answer) => {
                assert_stopping(&answer);
                sends.refused.push(body);
            }
            // Crossed the broker's farewell on the way; that names the last call it has taken, and this came later.
            Err(error) => {
                let farewell = error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR);
                assert!(farewell, "send {body} was cut off: {error}");
                sends.refused.push(body);
            }
        }
    }
    sends
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_answers_10_000_held_pulls_and_1_000_sends_in_flight_and_the_next_start_is_quick() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 8).await;
    client.topic("s", 1).await;

    let mut pulls = Vec::new();
    let mut pullers = Vec::new();
    for connection in 0..PULL_CONNECTIONS {
        let raw = Raw::connect(&broker.address()).await;
        for n in 0..PULLS_PER_CONNECTION {
            let request =
                PullRequest { client_id: format!("{connection}-{n}"), ..pull_request("t", n % 8, 0) };
            let mut call = raw.open(PULL, &HeaderMap::new()).await.unwrap();
            call.send(framed(&waiting(request, SOON).encode_to_vec()), true);
            pulls.push(call);
        }
        pullers.push(raw);
    }
    client.wait_held(u64::from(PULL_CONNECTIONS * PULLS_PER_CONNECTION)).await;

    let acknowledged = Arc::new(AtomicU64::new(0));
    let mut senders = Vec::new();
    for connection in 0..SEND_CONNECTIONS {
        let raw = Arc::new(Raw::connect(&broker.address()).await);
        for sender in 0..SENDERS_PER_CONNECTION {
            let name = connection * SENDERS_PER_CONNECTION + sender;
            senders.push(tokio::spawn(send_until_refused(Arc::clone(&raw), name, Arc::clone(&acknowledged))));
        }
    }
    eventually("sends flow", async || acknowledged.load(Ordering::Relaxed) > 5_000).await;

    let begun = Instant::now();
    broker.send_term();
    for pull in pulls {
        let answer = pull.answer().await.unwrap_or_else(|error| panic!("a held pull was cut off: {error}"));
        assert_stopping(&answer);
    }
    let (mut sent, mut refused) = (Vec::new(), HashSet::new());
    for sender in senders {
        let sends = sender.await.unwrap();
        sent.extend(sends.acknowledged);
        refused.extend(sends.refused);
    }
    for mut raw in pullers {
        raw.ended().await.unwrap_or_else(|error| panic!("a connection did not end in order: {error}"));
    }
    let status = broker.wait().await;
    println!("{} sent, {} refused, stopped in {:?}", sent.len(), refused.len(), begun.elapsed());
    assert!(status.success(), "ended with {status}");
    assert!(!broker.output().contains("connections were cut"), "{}", broker.output());

    broker.restart().await;
    let client = broker.client().await;
    let shard = client.status().await.shards.remove(0);
    println!("opened in {:?} after reading {} bytes", shard.recovery_time, shard.recovery_bytes);
    assert!(shard.clean_start, "the start found no end in order: {shard:?}");
    assert!(shard.recovery_bytes < QUICK_BYTES, "{} bytes of log were read", shard.recovery_bytes);
    let found = bodies(&client.all("s", 0).await);
    let mut stored: Vec<_> = found.iter().collect();
    stored.sort_unstable();
    assert!(stored.windows(2).all(|pair| pair[0] != pair[1]), "a message was stored twice");
    assert!(!found.iter().any(|body| refused.contains(body)), "a refused message was stored");
    for (offset, body) in sent {
        assert_eq!(found[usize::try_from(offset).unwrap()], body);
    }
}

#[tokio::test]
async fn a_kill_is_told_from_a_stop_at_the_next_start() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    assert!(client.status().await.shards[0].clean_start, "there was nothing before");
    client.topic("t", 1).await;
    client.send("t", 0, &["x"]).await;
    broker.kill();
    broker.restart().await;
    let shard = broker.client().await.status().await.shards.remove(0);
    assert!(!shard.clean_start && shard.recovery_bytes > 0, "{shard:?}");
    broker.stop().await;
    broker.restart().await;
    assert!(broker.client().await.status().await.shards[0].clean_start);
}

#[tokio::test]
async fn a_stop_does_not_wait_for_clients_that_are_frozen_idle_or_have_never_spoken() {
    // A grace that the test would not survive.
    let mut broker = Broker::start_with("standalone", &[("shutdown.grace", "10m")]).await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut frozen = Vec::new();
    for _ in 0..5 {
        let raw = Raw::connect(&broker.address()).await;
        let mut call = raw.open(PULL, &HeaderMap::new()).await.unwrap();
        call.send(framed(&waiting(pull_request("t", 0, 0), SOON).encode_to_vec()), true);
        frozen.push((raw, call));
    }
    client.wait_held(5).await;
    for (raw, _) in &frozen {
        raw.freeze();
    }
    let idle = futures_util::future::join_all((0..50).map(|_| broker.client())).await;
    let silent = futures_util::future::join_all((0..10).map(|_| TcpStream::connect(broker.address()))).await;
    broker.stop().await;
    drop((frozen, idle, silent));
}
