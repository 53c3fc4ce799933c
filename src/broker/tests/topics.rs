//! Topics and the node.

use super::*;
use crate::model::{DurabilityLevel, Visibility};

fn queues(queues: u32) -> TopicChange {
    TopicChange { queues: Some(queues), ..TopicChange::default() }
}

#[tokio::test]
async fn topics_are_made_changed_listed_and_deleted() {
    let mut house = House::new();
    let made = house.broker.create_topic("t", queues(3)).await.unwrap();
    assert_eq!((made.settings.queues, made.map_version, made.map_queues), (3, 1, 3));
    assert_eq!(reason(house.broker.create_topic("t", queues(3)).await), "TOPIC_EXISTS");
    let change = TopicChange {
        durability: Some(DurabilityLevel::Async),
        visibility: Some(Visibility::Flushed),
        retention_age: Some(Duration::ZERO),
        retention_bytes: Some(1 << 30),
        ..TopicChange::default()
    };
    let changed = house.broker.update_topic("t", change).await.unwrap();
    assert_eq!(changed.settings.durability, DurabilityLevel::Async);
    assert_eq!((changed.settings.retention.age, changed.settings.retention.bytes), (None, Some(1 << 30)));
    assert_eq!((changed.id, changed.settings.queues), (made.id, 3));
    for name in ["b", "a"] {
        house.broker.create_topic(name, TopicChange::default()).await.unwrap();
    }
    house.restart();
    let broker = &house.broker;
    let page = broker.list_topics(ListCommand { page_size: 2, ..ListCommand::default() }).await.unwrap();
    assert_eq!((page.items[0].name.as_str(), page.next.as_str()), ("a", "b"));
    let page_token = page.next;
    let page = broker.list_topics(ListCommand { page_token, ..ListCommand::default() }).await.unwrap();
    assert_eq!(page.items, [changed]);
    broker.delete_topic("t").await.unwrap();
    for result in [broker.delete_topic("t").await, broker.describe_topic("t").await.map(drop)] {
        assert_eq!(reason(result), "TOPIC_NOT_FOUND");
    }
    assert_eq!(reason(broker.update_topic("t", queues(3)).await), "TOPIC_NOT_FOUND");
    for bad in ["a.b", "a/b", "../../x", "a b", "a%2Fb é", "🦀", "", &"a".repeat(128), "TBW102"] {
        assert_eq!(field(broker.create_topic(bad, TopicChange::default()).await), "topic", "{bad:?}");
    }
    assert_eq!(field(broker.create_topic("c", queues(0)).await), "settings.queues");
    assert_eq!(field(broker.create_topic("c", queues(4097)).await), "settings.queues");
    let retention_age = Some(Duration::from_millis(1));
    let short = TopicChange { retention_age, ..TopicChange::default() };
    assert_eq!(field(broker.create_topic("c", short).await), "settings.retention_age");
}

#[tokio::test]
async fn queues_that_hold_unread_messages_are_not_taken_away() {
    let house = House::new();
    house.broker.create_topic("t", queues(4)).await.unwrap();
    house.send("t", 3, vec![message("a"), message("b")]).await.unwrap();
    let error = house.broker.update_topic("t", queues(2)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "topic `t` keeps its 4 queues: queue 3 holds 2 messages and no group has read the topic; read them, or let retention remove them"
    );
    house.commit("g", "t", 3, 1).await;
    house.commit("h", "t", 3, 2).await;
    let error = house.broker.update_topic("t", queues(2)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "topic `t` keeps its 4 queues: queue 3 holds 1 messages that group `g` has not read; let it read them, reset its offsets, or delete it"
    );
    assert!(error.metadata().contains(&("queue_id", "3".to_owned())));
    house.commit("g", "t", 3, 2).await;
    house.commit("i", "t", 0, 0).await;
    assert_eq!(
        reason(house.broker.update_topic("t", queues(2)).await),
        "UNREAD_MESSAGES",
        "a group that reads the topic elsewhere"
    );
    house.broker.delete_group("i").await.unwrap();

    let held = tokio::spawn(house.broker.pull(PullCommand { queue: 3, ..waiting("t", 2) }));
    house.held(1).await;
    let shrunk = house.broker.update_topic("t", queues(2)).await.unwrap();
    assert_eq!((shrunk.settings.queues, shrunk.map_version, shrunk.map_queues), (2, 2, 2));
    assert_eq!(reason(held.await.unwrap()), "QUEUE_NOT_FOUND");
    assert_eq!(reason(house.send("t", 3, vec![message("a")]).await), "QUEUE_NOT_FOUND");
    let grown = house.broker.update_topic("t", queues(6)).await.unwrap();
    assert_eq!((grown.settings.queues, grown.map_version, grown.map_queues), (6, 2, 2));
}

#[tokio::test]
async fn a_description_shows_queues_readers_and_the_promise() {
    let house = House::new();
    house.send("t", 1, vec![message("a")]).await.unwrap();
    house.clock.advance(Duration::from_secs(5));
    house.send("t", 1, vec![message("b")]).await.unwrap();
    house.commit("g", "t", 1, 1).await;
    house.broker.create_group("idle", GroupChange::default()).await.unwrap();
    let described = house.broker.describe_topic("t").await.unwrap();
    assert_eq!(described.queues.len(), 4);
    let queue = described.queues[1];
    assert_eq!((queue.queue, queue.min_offset, queue.max_offset), (1, 0, 2));
    assert!(queue.bytes > 0);
    let (oldest, newest) = (queue.oldest_ms.unwrap(), queue.newest_ms.unwrap());
    assert!(oldest >= START_MS && newest >= oldest + 5000);
    assert_eq!((described.queues[0].oldest_ms, described.queues[0].bytes), (None, 0));
    assert_eq!(described.groups.iter().map(|group| group.as_str()).collect::<Vec<_>>(), ["g"]);
    assert!(described.promise.contains("survives a crash of the broker and a power cut"));
}

#[tokio::test]
async fn the_node_tells_its_state() {
    let house = House::new();
    house.send("t", 0, vec![message("a")]).await.unwrap();
    let status = house.broker.node_status();
    let shard = &status.shards[0];
    assert_eq!((shard.shard.as_str(), shard.topics, shard.queues), ("shard-0", 1, 4));
    assert_eq!((status.started_ms, status.held_pulls, &shard.state), (START_MS, 0, &State::Writable));
}
