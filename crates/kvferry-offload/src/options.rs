//! Options of a driver, and errors of its start.

use kvferry_blocks::Transfer;
use kvferry_store::{Namespace, StoreOptions};
use std::fmt;
use std::io;
use std::sync::Arc;

/// Options of a driver.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) namespace: Namespace,
    pub(crate) store_bytes: u64,
    pub(crate) segment_bytes: Option<u64>,
    pub(crate) directory_threads: usize,
    pub(crate) shares_names: bool,
    pub(crate) intercept: Option<Intercept>,
}

impl Options {
    /// `namespace` says what, besides the keys, the bytes of a block depend on. What the driver writes has names of its own
    /// besides: of the namespace, of the driver, and of how often the manager was reset. So nothing that was written with
    /// other weights, before a reset, by an earlier run or by another driver is ever taken for a block of this one.
    pub fn new(namespace: Namespace) -> Self {
        Self {
            namespace,
            store_bytes: 10 << 30,
            segment_bytes: None,
            directory_threads: 3,
            shares_names: false,
            intercept: None,
        }
    }

    /// Bytes on disk of the block store of a directory, at most. 10 GiB by default.
    #[must_use]
    pub fn store_bytes(self, bytes: u64) -> Self {
        Self { store_bytes: bytes, ..self }
    }

    /// Segment size of block stores; see [`kvferry_store::StoreOptions::segment_bytes`].
    #[must_use]
    pub fn segment_bytes(self, bytes: u64) -> Self {
        Self { segment_bytes: Some(bytes), ..self }
    }

    /// Threads for directories, at least one. Three by default.
    #[must_use]
    pub fn directory_threads(self, threads: usize) -> Self {
        Self { directory_threads: threads.max(1), ..self }
    }

    /// Keys and namespace together name the weights, the adapter and all else that the bytes depend on: a block store
    /// that has a block of an earlier run, or of another driver, under the same names is not given it again. After a
    /// reset of the manager, blocks have names of their own as by default.
    #[must_use]
    pub fn share_names(self) -> Self {
        Self { shares_names: true, ..self }
    }

    /// Options of the block store in a directory.
    pub(crate) fn store(&self, directory: &str) -> StoreOptions {
        let options = StoreOptions::new(directory, self.store_bytes);
        match self.segment_bytes {
            Some(bytes) => options.segment_bytes(bytes),
            None => options,
        }
    }

    /// Sets a function that is called before each copy, on the thread that makes it: tests delay copies, or make them
    /// fail.
    #[must_use]
    pub fn intercept(self, intercept: Intercept) -> Self {
        Self { intercept: Some(intercept), ..self }
    }
}

/// Decision of [`Options::intercept`] on a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The copy is made.
    None,
    /// The copy fails; nothing is copied.
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
        /// Length of the list of secondary blocks.
        given: usize,
        /// Number of groups of the pages.
        groups: usize,
    },
    /// Memory for secondary blocks, or for what is read, can't be allocated.
    #[error(transparent)]
    Memory(#[from] kvferry::Error),
    /// No store can have so many bytes, or such segments.
    #[error(transparent)]
    Store(#[from] kvferry_store::Error),
    /// The kernel gives no random bytes.
    #[error("no random bytes for the names of blocks: {0}")]
    Random(#[source] io::Error),
    /// A thread can't be started.
    #[error("a thread for offloading can't be started: {0}")]
    Thread(#[source] io::Error),
}
