//! The side that has the KV.

mod entry;

use super::declined::Declined;
use super::message::{
    Announced, Announcements, Ask, Confirm, Confirmed, Expected, Offer, Ready, Stop,
};
use super::schedule::Schedule;
use super::tombstones::Tombstones;
use super::watched::Watched;
use super::{
    BlockTable, Generation, HandoffId, HandoffMessage, Limits, Need, Outcome, PackedTable, PeerId,
    Progress, Refusal, cut,
};
use crate::code::WireCode;
use crate::origin::Origin;
use crate::shares::Shares;
use crate::time::Timestamp;
use entry::{Entry, Offered, Overdue, Reader, Stage};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::time::Duration;

/// Number of handoffs of one transfer id that are examined to find out whether their prompts differ.
const PROMPTS_MAX: usize = 64;

/// An action for the driver of a [`Producer`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum ProducerAction {
    /// Send a message to a consumer rank. If the connection is gone, drop it: [`Producer::met`] queues
    /// again what the peer needs.
    Send { to: PeerId, message: HandoffMessage },
    /// Start or stop the heartbeat to a consumer rank. It must run while a handoff waits for the peer.
    Watch { peer: PeerId, on: bool },
    /// The handoff has ended on this rank, and its blocks may be reused. Exactly once for every
    /// accepted [`Producer::offer`]. If it is done, it is at all consumers that confirmed.
    Ended { id: HandoffId, outcome: Outcome },
}

/// The handoffs that one rank produces. See [`crate::handoff`] for the protocol and for how it is
/// driven.
#[derive(Debug)]
pub struct Producer {
    limits: Limits,
    handoffs: HashMap<HandoffId, Entry>,
    /// Handoffs that are expected or offered, in order: those of one transfer id are adjacent.
    own: BTreeSet<HandoffId>,
    tombstones: Tombstones<Tombstone>,
    declined: Declined,
    /// Entries that are neither expected nor offered, each of the peer that asked first.
    awaited: Shares<HandoffId>,
    schedule: Schedule,
    watched: Watched,
    generations: u64,
    actions: VecDeque<ProducerAction>,
}

#[derive(Debug)]
struct Tombstone {
    generation: Generation,
    outcome: Outcome,
    /// Readers that confirmed before it ended.
    confirmed: Vec<PeerId>,
}

impl Producer {
    /// A producer of no handoffs.
    pub fn new(limits: Limits) -> Self {
        Self {
            awaited: Shares::new(limits.handoffs),
            declined: Declined::new(&limits),
            limits,
            handoffs: HashMap::new(),
            own: BTreeSet::new(),
            tombstones: Tombstones::default(),
            schedule: Schedule::default(),
            watched: Watched::default(),
            generations: 0,
            actions: VecDeque::new(),
        }
    }

    /// A request has arrived at this engine and will be offered; it may wait in the engine's queue. Consumers that ask
    /// get `Expected`, and wait for as long as it does. It ends with [`Producer::withdraw`], or if it is not offered
    /// within [`Limits::cap`]. There is no action for this end: [`Producer::offer`] is refused then.
    ///
    /// # Errors
    /// As [`Producer::offer`].
    pub fn expect(&mut self, id: &HandoffId, now: Timestamp) -> Result<(), Refusal> {
        self.check_new(id, now)?;
        if self.own.contains(id) {
            return Err(Refusal::InUse);
        }
        self.enter(id, Stage::Expected(now + self.limits.cap));
        let readers: Vec<_> = self.handoffs[id].readers.keys().copied().collect();
        readers.into_iter().for_each(|reader| self.answer(id, reader));
        Ok(())
    }

    /// Offers a request's KV. No block needs to be ready yet. The engine must not reuse the blocks
    /// until [`ProducerAction::Ended`], or until [`Producer::restart`] or [`Producer::withdraw`].
    ///
    /// # Errors
    /// [`Refusal::Ended`] if the consumer declined it before it was offered; [`Refusal::InUse`];
    /// [`Refusal::Full`].
    pub fn offer(&mut self, id: &HandoffId, now: Timestamp) -> Result<(), Refusal> {
        self.check_new(id, now)?;
        if self.handoffs.get(id).is_some_and(|entry| entry.offer().is_some()) {
            return Err(Refusal::InUse);
        }
        self.begin(id);
        Ok(())
    }

