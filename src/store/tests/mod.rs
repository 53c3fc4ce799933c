//! The store as its users see it, on a real directory and on disks that crash.

use std::{fmt::Write, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;

use super::{disk::*, *};
use crate::{
    model::{DurabilityLevel, GroupSettings, TopicSettings},
    runtime::{ManualClock, SystemClock},
};

#[derive(Default)]
pub(super) struct Heard(pub Mutex<Vec<(QueueKey, u64)>>);

impl News for Heard {
    fn grew(&self, ends: &[(QueueKey, u64)]) {
        self.0.lock().extend_from_slice(ends);
    }
    fn deleted(&self, _topic: TopicId) {}
}

pub(super) fn options(dir: &str) -> Options {
    let mut options = Options::new(dir, "test");
    options.first_segment_bytes = 64 << 10;
    options.segment_bytes = 64 << 10;
    options.disk_floor_bytes = 0;
    options.recent_bytes = 16 << 10;
    options.boot_id = "boot".into();
    options
}

pub(super) fn open(options: Options, disk: &Arc<dyn Disk>) -> Result<Store, OpenError> {
    let meter = opentelemetry::global::meter("test");
    Store::open(options, Arc::clone(disk), Arc::new(SystemClock::new()), Arc::new(Heard::default()), &meter)
}

/// As [`open`], with a clock that stands still.
pub(super) fn open_at(
    options: Options,
    disk: &Arc<dyn Disk>,
    clock: &Arc<ManualClock>,
) -> Result<Store, OpenError> {
    let meter = opentelemetry::global::meter("test");
    let clock: Arc<dyn Clock> = Arc::clone(clock) as Arc<dyn Clock>;
    Store::open(options, Arc::clone(disk), clock, Arc::new(Heard::default()), &meter)
}

pub(super) fn name(name: &str) -> TopicName {
    TopicName::new(name).unwrap()
}

pub(super) fn create(store: &Store, topic: &str, settings: TopicSettings) -> Result<Arc<Topic>, StoreError> {
    let made = store.transact::<_, ()>(Purpose::State, |tx| Ok(tx.create_topic(name(topic), settings)));
    match made {
        Ok((topic, pending)) => pending.wait().map(|_| topic),
        Err(TransactError::Store(error)) => Err(error),
        Err(TransactError::Decided(())) => unreachable!(),
    }
}

/// Sends bodies as one batch; the offset of the first.
pub(super) fn send(store: &Store, topic: &str, queue: u32, bodies: &[Bytes]) -> Result<u64, StoreError> {
    let topic = store.topic(&name(topic)).ok_or(StoreError::Stopping)?;
    let queue = &topic.queues[queue as usize];
    let sent = store.transact::<_, ()>(Purpose::Send, |tx| {
        let messages = bodies.iter().map(|body| NewMessage {
            parts: [body, &[]],
            crc: crc32c::crc32c(body),
            later_bytes: 0,
            tag_hash: 0,
            lookups: &[7],
        });
        Ok(tx.send(&topic, queue, messages, |_, place, into| {
            into.extend_from_slice(&place.offset.to_le_bytes());
        }))
    });
    match sent {
        Ok((place, pending)) => pending.wait().map(|_| place.offset),
        Err(TransactError::Store(error)) => Err(error),
        Err(TransactError::Decided(())) => unreachable!(),
    }
}

/// Commits progress on a topic's first queue, as a group that is made if need be.
pub(super) fn commit(store: &Store, group: &str, topic: &str, offset: u64) {
    let key = store.topic(&name(topic)).unwrap().queues[0].key();
    let group = GroupName::new(group).unwrap();
    let committed = store.transact::<_, ()>(Purpose::State, |tx| {
        let group =
            tx.group(&group).unwrap_or_else(|| tx.create_group(group.clone(), GroupSettings::default()));
        tx.commit(&group, &[(key, offset)]);
        Ok(())
    });
    committed.unwrap().1.wait().unwrap();
}

pub(super) fn delete(store: &Store, topic: &str) {
    let topic = store.topic(&name(topic)).unwrap();
    let deleted = store.transact::<_, ()>(Purpose::State, |tx| {
        tx.delete_topic(&topic);
        Ok(())
    });
    deleted.unwrap().1.wait().unwrap();
}

pub(super) fn delete_derived(disk: &Arc<dyn Disk>) {
    for dir in ["/shard/snapshots", "/shard/index", "/shard/keys"].map(std::path::Path::new) {
        for file in disk.list(dir).unwrap() {
            disk.remove(&dir.join(file)).unwrap();
        }
    }
}

pub(super) const ALL: ScanLimits = ScanLimits { messages: 10_000, bytes: usize::MAX, entries: 100_000 };

/// All bodies of a queue from its start, with their offsets.
pub(super) fn read_all(store: &Store, topic: &str, queue: u32) -> Vec<(u64, Bytes)> {
    let Some(topic) = store.topic(&name(topic)) else { return Vec::new() };
    let queue = &topic.queues[queue as usize];
    let mut from = queue.bounds().0;
    let mut found = Vec::new();
    loop {
        let scan = store.scan(queue, from, ALL, |_| true);
        for fetched in store.fetch(queue.key(), &scan.slots).unwrap() {
            let payload = fetched.payload.expect("damaged");
            let (body, sealed) = payload.split_at(payload.len() - 8);
            assert_eq!(sealed, fetched.offset.to_le_bytes());
            found.push((fetched.offset, Bytes::copy_from_slice(body)));
        }
        from = scan.lost.map_or(scan.next, |(_, end)| end);
        if from >= scan.end {
            return found;
        }
    }
}

/// All that is folded from the log, as text.
pub(super) fn state(store: &Store) -> String {
    let tables = &store.shard.tables;
    let mut topics = tables.topics();
    topics.sort_by_key(|topic| topic.id);
    let mut groups = tables.groups();
    groups.sort_by_key(|group| group.id);
    let mut out = String::new();
    for topic in topics {
        let _ = writeln!(out, "{:?} {} {:?} {:?}", topic.id, topic.name.as_str(), topic.settings, topic.map);
        for queue in topic.all_queues() {
            let holes = queue.index().read().holes(0);
            let (key, bounds, bytes) = (queue.key(), queue.bounds(), queue.bytes());
            let _ = writeln!(out, "  {key:?} {bounds:?} next {} bytes {bytes} {holes:?}", queue.next());
        }
    }
    for group in groups {
        let progress: Vec<_> = group.progress().into_iter().map(|(queue, at)| (queue, at.offset)).collect();
        let _ = writeln!(out, "{:?} {} {:?} {progress:?}", group.id, group.name.as_str(), group.settings);
    }
    out
}

mod crash;
mod damage;
mod matrix;
mod retention;
mod trouble;

/// Topic, queue and offset of all messages that look-ups find.
pub(super) fn found_by_key(store: &Store) -> std::collections::BTreeSet<(TopicId, u32, u64)> {
    let mut found = std::collections::BTreeSet::new();
    let mut before = u64::MAX;
    let more = store.lookup(7, usize::MAX - 1, |one| {
        assert!(one.place.position.0 < before, "not newest first");
        before = one.place.position.0;
        found.insert((one.topic, one.place.queue, one.place.offset))
    });
    assert!(!more.unwrap(), "something was found twice");
    found
}

/// Look-ups find what reading finds.
pub(super) fn assert_found_by_key(store: &Store, topics: &[&str], what: &str) {
    let found = found_by_key(store);
    for topic in topics.iter().filter_map(|topic| store.topic(&name(topic))) {
        for queue in &topic.queues {
            let number = queue.key().queue;
            for (offset, _) in read_all(store, topic.name.as_str(), number) {
                assert!(found.contains(&(topic.id, number, offset)), "{what}: {number} at {offset}");
            }
        }
    }
}

fn temp() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard").display().to_string();
    (dir, path)
}

