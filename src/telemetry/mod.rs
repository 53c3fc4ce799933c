//! What a node tells about itself: log lines, metrics, and the probe listener that serves them.
//!
//! Telemetry never blocks, slows or kills message traffic: log lines go through a bounded queue and are counted
//! when they do not fit, metrics are gathered when somebody asks, probes run on a runtime of their own.
//!
//! Rooms are handed meters of [`Metrics`] and log through `tracing`; none of them knows an exporter. Exporters are chosen in
//! one place, [`Exporters::from_environment`].

mod exporters;
mod health;
mod limit;
mod lines;
mod logs;
mod metrics;
mod probe;
mod process;

pub use exporters::{Exporters, ExportersError};
pub use health::{Health, Phase};
pub use logs::{Logs, Sink};
pub use metrics::{Metrics, observe_node};
pub use probe::Probe;

/// Version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Commit that this build was made from; `unknown` in builds for development.
pub const COMMIT: &str = match option_env!("HOLDFAST_BUILD_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
/// Compiler that made this build.
pub const RUSTC: &str = match option_env!("HOLDFAST_BUILD_RUSTC") {
    Some(rustc) => rustc,
    None => "unknown",
};

/// Who is speaking; on every log line and every series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// `service.name`, as `holdfast-broker`.
    pub service: &'static str,
    /// Kind of node in labels, as `broker`.
    pub node_type: &'static str,
    /// Name of the cluster.
    pub cluster: String,
    /// Name of the node.
    pub node: String,
    /// Name of the shard that it hosts.
    pub shard: String,
}
