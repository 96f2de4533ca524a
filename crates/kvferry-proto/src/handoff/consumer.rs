//! The side that needs the KV, and reads it.

mod entry;
mod messages;

use super::farewells::Farewells;
use super::message::{Ask, Confirm, GROUPS_MAX, Stop};
use super::schedule::Schedule;
use super::tombstones::Tombstones;
use super::watched::Watched;
use super::{BlockTable, HandoffId, HandoffMessage, Limits, Outcome, PeerId, Progress, Refusal};
use crate::code::WireCode;
use crate::id::Incarnation;
use crate::shares::Shares;
use crate::time::Timestamp;
use entry::{Entry, Link, Read, Source, Stage};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

/// Identifies a read. Counts up and is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub u64);

/// What a read fetches: the blocks that became ready between two points of progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// What earlier reads fetch.
    pub from: Progress,
    /// What is ready when this read begins. See [`Progress::until`].
    pub to: Progress,
    /// The last read of this generation. It also fetches what is complete only at the end, such as
    /// the state of linear attention.
    pub last: bool,
}

/// What the driver of a [`Consumer`] has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum ConsumerAction {
    /// Send a message to a producer rank. If the connection is gone, drop it: [`Consumer::met`] queues
    /// again what the peer needs.
    Send { to: PeerId, message: HandoffMessage },
    /// Read from the peer's blocks ([`Consumer::table`]) into the blocks of the request, then call
    /// [`Consumer::read_ended`].
    Read { read: ReadId, id: HandoffId, from: PeerId, slice: Slice },
    /// Cancel a read. [`Consumer::read_ended`] is still due.
    CancelRead(ReadId),
    /// Start or stop the heartbeat to a producer rank. It must run while a handoff waits for the peer.
    Watch { peer: PeerId, on: bool },
    /// A producer has said that it has, or will have, the KV: once for a [`Consumer::claim`] and once for a
    /// [`Consumer::want`], before [`ConsumerAction::Ended`]. Not for a handoff that ends without an answer.
    Answered { id: HandoffId },
    /// The handoff has ended on this rank, and no read writes into its blocks any more. Exactly once
    /// for every accepted [`Consumer::want`], never for a [`Consumer::claim`]. Side data comes with the peer that sent it, and only
    /// from handoffs that are done, and not if its memory was needed: see [`Limits::announced_bytes`].
    Ended { id: HandoffId, outcome: Outcome, side_data: Vec<(PeerId, Vec<u8>)> },
}

/// The handoffs that one rank consumes. See [`crate::handoff`] for the protocol and for how it is
/// driven.
#[derive(Debug)]
pub struct Consumer {
    limits: Limits,
    handoffs: HashMap<HandoffId, Entry>,
    tombstones: Tombstones<WireCode>,
    schedule: Schedule,
    watched: Watched,
    /// The handoff and the producer of each read.
    reads: HashMap<ReadId, (HandoffId, PeerId)>,
    reads_begun: u64,
    farewells: Farewells,
    /// Bytes of memory of the announcements of each handoff, and of which producer they are.
    announced: Shares<(HandoffId, PeerId)>,
    actions: VecDeque<ConsumerAction>,
}

/// A producer rank that a handoff reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerRank {
    /// Id of the rank's agent.
    pub peer: PeerId,
    /// The incarnation that is meant: where there is a connection, the one that it leads to. `None` for the next one
    /// that is met. If [`Consumer::met`] shows another one, the handoff ends as if the producer was restarted, and others
    /// with this peer go on.
    pub incarnation: Option<Incarnation>,
    /// Consumer ranks that read from it, this one included.
    pub readers: u32,
    /// Whether a connection to it is up.
    pub connected: bool,
    /// What this rank can use of its announcements.
    pub need: Need,
}

/// What a consumer can use of a producer rank's block tables. A claim's is that of the whole prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// The groups that the producer rank has. An announcement with more is malformed.
    pub groups: u32,
    /// The index behind the last block of a group. Blocks from there on are not kept.
    pub blocks: u32,
}

impl Need {
    /// All that a producer may announce.
    pub const ALL: Self = Self { groups: GROUPS_MAX as u32, blocks: u32::MAX };

    const fn covers(self, other: Self) -> bool {
        self.groups >= other.groups && self.blocks >= other.blocks
    }
}

