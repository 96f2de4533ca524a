//! Layouts: how the KV blocks of one rank lie in its registered regions.
//!
//! A [`Layout`] is plain numbers. It has *regions* (registered memory), *groups* (layers that share
//! a block table, with their own block size), and *layers*, each with one or more *planes*. A plane
//! is one strided array: for every block, head and row it has one run of *content* bytes at
//!
//! ```text
//! base + block * block_stride + kernel * kernel_stride + head * head_stride + row * row_stride
//! ```
//!
//! where a block's rows are split over its kernel blocks. Packed K and V are one plane, K and V
//! apart are two, the scales of a quantised cache are further ones. A row usually is a token; scales
//! may have a row for a whole block, compressed caches one for several tokens, and a state (Mamba,
//! linear attention) has rows of its own that are no tokens at all.
//!
//! A layout has two parts. What the bytes *mean* (names, encodings, heads in total, content, rows per
//! token, windows) must be equal at both ends: [`compatible`] compares it, and a [`Fingerprint`]
//! hashes it. Where they *lie* (regions, strides, block sizes, which heads, layers and tokens this
//! rank holds) may differ, and [`crate::plan`] maps one to the other.
//!
//! | in the model | here |
//! |---|---|
//! | tensor parallelism | [`Heads`]: which heads of all this rank holds; replicated heads are held by several |
//! | pipeline parallelism | only the rank's own layers are listed; layers are the same by their name |
//! | context parallelism | [`ContextShard`] of a group |
//! | multi-head latent attention | one head in total, held by all |
//! | hybrid models | several groups; they may lie in the same bytes, as no block belongs to two of them |
//!
//! Every [`Layout`] is sound: it is checked when it is built and when it is decoded.

mod check;
mod context;
mod mismatch;
mod packing;
mod spec;
mod wire;

pub use check::{Fault, LayoutError};
pub use mismatch::{Difference, End, Mismatch, MismatchSides};
pub use packing::{Axis, Packing, Shape, UnknownPacking};
pub use spec::{Fingerprint, LayerSpec, PlaneSpec, RowDensity, compatible};
pub use wire::{DecodeError, LAYOUT_MAX};

pub(crate) use check::{CONTEXT_MAX, gcd, is_name, printable};
pub(crate) use context::Context;
pub(crate) use spec::{blocks_fit, fingerprint_of, natural_order};
pub(crate) use wire::{Table, Version, at_most, from_bytes};

use crate::id::RegionId;
use crate::pack;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The most regions of a layout.
pub const REGIONS_MAX: usize = 4096;
/// The most groups of a layout.
pub const GROUPS_MAX: usize = 64;
/// The most layers of a layout, or of a model.
pub const LAYERS_MAX: usize = 4096;
/// The most planes of a layer.
pub const PLANES_MAX: usize = 16;
/// The longest name of a layer, in bytes.
pub const LAYER_NAME_MAX: usize = 256;
/// The longest name of a group, plane or encoding, in bytes.
pub const SHORT_NAME_MAX: usize = 64;

/// The id of no block: a hole in a block table. As an `i32` it is −1.
pub const NO_BLOCK: u32 = u32::MAX;

/// The layout of one rank: the positions of its KV blocks in its regions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "wire::Layout", into = "wire::Layout")]
pub struct Layout {
    regions: Vec<Region>,
    groups: Vec<Group>,
    layers: Vec<Layer>,
}

impl Layout {
    /// A layout of these parts.
    ///
    /// `layers` are in the order in which the engine computes them: plans select layers by their
    /// place in it. Groups are in the order of the engine's block tables.
    ///
    /// # Errors
    /// A number is out of its range, a name is used twice, an index points to nothing, a plane
    /// exceeds its region, or elements of a plane overlap.
    pub fn new(
        regions: Vec<Region>,
        groups: Vec<Group>,
        layers: Vec<Layer>,
    ) -> Result<Self, LayoutError> {
        let layout = Self { regions, groups, layers };
        check::layout(&layout)?;
        Ok(layout)
    }

