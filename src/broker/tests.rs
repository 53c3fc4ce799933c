//! Every verb over a real store.

mod groups;
mod lookup;
mod metrics;
mod overload;
mod pull;
mod send;
mod topics;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use opentelemetry::metrics::MeterProvider as _;
use opentelemetry_sdk::metrics::SdkMeterProvider;
use prost::Message as _;

use super::*;
use crate::{
    pb::v1::{Message, SystemProperties},
    runtime::ManualClock,
    store::{
        Options,
        disk::{Disk, FaultDisk, MemoryDisk},
    },
};

const START_MS: u64 = 1_700_000_000_000;

struct House {
    broker: Broker,
    clock: Arc<ManualClock>,
    options: Options,
    disk: FaultDisk,
}

impl House {
    fn new() -> Self {
        Self::with(|_| {}, Limits::default())
    }

    fn with(change: impl FnOnce(&mut BrokerConfig), limits: Limits) -> Self {
        Self::build(change, limits, &unmeasured())
    }

    fn measured(meters: &Meters) -> Self {
        Self::build(|_| {}, Limits::default(), meters)
    }

    fn build(change: impl FnOnce(&mut BrokerConfig), limits: Limits, meters: &Meters) -> Self {
        let mut options = Options::new("/data", "shard-0");
        options.first_segment_bytes = 4 << 20;
        options.segment_bytes = 4 << 20;
        options.disk_floor_bytes = 0;
        options.boot_id = "boot".into();
        options.retention_interval = Duration::from_millis(10);
        let mut config = BrokerConfig::default();
        config.topics.auto_create = true;
        change(&mut config);
        let clock = Arc::new(ManualClock::new(START_MS));
        let disk = FaultDisk::new(Arc::new(MemoryDisk::new()));
        let broker = open(&options, &disk, &clock, config, limits, meters);
        Self { broker, clock, options, disk }
    }

    /// Closes the store and opens it again.
    fn restart(&mut self) {
        let config = self.broker.inner.config.clone();
        self.close();
        self.broker = open(&self.options, &self.disk, &self.clock, config, Limits::default(), &unmeasured());
    }

    fn close(&self) {
        self.broker.stop();
        self.broker.inner.store.close();
    }

    async fn send(&self, topic: &str, queue: u32, messages: Vec<Bytes>) -> Result<Sent, Error> {
        let command = SendCommand { topic: topic.into(), messages, queue: Some(queue), map_version: None };
        self.broker.send(command).await
    }

    /// Waits until so many pulls are held.
    async fn held(&self, count: usize) {
        while self.broker.inner.hold.held() != count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// What was committed for a group.
    async fn committed(&self, group: &str, topic: &str, queue: u32) -> Option<u64> {
        let command = OffsetsCommand { queues: vec![(topic.into(), queue)], group: group.into(), at: None };
        self.broker.offsets(command).await.unwrap()[0].committed
    }

    async fn commit(&self, group: &str, topic: &str, queue: u32, offset: i64) -> Commit {
        let offsets = vec![QueueOffset { topic: topic.into(), queue, offset }];
        let command = CommitCommand { group: group.into(), offsets };
        self.broker.commit(command).await.unwrap().remove(0)
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.close();
    }
}

fn open(
    options: &Options,
    disk: &FaultDisk,
    clock: &Arc<ManualClock>,
    config: BrokerConfig,
    limits: Limits,
    meters: &Meters,
) -> Broker {
    let hold = Hold::new(limits, &meters.holdfast);
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    let store = Store::open(
        options.clone(),
        Arc::new(disk.clone()) as Arc<dyn Disk>,
        Arc::clone(&clock),
        news(&hold),
        &unmeasured().holdfast,
    );
    Broker::new(store.unwrap(), hold, config, clock, meters)
}

fn unmeasured() -> Meters {
    let meter = SdkMeterProvider::default().meter("test");
    Meters { rocketmq: meter.clone(), holdfast: meter }
}

fn message(body: &str) -> Bytes {
    with(body, |_| {})
}

fn with(body: &str, change: impl FnOnce(&mut SystemProperties)) -> Bytes {
    let mut system = SystemProperties::default();
    change(&mut system);
    let message = Message {
        system_properties: Some(system),
        body: Bytes::copy_from_slice(body.as_bytes()),
        ..Message::default()
    };
    message.encode_to_vec().into()
}

fn tagged(body: &str, tag: &str) -> Bytes {
    with(body, |system| system.tag = Some(tag.into()))
}

fn grouped(body: &str, group: &str) -> Bytes {
    with(body, |system| system.message_group = Some(group.into()))
}

fn pull(topic: &str, offset: i64) -> PullCommand {
    PullCommand { topic: topic.into(), offset, ..PullCommand::default() }
}

fn waiting(topic: &str, offset: i64) -> PullCommand {
    PullCommand { wait: Duration::from_secs(30), ..pull(topic, offset) }
}

fn bodies(pulled: &Pulled) -> Vec<String> {
    let PullOutcome::Found(messages) = &pulled.outcome else {
        panic!("expected messages, got {:?}", pulled.outcome)
    };
    texts(messages)
}

fn texts(messages: &[Bytes]) -> Vec<String> {
    messages
        .iter()
        .map(|stored| String::from_utf8(Message::decode(stored.clone()).unwrap().body.to_vec()).unwrap())
        .collect()
}

fn reason<T: std::fmt::Debug>(result: Result<T, Error>) -> &'static str {
    result.unwrap_err().reason()
}

fn field<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().field().unwrap().0.to_owned()
}
