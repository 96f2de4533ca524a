//! The scheduler's state for the block manager.

use super::{Clock, Offload, OffloadError};
use crate::block_pool::BlockHash;
use crate::config::{EngineConfig, Storage};
use crate::layout::BlockId;
use crate::model::Attention;
use crate::request::RequestId;
use kvferry_blocks::{BlockManager, Config, GroupConfig, Key, SequenceId, Warning};
use kvferry_offload::{Driver, Pages};
use rustc_hash::FxHashMap;

/// Warnings that are kept until the engine's caller takes them.
const WARNINGS_MAX: usize = 1024;

/// The state of a request in the block manager.
#[derive(Debug)]
pub(crate) struct ManagedRequest {
    pub(crate) sequence: SequenceId,
    /// Whether its blocks may be used.
    pub(crate) is_ready: bool,
    /// Number of tokens for which the request has blocks.
    pub(crate) tokens: usize,
    /// Blocks that other requests may reuse.
    pub(crate) stored: usize,
    /// Blocks from the first on that have no bytes of other requests.
    pub(crate) clean: usize,
}

#[derive(Debug)]
pub(crate) struct Managed {
    pub(crate) manager: BlockManager,
    pub(crate) driver: Driver,
    pub(crate) clock: Clock,
    pub(crate) block_tokens: usize,
    pub(crate) owners: FxHashMap<SequenceId, u64>,
    /// Blocks that requests begin to use without content.
    pub(crate) void: Vec<(usize, BlockId)>,
    pub(crate) warnings: Vec<(RequestId, Warning)>,
    /// Fingerprint of the model and layout, mixed into the keys of blocks.
    mask: [u64; 2],
    primary_blocks: Vec<u32>,
}

impl Managed {
    pub(crate) fn start(
        config: &EngineConfig,
        pages: Pages,
        offload: Offload,
    ) -> Result<Self, OffloadError> {
        let unsupported = |what| Err(OffloadError::Unsupported { what });
        let block_tokens = config.groups[0].block_tokens;
        if config.model.groups.iter().any(|group| group.attention == Attention::State) {
            return unsupported("groups that keep a state");
        }
        if config.groups.iter().any(|group| group.block_tokens != block_tokens) {
            return unsupported("groups of different block sizes");
        }
        if config.storage == Storage::Shared {
            return unsupported("groups that share their blocks");
        }
        let Offload { agent, secondary_blocks, options, clock } = offload;
        let count = |number: usize| u32::try_from(number).expect("block ids are 32 bits");
        let groups: Vec<GroupConfig> = config
            .groups
            .iter()
            .map(|group| GroupConfig { primary_blocks: count(group.blocks - 1), secondary_blocks })
            .collect();
        let mut blocks = Config::new(count(block_tokens), groups);
        blocks.partial_reuse = config.prefix_caching;
        let manager = BlockManager::new(&blocks)?;
        let secondary = vec![secondary_blocks; config.groups.len()];
        let driver = Driver::start(&agent, pages, &secondary, options)?;
        Ok(Self {
            manager,
            driver,
            clock,
            block_tokens,
            owners: FxHashMap::default(),
            void: vec![],
            warnings: vec![],
            mask: fingerprint(config),
            primary_blocks: blocks.groups.iter().map(|group| group.primary_blocks).collect(),
        })
    }

    pub(crate) fn salt(&self) -> u64 {
        self.mask[0]
    }

    pub(crate) fn keys(&self, hashes: &[BlockHash]) -> Vec<Key> {
        let word = |hash: &BlockHash, at: usize| {
            let bytes = hash.0[at * 8..at * 8 + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes) ^ self.mask[at]
        };
        hashes.iter().map(|hash| Key([word(hash, 0), word(hash, 1)])).collect()
    }

    pub(crate) fn warn(&mut self, id: &RequestId, warning: Option<Warning>) {
        if self.warnings.len() < WARNINGS_MAX {
            self.warnings.extend(warning.map(|warning| (id.clone(), warning)));
        }
    }

    /// Blocks that a request has, or that a copy concerns, as many as there are in each group.
    pub(crate) fn used(&self) -> Vec<(usize, BlockId)> {
        let mut used = vec![];
        for (group, primary) in self.primary_blocks.iter().enumerate() {
            let usage = u16::try_from(group).ok().and_then(|group| self.manager.usage(group));
            let idle = usage.map_or(0, |usage| usage.primary_free + usage.primary_cached);
            used.extend((idle..*primary).map(|_| (group, BlockId::NULL)));
        }
        used
    }
}

/// Engines of which one could not use the other's bytes have different ones.
fn fingerprint(config: &EngineConfig) -> [u64; 2] {
    let mut hasher = blake3::Hasher::new_derive_key("kvferry-refengine model and layout, v1");
    let split: Vec<_> = config.groups.iter().map(|group| group.kernel_split).collect();
    let what = (&config.model, config.tp, config.pp, config.layout, split);
    hasher.update(&serde_json::to_vec(&what).expect("plain data"));
    let bytes = *hasher.finalize().as_bytes();
    let word =
        |at: usize| u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().expect("eight bytes"));
    [word(0), word(1)]
}
