//! Values as people type them: times, sizes, places, pairs.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, SystemTime},
};

use jiff::{Timestamp, civil, tz::TimeZone};

/// A moment: RFC 3339 (`2026-03-01T12:00:00Z`), local time (`2026-03-01 12:00`), or how long ago (`1h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(pub SystemTime);

impl FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(time) = text.parse::<Timestamp>() {
            return system_time(time).map(Self);
        }
        if let Ok(local) = text.parse::<civil::DateTime>() {
            let time = TimeZone::system().to_timestamp(local).map_err(|error| error.to_string())?;
            return system_time(time).map(Self);
        }
        let ago = text.trim().trim_end_matches("ago").trim_end();
        if let Ok(ago) = humantime::parse_duration(ago) {
            let then = SystemTime::now().checked_sub(ago);
            return then.map(Self).ok_or_else(|| format!("`{text}` ago is before time began"));
        }
        Err(format!(
            "`{text}` is no time; write 2026-03-01T12:00:00Z, 2026-03-01 12:00, or 1h for an hour ago"
        ))
    }
}

fn system_time(time: Timestamp) -> Result<SystemTime, String> {
    time.try_into().map_err(|error: jiff::Error| error.to_string())
}

/// A place to begin at: `earliest`, `latest`, an offset, or a [`Moment`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The first message there is.
    Earliest,
    /// Only what comes from now on.
    Latest,
    /// This offset of one queue.
    Offset(u64),
    /// The first message stored at or after this time.
    Time(SystemTime),
}

impl FromStr for Start {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "earliest" => Ok(Self::Earliest),
            "latest" => Ok(Self::Latest),
            _ if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => text
                .parse()
                .ok()
                .filter(|&offset| i64::try_from(offset).is_ok())
                .map(Self::Offset)
                .ok_or_else(|| format!("`{text}` is beyond any offset")),
            _ => text.parse().map(|Moment(time)| Self::Time(time)).map_err(|error: String| {
                error.replacen(" no time;", " no place; write earliest, latest, an offset,", 1)
            }),
        }
    }
}

/// Bytes: `4096`, `1KiB`, `16MiB`, `1kB` (1000).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<bytesize::ByteSize>()
            .map(|size| Self(size.as_u64()))
            .map_err(|_| format!("`{text}` is no size; write 4096, 1KiB or 16MiB"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&size(self.0))
    }
}

/// A limit that may be absent: `none`, or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit<T>(pub Option<T>);

/// A span of time: `30s`, `5m`, `72h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        humantime::parse_duration(text)
            .map(Self)
            .map_err(|_| format!("`{text}` is no span of time; write 500ms, 30s, 5m or 72h"))
    }
}

impl<T: FromStr<Err = String>> FromStr for Limit<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            _ => text
                .parse()
                .map(|value| Self(Some(value)))
                .map_err(|error: String| format!("{error}, or none")),
        }
    }
}

/// `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Before the first `=`.
    pub key: String,
    /// All behind it.
    pub value: String,
}

impl FromStr for Pair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => {
                Ok(Self { key: key.to_owned(), value: value.to_owned() })
            }
            _ => Err(format!("`{text}` is no pair; write KEY=VALUE")),
        }
    }
}

/// `QUEUE:OFFSET`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Queue of the topic.
    pub queue: u32,
    /// Offset in it.
    pub offset: u64,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once(':').and_then(|(queue, offset)| {
            Some(Self { queue: queue.parse().ok()?, offset: offset.parse().ok()? })
        });
        parsed.ok_or_else(|| format!("`{text}` is no place; write QUEUE:OFFSET, e.g. 3:1500"))
    }
}

/// Wall time, milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A time for eyes and scripts alike: RFC 3339, UTC, milliseconds.
pub fn time(time: SystemTime) -> String {
    Timestamp::try_from(time).map_or_else(|_| "out of range".to_owned(), |time| format!("{time:.3}"))
}

/// A span for eyes: its two largest units.
pub fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        0 if span.is_zero() => "0s".to_owned(),
        0 if span < Duration::from_millis(1) => format!("{} µs", span.as_micros()),
        0 => format!("{} ms", span.as_millis()),
        1..60 => format!("{:.1}s", span.as_secs_f64()),
        60..3600 => format!("{minutes}m {:02}s", seconds % 60),
        3600..86_400 => format!("{hours}h {minutes:02}m"),
        _ => format!("{days}d {hours:02}h"),
    }
}

/// Bytes for eyes: `1.5 MiB`.
pub fn size(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

/// A count for eyes: `1 234 567`, with narrow no-break spaces.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 2);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// `one` or `many`, with the number in front.
pub fn plural(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn a_start_is_a_word_an_offset_or_a_time() {
        assert_eq!("earliest".parse(), Ok(Start::Earliest));
        assert_eq!("latest".parse(), Ok(Start::Latest));
        assert_eq!("1500".parse(), Ok(Start::Offset(1500)));
        assert_eq!("1970-01-02T00:00:00Z".parse(), Ok(Start::Time(UNIX_EPOCH + Duration::from_secs(86_400))));
        let Ok(Start::Time(ago)) = "1h".parse() else { panic!("an hour ago") };
        let passed = SystemTime::now().duration_since(ago).unwrap();
        assert!(passed >= Duration::from_secs(3600), "{passed:?}");
        for wrong in ["", "soon", "-1", "99999999999999999999", "1.5"] {
            let error = wrong.parse::<Start>().unwrap_err();
            assert!(error.contains("offset"), "{error}");
        }
    }

    #[test]
    fn sizes_and_spans_take_units() {
        assert_eq!("4096".parse(), Ok(Size(4096)));
        assert_eq!("1KiB".parse(), Ok(Size(1024)));
        assert_eq!("72h".parse(), Ok(Span(Duration::from_secs(259_200))));
        assert_eq!("none".parse::<Limit<Span>>(), Ok(Limit(None)));
        assert_eq!("10GiB".parse::<Limit<Size>>(), Ok(Limit(Some(Size(10 << 30)))));
        assert!("much".parse::<Limit<Size>>().unwrap_err().contains("none"));
    }

    #[test]
    fn pairs_and_places_are_taken_apart_at_their_sign() {
        assert_eq!("a=b=c".parse(), Ok(Pair { key: "a".into(), value: "b=c".into() }));
        assert!("=b".parse::<Pair>().is_err());
        assert_eq!("3:1500".parse(), Ok(Place { queue: 3, offset: 1500 }));
        for wrong in ["3", ":1", "3:", "-1:0", "3:x"] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_are_shown_so_that_eyes_can_read_them() {
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(span(Duration::from_micros(40)), "40 µs");
        assert_eq!(span(Duration::from_millis(1500)), "1.5s");
        assert_eq!(span(Duration::from_secs(3700)), "1h 01m");
        assert_eq!(span(Duration::from_secs(200_000)), "2d 07h");
        assert_eq!(size(24 << 20), "24.0 MiB");
        assert_eq!(time(UNIX_EPOCH + Duration::from_millis(1_500)), "1970-01-01T00:00:01.500Z");
    }
}
