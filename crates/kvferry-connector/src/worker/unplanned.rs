//! Engines that were learned, and wait until the copies from them are planned.
//!
//! An engine chooses how long planning takes and how long its cards are. So networks, their hosts and their engines take
//! turns ([`Turns`]), and share the room for cards ([`Shares`]).

use super::engines::ENGINES_MAX;
use crate::address::{AgentAddress, ProducerAddress};
use kvferry_proto::engine_handshake::Pairing;
use kvferry_proto::{Origin, Shares, Timestamp, Turns};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of the cards of engines that wait at most: a few engines with the longest ones, and hundreds of usual ones. Each
/// counts with [`ROOM_LEAST`] at least.
const ROOM_MAX: usize = 64 * 1024 * 1024;
const ROOM_LEAST: usize = ROOM_MAX / ENGINES_MAX;

/// The address of an engine's pairing in memory, which is kept meanwhile.
type Key = usize;

/// Engines that were learned. The planned ones are [`super::engines::Engines`].
#[derive(Debug)]
pub(super) struct Unplanned {
    waiting: FxHashMap<Key, Learned>,
    turns: Turns<Key>,
    shares: Shares<Key>,
    /// The engine that the thread plans.
    planning: Option<Learned>,
}

#[derive(Debug)]
pub(super) struct Learned {
    pub(super) pairing: Arc<Pairing>,
    /// The tickets of actions that wait for the engine, in this order.
    pub(super) tickets: VecDeque<u64>,
    /// Time at which its handshake ended.
    pub(super) learned: Timestamp,
    /// A session with it has ended since, so another incarnation may be there.
    pub(super) is_lost: bool,
    /// The address by which the first action names the engine, and its host.
    pub(super) named: (ProducerAddress, Origin),
    /// The addresses of the ranks that this rank reads from.
    sources: Vec<AgentAddress>,
}

impl Default for Unplanned {
    fn default() -> Self {
        Self {
            waiting: FxHashMap::default(),
            turns: Turns::default(),
            shares: Shares::new(ROOM_MAX),
            planning: None,
        }
    }
}

impl Learned {
    fn new(
        pairing: Arc<Pairing>,
        named: (ProducerAddress, Origin),
        rank: usize,
        learned: Timestamp,
    ) -> Self {
        let sources = pairing.routing.sources_of(rank).iter();
        let sources = sources.filter_map(|theirs| pairing.addresses.get(*theirs)?.parse().ok());
        let sources = sources.collect();
        Self { pairing, tickets: VecDeque::new(), learned, is_lost: false, named, sources }
    }
}

impl Unplanned {
    /// Adds an engine that this rank, numbered `rank`, has learned now, with the ticket of an action that waits for it.
    /// `named`: the address by which the action names it, and its host. Returns the engines that there is no room for: they
    /// are removed.
    pub(super) fn add(
        &mut self,
        ticket: u64,
        pairing: Arc<Pairing>,
        named: (ProducerAddress, Origin),
        rank: usize,
        now: Timestamp,
    ) -> Vec<Learned> {
        let key = key_of(&pairing);
        let planning = self.planning.as_mut().filter(|it| key_of(&it.pairing) == key);
        if let Some(known) = planning.or_else(|| self.waiting.get_mut(&key)) {
            known.tickets.push_back(ticket);
            return Vec::new();
        }
        let engine = pairing.engine.0 as u64;
        let bytes = pairing.cards.values().map(Vec::len).sum::<usize>().max(ROOM_LEAST);
        let host = named.1;
        let mut learned = Learned::new(pairing, named, rank, now);
        learned.tickets.push_back(ticket);
        self.waiting.insert(key, learned);
        self.turns.add(&key, host, engine);
        self.shares.add(&key, host, engine, bytes);
        let mut dropped = Vec::new();
        while let Some(excess) = self.shares.excess(&key) {
            self.turns.remove(&excess);
            self.shares.remove(&excess);
            dropped.extend(self.waiting.remove(&excess));
        }
        dropped
    }

