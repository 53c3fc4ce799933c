//! The plug is pulled at every change that a mixed workload makes to the disk.

use std::collections::BTreeMap;

use super::*;
use crate::model::Retention;

type Batch = (u64, Vec<Bytes>);

/// What the outside knows: acknowledged, or tried without an answer.
#[derive(Default)]
struct Known {
    /// By topic and queue: offset of the batch and its bodies.
    acknowledged: BTreeMap<(&'static str, u32), Vec<Batch>>,
    /// Bodies that were sent without an answer, a batch each.
    unanswered: Vec<Vec<Bytes>>,
    committed: u64,
    commit_tried: u64,
    topic_made: BTreeMap<&'static str, bool>,
}

const TOPICS: [&str; 3] = ["durable", "fast", "short"];

fn quick(boot: &str) -> Options {
    let mut options = options("/shard");
    options.retention_interval = Duration::from_millis(3);
    options.snapshot_interval = Duration::from_millis(7);
    options.flush_interval = Duration::from_millis(5);
    options.key_run_bytes = 64 << 10;
    options.boot_id = boot.into();
    options
}

fn settings(topic: &str) -> TopicSettings {
    let durability = if topic == "fast" { DurabilityLevel::Async } else { DurabilityLevel::Sync };
    let bytes = (topic == "short").then_some(20_000);
    TopicSettings {
        queues: 2,
        durability,
        retention: Retention { age: None, bytes },
        ..TopicSettings::default()
    }
}

fn work(disk: &Arc<dyn Disk>, known: &mut Known) -> Result<(), String> {
    let store = open(quick("boot"), disk).map_err(|error| error.to_string())?;
    let outcome = steps(&store, known);
    store.close();
    outcome.map_err(|error| error.to_string())
}

fn steps(store: &Store, known: &mut Known) -> Result<(), StoreError> {
    for topic in TOPICS {
        known.topic_made.insert(topic, false);
        create(store, topic, settings(topic))?;
        known.topic_made.insert(topic, true);
    }
    let group = GroupName::new("g").unwrap();
    let key = store.topic(&name("durable")).unwrap().queues[0].key();
    for round in 0..36usize {
        for topic in TOPICS {
            let queue = round as u32 % 2;
            let size = if round % 9 == 8 { 9_000 } else { 300 };
            let batch = bodies(1 + round % 4, size, round);
            known.unanswered.push(batch.clone());
            let offset = send(store, topic, queue, &batch)?;
            known.unanswered.pop();
            known.acknowledged.entry((topic, queue)).or_default().push((offset, batch));
        }
        if round % 3 == 2 {
            let offset = store.topic(&name("durable")).unwrap().queues[0].bounds().1;
            known.commit_tried = offset;
            let (_, pending) = store
                .transact::<_, ()>(Purpose::State, |tx| {
                    let group = tx
                        .group(&group)
                        .unwrap_or_else(|| tx.create_group(group.clone(), GroupSettings::default()));
                    tx.commit(&group, &[(key, offset)]);
                    Ok(())
                })
                .map_err(|error| match error {
                    TransactError::Store(error) => error,
                    TransactError::Decided(()) => StoreError::Stopping,
                })?;
            pending.wait()?;
            known.committed = offset;
        }
    }
    Ok(())
}

/// Bodies by offset, and the offsets that readers are told are lost.
fn found(store: &Store, topic: &str, queue: u32) -> (u64, BTreeMap<u64, Bytes>) {
    let Some(known) = store.topic(&name(topic)) else { return (0, BTreeMap::new()) };
    let start = known.queues[queue as usize].bounds().0;
    (start, read_all(store, topic, queue).into_iter().collect())
}

fn examine(known: &Known, disk: MemoryDisk, boot: &str, power_cut: bool, what: &str) {
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let store = open(quick(boot), &disk).unwrap_or_else(|error| panic!("{what}: does not start: {error}"));
    assert_eq!(store.status().damage, vec![], "{what}");
    for (&topic, &made) in &known.topic_made {
        assert!(!made || store.topic(&name(topic)).is_some(), "{what}: topic {topic} is gone");
    }
    assert_found_by_key(&store, &["durable", "fast"], what);
    for (&(topic, queue), batches) in &known.acknowledged {
        let (start, found) = found(&store, topic, queue);
        if topic == "fast" && power_cut {
            continue;
        }
        for (offset, body) in batches.iter().flat_map(|(first, bodies)| (*first..).zip(bodies)) {
            if offset < start {
                assert_eq!(topic, "short", "{what}: {topic}/{queue} lost its start at {offset}");
                continue;
            }
            assert_eq!(found.get(&offset), Some(body), "{what}: {topic}/{queue} at {offset}");
        }
    }
    for batch in &known.unanswered {
        for (topic, queue) in TOPICS.into_iter().flat_map(|topic| [(topic, 0), (topic, 1)]) {
            let (_, found) = found(&store, topic, queue);
            let present = batch.iter().filter(|body| found.values().any(|found| found == *body)).count();
            // The same bodies went to other topics, acknowledged, so only a part is wrong.
            assert!(
                present == 0 || present == batch.len(),
                "{what}: {present} of a batch of {}",
                batch.len()
            );
        }
    }
    if let Some(topic) = store.topic(&name("durable")) {
        let committed = store
            .group(&GroupName::new("g").unwrap())
            .and_then(|group| group.committed(topic.queues[0].key()))
            .map_or(0, |committed| committed.offset);
        let allowed = known.committed..=known.commit_tried.max(known.committed);
        assert!(allowed.contains(&committed), "{what}: committed {committed}, not in {allowed:?}");
        let end = topic.queues[0].bounds().1;
        assert!(committed <= end, "{what}: committed {committed} beyond the end {end}");
        let next = send(&store, "durable", 0, &bodies(1, 10, 999)).unwrap();
        assert_eq!(next, end, "{what}: an offset was given out twice or skipped");
    }
    store.close();
    // And once more, from the log alone, it is the same.
    delete_derived(&disk);
    let before: Vec<_> =
        TOPICS.iter().map(|topic| (found(&store, topic, 0), found(&store, topic, 1))).collect();
    let again = open(quick(boot), &disk).unwrap_or_else(|error| panic!("{what}: does not rebuild: {error}"));
    assert_eq!(again.status().damage, vec![], "{what}: rebuilt");
    for (topic, before) in TOPICS.iter().zip(before) {
        if *topic != "short" {
            assert_eq!((found(&again, topic, 0), found(&again, topic, 1)), before, "{what}: {topic} rebuilt");
        }
    }
    assert_found_by_key(&again, &["durable", "fast"], what);
    again.close();
}

/// Crash points from `first` on, each `step`-th, until the work gets through.
fn pull_the_plug(first: u64, step: u64) -> u64 {
    let mut crash_at = first;
    loop {
        let memory = MemoryDisk::crash_at(crash_at);
        let disk: Arc<dyn Disk> = Arc::new(memory.clone());
        let mut known = Known::default();
        let outcome = work(&disk, &mut known);
        if !memory.crashed() {
            assert_eq!(outcome, Ok(()));
            return crash_at;
        }
        let what = |keeps: &str| format!("crash at change {crash_at}, {keeps}");
        examine(&known, memory.after_crash(CrashKeeps::Synced), "boot 2", true, &what("unsynced lost"));
        let torn = memory.after_crash(CrashKeeps::Sectors { seed: crash_at });
        examine(&known, torn, "boot 2", true, &what("torn"));
        examine(&known, memory.after_crash(CrashKeeps::Everything), "boot", false, &what("process killed"));
        let half = memory.after_crash(CrashKeeps::Torn { seed: crash_at });
        examine(&known, half, "boot", false, &what("process killed in a write"));
        crash_at += step;
    }
}

#[test]
fn a_crash_at_any_change_loses_nothing_acknowledged_and_keeps_batches_whole() {
    // Four threads share the points: 0, 4, 8 …; 1, 5, 9 …
    let threads: Vec<_> = (0..4).map(|first| std::thread::spawn(move || pull_the_plug(first, 4))).collect();
    let points: Vec<u64> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(points.iter().all(|&points| points > 200), "{points:?}");
}
