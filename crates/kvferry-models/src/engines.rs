//! Generates small engines, for tests of whole engines.

use kvferry_proto::engine_handshake::{EngineId, Introduced, Model, OwnEngine};
use kvferry_proto::layout::{
    ContextShard, Encoding, Group, Heads, Kind, Layer, Layout, Packing, Plane, Region, Shape,
};
use kvferry_proto::plan::Topology;
use kvferry_proto::{Origin, RegionId};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// Origin of all ranks.
pub fn here() -> Origin {
    Origin::from(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// A rank with these heads of layers of full attention, whose blocks lie in the region `id`. A row
/// is a token.
pub fn layout(id: RegionId, heads: Heads, shape: &Shape, packing: Packing) -> Layout {
    let Shape { rows, blocks, content, .. } = *shape;
    let context = ContextShard::WHOLE;
    let group =
        Group { name: "full".into(), kind: Kind::Full, block_tokens: rows, blocks, context };
    let views = packing.views(shape, 0, 0).unwrap().into_iter().enumerate();
    let layers = views.map(|(at, view)| {
        let encoding = Encoding::new("bfloat16", 16);
        let plane = Plane { role: "kv".into(), encoding, heads, rows, content, view };
        Layer { name: format!("model.layers.{at}"), group: 0, planes: vec![plane] }
    });
    let region = Region { id, len: shape.bytes().unwrap() };
    Layout::new(vec![region], vec![group], layers.collect()).unwrap()
}

/// A rank of an engine of one layer, whose heads are dealt out evenly over its ranks.
pub fn layout_of_rank(rank: u32, ranks: u32, heads: u32) -> Layout {
    let heads = Heads::shard(heads, rank, ranks).unwrap();
    let (layers, kernel_blocks) = (1, 1);
    let shape =
        Shape { layers, blocks: 4, heads: heads.count, rows: 16, content: 32, kernel_blocks };
    layout(RegionId(1), heads, &shape, Packing::Lbhnc)
}

/// An engine of so many ranks, of a model with so many heads: one of the two divides the other.
pub fn topology(ranks: u32, heads: u32) -> Topology {
    let layouts: Vec<_> = (0..ranks).map(|rank| layout_of_rank(rank, ranks, heads)).collect();
    Topology::new(&layouts).unwrap()
}

/// Such an engine as its rank knows it, with cards of so many bytes.
pub fn own_engine(id: u128, rank: usize, topology: Topology, card_len: usize) -> OwnEngine {
    let ranks = topology.ranks();
    OwnEngine {
        id: EngineId(id),
        rank,
        topology: Arc::new(topology),
        model: Model::default(),
        addresses: (0..ranks).map(|rank| format!("host-{id}:{rank}")).collect(),
        cards: (0..ranks).map(|rank| card(id, rank, card_len)).collect(),
    }
}

/// An answer of an engine that shows these ranks.
pub fn introduced(engine: &OwnEngine, ranks: std::ops::Range<usize>) -> Introduced {
    let shown = ranks.map(|rank| (rank as u32, engine.cards[rank].clone().into()));
    Introduced {
        engine: engine.id,
        topology: engine.topology.encode(),
        model: engine.model.clone(),
        addresses: engine.addresses.clone(),
        cards: shown.collect(),
    }
}

/// A model of this name.
pub fn model(name: &str) -> Model {
    Model([("model".to_owned(), name.to_owned())].into())
}

/// The card of a rank.
pub fn card(id: u128, rank: usize, len: usize) -> Vec<u8> {
    vec![(id as u8).wrapping_mul(16).wrapping_add(rank as u8); len]
}
