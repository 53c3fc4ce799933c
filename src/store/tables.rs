//! Topics, groups and their progress, as the log has them: the fold over its records.
//!
//! Every change comes through [`Tables::apply`], live under the log's lock and again at recovery. Each
//! entity remembers where its newest record stands, so that seeing a record twice does no harm and
//! retention knows what must be copied forward.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::{Mutex, RwLock};

use super::{
    change::Change,
    index::{Block, IndexSpace},
    queue::Queue,
};
use crate::model::{
    DurabilityLevel, GroupId, GroupName, GroupSettings, LogPosition, QueueKey, Retention, TopicId, TopicName,
    TopicSettings, Visibility,
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
    /// Queues that were taken away. Kept, so that their offsets are not given out twice should they return.
    pub(super) retired: Vec<Arc<Queue>>,
}

impl Topic {
    /// Whether readers see messages before they are synced.
    pub(super) fn visible_early(&self) -> bool {
        self.settings.durability == DurabilityLevel::Async && self.settings.visibility == Visibility::Appended
    }

    pub(super) fn all_queues(&self) -> impl Iterator<Item = &Arc<Queue>> {
        self.queues.iter().chain(&self.retired)
    }

    /// Bytes of log that its messages take.
    pub(super) fn bytes(&self) -> u64 {
        self.queues.iter().map(|queue| queue.bytes()).sum()
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
    pub(super) progress: Progress,
}

impl Group {
    /// Progress on one queue.
    pub fn committed(&self, queue: QueueKey) -> Option<Committed> {
        self.progress.read().get(&queue).copied()
    }

    /// Progress on all queues.
    pub fn progress(&self) -> Vec<(QueueKey, Committed)> {
        self.progress.read().iter().map(|(&queue, &committed)| (queue, committed)).collect()
    }
}

/// Everything of a shard that is folded from its log.
#[derive(Debug, Default)]
pub(super) struct Tables {
    topics: RwLock<Topics>,
    groups: RwLock<Groups>,
    writer: RwLock<Writer>,
    /// Offsets of async queues that readers may have seen, as the latest writer says.
    reserved: RwLock<HashMap<QueueKey, Reserved>>,
    /// What was deleted since the newest snapshot, with the place of the record that says so.
    gone: Mutex<Vec<(u64, Gone)>>,
    /// Up to where retention may have removed the log.
    trimmed: AtomicU64,
    /// The log was read to its end.
    complete: AtomicBool,
}

/// What was deleted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Gone {
    Topic(TopicId),
    Group(GroupId),
}

/// What the log says of its latest writer.
#[derive(Clone, Debug, Default)]
pub(super) struct Writer {
    pub epoch: u32,
    pub boot_id: String,
    /// It ended cleanly, and nothing came after.
    pub closed: bool,
}

/// Offsets of a queue that its writer may have shown before they were durable.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reserved {
    pub until: u64,
    /// Where the record of it stands.
    pub position: u64,
}

#[derive(Debug, Default)]
struct Topics {
    by_name: HashMap<TopicName, Arc<Topic>>,
    by_id: HashMap<TopicId, Arc<Topic>>,
    /// Queues of topics whose own record stands further on in the log. At recovery only.
    unknown: HashMap<TopicId, Vec<Arc<Queue>>>,
    /// At recovery only.
    deleted: HashSet<TopicId>,
}

#[derive(Debug, Default)]
struct Groups {
    by_name: HashMap<GroupName, Arc<Group>>,
    by_id: HashMap<GroupId, Arc<Group>>,
    /// Progress of groups whose own record stands further on in the log. At recovery only.
    unknown: HashMap<GroupId, Progress>,
    /// At recovery only.
    deleted: HashSet<GroupId>,
}

/// In the order of topics, so that what belongs to one is found without looking at all.
type Progress = Arc<RwLock<BTreeMap<QueueKey, Committed>>>;

impl Tables {
    pub fn topic(&self, name: &TopicName) -> Option<Arc<Topic>> {
        self.topics.read().by_name.get(name).cloned()
    }

    pub fn topic_by_id(&self, id: TopicId) -> Option<Arc<Topic>> {
        self.topics.read().by_id.get(&id).cloned()
    }

    pub fn topics(&self) -> Vec<Arc<Topic>> {
        self.topics.read().by_id.values().cloned().collect()
    }

    pub fn group(&self, name: &GroupName) -> Option<Arc<Group>> {
        self.groups.read().by_name.get(name).cloned()
    }

    pub fn group_by_id(&self, id: GroupId) -> Option<Arc<Group>> {
        self.groups.read().by_id.get(&id).cloned()
    }

