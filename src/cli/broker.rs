//! `holdfast broker`: a broker as it runs in production; topics and groups are made on purpose.

use super::{
    Exit, Failure,
    node::{NodeArgs, announce},
};
use crate::{app, config::Role};

/// Arguments of `broker`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  holdfast broker --config /etc/holdfast/broker.toml
  holdfast broker --data-dir /data --listen :8081 --set node.cluster=demo
  HOLDFAST_STORE__DISK_LIMIT=200GiB holdfast broker

Settings: defaults < file (--config or HOLDFAST_CONFIG) < environment (HOLDFAST_SECTION__KEY) < flags.
`holdfast config explain` shows every key with its value and where that is from.")]
pub(super) struct Args {
    #[command(flatten)]
    node: NodeArgs,
}

/// Runs until it is told to stop.
pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let (loaded, layers) = args.node.load(Role::Broker)?;
    let announced = |started: &app::Started| announce(&loaded.config, started, Role::Broker);
    app::broker::run(&loaded, &layers.environment, announced)
        .map(|()| Exit::Ok)
        .map_err(|error| Failure::new(Exit::Failed, error.to_string()))
}
