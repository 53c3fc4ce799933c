//! `holdfast send --lines`: each line of a stream a message, many batches in flight.
//!
//! ```text
//! thread: read ──► chunks ──► Splitter: lines ──► batches ──► SendStream
//!                                                    └── answers, in order ──► Tally
//! ```
//!
//! A batch goes out when it is full, or when the input pauses: no timer, and `tail -F` is not held back.

use std::{
    collections::VecDeque,
    io::{self, Read},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::sync::mpsc;

use super::{
    Exit, Failure, Session, output,
    send::{Dress, Input, promise},
    values,
};
use crate::{
    client::{self, Answer, Batch, Durability, OutgoingMessage, SendStream, Sent, Window},
    model::MAX_BODY_BYTES,
};

/// Read at once.
const CHUNK_BYTES: usize = 256 << 10;
/// Chunks read ahead.
const CHUNKS: usize = 8;
/// A batch with this many bytes is full; with the largest line it stays far below the limit of a call.
const BATCH_BYTES: usize = 1 << 20;
/// Bytes in flight.
const WINDOW_BYTES: usize = 16 << 20;
/// How long an interrupted send waits for what is in flight.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// What to do with the lines.
pub(super) struct Job {
    pub(super) topic: String,
    pub(super) queue: Option<u32>,
    pub(super) dress: Dress,
    /// Lines at the start to leave out.
    pub(super) skip: u64,
    /// Most messages in a batch.
    pub(super) batch: usize,
    /// Most batches in flight.
    pub(super) in_flight: usize,
}

pub(super) async fn run(session: Session, job: Job, input: Input) -> Result<Exit, Failure> {
    let name = input.name.clone();
    let bar = progress(input.bytes);
    let (chunks, arrivals) = mpsc::channel(CHUNKS);
    let source = input.into_source();
    std::thread::Builder::new()
        .name("input".to_owned())
        .spawn(move || read(source, &chunks))
        .map_err(|error| Failure::io(&name, &error))?;
    let begun = Instant::now();
    let window = Window { batches: job.in_flight, bytes: WINDOW_BYTES };
    let mut sending = Sending {
        stream: session.broker.send_stream(window),
        splitter: Splitter::new(job.skip),
        tally: Tally { acknowledged_lines: job.skip, ..Tally::default() },
        open: Vec::new(),
        open_bytes: 0,
        flying: VecDeque::new(),
        job,
        bar,
    };
    let end = sending.all(&session, arrivals, &name).await;
    let Sending { stream, splitter, mut tally, flying, bar, job, .. } = sending;
    if end.is_ok() {
        // Lines behind the last message have nothing to wait for.
        tally.acknowledged_lines = splitter.lines.max(job.skip);
    }
    tally.unknown_messages += flying.iter().map(|flight| flight.messages).sum::<u64>();
    drop(stream);
    bar.finish_and_clear();
    report(&session, &job, &splitter, &tally, begun.elapsed(), end.as_ref().err())?;
    end.map(|()| Exit::Ok)
}

/// Hands chunks over until the input ends, fails, or nobody wants more.
fn read(mut source: Box<dyn Read + Send>, to: &mpsc::Sender<io::Result<Bytes>>) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.resize(CHUNK_BYTES, 0);
        let chunk = match source.read(&mut buffer) {
            Ok(0) => return,
            Ok(bytes) => Ok(buffer.split_to(bytes).freeze()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => Err(error),
        };
        let failed = chunk.is_err();
        if to.blocking_send(chunk).is_err() || failed {
            return;
        }
    }
}

struct Sending {
    job: Job,
    stream: SendStream,
    splitter: Splitter,
    tally: Tally,
    /// The batch that is being filled.
    open: Vec<OutgoingMessage>,
    open_bytes: usize,
    /// Batches without an answer, in order.
    flying: VecDeque<Flight>,
    bar: ProgressBar,
}

/// A batch on its way.
struct Flight {
    answer: Answer,
    messages: u64,
    bytes: u64,
    /// Lines of the input up to its end.
    lines: u64,
}

/// What is known so far.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    /// Lines from the start of the input that need not be sent again.
    acknowledged_lines: u64,
    acknowledged_messages: u64,
    acknowledged_bytes: u64,
    /// Messages behind the first one that failed, acknowledged all the same.
    stray_messages: u64,
    /// Messages whose fate is not known.
    unknown_messages: u64,
    /// The weakest promise made.
    durability: Option<Durability>,
    failed: Option<client::Error>,
}

