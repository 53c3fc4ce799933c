//! What a failed call says.

use std::{collections::BTreeMap, fmt, io, time::Duration};

use tonic::Status;
use tonic_types::StatusExt as _;

use crate::pb::v1 as pb;

/// What kind of failure. All but the first are the codes of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// No connection could be made: nothing has left this machine.
    Unreachable,
    /// The call was cancelled.
    Cancelled,
    /// A failure without a better name.
    Unknown,
    /// The request breaks a rule, whatever the state of the broker.
    InvalidArgument,
    /// The deadline passed. The call may have been carried out.
    DeadlineExceeded,
    /// There is no such topic, group, queue or node.
    NotFound,
    /// There is one already.
    AlreadyExists,
    /// The caller may not do this.
    PermissionDenied,
    /// A limit is reached: too much in flight, or no space.
    ResourceExhausted,
    /// The state of the broker forbids it.
    FailedPrecondition,
    /// Two changes met; try again.
    Aborted,
    /// Beyond the range that there is.
    OutOfRange,
    /// The broker does not know this call.
    Unimplemented,
    /// The broker is broken.
    Internal,
    /// The broker cannot serve now, or the connection broke. The call may have been carried out.
    Unavailable,
    /// Stored data is damaged.
    DataLoss,
    /// The caller is not known.
    Unauthenticated,
}

impl Code {
    /// The name that gRPC gives it, e.g. `NOT_FOUND`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "UNREACHABLE",
            Self::Cancelled => "CANCELLED",
            Self::Unknown => "UNKNOWN",
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::NotFound => "NOT_FOUND",
            Self::AlreadyExists => "ALREADY_EXISTS",
            Self::PermissionDenied => "PERMISSION_DENIED",
            Self::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Self::FailedPrecondition => "FAILED_PRECONDITION",
            Self::Aborted => "ABORTED",
            Self::OutOfRange => "OUT_OF_RANGE",
            Self::Unimplemented => "UNIMPLEMENTED",
            Self::Internal => "INTERNAL",
            Self::Unavailable => "UNAVAILABLE",
            Self::DataLoss => "DATA_LOSS",
            Self::Unauthenticated => "UNAUTHENTICATED",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<tonic::Code> for Code {
    fn from(code: tonic::Code) -> Self {
        match code {
            tonic::Code::Ok | tonic::Code::Unknown => Self::Unknown,
            tonic::Code::Cancelled => Self::Cancelled,
            tonic::Code::InvalidArgument => Self::InvalidArgument,
            tonic::Code::DeadlineExceeded => Self::DeadlineExceeded,
            tonic::Code::NotFound => Self::NotFound,
            tonic::Code::AlreadyExists => Self::AlreadyExists,
            tonic::Code::PermissionDenied => Self::PermissionDenied,
            tonic::Code::ResourceExhausted => Self::ResourceExhausted,
            tonic::Code::FailedPrecondition => Self::FailedPrecondition,
            tonic::Code::Aborted => Self::Aborted,
            tonic::Code::OutOfRange => Self::OutOfRange,
            tonic::Code::Unimplemented => Self::Unimplemented,
            tonic::Code::Internal => Self::Internal,
            tonic::Code::Unavailable => Self::Unavailable,
            tonic::Code::DataLoss => Self::DataLoss,
            tonic::Code::Unauthenticated => Self::Unauthenticated,
        }
    }
}

/// A field that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Path of the field, e.g. `messages[3].body`.
    pub field: String,
    /// The rule, what was seen and what to do.
    pub problem: String,
}

