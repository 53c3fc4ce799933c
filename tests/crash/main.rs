//! `kill -9` at random moments under load. What was acknowledged is written down here, outside the process that
//! dies, and compared with what its successor serves.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../harness/mod.rs"]
mod harness;

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use harness::*;
use holdfast::pb::v1::{
    CommitOffsetsRequest, CommitOutcome, CreateTopicRequest, DeleteTopicRequest, DescribeTopicRequest,
    DurabilityLevel, Message, PullOutcome, PullRequest, QueueOffset, SendRequest, SendStreamRequest,
    TopicSettings, send_stream_response::Outcome,
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};

const ROUNDS: u64 = 50;
const QUEUES: u32 = 3;
const TOPICS: [&str; 2] = ["sync", "async"];
/// Longest load before the kill.
const LOAD_MS: u64 = 1200;
/// Frames in flight on a stream.
const WINDOW: usize = 32;

/// A queue: topic and number.
type Queue = (&'static str, u32);

/// One message: number of its batch, place in it, size of the batch.
type Part = (u64, usize, usize);

/// An acknowledged batch: where it is.
struct Acknowledged {
    queue: Queue,
    first: i64,
    batch: u64,
    count: usize,
}

/// What one task of the load knows when its broker is gone.
#[derive(Default)]
struct Account {
    sends: Vec<Acknowledged>,
    /// Messages that a reader was shown.
    seen: Vec<(Queue, i64, Part)>,
    /// Acknowledged progress.
    commits: BTreeMap<Queue, i64>,
    /// Acknowledged makings (true) and deletions of topics.
    topics: Vec<(String, bool)>,
}

/// Numbers for batches, and the sign to stop.
#[derive(Default)]
struct Shared {
    batches: AtomicU64,
    over: AtomicBool,
}

/// The body of a part: says what it is, then bytes that follow from it.
fn body(part: Part) -> Vec<u8> {
    let (batch, index, count) = part;
    let mut body = format!("{batch} {index} {count} ").into_bytes();
    let mut random = Random(batch << 10 | index as u64);
    let padding = match random.below(40) {
        0 if count < 8 => random.below(64 * 1024),
        _ => random.below(1024),
    };
    let filler = random.next() as u8;
    body.extend((0..padding).map(|n| filler.wrapping_add(n as u8)));
    body
}

/// Reads a body back; anything but exactly what was sent fails.
fn part_of(message: &Message) -> Part {
    let mut words = message.body.split(|&byte| byte == b' ');
    let mut number = || std::str::from_utf8(words.next().unwrap()).unwrap().parse::<u64>().unwrap();
    let part = (number(), number() as usize, number() as usize);
    assert_eq!(message.body, body(part), "the bytes of {part:?} are not those that were sent");
    part
}

fn batch_of(shared: &Shared, random: &mut Random, most: u64) -> (u64, Vec<Message>) {
    let batch = shared.batches.fetch_add(1, Ordering::Relaxed);
    let count = 1 + random.below(most) as usize;
    (batch, (0..count).map(|index| message(body((batch, index, count)))).collect())
}

fn any_queue(random: &mut Random) -> Queue {
    (TOPICS[random.below(2) as usize], random.below(u64::from(QUEUES)) as u32)
}

fn request(queue: Queue, messages: Vec<Message>) -> SendRequest {
    SendRequest { queue_id: Some(queue.1), ..send_request(queue.0, messages) }
}

/// One call at a time, of up to `most` messages.
async fn send_calls(client: Client, shared: Arc<Shared>, mut random: Random, most: u64) -> Account {
    let mut account = Account::default();
    while !shared.over.load(Ordering::Relaxed) {
        let queue = any_queue(&mut random);
        let (batch, messages) = batch_of(&shared, &mut random, most);
        let count = messages.len();
        let Ok(sent) = client.try_send(request(queue, messages)).await else { break };
        account.sends.push(Acknowledged { queue, first: sent.receipts[0].offset, batch, count });
    }
    account
}

/// Many frames in flight over one stream.
async fn send_stream(client: Client, shared: Arc<Shared>, mut random: Random) -> Account {
    let mut account = Account::default();
    let (frames, receiver) = mpsc::channel(WINDOW);
    let Ok(answers) = client.broker.clone().send_stream(ReceiverStream::new(receiver)).await else {
        return account;
    };
    let mut answers = answers.into_inner();
    let mut sent = std::collections::VecDeque::new();
    loop {
        while sent.len() < WINDOW && !shared.over.load(Ordering::Relaxed) {
            let queue = any_queue(&mut random);
            let (batch, messages) = batch_of(&shared, &mut random, 8);
            sent.push_back((queue, batch, messages.len()));
            let send = Some(request(queue, messages));
            if frames.send(SendStreamRequest { correlation: batch, send }).await.is_err() {
                return account;
            }
        }
        if sent.is_empty() {
            return account;
        }
        let Some(Ok(answer)) = answers.next().await else { return account };
        let (queue, batch, count) = sent.pop_front().unwrap();
        assert_eq!(answer.correlation, batch, "answered out of order");
        let Some(Outcome::Sent(sent)) = answer.outcome else { return account };
        account.sends.push(Acknowledged { queue, first: sent.receipts[0].offset, batch, count });
    }
}

/// Reads each queue as it grows, and commits what it has read, some of it on the pulls themselves.
async fn consume(client: Client, shared: Arc<Shared>, mut random: Random) -> Account {
    let mut account = Account::default();
    while !shared.over.load(Ordering::Relaxed) {
        let queue = any_queue(&mut random);
        let (topic, number) = queue;
        let Some(&from) = account.commits.get(&queue) else {
            let Ok(found) = try_offsets(&client, queue).await else { break };
            account.commits.insert(queue, found.committed.unwrap_or(0));
            continue;
        };
        let mut pull =
            PullRequest { max_messages: 256, group: "g".into(), ..pull_request(topic, number, from) };
        let riding = random.below(2) == 0;
        if riding {
            pull.commit_offset = Some(from);
        }
        let Ok(answer) = client.try_pull(waiting(pull, Duration::from_millis(20))).await else { break };
        assert!(
            matches!(answer.outcome(), PullOutcome::Found | PullOutcome::NoNewMessage),
            "{queue:?} at {from}: {answer:?}"
        );
        for message in &answer.messages {
            let offset = system(message).queue_offset.unwrap();
            account.seen.push((queue, offset, part_of(message)));
        }
        let offsets = vec![QueueOffset { topic: topic.into(), queue_id: number, offset: answer.next_offset }];
        let commit = CommitOffsetsRequest { group: "g".into(), offsets };
        let Ok(committed) = client.broker.clone().commit_offsets(commit).await else { break };
        let result = &committed.get_ref().results[0];
        assert_eq!(result.outcome(), CommitOutcome::Committed, "{queue:?}: {result:?}");
        account.commits.insert(queue, answer.next_offset);
    }
    account
}

/// Makes topics and deletes every other one.
async fn change_topics(client: Client, shared: Arc<Shared>) -> Account {
    let mut account = Account::default();
    while !shared.over.load(Ordering::Relaxed) {
        let number = shared.batches.fetch_add(1, Ordering::Relaxed);
        let topic = format!("extra-{number}");
        let create = CreateTopicRequest { topic: topic.clone(), settings: None };
        if client.admin.clone().create_topic(create).await.is_err() {
            break;
        }
        if number.is_multiple_of(2) {
            account.topics.push((topic, true));
        } else if client.admin.clone().delete_topic(DeleteTopicRequest { topic: topic.clone() }).await.is_ok()
        {
            account.topics.push((topic, false));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    account
}

async fn try_offsets(
    client: &Client,
    (topic, queue_id): Queue,
) -> Result<holdfast::pb::v1::QueueOffsets, tonic::Status> {
    let queues = vec![holdfast::pb::v1::QueueRef { topic: topic.into(), queue_id }];
    let request = holdfast::pb::v1::GetOffsetsRequest { queues, group: "g".into(), ..Default::default() };
    let answer = client.broker.clone().get_offsets(request).await?.into_inner();
    Ok(answer.offsets.into_iter().next().unwrap())
}

/// All that is known to be true, over all rounds.
#[derive(Default)]
struct Ledger {
    /// Every message that was found after a restart, by queue and offset.
    queues: BTreeMap<Queue, Vec<Part>>,
    batches: HashSet<u64>,
    commits: BTreeMap<Queue, i64>,
    acknowledged: usize,
}

impl Ledger {
    /// Reads what is new in a queue since the last restart: whole batches, each once, bytes as sent.
    async fn read_on(&mut self, client: &Client, queue: Queue) {
        let known = self.queues.entry(queue).or_default();
        let mut open: Option<Part> = None;
        loop {
            let mut pull = pull_request(queue.0, queue.1, known.len() as i64);
            (pull.max_messages, pull.max_bytes) = (1024, 16 << 20);
            let answer = client.pull(pull).await;
            if answer.outcome() == PullOutcome::NoNewMessage {
                assert_eq!(answer.max_offset, known.len() as i64);
                break;
            }
            assert_eq!(answer.outcome(), PullOutcome::Found, "{queue:?} at {}: {answer:?}", known.len());
            for message in &answer.messages {
                assert_eq!(system(message).queue_offset, Some(known.len() as i64), "{queue:?}");
                let part = part_of(message);
                let (batch, index, count) = part;
                match open {
                    None => {
                        assert_eq!(index, 0, "{queue:?}: a batch begins with {part:?}");
                        assert!(self.batches.insert(batch), "{queue:?}: batch {batch} is there twice");
                    }
                    Some((before, at, size)) => {
                        assert_eq!((batch, index, count), (before, at + 1, size), "{queue:?}: torn batch");
                    }
                }
                open = (index + 1 < count).then_some(part);
                known.push(part);
            }
        }
        assert_eq!(open, None, "{queue:?}: the queue ends inside a batch");
    }

    /// Compares what was promised and shown with what is there.
    fn check(&mut self, account: &Account) {
        for sent in &account.sends {
            let first = usize::try_from(sent.first).unwrap();
            for index in 0..sent.count {
                let found = self.queues[&sent.queue].get(first + index);
                let wanted = (sent.batch, index, sent.count);
                assert_eq!(found, Some(&wanted), "{:?} at {}: acknowledged", sent.queue, first + index);
            }
            self.acknowledged += sent.count;
        }
        for &(queue, offset, part) in &account.seen {
            let found = self.queues[&queue].get(usize::try_from(offset).unwrap());
            assert_eq!(found, Some(&part), "{queue:?} at {offset}: a reader saw it");
        }
        for (&queue, &offset) in &account.commits {
            let known = self.commits.entry(queue).or_default();
            *known = offset.max(*known);
        }
    }

    async fn check_after_restart(&mut self, client: &Client, accounts: &[Account]) {
        for queue in all_queues() {
            self.read_on(client, queue).await;
        }
        for account in accounts {
            self.check(account);
            for (topic, there) in &account.topics {
                let request = DescribeTopicRequest { topic: topic.clone() };
                let found = client.admin.clone().describe_topic(request).await.is_ok();
                assert_eq!(found, *there, "topic {topic}");
            }
        }
        for (&queue, &least) in &self.commits {
            let found = client.offsets(queue.0, queue.1, "g").await;
            let committed = found.committed.unwrap_or(0);
            assert!(committed >= least, "{queue:?}: progress fell from {least} to {committed}");
            assert!(committed <= found.max_offset, "{queue:?}: progress beyond the end");
        }
    }
}

fn all_queues() -> impl Iterator<Item = Queue> {
    TOPICS.into_iter().flat_map(|topic| (0..QUEUES).map(move |queue| (topic, queue)))
}

/// `HOLDFAST_SEED`, or the time.
fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    std::env::var("HOLDFAST_SEED").map_or(now.as_millis() as u64, |seed| seed.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_kills_under_load_lose_nothing_tear_nothing_and_need_no_help() {
    let seed = seed();
    println!("HOLDFAST_SEED={seed} repeats the choices of this run");
    let mut random = Random(seed);
    let settings = [("store.snapshot_interval", "1s")];
    let mut broker = Broker::start_with("standalone", &settings).await;
    let client = broker.client().await;
    for topic in TOPICS {
        let durability = if topic == "sync" { DurabilityLevel::Sync } else { DurabilityLevel::Async };
        let settings =
            TopicSettings { queues: Some(QUEUES), durability: durability as i32, ..TopicSettings::default() };
        client.topic_with(topic, settings).await;
    }
    let mut ledger = Ledger::default();
    let shared = Arc::new(Shared::default());
    for round in 1..=ROUNDS {
        shared.over.store(false, Ordering::Relaxed);
        let mut load = JoinSet::new();
        let mut own = || Random(random.next());
        for _ in 0..3 {
            load.spawn(send_calls(broker.client().await, Arc::clone(&shared), own(), 1));
            load.spawn(send_calls(broker.client().await, Arc::clone(&shared), own(), 64));
        }
        for _ in 0..2 {
            load.spawn(send_stream(broker.client().await, Arc::clone(&shared), own()));
        }
        load.spawn(consume(broker.client().await, Arc::clone(&shared), own()));
        load.spawn(change_topics(broker.client().await, Arc::clone(&shared)));
        tokio::time::sleep(Duration::from_micros(random.below(LOAD_MS * 1000))).await;
        broker.kill();
        shared.over.store(true, Ordering::Relaxed);
        let accounts = load.join_all().await;

        // Sometimes the successor is killed too, while it recovers.
        for _ in 0..random.below(3) {
            broker.spawn();
            tokio::time::sleep(Duration::from_micros(random.below(50_000))).await;
            broker.kill();
        }
        let begun = Instant::now();
        broker.restart().await;
        let served = begun.elapsed();
        let client = broker.client().await;
        ledger.check_after_restart(&client, &accounts).await;
        if round % 10 == 0 {
            let shard = &client.status().await.shards[0];
            println!(
                "{round} kills: {} messages acknowledged, all there; {} MiB of log; served after {served:?}",
                ledger.acknowledged,
                shard.log_bytes >> 20,
            );
            assert_eq!(shard.damage_total, 0, "{:?}", shard.damage);
        }
    }
    // Once more, all of it: nothing that was there after one restart is gone after later ones.
    let mut again = Ledger::default();
    let client = broker.client().await;
    for queue in all_queues() {
        again.read_on(&client, queue).await;
        assert_eq!(again.queues[&queue], ledger.queues[&queue], "{queue:?}");
    }
    assert!(ledger.acknowledged > 1000, "hardly any load: {}", ledger.acknowledged);
    broker.stop().await;
}
