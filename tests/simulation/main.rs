//! A long random history of a broker on a disk that crashes, against a simple model: sends, pulls, commits,
//! changes of topics, restarts, kills, power cuts with torn writes, failing devices, full disks, clocks that
//! jump, derived files that are gone.
//!
//! `HOLDFAST_SEED` repeats the choices of a run, `HOLDFAST_SIMULATION_STEPS` sets the length of one history and
//! `HOLDFAST_SIMULATION_MINUTES` how long new ones are begun.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../harness/random.rs"]
mod harness;
mod model;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::join_all;
use harness::Random;
use holdfast::{
    broker::{
        Broker, CommitCommand, CommitOutcome, GroupChange, Meters, OffsetsCommand, PullCommand, PullOutcome,
        QueueOffset, SendCommand, TopicChange, news,
    },
    config::BrokerConfig,
    hold::{Hold, Limits},
    model::{DurabilityLevel, TopicName},
    pb::v1::{Message, SystemProperties},
    runtime::{Clock, ManualClock},
    store::{
        Options, Store,
        disk::{CrashKeeps, Disk, Fault, FaultDisk, MemoryDisk, Operation},
    },
};
use model::*;
use prost::Message as _;

const TOPICS: [&str; 4] = ["durable", "fast", "short", "sometimes"];
const GROUP: &str = "readers";
const DERIVED: [&str; 3] = ["/data/snapshots", "/data/index", "/data/keys"];
const YEAR_MS: u64 = 365 * 24 * 3600 * 1000;

fn body(id: Id) -> Bytes {
    let mut body = format!("{id} ").into_bytes();
    let mut random = Random(id);
    let padding = if random.below(30) == 0 { random.below(20_000) } else { random.below(400) };
    body.resize(body.len() + padding as usize, b'a' + (id % 26) as u8);
    body.into()
}

fn id_of(stored: &Bytes) -> (u64, Id) {
    let message = Message::decode(stored.clone()).unwrap();
    let text = std::str::from_utf8(&message.body).unwrap();
    let id = text.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(message.body, body(id), "the bytes of {id} are not those that were sent");
    (message.system_properties.unwrap().queue_offset.unwrap() as u64, id)
}

fn encoded(id: Id) -> Bytes {
    let system_properties =
        Some(SystemProperties { tag: Some(format!("t{}", id % 3)), ..Default::default() });
    Message { system_properties, body: body(id), ..Message::default() }.encode_to_vec().into()
}

/// A broker and the machine that it runs on.
struct World {
    random: Random,
    memory: MemoryDisk,
    disk: FaultDisk,
    clock: Arc<ManualClock>,
    store: Store,
    broker: Broker,
    boot: u64,
    next_id: Id,
    topics: BTreeMap<&'static str, Presence>,
    crashes: BTreeMap<&'static str, u64>,
    messages: u64,
    step: u64,
    tell: bool,
}

fn options(boot: u64) -> Options {
    let mut options = Options::new("/data", "main");
    options.first_segment_bytes = 64 << 10;
    options.segment_bytes = 128 << 10;
    options.recent_bytes = 32 << 10;
    options.disk_floor_bytes = 1 << 20;
    options.retention_interval = Duration::from_secs(5);
    options.snapshot_interval = Duration::from_secs(20);
    options.key_run_bytes = 64 << 10;
    options.boot_id = format!("boot {boot}");
    options
}

fn open(boot: u64, disk: &FaultDisk, clock: &Arc<ManualClock>) -> Result<(Store, Broker), String> {
    let meter = opentelemetry::global::meter("simulation");
    let hold = Hold::new(Limits::default(), &meter);
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    let files = Arc::new(disk.clone()) as Arc<dyn Disk>;
    let store = Store::open(options(boot), files, Arc::clone(&clock), news(&hold), &meter)
        .map_err(|error| error.to_string())?;
    let meters = Meters { rocketmq: meter.clone(), holdfast: meter };
    let broker = Broker::new(store.clone(), hold, BrokerConfig::default(), clock, &meters);
    Ok((store, broker))
}

