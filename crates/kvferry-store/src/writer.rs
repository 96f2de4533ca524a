//! Puts blocks into this process's segment.

use crate::core::Core;
use crate::gc::sealing::{SealScope, note_failed_sync, seal, unsealed_max};
use crate::index::{Entry, SegmentState};
use crate::log::{self, Appender, Disk, Extent, SegmentHeader};
use crate::memory::BlockMemory;
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::{UnderWay, is_of_device, may_move};
use kvferry_sys::sync::Mutex;
use rustc_hash::FxHashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Pause before another segment is begun, after an error that is not a device's.
const PAUSE: Duration = Duration::from_secs(1);

/// A block that is to be stored.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) block: log::Block,
    pub(crate) memory: BlockMemory,
}

/// The segments that this process writes to: one, and those that are full and not yet sealed.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    state: Mutex<State>,
    /// Held while a segment is begun; before `state` where both are.
    beginning: Mutex<SegmentStart>,
    begun: AtomicU64,
    /// Whether the thread that seals waits for a write: for the first after a segment was full, or for the last into
    /// one.
    is_awaited: AtomicBool,
}

#[derive(Debug, Default)]
struct SegmentStart {
    /// No segment is begun before.
    paused_until: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    active: Option<Arc<Mutex<Appender>>>,
    full: Vec<Arc<Mutex<Appender>>>,
    /// Segments, with their incarnations, that this process does not write to and that may not be on the disk: those
    /// where a put of this process found blocks, and those that it could not seal.
    present: FxHashMap<u32, PresentSegment>,
    /// Counts what was noted there.
    noted: u64,
}

impl State {
    fn note_present(&mut self, segment: u32, incarnation: u64) {
        self.noted += 1;
        self.present.insert(segment, PresentSegment { incarnation, noted: self.noted });
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PresentSegment {
    incarnation: u64,
    /// [`State::noted`] when a block was last found there. A sync that began before does not cover it.
    noted: u64,
}

/// Reason why blocks were not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotWritten {
    /// No segment is free.
    Full,
    /// A device failed.
    Failed,
    /// The directory of their segment hangs.
    Hangs,
}

/// Blocks that are being written. Their segment is not sealed meanwhile. Dropping it waits for their end.
#[derive(Debug)]
pub(crate) struct BlocksUnderWay {
    appender: Arc<Mutex<Appender>>,
    /// Extent of the write; `None` once the appender knows how the write ended.
    extent: Option<Extent>,
    /// The write; `None` once it has ended.
    writing: Option<UnderWay>,
}

impl BlocksUnderWay {
    /// The first so many of those that were given are being written.
    pub(crate) fn count(&self) -> usize {
        self.extent.as_ref().map_or(0, |extent| extent.records().len())
    }

    /// Waits for the end. Then `publish` puts the blocks into the index; their segment is not sealed before.
    pub(crate) fn end(
        mut self,
        core: &Core,
        publish: impl FnOnce(u32, &[log::Record]),
    ) -> Result<(), NotWritten> {
        let written = self.writing.take().map_or(Ok(()), UnderWay::end);
        self.conclude(core, written, publish)
    }

    fn conclude(
        mut self,
        core: &Core,
        written: io::Result<()>,
        publish: impl FnOnce(u32, &[log::Record]),
    ) -> Result<(), NotWritten> {
        if let Some(extent) = &self.extent {
            match &written {
                Ok(()) => publish(extent.segment(), extent.records()),
                Err(e) => core.fault("write", extent.segment(), e),
            }
        }
        self.finish(&written);
        written.map_err(|e| if is_hang(&e) { NotWritten::Hangs } else { NotWritten::Failed })
    }

    /// A write that the agent has left to the device stays in flight: its segment is neither sealed nor used anew.
    fn finish(&mut self, written: &io::Result<()>) {
        let is_left = written.as_ref().is_err_and(|e| may_move(e).is_some());
        if let Some(extent) = self.extent.take()
            && !is_left
        {
            self.appender.lock().finished(extent, written.is_ok());
        }
    }
}

impl Drop for BlocksUnderWay {
    fn drop(&mut self) {
        let written = self.writing.take().map_or(Ok(()), UnderWay::end);
        self.finish(&written.and(Err(io::ErrorKind::Interrupted.into())));
    }
}

impl Writer {
    /// Begins to write the first of `blocks`: those that fit into one extent.
    pub(crate) fn begin(
        &self,
        core: &Core,
        blocks: &[Candidate],
    ) -> Result<BlocksUnderWay, NotWritten> {
        let described: Vec<_> =
            blocks.iter().take(log::format::EXTENT_RECORDS).map(|it| it.block).collect();
        let (appender, extent) = self.plan(core, &described)?;
        let memory = blocks[..extent.records().len()].iter().map(|it| it.memory.clone());
        let (at, header) = extent.header();
        let writing =
            core.disk.begin_write(extent.segment(), (at, &header.0), &extent.blocks(memory));
        Ok(BlocksUnderWay { appender, extent: Some(extent), writing: Some(writing) })
    }

