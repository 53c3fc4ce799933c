//! Topics, groups, resets, and how the node is.

use std::time::{Duration, SystemTime};

use super::{
    Connection, Error,
    connection::request,
    message::{offset, wire_offset},
};
use crate::{
    model::{DurabilityLevel, GroupSettings, Retention, StartFrom, TopicSettings, TopicType, Visibility},
    pb::v1 as pb,
};

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// By name.
    pub items: Vec<T>,
    /// Where the next page begins; `None` on the last one.
    pub next: Option<String>,
}

/// Settings of a topic to set; `None` stands for the default (create) or for leaving it (update).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicChange {
    /// Number of queues.
    pub queues: Option<u32>,
    /// Which messages it takes.
    pub kind: Option<TopicType>,
    /// When an OK is given.
    pub durability: Option<DurabilityLevel>,
    /// When readers see a message.
    pub visibility: Option<Visibility>,
    /// Messages older than this go; `Some(None)`: no limit.
    pub retention_age: Option<Option<Duration>>,
    /// The oldest go when the topic takes more bytes; `Some(None)`: no limit.
    pub retention_bytes: Option<Option<u64>>,
}

/// A topic and the settings in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    /// Its name.
    pub name: String,
    /// A topic made again under the same name has another id.
    pub id: u64,
    /// Its settings.
    pub settings: TopicSettings,
    /// Version of the queue map that message groups are placed by.
    pub queue_map_version: u64,
    /// Message groups go to queues 0 to this, less one.
    pub queue_map_queues: u32,
}

/// A topic with its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicDescription {
    /// The topic.
    pub topic: Topic,
    /// By number.
    pub queues: Vec<QueueDescription>,
    /// Groups that have progress on it.
    pub groups: Vec<String>,
    /// In plain words: what an OK on this topic survives.
    pub promise: String,
}

/// One queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueDescription {
    /// Its number in the topic.
    pub queue: u32,
    /// First offset.
    pub min: u64,
    /// End.
    pub max: u64,
    /// Bytes of log that its messages take.
    pub bytes: u64,
    /// When the first message was stored.
    pub oldest: Option<SystemTime>,
    /// When the last message was stored.
    pub newest: Option<SystemTime>,
}

/// A consumer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// A group made again under the same name has another id.
    pub id: u64,
    /// Its settings.
    pub settings: GroupSettings,
}

/// A group with its lag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupDescription {
    /// The group.
    pub group: Group,
    /// Queues that it has progress on.
    pub queues: Vec<QueueLag>,
    /// Messages not yet consumed, of all these queues.
    pub lag_messages: u64,
}

/// How far a group is behind on a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueLag {
    /// The topic.
    pub topic: String,
    /// Queue of the topic.
    pub queue: u32,
    /// Offset of the next message to consume.
    pub committed: u64,
    /// First offset of the queue.
    pub min: u64,
    /// End of the queue.
    pub max: u64,
    /// Messages not yet consumed.
    pub lag_messages: u64,
    /// Age of the oldest of them; `None` when there is none.
    pub lag_time: Option<Duration>,
}

/// Where to set a group's progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetTo {
    /// First offset there is.
    Earliest,
    /// End of the queue.
    Latest,
    /// This offset; needs a queue.
    Offset(u64),
    /// First message stored at or after this time.
    Time(SystemTime),
}

/// What a reset did to one queue, or would do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// Queue of the topic.
    pub queue: u32,
    /// Progress before.
    pub from: Option<u64>,
    /// Progress after.
    pub to: u64,
}

/// A node as it sees itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeStatus {
    /// Of the software.
    pub version: String,
    /// Its name.
    pub node: String,
    /// When it started.
    pub started: Option<SystemTime>,
    /// The shards that it hosts.
    pub shards: Vec<ShardStatus>,
    /// Connections now.
    pub connections: u64,
    /// Pulls that wait now.
    pub held_pulls: u64,
    /// Connections that have ended since the start, by reason.
    pub connections_closed: Vec<(String, u64)>,
    /// Connections that were not taken, by reason.
    pub connections_refused: Vec<(String, u64)>,
}

/// What a shard does with writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardState {
    /// A state that this client does not know.
    Unknown,
    /// Takes everything.
    Writable,
    /// Refuses sends until there is space.
    DiskFull,
    /// Refuses writes until it is restarted: a write or sync failed.
    Fenced,
    /// Closing.
    Stopping,
}

