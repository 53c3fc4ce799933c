//! What a stop, a kill or a second start leaves.

use std::{fs, process::Command};

use holdfast::pb::v1::{
    CommitOffsetsRequest, DurabilityLevel, PullOutcome, QueueOffset, ShardState, TopicSettings,
};

use crate::harness::*;

async fn commit(client: &Client, offset: i64) {
    let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 0, offset }];
    let request = CommitOffsetsRequest { group: "g".into(), offsets };
    client.broker.clone().commit_offsets(request).await.unwrap();
}

#[tokio::test]
async fn everything_is_there_after_a_stop_and_after_a_kill() {
    let mut broker = Broker::start().await;
    let mut expected = Vec::new();
    broker.client().await.topic("t", 1).await;
    for round in 0..6 {
        let client = broker.client().await;
        let batch: Vec<String> = (0..20).map(|n| format!("{round}-{n}")).collect();
        let sent = client.send_messages("t", 0, batch.iter().map(message).collect()).await;
        assert_eq!(sent.receipts[0].offset, 20 * round);
        expected.extend(batch);
        commit(&client, 20 * round + 7).await;
        if round % 2 == 0 {
            broker.stop().await;
        } else {
            broker.kill();
        }
        broker.restart().await;
        let client = broker.client().await;
        assert_eq!(bodies(&client.all("t", 0).await), expected);
        assert_eq!(client.offsets("t", 0, "g").await.committed, Some(20 * round + 7));
    }
}

#[tokio::test]
async fn a_kill_takes_nothing_from_an_async_topic_and_no_offset_jumps() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    let settings = TopicSettings {
        queues: Some(1),
        durability: DurabilityLevel::Async as i32,
        ..TopicSettings::default()
    };
    client.topic_with("t", settings).await;
    for round in 0..4 {
        let client = broker.client().await;
        for n in 0..50 {
            let sent = client.send("t", 0, &["x"]).await;
            assert_eq!(sent.receipts[0].offset, 50 * round + n);
        }
        broker.kill();
        broker.restart().await;
    }
    assert_eq!(broker.client().await.all("t", 0).await.len(), 200);
}

#[tokio::test]
async fn consumers_go_on_where_they_were_through_many_restarts_without_repeats() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for n in 0..20 {
        let batch = (0..100).map(|m| message((n * 100 + m).to_string())).collect();
        client.send_messages("t", 0, batch).await;
    }
    let mut delivered = Vec::new();
    for round in 0..10 {
        let client = broker.client().await;
        for _ in 0..2 {
            let from = client.offsets("t", 0, "g").await.committed.unwrap_or(0);
            let mut request = pull_request("t", 0, from);
            request.max_messages = 100;
            let answer = client.pull(request).await;
            assert_eq!(answer.outcome(), PullOutcome::Found);
            delivered.extend(bodies(&answer.messages));
            commit(&client, answer.next_offset).await;
        }
        if round % 2 == 0 {
            broker.kill()
        } else {
            broker.stop().await
        }
        broker.restart().await;
    }
    assert_eq!(delivered, (0..2000).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_second_process_on_the_same_data_is_refused_and_the_first_lives_on() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let second = Command::new(binary())
        .arg("standalone")
        .args(["--data-dir".as_ref(), broker.data_dir().as_os_str()])
        .args(["--listen", &format!("127.0.0.1:{}", free_port())])
        .env(variable("listen.probe"), "127.0.0.1:0")
        .output()
        .unwrap();
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr).to_lowercase();
    assert!(text.contains("use") || text.contains("lock"), "says why: {text}");
    client.send("t", 0, &["x"]).await;
}

#[tokio::test]
async fn derived_files_are_expendable() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    let sent: Vec<String> = (0..500).map(|n| n.to_string()).collect();
    for n in &sent {
        client.send("t", 1, &[n]).await;
    }
    commit_on(&client, 123).await;
    broker.stop().await;
    // All but the log and what says which shard this is.
    let mut removed = 0;
    for (path, _) in files_below(&broker.data_dir()).unwrap() {
        let text = path.strip_prefix(broker.data_dir()).unwrap().to_string_lossy().into_owned();
        if text.contains("log") || text.contains("lock") || text.contains("LOCK") || !text.contains('/') {
            continue;
        }
        fs::remove_file(path).unwrap();
        removed += 1;
    }
    assert!(removed > 0, "{:?}", files_below(&broker.data_dir()));
    broker.restart().await;
    let client = broker.client().await;
    assert_eq!(bodies(&client.all("t", 1).await), sent);
    assert_eq!(client.offsets("t", 1, "g").await.committed, Some(123));
}

async fn commit_on(client: &Client, offset: i64) {
    let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 1, offset }];
    let request = CommitOffsetsRequest { group: "g".into(), offsets };
    client.broker.clone().commit_offsets(request).await.unwrap();
}

