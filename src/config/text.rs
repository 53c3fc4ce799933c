//! Values as people write them: `30s`, `256MiB`, `127.0.0.1:8081`. Modules for `#[serde(with = …)]`.

/// Durations: `30s`, `1m 30s`, `250ms`.
pub(super) mod duration {
    use std::time::Duration;

    use serde::{Deserializer, Serializer, de::Error};

    /// As it is read back.
    pub(in super::super) fn show(value: Duration) -> String {
        humantime::format_duration(value).to_string()
    }

    pub(in super::super) fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&show(*value))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let text = super::scalar(from)?;
        humantime::parse_duration(text.trim())
            .map_err(|_| D::Error::custom("use a number with a unit, such as 250ms, 30s or 5m"))
    }
}

/// Sizes in bytes: `256MiB`, `64 MB`, `4096`.
pub(super) mod size {
    use bytesize::ByteSize;
    use serde::{Deserializer, Serializer, de::Error};

    /// As it is read back: in the largest unit that takes a whole number.
    pub(in super::super) fn show(value: u64) -> String {
        for (unit, shift) in [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if value != 0 && value.trailing_zeros() >= shift {
                return format!("{}{unit}", value >> shift);
            }
        }
        value.to_string()
    }

    pub(in super::super) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&show(*value))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = super::scalar(from)?;
        text.trim()
            .parse::<ByteSize>()
            .map(|size| size.as_u64())
            .map_err(|_| D::Error::custom("use a size such as 64MiB or 1GiB, or a number of bytes"))
    }
}

/// Addresses to listen on: `127.0.0.1:8081`, `[::1]:8081`, `localhost:8081`, `:8081` for all interfaces.
pub(super) mod address {
    use std::net::SocketAddr;

    use serde::{Deserializer, Serializer, de::Error};

    pub(in super::super) fn serialize<S: Serializer>(value: &SocketAddr, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
        let text = super::scalar(from)?;
        parse(text.trim()).ok_or_else(|| {
            D::Error::custom("use IP:PORT such as 127.0.0.1:8081, or :8081 for all interfaces")
        })
    }

    fn parse(text: &str) -> Option<SocketAddr> {
        if let Some(port) = text.strip_prefix("localhost:") {
            return format!("127.0.0.1:{port}").parse().ok();
        }
        if text.starts_with(':') {
            return format!("0.0.0.0{text}").parse().ok();
        }
        text.parse().ok()
    }
}

/// A string, or a number as if it had been written in quotes.
fn scalar<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    struct Scalar;

    impl serde::de::Visitor<'_> for Scalar {
        type Value = String;

        fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            to.write_str("text")
        }

        fn visit_str<E>(self, value: &str) -> Result<String, E> {
            Ok(value.to_owned())
        }

        fn visit_i64<E>(self, value: i64) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_u64<E>(self, value: u64) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_f64<E>(self, value: f64) -> Result<String, E> {
            Ok(value.to_string())
        }
    }

    from.deserialize_any(Scalar)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::{Deserialize, Serialize};
    use serde_json::json;
    use std::{net::SocketAddr, time::Duration};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Values {
        #[serde(with = "super::duration")]
        wait: Duration,
        #[serde(with = "super::size")]
        room: u64,
        #[serde(with = "super::address")]
        at: SocketAddr,
    }

    fn read(wait: &str, room: serde_json::Value, at: &str) -> Result<Values, serde_json::Error> {
        serde_json::from_value(json!({ "wait": wait, "room": room, "at": at }))
    }

    #[test]
    fn values_are_read_as_people_write_them() {
        let read = read("1m 30s", json!("256 MiB"), ":9402").unwrap();
        assert_eq!((read.wait, read.room), (Duration::from_secs(90), 256 << 20));
        assert_eq!(read.at, "0.0.0.0:9402".parse().unwrap());
        let shown = serde_json::to_value(&read).unwrap();
        assert_eq!(shown, json!({ "wait": "1m 30s", "room": "256MiB", "at": "0.0.0.0:9402" }));
    }

    #[test]
    fn a_number_of_bytes_needs_no_unit_but_a_duration_does() {
        assert_eq!(read("1s", json!(4096), "localhost:1").unwrap().room, 4096);
        let error = read("30", json!(1), ":1").unwrap_err().to_string();
        assert!(error.contains("30s"), "{error}");
        let error = read("1s", json!(-1), ":1").unwrap_err().to_string();
        assert!(error.contains("64MiB"), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_back(ms in 0_u64..10_000_000_000, room: u64, port: u16) {
            let values = Values {
                wait: Duration::from_millis(ms),
                room,
                at: SocketAddr::from(([127, 0, 0, 1], port)),
            };
            let shown = serde_json::to_value(&values).unwrap();
            prop_assert_eq!(serde_json::from_value::<Values>(shown).unwrap(), values);
        }
    }
}
