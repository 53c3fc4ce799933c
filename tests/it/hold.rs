//! `Pull` that waits.

use std::time::{Duration, Instant};

use holdfast::pb::v1::{
    CommitOutcome, DeleteTopicRequest, PullOutcome, PullRequest, PullResponse, QueueOffset, SendResponse,
};
use tokio::{net::TcpStream, task::JoinHandle};
use tonic::{Code, Request, Status};

use crate::harness::*;

const LONG: Duration = Duration::from_secs(25);

/// Starts a pull that waits.
fn hold(client: &Client, request: PullRequest) -> JoinHandle<Result<PullResponse, Status>> {
    let client = client.clone();
    tokio::spawn(async move { client.try_pull(waiting(request, LONG)).await })
}

fn ends(sent: &SendResponse) -> i64 {
    sent.receipts.last().unwrap().offset + 1
}

#[tokio::test]
async fn a_held_pull_answers_as_soon_as_a_message_arrives() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    let held = hold(&client, pull_request("t", 1, 0));
    client.wait_held(1).await;
    client.send("t", 0, &["another queue"]).await;
    let sent = client.send("t", 1, &["hold"]).await;
    let answer = held.await.unwrap().unwrap();
    assert_eq!(answer.outcome(), PullOutcome::Found);
    assert_eq!(bodies(&answer.messages), ["hold"]);
    assert_eq!(answer.next_offset, ends(&sent));
    assert_eq!(client.status().await.held_pulls, 0);
}

#[tokio::test]
async fn a_wait_without_news_ends_in_time_with_no_new_message() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let begun = Instant::now();
    let answer = client.pull(waiting(pull_request("t", 0, 0), Duration::from_millis(300))).await;
    assert!(begun.elapsed() >= Duration::from_millis(300), "did not wait");
    assert_eq!(answer.outcome(), PullOutcome::NoNewMessage);
    assert_eq!((answer.next_offset, answer.retry_delay), (0, None));
    client.wait_held(0).await;
}

#[tokio::test]
async fn a_wait_is_cut_short_by_the_calls_deadline_and_still_answered() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut request = Request::new(waiting(pull_request("t", 0, 0), LONG));
    request.set_timeout(Duration::from_secs(2));
    let answer = client.broker.clone().pull(request).await.unwrap().into_inner();
    assert_eq!(answer.outcome(), PullOutcome::NoNewMessage);
}

#[tokio::test]
async fn a_wait_of_more_than_30_seconds_or_less_than_none_is_refused_or_cut() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send("t", 0, &["x"]).await;
    let negative = prost_types::Duration { seconds: -1, nanos: 0 };
    let request = PullRequest { wait: Some(negative), ..pull_request("t", 0, 0) };
    Refusal::of_field(&client.try_pull(request).await.unwrap_err(), "wait");
    let endless = prost_types::Duration { seconds: i64::MAX, nanos: 999_999_999 };
    for wait in [endless, duration(Duration::from_secs(31))] {
        let request = PullRequest { wait: Some(wait), ..pull_request("t", 0, 0) };
        match client.try_pull(request).await {
            Ok(answer) => assert_eq!(answer.outcome(), PullOutcome::Found),
            Err(status) => drop(Refusal::of_field(&status, "wait")),
        }
    }
}

#[tokio::test]
async fn no_message_that_arrives_between_look_and_wait_is_slept_over() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let consumer = broker.client().await;
    client.topic("t", 1).await;
    for n in 0..500 {
        // Both at once: whichever comes first, the pull must end with this message.
        let (answer, _) =
            tokio::join!(consumer.pull(waiting(pull_request("t", 0, n), LONG)), client.send("t", 0, &["x"]));
        assert_eq!((answer.outcome(), answer.next_offset), (PullOutcome::Found, n + 1));
    }
}

#[tokio::test]
async fn a_held_pull_of_a_client_that_goes_away_leaves_nothing_behind() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let other = broker.client().await;
    let held: Vec<_> = (0..50)
        .map(|n| hold(&other, PullRequest { client_id: n.to_string(), ..pull_request("t", 0, 0) }))
        .collect();
    client.wait_held(50).await;
    held[0].abort();
    client.wait_held(49).await;
    for pull in &held {
        pull.abort();
    }
    drop(other);
    client.wait_held(0).await;
    assert_eq!(ends(&client.send("t", 0, &["x"]).await), 1);
}

