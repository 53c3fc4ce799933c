//! Load by gRPC, the same for every server that speaks it. It uses HTTP/2 directly, so that the client, which shares the
//! machine, takes as little of it as it can.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::poll_fn,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::{Buf as _, Bytes, BytesMut};
use h2::{RecvStream, client::SendRequest};
use holdfast::pb::v1::Durability;
use http::{HeaderMap, Method, Request};
use tokio::{
    net::TcpStream,
    runtime::{Builder, Runtime},
    task::{JoinSet, LocalSet},
};

use crate::{
    Result,
    load::{self, Sample, Span, Tally, Timing},
    process::Server,
    requests::{self, PULL, SEND, SEND_STREAM},
};

/// Frames and windows of the client's side, which decide how the server may answer.
#[derive(Clone, Copy, Debug)]
pub enum Frames {
    /// As tonic's client has them when nobody says anything: 16 KiB.
    Stock,
    /// As our client sets them: 1 MiB.
    Ours,
}

/// How much load, in all.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub frames: Frames,
    /// Threads of this process, each with a connection.
    pub threads: usize,
    /// Calls at once. With streams: sends at once.
    pub in_flight: usize,
    /// Messages in a call.
    pub batch: u32,
}

impl Shape {
    /// The part of one thread, at least one call.
    fn share(&self) -> usize {
        (self.in_flight / self.threads).max(1)
    }
}

/// One connection.
#[derive(Clone)]
pub struct Link {
    requests: SendRequest<Bytes>,
    address: SocketAddr,
}

/// A thread's runtime and connection.
pub struct Thread {
    pub runtime: Runtime,
    pub tasks: LocalSet,
    pub link: Link,
}

impl Thread {
    pub fn connect(address: SocketAddr, frames: Frames) -> Result<Self> {
        let (runtime, tasks) = (Builder::new_current_thread().enable_all().build()?, LocalSet::new());
        let link = runtime.block_on(Link::connect(address, frames))?;
        Ok(Self { runtime, tasks, link })
    }
}

impl Link {
    /// Within a runtime that goes on running.
    pub async fn connect(address: SocketAddr, frames: Frames) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut builder = h2::client::Builder::new();
        match frames {
            Frames::Stock => builder.initial_window_size(2 << 20).initial_connection_window_size(5 << 20),
            Frames::Ours => builder
                .max_frame_size(1 << 20)
                .initial_window_size(16 << 20)
                .initial_connection_window_size(64 << 20),
        };
        let (requests, connection) = builder.handshake(stream).await?;
        tokio::spawn(connection);
        Ok(Self { requests, address })
    }

    fn head(&self, path: &str) -> Result<Request<()>> {
        Ok(Request::builder()
            .method(Method::POST)
            .uri(format!("http://{}{path}", self.address))
            .header("te", "trailers")
            .header("content-type", "application/grpc")
            .header("user-agent", "holdfast-floor")
            .header("grpc-timeout", "60S")
            .body(())?)
    }

    /// A call with one message each way. The answer's bytes are kept when `keep` says so; else only counted.
    async fn call(&mut self, head: &Request<()>, message: Bytes, keep: bool) -> Result<(usize, Bytes)> {
        poll_fn(|context| self.requests.poll_ready(context)).await?;
        let (answer, mut body) = self.requests.send_request(head.clone(), false)?;
        body.send_data(message, true)?;
        let answer = answer.await?;
        check_status(answer.headers())?;
        let mut body = answer.into_body();
        let (mut bytes, mut kept) = (0, BytesMut::new());
        while let Some(chunk) = body.data().await {
            let chunk = chunk?;
            body.flow_control().release_capacity(chunk.len())?;
            bytes += chunk.len();
            if keep {
                kept.extend_from_slice(&chunk);
            }
        }
        check_status(&body.trailers().await?.ok_or("an answer without a status")?)?;
        Ok((bytes, kept.freeze()))
    }

    /// A call whose answer is wanted.
    pub async fn ask(&mut self, path: &str, message: Bytes) -> Result<Bytes> {
        let head = self.head(path)?;
        Ok(self.call(&head, message, true).await?.1)
    }
}

