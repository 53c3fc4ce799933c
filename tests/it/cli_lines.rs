//! `send` and `pull` on the command line: bytes in, the same bytes out.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::Stdio,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    cli::{Cli, end_of, until_file_is},
    harness::*,
};

/// Lines of all kinds: short, long, with carriage returns, with bytes that are no text. None is empty.
fn lines(count: u32) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut text = Vec::new();
    for number in 0..count {
        text.extend_from_slice(format!("{number} ").as_bytes());
        for _ in 0..number % 61 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let byte = state.to_le_bytes()[0];
            text.push(if byte == b'\n' { b'\r' } else { byte });
        }
        text.push(b'\n');
    }
    text
}

#[tokio::test]
async fn lines_come_back_byte_for_byte_and_in_order() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let text = lines(20_000);
    let sent = cli.feed("send --topic logs --lines --batch 50 -o json", &text);
    assert_eq!((sent.code, sent.err.as_str()), (0, ""));
    let summary = &sent.json()[0];
    assert_eq!(summary["messages"], 20_000);
    assert_eq!(summary["durability"], "DURABLE_DISK");
    let client = broker.client().await;
    for queue in 0..4 {
        assert!(end_of(&client, "logs", queue).await > 0, "queue {queue} has its part");
    }
    let pulled = cli.run("pull --topic logs --from earliest");
    assert_eq!((pulled.code, pulled.err.as_str()), (0, ""));
    assert!(pulled.out == text, "{} bytes of {}", pulled.out.len(), text.len());
}

#[tokio::test]
async fn empty_lines_are_counted_and_the_last_line_needs_no_end() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let sent = cli.feed("send --topic t --lines", b"\na\r\n\nlast");
    assert_eq!(sent.code, 0);
    assert!(sent.err.contains("2 empty lines were left out"), "{}", sent.err);
    assert_eq!(cli.run("pull --topic t").out, b"a\r\nlast\n");
}

#[tokio::test]
async fn a_line_that_is_too_long_is_named_and_what_came_before_it_is_stored() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let mut text = b"one\ntwo\n".to_vec();
    text.resize(text.len() + (4 << 20) + 1, b'x');
    let sent = cli.feed("send --topic t --lines", &text);
    assert_eq!(sent.code, 5);
    assert!(sent.err.contains("line 3 has more than 4 MiB"), "{}", sent.err);
    assert!(sent.err.contains("--skip 2"), "{}", sent.err);
    assert_eq!(cli.run("pull --topic t").out, b"one\ntwo\n");
}

#[tokio::test]
async fn a_send_that_was_cut_off_says_exactly_where_to_go_on() {
    let mut broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("input");
    let text = lines(200_000);
    fs::write(&file, &text).unwrap();
    let mut command = cli.command("send --topic t --lines -o json");
    let child = command.stdin(fs::File::open(&file).unwrap()).spawn().unwrap();
    let client = broker.client().await;
    // More than fits into the window, so that the sender has seen answers.
    eventually("much is stored", async || end_of(&client, "t", 3).await > 6_000).await;
    broker.kill();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", String::from_utf8_lossy(&output.stderr));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["complete"], false);
    let acknowledged = usize::try_from(summary["acknowledged_lines"].as_u64().unwrap()).unwrap();
    assert!(acknowledged > 0 && acknowledged < 200_000, "{summary}");

    broker.restart().await;
    let cli = Cli::of(&broker);
    let end_of_line = text.iter().enumerate().filter(|&(_, &byte)| byte == b'\n').map(|(at, _)| at + 1);
    let bytes = end_of_line.take(acknowledged).last().unwrap();
    let pulled = cli.run("pull --topic t");
    assert_eq!(pulled.code, 0, "{}", pulled.err);
    assert!(pulled.out.starts_with(&text[..bytes]), "every acknowledged line is there, once, in order");

    let rest = cli.feed(&format!("send --topic t2 --lines --skip {acknowledged}"), &text);
    assert_eq!(rest.code, 0, "{}", rest.err);
    assert!(cli.run("pull --topic t2").out == text[bytes..], "going on begins behind what is acknowledged");
}

