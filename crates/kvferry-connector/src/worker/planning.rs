//! Planning of the copies from engines that were learned, on a thread of its own.

use super::consumer::{failure, failure_of, restarted};
use super::producer_engine::{CardsHash, Memory, ProducerEngine};
use super::state::{Inner, PendingAction, State};
use crate::clock::now;
use crate::rank::RankError;
use kvferry_proto::engine_handshake::{Failure, Pairing};
use kvferry_proto::{Timestamp, WireCode};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

/// Actions that begin under one hold of the lock, once their engine was planned.
const TICKETS_PER_HOLD: usize = 16;

impl Inner {
    /// An engine handshake has ended. Another thread plans the copies, which takes milliseconds, or longer where the engine
    /// is hostile: the rank's handoffs do not wait for that.
    pub(super) fn engine_learned(&self, ticket: u64, result: Result<Arc<Pairing>, Failure>) {
        let mut state = self.state.lock();
        match result {
            Ok(pairing) => self.wait_for_plan(&mut state, ticket, pairing),
            Err(failure) => {
                if let Some(pending) = state.learning.remove(&ticket) {
                    self.fail(&mut state, pending.action, &failure);
                }
            }
        }
    }

    /// Has an action with this ticket wait until the copies from its engine are planned, or until its deadline.
    fn wait_for_plan(&self, state: &mut State, ticket: u64, pairing: Arc<Pairing>) {
        let Some(pending) = state.learning.get(&ticket) else { return };
        let (deadline, address) = (pending.deadline, pending.action.address().clone());
        let named = (address.clone(), Self::host_named(state, address.as_str()));
        for dropped in state.unplanned.add(ticket, pairing, named, self.config.rank, now()) {
            let detail = "too many engines are being learned".to_owned();
            let failure = failure(WireCode::Busy, detail);
            self.fail_learned(state, dropped.tickets, &dropped.pairing, &failure);
        }
        if state.unplanned.is_empty() {
            return;
        }
        self.rank().call_observer_at(deadline);
        if !std::mem::replace(&mut state.is_planning, true) {
            self.start_planning(state);
        }
    }

    fn start_planning(&self, state: &mut State) {
        let (me, memory, rank) =
            (Weak::clone(&self.me), Arc::clone(&self.memory), self.config.rank);
        let thread = kvferry_sys::thread::spawn("kvferry-plan".into(), move || {
            let next = || plan_next(&me, &memory, rank);
            // The next call fails what waits for an engine after a panic.
            while catch_unwind(AssertUnwindSafe(next)).unwrap_or(true) {}
        });
        if let Err(error) = thread {
            state.is_planning = false;
            let failure = failure_of(&RankError::Thread(error));
            while state.unplanned.begin().is_some() {
                self.fail_planning(state, &failure);
            }
        }
    }

    /// The engine whose copies are to be planned next. If there is none, the thread ends.
    fn next_unplanned(&self) -> Option<Arc<Pairing>> {
        let mut state = self.state.lock();
        let detail = "planning the copies panicked".to_owned();
        self.fail_planning(&mut state, &failure(WireCode::Internal, detail));
        let next = state.unplanned.begin();
        state.is_planning = next.is_some();
        next
    }

    /// The copies from an engine have been planned, unless that failed.
    fn planned(&self, pairing: &Arc<Pairing>, engine: Result<Arc<ProducerEngine>, Failure>) {
        let mut is_kept = false;
        loop {
            // Dropped without the lock.
            let mut gone = Vec::new();
            let mut state = self.state.lock();
            // Unless this half was closed meanwhile.
            if !state.unplanned.is_planning(pairing) {
                return;
            }
            let engine = match &engine {
                Ok(engine) => engine,
                Err(failure) => return self.fail_planning(&mut state, failure),
            };
            for _ in 0..TICKETS_PER_HOLD {
                let Some((ticket, learned)) = state.unplanned.next_ticket() else {
                    if !is_kept {
                        // Nothing waits for it any more. The next request need not wait as long.
                        gone.extend(state.keep_planned(engine));
                    }
                    state.unplanned.end();
                    return;
                };
                let Some(pending) = state.learning.remove(&ticket) else { continue };
                match learned {
                    Some(learned) => {
                        is_kept = true;
                        gone.extend(self.run_learned(&mut state, pending, engine, learned));
                    }
                    None => self.learn_again(&mut state, pending),
                }
            }
            drop(state);
            // The engine's threads may wait for the lock.
            std::thread::yield_now();
        }
    }