/// Headers of a refused call, or trailers, hold the status.
fn check_status(headers: &HeaderMap) -> Result<()> {
    match headers.get("grpc-status") {
        None => Ok(()),
        Some(status) if status == "0" => Ok(()),
        Some(status) => {
            let text = headers.get("grpc-message").and_then(|text| text.to_str().ok()).unwrap_or_default();
            Err(format!("status {status:?}: {text}").into())
        }
    }
}

/// Runs what the tasks of one thread do and gathers what they count.
fn run<F>(
    thread: &Thread,
    span: Span,
    count: usize,
    task: impl Fn(usize, Rc<RefCell<Tally>>) -> F,
) -> Result<Tally>
where
    F: Future<Output = Result<()>> + 'static,
{
    let tally = Rc::new(RefCell::new(Tally::new(span)?));
    thread.tasks.block_on(&thread.runtime, async {
        let mut running = JoinSet::new();
        for number in 0..count {
            running.spawn_local(task(number, tally.clone()));
        }
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        Ok::<_, crate::Error>(())
    })?;
    Ok(Rc::into_inner(tally).ok_or("a task of the load still runs")?.into_inner())
}

/// Sends, each a call of its own, one after the other in each of the calls in flight.
pub fn send(
    server: &Server,
    topic: &str,
    promise: Durability,
    shape: Shape,
    timing: Timing,
) -> Result<Sample> {
    let message = requests::framed(&requests::send(topic, None, shape.batch, &requests::body()));
    let prepare = |_| {
        let mut thread = Thread::connect(server.address, shape.frames)?;
        let answer = thread.runtime.block_on(thread.link.ask(SEND, message.clone()))?;
        requests::check_sent(&answer, shape.batch, promise)?;
        Ok(thread)
    };
    let work = |thread: Thread, span: Span| {
        let head = thread.link.head(SEND)?;
        run(&thread, span, shape.share(), |_, tally| {
            let (mut link, message, head) = (thread.link.clone(), message.clone(), head.clone());
            async move {
                while !span.is_over() {
                    let begun = Instant::now();
                    link.call(&head, message.clone(), false).await?;
                    tally.borrow_mut().call(begun, shape.batch.into());
                }
                Ok(())
            }
        })
    };
    load::measure(server, shape.threads, timing, prepare, work)
}

