//! What every disk does alike, what a crash takes from the one in memory, and how the breaking one breaks.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use proptest::prelude::*;

use super::*;

fn on_every_disk(test: impl Fn(&dyn Disk, &Path)) {
    let dir = tempfile::tempdir().unwrap();
    test(&RealDisk, dir.path());
    test(&MemoryDisk::new(), Path::new("/data"));
    test(&MemoryDisk::new(), Path::new("data"));
    test(&FaultDisk::new(Arc::new(MemoryDisk::new())), Path::new("/data"));
}

fn read(disk: &dyn Disk, path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let file = disk.open(path.as_ref())?;
    let mut bytes = vec![0; file.len()? as usize];
    file.read_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn kind<T>(outcome: io::Result<T>) -> io::ErrorKind {
    outcome.map(|_| ()).unwrap_err().kind()
}

#[test]
fn files_are_made_once_and_found_under_their_names() {
    on_every_disk(|disk, root| {
        let dir = root.join("a/b");
        assert_eq!(disk.list(&dir).unwrap(), [""; 0]);
        assert_eq!(kind(disk.create(&dir.join("x"))), io::ErrorKind::NotFound);
        disk.create_dir_all(&dir).unwrap();
        disk.create_dir_all(&dir).unwrap();
        assert_eq!(kind(disk.open(&dir.join("x"))), io::ErrorKind::NotFound);
        for name in ["y", "x", "z"] {
            disk.create(&dir.join(name)).unwrap().write_at(name.as_bytes(), 0).unwrap();
        }
        assert_eq!(kind(disk.create(&dir.join("x"))), io::ErrorKind::AlreadyExists);
        disk.create_dir_all(&dir.join("c")).unwrap();
        disk.create(&dir.join("c/w")).unwrap();
        assert_eq!(disk.list(&dir).unwrap(), ["x", "y", "z"], "files only, sorted");
        disk.rename(&dir.join("x"), &dir.join("y")).unwrap();
        assert_eq!(read(disk, dir.join("y")).unwrap(), b"x");
        let open = disk.open(&dir.join("z")).unwrap();
        disk.remove(&dir.join("z")).unwrap();
        disk.sync_dir(&dir).unwrap();
        assert_eq!(disk.list(&dir).unwrap(), ["y"]);
        let mut byte = [0];
        open.read_at(&mut byte, 0).unwrap();
        assert_eq!(byte, *b"z", "what is open can still be read");
        for outcome in [disk.remove(&dir.join("z")), disk.rename(&dir.join("z"), &dir.join("q"))] {
            assert_eq!(kind(outcome), io::ErrorKind::NotFound);
        }
        assert_eq!(kind(disk.sync_dir(&root.join("nowhere"))), io::ErrorKind::NotFound);
        assert!(disk.free_bytes(root).unwrap() > 0);
    });
}

#[test]
fn a_directory_is_made_in_a_place_that_cannot_be_listed() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let hidden = root.path().join("hidden");
    std::fs::create_dir(&hidden).unwrap();
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o300)).unwrap();
    // The second finds it there, and empty.
    for _ in 0..2 {
        RealDisk.create_dir_all(&hidden.join("data")).unwrap();
    }
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o700)).unwrap();
    assert!(hidden.join("data").is_dir());
}

#[test]
fn what_was_written_is_read_and_reads_end_with_the_file() {
    on_every_disk(|disk, root| {
        disk.create_dir_all(root).unwrap();
        let file = disk.create(&root.join("f")).unwrap();
        assert!(file.is_empty().unwrap());
        file.allocate(10_000).unwrap();
        file.allocate(5_000).unwrap();
        assert_eq!(file.len().unwrap(), 10_000, "allocating never shortens");
        let mut expected = vec![0; 10_000];
        for (at, len) in [(0, 1), (4090, 20), (8191, 4096), (12_288, 4096), (3, 9000)] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + at) as u8).collect();
            file.write_at(&bytes, at as u64).unwrap();
            expected.resize(expected.len().max(at + len), 0);
            expected[at..at + len].copy_from_slice(&bytes);
            file.start_writeback(0, 10_000);
        }
        file.write_at(&[0; 100], 4000).unwrap();
        expected[4000..4100].fill(0);
        file.sync_data().unwrap();
        assert_eq!(read(disk, root.join("f")).unwrap(), expected);
        let mut into = [0; 10];
        assert_eq!(kind(file.read_at(&mut into, 16_380)), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(file.read_at(&mut into, u64::MAX >> 2)), io::ErrorKind::UnexpectedEof);
        file.read_at(&mut [], 16_384).unwrap();
        assert!(!file.read_at_now(&mut into, 16_380).unwrap());
        if file.read_at_now(&mut into, 4095).unwrap() {
            assert_eq!(into, expected[4095..4105]);
        }
    });
}

