//! Finds messages by the hashes of their keys and ids: the log's tail in memory, the rest in sorted runs.
//!
//! `insert` -> memory -> `flush` -> run -> `merge` -> larger run. A look-up goes the other way, newest first,
//! and stops when it has enough, so a key that every message has costs no more than a rare one. Hashes
//! collide: whoever looks up compares the record itself.
//!
//! A run covers a stretch of the log and is named by it. All of it is derived from the log and expendable: what
//! is not covered without a gap when the index opens is read from the log again. `merge` goes eight to one,
//! so that there are few runs, and each entry is written again once a level; see [`run`] for the files.

mod memory;
mod run;
#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

use self::{
    memory::{MAX_PAIRS, Memory},
    run::{Cursor, Extent, Pair, Run, positions_of},
};
use super::disk::Disk;

/// Pairs in memory that make a run worth writing, however little log they span.
const DUE_PAIRS: usize = 1 << 20;
/// Runs that are merged into one.
const FAN_IN: usize = 8;
/// Entries of the largest run, 256 MiB. Bounds how long a merge takes.
const MAX_ENTRIES: u64 = 16 << 20;

/// The key index of a shard.
///
/// Inserts come in log order. `flush`, `merge`, `remove_below` and `cut` take turns; look-ups and inserts go
/// on beside them, and every look-up sees everything inserted before it.
#[derive(Debug)]
pub struct KeyIndex {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    shard_id: u64,
    run_bytes: u64,
    /// Held while files change. Taken before `state`.
    upkeep: Mutex<Upkeep>,
    state: Mutex<State>,
    damaged: AtomicU64,
    forgotten: AtomicU64,
}

#[derive(Debug)]
struct Upkeep {
    /// Nothing below is in the log any more.
    floor: u64,
}

#[derive(Debug)]
struct State {
    memory: Memory,
    /// Oldest first; disjoint.
    runs: Arc<Vec<Arc<Run>>>,
}

impl KeyIndex {
    /// Opens the runs in `dir` for a log that begins at `log_start`; makes the directory. Also answers up to
    /// where they cover the log: what stands there and behind has to be inserted again.
    ///
    /// Files that are no valid run of this shard, and runs behind a gap, are removed.
    pub fn open(
        disk: Arc<dyn Disk>,
        dir: PathBuf,
        shard_id: u64,
        run_bytes: u64,
        log_start: u64,
    ) -> io::Result<(Self, u64)> {
        disk.create_dir_all(&dir)?;
        let mut found = Vec::new();
        for name in disk.list(&dir)? {
            let path = dir.join(&name);
            match positions_of(&name).map(|positions| Run::open(&disk, path.clone(), shard_id, positions)) {
                Some(Ok(run)) => found.push(run),
                Some(Err(error)) => discard(&disk, &path, &error.to_string())?,
                None if positions_of(&name.replace(".tmp", ".keys")).is_some() => {
                    discard(&disk, &path, "it was not finished")?
                }
                None => tracing::warn!(file = %path.display(), "not a file of the key index; left alone"),
            }
        }
        // The widest first: a merged run before those that it was made of.
        found.sort_by_key(|run| (run.extent.first, Reverse(run.extent.last)));
        let mut covered = log_start;
        let mut before = 0;
        let mut runs: Vec<Arc<Run>> = Vec::new();
        for run in found {
            let Extent { first, last, .. } = run.extent;
            if first < before {
                discard(&disk, &run.path, "another run covers its part of the log")?;
            } else if last <= log_start {
                discard(&disk, &run.path, "its part of the log was removed")?;
            } else if first > covered {
                let text = format!("nothing covers the log from {covered} to {first}, so it is read again");
                discard(&disk, &run.path, &text)?;
            } else {
                (covered, before) = (last, last);
                runs.push(Arc::new(run));
            }
        }
        let state = State { memory: Memory::new(covered), runs: Arc::new(runs) };
        let index = Self {
            disk,
            dir,
            shard_id,
            run_bytes,
            upkeep: Mutex::new(Upkeep { floor: log_start }),
            state: Mutex::new(state),
            damaged: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
        };
        Ok((index, covered))
    }

    /// Adds (hash, position) pairs. Positions never fall; those that runs cover are passed over.
    pub fn insert_pairs(&self, pairs: &[Pair]) {
        if pairs.is_empty() {
            return;
        }
        let mut forgotten = Vec::new();
        let mut state = self.state.lock();
        for pair in pairs {
            forgotten.extend(state.memory.insert(*pair));
        }
        drop(state);
        self.note_forgotten(&forgotten);
    }

