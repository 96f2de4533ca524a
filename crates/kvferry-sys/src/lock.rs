//! Locks on files (`flock`), held by the open file: they end with the process.

use crate::fd::Tracked;
use crate::retry_on_intr;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// An open file that can be locked. Dropping it and the end of the process release the lock; a child of `fork` does not
/// have it. Dropping it asks the device of some file systems, which may take long.
#[derive(Debug)]
pub struct LockFile(Tracked<OwnedFd>);

impl LockFile {
    /// Opens the file, made with mode 0600 if it does not exist. A file that may only be read can be locked, too.
    ///
    /// # Errors
    /// The kernel's error; `ELOOP` if the name is a link, which is not followed; `InvalidInput` if it is no regular
    /// file: opening a FIFO would wait for its other end.
    pub fn open(path: &Path) -> io::Result<Self> {
        let open = |flags: OFlags| {
            let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let open = || Ok(rustix::fs::open(path, flags, MODE)?);
            let fd = retry_on_intr(open)?;
            let mode = rustix::fs::fstat(&fd)?.st_mode;
            if !FileType::from_raw_mode(mode).is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            Ok(Self(Tracked::new(fd)))
        };
        open(OFlags::RDWR | OFlags::CREATE).or_else(|error| match Errno::from_io_error(&error) {
            // The first error says more.
            Some(Errno::ROFS | Errno::ACCESS | Errno::PERM) => {
                open(OFlags::RDONLY).map_err(|_| error)
            }
            _ => Err(error),
        })
    }

    /// Takes the lock for this file alone, if no other open file has it. A shared lock that it has becomes
    /// exclusive.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn try_exclusive(&self) -> io::Result<bool> {
        self.lock(FlockOperation::NonBlockingLockExclusive)
    }

    /// Takes the lock together with others, if no other open file has it alone. An exclusive lock that it
    /// has becomes shared.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn try_shared(&self) -> io::Result<bool> {
        self.lock(FlockOperation::NonBlockingLockShared)
    }

    fn lock(&self, operation: FlockOperation) -> io::Result<bool> {
        try_flock(&self.0, operation)
    }
}

impl Drop for LockFile {
    /// A child that is forked while the file is closed may keep it open, but not locked.
    fn drop(&mut self) {
        if !self.0.was_forked() {
            let _ = flock(&self.0, FlockOperation::NonBlockingUnlock);
        }
    }
}

/// False if another open file has a lock that excludes this one.
pub(crate) fn try_flock(file: impl AsFd, operation: FlockOperation) -> io::Result<bool> {
    match retry_on_intr(|| Ok(flock(&file, operation)?)) {
        Ok(()) => Ok(true),
        Err(e) if Errno::from_io_error(&e) == Some(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_excludes_the_others_until_it_is_dropped_or_shares() {
        let path = std::env::temp_dir().join(format!("kvferry-lock-{}", std::process::id()));
        let [one, other] = [(); 2].map(|()| LockFile::open(&path).expect("a file"));
        assert!(one.try_exclusive().expect("locks"));
        assert!(!other.try_exclusive().expect("locks") && !other.try_shared().expect("locks"));
        assert!(one.try_shared().expect("locks") && other.try_shared().expect("locks"));
        assert!(!one.try_exclusive().expect("locks"));
        // A lock that was not made stronger may be lost: `flock` gives it up first.
        drop(other);
        assert!(one.try_exclusive().expect("locks"));
        std::fs::remove_file(&path).expect("made above");
    }

    #[test]
    fn a_link_is_not_followed_and_nothing_is_made_behind_it() {
        let path = std::env::temp_dir().join(format!("kvferry-lock-link-{}", std::process::id()));
        let behind = path.with_extension("behind");
        std::os::unix::fs::symlink(&behind, &path).expect("a link");
        let error = LockFile::open(&path).expect_err("a link");
        assert_eq!(Errno::from_io_error(&error), Some(Errno::LOOP), "{error}");
        assert!(!behind.exists());
        std::fs::remove_file(&path).expect("made above");
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let path = std::env::temp_dir().join(format!("kvferry-lock-pipe-{}", std::process::id()));
        let kind = FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, MODE, 0).expect("a pipe");
        let error = LockFile::open(&path).expect_err("a pipe");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        std::fs::remove_file(&path).expect("made above");
    }
}
