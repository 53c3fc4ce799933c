//! `holdfast store`: look after a data directory while no broker uses it.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{
    Exit, Failure, Format,
    output::{self, BAD, BOLD, DIM, GOOD, paint},
    values,
};
use crate::store::{self, Action, Repair, Report, Step};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Read a whole data directory and tell what is damaged. Changes nothing.
    #[command(after_help = CHECK_HELP)]
    Check {
        /// The data directory of a broker that does not run.
        #[arg(value_name = "DATA_DIR")]
        dir: PathBuf,
    },
    /// Put a data directory in order: damaged derived files go, foreign files are set aside. Shows what it would do
    /// unless --yes is given. Never removes bytes of the log.
    #[command(after_help = REPAIR_HELP)]
    Repair {
        /// The data directory of a broker that does not run.
        #[arg(value_name = "DATA_DIR")]
        dir: PathBuf,
        /// Do it.
        #[arg(long)]
        yes: bool,
    },
}

const REPAIR_HELP: &str = "\
A broker starts with damage as well, and serves all the rest; this makes the damage that can be put right go away:
  - snapshots and files of the key and queue index that are damaged are removed; the next start rebuilds them
  - a damaged header of a segment is written anew, from its other copy or from name and length
  - a segment under another's name gets one that fits
  - files in log/ that are not of this shard, or hold nothing of it, move to DATA_DIR/quarantine/<time>/
Messages that are lost in the log stay lost; their readers are told. Exit code 7 when there are such.

Examples:
  holdfast store repair ./data
  holdfast store repair ./data --yes
  holdfast store repair /var/lib/holdfast -o json";

const CHECK_HELP: &str = "\
Every record of the log is read and its checksum compared; snapshots and the key index, too. Exit code 7 when there is
damage. A torn end is none: it was never acknowledged, and the next start cuts it off. Unusable snapshots cost a slower
start, no data. Unusable files of the key index may hide messages from look-ups by key or id; removed, they are rebuilt
from the log by the next start.

Examples:
  holdfast store check ./data
  holdfast store check /var/lib/holdfast -o json";

pub(super) fn run(format: Format, command: Command) -> Result<Exit, Failure> {
    let dir = match command {
        Command::Check { dir } => dir,
        Command::Repair { dir, yes } => return repair(format, &dir, yes),
    };
    let shards = shards(&dir)?;
    let mut damaged = false;
    for (number, shard) in shards.iter().enumerate() {
        let bar = progress();
        let report = store::check(shard, &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        });
        bar.finish_and_clear();
        let report = report.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        damaged |= !report.damage.is_empty();
        if format == Format::Json {
            output::json(&JsonReport::new(shard, &report))?;
        } else {
            if number > 0 {
                output::line("")?;
            }
            show(shard, &report)?;
        }
    }
    Ok(if damaged { Exit::DataLoss } else { Exit::Ok })
}

fn repair(format: Format, dir: &Path, yes: bool) -> Result<Exit, Failure> {
    let stamp: String = values::time(SystemTime::now()).chars().filter(char::is_ascii_alphanumeric).collect();
    let mut lost = false;
    for (number, shard) in shards(dir)?.iter().enumerate() {
        let bar = progress();
        let repaired = store::repair(shard, &stamp, yes, &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        });
        bar.finish_and_clear();
        let repaired = repaired.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        lost |= repaired.report.damage.iter().any(|place| place.begin < place.end);
        if format == Format::Json {
            output::json(&JsonRepair::new(shard, &repaired))?;
        } else {
            if number > 0 {
                output::line("")?;
            }
            show_repair(shard, &repaired)?;
        }
    }
    Ok(if lost { Exit::DataLoss } else { Exit::Ok })
}