/// A call that was not carried out, or whose outcome is not known (see [`Code`]).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .facts.text)]
pub struct Error {
    /// Apart, so that a result without an error stays small.
    facts: Box<Facts>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Facts {
    code: Code,
    text: String,
    reason: Option<String>,
    violations: Vec<Violation>,
    retry_after: Option<Duration>,
    metadata: BTreeMap<String, String>,
}

impl From<Facts> for Error {
    fn from(facts: Facts) -> Self {
        Self { facts: Box::new(facts) }
    }
}

impl Error {
    /// A failure found on this side, or made up by a test.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Facts {
            code,
            text: text.into(),
            reason: None,
            violations: Vec::new(),
            retry_after: None,
            metadata: BTreeMap::new(),
        }
        .into()
    }

    /// What a call to `endpoint` failed with.
    pub(super) fn of_status(status: &Status, endpoint: &str) -> Self {
        if let Some(local) = Self::of_transport(status, endpoint) {
            return local;
        }
        let details = status.get_error_details();
        let mut error = Self::new(status.code().into(), status.message());
        if let Some(info) = details.error_info() {
            error.facts.reason = Some(info.reason.clone()).filter(|reason| !reason.is_empty());
            error.facts.metadata = info.metadata.clone().into_iter().collect();
        }
        if let Some(bad) = details.bad_request() {
            error.facts.violations = bad
                .field_violations
                .iter()
                .map(|v| Violation { field: v.field.clone(), problem: v.description.clone() })
                .collect();
        }
        error.facts.retry_after = details.retry_info().and_then(|retry| retry.retry_delay);
        if error.facts.text.is_empty() {
            error.facts.text = format!("{endpoint} answered {} without a word", error.code());
        }
        error
    }

    /// Failures that no broker reported: the connection could not be made, or broke, or time ran out.
    fn of_transport(status: &Status, endpoint: &str) -> Option<Self> {
        let mut source: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(status);
        source?;
        let (mut connecting, mut io_error, mut last) = (false, None, String::new());
        while let Some(error) = source {
            if error.is::<tonic::TimeoutExpired>() {
                return Some(Self::new(
                    Code::DeadlineExceeded,
                    format!("{endpoint} did not answer in time; the call may have been carried out"),
                ));
            }
            connecting |= error.is::<tonic::ConnectError>();
            if let Some(error) = error.downcast_ref::<io::Error>() {
                io_error = Some(plain(error));
            }
            last = error.to_string();
            source = error.source();
        }
        let cause = io_error.unwrap_or(last);
        Some(if connecting {
            Self::new(
                Code::Unreachable,
                format!(
                    "cannot reach {endpoint}: {cause}; is the broker running? start one with `holdfast standalone`"
                ),
            )
        } else {
            Self::new(
                Code::Unavailable,
                format!(
                    "lost the connection to {endpoint}: {cause}; what was on its way may have been carried out"
                ),
            )
        })
    }

    /// A failed call inside a stream or a list.
    pub(super) fn of_call(error: pb::CallError) -> Self {
        Facts {
            code: tonic::Code::from_i32(error.code).into(),
            text: error.message,
            reason: Some(error.reason).filter(|reason| !reason.is_empty()),
            violations: Vec::new(),
            retry_after: error.retry_delay.and_then(|delay| delay.try_into().ok()),
            metadata: error.metadata.into_iter().collect(),
        }
        .into()
    }

    /// What kind of failure.
    pub fn code(&self) -> Code {
        self.facts.code
    }

    /// For people: names the field, the limit and what to do.
    pub fn text(&self) -> &str {
        &self.facts.text
    }

    /// For programs: one word of the closed list that the README has, e.g. `TOPIC_NOT_FOUND`.
    pub fn reason(&self) -> Option<&str> {
        self.facts.reason.as_deref()
    }

    /// Which fields break which rules.
    pub fn violations(&self) -> &[Violation] {
        &self.facts.violations
    }

    /// How long to wait before another try, when the broker says so.
    pub fn retry_after(&self) -> Option<Duration> {
        self.facts.retry_after
    }

    /// Facts that a program may need, e.g. `queue_map_version`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.facts.metadata
    }

    /// Whether the same call can succeed later without any change.
    pub fn retryable(&self) -> bool {
        self.facts.retry_after.is_some()
            || matches!(self.facts.code, Code::Unreachable | Code::Unavailable | Code::Aborted)
    }
}

/// An I/O error without its number: "connection refused" rather than "Connection refused (os error 111)".
fn plain(error: &io::Error) -> String {
    let mut text = error.to_string();
    if let Some(at) = text.find(" (os error") {
        text.truncate(at);
    }
    let mut rest = text.chars();
    match rest.next() {
        Some(first) => first.to_lowercase().chain(rest).collect(),
        None => "unknown I/O error".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn the_details_of_a_status_are_all_there() {
        let mut details = ErrorDetails::new();
        details.set_error_info(
            "STALE_QUEUE_MAP",
            "holdfast",
            HashMap::from([("version".into(), "7".into())]),
        );
        details.add_bad_request_violation("messages[3].body", "is empty");
        details.set_retry_info(Some(Duration::from_millis(250)));
        let status = Status::with_error_details(tonic::Code::FailedPrecondition, "the map moved", details);
        let error = Error::of_status(&status, "host:1");
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert_eq!(error.to_string(), "the map moved");
        assert_eq!(error.reason(), Some("STALE_QUEUE_MAP"));
        assert_eq!(error.metadata()["version"], "7");
        assert_eq!(
            error.violations(),
            [Violation { field: "messages[3].body".into(), problem: "is empty".into() }]
        );
        assert_eq!(error.retry_after(), Some(Duration::from_millis(250)));
        assert!(error.retryable());
    }

    #[test]
    fn a_status_without_details_is_still_an_error_with_a_text() {
        let error = Error::of_status(&Status::new(tonic::Code::Internal, ""), "host:1");
        assert_eq!(error.to_string(), "host:1 answered INTERNAL without a word");
        assert!(!error.retryable());
    }

    #[test]
    fn an_error_inside_a_stream_keeps_its_facts() {
        let error = Error::of_call(pb::CallError {
            code: 8,
            message: "too much in flight".into(),
            reason: "OVERLOADED".into(),
            retry_delay: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            metadata: HashMap::new(),
        });
        assert_eq!((error.code(), error.reason()), (Code::ResourceExhausted, Some("OVERLOADED")));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
    }

    #[test]
    fn io_errors_read_like_words() {
        assert_eq!(plain(&io::Error::from_raw_os_error(111)), "connection refused");
    }
}
