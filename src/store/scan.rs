//! Reads the log from a position to its end, telling damage from a torn end.
//!
//! A place that is not a frame is *damage* if a later frame says that the place was durable when it was
//! written; then the log goes on at the next frame. If no frame says so the place is the *torn end* of
//! the log, whatever a crash happened to keep behind it. Until it is known which, what follows is only
//! remembered.

use std::{collections::VecDeque, io, sync::Arc};

use super::{
    frame::{Bad, FRAME_HEADER, FrameHeader, FrameKind, RECORD_HEADER, Record, RecordHeader, Seed},
    segment::{Segment, Segments},
};

/// Read at once while nothing is wrong.
const CHUNK: usize = 1 << 20;
/// Read at once where something is.
const PIECE: usize = 4096;
/// After a clean stop this many zeros behind the last frame are taken for the end.
const CLEAN_ZEROS: usize = 64 << 10;

/// Hears what the log holds, in order.
pub trait Sink {
    /// An intact record.
    fn record(&mut self, record: &Record<'_>);
    /// A message whose place is known but whose payload is damaged.
    fn lost_message(&mut self, position: u64, header: &RecordHeader);
    /// Records may be lost here, and nothing says which.
    fn unknown(&mut self, _begin: u64, _end: u64) {}
    /// A damaged stretch of the log, in a file.
    fn damage(&mut self, file: String, begin: u64, end: u64, text: &str);
    /// How far the scan is.
    fn progress(&mut self, position: u64);
}

/// Where the log ends and what its last frames say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// Position behind the last frame.
    pub position: u64,
    /// Highest epoch.
    pub epoch: u32,
    /// Highest store time.
    pub store_ms: u64,
    /// Highest durable mark.
    pub mark: u64,
    /// Something that is not part of the log follows, up to here.
    pub torn: Option<u64>,
    /// The last record says that the writer ended cleanly.
    pub clean: bool,
}

/// Why a log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    #[error(
        "{file}: frame at {position} has format or kind {found}, newer than this version knows; use the version that wrote it"
    )]
    Newer { file: String, position: u64, found: u8 },
    #[error("{file}: {error}")]
    Io { file: String, error: io::Error },
}

/// One pass over a log.
pub struct Scan<'a, S> {
    segments: &'a Segments,
    seed: Seed,
    sink: &'a mut S,
    buffer: Vec<u8>,
    /// Position of the buffer's first byte.
    at: u64,
    end: End,
    /// From here on frames have at least this epoch.
    floor: (u64, u32),
    doubt: Option<Doubt>,
    /// The scan may end at the first frame that begins here or behind.
    until: u64,
    /// What the device would not read.
    unreadable: Vec<Unreadable>,
}

/// A stretch that the device would not read. It was taken for zeros.
struct Unreadable {
    begin: u64,
    end: u64,
    error: io::Error,
}

/// A place that is damage or the end, and what follows it.
struct Doubt {
    at: u64,
    steps: VecDeque<Step>,
    /// Highest epoch among them.
    epoch: u32,
}

#[derive(Clone, Copy)]
enum Step {
    /// No frame from here to there.
    Gap(u64, u64),
    /// A frame, some records of which are damaged.
    Broken(FrameHeader),
    /// An intact frame.
    Intact(FrameHeader),
}

impl Step {
    fn begin(&self) -> u64 {
        match self {
            Self::Gap(begin, _) => *begin,
            Self::Broken(frame) | Self::Intact(frame) => frame.position,
        }
    }
}

impl<'a, S: Sink> Scan<'a, S> {
    /// `floor`: from that position on frames have at least that epoch, as a snapshot knows.
    pub fn new(segments: &'a Segments, seed: Seed, floor: (u64, u32), sink: &'a mut S) -> Self {
        Self {
            segments,
            seed,
            sink,
            buffer: Vec::new(),
            at: 0,
            end: End::default(),
            floor,
            doubt: None,
            until: u64::MAX,
            unreadable: Vec::new(),
        }
    }