#[tokio::test]
async fn a_third_pull_of_the_same_client_replaces_the_oldest() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mine = || PullRequest { client_id: "me".into(), group: "g".into(), ..pull_request("t", 0, 0) };
    let first = hold(&client, mine());
    client.wait_held(1).await;
    let second = hold(&client, mine());
    client.wait_held(2).await;
    let stranger = hold(&client, PullRequest { client_id: "you".into(), ..mine() });
    client.wait_held(3).await;
    let third = hold(&client, mine());
    let answer = first.await.unwrap().unwrap();
    assert_eq!(answer.outcome(), PullOutcome::NoNewMessage, "the oldest is answered, kindly");
    client.wait_held(3).await;
    client.send("t", 0, &["x"]).await;
    for pull in [second, third, stranger] {
        assert_eq!(pull.await.unwrap().unwrap().outcome(), PullOutcome::Found);
    }
}

#[tokio::test]
async fn when_the_hold_is_full_a_pull_is_told_to_come_again_later() {
    let broker =
        Broker::start_with("standalone", &[("hold.max_total", "3"), ("hold.max_per_connection", "3")]).await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let pull = |n: u32| PullRequest { client_id: n.to_string(), ..pull_request("t", 0, 0) };
    let held: Vec<_> = (0..3).map(|n| hold(&client, pull(n))).collect();
    client.wait_held(3).await;
    let answer = client.pull(waiting(pull(3), LONG)).await;
    assert_eq!(answer.outcome(), PullOutcome::NoNewMessage);
    assert!(answer.retry_delay.is_some_and(|delay| delay.seconds > 0 || delay.nanos > 0), "{answer:?}");
    client.send("t", 0, &["x"]).await;
    for pull in held {
        assert_eq!(pull.await.unwrap().unwrap().outcome(), PullOutcome::Found);
    }
    let answer = client.pull(waiting(pull(4), Duration::from_millis(10))).await;
    assert_eq!(answer.outcome(), PullOutcome::Found);
}

#[tokio::test]
async fn deleting_a_topic_ends_its_held_pulls_with_not_found_and_brings_nothing_back() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 2).await;
    let held: Vec<_> = (0..2).map(|queue| hold(&client, pull_request("t", queue, 0))).collect();
    client.wait_held(2).await;
    client.admin.clone().delete_topic(DeleteTopicRequest { topic: "t".into() }).await.unwrap();
    for pull in held {
        let refusal = Refusal::of(&pull.await.unwrap().unwrap_err());
        assert_eq!((refusal.code, refusal.reason.as_str()), (Code::NotFound, "TOPIC_NOT_FOUND"));
    }
    let status = client.try_pull(waiting(pull_request("t", 0, 0), LONG)).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    broker.stop().await;
    broker.restart().await;
    assert_eq!(broker.client().await.status().await.shards[0].topics, 0, "reading made it again");
}

#[tokio::test]
async fn a_stop_answers_all_held_pulls_and_waits_for_no_idle_connection() {
    let mut broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 8).await;
    let mut held = Vec::new();
    for connection in 0..10 {
        let client = broker.client().await;
        for n in 0..20 {
            let client_id = format!("{connection}-{n}");
            held.push(hold(&client, PullRequest { client_id, ..pull_request("t", n % 8, 0) }));
        }
    }
    let idle = futures_util::future::join_all((0..20).map(|_| broker.client())).await;
    let mut silent = Vec::new();
    for _ in 0..10 {
        silent.push(TcpStream::connect(broker.address()).await.unwrap());
    }
    client.wait_held(200).await;
    broker.send_term();
    for pull in held {
        // A retryable end, or an honest "nothing new".
        match pull.await.unwrap() {
            Ok(answer) => assert_eq!(answer.outcome(), PullOutcome::NoNewMessage),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status:?}"),
        }
    }
    let status = broker.wait().await;
    assert!(status.success(), "ended with {status}");
    drop((idle, silent));
}

