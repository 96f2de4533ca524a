//! Settings of an engine.

use crate::model::{Attention, ModelSpec};
use kvferry_proto::layout::Packing;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Cache settings of a KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupCache {
    /// Tokens per block; for a state, tokens between checkpoints.
    pub block_tokens: usize,
    /// Kernel blocks per block; divides `block_tokens`.
    pub kernel_split: usize,
    /// Blocks including the null block, at least 2.
    pub blocks: usize,
    /// For a state: number of blocks of a request behind the block of its state, as speculative decoding has them in
    /// vLLM ("align" mode). When the state moves on, they follow it, and the entries between are null.
    pub scratch: usize,
}

impl GroupCache {
    /// `blocks` blocks of `block_tokens`, not split.
    pub const fn new(block_tokens: usize, blocks: usize) -> Self {
        Self { block_tokens, kernel_split: 1, blocks, scratch: 0 }
    }
}

/// Assignment of storages to groups. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Storage {
    /// Every plane of every group has a storage of its own, and every group its own block ids.
    Separate,
    /// All groups share one storage per plane and one pool of block ids, as in vLLM's hybrid models: the
    /// same storage has different block lengths in different groups.
    Shared,
}

/// Treatment of a request whose load failed. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadFailurePolicy {
    /// End it with [`crate::FinishReason::Error`].
    Fail,
    /// Compute the missing tokens here.
    Recompute,
}

/// Time at which a step computes its layers. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Launch {
    /// Layers are computed between their hooks, as on a CPU.
    Eager,
    /// All layers are computed after all calls of the step, as on a slow GPU: a layer's bytes are valid after its
    /// event, not after its call.
    Deferred,
}

/// Settings of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the types say the rest")]
pub struct EngineConfig {
    pub model: ModelSpec,
    /// Ranks that share each layer's heads.
    pub tp: usize,
    /// Ranks that share the layers.
    pub pp: usize,
    pub groups: Vec<GroupCache>,
    pub layout: Packing,
    pub storage: Storage,
    /// Whether there is a prefix cache.
    pub prefix_caching: bool,
    /// Tokens computed per step at most, over all requests.
    pub step_tokens: usize,
    /// Tokens computed per step and request at most: the chunk of chunked prefill.
    pub chunk_tokens: usize,
    /// Requests running at once at most.
    pub max_running: usize,
    /// Tokens of a request at most, with its prompt.
    pub max_tokens: usize,
    pub load_failure: LoadFailurePolicy,
    pub launch: Launch,
    /// Call each rank's connector in a thread of its own.
    pub threads: bool,
}

impl EngineConfig {
    /// One rank, blocks of 16 tokens, 128 blocks per group, prefix caching, 64 tokens per step.
    pub fn new(model: ModelSpec) -> Self {
        let groups = vec![GroupCache::new(16, 128); model.groups.len()];
        Self {
            model,
            tp: 1,
            pp: 1,
            groups,
            layout: Packing::Lbhnc,
            storage: Storage::Separate,
            prefix_caching: true,
            step_tokens: 64,
            chunk_tokens: 64,
            max_running: 16,
            max_tokens: 1024,
            load_failure: LoadFailurePolicy::Fail,
            launch: Launch::Eager,
            threads: false,
        }
    }

    /// The ranks, all TP ranks of the first layers before those of the next.
    pub fn ranks(&self) -> Vec<Rank> {
        (0..self.pp).flat_map(|pp| (0..self.tp).map(move |tp| Rank { pp, tp })).collect()
    }

