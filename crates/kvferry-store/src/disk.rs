//! The segments of a store as files, in one directory or several.
//!
//! Segment `n` is in directory `n % directories`. Blocks are moved by the agent's file transport; headers and
//! footers, and what the collector copies, by plain reads and writes.

use crate::arrange::{Directory, State};
use crate::error::Result;
use crate::log::{self, Superblock};
use crate::memory::{BlockMemory, PAGE, PAGE_OF_ZEROS, padding};
use crate::own::{self, FileUser};
use crate::steps::{Op, Step, step, sync_directory};
use crate::sync::lock;
use kvferry::{Access, Agent, Batch, DirectIo, FileOptions, FileRegion, Options, Region, Transfer};
use kvferry_sys::private;
use rustc_hash::{FxHashMap, FxHashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Segments whose files are kept open. Each takes up to three descriptors.
const OPEN_MAX: usize = 96;

/// Headers of extents that are written at once, beside their blocks.
const HEADERS: usize = 64;

/// What a device that can't read says.
pub(crate) const EIO: i32 = 5;
/// What the system says when it is short of descriptors or memory: no fault of a device.
const PASSING: [i32; 5] = [4, 11, 12, 23, 24];
/// How long it is known whether a directory can be written to.
const KNOWN_FOR: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Directories {
    agent: Agent,
    /// In the order of their numbers.
    paths: Vec<PathBuf>,
    /// Directories that could not be read when the store was opened.
    lost: Vec<bool>,
    /// Directories that have a superblock, so that another file system in their place is noticed.
    marked: Vec<bool>,
    users: Vec<FileUser>,
    store: [u8; 16],
    segment_bytes: u64,
    direct: DirectIo,
    /// What the padding of blocks is written from.
    zeros: Region,
    headers: Arc<Headers>,
    open: Mutex<Open>,
    /// Files whose names this process has synced. Another process may have made a file and been killed.
    named: Mutex<FxHashSet<u32>>,
    /// Which directories could be written to, and when that was found out.
    writable: Mutex<Option<(Instant, Arc<[bool]>)>>,
}

#[derive(Debug, Default)]
struct Open {
    files: FxHashMap<u32, (Arc<Segment>, u64)>,
    /// Counts uses, to find the file that was not used for longest.
    uses: u64,
}

/// Memory for the headers of extents that are being written. A header is written in one transfer with its blocks: a
/// thread that wrote it to the file itself would wait for the blocks of the extent before, as a file has one writer
/// at a time.
#[derive(Debug)]
struct Headers {
    region: Region,
    free: Mutex<Vec<usize>>,
}

/// A header in memory. It must outlive the transfer that writes it. A device that hangs may write what the page holds
/// later: a header names its own page, so at another place it is no header.
#[derive(Debug)]
struct Header {
    of: Arc<Headers>,
    number: usize,
}

impl Headers {
    fn new(agent: &Agent) -> Result<Self> {
        let region = agent.allocate(HEADERS * PAGE, Access::NONE)?;
        Ok(Self { region, free: Mutex::new((0..HEADERS).collect()) })
    }

    /// A copy of `bytes`, which are a page; `None` if all memory is in use.
    fn copy(self: &Arc<Self>, bytes: &[u8]) -> Option<Header> {
        let number = lock(&self.free).pop()?;
        let header = Header { of: Arc::clone(self), number };
        self.region.write_at(header.offset(), bytes).is_ok().then_some(header)
    }
}

impl Header {
    fn offset(&self) -> usize {
        self.number * PAGE
    }
}

impl Drop for Header {
    fn drop(&mut self) {
        lock(&self.of.free).push(self.number);
    }
}

/// An open segment. Closes its region when the last operation on it has ended.
#[derive(Debug)]
struct Segment {
    agent: Agent,
    file: File,
    region: FileRegion,
    /// False if the file system is read-only, or this user may only read.
    is_writable: bool,
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Fails if the agent was shut down, which closed the region.
        let _ = self.agent.close_file(&self.region);
    }
}

/// Blocks that are being read or written. Dropping it waits until that has ended: their memory is the caller's
/// again after that.
#[derive(Debug)]
pub(crate) struct UnderWay {
    /// `None` if it has ended.
    began: io::Result<Option<Transfer>>,
    uses: Uses,
    step: Option<Step>,
}

/// What a transfer uses beside the memory of blocks.
#[derive(Debug, Default)]
struct Uses {
    _files: Vec<Arc<Segment>>,
    _header: Option<Header>,
}