impl Tally {
    fn settle(&mut self, messages: u64, bytes: u64, lines: u64, result: Result<Sent, client::Error>) {
        match result {
            Ok(sent) => {
                if self.failed.is_some() {
                    self.stray_messages += messages;
                    return;
                }
                self.acknowledged_lines = lines;
                self.acknowledged_messages += messages;
                self.acknowledged_bytes += bytes;
                if self.durability != Some(Durability::Memory) {
                    self.durability = Some(sent.durability);
                }
            }
            Err(error) => {
                if matches!(error.code(), client::Code::Unavailable | client::Code::DeadlineExceeded) {
                    self.unknown_messages += messages;
                }
                self.failed.get_or_insert(error);
            }
        }
    }
}

impl Sending {
    /// Sends everything and waits for every answer.
    async fn all(
        &mut self,
        session: &Session,
        mut arrivals: mpsc::Receiver<io::Result<Bytes>>,
        name: &str,
    ) -> Result<(), Failure> {
        let result = tokio::select! {
            result = self.feed(&mut arrivals, name) => result,
            () = session.stop.cancelled() => Err(Failure::quiet(Exit::Interrupted)),
        };
        // No more input: what was read before it failed is sent, and what flies may still land.
        drop(arrivals);
        let failed_to_read = self.tally.failed.is_none()
            && result.as_ref().is_err_and(|failure| failure.exit != Exit::Interrupted);
        if failed_to_read {
            let _ = self.hand_over().await;
        }
        let landing = async {
            while let Some(flight) = self.flying.front_mut() {
                let answer = (&mut flight.answer).await;
                self.land(answer);
            }
        };
        if result.is_ok() {
            tokio::select! {
                () = landing => {}
                () = session.stop.cancelled() => return Err(Failure::quiet(Exit::Interrupted)),
            }
        } else {
            // The answer to this failure is known; what is missing after the wait is reported as not known.
            let _ = tokio::time::timeout(LAST_ANSWERS, landing).await;
        }
        match self.tally.failed.clone() {
            Some(error) => Err(error.into()),
            None => result,
        }
    }

    /// Reads to the end and hands over all batches.
    async fn feed(
        &mut self,
        arrivals: &mut mpsc::Receiver<io::Result<Bytes>>,
        name: &str,
    ) -> Result<(), Failure> {
        loop {
            // Only when the input pauses does a batch leave before it is full.
            let chunk = match arrivals.try_recv() {
                Ok(chunk) => Some(chunk),
                Err(mpsc::error::TryRecvError::Disconnected) => None,
                Err(mpsc::error::TryRecvError::Empty) => {
                    self.hand_over().await?;
                    self.next_chunk(arrivals).await?
                }
            };
            let Some(chunk) = chunk else { break };
            self.splitter.push(chunk.map_err(|error| Failure::io(name, &error))?);
            while let Some(line) = self.splitter.next()? {
                self.take(line).await?;
            }
        }
        if let Some(line) = self.splitter.finish()? {
            self.take(line).await?;
        }
        self.hand_over().await
    }

    /// The next chunk; answers are taken in while waiting.
    async fn next_chunk(
        &mut self,
        arrivals: &mut mpsc::Receiver<io::Result<Bytes>>,
    ) -> Result<Option<io::Result<Bytes>>, Failure> {
        loop {
            let Some(flight) = self.flying.front_mut() else { return Ok(arrivals.recv().await) };
            tokio::select! {
                answer = &mut flight.answer => {
                    self.land(answer);
                    self.still_good()?;
                }
                chunk = arrivals.recv() => return Ok(chunk),
            }
        }
    }

    async fn take(&mut self, line: Bytes) -> Result<(), Failure> {
        let message = self.job.dress.on(line);
        self.open_bytes += message.encoded_len();
        self.open.push(message);
        if self.open.len() >= self.job.batch || self.open_bytes >= BATCH_BYTES {
            self.hand_over().await?;
        }
        Ok(())
    }

    /// Sends the open batch, if there is anything in it.
    async fn hand_over(&mut self) -> Result<(), Failure> {
        if !self.open.is_empty() {
            let messages = std::mem::take(&mut self.open);
            let count = u64::try_from(messages.len()).unwrap_or(u64::MAX);
            let bytes = self.splitter.take_bytes();
            self.open_bytes = 0;
            let lines = self.splitter.lines;
            let batch = Batch { queue: self.job.queue, ..Batch::new(self.job.topic.clone(), messages) };
            match self.stream.send(batch).await {
                Ok(answer) => self.flying.push_back(Flight { answer, messages: count, bytes, lines }),
                // The stream is over: its answers say why, and what else they say counts.
                Err(error) => return Err(error.into()),
            }
        }
        while let Some(flight) = self.flying.front_mut() {
            let Some(answer) = futures_util::FutureExt::now_or_never(&mut flight.answer) else { break };
            self.land(answer);
        }
        self.still_good()
    }

