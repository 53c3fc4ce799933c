//! `CommitOffsets`, `GetOffsets`, `ResetOffsets`: progress goes forwards by itself, and back only when told.

use holdfast::pb::v1::{
    CommitOffsetsRequest, CommitOutcome, CommitResult, DeleteTopicRequest, GetOffsetsRequest, QueueOffset,
    QueueRef, ResetOffsetsRequest, ResetResult, TimestampBound, reset_offsets_request::To,
};
use tonic::{Code, Status};

use crate::harness::*;

async fn try_commit(
    client: &Client,
    group: &str,
    offsets: &[(&str, u32, i64)],
) -> Result<Vec<CommitResult>, Status> {
    let offsets = offsets
        .iter()
        .map(|&(topic, queue_id, offset)| QueueOffset { topic: topic.into(), queue_id, offset })
        .collect();
    let request = CommitOffsetsRequest { group: group.into(), offsets };
    client.broker.clone().commit_offsets(request).await.map(|answer| answer.into_inner().results)
}

async fn commit(client: &Client, queue: u32, offset: i64) -> (CommitOutcome, Option<i64>) {
    let results = try_commit(client, "g", &[("t", queue, offset)]).await.unwrap();
    (results[0].outcome(), results[0].committed)
}

async fn try_reset(
    client: &Client,
    queue: Option<u32>,
    to: Option<To>,
    dry_run: bool,
) -> Result<Vec<ResetResult>, Status> {
    let request = ResetOffsetsRequest { group: "g".into(), topic: "t".into(), queue_id: queue, to, dry_run };
    client.admin.clone().reset_offsets(request).await.map(|answer| answer.into_inner().results)
}

/// A topic `t` of two queues, with ten messages in queue 0 and five in queue 1.
async fn ten_and_five(client: &Client) {
    client.topic("t", 2).await;
    client.send("t", 0, &["x"; 10]).await;
    client.send("t", 1, &["x"; 5]).await;
}

#[tokio::test]
async fn commits_go_forwards_and_never_back_by_themselves() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    ten_and_five(&client).await;
    assert_eq!(client.offsets("t", 0, "g").await.committed, None);
    assert_eq!(commit(&client, 0, 4).await, (CommitOutcome::Committed, Some(4)));
    assert_eq!(commit(&client, 0, 4).await, (CommitOutcome::Committed, Some(4)), "once more is harmless");
    assert_eq!(commit(&client, 0, 3).await, (CommitOutcome::CommitStale, Some(4)));
    assert_eq!(commit(&client, 0, 10).await, (CommitOutcome::Committed, Some(10)), "all done is the end");
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(10));
    assert_eq!(client.offsets("t", 1, "g").await.committed, None, "another queue is untouched");
    assert_eq!(client.offsets("t", 0, "other").await.committed, None, "another group too");
}

#[tokio::test]
async fn an_offset_outside_the_queue_is_not_committed() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    ten_and_five(&client).await;
    assert_eq!(commit(&client, 0, 11).await, (CommitOutcome::CommitOutOfRange, None));
    assert_eq!(commit(&client, 0, i64::MAX).await, (CommitOutcome::CommitOutOfRange, None));
    assert_eq!(commit(&client, 0, 7).await, (CommitOutcome::Committed, Some(7)));
    assert_eq!(commit(&client, 0, 110).await, (CommitOutcome::CommitOutOfRange, Some(7)));
    for offset in [-1, i64::MIN] {
        match try_commit(&client, "g", &[("t", 0, offset)]).await {
            Ok(results) => assert_eq!(results[0].outcome(), CommitOutcome::CommitOutOfRange),
            Err(status) => assert_eq!(Refusal::of(&status).code, Code::InvalidArgument),
        }
    }
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(7));
}

#[tokio::test]
async fn several_queues_in_one_call_get_their_own_results_in_order() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    ten_and_five(&client).await;
    let asked = [("t", 1, 3), ("t", 0, 99), ("nothing", 0, 0), ("t", 9, 0)];
    let results = try_commit(&client, "g", &asked).await.unwrap();
    let outcomes: Vec<CommitOutcome> = results.iter().map(CommitResult::outcome).collect();
    use CommitOutcome::{CommitFailed, CommitOutOfRange, Committed};
    assert_eq!(outcomes, [Committed, CommitOutOfRange, CommitFailed, CommitFailed]);
    for (result, reason) in [(&results[2], "TOPIC_NOT_FOUND"), (&results[3], "QUEUE_NOT_FOUND")] {
        let error = result.error.as_ref().unwrap();
        assert_eq!((error.code, error.reason.as_str()), (Code::NotFound as i32, reason));
    }
    assert_eq!(client.offsets("t", 1, "g").await.committed, Some(3));
}

