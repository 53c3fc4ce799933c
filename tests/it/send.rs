//! `Send`: where messages go, what comes back, what an OK promises.

use holdfast::pb::v1::{
    DurabilityLevel, Encoding, Message, MessageType, SendRequest, SystemProperties, TopicSettings, TopicType,
    UpdateTopicRequest,
};
use tonic::Code;

use crate::harness::*;

#[tokio::test]
async fn a_batch_lands_in_one_queue_contiguously_and_in_order() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 4).await;
    let sent: Vec<String> = (0..1024).map(|n| format!("message {n}")).collect();
    let request = send_request("t", sent.iter().map(message).collect());
    let answer = client.try_send(request).await.unwrap();
    assert_eq!(answer.receipts.len(), 1024);
    let offsets: Vec<i64> = answer.receipts.iter().map(|receipt| receipt.offset).collect();
    assert_eq!(offsets, (0..1024).collect::<Vec<i64>>());
    assert_eq!(bodies(&client.all("t", answer.queue_id).await), sent);
}

#[tokio::test]
async fn a_reader_never_sees_a_part_of_a_batch_while_it_is_being_sent() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let sender = tokio::spawn({
        let client = client.clone();
        async move {
            for _ in 0..200 {
                client.send("t", 0, &["a", "b", "c", "d", "e", "f", "g"]).await;
            }
        }
    });
    while !sender.is_finished() {
        let end = client.offsets("t", 0, "").await.max_offset;
        assert_eq!(end % 7, 0, "the end stands inside a batch");
    }
    sender.await.unwrap();
    assert_eq!(client.offsets("t", 0, "").await.max_offset, 1400);
}

#[tokio::test]
async fn an_explicit_queue_takes_the_message() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 3).await;
    for queue in [2, 0, 1, 2] {
        assert_eq!(client.send("t", queue, &["x"]).await.queue_id, queue);
    }
    assert_eq!(client.offsets("t", 2, "").await.max_offset, 2);
    let request = SendRequest { queue_id: Some(3), ..send_request("t", vec![message("x")]) };
    let refusal = Refusal::of(&client.try_send(request).await.unwrap_err());
    assert!(matches!(refusal.code, Code::InvalidArgument | Code::NotFound), "{refusal:?}");
    assert!(refusal.text.contains('3'), "{refusal:?}");
}

#[tokio::test]
async fn the_broker_spreads_messages_without_group_over_all_queues() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 4).await;
    for _ in 0..400 {
        client.try_send(send_request("t", vec![message("x")])).await.unwrap();
    }
    for queue in 0..4 {
        let held = client.offsets("t", queue, "").await.max_offset;
        assert!(held > 20, "queue {queue} got {held} of 400");
    }
}

#[tokio::test]
async fn messages_of_one_group_go_to_one_queue_and_keep_their_order() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 8).await;
    let mut queues = std::collections::BTreeSet::new();
    for group in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        let first = client.try_send(send_request("t", vec![grouped("0", group)])).await.unwrap();
        for n in 1..10 {
            let request = send_request("t", vec![grouped(&n.to_string(), group)]);
            assert_eq!(client.try_send(request).await.unwrap().queue_id, first.queue_id);
        }
        let found = client.all("t", first.queue_id).await;
        let mine: Vec<Message> =
            found.into_iter().filter(|m| system(m).message_group.as_deref() == Some(group)).collect();
        assert_eq!(bodies(&mine), ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]);
        queues.insert(first.queue_id);
    }
    assert!(queues.len() > 1, "all groups went to one queue");
}

#[tokio::test]
async fn messages_of_different_groups_do_not_share_a_call() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 4).await;
    for batch in [
        vec![grouped("1", "a"), grouped("2", "b")],
        vec![grouped("1", "a"), message("2")],
        vec![message("1"), grouped("2", "a")],
    ] {
        let status = client.try_send(send_request("t", batch)).await.unwrap_err();
        let refusal = Refusal::of(&status);
        assert_eq!(refusal.code, Code::InvalidArgument, "{refusal:?}");
        assert!(refusal.fields.iter().any(|field| field.contains("messages[1]")), "{refusal:?}");
    }
    for queue in 0..4 {
        assert_eq!(client.offsets("t", queue, "").await.max_offset, 0);
    }
}

