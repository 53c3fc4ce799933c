//! Pulling and waiting.

use std::time::Instant;

use super::*;
use crate::store::disk::{Fault, Operation};

#[tokio::test]
async fn an_offset_outside_the_queue_is_told_apart_and_corrected() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let at = |offset| {
        let pulled = house.broker.pull(pull("t", offset));
        async {
            let pulled = pulled.await.unwrap();
            (pulled.outcome, pulled.next_offset)
        }
    };
    assert_eq!(at(0).await, (PullOutcome::NoNewMessage(None), 0));
    assert_eq!(at(1).await, (PullOutcome::BeyondMax, 0), "an empty queue");
    house.send("t", 0, vec![message("a"), message("b")]).await.unwrap();
    assert_eq!(at(2).await, (PullOutcome::NoNewMessage(None), 2));
    assert_eq!(at(3).await, (PullOutcome::BeyondMax, 2));
    assert_eq!(at(i64::MAX).await, (PullOutcome::BeyondMax, 2));
    assert_eq!(at(-5).await, (PullOutcome::BelowMin, 0));
}

#[tokio::test]
async fn an_illegal_offset_is_not_waited_for() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let pulled = house.broker.pull(waiting("t", 7)).await.unwrap();
    assert_eq!(pulled.outcome, PullOutcome::BeyondMax);
    let pulled = house.broker.pull(waiting("t", -1)).await.unwrap();
    assert_eq!(pulled.outcome, PullOutcome::BelowMin);
}

#[tokio::test]
async fn limits_of_an_answer_are_honoured_and_a_large_message_comes_alone() {
    let house = House::new();
    let large = "x".repeat(100_000);
    house.send("t", 0, vec![message(&large), message("b"), message("c"), message("d")]).await.unwrap();
    let first = house.broker.pull(PullCommand { max_bytes: 1, ..pull("t", 0) }).await.unwrap();
    assert_eq!((bodies(&first).len(), first.next_offset), (1, 1));
    let two = house.broker.pull(PullCommand { max_messages: 2, ..pull("t", 1) }).await.unwrap();
    assert_eq!((bodies(&two), two.next_offset), (vec!["b".to_owned(), "c".to_owned()], 3));
    let few = house.broker.pull(PullCommand { max_bytes: 1000, ..pull("t", 1) }).await.unwrap();
    assert_eq!(bodies(&few), ["b", "c", "d"]);
    for bad in [
        PullCommand { max_messages: 1025, ..pull("t", 0) },
        PullCommand { max_bytes: (16 << 20) + 1, ..pull("t", 0) },
        PullCommand { client: "c".repeat(256), ..pull("t", 0) },
        PullCommand { commit: Some(0), ..pull("t", 0) },
        PullCommand { group: "bad group!".into(), ..pull("t", 0) },
        pull("a.b", 0),
    ] {
        assert_eq!(reason(house.broker.pull(bad).await), "INVALID_FIELD");
    }
    assert_eq!(
        reason(house.broker.pull(PullCommand { tag_filter: "a||".into(), ..pull("t", 0) }).await),
        "FILTER_ILLEGAL"
    );
    assert_eq!(
        reason(house.broker.pull(PullCommand { queue: 9999, ..pull("t", 0) }).await),
        "QUEUE_NOT_FOUND"
    );
    assert_eq!(reason(house.broker.pull(pull("nowhere", 0)).await), "TOPIC_NOT_FOUND");
}

#[tokio::test]
async fn a_held_pull_answers_as_soon_as_a_message_arrives() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let held = tokio::spawn(house.broker.pull(waiting("t", 0)));
    house.held(1).await;
    house.send("t", 1, vec![message("another queue")]).await.unwrap();
    assert_eq!(house.broker.inner.hold.held(), 1);
    house.send("t", 0, vec![message("here")]).await.unwrap();
    assert_eq!(bodies(&held.await.unwrap().unwrap()), ["here"]);
    house.held(0).await;
}

#[tokio::test]
async fn a_short_poll_and_a_passed_deadline_do_not_wait() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let deadline = Some(Instant::now());
    for command in [pull("t", 0), PullCommand { deadline, ..waiting("t", 0) }] {
        let pulled = house.broker.pull(command).await.unwrap();
        assert_eq!(pulled.outcome, PullOutcome::NoNewMessage(None));
    }
}

