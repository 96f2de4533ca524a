//! Host names and bootstrap servers of producing engines. Looking one up blocks, so it happens on a
//! thread of its own; what needs the name waits here.
//!
//! Clients choose the addresses, and lookups are few. So those of addresses that no handoff has come from
//! yet get half of the places, and a name that should be looked up again is used as it was found
//! before if no place is free, or if the lookup fails.

use super::bootstrap;
use super::engines::FRESH;
use super::state::PendingAction;
use crate::address::{AgentAddress, ProducerAddress, is_literal};
use kvferry::Peer;
use kvferry_proto::engine_handshake::{EngineId, Failure};
use kvferry_proto::{Timestamp, WireCode};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

/// Addresses that are looked up at a time at most: each takes a thread. Those that no handoff has come
/// from yet take half of the places at most.
pub(super) const LOOKUPS_MAX: usize = 32;

/// Longest wait of actions for a lookup. Then they fail and the lookup's place is free; its thread may still wait for
/// the name service, which can't be cancelled.
pub(super) const LOOKUP_LIMIT: Duration = Duration::from_secs(5);

/// Threads of lookups at most, those included that have lost their place. Half of them are shared out
/// as half of the places are.
const THREADS_MAX: usize = 128;

/// Names that are kept at most, and as many sources of handoffs.
const NAMES_MAX: usize = 1024;

/// Answers of bootstrap servers that are kept at most. The least recently used one is dropped first; those of
/// servers that a handoff has come by stay as long as there are others.
const ANSWERS_MAX: usize = 256;

/// Ids per bootstrap server that requests asked for and the answer does not have. Routers ask for ids
/// when they start, and send the id of an engine's earlier incarnation as long as they run.
const ASKED_MAX: usize = 16;

/// Result of a lookup.
pub(super) enum LookupResult {
    /// The outcome for each name.
    Peers(Vec<(String, Result<Peer, Failure>)>),
    /// The engines behind a bootstrap server.
    Engines(Result<bootstrap::Engines, Failure>),
}

/// Finds a peer by its `host:port`. Blocks while it looks a name up.
pub(super) type LookUp = Arc<dyn Fn(&str) -> kvferry::Result<Peer> + Send + Sync>;

/// Names that were looked up, and what waits for others.
#[derive(Default)]
pub(super) struct Names {
    known: FxHashMap<String, FoundBefore<Peer>>,
    /// The answers of bootstrap servers.
    answers: FxHashMap<ProducerAddress, Answer>,
    /// Lookups by the address of the engine that they are for. Each has a thread.
    lookups: FxHashMap<ProducerAddress, Lookup>,
    /// Addresses and bootstrap servers that a handoff has come from, with the time of its last use.
    proven: FxHashMap<ProducerAddress, u64>,
    uses: u64,
    /// The number of names that were found.
    found: u64,
}

struct FoundBefore<T> {
    found: T,
    /// Set if it must be looked up again before its next use.
    in_doubt: bool,
    /// Position of the entry in the order in which entries were found.
    number: u64,
}

/// Adds what was found. When [`NAMES_MAX`] are known, the one that was found first makes room; those that a
/// handoff has come from stay as long as there are others, because clients choose the addresses.
fn learn<K: Clone + Eq + Hash, T>(
    all: &mut FxHashMap<K, FoundBefore<T>>,
    key: K,
    found: T,
    number: u64,
    is_proven: impl Fn(&K) -> bool,
) {
    if all.len() >= NAMES_MAX && !all.contains_key(&key) {
        let first = all.iter().min_by_key(|(key, it)| (is_proven(key), it.number));
        let first = first.map(|(key, _)| key.clone()).expect("it is not empty");
        all.remove(&first);
    }
    all.insert(key, FoundBefore { found, in_doubt: false, number });
}

struct Answer {
    engines: bootstrap::Engines,
    answered: Timestamp,
    in_doubt: bool,
    /// Ids for which the server was asked.
    asked: VecDeque<EngineId>,
    used: u64,
}

struct Lookup {
    names: Vec<String>,
    /// Empty once the lookup has lost its place.
    waiting: Vec<PendingAction>,
    until: Timestamp,
    /// A handoff has come from what is looked up.
    is_proven: bool,
}

impl Names {
    /// Whether the peer at an address is known without a lookup that blocks. What is in doubt is known
    /// if no lookup `can_look_up` it now.
    pub(super) fn is_known(&self, address: &str, can_look_up: bool) -> bool {
        let known = || self.known.get(address).is_some_and(|it| !(it.in_doubt && can_look_up));
        is_literal(address) || known()
    }

    /// The peer that a name was resolved to last.
    pub(super) fn peer(&self, name: &str) -> Option<&Peer> {
        self.known.get(name).map(|it| &it.found)
    }

