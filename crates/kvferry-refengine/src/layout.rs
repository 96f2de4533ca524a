//! Positions of one rank's blocks in its storages.

use crate::config::{EngineConfig, Rank, Storage};
use crate::memory::KvMemory;
use crate::model::{Attention, ModelSpec};
use kvferry_proto::RegionId;
use kvferry_proto::layout::{
    Axis, ContextShard, Encoding, Group, Heads, Kind, Layer, Layout, LayoutError, Packing, Plane,
    Region, View,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A block of a group, the same on every rank.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Stands for blocks that have left a window, or that a state no longer needs. Its bytes are
    /// undefined.
    pub const NULL: Self = Self(0);

    /// Whether it is [`BlockId::NULL`].
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).expect("counts of blocks, heads and rows fit in 32 bits")
}

impl Attention {
    /// The same as a kind of the connector's layouts.
    ///
    /// # Panics
    /// If a window is longer than 2³² tokens.
    pub fn kind(self) -> Kind {
        match self {
            Self::Full => Kind::Full,
            Self::Window { tokens } => Kind::Window { tokens: narrow(tokens) },
            Self::State => Kind::State,
        }
    }
}

/// One plane of one layer: a strided view of a storage. All strides in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaneView {
    /// Name of the plane, the same on all ranks.
    pub name: String,
    /// Index of the storage among the rank's storages.
    pub storage: usize,
    /// Offset of the view in the storage, in bytes.
    pub base: usize,
    /// Heads that this rank holds.
    pub heads: usize,
    /// Tokens of a kernel block; 1 of a state.
    pub tokens: usize,
    /// Bytes per head and token.
    pub bytes: usize,
    /// Kernel blocks per block: block `b` is kernel blocks `b * split` and following.
    pub split: usize,
    /// Distance from a kernel block to the next.
    pub block_stride: usize,
    /// Distance from a head to the next.
    pub head_stride: usize,
    /// Distance from a token to the next.
    pub token_stride: usize,
}

impl PlaneView {
    /// Offset of the bytes of one head (counted on this rank) and token (counted in the block).
    pub const fn offset(&self, block: BlockId, head: usize, token: usize) -> usize {
        self.base
            + (block.index() * self.split + token / self.tokens) * self.block_stride
            + head * self.head_stride
            + token % self.tokens * self.token_stride
    }

    fn plane(&self, group: &GroupView) -> Plane {
        let HeadRange { total, first, count } = group.heads;
        Plane {
            role: self.name.clone(),
            encoding: Encoding::new("uint8", u8::BITS),
            heads: Heads { total: narrow(total), start: narrow(first), count: narrow(count) },
            rows: narrow(self.tokens * self.split),
            content: narrow(self.bytes),
            view: View {
                region: self.storage,
                base: self.base as u64,
                block_stride: (self.block_stride * self.split) as u64,
                kernel_blocks: narrow(self.split),
                kernel_stride: self.block_stride as u64,
                head_stride: self.head_stride as u64,
                row_stride: self.token_stride as u64,
            },
        }
    }

    /// Whether a kernel block is contiguous, in any order of axes.
    pub(crate) const fn is_together(&self) -> bool {
        let heads = (self.heads - 1) * self.head_stride;
        let tokens = (self.tokens - 1) * self.token_stride;
        heads + tokens + self.bytes == self.kernel_bytes()
    }

    /// Bytes of a kernel block.
    pub(crate) const fn kernel_bytes(&self) -> usize {
        self.heads * self.tokens * self.bytes
    }
}

/// A layer of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerView {
    /// Index of the layer in the model.
    pub index: usize,
    /// Name of the layer, the same on all ranks.
    pub name: String,
    /// Index of the layer's group.
    pub group: usize,
    /// Planes of the layer, in the order of the group's.
    pub planes: Vec<PlaneView>,
}

/// KV heads of the model that a rank holds. Several ranks hold the same where heads are fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadRange {
    /// Heads of the model.
    pub total: usize,
    /// The first that this rank holds.
    pub first: usize,
    /// Number of heads that this rank holds.
    pub count: usize,
}

impl HeadRange {
    /// Heads of the `rank`th of `ranks`: either number of heads and ranks divides the other.
    pub const fn new(total: usize, rank: usize, ranks: usize) -> Self {
        let count = if total > ranks { total / ranks } else { 1 };
        Self { total, first: rank * total / ranks, count }
    }
}