#[tokio::test]
async fn a_wait_ends_with_its_time_and_before_the_callers_deadline() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let wait = Duration::from_millis(30);
    let pulled = house.broker.pull(PullCommand { wait, ..pull("t", 0) }).await.unwrap();
    assert_eq!(pulled.outcome, PullOutcome::NoNewMessage(None));
    let deadline = Some(Instant::now() + Duration::from_millis(150));
    let pulled = house.broker.pull(PullCommand { deadline, ..waiting("t", 0) }).await.unwrap();
    assert_eq!(pulled.outcome, PullOutcome::NoNewMessage(None));
    assert_eq!(house.broker.inner.hold.held(), 0);
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_nothing_behind() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let held: Vec<_> = (0..50).map(|_| tokio::spawn(house.broker.pull(waiting("t", 0)))).collect();
    house.held(50).await;
    held.iter().for_each(tokio::task::JoinHandle::abort);
    house.held(0).await;
}

#[tokio::test]
async fn the_third_pull_of_one_client_replaces_the_oldest() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let by = |client: &str| PullCommand { client: client.into(), group: "g".into(), ..waiting("t", 0) };
    let oldest = tokio::spawn(house.broker.pull(by("c")));
    house.held(1).await;
    let _second = tokio::spawn(house.broker.pull(by("c")));
    let _other = tokio::spawn(house.broker.pull(by("d")));
    house.held(3).await;
    let _third = tokio::spawn(house.broker.pull(by("c")));
    assert_eq!(oldest.await.unwrap().unwrap().outcome, PullOutcome::NoNewMessage(None));
    house.held(3).await;
}

#[tokio::test]
async fn a_full_hold_answers_at_once_and_says_when_to_come_again() {
    let limits = Limits { total: 1, ..Limits::default() };
    let house = House::with(|_| {}, limits);
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let _held = tokio::spawn(house.broker.pull(waiting("t", 0)));
    house.held(1).await;
    let pulled = house.broker.pull(waiting("t", 0)).await.unwrap();
    assert_eq!(pulled.outcome, PullOutcome::NoNewMessage(Some(Duration::from_secs(1))));
}

#[tokio::test]
async fn only_wanted_tags_are_delivered_and_the_others_are_passed_over() {
    let house = House::new();
    let batch = vec![tagged("1", "Aa"), tagged("2", "BB"), message("3"), tagged("4", "Aa")];
    house.send("t", 0, batch).await.unwrap();
    let filtered = |offset, filter: &str| PullCommand { tag_filter: filter.into(), ..pull("t", offset) };
    let pulled = house.broker.pull(filtered(0, "Aa")).await.unwrap();
    assert_eq!((bodies(&pulled), pulled.next_offset), (vec!["1".to_owned(), "4".to_owned()], 4));
    let pulled = house.broker.pull(filtered(1, "none || BB")).await.unwrap();
    assert_eq!((bodies(&pulled), pulled.next_offset), (vec!["2".to_owned()], 4));
    let pulled = house.broker.pull(filtered(0, "none")).await.unwrap();
    assert_eq!((pulled.outcome, pulled.next_offset), (PullOutcome::NoMatchedMessage, 4));
    let pulled = house.broker.pull(filtered(0, "*")).await.unwrap();
    assert_eq!(bodies(&pulled).len(), 4, "without a tag too");
}

#[tokio::test]
async fn a_filtered_wait_keeps_its_place_and_is_woken_by_a_match_before_a_mismatch() {
    let house = House::new();
    house.send("t", 0, (0..1000).map(|n| tagged(&n.to_string(), "BB")).collect()).await.unwrap();
    let command = PullCommand { tag_filter: "Aa".into(), ..waiting("t", 0) };
    let held = tokio::spawn(house.broker.pull(command));
    house.held(1).await;
    house.send("t", 0, vec![tagged("no", "BB")]).await.unwrap();
    house.send("t", 0, vec![tagged("yes", "Aa"), tagged("no", "BB")]).await.unwrap();
    let pulled = held.await.unwrap().unwrap();
    assert_eq!((bodies(&pulled), pulled.next_offset), (vec!["yes".to_owned()], 1003));

    let wait = Duration::from_millis(30);
    let command = PullCommand { tag_filter: "none".into(), wait, ..pull("t", 0) };
    let pulled = house.broker.pull(command).await.unwrap();
    assert_eq!((pulled.outcome, pulled.next_offset), (PullOutcome::NoMatchedMessage, 1003));
}

