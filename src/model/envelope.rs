//! The encoded message, read just as far as the broker needs: a shallow walk over the protobuf bytes of
//! `holdfast.v1.Message` that copies nothing.
//!
//! | field of `Message` | from a client | | field of `SystemProperties` | from a client |
//! |---|---|---|---|---|
//! | 1 topic | refused | | 1 tag, 2 keys, 3 message_id, 5–8, 17, 18, 101 | checked |
//! | 2 user_properties | checked | | 9, 10, 13, 14, 102 (set by the broker) | well-formed, and overridden |
//! | 3 system_properties | checked, fragments merge | | 4, 11, 12, 15, 16, 19–22 | refused |
//! | 4 body | counted | | others | kept |
//!
//! What the broker adds goes behind the client's own fields within `system_properties`, which moves to the end of
//! the message. Of a scalar the last one wins, so a client cannot forge what the broker sets. A second fragment
//! of `system_properties` would do by protobuf's rules, but the readers of the JavaScript world (protobufjs,
//! google-protobuf) do not merge fragments: they would lose what the client set.

#![warn(clippy::arithmetic_side_effects)]

use bytes::{BufMut, Bytes, BytesMut};

use super::{Invalid, MAX_BODY_BYTES};

/// Most keys of a message.
pub const MAX_KEYS: usize = 16;
/// Longest tag, and longest key, in bytes.
pub const MAX_TAG_BYTES: usize = 128;
/// Longest message id in bytes.
pub const MAX_ID_BYTES: usize = 64;
/// Longest message group in bytes; RocketMQ refuses 64.
const MAX_GROUP_BYTES: usize = 63;
/// Longest trace context in bytes.
const MAX_TRACE_BYTES: usize = 1024;
/// Longest born host in bytes.
const MAX_HOST_BYTES: usize = 255;
/// Most user properties.
const MAX_PROPERTIES: usize = 128;
/// Longest name of a user property in bytes.
const MAX_PROPERTY_NAME_BYTES: usize = 128;
/// Most bytes of user properties, tag and keys together.
const MAX_PROPERTIES_BYTES: usize = 16 * 1024;
/// Most bytes of an encoded message beside its body: room for all limits above and some unknown fields.
const MAX_BESIDE_BODY_BYTES: usize = 64 * 1024;

/// Kind of message as its producer named it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MessageKind {
    /// Not named.
    #[default]
    Unspecified,
    /// Without a message group.
    Normal,
    /// With a message group.
    Fifo,
}

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// A field that breaks a rule; the path is empty where it is the encoding as a whole.
    #[error(transparent)]
    Field(#[from] Invalid),
    /// No body.
    #[error("body: is empty")]
    BodyEmpty,
    /// The body has so many bytes.
    #[error("body: has {0} bytes")]
    BodyTooLarge(usize),
}

/// An encoded message that has been read; borrows from it.
#[derive(Clone, Debug, Default)]
pub struct Envelope<'a> {
    /// The tag, if there is one.
    pub tag: Option<&'a str>,
    /// Its id, if it has one.
    pub id: Option<&'a str>,
    /// Its message group, if it is in one.
    pub group: Option<&'a str>,
    /// Its kind.
    pub kind: MessageKind,
    /// Bytes of its body.
    pub body_bytes: usize,
    keys: [&'a str; MAX_KEYS],
    key_count: usize,
    properties: usize,
    /// Bytes of names and values of user properties.
    property_bytes: usize,
    born_host: &'a str,
    trace_context: &'a str,
    kind_number: u64,
    /// Where its system properties are; the last fragment of them.
    pub place: SystemPlace,
    /// How many fragments of system properties it has.
    pub fragments: usize,
}

/// Where an encoded message has its system properties. At the very start, and empty, when it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SystemPlace {
    start: usize,
    content: usize,
    end: usize,
}

impl SystemPlace {
    /// The message without its system properties, in two parts, and what is in these.
    pub fn split<'b>(&self, encoded: &'b [u8]) -> Parts<'b> {
        let part = |from, to| encoded.get(from..to).unwrap_or_default();
        Parts {
            others: [part(0, self.start), part(self.end, encoded.len())],
            system: part(self.content, self.end),
        }
    }
}

/// An encoded message, its system properties apart.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Its other fields: those before, and those behind.
    pub others: [&'a [u8]; 2],
    /// What is in its system properties.
    pub system: &'a [u8],
}

