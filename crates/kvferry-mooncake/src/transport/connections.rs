//! The connections of the data port, which are limited in number.

use kvferry::transport::{Link, Remote, now};
use kvferry::{Error, ErrorKind};
use kvferry_proto::{Origin, Timestamp};
use kvferry_sys::sync::Mutex;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Connections served at the same time.
const CONNECTIONS_MAX: usize = 1024;

/// How long a connection without a request in progress is kept from networks that have more connections.
const KEPT: Duration = Duration::from_secs(60);

/// The connections being served.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    last: u64,
    /// Open connections, by a number that counts up.
    places: BTreeMap<u64, Place>,
}

/// An open connection, and how to end it.
#[derive(Debug)]
struct Place {
    seat: Arc<Seat>,
    link: Weak<Link>,
    remote: Remote,
    token: u64,
}

/// What decides which connection is closed for another one. The connection keeps it up to date.
#[derive(Debug)]
pub(super) struct Seat {
    network: IpAddr,
    /// Nanoseconds since when no request is in progress; [`BUSY`] while one is.
    idle_since: AtomicU64,
    /// When a byte last moved, in nanoseconds; [`WAITS`] while a request waits for memory of this side.
    moved_at: AtomicU64,
    /// The peer has sent a request.
    is_proven: AtomicBool,
}

const BUSY: u64 = u64::MAX;
const WAITS: u64 = u64::MAX;

impl Seat {
    fn new(network: IpAddr, at: Timestamp) -> Self {
        Self {
            network,
            idle_since: AtomicU64::new(at.as_nanos()),
            moved_at: AtomicU64::new(at.as_nanos()),
            is_proven: AtomicBool::new(false),
        }
    }

    /// The peer has sent a request.
    pub(super) fn prove(&self) {
        self.is_proven.store(true, Ordering::Relaxed);
    }

    /// Since when no request is in progress; `None` while one is.
    pub(super) fn set_idle(&self, since: Option<Timestamp>) {
        self.idle_since.store(since.map_or(BUSY, Timestamp::as_nanos), Ordering::Relaxed);
    }

    /// When a byte last moved; `None` while a request waits for memory of this side.
    pub(super) fn set_moved(&self, at: Option<Timestamp>) {
        self.moved_at.store(at.map_or(WAITS, Timestamp::as_nanos), Ordering::Relaxed);
    }

    fn is_proven(&self) -> bool {
        self.is_proven.load(Ordering::Relaxed)
    }

    fn idle_since(&self) -> u64 {
        self.idle_since.load(Ordering::Relaxed)
    }

    fn moved_at(&self) -> u64 {
        self.moved_at.load(Ordering::Relaxed)
    }
}

impl Connections {
    /// Admits a connection. When the limit is reached, closes another one; see [`dispensable`]. `None` if there is
    /// none, or the new one may not displace another.
    pub(super) fn admit(
        &self,
        link: &Arc<Link>,
        may_displace: bool,
        remote: &Remote,
        token: u64,
    ) -> Option<(u64, Arc<Seat>)> {
        let (network, at) = (Origin::from(link.peer_addr.ip()).network(), now());
        let seat = Arc::new(Seat::new(network, at));
        let place = Place {
            seat: Arc::clone(&seat),
            link: Arc::downgrade(link),
            remote: remote.clone(),
            token,
        };
        let (number, evicted) = {
            let mut taken = self.0.lock();
            let max = CONNECTIONS_MAX.min(link.core.connections_max());
            let evicted = match taken.places.len() < max {
                true => None,
                false => {
                    let number = may_displace.then(|| taken.dispensable(network, at)).flatten()?;
                    taken.places.remove(&number)
                }
            };
            taken.last += 1;
            let number = taken.last;
            taken.places.insert(number, place);
            (number, evicted)
        };
        if let Some(evicted) = evicted {
            if let Some(link) = evicted.link.upgrade() {
                link.terminate(Error::new(ErrorKind::Busy, "closed for a newer connection"));
            }
            evicted.remote.wake(evicted.token);
        }
        Some((number, seat))
    }

    pub(super) fn leave(&self, number: u64) {
        self.0.lock().places.remove(&number);
    }
}

impl Taken {
    fn dispensable(&self, newcomer: IpAddr, at: Timestamp) -> Option<u64> {
        let seats = self.places.iter().map(|(number, place)| (*number, &*place.seat));
        let seats: Vec<_> = seats.collect();
        dispensable(&seats, newcomer, at)
    }
}

/// The connection to close for a new one of a peer in the network `newcomer`:
///
/// 1. one that never sent a request: of the network that has most connections, the oldest;
/// 2. one without a request in progress: of the network that has most such, the one that was idle for longest;
/// 3. one with a request in progress, which a peer may never finish: of the network that has most connections, if the
///    newcomer's has fewer, the one on which no byte has moved for longest.
///
/// A network loses a connection to one that has more only if the connection has been idle for [`KEPT`]. So a host that
/// opens many closes its own first.
fn dispensable(seats: &[(u64, &Seat)], newcomer: IpAddr, at: Timestamp) -> Option<u64> {
    let mut seats_of: FxHashMap<IpAddr, usize> = FxHashMap::default();
    for (_, seat) in seats {
        *seats_of.entry(seat.network).or_insert(0) += 1;
    }
    let own = seats_of.get(&newcomer).copied().unwrap_or(0);
    let long_ago = (at - KEPT).as_nanos();
    let gives_way = |seat: &Seat| seats_of[&seat.network] >= own || seat.idle_since() <= long_ago;
    let unproven = seats.iter().filter(|(_, seat)| !seat.is_proven() && gives_way(seat));
    let oldest = |(number, seat): &&(u64, &Seat)| (seats_of[&seat.network], Reverse(*number));
    if let Some((number, _)) = unproven.max_by_key(oldest) {
        return Some(*number);
    }
    longest_idle(seats.iter().filter(|(_, seat)| seat.is_proven() && gives_way(seat)))
        .or_else(|| of_the_crowd(seats, &seats_of, own))
}

