use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use proptest::prelude::*;

use super::{run::PAIRS, *};
use crate::store::disk::{CrashKeeps, Fault, FaultDisk, MemoryDisk, Operation};

const SHARD: u64 = 0x5EED;
const DIR: &str = "/shard/keys";

fn open(disk: &MemoryDisk, log_start: u64) -> (KeyIndex, u64) {
    KeyIndex::open(Arc::new(disk.clone()), DIR.into(), SHARD, 1 << 20, log_start).unwrap()
}

fn all(index: &KeyIndex, hash: u64) -> Vec<u64> {
    let mut found = Vec::new();
    assert!(!index.lookup(hash, usize::MAX, &mut found).unwrap());
    found
}

fn files(disk: &MemoryDisk) -> Vec<String> {
    disk.list(Path::new(DIR)).unwrap()
}

/// Spreads small numbers, as real hashes are.
fn hash(n: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&n.to_le_bytes())
}

/// A file per flush: positions `from`, `from + 8` … with the hashes of `n % keys`.
fn fill(index: &KeyIndex, from: u64, count: u64, keys: u64) -> Vec<Pair> {
    let pairs: Vec<Pair> = (0..count).map(|n| (hash(n % keys), from + n * 8)).collect();
    index.insert_pairs(&pairs);
    index.flush(from + count * 8).unwrap();
    pairs
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Vec<u64>),
    Flush { back: u64 },
    Merge,
    Reopen,
    Crash { seed: u64 },
    RemoveBelow { part: u64 },
    Cut { back: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => proptest::collection::vec(0..40_u64, 1..400).prop_map(Step::Insert),
        6 => (0..3000_u64).prop_map(|back| Step::Flush { back }),
        3 => Just(Step::Merge),
        1 => Just(Step::Reopen),
        1 => any::<u64>().prop_map(|seed| Step::Crash { seed }),
        1 => (0..100_u64).prop_map(|part| Step::RemoveBelow { part }),
        1 => (0..3000_u64).prop_map(|back| Step::Cut { back }),
    ];
    proptest::collection::vec(step, 1..80)
}

/// What the log holds, and an index that must always agree with it.
struct Model {
    disk: MemoryDisk,
    index: KeyIndex,
    log: Vec<Pair>,
    start: u64,
    end: u64,
}