    pub fn groups(&self) -> Vec<Arc<Group>> {
        self.groups.read().by_id.values().cloned().collect()
    }

    /// Numbers of topics and groups.
    pub fn counts(&self) -> (u64, u64) {
        (self.topics.read().by_id.len() as u64, self.groups.read().by_id.len() as u64)
    }

    /// The queue, also one that was taken away.
    pub fn queue(&self, key: QueueKey) -> Option<Arc<Queue>> {
        let topics = self.topics.read();
        topics.by_id.get(&key.topic)?.all_queues().nth(key.queue as usize).cloned()
    }

    /// As [`Tables::queue`], also of a topic that is not known yet: its record was copied forward when
    /// retention removed the old one, and stands behind its messages now.
    pub fn queue_at_recovery(&self, key: QueueKey) -> Option<Arc<Queue>> {
        if let Some(queue) = self.queue(key) {
            return Some(queue);
        }
        let mut topics = self.topics.write();
        if topics.by_id.contains_key(&key.topic) {
            drop(topics);
            return self.retire(key);
        }
        if key.queue >= crate::model::MAX_QUEUES {
            return None;
        }
        let queues = topics.unknown.entry(key.topic).or_default();
        while queues.len() <= key.queue as usize {
            let queue = u32::try_from(queues.len()).ok()?;
            queues.push(Arc::new(Queue::new(QueueKey { topic: key.topic, queue })));
        }
        queues.get(key.queue as usize).cloned()
    }

    /// Something of the log is lost, so what is still unknown may belong to topics and groups whose records
    /// are. It is kept, under names made from their ids, with settings that let nothing go. Answers what the new
    /// writer has to say of them.
    pub fn adopt_unknown(&self, space: &IndexSpace) -> Vec<Change> {
        let mut changes = Vec::new();
        let unknown: Vec<(TopicId, u32)> = {
            let topics = self.topics.read();
            let kept = topics.unknown.iter().filter(|(id, _)| !topics.deleted.contains(id));
            let kept = kept.filter(|(_, queues)| queues.iter().any(|queue| queue.bytes() > 0));
            kept.map(|(id, queues)| (*id, u32::try_from(queues.len()).unwrap_or(u32::MAX))).collect()
        };
        for (id, queues) in unknown {
            let name = format!("recovered-topic-{}", id.0);
            let Ok(name) = TopicName::new(&name) else { continue };
            let retention = Retention { age: None, bytes: None };
            let settings = TopicSettings { queues, retention, ..TopicSettings::default() };
            let map = QueueMap { version: 1, queues };
            self.put_topic(space, id, &name, &settings, map, LogPosition(0));
            changes.push(Change::Topic { id, name, settings, map });
        }
        let unknown: Vec<GroupId> = {
            let groups = self.groups.read();
            groups.unknown.keys().filter(|id| !groups.deleted.contains(id)).copied().collect()
        };
        for id in unknown {
            let Ok(name) = GroupName::new(&format!("recovered-group-{}", id.0)) else { continue };
            let settings = GroupSettings::default();
            self.put_group(id, &name, &settings, LogPosition(0));
            changes.push(Change::Group { id, name, settings });
        }
        changes
    }

    /// The log was read to its end: what is still unknown belongs to topics and groups that are gone.
    /// Everything there is can be seen.
    pub fn recovered(&self, space: &IndexSpace) {
        let topics = &mut *self.topics.write();
        topics.deleted = HashSet::new();
        for queue in topics.unknown.drain().flat_map(|(_, queues)| queues) {
            queue.clear(space);
        }
        for topic in topics.by_id.values() {
            for queue in topic.all_queues() {
                queue.publish(queue.next());
            }
        }
        let groups = &mut *self.groups.write();
        groups.unknown.clear();
        groups.deleted = HashSet::new();
        self.complete.store(true, Ordering::Release);
        for group in groups.by_id.values() {
            group.progress.write().retain(|queue, _| topics.by_id.contains_key(&queue.topic));
        }
    }