/// A group of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupView {
    /// Attention of the group's layers.
    pub attention: Attention,
    /// Tokens per block.
    pub block_tokens: usize,
    /// Blocks, the null block among them.
    pub blocks: usize,
    /// Heads that this rank holds.
    pub heads: HeadRange,
}

/// The layout of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the types say the rest")]
pub struct RankLayout {
    pub rank: Rank,
    /// TP ranks of the engine.
    pub tp: usize,
    /// PP stages of the engine.
    pub pp: usize,
    pub order: Packing,
    /// The length of each storage in bytes. Each storage holds at least one layer.
    pub storages: Vec<usize>,
    pub groups: Vec<GroupView>,
    pub layers: Vec<LayerView>,
}

struct Shape {
    layers: usize,
    blocks: usize,
    heads: usize,
    tokens: usize,
    bytes: usize,
    /// Bytes from one block of a layer to the next if blocks are adjacent: the block's length, or the
    /// longest of the groups that share the storage.
    page: usize,
}

#[derive(Default)]
struct Strides {
    layer: usize,
    block: usize,
    head: usize,
    token: usize,
}

impl Shape {
    fn strides(&self, order: Packing) -> Strides {
        let mut strides = Strides::default();
        let mut next = self.bytes;
        let (mut content, mut layers) = (0, 1);
        for axis in order.axes().into_iter().rev() {
            let (stride, count) = match axis {
                Axis::Layer => (&mut strides.layer, self.layers),
                Axis::Block => (&mut strides.block, self.blocks),
                Axis::Head => (&mut strides.head, self.heads),
                Axis::Row => (&mut strides.token, self.tokens),
            };
            *stride = next;
            next *= count;
            match axis {
                Axis::Head | Axis::Row => content += 1,
                Axis::Layer => layers = count,
                Axis::Block => {}
            }
            // A page is padded after the last bytes of its block.
            if content == 2 && matches!(axis, Axis::Head | Axis::Row) && self.page > 0 {
                next = self.page * layers;
            }
        }
        strides
    }
}

impl RankLayout {
    /// The layout of one rank of an engine.
    pub fn new(config: &EngineConfig, rank: Rank) -> Self {
        let model = &config.model;
        let groups: Vec<_> = model
            .groups
            .iter()
            .zip(&config.groups)
            .map(|(group, cache)| GroupView {
                attention: group.attention,
                block_tokens: cache.block_tokens,
                blocks: cache.blocks,
                heads: HeadRange::new(group.heads, rank.tp, config.tp),
            })
            .collect();
        let mut layout = Self {
            rank,
            tp: config.tp,
            pp: config.pp,
            order: config.layout,
            storages: vec![],
            groups,
            layers: config
                .stage_layers(rank.pp)
                .map(|index| LayerView {
                    index,
                    name: ModelSpec::layer_name(index),
                    group: model.layers[index],
                    planes: vec![],
                })
                .collect(),
        };
        match config.storage {
            Storage::Separate => layout.lay_apart(config),
            Storage::Shared => layout.lay_together(config),
        }
        layout
    }

    /// The same as a connector's layout, in which `regions` are the storages, in their order.
    ///
    /// # Errors
    /// The regions are not those of the storages.
    ///
    /// # Panics
    /// If a number is beyond 32 bits.
    pub fn layout(&self, regions: &[(RegionId, u64)]) -> Result<Layout, LayoutError> {
        let regions = regions.iter().map(|(id, len)| Region { id: *id, len: *len }).collect();
        let groups = self.groups.iter().enumerate().map(|(at, group)| Group {
            name: format!("group.{at}"),
            kind: group.attention.kind(),
            block_tokens: narrow(group.block_tokens),
            blocks: narrow(group.blocks),
            context: ContextShard::WHOLE,
        });
        let layers = self.layers.iter().map(|layer| Layer {
            name: layer.name.clone(),
            group: layer.group,
            planes: layer.planes.iter().map(|view| view.plane(&self.groups[layer.group])).collect(),
        });
        Layout::new(regions, groups.collect(), layers.collect())
    }

    fn shape(&self, config: &EngineConfig, group: usize, plane: usize) -> Shape {
        let (view, cache) = (&self.groups[group], &config.groups[group]);
        let tokens = match view.attention {
            Attention::State => 1,
            Attention::Full | Attention::Window { .. } => cache.block_tokens / cache.kernel_split,
        };
        Shape {
            layers: self.layers.iter().filter(|layer| layer.group == group).count(),
            blocks: cache.blocks * cache.kernel_split,
            heads: view.heads.count,
            tokens,
            bytes: config.model.groups[group].planes[plane].bytes,
            page: 0,
        }
    }

