//! The folder that a driver has in a directory of files.
//!
//! Requests name directories, so several drivers may use the same one. Each makes a folder of its own there, named by
//! random bytes, and keeps a file in it locked (`flock`). A driver that opens a directory removes the folders that no
//! process has locked: those of drivers that have ended. So all drivers of a directory run on one host, unless its file
//! system has locks that hold between hosts. The folder is reached by its descriptor only, and may be read by its user
//! only: a link, or a folder of another user, that is put in its place is never followed.

use crate::names::is_folder;
use kvferry_sys::fd::Fd;
use rustix::fs::{self, AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Attempts to make a folder that another driver removes before it is locked.
const ATTEMPTS: usize = 64;

/// The file in a folder that its driver keeps locked. Not the folder itself: NFS locks no folders.
const LOCK: &str = "lock";

/// An open, locked folder. A forked child does not have it.
#[derive(Debug)]
pub(crate) struct Folder {
    folder: Fd,
    /// Held as long as the folder is.
    _lock: Fd,
}

impl Folder {
    /// Makes what is missing, and removes what drivers have left that have ended.
    pub(crate) fn open(directory: &Path, name: &str) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let parent = Fd::new(fs::open(directory, DIRECTORY, Mode::empty())?);
        clean(&parent, name);
        for _ in 0..ATTEMPTS {
            match fs::mkdirat(&parent, name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let folder =
                match fs::openat(&parent, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
                    Ok(folder) => Fd::new(folder),
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error.into()),
                };
            let stat = fs::fstat(&folder)?;
            if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
                let what = format!("{name} is another user's, or others may read or write it");
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
            }
            // While a driver that cleans has locked or removed it, another one is made.
            if let Some(lock) = lock(&folder)?
                && is_named(&parent, name, &folder)
                && is_named(&folder, LOCK, &lock)
            {
                return Ok(Self { folder, _lock: lock });
            }
            std::thread::yield_now();
        }
        let what = format!("{name} is locked by a process that removes it again and again");
        Err(io::Error::new(io::ErrorKind::ResourceBusy, what))
    }

    pub(crate) fn read(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::RDONLY)
    }

    /// A new, empty file in the place of one of this name.
    pub(crate) fn create(&self, name: &str) -> io::Result<File> {
        match self.remove(name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    fn open_file(&self, name: &str, how: OFlags) -> io::Result<File> {
        let flags = how | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file: OwnedFd = fs::openat(&self.folder, name, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(file.into())
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(fs::renameat(&self.folder, from, &self.folder, to)?)
    }

    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        Ok(fs::unlinkat(&self.folder, name, AtFlags::empty())?)
    }
}

/// Locks a folder. `None`: another driver has locked it, or has removed it.
fn lock(folder: &Fd) -> io::Result<Option<Fd>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = match fs::openat(folder, LOCK, flags, Mode::RUSR | Mode::WUSR) {
        Ok(lock) => Fd::new(lock),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    match fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(lock)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => {
            let what = format!("its file system can't lock files: {error}");
            Err(io::Error::new(io::Error::from(error).kind(), what))
        }
    }
}

/// Whether a folder has this open file under this name.
fn is_named(folder: &Fd, name: &str, open: &Fd) -> bool {
    let named = fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
    let (Ok(named), Ok(open)) = (named, fs::fstat(open)) else { return false };
    (named.st_dev, named.st_ino) == (open.st_dev, open.st_ino)
}

/// Removes folders that no driver has locked, and files of an earlier release. What can't be removed stays.
fn clean(parent: &Fd, own: &str) {
    for name in names_in(parent) {
        if is_folder(&name) && name != own {
            let flags = DIRECTORY | OFlags::NOFOLLOW;
            let Ok(folder) = fs::openat(parent, &*name, flags, Mode::empty()) else { continue };
            let folder = Fd::new(folder);
            let Ok(Some(_locked)) = lock(&folder) else { continue };
            for file in names_in(&folder) {
                let _ = fs::unlinkat(&folder, &*file, AtFlags::empty());
            }
            let _ = fs::unlinkat(parent, &*name, AtFlags::REMOVEDIR);
        } else if is_earlier_file(&name) {
            let _ = fs::unlinkat(parent, &*name, AtFlags::empty());
        }
    }
}

