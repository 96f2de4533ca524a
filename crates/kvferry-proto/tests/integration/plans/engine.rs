//! Engines of a test's own: a model, dealt out over ranks and laid out in memory.

use kvferry_proto::RegionId;
use kvferry_proto::layout::{
    ContextShard, Encoding, Group, Heads, Kind, Layer, Layout, Packing, Plane, Region, Shape, View,
};

/// A model: layers in classes, each of which becomes a group.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) classes: Vec<Class>,
    /// Per layer, in the order of computing, its class.
    pub(crate) layers: Vec<usize>,
}

/// Layers that are alike.
#[derive(Clone, Debug)]
pub(crate) struct Class {
    pub(crate) kind: Kind,
    pub(crate) planes: Vec<PlaneModel>,
}

#[derive(Clone, Debug)]
pub(crate) struct PlaneModel {
    pub(crate) role: &'static str,
    pub(crate) heads: u32,
    pub(crate) content: u32,
    /// Rows per tokens; rows of the state.
    pub(crate) rows: u32,
    pub(crate) tokens: u32,
}

/// How an engine holds the model.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    /// First head of each tensor-parallel rank per plane, as the world's size; uneven splits are
    /// made by [`Engine::heads`].
    pub(crate) tp: u32,
    /// Ends of the pipeline's stages, in layers.
    pub(crate) stages: Vec<usize>,
    /// Per class.
    pub(crate) groups: Vec<GroupPlan>,
    /// All groups in the same bytes, page over page.
    pub(crate) shared: bool,
    /// Bytes before the first one.
    pub(crate) base: u64,
    /// Blocks per group.
    pub(crate) blocks: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct GroupPlan {
    pub(crate) block_tokens: u32,
    pub(crate) kernel_blocks: u32,
    pub(crate) context: u32,
    pub(crate) interleave: u32,
    pub(crate) order: Order,
}

/// How a group's planes lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Each plane of all layers as one dense cache.
    Dense(Packing),
    /// Each plane of each layer as a dense cache of its own, in a region of its own.
    Apart(Packing),
    /// Pages with all planes of a layer, one behind the other; pages of a block next to each other
    /// or not, heads before rows or not, and so many bytes of padding.
    Pages { block_first: bool, heads_first: bool, pad: u64 },
    /// Pages whose layers are further and further apart, the last one first.
    Uneven { heads_first: bool },
}

/// One rank: where it stands, and its layout.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) context: u32,
    pub(crate) layout: Layout,
}

pub(crate) fn layer_name(layer: usize) -> String {
    format!("model.layers.{layer}.attn")
}

impl Engine {
    /// All ranks: stage after stage, tensor-parallel rank after rank, context-parallel ones last.
    pub(crate) fn ranks(&self, model: &Model) -> Vec<Rank> {
        let contexts = self.groups.iter().map(|group| group.context).max().unwrap_or(1);
        let mut ranks = Vec::new();
        let mut first = 0;
        for &end in &self.stages {
            for tp in 0..self.tp {
                for context in 0..contexts {
                    let layout = self.layout(model, first..end, tp, context);
                    ranks.push(Rank { context, layout });
                }
            }
            first = end;
        }
        ranks
    }

    /// The heads of a tensor-parallel rank: evenly if that is possible, else the first ranks have
    /// one more.
    fn heads(&self, total: u32, rank: u32) -> Heads {
        Heads::shard(total, rank, self.tp).unwrap_or_else(|| {
            assert!(total > self.tp, "{total} heads cannot be dealt out over {} ranks", self.tp);
            let (each, more) = (total / self.tp, total % self.tp);
            let start = rank * each + rank.min(more);
            Heads { total, start, count: each + u32::from(rank < more) }
        })
    }

