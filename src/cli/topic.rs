//! `holdfast topic`: create, update, delete, list, describe.

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::{
    Exit, Failure, Session, confirm,
    output::{self, BOLD, DIM, Grid, or_dash, paint},
    values::{self, Limit, Size, Span},
};
use crate::{
    client::{QueueDescription, Topic, TopicChange, TopicDescription},
    model::{DurabilityLevel, TopicName, TopicSettings, TopicType, Visibility},
};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make a topic.
    #[command(after_help = CREATE_HELP)]
    Create {
        /// Its name: 1 to 127 letters, digits, `%`, `|`, `_` or `-`.
        topic: String,
        #[command(flatten)]
        settings: Settings,
    },
    /// Change settings of a topic. What is not named stays.
    #[command(after_help = UPDATE_HELP)]
    Update {
        /// Its name.
        topic: String,
        #[command(flatten)]
        settings: Settings,
    },
    /// Delete a topic with its messages and all progress on it.
    #[command(after_help = "Example:\n  holdfast topic delete orders --yes")]
    Delete {
        /// Its name.
        topic: String,
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
    },
    /// List topics by name.
    #[command(after_help = "Examples:\n  holdfast topic list\n  holdfast topic list --prefix orders -o json")]
    List {
        /// Only names that begin with this.
        #[arg(long, default_value = "", hide_default_value = true)]
        prefix: String,
    },
    /// Show a topic: settings, what an OK survives, queues, groups.
    #[command(after_help = "Example:\n  holdfast topic describe orders")]
    Describe {
        /// Its name.
        topic: String,
    },
}

const CREATE_HELP: &str = "\
Examples:
  holdfast topic create orders
  holdfast topic create orders --queues 8 --type fifo --retention 7d
  holdfast topic create metrics --durability async --retention 6h --retention-size 10GiB";

const UPDATE_HELP: &str = "\
Examples:
  holdfast topic update orders --queues 16      queues can be added freely
  holdfast topic update orders --queues 8       refused while the queues to go hold unread messages
  holdfast topic update metrics --retention none --retention-size 1GiB";