    /// The registered regions, in the order in which [`View::region`] counts them.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The groups, in the order in which [`Layer::group`] and block tables count them.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The layers, in the order of computing.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Returns a layer's name, kind and planes, without positions in memory.
    ///
    /// # Panics
    /// There is no layer of that index.
    pub fn spec(&self, layer: usize) -> LayerSpec {
        let layer = &self.layers[layer];
        LayerSpec::of(layer, &self.groups[layer.group])
    }

    /// The hash of what must be equal at both ends, of the layers of this rank.
    ///
    /// With pipeline parallelism no rank has all layers. The ends of a handoff therefore compare
    /// [`crate::plan::Topology::fingerprint`], which is equal to this one if one rank has all
    /// layers.
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of((0..self.layers.len()).map(|layer| self.spec(layer)).collect())
    }

    /// The encoded layout.
    pub fn encode(&self) -> Vec<u8> {
        pack::encode(self)
    }

    /// Decodes a layout. The bytes may come from an unauthenticated peer.
    ///
    /// # Errors
    /// The bytes are longer than [`LAYOUT_MAX`], of a later version, malformed, or describe a layout
    /// that is not sound.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        from_bytes(bytes)
    }
}

/// Registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Id of the region; not [`RegionId::ABSOLUTE`].
    pub id: RegionId,
    /// Bytes.
    pub len: u64,
}

/// Layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    /// The engine's name for it, for logs; unique in the layout, at most [`SHORT_NAME_MAX`] bytes.
    pub name: String,
    /// Kind of attention, or state, that the blocks serve.
    #[serde(flatten)]
    pub kind: Kind,
    /// Tokens of a logical block, at least 1. Not used for a state.
    pub block_tokens: u32,
    /// Number of logical blocks, at least 1. Block ids are below it.
    pub blocks: u32,
    /// Share of a request's tokens that this rank holds.
    #[serde(default, skip_serializing_if = "wire::is_default")]
    pub context: ContextShard,
}

impl Group {
    /// Number of a request's first `tokens` tokens that this rank holds.
    pub const fn local_tokens(&self, tokens: u64) -> u64 {
        Context::of(self).local(tokens)
    }

    /// Number of blocks that this rank needs for a request's first `tokens` tokens.
    pub const fn local_blocks(&self, tokens: u64) -> u64 {
        self.local_tokens(tokens).div_ceil(self.block_tokens as u64)
    }
}

/// Kind of a group: the attention or state that its blocks serve. It decides which blocks may be holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "wire::KindFields", into = "wire::KindFields")]
#[non_exhaustive]
pub enum Kind {
    /// Attention over all tokens: no block is a hole.
    Full,
    /// Attention over the last `tokens` tokens, the one being computed included: older blocks may
    /// be holes.
    Window {
        /// Tokens of the window, at least 1.
        tokens: u32,
    },
    /// Attention within aligned chunks of `tokens` tokens: blocks of earlier chunks may be holes.
    Chunk {
        /// Tokens of a chunk, at least 1.
        tokens: u32,
    },
    /// A recurrent state (Mamba, linear attention): the last block that is no hole is the state,
    /// earlier blocks are earlier states.
    State,
}

impl Kind {
    /// The first token that is read when token `next` is computed.
    pub const fn horizon(self, next: u64) -> u64 {
        match self {
            Self::Full | Self::State => 0,
            Self::Window { tokens } => next.saturating_add(1).saturating_sub(tokens as u64),
            Self::Chunk { tokens } => next - next % tokens as u64,
        }
    }
}

/// Tokens of a request that a context-parallel rank holds: every `size`-th run of `interleave`.
///
/// With a run of one block that is page round-robin: the rank's i-th block is the request's block
/// `rank + i * size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ContextShard {
    /// Below `size`.
    pub rank: u32,
    /// Ranks that share the tokens of a request; 1 for all tokens here.
    pub size: u32,
    /// Tokens of a run; divides the block, 0 for a block.
    #[serde(default)]
    pub interleave: u32,
}

impl Default for ContextShard {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl ContextShard {
    /// The shard of a rank that holds all tokens.
    pub const WHOLE: Self = Self { rank: 0, size: 1, interleave: 0 };