#[tokio::test]
async fn an_interrupted_send_tells_how_far_it_got() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let mut command = cli.command("send --topic t --lines -o json");
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    // Standard input stays open: the command waits for more.
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"a\nb\nc\n").unwrap();
    let client = broker.client().await;
    eventually("all is stored", async || {
        let mut stored = 0;
        for queue in 0..4 {
            stored += end_of(&client, "t", queue).await;
        }
        stored == 3
    })
    .await;
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["acknowledged_lines"], 3);
}

#[tokio::test]
async fn a_follower_prints_what_comes_in_the_order_of_the_log() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    cli.feed("send --topic t --lines", b"before\n");
    let mut follower = cli.start("pull --topic t --follow --from earliest", &out);
    until_file_is(&out, b"before\n").await;
    let text = lines(10_000);
    assert_eq!(cli.feed("send --topic t --lines --batch 20", &text).code, 0);
    let mut expected = [b"before\n", text.as_slice()].concat();
    until_file_is(&out, &expected).await;
    assert_eq!(cli.run("send --topic t alone").code, 0);
    expected.extend_from_slice(b"alone\n");
    until_file_is(&out, &expected).await;
    kill_process(Pid::from_child(&follower), Signal::INT).unwrap();
    assert_eq!(follower.wait().unwrap().code(), Some(130));
}

#[tokio::test]
async fn a_follower_of_tags_is_not_held_up_by_messages_without_them() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    cli.run("topic create t --queues 3").text();
    let mut follower = cli.start("pull --topic t --follow --from earliest --filter a||b", &out);
    let mut expected = Vec::new();
    for round in 0..20 {
        for tag in ["a", "x", "b", "x"] {
            let many = format!("{round}-{tag}-1\n{round}-{tag}-2\n");
            cli.feed(&format!("send --topic t --lines --tag {tag}"), many.as_bytes());
            if tag != "x" {
                expected.extend_from_slice(many.as_bytes());
            }
        }
    }
    until_file_is(&out, &expected).await;
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[tokio::test]
async fn a_reader_that_has_seen_enough_ends_the_pull_quietly() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    cli.feed("send --topic t --lines", &lines(20_000));
    let mut child = cli.command("pull --topic t").spawn().unwrap();
    let mut first = Vec::new();
    BufReader::new(child.stdout.take().unwrap()).read_until(b'\n', &mut first).unwrap();
    assert_eq!(first, b"0 \n");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
}

#[tokio::test]
async fn a_group_goes_on_behind_what_was_printed() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    let text: Vec<u8> = (0..1000).flat_map(|n| format!("{n}\n").into_bytes()).collect();
    cli.feed("send --topic t --lines --batch 10", &text);
    let mut all = cli.run("pull --topic t --group g --max 333").text();
    all.push_str(&cli.run("pull --topic t --group g --max 333").text());
    let described = cli.run("group describe g -o json").json();
    assert_eq!(described[0]["lag_messages"], 334);
    all.push_str(&cli.run("pull --topic t --group g").text());
    assert_eq!(all.as_bytes(), text);
    assert_eq!(cli.run("pull --topic t --group g").text(), "");
    let again = cli.run("pull --topic t --group g --from earliest --max 1");
    assert!(again.err.contains("stands further on already"), "{}", again.err);
    assert_eq!(cli.run("group describe g -o json").json()[0]["lag_messages"], 0);
}

#[tokio::test]
async fn reading_begins_where_it_is_told_to() {
    let broker = Broker::start().await;
    let cli = Cli::of(&broker);
    cli.run("topic create t --queues 2").text();
    for n in 0..4 {
        cli.run(&format!("send --topic t --queue {} m{n}", n % 2)).text();
    }
    assert_eq!(cli.run("pull --topic t --queue 1").text(), "m1\nm3\n");
    assert_eq!(cli.run("pull --topic t --queue 1 --from 1").text(), "m3\n");
    assert_eq!(cli.run("pull --topic t --from latest").text(), "");
    assert_eq!(cli.run("pull --topic t --from 1h").text(), "m0\nm1\nm2\nm3\n");
    assert_eq!(cli.run("pull --topic t --from 2000-01-01T00:00:00Z --max 2").text(), "m0\nm1\n");
    let beyond = cli.run("pull --topic t --queue 0 --from 77");
    assert!(beyond.err.contains("offset 77 is beyond the end"), "{}", beyond.err);
    assert_eq!(beyond.text(), "");
    assert_eq!(cli.run("pull --topic t --from 1").code, 2, "an offset needs a queue");
}
