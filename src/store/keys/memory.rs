//! The look-ups of the log's tail, which no run covers yet.

use std::{collections::VecDeque, sync::Arc};

use super::run::{Pair, push};

/// Pairs of a chunk: what is looked through or copied under the lock at most.
const CHUNK: usize = 4096;
/// Pairs kept at most, 16 bytes each. Only reached when runs cannot be written.
pub const MAX_PAIRS: usize = 4 << 20;

/// Pairs in log order. Full chunks never change, so whoever looks through them needs no lock.
#[derive(Debug)]
pub struct Memory {
    /// What is below this position is in runs.
    pub start: u64,
    full: VecDeque<Arc<Vec<Pair>>>,
    tail: Vec<Pair>,
    pairs: usize,
}

impl Memory {
    pub fn new(start: u64) -> Self {
        Self { start, full: VecDeque::new(), tail: Vec::new(), pairs: 0 }
    }

    pub fn len(&self) -> usize {
        self.pairs
    }

    /// Adds a pair, unless runs have it. Answers the oldest chunk if there was no more room for it.
    #[must_use]
    pub fn insert(&mut self, pair: Pair) -> Option<Arc<Vec<Pair>>> {
        if pair.1 < self.start {
            return None;
        }
        self.tail.push(pair);
        self.pairs += 1;
        if self.tail.len() < CHUNK {
            return None;
        }
        let full = std::mem::replace(&mut self.tail, Vec::with_capacity(CHUNK));
        self.full.push_back(Arc::new(full));
        if self.pairs <= MAX_PAIRS - CHUNK {
            return None;
        }
        let dropped = self.full.pop_front()?;
        self.pairs -= dropped.len();
        self.start = dropped.last().map_or(self.start, |pair| self.start.max(pair.1 + 1));
        Some(dropped)
    }

    /// Full chunks, oldest first.
    pub fn chunks(&self) -> Vec<Arc<Vec<Pair>>> {
        self.full.iter().cloned().collect()
    }

    /// Appends positions of `hash` among the newest pairs, which are in no full chunk.
    pub fn find_in_tail(&self, hash: u64, wanted: usize, into: &mut Vec<u64>) {
        find(&self.tail, hash, wanted, into);
    }

    /// The newest pairs below `position`.
    pub fn tail_below(&self, position: u64) -> Vec<Pair> {
        self.tail.iter().take_while(|pair| pair.1 < position).copied().collect()
    }

    /// Forgets pairs below `position`; the answer is for dropping where no lock is held.
    pub fn forget_below(&mut self, position: u64) -> Vec<Arc<Vec<Pair>>> {
        self.start = self.start.max(position);
        let mut gone = Vec::new();
        while let Some(chunk) = self.full.pop_front() {
            if chunk.last().is_some_and(|last| last.1 >= position) {
                let rest = chunk.partition_point(|pair| pair.1 < position);
                let kept = if rest > 0 {
                    Arc::new(chunk.get(rest..).unwrap_or_default().to_vec())
                } else {
                    Arc::clone(&chunk)
                };
                self.full.push_front(kept);
                gone.push(chunk);
                break;
            }
            gone.push(chunk);
        }
        let rest = self.tail.partition_point(|pair| pair.1 < position);
        self.tail.drain(..rest);
        self.pairs = self.full.iter().map(|chunk| chunk.len()).sum::<usize>() + self.tail.len();
        gone
    }
}

/// Appends positions of `hash` in `pairs`, newest first, until `into` holds `wanted`.
pub fn find(pairs: &[Pair], hash: u64, wanted: usize, into: &mut Vec<u64>) {
    for pair in pairs.iter().rev().filter(|pair| pair.0 == hash) {
        if into.len() >= wanted {
            return;
        }
        push(into, pair.1);
    }
}
