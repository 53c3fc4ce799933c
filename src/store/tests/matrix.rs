//! Every byte of a data directory is flipped, every file cut, removed, swapped or put where it does not belong, one
//! at a time. The store opens, names what is damaged in the log, serves all the rest at the same offsets, and goes
//! on. What is derived costs nothing.
//!
//! By default a share of the bytes is flipped, evenly spread; `HOLDFAST_EVERY_BYTE=1` flips them all.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    thread,
};

use super::{
    super::{
        check::examine as check_disk,
        frame::{FRAME_HEADER, FrameHeader, FrameKind, RECORD_HEADER, RecordHeader, RecordKind, Seed},
        keeper,
        segment::SegmentHeader,
        snapshot,
    },
    *,
};
use crate::model::{GroupId, Retention};

const DIR: &str = "/shard";
const HEADER: u64 = 4096;
/// Without `HOLDFAST_EVERY_BYTE` one byte in so many is flipped. Odd, so that all places of a word are.
const STEP: usize = 23;

/// What is sent to the opened store.
const AFTERWARDS: &[u8] = b"afterwards";

/// A message as it stands in the log.
#[derive(Clone, Debug, PartialEq)]
struct Stored {
    position: u64,
    length: u64,
    body: Bytes,
}

type Messages = BTreeMap<(QueueKey, u64), Stored>;

/// A data directory, and all that is in it.
struct Model {
    name: &'static str,
    disk: MemoryDisk,
    state: String,
    messages: Messages,
    starts: BTreeMap<QueueKey, u64>,
    progress: BTreeMap<(GroupId, QueueKey), u64>,
    segments: Vec<(PathBuf, u64, u64)>,
    frames: Vec<FrameHeader>,
    records: Vec<(u64, RecordHeader)>,
    /// Highest durable mark.
    mark: u64,
    /// What is in front of it is not read at a start.
    snapshot: u64,
}

fn small() -> Options {
    let mut options = options(DIR);
    options.first_segment_bytes = 4 << 10;
    options.segment_bytes = 4 << 10;
    options.recent_bytes = 1 << 10;
    options.key_run_bytes = 2 << 10;
    options.snapshot_interval = Duration::from_secs(1 << 30);
    options.snapshot_bytes = 1 << 40;
    options.retention_interval = Duration::from_secs(1);
    options
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(1_700_000_000_000))
}

fn save(store: &Store) {
    let shard = &store.shard;
    shard.keys.flush(shard.durable.load(Ordering::Acquire)).unwrap();
    let saved = snapshot::save(shard, &mut shard.chain.lock()).unwrap();
    shard.snapshot_position.store(saved.position, Ordering::Release);
}

/// The same directory, killed and stopped.
fn build() -> [Model; 2] {
    let memory = MemoryDisk::new();
    let disk: Arc<dyn Disk> = Arc::new(memory.clone());
    let clock = clock();
    let store = open_at(small(), &disk, &clock).unwrap();
    let fast = TopicSettings { durability: DurabilityLevel::Async, queues: 2, ..TopicSettings::default() };
    let two = TopicSettings { queues: 2, ..TopicSettings::default() };
    let short = Retention { age: None, bytes: Some(700) };
    create(&store, "short", TopicSettings { retention: short, queues: 1, ..two.clone() }).unwrap();
    create(&store, "sync", two.clone()).unwrap();
    create(&store, "fast", fast).unwrap();
    let gone = create(&store, "gone", two).unwrap();
    let mut salt = 0;
    let mut send_some = |topic: &str, queue: u32, count: usize| {
        salt += 1;
        clock.advance(Duration::from_millis(1));
        send(&store, topic, queue, &bodies(count, 10, salt)).unwrap();
    };
    send_some("sync", 0, 2);
    send_some("gone", 0, 2);
    commit(&store, "early", "sync", 1);
    for _ in 0..40 {
        send_some("short", 0, 1);
    }
    clock.advance(Duration::from_secs(2));
    let wait = std::time::Instant::now();
    while store.status().log_start == 0 {
        assert!(wait.elapsed() < Duration::from_secs(20), "nothing was removed: {:?}", store.status());
        std::thread::sleep(Duration::from_millis(10));
    }
    send_some("fast", 1, 3);
    commit(&store, "late", "sync", 1);
    send_some("sync", 1, 1);
    save(&store);
    for n in 0..3 {
        send_some("sync", n % 2, 2);
        send_some("fast", n % 2, 1);
    }
    save(&store);
    let deleted = store.transact::<_, ()>(Purpose::State, |tx| {
        tx.delete_topic(&gone);
        Ok(())
    });
    deleted.unwrap().1.wait().unwrap();
    create(&store, "young", TopicSettings { queues: 1, ..TopicSettings::default() }).unwrap();
    send_some("young", 0, 3);
    commit(&store, "late", "young", 2);
    commit(&store, "early", "sync", 3);
    send_some("fast", 0, 1);
    send_some("sync", 0, 1);
    let killed = Model::of("killed", &store, memory.after_crash(CrashKeeps::Everything));
    store.close();
    let stopped = Model::of("stopped", &store, memory.after_crash(CrashKeeps::Everything));
    [killed, stopped]
}