    /// Runs an action whose engine is known now. Its handshake ended at the time `learned`. Returns the engines that have
    /// gone for it.
    fn run_learned(
        &self,
        state: &mut State,
        pending: PendingAction,
        engine: &Arc<ProducerEngine>,
        learned: Timestamp,
    ) -> Vec<Arc<ProducerEngine>> {
        let address = pending.action.address().clone();
        let before = state.engines.id(address.as_str());
        let host = Self::host_named(state, address.as_str());
        let gone = state.engines.insert(address, host, engine, learned);
        if pending.action.engine().is_none_or(|id| id == engine.id) {
            self.run_whatever_happens(state, pending);
        } else if before.is_some_and(|before| before != engine.id) {
            self.fail(state, pending.action, &restarted());
        } else {
            // The engine there has not changed: the id in the request is wrong.
            self.refuse(state, pending.action, &restarted());
        }
        gone
    }

    /// Runs an action whose engine was lost before it was known: another incarnation may be there.
    fn learn_again(&self, state: &mut State, mut pending: PendingAction) {
        if pending.may_learn_again() {
            pending.restarts += 1;
            return self.run_whatever_happens(state, pending);
        }
        let detail = "the sessions with the producing engine end".to_owned();
        self.fail(state, pending.action, &failure(WireCode::Closed, detail));
    }

    /// Fails what waits for the engine that is being planned, if there is one.
    fn fail_planning(&self, state: &mut State, failure: &Failure) {
        if let Some(planning) = state.unplanned.end() {
            self.fail_learned(state, planning.tickets, &planning.pairing, failure);
        }
    }

    /// Fails what waits with these tickets for an engine that was learned.
    fn fail_learned(
        &self,
        state: &mut State,
        tickets: impl IntoIterator<Item = u64>,
        pairing: &Pairing,
        failure: &Failure,
    ) {
        for ticket in tickets {
            let Some(pending) = state.learning.remove(&ticket) else { continue };
            // Only the engine that the action means gets a message.
            let is_meant = pending.action.engine().is_none_or(|id| id == pairing.engine);
            let addresses = if is_meant { pairing.addresses.clone() } else { Vec::new() };
            let failure = Failure { addresses, ..failure.clone() };
            self.fail(state, pending.action, &failure);
        }
    }

    /// Fails what has waited until its deadline for the copies from an engine to be planned.
    pub(super) fn expire_unplanned(&self, state: &mut State) {
        let now = now();
        let State { unplanned, learning, .. } = &mut *state;
        let deadline = |ticket: u64| learning.get(&ticket).map(|pending| pending.deadline);
        let overdue = unplanned.expire(|ticket| deadline(ticket).is_some_and(|at| at <= now));
        let next = unplanned.tickets().filter_map(deadline).min();
        for (ticket, pairing) in overdue {
            let detail = "the producing engine is not known in time".to_owned();
            let failure = failure(WireCode::Deadline, detail);
            self.fail_learned(state, [ticket], &pairing, &failure);
        }
        if let Some(next) = next {
            self.rank().call_observer_at(next);
        }
    }

    /// The session with a peer has ended: engines that are reached there and not known yet may have been restarted.
    pub(super) fn lost_unplanned(&self, state: &mut State, address: &str) {
        let State { unplanned, learning, .. } = &mut *state;
        let named = |ticket: u64| learning.get(&ticket).map(|pending| pending.action.address());
        let is_named = |ticket: u64| named(ticket).is_some_and(|named| named.as_str() == address);
        let lost = unplanned.lose(address, is_named);
        let named: Vec<_> = lost.into_iter().filter_map(named).cloned().collect();
        for named in named {
            state.doubt_names(named.as_str());
        }
    }
}

/// Plans the copies from the next engine that waits for that. False if there is none.
fn plan_next(me: &Weak<Inner>, memory: &Memory, rank: usize) -> bool {
    // Neither hashing nor planning keeps this half.
    let next = me.upgrade().and_then(|inner| inner.next_unplanned());
    let Some(pairing) = next else { return false };
    let cards = CardsHash::of(&pairing);
    // Another action has learned the same engine, perhaps at another address of it.
    let known = me.upgrade().and_then(|inner| inner.state.lock().engines.of(rank, &pairing, cards));
    let engine = known.map_or_else(|| plan(memory, rank, &pairing, cards), Ok);
    if let Some(inner) = me.upgrade() {
        inner.planned(&pairing, engine);
    }
    true
}

/// Computes the maps between a producing engine and a rank. Takes milliseconds.
fn plan(
    memory: &Memory,
    rank: usize,
    pairing: &Pairing,
    cards: CardsHash,
) -> Result<Arc<ProducerEngine>, Failure> {
    let engine = ProducerEngine::new(memory, rank, pairing, cards);
    engine.map(Arc::new).map_err(|(code, detail)| failure(code, detail))
}
