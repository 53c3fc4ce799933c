//! `[api]`: how many may call at once, and how much memory they may take by calling.
//!
//! What clients can make a node hold is bounded by the sum of
//!
//! - `request_memory`: requests that are still arriving,
//! - `answer_memory`: answers on their way to slow readers, and as much again of small ones,
//! - `connections_max` × `connection_window`: bytes of streams that are not being read, because as many of
//!   their messages as allowed still wait for the disk,
//!
//! beside some 20 KiB a connection and some KiB for each of the `calls_max` running calls. What only trickles, or is not
//! read, is ended by `handshake_timeout`, `request_timeout`, `answer_timeout` and `keepalive_timeout`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    section::section,
    text::{duration, size},
};
use crate::model::{Invalid, MAX_BATCH_BYTES};

section! {
/// `[api]`: limits of the gRPC server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApiConfig {
    /// Threads that serve calls, each with a runtime of its own; 0: one a core.
    pub threads: u64,
    /// Most connections at once; more are closed as they come.
    pub connections_max: u64,
    /// Most calls at once on one connection, waiting pulls among them; more wait at the client.
    pub calls_per_connection: u64,
    /// Most calls at once over all connections, waiting pulls among them; more are refused.
    pub calls_max: u64,
    /// Most bytes of requests that are still arriving, over all connections; above, calls are refused. An eighth
    /// is kept for other calls than sends.
    #[serde(with = "size")]
    pub request_memory: u64,
    /// Most bytes of messages on their way to clients, over all connections; above, a pull finds nothing and
    /// is told to come back.
    #[serde(with = "size")]
    pub answer_memory: u64,
    /// What one connection may take of that; above, its calls are refused until it reads its answers.
    #[serde(with = "size")]
    pub answer_memory_per_connection: u64,
    /// Largest HTTP/2 frame a client may send; large ones cost less for large messages.
    #[serde(with = "size")]
    pub frame_max: u64,
    /// Bytes a client may send ahead on one stream (HTTP/2 window).
    #[serde(with = "size")]
    pub stream_window: u64,
    /// Bytes a client may send ahead on one connection (HTTP/2 window).
    #[serde(with = "size")]
    pub connection_window: u64,
    /// Largest set of headers of a call; a call with more is refused.
    #[serde(with = "size")]
    pub headers_max: u64,
    /// Requests of one send stream that may wait for their answers; then the stream is not read on.
    pub stream_requests_max: u64,
    /// Bytes of requests of one send stream that may wait for their answers; then the stream is not read on.
    #[serde(with = "size")]
    pub stream_bytes_max: u64,
    /// A connection that has not begun to speak HTTP/2 by then is closed.
    #[serde(with = "duration")]
    pub handshake_timeout: Duration,
    /// A request that has begun must have arrived by then, or its call is refused.
    #[serde(with = "duration")]
    pub request_timeout: Duration,
    /// A connection that has answers to read and takes nothing for so long is closed.
    #[serde(with = "duration")]
    pub answer_timeout: Duration,
    /// How often a quiet connection is asked whether it is still there.
    #[serde(with = "duration")]
    pub keepalive_interval: Duration,
    /// A connection that does not answer that by then is closed.
    #[serde(with = "duration")]
    pub keepalive_timeout: Duration,
}
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            threads: 0,
            connections_max: 10_000,
            calls_per_connection: 20_000,
            calls_max: 250_000,
            request_memory: 128 << 20,
            answer_memory: 128 << 20,
            answer_memory_per_connection: 32 << 20,
            frame_max: 1 << 20,
            stream_window: 1 << 20,
            connection_window: 4 << 20,
            headers_max: 16 << 10,
            stream_requests_max: 1024,
            stream_bytes_max: 32 << 20,
            handshake_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
            answer_timeout: Duration::from_secs(60),
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(20),
        }
    }
}

impl ApiConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        const KIB: u64 = 1 << 10;
        const GIB: u64 = 1 << 30;
        // Every budget has room for the largest call.
        let call = MAX_BATCH_BYTES as u64 + 1024 * KIB;
        number("api.threads", self.threads, 0, 1024)?;
        number("api.connections_max", self.connections_max, 1, 1_000_000)?;
        number("api.calls_per_connection", self.calls_per_connection, 1, 1_000_000)?;
        number("api.calls_max", self.calls_max, 1, 10_000_000)?;
        // An eighth is kept for other calls than sends.
        sized("api.request_memory", self.request_memory, 20 << 20, 1024 * GIB)?;
        sized("api.answer_memory", self.answer_memory, call, 1024 * GIB)?;
        sized("api.answer_memory_per_connection", self.answer_memory_per_connection, call, 1024 * GIB)?;
        sized("api.frame_max", self.frame_max, 16 * KIB, (16 << 20) - KIB)?;
        sized("api.stream_window", self.stream_window, 64 * KIB, GIB)?;
        sized("api.connection_window", self.connection_window, 64 * KIB, GIB)?;
        sized("api.headers_max", self.headers_max, 4 * KIB, 1024 * KIB)?;
        number("api.stream_requests_max", self.stream_requests_max, 1, 1_000_000)?;
        sized("api.stream_bytes_max", self.stream_bytes_max, call, GIB)?;
        time("api.handshake_timeout", self.handshake_timeout)?;
        time("api.request_timeout", self.request_timeout)?;
        time("api.answer_timeout", self.answer_timeout)?;
        time("api.keepalive_interval", self.keepalive_interval)?;
        time("api.keepalive_timeout", self.keepalive_timeout)
    }
}

fn number(key: &str, value: u64, min: u64, max: u64) -> Result<(), Invalid> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(key, format!("is {value}; use {min} to {max}")))
}

fn sized(key: &str, value: u64, min: u64, max: u64) -> Result<(), Invalid> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(
        key,
        format!("is {}; use {} to {}", size::show(value), size::show(min), size::show(max)),
    ))
}

fn time(key: &str, value: Duration) -> Result<(), Invalid> {
    if (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(key, format!("is {}; use 100ms to 1h", duration::show(value))))
}
