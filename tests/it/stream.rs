//! `SendStream`: the same frames as `Send`, pipelined.

use holdfast::pb::v1::{
    CallError, SendRequest, SendResponse, SendStreamRequest, SendStreamResponse,
    send_stream_response::Outcome,
};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Code, Streaming};

use crate::harness::*;

struct Stream {
    requests: mpsc::Sender<SendStreamRequest>,
    answers: Streaming<SendStreamResponse>,
}

impl Stream {
    async fn open(client: &Client) -> Self {
        let (requests, receiver) = mpsc::channel(4096);
        let answers = client.broker.clone().send_stream(ReceiverStream::new(receiver)).await;
        Self { requests, answers: answers.unwrap().into_inner() }
    }

    async fn send(&self, correlation: u64, send: SendRequest) {
        self.requests.send(SendStreamRequest { correlation, send: Some(send) }).await.unwrap();
    }

    async fn answer(&mut self) -> (u64, Outcome) {
        let answer = tokio::time::timeout(SOON, self.answers.next()).await.unwrap().unwrap().unwrap();
        (answer.correlation, answer.outcome.unwrap())
    }

    async fn sent(&mut self) -> (u64, SendResponse) {
        match self.answer().await {
            (correlation, Outcome::Sent(sent)) => (correlation, sent),
            (correlation, Outcome::Error(error)) => panic!("{correlation}: {error:?}"),
        }
    }

    async fn error(&mut self) -> (u64, CallError) {
        match self.answer().await {
            (correlation, Outcome::Error(error)) => (correlation, error),
            (correlation, Outcome::Sent(sent)) => panic!("{correlation}: {sent:?}"),
        }
    }
}

fn to_queue(topic: &str, body: &str) -> SendRequest {
    SendRequest { queue_id: Some(0), ..send_request(topic, vec![message(body)]) }
}

#[tokio::test]
async fn frames_are_appended_and_answered_in_their_order() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut stream = Stream::open(&client).await;
    for n in 0..2000_u64 {
        stream.send(1_000_000 - n, to_queue("t", &n.to_string())).await;
    }
    for n in 0..2000_u64 {
        let (correlation, sent) = stream.sent().await;
        assert_eq!(correlation, 1_000_000 - n);
        assert_eq!(sent.receipts[0].offset, i64::try_from(n).unwrap());
    }
    let expected: Vec<String> = (0..2000).map(|n| n.to_string()).collect();
    assert_eq!(bodies(&client.all("t", 0).await), expected);
}

#[tokio::test]
async fn a_bad_frame_gets_its_error_in_its_place_and_the_stream_lives_on() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut stream = Stream::open(&client).await;
    let bad_queue = SendRequest { queue_id: Some(9), ..to_queue("t", "x") };
    stream.send(1, to_queue("t", "first")).await;
    stream.send(2, to_queue("t", "")).await;
    stream.send(3, bad_queue).await;
    stream.send(4, to_queue("bad name!", "x")).await;
    stream.requests.send(SendStreamRequest { correlation: 5, send: None }).await.unwrap();
    stream.send(6, to_queue("t", "second")).await;

    assert_eq!(stream.sent().await.0, 1);
    let (correlation, error) = stream.error().await;
    assert_eq!((correlation, error.code), (2, Code::InvalidArgument as i32));
    assert!(error.message.contains("body") && !error.reason.is_empty(), "{error:?}");
    for wanted in [3, 4, 5] {
        let (correlation, error) = stream.error().await;
        assert_eq!(correlation, wanted);
        assert!(!error.reason.is_empty() && !error.message.is_empty(), "{error:?}");
    }
    let (correlation, sent) = stream.sent().await;
    assert_eq!((correlation, sent.receipts[0].offset), (6, 1));
}

#[tokio::test]
async fn a_stale_map_version_on_a_stream_comes_with_the_current_one() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let topic = client.topic("t", 1).await;
    let mut stream = Stream::open(&client).await;
    let stale = topic.queue_map_version + 1;
    stream.send(1, SendRequest { queue_map_version: Some(stale), ..to_queue("t", "x") }).await;
    let (_, error) = stream.error().await;
    assert_eq!(error.code, Code::FailedPrecondition as i32);
    assert_eq!(error.metadata["queue_map_version"], topic.queue_map_version.to_string());
}

#[tokio::test]
async fn one_stream_serves_several_topics_and_batches() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("a", 1).await;
    client.topic("b", 1).await;
    let mut stream = Stream::open(&client).await;
    for n in 0..100 {
        let batch = vec![message("x"); 10];
        let topic = if n % 2 == 0 { "a" } else { "b" };
        stream.send(n, SendRequest { queue_id: Some(0), ..send_request(topic, batch) }).await;
    }
    for n in 0..100 {
        let (correlation, sent) = stream.sent().await;
        assert_eq!((correlation, sent.receipts.len()), (n, 10));
    }
    assert_eq!(client.offsets("a", 0, "").await.max_offset, 500);
    assert_eq!(client.offsets("b", 0, "").await.max_offset, 500);
}

#[tokio::test]
async fn after_half_close_everything_is_answered_and_the_stream_ends_well() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let stream = Stream::open(&client).await;
    for n in 0..500 {
        stream.send(n, to_queue("t", "x")).await;
    }
    let Stream { requests, mut answers } = stream;
    drop(requests);
    let mut answered = 0;
    while let Some(answer) = answers.next().await {
        assert!(matches!(answer.unwrap().outcome, Some(Outcome::Sent(_))));
        answered += 1;
    }
    assert_eq!(answered, 500);
}

#[tokio::test]
async fn a_client_that_reads_no_answers_is_slowed_down_and_loses_nothing() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut stream = Stream::open(&client).await;
    let requests = stream.requests.clone();
    let sender = tokio::spawn(async move {
        for n in 0..20_000 {
            let send = Some(to_queue("t", "x"));
            requests.send(SendStreamRequest { correlation: n, send }).await.unwrap();
        }
    });
    // Nothing is read until the broker has stopped taking frames or has taken all.
    let mut before = -1;
    eventually("the stream comes to rest", async || {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let end = client.offsets("t", 0, "").await.max_offset;
        std::mem::replace(&mut before, end) == end
    })
    .await;
    for n in 0..20_000 {
        assert_eq!(stream.sent().await.0, n);
    }
    sender.await.unwrap();
}

#[tokio::test]
async fn a_stream_that_breaks_leaves_the_broker_well() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    for _ in 0..20 {
        let own = broker.client().await;
        let stream = Stream::open(&own).await;
        for n in 0..100 {
            stream.send(n, to_queue("t", "x")).await;
        }
        drop(stream);
    }
    assert!(client.send("t", 0, &["still there"]).await.receipts[0].offset <= 2000);
    eventually("the broken connections are gone", async || client.status().await.connections <= 1).await;
}