impl Consumer {
    /// A consumer of no handoffs.
    pub fn new(limits: Limits) -> Self {
        Self {
            announced: Shares::new(limits.announced_bytes),
            limits,
            handoffs: HashMap::new(),
            tombstones: Tombstones::default(),
            schedule: Schedule::default(),
            watched: Watched::default(),
            reads: HashMap::new(),
            reads_begun: 0,
            farewells: Farewells::default(),
            actions: VecDeque::new(),
        }
    }

    /// Asks for a request's KV before blocks are allocated for it: the request has arrived at this
    /// engine, where it may wait in a queue. Its producers keep the KV while this rank lives, for at
    /// most [`Limits::cap`]. Nothing is read before [`Consumer::want`] continues it;
    /// [`Consumer::free`] and [`Consumer::cancel`] end it. If it fails, the driver is not told, and
    /// [`Consumer::want`] asks afresh.
    ///
    /// # Errors
    /// As [`Consumer::want`].
    pub fn claim(
        &mut self,
        id: &HandoffId,
        from: &[ProducerRank],
        now: Timestamp,
    ) -> Result<(), Refusal> {
        self.expire(now);
        self.check_new(id)?;
        self.ask(id, from, now + self.limits.cap, true, now)
    }

    /// Asks for a request's KV, or continues a [claim](Consumer::claim). The blocks of this rank are
    /// allocated; the engine must not use them until [`ConsumerAction::Ended`].
    ///
    /// If a producer turns out to be restarted before any producer has answered, the handoff ends as
    /// [`WireCode::StaleIncarnation`] and is forgotten: it may be asked for again, from the incarnations that are there.
    ///
    /// # Errors
    /// [`Refusal::InUse`], [`Refusal::Ended`], [`Refusal::Full`]; [`Refusal::Misuse`] without
    /// producers, with a producer twice, or with a producer that has no readers.
    pub fn want(
        &mut self,
        id: &HandoffId,
        from: &[ProducerRank],
        budget: Duration,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        self.expire(now);
        if let Some(claim) = self.handoffs.get_mut(id).filter(|entry| entry.claimed) {
            let is_it = |it: &ProducerRank| {
                let source = claim.sources.get(&it.peer);
                source.is_some_and(|source| {
                    (it.incarnation.is_none() || source.meant == it.incarnation)
                        && source.readers == it.readers
                        && source.need.covers(it.need)
                })
            };
            if from.len() == claim.sources.len() && from.iter().all(is_it) {
                claim.claimed = false;
                claim.deadline = claim.deadline.min(now + budget);
                if claim.is_answered() {
                    self.actions.push_back(ConsumerAction::Answered { id: id.clone() });
                }
                from.iter().for_each(|rank| self.go_on(id, rank.peer, now));
                self.look_again(id);
                return Ok(());
            }
            // A producer was restarted since, or another request needs more of the handoff.
            self.forget_claim(id);
        }
        self.check_new(id)?;
        self.ask(id, from, now + budget, false, now)
    }

    fn ask(
        &mut self,
        id: &HandoffId,
        from: &[ProducerRank],
        deadline: Timestamp,
        claimed: bool,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        if self.handoffs.len() >= self.limits.handoffs {
            return Err(Refusal::Full { limit: self.limits.handoffs });
        }
        // Before the first connection, the driver reports a failure to connect by `lost`.
        let apart = Link::Down { until: deadline, code: WireCode::Deadline };
        let source = |rank: &ProducerRank| {
            (rank.peer, Source::new(rank, if rank.connected { Link::Up } else { apart }))
        };
        let sources: BTreeMap<_, _> = from.iter().map(source).collect();
        if sources.is_empty() || sources.len() != from.len() {
            return Err(Refusal::Misuse("it has to come from somewhere, and each rank once"));
        }
        if from.iter().any(|rank| rank.readers == 0) {
            return Err(Refusal::Misuse("a producer rank has this reader at least"));
        }
        // The producers' own answers come first.
        let rendezvous = now + self.limits.rendezvous + self.limits.grace;
        let entry =
            Entry { began: now, deadline, rendezvous, claimed, sources, ending: None, due: None };
        self.handoffs.insert(id.clone(), entry);
        from.iter().for_each(|rank| self.watch(rank.peer, true));
        for rank in from.iter().filter(|rank| rank.connected) {
            self.say(id, rank.peer, now);
        }
        self.look_again(id);
        Ok(())
    }