fn longest_idle<'a>(seats: impl Iterator<Item = &'a (u64, &'a Seat)>) -> Option<u64> {
    let mut idle_of: FxHashMap<IpAddr, (usize, Reverse<(u64, u64)>)> = FxHashMap::default();
    for (number, seat) in seats {
        let since = seat.idle_since();
        if since == BUSY {
            continue;
        }
        let longest = Reverse((since, *number));
        let (count, oldest) = idle_of.entry(seat.network).or_insert((0, longest));
        *count += 1;
        *oldest = longest.max(*oldest);
    }
    idle_of.into_values().max().map(|(_, Reverse((_, number)))| number)
}

fn of_the_crowd(
    seats: &[(u64, &Seat)],
    seats_of: &FxHashMap<IpAddr, usize>,
    own: usize,
) -> Option<u64> {
    let (crowd, count) = seats_of.iter().max_by_key(|(_, count)| **count)?;
    // Equal shares do not change hands.
    if *count <= own + 1 {
        return None;
    }
    let of_crowd = seats.iter().filter(|(_, seat)| seat.network == *crowd);
    of_crowd.min_by_key(|(number, seat)| (seat.moved_at(), *number)).map(|(number, _)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(n: u64) -> Timestamp {
        Timestamp::from_nanos(0) + Duration::from_secs(n)
    }

    fn network(address: &str) -> IpAddr {
        Origin::from(address.parse::<IpAddr>().expect("an address")).network()
    }

    /// A connection that was opened in the first second.
    fn unproven(address: &str) -> Seat {
        Seat::new(network(address), second(1))
    }

    /// A connection with a request in progress, whose last byte has moved at this second.
    fn busy(address: &str, moved_at: u64) -> Seat {
        let seat = unproven(address);
        seat.prove();
        seat.set_idle(None);
        seat.set_moved(Some(second(moved_at)));
        seat
    }

    fn idle(address: &str, since: u64) -> Seat {
        let seat = busy(address, since);
        seat.set_idle(Some(second(since)));
        seat
    }

    /// The index of the seat that a newcomer at this address gets, ten seconds after the first one was taken.
    fn given_up(seats: &[Seat], newcomer: &str) -> Option<u64> {
        let seats: Vec<_> = (0..).zip(seats).collect();
        dispensable(&seats, network(newcomer), second(11))
    }

    #[test]
    fn half_sent_requests_of_one_network_keep_no_other_one_out() {
        let mut seats: Vec<_> = [5, 3, 4, 9].map(|at| busy("10.0.0.1", at)).into();
        seats.push(busy("10.0.1.1", 2));
        assert_eq!(given_up(&seats, "10.0.2.1"), Some(1), "no byte has moved for longest");
        assert_eq!(given_up(&seats, "10.0.1.9"), Some(1), "it has one of five");
        assert_eq!(given_up(&seats, "10.0.0.9"), None, "its network has most");
        seats[1].set_moved(None);
        assert_eq!(given_up(&seats, "10.0.2.1"), Some(2), "the second waits for this side");
    }

    #[test]
    fn equal_shares_of_busy_connections_do_not_change_hands() {
        let seats = ["10.0.0.1", "10.0.1.1", "10.0.0.1"].map(|address| busy(address, 1));
        assert_eq!(given_up(&seats, "10.0.1.1"), None);
        assert_eq!(given_up(&seats, "10.0.2.1"), Some(0));
    }

    #[test]
    fn a_connection_without_a_request_leaves_first_of_the_network_that_has_most() {
        let seats = [
            unproven("10.0.1.1"),
            busy("10.0.0.1", 1),
            unproven("10.0.0.1"),
            unproven("10.0.0.2"),
            idle("10.0.0.1", 1),
        ];
        assert_eq!(given_up(&seats, "10.0.2.1"), Some(2));
        assert_eq!(given_up(&seats, "10.0.0.9"), Some(2));
        assert_eq!(given_up(&seats[..2], "10.0.2.1"), Some(0));
    }

    #[test]
    fn a_network_that_has_most_connections_closes_its_own_or_those_long_idle() {
        let crowd = || [busy("10.0.0.1", 10), busy("10.0.0.1", 10), busy("10.0.0.1", 10)];
        let with = |seat: Seat| crowd().into_iter().chain([seat]).collect::<Vec<_>>();
        assert_eq!(given_up(&with(unproven("10.0.1.1")), "10.0.0.1"), None);
        assert_eq!(given_up(&with(idle("10.0.1.1", 1)), "10.0.0.1"), None);
        assert_eq!(given_up(&with(idle("10.0.0.2", 1)), "10.0.0.1"), Some(3));
        let late = second(61);
        for seat in [unproven("10.0.1.1"), idle("10.0.1.1", 1)] {
            let seats = with(seat);
            let seats: Vec<_> = (0..).zip(&seats).collect();
            assert_eq!(dispensable(&seats, network("10.0.0.1"), late), Some(3));
        }
    }

    #[test]
    fn of_idle_connections_the_network_that_has_most_loses_the_longest_idle_one() {
        let seats =
            [("10.0.1.1", 1), ("10.0.0.1", 5), ("10.0.0.2", 3)].map(|(from, at)| idle(from, at));
        assert_eq!(given_up(&seats, "10.0.2.1"), Some(2));
        assert_eq!(given_up(&seats, "10.0.1.1"), Some(2));
    }
}
