//! The segments of a store as files, in one directory or several.
//!
//! Segment `n` is in directory `n % directories`. Blocks are moved by the agent's file transport; headers and
//! footers, and what the collector copies, by plain reads and writes.

mod device;
mod errors;
pub(crate) mod gate;
mod transfers;

pub(crate) use errors::{EIO, is_of_device, is_written_late, may_move};
pub(crate) use transfers::UnderWay;

use crate::error::Result;
use crate::fault_points::{Op, Step, step};
use crate::index::Index;
use crate::log::{self, Superblock};
use crate::memory::{BlockMemory, PAGE, PAGE_OF_ZEROS, padding};
use crate::opening::directories::{Directory, State};
use crate::opening::owner::FileUser;
use crate::threads::helpers::Helpers;
use device::{Device, Segment};
use gate::{Entered, Gate, Pace, is_hang};
use kvferry::{Access, Agent, Batch, DirectIo, Region};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use transfers::{
    BlockTransfer, DirectoryRead, Headers, KeptWrite, TransferParts, TransferUses, without_end,
};

#[derive(Debug)]
pub(crate) struct Directories {
    agent: Agent,
    /// The directories, ordered by number.
    all: Vec<Arc<Device>>,
    direct: DirectIo,
    /// Zeros that the padding of blocks is written from.
    zeros: Region,
    headers: Arc<Headers>,
    helpers: Arc<Helpers>,
}

impl Drop for Directories {
    fn drop(&mut self) {
        self.helpers.close();
    }
}

impl Directories {
    pub(crate) fn new(
        agent: &Agent,
        directories: &[Directory],
        superblock: &Superblock,
        direct: DirectIo,
        hang_after: Duration,
    ) -> Result<Self> {
        let zeros = agent.allocate(PAGE_OF_ZEROS.len(), Access::NONE)?;
        let helpers: Arc<Helpers> = Arc::default();
        let device = |(number, it): (usize, &Directory)| {
            Arc::new(Device {
                agent: agent.clone(),
                path: it.path.clone(),
                number,
                directories: directories.len(),
                is_lost: AtomicBool::new(matches!(it.state, State::Lost(_))),
                is_marked: matches!(it.state, State::Marked | State::Old),
                id: it.id,
                index: OnceLock::new(),
                user: FileUser::default(),
                store: superblock.store,
                segment_bytes: superblock.geometry.segment_bytes(),
                direct,
                gate: Arc::new(Gate::new(&it.path, hang_after)),
                helpers: Arc::clone(&helpers),
                state: device::State::default(),
            })
        };
        Ok(Self {
            agent: agent.clone(),
            all: directories.iter().enumerate().map(device).collect(),
            direct,
            zeros,
            headers: Arc::new(Headers::new(agent)?),
            helpers,
        })
    }

    /// Compares the directories with those of the processes that share the index. One in whose place this process found
    /// another device is lost.
    pub(crate) fn share(&self, index: &Arc<Index>) {
        for device in &self.all {
            if !device.is_lost.load(Relaxed)
                && index.agree_on_directory(device.number, device.id) != device.id
            {
                device.is_lost.store(true, Relaxed);
                tracing::warn!(
                    "{} is not on the device that the other processes of the store found there; \
                     its blocks are missed by this process: unmount what was mounted over it, or \
                     open the store again in all processes",
                    device.path.display()
                );
            }
            let _ = device.index.set(Arc::clone(index));
        }
    }

