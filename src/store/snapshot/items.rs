//! What a snapshot says, item by item. A later item of the same thing stands for an earlier one.
//!
//! | item | fields behind its number (u8) |
//! |---:|---|
//! | 1 | latest writer: epoch u32, boot id text, closed u8 |
//! | 2 | reserved: topic u64, queue u32, until u64, position u64 |
//! | 3 | topic: position u64, length u32, `Topic` record |
//! | 4 | queue: topic u64, queue u32, start u64, next u64, bytes u64, bounds position u64, n u32 blocks: first u64, length u64, place u32, class u8 |
//! | 5 | topic gone: id u64 |
//! | 6 | group: position u64, length u32, `Group` record |
//! | 7 | progress: group u64, topic u64, queue u32, offset u64, position u64 |
//! | 8 | group gone: id u64 |
//! | 9 | trimmed: position u64 |

use std::{
    collections::{BTreeMap, HashMap},
    io,
    sync::Arc,
};

use super::{
    super::{
        change::Change,
        codec::{Put, Reader},
        frame::RecordKind,
        index::{Block, QueueIndex},
        queue::Queue,
        tables::{Committed, Gone, Group, Reserved, Tables, Topic, Writer},
    },
    part::PartWriter,
};
use crate::model::{GroupId, LogPosition, MAX_QUEUES, QueueKey, TopicId};

const WRITER: u8 = 1;
const RESERVED: u8 = 2;
const TOPIC: u8 = 3;
const QUEUE: u8 = 4;
const TOPIC_GONE: u8 = 5;
const GROUP: u8 = 6;
const PROGRESS: u8 = 7;
const GROUP_GONE: u8 = 8;
const TRIMMED: u8 = 9;

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.put_u32(u32::try_from(count).unwrap_or(u32::MAX));
}

fn put_queue_key(out: &mut Vec<u8>, queue: QueueKey) {
    out.put_u64(queue.topic.0);
    out.put_u32(queue.queue);
}

fn queue_key(reader: &mut Reader<'_>) -> Option<QueueKey> {
    let (topic, queue) = (TopicId(reader.u64()?), reader.u32()?);
    (queue < MAX_QUEUES).then_some(QueueKey { topic, queue })
}

fn put_change(out: &mut Vec<u8>, change: &Change) {
    let payload = change.encode();
    put_count(out, payload.len());
    out.put(&payload);
}

fn change(reader: &mut Reader<'_>, kind: RecordKind) -> Option<Change> {
    let length = reader.u32()?;
    Change::decode(kind, reader.bytes(length as usize)?)
}

/// Writes what has changed at or behind `since`: what a record there says of, or a message there belongs
/// to. From 0 on that is everything.
pub fn write(tables: &Tables, since: u64, part: &mut PartWriter) -> io::Result<()> {
    for gone in tables.gone(since) {
        part.item(|out| match gone {
            Gone::Topic(id) => {
                out.put_u8(TOPIC_GONE);
                out.put_u64(id.0);
            }
            Gone::Group(id) => {
                out.put_u8(GROUP_GONE);
                out.put_u64(id.0);
            }
        })?;
    }
    write_writer(tables, since, part)?;
    for topic in tables.topics() {
        write_topic(&topic, since, part)?;
    }
    for group in tables.groups() {
        write_group(&group, since, part)?;
    }
    Ok(())
}

fn write_writer(tables: &Tables, since: u64, part: &mut PartWriter) -> io::Result<()> {
    let writer = tables.writer();
    part.item(|out| {
        out.put_u8(WRITER);
        out.put_u32(writer.epoch);
        out.put_text(&writer.boot_id);
        out.put_u8(u8::from(writer.closed));
        out.put_u8(TRIMMED);
        out.put_u64(tables.trimmed());
    })?;
    for (queue, reserved) in tables.reserved_since(since) {
        part.item(|out| {
            out.put_u8(RESERVED);
            put_queue_key(out, queue);
            out.put_u64(reserved.until);
            out.put_u64(reserved.position);
        })?;
    }
    Ok(())
}

fn write_topic(topic: &Topic, since: u64, part: &mut PartWriter) -> io::Result<()> {
    if topic.position.0 >= since {
        part.item(|out| {
            let (id, name, settings, map) = (topic.id, topic.name.clone(), topic.settings.clone(), topic.map);
            out.put_u8(TOPIC);
            out.put_u64(topic.position.0);
            put_change(out, &Change::Topic { id, name, settings, map });
        })?;
    }
    // A queue that nothing ever happened to comes with its topic.
    let used = |queue: &&Arc<Queue>| queue.next() > 0 || queue.bounds_position() > 0;
    for queue in topic.all_queues().filter(used).filter(|queue| queue.changed() >= since) {
        part.item(|out| put_queue(out, queue))?;
    }
    Ok(())
}

fn put_queue(out: &mut Vec<u8>, queue: &Queue) {
    // Under the index lock, so that bounds, bytes and blocks belong together. Offsets that are given out but
    // not indexed yet come with the replay.
    let index = queue.index().read();
    let start = queue.start();
    out.put_u8(QUEUE);
    put_queue_key(out, queue.key());
    out.put_u64(start);
    out.put_u64(index.end().unwrap_or(start).max(start));
    out.put_u64(queue.bytes());
    out.put_u64(queue.bounds_position());
    put_count(out, index.blocks().len());
    for block in index.blocks() {
        out.put_u64(block.first);
        out.put_u64(block.len);
        out.put_u32(block.place);
        out.put_u8(block.class);
    }
}

