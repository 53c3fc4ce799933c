//! How far the log is written and synced, and who waits for that.
//!
//! What is written together is a group, numbered from 1. Whoever appended waits for the number of their
//! group, not for a position: when a group is done all its waiters are woken at once, with one wake-up a
//! runtime.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU64, Ordering},
    task::Waker,
};

use parking_lot::Mutex;

use super::StoreError;
use crate::runtime::WakerSet;

/// Which stage of a group is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// In the page cache.
    Written,
    /// On the device.
    Synced,
}

#[derive(Debug, Default)]
pub struct Progress {
    written: Line,
    synced: Line,
    /// Set once, when the log is fenced.
    failed: Mutex<Option<StoreError>>,
}

/// Groups reach a stage in order.
#[derive(Debug, Default)]
struct Line {
    done: AtomicU64,
    waiting: Mutex<VecDeque<(u64, WakerSet)>>,
}

impl Line {
    fn push(&self, group: u64, waker: &Waker) {
        let mut waiting = self.waiting.lock();
        let at = waiting.partition_point(|(other, _)| *other < group);
        match waiting.get_mut(at) {
            Some((other, wakers)) if *other == group => wakers.push(waker.clone()),
            _ => {
                let mut wakers = WakerSet::default();
                wakers.push(waker.clone());
                waiting.insert(at, (group, wakers));
            }
        }
    }

    fn take(&self, through: u64, into: &mut WakerSet) {
        let mut waiting = self.waiting.lock();
        while let Some((_, wakers)) = waiting.front_mut().filter(|(group, _)| *group <= through) {
            into.append(wakers);
            waiting.pop_front();
        }
    }
}

impl Progress {
    fn line(&self, stage: Stage) -> &Line {
        match stage {
            Stage::Written => &self.written,
            Stage::Synced => &self.synced,
        }
    }

    /// Whether `group` has reached `stage`; an error if it never will.
    pub fn check(&self, group: u64, stage: Stage) -> Option<Result<(), StoreError>> {
        if self.line(stage).done.load(Ordering::Acquire) >= group {
            return Some(Ok(()));
        }
        self.failed.lock().clone().map(Err)
    }

    /// As [`Progress::check`]; if undecided, `waker` is woken when it is decided.
    pub fn poll(&self, group: u64, stage: Stage, waker: &Waker) -> Option<Result<(), StoreError>> {
        if let Some(outcome) = self.check(group, stage) {
            return Some(outcome);
        }
        self.line(stage).push(group, waker);
        // Done in between: whoever did it may have looked before the waker was there.
        self.check(group, stage)
    }

    /// All groups up to `group` have reached `stage`. Wakers are gathered, for the caller to wake when
    /// everything else is published.
    pub fn reached(&self, group: u64, stage: Stage, wakers: &mut WakerSet) {
        let line = self.line(stage);
        line.done.fetch_max(group, Ordering::AcqRel);
        line.take(group, wakers);
    }

    /// Nothing will reach anything any more.
    pub fn fail(&self, error: StoreError) {
        self.failed.lock().get_or_insert(error);
        let mut wakers = WakerSet::default();
        self.written.take(u64::MAX, &mut wakers);
        self.synced.take(u64::MAX, &mut wakers);
        wakers.wake_all();
    }
}