    /// Declines a handoff that this rank has not fetched, so that the producers free its blocks: the
    /// request is in the cache already, or was aborted or rejected before it was scheduled. Ends a
    /// [claim](Consumer::claim). Each producer is given with the incarnation that is meant, as in
    /// [`ProducerRank::incarnation`]; another incarnation gets no message.
    ///
    /// # Errors
    /// [`Refusal::InUse`]: the handoff is under way, use [`Consumer::cancel`]. [`Refusal::Ended`].
    pub fn free(
        &mut self,
        id: &HandoffId,
        from: &[(PeerId, Option<Incarnation>)],
        code: WireCode,
        detail: &str,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        self.expire(now);
        let claimed_from = self.forget_claim(id);
        self.check_new(id)?;
        let mut peers: BTreeMap<_, _> = claimed_from.into_iter().collect();
        for &(peer, meant) in from {
            let claimed = peers.entry(peer).or_default();
            *claimed = meant.or(*claimed);
        }
        for (peer, meant) in peers {
            self.bid_farewell(id, (peer, meant), &Outcome::here(code, detail), now);
        }
        self.tombstones.bury(id.clone(), code, now, &self.limits);
        Ok(())
    }

    /// Ends a handoff from this side. Its blocks are free with [`ConsumerAction::Ended`]. A claim ends
    /// as by [`Consumer::free`].
    ///
    /// If everything has been read and only the confirmation is missing, the handoff still waits
    /// for it: the producer may have ended it as *done*, and both sides must agree.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: the handoff has ended, see [`ConsumerAction::Ended`].
    pub fn cancel(
        &mut self,
        id: &HandoffId,
        code: WireCode,
        detail: &str,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        let entry = self.handoffs.get(id).ok_or(Refusal::Unknown)?;
        if entry.claimed {
            return self.free(id, &[], code, detail, now);
        }
        if !entry.is_settled() {
            self.fail(id, Outcome::here(code, detail), now);
        }
        Ok(())
    }

    /// Ends all handoffs, because this rank shuts down.
    pub fn close(&mut self, now: Timestamp) {
        let all: Vec<_> = self.handoffs.keys().cloned().collect();
        for id in all {
            let (code, detail) = (WireCode::Shutdown, "the consumer has left");
            match self.handoffs[&id].claimed {
                true => drop(self.free(&id, &[], code, detail, now)),
                false => self.fail(&id, Outcome::here(code, detail), now),
            }
        }
    }

    /// A read has ended: it writes nothing any more.
    ///
    /// After [`WireCode::Closed`] or [`WireCode::Silent`] the read is issued again when the peer is
    /// [connected](Consumer::met) again. Any other failure fails the handoff.
    pub fn read_ended(
        &mut self,
        read: ReadId,
        result: Result<(), (WireCode, String)>,
        now: Timestamp,
    ) {
        let Some((id, peer)) = self.reads.remove(&read) else { return };
        let entry = self.handoffs.get_mut(&id).expect("it ends after its reads");
        let reconnect = now + self.limits.reconnect;
        let source = entry.sources.get_mut(&peer).expect("read from");
        let Some(at) = source.reads.iter().position(|known| known.read == read) else {
            source.draining -= 1;
            if entry.ending.is_some() {
                self.finish_if_quiet(&id, now);
            } else {
                self.go_on(&id, peer, now);
            }
            return;
        };
        match result {
            Ok(()) => {
                source.reads[at].done = true;
                source.count_fetched();
                if source.is_read() {
                    let tables = source.announced.drop_tables();
                    self.announced.reduce(&(id.clone(), peer), tables);
                }
                self.go_on(&id, peer, now);
            }
            Err((code @ (WireCode::Closed | WireCode::Silent), _)) => {
                source.reads.remove(at);
                let others = source.forget_reads();
                if source.link == Link::Up {
                    source.link = Link::Down { until: reconnect, code };
                }
                self.cancel_reads(others);
                self.look_again(&id);
            }
            Err((code, detail)) => {
                source.reads.remove(at);
                self.fail(&id, Outcome::of(peer, code, detail), now);
            }
        }
    }

