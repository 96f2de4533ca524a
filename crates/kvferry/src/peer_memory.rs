//! Bounds the memory that peers make an agent hold, for all of them together.
//!
//! What a peer sends is held until it is complete: the head of a request, a control message, what waits
//! to be handled, and answers that the peer does not read. Each of these has a bound of its own, and so
//! has the number of connections; the product of the two is more than a machine has. So what a
//! connection holds beyond [`FREE_PER_CONNECTION`] comes from one budget
//! ([`Config::peer_memory`](crate::Config::peer_memory)).
//!
//! The budget is shared by dynamic thresholds, as the buffers of a switch are: a host may hold a quarter of
//! what is still free, and a network a half. One host alone gets a fifth of the budget, all hosts of one network a
//! third, and hosts of ten networks leave a tenth to others. Hosts are told apart by their addresses ([`Origin`]), however many
//! connections they open.

use crate::sync::{Arc, Mutex, lock};
use kvferry_proto::Origin;
use rustc_hash::FxHashMap;
use std::net::IpAddr;

/// What a connection may hold without being counted: a request with some 1 500 descriptors,
/// or the control messages of an exchange. The descriptor limit bounds the sum.
pub(crate) const FREE_PER_CONNECTION: usize = 64 * 1024;

/// The smallest budget that a configuration may set: a request's largest head and a control message,
/// both of one peer.
pub(crate) const PEER_MEMORY_MIN: usize = 16 * 1024 * 1024;
/// The smallest default.
const DEFAULT_MIN: usize = 64 * 1024 * 1024;
/// A host may hold this part of what is free, and so may a network.
const HOSTS_PART: usize = 4;
const NETWORKS_PART: usize = 2;
/// The default is this part of the memory that the process may use.
const DEFAULT_PART: usize = 64;

/// The budget where none is configured.
pub(crate) fn default_budget() -> usize {
    kvferry_sys::memory::limit().map_or(DEFAULT_MIN, |all| (all / DEFAULT_PART).max(DEFAULT_MIN))
}

/// What peers hold beyond what is free for each connection.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    budget: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    total: usize,
    /// Never zero.
    by_holder: FxHashMap<Holder, usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Host(IpAddr),
    Network(IpAddr),
}

impl PeerMemory {
    pub(crate) fn new(budget: usize) -> Arc<Self> {
        Arc::new(Self { budget, held: Mutex::default() })
    }

    /// The account of a new connection.
    pub(crate) fn account(self: &Arc<Self>, peer: IpAddr) -> Account {
        Account { memory: Arc::clone(self), peer: Origin::from(peer), counted: 0 }
    }

    /// Bytes that are counted now.
    pub(crate) fn held(&self) -> usize {
        lock(&self.held).total
    }

    fn change(&self, peer: Origin, from: usize, to: usize) -> bool {
        let mut held = lock(&self.held);
        let total = held.total - from + to;
        let free = self.budget.saturating_sub(total);
        let holders = [
            (Holder::Host(peer.host()), HOSTS_PART),
            (Holder::Network(peer.network()), NETWORKS_PART),
        ];
        let after = holders.map(|(holder, part)| {
            let before = held.by_holder.get(&holder).copied().unwrap_or(0);
            (holder, before - from + to, free / part)
        });
        if to > from && after.iter().any(|(_, of_holder, most)| of_holder > most) {
            return false;
        }
        held.total = total;
        for (holder, of_holder, _) in after {
            match of_holder {
                0 => drop(held.by_holder.remove(&holder)),
                _ => drop(held.by_holder.insert(holder, of_holder)),
            }
        }
        true
    }
}

/// What one connection holds. Dropping it gives all of it back.
#[derive(Debug)]
pub(crate) struct Account {
    memory: Arc<PeerMemory>,
    peer: Origin,
    /// Bytes beyond [`FREE_PER_CONNECTION`].
    counted: usize,
}

