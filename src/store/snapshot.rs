//! Snapshots: the tables as they stand at a position, so that a start reads only the log behind it.
//!
//! A cache, never believed more than the log: it is published only when everything in it is durable in
//! the log, and a damaged one is passed over. The two newest are kept.
//!
//! | bytes | field |
//! |---:|---|
//! | 8 | magic `HFSNAP` and the format's number, two digits |
//! | 8 | shard id |
//! | 8 | position: everything below is in; more may be, which does no harm |
//! | 4 | highest epoch · 8: highest store time |
//! | … | latest writer: epoch u32, boot id text, closed u8, n u32, n × reserved (topic u64, queue u32, until u64) |
//! | … | n u32 topics: length u32, `Topic` record, position u64, n u32 queues: start u64, next u64, bytes u64, bounds position u64, n u32 blocks: first u64, length u64, place u32, class u8 |
//! | … | n u32 groups: length u32, `Group` record, position u64, n u32 × progress (topic u64, queue u32, offset u64, position u64) |
//! | 4 | CRC-32C of all before |

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
};

use super::{
    change::Change,
    codec::{Put, Reader},
    disk::Disk,
    frame::RecordKind,
    index::{Block, QueueIndex},
    queue::Queue,
    recovery::snapshot_dir,
    shard::Shard,
    tables::{Committed, Group, Tables, Topic, Writer},
};
use crate::model::{LogPosition, QueueKey, TopicId};

const MAGIC: [u8; 8] = *b"HFSNAP01";
const KEPT: usize = 2;

/// What a snapshot says of the log.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    pub position: u64,
    pub epoch: u32,
    pub store_ms: u64,
}

/// Saves the tables. Runs beside the writer, which never waits for it.
pub fn save(shard: &Arc<Shard>) -> io::Result<Snapshot> {
    // What is dispatched now is in the tables below; what comes meanwhile may be, and is replayed.
    let position = shard.dispatched.load(Ordering::Acquire);
    let released = shard.space.waiting();
    let (epoch, store_ms) = {
        let inner = shard.inner.lock();
        (inner.epoch, inner.last_ms)
    };
    let snapshot = Snapshot { position, epoch, store_ms };
    let bytes = encode(&shard.tables, shard.shard_id, snapshot);
    let included = shard.inner.lock().end;
    shard.space.flush()?;
    wait_until_durable(shard, included)?;
    let dir = snapshot_dir(&shard.options);
    let path = dir.join(format!("{position:020}.snap"));
    write(&shard.disk, &dir, &path, &bytes)?;
    shard.space.recycle(released);
    Ok(snapshot)
}

fn wait_until_durable(shard: &Arc<Shard>, end: u64) -> io::Result<()> {
    if end == 0 {
        return Ok(());
    }
    shard.settled(end - 1).wait().map(|_| ()).map_err(|error| io::Error::other(error.to_string()))
}