    fn lay(&mut self, config: &EngineConfig, group: usize, storage: usize, shape: &Shape) {
        let strides = shape.strides(config.layout);
        let planes = &config.model.groups[group].planes;
        let layers = self.layers.iter_mut().filter(|layer| layer.group == group);
        for (slot, layer) in layers.enumerate() {
            layer.planes.push(PlaneView {
                name: planes[layer.planes.len()].name.clone(),
                storage,
                base: slot * strides.layer,
                heads: shape.heads,
                tokens: shape.tokens,
                bytes: shape.bytes,
                split: config.groups[group].kernel_split,
                block_stride: strides.block,
                head_stride: strides.head,
                token_stride: strides.token,
            });
        }
    }

    fn lay_apart(&mut self, config: &EngineConfig) {
        for group in 0..self.groups.len() {
            for plane in 0..config.model.groups[group].planes.len() {
                let shape = self.shape(config, group, plane);
                if shape.layers == 0 {
                    continue;
                }
                let storage = self.storages.len();
                self.lay(config, group, storage, &shape);
                let page = shape.heads * shape.tokens * shape.bytes;
                self.storages.push(shape.layers * shape.blocks * page);
            }
        }
    }

    fn lay_together(&mut self, config: &EngineConfig) {
        let planes = config.model.groups.iter().map(|group| group.planes.len()).max().unwrap_or(0);
        for plane in 0..planes {
            let mut shapes: Vec<_> = (0..self.groups.len())
                .filter(|group| plane < config.model.groups[*group].planes.len())
                .map(|group| (group, self.shape(config, group, plane)))
                .collect();
            let pages = shapes.iter().map(|(_, it)| it.heads * it.tokens * it.bytes);
            let page = pages.max().unwrap_or(0);
            let slots = shapes.iter().map(|(_, it)| it.layers).max().unwrap_or(0);
            if slots == 0 {
                continue;
            }
            let blocks = shapes.first().map_or(0, |(_, it)| it.blocks);
            let storage = self.storages.len();
            for (group, shape) in &mut shapes {
                (shape.page, shape.layers) = (page, slots);
                self.lay(config, *group, storage, shape);
            }
            self.storages.push(slots * blocks * page);
        }
    }
}

/// Caches of a rank: their layout and memory.
#[derive(Clone, Debug)]
pub struct KvCaches {
    /// Layout of the caches in the storages.
    pub layout: RankLayout,
    /// The memory of each of the layout's storages.
    pub storages: Vec<Arc<dyn KvMemory>>,
}

impl KvCaches {
    /// The bytes of one plane of one layer, of one head (counted on this rank) and token (counted
    /// in the block).
    ///
    /// # Panics
    /// If there is no such layer, plane, block, head or token.
    pub fn row(
        &self,
        layer: &LayerView,
        plane: usize,
        block: BlockId,
        head: usize,
        token: usize,
    ) -> Vec<u8> {
        let view = &layer.planes[plane];
        let mut row = vec![0; view.bytes];
        self.storages[view.storage].read(view.offset(block, head, token), &mut row);
        row
    }

    /// Overwrites what [`KvCaches::row`] reads.
    ///
    /// # Panics
    /// If there is no such layer, plane, block, head or token.
    pub fn set_row(
        &self,
        layer: &LayerView,
        plane: usize,
        block: BlockId,
        head: usize,
        token: usize,
        row: &[u8],
    ) {
        let view = &layer.planes[plane];
        self.storages[view.storage].write(view.offset(block, head, token), &row[..view.bytes]);
    }

