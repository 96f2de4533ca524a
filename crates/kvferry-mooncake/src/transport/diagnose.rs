//! Finds out why a data connection broke.
//!
//! A stock target that refuses a range sends a status, then closes at once and leaves bytes that
//! were sent ahead unread. The kernel turns such a close into a reset, which can overtake the
//! status. So a broken connection means that the peer died, or that it refused one of the ranges in
//! progress. A handshake tells which: a dead peer does not answer, and a live one lists its
//! registered buffers, by which it has decided about each range.

use super::connect::understood;
use super::exchange::{Failure, ask};
use super::peer::{MooncakePeer, end};
use super::wire::{Buffer, Kind};
use kvferry::transport::{Job, Link};
use kvferry::{Error, ErrorKind, Result};
use kvferry_proto::StreamId;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// The time for the peer's answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A broken connection.
pub(super) struct Diagnosis {
    pub(super) peer: Arc<MooncakePeer>,
    pub(super) link: Arc<Link>,
    pub(super) job: Arc<Job>,
    /// The lane, which has ended.
    pub(super) lane: StreamId,
    /// The pairs of the batch in progress, in the order of their requests.
    pub(super) pairs: RangeInclusive<usize>,
    pub(super) error: Error,
}

impl Diagnosis {
    /// Finds the reason, reports it to the job, and ends the job's share.
    pub(super) fn hold(self) {
        let link = Arc::clone(&self.link);
        let request = match self.peer.request() {
            Ok(request) => request,
            Err(e) => return self.conclude(Err(e)),
        };
        ask(
            &link.core,
            link.peer_addr,
            Kind::Metadata,
            request,
            TIMEOUT,
            Box::new(move |_, answer| self.conclude(answer.map_err(Failure::into_error))),
        );
    }

    fn conclude(self, answer: Result<Vec<u8>>) {
        let peer = &self.peer;
        let fresh = answer.and_then(|json| understood(&json));
        let alive = fresh.is_ok_and(|fresh| peer.update(fresh));
        let misfit = if alive { self.misfit(&peer.buffers()) } else { None };
        match misfit {
            Some((pair, kind)) => {
                self.link.open_ahead();
                self.job.fail(refusal(&self.link, &self.job, pair, kind));
                // The peer applies no byte of a refused request, and no later request.
                self.job.share_ended(&self.link, None);
            }
            None => {
                self.job.fail(self.error.clone());
                if !alive {
                    end(&self.link, self.error);
                }
                self.job.share_ended(&self.link, Some(self.lane));
            }
        }
    }

    /// The first pair that the peer refuses.
    fn misfit(&self, buffers: &[Buffer]) -> Option<(usize, ErrorKind)> {
        self.pairs.clone().find_map(|pair| {
            let part = self.job.part(pair);
            misfit(part.offset, part.len, buffers).map(|kind| (pair, kind))
        })
    }
}

/// Why a range is refused, if it is: one buffer has to hold all of it.
pub(super) fn misfit(addr: u64, len: u64, buffers: &[Buffer]) -> Option<ErrorKind> {
    let mut kind = ErrorKind::NotRegistered;
    for buffer in buffers {
        let Some(at) = addr.checked_sub(buffer.addr).filter(|at| *at < buffer.length) else {
            continue;
        };
        if len <= buffer.length - at {
            return None;
        }
        kind = ErrorKind::OutOfBounds;
    }
    Some(kind)
}

pub(super) fn refusal(link: &Link, job: &Job, pair: usize, kind: ErrorKind) -> Error {
    let what = match kind {
        ErrorKind::OutOfBounds => "the peer refused a range that reaches beyond its buffer",
        ErrorKind::NotRegistered => "the peer refused a range that it has not registered",
        _ => "the peer refused a range for an unknown reason",
    };
    let part = job.part(pair);
    Error::new(kind, what)
        .with("peer", &link.address)
        .with("descriptor", pair)
        .with("address", format_args!("{:#x}", part.offset))
        .with("len", part.len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_fits_if_one_buffer_holds_all_of_it() {
        let buffer = |addr, length| Buffer { name: "a:1".into(), addr, length };
        let buffers = [buffer(100, 10), buffer(110, 10), buffer(u64::MAX - 9, 10)];
        for (addr, len, kind) in [
            (100, 10, None),
            (119, 1, None),
            (u64::MAX - 9, 10, None),
            (105, 10, Some(ErrorKind::OutOfBounds)),
            (110, u64::MAX, Some(ErrorKind::OutOfBounds)),
            (99, 2, Some(ErrorKind::NotRegistered)),
            (120, 1, Some(ErrorKind::NotRegistered)),
        ] {
            assert_eq!(misfit(addr, len, &buffers), kind, "{addr}+{len}");
        }
    }
}