#[tokio::test]
async fn growing_a_topic_moves_no_group_and_keeps_the_map_version() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let before = client.topic("t", 3).await;
    let mut homes = Vec::new();
    for n in 0..50 {
        let group = format!("group {n}");
        let request = send_request("t", vec![grouped("x", &group)]);
        homes.push((group, client.try_send(request).await.unwrap().queue_id));
    }
    let settings = TopicSettings { queues: Some(16), ..TopicSettings::default() };
    let request = UpdateTopicRequest { topic: "t".into(), settings: Some(settings) };
    let after = client.admin.clone().update_topic(request).await.unwrap().into_inner();
    assert_eq!(after.settings.unwrap().queues, Some(16));
    assert_eq!((after.queue_map_version, after.queue_map_queues), (before.queue_map_version, 3));
    for (group, home) in homes {
        let request = send_request("t", vec![grouped("y", &group)]);
        assert_eq!(client.try_send(request).await.unwrap().queue_id, home, "{group} moved");
    }
    assert_eq!(client.send("t", 15, &["new queue"]).await.queue_id, 15);
}

#[tokio::test]
async fn a_stale_queue_map_version_is_refused_with_the_current_one() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let topic = client.topic("t", 2).await;
    let with_version = |version| SendRequest {
        queue_id: Some(1),
        queue_map_version: Some(version),
        ..send_request("t", vec![message("x")])
    };
    client.try_send(with_version(topic.queue_map_version)).await.unwrap();
    let status = client.try_send(with_version(topic.queue_map_version + 7)).await.unwrap_err();
    let refusal = Refusal::of(&status);
    assert_eq!(refusal.code, Code::FailedPrecondition);
    assert_eq!(refusal.metadata["queue_map_version"], topic.queue_map_version.to_string());
    assert_eq!(client.offsets("t", 1, "").await.max_offset, 1);
}

#[tokio::test]
async fn every_field_comes_back_as_it_was_sent_with_the_servers_fields_added() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    let not_gzip = vec![0, 159, 146, 150, 255, 10];
    let sent = Message {
        user_properties: [("colour", "rot ä 🦀"), ("empty", ""), ("__HOLDFAST", "x")]
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .into(),
        system_properties: Some(SystemProperties {
            tag: Some("größe".into()),
            keys: vec!["order-1".into(), "kunde ü".into()],
            message_id: "my-own-id".into(),
            body_encoding: Encoding::Gzip as i32,
            message_type: MessageType::Fifo as i32,
            born_timestamp: Some(timestamp(1_234_567_890_123)),
            born_host: "host-1".into(),
            message_group: Some("ä".repeat(31)),
            trace_context: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
            flag: -17,
            ..SystemProperties::default()
        }),
        body: not_gzip.into(),
    };
    let answer = client.send_messages("t", 1, vec![sent.clone()]).await;
    assert_eq!(answer.receipts[0].message_id, "my-own-id");

    let mut found = client.all("t", 1).await;
    let mut got = found.remove(0);
    let server = got.system_properties.as_mut().unwrap();
    assert_eq!(server.queue_offset.take(), Some(0));
    assert_eq!(std::mem::take(&mut server.queue_id), 1);
    assert_eq!(server.store_timestamp.take(), answer.store_timestamp);
    assert!(!std::mem::take(&mut server.store_host).is_empty());
    assert!(server.log_position.take().is_some());
    assert_eq!(got, sent, "body and marks are kept untouched, however odd");
}

#[tokio::test]
async fn a_client_cannot_forge_the_servers_fields() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    let forged = Message {
        system_properties: Some(SystemProperties {
            store_timestamp: Some(timestamp(1)),
            store_host: "elsewhere".into(),
            queue_id: 77,
            queue_offset: Some(4711),
            ..SystemProperties::default()
        }),
        ..message("x")
    };
    let request = SendRequest { queue_id: Some(0), ..send_request("t", vec![forged]) };
    // Refused or overruled: both are honest, believed is not.
    match client.try_send(request).await {
        Err(status) => assert_eq!(Refusal::of(&status).code, Code::InvalidArgument),
        Ok(answer) => {
            let found = client.all("t", 0).await;
            let server = system(&found[0]);
            assert_eq!(server.store_timestamp, answer.store_timestamp);
            assert_eq!((server.queue_id, server.queue_offset), (0, Some(0)));
            assert_ne!(server.store_host, "elsewhere");
        }
    }
}

