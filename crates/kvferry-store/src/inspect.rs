//! Reads the files of a store: its superblock, its segments and their blocks.
//!
//! This needs no agent, changes nothing, and takes no lock, so it works while processes have the store open.
//! They go on meanwhile: what is listed is what was there when it was read. The files do not say which blocks
//! were evicted: these are listed until their segment is used again.
//!
//! ```
//! use kvferry_store::inspect::{Files, State};
//!
//! # fn main() -> kvferry_store::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("kvferry-inspect-doc-{}", std::process::id()));
//! # let agent = kvferry::Agent::builder().start()?;
//! # kvferry_store::Store::open(&agent, &kvferry_store::StoreOptions::new(&folder, 64 << 20))?.close();
//! let files = Files::open(&[folder.clone()])?;
//! for segment in files.segments()? {
//!     if let State::Used(scanned) = &segment.state {
//!         println!("{}: {} blocks", segment.path.display(), scanned.records.len());
//!     }
//! }
//! # let _ = std::fs::remove_dir_all(&folder);
//! # Ok(())
//! # }
//! ```

use crate::error::{Error, Result};
use crate::log::recover::{self, Fault, Scanned};
use crate::log::{self, Disk, PAGE_BYTES, Record, SegmentHeader, Superblock, superblock};
use crate::opening::directories::{self, ArrangedDirectories, Directory, FileOwners, arrange};
use crate::opening::owner::{self, FileUser};
use crate::options::StoreOptions;
use kvferry_sys::private;
use kvferry_sys::sync::Mutex;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of a store.
#[derive(Debug)]
pub struct Files {
    disk: FileDisk,
    superblock: Superblock,
    format: u32,
}

/// A segment's file.
#[derive(Debug)]
pub struct Segment {
    /// Number of the segment, as in the file's name.
    pub number: u32,
    /// The file.
    pub path: PathBuf,
    /// Bytes that the file takes on the device.
    pub disk_bytes: u64,
    /// Contents of the file.
    pub state: State,
}

/// Contents of a segment's file.
#[derive(Debug)]
pub enum State {
    /// Blocks, or none yet.
    Used(Scanned),
    /// No valid header: the segment was never used, or its header is damaged.
    Free,
    /// The file does not have the length of the store's segments. The next process that opens the store
    /// removes it.
    WrongLength(u64),
    /// Another store's blocks.
    OfAnotherStore,
    /// The device did not return what was read of it.
    Unreadable(log::Error),
}

/// Result of [`Files::verify`].
#[derive(Debug, Default)]
pub struct Verified {
    /// Blocks that a reader would not get, and why.
    pub bad: Vec<(Record, Fault)>,
    /// Blocks that were not verified, because a process has begun to use the segment again.
    pub replaced: usize,
}

impl Files {
    /// Finds the store in `directories`: all of them, in any order.
    ///
    /// # Errors
    /// `InvalidArgument` without a directory; `Directory` if one can't be read; `Format` if they have no store, or
    /// one that this release does not read, or are not the directories of one store.
    pub fn open(directories: &[PathBuf]) -> Result<Self> {
        Self::with(directories, false)
    }

    pub(crate) fn open_to_write(directories: &[PathBuf]) -> Result<Self> {
        Self::with(directories, true)
    }

    fn with(directories: &[PathBuf], is_writable: bool) -> Result<Self> {
        let Some(first) = directories.first() else {
            return Err(Error::InvalidArgument("no directory was given".into()));
        };
        let whose = if is_writable { FileOwners::Own } else { FileOwners::Any };
        let ArrangedDirectories { superblock, format, directories: arranged, .. } =
            arrange(directories, whose)?;
        let mut paths = Vec::new();
        for Directory { path, state, .. } in arranged {
            match state {
                directories::State::Lost(source) => return Err(Error::Directory { path, source }),
                directories::State::Empty => {
                    return Err(Error::Directory { path, source: directories::is_empty() });
                }
                _ => paths.push(path),
            }
        }
        let superblock = superblock.ok_or_else(|| {
            let what = format!("no store is here: a store's directory has {}", superblock::FILE);
            Error::Format { path: first.clone(), what }
        })?;
        let disk = FileDisk {
            directories: paths,
            is_writable,
            last: Mutex::default(),
            files: Mutex::default(),
        };
        Ok(Self { disk, superblock, format })
    }

    /// The store's superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The version of the store's format.
    pub fn format(&self) -> u32 {
        self.format
    }

    /// The store's directories, in the order of their numbers.
    pub fn directories(&self) -> &[PathBuf] {
        &self.disk.directories
    }

    /// Whether a process that opens the store with this capacity finds all segments below it, and so removes none.
    ///
    /// # Errors
    /// `InvalidArgument` for a capacity that no process could open the store with; `Directory` if a directory can't be
    /// listed.
    pub fn fit_into(&self, capacity: u64) -> Result<bool> {
        let bytes = self.superblock.geometry.segment_bytes();
        let options = StoreOptions::new(&self.disk.directories[0], capacity);
        let segments = options.geometry(Some(bytes))?.segments;
        Ok(self.disk.list()?.keys().all(|number| *number < segments))
    }

    /// Time at which a block was put, in milliseconds of Unix time, rounded down to seconds of the store's time.
    pub fn put_at_ms(&self, record: &Record) -> u64 {
        self.superblock.created_ms + u64::from(record.block.time) * 1000
    }

