//! Waiting for what was appended.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
};

use super::{Reached, StoreError, progress::Stage, shard::Shard};

/// Resolves when what was appended has reached the level it waits for. Dropping it changes nothing about
/// the append.
pub struct Pending {
    wait: Option<Wait>,
}

struct Wait {
    shard: Arc<Shard>,
    group: u64,
    stage: Stage,
    turn: Turn,
}

/// What is not for the device is written by whoever waits for it first; after letting others, whose turn it
/// is now anyway, add to the group.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Fresh,
    Yielded,
    Done,
}

impl Pending {
    pub(super) fn new(shard: Arc<Shard>, group: u64, stage: Stage) -> Self {
        let turn = if stage == Stage::Written { Turn::Fresh } else { Turn::Done };
        Self { wait: Some(Wait { shard, group, stage, turn }) }
    }

    /// Nothing to wait for.
    pub(super) fn ready() -> Self {
        Self { wait: None }
    }

    /// The outcome, if it is known already. Never waits.
    pub fn now(&self) -> Option<Result<Reached, StoreError>> {
        let Some(wait) = &self.wait else { return Some(Ok(Reached::Disk)) };
        wait.shard.progress.check(wait.group, wait.stage).map(|outcome| outcome.map(|()| wait.reached()))
    }

    /// Waits on this thread. Not for threads of a runtime.
    pub fn wait(mut self) -> Result<Reached, StoreError> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            match Pin::new(&mut self).poll(&mut context) {
                Poll::Ready(outcome) => return outcome,
                Poll::Pending => thread::park(),
            }
        }
    }
}

impl Wait {
    fn reached(&self) -> Reached {
        match self.stage {
            Stage::Written => Reached::Memory,
            Stage::Synced => Reached::Disk,
        }
    }
}

impl Future for Pending {
    type Output = Result<Reached, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(wait) = &mut self.wait else { return Poll::Ready(Ok(Reached::Disk)) };
        match wait.turn {
            Turn::Fresh => {
                wait.turn = Turn::Yielded;
                if wait.shard.progress.check(wait.group, wait.stage).is_none() {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
            Turn::Yielded => {
                wait.turn = Turn::Done;
                if wait.shard.progress.check(wait.group, wait.stage).is_none() {
                    wait.shard.write_inline(wait.group);
                }
            }
            Turn::Done => {}
        }
        match wait.shard.progress.poll(wait.group, wait.stage, cx.waker()) {
            Some(outcome) => {
                wait.turn = Turn::Done;
                let reached = wait.reached();
                Poll::Ready(outcome.map(|()| reached))
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(wait) = &self.wait
            && wait.turn != Turn::Done
            && wait.shard.progress.check(wait.group, wait.stage).is_none()
        {
            wait.shard.nudge();
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Pending");
        if let Some(wait) = &self.wait {
            debug.field("group", &wait.group).field("stage", &wait.stage);
        }
        debug.finish()
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