    fn land(&mut self, answer: Result<Sent, client::Error>) {
        if let Some(flight) = self.flying.pop_front() {
            self.tally.settle(flight.messages, flight.bytes, flight.lines, answer);
            self.bar.set_position(self.bar.position().saturating_add(flight.bytes + flight.messages));
        }
    }

    fn still_good(&self) -> Result<(), Failure> {
        self.tally.failed.clone().map_or(Ok(()), |error| Err(error.into()))
    }
}

/// Cuts chunks into lines, without copying where a line is within one chunk.
#[derive(Debug, Default)]
struct Splitter {
    chunk: Bytes,
    /// Start of a line whose end has not come yet.
    partial: BytesMut,
    /// Lines seen, also empty and skipped ones.
    lines: u64,
    /// Empty lines among those not skipped.
    empty: u64,
    skip: u64,
    /// Bytes of lines given out since [`Self::take_bytes`].
    bytes: u64,
}

impl Splitter {
    fn new(skip: u64) -> Self {
        Self { skip, ..Self::default() }
    }

    /// More input; the chunk before has been used up.
    fn push(&mut self, chunk: Bytes) {
        debug_assert!(self.chunk.is_empty(), "lines left in the last chunk");
        self.chunk = chunk;
    }

    /// The next line that is a message.
    fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        while !self.chunk.is_empty() {
            let Some(end) = self.chunk.iter().position(|&byte| byte == b'\n') else {
                self.partial.extend_from_slice(&std::mem::take(&mut self.chunk));
                self.check(self.partial.len())?;
                return Ok(None);
            };
            let mut line = self.chunk.split_to(end);
            let _ = self.chunk.split_to(1);
            if !self.partial.is_empty() {
                self.partial.extend_from_slice(&line);
                line = self.partial.split().freeze();
            }
            if let Some(line) = self.count(line)? {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }

    /// A last line without a line end.
    fn finish(&mut self) -> Result<Option<Bytes>, Failure> {
        if self.partial.is_empty() {
            return Ok(None);
        }
        let line = self.partial.split().freeze();
        self.count(line)
    }

    fn count(&mut self, line: Bytes) -> Result<Option<Bytes>, Failure> {
        if self.lines >= self.skip {
            self.check(line.len())?;
        }
        self.lines += 1;
        if self.lines <= self.skip {
            return Ok(None);
        }
        if line.is_empty() {
            self.empty += 1;
            return Ok(None);
        }
        self.bytes += u64::try_from(line.len()).unwrap_or(u64::MAX);
        Ok(Some(line))
    }

    fn check(&self, length: usize) -> Result<(), Failure> {
        if length > MAX_BODY_BYTES {
            let number = self.lines + 1;
            return Err(Failure::new(
                Exit::Refused,
                format!(
                    "line {number} has more than 4 MiB ({MAX_BODY_BYTES} bytes), the most that a message takes"
                ),
            ));
        }
        Ok(())
    }

    fn take_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.bytes)
    }
}

