//! Consumer groups, their progress, lag and resets.

use super::*;
use crate::model::StartFrom;

fn change(start_from: StartFrom) -> GroupChange {
    GroupChange { start_from: Some(start_from) }
}

#[tokio::test]
async fn groups_are_made_changed_listed_and_deleted() {
    let house = House::new();
    let broker = &house.broker;
    let made = broker.create_group("g", GroupChange::default()).await.unwrap();
    assert_eq!(made.settings.start_from, StartFrom::Earliest);
    assert_eq!(reason(broker.create_group("g", GroupChange::default()).await), "GROUP_EXISTS");
    let changed = broker.update_group("g", change(StartFrom::Latest)).await.unwrap();
    assert_eq!((changed.id, changed.settings.start_from), (made.id, StartFrom::Latest));
    let same = broker.update_group("g", GroupChange::default()).await.unwrap();
    assert_eq!(same.settings.start_from, StartFrom::Latest);
    for name in ["h", "a", "ga"] {
        broker.create_group(name, GroupChange::default()).await.unwrap();
    }
    let names = |page: Page<GroupInfo>| {
        (page.items.iter().map(|group| group.name.to_string()).collect::<Vec<_>>().join(" "), page.next)
    };
    let list = |page_size, page_token: &str, prefix: &str| {
        broker.list_groups(ListCommand { page_size, page_token: page_token.into(), prefix: prefix.into() })
    };
    assert_eq!(names(list(0, "", "").await.unwrap()), ("a g ga h".into(), String::new()));
    assert_eq!(names(list(2, "", "").await.unwrap()), ("a g".into(), "g".into()));
    assert_eq!(names(list(2, "g", "").await.unwrap()), ("ga h".into(), String::new()));
    assert_eq!(names(list(0, "", "g").await.unwrap()), ("g ga".into(), String::new()));
    assert_eq!(field(list(1001, "", "").await), "page_size");
    broker.delete_group("g").await.unwrap();
    assert_eq!(reason(broker.describe_group("g", "").await), "GROUP_NOT_FOUND");
    assert_eq!(reason(broker.delete_group("g").await), "GROUP_NOT_FOUND");
    assert_eq!(reason(broker.update_group("g", GroupChange::default()).await), "GROUP_NOT_FOUND");
    for bad in ["bad group!", "", &"g".repeat(121), &"g".repeat(256)] {
        assert_eq!(field(broker.create_group(bad, GroupChange::default()).await), "group", "{bad:?}");
    }
}

#[tokio::test]
async fn progress_only_moves_forward_and_within_the_queue() {
    let mut house = House::new();
    house.send("t", 0, vec![message("a"); 10]).await.unwrap();
    let outcome = |commit: Commit| (commit.outcome, commit.committed);
    assert_eq!(outcome(house.commit("g", "t", 0, 4).await), (CommitOutcome::Committed, Some(4)));
    assert_eq!(outcome(house.commit("g", "t", 0, 3).await), (CommitOutcome::Stale, Some(4)));
    assert_eq!(outcome(house.commit("g", "t", 0, 4).await), (CommitOutcome::Committed, Some(4)));
    for wrong in [-1, 11, i64::MAX, i64::MIN] {
        assert_eq!(outcome(house.commit("g", "t", 0, wrong).await), (CommitOutcome::OutOfRange, Some(4)));
    }
    assert_eq!(outcome(house.commit("g", "t", 0, 10).await), (CommitOutcome::Committed, Some(10)));
    assert_eq!(outcome(house.commit("h", "t", 0, 0).await), (CommitOutcome::Committed, Some(0)));
    house.restart();
    assert_eq!(house.committed("g", "t", 0).await, Some(10));
    assert_eq!(house.committed("h", "t", 0).await, Some(0));
    assert_eq!(house.committed("g", "t", 1).await, None);
    assert_eq!(house.committed("unknown", "t", 1).await, None);
}

#[tokio::test]
async fn several_queues_are_committed_together_each_with_its_result() {
    let house = House::new();
    house.send("t", 0, vec![message("a"); 3]).await.unwrap();
    let at = |topic: &str, queue, offset| QueueOffset { topic: topic.into(), queue, offset };
    let commit = |offsets| house.broker.commit(CommitCommand { group: "g".into(), offsets });
    let results = commit(vec![at("t", 0, 2), at("t", 1, 1), at("t", 9, 0), at("u", 0, 0)]).await.unwrap();
    let outcomes: Vec<String> = results.iter().map(|result| format!("{:?}", result.outcome)).collect();
    assert_eq!(outcomes[..2], ["Committed", "OutOfRange"]);
    let failed = |at: usize| match &results[at].outcome {
        CommitOutcome::Failed(error) => error.reason(),
        other => panic!("{other:?}"),
    };
    assert_eq!((failed(2), failed(3)), ("QUEUE_NOT_FOUND", "TOPIC_NOT_FOUND"));
    assert_eq!(field(commit(vec![at("t", 0, 2), at("t", 0, 3)]).await), "offsets[1]");
    assert_eq!(field(commit(vec![at("a.b", 0, 2)]).await), "offsets[0].topic");
    assert_eq!(field(commit(vec![]).await), "offsets");
    assert_eq!(field(commit((0..1025).map(|queue| at("t", queue, 0)).collect()).await), "offsets");
}

