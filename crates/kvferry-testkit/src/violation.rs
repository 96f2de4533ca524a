//! What a scenario says when a transport broke its promise.

use std::fmt;

/// A broken promise, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl Violation {
    /// A broken promise.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// Returns a [`Violation`] with the formatted text unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        // Written as a match so that clippy doesn't ask for De Morgan in every caller.
        match $condition {
            true => {}
            false => return Err($crate::violation::Violation::new(format!($($text)+))),
        }
    };
}
pub(crate) use ensure;
