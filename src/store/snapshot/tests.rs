//! Chains of parts: what they save, and what is left when some of them are damaged.

use std::{path::Path, sync::Arc};

use super::{
    super::{
        Purpose, QueueMap, Store,
        change::Change,
        disk::{CrashKeeps, Disk, MemoryDisk},
        index::{Entry, IndexSpace},
        tests::{commit, create, delete, found_by_key, name, open, options, read_all, send, state},
    },
    *,
};
use crate::model::{
    DurabilityLevel, GroupId, GroupName, GroupSettings, QueueKey, Retention, TopicId, TopicSettings,
};

const DIR: &str = "/shard/snapshots";

fn save_now(store: &Store) -> Snapshot {
    save(&store.shard, &mut store.shard.chain.lock()).unwrap()
}

fn files(disk: &Arc<dyn Disk>) -> Vec<String> {
    let mut names = names(disk, DIR.as_ref()).unwrap();
    names.reverse();
    names
}

fn bodies(n: usize) -> Vec<bytes::Bytes> {
    vec![bytes::Bytes::from_static(&[b'x'; 200]); n]
}

/// A store whose keeper leaves snapshots to the test.
fn quiet() -> super::super::Options {
    let mut options = options("/shard");
    options.snapshot_interval = std::time::Duration::from_secs(3600);
    options.segment_bytes = 1 << 20;
    options
}

/// Some state, saved in a whole part and four parts of changes; the store is killed behind them.
fn a_chain() -> (MemoryDisk, String, usize) {
    let memory = MemoryDisk::new();
    let disk: Arc<dyn Disk> = Arc::new(memory.clone());
    let store = open(quiet(), &disk).unwrap();
    let fast = TopicSettings { durability: DurabilityLevel::Async, ..TopicSettings::default() };
    let short = Retention { age: None, bytes: Some(1000) };
    for n in 0..60 {
        create(&store, &format!("t{n}"), TopicSettings::default()).unwrap();
        send(&store, &format!("t{n}"), n % 4, &bodies(3)).unwrap();
    }
    create(&store, "fast", fast).unwrap();
    create(&store, "short", TopicSettings { retention: short, ..TopicSettings::default() }).unwrap();
    commit(&store, "early", "t0", 1);
    save_now(&store);
    send(&store, "t1", 0, &bodies(20)).unwrap();
    send(&store, "fast", 0, &bodies(20)).unwrap();
    send(&store, "short", 0, &bodies(20)).unwrap();
    save_now(&store);
    delete(&store, "t2");
    commit(&store, "late", "t1", 7);
    commit(&store, "late", "t3", 1);
    save_now(&store);
    delete(&store, "t3");
    create(&store, "t2", TopicSettings::default()).unwrap();
    send(&store, "t2", 0, &bodies(1)).unwrap();
    commit(&store, "early", "t1", 2);
    save_now(&store);
    send(&store, "t1", 0, &bodies(5)).unwrap();
    save_now(&store);
    send(&store, "t4", 0, &bodies(2)).unwrap();
    let expected = state(&store);
    let found = found_by_key(&store).len();
    let killed = memory.after_crash(CrashKeeps::Everything);
    store.close();
    (killed, expected, found)
}

#[test]
fn what_has_not_changed_is_not_saved_again() {
    let (memory, ..) = a_chain();
    let disk: Arc<dyn Disk> = Arc::new(memory);
    let sizes: Vec<(bool, u64)> = files(&disk)
        .iter()
        .map(|name| (name.ends_with(WHOLE), disk.open(&Path::new(DIR).join(name)).unwrap().len().unwrap()))
        .collect();
    let (&(first_is_whole, whole), parts) = sizes.split_first().unwrap();
    assert!(first_is_whole, "{sizes:?}");
    assert_eq!(parts.len(), 4, "{sizes:?}");
    assert!(parts.iter().all(|&(is_whole, bytes)| !is_whole && bytes < whole / 8), "{sizes:?}");
}

#[test]
fn a_chain_of_parts_stands_for_the_whole_and_any_damaged_part_costs_only_reading() {
    let (memory, expected, found) = a_chain();
    let whole: Arc<dyn Disk> = Arc::new(memory.clone());
    let names = files(&whole);
    for damaged in [None].into_iter().chain((0..names.len()).map(Some)) {
        for missing in [false, true] {
            let disk: Arc<dyn Disk> = Arc::new(memory.after_crash(CrashKeeps::Everything));
            if let Some(name) = damaged.and_then(|at| names.get(at)) {
                let path = Path::new(DIR).join(name);
                if missing {
                    disk.remove(&path).unwrap();
                } else {
                    let file = disk.open(&path).unwrap();
                    file.write_at(b"?", file.len().unwrap() / 2).unwrap();
                }
            }
            let store = open(quiet(), &disk).unwrap();
            assert_eq!(state(&store), expected, "damaged: {damaged:?}, missing: {missing}");
            assert_eq!(store.status().damage_total, 0);
            assert_eq!(found_by_key(&store).len(), found);
            // It goes on from what it was opened with.
            send(&store, "t5", 0, &bodies(2)).unwrap();
            save_now(&store);
            let (after, rest) = (state(&store), read_all(&store, "t1", 0));
            store.close();
            let store = open(quiet(), &disk).unwrap();
            assert_eq!(state(&store), after, "damaged: {damaged:?}, missing: {missing}, once more");
            assert_eq!(read_all(&store, "t1", 0), rest);
            store.close();
        }
    }
}

