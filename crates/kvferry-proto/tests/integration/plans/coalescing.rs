//! How few copies a plan makes do with.

use crate::plans::engine::{Class, Engine, GroupPlan, Model, Order, PlaneModel};
use crate::plans::naive::self_consistent;
use kvferry_proto::layout::{Kind, Packing};
use kvferry_proto::plan::{Ask, Blocks, Map, Plan, Routing, Topology};
use std::sync::Arc;

const LAYERS: usize = 3;
const HEADS: u32 = 4;
const TOKENS: u32 = 8;
const CONTENT: u32 = 6;

fn model() -> Model {
    Model::plain(LAYERS, HEADS, CONTENT)
}

/// The plan of what rank `to` reads from rank `from`, for whole tables.
fn plan(
    model: &Model,
    (producer, from): (&Engine, usize),
    (consumer, to): (&Engine, usize),
    tokens: u64,
    ours: &[u32],
    theirs: &[u32],
) -> Plan {
    let (producers, consumers) = (producer.layouts(model), consumer.layouts(model));
    let routing =
        Routing::new(&Topology::new(&producers).unwrap(), &Topology::new(&consumers).unwrap())
            .unwrap();
    let share = routing.share(from, to);
    let map = Arc::new(Map::new(&producers[from], &consumers[to], &share).unwrap());
    let ours = vec![Blocks::from_start(ours); producers[from].groups().len()];
    let theirs = vec![Blocks::from_start(theirs); consumers[to].groups().len()];
    map.plan(&Ask::whole(0..tokens, &ours, &theirs)).unwrap()
}

fn count(plan: &Plan) -> u64 {
    self_consistent(plan, |_| {}).0
}

/// Copies of 4 blocks between equal engines of one rank.
fn equal(packing: Packing, ours: &[u32], theirs: &[u32]) -> u64 {
    let engine = Engine::plain(&model(), 1, TOKENS, packing);
    count(&plan(&model(), (&engine, 0), (&engine, 0), 32, ours, theirs))
}

#[test]
fn blocks_apart_take_a_copy_per_contiguous_piece_and_blocks_in_a_row_at_both_ends_one_together() {
    let (layers, heads) = (LAYERS as u64, u64::from(HEADS));
    let row = [10, 11, 12, 13];
    for (packing, apart, in_a_row) in [
        (Packing::Lbhnc, 4 * layers, layers),
        (Packing::Lbnhc, 4 * layers, layers),
        (Packing::Lhbnc, 4 * layers * heads, layers * heads),
        (Packing::Blhnc, 4, 1),
        (Packing::Blnhc, 4, 1),
        (Packing::Bhlnc, 4, 1),
    ] {
        assert_eq!(equal(packing, &[1, 5, 3, 9], &[2, 8, 4, 6]), apart, "{packing}");
        assert_eq!(equal(packing, &row, &[2, 3, 4, 5]), in_a_row, "{packing}");
    }
    // In a row at one end only.
    assert_eq!(equal(Packing::Blhnc, &row, &[2, 4, 6, 8]), 4);
    assert_eq!(equal(Packing::Blhnc, &row, &[5, 4, 3, 2]), 4);
}

#[test]
fn a_whole_pool_is_one_copy_over_all_layers_and_heads() {
    let engine = Engine { blocks: 4, ..Engine::plain(&model(), 1, TOKENS, Packing::Lhbnc) };
    let all = [0, 1, 2, 3];
    let plan = plan(&model(), (&engine, 0), (&engine, 0), 32, &all, &all);
    assert_eq!(count(&plan), 1);
}