/// One shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardStatus {
    /// Its name.
    pub shard: String,
    /// Rises at every start.
    pub epoch: u32,
    /// What it does with writes.
    pub state: ShardState,
    /// Why, when it does not take everything.
    pub state_reason: String,
    /// Where its files are, on the node.
    pub data_dir: String,
    /// First position of the log that is kept.
    pub log_start: u64,
    /// End of what is synced.
    pub log_durable: u64,
    /// End of what is written.
    pub log_end: u64,
    /// Log files.
    pub segments: u64,
    /// Bytes of log files.
    pub log_bytes: u64,
    /// Free on the file system.
    pub disk_free_bytes: u64,
    /// Sends are refused below this much free space.
    pub disk_floor_bytes: u64,
    /// Most bytes of log kept; 0: no limit.
    pub disk_limit_bytes: u64,
    /// Number of topics.
    pub topics: u64,
    /// Number of queues.
    pub queues: u64,
    /// Number of groups.
    pub groups: u64,
    /// Longest time that an OK of an async topic may be without sync.
    pub flush_interval: Option<Duration>,
    /// Position that the newest snapshot stands at.
    pub snapshot_position: u64,
    /// Damage found since the start, at most 100 places.
    pub damage: Vec<Damage>,
    /// Number of damaged places found.
    pub damage_total: u64,
    /// How long opening took at this start.
    pub recovery_time: Option<Duration>,
    /// Bytes of log that had to be read for it.
    pub recovery_bytes: u64,
    /// The process before ended in order.
    pub clean_start: bool,
}

/// A damaged place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: String,
    /// First damaged position of the log.
    pub begin: u64,
    /// End of the damage.
    pub end: u64,
    /// What is wrong and what was done.
    pub text: String,
}

