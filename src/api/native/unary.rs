//! Calls with one request and one answer, without a layer in between: the body of the request is handed on
//! as it came, the answer leaves in one buffer of its size, and a call that waits keeps neither.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, header::CONTENT_TYPE};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt;
use tonic::{Status, body::Body};

use super::status;
use crate::broker::Error;

/// Bytes before each message: a flag and the length.
const PREFIX: usize = 5;
/// Room for a request that comes in several pieces, at most, before its bytes are there.
const TRUSTED_BYTES: usize = 1024 * 1024;

/// Answers leave in pieces of this size at most, so that a slow client is seen to move on.
const PIECE_BYTES: usize = 256 * 1024;

/// What requests come as; their framing has been checked.
pub(in crate::api) trait RequestBody:
    HttpBody<Data = Bytes, Error = Status> + Unpin + Send + 'static
{
}

impl<B: HttpBody<Data = Bytes, Error = Status> + Unpin + Send + 'static> RequestBody for B {}

/// A message that can be written.
pub(super) trait Answer {
    /// Its exact length.
    fn length(&self) -> usize;

    /// Appends it.
    fn write(&self, to: &mut BytesMut);
}

/// The message of a request.
pub(super) async fn read<B: RequestBody>(mut body: B) -> Result<Bytes, Status> {
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if first.is_empty() {
            first = data;
            continue;
        }
        if rest.is_empty() {
            let whole =
                first.get(1..PREFIX).and_then(|length| length.try_into().ok()).map(u32::from_be_bytes);
            let whole = usize::try_from(whole.unwrap_or(0)).unwrap_or(0).saturating_add(PREFIX);
            rest.reserve(whole.min(TRUSTED_BYTES));
            rest.extend_from_slice(&first);
        }
        rest.extend_from_slice(&data);
    }
    let mut whole = if rest.is_empty() { first } else { rest.freeze() };
    if whole.len() < PREFIX {
        return Err(status::of(&Error::Internal("a request without a message passed".into())));
    }
    Ok(whole.split_off(PREFIX))
}

/// The answer to a call, or why there is none.
pub(super) fn respond<A: Answer>(outcome: Result<A, Status>) -> Response<Body> {
    match outcome.and_then(|answer| framed(&answer)) {
        Ok(bytes) => {
            let mut response = Response::new(Body::new(OneAnswer { bytes: Some(bytes), ended: false }));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            response
        }
        Err(status) => status.into_http(),
    }
}

fn framed(answer: &impl Answer) -> Result<Bytes, Status> {
    let length = answer.length();
    let Ok(prefix) = u32::try_from(length) else {
        return Err(status::of(&Error::Internal(format!("an answer of {length} bytes"))));
    };
    let mut bytes = BytesMut::with_capacity(length.saturating_add(PREFIX));
    bytes.put_u8(0);
    bytes.put_u32(prefix);
    answer.write(&mut bytes);
    Ok(bytes.freeze())
}

/// One message, then the status that says that all is well.
struct OneAnswer {
    bytes: Option<Bytes>,
    ended: bool,
}

impl HttpBody for OneAnswer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(mut bytes) = self.bytes.take() {
            if bytes.len() > PIECE_BYTES {
                self.bytes = Some(bytes.split_off(PIECE_BYTES));
            }
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        if std::mem::replace(&mut self.ended, true) {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::StreamBody;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_message_is_read_however_it_is_cut(message: Vec<u8>, piece in 1_usize..40) {
            let mut bytes = vec![0];
            bytes.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
            bytes.extend(&message);
            let pieces: Vec<Result<_, Status>> = bytes
                .chunks(piece)
                .map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece))))
                .collect();
            let body = StreamBody::new(futures_util::stream::iter(pieces));
            let read = futures_util::FutureExt::now_or_never(read(body)).unwrap().unwrap();
            prop_assert_eq!(read, message);
        }
    }
}
