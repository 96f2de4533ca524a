//! The receiver's side.

use super::{
    Action, Code, Message, Offered, Outcome, RecvId, Tasks, Timer, Wanted, check_count, check_key,
    plan,
};
use crate::handoff::PeerId;
use crate::origin::Origin;
use crate::time::Timestamp;
use serde_bytes::ByteBuf;
use std::time::Duration;

/// An offer.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) from: PeerId,
    pub(super) id: u64,
    pub(super) until: Timestamp,
    /// Bytes of memory that it takes: a block without parts has 3 bytes in a message, and 32 here.
    pub(super) len: usize,
    pub(super) regions: Vec<ByteBuf>,
    pub(super) blocks: Vec<Offered>,
}

/// Where an offer is.
#[derive(Clone, Debug)]
pub(super) enum OfferPlace {
    /// It waits for a task of this key.
    Parked(String),
    /// This task reads it.
    Read(RecvId),
}

/// Bytes of memory that an offer takes.
pub(super) fn memory_of(key: &str, regions: &[ByteBuf], blocks: &[Offered]) -> usize {
    let regions: usize = regions.iter().map(|region| size_of::<ByteBuf>() + region.len()).sum();
    let blocks: usize =
        blocks.iter().map(|block| size_of::<Offered>() + size_of_val(&*block.1)).sum();
    // The key is in four maps and a timer.
    regions + blocks + 5 * key.len() + size_of::<Parked>()
}

/// What stops a task. Where several do while its read stops, the last of these says how it ends, the first of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stop {
    /// The sender, or the end of the connection to it.
    Sender,
    /// The receiver cancelled it.
    Receiver,
    /// Its time has passed.
    Time,
}

#[derive(Debug)]
enum State {
    Pending,
    /// A read is in progress. `stop`, if set, is the outcome of the task, for any result of the read.
    Reading {
        from: PeerId,
        id: u64,
        stop: Option<(Stop, Outcome)>,
    },
    /// The read has ended well. The sender is asked whether its offer was valid until then.
    Confirming {
        from: PeerId,
        id: u64,
    },
    Ended(Outcome),
}

#[derive(Debug)]
pub(super) struct Recv {
    key: String,
    until: Timestamp,
    wanted: Vec<Wanted>,
    state: State,
    /// It ended because the receiver cancelled it.
    is_given_up: bool,
}

impl Recv {
    pub(super) const fn is_reading(&self) -> bool {
        matches!(self.state, State::Reading { .. })
    }

    fn sender(&self) -> Option<(PeerId, u64)> {
        match self.state {
            State::Reading { from, id, .. } | State::Confirming { from, id } => Some((from, id)),
            State::Pending | State::Ended(_) => None,
        }
    }
}

impl Tasks {
    /// Adds a receive task.
    ///
    /// # Errors
    /// [`Code::Duplicate`] if the key has a task, which stays as it is; [`Code::Invalid`];
    /// [`Code::Busy`].
    pub fn recv(
        &mut self,
        key: &str,
        wanted: Vec<Wanted>,
        budget: Duration,
        now: Timestamp,
    ) -> Result<RecvId, Outcome> {
        check_key(key)?;
        if self.by_key.contains_key(key) {
            return Err(Outcome::new(
                Code::Duplicate,
                format!("there is a task for {key} already"),
            ));
        }
        check_count(self.recvs.len(), "receive tasks")?;
        if let Some(until) = self.taken.remove(key) {
            self.timers.remove(&(until, Timer::Taken(key.to_owned())));
        }
        let id = RecvId(self.number());
        let until = now + budget;
        let state = State::Pending;
        let task = Recv { key: key.to_owned(), until, wanted, state, is_given_up: false };
        self.recvs.insert(id, task);
        self.by_key.insert(key.to_owned(), id);
        self.timers.insert((until, Timer::Recv(id)));
        if let Some(offer) = self.unpark(key) {
            self.begin(id, offer, now);
        }
        Ok(id)
    }

