//! File regions: ranges of files that batches name as their remote side.

use super::FileId;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::region::{Access, RemoteRegion};
use crate::sync::{Arc, RwLock};
use kvferry_proto::Incarnation;
use kvferry_sys::file::{Alignment, File, OpenFlags, page};
use rustc_hash::FxHashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Whether a file is read and written past the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DirectIo {
    /// Used where the file system has it and a range's offset, length and memory are aligned; the other ranges, and the
    /// ends of a range, go through the page cache.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Like `Auto`, but opening fails where the file system does not have it.
    Require,
}

/// Options for opening a file region.
#[derive(Clone, Debug)]
pub struct FileOptions {
    write: bool,
    create: bool,
    offset: u64,
    len: Option<u64>,
    direct: DirectIo,
    name: Option<PathBuf>,
}

impl FileOptions {
    /// An existing file, to be read.
    pub fn read_only() -> Self {
        let direct = DirectIo::default();
        Self { write: false, create: false, offset: 0, len: None, direct, name: None }
    }

    /// An existing file, to be read and written.
    pub fn read_write() -> Self {
        Self { write: true, ..Self::read_only() }
    }

    /// A file of at least `len` bytes, to be read and written. It is made, with mode 0600, if it does not
    /// exist. The file system reserves the space, if it can, so that writes do not fail for lack of it.
    pub fn create(len: u64) -> Self {
        Self { create: true, len: Some(len), ..Self::read_write() }
    }

    /// Only the `len` bytes at `offset` of the file. Without this, the whole file.
    #[must_use]
    pub fn range(self, offset: u64, len: u64) -> Self {
        Self { offset, len: Some(len), ..self }
    }

    /// Whether to go past the page cache.
    #[must_use]
    pub fn direct(self, direct: DirectIo) -> Self {
        Self { direct, ..self }
    }

    /// Name of a file that is given as a descriptor, in [`FileRegion::path`] and errors. A file that is opened by its
    /// path has that name.
    #[must_use]
    pub fn name(self, name: impl Into<PathBuf>) -> Self {
        Self { name: Some(name.into()), ..self }
    }
}

pub(crate) struct FileInner {
    id: FileId,
    incarnation: Incarnation,
    path: PathBuf,
    file: Arc<File>,
    direct: Option<(Arc<File>, Alignment)>,
    /// Offset of the region in the file.
    offset: u64,
    len: u64,
    access: Access,
}

/// Place of one operation in a file.
pub(super) struct Target {
    pub(super) file: Arc<File>,
    /// Offset in the file.
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Set for access past the page cache.
    pub(super) is_direct: bool,
}

impl FileInner {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The offset in the file for an offset in the region, for access past the page cache.
    pub(super) fn direct_offset(&self, offset: u64) -> Option<u64> {
        self.is_direct().then_some(self.offset_in_file(offset))
    }

    /// The alignment of offsets, lengths and memory with which all goes past the page cache. `None` if nothing does.
    pub(super) fn direct_alignment(&self) -> Option<Alignment> {
        let (_, alignment) = self.direct.as_ref()?;
        Some(Alignment { offset: alignment.offset.max(page()), ..*alignment })
    }

    /// The offset in the file for an offset in the region.
    pub(super) fn offset_in_file(&self, offset: u64) -> u64 {
        self.offset + offset
    }

    /// The file through the page cache, which takes any range.
    pub(super) fn buffered(&self) -> &Arc<File> {
        &self.file
    }

    /// The first operation for the `len` bytes at `offset` of the region and at the address `memory`: at
    /// most `len_max` bytes.
    pub(super) fn target(&self, offset: u64, len: u64, memory: u64, len_max: u64) -> Target {
        let offset = self.offset_in_file(offset);
        let buffered = |len| Target { file: Arc::clone(&self.file), offset, len, is_direct: false };
        let len = len.min(len_max);
        let Some((file, alignment)) = &self.direct else { return buffered(len) };
        // Whole pages: what goes through the page cache must not share a page with what does not.
        let page = alignment.offset.max(page());
        let head = offset.next_multiple_of(page) - offset;
        let is_aligned = (memory + head).is_multiple_of(alignment.memory);
        let whole = len.saturating_sub(head) / page * page;
        match (is_aligned && whole > 0, head) {
            (false, _) => buffered(len),
            (true, 0) => Target { file: Arc::clone(file), offset, len: whole, is_direct: true },
            (true, head) => buffered(head),
        }
    }
}

impl fmt::Debug for FileInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direct = if self.direct.is_some() { " direct" } else { "" };
        let (path, offset, len) = (self.path.display(), self.offset, self.len);
        write!(f, "FileRegion[{} {path} {offset}+{len} {}{direct}]", self.id, self.access)
    }
}

/// A range of a file of this host. A handle: clones are the same region, and dropping them does not
/// close it.
///
/// [`Files`](crate::Files) moves batches between memory and file regions.
#[derive(Clone, Debug)]
pub struct FileRegion(pub(super) Arc<FileInner>);

