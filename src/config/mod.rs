//! One plain struct a room, with its keys, defaults and checks.

mod broker;

pub use broker::{BrokerConfig, GroupsConfig, HoldConfig, PullConfig, TopicsConfig};
