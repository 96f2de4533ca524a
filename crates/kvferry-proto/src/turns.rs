//! Items that peers get handled in turn.
//!
//! The network that has waited longest since its last turn is next, within it the host, and within that the peer. So the
//! time until a peer's turn depends on from how many networks items come, not on how many items others have.

use crate::origin::Origin;
use crate::shares::{Group, Number, groups_of};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// Keys of items that wait for their turn.
#[derive(Debug)]
pub struct Turns<K> {
    places: HashMap<K, ([Group; 4], u64)>,
    /// The items of each peer, in the order of their arrival.
    of_peers: BTreeMap<(Group, u64), K>,
    /// The groups in each group, by the time of their last turn, or of their first item. No group is empty.
    parts: HashMap<Group, BTreeSet<(u64, Group)>>,
    since: HashMap<Group, u64>,
    /// The number of the last arrival or turn.
    last: u64,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self {
            places: HashMap::new(),
            of_peers: BTreeMap::new(),
            parts: HashMap::new(),
            since: HashMap::new(),
            last: 0,
        }
    }
}

impl<K: Clone + Eq + Hash> Turns<K> {
    /// The number of items.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// True without items.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Adds an item after the others of its peer. One that waits already keeps its place.
    pub fn add(&mut self, key: &K, origin: Origin, peer: Number) {
        if self.places.contains_key(key) {
            return;
        }
        self.last += 1;
        let groups = groups_of(origin, peer);
        self.places.insert(key.clone(), (groups, self.last));
        self.of_peers.insert((groups[3], self.last), key.clone());
        for of_and_group in groups.windows(2) {
            self.place_last(of_and_group[0], of_and_group[1], false);
        }
    }

    /// Removes the item whose turn it is.
    pub fn pop(&mut self) -> Option<K> {
        let mut peer = Group::All;
        while let Some((_, first)) = self.parts.get(&peer).and_then(BTreeSet::first) {
            peer = *first;
        }
        let key = self.of_peers.range((peer, 0)..=(peer, u64::MAX)).next()?.1.clone();
        let (groups, _) = self.places[&key];
        self.remove(&key);
        self.last += 1;
        for of_and_group in groups.windows(2) {
            self.place_last(of_and_group[0], of_and_group[1], true);
        }
        Some(key)
    }

    /// Removes an item. Nothing happens if there is no such item.
    pub fn remove(&mut self, key: &K) {
        let Some((groups, arrival)) = self.places.remove(key) else { return };
        let peer = groups[3];
        self.of_peers.remove(&(peer, arrival));
        if self.of_peers.range((peer, 0)..=(peer, u64::MAX)).next().is_some() {
            return;
        }
        // The peer leaves, and each group that it was the only part of.
        for of_and_group in groups.windows(2).rev() {
            let (of, group) = (of_and_group[0], of_and_group[1]);
            let since = self.since.remove(&group).expect("it has an item");
            let parts = self.parts.get_mut(&of).expect("it has a part");
            parts.remove(&(since, group));
            if !parts.is_empty() {
                return;
            }
            self.parts.remove(&of);
        }
    }

    /// Places a part behind the others of its group: a new one, or one that `had_turn` and is not empty.
    fn place_last(&mut self, of: Group, group: Group, had_turn: bool) {
        let before = self.since.get(&group).copied();
        if before.is_some() != had_turn {
            return;
        }
        let parts = self.parts.entry(of).or_default();
        if let Some(before) = before {
            parts.remove(&(before, group));
        }
        parts.insert((self.last, group));
        self.since.insert(group, self.last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;

    fn origin(address: &str) -> Origin {
        Origin::from(address.parse::<IpAddr>().expect("an address"))
    }

    fn all(turns: &mut Turns<u64>) -> Vec<u64> {
        let all = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!((turns.len(), turns.parts.len(), turns.since.len()), (0, 0, 0));
        assert!(turns.of_peers.is_empty());
        all
    }

    #[test]
    fn networks_take_turns_then_hosts_then_peers_each_with_its_items_in_order() {
        let mut turns = Turns::default();
        for (key, from, peer) in [
            (1, "10.0.0.1", 1),
            (2, "10.0.0.1", 1),
            (3, "10.0.0.1", 2),
            (4, "10.0.0.2", 3),
            (5, "10.0.1.1", 4),
            (6, "10.0.1.1", 4),
            (7, "fd00::1", 5),
        ] {
            turns.add(&key, origin(from), peer);
        }
        assert_eq!(all(&mut turns), [1, 5, 7, 4, 6, 3, 2]);
    }

    #[test]
    fn an_item_that_is_added_again_keeps_its_place_and_one_that_is_removed_has_none() {
        let mut turns = Turns::default();
        for key in 0..4 {
            turns.add(&key, origin("10.0.0.1"), 1);
        }
        turns.add(&0, origin("10.0.0.1"), 1);
        turns.remove(&1);
        turns.remove(&7);
        turns.add(&1, origin("10.0.0.1"), 1);
        assert_eq!(all(&mut turns), [0, 2, 3, 1]);
        // A peer whose items are all gone comes last when it returns.
        turns.add(&0, origin("10.0.0.1"), 1);
        turns.add(&1, origin("10.0.1.1"), 2);
        turns.remove(&0);
        turns.add(&0, origin("10.0.0.1"), 1);
        assert_eq!(all(&mut turns), [1, 0]);
    }
}
