//! `Pull` without waiting: every outcome, every limit, filters.

use std::fs;

use holdfast::pb::v1::{
    CommitOutcome, Message, OffsetIllegalReason, PullOutcome, PullRequest, PullResponse, SendRequest,
};
use tonic::Code;

use crate::harness::*;

/// Offsets of the messages found.
fn found(answer: &PullResponse) -> Vec<i64> {
    answer.messages.iter().map(|message| system(message).queue_offset.unwrap()).collect()
}

fn bounds(answer: &PullResponse) -> (i64, i64, i64) {
    (answer.next_offset, answer.min_offset, answer.max_offset)
}

#[tokio::test]
async fn what_is_there_is_found_in_order_with_where_to_go_on() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send("t", 0, &["a", "b", "c", "d"]).await;
    let answer = client.pull(pull_request("t", 0, 1)).await;
    assert_eq!(answer.outcome(), PullOutcome::Found);
    assert_eq!(bodies(&answer.messages), ["b", "c", "d"]);
    assert_eq!(found(&answer), [1, 2, 3]);
    assert_eq!(bounds(&answer), (4, 0, 4));
}

#[tokio::test]
async fn the_end_of_a_queue_is_no_new_message_and_not_illegal() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let answer = client.pull(pull_request("t", 0, 0)).await;
    assert_eq!(answer.outcome(), PullOutcome::NoNewMessage, "an empty queue at 0");
    assert_eq!(bounds(&answer), (0, 0, 0));
    client.send("t", 0, &["a", "b"]).await;
    let answer = client.pull(pull_request("t", 0, 2)).await;
    assert_eq!(answer.outcome(), PullOutcome::NoNewMessage);
    assert_eq!(bounds(&answer), (2, 0, 2));
    assert!(answer.retry_delay.is_none());
}

#[tokio::test]
async fn beyond_the_end_is_illegal_and_told_where_the_queue_ends() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let answer = client.pull(pull_request("t", 0, 5)).await;
    assert_eq!(answer.outcome(), PullOutcome::OffsetIllegal, "an empty queue has no offset but 0");
    assert_eq!(answer.illegal_reason(), OffsetIllegalReason::BeyondMax);
    assert_eq!(answer.next_offset, 0);
    client.send("t", 0, &["a", "b"]).await;
    for offset in [3, 1 << 40, i64::MAX] {
        let answer = client.pull(pull_request("t", 0, offset)).await;
        assert_eq!(answer.outcome(), PullOutcome::OffsetIllegal);
        assert_eq!(answer.illegal_reason(), OffsetIllegalReason::BeyondMax);
        assert_eq!(bounds(&answer), (2, 0, 2));
        let again = client.pull(pull_request("t", 0, answer.next_offset)).await;
        assert_eq!(again.outcome(), PullOutcome::NoNewMessage, "the corrected offset is a good one");
    }
}

#[tokio::test]
async fn impossible_coordinates_are_refused_and_make_nothing() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 4).await;
    for offset in [-1, -5, i64::MIN] {
        let answer = client.pull(pull_request("t", 0, offset)).await;
        assert_eq!(answer.outcome(), PullOutcome::OffsetIllegal);
        assert_eq!(answer.illegal_reason(), OffsetIllegalReason::BelowMin);
        assert_eq!(bounds(&answer), (0, 0, 0));
    }
    for queue in [4, 9999, u32::MAX] {
        let refusal = Refusal::of(&client.try_pull(pull_request("t", queue, 0)).await.unwrap_err());
        assert_eq!((refusal.code, refusal.reason.as_str()), (Code::NotFound, "QUEUE_NOT_FOUND"));
    }
    let refusal = Refusal::of(&client.try_pull(pull_request("nothing", 0, 0)).await.unwrap_err());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::NotFound, "TOPIC_NOT_FOUND"));
    let shard = &client.status().await.shards[0];
    assert_eq!((shard.topics, shard.queues), (1, 4));
}

