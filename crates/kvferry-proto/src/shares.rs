//! Room that peers share.
//!
//! One peer alone may use all of it. When there is too much, the network that has most gives something up, and within
//! it the host, and within that the peer. So what a peer gets does not depend on how much others want, only on from
//! how many networks they come: with `n` of them, each gets an `n`th at least.

use crate::origin::Origin;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

/// A peer among those of its host, by the driver's number.
pub(crate) type Number = u64;

/// A group of items. Each group is part of the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Group {
    All,
    Network(IpAddr),
    Host(IpAddr),
    Peer(IpAddr, Number),
}

/// The groups of a peer, from the outermost.
pub(crate) fn groups_of(origin: Origin, peer: Number) -> [Group; 4] {
    let host = origin.host();
    [Group::All, Group::Network(origin.network()), Group::Host(host), Group::Peer(host, peer)]
}

/// Items that are kept for peers, with sizes, whose sum has a limit.
///
/// A driver adds an item first. While the sum is above the limit, it removes the item that [`Shares::excess`] names:
/// the new one, or another.
#[derive(Debug)]
pub struct Shares<K> {
    room: usize,
    items: HashMap<K, Item>,
    /// The items of each peer, the oldest first.
    by_age: BTreeMap<(Group, u64), K>,
    /// No group is empty.
    sizes: HashMap<Group, usize>,
    /// The groups in each group, by size.
    parts: HashMap<Group, BTreeSet<(usize, Group)>>,
    last: u64,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    groups: [Group; 4],
    age: u64,
    size: usize,
}

impl Item {
    const fn peer(&self) -> Group {
        self.groups[3]
    }
}

impl<K: Clone + Eq + Hash> Shares<K> {
    /// Room for items of `room` in all.
    pub fn new(room: usize) -> Self {
        Self {
            room,
            items: HashMap::new(),
            by_age: BTreeMap::new(),
            sizes: HashMap::new(),
            parts: HashMap::new(),
            last: 0,
        }
    }

    /// The number of items.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// True without items.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// True if there is such an item.
    pub fn contains(&self, key: &K) -> bool {
        self.items.contains_key(key)
    }

    /// The size of all items.
    pub fn size(&self) -> usize {
        self.sizes.get(&Group::All).copied().unwrap_or(0)
    }

    /// The size of the items of a host.
    #[cfg(test)]
    fn size_of_host(&self, origin: Origin) -> usize {
        self.sizes.get(&Group::Host(origin.host())).copied().unwrap_or(0)
    }

    /// Adds `size` to an item; to a new one of this peer, if there is no such item.
    pub fn add(&mut self, key: &K, origin: Origin, peer: Number, size: usize) {
        let groups = match self.items.get_mut(key) {
            Some(item) => {
                item.size += size;
                item.groups
            }
            None => {
                self.last += 1;
                let item = Item { groups: groups_of(origin, peer), age: self.last, size };
                self.items.insert(key.clone(), item);
                self.by_age.insert((item.peer(), item.age), key.clone());
                item.groups
            }
        };
        self.change(groups, |before| before + size);
    }

    /// Takes `size` from an item, which has that much at least. An item of nothing is removed.
    pub fn reduce(&mut self, key: &K, size: usize) {
        let Some(item) = self.items.get_mut(key) else { return };
        if item.size <= size {
            return self.remove(key);
        }
        item.size -= size;
        let groups = item.groups;
        self.change(groups, |before| before - size);
    }

    /// Removes an item. Nothing happens if there is no such item.
    pub fn remove(&mut self, key: &K) {
        let Some(item) = self.items.remove(key) else { return };
        self.by_age.remove(&(item.peer(), item.age));
        self.change(item.groups, |before| before - item.size);
    }

    /// The item that has to go, if there is too much: the newest of the peer that has most. It is `newcomer` itself
    /// if no other peer has more than that one's.
    pub fn excess(&self, newcomer: &K) -> Option<K> {
        let peer = self.fullest(newcomer)?;
        if self.items.get(newcomer).is_some_and(|item| item.peer() == peer) {
            return Some(newcomer.clone());
        }
        self.of_peer(peer).next_back().cloned()
    }

