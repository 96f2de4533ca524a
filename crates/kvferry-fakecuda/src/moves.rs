//! How operations move bytes: torn, in a random order, over a poisoned destination.

use std::sync::Arc;
use std::time::Duration;

use crate::abi::{Error, Result};
use crate::faults::Fault;
use crate::memory::IN_FLIGHT;
use crate::ops::{Kernel, Move, Source, Work};
use crate::races::Point;
use crate::state::State;

/// Bytes and parts that one step moves.
const STEP_BYTES: u64 = 256 << 10;
const STEP_PARTS: usize = 64;
/// Threads of a kernel that one step runs.
const STEP_THREADS: usize = 2048;

impl State {
    /// Prepares the stream's first operation. Returns the real time that a fake kernel takes
    /// before it touches anything.
    pub(crate) fn begin(&mut self, handle: usize) -> Duration {
        let Some(stream) = self.streams.get_mut(&handle) else { return Duration::ZERO };
        let Some(op) = stream.queue.front_mut() else { return Duration::ZERO };
        match &mut op.work {
            Work::Move(moving) => {
                moving.tear(&mut self.rng);
                moving.early.clear();
                Duration::from_nanos(moving.delay_ns)
            }
            Work::Kernel(kernel) => {
                self.rng.shuffle(&mut kernel.threads);
                Duration::ZERO
            }
            Work::Marker | Work::Host { .. } => Duration::ZERO,
        }
    }

    /// Reads sources of an operation that waits for its turn.
    pub(crate) fn read_early(&mut self, handle: usize, index: usize) {
        let Some(stream) = self.streams.get_mut(&handle) else { return };
        let Some(op) = stream.queue.get_mut(index) else { return };
        let Work::Move(moving) = &mut op.work else { return };
        for _ in 0..STEP_PARTS {
            let Some(place) = moving.early.pop() else { break };
            let entry = &mut moving.entries[place];
            if let Source::Early { address, bytes, .. } = &mut entry.source {
                let mut read = vec![0; entry.len as usize];
                // A source that is gone ends the operation when its turn comes.
                if self.memory.read(*address, &mut read).is_ok() {
                    *bytes = Some(read);
                    self.counters.early_reads += 1;
                }
            }
        }
    }

    /// Moves some parts; true when all have moved.
    pub(crate) fn move_some(
        &mut self,
        device: usize,
        moving: &mut Move,
        point: &Arc<Point>,
    ) -> Result<bool> {
        if !moving.poisoned {
            self.check_reads(moving, point)?;
            for entry in &moving.entries {
                self.memory.fill(entry.destination, entry.len, IN_FLIGHT)?;
            }
            moving.poisoned = true;
            return Ok(moving.parts.is_empty());
        }
        let mut bytes = 0;
        for _ in 0..STEP_PARTS {
            let Some(part) = moving.parts.pop() else { break };
            let entry = &moving.entries[part.entry];
            if part.offset == 0 {
                self.strike(device)?;
            }
            let range = part.offset as usize..(part.offset + part.len) as usize;
            let mut buffer;
            let from = match &entry.source {
                Source::Byte(byte) => {
                    buffer = vec![*byte; part.len as usize];
                    &buffer[..]
                }
                Source::Taken(taken) | Source::Early { bytes: Some(taken), .. } => &taken[range],
                Source::Memory { address, .. } | Source::Early { address, bytes: None, .. } => {
                    buffer = vec![0; part.len as usize];
                    self.memory.read(address + part.offset, &mut buffer)?;
                    &buffer[..]
                }
            };
            self.memory.write(entry.destination + part.offset, from)?;
            self.counters.copied_bytes += part.len;
            bytes += part.len;
            if bytes >= STEP_BYTES {
                break;
            }
        }
        let done = moving.parts.is_empty();
        if done {
            self.compare_sources(moving, point)?;
        }
        Ok(done)
    }

    /// One occasion of the faults that end an operation.
    fn strike(&mut self, device: usize) -> Result {
        if self.faults.hit(Fault::IllegalAddress) {
            return Err(Error::ILLEGAL_ADDRESS);
        }
        if self.faults.hit(Fault::LaunchFailed) {
            return Err(Error::LAUNCH_FAILED);
        }
        if self.faults.hit(Fault::DeviceRemoved) {
            let error = Error(self.config.removed_code);
            self.devices[device].removed = Some(error);
            return Err(error);
        }
        Ok(())
    }

    /// Reads what a fake kernel reads, once.
    fn check_reads(&mut self, moving: &mut Move, point: &Arc<Point>) -> Result {
        for (address, len) in std::mem::take(&mut moving.reads) {
            let mut bytes = vec![0; len as usize];
            self.memory.read(address, &mut bytes)?;
            let Some(expect) = moving.expect else { continue };
            if let Some(at) = bytes.iter().position(|&byte| byte != expect) {
                self.counters.kernel_mismatches += 1;
                self.checker.find(format!(
                    "{} read {:#04x} at {:#x} and expected {expect:#04x}",
                    point.what,
                    bytes[at],
                    address + at as u64
                ));
            }
        }
        Ok(())
    }

    /// Reads the host's sources again: the program must not have changed them meanwhile.
    fn compare_sources(&mut self, moving: &Move, point: &Arc<Point>) -> Result {
        for entry in &moving.entries {
            let (address, expected) = match &entry.source {
                Source::Memory { address, host: true }
                | Source::Early { address, host: true, bytes: None } => (*address, None),
                Source::Early { address, host: true, bytes: Some(bytes) } => {
                    (*address, Some(bytes))
                }
                _ => continue,
            };
            let mut now = vec![0; entry.len as usize];
            self.memory.read(address, &mut now)?;
            let same = match expected {
                Some(bytes) => *bytes == now,
                None => {
                    let mut arrived = vec![0; entry.len as usize];
                    self.memory.read(entry.destination, &mut arrived)?;
                    arrived == now
                }
            };
            if !same {
                self.counters.source_changed += 1;
                self.checker.find(format!(
                    "the host source {address:#x}+{:#x} changed before the end of {}",
                    entry.len, point.what
                ));
            }
        }
        Ok(())
    }

    /// Runs some threads of a kernel; true when all have run.
    pub(crate) fn run_some(
        &mut self,
        device: usize,
        kernel: &mut Kernel,
        point: &Arc<Point>,
    ) -> Result<bool> {
        self.strike(device)?;
        let left = kernel.threads.len().saturating_sub(STEP_THREADS);
        let threads = kernel.threads.split_off(left);
        self.counters.kernel_threads += threads.len() as u64;
        let result = self.run_threads(device, kernel, &threads);
        if kernel.unknown && (result.is_err() || kernel.threads.is_empty()) {
            self.checker.record(&kernel.touches, point);
            self.checker.unknown -= 1;
            kernel.unknown = false;
        }
        result?;
        if kernel.threads.is_empty() {
            self.check_read_only(kernel);
        }
        Ok(kernel.threads.is_empty())
    }
}