#[tokio::test]
async fn the_epoch_rises_with_every_start_and_the_node_tells_its_state() {
    let mut broker = Broker::start().await;
    let mut last = 0;
    for _ in 0..3 {
        let client = broker.client().await;
        let status = client.status().await;
        let shard = &status.shards[0];
        assert!(shard.epoch > last);
        last = shard.epoch;
        assert_eq!(shard.state(), ShardState::Writable);
        assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
        assert!(status.started.is_some() && !status.node.is_empty());
        assert!(shard.data_dir.starts_with(broker.data_dir().to_str().unwrap()));
        assert!(shard.log_end >= shard.log_durable && shard.log_durable >= shard.log_start);
        assert_eq!(shard.damage_total, 0);
        broker.kill();
        broker.restart().await;
    }
}

#[tokio::test]
async fn at_the_disk_floor_sends_are_refused_and_everything_else_goes_on() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send("t", 0, &["a", "b", "c"]).await;
    broker.stop().await;
    broker.set("store.disk_floor", "1PiB");
    broker.restart().await;
    let client = broker.client().await;
    eventually("the floor is seen", async || client.status().await.shards[0].state() == ShardState::DiskFull)
        .await;
    let status = client.try_send(send_request("t", vec![message("x")])).await.unwrap_err();
    let refusal = Refusal::of(&status);
    assert_eq!((refusal.code, refusal.reason.as_str()), (tonic::Code::ResourceExhausted, "DISK_FULL"));
    assert!(refusal.retry.is_some());
    assert_eq!(bodies(&client.all("t", 0).await), ["a", "b", "c"]);
    commit(&client, 2).await;
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(2));
    assert!(!client.status().await.shards[0].state_reason.is_empty());
    broker.stop().await;
    broker.set("store.disk_floor", "1MiB");
    broker.restart().await;
    assert_eq!(broker.client().await.send("t", 0, &["d"]).await.receipts[0].offset, 3);
}

#[tokio::test]
async fn a_kill_in_the_middle_of_many_sends_keeps_every_acknowledged_one_once() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let senders: Vec<_> = (0..8)
        .map(|sender| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut acknowledged = Vec::new();
                for n in 0.. {
                    let body = format!("{sender}-{n}");
                    let request = holdfast::pb::v1::SendRequest {
                        queue_id: Some(0),
                        ..send_request("t", vec![message(&body)])
                    };
                    match client.try_send(request).await {
                        Ok(sent) => acknowledged.push((sent.receipts[0].offset, body)),
                        Err(_) => break,
                    }
                }
                acknowledged
            })
        })
        .collect();
    eventually("a thousand messages", async || client.offsets("t", 0, "").await.max_offset > 1000).await;
    broker.kill();
    let mut acknowledged = Vec::new();
    for sender in senders {
        acknowledged.extend(sender.await.unwrap());
    }
    broker.restart().await;
    let found = bodies(&broker.client().await.all("t", 0).await);
    for (offset, body) in acknowledged {
        assert_eq!(found[usize::try_from(offset).unwrap()], body);
        assert_eq!(found.iter().filter(|&other| *other == body).count(), 1);
    }
}

#[tokio::test]
async fn a_start_after_a_kill_reads_the_tail_of_a_gigabyte_and_without_derived_files_all_of_it() {
    const MIB: u64 = 1 << 20;
    let mut broker = Broker::start_with("standalone", &[("store.snapshot_size", "64MiB")]).await;
    let client = broker.client().await;
    client.topic("t", 4).await;
    let body = vec![b'x'; 64 << 10];
    for call in 0..256 {
        let batch = (0..64).map(|_| message(&body)).collect();
        client.send_messages("t", call % 4, batch).await;
    }
    let ends = async |client: Client| {
        let mut ends = Vec::new();
        for queue in 0..4 {
            let found = client.offsets("t", queue, "").await;
            ends.push((found.min_offset, found.max_offset));
        }
        ends
    };
    let expected = vec![(0, 64 * 64); 4];
    assert_eq!(ends(broker.client().await).await, expected);
    broker.kill();
    broker.restart().await;
    let shard = &broker.client().await.status().await.shards[0];
    assert!(shard.log_end > 1024 * MIB, "{shard:?}");
    assert!(shard.recovery_bytes <= 256 * MIB, "{shard:?}");
    assert_eq!(ends(broker.client().await).await, expected);

    broker.stop().await;
    for derived in ["snapshots", "index", "keys"] {
        fs::remove_dir_all(broker.data_dir().join(derived)).unwrap();
    }
    broker.restart().await;
    let client = broker.client().await;
    let shard = &client.status().await.shards[0];
    assert!(shard.recovery_bytes > 1024 * MIB, "{shard:?}");
    assert_eq!(ends(broker.client().await).await, expected);
    let last = client.pull(pull_request("t", 3, 64 * 64 - 1)).await;
    assert_eq!(last.messages.len(), 1);
    assert_eq!(last.messages[0].body, body);
    broker.stop().await;
}
