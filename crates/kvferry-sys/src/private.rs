//! Files for one user alone: opened without following a link, made so that no other user may read or write them.
//!
//! In a directory that another user may write to, the name of a file may lead elsewhere. What is opened here is the
//! file of that name itself, or nothing. Its metadata give its owner and the users that may write to it.

use crate::retry_on_intr;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a regular file for reading, or for reading and writing. Never waits for another process, as opening a pipe
/// does.
///
/// # Errors
/// The kernel's error; `PermissionDenied` with a text, and without a code, if the name is a link, or not that of a
/// regular file.
pub fn open(path: &Path, is_writable: bool) -> io::Result<File> {
    let access = if is_writable { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let refused = |what: &str| {
        let text = format!("{} {what}: remove it, or move it away", path.display());
        io::Error::new(io::ErrorKind::PermissionDenied, text)
    };
    let opened = retry_on_intr(|| Ok(rustix::fs::open(path, flags, Mode::empty())?));
    let file = File::from(opened.map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::LOOP) => refused("is a link"),
        Some(Errno::NXIO | Errno::ISDIR) => refused("is not a regular file"),
        _ => e,
    })?);
    if !file.metadata()?.is_file() {
        return Err(refused("is not a regular file"));
    }
    // With `NONBLOCK`, io_uring would not wait for the device.
    rustix::fs::fcntl_setfl(&file, access)?;
    Ok(file)
}

/// Makes a file with mode 0600, to be read and written.
///
/// # Errors
/// The kernel's error; `AlreadyExists` if the name is there, also as a link.
pub fn create(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    Ok(retry_on_intr(|| Ok(rustix::fs::open(path, flags, mode)?))?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("kvferry-private-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_that_was_made_is_for_its_user_alone_and_opens_again() {
        let folder = Folder::new("made");
        let path = folder.0.join("file");
        create(&path).expect("no such file").write_all(b"kv").expect("space");
        let again = create(&path).expect_err("it exists");
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        let mut file = open(&path, true).expect("a file");
        assert_eq!(file.metadata().expect("open").permissions().mode() & 0o777, 0o600);
        let flags = rustix::fs::fcntl_getfl(&file).expect("open");
        assert!(!flags.contains(OFlags::NONBLOCK), "operations wait for the device");
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).expect("a file");
        assert_eq!(bytes, b"kv");
        file.write_all(b"kv").expect("it may be written to");
        assert!(
            open(&path, false).expect("a file").write_all(b"kv").is_err(),
            "it may only be read"
        );
    }

    #[test]
    fn a_link_a_pipe_and_a_folder_are_refused_by_name_without_a_wait() {
        let folder = Folder::new("other");
        let [link, dangling, pipe] = ["link", "dangling", "pipe"].map(|name| folder.0.join(name));
        std::fs::write(folder.0.join("victim"), "victim").expect("written");
        symlink(folder.0.join("victim"), &link).expect("a link");
        symlink(folder.0.join("nothing"), &dangling).expect("a link");
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, Mode::RUSR | Mode::WUSR, 0)
            .expect("a pipe");
        for (path, what) in [
            (&link, "is a link"),
            (&dangling, "is a link"),
            (&pipe, "is not a regular file"),
            (&folder.0, "is not a regular file"),
        ] {
            for is_writable in [false, true] {
                let error = open(path, is_writable).expect_err("refused");
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
                let text = error.to_string();
                assert!(text.starts_with(&format!("{} {what}", path.display())), "{text}");
            }
            assert!(create(path).is_err());
        }
        assert!(!folder.0.join("nothing").exists(), "nothing is made behind a link");
        let absent = open(&folder.0.join("nothing"), true).expect_err("no such file");
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }
}
