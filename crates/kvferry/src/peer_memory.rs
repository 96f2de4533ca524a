//! Bounds the memory that peers make an agent hold, for all of them together.
//!
//! What a peer sends is held until it is complete: the head of a request, a control message, what waits
//! to be handled, and answers that the peer does not read. Each of these has a bound of its own, and so
//! has the number of connections; the product of the two is more than a machine has. So what a
//! connection holds beyond [`FREE_PER_CONNECTION`] comes from one budget
//! ([`Config::peer_memory`](crate::Config::peer_memory)).
//!
//! A host that has too much can't give any of it back: what it holds are messages under way. So a host is refused more
//! before all is taken, by dynamic thresholds, as the buffers of a switch are shared. A network may hold a half of
//! what is still free, and a host as much as its network may still get. One host alone gets a fifth of the budget, and all
//! hosts of one network get a third. Of those that take what they can, each further network gets two thirds of what the one
//! before got, and each further host of a network two fifths. Addresses distinguish hosts ([`Origin`]),
//! however many connections they open.
//!
//! Messages that this side queues for slow peers ([`Memory::Queued`]) take at most a half of the budget, and none of a
//! host's thresholds for what it sends: a peer whose messages wait here can still send.

use crate::sync::{Arc, Mutex};
use kvferry_proto::Origin;
use rustc_hash::FxHashMap;
use std::net::IpAddr;

/// Bytes that a connection may hold without being counted: a request with some 1 500 descriptors, or the control
/// messages of an exchange. The descriptor limit bounds the sum.
pub(crate) const FREE_PER_CONNECTION: usize = 64 * 1024;

/// The smallest budget that a configuration may set: a request's largest head and a control message,
/// both of one peer.
pub(crate) const PEER_MEMORY_MIN: usize = 16 * 1024 * 1024;
/// The smallest default.
const DEFAULT_MIN: usize = 64 * 1024 * 1024;
/// A network may hold this part of what is free, and messages that are queued may take this part of the budget.
const NETWORKS_PART: usize = 2;
const QUEUED_PART: usize = 2;
/// The default is this part of the memory that the process may use.
const DEFAULT_PART: usize = 64;

/// The budget where none is configured.
pub(crate) fn default_budget() -> usize {
    kvferry_sys::memory::limit().map_or(DEFAULT_MIN, |all| (all / DEFAULT_PART).max(DEFAULT_MIN))
}

/// Memory that peers hold beyond the free part of each connection.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    budget: usize,
    held: Mutex<HeldBytes>,
}

/// Kind of memory that an account counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Bytes that a connection's peer has sent, and answers that it does not read.
    Received,
    /// Messages of this side that a session's peer has not taken.
    Queued,
}

/// Bytes that are held, by their kind.
#[derive(Debug, Default)]
struct HeldBytes {
    received: Part,
    queued: Part,
}

#[derive(Debug, Default)]
struct Part {
    total: usize,
    /// Bytes of each host and network; never zero.
    by_holder: FxHashMap<Holder, usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Host(IpAddr),
    Network(IpAddr),
}

impl Part {
    fn of(&self, holder: Holder) -> usize {
        self.by_holder.get(&holder).copied().unwrap_or(0)
    }

    /// Changes the bytes of a host. False if it would exceed its part of `budget`.
    fn change(&mut self, peer: Origin, from: usize, to: usize, budget: usize) -> bool {
        let (host, network) = (Holder::Host(peer.host()), Holder::Network(peer.network()));
        let [total, of_host, of_network] =
            [self.total, self.of(host), self.of(network)].map(|before| before - from + to);
        let most = budget.saturating_sub(total) / NETWORKS_PART;
        if to > from && of_host > most.saturating_sub(of_network) {
            return false;
        }
        self.total = total;
        for (holder, bytes) in [(host, of_host), (network, of_network)] {
            match bytes {
                0 => drop(self.by_holder.remove(&holder)),
                _ => drop(self.by_holder.insert(holder, bytes)),
            }
        }
        true
    }
}

impl PeerMemory {
    pub(crate) fn new(budget: usize) -> Arc<Self> {
        Arc::new(Self { budget, held: Mutex::default() })
    }

    /// The account of a new connection, or of the messages of a new session.
    pub(crate) fn account(self: &Arc<Self>, peer: IpAddr, memory: Memory) -> Account {
        Account { of: Arc::clone(self), memory, peer: Origin::from(peer), counted: 0 }
    }

    /// Bytes that are counted now.
    pub(crate) fn held(&self) -> usize {
        let held = self.held.lock();
        held.received.total + held.queued.total
    }

    fn change(&self, memory: Memory, peer: Origin, from: usize, to: usize) -> bool {
        let mut held = self.held.lock();
        let HeldBytes { received, queued } = &mut *held;
        match memory {
            Memory::Received => {
                received.change(peer, from, to, self.budget.saturating_sub(queued.total))
            }
            Memory::Queued => {
                let left = self.budget.saturating_sub(received.total);
                queued.change(peer, from, to, left.min(self.budget / QUEUED_PART))
            }
        }
    }
}

