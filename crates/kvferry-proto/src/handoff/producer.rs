//! The side that has the KV.

use super::message::{Announced, Ask, Confirm, Confirmed, Offer, Ready, Stop};
use super::schedule::Schedule;
use super::tombs::Tombs;
use super::watched::Watched;
use super::{
    BlockTable, Generation, HandoffId, HandoffMessage, Limits, Outcome, PeerId, Progress, Refusal,
    cut,
};
use crate::code::WireCode;
use crate::time::Timestamp;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

/// What the driver of a [`Producer`] has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProducerAction {
    /// Send a message. If the connection is gone, drop it: what matters is said again.
    Send {
        /// To whom.
        to: PeerId,
        /// What.
        message: HandoffMessage,
    },
    /// Have the peer watched by heartbeat from now on, because something is expected of it; or no
    /// longer.
    Watch {
        /// Whom.
        peer: PeerId,
        /// From now on, or no longer.
        on: bool,
    },
    /// The handoff has ended on this rank: its blocks may be reused now. Said exactly once for
    /// every [`Producer::offer`] that was accepted.
    Ended {
        /// Which.
        id: HandoffId,
        /// How.
        outcome: Outcome,
    },
}

/// The handoffs that one rank produces. See [`crate::handoff`].
#[derive(Debug)]
pub struct Producer {
    limits: Limits,
    handoffs: HashMap<HandoffId, Entry>,
    /// How many of them have been asked for and not offered yet.
    awaited: usize,
    tombs: Tombs<Tomb>,
    schedule: Schedule,
    watched: Watched,
    generations: u64,
    actions: VecDeque<ProducerAction>,
}

#[derive(Debug, Default)]
struct Entry {
    /// What was offered; nothing yet if a consumer was first.
    offer: Option<Offered>,
    /// How many are to read; zero if nobody has asked.
    expected: u32,
    readers: BTreeMap<PeerId, Reader>,
    /// The driver's next look at this entry.
    due: Option<Timestamp>,
}

#[derive(Debug)]
struct Offered {
    generation: Generation,
    /// All of it, side data included.
    announced: Announced,
    /// When nobody will come any more; only of complete offers that nobody has asked for.
    expires: Option<Timestamp>,
}

#[derive(Debug)]
struct Reader {
    /// It will not be there any more after this.
    until: Timestamp,
    /// Its connection is gone: when it is given up, and why it went.
    lost: Option<(Timestamp, WireCode)>,
    confirmed: bool,
}

#[derive(Debug)]
struct Tomb {
    generation: Generation,
    outcome: Outcome,
    /// Who confirmed before it ended.
    confirmed: Vec<PeerId>,
}