#[tokio::test]
async fn the_number_of_messages_asked_for_is_honoured() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send_messages("t", 0, vec![message("x"); 1024]).await;
    client.send_messages("t", 0, vec![message("x"); 100]).await;
    for (asked, got) in [(1, 1), (31, 31), (33, 33), (0, 32), (1024, 1024)] {
        let answer = client.pull(PullRequest { max_messages: asked, ..pull_request("t", 0, 0) }).await;
        assert_eq!(answer.messages.len(), got, "asked for {asked}");
        assert_eq!(answer.next_offset, i64::try_from(got).unwrap());
    }
    let request = PullRequest { max_messages: 1025, ..pull_request("t", 0, 0) };
    let refusal = Refusal::of_field(&client.try_pull(request).await.unwrap_err(), "max_messages");
    assert!(refusal.text.contains("1024"), "{refusal:?}");
}

#[tokio::test]
async fn the_number_of_bytes_asked_for_is_honoured_and_a_larger_first_message_comes_alone() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for size in [10_000, 10_000, 10_000, 300_000, 10_000] {
        client.send_messages("t", 0, vec![message(vec![b'x'; size])]).await;
    }
    let pull = async |offset, max_bytes| {
        found(&client.pull(PullRequest { max_bytes, ..pull_request("t", 0, offset) }).await)
    };
    assert_eq!(pull(0, 1).await, [0], "alone");
    assert_eq!(pull(0, 25_000).await, [0, 1]);
    assert_eq!(pull(1, 100_000).await, [1, 2], "the large one would be too much");
    assert_eq!(pull(3, 100_000).await, [3], "alone");
    assert_eq!(pull(3, 400_000).await, [3, 4]);
    assert_eq!(pull(0, 0).await, [0, 1, 2, 3, 4]);
    let request = PullRequest { max_bytes: (16 << 20) + 1, ..pull_request("t", 0, 0) };
    Refusal::of_field(&client.try_pull(request).await.unwrap_err(), "max_bytes");
}

#[tokio::test]
async fn a_full_answer_of_16_mib_arrives_whole() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for n in 0..32_u8 {
        client.send_messages("t", 0, vec![message(vec![n; 1 << 20])]).await;
    }
    let request = PullRequest { max_messages: 32, max_bytes: 16 << 20, ..pull_request("t", 0, 0) };
    let answer = client.pull(request).await;
    assert!((14..=16).contains(&answer.messages.len()), "{}", answer.messages.len());
    for (n, message) in answer.messages.iter().enumerate() {
        assert!(message.body.len() == 1 << 20 && message.body.iter().all(|&b| usize::from(b) == n));
    }
}

#[tokio::test]
async fn only_the_tags_asked_for_come_and_the_offset_passes_the_others() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let sent: Vec<Message> = ["a", "b", "c", "a", "b"].iter().map(|tag| tagged(tag, tag)).collect();
    client.send_messages("t", 0, sent).await;
    client.send("t", 0, &["no tag"]).await;
    let pull = async |filter: &str| {
        let answer = client.pull(PullRequest { tag_filter: filter.into(), ..pull_request("t", 0, 0) }).await;
        assert_eq!(answer.next_offset, 6, "{filter}");
        (answer.outcome(), bodies(&answer.messages))
    };
    assert_eq!(pull("a").await, (PullOutcome::Found, vec!["a".into(), "a".into()]));
    assert_eq!(pull(" b || c ").await.1, ["b", "c", "b"]);
    assert_eq!(pull("*").await.1, ["a", "b", "c", "a", "b", "no tag"]);
    assert_eq!(pull("").await.1.len(), 6);
    assert_eq!(pull("x").await, (PullOutcome::NoMatchedMessage, Vec::new()));
}

