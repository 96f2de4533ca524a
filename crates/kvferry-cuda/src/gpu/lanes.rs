//! Batches of one direction, on the streams that copy them.
//!
//! Batches of the copy engine use the first lane: they run one after the other anyway. Batches of the kernel use the lanes
//! in turns, so that the beginning of one runs beside the end of another, and one gathers while the bytes that another
//! has gathered are copied.

use super::lane::Lane;
use super::{LANES, Shared};
use kvferry::DeviceCopy;
use kvferry_sys::cuda;
use std::collections::VecDeque;

#[derive(Debug)]
pub(super) struct Lanes {
    lanes: [Lane; LANES],
    /// The lane that the next batch of the kernel takes.
    turn: usize,
    /// Batches that wait for room in the streams.
    queue: VecDeque<DeviceCopy>,
}

impl Lanes {
    pub(super) fn new(shared: &Shared) -> Result<Self, cuda::Error> {
        let lanes = [Lane::new(shared)?, Lane::new(shared)?];
        Ok(Self { lanes, turn: 0, queue: VecDeque::new() })
    }

    pub(super) fn push(&mut self, copy: DeviceCopy) {
        self.queue.push_back(copy);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.lanes.iter().all(Lane::is_idle)
    }

    /// Takes the next batch from the queue, if the streams have room for it.
    pub(super) fn next(&mut self) -> Option<DeviceCopy> {
        let has_room = self.lanes[0].has_room() && self.lanes[self.turn].has_room();
        if has_room { self.queue.pop_front() } else { None }
    }

    /// The lane that the next batch of the kernel takes.
    pub(super) fn turn(&self) -> usize {
        self.turn
    }

    /// The lane for the next batch.
    pub(super) fn lane(&mut self, is_of_kernel: bool) -> &mut Lane {
        if !is_of_kernel {
            return &mut self.lanes[0];
        }
        let at = self.turn;
        self.turn = (at + 1) % LANES;
        &mut self.lanes[at]
    }

    /// Ends the batches that the driver has copied. Returns whether there were any.
    pub(super) fn poll(&mut self, shared: &Shared) -> bool {
        self.lanes.iter_mut().fold(false, |has_ended, lane| lane.poll(shared) | has_ended)
    }

    /// Fails the batches that the driver does not have yet, if the GPU is lost.
    pub(super) fn fail_queue(&mut self, shared: &Shared) {
        let Some(lost) = shared.lost() else { return };
        for copy in std::mem::take(&mut self.queue) {
            super::Counts::add(&shared.counts.failed, 1);
            copy.complete(Err(lost.clone().into()));
        }
    }
}