impl Connection {
    /// Makes a topic.
    pub async fn create_topic(&self, topic: &str, settings: TopicChange) -> Result<Topic, Error> {
        let message = pb::CreateTopicRequest { topic: topic.to_owned(), settings: Some(settings.into()) };
        let response = self.admin().create_topic(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(response.into_inner().into())
    }

    /// Changes the settings that are set.
    pub async fn update_topic(&self, topic: &str, settings: TopicChange) -> Result<Topic, Error> {
        let message = pb::UpdateTopicRequest { topic: topic.to_owned(), settings: Some(settings.into()) };
        let response = self.admin().update_topic(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(response.into_inner().into())
    }

    /// Deletes a topic with its messages and all progress on it.
    pub async fn delete_topic(&self, topic: &str) -> Result<(), Error> {
        let message = pb::DeleteTopicRequest { topic: topic.to_owned() };
        self.admin().delete_topic(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(())
    }

    /// One page of the topics whose name begins with `prefix`; `after` is [`Page::next`] of the page before.
    pub async fn topics(&self, prefix: &str, after: Option<String>) -> Result<Page<Topic>, Error> {
        let message = pb::ListTopicsRequest {
            page_size: 0,
            page_token: after.unwrap_or_default(),
            prefix: prefix.to_owned(),
        };
        let response = self.admin().list_topics(request(message)).await.map_err(|s| self.error(&s))?;
        let response = response.into_inner();
        Ok(Page {
            items: response.topics.into_iter().map(Topic::from).collect(),
            next: next(response.next_page_token),
        })
    }

    /// One topic with its queues.
    pub async fn describe_topic(&self, topic: &str) -> Result<TopicDescription, Error> {
        let message = pb::DescribeTopicRequest { topic: topic.to_owned() };
        let response = self.admin().describe_topic(request(message)).await.map_err(|s| self.error(&s))?;
        let response = response.into_inner();
        Ok(TopicDescription {
            topic: response.topic.unwrap_or_default().into(),
            queues: response.queues.into_iter().map(QueueDescription::from).collect(),
            groups: response.groups,
            promise: response.promise,
        })
    }

    /// Makes a consumer group; no start: the default.
    pub async fn create_group(&self, group: &str, start_from: Option<StartFrom>) -> Result<Group, Error> {
        let message =
            pb::CreateGroupRequest { group: group.to_owned(), settings: Some(group_settings(start_from)) };
        let response = self.admin().create_group(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(response.into_inner().into())
    }

    /// Changes the settings that are set.
    pub async fn update_group(&self, group: &str, start_from: Option<StartFrom>) -> Result<Group, Error> {
        let message =
            pb::UpdateGroupRequest { group: group.to_owned(), settings: Some(group_settings(start_from)) };
        let response = self.admin().update_group(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(response.into_inner().into())
    }

    /// Deletes a group and its progress.
    pub async fn delete_group(&self, group: &str) -> Result<(), Error> {
        let message = pb::DeleteGroupRequest { group: group.to_owned() };
        self.admin().delete_group(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(())
    }

    /// One page of the groups whose name begins with `prefix`; `after` is [`Page::next`] of the page before.
    pub async fn groups(&self, prefix: &str, after: Option<String>) -> Result<Page<Group>, Error> {
        let message = pb::ListGroupsRequest {
            page_size: 0,
            page_token: after.unwrap_or_default(),
            prefix: prefix.to_owned(),
        };
        let response = self.admin().list_groups(request(message)).await.map_err(|s| self.error(&s))?;
        let response = response.into_inner();
        Ok(Page {
            items: response.groups.into_iter().map(Group::from).collect(),
            next: next(response.next_page_token),
        })
    }

    /// One group with its lag, on all topics or on one.
    pub async fn describe_group(&self, group: &str, topic: Option<&str>) -> Result<GroupDescription, Error> {
        let message =
            pb::DescribeGroupRequest { group: group.to_owned(), topic: topic.unwrap_or_default().to_owned() };
        let response = self.admin().describe_group(request(message)).await.map_err(|s| self.error(&s))?;
        let response = response.into_inner();
        Ok(GroupDescription {
            group: response.group.unwrap_or_default().into(),
            queues: response.queues.into_iter().map(QueueLag::from).collect(),
            lag_messages: response.lag_messages,
        })
    }

    /// Sets a group's progress on a topic (on one queue, or on all), backwards too. With `dry_run` it only says
    /// what it would do.
    pub async fn reset_offsets(
        &self,
        group: &str,
        topic: &str,
        queue: Option<u32>,
        to: ResetTo,
        dry_run: bool,
    ) -> Result<Vec<Reset>, Error> {
        use pb::reset_offsets_request::To;
        let message = pb::ResetOffsetsRequest {
            group: group.to_owned(),
            topic: topic.to_owned(),
            queue_id: queue,
            dry_run,
            to: Some(match to {
                ResetTo::Earliest => To::Earliest(true),
                ResetTo::Latest => To::Latest(true),
                ResetTo::Offset(offset) => To::Offset(wire_offset(offset)),
                ResetTo::Time(time) => To::Timestamp(time.into()),
            }),
        };
        let response = self.admin().reset_offsets(request(message)).await.map_err(|s| self.error(&s))?;
        let results = response.into_inner().results.into_iter();
        Ok(results.map(|r| Reset { queue: r.queue_id, from: r.from.map(offset), to: offset(r.to) }).collect())
    }

    /// State of the node and its shards.
    pub async fn node_status(&self) -> Result<NodeStatus, Error> {
        let message = pb::GetNodeStatusRequest {};
        let response = self.admin().get_node_status(request(message)).await.map_err(|s| self.error(&s))?;
        let node = response.into_inner();
        Ok(NodeStatus {
            version: node.version,
            node: node.node,
            started: node.started.and_then(|time| time.try_into().ok()),
            shards: node.shards.into_iter().map(ShardStatus::from).collect(),
            connections: node.connections,
            held_pulls: node.held_pulls,
            connections_closed: counts(node.connections_closed),
            connections_refused: counts(node.connections_refused),
        })
    }
}

fn counts(reasons: Vec<pb::ReasonCount>) -> Vec<(String, u64)> {
    reasons.into_iter().map(|reason| (reason.reason, reason.count)).collect()
}

fn next(token: String) -> Option<String> {
    Some(token).filter(|token| !token.is_empty())
}

fn group_settings(start_from: Option<StartFrom>) -> pb::GroupSettings {
    let start_from = match start_from {
        None => pb::StartFrom::Unspecified,
        Some(StartFrom::Earliest) => pb::StartFrom::Earliest,
        Some(StartFrom::Latest) => pb::StartFrom::Latest,
    };
    pb::GroupSettings { start_from: start_from.into() }
}

impl From<TopicChange> for pb::TopicSettings {
    fn from(change: TopicChange) -> Self {
        let kind = match change.kind {
            None => pb::TopicType::Unspecified,
            Some(TopicType::Normal) => pb::TopicType::TopicNormal,
            Some(TopicType::Fifo) => pb::TopicType::TopicFifo,
            Some(TopicType::Mixed) => pb::TopicType::TopicMixed,
        };
        let durability = match change.durability {
            None => pb::DurabilityLevel::Unspecified,
            Some(DurabilityLevel::Sync) => pb::DurabilityLevel::Sync,
            Some(DurabilityLevel::Async) => pb::DurabilityLevel::Async,
        };
        let visibility = match change.visibility {
            None => pb::Visibility::Unspecified,
            Some(Visibility::Appended) => pb::Visibility::Appended,
            Some(Visibility::Flushed) => pb::Visibility::Flushed,
        };
        Self {
            queues: change.queues,
            r#type: kind.into(),
            durability: durability.into(),
            visibility: visibility.into(),
            // "No limit" is zero on the wire.
            retention_age: change
                .retention_age
                .map(|age| age.unwrap_or_default().try_into().unwrap_or_default()),
            retention_bytes: change.retention_bytes.map(Option::unwrap_or_default),
        }
    }
}

impl From<pb::Topic> for Topic {
    fn from(topic: pb::Topic) -> Self {
        let wire = topic.settings.unwrap_or_default();
        let age = wire.retention_age.and_then(|age| Duration::try_from(age).ok());
        Self {
            name: topic.topic,
            id: topic.topic_id,
            settings: TopicSettings {
                queues: wire.queues.unwrap_or_default(),
                kind: match wire.r#type() {
                    pb::TopicType::TopicNormal => TopicType::Normal,
                    pb::TopicType::TopicFifo => TopicType::Fifo,
                    pb::TopicType::TopicMixed | pb::TopicType::Unspecified => TopicType::Mixed,
                },
                durability: match wire.durability() {
                    pb::DurabilityLevel::Async => DurabilityLevel::Async,
                    pb::DurabilityLevel::Sync | pb::DurabilityLevel::Unspecified => DurabilityLevel::Sync,
                },
                visibility: match wire.visibility() {
                    pb::Visibility::Flushed => Visibility::Flushed,
                    pb::Visibility::Appended | pb::Visibility::Unspecified => Visibility::Appended,
                },
                retention: Retention {
                    age: age.filter(|age| !age.is_zero()),
                    bytes: wire.retention_bytes.filter(|&bytes| bytes > 0),
                },
            },
            queue_map_version: topic.queue_map_version,
            queue_map_queues: topic.queue_map_queues,
        }
    }
}

impl From<pb::QueueDescription> for QueueDescription {
    fn from(queue: pb::QueueDescription) -> Self {
        Self {
            queue: queue.queue_id,
            min: offset(queue.min_offset),
            max: offset(queue.max_offset),
            bytes: queue.bytes,
            oldest: queue.oldest.and_then(|time| time.try_into().ok()),
            newest: queue.newest.and_then(|time| time.try_into().ok()),
        }
    }
}

impl From<pb::Group> for Group {
    fn from(group: pb::Group) -> Self {
        let start_from = match group.settings.unwrap_or_default().start_from() {
            pb::StartFrom::Latest => StartFrom::Latest,
            pb::StartFrom::Earliest | pb::StartFrom::Unspecified => StartFrom::Earliest,
        };
        Self { name: group.group, id: group.group_id, settings: GroupSettings { start_from } }
    }
}

impl From<pb::QueueLag> for QueueLag {
    fn from(lag: pb::QueueLag) -> Self {
        Self {
            topic: lag.topic,
            queue: lag.queue_id,
            committed: offset(lag.committed),
            min: offset(lag.min_offset),
            max: offset(lag.max_offset),
            lag_messages: lag.lag_messages,
            lag_time: lag.lag_time.and_then(|time| time.try_into().ok()),
        }
    }
}

impl From<pb::ShardStatus> for ShardStatus {
    fn from(shard: pb::ShardStatus) -> Self {
        let state = match shard.state() {
            pb::ShardState::Unspecified => ShardState::Unknown,
            pb::ShardState::Writable => ShardState::Writable,
            pb::ShardState::DiskFull => ShardState::DiskFull,
            pb::ShardState::Fenced => ShardState::Fenced,
            pb::ShardState::Stopping => ShardState::Stopping,
        };
        let damage = shard.damage.into_iter();
        Self {
            shard: shard.shard,
            epoch: shard.epoch,
            state,
            state_reason: shard.state_reason,
            data_dir: shard.data_dir,
            log_start: shard.log_start,
            log_durable: shard.log_durable,
            log_end: shard.log_end,
            segments: shard.segments,
            log_bytes: shard.log_bytes,
            disk_free_bytes: shard.disk_free_bytes,
            disk_floor_bytes: shard.disk_floor_bytes,
            disk_limit_bytes: shard.disk_limit_bytes,
            topics: shard.topics,
            queues: shard.queues,
            groups: shard.groups,
            flush_interval: shard.flush_interval.and_then(|interval| interval.try_into().ok()),
            snapshot_position: shard.snapshot_position,
            damage: damage
                .map(|d| Damage { file: d.file, begin: d.begin, end: d.end, text: d.text })
                .collect(),
            damage_total: shard.damage_total,
            recovery_time: shard.recovery_time.and_then(|time| time.try_into().ok()),
            recovery_bytes: shard.recovery_bytes,
            clean_start: shard.clean_start,
        }
    }
}
