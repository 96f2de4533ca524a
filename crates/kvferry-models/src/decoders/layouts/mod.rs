//! Layouts, and what two of them allow: a map, and plans for a request.
//!
//! An input of [`layouts`] is an encoded layout, or those of a producer and a consumer, and then a
//! script of what is asked for, apart as `super::parts` says. One of [`maps`] is a script alone.

mod changes;
mod request;
mod rows;
mod seeds;

pub use seeds::{engine_seeds, seeds};

use super::{least_common_multiple, parts};
use changes::changed;
use kvferry_proto::RegionId;
use kvferry_proto::fuzzing::Script;
use kvferry_proto::layout::{Difference, LAYOUT_MAX, Layout, compatible};
use kvferry_proto::plan::{
    Ask, CopyOp, Cursor, Map, Plan, PlanError, Routing, Share, Spot, Topology, Unfilled,
};
use request::{Listed, Request};
use rows::{Common, Moves};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// The most copies of a plan that are looked at.
const COPIES_MAX: usize = 4096;

/// The most rows that are looked up one by one.
const ROWS_MAX: u128 = 4096;

/// Layouts of one or both ends, and a request.
pub fn layouts(bytes: &[u8]) {
    let [producer, consumer, script] = parts(bytes);
    let Some(producer) = one(producer) else { return };
    let consumer = if consumer.is_empty() { Some(producer.clone()) } else { one(consumer) };
    let Some(consumer) = consumer else { return };
    pair(&producer, &consumer, &mut Script::new(script));
}

/// Layouts as there are, changes to them, and a request: most bytes are no layout, but all are a
/// script.
pub fn maps(bytes: &[u8]) {
    static PAIRS: LazyLock<Vec<[Layout; 2]>> = LazyLock::new(seeds::pairs);
    let mut script = Script::new(bytes);
    let [producer, consumer] = changed(&PAIRS[script.below(PAIRS.len())], &mut script);
    for layout in [&producer, &consumer] {
        assert_eq!(Layout::decode(&layout.encode()).as_ref(), Ok(layout), "others see the same");
    }
    pair(&producer, &consumer, &mut script);
}

/// Checks routing and plans between two layouts.
fn pair(producer: &Layout, consumer: &Layout, script: &mut Script<'_>) {
    routed(producer, consumer);
    let request = Request::read(producer, consumer, script);
    match Share::overlap(producer, consumer) {
        Ok(share) => {
            let Some(map) = map(producer, consumer, &share) else { return };
            Pair { producer, consumer, map: Arc::new(map) }.plan(&request);
        }
        Err(error) => assert_eq!(compatible(producer, consumer), Err(error)),
    }
}

/// A layout, which is sound and survives being sent on.
fn one(bytes: &[u8]) -> Option<Layout> {
    let layout = match Layout::decode(bytes) {
        Ok(layout) => layout,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    let (regions, groups, layers) = (layout.regions(), layout.groups(), layout.layers());
    let same = Layout::new(regions.to_vec(), groups.to_vec(), layers.to_vec());
    assert_eq!(same.as_ref(), Ok(&layout), "it is sound");
    let sent = layout.encode();
    if sent.len() <= LAYOUT_MAX {
        assert_eq!(Layout::decode(&sent).as_ref(), Ok(&layout), "it survives being sent on");
    }
    Some(layout)
}

/// Engines of these ranks: what they route to each other, there are maps for.
fn routed(producer: &Layout, consumer: &Layout) {
    let topology = |ranks: &[&Layout]| {
        let topology = Topology::new(ranks.iter().copied()).ok()?;
        let sent = topology.encode();
        if sent.len() <= LAYOUT_MAX {
            assert_eq!(Topology::decode(&sent).as_ref(), Ok(&topology), "others see the same");
        }
        Some(topology)
    };
    let both = [producer, consumer];
    for (producers, consumers) in [(&both[..1], &both[1..]), (&both, &both)] {
        let (Some(ours), Some(theirs)) = (topology(producers), topology(consumers)) else {
            continue;
        };
        let Ok(routing) = Routing::new(&ours, &theirs) else { continue };
        for (at, to) in consumers.iter().enumerate() {
            for &source in routing.sources_of(at) {
                map(producers[source], to, &routing.share(source, at));
            }
        }
    }
}

/// The map for a share of what both hold, which there is unless it would be too large.
pub(super) fn map(producer: &Layout, consumer: &Layout, share: &Share) -> Option<Map> {
    match Map::new(producer, consumer, share) {
        Ok(map) => {
            assert_eq!(map.is_empty(), share.is_empty());
            Some(map)
        }
        Err(error) => {
            assert!(matches!(error.difference, Difference::TooMany { .. }), "{error}");
            None
        }
    }
}

/// Two ranks and the map between them.
struct Pair<'a> {
    producer: &'a Layout,
    consumer: &'a Layout,
    map: Arc<Map>,
}

