//! Blocks that are being read or written, and what stays in use until that has ended.

use super::device::{Device, Segment};
use super::errors::may_move;
use super::gate::{Entered, LOOK_EVERY, Waiter};
use crate::error::Result;
use crate::fault_points::Step;
use crate::memory::{BlockMemory, PAGE};
use kvferry::{Access, Agent, Batch, Options, Region, Transfer, TransferStats};
use kvferry_sys::sync::Mutex;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Headers of extents that are written at once, beside their blocks.
const HEADERS: usize = 64;

/// Memory for the headers of extents that are being written. A header is written in one transfer with its blocks: a
/// thread that wrote it to the file itself would wait for the blocks of the extent before, as a file has one writer
/// at a time.
#[derive(Debug)]
pub(super) struct Headers {
    pub(super) region: Region,
    free: Mutex<Vec<usize>>,
}

/// A header in memory. It must outlive the transfer that writes it. A device that hangs may write what the page holds
/// later: a header names its own page, so at another place it is no header.
#[derive(Debug)]
pub(super) struct Header {
    of: Arc<Headers>,
    number: usize,
}

impl Headers {
    pub(super) fn new(agent: &Agent) -> Result<Self> {
        let region = agent.allocate(HEADERS * PAGE, Access::NONE)?;
        Ok(Self { region, free: Mutex::new((0..HEADERS).collect()) })
    }

    /// A copy of `bytes`, which are a page; `None` if all memory is in use.
    pub(super) fn copy(self: &Arc<Self>, bytes: &[u8]) -> Option<Header> {
        let number = self.free.lock().pop()?;
        let header = Header { of: Arc::clone(self), number };
        self.region.write_at(header.offset(), bytes).is_ok().then_some(header)
    }
}

impl Header {
    pub(super) fn offset(&self) -> usize {
        self.number * PAGE
    }
}

impl Drop for Header {
    fn drop(&mut self) {
        self.of.free.lock().push(self.number);
    }
}

/// Blocks that are being read or written. Dropping it waits until that has ended: their memory is the caller's
/// again after that.
#[derive(Debug)]
pub(crate) struct UnderWay(pub(super) io::Result<Vec<BlockTransfer>>);

/// A transfer of blocks of one directory.
#[derive(Debug)]
pub(super) struct BlockTransfer {
    /// The transfer; `None` once its end was waited for.
    under_way: Option<(Transfer, TransferParts)>,
    waiter: Waiter,
    /// Set for a write that is given up once its directory hangs.
    kept: Option<KeptWrite>,
}

/// The files, memory and step of a transfer, kept until it ends or the device has answered.
#[derive(Debug)]
pub(super) struct TransferParts {
    pub(super) step: Step,
    pub(super) uses: TransferUses,
    /// The memory of a write that may be given up, which is not a caller's: the write may go on without the one that has
    /// begun it.
    pub(super) memory: Vec<BlockMemory>,
}

#[derive(Debug)]
pub(super) struct KeptWrite {
    pub(super) device: Arc<Device>,
    pub(super) segment: u32,
}

impl KeptWrite {
    /// Waits for the end of a transfer, until the directory hangs. The transfer is given up then.
    fn wait(
        &self,
        transfer: &Transfer,
        waiter: &Waiter,
    ) -> io::Result<kvferry::Result<TransferStats>> {
        loop {
            let gate = &self.device.gate;
            let most = gate.left().clamp(Duration::from_millis(1), LOOK_EVERY);
            let asked = Instant::now();
            if let Some(outcome) = transfer.wait(most) {
                return Ok(outcome);
            }
            gate.looked_late(asked, asked.elapsed().saturating_sub(most));
            if let Some(hangs) = gate.hangs()
                && waiter.give_up(self.segment)
            {
                return Err(hangs);
            }
        }
    }
}

impl TransferParts {
    fn end<T>(self, outcome: kvferry::Result<T>) -> io::Result<()> {
        let Self { step, uses, memory } = self;
        step.end(outcome.is_ok());
        let ended = uses.end(outcome);
        drop(memory);
        ended
    }
}

/// Resources of a transfer beside the memory of blocks.
#[derive(Debug, Default)]
pub(super) struct TransferUses {
    pub(super) files: Vec<Arc<Segment>>,
    /// Its memory is given back when the transfer has ended.
    #[expect(dead_code, reason = "held, not read")]
    pub(super) header: Option<Header>,
}

/// Blocks of one directory that are to be read.
pub(super) struct DirectoryRead {
    pub(super) directory: usize,
    /// The segment of the last block.
    pub(super) last: u32,
    pub(super) batch: Batch,
    pub(super) files: Vec<Arc<Segment>>,
}

impl TransferUses {
    /// The transfer has ended. If the agent was shut down, a device may use all that for as long as it takes.
    pub(super) fn end<T>(self, outcome: kvferry::Result<T>) -> io::Result<()> {
        if outcome.as_ref().is_err_and(|e| e.quiesced() == Some(false)) {
            self.files.iter().for_each(|it| it.leave());
            std::mem::forget(self);
        }
        outcome.map(|_| ()).map_err(io::Error::other)
    }
}

/// A transfer ends when the device has answered, and not before: until then the memory is not the caller's.
pub(super) fn without_end() -> Options<'static> {
    Options { timeout: Some(Duration::MAX), ..Options::default() }
}

impl BlockTransfer {
    /// The directory that was entered for a transfer is left when the device has answered, whenever the caller looks.
    pub(super) fn new(
        transfer: Transfer,
        entered: Entered,
        parts: TransferParts,
        kept: Option<KeptWrite>,
    ) -> Self {
        let waiter = entered.waiter();
        // Weak: a file is not closed by the agent's thread.
        let files: Vec<_> = parts.uses.files.iter().map(Arc::downgrade).collect();
        transfer.on_end(move |outcome| {
            // Before the directory is left: a thread that finds it quiet gives up the locks of its segments.
            if outcome.is_err_and(|e| e.quiesced() == Some(false)) {
                files.iter().filter_map(Weak::upgrade).for_each(|it| it.leave());
            }
            drop(entered);
        });
        Self { under_way: Some((transfer, parts)), waiter, kept }
    }

    /// Waits for the end; of a write of memory that is kept, until its directory hangs.
    fn end(mut self) -> io::Result<()> {
        self.wait()
    }

    fn wait(&mut self) -> io::Result<()> {
        let Some((transfer, parts)) = self.under_way.take() else { return Ok(()) };
        let Some(kept) = &self.kept else {
            return parts.end(transfer.wait(None).expect("waits without an end"));
        };
        match kept.wait(&transfer, &self.waiter) {
            Ok(outcome) => parts.end(outcome),
            Err(hangs) => {
                let helpers = Arc::clone(&kept.device.helpers);
                transfer.on_end(move |outcome| {
                    // By another thread: the last user of a file or of memory may wait to give it back.
                    let _ = helpers.submit(Box::new(move || _ = parts.end(outcome)));
                });
                Err(hangs)
            }
        }
    }
}

impl Drop for BlockTransfer {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl UnderWay {
    pub(super) fn ended(outcome: io::Result<()>) -> Self {
        Self(outcome.map(|()| Vec::new()))
    }

    /// Waits for the end.
    pub(crate) fn end(self) -> io::Result<()> {
        let mut outcome = Ok(());
        for moving in self.0? {
            outcome = match (outcome, moving.end()) {
                // That the memory may still be used counts for more.
                (Err(_), Err(next)) if may_move(&next).is_some() => Err(next),
                (before, ended) => before.and(ended),
            };
        }
        outcome
    }
}
