//! Files that a command writes when it is done.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use crate::failure::Failure;

/// Whether a file can be written, found out before the work and not after it. What is there stays.
pub(crate) fn check(file: &Path) -> Result<(), Failure> {
    let is_new = fs::symlink_metadata(file).is_err();
    named(file, OpenOptions::new().append(true).create(true).open(file).map(drop))?;
    if is_new { named(file, fs::remove_file(file)) } else { Ok(()) }
}

/// Makes a folder, unless it is there.
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
    fn a_file_that_can_be_written_is_left_as_it_was() {
        let place = std::env::temp_dir().join(format!("kvferry-files-{}", std::process::id()));
        folder(&place).expect("a folder");
        folder(&place).expect("it is there");
        let file = place.join("report");
        check(&file).expect("it could be made");
        assert!(!file.exists(), "it was only asked");
        write(&file, "before").expect("a file");
        check(&file).expect("it could be overwritten");
        assert_eq!(fs::read(&file).expect("a file"), b"before");
        for bad in [place.join("nowhere/report"), place.clone()] {
            let Err(Failure::Failed(why)) = check(&bad) else { panic!("{bad:?} can be written") };
            assert!(why.contains(bad.to_str().expect("text")), "{why}");
        }
        fs::remove_dir_all(&place).expect("ours");
    }
}
