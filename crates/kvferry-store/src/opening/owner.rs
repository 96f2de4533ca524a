//! Ownership and permissions of a store's files.
//!
//! A store's files are for its user alone: a user who can write to them changes what models read, and one who can
//! read them reads prompts. In a directory that others may write to, a name may lead to a file of theirs. So each
//! file is opened without following a link, and checked before it is used: it is a regular file, this user's, and
//! others have no access to it. Access that others have by the file's mode is taken away: earlier releases made files
//! by the process's umask, and mounting a volume may add a group's.
//!
//! A file system may give files that this process makes to another user: NFS does with `root_squash`. There, files of
//! that user are this process's.

use kvferry_sys::private;
use kvferry_sys::unix::user;
use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::OnceLock;

/// The permissions of others than the owner, and those of them by which a file can be changed.
const OTHERS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// The user that the file system of one directory gives this process's files to, once it was asked.
#[derive(Debug, Default)]
pub(crate) struct FileUser(OnceLock<Option<u32>>);

impl FileUser {
    /// Whether a file in `directory` is this process's user's.
    fn is_owner(&self, metadata: &Metadata, directory: &Path) -> bool {
        let owner = metadata.uid();
        owner == user() || *self.0.get_or_init(|| owner_of_new(directory).ok()) == Some(owner)
    }
}

/// Makes a file and says whose it is.
fn owner_of_new(directory: &Path) -> io::Result<u32> {
    let bytes: [u8; 8] = kvferry_sys::random::bytes()?;
    let path = directory.join(format!("owner.{:016x}", u64::from_le_bytes(bytes)));
    let owner = private::create(&path)?.metadata().map(|it| it.uid());
    std::fs::remove_file(&path)?;
    owner
}

/// Whether a file was refused for what it is, and not for what a device did.
pub(crate) fn is_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied && error.raw_os_error().is_none()
}

/// Opens a file of a store.
///
/// # Errors
/// The system's; one for which [`is_refused`] holds, with what the file is and what to do.
pub(crate) fn open(path: &Path, is_writable: bool, user: &FileUser) -> io::Result<File> {
    let file = private::open(path, is_writable)?;
    let metadata = file.metadata()?;
    let directory = path.parent().unwrap_or(path);
    // What the superuser made is read as it is, such as a store in the image of a container.
    let is_superusers = metadata.uid() == 0 && !is_writable;
    if !is_superusers && !user.is_owner(&metadata, directory) {
        let what = format!(
            "this process runs as user {}: run it as the file's owner, or give all files of the \
             store to its user",
            self::user()
        );
        return Err(refused(path, &metadata, &what));
    }
    if metadata.mode() & OTHERS == 0 {
        return Ok(file);
    }
    let restricted = file
        .set_permissions(Permissions::from_mode(metadata.mode() & 0o7777 & !OTHERS))
        .and_then(|()| file.metadata());
    match restricted {
        Ok(now) if now.mode() & OTHERS == 0 => Ok(file),
        // A file system that may only be read, or a file of the superuser.
        _ if !is_writable && metadata.mode() & OTHERS_WRITE == 0 => Ok(file),
        _ => {
            let what = "other users have access to it, and that can't be changed: mount its file \
                        system so that files have mode 0600";
            Err(refused(path, &metadata, what))
        }
    }
}

fn refused(path: &Path, metadata: &Metadata, what: &str) -> io::Error {
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    let text =
        format!("{} belongs to user {owner} and has mode {mode:04o}; {what}", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// Describes how others can change the contents of a directory, and what to do; `None` if they can't.
pub(crate) fn way_in(directory: &Path) -> Option<String> {
    let metadata = directory.metadata().ok()?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if owner != 0 && !FileUser::default().is_owner(&metadata, directory) {
        return Some(format!(
            "it belongs to user {owner}, who can replace its files; this process runs as user {}: \
             give the directory to that user",
            user()
        ));
    }
    let is_open = mode & OTHERS_WRITE != 0 && mode & STICKY == 0;
    is_open.then(|| {
        format!(
            "its mode is {mode:04o}: other users can replace its files; take their write \
             permission away (chmod go-w)"
        )
    })
}
