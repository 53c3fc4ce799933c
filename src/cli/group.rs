//! `holdfast group`: create, update, delete, list, describe.

use clap::{Subcommand, ValueEnum};
use serde::Serialize;

use super::{
    Exit, Failure, Session, confirm,
    output::{self, BOLD, Grid, or_dash, paint},
    values,
};
use crate::{
    client::{Group, GroupDescription},
    model::{GroupName, StartFrom},
};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make a consumer group.
    #[command(after_help = CREATE_HELP)]
    Create {
        /// Its name: 1 to 120 letters, digits, `%`, `|`, `_` or `-`.
        group: String,
        /// Where it begins on a queue without progress.
        #[arg(long, value_enum, value_name = "WHERE")]
        start_from: Option<Begin>,
    },
    /// Change settings of a group.
    #[command(after_help = "Example:\n  holdfast group update billing --start-from latest")]
    Update {
        /// Its name.
        group: String,
        /// Where it begins on a queue without progress.
        #[arg(long, value_enum, value_name = "WHERE")]
        start_from: Begin,
    },
    /// Delete a group and its progress.
    #[command(after_help = "Example:\n  holdfast group delete billing --yes")]
    Delete {
        /// Its name.
        group: String,
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
    },
    /// List groups by name.
    #[command(after_help = "Example:\n  holdfast group list --prefix bill")]
    List {
        /// Only names that begin with this.
        #[arg(long, default_value = "", hide_default_value = true)]
        prefix: String,
    },
    /// Show a group: settings, and how far it is behind on each queue.
    #[command(after_help = DESCRIBE_HELP)]
    Describe {
        /// Its name.
        group: String,
        /// Only this topic.
        #[arg(long)]
        topic: Option<String>,
    },
}

const CREATE_HELP: &str = "\
Examples:
  holdfast group create billing
  holdfast group create dashboards --start-from latest";

const DESCRIBE_HELP: &str = "\
LAG is in messages, BEHIND the age of the oldest message not yet consumed; `-` stands for none or not known.

Examples:
  holdfast group describe billing
  holdfast group describe billing --topic orders -o json";

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Begin {
    /// The first message there is.
    Earliest,
    /// Only what comes from now on.
    Latest,
}

impl From<Begin> for StartFrom {
    fn from(begin: Begin) -> Self {
        match begin {
            Begin::Earliest => Self::Earliest,
            Begin::Latest => Self::Latest,
        }
    }
}

pub(super) async fn run(session: Session, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Create { group, start_from } => {
            let group = GroupName::new(&group)?;
            let made = session.broker.create_group(group.as_str(), start_from.map(Into::into)).await?;
            show_one(&session, "created", &made)
        }
        Command::Update { group, start_from } => {
            let changed = session.broker.update_group(&group, Some(start_from.into())).await?;
            show_one(&session, "updated", &changed)
        }
        Command::Delete { group, yes } => {
            confirm(&format!("Delete group {group} and all its progress?"), yes)?;
            session.broker.delete_group(&group).await?;
            if session.is_json() {
                output::json(&serde_json::json!({ "group": group, "deleted": true }))?;
            } else {
                output::line(format_args!("deleted group {}", paint(BOLD, &group)))?;
            }
            Ok(Exit::Ok)
        }
        Command::List { prefix } => list(&session, &prefix).await,
        Command::Describe { group, topic } => describe(&session, &group, topic.as_deref()).await,
    }
}

fn show_one(session: &Session, done: &str, group: &Group) -> Result<Exit, Failure> {
    if session.is_json() {
        output::json(&JsonGroup::from(group))?;
    } else {
        let start = start(group.settings.start_from);
        output::line(format_args!("{done} group {}: starts from {start}", paint(BOLD, &group.name)))?;
    }
    Ok(Exit::Ok)
}

async fn list(session: &Session, prefix: &str) -> Result<Exit, Failure> {
    let mut grid = Grid::new(&["GROUP", "STARTS FROM"]);
    let mut after = None;
    loop {
        let page = session.broker.groups(prefix, after).await?;
        for group in &page.items {
            if session.is_json() {
                output::json(&JsonGroup::from(group))?;
            } else {
                grid.row([group.name.clone(), start(group.settings.start_from).to_owned()]);
            }
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

async fn describe(session: &Session, group: &str, topic: Option<&str>) -> Result<Exit, Failure> {
    let found = session.broker.describe_group(group, topic).await?;
    if session.is_json() {
        output::json(&JsonDescription::from(&found))?;
        return Ok(Exit::Ok);
    }
    let start = start(found.group.settings.start_from);
    let lag = values::plural(found.lag_messages, "message", "messages");
    if found.queues.is_empty() {
        output::line(format_args!(
            "{}  starts from {start}, no progress yet",
            paint(BOLD, &found.group.name)
        ))?;
        return Ok(Exit::Ok);
    }
    output::line(format_args!("{}  starts from {start}, {lag} behind\n", paint(BOLD, &found.group.name)))?;
    let mut grid = Grid::new(&["TOPIC", ">QUEUE", ">COMMITTED", ">FIRST", ">END", ">LAG", ">BEHIND"]);
    for queue in &found.queues {
        grid.row([
            queue.topic.clone(),
            queue.queue.to_string(),
            queue.committed.to_string(),
            queue.min.to_string(),
            queue.max.to_string(),
            values::count(queue.lag_messages),
            or_dash(queue.lag_time, values::span),
        ]);
    }
    grid.print()?;
    Ok(Exit::Ok)
}

fn start(start: StartFrom) -> &'static str {
    match start {
        StartFrom::Earliest => "earliest",
        StartFrom::Latest => "latest",
    }
}

#[derive(Serialize)]
struct JsonGroup<'a> {
    group: &'a str,
    group_id: u64,
    start_from: &'static str,
}

impl<'a> From<&'a Group> for JsonGroup<'a> {
    fn from(group: &'a Group) -> Self {
        Self { group: &group.name, group_id: group.id, start_from: start(group.settings.start_from) }
    }
}

#[derive(Serialize)]
struct JsonDescription<'a> {
    #[serde(flatten)]
    group: JsonGroup<'a>,
    lag_messages: u64,
    queues: Vec<JsonLag<'a>>,
}

#[derive(Serialize)]
struct JsonLag<'a> {
    topic: &'a str,
    queue: u32,
    committed: u64,
    min_offset: u64,
    max_offset: u64,
    lag_messages: u64,
    lag_seconds: Option<f64>,
}

impl<'a> From<&'a GroupDescription> for JsonDescription<'a> {
    fn from(found: &'a GroupDescription) -> Self {
        let queues = found.queues.iter();
        Self {
            group: (&found.group).into(),
            lag_messages: found.lag_messages,
            queues: queues
                .map(|lag| JsonLag {
                    topic: &lag.topic,
                    queue: lag.queue,
                    committed: lag.committed,
                    min_offset: lag.min,
                    max_offset: lag.max,
                    lag_messages: lag.lag_messages,
                    lag_seconds: lag.lag_time.map(|time| time.as_secs_f64()),
                })
                .collect(),
        }
    }
}