impl Uses {
    /// The transfer has ended. If the agent was shut down, a device may use all that for as long as it takes.
    fn end<T>(self, outcome: kvferry::Result<T>) -> io::Result<()> {
        if outcome.as_ref().is_err_and(|e| e.quiesced() == Some(false)) {
            std::mem::forget(self);
        }
        outcome.map(|_| ()).map_err(io::Error::other)
    }
}

/// A transfer ends when the device has answered, and not before: until then the memory is not the caller's.
fn without_end() -> Options<'static> {
    Options { timeout: Some(Duration::MAX), ..Options::default() }
}

/// The error of a transfer whose bytes may still be moved: the agent was shut down meanwhile.
pub(crate) fn may_move(error: &io::Error) -> Option<kvferry::Error> {
    let error = error.get_ref()?.downcast_ref::<kvferry::Error>()?;
    (error.quiesced() == Some(false)).then(|| error.clone())
}

impl UnderWay {
    fn begin(began: io::Result<(Transfer, Uses, Step)>) -> Self {
        match began {
            Ok((transfer, uses, step)) => {
                Self { began: Ok(Some(transfer)), uses, step: Some(step) }
            }
            Err(e) => Self::ended(Err(e)),
        }
    }

    fn ended(outcome: io::Result<()>) -> Self {
        Self { began: outcome.map(|()| None), uses: Uses::default(), step: None }
    }

    /// Waits for the end.
    pub(crate) fn end(mut self) -> io::Result<()> {
        let Some(transfer) = std::mem::replace(&mut self.began, Ok(None))? else { return Ok(()) };
        let outcome = transfer.wait(None).expect("waits without an end");
        if let Some(step) = self.step.take() {
            step.end(outcome.is_ok());
        }
        std::mem::take(&mut self.uses).end(outcome)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Ok(Some(transfer)) = &self.began
            && let Some(outcome) = transfer.wait(None)
        {
            let _ = std::mem::take(&mut self.uses).end(outcome);
        }
    }
}

impl Directories {
    pub(crate) fn new(
        agent: &Agent,
        directories: &[Directory],
        superblock: &Superblock,
        direct: DirectIo,
    ) -> Result<Self> {
        let zeros = agent.allocate(PAGE_OF_ZEROS.len(), Access::NONE)?;
        Ok(Self {
            agent: agent.clone(),
            paths: directories.iter().map(|it| it.path.clone()).collect(),
            marked: directories.iter().map(|it| matches!(it.state, State::Marked)).collect(),
            users: directories.iter().map(|_| FileUser::default()).collect(),
            store: superblock.store,
            lost: directories.iter().map(|it| matches!(it.state, State::Lost(_))).collect(),
            segment_bytes: superblock.geometry.segment_bytes(),
            direct,
            zeros,
            headers: Arc::new(Headers::new(agent)?),
            open: Mutex::default(),
            named: Mutex::default(),
            writable: Mutex::default(),
        })
    }