#[test]
fn a_map_and_its_file_show_the_same_bytes() {
    on_every_disk(|disk, root| {
        disk.create_dir_all(root).unwrap();
        let file = disk.create(&root.join("f")).unwrap();
        file.allocate(8192).unwrap();
        file.write_at(b"from the file", 4090).unwrap();
        let region = file.map().unwrap();
        assert_eq!(region.len(), 8192);
        let mut into = [0; 13];
        assert!(region.read(4090, &mut into));
        assert_eq!(&into, b"from the file");
        assert!(region.write(8180, b"from the map"));
        let mut into = [0; 12];
        file.read_at(&mut into, 8180).unwrap();
        assert_eq!(&into, b"from the map");
        assert!(region.write(8192, b"") && region.read(8192, &mut []));
        for outside in [8181, 8192, 8193, usize::MAX] {
            assert!(!region.read(outside, &mut into), "{outside}");
            assert!(!region.write(outside, &into), "{outside}");
        }
        region.flush().unwrap();
        drop((region, file));
        assert_eq!(&read(disk, root.join("f")).unwrap()[8180..], b"from the map");
    });
}

#[test]
fn a_lock_has_one_holder_until_it_is_dropped() {
    on_every_disk(|disk, root| {
        disk.create_dir_all(root).unwrap();
        let path = root.join("lock");
        let lock = disk.lock(&path).unwrap();
        assert_eq!(disk.lock(&path).map(|_| ()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(lock);
        drop(disk.lock(&path).unwrap());
        assert_eq!(disk.list(root).unwrap(), ["lock"]);
    });
}

/// A disk with one synced file `/d/f` of `bytes`.
fn with_file(bytes: &[u8]) -> (MemoryDisk, Arc<dyn DiskFile>) {
    let disk = MemoryDisk::new();
    disk.create_dir_all(Path::new("/d")).unwrap();
    let file = disk.create(Path::new("/d/f")).unwrap();
    file.write_at(bytes, 0).unwrap();
    file.sync_data().unwrap();
    disk.sync_dir(Path::new("/d")).unwrap();
    (disk, file)
}

/// Every state in which some power cut may leave `/d/f`.
fn outcomes(disk: &MemoryDisk) -> BTreeSet<Option<Vec<u8>>> {
    (0..200).map(|seed| read(&disk.after_crash(CrashKeeps::Sectors { seed }), "/d/f").ok()).collect()
}

#[test]
fn a_power_cut_takes_what_was_not_synced_and_a_kill_takes_nothing() {
    let (disk, file) = with_file(b"old");
    file.write_at(b"new and longer", 0).unwrap();
    disk.create(Path::new("/d/g")).unwrap().sync_data().unwrap();
    disk.remove(Path::new("/d/f")).unwrap();
    let left = disk.after_crash(CrashKeeps::Synced);
    assert_eq!(read(&left, "/d/f").unwrap(), b"old");
    assert_eq!(left.list(Path::new("/d")).unwrap(), ["f"], "a name is lost though its content was synced");
    let left = disk.after_crash(CrashKeeps::Everything);
    assert_eq!(left.list(Path::new("/d")).unwrap(), ["g"]);
    assert_eq!(
        left.after_crash(CrashKeeps::Synced).list(Path::new("/d")).unwrap(),
        ["f"],
        "still not synced"
    );
    left.sync_dir(Path::new("/d")).unwrap();
    assert_eq!(left.after_crash(CrashKeeps::Synced).list(Path::new("/d")).unwrap(), ["g"]);
    assert!(!disk.crashed());
}

#[test]
fn contents_are_lost_apart_from_names() {
    let disk = MemoryDisk::new();
    disk.create_dir_all(Path::new("/d")).unwrap();
    let file = disk.create(Path::new("/d/f")).unwrap();
    file.write_at(b"bytes", 0).unwrap();
    disk.sync_dir(Path::new("/d")).unwrap();
    assert_eq!(read(&disk.after_crash(CrashKeeps::Synced), "/d/f").unwrap(), b"", "the name alone");
    assert_eq!(
        outcomes(&disk),
        [Some(vec![]), Some(vec![0; 5]), Some(b"bytes".to_vec())].into(),
        "a length may come without its bytes"
    );
}

#[test]
fn each_unsynced_sector_survives_or_not() {
    let (disk, file) = with_file(&[b'o'; 1024]);
    file.write_at(&[b'n'; 2], 511).unwrap();
    let mut all = BTreeSet::new();
    for (first, second) in [(b'o', b'o'), (b'o', b'n'), (b'n', b'o'), (b'n', b'n')] {
        let mut bytes = vec![b'o'; 1024];
        (bytes[511], bytes[512]) = (first, second);
        all.insert(Some(bytes));
    }
    assert_eq!(outcomes(&disk), all);
    file.sync_data().unwrap();
    assert_eq!(outcomes(&disk).len(), 1);
}

#[test]
fn a_sector_keeps_the_order_of_its_writes() {
    let (disk, file) = with_file(b"....");
    file.write_at(b"a", 0).unwrap();
    file.write_at(b"b", 1).unwrap();
    let found = outcomes(&disk);
    assert_eq!(found, ["....", "a...", "ab.."].map(|text| Some(text.as_bytes().to_vec())).into());
}

#[test]
fn a_write_that_the_crash_cut_short_may_be_there_in_part() {
    let (disk, file) = with_file(b"....");
    disk.set_crash_at(Some(disk.operations()));
    assert!(!disk.crashed());
    assert_eq!(kind(file.write_at(b"abcd", 0)), io::ErrorKind::Other);
    assert!(disk.crashed());
    for outcome in [file.write_at(b"x", 0), file.sync_data(), file.read_at(&mut [0], 0)] {
        outcome.unwrap_err();
    }
    assert_eq!(read(&disk.after_crash(CrashKeeps::Everything), "/d/f").unwrap(), b"....");
    assert_eq!(outcomes(&disk), ["....", "abcd"].map(|text| Some(text.as_bytes().to_vec())).into());
    let torn: BTreeSet<_> =
        (0..200).map(|seed| read(&disk.after_crash(CrashKeeps::Torn { seed }), "/d/f").unwrap()).collect();
    assert_eq!(torn, ["....", "a...", "ab..", "abc.", "abcd"].map(|text| text.as_bytes().to_vec()).into());
}

#[test]
fn unsynced_names_survive_in_any_combination() {
    let (disk, _) = with_file(b"f");
    let dir = Path::new("/d");
    disk.rename(Path::new("/d/f"), Path::new("/d/g")).unwrap();
    disk.create(Path::new("/d/h")).unwrap();
    let left: BTreeSet<_> = (0..100)
        .map(|seed| disk.after_crash(CrashKeeps::Sectors { seed }).list(dir).unwrap().concat())
        .collect();
    assert_eq!(left, ["f", "g", "fh", "gh"].map(String::from).into());
    disk.sync_dir(dir).unwrap();
    assert_eq!(disk.after_crash(CrashKeeps::Synced).list(dir).unwrap(), ["g", "h"]);
}

#[test]
fn what_a_region_holds_is_durable_after_its_flush() {
    let (disk, file) = with_file(&[0; 1024]);
    let region = file.map().unwrap();
    assert!(region.write(510, b"abcd"));
    let mut full = vec![0; 1024];
    full[510..514].copy_from_slice(b"abcd");
    assert_eq!(read(&disk.after_crash(CrashKeeps::Synced), "/d/f").unwrap(), [0; 1024]);
    assert_eq!(read(&disk.after_crash(CrashKeeps::Everything), "/d/f").unwrap(), full);
    assert_eq!(outcomes(&disk).len(), 4, "by sector");
    region.flush().unwrap();
    assert_eq!(read(&disk.after_crash(CrashKeeps::Synced), "/d/f").unwrap(), full);
    disk.crash();
    assert!(region.write(0, b"late"));
    assert_eq!(read(&disk.after_crash(CrashKeeps::Everything), "/d/f").unwrap(), full);
}

#[test]
fn the_crash_comes_before_every_call_once_and_frees_the_lock() {
    let work = |disk: &MemoryDisk| -> io::Result<()> {
        disk.create_dir_all(Path::new("/d"))?;
        let _lock = disk.lock(Path::new("/d/lock"))?;
        let file = disk.create(Path::new("/d/f.tmp"))?;
        file.allocate(1024)?;
        file.write_at(b"x", 0)?;
        file.sync_data()?;
        file.map()?.flush()?;
        disk.rename(Path::new("/d/f.tmp"), Path::new("/d/f"))?;
        disk.sync_dir(Path::new("/d"))?;
        disk.remove(Path::new("/d/f"))
    };
    let mut cuts = 0;
    loop {
        let disk = MemoryDisk::crash_at(cuts);
        let outcome = work(&disk);
        assert_eq!(outcome.is_err(), disk.crashed());
        assert_eq!(disk.operations(), cuts);
        if !disk.crashed() {
            break;
        }
        let left = disk.after_crash(CrashKeeps::Everything);
        left.create_dir_all(Path::new("/d")).unwrap();
        left.lock(Path::new("/d/lock")).map(|_| ()).unwrap();
        cuts += 1;
    }
    assert_eq!(cuts, 10);
}

#[test]
fn a_full_disk_refuses_to_grow_and_files_give_their_room_back() {
    let disk = MemoryDisk::with_capacity(10_000);
    disk.create_dir_all(Path::new("/d")).unwrap();
    let free = || disk.free_bytes(Path::new("/d")).unwrap();
    let file = disk.create(Path::new("/d/f")).unwrap();
    file.allocate(6_000).unwrap();
    assert_eq!(free(), 4_000);
    assert_eq!(kind(file.write_at(&[1; 5_000], 6_000)), io::ErrorKind::StorageFull);
    assert_eq!(kind(file.allocate(10_001)), io::ErrorKind::StorageFull);
    assert_eq!(file.len().unwrap(), 6_000);
    file.write_at(&[1; 6_000], 0).unwrap();
    disk.remove(Path::new("/d/f")).unwrap();
    assert_eq!(free(), 4_000, "still open");
    drop(file);
    assert_eq!(free(), 10_000);
    let file = disk.create(Path::new("/d/g")).unwrap();
    file.allocate(8_000).unwrap();
    disk.set_capacity(5_000);
    assert_eq!(free(), 0);
    assert_eq!(kind(file.allocate(8_001)), io::ErrorKind::StorageFull);
    assert_eq!(disk.after_crash(CrashKeeps::Everything).free_bytes(Path::new("/d")).unwrap(), 0);
    assert_eq!(disk.after_crash(CrashKeeps::Synced).free_bytes(Path::new("/d")).unwrap(), 5_000);
}

#[test]
fn a_failing_device_changes_bytes_and_lengths_behind_the_store() {
    let (disk, file) = with_file(b"abcd");
    assert!(disk.flip(Path::new("/d/f"), 1, 0x20));
    assert!(!disk.flip(Path::new("/d/f"), 4, 1) && !disk.flip(Path::new("/d/none"), 0, 1));
    disk.cut(Path::new("/d/f"), 3);
    assert_eq!(file.len().unwrap(), 3);
    for keeps in [CrashKeeps::Synced, CrashKeeps::Everything] {
        assert_eq!(read(&disk.after_crash(keeps), "/d/f").unwrap(), b"aBc");
    }
}

proptest! {
    #[test]
    fn any_power_cut_leaves_synced_bytes_alone(
        writes in prop::collection::vec((0..6_000_u64, 1..3_000_usize, any::<u8>(), prop::bool::weighted(0.3)), 1..20),
        seed: u64,
    ) {
        let (disk, file) = with_file(b"");
        let mut synced = Vec::new();
        let mut current = Vec::new();
        let mut touched = BTreeSet::new();
        for (at, len, byte, sync) in writes {
            file.write_at(&vec![byte; len], at).unwrap();
            let (begin, end) = (at as usize, at as usize + len);
            current.resize(current.len().max(end), 0);
            current[begin..end].fill(byte);
            touched.extend(begin / 512..=(end - 1) / 512);
            if sync {
                file.sync_data().unwrap();
                synced.clone_from(&current);
                touched.clear();
            }
        }
        prop_assert_eq!(read(&disk.after_crash(CrashKeeps::Everything), "/d/f").unwrap(), &current[..]);
        prop_assert_eq!(read(&disk.after_crash(CrashKeeps::Synced), "/d/f").unwrap(), &synced[..]);
        let left = read(&disk.after_crash(CrashKeeps::Sectors { seed }), "/d/f").unwrap();
        prop_assert!((synced.len()..=current.len()).contains(&left.len()));
        let again = read(&disk.after_crash(CrashKeeps::Sectors { seed }), "/d/f").unwrap();
        prop_assert_eq!(&left, &again, "the same seed, the same crash");
        for (sector, bytes) in left.chunks(512).enumerate() {
            let known = synced.iter().chain(std::iter::repeat(&0)).skip(sector * 512);
            prop_assert!(touched.contains(&sector) || bytes.iter().eq(known.take(bytes.len())));
        }
    }
}

fn faulty() -> (FaultDisk, Arc<dyn DiskFile>) {
    let disk = FaultDisk::new(Arc::new(MemoryDisk::new()));
    disk.create_dir_all(Path::new("/d")).unwrap();
    let file = disk.create(Path::new("/d/f.log")).unwrap();
    (disk, file)
}

#[test]
fn a_fault_strikes_where_and_when_it_was_told_to() {
    let (disk, file) = faulty();
    let other = disk.create(Path::new("/d/g.keys")).unwrap();
    disk.inject(Fault::error(Operation::Write, io::ErrorKind::StorageFull).on(".log").nth(2));
    file.write_at(b"1", 0).unwrap();
    other.write_at(b"1", 0).unwrap();
    assert_eq!(kind(file.write_at(b"2", 0)), io::ErrorKind::StorageFull);
    file.write_at(b"3", 0).unwrap();
    disk.inject(Fault::device(Operation::Sync).times(2));
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(5));
    file.map().unwrap().flush().unwrap_err();
    file.sync_data().unwrap();
    disk.inject(Fault::error(Operation::Write, io::ErrorKind::StorageFull).half());
    file.write_at(b"abcd", 0).unwrap_err();
    file.write_at(b"ABCD", 2).unwrap_err();
    assert_eq!(read(&disk, "/d/f.log").unwrap(), b"abAB");
    disk.clear();
    file.write_at(b"3", 0).unwrap();
    assert_eq!((disk.count(Operation::Write), disk.count(Operation::Sync)), (7, 3));
}

#[test]
fn every_kind_of_call_can_fail() {
    let (disk, file) = faulty();
    let (path, dir) = (Path::new("/d/f.log"), Path::new("/d"));
    use Operation::*;
    let calls: [(Operation, &dyn Fn() -> io::Result<()>); 11] = [
        (Open, &|| disk.open(path).map(|_| ())),
        (Create, &|| disk.create(Path::new("/d/new")).map(|_| ())),
        (Write, &|| file.write_at(b"x", 0)),
        (Read, &|| file.read_at(&mut [0], 0)),
        (Allocate, &|| file.allocate(100)),
        (Sync, &|| file.sync_data()),
        (Map, &|| file.map().map(|_| ())),
        (SyncDir, &|| disk.sync_dir(dir)),
        (Rename, &|| disk.rename(Path::new("/d/new"), Path::new("/d/newer"))),
        (Remove, &|| disk.remove(path)),
        (Free, &|| disk.free_bytes(dir).map(|_| ())),
    ];
    for (operation, call) in calls {
        disk.inject(Fault::device(operation).times(1));
        assert_eq!(call().unwrap_err().raw_os_error(), Some(5), "{operation:?}");
        call().unwrap();
        assert!(disk.count(operation) >= 2, "{operation:?}");
    }
}

#[test]
fn a_held_call_waits_until_it_is_released() {
    let (disk, file) = faulty();
    let hold = disk.hold(Operation::Sync, ".log");
    disk.inject(Fault::delay(Operation::Sync, Duration::from_millis(1)));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            file.sync_data().unwrap();
            done.store(true, Ordering::SeqCst);
        });
        while hold.waiting() == 0 {
            thread::yield_now();
        }
        assert!(!done.load(Ordering::SeqCst));
        file.write_at(b"others go on", 0).unwrap();
        drop(hold);
    });
    assert!(done.load(Ordering::SeqCst));
}

#[test]
fn a_cold_disk_reads_only_with_waiting_and_a_lying_one_has_the_room_it_says() {
    let (disk, file) = faulty();
    file.write_at(b"x", 0).unwrap();
    disk.set_cold(true);
    assert!(!file.read_at_now(&mut [0], 0).unwrap());
    file.read_at(&mut [0], 0).unwrap();
    disk.set_cold(false);
    assert!(file.read_at_now(&mut [0], 0).unwrap());
    disk.set_free_bytes(Some(7));
    assert_eq!(disk.free_bytes(Path::new("/d")).unwrap(), 7);
    disk.set_free_bytes(None);
    assert!(disk.free_bytes(Path::new("/d")).unwrap() > 7);
}