    /// Whether blocks go past the page cache, where the file system allows it.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct != DirectIo::Off
    }

    /// The directory of a segment.
    fn of(&self, segment: u32) -> &Arc<Device> {
        &self.all[self.number_of(segment)]
    }

    pub(crate) fn path_of(&self, segment: u32) -> PathBuf {
        self.of(segment).path_of(segment)
    }

    /// Keeps files of a directory's segments from being made while the guard is held.
    #[cfg(test)]
    pub(crate) fn hold_creates(
        &self,
        directory: usize,
    ) -> kvferry_sys::sync::MutexGuard<'_, rustc_hash::FxHashSet<u32>> {
        self.all[directory].named()
    }

    /// Makes a directory hang while the result is held.
    #[cfg(test)]
    pub(crate) fn hang(&self, directory: usize) -> Entered {
        let gate = &self.all[directory].gate;
        let entered = gate.enter(Pace::Quick).expect("it does not hang");
        gate.age(gate.limit());
        entered
    }

    /// The number of directories.
    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// Adds a block, and what fills its last page if `pad`, to a batch.
    ///
    /// With [`DirectIo`], the last page of a block whose length is no multiple of a page goes through the page cache, and the
    /// others past it. When such a page is written past the cache later, in another use of the segment, while a late `get`
    /// reads it, the kernel may fail to drop it from the cache, and report that as an error of the next sync. Then
    /// [`Store::sync`](crate::Store::sync) fails until the keeper has moved the blocks; no block is lost or wrong. Blocks of
    /// whole pages, as engines have them, have no such page.
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
    ) -> io::Result<(Batch, Entered, TransferUses)> {
        let (number, device) = (segment, self.of(segment));
        let segment = device.find_to_write(number)?;
        let entered = device.enter(Pace::Quick)?;
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
        match &copy {
            Some(_) => step(|| Op::write(self.path_of(number), header_at, header), || Ok(()))?,
            None => device.write_at(number, header_at, header)?,
        }
        Ok((batch, entered, TransferUses { files: vec![segment], header: copy }))
    }

    /// Blocks that are to be read, those of each directory by themselves: a transfer that waits for a device must not
    /// have another one seem to hang. Their files stay open as long as they are held.
    fn reads(&self, blocks: &[(u32, u64, BlockMemory)]) -> io::Result<Vec<DirectoryRead>> {
        let mut parts: Vec<DirectoryRead> = Vec::with_capacity(1);
        for (segment, at, block) in blocks {
            let (device, directory) = (self.of(*segment), self.number_of(*segment));
            let known = parts.iter_mut().find(|it| it.directory == directory);
            let part = match known {
                Some(part) if part.last == *segment => part,
                Some(part) => {
                    part.files.push(device.find_open(*segment, false)?);
                    part.last = *segment;
                    part
                }
                None => {
                    let files = vec![device.find_open(*segment, false)?];
                    let batch = Batch::with_capacity(blocks.len());
                    parts.push(DirectoryRead { directory, last: *segment, batch, files });
                    parts.last_mut().expect("just pushed")
                }
            };
            let file = part.files.last().expect("pushed with the first block");
            self.push(&mut part.batch, file, *at, block, false).map_err(io::Error::other)?;
        }
        Ok(parts)
    }

    fn begin_parts(&self, parts: Vec<DirectoryRead>) -> io::Result<Vec<BlockTransfer>> {
        // All directories first: what is begun is waited for.
        let enter = |part: DirectoryRead| Ok((self.all[part.directory].enter(Pace::Quick)?, part));
        let entered = parts.into_iter().map(enter).collect::<io::Result<Vec<_>>>()?;
        let begin = |(entered, part): (Entered, DirectoryRead)| {
            let step = Step::begin(|| Op::Read(self.path_of(part.last)))?;
            let transfer = self.agent.files().read_async(&part.batch, &without_end());
            let uses = TransferUses { files: part.files, header: None };
            let parts = TransferParts { step, uses, memory: Vec::new() };
            Ok(BlockTransfer::new(transfer, entered, parts, None))
        };
        entered.into_iter().map(begin).collect()
    }

    /// Like [`log::Disk::write_blocks`], but returns at once where the device is what takes its time. Into the page
    /// cache this thread copies the blocks itself, whose sums it has just computed: they are in its processor's cache.
    pub(crate) fn begin_write(
        &self,
        segment: u32,
        header: (u64, &[u8]),
        blocks: &[(u64, BlockMemory)],
    ) -> UnderWay {
        let is_kept = self.all.len() > 1 && blocks.iter().all(|(_, it)| it.is_kept());
        if !self.is_direct() && !is_kept {
            let written = log::Disk::write_blocks(self, segment, header, blocks);
            return UnderWay::ended(written);
        }
        let begun = self.writes(segment, header, blocks).and_then(|(batch, entered, uses)| {
            let step = Step::begin(|| Op::write_blocks(self.path_of(segment), blocks))?;
            let transfer = self.agent.files().write_async(&batch, &without_end());
            let kept = is_kept.then(|| KeptWrite { device: Arc::clone(self.of(segment)), segment });
            let kept_blocks = if is_kept { blocks } else { &[] };
            let memory = kept_blocks.iter().map(|(_, it)| it.clone()).collect();
            Ok(vec![BlockTransfer::new(
                transfer,
                entered,
                TransferParts { step, uses, memory },
                kept,
            )])
        });
        UnderWay(begun)
    }

    /// Like [`log::Disk::read_blocks`], but returns at once.
    pub(crate) fn begin_read(&self, blocks: &[(u32, u64, BlockMemory)]) -> UnderWay {
        UnderWay(self.reads(blocks).and_then(|parts| self.begin_parts(parts)))
    }

    /// Makes the segment's file unless it exists. One of another length is made anew.
    ///
    /// # Errors
    /// The system's; [`is_written_late`] if a write that another process has begun may be under way in the file.
    pub(crate) fn ensure(&self, segment: u32) -> io::Result<()> {
        self.of(segment).ensure(segment)
    }

    /// Whether segments of each directory, by its number, can be written to.
    pub(crate) fn writable(&self) -> Vec<bool> {
        self.all.iter().map(Device::is_writable).collect()
    }

    /// Whether segments of any directory can be written to.
    pub(crate) fn is_any_writable(&self) -> bool {
        self.writable().contains(&true)
    }

    /// The number of a segment's directory.
    pub(crate) fn number_of(&self, segment: u32) -> usize {
        segment as usize % self.all.len()
    }

    /// Whether a segment's directory hangs.
    pub(crate) fn hangs(&self, segment: u32) -> bool {
        self.of(segment).gate.is_hanging()
    }

    /// Returns, by a directory's number, whether gets miss its blocks: it hangs, or was lost when the store was opened.
    pub(crate) fn silent(&self) -> Vec<bool> {
        let is_silent = |it: &Arc<Device>| it.is_lost.load(Relaxed) || it.gate.hangs().is_some();
        self.all.iter().map(is_silent).collect()
    }

    /// True if at least one directory hangs.
    pub(crate) fn is_any_hanging(&self) -> bool {
        self.all.iter().any(|it| it.gate.is_hanging())
    }

    /// A directory that hangs, with its error.
    pub(crate) fn find_hanging(&self) -> Option<(PathBuf, io::Error)> {
        self.all.iter().find_map(|it| it.gate.hangs().map(|hangs| (it.path.clone(), hangs)))
    }

    /// Number of directories that hang.
    pub(crate) fn hanging(&self) -> usize {
        self.all.iter().filter(|it| it.gate.is_hanging()).count()
    }

    /// Whether a directory hangs and there are others, for which a caller is not to wait.
    pub(crate) fn is_any_given_up(&self) -> bool {
        self.all.len() > 1 && self.hanging() > 0
    }

    /// Whether an operation on a segment that was given up is in progress.
    pub(crate) fn is_held(&self, segment: u32) -> bool {
        self.of(segment).gate.is_held(segment)
    }

    /// Lets no operation begin from now on.
    pub(crate) fn close_gates(&self) {
        self.all.iter().for_each(|it| it.gate.close());
    }

    /// Returns when no operation is in progress. To be called once none begins.
    pub(crate) fn wait_quiet(&self) {
        self.all.iter().for_each(|it| it.gate.wait_quiet());
    }

    /// Number of directories that could not be read when the store was opened.
    pub(crate) fn lost(&self) -> usize {
        self.all.iter().filter(|it| it.is_lost.load(Relaxed)).count()
    }

    /// Whether a segment's directory could not be read when the store was opened.
    pub(crate) fn is_in_lost_directory(&self, segment: u32) -> bool {
        self.of(segment).is_lost.load(Relaxed)
    }

    /// Whether bytes of a segment are gone for every process: the file is gone or too short, or the device can't
    /// read them.
    pub(crate) fn is_lost(&self, segment: u32, offset: u64, len: u32) -> bool {
        self.of(segment).is_lost(segment, offset, len)
    }

    /// Has later reads of a segment return what the device has, as far as it was written: after a sync that failed, the
    /// page cache may have what the device has lost.
    pub(crate) fn forget_cached(&self, segment: u32) {
        self.of(segment).forget_cached(segment);
    }

    /// Closes a segment's file once nothing reads it.
    pub(crate) fn close(&self, segment: u32) {
        self.of(segment).close(segment);
    }

    /// Whether a write of a process that has ended may be under way in a segment. True as long as that can't be found out.
    pub(crate) fn is_written_late(&self, segment: u32) -> bool {
        self.of(segment).is_written_late(segment)
    }

    /// This process writes no more to a segment that it gives to others, and no write of its own is under way.
    ///
    /// # Errors
    /// The directory hangs: the segment may be locked.
    pub(crate) fn unlock(&self, segment: u32) -> io::Result<()> {
        self.of(segment).unlock(segment)
    }

    /// Like [`Directories::unlock`], of a store in which nothing is begun any more. Waits for the device.
    pub(crate) fn unlock_at_end(&self, segment: u32) {
        self.of(segment).unlock_at_end(segment);
    }

    /// Closes all files, as the end of the process does in the middle of its writes.
    #[cfg(test)]
    pub(crate) fn close_all(&self) {
        self.all.iter().for_each(|it| it.close_all());
    }

    /// Closes all segments' files that nothing reads.
    pub(crate) fn close_files(&self) {
        self.all.iter().for_each(|it| it.close_files());
    }

    /// Tells tests that the keeper has removed a block.
    pub(crate) fn note_evicted(&self, key: [u64; 2]) {
        let _ = step(|| Op::Evicted(self.path_of(0), key), || Ok(()));
    }

    /// Counts the segments' files, when the store is opened.
    pub(crate) fn count_files(&self) -> io::Result<()> {
        self.of_readable(Device::count_patiently).map(drop)
    }

    /// Bytes of all segments' files, as far as that is known. Waits for no device.
    pub(crate) fn bytes(&self) -> u64 {
        self.all.iter().map(Device::bytes).sum()
    }

    /// Removes files of segments that the store, as it is opened, does not have: they are beyond its
    /// capacity, of another length, or in the wrong directory. For the first process that opens it. Returns the number
    /// of those beyond the capacity.
    pub(crate) fn discard_others(&self, segments: u32) -> io::Result<usize> {
        Ok(self.of_readable(|it| it.discard_others(segments))?.into_iter().sum())
    }

    /// Asks each directory that is not lost. One that hangs is lost from now on, where there are others.
    fn of_readable<T>(&self, ask: impl Fn(&Arc<Device>) -> io::Result<T>) -> io::Result<Vec<T>> {
        let mut answers = Vec::new();
        for device in self.readable() {
            match ask(device) {
                Err(error) if is_hang(&error) && self.all.len() > 1 => {
                    let path = device.path.display();
                    tracing::warn!(%error, "the store has lost {path}; its blocks are missed");
                    device.is_lost.store(true, Relaxed);
                }
                answer => answers.push(answer?),
            }
        }
        Ok(answers)
    }

    fn readable(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.all.iter().filter(|it| !it.is_lost.load(Relaxed))
    }
}