    /// Adds the hashes of a record while the log is read at a start. Writes runs on the way, so that a long
    /// log needs no more memory than a short one.
    pub fn insert_all(&self, position: u64, hashes: impl Iterator<Item = u64>) {
        // Everything below `position` has been inserted.
        if self.due(position)
            && let Err(error) = self.flush(position).and_then(|()| self.merge(position))
        {
            tracing::warn!(%error, "cannot write the key index while reading the log; trying again");
        }
        let pairs: Vec<Pair> = hashes.map(|hash| (hash, position)).collect();
        self.insert_pairs(&pairs);
    }

    fn note_forgotten(&self, chunks: &[Arc<Vec<Pair>>]) {
        let pairs: usize = chunks.iter().map(|chunk| chunk.len()).sum();
        if pairs > 0 && self.forgotten.fetch_add(pairs as u64, Ordering::Relaxed) == 0 {
            tracing::error!(
                event = "storage.keys_forgotten",
                limit = MAX_PAIRS,
                "the key index could not be written for too long: look-ups by key or id miss messages until the \
                 next start, which reads them from the log again"
            );
        }
    }

    /// Whether enough is in memory to be written as a run up to `durable`.
    pub fn due(&self, durable: u64) -> bool {
        let state = self.state.lock();
        let span = durable.saturating_sub(state.memory.start);
        span >= self.run_bytes || (span > 0 && state.memory.len() >= DUE_PAIRS)
    }

    /// Writes what is in memory below `through` as a run. Nothing below `through` may be inserted later, and
    /// a crash should not take back what is there.
    pub fn flush(&self, through: u64) -> io::Result<()> {
        let _turn = self.upkeep.lock();
        let state = self.state.lock();
        let first = state.memory.start;
        if through <= first {
            return Ok(());
        }
        let chunks = state.memory.chunks();
        let tail = state.memory.tail_below(through);
        drop(state);
        let full = chunks.iter().flat_map(|chunk| chunk.iter()).take_while(|pair| pair.1 < through);
        let mut pairs: Vec<Pair> = full.chain(&tail).copied().collect();
        drop(chunks);
        pairs.sort_unstable();
        let extent = Extent { shard_id: self.shard_id, first, last: through, level: 0 };
        let run = run::write(&self.disk, &self.dir, extent, pairs.len() as u64, |writer| {
            pairs.iter().try_for_each(|pair| writer.push(*pair))
        })?;
        let mut state = self.state.lock();
        Arc::make_mut(&mut state.runs).push(Arc::new(run));
        let gone = state.memory.forget_below(through);
        drop(state);
        drop(gone);
        Ok(())
    }