    /// Announces that more is ready. `tables` are the added blocks, group by group, or empty;
    /// `progress` is how far all blocks are computed now.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: the handoff has ended, see [`ProducerAction::Ended`].
    /// [`Refusal::Misuse`]: the handoff is complete, or `tables` and `progress` do not continue
    /// what was announced.
    pub fn advance(
        &mut self,
        id: &HandoffId,
        tables: Vec<BlockTable>,
        progress: Progress,
    ) -> Result<(), Refusal> {
        let tables = tables.iter().map(PackedTable::from).collect();
        self.announce(id, Announced { tables, progress, ..Announced::default() })
    }

    /// Announces that everything is ready, with side data for the consumer's engine. The handoff
    /// ends if no consumer asks for it within [`Limits::offer_ttl`].
    ///
    /// # Errors
    /// As [`Producer::advance`].
    pub fn complete(
        &mut self,
        id: &HandoffId,
        tables: Vec<BlockTable>,
        progress: Progress,
        side_data: Option<Vec<u8>>,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        if side_data.as_ref().is_some_and(|data| data.len() > super::SIDE_DATA_MAX) {
            return Err(Refusal::Misuse("more side data than a message can carry"));
        }
        let tables = tables.iter().map(PackedTable::from).collect();
        self.announce(id, Announced { count: 0, tables, progress, last: true, side_data })?;
        let expires = now + self.limits.offer_ttl;
        self.offered(id).expect("it was announced").expires = Some(expires);
        self.look_again(id);
        Ok(())
    }

    /// Retires the generation: the engine takes the blocks back and will compute the request again
    /// in other blocks. Consumers discard what they have read. The blocks may be reused as soon as
    /// this returns.
    ///
    /// # Errors
    /// As [`Producer::advance`].
    pub fn restart(&mut self, id: &HandoffId) -> Result<(), Refusal> {
        if self.offered(id)?.announced.last {
            return Err(Refusal::Misuse("it was complete"));
        }
        self.begin(id);
        Ok(())
    }

    /// Ends a handoff from this side, also before it was offered: the request was rejected or
    /// aborted, failed, or finished before its length limit. The blocks may be reused as soon as
    /// this returns.
    ///
    /// # Errors
    /// [`Refusal::Ended`]: the handoff has ended, see [`ProducerAction::Ended`].
    pub fn withdraw(
        &mut self,
        id: &HandoffId,
        code: WireCode,
        detail: &str,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        self.expire(now);
        if let Some(ended) = self.ended(id) {
            return Err(Refusal::Ended(ended.code));
        }
        let outcome = Outcome::here(code, detail);
        if self.handoffs.contains_key(id) {
            self.end(id, outcome, now);
        } else {
            self.remember(id, outcome, now);
        }
        Ok(())
    }

    /// Withdraws an offer that no consumer has asked for, as if its time were up: the engine needs its
    /// blocks. Others stay as they are.
    pub fn reclaim(&mut self, id: &HandoffId, detail: &str, now: Timestamp) {
        self.expire(now);
        let entry = self.handoffs.get(id);
        if entry.is_some_and(|entry| entry.offer().is_some() && entry.readers.is_empty()) {
            self.end(id, Outcome::here(WireCode::Expired, detail), now);
        }
    }

    /// Ends all handoffs, because this rank shuts down.
    pub fn close(&mut self, now: Timestamp) {
        let all: Vec<_> = self.handoffs.keys().cloned().collect();
        for id in all {
            self.end(&id, Outcome::here(WireCode::Shutdown, "the producer has left"), now);
        }
    }

