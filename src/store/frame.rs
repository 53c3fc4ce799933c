//! Frames and records, the units of the log.
//!
//! A frame is what becomes part of the log together or not at all. It lies in one segment, starts at a
//! position divisible by 8, and holds 0 to 65 535 records. All numbers are little-endian.
//!
//! | at | bytes | frame header | meaning |
//! |---:|---:|---|---|
//! |  0 | 2 | magic | `HF` |
//! |  2 | 1 | format | [`FORMAT`] |
//! |  3 | 1 | kind | [`FrameKind`] |
//! |  4 | 4 | length | of the frame with this header, divisible by 8 |
//! |  8 | 8 | position | where the frame starts in the log |
//! | 16 | 8 | durable mark | everything below was synced when the frame was written |
//! | 24 | 8 | store time | milliseconds since 1970, never falling along the log |
//! | 32 | 4 | epoch | of the writer, never falling along the log |
//! | 36 | 2 | records | how many follow |
//! | 38 | 6 | – | zero |
//! | 44 | 4 | checksum | CRC-32C of shard id and bytes 0–43 |
//!
//! | at | bytes | record header | meaning |
//! |---:|---:|---|---|
//! |  0 | 4 | length | of the payload |
//! |  4 | 4 | payload checksum | CRC-32C of payload and look-ups |
//! |  8 | 1 | kind | [`RecordKind`] |
//! |  9 | 1 | flags | 1: relocated, the offset was assigned by an earlier record |
//! | 10 | 1 | look-ups | how many 8-byte hashes follow the header |
//! | 11 | 1 | – | zero |
//! | 12 | 4 | queue | number of the queue (messages) |
//! | 16 | 8 | topic | topic id (messages) |
//! | 24 | 8 | offset | queue offset (messages) |
//! | 32 | 8 | tag hash | 0: no tag (messages) |
//! | 40 | 8 | store time | milliseconds since 1970 |
//! | 48 | 4 | epoch | as in the frame |
//! | 52 | 4 | checksum | CRC-32C of shard id, own position and bytes 0–51 |
//!
//! Then the look-ups, the payload, and zeros up to the next multiple of 8.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use super::codec::{Put, Reader, align8};

/// Version of the log's format. Logs of a newer one are refused.
pub const FORMAT: u8 = 1;
/// Bytes of a frame header.
pub const FRAME_HEADER: usize = 48;
/// Bytes of a record header.
pub const RECORD_HEADER: usize = 56;
/// Most records in a frame.
pub const MAX_RECORDS: usize = u16::MAX as usize;
/// Flag of a record that was copied forward.
pub const RELOCATED: u8 = 1;

const MAGIC: [u8; 2] = *b"HF";
const FRAME_CRC_AT: usize = 44;
const RECORD_CRC_AT: usize = 52;
const _: () = assert!(FRAME_CRC_AT + 4 == FRAME_HEADER && RECORD_CRC_AT + 4 == RECORD_HEADER);

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// Holds records.
    Data,
    /// Holds nothing; carries a durable mark while the log is idle.
    Mark,
    /// The rest of the segment is unused; the log goes on at the start of the next.
    Pad,
}

impl FrameKind {
    const fn code(self) -> u8 {
        match self {
            Self::Data => 1,
            Self::Mark => 2,
            Self::Pad => 3,
        }
    }

    const fn of(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Data),
            2 => Some(Self::Mark),
            3 => Some(Self::Pad),
            _ => None,
        }
    }
}

/// What a record says. Numbers are for ever; those not listed are refused.
///
/// Room is kept: 32–39 leases and receipts, 40–47 timers, 48–55 transactions, 56–63 producers' windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// A message in a queue.
    Message,
    /// A writer began: epoch, boot id, version.
    Opened,
    /// A writer ended cleanly; everything before is durable.
    Closed,
    /// A topic is there, with these settings.
    Topic,
    /// A topic is gone.
    TopicDeleted,
    /// A group is there, with these settings.
    Group,
    /// A group is gone.
    GroupDeleted,
    /// A group's progress on queues.
    Progress,
    /// First offset of a queue, moved by retention; or its end, moved past lost offsets.
    Bounds,
    /// Offsets that readers of an async queue may see before they are durable.
    Reserved,
    /// Up to where retention may have removed the log.
    Trimmed,
}

