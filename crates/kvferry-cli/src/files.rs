//! Files that a command writes at its end.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use kvferry_bench::failure::Failure;

/// Checks before the work that a file can be written after it. Leaves an existing file as it is.
pub(crate) fn check(file: &Path) -> Result<(), Failure> {
    let outcome = match fs::metadata(file) {
        // Opening a pipe would wait for its reader.
        Ok(there) if !there.is_file() && !there.is_dir() => Ok(()),
        Ok(_) => OpenOptions::new().write(true).open(file).map(drop),
        Err(error) if error.kind() == io::ErrorKind::NotFound => could_be_made(file),
        Err(error) => Err(error),
    };
    named(file, outcome)
}

fn could_be_made(file: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).open(file) {
        Ok(_) => fs::remove_file(file),
        // Another process has made it, or it is a link to a file that does not exist.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes a folder, unless it exists.
pub(crate) fn folder(folder: &Path) -> Result<(), Failure> {
    named(folder, fs::create_dir_all(folder))
}

pub(crate) fn write(file: &Path, content: impl AsRef<[u8]>) -> Result<(), Failure> {
    named(file, fs::write(file, content))
}

fn named<T>(file: &Path, outcome: io::Result<T>) -> Result<T, Failure> {
    outcome.map_err(|error| Failure::Failed(format!("{}: {error}", file.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_leaves_files_as_they_are() {
        let place = std::env::temp_dir().join(format!("kvferry-files-{}", std::process::id()));
        folder(&place).expect("a folder");
        folder(&place).expect("it exists");
        let file = place.join("report");
        check(&file).expect("it could be made");
        assert!(!file.exists(), "a check makes no file");
        write(&file, "before").expect("a file");
        check(&file).expect("it could be overwritten");
        assert_eq!(fs::read(&file).expect("a file"), b"before");
        // It has no reader: opening it would wait.
        let pipe = place.join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("there is a mkfifo").success());
        check(&pipe).expect("a pipe can be written once it has a reader");
        for bad in [place.join("nowhere/report"), place.clone()] {
            let Err(Failure::Failed(why)) = check(&bad) else { panic!("{bad:?} can be written") };
            assert!(why.contains(bad.to_str().expect("text")), "{why}");
        }
        let link = place.join("link");
        std::os::unix::fs::symlink(place.join("not yet"), &link).expect("a link");
        check(&link).expect("what it leads to could be made");
        assert!(fs::symlink_metadata(&link).is_ok() && !place.join("not yet").exists());
        fs::remove_dir_all(&place).expect("ours");
    }
}