#[test]
fn heads_of_unequal_worlds_are_one_copy_per_block_where_heads_are_before_tokens() {
    let (ours, theirs) = ([1, 5, 3, 9], [2, 8, 4, 6]);
    for (packing, copies) in [
        (Packing::Lbhnc, 4 * LAYERS as u64),
        // Each token has other heads beside it.
        (Packing::Lbnhc, 32 * LAYERS as u64),
        (Packing::Blhnc, 4 * LAYERS as u64),
        (Packing::Bhlnc, 4),
    ] {
        let two = Engine::plain(&model(), 2, TOKENS, packing);
        let four = Engine::plain(&model(), 4, TOKENS, packing);
        let plan = plan(&model(), (&two, 0), (&four, 1), 32, &ours, &theirs);
        assert_eq!(count(&plan), copies, "{packing}");
    }
}

#[test]
fn small_blocks_in_a_row_fill_a_large_one_in_one_copy() {
    let small = Engine::plain(&model(), 1, TOKENS, Packing::Lbnhc);
    let large = Engine::plain(&model(), 1, 4 * TOKENS, Packing::Lbnhc);
    let layers = LAYERS as u64;
    let into = plan(&model(), (&small, 0), (&large, 0), 32, &[4, 5, 6, 7], &[3]);
    assert_eq!(count(&into), layers);
    let apart = plan(&model(), (&small, 0), (&large, 0), 32, &[4, 5, 7, 6], &[3]);
    assert_eq!(count(&apart), 3 * layers);
    let out_of = plan(&model(), (&large, 0), (&small, 0), 32, &[3], &[4, 5, 6, 7]);
    assert_eq!(count(&out_of), layers);
}

#[test]
fn k_and_v_and_scales_beside_each_other_are_copied_together() {
    let planes = vec![
        PlaneModel::new("k", HEADS, CONTENT),
        PlaneModel::new("v", HEADS, CONTENT),
        PlaneModel { tokens: TOKENS, ..PlaneModel::new("k_scale", HEADS, 4) },
        PlaneModel { tokens: TOKENS, ..PlaneModel::new("v_scale", HEADS, 4) },
    ];
    let classes = vec![Class { kind: Kind::Full, planes }];
    let model = Model { classes, layers: vec![0; LAYERS] };
    let paged = |block_first| {
        let mut engine = Engine::plain(&model, 1, TOKENS, Packing::Lbhnc);
        engine.groups[0].order = Order::Pages { block_first, heads_first: true, pad: 0 };
        engine
    };
    let (ours, theirs) = ([1, 5, 3, 9], [2, 8, 4, 6]);
    let pages = plan(&model, (&paged(false), 0), (&paged(false), 0), 32, &ours, &theirs);
    assert_eq!(count(&pages), 4 * LAYERS as u64);
    // Pages of all layers next to each other: one copy per block.
    let blocks = plan(&model, (&paged(true), 0), (&paged(true), 0), 32, &ours, &theirs);
    assert_eq!(count(&blocks), 4);
    // One layer of it is one page.
    assert_eq!(count(&blocks.for_layers(1..2)), 4);
    assert_eq!(count(&blocks.for_layers(1..3)), 4);
    assert_eq!(blocks.for_layers(1..2).bytes() * LAYERS as u64, blocks.bytes());
}

#[test]
fn kernel_blocks_in_a_row_are_one_copy() {
    for (ours, theirs, copies) in [
        // The same split: a logical block is contiguous at both ends.
        (4, 4, 4 * LAYERS as u64),
        (1, 1, 4 * LAYERS as u64),
        // Kernel blocks of two tokens against whole blocks: heads are apart at one end.
        (4, 1, 4 * 4 * u64::from(HEADS) * LAYERS as u64),
    ] {
        let engine = |kernel_blocks| {
            let group = GroupPlan {
                block_tokens: TOKENS,
                kernel_blocks,
                context: 1,
                interleave: 0,
                order: Order::Dense(Packing::Lbhnc),
            };
            Engine { groups: vec![group], ..Engine::plain(&model(), 1, TOKENS, Packing::Lbhnc) }
        };
        let plan = plan(
            &model(),
            (&engine(ours), 0),
            (&engine(theirs), 0),
            32,
            &[1, 5, 3, 9],
            &[2, 8, 4, 6],
        );
        assert_eq!(count(&plan), copies, "{ours} kernel blocks to {theirs}");
    }
}