#[tokio::test]
async fn one_pull_looks_at_a_bounded_number_of_entries() {
    let house = House::new();
    for _ in 0..9 {
        house.send("t", 0, vec![tagged("x", "BB"); 1000]).await.unwrap();
    }
    house.send("t", 0, vec![tagged("y", "Aa")]).await.unwrap();
    let short = PullCommand { tag_filter: "Aa".into(), ..pull("t", 0) };
    let pulled = house.broker.pull(short).await.unwrap();
    assert_eq!(pulled.outcome, PullOutcome::NoMatchedMessage);
    assert!(pulled.next_offset <= 8192 && pulled.next_offset > 800, "{}", pulled.next_offset);
    let long = PullCommand { tag_filter: "Aa".into(), ..waiting("t", 0) };
    assert_eq!(bodies(&house.broker.pull(long).await.unwrap()), ["y"], "one that may wait goes on");
}

#[tokio::test]
async fn a_deleted_topic_ends_its_waits_and_comes_back_empty() {
    let house = House::new();
    house.send("t", 0, vec![message("old")]).await.unwrap();
    house.commit("g", "t", 0, 1).await;
    let held = tokio::spawn(house.broker.pull(waiting("t", 1)));
    house.held(1).await;
    house.broker.delete_topic("t").await.unwrap();
    assert_eq!(reason(held.await.unwrap()), "TOPIC_NOT_FOUND");
    assert_eq!(reason(house.broker.pull(pull("t", 0)).await), "TOPIC_NOT_FOUND");
    house.held(0).await;

    house.send("t", 0, vec![message("new")]).await.unwrap();
    assert_eq!(bodies(&house.broker.pull(pull("t", 0)).await.unwrap()), ["new"]);
    assert_eq!(house.committed("g", "t", 0).await, None, "the old progress is gone");
    let group = house.broker.describe_group("g", "").await.unwrap();
    assert!(group.queues.is_empty());
}

#[tokio::test]
async fn stopping_answers_everybody_who_waits() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let held: Vec<_> = (0..200).map(|_| tokio::spawn(house.broker.pull(waiting("t", 0)))).collect();
    house.held(200).await;
    house.broker.stop();
    for held in held {
        assert_eq!(reason(held.await.unwrap()), "STOPPING");
    }
    assert_eq!(reason(house.broker.pull(waiting("t", 0)).await), "STOPPING");
}

#[tokio::test]
async fn a_commit_rides_along_and_is_applied_before_the_wait() {
    let house = House::new();
    house.send("t", 0, vec![message("a"), message("b")]).await.unwrap();
    let riding =
        |offset, commit| PullCommand { group: "g".into(), commit: Some(commit), ..pull("t", offset) };
    let pulled = house.broker.pull(riding(1, 1)).await.unwrap();
    assert_eq!(bodies(&pulled), ["b"]);
    assert_eq!(pulled.commit, Some(Commit { outcome: CommitOutcome::Committed, committed: Some(1) }));
    let pulled = house.broker.pull(riding(0, 0)).await.unwrap();
    assert_eq!(pulled.commit, Some(Commit { outcome: CommitOutcome::Stale, committed: Some(1) }));
    assert_eq!(bodies(&pulled), ["a", "b"], "it never fails the read");
    let pulled = house.broker.pull(riding(9, 9)).await.unwrap();
    assert_eq!(pulled.commit, Some(Commit { outcome: CommitOutcome::OutOfRange, committed: Some(1) }));
    assert_eq!(pulled.outcome, PullOutcome::BeyondMax);

    let command = PullCommand { group: "g".into(), commit: Some(2), ..waiting("t", 2) };
    let held = tokio::spawn(house.broker.pull(command));
    house.held(1).await;
    assert_eq!(house.committed("g", "t", 0).await, Some(2));
    house.send("t", 0, vec![message("c")]).await.unwrap();
    let pulled = held.await.unwrap().unwrap();
    assert_eq!(pulled.commit, Some(Commit { outcome: CommitOutcome::Committed, committed: Some(2) }));
}

#[tokio::test]
async fn a_group_must_be_there_or_comes_by_itself() {
    let house = House::with(|config| config.groups.auto_create = false, Limits::default());
    house.send("t", 0, vec![message("a")]).await.unwrap();
    let command = PullCommand { group: "g".into(), ..pull("t", 0) };
    assert_eq!(reason(house.broker.pull(command).await), "GROUP_NOT_FOUND");
    let offsets = vec![QueueOffset { topic: "t".into(), queue: 0, offset: 1 }];
    let commit = CommitCommand { group: "g".into(), offsets };
    assert_eq!(reason(house.broker.commit(commit).await), "GROUP_NOT_FOUND");
    let house = House::new();
    house.send("t", 0, vec![message("a")]).await.unwrap();
    let command = PullCommand { group: "g".into(), ..pull("t", 0) };
    house.broker.pull(command).await.unwrap();
    assert!(house.broker.describe_group("g", "").await.unwrap().queues.is_empty());
}

