//! Finding single messages.

use super::*;

fn query(by: QueryBy) -> QueryCommand {
    QueryCommand { topic: "t".into(), by: Some(by), ..QueryCommand::default() }
}

fn keyed(body: &str, keys: &[&str]) -> Bytes {
    with(body, |system| system.keys = keys.iter().map(|&key| key.to_owned()).collect())
}

#[tokio::test]
async fn messages_are_found_by_id_and_by_each_key_newest_first() {
    let mut house = House::new();
    house.send("t", 0, vec![keyed("1", &["k", "only"]), keyed("2", &["x"])]).await.unwrap();
    house.send("t", 1, vec![keyed("3", &["k"])]).await.unwrap();
    house.send("u", 0, vec![keyed("elsewhere", &["k"])]).await.unwrap();
    let sent = house.send("t", 2, vec![with("4", |s| s.message_id = "my-id".into())]).await.unwrap();
    let made = house.send("t", 2, vec![message("5")]).await.unwrap();
    assert_eq!(sent.ids.iter().next(), Some("my-id"));
    for restarted in [false, true] {
        if restarted {
            house.restart();
        }
        let found = async |by| texts(&house.broker.query(query(by)).await.unwrap().messages);
        assert_eq!(found(QueryBy::Key("k".into())).await, ["3", "1"]);
        assert_eq!(found(QueryBy::Key("only".into())).await, ["1"]);
        assert_eq!(found(QueryBy::Key("nothing".into())).await, [""; 0]);
        assert_eq!(found(QueryBy::Id("my-id".into())).await, ["4"]);
        let id = made.ids.iter().next().unwrap().to_owned();
        assert_eq!(found(QueryBy::Id(id)).await, ["5"]);
        assert_eq!(found(QueryBy::Id("k".into())).await, [""; 0], "a key is no id");
    }
}

#[tokio::test]
async fn a_look_up_keeps_to_time_and_limit() {
    let house = House::new();
    for n in 0..5 {
        house.send("t", 0, vec![keyed(&n.to_string(), &["k"])]).await.unwrap();
        house.clock.advance(Duration::from_secs(10));
    }
    let key = || query(QueryBy::Key("k".into()));
    let found = house.broker.query(QueryCommand { limit: 2, ..key() }).await.unwrap();
    assert_eq!((texts(&found.messages), found.truncated), (vec!["4".to_owned(), "3".to_owned()], true));
    let window = QueryCommand { begin_ms: Some(START_MS + 5_000), end_ms: Some(START_MS + 25_000), ..key() };
    let found = house.broker.query(window).await.unwrap();
    assert_eq!((texts(&found.messages), found.truncated), (vec!["2".to_owned(), "1".to_owned()], false));
    let backwards = QueryCommand { begin_ms: Some(2), end_ms: Some(1), ..key() };
    assert_eq!(field(house.broker.query(backwards).await), "begin");
    assert_eq!(field(house.broker.query(QueryCommand { limit: 65, ..key() }).await), "limit");
    assert_eq!(field(house.broker.query(QueryCommand { by: None, ..key() }).await), "by");
    assert_eq!(field(house.broker.query(query(QueryBy::Key(String::new()))).await), "key");
    assert_eq!(field(house.broker.query(query(QueryBy::Id("é".into()))).await), "message_id");
    let elsewhere = QueryCommand { topic: "nowhere".into(), ..key() };
    assert_eq!(reason(house.broker.query(elsewhere).await), "TOPIC_NOT_FOUND");
}

#[tokio::test]
async fn a_message_is_found_by_its_place() {
    let house = House::new();
    house.send("t", 1, vec![message("a"), message("b")]).await.unwrap();
    let at = |queue, offset| house.broker.query(query(QueryBy::Place { queue, offset }));
    assert_eq!(texts(&at(1, 1).await.unwrap().messages), ["b"]);
    assert!(at(1, 2).await.unwrap().messages.is_empty());
    assert!(at(0, 0).await.unwrap().messages.is_empty());
    assert_eq!(field(at(1, -1).await), "place.offset");
    assert_eq!(reason(at(7, 0).await), "QUEUE_NOT_FOUND");
}
