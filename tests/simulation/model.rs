//! What the outside knows of a broker: what was acknowledged, what was read, and what never had an answer.

use std::collections::{BTreeMap, BTreeSet};

/// Number of a message; its body follows from it.
pub type Id = u64;

/// How the broker went down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As it should.
    Clean,
    /// The process died; the page cache is still there.
    Killed,
    /// What was not synced may be gone, in any part.
    PowerCut,
}

/// A queue as it was read from its start to its end.
#[derive(Debug, Default)]
pub struct Found {
    pub min: u64,
    pub max: u64,
    pub messages: BTreeMap<u64, Id>,
    pub lost: Vec<(u64, u64)>,
}

impl Found {
    fn is_lost(&self, offset: u64) -> bool {
        self.lost.iter().any(|&(begin, end)| (begin..end).contains(&offset))
    }
}

/// One queue.
#[derive(Debug, Default)]
pub struct Queue {
    pub acknowledged: BTreeMap<u64, Id>,
    /// What readers were shown.
    pub seen: BTreeMap<u64, Id>,
    /// Batches without an answer.
    pub unanswered: Vec<Vec<Id>>,
    /// Of batches that a restart has not brought; they must never come.
    dead: BTreeSet<Id>,
    /// Offsets that readers have been told are lost.
    lost: BTreeSet<u64>,
    pub committed: u64,
    /// The highest commit without an answer.
    pub tried: u64,
}

/// One life of a topic.
#[derive(Debug)]
pub struct Topic {
    pub sync: bool,
    /// Keeps only the newest messages.
    pub short: bool,
    pub queues: Vec<Queue>,
    /// A change of the number of queues that had no answer.
    pub unsure_queues: Option<usize>,
}

impl Topic {
    pub fn new(sync: bool, short: bool, queues: usize) -> Self {
        let queues = (0..queues).map(|_| Queue::default()).collect();
        Self { sync, short, queues, unsure_queues: None }
    }
}

/// Whether a topic is there.
#[derive(Debug)]
pub enum Presence {
    There(Topic),
    Gone,
    /// It was being made when the broker went away.
    Making(Topic),
    /// It was being deleted.
    Deleting(Topic),
}

impl Queue {
    /// A reader was shown this.
    pub fn shown(&mut self, offset: u64, id: Id, what: &str) {
        if let Some(&known) = self.acknowledged.get(&offset) {
            assert_eq!(id, known, "{what}: another message at offset {offset}");
        } else {
            let open = self.unanswered.iter().any(|batch| batch.contains(&id));
            assert!(open, "{what}: {id} at {offset} was never sent here, or was answered elsewhere");
        }
        let before = self.seen.insert(offset, id);
        assert!(before.is_none_or(|before| before == id), "{what}: {before:?} became {id} at {offset}");
    }

    /// Compares with what is there after a restart, and takes over what is now known.
    pub fn compare(&mut self, found: &Found, end: End, sync: bool, short: bool, what: &str) {
        let may_lose = end == End::PowerCut && !sync;
        assert!(short || found.min == 0, "{what}: begins at {}", found.min);
        for (&offset, &id) in &self.acknowledged {
            let there = found.messages.get(&offset) == Some(&id);
            let excused = offset < found.min || may_lose;
            assert!(
                there || excused,
                "{what}: {id} was acknowledged at {offset}, there is {:?}",
                found.messages.get(&offset)
            );
        }
        for (&offset, &id) in &self.seen {
            let there = found.messages.get(&offset) == Some(&id);
            let told = may_lose && found.is_lost(offset);
            assert!(
                there || told || offset < found.min,
                "{what}: a reader saw {id} at {offset}, now there is {:?}",
                found.messages.get(&offset)
            );
            assert!(offset < found.max, "{what}: {offset} will be given out again");
        }
        let lost: BTreeSet<u64> = found.lost.iter().flat_map(|&(begin, end)| begin..end).collect();
        assert!(may_lose || lost.is_subset(&self.lost), "{what}: lost {:?}", found.lost);
        assert!(lost.is_superset(&self.lost), "{what}: a loss is forgotten, left are {:?}", found.lost);
        self.lost = lost;
        let mut known: BTreeMap<u64, Id> = std::mem::take(&mut self.acknowledged);
        known.retain(|offset, id| found.messages.get(offset) == Some(id));
        let places: BTreeMap<Id, u64> = found.messages.iter().map(|(&offset, &id)| (id, offset)).collect();
        for batch in self.unanswered.drain(..) {
            let offsets: Vec<u64> = batch.iter().filter_map(|id| places.get(id).copied()).collect();
            // Retention may have taken the front of it.
            let whole = offsets.len() == batch.len() || (short && found.min > 0);
            assert!(offsets.is_empty() || whole, "{what}: {} of a batch of {}", offsets.len(), batch.len());
            assert!(offsets.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{what}: a batch is scattered");
            if offsets.is_empty() {
                self.dead.extend(batch);
            } else {
                known.extend(batch.iter().filter_map(|id| Some((*places.get(id)?, *id))));
            }
        }
        for (&offset, &id) in &found.messages {
            assert!(!self.dead.contains(&id), "{what}: {id} at {offset} came back after it was gone");
            assert_eq!(known.get(&offset), Some(&id), "{what}: nobody sent what is at {offset}");
        }
        assert_eq!(places.len(), found.messages.len(), "{what}: something is there twice");
        self.acknowledged = known;
        self.seen.retain(|offset, id| found.messages.get(offset) == Some(id));
    }

    /// Progress as it is found after a restart.
    pub fn compare_progress(&mut self, committed: u64, max: u64, what: &str) {
        let allowed = self.committed..=self.tried.max(self.committed);
        assert!(allowed.contains(&committed), "{what}: committed {committed}, not in {allowed:?}");
        assert!(committed <= max, "{what}: committed {committed} beyond the end {max}");
        (self.committed, self.tried) = (committed, committed);
    }
}
