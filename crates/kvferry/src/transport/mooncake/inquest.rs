//! Finding out why a data connection broke.
//!
//! A stock target says that it refuses a range, then closes at once, with what was sent ahead
//! unread. The kernel turns such a closing into a reset, which can overtake the refusal. So a
//! broken connection means that the peer died, or that one of the ranges under way does not fit;
//! a handshake tells which: the dead don't answer, and the living tell what they have registered,
//! which decides about each range as they decided themselves.

use super::exchange::{Failure, ask};
use super::meet::{introduction, understood};
use super::peer::end;
use super::wire::{Buffer, Kind};
use crate::error::{Error, ErrorKind, Result};
use crate::session::link::Link;
use crate::transfer::job::Job;
use kvferry_proto::StreamId;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// How long the peer may take to answer. It was there a moment ago.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What is known of a connection that broke.
pub(super) struct Inquest {
    pub(super) link: Arc<Link>,
    pub(super) job: Arc<Job>,
    /// The lane, which is dead.
    pub(super) lane: StreamId,
    /// The pairs of the batch that were under way, in the order of their requests.
    pub(super) pairs: RangeInclusive<usize>,
    /// What the connection broke with.
    pub(super) error: Error,
}

impl Inquest {
    /// Finds out, tells the job, and ends its share.
    pub(super) fn hold(self) {
        let link = Arc::clone(&self.link);
        let core = &link.core;
        ask(
            core,
            link.peer_addr,
            Kind::Metadata,
            introduction(core),
            TIMEOUT,
            Box::new(move |_, answer| self.conclude(answer.map_err(Failure::into_error))),
        );
    }

    fn conclude(self, answer: Result<Vec<u8>>) {
        let peer = self.link.mooncake.as_ref().expect("lanes of a Mooncake link");
        let fresh = answer.and_then(|json| understood(&json));
        let alive = fresh.is_ok_and(|fresh| peer.update(fresh));
        let misfit = if alive { self.misfit(&peer.buffers()) } else { None };
        match misfit {
            Some((pair, kind)) => {
                self.link.open_ahead();
                self.job.fail(refusal(&self.link, &self.job, pair, kind));
                // Nothing behind a refused range is applied, and nothing of it.
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
        let batch = &self.job.batch;
        self.pairs.clone().find_map(|pair| {
            let (addr, len) = (batch.remote[pair].offset, batch.local.pieces[pair].len);
            misfit(addr, len, buffers).map(|kind| (pair, kind))
        })
    }
}

/// Why a range is refused, if it is: all of it has to lie in one buffer.
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

/// The error of a refused pair.
pub(super) fn refusal(link: &Link, job: &Job, pair: usize, kind: ErrorKind) -> Error {
    let what = match kind {
        ErrorKind::OutOfBounds => "the peer refused a range that reaches beyond its buffer",
        ErrorKind::NotRegistered => "the peer refused a range that it has not registered",
        _ => "the peer refused a range for a reason that is not known here",
    };
    let batch = &job.batch;
    Error::new(kind, what)
        .with("peer", &link.address)
        .with("descriptor", pair)
        .with("address", format_args!("{:#x}", batch.remote[pair].offset))
        .with("len", batch.local.pieces[pair].len)
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