    /// Ends the scan at the first frame that begins at or behind `position`, for a part of the log.
    pub fn until(mut self, position: u64) -> Self {
        self.until = position;
        self
    }

    /// Reads from `from`, a place where a frame begins or the log ends.
    pub fn run(mut self, from: u64) -> Result<End, ScanError> {
        let mut position = from;
        self.end.position = from;
        let mut told = from;
        loop {
            if position >= self.until && self.doubt.is_none() {
                return Ok(self.end);
            }
            if position.saturating_sub(told) >= 64 << 20 {
                told = position;
                self.sink.progress(position);
            }
            match self.frame_at(position)? {
                Some(frame) => {
                    self.settle(frame.durable)?;
                    let intact = self.is_intact(&frame)?;
                    let next = self.behind(&frame);
                    match &mut self.doubt {
                        None if intact => self.accept(&frame, next)?,
                        None => {
                            let steps = VecDeque::from([Step::Broken(frame)]);
                            self.doubt = Some(Doubt { at: position, steps, epoch: frame.epoch });
                        }
                        Some(doubt) => {
                            doubt.epoch = doubt.epoch.max(frame.epoch);
                            doubt.steps.push_back(if intact {
                                Step::Intact(frame)
                            } else {
                                Step::Broken(frame)
                            });
                        }
                    }
                    position = next;
                }
                None => {
                    let epoch = self.end.epoch;
                    self.doubt.get_or_insert_with(|| Doubt { at: position, steps: VecDeque::new(), epoch });
                    let undisturbed = self.doubt.as_ref().is_some_and(|doubt| doubt.steps.is_empty());
                    if self.end.clean && undisturbed && self.only_zeros_follow(position)? {
                        break;
                    }
                    let Some(next) = self.search(position + 8)? else {
                        self.refuse_unreadable_end()?;
                        break;
                    };
                    if let Some(doubt) = &mut self.doubt {
                        doubt.steps.push_back(Step::Gap(position, next));
                    }
                    position = next;
                }
            }
        }
        // What is in doubt now is the torn end. Damage below the mark was settled before.
        if let Some(doubt) = self.doubt.take() {
            let rest = doubt.steps.back().map(|step| match step {
                Step::Gap(_, end) => *end,
                Step::Broken(frame) | Step::Intact(frame) => frame.position + u64::from(frame.length),
            });
            self.end.torn = rest.or(self.rubbish_at(doubt.at)?.then_some(doubt.at));
        }
        Ok(self.end)
    }

    /// A frame says that everything below `durable` was synced: what is in doubt below it is damage.
    fn settle(&mut self, durable: u64) -> Result<(), ScanError> {
        while let Some(mut doubt) = self.doubt.take() {
            if doubt.at >= durable {
                self.doubt = Some(doubt);
                break;
            }
            let Some(step) = doubt.steps.pop_front() else { break };
            match step {
                Step::Gap(begin, end) => {
                    let file = self.segments.file_of(begin);
                    let text =
                        "no frame can be read here; records that are whole are kept, the others are lost";
                    self.sink.damage(file, begin, end, text);
                    self.salvage(begin, end)?;
                    self.end.position = end;
                }
                Step::Broken(frame) | Step::Intact(frame) => {
                    let next = self.behind(&frame);
                    self.accept(&frame, next)?;
                }
            }
            // The next step that is not intact is the next place in doubt.
            while let Some(Step::Intact(frame)) = doubt.steps.front().copied() {
                doubt.steps.pop_front();
                let next = self.behind(&frame);
                self.accept(&frame, next)?;
            }
            if let Some(step) = doubt.steps.front() {
                doubt.at = step.begin();
                self.doubt = Some(doubt);
            }
        }
        Ok(())
    }

