//! Send, SendStream and Pull on the wire, without going through generated types: the messages of a request
//! stay what the client encoded, and those of an answer are copied once, into a buffer of the right size.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::{
    Message,
    encoding::{encode_varint, encoded_len_varint},
};
use tonic::{
    Status,
    codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

use super::{
    convert, status,
    unary::Answer,
    wire::{Fields, Value},
};
use crate::{
    broker::{Error, PullCommand, PullOutcome, Pulled, Queried, Reached, SendCommand, Sent},
    model::{Invalid, MAX_BATCH_MESSAGES},
    pb::v1,
};

/// Buffers of a stream begin with this size.
const STREAM_BUFFER_BYTES: usize = 8 * 1024;
/// Answers of a stream that are ready together are sent together up to this size.
const STREAM_ANSWERS_BYTES: usize = 32 * 1024;

// ---- Send -----------------------------------------------------------------------------------

/// A send as it is read; fragments of one request merge.
#[derive(Debug, Default)]
struct SendParts {
    command: SendCommand,
    messages: usize,
}

impl SendParts {
    /// Reads the fields in `part`, which lies in `whole`.
    fn read(&mut self, whole: &Bytes, part: &[u8]) -> Result<(), Invalid> {
        let mut fields = Fields(part);
        while let Some((number, value)) = fields.next()? {
            match number {
                1 => self.command.topic = value.text("topic")?,
                2 => {
                    let message = value.bytes("messages")?;
                    self.messages = self.messages.saturating_add(1);
                    // Counted on, but not kept: empty messages must not fill the memory.
                    if self.messages <= MAX_BATCH_MESSAGES {
                        self.command.messages.push(whole.slice_ref(message));
                    }
                }
                3 => self.command.queue = Some(value.u32("queue_id")?),
                4 => self.command.map_version = Some(value.u64("queue_map_version")?),
                _ => {}
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<SendCommand, Error> {
        if self.messages > MAX_BATCH_MESSAGES {
            let limit = MAX_BATCH_MESSAGES;
            return Err(Error::BatchTooLarge { unit: "messages", seen: self.messages, limit });
        }
        Ok(self.command)
    }
}

/// Reads `SendRequest`.
pub(super) fn read_send(bytes: &Bytes) -> Result<SendCommand, Error> {
    let mut parts = SendParts::default();
    parts.read(bytes, bytes)?;
    parts.finish()
}

impl Answer for Sent {
    fn length(&self) -> usize {
        SentAnswer::new(self).length()
    }

    fn write(&self, to: &mut BytesMut) {
        SentAnswer::new(self).write(to);
    }
}

/// A `SendResponse` that is not written yet.
struct SentAnswer<'a> {
    sent: &'a Sent,
    /// All fields but the receipts.
    rest: v1::SendResponse,
}

impl<'a> SentAnswer<'a> {
    fn new(sent: &'a Sent) -> Self {
        let durability = match sent.reached {
            Reached::Disk => v1::Durability::DurableDisk,
            Reached::Memory => v1::Durability::DurableMemory,
        };
        let rest = v1::SendResponse {
            queue_id: sent.queue,
            receipts: Vec::new(),
            store_timestamp: Some(convert::to_timestamp(sent.store_ms)),
            durability: durability.into(),
        };
        Self { sent, rest }
    }

    fn receipts(&self) -> impl Iterator<Item = (&'a str, u64)> {
        self.sent.ids.iter().zip(self.sent.first_offset..)
    }

    fn length(&self) -> usize {
        let receipts: usize =
            self.receipts().map(|(id, offset)| bytes_length(receipt_length(id, offset))).sum();
        receipts.saturating_add(self.rest.encoded_len())
    }

    fn write(&self, to: &mut impl BufMut) {
        for (id, offset) in self.receipts() {
            write_bytes_head(2, receipt_length(id, offset), to);
            if !id.is_empty() {
                write_bytes_head(1, id.len(), to);
                to.put_slice(id.as_bytes());
            }
            if offset != 0 {
                to.put_u8(2 << 3);
                encode_varint(offset, to);
            }
        }
        write_rest(&self.rest, to);
    }
}

/// Length of a `Receipt`.
fn receipt_length(id: &str, offset: u64) -> usize {
    let id = if id.is_empty() { 0 } else { bytes_length(id.len()) };
    let offset = if offset == 0 { 0 } else { 1 + encoded_len_varint(offset) };
    id.saturating_add(offset)
}

// ---- SendStream -----------------------------------------------------------------------------

/// Reads `SendStreamRequest`, writes `SendStreamResponse`.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamCodec;

/// One request of a stream. What is wrong with it concerns this one only.
#[derive(Debug)]
pub(super) struct StreamFrame {
    pub(super) correlation: u64,
    pub(super) send: Result<SendCommand, Error>,
    /// Its size on the wire.
    pub(super) bytes: usize,
}

/// The answer to one.
#[derive(Debug)]
pub(super) struct StreamAnswer {
    pub(super) correlation: u64,
    pub(super) outcome: Result<Sent, Error>,
}

fn read_frame(bytes: &Bytes) -> StreamFrame {
    let mut correlation = 0;
    let mut parts = SendParts::default();
    let mut found = false;
    let mut read = || -> Result<(), Invalid> {
        let mut fields = Fields(bytes);
        while let Some((number, value)) = fields.next()? {
            match number {
                1 => correlation = value.u64("correlation")?,
                2 => {
                    found = true;
                    parts.read(bytes, value.bytes("send")?)?;
                }
                _ => {}
            }
        }
        Ok(())
    };
    let send = match read() {
        Err(invalid) => Err(invalid.into()),
        Ok(()) if !found => Err(Invalid::new("send", "is missing; say what to send").into()),
        Ok(()) => parts.finish(),
    };
    StreamFrame { correlation, send, bytes: bytes.len() }
}

impl Codec for StreamCodec {
    type Encode = StreamAnswer;
    type Decode = StreamFrame;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Decoder for StreamCodec {
    type Item = StreamFrame;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<StreamFrame>, Status> {
        Ok(Some(read_frame(&from.copy_to_bytes(from.remaining()))))
    }
}

impl Encoder for StreamCodec {
    type Item = StreamAnswer;
    type Error = Status;

    fn encode(&mut self, answer: StreamAnswer, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        write_stream_answer(&answer, to);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(STREAM_BUFFER_BYTES, STREAM_ANSWERS_BYTES)
    }
}

fn write_stream_answer(answer: &StreamAnswer, to: &mut impl BufMut) {
    if answer.correlation != 0 {
        to.put_u8(1 << 3);
        encode_varint(answer.correlation, to);
    }
    match &answer.outcome {
        Ok(sent) => {
            let sent = SentAnswer::new(sent);
            write_bytes_head(2, sent.length(), to);
            sent.write(to);
        }
        Err(error) => {
            let error = status::call_error(error);
            write_bytes_head(3, error.encoded_len(), to);
            write_rest(&error, to);
        }
    }
}

// ---- Pull -----------------------------------------------------------------------------------

/// Reads `PullRequest`.
pub(super) fn read_pull(bytes: &[u8]) -> Result<PullCommand, Invalid> {
    let mut command = PullCommand::default();
    let (mut seconds, mut nanos) = (0, 0);
    let mut fields = Fields(bytes);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => command.topic = value.text("topic")?,
            2 => command.queue = value.u32("queue_id")?,
            3 => command.offset = value.i64("offset")?,
            4 => command.max_messages = value.u32("max_messages")?,
            5 => command.max_bytes = value.u32("max_bytes")?,
            6 => read_duration(value, &mut seconds, &mut nanos)?,
            7 => command.tag_filter = value.text("tag_filter")?,
            8 => command.group = value.text("group")?,
            9 => command.client = value.text("client_id")?,
            10 => command.commit = Some(value.i64("commit_offset")?),
            _ => {}
        }
    }
    command.wait = convert::duration("wait", seconds, nanos)?;
    Ok(command)
}

fn read_duration(value: Value<'_>, seconds: &mut i64, nanos: &mut i32) -> Result<(), Invalid> {
    let mut fields = Fields(value.bytes("wait")?);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => *seconds = value.i64("wait")?,
            2 => *nanos = value.i32("wait")?,
            _ => {}
        }
    }
    Ok(())
}

