//! The body of an answer: of a single one as it is, of a stream under watch, so that it ends when the node
//! stops, is measured to its end, and cannot panic.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Code, Status};

use super::{Measure, Owed, call::panicked};
use crate::{
    api::{connection::Connection, native::status},
    broker::Error,
};

/// The body of an answer.
pub(in crate::api) struct Outgoing {
    kind: Kind,
    connection: Arc<Connection>,
}

enum Kind {
    /// As it is.
    Plain {
        body: tonic::body::Body,
        /// Memory that it takes, until it has left.
        owed: Option<Arc<Owed>>,
    },
    /// A stream.
    Watched(Box<Watched>),
}

impl Outgoing {
    /// An answer to `connection`, for which room was taken if it is large.
    pub(super) fn plain(
        body: tonic::body::Body,
        connection: Arc<Connection>,
        owed: Option<Arc<Owed>>,
    ) -> Self {
        Self { kind: Kind::Plain { body, owed }, connection }
    }

    /// A stream of answers to `connection`.
    pub(super) fn watched(stream: Watched, connection: Arc<Connection>) -> Self {
        Self { kind: Kind::Watched(Box::new(stream)), connection }
    }
}

/// A stream of answers.
pub(in crate::api) struct Watched {
    inner: tonic::body::Body,
    measure: Measure,
    /// Ends it when the node stops; `None` for streams that end by themselves then.
    stop: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    ended: bool,
}

impl Watched {
    pub(super) fn new(
        inner: tonic::body::Body,
        measure: Measure,
        stop: Option<WaitForCancellationFutureOwned>,
    ) -> Self {
        Self { inner, measure, stop: stop.map(Box::pin), ended: false }
    }

    fn end(&mut self, status: &Status) -> Option<Result<Frame<Bytes>, Status>> {
        self.ended = true;
        self.measure.finish(status.code());
        let mut trailers = HeaderMap::new();
        Some(status.add_header(&mut trailers).map(|()| Frame::trailers(trailers)))
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let inner = &mut self.inner;
        let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(inner).poll_frame(cx)));
        match polled {
            Err(panic) => {
                let status = panicked(&self.measure, &*panic);
                Poll::Ready(self.end(&status))
            }
            Ok(Poll::Pending) => {
                let stopped = self.stop.as_mut().is_some_and(|stop| stop.as_mut().poll(cx).is_ready());
                if stopped {
                    return Poll::Ready(self.end(&status::of(&Error::Stopping)));
                }
                Poll::Pending
            }
            Ok(Poll::Ready(frame)) => {
                match &frame {
                    Some(Ok(frame)) => {
                        if let Some(trailers) = frame.trailers_ref() {
                            let status = Status::from_header_map(trailers);
                            if let Some(status) = status.as_ref().and_then(status::blaming_the_sender) {
                                return Poll::Ready(self.end(&status));
                            }
                            self.measure.finish(status.map_or(Code::Ok, |status| status.code()));
                        }
                    }
                    Some(Err(status)) => self.measure.finish(status.code()),
                    None => self.measure.finish(Code::Ok),
                }
                Poll::Ready(frame)
            }
        }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Status;

    /// The body may be gone long before HTTP/2 has sent its bytes; so they carry themselves what they take.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { kind, connection } = &mut *self;
        let (polled, owed) = match kind {
            Kind::Plain { body, owed } => (Pin::new(body).poll_frame(cx), owed.as_ref()),
            Kind::Watched(watched) => (watched.poll(cx), None),
        };
        polled.map_ok(|frame| frame.map_data(|bytes| connection.outgoing(bytes, owed.cloned())))
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Plain { body, .. } => body.is_end_stream(),
            Kind::Watched(watched) => watched.ended || watched.inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Plain { body, .. } => body.size_hint(),
            Kind::Watched(watched) => watched.inner.size_hint(),
        }
    }
}
