//! The model: a transformer of wrapping integers.
//!
//! ```text
//! token -> hidden (64 bits)
//! per layer: hidden -> rows of bytes per KV head -> the paged cache
//!            every visible row of the cache, with its position -> a sum per query head
//!            the sums of all query heads, of all TP ranks -> the next hidden
//! hidden -> the next token
//! ```
//!
//! Each step is a bijection of each of its inputs, or a sum of such. One flipped byte, one stale row, one
//! exchanged block, layer or head therefore changes the hidden state, and the token with it, except
//! with a probability of one in the size of the vocabulary.

use crate::digest;
use serde::{Deserialize, Serialize};

/// The earlier positions that a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attention {
    /// Every position up to its own.
    Full,
    /// The last `tokens` positions, with its own.
    #[allow(missing_docs, reason = "said above")]
    Window { tokens: usize },
    /// A state that each token updates. A block holds the state after its last token.
    State,
}

/// One kind of bytes that a layer keeps: packed keys and values, keys alone, scales, a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaneSpec {
    /// Name of the plane.
    pub name: String,
    /// Bytes per KV head and token; of [`Attention::State`], per KV head and block.
    pub bytes: usize,
}

/// The layers of one KV group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// Positions that the layers attend to.
    pub attention: Attention,
    /// KV heads of the whole model. If there are fewer than TP ranks, several ranks hold the same head.
    pub heads: usize,
    /// Planes that the layers cache, at least one.
    pub planes: Vec<PlaneSpec>,
}

impl GroupSpec {
    /// Full attention; keys and values of `head_bytes` each, packed as in vLLM.
    pub fn full(heads: usize, head_bytes: usize) -> Self {
        Self { attention: Attention::Full, heads, planes: vec![plane("kv", 2 * head_bytes)] }
    }

    /// Full attention; separate keys and values of `head_bytes` each, as in TensorRT-LLM.
    pub fn apart(heads: usize, head_bytes: usize) -> Self {
        let planes = vec![plane("k", head_bytes), plane("v", head_bytes)];
        Self { attention: Attention::Full, heads, planes }
    }

    /// A sliding window; keys and values of `head_bytes` each, packed.
    pub fn window(heads: usize, head_bytes: usize, tokens: usize) -> Self {
        Self { attention: Attention::Window { tokens }, ..Self::full(heads, head_bytes) }
    }

    /// Multi-head latent attention: one latent of `bytes`, the same on every rank.
    pub fn mla(bytes: usize) -> Self {
        Self { attention: Attention::Full, heads: 1, planes: vec![plane("latent", bytes)] }
    }

    /// A Mamba-like state of two parts.
    pub fn state(heads: usize, conv_bytes: usize, ssm_bytes: usize) -> Self {
        let planes = vec![plane("conv", conv_bytes), plane("ssm", ssm_bytes)];
        Self { attention: Attention::State, heads, planes }
    }

    /// Adds a plane with `bytes` of quantisation scales per head and token.
    #[must_use]
    pub fn with_scales(mut self, bytes: usize) -> Self {
        self.planes.push(plane("scales", bytes));
        self
    }
}

fn plane(name: &str, bytes: usize) -> PlaneSpec {
    PlaneSpec { name: name.to_owned(), bytes }
}

/// A model. Its output for a prompt depends only on this: not on ranks, blocks, chunks or layouts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Tokens are below this; at least 2.
    pub vocab: u32,
    /// Query heads: a multiple of the TP size and of the KV heads of every group.
    pub query_heads: usize,
    /// KV groups.
    pub groups: Vec<GroupSpec>,
    /// The group of each layer.
    pub layers: Vec<usize>,
    /// Determines its weights.
    pub seed: u64,
}

impl ModelSpec {
    /// A model of `layers` layers, assigned to `groups` in turn, with a vocabulary of 50 021
    /// tokens and 8 query heads.
    pub fn new(groups: Vec<GroupSpec>, layers: usize) -> Self {
        let layers = (0..layers).map(|layer| layer % groups.len().max(1)).collect();
        Self { vocab: 50_021, query_heads: 8, groups, layers, seed: 1 }
    }

    /// The name of a layer, the same on all ranks.
    pub fn layer_name(layer: usize) -> String {
        format!("model.layers.{layer}")
    }

    /// Whether a group has a state: computing can resume only at its checkpoints.
    pub fn has_state(&self) -> bool {
        self.groups.iter().any(|group| group.attention == Attention::State)
    }

    pub(crate) fn embed(&self, token: u32) -> u64 {
        digest::pair(self.seed, u64::from(token))
    }

    fn key(&self, layer: usize, role: u64, head: usize) -> u64 {
        digest::pair(digest::pair(self.seed ^ role << 48, layer as u64), head as u64)
    }

    /// The seed of the rows of `head` (numbered over the whole model) at `position`.
    pub(crate) fn row_seed(&self, layer: usize, head: usize, position: usize, hidden: u64) -> u64 {
        digest::pair(digest::pair(self.key(layer, 1, head), position as u64), hidden)
    }

    /// The row of a plane, or a part of a state.
    pub(crate) fn row(seed: u64, plane: usize, out: &mut [u8]) {
        digest::fill(digest::pair(seed, plane as u64), out);
    }

    /// The initial digest over the planes of one row.
    pub(crate) fn row_key(&self, layer: usize, head: usize) -> u64 {
        self.key(layer, 2, head)
    }

    pub(crate) fn query(&self, layer: usize, query_head: usize, hidden: u64) -> u64 {
        digest::pair(self.key(layer, 3, query_head), hidden)
    }

    /// The output of a query head for its sum.
    pub(crate) fn output(&self, layer: usize, query_head: usize, sum: u64) -> u64 {
        digest::pair(self.key(layer, 4, query_head), sum)
    }

    /// The seed of the next state of `head`.
    pub(crate) fn state_seed(&self, layer: usize, head: usize, digest: u64, hidden: u64) -> u64 {
        digest::pair(digest::pair(self.key(layer, 5, head), digest), hidden)
    }

    pub(crate) fn next_hidden(&self, layer: usize, hidden: u64, sum: u64) -> u64 {
        digest::pair(digest::pair(self.key(layer, 6, 0), hidden), sum)
    }

    pub(crate) fn sample(&self, hidden: u64) -> u32 {
        let word = digest::pair(self.seed ^ 7 << 48, hidden);
        u32::try_from(word % u64::from(self.vocab)).expect("less than a u32")
    }

    /// The KV head of a query head.
    pub(crate) fn kv_head(&self, group: usize, query_head: usize) -> usize {
        query_head * self.groups[group].heads / self.query_heads
    }
}