    /// The item that has to go, if there is too much: the oldest of the peer that has most. It is of the peer of
    /// `newcomer` if no other one has more.
    pub fn oldest_excess(&self, newcomer: &K) -> Option<K> {
        self.of_peer(self.fullest(newcomer)?).next().cloned()
    }

    /// The peer that has most on the host that has most in the network that has most, if there is too much. Of several
    /// that have as much, it is the newcomer's.
    fn fullest(&self, newcomer: &K) -> Option<Group> {
        if self.size() <= self.room {
            return None;
        }
        let mut own = self.items.get(newcomer).map(|item| item.groups);
        let mut group = Group::All;
        for level in 1..4 {
            let (most, first) = *self.parts.get(&group)?.last()?;
            let of_newcomer = own.map(|own| own[level]);
            group = of_newcomer.filter(|it| self.sizes.get(it) == Some(&most)).unwrap_or(first);
            own = own.filter(|own| own[level] == group);
        }
        Some(group)
    }

    fn of_peer(&self, peer: Group) -> impl DoubleEndedIterator<Item = &K> {
        self.by_age.range((peer, 0)..=(peer, u64::MAX)).map(|(_, key)| key)
    }

    fn change(&mut self, groups: [Group; 4], change: impl Fn(usize) -> usize) {
        for (level, group) in groups.into_iter().enumerate() {
            let before = self.sizes.get(&group).copied();
            let after = change(before.unwrap_or(0));
            if after == 0 {
                self.sizes.remove(&group);
            } else {
                self.sizes.insert(group, after);
            }
            let Some(of) = level.checked_sub(1).map(|above| groups[above]) else { continue };
            let parts = self.parts.entry(of).or_default();
            if let Some(before) = before {
                parts.remove(&(before, group));
            }
            if after > 0 {
                parts.insert((after, group));
            }
            if parts.is_empty() {
                self.parts.remove(&of);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(address: &str) -> Origin {
        Origin::from(address.parse::<IpAddr>().expect("an address"))
    }

    /// Adds an item of size 1 and removes what is too much. Whether the item stayed.
    fn add(shares: &mut Shares<u64>, key: u64, from: &str, peer: Number) -> bool {
        shares.add(&key, origin(from), peer, 1);
        let excess = shares.excess(&key);
        excess.iter().for_each(|key| shares.remove(key));
        assert_eq!(shares.excess(&key), None);
        excess != Some(key)
    }

    #[test]
    fn one_peer_gets_all_and_gives_up_what_others_want_down_to_an_equal_share() {
        let mut shares = Shares::new(100);
        assert_eq!((0..200).filter(|key| add(&mut shares, *key, "10.0.0.1", 1)).count(), 100);
        // Another host of its network, many sessions of one host of another network, a third network.
        assert_eq!((200..400).filter(|key| add(&mut shares, *key, "10.0.0.2", 2)).count(), 50);
        let of_many = (400..800).filter(|key| add(&mut shares, *key, "10.0.1.1", *key)).count();
        assert_eq!(of_many, 50);
        assert_eq!((800..900).filter(|key| add(&mut shares, *key, "fd00::1", 3)).count(), 33);
        assert_eq!(shares.size_of_host(origin("10.0.1.1")), 34 - 1);
        let of_first = ["10.0.0.1", "10.0.0.2"].map(|host| shares.size_of_host(origin(host)));
        assert_eq!(of_first.iter().sum::<usize>(), 34, "{of_first:?}");
    }

    #[test]
    fn a_host_of_many_networks_leaves_an_honest_one_its_part() {
        let mut shares = Shares::new(100);
        assert_eq!((0..100).filter(|key| add(&mut shares, *key, "192.168.7.1", 1)).count(), 100);
        for key in 1000..3000 {
            add(&mut shares, key, &format!("10.0.{}.{}", key % 9, key % 200 + 1), key);
        }
        assert_eq!(shares.size_of_host(origin("192.168.7.1")), 10);
        assert!(!add(&mut shares, 9000, "10.0.0.1", 1), "equal shares do not change hands");
        assert!(!add(&mut shares, 9001, "192.168.7.1", 1));
    }

    #[test]
    fn a_large_item_that_is_more_than_its_share_goes_itself() {
        let mut shares = Shares::new(100);
        shares.add(&1, origin("10.0.0.1"), 1, 40);
        shares.add(&2, origin("10.0.1.1"), 1, 40);
        shares.add(&3, origin("10.0.2.1"), 1, 41);
        assert_eq!((shares.excess(&3), shares.oldest_excess(&3)), (Some(3), Some(3)));
        shares.remove(&3);
        shares.add(&3, origin("10.0.2.1"), 1, 21);
        // It grows: the newest of the largest goes.
        assert_eq!(shares.excess(&3), Some(2));
        shares.add(&4, origin("10.0.1.1"), 1, 1);
        assert_eq!((shares.excess(&3), shares.oldest_excess(&3)), (Some(4), Some(2)));
        (1..5).for_each(|key| shares.remove(&key));
        assert_eq!((shares.size(), shares.len()), (0, 0));
        assert!(shares.is_empty() && shares.by_age.is_empty());
        assert!(shares.sizes.is_empty() && shares.parts.is_empty());
    }

    /// Items in the order in which they were added: key, origin, peer and size.
    type Plain = Vec<(u64, Origin, Number, usize)>;

    /// The right answer of [`Shares::excess`], found by a search of all items.
    fn plain_excess(items: &Plain, room: usize, newcomer: u64) -> Option<u64> {
        if items.iter().map(|it| it.3).sum::<usize>() <= room {
            return None;
        }
        let own = *items.iter().find(|it| it.0 == newcomer).expect("it was added");
        let mut left = items.clone();
        for level in 1..4 {
            let group = |it: &(u64, Origin, Number, usize)| groups_of(it.1, it.2)[level];
            let size = |of: Group| left.iter().filter(|it| group(it) == of).map(|it| it.3).sum();
            let most = left.iter().map(group).max_by_key(|of| {
                let size: usize = size(*of);
                (size, *of == group(&own), *of)
            });
            left.retain(|it| Some(group(it)) == most);
        }
        let is_own = left.iter().any(|it| it.0 == newcomer);
        if is_own { Some(newcomer) } else { left.last().map(|it| it.0) }
    }

    #[test]
    fn what_goes_is_what_a_search_of_all_items_finds() {
        const ROOM: usize = 60;
        let hosts = ["10.0.0.1", "10.0.0.2", "10.0.1.1", "10.0.2.1", "fd00::1", "fd00::2"];
        let (mut shares, mut plain) = (Shares::new(ROOM), Plain::new());
        let mut random = 1u64;
        let mut below = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % bound
        };
        for _ in 0..20_000 {
            let key = below(64);
            if below(3) == 0 {
                shares.remove(&key);
                plain.retain(|it| it.0 != key);
                continue;
            }
            let (host, peer) = (origin(hosts[below(6) as usize]), below(3));
            let size = 1 + below(4) as usize;
            shares.add(&key, host, peer, size);
            match plain.iter_mut().find(|it| it.0 == key) {
                Some(item) => item.3 += size,
                None => plain.push((key, host, peer, size)),
            }
            // Until the newcomer goes itself, or there is room.
            while plain.iter().any(|it| it.0 == key) {
                let excess = plain_excess(&plain, ROOM, key);
                assert_eq!(shares.excess(&key), excess);
                let Some(excess) = excess else { break };
                shares.remove(&excess);
                plain.retain(|it| it.0 != excess);
            }
            assert_eq!(shares.size(), plain.iter().map(|it| it.3).sum::<usize>());
            assert!(shares.size() <= ROOM && shares.len() == plain.len());
        }
    }
}