    /// The engine that is planned next. One that was being planned before must have been taken.
    pub(super) fn begin(&mut self) -> Option<Arc<Pairing>> {
        debug_assert!(self.planning.is_none(), "one engine is planned at a time");
        let key = self.turns.pop()?;
        self.shares.remove(&key);
        let next = self.waiting.remove(&key).expect("each that waits is there");
        Some(Arc::clone(&self.planning.insert(next).pairing))
    }

    /// Takes the next ticket of the engine that was planned, and the time at which its handshake ended; `None` if it was lost
    /// since.
    pub(super) fn next_ticket(&mut self) -> Option<(u64, Option<Timestamp>)> {
        let planning = self.planning.as_mut()?;
        let learned = (!planning.is_lost).then_some(planning.learned);
        Some((planning.tickets.pop_front()?, learned))
    }

    /// The address and the host by which the engine that is being planned was named, and the time at which its handshake
    /// ended; `None` if it was lost since.
    pub(super) fn planned_as(&self) -> Option<((ProducerAddress, Origin), Timestamp)> {
        let planning = self.planning.as_ref().filter(|it| !it.is_lost)?;
        Some((planning.named.clone(), planning.learned))
    }

    /// Takes the engine that is being planned.
    pub(super) fn end(&mut self) -> Option<Learned> {
        self.planning.take()
    }

    /// True if this is the engine that is being planned.
    pub(super) fn is_planning(&self, pairing: &Arc<Pairing>) -> bool {
        self.planning.as_ref().is_some_and(|it| Arc::ptr_eq(&it.pairing, pairing))
    }

    /// True if no engine waits, and none is being planned.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.planning.is_none()
    }

    /// Takes the tickets that are due, each with its engine.
    pub(super) fn expire(&mut self, is_due: impl Fn(u64) -> bool) -> Vec<(u64, Arc<Pairing>)> {
        let mut due = Vec::new();
        for Learned { pairing, tickets, .. } in self.all_mut() {
            let late = tickets.iter().copied().filter(|ticket| is_due(*ticket));
            due.extend(late.map(|ticket| (ticket, Arc::clone(pairing))));
            tickets.retain(|ticket| !is_due(*ticket));
        }
        let Self { waiting, turns, shares, .. } = self;
        waiting.retain(|key, learned| {
            let is_wanted = !learned.tickets.is_empty();
            if !is_wanted {
                turns.remove(key);
                shares.remove(key);
            }
            is_wanted
        });
        due
    }

    /// The session with a peer has ended. Marks the engines that have a rank at its address, or that an action names by it.
    /// Returns the tickets of their actions.
    pub(super) fn lose(&mut self, address: &str, is_named: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut tickets = Vec::new();
        for learned in self.all_mut() {
            let has_rank = learned.sources.iter().any(|source| source.as_str() == address);
            let has_rank = has_rank || learned.named.0.as_str() == address;
            if has_rank || learned.tickets.iter().any(|ticket| is_named(*ticket)) {
                learned.is_lost = true;
                tickets.extend(&learned.tickets);
            }
        }
        tickets
    }

    /// The tickets of all that wait.
    pub(super) fn tickets(&self) -> impl Iterator<Item = u64> {
        let all = self.waiting.values().chain(&self.planning);
        all.flat_map(|learned| learned.tickets.iter().copied())
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Learned> {
        self.waiting.values_mut().chain(&mut self.planning)
    }
}

fn key_of(pairing: &Arc<Pairing>) -> Key {
    Arc::as_ptr(pairing).addr()
}

#[cfg(test)]
mod tests {
    use super::super::tests::pairing;
    use super::*;
    use std::net::IpAddr;

    const RANK: usize = 0;

    fn named(host: &str) -> (ProducerAddress, Origin) {
        let origin = Origin::from(host.parse::<IpAddr>().expect("an address"));
        (format!("{host}:1").parse().expect("an address"), origin)
    }

    /// Adds an engine with a card of so many MiB, and the number of its ticket as its id. Returns the tickets of those that
    /// have gone.
    fn add(unplanned: &mut Unplanned, ticket: u64, from: &str, mebibytes: usize) -> Vec<u64> {
        let engine = pairing(ticket.into(), vec![0; mebibytes << 20]);
        let gone = unplanned.add(ticket, engine, named(from), RANK, Timestamp::default());
        gone.into_iter().flat_map(|it| it.tickets).collect()
    }