#[tokio::test]
async fn a_call_names_1_to_1024_queues_each_once() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2000).await;
    let many: Vec<_> = (0..1025).map(|queue| ("t", queue, 0)).collect();
    for bad in [&many[..0], &many[..], &[("t", 1, 0), ("t", 1, 0)]] {
        let refusal = Refusal::of(&try_commit(&client, "g", bad).await.unwrap_err());
        assert_eq!(refusal.code, Code::InvalidArgument);
        assert!(refusal.fields.iter().any(|field| field.starts_with("offsets")), "{refusal:?}");
    }
    assert_eq!(try_commit(&client, "g", &many[..1024]).await.unwrap().len(), 1024);
    for count in [0, 1025] {
        let queues = (0..count).map(|queue_id| QueueRef { topic: "t".into(), queue_id }).collect();
        let request = GetOffsetsRequest { queues, ..Default::default() };
        Refusal::of_field(&client.broker.clone().get_offsets(request).await.unwrap_err(), "queues");
    }
}

#[tokio::test]
async fn offsets_of_several_queues_come_in_the_order_asked() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    ten_and_five(&client).await;
    commit(&client, 1, 2).await;
    let queues = [1, 0].map(|queue_id| QueueRef { topic: "t".into(), queue_id }).to_vec();
    let request = GetOffsetsRequest { queues, group: "g".into(), ..Default::default() };
    let answer = client.broker.clone().get_offsets(request).await.unwrap().into_inner();
    let seen: Vec<_> =
        answer.offsets.iter().map(|o| (o.queue_id, o.min_offset, o.max_offset, o.committed)).collect();
    assert_eq!(seen, [(1, 0, 5, Some(2)), (0, 0, 10, None)]);
    assert!(answer.offsets.iter().all(|o| o.by_timestamp.is_none() && o.topic == "t"));
}

#[tokio::test]
async fn asking_for_a_queue_that_is_not_there_is_refused_and_makes_nothing() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    for (topic, queue_id, reason) in
        [("t", 2, "QUEUE_NOT_FOUND"), ("t", u32::MAX, "QUEUE_NOT_FOUND"), ("x", 0, "TOPIC_NOT_FOUND")]
    {
        let queues = vec![QueueRef { topic: topic.into(), queue_id }];
        let request = GetOffsetsRequest { queues, ..Default::default() };
        let refusal = Refusal::of(&client.broker.clone().get_offsets(request).await.unwrap_err());
        assert_eq!((refusal.code, refusal.reason.as_str()), (Code::NotFound, reason));
    }
    let shard = &client.status().await.shards[0];
    assert_eq!((shard.topics, shard.queues), (1, 2));
}

#[tokio::test]
async fn a_time_stands_for_the_first_message_at_or_after_or_the_last_at_or_before() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    let mut times = Vec::new();
    while times.len() < 5 {
        let sent = client.send("t", 0, &["x", "x"]).await;
        let ms = millis(&sent.store_timestamp.unwrap());
        times.push((ms, sent.receipts[0].offset));
        // The next batch must have a later store time to be told apart.
        eventually("the clock moves on", async || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            i64::try_from(now.as_millis()).unwrap() > ms + 1
        })
        .await;
    }
    let at = async |queue_id, ms, bound: TimestampBound| {
        let queues = vec![QueueRef { topic: "t".into(), queue_id }];
        let timestamp = Some(timestamp(ms));
        let request = GetOffsetsRequest { queues, timestamp, bound: bound as i32, ..Default::default() };
        let answer = client.broker.clone().get_offsets(request).await.unwrap().into_inner();
        answer.offsets[0].by_timestamp.unwrap()
    };
    use TimestampBound::{FirstAtOrAfter, LastAtOrBefore};
    for &(ms, first) in &times {
        assert_eq!(at(0, ms, FirstAtOrAfter).await, first);
        assert_eq!(at(0, ms, LastAtOrBefore).await, first + 1);
        assert_eq!(at(0, ms - 1, FirstAtOrAfter).await, first);
        assert_eq!(at(0, ms + 1, LastAtOrBefore).await, first + 1);
    }
    let (oldest, newest) = (times[0].0, times[4].0);
    assert_eq!(at(0, 0, FirstAtOrAfter).await, 0);
    assert_eq!(at(0, oldest - 1, LastAtOrBefore).await, 0, "none before: the start");
    assert_eq!(at(0, newest + 1, FirstAtOrAfter).await, 10, "none after: the end");
    assert_eq!(at(0, newest + 1_000_000, LastAtOrBefore).await, 9);
    assert_eq!(at(1, newest, FirstAtOrAfter).await, 0, "an empty queue");
    assert_eq!(at(1, newest, LastAtOrBefore).await, 0, "an empty queue");
}

