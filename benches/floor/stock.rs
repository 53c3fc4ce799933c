//! Reference S: the same service as tonic's documentation would have one write it. Generated types, the multi-thread
//! runtime, default frames and windows; nothing is stored.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use futures_util::{Stream, StreamExt as _};
use holdfast::pb::v1::{
    CommitOffsetsRequest, CommitOffsetsResponse, Durability, GetOffsetsRequest, GetOffsetsResponse, Message,
    PullOutcome, PullRequest, PullResponse, QueryMessagesRequest, QueryMessagesResponse, Receipt,
    SendRequest, SendResponse, SendStreamRequest, SendStreamResponse, SystemProperties,
    broker_server::{Broker, BrokerServer},
    send_stream_response::Outcome,
};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};

use crate::{
    Result, process,
    requests::{MESSAGES_MAX, body},
};

/// As long as the id of a message that names itself.
const ID: &str = "0190a5c6-7a7c-7000-8000-000000000000";

struct Stock {
    next: Arc<AtomicI64>,
    /// What every pull is answered from.
    messages: Vec<Message>,
}

/// Serves until the parent ends.
pub fn serve() -> Result<()> {
    process::end_with_parent();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?.with_nodelay(Some(true));
        println!("{}", incoming.local_addr()?);
        let stock = Stock { next: Arc::default(), messages: messages() };
        Server::builder().add_service(BrokerServer::new(stock)).serve_with_incoming(incoming).await?;
        Ok(())
    })
}

/// Messages with the fields that a broker delivers.
fn messages() -> Vec<Message> {
    let (body, now) = (body(), prost_types::Timestamp { seconds: 1_700_000_000, nanos: 123_000_000 });
    let message = |offset| Message {
        body: body.clone(),
        system_properties: Some(SystemProperties {
            message_id: ID.into(),
            born_timestamp: Some(now),
            store_timestamp: Some(now),
            store_host: "standalone".into(),
            queue_offset: Some(offset),
            log_position: Some(1 << 30),
            ..SystemProperties::default()
        }),
        ..Message::default()
    };
    (0..).take(MESSAGES_MAX).map(message).collect()
}

fn stored(next: &AtomicI64, request: &SendRequest) -> SendResponse {
    let count = i64::try_from(request.messages.len()).unwrap_or(0);
    let first = next.fetch_add(count, Ordering::Relaxed);
    SendResponse {
        queue_id: 0,
        receipts: (first..first + count).map(|offset| Receipt { message_id: ID.into(), offset }).collect(),
        store_timestamp: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
        durability: Durability::DurableMemory.into(),
    }
}

#[tonic::async_trait]
impl Broker for Stock {
    async fn send(
        &self,
        request: Request<SendRequest>,
    ) -> std::result::Result<Response<SendResponse>, Status> {
        Ok(Response::new(stored(&self.next, request.get_ref())))
    }

    type SendStreamStream =
        Pin<Box<dyn Stream<Item = std::result::Result<SendStreamResponse, Status>> + Send>>;

    async fn send_stream(
        &self,
        request: Request<Streaming<SendStreamRequest>>,
    ) -> std::result::Result<Response<Self::SendStreamStream>, Status> {
        let next = self.next.clone();
        let answers = request.into_inner().map(move |request| {
            let request = request?;
            let sent = stored(&next, &request.send.unwrap_or_default());
            Ok(SendStreamResponse { correlation: request.correlation, outcome: Some(Outcome::Sent(sent)) })
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn pull(
        &self,
        request: Request<PullRequest>,
    ) -> std::result::Result<Response<PullResponse>, Status> {
        let request = request.get_ref();
        let count = usize::try_from(request.max_messages).unwrap_or(usize::MAX);
        let messages: Vec<Message> = self.messages.iter().take(count).cloned().collect();
        Ok(Response::new(PullResponse {
            outcome: PullOutcome::Found.into(),
            next_offset: request.offset + i64::try_from(messages.len()).unwrap_or(0),
            max_offset: i64::MAX,
            messages,
            ..PullResponse::default()
        }))
    }

    async fn commit_offsets(
        &self,
        _: Request<CommitOffsetsRequest>,
    ) -> std::result::Result<Response<CommitOffsetsResponse>, Status> {
        Err(Status::unimplemented("a reference only"))
    }

    async fn get_offsets(
        &self,
        _: Request<GetOffsetsRequest>,
    ) -> std::result::Result<Response<GetOffsetsResponse>, Status> {
        Err(Status::unimplemented("a reference only"))
    }

    async fn query_messages(
        &self,
        _: Request<QueryMessagesRequest>,
    ) -> std::result::Result<Response<QueryMessagesResponse>, Status> {
        Err(Status::unimplemented("a reference only"))
    }
}
