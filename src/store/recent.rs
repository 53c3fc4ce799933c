//! The newest bytes of the log, in memory: what readers at the end want. Bounded; older pieces go.

use std::collections::VecDeque;

use bytes::Bytes;
use parking_lot::RwLock;

#[derive(Debug)]
pub struct Recent {
    limit: usize,
    pieces: RwLock<Pieces>,
}

#[derive(Debug, Default)]
struct Pieces {
    /// By position, without overlaps.
    list: VecDeque<(u64, Bytes)>,
    bytes: usize,
}

impl Recent {
    /// Keeps at most about `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Self { limit: usize::try_from(limit).unwrap_or(usize::MAX), pieces: RwLock::default() }
    }

    /// Adds what was written at `position`, behind all before.
    pub fn push(&self, position: u64, bytes: Bytes) {
        let mut pieces = self.pieces.write();
        pieces.bytes += bytes.len();
        pieces.list.push_back((position, bytes));
        while pieces.bytes > self.limit
            && let Some((_, gone)) = pieces.list.pop_front()
        {
            pieces.bytes -= gone.len();
        }
    }

    /// The bytes at `position`, if all of them are here.
    pub fn get(&self, position: u64, length: usize) -> Option<Bytes> {
        Self::find(&self.pieces.read(), position, length)
    }

    /// As [`Recent::get`] for several places under one lock; stops at the first that is not here.
    pub fn get_all(&self, places: impl Iterator<Item = (u64, usize)>, into: &mut Vec<Bytes>) {
        let pieces = self.pieces.read();
        for (position, length) in places {
            let Some(bytes) = Self::find(&pieces, position, length) else { return };
            into.push(bytes);
        }
    }

    fn find(pieces: &Pieces, position: u64, length: usize) -> Option<Bytes> {
        let at = pieces.list.partition_point(|(start, _)| *start <= position).checked_sub(1)?;
        let (start, bytes) = pieces.list.get(at)?;
        let begin = usize::try_from(position - start).ok()?;
        let end = begin.checked_add(length)?;
        (end <= bytes.len()).then(|| bytes.slice(begin..end))
    }
}
