//! What the broker shows of itself: RocketMQ's names where it has one. Calls add to plain counters, one per
//! topic (and group); they are read when metrics are collected.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use opentelemetry::{
    KeyValue,
    metrics::{Histogram, Meter},
};
use parking_lot::{Mutex, RwLock};

use super::{Error, Meters};
use crate::{
    model::{GroupId, GroupName, TopicId, TopicName},
    store::{State, Status},
};

/// Most topics, and pairs of topic and group, that get series of their own; the others are added up.
const MAX_SERIES: usize = 2000;
/// Name of those that are added up.
const OTHER: &str = "_other";
const CREATION_MS: [f64; 5] = [10.0, 100.0, 1000.0, 3000.0, 5000.0];

/// Traffic into a topic.
#[derive(Debug)]
pub(super) struct Traffic {
    name: TopicName,
    round: AtomicU32,
    normal: Volume,
    fifo: Volume,
}

/// Messages and bytes.
#[derive(Debug, Default)]
pub(super) struct Volume {
    messages: AtomicU64,
    bytes: AtomicU64,
}

/// Traffic out of a topic to a group, or to readers without one.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) topic: TopicName,
    pub(super) group: Option<GroupName>,
    volume: Volume,
}

/// How far a group is behind on a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LagRow {
    pub(super) topic: TopicName,
    pub(super) group: GroupName,
    pub(super) messages: u64,
    pub(super) oldest: Duration,
}

