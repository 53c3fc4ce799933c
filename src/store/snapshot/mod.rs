//! Snapshots: the tables as they stand at a position, so that a start reads only the log behind it.
//!
//! A cache, never believed more than the log: it is published only when everything in it is durable in
//! the log, and a damaged one is passed over.
//!
//! A snapshot is a chain of parts, one file each: a whole one, then parts that say only what has changed
//! since the part before. What is saved thus goes with what happens, not with how many queues there are.
//! A chain may be cut anywhere: what is left is an older snapshot. Once the changes have grown to the size
//! of the whole, a new whole one is written; the chain before it is kept until the next.
//!
//! | file | what |
//! |---|---|
//! | `<position>.whole.snap` | everything |
//! | `<position>.part.snap` | what has changed since the part that it names |

mod items;
mod part;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
};

use self::{
    items::Loader,
    part::{PartHeader, PartReader, PartWriter},
};
use super::{disk::Disk, recovery::snapshot_dir, shard::Shard, tables::Tables};

/// Most parts of a chain.
const MAX_PARTS: usize = 256;
const WHOLE: &str = ".whole.snap";
const PART: &str = ".part.snap";
/// A part in the making.
const TEMPORARY: &str = "new.tmp";

/// What a snapshot says of the log.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    pub position: u64,
    pub epoch: u32,
    pub store_ms: u64,
}

/// The parts of the newest snapshot, oldest first, as positions and lengths. The first one is whole.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    parts: VecDeque<(u64, u64)>,
}

impl Chain {
    /// Where the newest part stands, if the next may be a part behind it.
    fn extendable(&self) -> Option<u64> {
        let (_, whole) = *self.parts.front()?;
        let changed: u64 = self.parts.iter().skip(1).map(|(_, bytes)| bytes).sum();
        let fits = changed < whole && self.parts.len() < MAX_PARTS;
        self.parts.back().filter(|_| fits).map(|(position, _)| *position)
    }
}

/// A snapshot as it was read.
pub struct Loaded {
    pub tables: Tables,
    pub snapshot: Snapshot,
    pub chain: Chain,
}

/// Saves the tables, or what of them has changed since the newest part of `chain`. Runs beside the writer,
/// which never waits for it.
pub fn save(shard: &Arc<Shard>, chain: &mut Chain) -> io::Result<Snapshot> {
    // What is dispatched now is in the tables below; what comes meanwhile may be, and is replayed.
    let position = shard.dispatched.load(Ordering::Acquire);
    let released = shard.space.waiting();
    let (epoch, store_ms) = {
        let inner = shard.inner.lock();
        (inner.epoch, inner.last_ms)
    };
    let snapshot = Snapshot { position, epoch, store_ms };
    let previous = chain.extendable().filter(|&previous| previous < position);

    let dir = snapshot_dir(&shard.options);
    let path = dir.join(name(position, previous.is_none()));
    let temporary = dir.join(TEMPORARY);
    remove_if_there(&shard.disk, &temporary)?;
    let header = PartHeader { shard_id: shard.shard_id, snapshot, previous };
    let mut writer = PartWriter::new(shard.disk.create(&temporary)?, &header)?;
    items::write(&shard.tables, previous.unwrap_or(0), &mut writer)?;
    let included = shard.inner.lock().end;
    let bytes = writer.finish()?;

    shard.space.flush()?;
    wait_until_durable(shard, included)?;
    shard.disk.rename(&temporary, &path)?;
    shard.disk.sync_dir(&dir)?;
    if previous.is_none() {
        chain.parts.clear();
    }
    chain.parts.push_back((position, bytes));
    shard.tables.forget_gone(position);
    shard.space.recycle(released);
    prune(&shard.disk, &dir)?;
    Ok(snapshot)
}

fn wait_until_durable(shard: &Arc<Shard>, end: u64) -> io::Result<()> {
    if end == 0 {
        return Ok(());
    }
    shard.settled(end - 1).wait().map(|_| ()).map_err(|error| io::Error::other(error.to_string()))
}