fn write(disk: &Arc<dyn Disk>, dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    disk.create_dir_all(dir)?;
    let temporary = path.with_extension("tmp");
    match disk.remove(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = disk.create(&temporary)?;
    file.write_at(bytes, 0)?;
    file.sync_data()?;
    disk.rename(&temporary, path)?;
    disk.sync_dir(dir)?;
    for old in names(disk, dir)?.into_iter().skip(KEPT) {
        disk.remove(&dir.join(old))?;
    }
    Ok(())
}

/// Names of the snapshots, newest first.
fn names(disk: &Arc<dyn Disk>, dir: &Path) -> io::Result<Vec<String>> {
    let mut names = disk.list(dir)?;
    names.retain(|name| name.ends_with(".snap"));
    names.sort();
    names.reverse();
    Ok(names)
}

/// The snapshots in `dir`, newest first, each read when it is asked for.
pub fn load_all(
    disk: &Arc<dyn Disk>,
    dir: &Path,
    shard_id: u64,
) -> impl Iterator<Item = (PathBuf, Result<(Tables, Snapshot), String>)> {
    let names = names(disk, dir).unwrap_or_default();
    names.into_iter().map(move |name| {
        let path = dir.join(name);
        let loaded = load(disk, &path, shard_id);
        (path, loaded)
    })
}

fn load(disk: &Arc<dyn Disk>, path: &Path, shard_id: u64) -> Result<(Tables, Snapshot), String> {
    let read = || {
        let file = disk.open(path)?;
        let mut bytes = vec![0; usize::try_from(file.len()?).map_err(io::Error::other)?];
        file.read_at(&mut bytes, 0)?;
        Ok::<_, io::Error>(bytes)
    };
    let bytes = read().map_err(|error| error.to_string())?;
    let (body, crc) = bytes.split_at_checked(bytes.len().saturating_sub(4)).unwrap_or((&[], &[]));
    if Reader::new(crc).u32() != Some(crc32c::crc32c(body)) {
        return Err("its checksum does not fit".into());
    }
    let mut reader = Reader::new(body);
    if reader.array() != Some(MAGIC) || reader.u64() != Some(shard_id) {
        return Err("it is of another format or shard".into());
    }
    decode(&mut reader).ok_or_else(|| "it cannot be understood".into())
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.put_u32(u32::try_from(count).unwrap_or(u32::MAX));
}

fn put_queue(out: &mut Vec<u8>, queue: QueueKey) {
    out.put_u64(queue.topic.0);
    out.put_u32(queue.queue);
}

fn queue_key(reader: &mut Reader<'_>) -> Option<QueueKey> {
    Some(QueueKey { topic: TopicId(reader.u64()?), queue: reader.u32()? })
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

fn encode(tables: &Tables, shard_id: u64, snapshot: Snapshot) -> Vec<u8> {
    let mut out = Vec::new();
    out.put(&MAGIC);
    out.put_u64(shard_id);
    out.put_u64(snapshot.position);
    out.put_u32(snapshot.epoch);
    out.put_u64(snapshot.store_ms);
    let writer = tables.writer();
    out.put_u32(writer.epoch);
    out.put_text(&writer.boot_id);
    out.put_u8(u8::from(writer.closed));
    put_count(&mut out, writer.reserved.len());
    for (queue, until) in writer.reserved {
        put_queue(&mut out, queue);
        out.put_u64(until);
    }
    let topics = tables.topics();
    put_count(&mut out, topics.len());
    for topic in topics {
        put_topic(&mut out, &topic);
    }
    let groups = tables.groups();
    put_count(&mut out, groups.len());
    for group in groups {
        let (id, name, settings) = (group.id, group.name.clone(), group.settings.clone());
        put_change(&mut out, &Change::Group { id, name, settings });
        out.put_u64(group.position.0);
        let progress = group.progress();
        put_count(&mut out, progress.len());
        for (queue, committed) in progress {
            put_queue(&mut out, queue);
            out.put_u64(committed.offset);
            out.put_u64(committed.position.0);
        }
    }
    let crc = crc32c::crc32c(&out);
    out.put_u32(crc);
    out
}

fn put_topic(out: &mut Vec<u8>, topic: &Topic) {
    let (id, name, settings, map) = (topic.id, topic.name.clone(), topic.settings.clone(), topic.map);
    put_change(out, &Change::Topic { id, name, settings, map });
    out.put_u64(topic.position.0);
    put_count(out, topic.all_queues().count());
    for queue in topic.all_queues() {
        // Under the index lock, so that bounds, bytes and blocks belong together. Offsets that are given
        // out but not indexed yet come with the replay.
        let index = queue.index().read();
        let start = queue.start();
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
}

fn decode(reader: &mut Reader<'_>) -> Option<(Tables, Snapshot)> {
    let snapshot = Snapshot { position: reader.u64()?, epoch: reader.u32()?, store_ms: reader.u64()? };
    let tables = Tables::default();
    let (epoch, boot_id, closed) = (reader.u32()?, reader.text()?.to_owned(), reader.u8()? == 1);
    let mut writer = Writer { epoch, boot_id, closed, ..Writer::default() };
    for _ in 0..reader.u32()? {
        writer.reserved.insert(queue_key(reader)?, reader.u64()?);
    }
    tables.restore_writer(writer);
    for _ in 0..reader.u32()? {
        tables.insert_topic(Arc::new(topic(reader)?));
    }
    for _ in 0..reader.u32()? {
        tables.insert_group(Arc::new(group(reader)?));
    }
    reader.is_empty().then_some((tables, snapshot))
}

fn topic(reader: &mut Reader<'_>) -> Option<Topic> {
    let Change::Topic { id, name, settings, map } = change(reader, RecordKind::Topic)? else { return None };
    let position = LogPosition(reader.u64()?);
    let mut queues = Vec::new();
    for number in 0..reader.u32()? {
        let key = QueueKey { topic: id, queue: number };
        let (start, next, bytes, bounds) = (reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?);
        let mut blocks = Vec::new();
        for _ in 0..reader.u32()? {
            let (first, len, place, class) = (reader.u64()?, reader.u64()?, reader.u32()?, reader.u8()?);
            blocks.push(Block { first, len, place, class });
        }
        let index = QueueIndex::from_blocks(blocks)?;
        queues.push(Arc::new(Queue::restore(key, start, next, bytes, bounds, index)));
    }
    if queues.len() < settings.queues as usize {
        return None;
    }
    let retired = queues.split_off(settings.queues as usize);
    Some(Topic { id, name, settings, map, queues, position, retired })
}

fn group(reader: &mut Reader<'_>) -> Option<Group> {
    let Change::Group { id, name, settings } = change(reader, RecordKind::Group)? else { return None };
    let position = LogPosition(reader.u64()?);
    let group = Group { id, name, settings, position, progress: Arc::default() };
    {
        let mut progress = group.progress.write();
        for _ in 0..reader.u32()? {
            let queue = queue_key(reader)?;
            let (offset, position) = (reader.u64()?, LogPosition(reader.u64()?));
            progress.insert(queue, Committed { offset, position });
        }
    }
    Some(group)
}
