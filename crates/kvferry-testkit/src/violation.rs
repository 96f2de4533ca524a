//! The error of a scenario whose transport broke its promise.

use std::fmt;

/// A broken promise, described in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl Violation {
    /// `text` says what the transport did.
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
        // A match, because clippy would ask callers of an `if !` to apply De Morgan's laws.
        match $condition {
            true => {}
            false => return Err($crate::violation::Violation::new(format!($($text)+))),
        }
    };
}
pub(crate) use ensure;
