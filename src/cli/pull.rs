//! `holdfast pull`: read one queue, or all queues of a topic in the order of the log.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

use clap::Args;
use futures_util::{
    FutureExt as _, StreamExt as _,
    future::{AbortHandle, Abortable},
    stream::FuturesUnordered,
};

use super::{
    Exit, Failure, Session,
    merge::{Merge, Next},
    message::JsonMessage,
    output::{self, DIM, harmless, paint},
    values::{self, Start},
};
use crate::{
    client::{
        self, Code, CommitOutcome, Connection, Message, OffsetIllegal, Pull, PullOutcome, Pulled,
        QueueOffset, TimeBound,
    },
    model::StartFrom,
};

const HELP: &str = "\
Without --queue all queues are read and put into the order of the log. The pull ends at the end that it found when
it began, unless it follows. It begins at the earliest message; with --follow at the end; with --group where the
group stands; --from overrules all three.

On a terminal control characters are written out; in a pipe each body comes exactly as it is, with a line end.

With --group progress is committed as messages are printed: the next pull of the group goes on behind them.

Examples:
  holdfast pull --topic logs                                 everything, then end
  holdfast pull --topic logs --follow                        what comes from now on
  holdfast pull --topic logs --from 1h | grep ERROR          the last hour
  holdfast pull --topic orders --group billing --max 100     the next hundred for a group
  holdfast pull --topic orders --filter 'paid || shipped' -o json
  holdfast pull --topic orders --queue 3 --from 1500 --long";

/// Messages asked for at once.
const PAGE_MESSAGES: u32 = 1024;
/// Bytes that all queues together may have read ahead.
const AHEAD_BYTES: u32 = 32 << 20;
/// Least bytes asked for at once, however many queues there are.
const PAGE_BYTES_MIN: u32 = 64 << 10;
/// Most bytes asked for at once.
const PAGE_BYTES_MAX: u32 = 1 << 20;
/// The next page is asked for when this many messages are left of the last one.
const LOW: usize = 256;
/// How long a follower lets the broker wait.
const WAIT: Duration = Duration::from_secs(25);
/// Pulls on one connection at once; brokers limit it.
const PULLS_PER_CONNECTION: usize = 64;
/// Written at once.
const OUT_BYTES: usize = 256 << 10;
/// Small writes are done in place; larger ones by a thread, so that a reader that pauses (`| less`) does not let
/// the connection die.
const SMALL_WRITE_BYTES: usize = 4 << 10;
/// Progress is committed, and a follower looks after itself, this often.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// A follower looks for queues that were added after this many rounds of housekeeping.
const ROUNDS_PER_LOOK: u32 = 10;
/// After this long without a message a single new one needs no check against the other queues; nor do those that
/// follow it one by one.
const QUIET: Duration = Duration::from_millis(5);
/// First pause after a failed pull; doubles up to the last one.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LAST: Duration = Duration::from_secs(2);
/// A pull that does not follow gives up when the broker is away for this long.
const GIVE_UP: Duration = Duration::from_secs(30);
/// Queues in one question about offsets.
const OFFSETS_PER_CALL: usize = 1024;

/// Read messages of a topic.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(super) struct PullArgs {
    /// The topic.
    #[arg(long, short)]
    topic: String,
    /// Only this queue.
    #[arg(long, value_name = "N")]
    queue: Option<u32>,
    /// Where to begin: `earliest`, `latest`, an offset (of a --queue), or a time (RFC 3339, or how long ago: 1h).
    #[arg(long, value_name = "PLACE")]
    from: Option<Start>,
    /// Read on behalf of this consumer group, and commit its progress.
    #[arg(long, short)]
    group: Option<String>,
    /// Go on with what comes after the end, until interrupted.
    #[arg(long, short)]
    follow: bool,
    /// Only messages with these tags, e.g. `paid || shipped`.
    #[arg(long, value_name = "TAGS", default_value = "", hide_default_value = true)]
    filter: String,
    /// End after this many messages.
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max: Option<u64>,
    /// Print bodies exactly as they are, each with a line end, on a terminal too.
    #[arg(long, conflicts_with = "long")]
    raw: bool,
    /// Print place, time and tag before each body.
    #[arg(long, short)]
    long: bool,
}

