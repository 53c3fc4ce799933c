//! What a broker does, one verb a file.
//!
//! Callers hand in plain commands and get plain answers; they see neither the store nor the hold. Decisions
//! about state are taken in the store's transactions, where order is decided. Answers that show state wait
//! until it is on disk.

mod batch;
mod error;
mod groups;
mod metrics;
mod offsets;
mod pull;
mod query;
mod send;
mod status;
mod topics;
mod types;

use std::{fmt, sync::Arc};

pub use error::{ERROR_DOMAIN, Error};
use opentelemetry::metrics::Meter;
pub use send::SendTicket;
use tokio::sync::Notify;
pub use types::*;

use self::metrics::Metrics;
use crate::{
    config::{BrokerConfig, HoldConfig},
    hold::{Hold, Limits},
    model::{QueueKey, TopicId, TopicName},
    runtime::Clock,
    store::{News, Queue, Store, Topic},
};

/// Where metrics go: RocketMQ's names end in `_total` themselves and need a provider that adds nothing.
#[derive(Clone, Debug)]
pub struct Meters {
    /// For `rocketmq_*`, scope `broker-meter`.
    pub rocketmq: Meter,
    /// For `holdfast.*`.
    pub holdfast: Meter,
}

/// One broker over one shard. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    hold: Hold,
    config: BrokerConfig,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    /// Name of the shard, which messages say that they were stored by.
    shard: String,
    started_ms: u64,
    stopping: Notify,
}

impl Broker {
    /// A broker over `store` that holds its pulls in `hold`; the store's news must reach that hold through
    /// [`news`].
    pub fn new(
        store: Store,
        hold: Hold,
        config: BrokerConfig,
        clock: Arc<dyn Clock>,
        meters: &Meters,
    ) -> Self {
        let status = store.status();
        let inner = Inner {
            metrics: Metrics::new(meters, &status),
            shard: status.shard,
            started_ms: clock.now_ms(),
            stopping: Notify::new(),
            store,
            hold,
            config,
            clock,
        };
        Self { inner: Arc::new(inner) }
    }

    fn queue(&self, name: &TopicName, number: u32) -> Result<(Arc<Topic>, Arc<Queue>), Error> {
        let topic = self.inner.store.topic(name).ok_or_else(|| Error::TopicNotFound(name.clone()))?;
        match topic.queues.get(number as usize) {
            Some(queue) => {
                let queue = Arc::clone(queue);
                Ok((topic, queue))
            }
            None => Err(Error::QueueNotFound {
                topic: name.clone(),
                queue: number,
                queues: u32::try_from(topic.queues.len()).unwrap_or(u32::MAX),
            }),
        }
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broker").field("shard", &self.inner.shard).finish_non_exhaustive()
    }
}

/// The ear to give to [`Store::open`]: wakes whoever is held.
pub fn news(hold: &Hold) -> Arc<dyn News> {
    Arc::new(Ear(hold.clone()))
}

struct Ear(Hold);

impl News for Ear {
    fn grew(&self, ends: &[(QueueKey, u64)]) {
        self.0.publish(ends);
    }

    fn deleted(&self, topic: TopicId) {
        self.0.close_topic(topic);
    }
}

impl From<&HoldConfig> for Limits {
    fn from(config: &HoldConfig) -> Self {
        let count = |value| usize::try_from(value).unwrap_or(usize::MAX);
        Self {
            per_client: count(config.max_per_client),
            per_connection: count(config.max_per_connection),
            total: count(config.max_total),
        }
    }
}

#[cfg(test)]
mod tests;
