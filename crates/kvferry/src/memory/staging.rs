//! A cursor's use of stages: batches of device pieces between device memory and a socket.
//!
//! Out: batches are copied ahead of the position, and their stages are sent. In: a stage is filled, then copied.
//! A batch has pieces that follow each other in the cursor and are memory of one device, as many as fit into a
//! stage and the device allows.

use crate::memory::device::{Copy, DeviceMemory, Direction};
use crate::memory::gate::Gate;
use crate::memory::packed::{Packed, device_fault};
use crate::memory::pieces::{Fault, Pieces, Position};
use crate::memory::stages::{Stage, StageUsers, Wake};
use crate::sync::Arc;
use kvferry_sys::span::HostSpan;
use std::collections::VecDeque;

/// Stages that one cursor has at the same time, at most: of two that are sent or received and two that are copied,
/// one of each may be late and none waits for the other.
const AHEAD: usize = 4;

/// Bytes of a cursor's first batch out of the device, and of its last into it, if a stage has more. Those behind the first,
/// and before the last, have twice as many each, up to a stage: the peer waits less for the first byte, and the device for
/// the last.
const SMALLEST: usize = 1 << 20;

/// What the bytes of a batch are a multiple of, but for the last, and for what its first byte's alignment takes.
const PAGE: usize = 4096;

/// The batches of one cursor.
pub(super) struct Staging {
    direction: Direction,
    users: StageUsers,
    /// Batches from the device, in the order of the bytes (out), or to it, in any order (in).
    batches: VecDeque<Batch>,
    /// Out: where the bytes begin that no batch has, and how many follow, while there are batches.
    ahead: Position,
    ahead_left: u64,
    /// Out: bytes of the next batch, at most.
    next_max: usize,
    /// In: the batch being filled.
    filling: Option<Filling>,
    /// The peer was not ready while another cursor waited for a stage, and this one asked to be called once more.
    is_asked: bool,
}

enum Batch {
    /// The device copies it. The index is that of its first piece.
    Copying { copy: Arc<Copy>, piece: usize },
    /// Out: bytes to be sent, of which the first `sent` are.
    Ready { stage: Stage, len: usize, sent: usize },
}

impl Batch {
    fn is_copying(&self) -> bool {
        matches!(self, Self::Copying { copy, .. } if copy.is_running())
    }
}

struct Filling {
    stage: Stage,
    packed: Packed,
    /// Index of the first piece.
    first: usize,
    filled: usize,
}

/// Pieces from `at` on, which is device memory, of at most `left` bytes, and about `bytes_max`.
fn pack(pieces: &Pieces, at: Position, left: u64, bytes_max: usize) -> Packed {
    let memory = pieces.device(at.piece).expect("the caller has looked").clone();
    let room = memory.stages.room(memory.at(pieces.pieces[at.piece].offset + at.within));
    // The batch ends where a line of the device does, as a whole stage does.
    let lead = memory.stages.stage_bytes() - room;
    let room = room.min(bytes_max.max(PAGE) / PAGE * PAGE - lead);
    let room = usize::try_from(left).unwrap_or(usize::MAX).min(room);
    let mut packed = Packed::new(memory, room);
    let mut within = at.within;
    for index in at.piece..pieces.pieces.len() {
        if packed.add(pieces, index, within).is_none() {
            break;
        }
        within = 0;
    }
    packed
}

impl Staging {
    pub(super) fn new(direction: Direction, wake: Wake) -> Self {
        Self {
            direction,
            users: StageUsers::new(wake),
            batches: VecDeque::new(),
            ahead: Position::default(),
            ahead_left: 0,
            next_max: SMALLEST,
            filling: None,
            is_asked: false,
        }
    }

    /// A stage of the memory's device. Without one, this cursor is woken when it has been granted one, or when
    /// one of its copies ends. An error is of the piece at this index, whose device is lost.
    fn stage(&mut self, memory: &DeviceMemory, piece: usize) -> Result<Option<Stage>, Fault> {
        let stage = self.users.take(&memory.stages, self.batches.len());
        stage.map_err(|error| device_fault(piece, error))
    }

    /// Starts a copy of pieces of which `first` is the first one, inside the gate.
    fn start(
        &mut self,
        pieces: &Pieces,
        gate: &Arc<Gate>,
        stage: Stage,
        packed: Packed,
        first: usize,
    ) -> Result<(), Fault> {
        let copy = packed.start(self.direction, pieces, gate, stage, self.users.wake())?;
        self.batches.push_back(Batch::Copying { copy, piece: first });
        Ok(())
    }

    /// Out: starts copies ahead of the position, and returns the bytes that are ready to be sent.
    pub(super) fn fetch(
        &mut self,
        pieces: &Pieces,
        gate: &Arc<Gate>,
        at: Position,
        remaining: u64,
    ) -> Result<Option<HostSpan>, Fault> {
        if self.batches.is_empty() {
            (self.ahead, self.ahead_left) = (at, remaining);
        }
        while self.ahead_left > 0 && self.batches.len() < AHEAD {
            self.ahead.leave_ended(pieces);
            // Not across host memory: while that is sent, no stage waits for the peer.
            let Some(memory) = pieces.device(self.ahead.piece) else { break };
            let Some(stage) = self.stage(memory, self.ahead.piece)? else { break };
            let packed = pack(pieces, self.ahead, self.ahead_left, self.next_max);
            self.next_max = self.next_max.saturating_mul(2);
            let (len, stage) = (packed.len() as u64, stage.aligned_as(packed.address()));
            self.start(pieces, gate, stage, packed, self.ahead.piece)?;
            self.ahead.advance(pieces, len);
            self.ahead_left -= len;
        }
        let Some(front) = self.batches.front_mut() else { return Ok(None) };
        if let Batch::Copying { copy, piece } = front {
            let Some(outcome) = copy.take_outcome() else { return Ok(None) };
            let stage = outcome.map_err(|e| device_fault(*piece, e))?;
            let stage = stage.expect("a copy from the device has a stage");
            *front = Batch::Ready { stage, len: copy.len, sent: 0 };
        }
        let Batch::Ready { stage, len, sent } = front else { unreachable!("set above") };
        Ok(Some(stage.span(*sent, *len - *sent)))
    }

