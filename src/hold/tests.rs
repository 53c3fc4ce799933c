//! What may wait, who wakes, and that nothing is left.

use std::{
    pin::pin,
    sync::atomic::AtomicUsize,
    task::{Wake, Waker},
};

use opentelemetry::metrics::MeterProvider as _;
use opentelemetry_sdk::metrics::SdkMeterProvider;
use proptest::prelude::*;

use super::*;

fn hold(limits: Limits) -> Hold {
    Hold::new(limits, &SdkMeterProvider::default().meter("test"))
}

fn queue(queue: u32) -> QueueKey {
    QueueKey { topic: TopicId(64), queue }
}

/// Counts its wake-ups, and notes when the last one was in the order of all.
#[derive(Default)]
struct Ear {
    woken: AtomicUsize,
    order: AtomicUsize,
    counter: Arc<AtomicUsize>,
}

impl Wake for Ear {
    fn wake(self: Arc<Self>) {
        self.woken.fetch_add(1, Ordering::SeqCst);
        self.order.store(self.counter.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
    }
}

fn poll(waiter: &mut Waiter, seen: u64, ear: &Arc<Ear>) -> Poll<Event> {
    let waker = Waker::from(Arc::clone(ear));
    waiter.poll_changed(seen, &mut Context::from_waker(&waker))
}

fn woken(ear: &Ear) -> usize {
    ear.woken.load(Ordering::SeqCst)
}

fn empty(hold: &Hold) -> bool {
    hold.held() == 0
        && hold.inner.shards.iter().all(|shard| shard.lock().is_empty())
        && hold.inner.connections.iter().all(|part| part.lock().is_empty())
}

#[test]
fn news_between_subscribing_and_waiting_is_not_lost() {
    let hold = hold(Limits::default());
    let mut waiter = hold.subscribe(queue(0), HoldTicket::default()).unwrap();
    hold.publish(&[(queue(0), 5)]);
    let ear = Arc::new(Ear::default());
    assert!(matches!(poll(&mut waiter, 4, &ear), Poll::Ready(Event::Grew { .. })));
    assert!(poll(&mut waiter, 5, &ear).is_pending(), "what was seen is no news");
    hold.publish(&[(queue(0), 6)]);
    assert_eq!(woken(&ear), 1);
    assert!(matches!(poll(&mut waiter, 5, &ear), Poll::Ready(Event::Grew { .. })));
}

#[test]
fn only_waiters_of_the_queue_wake_and_in_the_order_they_came() {
    let hold = hold(Limits::default());
    let counter = Arc::new(AtomicUsize::new(0));
    let mut held: Vec<(Waiter, Arc<Ear>)> = (0..20_u32)
        .map(|n| {
            let waiter = hold.subscribe(queue(n % 2), HoldTicket::default()).unwrap();
            (waiter, Arc::new(Ear { counter: Arc::clone(&counter), ..Ear::default() }))
        })
        .collect();
    for (waiter, ear) in &mut held {
        assert!(poll(waiter, 0, ear).is_pending());
    }
    drop(held.remove(2)); // of queue 0: gone before the news
    hold.publish(&[(queue(0), 1)]);
    let order: Vec<usize> = held
        .iter()
        .filter(|(waiter, _)| waiter.key == queue(0))
        .map(|(_, ear)| {
            assert_eq!(woken(ear), 1);
            ear.order.load(Ordering::SeqCst)
        })
        .collect();
    assert_eq!(order, (0..9).collect::<Vec<_>>());
    assert!(held.iter().filter(|(waiter, _)| waiter.key == queue(1)).all(|(_, ear)| woken(ear) == 0));
    drop(held);
    assert!(empty(&hold));
}

#[test]
fn a_third_request_of_one_client_replaces_the_oldest() {
    let hold = hold(Limits::default());
    let of = |group, client| HoldTicket { client: hold.client_key(group, client), connection: 1 };
    let ticket = of("g", "c");
    let ears: Vec<Arc<Ear>> = (0..3).map(|_| Arc::default()).collect();
    let mut first = hold.subscribe(queue(0), ticket).unwrap();
    let mut second = hold.subscribe(queue(0), ticket).unwrap();
    assert!(poll(&mut first, 0, &ears[0]).is_pending() && poll(&mut second, 0, &ears[1]).is_pending());
    let others = [
        hold.subscribe(queue(1), ticket).unwrap(),
        hold.subscribe(queue(0), of("g", "d")).unwrap(),
        hold.subscribe(queue(0), of("h", "c")).unwrap(),
        hold.subscribe(queue(0), of("g", "")).unwrap(),
    ];
    assert_eq!(woken(&ears[0]), 0, "others do not count");
    let mut third = hold.subscribe(queue(0), ticket).unwrap();
    assert_eq!(poll(&mut first, 0, &ears[0]), Poll::Ready(Event::Replaced));
    assert_eq!((woken(&ears[0]), woken(&ears[1])), (1, 0));
    assert!(poll(&mut third, 0, &ears[2]).is_pending());
    drop(second);
    let fourth = hold.subscribe(queue(0), ticket).unwrap();
    assert!(poll(&mut third, 0, &ears[2]).is_pending(), "one had gone, so nobody is replaced");
    drop((others, first, third, fourth));
    assert!(empty(&hold));
}

#[test]
fn limits_refuse_and_free_places_are_given_again() {
    let hold = hold(Limits { per_client: 2, per_connection: 2, total: 3 });
    let by = |connection| hold.subscribe(queue(0), HoldTicket { connection, ..HoldTicket::default() });
    let first = by(1).unwrap();
    let _second = by(1).unwrap();
    assert_eq!(by(1).unwrap_err(), Full::Connection);
    let _third = by(2).unwrap();
    assert_eq!(by(2).unwrap_err(), Full::Node);
    drop(first);
    let _fourth = by(1).unwrap();
    assert_eq!(hold.held(), 3);
}

#[test]
fn the_end_of_a_topic_ends_its_waits_only() {
    let hold = hold(Limits::default());
    let other = QueueKey { topic: TopicId(65), queue: 0 };
    let mut gone = hold.subscribe(queue(7), HoldTicket::default()).unwrap();
    let mut stays = hold.subscribe(other, HoldTicket::default()).unwrap();
    let ears = [Arc::new(Ear::default()), Arc::new(Ear::default())];
    assert!(poll(&mut gone, 0, &ears[0]).is_pending() && poll(&mut stays, 0, &ears[1]).is_pending());
    hold.close_topic(TopicId(64));
    assert_eq!(poll(&mut gone, 0, &ears[0]), Poll::Ready(Event::Closed));
    assert!(poll(&mut stays, 0, &ears[1]).is_pending());
    assert_eq!((woken(&ears[0]), woken(&ears[1])), (1, 0));
}

#[test]
fn stop_answers_everybody_and_holds_nobody_any_more() {
    let hold = hold(Limits::default());
    let ear = Arc::new(Ear::default());
    let mut held: Vec<Waiter> =
        (0..5000).map(|n| hold.subscribe(queue(n % 300), HoldTicket::default()).unwrap()).collect();
    for waiter in &mut held {
        assert!(poll(waiter, 0, &ear).is_pending());
    }
    hold.stop();
    assert_eq!(woken(&ear), 5000);
    assert!(held.iter_mut().all(|waiter| poll(waiter, 0, &ear) == Poll::Ready(Event::Stopped)));
    let mut late = hold.subscribe(queue(0), HoldTicket::default()).unwrap();
    assert_eq!(poll(&mut late, 0, &ear), Poll::Ready(Event::Stopped));
    drop((held, late));
    assert!(empty(&hold));
}

#[test]
fn the_sweep_finds_only_what_news_has_missed_for_a_whole_round() {
    let hold = hold(Limits::default());
    let ear = Arc::new(Ear::default());
    let mut waiter = hold.subscribe(queue(0), HoldTicket::default()).unwrap();
    assert!(poll(&mut waiter, 3, &ear).is_pending());
    assert_eq!(hold.sweep(|_| Some(3)), 0);
    assert_eq!(hold.sweep(|_| Some(4)), 0, "the news may be on its way");
    assert_eq!(hold.sweep(|_| Some(4)), 1);
    assert!(matches!(poll(&mut waiter, 3, &ear), Poll::Ready(Event::Grew { .. })));
    assert!(poll(&mut waiter, 4, &ear).is_pending());
    assert_eq!(hold.sweep(|_| Some(4)), 0);
    assert_eq!(hold.sweep(|_| None), 0);
    assert_eq!(hold.sweep(|_| None), 1, "the queue is gone and nobody said so");
    assert_eq!(poll(&mut waiter, 4, &ear), Poll::Ready(Event::Closed));
}

#[test]
fn a_waiter_can_be_awaited_from_a_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let hold = hold(Limits::default());
    runtime.block_on(async {
        crate::runtime::WakeHub::install();
        let held: Vec<_> = (0..1000)
            .map(|_| {
                let mut waiter = hold.subscribe(queue(0), HoldTicket::default()).unwrap();
                tokio::spawn(async move { waiter.changed(0).await })
            })
            .collect();
        tokio::task::yield_now().await;
        let publisher = std::thread::spawn({
            let hold = hold.clone();
            move || hold.publish(&[(queue(0), 1)])
        });
        for task in held {
            assert!(matches!(task.await.unwrap(), Event::Grew { .. }));
        }
        publisher.join().unwrap();
    });
    assert!(empty(&hold));
}