#[tokio::test]
async fn tags_with_equal_java_hashes_are_told_apart() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send_messages("t", 0, vec![tagged("wrong", "BB"); 1000]).await;
    client.send_messages("t", 0, vec![tagged("right", "Aa")]).await;
    let (mut offset, mut delivered) = (0, Vec::new());
    while offset < 1001 {
        let answer =
            client.pull(PullRequest { tag_filter: "Aa".into(), ..pull_request("t", 0, offset) }).await;
        assert!(answer.next_offset > offset, "stands still at {offset}");
        offset = answer.next_offset;
        delivered.extend(bodies(&answer.messages));
    }
    assert_eq!(delivered, ["right"]);
}

#[tokio::test]
async fn a_filter_that_matches_nothing_moves_on_through_a_long_queue_in_bounded_steps() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for _ in 0..40 {
        client.send_messages("t", 0, vec![tagged("x", "no"); 1000]).await;
    }
    let mut offset = 0;
    while offset < 40_000 {
        let request = PullRequest { tag_filter: "yes".into(), ..pull_request("t", 0, offset) };
        let answer = client.pull(request).await;
        assert_eq!(answer.outcome(), PullOutcome::NoMatchedMessage);
        assert!(answer.next_offset > offset, "stands still at {offset}");
        offset = answer.next_offset;
    }
    let request = PullRequest { tag_filter: "yes".into(), ..pull_request("t", 0, offset) };
    assert_eq!(client.pull(request).await.outcome(), PullOutcome::NoNewMessage);
}

#[tokio::test]
async fn a_filter_that_cannot_be_read_is_refused() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for filter in ["||", "a||", "||a", "a||||b", "*||a", "a|b", &"a||".repeat(10_000), &"t".repeat(129)] {
        let request = PullRequest { tag_filter: filter.into(), ..pull_request("t", 0, 0) };
        let Err(status) = client.try_pull(request).await else { panic!("took {filter:?}") };
        let refusal = Refusal::of_field(&status, "tag_filter");
        assert_eq!(refusal.reason, "FILTER_ILLEGAL", "{filter:?}: {refusal:?}");
    }
}

#[tokio::test]
async fn a_commit_rides_along_and_its_result_never_fails_the_read() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send("t", 0, &["a", "b", "c"]).await;
    let pull = async |commit| {
        let request =
            PullRequest { group: "g".into(), commit_offset: Some(commit), ..pull_request("t", 0, 0) };
        let answer = client.pull(request).await;
        assert_eq!(answer.outcome(), PullOutcome::Found);
        let commit = answer.commit.unwrap();
        (commit.outcome(), commit.committed)
    };
    assert_eq!(pull(2).await, (CommitOutcome::Committed, Some(2)));
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(2));
    assert_eq!(pull(1).await, (CommitOutcome::CommitStale, Some(2)));
    assert_eq!(pull(4).await, (CommitOutcome::CommitOutOfRange, Some(2)));
    assert_eq!(pull(3).await, (CommitOutcome::Committed, Some(3)));
    let none = client.pull(PullRequest { group: "g".into(), ..pull_request("t", 0, 0) }).await;
    assert!(none.commit.is_none());
    let request = PullRequest { commit_offset: Some(3), ..pull_request("t", 0, 0) };
    Refusal::of_field(&client.try_pull(request).await.unwrap_err(), "group");
}

#[tokio::test]
async fn a_commit_that_rides_along_is_applied_even_when_the_read_finds_an_illegal_offset() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send("t", 0, &["a", "b", "c"]).await;
    let request = PullRequest { group: "g".into(), commit_offset: Some(3), ..pull_request("t", 0, 100) };
    let answer = client.pull(request).await;
    assert_eq!(answer.outcome(), PullOutcome::OffsetIllegal);
    assert_eq!(answer.commit.unwrap().outcome(), CommitOutcome::Committed);
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(3));
}