#[tokio::test]
async fn a_wanted_message_followed_by_unwanted_ones_wakes_its_waiter() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let held = hold(&client, PullRequest { tag_filter: "yes".into(), ..pull_request("t", 0, 0) });
    client.wait_held(1).await;
    for _ in 0..3 {
        client.send_messages("t", 0, vec![tagged("no", "no"); 100]).await;
    }
    assert_eq!(client.status().await.held_pulls, 1, "nothing for it yet");
    let mut batch = vec![tagged("no", "no"); 100];
    batch[20] = tagged("yes", "yes");
    client.send_messages("t", 0, batch).await;
    let answer = held.await.unwrap().unwrap();
    assert_eq!((answer.outcome(), bodies(&answer.messages)), (PullOutcome::Found, vec!["yes".into()]));
    assert!(answer.next_offset >= 321, "{}", answer.next_offset);
}

#[tokio::test]
async fn a_filtered_wait_that_ends_has_moved_past_what_it_saw() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let request = PullRequest { tag_filter: "yes".into(), ..pull_request("t", 0, 0) };
    let held = tokio::spawn({
        let (client, request) = (client.clone(), waiting(request, Duration::from_secs(2)));
        async move { client.pull(request).await }
    });
    client.wait_held(1).await;
    client.send_messages("t", 0, vec![tagged("no", "no"); 300]).await;
    let answer = held.await.unwrap();
    assert_eq!((answer.outcome(), answer.next_offset), (PullOutcome::NoMatchedMessage, 300));
}

#[tokio::test]
async fn a_commit_that_rides_on_a_held_pull_is_in_force_before_the_wait() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send("t", 0, &["a", "b"]).await;
    let request = PullRequest { group: "g".into(), commit_offset: Some(2), ..pull_request("t", 0, 2) };
    let held = hold(&client, request);
    client.wait_held(1).await;
    eventually("the commit", async || client.offsets("t", 0, "g").await.committed == Some(2)).await;
    // Progress made meanwhile must not be undone when the held pull is answered.
    client.send("t", 0, &["c"]).await;
    let answer = held.await.unwrap().unwrap();
    assert_eq!(answer.outcome(), PullOutcome::Found);
    assert_eq!(answer.commit.unwrap().outcome(), CommitOutcome::Committed);
    let offsets = vec![QueueOffset { topic: "t".into(), queue_id: 0, offset: 3 }];
    let request = holdfast::pb::v1::CommitOffsetsRequest { group: "g".into(), offsets };
    client.broker.clone().commit_offsets(request).await.unwrap();
    assert_eq!(client.offsets("t", 0, "g").await.committed, Some(3));
}

#[tokio::test]
async fn one_message_wakes_everybody_who_waits_for_it() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let client = broker.client().await;
        for n in 0..250 {
            held.push(hold(
                &client,
                PullRequest { client_id: format!("{n}"), group: format!("g{n}"), ..pull_request("t", 0, 0) },
            ));
        }
    }
    // Pulls of equal client, group and queue are from different connections; two of four stay.
    eventually("all are held or answered", async || client.status().await.held_pulls >= 500).await;
    client.send("t", 0, &["x"]).await;
    for pull in held {
        let outcome = pull.await.unwrap().unwrap().outcome();
        assert!(matches!(outcome, PullOutcome::Found | PullOutcome::NoNewMessage));
    }
    client.wait_held(0).await;
}

#[tokio::test]
async fn a_held_pull_of_a_sync_topic_sees_only_what_is_durable() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let consumer = broker.client().await;
    for n in 0..50 {
        let held = hold(&consumer, pull_request("t", 0, n));
        client.wait_held(1).await;
        client.send("t", 0, &["x"]).await;
        let answer = held.await.unwrap().unwrap();
        let shard = &client.status().await.shards[0];
        let place = system(&answer.messages[0]).log_position.unwrap();
        assert!(place < shard.log_durable, "{place} was shown before it was durable ({})", shard.log_durable);
    }
}