impl RecordKind {
    /// The number on disk.
    pub const fn code(self) -> u8 {
        match self {
            Self::Message => 1,
            Self::Opened => 2,
            Self::Closed => 3,
            Self::Topic => 10,
            Self::TopicDeleted => 11,
            Self::Group => 12,
            Self::GroupDeleted => 13,
            Self::Progress => 14,
            Self::Bounds => 15,
            Self::Reserved => 16,
            Self::Trimmed => 17,
        }
    }

    /// The kind with this number.
    pub const fn of(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Message,
            2 => Self::Opened,
            3 => Self::Closed,
            10 => Self::Topic,
            11 => Self::TopicDeleted,
            12 => Self::Group,
            13 => Self::GroupDeleted,
            14 => Self::Progress,
            15 => Self::Bounds,
            16 => Self::Reserved,
            17 => Self::Trimmed,
            _ => return None,
        })
    }
}

/// Starts every checksum of a shard, so that another shard's bytes never look valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(u32);

impl Seed {
    pub fn new(shard_id: u64) -> Self {
        Self(crc32c::crc32c(&shard_id.to_le_bytes()))
    }

    fn frame(self, header: &[u8]) -> u32 {
        crc32c::crc32c_append(self.0, header)
    }

    fn record(self, position: u64, header: &[u8]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c_append(self.0, &position.to_le_bytes()), header)
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub kind: FrameKind,
    pub length: u32,
    pub position: u64,
    pub durable: u64,
    pub store_ms: u64,
    pub epoch: u32,
    pub records: u16,
}

/// Why bytes are not a frame or record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// Not one, or damaged.
    Damaged,
    /// One of a newer version: format or kind number.
    Newer(u8),
}

impl FrameHeader {
    pub fn encode(&self, seed: Seed) -> [u8; FRAME_HEADER] {
        let mut bytes = Vec::with_capacity(FRAME_HEADER);
        bytes.put(&MAGIC);
        bytes.put_u8(FORMAT);
        bytes.put_u8(self.kind.code());
        bytes.put_u32(self.length);
        bytes.put_u64(self.position);
        bytes.put_u64(self.durable);
        bytes.put_u64(self.store_ms);
        bytes.put_u32(self.epoch);
        bytes.put_u16(self.records);
        bytes.put(&[0; 6]);
        let crc = seed.frame(&bytes);
        bytes.put_u32(crc);
        bytes.try_into().unwrap_or([0; FRAME_HEADER])
    }

    /// Reads the header at `position`; the checksum, the position and the length must fit.
    pub fn decode(seed: Seed, position: u64, bytes: &[u8]) -> Result<Self, Bad> {
        let (header, _) = bytes.split_at_checked(FRAME_HEADER).ok_or(Bad::Damaged)?;
        Self::fields(seed, position, header).unwrap_or(Err(Bad::Damaged))
    }

    fn fields(seed: Seed, position: u64, header: &[u8]) -> Option<Result<Self, Bad>> {
        let mut reader = Reader::new(header);
        if reader.array()? != MAGIC {
            return None;
        }
        let (format, kind) = (reader.u8()?, reader.u8()?);
        let length = reader.u32()?;
        let at = reader.u64()?;
        let (durable, store_ms) = (reader.u64()?, reader.u64()?);
        let (epoch, records) = (reader.u32()?, reader.u16()?);
        reader.bytes(6)?;
        if reader.u32()? != seed.frame(header.get(..FRAME_CRC_AT)?) || at != position {
            return None;
        }
        if format != FORMAT {
            return Some(Err(Bad::Newer(format)));
        }
        let Some(kind) = FrameKind::of(kind) else { return Some(Err(Bad::Newer(kind))) };
        if (length as usize) < FRAME_HEADER || !length.is_multiple_of(8) || !position.is_multiple_of(8) {
            return None;
        }
        Some(Ok(Self { kind, length, position, durable, store_ms, epoch, records }))
    }
}