fn names_in(directory: impl std::os::fd::AsFd) -> Vec<String> {
    let entries = Dir::read_from(directory).into_iter().flatten().flatten();
    let name = |entry: fs::DirEntry| Some(entry.file_name().to_str().ok()?.to_owned());
    entries.filter_map(name).filter(|name| name != "." && name != "..").collect()
}

/// `KEY-GROUP.kv`, or `.tmp` while it was written: releases before `KVFBLK02` wrote them into the directory itself.
fn is_earlier_file(name: &str) -> bool {
    let stem = name.strip_suffix(".kv").or_else(|| name.strip_suffix(".tmp"));
    let Some((key, group)) = stem.and_then(|stem| stem.split_once('-')) else { return false };
    let is_hex = key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex && !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs as std_fs;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;

    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kvferry-{name}-{}", std::process::id()));
            let _ = std_fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std_fs::remove_dir_all(&self.0);
        }
    }

    fn name(number: u8) -> String {
        format!("kvferry-files-{number:032x}")
    }

    #[test]
    fn a_folder_is_removed_once_its_driver_has_ended_and_not_before() {
        let directory = Temporary::new("offload-folders");
        let one = Folder::open(&directory.0, &name(1)).unwrap();
        one.create("a.kv").unwrap().write_all(b"bytes").unwrap();
        let other = Folder::open(&directory.0, &name(2)).unwrap();
        assert!(one.read("a.kv").is_ok() && directory.0.join(name(1)).is_dir());
        drop((one, other));
        let third = Folder::open(&directory.0, &name(3)).unwrap();
        let left: Vec<_> = std_fs::read_dir(&directory.0).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        drop(third);
    }

    #[test]
    fn only_the_user_may_read_what_is_written() {
        let directory = Temporary::new("offload-modes");
        let folder = Folder::open(&directory.0, &name(1)).unwrap();
        folder.create("a.kv").unwrap();
        let mode = |path: &Path| std_fs::metadata(path).unwrap().mode() & 0o777;
        let path = directory.0.join(name(1));
        assert_eq!(
            [mode(&directory.0), mode(&path), mode(&path.join("a.kv"))],
            [0o700, 0o700, 0o600]
        );
    }

    #[test]
    fn links_are_not_followed() {
        let directory = Temporary::new("offload-links");
        let folder = Folder::open(&directory.0, &name(1)).unwrap();
        let victim = directory.0.join("victim");
        std_fs::write(&victim, b"theirs").unwrap();
        symlink(&victim, directory.0.join(name(1)).join("a.tmp")).unwrap();
        folder.create("a.tmp").unwrap().write_all(b"ours").unwrap();
        assert_eq!(std_fs::read(&victim).unwrap(), b"theirs");
        symlink(&victim, directory.0.join(name(1)).join("b.kv")).unwrap();
        assert!(folder.read("b.kv").is_err());
        std_fs::create_dir(directory.0.join("elsewhere")).unwrap();
        symlink(directory.0.join("elsewhere"), directory.0.join(name(2))).unwrap();
        assert!(Folder::open(&directory.0, &name(2)).is_err());
        std_fs::create_dir(directory.0.join(name(3))).unwrap();
        let open = std_fs::Permissions::from_mode(0o777);
        std_fs::set_permissions(directory.0.join(name(3)), open).unwrap();
        let error = Folder::open(&directory.0, &name(3)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn of_other_files_only_those_of_earlier_releases_are_removed() {
        let key = "0123456789abcdef0123456789abcdef";
        for name in [format!("{key}-0.kv"), format!("{key}-12.tmp")] {
            assert!(is_earlier_file(&name), "{name}");
        }
        let others = ["notes.kv", "-0.kv", "0123-0.kv"].map(String::from);
        for name in others.into_iter().chain([format!("{key}-.kv"), format!("{key}-0.kv.bak")]) {
            assert!(!is_earlier_file(&name), "{name}");
        }
    }
}
