//! Producing engines that this rank knows.

use super::producer_engine::{CardsHash, ProducerEngine};
use crate::address::ProducerAddress;
use kvferry_proto::engine_handshake::{EngineId, Pairing};
use kvferry_proto::{Origin, Timestamp};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

/// Engines that are kept at most. The least recently used one is dropped first.
pub(super) const ENGINES_MAX: usize = 1024;

/// Bytes of engines that are kept at most, each counted once, for the host of the address by which it was named last. The
/// host with most in the network with most loses its least recently used engine first.
const BYTES_MAX: usize = 256 * 1024 * 1024;

/// Time after an engine was learned for which a request for another one at its address fails
/// without a handshake: a client can make ids up, and an engine does not restart sooner.
pub(super) const FRESH: Duration = Duration::from_secs(1);

/// Engines by the address under which requests name them.
#[derive(Debug, Default)]
pub(super) struct Engines {
    pub(super) known: FxHashMap<ProducerAddress, KnownEngine>,
    uses: u64,
}

#[derive(Debug)]
pub(super) struct KnownEngine {
    engine: Arc<ProducerEngine>,
    /// Time at which its handshake ended.
    pub(super) learned: Timestamp,
    /// The host that it counts for.
    host: Origin,
    used: u64,
}

/// The engine that a request means, as far as it is known.
#[derive(Debug)]
pub(super) enum Lookup {
    Known(Arc<ProducerEngine>),
    /// Another engine was found at the address a moment ago.
    Another,
    Unknown,
}

impl Engines {
    /// The engine at an address, if it is the one that a request means: `None` for any.
    pub(super) fn find(&mut self, address: &str, id: Option<EngineId>, now: Timestamp) -> Lookup {
        self.uses += 1;
        let Some(known) = self.known.get_mut(address) else { return Lookup::Unknown };
        if id.is_some_and(|id| id != known.engine.id) {
            let is_fresh = now.saturating_since(known.learned) < FRESH;
            return if is_fresh { Lookup::Another } else { Lookup::Unknown };
        }
        known.used = self.uses;
        Lookup::Known(Arc::clone(&known.engine))
    }

    /// The id of the engine at an address.
    pub(super) fn id(&self, address: &str) -> Option<EngineId> {
        self.known.get(address).map(|known| known.engine.id)
    }

    /// The engine that a handshake found, if it is known under any address.
    pub(super) fn of(
        &self,
        rank: usize,
        pairing: &Pairing,
        cards: CardsHash,
    ) -> Option<Arc<ProducerEngine>> {
        let mut engines = self.known.values().map(|known| &known.engine);
        engines.find(|engine| engine.is_of(rank, pairing, cards)).map(Arc::clone)
    }

    /// Adds an engine that is named by an address of this host. Returns those that have gone: giving their memory back
    /// takes a while.
    #[must_use]
    pub(super) fn insert(
        &mut self,
        address: ProducerAddress,
        host: Origin,
        engine: &Arc<ProducerEngine>,
        learned: Timestamp,
    ) -> Vec<Arc<ProducerEngine>> {
        self.uses += 1;
        let known = KnownEngine { engine: Arc::clone(engine), learned, host, used: self.uses };
        let before = self.known.insert(address, known).map(|before| before.engine);
        if before.as_ref().is_some_and(|before| Arc::ptr_eq(before, engine)) {
            return Vec::new();
        }
        let mut gone = Vec::from_iter(before);
        gone.extend(self.excess(engine));
        self.known.retain(|_, known| !gone.iter().any(|it| Arc::ptr_eq(it, &known.engine)));
        if self.known.len() > ENGINES_MAX {
            let oldest = self.known.iter().min_by_key(|(_, known)| known.used);
            let oldest = oldest.map(|(address, _)| address.clone()).expect("one was inserted");
            gone.extend(self.known.remove(&oldest).map(|known| known.engine));
        }
        gone
    }

