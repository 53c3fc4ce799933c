//! What goes, what stays, and when; whatever clocks and sizes do.

use std::path::Path;

use super::{
    super::{expiring::Expiring, retention::Retention as Upkeep, snapshot},
    *,
};
use crate::model::Retention;

const DAY: Duration = Duration::from_secs(86_400);

/// A store whose retention runs when the test says so.
fn still(memory: &MemoryDisk) -> (Store, Arc<ManualClock>, Arc<dyn Disk>) {
    let disk: Arc<dyn Disk> = Arc::new(memory.clone());
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    let store = open_at(hourly(), &disk, &clock).unwrap();
    (store, clock, disk)
}

fn hourly() -> Options {
    let mut options = options("/shard");
    options.retention_interval = DAY * 10_000;
    options.snapshot_interval = DAY * 10_000;
    options
}

fn run(store: &Store, upkeep: &mut Upkeep) {
    let shard = &store.shard;
    if upkeep.pass(shard) {
        let saved = snapshot::save(shard, &mut shard.chain.lock()).unwrap();
        shard.snapshot_position.store(saved.position, Ordering::Release);
        upkeep.remove_segments(shard);
    }
    store.settled(LogPosition(store.status().log_end - 1)).wait().unwrap();
}

fn by_age(age: Duration) -> TopicSettings {
    TopicSettings {
        queues: 1,
        retention: Retention { age: Some(age), bytes: None },
        ..TopicSettings::default()
    }
}

fn by_size(bytes: u64) -> TopicSettings {
    TopicSettings {
        queues: 1,
        retention: Retention { age: None, bytes: Some(bytes) },
        ..TopicSettings::default()
    }
}

fn start(store: &Store, topic: &str) -> u64 {
    store.topic(&name(topic)).unwrap().queues[0].bounds().0
}

#[test]
fn messages_go_by_age_also_from_the_segment_in_use() {
    let (store, clock, _) = still(&MemoryDisk::new());
    let mut upkeep = Upkeep::new(&store.shard);
    create(&store, "t", by_age(Duration::from_secs(60))).unwrap();
    for n in 0..6 {
        send(&store, "t", 0, &bodies(1, 10, n)).unwrap();
        clock.advance(Duration::from_secs(20));
        run(&store, &mut upkeep);
    }
    // The first was stored 120 s ago, the fourth 60.
    assert_eq!(start(&store, "t"), 3);
    assert_eq!(store.status().segments, 1, "one segment holds all of it");
    store.close();
}

#[test]
fn a_clock_set_years_ahead_takes_nothing_and_retention_goes_on_when_it_is_right_again() {
    let (store, clock, _) = still(&MemoryDisk::new());
    let mut upkeep = Upkeep::new(&store.shard);
    create(&store, "t", by_age(DAY)).unwrap();
    send(&store, "t", 0, &bodies(5, 10, 0)).unwrap();
    let right = clock.now_ms();
    clock.jump_to(right + 3 * 365 * 86_400_000);
    for _ in 0..3 {
        run(&store, &mut upkeep);
        assert_eq!(start(&store, "t"), 0, "a jump took messages");
    }
    clock.jump_to(right);
    run(&store, &mut upkeep);
    clock.advance(DAY + Duration::from_secs(1));
    run(&store, &mut upkeep);
    assert_eq!(start(&store, "t"), 5, "retention went on");
    store.close();
}

#[test]
fn a_clock_set_years_back_stops_neither_sends_nor_store_times_from_rising() {
    let memory = MemoryDisk::new();
    let (store, clock, disk) = still(&memory);
    let mut upkeep = Upkeep::new(&store.shard);
    create(&store, "t", by_age(DAY)).unwrap();
    send(&store, "t", 0, &bodies(1, 10, 0)).unwrap();
    let queue = Arc::clone(&store.topic(&name("t")).unwrap().queues[0]);
    let first = store.store_ms_at(&queue, 0).unwrap();
    clock.jump_to(1_000_000);
    run(&store, &mut upkeep);
    send(&store, "t", 0, &bodies(1, 10, 1)).unwrap();
    assert!(store.store_ms_at(&queue, 1).unwrap() >= first);
    assert_eq!(start(&store, "t"), 0);
    store.close();
    // The same after a restart with the wrong clock.
    let store = open_at(hourly(), &disk, &clock).unwrap();
    send(&store, "t", 0, &bodies(1, 10, 2)).unwrap();
    let queue = Arc::clone(&store.topic(&name("t")).unwrap().queues[0]);
    assert!(store.store_ms_at(&queue, 2).unwrap() >= first);
    assert_eq!(read_all(&store, "t", 0).len(), 3);
    store.close();
}

