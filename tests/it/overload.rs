//! A real broker under more than it takes.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use holdfast::pb::v1::{CommitOffsetsRequest, PullOutcome, QueueOffset};
use tonic::Code;

use crate::harness::*;

const MIB: usize = 1 << 20;
/// Budgets of the broker: sends that wait, requests that arrive, answers, recent log; and what it takes by itself.
const MEMORY: usize = (16 + 24 + 32 + 8 + 120) * MIB;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_overload_sends_are_stored_or_told_to_come_again_and_pulls_and_commits_go_on() {
    let settings = [
        ("store.inbox_size", "16MiB"),
        ("store.recent_size", "8MiB"),
        ("api.request_memory", "24MiB"),
        ("api.answer_memory", "32MiB"),
        ("api.answer_memory_per_connection", "32MiB"),
    ];
    let broker = Broker::start_with("standalone", &settings).await;
    let client = broker.client().await;
    client.topic("load", 4).await;
    client.topic("t", 1).await;
    client.send("t", 0, &["a", "b"]).await;
    let over = Arc::new(AtomicBool::new(false));
    let mut senders = Vec::new();
    for _ in 0..4 {
        let client = broker.client().await;
        for _ in 0..16 {
            let (client, over) = (client.clone(), Arc::clone(&over));
            senders.push(tokio::spawn(async move {
                let (mut stored, mut refused) = (0_i64, 0_u64);
                while !over.load(Ordering::Relaxed) {
                    match client.try_send(send_request("load", vec![message(vec![7; MIB]); 2])).await {
                        Ok(sent) => stored += i64::try_from(sent.receipts.len()).unwrap(),
                        Err(status) => {
                            let refusal = Refusal::of(&status);
                            assert_eq!(refusal.code, Code::ResourceExhausted, "{refusal:?}");
                            assert!(refusal.retry.is_some(), "says when to come again: {refusal:?}");
                            refused += 1;
                        }
                    }
                }
                (stored, refused)
            }));
        }
    }
    let mut most = 0;
    for n in 0..100 {
        let answer = client.pull(pull_request("t", 0, n % 2)).await;
        assert_eq!(answer.outcome(), PullOutcome::Found);
        let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 0, offset: n % 2 + 1 }];
        let request = CommitOffsetsRequest { group: "g".into(), offsets };
        client.broker.clone().commit_offsets(request).await.unwrap();
        most = most.max(broker.resident());
    }
    over.store(true, Ordering::Relaxed);
    let (mut stored, mut refused) = (0, 0);
    for sender in senders {
        let (s, r) = sender.await.unwrap();
        (stored, refused) = (stored + s, refused + r);
    }
    println!("{stored} stored, {refused} refused, at most {} MiB resident", most / MIB);
    let mut found = 0;
    for queue in 0..4 {
        found += client.offsets("load", queue, "").await.max_offset;
    }
    assert_eq!(found, stored, "what was acknowledged is there, and nothing else");
    assert!(most < MEMORY, "{most} bytes");
    client.send("t", 0, &["c"]).await;
}
