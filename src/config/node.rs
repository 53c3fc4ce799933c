//! `[node]`, `[listen]` and `[shutdown]`: who a node is, where it is found, how it ends.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    section::section,
    text::{self, duration},
};
use crate::model::Invalid;

/// Longest name of a node, shard or cluster.
const MAX_NAME_BYTES: usize = 64;
/// Longest grace at a stop.
const MAX_GRACE: Duration = Duration::from_secs(600);

section! {
/// `[node]`: who this node is, and where its data is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// Name of this node, unique in its cluster; by default the name of the machine.
    pub name: String,
    /// Name of the cluster; a label of all metrics.
    pub cluster: String,
    /// Name of the shard that this node hosts. Kept in its files: it cannot be changed later.
    pub shard: String,
    /// Directory of everything that is kept; one node at a time may use it.
    pub data_dir: PathBuf,
}
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self {
            name: "node".into(),
            cluster: "holdfast".into(),
            shard: "main".into(),
            data_dir: PathBuf::from("/var/lib/holdfast"),
        }
    }
}

impl NodeConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        name("node.name", &self.name)?;
        name("node.cluster", &self.cluster)?;
        name("node.shard", &self.shard)?;
        if self.data_dir.as_os_str().is_empty() {
            return Err(Invalid::new("node.data_dir", "is empty; name a directory"));
        }
        Ok(())
    }
}

fn name(key: &str, value: &str) -> Result<(), Invalid> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if value.is_empty() || value.len() > MAX_NAME_BYTES || !value.chars().all(good) {
        return Err(Invalid::new(
            key,
            format!("is {value:?}; use 1 to {MAX_NAME_BYTES} letters, digits, `.`, `_` or `-`"),
        ));
    }
    Ok(())
}

section! {
/// `[listen]`: the addresses that the node answers on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenConfig {
    /// Address of the gRPC API. In `standalone` only this machine reaches it unless another address is named.
    #[serde(with = "text::address")]
    pub api: SocketAddr,
    /// Address of the probes (`/livez`, `/readyz`, `/startupz`) and of `/metrics`. Port 0 takes any free port.
    #[serde(with = "text::address")]
    pub probe: SocketAddr,
}
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self {
            api: SocketAddr::from((Ipv4Addr::UNSPECIFIED, super::API_PORT)),
            probe: SocketAddr::from((Ipv4Addr::UNSPECIFIED, super::PROBE_PORT)),
        }
    }
}

impl ListenConfig {
    /// Checks that the listeners do not take each other's place; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.probe.port() != 0 && self.probe.port() == self.api.port() {
            let same_host = self.probe.ip() == self.api.ip()
                || self.probe.ip().is_unspecified()
                || self.api.ip().is_unspecified();
            if same_host {
                let seen = self.probe;
                return Err(Invalid::new(
                    "listen.probe",
                    format!("is {seen}, and so is listen.api; use another port"),
                ));
            }
        }
        Ok(())
    }
}

section! {
/// `[shutdown]`: how the node ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownConfig {
    /// How long calls that are running when the node is told to stop may go on. Waiting pulls are answered at once.
    #[serde(with = "duration")]
    pub grace: Duration,
}
}

impl Default for ShutdownConfig {
    fn default() -> Self {
        Self { grace: Duration::from_secs(10) }
    }
}

impl ShutdownConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.grace > MAX_GRACE {
            let seen = duration::show(self.grace);
            return Err(Invalid::new("shutdown.grace", format!("is {seen}; use 0s to 10m")));
        }
        Ok(())
    }
}
