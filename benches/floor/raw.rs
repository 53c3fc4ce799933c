//! Reference T: messages over TCP with nothing but a length before each, into the same kind of log.
//!
//! Requests and answers begin with the length of what follows, 4 bytes. A request is a kind and then either a body to
//! append (answered with its offset) or an offset and a count to read (answered with the records).
//!
//! An append costs what it must: a checksum, a copy into a buffer, one write for whatever one read from the socket
//! brought, and an index entry in memory.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    Result,
    load::{self, Sample, Span, Tally, Timing},
    process::{self, Server},
    requests::{BODY_BYTES, body},
};

const APPEND: u8 = 1;
const READ: u8 = 2;
/// Length, checksum and offset before each record.
const RECORD_HEAD: usize = 16;
/// Answer to an append: length and offset.
const APPENDED_BYTES: usize = 12;
/// Kind, offset and count.
const READ_BYTES: usize = 13;
/// What one read from the socket brings at most.
const SOCKET_BYTES: usize = 256 << 10;
/// Size of the file. Appends wrap around within it, so that it is always one that has been written before.
const FILE_BYTES: u64 = 256 << 20;
/// Messages to read, at the start of the file; appends leave them alone.
pub const READABLE: u64 = 64 << 10;

/// 32 bytes for each message.
#[derive(Clone, Copy)]
#[expect(dead_code, reason = "written as any log's index would be, whoever reads it")]
struct Entry {
    position: u64,
    offset: u64,
    hash: u64,
    bytes: u32,
    flags: u32,
}

struct Log {
    file: File,
    state: Mutex<State>,
}

struct State {
    /// Of the next append.
    position: u64,
    offset: u64,
    /// Where appends begin again.
    wrap_to: u64,
    readable: Vec<Entry>,
    /// A ring.
    appended: Vec<Entry>,
    next: usize,
}

