//! Memory that all calls together may take for one purpose.

use std::{sync::Arc, time::Duration};

use crate::{
    api::{connection::Connection, metrics::Level},
    broker::Error,
};

/// A pause that is likely to be enough for others to finish.
pub(in crate::api) const RETRY: Duration = Duration::from_millis(200);

/// So many bytes and no more.
#[derive(Clone, Debug)]
pub(in crate::api) struct Budget {
    taken: Level,
    limit: u64,
    /// What others are to find even when this budget is used up.
    kept_back: u64,
    /// The configuration key of the limit, and what there is too much of.
    key: &'static str,
    what: &'static str,
    /// How often there was not enough.
    refusals: Level,
}

/// Bytes taken from a budget; dropping it gives them back.
#[derive(Debug)]
pub(in crate::api) struct Held {
    budget: Budget,
    bytes: u64,
}

impl Budget {
    /// `taken` and `refusals` are what metrics show.
    pub(in crate::api) fn new(taken: Level, limit: u64, refusals: Level) -> Self {
        Self { taken, limit, kept_back: 0, key: "", what: "bytes", refusals }
    }

    /// With the configuration key of its limit, and what it counts.
    #[must_use]
    pub(in crate::api) fn named(self, key: &'static str, what: &'static str) -> Self {
        Self { key, what, ..self }
    }

    /// The same budget for those who have to leave `bytes` of it to others.
    #[must_use]
    pub(in crate::api) fn keeping_back(&self, bytes: u64, what: &'static str) -> Self {
        Self { kept_back: bytes, what, ..self.clone() }
    }

    /// Holds nothing yet.
    pub(super) fn nothing(&self) -> Held {
        Held { budget: self.clone(), bytes: 0 }
    }

    /// Why more cannot be taken.
    pub(in crate::api) fn full(&self) -> Error {
        self.busy(self.key, self.taken.get(), self.limit)
    }

    fn busy(&self, key: &'static str, seen: u64, limit: u64) -> Error {
        Error::Busy { what: self.what, key, seen, limit, retry: RETRY }
    }

    /// Takes `bytes`; `None` when they are not there.
    fn take(&self, bytes: u64) -> Option<Held> {
        let mut held = self.nothing();
        held.set(bytes).then_some(held)
    }
}

/// Memory of answers, until their clients have taken them: of all connections together, and of each one.
#[derive(Clone, Debug)]
pub(in crate::api) struct AnswerBudget {
    all: Budget,
    /// Most of one connection.
    share: u64,
    connections: Level,
}

/// Room for one answer; dropping it gives it back.
#[derive(Debug)]
pub(in crate::api) struct Owed {
    held: Held,
    connection: Arc<Connection>,
}

impl AnswerBudget {
    /// `all` bounds the large answers of all connections, `share` every answer of one.
    pub(in crate::api) fn new(all: Budget, share: u64, connections: Level) -> Self {
        Self { all, share, connections }
    }

    /// Room for an answer of `bytes` to this connection; `None` when there is none.
    pub(in crate::api) fn take(&self, connection: &Arc<Connection>, bytes: u64) -> Option<Arc<Owed>> {
        let owed = connection.owed();
        // The share has room for any answer by itself.
        if owed > 0 && owed.saturating_add(bytes) > self.share {
            self.all.refusals.add(1);
            return None;
        }
        let held = self.all.take(bytes)?;
        connection.owe(bytes);
        Some(Arc::new(Owed { held, connection: Arc::clone(connection) }))
    }

    /// Whether this connection may call, seeing what it has not read of its answers.
    pub(in crate::api) fn admit(&self, connection: &Connection) -> Result<(), Error> {
        let owed = connection.owed();
        if owed == 0 {
            return Ok(());
        }
        let all = self.all.taken.get();
        // When all of it is taken, those go first who have more than their part.
        let fair = self.all.limit.checked_div(self.connections.get().max(1)).unwrap_or(0);
        let refused = if owed > self.share {
            self.all.busy("api.answer_memory_per_connection", owed, self.share)
        } else if all > self.all.limit && owed > fair {
            self.all.full()
        } else {
            return Ok(());
        };
        self.all.refusals.add(1);
        Err(refused)
    }

    /// Why there is no room for an answer.
    pub(in crate::api) fn full(&self) -> Error {
        self.all.full()
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.connection.settle(self.held.bytes);
    }
}

impl Held {
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Holds `bytes` from now on; `false` (and nothing changes) when it is more than before and not there.
    pub(super) fn set(&mut self, bytes: u64) -> bool {
        match bytes.checked_sub(self.bytes) {
            Some(more) => {
                if self.budget.taken.add(more) > self.budget.limit.saturating_sub(self.budget.kept_back) {
                    self.budget.taken.subtract(more);
                    self.budget.refusals.add(1);
                    return false;
                }
            }
            None => self.budget.taken.subtract(self.bytes.saturating_sub(bytes)),
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.taken.subtract(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let level = Level::default();
        let budget = Budget::new(level.clone(), 10, Level::default());
        let first = budget.take(8).unwrap();
        assert!(budget.take(3).is_none());
        assert_eq!(level.get(), 8, "a refusal leaves no trace");
        drop(first);
        let mut held = budget.nothing();
        assert!(held.set(10) && !held.set(11) && held.set(2));
        assert_eq!(level.get(), 2);
        drop(held);
        assert_eq!(level.get(), 0);
    }

    #[test]
    fn who_keeps_something_back_leaves_room_for_others() {
        let all = Budget::new(Level::default(), 10, Level::default());
        let some = all.keeping_back(3, "bytes");
        let first = some.take(7).unwrap();
        assert!(some.take(1).is_none());
        let second = all.take(3).unwrap();
        drop(first);
        assert!(some.take(5).is_none() && some.take(4).is_some(), "what others took counts");
        drop(second);
    }
}
