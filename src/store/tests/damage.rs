//! Flipped bits, stale bytes, failed syncs, and offsets that a power cut took.

use std::path::{Path, PathBuf};

use super::*;
use crate::model::Visibility;

fn memory() -> (MemoryDisk, Arc<dyn Disk>) {
    let memory = MemoryDisk::new();
    (memory.clone(), Arc::new(memory))
}

fn on(boot: &str) -> Options {
    let mut options = options("/shard");
    options.boot_id = boot.into();
    options
}

fn flip(disk: &Arc<dyn Disk>, path: &Path, at: u64) {
    let file = disk.open(path).unwrap();
    let mut byte = [0];
    file.read_at(&mut byte, at).unwrap();
    file.write_at(&[byte[0] ^ 0x20], at).unwrap();
    file.sync_data().unwrap();
}

fn first_segment() -> PathBuf {
    PathBuf::from(format!("/shard/log/{:020}.log", 0))
}

/// Where in the first segment `text` stands.
fn place_of(disk: &Arc<dyn Disk>, text: &str) -> u64 {
    let file = disk.open(&first_segment()).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap() as u64
}

/// Offsets of a queue that can be read, and those that readers are told are lost.
fn offsets(store: &Store, topic: &str) -> (Vec<u64>, Vec<u64>) {
    let topic = store.topic(&name(topic)).unwrap();
    let queue = &topic.queues[0];
    let (mut from, end) = queue.bounds();
    let (mut good, mut lost) = (Vec::new(), Vec::new());
    while from < end {
        let scan = store.scan(queue, from, ALL, |_| true);
        for fetched in store.fetch(queue.key(), &scan.slots).unwrap() {
            if fetched.payload.is_some() { good.push(fetched.offset) } else { lost.push(fetched.offset) }
        }
        from = scan.next;
        if let Some((begin, end)) = scan.lost {
            lost.extend(begin..end);
            from = end;
        }
    }
    (good, lost)
}

#[test]
fn one_flipped_bit_costs_one_message_and_its_readers_are_told() {
    for (what, shift) in [("body", 0i64), ("record header", -30), ("frame header", -90)] {
        for derived in [true, false] {
            let (_, disk) = memory();
            let store = open(on("a"), &disk).unwrap();
            create(&store, "t", TopicSettings::default()).unwrap();
            for i in 0..20 {
                send(&store, "t", 0, &[Bytes::from(format!("message number {i:03}"))]).unwrap();
            }
            store.close();
            let at = place_of(&disk, "message number 007").checked_add_signed(shift).unwrap();
            flip(&disk, &first_segment(), at);
            if !derived {
                delete_derived(&disk);
            }
            let store = open(on("a"), &disk).unwrap();
            let (good, lost) = offsets(&store, "t");
            let case = format!("{what}, derived files kept: {derived}");
            // A record can be found and checked without its frame.
            let expected: &[u64] = if what == "frame header" { &[] } else { &[7] };
            assert_eq!(lost, expected, "{case}");
            assert_eq!(good.len() + lost.len(), 20, "{case}");
            // What lies before the snapshot is not read at a start.
            let named = !derived || !expected.is_empty();
            assert_eq!(store.status().damage_total > 0, named, "{case}");
            assert_eq!(send(&store, "t", 0, &bodies(1, 5, 0)).unwrap(), 20, "{case}");
            store.close();
        }
    }
}