    /// A message arrived from a peer, whose session comes from `origin`.
    pub fn receive(
        &mut self,
        from: PeerId,
        origin: Origin,
        message: HandoffMessage,
        now: Timestamp,
    ) {
        self.expire(now);
        match message {
            HandoffMessage::Ask(ask) => self.asked(from, origin, &ask, now),
            HandoffMessage::Confirm(confirm) => self.confirm(from, &confirm, now),
            HandoffMessage::Stop(stop) if stop.by_consumer => self.stopped(from, origin, stop, now),
            // Messages for consumers, and messages of later versions.
            HandoffMessage::Offer(_)
            | HandoffMessage::Ready(_)
            | HandoffMessage::Expected(_)
            | HandoffMessage::Confirmed(_)
            | HandoffMessage::Stop(_)
            | HandoffMessage::Unknown { .. } => {}
        }
    }

    /// The connection to a peer was lost. `gone` means that it will not come back, because the
    /// peer's process has ended or the silence window has passed.
    pub fn lost(&mut self, peer: PeerId, code: WireCode, gone: bool, now: Timestamp) {
        let wait = if gone { Duration::ZERO } else { self.limits.reconnect };
        let mut touched = Vec::new();
        for (id, entry) in &mut self.handoffs {
            if let Some(reader) = entry.readers.get_mut(&peer) {
                let until = reader.lost.map_or(now + wait, |(until, _)| until.min(now + wait));
                reader.lost = Some((until, code));
                touched.push(id.clone());
            }
        }
        touched.iter().for_each(|id| self.look_again(id));
        self.expire(now);
    }

    /// A connection to a peer is up: the first, or another one to the same incarnation of the rank.
    pub fn met(&mut self, peer: PeerId) {
        let mut touched = Vec::new();
        for (id, entry) in &mut self.handoffs {
            if entry.readers.get_mut(&peer).is_some_and(|reader| reader.lost.take().is_some()) {
                touched.push(id.clone());
            }
        }
        touched.iter().for_each(|id| self.look_again(id));
    }

