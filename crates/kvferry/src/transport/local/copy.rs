//! Resolves ranges of the peer, and copies to and from them.

use super::registry::{Missed, Seen};
use super::writers::WriterGate;
use super::{ENDED, LocalPeer};
use crate::core::Core;
use crate::error::{Error, ErrorKind};
use crate::memory::gate::Touches;
use crate::memory::pieces::{Pieces, Position};
use crate::memory::region::Access;
use crate::memory::remote;
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::fallback::Fallback;
use crate::transfer::job::Op;
use kvferry_proto::{RegionId, Timestamp, WireCode};
use kvferry_sys::process_vm::{self, RemoteSpan};
use kvferry_sys::shared::Shared;
use kvferry_sys::span::HostSpan;
use std::cell::RefCell;
use std::io;

thread_local! {
    static REMOTE: RefCell<Vec<RemoteSpan>> = const { RefCell::new(Vec::new()) };
}

/// Remote ranges of a batch, with the regions that hold them.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    /// Remote range of each pair of the batch.
    ranges: Vec<Range>,
    regions: Vec<TargetRegion>,
    touches: Touches,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    /// Index into [`Targets::regions`].
    region: u32,
    /// Offset in the region.
    offset: u64,
}

#[derive(Debug)]
struct TargetRegion {
    seen: Seen,
    /// The region's memory, if it is mapped by this process.
    map: Option<Arc<Shared>>,
}

/// The reason why a batch can't be copied directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreached {
    /// The peer would refuse the pair with this number.
    Refused { code: WireCode, pair: usize },
    /// Another transport may reach the memory.
    Elsewhere(Fallback),
}

#[derive(Debug)]
pub(crate) enum Broken {
    /// The peer, or this session with it, is gone.
    Gone(Error),
    /// The memory of the pair with this number is gone.
    Pair { code: WireCode, pair: usize },
}

impl LocalPeer {
    /// Resolves all remote ranges of a batch.
    pub(crate) fn targets(&self, batch: &Batch, op: Op) -> Result<Targets, Unreached> {
        let mut targets = Targets::default();
        self.look_up_into(&mut targets, batch, op)?;
        Ok(targets)
    }

    /// Resolves all remote ranges of a batch, reusing the allocations of `self`.
    pub(super) fn look_up_into(
        &self,
        targets: &mut Targets,
        batch: &Batch,
        op: Op,
    ) -> Result<(), Unreached> {
        let need = match op {
            Op::Write => Access::WRITE,
            Op::Read => Access::READ,
        };
        let mut found = self.look_up(targets, batch, need);
        if matches!(found, Err((Missed::Refused(_), _))) {
            // Resolved once more in any case: another thread may have updated the index meanwhile.
            self.registry.catch_up();
            found = self.look_up(targets, batch, need);
        }
        found.map_err(|(missed, pair)| match missed {
            Missed::Refused(code) => Unreached::Refused { code, pair },
            Missed::Elsewhere(why) => Unreached::Elsewhere(why),
        })
    }

    fn look_up(
        &self,
        targets: &mut Targets,
        batch: &Batch,
        need: Access,
    ) -> Result<(), (Missed, usize)> {
        targets.clear();
        targets.ranges.reserve(batch.len());
        let index = self.registry.index();
        for (pair, (part, piece)) in batch.remote.iter().zip(&batch.local.pieces).enumerate() {
            if let Some(range) = targets.near(part.region, part.offset, piece.len) {
                targets.ranges.push(range);
                continue;
            }
            let (seen, offset) = index
                .resolve(&self.registry, part.region, part.offset, piece.len, need)
                .map_err(|missed| (missed, pair))?;
            let region = match targets.regions.iter().rposition(|known| known.seen == seen) {
                Some(known) => known,
                None => {
                    let map = seen.is_shared().then(|| self.map_of(&index, seen.id())).flatten();
                    let map = map.filter(|map| map.is_writable() || !need.write);
                    if map.is_none() && self.vm.is_err() {
                        return Err((Missed::Elsewhere(Fallback::OutOfReach), pair));
                    }
                    targets.regions.push(TargetRegion { seen, map });
                    targets.regions.len() - 1
                }
            };
            let region = u32::try_from(region).expect("fewer regions than pairs");
            targets.ranges.push(Range { region, offset });
        }
        targets.touches = Touches::of(targets.regions.iter().map(|region| region.seen.id()));
        Ok(())
    }

    /// Copies between `spans` and the remote ranges of a batch from `at` on, at most one chunk. The
    /// spans are the local memory there, lent inside a gate of this process.
    pub(super) fn copy(
        &self,
        core: &Core,
        gate: &WriterGate<'_>,
        op: Op,
        (targets, pieces, at): (&Targets, &Pieces, Position),
        spans: &[HostSpan],
        now: Timestamp,
    ) -> Result<usize, Broken> {
        self.check_alive(now).map_err(Broken::Gone)?;
        let inside = gate.enter(targets.touches);
        if !self.is_attached() || !core.suspend.is_fresh(now) {
            drop(inside);
            let what = "the session with the peer ended";
            return Err(Broken::Gone(Error::new(ErrorKind::PeerReset, what)));
        }
        let walk = Walk { targets, pieces, at };
        let copied = match &targets.regions[walk.target(at).region as usize].map {
            Some(_) => self.copy_mapped(&walk, op, spans)?,
            None => self.copy_by_number(&walk, op, spans)?,
        };
        if op == Op::Read {
            // A read counts only if the region was registered until after the copy.
            walk.check(self, copied)?;
        }
        drop(inside);
        let bytes = copied as u64;
        match op {
            Op::Write => gate.count(bytes, 0, 0),
            Op::Read => gate.count(0, bytes, 0),
        }
        Ok(copied)
    }