#[test]
fn records_behind_a_cut_never_come_back() {
    let (memory, disk) = memory();
    let store = open(on("a"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    for i in 0..100 {
        send(&store, "t", 0, &[Bytes::from(format!("first life {i:03}"))]).unwrap();
    }
    let left = memory.after_crash(CrashKeeps::Everything);
    store.close();
    let disk: Arc<dyn Disk> = Arc::new(left);
    // The tail from here on is torn: no frame behind says that it was durable.
    let cut = place_of(&disk, "first life 099") - 104;
    flip(&disk, &first_segment(), cut);
    let store = open(on("b"), &disk).unwrap();
    assert_eq!(store.status().damage, vec![]);
    let (good, lost) = offsets(&store, "t");
    assert_eq!((good.len(), lost), (99, vec![]));
    for i in 0..10 {
        send(&store, "t", 0, &[Bytes::from(format!("second life {i:03}"))]).unwrap();
    }
    store.close();
    delete_derived(&disk);
    let store = open(on("b"), &disk).unwrap();
    let found = read_all(&store, "t", 0);
    assert_eq!(found.len(), 109);
    assert_eq!(found[99].1, Bytes::from("second life 000"));
    store.close();
}

#[test]
fn what_readers_of_an_async_queue_saw_is_lost_openly_after_a_power_cut() {
    let (memory, disk) = memory();
    let mut slow = on("before");
    slow.flush_interval = Duration::from_secs(3600);
    let store = open(slow, &disk).unwrap();
    let settings = TopicSettings { durability: DurabilityLevel::Async, ..TopicSettings::default() };
    create(&store, "fast", settings.clone()).unwrap();
    let flushed = TopicSettings { visibility: Visibility::Flushed, ..settings };
    create(&store, "calm", flushed).unwrap();
    let queue = Arc::clone(&store.topic(&name("fast")).unwrap().queues[0]);
    let mut sent = 0;
    // The first ones wait for their reservation to be durable; then they are seen at once.
    let begin = std::time::Instant::now();
    while queue.bounds().1 == 0 {
        sent = 1 + send(&store, "fast", 0, &bodies(1, 20, 0)).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
    for _ in 0..50 {
        sent = 1 + send(&store, "fast", 0, &bodies(1, 20, 1)).unwrap();
        assert_eq!(queue.bounds().1, sent, "visible as soon as it is acknowledged");
        send(&store, "calm", 0, &bodies(1, 20, 1)).unwrap();
    }
    let (lights_out, killed) =
        (memory.after_crash(CrashKeeps::Synced), memory.after_crash(CrashKeeps::Everything));
    store.close();

    let disk: Arc<dyn Disk> = Arc::new(killed);
    let store = open(on("before"), &disk).unwrap();
    assert_eq!(
        offsets(&store, "fast"),
        ((0..sent).collect(), Vec::<u64>::new()),
        "a killed process loses nothing"
    );
    assert_eq!(offsets(&store, "calm").1, Vec::<u64>::new());
    store.close();

    let disk: Arc<dyn Disk> = Arc::new(lights_out);
    let store = open(on("after"), &disk).unwrap();
    let (good, lost) = offsets(&store, "fast");
    assert_eq!(good.len() as u64, *lost.first().unwrap());
    assert!(*lost.last().unwrap() >= sent - 1, "no offset that was seen is given out again");
    let topic = store.topic(&name("fast")).unwrap();
    assert_eq!(store.count(&topic.queues[0], 0), good.len() as u64, "lost offsets are no lag");
    let next = send(&store, "fast", 0, &bodies(1, 20, 2)).unwrap();
    assert_eq!(next, *lost.last().unwrap() + 1);
    assert_eq!(offsets(&store, "calm").1, Vec::<u64>::new(), "nobody saw more than was flushed");
    store.close();
}

#[test]
fn a_failed_sync_fences_the_log_and_readers_keep_what_is_durable() {
    let faults = FaultDisk::new(Arc::new(MemoryDisk::new()));
    let disk: Arc<dyn Disk> = Arc::new(faults.clone());
    let store = open(on("a"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(3, 10, 0)).unwrap();
    faults.inject(Fault::device(Operation::Sync).on(".log"));
    let refused = send(&store, "t", 0, &bodies(1, 10, 1)).unwrap_err();
    assert!(matches!(refused, StoreError::Fenced(_)), "{refused}");
    faults.clear();
    let refused = send(&store, "t", 0, &bodies(1, 10, 1)).unwrap_err();
    assert!(matches!(refused, StoreError::Fenced(_)), "a sync that failed is not tried again: {refused}");
    assert_eq!(read_all(&store, "t", 0).len(), 3);
    assert!(matches!(store.status().state, State::Fenced(_)));
    store.close();
    let store = open(on("a"), &disk).unwrap();
    assert_eq!(store.status().state, State::Writable);
    assert!(read_all(&store, "t", 0).len() >= 3);
    store.close();
}

#[test]
fn without_space_for_a_segment_sends_are_refused_and_go_on_when_there_is_some() {
    let memory = MemoryDisk::with_capacity(5 << 20);
    let disk: Arc<dyn Disk> = Arc::new(memory.clone());
    let mut options = on("a");
    options.disk_floor_bytes = 300 << 10;
    let store = open(options, &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    let mut sent = 0;
    let begin = std::time::Instant::now();
    let refused = loop {
        assert!(begin.elapsed() < Duration::from_secs(30));
        match send(&store, "t", 0, &bodies(1, 2000, 0)) {
            Ok(_) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, StoreError::DiskFull { .. }), "{refused}");
    assert_eq!(read_all(&store, "t", 0).len(), sent, "reads go on");
    create(&store, "another", TopicSettings::default()).unwrap();
    memory.set_capacity(50 << 20);
    let begin = std::time::Instant::now();
    while send(&store, "t", 0, &bodies(1, 10, 1)).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(10), "does not recover by itself");
        std::thread::sleep(Duration::from_millis(10));
    }
    store.close();
}

#[test]
fn a_damaged_index_is_rebuilt_from_the_log_while_running() {
    let (_, disk) = memory();
    let store = open(on("a"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    for i in 0..100 {
        send(&store, "t", 0, &bodies(1, 10, i)).unwrap();
    }
    let index = Path::new("/shard/index/000000.index");
    for at in (0..3200).step_by(32) {
        flip(&disk, index, at + 3);
    }
    let begin = std::time::Instant::now();
    while offsets(&store, "t").0.len() < 100 {
        assert!(begin.elapsed() < Duration::from_secs(20), "not rebuilt");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(store.status().damage_total > 0);
    store.close();
}

#[test]
fn a_sector_that_cannot_be_read_is_damage_where_the_log_goes_on_and_nobody_writes_where_it_may_end() {
    let faults = FaultDisk::new(Arc::new(MemoryDisk::new()));
    let disk: Arc<dyn Disk> = Arc::new(faults.clone());
    let store = open(on("a"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    for i in 0..100 {
        send(&store, "t", 0, &[Bytes::from(format!("message number {i:03} {}", "x".repeat(300)))]).unwrap();
    }
    store.close();
    delete_derived(&disk);
    let file = first_segment().display().to_string();
    let sector = |at: u64| at / 512 * 512..at / 512 * 512 + 512;
    let middle = sector(place_of(&disk, "message number 050"));
    let last = sector(place_of(&disk, "message number 099"));

    faults.inject(Fault::device(Operation::Read).on(&file).at(middle.clone()));
    let store = open(on("a"), &disk).unwrap();
    let damage = store.status().damage;
    let named = |place: &Damage| {
        place.file == file && place.begin < middle.end - 4096 && place.end > middle.start - 4096
    };
    assert!(damage.iter().any(named), "{damage:?}");
    let (good, lost) = offsets(&store, "t");
    assert_eq!(good.len() + lost.len(), 100);
    assert!(lost.contains(&50) && lost.len() < 12, "{lost:?}");
    assert_eq!(send(&store, "t", 0, &bodies(1, 5, 0)).unwrap(), 100);
    store.close();

    faults.clear();
    // What follows the last message is the clean end and what was sent above: it goes first.
    let after = place_of(&disk, "0-0-xxxxx");
    let rest = disk.open(&first_segment()).unwrap();
    rest.write_at(&vec![0; 20_000], last.end.max(after - 200)).unwrap();
    delete_derived(&disk);
    faults.inject(Fault::device(Operation::Read).on(&file).at(last.start..last.end + 4096));
    let error = open(on("a"), &disk).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains(&file) && error.contains("may be the log's end"), "{error}");
}

#[test]
fn a_damaged_message_does_not_keep_its_segment_for_ever() {
    let (_, disk) = memory();
    let mut quick = on("a");
    quick.retention_interval = Duration::from_millis(20);
    let store = open(quick, &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    let short = crate::model::Retention { age: None, bytes: Some(1000) };
    create(&store, "short", TopicSettings { retention: short, ..TopicSettings::default() }).unwrap();
    for i in 0..5 {
        send(&store, "t", 0, &[Bytes::from(format!("message number {i:03}"))]).unwrap();
    }
    flip(&disk, &first_segment(), place_of(&disk, "message number 002"));
    let begin = std::time::Instant::now();
    while store.status().log_start == 0 {
        assert!(begin.elapsed() < Duration::from_secs(20), "nothing is removed");
        send(&store, "short", 0, &bodies(1, 1000, 0)).unwrap();
    }
    assert_eq!(offsets(&store, "t"), (vec![0, 1, 3, 4], vec![2]));
    let damage = store.status().damage;
    assert!(damage.iter().any(|place| place.file == first_segment().display().to_string()), "{damage:?}");
    store.close();
    delete_derived(&disk);
    let store = open(on("a"), &disk).unwrap();
    assert_eq!(offsets(&store, "t"), (vec![0, 1, 3, 4], vec![2]), "from the log");
    store.close();
}

#[test]
fn retention_removes_nothing_while_the_index_does_not_say_what_lives_there() {
    let (_, disk) = memory();
    let mut quick = on("a");
    quick.retention_interval = Duration::from_millis(20);
    let store = open(quick, &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    let short = crate::model::Retention { age: None, bytes: Some(1000) };
    create(&store, "short", TopicSettings { retention: short, ..TopicSettings::default() }).unwrap();
    for i in 0..5 {
        send(&store, "t", 0, &bodies(1, 10, i)).unwrap();
    }
    // The queue's first block of entries is the first of the file.
    for entry in 0..5 {
        flip(&disk, Path::new("/shard/index/000000.index"), entry * 32 + 2);
    }
    let begin = std::time::Instant::now();
    while store.status().log_start == 0 {
        assert!(begin.elapsed() < Duration::from_secs(20), "nothing is removed");
        send(&store, "short", 0, &bodies(1, 1000, 0)).unwrap();
    }
    assert_eq!(offsets(&store, "t"), (vec![0, 1, 2, 3, 4], vec![]));
    store.close();
}
