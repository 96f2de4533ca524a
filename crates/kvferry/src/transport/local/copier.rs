//! Walking over both sides of a batch at once, a chunk at a time.

use super::copy::{Broken, Targets};
use super::{CHUNK, LocalPeer};
use crate::error::{Error, ErrorKind};
use crate::memory::cursor::{Fault, Gather, Lent, Pieces, Position, Scatter, Sink, Source};
use crate::memory::device::Wake;
use crate::memory::gate::Gate;
use crate::session::link::Link;
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::job::Op;
use crate::transport::{local_fault, refusal};
use kvferry_proto::{Timestamp, WireCode};
use std::io;

/// Where a batch goes.
pub(super) struct Way<'a> {
    pub(super) link: &'a Arc<Link>,
    pub(super) peer: &'a LocalPeer,
    pub(super) batch: &'a Batch,
}

/// A range of a batch that is being copied.
pub(super) struct Copier {
    op: Op,
    local: Local,
    at: Position,
}

enum Local {
    From(Gather),
    To(Scatter),
}

impl Copier {
    /// `bytes` from `at` on; our memory is touched inside `gate`.
    pub(super) fn new(
        op: Op,
        pieces: &Arc<Pieces>,
        at: Position,
        bytes: u64,
        gate: Arc<Gate>,
        wake: Wake,
    ) -> Self {
        let pieces = Arc::clone(pieces);
        let local = match op {
            Op::Write => Local::From(Gather::new(pieces, at, bytes, gate, wake)),
            Op::Read => Local::To(Scatter::new(pieces, at, bytes, gate, wake)),
        };
        Self { op, local, at }
    }

    pub(super) fn is_done(&self) -> bool {
        match &self.local {
            Local::From(source) => source.remaining() == 0,
            Local::To(sink) => sink.remaining() == 0,
        }
    }

    /// Copies one chunk.
    pub(super) fn step(
        &mut self,
        way: &Way<'_>,
        targets: &Targets,
        now: Timestamp,
    ) -> Result<Lent, Error> {
        let Some(gate) = way.peer.page.gate() else {
            // As many threads as there are gates copy to this peer: they will be done soon.
            crate::sync::thread::yield_now();
            return Ok(Lent::Moved(0));
        };
        let (op, pieces) = (self.op, &*way.batch.local);
        self.at.leave_ended(pieces);
        let at = self.at;
        let mut broken = None;
        let mut copy = |spans: &[kvferry_sys::HostSpan]| {
            let place = (targets, pieces, at);
            way.peer.copy(&way.link.core, &gate, op, place, spans, now).map_err(|why| {
                broken = Some(why);
                io::Error::from(io::ErrorKind::Other)
            })
        };
        let result = match &mut self.local {
            Local::From(source) => source.lend(CHUNK, &mut copy),
            Local::To(sink) => sink.lend(CHUNK, &mut copy),
        };
        if let Some(broken) = broken {
            return Err(way.broken(broken));
        }
        let lent = result.map_err(|fault| way.failed(fault))?;
        if let Lent::Moved(moved) = lent {
            self.at.advance(pieces, moved as u64);
        }
        Ok(lent)
    }

    /// Whether all bytes that were copied are where they belong. Asked when all were.
    pub(super) fn flush(&mut self, way: &Way<'_>) -> Result<Lent, Error> {
        match &mut self.local {
            Local::From(_) => Ok(Lent::Moved(0)),
            Local::To(sink) => sink.flush().map_err(|fault| way.failed(fault)),
        }
    }
}

/// Ends the session with a peer that is gone: the next transfer meets it afresh.
///
/// Not only the copying: what went over the session's other lanes now would fail without saying
/// whether anything still lands.
///
/// Answers why it has ended, which may have been for another reason.
pub(super) fn lost(link: &Arc<Link>, error: Error) -> Error {
    if let Some(end) = link.end() {
        return end.clone();
    }
    let error = error.with("peer", &link.address);
    link.close(error.clone());
    error
}

impl LocalPeer {
    /// What it means that a pair of a batch is out of reach: the peer would refuse it, or it was
    /// shut down, and its regions went with it, before its farewell was read.
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

impl Way<'_> {
    /// Our own memory can't be used, unless the session's end is the reason for that, too.
    fn failed(&self, fault: Fault) -> Error {
        match (self.link.end(), fault) {
            (Some(end), _) => end.clone(),
            (None, Fault::Memory { code, index }) => local_fault(code, index),
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