#[test]
fn changes_that_outgrow_the_whole_are_saved_whole_and_old_chains_go() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    let store = open(quiet(), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    for _ in 0..40 {
        send(&store, "t", 0, &bodies(10)).unwrap();
        save_now(&store);
    }
    let names = files(&disk);
    assert_eq!(names.iter().filter(|name| name.ends_with(WHOLE)).count(), 2, "{names:?}");
    assert!(names[0].ends_with(WHOLE), "{names:?}");
    let expected = state(&store);
    store.close();
    let store = open(quiet(), &disk).unwrap();
    assert_eq!(state(&store), expected);
    store.close();
}

#[test]
fn sections_of_many_topics_are_read_back_one_by_one() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    let mut options = quiet();
    options.segment_bytes = 16 << 20;
    let store = open(options.clone(), &disk).unwrap();
    let made = store.transact::<_, ()>(Purpose::State, |tx| {
        (0..4000).for_each(|n| {
            drop(tx.create_topic(name(&format!("topic-with-a-name-{n}")), TopicSettings::default()))
        });
        Ok(())
    });
    made.unwrap().1.wait().unwrap();
    save_now(&store);
    let newest = files(&disk).pop().unwrap();
    let bytes = disk.open(&Path::new(DIR).join(newest)).unwrap().len().unwrap();
    assert!(bytes > 256 << 10, "one section alone: {bytes}");
    let expected = state(&store);
    store.close();
    let store = open(options, &disk).unwrap();
    assert_eq!(state(&store), expected);
    store.close();
}

#[test]
fn the_bytes_on_disk_are_those_of_format_1() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    disk.create_dir_all(DIR.as_ref()).unwrap();
    let path = Path::new(DIR).join("golden");
    let snapshot = Snapshot { position: 4096, epoch: 3, store_ms: 1_700_000_000_000 };
    let header = PartHeader { shard_id: 7, snapshot, previous: Some(48) };
    let mut writer = PartWriter::new(disk.create(&path).unwrap(), &header).unwrap();
    let space = IndexSpace::open(Arc::clone(&disk), "/index".into()).unwrap();
    let tables = Tables::default();
    let queue = |queue| QueueKey { topic: TopicId(48), queue };
    let settings = TopicSettings { queues: 2, ..TopicSettings::default() };
    let map = QueueMap { version: 1, queues: 2 };
    let topic =
        |id, topic| Change::Topic { id: TopicId(id), name: name(topic), settings: settings.clone(), map };
    let group = |id, group| Change::Group {
        id: GroupId(id),
        name: GroupName::new(group).unwrap(),
        settings: GroupSettings::default(),
    };
    let changes = [
        Change::Opened { epoch: 3, boot_id: "boot".into(), version: String::new() },
        topic(48, "orders"),
        topic(96, "gone"),
        group(144, "billing"),
        group(192, "gone"),
        Change::Reserved { queue: queue(0), until: 1024 },
        Change::Progress { group: GroupId(144), offsets: vec![(queue(1), 1)] },
        Change::Bounds { queue: queue(1), start: 1, end: 2, lost: Vec::new() },
        Change::TopicDeleted { id: TopicId(96) },
        Change::GroupDeleted { id: GroupId(192) },
        Change::Trimmed { position: 48 },
    ];
    for (position, change) in (48..).step_by(48).zip(&changes) {
        tables.apply(&space, change, position);
    }
    let entry = Entry { position: 960, length: 300, tag_hash: 5, store_ms: 1_700_000_000_000 };
    tables.queue(queue(0)).unwrap().replay(&space, 1, &entry, false).unwrap();
    items::write(&tables, 0, &mut writer).unwrap();
    writer.finish().unwrap();
    let file = disk.open(&path).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/snapshot-v1.bin");
    if std::env::var_os("HOLDFAST_WRITE_GOLDEN").is_some() {
        std::fs::write(golden, &bytes).unwrap();
    }
    assert_eq!(bytes, std::fs::read(golden).unwrap());
}
