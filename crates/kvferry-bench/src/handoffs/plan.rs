//! The time of planning a handoff between engines of unequal tensor parallelism.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use kvferry_proto::RegionId;
use kvferry_proto::layout::{Encoding, Layout, Mismatch, Packing};
use kvferry_proto::plan::{Ask, Blocks, Cursor, Map, Plan, Routing, Share, Topology};

use fastrand::Rng;

use crate::blocks::table;
use crate::failure::Failure;
use crate::stats::{Spread, median};

use super::Settings;
use super::exposed::{BLOCK_TOKENS, LAYERS, TOKENS};
use super::rank::{Geometry, failed, layout};
use crate::report::Row;

const PRODUCERS: u32 = 2;
const CONSUMERS: u32 = 4;
const POOL: u32 = 4096;
/// K and V of 128 elements of two bytes, of eight heads.
const GEOMETRY: Geometry =
    Geometry { layers: LAYERS, blocks: POOL, block_tokens: BLOCK_TOKENS, heads: 8, content: 512 };
/// Plans of one round.
const REPEATS: usize = 21;
/// Copies that a plan yields at a time.
const LIST: usize = 4096;

const CACHED_MS_MAX: f64 = 1.0;
const FRESH_MS_MAX: f64 = 20.0;

pub(super) fn run(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for packing in Packing::ALL {
        settings.bar.set_message(format!("plan, {packing}"));
        let bench = Bench::new(packing).map_err(failed)?;
        let rounds = |work: &mut dyn FnMut(usize)| {
            Spread::of((0..settings.rounds).map(|_| round(work)).collect())
        };
        let cached = rounds(&mut |at| drop(black_box(bench.plan(&bench.map, at))));
        let fresh = rounds(&mut |at| drop(black_box(bench.plan_without_cache(at))));
        let copies = rounds(&mut |at| {
            black_box(copies(&bench.plan(&bench.map, at)));
        });
        let count = crate::units::count(bench.plan(&bench.map, 0).len());
        let name = |what: &str| format!("{packing}, tp {PRODUCERS} to {CONSUMERS}: {what}");
        rows.extend([
            Row::new("plan", name("map cached"), "ms", cached).at_most(CACHED_MS_MAX),
            Row::new("plan", name("nothing cached"), "ms", fresh).at_most(FRESH_MS_MAX),
            Row::new("plan", name(&format!("map cached, and its {count} copies")), "ms", copies),
        ]);
    }
    Ok(rows)
}

/// The median of [`REPEATS`], in milliseconds.
fn round(work: &mut dyn FnMut(usize)) -> f64 {
    let times: Vec<_> = (0..REPEATS)
        .map(|at| {
            let began = Instant::now();
            work(at);
            began.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    median(&times)
}

fn copies(plan: &Plan) -> u64 {
    let (mut list, mut cursor) = (Vec::with_capacity(LIST), Cursor::default());
    let mut sum = 0;
    while plan.fill(&mut cursor, LIST, &mut list) > 0 {
        sum ^= list[list.len() - 1].to.offset;
        list.clear();
    }
    sum
}

struct Bench {
    producers: Vec<Layout>,
    consumers: Vec<Layout>,
    from: usize,
    to: usize,
    share: Share,
    map: Arc<Map>,
    /// Blocks of requests, at the producer and at the consumer.
    tables: Vec<[Vec<u32>; 2]>,
}

impl Bench {
    fn new(packing: Packing) -> Result<Bench, Mismatch> {
        let (geometry, encoding) = (GEOMETRY, Encoding::new("bfloat16", 16));
        let layouts = |ranks| -> Vec<_> {
            let of = |rank| layout(&geometry, packing, (rank, ranks), &encoding, RegionId(1));
            (0..ranks).map(|rank| of(rank).expect("the shape is sound")).collect()
        };
        let (producers, consumers) = (layouts(PRODUCERS), layouts(CONSUMERS));
        let routing = Routing::new(&Topology::new(&producers)?, &Topology::new(&consumers)?)?;
        let (from, to) = (0, routing.readers_of(0)[0]);
        let share = routing.share(from, to);
        let map = Arc::new(Map::new(&producers[from], &consumers[to], &share)?);
        let mut rng = Rng::with_seed(super::SEED);
        let mut table = || table(POOL, TOKENS / BLOCK_TOKENS, &mut rng);
        let tables = (0..REPEATS).map(|_| [table(), table()]).collect();
        Ok(Bench { producers, consumers, from, to, share, map, tables })
    }

    fn plan(&self, map: &Arc<Map>, at: usize) -> Plan {
        let [there, here] = &self.tables[at];
        let (from, to) = ([Blocks::from_start(there)], [Blocks::from_start(here)]);
        map.plan(&Ask::whole(0..TOKENS.into(), &from, &to)).expect("the tables are whole")
    }

    /// Builds topology, routing and map, which are the same for all requests, and plans.
    fn plan_without_cache(&self, at: usize) -> Plan {
        let topology = |layouts: &Vec<Layout>| Topology::new(layouts).expect("it was built before");
        let routing = Routing::new(&topology(&self.producers), &topology(&self.consumers));
        black_box(routing.expect("it was built before"));
        let map = Map::new(&self.producers[self.from], &self.consumers[self.to], &self.share);
        self.plan(&Arc::new(map.expect("it was built before")), at)
    }
}