    /// Merges eight runs of a level that end at or below `upto`, if there are so many, into one of the next.
    pub fn merge(&self, upto: u64) -> io::Result<()> {
        let turn = self.upkeep.lock();
        let runs = Arc::clone(&self.state.lock().runs);
        let Some(chosen) = mergeable(&runs, upto) else { return Ok(()) };
        let parts = runs.get(chosen.clone()).unwrap_or_default();
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Ok(()) };
        let extent = Extent { level: first.extent.level + 1, last: last.extent.last, ..first.extent };
        let merged = self.rewrite(parts, extent, turn.floor..u64::MAX)?;
        self.replace(chosen, merged.map(Arc::new));
        Ok(())
    }

    /// Writes the entries of `parts` with positions in `kept` as one run. `None` when a part is damaged: a
    /// merge would hide that.
    fn rewrite(&self, parts: &[Arc<Run>], extent: Extent, kept: Range<u64>) -> io::Result<Option<Run>> {
        let most = parts.iter().map(|part| part.entries).sum();
        let mut unreadable = false;
        let written = run::write(&self.disk, &self.dir, extent, most, |writer| {
            let mut cursors: Vec<Cursor<'_>> = parts.iter().map(|part| part.cursor()).collect();
            let mut next = |n: usize| {
                let (Some(part), Some(cursor)) = (parts.get(n), cursors.get_mut(n)) else { return Ok(None) };
                cursor.next().inspect_err(|error| {
                    unreadable = true;
                    self.note_damage(part, error);
                })
            };
            let mut heads = BinaryHeap::with_capacity(parts.len());
            for n in 0..parts.len() {
                heads.extend(next(n)?.map(|pair| Reverse((pair, n))));
            }
            while let Some(Reverse((pair, n))) = heads.pop() {
                heads.extend(next(n)?.map(|pair| Reverse((pair, n))));
                if kept.contains(&pair.1) {
                    writer.push(pair)?;
                }
            }
            Ok(())
        });
        match written {
            Err(_) if unreadable => Ok(None),
            written => written.map(Some),
        }
    }

    /// Puts `run` in the place of others, whose files go. Does nothing without one.
    fn replace(&self, range: Range<usize>, run: Option<Arc<Run>>) {
        let Some(run) = run else { return };
        let mut state = self.state.lock();
        let gone: Vec<Arc<Run>> = Arc::make_mut(&mut state.runs).splice(range, [run]).collect();
        drop(state);
        self.remove(&gone);
    }

    /// Removes files. One that stays is told apart from what replaces it at the next start.
    fn remove(&self, runs: &[Arc<Run>]) {
        for run in runs {
            if let Err(error) = self.disk.remove(&run.path) {
                tracing::warn!(file = %run.path.display(), %error, "cannot remove a file of the key index");
            }
        }
    }

    /// The log has nothing below `position` any more.
    pub fn remove_below(&self, position: u64) {
        let mut turn = self.upkeep.lock();
        turn.floor = turn.floor.max(position);
        let mut state = self.state.lock();
        let count = state.runs.partition_point(|run| run.extent.last <= position);
        let gone: Vec<Arc<Run>> = Arc::make_mut(&mut state.runs).drain(..count).collect();
        drop(state);
        self.remove(&gone);
    }

    /// The log turned out to end at `end`: positions from there on will be given to other records. Runs that
    /// reach further, as after damage at the log's end, are cut.
    pub fn cut(&self, end: u64) -> io::Result<()> {
        let _turn = self.upkeep.lock();
        let mut state = self.state.lock();
        if state.memory.start <= end {
            return Ok(());
        }
        state.memory = Memory::new(end);
        let runs = Arc::clone(&state.runs);
        drop(state);
        let whole = runs.partition_point(|run| run.extent.last <= end);
        let (kept, reaching) = runs.split_at_checked(whole).unwrap_or((&[], &[]));
        let mut kept = kept.to_vec();
        if let Some(run) = reaching.first().filter(|run| run.extent.first < end) {
            tracing::warn!(file = %run.path.display(), end, "the log ends before the key index; the rest of it is cut");
            let extent = Extent { last: end, ..run.extent };
            match self.rewrite(std::slice::from_ref(run), extent, 0..end)? {
                Some(cut) => kept.push(Arc::new(cut)),
                // The gap that is left has the next start read this part of the log again.
                None => tracing::warn!(file = %run.path.display(), "damaged, so it is not kept"),
            }
        }
        self.state.lock().runs = Arc::new(kept);
        // Durably, before anything else gets the positions that these say they cover.
        for run in reaching {
            self.disk.remove(&run.path)?;
        }
        self.disk.sync_dir(&self.dir)
    }

    /// Appends positions of records with `hash` to `into`, newest first, at most `limit`. Answers whether there
    /// may be more. Reads files: may block on the device.
    ///
    /// # Errors
    /// When a file that may have some is damaged, until [`KeyIndex::mend`] has replaced it.
    pub fn lookup(&self, hash: u64, limit: usize, into: &mut Vec<u64>) -> io::Result<bool> {
        // One more, to know whether there is one.
        let wanted = limit.saturating_add(1);
        let mut found = Vec::new();
        let state = self.state.lock();
        state.memory.find_in_tail(hash, wanted, &mut found);
        let chunks = state.memory.chunks();
        let runs = Arc::clone(&state.runs);
        drop(state);
        for chunk in chunks.iter().rev() {
            if found.len() >= wanted {
                break;
            }
            memory::find(chunk, hash, wanted, &mut found);
        }
        for run in runs.iter().rev() {
            if found.len() >= wanted {
                break;
            }
            run.find(hash, wanted, &mut found).inspect_err(|error| self.note_damage(run, error))?;
        }
        let more = found.len() > limit;
        found.truncate(limit);
        into.append(&mut found);
        Ok(more)
    }

    /// The part of the log that a damaged run covers, if there is one.
    pub fn damaged_part(&self) -> Option<Range<u64>> {
        let runs = Arc::clone(&self.state.lock().runs);
        runs.iter().find(|run| run.is_damaged()).map(|run| run.extent.first..run.extent.last)
    }

    /// Puts new runs in the place of a damaged one. `read` hands over hash and position of all look-ups in its
    /// part of the log, in log order.
    pub fn mend(
        &self,
        part: &Range<u64>,
        read: impl FnOnce(&mut dyn FnMut(Pair)) -> Result<(), String>,
    ) -> Result<(), String> {
        let _turn = self.upkeep.lock();
        let damaged = |runs: &[Arc<Run>]| {
            runs.iter().position(|run| {
                run.is_damaged() && run.extent.first == part.start && run.extent.last == part.end
            })
        };
        if damaged(&self.state.lock().runs).is_none() {
            return Ok(());
        }
        let mut first = part.start;
        let mut pairs: Vec<Pair> = Vec::new();
        let mut runs = Vec::new();
        let mut outcome = Ok(());
        let mut write = |pairs: &mut Vec<Pair>, last: u64| {
            let extent = Extent { shard_id: self.shard_id, first, last, level: 0 };
            pairs.sort_unstable();
            let run = run::write(&self.disk, &self.dir, extent, pairs.len() as u64, |writer| {
                pairs.iter().try_for_each(|pair| writer.push(*pair))
            })?;
            pairs.clear();
            first = last;
            runs.push(Arc::new(run));
            Ok::<(), io::Error>(())
        };
        read(&mut |pair| {
            let inside = part.contains(&pair.1) && outcome.is_ok();
            // Several runs, so that memory is bounded; a record's look-ups stay in one.
            if inside && pairs.len() >= DUE_PAIRS && pairs.last().is_some_and(|last| last.1 < pair.1) {
                outcome = write(&mut pairs, pair.1);
            }
            if inside {
                pairs.push(pair);
            }
        })?;
        outcome.and_then(|()| write(&mut pairs, part.end)).map_err(|error| error.to_string())?;
        let kept: Vec<PathBuf> = runs.iter().map(|run| run.path.clone()).collect();
        let mut state = self.state.lock();
        let gone: Vec<Arc<Run>> = match damaged(&state.runs) {
            Some(at) => Arc::make_mut(&mut state.runs).splice(at..=at, runs).collect(),
            None => runs,
        };
        drop(state);
        let gone: Vec<Arc<Run>> = gone.into_iter().filter(|run| !kept.contains(&run.path)).collect();
        self.remove(&gone);
        Ok(())
    }

    fn note_damage(&self, run: &Run, error: &io::Error) {
        if run.note_damage(error) {
            self.damaged.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Runs in which damage was found since the start.
    pub fn damaged(&self) -> u64 {
        self.damaged.load(Ordering::Relaxed)
    }

    /// Entries given up since the start because no run could be written.
    pub fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    /// Number and bytes of the runs.
    pub fn size(&self) -> (u64, u64) {
        let runs = Arc::clone(&self.state.lock().runs);
        (runs.len() as u64, runs.iter().map(|run| run.bytes()).sum())
    }

    /// Look-ups in memory.
    pub fn in_memory(&self) -> u64 {
        self.state.lock().memory.len() as u64
    }
}

/// Reads every run in `dir`; files by name, with what is wrong with them. Changes nothing.
pub fn check(disk: &Arc<dyn Disk>, dir: &Path, shard_id: u64) -> Vec<(PathBuf, Option<String>)> {
    let names = disk.list(dir).unwrap_or_default().into_iter();
    let runs = names.filter_map(|name| Some((dir.join(&name), positions_of(&name)?)));
    runs.map(|(path, positions)| {
        let checked = Run::open(disk, path.clone(), shard_id, positions).and_then(|run| run.verify());
        (path, checked.err().map(|error| error.to_string()))
    })
    .collect()
}

/// Shards that the files in `dir` say they belong to; nothing of them is checked.
pub fn shard_ids(disk: &Arc<dyn Disk>, dir: &Path) -> Vec<u64> {
    let names = disk.list(dir).unwrap_or_default().into_iter();
    names
        .filter(|name| positions_of(name).is_some())
        .filter_map(|name| run::shard_id(disk, &dir.join(name)))
        .collect()
}

fn discard(disk: &Arc<dyn Disk>, path: &Path, why: &str) -> io::Result<()> {
    tracing::warn!(file = %path.display(), why, "removing a file of the key index");
    disk.remove(path)
}

/// The oldest runs that follow each other on one level and are to be merged.
fn mergeable(runs: &[Arc<Run>], upto: u64) -> Option<Range<usize>> {
    let fits = |run: &Run| run.extent.last <= upto && run.entries <= MAX_ENTRIES / 2 && !run.is_damaged();
    let mut begin = 0;
    for (n, run) in runs.iter().enumerate() {
        let follows = n.checked_sub(1).and_then(|before| runs.get(before)).is_some_and(|before| {
            // A gap is to stay one, so that the next start sees it.
            before.extent.last == run.extent.first && before.extent.level == run.extent.level && fits(before)
        });
        if !follows {
            begin = n;
        }
        if fits(run) && n + 1 - begin == FAN_IN {
            let mut entries = 0;
            let few = runs.get(begin..=n)?.iter().take_while(|run| {
                entries += run.entries;
                entries <= MAX_ENTRIES
            });
            return Some(begin..begin + few.count());
        }
    }
    None
}
