//! Sending.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::{
    model::{DurabilityLevel, TopicType},
    store::disk::{Fault, Operation},
};

fn to(topic: &str, messages: Vec<Bytes>) -> SendCommand {
    SendCommand { topic: topic.into(), messages, ..SendCommand::default() }
}

#[tokio::test]
async fn a_batch_lands_in_one_queue_and_comes_back_as_it_was() {
    let house = House::new();
    let sent = house
        .broker
        .send(to("t", vec![message("a"), with("b", |s| s.message_id = "mine".into()), message("c")]))
        .await
        .unwrap();
    assert_eq!((sent.first_offset, sent.ids.len(), sent.reached), (0, 3, Reached::Disk));
    let ids: Vec<&str> = sent.ids.iter().collect();
    assert_eq!(ids[1], "mine");
    assert_eq!(ids[0].len(), 36);

    let pulled = house.broker.pull(PullCommand { queue: sent.queue, ..pull("t", 0) }).await.unwrap();
    assert_eq!(bodies(&pulled), ["a", "b", "c"]);
    assert_eq!((pulled.next_offset, pulled.min_offset, pulled.max_offset), (3, 0, 3));
    let PullOutcome::Found(stored) = &pulled.outcome else { unreachable!() };
    for (at, stored) in stored.iter().enumerate() {
        let system = Message::decode(stored.clone()).unwrap().system_properties.unwrap();
        assert_eq!(system.message_id, ids[at]);
        assert_eq!(system.queue_offset, Some(at as i64));
        assert_eq!((system.queue_id, system.store_host.as_str()), (sent.queue as i32, "shard-0"));
        let time = system.store_timestamp.unwrap();
        assert_eq!(time.seconds as u64 * 1000 + time.nanos as u64 / 1_000_000, sent.store_ms);
        assert!(system.log_position.unwrap() > 0);
    }
}

#[tokio::test]
async fn a_forged_place_is_replaced_and_a_pulled_message_can_be_sent_again() {
    let house = House::new();
    let forged = with("x", |system| {
        system.queue_offset = Some(77);
        system.queue_id = 3;
        system.store_host = "elsewhere".into();
    });
    house.send("t", 0, vec![forged]).await.unwrap();
    let pulled = house.broker.pull(pull("t", 0)).await.unwrap();
    let PullOutcome::Found(stored) = pulled.outcome else { panic!() };
    let sent = house.send("t", 0, stored).await.unwrap();
    assert_eq!(sent.first_offset, 1);
    let again = house.broker.pull(pull("t", 1)).await.unwrap();
    let PullOutcome::Found(stored) = again.outcome else { panic!() };
    let system = Message::decode(stored[0].clone()).unwrap().system_properties.unwrap();
    assert_eq!((system.queue_offset, system.queue_id, system.store_host.as_str()), (Some(1), 0, "shard-0"));
}

#[tokio::test]
async fn one_bad_message_refuses_the_batch_and_makes_no_topic() {
    let house = House::new();
    let empty = Bytes::new();
    assert_eq!(
        field(house.broker.send(to("t", vec![message("a"), empty.clone(), message("c")])).await),
        "messages[1].body"
    );
    assert_eq!(reason(house.broker.send(to("t", vec![empty])).await), "BODY_EMPTY");
    let bad = tagged("a", "x|y");
    assert_eq!(
        field(house.broker.send(to("t", vec![message("a"), bad])).await),
        "messages[1].system_properties.tag"
    );
    assert_eq!(field(house.broker.send(to("t", vec![])).await), "messages");
    assert_eq!(reason(house.broker.send(to("t", vec![message("a"); 1025])).await), "BATCH_TOO_LARGE");
    let large = message(&"x".repeat(4 << 20));
    assert_eq!(reason(house.broker.send(to("t", vec![large; 4])).await), "BATCH_TOO_LARGE");
    let error = house.broker.send(to("t", vec![message(&"x".repeat((4 << 20) + 1))])).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "messages[0].body: has 4194305 bytes, over the limit of 4194304 (`send.body_max`); split the message or keep its content elsewhere"
    );
    assert!(house.broker.list_topics(ListCommand::default()).await.unwrap().items.is_empty());
}

#[tokio::test]
async fn topics_come_by_themselves_only_where_that_is_allowed() {
    let house = House::with(|config| config.topics.auto_create = false, Limits::default());
    assert_eq!(reason(house.broker.send(to("t", vec![message("a")])).await), "TOPIC_NOT_FOUND");
    assert_eq!(field(house.broker.send(to("a.b", vec![message("a")])).await), "topic");
    let house = House::with(|config| config.topics.max = 1, Limits::default());
    house.broker.send(to("t", vec![message("a")])).await.unwrap();
    assert_eq!(reason(house.broker.send(to("u", vec![message("a")])).await), "LIMIT_REACHED");
}

