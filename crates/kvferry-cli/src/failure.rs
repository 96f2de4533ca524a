//! Why a command did not succeed, and the exit code that says so.

use std::fmt;
use std::io;

use kvferry::ErrorKind;
use serde::{Deserialize, Serialize};

/// Everything that ends a command early, by what a script would want to tell apart.
///
/// It crosses from a helper process as it is: what failed there fails here, with the same code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// A byte is wrong, or a figure falls short under `--check`.
    Check(String),
    /// The command line asks for something that cannot be.
    Usage(String),
    /// Nobody answers at the address given, or it refuses us.
    Unreachable(String),
    /// A transfer or a helper process failed.
    Failed(String),
}

impl Failure {
    /// The documented exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::Check(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Unreachable(_) => 3,
            Failure::Failed(_) => 4,
        }
    }

    /// The same failure, with what was being done in front.
    pub(crate) fn while_doing(self, what: &str) -> Failure {
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