impl Answer for Pulled {
    fn length(&self) -> usize {
        let messages: usize = messages(self).iter().map(|message| bytes_length(message.len())).sum();
        messages.saturating_add(pull_rest(self).encoded_len())
    }

    fn write(&self, to: &mut BytesMut) {
        write_messages(2, messages(self), to);
        write_rest(&pull_rest(self), to);
    }
}

/// The stored messages that were found.
pub(super) fn messages(pulled: &Pulled) -> &[Bytes] {
    match &pulled.outcome {
        PullOutcome::Found(messages) => messages,
        PullOutcome::NoNewMessage(_)
        | PullOutcome::NoMatchedMessage
        | PullOutcome::BelowMin
        | PullOutcome::BeyondMax
        | PullOutcome::DataLoss { .. } => &[],
    }
}

/// All fields of the answer but the messages.
fn pull_rest(pulled: &Pulled) -> v1::PullResponse {
    let mut rest = v1::PullResponse {
        next_offset: convert::to_i64(pulled.next_offset),
        min_offset: convert::to_i64(pulled.min_offset),
        max_offset: convert::to_i64(pulled.max_offset),
        commit: pulled.commit.as_ref().map(convert::committed),
        ..v1::PullResponse::default()
    };
    let outcome = match pulled.outcome {
        PullOutcome::Found(_) => v1::PullOutcome::Found,
        PullOutcome::NoNewMessage(delay) => {
            rest.retry_delay = delay.map(convert::to_duration);
            v1::PullOutcome::NoNewMessage
        }
        PullOutcome::NoMatchedMessage => v1::PullOutcome::NoMatchedMessage,
        PullOutcome::BelowMin => {
            rest.illegal_reason = v1::OffsetIllegalReason::BelowMin.into();
            v1::PullOutcome::OffsetIllegal
        }
        PullOutcome::BeyondMax => {
            rest.illegal_reason = v1::OffsetIllegalReason::BeyondMax.into();
            v1::PullOutcome::OffsetIllegal
        }
        PullOutcome::DataLoss { begin, end } => {
            rest.lost = Some(v1::OffsetRange { begin: convert::to_i64(begin), end: convert::to_i64(end) });
            v1::PullOutcome::DataLoss
        }
    };
    rest.outcome = outcome.into();
    rest
}

