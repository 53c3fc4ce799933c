//! Topics, groups, look-up, status and checks on the command line; exit codes.

use crate::{cli::Cli, harness::*};

#[tokio::test]
async fn topics_and_groups_live_from_create_to_delete() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let made = cli.run("topic create orders --queues 8 --type fifo --retention 7d -o json").json();
    assert_eq!(made[0]["queues"], 8);
    assert_eq!(
        (made[0]["type"].as_str(), made[0]["retention_seconds"].as_f64()),
        (Some("fifo"), Some(604_800.0))
    );
    let changed =
        cli.run("topic update orders --retention none --retention-size 1GiB --type mixed -o json").json();
    assert_eq!(
        (&changed[0]["retention_seconds"], &changed[0]["retention_bytes"]),
        (&().into(), &(1 << 30).into())
    );
    cli.run("topic create audit --durability async --visibility flushed").text();
    let names: Vec<_> = cli
        .run("topic list -o json")
        .json()
        .iter()
        .map(|t| t["topic"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["audit", "orders"]);
    let table = cli.run("topic list --prefix or").text();
    assert!(table.starts_with("TOPIC") && table.contains("orders") && !table.contains("audit"), "{table}");
    assert!(!table.contains('\u{1b}'), "no colours in a pipe");

    cli.run("send --topic orders --queue 7 one two").text();
    let described = cli.run("topic describe orders").text();
    assert!(described.contains("synced"), "{described}");
    cli.run("group create billing --start-from latest").text();
    assert_eq!(
        cli.run("group update billing --start-from earliest -o json").json()[0]["start_from"],
        "earliest"
    );
    assert!(cli.run("group describe billing").text().contains("no progress yet"));
    assert_eq!(cli.run("pull --topic orders --group billing --max 1").text(), "one\n");
    let described = cli.run("group describe billing -o json").json();
    assert_eq!(described[0]["lag_messages"], 1);
    assert_eq!(cli.run("topic update orders --queues 1").code, 5, "unread messages may be in those that go");

    cli.run("group delete billing --yes").text();
    cli.run("topic delete orders --yes").text();
    assert_eq!(cli.run("topic describe orders").code, 4);
    assert_eq!(cli.run("group describe billing").code, 4);
}

#[tokio::test]
async fn exit_codes_tell_failures_apart() {
    let broker = Broker::start_with("broker", &[]).await;
    let cli = Cli::of(&broker);
    assert_eq!(cli.run("topic list --bogus").code, 2);
    assert_eq!(cli.run("topic describe none").code, 4);
    assert_eq!(cli.run("send --topic none x").code, 4, "this role makes no topics by itself");
    assert_eq!(cli.run("topic create a.b").code, 5);
    cli.run("topic create t").text();
    assert_eq!(cli.run("topic create t").code, 5);
    assert_eq!(cli.run("pull --topic t --queue 9").code, 4);
    let filter = "x".repeat(129);
    cli.run("send --topic t --queue 0 m").text();
    assert_eq!(cli.run(&format!("pull --topic t --queue 0 --filter {filter}")).code, 5);
    let away = cli.run("status --endpoint 127.0.0.1:1");
    assert_eq!(away.code, 3);
    assert!(away.err.contains("cannot reach 127.0.0.1:1: connection refused"), "{}", away.err);
    let json = cli.run("topic describe none -o json");
    let error: serde_json::Value = serde_json::from_str(&json.err).unwrap();
    assert_eq!((error["reason"].as_str(), error["exit_code"].as_u64()), (Some("TOPIC_NOT_FOUND"), Some(4)));
}