#[tokio::test]
async fn lag_is_counted_in_messages_and_time() {
    let house = House::new();
    house.send("t", 0, vec![message("a"); 5]).await.unwrap();
    house.clock.advance(Duration::from_secs(10));
    house.send("t", 0, vec![message("b"); 5]).await.unwrap();
    house.commit("g", "t", 0, 5).await;
    house.clock.advance(Duration::from_secs(3));
    let described = house.broker.describe_group("g", "").await.unwrap();
    assert_eq!(described.lag_messages, 5);
    let lag = &described.queues[0];
    assert_eq!((lag.committed, lag.min_offset, lag.max_offset, lag.lag_messages), (5, 0, 10, 5));
    let age = lag.lag_time.unwrap();
    assert!(age >= Duration::from_secs(3) && age < Duration::from_secs(10), "{age:?}");
    house.commit("g", "t", 0, 10).await;
    let described = house.broker.describe_group("g", "t").await.unwrap();
    assert_eq!((described.lag_messages, described.queues[0].lag_time), (0, None));
    assert_eq!(reason(house.broker.describe_group("g", "nowhere").await), "TOPIC_NOT_FOUND");
}

#[tokio::test]
async fn a_reset_goes_anywhere_and_can_be_tried_first() {
    let house = House::new();
    house.send("t", 0, vec![message("a"); 5]).await.unwrap();
    house.clock.advance(Duration::from_secs(10));
    house.send("t", 0, vec![message("b"); 5]).await.unwrap();
    house.commit("g", "t", 0, 8).await;
    let reset = |to, queue, dry_run| {
        house.broker.reset_offsets(ResetCommand {
            group: "g".into(),
            topic: "t".into(),
            queue,
            to: Some(to),
            dry_run,
        })
    };
    let tried = reset(ResetTo::Earliest, None, true).await.unwrap();
    assert_eq!(tried[0], ResetResult { queue: 0, from: Some(8), to: 0 });
    assert_eq!(tried[1], ResetResult { queue: 1, from: None, to: 0 });
    assert_eq!((tried.len(), house.committed("g", "t", 0).await), (4, Some(8)));
    let time = ResetTo::Time(START_MS + 5000);
    assert_eq!(reset(time, Some(0), false).await.unwrap(), [ResetResult { queue: 0, from: Some(8), to: 5 }]);
    assert_eq!(house.committed("g", "t", 0).await, Some(5));
    reset(ResetTo::Offset(2), Some(0), false).await.unwrap();
    assert_eq!(house.commit("g", "t", 0, 1).await.committed, Some(2), "commits are monotonic from there");
    reset(ResetTo::Latest, None, false).await.unwrap();
    assert_eq!(house.committed("g", "t", 0).await, Some(10));
    assert_eq!(house.committed("g", "t", 3).await, Some(0));
    assert_eq!(field(reset(ResetTo::Offset(11), Some(0), false).await), "offset");
    assert_eq!(field(reset(ResetTo::Offset(-1), Some(0), false).await), "offset");
    assert_eq!(field(reset(ResetTo::Offset(1), None, false).await), "queue_id");
    assert_eq!(reason(reset(ResetTo::Latest, Some(4), false).await), "QUEUE_NOT_FOUND");
    let unknown = ResetCommand {
        group: "nobody".into(),
        topic: "t".into(),
        to: Some(ResetTo::Latest),
        ..ResetCommand::default()
    };
    assert_eq!(reason(house.broker.reset_offsets(unknown.clone()).await), "GROUP_NOT_FOUND");
    assert_eq!(field(house.broker.reset_offsets(ResetCommand { to: None, ..unknown }).await), "to");
}

#[tokio::test]
async fn offsets_are_found_by_time_on_both_sides() {
    let house = House::new();
    for _ in 0..3 {
        house.send("t", 0, vec![message("a"); 2]).await.unwrap();
        house.clock.advance(Duration::from_secs(10));
    }
    let at = |ms, bound| {
        let queues = vec![("t".to_owned(), 0), ("t".to_owned(), 1)];
        house.broker.offsets(OffsetsCommand { queues, group: String::new(), at: Some((ms, bound)) })
    };
    let found = async |ms, bound| {
        let offsets = at(ms, bound).await.unwrap();
        assert_eq!(offsets[1].by_time, Some(0), "an empty queue");
        assert_eq!((offsets[0].min_offset, offsets[0].max_offset, offsets[0].committed), (0, 6, None));
        offsets[0].by_time.unwrap()
    };
    let first = TimeBound::FirstAtOrAfter;
    assert_eq!(found(0, first).await, 0);
    assert_eq!(found(START_MS + 5_000, first).await, 2);
    assert_eq!(found(START_MS + 25_000, first).await, 6);
    let last = TimeBound::LastAtOrBefore;
    assert_eq!(found(0, last).await, 0);
    assert_eq!(found(START_MS + 15_000, last).await, 3);
    assert_eq!(found(u64::MAX, last).await, 5);
    let queues = vec![("t".to_owned(), 9)];
    assert_eq!(
        reason(house.broker.offsets(OffsetsCommand { queues, ..OffsetsCommand::default() }).await),
        "QUEUE_NOT_FOUND"
    );
}

#[tokio::test]
async fn metrics_show_lag_by_group_and_topic() {
    let house = House::new();
    house.send("t", 0, vec![message("a"); 3]).await.unwrap();
    house.send("t", 1, vec![message("a"); 2]).await.unwrap();
    house.commit("g", "t", 0, 1).await;
    house.commit("g", "t", 1, 0).await;
    house.broker.refresh_lag().await;
    let rows = house.broker.inner.metrics.lag();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].topic.as_str(), rows[0].group.as_str(), rows[0].messages), ("t", "g", 4));
}