fn write_group(group: &Group, since: u64, part: &mut PartWriter) -> io::Result<()> {
    if group.position.0 >= since {
        part.item(|out| {
            let (id, name, settings) = (group.id, group.name.clone(), group.settings.clone());
            out.put_u8(GROUP);
            out.put_u64(group.position.0);
            put_change(out, &Change::Group { id, name, settings });
        })?;
    }
    for (queue, committed) in group.progress().into_iter().filter(|(_, at)| at.position.0 >= since) {
        part.item(|out| {
            out.put_u8(PROGRESS);
            out.put_u64(group.id.0);
            put_queue_key(out, queue);
            out.put_u64(committed.offset);
            out.put_u64(committed.position.0);
        })?;
    }
    Ok(())
}

/// Puts items together again.
#[derive(Default)]
pub struct Loader {
    writer: Writer,
    reserved: HashMap<QueueKey, Reserved>,
    topics: HashMap<TopicId, (Change, LogPosition)>,
    queues: BTreeMap<QueueKey, Arc<Queue>>,
    groups: HashMap<GroupId, (Change, LogPosition)>,
    progress: BTreeMap<(GroupId, QueueKey), Committed>,
    trimmed: u64,
}

impl Loader {
    /// Takes the items of a section; `false` when they are not as the table above says.
    pub fn section(&mut self, items: &[u8]) -> bool {
        let mut reader = Reader::new(items);
        while !reader.is_empty() {
            if self.item(&mut reader).is_none() {
                return false;
            }
        }
        true
    }

    fn item(&mut self, reader: &mut Reader<'_>) -> Option<()> {
        match reader.u8()? {
            WRITER => {
                let (epoch, boot_id, closed) = (reader.u32()?, reader.text()?.to_owned(), reader.u8()? == 1);
                // What an earlier writer had reserved does not count any more.
                if epoch != self.writer.epoch {
                    self.reserved.clear();
                }
                self.writer = Writer { epoch, boot_id, closed };
            }
            RESERVED => {
                let queue = queue_key(reader)?;
                let reserved = Reserved { until: reader.u64()?, position: reader.u64()? };
                self.reserved.insert(queue, reserved);
            }
            TOPIC => {
                let position = LogPosition(reader.u64()?);
                let topic = change(reader, RecordKind::Topic)?;
                let Change::Topic { id, .. } = topic else { return None };
                self.topics.insert(id, (topic, position));
            }
            QUEUE => {
                let queue = queue(reader)?;
                self.queues.insert(queue.key(), Arc::new(queue));
            }
            TOPIC_GONE => drop(self.topics.remove(&TopicId(reader.u64()?))),
            GROUP => {
                let position = LogPosition(reader.u64()?);
                let group = change(reader, RecordKind::Group)?;
                let Change::Group { id, .. } = group else { return None };
                self.groups.insert(id, (group, position));
            }
            PROGRESS => {
                let (group, queue) = (GroupId(reader.u64()?), queue_key(reader)?);
                let committed = Committed { offset: reader.u64()?, position: LogPosition(reader.u64()?) };
                self.progress.insert((group, queue), committed);
            }
            GROUP_GONE => drop(self.groups.remove(&GroupId(reader.u64()?))),
            TRIMMED => self.trimmed = reader.u64()?,
            _ => return None,
        }
        Some(())
    }

    /// The tables. Queues and progress of what is gone are left out.
    pub fn finish(self) -> Option<Tables> {
        let Self { writer, reserved, topics, mut queues, groups, mut progress, trimmed } = self;
        let tables = Tables::default();
        tables.set_trimmed(trimmed);
        tables.restore_writer(writer, reserved);
        for (topic, position) in topics.into_values() {
            let Change::Topic { id, name, settings, map } = topic else { return None };
            let key = |queue| QueueKey { topic: id, queue };
            let last = queues.range(key(0)..=key(u32::MAX)).next_back().map_or(0, |(key, _)| key.queue + 1);
            let all = (0..last.max(settings.queues)).map(key);
            let mut all: Vec<_> =
                all.map(|key| queues.remove(&key).unwrap_or_else(|| Arc::new(Queue::new(key)))).collect();
            let retired = all.split_off(settings.queues as usize);
            tables.insert_topic(Arc::new(Topic { id, name, settings, map, queues: all, position, retired }));
        }
        for (group, position) in groups.into_values() {
            let Change::Group { id, name, settings } = group else { return None };
            let of = |topic, queue| (id, QueueKey { topic: TopicId(topic), queue });
            let own = progress.extract_if(of(0, 0)..=of(u64::MAX, u32::MAX), |(_, queue), _| {
                tables.topic_by_id(queue.topic).is_some()
            });
            let group = Group { id, name, settings, position, progress: Arc::default() };
            group.progress.write().extend(own.map(|((_, queue), committed)| (queue, committed)));
            tables.insert_group(Arc::new(group));
        }
        Some(tables)
    }
}

fn queue(reader: &mut Reader<'_>) -> Option<Queue> {
    let key = queue_key(reader)?;
    let (start, next, bytes, bounds) = (reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?);
    let mut blocks = Vec::new();
    for _ in 0..reader.u32()? {
        let (first, len, place, class) = (reader.u64()?, reader.u64()?, reader.u32()?, reader.u8()?);
        blocks.push(Block { first, len, place, class });
    }
    blocks.shrink_to_fit();
    Some(Queue::restore(key, start, next, bytes, bounds, QueueIndex::from_blocks(blocks)?))
}
