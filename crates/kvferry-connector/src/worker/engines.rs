//! Producing engines that this rank knows.

use super::producer_engine::{CardsHash, ProducerEngine};
use crate::address::ProducerAddress;
use kvferry_proto::Timestamp;
use kvferry_proto::engine_handshake::{EngineId, Pairing};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;
use std::time::Duration;

/// Engines that are kept at most. The least recently used one is dropped first.
pub(super) const ENGINES_MAX: usize = 1024;

/// Bytes of engines that are kept at most, each counted once. The largest one is dropped first: an engine chooses its size,
/// and a large one costs no other one its place.
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

    pub(super) fn insert(
        &mut self,
        address: ProducerAddress,
        engine: &Arc<ProducerEngine>,
        learned: Timestamp,
    ) {
        self.uses += 1;
        let known = KnownEngine { engine: Arc::clone(engine), learned, used: self.uses };
        self.known.insert(address, known);
        while self.size() > BYTES_MAX {
            // The new one stays: an action waits for it.
            let all = self.known.values().map(|known| &known.engine);
            let others = all.filter(|other| !Arc::ptr_eq(other, engine));
            let Some(largest) = others.max_by_key(|it| it.size()).map(Arc::clone) else { break };
            self.forget_engine(&largest);
        }
        if self.known.len() > ENGINES_MAX {
            let oldest = self.known.iter().min_by_key(|(_, known)| known.used);
            let oldest = oldest.map(|(address, _)| address.clone()).expect("one was inserted");
            self.known.remove(&oldest);
        }
    }

    /// Bytes of all engines. One that is known under several addresses counts once.
    fn size(&self) -> usize {
        let mut counted = FxHashSet::default();
        let engines = self.known.values().map(|known| &known.engine);
        let engines = engines.filter(|engine| counted.insert(Arc::as_ptr(engine)));
        engines.map(|engine| engine.size()).sum()
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