    /// The engines that have to go, if there is too much. None of them is `new`, which an action waits for.
    fn excess(&self, new: &Arc<ProducerEngine>) -> Vec<Arc<ProducerEngine>> {
        let mut engines = FxHashMap::default();
        for known in self.known.values() {
            let one = engines.entry(Arc::as_ptr(&known.engine)).or_insert(known);
            if known.used > one.used {
                *one = known;
            }
        }
        let (mut all, mut of_hosts, mut of_networks) =
            (0, FxHashMap::default(), FxHashMap::default());
        for known in engines.values() {
            let size = known.engine.size();
            all += size;
            *of_hosts.entry(known.host).or_insert(0) += size;
            *of_networks.entry(known.host.network()).or_insert(0) += size;
        }
        engines.remove(&Arc::as_ptr(new));
        let mut gone = Vec::new();
        while all > BYTES_MAX {
            let of = |host: Origin| (of_networks[&host.network()], of_hosts[&host]);
            let largest = engines.values().max_by_key(|it| (of(it.host), Reverse(it.used)));
            let Some(KnownEngine { engine, host, .. }) = largest.copied() else { break };
            let size = engine.size();
            all -= size;
            *of_hosts.entry(*host).or_insert(size) -= size;
            *of_networks.entry(host.network()).or_insert(size) -= size;
            engines.remove(&Arc::as_ptr(engine));
            gone.push(Arc::clone(engine));
        }
        gone
    }

    /// Forgets the engine at an address, under all its addresses: it is gone.
    pub(super) fn forget(&mut self, address: &ProducerAddress) {
        if let Some(gone) = self.known.remove(address) {
            self.forget_engine(&gone.engine);
        }
    }

    fn forget_engine(&mut self, engine: &Arc<ProducerEngine>) {
        self.known.retain(|_, known| !Arc::ptr_eq(&known.engine, engine));
    }

    /// The addresses under which requests name engines that were found at this address or have a rank there.
    pub(super) fn reached_at(&self, address: &str) -> Vec<ProducerAddress> {
        let reached = self.known.iter().filter(|(named, known)| {
            named.as_str() == address || known.engine.has_rank_at(address)
        });
        reached.map(|(named, _)| named.clone()).collect()
    }

    /// Addresses of the ranks that this rank reads from, if the engine is known.
    pub(super) fn addresses(&self, address: &str) -> Vec<String> {
        let known = self.known.get(address);
        known.map_or_else(Vec::new, |known| known.engine.addresses().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::now;
    use std::net::IpAddr;

    fn origin(host: &str) -> Origin {
        Origin::from(host.parse::<IpAddr>().expect("an address"))
    }

    /// Engines of these hosts and sizes in MiB, learned one after the other.
    fn engines_of(all: &[(&str, usize)]) -> Engines {
        let mut engines = Engines::default();
        for (n, (host, size)) in all.iter().enumerate() {
            let engine = Arc::new(ProducerEngine::of_size(size << 20));
            drop(engines.insert(numbered(n), origin(host), &engine, now()));
        }
        engines
    }

    fn numbered(n: usize) -> ProducerAddress {
        format!("127.0.0.1:{}", 1 + n).parse().expect("an address")
    }

    fn kept(engines: &Engines) -> Vec<usize> {
        (0..20).filter(|n| engines.known.contains_key(&numbered(*n))).collect()
    }

    #[test]
    fn i8_engines_of_the_host_with_most_go_first_and_of_these_the_least_recently_used() {
        let honest = ("10.0.0.1", 60);
        let mut engines =
            engines_of(&[honest, ("10.0.1.1", 80), ("10.0.1.1", 80), ("10.0.1.1", 30)]);
        assert_eq!(kept(&engines), [0, 1, 2, 3]);
        assert!(matches!(engines.find(numbered(1).as_str(), None, now()), Lookup::Known(_)));
        let another = Arc::new(ProducerEngine::of_size(70 << 20));
        let gone = engines.insert(numbered(4), origin("10.0.1.1"), &another, now());
        assert_eq!((gone.len(), kept(&engines)), (1, vec![0, 1, 3, 4]));
        // An honest one of another host costs one of theirs, too.
        let another = Arc::new(ProducerEngine::of_size(40 << 20));
        drop(engines.insert(numbered(5), origin("10.0.2.1"), &another, now()));
        assert_eq!(kept(&engines), [0, 1, 4, 5]);
    }

    #[test]
    fn i8_a_new_engine_stays_whatever_its_size() {
        assert_eq!(kept(&engines_of(&[("10.0.0.1", 100), ("10.0.1.1", 300)])), [1]);
    }

    #[test]
    fn an_engine_that_is_known_under_several_addresses_counts_once_and_goes_under_all() {
        let mut engines = Engines::default();
        let of_size = |size: usize| Arc::new(ProducerEngine::of_size(size << 20));
        let [large, small, last] = [200, 50, 10].map(of_size);
        let mut insert = |n, engine| {
            let host = origin("10.0.0.1");
            drop(engines.insert(numbered(n), host, engine, now()));
            kept(&engines)
        };
        (0..4).for_each(|n| drop(insert(n, &large)));
        assert_eq!(insert(4, &small), [0, 1, 2, 3, 4]);
        assert_eq!(insert(5, &last), [4, 5]);
    }
}