/// Sends at a steady `rate` a second, whether or not earlier ones have been answered.
pub fn send_paced(server: &Server, topic: &str, rate: f64, shape: Shape, timing: Timing) -> Result<Sample> {
    let message = requests::framed(&requests::send(topic, None, shape.batch, &requests::body()));
    let threads = u32::try_from(shape.threads)?;
    let pause = Duration::from_secs_f64(f64::from(threads) / rate);
    let prepare = |number| {
        let thread = Thread::connect(server.address, shape.frames)?;
        Ok((thread, pause * u32::try_from(number)? / threads))
    };
    let work = |(thread, shift): (Thread, Duration), span: Span| {
        let head = thread.link.head(SEND)?;
        let (ticks, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
        std::thread::scope(|scope| {
            // A runtime's own timers go by milliseconds, which would make bursts.
            scope.spawn(move || {
                let mut next = Instant::now() + shift;
                while !span.is_over() && ticks.send(()).is_ok() {
                    next += pause;
                    std::thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            });
            let tally = Rc::new(RefCell::new(Tally::new(span)?));
            thread.tasks.block_on(&thread.runtime, async {
                let mut running = JoinSet::new();
                while arrivals.recv().await.is_some() {
                    let (mut link, message, head) = (thread.link.clone(), message.clone(), head.clone());
                    let tally = tally.clone();
                    running.spawn_local(async move {
                        let begun = Instant::now();
                        link.call(&head, message, false).await?;
                        tally.borrow_mut().call(begun, shape.batch.into());
                        Ok::<_, crate::Error>(())
                    });
                    while let Some(ended) = running.try_join_next() {
                        ended??;
                    }
                }
                while let Some(ended) = running.join_next().await {
                    ended??;
                }
                Ok::<_, crate::Error>(())
            })?;
            Ok(Rc::into_inner(tally).ok_or("a task of the load still runs")?.into_inner())
        })
    };
    load::measure(server, shape.threads, timing, prepare, work)
}

/// Sends on `streams` streams for each connection; the calls in flight are shared among them.
pub fn send_stream(
    server: &Server,
    topic: &str,
    streams: usize,
    shape: Shape,
    timing: Timing,
) -> Result<Sample> {
    let message = requests::framed(&requests::stream_send(topic, shape.batch));
    let window = (shape.share() / streams).max(1);
    let prepare = |_| Thread::connect(server.address, shape.frames);
    let work = |thread: Thread, span: Span| {
        let head = thread.link.head(SEND_STREAM)?;
        run(&thread, span, streams, |_, tally| {
            let (mut link, message, head) = (thread.link.clone(), message.clone(), head.clone());
            async move {
                poll_fn(|context| link.requests.poll_ready(context)).await?;
                let (answer, mut out) = link.requests.send_request(head, false)?;
                // The answer's head may come with the first answer only.
                let mut waiting = VecDeque::with_capacity(window);
                for _ in 0..window {
                    waiting.push_back(Instant::now());
                    out.send_data(message.clone(), false)?;
                }
                let answer = answer.await?;
                check_status(answer.headers())?;
                let mut answers = Answers { body: answer.into_body(), buffer: BytesMut::new() };
                while !waiting.is_empty() {
                    let mut answered = 0;
                    for one in answers.next().await? {
                        requests::check_stream_sent(&one)?;
                        let begun = waiting.pop_front().ok_or("an answer to nothing")?;
                        tally.borrow_mut().call(begun, shape.batch.into());
                        answered += 1;
                    }
                    if !span.is_over() {
                        for _ in 0..answered {
                            waiting.push_back(Instant::now());
                            out.send_data(message.clone(), false)?;
                        }
                    }
                }
                out.send_data(Bytes::new(), true)?;
                check_status(&answers.end().await?)
            }
        })
    };
    load::measure(server, shape.threads, timing, prepare, work)
}

/// The messages of a stream of answers.
struct Answers {
    body: RecvStream,
    buffer: BytesMut,
}

impl Answers {
    /// At least one, and all that are there.
    async fn next(&mut self) -> Result<Vec<Bytes>> {
        let mut found = Vec::new();
        while found.is_empty() {
            let chunk = self.body.data().await.ok_or("the server ended the stream")??;
            self.body.flow_control().release_capacity(chunk.len())?;
            self.buffer.extend_from_slice(&chunk);
            while let Some(&[_, a, b, c, d]) = self.buffer.first_chunk() {
                let length = usize::try_from(u32::from_be_bytes([a, b, c, d]))?;
                if self.buffer.len() < 5 + length {
                    break;
                }
                self.buffer.advance(5);
                found.push(self.buffer.split_to(length).freeze());
            }
        }
        Ok(found)
    }

    async fn end(&mut self) -> Result<HeaderMap> {
        while let Some(chunk) = self.body.data().await {
            self.body.flow_control().release_capacity(chunk?.len())?;
        }
        self.body.trailers().await?.ok_or_else(|| "a stream without a status".into())
    }
}

/// Reads `queues` queues of `filled` messages each from start to end, over and over.
pub fn pull(
    server: &Server,
    topic: &str,
    queues: u32,
    filled: u64,
    shape: Shape,
    timing: Timing,
) -> Result<Sample> {
    let prepare = |_| {
        let mut thread = Thread::connect(server.address, shape.frames)?;
        let request = requests::framed(&requests::pull(topic, 0, 0, shape.batch));
        let answer = thread.runtime.block_on(thread.link.ask(PULL, request))?;
        requests::check_pulled(&answer, shape.batch)?;
        Ok(thread)
    };
    let least = usize::try_from(shape.batch)? * requests::BODY_BYTES;
    let work = |thread: Thread, span: Span| {
        let head = thread.link.head(PULL)?;
        run(&thread, span, shape.share(), |number, tally| {
            let (mut link, head, topic) = (thread.link.clone(), head.clone(), topic.to_owned());
            async move {
                let (queue, mut offset) = (u32::try_from(number)? % queues, 0);
                while !span.is_over() {
                    let request = requests::framed(&requests::pull(&topic, queue, offset, shape.batch));
                    let begun = Instant::now();
                    let (bytes, _) = link.call(&head, request, false).await?;
                    if bytes < least {
                        return Err(format!("a pull at {offset} brought {bytes} bytes").into());
                    }
                    tally.borrow_mut().call(begun, shape.batch.into());
                    offset += u64::from(shape.batch);
                    if offset + u64::from(shape.batch) > filled {
                        offset = 0;
                    }
                }
                Ok(())
            }
        })
    };
    load::measure(server, shape.threads, timing, prepare, work)
}

/// One message at a time to one queue, for which a pull on a connection of its own is waiting.
pub fn round_trip(server: &Server, topic: &str, timing: Timing) -> Result<Sample> {
    const QUEUE: u32 = 0;
    /// How long a pull waits.
    const WAIT: Duration = Duration::from_secs(20);
    let request = requests::framed(&requests::send(topic, Some(QUEUE), 1, &requests::body()));
    let prepare = |_| {
        let thread = Thread::connect(server.address, Frames::Ours)?;
        let mut reader = thread.runtime.block_on(Link::connect(server.address, Frames::Ours))?;
        // Where the queue ends, in the answer to a first message.
        let mut link = thread.link.clone();
        let sent = thread.runtime.block_on(link.ask(SEND, request.clone()))?;
        let next = requests::first_offset(&sent)? + 1;
        let head = reader.head(PULL)?;
        poll_fn_ready(&thread, &mut reader)?;
        Ok((thread, reader, head, next))
    };
    let work = |(thread, mut reader, pull_head, mut next): (Thread, Link, Request<()>, u64), span: Span| {
        let mut tally = Tally::new(span)?;
        let send_head = thread.link.head(SEND)?;
        let mut sender = thread.link.clone();
        thread.tasks.block_on(&thread.runtime, async {
            while !span.is_over() {
                let waiting = requests::framed(&requests::waiting_pull(topic, QUEUE, next, WAIT));
                // The pull first; a moment for the broker to hold it.
                let arrival = async {
                    let answer = reader.call(&pull_head, waiting, true).await?.1;
                    let arrived = Instant::now();
                    requests::check_pulled(&answer, 1)?;
                    Ok::<_, crate::Error>(arrived)
                };
                let sending = async {
                    tokio::time::sleep(Duration::from_micros(500)).await;
                    let begun = Instant::now();
                    sender.call(&send_head, request.clone(), false).await?;
                    tally.call(begun, 1);
                    Ok::<_, crate::Error>(begun)
                };
                let (arrived, begun) = tokio::try_join!(arrival, sending)?;
                tally.delivery(begun, arrived);
                next += 1;
            }
            Ok::<_, crate::Error>(())
        })?;
        Ok(tally)
    };
    load::measure(server, 1, timing, prepare, work)
}

/// Waits until the connection has said hello, so that the first call does not pay for it.
fn poll_fn_ready(thread: &Thread, link: &mut Link) -> Result<()> {
    Ok(thread.runtime.block_on(poll_fn(|context| link.requests.poll_ready(context)))?)
}