    /// Scans all segments, in the order of their numbers.
    ///
    /// # Errors
    /// `Directory` if a directory can't be listed. A segment that can't be read is [`State::Unreadable`].
    pub fn segments(&self) -> Result<Vec<Segment>> {
        let files = self.disk.list()?;
        let scan = |(number, path): (u32, PathBuf)| match std::fs::symlink_metadata(&path) {
            Ok(metadata) => {
                let disk_bytes = metadata.blocks() * 512;
                let state = self.scan(number, metadata.len());
                Some(Segment { number, path, disk_bytes, state })
            }
            // A process that opens the store removes files that are no longer needed.
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(source) => {
                let error = log::Error::Segment { segment: number, doing: "read the size", source };
                Some(Segment { number, path, disk_bytes: 0, state: State::Unreadable(error) })
            }
        };
        Ok(files.into_iter().filter_map(scan).collect())
    }

    fn scan(&self, segment: u32, len: u64) -> State {
        if len != self.superblock.geometry.segment_bytes() {
            return State::WrongLength(len);
        }
        match recover::scan(&self.disk, &self.superblock, segment) {
            Ok(Some(scanned)) => State::Used(scanned),
            Ok(None) => {
                let mut page = [0; PAGE_BYTES];
                let read = self.disk.read_at(segment, 0, &mut page);
                let store = &self.superblock.store;
                match read.is_ok() && SegmentHeader::is_of_another_store(&page, store) {
                    true => State::OfAnotherStore,
                    false => State::Free,
                }
            }
            Err(error) => State::Unreadable(error),
        }
    }

    /// Reads blocks of a segment, and compares them with their sums. A block that a process is writing is
    /// bad, too: verify the bad blocks of a segment that is not sealed once more, a moment later.
    pub fn verify(&self, header: SegmentHeader, records: &[Record]) -> Verified {
        let (records, unreadable) = (records.to_vec(), None);
        let scanned = Scanned { header, is_sealed: false, records, end: 0, unreadable };
        let bad = recover::verify(&self.disk, &scanned);
        if !bad.is_empty() && self.is_replaced(&header) {
            return Verified { bad: Vec::new(), replaced: bad.len() };
        }
        Verified { bad, replaced: 0 }
    }

    /// Whether a process has begun another use of a segment, or removed it, since `header` was read.
    pub(crate) fn is_replaced(&self, header: &SegmentHeader) -> bool {
        let mut page = [0; PAGE_BYTES];
        match self.disk.read_at(header.segment, 0, &mut page) {
            Ok(()) => {
                let now = SegmentHeader::decode(&page, &self.superblock.store, header.segment);
                now.is_some_and(|now| now.incarnation != header.incarnation)
            }
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        }
    }

    pub(crate) fn disk(&self) -> &FileDisk {
        &self.disk
    }
}

/// Segments as plain files.
#[derive(Debug)]
pub(crate) struct FileDisk {
    directories: Vec<PathBuf>,
    is_writable: bool,
    /// The file of each segment that was listed.
    files: Mutex<BTreeMap<u32, PathBuf>>,
    /// The file that was opened last: segments are read one after another.
    last: Mutex<Option<(u32, Arc<File>)>>,
}

impl FileDisk {
    /// Finds the segments' files. Where a segment is in two directories, the file is the one that a process
    /// with these directories uses.
    fn list(&self) -> Result<BTreeMap<u32, PathBuf>> {
        let mut files = BTreeMap::new();
        for (number, directory) in self.directories.iter().enumerate() {
            let failed = |source| Error::Directory { path: directory.clone(), source };
            for entry in std::fs::read_dir(directory).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let name = entry.file_name();
                let Some(segment) = name.to_str().and_then(superblock::segment_of) else {
                    continue;
                };
                if segment as usize % self.directories.len() == number {
                    files.insert(segment, entry.path());
                } else {
                    files.entry(segment).or_insert_with(|| entry.path());
                }
            }
        }
        *self.files.lock() = files.clone();
        *self.last.lock() = None;
        Ok(files)
    }

    fn file(&self, segment: u32) -> io::Result<Arc<File>> {
        let mut last = self.last.lock();
        if let Some((number, file)) = &*last
            && *number == segment
        {
            return Ok(Arc::clone(file));
        }
        let files = self.files.lock();
        let path = files.get(&segment).ok_or(io::ErrorKind::NotFound)?;
        let file = Arc::new(match self.is_writable {
            true => owner::open(path, true, &FileUser::default())?,
            false => private::open(path, false)?,
        });
        *last = Some((segment, Arc::clone(&file)));
        Ok(file)
    }
}

/// Reads segments, and writes within those that exist. There is no memory of blocks, which is an agent's.
impl Disk for FileDisk {
    type Memory = Infallible;

    fn segments(&self) -> io::Result<Vec<u32>> {
        Ok(self.list().map_err(io::Error::other)?.into_keys().collect())
    }

    fn create(&self, _segment: u32) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn remove(&self, _segment: u32) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn read_at(&self, segment: u32, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file(segment)?.read_exact_at(bytes, offset)
    }

    fn write_at(&self, segment: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(segment)?.write_all_at(bytes, offset)
    }

    fn write_blocks(
        &self,
        _segment: u32,
        _header: (u64, &[u8]),
        _blocks: &[(u64, Infallible)],
    ) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn read_blocks(&self, _blocks: &[(u32, u64, Infallible)]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self, segment: u32) -> io::Result<()> {
        self.file(segment)?.sync_data()
    }
}

/// Makes the removal and the renaming of files in a directory durable.
pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
