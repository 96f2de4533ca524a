//! Layouts and engines as there are, small.

use crate::decoders::joined;
use kvferry_proto::RegionId;
use kvferry_proto::layout::{
    ContextShard, Encoding, Group, Heads, Kind, Layer, Layout, Packing, Plane, Region, Shape,
};
use kvferry_proto::plan::Topology;

/// Layers of a model that share a block table, as one rank holds them.
#[derive(Clone)]
struct Part {
    kind: Kind,
    block_tokens: u32,
    kernel_blocks: u32,
    context: ContextShard,
    packing: Packing,
    layers: Vec<u32>,
    planes: Vec<Cache>,
}

/// A plane of all these layers: its role, element, heads, and the bytes of one head and row.
#[derive(Clone)]
struct Cache {
    role: &'static str,
    encoding: (&'static str, u32),
    heads: Heads,
    content: u32,
    /// Tokens of a row; rows of a state.
    per_row: u32,
}

const BLOCKS: u32 = 12;

const fn cache(role: &'static str, heads: Heads, content: u32) -> Cache {
    Cache { role, encoding: ("bfloat16", 16), heads, content, per_row: 1 }
}

/// Grouped-query attention: the second of two tensor-parallel ranks.
fn attention(packing: Packing, block_tokens: u32) -> Part {
    Part {
        kind: Kind::Full,
        block_tokens,
        kernel_blocks: 1,
        context: ContextShard::WHOLE,
        packing,
        layers: vec![0, 1, 2],
        planes: vec![cache("kv", Heads { total: 4, start: 2, count: 2 }, 32)],
    }
}

impl Part {
    fn group(&self, at: usize) -> Group {
        let name = format!("group{at}");
        let Self { kind, block_tokens, context, .. } = *self;
        Group { name, kind, block_tokens, blocks: BLOCKS, context }
    }

    fn rows(&self, cache: &Cache) -> u32 {
        match self.kind {
            Kind::State => cache.per_row,
            _ => self.block_tokens / cache.per_row,
        }
    }