#[tokio::test]
async fn a_reset_sets_progress_where_it_is_told_backwards_too() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    ten_and_five(&client).await;
    commit(&client, 0, 8).await;
    let seen = |results: Vec<ResetResult>| -> Vec<(u32, Option<i64>, i64)> {
        results.into_iter().map(|result| (result.queue_id, result.from, result.to)).collect()
    };
    let latest = try_reset(&client, None, Some(To::Latest(true)), true).await.unwrap();
    assert_eq!(seen(latest), [(0, Some(8), 10), (1, None, 5)]);
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(8), "a dry run changes nothing");
    assert_eq!(client.offsets("t", 1, "g").await.committed, None);

    let earliest = try_reset(&client, None, Some(To::Earliest(true)), false).await.unwrap();
    assert_eq!(seen(earliest), [(0, Some(8), 0), (1, None, 0)]);
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(0));
    let one = try_reset(&client, Some(1), Some(To::Offset(3)), false).await.unwrap();
    assert_eq!(seen(one), [(1, Some(0), 3)]);
    let latest = try_reset(&client, Some(0), Some(To::Latest(true)), false).await.unwrap();
    assert_eq!(seen(latest), [(0, Some(0), 10)]);
    let begin = try_reset(&client, None, Some(To::Timestamp(timestamp(0))), false).await.unwrap();
    assert_eq!(seen(begin), [(0, Some(10), 0), (1, Some(3), 0)]);
    assert_eq!(commit(&client, 0, 2).await, (CommitOutcome::Committed, Some(2)), "and on from there");
}

#[tokio::test]
async fn a_reset_that_makes_no_sense_is_refused_and_changes_nothing() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    ten_and_five(&client).await;
    commit(&client, 0, 8).await;
    let bad = [
        (Some(0), Some(To::Offset(11))),
        (Some(0), Some(To::Offset(-1))),
        (None, Some(To::Offset(3))),
        (Some(0), None),
        (Some(0), Some(To::Earliest(false))),
    ];
    for (queue, to) in bad {
        let Err(status) = try_reset(&client, queue, to, false).await else {
            assert_eq!(to, Some(To::Earliest(false)), "took {queue:?} {to:?}");
            continue;
        };
        let refusal = Refusal::of(&status);
        assert!(matches!(refusal.code, Code::InvalidArgument | Code::OutOfRange), "{to:?}: {refusal:?}");
        assert!(client.offsets("t", 0, "g").await.committed == Some(8));
    }
    let status = try_reset(&client, Some(7), Some(To::Earliest(true)), false).await.unwrap_err();
    assert_eq!(Refusal::of(&status).reason, "QUEUE_NOT_FOUND");
}

#[tokio::test]
async fn progress_does_not_survive_its_topic_into_the_next_one_of_that_name() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for _ in 0..10 {
        client.send("t", 0, &["old"; 100]).await;
    }
    commit(&client, 0, 1000).await;
    client.admin.clone().delete_topic(DeleteTopicRequest { topic: "t".into() }).await.unwrap();
    client.topic("t", 1).await;
    assert_eq!(client.offsets("t", 0, "g").await.committed, None);
    client.send("t", 0, &["new"; 10]).await;
    assert_eq!(commit(&client, 0, 1000).await, (CommitOutcome::CommitOutOfRange, None));
    assert_eq!(bodies(&client.all("t", 0).await), ["new"; 10]);
    assert_eq!(commit(&client, 0, 0).await, (CommitOutcome::Committed, Some(0)));
    let request = holdfast::pb::v1::DescribeGroupRequest { group: "g".into(), topic: String::new() };
    let lag = async || {
        client.admin.clone().describe_group(request.clone()).await.unwrap().into_inner().lag_messages
    };
    assert_eq!(lag().await, 10);
    commit(&client, 0, 10).await;
    assert_eq!(lag().await, 0);
}

#[tokio::test]
async fn commits_of_many_consumers_at_once_never_let_progress_fall() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send_messages("t", 0, vec![message("x"); 1000]).await;
    let committers: Vec<_> = (0..8)
        .map(|n| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut random = Random(n);
                for _ in 0..50 {
                    let offset = i64::try_from(random.below(1001)).unwrap();
                    let (outcome, committed) = commit(&client, 0, offset).await;
                    assert!(matches!(outcome, CommitOutcome::Committed | CommitOutcome::CommitStale));
                    assert!(committed.unwrap() >= offset);
                }
            })
        })
        .collect();
    let mut last = 0;
    while committers.iter().any(|committer| !committer.is_finished()) {
        let now = client.offsets("t", 0, "g").await.committed.unwrap_or(0);
        assert!(now >= last, "{now} after {last}");
        last = now;
    }
    for committer in committers {
        committer.await.unwrap();
    }
}
