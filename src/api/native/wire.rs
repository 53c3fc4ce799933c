//! Protobuf, read as far as the hot calls need it: a walk over the fields of one message that copies nothing.

use prost::encoding::decode_varint;

use crate::model::Invalid;

/// The value of one field.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// Of a fixed size; no field that is read here has one.
    Fixed,
}

/// The fields of one message that are not read yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    /// Number and value of the next field.
    pub(super) fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, Invalid> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let Ok(number) = u32::try_from(key >> 3) else {
            return Err(malformed("a field number is too large"));
        };
        if number == 0 || number > MAX_FIELD_NUMBER {
            return Err(malformed("a field number is out of range"));
        }
        let value = match key & 7 {
            0 => Value::Varint(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint()?).unwrap_or(usize::MAX);
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            _ => return Err(malformed("a field has a wire type that is not supported")),
        };
        Ok(Some((number, value)))
    }

    fn varint(&mut self) -> Result<u64, Invalid> {
        decode_varint(&mut self.0).map_err(|_| malformed("a number is cut off or too large"))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Invalid> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or_else(|| malformed("a field is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }
}

/// Highest number protobuf allows.
const MAX_FIELD_NUMBER: u32 = (1 << 29) - 1;

impl<'a> Value<'a> {
    pub(super) fn bytes(self, field: &str) -> Result<&'a [u8], Invalid> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Varint(_) | Self::Fixed => Err(wrong_type(field)),
        }
    }

    pub(super) fn text(self, field: &str) -> Result<String, Invalid> {
        match std::str::from_utf8(self.bytes(field)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(Invalid::new(field, "is not valid UTF-8")),
        }
    }

    pub(super) fn u64(self, field: &str) -> Result<u64, Invalid> {
        match self {
            Self::Varint(number) => Ok(number),
            Self::Bytes(_) | Self::Fixed => Err(wrong_type(field)),
        }
    }

    pub(super) fn i64(self, field: &str) -> Result<i64, Invalid> {
        self.u64(field).map(u64::cast_signed)
    }

    pub(super) fn i32(self, field: &str) -> Result<i32, Invalid> {
        let number = self.i64(field)?;
        i32::try_from(number).map_err(|_| Invalid::new(field, format!("is {number}, which is out of range")))
    }

    /// Protobuf would cut off the upper half; a queue that nobody named is worse than an error.
    pub(super) fn u32(self, field: &str) -> Result<u32, Invalid> {
        let number = self.u64(field)?;
        u32::try_from(number)
            .map_err(|_| Invalid::new(field, format!("is {}; use 0 to {}", number.cast_signed(), u32::MAX)))
    }
}

fn malformed(problem: &str) -> Invalid {
    Invalid::new("request", format!("is not a valid protobuf message: {problem}"))
}

fn wrong_type(field: &str) -> Invalid {
    Invalid::new(field, "has the wrong wire type; is the client's .proto the current one?")
}