impl FileRegion {
    /// The region's id, unique among all regions of this agent's incarnation.
    pub fn id(&self) -> FileId {
        self.0.id
    }

    /// The file's path; for a region made from a descriptor, its [name](FileOptions::name) or number.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Always false: an empty region can't be opened.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether ranges that are aligned go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.0.is_direct()
    }

    /// The region as the remote side of a batch: [`Batch::push`](crate::Batch::push).
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            incarnation: self.0.incarnation,
            id: self.0.id,
            addr: 0,
            len: self.0.len,
            access: self.0.access,
        }
    }

    /// Waits until everything that was written to the file before is on its device (`fdatasync`).
    /// Transfers never do that by themselves. Blocks without a time limit.
    ///
    /// # Errors
    /// `Io`. What was written before may be lost then; a later call that succeeds does not mean that it is
    /// there.
    pub fn sync(&self) -> Result<()> {
        let sync = self.0.file.sync_data();
        sync.map_err(|e| failed("the file can't be synchronised", e, &self.0.path))
    }
}

impl FileRegion {
    /// The open files that transfers use.
    fn files(&self) -> impl Iterator<Item = &Arc<File>> {
        let direct = self.0.direct.as_ref().map(|(file, _)| file);
        std::iter::once(&self.0.file).chain(direct)
    }

    /// Takes a shared lock (`flock`) of the file by each descriptor that transfers use. Operations that have begun hold
    /// it, too: after [`Agent::close_file`](crate::Agent::close_file), and after the process was killed, it lasts until the
    /// last of them has ended. So a process that gets the lock alone knows that no operation is under way that was begun
    /// under the lock. Idempotent. Waits for no other process.
    ///
    /// # Errors
    /// `Busy` if another open file has the lock alone; `Io`, such as of a file system that has no locks.
    pub fn lock_shared(&self) -> Result<()> {
        for file in self.files() {
            let locked = file.try_lock_shared();
            if !locked.map_err(|e| failed("the file can't be locked", e, &self.0.path))? {
                let what = "another open file has the lock of the file for itself";
                return Err(Error::new(ErrorKind::Busy, what).with("file", self.0.path.display()));
            }
        }
        Ok(())
    }

    /// Gives up the lock that [`FileRegion::lock_shared`] has taken, even while operations are under way.
    ///
    /// # Errors
    /// `Io`.
    pub fn unlock(&self) -> Result<()> {
        self.files().try_for_each(|file| {
            file.unlock().map_err(|e| failed("the file can't be unlocked", e, &self.0.path))
        })
    }
}

fn failed(what: &str, e: std::io::Error, path: &Path) -> Error {
    Error::io(what, e).with("file", path.display())
}

/// The open file regions of an agent.
#[derive(Debug, Default)]
pub(crate) struct Table(RwLock<FxHashMap<FileId, Arc<FileInner>>>);

impl Table {
    pub(crate) fn open(
        &self,
        (incarnation, id): (Incarnation, FileId),
        path: &Path,
        options: &FileOptions,
    ) -> Result<FileRegion> {
        let how =
            OpenFlags { read: true, write: options.write, create: options.create, direct: false };
        let file =
            File::open(path, how).map_err(|e| failed("the file can't be opened", e, path))?;
        self.insert((incarnation, id), path.to_owned(), file, options)
    }

    pub(crate) fn adopt(
        &self,
        (incarnation, id): (Incarnation, FileId),
        fd: OwnedFd,
        options: &FileOptions,
    ) -> Result<FileRegion> {
        use std::os::fd::AsRawFd;
        let number = || PathBuf::from(format!("descriptor {}", fd.as_raw_fd()));
        let path = options.name.clone().unwrap_or_else(number);
        let file = File::from_fd(fd);
        let unusable = |e| failed("the descriptor can't be used", e, &path);
        let access = file.access().map_err(unusable)?;
        if !access.0 || (options.write && !access.1) {
            let what = "the descriptor was not opened for this access";
            return Err(Error::new(ErrorKind::AccessDenied, what).with("file", path.display()));
        }
        if options.write && file.appends().map_err(unusable)? {
            let what = "the descriptor was opened to append: no write would reach its offset";
            return Err(Error::invalid(what).with("file", path.display()));
        }
        self.insert((incarnation, id), path, file, options)
    }