impl<'a> Envelope<'a> {
    /// Reads and checks a message as a client wrote it.
    pub fn parse(encoded: &'a [u8]) -> Result<Self, EnvelopeError> {
        let mut envelope = Self::default();
        envelope.walk::<true>(encoded)?;
        envelope.check(encoded.len())?;
        Ok(envelope)
    }

    /// Reads a stored message, server fields included. Holds it to no limits: what is stored was checked by
    /// the rules of its time. `None` when it is no message.
    pub fn parse_stored(encoded: &'a [u8]) -> Option<Self> {
        let mut envelope = Self::default();
        envelope.walk::<false>(encoded).ok()?;
        envelope.kind = kind(envelope.kind_number).unwrap_or_default();
        Some(envelope)
    }

    /// Its keys, in order.
    pub fn keys(&self) -> &[&'a str] {
        self.keys.get(..self.key_count).unwrap_or_default()
    }

    fn walk<const STRICT: bool>(&mut self, encoded: &'a [u8]) -> Result<(), Invalid> {
        let mut reader = Reader(encoded);
        let mut start = 0;
        while let Some((number, value)) = reader.next("")? {
            let end = encoded.len().saturating_sub(reader.0.len());
            if let (3, Value::Bytes(content)) = (number, &value) {
                self.place = SystemPlace { start, content: end.saturating_sub(content.len()), end };
                self.fragments = self.fragments.saturating_add(1);
            }
            start = end;
            match number {
                1 if STRICT => {
                    return Err(Invalid::new(
                        "topic",
                        "is not supported by Send; the request names the topic",
                    ));
                }
                2 => self.property::<STRICT>(value.bytes("user_properties")?)?,
                3 => self.system::<STRICT>(value.bytes("system_properties")?)?,
                4 => self.body_bytes = value.bytes("body")?.len(),
                _ => {}
            }
        }
        Ok(())
    }

    fn property<const STRICT: bool>(&mut self, entry: &'a [u8]) -> Result<(), Invalid> {
        const FIELD: &str = "user_properties";
        let (mut name, mut content) = ("", "");
        let mut reader = Reader(entry);
        while let Some((number, value)) = reader.next(FIELD)? {
            match number {
                1 => name = value.text(FIELD)?,
                2 => content = value.text(FIELD)?,
                _ => {}
            }
        }
        if STRICT {
            check_property_name(name)?;
        }
        self.properties = self.properties.saturating_add(1);
        self.property_bytes = self.property_bytes.saturating_add(name.len()).saturating_add(content.len());
        Ok(())
    }