impl Volume {
    fn add(&self, messages: usize, bytes: usize) {
        self.messages.fetch_add(messages as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn read(&self) -> (u64, u64) {
        (self.messages.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

impl Traffic {
    /// Messages were stored.
    pub(super) fn stored(&self, grouped: bool, messages: usize, bytes: usize) {
        if grouped { &self.fifo } else { &self.normal }.add(messages, bytes);
    }

    /// Counts up; for taking queues in turn.
    pub(super) fn next_queue(&self) -> u32 {
        self.round.fetch_add(1, Ordering::Relaxed)
    }
}

impl Delivery {
    /// Messages were handed out.
    pub(super) fn delivered(&self, messages: usize, bytes: usize) {
        self.volume.add(messages, bytes);
    }
}

/// Messages or bytes of the two.
type Pick = fn((u64, u64)) -> u64;

/// A map that is read by every call and changed by few.
type Shared<K, V> = Arc<RwLock<HashMap<K, Arc<V>>>>;

fn get_or_insert<K: Copy + Eq + Hash, V>(map: &Shared<K, V>, key: K, make: impl FnOnce() -> V) -> Arc<V> {
    if let Some(known) = map.read().get(&key) {
        return Arc::clone(known);
    }
    Arc::clone(map.write().entry(key).or_insert_with(|| Arc::new(make())))
}

#[derive(Debug, Default)]
struct Rejections {
    memory: AtomicU64,
    disk: AtomicU64,
    fenced: AtomicU64,
    draining: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Metrics {
    traffic: Shared<TopicId, Traffic>,
    deliveries: Shared<(TopicId, Option<GroupId>), Delivery>,
    lag: Arc<Mutex<Arc<Vec<LagRow>>>>,
    rejections: Arc<Rejections>,
    topic_creation: Histogram<f64>,
    group_creation: Histogram<f64>,
    lag_refreshes_skipped: Arc<AtomicU64>,
    node: Arc<Node>,
}

/// Numbers about the node, refreshed by its upkeep.
#[derive(Debug, Default)]
struct Node {
    permission: AtomicU64,
    topics: AtomicU64,
    groups: AtomicU64,
}

impl Metrics {
    pub(super) fn new(meters: &Meters, status: &Status) -> Self {
        let metrics = Self {
            traffic: Shared::default(),
            deliveries: Shared::default(),
            lag: Arc::default(),
            rejections: Arc::default(),
            topic_creation: creation(
                &meters.rocketmq,
                "rocketmq_topic_create_execution_time",
                "How long making a topic took.",
            ),
            group_creation: creation(
                &meters.rocketmq,
                "rocketmq_consumer_group_create_execution_time",
                "How long making a consumer group took.",
            ),
            lag_refreshes_skipped: Arc::default(),
            node: Arc::default(),
        };
        metrics.observe_traffic(&meters.rocketmq);
        metrics.observe_lag(meters);
        metrics.observe_rejections(&meters.holdfast);
        metrics.set_node(status);
        metrics.observe_node(&meters.rocketmq);
        metrics
    }

    /// Shows this state of the node from now on.
    pub(super) fn set_node(&self, status: &Status) {
        let permission = if status.state == State::Writable { 6 } else { 4 };
        self.node.permission.store(permission, Ordering::Relaxed);
        self.node.topics.store(status.topics, Ordering::Relaxed);
        self.node.groups.store(status.groups, Ordering::Relaxed);
    }

    /// Counters of a topic.
    pub(super) fn traffic(&self, id: TopicId, name: &TopicName) -> Arc<Traffic> {
        get_or_insert(&self.traffic, id, || Traffic {
            name: name.clone(),
            round: AtomicU32::new(0),
            normal: Volume::default(),
            fifo: Volume::default(),
        })
    }

    /// Counters of what a group reads of a topic.
    pub(super) fn delivery(
        &self,
        topic: (TopicId, &TopicName),
        group: Option<(GroupId, &GroupName)>,
    ) -> Arc<Delivery> {
        let key = (topic.0, group.map(|(id, _)| id));
        get_or_insert(&self.deliveries, key, || Delivery {
            topic: topic.1.clone(),
            group: group.map(|(_, name)| name.clone()),
            volume: Volume::default(),
        })
    }

    /// Drops the counters of topics and groups that are gone.
    pub(super) fn retain(
        &self,
        topic: impl Fn(TopicId) -> bool,
        group: impl Fn(&GroupName, GroupId) -> bool,
    ) {
        self.traffic.write().retain(|&id, _| topic(id));
        self.deliveries.write().retain(|&(id, by), delivery| {
            let by = by.zip(delivery.group.as_ref());
            topic(id) && by.is_none_or(|(id, name)| group(name, id))
        });
    }

    /// Shows these rows from now on.
    pub(super) fn set_lag(&self, rows: Vec<LagRow>) {
        *self.lag.lock() = Arc::new(rows);
    }

    /// The rows that are shown.
    #[cfg(test)]
    pub(super) fn lag(&self) -> Arc<Vec<LagRow>> {
        Arc::clone(&self.lag.lock())
    }

    /// A refresh of the lag took too long and was given up.
    pub(super) fn lag_skipped(&self) {
        self.lag_refreshes_skipped.fetch_add(1, Ordering::Relaxed);
    }

    /// A send was refused.
    pub(super) fn refused(&self, error: &Error) {
        let counter = match error {
            Error::Busy { .. } => &self.rejections.memory,
            Error::DiskFull { .. } => &self.rejections.disk,
            Error::Fenced(_) => &self.rejections.fenced,
            Error::Stopping => &self.rejections.draining,
            _ => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// A topic was made, or not.
    pub(super) fn topic_made(&self, ok: bool, took: Duration) {
        let attributes = [status(ok), KeyValue::new("is_system", "false")];
        self.topic_creation.record(took.as_secs_f64() * 1000.0, &attributes);
    }

    /// A group was made, or not.
    pub(super) fn group_made(&self, ok: bool, took: Duration) {
        self.group_creation.record(took.as_secs_f64() * 1000.0, &[status(ok)]);
    }

    fn observe_traffic(&self, meter: &Meter) {
        self.observe_in(meter, "rocketmq_messages_in_total", "Messages stored by sends.", |v| v.0);
        self.observe_in(meter, "rocketmq_throughput_in_total", "Bytes of messages stored by sends.", |v| v.1);
        self.observe_out(meter, "rocketmq_messages_out_total", "Messages handed to consumers.", |v| v.0);
        let bytes = "Bytes of messages handed to consumers.";
        self.observe_out(meter, "rocketmq_throughput_out_total", bytes, |v| v.1);
    }

    fn observe_in(&self, meter: &Meter, name: &'static str, description: &'static str, value: Pick) {
        let traffic = Arc::clone(&self.traffic);
        meter
            .u64_observable_counter(name)
            .with_description(description)
            .with_callback(move |to| {
                for ((topic, kind), sum) in fold_traffic(&traffic.read(), value) {
                    let labels = [
                        KeyValue::new("topic", topic),
                        KeyValue::new("message_type", kind),
                        KeyValue::new("is_system", "false"),
                    ];
                    to.observe(sum, &labels);
                }
            })
            .build();
    }

    fn observe_out(&self, meter: &Meter, name: &'static str, description: &'static str, value: Pick) {
        let deliveries = Arc::clone(&self.deliveries);
        meter
            .u64_observable_counter(name)
            .with_description(description)
            .with_callback(move |to| {
                for ((topic, group), sum) in fold_deliveries(&deliveries.read(), value) {
                    to.observe(sum, &group_labels(topic, group));
                }
            })
            .build();
    }

    fn observe_lag(&self, meters: &Meters) {
        let lag = Arc::clone(&self.lag);
        meters
            .rocketmq
            .u64_observable_gauge("rocketmq_consumer_lag_messages")
            .with_description("Messages not yet consumed.")
            .with_callback(move |to| {
                let rows = Arc::clone(&lag.lock());
                let (own, others) = rows.split_at(rows.len().min(MAX_SERIES));
                for row in own {
                    to.observe(row.messages, &group_labels(row.topic.to_string(), row.group.to_string()));
                }
                if !others.is_empty() {
                    let sum = others.iter().fold(0_u64, |sum, row| sum.saturating_add(row.messages));
                    to.observe(sum, &group_labels(OTHER.to_owned(), OTHER.to_owned()));
                }
            })
            .build();
        let lag = Arc::clone(&self.lag);
        meters
            .rocketmq
            .u64_observable_gauge("rocketmq_consumer_lag_latency")
            .with_unit("ms")
            .with_description("Age of the oldest message not yet consumed.")
            .with_callback(move |to| {
                let rows = Arc::clone(&lag.lock());
                let ms = |row: &LagRow| u64::try_from(row.oldest.as_millis()).unwrap_or(u64::MAX);
                let (own, others) = rows.split_at(rows.len().min(MAX_SERIES));
                for row in own {
                    to.observe(ms(row), &group_labels(row.topic.to_string(), row.group.to_string()));
                }
                if let Some(most) = others.iter().map(ms).max() {
                    to.observe(most, &group_labels(OTHER.to_owned(), OTHER.to_owned()));
                }
            })
            .build();
        let skipped = Arc::clone(&self.lag_refreshes_skipped);
        meters
            .holdfast
            .u64_observable_counter("holdfast.broker.lag.refreshes_skipped")
            .with_description("Refreshes of consumer lag that took too long and were given up.")
            .with_callback(move |to| to.observe(skipped.load(Ordering::Relaxed), &[]))
            .build();
    }

    fn observe_node(&self, meter: &Meter) {
        let node = Arc::clone(&self.node);
        meter
            .u64_observable_gauge("rocketmq_broker_permission")
            .with_description("What the broker allows: 4 read, 2 write, 6 both.")
            .with_callback(move |to| to.observe(node.permission.load(Ordering::Relaxed), &[]))
            .build();
        let node = Arc::clone(&self.node);
        meter
            .u64_observable_gauge("rocketmq_topic_number")
            .with_description("Topics known.")
            .with_callback(move |to| to.observe(node.topics.load(Ordering::Relaxed), &[]))
            .build();
        let node = Arc::clone(&self.node);
        meter
            .u64_observable_gauge("rocketmq_consumer_group_number")
            .with_description("Consumer groups known.")
            .with_callback(move |to| to.observe(node.groups.load(Ordering::Relaxed), &[]))
            .build();
    }

    fn observe_rejections(&self, meter: &Meter) {
        let rejections = Arc::clone(&self.rejections);
        let attributes = ["memory", "disk", "fenced", "draining"]
            .map(|reason| [KeyValue::new("reason", reason), KeyValue::new("rpc.method", "Send")]);
        meter
            .u64_observable_counter("holdfast.flow.rejections")
            .with_description(
                "Calls refused, or answered with less, for want of room or because nothing can be written.",
            )
            .with_callback(move |to| {
                let counts = [&rejections.memory, &rejections.disk, &rejections.fenced, &rejections.draining];
                for (count, attributes) in counts.into_iter().zip(&attributes) {
                    to.observe(count.load(Ordering::Relaxed), attributes);
                }
            })
            .build();
    }
}

fn status(ok: bool) -> KeyValue {
    KeyValue::new("invocation_status", if ok { "success" } else { "failure" })
}

fn creation(meter: &Meter, name: &'static str, description: &'static str) -> Histogram<f64> {
    meter
        .f64_histogram(name)
        .with_unit("ms")
        .with_description(description)
        .with_boundaries(CREATION_MS.to_vec())
        .build()
}

fn group_labels(topic: String, group: String) -> [KeyValue; 4] {
    [
        KeyValue::new("topic", topic),
        KeyValue::new("consumer_group", group),
        KeyValue::new("is_system", "false"),
        KeyValue::new("is_retry", "false"),
    ]
}

/// Sums by topic name and kind; topics beyond the limit, newest first to go, under one name. So totals stay
/// right and a counter that is shown never falls.
fn fold_traffic(
    traffic: &HashMap<TopicId, Arc<Traffic>>,
    value: Pick,
) -> BTreeMap<(String, &'static str), u64> {
    let by_age: BTreeMap<TopicId, &Arc<Traffic>> = traffic.iter().map(|(&id, one)| (id, one)).collect();
    let mut sums = BTreeMap::new();
    for (at, one) in by_age.values().enumerate() {
        let topic = if at < MAX_SERIES { one.name.as_str() } else { OTHER };
        for (kind, volume) in [("normal", &one.normal), ("fifo", &one.fifo)] {
            let value = value(volume.read());
            if value > 0 {
                let sum: &mut u64 = sums.entry((topic.to_owned(), kind)).or_default();
                *sum = sum.saturating_add(value);
            }
        }
    }
    sums
}

/// As [`fold_traffic`], by topic and group.
fn fold_deliveries(
    deliveries: &HashMap<(TopicId, Option<GroupId>), Arc<Delivery>>,
    value: Pick,
) -> BTreeMap<(String, String), u64> {
    let by_age: BTreeMap<_, _> =
        deliveries.iter().map(|(&(topic, group), one)| ((topic, group.map(|g| g.0)), one)).collect();
    let mut sums = BTreeMap::new();
    for (at, one) in by_age.values().enumerate() {
        let group = one.group.as_ref().map_or("", GroupName::as_str);
        let (topic, group) = if at < MAX_SERIES { (one.topic.as_str(), group) } else { (OTHER, OTHER) };
        let value = value(one.volume.read());
        if value > 0 {
            let sum: &mut u64 = sums.entry((topic.to_owned(), group.to_owned())).or_default();
            *sum = sum.saturating_add(value);
        }
    }
    sums
}