fn show_repair(shard: &Path, repaired: &Repair) -> Result<(), Failure> {
    show(shard, &repaired.report)?;
    let (done, verb) = (repaired.done, |done, would| if repaired.done { done } else { would });
    for Step { file, action, why, .. } in &repaired.steps {
        let file = file.display();
        let text = match action {
            Action::Remove => format!("{} {file}", verb("removed", "would remove")),
            Action::SetAside(to) => format!("{} {file} to {}", verb("moved", "would move"), to.display()),
            Action::Rename(to) => format!("{} {file} to {}", verb("renamed", "would rename"), to.display()),
            Action::RewriteHeader(to) => {
                let verb = verb("rewrote", "would rewrite");
                format!("{verb} the header of {file}, keeping the old one in {}", to.display())
            }
        };
        output::line(format_args!("  {}  {text}: {why}", paint(DIM, "repair   ")))?;
    }
    let text = match (repaired.steps.len(), done) {
        (0, _) => "nothing to put in order",
        (_, true) => "done; `holdfast store check` tells what is left",
        (_, false) => "nothing was changed; add --yes to do it",
    };
    output::line(format_args!("  {}  {text}", paint(DIM, "repair   ")))
}

/// The shards in a data directory: itself, or those directly below.
fn shards(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let is_shard = |dir: &Path| dir.join("log").is_dir();
    if is_shard(dir) {
        return Ok(vec![dir.to_path_buf()]);
    }
    let name = dir.display().to_string();
    let entries = fs::read_dir(dir).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Failure::new(Exit::NotFound, format!("{name}: {error}")),
        _ => Failure::io(&name, &error),
    })?;
    let below = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut found: Vec<PathBuf> = below.filter(|path| is_shard(path)).collect();
    if found.is_empty() {
        let text = format!("{name} holds no log; give the data directory of a broker");
        return Err(Failure::new(Exit::NotFound, text));
    }
    found.sort();
    Ok(found)
}

fn progress() -> ProgressBar {
    if !output::watched() {
        return ProgressBar::hidden();
    }
    let template = "{wide_bar:.green} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} to go";
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn show(shard: &Path, report: &Report) -> Result<(), Failure> {
    let places = u64::try_from(report.damage.len()).unwrap_or(u64::MAX);
    let verdict = match places {
        0 => paint(GOOD, "no damage"),
        _ => paint(BAD, format_args!("damaged in {}", values::plural(places, "place", "places"))),
    };
    output::line(format_args!("{}  {verdict}", paint(BOLD, shard.display())))?;
    let field = |name: &str, value: String| {
        output::line(format_args!("  {}  {value}", paint(DIM, format_args!("{name:<9}"))))
    };
    field(
        "log",
        format!(
            "{} in {}, {} to {}, epoch {}",
            values::size(report.log_bytes),
            values::plural(report.segments, "segment", "segments"),
            report.log_start,
            report.log_end,
            report.epoch,
        ),
    )?;
    let end = match report.torn_until {
        Some(until) => format!("torn up to {until}: never acknowledged, the next start cuts it off"),
        None if report.clean => "stopped cleanly".to_owned(),
        None => "not stopped cleanly, nothing torn".to_owned(),
    };
    field("end", end)?;
    let records: Vec<String> =
        report.records.iter().map(|(kind, count)| format!("{kind} {}", values::count(*count))).collect();
    field("records", records.join(", "))?;
    for (file, problem) in &report.snapshots {
        field("snapshot", format!("{file}: {}", problem.as_deref().unwrap_or("usable")))?;
    }
    let unusable = report.keys.iter().filter_map(|(file, problem)| Some((file, problem.as_ref()?)));
    let files = values::plural(u64::try_from(report.keys.len()).unwrap_or(u64::MAX), "file", "files");
    field("keys", format!("{files}, {} unusable", unusable.clone().count()))?;
    for (file, problem) in unusable {
        field("keys", format!("{file}: {problem}; remove it, and the next start rebuilds it from the log"))?;
    }
    let unusable = report.index.iter().filter_map(|(file, problem)| Some((file, problem.as_ref()?)));
    for (file, problem) in unusable {
        field("index", format!("{file}: {problem}; the broker rebuilds it from the log"))?;
    }
    for damage in &report.damage {
        let place = format!("{} {} to {}", damage.file, damage.begin, damage.end);
        field("damage", format!("{}: {}", paint(BAD, place), damage.text))?;
    }
    Ok(())
}

#[derive(Serialize)]
struct JsonReport<'a> {
    dir: String,
    segments: u64,
    log_bytes: u64,
    log_start: u64,
    log_end: u64,
    epoch: u32,
    clean: bool,
    torn_until: Option<u64>,
    records: &'a std::collections::BTreeMap<&'static str, u64>,
    snapshots: Vec<JsonDerived<'a>>,
    keys: Vec<JsonDerived<'a>>,
    index: Vec<JsonDerived<'a>>,
    damage: Vec<JsonDamage<'a>>,
}

