//! Checks the gRPC framing of a request as it arrives: each message within its limit, none of them cut off,
//! one of them where one is due, all of them within the memory that arriving requests may take. So whatever
//! reads it further on sees whole messages only.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::time::{Sleep, sleep};
use tonic::Status;

use super::{Budget, Held, timeout::too_late};
use crate::{
    api::native::status,
    broker::Error,
    model::{Invalid, MAX_BATCH_BYTES},
};

/// Bytes before each message: a flag and the length.
const PREFIX: usize = 5;

/// What a request may look like.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Limits {
    /// Most bytes of one message.
    pub(in crate::api) message: usize,
    /// Whether there may be any number of messages; else there is one.
    pub(in crate::api) stream: bool,
}

/// A request body under watch.
#[derive(Debug)]
pub(in crate::api) struct Framed<B> {
    inner: B,
    limits: Limits,
    deadline: Option<Instant>,
    /// How long a message may take to arrive, and when the one that is arriving is late.
    within: Duration,
    late: Option<Pin<Box<Sleep>>>,
    held: Held,
    /// Bytes that have arrived, of all messages (unary) or of the one that is arriving (stream).
    bytes: u64,
    prefix: [u8; PREFIX],
    /// Of `prefix` have arrived.
    prefix_bytes: usize,
    /// Bytes missing of the message that is arriving.
    missing: usize,
    messages: u64,
    ended: bool,
}

impl<B> Framed<B> {
    pub(in crate::api) fn new(
        inner: B,
        limits: Limits,
        budget: &Budget,
        deadline: Option<Instant>,
        within: Duration,
    ) -> Self {
        Self {
            inner,
            limits,
            deadline,
            within,
            late: None,
            held: budget.nothing(),
            bytes: 0,
            prefix: [0; PREFIX],
            prefix_bytes: 0,
            missing: 0,
            messages: 0,
            ended: false,
        }
    }

    fn take(&mut self, mut data: &[u8]) -> Result<(), Status> {
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(too_late());
        }
        self.bytes = self.bytes.saturating_add(data.len() as u64);
        loop {
            if self.missing > 0 {
                let (_, rest) = data.split_at(self.missing.min(data.len()));
                self.missing = self.missing.saturating_sub(data.len());
                data = rest;
                if self.missing > 0 {
                    break;
                }
                if self.limits.stream {
                    self.bytes = data.len() as u64;
                }
            }
            let Some((&byte, rest)) = data.split_first() else { break };
            data = rest;
            if let Some(place) = self.prefix.get_mut(self.prefix_bytes) {
                *place = byte;
            }
            self.prefix_bytes += 1;
            if self.prefix_bytes == PREFIX {
                self.prefix_bytes = 0;
                self.begin()?;
            }
        }
        if !self.held.set(self.bytes) {
            return Err(status::of(&self.held.budget().full()));
        }
        Ok(())
    }

    /// A prefix is complete.
    fn begin(&mut self) -> Result<(), Status> {
        let [flag, length @ ..] = self.prefix;
        match flag {
            0 => {}
            1 => {
                return Err(Status::unimplemented("compression is not supported; send messages as they are"));
            }
            _ => return Err(malformed("its compression flag is neither 0 nor 1")),
        }
        self.messages = self.messages.saturating_add(1);
        if self.limits.stream {
            self.late = None;
        }
        if self.messages > 1 && !self.limits.stream {
            return Err(malformed("there is more than one, and the call takes one"));
        }
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if length > self.limits.message {
            return Err(status::of(&too_large(length, self.limits.message)));
        }
        self.missing = length;
        Ok(())
    }

    fn end(&mut self) -> Result<(), Status> {
        self.ended = true;
        if self.missing > 0 || self.prefix_bytes > 0 {
            return Err(malformed("it ends too early"));
        }
        if self.messages == 0 && !self.limits.stream {
            return Err(malformed("there is none"));
        }
        Ok(())
    }
}

impl<B> Framed<B> {
    /// Ready when the message that is arriving takes too long. A stream may pause between two messages.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let arriving = self.missing > 0 || self.prefix_bytes > 0 || !self.limits.stream;
        if !arriving {
            self.late = None;
            return Poll::Pending;
        }
        let late = self.late.get_or_insert_with(|| Box::pin(sleep(self.within)));
        late.as_mut().poll(cx).map(|()| status::of(&Error::RequestTimeout { after: self.within }))
    }
}

fn too_large(length: usize, limit: usize) -> Error {
    if limit > MAX_BATCH_BYTES {
        return Error::BatchTooLarge { unit: "bytes", seen: length, limit: MAX_BATCH_BYTES };
    }
    Error::Invalid(Invalid::new(
        "request",
        format!("has {length} bytes, over the limit of {limit}; ask for less in one call"),
    ))
}

