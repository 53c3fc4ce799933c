//! The results: tables for eyes and documents, JSON for scripts.

use std::{collections::BTreeMap, fmt::Write as _, fs, io::Write as _, path::Path};

use holdfast::cli::probe::Probe;
use serde_json::json;

use crate::{
    Options, Output, Result, Run,
    cells::{Cell, LONG_WHAT},
    goals::{Goal, Target, View},
    load::{Sample, number},
    requests::BODY_BYTES,
};

/// Least part of its first stretch that the last one of a long run may reach (G10).
const SUSTAINED_LEAST: f64 = 0.85;
/// Longest call of a long run, by its median (G10).
const STALL_MOST: f64 = 50.0;

/// A goal and what came of it.
struct Judged<'a> {
    goal: &'a Goal,
    /// One a repeat.
    values: Vec<f64>,
    median: Option<f64>,
    verdict: &'static str,
}

pub fn print(options: &Options, goals: &[&Goal], cells: &[&Cell], run: &Run) -> Result<()> {
    let judged: Vec<Judged<'_>> = goals.iter().map(|&goal| judge(goal, run)).collect();
    let text = match options.output {
        Output::Json => serde_json::to_string(&as_json(options, &judged, cells, run))? + "\n",
        Output::Text => as_text(options, &judged, cells, run)?,
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn judge<'a>(goal: &'a Goal, run: &Run) -> Judged<'a> {
    let pairs = run.probes.windows(2);
    let views = run.repeats.iter().zip(pairs).filter_map(|(samples, pair)| match pair {
        [before, after] => Some(View { samples, device: [before, after] }),
        _ => None,
    });
    let (mut values, mut unsteady) = (Vec::new(), 0);
    for view in views {
        let [before, after] = view.device;
        if goal.on_device && !before.agrees(after) {
            unsteady += 1;
        } else {
            values.extend((goal.value)(&view));
        }
    }
    let median = median(values.iter().copied());
    let verdict = match median.map(|value| goal.target.is_met(value)) {
        None if unsteady > 0 => "void: the device changed",
        None => "does not apply",
        Some(None) => "",
        Some(Some(true)) => "reached",
        Some(Some(false)) => "**missed**",
    };
    Judged { goal, values, median, verdict }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let upper = values.len() / 2;
    let (a, b) = (values.get(values.len().checked_sub(1)? / 2)?, values.get(upper)?);
    Some(f64::midpoint(*a, *b))
}

/// The median of one figure of a cell.
fn of_cell(run: &Run, name: &str, figure: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
    median(run.repeats.iter().filter_map(|samples| figure(samples.get(name)?)))
}

