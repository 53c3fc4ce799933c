use std::{net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming, transport::server::TcpIncoming};

use super::*;
use crate::{
    client::OutgoingMessage,
    pb::v1::broker_server::{Broker, BrokerServer},
};

/// A broker that stores nothing: refuses batches for the topic `bad`, breaks off at the topic `end`, and answers the
/// others as it is allowed to.
#[derive(Clone)]
struct Fake {
    allowed: Arc<Semaphore>,
    seen: Arc<Mutex<Vec<u64>>>,
}

type Answers = Pin<Box<dyn Stream<Item = Result<pb::SendStreamResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Broker for Fake {
    type SendStreamStream = Answers;

    async fn send_stream(
        &self,
        request: Request<Streaming<pb::SendStreamRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let (answers, receiver) = mpsc::channel(1);
        let mut requests = request.into_inner();
        let fake = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let send = request.send.unwrap();
                fake.seen.lock().push(request.correlation);
                if send.topic == "end" {
                    let _ = answers.send(Err(Status::unavailable("stopping"))).await;
                    return;
                }
                fake.allowed.acquire().await.unwrap().forget();
                let outcome = if send.topic == "bad" {
                    pb::send_stream_response::Outcome::Error(pb::CallError {
                        code: 5,
                        message: "topic `bad` does not exist".into(),
                        reason: "TOPIC_NOT_FOUND".into(),
                        ..Default::default()
                    })
                } else {
                    let offset = i64::try_from(request.correlation).unwrap();
                    let receipts =
                        send.messages.iter().map(|_| pb::Receipt { message_id: "i".into(), offset });
                    pb::send_stream_response::Outcome::Sent(pb::SendResponse {
                        receipts: receipts.collect(),
                        durability: pb::Durability::DurableDisk.into(),
                        ..Default::default()
                    })
                };
                let answer =
                    pb::SendStreamResponse { correlation: request.correlation, outcome: Some(outcome) };
                let _ = answers.send(Ok(answer)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn send(&self, _: Request<pb::SendRequest>) -> Result<Response<pb::SendResponse>, Status> {
        Err(Status::unimplemented(""))
    }
    async fn pull(&self, _: Request<pb::PullRequest>) -> Result<Response<pb::PullResponse>, Status> {
        Err(Status::unimplemented(""))
    }
    async fn commit_offsets(
        &self,
        _: Request<pb::CommitOffsetsRequest>,
    ) -> Result<Response<pb::CommitOffsetsResponse>, Status> {
        Err(Status::unimplemented(""))
    }
    async fn get_offsets(
        &self,
        _: Request<pb::GetOffsetsRequest>,
    ) -> Result<Response<pb::GetOffsetsResponse>, Status> {
        Err(Status::unimplemented(""))
    }
    async fn query_messages(
        &self,
        _: Request<pb::QueryMessagesRequest>,
    ) -> Result<Response<pb::QueryMessagesResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

async fn fake(allowed: usize) -> (Fake, Connection) {
    let fake = Fake { allowed: Arc::new(Semaphore::new(allowed)), seen: Arc::default() };
    let incoming = TcpIncoming::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = incoming.local_addr().unwrap();
    let service = BrokerServer::new(fake.clone());
    tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    (fake, Connection::new(address.to_string().parse().unwrap()).unwrap())
}

fn batch(topic: &str) -> Batch {
    Batch::new(topic, vec![OutgoingMessage::new("x"), OutgoingMessage::new("y")])
}

#[tokio::test]
async fn each_batch_gets_its_own_answer_and_a_bad_one_does_not_end_the_stream() {
    let (_, connection) = fake(100).await;
    let mut stream = connection.send_stream(Window::default());
    let first = stream.send(batch("good")).await.unwrap();
    let second = stream.send(batch("bad")).await.unwrap();
    let third = stream.send(batch("good")).await.unwrap();
    // Not in the order in which they come.
    assert_eq!(third.await.unwrap().receipts[1].offset, 2);
    let error = second.await.unwrap_err();
    assert_eq!((error.code(), error.reason()), (Code::NotFound, Some("TOPIC_NOT_FOUND")));
    assert_eq!(first.await.unwrap().receipts.len(), 2);
    stream.finish().await;
}

#[tokio::test]
async fn a_full_window_is_waited_for_and_an_answer_makes_room() {
    let (fake, connection) = fake(0).await;
    let mut stream = connection.send_stream(Window { batches: 2, bytes: 1 << 20 });
    let first = stream.send(batch("t")).await.unwrap();
    let _second = stream.send(batch("t")).await.unwrap();
    assert_eq!(stream.in_flight(), 2);
    {
        let third = stream.send(batch("t"));
        tokio::pin!(third);
        assert!(futures_util::poll!(&mut third).is_pending());
        // Given up while it waits: nothing was handed over.
    }
    fake.allowed.add_permits(1);
    first.await.unwrap();
    let third = stream.send(batch("t")).await.unwrap();
    fake.allowed.add_permits(2);
    assert_eq!(third.await.unwrap().receipts[0].offset, 2);
    assert_eq!(*fake.seen.lock(), [0, 1, 2]);
}

#[tokio::test]
async fn bytes_bound_the_window_too_and_a_large_batch_goes_alone() {
    let (fake, connection) = fake(0).await;
    let mut stream = connection.send_stream(Window { batches: 100, bytes: 10 });
    let first = stream.send(batch("t")).await.unwrap();
    {
        let second = stream.send(batch("t"));
        tokio::pin!(second);
        assert!(futures_util::poll!(&mut second).is_pending());
    }
    fake.allowed.add_permits(2);
    first.await.unwrap();
    stream.send(batch("t")).await.unwrap().await.unwrap();
}

#[tokio::test]
async fn when_the_stream_breaks_all_that_waits_is_told_and_so_is_every_later_batch() {
    let (fake, connection) = fake(0).await;
    let mut stream = connection.send_stream(Window { batches: 2, bytes: 1 << 20 });
    let first = stream.send(batch("end")).await.unwrap();
    let second = stream.send(batch("t")).await.unwrap();
    assert_eq!(first.await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(second.await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(stream.send(batch("t")).await.unwrap_err().to_string(), "stopping");
    assert_eq!(stream.in_flight(), 0);
    fake.allowed.add_permits(1);
}

#[tokio::test]
async fn finish_waits_for_every_answer() {
    let (fake, connection) = fake(0).await;
    let mut stream = connection.send_stream(Window::default());
    let mut answer = stream.send(batch("t")).await.unwrap();
    while fake.seen.lock().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    {
        let finish = stream.finish();
        tokio::pin!(finish);
        assert!(futures_util::poll!(&mut finish).is_pending());
        fake.allowed.add_permits(1);
        finish.await;
    }
    assert!(futures_util::FutureExt::now_or_never(&mut answer).unwrap().is_ok());
}

#[tokio::test]
async fn a_stream_to_nobody_says_so_with_its_first_answer() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let connection = Connection::new(free.to_string().parse().unwrap()).unwrap();
    let mut stream = connection.send_stream(Window::default());
    let answer = stream.send(batch("t")).await.unwrap();
    assert_eq!(answer.await.unwrap_err().code(), Code::Unreachable);
}