    /// Writes the first of `blocks`: those that fit into one extent, whose bytes `write` has. Then `publish` puts
    /// them into the index; their segment is not sealed before. Returns how many that were: 0 if no extent could be
    /// planned.
    pub(crate) fn write_with(
        &self,
        core: &Core,
        blocks: &[log::Block],
        write: impl FnOnce(&Extent) -> io::Result<()>,
        publish: impl FnOnce(u32, &[log::Record]),
    ) -> (usize, Result<(), NotWritten>) {
        let described = &blocks[..blocks.len().min(log::format::EXTENT_RECORDS)];
        let (appender, extent) = match self.plan(core, described) {
            Ok(planned) => planned,
            Err(why) => return (0, Err(why)),
        };
        let count = extent.records().len();
        let written = write(&extent);
        let blocks = BlocksUnderWay { appender, extent: Some(extent), writing: None };
        (count, blocks.conclude(core, written, publish))
    }

    fn plan(
        &self,
        core: &Core,
        blocks: &[log::Block],
    ) -> Result<(Arc<Mutex<Appender>>, Extent), NotWritten> {
        self.begun.fetch_add(1, Relaxed);
        if let Some(planned) = self.plan_in_active(core, blocks) {
            return Ok(planned);
        }
        // One thread begins a segment, which waits for the device. Others that need one wait for it; those whose
        // blocks fit into the active one do not.
        let mut beginning = self.beginning.lock();
        if let Some(planned) = self.plan_in_active(core, blocks) {
            return Ok(planned);
        }
        if let Some(until) = beginning.paused_until
            && Instant::now() < until
        {
            return Err(NotWritten::Failed);
        }
        // The last one is the keeper's, which needs it to free others.
        let begun = begin_segment(core, 1);
        if core.awaits_device() {
            // The thread that seals sees to the segments that were given up.
            self.is_awaited.store(true, Relaxed);
        }
        let mut new = match begun {
            Ok(Some(new)) => new,
            // Segments can only be freed where they can be written to.
            Ok(None) if !core.disk.is_any_writable() => return Err(NotWritten::Failed),
            Ok(None) => {
                self.retire(blocks);
                return Err(NotWritten::Full);
            }
            Err(e) => {
                if beginning.paused_until.is_none() {
                    tracing::warn!(error = %e, "the store can't begin a segment; blocks are not stored");
                }
                beginning.paused_until = Some(Instant::now() + PAUSE);
                return Err(NotWritten::Failed);
            }
        };
        beginning.paused_until = None;
        // Before other threads see it, so that there is room.
        let extent = new.plan(blocks);
        let new = Arc::new(Mutex::new(new));
        let mut state = self.state.lock();
        let full = state.active.replace(Arc::clone(&new));
        state.full.extend(full);
        self.is_awaited.store(true, Relaxed);
        Ok((new, extent.ok_or(NotWritten::Failed)?))
    }

    /// The active segment has no room for these blocks, and none is free: it is full, so that it is sealed, and the
    /// keeper can free it. Otherwise a store of which each process holds a segment would stay as it is.
    fn retire(&self, blocks: &[log::Block]) {
        let mut state = self.state.lock();
        if !blocks.is_empty()
            && let Some(active) = state.active.take()
        {
            state.full.push(active);
            self.is_awaited.store(true, Relaxed);
        }
    }

    fn plan_in_active(
        &self,
        core: &Core,
        blocks: &[log::Block],
    ) -> Option<(Arc<Mutex<Appender>>, Extent)> {
        let mut state = self.state.lock();
        let active = Arc::clone(state.active.as_ref()?);
        let mut locked = active.lock();
        if core.disk.hangs(locked.segment()) {
            // It is sealed when its directory answers. Others go on in another one.
            let full = state.active.take();
            state.full.extend(full);
            self.is_awaited.store(true, Relaxed);
            return None;
        }
        let extent = locked.plan(blocks)?;
        drop(locked);
        Some((active, extent))
    }

    /// Seals segments. Slow: it waits for the disk. Returns whether one was sealed.
    pub(crate) fn seal(&self, core: &Core, which: SealScope) -> bool {
        let full = {
            let mut state = self.state.lock();
            if which == SealScope::All {
                let active = state.active.take();
                state.full.extend(active);
            }
            let answers = |it: &&Arc<Mutex<Appender>>| !core.disk.hangs(it.lock().segment());
            let mut full: Vec<_> = state.full.iter().filter(answers).cloned().collect();
            if which == SealScope::Excess {
                full.truncate(full.len().saturating_sub(unsealed_max(core)));
            }
            full
        };
        let mut is_one_sealed = false;
        for appender in full {
            let mut locked = appender.lock();
            if locked.in_flight() > 0 {
                self.is_awaited.store(true, Relaxed);
                continue;
            }
            if !seal(core, &mut locked) {
                continue;
            }
            let segment = locked.segment();
            drop(locked);
            #[cfg(test)]
            race::unlocked();
            let mut state = self.state.lock();
            if core.member.is_open(segment) && !core.member.is_unsynced(segment) {
                // A later call of `sync` covers it.
                let incarnation = core.member.segment(segment).incarnation;
                state.note_present(segment, incarnation);
            }
            // Not before: a call of `sync` waits for it.
            state.full.retain(|it| !Arc::ptr_eq(it, &appender));
            is_one_sealed = true;
        }
        is_one_sealed
    }

