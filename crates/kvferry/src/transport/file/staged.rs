//! The device memory of a transfer with files, which goes through the stages of its device.
//!
//! Out: the device copies pieces to a stage, then the stage is written to files. In: a stage is read from files, then the
//! device copies it. Several stages are in use at once, so that the device and the files work at the same time.
//!
//! Ownership: a stage is held by the device's copy or by the operations on files, never by both, and goes back to the
//! pool when the last of them has ended, even if no caller waits for the transfer any more.
//!
//! Progress: a transfer that has a stage waits for its own copies and operations only, never for another stage
//! (`memory/stages.rs`). A file whose device hangs keeps the stages of its operations.

use super::filled::{Cutter, Filled, Ranges};
use super::targets::{Order, Side, Targets};
use crate::memory::device::{Copy, DeviceMemory, Direction};
use crate::memory::gate::Gate;
use crate::memory::packed::{Packed, device_fault};
use crate::memory::pieces::{Fault, Pieces, Position};
use crate::memory::stages::{Stage, StageUser, Wake};
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::job::Op;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// Stages that one transfer has at the same time, at most. Those of a GPU have 4 MiB: as many bytes as a transfer has in
/// operations on files at once.
const STAGES_MAX: usize = 8;

pub(super) struct Staged {
    op: Op,
    wake: Wake,
    gate: Arc<Gate>,
    order: Order,
    has_begun: bool,
    /// The next byte without a stage; `None` after the last one.
    at: Option<Position>,
    /// One for each device, while bytes without a stage are left.
    users: SmallVec<[StageUser; 1]>,
    /// Stages in use.
    stages: usize,
    copying: Vec<Copying>,
    /// Stages with bytes that have no operation yet.
    cutters: VecDeque<Cutter>,
}

/// A copy of the device.
struct Copying {
    copy: Arc<Copy>,
    /// The first pair.
    pair: usize,
    /// Out: where the bytes go.
    ranges: Ranges,
}

/// The next pair with bytes.
fn next_pair(order: &mut Order, batch: &Batch, op: Op, targets: &Targets) -> Option<usize> {
    std::iter::from_fn(|| order.next(batch, op, targets))
        .find(|pair| batch.local.pieces[*pair].len > 0)
}

impl Staged {
    pub(super) fn new(op: Op, gate: &Arc<Gate>, wake: Wake) -> Self {
        Self {
            op,
            wake,
            gate: Arc::clone(gate),
            order: Order::new(Side::Device),
            has_begun: false,
            at: None,
            users: SmallVec::new(),
            stages: 0,
            copying: Vec::new(),
            cutters: VecDeque::new(),
        }
    }

    /// A stage of the memory's device. A transfer that has none is woken when it has been granted one.
    fn stage(&mut self, memory: &DeviceMemory) -> Option<Stage> {
        let known = self.users.iter().position(|user| user.is_of(&memory.stages));
        let user = known.unwrap_or_else(|| {
            self.users.push(memory.stages.join(&self.wake));
            self.users.len() - 1
        });
        self.users[user].take(self.stages)
    }

    /// Begins with as many stages as there are: out, their copies; in, their operations on files.
    pub(super) fn begin(&mut self, batch: &Batch, targets: &Targets) -> Result<(), Fault> {
        if !std::mem::replace(&mut self.has_begun, true) {
            let first = next_pair(&mut self.order, batch, self.op, targets);
            self.at = first.map(|piece| Position { piece, within: 0 });
        }
        while self.stages < STAGES_MAX {
            let Some(at) = self.at else {
                // A user that needs no more stages takes no part of them.
                self.users.clear();
                break;
            };
            let memory = batch.local.device(at.piece).expect("pairs of the device's side").clone();
            let Some(stage) = self.stage(&memory) else { break };
            self.stages += 1;
            self.begin_one(batch, targets, at, memory, stage)?;
        }
        Ok(())
    }

    fn begin_one(
        &mut self,
        batch: &Batch,
        targets: &Targets,
        at: Position,
        memory: DeviceMemory,
        stage: Stage,
    ) -> Result<(), Fault> {
        let pieces: &Pieces = &batch.local;
        let address = memory.at(pieces.pieces[at.piece].offset + at.within);
        let offset = batch.remote[at.piece].offset + at.within;
        let stage = match targets.get(at.piece).direct_offset(offset) {
            Some(offset) => stage.aligned_to_file(address, offset),
            None => stage.aligned_as(address),
        };
        let (mut packed, mut ranges) = (Packed::new(memory, stage.room()), Ranges::default());
        let (order, op) = (&mut self.order, self.op);
        let next = || next_pair(order, batch, op, targets);
        let offset_of = |pair: usize| batch.remote[pair].offset;
        self.at = ranges.pack(&mut packed, pieces, at, targets, offset_of, next);
        match self.op {
            Op::Write => {
                let copy = packed.start(Direction::Out, pieces, &self.gate, stage, &self.wake)?;
                self.copying.push(Copying { copy, pair: at.piece, ranges });
            }
            Op::Read => {
                let filled = Filled { stage, ranges, into: Some(packed) };
                self.cutters.push_back(Cutter::new(filled));
            }
        }
        Ok(())
    }

    /// The stage whose bytes need the next operation on a file.
    pub(super) fn ready(&mut self) -> Option<&mut Cutter> {
        self.cutters.front_mut()
    }

    /// All bytes of the stage that was ready have operations.
    pub(super) fn leave_ready(&mut self) {
        self.cutters.pop_front();
    }

    /// An operation on a stage has moved all its bytes; the transfer has not failed. The last operation of a stage ends
    /// it, or has the device copy it.
    pub(super) fn moved(&mut self, filled: Arc<Filled>, pieces: &Pieces) -> Result<(), Fault> {
        let Some(Filled { stage, ranges, into }) = Arc::into_inner(filled) else { return Ok(()) };
        let Some(packed) = into else {
            self.stages -= 1;
            return Ok(());
        };
        let pair = ranges.first_pair();
        let copy = packed.start(Direction::In, pieces, &self.gate, stage, &self.wake)?;
        self.copying.push(Copying { copy, pair, ranges: Ranges::default() });
        Ok(())
    }

    /// Takes the results of copies that have ended. Returns the bytes that are in the device's memory now.
    pub(super) fn reap(&mut self) -> Result<u64, Fault> {
        let (mut moved, mut fault) = (0, None);
        let mut index = 0;
        while let Some(copying) = self.copying.get(index) {
            let Some(outcome) = copying.copy.take_outcome() else {
                index += 1;
                continue;
            };
            let Copying { copy, pair, ranges } = self.copying.remove(index);
            match outcome {
                Ok(Some(stage)) => {
                    let filled = Filled { stage, ranges, into: None };
                    self.cutters.push_back(Cutter::new(filled));
                }
                Ok(None) => {
                    self.stages -= 1;
                    moved += copy.len as u64;
                }
                Err(e) => {
                    self.stages -= 1;
                    fault.get_or_insert_with(|| device_fault(pair, e));
                }
            }
        }
        fault.map_or(Ok(moved), Err)
    }

    /// Whether all bytes are where they belong, so that nothing will wake the transfer any more.
    pub(super) fn has_ended(&self) -> bool {
        self.has_begun && self.at.is_none() && self.stages == 0
    }

    /// The transfer is stopped: stages that neither a copy nor an operation has go back to the pool.
    pub(super) fn stop(&mut self) {
        self.cutters.clear();
        self.users.clear();
    }
}