impl Log {
    fn create(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        let zeros = vec![0; 1 << 20];
        for at in (0..FILE_BYTES).step_by(zeros.len()) {
            file.write_all_at(&zeros, at)?;
        }
        let body = body();
        let mut readable = Vec::new();
        let (mut position, mut records) = (0, Vec::new());
        for offset in 0..READABLE {
            let begin = records.len();
            record(&mut records, &body, crc32c::crc32c(&body));
            fill_offset(&mut records, begin, offset)?;
            let bytes = RECORD_HEAD + body.len();
            readable.push(Entry { position, offset, hash: 0, bytes: u32::try_from(bytes)?, flags: 0 });
            position += u64::try_from(bytes)?;
        }
        file.write_all_at(&records, 0)?;
        file.sync_all()?;
        let none = Entry { position: 0, offset: 0, hash: 0, bytes: 0, flags: 0 };
        let appended = vec![none; 1 << 18];
        let offset = READABLE;
        let state = State { position, offset, wrap_to: position, readable, appended, next: 0 };
        Ok(Self { file, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes records whose offsets are still to be given; returns the first one.
    fn append(&self, records: &mut [u8], lengths: &[u32]) -> Result<u64> {
        let size = u64::try_from(records.len())?;
        let (at, first) = {
            let mut state = self.state();
            if state.position + size > FILE_BYTES {
                state.position = state.wrap_to;
            }
            let place = (state.position, state.offset);
            state.position += size;
            state.offset += u64::try_from(lengths.len())?;
            place
        };
        let mut begin = 0;
        for (&length, offset) in lengths.iter().zip(first..) {
            fill_offset(records, begin, offset)?;
            begin += usize::try_from(length)?;
        }
        self.file.write_all_at(records, at)?;
        let mut position = at;
        let mut state = self.state();
        for (&bytes, offset) in lengths.iter().zip(first..) {
            let slot = state.next;
            state.next = (slot + 1) % state.appended.len();
            if let Some(entry) = state.appended.get_mut(slot) {
                *entry = Entry { position, offset, hash: 0, bytes, flags: 1 };
            }
            position += u64::from(bytes);
        }
        Ok(first)
    }

    /// Reads records that lie one behind the other.
    fn read(&self, offset: u64, count: u32, answer: &mut Vec<u8>) -> Result<()> {
        let begin = usize::try_from(offset)?;
        let end = begin + usize::try_from(count)?;
        let (position, bytes) = {
            let state = self.state();
            let entries = state.readable.get(begin..end).ok_or("asked for what is not there")?;
            let first = entries.first().ok_or("asked for nothing")?;
            (first.position, entries.iter().map(|entry| entry.bytes).sum::<u32>())
        };
        answer.extend_from_slice(&bytes.to_le_bytes());
        let at = answer.len();
        answer.resize(at + usize::try_from(bytes)?, 0);
        let room = answer.get_mut(at..).ok_or("no room")?;
        Ok(self.file.read_exact_at(room, position)?)
    }
}

fn record(records: &mut Vec<u8>, body: &[u8], checksum: u32) {
    records.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    records.extend_from_slice(&checksum.to_le_bytes());
    records.extend_from_slice(&[0; 8]);
    records.extend_from_slice(body);
}

fn fill_offset(records: &mut [u8], begin: usize, offset: u64) -> Result<()> {
    let place = records.get_mut(begin + 8..begin + RECORD_HEAD).ok_or("a record without a head")?;
    place.copy_from_slice(&offset.to_le_bytes());
    Ok(())
}

/// Serves until the parent ends: a thread for each connection.
pub fn serve(dir: &Path) -> Result<()> {
    process::end_with_parent();
    let log = Arc::new(Log::create(&dir.join("raw.log"))?);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    for stream in listener.incoming() {
        let (stream, log) = (stream?, log.clone());
        std::thread::spawn(move || {
            // A client that is gone, or speaks nonsense, ends its own connection.
            let _ = answer(&stream, &log);
        });
    }
    Ok(())
}

fn answer(mut stream: &TcpStream, log: &Log) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; SOCKET_BYTES];
    let mut filled = 0;
    let (mut records, mut lengths, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        let count = stream.read(buffer.get_mut(filled..).unwrap_or_default())?;
        if count == 0 {
            return Ok(());
        }
        filled += count;
        records.clear();
        lengths.clear();
        answers.clear();
        let mut used = 0;
        while let Some((length, rest)) = buffer.get(used..filled).and_then(<[u8]>::split_first_chunk) {
            let length = usize::try_from(u32::from_le_bytes(*length))?;
            let Some(request) = rest.get(..length) else { break };
            used += 4 + length;
            match request.split_first() {
                Some((&APPEND, body)) => {
                    record(&mut records, body, crc32c::crc32c(body));
                    lengths.push(u32::try_from(RECORD_HEAD + body.len())?);
                }
                Some((&READ, asked)) => {
                    let (offset, rest) = asked.split_first_chunk().ok_or("a read without an offset")?;
                    let count = rest.first_chunk().ok_or("a read without a count")?;
                    log.read(u64::from_le_bytes(*offset), u32::from_le_bytes(*count), &mut answers)?;
                }
                _ => return Err("a request that is neither append nor read".into()),
            }
        }
        if !lengths.is_empty() {
            let first = log.append(&mut records, &lengths)?;
            for (offset, _) in (first..).zip(&lengths) {
                answers.extend_from_slice(&8_u32.to_le_bytes());
                answers.extend_from_slice(&offset.to_le_bytes());
            }
        }
        stream.write_all(&answers)?;
        buffer.copy_within(used..filled, 0);
        filled -= used;
    }
}

/// Appends with `in_flight` of them under way on all connections together.
pub fn append(server: &Server, threads: usize, in_flight: usize, timing: Timing) -> Result<Sample> {
    let body = body();
    let mut request = u32::try_from(1 + body.len())?.to_le_bytes().to_vec();
    request.push(APPEND);
    request.extend_from_slice(&body);
    let window = in_flight / threads;
    let burst = request.repeat(window);
    let work = |mut stream: TcpStream, span: Span| {
        let mut tally = Tally::new(span)?;
        let mut answers = vec![0; APPENDED_BYTES * window];
        // Bytes of answers still to come, and how many of them are of an answer that has begun.
        let (mut owed, mut begun) = (0_usize, 0_usize);
        while !span.is_over() {
            let free = window - owed.div_ceil(APPENDED_BYTES);
            stream.write_all(burst.get(..free * request.len()).unwrap_or_default())?;
            owed += free * APPENDED_BYTES;
            let count = stream.read(&mut answers)?;
            if count == 0 {
                return Err("T ended the connection".into());
            }
            owed -= count;
            begun += count;
            let whole = u64::try_from(begun / APPENDED_BYTES)?;
            tally.bulk(whole, whole);
            begun %= APPENDED_BYTES;
        }
        Ok(tally)
    };
    load::measure(server, threads, timing, |_| connect(server.address), work)
}

/// Reads `count` messages at a time with `in_flight` requests under way on all connections together.
pub fn read(server: &Server, threads: usize, count: u32, in_flight: usize, timing: Timing) -> Result<Sample> {
    let answer_bytes = 4 + usize::try_from(count)? * (RECORD_HEAD + BODY_BYTES);
    let work = |mut stream: TcpStream, span: Span| {
        let mut tally = Tally::new(span)?;
        let mut offset = 0;
        let mut ask = |stream: &mut TcpStream| -> Result<()> {
            let mut request = u32::try_from(READ_BYTES)?.to_le_bytes().to_vec();
            request.push(READ);
            request.extend_from_slice(&u64::to_le_bytes(offset));
            request.extend_from_slice(&count.to_le_bytes());
            offset = (offset + u64::from(count)) % READABLE;
            Ok(stream.write_all(&request)?)
        };
        for _ in 0..in_flight / threads {
            ask(&mut stream)?;
        }
        let mut answer = vec![0; answer_bytes];
        while !span.is_over() {
            stream.read_exact(&mut answer)?;
            tally.bulk(1, count.into());
            ask(&mut stream)?;
        }
        Ok(tally)
    };
    load::measure(server, threads, timing, |_| connect(server.address), work)
}

fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