fn bodies(n: usize, size: usize, salt: usize) -> Vec<Bytes> {
    (0..n).map(|i| Bytes::from(format!("{salt}-{i}-{}", "x".repeat(size)))).collect()
}

#[test]
fn what_was_sent_is_found_after_a_restart_at_the_same_offsets() {
    let (_dir, path) = temp();
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let mut sent = Vec::new();
    for round in 0..3 {
        let store = open(options(&path), &disk).unwrap();
        if round == 0 {
            create(&store, "t", TopicSettings::default()).unwrap();
            let fast = TopicSettings { durability: DurabilityLevel::Async, ..TopicSettings::default() };
            create(&store, "fast", fast).unwrap();
        }
        assert_eq!(read_all(&store, "t", 1), sent, "round {round}");
        for i in 0..200 {
            for topic in ["t", "fast"] {
                let bodies = bodies(1 + i % 5, 300, i);
                let first = send(&store, topic, 1, &bodies).unwrap();
                if topic == "t" {
                    sent.extend((first..).zip(bodies));
                }
            }
        }
        assert_eq!(read_all(&store, "t", 1), sent, "round {round}");
        assert_eq!(read_all(&store, "fast", 1).len(), sent.len());
        store.close();
        if round == 1 {
            std::fs::remove_dir_all(format!("{path}/snapshots")).ok();
            std::fs::remove_dir_all(format!("{path}/index")).unwrap();
            std::fs::remove_dir_all(format!("{path}/keys")).ok();
        }
    }
}

