//! Everything in one process, for one machine and without configuration.

use std::collections::BTreeMap;

use super::{StartError, Started, process};
use crate::config::Loaded;

/// Runs until the process is told to stop. `started` hears when the node serves.
pub fn run(
    loaded: &Loaded,
    environment: &BTreeMap<String, String>,
    started: impl FnOnce(&Started),
) -> Result<(), StartError> {
    process::run(loaded, environment, &super::broker::identity(loaded), started)
}