#[tokio::test]
async fn a_message_shows_all_that_was_sent_with_it() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let sent = cli
        .run("send --topic t --queue 2 --tag paid --key k1 --key k2 --property a=b=c --flag -5 --trace-context 00-ab --id my-id -o json body")
        .json();
    assert_eq!((&sent[0]["queue"], &sent[0]["receipts"][0]["message_id"]), (&2.into(), &"my-id".into()));
    let found = cli.run("message get --topic t --at 2:0 -o json").json();
    assert_eq!(found.len(), 1);
    let message = &found[0];
    assert_eq!((message["id"].as_str(), message["tag"].as_str()), (Some("my-id"), Some("paid")));
    assert_eq!(message["keys"], serde_json::json!(["k1", "k2"]));
    assert_eq!(message["properties"], serde_json::json!({ "a": "b=c" }));
    assert_eq!((message["flag"].as_i64(), message["trace_context"].as_str()), (Some(-5), Some("00-ab")));
    assert_eq!(message["body"], "body");
    assert!(message["log_position"].is_u64(), "{message}");
    for by in ["--id my-id", "--key k2"] {
        assert_eq!(cli.run(&format!("message get --topic t {by} --raw")).text(), "body", "{by}");
    }
    assert_eq!(cli.run("message get --topic t --key k3").code, 4);
    assert!(cli.run("message get --topic t --at 2:0").text().contains("a=b=c"));
}

#[tokio::test]
async fn bodies_that_are_no_text_come_out_whole_in_both_forms() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("body");
    let body: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    std::fs::write(&file, &body).unwrap();
    cli.run(&format!("send --topic t --file {}", file.display())).text();
    assert!(cli.run("message get --topic t --at 0:0 --raw").out == body);
    let pulled = cli.run("pull --topic t");
    assert!(pulled.out.strip_suffix(b"\n") == Some(&body));
    let json = cli.run("pull --topic t -o json").json();
    assert!(json[0].get("body").is_none());
    assert!(json[0]["body_base64"].as_str().unwrap().starts_with("AAECAwQF"));
}

#[tokio::test]
async fn a_reset_shows_first_and_then_does() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    cli.run("topic create t --queues 1").text();
    cli.run("send --topic t a b c").text();
    assert_eq!(cli.run("pull --topic t --group g").text(), "a\nb\nc\n");
    let shown = cli.run("offsets reset --group g --topic t --to earliest --dry-run -o json").json();
    assert_eq!((&shown[0]["from"], &shown[0]["to"]), (&3.into(), &0.into()));
    assert_eq!(cli.run("pull --topic t --group g").text(), "");
    cli.run("offsets reset --group g --topic t --queue 0 --to 1 --yes").text();
    assert_eq!(cli.run("pull --topic t --group g").text(), "b\nc\n");
    assert_eq!(cli.run("offsets reset --group g --topic t --to 1").code, 2);
}

#[tokio::test]
async fn status_and_check_tell_how_the_node_is() {
    let mut broker = Broker::start().await;
    let cli = Cli::of(&broker);
    cli.run("send --topic t x").text();
    let status = cli.run("status -o json").json();
    assert_eq!(
        (&status[0]["shards"][0]["state"], &status[0]["shards"][0]["topics"]),
        (&"WRITABLE".into(), &1.into())
    );
    assert!(cli.run("status").text().contains("writable"));
    let check = format!("store check {}", broker.data_dir().display());
    let busy = cli.run(&check);
    assert_eq!(busy.code, 1);
    assert!(busy.err.contains("in use"), "{}", busy.err);
    broker.stop().await;
    let report = cli.run(&format!("{check} -o json")).json();
    assert_eq!((&report[0]["clean"], &report[0]["records"]["message"]), (&true.into(), &1.into()));
    assert!(cli.run(&check).text().contains("no damage"));
    assert_eq!(cli.run("store check /nowhere").code, 4);
}

#[tokio::test]
async fn every_bench_gives_figures() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let short = "--duration 200ms --warm-up 10ms --size 100 -o json";
    for line in [
        "send --batch 8 --in-flight 4",
        "send --batch 8 --in-flight 4 --streams 2 --connections 2 --threads 2",
        "send --durability async",
        "pull --batch 100 --in-flight 4",
        "roundtrip --in-flight 2",
    ] {
        let done = cli.run(&format!("bench {line} {short}"));
        assert_eq!(done.code, 0, "{line}: {}", done.err);
        let result = &done.json()[0];
        assert!(result["messages"].as_u64().unwrap() > 0, "{line}: {result}");
        assert!(result["latency_ms"]["p50"].as_f64().unwrap() > 0.0, "{line}: {result}");
        assert_eq!(result["delivery_ms"].is_null(), !line.starts_with("roundtrip"), "{line}: {result}");
    }
}