    /// Whether the names that an action needs are being looked up, or could be.
    pub(super) fn has_room(&self, action: &PendingAction) -> bool {
        let is_proven = self.is_proven(action);
        let rivals = || self.lookups.values().filter(|it| is_proven || !it.is_proven);
        let share = if is_proven { 1 } else { 2 };
        let places = rivals().filter(|it| !it.waiting.is_empty()).count();
        self.lookups.contains_key(action.action.address())
            || (places < LOOKUPS_MAX / share && rivals().count() < THREADS_MAX / share)
    }

    fn is_proven(&self, action: &PendingAction) -> bool {
        let bootstrap = action.bootstrap.as_ref().map(|(url, _)| url);
        let from = [Some(action.action.address()), bootstrap];
        from.into_iter().flatten().any(|it| self.proven.contains_key(it))
    }

    /// A handoff has come from this address, or by way of this bootstrap server. No client can claim
    /// that of an address which it has made up.
    pub(super) fn prove(&mut self, address: &ProducerAddress) {
        self.uses += 1;
        if let Some(used) = self.proven.get_mut(address) {
            *used = self.uses;
            return;
        }
        if self.proven.len() >= NAMES_MAX {
            let oldest = self.proven.iter().min_by_key(|(_, used)| **used);
            let oldest = oldest.map(|(address, _)| address.clone()).expect("it is not empty");
            self.proven.remove(&oldest);
        }
        self.proven.insert(address.clone(), self.uses);
    }

    /// Has an action wait for the names of an engine, until `until` if it is the first. True if no
    /// lookup of them runs: the caller starts it.
    pub(super) fn wait(
        &mut self,
        action: PendingAction,
        names: Vec<String>,
        until: Timestamp,
    ) -> bool {
        let (address, is_proven) = (action.action.address().clone(), self.is_proven(&action));
        let begins = !self.lookups.contains_key(&address);
        let new = || Lookup { names, waiting: Vec::new(), until, is_proven };
        let lookup = self.lookups.entry(address).or_insert_with(new);
        if lookup.waiting.is_empty() {
            lookup.until = until;
        }
        lookup.waiting.push(action);
        begins
    }

    /// Takes what waits for the names of an engine: their lookup has ended.
    pub(super) fn end(&mut self, address: &ProducerAddress) -> Vec<PendingAction> {
        self.lookups.remove(address).map_or_else(Vec::new, |lookup| lookup.waiting)
    }

    /// Takes what has waited until its lookup's limit or its own deadline, by the address looked up. The
    /// names of a lookup that takes too long are known from now on if they were found before.
    pub(super) fn expire(&mut self, now: Timestamp) -> Vec<(ProducerAddress, Vec<PendingAction>)> {
        let Self { known, lookups, .. } = self;
        let take = |(address, lookup): (&ProducerAddress, &mut Lookup)| {
            let until = lookup.until;
            let is_overdue = |it: &mut PendingAction| it.deadline.min(until) <= now;
            let overdue: Vec<_> = lookup.waiting.extract_if(.., is_overdue).collect();
            if until <= now && !overdue.is_empty() {
                for name in &lookup.names {
                    if let Some(known) = known.get_mut(name) {
                        known.in_doubt = false;
                    }
                }
            }
            (address.clone(), overdue)
        };
        lookups.iter_mut().map(take).collect()
    }

    /// Whether all names that a lookup at `address` is for are known without it.
    pub(super) fn is_found(&self, address: &ProducerAddress) -> bool {
        let names = self.lookups.get(address).map_or(&[][..], |lookup| &lookup.names);
        !names.is_empty() && names.iter().all(|name| self.is_known(name, true))
    }

    /// A name's lookup has failed. True if it goes on with what was found before.
    pub(super) fn keep(&mut self, name: &str, failure: &Failure) -> bool {
        if failure.code == WireCode::ForbiddenProducer {
            // It leads to another host now.
            self.known.remove(name);
            return false;
        }
        let known = self.known.get_mut(name);
        known.map(|known| known.in_doubt = false).is_some()
    }

    /// Time at which [`Names::expire`] is due.
    pub(super) fn next_limit(&self) -> Option<Timestamp> {
        let limit =
            |it: &Lookup| it.waiting.iter().map(|action| action.deadline.min(it.until)).min();
        self.lookups.values().filter_map(limit).min()
    }

    pub(super) fn waiting_actions(&mut self) -> impl Iterator<Item = &mut PendingAction> {
        self.lookups.values_mut().flat_map(|lookup| &mut lookup.waiting)
    }

    pub(super) fn forget_waiting(&mut self) {
        self.lookups.values_mut().for_each(|lookup| lookup.waiting.clear());
    }

    /// Number of lookups that run.
    pub(super) fn lookups(&self) -> usize {
        self.lookups.len()
    }

    pub(super) fn learn(&mut self, names: Vec<(String, Peer)>) {
        for (name, peer) in names {
            self.found += 1;
            let is_proven = |name: &String| self.proven.contains_key(name.as_str());
            learn(&mut self.known, name, peer, self.found, is_proven);
        }
    }

