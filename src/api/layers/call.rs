//! One running call: whatever its handler does, it ends in an answer and is measured once.

use std::{
    any::Any,
    convert::Infallible,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use http::Response;
use tokio::time::{Sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, body::Body};

use super::{Outgoing, Owed, outgoing::Watched, timeout::too_late};
use crate::{
    api::{connection::Connection, metrics::Metrics, native::status},
    broker::Error,
};

/// What a handler makes.
pub(in crate::api) type Handling = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Counts a call as running, and records it when it ends. Dropped before: the client has gone.
pub(in crate::api) struct Measure {
    metrics: Arc<Metrics>,
    method: usize,
    begun: Instant,
    finished: bool,
}

impl Measure {
    pub(in crate::api) fn begin(metrics: &Arc<Metrics>, method: usize) -> Self {
        metrics.calls.add(1);
        Self { metrics: Arc::clone(metrics), method, begun: Instant::now(), finished: false }
    }

    /// When the call came.
    pub(in crate::api) fn begun(&self) -> Instant {
        self.begun
    }

    pub(super) fn finish(&mut self, code: Code) {
        if self.finished {
            return;
        }
        self.finished = true;
        self.metrics.calls.subtract(1);
        self.metrics.call(self.method, code.into(), self.begun.elapsed());
    }
}

impl Drop for Measure {
    fn drop(&mut self) {
        self.finish(Code::Cancelled);
    }
}

/// What becomes of a call.
enum Ending {
    /// Its handler makes an answer that is then sent.
    Handler(Handling),
    /// Its answer was known at once.
    Known(Box<Response<Body>>),
    Over,
}

/// A running call.
pub(in crate::api) struct Call {
    ending: Ending,
    measure: Option<Measure>,
    connection: Arc<Connection>,
    /// When to give up; not set where the handler does so itself.
    deadline: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
    /// For answers that are streams.
    stream: Option<StopRule>,
}

/// How a stream of answers ends when the node stops.
#[derive(Clone, Debug)]
pub(in crate::api) enum StopRule {
    /// By itself, when its last answer is out.
    Itself,
    /// By the token.
    At(CancellationToken),
}

impl Call {
    /// A call that `handling` answers by `deadline`.
    pub(in crate::api) fn new(
        handling: Handling,
        measure: Measure,
        connection: Arc<Connection>,
        deadline: Option<Instant>,
        stream: Option<StopRule>,
    ) -> Self {
        let ending = Ending::Handler(handling);
        Self { ending, measure: Some(measure), connection, deadline, timer: None, stream }
    }

    /// A call that is answered at once.
    pub(in crate::api) fn answered(
        response: Response<Body>,
        measure: Measure,
        connection: Arc<Connection>,
    ) -> Self {
        let ending = Ending::Known(Box::new(response));
        Self { ending, measure: Some(measure), connection, deadline: None, timer: None, stream: None }
    }

    fn poll_handler(&mut self, cx: &mut Context<'_>) -> Poll<Response<Body>> {
        let Ending::Handler(handling) = &mut self.ending else {
            return match std::mem::replace(&mut self.ending, Ending::Over) {
                Ending::Known(response) => Poll::Ready(*response),
                Ending::Handler(_) | Ending::Over => Poll::Pending,
            };
        };
        match catch_unwind(AssertUnwindSafe(|| handling.as_mut().poll(cx))) {
            Ok(Poll::Ready(response)) => Poll::Ready(response),
            Ok(Poll::Pending) => {
                let Some(deadline) = self.deadline else { return Poll::Pending };
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline.into())));
                timer.as_mut().poll(cx).map(|()| too_late().into_http())
            }
            Err(panic) => Poll::Ready(match &self.measure {
                Some(measure) => panicked(measure, &*panic).into_http(),
                None => Status::internal("internal error").into_http(),
            }),
        }
    }
}

