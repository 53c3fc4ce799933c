//! A stream of sends: requests take their place in the log as they arrive, and are answered in that order.
//!
//! One queue of tickets and no task a request: whoever polls the answers reads what has arrived, then takes
//! the answers that are ready from the front. So answers of one group commit leave together, and a client
//! that does not read its answers is not read on.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
};

use tokio_stream::Stream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Status;

use super::{
    codec::{StreamAnswer, StreamFrame},
    status,
};
use crate::broker::{Broker, Error, SendTicket, Sent};

/// How much of one stream may wait for its answers.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct StreamLimits {
    pub(in crate::api) requests: usize,
    pub(in crate::api) bytes: usize,
}

/// A stream that is always busy looks this seldom whether the node stops.
const TURNS_BETWEEN_LOOKS: u32 = 64;

/// The answers to a stream of requests.
pub(super) struct Answers<S> {
    broker: Broker,
    requests: S,
    limits: StreamLimits,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    turns: u32,
    /// Set when nothing more is read: how the stream ends once everything is answered.
    end: Option<Result<(), Status>>,
}

/// A request that is not answered yet.
struct Waiting {
    correlation: u64,
    bytes: usize,
    state: State,
}

enum State {
    Appended(SendTicket),
    Refused(Error),
}

impl<S> Answers<S> {
    pub(super) fn new(
        broker: Broker,
        requests: S,
        limits: StreamLimits,
        stop: WaitForCancellationFutureOwned,
    ) -> Self {
        Self {
            broker,
            requests,
            limits,
            stop: Box::pin(stop),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            turns: 0,
            end: None,
        }
    }

    /// Reads no more once the node stops; what has been read is still answered.
    fn look_for_stop(&mut self, cx: &mut Context<'_>) {
        if self.end.is_none() && self.stop.as_mut().poll(cx).is_ready() {
            self.end = Some(Err(status::of(&Error::Stopping)));
        }
    }

    fn begin(&mut self, frame: StreamFrame) {
        let state = match frame.send.and_then(|command| self.broker.begin_send(command)) {
            Ok(ticket) => State::Appended(ticket),
            Err(error) => State::Refused(error),
        };
        self.waiting_bytes = self.waiting_bytes.saturating_add(frame.bytes);
        self.waiting.push_back(Waiting { correlation: frame.correlation, bytes: frame.bytes, state });
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < self.limits.requests && self.waiting_bytes < self.limits.bytes
    }

    /// The answer at the front, when it is there.
    fn answer(&mut self, cx: &mut Context<'_>) -> Poll<Option<StreamAnswer>> {
        let Some(first) = self.waiting.front_mut() else { return Poll::Ready(None) };
        let outcome: Result<Sent, Error> = match &mut first.state {
            State::Refused(error) => Err(error.clone()),
            State::Appended(ticket) => match Pin::new(ticket).poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(outcome) => outcome,
            },
        };
        let correlation = first.correlation;
        self.waiting_bytes = self.waiting_bytes.saturating_sub(first.bytes);
        self.waiting.pop_front();
        Poll::Ready(Some(StreamAnswer { correlation, outcome }))
    }
}

impl<S: Stream<Item = Result<StreamFrame, Status>> + Unpin> Stream for Answers<S> {
    type Item = Result<StreamAnswer, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.turns = this.turns.wrapping_add(1);
        if this.turns.is_multiple_of(TURNS_BETWEEN_LOOKS) {
            this.look_for_stop(cx);
        }
        while this.end.is_none() && this.has_room() {
            match Pin::new(&mut this.requests).poll_next(cx) {
                Poll::Ready(Some(Ok(frame))) => this.begin(frame),
                Poll::Ready(Some(Err(status))) => this.end = Some(Err(status)),
                Poll::Ready(None) => this.end = Some(Ok(())),
                Poll::Pending => break,
            }
        }
        match this.answer(cx) {
            Poll::Ready(Some(answer)) => return Poll::Ready(Some(Ok(answer))),
            Poll::Ready(None) => {}
            Poll::Pending => {
                this.look_for_stop(cx);
                return Poll::Pending;
            }
        }
        this.look_for_stop(cx);
        match this.end.as_mut() {
            None => Poll::Pending,
            Some(end) => Poll::Ready(std::mem::replace(end, Ok(())).err().map(Err)),
        }
    }
}
