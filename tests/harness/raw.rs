//! Calls made without tonic, whose client would act on odd headers itself and hide how a connection ends.

use std::pin::pin;

use bytes::{Bytes, BytesMut};
use h2::{RecvStream, SendStream, client::ResponseFuture};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::{net::TcpStream, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

/// One HTTP/2 connection.
pub struct Raw {
    client: h2::client::SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
    frozen: CancellationToken,
    address: String,
}

/// A call that has been opened.
pub struct RawCall {
    response: ResponseFuture,
    sender: SendStream<Bytes>,
}

/// How a call was answered.
#[derive(Debug)]
pub struct RawAnswer {
    pub http: http::StatusCode,
    /// As tonic would show it; OK is a status too.
    pub status: Status,
    /// The messages with their framing.
    pub body: Bytes,
}

impl Raw {
    pub async fn connect(address: &str) -> Self {
        Self::connect_with(address, &mut h2::client::Builder::new()).await
    }

    pub async fn connect_with(address: &str, builder: &mut h2::client::Builder) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (client, connection) = builder.handshake(stream).await.unwrap();
        let frozen = CancellationToken::new();
        let until = frozen.clone().cancelled_owned();
        let connection = tokio::spawn(async move {
            let mut connection = pin!(connection);
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = until => std::future::pending().await,
            }
        });
        Self { client, connection, frozen, address: address.to_owned() }
    }

    /// Opens a call; an error says that it never began.
    pub async fn open(&self, path: &str, headers: &HeaderMap) -> Result<RawCall, h2::Error> {
        let mut call = http::Request::post(format!("http://{}{path}", self.address)).body(()).unwrap();
        call.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        call.headers_mut().insert("te", HeaderValue::from_static("trailers"));
        let mut named: Option<HeaderName> = None;
        for (name, value) in headers.clone() {
            match name {
                // The first of its name takes the place of what is there.
                Some(name) => {
                    call.headers_mut().insert(name.clone(), value);
                    named = Some(name);
                }
                None => drop(call.headers_mut().append(named.clone().unwrap(), value)),
            }
        }
        let mut client = self.client.clone().ready().await?;
        let (response, sender) = client.send_request(call, false)?;
        Ok(RawCall { response, sender })
    }

    /// A whole unary call. `Err`: it never began.
    pub async fn call(
        &self,
        path: &str,
        request: &impl prost::Message,
    ) -> Result<Result<RawAnswer, h2::Error>, h2::Error> {
        let mut call = self.open(path, &HeaderMap::new()).await?;
        call.send(framed(&request.encode_to_vec()), true);
        Ok(call.answer().await)
    }

    /// Waits for the end of the connection.
    pub async fn ended(&mut self) -> Result<(), h2::Error> {
        (&mut self.connection).await.unwrap()
    }

    /// Whether the connection is over.
    pub fn is_over(&self) -> bool {
        self.connection.is_finished()
    }

    /// Reads and writes no more, as a client that was stopped. The connection stays open.
    pub fn freeze(&self) {
        self.frozen.cancel();
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl RawCall {
    /// Sends bytes of the request. The broker may have answered before it has read all; then nobody takes them.
    pub fn send(&mut self, bytes: Bytes, end: bool) {
        let _ = self.sender.send_data(bytes, end);
    }

    /// Sends bytes as the broker gives room for them: all but the last window have arrived when this returns.
    pub async fn send_as_taken(&mut self, mut bytes: Bytes) {
        while !bytes.is_empty() {
            self.sender.reserve_capacity(bytes.len());
            let room = std::future::poll_fn(|cx| self.sender.poll_capacity(cx)).await.unwrap().unwrap();
            let piece = bytes.split_to(room.min(bytes.len()));
            self.sender.send_data(piece, false).unwrap();
        }
    }

    /// Waits for the answer and reads it to its end.
    pub async fn answer(self) -> Result<RawAnswer, h2::Error> {
        let (answer, mut body) = self.head().await?;
        let mut bytes = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data?;
            body.flow_control().release_capacity(data.len())?;
            bytes.extend_from_slice(&data);
        }
        let trailers = body.trailers().await?;
        let status = trailers.as_ref().and_then(Status::from_header_map);
        let status = status.or_else(|| Status::from_header_map(answer.headers()));
        Ok(RawAnswer {
            http: answer.status(),
            status: status.unwrap_or_else(|| Status::new(Code::Unknown, "no status")),
            body: bytes.freeze(),
        })
    }

    /// Waits for the answer and leaves it unread.
    pub async fn head(self) -> Result<(http::Response<()>, RecvStream), h2::Error> {
        let Self { response, sender } = self;
        let (head, body) = response.await?.into_parts();
        drop(sender);
        Ok((http::Response::from_parts(head, ()), body))
    }
}

/// A message with its prefix.
pub fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(message.len() + 5);
    bytes.extend_from_slice(&[0]);
    bytes.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(message);
    bytes.freeze()
}