    /// The engine behind a bootstrap server that requests with this id mean, and an agent of it, or why there
    /// is none; `None` if the server must be asked. An answer holds for the ids that it has or was asked
    /// for until its engines are in doubt, and for all others for a moment: a client can make ids up. As
    /// in [`Names::is_known`], one in doubt is used if no lookup can be made.
    pub(super) fn engine(
        &mut self,
        url: &ProducerAddress,
        asked: Option<EngineId>,
        can_look_up: bool,
        now: Timestamp,
    ) -> Option<Result<(EngineId, AgentAddress), (WireCode, String)>> {
        self.uses += 1;
        let known = self.answers.get_mut(url)?;
        let is_fresh = now.saturating_since(known.answered) < FRESH;
        let holds = match known.in_doubt {
            false => known.is_meant(asked) || is_fresh,
            true => known.is_meant(asked) && !can_look_up,
        };
        known.used = self.uses;
        holds.then(|| known.engines.pick(url, asked))
    }

    /// Keeps what a bootstrap server has answered to requests with the ids `asked`.
    pub(super) fn learn_engines(
        &mut self,
        url: &ProducerAddress,
        engines: bootstrap::Engines,
        asked: impl Iterator<Item = EngineId>,
        now: Timestamp,
    ) {
        self.uses += 1;
        let before = self.answers.remove(url);
        let mut all = before.map_or_else(VecDeque::new, |before| before.asked);
        for id in asked.filter(|id| !engines.has(*id)) {
            all.retain(|known| *known != id);
            all.push_back(id);
        }
        all.drain(..all.len().saturating_sub(ASKED_MAX));
        if self.answers.len() >= ANSWERS_MAX {
            let age = |(url, answer): &(&ProducerAddress, &Answer)| {
                (self.proven.contains_key(*url), answer.used)
            };
            let oldest = self.answers.iter().min_by_key(age);
            let oldest = oldest.map(|(url, _)| url.clone()).expect("it is not empty");
            self.answers.remove(&oldest);
        }
        let (in_doubt, used) = (false, self.uses);
        let answer = Answer { engines, answered: now, in_doubt, asked: all, used };
        self.answers.insert(url.clone(), answer);
    }

    /// A bootstrap server can't be asked. True if requests with this id go on with what it answered before.
    pub(super) fn keep_engines(&mut self, url: &ProducerAddress, asked: Option<EngineId>) -> bool {
        let Some(known) = self.answers.get_mut(url).filter(|it| it.is_meant(asked)) else {
            return false;
        };
        known.in_doubt = false;
        true
    }

    /// Has a name looked up again when it is needed next: its host may have moved.
    pub(super) fn doubt(&mut self, name: &str) {
        if let Some(known) = self.known.get_mut(name) {
            known.in_doubt = true;
        }
        let behind = self.answers.values_mut().filter(|it| it.engines.lead_to(name));
        behind.for_each(|it| it.in_doubt = true);
    }
}

impl Answer {
    /// True if the answer is for requests with this id.
    fn is_meant(&self, asked: Option<EngineId>) -> bool {
        asked.is_some_and(|id| self.engines.has(id) || self.asked.contains(&id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_names_push_out_the_oldest_one_and_none_that_a_handoff_has_come_from() {
        let agent = kvferry::Agent::builder().start().expect("an agent");
        let peer = agent.peer(agent.advertised()).expect("an address");
        let mut names = Names::default();
        let name = |number: usize| format!("host-{number}:1");
        names.prove(&name(0).parse().expect("an address"));
        for number in 0..NAMES_MAX {
            names.learn(vec![(name(number), peer.clone())]);
        }
        let known = |names: &Names, number| names.is_known(&name(number), true);
        assert!((0..NAMES_MAX).all(|number| known(&names, number)));
        // A name that is found again takes no room, and is new.
        names.learn(vec![(name(1), peer.clone())]);
        names.learn(vec![(name(NAMES_MAX), peer.clone()), (name(NAMES_MAX + 1), peer.clone())]);
        let lost: Vec<_> = (0..NAMES_MAX + 2).filter(|number| !known(&names, *number)).collect();
        assert_eq!(lost, [2, 3]);

        let (id, now) = (EngineId(7), Timestamp::from_nanos(0));
        let url = |number: usize| ProducerAddress::bootstrap(&name(number)).expect("an address");
        names.prove(&url(0));
        for number in 0..=ANSWERS_MAX {
            let answer = bootstrap::Engines::of(std::iter::once((id, "127.0.0.1:1".to_owned())));
            names.learn_engines(&url(number), answer, std::iter::empty(), now);
        }
        let is_unknown = |n: &usize| names.engine(&url(*n), Some(id), true, now).is_none();
        let engines: Vec<_> = (0..=ANSWERS_MAX).filter(is_unknown).collect();
        assert_eq!(engines, [1]);
    }
}
