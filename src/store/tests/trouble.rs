//! Disks that are full, slow, read-only, failing or gone while the store runs.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use super::*;

fn faulty() -> (FaultDisk, Arc<dyn Disk>) {
    let faults = FaultDisk::new(Arc::new(MemoryDisk::new()));
    (faults.clone(), Arc::new(faults))
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn state_change(store: &Store, decide: impl FnOnce(&mut Tx<'_>)) -> Result<(), StoreError> {
    let changed = store.transact::<(), ()>(Purpose::State, |tx| {
        decide(tx);
        Ok(())
    });
    match changed {
        Ok(((), pending)) => pending.wait().map(|_| ()),
        Err(TransactError::Store(error)) => Err(error),
        Err(TransactError::Decided(())) => unreachable!(),
    }
}

fn commit(store: &Store, topic: &str, offset: u64) -> Result<(), StoreError> {
    let key = store.topic(&name(topic)).unwrap().queues[0].key();
    state_change(store, |tx| {
        let group = GroupName::new("g").unwrap();
        let group = tx.group(&group).unwrap_or_else(|| tx.create_group(group, GroupSettings::default()));
        tx.commit(&group, &[(key, offset)]);
    })
}

fn delete(store: &Store, topic: &str) -> Result<(), StoreError> {
    let topic = store.topic(&name(topic)).unwrap();
    state_change(store, |tx| tx.delete_topic(&topic))
}

/// Everything but sending goes on, and sending again once `make_room` was called.
fn assert_a_full_disk_can_be_read_empty(store: &Store, sent: usize, make_room: impl FnOnce()) {
    assert!(matches!(store.status().state, State::DiskFull(_)), "{:?}", store.status().state);
    assert_eq!(read_all(store, "t", 0).len(), sent, "reads go on");
    for offset in 0..50 {
        commit(store, "t", offset).unwrap();
    }
    delete(store, "other").unwrap();
    assert!(store.topic(&name("other")).is_none());
    make_room();
    until("it does not recover by itself", || send(store, "t", 0, &bodies(1, 10, 1)).is_ok());
    assert_eq!(store.status().state, State::Writable);
    assert_eq!(read_all(store, "t", 0).len(), sent + 1);
}

#[test]
fn below_the_floor_sends_are_refused_with_it_and_everything_else_goes_on_until_there_is_space() {
    let (faults, disk) = faulty();
    let mut options = options("/shard");
    options.disk_floor_bytes = 1 << 20;
    let store = open(options, &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    create(&store, "other", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(20, 100, 0)).unwrap();
    faults.set_free_bytes(Some(4096));
    until("still takes messages", || matches!(store.status().state, State::DiskFull(_)));
    let refused = send(&store, "t", 0, &bodies(1, 10, 0)).unwrap_err();
    assert_eq!(refused, StoreError::DiskFull { floor: 1 << 20, free: 4096 });
    assert_a_full_disk_can_be_read_empty(&store, 20, || faults.set_free_bytes(None));
    store.close();
}

/// A file system of its own, unmounted at the end. `None`, with the reason printed, where that is not allowed.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=0700");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(dir.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(dir)),
            Ok(output) => {
                println!("skipped: cannot mount: {}", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped: cannot mount: {error}");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let output = Command::new(program).args(arguments).arg(self.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).output();
    }
}

#[test]
fn a_file_system_that_is_really_full_can_be_read_empty_and_takes_messages_again_when_it_is_not() {
    let Some(mount) = Mount::new("24m") else { return };
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let mut options = options(&mount.path().join("shard").display().to_string());
    options.disk_floor_bytes = 2 << 20;
    let store = open(options, &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    create(&store, "other", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(1, 100, 0)).unwrap();
    let foreign = mount.path().join("foreign");
    // Until nothing more fits at all.
    let filled = std::fs::write(&foreign, vec![1; 32 << 20]);
    assert!(filled.is_err());
    let mut sent = 1;
    until("still takes messages", || match send(&store, "t", 0, &bodies(1, 100, 0)) {
        Ok(_) => {
            sent += 1;
            false
        }
        Err(error) => {
            assert!(matches!(error, StoreError::DiskFull { floor: 0x20_0000, .. }), "{error}");
            true
        }
    });
    assert_a_full_disk_can_be_read_empty(&store, sent, || std::fs::remove_file(&foreign).unwrap());
    store.close();
}

#[test]
fn a_read_only_file_system_fences_a_running_store_and_refuses_a_start_by_name() {
    let (faults, disk) = faulty();
    let store = open(options("/shard"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(3, 10, 0)).unwrap();
    for operation in [Operation::Write, Operation::Create, Operation::Rename, Operation::Remove] {
        faults.inject(Fault::error(operation, std::io::ErrorKind::ReadOnlyFilesystem));
    }
    let refused = send(&store, "t", 0, &bodies(1, 10, 1)).unwrap_err();
    assert!(matches!(&refused, StoreError::Fenced(why) if why.contains("read-only")), "{refused}");
    assert_eq!(read_all(&store, "t", 0).len(), 3);
    store.close();

    let Some(mount) = Mount::new("16m") else { return };
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let dir = mount.path().join("shard").display().to_string();
    open(options(&dir), &disk).unwrap().close();
    mount.run("mount", &["-o", "remount,ro"]);
    let refused = open(options(&dir), &disk).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains(&dir), "{refused}");
}

#[test]
fn while_syncs_take_long_the_queue_is_bounded_and_nothing_accepted_is_lost() {
    let (faults, disk) = faulty();
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    let mut options = options("/shard");
    options.inbox_bytes = 20_000;
    let store = open_at(options, &disk, &clock).unwrap();
    let topic = create(&store, "t", TopicSettings::default()).unwrap();
    let hold = faults.hold(Operation::Sync, ".log");
    let mut accepted = Vec::new();
    let begin_send = |n: usize| {
        let body = Bytes::from(format!("{n} {}", "x".repeat(500)));
        let sent = store.transact::<_, ()>(Purpose::Send, |tx| {
            let message = NewMessage {
                parts: [&body, &[]],
                crc: crc32c::crc32c(&body),
                later_bytes: 0,
                tag_hash: 0,
                lookups: &[],
            };
            Ok(tx.send(&topic, &topic.queues[0], std::iter::once(message), |_, place, into| {
                into.extend_from_slice(&place.offset.to_le_bytes());
            }))
        });
        sent.map_err(|error| match error {
            TransactError::Store(error) => error,
            TransactError::Decided(()) => unreachable!(),
        })
    };
    accepted.push(begin_send(0).unwrap());
    until("nobody syncs", || hold.waiting() > 0);
    let refused = loop {
        match begin_send(accepted.len()) {
            Ok(one) => accepted.push(one),
            Err(error) => break error,
        }
        assert!(accepted.len() < 1000, "no bound");
    };
    assert!(matches!(refused, StoreError::Busy { bytes, limit: 20_000, .. } if bytes < 22_000), "{refused}");
    clock.advance(Duration::from_secs(10));
    assert!(begin_send(0).is_err());
    assert_eq!(store.status().state, State::Writable, "slow is not broken");
    assert_eq!(read_all(&store, "t", 0).len(), 0, "nothing is visible before it is durable");
    drop(hold);
    let count = accepted.len();
    for (_, pending) in accepted {
        assert_eq!(pending.wait(), Ok(Reached::Disk));
    }
    assert_eq!(read_all(&store, "t", 0).len(), count);
    until("still busy", || begin_send(0).is_ok());
    store.close();
}

#[test]
fn a_failed_write_fences_and_what_is_durable_is_still_read() {
    for half in [false, true] {
        let (faults, disk) = faulty();
        let store = open(options("/shard"), &disk).unwrap();
        create(&store, "t", TopicSettings::default()).unwrap();
        let fast = TopicSettings { durability: DurabilityLevel::Async, ..TopicSettings::default() };
        create(&store, "fast", fast).unwrap();
        let kept = bodies(5, 3000, 0);
        send(&store, "t", 0, &kept).unwrap();
        let fault = Fault::device(Operation::Write).on(".log");
        faults.inject(if half { fault.half() } else { fault });
        for topic in ["t", "fast"] {
            let refused = send(&store, topic, 0, &bodies(1, 10, 1)).unwrap_err();
            assert!(matches!(refused, StoreError::Fenced(_)), "{refused}");
        }
        let refused = commit(&store, "t", 1).unwrap_err();
        assert!(matches!(refused, StoreError::Fenced(_)), "{refused}");
        let expected: Vec<_> = (0..).zip(kept).collect();
        assert_eq!(read_all(&store, "t", 0), expected);
        store.close();
        faults.clear();
        let store = open(options("/shard"), &disk).unwrap();
        assert_eq!(store.status().damage, vec![]);
        // What was not acknowledged may have been written whole all the same.
        let found = read_all(&store, "t", 0);
        assert!(found.starts_with(&expected) && found.len() <= 6, "{found:?}");
        assert_eq!(send(&store, "t", 0, &bodies(1, 10, 1)).unwrap(), found.len() as u64);
        store.close();
    }
}

#[test]
fn a_message_that_cannot_be_read_is_an_error_with_its_place_and_comes_back_when_it_can() {
    let (faults, disk) = faulty();
    let store = open(options("/shard"), &disk).unwrap();
    let topic = create(&store, "t", TopicSettings::default()).unwrap();
    for n in 0..30 {
        send(&store, "t", 0, &bodies(1, 1000, n)).unwrap();
    }
    let queue = &topic.queues[0];
    let slots = store.scan(queue, 0, ALL, |_| true).slots;
    let hit = slots[3];
    let at = 4096 + hit.position.0 + 500;
    faults.inject(Fault::device(Operation::Read).on(".log").at(at..at + 1));
    let error = store.fetch(queue.key(), &slots).unwrap_err().to_string();
    for part in ["offset 3", &format!("position {}", hit.position.0), "/shard/log/"] {
        assert!(error.contains(part), "{error}");
    }
    let others: Vec<Slot> = slots.iter().copied().filter(|slot| slot.offset != 3).collect();
    assert_eq!(store.fetch(queue.key(), &others).unwrap().len(), 29);
    assert_eq!(store.status().state, State::Writable);
    send(&store, "t", 0, &bodies(1, 10, 0)).unwrap();
    faults.clear();
    assert_eq!(read_all(&store, "t", 0).len(), 31);
    assert_eq!(store.status().damage, vec![], "what may come back is not called damage");
    store.close();
}

#[test]
fn a_segment_that_cannot_be_made_fences_in_plain_words() {
    let (faults, disk) = faulty();
    let store = open(options("/shard"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    let mut sent = 0;
    until("the next segment is not ready", || {
        sent += usize::from(send(&store, "t", 0, &bodies(1, 1000, 0)).is_ok());
        store.shard.segments.all().len() == 2
    });
    faults.inject(Fault::device(Operation::Create).on("/log/"));
    let refused = loop {
        match send(&store, "t", 0, &bodies(1, 1000, 0)) {
            Ok(_) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(&refused, StoreError::Fenced(why) if why.contains("next segment")), "{refused}");
    assert_eq!(read_all(&store, "t", 0).len(), sent);
    store.close();
}

#[test]
fn when_the_directory_vanishes_writes_fail_in_plain_words_and_reads_and_the_stop_go_on() {
    let (_dir, path) = temp();
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let mut quick = options(&path);
    quick.snapshot_interval = Duration::from_millis(20);
    quick.key_run_bytes = 4096;
    let store = open(quick.clone(), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(10, 1000, 0)).unwrap();
    // A file may be made while it goes.
    until("it cannot be removed", || {
        let _ = std::fs::remove_dir_all(&path);
        !Path::new(&path).exists()
    });
    let mut sent = 10;
    let refused = loop {
        match send(&store, "t", 0, &bodies(1, 1000, 0)) {
            Ok(_) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 10_000, "goes on for ever");
    };
    assert!(matches!(&refused, StoreError::Fenced(_)), "{refused}");
    assert_eq!(read_all(&store, "t", 0).len(), sent);
    store.close();
    assert!(!Path::new(&path).join("snapshots").exists(), "it does not make half a directory anew");
}

#[test]
fn a_store_whose_log_is_gone_is_not_begun_anew_over_what_is_left() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
    let store = open(options("/shard"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(20, 100, 0)).unwrap();
    store.close();
    let remove = |dir: &str| {
        for file in disk.list(dir.as_ref()).unwrap() {
            disk.remove(&Path::new(dir).join(file)).unwrap();
        }
    };
    remove("/shard/log");
    let refused = open(options("/shard"), &disk).map(|_| ()).unwrap_err().to_string();
    for part in ["/shard/log", "is empty", "mounted", "/shard/snapshots"] {
        assert!(refused.contains(part), "{refused}");
    }
    for dir in ["/shard/snapshots", "/shard/keys", "/shard/index"] {
        remove(dir);
    }
    open(options("/shard"), &disk).unwrap().close();
}

#[test]
fn a_segment_that_may_not_be_opened_refuses_the_start_by_name() {
    let (faults, disk) = faulty();
    let store = open(options("/shard"), &disk).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    store.close();
    let file = format!("{:020}.log", 0);
    faults.inject(Fault::error(Operation::Open, std::io::ErrorKind::PermissionDenied).on(&file));
    let refused = open(options("/shard"), &disk).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains(&file) && refused.contains("permission denied"), "{refused}");
    faults.clear();
    open(options("/shard"), &disk).unwrap().close();
}
