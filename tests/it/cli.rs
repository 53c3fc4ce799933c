//! Runs the client side of the binary as a person or a script would.

use std::{
    fs::File,
    io::Write,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use holdfast::pb::v1::{GetOffsetsRequest, QueueRef};
use serde_json::Value;

use crate::harness::*;

/// A command line against one broker.
pub struct Cli {
    address: String,
}

impl Cli {
    pub fn of(broker: &Broker) -> Self {
        Self { address: broker.address() }
    }

    /// `holdfast` with arguments separated by spaces.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(binary());
        command
            .args(line.split_whitespace())
            .env("HOLDFAST_ENDPOINT", &self.address)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs it to its end.
    pub fn run(&self, line: &str) -> Done {
        Done::of(self.command(line).output().unwrap())
    }

    /// Runs it to its end with `input` on its standard input.
    pub fn feed(&self, line: &str, input: &[u8]) -> Done {
        let mut child = self.command(line).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        let feeder = std::thread::spawn(move || {
            // Who has failed reads no further.
            let _ = stdin.write_all(&input);
        });
        let done = Done::of(child.wait_with_output().unwrap());
        feeder.join().unwrap();
        done
    }

    /// Starts it with its standard output in a file.
    pub fn start(&self, line: &str, out: &Path) -> Child {
        self.command(line).stdout(File::create(out).unwrap()).spawn().unwrap()
    }
}

/// How a command ended.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl Done {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code().expect("an exit code"),
            out: output.stdout,
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Its output, after it ended well.
    pub fn text(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        String::from_utf8(self.out).unwrap()
    }

    /// Its output as JSON, one value a line, whether it ended well or not.
    pub fn json(&self) -> Vec<Value> {
        let text = std::str::from_utf8(&self.out).unwrap();
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }
}

/// End of a queue; 0 while there is no such topic.
pub async fn end_of(client: &Client, topic: &str, queue: u32) -> i64 {
    let queues = vec![QueueRef { topic: topic.into(), queue_id: queue }];
    let request = GetOffsetsRequest { queues, ..Default::default() };
    let answer = client.broker.clone().get_offsets(request).await;
    answer.map_or(0, |answer| answer.into_inner().offsets[0].max_offset)
}

/// Waits until the file holds what it should, or far too long.
pub async fn until_file_is(path: &Path, expected: &[u8]) {
    let begun = Instant::now();
    loop {
        let found = std::fs::read(path).unwrap();
        if found == expected {
            return;
        }
        assert!(
            begun.elapsed() < SOON,
            "{} of {} bytes, {} of them right",
            found.len(),
            expected.len(),
            found.iter().zip(expected).take_while(|(a, b)| a == b).count()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
