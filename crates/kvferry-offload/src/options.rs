//! How a driver is started, and what can go wrong then.

use kvferry_blocks::Transfer;
use kvferry_store::Namespace;
use std::fmt;
use std::io;
use std::sync::Arc;

/// How a driver is started.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) namespace: Namespace,
    pub(crate) store_bytes: u64,
    pub(crate) segment_bytes: Option<u64>,
    pub(crate) directory_threads: usize,
    pub(crate) keeps_files: bool,
    pub(crate) intercept: Option<Intercept>,
}

impl Options {
    /// `namespace` says what, besides the tokens, the bytes of a block depend on: block stores keep the blocks of
    /// different namespaces apart.
    pub fn new(namespace: Namespace) -> Self {
        Self {
            namespace,
            store_bytes: 10 << 30,
            segment_bytes: None,
            directory_threads: 3,
            keeps_files: false,
            intercept: None,
        }
    }

    /// Bytes on disk of the block store of a directory, at most. 10 GiB by default.
    #[must_use]
    pub fn store_bytes(self, bytes: u64) -> Self {
        Self { store_bytes: bytes, ..self }
    }

    /// As [`kvferry_store::StoreOptions::segment_bytes`].
    #[must_use]
    pub fn segment_bytes(self, bytes: u64) -> Self {
        Self { segment_bytes: Some(bytes), ..self }
    }

    /// Threads for directories, at least one. Three by default.
    #[must_use]
    pub fn directory_threads(self, threads: usize) -> Self {
        Self { directory_threads: threads.max(1), ..self }
    }

    /// Files of blocks are kept that are no longer needed, because other managers use the directory, too. By default they
    /// are removed, and those of an earlier run when the directory is first used.
    #[must_use]
    pub fn keep_files(self) -> Self {
        Self { keeps_files: true, ..self }
    }

    /// A function that is called before each copy, on the thread that makes it: tests hold copies back, or have them
    /// fail.
    #[must_use]
    pub fn intercept(self, intercept: Intercept) -> Self {
        Self { intercept: Some(intercept), ..self }
    }
}

/// What is to become of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is made.
    None,
    /// It fails, and nothing is copied.
    Fail,
}

/// See [`Options::intercept`].
#[derive(Clone)]
pub struct Intercept(Arc<dyn Fn(&Transfer) -> Fault + Send + Sync>);

impl Intercept {
    /// Calls `function`.
    pub fn new(function: impl Fn(&Transfer) -> Fault + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    pub(crate) fn ask(&self, transfer: &Transfer) -> Fault {
        (self.0)(transfer)
    }
}

impl fmt::Debug for Intercept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Intercept").finish_non_exhaustive()
    }
}

/// A driver that can't be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There must be secondary blocks, or 0, for each group.
    #[error("{given} numbers of secondary blocks for {groups} groups of pages")]
    Groups {
        /// How many were given.
        given: usize,
        /// How many groups the pages have.
        groups: usize,
    },
    /// Memory for secondary blocks, or for what is read, can't be allocated.
    #[error(transparent)]
    Memory(#[from] kvferry::Error),
    /// A thread can't be started.
    #[error("a thread for offloading can't be started: {0}")]
    Thread(#[source] io::Error),
}