// ---- QueryMessages --------------------------------------------------------------------------

impl Answer for Queried {
    fn length(&self) -> usize {
        let messages: usize = self.messages.iter().map(|message| bytes_length(message.len())).sum();
        messages.saturating_add(if self.truncated { 2 } else { 0 })
    }

    fn write(&self, to: &mut BytesMut) {
        write_messages(1, &self.messages, to);
        if self.truncated {
            to.put_slice(&[2 << 3, 1]);
        }
    }
}

// ---- Other calls ----------------------------------------------------------------------------

/// Reads a request of a generated type.
pub(super) fn read_plain<Q: Message + Default>(bytes: Bytes) -> Result<Q, Invalid> {
    Q::decode(bytes)
        .map_err(|error| Invalid::new("request", format!("is not a valid protobuf message: {error}")))
}

/// An answer of a generated type.
pub(super) struct Plain<A>(pub(super) A);

impl<A: Message> Answer for Plain<A> {
    fn length(&self) -> usize {
        self.0.encoded_len()
    }

    fn write(&self, to: &mut BytesMut) {
        write_rest(&self.0, to);
    }
}

// ---- Writing --------------------------------------------------------------------------------

/// Length of a field with so many bytes and a number below 16.
fn bytes_length(length: usize) -> usize {
    length.saturating_add(1 + encoded_len_varint(length as u64))
}

fn write_bytes_head(number: u8, length: usize, to: &mut impl BufMut) {
    to.put_u8(number << 3 | 2);
    encode_varint(length as u64, to);
}

fn write_messages(number: u8, messages: &[Bytes], to: &mut impl BufMut) {
    for message in messages {
        write_bytes_head(number, message.len(), to);
        to.put_slice(message);
    }
}

/// Buffers here grow as needed, so that there is always room.
fn write_rest(message: &impl Message, to: &mut impl BufMut) {
    let written = message.encode(to);
    debug_assert!(written.is_ok());
}

#[cfg(test)]
mod tests;
