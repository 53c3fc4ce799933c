//! What a broker does, one verb a file.
//!
//! Callers hand in plain commands and get plain answers; they see neither the store nor the hold. Decisions
//! about state are taken in the store's transactions, where order is decided.

mod error;
mod types;

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

pub use error::{ERROR_DOMAIN, Error};
use opentelemetry::metrics::Meter;
pub use types::*;

use crate::{config::BrokerConfig, hold::Hold, runtime::Clock, store::Store};

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
pub struct Broker {}

/// A send that has its place in the log: resolves when the messages have reached what the topic promises.
/// Dropping it changes nothing about the append.
pub struct SendTicket {}

impl Future for SendTicket {
    type Output = Result<Sent, Error>;

    fn poll(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Self::Output> {
        todo!()
    }
}

#[allow(unused_variables, clippy::todo, clippy::unused_async)]
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
        todo!()
    }

    /// Checks the messages and appends them now, in the order of calls; the ticket waits for the disk.
    /// Never waits itself: without room it answers [`Error::Busy`] with a delay.
    pub fn begin_send(&self, command: SendCommand) -> Result<SendTicket, Error> {
        todo!()
    }

    /// [`Broker::begin_send`] and its ticket.
    pub async fn send(&self, command: SendCommand) -> Result<Sent, Error> {
        self.begin_send(command)?.await
    }

    /// Reads one queue, waiting for new messages if asked to. The command is worked off (and its commit
    /// applied) in the call itself; the future keeps only what it needs to wait.
    pub fn pull(&self, command: PullCommand) -> impl Future<Output = Result<Pulled, Error>> + Send + use<> {
        async { todo!() }
    }

    /// Commits a group's progress; durable before the answer.
    pub async fn commit(&self, command: CommitCommand) -> Result<Vec<Commit>, Error> {
        todo!()
    }

    /// Bounds, progress and offsets by time.
    pub async fn offsets(&self, command: OffsetsCommand) -> Result<Vec<QueueOffsets>, Error> {
        todo!()
    }

    /// Sets a group's progress, backwards too.
    pub async fn reset_offsets(&self, command: ResetCommand) -> Result<Vec<ResetResult>, Error> {
        todo!()
    }

    /// Finds messages by id, key or place.
    pub async fn query(&self, command: QueryCommand) -> Result<Queried, Error> {
        todo!()
    }

    /// Makes a topic.
    pub async fn create_topic(&self, name: &str, change: TopicChange) -> Result<TopicInfo, Error> {
        todo!()
    }

    /// Changes a topic's settings.
    pub async fn update_topic(&self, name: &str, change: TopicChange) -> Result<TopicInfo, Error> {
        todo!()
    }

    /// Deletes a topic, its messages and all progress on it.
    pub async fn delete_topic(&self, name: &str) -> Result<(), Error> {
        todo!()
    }

    /// Topics by name.
    pub async fn list_topics(&self, command: ListCommand) -> Result<Page<TopicInfo>, Error> {
        todo!()
    }

    /// One topic with its queues.
    pub async fn describe_topic(&self, name: &str) -> Result<TopicDescription, Error> {
        todo!()
    }

    /// Makes a consumer group.
    pub async fn create_group(&self, name: &str, change: GroupChange) -> Result<GroupInfo, Error> {
        todo!()
    }

    /// Changes a group's settings.
    pub async fn update_group(&self, name: &str, change: GroupChange) -> Result<GroupInfo, Error> {
        todo!()
    }

    /// Deletes a group and its progress.
    pub async fn delete_group(&self, name: &str) -> Result<(), Error> {
        todo!()
    }

    /// Groups by name.
    pub async fn list_groups(&self, command: ListCommand) -> Result<Page<GroupInfo>, Error> {
        todo!()
    }

    /// One group with its lag on every queue it has progress on; only on `topic` unless that is empty.
    pub async fn describe_group(&self, name: &str, topic: &str) -> Result<GroupDescription, Error> {
        todo!()
    }

    /// Upkeep: refreshes the lag that metrics show, and looks for pulls that no news reached. Ends when the
    /// broker stops.
    pub async fn run(&self) {
        todo!()
    }

    /// State of the node.
    pub fn node_status(&self) -> NodeStatus {
        todo!()
    }

    /// Answers all held pulls with [`Error::Stopping`], and holds none from now on.
    pub fn stop(&self) {
        todo!()
    }
}

/// The ear to give to [`Store::open`]: wakes whoever is held.
#[allow(clippy::todo)]
pub fn news(_hold: &Hold) -> Arc<dyn crate::store::News> {
    todo!()
}