    fn next(unplanned: &mut Unplanned) -> Option<Vec<u64>> {
        unplanned.begin()?;
        unplanned.end().map(|it| it.tickets.into())
    }

    #[test]
    fn i8_engines_of_one_host_leave_others_their_room_and_their_turns() {
        let mut unplanned = Unplanned::default();
        for ticket in 1..=4 {
            assert_eq!(add(&mut unplanned, ticket, "10.0.0.1", 15), [0; 0]);
        }
        // The newest one of the host with most goes.
        assert_eq!(add(&mut unplanned, 5, "10.0.1.1", 15), [4]);
        assert_eq!(add(&mut unplanned, 6, "10.0.0.1", 15), [6]);
        assert_eq!(add(&mut unplanned, 7, "10.0.2.1", 1), [0; 0]);
        let order: Vec<_> = std::iter::from_fn(|| next(&mut unplanned)).flatten().collect();
        assert_eq!(order, [1, 5, 7, 2, 3]);
        assert!(unplanned.shares.is_empty() && unplanned.turns.is_empty());
    }

    #[test]
    fn small_engines_are_bounded_in_number() {
        let mut unplanned = Unplanned::default();
        for ticket in 0..ENGINES_MAX as u64 {
            assert_eq!(add(&mut unplanned, ticket, "10.0.0.1", 0), [0; 0]);
        }
        assert_eq!(add(&mut unplanned, 5000, "10.0.0.1", 0), [5000]);
        assert_eq!(add(&mut unplanned, 5001, "10.0.0.2", 0).len(), 1);
        assert_eq!(unplanned.waiting.len(), ENGINES_MAX);
    }

    #[test]
    fn actions_that_learned_one_engine_together_wait_together_also_while_it_is_planned() {
        let mut unplanned = Unplanned::default();
        let engine = pairing(1, Vec::new());
        let add = |unplanned: &mut Unplanned, ticket| {
            let engine = Arc::clone(&engine);
            let at = Timestamp::from_nanos(ticket);
            assert!(unplanned.add(ticket, engine, named("10.0.0.1"), RANK, at).is_empty());
        };
        add(&mut unplanned, 1);
        add(&mut unplanned, 2);
        unplanned.begin().expect("an engine");
        add(&mut unplanned, 3);
        assert!(unplanned.turns.is_empty());
        assert_eq!(unplanned.expire(|ticket| ticket == 2).len(), 1);
        let planned = unplanned.end().expect("it is planned");
        assert_eq!((planned.tickets, planned.learned), ([1, 3].into(), Timestamp::from_nanos(1)));
    }

    #[test]
    fn an_engine_that_no_action_waits_for_gives_its_room_back() {
        let mut unplanned = Unplanned::default();
        add(&mut unplanned, 1, "10.0.0.1", 40);
        add(&mut unplanned, 2, "10.0.0.1", 1);
        assert_eq!(unplanned.expire(|ticket| ticket == 1).len(), 1);
        assert_eq!(add(&mut unplanned, 3, "10.0.0.1", 60), [0; 0]);
        assert_eq!(unplanned.tickets().count(), 2);
        assert_eq!(next(&mut unplanned), Some(vec![2]));
        assert_eq!(next(&mut unplanned), Some(vec![3]));
        assert_eq!(next(&mut unplanned), None);
    }

    #[test]
    fn an_engine_is_lost_with_the_session_of_a_rank_or_of_the_address_that_names_it() {
        let mut unplanned = Unplanned::default();
        for ticket in 1..=3 {
            add(&mut unplanned, ticket, "10.0.0.1", 0);
        }
        unplanned.begin().expect("an engine");
        // All have their rank at one address.
        assert_eq!(unplanned.lose("10.0.0.9:9", |ticket| ticket == 2), [2]);
        assert_eq!(unplanned.end().map(|it| it.is_lost), Some(false));
        unplanned.begin().expect("an engine");
        let mut lost = unplanned.lose("127.0.0.1:1", |_| false);
        lost.sort_unstable();
        assert_eq!(lost, [2, 3]);
        assert!(unplanned.waiting.values().chain(&unplanned.planning).all(|it| it.is_lost));
    }
}
