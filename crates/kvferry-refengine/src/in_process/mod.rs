//! A connector that copies KV between engines of one process, to test what kvferry's own never does
//! behind vLLM's seam: loads within a step, and failures by block. It does what the contract requires and
//! no more, with ranks of equal TP and any layout.
//!
//! A producer's request has [`produce`] as its `kv_transfer_params`; its response has the parameters for
//! the consumer's request.
//!
//! ```text
//! producer                                consumer
//! request_finished -> an offer            get_num_new_matched_tokens <- the offer
//!   (its blocks are held)                 update_state_after_alloc -> an order
//!                                         each rank copies, now or in some steps, or fails
//! each rank reports it sent          <--  the last rank has read, or the offer is withdrawn
//! ```

mod vllm;

use crate::config::EngineConfig;
use crate::contract;
use crate::contract::RequestView;
use crate::digest;
use crate::layout::{BlockId, KvCaches, LayerView};
use crate::model::Attention;
use crate::request::{Params, RequestId};
use crate::sync::lock;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// How loads are done. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadMode {
    /// Within the step that admits the request, layer by layer.
    Sync,
    /// Each rank by itself, one to `steps` steps later.
    Async {
        /// The most.
        steps: u64,
    },
}

/// How failures are reported. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKey {
    /// By request: asynchronous loads only.
    Request,
    /// By block: engines with one group only.
    Block,
}

/// Injected faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// The seed of random choices.
    pub seed: u64,
    /// How many of 100 loads fail, on one of the ranks.
    pub percent: u64,
    /// How they are reported.
    pub key: FailureKey,
}

impl Faults {
    /// No faults. `seed` determines how long loads take.
    pub const fn none(seed: u64) -> Self {
        Self { seed, percent: 0, key: FailureKey::Request }
    }
}

/// The `kv_transfer_params` of a producer's request.
pub fn produce() -> Params {
    Params::from_iter([("do_remote_decode".to_owned(), json!(true))])
}

/// What connects engines of one process.
#[derive(Clone, Debug)]
pub struct InProcess {
    hub: Arc<Mutex<Hub>>,
}

/// The KV of a finished request.
#[derive(Clone, Debug)]
struct Offer {
    engine: usize,
    request: RequestId,
    /// Tokens in the cache.
    tokens: usize,
    blocks: Vec<Vec<BlockId>>,
    /// How many ranks have read it.
    read: usize,
}

/// A load of the worker halves.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Order {
    request: RequestId,
    transfer: u64,
    /// Loads tokens `first..end`.
    first: usize,
    end: usize,
    /// The consumer's blocks, per group.
    blocks: Vec<Vec<BlockId>>,
    load_async: bool,
    /// The rank that fails.
    fails: Option<usize>,
}

#[derive(Debug)]
struct Hub {
    mode: LoadMode,
    faults: Faults,
    /// Per engine and rank.
    engines: Vec<Vec<Option<Arc<KvCaches>>>>,
    offers: BTreeMap<u64, Offer>,
    /// Per producing engine and rank: what is no longer read.
    sent: FxHashMap<(usize, usize), Vec<RequestId>>,
    next_transfer: u64,
    loads: u64,
    failures: u64,
}

impl InProcess {
    /// Without engines.
    pub fn new(mode: LoadMode, faults: Faults) -> Self {
        let hub = Hub {
            mode,
            faults,
            engines: vec![],
            offers: BTreeMap::new(),
            sent: FxHashMap::default(),
            next_transfer: 1,
            loads: 0,
            failures: 0,
        };
        Self { hub: Arc::new(Mutex::new(hub)) }
    }

    fn hub(&self) -> MutexGuard<'_, Hub> {
        lock(&self.hub)
    }

    /// Both halves of a connector for one more engine.
    pub fn vllm(&self, config: &EngineConfig) -> contract::vllm::Connector {
        let mut hub = self.hub();
        hub.engines.push(vec![None; config.ranks().len()]);
        let engine = hub.engines.len() - 1;
        contract::vllm::Connector {
            scheduler: Box::new(vllm::Scheduler::new(self.clone(), engine, config)),
            workers: (0..config.ranks().len())
                .map(|rank| Box::new(vllm::Worker::new(self.clone(), engine, rank)) as Box<_>)
                .collect(),
        }
    }

    /// Offers that were not taken, or that are being read.
    pub fn offers(&self) -> usize {
        self.hub().offers.len()
    }

    /// Loads so far, and how many of them failed by an injected fault.
    pub fn loads(&self) -> (u64, u64) {
        let hub = self.hub();
        (hub.loads, hub.failures)
    }

    /// Withdraws all offers.
    pub fn withdraw(&self) {
        let mut hub = self.hub();
        let all: Vec<_> = hub.offers.keys().copied().collect();
        all.into_iter().for_each(|transfer| hub.release(transfer));
    }
}

