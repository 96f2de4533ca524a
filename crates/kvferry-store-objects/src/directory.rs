//! Objects as files of a directory.
//!
//! An object `v1/NAMESPACE/KEY` is the file `v1/NAMESPACE/KE/KEY`, with the first two letters of the key as a folder, so
//! that no folder gets too long. Earlier releases wrote `v1/NAMESPACE/KEY`, which is read where it exists. Files are
//! written under another name, synced, and renamed: after a loss of power an object is whole or is not there. Only the
//! user may read what is made here.

use kvferry_store::objects::{GetResult, IfExists};
use kvferry_sys::file::open_regular;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Letters of a key that are its folder.
const FOLDER_LEN: usize = 2;
/// Attempts to make a file whose folder another process removes.
const ATTEMPTS: usize = 8;

#[derive(Clone, Debug)]
pub(crate) struct Directory {
    root: PathBuf,
}

impl Directory {
    /// The directory is made if it does not exist.
    pub(crate) fn open(root: &Path) -> io::Result<Self> {
        make(root)?;
        Ok(Self { root: root.to_path_buf() })
    }

    pub(crate) fn get(&self, name: &str, len_max: u64) -> io::Result<GetResult> {
        let [now, earlier] = self.paths(name);
        // Others may write to the directory: what they put there must not be followed or waited for.
        let file = match open_regular(&now)? {
            Some(file) => file,
            None => match open_regular(&earlier)? {
                Some(file) => file,
                None => return Ok(GetResult::Absent),
            },
        };
        if file.metadata()?.len() > len_max {
            return Ok(GetResult::TooLong);
        }
        let mut content = Vec::new();
        file.take(len_max + 1).read_to_end(&mut content)?;
        match content.len() as u64 > len_max {
            true => Ok(GetResult::TooLong),
            false => Ok(GetResult::Found(content)),
        }
    }

