//! One flipped byte anywhere in the data directory: the broker starts, says what is damaged, serves the rest.

use std::{
    fs,
    path::{Path, PathBuf},
};

use holdfast::pb::v1::PullOutcome;

use crate::harness::*;

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