impl Model {
    fn reopen(&mut self) {
        let (index, covered) = open(&self.disk, self.start);
        self.index = index;
        assert!(covered >= self.start);
        for &(hash, position) in &self.log {
            self.index.insert_all(position, std::iter::once(hash));
        }
        self.index.cut(self.end).unwrap();
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Insert(keys) => {
                let mut pairs = Vec::new();
                for key in keys {
                    // Several hashes of one record, and now and then the same twice.
                    self.end += key % 4 * 8;
                    pairs.push((hash(key), self.end));
                }
                self.end += 8;
                self.log.extend(&pairs);
                self.index.insert_pairs(&pairs);
            }
            Step::Flush { back } => self.index.flush(self.end.saturating_sub(back)).unwrap(),
            Step::Merge => self.index.merge(self.end).unwrap(),
            Step::Reopen => self.reopen(),
            Step::Crash { seed } => {
                self.disk = self.disk.after_crash(CrashKeeps::Sectors { seed });
                self.reopen();
            }
            Step::RemoveBelow { part } => {
                self.start += (self.end - self.start) * part / 100;
                self.log.retain(|pair| pair.1 >= self.start);
                self.index.remove_below(self.start);
            }
            Step::Cut { back } => {
                self.end = self.end.saturating_sub(back).max(self.start);
                self.log.retain(|pair| pair.1 < self.end);
                self.reopen();
            }
        }
    }

    /// Everything in the log, newest first; what retention took may still be found behind it.
    fn check(&self) {
        for key in 0..41 {
            let expected: BTreeSet<u64> =
                self.log.iter().filter(|pair| pair.0 == hash(key)).map(|pair| pair.1).collect();
            let expected: Vec<u64> = expected.into_iter().rev().collect();
            let found = all(&self.index, hash(key));
            assert!(found.is_sorted_by(|a, b| a > b), "{found:?}");
            let (live, dead) = found.split_at(found.partition_point(|position| *position >= self.start));
            assert_eq!(live, expected, "key {key}");
            assert!(dead.iter().all(|position| *position < self.start));
            let mut some = vec![u64::MAX];
            let more = self.index.lookup(hash(key), 3, &mut some).unwrap();
            assert_eq!((&some[1..], more), (&found[..found.len().min(3)], found.len() > 3));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn what_is_found_is_what_the_log_holds(steps in steps()) {
        let disk = MemoryDisk::new();
        let (index, covered) = open(&disk, 0);
        prop_assert_eq!(covered, 0);
        let mut model = Model { disk, index, log: Vec::new(), start: 0, end: 0 };
        for step in steps {
            model.apply(step);
            model.check();
        }
        prop_assert_eq!(model.index.damaged(), 0);
    }
}

/// A run with several pages of entries, one key on more than a page of its own, and one more run.
fn two_runs() -> (MemoryDisk, Vec<Pair>, u64) {
    let disk = MemoryDisk::new();
    let (index, _) = open(&disk, 0);
    let mut pairs: Vec<Pair> = (0..700).map(|n| (hash(if n % 2 == 0 { 0 } else { n }), n * 8)).collect();
    index.insert_pairs(&pairs);
    index.flush(700 * 8).unwrap();
    pairs.extend(fill(&index, 700 * 8, 10, 3));
    (disk, pairs, 710 * 8)
}

#[test]
fn a_flip_anywhere_in_a_run_is_noticed_or_does_no_harm() {
    let (disk, pairs, end) = two_runs();
    let names = files(&disk);
    assert_eq!(names.len(), 2);
    let expected = |wanted: u64| -> Vec<u64> {
        pairs.iter().rev().filter(|pair| pair.0 == wanted).map(|pair| pair.1).collect()
    };
    let keys: BTreeSet<u64> = pairs.iter().map(|pair| pair.0).collect();
    let path = Path::new(DIR).join(&names[0]);
    let bytes = disk.open(&path).unwrap().len().unwrap();
    let mut seen = [0; 2];
    for at in (0..bytes).step_by(61).chain(0..64).chain([bytes - 1]) {
        let disk = disk.after_crash(CrashKeeps::Synced);
        let file = disk.open(&path).unwrap();
        let mut byte = [0];
        file.read_at(&mut byte, at).unwrap();
        file.write_at(&[byte[0] ^ 0x40], at).unwrap();
        let (index, covered) = open(&disk, 0);
        if covered < end {
            // Not used, and nor is what follows it: all of it is read from the log again.
            assert_eq!((covered, files(&disk)), (0, vec![]), "byte {at}");
            seen[0] += 1;
            continue;
        }
        let mut refused = false;
        for &key in &keys {
            let mut found = Vec::new();
            match index.lookup(key, usize::MAX, &mut found) {
                Ok(_) => assert_eq!(found, expected(key), "byte {at}"),
                Err(_) => refused = true,
            }
        }
        assert!(refused && index.damaged() > 0, "byte {at}");
        seen[1] += 1;
        // A merge neither trips over it nor hides it.
        for n in 0..8 {
            fill(&index, end + n * 80, 10, 3);
        }
        index.merge(u64::MAX).unwrap();
        assert!(files(&disk).contains(&names[0]));
        // Rebuilt from the log, it finds everything again.
        if let Some(part) = index.damaged_part() {
            let own = pairs.iter().filter(|pair| part.contains(&pair.1));
            let mut sorted: Vec<Pair> = own.copied().collect();
            sorted.sort_by_key(|pair| pair.1);
            index
                .mend(&part, |push| {
                    sorted.iter().for_each(|pair| push(*pair));
                    Ok(())
                })
                .unwrap();
            assert_eq!(index.damaged_part(), None, "byte {at}");
            let (index, _) = open(&disk, 0);
            for &key in &keys {
                let found = all(&index, key);
                assert!(found.ends_with(&expected(key)), "byte {at}");
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 0), "dropped, refused: {seen:?}");
}

#[test]
fn a_file_cut_short_or_of_another_shard_is_not_used() {
    let (disk, _, end) = two_runs();
    assert_eq!(open(&disk, 0).1, end);
    let other = KeyIndex::open(Arc::new(disk.clone()), DIR.into(), SHARD + 1, 1 << 20, 0).unwrap();
    assert_eq!((other.1, files(&disk)), (0, vec![]));

    for bytes in [0, 100, 4096, 8192, 5 * 4096] {
        let (disk, _, _) = two_runs();
        let path = Path::new(DIR).join(&files(&disk)[1]);
        let mut content = vec![0; disk.open(&path).unwrap().len().unwrap() as usize];
        disk.open(&path).unwrap().read_at(&mut content, 0).unwrap();
        assert_eq!(content.len(), 4 * 4096);
        content.resize(bytes, 0);
        disk.remove(&path).unwrap();
        disk.create(&path).unwrap().write_at(&content, 0).unwrap();
        assert_eq!((open(&disk, 0).1, files(&disk).len()), (700 * 8, 1), "{bytes} bytes");
    }
}

#[test]
fn every_entry_is_found_while_runs_are_written_and_merged() {
    let disk = MemoryDisk::new();
    let (index, _) = open(&disk, 0);
    let stop = AtomicBool::new(false);
    let inserted = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Key 1 every time, key 2 at every hundredth.
            for n in 0..60_000_u64 {
                let pairs = [(hash(1), n * 8), (hash(2), n * 8)];
                index.insert_pairs(&pairs[..if n % 100 == 0 { 2 } else { 1 }]);
                inserted.store(n + 1, Ordering::Release);
            }
            stop.store(true, Ordering::Release);
        });
        scope.spawn(|| {
            // Once more when all is inserted: its turn may not have come before.
            loop {
                let over = stop.load(Ordering::Acquire);
                let through = inserted.load(Ordering::Acquire) * 8;
                index.flush(through).and_then(|()| index.merge(through)).unwrap();
                if over {
                    break;
                }
            }
        });
        while !stop.load(Ordering::Acquire) {
            let before = inserted.load(Ordering::Acquire);
            let mut newest = Vec::new();
            index.lookup(hash(1), 1, &mut newest).unwrap();
            assert!(before == 0 || newest[0] / 8 + 1 >= before);
            let found = all(&index, hash(2));
            assert!(found.iter().rev().copied().eq((0..found.len() as u64).map(|n| n * 800)), "a hole");
            assert!(found.len() as u64 >= before.div_ceil(100));
        }
    });
    assert!(index.size().0 > 0);
}