    /// Fills a block of a group with bytes that no model computes.
    pub(crate) fn scribble(&self, group: usize, block: BlockId, seed: u64) {
        for layer in self.layout.layers.iter().filter(|layer| layer.group == group) {
            for (n, view) in layer.planes.iter().enumerate() {
                let mut garbage = vec![0; view.kernel_bytes()];
                let at = (layer.index as u64) << 8 | n as u64;
                crate::digest::fill(crate::digest::pair(seed, at), &mut garbage);
                let memory = &self.storages[view.storage];
                for part in 0..view.split {
                    let first = part * view.tokens;
                    if view.is_together() {
                        memory.write(view.offset(block, 0, first), &garbage);
                        continue;
                    }
                    for head in 0..view.heads {
                        for token in 0..view.tokens {
                            let at = (head * view.tokens + token) * view.bytes;
                            let row = &garbage[at..at + view.bytes];
                            memory.write(view.offset(block, head, first + token), row);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigError, GroupCache};
    use crate::model::GroupSpec;

    fn config(layout: Packing, storage: Storage) -> EngineConfig {
        let groups = vec![
            GroupSpec::full(4, 6).with_scales(2),
            GroupSpec::window(2, 8, 5),
            GroupSpec::state(4, 3, 24),
        ];
        let mut config = EngineConfig::new(ModelSpec::new(groups, 7));
        config.groups = vec![GroupCache::new(4, 3); 3];
        if storage == Storage::Separate {
            config.groups[0].kernel_split = 2;
            config.groups[1].blocks = 5;
        }
        (config.layout, config.storage, config.pp) = (layout, storage, 2);
        config
    }

    /// Every byte of every row of a block, as (storage, at).
    fn bytes_of(layout: &RankLayout, group: usize, block: usize) -> Vec<(usize, usize)> {
        let mut all = vec![];
        for layer in layout.layers.iter().filter(|layer| layer.group == group) {
            for view in &layer.planes {
                for head in 0..view.heads {
                    for token in 0..view.tokens * view.split {
                        let block = BlockId(u32::try_from(block).unwrap());
                        let at = view.offset(block, head, token);
                        all.extend((at..at + view.bytes).map(|at| (view.storage, at)));
                    }
                }
            }
        }
        all
    }

    #[test]
    fn rows_of_every_layout_lie_within_their_storage_and_apart() {
        for order in Packing::ALL {
            for tp in [1, 2, 4] {
                let mut config = config(order, Storage::Separate);
                config.tp = tp;
                assert_eq!(config.validate(), Ok(()));
                for rank in config.ranks() {
                    let layout = RankLayout::new(&config, rank);
                    let mut seen: Vec<Vec<bool>> =
                        layout.storages.iter().map(|len| vec![false; *len]).collect();
                    for (group, cache) in config.groups.iter().enumerate() {
                        for block in 0..cache.blocks {
                            for (storage, at) in bytes_of(&layout, group, block) {
                                assert!(!seen[storage][at], "{order} {rank}");
                                seen[storage][at] = true;
                            }
                        }
                    }
                    assert!(
                        seen.iter().flatten().all(|seen| *seen),
                        "{order}: a byte belongs to no row"
                    );
                }
            }
        }
    }

    #[test]
    fn groups_that_share_a_storage_meet_only_in_the_same_block() {
        for order in Packing::ALL {
            let config = config(order, Storage::Shared);
            if order == Packing::Lhbnc {
                assert!(matches!(config.validate(), Err(ConfigError::NotShareable { .. })));
                continue;
            }
            assert_eq!(config.validate(), Ok(()));
            let layout = RankLayout::new(&config, Rank { pp: 0, tp: 0 });
            let mut owner: Vec<Vec<Option<usize>>> =
                layout.storages.iter().map(|len| vec![None; *len]).collect();
            for group in 0..3 {
                for block in 0..3 {
                    let mut bytes = bytes_of(&layout, group, block);
                    for (storage, at) in &bytes {
                        let owner = &mut owner[*storage][*at];
                        assert!(owner.is_none_or(|other| other == block), "{order}");
                        *owner = Some(block);
                    }
                    let all = bytes.len();
                    bytes.sort_unstable();
                    bytes.dedup();
                    assert_eq!(bytes.len(), all, "{order}: rows of one group overlap");
                }
            }
        }
    }

    #[test]
    fn a_layout_needs_the_regions_of_its_storages() {
        let config = EngineConfig::new(ModelSpec::new(vec![GroupSpec::full(2, 8)], 2));
        let layout = RankLayout::new(&config, config.ranks()[0]);
        let len = layout.storages[0] as u64;
        assert!(layout.layout(&[(RegionId(1), len)]).is_ok());
        assert!(layout.layout(&[(RegionId(1), len - 1)]).is_err());
        assert!(layout.layout(&[]).is_err());
    }

    #[test]
    fn fewer_heads_than_ranks_are_held_by_several() {
        let ranges: Vec<_> = (0..4).map(|rank| HeadRange::new(2, rank, 4)).collect();
        assert_eq!(
            ranges.iter().map(|it| (it.first, it.count)).collect::<Vec<_>>(),
            [(0, 1), (0, 1), (1, 1), (1, 1)]
        );
        assert_eq!(HeadRange::new(8, 3, 4), HeadRange { total: 8, first: 6, count: 2 });
        assert_eq!(HeadRange::new(1, 3, 4), HeadRange { total: 1, first: 0, count: 1 });
    }
}
