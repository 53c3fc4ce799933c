//! How a command ends: its exit code, and what it says when it fails.

use std::{io, process::ExitCode};

use crate::{
    client::{self, Code},
    model::Invalid,
};

/// For the long help and the README.
pub(super) const EXIT_CODES: &str = "\
Exit codes:
    0  done
    1  failed for a reason without a code of its own
    2  the command line is wrong
    3  no connection to the broker
    4  the topic, group, queue or message does not exist
    5  refused: a value breaks a rule, or the state forbids it (exists already, unread messages)
    6  unavailable or busy: trying again later can help (a send may be stored all the same)
    7  done, but messages are lost for good (damaged log, power cut); `store check` found damage
  130  interrupted";

/// What a process tells its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Ok,
    /// Failed for a reason without a code of its own.
    Failed,
    /// The command line is wrong.
    Usage,
    /// No connection.
    Unreachable,
    /// There is no such thing.
    NotFound,
    /// Refused.
    Refused,
    /// Trying again later can help.
    Unavailable,
    /// Done, with messages lost.
    DataLoss,
    /// Interrupted.
    Interrupted,
}

impl Exit {
    /// The number.
    pub fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Unreachable => 3,
            Self::NotFound => 4,
            Self::Refused => 5,
            Self::Unavailable => 6,
            Self::DataLoss => 7,
            Self::Interrupted => 130,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

impl From<Code> for Exit {
    fn from(code: Code) -> Self {
        match code {
            Code::Unreachable => Self::Unreachable,
            Code::NotFound => Self::NotFound,
            Code::InvalidArgument
            | Code::AlreadyExists
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::Unauthenticated => Self::Refused,
            Code::Unavailable
            | Code::ResourceExhausted
            | Code::DeadlineExceeded
            | Code::Aborted
            | Code::Cancelled => Self::Unavailable,
            Code::DataLoss => Self::DataLoss,
            Code::Unknown | Code::Internal | Code::Unimplemented => Self::Failed,
        }
    }
}

/// Why a command does not go on.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    /// One line for people; empty: everything has been said.
    pub text: String,
    /// What the broker said, for `--output json`.
    pub cause: Option<client::Error>,
}

impl Failure {
    /// A failure with a text.
    pub fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self { exit, text: text.into(), cause: None }
    }

    /// A value breaks a rule that the broker has, too.
    pub fn refused(text: impl Into<String>) -> Self {
        Self::new(Exit::Refused, text)
    }

    /// The command line is wrong in a way that its grammar does not show.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(Exit::Usage, text)
    }

    /// An end about which nothing needs to be said (any more).
    pub fn quiet(exit: Exit) -> Self {
        Self::new(exit, "")
    }

    /// Reading or writing `what` failed.
    pub fn io(what: &str, error: &io::Error) -> Self {
        Self::new(Exit::Failed, format!("{what}: {error}"))
    }

    /// Writing to standard output failed. A reader that has seen enough (`| head`) is no failure.
    pub fn stdout(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::quiet(Exit::Ok),
            _ => Self::io("standard output", error),
        }
    }
}

impl From<client::Error> for Failure {
    fn from(error: client::Error) -> Self {
        // A limit that time does not lift is a rule; one with a pause is a busy broker.
        let exit = match error.code() {
            Code::ResourceExhausted if error.retry_after().is_none() => Exit::Refused,
            code => code.into(),
        };
        Self { exit, text: error.text().to_owned(), cause: Some(error) }
    }
}

impl From<Invalid> for Failure {
    fn from(invalid: Invalid) -> Self {
        // As the broker would have it.
        Self::new(Exit::Refused, invalid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_in_help_and_readme_have_every_code() {
        for exit in [
            Exit::Ok,
            Exit::Failed,
            Exit::Usage,
            Exit::Unreachable,
            Exit::NotFound,
            Exit::Refused,
            Exit::Unavailable,
            Exit::DataLoss,
            Exit::Interrupted,
        ] {
            let line = format!("\n{:>5}  ", exit.code());
            assert!(EXIT_CODES.contains(&line), "{exit:?}");
            let row = format!("\n| {} | ", exit.code());
            assert!(include_str!("../../README.md").contains(&row), "{exit:?}");
        }
    }

    #[test]
    fn a_reader_that_went_away_is_no_failure() {
        let failure = Failure::stdout(&io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!((failure.exit, failure.text.as_str()), (Exit::Ok, ""));
        assert_eq!(Failure::stdout(&io::Error::from(io::ErrorKind::StorageFull)).exit, Exit::Failed);
    }
}