#[test]
fn what_is_being_written_is_found_meanwhile() {
    let memory = MemoryDisk::new();
    let disk = FaultDisk::new(Arc::new(memory.clone()));
    let (index, _) = KeyIndex::open(Arc::new(disk.clone()), DIR.into(), SHARD, 1 << 20, 0).unwrap();
    index.insert_pairs(&[(1, 0), (1, 8), (1, 16)]);
    thread::scope(|scope| {
        let hold = disk.hold(Operation::Sync, "keys");
        let flush = scope.spawn(|| index.flush(16));
        while hold.waiting() == 0 {
            thread::yield_now();
        }
        index.insert_pairs(&[(1, 24)]);
        assert_eq!(all(&index, 1), [24, 16, 8, 0]);
        drop(hold);
        flush.join().unwrap().unwrap();
    });
    assert_eq!((all(&index, 1), index.in_memory()), (vec![24, 16, 8, 0], 2));
    // One that fails changes nothing.
    disk.inject(Fault::device(Operation::Sync).on("keys").times(1));
    index.flush(32).unwrap_err();
    assert_eq!((all(&index, 1), files(&memory).len()), (vec![24, 16, 8, 0], 1));
    index.flush(32).unwrap();
    drop(index);
    let (index, covered) = open(&memory, 0);
    assert_eq!((all(&index, 1), covered), (vec![24, 16, 8, 0], 32));
}

#[test]
fn a_hot_key_costs_a_few_pages_however_often_it_occurs() {
    let disk = FaultDisk::new(Arc::new(MemoryDisk::new()));
    let (index, _) = KeyIndex::open(Arc::new(disk.clone()), DIR.into(), SHARD, 1 << 20, 0).unwrap();
    fill(&index, 0, PAIRS * 600, 1);
    let before = disk.count(Operation::Read);
    let mut found = Vec::new();
    assert!(index.lookup(hash(0), 64, &mut found).unwrap());
    assert_eq!(disk.count(Operation::Read) - before, 3, "filter, index, entries");
    let newest = PAIRS * 600 * 8;
    assert_eq!(found, (1..=64).map(|n| newest - n * 8).collect::<Vec<_>>());
    // And one that is not there hardly ever more than the filter.
    let before = disk.count(Operation::Read);
    for n in 1..1000 {
        assert!(!index.lookup(hash(n), 64, &mut found).unwrap());
    }
    assert!(disk.count(Operation::Read) - before < 1100);
}

