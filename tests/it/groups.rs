//! Consumer groups: made, changed, listed, described with their lag, deleted.

use holdfast::pb::v1::{
    CommitOffsetsRequest, CreateGroupRequest, DeleteGroupRequest, DescribeGroupRequest, GroupDescription,
    GroupSettings, ListGroupsRequest, QueueOffset, StartFrom, UpdateGroupRequest,
};
use tonic::Code;

use crate::harness::*;

async fn commit(client: &Client, topic: &str, queue: u32, offset: i64) {
    let offsets = vec![QueueOffset { topic: topic.into(), queue_id: queue, offset }];
    let request = CommitOffsetsRequest { group: "g".into(), offsets };
    client.broker.clone().commit_offsets(request).await.unwrap();
}

async fn describe(client: &Client, topic: &str) -> GroupDescription {
    let request = DescribeGroupRequest { group: "g".into(), topic: topic.into() };
    client.admin.clone().describe_group(request).await.unwrap().into_inner()
}

#[tokio::test]
async fn a_group_is_made_changed_and_deleted_with_its_progress() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    let mut admin = client.admin.clone();
    client.topic("t", 1).await;
    client.send("t", 0, &["a", "b"]).await;
    let latest = Some(GroupSettings { start_from: StartFrom::Latest as i32 });
    let create = CreateGroupRequest { group: "g".into(), settings: latest };
    let made = admin.create_group(create.clone()).await.unwrap().into_inner();
    assert_eq!(made.settings, latest);
    let refusal = Refusal::of(&admin.create_group(create.clone()).await.unwrap_err());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::AlreadyExists, "GROUP_EXISTS"));
    let earliest = Some(GroupSettings { start_from: StartFrom::Earliest as i32 });
    let update = UpdateGroupRequest { group: "g".into(), settings: earliest };
    let changed = admin.update_group(update).await.unwrap().into_inner();
    assert_eq!((changed.group_id, changed.settings), (made.group_id, earliest));
    commit(&client, "t", 0, 2).await;
    admin.delete_group(DeleteGroupRequest { group: "g".into() }).await.unwrap();
    let gone = admin.delete_group(DeleteGroupRequest { group: "g".into() }).await.unwrap_err();
    assert_eq!(Refusal::of(&gone).reason, "GROUP_NOT_FOUND");
    let again = admin.create_group(create).await.unwrap().into_inner();
    assert_ne!(again.group_id, made.group_id);
    assert_eq!(client.offsets("t", 0, "g").await.committed, None);
    broker.kill();
    broker.restart().await;
    let client = broker.client().await;
    assert_eq!(client.offsets("t", 0, "g").await.committed, None);
    assert_eq!(describe(&client, "").await.group, Some(again));
}

#[tokio::test]
async fn lag_is_told_per_queue_in_messages_and_time_for_groups_that_nobody_serves() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    client.topic("u", 1).await;
    client.send("t", 0, &["x"; 10]).await;
    client.send("t", 1, &["x"; 5]).await;
    client.send("u", 0, &["x"; 3]).await;
    commit(&client, "t", 0, 4).await;
    commit(&client, "t", 1, 5).await;
    commit(&client, "u", 0, 0).await;
    let all = describe(&client, "").await;
    let seen: Vec<_> = all
        .queues
        .iter()
        .map(|lag| (lag.topic.as_str(), lag.queue_id, lag.committed, lag.max_offset, lag.lag_messages))
        .collect();
    assert_eq!(seen, [("t", 0, 4, 10, 6), ("t", 1, 5, 5, 0), ("u", 0, 0, 3, 3)]);
    assert_eq!(all.lag_messages, 9);
    assert!(all.queues[0].lag_time.is_some());
    assert!(all.queues[1].lag_time.is_none(), "nothing left, no age");
    let one = describe(&client, "u").await;
    assert_eq!((one.queues.len(), one.lag_messages), (1, 3));
    // Time of the lag grows while nobody consumes.
    let age = |description: &GroupDescription| {
        let time = description.queues[0].lag_time.unwrap();
        (time.seconds, time.nanos)
    };
    let before = age(&all);
    eventually("the lag grows older", async || age(&describe(&client, "t").await) > before).await;
}

#[tokio::test]
async fn a_commit_makes_the_group_unless_that_is_turned_off() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    commit(&client, "t", 0, 0).await;
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(0));
    assert_eq!(client.status().await.shards[0].groups, 1);

    let strict = Broker::start_with("standalone", &[("groups.auto_create", "false")]).await;
    let client = strict.client().await;
    client.topic("t", 1).await;
    let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 0, offset: 0 }];
    let request = CommitOffsetsRequest { group: "g".into(), offsets };
    let reason = match client.broker.clone().commit_offsets(request).await {
        Ok(answer) => answer.into_inner().results[0].error.clone().unwrap().reason,
        Err(status) => Refusal::of(&status).reason,
    };
    assert_eq!(reason, "GROUP_NOT_FOUND");
    assert_eq!(client.status().await.shards[0].groups, 0);
}

#[tokio::test]
async fn reading_about_a_group_does_not_make_it() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let request = DescribeGroupRequest { group: "g".into(), topic: String::new() };
    let refusal = Refusal::of(&client.admin.clone().describe_group(request).await.unwrap_err());
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::NotFound, "GROUP_NOT_FOUND"));
    assert_eq!(client.offsets("t", 0, "g").await.committed, None);
    assert_eq!(client.status().await.shards[0].groups, 0);
}

#[tokio::test]
async fn a_list_comes_by_name_in_pages() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let names: Vec<String> = (0..15).map(|n| format!("g-{n:02}")).collect();
    for name in names.iter().rev() {
        client.group(name).await;
    }
    let mut request = ListGroupsRequest { page_size: 10, prefix: "g-".into(), ..Default::default() };
    let mut found = Vec::new();
    loop {
        let page = client.admin.clone().list_groups(request.clone()).await.unwrap().into_inner();
        found.extend(page.groups.into_iter().map(|group| group.group));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(found, names);
}
