//! What commands print: tables and lines for eyes, one JSON object a line for scripts.

use std::io::{self, IsTerminal as _, Write as _};

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use super::{Exit, Failure};

/// Headlines and names.
pub(super) const BOLD: Style = Style::new().bold();
/// What eyes may skip.
pub(super) const DIM: Style = Style::new().dimmed();
/// All is well.
pub(super) const GOOD: Style = AnsiColor::Green.on_default();
/// Look here.
pub(super) const WARN: Style = AnsiColor::Yellow.on_default();
/// It failed.
pub(super) const BAD: Style = AnsiColor::Red.on_default().bold();

/// For whom a command prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Lines and tables for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Text with a colour that goes away where there is no terminal.
pub(super) fn paint(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}

/// Prints one line.
pub(super) fn line(text: impl std::fmt::Display) -> Result<(), Failure> {
    writeln!(anstream::stdout(), "{text}").map_err(|error| Failure::stdout(&error))
}

/// Prints one JSON object on one line.
pub(super) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let mut text = to_json(value)?;
    text.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&text).and_then(|()| out.flush()).map_err(|error| Failure::stdout(&error))
}

/// One JSON object without its line end.
pub(super) fn to_json(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(value).map_err(|error| Failure::new(Exit::Failed, format!("JSON: {error}")))
}

/// Says something beside the result, on standard error.
pub(super) fn note(text: impl std::fmt::Display) {
    // Nobody there to read it: nothing to be done.
    let _ = writeln!(anstream::stderr(), "{text}");
}

/// Says that something needs attention, on standard error.
pub(super) fn warn(text: impl std::fmt::Display) {
    note(format_args!("{}: {text}", paint(WARN, "warning")));
}

/// Tells a failure on standard error, in the form that was asked for.
pub(super) fn failure(failure: &Failure, format: Format) {
    if failure.text.is_empty() {
        return;
    }
    if format == Format::Json {
        if let Ok(text) = to_json(&JsonFailure::of(failure)) {
            let _ = io::stderr().write_all(&[&text, &b"\n"[..]].concat());
        }
        return;
    }
    note(format_args!("{}: {}", paint(BAD, "error"), failure.text));
    let Some(cause) = &failure.cause else { return };
    for violation in cause.violations() {
        if !failure.text.contains(&violation.problem) {
            note(format_args!("  {}: {}", violation.field, violation.problem));
        }
    }
    if let Some(delay) = cause.retry_after() {
        note(format_args!("  try again in {}", super::values::span(delay)));
    }
}

/// A failure for scripts.
#[derive(Serialize)]
struct JsonFailure<'a> {
    error: &'a str,
    exit_code: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    violations: Vec<JsonViolation<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
}

#[derive(Serialize)]
struct JsonViolation<'a> {
    field: &'a str,
    problem: &'a str,
}

impl<'a> JsonFailure<'a> {
    fn of(failure: &'a Failure) -> Self {
        let cause = failure.cause.as_ref();
        let violations = cause.map(|cause| cause.violations()).unwrap_or_default();
        Self {
            error: &failure.text,
            exit_code: failure.exit.code(),
            code: cause.map(|cause| cause.code().name()),
            reason: cause.and_then(|cause| cause.reason()),
            violations: violations
                .iter()
                .map(|v| JsonViolation { field: &v.field, problem: &v.problem })
                .collect(),
            retry_after_ms: cause
                .and_then(|cause| cause.retry_after())
                .map(|delay| u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

/// A table without lines: columns, right-aligned where they hold numbers.
pub(super) struct Grid {
    table: Table,
    right: Vec<bool>,
}

impl Grid {
    /// Columns by name; a leading `>` aligns to the right.
    pub(super) fn new(columns: &[&str]) -> Self {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if !colours() {
            table.force_no_tty();
        }
        let right: Vec<bool> = columns.iter().map(|name| name.starts_with('>')).collect();
        table.set_header(
            columns.iter().map(|name| Cell::new(name.trim_start_matches('>')).add_attribute(Attribute::Bold)),
        );
        for (at, &right) in right.iter().enumerate() {
            if let Some(column) = table.column_mut(at) {
                column.set_padding((0, 2));
                if right {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        Self { table, right }
    }

    /// One more row.
    pub(super) fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.right.len(), "as many cells as columns");
        self.table.add_row(cells);
    }

    /// Prints it.
    pub(super) fn print(&self) -> Result<(), Failure> {
        self.table.lines().try_for_each(|text| line(text.trim_end()))
    }
}

/// Whether standard output shows colours.
pub(super) fn colours() -> bool {
    anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never
}

/// Whether somebody looks at standard error.
pub(super) fn watched() -> bool {
    io::stderr().is_terminal()
}

/// `-` where nothing is known; never 0.
pub(super) fn or_dash<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

/// Text that cannot do anything to a terminal: control characters are written out.
pub(super) fn harmless(text: &str) -> String {
    if text.chars().any(|c| c.is_control() && c != '\t') {
        text.chars()
            .flat_map(|c| {
                let escaped = c.is_control() && c != '\t';
                let (plain, written) =
                    if escaped { (None, Some(c.escape_default())) } else { (Some(c), None) };
                plain.into_iter().chain(written.into_iter().flatten())
            })
            .collect()
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_never_shown_as_a_number() {
        assert_eq!(or_dash(None::<u64>, |n| n.to_string()), "-");
        assert_eq!(or_dash(Some(0), |n| n.to_string()), "0");
    }

    #[test]
    fn a_message_cannot_play_with_the_terminal() {
        assert_eq!(harmless("plain\ttext é"), "plain\ttext é");
        assert_eq!(harmless("\u{1b}[2Jgone\r"), "\\u{1b}[2Jgone\\r");
    }

    #[test]
    fn a_failure_for_scripts_says_all_that_is_known() {
        let failure = Failure::new(Exit::NotFound, "topic `x` does not exist");
        let text = String::from_utf8(to_json(&JsonFailure::of(&failure)).unwrap()).unwrap();
        assert_eq!(text, r#"{"error":"topic `x` does not exist","exit_code":4}"#);
    }
}
