//! `[telemetry]`: what the node tells about itself.

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use super::section::section;
use crate::model::Invalid;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text when standard output is a terminal, JSON otherwise.
    #[default]
    Auto,
    /// For eyes, on standard error.
    Text,
    /// One object a line, on standard output.
    Json,
}

section! {
/// `[telemetry]`: what the node tells about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// How log lines look: `text` (on standard error), `json` (one object a line, on standard output), or `auto`:
    /// text when standard output is a terminal, JSON otherwise.
    pub log_format: LogFormat,
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`, also by room, as in
    /// `info,holdfast::store=debug`. `HOLDFAST_LOG` and `RUST_LOG` set it too.
    pub log_level: String,
    /// Most series of one metric; what is beyond is counted together in one series.
    pub max_series_per_metric: u32,
}
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self { log_format: LogFormat::Auto, log_level: "info".into(), max_series_per_metric: 10_000 }
    }
}

impl TelemetryConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        if let Err(error) = EnvFilter::builder().parse(&self.log_level) {
            let seen = &self.log_level;
            return Err(Invalid::new(
                "telemetry.log_level",
                format!("is {seen:?} ({error}); use error, warn, info, debug or trace, also as room=level"),
            ));
        }
        if !(100..=1_000_000).contains(&self.max_series_per_metric) {
            let seen = self.max_series_per_metric;
            return Err(Invalid::new(
                "telemetry.max_series_per_metric",
                format!("is {seen}; use 100 to 1000000"),
            ));
        }
        Ok(())
    }
}