    /// Page round-robin: whole blocks in turn.
    pub const fn round_robin(rank: u32, size: u32) -> Self {
        Self { rank, size, interleave: 0 }
    }

    /// Tokens of a run, with blocks of `block_tokens`.
    pub(crate) const fn run(self, block_tokens: u32) -> u32 {
        if self.interleave == 0 || self.size == 1 { block_tokens } else { self.interleave }
    }
}

/// A layer of the model, as this rank holds it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layer {
    /// The same at both ends; unique in the layout, at most [`LAYER_NAME_MAX`] bytes.
    pub name: String,
    /// Index of the layer's group in [`Layout::groups`].
    pub group: usize,
    /// Planes of the layer: at least one and at most [`PLANES_MAX`].
    pub planes: Vec<Plane>,
}

/// A strided array of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Plane {
    /// The same at both ends (`kv`, `k`, `v`, `k_scale`, `conv`, …); unique in the layer, at most
    /// [`SHORT_NAME_MAX`] bytes.
    pub role: String,
    /// Number format of an element.
    pub encoding: Encoding,
    /// Heads of the model that this rank holds. A plane without heads, such as a latent, has one head in total.
    pub heads: Heads,
    /// Rows of a logical block, over all its kernel blocks; of a state, rows of the state.
    pub rows: u32,
    /// Contiguous bytes of one head and row, at least 1.
    pub content: u32,
    /// Position of the plane in its region.
    pub view: View,
}

/// Number format of a plane's elements. Must be equal at both ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Encoding {
    /// Number format and quantisation, such as `bfloat16` or `fp8_e4m3`; at most
    /// [`SHORT_NAME_MAX`] bytes.
    pub name: String,
    /// Bits of an element, at least 1.
    pub bits: u32,
}

impl Encoding {
    /// An encoding of that name.
    pub fn new(name: impl Into<String>, bits: u32) -> Self {
        Self { name: name.into(), bits }
    }
}

/// Heads of the model that a rank holds.
///
/// A head is the unit that tensor parallelism distributes: a KV head for attention, a head or a
/// channel for parts of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Heads {
    /// Number of heads in the model.
    pub total: u32,
    /// The first one on this rank.
    pub start: u32,
    /// Number of heads on this rank, at least 1.
    pub count: u32,
}

impl Heads {
    /// The heads of a rank that holds all of `total` heads.
    pub const fn all(total: u32) -> Self {
        Self { total, start: 0, count: total }
    }

    /// The heads of a plane without heads, which is the same on every rank.
    pub const REPLICATED: Self = Self::all(1);

    /// The share of rank `rank` of `size` tensor-parallel ones.
    ///
    /// With more ranks than heads each head is on several ranks. `None` if neither number divides
    /// the other, or there is no such rank.
    pub const fn shard(total: u32, rank: u32, size: u32) -> Option<Self> {
        if total == 0 || rank >= size {
            None
        } else if total.is_multiple_of(size) {
            let count = total / size;
            Some(Self { total, start: rank * count, count })
        } else if size.is_multiple_of(total) {
            Some(Self { total, start: rank / (size / total), count: 1 })
        } else {
            None
        }
    }

    /// The heads as numbers of the model.
    pub const fn range(self) -> Range<u32> {
        self.start..self.start + self.count
    }
}

/// Position of a plane in its region. Strides are in bytes; those of an axis with one element do not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// An index into [`Layout::regions`].
    pub region: usize,
    /// Bytes from the region's start to block 0, head 0, row 0.
    pub base: u64,
    /// Distance from a logical block to the next.
    pub block_stride: u64,
    /// Kernel blocks a logical block is split into, at least 1; divides the rows and the tokens of
    /// a block.
    pub kernel_blocks: u32,
    /// Distance from a kernel block to the next of the same logical block.
    pub kernel_stride: u64,
    /// Distance from a head to the next.
    pub head_stride: u64,
    /// Distance from a row to the next of the same kernel block.
    pub row_stride: u64,
}
