//! A broker among others.

use std::collections::BTreeMap;

use super::{StartError, Started, process};
use crate::{config::Loaded, telemetry::Identity};

/// Runs until the process is told to stop. `started` hears when the node serves.
pub fn run(
    loaded: &Loaded,
    environment: &BTreeMap<String, String>,
    started: impl FnOnce(&Started),
) -> Result<(), StartError> {
    process::run(loaded, environment, &identity(loaded), started)
}

/// Who it is, on log lines and series.
pub(super) fn identity(loaded: &Loaded) -> Identity {
    let node = &loaded.config.node;
    Identity {
        service: "holdfast-broker",
        node_type: "broker",
        cluster: node.cluster.clone(),
        node: node.name.clone(),
        shard: node.shard.clone(),
    }
}