    pub(super) fn offered(&mut self, key: String, origin: Origin, offer: Parked, now: Timestamp) {
        if self.by_offer.contains_key(&(offer.from, offer.id)) {
            // The number of another send: the peer is wrong, and its first offer stands.
            return;
        }
        let refusal = match self.by_key.get(&key).and_then(|id| Some((*id, self.recvs.get(id)?))) {
            Some((id, Recv { state: State::Pending, .. })) => {
                self.watch(offer.from, true);
                return self.begin(id, offer, now);
            }
            Some((_, Recv { state: State::Ended(outcome), .. })) => Some(match outcome.code {
                Code::Done => Outcome::new(Code::Duplicate, format!("{key} has been received")),
                _ => outcome.clone(),
            }),
            Some(_) => {
                Some(Outcome::new(Code::Duplicate, format!("another sender is sending {key}")))
            }
            None if self.taken.contains_key(&key) => {
                Some(Outcome::new(Code::Cancelled, format!("the receiver gave {key} up")))
            }
            None if self.parked.contains_key(&key) => {
                Some(Outcome::new(Code::Duplicate, format!("another sender has offered {key}")))
            }
            None => None,
        };
        if let Some(outcome) = refusal {
            return self.refuse(offer.from, offer.id, &outcome);
        }
        self.watch(offer.from, true);
        self.timers.insert((offer.until, Timer::Parked(key.clone())));
        self.parked_sizes.add(&key, origin, offer.from.0, offer.len.max(super::PARKED_MIN));
        self.by_offer.insert((offer.from, offer.id), OfferPlace::Parked(key.clone()));
        self.parked.insert(key.clone(), offer);
        while let Some(excess) = self.parked_sizes.excess(&key) {
            let Some(offer) = self.drop_parked(&excess) else { return };
            let text = "too many offers wait for tasks of the receiver; wait for their ends";
            self.refuse(offer.from, offer.id, &Outcome::new(Code::Busy, text));
        }
    }

    fn drop_parked(&mut self, key: &str) -> Option<Parked> {
        let offer = self.unpark(key)?;
        self.watch(offer.from, false);
        Some(offer)
    }

    /// Takes an offer that waits. Its sender is still watched.
    fn unpark(&mut self, key: &str) -> Option<Parked> {
        let (key, offer) = self.parked.remove_entry(key)?;
        self.parked_sizes.remove(&key);
        self.by_offer.remove(&(offer.from, offer.id));
        self.timers.remove(&(offer.until, Timer::Parked(key)));
        Some(offer)
    }

    pub(super) fn parked_expired(&mut self, key: &str) {
        let Some(offer) = self.drop_parked(key) else { return };
        let text = format!("the receiver had no task for {key} in time");
        self.refuse(offer.from, offer.id, &Outcome::new(Code::Timeout, text));
    }

    /// Begins to read an offer, whose sender is watched.
    fn begin(&mut self, task: RecvId, offer: Parked, now: Timestamp) {
        let Some(recv) = self.recvs.get_mut(&task) else { return };
        let Parked { from, id, regions, blocks, .. } = offer;
        recv.state = State::Reading { from, id, stop: None };
        let budget = recv.until.saturating_since(now);
        let planned = plan(&recv.wanted, &blocks);
        self.by_offer.insert((from, id), OfferPlace::Read(task));
        match planned {
            Ok(copies) => {
                self.actions.push_back(Action::Read { task, from, regions, copies, budget });
            }
            Err(outcome) => self.end_recv(task, outcome),
        }
    }

    /// A task's read has ended: the memory is quiet.
    pub fn read_ended(&mut self, task: RecvId, result: Result<(), String>, now: Timestamp) {
        let Some(recv) = self.recvs.get_mut(&task) else { return };
        let State::Reading { from, id, stop } = &mut recv.state else { return };
        let (from, id, stop) = (*from, *id, stop.take());
        let outcome = match (stop, result) {
            _ if recv.until <= now => timeout(recv),
            (Some((stop, outcome)), _) => {
                recv.is_given_up = stop == Stop::Receiver;
                outcome
            }
            (None, Err(text)) => Outcome::new(Code::ReadFailed, text),
            (None, Ok(())) => {
                recv.state = State::Confirming { from, id };
                return self.say(from, &Message::Confirm { id });
            }
        };
        self.end_recv(task, outcome);
    }

    pub(super) fn confirmed(&mut self, from: PeerId, id: u64, valid: bool, now: Timestamp) {
        let Some(&OfferPlace::Read(task)) = self.by_offer.get(&(from, id)) else { return };
        let Some(recv @ Recv { state: State::Confirming { .. }, .. }) = self.recvs.get(&task)
        else {
            return;
        };
        let outcome = if recv.until <= now {
            timeout(recv)
        } else if valid {
            Outcome::done()
        } else {
            Outcome::new(Code::Cancelled, "the sender ended its send while it was read")
        };
        self.end_recv(task, outcome);
    }

    pub(super) fn withdrawn(&mut self, from: PeerId, id: u64, outcome: Outcome) {
        match self.by_offer.get(&(from, id)).cloned() {
            Some(OfferPlace::Parked(key)) => drop(self.drop_parked(&key)),
            Some(OfferPlace::Read(task)) => {
                let code = if outcome.code == Code::Done { Code::Cancelled } else { outcome.code };
                let text = format!("the sender gave up: {}", outcome.text);
                self.stop(task, Stop::Sender, Outcome::new(code, text));
            }
            None => {}
        }
    }

