//! Block tables: what is asked for, what is there, what is missing.

use crate::plans::engine::{Class, Engine, Model, PlaneModel};
use crate::plans::naive::self_consistent;
use kvferry_proto::layout::{End, Heads, Kind, Layout, NO_BLOCK, Packing, Region};
use kvferry_proto::plan::{Ask, Blocks, CopyOp, Map, Plan, PlanError, Share, Unfilled};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a block of [`pair`]: 4 tokens of 2 heads of 10 bytes.
const BLOCK: u64 = 80;

/// One rank at each end, one layer, blocks of so many tokens.
fn pair(kind: Kind, ours: u32, theirs: u32) -> (Layout, Layout) {
    let plane = PlaneModel::new("kv", 2, 10);
    let plane =
        if kind == Kind::State { PlaneModel { rows: 4, tokens: 0, ..plane } } else { plane };
    let model = Model { classes: vec![Class { kind, planes: vec![plane] }], layers: vec![0] };
    let layout =
        |tokens| Engine::plain(&model, 1, tokens, Packing::Lbnhc).layouts(&model).pop().unwrap();
    (layout(ours), layout(theirs))
}

fn map(kind: Kind, ours: u32, theirs: u32) -> Arc<Map> {
    let (producer, consumer) = pair(kind, ours, theirs);
    between(&producer, &consumer)
}

/// The map for all that two ranks have in common.
fn between(producer: &Layout, consumer: &Layout) -> Arc<Map> {
    let share = Share::overlap(producer, consumer).unwrap();
    Arc::new(Map::new(producer, consumer, &share).unwrap())
}

fn plan(
    map: &Arc<Map>,
    tokens: Range<u64>,
    from: Blocks<'_>,
    to: Blocks<'_>,
) -> Result<Plan, PlanError> {
    map.plan(&Ask::whole(tokens, &[from], &[to]))
}

/// Offsets at both ends and length of each copy.
fn copies(plan: &Plan) -> Vec<(u64, u64, u64)> {
    let mut copies = Vec::new();
    self_consistent(plan, |CopyOp { from, to, len }| copies.push((from.offset, to.offset, len)));
    copies
}

fn start(ids: &[u32]) -> Blocks<'_> {
    Blocks::from_start(ids)
}

#[test]
fn blocks_are_matched_by_their_place_in_the_request() {
    let map = map(Kind::Full, 4, 4);
    let plan = plan(&map, 0..12, start(&[5, 9, 2]), start(&[1, 3, 8])).unwrap();
    assert_eq!(
        copies(&plan),
        [(5 * BLOCK, BLOCK, BLOCK), (9 * BLOCK, 3 * BLOCK, BLOCK), (2 * BLOCK, 8 * BLOCK, BLOCK)]
    );
}

#[test]
fn a_producer_with_more_blocks_sends_the_ones_asked_for() {
    let (producer, consumer) = pair(Kind::Full, 4, 4);
    let map = map(Kind::Full, 4, 4);
    // The consumer has two blocks of prefix and lists the last two only; the producer lists all,
    // and one for tokens to come.
    let last = Blocks::last(&[7, 4], 14, &consumer.groups()[0]).unwrap();
    assert_eq!(last.first, 2);
    let all = start(&[10, 11, 12, 13, 14]);
    let plan = plan(&map, 8..14, all, last).unwrap();
    assert_eq!(copies(&plan), [(12 * BLOCK, 7 * BLOCK, BLOCK), (13 * BLOCK, 4 * BLOCK, BLOCK / 2)]);
    // More blocks than tokens cannot be the last ones.
    assert_eq!(Blocks::last(&[1; 5], 14, &producer.groups()[0]), None);
}

#[test]
fn tokens_that_the_consumer_has_are_not_written() {
    let map = map(Kind::Full, 4, 4);
    let plan = plan(&map, 5..7, start(&[0, 1]), start(&[3, 2])).unwrap();
    // The third and half of the fourth of four tokens: two of twenty bytes each.
    assert_eq!(copies(&plan), [(BLOCK + 20, 2 * BLOCK + 20, 40)]);
}

