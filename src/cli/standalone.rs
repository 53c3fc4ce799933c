//! `holdfast standalone`: a durable broker without configuration.

use super::{
    Exit, Failure,
    node::{NodeArgs, announce},
};
use crate::{app, config::Role};

/// Arguments of `standalone`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  holdfast standalone                                  data in ~/.local/share/holdfast
  holdfast standalone --data-dir ./data --listen 127.0.0.1:9000
  holdfast standalone --listen :8081                   also for other machines
  holdfast standalone --set topics.default_queues=8

Settings: defaults < file (--config or HOLDFAST_CONFIG) < environment (HOLDFAST_SECTION__KEY) < flags.
`holdfast config explain` shows every key with its value and where that is from.")]
pub(super) struct Args {
    #[command(flatten)]
    node: NodeArgs,
}

/// Runs until it is told to stop.
pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let (loaded, layers) = args.node.load(Role::Standalone)?;
    let announced = |started: &app::Started| announce(&loaded.config, started, Role::Standalone);
    app::standalone::run(&loaded, &layers.environment, announced)
        .map(|()| Exit::Ok)
        .map_err(|error| Failure::new(Exit::Failed, error.to_string()))
}