impl Model {
    fn of(name: &'static str, store: &Store, disk: MemoryDisk) -> Self {
        let shared: Arc<dyn Disk> = Arc::new(disk.clone());
        let (mut messages, mut starts, mut progress) = (Messages::new(), BTreeMap::new(), BTreeMap::new());
        for topic in store.topics("", "", 100) {
            for queue in &topic.queues {
                let read = read(store, queue);
                assert!(read.lost.is_empty());
                starts.insert(queue.key(), queue.bounds().0);
                messages.extend(read.found);
            }
        }
        for group in store.groups("", "", 100) {
            progress.extend(group.progress().into_iter().map(|(key, at)| ((group.id, key), at.offset)));
        }
        let mut model = Self {
            name,
            state: state(store),
            messages,
            starts,
            progress,
            segments: Vec::new(),
            frames: Vec::new(),
            records: Vec::new(),
            mark: 0,
            snapshot: store.shard.snapshot_position.load(Ordering::Acquire),
            disk,
        };
        model.look_at_log(&shared, store.shard.seed, store.shard.inner.lock().end);
        model
    }

    /// Where frames and records stand.
    fn look_at_log(&mut self, disk: &Arc<dyn Disk>, seed: Seed, end: u64) {
        let dir = Path::new(DIR).join("log");
        for name in disk.list(&dir).unwrap() {
            // Another may be in the making.
            let Some(base) = name.strip_suffix(".log") else { continue };
            let base: u64 = base.parse().unwrap();
            let bytes = contents(disk, &dir.join(&name));
            let (mut at, stop) = (HEADER as usize, bytes.len());
            self.segments.push((dir.join(&name), base, base + stop as u64 - HEADER));
            while at + FRAME_HEADER <= stop {
                let position = base + at as u64 - HEADER;
                let Ok(frame) = FrameHeader::decode(seed, position, &bytes[at..]) else { break };
                let mut within = at + FRAME_HEADER;
                for _ in 0..frame.records {
                    let position = base + within as u64 - HEADER;
                    let record = RecordHeader::decode(seed, position, &bytes[within..]).unwrap();
                    within += record.total();
                    self.records.push((position, record));
                }
                self.mark = self.mark.max(frame.durable);
                at += frame.length as usize;
                self.frames.push(frame);
                if frame.kind == FrameKind::Pad || position >= end {
                    break;
                }
            }
        }
        assert!(self.segments.len() > 2 && self.segments[0].1 > 0, "{:?}", self.segments);
    }

    fn copy(&self) -> (MemoryDisk, Arc<dyn Disk>) {
        let memory = self.disk.after_crash(CrashKeeps::Everything);
        (memory.clone(), Arc::new(memory))
    }

    /// The file of a position, and where it stands in it.
    fn place(&self, position: u64) -> (&Path, u64) {
        let (path, base, _) = self.segments.iter().rev().find(|(_, base, _)| *base <= position).unwrap();
        (path, HEADER + position - base)
    }

    fn files(&self) -> Vec<PathBuf> {
        let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
        let dirs = ["", "log", "index", "keys", "snapshots"].map(|dir| Path::new(DIR).join(dir));
        let files =
            dirs.iter().flat_map(|dir| disk.list(dir).unwrap().into_iter().map(|name| dir.join(name)));
        files.collect()
    }
}