pub(super) async fn run(session: Session, args: PullArgs) -> Result<Exit, Failure> {
    let style = if session.is_json() {
        Style::Json
    } else if args.long {
        Style::Long
    } else if args.raw || !io::stdout().is_terminal() {
        Style::Exact
    } else {
        Style::Harmless
    };
    let stop = session.stop.clone();
    let mut reading = tokio::select! {
        reading = Reading::begin(&session, args, style) => reading?,
        () = stop.cancelled() => return Err(Failure::quiet(Exit::Interrupted)),
    };
    let end = tokio::select! {
        end = reading.all() => end,
        () = stop.cancelled() => Err(Failure::quiet(Exit::Interrupted)),
    };
    // What was printed is done, however the reading ended.
    let committed = match tokio::time::timeout(GIVE_UP, reading.commit()).await {
        Ok(committed) => committed,
        Err(_) => Err(Failure::new(Exit::Unavailable, "the broker did not take the last commit in time")),
    };
    end.and(committed)?;
    Ok(if reading.lost > 0 { Exit::DataLoss } else { Exit::Ok })
}

/// How a message is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Exact,
    Harmless,
    Long,
    Json,
}

/// What came of one pull.
struct Arrival {
    lane: usize,
    /// Which request of the lane it answers.
    number: u64,
    /// `None`: given up.
    result: Option<Result<Pulled, client::Error>>,
}

/// The request of a lane that is under way.
#[derive(Default)]
struct Request {
    number: u64,
    under_way: Option<AbortHandle>,
    /// Not before this, because the broker said so or did not answer.
    not_before: Option<tokio::time::Instant>,
}

struct Reading {
    args: PullArgs,
    style: Style,
    broker: Connection,
    /// For pulls, [`PULLS_PER_CONNECTION`] lanes each.
    connections: Vec<Connection>,
    client_id: String,
    merge: Merge,
    requests: Vec<Request>,
    arrivals: FuturesUnordered<futures_util::future::BoxFuture<'static, Arrival>>,
    /// Printed, not written.
    out: Vec<u8>,
    printed: u64,
    last_printed: Instant,
    /// Messages have come one by one since it was quiet.
    calm: bool,
    /// Offsets that the group has committed, by queue as in `merge`.
    committed: Vec<Option<u64>>,
    /// Progress up to what has been written.
    written: Vec<(u32, u64)>,
    /// Messages that nobody can read any more.
    lost: u64,
    /// When pulls began to fail, and the pause before the next try.
    away: Option<(Instant, Duration)>,
    stale_told: bool,
    /// Queues of the topic.
    queues: u32,
}

