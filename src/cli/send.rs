//! `holdfast send`: messages from arguments, a file, or the lines of a stream.

use std::{
    fs::File,
    io::{self, Read},
    path::PathBuf,
};

use bytes::Bytes;
use clap::Args;
use serde::Serialize;

use super::{
    Exit, Failure, Session, lines,
    output::{self, BOLD, paint},
    values::{self, Pair},
};
use crate::{
    client::{Batch, Durability, OutgoingMessage, Sent},
    model::{MAX_BATCH_MESSAGES, MAX_BODY_BYTES, TopicName},
};

const HELP: &str = "\
A message is a body of 1 byte to 4 MiB, kept byte for byte. With --lines each line is one, without its line end;
empty lines cannot be messages and are counted. Lines go out in batches, many at a time, each batch to the next
queue in turn (or all to one with --queue or --message-group); `pull` puts them back into the order of the log.

When --lines fails it says how many lines from the start are acknowledged and how to go on: --skip N.

Examples:
  holdfast send --topic orders 'one message'
  holdfast send --topic orders --tag paid --key customer-17 --property source=web '{\"order\": 7}'
  holdfast send --topic orders --message-group customer-17 'first' 'second'
  holdfast send --topic files --file photo.jpg
  holdfast send --topic logs --lines < /var/log/syslog
  tail -F app.log | holdfast send --topic logs --lines";

/// Send messages to a topic.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(super) struct SendArgs {
    /// The topic.
    #[arg(long, short)]
    topic: String,
    /// One message each; several are stored together or not at all.
    #[arg(value_name = "BODY", conflicts_with_all = ["file", "lines"])]
    bodies: Vec<std::ffi::OsString>,
    /// Send a file as one message (`-`: standard input); with --lines its lines.
    #[arg(long, short, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Send each line of standard input (or of --file) as a message.
    #[arg(long, short)]
    lines: bool,
    /// With --lines: leave out the first N lines, which are stored already.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, requires = "lines")]
    skip: u64,
    /// With --lines: at most this many messages in a batch.
    #[arg(long, value_name = "N", default_value_t = 512, requires = "lines", value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: u16,
    /// With --lines: at most this many batches in flight.
    #[arg(long, value_name = "N", default_value_t = 32, requires = "lines", value_parser = clap::value_parser!(u16).range(1..))]
    in_flight: u16,
    #[command(flatten)]
    dress: Dress,
    /// Send to this queue; otherwise the message group or the broker chooses.
    #[arg(long, value_name = "N")]
    queue: Option<u32>,
}

/// What goes with each body.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct Dress {
    /// The tag that consumers filter by.
    #[arg(long)]
    tag: Option<String>,
    /// A key to find the message by; may be given several times.
    #[arg(long = "key", value_name = "KEY")]
    keys: Vec<String>,
    /// Messages of one group go to one queue and keep their order.
    #[arg(long, visible_alias = "group", value_name = "GROUP")]
    message_group: Option<String>,
    /// What the application wants to say beside the body; may be given several times.
    #[arg(long = "property", short = 'p', value_name = "KEY=VALUE")]
    properties: Vec<Pair>,
    /// The id, for a single message; the broker makes one otherwise.
    #[arg(long, conflicts_with = "lines")]
    id: Option<String>,
    /// The application's own number.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 0,
        hide_default_value = true,
        allow_negative_numbers = true
    )]
    flag: i32,
    /// Tracing context, e.g. a W3C traceparent.
    #[arg(long, value_name = "TEXT")]
    trace_context: Option<String>,
}

impl Dress {
    /// A message with `body`.
    pub(super) fn on(&self, body: Bytes) -> OutgoingMessage {
        let mut message = OutgoingMessage::new(body).flag(self.flag);
        if let Some(tag) = &self.tag {
            message = message.tag(tag);
        }
        for key in &self.keys {
            message = message.key(key);
        }
        if let Some(group) = &self.message_group {
            message = message.message_group(group);
        }
        for Pair { key, value } in &self.properties {
            message = message.property(key, value);
        }
        if let Some(id) = &self.id {
            message = message.id(id);
        }
        if let Some(context) = &self.trace_context {
            message = message.trace_context(context);
        }
        message
    }
}

pub(super) async fn run(session: Session, args: SendArgs) -> Result<Exit, Failure> {
    let topic = TopicName::new(&args.topic)?;
    if args.lines {
        let input = Input::open(args.file)?;
        let job = lines::Job {
            topic: topic.as_str().to_owned(),
            queue: args.queue,
            dress: args.dress,
            skip: args.skip,
            batch: args.batch.into(),
            in_flight: args.in_flight.into(),
        };
        return lines::run(session, job, input).await;
    }
    let bodies = bodies(args.bodies, args.file)?;
    if args.dress.id.is_some() && bodies.len() > 1 {
        return Err(Failure::usage("--id names one message; send the others without it"));
    }
    let messages = bodies.into_iter().map(|body| args.dress.on(body)).collect();
    let batch = Batch { queue: args.queue, ..Batch::new(topic.as_str(), messages) };
    let sent = tokio::select! {
        sent = session.broker.send(batch) => sent?,
        () = session.stop.cancelled() => {
            return Err(Failure::new(Exit::Interrupted, "interrupted; the message may be stored"));
        }
    };
    show(&session, topic.as_str(), &sent)?;
    Ok(Exit::Ok)
}