    /// Whether blocks go past the page cache, where the file system allows it.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct != DirectIo::Off
    }

    pub(crate) fn path_of(&self, segment: u32) -> PathBuf {
        self.paths[segment as usize % self.paths.len()].join(log::superblock::segment_file(segment))
    }

    fn open_files(&self) -> MutexGuard<'_, Open> {
        lock(&self.open)
    }

    /// While this is held, the making of a segment does not end.
    #[cfg(test)]
    pub(crate) fn hold_creates(&self) -> MutexGuard<'_, FxHashSet<u32>> {
        self.named()
    }

    fn named(&self) -> MutexGuard<'_, FxHashSet<u32>> {
        lock(&self.named)
    }

    /// An open segment, to be read.
    fn segment(&self, segment: u32) -> io::Result<Arc<Segment>> {
        self.opened(segment, false)
    }

    /// An open segment, to be written.
    fn segment_to_write(&self, segment: u32) -> io::Result<Arc<Segment>> {
        self.opened(segment, true)
    }

    fn opened(&self, segment: u32, is_writable: bool) -> io::Result<Arc<Segment>> {
        let mut open = self.open_files();
        open.uses += 1;
        let now = open.uses;
        if let Some((known, used)) = open.files.get_mut(&segment)
            && (known.is_writable || !is_writable)
        {
            *used = now;
            return Ok(Arc::clone(known));
        }
        let new = match self.open_segment(segment, true) {
            Err(e) if is_read_only(&e) && !is_writable => self.open_segment(segment, false)?,
            new => new?,
        };
        if open.files.len() >= OPEN_MAX
            && let Some(oldest) = open.files.iter().min_by_key(|(_, (_, used))| *used)
        {
            let oldest = *oldest.0;
            open.files.remove(&oldest);
        }
        open.files.insert(segment, (Arc::clone(&new), now));
        Ok(new)
    }

    fn open_segment(&self, segment: u32, is_writable: bool) -> io::Result<Arc<Segment>> {
        let path = self.path_of(segment);
        step(|| Op::Open { path: path.clone(), to_write: is_writable }, || Ok(()))?;
        let file = own::open(&path, is_writable, &self.users[self.number_of(segment)])?;
        let options =
            if is_writable { FileOptions::read_write() } else { FileOptions::read_only() };
        self.register(path, file, options, is_writable)
    }

    /// The agent gets the file that was looked at, whatever its name leads to by then.
    fn register(
        &self,
        path: PathBuf,
        file: File,
        options: FileOptions,
        is_writable: bool,
    ) -> io::Result<Arc<Segment>> {
        let options = options.direct(self.direct).name(path);
        let region =
            self.agent.register_file(file.try_clone()?.into(), &options).map_err(system_error)?;
        Ok(Arc::new(Segment { agent: self.agent.clone(), file, region, is_writable }))
    }

    /// Adds a block, and what fills its last page if `pad`, to a batch.
    fn push(
        &self,
        batch: &mut Batch,
        segment: &Segment,
        at: u64,
        block: &BlockMemory,
        pad: bool,
    ) -> Result<()> {
        let remote = segment.region.remote();
        block.push_to(batch, &remote, at)?;
        let padding = padding(block.len()) as u64;
        if pad && padding > 0 {
            batch.push(&self.zeros, 0, &remote, at + block.len(), padding)?;
        }
        Ok(())
    }

    /// The batch writes the header of an extent and its blocks.
    fn writes(
        &self,
        segment: u32,
        (header_at, header): (u64, &[u8]),
        blocks: &[(u64, BlockMemory)],
    ) -> io::Result<(Batch, Uses)> {
        let number = segment;
        let segment = self.segment_to_write(number)?;
        let mut batch = Batch::with_capacity(1 + blocks.len());
        let copy = self.headers.copy(header);
        if let Some(copy) = &copy {
            let (near, remote) = (copy.offset() as u64, segment.region.remote());
            batch
                .push(&self.headers.region, near, &remote, header_at, PAGE as u64)
                .map_err(io::Error::other)?;
        }
        for (at, block) in blocks {
            self.push(&mut batch, &segment, *at, block, true).map_err(io::Error::other)?;
        }
        let write = || match &copy {
            Some(_) => Ok(()),
            None => segment.file.write_all_at(header, header_at),
        };
        step(|| Op::write(self.path_of(number), header_at, header), write)?;
        Ok((batch, Uses { _files: vec![segment], _header: copy }))
    }

    /// The batch reads blocks. The files stay open as long as they are held.
    fn reads(&self, blocks: &[(u32, u64, BlockMemory)]) -> io::Result<(Batch, Uses)> {
        let mut batch = Batch::with_capacity(blocks.len());
        let mut files: Vec<Arc<Segment>> = Vec::with_capacity(1);
        let mut last = None;
        for (segment, at, block) in blocks {
            if last != Some(segment) {
                files.push(self.segment(*segment)?);
                last = Some(segment);
            }
            let file = files.last().expect("pushed with the first block");
            self.push(&mut batch, file, *at, block, false).map_err(io::Error::other)?;
        }
        Ok((batch, Uses { _files: files, _header: None }))
    }

    /// As [`log::Disk::write_blocks`], but returns at once where the device is what takes its time. Into the page cache
    /// this thread copies the blocks itself, whose sums it has just computed: they are in its processor's cache.
    pub(crate) fn begin_write(
        &self,
        segment: u32,
        header: (u64, &[u8]),
        blocks: &[(u64, BlockMemory)],
    ) -> UnderWay {
        if !self.is_direct() {
            let written = log::Disk::write_blocks(self, segment, header, blocks);
            return UnderWay::ended(written);
        }
        UnderWay::begin(self.writes(segment, header, blocks).and_then(|(batch, uses)| {
            let step = Step::begin(|| Op::write_blocks(self.path_of(segment), blocks))?;
            Ok((self.agent.files().write_async(&batch, &without_end()), uses, step))
        }))
    }

    /// As [`log::Disk::read_blocks`], but returns at once.
    pub(crate) fn begin_read(&self, blocks: &[(u32, u64, BlockMemory)]) -> UnderWay {
        UnderWay::begin(self.reads(blocks).and_then(|(batch, uses)| {
            let step = Step::begin(|| Op::Read(self.path_of(blocks[0].0)))?;
            Ok((self.agent.files().read_async(&batch, &without_end()), uses, step))
        }))
    }

    /// Makes the segment's file unless it exists. One of another length is made anew, and so is a link.
    pub(crate) fn ensure(&self, segment: u32) -> io::Result<()> {
        match std::fs::symlink_metadata(self.path_of(segment)) {
            Ok(file) if !file.is_symlink() && file.len() == self.segment_bytes => {
                return self.segment_to_write(segment).map(|_| ());
            }
            Ok(_) => log::Disk::remove(self, segment)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.close(segment),
            Err(e) => return Err(e),
        }
        self.check_directory(self.number_of(segment))?;
        log::Disk::create(self, segment).inspect_err(|_| {
            let _ = log::Disk::remove(self, segment);
        })
    }

    /// Fails if the directory is not the store's any more, such as the empty folder that a device was mounted at.
    fn check_directory(&self, number: usize) -> io::Result<()> {
        if !self.marked[number] && !self.lost[number] {
            return Ok(());
        }
        let path = &self.paths[number];
        match Superblock::read_own(path, &self.users[number]) {
            Ok(Some((it, _))) if it.store == self.store && it.directory as usize == number => {
                Ok(())
            }
            Err(log::Error::Directory { source, .. }) => Err(source),
            Err(refused @ log::Error::Refused(_)) => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, refused))
            }
            _ => {
                let what = format!("{} is not a directory of the store any more", path.display());
                Err(io::Error::new(io::ErrorKind::NotFound, what))
            }
        }
    }

    /// Whether segments of each directory, by its number, can be written to.
    pub(crate) fn writable(&self) -> Arc<[bool]> {
        let mut known = lock(&self.writable);
        if let Some((at, writable)) = &*known
            && at.elapsed() < KNOWN_FOR
        {
            return Arc::clone(writable);
        }
        let is_writable = |path: &PathBuf| {
            let superblock = path.join(log::superblock::FILE);
            let open = || private::open(&superblock, true);
            match step(|| Op::Open { path: superblock.clone(), to_write: true }, open) {
                Ok(_) => true,
                // Of format 1.
                Err(e) => e.kind() == io::ErrorKind::NotFound && path.exists(),
            }
        };
        let writable: Arc<[bool]> = self.paths.iter().map(is_writable).collect();
        *known = Some((Instant::now(), Arc::clone(&writable)));
        writable
    }

    /// Whether segments of any directory can be written to.
    pub(crate) fn is_any_writable(&self) -> bool {
        self.writable().contains(&true)
    }

    /// The number of a segment's directory.
    pub(crate) fn number_of(&self, segment: u32) -> usize {
        segment as usize % self.paths.len()
    }

    /// How many directories could not be read when the store was opened.
    pub(crate) fn lost(&self) -> usize {
        self.lost.iter().filter(|it| **it).count()
    }

    /// Whether a segment's directory could not be read when the store was opened.
    pub(crate) fn is_in_lost_directory(&self, segment: u32) -> bool {
        self.lost[self.number_of(segment)]
    }

    /// Whether bytes of a segment are gone for every process: the file is gone or too short, or the device can't
    /// read them.
    pub(crate) fn is_lost(&self, segment: u32, offset: u64, len: u32) -> bool {
        let mut bytes = vec![0; usize::try_from(len).expect("at most a segment")];
        let path = self.path_of(segment);
        let read = step(
            || Op::Read(path.clone()),
            || private::open(&path, false).and_then(|file| file.read_exact_at(&mut bytes, offset)),
        );
        let is_gone = |e: io::Error| {
            matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
                || e.raw_os_error() == Some(EIO)
        };
        read.is_err_and(is_gone)
    }

    /// Closes a segment's file once nothing reads it.
    pub(crate) fn close(&self, segment: u32) {
        self.open_files().files.remove(&segment);
    }

    /// Tells tests that the keeper has removed a block.
    pub(crate) fn note_evicted(&self, key: [u64; 2]) {
        let _ = step(|| Op::Evicted(self.path_of(0), key), || Ok(()));
    }

    /// Bytes of all segments' files.
    pub(crate) fn bytes(&self) -> u64 {
        let mut bytes = 0;
        for path in &self.paths {
            let Ok(entries) = std::fs::read_dir(path) else { continue };
            for entry in entries.flatten() {
                let is_segment = entry.file_name().to_str().and_then(log::superblock::segment_of);
                bytes += is_segment.and(entry.metadata().ok()).map_or(0, |it| it.len());
            }
        }
        bytes
    }

    /// Removes files of segments that the store, as it is opened, does not have: they are beyond its
    /// capacity, of another length, or in the wrong directory. For the first process that opens it.
    pub(crate) fn discard_others(&self, segments: u32) -> io::Result<()> {
        for (number, path) in self.readable() {
            for entry in std::fs::read_dir(path)? {
                let entry = entry?;
                let name = entry.file_name();
                let Some(segment) = name.to_str().and_then(log::superblock::segment_of) else {
                    continue;
                };
                let is_here = segment as usize % self.paths.len() == number;
                let is_whole = entry.metadata()?.len() == self.segment_bytes;
                if segment < segments && is_here && is_whole {
                    continue;
                }
                let path = entry.path();
                match step(|| Op::Remove(path.clone()), || std::fs::remove_file(&path)) {
                    Err(e) if !is_read_only(&e) => return Err(e),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The directories that are not lost, with their numbers.
    fn readable(&self) -> impl Iterator<Item = (usize, &PathBuf)> {
        self.paths.iter().enumerate().filter(|(number, _)| !self.lost[*number])
    }

    fn directory_of(&self, segment: u32) -> &Path {
        &self.paths[segment as usize % self.paths.len()]
    }
}

/// Whether a device or a file system failed, and not this process.
pub(crate) fn is_of_device(error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(code) => !PASSING.contains(&code),
        // A file that is gone, or cut, or another user's.
        None => {
            matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
                || own::is_refused(error)
        }
    }
}

/// Whether a file may only be read.
fn is_read_only(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), ReadOnlyFilesystem | PermissionDenied)
}