    fn copy_mapped(&self, walk: &Walk<'_>, op: Op, spans: &[HostSpan]) -> Result<usize, Broken> {
        let mut copied = 0;
        let mut alive = None;
        for (span, range) in spans.iter().zip(walk.ranges()) {
            let Some(map) = &walk.region(&range).map else { break };
            walk.check_region(self, &range, &mut alive)?;
            let offset = usize::try_from(range.offset).expect("inside a mapping");
            match op {
                Op::Write => map.span(offset, span.len()).copy_from_span(span),
                Op::Read => map.copy_to_span(offset, span),
            }
            copied += span.len();
        }
        Ok(copied)
    }

    fn copy_by_number(&self, walk: &Walk<'_>, op: Op, spans: &[HostSpan]) -> Result<usize, Broken> {
        REMOTE.with_borrow_mut(|ranges| {
            ranges.clear();
            let mut alive = None;
            for (span, range) in spans.iter().zip(walk.ranges()) {
                let region = walk.region(&range);
                if region.map.is_some() {
                    break;
                }
                walk.check_region(self, &range, &mut alive)?;
                let addr = region.seen.base.wrapping_add(range.offset);
                let addr = usize::try_from(addr).expect("an address of this machine");
                ranges.push(RemoteSpan::new(addr, span.len()));
            }
            // Checked last before the call: a process that runs another program has the same pid,
            // and other memory.
            if self.registry.has_ended() {
                return Err(Broken::Gone(self.loss(ENDED.into())));
            }
            let spans = &spans[..ranges.len()];
            let copied = match op {
                Op::Write => remote::write(self.pid, spans, ranges),
                Op::Read => process_vm::read(self.pid, spans, ranges),
            };
            copied.map_err(|e| walk.failed(e))
        })
    }
}

impl Targets {
    pub(super) fn clear(&mut self) {
        self.ranges.clear();
        self.regions.clear();
    }

    /// The range in the region that was looked up last, if it lies there.
    fn near(&self, id: RegionId, offset: u64, len: u64) -> Option<Range> {
        let last = self.ranges.last()?;
        let seen = &self.regions[last.region as usize].seen;
        let offset = match id {
            RegionId::ABSOLUTE => offset.checked_sub(seen.base)?,
            id if id == seen.id() => offset,
            _ => return None,
        };
        let fits = len > 0 && offset.checked_add(len).is_some_and(|end| end <= seen.len);
        fits.then_some(Range { region: last.region, offset })
    }
}

/// The remote ranges that belong to the local spans from a position on.
struct Walk<'a> {
    targets: &'a Targets,
    pieces: &'a Pieces,
    at: Position,
}

#[derive(Clone, Copy)]
struct TargetPart {
    pair: usize,
    region: u32,
    offset: u64,
}

impl Walk<'_> {
    fn target(&self, at: Position) -> Range {
        self.targets.ranges[at.piece]
    }

    /// Returns the remote range of each span: spans end where pairs do, and only the first begins
    /// within one.
    fn ranges(&self) -> impl Iterator<Item = TargetPart> {
        let first = self.at;
        self.targets.ranges[first.piece..].iter().enumerate().map(move |(i, range)| {
            let within = if i == 0 { first.within } else { 0 };
            TargetPart {
                pair: first.piece + i,
                region: range.region,
                offset: range.offset + within,
            }
        })
    }

    fn region(&self, range: &TargetPart) -> &TargetRegion {
        &self.targets.regions[range.region as usize]
    }

    /// Whether the region of a range is registered. `alive` is the region that was seen last.
    fn check_region(
        &self,
        peer: &LocalPeer,
        range: &TargetPart,
        alive: &mut Option<u32>,
    ) -> Result<(), Broken> {
        if *alive != Some(range.region) {
            if !peer.registry.is_current(&self.region(range).seen) {
                return Err(Broken::Pair { code: WireCode::Revoked, pair: range.pair });
            }
            *alive = Some(range.region);
        }
        Ok(())
    }

    /// Whether the regions that `bytes` bytes were read from are still registered.
    fn check(&self, peer: &LocalPeer, copied: usize) -> Result<(), Broken> {
        let mut left = copied as u64;
        let mut alive = None;
        for range in self.ranges() {
            if left == 0 {
                return Ok(());
            }
            self.check_region(peer, &range, &mut alive)?;
            let within = if range.pair == self.at.piece { self.at.within } else { 0 };
            left = left.saturating_sub(self.pieces.pieces[range.pair].len - within);
        }
        Ok(())
    }

    fn failed(&self, e: io::Error) -> Broken {
        // Linux errno values, which the kernel's interface fixes.
        const ESRCH: i32 = 3;
        const EFAULT: i32 = 14;
        match e.raw_os_error() {
            Some(ESRCH) => {
                Broken::Gone(Error::new(ErrorKind::PeerReset, "the peer's process is gone"))
            }
            Some(EFAULT) => Broken::Pair { code: WireCode::AccessDenied, pair: self.at.piece },
            _ => Broken::Gone(
                Error::new(ErrorKind::PeerReset, "the kernel does not let us copy any more")
                    .caused_by(e),
            ),
        }
    }
}
