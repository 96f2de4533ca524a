//! The computation of a step on all ranks, layer by layer, over the paged caches.

use crate::digest;
use crate::layout::{BlockId, KvCaches, LayerView, PlaneView};
use crate::model::{Attention, ModelSpec};
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The tokens of one request in a step.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// Tokens to compute.
    pub(crate) tokens: Vec<u32>,
    /// The position of the first.
    pub(crate) start: usize,
    /// The request's blocks, per group.
    pub(crate) tables: Vec<Vec<BlockId>>,
}

/// Model and caches of all ranks, as the computation needs them.
#[derive(Debug)]
pub(crate) struct Ranks {
    pub(crate) model: ModelSpec,
    pub(crate) tp: usize,
    /// Caches of every rank: all TP ranks of the first stage before those of the next.
    pub(crate) caches: Vec<Arc<KvCaches>>,
    /// The stage of each layer, and its index there.
    pub(crate) places: Vec<(usize, usize)>,
}

impl Ranks {
    pub(crate) fn new(model: ModelSpec, tp: usize, caches: Vec<Arc<KvCaches>>) -> Self {
        let mut places = vec![(0, 0); model.layers.len()];
        for caches in caches.iter().filter(|caches| caches.layout.rank.tp == 0) {
            for (at, layer) in caches.layout.layers.iter().enumerate() {
                places[layer.index] = (caches.layout.rank.pp, at);
            }
        }
        Self { model, tp, caches, places }
    }
}

/// The forward pass of one step. A thread that needs a layer computes all missing layers up to it, on
/// all ranks, so no thread waits for another.
pub(crate) struct Forward {
    layers: usize,
    computed: AtomicUsize,
    pass: Mutex<Pass>,
}

impl Forward {
    pub(crate) fn new(ranks: &Arc<Ranks>, batch: Vec<Sequence>) -> Self {
        let hidden = batch
            .iter()
            .map(|it| it.tokens.iter().map(|token| ranks.model.embed(*token)).collect())
            .collect();
        let scratch = Scratch::default();
        Self {
            layers: ranks.model.layers.len(),
            computed: AtomicUsize::new(0),
            pass: Mutex::new(Pass { ranks: ranks.clone(), batch, hidden, scratch }),
        }
    }

    fn is_computed(&self, layer: usize) -> bool {
        self.computed.load(Ordering::Acquire) > layer
    }

    fn pass(&self) -> MutexGuard<'_, Pass> {
        self.pass.lock()
    }

    /// Computes every layer up to `layer`.
    pub(crate) fn run_through(&self, layer: usize) {
        if self.is_computed(layer) {
            return;
        }
        let mut pass = self.pass();
        for next in self.computed.load(Ordering::Acquire)..=layer {
            pass.layer(next);
            self.computed.store(next + 1, Ordering::Release);
        }
    }

    /// Computes the missing layers and the token after each sequence.
    pub(crate) fn finish(&self) -> Vec<u32> {
        self.run_through(self.layers - 1);
        let pass = self.pass();
        let last = pass.hidden.iter().map(|hidden| *hidden.last().expect("sequences have tokens"));
        last.map(|hidden| pass.ranks.model.sample(hidden)).collect()
    }
}

/// Happens when a layer of a step is computed and its bytes are in the cache, as a CUDA event on a
/// GPU.
#[derive(Clone)]
pub struct LayerEvent {
    pub(crate) forward: Arc<Forward>,
    pub(crate) layer: usize,
}

impl LayerEvent {
    /// Whether it has happened.
    pub fn is_ready(&self) -> bool {
        self.forward.is_computed(self.layer)
    }

    /// Returns when it has happened. May be called from any thread.
    pub fn wait(&self) {
        self.forward.run_through(self.layer);
    }
}

impl fmt::Debug for LayerEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerEvent")
            .field("layer", &self.layer)
            .field("ready", &self.is_ready())
            .finish()
    }
}

#[derive(Debug)]
struct Pass {
    ranks: Arc<Ranks>,
    batch: Vec<Sequence>,
    /// Hidden state of each token, per sequence.
    hidden: Vec<Vec<u64>>,
    scratch: Scratch,
}

#[derive(Debug, Default)]
struct Scratch {
    /// Digest of each visible position, per head.
    digests: Vec<Vec<u64>>,
    bytes: Vec<u8>,
    /// Contributions to each token, per sequence, summed over the ranks.
    sums: Vec<Vec<u64>>,
}

