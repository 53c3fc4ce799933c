//! One plain struct a room, with its keys, defaults and checks; and the loader that layers them:
//! defaults < file (TOML) < environment (`HOLDFAST_SECTION__KEY`) < flags.

mod api;
mod broker;
mod explain;
mod loader;
mod node;
mod section;
mod store;
mod telemetry;
mod text;

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

pub use api::ApiConfig;
pub use broker::{BrokerConfig, GroupsConfig, HoldConfig, PullConfig, SendConfig, TopicsConfig};
pub use explain::{Explained, explain};
pub use loader::{ConfigError, Layers, Loaded, Origin, load};
pub use node::{ListenConfig, NodeConfig, ShutdownConfig};
use section::SectionKind;
use serde::{Deserialize, Serialize};
pub use store::StoreConfig;
pub use telemetry::{LogFormat, TelemetryConfig};

use crate::model::Invalid;

/// Port of the gRPC API unless another is named.
pub const API_PORT: u16 = 8081;
/// Port of the probes and metrics unless another is named.
pub const PROBE_PORT: u16 = 9402;

/// What a node is started as; decides some defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Everything in one process, for one machine, without configuration.
    Standalone,
    /// A broker among others.
    Broker,
}

impl Role {
    /// As in the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Standalone => "standalone",
            Self::Broker => "broker",
        }
    }
}

/// The whole configuration of a node; each field is a section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// `[node]`.
    pub node: NodeConfig,
    /// `[listen]`.
    pub listen: ListenConfig,
    /// `[api]`.
    pub api: ApiConfig,
    /// `[store]`.
    pub store: StoreConfig,
    /// `[topics]`.
    pub topics: TopicsConfig,
    /// `[groups]`.
    pub groups: GroupsConfig,
    /// `[send]`.
    pub send: SendConfig,
    /// `[pull]`.
    pub pull: PullConfig,
    /// `[hold]`.
    pub hold: HoldConfig,
    /// `[telemetry]`.
    pub telemetry: TelemetryConfig,
    /// `[shutdown]`.
    pub shutdown: ShutdownConfig,
}

/// The sections in the order in which they are explained; one line for each field of [`Config`].
const SECTIONS: &[SectionKind] = &[
    SectionKind::of::<NodeConfig>("node"),
    SectionKind::of::<ListenConfig>("listen"),
    SectionKind::of::<ApiConfig>("api"),
    SectionKind::of::<StoreConfig>("store"),
    SectionKind::of::<TopicsConfig>("topics"),
    SectionKind::of::<GroupsConfig>("groups"),
    SectionKind::of::<SendConfig>("send"),
    SectionKind::of::<PullConfig>("pull"),
    SectionKind::of::<HoldConfig>("hold"),
    SectionKind::of::<TelemetryConfig>("telemetry"),
    SectionKind::of::<ShutdownConfig>("shutdown"),
];

impl Config {
    /// What a node of this role does without configuration. `environment` tells where a person's data goes.
    pub fn defaults(role: Role, environment: &BTreeMap<String, String>) -> Self {
        let mut config = Self::default();
        if let Some(name) = machine_name() {
            config.node.name = name;
        }
        match role {
            Role::Standalone => {
                config.node.data_dir = person_data_dir(environment);
                config.listen.api = SocketAddr::from(([127, 0, 0, 1], API_PORT));
                config.listen.probe = SocketAddr::from(([127, 0, 0, 1], PROBE_PORT));
                config.topics.auto_create = true;
                config.groups.auto_create = true;
            }
            Role::Broker => {
                config.topics.auto_create = false;
                config.groups.auto_create = false;
            }
        }
        config
    }

    /// Checks every section; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        self.node.check()?;
        self.listen.check()?;
        self.api.check()?;
        self.store.check()?;
        self.topics.check()?;
        self.groups.check()?;
        self.send.check()?;
        self.pull.check()?;
        self.hold.check()?;
        self.telemetry.check()?;
        self.shutdown.check()?;
        Ok(())
    }

    /// The sections that the broker is told.
    pub fn broker(&self) -> BrokerConfig {
        BrokerConfig {
            topics: self.topics.clone(),
            groups: self.groups.clone(),
            send: self.send.clone(),
            pull: self.pull.clone(),
        }
    }
}