impl log::Disk for Directories {
    type Memory = BlockMemory;

    fn segments(&self) -> io::Result<Vec<u32>> {
        let mut segments = self.of_readable(Device::segments)?.concat();
        segments.sort_unstable();
        Ok(segments)
    }

    fn create(&self, segment: u32) -> io::Result<()> {
        self.of(segment).create(segment)
    }

    fn remove(&self, segment: u32) -> io::Result<()> {
        self.of(segment).remove(segment)
    }

    fn read_at(&self, segment: u32, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.of(segment).read_at(segment, offset, into)
    }

    fn write_at(&self, segment: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.of(segment).write_at(segment, offset, bytes)
    }

    fn write_blocks(
        &self,
        segment: u32,
        header: (u64, &[u8]),
        blocks: &[(u64, BlockMemory)],
    ) -> io::Result<()> {
        let (batch, entered, uses) = self.writes(segment, header, blocks)?;
        let write = || uses.end(self.agent.files().write(&batch, &without_end()));
        let written = step(|| Op::write_blocks(self.path_of(segment), blocks), write);
        drop(entered);
        written
    }

    fn read_blocks(&self, blocks: &[(u32, u64, BlockMemory)]) -> io::Result<()> {
        let parts = self.reads(blocks)?;
        if self.is_direct() && parts.len() > 1 {
            // Several devices at a time.
            return UnderWay(self.begin_parts(parts)).end();
        }
        for DirectoryRead { directory, last, batch, files } in parts {
            let _entered = self.all[directory].enter(Pace::Quick)?;
            let uses = TransferUses { files, header: None };
            let read = || uses.end(self.agent.files().read(&batch, &without_end()));
            step(|| Op::Read(self.path_of(last)), read)?;
        }
        Ok(())
    }

    fn sync(&self, segment: u32) -> io::Result<()> {
        self.of(segment).sync(segment)
    }
}

#[cfg(test)]
mod tests;