    /// The connection to a peer was lost. `gone` means that it will not come back, because the
    /// peer's process has ended or the silence window has passed. The window of a handoff begins with
    /// the handoff: a session that is found silent a moment later says little about a peer that may
    /// have been stopped and runs again by now. The driver connects again meanwhile.
    pub fn lost(&mut self, peer: PeerId, code: WireCode, gone: bool, now: Timestamp) {
        let is_restarted = gone && code == WireCode::StaleIncarnation;
        let (mut touched, mut unanswered) = (Vec::new(), Vec::new());
        for (id, entry) in &mut self.handoffs {
            let is_answered = entry.is_answered();
            let Some(source) = entry.sources.get_mut(&peer) else { continue };
            if source.stage == Stage::Confirmed || entry.ending.is_some() {
                continue;
            }
            if is_restarted && !is_answered {
                unanswered.push(id.clone());
                continue;
            }
            let until = match gone {
                true if code == WireCode::Silent => now.max(entry.began + self.limits.silence),
                true => now,
                false => now + self.limits.reconnect,
            };
            let until = match source.link {
                Link::Down { until: before, .. } if !gone => until.min(before),
                _ => until,
            };
            source.link = Link::Down { until, code };
            touched.push(id.clone());
        }
        touched.iter().for_each(|id| self.look_again(id));
        unanswered.iter().for_each(|id| self.forget_unanswered(id, peer));
        self.expire(now);
        if gone && code != WireCode::Silent {
            // A restarted peer keeps nothing. A silent peer may only have been stopped, and still
            // keeps its offers.
            self.farewells.forget(peer);
        }
    }