/// Bytes that one connection holds. Dropping the account gives them back.
#[derive(Debug)]
pub struct Account {
    of: Arc<PeerMemory>,
    memory: Memory,
    peer: Origin,
    /// Bytes beyond [`FREE_PER_CONNECTION`].
    counted: usize,
}

impl Account {
    /// The connection holds `bytes` from now on. False if that is more than before and more than it may
    /// hold; then nothing changes.
    #[must_use]
    pub fn hold(&mut self, bytes: usize) -> bool {
        let counted = bytes.saturating_sub(FREE_PER_CONNECTION);
        // Most connections never hold more than what is free: no lock.
        if counted == self.counted {
            return true;
        }
        let is_granted = self.of.change(self.memory, self.peer, self.counted, counted);
        if is_granted {
            self.counted = counted;
        }
        is_granted
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if self.counted > 0 {
            self.of.change(self.memory, self.peer, self.counted, 0);
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

    fn received(memory: &Arc<PeerMemory>, peer: IpAddr) -> Account {
        memory.account(peer, Memory::Received)
    }

    /// Connections of a peer that take as much as they get, 1 MiB each.
    fn greedy(memory: &Arc<PeerMemory>, peer: IpAddr) -> Vec<Account> {
        let connection = || {
            let mut account = received(memory, peer);
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
        assert!(!received(&memory, ip("::ffff:10.0.0.1")).hold(FREE_PER_CONNECTION + STEP));
        let mut other = received(&memory, ip("10.0.1.1"));
        assert!(other.hold(BUDGET / 8), "others have a fifth of what is left");
        let mut neighbour = received(&memory, ip("10.0.0.2"));
        assert!(neighbour.hold(BUDGET / 20), "its network has more than one host gets");
        drop((all, other, neighbour));
        assert_eq!((memory.held(), memory.held.lock().received.by_holder.len()), (0, 0));
    }

    #[test]
    fn ten_greedy_hosts_leave_an_honest_one_its_largest_request() {
        let memory = PeerMemory::new(BUDGET);
        let greedy: Vec<_> = (1..=10)
            .flat_map(|network| greedy(&memory, ip(&format!("10.0.{network}.1"))))
            .collect();
        let mut honest = received(&memory, ip("10.1.0.1"));
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
            let mut honest = received(&memory, ip("192.168.0.1"));
            assert!(honest.hold(BUDGET / 8), "{held} of {BUDGET} are held");
        }
    }

    #[test]
    fn greedy_hosts_leave_room_to_another_of_their_network() {
        let memory = PeerMemory::new(BUDGET);
        let hosts = (1..=3).map(|host| ip(&format!("10.0.0.{host}")));
        let greedy: Vec<_> = hosts.flat_map(|host| greedy(&memory, host)).collect();
        let mut neighbour = received(&memory, ip("10.0.0.99"));
        assert!(neighbour.hold(BUDGET / 100), "{} of {BUDGET} are held", memory.held());
        drop(greedy);
    }

    #[test]
    fn messages_that_are_queued_leave_room_for_what_their_hosts_send() {
        let memory = PeerMemory::new(BUDGET);
        let queue = |peer| {
            let mut account = memory.account(peer, Memory::Queued);
            let steps = (1..).take_while(|n| account.hold(n * STEP)).count();
            (steps * STEP, account)
        };
        let mut all = vec![queue(ip("10.0.0.1"))];
        let of_first = all[0].0;
        assert!(
            (BUDGET / 12..=BUDGET / 10 + FREE_PER_CONNECTION).contains(&of_first),
            "{of_first}"
        );
        let mut sent = received(&memory, ip("10.0.0.1"));
        assert!(sent.hold(BUDGET / 6), "almost as much as without messages");
        drop(sent);
        all.extend((1..=99).map(|network| queue(ip(&format!("10.0.{network}.1")))));
        assert!((BUDGET / 3..=BUDGET / 2).contains(&memory.held()), "{}", memory.held());
        assert!(received(&memory, ip("10.0.0.1")).hold(BUDGET / 10), "as much as of a half");
        drop(all);
        assert_eq!((memory.held(), memory.held.lock().queued.by_holder.len()), (0, 0));
    }

    #[test]
    fn what_is_free_for_a_connection_is_not_counted_and_less_is_always_granted() {
        let memory = PeerMemory::new(0);
        let mut account = received(&memory, ip("10.0.0.1"));
        assert!(account.hold(FREE_PER_CONNECTION) && !account.hold(FREE_PER_CONNECTION + 1));
        let memory = PeerMemory::new(BUDGET);
        let mut first = received(&memory, ip("10.0.0.1"));
        assert!(first.hold(BUDGET / 8));
        assert!(first.hold(BUDGET / 16) && memory.held() == BUDGET / 16 - FREE_PER_CONNECTION);
    }
}
