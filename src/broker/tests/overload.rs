//! More than the disk takes: what was accepted is finished, what was not leaves nothing, and nobody else suffers.

use super::*;
use crate::store::disk::Operation;

const LIMIT: u64 = 1 << 20;
const BODY: usize = 64 << 10;

fn to(topic: &str, body: &str) -> SendCommand {
    SendCommand {
        topic: topic.into(),
        messages: vec![message(body)],
        queue: Some(0),
        ..SendCommand::default()
    }
}

/// A house with a little in it and a small inbox.
async fn house() -> House {
    let mut house = House::new();
    house.send("t", 0, vec![message("before")]).await.unwrap();
    house.options.inbox_bytes = LIMIT;
    house.restart();
    house
}

/// Sends until one is refused, while the disk does not move.
fn fill(house: &House, body: &str) -> (Vec<SendTicket>, Error) {
    let mut tickets = Vec::new();
    for _ in 0..1000 {
        match house.broker.begin_send(to("t", body)) {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => return (tickets, error),
        }
    }
    panic!("everything was taken")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_times_what_fits_is_refused_at_once_and_what_was_accepted_is_finished() {
    let house = house().await;
    let body = "x".repeat(BODY);
    let stuck = house.disk.hold(Operation::Sync, ".log");
    // The first group is on its way to the disk; what comes now waits behind it.
    let first = house.broker.begin_send(to("t", &body)).unwrap();
    while stuck.waiting() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (mut tickets, refusal) = fill(&house, &body);
    let accepted = (tickets.len() as u64).saturating_mul(BODY as u64);
    assert!(accepted > LIMIT / 2, "too early: {accepted} bytes");
    assert!(accepted <= LIMIT + 2 * BODY as u64, "more than fits: {accepted} bytes");
    assert_eq!(refusal.reason(), "BUSY");
    assert!(refusal.retry_after().is_some_and(|delay| !delay.is_zero()));
    assert!(refusal.to_string().contains("store.inbox_size"), "{refusal}");
    // Twenty times as much: each is refused in the call itself, however often it tries.
    for _ in 0..20 * LIMIT / BODY as u64 {
        assert_eq!(reason(house.broker.begin_send(to("t", &body))), "BUSY");
    }

    // Readers see what is durable, and nothing of what waits.
    let pulled = house.broker.pull(pull("t", 0)).await.unwrap();
    assert_eq!((bodies(&pulled), pulled.max_offset), (vec!["before".to_owned()], 1));
    let held = tokio::spawn(house.broker.pull(waiting("t", 1)));
    house.held(1).await;
    // A commit is taken in, and waits for the disk as everybody does.
    let commit = tokio::spawn({
        let broker = house.broker.clone();
        let offsets = vec![QueueOffset { topic: "t".into(), queue: 0, offset: 1 }];
        async move { broker.commit(CommitCommand { group: "g".into(), offsets }).await }
    });
    tokio::task::yield_now().await;

    drop(stuck);
    tickets.insert(0, first);
    for (at, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(ticket.await.unwrap().first_offset, 1 + at as u64, "accepted sends are in order");
    }
    assert!(matches!(held.await.unwrap().unwrap().outcome, PullOutcome::Found(_)));
    assert_eq!(commit.await.unwrap().unwrap()[0].outcome, CommitOutcome::Committed);
    let end = 2 + accepted / BODY as u64;
    let last = house.send("t", 0, vec![message("after")]).await.unwrap();
    assert_eq!(last.first_offset, end, "nothing refused was stored");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_is_behind_for_too_long_refuses_sends_however_small_they_are() {
    let house = house().await;
    let stuck = house.disk.hold(Operation::Sync, ".log");
    let first = house.broker.begin_send(to("t", "a")).unwrap();
    while stuck.waiting() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let second = house.broker.begin_send(to("t", "b")).unwrap();
    house.clock.advance(Duration::from_secs(6));
    let refusal = house.broker.begin_send(to("t", "c")).unwrap_err();
    assert_eq!(refusal.reason(), "BUSY");
    assert!(refusal.to_string().contains("store.inbox_wait"), "{refusal}");
    assert!(refusal.retry_after().is_some());
    assert_eq!(bodies(&house.broker.pull(pull("t", 0)).await.unwrap()), ["before"]);
    drop(stuck);
    assert_eq!((first.await.unwrap().first_offset, second.await.unwrap().first_offset), (1, 2));
    assert_eq!(house.send("t", 0, vec![message("d")]).await.unwrap().first_offset, 3);
}