    /// Indexes of the layers that the ranks of a PP stage hold.
    pub fn stage_layers(&self, pp: usize) -> std::ops::Range<usize> {
        let layers = self.model.layers.len();
        pp * layers / self.pp..(pp + 1) * layers / self.pp
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let model = &self.model;
        for (what, value, least) in [
            ("vocab", model.vocab as usize, 2),
            ("layers", model.layers.len(), 1),
            ("tp", self.tp, 1),
            ("pp", self.pp, 1),
            ("step_tokens", self.step_tokens, 1),
            ("chunk_tokens", self.chunk_tokens, 1),
            ("max_running", self.max_running, 1),
            ("max_tokens", self.max_tokens, 2),
        ] {
            if value < least {
                return Err(ConfigError::TooSmall { what, value, least });
            }
        }
        if self.groups.len() != model.groups.len() {
            return Err(ConfigError::Groups {
                cached: self.groups.len(),
                model: model.groups.len(),
            });
        }
        if let Some(layer) = model.layers.iter().position(|group| *group >= model.groups.len()) {
            return Err(ConfigError::NoSuchGroup { layer, group: model.layers[layer] });
        }
        if self.pp > model.layers.len() {
            return Err(ConfigError::Stages { pp: self.pp, layers: model.layers.len() });
        }
        divides("tp", self.tp, "query heads", model.query_heads)?;
        for (group, cache) in model.groups.iter().zip(&self.groups) {
            let planes = group.planes.iter().map(|plane| plane.bytes).min().unwrap_or(0);
            for (what, value, least) in [
                ("heads", group.heads, 1),
                ("bytes of a plane", planes, 1),
                ("block_tokens", cache.block_tokens, 1),
                ("kernel_split", cache.kernel_split, 1),
                ("blocks", cache.blocks, 2),
            ] {
                if value < least {
                    return Err(ConfigError::TooSmall { what, value, least });
                }
            }
            if cache.scratch > 0 && group.attention != Attention::State {
                return Err(ConfigError::NoScratch);
            }
            if let Attention::Window { tokens: 0 } = group.attention {
                return Err(ConfigError::TooSmall { what: "window", value: 0, least: 1 });
            }
            divides("KV heads", group.heads, "query heads", model.query_heads)?;
            if !group.heads.is_multiple_of(self.tp) {
                divides("KV heads", group.heads, "tp", self.tp)?;
            }
            divides("kernel_split", cache.kernel_split, "block_tokens", cache.block_tokens)?;
            if cache.kernel_split > 1
                && (group.attention == Attention::State || self.storage == Storage::Shared)
            {
                return Err(ConfigError::NoSplit);
            }
        }
        if self.storage == Storage::Shared {
            if self.layout == Packing::Lhbnc {
                return Err(ConfigError::NotShareable { layout: self.layout });
            }
            let blocks = self.groups.iter().map(|group| group.blocks);
            let (least, most) = (blocks.clone().min().unwrap_or(0), blocks.max().unwrap_or(0));
            if least != most {
                return Err(ConfigError::SharedBlocks { least, most });
            }
        }
        Ok(())
    }
}

fn divides(
    what: &'static str,
    small: usize,
    whole: &'static str,
    large: usize,
) -> Result<(), ConfigError> {
    if small > 0 && large > 0 && large.is_multiple_of(small) {
        return Ok(());
    }
    Err(ConfigError::Indivisible { what, small, whole, large })
}

/// A rank of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank {
    /// PP stage of the rank.
    pub pp: usize,
    /// Index of the rank among those that share the heads of that stage.
    pub tp: usize,
}

impl std::fmt::Display for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pp{}tp{}", self.pp, self.tp)
    }
}

/// Invalid settings of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum ConfigError {
    /// A number is too small.
    #[error("{what} is {value}, must be at least {least}")]
    TooSmall { what: &'static str, value: usize, least: usize },
    /// A number must divide another.
    #[error("{whole} ({large}) is not a multiple of {what} ({small})")]
    Indivisible { what: &'static str, small: usize, whole: &'static str, large: usize },
    /// Not every group is cached, or more than there are.
    #[error("{cached} groups are cached, the model has {model}")]
    Groups { cached: usize, model: usize },
    /// A layer belongs to no group.
    #[error("layer {layer} is in group {group}, which does not exist")]
    NoSuchGroup { layer: usize, group: usize },
    /// More PP stages than layers.
    #[error("{layers} layers for {pp} stages")]
    Stages { pp: usize, layers: usize },
    /// Kernel blocks of a state or of shared storages.
    #[error("neither states nor blocks of shared storages can be split")]
    NoSplit,
    /// Scratch blocks of attention.
    #[error("only states have scratch blocks")]
    NoScratch,
    /// Blocks of this layout are not contiguous.
    #[error("groups cannot share a storage of layout {layout}: its blocks are not contiguous")]
    NotShareable { layout: Packing },
    /// Groups that share block ids have different numbers of them.
    #[error("groups that share block ids have {least} to {most} blocks")]
    SharedBlocks { least: usize, most: usize },
    /// There must be one connector worker per rank.
    #[error("{workers} connector workers for {ranks} ranks")]
    Workers { workers: usize, ranks: usize },
    /// A connector allocated memory of another size than was asked for.
    #[error("rank {rank}: the connector allocated {len_bytes} bytes, expected {wanted_bytes}")]
    Memory { rank: Rank, len_bytes: usize, wanted_bytes: usize },
}