#[test]
fn a_second_process_on_the_directory_is_refused() {
    let (_dir, path) = temp();
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let store = open(options(&path), &disk).unwrap();
    let error = open(options(&path), &disk).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("in use by another process"), "{error}");
    store.close();
    open(options(&path), &disk).unwrap().close();
}

#[test]
fn progress_and_groups_survive_and_old_topics_are_gone() {
    let (_dir, path) = temp();
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let store = open(options(&path), &disk).unwrap();
    let topic = create(&store, "t", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(10, 10, 0)).unwrap();
    let key = topic.queues[0].key();
    let group = GroupName::new("g").unwrap();
    let (_, pending) = store
        .transact::<_, ()>(Purpose::State, |tx| {
            let group = tx.create_group(group.clone(), GroupSettings::default());
            tx.commit(&group, &[(key, 4)]);
            Ok(())
        })
        .unwrap();
    pending.wait().unwrap();
    store.close();
    let store = open(options(&path), &disk).unwrap();
    assert_eq!(store.group(&group).unwrap().committed(key).map(|c| c.offset), Some(4));
    let (_, pending) = store
        .transact::<_, ()>(Purpose::State, |tx| {
            tx.delete_topic(&topic);
            Ok(())
        })
        .unwrap();
    pending.wait().unwrap();
    assert!(store.topic(&name("t")).is_none());
    let again = create(&store, "t", TopicSettings::default()).unwrap();
    assert_ne!(again.id, topic.id);
    store.close();
    let store = open(options(&path), &disk).unwrap();
    let found = store.topic(&name("t")).unwrap();
    assert_eq!(found.id, again.id);
    assert_eq!(found.queues[0].bounds(), (0, 0));
    assert_eq!(store.group(&group).unwrap().progress(), vec![]);
    store.close();
}

#[test]
fn old_messages_go_and_what_is_left_can_be_rebuilt_from_the_log() {
    let (_dir, path) = temp();
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let mut quick = options(&path);
    quick.retention_interval = Duration::from_millis(50);
    quick.snapshot_interval = Duration::from_millis(50);
    let store = open(quick.clone(), &disk).unwrap();
    let settings = TopicSettings::default();
    let small = TopicSettings {
        retention: crate::model::Retention { age: None, bytes: Some(100_000) },
        ..TopicSettings::default()
    };
    create(&store, "small", small).unwrap();
    let keep = create(&store, "keep", settings).unwrap();
    let kept = bodies(10, 100, 1);
    send(&store, "keep", 2, &kept).unwrap();
    let group = GroupName::new("g").unwrap();
    let key = keep.queues[2].key();
    let (_, pending) = store
        .transact::<_, ()>(Purpose::State, |tx| {
            let group = tx.create_group(group.clone(), GroupSettings::default());
            tx.commit(&group, &[(key, 3)]);
            Ok(())
        })
        .unwrap();
    pending.wait().unwrap();
    for i in 0..1000 {
        send(&store, "small", i % 4, &bodies(1, 1000, i as usize)).unwrap();
    }
    let wait = std::time::Instant::now();
    while store.status().log_start == 0 {
        assert!(wait.elapsed() < Duration::from_secs(20), "nothing was removed: {:?}", store.status());
        std::thread::sleep(Duration::from_millis(10));
    }
    let expected: Vec<_> = (0..).zip(kept).collect();
    assert_eq!(read_all(&store, "keep", 2), expected);
    let rest: Vec<_> = (0..4).map(|queue| read_all(&store, "small", queue)).collect();
    store.close();
    for derived in ["snapshots", "index", "keys"] {
        std::fs::remove_dir_all(format!("{path}/{derived}")).ok();
    }
    let store = open(options(&path), &disk).unwrap();
    assert_eq!(store.status().damage, vec![]);
    assert_eq!(read_all(&store, "keep", 2), expected);
    for (queue, rest) in rest.iter().enumerate() {
        let found = read_all(&store, "small", queue as u32);
        assert!(rest.ends_with(&found) || found.ends_with(rest), "queue {queue}");
    }
    assert_eq!(store.group(&group).unwrap().committed(key).map(|c| c.offset), Some(3));
    store.close();
}

