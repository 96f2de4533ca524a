//! Secondary blocks in files, one for each block, named by its content.
//!
//! A file has a header of 64 bytes, then the bytes of the page. It is written under another name and renamed, so a file
//! that has its name is whole, unless the system crashed: the sum in the header tells.
//!
//! | bytes of the header | |
//! |---|---|
//! | 8 | `KVFBLK02` |
//! | 8 | length of the page |
//! | 8 | CRC-64/NVME of the page |
//! | 16 | the namespace ([`Names`](crate::names::Names)), as in the file's name |
//! | 16 | the key |
//! | 2 | the group |
//! | 6 | zeros |
//!
//! Numbers are little-endian. The file's name is `NAMESPACE-KEY-GROUP.kv`.

use crate::carrier::Carrier;
use crate::folder::Folder;
use kvferry::{Access, Region};
use kvferry_blocks::{Discard, Key, Outcome, Tier, Transfer};
use std::io::{self, Read, Write};
use std::path::PathBuf;

const MAGIC: [u8; 8] = *b"KVFBLK02";
const HEADER_LEN: usize = 64;

/// Identity of the block in a file.
#[derive(Clone, Copy, Debug)]
struct Content {
    namespace: [u8; 16],
    key: Key,
    group: u16,
}

impl Content {
    fn new(carrier: &Carrier, key: Key, group: u16, resets: u32) -> Self {
        Self { namespace: carrier.names.of(group, resets).digest(), key, group }
    }

    fn file_stem(&self) -> String {
        let namespace = u128::from_be_bytes(self.namespace);
        format!("{namespace:032x}-{}-{}", self.key, self.group)
    }

    fn file_name(&self) -> String {
        format!("{}.kv", self.file_stem())
    }

    fn header(&self, len: usize, sum: u64) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        let [high, low] = self.key.0.map(u64::to_le_bytes);
        let (len, group) = ((len as u64).to_le_bytes(), self.group.to_le_bytes());
        let sum = sum.to_le_bytes();
        let parts: [&[u8]; 7] = [&MAGIC, &len, &sum, &self.namespace, &high, &low, &group];
        let mut at = 0;
        for part in parts {
            header[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        header
    }
}

#[derive(Debug)]
pub(crate) struct Files {
    directory: PathBuf,
    folder: Folder,
    /// A page on its way, in memory that files can be read to.
    staging: Region,
    bytes: Vec<u8>,
}

impl Files {
    /// Removes what drivers have left in the directory that have ended.
    pub(crate) fn open(carrier: &Carrier, path: &str) -> Result<Self, String> {
        let directory = PathBuf::from(path);
        let pages = &carrier.pages;
        let longest = (0..pages.groups()).map(|group| pages.page_bytes(group)).max().unwrap_or(1);
        let longest = usize::try_from(longest).map_err(|e| e.to_string())?;
        let staging = carrier.agent.allocate_private(longest.max(1), Access::NONE);
        let staging = staging.map_err(|error| error.to_string())?;
        let folder = Folder::open(&directory, &carrier.names.folder());
        let folder = folder.map_err(|error| format!("{path}: {error}"))?;
        Ok(Self { directory, folder, staging, bytes: Vec::new() })
    }

    /// The error says which file, and why.
    pub(crate) fn carry(
        &mut self,
        carrier: &Carrier,
        transfer: &Transfer,
    ) -> Result<Outcome, String> {
        let content = Content::new(carrier, transfer.key, transfer.group, transfer.resets);
        let group = usize::from(transfer.group);
        let len = usize::try_from(carrier.pages.page_bytes(group)).map_err(|e| e.to_string())?;
        let carried = match transfer.to.tier {
            Tier::Secondary => {
                let page = transfer.from.index;
                let gathered = carrier.pages.gather(group, page, &self.staging, 0);
                gathered.map_err(io::Error::other).and_then(|()| self.write(carrier, &content, len))
            }
            Tier::Primary => self.read(&content, len).and_then(|()| {
                let page = transfer.to.index;
                let scattered = carrier.pages.scatter(group, page, &self.staging, 0);
                scattered.map_err(io::Error::other)
            }),
        };
        let path = self.directory.join(carrier.names.folder()).join(content.file_name());
        carried.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Outcome::Done)
    }

    /// A file that is not there is removed.
    pub(crate) fn remove(&self, carrier: &Carrier, discard: &Discard) {
        let content = Content::new(carrier, discard.key, discard.group, discard.resets);
        let file = content.file_name();
        match self.folder.remove(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(file, %error, "a block's file can't be removed");
            }
            _ => {}
        }
    }

    fn header(&self, content: &Content, len: usize) -> io::Result<[u8; HEADER_LEN]> {
        let sum = self.staging.crc64(0, len as u64, 0).map_err(io::Error::other)?;
        Ok(content.header(len, sum))
    }

    fn write(&mut self, carrier: &Carrier, content: &Content, len: usize) -> io::Result<()> {
        self.bytes.resize(len, 0);
        self.staging.read_at(0, &mut self.bytes[..len]).map_err(io::Error::other)?;
        let header = self.header(content, len)?;
        let unfinished = format!("{}.tmp", content.file_stem());
        let write = |folder: &Folder| {
            let mut file = folder.create(&unfinished)?;
            file.write_all(&header)?;
            file.write_all(&self.bytes[..len])?;
            folder.rename(&unfinished, &content.file_name())
        };
        let mut written = write(&self.folder);
        if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            // The directory was removed.
            let folder = Folder::open(&self.directory, &carrier.names.folder())?;
            written = write(&folder);
            self.folder = folder;
        }
        if written.is_err() {
            let _ = self.folder.remove(&unfinished);
        }
        written
    }

    fn read(&mut self, content: &Content, len: usize) -> io::Result<()> {
        let mut file = self.folder.read(&content.file_name())?;
        let mut header = [0; HEADER_LEN];
        file.read_exact(&mut header)?;
        self.bytes.resize(len, 0);
        file.read_exact(&mut self.bytes[..len])?;
        self.staging.write_at(0, &self.bytes[..len]).map_err(io::Error::other)?;
        if header != self.header(content, len)? {
            let what = "the file is torn, or of another block: its header does not fit its bytes";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(())
    }
}
