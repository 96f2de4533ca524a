//! Classes of errors: a device failed or hangs, a write may still be under way, or this process is short of something.

use crate::opening::owner;
use crate::tiers::disk::gate::is_hang;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// `EIO`: the device can't read.
pub(crate) const EIO: i32 = 5;
/// Errors of a system that is short of descriptors or memory, not of a device: EINTR, EAGAIN, ENOMEM, ENFILE, EMFILE.
const TRANSIENT_ERRNOS: [i32; 5] = [4, 11, 12, 23, 24];

/// The error of a transfer whose bytes may still be moved: the agent was shut down meanwhile.
pub(crate) fn may_move(error: &io::Error) -> Option<kvferry::Error> {
    let error = error.get_ref()?.downcast_ref::<kvferry::Error>()?;
    (error.quiesced() == Some(false)).then(|| error.clone())
}

/// The error of beginning a segment to which a process that has ended may still be writing: a device may carry out what
/// it was given before. No block is lost by that.
#[derive(Debug)]
pub(crate) struct WrittenLate(PathBuf);

impl WrittenLate {
    pub(super) fn error(path: PathBuf) -> io::Error {
        io::Error::new(io::ErrorKind::ResourceBusy, Self(path))
    }
}

impl fmt::Display for WrittenLate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.0.display();
        write!(
            f,
            "{path} is locked: a write may be under way in it, of a process that was killed or whose \
             agent was shut down; the segment is used again once the lock is free"
        )
    }
}

impl std::error::Error for WrittenLate {}

pub(crate) fn is_written_late(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|it| it.is::<WrittenLate>())
}

/// Whether a device or a file system failed, or hangs, and not this process.
pub(crate) fn is_of_device(error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(code) => !TRANSIENT_ERRNOS.contains(&code),
        // A file that is gone, or cut, or another user's.
        None => {
            is_hang(error)
                || is_written_late(error)
                || owner::is_refused(error)
                || matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
        }
    }
}

/// Whether bytes are gone for every process.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
        || error.raw_os_error() == Some(EIO)
}

/// Whether a file may only be read.
pub(super) fn is_read_only(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), ReadOnlyFilesystem | PermissionDenied)
}

/// The system's error that an agent's error stems from, if there is one.
pub(super) fn system_error(error: kvferry::Error) -> io::Error {
    let mut cause = std::error::Error::source(&error);
    while let Some(next) = cause {
        let code = next.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if let Some(code) = code {
            return io::Error::from_raw_os_error(code);
        }
        cause = next.source();
    }
    io::Error::other(error)
}