impl Account {
    /// The connection holds `bytes` from now on. False if that is more than before and more than it may
    /// hold; then nothing changes.
    #[must_use]
    pub(crate) fn hold(&mut self, bytes: usize) -> bool {
        let counted = bytes.saturating_sub(FREE_PER_CONNECTION);
        // Most connections never hold more than what is free: no lock.
        if counted == self.counted {
            return true;
        }
        let is_granted = self.memory.change(self.peer, self.counted, counted);
        if is_granted {
            self.counted = counted;
        }
        is_granted
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if self.counted > 0 {
            self.memory.change(self.peer, self.counted, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: usize = 64 * 1024 * 1024;
    const STEP: usize = 64 * 1024;

    fn ip(address: &str) -> IpAddr {
        address.parse().expect("an address")
    }

    /// Connections of a peer that take as much as they get, 1 MiB each.
    fn greedy(memory: &Arc<PeerMemory>, peer: IpAddr) -> Vec<Account> {
        let connection = || {
            let mut account = memory.account(peer);
            let steps = (1..=16).take_while(|n| account.hold(n * STEP)).count();
            (steps > 0).then_some(account)
        };
        std::iter::from_fn(connection).take(1000).collect()
    }

    #[test]
    fn one_host_gets_a_fifth_of_the_budget_however_many_connections_it_opens() {
        let memory = PeerMemory::new(BUDGET);
        let all = greedy(&memory, ip("10.0.0.1"));
        assert!(memory.held() <= BUDGET / 5 && memory.held() > BUDGET / 5 - 2 * STEP);
        // An IPv4 peer is the same in either notation.
        assert!(!memory.account(ip("::ffff:10.0.0.1")).hold(FREE_PER_CONNECTION + STEP));
        let mut other = memory.account(ip("10.0.1.1"));
        assert!(other.hold(BUDGET / 8), "others have a fifth of what is left");
        let mut neighbour = memory.account(ip("10.0.0.2"));
        assert!(neighbour.hold(BUDGET / 20), "its network has more than one host gets");
        drop((all, other, neighbour));
        assert_eq!((memory.held(), lock(&memory.held).by_holder.len()), (0, 0));
    }

    #[test]
    fn ten_greedy_hosts_leave_an_honest_one_its_largest_request() {
        let memory = PeerMemory::new(BUDGET);
        let greedy: Vec<_> = (1..=10)
            .flat_map(|network| greedy(&memory, ip(&format!("10.0.{network}.1"))))
            .collect();
        let mut honest = memory.account(ip("10.1.0.1"));
        assert!(honest.hold(1024 * 1024), "{} of {BUDGET} are held", memory.held());
        drop(greedy);
    }

    #[test]
    fn all_hosts_of_one_network_get_a_third_of_the_budget() {
        for network in ["10.0.0.", "fd00::"] {
            let memory = PeerMemory::new(BUDGET);
            let hosts = (1..=99).map(|host| ip(&format!("{network}{host}")));
            let all: Vec<_> = hosts.flat_map(|host| greedy(&memory, host)).collect();
            let held = memory.held();
            assert!(held <= BUDGET / 3 && held > BUDGET / 4, "{held} by {}", all.len());
            let mut honest = memory.account(ip("192.168.0.1"));
            assert!(honest.hold(BUDGET / 8), "{held} of {BUDGET} are held");
        }
    }

    #[test]
    fn what_is_free_for_a_connection_is_not_counted_and_less_is_always_granted() {
        let memory = PeerMemory::new(0);
        let mut account = memory.account(ip("10.0.0.1"));
        assert!(account.hold(FREE_PER_CONNECTION) && !account.hold(FREE_PER_CONNECTION + 1));
        let memory = PeerMemory::new(BUDGET);
        let mut first = memory.account(ip("10.0.0.1"));
        assert!(first.hold(BUDGET / 8));
        assert!(first.hold(BUDGET / 16) && memory.held() == BUDGET / 16 - FREE_PER_CONNECTION);
    }
}