    fn system<const STRICT: bool>(&mut self, encoded: &'a [u8]) -> Result<(), Invalid> {
        let mut reader = Reader(encoded);
        while let Some((number, value)) = reader.next("system_properties")? {
            match number {
                1 => self.tag = Some(value.text("system_properties.tag")?),
                2 => {
                    let key = value.text("system_properties.keys")?;
                    match self.keys.get_mut(self.key_count) {
                        Some(place) => {
                            *place = key;
                            self.key_count = self.key_count.saturating_add(1);
                        }
                        None if STRICT => {
                            return Err(Invalid::new(
                                "system_properties.keys",
                                format!("has more than {MAX_KEYS} entries; use at most {MAX_KEYS}"),
                            ));
                        }
                        None => {}
                    }
                }
                3 => self.id = Some(value.text("system_properties.message_id")?).filter(|id| !id.is_empty()),
                5 => value.number("system_properties.body_encoding").map(drop)?,
                6 => self.kind_number = value.number("system_properties.message_type")?,
                7 => timestamp(&value, "system_properties.born_timestamp")?,
                8 => self.born_host = value.text("system_properties.born_host")?,
                9 => timestamp(&value, "system_properties.store_timestamp")?,
                10 => value.text("system_properties.store_host").map(drop)?,
                13 => value.number("system_properties.queue_id").map(drop)?,
                14 => value.number("system_properties.queue_offset").map(drop)?,
                17 => self.group = Some(value.text("system_properties.message_group")?),
                18 => self.trace_context = value.text("system_properties.trace_context")?,
                101 => value.number("system_properties.flag").map(drop)?,
                102 => value.number("system_properties.log_position").map(drop)?,
                4 | 11 | 12 | 15 | 16 | 19..=22 if STRICT => {
                    let field = format!("system_properties.{}", refused_name(number));
                    return Err(Invalid::new(field, "is not supported by Send; leave it out"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The limits, on what the merged message has.
    fn check(&mut self, encoded_bytes: usize) -> Result<(), EnvelopeError> {
        if self.body_bytes == 0 {
            return Err(EnvelopeError::BodyEmpty);
        }
        if self.body_bytes > MAX_BODY_BYTES {
            return Err(EnvelopeError::BodyTooLarge(self.body_bytes));
        }
        let beside = encoded_bytes.saturating_sub(self.body_bytes);
        if beside > MAX_BESIDE_BODY_BYTES {
            let problem = format!(
                "has {beside} bytes beside the body, over the limit of {MAX_BESIDE_BODY_BYTES}; shorten it"
            );
            return Err(Invalid::new("", problem).into());
        }
        if let Some(tag) = self.tag {
            check_tag("system_properties.tag", tag)?;
        }
        for (at, key) in self.keys().iter().enumerate() {
            let field = || format!("system_properties.keys[{at}]");
            check_length(field, key, 1, MAX_TAG_BYTES)?;
            check_no_control(field, key)?;
        }
        if let Some(id) = self.id {
            check_id("system_properties.message_id", id)?;
        }
        if let Some(group) = self.group {
            check_length(|| "system_properties.message_group".to_owned(), group, 1, MAX_GROUP_BYTES)?;
        }
        check_length(
            || "system_properties.trace_context".to_owned(),
            self.trace_context,
            0,
            MAX_TRACE_BYTES,
        )?;
        check_length(|| "system_properties.born_host".to_owned(), self.born_host, 0, MAX_HOST_BYTES)?;
        self.kind = kind(self.kind_number).ok_or_else(|| {
            let seen = self.kind_number;
            Invalid::new(
                "system_properties.message_type",
                format!("is {seen}; use NORMAL (1), FIFO (2) or leave it out"),
            )
        })?;
        self.check_properties()?;
        Ok(())
    }

    fn check_properties(&self) -> Result<(), Invalid> {
        if self.properties > MAX_PROPERTIES {
            let problem = format!("has {} entries, over the limit of {MAX_PROPERTIES}", self.properties);
            return Err(Invalid::new("user_properties", problem));
        }
        let keys: usize = self.keys().iter().fold(0, |sum, key| sum.saturating_add(key.len()));
        let bytes = self.property_bytes.saturating_add(self.tag.map_or(0, str::len)).saturating_add(keys);
        if bytes > MAX_PROPERTIES_BYTES {
            let problem = format!(
                "has {bytes} bytes together with tag and keys, over the limit of {MAX_PROPERTIES_BYTES}; put large data into the body"
            );
            return Err(Invalid::new("user_properties", problem));
        }
        Ok(())
    }
}

/// The rule for tags, of messages and in filters.
pub(super) fn check_tag(field: &str, tag: &str) -> Result<(), Invalid> {
    check_length(|| field.to_owned(), tag, 1, MAX_TAG_BYTES)?;
    check_no_control(|| field.to_owned(), tag)?;
    if tag.contains('|') {
        return Err(Invalid::new(
            field,
            "contains `|`, which separates tags in a filter; use another character",
        ));
    }
    if tag.trim().is_empty() {
        return Err(Invalid::new(field, "has only spaces; name the tag or leave it out"));
    }
    Ok(())
}

/// The rule for message ids.
pub fn check_id(field: &str, id: &str) -> Result<(), Invalid> {
    check_length(|| field.to_owned(), id, 1, MAX_ID_BYTES)?;
    match id.chars().find(|c| !matches!(c, ' '..='~')) {
        None => Ok(()),
        Some(c) => Err(Invalid::new(field, format!("contains {c:?}; use printable ASCII characters only"))),
    }
}

/// The rule for keys.
pub fn check_key(field: &str, key: &str) -> Result<(), Invalid> {
    check_length(|| field.to_owned(), key, 1, MAX_TAG_BYTES)?;
    check_no_control(|| field.to_owned(), key)
}

fn check_property_name(name: &str) -> Result<(), Invalid> {
    if (1..=MAX_PROPERTY_NAME_BYTES).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(());
    }
    let shown: String = name.chars().take(32).collect();
    Err(Invalid::new(
        "user_properties",
        format!(
            "has the name {shown:?}; use 1 to {MAX_PROPERTY_NAME_BYTES} printable ASCII characters without spaces"
        ),
    ))
}

fn check_length(field: impl Fn() -> String, text: &str, min: usize, max: usize) -> Result<(), Invalid> {
    if text.len() < min {
        return Err(Invalid::new(field(), format!("is empty; use 1 to {max} bytes or leave it out")));
    }
    if text.len() > max {
        let problem = format!("has {} bytes, over the limit of {max}; shorten it", text.len());
        return Err(Invalid::new(field(), problem));
    }
    Ok(())
}

fn check_no_control(field: impl Fn() -> String, text: &str) -> Result<(), Invalid> {
    match text.chars().find(|c| c.is_control()) {
        None => Ok(()),
        Some(c) => Err(Invalid::new(field(), format!("contains the control character {c:?}; leave it out"))),
    }
}

fn kind(number: u64) -> Option<MessageKind> {
    match number {
        0 => Some(MessageKind::Unspecified),
        1 => Some(MessageKind::Normal),
        2 => Some(MessageKind::Fifo),
        _ => None,
    }
}

/// Names in `apache.rocketmq.v2` of what Send refuses.
fn refused_name(number: u32) -> &'static str {
    match number {
        4 => "body_digest",
        11 => "delivery_timestamp",
        12 => "receipt_handle",
        15 => "invisible_duration",
        16 => "delivery_attempt",
        19 => "orphaned_transaction_recovery_duration",
        20 => "dead_letter_queue",
        21 => "lite_topic",
        _ => "priority",
    }
}

/// A `google.protobuf.Timestamp`, only looked at for its form.
fn timestamp(value: &Value<'_>, field: &str) -> Result<(), Invalid> {
    let mut reader = Reader(value.bytes(field)?);
    while let Some((number, value)) = reader.next(field)? {
        if matches!(number, 1 | 2) {
            value.number(field)?;
        }
    }
    Ok(())
}

// ---- Reading ------------------------------------------------------------------------------------

/// The content of a field.
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed,
}

impl<'a> Value<'a> {
    fn number(&self, field: &str) -> Result<u64, Invalid> {
        match self {
            Self::Number(number) => Ok(*number),
            _ => Err(wrong_type(field)),
        }
    }

    fn bytes(&self, field: &str) -> Result<&'a [u8], Invalid> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(wrong_type(field)),
        }
    }

    fn text(&self, field: &str) -> Result<&'a str, Invalid> {
        std::str::from_utf8(self.bytes(field)?).map_err(|error| {
            Invalid::new(field, format!("is not UTF-8 from byte {} on", error.valid_up_to()))
        })
    }
}

