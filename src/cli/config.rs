//! `holdfast config explain`: every key with its value, its default, where the value is from and what it does.

use clap::{Subcommand, ValueEnum};

use super::{
    Exit, Failure, Format,
    node::NodeArgs,
    output::{self, BOLD, DIM, WARN, paint},
};
use crate::config::{Config, Explained, Role, explain};

/// What can be asked about the configuration.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum Command {
    Explain(ExplainArgs),
}

/// Show keys with their values, defaults, origins and meaning.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  holdfast config explain
  holdfast config explain store
  holdfast config explain store.segment_size --config /etc/holdfast/broker.toml --role broker
  holdfast config explain --changed
  holdfast config explain --output json

In a file a key is written below its [section]; in the environment as HOLDFAST_SECTION__KEY; as a flag with
--set section.key=value. HOLDFAST_CONFIG names the file, HOLDFAST_LOG (or RUST_LOG) sets telemetry.log_level.")]
pub(super) struct ExplainArgs {
    /// A key (store.segment_size) or a section (store); all without it.
    #[arg(value_name = "KEY")]
    key: Option<String>,
    /// The role that the settings are for; it decides some defaults.
    #[arg(long, value_enum, default_value = "standalone")]
    role: RoleArg,
    /// Only what somebody has set.
    #[arg(long)]
    changed: bool,
    #[command(flatten)]
    node: NodeArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleArg {
    Standalone,
    Broker,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Standalone => Self::Standalone,
            RoleArg::Broker => Self::Broker,
        }
    }
}

/// Answers.
pub(super) fn run(command: &Command, format: Format) -> Result<Exit, Failure> {
    let Command::Explain(args) = command;
    let role = args.role.into();
    let (loaded, layers) = args.node.load(role)?;
    let defaults = Config::defaults(role, &layers.environment);
    let mut keys = explain(&loaded, &defaults, args.key.as_deref())
        .map_err(|problem| Failure::new(Exit::NotFound, problem))?;
    if args.changed {
        keys.retain(|key| key.origin != "default");
    }
    match format {
        Format::Json => keys.iter().try_for_each(output::json)?,
        Format::Text => keys.iter().try_for_each(|key| show(key, args.key.as_deref()))?,
    }
    Ok(Exit::Ok)
}

fn show(key: &Explained, asked: Option<&str>) -> Result<(), Failure> {
    let is_set = key.origin != "default";
    let origin = if is_set { paint(WARN, &key.origin) } else { paint(DIM, &key.origin) };
    output::line(format_args!("{} = {}   {origin}", paint(BOLD, &key.key), shown(&key.value)))?;
    output::line(format_args!("    {}", key.doc))?;
    if is_set && key.value != key.default {
        output::line(format_args!("    default: {}", shown(&key.default)))?;
    }
    if asked == Some(key.key.as_str()) {
        output::line(format_args!("    environment: {}", key.variable))?;
    }
    Ok(())
}

fn shown(value: &str) -> &str {
    if value.is_empty() { "\"\"" } else { value }
}
