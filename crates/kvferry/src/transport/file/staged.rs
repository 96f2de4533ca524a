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
use crate::memory::stages::{Stage, StageUsers, Wake};
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::job::Op;
use std::collections::VecDeque;

/// The most stages that one transfer has at the same time. A GPU's stages have 4 MiB each: together as many bytes as a
/// transfer has in operations on files at once.
const STAGES_MAX: usize = 8;

pub(super) struct Staged {
    op: Op,
    gate: Arc<Gate>,
    order: Order,
    has_begun: bool,
    /// The next byte without a stage; `None` after the last one.
    at: Option<Position>,
    /// Users of the devices' pools, while bytes without a stage are left.
    users: StageUsers,
    /// Stages in use.
    stages: usize,
    copying: Vec<Copying>,
    /// Stages with bytes that have no operation yet.
    cutters: VecDeque<Cutter>,
}

/// A copy of the device.
struct Copying {
    copy: Arc<Copy>,
    /// The first pair of the copied bytes.
    pair: usize,
    /// Places of the bytes in files, for copies out of the device.
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
            gate: Arc::clone(gate),
            order: Order::new(Side::Device),
            has_begun: false,
            at: None,
            users: StageUsers::new(wake),
            stages: 0,
            copying: Vec::new(),
            cutters: VecDeque::new(),
        }
    }

    /// Begins as many stages as the pool has. Out of the device, their copies begin; into it, their operations on files.
    pub(super) fn begin(&mut self, batch: &Batch, targets: &Targets) -> Result<(), Fault> {
        if !std::mem::replace(&mut self.has_begun, true) {
            let first = next_pair(&mut self.order, batch, self.op, targets);
            self.at = first.map(|piece| Position { piece, within: 0 });
        }
        while self.stages < STAGES_MAX {
            let Some(at) = self.at else {
                // A user that needs no more stages takes no part of them.
                self.users.leave();
                break;
            };
            let memory = batch.local.device(at.piece).expect("pairs of the device's side").clone();
            // A transfer without a stage is woken when it has been granted one.
            let stage = self.users.take(&memory.stages, self.stages);
            let stage = stage.map_err(|error| device_fault(at.piece, error))?;
            let Some(stage) = stage else { break };
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
                let copy =
                    packed.start(Direction::Out, pieces, &self.gate, stage, self.users.wake())?;
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

    /// Drops the stage that [`Staged::ready`] returned, once all its bytes have operations.
    pub(super) fn leave_ready(&mut self) {
        self.cutters.pop_front();
    }

    /// Goes on after an operation that has moved all its bytes, while the transfer has not failed. After the last
    /// operation of a stage, the stage is free, or the device copies it.
    pub(super) fn moved(&mut self, filled: Arc<Filled>, pieces: &Pieces) -> Result<(), Fault> {
        let Some(Filled { stage, ranges, into }) = Arc::into_inner(filled) else { return Ok(()) };
        let Some(packed) = into else {
            self.stages -= 1;
            return Ok(());
        };
        let pair = ranges.first_pair();
        let copy = packed.start(Direction::In, pieces, &self.gate, stage, self.users.wake())?;
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

    /// Whether all bytes have reached their destination, so that nothing will wake the transfer any more.
    pub(super) fn has_ended(&self) -> bool {
        self.has_begun && self.at.is_none() && self.stages == 0
    }

    /// Stops the transfer. Stages without a copy or an operation under way go back to the pool.
    pub(super) fn stop(&mut self) {
        self.cutters.clear();
        self.users.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::device::{Device, DeviceCopy};
    use crate::memory::stages::StagePool;
    use crate::transport::file::Storage;
    use crate::transport::file::targets::Use;
    use crate::{Access, Agent, FileOptions};

    const STAGE: usize = 256 << 10;

    /// A device that drops all copies.
    struct Dropping(Arc<StagePool>);

    impl Device for Dropping {
        fn stages(&self) -> Arc<StagePool> {
            Arc::clone(&self.0)
        }

        fn pieces_max(&self) -> usize {
            128
        }

        fn copy_out(&self, _: DeviceCopy) {}

        fn copy_in(&self, _: DeviceCopy) {}
    }

    /// The operations of the stages that a read of blocks begins with, as (offset, length, past the page cache): the
    /// blocks are neighbours in the file from `offset` on, and apart from each other in memory from `address` on.
    fn operations(address: u64, offset: u64, block: u64, count: u64) -> Vec<(u64, usize, bool)> {
        let agent = Agent::builder().name("staged").start().expect("an agent");
        let name = format!("kvferry-staged-{}-{address}-{offset}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let len = offset + block * count;
        let file = agent.open_file(&path, &FileOptions::create(len)).expect("a file");
        std::fs::remove_file(&path).expect("made above");
        let device = Arc::new(Dropping(StagePool::new(STAGE, 6).expect("memory")));
        let memory = DeviceMemory::new(device, address, 2 * block * count);
        let region = agent.register_device(memory, Access::NONE).expect("a region");
        let mut batch = Batch::new();
        for i in 0..count {
            let at = offset + i * block;
            batch.push(&region, 2 * i * block, &file.remote(), at, block).expect("inside");
        }
        let storage: Arc<Storage> = agent.services().get().expect("every agent has files");
        let targets = Targets::of(&batch, Op::Read, &storage.shared.table).expect("an open file");
        let mut staged = Staged::new(Op::Read, &Gate::new(), Arc::new(|| {}));
        staged.begin(&batch, &targets).expect("stages are free");
        let mut operations = Vec::new();
        while let Some(cutter) = staged.ready() {
            let (cut, is_last) = cutter.next(&targets, 1 << 20);
            operations.push((cut.offset, cut.span.len(), cut.is_direct || !file.is_direct()));
            if is_last {
                staged.leave_ready();
            }
        }
        if !file.is_direct() {
            println!("SKIPPED: the file system has no direct I/O");
        }
        agent.shutdown();
        operations
    }

    #[test]
    fn neighbours_in_a_file_are_one_operation_past_the_page_cache() {
        let of_stages = |stages: u64| {
            let each = (0..stages).map(|stage| (stage * STAGE as u64, STAGE, true));
            each.collect::<Vec<_>>()
        };
        assert_eq!(operations(0, 0, 2048, 512), of_stages(4));
        assert_eq!(operations(1 << 20, 0, 1 << 20, 1), of_stages(4));
    }

    #[test]
    fn a_stage_is_shifted_so_that_bytes_inside_a_page_of_the_file_go_past_the_page_cache() {
        let operations = operations(128, 512, 8192, 1);
        let whole: Vec<_> = operations.iter().filter(|(_, len, _)| *len == 4096).collect();
        assert_eq!(whole, [&(4096, 4096, true)], "{operations:?}");
        assert_eq!(operations.iter().map(|(_, len, _)| len).sum::<usize>(), 8192);
    }

    #[test]
    fn device_memory_between_two_lines_is_written_by_the_threads() {
        let agent = Agent::builder().name("lines").start().expect("an agent");
        let path = std::env::temp_dir().join(format!("kvferry-lines-{}", std::process::id()));
        let file = agent.open_file(&path, &FileOptions::create(4096)).expect("a file");
        std::fs::remove_file(&path).expect("made above");
        let storage: Arc<Storage> = agent.services().get().expect("every agent has files");
        let queue_use = |address| {
            let device = Arc::new(Dropping(StagePool::new(STAGE, 1).expect("memory")));
            let memory = DeviceMemory::new(device, address, 4096);
            let region = agent.register_device(memory, Access::NONE).expect("a region");
            let mut batch = Batch::new();
            batch.push(&region, 0, &file.remote(), 0, 4096).expect("inside");
            let targets = Targets::of(&batch, Op::Write, &storage.shared.table);
            targets.expect("an open file").queue_use(Op::Write)
        };
        assert_eq!(queue_use((1 << 20) + 64), Use::CachedWrites);
        match file.is_direct() {
            true => assert_eq!(queue_use(1 << 20), Use::Others),
            false => println!("SKIPPED: the file system has no direct I/O"),
        }
        agent.shutdown();
    }
}