impl World {
    fn new(seed: u64) -> Self {
        let memory = MemoryDisk::new();
        let disk = FaultDisk::new(Arc::new(memory.clone()));
        let clock = Arc::new(ManualClock::new(1_700_000_000_000));
        let (store, broker) = open(0, &disk, &clock).unwrap();
        Self {
            random: Random(seed),
            memory,
            disk,
            clock,
            store,
            broker,
            boot: 0,
            next_id: 1,
            topics: TOPICS.into_iter().map(|topic| (topic, Presence::Gone)).collect(),
            crashes: BTreeMap::new(),
            messages: 0,
            step: 0,
            tell: std::env::var_os("HOLDFAST_SIMULATION_TELL").is_some(),
        }
    }

    fn any_topic(&mut self) -> &'static str {
        TOPICS[self.random.below(TOPICS.len() as u64) as usize]
    }

    /// A topic that is certainly there, and one of its queues.
    fn any_queue(&mut self) -> Option<(&'static str, u32)> {
        let topic = self.any_topic();
        let Presence::There(known) = &self.topics[topic] else { return None };
        let queues = known.queues.len() as u64;
        Some((topic, self.random.below(queues) as u32))
    }

    fn queue(&mut self, topic: &str, queue: u32) -> &mut Queue {
        match self.topics.get_mut(topic).unwrap() {
            Presence::There(topic) => &mut topic.queues[queue as usize],
            other => panic!("{topic}: {other:?}"),
        }
    }

    async fn run(&mut self, steps: u64) {
        for step in 0..steps {
            self.step = step;
            match self.random.below(1000) {
                0..450 => self.send().await,
                450..650 => self.pull().await,
                650..730 => self.commit().await,
                730..780 => self.change_topics().await,
                780..900 => {
                    let by = self.random.below(3_000);
                    self.clock.advance(Duration::from_millis(by));
                }
                900..905 => self.jump(),
                905..915 => self.fill_or_empty(),
                915..955 => self.memory.crash_in(self.random.below(60)),
                955..960 => self.break_the_device(),
                960..972 => self.go_down(End::Clean).await,
                972..984 => self.go_down(End::Killed).await,
                984..990 => self.go_down(End::PowerCut).await,
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
            let fenced = matches!(self.store.status().state, holdfast::store::State::Fenced(_));
            if self.memory.crashed() || fenced {
                let end = if fenced || self.random.below(2) == 0 { End::PowerCut } else { End::Killed };
                self.go_down(end).await;
            }
        }
        self.go_down(End::Clean).await;
    }

    /// Some sends at once.
    async fn send(&mut self) {
        let mut sends = Vec::new();
        for _ in 0..1 + self.random.below(4) {
            let Some((topic, queue)) = self.any_queue() else { continue };
            let count = 1 + self.random.below(6);
            let batch: Vec<Id> = (self.next_id..self.next_id + count).collect();
            self.next_id += count;
            self.queue(topic, queue).unanswered.push(batch.clone());
            let command = SendCommand {
                topic: topic.into(),
                messages: batch.iter().map(|&id| encoded(id)).collect(),
                queue: Some(queue),
                map_version: None,
            };
            let broker = self.broker.clone();
            sends.push(async move { (topic, queue, batch, broker.send(command).await) });
        }
        for (topic, number, batch, sent) in join_all(sends).await {
            // Refused or without an answer: it stays with what may or may not be there.
            let Ok(sent) = sent else { continue };
            self.messages += batch.len() as u64;
            self.say(format_args!("{topic}/{number}: {batch:?} at {}", sent.first_offset));
            let queue = self.queue(topic, number);
            queue.unanswered.retain(|open| *open != batch);
            for (offset, id) in (sent.first_offset..).zip(batch) {
                let before = queue.acknowledged.insert(offset, id);
                assert_eq!(before, None, "{topic}/{number}: offset {offset} was given out twice");
            }
        }
    }

    async fn pull(&mut self) {
        let Some((topic, number)) = self.any_queue() else { return };
        let what = self.what(topic, number);
        let end = self.queue(topic, number).acknowledged.keys().next_back().map_or(0, |last| last + 1);
        let offset = self.random.below(end + 3) as i64;
        let command = PullCommand {
            topic: topic.into(),
            queue: number,
            offset,
            max_messages: 1 + self.random.below(40) as u32,
            ..PullCommand::default()
        };
        let Ok(pulled) = self.broker.pull(command).await else { return };
        if let PullOutcome::Found(messages) = &pulled.outcome {
            let mut expected = None;
            for (offset, id) in messages.iter().map(id_of) {
                assert!(expected.is_none_or(|expected| offset == expected), "{what}: skipped to {offset}");
                expected = Some(offset + 1);
                self.queue(topic, number).shown(offset, id, &what);
            }
        }
    }

    async fn commit(&mut self) {
        let Some((topic, number)) = self.any_queue() else { return };
        let offsets = OffsetsCommand { queues: vec![(topic.into(), number)], ..OffsetsCommand::default() };
        let Ok(offsets) = self.broker.offsets(offsets).await else { return };
        let _ = self.broker.create_group(GROUP, GroupChange::default()).await;
        let (min, max) = (offsets[0].min_offset, offsets[0].max_offset);
        let from = self.queue(topic, number).committed.max(min);
        let offset = from + self.random.below((max - from.min(max)) + 1);
        let queue = self.queue(topic, number);
        queue.tried = queue.tried.max(offset);
        let offsets = vec![QueueOffset { topic: topic.into(), queue: number, offset: offset as i64 }];
        let Ok(done) = self.broker.commit(CommitCommand { group: GROUP.into(), offsets }).await else {
            return;
        };
        let what = self.what(topic, number);
        let queue = self.queue(topic, number);
        match &done[0].outcome {
            CommitOutcome::Committed => (queue.committed, queue.tried) = (offset, offset),
            CommitOutcome::Stale => {
                let stands = done[0].committed.unwrap();
                assert!(stands >= offset, "{what}: {offset} is stale, {stands} stands");
            }
            // Retention was quicker.
            CommitOutcome::OutOfRange => {}
            CommitOutcome::Failed(_) => {}
        }
    }

    async fn change_topics(&mut self) {
        let topic = self.any_topic();
        let grow = self.random.below(3) == 0;
        match self.topics.remove(topic).unwrap() {
            Presence::Gone => {
                let made = Topic::new(topic != "fast", topic == "short", 1 + self.random.below(3) as usize);
                let change = TopicChange {
                    queues: Some(made.queues.len() as u32),
                    durability: (!made.sync).then_some(DurabilityLevel::Async),
                    // By age a clock that is years ahead at a start may take everything.
                    retention_age: Some(Duration::ZERO),
                    retention_bytes: made.short.then_some(30_000),
                    ..TopicChange::default()
                };
                let presence = match self.broker.create_topic(topic, change).await {
                    Ok(_) => Presence::There(made),
                    Err(_) => Presence::Making(made),
                };
                self.topics.insert(topic, presence);
            }
            Presence::There(mut known) if grow && known.unsure_queues.is_none() => {
                let more = known.queues.len() + 1;
                let change = TopicChange { queues: Some(more as u32), ..TopicChange::default() };
                match self.broker.update_topic(topic, change).await {
                    Ok(_) => known.queues.push(Queue::default()),
                    Err(_) => known.unsure_queues = Some(more),
                }
                self.topics.insert(topic, Presence::There(known));
            }
            Presence::There(known) if topic == "sometimes" => {
                let presence = match self.broker.delete_topic(topic).await {
                    Ok(()) => Presence::Gone,
                    Err(_) => Presence::Deleting(known),
                };
                self.topics.insert(topic, presence);
            }
            other => drop(self.topics.insert(topic, other)),
        }
    }

    /// Somebody sets the clock, by years if need be.
    fn jump(&mut self) {
        let now = self.clock.now_ms();
        let by = self.random.below(3 * YEAR_MS);
        self.clock.jump_to(if self.random.below(2) == 0 { now + by } else { now.saturating_sub(by) });
    }

    fn fill_or_empty(&mut self) {
        let full = self.random.below(2) == 0;
        self.disk.set_free_bytes(full.then_some(1000));
        self.clock.advance(Duration::from_secs(2));
    }

    fn break_the_device(&mut self) {
        let operation = [Operation::Write, Operation::Sync][self.random.below(2) as usize];
        let fault = Fault::device(operation).on("/data/log").nth(1 + self.random.below(5));
        self.say(format_args!("{fault:?}"));
        self.disk.inject(if self.random.below(2) == 0 { fault.half() } else { fault });
    }

    /// The broker goes down, what a crash may take is taken, and its successor is examined.
    async fn go_down(&mut self, end: End) {
        let keeps = match end {
            End::Clean => None,
            End::Killed if self.memory.crashed() && self.random.below(2) == 0 => {
                Some(CrashKeeps::Torn { seed: self.random.next() })
            }
            End::Killed => Some(CrashKeeps::Everything),
            End::PowerCut if self.random.below(3) == 0 => Some(CrashKeeps::Synced),
            End::PowerCut => Some(CrashKeeps::Sectors { seed: self.random.next() }),
        };
        *self
            .crashes
            .entry(match keeps {
                None => "clean stops",
                Some(CrashKeeps::Synced) => "power cuts",
                Some(CrashKeeps::Sectors { .. }) => "power cuts, torn",
                Some(CrashKeeps::Everything) => "kills",
                Some(CrashKeeps::Torn { .. }) => "kills in a write",
            })
            .or_default() += 1;
        self.say(format_args!("{end:?}, keeps {keeps:?}"));
        self.disk.clear();
        self.disk.set_free_bytes(None);
        if let Some(keeps) = keeps {
            self.memory.crash();
            self.memory = self.memory.after_crash(keeps);
        }
        self.broker.stop();
        self.store.close();
        let mut end = end;
        if self.memory.crashed() && keeps.is_none() {
            end = End::Killed;
            self.memory = self.memory.after_crash(CrashKeeps::Everything);
        }
        self.memory.set_crash_at(None);
        if end == End::PowerCut {
            self.boot += 1;
        }
        self.disk = FaultDisk::new(Arc::new(self.memory.clone()));
        if self.random.below(4) == 0 {
            let derived = DERIVED[self.random.below(3) as usize];
            self.say(format_args!("without {derived}"));
            for file in self.disk.list(Path::new(derived)).unwrap() {
                self.disk.remove(&Path::new(derived).join(file)).unwrap();
            }
        }
        // Sometimes the successor dies too, while it recovers.
        if self.random.below(4) == 0 {
            self.memory.crash_in(self.random.below(12));
            self.say(format_args!("the successor dies"));
            if let Ok((store, broker)) = open(self.boot, &self.disk, &self.clock) {
                broker.stop();
                store.close();
            }
            if self.memory.crashed() {
                self.memory = self.memory.after_crash(CrashKeeps::Everything);
                self.disk = FaultDisk::new(Arc::new(self.memory.clone()));
            }
            self.memory.set_crash_at(None);
        }
        let opened = open(self.boot, &self.disk, &self.clock);
        let step = self.step;
        (self.store, self.broker) =
            opened.unwrap_or_else(|error| panic!("step {step}, {end:?}: does not start: {error}"));
        self.say(format_args!(
            "{:?} {:?} {:?}",
            self.store.status(),
            self.disk.list(Path::new("/data/snapshots")),
            self.disk.list(Path::new("/data/log"))
        ));
        self.examine(end).await;
    }

    async fn examine(&mut self, end: End) {
        let status = self.store.status();
        assert_eq!(status.damage, vec![], "step {}, {end:?}", self.step);
        for topic in TOPICS {
            let there = self.store.topic(&TopicName::new(topic).unwrap());
            let presence = self.topics.remove(topic).unwrap();
            let (known, must) = match presence {
                Presence::There(known) => (Some(known), Some(true)),
                Presence::Gone => (None, Some(false)),
                Presence::Making(known) | Presence::Deleting(known) => (Some(known), None),
            };
            let what = format!("step {}, {end:?}: {topic}", self.step);
            assert!(must.is_none_or(|must| must == there.is_some()), "{what}: there: {}", there.is_some());
            let (Some(mut known), Some(there)) = (known, there) else {
                self.topics.insert(topic, Presence::Gone);
                continue;
            };
            let queues = there.queues.len();
            let sure = known.unsure_queues.take();
            assert!(queues == known.queues.len() || Some(queues) == sure, "{what}: {queues} queues");
            known.queues.resize_with(queues, Queue::default);
            for (number, queue) in (0..).zip(&mut known.queues) {
                let what = format!("{what}/{number}");
                let found = read_all(&self.broker, topic, number, &what).await;
                self.say(format_args!("{what}: {found:?}"));
                queue.compare(&found, end, known.sync, known.short, &what);
                let offsets =
                    OffsetsCommand { queues: vec![(topic.into(), number)], group: GROUP.into(), at: None };
                // Without a group there is no progress.
                let committed = match self.broker.offsets(offsets).await {
                    Ok(offsets) => offsets[0].committed.unwrap_or(0),
                    Err(_) => 0,
                };
                queue.compare_progress(committed, found.max, &what);
            }
            self.topics.insert(topic, Presence::There(known));
        }
        self.say(format_args!("damage found while reading: {:?}", self.store.status().damage));
    }

    /// For whoever looks for a fault: `HOLDFAST_SIMULATION_TELL` tells the history.
    fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.tell {
            println!("{} {what}", self.step);
        }
    }

    fn what(&self, topic: &str, queue: u32) -> String {
        format!("step {}: {topic}/{queue}", self.step)
    }
}

