//! The `grpc-timeout` header: at most eight digits and a unit.

use std::time::Duration;

use http::HeaderMap;
use tonic::Status;

use crate::{api::native::status, broker::Error, model::Invalid};

const HEADER: &str = "grpc-timeout";
const MAX_DIGITS: usize = 8;

/// How long the caller waits, if it says so. Text that is no timeout is an error, and so is a timeout of 0.
pub(in crate::api) fn grpc_timeout(headers: &HeaderMap) -> Result<Option<Duration>, Status> {
    let mut values = headers.get_all(HEADER).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(malformed("is there more than once; send it once"));
    }
    let Some(timeout) = parse(value.as_bytes()) else {
        return Err(malformed(
            "is not a timeout; use 1 to 8 digits and one of H, M, S, m, u, n, such as 500m",
        ));
    };
    if timeout.is_zero() {
        return Err(too_late());
    }
    Ok(Some(timeout))
}

/// The answer to a call whose deadline has passed.
pub(super) fn too_late() -> Status {
    Status::deadline_exceeded("the deadline of the call has passed")
}

fn malformed(problem: &str) -> Status {
    status::of(&Error::Invalid(Invalid::new(HEADER, problem)))
}

fn parse(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > MAX_DIGITS || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0_u64, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Some(Duration::from_secs(count * 3600)),
        b'M' => Some(Duration::from_secs(count * 60)),
        b'S' => Some(Duration::from_secs(count)),
        b'm' => Some(Duration::from_millis(count)),
        b'u' => Some(Duration::from_micros(count)),
        b'n' => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use tonic::Code;

    use super::*;

    fn of(values: &[&'static str]) -> Result<Option<Duration>, Code> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(HEADER, HeaderValue::from_static(value));
        }
        grpc_timeout(&headers).map_err(|status| status.code())
    }

    #[test]
    fn every_unit_is_read() {
        assert_eq!(of(&[]), Ok(None));
        for (text, expected) in [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("99999999S", Duration::from_secs(99_999_999)),
            ("20m", Duration::from_millis(20)),
            ("7u", Duration::from_micros(7)),
            ("1n", Duration::from_nanos(1)),
        ] {
            assert_eq!(of(&[text]), Ok(Some(expected)), "{text}");
        }
    }

    #[test]
    fn text_that_is_no_timeout_is_refused() {
        for text in ["abc", "5", "-1S", "+1S", "999999999S", "S", "", "1 S", "1s", "1.5S", "0x1S"] {
            assert_eq!(of(&[text]), Err(Code::InvalidArgument), "{text:?}");
        }
        assert_eq!(of(&["1S", "1S"]), Err(Code::InvalidArgument), "twice");
    }

    #[test]
    fn a_timeout_of_nothing_has_passed() {
        for text in ["0n", "0S", "00000000H"] {
            assert_eq!(of(&[text]), Err(Code::DeadlineExceeded), "{text}");
        }
    }
}