impl Hub {
    fn offer(&mut self, engine: usize, request: &RequestView<'_>, blocks: &[Vec<BlockId>]) -> u64 {
        let transfer = self.next_transfer;
        self.next_transfer += 1;
        let offer = Offer {
            engine,
            request: request.id.clone(),
            tokens: request.computed.min(request.prompt.len()),
            blocks: blocks.to_vec(),
            read: 0,
        };
        self.offers.insert(transfer, offer);
        transfer
    }

    /// Releases an offer.
    fn release(&mut self, transfer: u64) {
        let Some(offer) = self.offers.remove(&transfer) else { return };
        for rank in 0..self.engines[offer.engine].len() {
            self.sent.entry((offer.engine, rank)).or_default().push(offer.request.clone());
        }
    }

    /// One of `ranks` ranks has read an offer, or failed to.
    fn read(&mut self, transfer: u64, ranks: usize) {
        let offer = self.offers.get_mut(&transfer).expect("an offer stays until all have read it");
        offer.read += 1;
        if offer.read == ranks {
            self.release(transfer);
        }
    }

    fn random(&self, transfer: u64, role: u64, of: u64) -> u64 {
        digest::pair(digest::pair(self.faults.seed, role), transfer) % of
    }

    /// The rank, of `ranks`, that fails a load, if any.
    fn fault(&mut self, transfer: u64, ranks: usize) -> Option<usize> {
        self.loads += 1;
        let fails = self.random(transfer, 1, 100) < self.faults.percent;
        self.failures += u64::from(fails);
        let rank = self.random(transfer, 2, ranks as u64);
        fails.then(|| usize::try_from(rank).expect("less than the ranks"))
    }

    /// How many steps a rank takes for a load.
    fn delay(&self, transfer: u64, rank: usize) -> u64 {
        match self.mode {
            LoadMode::Sync => 0,
            LoadMode::Async { steps } => 1 + self.random(transfer, 16 + rank as u64, steps.max(1)),
        }
    }

    /// Copies one layer of an order. A failing rank leaves out the last block and returns it.
    fn copy(
        &self,
        order: &Order,
        to: &KvCaches,
        layer: &LayerView,
        fails: bool,
    ) -> Option<BlockId> {
        let offer = &self.offers[&order.transfer];
        let from = self.engines[offer.engine]
            .iter()
            .flatten()
            .find(|caches| {
                let theirs = &caches.layout;
                assert_eq!(theirs.tp, to.layout.tp, "ranks must be of equal TP");
                theirs.rank.tp == to.layout.rank.tp
                    && theirs.layers.iter().any(|it| it.name == layer.name)
            })
            .expect("every layer has a rank");
        let theirs = from.layout.layers.iter().find(|it| it.name == layer.name);
        let theirs = theirs.expect("the rank holds the layer");
        let group = &to.layout.groups[layer.group];
        assert_eq!(from.layout.groups[layer.group].block_tokens, group.block_tokens);
        let blocks = order.first / group.block_tokens..order.end.div_ceil(group.block_tokens);
        let mut copies: Vec<_> = blocks
            .map(|at| (offer.blocks[layer.group].get(at), order.blocks[layer.group][at]))
            .filter(|(_, to)| !to.is_null())
            .collect();
        let left_out = if fails { copies.pop().map(|(_, block)| block) } else { None };
        let tokens = match group.attention {
            Attention::State => 1,
            Attention::Full | Attention::Window { .. } => group.block_tokens,
        };
        for (source, block) in copies {
            let source = source.copied().filter(|id| !id.is_null());
            let source = source.expect("the producer has what the consumer's window needs");
            for plane in 0..layer.planes.len() {
                for head in 0..group.heads.count {
                    for token in 0..tokens {
                        let row = from.row(theirs, plane, source, head, token);
                        to.set_row(layer, plane, block, head, token, &row);
                    }
                }
            }
        }
        left_out
    }
}