#[tokio::test]
async fn a_waiting_pull_is_small() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let command = PullCommand {
        tag_filter: "a || b".into(),
        group: "g".into(),
        client: "c".repeat(200),
        ..waiting("t", 0)
    };
    let future = house.broker.pull(command);
    let size = size_of_val(&future) + super::super::pull::boxed_bytes();
    assert!(size <= 1536, "{size}");
}

#[tokio::test]
async fn the_sweep_has_nothing_to_find() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let held: Vec<_> = (0..20).map(|_| tokio::spawn(house.broker.pull(waiting("t", 0)))).collect();
    house.held(20).await;
    let ends = |key: QueueKey| {
        let topic = house.broker.inner.store.topic_by_id(key.topic)?;
        topic.queues.get(key.queue as usize).map(|queue| queue.bounds().1)
    };
    assert_eq!(house.broker.inner.hold.sweep(ends) + house.broker.inner.hold.sweep(ends), 0);
    house.send("t", 0, vec![message("a")]).await.unwrap();
    for held in held {
        held.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_at_the_end_of_the_queue_get_every_message_once_and_in_order() {
    const MESSAGES: usize = 500;
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let readers: Vec<_> = (0..8)
        .map(|_| {
            let broker = house.broker.clone();
            tokio::spawn(async move {
                let (mut next, mut seen) = (0, Vec::new());
                while seen.len() < MESSAGES {
                    let pulled = broker.pull(waiting("t", next)).await.unwrap();
                    next = pulled.next_offset as i64;
                    seen.extend(bodies(&pulled));
                }
                seen
            })
        })
        .collect();
    for n in 0..MESSAGES {
        house.send("t", 0, vec![message(&n.to_string())]).await.unwrap();
    }
    let expected: Vec<String> = (0..MESSAGES).map(|n| n.to_string()).collect();
    for reader in readers {
        assert_eq!(reader.await.unwrap(), expected);
    }
}

/// Flips one byte of the first place in the log's files that holds `text`.
fn damage(house: &House, text: &str) {
    let dir = house.options.dir.join("log");
    for name in house.disk.list(&dir).unwrap().iter().filter(|name| name.ends_with(".log")) {
        let file = house.disk.open(&dir.join(name)).unwrap();
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        let found = bytes.windows(text.len()).position(|window| window == text.as_bytes());
        if let Some(at) = found {
            return file.write_at(&[bytes[at] ^ 1], at as u64).unwrap();
        }
    }
    panic!("`{text}` is in no file");
}

#[tokio::test]
async fn damaged_messages_are_told_as_a_range_and_the_rest_is_served() {
    let mut house = House::new();
    for body in ["first", "second-is-damaged", "third-is-damaged", "fourth"] {
        house.send("t", 0, vec![tagged(body, "x")]).await.unwrap();
    }
    house.close();
    damage(&house, "second-is-damaged");
    damage(&house, "third-is-damaged");
    house.restart();
    for filter in ["", "x"] {
        let at = |offset| PullCommand { tag_filter: filter.into(), ..pull("t", offset) };
        let before = house.broker.pull(at(0)).await.unwrap();
        assert_eq!((bodies(&before), before.next_offset), (vec!["first".to_owned()], 1));
        let mut next = 1;
        let mut lost = Vec::new();
        while next < 3 {
            let pulled = house.broker.pull(at(next)).await.unwrap();
            let PullOutcome::DataLoss { begin, end } = pulled.outcome else { panic!("{pulled:?}") };
            assert_eq!((begin as i64, pulled.next_offset), (next, end));
            lost.extend(begin..end);
            next = end as i64;
        }
        assert_eq!(lost, [1, 2]);
        assert_eq!(bodies(&house.broker.pull(at(3)).await.unwrap()), ["fourth"]);
        let other = PullCommand { tag_filter: "y".into(), ..pull("t", 3) };
        assert_eq!(house.broker.pull(other).await.unwrap().outcome, PullOutcome::NoMatchedMessage);
    }
    let lag = house.broker.describe_group("g", "").await;
    assert_eq!(reason(lag), "GROUP_NOT_FOUND");
    assert!(house.broker.node_status().shards[0].damage_total > 0);
}

#[tokio::test]
async fn an_offset_that_retention_has_passed_is_below_the_first() {
    let house = House::new();
    let retention_age = Some(Duration::from_secs(60));
    let change = TopicChange { retention_age, queues: Some(1), ..TopicChange::default() };
    house.broker.create_topic("t", change).await.unwrap();
    let body = "x".repeat(100_000);
    for _ in 0..100 {
        house.send("t", 0, vec![message(&body)]).await.unwrap();
    }
    house.commit("g", "t", 0, 1).await;
    let (_, queue) = house.broker.queue(&crate::model::TopicName::new("t").unwrap(), 0).unwrap();
    while queue.bounds().0 == 0 {
        house.clock.advance(Duration::from_secs(30));
        house.send("t", 0, vec![message(&body)]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let pulled = house.broker.pull(waiting("t", 0)).await.unwrap();
    assert_eq!(pulled.outcome, PullOutcome::BelowMin);
    assert!(pulled.next_offset > 0 && pulled.next_offset == pulled.min_offset);
    assert!(matches!(house.commit("g", "t", 0, 1).await.outcome, CommitOutcome::OutOfRange));
    let lag = &house.broker.describe_group("g", "").await.unwrap().queues[0];
    assert!(lag.lag_messages <= lag.max_offset - lag.min_offset, "what is gone does not count");
}

#[tokio::test]
async fn a_message_that_is_in_no_cache_is_read_where_waiting_harms_nobody() {
    let mut house = House::new();
    house.options.recent_bytes = 64 << 10;
    house.send("t", 0, (0..50).map(|n| tagged(&n.to_string(), "x")).collect()).await.unwrap();
    house.restart();
    house.disk.set_cold(true);
    for filter in ["", "x"] {
        let command = PullCommand { tag_filter: filter.into(), max_messages: 100, ..pull("t", 0) };
        let pulled = house.broker.pull(command).await.unwrap();
        assert_eq!(bodies(&pulled), (0..50).map(|n| n.to_string()).collect::<Vec<_>>());
    }
    let stall = house.disk.hold(Operation::Read, ".log");
    let cold = tokio::spawn(house.broker.pull(pull("t", 0)));
    while stall.waiting() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let short = house.broker.pull(pull("t", 50)).await.unwrap();
    assert_eq!(short.outcome, PullOutcome::NoNewMessage(None), "others go on meanwhile");
    drop(stall);
    assert_eq!(bodies(&cold.await.unwrap().unwrap()).len(), 32);

    house.disk.inject(Fault::device(Operation::Read).on(".log"));
    assert_eq!(reason(house.broker.pull(pull("t", 0)).await), "READ_FAILED");
}

#[tokio::test]
async fn a_message_that_the_device_cannot_read_keeps_back_none_before_it_and_can_be_passed() {
    let mut house = House::new();
    house.options.recent_bytes = 64 << 10;
    let messages = (0..20).map(|n| message(&format!("body number {n:02} {}", "x".repeat(300)))).collect();
    house.send("t", 0, messages).await.unwrap();
    house.restart();
    house.disk.set_cold(true);
    let file = house.options.dir.join(format!("log/{:020}.log", 0));
    let mut bytes = vec![0; 64 << 10];
    house.disk.open(&file).unwrap().read_at(&mut bytes, 0).unwrap();
    let text = b"body number 07";
    let at = bytes.windows(text.len()).position(|window| window == text).unwrap() as u64;
    house.disk.inject(Fault::device(Operation::Read).on(".log").at(at..at + 1));
    let (mut offset, mut seen) = (0, 0);
    let refused = loop {
        match house.broker.pull(pull("t", offset)).await {
            Ok(pulled) => {
                seen += bodies(&pulled).len();
                offset = pulled.next_offset as i64;
            }
            Err(error) => break error,
        }
    };
    assert_eq!((seen, offset, refused.reason()), (7, 7, "READ_FAILED"));
    assert_eq!(bodies(&house.broker.pull(pull("t", 8)).await.unwrap()).len(), 12);
}

#[tokio::test]
async fn news_of_messages_that_were_taken_back_is_heard_once() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let held = tokio::spawn(house.broker.pull(waiting("t", 0)));
    house.held(1).await;
    let (_, queue) = house.broker.queue(&crate::model::TopicName::new("t").unwrap(), 0).unwrap();
    house.broker.inner.hold.publish(&[(queue.key(), 5)]);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(!held.is_finished());
    house.broker.stop();
    assert_eq!(reason(held.await.unwrap()), "STOPPING");
}