    /// Time when [`Producer::expire`] is due.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        let tombs = [self.tombstones.next(), self.declined.next()];
        tombs.into_iter().chain([self.schedule.next()]).flatten().min()
    }

    /// Ends the handoffs whose deadlines have passed.
    pub fn expire(&mut self, now: Timestamp) {
        while let Some(id) = self.schedule.pop(now) {
            let entry = self.handoffs.get_mut(&id).expect("what is due is there");
            entry.due = None;
            match entry.overdue(now) {
                Some(Overdue::Rendezvous) => {
                    let detail = self.why_not_here(&id);
                    self.give_up_awaited(&id, WireCode::UnknownHandoff, &detail);
                }
                // The consumers that asked have stopped waiting, whether it is offered or not.
                Some(Overdue::Ends(outcome)) => self.end(&id, outcome, now),
                None => self.look_again(&id),
            }
        }
        self.tombstones.expire(now);
        self.declined.expire(now);
    }

    /// The next action.
    pub fn poll(&mut self) -> Option<ProducerAction> {
        self.actions.pop_front()
    }

    /// The state of a handoff, as one word; `None` if it is not under way.
    pub fn state(&self, id: &HandoffId) -> Option<&'static str> {
        let entry = self.handoffs.get(id)?;
        Some(match (&entry.stage, entry.readers.is_empty()) {
            (Stage::Awaited(..), _) => "awaited",
            (Stage::Expected(_), _) => "expected",
            (Stage::Offered(_), true) => "offered",
            (Stage::Offered(_), false) => "serving",
        })
    }

    /// Sizes of the collections, by name. All but the tombstones are zero when no handoff is under
    /// way.
    pub fn gauges(&self) -> [(&'static str, usize); 6] {
        let offered = self.handoffs.values().filter(|entry| entry.offer().is_some()).count();
        [
            ("offered", offered),
            ("expected", self.own.len() - offered),
            ("awaited", self.handoffs.len() - self.own.len()),
            ("watched", self.watched.len()),
            ("actions", self.actions.len()),
            ("tombstones", self.tombstones.len() + self.declined.len()),
        ]
    }

    /// Whether the engine may expect or offer a handoff.
    fn check_new(&mut self, id: &HandoffId, now: Timestamp) -> Result<(), Refusal> {
        self.expire(now);
        if let Some(ended) = self.ended(id) {
            return Err(Refusal::Ended(ended.code));
        }
        if !self.handoffs.contains_key(id) && self.own.len() >= self.limits.handoffs {
            return Err(Refusal::Full { limit: self.limits.handoffs });
        }
        Ok(())
    }

    /// Returns the outcome of an ended handoff, if it is remembered.
    fn ended(&self, id: &HandoffId) -> Option<&Outcome> {
        self.tombstones.get(id).map(|it| &it.outcome).or_else(|| self.declined.get(id))
    }

    /// Takes a handoff to a stage.
    fn enter(&mut self, id: &HandoffId, stage: Stage) {
        if !matches!(stage, Stage::Awaited(..)) {
            self.own.insert(id.clone());
            self.awaited.remove(id);
        }
        if let Some(entry) = self.handoffs.get_mut(id) {
            entry.stage = stage;
        } else {
            let entry = Entry { stage, must_confirm: 0, readers: BTreeMap::new(), due: None };
            self.handoffs.insert(id.clone(), entry);
        }
        self.look_again(id);
    }

    /// Begins a generation, and offers it to the readers that have asked.
    fn begin(&mut self, id: &HandoffId) {
        self.generations += 1;
        let generation = Generation(self.generations);
        let announced = Announcements::default();
        self.enter(id, Stage::Offered(Offered { generation, announced, expires: None }));
        let readers: Vec<_> = self.handoffs[id].readers.keys().copied().collect();
        readers.into_iter().for_each(|reader| self.answer(id, reader));
    }

    fn offered(&mut self, id: &HandoffId) -> Result<&mut Offered, Refusal> {
        match self.handoffs.get_mut(id).map(|entry| &mut entry.stage) {
            Some(Stage::Offered(offered)) => Ok(offered),
            _ => Err(Refusal::Unknown),
        }
    }

    fn announce(&mut self, id: &HandoffId, mut news: Announced) -> Result<(), Refusal> {
        let offered = self.offered(id)?;
        news.count = offered.announced.count.wrapping_add(1);
        offered.announced.check_next(&news)?;
        let merged = offered.announced.merge(&news, Need::ALL);
        merged.map_err(|_| Refusal::Misuse("blocks do not go on"))?;
        let generation = offered.generation;
        let readers = &self.handoffs[id].readers;
        let connected = readers.iter().filter(|(_, reader)| reader.lost.is_none());
        for (&to, _) in connected {
            let ready = Ready { id: id.clone(), generation, announced: news.clone() };
            self.actions.push_back(ProducerAction::Send { to, message: ready.into() });
        }
        Ok(())
    }

    fn asked(&mut self, from: PeerId, origin: Origin, ask: &Ask, now: Timestamp) {
        let id = &ask.id;
        if let Some(ended) = self.ended(id) {
            // Every reader has confirmed: this consumer was not among them.
            let code = match ended.code {
                WireCode::Ok => WireCode::Duplicate,
                code => code,
            };
            let stop = stop(id, code, &ended.detail);
            return self.send(from, stop);
        }
        if !self.handoffs.contains_key(id) {
            // Requests of peers leave room for this side's own offers, and those of one network leave room for others.
            self.awaited.add(id, origin, from.0, 1);
            if let Some(excess) = self.awaited.excess(id) {
                let limit = self.limits.handoffs;
                let detail = format!("{limit} handoffs are awaited, which is the limit");
                if excess == *id {
                    self.awaited.remove(id);
                    return self.send(from, stop(id, WireCode::Busy, &detail));
                }
                self.give_up_awaited(&excess, WireCode::Busy, &detail);
            }
            self.enter(id, Stage::Awaited(now + self.limits.rendezvous, origin));
        }
        let entry = self.handoffs.get_mut(id).expect("there now");
        let is_new = !entry.readers.contains_key(&from);
        if is_new && let Some(why) = entry.refuses(ask) {
            return self.send(from, stop(id, WireCode::Duplicate, why));
        }
        entry.must_confirm = ask.readers;
        let budget = Duration::from_millis(ask.budget_ms.into()).min(self.limits.cap);
        let until = now + budget + self.limits.grace;
        let confirmed = entry.readers.get(&from).is_some_and(|reader| reader.confirmed);
        if entry.readers.insert(from, Reader { until, lost: None, confirmed }).is_none() {
            self.watch(from, true);
        }
        self.answer(id, from);
        self.look_again(id);
    }

    fn confirm(&mut self, from: PeerId, confirm: &Confirm, now: Timestamp) {
        let id = &confirm.id;
        let yes = Confirmed { id: id.clone(), generation: confirm.generation };
        if let Some(tombstone) = self.tombstones.get(id) {
            let was_valid =
                tombstone.generation == confirm.generation && tombstone.confirmed.contains(&from);
            let message = match (was_valid && tombstone.outcome.is_done(), tombstone.outcome.code) {
                (true, _) => yes.into(),
                (false, WireCode::Ok) => {
                    stop(id, WireCode::Duplicate, "another consumer has read it")
                }
                (false, code) => stop(id, code, &tombstone.outcome.detail),
            };
            return self.send(from, message);
        }
        if let Some(declined) = self.declined.get(id) {
            let message = stop(id, declined.code, &declined.detail);
            return self.send(from, message);
        }
        let Some(entry) = self.handoffs.get_mut(id) else {
            return self.send(from, stop(id, WireCode::UnknownHandoff, ""));
        };
        let (Stage::Offered(offered), Some(reader)) = (&entry.stage, entry.readers.get_mut(&from))
        else {
            return self.send(from, stop(id, WireCode::UnknownHandoff, "it was never asked for"));
        };
        if offered.generation != confirm.generation || !offered.announced.last {
            // The offer of the new generation was sent, or is queued.
            return self.answer(id, from);
        }
        reader.confirmed = true;
        self.send(from, yes.into());
        self.look_again(id);
        let entry = &self.handoffs[id];
        let confirmed = entry.readers.values().filter(|reader| reader.confirmed).count();
        if confirmed == entry.must_confirm as usize {
            self.end(id, Outcome::DONE, now);
        }
    }

    /// A consumer has ended a handoff. One reader ends it for all readers.
    fn stopped(&mut self, from: PeerId, origin: Origin, stopped: Stop, now: Timestamp) {
        let Stop { id, code, detail, .. } = stopped;
        // An answer, so that the consumer stops repeating it.
        self.send(from, stop(&id, code, ""));
        if self.ended(&id).is_some() {
            return;
        }
        let code = if code.is_ok() { WireCode::Malformed } else { code };
        let outcome = Outcome::of(from, code, detail);
        match self.handoffs.get_mut(&id) {
            // Before a consumer has asked, any peer that knows the name may end it; after that,
            // only its readers.
            Some(entry) if entry.readers.is_empty() || entry.readers.contains_key(&from) => {
                if entry.readers.remove(&from).is_some() {
                    self.watch(from, false);
                }
                self.end(&id, outcome, now);
            }
            Some(_) => {}
            None => self.declined.add(id, (from, origin), outcome, now),
        }
    }

    /// Ends a handoff: queues a message to each reader, and [`ProducerAction::Ended`] if it was
    /// offered. Keeps a tombstone.
    fn end(&mut self, id: &HandoffId, outcome: Outcome, now: Timestamp) {
        let Some(mut entry) = self.handoffs.remove(id) else { return };
        self.own.remove(id);
        self.schedule.set(id, &mut entry.due, None);
        entry.readers.keys().for_each(|reader| self.watch(*reader, false));
        if !outcome.is_done() {
            let stop = stop(id, outcome.code, &outcome.detail);
            for (reader, _) in entry.readers.iter().filter(|(_, reader)| reader.lost.is_none()) {
                self.send(*reader, stop.clone());
            }
        }
        self.awaited.remove(id);
        let offered = match (entry.stage, outcome.peer) {
            (Stage::Offered(offered), _) => offered,
            // Only peers have spoken of it.
            (Stage::Awaited(_, origin), Some(by)) => {
                return self.declined.add(id.clone(), (by, origin), outcome, now);
            }
            (Stage::Awaited(..) | Stage::Expected(_), _) => {
                return self.remember(id, outcome, now);
            }
        };
        let confirmed = entry.readers.iter().filter(|(_, reader)| reader.confirmed);
        let tombstone = Tombstone {
            generation: offered.generation,
            outcome: outcome.clone(),
            confirmed: confirmed.map(|(peer, _)| *peer).collect(),
        };
        self.tombstones.bury(id.clone(), tombstone, now, &self.limits);
        self.actions.push_back(ProducerAction::Ended { id: id.clone(), outcome });
    }

    /// Tells the consumers of a handoff why it is not awaited any longer. If its request arrives later, and they ask
    /// again, the handoff begins afresh.
    fn give_up_awaited(&mut self, id: &HandoffId, code: WireCode, detail: &str) {
        let Some(mut entry) = self.handoffs.remove(id) else { return };
        self.awaited.remove(id);
        self.schedule.set(id, &mut entry.due, None);
        for (reader, state) in entry.readers {
            self.watch(reader, false);
            if state.lost.is_none() {
                self.send(reader, stop(id, code, detail));
            }
        }
    }

    /// Explains why this engine has no request for a handoff.
    fn why_not_here(&self, id: &HandoffId) -> String {
        let transfer = id.transfer();
        let later = self.own.range::<str, _>((Bound::Included(transfer), Bound::Unbounded));
        let mut nearest = later.take(PROMPTS_MAX);
        if nearest.any(|other| other.transfer() == transfer) {
            "the producer's request of this transfer id has another prompt".to_owned()
        } else {
            let seconds = self.limits.rendezvous.as_secs_f64();
            format!("no such request arrived at the producer within {seconds} s")
        }
    }

    /// Remembers that a handoff ended before it was offered.
    fn remember(&mut self, id: &HandoffId, outcome: Outcome, now: Timestamp) {
        let tombstone = Tombstone { generation: Generation(0), outcome, confirmed: Vec::new() };
        self.tombstones.bury(id.clone(), tombstone, now, &self.limits);
    }

    fn watch(&mut self, peer: PeerId, on: bool) {
        let changes = if on { self.watched.add(peer) } else { self.watched.remove(peer) };
        if changes {
            self.actions.push_back(ProducerAction::Watch { peer, on });
        }
    }

    fn send(&mut self, to: PeerId, message: HandoffMessage) {
        self.actions.push_back(ProducerAction::Send { to, message });
    }

    /// Answers a reader's question with what is here: all that is announced, or that it is expected.
    fn answer(&mut self, id: &HandoffId, to: PeerId) {
        let entry = &self.handoffs[id];
        if entry.readers.get(&to).is_none_or(|reader| reader.lost.is_some()) {
            return;
        }
        let id = id.clone();
        match &entry.stage {
            Stage::Awaited(..) => {}
            Stage::Expected(_) => self.send(to, Expected { id }.into()),
            Stage::Offered(Offered { generation, announced, .. }) => {
                let (generation, announced) = (*generation, announced.announced());
                self.send(to, Offer { id, generation, announced }.into());
            }
        }
    }

    fn look_again(&mut self, id: &HandoffId) {
        let Some(entry) = self.handoffs.get_mut(id) else { return };
        let due = entry.next_due();
        self.schedule.set(id, &mut entry.due, due);
    }
}

fn stop(id: &HandoffId, code: WireCode, detail: &str) -> HandoffMessage {
    Stop { id: id.clone(), by_consumer: false, code, detail: cut(detail) }.into()
}

impl Announcements {
    /// Whether `news` continues what was announced.
    fn check_next(&self, news: &Announced) -> Result<(), Refusal> {
        if self.last {
            return Err(Refusal::Misuse("it was complete"));
        }
        if !news.progress.is_sound() || news.progress < self.progress {
            return Err(Refusal::Misuse("progress goes backwards"));
        }
        let tables = &news.tables;
        if tables.len() > super::GROUPS_MAX
            || (!self.tables.is_empty() && !tables.is_empty() && tables.len() != self.tables.len())
        {
            return Err(Refusal::Misuse("the number of groups differs"));
        }
        Ok(())
    }
}
