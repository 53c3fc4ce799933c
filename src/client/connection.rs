//! One HTTP/2 connection to a broker, made when it is first needed and again after it broke.

use std::{fmt, str::FromStr, time::Duration};

use tonic::{
    Request, Status,
    transport::{Channel, Uri},
};

use super::{Code, Error};
use crate::{
    model::Invalid,
    pb::v1::{admin_client::AdminClient, broker_client::BrokerClient},
};

/// Port of a broker when an endpoint names none.
pub const DEFAULT_PORT: u16 = 8081;

/// Longest wait for the connection itself.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Deadline of a call that does not wait for messages.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest answer taken: a pull of 16 MiB whose first message is large, with room for fields to come.
const MAX_ANSWER_BYTES: usize = 72 << 20;
/// Frames as large as a typical batch: fewer of them, fewer copies.
const FRAME_BYTES: u32 = 1 << 20;
/// What may be on its way for one call, so that a pull of 16 MiB needs no pause.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// What may be on its way for all calls.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// A connection without a sign of life for this long is asked for one …
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// … and given up when none comes within this time.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Where a broker listens. Parsed from `HOST:PORT`, `HOST`, `[IPV6]:PORT` or `http://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    authority: String,
}

impl Endpoint {
    /// `HOST:PORT`, as people write it.
    pub fn as_str(&self) -> &str {
        &self.authority
    }

    /// The host alone, without port and brackets.
    pub fn host(&self) -> &str {
        let host = self.authority.rsplit_once(':').map_or(self.authority.as_str(), |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }

    fn uri(&self) -> Result<Uri, Invalid> {
        let uri = format!("http://{}", self.authority);
        uri.parse().map_err(|error| Invalid::new("endpoint", format!("`{}`: {error}", self.authority)))
    }
}

impl FromStr for Endpoint {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let wrong = |problem: &str| {
            Err(Invalid::new("endpoint", format!("`{text}` {problem}; write HOST:PORT, e.g. 127.0.0.1:8081")))
        };
        let rest = match text.split_once("://") {
            None => text,
            Some(("http", rest)) => rest.trim_end_matches('/'),
            Some((scheme, _)) => return wrong(&format!("begins with {scheme}://, only http:// is spoken")),
        };
        if rest.is_empty() || rest.contains(['/', '@', '?', '#', ' ']) {
            return wrong("is no address");
        }
        let (host, port) = match rest.rsplit_once(':') {
            // The last colon of a bare IPv6 address separates no port.
            Some((host, _)) if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) => {
                if rest.ends_with(']') {
                    (rest.to_owned(), None)
                } else {
                    (format!("[{rest}]"), None)
                }
            }
            Some((host, port)) => (host.to_owned(), Some(port)),
            None => (rest.to_owned(), None),
        };
        let port = match port.map(str::parse) {
            None => DEFAULT_PORT,
            Some(Ok(0) | Err(_)) => return wrong("has no port between 1 and 65535"),
            Some(Ok(port)) => port,
        };
        if host.is_empty() {
            return wrong("has no host");
        }
        let endpoint = Self { authority: format!("{host}:{port}") };
        endpoint.uri().map(|_| endpoint)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.authority)
    }
}

/// A connection to one broker. Clones share it; calls on it run side by side.
///
/// It is made by the first call and, after it broke, by the next one: a call that finds nobody fails with
/// [`Code::Unreachable`], one that was cut off with [`Code::Unavailable`].
#[derive(Clone, Debug)]
pub struct Connection {
    channel: Channel,
    endpoint: Endpoint,
}

impl Connection {
    /// A connection to `endpoint`; nothing happens on the network yet. Call it within a tokio runtime.
    pub fn new(endpoint: Endpoint) -> Result<Self, Error> {
        let uri = endpoint.uri().map_err(|invalid| Error::new(Code::InvalidArgument, invalid.to_string()))?;
        let channel = Channel::builder(uri)
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .max_frame_size(FRAME_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            .connect_lazy();
        Ok(Self { channel, endpoint })
    }

    /// Where it goes.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(super) fn broker(&self) -> BrokerClient<Channel> {
        BrokerClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(super) fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(super) fn error(&self, status: &Status) -> Error {
        Error::of_status(status, self.endpoint.as_str())
    }
}

/// A request with the usual deadline.
pub(super) fn request<T>(message: T) -> Request<T> {
    request_waiting(message, Duration::ZERO)
}

/// A request that may wait at the broker for `wait` beyond the usual deadline.
pub(super) fn request_waiting<T>(message: T, wait: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_TIMEOUT.saturating_add(wait));
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<String, String> {
        text.parse::<Endpoint>().map(|e| e.to_string()).map_err(|e| e.to_string())
    }

    #[test]
    fn endpoints_are_read_the_way_people_write_them() {
        for (text, meant) in [
            ("127.0.0.1:8081", "127.0.0.1:8081"),
            ("broker", "broker:8081"),
            ("broker:9000", "broker:9000"),
            ("http://broker:9000/", "broker:9000"),
            ("http://broker", "broker:8081"),
            ("[::1]:9000", "[::1]:9000"),
            ("[::1]", "[::1]:8081"),
            ("::1", "[::1]:8081"),
        ] {
            assert_eq!(parsed(text).as_deref(), Ok(meant), "{text}");
        }
        assert_eq!("[::1]:9000".parse::<Endpoint>().unwrap().host(), "::1");
    }

    #[test]
    fn what_is_no_endpoint_is_refused_with_the_rule() {
        for text in ["", ":8081", "host:", "host:0", "host:99999", "https://host:1", "host:1/path", "a b:1"] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains("HOST:PORT"), "{text}: {error}");
        }
    }

    #[tokio::test]
    async fn nobody_there_is_said_plainly_and_what_to_do() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let connection = Connection::new(free.to_string().parse().unwrap()).unwrap();
        let error = connection.node_status().await.unwrap_err();
        assert_eq!(error.code(), Code::Unreachable);
        assert_eq!(
            error.to_string(),
            format!(
                "cannot reach {free}: connection refused; is the broker running? \
                 start one with `holdfast standalone`"
            )
        );
    }
}
