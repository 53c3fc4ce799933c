//! One flipped byte anywhere in the data directory: the broker starts, says what is damaged, serves the
//! rest; and what `store repair` makes of it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use holdfast::pb::v1::PullOutcome;

use crate::{cli::Cli, harness::*};

const MESSAGES: i64 = 200;
const FLIPS: u64 = 24;

type Files = Vec<(PathBuf, Vec<u8>)>;

fn save(dir: &Path) -> Files {
    let files = files_below(dir).unwrap();
    files.into_iter().map(|(path, _)| (path.clone(), fs::read(path).unwrap())).collect()
}

fn restore(dir: &Path, files: &Files) {
    for (path, _) in files_below(dir).unwrap() {
        fs::remove_file(path).unwrap();
    }
    for (path, bytes) in files {
        fs::write(path, bytes).unwrap();
    }
}

fn body(n: i64) -> String {
    format!("message number {n} {}", "x".repeat(usize::try_from(n).unwrap() * 3))
}

#[tokio::test]
async fn whichever_byte_is_flipped_no_wrong_message_is_served_and_every_missing_one_is_told() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for n in 0..MESSAGES {
        client.send("t", 0, &[&body(n)]).await;
    }
    broker.stop().await;
    let dir = broker.data_dir();
    let files = save(&dir);
    let mut random = Random(4711);
    for flip in 0..FLIPS {
        restore(&dir, &files);
        // Half of the flips go into the largest file, the log; the others anywhere. Zeros behind the end do not count.
        let largest = (0..files.len()).max_by_key(|&at| files[at].1.len()).unwrap();
        let at = if flip % 2 == 0 { largest } else { random.below(files.len() as u64) as usize };
        let (path, bytes) = &files[at];
        let Some(last) = bytes.iter().rposition(|&byte| byte != 0) else { continue };
        let place = random.below(last as u64 + 1) as usize;
        let mut bytes = bytes.clone();
        bytes[place] ^= 1 << random.below(8);
        fs::write(path, bytes).unwrap();
        let what = format!("{} at {place}", path.strip_prefix(&dir).unwrap().display());

        broker.restart().await;
        let client = broker.client().await;
        let (mut offset, mut lost) = (0, 0);
        while offset < MESSAGES {
            let answer = client.pull(pull_request("t", 0, offset)).await;
            match answer.outcome() {
                PullOutcome::Found => {
                    for message in &answer.messages {
                        let n = system(message).queue_offset.unwrap();
                        assert!(message.body == body(n), "{what}: a wrong message at {n}");
                    }
                }
                PullOutcome::DataLoss => {
                    let range = answer.lost.unwrap();
                    assert!(range.begin <= offset && range.end == answer.next_offset, "{what}: {range:?}");
                    lost += range.end - offset;
                }
                other => panic!("{what}: {other:?} at {offset}: {answer:?}"),
            }
            assert!(answer.next_offset > offset, "{what}: stands still at {offset}");
            offset = answer.next_offset;
        }
        assert!(lost <= 2, "{what}: one flip took {lost} messages");
        assert_eq!(client.send("t", 0, &["new"]).await.receipts[0].offset, MESSAGES, "{what}");
        if lost > 0 {
            assert!(client.status().await.shards[0].damage_total > 0, "{what}: lost in silence");
        }
        broker.kill();
    }
}

#[tokio::test]
async fn repair_shows_what_it_would_do_and_does_it_only_when_told_and_removes_no_byte_of_the_log() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for n in 0..MESSAGES {
        client.send("t", 0, &[&body(n)]).await;
    }
    let cli = Cli::of(&broker);
    let dir = broker.data_dir();
    let repair = format!("store repair {}", dir.display());
    let busy = cli.run(&repair);
    assert!(busy.code == 1 && busy.err.contains("in use"), "{}", busy.err);
    broker.stop().await;
    assert!(cli.run(&repair).text().contains("nothing to put in order"));

    // One of each kind.
    let flip = |path: &Path, at: usize| {
        let mut bytes = fs::read(path).unwrap();
        bytes[at] ^= 0x20;
        fs::write(path, bytes).unwrap();
    };
    let first = dir.join(format!("log/{:020}.log", 0));
    let text = body(7);
    let bytes = fs::read(&first).unwrap();
    let at = bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap();
    flip(&first, at);
    flip(&first, 17);
    let snapshot = files_below(&dir.join("snapshots")).unwrap()[0].0.clone();
    flip(&snapshot, fs::read(&snapshot).unwrap().len() / 2);
    let keys = files_below(&dir.join("keys")).unwrap()[0].0.clone();
    flip(&keys, 5000);
    let foreign = dir.join("log/00000000009999999992.log");
    fs::write(&foreign, [7; 10_000]).unwrap();

    let before = save(&dir);
    let checked = cli.run(&format!("store check {}", dir.display()));
    assert_eq!(checked.code, 7, "{}", checked.err);
    let shown = cli.run(&format!("{repair} -o json"));
    assert_eq!(shown.code, 7, "a message is lost");
    let report: serde_json::Value = serde_json::from_slice(&shown.out).unwrap();
    assert_eq!(report["done"], false);
    let steps: Vec<(&str, &str)> = report["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| (step["action"].as_str().unwrap(), step["file"].as_str().unwrap()))
        .collect();
    let step = |action, path: &Path| steps.contains(&(action, path.to_str().unwrap()));
    assert!(step("remove", &snapshot) && step("remove", &keys), "{steps:?}");
    assert!(step("set_aside", &foreign) && step("rewrite_header", &first), "{steps:?}");
    assert!(String::from_utf8_lossy(&cli.run(&repair).out).contains("add --yes"));
    assert!(save(&dir) == before, "it changed something without being told");

    let done = cli.run(&format!("{repair} --yes"));
    let text = String::from_utf8_lossy(&done.out);
    assert!(done.code == 7 && text.contains("moved"), "{text}");
    let aside: Vec<PathBuf> =
        files_below(&dir.join("quarantine")).unwrap().into_iter().map(|(path, _)| path).collect();
    assert!(aside.iter().any(|path| fs::read(path).unwrap() == [7; 10_000]), "{aside:?}");
    let log = fs::read(&first).unwrap();
    let (_, log_before) = before.iter().find(|(path, _)| *path == first).unwrap();
    assert!(log[4096..] == log_before[4096..], "bytes of the log were changed");
    let report = cli.run(&format!("store check {} -o json", dir.display()));
    let report: serde_json::Value = serde_json::from_slice(&report.out).unwrap();
    let left = report["damage"].as_array().unwrap();
    assert!(left.len() == 1 && left[0]["text"].as_str().unwrap().contains("offset 7"), "{left:?}");

    broker.restart().await;
    let client = broker.client().await;
    let lost = client.pull(pull_request("t", 0, 7)).await;
    assert_eq!(lost.outcome(), PullOutcome::DataLoss);
    let behind = client.pull(pull_request("t", 0, 8)).await;
    assert_eq!(behind.messages[0].body, body(8));
}
