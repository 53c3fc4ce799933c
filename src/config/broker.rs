//! `[topics]`, `[groups]`, `[send]`, `[pull]` and `[hold]`: what a broker makes by itself, and how much it lets wait.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    section::section,
    text::{duration, size},
};
use crate::model::{Invalid, MAX_BATCH_BYTES, MAX_BODY_BYTES, MAX_QUEUES};

/// Longest that a pull may ever wait; the native API promises this bound.
const MAX_WAIT_CAP: Duration = Duration::from_secs(30);

/// Everything that [`crate::broker`] is told; each part is a section of the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BrokerConfig {
    /// `[topics]`.
    pub topics: TopicsConfig,
    /// `[groups]`.
    pub groups: GroupsConfig,
    /// `[send]`.
    pub send: SendConfig,
    /// `[pull]`.
    pub pull: PullConfig,
}

impl BrokerConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        self.topics.check()?;
        self.groups.check()?;
        self.send.check()?;
        self.pull.check()
    }
}

section! {
/// `[topics]`: which topics come into being, and how many.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopicsConfig {
    /// Make a topic when the first message for it arrives. On in `standalone`, off in `broker`.
    pub auto_create: bool,
    /// Queues of a topic that is made without naming a number.
    pub default_queues: u32,
    /// Most topics.
    pub max: u64,
}
}

impl Default for TopicsConfig {
    fn default() -> Self {
        Self { auto_create: false, default_queues: 4, max: 100_000 }
    }
}

impl TopicsConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        if !(1..=MAX_QUEUES).contains(&self.default_queues) {
            let seen = self.default_queues;
            return Err(Invalid::new("topics.default_queues", format!("is {seen}; use 1 to {MAX_QUEUES}")));
        }
        at_least_one("topics.max", self.max)
    }
}

section! {
/// `[groups]`: which consumer groups come into being, and how many.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GroupsConfig {
    /// Make a consumer group when it is first named in a pull or commit.
    pub auto_create: bool,
    /// Most groups.
    pub max: u64,
}
}

impl Default for GroupsConfig {
    fn default() -> Self {
        Self { auto_create: true, max: 100_000 }
    }
}

impl GroupsConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        at_least_one("groups.max", self.max)
    }
}

section! {
/// `[send]`: how large messages may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SendConfig {
    /// Largest body of a message; at most 4MiB.
    #[serde(with = "size")]
    pub body_max: u64,
    /// Most bytes of the messages of one call; at most 16MiB.
    #[serde(with = "size")]
    pub batch_max: u64,
}
}

impl Default for SendConfig {
    fn default() -> Self {
        Self { body_max: MAX_BODY_BYTES as u64, batch_max: MAX_BATCH_BYTES as u64 }
    }
}

impl SendConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        at_most("send.body_max", self.body_max, MAX_BODY_BYTES as u64)?;
        at_most("send.batch_max", self.batch_max, MAX_BATCH_BYTES as u64)
    }
}

fn at_most(key: &str, value: u64, most: u64) -> Result<(), Invalid> {
    const LEAST: u64 = 1024;
    if (LEAST..=most).contains(&value) {
        return Ok(());
    }
    let (seen, least, most) = (size::show(value), size::show(LEAST), size::show(most));
    Err(Invalid::new(key, format!("is {seen}; use {least} to {most}")))
}

section! {
/// `[pull]`: how pulls are answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PullConfig {
    /// Longest that a pull waits for a message, whatever it asks for; at most 30 s.
    #[serde(with = "duration")]
    pub wait_max: Duration,
    /// How much earlier than its deadline a waiting pull is answered, so that the answer arrives in time.
    #[serde(with = "duration")]
    pub deadline_margin: Duration,
    /// Delay that a pull is told when too many are held already.
    #[serde(with = "duration")]
    pub full_retry: Duration,
}
}

impl Default for PullConfig {
    fn default() -> Self {
        Self {
            wait_max: MAX_WAIT_CAP,
            deadline_margin: Duration::from_millis(100),
            full_retry: Duration::from_secs(1),
        }
    }
}

impl PullConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.wait_max > MAX_WAIT_CAP {
            return Err(Invalid::new("pull.wait_max", format!("is {:?}; use at most 30s", self.wait_max)));
        }
        if self.deadline_margin > Duration::from_secs(5) {
            let seen = self.deadline_margin;
            return Err(Invalid::new("pull.deadline_margin", format!("is {seen:?}; use at most 5s")));
        }
        if self.full_retry.is_zero() || self.full_retry > MAX_WAIT_CAP {
            let seen = self.full_retry;
            return Err(Invalid::new("pull.full_retry", format!("is {seen:?}; use 1ms to 30s")));
        }
        Ok(())
    }
}

section! {
/// `[hold]`: how many pulls may wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HoldConfig {
    /// Held at once for one client and group on one queue; one more replaces the oldest.
    pub max_per_client: u64,
    /// Held at once for one connection.
    pub max_per_connection: u64,
    /// Held at once in all.
    pub max_total: u64,
}
}

impl Default for HoldConfig {
    fn default() -> Self {
        Self { max_per_client: 2, max_per_connection: 16_384, max_total: 200_000 }
    }
}

impl HoldConfig {
    /// Checks the ranges; the error names the key.
    pub fn check(&self) -> Result<(), Invalid> {
        at_least_one("hold.max_per_client", self.max_per_client)?;
        at_least_one("hold.max_per_connection", self.max_per_connection)?;
        at_least_one("hold.max_total", self.max_total)
    }
}

fn at_least_one(key: &str, value: u64) -> Result<(), Invalid> {
    if value == 0 {
        return Err(Invalid::new(key, "is 0; use at least 1"));
    }
    Ok(())
}