    pub(crate) fn put(&self, name: &str, content: &[u8], if_exists: IfExists) -> io::Result<()> {
        let [path, earlier] = self.paths(name);
        let is_kept = if_exists == IfExists::Keep;
        if is_kept && (path.exists() || earlier.exists()) {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(&self.root);
        let number = kvferry_sys::random::bytes::<8>()?.map(|byte| format!("{byte:02x}")).concat();
        let staged = folder.join(format!(".{number}.tmp"));
        let mut file = create(folder, &staged)?;
        let written = file.write_all(content).and_then(|()| file.sync_all());
        // A link does not replace what another host has written meanwhile; not all file systems have links.
        let named = written.and_then(|()| match is_kept {
            true => match fs::hard_link(&staged, &path) {
                Ok(()) => fs::remove_file(&staged),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => fs::remove_file(&staged),
                Err(_) => fs::rename(&staged, &path),
            },
            false => fs::rename(&staged, &path),
        });
        if let Err(e) = named {
            let _ = fs::remove_file(&staged);
            return Err(e);
        }
        if !is_kept && let Err(e) = fs::remove_file(&earlier) {
            // The new one is found first.
            if !is_absent(&e) && e.kind() != ErrorKind::IsADirectory {
                return Err(e);
            }
        }
        File::open(folder)?.sync_all()
    }

    /// Path of an object, and its path in earlier releases.
    fn paths(&self, name: &str) -> [PathBuf; 2] {
        let earlier = self.root.join(name);
        let now = match name.rsplit_once('/') {
            Some((above, key)) if key.len() > FOLDER_LEN && key.is_ascii() => {
                self.root.join(above).join(&key[..FOLDER_LEN]).join(key)
            }
            _ => earlier.clone(),
        };
        [now, earlier]
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Makes a file, and its folder if there is none.
fn create(folder: &Path, path: &Path) -> io::Result<File> {
    let mut outcome = Err(ErrorKind::NotFound.into());
    for _ in 0..ATTEMPTS {
        outcome = File::options().write(true).create_new(true).mode(0o600).open(path);
        match &outcome {
            Err(e) if e.kind() == ErrorKind::NotFound => make(folder)?,
            _ => break,
        }
    }
    outcome
}

/// Makes a directory and those above it, whose names are on the disk then.
fn make(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(above) = path.parent().filter(|above| !above.as_os_str().is_empty()) {
        make(above)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
        made => made?,
    }
    match path.parent().map(File::open) {
        // One that this user may not read was not made by this user.
        Some(Ok(above)) => above.sync_all(),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_testkit::hanging::{DiskStep, HangingDisk};
    use std::os::unix::fs::MetadataExt;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("kvferry-directory-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const NAME: &str = "v1/0011/abcdef";

    #[test]
    fn objects_are_in_folders_of_two_letters_and_only_their_user_may_read_them() {
        let folder = Folder::new("modes");
        let directory = Directory::open(&folder.0).expect("a directory");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Absent);
        directory.put(NAME, b"one", IfExists::Keep).expect("a put");
        directory.put(NAME, b"two", IfExists::Keep).expect("a put");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Found(b"one".to_vec()));
        directory.put(NAME, b"three", IfExists::Replace).expect("a put");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Found(b"three".to_vec()));
        assert_eq!(directory.get(NAME, 4).expect("a read"), GetResult::TooLong);
        let path = folder.0.join("v1/0011/ab/abcdef");
        let mode = |path: &Path| path.metadata().expect("it exists").mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        assert!(path.ancestors().skip(1).take(4).all(|above| mode(above) == 0o700));
        let files = fs::read_dir(path.parent().expect("above")).expect("a folder").count();
        assert_eq!(files, 1, "nothing staged is left");
    }

    /// Fails if a loss of power may leave a name without the bytes of its file, or, behind the last step, no name. Returns
    /// how many names were given.
    fn check_syncs(steps: &[DiskStep]) -> usize {
        let mut names = 0;
        for (at, step) in steps.iter().enumerate() {
            let DiskStep::Name { folder, name, node } = step else { continue };
            names += 1;
            let said = || format!("{} of {node} in {steps:?}", String::from_utf8_lossy(name));
            let (before, behind) = steps.split_at(at);
            let (write, sync) = (DiskStep::Write(*node), DiskStep::Sync(*node));
            let last = before.iter().rfind(|it| **it == write || **it == sync);
            assert!(last != Some(&write), "it is not synced before: {}", said());
            let removal = DiskStep::Remove { folder: *folder, name: name.clone() };
            let is_durable = behind.contains(&DiskStep::Sync(*folder));
            assert!(is_durable || behind.contains(&removal), "its folder is not: {}", said());
        }
        names
    }

    #[test]
    fn an_object_is_synced_before_it_gets_its_name_and_the_names_are_synced_after_that() {
        let folder = Folder::new("synced");
        fs::create_dir_all(&folder.0).expect("a folder");
        let Some(disk) = HangingDisk::mount(&folder.0) else { return };
        disk.record();
        let directory = Directory::open(&folder.0.join("above/root")).expect("a directory");
        assert_eq!(check_syncs(&disk.take_steps()), 2, "both folders are new");
        // With each, how many folders are made for it.
        for (name, if_exists, folders) in [
            (NAME, IfExists::Keep, 3),
            ("v1/0011/abcd00", IfExists::Keep, 0),
            ("v1/0011/efcd00", IfExists::Replace, 1),
            (NAME, IfExists::Replace, 0),
        ] {
            directory.put(name, &[7; 300_000], if_exists).expect("a put");
            let steps = disk.take_steps();
            assert!(steps.iter().any(|it| matches!(it, DiskStep::Write(_))), "{steps:?}");
            // Behind the staged name comes the object's.
            assert_eq!(check_syncs(&steps), folders + 2, "{name}, {if_exists:?}: {steps:?}");
        }
    }

    #[test]
    fn where_a_device_fails_a_put_fails_and_what_was_there_before_is_there() {
        let folder = Folder::new("failing");
        fs::create_dir_all(&folder.0).expect("a folder");
        let Some(disk) = HangingDisk::mount(&folder.0) else { return };
        let directory = Directory::open(&folder.0.join("root")).expect("a directory");
        directory.put(NAME, b"one", IfExists::Keep).expect("a put");
        let found = |name| directory.get(name, 9).expect("a read");
        let new = "v1/0011/abcd00";
        for what in ["writes", "syncs"] {
            let fail = |disk: &HangingDisk| match what {
                "writes" => disk.fail_writes(),
                _ => disk.fail_syncs(1),
            };
            for (name, if_exists) in [(NAME, IfExists::Replace), (new, IfExists::Keep)] {
                fail(&disk);
                assert!(directory.put(name, b"two", if_exists).is_err(), "{what}: {name}");
                disk.mend();
            }
            let before = (GetResult::Found(b"one".to_vec()), GetResult::Absent);
            assert_eq!((found(NAME), found(new)), before, "{what}");
            let files = fs::read_dir(folder.0.join("root/v1/0011/ab")).expect("a folder").count();
            assert_eq!(files, 1, "{what}: nothing staged is left");
        }
        // The object is whole, and its name may be lost with the power.
        disk.fail_syncs_of_folders(1);
        assert!(directory.put(new, b"two", IfExists::Replace).is_err());
        assert_eq!(found(new), GetResult::Found(b"two".to_vec()));
        directory.put(new, b"three", IfExists::Replace).expect("a put");
        assert_eq!(found(new), GetResult::Found(b"three".to_vec()));
    }

    /// The command with which docs/store.md bounds a directory.
    fn command_of_docs(directory: &Path) -> String {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/store.md");
        let docs = fs::read_to_string(docs).expect("the docs");
        let (_, behind) = docs.split_once("have `find DIRECTORY/").expect("a command");
        let (command, _) = behind.split_once('`').expect("its end");
        format!("find '{}'/{command}", directory.display())
    }

    #[test]
    fn the_command_of_the_docs_removes_old_objects_and_what_killed_uploads_have_left() {
        let has_find = std::process::Command::new("find").arg("--version").output();
        if !has_find.is_ok_and(|done| done.status.success()) {
            println!("SKIPPED: this system has no find");
            return;
        }
        let folder = Folder::new("old");
        let directory = Directory::open(&folder.0).expect("a directory");
        let young = "v1/0011/abcd00";
        for name in [NAME, young] {
            directory.put(name, b"one", IfExists::Keep).expect("a put");
        }
        let files = folder.0.join("v1/0011/ab");
        let staged = files.join(".0011223344556677.tmp");
        fs::write(&staged, b"o").expect("a file");
        for path in [&staged, &files.join("abcdef")] {
            let days = std::time::Duration::from_secs(9 * 24 * 3600);
            let file = File::options().write(true).open(path).expect("it exists");
            file.set_modified(std::time::SystemTime::now() - days).expect("own file");
        }
        let command = command_of_docs(&folder.0);
        let done = std::process::Command::new("sh").args(["-c", &command]).status();
        assert!(done.expect("a shell").success(), "{command}");
        assert!(!staged.exists(), "{command}");
        let found = |name| directory.get(name, 9).expect("a read");
        assert_eq!(found(NAME), GetResult::Absent, "{command}");
        assert_eq!(found(young), GetResult::Found(b"one".to_vec()), "{command}");
        directory.put(NAME, b"two", IfExists::Keep).expect("a put");
        assert_eq!(found(NAME), GetResult::Found(b"two".to_vec()));
    }

    #[test]
    fn a_pipe_a_link_or_a_folder_in_the_place_of_an_object_is_no_object_and_nothing_waits_for_it() {
        let folder = Folder::new("pipes");
        let directory = Directory::open(&folder.0).expect("a directory");
        directory.put(NAME, b"one", IfExists::Keep).expect("a put");
        let path = folder.0.join("v1/0011/ab/abcdef");
        let target = folder.0.join("elsewhere");
        fs::rename(&path, &target).expect("it exists");
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("a program");
        assert!(made.success());
        let (tell, told) = std::sync::mpsc::channel();
        let reader = directory.clone();
        std::thread::spawn(move || tell.send(reader.get(NAME, 9).expect("a read")));
        let got = told.recv_timeout(std::time::Duration::from_secs(60));
        assert_eq!(got.expect("it does not wait for a writer"), GetResult::Absent);
        fs::remove_file(&path).expect("the pipe");
        std::os::unix::fs::symlink(&target, &path).expect("a link");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Absent);
        fs::remove_file(&path).expect("the link");
        fs::create_dir(&path).expect("a folder");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Absent);
        fs::remove_dir(&path).expect("the folder");
        let _socket = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Absent);
    }

    #[test]
    fn objects_of_earlier_releases_are_found_kept_and_replaced() {
        let folder = Folder::new("earlier");
        let directory = Directory::open(&folder.0).expect("a directory");
        let earlier = folder.0.join(NAME);
        fs::create_dir_all(earlier.parent().expect("above")).expect("folders");
        fs::write(&earlier, b"old").expect("a file");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Found(b"old".to_vec()));
        directory.put(NAME, b"new", IfExists::Keep).expect("a put");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Found(b"old".to_vec()));
        directory.put(NAME, b"new", IfExists::Replace).expect("a put");
        assert_eq!(directory.get(NAME, 9).expect("a read"), GetResult::Found(b"new".to_vec()));
        assert!(!earlier.exists());
    }
}
