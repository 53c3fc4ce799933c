//! Topics: made, changed, listed, described, deleted.

use std::time::Duration;

use holdfast::pb::v1::{
    CommitOffsetsRequest, CreateTopicRequest, DeleteTopicRequest, DescribeTopicRequest, DurabilityLevel,
    ListTopicsRequest, QueueOffset, Topic, TopicDescription, TopicSettings, TopicType, UpdateTopicRequest,
    Visibility,
};
use tonic::{Code, Status};

use crate::harness::*;

async fn try_update(client: &Client, settings: TopicSettings) -> Result<Topic, Status> {
    let request = UpdateTopicRequest { topic: "t".into(), settings: Some(settings) };
    client.admin.clone().update_topic(request).await.map(tonic::Response::into_inner)
}

async fn describe(client: &Client) -> TopicDescription {
    let request = DescribeTopicRequest { topic: "t".into() };
    client.admin.clone().describe_topic(request).await.unwrap().into_inner()
}

async fn delete(client: &Client) -> Result<(), Status> {
    client.admin.clone().delete_topic(DeleteTopicRequest { topic: "t".into() }).await.map(drop)
}

fn queues(queues: u32) -> TopicSettings {
    TopicSettings { queues: Some(queues), ..TopicSettings::default() }
}

#[tokio::test]
async fn a_topic_is_made_with_its_settings_and_defaults_for_the_rest() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let made = client.topic_with("t", TopicSettings::default()).await;
    let settings = made.settings.unwrap();
    assert_eq!(settings.queues, Some(4));
    assert_eq!(settings.durability(), DurabilityLevel::Sync, "the safe one");
    assert_eq!(settings.r#type(), TopicType::TopicMixed);
    assert_eq!(settings.retention_age.unwrap().seconds, 72 * 3600);
    assert_eq!(settings.retention_bytes, Some(0));
    let given = TopicSettings {
        queues: Some(7),
        r#type: TopicType::TopicFifo as i32,
        durability: DurabilityLevel::Async as i32,
        visibility: Visibility::Flushed as i32,
        retention_age: Some(duration(Duration::from_secs(60))),
        retention_bytes: Some(1 << 30),
    };
    let made = client.topic_with("u", given).await;
    assert_eq!(made.settings, Some(given));
    assert_eq!(made.queue_map_queues, 7);
}

#[tokio::test]
async fn a_second_topic_of_the_same_name_is_refused() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let request = CreateTopicRequest { topic: "t".into(), settings: None };
    let refusal = Refusal::of(&client.admin.clone().create_topic(request).await.unwrap_err());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::AlreadyExists, "TOPIC_EXISTS"));
}

#[tokio::test]
async fn of_many_that_make_a_topic_at_once_one_succeeds() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let makers: Vec<_> = (0..20)
        .map(|_| {
            let mut admin = client.admin.clone();
            let request = CreateTopicRequest { topic: "t".into(), settings: None };
            tokio::spawn(async move { admin.create_topic(request).await })
        })
        .collect();
    let mut made = 0;
    for maker in makers {
        match maker.await.unwrap() {
            Ok(_) => made += 1,
            Err(status) => assert_eq!(status.code(), Code::AlreadyExists),
        }
    }
    assert_eq!(made, 1);
}

#[tokio::test]
async fn settings_out_of_range_are_refused_by_name() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let short = TopicSettings { retention_age: Some(duration(Duration::from_millis(999))), ..queues(1) };
    let negative = prost_types::Duration { seconds: -5, nanos: 0 };
    let negative = TopicSettings { retention_age: Some(negative), ..queues(1) };
    let unknown = TopicSettings { r#type: 99, ..queues(1) };
    for (settings, field) in [
        (queues(0), "settings.queues"),
        (queues(4097), "settings.queues"),
        (queues(u32::MAX), "settings.queues"),
        (short, "settings.retention_age"),
        (negative, "settings.retention_age"),
        (unknown, "settings.type"),
    ] {
        let request = CreateTopicRequest { topic: "new".into(), settings: Some(settings) };
        Refusal::of_field(&client.admin.clone().create_topic(request).await.unwrap_err(), field);
        Refusal::of_field(&try_update(&client, settings).await.unwrap_err(), field);
    }
    assert_eq!(client.status().await.shards[0].topics, 1);
    client.topic("wide", 4096).await;
}

