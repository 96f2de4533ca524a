//! Reasons of failed calls, and the codes that these return.

use crate::codes;
use crate::interrupt::NoAnswer;
use kvferry::{Error, ErrorKind};
use std::fmt::Display;

/// Reason of a failed call.
#[derive(Debug)]
pub(crate) struct Refusal {
    /// Return value of the call.
    pub(crate) code: i32,
    pub(crate) why: String,
    pub(crate) kind: Option<ErrorKind>,
}

impl Refusal {
    pub(crate) fn new(code: i32, why: impl Display) -> Self {
        Self { code, why: why.to_string(), kind: None }
    }

    pub(crate) fn invalid(why: impl Display) -> Self {
        Self::new(codes::INVALID, why)
    }

    pub(crate) fn metadata(why: String) -> Self {
        Self::new(codes::METADATA, why)
    }

    /// Transfers return one code for every failure.
    pub(crate) fn uncoded(self) -> Self {
        Self { code: codes::INVALID, ..self }
    }

    pub(crate) fn coded(code: i32, error: &Error) -> Self {
        Self { code, why: error.to_string(), kind: Some(error.kind()) }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Overlap => codes::OVERLAP,
            ErrorKind::NotRegistered => codes::NOT_REGISTERED,
            _ => codes::INVALID,
        };
        Self::coded(code, &error)
    }
}

impl From<NoAnswer> for Refusal {
    fn from(reason: NoAnswer) -> Self {
        match reason {
            NoAnswer::Interrupted => Self::invalid("interrupted"),
            NoAnswer::Thread(error) => Self::invalid(format_args!(
                "the call needs a thread, which can't be started: {error}"
            )),
        }
    }
}

pub(crate) type Answer<T> = Result<T, Refusal>;
