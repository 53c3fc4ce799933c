//! A connection that must begin to speak in time.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

/// HTTP/2 connection preface and the head of the first frame. Who has sent that much can be pinged.
const GREETING_BYTES: usize = 24 + 9;

/// A TCP stream whose reads fail when its client has not greeted by a deadline.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    greeting: Option<Greeting>,
}

#[derive(Debug)]
struct Greeting {
    missing: usize,
    deadline: Pin<Box<Sleep>>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream, handshake: Duration) -> Self {
        let greeting = Greeting { missing: GREETING_BYTES, deadline: Box::pin(sleep(handshake)) };
        Self { stream, greeting: Some(greeting) }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        let Some(greeting) = &mut self.greeting else { return read };
        if read.is_pending() {
            return greeting.deadline.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()));
        }
        greeting.missing = greeting.missing.saturating_sub(buf.filled().len().saturating_sub(before));
        if greeting.missing == 0 {
            self.greeting = None;
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