impl Pair<'_> {
    /// Plans for the request as a whole, in two parts, and in two runs of layers.
    fn plan(&self, request: &Request) {
        let [producer, consumer] = [&request.producer, &request.consumer]
            .map(|tables| tables.iter().map(Listed::blocks).collect::<Vec<_>>());
        let Range { start, end } = request.tokens;
        let [whole, first, second] =
            [start..end, start..request.cut, request.cut..end].map(|part| {
                let tokens = start..end;
                self.map.plan(&Ask { tokens, part, producer: &producer, consumer: &consumer })
            });
        let whole = match whole {
            Ok(whole) => whole,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                // Pieces are counted plan by plan; what is missing is missing in a part, too.
                let is_too_much = matches!(error, PlanError::TooMany { .. });
                let found = is_too_much || first.is_err() || second.is_err();
                assert!(found, "what the whole lacks, a part does");
                return;
            }
        };
        let parts = [first, second].map(|part| part.expect("a part needs no more than the whole"));
        let cut = request.layer_cut.min(self.map.layers());
        let layers = [0..cut, cut..self.map.layers()].map(|layers| whole.for_layers(layers));
        let bytes = parts.iter().map(Plan::bytes).fold(0, u64::saturating_add);
        assert_eq!(bytes, whole.bytes(), "parts send everything once");
        let both = |[first, second]: [Plan; 2]| {
            Some(self.check(&first, request)?.and(self.check(&second, request)?))
        };
        let unfilled = whole.unfilled().to_vec();
        let (whole, parts, layers) = (self.check(&whole, request), both(parts), both(layers));
        if let (Some(whole), Some(parts)) = (&whole, &parts) {
            assert_eq!(whole, parts, "parts send what the whole does");
        }
        // Of the last block, layers that lie in a row may send more than each by itself.
        for moved in [whole, layers].into_iter().flatten() {
            self.compare(&moved, &unfilled, request);
        }
    }

    /// A plan by itself. Returns what it moves, unless that is too much to look at.
    fn check(&self, plan: &Plan, request: &Request) -> Option<Moves> {
        let listed: u128 = self.common().map(|plane| plane.listed_bytes(request)).sum();
        assert!(u128::from(plan.bytes()) <= listed, "no more than the blocks listed have");
        for unfilled in plan.unfilled() {
            let group = &self.consumer.groups()[unfilled.group];
            let id = request.consumer[unfilled.group].id(group, unfilled.block);
            assert!(id.is_some(), "{unfilled:?} is not listed");
        }
        let mut copies = Vec::new();
        let count = plan.fill(&mut Cursor::default(), COPIES_MAX, &mut copies);
        let moves = self.moves(&copies);
        let bytes = moves.bytes();
        if count == COPIES_MAX {
            assert!(bytes <= plan.bytes().into());
            return None;
        }
        assert_eq!((plan.len(), plan.bytes().into()), (copies.len() as u64, bytes));
        assert!(plan.copies().eq(copies), "one by one they are the same");
        Some(moves.merged())
    }

    /// Moves of these copies. Asserts that each copy lies in its regions and can't be joined with
    /// the next one.
    fn moves(&self, copies: &[CopyOp]) -> Moves {
        let mut moves = Moves::default();
        for op in copies {
            assert!(op.len > 0);
            for (layout, spot) in [(self.producer, op.from), (self.consumer, op.to)] {
                let end = spot.offset.checked_add(op.len);
                assert!(end.is_some_and(|end| end <= len_of(layout, spot.region)), "{op:?}");
            }
            moves.add((op.from.region, op.from.offset), (op.to.region, op.to.offset), op.len);
        }
        for pair in copies.windows(2) {
            let goes_on =
                |a: Spot, b: Spot| (a.region, a.offset + pair[0].len) == (b.region, b.offset);
            let joins = goes_on(pair[0].from, pair[1].from) && goes_on(pair[0].to, pair[1].to);
            assert!(!joins, "{pair:?} could be one");
        }
        moves
    }

    /// Asserts that a plan moves all that was asked for to its place, and nothing beyond the rows
    /// that may be sent.
    fn compare(&self, moved: &Moves, unfilled: &[Unfilled], request: &Request) {
        let rows: u128 = self.common().map(|plane| plane.listed_rows(request)).sum();
        if rows > ROWS_MAX {
            return;
        }
        let (mut allowed, mut wanted) = (Moves::default(), Moves::default());
        for plane in self.common() {
            let rows = plane.rows(request, self.granule(&plane));
            plane.check(&rows, request, unfilled);
            for row in &rows {
                for (from, to) in plane.places(row) {
                    allowed.add(from, to, plane.content());
                    if row.wanted {
                        wanted.add(from, to, plane.content());
                    }
                }
            }
        }
        assert!(allowed.merged().covers(moved), "each byte goes where it belongs");
        assert!(moved.covers(&wanted.merged()), "all that was asked for is sent");
    }

    /// Planes of which both hold some heads.
    fn common(&self) -> impl Iterator<Item = Common<'_>> {
        self.producer.layers().iter().flat_map(|from| {
            let to = self.consumer.layers().iter().find(|to| to.name == from.name);
            to.into_iter().flat_map(|to| {
                from.planes.iter().filter_map(|plane| {
                    Common::of((self.producer, from), (self.consumer, to), &plane.role)
                })
            })
        })
    }

    /// Tokens that are written together in the groups of that plane, whichever rank has the heads.
    fn granule(&self, of: &Common<'_>) -> u64 {
        let alike = self.common().filter(|plane| plane.groups() == of.groups());
        alike.map(|plane| plane.row_tokens()).fold(1, least_common_multiple)
    }
}

fn len_of(layout: &Layout, id: RegionId) -> u64 {
    let region = layout.regions().iter().find(|region| region.id == id);
    region.expect("a region of the layout").len
}
