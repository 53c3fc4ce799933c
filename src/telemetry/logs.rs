//! Log lines: text for eyes on standard error, or one JSON object a line on standard output.
//!
//! | `telemetry.log_format` | lines | where |
//! |---|---|---|
//! | `text`; `auto` when standard output is a terminal | text, coloured on a terminal | standard error |
//! | `json`; `auto` otherwise | JSON | standard output |
//!
//! A JSON line has `ts`, `level`, `target`, `msg`, `cluster`, `node`, then the fields of the event; never a line
//! break in a value. Events with a name that others may rely on carry it in `event`.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

use jiff::{Timestamp, ZonedDateTime};
use serde::Serialize;
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::{format::Writer, time::FormatTime},
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
};

use super::{
    Identity,
    limit::{Limiter, WINDOW},
    lines::Lines,
};
use crate::config::{LogFormat, TelemetryConfig};

/// Crates that talk about themselves; only their warnings are worth a line, unless somebody asks for more.
const QUIET: &str = "opentelemetry=warn,opentelemetry_sdk=warn,h2=warn,hyper=warn,tower=warn";

/// Where log lines go, and how they look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// Text on standard error.
    Text,
    /// JSON on standard output.
    Json,
}

impl Sink {
    /// What the configuration means in this process.
    pub fn of(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
            LogFormat::Auto if io::stdout().is_terminal() => Self::Text,
            LogFormat::Auto => Self::Json,
        }
    }
}

/// The log of this process.
#[derive(Clone, Debug)]
pub struct Logs {
    lines: Lines,
    limiter: Limiter,
}

impl Logs {
    /// Starts to log for the whole process; once a process.
    pub fn start(
        config: &TelemetryConfig,
        identity: &Identity,
        environment: &BTreeMap<String, String>,
    ) -> Result<Self, String> {
        let sink = Sink::of(config.log_format);
        let lines = match sink {
            Sink::Text => Lines::start(io::stderr()),
            Sink::Json => Lines::start(io::stdout()),
        };
        let lines = lines.map_err(|error| format!("no thread for log lines: {error}"))?;
        let logs = Self { lines, limiter: Limiter::default() };
        let colours =
            io::stderr().is_terminal() && environment.get("NO_COLOR").is_none_or(|value| value.is_empty());
        let subscriber = logs.subscriber(config, identity, sink, colours)?;
        tracing::subscriber::set_global_default(subscriber)
            .map_err(|_| "this process logs already".to_owned())?;
        Ok(logs)
    }

    fn subscriber(
        &self,
        config: &TelemetryConfig,
        identity: &Identity,
        sink: Sink,
        colours: bool,
    ) -> Result<impl Subscriber + Send + Sync + use<>, String> {
        let levels = EnvFilter::builder()
            .parse(format!("{QUIET},{}", config.log_level))
            .map_err(|error| error.to_string())?;
        let text = (sink == Sink::Text).then(|| {
            tracing_subscriber::fmt::layer()
                .with_writer(self.lines.clone())
                .with_ansi(colours)
                .with_timer(LocalTime)
        });
        let json = (sink == Sink::Json).then(|| JsonLayer::new(self.lines.clone(), identity));
        Ok(tracing_subscriber::registry().with(levels).with(self.limiter.clone()).with(text).with(json))
    }

    /// Lines that were dropped because nobody took them.
    pub fn dropped(&self) -> u64 {
        self.lines.dropped()
    }

    /// Waits until what was logged is written, but not for long.
    pub fn flush(&self) {
        self.summarise(Instant::now() + WINDOW);
        self.lines.flush();
    }

    /// Tells every minute what was said too often. Never ends.
    pub async fn summaries(self) {
        let mut tick = tokio::time::interval(Duration::from_secs(10));
        loop {
            tick.tick().await;
            self.summarise(Instant::now());
        }
    }

    fn summarise(&self, now: Instant) {
        for summary in self.limiter.summaries(now) {
            tracing::warn!(
                event = "log.repeated",
                of = summary.target,
                line = summary.message,
                more = summary.more,
                "a line was repeated and held back"
            );
        }
    }
}

/// Wall time where the machine is.
struct LocalTime;

impl FormatTime for LocalTime {
    fn format_time(&self, to: &mut Writer<'_>) -> fmt::Result {
        write!(to, "{}", ZonedDateTime::now().strftime("%Y-%m-%d %H:%M:%S%.3f"))
    }
}