/// A record's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    pub kind: RecordKind,
    pub flags: u8,
    pub length: u32,
    pub payload_crc: u32,
    pub lookups: u8,
    pub queue: u32,
    pub topic: u64,
    pub offset: u64,
    pub tag_hash: u64,
    pub store_ms: u64,
    pub epoch: u32,
}

impl RecordHeader {
    pub fn encode(&self, seed: Seed, position: u64) -> [u8; RECORD_HEADER] {
        let mut bytes = [0u8; RECORD_HEADER];
        let mut at = 0usize;
        let mut put = |field: &[u8]| {
            let end = at.saturating_add(field.len());
            if let Some(place) = bytes.get_mut(at..end) {
                place.copy_from_slice(field);
            }
            at = end;
        };
        put(&self.length.to_le_bytes());
        put(&self.payload_crc.to_le_bytes());
        put(&[self.kind.code(), self.flags, self.lookups, 0]);
        put(&self.queue.to_le_bytes());
        put(&self.topic.to_le_bytes());
        put(&self.offset.to_le_bytes());
        put(&self.tag_hash.to_le_bytes());
        put(&self.store_ms.to_le_bytes());
        put(&self.epoch.to_le_bytes());
        let crc = seed.record(position, bytes.get(..RECORD_CRC_AT).unwrap_or_default());
        if let Some(place) = bytes.get_mut(RECORD_CRC_AT..) {
            place.copy_from_slice(&crc.to_le_bytes());
        }
        bytes
    }

    /// Reads the header at `position`; the checksum must fit.
    pub fn decode(seed: Seed, position: u64, bytes: &[u8]) -> Result<Self, Bad> {
        let (header, _) = bytes.split_at_checked(RECORD_HEADER).ok_or(Bad::Damaged)?;
        Self::fields(seed, position, header).unwrap_or(Err(Bad::Damaged))
    }

    fn fields(seed: Seed, position: u64, header: &[u8]) -> Option<Result<Self, Bad>> {
        let mut reader = Reader::new(header);
        let (length, payload_crc) = (reader.u32()?, reader.u32()?);
        let (kind, flags, lookups, _) = (reader.u8()?, reader.u8()?, reader.u8()?, reader.u8()?);
        let queue = reader.u32()?;
        let (topic, offset, tag_hash) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (store_ms, epoch) = (reader.u64()?, reader.u32()?);
        if reader.u32()? != seed.record(position, header.get(..RECORD_CRC_AT)?) {
            return None;
        }
        let Some(kind) = RecordKind::of(kind) else { return Some(Err(Bad::Newer(kind))) };
        let record = Self {
            kind,
            flags,
            length,
            payload_crc,
            lookups,
            queue,
            topic,
            offset,
            tag_hash,
            store_ms,
            epoch,
        };
        Some(Ok(record))
    }

    /// Bytes of the whole record.
    pub fn total(&self) -> usize {
        record_bytes(self.lookups, self.length as usize)
    }
}

/// Bytes of a record with this many look-ups and payload bytes.
pub fn record_bytes(lookups: u8, payload: usize) -> usize {
    align8(RECORD_HEADER.saturating_add(usize::from(lookups).saturating_mul(8)).saturating_add(payload))
}

/// Checksum of look-ups and payload, given that of the payload alone.
pub fn payload_crc(payload: u32, lookups: &[u8]) -> u32 {
    crc32c::crc32c_append(payload, lookups)
}