#[derive(Serialize)]
struct JsonRepair<'a> {
    /// The steps were taken.
    done: bool,
    steps: Vec<JsonStep<'a>>,
    /// As it was found before.
    report: JsonReport<'a>,
}

#[derive(Serialize)]
struct JsonStep<'a> {
    file: String,
    /// `remove`, `set_aside`, `rename` or `rewrite_header`.
    action: &'static str,
    /// Where it goes, or where what stood there is kept.
    to: Option<String>,
    why: &'a str,
}

impl<'a> JsonRepair<'a> {
    fn new(shard: &Path, repaired: &'a Repair) -> Self {
        let steps = repaired.steps.iter().map(|Step { file, action, why, .. }| {
            let (action, to) = match action {
                Action::Remove => ("remove", None),
                Action::SetAside(to) => ("set_aside", Some(to)),
                Action::Rename(to) => ("rename", Some(to)),
                Action::RewriteHeader(to) => ("rewrite_header", Some(to)),
            };
            let to = to.map(|to| to.display().to_string());
            JsonStep { file: file.display().to_string(), action, to, why }
        });
        Self { done: repaired.done, steps: steps.collect(), report: JsonReport::new(shard, &repaired.report) }
    }
}

#[derive(Serialize)]
struct JsonDerived<'a> {
    file: &'a str,
    /// `null`: usable.
    problem: Option<&'a str>,
}

#[derive(Serialize)]
struct JsonDamage<'a> {
    file: &'a str,
    begin: u64,
    end: u64,
    text: &'a str,
}

impl<'a> JsonReport<'a> {
    fn new(shard: &Path, report: &'a Report) -> Self {
        let derived = |files: &'a [(String, Option<String>)]| {
            files.iter().map(|(file, problem)| JsonDerived { file, problem: problem.as_deref() }).collect()
        };
        let damage = report.damage.iter();
        Self {
            dir: shard.display().to_string(),
            segments: report.segments,
            log_bytes: report.log_bytes,
            log_start: report.log_start,
            log_end: report.log_end,
            epoch: report.epoch,
            clean: report.clean,
            torn_until: report.torn_until,
            records: &report.records,
            snapshots: derived(&report.snapshots),
            keys: derived(&report.keys),
            index: derived(&report.index),
            damage: damage
                .map(|d| JsonDamage { file: &d.file, begin: d.begin, end: d.end, text: &d.text })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_found_in_the_directory_or_right_below() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(shards(dir.path()).unwrap_err().exit, Exit::NotFound);
        assert_eq!(shards(&dir.path().join("nowhere")).unwrap_err().exit, Exit::NotFound);
        for name in ["b", "a", "c"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        for name in ["b", "a"] {
            fs::create_dir(dir.path().join(name).join("log")).unwrap();
        }
        let found = shards(dir.path()).unwrap();
        assert_eq!(found, [dir.path().join("a"), dir.path().join("b")]);
        assert_eq!(shards(&found[0]).unwrap(), [found[0].clone()]);
    }
}
