//! Layouts as connectors describe them: plans over them move the rows' bytes.

use crate::kit::Random;
use kvferry_proto::RegionId;
use kvferry_proto::layout::{Layout, NO_BLOCK};
use kvferry_proto::plan::{Ask, Blocks, Map, Routing, Topology};
use kvferry_refengine::{
    Attention, BlockId, EngineConfig, GroupCache, GroupSpec, HeapMemory, KvCaches, KvMemory,
    LayerView, ModelSpec, Packing, RankLayout, Storage,
};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Blocks of each group.
const BLOCKS: usize = 80;

/// The caches of an engine's ranks, and the blocks of a request.
struct Side {
    config: EngineConfig,
    ranks: Vec<KvCaches>,
    layouts: Vec<Layout>,
    tables: Vec<Vec<BlockId>>,
}

fn random_model(random: &mut Random) -> ModelSpec {
    let groups = (0..1 + random.below(3)).map(|_| {
        let heads = random.pick(&[1, 2, 4, 8]);
        match random.below(6) {
            0 => GroupSpec::full(heads, 1 + random.below(5)),
            1 => GroupSpec::full(heads, 3).with_scales(1 + random.below(3)),
            2 => GroupSpec::apart(heads, 1 + random.below(5)),
            3 => GroupSpec::window(heads, 2, 1 + random.below(40)),
            4 => GroupSpec::mla(1 + random.below(20)),
            _ => GroupSpec::state(heads, 1 + random.below(7), 1 + random.below(30)),
        }
    });
    let groups: Vec<_> = groups.collect();
    let layers = groups.len() + random.below(5);
    ModelSpec::new(groups, layers)
}

fn random_config(random: &mut Random, model: &ModelSpec) -> EngineConfig {
    let mut config = EngineConfig::new(model.clone());
    config.tp = random.pick(&[1, 2, 4]);
    config.pp = 1 + random.below(model.layers.len().min(3));
    config.layout = random.pick(&Packing::ALL);
    config.storage = random.pick(&[Storage::Separate, Storage::Shared]);
    if config.layout == Packing::Lhbnc {
        config.storage = Storage::Separate;
    }
    for (group, cache) in model.groups.iter().zip(&mut config.groups) {
        *cache = GroupCache::new(random.pick(&[4, 8, 16]), BLOCKS);
        if group.attention != Attention::State && config.storage == Storage::Separate {
            cache.kernel_split = random.pick(&[1, 1, 2, 4]);
        }
    }
    config
}

impl Side {
    fn new(random: &mut Random, model: &ModelSpec, tokens: usize) -> Self {
        let config = random_config(random, model);
        let ranks = config.ranks().into_iter().map(|rank| {
            let layout = RankLayout::new(&config, rank);
            let storages = layout.storages.iter().map(|len| {
                let memory = HeapMemory::new(*len);
                let noise: Vec<u8> = (0..*len).map(|_| random.below(256) as u8).collect();
                memory.write(0, &noise);
                Arc::new(memory) as Arc<dyn KvMemory>
            });
            KvCaches { storages: storages.collect(), layout }
        });
        let ranks: Vec<_> = ranks.collect();
        let layouts = ranks.iter().map(|caches| {
            let lens = caches.layout.storages.iter().map(|len| *len as u64);
            let regions: Vec<_> = (1..).map(RegionId).zip(lens).collect();
            caches.layout.layout(&regions).unwrap()
        });
        let layouts = layouts.collect();
        // In shared storages no block belongs to two groups.
        let mut free: Vec<u32> = (1..BLOCKS as u32).collect();
        let tables = model.groups.iter().zip(&config.groups).map(|(group, cache)| {
            if config.storage == Storage::Separate {
                free = (1..BLOCKS as u32).collect();
            }
            let count = tokens.div_ceil(cache.block_tokens);
            let first = match group.attention {
                Attention::Full => 0,
                Attention::Window { tokens: window } => {
                    tokens.saturating_sub(window) / cache.block_tokens
                }
                Attention::State => count - 1,
            };
            (0..count)
                .map(|at| {
                    if at < first {
                        return BlockId::NULL;
                    }
                    let next = if random.percent(50) { 0 } else { random.below(free.len()) };
                    BlockId(free.remove(next))
                })
                .collect()
        });
        let tables = tables.collect();
        Self { ranks, layouts, tables, config }
    }

    fn topology(&self) -> Topology {
        Topology::new(&self.layouts).unwrap()
    }

    /// The tables as in a connector's metadata.
    fn ids(&self) -> Vec<Vec<u32>> {
        let id = |block: &BlockId| if block.is_null() { NO_BLOCK } else { block.0 };
        self.tables.iter().map(|table| table.iter().map(id).collect()).collect()
    }

    /// The block of a token and the place in it; for a state, those of the last token.
    fn place(&self, group: usize, token: usize) -> Option<(BlockId, usize)> {
        let block_tokens = self.config.groups[group].block_tokens;
        let block = self.tables[group][token / block_tokens];
        let state = self.config.model.groups[group].attention == Attention::State;
        (!block.is_null()).then_some((block, if state { 0 } else { token % block_tokens }))
    }

    /// A row of the model, from any rank that has it.
    fn row(&self, layer: usize, plane: usize, head: usize, token: usize) -> Option<Vec<u8>> {
        self.ranks.iter().find_map(|caches| {
            let view = caches.layout.layers.iter().find(|it| it.index == layer)?;
            let heads = caches.layout.groups[view.group].heads;
            let here = head.checked_sub(heads.first).filter(|here| *here < heads.count)?;
            let (block, at) = self.place(view.group, token)?;
            Some(caches.row(view, plane, block, here, at))
        })
    }