impl Pass {
    fn layer(&mut self, layer: usize) {
        let Self { ranks, batch, hidden, scratch } = self;
        let (stage, place) = ranks.places[layer];
        let mut sums = std::mem::take(&mut scratch.sums);
        sums.resize_with(batch.len(), Vec::new);
        for (sums, hidden) in sums.iter_mut().zip(&*hidden) {
            sums.clear();
            sums.resize(hidden.len(), 0);
        }
        // The all-reduce: wrapping sums over all ranks.
        for tp in 0..ranks.tp {
            let caches = &ranks.caches[stage * ranks.tp + tp];
            let rank = RankLayer { ranks, caches, layer: &caches.layout.layers[place], tp };
            for ((sequence, hidden), sums) in batch.iter().zip(&*hidden).zip(&mut sums) {
                match caches.layout.groups[rank.layer.group].attention {
                    Attention::State => rank.update(sequence, hidden, sums),
                    Attention::Full => rank.attend(sequence, hidden, usize::MAX, sums, scratch),
                    Attention::Window { tokens } => {
                        rank.attend(sequence, hidden, tokens, sums, scratch);
                    }
                }
            }
        }
        for (hidden, sums) in hidden.iter_mut().zip(&sums) {
            for (hidden, sum) in hidden.iter_mut().zip(sums) {
                *hidden = ranks.model.next_hidden(layer, *hidden, *sum);
            }
        }
        scratch.sums = sums;
    }
}

/// A layer on a rank.
struct RankLayer<'a> {
    ranks: &'a Ranks,
    caches: &'a KvCaches,
    layer: &'a LayerView,
    tp: usize,
}

impl RankLayer<'_> {
    /// This rank's query heads, each with its KV head, counted on this rank.
    fn query_heads(&self) -> impl Iterator<Item = (usize, usize)> {
        let model = &self.ranks.model;
        let share = model.query_heads / self.ranks.tp;
        let first = self.caches.layout.groups[self.layer.group].heads.first;
        (self.tp * share..(self.tp + 1) * share).map(move |query_head| {
            (query_head, model.kv_head(self.layer.group, query_head) - first)
        })
    }

    fn attend(
        &self,
        sequence: &Sequence,
        hidden: &[u64],
        window: usize,
        sums: &mut [u64],
        scratch: &mut Scratch,
    ) {
        self.keep(sequence, hidden, &mut scratch.bytes);
        let end = sequence.start + sequence.tokens.len();
        let first = (sequence.start + 1).saturating_sub(window);
        self.read(sequence, first, end, scratch);
        let (model, index) = (&self.ranks.model, self.layer.index);
        for (query_head, head) in self.query_heads() {
            let rows = &scratch.digests[head];
            for (at, (hidden, sum)) in hidden.iter().zip(&mut *sums).enumerate() {
                let position = sequence.start + at;
                let seen = (position + 1).saturating_sub(window).max(first);
                let query = model.query(index, query_head, *hidden);
                let mut attended = 0u64;
                for (row, at) in rows[seen - first..=position - first].iter().zip(seen as u64..) {
                    attended = attended.wrapping_add(digest::term(query, *row, at));
                }
                *sum = sum.wrapping_add(model.output(index, query_head, attended));
            }
        }
    }

    /// Writes the rows of new tokens.
    fn keep(&self, sequence: &Sequence, hidden: &[u64], bytes: &mut Vec<u8>) {
        let group = &self.caches.layout.groups[self.layer.group];
        let table = &sequence.tables[self.layer.group];
        for (at, hidden) in hidden.iter().enumerate() {
            let position = sequence.start + at;
            let block = table[position / group.block_tokens];
            debug_assert!(!block.is_null());
            for head in 0..group.heads.count {
                let model_head = group.heads.first + head;
                let seed =
                    self.ranks.model.row_seed(self.layer.index, model_head, position, *hidden);
                for (plane, view) in self.layer.planes.iter().enumerate() {
                    bytes.resize(view.bytes, 0);
                    ModelSpec::row(seed, plane, bytes);
                    let offset = view.offset(block, head, position % group.block_tokens);
                    self.caches.storages[view.storage].write(offset, bytes);
                }
            }
        }
    }

    /// Digests of the rows from `first` to `end`, over all planes.
    fn read(&self, sequence: &Sequence, first: usize, end: usize, scratch: &mut Scratch) {
        let heads = self.caches.layout.groups[self.layer.group].heads;
        scratch.digests.resize_with(heads.count.max(scratch.digests.len()), Vec::new);
        for (head, digests) in scratch.digests[..heads.count].iter_mut().enumerate() {
            digests.clear();
            let key = self.ranks.model.row_key(self.layer.index, heads.first + head);
            digests.resize(end - first, key);
        }
        for view in &self.layer.planes {
            let mut position = first;
            while position < end {
                let run = Run::new(self, sequence, view, position, end);
                run.read(&*self.caches.storages[view.storage], view, position - first, scratch);
                position += run.count;
            }
        }
    }

    /// Updates the state token by token, and writes it to the block of each checkpoint and of the last
    /// token.
    fn update(&self, sequence: &Sequence, hidden: &[u64], sums: &mut [u64]) {
        let (model, index) = (&self.ranks.model, self.layer.index);
        let group = &self.caches.layout.groups[self.layer.group];
        let table = &sequence.tables[self.layer.group];
        for head in 0..group.heads.count {
            let model_head = group.heads.first + head;
            let key = model.row_key(index, model_head);
            let mut state: Vec<Vec<u8>> =
                self.layer.planes.iter().map(|view| vec![0; view.bytes]).collect();
            if let Some(last) = sequence.start.checked_sub(1) {
                let block = table[last / group.block_tokens];
                debug_assert!(!block.is_null());
                for (view, piece) in self.layer.planes.iter().zip(&mut state) {
                    let at = view.offset(block, head, 0);
                    self.caches.storages[view.storage].read(at, piece);
                }
            }
            for (at, (hidden, sum)) in hidden.iter().zip(&mut *sums).enumerate() {
                let digest = state.iter().fold(key, |digest, piece| digest::extend(digest, piece));
                let seed = model.state_seed(index, model_head, digest, *hidden);
                for (plane, piece) in state.iter_mut().enumerate() {
                    ModelSpec::row(seed, plane, piece);
                }
                let next = sequence.start + at + 1;
                if next.is_multiple_of(group.block_tokens) || at + 1 == sequence.tokens.len() {
                    let block = table[(next - 1) / group.block_tokens];
                    // It is null where the engine keeps no checkpoint.
                    debug_assert!(!block.is_null() || at + 1 < sequence.tokens.len());
                    let planes = self.layer.planes.iter().filter(|_| !block.is_null());
                    for (view, piece) in planes.zip(&state) {
                        let at = view.offset(block, head, 0);
                        self.caches.storages[view.storage].write(at, piece);
                    }
                }
                let digest = state.iter().fold(key, |digest, piece| digest::extend(digest, piece));
                for (query_head, of) in self.query_heads() {
                    if of == head {
                        let query = model.query(index, query_head, *hidden);
                        let attended = digest::term(query, digest, 0);
                        *sum = sum.wrapping_add(model.output(index, query_head, attended));
                    }
                }
            }
        }
    }
}

