//! What `Send` refuses: every limit is named, its neighbour inside is accepted, and nothing of a refused call is kept.

use holdfast::pb::v1::{Message, SystemProperties};
use tonic::Code;

use crate::harness::*;

const MIB: usize = 1 << 20;

/// A message with changed system properties.
fn with(change: impl FnOnce(&mut SystemProperties)) -> Message {
    let mut system = SystemProperties::default();
    change(&mut system);
    Message { system_properties: Some(system), ..message("x") }
}

fn with_properties(properties: impl IntoIterator<Item = (String, String)>) -> Message {
    Message { user_properties: properties.into_iter().collect(), ..message("x") }
}

#[tokio::test]
async fn each_broken_field_is_named_and_its_neighbour_within_the_limit_is_taken() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let taken = vec![
        ("body of 1 byte", message("x")),
        ("tag of 128 bytes", with(|s| s.tag = Some("t".repeat(128)))),
        ("16 keys", with(|s| s.keys = (0..16).map(|n| n.to_string()).collect())),
        ("key of 128 bytes", with(|s| s.keys = vec!["k".repeat(128)])),
        ("id of 64 characters", with(|s| s.message_id = "i".repeat(64))),
        ("group of 63 bytes", with(|s| s.message_group = Some("g".repeat(63)))),
        ("born host of 255 bytes", with(|s| s.born_host = "h".repeat(255))),
        ("trace context of 1 KiB", with(|s| s.trace_context = Some("c".repeat(1024)))),
        ("smallest flag", with(|s| s.flag = i32::MIN)),
        ("128 properties", with_properties((0..128).map(|n| (format!("p{n}"), "v".into())))),
        ("property name of 128 bytes", with_properties([("p".repeat(128), "v".into())])),
    ];
    let count = i64::try_from(taken.len()).unwrap();
    for (what, message) in taken {
        let answer = client.try_send(send_request("t", vec![message])).await;
        assert!(answer.is_ok(), "{what}: {answer:?}");
    }
    let refused = [
        ("body", message("")),
        ("system_properties.tag", with(|s| s.tag = Some("t".repeat(129)))),
        ("system_properties.tag", with(|s| s.tag = Some("a|b".into()))),
        ("system_properties.tag", with(|s| s.tag = Some("   ".into()))),
        ("system_properties.tag", with(|s| s.tag = Some(String::new()))),
        ("system_properties.tag", with(|s| s.tag = Some("a\u{7}".into()))),
        ("system_properties.keys", with(|s| s.keys = (0..17).map(|n| n.to_string()).collect())),
        ("system_properties.keys[0]", with(|s| s.keys = vec!["k".repeat(129)])),
        ("system_properties.keys[1]", with(|s| s.keys = vec!["a".into(), String::new()])),
        ("system_properties.keys[0]", with(|s| s.keys = vec!["a\nb".into()])),
        ("system_properties.message_id", with(|s| s.message_id = "i".repeat(65))),
        ("system_properties.message_id", with(|s| s.message_id = "ä".into())),
        ("system_properties.message_id", with(|s| s.message_id = "a\tb".into())),
        ("system_properties.message_group", with(|s| s.message_group = Some("g".repeat(64)))),
        ("system_properties.message_group", with(|s| s.message_group = Some("ä".repeat(32)))),
        ("system_properties.message_group", with(|s| s.message_group = Some(String::new()))),
        ("system_properties.born_host", with(|s| s.born_host = "h".repeat(256))),
        ("system_properties.trace_context", with(|s| s.trace_context = Some("c".repeat(1025)))),
        ("user_properties", with_properties((0..129).map(|n| (format!("p{n}"), "v".into())))),
        ("user_properties", with_properties([("p".into(), "v".repeat(16 * 1024 + 1))])),
        ("user_properties", with_properties([(String::new(), "v".into())])),
        ("user_properties", with_properties([("p".repeat(129), "v".into())])),
        ("user_properties", with_properties([("a b".into(), "v".into())])),
        ("user_properties", with_properties([("ä".into(), "v".into())])),
    ];
    for (field, bad) in refused {
        // The bad one in the middle: nothing of the call may be kept.
        let request = send_request("t", vec![message("before"), bad.clone(), message("after")]);
        let Err(status) = client.try_send(request).await else { panic!("{field} was taken: {bad:?}") };
        let refusal = Refusal::of(&status);
        assert_eq!(refusal.code, Code::InvalidArgument, "{field}: {refusal:?}");
        let path = format!("messages[1].{field}");
        assert!(refusal.fields.iter().any(|f| f.starts_with(&path)), "{path} is not named: {refusal:?}");
    }
    assert_eq!(client.offsets("t", 0, "").await.max_offset, count, "something refused was stored");
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_with_the_true_limit_and_the_size_seen() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for bytes in [4 * MIB - 1, 4 * MIB] {
        client.send_messages("t", 0, vec![message(vec![7; bytes])]).await;
    }
    let request = send_request("t", vec![message(vec![7; 4 * MIB + 1])]);
    let refusal = Refusal::of_field(&client.try_send(request).await.unwrap_err(), "messages[0].body");
    assert!(refusal.text.contains("4194304") && refusal.text.contains("4194305"), "{refusal:?}");
    assert_eq!(client.offsets("t", 0, "").await.max_offset, 2);
}

#[tokio::test]
async fn a_message_at_all_its_limits_is_taken_and_delivered() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let sent = Message {
        user_properties: [("p".to_string(), "v".repeat(16 * 1024 - 1 - 128 - 16 * 128))].into(),
        system_properties: Some(SystemProperties {
            tag: Some("t".repeat(128)),
            keys: (0..16).map(|n| format!("{n:0128}")).collect(),
            message_id: "i".repeat(64),
            born_host: "h".repeat(255),
            message_group: Some("g".repeat(63)),
            trace_context: Some("c".repeat(1024)),
            ..SystemProperties::default()
        }),
        ..message(vec![7; 4 * MIB])
    };
    client.send_messages("t", 0, vec![sent.clone()]).await;
    let found = client.all("t", 0).await;
    assert_eq!(found[0].body, sent.body);
    assert_eq!(found[0].user_properties, sent.user_properties);
    assert_eq!(system(&found[0]).keys, system(&sent).keys);
}

#[tokio::test]
async fn a_call_has_1_to_1024_messages_and_at_most_16_mib() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for count in [0, 1025] {
        let request = send_request("t", vec![message("x"); count]);
        let refusal = Refusal::of_field(&client.try_send(request).await.unwrap_err(), "messages");
        assert!(refusal.text.contains("1024"), "{refusal:?}");
    }
    let nearly = vec![message(vec![1; 4 * MIB - 1024]); 4];
    client.try_send(send_request("t", nearly)).await.unwrap();
    let over = vec![message(vec![1; 4 * MIB]); 4];
    let status = client.try_send(send_request("t", over)).await.unwrap_err();
    assert!(
        matches!(status.code(), Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted),
        "{status:?}"
    );
    assert!(status.message().contains("16777216") || status.message().contains("16 MiB"), "{status:?}");
    assert_eq!(client.offsets("t", 0, "").await.max_offset, 4);
}

#[tokio::test]
async fn limits_count_bytes_and_not_characters() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.try_send(send_request("t", vec![with(|s| s.tag = Some("ä".repeat(64)))])).await.unwrap();
    let request = send_request("t", vec![with(|s| s.tag = Some("ä".repeat(64) + "x"))]);
    Refusal::of_field(&client.try_send(request).await.unwrap_err(), "messages[0].system_properties.tag");
}
