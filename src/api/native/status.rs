//! Why a call failed, as gRPC says it.

use std::collections::HashMap;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::convert;
use crate::{
    broker::{ERROR_DOMAIN, Error},
    model::Invalid,
    pb::v1,
};

/// How prost begins its complaint.
const UNDECODABLE: &str = "failed to decode Protobuf message";
/// Longest text of an error. It travels as a header, and clients bound those.
const MAX_TEXT_BYTES: usize = 1024;

/// A status with `google.rpc` details: the reason always, field and delay where there are any.
pub(in crate::api) fn of(error: &Error) -> Status {
    let metadata: HashMap<String, String> =
        error.metadata().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let mut details = ErrorDetails::with_error_info(error.reason(), ERROR_DOMAIN, metadata);
    if let Some((field, problem)) = error.field() {
        details.add_bad_request_violation(shortened(field.to_owned()), shortened(problem));
    }
    if let Some(delay) = error.retry_after() {
        details.set_retry_info(Some(delay));
    }
    Status::with_error_details(code(error), shortened(error.to_string()), details)
}

/// What the services of tonic (health, reflection) say of bytes that are no message blames this side; who sent them is
/// told so instead.
pub(in crate::api) fn blaming_the_sender(status: &Status) -> Option<Status> {
    let problem = status.message().strip_prefix(UNDECODABLE).filter(|_| status.code() == Code::Internal)?;
    Some(of(&Error::Invalid(Invalid::new("request", format!("is not a valid message{problem}")))))
}

/// The same inside a stream or a list.
pub(in crate::api) fn call_error(error: &Error) -> v1::CallError {
    v1::CallError {
        code: code(error).into(),
        message: shortened(error.to_string()),
        reason: error.reason().to_owned(),
        retry_delay: error.retry_after().map(convert::to_duration),
        metadata: error.metadata().into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
    }
}

fn code(error: &Error) -> Code {
    match error {
        Error::Invalid(_)
        | Error::BodyEmpty { .. }
        | Error::BodyTooLarge { .. }
        | Error::BatchTooLarge { .. }
        | Error::FrameTooLarge { .. }
        | Error::FilterIllegal(_) => Code::InvalidArgument,
        Error::TopicNotFound(_) | Error::GroupNotFound(_) | Error::QueueNotFound { .. } => Code::NotFound,
        Error::TopicExists(_) | Error::GroupExists(_) => Code::AlreadyExists,
        Error::QueueMapStale { .. } | Error::MessageTypeMismatch { .. } | Error::UnreadMessages { .. } => {
            Code::FailedPrecondition
        }
        Error::LimitReached { .. } | Error::DiskFull { .. } | Error::Busy { .. } => Code::ResourceExhausted,
        Error::RequestTimeout { .. } => Code::DeadlineExceeded,
        Error::Fenced(_) | Error::Stopping | Error::Rebuilding => Code::Unavailable,
        Error::ReadFailed(_) | Error::Internal(_) => Code::Internal,
    }
}

fn shortened(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::{Invalid, TopicName};

    #[test]
    fn the_details_say_reason_field_and_delay() {
        let status = of(&Error::Invalid(Invalid::new("limit", "is 65; use 1 to 64")));
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, "limit: is 65; use 1 to 64"));
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("INVALID_FIELD", "holdfast"));
        let violation = &details.bad_request().unwrap().field_violations[0];
        assert_eq!(
            (violation.field.as_str(), violation.description.as_str()),
            ("limit", "is 65; use 1 to 64")
        );

        let busy = Error::Busy {
            what: "bytes wait to be written",
            key: "store.inbox_size",
            seen: 10,
            limit: 9,
            retry: Duration::from_millis(20),
        };
        let details = of(&busy).get_error_details();
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_millis(20)));
        assert_eq!(details.error_info().unwrap().metadata["limit"], "9");
        assert_eq!(call_error(&busy).retry_delay.unwrap().nanos, 20_000_000);
    }

    #[test]
    fn bytes_that_are_no_message_are_their_senders_fault_and_a_fault_of_ours_stays_ours() {
        let theirs = Status::internal("failed to decode Protobuf message: invalid varint");
        let told = blaming_the_sender(&theirs).unwrap();
        assert_eq!(told.code(), Code::InvalidArgument);
        assert_eq!(told.message(), "request: is not a valid message: invalid varint");
        assert!(blaming_the_sender(&Status::internal("something else")).is_none());
        assert!(blaming_the_sender(&told).is_none());
    }

    #[test]
    fn a_stale_map_names_the_current_one() {
        let topic = TopicName::new("t").unwrap();
        let error = Error::QueueMapStale { topic, given: 1, current: 3, queues: 8 };
        assert_eq!(of(&error).code(), Code::FailedPrecondition);
        assert_eq!(call_error(&error).metadata["queue_map_version"], "3");
    }

    #[test]
    fn a_text_is_bounded() {
        let error = Error::Invalid(Invalid::new("é".repeat(3000), "is long"));
        let status = of(&error);
        assert!(status.message().len() < 1100);
        assert!(status.details().len() < 3000);
    }
}