/// Neighbouring tokens of one kernel block.
struct Run {
    block: BlockId,
    /// The first token, counted in the block, and in its kernel block.
    token: usize,
    kernel_token: usize,
    count: usize,
}

impl Run {
    fn new(
        rank: &RankLayer<'_>,
        sequence: &Sequence,
        view: &PlaneView,
        position: usize,
        end: usize,
    ) -> Self {
        let block_tokens = rank.caches.layout.groups[rank.layer.group].block_tokens;
        let block = sequence.tables[rank.layer.group][position / block_tokens];
        debug_assert!(!block.is_null());
        let token = position % block_tokens;
        let kernel_token = token % view.tokens;
        let count = (view.tokens - kernel_token).min(end - position);
        Self { block, token, kernel_token, count }
    }

    /// Adds this run's rows to the digests of the positions from `at`.
    fn read(
        &self,
        memory: &dyn crate::memory::KvMemory,
        view: &PlaneView,
        at: usize,
        scratch: &mut Scratch,
    ) {
        let Scratch { digests, bytes, .. } = scratch;
        let together = view.is_together();
        if together {
            bytes.resize(view.kernel_bytes(), 0);
            memory.read(view.offset(self.block, 0, self.token - self.kernel_token), bytes);
        }
        for (head, digests) in digests[..view.heads].iter_mut().enumerate() {
            let first = if together {
                head * view.head_stride + self.kernel_token * view.token_stride
            } else {
                let span = (self.count - 1) * view.token_stride + view.bytes;
                bytes.resize(span, 0);
                memory.read(view.offset(self.block, head, self.token), bytes);
                0
            };
            for (n, digest) in digests[at..at + self.count].iter_mut().enumerate() {
                let row = first + n * view.token_stride;
                *digest = digest::extend(*digest, &bytes[row..row + view.bytes]);
            }
        }
    }
}