fn contents(disk: &Arc<dyn Disk>, path: &Path) -> Vec<u8> {
    let file = disk.open(path).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

#[derive(Default)]
struct Read {
    found: Messages,
    lost: BTreeSet<u64>,
}

/// All of a queue, as a reader goes through it.
fn read(store: &Store, queue: &Queue) -> Read {
    let mut read = Read::default();
    let (mut from, end) = queue.bounds();
    let mut mended = 0;
    while from < end {
        let scan = store.scan(queue, from, ALL, |_| true);
        let slots: BTreeMap<u64, Slot> = scan.slots.iter().map(|slot| (slot.offset, *slot)).collect();
        for fetched in store.fetch(queue.key(), &scan.slots).unwrap() {
            let Some(payload) = fetched.payload else {
                read.lost.insert(fetched.offset);
                continue;
            };
            let (body, sealed) = payload.split_at(payload.len() - 8);
            assert_eq!(sealed, fetched.offset.to_le_bytes());
            let slot = slots[&fetched.offset];
            let stored = Stored {
                position: slot.position.0,
                length: u64::from(slot.length),
                body: Bytes::copy_from_slice(body),
            };
            read.found.insert((queue.key(), fetched.offset), stored);
        }
        let before = from;
        from = scan.next;
        if let Some((begin, end)) = scan.lost {
            read.lost.extend(begin..end);
            from = end;
        }
        if from == before {
            // The keeper would, a moment later.
            mended += 1;
            assert!(mended < 3, "stands still at {from}");
            assert!(keeper::mend(&store.shard));
        }
    }
    read
}

/// What look-ups find, once damaged files of the index are rebuilt.
fn look_up(store: &Store) -> BTreeSet<(QueueKey, u64)> {
    for _ in 0..10 {
        let mut found = BTreeSet::new();
        let looked = store.lookup(7, usize::MAX - 1, |one| {
            found.insert((QueueKey { topic: one.topic, queue: one.place.queue }, one.place.offset))
        });
        match looked {
            Ok(_) => return found,
            Err(error) => assert_eq!(error, StoreError::Rebuilding),
        }
        assert!(keeper::mend(&store.shard));
    }
    panic!("the key index is not rebuilt");
}

/// What may be missing, and what has to be named.
#[derive(Default)]
struct Expect {
    /// Messages that overlap one of these parts of the log.
    lost: Vec<(u64, u64)>,
    /// State may have gone with it.
    state: bool,
    /// Damage that is named when the log was read, and its file.
    named: Option<(PathBuf, u64)>,
    /// The log may end at the first of them.
    torn: bool,
    /// The whole log is read at the start.
    from_log: bool,
}

impl Expect {
    fn may_lose(&self, message: &Stored) -> bool {
        self.lost
            .iter()
            .any(|&(begin, end)| message.position < end && begin < message.position + message.length)
    }

    fn is_named(&self, damage: &[Damage]) -> bool {
        self.named.as_ref().is_none_or(|(file, position)| {
            let file = file.display().to_string();
            damage.iter().any(|place| place.file == file && (place.begin..place.end).contains(position))
        })
    }
}

/// Opens the damaged directory and compares all of it.
fn examine(model: &Model, disk: &Arc<dyn Disk>, expect: &Expect, what: &str) {
    let what = format!("{}: {what}", model.name);
    let clock = clock();
    clock.advance(Duration::from_secs(10));
    if expect.named.is_some() {
        let checked = check_disk(disk, Path::new(DIR), &mut |_, _| {}).map(|checked| checked.report);
        let report = checked.unwrap_or_else(|error| panic!("{what}: check: {error}"));
        assert!(expect.is_named(&report.damage), "{what}: check names {:?}", report.damage);
    }
    let store =
        open_at(small(), disk, &clock).unwrap_or_else(|error| panic!("{what}: does not open: {error}"));
    let at_open = store.status().damage;
    let (_, position) = expect.named.as_ref().map_or((None, 0), |(file, position)| (Some(file), *position));
    if expect.from_log || position >= model.snapshot {
        assert!(expect.is_named(&at_open), "{what}: open names {at_open:?}");
    }
    if expect.lost.is_empty() && !expect.state && expect.named.is_none() {
        assert!(at_open.iter().all(|place| place.begin == place.end), "{what}: {at_open:?}");
        assert_eq!(state(&store), model.state, "{what}");
    }
    let mut kept = compare(model, &store, expect, &what);
    for topic in store.topics("", "", 100) {
        let queue = &topic.queues[0];
        let end = queue.bounds().1;
        let offset = send(&store, topic.name.as_str(), 0, &[Bytes::from_static(AFTERWARDS)]).unwrap();
        assert_eq!(offset, end, "{what}: {queue:?}");
        store.settled(LogPosition(store.status().log_end - 1)).wait().unwrap();
        let read = read(&store, queue);
        kept.insert((queue.key(), offset), read.found[&(queue.key(), offset)].clone());
    }
    store.close();
    let store = open_at(small(), disk, &clock).unwrap_or_else(|error| panic!("{what}: again: {error}"));
    let again = compare(model, &store, expect, &format!("{what}, once more"));
    for (place, stored) in &kept {
        assert_eq!(again.get(place).map(|s| &s.body), Some(&stored.body), "{what}, once more: {place:?}");
    }
    store.close();
}

fn compare(model: &Model, store: &Store, expect: &Expect, what: &str) -> Messages {
    let mut kept = Messages::new();
    for topic in store.topics("", "", 100) {
        for queue in &topic.queues {
            let read = read(store, queue);
            for offset in &read.lost {
                let stored = model.messages.get(&(queue.key(), *offset));
                // Where a record was lost of which nothing is known, queues skip what it may have been.
                let may = stored.map_or(!expect.lost.is_empty(), |stored| expect.may_lose(stored));
                assert!(may, "{what}: {:?} at {offset} is lost: {stored:?}", queue.key());
            }
            kept.extend(read.found);
        }
    }
    for (place, stored) in &model.messages {
        match kept.get(place) {
            // An offset behind a torn end is given to the next message.
            Some(found) if found.body == AFTERWARDS && expect.torn && expect.may_lose(stored) => {}
            Some(found) => assert_eq!(found.body, stored.body, "{what}: {place:?}"),
            None => assert!(expect.may_lose(stored), "{what}: {place:?} is not there: {stored:?}"),
        }
    }
    let found = look_up(store);
    for place in kept.keys() {
        assert!(found.contains(place), "{what}: {place:?} is not found by key");
    }
    for (&(group, key), &offset) in &model.progress {
        let now = store.shard.tables.group_by_id(group).and_then(|group| group.committed(key));
        let now = now.map_or(0, |committed| committed.offset);
        assert!(now == offset || (expect.state && now < offset), "{what}: progress {now}, not {offset}");
    }
    for (key, start) in &model.starts {
        if let Some(queue) = store.shard.tables.queue(*key) {
            let now = queue.bounds().0;
            assert!(now == *start || (expect.state && now < *start), "{what}: {key:?} starts at {now}");
        }
    }
    kept
}

fn every(step: usize) -> usize {
    if std::env::var_os("HOLDFAST_EVERY_BYTE").is_some() { 1 } else { step }
}

/// Runs the cases on a few threads.
fn share<T: Sync>(cases: &[T], run: impl Fn(&T) + Sync) {
    let threads = 4;
    thread::scope(|scope| {
        let run = &run;
        let workers: Vec<_> = (0..threads)
            .map(|n| scope.spawn(move || cases.iter().skip(n).step_by(threads).for_each(run)))
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

/// The used bytes of the log, as positions, with what a flip there may cost.
fn log_bytes(model: &Model) -> Vec<(u64, Expect)> {
    let mut places = Vec::new();
    let end = model.frames.iter().map(|frame| frame.position + u64::from(frame.length)).max().unwrap();
    for frame in &model.frames {
        // A place behind the highest mark cannot be told from a torn end: the log ends there.
        let torn = frame.position >= model.mark;
        let rest = (frame.position, end);
        let named = |position| {
            if torn { None } else { Some((model.place(position).0.to_path_buf(), position)) }
        };
        for position in frame.position..frame.position + FRAME_HEADER as u64 {
            // A pad's only news is that the rest is unused.
            let lost = if torn { vec![rest] } else { Vec::new() };
            places.push((
                position,
                Expect { lost, state: torn, named: named(position), torn, from_log: false },
            ));
        }
        let own = frame.position..frame.position + u64::from(frame.length);
        for (begin, record) in model.records.iter().filter(|(position, _)| own.contains(position)) {
            let covered = RECORD_HEADER as u64 + 8 * u64::from(record.lookups) + u64::from(record.length);
            for position in *begin..begin + covered {
                let lost = if torn { rest } else { (*begin, begin + record.total() as u64) };
                let state = torn || record.kind != RecordKind::Message;
                places.push((
                    position,
                    Expect { lost: vec![lost], state, named: named(position), torn, from_log: false },
                ));
            }
        }
    }
    places
}

#[test]
fn whichever_byte_of_the_log_is_flipped_only_what_it_hit_is_lost_and_it_is_named() {
    for model in build() {
        for from_log in [false, true] {
            let cases: Vec<_> = log_bytes(&model)
                .into_iter()
                .skip(usize::from(from_log))
                .step_by(every(STEP))
                .map(|(position, expect)| (position, Expect { from_log, ..expect }))
                .collect();
            share(&cases, |(position, expect)| {
                let (memory, disk) = model.copy();
                let (path, at) = model.place(*position);
                assert!(memory.flip(path, at, 1 << (position % 8)));
                if from_log {
                    delete_derived(&disk);
                }
                let what =
                    format!("flip at {position}, {} at {at}, from the log: {from_log}", path.display());
                examine(&model, &disk, expect, &what);
            });
        }
    }
}

#[test]
fn whichever_byte_of_a_segments_header_is_flipped_nothing_is_lost() {
    for model in build() {
        let mut cases = Vec::new();
        for (path, base, _) in &model.segments {
            cases.extend((0..HEADER).step_by(every(401)).map(|at| (path, *base, at)));
        }
        share(&cases, |&(path, base, at)| {
            let (memory, disk) = model.copy();
            assert!(memory.flip(path, at, 0x10));
            let what = format!("{} at {at}", path.display());
            let store = open_at(small(), &disk, &clock()).unwrap();
            let damage = store.status().damage;
            let file = path.display().to_string();
            assert!(
                damage.iter().any(|place| place.file == file && place.begin == base),
                "{what}: {damage:?}"
            );
            assert_eq!(state(&store), model.state, "{what}");
            compare(&model, &store, &Expect::default(), &what);
            store.close();
        });
    }
}

#[test]
fn whichever_byte_of_a_derived_file_is_flipped_costs_nothing() {
    for model in build() {
        let (_, disk) = model.copy();
        let mut cases = Vec::new();
        for path in model.files().into_iter().filter(|path| !path.starts_with("/shard/log")) {
            let bytes = contents(&disk, &path);
            let used = bytes.chunks(32).enumerate().filter(|(_, entry)| entry.iter().any(|&byte| byte != 0));
            let used = used.flat_map(|(n, entry)| (n * 32..n * 32 + entry.len()).map(|at| at as u64));
            cases.extend(used.step_by(every(STEP)).map(|at| (path.clone(), at)));
        }
        share(&cases, |(path, at)| {
            let (memory, disk) = model.copy();
            assert!(memory.flip(path, *at, 1 << (at % 8)));
            examine(&model, &disk, &Expect::default(), &format!("flip in {} at {at}", path.display()));
        });
    }
}

/// Files as a mishap leaves them.
#[test]
fn a_file_of_the_log_that_is_cut_or_missing_costs_what_was_in_it_and_is_named() {
    for model in build() {
        let log_end =
            model.frames.iter().map(|frame| frame.position + u64::from(frame.length)).max().unwrap();
        let mut cases = Vec::new();
        for (path, base, end) in &model.segments {
            for bytes in [0, 1, 100, 2047, 2048, 4095, 4096, 4097, 4096 + 777, 4096 + 1800, 4096 + 4095] {
                cases.push((path, *base, *end, Some(bytes)));
            }
            cases.push((path, *base, *end, None));
        }
        let cases: Vec<_> = cases.iter().flat_map(|case| [(case, false), (case, true)]).collect();
        share(&cases, |&(&(path, base, end, bytes), from_log)| {
            let (memory, disk) = model.copy();
            match bytes {
                Some(bytes) => memory.cut(path, bytes),
                None => disk.remove(path).unwrap(),
            }
            if from_log {
                delete_derived(&disk);
            }
            let cut = base + bytes.unwrap_or(0).saturating_sub(HEADER);
            // The end of the log alone cannot tell how far it went; derived files can.
            let torn = !model.frames.iter().any(|frame| frame.position >= end && frame.durable > cut);
            let used = cut < log_end;
            let named = (used && !torn).then(|| (path.clone(), cut.max(base)));
            let lost = if used { vec![(cut, if torn { log_end } else { end })] } else { Vec::new() };
            let what = format!("{} cut to {bytes:?}, from the log: {from_log}", path.display());
            let expect = Expect { lost, state: used, named, torn, from_log: true };
            examine(&model, &disk, &expect, &what);
        });
    }
}

#[test]
fn a_derived_file_that_is_cut_or_missing_costs_nothing() {
    for model in build() {
        let (_, disk) = model.copy();
        let mut cases = Vec::new();
        for path in model.files().into_iter().filter(|path| !path.starts_with("/shard/log")) {
            let length = disk.open(&path).unwrap().len().unwrap();
            let lengths = [0, 1, 47, 4095, 4096, length / 2, length.saturating_sub(1)];
            cases
                .extend(lengths.into_iter().filter(|&cut| cut < length).map(|cut| (path.clone(), Some(cut))));
            cases.push((path, None));
        }
        share(&cases, |(path, cut)| {
            let (memory, disk) = model.copy();
            match cut {
                Some(bytes) => memory.cut(path, *bytes),
                None => disk.remove(path).unwrap(),
            }
            examine(&model, &disk, &Expect::default(), &format!("{} cut to {cut:?}", path.display()));
        });
    }
}

fn put(disk: &Arc<dyn Disk>, path: &str, bytes: &[u8]) {
    let path = Path::new(path);
    let _ = disk.remove(path);
    disk.create(path).unwrap().write_at(bytes, 0).unwrap();
    disk.sync_dir(path.parent().unwrap()).unwrap();
}

/// Everything is there, whatever lies beside it.
fn assert_nothing_missing(model: &Model, disk: &Arc<dyn Disk>, what: &str) {
    let store = open_at(small(), disk, &clock()).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(state(&store), model.state, "{what}");
    compare(model, &store, &Expect::default(), what);
    // Far enough for a file in the way to be met.
    for n in 0..60 {
        send(&store, "sync", 0, &bodies(1, 100, n)).unwrap();
    }
    store.close();
    let store = open_at(small(), disk, &clock()).unwrap_or_else(|error| panic!("{what}, again: {error}"));
    let topic = store.topic(&name("sync")).unwrap();
    let read = read(&store, &topic.queues[0]);
    assert_eq!(read.lost, BTreeSet::new(), "{what}");
    let sent = model.messages.keys().filter(|(key, _)| *key == topic.queues[0].key()).count();
    assert_eq!(read.found.len(), sent + 60, "{what}");
    store.close();
}

#[test]
fn segments_under_each_others_names_are_read_as_what_they_say_they_are() {
    for model in build() {
        for (n, (a, ..)) in model.segments.iter().enumerate() {
            for (b, ..) in model.segments.iter().skip(n + 1) {
                for from_log in [false, true] {
                    let (_, disk) = model.copy();
                    let aside = Path::new("/shard/aside");
                    disk.rename(a, aside).unwrap();
                    disk.rename(b, a).unwrap();
                    disk.rename(aside, b).unwrap();
                    if from_log {
                        delete_derived(&disk);
                    }
                    let what = format!("{}: {} and {} swapped", model.name, a.display(), b.display());
                    let report = check_disk(&disk, Path::new(DIR), &mut |_, _| {}).unwrap().report;
                    assert!(
                        report.damage.iter().any(|place| place.file == a.display().to_string()),
                        "{what}"
                    );
                    assert_nothing_missing(&model, &disk, &what);
                }
            }
        }
    }
}

#[test]
fn files_that_are_not_of_this_shard_are_left_alone_and_in_nobodys_way() {
    let [_, model] = build();
    let (_, disk) = model.copy();
    let (first, ..) = &model.segments[0];
    let mut other = SegmentHeader { shard_id: 4711, base: 0, capacity: 4096, epoch: 1, shard: "test".into() };
    let noise: Vec<u8> = (0..9000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut strange = vec![
        ("log/readme.txt".to_owned(), noise.clone()),
        ("log/0.log".to_owned(), noise.clone()),
        ("log/notes.tmp".to_owned(), noise.clone()),
        ("log/00000000000000000000.log".to_owned(), noise.clone()),
        ("log/99999999999999999999.log".to_owned(), noise.clone()),
        ("log/00000000000000999992.log".to_owned(), Vec::new()),
        ("index/strange".to_owned(), noise.clone()),
        ("index/000001.index".to_owned(), noise.clone()),
        ("keys/strange.tmp".to_owned(), noise.clone()),
        ("keys/00000000000000000000-00000000000000099999.keys".to_owned(), noise.clone()),
        ("snapshots/00000000000000000001.whole.snap".to_owned(), noise.clone()),
        ("snapshots/00000000000099999999.whole.snap".to_owned(), noise.clone()),
        ("snapshots/strange".to_owned(), noise.clone()),
        ("strange".to_owned(), noise.clone()),
    ];
    // In the way of the next files, of another shard, and a copy of one of ours.
    let (_, _, end) = model.segments.last().unwrap();
    for base in (0..20).map(|n| end + n * 4096) {
        strange.push((format!("log/{base:020}.log"), noise.clone()));
        other.base = base;
        strange.push((format!("log/{base:020}.log"), other.encode()));
    }
    strange.push((format!("log/{:020}-7.log", 0), contents(&disk, first)));
    strange.push((format!("log/{end:020}.log"), contents(&disk, first)));
    for (file, bytes) in strange {
        let (_, disk) = model.copy();
        let path = format!("{DIR}/{file}");
        put(&disk, &path, &bytes);
        assert_nothing_missing(&model, &disk, &format!("{} bytes in {file}", bytes.len()));
        let kept = ["log/", "strange"].iter().any(|part| file.contains(part));
        if kept {
            assert_eq!(contents(&disk, Path::new(&path)), bytes, "{file} was changed");
        }
    }
}

#[test]
fn a_segment_from_an_earlier_life_of_the_log_never_counts() {
    let [killed, model] = build();
    let (_, before) = killed.copy();
    let cut = killed.frames.last().unwrap().position;
    let (path, base, end) = killed.segments.iter().rev().find(|(_, base, _)| *base <= cut).unwrap();
    // The log went on elsewhere from the copy, in a later epoch; then the old end of it is put back.
    let old = contents(&before, path);
    let (memory, disk) = killed.copy();
    memory.cut(path, HEADER + cut - base);
    let store = open_at(small(), &disk, &clock()).unwrap();
    for n in 0..40 {
        send(&store, "sync", 1, &bodies(1, 100, n)).unwrap();
    }
    let queue = store.topic(&name("sync")).unwrap().queues[1].clone();
    let expected = read(&store, &queue).found;
    store.close();
    let next = format!("{DIR}/log/{:020}.log", end + 10 * 4096);
    put(&disk, &next, &old);
    for from_log in [false, true] {
        if from_log {
            delete_derived(&disk);
        }
        let store = open_at(small(), &disk, &clock()).unwrap();
        let queue = store.topic(&name("sync")).unwrap().queues[1].clone();
        assert_eq!(read(&store, &queue).found, expected, "{}, from the log: {from_log}", model.name);
        store.close();
    }
}

#[test]
fn a_log_whose_only_header_is_destroyed_is_known_by_its_snapshot_or_refused_with_file_and_command() {
    let memory = MemoryDisk::new();
    let disk: Arc<dyn Disk> = Arc::new(memory.clone());
    let store = open_at(small(), &disk, &clock()).unwrap();
    create(&store, "t", TopicSettings::default()).unwrap();
    send(&store, "t", 0, &bodies(5, 100, 0)).unwrap();
    store.close();
    let path = "/shard/log/00000000000000000000.log";
    let log = Path::new("/shard/log");
    for file in disk.list(log).unwrap() {
        disk.open(&log.join(file)).unwrap().write_at(&[0; HEADER as usize], 0).unwrap();
    }
    let alone: Arc<dyn Disk> = Arc::new(memory.after_crash(CrashKeeps::Everything));
    let store = open_at(small(), &disk, &clock()).unwrap();
    assert_eq!(read_all(&store, "t", 0).len(), 5);
    assert!(store.status().damage.iter().any(|place| place.file == path), "{:?}", store.status().damage);
    store.close();
    delete_derived(&alone);
    let error = open_at(small(), &alone, &clock()).map(|_| ()).unwrap_err().to_string();
    for part in [path, "0 to 4095", "holdfast store check /shard"] {
        assert!(error.contains(part), "{error}");
    }
}