/// Everything that a reader gets from the start of a queue to its end.
async fn read_all(broker: &Broker, topic: &str, queue: u32, what: &str) -> Found {
    let mut found = Found::default();
    let mut offset = 0;
    for _ in 0..1_000_000 {
        let command =
            PullCommand { topic: topic.into(), queue, offset, max_messages: 1024, ..PullCommand::default() };
        let pulled = broker.pull(command).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        (found.min, found.max) = (pulled.min_offset, pulled.max_offset);
        match pulled.outcome {
            PullOutcome::Found(messages) => found.messages.extend(messages.iter().map(id_of)),
            PullOutcome::DataLoss { begin, end } => found.lost.push((begin, end)),
            PullOutcome::BelowMin => {}
            PullOutcome::NoNewMessage(_) if pulled.next_offset >= pulled.max_offset => return found,
            // A damaged index is being rebuilt.
            PullOutcome::NoNewMessage(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            other => panic!("{what}: {other:?} at {offset}"),
        }
        offset = pulled.next_offset as i64;
    }
    panic!("{what}: no end");
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

#[tokio::test]
async fn a_random_history_agrees_with_its_model() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let mut seed = number("HOLDFAST_SEED", now.as_millis() as u64);
    let steps = number("HOLDFAST_SIMULATION_STEPS", 1000);
    let minutes = number("HOLDFAST_SIMULATION_MINUTES", 1);
    let begun = Instant::now();
    loop {
        println!("HOLDFAST_SEED={seed} repeats the choices of this history");
        let mut world = World::new(seed);
        world.run(steps).await;
        println!("{steps} steps, {} messages acknowledged, {:?}", world.messages, world.crashes);
        world.broker.stop();
        world.store.close();
        assert!(world.messages > steps / 2, "hardly any load: {}", world.messages);
        if begun.elapsed() >= Duration::from_secs(60 * minutes) {
            return;
        }
        seed = Random(seed).next();
    }
}
