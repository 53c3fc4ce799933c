//! Topics, groups and their progress, as the log has them.

use std::{collections::HashMap, sync::Arc};

use parking_lot::RwLock;

use crate::model::{
    GroupId, GroupName, GroupSettings, LogPosition, QueueKey, TopicId, TopicName, TopicSettings,
};

/// Which queues message groups are spread over. Adding queues leaves it as it is, so that no group moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMap {
    /// Rises with every change.
    pub version: u64,
    /// Groups go to queues 0 to `queues` - 1.
    pub queues: u32,
}

/// One life of a topic. A change makes a new value; queues are shared between them.
#[derive(Debug)]
pub struct Topic {
    /// This life.
    pub id: TopicId,
    /// Its name.
    pub name: TopicName,
    /// Its settings.
    pub settings: TopicSettings,
    /// Where message groups go.
    pub map: QueueMap,
    /// Its queues, by number.
    pub queues: Vec<Arc<Queue>>,
    /// Where its newest record stands.
    pub position: LogPosition,
}

/// One queue.
#[derive(Debug)]
pub struct Queue {
    key: QueueKey,
}

#[allow(clippy::todo)]
impl Queue {
    /// Which queue this is.
    pub fn key(&self) -> QueueKey {
        self.key
    }
    /// First offset, and end of what readers may see.
    pub fn bounds(&self) -> (u64, u64) {
        todo!()
    }
    /// Bytes of log that its messages take.
    pub fn bytes(&self) -> u64 {
        todo!()
    }
}

/// A group's progress on a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Offset of the next message to consume.
    pub offset: u64,
    /// Where the record of it stands.
    pub position: LogPosition,
}

/// One life of a consumer group.
#[derive(Debug)]
pub struct Group {
    /// This life.
    pub id: GroupId,
    /// Its name.
    pub name: GroupName,
    /// Its settings.
    pub settings: GroupSettings,
    /// Where its newest record stands.
    pub position: LogPosition,
    pub(super) progress: Arc<RwLock<HashMap<QueueKey, Committed>>>,
}

impl Group {
    /// Progress on one queue.
    pub fn committed(&self, queue: QueueKey) -> Option<Committed> {
        self.progress.read().get(&queue).copied()
    }

    /// Progress on all queues, in no order.
    pub fn progress(&self) -> Vec<(QueueKey, Committed)> {
        self.progress.read().iter().map(|(&queue, &committed)| (queue, committed)).collect()
    }
}
