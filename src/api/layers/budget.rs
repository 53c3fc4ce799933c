//! Memory that all calls together may take for one purpose.

use std::{sync::Arc, time::Duration};

use crate::{api::metrics::Level, broker::Error};

/// A pause that is likely to be enough for others to finish.
pub(in crate::api) const RETRY: Duration = Duration::from_millis(200);

/// So many bytes and no more.
#[derive(Clone, Debug)]
pub(in crate::api) struct Budget {
    taken: Level,
    limit: u64,
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
        Self { taken, limit, refusals }
    }

    /// Holds nothing yet.
    pub(super) fn nothing(&self) -> Held {
        Held { budget: self.clone(), bytes: 0 }
    }

    /// Why more cannot be taken.
    pub(in crate::api) fn full(&self) -> Error {
        Error::Busy { bytes: self.taken.get(), limit: self.limit, retry: RETRY }
    }

    /// Takes `bytes`; `None` when they are not there.
    pub(in crate::api) fn take(&self, bytes: u64) -> Option<Arc<Held>> {
        let mut held = self.nothing();
        held.set(bytes).then(|| Arc::new(held))
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
                if self.budget.taken.add(more) > self.budget.limit {
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
}