/// A bar for eyes, on standard error; hidden where nobody looks.
fn progress(bytes: Option<u64>) -> ProgressBar {
    if !output::watched() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match bytes {
        Some(bytes) => (
            ProgressBar::new(bytes),
            "{wide_bar:.green} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} to go",
        ),
        None => (ProgressBar::new_spinner(), "{spinner:.green} {bytes} sent, {binary_bytes_per_sec}"),
    };
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn report(
    session: &Session,
    job: &Job,
    splitter: &Splitter,
    tally: &Tally,
    took: Duration,
    failure: Option<&Failure>,
) -> Result<(), Failure> {
    let seconds = took.as_secs_f64().max(1e-9);
    #[expect(clippy::cast_precision_loss, reason = "rates are for reading")]
    let per_second = |number: u64| number as f64 / seconds;
    if session.is_json() {
        return output::json(&JsonSummary {
            topic: &job.topic,
            complete: failure.is_none(),
            acknowledged_lines: tally.acknowledged_lines,
            messages: tally.acknowledged_messages,
            bytes: tally.acknowledged_bytes,
            empty_lines: splitter.empty,
            stray_messages: tally.stray_messages,
            unknown_messages: tally.unknown_messages,
            durability: tally.durability.map(Durability::name),
            seconds,
            messages_per_second: per_second(tally.acknowledged_messages),
            bytes_per_second: per_second(tally.acknowledged_bytes),
        });
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rates are for reading")]
    let whole = |rate: f64| rate as u64;
    let messages = values::plural(tally.acknowledged_messages, "message", "messages");
    let size = values::size(tally.acknowledged_bytes);
    let rates = format!(
        "{} messages/s, {}/s",
        values::count(whole(per_second(tally.acknowledged_messages))),
        values::size(whole(per_second(tally.acknowledged_bytes)))
    );
    let promise = tally.durability.map(|durability| format!(", {}", promise(durability))).unwrap_or_default();
    let sent =
        format!("sent {messages} ({size}) to {} in {}: {rates}{promise}", job.topic, values::span(took));
    if splitter.empty > 0 {
        let lines = values::plural(splitter.empty, "empty line was", "empty lines were");
        output::note(format_args!("{lines} left out: a message has at least 1 byte"));
    }
    if failure.is_none() {
        return output::line(sent);
    }
    output::note(sent);
    output::note(format_args!(
        "acknowledged from the start: {}; go on with the same command and --skip {}",
        values::plural(tally.acknowledged_lines, "line", "lines"),
        tally.acknowledged_lines
    ));
    if tally.stray_messages > 0 {
        let messages = values::plural(tally.stray_messages, "later message is", "later messages are");
        output::note(format_args!("{messages} acknowledged, too; going on stores them twice"));
    }
    if tally.unknown_messages > 0 {
        let messages = values::plural(tally.unknown_messages, "message", "messages");
        output::note(format_args!("{messages} behind that may be stored; going on may store them twice"));
    }
    Ok(())
}

/// The result for scripts, also when it failed.
#[derive(Serialize)]
struct JsonSummary<'a> {
    topic: &'a str,
    complete: bool,
    /// Lines from the start of the input, with those skipped: what `--skip` takes to go on.
    acknowledged_lines: u64,
    messages: u64,
    bytes: u64,
    empty_lines: u64,
    stray_messages: u64,
    unknown_messages: u64,
    durability: Option<&'static str>,
    seconds: f64,
    messages_per_second: f64,
    bytes_per_second: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]], skip: u64) -> (Vec<Bytes>, Splitter) {
        let mut splitter = Splitter::new(skip);
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(Bytes::copy_from_slice(chunk));
            while let Some(line) = splitter.next().unwrap() {
                lines.push(line);
            }
        }
        lines.extend(splitter.finish().unwrap());
        (lines, splitter)
    }

    #[test]
    fn lines_keep_every_byte_but_their_end() {
        let text: &[u8] = b"a\r\n\xff\x00\n\n  x\nlast";
        for at in 0..text.len() {
            let (lines, splitter) = split(&[&text[..at], &text[at..]], 0);
            assert_eq!(lines, [&b"a\r"[..], b"\xff\x00", b"  x", b"last"], "cut at {at}");
            assert_eq!((splitter.lines, splitter.empty), (5, 1));
        }
    }

    #[test]
    fn skipped_lines_count_empty_ones_too() {
        let (lines, splitter) = split(&[b"a\n\nb\nc\n"], 2);
        assert_eq!(lines, [&b"b"[..], b"c"]);
        assert_eq!((splitter.lines, splitter.empty), (4, 0));
        assert!(split(&[b"a\nb\n"], 10).0.is_empty());
    }

    #[test]
    fn a_line_that_cannot_be_a_message_is_named_before_its_end_is_there() {
        let mut splitter = Splitter::new(0);
        splitter.push(Bytes::from_static(b"ok\n"));
        assert!(splitter.next().unwrap().is_some());
        splitter.push(vec![b'x'; MAX_BODY_BYTES].into());
        assert!(splitter.next().unwrap().is_none());
        splitter.push(Bytes::from_static(b"x"));
        let failure = splitter.next().unwrap_err();
        assert!(failure.text.starts_with("line 2 has more than 4 MiB"), "{}", failure.text);
    }

    #[test]
    fn only_what_is_acknowledged_without_a_gap_counts_as_done() {
        let sent = |durability| Ok(Sent { queue: 0, receipts: Vec::new(), stored: None, durability });
        let mut tally = Tally::default();
        tally.settle(3, 30, 4, sent(Durability::Disk));
        tally.settle(2, 20, 6, Err(client::Error::new(client::Code::ResourceExhausted, "busy")));
        tally.settle(5, 50, 11, sent(Durability::Disk));
        assert_eq!(
            (tally.acknowledged_lines, tally.acknowledged_messages, tally.acknowledged_bytes),
            (4, 3, 30)
        );
        assert_eq!((tally.stray_messages, tally.unknown_messages), (5, 0));
        tally.settle(7, 70, 18, Err(client::Error::new(client::Code::Unavailable, "gone")));
        assert_eq!(tally.unknown_messages, 7);
        assert_eq!(tally.failed.map(|error| error.code()), Some(client::Code::ResourceExhausted));
    }

    #[test]
    fn the_weakest_promise_is_the_one_reported() {
        let sent = |durability| Ok(Sent { queue: 0, receipts: Vec::new(), stored: None, durability });
        let mut tally = Tally::default();
        tally.settle(1, 1, 1, sent(Durability::Memory));
        tally.settle(1, 1, 2, sent(Durability::Disk));
        assert_eq!(tally.durability, Some(Durability::Memory));
    }
}