/// A whole record as it stands in the log.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    pub position: u64,
    pub header: RecordHeader,
    pub lookups: &'a [u8],
    pub payload: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads the record at `position`, of which `bytes` begins. `Err` says how far its header could be
    /// trusted: with a header the place of a damaged message is known.
    pub fn decode(seed: Seed, position: u64, bytes: &'a [u8]) -> Result<Self, (Bad, Option<RecordHeader>)> {
        let header = RecordHeader::decode(seed, position, bytes).map_err(|bad| (bad, None))?;
        let mut reader = Reader::new(bytes);
        let parts = reader.bytes(RECORD_HEADER).and_then(|_| {
            let lookups = reader.bytes(usize::from(header.lookups).saturating_mul(8))?;
            Some((lookups, reader.bytes(header.length as usize)?))
        });
        let (lookups, payload) = parts.ok_or((Bad::Damaged, None))?;
        if payload_crc(crc32c::crc32c(payload), lookups) != header.payload_crc {
            return Err((Bad::Damaged, Some(header)));
        }
        Ok(Self { position, header, lookups, payload })
    }

    /// The look-up hashes.
    pub fn hashes(&self) -> impl Iterator<Item = u64> + 'a {
        self.lookups.as_chunks::<8>().0.iter().map(|&hash| u64::from_le_bytes(hash))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame() -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Data,
            length: 4096,
            position: 0x0102_0304_0506_0708,
            durable: 77,
            store_ms: 1_764_547_200_000,
            epoch: 9,
            records: 3,
        }
    }

    fn record() -> RecordHeader {
        RecordHeader {
            kind: RecordKind::Message,
            flags: 0,
            length: 11,
            payload_crc: 0xdead_beef,
            lookups: 2,
            queue: 7,
            topic: 4096,
            offset: 812,
            tag_hash: 0x1122_3344_5566_7788,
            store_ms: 1_764_547_200_000,
            epoch: 9,
        }
    }

    #[test]
    fn the_bytes_on_disk_are_those_of_format_1() {
        let seed = Seed::new(42);
        let mut bytes = frame().encode(seed).to_vec();
        bytes.extend_from_slice(&record().encode(seed, 640));
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/frame-v1.bin");
        if std::env::var_os("HOLDFAST_WRITE_GOLDEN").is_some() {
            std::fs::write(path, &bytes).unwrap();
        }
        assert_eq!(bytes, std::fs::read(path).unwrap());
    }

    #[test]
    fn a_header_of_another_shard_or_place_is_not_accepted() {
        let seed = Seed::new(42);
        let bytes = frame().encode(seed);
        assert_eq!(FrameHeader::decode(seed, frame().position, &bytes), Ok(frame()));
        assert_eq!(FrameHeader::decode(Seed::new(43), frame().position, &bytes), Err(Bad::Damaged));
        assert_eq!(FrameHeader::decode(seed, frame().position + 8, &bytes), Err(Bad::Damaged));
        let bytes = record().encode(seed, 640);
        assert_eq!(RecordHeader::decode(seed, 640, &bytes), Ok(record()));
        assert_eq!(RecordHeader::decode(seed, 648, &bytes), Err(Bad::Damaged));
    }

    #[test]
    fn a_newer_format_is_told_from_damage() {
        let seed = Seed::new(42);
        let mut bytes = frame().encode(seed);
        bytes[2] = FORMAT + 1;
        assert_eq!(FrameHeader::decode(seed, frame().position, &bytes), Err(Bad::Damaged));
        let crc = seed.frame(&bytes[..FRAME_CRC_AT]);
        bytes[FRAME_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(FrameHeader::decode(seed, frame().position, &bytes), Err(Bad::Newer(FORMAT + 1)));
    }

    proptest! {
        #[test]
        fn any_flip_in_a_header_is_seen(at in 0usize..FRAME_HEADER + RECORD_HEADER, bit in 0u8..8) {
            let seed = Seed::new(1);
            let (mut f, mut r) = (frame().encode(seed), record().encode(seed, 640));
            if at < FRAME_HEADER {
                f[at] ^= 1 << bit;
                prop_assert!(FrameHeader::decode(seed, frame().position, &f).is_err());
            } else {
                r[at - FRAME_HEADER] ^= 1 << bit;
                prop_assert!(RecordHeader::decode(seed, 640, &r).is_err());
            }
        }

        #[test]
        fn arbitrary_bytes_are_never_trusted(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(FrameHeader::decode(Seed::new(1), 0, &bytes).is_err());
            prop_assert!(Record::decode(Seed::new(1), 0, &bytes).is_err());
        }
    }
}
