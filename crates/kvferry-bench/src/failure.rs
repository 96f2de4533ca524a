//! Failures of a command, and its exit codes.

use std::fmt;
use std::io;

use kvferry::ErrorKind;
use serde::{Deserialize, Serialize};

/// Reason why a command failed, in the kinds that a script must distinguish. A helper process sends its own failure to
/// its parent, which fails with the same exit code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// A byte or token is wrong, or a figure misses its bound.
    Check(String),
    /// The command line asks for something impossible.
    Usage(String),
    /// The peer does not answer, or refuses this agent.
    Unreachable(String),
    /// A transfer or a helper process failed.
    Failed(String),
}

impl Failure {
    /// The exit code that `kvferry --help` documents.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Check(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Unreachable(_) => 3,
            Failure::Failed(_) => 4,
        }
    }

    /// The same failure, with the work that failed in front.
    pub fn while_doing(self, what: &str) -> Failure {
        match self {
            Failure::Check(why) => Failure::Check(format!("{what}: {why}")),
            Failure::Usage(why) => Failure::Usage(format!("{what}: {why}")),
            Failure::Unreachable(why) => Failure::Unreachable(format!("{what}: {why}")),
            Failure::Failed(why) => Failure::Failed(format!("{what}: {why}")),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Check(why)
            | Failure::Usage(why)
            | Failure::Unreachable(why)
            | Failure::Failed(why) => out.write_str(why),
        }
    }
}

impl From<kvferry::Error> for Failure {
    fn from(error: kvferry::Error) -> Failure {
        match error.kind() {
            ErrorKind::Unreachable
            | ErrorKind::AuthRequired
            | ErrorKind::AuthUnsupported
            | ErrorKind::AuthFailed
            | ErrorKind::VersionMismatch => Failure::Unreachable(error.to_string()),
            _ => Failure::Failed(error.to_string()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Failed(error.to_string())
    }
}
