//! Names of topics and consumer groups.

use std::{fmt, sync::Arc};

use super::Invalid;

/// Longest topic name in bytes. Source: RocketMQ `Validators`.
pub const MAX_TOPIC_BYTES: usize = 127;
/// Longest group name in bytes; leaves room for derived names. Source: RocketMQ `Validators`.
pub const MAX_GROUP_BYTES: usize = 120;

/// Names that clients of RocketMQ may not use; refused here too, so that neither API can make them.
const RESERVED_TOPICS: &[&str] = &[
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
    "TBW102",
    "RMQ_SYS_TRACE_TOPIC",
];

/// A topic name: 1 to 127 letters, digits, `%`, `|`, `_` or `-`, and not reserved.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicName(Arc<str>);

/// A consumer group name: 1 to 120 characters of the same kinds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupName(Arc<str>);

impl TopicName {
    /// Checks `name`; the error names the rule and the field `topic`.
    pub fn new(name: &str) -> Result<Self, Invalid> {
        check("topic", name, MAX_TOPIC_BYTES)?;
        if RESERVED_TOPICS.contains(&name) || name.starts_with("rmq_sys_") {
            return Err(Invalid::new("topic", format!("`{name}` is reserved; choose another name")));
        }
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl GroupName {
    /// Checks `name`; the error names the rule and the field `group`.
    pub fn new(name: &str) -> Result<Self, Invalid> {
        check("group", name, MAX_GROUP_BYTES)?;
        if name.starts_with("CID_RMQ_SYS_") {
            return Err(Invalid::new("group", format!("`{name}` is reserved; choose another name")));
        }
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TopicName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One rule for every door: API, command line, configuration.
fn check(field: &str, name: &str, max: usize) -> Result<(), Invalid> {
    if name.is_empty() {
        return Err(Invalid::new(field, format!("is missing; give a name of 1 to {max} bytes")));
    }
    if name.len() > max {
        return Err(Invalid::new(
            field,
            format!("has {} bytes, over the limit of {max}; shorten it", name.len()),
        ));
    }
    match name.chars().find(|&c| !(c.is_ascii_alphanumeric() || "%|_-".contains(c))) {
        None => Ok(()),
        Some(c) => Err(Invalid::new(
            field,
            format!("contains {c:?}; only letters, digits, `%`, `|`, `_` and `-` are allowed"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_counts_bytes_and_is_named() {
        assert!(TopicName::new(&"a".repeat(127)).is_ok());
        let error = TopicName::new(&"a".repeat(128)).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(error, "topic: has 128 bytes, over the limit of 127; shorten it");
        assert!(TopicName::new(&"é".repeat(64)).is_err(), "128 bytes in 64 characters");
        assert!(GroupName::new(&"g".repeat(120)).is_ok());
        assert!(GroupName::new(&"g".repeat(121)).is_err());
    }

    #[test]
    fn names_that_are_no_names_are_refused() {
        for name in ["", "a.b", "a/b", "../../x", "a b", "é", "🦀", "a\0b", "TBW102", "rmq_sys_x"] {
            assert!(TopicName::new(name).is_err(), "{name:?}");
        }
        for name in ["a", "A-b_c%d|e", "%RETRY%group", "0"] {
            assert!(TopicName::new(name).is_ok(), "{name:?}");
        }
    }
}