#[derive(Debug, Args)]
pub(super) struct Settings {
    /// Number of queues, 1 to 4096.
    #[arg(long, value_name = "N")]
    queues: Option<u32>,
    /// Which messages it takes: without a message group (normal), with one (fifo), or both (mixed).
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    kind: Option<Kind>,
    /// When an OK is given: after the device has the message (sync: survives a power cut), or when the page
    /// cache has it (async: survives a crash of the broker).
    #[arg(long, value_enum, value_name = "LEVEL")]
    durability: Option<Level>,
    /// When readers of an async topic see a message: at once (appended), or when the device has it (flushed).
    #[arg(long, value_enum, value_name = "WHEN")]
    visibility: Option<Seen>,
    /// Messages older than this go, e.g. 72h; `none`: no limit.
    #[arg(long, value_name = "SPAN")]
    retention: Option<Limit<Span>>,
    /// The oldest go when the topic takes more bytes of log, e.g. 10GiB; `none`: no limit.
    #[arg(long, value_name = "SIZE")]
    retention_size: Option<Limit<Size>>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    Normal,
    Fifo,
    Mixed,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Level {
    Sync,
    Async,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Seen {
    Appended,
    Flushed,
}

impl Settings {
    fn change(&self) -> TopicChange {
        TopicChange {
            queues: self.queues,
            kind: self.kind.map(|kind| match kind {
                Kind::Normal => TopicType::Normal,
                Kind::Fifo => TopicType::Fifo,
                Kind::Mixed => TopicType::Mixed,
            }),
            durability: self.durability.map(|level| match level {
                Level::Sync => DurabilityLevel::Sync,
                Level::Async => DurabilityLevel::Async,
            }),
            visibility: self.visibility.map(|seen| match seen {
                Seen::Appended => Visibility::Appended,
                Seen::Flushed => Visibility::Flushed,
            }),
            retention_age: self.retention.map(|Limit(span)| span.map(|Span(span)| span)),
            retention_bytes: self.retention_size.map(|Limit(size)| size.map(|Size(size)| size)),
        }
    }
}

pub(super) async fn run(session: Session, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Create { topic, settings } => {
            let topic = TopicName::new(&topic)?;
            let made = session.broker.create_topic(topic.as_str(), settings.change()).await?;
            show_one(&session, "created", &made)
        }
        Command::Update { topic, settings } => {
            let change = settings.change();
            if change == TopicChange::default() {
                return Err(Failure::usage("nothing to change; name a setting, e.g. --queues 8"));
            }
            let changed = session.broker.update_topic(&topic, change).await?;
            show_one(&session, "updated", &changed)
        }
        Command::Delete { topic, yes } => {
            confirm(&format!("Delete topic {topic} with all its messages and all progress on it?"), yes)?;
            session.broker.delete_topic(&topic).await?;
            if session.is_json() {
                output::json(&serde_json::json!({ "topic": topic, "deleted": true }))?;
            } else {
                output::line(format_args!("deleted topic {}", paint(BOLD, &topic)))?;
            }
            Ok(Exit::Ok)
        }
        Command::List { prefix } => list(&session, &prefix).await,
        Command::Describe { topic } => describe(&session, &topic).await,
    }
}

fn show_one(session: &Session, done: &str, topic: &Topic) -> Result<Exit, Failure> {
    if session.is_json() {
        output::json(&JsonTopic::from(topic))?;
    } else {
        let name = paint(BOLD, &topic.name);
        output::line(format_args!("{done} topic {name}: {}", in_words(&topic.settings)))?;
    }
    Ok(Exit::Ok)
}

async fn list(session: &Session, prefix: &str) -> Result<Exit, Failure> {
    let mut grid =
        Grid::new(&["TOPIC", ">QUEUES", "TYPE", "DURABILITY", "VISIBILITY", ">RETENTION", ">SIZE LIMIT"]);
    let mut after = None;
    loop {
        let page = session.broker.topics(prefix, after).await?;
        for topic in &page.items {
            if session.is_json() {
                output::json(&JsonTopic::from(topic))?;
                continue;
            }
            let settings = &topic.settings;
            grid.row([
                topic.name.clone(),
                settings.queues.to_string(),
                kind(settings.kind).to_owned(),
                level(settings.durability).to_owned(),
                seen(settings.visibility).to_owned(),
                settings.retention.age.map_or_else(|| "none".to_owned(), values::span),
                settings.retention.bytes.map_or_else(|| "none".to_owned(), values::size),
            ]);
        }
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    if !session.is_json() {
        grid.print()?;
    }
    Ok(Exit::Ok)
}

async fn describe(session: &Session, topic: &str) -> Result<Exit, Failure> {
    let found = session.broker.describe_topic(topic).await?;
    if session.is_json() {
        output::json(&JsonDescription::from(&found))?;
        return Ok(Exit::Ok);
    }
    let TopicDescription { topic, queues, groups, promise } = &found;
    output::line(format_args!("{}  {}", paint(BOLD, &topic.name), in_words(&topic.settings)))?;
    if !promise.is_empty() {
        output::line(promise)?;
    }
    let map =
        format!("map version {}, groups over {} queues", topic.queue_map_version, topic.queue_map_queues);
    output::line(paint(DIM, format_args!("id {}, {map}", topic.id)))?;
    output::line("")?;
    let mut grid = Grid::new(&[">QUEUE", ">FIRST", ">END", ">MESSAGES", ">SIZE", "OLDEST", "NEWEST"]);
    for queue in queues {
        grid.row([
            queue.queue.to_string(),
            queue.min.to_string(),
            queue.max.to_string(),
            values::count(queue.max.saturating_sub(queue.min)),
            values::size(queue.bytes),
            or_dash(queue.oldest, values::time),
            or_dash(queue.newest, values::time),
        ]);
    }
    grid.print()?;
    if !groups.is_empty() {
        output::line(format_args!("\nGroups: {}", groups.join(", ")))?;
    }
    Ok(Exit::Ok)
}

/// Settings as half a sentence.
fn in_words(settings: &TopicSettings) -> String {
    let mut words = vec![
        values::plural(settings.queues.into(), "queue", "queues"),
        kind(settings.kind).to_owned(),
        level(settings.durability).to_owned(),
    ];
    if settings.durability == DurabilityLevel::Async {
        words.push(format!("visible when {}", seen(settings.visibility)));
    }
    words.push(match (settings.retention.age, settings.retention.bytes) {
        (None, None) => "kept without limit".to_owned(),
        (Some(age), None) => format!("kept {}", values::span(age)),
        (None, Some(bytes)) => format!("kept up to {}", values::size(bytes)),
        (Some(age), Some(bytes)) => format!("kept {} and up to {}", values::span(age), values::size(bytes)),
    });
    words.join(", ")
}

fn kind(kind: TopicType) -> &'static str {
    match kind {
        TopicType::Normal => "normal",
        TopicType::Fifo => "fifo",
        TopicType::Mixed => "mixed",
    }
}

fn level(level: DurabilityLevel) -> &'static str {
    match level {
        DurabilityLevel::Sync => "sync",
        DurabilityLevel::Async => "async",
    }
}

