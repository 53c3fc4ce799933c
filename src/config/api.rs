//! `[api]`: how many may call at once, and how much memory they may take by calling.
//!
//! What clients can make a node hold is bounded by the sum of
//!
//! - `request_memory`: requests that are still arriving,
//! - `answer_memory`: messages on their way to slow readers,
//! - `connections_max` × `connection_window`: bytes of streams that are not being read, because as many of
//!   their messages as allowed still wait for the disk,
//!
//! beside some 20 KiB a connection and some KiB a running call.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::{Invalid, MAX_BATCH_BYTES};

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
    /// Most bytes of requests that are still arriving, over all connections; above, calls are refused.
    #[serde(with = "size_text")]
    pub request_memory: u64,
    /// Most bytes of messages on their way to clients, over all connections; above, a pull finds nothing and
    /// is told to come back.
    #[serde(with = "size_text")]
    pub answer_memory: u64,
    /// Largest HTTP/2 frame a client may send; large ones cost less for large messages.
    #[serde(with = "size_text")]
    pub frame_max: u64,
    /// Bytes a client may send ahead on one stream (HTTP/2 window).
    #[serde(with = "size_text")]
    pub stream_window: u64,
    /// Bytes a client may send ahead on one connection (HTTP/2 window).
    #[serde(with = "size_text")]
    pub connection_window: u64,
    /// Largest set of headers of a call.
    #[serde(with = "size_text")]
    pub headers_max: u64,
    /// Requests of one send stream that may wait for their answers; then the stream is not read on.
    pub stream_requests_max: u64,
    /// Bytes of requests of one send stream that may wait for their answers; then the stream is not read on.
    #[serde(with = "size_text")]
    pub stream_bytes_max: u64,
    /// A connection that has not begun to speak HTTP/2 by then is closed.
    #[serde(with = "duration_text")]
    pub handshake_timeout: Duration,
    /// How often a quiet connection is asked whether it is still there.
    #[serde(with = "duration_text")]
    pub keepalive_interval: Duration,
    /// A connection that does not answer that by then is closed.
    #[serde(with = "duration_text")]
    pub keepalive_timeout: Duration,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            threads: 0,
            connections_max: 10_000,
            calls_per_connection: 20_000,
            request_memory: 128 << 20,
            answer_memory: 128 << 20,
            frame_max: 1 << 20,
            stream_window: 1 << 20,
            connection_window: 4 << 20,
            headers_max: 16 << 10,
            stream_requests_max: 1024,
            stream_bytes_max: 32 << 20,
            handshake_timeout: Duration::from_secs(10),
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
        size("api.request_memory", self.request_memory, call, 1024 * GIB)?;
        size("api.answer_memory", self.answer_memory, call, 1024 * GIB)?;
        size("api.frame_max", self.frame_max, 16 * KIB, (16 << 20) - KIB)?;
        size("api.stream_window", self.stream_window, 64 * KIB, GIB)?;
        size("api.connection_window", self.connection_window, 64 * KIB, GIB)?;
        size("api.headers_max", self.headers_max, 4 * KIB, 1024 * KIB)?;
        number("api.stream_requests_max", self.stream_requests_max, 1, 1_000_000)?;
        size("api.stream_bytes_max", self.stream_bytes_max, call, GIB)?;
        time("api.handshake_timeout", self.handshake_timeout)?;
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

fn size(key: &str, value: u64, min: u64, max: u64) -> Result<(), Invalid> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(
        key,
        format!("is {}; use {} to {}", size_text::show(value), size_text::show(min), size_text::show(max)),
    ))
}

fn time(key: &str, value: Duration) -> Result<(), Invalid> {
    if (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(key, format!("is {}; use 100ms to 1h", humantime::format_duration(value))))
}

/// Durations as people write them: `30s`, `1m 30s`.
mod duration_text {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*value))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(from)?;
        humantime::parse_duration(&text).map_err(D::Error::custom)
    }
}

/// Sizes as people write them: `256MiB`.
mod size_text {
    use bytesize::ByteSize;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn show(value: u64) -> String {
        ByteSize::b(value).display().iec().to_string()
    }

    pub(super) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&show(*value))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        ByteSize::deserialize(from).map(|size| size.as_u64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_allowed() {
        ApiConfig::default().check().unwrap();
    }

    #[test]
    fn an_absurd_frame_size_is_refused_with_the_range() {
        let config = ApiConfig { frame_max: 1 << 30, ..ApiConfig::default() };
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains("api.frame_max") && error.contains("16.0 KiB"), "{error}");
        for config in [
            ApiConfig { request_memory: 1 << 20, ..ApiConfig::default() },
            ApiConfig { connections_max: 0, ..ApiConfig::default() },
            ApiConfig { stream_window: u64::MAX, ..ApiConfig::default() },
            ApiConfig { keepalive_interval: Duration::ZERO, ..ApiConfig::default() },
        ] {
            assert!(config.check().is_err(), "{config:?}");
        }
    }
}