#[test]
fn a_frame_that_moves_to_the_next_segment_is_whole_there() {
    // Whatever is left of the segment when the frame turns out not to fit.
    for before in (0..56).map(|n| 50_000 + 257 * n) {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
        let store = open(options("/shard"), &disk).unwrap();
        let topic = create(&store, "t", TopicSettings::default()).unwrap();
        send(&store, "t", 0, &bodies(1, before, 0)).unwrap();
        let (first, second) = (bodies(3, 1500, 1), bodies(4, 2000, 2));
        let sent = store.transact::<_, ()>(Purpose::State, |tx| {
            let group = tx.create_group(GroupName::new("g").unwrap(), GroupSettings::default());
            tx.commit(&group, &[(topic.queues[0].key(), 1)]);
            for (queue, batch) in topic.queues.iter().zip([&first, &second]) {
                let messages = batch.iter().map(|body| NewMessage {
                    parts: [body, &[]],
                    crc: crc32c::crc32c(body),
                    later_bytes: 0,
                    tag_hash: 0,
                    lookups: &[7],
                });
                tx.send(&topic, queue, messages, |_, place, into| {
                    into.extend_from_slice(&place.offset.to_le_bytes());
                });
            }
            Ok(())
        });
        sent.unwrap().1.wait().unwrap();
        let expected = |store: &Store| {
            let read =
                |queue| read_all(store, "t", queue).into_iter().map(|(_, body)| body).collect::<Vec<_>>();
            assert_eq!((&read(0)[1..], &read(1)[..]), (&first[..], &second[..]), "{before}");
            assert_eq!(found_by_key(store).len(), 8, "{before}");
        };
        expected(&store);
        store.close();
        delete_derived(&disk);
        let store = open(options("/shard"), &disk).unwrap();
        assert_eq!(store.status().damage, vec![], "{before}");
        expected(&store);
        let group = store.group(&GroupName::new("g").unwrap()).unwrap();
        assert_eq!(group.committed(topic.queues[0].key()).map(|c| c.offset), Some(1), "{before}");
        store.close();
    }
}

#[test]
fn every_message_is_found_by_key_in_memory_in_runs_and_rebuilt_from_the_log() {
    let (memory, mut quick) = (MemoryDisk::new(), options("/shard"));
    quick.key_run_bytes = 16 << 10;
    quick.snapshot_bytes = 40 << 10;
    let disk: Arc<dyn Disk> = Arc::new(memory.clone());
    let keys = std::path::Path::new("/shard/keys");
    let store = open(quick.clone(), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    let started = std::time::Instant::now();
    let mut sent = 0;
    while sent < 200 || disk.list(keys).unwrap().is_empty() {
        send(&store, "t", sent % 4, &bodies(1, 1000, sent as usize)).unwrap();
        sent += 1;
        assert!(started.elapsed() < Duration::from_secs(20), "no run was written");
        assert_eq!(found_by_key(&store).len(), sent as usize);
    }
    let killed: Arc<dyn Disk> = Arc::new(memory.after_crash(CrashKeeps::Everything));
    store.close();
    let remove = |disk: &Arc<dyn Disk>, dir: &str, keep: usize| {
        for file in disk.list(dir.as_ref()).unwrap().into_iter().skip(keep) {
            disk.remove(&std::path::Path::new(dir).join(file)).unwrap();
        }
    };
    for (what, disk, keys_left, derived) in [
        ("killed", &killed, usize::MAX, usize::MAX),
        ("stopped", &disk, usize::MAX, usize::MAX),
        ("one run", &disk, 1, usize::MAX),
        ("no run", &disk, 0, usize::MAX),
        ("the log alone", &disk, 0, 0),
    ] {
        remove(disk, "/shard/keys", keys_left);
        remove(disk, "/shard/snapshots", derived);
        remove(disk, "/shard/index", derived);
        let store = open(quick.clone(), disk).unwrap();
        assert_eq!(found_by_key(&store).len(), sent as usize, "{what}");
        assert_found_by_key(&store, &["t"], what);
        let files = disk.list(keys).unwrap().len();
        assert!(files > 0, "{what}: memory for all of the log");
        store.close();
    }
}
