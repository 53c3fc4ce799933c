//! One rule for names at every door.

use holdfast::pb::v1::*;
use tonic::{Code, Status};

use crate::harness::*;

/// Calls every RPC that takes a topic name.
async fn through_every_topic_door(client: &Client, topic: &str) -> Vec<(&'static str, Result<(), Status>)> {
    let name = || topic.to_string();
    let (mut broker, mut admin) = (client.broker.clone(), client.admin.clone());
    let queues = vec![QueueRef { topic: name(), queue_id: 0 }];
    let by = Some(query_messages_request::By::Key("k".into()));
    let to = Some(reset_offsets_request::To::Earliest(true));
    vec![
        ("Send", broker.send(send_request(topic, vec![message("x")])).await.map(drop)),
        ("Pull", broker.pull(pull_request(topic, 0, 0)).await.map(drop)),
        (
            "GetOffsets",
            broker.get_offsets(GetOffsetsRequest { queues, ..Default::default() }).await.map(drop),
        ),
        (
            "QueryMessages",
            broker
                .query_messages(QueryMessagesRequest { topic: name(), by, ..Default::default() })
                .await
                .map(drop),
        ),
        (
            "UpdateTopic",
            admin.update_topic(UpdateTopicRequest { topic: name(), settings: None }).await.map(drop),
        ),
        ("DescribeTopic", admin.describe_topic(DescribeTopicRequest { topic: name() }).await.map(drop)),
        (
            "ResetOffsets",
            admin
                .reset_offsets(ResetOffsetsRequest {
                    group: "g".into(),
                    topic: name(),
                    to,
                    ..Default::default()
                })
                .await
                .map(drop),
        ),
        ("DeleteTopic", admin.delete_topic(DeleteTopicRequest { topic: name() }).await.map(drop)),
        (
            "CreateTopic",
            admin.create_topic(CreateTopicRequest { topic: name(), settings: None }).await.map(drop),
        ),
    ]
}

/// Calls every RPC that takes a group name.
async fn through_every_group_door(client: &Client, group: &str) -> Vec<(&'static str, Result<(), Status>)> {
    let name = || group.to_string();
    let (mut broker, mut admin) = (client.broker.clone(), client.admin.clone());
    let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 0, offset: 0 }];
    let to = Some(reset_offsets_request::To::Earliest(true));
    vec![
        (
            "CommitOffsets",
            broker.commit_offsets(CommitOffsetsRequest { group: name(), offsets }).await.map(drop),
        ),
        (
            "CreateGroup",
            admin.create_group(CreateGroupRequest { group: name(), settings: None }).await.map(drop),
        ),
        (
            "UpdateGroup",
            admin.update_group(UpdateGroupRequest { group: name(), settings: None }).await.map(drop),
        ),
        (
            "DescribeGroup",
            admin
                .describe_group(DescribeGroupRequest { group: name(), topic: String::new() })
                .await
                .map(drop),
        ),
        (
            "ResetOffsets",
            admin
                .reset_offsets(ResetOffsetsRequest {
                    group: name(),
                    topic: "t".into(),
                    to,
                    ..Default::default()
                })
                .await
                .map(drop),
        ),
        ("DeleteGroup", admin.delete_group(DeleteGroupRequest { group: name() }).await.map(drop)),
    ]
}

#[tokio::test]
async fn a_bad_topic_name_is_refused_at_every_door_with_one_code_and_leaves_no_trace() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.group("g").await;
    let files = files_below(broker.data_dir().parent().unwrap()).unwrap().len();
    let long = [128, 255, 256].map(|bytes| "t".repeat(bytes));
    let bad = ["", "a.b", "a/b", "../../x", "a b", "é", "🦀", "a\0b", "TBW102"];
    let characters = "é".repeat(127);
    for name in bad.iter().copied().chain(long.iter().map(String::as_str)).chain([characters.as_str()]) {
        for (door, answer) in through_every_topic_door(&client, name).await {
            let Err(status) = answer else { panic!("{door} took {name:?}") };
            assert_eq!(status.code(), Code::InvalidArgument, "{door} with {name:?}: {status:?}");
            let refusal = Refusal::of(&status);
            assert!(refusal.fields.iter().any(|field| field.ends_with("topic")), "{door}: {refusal:?}");
            if name.len() > 127 {
                assert!(refusal.text.contains("127"), "{door} does not name the limit: {refusal:?}");
            }
        }
    }
    assert_eq!(client.status().await.shards[0].topics, 0);
    assert_eq!(files_below(broker.data_dir().parent().unwrap()).unwrap().len(), files);
}

#[tokio::test]
async fn a_topic_name_of_127_bytes_is_good_at_every_door() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.group("g").await;
    for name in ["t".repeat(127), "%DLQ%a|b_c-D9".to_string(), "a%2Fb".to_string()] {
        for (door, answer) in through_every_topic_door(&client, &name).await {
            // A send to no queue by name makes the topic; the last two delete it and make it again.
            assert!(answer.is_ok(), "{door} refused {name}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn a_bad_group_name_is_refused_at_every_door_and_no_group_appears() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let long = [121, 256].map(|bytes| "g".repeat(bytes));
    for name in ["", "bad group!", "a.b", "é"].into_iter().chain(long.iter().map(String::as_str)) {
        for (door, answer) in through_every_group_door(&client, name).await {
            let Err(status) = answer else { panic!("{door} took {name:?}") };
            assert_eq!(status.code(), Code::InvalidArgument, "{door} with {name:?}: {status:?}");
            let refusal = Refusal::of(&status);
            assert!(refusal.fields.iter().any(|field| field.ends_with("group")), "{door}: {refusal:?}");
        }
        if !name.is_empty() {
            let request = PullRequest { group: name.into(), ..pull_request("t", 0, 0) };
            Refusal::of_field(&client.try_pull(request).await.unwrap_err(), "group");
            let queues = vec![QueueRef { topic: "t".into(), queue_id: 0 }];
            let request = GetOffsetsRequest { queues, group: name.into(), ..Default::default() };
            Refusal::of_field(&client.broker.clone().get_offsets(request).await.unwrap_err(), "group");
        }
    }
    assert_eq!(client.status().await.shards[0].groups, 0);
}

#[tokio::test]
async fn a_group_name_of_120_bytes_is_good_at_every_door() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let name = "g".repeat(120);
    for (door, answer) in through_every_group_door(&client, &name).await {
        // The commit comes first and makes the group by use, so making it once more is the one refusal.
        match door {
            "CreateGroup" => assert_eq!(answer.unwrap_err().code(), Code::AlreadyExists),
            _ => assert!(answer.is_ok(), "{door}: {answer:?}"),
        }
    }
}