    fn layout(
        &self,
        model: &Model,
        layers: std::ops::Range<usize>,
        tp: u32,
        context: u32,
    ) -> Layout {
        let mut memory = Memory { regions: Vec::new(), base: self.base };
        let mut views = vec![Vec::new(); model.layers.len()];
        let shared = self.shared.then(|| self.shared_pages(model, &layers, tp, &mut memory));
        for (class, _) in self.groups.iter().enumerate() {
            let own: Vec<usize> =
                layers.clone().filter(|&layer| model.layers[layer] == class).collect();
            if own.is_empty() {
                continue;
            }
            let placed = self.place(model, class, own.len(), tp, shared.as_ref(), &mut memory);
            for (layer, its) in own.into_iter().zip(placed) {
                views[layer] = its;
            }
        }
        let groups =
            model.classes.iter().zip(&self.groups).enumerate().map(|(at, (class, plan))| {
                let spread = plan.context > 1;
                Group {
                    name: format!("group{at}"),
                    kind: class.kind,
                    block_tokens: plan.block_tokens,
                    blocks: self.blocks,
                    context: ContextShard {
                        rank: if spread { context } else { 0 },
                        size: plan.context,
                        interleave: if spread { plan.interleave } else { 0 },
                    },
                }
            });
        let layers = layers.map(|layer| {
            let class = &model.classes[model.layers[layer]];
            let block_tokens = self.groups[model.layers[layer]].block_tokens;
            let planes = class.planes.iter().zip(&views[layer]).map(|(plane, &view)| Plane {
                role: plane.role.to_owned(),
                encoding: Encoding::new("bfloat16", 16),
                heads: self.heads(plane.heads, tp),
                rows: plane.rows_of(block_tokens),
                content: plane.content,
                view,
            });
            Layer { name: layer_name(layer), group: model.layers[layer], planes: planes.collect() }
        });
        Layout::new(memory.regions.clone(), groups.collect(), layers.collect()).unwrap()
    }

    /// Bytes of a page with all planes of a layer of that class.
    fn page(&self, model: &Model, class: usize, tp: u32) -> u64 {
        let block_tokens = self.groups[class].block_tokens;
        let bytes = |plane: &PlaneModel| {
            let heads = self.heads(plane.heads, tp).count;
            u64::from(heads * plane.rows_of(block_tokens) * plane.content)
        };
        model.classes[class].planes.iter().map(bytes).sum()
    }

    /// A region for the pages of all groups: its index, bytes of a page, and pages of a block.
    fn shared_pages(
        &self,
        model: &Model,
        layers: &std::ops::Range<usize>,
        tp: u32,
        memory: &mut Memory,
    ) -> (usize, u64, usize) {
        let classes = 0..model.classes.len();
        let page = classes.clone().map(|class| self.page(model, class, tp)).max().unwrap();
        let of = |class| layers.clone().filter(|&layer| model.layers[layer] == class).count();
        let pages = classes.map(of).max().unwrap();
        let region = memory.region(page * pages as u64 * u64::from(self.blocks));
        (region, page, pages)
    }

    /// The views of the planes of a group's layers.
    fn place(
        &self,
        model: &Model,
        class: usize,
        layers: usize,
        tp: u32,
        shared: Option<&(usize, u64, usize)>,
        memory: &mut Memory,
    ) -> Vec<Vec<View>> {
        let plan = &self.groups[class];
        let planes = &model.classes[class].planes;
        let shape = |plane: &PlaneModel, layers: usize| Shape {
            layers: u32::try_from(layers).unwrap(),
            blocks: self.blocks,
            heads: self.heads(plane.heads, tp).count,
            rows: plane.rows_of(plan.block_tokens),
            content: plane.content,
            kernel_blocks: plane.kernel_blocks(plan),
        };
        let mut views = vec![Vec::new(); layers];
        match (plan.order, shared) {
            (Order::Dense(packing), None) => {
                for plane in planes {
                    let shape = shape(plane, layers);
                    let region = memory.region(shape.bytes().unwrap());
                    let placed = packing.views(&shape, region, self.base).unwrap();
                    views.iter_mut().zip(placed).for_each(|(views, view)| views.push(view));
                }
            }
            (Order::Apart(packing), None) => {
                for views in &mut views {
                    for plane in planes {
                        let shape = shape(plane, 1);
                        let region = memory.region(shape.bytes().unwrap());
                        views.extend(packing.views(&shape, region, self.base).unwrap());
                    }
                }
            }
            (order, shared) => {
                // Groups in the same bytes have the same pages.
                let order = if shared.is_some() { self.groups[0].order } else { order };
                let (block_first, heads_first, pad) = match order {
                    Order::Pages { block_first, heads_first, pad } => {
                        (block_first, heads_first, pad)
                    }
                    Order::Uneven { heads_first } => (false, heads_first, 0),
                    _ => (false, true, 0),
                };
                let uneven = matches!(order, Order::Uneven { .. }) && shared.is_none();
                let count = layers as u64;
                // Between layer n and the next one are n bytes more than a page each.
                let gaps = if uneven { count * (count - 1) / 2 } else { 0 };
                let (region, page, pages) = shared.copied().unwrap_or_else(|| {
                    let page = self.page(model, class, tp) + pad;
                    let bytes = page * count * u64::from(self.blocks) + gaps;
                    (memory.region(bytes), page, layers)
                });
                let (layer_stride, block_stride) = if block_first {
                    (page, page * pages as u64)
                } else {
                    (page * u64::from(self.blocks), page)
                };
                for (layer, views) in (0u64..).zip(&mut views) {
                    let (place, gap) = if uneven {
                        (count - 1 - layer, (count - 1 - layer) * (count - layer) / 2)
                    } else {
                        (layer, 0)
                    };
                    let mut base = self.base + place * layer_stride + gap;
                    for plane in planes {
                        let Shape { heads, rows, content, kernel_blocks, .. } = shape(plane, 1);
                        let rows = u64::from(rows / kernel_blocks);
                        let (heads, content) = (u64::from(heads), u64::from(content));
                        let (head_stride, row_stride) = if heads_first {
                            (rows * content, content)
                        } else {
                            (content, heads * content)
                        };
                        let kernel_stride = heads * rows * content;
                        views.push(View {
                            region,
                            base,
                            block_stride,
                            kernel_blocks,
                            kernel_stride,
                            head_stride,
                            row_stride,
                        });
                        base += kernel_stride * u64::from(kernel_blocks);
                    }
                }
            }
        }
        views
    }
}