#[tokio::test]
async fn consumers_that_pull_together_are_all_served_until_the_queues_are_empty() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 4).await;
    for queue in 0..4 {
        for _ in 0..10 {
            client.send_messages("t", queue, vec![message("x"); 1000]).await;
        }
    }
    let consumers: Vec<_> = (0..8)
        .map(|n| {
            let client = client.clone();
            tokio::spawn(async move {
                let (mut offset, mut got) = (0, 0);
                while offset < 10_000 {
                    let mut request = pull_request("t", n % 4, offset);
                    request.max_messages = 100;
                    request.client_id = n.to_string();
                    let answer = client.pull(waiting(request, SOON)).await;
                    assert_eq!(answer.outcome(), PullOutcome::Found, "held although messages wait");
                    got += answer.messages.len();
                    offset = answer.next_offset;
                }
                got
            })
        })
        .collect();
    for consumer in consumers {
        assert_eq!(consumer.await.unwrap(), 10_000);
    }
}

#[tokio::test]
async fn a_damaged_message_is_named_as_lost_and_the_rest_is_served() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for n in 0..50 {
        client.send("t", 0, &[&format!("message number {n:04}")]).await;
    }
    broker.stop().await;
    flip_body(&broker, b"message number 0020");
    broker.restart().await;
    let client = broker.client().await;
    let (mut offset, mut delivered, mut lost) = (0, Vec::new(), Vec::new());
    while offset < 50 {
        let answer = client.pull(PullRequest { max_messages: 1024, ..pull_request("t", 0, offset) }).await;
        match answer.outcome() {
            PullOutcome::Found => delivered.extend(found(&answer)),
            PullOutcome::DataLoss => {
                let range = answer.lost.unwrap();
                assert_eq!(answer.next_offset, range.end);
                lost.extend(range.begin..range.end);
            }
            other => panic!("{other:?} at {offset}"),
        }
        assert!(answer.next_offset > offset, "stands still at {offset}");
        offset = answer.next_offset;
    }
    assert_eq!(lost, [20]);
    assert_eq!(delivered, (0..50).filter(|&n| n != 20).collect::<Vec<i64>>());
    assert!(client.send("t", 0, &["more"]).await.receipts[0].offset == 50, "and new messages are taken");
    assert!(client.status().await.shards[0].damage_total > 0);
}

/// Flips one bit of the stored bytes that begin with `body`, wherever they are.
fn flip_body(broker: &Broker, body: &[u8]) {
    let mut flipped = 0;
    for (path, _) in files_below(&broker.data_dir()).unwrap() {
        let mut bytes = fs::read(&path).unwrap();
        let Some(at) = bytes.windows(body.len()).position(|window| window == body) else { continue };
        bytes[at + 3] ^= 1;
        fs::write(&path, bytes).unwrap();
        flipped += 1;
    }
    assert!(flipped > 0, "the body is in no file");
}

#[tokio::test]
async fn below_the_first_offset_is_illegal_and_told_where_the_queue_begins() {
    let settings = [("store.retention_interval", "200ms"), ("store.segment_size", "64MiB")];
    let broker = Broker::start_with("standalone", &settings).await;
    let client = broker.client().await;
    let settings = holdfast::pb::v1::TopicSettings {
        queues: Some(1),
        retention_bytes: Some(4 << 20),
        ..Default::default()
    };
    client.topic_with("t", settings).await;
    client.topic("kept", 1).await;
    client.send("kept", 0, &["still here"]).await;
    // Well past the first segment, so that it can go.
    for _ in 0..16 {
        let request =
            SendRequest { queue_id: Some(0), ..send_request("t", vec![message(vec![7; 1 << 20]); 4]) };
        client.try_send(request).await.unwrap();
    }
    eventually("old messages go", async || client.offsets("t", 0, "").await.min_offset > 0).await;
    let answer = client.pull(pull_request("t", 0, 0)).await;
    assert_eq!(answer.outcome(), PullOutcome::OffsetIllegal);
    assert_eq!(answer.illegal_reason(), OffsetIllegalReason::BelowMin);
    assert_eq!(answer.next_offset, answer.min_offset);
    assert_eq!(answer.max_offset, 64);
    let answer = client.pull(pull_request("t", 0, answer.next_offset)).await;
    assert_eq!(answer.outcome(), PullOutcome::Found);
    assert_eq!(bodies(&client.all("kept", 0).await), ["still here"], "another topic keeps what it promised");
}