impl Reading {
    /// Finds the queues, and where to begin and to end on each.
    async fn begin(session: &Session, args: PullArgs, style: Style) -> Result<Self, Failure> {
        let broker = session.broker.clone();
        let found = broker.describe_topic(&args.topic).await?;
        let count = u32::try_from(found.queues.len()).unwrap_or(u32::MAX);
        let queues: Vec<u32> = match args.queue {
            Some(queue) => vec![queue],
            None => found.queues.iter().map(|queue| queue.queue).collect(),
        };
        if let (Some(Start::Offset(_)), [_, _, ..]) = (args.from, queues.as_slice()) {
            return Err(Failure::usage("an offset is a place in one queue; name it with --queue"));
        }
        let time = match args.from {
            Some(Start::Time(time)) => Some((time, TimeBound::FirstAtOrAfter)),
            _ => None,
        };
        let without_progress = match &args.group {
            None => StartFrom::Earliest,
            Some(group) => match broker.describe_group(group, Some(&args.topic)).await {
                Ok(group) => group.group.settings.start_from,
                // It comes into being with the first commit, if the broker allows.
                Err(error) if error.code() == Code::NotFound => StartFrom::default(),
                Err(error) => return Err(error.into()),
            },
        };
        let mut reading = Self {
            style,
            connections: vec![broker.clone()],
            client_id: format!("holdfast-pull-{}-{:x}", std::process::id(), values::now_ms()),
            merge: Merge::default(),
            requests: Vec::new(),
            arrivals: FuturesUnordered::new(),
            out: Vec::new(),
            printed: 0,
            last_printed: Instant::now(),
            calm: false,
            committed: Vec::new(),
            written: Vec::new(),
            lost: 0,
            away: None,
            stale_told: false,
            queues: count,
            args,
            broker,
        };
        for some in queues.chunks(OFFSETS_PER_CALL) {
            let known = match &reading.args.group {
                Some(group) => reading.offsets_of_group(group, some, time).await?,
                None => reading.broker.offsets(&reading.args.topic, some, None, time).await?,
            };
            for queue in known {
                let first = match (reading.args.from, queue.committed) {
                    (Some(Start::Earliest), _) => queue.min,
                    (Some(Start::Latest), _) => queue.max,
                    (Some(Start::Offset(offset)), _) => offset,
                    (Some(Start::Time(_)), _) => queue.by_time.unwrap_or(queue.max),
                    (None, Some(committed)) => committed,
                    (None, None) if reading.args.group.is_some() => match without_progress {
                        StartFrom::Earliest => queue.min,
                        StartFrom::Latest => queue.max,
                    },
                    (None, None) if reading.args.follow => queue.max,
                    (None, None) => queue.min,
                };
                if first > queue.max {
                    output::warn(format_args!(
                        "queue {}: offset {first} is beyond the end; beginning there, at {}",
                        queue.queue, queue.max
                    ));
                }
                let first = first.min(queue.max);
                let end = (!reading.args.follow).then_some(queue.max);
                reading.add_lane(queue.queue, first, end, queue.committed)?;
            }
        }
        Ok(reading)
    }

    /// Offsets with the progress of a group that need not exist yet.
    async fn offsets_of_group(
        &self,
        group: &str,
        queues: &[u32],
        time: Option<(std::time::SystemTime, TimeBound)>,
    ) -> Result<Vec<client::Offsets>, client::Error> {
        match self.broker.offsets(&self.args.topic, queues, Some(group), time).await {
            Err(error) if error.code() == Code::NotFound => {
                self.broker.offsets(&self.args.topic, queues, None, time).await
            }
            other => other,
        }
    }

    fn add_lane(
        &mut self,
        queue: u32,
        next: u64,
        end: Option<u64>,
        committed: Option<u64>,
    ) -> Result<(), Failure> {
        let lane = self.merge.add(queue, next, end);
        self.requests.push(Request::default());
        self.committed.push(committed);
        if lane / PULLS_PER_CONNECTION >= self.connections.len() {
            self.connections.push(Connection::new(self.broker.endpoint().clone())?);
        }
        Ok(())
    }

    /// Reads to the end, or until told to stop.
    async fn all(&mut self) -> Result<(), Failure> {
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut rounds = 0_u32;
        loop {
            self.ask();
            match self.merge.next() {
                Next::Message(message) => {
                    self.print(&message)?;
                    if self.args.max == Some(self.printed) {
                        return self.write().await;
                    }
                    if self.out.len() >= OUT_BYTES {
                        self.write().await?;
                    }
                    continue;
                }
                Next::End => return self.write().await,
                Next::Check if self.merge.is_alone() && self.is_calm() => {
                    // Messages that became visible together are told together: what is on its way is read first.
                    tokio::task::yield_now().await;
                    self.take_all()?;
                    self.calm = self.merge.is_alone();
                    if self.calm
                        && let Next::Message(message) = self.merge.next_unchecked()
                    {
                        self.print(&message)?;
                        if self.args.max == Some(self.printed) {
                            return self.write().await;
                        }
                    }
                    continue;
                }
                Next::Check => {
                    self.calm = false;
                    self.check().await?;
                    continue;
                }
                Next::Page => self.write().await?,
            }
            tokio::select! {
                Some(arrival) = self.arrivals.next() => {
                    self.take(arrival)?;
                    self.take_all()?;
                }
                _ = housekeeping.tick() => {
                    self.commit().await?;
                    rounds = rounds.wrapping_add(1);
                    if self.args.follow && rounds.is_multiple_of(ROUNDS_PER_LOOK) {
                        self.look_for_queues().await?;
                    }
                }
            }
        }
    }