/// Writes each event as one JSON object.
struct JsonLayer {
    lines: Lines,
    /// `"cluster":"…","node":"…"`.
    identity: Vec<u8>,
}

impl JsonLayer {
    fn new(lines: Lines, identity: &Identity) -> Self {
        let mut bytes = b",\"cluster\":".to_vec();
        put(&mut bytes, &identity.cluster);
        bytes.extend_from_slice(b",\"node\":");
        put(&mut bytes, &identity.node);
        Self { lines, identity: bytes }
    }
}

/// Appends a value as JSON; values that cannot be written are `null`.
fn put(to: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    let at = to.len();
    if serde_json::to_writer(&mut *to, value).is_err() {
        to.truncate(at);
        to.extend_from_slice(b"null");
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for JsonLayer {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut fields = JsonFields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let mut line = Vec::with_capacity(256);
        let _ = write!(line, "{{\"ts\":\"{}\"", Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ"));
        let _ = write!(line, ",\"level\":\"{}\",\"target\":", metadata.level());
        put(&mut line, metadata.target());
        line.extend_from_slice(b",\"msg\":");
        put(&mut line, &fields.message);
        line.extend_from_slice(&self.identity);
        line.extend_from_slice(&fields.rest);
        line.extend_from_slice(b"}\n");
        self.lines.push(line);
    }
}

#[derive(Default)]
struct JsonFields {
    message: String,
    /// `,"name":value` for each.
    rest: Vec<u8>,
}

impl JsonFields {
    fn add(&mut self, field: &Field, value: &(impl Serialize + ?Sized)) {
        self.rest.push(b',');
        put(&mut self.rest, field.name());
        self.rest.push(b':');
        put(&mut self.rest, value);
    }
}

impl Visit for JsonFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        self.record_str(field, &text);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.add(field, value);
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, &value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, &value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, &value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, &value);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::Value;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(sink: Sink, level: &str, say: impl FnOnce(&Logs)) -> Vec<String> {
        let shared = Shared::default();
        let logs = Logs { lines: Lines::start(shared.clone()).unwrap(), limiter: Limiter::default() };
        let config = TelemetryConfig { log_level: level.into(), ..TelemetryConfig::default() };
        let identity = Identity {
            service: "holdfast-broker",
            node_type: "broker",
            cluster: "demo".into(),
            node: "demo-0".into(),
            shard: "main".into(),
        };
        let subscriber = logs.subscriber(&config, &identity, sink, false).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            say(&logs);
            logs.flush();
        });
        let bytes = shared.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_json_line_is_one_object_with_the_promised_fields() {
        let lines = logged(Sink::Json, "info", |_| {
            tracing::info!(event = "node.started", api = %"127.0.0.1:1", ms = 7, ok = true, "two\nlines \"x\"");
            tracing::debug!("not asked for");
        });
        assert_eq!(lines.len(), 1);
        let line: Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!(line["msg"], "two\nlines \"x\"");
        assert_eq!(line["level"], "INFO");
        assert_eq!(line["event"], "node.started");
        assert_eq!((&line["cluster"], &line["node"]), (&"demo".into(), &"demo-0".into()));
        assert_eq!((&line["ms"], &line["ok"]), (&7.into(), &true.into()));
        assert_eq!(line["api"], "127.0.0.1:1");
        line["ts"].as_str().unwrap().parse::<Timestamp>().unwrap();
        assert!(lines[0].starts_with("{\"ts\":"), "{}", lines[0]);
    }

    #[test]
    fn text_lines_have_time_level_and_fields() {
        let lines = logged(Sink::Text, "holdfast=debug", |_| tracing::debug!(topic = "t", "looked"));
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains("DEBUG") && lines[0].contains("looked topic=\"t\""), "{}", lines[0]);
    }

    #[test]
    fn what_is_said_again_and_again_is_said_ten_times_and_then_counted() {
        let lines = logged(Sink::Json, "info", |_| {
            for n in 0..25 {
                tracing::warn!(peer = %format_args!("10.0.0.{n}"), n, reason = "silent", "closed");
                tracing::warn!(reason = %format_args!("other {n}"), "different");
            }
        });
        let all: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(all.iter().filter(|line| line["msg"] == "closed").count(), 10);
        assert_eq!(all.iter().filter(|line| line["msg"] == "different").count(), 25);
        let summary = all.iter().find(|line| line["event"] == "log.repeated").unwrap();
        assert_eq!((&summary["line"], &summary["more"]), (&"closed".into(), &15.into()));
    }
}