    /// Hands over a frame's records.
    fn accept(&mut self, frame: &FrameHeader, next: u64) -> Result<(), ScanError> {
        self.end.epoch = self.end.epoch.max(frame.epoch);
        self.end.store_ms = self.end.store_ms.max(frame.store_ms);
        self.end.mark = self.end.mark.max(frame.durable);
        self.end.position = next;
        if frame.kind != FrameKind::Data {
            return Ok(());
        }
        self.end.clean = false;
        let file = self.segments.file_of(frame.position);
        let seed = self.seed;
        let length = frame.length as usize;
        let Some(bytes) = self.bytes(frame.position, length)?.map(<[u8]>::to_vec) else { return Ok(()) };
        let mut at = FRAME_HEADER;
        for _ in 0..frame.records {
            let position = frame.position + at as u64;
            let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) else { break };
            match Record::decode(seed, position, rest) {
                Ok(record) => {
                    self.end.clean = record.header.kind == super::frame::RecordKind::Closed;
                    self.sink.record(&record);
                    at += record.header.total();
                }
                Err((Bad::Newer(found), _)) => return Err(ScanError::Newer { file, position, found }),
                Err((Bad::Damaged, Some(header))) => {
                    let end = position + header.total() as u64;
                    self.sink.damage(file.clone(), position, end, "a record's payload is damaged");
                    self.sink.lost_message(position, &header);
                    at += header.total();
                }
                Err((Bad::Damaged, None)) => {
                    // Its length is not known; find the next record of the frame, if any.
                    let next = (at + 8..length).step_by(8).find(|&at| {
                        let rest = bytes.get(at..).unwrap_or_default();
                        RecordHeader::decode(seed, frame.position + at as u64, rest).is_ok()
                    });
                    let end = next.unwrap_or(length);
                    let until = frame.position + end as u64;
                    self.sink.damage(
                        file.clone(),
                        position,
                        until,
                        "a record cannot be read; what it held is lost",
                    );
                    self.sink.unknown(position, until);
                    at = end;
                }
            }
        }
        Ok(())
    }

    /// Hands over the records in a stretch without readable frames: a record's checksum covers its own place and
    /// epoch, so that it can stand without the frame around it.
    fn salvage(&mut self, begin: u64, end: u64) -> Result<(), ScanError> {
        let mut position = begin;
        // Everything in front was handed over.
        let mut told = begin;
        while position < end {
            let Some(segment) = self.segments.holding(position) else {
                let Some(next) = self.segments.after(position) else { break };
                position = next.base;
                continue;
            };
            let left = usize::try_from(segment.end().min(end) - position).unwrap_or(usize::MAX);
            if left < RECORD_HEADER {
                position = segment.end();
                continue;
            }
            let seed = self.seed;
            // None where the file is cut: nothing follows in it.
            let Some(bytes) = self.bytes(position, RECORD_HEADER)? else {
                position = segment.end();
                continue;
            };
            let header = match RecordHeader::decode(seed, position, bytes) {
                Ok(header) if header.epoch >= self.end.epoch && header.total() <= left => header,
                Err(Bad::Newer(found)) => {
                    return Err(ScanError::Newer { file: self.segments.file_of(position), position, found });
                }
                _ => {
                    position += 8;
                    continue;
                }
            };
            self.end.epoch = header.epoch;
            self.end.store_ms = self.end.store_ms.max(header.store_ms);
            self.end.clean = false;
            if position - told >= RECORD_HEADER as u64 {
                self.sink.unknown(told, position);
            }
            told = position + header.total() as u64;
            if let Some(bytes) = self.bytes(position, header.total())?.map(<[u8]>::to_vec) {
                match Record::decode(seed, position, &bytes) {
                    Ok(record) => self.sink.record(&record),
                    Err(_) => self.sink.lost_message(position, &header),
                }
            }
            position += header.total() as u64;
        }
        if end.saturating_sub(told) >= RECORD_HEADER as u64 && !self.looks_like_pad(told, end)? {
            self.sink.unknown(told, end);
        }
        Ok(())
    }

    /// Whether nothing is there up to the end of the segment but the header of a frame, as where one says that
    /// the rest is unused.
    fn looks_like_pad(&mut self, begin: u64, end: u64) -> Result<bool, ScanError> {
        let behind = begin + FRAME_HEADER as u64;
        let Some(segment) = self.segments.holding(begin).filter(|segment| segment.end() == end) else {
            return Ok(false);
        };
        let length = usize::try_from(segment.end().saturating_sub(behind)).unwrap_or(usize::MAX);
        let unread = self.unreadable.iter().any(|place| place.begin < end && place.end > begin);
        let bytes = self.bytes(behind, length)?;
        Ok(!unread && bytes.is_some_and(|bytes| bytes.iter().all(|&byte| byte == 0)))
    }

    /// What the device would not read may be the log's end as well as damage. Unless something behind it says
    /// which, nobody may write there.
    fn refuse_unreadable_end(&mut self) -> Result<(), ScanError> {
        let from = self.doubt.as_ref().map_or(self.end.position, |doubt| doubt.at);
        let Some(at) = self.unreadable.iter().position(|place| place.end > from) else { return Ok(()) };
        let Unreadable { begin, error, .. } = self.unreadable.swap_remove(at);
        let text = format!("position {begin} cannot be read and may be the log's end: {error}");
        let error = io::Error::new(error.kind(), text);
        Err(ScanError::Io { file: self.segments.file_of(begin), error })
    }

    fn is_intact(&mut self, frame: &FrameHeader) -> Result<bool, ScanError> {
        let seed = self.seed;
        let file = self.segments.file_of(frame.position);
        let Some(bytes) = self.bytes(frame.position, frame.length as usize)? else { return Ok(false) };
        let mut at = FRAME_HEADER;
        for _ in 0..frame.records {
            let position = frame.position + at as u64;
            match Record::decode(seed, position, bytes.get(at..).unwrap_or_default()) {
                Ok(record) => at += record.header.total(),
                Err((Bad::Newer(found), _)) => return Err(ScanError::Newer { file, position, found }),
                Err((Bad::Damaged, _)) => return Ok(false),
            }
        }
        Ok(at <= frame.length as usize)
    }

    /// Where the log goes on behind a frame.
    fn behind(&self, frame: &FrameHeader) -> u64 {
        let end = frame.position + u64::from(frame.length);
        match self.segments.holding(frame.position) {
            Some(segment) if frame.kind == FrameKind::Pad => segment.end(),
            Some(segment) if segment.end() - end.min(segment.end()) < FRAME_HEADER as u64 => segment.end(),
            _ => end,
        }
    }

    /// The frame at `position`, if there is one that may follow what was read.
    fn frame_at(&mut self, position: u64) -> Result<Option<FrameHeader>, ScanError> {
        let Some(segment) = self.segments.holding(position) else { return Ok(None) };
        let seed = self.seed;
        let Some(bytes) = self.bytes(position, FRAME_HEADER)? else { return Ok(None) };
        let frame = match FrameHeader::decode(seed, position, bytes) {
            Ok(frame) => frame,
            Err(Bad::Damaged) => return Ok(None),
            Err(Bad::Newer(found)) => {
                return Err(ScanError::Newer { file: self.segments.file_of(position), position, found });
            }
        };
        let mut lowest = self.doubt.as_ref().map_or(self.end.epoch, |doubt| doubt.epoch.max(self.end.epoch));
        if position >= self.floor.0 {
            lowest = lowest.max(self.floor.1);
        }
        let fits = u64::from(frame.length) <= segment.end() - position;
        Ok((fits && frame.epoch >= lowest).then_some(frame))
    }

    /// The next place at or behind `from` that holds a frame.
    fn search(&mut self, from: u64) -> Result<Option<u64>, ScanError> {
        let mut position = from;
        loop {
            let Some(segment) = self.segments.holding(position).or_else(|| self.segments.after(position))
            else {
                return Ok(None);
            };
            position = position.max(segment.base);
            let length = CHUNK.min(usize::try_from(segment.end() - position).unwrap_or(CHUNK));
            if length < FRAME_HEADER {
                position = segment.end();
                continue;
            }
            let Some(bytes) = self.bytes(position, length)? else {
                position = segment.end();
                continue;
            };
            let candidates: Vec<u64> = bytes
                .chunks_exact(8)
                .enumerate()
                .filter(|(_, word)| word.starts_with(b"HF"))
                .map(|(n, _)| position + n as u64 * 8)
                .collect();
            for candidate in candidates {
                if self.frame_at(candidate)?.is_some() {
                    return Ok(Some(candidate));
                }
            }
            position += length as u64;
        }
    }

    /// After a clean stop: whether nothing but zeros follows, here and at the start of the next segment.
    fn only_zeros_follow(&mut self, position: u64) -> Result<bool, ScanError> {
        let next = self.segments.holding(position).map_or(position, |segment| segment.end());
        let within = usize::try_from(next - position).unwrap_or(CLEAN_ZEROS).min(CLEAN_ZEROS);
        let here = self.bytes(position, within)?.is_none_or(|bytes| bytes.iter().all(|&byte| byte == 0));
        let later = match self.segments.after(next) {
            Some(segment) => {
                let first = self.bytes(segment.base, HEADER_PROBE.min(segment.capacity as usize))?;
                first.is_none_or(|bytes| bytes.iter().all(|&byte| byte == 0))
            }
            None => true,
        };
        let stop = position + within as u64;
        let unread = self.unreadable.iter().any(|place| place.begin < stop && place.end > position);
        Ok(here && later && !unread)
    }

    fn rubbish_at(&mut self, position: u64) -> Result<bool, ScanError> {
        let Some(segment) = self.segments.holding(position) else { return Ok(false) };
        let length = FRAME_HEADER.min(usize::try_from(segment.end() - position).unwrap_or(FRAME_HEADER));
        Ok(self.bytes(position, length)?.is_some_and(|bytes| bytes.iter().any(|&byte| byte != 0)))
    }

    /// `length` bytes at `position`, which lie in one segment; `None` when the file ends before.
    fn bytes(&mut self, position: u64, length: usize) -> Result<Option<&[u8]>, ScanError> {
        let inside = position >= self.at && position + length as u64 <= self.at + self.buffer.len() as u64;
        if !inside {
            let Some(segment) = self.segments.holding(position) else { return Ok(None) };
            let left = usize::try_from(segment.end() - position).unwrap_or(usize::MAX);
            if length > left {
                return Ok(None);
            }
            self.fill(&segment, position, length.max(CHUNK).min(left))?;
        }
        let begin = usize::try_from(position.saturating_sub(self.at)).unwrap_or(usize::MAX);
        Ok(self.buffer.get(begin..begin.saturating_add(length)))
    }

    fn fill(&mut self, segment: &Arc<Segment>, position: u64, length: usize) -> Result<(), ScanError> {
        self.buffer.resize(length, 0);
        self.at = position;
        if segment.read(&mut self.buffer, position).is_ok() {
            return Ok(());
        }
        // The file is shorter than its header says, or the device cannot read some of it: take what is there,
        // piece by piece.
        let mut read = 0;
        while read < length {
            let piece = (length - read).min(PIECE);
            let Some(into) = self.buffer.get_mut(read..read + piece) else { break };
            let begin = position + read as u64;
            match segment.read(into, begin) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    // The last bytes of a file that was cut.
                    let mut within = 0;
                    while let Some(into) = self.buffer.get_mut(read + within..read + within + 8)
                        && within < piece
                        && segment.read(into, begin + within as u64).is_ok()
                    {
                        within += 8;
                    }
                    read += within;
                    break;
                }
                Err(error) => {
                    into.fill(0);
                    let end = begin + piece as u64;
                    match self.unreadable.last_mut() {
                        Some(last) if last.begin <= begin && begin <= last.end => {
                            last.end = last.end.max(end)
                        }
                        _ => self.unreadable.push(Unreadable { begin, end, error }),
                    }
                }
            }
            read += piece;
        }
        self.buffer.truncate(read);
        Ok(())
    }
}

/// How much of a later segment is looked at after a clean stop.
const HEADER_PROBE: usize = 4096;