    /// In: the rest of the stage that is being filled, or a new stage.
    pub(super) fn free_span(
        &mut self,
        pieces: &Pieces,
        at: Position,
        remaining: u64,
    ) -> Result<Option<HostSpan>, Fault> {
        if self.filling.is_none() {
            self.reap()?;
            if self.batches.len() == AHEAD {
                return Ok(None);
            }
            let memory = pieces.device(at.piece).expect("the caller has looked");
            let Some(stage) = self.stage(memory, at.piece)? else { return Ok(None) };
            let half = usize::try_from(remaining / 2).unwrap_or(usize::MAX);
            let packed = pack(pieces, at, remaining, half.max(SMALLEST));
            let stage = stage.aligned_as(packed.address());
            self.filling = Some(Filling { stage, packed, first: at.piece, filled: 0 });
        }
        let filling = self.filling.as_ref().expect("set above");
        Ok(Some(filling.stage.span(filling.filled, filling.packed.len() - filling.filled)))
    }

    /// Bytes of the last span moved between it and the socket.
    pub(super) fn moved(
        &mut self,
        bytes: usize,
        pieces: &Pieces,
        gate: &Arc<Gate>,
    ) -> Result<(), Fault> {
        self.is_asked = false;
        match self.direction {
            Direction::Out => {
                if let Some(Batch::Ready { len, sent, .. }) = self.batches.front_mut() {
                    *sent += bytes;
                    if sent == len {
                        self.batches.pop_front();
                    }
                }
                Ok(())
            }
            Direction::In => {
                let filling = self.filling.as_mut().expect("bytes were received into it");
                filling.filled += bytes;
                if filling.filled == filling.packed.len() {
                    self.fill(pieces, gate)
                } else {
                    Ok(())
                }
            }
        }
    }

    /// In: copies what the stage that is being filled has, if it has any bytes.
    fn fill(&mut self, pieces: &Pieces, gate: &Arc<Gate>) -> Result<(), Fault> {
        match self.filling.take() {
            Some(Filling { stage, mut packed, first, filled }) if filled > 0 => {
                packed.truncate(filled);
                self.start(pieces, gate, stage, packed, first)
            }
            _ => Ok(()),
        }
    }

    /// The peer is not ready. While another cursor waits for a stage, this one gives back what it has: out,
    /// the bytes are copied again later; in, those that have arrived are copied. It does so only if the peer is still
    /// not ready at the next call, because most peers soon are. On an I/O thread, that call comes after those of the
    /// thread's other handlers; a caller's thread has none, and calls at once. With nothing left, it leaves the pools:
    /// a peer that is never ready must not lessen the part of other cursors.
    pub(super) fn park(&mut self, pieces: &Pieces, gate: &Arc<Gate>) -> Result<(), Fault> {
        if matches!(self.direction, Direction::In) {
            self.reap()?;
        }
        if self.filling.as_ref().is_some_and(|filling| filling.filled == 0) {
            self.filling = None;
        }
        if self.filling.is_none() && self.batches.is_empty() {
            self.users.leave();
            return Ok(());
        }
        // A copy in progress ends on its own, and then wakes this cursor. Once none is left, its share is called when
        // the peer is ready, and seldom before (`Drive::progress`). Each call of `fetch` asks for stages, whether the
        // peer is ready or not: a share that looks at its peer from time to time does not make it then.
        let has_ready = match self.direction {
            Direction::Out => {
                !self.batches.is_empty() && !self.batches.iter().any(Batch::is_copying)
            }
            Direction::In => self.filling.is_some(),
        };
        let is_contended = self.users.park();
        if !has_ready || !is_contended {
            return Ok(());
        }
        self.is_asked = !self.is_asked;
        if self.is_asked {
            (self.users.wake())();
            return Ok(());
        }
        match self.direction {
            Direction::Out => {
                self.batches.clear();
                self.users.leave();
                Ok(())
            }
            Direction::In => self.fill(pieces, gate),
        }
    }

    /// In: drops the batches whose copies have ended.
    fn reap(&mut self) -> Result<(), Fault> {
        let mut fault = None;
        self.batches.retain(|batch| {
            let Batch::Copying { copy, piece } = batch else { return false };
            let outcome = copy.take_outcome();
            let is_running = outcome.is_none();
            if let Some(Err(e)) = outcome {
                fault.get_or_insert_with(|| device_fault(*piece, e));
            }
            is_running
        });
        fault.map_or(Ok(()), Err)
    }

    /// In: whether all copies have ended.
    pub(super) fn flush(&mut self) -> Result<bool, Fault> {
        self.reap()?;
        Ok(self.batches.is_empty())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