fn wrong_type(field: &str) -> Invalid {
    Invalid::new(field, "has the wrong protobuf wire type; encode it by holdfast/v1/message.proto")
}

fn malformed(field: &str, problem: &str) -> Invalid {
    Invalid::new(field, format!("is not valid protobuf: {problem}"))
}

/// What is left of an encoded message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// The next field; `within` is the path of the message that is read.
    fn next(&mut self, within: &str) -> Result<Option<(u32, Value<'a>)>, Invalid> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = self.varint(within)?;
        let number = u32::try_from(key >> 3).unwrap_or(u32::MAX);
        if number == 0 || number > 0x1fff_ffff {
            return Err(malformed(within, "a field number is out of range"));
        }
        let value = match key & 7 {
            0 => Value::Number(self.varint(within)?),
            1 => self.take(8, within).map(|_| Value::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint(within)?).unwrap_or(usize::MAX);
                Value::Bytes(self.take(length, within)?)
            }
            5 => self.take(4, within).map(|_| Value::Fixed)?,
            3 | 4 => return Err(malformed(within, "groups are not supported")),
            _ => return Err(malformed(within, "unknown wire type")),
        };
        Ok(Some((number, value)))
    }

    fn take(&mut self, length: usize, within: &str) -> Result<&'a [u8], Invalid> {
        let (taken, rest) = self
            .0
            .split_at_checked(length)
            .ok_or_else(|| malformed(within, "a field ends behind its message"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn varint(&mut self, within: &str) -> Result<u64, Invalid> {
        let mut value = 0_u64;
        for shift in (0..70).step_by(7) {
            let (&byte, rest) =
                self.0.split_first().ok_or_else(|| malformed(within, "a number ends behind its message"))?;
            self.0 = rest;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(malformed(within, "a number is longer than 64 bits"))
    }
}

// ---- Server fields ------------------------------------------------------------------------------

/// Fields that the broker adds to a message.
#[derive(Clone, Copy, Debug)]
pub struct ServerFields<'a> {
    /// The id, if the producer set none; at most [`MAX_ID_BYTES`].
    pub id: Option<&'a str>,
    /// Store time, milliseconds since 1970.
    pub store_ms: u64,
    /// Name of the shard.
    pub store_host: &'a str,
    /// Queue of the topic.
    pub queue: u32,
    /// Place in the queue.
    pub offset: u64,
    /// Place in the log.
    pub position: u64,
}

/// The same message with all fragments of its system properties in one, which is what they stand for.
pub fn merge_fragments(encoded: &[u8]) -> Bytes {
    let (mut merged, mut system) = (BytesMut::with_capacity(encoded.len()), BytesMut::new());
    let (mut reader, mut start) = (Reader(encoded), 0);
    while let Ok(Some((number, value))) = reader.next("") {
        let end = encoded.len().saturating_sub(reader.0.len());
        match value {
            Value::Bytes(content) if number == 3 => system.put_slice(content),
            _ => merged.put_slice(encoded.get(start..end).unwrap_or_default()),
        }
        start = end;
    }
    put_key(3, 2, &mut merged);
    put_varint(system.len() as u64, &mut merged);
    merged.put_slice(&system);
    merged.freeze()
}

/// Appends the system properties: what the client set (`system`), then the server's fields, with every
/// scalar, zeros too.
pub fn append_server_fields(fields: &ServerFields<'_>, system: &[u8], into: &mut BytesMut) {
    let seconds = fields.store_ms / 1000;
    let nanos = (fields.store_ms % 1000).saturating_mul(1_000_000);
    let time = field_bytes(1, seconds).saturating_add(field_bytes(2, nanos));
    let length = fields
        .id
        .map_or(0, |id| text_bytes(3, id))
        .saturating_add(system.len())
        .saturating_add(2)
        .saturating_add(time)
        .saturating_add(text_bytes(10, fields.store_host))
        .saturating_add(field_bytes(13, u64::from(fields.queue)))
        .saturating_add(field_bytes(14, fields.offset))
        .saturating_add(field_bytes(102, fields.position));
    into.reserve(length.saturating_add(8));
    put_key(3, 2, into);
    put_varint(length as u64, into);
    into.put_slice(system);
    if let Some(id) = fields.id {
        put_text(3, id, into);
    }
    put_key(9, 2, into);
    put_varint(time as u64, into);
    put_number(1, seconds, into);
    put_number(2, nanos, into);
    put_text(10, fields.store_host, into);
    put_number(13, u64::from(fields.queue), into);
    put_number(14, fields.offset, into);
    put_number(102, fields.position, into);
}

/// Most bytes that [`append_server_fields`] adds for a shard of that name, beside what the client set.
pub fn server_fields_bytes_max(store_host: &str) -> usize {
    const NUMBERS: usize = 80;
    NUMBERS.saturating_add(MAX_ID_BYTES).saturating_add(store_host.len())
}

fn varint_bytes(value: u64) -> usize {
    // 7 bits a byte; 0 takes one too.
    let bits = 64_u32.saturating_sub((value | 1).leading_zeros());
    bits.div_ceil(7) as usize
}

fn field_bytes(number: u32, value: u64) -> usize {
    varint_bytes(u64::from(number) << 3).saturating_add(varint_bytes(value))
}

fn text_bytes(number: u32, text: &str) -> usize {
    field_bytes(number, text.len() as u64).saturating_add(text.len())
}

fn put_varint(mut value: u64, into: &mut BytesMut) {
    while value >= 0x80 {
        into.put_u8((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    into.put_u8(value as u8);
}

fn put_key(number: u32, wire_type: u32, into: &mut BytesMut) {
    put_varint(u64::from(number << 3 | wire_type), into);
}

fn put_number(number: u32, value: u64, into: &mut BytesMut) {
    put_key(number, 0, into);
    put_varint(value, into);
}

fn put_text(number: u32, text: &str, into: &mut BytesMut) {
    put_key(number, 2, into);
    put_varint(text.len() as u64, into);
    into.put_slice(text.as_bytes());
}

#[cfg(test)]
mod tests;