    pub(super) fn recvs_lost(&mut self, peer: PeerId, why: &str) {
        if !self.watched.contains(peer) {
            // None of its offers waits or is read.
            return;
        }
        let of = |offer: &Parked| offer.from == peer;
        let keys: Vec<_> =
            self.parked.iter().filter(|(_, offer)| of(offer)).map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.drop_parked(&key);
        }
        let by = |recv: &Recv| recv.sender().is_some_and(|(from, _)| from == peer);
        let tasks: Vec<_> =
            self.recvs.iter().filter(|(_, recv)| by(recv)).map(|(id, _)| *id).collect();
        for task in tasks {
            self.stop(task, Stop::Sender, Outcome::new(Code::PeerLost, why));
        }
    }

    /// Cancels a task: at once while no sender has come or when the read has ended, else when the read
    /// has stopped. Without effect on a task that has ended.
    pub fn cancel_recv(&mut self, id: RecvId) {
        let outcome = Outcome::new(Code::Cancelled, "the receiver cancelled the task");
        self.stop(id, Stop::Receiver, outcome);
    }

    pub(super) fn recv_expired(&mut self, id: RecvId) {
        if let Some(recv) = self.recvs.get(&id) {
            let outcome = timeout(recv);
            self.stop(id, Stop::Time, outcome);
        }
    }

    /// Takes a key from the receiver: no sender that comes later finds its task. A task that no sender
    /// has found ends as cancelled; one that is being read goes on.
    pub fn steal(&mut self, key: &str) {
        let Some(id) = self.by_key.remove(key) else { return };
        let Some(recv) = self.recvs.get(&id) else { return };
        let (until, pending) = (recv.until, matches!(recv.state, State::Pending));
        self.give_up(key, until);
        if pending {
            let text = format!("{key} was taken from the receiver before a sender came");
            self.end_recv(id, Outcome::new(Code::Cancelled, text));
        }
    }

    /// Refuses senders of a key that have not come yet, until the time of its task has passed.
    fn give_up(&mut self, key: &str, until: Timestamp) {
        if self.taken.len() < super::COUNT_MAX {
            self.timers.insert((until, Timer::Taken(key.to_owned())));
            self.taken.insert(key.to_owned(), until);
        }
    }

    /// Drops a task that has ended, and frees its key for another task. Senders that come after the task
    /// was given up, and before another one has its key, are refused until its time has passed. A task
    /// that has not ended is cancelled, and is dropped when it has ended and this is called again.
    pub fn forget(&mut self, id: RecvId) -> bool {
        self.cancel_recv(id);
        if self.recvs.get(&id).is_some_and(|recv| !matches!(recv.state, State::Ended(_))) {
            return false;
        }
        if let Some(recv) = self.recvs.remove(&id)
            && self.by_key.get(&recv.key) == Some(&id)
        {
            self.by_key.remove(&recv.key);
            if recv.is_given_up {
                self.give_up(&recv.key, recv.until);
            }
        }
        true
    }

    /// Ends a task, or says how it ends once its read has stopped.
    fn stop(&mut self, task: RecvId, why: Stop, outcome: Outcome) {
        let Some(recv) = self.recvs.get_mut(&task) else { return };
        match &mut recv.state {
            State::Ended(_) => {}
            State::Pending | State::Confirming { .. } => {
                recv.is_given_up = why == Stop::Receiver;
                self.end_recv(task, outcome);
            }
            State::Reading { stop, .. } => {
                let stops = stop.is_none();
                if stop.as_ref().is_none_or(|(known, _)| *known < why) {
                    *stop = Some((why, outcome));
                }
                if stops {
                    self.actions.push_back(Action::StopRead { task });
                }
            }
        }
    }

    fn end_recv(&mut self, id: RecvId, outcome: Outcome) {
        let Some(recv) = self.recvs.get_mut(&id) else { return };
        let sender = recv.sender();
        recv.state = State::Ended(outcome.clone());
        recv.wanted = Vec::new();
        self.timers.remove(&(recv.until, Timer::Recv(id)));
        if let Some((from, offer)) = sender {
            if outcome.code != Code::Done {
                self.refuse(from, offer, &outcome);
            }
            self.by_offer.remove(&(from, offer));
            self.watch(from, false);
        }
        self.actions.push_back(Action::RecvEnded { id, outcome });
    }

    fn refuse(&mut self, to: PeerId, id: u64, outcome: &Outcome) {
        let (code, text) = (outcome.code.to_wire(), outcome.text.clone());
        self.say(to, &Message::Refuse { id, code, text });
    }
}

fn timeout(recv: &Recv) -> Outcome {
    let text = match recv.state {
        State::Pending => format!("no sender offered {} in time", recv.key),
        _ => format!("the transfer of {} did not end in time", recv.key),
    };
    Outcome::new(Code::Timeout, text)
}