    /// The fold. Only the order of positions counts, not how often a record is seen. Answers the topic
    /// that the change made or left, for whoever wants to tell others.
    pub fn apply(&self, space: &IndexSpace, change: &Change, position: u64) {
        let position = LogPosition(position);
        match change {
            Change::Opened { epoch, boot_id, .. } => {
                let mut writer = self.writer.write();
                if *epoch > writer.epoch {
                    *writer = Writer { epoch: *epoch, boot_id: boot_id.clone(), closed: false };
                    self.reserved.write().clear();
                }
            }
            Change::Closed => self.writer.write().closed = true,
            Change::Reserved { queue, until } => {
                let mut all = self.reserved.write();
                let reserved = all.entry(*queue).or_default();
                reserved.until = reserved.until.max(*until);
                reserved.position = reserved.position.max(position.0);
            }
            Change::Topic { id, name, settings, map } => {
                self.put_topic(space, *id, name, settings, *map, position);
            }
            Change::TopicDeleted { id } => self.delete_topic(space, *id, position),
            Change::Group { id, name, settings } => self.put_group(*id, name, settings, position),
            Change::GroupDeleted { id } => self.delete_group(*id, position),
            Change::Progress { group, offsets } => self.put_progress(*group, offsets, position),
            Change::Bounds { queue, start, end, .. } => {
                self.put_bounds(space, *queue, *start, *end, position)
            }
            Change::Trimmed { position } => self.set_trimmed(*position),
        }
    }

    /// What the log says of its latest writer.
    pub fn writer(&self) -> Writer {
        self.writer.read().clone()
    }

    /// What the latest writer has reserved of a queue.
    pub fn reserved(&self, queue: QueueKey) -> Option<Reserved> {
        self.reserved.read().get(&queue).copied()
    }

    /// Up to where retention may have removed the log. What is missing behind it was lost.
    pub fn trimmed(&self) -> u64 {
        self.trimmed.load(Ordering::Acquire)
    }

    pub fn set_trimmed(&self, position: u64) {
        self.trimmed.fetch_max(position, Ordering::AcqRel);
    }

    /// What the latest writer has reserved with records at or behind `since`.
    pub fn reserved_since(&self, since: u64) -> Vec<(QueueKey, Reserved)> {
        let all = self.reserved.read();
        all.iter().filter(|(_, at)| at.position >= since).map(|(&queue, &at)| (queue, at)).collect()
    }

    /// From a snapshot.
    pub fn restore_writer(&self, writer: Writer, reserved: HashMap<QueueKey, Reserved>) {
        *self.writer.write() = writer;
        *self.reserved.write() = reserved;
    }

    /// A new topic, with the queues that its maker holds; or one from a snapshot.
    pub fn insert_topic(&self, topic: Arc<Topic>) {
        let mut topics = self.topics.write();
        topics.by_name.insert(topic.name.clone(), Arc::clone(&topic));
        topics.by_id.insert(topic.id, topic);
    }

    /// A new group, or one from a snapshot.
    pub fn insert_group(&self, group: Arc<Group>) {
        let mut groups = self.groups.write();
        groups.by_name.insert(group.name.clone(), Arc::clone(&group));
        groups.by_id.insert(group.id, group);
    }

    fn put_topic(
        &self,
        space: &IndexSpace,
        id: TopicId,
        name: &TopicName,
        settings: &TopicSettings,
        map: QueueMap,
        position: LogPosition,
    ) {
        let mut topics = self.topics.write();
        let known = topics.by_id.get(&id);
        if known.is_some_and(|known| known.position >= position) {
            return;
        }
        let known: Option<Vec<_>> = known.map(|known| known.all_queues().cloned().collect());
        let mut queues = known.or_else(|| topics.unknown.remove(&id)).unwrap_or_default();
        while queues.len() < settings.queues as usize {
            let queue = u32::try_from(queues.len()).unwrap_or(u32::MAX);
            queues.push(Arc::new(Queue::new(QueueKey { topic: id, queue })));
        }
        let retired = queues.split_off(settings.queues as usize);
        for queue in &retired {
            queue.touch(position.0);
            queue.set_start(space, queue.next());
        }
        let topic = Arc::new(Topic {
            id,
            name: name.clone(),
            settings: settings.clone(),
            map,
            queues,
            position,
            retired,
        });
        topics.by_id.insert(id, Arc::clone(&topic));
        // A deleted life of the name may be seen again while recovery replays; the younger one stays.
        let younger = topics.by_name.get(name).is_some_and(|other| other.id > id);
        if !younger {
            topics.by_name.insert(name.clone(), topic);
        }
    }

    fn delete_topic(&self, space: &IndexSpace, id: TopicId, position: LogPosition) {
        let gone = {
            let mut topics = self.topics.write();
            if !self.complete.load(Ordering::Acquire) {
                topics.deleted.insert(id);
            }
            for queue in topics.unknown.remove(&id).into_iter().flatten() {
                queue.clear(space);
            }
            let Some(topic) = topics.by_id.get(&id).filter(|topic| topic.position < position).cloned() else {
                return;
            };
            topics.by_id.remove(&id);
            if topics.by_name.get(&topic.name).is_some_and(|named| named.id == id) {
                topics.by_name.remove(&topic.name);
            }
            topic
        };
        self.gone.lock().push((position.0, Gone::Topic(id)));
        for queue in gone.all_queues() {
            queue.clear(space);
        }
        let key = |queue| QueueKey { topic: id, queue };
        for group in self.groups() {
            group.progress.write().extract_if(key(0)..=key(u32::MAX), |_, _| true).for_each(drop);
        }
        let mut reserved = self.reserved.write();
        for queue in gone.all_queues() {
            reserved.remove(&queue.key());
        }
    }