#[tokio::test]
async fn an_update_changes_what_it_names_and_leaves_the_rest() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let before = client.topic("t", 2).await;
    let change = TopicSettings { durability: DurabilityLevel::Async as i32, ..TopicSettings::default() };
    let after = try_update(&client, change).await.unwrap();
    assert_eq!(after.topic_id, before.topic_id, "the same life of the topic");
    let expected = TopicSettings { durability: DurabilityLevel::Async as i32, ..before.settings.unwrap() };
    assert_eq!(after.settings, Some(expected));
    assert_eq!(describe(&client).await.topic, Some(after));
    let nothing = UpdateTopicRequest { topic: "nothing".into(), settings: None };
    let refusal = Refusal::of(&client.admin.clone().update_topic(nothing).await.unwrap_err());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::NotFound, "TOPIC_NOT_FOUND"));
}

#[tokio::test]
async fn a_description_tells_bounds_size_times_groups_and_the_promise() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    let first = client.send("t", 1, &["hello"]).await;
    let last = client.send("t", 1, &["world"; 3]).await;
    let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 1, offset: 2 }];
    let request = CommitOffsetsRequest { group: "readers".into(), offsets };
    client.broker.clone().commit_offsets(request).await.unwrap();
    let description = describe(&client).await;
    let (empty, full) = (&description.queues[0], &description.queues[1]);
    assert_eq!((empty.queue_id, empty.min_offset, empty.max_offset, empty.bytes), (0, 0, 0, 0));
    assert!(empty.oldest.is_none() && empty.newest.is_none());
    assert_eq!((full.queue_id, full.min_offset, full.max_offset), (1, 0, 4));
    assert!(full.bytes > 20);
    assert_eq!((full.oldest, full.newest), (first.store_timestamp, last.store_timestamp));
    assert_eq!(description.groups, ["readers"]);
    assert!(!description.promise.is_empty());
}

#[tokio::test]
async fn a_list_comes_by_name_in_pages_and_by_prefix() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let mut names: Vec<String> = (0..25).map(|n| format!("a-{n:02}")).collect();
    for name in names.iter().rev() {
        client.topic(name, 1).await;
    }
    client.topic("b", 1).await;
    let list = async |page_size, prefix: &str| {
        let mut request = ListTopicsRequest { page_size, prefix: prefix.into(), ..Default::default() };
        let (mut found, mut pages) = (Vec::new(), 0);
        loop {
            let page = client.admin.clone().list_topics(request.clone()).await.unwrap().into_inner();
            assert!(page_size == 0 || page.topics.len() <= page_size as usize);
            found.extend(page.topics.into_iter().map(|topic| topic.topic));
            pages += 1;
            if page.next_page_token.is_empty() {
                return (found, pages);
            }
            request.page_token = page.next_page_token;
        }
    };
    assert_eq!(list(10, "a-").await, (names.clone(), 3));
    names.push("b".into());
    assert_eq!(list(0, "").await, (names, 1));
    assert_eq!(list(10, "nothing").await.0, [""; 0]);
    let request = ListTopicsRequest { page_size: 1001, ..Default::default() };
    Refusal::of_field(&client.admin.clone().list_topics(request).await.unwrap_err(), "page_size");
    let request = ListTopicsRequest { page_token: "no token of ours !".into(), ..Default::default() };
    match client.admin.clone().list_topics(request).await {
        Ok(_) => {}
        Err(status) => drop(Refusal::of_field(&status, "page_token")),
    }
}