#[tokio::test]
async fn a_message_without_id_gets_a_time_ordered_one_that_readers_see() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let answer = client.send("t", 0, &["a", "b"]).await;
    let ids: Vec<&str> = answer.receipts.iter().map(|receipt| receipt.message_id.as_str()).collect();
    assert_ne!(ids[0], ids[1]);
    for id in &ids {
        assert_eq!(uuid::Uuid::parse_str(id).unwrap().get_version_num(), 7, "{id}");
    }
    let found = client.all("t", 0).await;
    assert_eq!(found.iter().map(|m| system(m).message_id.as_str()).collect::<Vec<_>>(), ids);
}

#[tokio::test]
async fn the_receipt_names_the_durability_that_was_reached() {
    use holdfast::pb::v1::Durability;
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("safe", 1).await;
    let settings = TopicSettings { durability: DurabilityLevel::Async as i32, ..TopicSettings::default() };
    client.topic_with("fast", settings).await;
    assert_eq!(client.send("safe", 0, &["x"]).await.durability(), Durability::DurableDisk);
    assert_eq!(client.send("fast", 0, &["x"]).await.durability(), Durability::DurableMemory);
    // The first offsets of a queue are shown once their reservation is durable, which no send waits for.
    let found = client.pull(waiting(pull_request("fast", 0, 0), SOON)).await;
    assert_eq!(bodies(&found.messages), ["x"]);
}

#[tokio::test]
async fn store_time_never_goes_backwards_within_the_shard() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("a", 1).await;
    client.topic("b", 1).await;
    let mut last = 0;
    for n in 0..100 {
        let answer = client.send(if n % 2 == 0 { "a" } else { "b" }, 0, &["x"]).await;
        let now = millis(&answer.store_timestamp.unwrap());
        assert!(now >= last);
        last = now;
    }
}

#[tokio::test]
async fn a_topic_takes_only_messages_of_its_type() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    for (topic, kind) in [("normal", TopicType::TopicNormal), ("fifo", TopicType::TopicFifo)] {
        client.topic_with(topic, TopicSettings { r#type: kind as i32, ..TopicSettings::default() }).await;
    }
    let refused = [("normal", grouped("x", "g")), ("fifo", message("x"))];
    for (topic, message) in refused {
        let status = client.try_send(send_request(topic, vec![message])).await.unwrap_err();
        let refusal = Refusal::of(&status);
        assert!(
            matches!(refusal.code, Code::InvalidArgument | Code::FailedPrecondition),
            "{topic}: {refusal:?}"
        );
    }
    client.try_send(send_request("normal", vec![message("x")])).await.unwrap();
    client.try_send(send_request("fifo", vec![grouped("x", "g")])).await.unwrap();
}

#[tokio::test]
async fn standalone_makes_a_topic_on_the_first_send_and_broker_does_not() {
    let standalone = Broker::start().await;
    let client = standalone.client().await;
    let answer = client.try_send(send_request("new", vec![message("x")])).await.unwrap();
    assert_eq!(bodies(&client.all("new", answer.queue_id).await), ["x"]);

    let broker = Broker::start_with("broker", &[]).await;
    let client = broker.client().await;
    let status = client.try_send(send_request("new", vec![message("x")])).await.unwrap_err();
    let refusal = Refusal::of(&status);
    assert_eq!(refusal.code, Code::NotFound);
    assert!(refusal.text.contains("new"), "{refusal:?}");
}

#[tokio::test]
async fn many_first_sends_at_once_make_one_topic() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let sends: Vec<_> = (0..50)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.try_send(send_request("new", vec![message("x")])).await })
        })
        .collect();
    for send in sends {
        send.await.unwrap().unwrap();
    }
    let status = client.status().await;
    assert_eq!(status.shards[0].topics, 1);
}
