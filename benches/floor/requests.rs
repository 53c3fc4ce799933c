//! Requests, encoded once and sent over and over, and the check that an answer is the one that was asked for.

use std::time::Duration;

use bytes::Bytes;
use holdfast::pb::v1::{
    Durability, Message, PullRequest, PullResponse, SendRequest, SendResponse, SendStreamRequest,
    SendStreamResponse, SystemProperties, send_stream_response::Outcome,
};
use prost::Message as _;

use crate::Result;

/// Bytes of a message's body.
pub const BODY_BYTES: usize = 1024;
/// Messages in the largest call.
pub const MESSAGES_MAX: usize = 256;
/// As much as a pull may bring.
const PULL_BYTES: u32 = 16 << 20;
/// Path of the three calls that are measured.
pub const SEND: &str = "/holdfast.v1.Broker/Send";
pub const SEND_STREAM: &str = "/holdfast.v1.Broker/SendStream";
pub const PULL: &str = "/holdfast.v1.Broker/Pull";

/// Text that does not compress to nothing, should anything on the way try.
pub fn body() -> Bytes {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut letter = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        b'a' + u8::try_from(state % 26).unwrap_or(0)
    };
    (0..BODY_BYTES).map(|_| letter()).collect::<Vec<u8>>().into()
}

/// A send of `batch` messages, as our client makes them.
pub fn send(topic: &str, queue: Option<u32>, batch: u32, body: &Bytes) -> SendRequest {
    let message = Message {
        body: body.clone(),
        system_properties: Some(SystemProperties {
            born_timestamp: Some(std::time::SystemTime::now().into()),
            ..SystemProperties::default()
        }),
        ..Message::default()
    };
    SendRequest {
        topic: topic.into(),
        messages: (0..batch).map(|_| message.clone()).collect(),
        queue_id: queue,
        ..SendRequest::default()
    }
}

/// The same as a message of a stream. Answers come in order, so all may have one number.
pub fn stream_send(topic: &str, batch: u32) -> SendStreamRequest {
    SendStreamRequest { correlation: CORRELATION.into(), send: Some(send(topic, None, batch, &body())) }
}

/// Below 128, so that it takes one byte.
const CORRELATION: u8 = 7;

/// A pull of up to `count` messages.
pub fn pull(topic: &str, queue: u32, offset: u64, count: u32) -> PullRequest {
    PullRequest {
        topic: topic.into(),
        queue_id: queue,
        offset: i64::try_from(offset).unwrap_or(i64::MAX),
        max_messages: count,
        max_bytes: PULL_BYTES,
        ..PullRequest::default()
    }
}

/// A message as gRPC frames it: not compressed, length, bytes.
pub fn framed(message: &impl prost::Message) -> Bytes {
    let mut framed = vec![0];
    framed.extend_from_slice(&u32::try_from(message.encoded_len()).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend_from_slice(&message.encode_to_vec());
    framed.into()
}

/// The message of an answer that holds one.
pub fn unframed(answer: &[u8]) -> Result<&[u8]> {
    let (head, rest) = answer.split_first_chunk::<5>().ok_or("an answer without a message")?;
    let [0, length @ ..] = *head else { return Err("a compressed answer".into()) };
    match rest.len() == usize::try_from(u32::from_be_bytes(length))? {
        true => Ok(rest),
        false => Err("an answer of another length than it says".into()),
    }
}

/// Whether a send was stored as it should be.
pub fn check_sent(answer: &[u8], batch: u32, durability: Durability) -> Result<()> {
    checked(&SendResponse::decode(unframed(answer)?)?, batch, durability)
}

fn checked(sent: &SendResponse, batch: u32, durability: Durability) -> Result<()> {
    if sent.receipts.len() != usize::try_from(batch)? || sent.durability() != durability {
        let (count, promise) = (sent.receipts.len(), sent.durability().as_str_name());
        return Err(format!("{batch} messages were answered with {count} receipts and {promise}").into());
    }
    Ok(())
}

/// Whether a message of a stream was stored; decodes it only when a look at it does not tell.
pub fn check_stream_sent(answer: &[u8]) -> Result<()> {
    /// Field 1 with the number, then field 2: stored.
    const STORED: [u8; 3] = [1 << 3, CORRELATION, 2 << 3 | 2];
    if answer.starts_with(&STORED) {
        return Ok(());
    }
    match SendStreamResponse::decode(answer)?.outcome {
        Some(Outcome::Sent(_)) => Ok(()),
        other => Err(format!("a send on a stream was answered with {other:?}").into()),
    }
}

/// Whether a pull brought what there is.
pub fn check_pulled(answer: &[u8], count: u32) -> Result<()> {
    let pulled = PullResponse::decode(unframed(answer)?)?;
    let whole = pulled.messages.iter().all(|message| message.body.len() == BODY_BYTES);
    if pulled.messages.len() != usize::try_from(count)? || !whole {
        let (found, outcome) = (pulled.messages.len(), pulled.outcome().as_str_name());
        return Err(format!("a pull of {count} brought {found} messages, {outcome}").into());
    }
    Ok(())
}

/// A pull of one message that waits for it.
pub fn waiting_pull(topic: &str, queue: u32, offset: u64, wait: Duration) -> PullRequest {
    PullRequest { wait: wait.try_into().ok(), ..pull(topic, queue, offset, 1) }
}

/// Where the first message of a send was put.
pub fn first_offset(answer: &[u8]) -> Result<u64> {
    let sent = SendResponse::decode(unframed(answer)?)?;
    Ok(u64::try_from(sent.receipts.first().ok_or("a send without a receipt")?.offset)?)
}