    fn insert(
        &self,
        (incarnation, id): (Incarnation, FileId),
        path: PathBuf,
        file: File,
        options: &FileOptions,
    ) -> Result<FileRegion> {
        let invalid = |what: &str| Error::invalid(what).with("file", path.display());
        let asked = options.len.map(|len| options.offset.checked_add(len));
        if asked.is_some_and(|end| end.is_none_or(|end| i64::try_from(end).is_err())) {
            return Err(invalid("the range ends beyond the largest offset of a file"));
        }
        if options.create
            && let Some(len) = options.len
        {
            let reserved = file.reserve(options.offset, len);
            reserved.map_err(|e| failed("the space for the file can't be reserved", e, &path))?;
        }
        let size = file.len().map_err(|e| failed("the file's length can't be read", e, &path))?;
        let whole = size.map(|size| size.saturating_sub(options.offset));
        let len = options.len.or(whole).ok_or_else(|| {
            invalid("neither a regular file nor a block device: the range has to be given")
        })?;
        if len == 0 {
            return Err(invalid("the region has no bytes"));
        }
        if options.len.is_some() && whole.is_some_and(|whole| len > whole) && !options.write {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                "the range reaches beyond the file's end",
            )
            .with("file", path.display())
            .with("offset", options.offset)
            .with("len", len)
            .with("file_len", size.unwrap_or_default()));
        }
        let direct = match options.direct {
            DirectIo::Off => None,
            how => match file.reopen_direct(true, options.write) {
                Ok(direct) => {
                    let alignment = direct.alignment();
                    Some((Arc::new(direct), alignment))
                }
                Err(e) if how == DirectIo::Require => {
                    return Err(failed("the file can't be opened past the page cache", e, &path));
                }
                Err(_) => None,
            },
        };
        let inner = Arc::new(FileInner {
            id,
            incarnation,
            path,
            file: Arc::new(file),
            direct,
            offset: options.offset,
            len,
            access: Access { read: true, write: options.write },
        });
        self.0.write().insert(id, Arc::clone(&inner));
        Ok(FileRegion(inner))
    }

    /// Closes a region. Transfers that have begun keep the file open until they end.
    pub(crate) fn close(&self, region: &FileRegion) -> Result<()> {
        match self.0.write().remove(&region.id()) {
            Some(_) => Ok(()),
            None => Err(Error::new(ErrorKind::NotRegistered, "the file region is not open")
                .with("region", region.id())
                .with("file", region.path().display())),
        }
    }

    pub(super) fn get(&self, id: FileId) -> Option<Arc<FileInner>> {
        self.0.read().get(&id).cloned()
    }
}

impl FileInner {
    /// Whether `len` bytes at `offset` of the region may be written, or read.
    pub(super) fn check(&self, offset: u64, len: u64, writes: bool) -> Result<()> {
        let error = |kind, what: &str| {
            let error = Error::new(kind, what).with("file", self.path.display());
            error.with("region", self.id).with("offset", offset).with("len", len)
        };
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let what = "the range reaches beyond the file region";
            return Err(error(ErrorKind::OutOfBounds, what).with("region_len", self.len));
        }
        if writes && !self.access.write {
            return Err(error(ErrorKind::AccessDenied, "the file region is read-only"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The operations for a range, as (offset in the file, length, past the page cache).
    fn cut(file: &FileInner, offset: u64, len: u64, memory: u64) -> Vec<(u64, u64, bool)> {
        let mut at = 0;
        let mut cut = Vec::new();
        while at < len {
            let target = file.target(offset + at, len - at, memory + at, 1 << 20);
            let direct = &file.direct.as_ref().expect("direct").0;
            cut.push((target.offset, target.len, Arc::ptr_eq(&target.file, direct)));
            at += target.len;
        }
        cut
    }

    #[test]
    fn whole_pages_go_past_the_page_cache_and_the_ends_through_it() {
        let path = std::env::temp_dir().join(format!("kvferry-cut-{}", std::process::id()));
        let how = OpenFlags { read: true, write: true, create: true, direct: false };
        let file = || Arc::new(File::open(&path, how).expect("a file"));
        let mut inner = FileInner {
            id: kvferry_proto::RegionId(1),
            incarnation: Incarnation(1),
            path: path.clone(),
            file: file(),
            direct: Some((file(), Alignment { memory: 4, offset: 512 })),
            offset: 0,
            len: 1 << 30,
            access: Access::READ_WRITE,
        };
        assert_eq!(cut(&inner, 0, 8192, 0), [(0, 8192, true)]);
        assert_eq!(
            cut(&inner, 100, 12_000, 100),
            [(100, 3996, false), (4096, 4096, true), (8192, 3908, false)]
        );
        assert_eq!(cut(&inner, 0, 8192, 2), [(0, 8192, false)], "memory that is not aligned");
        assert_eq!(cut(&inner, 4000, 150, 4000), [(4000, 150, false)], "no whole page");
        let long = cut(&inner, 0, (2 << 20) + 5, 0);
        assert_eq!(
            long,
            [(0, 1 << 20, true), (1 << 20, 1 << 20, true), (2 << 20, 5, false)],
            "operations of bounded size"
        );
        inner.offset = 4000;
        assert_eq!(cut(&inner, 0, 4192, 0), [(4000, 96, false), (4096, 4096, true)]);
        std::fs::remove_file(&path).expect("made above");
    }
}
