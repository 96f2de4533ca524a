//! The state of one handoff at its producer.

use crate::code::WireCode;
use crate::handoff::message::{Announcements, Ask};
use crate::handoff::{Generation, Outcome, PeerId};
use crate::origin::Origin;
use crate::time::Timestamp;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) stage: Stage,
    /// Consumer ranks that must confirm; zero until one asks.
    pub(super) must_confirm: u32,
    pub(super) readers: BTreeMap<PeerId, Reader>,
    /// Time when this entry is due in the schedule.
    pub(super) due: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// A consumer has asked, and the request has not arrived at this engine. The time until which the
    /// consumer waits for that, and the origin of the consumer that asked first.
    Awaited(Timestamp, Origin),
    /// The request has arrived. The time by which it must be offered.
    Expected(Timestamp),
    Offered(Offered),
}

#[derive(Debug)]
pub(super) struct Offered {
    pub(super) generation: Generation,
    /// Everything announced so far, side data included.
    pub(super) announced: Announcements,
    /// Time when the offer expires; only for a complete offer without a reader.
    pub(super) expires: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) struct Reader {
    /// Time when the reader's budget and grace are over.
    pub(super) until: Timestamp,
    /// Set while the reader's connection is lost: the time when the reader counts as failed, and the code of the loss.
    pub(super) lost: Option<(Timestamp, WireCode)>,
    pub(super) confirmed: bool,
}

/// Consequence of a passed deadline.
pub(super) enum Overdue {
    /// The handoff's request has not arrived at this engine.
    Rendezvous,
    Ends(Outcome),
}

impl Entry {
    pub(super) const fn offer(&self) -> Option<&Offered> {
        if let Stage::Offered(offered) = &self.stage { Some(offered) } else { None }
    }

    /// Returns the reason to refuse a consumer that asks for the first time, if there is one.
    pub(super) fn refuses(&self, ask: &Ask) -> Option<&'static str> {
        if self.readers.is_empty() {
            None
        } else if ask.readers != self.must_confirm {
            Some("others who asked for it count another number of readers")
        } else if self.readers.len() >= self.must_confirm as usize {
            Some("all its readers have asked for it")
        } else {
            None
        }
    }

    pub(super) fn next_due(&self) -> Option<Timestamp> {
        let due =
            |reader: &Reader| reader.lost.map_or(reader.until, |(at, _)| at.min(reader.until));
        // A reader that has confirmed is not waited for.
        let open = self.readers.values().filter(|reader| !reader.confirmed).map(due).min();
        match &self.stage {
            Stage::Awaited(until, _) | Stage::Expected(until) => {
                Some(open.map_or(*until, |open| open.min(*until)))
            }
            Stage::Offered(offered) if self.readers.is_empty() => offered.expires,
            // If all readers that asked have confirmed, others have not asked yet.
            Stage::Offered(_) => {
                open.or_else(|| self.readers.values().map(|reader| reader.until).max())
            }
        }
    }

    /// Returns the consequence of a passed deadline, if one has passed.
    pub(super) fn overdue(&self, now: Timestamp) -> Option<Overdue> {
        if self.next_due().is_none_or(|due| due > now) {
            return None;
        }
        match &self.stage {
            Stage::Awaited(until, _) if *until <= now => return Some(Overdue::Rendezvous),
            Stage::Expected(until) if *until <= now => {
                let detail = "the request waited too long in the producer's queue";
                return Some(Overdue::Ends(Outcome::here(WireCode::Deadline, detail)));
            }
            _ if self.readers.is_empty() => {
                let detail = "no consumer asked for it in time";
                return Some(Overdue::Ends(Outcome::here(WireCode::Expired, detail)));
            }
            _ => {}
        }
        let open = || self.readers.iter().filter(|(_, reader)| !reader.confirmed);
        for (peer, reader) in open() {
            if let Some((at, code)) = reader.lost
                && at <= now
            {
                return Some(Overdue::Ends(Outcome::of(*peer, code, "a consumer was lost")));
            }
        }
        let late = open().find(|(_, reader)| reader.until <= now).map(|(peer, _)| *peer);
        Some(Overdue::Ends(match late {
            Some(peer) => {
                Outcome::of(peer, WireCode::Deadline, "a consumer did not confirm in time")
            }
            None => {
                Outcome::here(WireCode::Deadline, "not all of its readers asked for it in time")
            }
        }))
    }
}
