//! Fixed-width little-endian fields, bounds-checked on the way in.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

/// Reads fields off a byte slice; `None` once anything is missing.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(n)?;
        self.rest = rest;
        Some(head)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A text with its length (u16) in front.
    pub fn text(&mut self) -> Option<&'a str> {
        let length = self.u16()?;
        std::str::from_utf8(self.bytes(usize::from(length))?).ok()
    }

    /// Whether everything was read.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

/// Appends fields.
pub trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }
    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
    /// A text of at most 65 535 bytes with its length in front; longer ones are cut, names never are.
    fn put_text(&mut self, text: &str) {
        let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
        self.put_u16(length);
        self.put(text.as_bytes().get(..usize::from(length)).unwrap_or_default());
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Rounds up to the alignment of frames and records.
pub const fn align8(n: usize) -> usize {
    n.saturating_add(7) & !7
}
