//! Bounds the memory that peers make an agent hold, for all of them together.
//!
//! What a peer sends is held until it is complete: the head of a request, a control message, what waits
//! to be handled, and answers that the peer does not read. Each of these has a bound of its own, and so
//! has the number of connections; the product of the two is more than a machine has. So what a
//! connection holds beyond [`FREE_PER_CONNECTION`] comes from one budget
//! ([`Config::peer_memory`](crate::Config::peer_memory)).
//!
//! The budget is shared by dynamic thresholds, as the buffers of a switch are: a peer may hold a quarter of
//! what is still free. One peer alone gets a fifth of the budget, ten greedy ones leave a tenth to others. A
//! peer here is an address, or the /64 of IPv6: a host that opens many connections is one peer.

use crate::sync::{Arc, Mutex, lock};
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
/// A peer may hold this part of what is free.
const PEERS_PART: usize = 4;
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
    by_peer: FxHashMap<IpAddr, usize>,
}

impl PeerMemory {
    pub(crate) fn new(budget: usize) -> Arc<Self> {
        Arc::new(Self { budget, held: Mutex::default() })
    }

    /// The account of a new connection.
    pub(crate) fn account(self: &Arc<Self>, peer: IpAddr) -> Account {
        Account { memory: Arc::clone(self), peer: of_peer(peer), counted: 0 }
    }

    /// Bytes that are counted now.
    pub(crate) fn held(&self) -> usize {
        lock(&self.held).total
    }

    fn change(&self, peer: IpAddr, from: usize, to: usize) -> bool {
        let mut held = lock(&self.held);
        let others = held.by_peer.get(&peer).map_or(0, |of_peer| of_peer - from);
        let total = held.total - from + to;
        if to > from && others + to > self.budget.saturating_sub(total) / PEERS_PART {
            return false;
        }
        held.total = total;
        match others + to {
            0 => drop(held.by_peer.remove(&peer)),
            of_peer => drop(held.by_peer.insert(peer, of_peer)),
        }
        true
    }
}

/// Whom an address stands for.
fn of_peer(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) & !u128::from(u64::MAX)).into()),
        v4 => v4,
    }
}

/// What one connection holds. Dropping it gives all of it back.
#[derive(Debug)]
pub(crate) struct Account {
    memory: Arc<PeerMemory>,
    peer: IpAddr,
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
        let mut other = memory.account(ip("10.0.0.2"));
        assert!(other.hold(BUDGET / 8), "others have a fifth of what is left");
        drop((all, other));
        assert_eq!((memory.held(), lock(&memory.held).by_peer.len()), (0, 0));
    }

    #[test]
    fn ten_greedy_hosts_leave_an_honest_one_its_largest_request() {
        let memory = PeerMemory::new(BUDGET);
        let greedy: Vec<_> =
            (1..=10).flat_map(|host| greedy(&memory, ip(&format!("10.0.0.{host}")))).collect();
        let mut honest = memory.account(ip("10.1.0.1"));
        assert!(honest.hold(1024 * 1024), "{} of {BUDGET} are held", memory.held());
        drop(greedy);
        // The addresses of one network of IPv6 are one host's.
        let memory = PeerMemory::new(BUDGET);
        let all: Vec<_> = (1..=10).flat_map(|n| greedy_v6(&memory, n)).collect();
        assert!(memory.held() <= BUDGET / 5, "{} by {}", memory.held(), all.len());
    }

    fn greedy_v6(memory: &Arc<PeerMemory>, host: u32) -> Vec<Account> {
        greedy(memory, ip(&format!("fd00::{host}")))
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
