//! Waking many tasks from a thread outside their runtime costs one system call each. A [`WakeHub`]
//! makes it one for all: the thread hands over the wakers, one task on the runtime wakes them there.

use std::{
    cell::RefCell,
    future::poll_fn,
    sync::{Arc, Weak},
    task::{Poll, Waker},
};

use parking_lot::Mutex;

/// Wakes in one go before other tasks of the runtime get a turn.
const SLICE: usize = 256;

thread_local! {
    /// The hub of the runtime that runs on this thread, if it has one.
    static CURRENT: RefCell<Option<Arc<WakeHub>>> = const { RefCell::new(None) };
}

/// Gathers wake-ups for the tasks of one current-thread runtime.
#[derive(Debug, Default)]
pub struct WakeHub {
    inbox: Mutex<Inbox>,
}

#[derive(Debug, Default)]
struct Inbox {
    wakers: Vec<Waker>,
    task: Option<Waker>,
}

impl WakeHub {
    /// Makes a hub for the current-thread runtime that this is called on. Ends with the runtime.
    pub fn install() {
        let hub = Arc::new(Self::default());
        CURRENT.with_borrow_mut(|current| *current = Some(Arc::clone(&hub)));
        tokio::spawn(Self::run(Arc::downgrade(&hub)));
    }

    /// The hub of this thread's runtime.
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Wakes all of `wakers` soon; one wake-up of the runtime whatever their number.
    fn wake_all(&self, wakers: &mut Vec<Waker>) {
        let task = {
            let mut inbox = self.inbox.lock();
            inbox.wakers.append(wakers);
            inbox.task.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }

    async fn run(hub: Weak<Self>) {
        let mut wakers = Vec::new();
        loop {
            let gone = poll_fn(|cx| {
                let Some(hub) = hub.upgrade() else { return Poll::Ready(true) };
                let mut inbox = hub.inbox.lock();
                if inbox.wakers.is_empty() {
                    inbox.task = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                std::mem::swap(&mut inbox.wakers, &mut wakers);
                Poll::Ready(false)
            })
            .await;
            if gone {
                return;
            }
            let mut woken = 0;
            for waker in wakers.drain(..) {
                waker.wake();
                woken += 1;
                if woken % SLICE == 0 {
                    tokio::task::yield_now().await;
                }
            }
        }
    }
}

/// Wakers waiting for one event, each with the hub of its runtime.
#[derive(Debug, Default)]
pub struct WakerSet {
    /// By hub; one entry a runtime, so a handful.
    hubs: Vec<(Arc<WakeHub>, Vec<Waker>)>,
    /// Of tasks on runtimes without a hub.
    loose: Vec<Waker>,
}

impl WakerSet {
    /// Adds the waker of a task that is being polled on this thread.
    pub fn push(&mut self, waker: Waker) {
        self.push_for(WakeHub::current(), waker);
    }

    /// Adds the waker of a task on the runtime of `hub`; of `None` when that has no hub.
    pub fn push_for(&mut self, hub: Option<Arc<WakeHub>>, waker: Waker) {
        let Some(hub) = hub else { return self.loose.push(waker) };
        match self.hubs.iter_mut().find(|(mine, _)| Arc::ptr_eq(mine, &hub)) {
            Some((_, wakers)) => wakers.push(waker),
            None => self.hubs.push((hub, vec![waker])),
        }
    }

    /// Moves all of `other` here, so that several events can be announced with one wake-up a runtime.
    pub fn append(&mut self, other: &mut Self) {
        self.loose.append(&mut other.loose);
        for (hub, mut wakers) in other.hubs.drain(..) {
            match self.hubs.iter_mut().find(|(mine, _)| Arc::ptr_eq(mine, &hub)) {
                Some((_, mine)) => mine.append(&mut wakers),
                None => self.hubs.push((hub, wakers)),
            }
        }
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.loose.is_empty() && self.hubs.iter().all(|(_, wakers)| wakers.is_empty())
    }

    /// Wakes everybody and leaves the set empty.
    pub fn wake_all(&mut self) {
        for (hub, mut wakers) in self.hubs.drain(..) {
            let here = WakeHub::current().is_some_and(|current| Arc::ptr_eq(&current, &hub));
            if here {
                wakers.drain(..).for_each(Waker::wake);
            } else {
                hub.wake_all(&mut wakers);
            }
        }
        self.loose.drain(..).for_each(Waker::wake);
    }
}