impl Future for Call {
    type Output = Result<Response<Outgoing>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(mut response) = self.poll_handler(cx) else { return Poll::Pending };
        self.ending = Ending::Over;
        self.timer = None;
        let Some(mut measure) = self.measure.take() else { return Poll::Pending };
        let owed = response.extensions_mut().remove::<Arc<Owed>>();
        let connection = Arc::clone(&self.connection);
        let mut code = code(&response);
        if code == Code::Internal
            && let Some(status) = Status::from_header_map(response.headers())
            && let Some(status) = status::blaming_the_sender(&status)
        {
            code = status.code();
            response = status.into_http();
        }
        let response = match self.stream.take() {
            Some(rule) if code == Code::Ok => {
                let stop = match rule {
                    StopRule::Itself => None,
                    StopRule::At(stop) => Some(stop.cancelled_owned()),
                };
                response.map(|body| Outgoing::watched(Watched::new(body, measure, stop), connection))
            }
            _ => {
                measure.finish(code);
                response.map(|body| Outgoing::plain(body, connection, owed))
            }
        };
        Poll::Ready(Ok(response))
    }
}

/// How a call ended, as far as its head says; a stream may still fail.
fn code(response: &Response<Body>) -> Code {
    if let Some(status) = response.extensions().get::<Status>() {
        return status.code();
    }
    Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code())
}

/// Counts and logs a caught panic, and makes the answer of it.
pub(super) fn panicked(measure: &Measure, panic: &(dyn Any + Send)) -> Status {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text");
    measure.metrics.panics.add(1, &[]);
    tracing::error!(method = measure.metrics.name(measure.method), panic = text, "a handler panicked");
    status::of(&Error::Internal("the handler of this call panicked".into()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt;
    use opentelemetry::metrics::MeterProvider;
    use opentelemetry_sdk::metrics::SdkMeterProvider;
    use tonic_types::StatusExt;

    use super::*;

    fn call(handling: Handling, deadline: Option<Instant>, stream: Option<StopRule>) -> (Arc<Metrics>, Call) {
        let metrics = Arc::new(Metrics::new(&SdkMeterProvider::default().meter("test")));
        let measure = Measure::begin(&metrics, 0);
        let connection = Connection::new(1, &metrics);
        (metrics, Call::new(handling, measure, connection, deadline, stream))
    }

    /// A stream of answers that panics when it is read.
    struct Panicking;

    impl http_body::Body for Panicking {
        type Data = bytes::Bytes;
        type Error = Status;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, Status>>> {
            panic!("answer")
        }
    }

    #[tokio::test]
    async fn a_panic_of_a_handler_is_an_internal_error() {
        let (metrics, call) = call(Box::pin(async { panic!("handler") }), None, None);
        let Ok(response) = call.await;
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::Internal);
        assert_eq!(status.get_error_details().error_info().unwrap().reason, "INTERNAL");
        assert_eq!(metrics.calls.get(), 0);
    }

    #[tokio::test]
    async fn a_panic_of_a_stream_ends_it_with_an_internal_error() {
        let handling = Box::pin(async { Response::new(Body::new(Panicking)) });
        let (metrics, call) = call(handling, None, Some(StopRule::Itself));
        let Ok(response) = call.await;
        assert_eq!(metrics.calls.get(), 1, "a stream runs until it ends");
        let trailers = response.into_body().collect().await.unwrap().trailers().cloned().unwrap();
        assert_eq!(Status::from_header_map(&trailers).unwrap().code(), Code::Internal);
        assert_eq!(metrics.calls.get(), 0);
    }

    #[tokio::test]
    async fn a_handler_that_is_not_done_at_the_deadline_is_given_up() {
        let deadline = Instant::now() + Duration::from_millis(5);
        let (_, call) = call(Box::pin(std::future::pending()), Some(deadline), None);
        let Ok(response) = call.await;
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::DeadlineExceeded);
    }

    #[tokio::test]
    async fn a_stream_that_says_nothing_ends_at_the_stop() {
        let stop = CancellationToken::new();
        let endless = http_body_util::StreamBody::new(futures_util::stream::pending::<
            Result<http_body::Frame<bytes::Bytes>, Status>,
        >());
        let handling = Box::pin(async { Response::new(Body::new(endless)) });
        let (_, call) = call(handling, None, Some(StopRule::At(stop.clone())));
        let Ok(response) = call.await;
        stop.cancel();
        let trailers = response.into_body().collect().await.unwrap().trailers().cloned().unwrap();
        assert_eq!(Status::from_header_map(&trailers).unwrap().code(), Code::Unavailable);
    }
}
