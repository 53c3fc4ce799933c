//! Sending with many batches in flight.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    task::JoinHandle,
};
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::{Batch, Code, Connection, Error, Sent, send::checked};
use crate::pb::v1 as pb;

/// How much may be on its way before [`SendStream::send`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Batches.
    pub batches: usize,
    /// Bytes; a single batch that is larger goes alone.
    pub bytes: usize,
}

impl Default for Window {
    /// 64 batches, 16 MiB.
    fn default() -> Self {
        Self { batches: 64, bytes: 16 << 20 }
    }
}

/// A stream of batches, stored and answered in the order in which they were handed over.
///
/// A batch that is refused gets its error and the stream goes on, so later ones may be stored. When the stream
/// itself breaks, everything on its way gets that error and so does every later call: open another one, and
/// decide what to send again.
#[derive(Debug)]
pub struct SendStream {
    /// Unbounded, yet never longer than the window.
    outbound: mpsc::UnboundedSender<pb::SendStreamRequest>,
    shared: Arc<Shared>,
    reader: JoinHandle<()>,
    window_bytes: u32,
    next: u64,
}

/// The answer to one batch, still to come. Dropping it gives up the answer, not the batch.
#[derive(Debug)]
pub struct Answer {
    receiver: oneshot::Receiver<Result<Sent, Error>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    batches: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

#[derive(Debug)]
struct State {
    waiting: BTreeMap<u64, Waiting>,
    /// Why the stream is over.
    ended: Option<Error>,
}

#[derive(Debug)]
struct Waiting {
    answer: oneshot::Sender<Result<Sent, Error>>,
    messages: usize,
    /// Room in the window, given back when the answer is here.
    _room: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

impl Connection {
    /// Opens a stream. That it cannot be opened is told by the first answer.
    pub fn send_stream(&self, window: Window) -> SendStream {
        let window_bytes = u32::try_from(window.bytes.clamp(1, Semaphore::MAX_PERMITS)).unwrap_or(u32::MAX);
        let shared = Arc::new(Shared {
            state: Mutex::new(State { waiting: BTreeMap::new(), ended: None }),
            batches: Arc::new(Semaphore::new(window.batches.clamp(1, Semaphore::MAX_PERMITS))),
            bytes: Arc::new(Semaphore::new(usize::try_from(window_bytes).unwrap_or(usize::MAX))),
        });
        let (outbound, requests) = mpsc::unbounded_channel();
        let reader = tokio::spawn(read_answers(self.clone(), requests, shared.clone()));
        SendStream { outbound, shared, reader, window_bytes, next: 0 }
    }
}

impl SendStream {
    /// Waits for room in the window, then hands the batch over. Fails when the stream is over.
    pub async fn send(&mut self, batch: Batch) -> Result<Answer, Error> {
        let size = self.size(&batch);
        let batches = self.shared.batches.clone().acquire_owned().await.map_err(|_| self.why_ended())?;
        let bytes = self.shared.bytes.clone().acquire_many_owned(size).await.map_err(|_| self.why_ended())?;
        // No waiting from here on: the batch is handed over whole or not at all.
        let (answer, receiver) = oneshot::channel();
        let messages = batch.messages.len();
        let correlation = self.next;
        self.next += 1;
        {
            let mut state = self.shared.state.lock();
            if let Some(error) = &state.ended {
                return Err(error.clone());
            }
            state.waiting.insert(correlation, Waiting { answer, messages, _room: (batches, bytes) });
        }
        let request = pb::SendStreamRequest { correlation, send: Some(batch.into_pb()) };
        // Nobody to take it: then the reader is about to end the stream and to answer this batch, too.
        let _ = self.outbound.send(request);
        Ok(Answer { receiver })
    }

    /// Waits until [`Self::send`] would not have to wait for room for `batch`. Only one caller sends, so the room
    /// stays.
    pub async fn ready(&mut self, batch: &Batch) -> Result<(), Error> {
        let size = self.size(batch);
        drop(self.shared.batches.acquire().await.map_err(|_| self.why_ended())?);
        drop(self.shared.bytes.acquire_many(size).await.map_err(|_| self.why_ended())?);
        Ok(())
    }

    /// How many batches have no answer yet.
    pub fn in_flight(&self) -> usize {
        self.shared.state.lock().waiting.len()
    }

    /// Says that no more will come and waits until everything is answered.
    pub async fn finish(self) {
        drop(self.outbound);
        // The reader does not panic; if it did, every answer says that the stream ended.
        let _ = self.reader.await;
    }

    /// Room that a batch takes in the window.
    fn size(&self, batch: &Batch) -> u32 {
        u32::try_from(batch.encoded_len()).unwrap_or(u32::MAX).clamp(1, self.window_bytes)
    }

    fn why_ended(&self) -> Error {
        self.shared.state.lock().ended.clone().unwrap_or_else(ended)
    }
}

impl Future for Answer {
    type Output = Result<Sent, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver).poll(context).map(|answer| answer.unwrap_or_else(|_| Err(ended())))
    }
}

/// Opens the stream and hands out answers until it is over.
async fn read_answers(
    connection: Connection,
    requests: mpsc::UnboundedReceiver<pb::SendStreamRequest>,
    shared: Arc<Shared>,
) {
    let error = match connection.broker().send_stream(UnboundedReceiverStream::new(requests)).await {
        Err(status) => connection.error(&status),
        Ok(response) => {
            let mut answers = response.into_inner();
            loop {
                match answers.message().await {
                    Ok(Some(answer)) => shared.answer(answer),
                    Ok(None) => break ended(),
                    Err(status) => break connection.error(&status),
                }
            }
        }
    };
    shared.end(&error);
}

impl Shared {
    fn answer(&self, answer: pb::SendStreamResponse) {
        // An answer to nothing is not ours to judge; what waits gets its own answer or the stream's end.
        let Some(waiting) = self.state.lock().waiting.remove(&answer.correlation) else { return };
        let result = match answer.outcome {
            Some(pb::send_stream_response::Outcome::Sent(sent)) => checked(sent.into(), waiting.messages),
            Some(pb::send_stream_response::Outcome::Error(error)) => Err(Error::of_call(error)),
            None => Err(Error::new(Code::Internal, "the broker answered a batch without an outcome")),
        };
        let _ = waiting.answer.send(result);
    }

    fn end(&self, error: &Error) {
        let waiting = {
            let mut state = self.state.lock();
            state.ended = Some(error.clone());
            std::mem::take(&mut state.waiting)
        };
        self.batches.close();
        self.bytes.close();
        for waiting in waiting.into_values() {
            let _ = waiting.answer.send(Err(error.clone()));
        }
    }
}

fn ended() -> Error {
    Error::new(Code::Unavailable, "the broker ended the stream; what was on its way may have been stored")
}

#[cfg(test)]
mod tests;