#[test]
fn a_missing_block_is_named_with_its_group() {
    let map = map(Kind::Full, 4, 4);
    let error = plan(&map, 0..12, start(&[5, 9]), start(&[1, 3, 8])).unwrap_err();
    assert_eq!(
        error,
        PlanError::Missing {
            end: End::Producer,
            group: "group0".into(),
            block: 2,
            token: 8,
            first: 0,
            after: 2,
        }
    );
    assert_eq!(
        error.to_string(),
        "group group0: block 2, which has token 8, is not among the producer's blocks 0 to 2"
    );
    let late = Blocks { first: 1, ids: &[9, 2] };
    assert!(matches!(
        plan(&map, 0..12, late, start(&[1, 3, 8])),
        Err(PlanError::Missing { end: End::Producer, block: 0, .. })
    ));
    for (to, missing) in [
        (start(&[1, 3]), 2),
        (Blocks { first: 1, ids: &[3, 8] }, 0),
        (start(&[]), 0),
        (Blocks { first: 9, ids: &[3, 8] }, 0),
    ] {
        match plan(&map, 0..12, start(&[5, 9, 2]), to) {
            Err(PlanError::Missing { end: End::Consumer, block, .. }) => assert_eq!(block, missing),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_hole_in_full_attention_is_named() {
    let map = map(Kind::Full, 4, 4);
    let error = plan(&map, 0..8, start(&[5, NO_BLOCK]), start(&[1, 3])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "group group0: block 1, which has token 4, is a hole at the producer"
    );
    assert!(matches!(
        plan(&map, 0..8, start(&[5, 6]), start(&[NO_BLOCK, 3])),
        Err(PlanError::Hole { end: End::Consumer, block: 0, .. })
    ));
    // Not asked for, so not missed.
    assert!(plan(&map, 4..8, start(&[NO_BLOCK, 6]), start(&[NO_BLOCK, 3])).is_ok());
}

#[test]
fn ids_that_no_block_has_and_ids_given_twice_are_refused() {
    let map = map(Kind::Full, 4, 4);
    for (from, to, end) in [(32, 1, End::Producer), (1, 32, End::Consumer)] {
        let error = plan(&map, 0..4, start(&[from]), start(&[to])).unwrap_err();
        let (group, block, id, blocks) = ("group0".to_owned(), 0, 32, 32);
        assert_eq!(error, PlanError::Id { end, group, block, id, blocks });
    }
    let error = plan(&map, 0..8, start(&[1, 1]), start(&[4, 4])).unwrap_err();
    assert_eq!(error.to_string(), "group group0: the consumer gives block id 4 twice");
}

#[test]
fn tables_must_be_as_many_as_groups_and_tokens_a_range() {
    let map = map(Kind::Full, 4, 4);
    let table = [start(&[1])];
    let error = map.plan(&Ask::whole(0..4, &[], &table)).unwrap_err();
    assert_eq!(error, PlanError::Groups { end: End::Producer, given: 0, groups: 1 });
    let error = map.plan(&Ask::whole(0..4, &table, &[table[0]; 2])).unwrap_err();
    assert_eq!(error, PlanError::Groups { end: End::Consumer, given: 2, groups: 1 });
    let reversed = Range { start: 4, end: 3 };
    assert!(matches!(
        map.plan(&Ask::whole(reversed, &table, &table)),
        Err(PlanError::Tokens { .. })
    ));
    assert!(matches!(
        map.plan(&Ask::whole(0..u64::MAX, &table, &table)),
        Err(PlanError::Tokens { .. })
    ));
}

#[test]
fn a_request_in_too_many_pieces_is_refused_before_it_takes_long() {
    let class = Class {
        kind: Kind::Window { tokens: u32::MAX },
        planes: vec![PlaneModel::new("kv", 1, 1)],
    };
    let model = Model { classes: vec![class], layers: vec![0] };
    let engine = |context, interleave| {
        let engine = Engine::plain(&model, 1, 1 << 16, Packing::Lbnhc);
        Engine { blocks: 400, ..engine }.with_context(context, interleave).layouts(&model).remove(0)
    };
    let map = between(&engine(2, 1), &engine(1, 0));
    let ids: Vec<u32> = (0..400).collect();
    let error = plan(&map, 0..1 << 30, start(&ids), start(&ids)).unwrap_err();
    assert_eq!(error, PlanError::TooMany { limit: 1 << 24 });
}

#[test]
fn copies_beyond_all_numbers_are_counted_as_the_largest() {
    let class = Class { kind: Kind::Full, planes: vec![PlaneModel::new("kv", 1, 1)] };
    let model = Model { classes: vec![class], layers: vec![0; 2048] };
    let engine = Engine::plain(&model, 1, 1 << 22, Packing::Lbnhc);
    let plain = Engine { blocks: 1, ..engine }.layouts(&model).remove(0);
    let mut layers = plain.layers().to_vec();
    for layer in &mut layers {
        // All layers lie in the same bytes, of which every other one is used.
        let plane = &mut layer.planes[0];
        plane.heads = Heads::all(u32::MAX);
        (plane.view.base, plane.view.head_stride, plane.view.row_stride) = (0, 2, 1 << 34);
    }
    let region = Region { len: u64::MAX, ..plain.regions()[0] };
    let layout = Layout::new(vec![region], plain.groups().to_vec(), layers).unwrap();
    let map = between(&layout, &layout);
    let plan = plan(&map, 0..1 << 22, start(&[0]), start(&[0])).unwrap();
    assert_eq!((plan.len(), plan.bytes()), (u64::MAX, u64::MAX));
    let first: Vec<_> = plan.copies().take(3).map(|op| (op.to.offset, op.len)).collect();
    assert_eq!(first, [(0, 1), (1 << 34, 1), (2 << 34, 1)]);
}

#[test]
fn blocks_before_the_window_may_be_holes_at_either_end() {
    // The window of 6 looks back from token 16 to 11: blocks 0 and 1 do not matter.
    let map = map(Kind::Window { tokens: 6 }, 4, 4);
    let both =
        plan(&map, 0..16, start(&[NO_BLOCK, NO_BLOCK, 2, 3]), start(&[NO_BLOCK, NO_BLOCK, 6, 7]))
            .unwrap();
    assert_eq!(copies(&both), [(2 * BLOCK, 6 * BLOCK, 2 * BLOCK)]);
    assert_eq!(both.unfilled(), []);
    // What is there at both ends is sent, whatever the window.
    let more = plan(&map, 0..16, start(&[9, NO_BLOCK, 2, 3]), start(&[4, 5, 6, 7])).unwrap();
    assert_eq!(copies(&more), [(9 * BLOCK, 4 * BLOCK, BLOCK), (2 * BLOCK, 6 * BLOCK, 2 * BLOCK)]);
    assert_eq!(more.unfilled(), [Unfilled { group: 0, block: 1 }]);
    // Lists of the window's blocks only.
    let last = |ids| Blocks { first: 2, ids };
    let short = plan(&map, 0..16, last(&[2, 3]), last(&[6, 7])).unwrap();
    assert_eq!(copies(&short), copies(&both));
}

#[test]
fn a_window_counts_the_token_being_computed() {
    let needs_block_2 = |kind| {
        let map = map(kind, 4, 4);
        let holes = [NO_BLOCK, NO_BLOCK, NO_BLOCK, 3];
        plan(&map, 0..16, start(&holes), start(&[4, 5, 6, 7])).is_err()
    };
    // Token 16 and the 4 before it, from token 12 on.
    assert!(!needs_block_2(Kind::Window { tokens: 5 }));
    assert!(needs_block_2(Kind::Window { tokens: 6 }));
    // Token 16 is in the chunk from 12 on, or from 11.
    assert!(!needs_block_2(Kind::Chunk { tokens: 12 }));
    assert!(needs_block_2(Kind::Chunk { tokens: 11 }));
}

#[test]
fn a_window_is_one_of_the_request_not_of_a_ranks_share_of_it() {
    let class =
        Class { kind: Kind::Window { tokens: 6 }, planes: vec![PlaneModel::new("kv", 2, 10)] };
    let model = Model { classes: vec![class], layers: vec![0] };
    let engine = Engine::plain(&model, 1, 4, Packing::Lbnhc).with_context(2, 0);
    let rank = engine.layouts(&model).remove(0);
    let map = between(&rank, &rank);
    // This rank has the blocks of tokens 0 and 8; the window goes back to token 9 of 14.
    let hole = start(&[1, NO_BLOCK]);
    let error = plan(&map, 0..14, hole, start(&[4, 5])).unwrap_err();
    assert!(matches!(error, PlanError::Hole { end: End::Producer, block: 1, .. }), "{error}");
    let hole = start(&[NO_BLOCK, 1]);
    assert_eq!(plan(&map, 0..14, hole, start(&[4, 5])).unwrap().bytes(), BLOCK);
}

#[test]
fn a_hole_within_the_window_is_a_mismatch_if_the_consumer_wants_it() {
    let map = map(Kind::Window { tokens: 6 }, 4, 4);
    let all = [4, 5, 6, 7];
    let error = plan(&map, 0..16, start(&[0, 1, NO_BLOCK, 3]), start(&all)).unwrap_err();
    assert!(matches!(error, PlanError::Hole { end: End::Producer, block: 2, token: 8, .. }));
    let not_wanted = plan(&map, 0..16, start(&[0, 1, NO_BLOCK, 3]), start(&[4, 5, NO_BLOCK, 7]));
    assert_eq!(not_wanted.unwrap().bytes(), 3 * BLOCK);
    let error = plan(&map, 0..16, start(&[0, 1, 2]), start(&all)).unwrap_err();
    assert!(matches!(error, PlanError::Missing { end: End::Producer, block: 3, .. }));
}

#[test]
fn a_large_block_of_the_consumer_may_begin_before_the_window() {
    // The consumer's block of 16 has 10 tokens before the window, of which the producer keeps none.
    let map = map(Kind::Window { tokens: 6 }, 4, 16);
    let holes = [NO_BLOCK, NO_BLOCK, 2, 3];
    let plan = plan(&map, 0..16, start(&holes), start(&[1])).unwrap();
    assert_eq!(copies(&plan), [(2 * BLOCK, 6 * BLOCK, 2 * BLOCK)]);
    assert_eq!(plan.unfilled(), [Unfilled { group: 0, block: 0 }]);
}

#[test]
fn of_states_the_last_that_is_there_is_sent() {
    // Block sizes do not matter to states.
    let map = map(Kind::State, 4, 3);
    let holes = [NO_BLOCK, 4, NO_BLOCK, 6, NO_BLOCK];
    let plan_of = |from, to| plan(&map, 0..99, start(from), start(to));
    assert_eq!(copies(&plan_of(&holes, &[NO_BLOCK, 2]).unwrap()), [(6 * BLOCK, 2 * BLOCK, BLOCK)]);
    // Not wanted.
    assert_eq!(plan_of(&holes, &[NO_BLOCK]).unwrap().bytes(), 0);
    assert_eq!(plan_of(&holes, &[]).unwrap().bytes(), 0);
    // Wanted and not there.
    let error = plan_of(&[NO_BLOCK, NO_BLOCK], &[1]).unwrap_err();
    assert_eq!(error, PlanError::NoState { group: "group0".into(), listed: 2 });
    // A consumer that has all tokens has the state.
    assert!(plan(&map, 99..99, start(&[1]), start(&[1])).unwrap().is_empty());
}

#[test]
fn a_part_sends_what_it_completes_and_the_last_one_states() {
    let tokens = map(Kind::Full, 4, 16);
    let (from, to) = ([start(&[0, 1, 2, 3, 4])], [start(&[9, 7])]);
    let mut ask = Ask::whole(0..19, &from, &to);
    let mut sent = |part| {
        ask.part = part;
        copies(&tokens.plan(&ask).unwrap())
    };
    let block = 4 * BLOCK;
    assert_eq!(sent(0..6), [(0, 9 * block, BLOCK)]);
    // The second part completes the block that the first began.
    assert_eq!(sent(6..12), [(BLOCK, 9 * block + BLOCK, 2 * BLOCK)]);
    assert_eq!(sent(12..15), []);
    assert_eq!(
        sent(15..19),
        [(3 * BLOCK, 9 * block + 3 * BLOCK, BLOCK), (4 * BLOCK, 7 * block, 60)]
    );

    let states = map(Kind::State, 4, 4);
    let (from, to) = ([start(&[3])], [start(&[5])]);
    let mut ask = Ask::whole(0..19, &from, &to);
    ask.part = 0..18;
    assert!(states.plan(&ask).unwrap().is_empty());
    ask.part = 18..19;
    assert_eq!(copies(&states.plan(&ask).unwrap()), [(3 * BLOCK, 5 * BLOCK, BLOCK)]);
}

#[test]
fn a_producer_still_computing_need_not_have_the_blocks_of_later_parts() {
    let map = map(Kind::Full, 4, 4);
    let (from, to) = ([start(&[0, 1])], [start(&[5, 6, 7])]);
    let mut ask = Ask::whole(0..12, &from, &to);
    ask.part = 0..9;
    assert_eq!(map.plan(&ask).unwrap().bytes(), 2 * BLOCK);
    ask.part = 9..12;
    assert!(matches!(map.plan(&ask), Err(PlanError::Missing { end: End::Producer, block: 2, .. })));
}

#[test]
fn all_blocks_of_the_consumer_are_looked_at_once_with_the_part_that_begins() {
    let map = map(Kind::Full, 4, 4);
    let from = [start(&[0, 1, 2, 3])];
    let ends_with = |last: &[u32], part| {
        let ids = [&[5, 6, 7], last].concat();
        let to = [start(&ids)];
        let ask = Ask { part, ..Ask::whole(0..16, &from, &to) };
        map.plan(&ask).map(|plan| plan.bytes())
    };
    for begins in [0..4, 0..8, 0..16] {
        let bytes = begins.end / 4 * BLOCK;
        assert_eq!(ends_with(&[8], begins.clone()), Ok(bytes));
        let twice = ends_with(&[5], begins.clone());
        assert_eq!(twice, Err(PlanError::Twice { group: "group0".into(), id: 5 }));
        let missing = ends_with(&[], begins.clone());
        assert!(matches!(missing, Err(PlanError::Missing { end: End::Consumer, block: 3, .. })));
        let hole = ends_with(&[NO_BLOCK], begins.clone());
        assert!(matches!(hole, Err(PlanError::Hole { end: End::Consumer, block: 3, .. })));
        let unknown = ends_with(&[1 << 20], begins);
        assert!(matches!(unknown, Err(PlanError::Id { end: End::Consumer, block: 3, .. })));
    }
    // What follows takes the time of its own blocks, and finds what is wrong with those.
    assert_eq!(ends_with(&[], 4..12), Ok(2 * BLOCK));
    assert_eq!(ends_with(&[1 << 20], 4..12), Ok(2 * BLOCK));
    assert!(matches!(ends_with(&[], 4..16), Err(PlanError::Missing { block: 3, .. })));
    assert!(matches!(ends_with(&[1 << 20], 12..16), Err(PlanError::Id { block: 3, .. })));
}

#[test]
fn a_share_of_heads_that_a_rank_does_not_hold_is_refused() {
    let model = Model::plain(1, 4, 10);
    let layouts = |tp| Engine::plain(&model, tp, 4, Packing::Lbnhc).layouts(&model);
    let (whole, halves) = (layouts(1).remove(0), layouts(2));
    let share = Share::overlap(&whole, &whole).unwrap();
    let refused = Map::new(&whole, &halves[1], &share).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "layer model.layers.0.attn (kv): the share has heads 0 to 4, the rank 2 to 4"
    );
    let share = Share::overlap(&whole, &halves[1]).unwrap();
    let items: Vec<_> = share.items().collect();
    assert_eq!(items, [("model.layers.0.attn", "kv", 2..4)]);
    assert!(Map::new(&whole, &halves[1], &share).is_ok());
}

#[test]
fn a_cursor_goes_on_where_it_was() {
    let map = map(Kind::Full, 4, 4);
    let plan = plan(&map, 0..12, start(&[5, 9, 2]), start(&[1, 3, 8])).unwrap();
    let all: Vec<CopyOp> = plan.copies().collect();
    let mut cursor = kvferry_proto::plan::Cursor::default();
    assert_eq!(plan.next(&mut cursor), Some(all[0]));
    let mut again = cursor.clone();
    for cursor in [&mut cursor, &mut again] {
        assert_eq!(plan.next(cursor), Some(all[1]));
        assert_eq!(plan.next(cursor), Some(all[2]));
        assert_eq!(plan.next(cursor), None);
        assert_eq!(plan.next(cursor), None);
    }
}

#[test]
fn blocks_in_too_many_pieces_are_refused_before_they_take_memory() {
    let model = Model::plain(1, 1, 1);
    let engine = |context, interleave| {
        let engine = Engine::plain(&model, 1, 1 << 30, Packing::Lbnhc);
        Engine { blocks: 1, ..engine }.with_context(context, interleave).layouts(&model).remove(0)
    };
    let (producer, consumer) = (engine(2, 1), engine(1, 0));
    let share = Share::overlap(&producer, &consumer).unwrap();
    assert_eq!(
        Map::new(&producer, &consumer, &share).unwrap_err().to_string(),
        "layer model.layers.0.attn (kv): 2147483648 pieces of blocks are beyond the limit of 4194304"
    );
}
