//! `holdfast.v1.Broker`.

use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use tokio_util::sync::CancellationToken;
use tonic::{
    Status,
    body::Body,
    codec::{Codec, Streaming},
    server::Grpc,
};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::{
    codec::{PullCodec, QueryCodec, SendCodec, StreamCodec, messages},
    convert, status,
    stream::{Answers, StreamLimits},
};
use crate::{
    api::layers::{Budget, RETRY},
    broker::{Broker, Error, PullCommand, PullOutcome, Pulled},
    model::MAX_BATCH_BYTES,
    pb::v1,
};

/// [`Framed`](crate::api::layers::Framed) has checked the size of requests; this is only above it.
const ANY_SIZE: usize = 2 * MAX_BATCH_BYTES;
/// Answers below this are not worth the counting.
const COUNTED_BYTES: u64 = 16 * 1024;
/// Who calls, as far as the calls need to know.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Caller {
    /// Number of its connection.
    pub(in crate::api) connection: u64,
    /// When it gives up.
    pub(in crate::api) deadline: Option<Instant>,
}

/// The calls of `holdfast.v1.Broker`.
#[derive(Clone)]
pub(in crate::api) struct BrokerApi {
    broker: Broker,
    limits: StreamLimits,
    /// Memory of messages on their way out.
    answers: Budget,
    stop: CancellationToken,
}

impl BrokerApi {
    pub(in crate::api) fn new(
        broker: Broker,
        limits: StreamLimits,
        answers: Budget,
        stop: CancellationToken,
    ) -> Self {
        Self { broker, limits, answers, stop }
    }

    pub(in crate::api) async fn send<B: RequestBody>(self, request: B) -> Response<Body> {
        unary(SendCodec, request, |command| {
            // Appended here and now, so that the request is gone while the disk works.
            let ticket = self.broker.begin_send(command);
            async move {
                let sent = async { ticket?.await }.await;
                sent.map(tonic::Response::new).map_err(|error| status::of(&error))
            }
        })
        .await
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

    pub(in crate::api) async fn pull<B: RequestBody>(self, request: B, caller: Caller) -> Response<Body> {
        unary(PullCodec, request, |command: PullCommand| {
            // The broker works the command off here and now; what is kept while waiting is small.
            let offset = command.offset;
            let pull = self.broker.pull(PullCommand {
                connection: caller.connection,
                deadline: caller.deadline,
                ..command
            });
            let answers = self.answers.clone();
            async move {
                let pulled = pull.await.map_err(|error| status::of(&error))?;
                Ok(within(&answers, offset, pulled))
            }
        })
        .await
    }

    pub(in crate::api) async fn commit_offsets<B: RequestBody>(self, request: B) -> Response<Body> {
        plain(request, |request| async move {
            let results = self.broker.commit(convert::commit(request)).await?;
            Ok(v1::CommitOffsetsResponse { results: results.iter().map(convert::committed).collect() })
        })
        .await
    }

    pub(in crate::api) async fn get_offsets<B: RequestBody>(self, request: B) -> Response<Body> {
        plain(request, |request| async move {
            let offsets = self.broker.offsets(convert::offsets(request)?).await?;
            Ok(v1::GetOffsetsResponse { offsets: offsets.into_iter().map(convert::queue_offsets).collect() })
        })
        .await
    }

    pub(in crate::api) async fn query_messages<B: RequestBody>(self, request: B) -> Response<Body> {
        let answers = self.answers.clone();
        unary(QueryCodec, request, |request| async move {
            let query = convert::query(request).map_err(|invalid| status::of(&invalid.into()))?;
            let found = self.broker.query(query).await.map_err(|error| status::of(&error))?;
            let Some(held) = answers.take(total(&found.messages)) else {
                return Err(status::of(&answers.full()));
            };
            let mut response = tonic::Response::new(found);
            response.extensions_mut().insert(held);
            Ok(response)
        })
        .await
    }
}

/// What requests come as.
pub(in crate::api) trait RequestBody: HttpBody<Error = Status> + Send + 'static {}

impl<B: HttpBody<Error = Status> + Send + 'static> RequestBody for B {}

/// A call with one request and one answer. Only the message is handed on: headers are gone by now.
async fn unary<C, B, H, F>(codec: C, request: B, handler: H) -> Response<Body>
where
    C: Codec,
    B: RequestBody,
    H: FnOnce(C::Decode) -> F,
    F: Future<Output = Result<tonic::Response<C::Encode>, Status>>,
{
    let mut handler = Some(handler);
    let service = service_fn(|request: tonic::Request<C::Decode>| {
        let handling = handler.take().map(|handler| handler(request.into_inner()));
        async move {
            match handling {
                Some(handling) => handling.await,
                None => Err(status::of(&Error::Internal("a call was made twice".into()))),
            }
        }
    });
    let mut grpc = Grpc::new(codec).max_decoding_message_size(ANY_SIZE);
    grpc.unary(service, Request::new(request)).await
}

/// The same with generated types.
async fn plain<B, Q, A, H, F>(request: B, handler: H) -> Response<Body>
where
    B: RequestBody,
    Q: prost::Message + Default + Send + 'static,
    A: prost::Message + Send + 'static,
    H: FnOnce(Q) -> F,
    F: Future<Output = Result<A, Error>>,
{
    unary(ProstCodec::<A, Q>::default(), request, |request| {
        let handling = handler(request);
        async move { handling.await.map(tonic::Response::new).map_err(|error| status::of(&error)) }
    })
    .await
}

/// The answer, if there is memory for it on its way out; else the client is asked to come again.
fn within(answers: &Budget, offset: i64, mut pulled: Pulled) -> tonic::Response<Pulled> {
    let bytes = total(messages(&pulled));
    if bytes < COUNTED_BYTES {
        return tonic::Response::new(pulled);
    }
    let Some(held) = answers.take(bytes) else {
        pulled.outcome = PullOutcome::NoNewMessage(Some(RETRY));
        pulled.next_offset = u64::try_from(offset).unwrap_or_default();
        return tonic::Response::new(pulled);
    };
    let mut response = tonic::Response::new(pulled);
    response.extensions_mut().insert(held);
    response
}

fn total(messages: &[Bytes]) -> u64 {
    messages.iter().map(|message| message.len() as u64).sum()
}