/// Removes what lies before the second newest whole one.
fn prune(disk: &Arc<dyn Disk>, dir: &Path) -> io::Result<()> {
    let names = names(disk, dir)?;
    let kept = names.iter().filter(|name| name.ends_with(WHOLE)).nth(1).and_then(|name| position_of(name));
    for name in names {
        if position_of(&name).is_some_and(|position| Some(position) < kept) {
            disk.remove(&dir.join(name))?;
        }
    }
    Ok(())
}

/// Removes parts that are of no use any more, durably.
pub fn remove(disk: &Arc<dyn Disk>, dir: &Path, files: &[PathBuf]) -> io::Result<()> {
    for file in files {
        remove_if_there(disk, file)?;
    }
    if files.is_empty() { Ok(()) } else { disk.sync_dir(dir) }
}

fn remove_if_there(disk: &Arc<dyn Disk>, path: &Path) -> io::Result<()> {
    match disk.remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn name(position: u64, whole: bool) -> String {
    format!("{position:020}{}", if whole { WHOLE } else { PART })
}

fn position_of(name: &str) -> Option<u64> {
    name.strip_suffix(WHOLE).or_else(|| name.strip_suffix(PART))?.parse().ok()
}

/// Names of the parts, newest first.
fn names(disk: &Arc<dyn Disk>, dir: &Path) -> io::Result<Vec<String>> {
    let mut names = disk.list(dir)?;
    names.retain(|name| position_of(name).is_some());
    names.sort_by_key(|name| std::cmp::Reverse((position_of(name), name.ends_with(WHOLE))));
    Ok(names)
}

/// Shards that the files in `dir` say they belong to; nothing of them is checked.
pub fn shard_ids(disk: &Arc<dyn Disk>, dir: &Path) -> Vec<u64> {
    let names = names(disk, dir).unwrap_or_default();
    names.iter().filter_map(|name| part::shard_id(disk, &dir.join(name))).collect()
}

/// The snapshots that end with each of the parts in `dir`, newest first, each read when it is asked for.
pub fn load_all(
    disk: &Arc<dyn Disk>,
    dir: &Path,
    shard_id: u64,
) -> impl Iterator<Item = (PathBuf, Result<Loaded, String>)> {
    let names = names(disk, dir).unwrap_or_default();
    (0..names.len()).filter_map(move |at| {
        let newest = names.get(at)?;
        let loaded = load(disk, dir, names.get(at..)?, shard_id);
        Some((dir.join(newest), loaded))
    })
}

/// Reads the chain that ends with the first of `names`.
fn load(disk: &Arc<dyn Disk>, dir: &Path, names: &[String], shard_id: u64) -> Result<Loaded, String> {
    let mut chain = Chain::default();
    let mut readers = VecDeque::new();
    let mut wanted = None;
    for name in names {
        if wanted.is_some() && position_of(name) != wanted {
            continue;
        }
        let path = dir.join(name);
        let in_part = |error: String| format!("{}: {error}", path.display());
        let reader = PartReader::open(disk, &path, shard_id).map_err(in_part)?;
        let PartHeader { snapshot, previous, .. } = *reader.header();
        if previous.is_none() != name.ends_with(WHOLE) || Some(snapshot.position) != position_of(name) {
            return Err(in_part("its name does not fit what it holds".into()));
        }
        chain.parts.push_front((snapshot.position, reader.bytes()));
        readers.push_front(reader);
        match previous {
            None => return read(readers, chain),
            // Always older, so that the search ends.
            Some(previous) => wanted = Some(previous),
        }
    }
    Err(match wanted {
        Some(position) => format!("the part at {position} that it builds on is missing"),
        None => "there is no snapshot".into(),
    })
}

fn read(readers: VecDeque<PartReader>, chain: Chain) -> Result<Loaded, String> {
    let mut loader = Loader::default();
    let mut newest = None;
    for reader in readers {
        newest = Some(reader.header().snapshot);
        reader.each_section(|section| loader.section(section))?;
    }
    let (Some(snapshot), Some(tables)) = (newest, loader.finish()) else {
        return Err("it cannot be understood".into());
    };
    Ok(Loaded { tables, snapshot, chain })
}
