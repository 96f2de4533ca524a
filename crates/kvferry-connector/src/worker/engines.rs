//! Producing engines that this rank knows.

use super::producer_engine::ProducerEngine;
use kvferry::Incarnation;
use kvferry_proto::engine_handshake::EngineId;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Engines that are kept at most. The least recently used one is dropped first.
const ENGINES_MAX: usize = 1024;

/// Engines by the address under which requests name them, each with the time of its last use.
#[derive(Debug, Default)]
pub(super) struct Engines {
    pub(super) known: FxHashMap<String, (Arc<ProducerEngine>, u64)>,
    uses: u64,
}

impl Engines {
    /// The engine at an address, unless `id` names another life of it.
    pub(super) fn get(
        &mut self,
        address: &str,
        id: Option<EngineId>,
    ) -> Option<Arc<ProducerEngine>> {
        self.uses += 1;
        let (engine, used) = self.known.get_mut(address)?;
        if id.is_some_and(|id| id != engine.id) {
            return None;
        }
        *used = self.uses;
        Some(Arc::clone(engine))
    }

    pub(super) fn insert(&mut self, address: String, engine: &Arc<ProducerEngine>) {
        self.uses += 1;
        self.known.insert(address, (Arc::clone(engine), self.uses));
        if self.known.len() > ENGINES_MAX {
            let oldest = self.known.iter().min_by_key(|(_, (_, used))| *used);
            let oldest = oldest.map(|(address, _)| address.clone()).expect("one was inserted");
            self.known.remove(&oldest);
        }
    }

    /// The addresses under which requests name engines that have this rank.
    pub(super) fn with_rank(&self, life: Incarnation) -> Vec<String> {
        let having = self.known.iter().filter(|(_, (engine, _))| engine.has_rank(life));
        having.map(|(address, _)| address.clone()).collect()
    }

    /// Addresses of the ranks that this rank reads from, if the engine is known.
    pub(super) fn addresses(&self, address: &str) -> Vec<String> {
        self.known.get(address).map_or_else(Vec::new, |(engine, _)| engine.addresses().collect())
    }
}