    /// Peers that do not know yet that a handoff has ended. The driver should connect to them.
    pub fn unheard(&self) -> impl Iterator<Item = PeerId> + '_ {
        self.farewells.peers()
    }

    /// A connection to a peer is up: the first, or another one. Handoffs that mean another incarnation of the rank end, and
    /// this incarnation gets no message of their ends.
    pub fn met(&mut self, peer: PeerId, incarnation: Incarnation, now: Timestamp) {
        let (mut touched, mut stale) = (Vec::new(), Vec::new());
        for (id, entry) in &mut self.handoffs {
            let Some(source) = entry.sources.get_mut(&peer) else { continue };
            source.is_gone = *source.meant.get_or_insert(incarnation) != incarnation;
            if source.is_gone {
                if source.stage != Stage::Confirmed {
                    stale.push((id.clone(), entry.is_answered()));
                }
            } else if source.link != Link::Up {
                source.link = Link::Up;
                touched.push(id.clone());
            }
        }
        for (id, is_answered) in stale {
            match is_answered {
                true => self.fail(&id, restarted(peer), now),
                false => self.forget_unanswered(&id, peer),
            }
        }
        for id in touched {
            self.look_again(&id);
            if self.handoffs[&id].ending.is_none() {
                self.say(&id, peer, now);
                self.go_on(&id, peer, now);
            }
        }
        let farewells = self.farewells.met(peer, incarnation);
        self.actions
            .extend(farewells.map(|stop| ConsumerAction::Send { to: peer, message: stop.into() }));
    }

    /// When [`Consumer::expire`] is due.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        let due = [self.schedule.next(), self.tombstones.next(), self.farewells.next()];
        due.into_iter().flatten().min()
    }

    /// Ends the handoffs whose deadlines have passed.
    pub fn expire(&mut self, now: Timestamp) {
        while let Some(id) = self.schedule.pop(now) {
            let grace = self.limits.grace;
            let entry = self.handoffs.get_mut(&id).expect("what is due is there");
            entry.due = None;
            match entry.overdue(now, grace) {
                Some(outcome) => self.fail(&id, outcome, now),
                None => self.look_again(&id),
            }
        }
        self.farewells.expire(now);
        self.tombstones.expire(now);
    }

    /// The next action.
    pub fn poll(&mut self) -> Option<ConsumerAction> {
        self.actions.pop_front()
    }

    /// The producer's blocks that were announced and are needed, group by group.
    pub fn table<'a>(
        &'a self,
        id: &HandoffId,
        peer: PeerId,
    ) -> Option<impl ExactSizeIterator<Item = &'a BlockTable> + use<'a>> {
        let source = self.handoffs.get(id)?.sources.get(&peer)?;
        Some(source.announced.tables.iter().map(|it| &it.table))
    }

    /// The deadline of a handoff that is under way. Reads need no deadline of their own.
    pub fn deadline(&self, id: &HandoffId) -> Option<Timestamp> {
        self.handoffs.get(id).map(|entry| entry.deadline)
    }

    /// What a handoff waits for from a peer, as one word; `None` if for nothing.
    pub fn state(&self, id: &HandoffId, peer: PeerId) -> Option<&'static str> {
        let entry = self.handoffs.get(id)?;
        let source = entry.sources.get(&peer)?;
        Some(match (&entry.ending, source.stage) {
            _ if entry.claimed => "claimed",
            (Some(_), _) => "ending",
            (None, Stage::Asking | Stage::Expected) => "asking",
            (None, Stage::Reading) => "reading",
            (None, Stage::Confirming) => "confirming",
            (None, Stage::Confirmed) => "confirmed",
        })
    }

    /// Sizes of the collections, by name. When no handoff is under way all are zero, except for the
    /// tombstones and for the farewells to peers without a connection.
    pub fn gauges(&self) -> [(&'static str, usize); 8] {
        let claimed = self.handoffs.values().filter(|entry| entry.claimed).count();
        [
            ("claimed", claimed),
            ("wanted", self.handoffs.len() - claimed),
            ("reads", self.reads.len()),
            ("watched", self.watched.len()),
            ("actions", self.actions.len()),
            ("announced_bytes", self.announced.size()),
            ("farewells", self.farewells.len()),
            ("tombstones", self.tombstones.len()),
        ]
    }

    fn check_new(&self, id: &HandoffId) -> Result<(), Refusal> {
        match self.tombstones.get(id) {
            Some(code) => Err(Refusal::Ended(*code)),
            None if self.handoffs.contains_key(id) => Err(Refusal::InUse),
            None => Ok(()),
        }
    }

    /// Queues the message that the producer needs next: `Ask` or `Confirm`.
    fn say(&mut self, id: &HandoffId, to: PeerId, now: Timestamp) {
        let entry = &self.handoffs[id];
        let source = &entry.sources[&to];
        let message: HandoffMessage = match source.stage {
            Stage::Asking | Stage::Expected | Stage::Reading => {
                let budget = entry.deadline.saturating_since(now).as_millis();
                let budget_ms = u32::try_from(budget).unwrap_or(u32::MAX);
                Ask { id: id.clone(), readers: source.readers, budget_ms }.into()
            }
            Stage::Confirming => Confirm { id: id.clone(), generation: source.generation }.into(),
            Stage::Confirmed => return,
        };
        self.actions.push_back(ConsumerAction::Send { to, message });
    }

    /// Issues reads of what is ready, and requests the confirmation when everything is read.
    fn go_on(&mut self, id: &HandoffId, from: PeerId, now: Timestamp) {
        let entry = self.handoffs.get_mut(id).expect("it is under way");
        if entry.claimed {
            return;
        }
        let source = entry.sources.get_mut(&from).expect("of this handoff");
        if source.stage != Stage::Reading || source.draining > 0 || source.link != Link::Up {
            return;
        }
        while source.reads.len() < self.limits.reads.max(1)
            && let Some(slice) = source.next_slice()
        {
            self.reads_begun += 1;
            let read = ReadId(self.reads_begun);
            source.taken = slice.to;
            source.last_taken = slice.last;
            source.reads.push_back(Read { read, slice, done: false });
            self.reads.insert(read, (id.clone(), from));
            self.actions.push_back(ConsumerAction::Read { read, id: id.clone(), from, slice });
        }
        if source.is_read() {
            source.stage = Stage::Confirming;
            self.say(id, from, now);
            self.look_again(id);
        }
    }

    /// Begins to end a handoff: cancels its reads and notifies its producers.
    fn fail(&mut self, id: &HandoffId, outcome: Outcome, now: Timestamp) {
        let entry = self.handoffs.get_mut(id).expect("it is under way");
        if entry.claimed {
            self.forget_claim(id);
            return;
        }
        if entry.ending.is_some() {
            return;
        }
        entry.ending = Some(outcome.clone());
        let reads: Vec<_> = entry.sources.values_mut().flat_map(Source::forget_reads).collect();
        let unwatched =
            |(peer, it): (&PeerId, &Source)| (it.stage != Stage::Confirmed).then_some(*peer);
        let unwatched: Vec<_> = entry.sources.iter().filter_map(unwatched).collect();
        let told = entry.sources.iter().filter(|(_, it)| !it.is_gone);
        let told: Vec<_> = told.map(|(peer, it)| (*peer, it.meant)).collect();
        self.cancel_reads(reads);
        unwatched.into_iter().for_each(|peer| self.watch(peer, false));
        for to in told {
            self.bid_farewell(id, to, &outcome, now);
        }
        self.finish_if_quiet(id, now);
    }

    /// Ends a handoff whose outcome is decided, if no read of it is under way.
    fn finish_if_quiet(&mut self, id: &HandoffId, now: Timestamp) {
        self.look_again(id);
        let entry = &self.handoffs[id];
        let is_quiet = |source: &Source| source.draining == 0 && source.reads.is_empty();
        if entry.ending.is_none() || !entry.sources.values().all(is_quiet) {
            return;
        }
        let entry = self.take(id);
        let outcome = entry.ending.expect("it is decided");
        let side_data = match outcome.is_done() {
            true => entry.sources.into_iter(),
            false => BTreeMap::new().into_iter(),
        };
        let side_data =
            side_data.filter_map(|(peer, source)| Some((peer, source.announced.side_data?)));
        self.tombstones.bury(id.clone(), outcome.code, now, &self.limits);
        let side_data = side_data.collect();
        self.actions.push_back(ConsumerAction::Ended { id: id.clone(), outcome, side_data });
    }

    /// Forgets a claim as if it had never been made, and returns the producers that were asked.
    fn forget_claim(&mut self, id: &HandoffId) -> Vec<(PeerId, Option<Incarnation>)> {
        if self.handoffs.get(id).is_none_or(|entry| !entry.claimed) {
            return Vec::new();
        }
        let sources = self.take(id).sources.into_iter();
        let peers: Vec<_> = sources.map(|(peer, source)| (peer, source.meant)).collect();
        peers.iter().for_each(|(peer, _)| self.watch(*peer, false));
        peers
    }

    /// Ends a handoff that no producer has answered, and one of whose producers was restarted, as if it had never
    /// been asked for: the incarnation that is there may have it.
    fn forget_unanswered(&mut self, id: &HandoffId, gone: PeerId) {
        let outcome = restarted(gone);
        if self.handoffs.get(id).is_some_and(|entry| entry.claimed) {
            self.forget_claim(id);
            return;
        }
        for (peer, source) in self.take(id).sources {
            self.watch(peer, false);
            if source.link == Link::Up && peer != gone {
                // It was asked. A farewell would be repeated after the name was asked for again.
                let (code, detail) = (outcome.code, outcome.detail.clone());
                let stop = Stop { id: id.clone(), by_consumer: true, code, detail };
                self.actions.push_back(ConsumerAction::Send { to: peer, message: stop.into() });
            }
        }
        let ended = ConsumerAction::Ended { id: id.clone(), outcome, side_data: Vec::new() };
        self.actions.push_back(ended);
    }

    /// Removes a handoff that is under way, with its timer and its part of the announcements' memory.
    fn take(&mut self, id: &HandoffId) -> Entry {
        self.release_all(id);
        let mut entry = self.handoffs.remove(id).expect("it is under way");
        self.schedule.set(id, &mut entry.due, None);
        entry
    }

    fn release_all(&mut self, id: &HandoffId) {
        let peers = self.handoffs.get(id).into_iter().flat_map(|entry| entry.sources.keys());
        peers.for_each(|peer| self.announced.remove(&(id.clone(), *peer)));
    }

    fn watch(&mut self, peer: PeerId, on: bool) {
        let changes = if on { self.watched.add(peer) } else { self.watched.remove(peer) };
        if changes {
            self.actions.push_back(ConsumerAction::Watch { peer, on });
        }
    }

    fn cancel_reads(&mut self, reads: impl IntoIterator<Item = ReadId>) {
        self.actions.extend(reads.into_iter().map(ConsumerAction::CancelRead));
    }

    /// Notifies a producer that a handoff has ended, again after each reconnection, until the
    /// producer answers.
    fn bid_farewell(
        &mut self,
        id: &HandoffId,
        (to, meant): (PeerId, Option<Incarnation>),
        outcome: &Outcome,
        now: Timestamp,
    ) {
        if let Some(stop) = self.farewells.bid(id, (to, meant), outcome, now, &self.limits) {
            self.actions.push_back(ConsumerAction::Send { to, message: stop.into() });
        }
    }

    fn look_again(&mut self, id: &HandoffId) {
        let grace = self.limits.grace;
        let Some(entry) = self.handoffs.get_mut(id) else { return };
        let due = entry.next_due(grace);
        self.schedule.set(id, &mut entry.due, due);
    }
}

fn restarted(peer: PeerId) -> Outcome {
    Outcome::of(peer, WireCode::StaleIncarnation, "the producer was restarted")
}