    fn kernel_blocks(&self, cache: &Cache) -> u32 {
        if self.rows(cache).is_multiple_of(self.kernel_blocks) { self.kernel_blocks } else { 1 }
    }
}

/// The layout of a rank with these parts, each cache in a region of its own.
fn layout(parts: &[Part]) -> Layout {
    let mut regions = Vec::new();
    let mut layers = Vec::new();
    for (group, part) in parts.iter().enumerate() {
        let mut its: Vec<Layer> = part
            .layers
            .iter()
            .map(|layer| Layer { name: format!("l.{layer}"), group, planes: Vec::new() })
            .collect();
        for cache in &part.planes {
            let shape = Shape {
                layers: part.layers.len() as u32,
                blocks: BLOCKS,
                heads: cache.heads.count,
                rows: part.rows(cache),
                content: cache.content,
                kernel_blocks: part.kernel_blocks(cache),
            };
            let id = RegionId(regions.len() as u32 + 1);
            let views = part.packing.views(&shape, regions.len(), 0).unwrap();
            regions.push(Region { id, len: shape.bytes().unwrap() });
            for (layer, view) in its.iter_mut().zip(views) {
                let (name, bits) = cache.encoding;
                layer.planes.push(Plane {
                    role: cache.role.to_owned(),
                    encoding: Encoding::new(name, bits),
                    heads: cache.heads,
                    rows: shape.rows,
                    content: cache.content,
                    view,
                });
            }
        }
        layers.extend(its);
    }
    layers.sort_by(|a, b| a.name.cmp(&b.name));
    let groups = parts.iter().enumerate().map(|(at, part)| part.group(at)).collect();
    Layout::new(regions, groups, layers).unwrap()
}

/// Grouped-query attention with K and V apart and a scale for four tokens, in kernel blocks.
fn quantised(block_tokens: u32) -> Part {
    let heads = Heads { total: 4, start: 0, count: 4 };
    let scale = |role| Cache { encoding: ("float32", 32), per_row: 4, ..cache(role, heads, 4) };
    let fp8 = |role| Cache { encoding: ("fp8_e4m3", 8), ..cache(role, heads, 16) };
    Part {
        kernel_blocks: 2,
        planes: vec![fp8("k"), fp8("v"), scale("k_scale"), scale("v_scale")],
        ..attention(Packing::Blnhc, block_tokens)
    }
}

/// Multi-head latent attention: one head, on all ranks.
fn latent(packing: Packing, block_tokens: u32) -> Part {
    let planes = vec![cache("latent", Heads::REPLICATED, 48)];
    Part { planes, ..attention(packing, block_tokens) }
}

/// Attention over all tokens, over a window, over chunks, and a state.
fn hybrid(packing: Packing, block_tokens: u32) -> Vec<Part> {
    let full = attention(packing, block_tokens);
    let window = Part { kind: Kind::Window { tokens: 24 }, layers: vec![3, 5], ..full.clone() };
    let chunk = Part { kind: Kind::Chunk { tokens: 32 }, layers: vec![4], ..full.clone() };
    let conv = Cache { per_row: 3, ..cache("conv", Heads { total: 2, start: 0, count: 2 }, 8) };
    let state = Part { kind: Kind::State, layers: vec![6, 7], planes: vec![conv], ..full.clone() };
    vec![full, window, chunk, state]
}

/// Distributes the tokens of `part` over `size` ranks.
fn spread(part: Part, rank: u32, size: u32, interleave: u32) -> Part {
    Part { context: ContextShard { rank, size, interleave }, ..part }
}

/// Layouts of producers and consumers that fit.
pub(super) fn pairs() -> Vec<[Layout; 2]> {
    let hnd = Packing::Lbhnc;
    let pairs: [[Vec<Part>; 2]; 6] = [
        [vec![attention(hnd, 16)], vec![attention(Packing::Lbnhc, 8)]],
        [vec![quantised(8)], vec![quantised(16)]],
        [vec![latent(Packing::Blhnc, 4)], vec![latent(hnd, 16)]],
        [hybrid(hnd, 8), hybrid(Packing::Bhlnc, 16)],
        [vec![spread(latent(hnd, 8), 1, 2, 0)], vec![spread(latent(hnd, 16), 0, 2, 4)]],
        [vec![spread(attention(hnd, 8), 1, 3, 2)], vec![spread(attention(hnd, 8), 1, 3, 2)]],
    ];
    pairs.iter().map(|pair| pair.each_ref().map(|parts| layout(parts))).collect()
}

/// Layouts of producers and consumers, and what is asked for.
pub fn seeds() -> Vec<Vec<u8>> {
    let scripts: [&[u8]; 3] = [
        &[],
        // From token 21 on, 40 tokens, in parts, with the prefix's blocks left out.
        &[0, 21, 40, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 3, 1, 4, 1],
        // The first two of the producer's blocks are holes.
        &[0, 0, 90, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 0, 4, 0, 1, 0, 2, 3],
    ];
    let encoded = pairs().into_iter().map(|pair| pair.map(|layout| layout.encode()));
    encoded.flat_map(|[a, b]| scripts.map(|script| joined(&[&a, &b, script]))).collect()
}

/// The ranks of an engine with these parts, and a pipeline whose stages end before these layers.
fn ranks(parts: &[Part], tp: u32, stages: &[u32]) -> Vec<Layout> {
    let mut ranks = Vec::new();
    for (at, &end) in stages.iter().enumerate() {
        let first = if at == 0 { 0 } else { stages[at - 1] };
        for rank in 0..tp {
            let held = parts.iter().cloned().map(|mut part| {
                part.layers.retain(|layer| (first..end).contains(layer));
                for cache in &mut part.planes {
                    cache.heads = Heads::shard(cache.heads.total, rank, tp).unwrap();
                }
                part
            });
            ranks.push(layout(&held.filter(|part| !part.layers.is_empty()).collect::<Vec<_>>()));
        }
    }
    ranks
}

/// Engines with the same model, two at a time.
pub fn engine_seeds() -> Vec<Vec<u8>> {
    let hnd = Packing::Lbhnc;
    let plain = vec![attention(hnd, 16)];
    let dealt = |at| vec![spread(attention(hnd, 8), at, 2, 2)];
    let context: Vec<Layout> = [0, 1].iter().flat_map(|&at| ranks(&dealt(at), 2, &[3])).collect();
    let pairs = [
        [ranks(&plain, 2, &[3]), ranks(&plain, 4, &[1, 3])],
        [ranks(&plain, 8, &[2, 3]), context],
        [ranks(&[latent(hnd, 4)], 3, &[3]), ranks(&[latent(hnd, 16)], 2, &[3])],
        [ranks(&hybrid(hnd, 8), 2, &[4, 8]), ranks(&hybrid(hnd, 16), 1, &[8])],
    ];
    let encoded = |ranks: &Vec<Layout>| Topology::new(ranks).unwrap().encode();
    pairs
        .iter()
        .map(|pair| joined(&pair.each_ref().map(encoded).each_ref().map(Vec::as_slice)))
        .collect()
}
