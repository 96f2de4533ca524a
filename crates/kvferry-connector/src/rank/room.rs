//! Room for the sessions with suppliers.
//!
//! An engine names the addresses of its ranks, and a client names the engine. So an address counts for the host of the
//! address by which its engine was named. A host gets another place only while more places are free than it has, and a
//! network only while more than a third of those that it has are free: one host has half of all places at most, two of
//! them a third each, one network three quarters. Places that nothing needs do not count; their sessions end when room is
//! needed. A session that there is has a quarter more: those that are being opened may lead nowhere.

use kvferry_proto::Origin;
use rustc_hash::FxHashMap;
use std::net::IpAddr;

/// Sessions that handoffs and engine handshakes need at a time at most.
const SESSIONS_MAX: usize = 1024;

/// A process may have one session with the engines of one host for so many of its descriptors, and twice as many with those
/// of all hosts. A session has a descriptor of its own, and more for its streams while they read.
const DESCRIPTORS_SHARE: usize = 4;

/// Sessions that a process with so many descriptors may need at a time.
pub(super) fn sessions_max(descriptors: usize) -> usize {
    (2 * (descriptors / DESCRIPTORS_SHARE)).min(SESSIONS_MAX)
}

/// Numbers of places, by the hosts that they count for.
#[derive(Debug, Default)]
pub(super) struct Counts {
    all: usize,
    hosts: FxHashMap<Origin, usize>,
    networks: FxHashMap<IpAddr, usize>,
}

impl Counts {
    pub(super) const fn all(&self) -> usize {
        self.all
    }

    /// The number of places in the host's network, and of its own.
    pub(super) fn of(&self, host: Origin) -> (usize, usize) {
        let of_network = self.networks.get(&host.network()).copied();
        let of_host = self.hosts.get(&host).copied();
        (of_network.unwrap_or(0), of_host.unwrap_or(0))
    }

    pub(super) fn add(&mut self, host: Origin) {
        self.all += 1;
        *self.hosts.entry(host).or_default() += 1;
        *self.networks.entry(host.network()).or_default() += 1;
    }

    /// Removes a place that was added.
    pub(super) fn remove(&mut self, host: Origin) {
        self.all -= 1;
        if let Some(count) = self.hosts.get_mut(&host) {
            *count -= 1;
        }
        if let Some(count) = self.networks.get_mut(&host.network()) {
            *count -= 1;
        }
    }

    /// True if there is room for another place of a host, where there is room for `limit` places.
    pub(super) fn has_room_for(&self, host: Origin, limit: usize) -> bool {
        let free = limit.saturating_sub(self.all);
        let (of_network, of_host) = self.of(host);
        of_host < free && of_network < 3 * free
    }
}

impl FromIterator<Origin> for Counts {
    fn from_iter<I: IntoIterator<Item = Origin>>(hosts: I) -> Self {
        let mut counts = Self::default();
        hosts.into_iter().for_each(|host| counts.add(host));
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_proto::plan::SOURCES_MAX;

    fn origin(address: &str) -> Origin {
        Origin::from(address.parse::<IpAddr>().expect("an address"))
    }

    /// Adds places of a host while there is room. Returns how many.
    fn fill(counts: &mut Counts, host: &str, limit: usize) -> usize {
        let before = counts.all();
        while counts.has_room_for(origin(host), limit) {
            counts.add(origin(host));
        }
        counts.all() - before
    }

    #[test]
    fn the_largest_engine_fits_with_two_addresses_for_each_rank_into_the_usual_descriptors() {
        for descriptors in [1024, 4096, 1 << 20, usize::MAX] {
            let limit = sessions_max(descriptors);
            let of_host = fill(&mut Counts::default(), "10.0.0.1", limit);
            assert!(of_host >= 2 * SOURCES_MAX, "{of_host} with {descriptors} descriptors");
            assert!(of_host >= (descriptors / 4).min(SESSIONS_MAX / 2));
        }
    }

    #[test]
    fn engines_of_one_host_leave_half_of_the_room_and_those_of_one_network_a_quarter() {
        let (mut counts, limit) = (Counts::default(), 512);
        assert_eq!(fill(&mut counts, "10.0.0.1", limit), 256);
        // The second host has room for the largest engine.
        assert_eq!(fill(&mut counts, "10.0.0.2", limit), SOURCES_MAX);
        assert_eq!(fill(&mut counts, "10.0.0.3", limit), 0);
        assert_eq!(fill(&mut counts, "10.0.1.1", limit), 64);
        assert_eq!(fill(&mut counts, "fd00::1", limit), 32);
        counts.remove(origin("10.0.0.1"));
        assert_eq!((counts.all(), counts.of(origin("10.0.0.1"))), (479, (383, 255)));
    }
}