    /// Asks for pages where they are wanted.
    fn ask(&mut self) {
        let lanes = u32::try_from(self.merge.lanes()).unwrap_or(u32::MAX).max(1);
        let max_bytes = (AHEAD_BYTES / lanes / 2).clamp(PAGE_BYTES_MIN, PAGE_BYTES_MAX);
        let left = self.args.max.map_or(u64::MAX, |max| max.saturating_sub(self.printed));
        let max_messages = u32::try_from(left).unwrap_or(u32::MAX).clamp(1, PAGE_MESSAGES);
        for (lane, request) in self.requests.iter_mut().enumerate() {
            if request.under_way.is_some() {
                continue;
            }
            let Some((queue, offset, at_end)) = self.merge.wants(lane, LOW) else { continue };
            let Some(connection) = self.connections.get(lane / PULLS_PER_CONNECTION).cloned() else {
                continue;
            };
            let pull = Pull {
                max_messages,
                max_bytes,
                wait: if at_end { WAIT } else { Duration::ZERO },
                filter: self.args.filter.clone(),
                group: self.args.group.clone().unwrap_or_default(),
                client_id: self.client_id.clone(),
                ..Pull::new(self.args.topic.clone(), queue, offset)
            };
            request.number += 1;
            let number = request.number;
            let not_before = request.not_before.take();
            let (abort, registration) = AbortHandle::new_pair();
            request.under_way = Some(abort);
            let call = async move {
                if let Some(then) = not_before {
                    tokio::time::sleep_until(then).await;
                }
                connection.pull(&pull).await
            };
            self.arrivals.push(
                Abortable::new(call, registration)
                    .map(move |result| Arrival { lane, number, result: result.ok() })
                    .boxed(),
            );
        }
    }

    fn is_calm(&self) -> bool {
        self.calm || self.last_printed.elapsed() > QUIET
    }

    /// Takes in all that has come already.
    fn take_all(&mut self) -> Result<(), Failure> {
        while let Some(Some(arrival)) = self.arrivals.next().now_or_never() {
            self.take(arrival)?;
        }
        Ok(())
    }