fn ratio(value: f64) -> String {
    match value {
        value if value >= 9.95 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

fn target(target: Target) -> String {
    match target {
        Target::AtMost(most) => format!("≤ {most}"),
        Target::AtLeast(least) => format!("≥ {least}"),
        Target::None => "–".into(),
    }
}

fn as_text(options: &Options, judged: &[Judged<'_>], cells: &[&Cell], run: &Run) -> Result<String> {
    let mut out = String::new();
    for (name, value) in about(options) {
        writeln!(out, "- {name}: {value}")?;
    }
    writeln!(out)?;
    if !judged.is_empty() {
        let mut rows =
            vec![["", "ratio", "target", "bare path", "measured", "lowest–highest", ""].map(String::from)];
        for one in judged {
            let [low, high] = [f64::min, f64::max].map(|pick| one.values.iter().copied().reduce(pick));
            rows.push([
                one.goal.id.into(),
                one.goal.what.into(),
                target(one.goal.target),
                one.goal.bare.into(),
                one.median.map(ratio).unwrap_or_default(),
                low.zip(high)
                    .map(|(low, high)| format!("{}–{}", ratio(low), ratio(high)))
                    .unwrap_or_default(),
                one.verdict.into(),
            ]);
        }
        table(&mut out, options.markdown, &rows)?;
    }
    if !cells.is_empty() {
        table(&mut out, options.markdown, &cell_rows(cells, run))?;
    }
    let syncs = sync_rows(cells, run);
    if syncs.len() > 1 {
        table(&mut out, options.markdown, &syncs)?;
    }
    table(&mut out, options.markdown, &probe_rows(&run.probes))?;
    if let Some((now, most)) = run.memory.iter().max_by_key(|(_, most)| *most) {
        writeln!(out, "Memory of the product: {} MiB at the end, at most {} MiB.", now >> 20, most >> 20)?;
    }
    if let Some(long) = Long::of(run) {
        let word = |met| if met { "reached" } else { "**missed**" };
        let last = word(long.last_by_first >= SUSTAINED_LEAST);
        let stall = word(long.stall_by_p50 <= STALL_MOST);
        writeln!(out, "\nG10, {LONG_WHAT}, {} minutes:\n", options.sustained.unwrap_or_default())?;
        let (by_first, by_p50) = (ratio(long.last_by_first), ratio(long.stall_by_p50));
        let rows = [
            ["", "ratio", "target", "measured", ""].map(String::from),
            ["G10", "last tenth by first", &format!("≥ {SUSTAINED_LEAST}"), &by_first, last]
                .map(String::from),
            ["G10", "longest call by p50", &format!("≤ {STALL_MOST}"), &by_p50, stall].map(String::from),
        ];
        table(&mut out, options.markdown, &rows)?;
        let rates: Vec<String> =
            run.stretches.iter().map(|stretch| format!("{:.0}", stretch.messages_per_second)).collect();
        writeln!(
            out,
            "Messages a second in each tenth: {}. Longest call {:.0} ms.",
            rates.join(", "),
            long.stall_ms
        )?;
    }
    Ok(out)
}

/// What a long run shows.
struct Long {
    last_by_first: f64,
    stall_by_p50: f64,
    stall_ms: f64,
}

impl Long {
    fn of(run: &Run) -> Option<Self> {
        let (first, last) = (run.stretches.first()?, run.stretches.last()?);
        let p50 = median(run.stretches.iter().filter_map(|stretch| Some(stretch.latency?.p50)))?;
        let stall_ms = run.stretches.iter().map(|stretch| stretch.longest_ms).reduce(f64::max)?;
        Some(Self {
            last_by_first: last.messages_per_second / first.messages_per_second,
            stall_by_p50: stall_ms / p50,
            stall_ms,
        })
    }
}

fn cell_rows(cells: &[&Cell], run: &Run) -> Vec<[String; 10]> {
    let mut rows = vec![
        [
            "cell",
            "load",
            "messages/s",
            "MB/s",
            "server CPU µs/message",
            "of it in the background",
            "p50 ms",
            "p99 ms",
            "p99.9 ms",
            "machine: server, client, others %",
        ]
        .map(String::from),
    ];
    let megabytes = number(u64::try_from(BODY_BYTES).unwrap_or(0)) / 1e6;
    for cell in cells {
        let figure = |pick: fn(&Sample) -> Option<f64>| of_cell(run, cell.name, pick);
        let show =
            |value: Option<f64>, digits: usize| value.map(|v| format!("{v:.digits$}")).unwrap_or_default();
        let rate = figure(|s| Some(s.messages_per_second));
        let shares: [fn(&Sample) -> Option<f64>; 3] =
            [|s| Some(s.server_share), |s| Some(s.client_share), |s| Some(s.others_share)];
        let shares = shares.map(|share| show(figure(share).map(|share| share * 100.0), 0));
        rows.push([
            cell.name.into(),
            cell.what.into(),
            show(rate, 0),
            show(rate.map(|rate| rate * megabytes), 1),
            show(figure(|s| Some(s.server_us_per_message)), 2),
            background(run, cell.name),
            show(figure(|s| Some(s.latency?.p50)), 3),
            show(figure(|s| Some(s.latency?.p99)), 3),
            show(figure(|s| Some(s.latency?.p999)), 3),
            shares.join(", "),
        ]);
    }
    rows
}

/// CPU time of the product's threads that speak to no client, µs a message. It comes in bursts, so that a short cell may
/// pay for another one.
fn background(run: &Run, cell: &str) -> String {
    const NOTABLE_US: f64 = 0.05;
    if !cell.starts_with("P.") {
        return String::new();
    }
    let of = |name: &str| of_cell(run, cell, |s| s.threads_us_per_message.get(name).copied());
    let names = ["store-writer", "store-prepare", "store-keeper"];
    let notable = names.iter().filter_map(|name| {
        let us = of(name).filter(|us| *us >= NOTABLE_US)?;
        Some(format!("{} {us:.2}", name.trim_start_matches("store-")))
    });
    notable.collect::<Vec<_>>().join(", ")
}

/// Cells in which the product has to sync before an OK.
fn sync_rows(cells: &[&Cell], run: &Run) -> Vec<[String; 4]> {
    let mut rows = vec![["cell", "syncs/s", "messages a sync", "KiB a sync"].map(String::from)];
    for cell in cells.iter().filter(|cell| cell.name.contains("durable")) {
        let show = |pick: fn(&Sample) -> Option<f64>, by: f64| {
            of_cell(run, cell.name, pick).map(|value| format!("{:.1}", value / by)).unwrap_or_default()
        };
        rows.push([
            cell.name.into(),
            show(|s| s.syncs_per_second, 1.0),
            show(|s| s.messages_per_sync, 1.0),
            show(|s| s.bytes_per_sync, 1024.0),
        ]);
    }
    rows
}

fn probe_rows(probes: &[Probe]) -> Vec<[String; 6]> {
    let mut rows =
        vec![["device", "D4 p50 ms", "D4 p99 ms", "D1M p50 ms", "D1M p99 ms", "D1M MB/s"].map(String::from)];
    for (probe, number) in probes.iter().zip(1..) {
        let when = match number {
            number if number == probes.len() => "at the end".into(),
            number => format!("before repeat {number}"),
        };
        let (small, large) = (probe.small, probe.large);
        rows.push([
            when,
            format!("{:.3}", small.p50_ms),
            format!("{:.3}", small.p99_ms),
            format!("{:.3}", large.p50_ms),
            format!("{:.3}", large.p99_ms),
            format!("{:.0}", large.megabytes_per_second),
        ]);
    }
    rows
}

/// A table as Markdown; for eyes its columns are aligned.
fn table<const N: usize>(out: &mut String, markdown: bool, rows: &[[String; N]]) -> Result<()> {
    let mut widths = [0; N];
    for row in rows {
        for (width, field) in widths.iter_mut().zip(row) {
            *width = (*width).max(field.chars().count());
        }
    }
    for (at, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (field, &width) in row.iter().zip(&widths) {
            match markdown {
                true => write!(line, "| {field} ")?,
                false => write!(line, "{:<width$}  ", field.replace("**", ""))?,
            }
        }
        match markdown {
            true => writeln!(out, "{line}|")?,
            false => writeln!(out, "{}", line.trim_end())?,
        }
        if at == 0 && markdown {
            writeln!(out, "{}|", "|---".repeat(N))?;
        }
    }
    Ok(writeln!(out)?)
}

fn as_json(options: &Options, judged: &[Judged<'_>], cells: &[&Cell], run: &Run) -> serde_json::Value {
    let goals: Vec<_> = judged
        .iter()
        .map(|one| {
            let (at_most, at_least) = match one.goal.target {
                Target::AtMost(most) => (Some(most), None),
                Target::AtLeast(least) => (None, Some(least)),
                Target::None => (None, None),
            };
            json!({
                "goal": one.goal.id,
                "what": one.goal.what,
                "at_most": at_most,
                "at_least": at_least,
                "median": one.median,
                "values": one.values,
                "reached": one.median.and_then(|value| one.goal.target.is_met(value)),
            })
        })
        .collect();
    let cells: BTreeMap<_, _> = cells
        .iter()
        .map(|cell| {
            let samples: Vec<_> = run.repeats.iter().filter_map(|samples| samples.get(cell.name)).collect();
            (cell.name, json!({ "what": cell.what, "repeats": samples }))
        })
        .collect();
    json!({
        "about": about(options).into_iter().collect::<BTreeMap<_, _>>(),
        "goals": goals,
        "cells": cells,
        "probes": run.probes,
        "memory_bytes": run.memory.iter().map(|&(now, most)| json!({ "end": now, "most": most })).collect::<Vec<_>>(),
        "sustained": run.stretches,
    })
}

/// What the figures are of.
fn about(options: &Options) -> Vec<(&'static str, String)> {
    let field = |path: &str, name: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.split_once(':'));
        value.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    let memory = field("/proc/meminfo", "MemTotal").split(' ').next().and_then(|kib| kib.parse::<u64>().ok());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let settings = if options.set.is_empty() { "defaults".into() } else { options.set.join(", ") };
    vec![
        (
            "machine",
            format!(
                "{cores} cores of {}, {} GiB of memory, shared by servers and load",
                field("/proc/cpuinfo", "model name"),
                memory.unwrap_or(0).div_ceil(1 << 20),
            ),
        ),
        ("kernel", kernel.trim().into()),
        ("data on", file_system(&options.dir).unwrap_or_else(|| "?".into())),
        ("product", format!("holdfast {}, settings: {settings}", env!("CARGO_PKG_VERSION"))),
        (
            "load",
            format!(
                "{BODY_BYTES} bytes a message, {} threads with a connection each; {} repeats of {} s after {} s",
                options.threads, options.repeats, options.seconds, options.warm_up,
            ),
        ),
    ]
}

/// Kind and device of the file system that `dir` is on.
fn file_system(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let point = place.split(' ').nth(4)?.to_owned();
        let mut kind = kind.split(' ');
        let shown = format!("{} ({})", kind.next()?, kind.next()?);
        dir.starts_with(&point).then_some((point.len(), shown))
    };
    mounts.lines().filter_map(mount).max_by_key(|(length, _)| *length).map(|(_, shown)| shown)
}
