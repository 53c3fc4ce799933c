//! One connection: what it owes its client, and why it ends.
//!
//! Answers that a client does not read stay with the broker. So every byte of an answer is counted against its
//! connection until HTTP/2 has let go of it, and a connection that is owed something and takes nothing for too long
//! is closed.

use std::{
    error::Error as _,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    select,
    time::{Sleep, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::task_tracker::TaskTrackerToken};

use super::{
    door::{Door, House},
    layers::Owed,
    metrics::{Level, Metrics, Reasons},
    socket::Socket,
};

/// How long a client that is turned away may take to hear why.
const TURNING_AWAY: Duration = Duration::from_secs(1);

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The client closed it, or it broke.
    Client,
    /// The node stops, and the client has taken leave.
    Stop,
    /// The client did not begin to speak HTTP/2 in time.
    Handshake,
    /// The client did not answer a ping in time.
    Keepalive,
    /// The client did not read its answers.
    SlowReader,
    /// What the client sent is not HTTP/2.
    Protocol,
    /// The node stopped, and the client had not taken leave.
    Cut,
}

impl Ended {
    /// All names, in the order of the variants.
    pub(super) const NAMES: [&'static str; 7] = [
        "client",
        "stop",
        "handshake_timeout",
        "keepalive_timeout",
        "slow_reader",
        "protocol_error",
        "cut_at_stop",
    ];

    fn of(error: &hyper::Error) -> Self {
        if error.is_timeout() {
            return Self::Keepalive;
        }
        let mut cause = error.source();
        while let Some(error) = cause {
            if let Some(error) = error.downcast_ref::<io::Error>() {
                // The system's own timeout has a number.
                let ours = error.kind() == io::ErrorKind::TimedOut && error.raw_os_error().is_none();
                return if ours { Self::Handshake } else { Self::Client };
            }
            cause = error.source();
        }
        Self::Protocol
    }
}

/// Why a connection was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnedAway {
    /// There are as many as may be.
    Limit,
    /// The system did not hand it over, most likely for want of file handles.
    AcceptFailed,
}

impl TurnedAway {
    /// All names, in the order of the variants.
    pub(super) const NAMES: [&'static str; 2] = ["limit", "accept_failed"];
}

/// What is known of a connection while it is there.
#[derive(Debug)]
pub(super) struct Connection {
    /// Tells it from all others of this process.
    pub(super) number: u64,
    begun: Instant,
    /// Bytes of answers that have not left.
    owed: AtomicU64,
    /// When bytes left last, or the first of those that are owed were made: milliseconds after `begun`.
    moved_ms: AtomicU64,
    /// The same bytes over all connections.
    all: Level,
}

impl Connection {
    pub(super) fn new(number: u64, metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            number,
            begun: Instant::now(),
            owed: AtomicU64::new(0),
            moved_ms: AtomicU64::new(0),
            all: metrics.answer_bytes.clone(),
        })
    }

    /// Bytes of answers that have not left.
    pub(super) fn owed(&self) -> u64 {
        self.owed.load(Ordering::Relaxed)
    }

    /// Bytes that somebody else counts in all are owed here.
    pub(super) fn owe(&self, bytes: u64) {
        if self.owed.fetch_add(bytes, Ordering::Relaxed) == 0 {
            self.note_movement();
        }
    }

    /// They are no more.
    pub(super) fn settle(&self, bytes: u64) {
        self.owed.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes of an answer, counted until they have left. What is counted already comes with its `owed`.
    pub(super) fn outgoing(self: &Arc<Self>, bytes: Bytes, owed: Option<Arc<Owed>>) -> Bytes {
        let counted_here = match owed {
            Some(_) => 0,
            None => bytes.len() as u64,
        };
        if counted_here > 0 {
            self.all.add(counted_here);
            self.owe(counted_here);
        }
        Bytes::from_owner(Leaving { bytes, connection: Arc::clone(self), counted_here, _owed: owed })
    }

    fn note_movement(&self) {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.moved_ms.store(now, Ordering::Relaxed);
    }

    /// Since when nothing has moved though something is owed.
    fn still_since(&self) -> Option<Instant> {
        let moved = Duration::from_millis(self.moved_ms.load(Ordering::Relaxed));
        (self.owed() > 0).then(|| self.begun.checked_add(moved)).flatten()
    }
}

/// Bytes on their way out. HTTP/2 keeps them until the client has given it room to send them.
struct Leaving {
    bytes: Bytes,
    connection: Arc<Connection>,
    counted_here: u64,
    _owed: Option<Arc<Owed>>,
}

impl AsRef<[u8]> for Leaving {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.connection.note_movement();
        if self.counted_here > 0 {
            self.connection.settle(self.counted_here);
            self.connection.all.subtract(self.counted_here);
        }
    }
}

/// A connection that has been accepted, on its way to its thread.
pub(super) struct Dealt {
    pub(super) stream: std::net::TcpStream,
    pub(super) number: u64,
    pub(super) open: Open,
}

/// Counts a connection as long as it is there, and how it ended.
pub(super) struct Open {
    pub(super) connections: Level,
    pub(super) closed: Reasons,
    pub(super) ended: Ended,
    pub(super) _tracked: TaskTrackerToken,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.closed.count(self.ended as usize);
        self.connections.subtract(1);
    }
}

/// What serving a connection needs.
#[derive(Clone)]
pub(super) struct Serving {
    pub(super) house: Arc<House>,
    pub(super) http: http2::Builder<TokioExecutor>,
    pub(super) handshake: Duration,
    pub(super) answer_timeout: Duration,
    pub(super) stop: CancellationToken,
}