#[test]
fn the_state_is_the_same_from_the_log_alone_after_retention_has_removed_its_beginning() {
    let memory = MemoryDisk::new();
    let (store, clock, disk) = still(&memory);
    let mut upkeep = Upkeep::new(&store.shard);
    create(&store, "keep", TopicSettings { queues: 3, ..by_age(DAY * 1000) }).unwrap();
    create(&store, "fast", TopicSettings { durability: DurabilityLevel::Async, ..by_age(DAY * 1000) })
        .unwrap();
    create(&store, "gone", by_age(DAY * 1000)).unwrap();
    create(&store, "short", by_size(20_000)).unwrap();
    for topic in ["keep", "fast", "gone"] {
        send(&store, topic, 0, &bodies(3, 50, 1)).unwrap();
    }
    commit(&store, "early", "keep", 2);
    commit(&store, "early", "gone", 1);
    delete(&store, "gone");
    create(&store, "gone", by_age(DAY)).unwrap();
    for n in 0..400 {
        send(&store, "short", 0, &bodies(1, 1000, n)).unwrap();
        clock.advance(Duration::from_millis(5));
        if n % 20 == 0 {
            run(&store, &mut upkeep);
        }
    }
    assert!(store.status().log_start > 100_000, "{:?}", store.status());
    commit(&store, "late", "short", start(&store, "short") + 1);
    run(&store, &mut upkeep);
    store.settled(LogPosition(store.status().log_end - 1)).wait().unwrap();
    let expected = state(&store);
    let kept: Vec<_> = ["keep", "fast"].map(|topic| read_all(&store, topic, 0)).into_iter().collect();
    assert!(kept.iter().all(|found| found.len() == 3));
    store.close();
    for derived in [false, true] {
        if !derived {
            for dir in ["/shard/snapshots", "/shard/index", "/shard/keys"] {
                for file in disk.list(Path::new(dir)).unwrap() {
                    disk.remove(&Path::new(dir).join(file)).unwrap();
                }
            }
        }
        let store = open_at(hourly(), &disk, &clock).unwrap();
        assert_eq!(state(&store), expected, "derived files kept: {derived}");
        assert_eq!(store.status().damage, vec![]);
        let found: Vec<_> = ["keep", "fast"].map(|topic| read_all(&store, topic, 0)).into_iter().collect();
        assert_eq!(found, kept);
        assert_found_by_key(&store, &["keep", "fast", "short"], "after retention");
        store.close();
    }
}

#[test]
fn a_deleted_topic_gives_its_space_back_though_nothing_else_has_expired() {
    let (store, clock, _) = still(&MemoryDisk::new());
    let mut upkeep = Upkeep::new(&store.shard);
    create(&store, "keep", by_age(DAY * 1000)).unwrap();
    create(&store, "large", by_age(DAY * 1000)).unwrap();
    send(&store, "keep", 0, &bodies(3, 100, 0)).unwrap();
    for n in 0..400 {
        send(&store, "large", 0, &bodies(1, 1000, n)).unwrap();
    }
    run(&store, &mut upkeep);
    let before = store.status().log_bytes;
    assert_eq!(store.status().log_start, 0);
    delete(&store, "large");
    for _ in 0..10 {
        clock.advance(Duration::from_secs(10));
        run(&store, &mut upkeep);
    }
    let after = store.status().log_bytes;
    assert!(after < before / 3, "{before} bytes before, {after} after");
    assert_eq!(read_all(&store, "keep", 0).len(), 3);
    store.close();
}

#[test]
fn a_reader_in_the_middle_of_a_segment_that_goes_is_told_or_served_and_never_broken() {
    let (store, clock, _) = still(&MemoryDisk::new());
    let mut upkeep = Upkeep::new(&store.shard);
    create(&store, "keep", by_age(DAY * 1000)).unwrap();
    create(&store, "short", by_size(10_000)).unwrap();
    send(&store, "keep", 0, &bodies(5, 100, 0)).unwrap();
    for n in 0..200 {
        send(&store, "short", 0, &bodies(1, 1000, n)).unwrap();
        clock.advance(Duration::from_millis(1));
    }
    let slots = |topic: &str| {
        let queue = Arc::clone(&store.topic(&name(topic)).unwrap().queues[0]);
        (queue.key(), store.scan(&queue, 0, ALL, |_| true).slots)
    };
    let (keep, short) = (slots("keep"), slots("short"));
    assert_eq!((keep.1.len(), short.1.len()), (5, 200));
    for _ in 0..5 {
        run(&store, &mut upkeep);
    }
    assert!(store.status().log_start > 0);
    let moved = store.fetch(keep.0, &keep.1).unwrap();
    assert_eq!(moved.len(), 5, "what lives is found at its new place");
    assert!(moved.iter().all(|one| one.payload.is_some()));
    let rest = store.fetch(short.0, &short.1).unwrap();
    assert!(rest.iter().all(|one| one.payload.is_some()), "what went is left out, not called damaged");
    assert!(rest.len() < 200 && store.status().damage.is_empty());
    let topic = store.topic(&name("short")).unwrap();
    let scan = store.scan(&topic.queues[0], 0, ALL, |_| true);
    assert_eq!((scan.slots.len(), scan.start), (0, start(&store, "short")), "told where it goes on");
    store.close();
}