#[tokio::test]
async fn messages_without_a_group_are_spread_and_an_explicit_queue_is_kept() {
    let house = House::new();
    let mut queues = HashSet::new();
    for _ in 0..4 {
        queues.insert(house.broker.send(to("t", vec![message("a")])).await.unwrap().queue);
    }
    assert_eq!(queues.len(), 4, "in turn");
    let sent = house.send("t", 3, vec![grouped("a", "g")]).await.unwrap();
    assert_eq!((sent.queue, sent.first_offset), (3, 1));
    let error = house.send("t", 4, vec![message("a")]).await.unwrap_err();
    assert_eq!(error.to_string(), "topic `t` has no queue 4; it has queues 0 to 3");
    assert_eq!(error.metadata()[1], ("queue_id", "4".to_owned()));
}

#[tokio::test]
async fn a_message_group_stays_in_its_queue_when_the_topic_grows() {
    let house = House::new();
    let mut queues = HashMap::new();
    for n in 0..20 {
        let group = format!("g{n}");
        let sent =
            house.broker.send(to("t", vec![grouped("a", &group), grouped("b", &group)])).await.unwrap();
        queues.insert(group, sent.queue);
    }
    assert!(queues.values().collect::<HashSet<_>>().len() > 1);
    let grown = house
        .broker
        .update_topic("t", TopicChange { queues: Some(16), ..TopicChange::default() })
        .await
        .unwrap();
    assert_eq!((grown.map_version, grown.map_queues, grown.settings.queues), (1, 4, 16));
    for (group, queue) in queues {
        let sent = house.broker.send(to("t", vec![grouped("c", &group)])).await.unwrap();
        assert_eq!(sent.queue, queue);
    }
    let two = vec![grouped("a", "x"), grouped("b", "y")];
    assert_eq!(field(house.broker.send(to("t", two)).await), "messages[1].system_properties.message_group");
    let mixed = vec![message("a"), grouped("b", "y")];
    assert_eq!(field(house.broker.send(to("t", mixed)).await), "messages[1].system_properties.message_group");
}

#[tokio::test]
async fn a_stale_queue_map_is_refused_with_the_current_one() {
    let house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    let shrunk = house
        .broker
        .update_topic("t", TopicChange { queues: Some(2), ..TopicChange::default() })
        .await
        .unwrap();
    assert_eq!((shrunk.map_version, shrunk.map_queues), (2, 2));
    let old = SendCommand { map_version: Some(1), queue: Some(0), ..to("t", vec![message("a")]) };
    let error = house.broker.send(old.clone()).await.unwrap_err();
    assert_eq!(error.reason(), "QUEUE_MAP_STALE");
    assert!(error.metadata().contains(&("queue_map_version", "2".to_owned())));
    house.broker.send(SendCommand { map_version: Some(2), ..old }).await.unwrap();
}

#[tokio::test]
async fn a_topic_takes_only_messages_of_its_type() {
    let house = House::new();
    for (name, kind) in [("normal", TopicType::Normal), ("fifo", TopicType::Fifo)] {
        let change = TopicChange { kind: Some(kind), ..TopicChange::default() };
        house.broker.create_topic(name, change).await.unwrap();
    }
    assert_eq!(
        reason(house.broker.send(to("normal", vec![grouped("a", "g")])).await),
        "MESSAGE_TYPE_MISMATCH"
    );
    assert_eq!(reason(house.broker.send(to("fifo", vec![message("a")])).await), "MESSAGE_TYPE_MISMATCH");
    house.broker.send(to("normal", vec![message("a")])).await.unwrap();
    house.broker.send(to("fifo", vec![grouped("a", "g")])).await.unwrap();
    let says_fifo = with("a", |system| system.message_type = 2);
    assert_eq!(
        field(house.broker.send(to("mixed", vec![says_fifo])).await),
        "messages[0].system_properties.message_type"
    );
    let says_normal = with("a", |system| {
        system.message_type = 1;
        system.message_group = Some("g".into());
    });
    assert_eq!(reason(house.broker.send(to("mixed", vec![says_normal])).await), "MESSAGE_TYPE_MISMATCH");
}