#[tokio::test]
async fn queues_with_unread_messages_cannot_be_taken_away_and_empty_ones_can() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 8).await;
    for queue in 0..8 {
        client.send_messages("t", queue, vec![message("waiting"); 1000]).await;
    }
    let commit = async |queue: u32, offset| {
        let offsets = vec![QueueOffset { topic: "t".into(), queue_id: queue, offset }];
        let request = CommitOffsetsRequest { group: "g".into(), offsets };
        client.broker.clone().commit_offsets(request).await.unwrap();
    };
    commit(4, 999).await;
    for queue in 5..8 {
        commit(queue, 1000).await;
    }
    let refusal = Refusal::of(&try_update(&client, queues(4)).await.unwrap_err());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::FailedPrecondition, "UNREAD_MESSAGES"));
    assert_eq!(describe(&client).await.queues.len(), 8, "refused means unchanged");
    for queue in 0..8 {
        assert_eq!(client.all("t", queue).await.len(), 1000);
    }
    commit(4, 1000).await;
    let topic = try_update(&client, queues(4)).await.unwrap();
    assert_eq!(topic.settings.unwrap().queues, Some(4));
    let refusal = Refusal::of(&client.try_pull(pull_request("t", 4, 0)).await.unwrap_err());
    assert_eq!(refusal.reason, "QUEUE_NOT_FOUND");
}

#[tokio::test]
async fn a_topic_that_shrinks_gets_a_new_queue_map() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let before = client.topic("t", 8).await;
    let after = try_update(&client, queues(2)).await.unwrap();
    assert!(after.queue_map_version > before.queue_map_version);
    assert_eq!(after.queue_map_queues, 2);
    for n in 0..20 {
        let request = send_request("t", vec![grouped("x", &format!("group {n}"))]);
        assert!(client.try_send(request).await.unwrap().queue_id < 2);
    }
    let grown = try_update(&client, queues(8)).await.unwrap();
    assert_eq!(grown.queue_map_version, after.queue_map_version);
    for queue in 2..8 {
        assert_eq!(client.offsets("t", queue, "").await.max_offset, 0, "a new queue begins empty");
    }
}

#[tokio::test]
async fn a_deleted_topic_is_gone_and_a_new_one_of_its_name_is_another() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    let old = client.topic("t", 2).await;
    client.send("t", 0, &["old"]).await;
    delete(&client).await.unwrap();
    assert_eq!(delete(&client).await.unwrap_err().code(), Code::NotFound);
    let request = DescribeTopicRequest { topic: "t".into() };
    let refusal = Refusal::of(&client.admin.clone().describe_topic(request).await.unwrap_err());
    assert_eq!(refusal.reason, "TOPIC_NOT_FOUND");
    let new = client.topic("t", 2).await;
    assert_ne!(new.topic_id, old.topic_id);
    assert!(client.all("t", 0).await.is_empty());
    client.send("t", 0, &["new"]).await;
    broker.kill();
    broker.restart().await;
    let client = broker.client().await;
    assert_eq!(bodies(&client.all("t", 0).await), ["new"]);
    assert_eq!(describe(&client).await.topic.unwrap().topic_id, new.topic_id);
}

#[tokio::test]
async fn ten_thousand_topics_need_no_files_of_their_own() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("first", 8).await;
    client.send("first", 0, &["x"]).await;
    let before = files_below(&broker.data_dir()).unwrap().len();
    let makers: Vec<_> = (0..20)
        .map(|part| {
            let client = client.clone();
            tokio::spawn(async move {
                for n in 0..500 {
                    let topic = format!("topic-{part}-{n}");
                    client.topic(&topic, 8).await;
                    client.send(&topic, 7, &["x"]).await;
                }
            })
        })
        .collect();
    for maker in makers {
        maker.await.unwrap();
    }
    let shard = &client.status().await.shards[0];
    assert_eq!((shard.topics, shard.queues), (10_001, 80_008));
    let after = files_below(&broker.data_dir()).unwrap().len();
    assert!(after < before + 50, "{before} files became {after}");
}
