//! `holdfast message`: find messages; and how a message is shown.

use std::{borrow::Cow, collections::BTreeMap, io::Write as _};

use base64::Engine as _;
use clap::{Args, Subcommand};
use serde::Serialize;

use super::{
    Exit, Failure, Session,
    output::{self, BOLD, DIM, harmless, paint},
    values::{self, Moment, Place},
};
use crate::client::{By, Message, Query};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show messages of a topic, found by id, by key, or by place.
    #[command(after_help = GET_HELP)]
    Get(Get),
}

const GET_HELP: &str = "\
Nothing found is exit code 4.

Examples:
  holdfast message get --topic orders --at 3:1500
  holdfast message get --topic orders --id 0193a5c2-8a70-7c3e-9b7a-3f2e1d0c9b8a
  holdfast message get --topic orders --key customer-17 --after 1h --limit 5
  holdfast message get --topic files --at 0:7 --raw > body.bin";

#[derive(Debug, Args)]
pub(super) struct Get {
    /// The topic.
    #[arg(long, short)]
    topic: String,
    #[command(flatten)]
    by: Which,
    /// By id or key: stored at or after this time.
    #[arg(long, value_name = "TIME", conflicts_with = "at")]
    after: Option<Moment>,
    /// By id or key: stored before this time.
    #[arg(long, value_name = "TIME", conflicts_with = "at")]
    before: Option<Moment>,
    /// At most this many, newest first; 1 to 64.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    limit: u32,
    /// Print bodies alone, exactly as they are, one after the other.
    #[arg(long)]
    raw: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// By message id.
    #[arg(long)]
    id: Option<String>,
    /// By one of the message's keys.
    #[arg(long)]
    key: Option<String>,
    /// By place.
    #[arg(long, value_name = "QUEUE:OFFSET")]
    at: Option<Place>,
}

pub(super) async fn run(session: Session, command: Command) -> Result<Exit, Failure> {
    let Command::Get(get) = command;
    let by = match (get.by.id, get.by.key, get.by.at) {
        (Some(id), ..) => By::Id(id),
        (_, Some(key), _) => By::Key(key),
        (.., Some(place)) => By::Place(place.queue, place.offset),
        (None, None, None) => return Err(Failure::usage("name what to look for: --id, --key or --at")),
    };
    let query = Query {
        topic: get.topic.clone(),
        by,
        begin: get.after.map(|Moment(time)| time),
        end: get.before.map(|Moment(time)| time),
        limit: get.limit,
    };
    let found = session.broker.query(query).await?;
    if found.messages.is_empty() {
        return Err(Failure::new(Exit::NotFound, format!("topic `{}` has no such message", get.topic)));
    }
    for (at, message) in found.messages.iter().enumerate() {
        if get.raw {
            let mut out = std::io::stdout().lock();
            out.write_all(&message.body)
                .and_then(|()| out.flush())
                .map_err(|error| Failure::stdout(&error))?;
        } else if session.is_json() {
            output::json(&JsonMessage::new(&get.topic, message))?;
        } else {
            if at > 0 {
                output::line("")?;
            }
            show(&get.topic, message)?;
        }
    }
    if found.truncated {
        output::warn("there may be more; raise --limit or narrow the time with --after and --before");
    }
    Ok(Exit::Ok)
}

/// Everything about a message, for eyes.
fn show(topic: &str, message: &Message) -> Result<(), Failure> {
    let place = format!("{topic}/{} at {}", message.queue, message.offset);
    output::line(format_args!("{}  {}", paint(BOLD, place), harmless(&message.id)))?;
    let field = |name: &str, value: Cow<'_, str>| {
        output::line(format_args!("  {}  {}", paint(DIM, format_args!("{name:<10}")), harmless(&value)))
    };
    if let Some(time) = message.stored {
        field("stored", values::time(time).into())?;
    }
    if let Some(time) = message.born {
        let host = if message.born_host.is_empty() { "" } else { " on " };
        field("born", format!("{}{host}{}", values::time(time), message.born_host).into())?;
    }
    if let Some(tag) = &message.tag {
        field("tag", tag.into())?;
    }
    if !message.keys.is_empty() {
        field("keys", message.keys.join(", ").into())?;
    }
    if let Some(group) = &message.message_group {
        field("group", group.into())?;
    }
    for (key, value) in &message.properties {
        field("property", format!("{key}={value}").into())?;
    }
    if message.flag != 0 {
        field("flag", message.flag.to_string().into())?;
    }
    if let Some(context) = &message.trace_context {
        field("trace", context.into())?;
    }
    match std::str::from_utf8(&message.body) {
        Ok(text) => field("body", text.into()),
        Err(_) => {
            let length = u64::try_from(message.body.len()).unwrap_or(u64::MAX);
            field(
                "body",
                format!("{} that are no text; --raw prints them", values::plural(length, "byte", "bytes"))
                    .into(),
            )
        }
    }
}

/// A message for scripts.
#[derive(Serialize)]
pub(super) struct JsonMessage<'a> {
    topic: &'a str,
    queue: u32,
    offset: u64,
    id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<&'a str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    keys: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    message_group: Option<&'a str>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    properties: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "is_zero")]
    flag: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    stored: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    born: Option<String>,
    #[serde(skip_serializing_if = "str::is_empty")]
    born_host: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_context: Option<&'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    shard: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_position: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_encoding: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
}

fn is_zero(number: &i32) -> bool {
    *number == 0
}

impl<'a> JsonMessage<'a> {
    pub(super) fn new(topic: &'a str, message: &'a Message) -> Self {
        let body = std::str::from_utf8(&message.body).ok();
        Self {
            topic,
            queue: message.queue,
            offset: message.offset,
            id: &message.id,
            tag: message.tag.as_deref(),
            keys: &message.keys,
            message_group: message.message_group.as_deref(),
            properties: &message.properties,
            flag: message.flag,
            stored: message.stored.map(values::time),
            born: message.born.map(values::time),
            born_host: &message.born_host,
            trace_context: message.trace_context.as_deref(),
            shard: &message.shard,
            log_position: message.log_position,
            body_encoding: message.gzip.then_some("gzip"),
            body,
            body_base64: body
                .is_none()
                .then(|| base64::engine::general_purpose::STANDARD.encode(&message.body)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_text_when_it_can_be_and_base64_when_it_must() {
        let mut message = Message { id: "i".into(), body: "é\n".into(), ..Default::default() };
        let text = serde_json::to_string(&JsonMessage::new("t", &message)).unwrap();
        assert_eq!(text, r#"{"topic":"t","queue":0,"offset":0,"id":"i","body":"é\n"}"#);
        message.body = vec![0xff, 0xfe].into();
        let text = serde_json::to_string(&JsonMessage::new("t", &message)).unwrap();
        assert_eq!(text, r#"{"topic":"t","queue":0,"offset":0,"id":"i","body_base64":"//4="}"#);
    }
}