impl Producer {
    /// A producer of no handoffs.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            handoffs: HashMap::new(),
            awaited: 0,
            tombs: Tombs::default(),
            schedule: Schedule::default(),
            watched: Watched::default(),
            generations: 0,
            actions: VecDeque::new(),
        }
    }

    /// Offers a request's KV, of which nothing needs to be ready yet. From now until
    /// [`ProducerAction::Ended`] its blocks are not to be reused, unless [`Producer::restart`] or
    /// [`Producer::withdraw`] is called first.
    ///
    /// # Errors
    /// [`Refusal::Ended`] if the consumer has said that it does not need it, before it was offered;
    /// [`Refusal::InUse`]; [`Refusal::Full`].
    pub fn offer(&mut self, id: &HandoffId, now: Timestamp) -> Result<(), Refusal> {
        self.expire(now);
        if let Some(tomb) = self.tombs.get(id) {
            return Err(Refusal::Ended(tomb.outcome.code));
        }
        let entry = self.handoffs.get(id);
        if entry.is_some_and(|entry| entry.offer.is_some()) {
            return Err(Refusal::InUse);
        }
        let entry_is_awaited = entry.is_some();
        if !entry_is_awaited && self.handoffs.len() - self.awaited >= self.limits.handoffs {
            return Err(Refusal::Full { limit: self.limits.handoffs });
        }
        let generation = self.next_generation();
        self.awaited -= usize::from(entry_is_awaited);
        let entry = self.handoffs.entry(id.clone()).or_default();
        entry.offer = Some(Offered { generation, announced: Announced::default(), expires: None });
        let readers: Vec<_> = entry.readers.keys().copied().collect();
        for reader in readers {
            self.send_offer(id, reader);
        }
        self.look_again(id);
        Ok(())
    }

    /// Says that more is ready: `tables` are the blocks that were added, group by group, or none at
    /// all; `progress` is how far they are computed now.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: it has ended, which was said. [`Refusal::Misuse`]: it does not go on
    /// from what was said before, or is complete.
    pub fn advance(
        &mut self,
        id: &HandoffId,
        tables: Vec<BlockTable>,
        progress: Progress,
    ) -> Result<(), Refusal> {
        self.announce(id, Announced { tables, progress, ..Announced::default() })
    }

    /// Says that all is ready, and what else the consumer's engine should know. If nobody asks for
    /// it within [`Limits::offer_ttl`], it ends.
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
        self.announce(id, Announced { count: 0, tables, progress, last: true, side_data })?;
        let expires = now + self.limits.offer_ttl;
        let entry = self.handoffs.get_mut(id).expect("it was announced");
        entry.offer.as_mut().expect("it was announced").expires = Some(expires);
        self.look_again(id);
        Ok(())
    }

    /// The engine takes the blocks back and will compute the request again, in others: what was
    /// read until now counts for nothing. The blocks may be reused as soon as this returns.
    ///
    /// # Errors
    /// As [`Producer::advance`].
    pub fn restart(&mut self, id: &HandoffId) -> Result<(), Refusal> {
        if self.offered(id)?.announced.last {
            return Err(Refusal::Misuse("it was complete"));
        }
        let generation = self.next_generation();
        let entry = self.handoffs.get_mut(id).expect("it is offered");
        let expires = None;
        entry.offer = Some(Offered { generation, announced: Announced::default(), expires });
        let readers: Vec<_> = entry.readers.keys().copied().collect();
        for reader in readers {
            self.send_offer(id, reader);
        }
        self.look_again(id);
        Ok(())
    }

    /// Ends a handoff from this side, also before it was offered: its request was rejected or
    /// aborted, has failed, or ended otherwise than at its length limit. Its blocks may be reused
    /// as soon as this returns.
    ///
    /// # Errors
    /// [`Refusal::Ended`]: it has ended already, which was said.
    pub fn withdraw(
        &mut self,
        id: &HandoffId,
        code: WireCode,
        detail: &str,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        self.expire(now);
        if let Some(tomb) = self.tombs.get(id) {
            return Err(Refusal::Ended(tomb.outcome.code));
        }
        let outcome = Outcome::here(code, detail);
        if self.handoffs.contains_key(id) {
            self.end(id, outcome, true, now);
        } else {
            self.remember(id, outcome, now);
        }
        Ok(())
    }

    /// Ends everything that is under way: this side goes.
    pub fn close(&mut self, now: Timestamp) {
        let all: Vec<_> = self.handoffs.keys().cloned().collect();
        for id in all {
            self.end(&id, Outcome::here(WireCode::Shutdown, "the producer has left"), true, now);
        }
    }

    /// A message came from a peer.
    pub fn receive(&mut self, from: PeerId, message: HandoffMessage, now: Timestamp) {
        self.expire(now);
        match message {
            HandoffMessage::Ask(ask) => self.asked(from, &ask, now),
            HandoffMessage::Confirm(confirm) => self.confirm(from, &confirm, now),
            HandoffMessage::Stop(stop) if stop.by_consumer => self.stop(from, stop, now),
            // For consumers, or of a later version.
            HandoffMessage::Offer(_)
            | HandoffMessage::Ready(_)
            | HandoffMessage::Confirmed(_)
            | HandoffMessage::Stop(_)
            | HandoffMessage::Unknown { .. } => {}
        }
    }

    /// The connection to a peer is gone. `gone` says that it will not come back: its process has
    /// ended, or it was silent for too long already.
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

    /// There is a connection to a peer: the first, or a new one to the same life.
    pub fn met(&mut self, peer: PeerId) {
        let mut touched = Vec::new();
        for (id, entry) in &mut self.handoffs {
            if entry.readers.get_mut(&peer).is_some_and(|reader| reader.lost.take().is_some()) {
                touched.push(id.clone());
            }
        }
        touched.iter().for_each(|id| self.look_again(id));
    }

    /// When [`Producer::expire`] has something to do next.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        [self.schedule.next(), self.tombs.next()].into_iter().flatten().min()
    }

    /// Ends what is overdue.
    pub fn expire(&mut self, now: Timestamp) {
        while let Some(id) = self.schedule.pop(now) {
            let entry = self.handoffs.get_mut(&id).expect("what is due is there");
            entry.due = None;
            match entry.overdue(now) {
                // Whoever has asked for it does not wait for it any more, whether it is offered yet
                // or not.
                Some(outcome) => self.end(&id, outcome, true, now),
                None => self.look_again(&id),
            }
        }
        self.tombs.expire(now);
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<ProducerAction> {
        self.actions.pop_front()
    }

    /// How far a handoff is, in a word; `None` if it is not under way.
    pub fn state(&self, id: &HandoffId) -> Option<&'static str> {
        let entry = self.handoffs.get(id)?;
        Some(match (&entry.offer, entry.readers.is_empty()) {
            (None, _) => "awaited",
            (Some(_), true) => "offered",
            (Some(_), false) => "serving",
        })
    }

    /// What is kept, by name; all but the tombs is zero when nothing is under way.
    pub fn gauges(&self) -> [(&'static str, usize); 5] {
        let offered = self.handoffs.values().filter(|entry| entry.offer.is_some()).count();
        [
            ("offered", offered),
            ("awaited", self.handoffs.len() - offered),
            ("watched", self.watched.len()),
            ("actions", self.actions.len()),
            ("tombs", self.tombs.len()),
        ]
    }

    fn next_generation(&mut self) -> Generation {
        self.generations += 1;
        Generation(self.generations)
    }

    fn offered(&mut self, id: &HandoffId) -> Result<&mut Offered, Refusal> {
        let entry = self.handoffs.get_mut(id);
        entry.and_then(|entry| entry.offer.as_mut()).ok_or(Refusal::Unknown)
    }

    fn announce(&mut self, id: &HandoffId, mut news: Announced) -> Result<(), Refusal> {
        let offered = self.offered(id)?;
        news.count = offered.announced.count.wrapping_add(1);
        offered.announced.check_next(&news)?;
        offered.announced.merge(&news).map_err(|_| Refusal::Misuse("blocks do not go on"))?;
        let generation = offered.generation;
        let readers = &self.handoffs[id].readers;
        let connected = readers.iter().filter(|(_, reader)| reader.lost.is_none());
        for (&to, _) in connected {
            let ready = Ready { id: id.clone(), generation, announced: news.clone() };
            self.actions.push_back(ProducerAction::Send { to, message: ready.into() });
        }
        Ok(())
    }

    fn asked(&mut self, from: PeerId, ask: &Ask, now: Timestamp) {
        let id = &ask.id;
        if let Some(tomb) = self.tombs.get(id) {
            // Done is done: whoever asks now was not among the readers.
            let code = match tomb.outcome.code {
                WireCode::Ok => WireCode::Duplicate,
                code => code,
            };
            let detail = cut(&tomb.outcome.detail);
            return self
                .send(from, Stop { id: id.clone(), by_consumer: false, code, detail }.into());
        }
        // Whatever peers ask for, this side can offer what it has.
        let full = self.awaited >= self.limits.handoffs;
        let entry = match self.handoffs.get_mut(id) {
            Some(entry) => entry,
            None if full => {
                let detail = format!("{} handoffs are under way", self.limits.handoffs);
                return self.send(
                    from,
                    Stop { id: id.clone(), by_consumer: false, code: WireCode::Busy, detail }
                        .into(),
                );
            }
            None => {
                self.awaited += 1;
                self.handoffs.entry(id.clone()).or_default()
            }
        };
        let stranger = !entry.readers.contains_key(&from);
        if stranger && let Some(why) = entry.refuses(ask) {
            let stop = Stop {
                id: id.clone(),
                by_consumer: false,
                code: WireCode::Duplicate,
                detail: why.to_owned(),
            };
            return self.send(from, stop.into());
        }
        entry.expected = ask.readers;
        let budget = Duration::from_millis(ask.budget_ms.into()).min(self.limits.budget);
        let until = now + budget + self.limits.grace;
        let confirmed = entry.readers.get(&from).is_some_and(|reader| reader.confirmed);
        if entry.readers.insert(from, Reader { until, lost: None, confirmed }).is_none() {
            self.watch(from, true);
        }
        self.send_offer(id, from);
        self.look_again(id);
    }

    fn confirm(&mut self, from: PeerId, confirm: &Confirm, now: Timestamp) {
        let id = &confirm.id;
        let answer = |code: WireCode, detail: &str| -> HandoffMessage {
            Stop { id: id.clone(), by_consumer: false, code, detail: detail.to_owned() }.into()
        };
        let yes = Confirmed { id: id.clone(), generation: confirm.generation };
        if let Some(tomb) = self.tombs.get(id) {
            let was_valid = tomb.generation == confirm.generation && tomb.confirmed.contains(&from);
            let message = match (was_valid && tomb.outcome.is_done(), tomb.outcome.code) {
                (true, _) => yes.into(),
                (false, WireCode::Ok) => answer(WireCode::Duplicate, "read by somebody else"),
                (false, code) => answer(code, &cut(&tomb.outcome.detail)),
            };
            return self.send(from, message);
        }
        let Some(entry) = self.handoffs.get_mut(id) else {
            return self.send(from, answer(WireCode::UnknownHandoff, ""));
        };
        let (Some(offered), Some(reader)) = (&entry.offer, entry.readers.get_mut(&from)) else {
            return self.send(from, answer(WireCode::UnknownHandoff, "it was never asked for"));
        };
        if offered.generation != confirm.generation || !offered.announced.last {
            // It is told of the new generation, or was.
            return self.send_offer(id, from);
        }
        reader.confirmed = true;
        self.send(from, yes.into());
        self.look_again(id);
        let entry = &self.handoffs[id];
        let confirmed = entry.readers.values().filter(|reader| reader.confirmed).count();
        if confirmed == entry.expected as usize {
            self.end(id, Outcome::DONE, true, now);
        }
    }

    /// A consumer has ended a handoff: one of its readers speaks for all of them.
    fn stop(&mut self, from: PeerId, stop: Stop, now: Timestamp) {
        let id = stop.id.clone();
        // So that it need not say it again.
        self.send(
            from,
            Stop { id: id.clone(), by_consumer: false, code: stop.code, detail: String::new() }
                .into(),
        );
        if self.tombs.get(&id).is_some() {
            return;
        }
        let code = if stop.code.is_ok() { WireCode::Malformed } else { stop.code };
        let outcome = Outcome::of(from, code, stop.detail);
        match self.handoffs.get_mut(&id) {
            // Not yet asked for: whoever knows the name may free it. Else only who reads it.
            Some(entry) if entry.readers.is_empty() || entry.readers.contains_key(&from) => {
                if entry.readers.remove(&from).is_some() {
                    self.watch(from, false);
                }
                self.end(&id, outcome, true, now);
            }
            Some(_) => {}
            None => self.remember(&id, outcome, now),
        }
    }

    /// Ends what is under way: readers are told, the driver is told if it had offered it. What was
    /// offered is remembered in any case; what was not, only if somebody wanted it to end.
    fn end(&mut self, id: &HandoffId, outcome: Outcome, wanted: bool, now: Timestamp) {
        let Some(mut entry) = self.handoffs.remove(id) else { return };
        self.awaited -= usize::from(entry.offer.is_none());
        self.schedule.set(id, &mut entry.due, None);
        entry.readers.keys().for_each(|reader| self.watch(*reader, false));
        if !outcome.is_done() {
            let stop = Stop {
                id: id.clone(),
                by_consumer: false,
                code: outcome.code,
                detail: cut(&outcome.detail),
            };
            for (reader, _) in entry.readers.iter().filter(|(_, reader)| reader.lost.is_none()) {
                self.send(*reader, stop.clone().into());
            }
        }
        let Some(offered) = entry.offer else {
            if wanted {
                self.remember(id, outcome, now);
            }
            return;
        };
        let confirmed = entry.readers.iter().filter(|(_, reader)| reader.confirmed);
        let tomb = Tomb {
            generation: offered.generation,
            outcome: outcome.clone(),
            confirmed: confirmed.map(|(peer, _)| *peer).collect(),
        };
        self.tombs.bury(id.clone(), tomb, now, &self.limits);
        self.actions.push_back(ProducerAction::Ended { id: id.clone(), outcome });
    }

    /// That a handoff has ended before anything was offered.
    fn remember(&mut self, id: &HandoffId, outcome: Outcome, now: Timestamp) {
        let tomb = Tomb { generation: Generation(0), outcome, confirmed: Vec::new() };
        self.tombs.bury(id.clone(), tomb, now, &self.limits);
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

    fn send_offer(&mut self, id: &HandoffId, to: PeerId) {
        let entry = &self.handoffs[id];
        let connected = entry.readers.get(&to).is_some_and(|reader| reader.lost.is_none());
        if let (true, Some(offered)) = (connected, &entry.offer) {
            let (generation, announced) = (offered.generation, offered.announced.clone());
            self.send(to, Offer { id: id.clone(), generation, announced }.into());
        }
    }

    fn look_again(&mut self, id: &HandoffId) {
        let Some(entry) = self.handoffs.get_mut(id) else { return };
        let due = entry.next_due();
        self.schedule.set(id, &mut entry.due, due);
    }
}

impl Entry {
    /// Why a consumer that has not asked before may not.
    fn refuses(&self, ask: &Ask) -> Option<&'static str> {
        if self.readers.is_empty() {
            None
        } else if ask.readers != self.expected {
            Some("others who asked for it count another number of readers")
        } else if self.readers.len() >= self.expected as usize {
            Some("all its readers have asked for it")
        } else {
            None
        }
    }

    fn next_due(&self) -> Option<Timestamp> {
        if self.readers.is_empty() {
            return self.offer.as_ref().and_then(|offer| offer.expires);
        }
        let due =
            |reader: &Reader| reader.lost.map_or(reader.until, |(at, _)| at.min(reader.until));
        // Who has confirmed is waited for no longer, except that others have to.
        self.readers.values().filter(|reader| !reader.confirmed).map(due).min().or_else(|| {
            // All who asked have confirmed, and others have yet to ask.
            self.readers.values().map(|reader| reader.until).max()
        })
    }

    /// How it ends, if it has to end now.
    fn overdue(&self, now: Timestamp) -> Option<Outcome> {
        if self.next_due().is_none_or(|due| due > now) {
            return None;
        }
        if self.readers.is_empty() {
            return Some(Outcome::here(WireCode::Expired, "nobody asked for it"));
        }
        let open = || self.readers.iter().filter(|(_, reader)| !reader.confirmed);
        for (peer, reader) in open() {
            if let Some((at, code)) = reader.lost
                && at <= now
            {
                return Some(Outcome::of(*peer, code, "a consumer was lost"));
            }
        }
        let late = open().find(|(_, reader)| reader.until <= now).map(|(peer, _)| *peer);
        Some(match late {
            Some(peer) => {
                Outcome::of(peer, WireCode::Deadline, "a consumer did not confirm in time")
            }
            None => {
                Outcome::here(WireCode::Deadline, "not all of its readers asked for it in time")
            }
        })
    }
}

impl Announced {
    /// Whether `news` may follow.
    fn check_next(&self, news: &Self) -> Result<(), Refusal> {
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