struct Memory {
    regions: Vec<Region>,
    base: u64,
}

impl Memory {
    fn region(&mut self, bytes: u64) -> usize {
        let id = RegionId(u32::try_from(self.regions.len()).unwrap() * 3 + 7);
        self.regions.push(Region { id, len: self.base + bytes });
        self.regions.len() - 1
    }
}

impl PlaneModel {
    pub(crate) fn new(role: &'static str, heads: u32, content: u32) -> Self {
        Self { role, heads, content, rows: 1, tokens: 1 }
    }

    pub(crate) fn is_state(&self) -> bool {
        self.tokens == 0
    }

    pub(crate) fn rows_of(&self, block_tokens: u32) -> u32 {
        match self.tokens {
            0 => self.rows,
            tokens => {
                assert_eq!(block_tokens % tokens, 0, "rows lie within blocks");
                block_tokens / tokens * self.rows
            }
        }
    }

    fn kernel_blocks(&self, plan: &GroupPlan) -> u32 {
        let rows = self.rows_of(plan.block_tokens);
        let fits = !self.is_state() && rows.is_multiple_of(plan.kernel_blocks);
        if fits { plan.kernel_blocks } else { 1 }
    }
}

impl Model {
    /// Attention with K and V packed, the same in all layers.
    pub(crate) fn plain(layers: usize, heads: u32, content: u32) -> Self {
        let class = Class { kind: Kind::Full, planes: vec![PlaneModel::new("kv", heads, content)] };
        Self { classes: vec![class], layers: vec![0; layers] }
    }
}

impl Engine {
    /// All layers on each rank, dense.
    pub(crate) fn plain(model: &Model, tp: u32, block_tokens: u32, packing: Packing) -> Self {
        let group = GroupPlan {
            block_tokens,
            kernel_blocks: 1,
            context: 1,
            interleave: 0,
            order: Order::Dense(packing),
        };
        Self {
            tp,
            stages: vec![model.layers.len()],
            groups: vec![group; model.classes.len()],
            shared: false,
            base: 0,
            blocks: 32,
        }
    }

    pub(crate) fn with_stages(mut self, stages: &[usize]) -> Self {
        self.stages = stages.to_vec();
        self
    }

    pub(crate) fn with_context(mut self, ranks: u32, interleave: u32) -> Self {
        for group in &mut self.groups {
            (group.context, group.interleave) = (ranks, interleave);
        }
        self
    }

    pub(crate) fn layouts(&self, model: &Model) -> Vec<Layout> {
        self.ranks(model).into_iter().map(|rank| rank.layout).collect()
    }
}