/// The system's error that an agent's error stems from, if there is one.
fn system_error(error: kvferry::Error) -> io::Error {
    let mut cause = std::error::Error::source(&error);
    while let Some(next) = cause {
        let code = next.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if let Some(code) = code {
            return io::Error::from_raw_os_error(code);
        }
        cause = next.source();
    }
    io::Error::other(error)
}

impl log::Disk for Directories {
    type Memory = BlockMemory;

    fn segments(&self) -> io::Result<Vec<u32>> {
        let mut segments = Vec::new();
        for (number, path) in self.readable() {
            for entry in std::fs::read_dir(path)? {
                let name = entry?.file_name();
                let segment = name.to_str().and_then(log::superblock::segment_of);
                segments.extend(segment.filter(|it| *it as usize % self.paths.len() == number));
            }
        }
        segments.sort_unstable();
        Ok(segments)
    }

    fn create(&self, segment: u32) -> io::Result<()> {
        let path = self.path_of(segment);
        let create = || {
            // A file that is there, or a link, was not made by this process: it is not used.
            let file = private::create(&path)?;
            self.register(path.clone(), file, FileOptions::create(self.segment_bytes), true)
        };
        step(|| Op::Create { path: path.clone(), len: self.segment_bytes }, create)?;
        self.named().remove(&segment);
        Ok(())
    }