fn seen(visibility: Visibility) -> &'static str {
    match visibility {
        Visibility::Appended => "appended",
        Visibility::Flushed => "flushed",
    }
}

/// A topic for scripts. `null` stands for "no limit".
#[derive(Serialize)]
struct JsonTopic<'a> {
    topic: &'a str,
    topic_id: u64,
    queues: u32,
    r#type: &'static str,
    durability: &'static str,
    visibility: &'static str,
    retention_seconds: Option<f64>,
    retention_bytes: Option<u64>,
    queue_map_version: u64,
    queue_map_queues: u32,
}

impl<'a> From<&'a Topic> for JsonTopic<'a> {
    fn from(topic: &'a Topic) -> Self {
        let settings = &topic.settings;
        Self {
            topic: &topic.name,
            topic_id: topic.id,
            queues: settings.queues,
            r#type: kind(settings.kind),
            durability: level(settings.durability),
            visibility: seen(settings.visibility),
            retention_seconds: settings.retention.age.map(|age| age.as_secs_f64()),
            retention_bytes: settings.retention.bytes,
            queue_map_version: topic.queue_map_version,
            queue_map_queues: topic.queue_map_queues,
        }
    }
}

#[derive(Serialize)]
struct JsonDescription<'a> {
    #[serde(flatten)]
    topic: JsonTopic<'a>,
    promise: &'a str,
    groups: &'a [String],
    queue_list: Vec<JsonQueue>,
}

#[derive(Serialize)]
struct JsonQueue {
    queue: u32,
    min_offset: u64,
    max_offset: u64,
    bytes: u64,
    oldest: Option<String>,
    newest: Option<String>,
}

impl<'a> From<&'a TopicDescription> for JsonDescription<'a> {
    fn from(found: &'a TopicDescription) -> Self {
        Self {
            topic: (&found.topic).into(),
            promise: &found.promise,
            groups: &found.groups,
            queue_list: found.queues.iter().map(JsonQueue::from).collect(),
        }
    }
}

impl From<&QueueDescription> for JsonQueue {
    fn from(queue: &QueueDescription) -> Self {
        Self {
            queue: queue.queue,
            min_offset: queue.min,
            max_offset: queue.max,
            bytes: queue.bytes,
            oldest: queue.oldest.map(values::time),
            newest: queue.newest.map(values::time),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::Retention;

    #[test]
    fn settings_read_like_half_a_sentence() {
        assert_eq!(in_words(&TopicSettings::default()), "4 queues, mixed, sync, kept 3d 00h");
        let settings = TopicSettings {
            queues: 1,
            kind: TopicType::Fifo,
            durability: DurabilityLevel::Async,
            visibility: Visibility::Flushed,
            retention: Retention { age: Some(Duration::from_secs(60)), bytes: Some(1 << 20) },
        };
        assert_eq!(
            in_words(&settings),
            "1 queue, fifo, async, visible when flushed, kept 1m 00s and up to 1.0 MiB"
        );
    }

    #[test]
    fn scripts_see_no_limit_as_null() {
        let topic = Topic {
            name: "t".into(),
            id: 7,
            settings: TopicSettings { retention: Retention { age: None, bytes: None }, ..Default::default() },
            queue_map_version: 1,
            queue_map_queues: 4,
        };
        let text = serde_json::to_string(&JsonTopic::from(&topic)).unwrap();
        assert!(text.contains(r#""retention_seconds":null,"retention_bytes":null"#), "{text}");
    }
}