/// The machine's name, if it is usable as the name of a node.
fn machine_name() -> Option<String> {
    let name = rustix::system::uname().nodename().to_str().ok()?.to_owned();
    let node = NodeConfig { name, ..NodeConfig::default() };
    node.check().is_ok().then_some(node.name)
}

/// Where programs keep a person's data: found again from any directory.
fn person_data_dir(environment: &BTreeMap<String, String>) -> PathBuf {
    let absolute = |name: &str| environment.get(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match (absolute("XDG_DATA_HOME"), absolute("HOME")) {
        (Some(data), _) => data.join("holdfast"),
        (None, Some(home)) => home.join(".local/share/holdfast"),
        (None, None) => NodeConfig::default().data_dir,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_a_documented_key() {
        let all = serde_json::to_value(Config::default()).unwrap();
        let sections: Vec<&str> = all.as_object().unwrap().keys().map(String::as_str).collect();
        let mut listed: Vec<&str> = SECTIONS.iter().map(|section| section.name).collect();
        listed.sort_unstable();
        assert_eq!(sections, listed, "SECTIONS differs from Config");
        for section in SECTIONS {
            let mut keys: Vec<&str> = section.keys.iter().map(|(key, _)| *key).collect();
            keys.sort_unstable();
            let fields: Vec<&str> =
                all[section.name].as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(fields, keys, "keys of [{}]", section.name);
            for key in keys {
                assert!(section.doc(key).unwrap().ends_with('.'), "{}.{key} is not explained", section.name);
            }
        }
    }

    #[test]
    fn the_defaults_of_every_role_pass_the_checks_and_read_back_as_they_are_shown() {
        let environment = BTreeMap::from([("HOME".to_owned(), "/home/anna".to_owned())]);
        for role in [Role::Standalone, Role::Broker] {
            let config = Config::defaults(role, &environment);
            config.check().unwrap();
            let shown = serde_json::to_value(&config).unwrap();
            assert_eq!(serde_json::from_value::<Config>(shown).unwrap(), config);
        }
    }

    #[test]
    fn standalone_finds_its_data_again_from_any_directory() {
        let dir = |pairs: &[(&str, &str)]| {
            let environment = pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
            Config::defaults(Role::Standalone, &environment).node.data_dir
        };
        assert_eq!(dir(&[("HOME", "/home/anna")]), PathBuf::from("/home/anna/.local/share/holdfast"));
        assert_eq!(dir(&[("HOME", "/h"), ("XDG_DATA_HOME", "/data")]), PathBuf::from("/data/holdfast"));
        assert_eq!(
            dir(&[("HOME", "/h"), ("XDG_DATA_HOME", "rel")]),
            PathBuf::from("/h/.local/share/holdfast")
        );
        assert_eq!(dir(&[]), PathBuf::from("/var/lib/holdfast"));
    }

    #[test]
    fn values_out_of_range_are_refused_with_key_and_range() {
        let refused = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        let error = refused(|c| c.store.segment_size = 4 << 20);
        assert_eq!(error, "store.segment_size: is 4MiB; use 64MiB to 1GiB");
        let error = refused(|c| c.store.first_segment_size = 512 << 20);
        assert!(
            error.starts_with("store.first_segment_size: is 512MiB, above store.segment_size"),
            "{error}"
        );
        let error = refused(|c| c.store.disk_limit = 1);
        assert!(error.contains("512MiB"), "{error}");
        let error = refused(|c| c.listen.probe = c.listen.api);
        assert!(error.starts_with("listen.probe: "), "{error}");
        let error = refused(|c| c.telemetry.log_level = "holdfast=loud".into());
        assert!(error.starts_with("telemetry.log_level: "), "{error}");
        let error = refused(|c| c.node.name = "a b".into());
        assert!(error.starts_with("node.name: "), "{error}");
    }
}
