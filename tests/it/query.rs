//! `QueryMessages`: by id, by key, by place.

use holdfast::pb::v1::{
    DeleteTopicRequest, Message, Place, QueryMessagesRequest, QueryMessagesResponse, SystemProperties,
    query_messages_request::By,
};
use tonic::{Code, Status};

use crate::harness::*;

fn keyed(body: &str, keys: &[&str]) -> Message {
    let keys = keys.iter().map(|&key| key.into()).collect();
    let system = SystemProperties { keys, ..SystemProperties::default() };
    Message { system_properties: Some(system), ..message(body) }
}

fn query(topic: &str, by: By) -> QueryMessagesRequest {
    QueryMessagesRequest { topic: topic.into(), by: Some(by), ..QueryMessagesRequest::default() }
}

async fn try_find(client: &Client, request: QueryMessagesRequest) -> Result<QueryMessagesResponse, Status> {
    client.broker.clone().query_messages(request).await.map(tonic::Response::into_inner)
}

async fn find(client: &Client, request: QueryMessagesRequest) -> Vec<String> {
    let answer = try_find(client, request).await.unwrap();
    assert!(!answer.truncated);
    bodies(&answer.messages)
}

#[tokio::test]
async fn a_message_is_found_by_its_id_and_by_each_of_its_keys_newest_first() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    client.topic("u", 1).await;
    let sent = client.send_messages("t", 0, vec![keyed("one", &["k", "first"])]).await;
    client.send_messages("t", 1, vec![keyed("two", &["k"]), keyed("three", &["k", "k"])]).await;
    client.send_messages("u", 0, vec![keyed("elsewhere", &["k"])]).await;
    let by_id = By::MessageId(sent.receipts[0].message_id.clone());
    assert_eq!(find(&client, query("t", by_id.clone())).await, ["one"]);
    assert_eq!(find(&client, query("t", By::Key("first".into()))).await, ["one"]);
    assert_eq!(find(&client, query("t", By::Key("k".into()))).await, ["three", "two", "one"]);
    assert_eq!(find(&client, query("u", By::Key("k".into()))).await, ["elsewhere"]);
    assert_eq!(find(&client, query("u", by_id)).await, [""; 0], "an id of another topic");
    assert_eq!(find(&client, query("t", By::Key("no".into()))).await, [""; 0], "none is not an error");
    assert_eq!(find(&client, query("t", By::MessageId("k".into()))).await, [""; 0], "a key is no id");
}

#[tokio::test]
async fn a_place_is_found_exactly_or_not_at_all() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    client.send("t", 1, &["a", "b", "c"]).await;
    let place = |queue_id, offset| query("t", By::Place(Place { queue_id, offset }));
    assert_eq!(find(&client, place(1, 1)).await, ["b"]);
    assert_eq!(find(&client, place(1, 3)).await, [""; 0]);
    assert_eq!(find(&client, place(0, 0)).await, [""; 0]);
    let refusal = Refusal::of(&try_find(&client, place(2, 0)).await.unwrap_err());
    assert_eq!(refusal.reason, "QUEUE_NOT_FOUND");
    let refusal = Refusal::of(&try_find(&client, place(1, -1)).await.unwrap_err());
    assert_eq!(refusal.code, Code::InvalidArgument);
}

#[tokio::test]
async fn a_key_is_looked_for_within_a_time_range_and_limit() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut times = Vec::new();
    for n in 0..5 {
        let sent = client.send_messages("t", 0, vec![keyed(&n.to_string(), &["k"])]).await;
        let ms = millis(&sent.store_timestamp.unwrap());
        times.push(ms);
        eventually("the clock moves on", async || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            i64::try_from(now.as_millis()).unwrap() > ms
        })
        .await;
    }
    let key = || query("t", By::Key("k".into()));
    let range =
        QueryMessagesRequest { begin: Some(timestamp(times[1])), end: Some(timestamp(times[3])), ..key() };
    assert_eq!(find(&client, range).await, ["2", "1"], "at or after the begin, before the end");
    let limited = try_find(&client, QueryMessagesRequest { limit: 2, ..key() }).await.unwrap();
    assert_eq!((bodies(&limited.messages), limited.truncated), (vec!["4".into(), "3".into()], true));
    let request = QueryMessagesRequest { limit: 65, ..key() };
    Refusal::of_field(&try_find(&client, request).await.unwrap_err(), "limit");
}

#[tokio::test]
async fn a_hot_key_cannot_make_a_look_up_unbounded() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for _ in 0..20 {
        client.send_messages("t", 0, vec![keyed("hot", &["k"]); 1000]).await;
    }
    client.send_messages("t", 0, vec![keyed("cold", &["c"])]).await;
    let answer = try_find(&client, query("t", By::Key("k".into()))).await.unwrap();
    assert_eq!((answer.messages.len(), answer.truncated), (32, true));
    assert_eq!(find(&client, query("t", By::Key("c".into()))).await, ["cold"]);
}

#[tokio::test]
async fn a_look_up_without_anything_to_look_for_is_refused() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let nothing = QueryMessagesRequest { topic: "t".into(), ..QueryMessagesRequest::default() };
    assert_eq!(Refusal::of(&try_find(&client, nothing).await.unwrap_err()).code, Code::InvalidArgument);
    for by in [By::Key(String::new()), By::MessageId(String::new())] {
        let refusal = Refusal::of(&try_find(&client, query("t", by)).await.unwrap_err());
        assert_eq!(refusal.code, Code::InvalidArgument);
    }
    let refusal = Refusal::of(&try_find(&client, query("no", By::Key("k".into()))).await.unwrap_err());
    assert_eq!(refusal.reason, "TOPIC_NOT_FOUND");
}

#[tokio::test]
async fn keys_are_found_after_a_kill_and_not_after_their_topic_is_gone() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for n in 0..100 {
        client.send_messages("t", 0, vec![keyed(&n.to_string(), &[&format!("key-{n}")])]).await;
    }
    broker.kill();
    broker.restart().await;
    let client = broker.client().await;
    for n in [0, 50, 99] {
        assert_eq!(find(&client, query("t", By::Key(format!("key-{n}")))).await, [n.to_string()]);
    }
    client.admin.clone().delete_topic(DeleteTopicRequest { topic: "t".into() }).await.unwrap();
    client.topic("t", 1).await;
    assert_eq!(find(&client, query("t", By::Key("key-50".into()))).await, [""; 0]);
}