    /// Takes in what a pull found.
    fn take(&mut self, arrival: Arrival) -> Result<(), Failure> {
        let Arrival { lane, number, result } = arrival;
        let Some(request) = self.requests.get_mut(lane) else { return Ok(()) };
        if request.number != number {
            return Ok(());
        }
        request.under_way = None;
        let pulled = match result {
            None => return Ok(()),
            Some(Ok(pulled)) => pulled,
            Some(Err(error)) => {
                let pause = self.pause(error)?;
                if let Some(request) = self.requests.get_mut(lane) {
                    request.not_before = Some(tokio::time::Instant::now() + pause);
                }
                return Ok(());
            }
        };
        if self.away.take().is_some() {
            output::note(paint(DIM, "connected again"));
        }
        let Pulled { outcome, messages, next_offset, max_offset, .. } = pulled;
        let at = self.merge.wants(lane, usize::MAX);
        let (queue, asked) = at.map_or((0, next_offset), |(queue, offset, _)| (queue, offset));
        match outcome {
            PullOutcome::Found | PullOutcome::NoMatchedMessage => {}
            PullOutcome::NoNewMessage(delay) => {
                request.not_before = delay.map(|delay| tokio::time::Instant::now() + delay);
            }
            PullOutcome::OffsetIllegal(OffsetIllegal::BelowMin) => output::warn(format_args!(
                "queue {queue}: offsets {asked} to {} are gone, removed by retention",
                next_offset.saturating_sub(1)
            )),
            PullOutcome::OffsetIllegal(OffsetIllegal::BeyondMax) => output::warn(format_args!(
                "queue {queue}: offset {asked} is beyond the end; going on at {next_offset}"
            )),
            PullOutcome::DataLoss(begin, end) => {
                self.lost = self.lost.saturating_add(end.saturating_sub(begin).max(1));
                output::warn(format_args!(
                    "queue {queue}: messages {begin} to {} are lost for good; going on at {next_offset}",
                    end.saturating_sub(1)
                ));
            }
            PullOutcome::Unknown => {
                return Err(Failure::new(
                    Exit::Failed,
                    "the broker gave an answer that this version does not know; use a newer one",
                ));
            }
        }
        let stuck = next_offset == asked && messages.is_empty();
        self.merge.page(lane, messages, next_offset, stuck || next_offset >= max_offset);
        Ok(())
    }

    /// How long to wait after a failed pull; fails when waiting does not help.
    fn pause(&mut self, error: client::Error) -> Result<Duration, Failure> {
        if !error.retryable() {
            return Err(error.into());
        }
        let now = Instant::now();
        match &mut self.away {
            None => {
                output::warn(format_args!("{error}; trying again"));
                self.away = Some((now, RETRY_FIRST));
                Ok(RETRY_FIRST)
            }
            Some((since, _)) if !self.args.follow && now.duration_since(*since) > GIVE_UP => {
                Err(error.into())
            }
            Some((_, pause)) => {
                *pause = (*pause * 2).min(RETRY_LAST);
                Ok(error.retry_after().unwrap_or(*pause).max(*pause))
            }
        }
    }

    /// Finds out whether the other queues hold anything before what is at hand.
    async fn check(&mut self) -> Result<(), Failure> {
        let lanes = self.merge.check();
        let mut ends = Vec::with_capacity(lanes.len());
        for some in lanes.chunks(OFFSETS_PER_CALL) {
            let queues: Vec<u32> = some.iter().map(|&(_, queue)| queue).collect();
            let known = loop {
                match self.broker.offsets(&self.args.topic, &queues, None, None).await {
                    Ok(known) => break known,
                    Err(error) => tokio::time::sleep(self.pause(error)?).await,
                }
            };
            ends.extend(some.iter().zip(known).map(|(&(lane, _), offsets)| (lane, offsets.max)));
        }
        for lane in self.merge.checked(&ends) {
            // With a filter the pull that waits there may pass over what came and go on waiting.
            if !self.args.filter.is_empty()
                && let Some(request) = self.requests.get_mut(lane)
                && let Some(abort) = request.under_way.take()
            {
                request.number += 1;
                abort.abort();
            }
        }
        Ok(())
    }

    /// Reads queues that were added to the topic, too, from their start.
    async fn look_for_queues(&mut self) -> Result<(), Failure> {
        if self.args.queue.is_some() {
            return Ok(());
        }
        // When the broker is away the pulls will tell.
        let Ok(found) = self.broker.describe_topic(&self.args.topic).await else { return Ok(()) };
        let known = self.queues;
        self.queues = known.max(u32::try_from(found.queues.len()).unwrap_or(u32::MAX));
        for queue in found.queues.iter().filter(|queue| queue.queue >= known) {
            self.add_lane(queue.queue, queue.min, None, None)?;
        }
        Ok(())
    }