#[derive(Clone, Debug)]
enum Step {
    Subscribe { queue: u32, client: u8 },
    Poll(prop::sample::Index),
    Drop(prop::sample::Index),
    Publish(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3_u32, 0..4_u8).prop_map(|(queue, client)| Step::Subscribe { queue, client }),
        any::<prop::sample::Index>().prop_map(Step::Poll),
        any::<prop::sample::Index>().prop_map(Step::Drop),
        (0..3_u32).prop_map(Step::Publish),
    ]
}

proptest! {
    /// Against a plain model: each waiter with the end it has seen, and which were replaced.
    #[test]
    fn whatever_happens_nobody_misses_news_and_nothing_is_left(steps in proptest::collection::vec(step(), 1..120)) {
        let hold = hold(Limits::default());
        let mut ends = [0_u64; 3];
        let mut held: Vec<(Waiter, Arc<Ear>, u8, u64, bool)> = Vec::new();
        for step in steps {
            match step {
                Step::Subscribe { queue: at, client } => {
                    let name = if client == 0 { String::new() } else { client.to_string() };
                    let ticket = HoldTicket { client: hold.client_key("g", &name), connection: 0 };
                    let waiter = hold.subscribe(queue(at), ticket).unwrap();
                    let mine = |(waiter, _, by, _, replaced): &(Waiter, Arc<Ear>, u8, u64, bool)| {
                        waiter.key.queue == at && *by == client && client != 0 && !replaced
                    };
                    if held.iter().filter(|entry| mine(entry)).count() >= 2 {
                        held.iter_mut().find(|entry| mine(entry)).unwrap().4 = true;
                    }
                    held.push((waiter, Arc::default(), client, ends[at as usize], false));
                }
                Step::Poll(at) if !held.is_empty() => {
                    let at = at.index(held.len());
                    let (waiter, ear, _, seen, replaced) = &mut held[at];
                    let end = ends[waiter.key.queue as usize];
                    match poll(waiter, *seen, ear) {
                        Poll::Ready(Event::Replaced) => prop_assert!(*replaced),
                        Poll::Ready(Event::Grew { .. }) => {
                            prop_assert!(end > *seen && !*replaced);
                            *seen = end;
                        }
                        Poll::Ready(other) => prop_assert!(false, "{:?}", other),
                        Poll::Pending => prop_assert!(end == *seen && !*replaced),
                    }
                }
                Step::Drop(at) if !held.is_empty() => drop(held.remove(at.index(held.len()))),
                Step::Publish(at) => {
                    ends[at as usize] += 1;
                    hold.publish(&[(queue(at), ends[at as usize])]);
                }
                Step::Poll(_) | Step::Drop(_) => {}
            }
            prop_assert_eq!(hold.held(), held.len());
        }
        held.clear();
        prop_assert!(empty(&hold));
    }
}

#[test]
fn a_waiter_is_small() {
    assert!(size_of::<Waiter>() <= 72, "{}", size_of::<Waiter>());
    let hold = hold(Limits::default());
    let mut waiter = hold.subscribe(queue(0), HoldTicket::default()).unwrap();
    let future = pin!(waiter.changed(0));
    assert!(size_of_val(&*future) <= 64, "{}", size_of_val(&*future));
}
