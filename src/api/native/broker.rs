//! `holdfast.v1.Broker`.

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use http::{Request, Response};
use prost::Message;
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, codec::Streaming, server::Grpc};
use tower::service_fn;

use super::{
    codec::{Plain, StreamCodec, messages, read_plain, read_pull, read_send},
    convert, status,
    stream::{Answers, StreamLimits},
    unary::{self, RequestBody, respond},
};
use crate::{
    api::{
        connection::Connection,
        layers::{AnswerBudget, Owed, RETRY},
    },
    broker::{Broker, Error, PullCommand, PullOutcome, Pulled},
    model::{Invalid, MAX_BATCH_BYTES},
    pb::v1,
};

/// [`Framed`](crate::api::layers::Framed) has checked the size of requests; this is only above it.
const ANY_SIZE: usize = 2 * MAX_BATCH_BYTES;
/// Answers below this are not worth the counting.
const COUNTED_BYTES: u64 = 16 * 1024;
/// Who calls, as far as the calls need to know.
#[derive(Clone, Debug)]
pub(in crate::api) struct Caller {
    /// Where it is connected.
    pub(in crate::api) connection: Arc<Connection>,
    /// When it gives up.
    pub(in crate::api) deadline: Option<Instant>,
}

/// The calls of `holdfast.v1.Broker`.
#[derive(Clone)]
pub(in crate::api) struct BrokerApi {
    broker: Broker,
    limits: StreamLimits,
    /// Memory of messages on their way out.
    answers: AnswerBudget,
    stop: CancellationToken,
}

impl BrokerApi {
    pub(in crate::api) fn new(
        broker: Broker,
        limits: StreamLimits,
        answers: AnswerBudget,
        stop: CancellationToken,
    ) -> Self {
        Self { broker, limits, answers, stop }
    }

    pub(in crate::api) async fn send<B: RequestBody>(self, body: B) -> Response<Body> {
        let ticket = async {
            let command = read_send(&unary::read(body).await?).map_err(|error| status::of(&error))?;
            self.broker.begin_send(command).map_err(|error| status::of(&error))
        };
        // The request is gone before the disk is waited for.
        respond(match Box::pin(ticket).await {
            Ok(ticket) => ticket.await.map_err(|error| status::of(&error)),
            Err(status) => Err(status),
        })
    }

    pub(in crate::api) async fn send_stream<B: RequestBody>(self, request: B) -> Response<Body> {
        let service = service_fn(|request: tonic::Request<Streaming<_>>| {
            let stop = self.stop.clone().cancelled_owned();
            let answers = Answers::new(self.broker.clone(), request.into_inner(), self.limits, stop);
            async move { Ok::<_, Status>(tonic::Response::new(answers)) }
        });
        let mut grpc = Grpc::new(StreamCodec).max_decoding_message_size(ANY_SIZE);
        grpc.streaming(service, Request::new(request)).await
    }

    pub(in crate::api) fn pull<B: RequestBody>(
        self,
        body: B,
        caller: Caller,
    ) -> impl Future<Output = Response<Body>> + Send + use<B> {
        let answers = self.answers.clone();
        let Caller { connection, deadline } = caller;
        let number = connection.number;
        // What is only needed to read is in a box that is gone before the wait; what waits is small.
        let read = Box::pin(async move {
            let command = read_pull(&unary::read(body).await?).map_err(invalid)?;
            let offset = command.offset;
            let command = PullCommand { connection: number, deadline, ..command };
            Ok::<_, Status>((offset, self.broker.pull(command)))
        });
        async move {
            let (offset, pull) = match read.await {
                Ok(read) => read,
                Err(status) => return status.into_http(),
            };
            match pull.await {
                Ok(pulled) => found(&answers, &connection, offset, pulled),
                Err(error) => status::of(&error).into_http(),
            }
        }
    }

    pub(in crate::api) async fn commit_offsets<B: RequestBody>(self, body: B) -> Response<Body> {
        plain(body, async |request| {
            let results = self.broker.commit(convert::commit(request)).await?;
            Ok(v1::CommitOffsetsResponse { results: results.iter().map(convert::committed).collect() })
        })
        .await
    }

    pub(in crate::api) async fn get_offsets<B: RequestBody>(self, body: B) -> Response<Body> {
        plain(body, async |request| {
            let offsets = self.broker.offsets(convert::offsets(request)?).await?;
            Ok(v1::GetOffsetsResponse { offsets: offsets.into_iter().map(convert::queue_offsets).collect() })
        })
        .await
    }

    pub(in crate::api) async fn query_messages<B: RequestBody>(
        self,
        body: B,
        connection: Arc<Connection>,
    ) -> Response<Body> {
        let found = async {
            let query = convert::query(read_plain(unary::read(body).await?).map_err(invalid)?);
            let found = self.broker.query(query.map_err(invalid)?).await;
            found.map_err(|error| status::of(&error))
        };
        let found = match found.await {
            Ok(found) => found,
            Err(status) => return status.into_http(),
        };
        match self.answers.take(&connection, total(&found.messages)) {
            Some(owed) => owing(respond(Ok(found)), Some(owed)),
            None => status::of(&self.answers.full()).into_http(),
        }
    }
}

/// A call with generated types.
async fn plain<B, Q, A>(body: B, handler: impl AsyncFnOnce(Q) -> Result<A, Error>) -> Response<Body>
where
    B: RequestBody,
    Q: Message + Default,
    A: Message,
{
    let request = match unary::read(body).await {
        Ok(bytes) => read_plain(bytes),
        Err(status) => return status.into_http(),
    };
    let answer = match request {
        Ok(request) => handler(request).await,
        Err(invalid) => Err(invalid.into()),
    };
    respond(answer.map(Plain).map_err(|error| status::of(&error)))
}

/// The answer to a pull. Without memory for its messages the client is asked to come again.
fn found(
    answers: &AnswerBudget,
    connection: &Arc<Connection>,
    offset: i64,
    mut pulled: Pulled,
) -> Response<Body> {
    let bytes = total(messages(&pulled));
    if bytes < COUNTED_BYTES {
        return respond(Ok(pulled));
    }
    let owed = answers.take(connection, bytes);
    if owed.is_none() {
        pulled.outcome = PullOutcome::NoNewMessage(Some(RETRY));
        pulled.next_offset = u64::try_from(offset).unwrap_or_default();
    }
    owing(respond(Ok(pulled)), owed)
}

/// The response holds on to memory until it has been sent.
fn owing(mut response: Response<Body>, owed: Option<Arc<Owed>>) -> Response<Body> {
    if let Some(owed) = owed {
        response.extensions_mut().insert(owed);
    }
    response
}

fn invalid(invalid: Invalid) -> Status {
    status::of(&invalid.into())
}

fn total(messages: &[Bytes]) -> u64 {
    messages.iter().map(|message| message.len() as u64).sum()
}
