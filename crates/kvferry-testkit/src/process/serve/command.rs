//! A command of the parent: an object of JSON, whose arguments are read by name.

use serde_json::Value;
use std::time::Duration;

/// A command with its arguments. Reading an argument panics if it is missing or of another type.
#[derive(Clone, Copy)]
pub(super) struct Command<'a>(pub(super) &'a Value);

impl<'a> Command<'a> {
    pub(super) fn number(self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("{name} in {}", self.0))
    }

    pub(super) fn text(self, name: &str) -> &'a str {
        self.0[name].as_str().unwrap_or_else(|| panic!("{name} in {}", self.0))
    }

    pub(super) fn millis(self, name: &str) -> Duration {
        Duration::from_millis(self.number(name))
    }

    pub(super) fn value<T: serde::de::DeserializeOwned>(self, name: &str) -> T {
        let value = self.0[name].clone();
        serde_json::from_value(value).unwrap_or_else(|e| panic!("{name} in {}: {e}", self.0))
    }

    /// An argument that may be missing.
    pub(super) fn get(self, name: &str) -> &'a Value {
        &self.0[name]
    }
}