    /// What was deleted by records at or behind `since`, or at least since the newest snapshot.
    pub fn gone(&self, since: u64) -> Vec<Gone> {
        self.gone.lock().iter().filter(|(position, _)| *position >= since).map(|(_, gone)| *gone).collect()
    }

    /// A snapshot without what was deleted before `position` is durable.
    pub fn forget_gone(&self, position: u64) {
        self.gone.lock().retain(|(at, _)| *at >= position);
    }

    fn put_group(&self, id: GroupId, name: &GroupName, settings: &GroupSettings, position: LogPosition) {
        let mut groups = self.groups.write();
        let known = groups.by_id.get(&id);
        if known.is_some_and(|known| known.position >= position) {
            return;
        }
        let known = known.map(|known| Arc::clone(&known.progress));
        let progress = known.or_else(|| groups.unknown.remove(&id)).unwrap_or_default();
        let group =
            Arc::new(Group { id, name: name.clone(), settings: settings.clone(), position, progress });
        groups.by_id.insert(id, Arc::clone(&group));
        if groups.by_name.get(name).is_none_or(|other| other.id <= id) {
            groups.by_name.insert(name.clone(), group);
        }
    }

    fn delete_group(&self, id: GroupId, position: LogPosition) {
        let mut groups = self.groups.write();
        if !self.complete.load(Ordering::Acquire) {
            groups.deleted.insert(id);
        }
        groups.unknown.remove(&id);
        let Some(group) = groups.by_id.get(&id).filter(|group| group.position < position).cloned() else {
            return;
        };
        groups.by_id.remove(&id);
        if groups.by_name.get(&group.name).is_some_and(|named| named.id == id) {
            groups.by_name.remove(&group.name);
        }
        self.gone.lock().push((position.0, Gone::Group(id)));
    }

    fn put_progress(&self, id: GroupId, offsets: &[(QueueKey, u64)], position: LogPosition) {
        let known = self.groups.read().by_id.get(&id).map(|group| Arc::clone(&group.progress));
        let progress =
            known.unwrap_or_else(|| Arc::clone(self.groups.write().unknown.entry(id).or_default()));
        let mut progress = progress.write();
        for &(queue, offset) in offsets {
            let committed = progress.entry(queue).or_insert(Committed { offset, position });
            if committed.position <= position {
                *committed = Committed { offset, position };
            }
        }
    }

    fn put_bounds(&self, space: &IndexSpace, key: QueueKey, start: u64, end: u64, position: LogPosition) {
        let Some(queue) = self.queue_at_recovery(key) else { return };
        if queue.bounds_position() > position.0 {
            return;
        }
        queue.touch(position.0);
        queue.set_bounds_position(position.0);
        queue.set_start(space, start);
        queue.set_end(end);
    }

    /// A queue that was taken away, known only by its bounds since retention removed the rest.
    fn retire(&self, key: QueueKey) -> Option<Arc<Queue>> {
        let mut topics = self.topics.write();
        let topic = topics.by_id.get(&key.topic).cloned()?;
        let mut retired = topic.retired.clone();
        let first = u32::try_from(topic.queues.len()).ok()?;
        let wanted = key.queue.checked_sub(first)? as usize;
        if key.queue >= crate::model::MAX_QUEUES {
            return None;
        }
        while retired.len() <= wanted {
            let queue = first + u32::try_from(retired.len()).ok()?;
            retired.push(Arc::new(Queue::new(QueueKey { topic: topic.id, queue })));
        }
        let queue = retired.get(wanted).cloned();
        let topic = Arc::new(Topic {
            id: topic.id,
            name: topic.name.clone(),
            settings: topic.settings.clone(),
            map: topic.map,
            queues: topic.queues.clone(),
            position: topic.position,
            retired,
        });
        if topics.by_name.get(&topic.name).is_some_and(|named| named.id == topic.id) {
            topics.by_name.insert(topic.name.clone(), Arc::clone(&topic));
        }
        topics.by_id.insert(topic.id, topic);
        queue
    }

    /// All index blocks in use.
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        for topic in self.topics() {
            for queue in topic.all_queues() {
                blocks.extend_from_slice(queue.index().read().blocks());
            }
        }
        blocks
    }
}