/// The bodies of a send that is not by line.
fn bodies(arguments: Vec<std::ffi::OsString>, file: Option<PathBuf>) -> Result<Vec<Bytes>, Failure> {
    use std::os::unix::ffi::OsStringExt as _;
    let bodies: Vec<Bytes> = match file {
        Some(path) => vec![Input::open(Some(path))?.whole()?.into()],
        None => arguments.into_iter().map(|argument| argument.into_vec().into()).collect(),
    };
    if bodies.is_empty() {
        return Err(Failure::usage("name what to send: a BODY, --file PATH, or --lines for standard input"));
    }
    if bodies.len() > MAX_BATCH_MESSAGES {
        return Err(Failure::refused(format!(
            "{} messages; one call takes {MAX_BATCH_MESSAGES}, use --lines for more",
            bodies.len()
        )));
    }
    for body in &bodies {
        if body.is_empty() {
            return Err(Failure::refused("the body is empty; a message has at least 1 byte"));
        }
        if body.len() > MAX_BODY_BYTES {
            return Err(Failure::refused(format!(
                "the body has {} bytes; a message has at most 4 MiB",
                body.len()
            )));
        }
    }
    Ok(bodies)
}

fn show(session: &Session, topic: &str, sent: &Sent) -> Result<(), Failure> {
    if session.is_json() {
        return output::json(&JsonSent {
            topic,
            queue: sent.queue,
            receipts: sent
                .receipts
                .iter()
                .map(|r| JsonReceipt { message_id: &r.message_id, offset: r.offset })
                .collect(),
            stored: sent.stored.map(values::time),
            durability: sent.durability.name(),
        });
    }
    let promise = promise(sent.durability);
    sent.receipts.iter().try_for_each(|receipt| {
        let place = paint(BOLD, format_args!("{topic}/{} at {}", sent.queue, receipt.offset));
        output::line(format_args!("{place}  {}  {promise}", output::harmless(&receipt.message_id)))
    })
}

/// What a durability promises, in two words.
pub(super) fn promise(durability: Durability) -> &'static str {
    match durability {
        Durability::Disk => "durable on disk",
        Durability::Memory => "durable in memory",
        Durability::Unknown => "stored",
    }
}

/// Where bytes come from.
pub(super) struct Input {
    source: Box<dyn Read + Send>,
    /// For messages about it.
    pub(super) name: String,
    /// Its size, when it is a file.
    pub(super) bytes: Option<u64>,
}

impl Input {
    /// A file; standard input when there is none, or when it is `-`.
    fn open(path: Option<PathBuf>) -> Result<Self, Failure> {
        match path.filter(|path| path.as_os_str() != "-") {
            Some(path) => {
                let name = path.display().to_string();
                let file = File::open(&path).map_err(|error| Failure::io(&name, &error))?;
                Ok(Self { bytes: length(&file), source: Box::new(file), name })
            }
            None => {
                use std::os::fd::AsFd as _;
                let name = "standard input".to_owned();
                // Our own handle: unbuffered, and not locked while a thread reads it.
                let handle = io::stdin().as_fd().try_clone_to_owned();
                let file = File::from(handle.map_err(|error| Failure::io(&name, &error))?);
                Ok(Self { bytes: length(&file), source: Box::new(file), name })
            }
        }
    }

    /// All of it, if it can be a body.
    fn whole(self) -> Result<Vec<u8>, Failure> {
        let most = u64::try_from(MAX_BODY_BYTES).unwrap_or(u64::MAX);
        let mut body = Vec::new();
        let read = self.source.take(most + 1).read_to_end(&mut body);
        read.map_err(|error| Failure::io(&self.name, &error))?;
        if body.len() > MAX_BODY_BYTES {
            return Err(Failure::refused(format!(
                "{} has more than 4 MiB, the most that a message takes; send its --lines, or parts of it",
                self.name
            )));
        }
        Ok(body)
    }

    /// Gives it to a thread that may wait for it.
    pub(super) fn into_source(self) -> Box<dyn Read + Send> {
        self.source
    }
}

fn length(file: &File) -> Option<u64> {
    file.metadata().ok().filter(std::fs::Metadata::is_file).map(|about| about.len())
}

#[derive(Serialize)]
struct JsonSent<'a> {
    topic: &'a str,
    queue: u32,
    receipts: Vec<JsonReceipt<'a>>,
    stored: Option<String>,
    durability: &'static str,
}

#[derive(Serialize)]
struct JsonReceipt<'a> {
    message_id: &'a str,
    offset: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_a_message_is_refused_before_it_is_sent() {
        let error =
            |bodies: &[&str]| super::bodies(bodies.iter().map(Into::into).collect(), None).unwrap_err().text;
        assert!(error(&[]).contains("--lines"));
        assert!(error(&["a", ""]).contains("empty"));
        assert!(error(&[&"x".repeat(MAX_BODY_BYTES + 1)]).contains("4 MiB"));
        assert!(error(&["x"; 1025]).contains("1024"));
    }
}