fn malformed(problem: &str) -> Status {
    status::of(&Error::Invalid(Invalid::new("request", format!("is not a gRPC message: {problem}"))))
}

impl<B> Body for Framed<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let Poll::Ready(arrived) = Pin::new(&mut self.inner).poll_frame(cx) else {
            let late = ready!(self.poll_late(cx));
            self.ended = true;
            return Poll::Ready(Some(Err(late)));
        };
        let checked = match arrived {
            Some(Ok(frame)) => {
                let checked = match frame.data_ref() {
                    Some(data) => self.take(data),
                    None => self.end(),
                };
                checked.map(|()| Some(frame))
            }
            Some(Err(error)) => {
                Err(Status::unavailable(format!("the connection ended before the request did: {error}")))
            }
            None => self.end().map(|()| None),
        };
        if checked.is_err() {
            self.ended = true;
        }
        Poll::Ready(checked.transpose())
    }

    /// Never before [`Framed::end`] has looked.
    fn is_end_stream(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use http_body_util::{BodyStream, StreamBody};
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;
    use crate::api::metrics::Level;

    fn message(length: usize) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend(u32::try_from(length).unwrap().to_be_bytes());
        bytes.resize(PREFIX + length, 7);
        bytes
    }

    /// Feeds `bytes` in pieces; how many came through, and what the budget says at the end.
    fn feed(bytes: &[u8], piece: usize, limits: Limits, budget: u64) -> (Result<usize, Code>, u64) {
        let level = Level::default();
        let pieces: Vec<Result<Frame<Bytes>, Status>> =
            bytes.chunks(piece).map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece)))).collect();
        let inner = StreamBody::new(futures_util::stream::iter(pieces));
        let framed = Framed::new(
            inner,
            limits,
            &Budget::new(level.clone(), budget, Level::default()),
            None,
            Duration::MAX,
        );
        let mut framed = BodyStream::new(framed);
        let read = futures_util::FutureExt::now_or_never(async {
            let mut seen = 0;
            while let Some(frame) = framed.next().await {
                seen += frame.map_err(|status| status.code())?.into_data().unwrap().len();
            }
            Ok(seen)
        });
        let held = level.get();
        drop(framed);
        assert_eq!(level.get(), 0, "everything is given back");
        (read.unwrap(), held)
    }

    const ONE: Limits = Limits { message: 100, stream: false };
    const MANY: Limits = Limits { message: 100, stream: true };

    #[test]
    fn a_message_passes_however_it_is_cut() {
        for piece in 1..110 {
            assert_eq!(feed(&message(100), piece, ONE, 1000), (Ok(105), 105), "{piece}");
            assert_eq!(feed(&message(0), piece, ONE, 1000), (Ok(5), 5), "{piece}");
        }
    }

    #[test]
    fn a_request_that_is_not_one_message_is_a_client_error() {
        let two = [message(3), message(3)].concat();
        for bad in [&[][..], &[0, 0], &message(9)[..10], &two, &[9, 0, 0, 0, 0]] {
            for piece in 1..16 {
                assert_eq!(feed(bad, piece, ONE, 1000).0, Err(Code::InvalidArgument), "{bad:?}");
            }
        }
        assert_eq!(feed(&[1, 0, 0, 0, 0], 9, ONE, 1000).0, Err(Code::Unimplemented), "compressed");
        assert_eq!(feed(&message(101), 9, ONE, 1000).0, Err(Code::InvalidArgument), "too long");
    }

    #[test]
    fn requests_that_do_not_fit_into_memory_are_refused() {
        assert_eq!(feed(&message(100), 10, ONE, 99).0, Err(Code::ResourceExhausted));
        let stream = [message(90), message(90), message(90)].concat();
        assert_eq!(feed(&stream, 10, MANY, 110).0, Ok(285), "a stream holds one message at a time");
    }

    #[test]
    fn a_stream_may_be_empty_but_not_cut_off() {
        assert_eq!(feed(&[], 1, MANY, 100).0, Ok(0));
        assert_eq!(feed(&[message(2), vec![0]].concat(), 3, MANY, 100).0, Err(Code::InvalidArgument));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, piece in 1_usize..50, stream: bool) {
            let _ = feed(&bytes, piece, Limits { message: 100, stream }, 1000);
        }

        #[test]
        fn a_stream_of_messages_passes(
            lengths in proptest::collection::vec(0_usize..100, 0..20),
            piece in 1_usize..300,
        ) {
            let bytes = lengths.iter().flat_map(|&length| message(length)).collect::<Vec<_>>();
            prop_assert_eq!(feed(&bytes, piece, MANY, 1000).0, Ok(bytes.len()));
        }
    }
}
