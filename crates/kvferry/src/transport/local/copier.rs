//! Copies a range of a batch, one chunk at a time.

use super::copy::{Broken, Targets};
use super::{CHUNK, LocalPeer};
use crate::error::{Error, ErrorKind};
use crate::memory::cursor::{Cursor, Lent};
use crate::memory::device::Direction;
use crate::memory::gate::Gate;
use crate::memory::pieces::{Fault, Pieces, Position};
use crate::memory::stages::Wake;
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::job::Op;
use crate::transfer::link::Link;
use crate::transport::refusal::{local_fault, refusal};
use kvferry_proto::{Timestamp, WireCode};
use kvferry_sys::HostSpan;
use kvferry_sys::socket::SPANS_MAX;
use std::io;

/// The local and remote sides of a batch.
pub(super) struct BatchSides<'a> {
    pub(super) link: &'a Arc<Link>,
    pub(super) peer: &'a LocalPeer,
    pub(super) batch: &'a Batch,
}

/// A range of a batch that is being copied.
pub(super) struct Copier {
    op: Op,
    local: Cursor,
    at: Position,
}

impl Copier {
    /// `bytes` from `at` on; local memory is touched inside `gate`.
    pub(super) fn new(
        op: Op,
        pieces: &Arc<Pieces>,
        at: Position,
        bytes: u64,
        gate: Arc<Gate>,
        wake: Wake,
    ) -> Self {
        let direction = match op {
            Op::Write => Direction::Out,
            Op::Read => Direction::In,
        };
        let local = Cursor::new(direction, Arc::clone(pieces), at, bytes, gate, wake);
        Self { op, local, at }
    }

    pub(super) fn is_done(&self) -> bool {
        self.local.remaining() == 0
    }

    pub(super) fn step(
        &mut self,
        way: &BatchSides<'_>,
        targets: &Targets,
        now: Timestamp,
    ) -> Result<Lent, Error> {
        let Some(gate) = way.peer.page.gate() else {
            // All gates are in use by other threads that copy to this peer; one will be free soon.
            crate::sync::thread::yield_now();
            return Ok(Lent::Moved(0));
        };
        let (op, pieces) = (self.op, &*way.batch.local);
        self.at.leave_ended(pieces);
        let at = self.at;
        let mut broken = None;
        let is_staged = !pieces.is_host(&pieces.pieces[at.piece]);
        let mut copy = |spans: &[HostSpan]| {
            let place = (targets, pieces, at);
            let split;
            let spans = if is_staged {
                split = split_at_pairs(pieces, at, spans);
                &*split
            } else {
                spans
            };
            way.peer.copy(&way.link.core, &gate, op, place, spans, now).map_err(|why| {
                broken = Some(why);
                io::Error::from(io::ErrorKind::Other)
            })
        };
        let result = self.local.lend(CHUNK, &mut copy);
        if let Some(broken) = broken {
            return Err(way.broken(broken));
        }
        let lent = result.map_err(|fault| way.failed(fault))?;
        if let Lent::Moved(moved) = lent {
            self.at.advance(pieces, moved as u64);
        }
        Ok(lent)
    }

    /// Whether all copied bytes are in place. Called when no bytes remain.
    pub(super) fn flush(&mut self, way: &BatchSides<'_>) -> Result<Lent, Error> {
        self.local.flush().map_err(|fault| way.failed(fault))
    }
}

/// Divides the spans of a stage, which has the bytes of many pairs one after another, where pairs end.
fn split_at_pairs(pieces: &Pieces, at: Position, spans: &[HostSpan]) -> Vec<HostSpan> {
    let mut split = Vec::new();
    let mut left = pieces.pieces[at.piece..].iter().map(|piece| piece.len);
    let mut of_pair = left.next().unwrap_or(0) - at.within;
    for span in spans {
        let mut rest = *span;
        while !rest.is_empty() && split.len() < SPANS_MAX {
            let len = rest.len().min(usize::try_from(of_pair).unwrap_or(usize::MAX));
            let (part, later) = rest.split_at(len);
            split.push(part);
            (rest, of_pair) = (later, of_pair - len as u64);
            if of_pair == 0 {
                of_pair = left.next().unwrap_or(u64::MAX);
            }
        }
    }
    split
}

/// Ends the session with a peer that is gone: the next transfer connects again.
///
/// The whole session ends, not only the local route: requests on its other lanes would fail without
/// a confirmation that none of their bytes arrive any more.
///
/// Returns why the session has ended, which may have happened earlier for another reason.
pub(super) fn lost(link: &Arc<Link>, error: Error) -> Error {
    if let Some(end) = link.end() {
        return end.clone();
    }
    let error = error.with("peer", &link.address);
    link.close(WireCode::Closed, error.clone());
    error
}

impl LocalPeer {
    /// Returns the reason of the session's end if the peer is gone.
    pub(crate) fn gone(&self, link: &Arc<Link>) -> Option<Error> {
        self.look().err().map(|error| lost(link, error))
    }

    /// The error of a pair that is out of reach: the peer would refuse it, or the peer was shut
    /// down, which removed its regions before its goodbye was read.
    pub(crate) fn refused(
        &self,
        link: &Arc<Link>,
        batch: &Batch,
        code: WireCode,
        pair: usize,
    ) -> Error {
        match self.farewell() {
            None => refusal(link, batch, code, Some(pair)),
            Some(farewell) => lost(link, farewell),
        }
    }
}

impl BatchSides<'_> {
    /// The error of local memory that can't be used, unless the session's end is the reason for
    /// that.
    fn failed(&self, fault: Fault) -> Error {
        match (self.link.end(), fault) {
            (Some(end), _) => end.clone(),
            (None, Fault::Memory(fault)) => local_fault(fault),
            (None, Fault::Shut | Fault::Io(_)) => {
                Error::new(ErrorKind::Internal, "a copy within the host was stopped")
            }
        }
    }

    fn broken(&self, why: Broken) -> Error {
        match why {
            Broken::Gone(error) => lost(self.link, error),
            Broken::Pair { code, pair } => self.peer.refused(self.link, self.batch, code, pair),
        }
    }
}