impl Serving {
    /// Serves a connection to its end.
    pub(super) async fn serve(self, dealt: Dealt) {
        let Dealt { stream, number, mut open } = dealt;
        open.ended = self.speak(stream, number).await;
        if !matches!(open.ended, Ended::Client | Ended::Stop) {
            let reason = Ended::NAMES.get(open.ended as usize).copied();
            tracing::debug!(connection = number, reason, "a connection was closed");
        }
    }

    async fn speak(self, stream: std::net::TcpStream, number: u64) -> Ended {
        let Ok(stream) = TcpStream::from_std(stream) else { return Ended::Client };
        if stream.set_nodelay(true).is_err() {
            return Ended::Client;
        }
        // Before the first byte there is nothing to say farewell to.
        select! {
            readable = timeout(self.handshake, stream.readable()) => match readable {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Ended::Client,
                Err(_) => return Ended::Handshake,
            },
            () = self.stop.cancelled() => return Ended::Stop,
        }
        let connection = Connection::new(number, &self.house.metrics);
        let mut stall = Stall::new(Arc::clone(&connection), self.answer_timeout);
        let io = TokioIo::new(Socket::new(stream, self.handshake));
        let mut served = pin!(self.http.serve_connection(io, Door::new(self.house, connection)));
        let mut stop = pin!(self.stop.cancelled());
        let mut stopping = false;
        poll_fn(|cx| {
            if !stopping && stop.as_mut().poll(cx).is_ready() {
                stopping = true;
                served.as_mut().graceful_shutdown();
            }
            match served.as_mut().poll(cx) {
                Poll::Ready(Ok(())) if stopping => Poll::Ready(Ended::Stop),
                Poll::Ready(Ok(())) => Poll::Ready(Ended::Client),
                Poll::Ready(Err(error)) => Poll::Ready(Ended::of(&error)),
                Poll::Pending => stall.poll(cx).map(|()| Ended::SlowReader),
            }
        })
        .await
    }
}

/// Watches for answers that are not taken. Has a timer only while something is owed.
struct Stall {
    connection: Arc<Connection>,
    longest: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Stall {
    fn new(connection: Arc<Connection>, longest: Duration) -> Self {
        Self { connection, longest, timer: None }
    }

    /// Ready when nothing has moved for too long. The timer is left alone until it fires, however much has moved.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(timer) = &mut self.timer
                && timer.as_mut().poll(cx).is_pending()
            {
                return Poll::Pending;
            }
            let fired = self.timer.take().is_some();
            let Some(since) = self.connection.still_since() else { return Poll::Pending };
            let Some(due) = since.checked_add(self.longest) else { return Poll::Pending };
            if fired && due <= Instant::now() {
                return Poll::Ready(());
            }
            self.timer = Some(Box::pin(sleep_until(due.into())));
        }
    }
}

/// The last words to a client that is turned away: empty SETTINGS, and GOAWAY with the reason for people to read.
pub(super) fn last_words(text: &str) -> Bytes {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 0xb];
    let [_, length @ ..] = u32::try_from(text.len().saturating_add(8)).unwrap_or(u32::MAX).to_be_bytes();
    [&SETTINGS[..], &length, &[7, 0, 0, 0, 0, 0], &[0; 4], &ENHANCE_YOUR_CALM, text.as_bytes()]
        .concat()
        .into()
}

/// Says the last words, and reads on until the client has heard them: closed with something unread, the connection
/// would be reset, and the words lost.
pub(super) async fn turn_away(stream: std::net::TcpStream, words: Bytes) {
    let Ok(mut stream) = TcpStream::from_std(stream) else { return };
    let talk = async {
        stream.write_all(&words).await?;
        stream.shutdown().await?;
        while stream.read(&mut [0; 512]).await? > 0 {}
        Ok::<_, io::Error>(())
    };
    let _ = timeout(TURNING_AWAY, talk).await;
}

#[cfg(test)]
mod tests {
    use opentelemetry::metrics::MeterProvider;
    use opentelemetry_sdk::metrics::SdkMeterProvider;

    use super::*;

    fn connection() -> (Level, Arc<Connection>) {
        let metrics = Metrics::new(&SdkMeterProvider::default().meter("test"));
        (metrics.answer_bytes.clone(), Connection::new(1, &metrics))
    }

    #[test]
    fn bytes_are_owed_until_the_last_piece_of_them_has_left() {
        let (all, connection) = connection();
        let mut bytes = connection.outgoing(Bytes::from_static(b"answer"), None);
        assert_eq!((connection.owed(), all.get()), (6, 6));
        let piece = bytes.split_to(2);
        drop(bytes);
        assert_eq!(connection.owed(), 6, "HTTP/2 still has a piece");
        drop(piece);
        assert_eq!((connection.owed(), all.get()), (0, 0));
    }

    #[tokio::test]
    async fn only_who_is_owed_something_and_takes_nothing_is_a_slow_reader() {
        let (_, connection) = connection();
        let mut stall = Stall::new(Arc::clone(&connection), Duration::from_millis(50));
        let nothing = poll_fn(|cx| Poll::Ready(stall.poll(cx))).await;
        assert!(nothing.is_pending() && stall.timer.is_none(), "no timer without need");
        let bytes = connection.outgoing(Bytes::from_static(b"answer"), None);
        assert!(poll_fn(|cx| Poll::Ready(stall.poll(cx))).await.is_pending());
        poll_fn(|cx| stall.poll(cx)).await;
        drop(bytes);
        assert!(poll_fn(|cx| Poll::Ready(stall.poll(cx))).await.is_pending());
    }

    #[test]
    fn last_words_are_two_frames() {
        let words = last_words("too many");
        assert_eq!(&words[..18], [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 16, 7, 0, 0, 0, 0, 0]);
        assert_eq!(&words[18..], [&[0, 0, 0, 0, 0, 0, 0, 0xb], &b"too many"[..]].concat());
    }
}
