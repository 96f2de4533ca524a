//! Blocks on a disk: append-only segments, written by one process each and read by all.
//!
//! - [`superblock`] creates and opens a store's directory.
//! - [`Appender`] assigns pages of one segment to blocks. Threads then write their extents at the
//!   same time; the appender does no I/O between its begin and its seal.
//! - [`recover`] lists the blocks of a segment after a restart, and verifies their data.
//! - [`format`](mod@format) documents every byte.
//! - [`Disk`] is what the log needs of a device.
//!
//! What a crash can cost: blocks that were written after the last completed [`Disk::sync`] of their
//! segment. Recovery lists records without reading their data, so a record may name data that never
//! reached the disk. The reader of a block compares its data with the record's sum; the data of any
//! other block fails it.
//!
//! The log does not know which blocks were removed: a removed block is found again after a restart
//! until its segment is freed.

mod appender;
mod disk;
pub mod format;
pub mod recover;
pub mod superblock;

#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub use appender::{Appender, Extent, free};
pub use disk::Disk;
pub use format::{Block, Geometry, PAGE_BYTES, Record, SegmentHeader};
pub use superblock::Superblock;

use std::io;

/// Error of an operation on the log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A later release wrote the store. It is left as it is.
    #[error("the store has format {found}, this release reads formats up to {known}")]
    NewerFormat {
        /// The store's version.
        found: u32,
        /// The newest version that this release reads.
        known: u32,
    },
    /// No release can read this version, or no longer.
    #[error("the store has format {found}, which this release does not read")]
    UnknownFormat {
        /// The store's version.
        found: u32,
    },
    /// The file was not written by a store.
    #[error("{file} does not belong to a kvferry store")]
    Foreign {
        /// The file's name in the store's directory.
        file: &'static str,
    },
    /// The store's own bytes are torn or have changed.
    #[error("{0} is damaged")]
    Damaged(&'static str),
    /// The file is a link, another user's, or not for its user alone. The text says what to do.
    #[error("{0}")]
    Refused(String),
    /// A segment cannot be sealed while extents are being written.
    #[error("segment {segment} has {extents} extents in flight")]
    InFlight {
        /// The segment.
        segment: u32,
        /// Planned extents that have not been reported as finished.
        extents: u32,
    },
    /// The directory or its superblock cannot be read or written.
    #[error("cannot {doing}")]
    Directory {
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A segment cannot be read or written. Other segments are not affected.
    #[error("cannot {doing} of segment {segment}")]
    Segment {
        /// The segment.
        segment: u32,
        /// The operation that failed.
        doing: &'static str,
        /// The device's error.
        source: io::Error,
    },
}

impl Error {
    /// The device's error, if it is one.
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Self::Directory { source, .. } | Self::Segment { source, .. } => source,
            other => io::Error::other(other),
        }
    }
}

/// The result of an operation on the log.
pub type Result<T> = std::result::Result<T, Error>;

/// Names the operation on a segment that failed.
trait OnSegment<T> {
    fn on(self, segment: u32, doing: &'static str) -> Result<T>;
}

impl<T> OnSegment<T> for io::Result<T> {
    fn on(self, segment: u32, doing: &'static str) -> Result<T> {
        self.map_err(|source| Error::Segment { segment, doing, source })
    }
}