    fn print(&mut self, message: &Message) -> Result<(), Failure> {
        self.printed += 1;
        match self.style {
            Style::Exact => self.out.extend_from_slice(&message.body),
            Style::Harmless => self.out.extend_from_slice(harmless(&shown(message)).as_bytes()),
            Style::Long => {
                let place = format!("{}:{}", message.queue, message.offset);
                let time = message.stored.map(values::time).unwrap_or_default();
                let tag = harmless(message.tag.as_deref().unwrap_or("-"));
                let head = format!("{place:<10} {time} {tag:<10}");
                let head = if output::colours() { paint(DIM, head) } else { head };
                self.out.extend_from_slice(head.as_bytes());
                self.out.push(b' ');
                self.out.extend_from_slice(harmless(&shown(message)).as_bytes());
            }
            Style::Json => {
                let text = output::to_json(&JsonMessage::new(&self.args.topic, message))?;
                self.out.extend_from_slice(&text);
            }
        }
        self.out.push(b'\n');
        Ok(())
    }

    /// Writes what was printed, and notes the progress.
    async fn write(&mut self) -> Result<(), Failure> {
        if !self.out.is_empty() {
            let bytes = std::mem::take(&mut self.out);
            let put = |bytes: Vec<u8>| {
                let mut out = io::stdout().lock();
                out.write_all(&bytes).and_then(|()| out.flush()).map(|()| bytes)
            };
            let done = if bytes.len() <= SMALL_WRITE_BYTES {
                put(bytes)
            } else {
                match tokio::task::spawn_blocking(move || put(bytes)).await {
                    Ok(done) => done,
                    Err(error) => Err(io::Error::other(error)),
                }
            };
            self.out = done.map_err(|error| Failure::stdout(&error))?;
            self.out.clear();
            self.last_printed = Instant::now();
        }
        if self.args.group.is_some() {
            self.written.clear();
            self.written.extend(self.merge.progress());
        }
        Ok(())
    }

    /// Commits what has been written since the last time.
    async fn commit(&mut self) -> Result<(), Failure> {
        let Some(group) = &self.args.group else { return Ok(()) };
        let mut lanes = Vec::new();
        let mut offsets = Vec::new();
        for (lane, (&(queue, offset), committed)) in self.written.iter().zip(&self.committed).enumerate() {
            if committed.is_none_or(|committed| committed != offset) {
                lanes.push(lane);
                offsets.push(QueueOffset { topic: self.args.topic.clone(), queue, offset });
            }
        }
        for (lanes, offsets) in lanes.chunks(OFFSETS_PER_CALL).zip(offsets.chunks(OFFSETS_PER_CALL)) {
            let results = match self.broker.commit_offsets(group, offsets).await {
                Ok(results) => results,
                // The next round tries again; the last one does not get away with it.
                Err(error) if error.retryable() && self.away.is_some() => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for ((&lane, offset), result) in lanes.iter().zip(offsets).zip(results) {
                match result.outcome {
                    CommitOutcome::Committed => {}
                    CommitOutcome::Stale if self.stale_told => {}
                    CommitOutcome::Stale => {
                        self.stale_told = true;
                        output::warn(format_args!(
                            "group {group} stands further on already (queue {} at {}), which is left alone; \
                             `holdfast offsets reset` sets it back",
                            offset.queue,
                            output::or_dash(result.committed, |offset| offset.to_string())
                        ));
                    }
                    CommitOutcome::OutOfRange => output::warn(format_args!(
                        "queue {}: progress {} was not committed, it is not in the queue (any more)",
                        offset.queue, offset.offset
                    )),
                    CommitOutcome::Failed(Some(error)) => return Err(error.into()),
                    CommitOutcome::Failed(None) => {
                        return Err(Failure::new(
                            Exit::Failed,
                            "the broker did not commit and did not say why",
                        ));
                    }
                }
                if let Some(committed) = self.committed.get_mut(lane) {
                    *committed = Some(offset.offset);
                }
            }
        }
        Ok(())
    }
}

/// A body for eyes.
fn shown(message: &Message) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(&message.body)
}
