//! How long plans take: 8192 tokens in 64 layers, blocks of 16 tokens, random block tables, from two
//! tensor-parallel ranks to four.
//!
//! ```text
//! cargo run --release -p kvferry-proto --example plan_times
//! ```
//!
//! Prints for each packing the median and the 90th percentile of: routing (once per peer engine),
//! map (once per pair of ranks), plan (per request), one layer of it, all copies one by one, and
//! all copies in lists of 4096.
#![allow(clippy::unwrap_used, reason = "an example: a failure is to be seen")]
#![allow(clippy::print_stdout, reason = "that is what it is for")]

use kvferry_proto::RegionId;
use kvferry_proto::layout::{
    ContextShard, Encoding, Group, Heads, Kind, Layer, Layout, Packing, Plane, Region, Shape,
};
use kvferry_proto::plan::{Ask, Blocks, Cursor, Map, Plan, Routing, Topology};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LAYERS: u32 = 64;
const HEADS: u32 = 8;
const BLOCK_TOKENS: u32 = 16;
/// K and V of 128 elements of two bytes.
const CONTENT: u32 = 512;
const TOKENS: u64 = 8192;
const BLOCKS: u32 = 4096;
const REPEATS: usize = 101;

fn main() {
    println!(
        "{TOKENS} tokens, {LAYERS} layers, blocks of {BLOCK_TOKENS}, median (90th percentile)"
    );
    println!(
        "{:22} {:>7} {:>5} {:>15} {:>15} {:>15} {:>15} {:>17} {:>17}",
        "", "copies", "MiB", "routing us", "map us", "plan us", "layer us", "each us", "lists us"
    );
    for packing in Packing::ALL {
        measure(&format!("{packing} 2 to 4"), (packing, 2, 16), (packing, 4, 16));
    }
    let lbhnc = Packing::Lbhnc;
    measure("LBHNC 4 to 2", (lbhnc, 4, 16), (lbhnc, 2, 16));
    measure("LBHNC to BLNHC, 2 to 2", (lbhnc, 2, 16), (Packing::Blnhc, 2, 16));
    measure("LBHNC 2 to 4, 16 to 64", (lbhnc, 2, 16), (lbhnc, 4, 64));
    measure("LBNHC 2 to 2", (Packing::Lbnhc, 2, 16), (Packing::Lbnhc, 2, 16));
}

/// Packing, tensor-parallel ranks and tokens of a block.
type Engine = (Packing, u32, u32);

fn measure(name: &str, producer: Engine, consumer: Engine) {
    let (ours, theirs) = (layouts(producer), layouts(consumer));
    let topologies = (Topology::new(&ours).unwrap(), Topology::new(&theirs).unwrap());
    let routing = Routing::new(&topologies.0, &topologies.1).unwrap();
    let (from, to) = (0, routing.readers_of(0)[0]);
    let share = routing.share(from, to);
    let map = Arc::new(Map::new(&ours[from], &theirs[to], &share).unwrap());
    let mut random = Random(7);
    let tables = [producer, consumer].map(|(_, _, tokens)| {
        (0..REPEATS).map(|_| random.blocks(TOKENS as usize / tokens as usize)).collect::<Vec<_>>()
    });
    let plan_of = |map: &Arc<Map>, at: usize| {
        let from = [Blocks::from_start(&tables[0][at])];
        let to = [Blocks::from_start(&tables[1][at])];
        map.plan(&Ask::whole(0..TOKENS, &from, &to)).unwrap()
    };
    let plan = plan_of(&map, 0);
    let times = [
        time(|_| Routing::new(&topologies.0, &topologies.1).unwrap()),
        time(|_| Map::new(&ours[from], &theirs[to], &share).unwrap()),
        time(|at| plan_of(&map, at)),
        time(|at| plan.for_layers(at % 64..at % 64 + 1)),
    ];
    let emit = |each: fn(&Plan) -> u64| {
        let mut took: Vec<Duration> = (0..REPEATS)
            .map(|at| {
                let plan = plan_of(&map, at);
                let began = Instant::now();
                black_box(each(&plan));
                began.elapsed()
            })
            .collect();
        took.sort_unstable();
        shown(&took)
    };
    let one_by_one = emit(|plan| {
        let mut sum = 0;
        for op in plan.copies() {
            sum ^= op.from.offset ^ op.to.offset ^ op.len;
        }
        sum
    });
    let in_lists = emit(|plan| {
        let (mut list, mut cursor) = (Vec::with_capacity(4096), Cursor::default());
        let mut sum = 0;
        while plan.fill(&mut cursor, 4096, &mut list) > 0 {
            sum ^= list[list.len() - 1].to.offset;
            list.clear();
        }
        sum
    });
    print!("{name:22} {:>7} {:>5}", plan.len(), plan.bytes() >> 20);
    for (at, column) in times.iter().chain([&one_by_one, &in_lists]).enumerate() {
        print!(" {column:>width$}", width = if at < 4 { 15 } else { 17 });
    }
    println!();
}

fn time<T>(mut work: impl FnMut(usize) -> T) -> String {
    let mut took: Vec<Duration> = (0..REPEATS)
        .map(|at| {
            let began = Instant::now();
            let made = black_box(work(at));
            let took = began.elapsed();
            drop(made);
            took
        })
        .collect();
    took.sort_unstable();
    shown(&took)
}

fn shown(sorted: &[Duration]) -> String {
    let micros = |at: usize| sorted[at].as_nanos() as f64 / 1000.0;
    format!("{:.1} ({:.1})", micros(sorted.len() / 2), micros(sorted.len() * 9 / 10))
}

fn layouts((packing, ranks, block_tokens): Engine) -> Vec<Layout> {
    (0..ranks).map(|rank| layout(packing, rank, ranks, block_tokens)).collect()
}

fn layout(packing: Packing, rank: u32, ranks: u32, block_tokens: u32) -> Layout {
    let heads = Heads::shard(HEADS, rank, ranks).unwrap();
    let shape = Shape {
        layers: LAYERS,
        blocks: BLOCKS,
        heads: heads.count,
        rows: block_tokens,
        content: CONTENT,
        kernel_blocks: 1,
    };
    let region = Region { id: RegionId(1), len: shape.bytes().unwrap() };
    let group = Group {
        name: "full".to_owned(),
        kind: Kind::Full,
        block_tokens,
        blocks: BLOCKS,
        context: ContextShard::WHOLE,
    };
    let views = packing.views(&shape, 0, 0).unwrap();
    let layers = views.into_iter().enumerate().map(|(layer, view)| Layer {
        name: format!("model.layers.{layer}.self_attn.attn"),
        group: 0,
        planes: vec![Plane {
            role: "kv".to_owned(),
            encoding: Encoding::new("bfloat16", 16),
            heads,
            rows: block_tokens,
            content: CONTENT,
            view,
        }],
    });
    Layout::new(vec![region], vec![group], layers.collect()).unwrap()
}

/// A generator for block tables: what it draws matters little.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// So many different ids in random order.
    fn blocks(&mut self, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..BLOCKS).collect();
        for at in 0..count {
            let other = at + self.next() as usize % (all.len() - at);
            all.swap(at, other);
        }
        all.truncate(count);
        all
    }
}