#[tokio::test]
async fn sends_keep_the_order_of_calls_with_many_in_flight() {
    let house = House::new();
    house.send("t", 0, vec![message("first")]).await.unwrap();
    let tickets: Vec<SendTicket> = (0..200)
        .map(|n| {
            let command = SendCommand { queue: Some(0), ..to("t", vec![message(&n.to_string())]) };
            house.broker.begin_send(command).unwrap()
        })
        .collect();
    for (n, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(ticket.await.unwrap().first_offset, n as u64 + 1);
    }
    let pulled = house.broker.pull(PullCommand { max_messages: 1000, ..pull("t", 1) }).await.unwrap();
    assert_eq!(bodies(&pulled), (0..200).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_async_topic_says_what_its_ok_is_worth() {
    let house = House::new();
    let change = TopicChange { durability: Some(DurabilityLevel::Async), ..TopicChange::default() };
    house.broker.create_topic("t", change).await.unwrap();
    let sent = house.send("t", 0, vec![message("a")]).await.unwrap();
    assert_eq!(sent.reached, Reached::Memory);
    let promise = house.broker.describe_topic("t").await.unwrap().promise;
    assert!(promise.contains("power cut may take"), "{promise}");
}

#[tokio::test]
async fn a_closed_broker_says_that_it_stops() {
    let house = House::new();
    house.send("t", 0, vec![message("a")]).await.unwrap();
    house.close();
    let error = house.send("t", 0, vec![message("a")]).await.unwrap_err();
    assert_eq!(error.reason(), "STOPPING");
    assert!(error.retry_after().is_some());
}

#[tokio::test]
async fn a_full_disk_refuses_sends_but_can_be_read_empty() {
    let mut house = House::new();
    house.send("t", 0, vec![message("a"), message("b")]).await.unwrap();
    house.options.disk_floor_bytes = u64::MAX;
    house.restart();
    while house.broker.node_status().shards[0].state == State::Writable {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let error = house.send("t", 0, vec![message("c")]).await.unwrap_err();
    assert_eq!(error.reason(), "DISK_FULL");
    assert!(error.retry_after().is_some() && error.to_string().contains("floor"), "{error}");
    assert_eq!(reason(house.broker.create_topic("u", TopicChange::default()).await), "DISK_FULL");
    assert_eq!(bodies(&house.broker.pull(pull("t", 0)).await.unwrap()), ["a", "b"]);
    assert_eq!(house.commit("g", "t", 0, 2).await.outcome, CommitOutcome::Committed);
    house.broker.delete_topic("t").await.unwrap();
}

#[tokio::test]
async fn too_much_at_once_is_refused_with_a_delay() {
    let mut house = House::new();
    house.broker.create_topic("t", TopicChange::default()).await.unwrap();
    house.options.inbox_bytes = 1 << 20;
    house.restart();
    let body = message(&"x".repeat(100_000));
    let (mut tickets, mut busy) = (Vec::new(), None);
    for _ in 0..10_000 {
        match house.broker.begin_send(to("t", vec![body.clone()])) {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => {
                busy = Some(error);
                break;
            }
        }
    }
    let busy = busy.unwrap();
    assert_eq!(busy.reason(), "BUSY");
    assert!(busy.retry_after().is_some_and(|delay| !delay.is_zero()));
    for ticket in tickets {
        ticket.await.unwrap();
    }
    house.send("t", 0, vec![body]).await.unwrap();
}

#[tokio::test]
async fn a_failed_sync_refuses_writes_for_good_and_serves_what_was_durable() {
    let house = House::new();
    house.send("t", 0, vec![message("durable")]).await.unwrap();
    house.commit("g", "t", 0, 1).await;
    let held = tokio::spawn(house.broker.pull(waiting("t", 1)));
    house.held(1).await;
    house.disk.inject(Fault::device(Operation::Sync).on(".log"));
    let error = house.send("t", 0, vec![message("lost")]).await.unwrap_err();
    assert_eq!(error.reason(), "FENCED");
    assert_eq!(reason(house.send("t", 0, vec![message("refused")]).await), "FENCED");
    let commit = house.commit("g", "t", 0, 0).await;
    assert!(matches!(commit.outcome, CommitOutcome::Stale | CommitOutcome::Failed(_)), "{commit:?}");
    let pulled = house.broker.pull(pull("t", 0)).await.unwrap();
    assert_eq!((bodies(&pulled), pulled.max_offset), (vec!["durable".to_owned()], 1));
    assert_eq!(house.committed("g", "t", 0).await, Some(1));
    assert!(matches!(house.broker.node_status().shards[0].state, State::Fenced(_)));
    assert!(!held.is_finished(), "nothing that could be taken back was shown");
    house.broker.stop();
    assert_eq!(reason(held.await.unwrap()), "STOPPING");
}