    /// Notes that a put found these blocks in the store: a later sync covers them, whichever process wrote them.
    pub(crate) fn note_present<'a>(&self, core: &Core, found: impl Iterator<Item = &'a Entry>) {
        let mut last = None;
        for entry in found {
            let (segment, _) = core.superblock.geometry.locate(entry.page);
            if last.replace(segment) != Some(segment) && core.member.needs_sync(segment) {
                let incarnation = core.member.segment(segment).incarnation;
                self.state.lock().note_present(segment, incarnation);
            }
        }
    }

    /// Counts the extents that were begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Relaxed)
    }

    /// Counts an extent as begun, without beginning one.
    #[cfg(test)]
    pub(crate) fn note_begun(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    /// Whether the thread that seals is to be woken, now that a write has ended. Says so once.
    pub(crate) fn is_awaited(&self) -> bool {
        self.is_awaited.load(Relaxed) && self.is_awaited.swap(false, Relaxed)
    }

    /// Segments that wait to be sealed.
    #[cfg(test)]
    pub(crate) fn full(&self) -> usize {
        self.state.lock().full.len()
    }

    /// Whether a segment waits to be sealed.
    pub(crate) fn has_full(&self) -> bool {
        !self.state.lock().full.is_empty()
    }

    /// Returns when what was put before is on the disk, or is not in the index any more. Fails with the segment
    /// that could not be synced, now or before.
    pub(crate) fn sync(&self, core: &Core) -> Result<(), (u32, io::Error)> {
        let (appenders, present): (Vec<_>, Vec<_>) = {
            let state = self.state.lock();
            let present = state.present.iter().map(|(segment, it)| (*segment, *it)).collect();
            (state.active.iter().chain(&state.full).cloned().collect(), present)
        };
        // Waits while one is sealed, and holds up no put meanwhile.
        let own = appenders.iter().map(|it| it.lock().segment());
        // A segment that was sealed or used again since then was synced: what lived in it, or its copy.
        let is_there = |(segment, it): &&(u32, PresentSegment)| {
            core.member.segment(*segment).incarnation == it.incarnation
                && core.member.needs_sync(*segment)
        };
        let others = present.iter().filter(is_there).map(|(segment, _)| *segment);
        let mut outcome = Ok(());
        for segment in own.chain(others) {
            if let Err(error) = core.disk.sync(segment) {
                note_failed_sync(core, segment, &error);
                outcome = outcome.and(Err((segment, error)));
            }
        }
        outcome?;
        let mut state = self.state.lock();
        for (segment, it) in &present {
            if state.present.get(segment) == Some(it) {
                state.present.remove(segment);
            }
        }
        drop(state);
        match core.member.unsynced() {
            None => Ok(()),
            Some(segment) => {
                let what =
                    "an earlier sync of the segment failed: its blocks may be lost with the power";
                Err((segment, io::Error::other(what)))
            }
        }
    }
}

/// Begins a free segment, if there are more than `left`. A segment whose device has no space for it, or fails, is
/// withheld, and the next one is tried.
///
/// # Errors
/// What is no device's fault: this process is short of descriptors, or its agent was shut down.
pub(crate) fn begin_segment(core: &Core, left: usize) -> io::Result<Option<Appender>> {
    let mine = SegmentState::Active(core.member.id());
    while core.free_segments() > left
        && let Some(segment) = core.member.claim()
    {
        if core.free_segments() < left {
            // Another process was faster.
            core.member.set_segment(segment, mine, SegmentState::Free);
            return Ok(None);
        }
        let error = match begin(core, segment) {
            Ok(new) => return Ok(Some(new)),
            Err(error) => error,
        };
        if !is_of_device(&error) {
            core.member.set_segment(segment, mine, SegmentState::Free);
            return Err(error);
        }
        core.withheld(segment, &error);
        core.settle(segment, mine, SegmentState::Withheld);
    }
    Ok(None)
}

fn begin(core: &Core, segment: u32) -> io::Result<Appender> {
    core.disk.ensure(segment)?;
    let header = SegmentHeader {
        store: core.superblock.store,
        segment,
        incarnation: core.member.segment(segment).incarnation,
        nonce: kvferry_sys::random::bytes()?,
        created_ms: core.superblock.created_ms + core.clock.now_ms(),
    };
    Appender::begin(&core.disk, core.superblock.geometry, header).map_err(log::Error::into_io)
}

/// A hook for tests between two steps of [`Writer::seal`].
#[cfg(test)]
pub(crate) mod race {
    use std::cell::RefCell;

    thread_local! {
        static RUN: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    }

    /// Has this thread call `run` once it has unlocked a segment, and before the writer knows how its seal ended.
    pub(crate) fn when_unlocked(run: impl FnOnce() + 'static) {
        RUN.set(Some(Box::new(run)));
    }

    pub(super) fn unlocked() {
        if let Some(run) = RUN.take() {
            run();
        }
    }
}