    /// Copies each head to all ranks that have it.
    fn agree(&self, tokens: usize) {
        for caches in &self.ranks {
            for view in &caches.layout.layers {
                self.each_row(caches, view, 0..tokens, |plane, head, token, block, at| {
                    let first = caches.layout.groups[view.group].heads.first;
                    let row = self.row(view.index, plane, first + head, token).unwrap();
                    caches.set_row(view, plane, block, head, at, &row);
                });
            }
        }
    }

    /// Calls `each` with plane, head on the rank, token, block and place in it.
    fn each_row(
        &self,
        caches: &KvCaches,
        view: &LayerView,
        tokens: Range<usize>,
        mut each: impl FnMut(usize, usize, usize, BlockId, usize),
    ) {
        let group = &caches.layout.groups[view.group];
        let state = group.attention == Attention::State;
        let first = if state { tokens.end.saturating_sub(1) } else { tokens.start };
        for token in first.max(tokens.start)..tokens.end {
            let Some((block, at)) = self.place(view.group, token) else { continue };
            for plane in 0..view.planes.len() {
                for head in 0..group.heads.count {
                    each(plane, head, token, block, at);
                }
            }
        }
    }
}

fn bytes(caches: &KvCaches) -> Vec<Vec<u8>> {
    let read = |memory: &Arc<dyn KvMemory>| {
        let mut bytes = vec![0; memory.bytes()];
        memory.read(0, &mut bytes);
        bytes
    };
    caches.storages.iter().map(read).collect()
}

fn twin(caches: &KvCaches) -> KvCaches {
    let storages = bytes(caches).into_iter().map(|bytes| {
        let memory = HeapMemory::new(bytes.len());
        memory.write(0, &bytes);
        Arc::new(memory) as Arc<dyn KvMemory>
    });
    KvCaches { storages: storages.collect(), layout: caches.layout.clone() }
}

/// Returns the number of copies.
fn check(seed: u64) -> usize {
    let mut random = Random::new(seed);
    let model = random_model(&mut random);
    let end = 1 + random.below(60);
    let start = random.below(end);
    let (from, to) = (Side::new(&mut random, &model, end), Side::new(&mut random, &model, end));
    from.agree(end);
    let right: Vec<_> = to.ranks.iter().map(twin).collect();
    for caches in &right {
        for view in &caches.layout.layers {
            to.each_row(caches, view, start..end, |plane, head, token, block, at| {
                let first = caches.layout.groups[view.group].heads.first;
                if let Some(row) = from.row(view.index, plane, first + head, token) {
                    caches.set_row(view, plane, block, head, at, &row);
                }
            });
        }
    }

    let routing = Routing::new(&from.topology(), &to.topology()).unwrap();
    let (producer, consumer) = (from.ids(), to.ids());
    let producer: Vec<_> = producer.iter().map(|ids| Blocks::from_start(ids)).collect();
    let consumer: Vec<_> = consumer.iter().map(|ids| Blocks::from_start(ids)).collect();
    let cut = start + random.below(end - start + 1);
    let mut copies = 0;
    for (at, caches) in to.ranks.iter().enumerate() {
        for &source in routing.sources_of(at) {
            let share = routing.share(source, at);
            let map = Map::new(&from.layouts[source], &to.layouts[at], &share).unwrap();
            let map = Arc::new(map);
            let layers = random.below(map.layers() + 1);
            for part in [start..cut, cut..end] {
                let tokens = start as u64..end as u64;
                let mut ask = Ask::whole(tokens, &producer, &consumer);
                ask.part = part.start as u64..part.end as u64;
                let plan = map.plan(&ask).unwrap();
                for plan in [plan.for_layers(0..layers), plan.for_layers(layers..map.layers())] {
                    for op in plan.copies() {
                        let mut bytes = vec![0; op.len as usize];
                        let storage = |id: RegionId| id.0 as usize - 1;
                        let memory = &from.ranks[source].storages[storage(op.from.region)];
                        memory.read(op.from.offset as usize, &mut bytes);
                        let memory = &caches.storages[storage(op.to.region)];
                        memory.write(op.to.offset as usize, &bytes);
                        copies += 1;
                    }
                }
            }
        }
    }
    for (rank, (caches, right)) in to.ranks.iter().zip(&right).enumerate() {
        // Bytes after the last token may have been copied as well.
        for view in &caches.layout.layers {
            let group = &caches.layout.groups[view.group];
            if group.attention == Attention::State {
                continue;
            }
            let block = to.tables[view.group][(end - 1) / group.block_tokens];
            for at in (end - 1) % group.block_tokens + 1..group.block_tokens {
                for plane in 0..view.planes.len() {
                    for head in 0..group.heads.count {
                        let row = right.row(view, plane, block, head, at);
                        caches.set_row(view, plane, block, head, at, &row);
                    }
                }
            }
        }
        assert!(bytes(caches) == bytes(right), "seed {seed}: rank {rank} has wrong bytes");
    }
    copies
}

#[test]
fn a_plan_between_two_layouts_moves_the_same_bytes_as_row_by_row_copies() {
    let copies: usize = (0..400).map(check).sum();
    assert!(copies > 10_000, "{copies}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_plan_moves_what_a_copy_of_each_row_does_of_any_engines(seed: u64) {
        check(seed);
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
