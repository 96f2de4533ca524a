//! The connections of the data port, which are limited in number.

use kvferry::transport::{Link, Remote, now};
use kvferry::{Error, ErrorKind};
use kvferry_proto::{Origin, Timestamp};
use kvferry_sys::sync::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Connections served at the same time.
const CONNECTIONS_MAX: usize = 1024;

/// The connections being served.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    last: u64,
    /// Open connections, by a number that counts up.
    seats: BTreeMap<u64, Arc<Seat>>,
}

/// The place of a connection.
#[derive(Debug)]
pub(super) struct Seat {
    link: Weak<Link>,
    network: IpAddr,
    remote: Remote,
    token: u64,
    /// Nanoseconds since when no request is in progress; [`BUSY`] while one is.
    idle_since: AtomicU64,
    /// The peer has sent a request.
    is_proven: AtomicBool,
}

const BUSY: u64 = u64::MAX;

impl Seat {
    /// The peer has sent a request.
    pub(super) fn prove(&self) {
        self.is_proven.store(true, Ordering::Relaxed);
    }

    /// Since when no request is in progress; `None` while one is.
    pub(super) fn set_idle(&self, since: Option<Timestamp>) {
        self.idle_since.store(since.map_or(BUSY, Timestamp::as_nanos), Ordering::Relaxed);
    }
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock()
    }

    /// Admits a connection. When the limit is reached, closes another one: the oldest that never sent a
    /// request, else, of the network that has most connections without a request in progress, the one
    /// that has been idle for longest. `None` if there is none, or the new one may not displace another.
    pub(super) fn admit(
        &self,
        link: &Arc<Link>,
        may_displace: bool,
        remote: &Remote,
        token: u64,
    ) -> Option<(u64, Arc<Seat>)> {
        let seat = Arc::new(Seat {
            link: Arc::downgrade(link),
            network: Origin::from(link.peer_addr.ip()).network(),
            remote: remote.clone(),
            token,
            idle_since: AtomicU64::new(now().as_nanos()),
            is_proven: AtomicBool::new(false),
        });
        let (number, evicted) = {
            let mut taken = self.lock();
            let max = CONNECTIONS_MAX.min(link.core.connections_max());
            let evicted = match taken.seats.len() < max {
                true => None,
                false => {
                    let number = may_displace.then(|| taken.dispensable()).flatten()?;
                    taken.seats.remove(&number)
                }
            };
            taken.last += 1;
            let number = taken.last;
            taken.seats.insert(number, Arc::clone(&seat));
            (number, evicted)
        };
        if let Some(evicted) = evicted {
            if let Some(link) = evicted.link.upgrade() {
                link.terminate(Error::new(
                    ErrorKind::Busy,
                    "closed, unused, for a newer connection",
                ));
            }
            evicted.remote.wake(evicted.token);
        }
        Some((number, seat))
    }

    pub(super) fn leave(&self, number: u64) {
        self.lock().seats.remove(&number);
    }
}

impl Taken {
    /// The connection to close for another one.
    fn dispensable(&self) -> Option<u64> {
        let unproven = self.seats.iter().find(|(_, seat)| !seat.is_proven.load(Ordering::Relaxed));
        if let Some((number, _)) = unproven {
            return Some(*number);
        }
        let idle = |seat: &Seat| seat.idle_since.load(Ordering::Relaxed);
        let mut idle_of: FxHashMap<IpAddr, (usize, Reverse<(u64, u64)>)> = FxHashMap::default();
        for (number, seat) in self.seats.iter().filter(|(_, seat)| idle(seat) != BUSY) {
            let longest = Reverse((idle(seat), *number));
            let (count, oldest) = idle_of.entry(seat.network).or_insert((0, longest));
            *count += 1;
            *oldest = longest.max(*oldest);
        }
        idle_of.into_values().max().map(|(_, Reverse((_, number)))| number)
    }
}