    fn remove(&self, segment: u32) -> io::Result<()> {
        self.open_files().files.remove(&segment);
        let path = self.path_of(segment);
        step(|| Op::Remove(path.clone()), || std::fs::remove_file(&path))
    }

    fn read_at(&self, segment: u32, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let file = self.segment(segment)?;
        step(|| Op::Read(self.path_of(segment)), || file.file.read_exact_at(into, offset))
    }

    fn write_at(&self, segment: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let file = self.segment_to_write(segment)?;
        step(
            || Op::write(self.path_of(segment), offset, bytes),
            || file.file.write_all_at(bytes, offset),
        )
    }

    fn write_blocks(
        &self,
        segment: u32,
        header: (u64, &[u8]),
        blocks: &[(u64, BlockMemory)],
    ) -> io::Result<()> {
        let (batch, uses) = self.writes(segment, header, blocks)?;
        let write = || uses.end(self.agent.files().write(&batch, &without_end()));
        step(|| Op::write_blocks(self.path_of(segment), blocks), write)
    }

    fn read_blocks(&self, blocks: &[(u32, u64, BlockMemory)]) -> io::Result<()> {
        let (batch, uses) = self.reads(blocks)?;
        let read = || uses.end(self.agent.files().read(&batch, &without_end()));
        step(|| Op::Read(self.path_of(blocks[0].0)), read)
    }

    fn sync(&self, segment: u32) -> io::Result<()> {
        step(
            || Op::SyncSegment(self.path_of(segment)),
            || {
                let file = self.segment(segment)?;
                step(|| Op::Sync(self.path_of(segment)), || file.file.sync_data())?;
                if !self.named().contains(&segment) {
                    sync_directory(self.directory_of(segment))?;
                    self.named().insert(segment);
                }
                Ok(())
            },
        )
    }
}