#[test]
fn of_the_last_block_only_the_tokens_asked_for_are_copied_unless_that_costs_copies() {
    let row = u64::from(HEADS * CONTENT);
    let block = row * u64::from(TOKENS);
    let layers = LAYERS as u64;
    for (packing, bytes, copies) in [
        // Tokens are in a row over all heads: two copies per layer, the second one short.
        (Packing::Lbnhc, layers * (block + 3 * row), 2 * layers),
        // Heads are before tokens: the whole block, rather than a copy per head.
        (Packing::Lbhnc, layers * 2 * block, 2 * layers),
        // A copy per head in any case: three tokens of each.
        (Packing::Lhbnc, layers * (block + 3 * row), 2 * layers * u64::from(HEADS)),
        // A block is one copy over all layers: whole again.
        (Packing::Blnhc, layers * 2 * block, 2),
    ] {
        let engine = Engine::plain(&model(), 1, TOKENS, packing);
        let plan = plan(&model(), (&engine, 0), (&engine, 0), 11, &[1, 5], &[7, 2]);
        assert_eq!((plan.bytes(), count(&plan)), (bytes, copies), "{packing}");
    }
    // The short one continues the block before it.
    let engine = Engine::plain(&model(), 1, TOKENS, Packing::Lbnhc);
    let plan = plan(&model(), (&engine, 0), (&engine, 0), 11, &[4, 5], &[7, 8]);
    assert_eq!((plan.bytes(), count(&plan)), (layers * (block + 3 * row), layers));
}

#[test]
fn ranks_with_the_same_tokens_copy_whole_blocks_however_these_were_dealt_out() {
    let engine = Engine::plain(&model(), 1, TOKENS, Packing::Lbhnc).with_context(2, 1);
    let plan = plan(&model(), (&engine, 1), (&engine, 1), 64, &[1, 5, 3, 9], &[2, 8, 4, 6]);
    assert_eq!(count(&plan), 4 * LAYERS as u64);
}

#[test]
fn what_only_seems_to_continue_in_another_region_is_not_joined() {
    // The last block of layer 0 ends where, in its own region, the first of layer 1 begins; at the
    // other end they do follow each other.
    let model = Model::plain(2, HEADS, CONTENT);
    let dense = Engine { blocks: 2, ..Engine::plain(&model, 1, TOKENS, Packing::Lbhnc) };
    let mut apart = Engine::plain(&model, 1, TOKENS, Packing::Lbhnc);
    apart.groups[0].order = Order::Apart(Packing::Lbhnc);
    let into = plan(&model, (&apart, 0), (&dense, 0), 16, &[5, 4], &[0, 1]);
    assert_eq!(count(&into), 4);
    let out_of = plan(&model, (&dense, 0), (&apart, 0), 16, &[0, 1], &[5, 4]);
    assert_eq!(count(&out_of), 4);
}

#[test]
fn groups_are_copied_apart_and_layers_of_one_together() {
    // Full and windowed layers in turn, in one dense cache each: every second layer of a group.
    let class = |kind| Class { kind, planes: vec![PlaneModel::new("kv", HEADS, CONTENT)] };
    let classes = vec![class(Kind::Full), class(Kind::Window { tokens: 99 })];
    let model = Model { classes, layers: vec![0, 1, 1, 0, 1, 1, 0] };
    let engine = Engine::plain(&model, 1, TOKENS, Packing::Blhnc);
    let plan = plan(&model, (&engine, 0), (&engine, 0), 32, &[1, 5, 3, 9], &[2, 8, 4, 6]);
    assert_eq!(count(&plan), 8);
    let layer = plan.bytes() / 7;
    for (at, layers) in [(0..1, 1), (0..3, 3), (2..6, 4), (7..9, 0), (5..5, 0)] {
        assert_eq!(self_consistent(&plan.for_layers(at), |_| {}).1, layers * layer);
    }
}