#[test]
fn unread_messages_are_counted_before_retention_takes_them() {
    let (store, clock, _) = still(&MemoryDisk::new());
    let (mut upkeep, mut expiring) = (Upkeep::new(&store.shard), Expiring::default());
    let mut soon = |store: &Store| {
        expiring.look(&store.shard);
        store.shard.unread_expiring.load(Ordering::Relaxed)
    };
    create(&store, "aged", by_age(Duration::from_secs(1000))).unwrap();
    create(&store, "sized", by_size(10_000)).unwrap();
    send(&store, "aged", 0, &bodies(10, 10, 0)).unwrap();
    assert_eq!(soon(&store), 0, "nobody reads it");
    commit(&store, "slow", "aged", 4);
    assert_eq!(soon(&store), 0, "there is time");
    clock.advance(Duration::from_secs(890));
    assert_eq!(soon(&store), 0);
    clock.advance(Duration::from_secs(20));
    assert_eq!(soon(&store), 6, "the last tenth of its age");
    run(&store, &mut upkeep);
    assert_eq!(start(&store, "aged"), 0, "all of it is still there");
    commit(&store, "slow", "aged", 10);
    assert_eq!(soon(&store), 0, "read in time");

    for n in 0..9 {
        send(&store, "sized", 0, &bodies(1, 1000, n)).unwrap();
        clock.advance(Duration::from_millis(1));
    }
    commit(&store, "slow", "sized", 0);
    run(&store, &mut upkeep);
    assert_eq!((soon(&store), start(&store, "sized")), (1, 0), "the last tenth of its size");
    store.close();
}

#[test]
fn a_changed_segment_size_holds_for_new_segments_and_old_ones_are_read_as_they_are() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    let mut sent = Vec::new();
    for (round, kib) in [64, 256, 16, 64].into_iter().enumerate() {
        let mut options = options("/shard");
        options.segment_bytes = kib << 10;
        let store = open(options, &disk).unwrap();
        if round == 0 {
            create(&store, "t", TopicSettings::default()).unwrap();
        }
        assert_eq!(read_all(&store, "t", 0), sent, "round {round}");
        for n in 0..100 {
            let bodies = bodies(1, 2000, n);
            let first = send(&store, "t", 0, &bodies).unwrap();
            sent.extend((first..).zip(bodies));
        }
        store.close();
    }
    let store = open(options("/shard"), &disk).unwrap();
    assert_eq!(read_all(&store, "t", 0), sent);
    assert_eq!(store.status().damage, vec![]);
    store.close();
}

#[test]
fn when_much_has_expired_at_once_a_pass_removes_only_a_few_segments() {
    let (store, clock, _) = still(&MemoryDisk::new());
    let mut upkeep = Upkeep::new(&store.shard);
    create(&store, "t", by_age(Duration::from_secs(60))).unwrap();
    for n in 0..1200 {
        send(&store, "t", 0, &bodies(1, 1000, n)).unwrap();
    }
    for _ in 0..61 {
        clock.advance(Duration::from_secs(1));
    }
    let mut before = store.status().segments;
    assert!(before > 10, "{before}");
    for _ in 0..10 {
        clock.advance(Duration::from_secs(1));
        run(&store, &mut upkeep);
        let now = store.status().segments;
        assert!(before - now.min(before) <= 4, "{before} segments, then {now}");
        before = now;
    }
    assert!(before <= 3, "{before} segments are left");
    store.close();
}

#[test]
fn once_begun_retention_goes_on_until_nothing_is_left_to_remove() {
    let memory = MemoryDisk::new();
    let (store, clock, _disk) = still(&memory);
    create(&store, "t", by_size(100_000)).unwrap();
    for n in 0..1500 {
        send(&store, "t", 0, &bodies(1, 1000, n)).unwrap();
    }
    assert!(store.status().segments > 20, "{:?}", store.status());
    // One pass is due; the keeper makes as many as it takes, though the clock stands still.
    clock.advance(DAY * 10_001);
    let begun = std::time::Instant::now();
    while store.status().segments > 5 {
        assert!(begun.elapsed() < Duration::from_secs(60), "it stopped: {:?}", store.status());
        std::thread::sleep(Duration::from_millis(10));
    }
    store.close();
}
