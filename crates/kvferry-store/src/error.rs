//! Errors that callers of a store get.
//!
//! Faults of a disk are not among them: they cost hits, and are counted ([`Stats`](crate::Stats)).

use std::io;
use std::path::PathBuf;

/// A call that can't be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A wrong argument; the text says which.
    #[error("{0}")]
    InvalidArgument(String),
    /// A directory can't be used.
    #[error("{}: {source}", path.display())]
    Directory {
        /// The directory, or a file in it.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process has the store open, and can't be reached.
    #[error(
        "{}: another process has the store open, but does not answer: processes that share a store \
         run as one user, in one network namespace of one host{detail}",
        path.display()
    )]
    Busy {
        /// The store's first directory.
        path: PathBuf,
        /// Details of the failed attempt, or empty.
        detail: String,
    },
    /// The call needs a store that no process has open.
    #[error("{}: a process has the store open", path.display())]
    InUse {
        /// The store's first directory.
        path: PathBuf,
    },
    /// The directory holds something else, or a store that can't be opened as asked.
    #[error("{}: {what}", path.display())]
    Format {
        /// The store's directory.
        path: PathBuf,
        /// Description of the fault, and what the user can do.
        what: String,
    },
    /// No directory has a store, and none is to be made: [`StoreOptions::must_exist`](crate::StoreOptions::must_exist).
    /// Nothing was changed.
    #[error(
        "there is no store in {}, and `must_exist` is set: mount the device that has it, or, to make a new store there, \
         open it once without `must_exist`",
        named(paths)
    )]
    NoStore {
        /// All directories that were given.
        paths: Vec<PathBuf>,
    },
    /// An object store can't be used as asked.
    #[error("the object store {location}: {what}")]
    Objects {
        /// URL of the object store, without secrets.
        location: String,
        /// Description of the fault, and what the user can do.
        what: String,
    },
    /// The agent refused: memory that is not registered, an agent that was shut down.
    #[error(transparent)]
    Agent(#[from] kvferry::Error),
    /// The store was closed.
    #[error("the store was closed")]
    Closed,
}

fn named(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

/// A result of the store.
pub type Result<T> = std::result::Result<T, Error>;