#[test]
fn nothing_is_lost_wherever_the_plug_is_pulled() {
    let work = |disk: &MemoryDisk| -> io::Result<()> {
        let (index, covered) = KeyIndex::open(Arc::new(disk.clone()), DIR.into(), SHARD, 1 << 20, 0)?;
        for n in covered / 80..20 {
            let pairs: Vec<Pair> = (0..10).map(|m| (hash(m), (n * 10 + m) * 8)).collect();
            index.insert_pairs(&pairs);
            index.flush((n + 1) * 80)?;
            index.merge((n + 1) * 80)?;
        }
        Ok(())
    };
    for crash_at in 0.. {
        let disk = MemoryDisk::crash_at(crash_at);
        let ended = work(&disk);
        for keeps in [
            CrashKeeps::Synced,
            CrashKeeps::Everything,
            CrashKeeps::Torn { seed: crash_at },
            CrashKeeps::Sectors { seed: crash_at },
            CrashKeeps::Sectors { seed: !crash_at },
        ] {
            let disk = disk.after_crash(keeps);
            let (index, covered) = open(&disk, 0);
            for m in 0..10 {
                let expected: Vec<u64> = (0..covered / 80).rev().map(|n| (n * 10 + m) * 8).collect();
                assert_eq!(all(&index, hash(m)), expected, "crash at {crash_at}, {keeps:?}");
            }
            assert_eq!(index.damaged(), 0);
            let (runs, _) = index.size();
            assert_eq!(runs, files(&disk).len() as u64, "crash at {crash_at}, {keeps:?}");
            drop(index);
            work(&disk).unwrap();
            assert_eq!(open(&disk, 0).1, 20 * 80);
        }
        if ended.is_ok() {
            assert!(crash_at > 100);
            return;
        }
    }
}

#[test]
fn runs_behind_a_gap_are_read_from_the_log_again_and_those_before_the_log_go() {
    let disk = MemoryDisk::new();
    let (index, _) = open(&disk, 0);
    for n in 0..4 {
        fill(&index, n * 80, 10, 3);
    }
    drop(index);
    let names = files(&disk);
    let (index, covered) = open(&disk, 100);
    assert_eq!((covered, files(&disk)), (320, names[1..].to_vec()));
    index.remove_below(160);
    assert_eq!(files(&disk), names[2..]);
    drop(index);
    disk.remove(&Path::new(DIR).join(&names[2])).unwrap();
    let (index, covered) = open(&disk, 160);
    assert_eq!((covered, files(&disk)), (160, vec![]));
    assert!(index.due(160 + (1 << 20)) && !index.due(159 + (1 << 20)));
    fill(&index, 160, 20, 3);
    assert_eq!(files(&disk), ["00000000000000000160-00000000000000000320.keys"]);
}

#[test]
fn runs_stay_few_and_a_merge_leaves_out_what_the_log_has_no_more() {
    let disk = MemoryDisk::new();
    let (index, _) = open(&disk, 0);
    for n in 0..64 {
        fill(&index, n * 80, 10, 10);
        index.merge(n * 80).unwrap();
        index.remove_below(n * 40);
    }
    assert!(index.size().0 <= 3 * 7, "{:?}", files(&disk));
    let found = all(&index, hash(0));
    assert!(found.starts_with(&(32..64).rev().map(|n| n * 80).collect::<Vec<_>>()));
    assert!(found.len() < 64, "nothing left out");
}

#[test]
fn memory_has_a_bound_when_runs_cannot_be_written_and_the_next_start_fills_the_gap() {
    let disk = MemoryDisk::new();
    let (index, _) = open(&disk, 0);
    fill(&index, 0, 10, 10);
    let many = MAX_PAIRS as u64 + 20_000;
    for n in (10..many).step_by(1000) {
        let pairs: Vec<Pair> = (n..n + 1000).map(|n| (n, n * 8)).collect();
        index.insert_pairs(&pairs);
    }
    assert!(index.in_memory() <= MAX_PAIRS as u64);
    assert!(all(&index, 20).is_empty());
    assert_eq!(all(&index, many - 1), vec![(many - 1) * 8]);
    index.flush(many * 8).unwrap();
    assert_eq!(files(&disk).len(), 2);
    drop(index);
    assert_eq!(open(&disk, 0).1, 80);
}

#[test]
fn the_bytes_on_disk_are_those_of_format_1() {
    let disk = MemoryDisk::new();
    let (index, _) = open(&disk, 1 << 20);
    fill(&index, 1 << 20, 300, 100);
    let names = files(&disk);
    assert_eq!(names, ["00000000000001048576-00000000000001050976.keys"]);
    let file = disk.open(&Path::new(DIR).join(&names[0])).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/keys-v1.bin");
    if std::env::var_os("HOLDFAST_WRITE_GOLDEN").is_some() {
        std::fs::write(path, &bytes).unwrap();
    }
    assert!(bytes == std::fs::read(path).unwrap());
}
