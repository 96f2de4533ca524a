//! Secondary blocks in files, one for each block, named by its content.
//!
//! A file has a header of 64 bytes, then the bytes of the page. It is written under another name and renamed, so a file
//! that has its name is whole, unless the system crashed: the sum in the header tells.

use crate::carry::Carrier;
use kvferry::{Access, Region};
use kvferry_blocks::{Outcome, Tier, Transfer};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"KVFBLK01";
const HEADER_LEN: usize = 64;

#[derive(Debug)]
pub(crate) struct Files {
    directory: PathBuf,
    /// A page on its way, in memory that files can be read to.
    staging: Region,
    bytes: Vec<u8>,
}

impl Files {
    /// Removes files of blocks that an earlier run has left, unless they are to be kept.
    pub(crate) fn open(carrier: &Carrier, path: &str) -> Result<Self, String> {
        let directory = PathBuf::from(path);
        let pages = &carrier.pages;
        let longest = (0..pages.groups()).map(|group| pages.page_bytes(group)).max().unwrap_or(1);
        let longest = usize::try_from(longest).map_err(|e| e.to_string())?;
        let staging = carrier.agent.allocate_private(longest.max(1), Access::NONE);
        let staging = staging.map_err(|error| error.to_string())?;
        fs::create_dir_all(&directory).map_err(|error| format!("{path}: {error}"))?;
        if !carrier.options.keeps_files {
            remove_all(&directory).map_err(|error| format!("{path}: {error}"))?;
        }
        Ok(Self { directory, staging, bytes: Vec::new() })
    }

    /// The error says which file, and why.
    pub(crate) fn carry(
        &mut self,
        carrier: &Carrier,
        transfer: &Transfer,
    ) -> Result<Outcome, String> {
        let path = self.directory.join(transfer.file_name());
        let group = usize::from(transfer.group);
        let len = usize::try_from(carrier.pages.page_bytes(group)).map_err(|e| e.to_string())?;
        let carried = match transfer.to.tier {
            Tier::Secondary => {
                let page = transfer.from.index;
                let gathered = carrier.pages.gather(group, page, &self.staging, 0);
                gathered.map_err(io::Error::other).and_then(|()| self.write(&path, len))
            }
            Tier::Primary => self.read(&path, len).and_then(|()| {
                let page = transfer.to.index;
                let scattered = carrier.pages.scatter(group, page, &self.staging, 0);
                scattered.map_err(io::Error::other)
            }),
        };
        carried.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Outcome::Done)
    }

    /// A file that is not there is removed.
    pub(crate) fn remove(&self, file_name: &str) {
        let path = self.directory.join(file_name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(path = %path.display(), %error, "a block's file can't be removed");
            }
            _ => {}
        }
    }

    fn header(&self, path: &Path, len: usize) -> io::Result<[u8; HEADER_LEN]> {
        let mut header = [0; HEADER_LEN];
        let name = path.file_name().map(|name| name.as_encoded_bytes()).unwrap_or_default();
        let sum = self.staging.crc64(0, len as u64, 0).map_err(io::Error::other)?;
        header[..8].copy_from_slice(&MAGIC);
        header[8..16].copy_from_slice(&(len as u64).to_le_bytes());
        header[16..24].copy_from_slice(&sum.to_le_bytes());
        // A file of another name has other bytes.
        let kept = name.len().min(HEADER_LEN - 24);
        header[24..24 + kept].copy_from_slice(&name[..kept]);
        Ok(header)
    }

    fn write(&mut self, path: &Path, len: usize) -> io::Result<()> {
        self.bytes.resize(len, 0);
        self.staging.read_at(0, &mut self.bytes[..len]).map_err(io::Error::other)?;
        let header = self.header(path, len)?;
        let unfinished = path.with_extension("tmp");
        let write = || {
            let mut file = File::create(&unfinished)?;
            file.write_all(&header)?;
            file.write_all(&self.bytes[..len])?;
            fs::rename(&unfinished, path)
        };
        let written = match write() {
            // The directory was removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(&self.directory).and_then(|()| write())
            }
            written => written,
        };
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }

    fn read(&mut self, path: &Path, len: usize) -> io::Result<()> {
        let mut file = File::open(path)?;
        let mut header = [0; HEADER_LEN];
        file.read_exact(&mut header)?;
        self.bytes.resize(len, 0);
        file.read_exact(&mut self.bytes[..len])?;
        self.staging.write_at(0, &self.bytes[..len]).map_err(io::Error::other)?;
        if header != self.header(path, len)? {
            let what = "the file is torn, or of another block: its header does not fit its bytes";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(())
    }
}

/// Only files whose names a driver gives.
fn remove_all(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(is_name);
        if is_ours && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// As [`Transfer::file_name`] has it, or while it is written.
fn is_name(name: &str) -> bool {
    let stem = name.strip_suffix(".kv").or_else(|| name.strip_suffix(".tmp"));
    let Some((key, group)) = stem.and_then(|stem| stem.split_once('-')) else { return false };
    let is_hex = key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex && !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_blocks_are_removed() {
        let key = "0123456789abcdef0123456789abcdef";
        for name in [format!("{key}-0.kv"), format!("{key}-12.tmp")] {
            assert!(is_name(&name), "{name}");
        }
        let others = ["notes.kv", "-0.kv", "0123-0.kv"].map(String::from);
        for name in others.into_iter().chain([format!("{key}-.kv"), format!("{key}-0.kv.bak")]) {
            assert!(!is_name(&name), "{name}");
        }
    }
}
