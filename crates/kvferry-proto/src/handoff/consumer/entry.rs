//! The state of one handoff at its consumer, and of each producer in it.

use super::{Need, ProducerRank, ReadId, Slice};
use crate::code::WireCode;
use crate::handoff::message::Announcements;
use crate::handoff::{Generation, Outcome, PeerId, Progress};
use crate::id::Incarnation;
use crate::time::Timestamp;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) began: Timestamp,
    pub(super) deadline: Timestamp,
    /// Until when each producer must offer or expect it. They say so themselves; this is for
    /// producers that do not.
    pub(super) rendezvous: Timestamp,
    /// Asked for, and not fetched yet: nothing is read, and the driver is not told of its end.
    pub(super) claimed: bool,
    pub(super) sources: BTreeMap<PeerId, Source>,
    /// The outcome, decided but not reported while reads are under way.
    pub(super) ending: Option<Outcome>,
    pub(super) due: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) struct Source {
    /// The incarnation that is meant, or the first that was met.
    pub(super) meant: Option<Incarnation>,
    /// Another incarnation was met since. It knows nothing of the handoff.
    pub(super) is_gone: bool,
    /// Consumer ranks that read from it, this rank included.
    pub(super) readers: u32,
    pub(super) link: Link,
    pub(super) stage: Stage,
    pub(super) need: Need,
    pub(super) generation: Generation,
    pub(super) announced: Announcements,
    /// Reads of this generation, in the order of what they fetch. Those at the front that are done
    /// are removed and added to `fetched`.
    pub(super) reads: VecDeque<Read>,
    pub(super) fetched: Progress,
    /// What reads were issued for, and whether the last one was issued.
    pub(super) taken: Progress,
    pub(super) last_taken: bool,
    pub(super) last_fetched: bool,
    /// Reads of an earlier generation. They must end before this one is read.
    pub(super) draining: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Up,
    /// The connection is lost: when the handoff fails, and with which code.
    Down {
        until: Timestamp,
        code: WireCode,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has not answered yet.
    Asking,
    /// The request is in the producer's queue.
    Expected,
    Reading,
    /// Everything is fetched, and the confirmation was requested.
    Confirming,
    Confirmed,
}

#[derive(Debug)]
pub(super) struct Read {
    pub(super) read: ReadId,
    pub(super) slice: Slice,
    pub(super) done: bool,
}

impl Entry {
    /// When the handoff fails: at the end of its budget, or after a grace period if only the
    /// confirmation is missing.
    pub(super) fn deadline(&self, grace: Duration) -> Timestamp {
        if self.is_settled() { self.deadline + grace } else { self.deadline }
    }

    /// True once everything has been read from every producer.
    pub(super) fn is_settled(&self) -> bool {
        let settled = |s: &Source| matches!(s.stage, Stage::Confirming | Stage::Confirmed);
        self.sources.values().all(settled)
    }

    /// True once a producer has said that it has, or will have, the KV.
    pub(super) fn is_answered(&self) -> bool {
        self.sources.values().any(|source| source.stage != Stage::Asking)
    }

    /// A producer that has neither offered nor expects it.
    pub(super) fn asking(&self) -> Option<PeerId> {
        let mut sources = self.sources.iter();
        sources.find(|(_, source)| source.stage == Stage::Asking).map(|(peer, _)| *peer)
    }

    pub(super) fn next_due(&self, grace: Duration) -> Option<Timestamp> {
        if self.ending.is_some() {
            return None;
        }
        let lost = self.sources.values().filter_map(|source| match source.link {
            Link::Down { until, .. } if source.stage != Stage::Confirmed => Some(until),
            _ => None,
        });
        let asking = self.asking().map(|_| self.rendezvous);
        lost.chain(asking).chain([self.deadline(grace)]).min()
    }

    pub(super) fn overdue(&self, now: Timestamp, grace: Duration) -> Option<Outcome> {
        if self.ending.is_some() {
            return None;
        }
        for (peer, source) in &self.sources {
            if let Link::Down { until, code } = source.link
                && source.stage != Stage::Confirmed
                && until <= now
            {
                return Some(Outcome::of(*peer, code, "the producer was lost"));
            }
        }
        if let Some(peer) = self.asking().filter(|_| self.rendezvous <= now) {
            let detail = "the producer has not answered";
            return Some(Outcome::of(peer, WireCode::Deadline, detail));
        }
        if self.deadline(grace) > now {
            return None;
        }
        let (peer, source) =
            self.sources.iter().find(|(_, source)| source.stage != Stage::Confirmed)?;
        let detail = match source.stage {
            Stage::Asking | Stage::Expected => "the producer has not offered it",
            Stage::Confirming => "the producer did not confirm what was read",
            Stage::Reading | Stage::Confirmed => "not all of it was ready and read",
        };
        Some(Outcome::of(*peer, WireCode::Deadline, detail))
    }
}

impl Source {
    pub(super) fn new(rank: &ProducerRank, link: Link) -> Self {
        Self {
            meant: rank.incarnation,
            is_gone: false,
            readers: rank.readers,
            need: rank.need,
            link,
            stage: Stage::Asking,
            generation: Generation::default(),
            announced: Announcements::default(),
            reads: VecDeque::new(),
            fetched: Progress::NONE,
            taken: Progress::NONE,
            last_taken: false,
            last_fetched: false,
            draining: 0,
        }
    }

    /// Starts over with another generation. Reads of the last one must end first.
    pub(super) fn begin(&mut self, generation: Generation) -> Vec<ReadId> {
        self.fetched = Progress::NONE;
        self.last_fetched = false;
        let reads = self.forget_reads();
        self.generation = generation;
        self.announced = Announcements::default();
        self.stage = Stage::Reading;
        reads
    }

    /// Discards the reads that are under way: what they fetch will be read again.
    pub(super) fn forget_reads(&mut self) -> Vec<ReadId> {
        let under_way = self.reads.drain(..).filter(|read| !read.done);
        let under_way: Vec<_> = under_way.map(|read| read.read).collect();
        self.draining += under_way.len();
        self.taken = self.fetched;
        self.last_taken = self.last_fetched;
        under_way
    }

    pub(super) fn count_fetched(&mut self) {
        while self.reads.front().is_some_and(|read| read.done) {
            let read = self.reads.pop_front().expect("there is one");
            self.fetched = read.slice.to;
            self.last_fetched = read.slice.last;
        }
    }

    /// True once everything has been read from this producer.
    pub(super) fn is_read(&self) -> bool {
        self.last_fetched && self.reads.is_empty()
    }

    pub(super) fn next_slice(&self) -> Option<Slice> {
        let Announcements { progress, last, .. } = self.announced;
        let is_more = progress > self.taken || (last && !self.last_taken);
        is_more.then_some(Slice { from: self.taken, to: progress, last })
    }
}
