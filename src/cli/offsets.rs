//! `holdfast offsets`: set a group's progress.

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{
    Exit, Failure, Session, confirm,
    output::{self, Grid, or_dash},
    values::{self, Start},
};
use crate::client::{Reset, ResetTo};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Set a group's progress on a topic, backwards too.
    #[command(after_help = RESET_HELP)]
    Reset(ResetArgs),
}

const RESET_HELP: &str = "\
Going back means that the group gets messages again, going forward that it never gets those between.

Examples:
  holdfast offsets reset --group billing --topic orders --to earliest --dry-run
  holdfast offsets reset --group billing --topic orders --to 2026-03-01T12:00:00Z
  holdfast offsets reset --group billing --topic orders --to 2h
  holdfast offsets reset --group billing --topic orders --queue 3 --to 1500 --yes";

#[derive(Debug, Args)]
pub(super) struct ResetArgs {
    /// The group.
    #[arg(long, short)]
    group: String,
    /// The topic.
    #[arg(long, short)]
    topic: String,
    /// Only this queue; needed for an offset.
    #[arg(long, value_name = "N")]
    queue: Option<u32>,
    /// Where to: `earliest`, `latest`, an offset, or a time (RFC 3339, or how long ago: 2h).
    #[arg(long, value_name = "PLACE")]
    to: Start,
    /// Show what would be done, change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Do not ask.
    #[arg(long, short)]
    yes: bool,
}

pub(super) async fn run(session: Session, command: Command) -> Result<Exit, Failure> {
    let Command::Reset(args) = command;
    let to = match args.to {
        Start::Earliest => ResetTo::Earliest,
        Start::Latest => ResetTo::Latest,
        Start::Time(time) => ResetTo::Time(time),
        Start::Offset(_) if args.queue.is_none() => {
            return Err(Failure::usage("an offset is a place in one queue; name it with --queue"));
        }
        Start::Offset(offset) => ResetTo::Offset(offset),
    };
    let ResetArgs { group, topic, queue, dry_run, yes, .. } = &args;
    let broker = &session.broker;
    if !dry_run {
        confirm(&format!("Set the progress of group {group} on topic {topic}? (--dry-run shows it)"), *yes)?;
    }
    let results = broker.reset_offsets(group, topic, *queue, to, *dry_run).await?;
    let mut grid = Grid::new(&[">QUEUE", ">FROM", ">TO", ">CHANGE"]);
    for result in &results {
        if session.is_json() {
            output::json(&JsonReset {
                group,
                topic,
                queue: result.queue,
                from: result.from,
                to: result.to,
                dry_run: *dry_run,
            })?;
        } else {
            grid.row([
                result.queue.to_string(),
                or_dash(result.from, |from| from.to_string()),
                result.to.to_string(),
                change(result),
            ]);
        }
    }
    if !session.is_json() {
        grid.print()?;
        if *dry_run {
            output::note("nothing was changed: --dry-run");
        }
    }
    Ok(Exit::Ok)
}

/// How many messages back or forth; not known without earlier progress.
fn change(reset: &Reset) -> String {
    or_dash(reset.from, |from| {
        let sign = match reset.to.cmp(&from) {
            std::cmp::Ordering::Less => "-",
            std::cmp::Ordering::Equal => "",
            std::cmp::Ordering::Greater => "+",
        };
        format!("{sign}{}", values::count(reset.to.abs_diff(from)))
    })
}

#[derive(Serialize)]
struct JsonReset<'a> {
    group: &'a str,
    topic: &'a str,
    queue: u32,
    from: Option<u64>,
    to: u64,
    dry_run: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_has_its_direction() {
        let reset = |from, to| change(&Reset { queue: 0, from, to });
        assert_eq!(reset(Some(10), 3), "-7");
        assert_eq!(reset(Some(3), 10), "+7");
        assert_eq!(reset(Some(3), 3), "0");
        assert_eq!(reset(None, 10), "-");
    }
}
