//! Small engines, for what is said of whole engines.

use kvferry_proto::RegionId;
use kvferry_proto::engine_handshake::{EngineId, OwnEngine};
use kvferry_proto::layout::{
    ContextShard, Encoding, Group, Heads, Kind, Layer, Layout, Plane, Region, View,
};
use kvferry_proto::plan::Topology;
use std::sync::Arc;

const BLOCKS: u32 = 4;
const ROWS: u32 = 16;
const CONTENT: u32 = 32;

/// A rank of an engine of one layer, whose heads are dealt out evenly over its ranks.
fn layout(rank: u32, ranks: u32, heads: u32) -> Layout {
    let heads = Heads::shard(heads, rank, ranks).unwrap();
    let head_stride = u64::from(ROWS * CONTENT);
    let block_stride = head_stride * u64::from(heads.count);
    let view = View {
        region: 0,
        base: 0,
        block_stride,
        kernel_blocks: 1,
        kernel_stride: 0,
        head_stride,
        row_stride: u64::from(CONTENT),
    };
    let encoding = Encoding::new("bfloat16", 16);
    let plane = Plane { role: "kv".into(), encoding, heads, rows: ROWS, content: CONTENT, view };
    let group = Group {
        name: "full".into(),
        kind: Kind::Full,
        block_tokens: ROWS,
        blocks: BLOCKS,
        context: ContextShard::WHOLE,
    };
    let layer = Layer { name: "model.layers.0".into(), group: 0, planes: vec![plane] };
    let region = Region { id: RegionId(1), len: block_stride * u64::from(BLOCKS) };
    Layout::new(vec![region], vec![group], vec![layer]).unwrap()
}

/// An engine of so many ranks, of a model with so many heads: one of the two divides the other.
pub fn topology(ranks: u32, heads: u32) -> Topology {
    let layouts: Vec<_> = (0..ranks).map(|rank| layout(rank, ranks, heads)).collect();
    Topology::new(&layouts).unwrap()
}

/// Such an engine as its rank knows it, with cards of so many bytes.
pub fn own_engine(id: u128, rank: usize, topology: Topology, card_len: usize) -> OwnEngine {
    let ranks = topology.ranks();
    OwnEngine {
        id: EngineId(id),
        rank,
        topology: Arc::new(topology),
        addresses: (0..ranks).map(|rank| format!("host-{id}:{rank}")).collect(),
        cards: (0..ranks).map(|rank| card(id, rank, card_len)).collect(),
    }
}

/// What a rank says of itself.
pub fn card(id: u128, rank: usize, len: usize) -> Vec<u8> {
    vec![(id as u8).wrapping_mul(16).wrapping_add(rank as u8); len]
}
