//! Host names and bootstrap servers of producing engines. Looking one up blocks, so it happens on a
//! thread of its own; what needs the name waits here.

use super::bootstrap;
use super::state::PendingAction;
use kvferry::Peer;
use kvferry_proto::engine_handshake::EngineId;
use rustc_hash::FxHashMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// Addresses that are looked up at a time at most: each takes a thread.
pub(super) const LOOKUPS_MAX: usize = 32;

/// Names that are kept at most.
const NAMES_MAX: usize = 1024;

/// What a lookup found.
pub(super) enum Found {
    Peers(Vec<(String, Peer)>),
    /// The engines behind a bootstrap server.
    Engines(bootstrap::Engines),
}

/// Finds a peer by its `host:port`. Blocks while it looks a name up.
pub(super) type LookUp = Arc<dyn Fn(&str) -> kvferry::Result<Peer> + Send + Sync>;

/// Names that were looked up, and what waits for others.
#[derive(Default)]
pub(super) struct Names {
    pub(super) known: FxHashMap<String, Peer>,
    /// Engines behind bootstrap servers: by the server's address and the id in requests, the engine and
    /// `host:port` of an agent of it. A restarted engine has another id, requests may have the old one.
    engines: FxHashMap<(String, EngineId), (EngineId, String)>,
    /// By the address of the engine that it is for.
    pub(super) waiting: FxHashMap<String, Vec<PendingAction>>,
}

impl Names {
    /// Whether the peer at an address is known without a lookup that blocks.
    pub(super) fn is_known(&self, address: &str) -> bool {
        is_literal(address) || self.known.contains_key(address)
    }

    /// Whether the names of the engine at `address` are being looked up, or could be.
    pub(super) fn has_room(&self, address: &str) -> bool {
        self.waiting.len() < LOOKUPS_MAX || self.waiting.contains_key(address)
    }

    /// Has an action wait for the names of an engine. True if nothing waited for them before: the
    /// caller starts the lookup.
    pub(super) fn wait(&mut self, address: String, action: PendingAction) -> bool {
        let waiting = self.waiting.entry(address).or_default();
        waiting.push(action);
        waiting.len() == 1
    }

    /// Takes what waits for the names of an engine: their lookup has ended.
    pub(super) fn take(&mut self, address: &str) -> Vec<PendingAction> {
        self.waiting.remove(address).unwrap_or_default()
    }

    pub(super) fn learn(&mut self, names: Vec<(String, Peer)>) {
        if self.known.len() + names.len() > NAMES_MAX {
            self.known.clear();
        }
        self.known.extend(names);
    }

    /// The engine behind a bootstrap server that requests with this id mean, and an agent of it.
    pub(super) fn engine(&self, url: &str, asked: Option<EngineId>) -> Option<&(EngineId, String)> {
        self.engines.get(&(url.to_owned(), asked?))
    }

    pub(super) fn learn_engine(&mut self, url: String, asked: EngineId, found: (EngineId, String)) {
        if self.engines.len() >= NAMES_MAX {
            self.engines.clear();
        }
        self.engines.insert((url, asked), found);
    }

    /// Has a name looked up again when it is needed next: its host may have moved.
    pub(super) fn forget(&mut self, name: &str) {
        self.known.remove(name);
        self.engines.retain(|_, (_, address)| address != name);
    }
}

/// Whether an address names no host that must be looked up.
pub(super) fn is_literal(address: &str) -> bool {
    address.parse::<SocketAddr>().is_ok()
}
