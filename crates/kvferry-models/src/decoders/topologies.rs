//! Topologies, and what two of them allow: a routing.
//!
//! An input of [`topologies`] is an encoded topology, or those of a producer and a consumer, apart as
//! `super::parts` says. One of [`routings`] is a script of two engines.

use super::layouts::map;
use super::{least_common_multiple, parts};
use kvferry_proto::RegionId;
use kvferry_proto::fuzzing::{Held, Script, held};
use kvferry_proto::layout::{
    ContextShard, Difference, Encoding, GROUPS_MAX, Group, Heads, Kind, LAYOUT_MAX, Layer,
    LayerSpec, Layout, Plane, PlaneSpec, Region, RowDensity, View,
};
use kvferry_proto::plan::{RANKS_MAX, Routing, Topology};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// The most layers, over all ranks, of which each is looked at.
const HELD_MAX: usize = 1024;

/// The most heads of planes of layers that are looked at, over all pairs of ranks.
const ITEMS_MAX: usize = 1 << 14;

/// The most tokens of which it is looked up one by one who holds them.
const TOKENS_MAX: u64 = 1 << 12;

/// Topologies of one or both ends.
pub fn topologies(bytes: &[u8]) {
    let [producers, consumers, _] = parts(bytes);
    let Some(producers) = Engine::decode(producers) else { return };
    if consumers.is_empty() {
        return routed(&producers, &producers);
    }
    if let Some(consumers) = Engine::decode(consumers) {
        routed(&producers, &consumers);
    }
}

/// Engines with the same model and arbitrary ranks. The input is a script, because most bytes are no topology.
pub fn routings(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let model = Model::read(&mut script);
    let producers = Engine::read(&model, &mut script);
    let consumers = Engine::read(&model, &mut script);
    if let (Some(producers), Some(consumers)) = (producers, consumers) {
        routed(&producers, &consumers);
    }
}

/// A topology, what it says, and ranks that it could be of.
struct Engine {
    topology: Topology,
    /// Shares of each rank; `None` if there are too many to examine.
    ranks: Option<Vec<Vec<Held>>>,
    /// Layouts of the ranks; `None` if they would be too large.
    layouts: Option<Vec<Layout>>,
}

impl Engine {
    /// A topology, which ranks with sound layouts have, and which survives being sent on.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let topology = match Topology::decode(bytes) {
            Ok(topology) => topology,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return None;
            }
        };
        assert!(topology.ranks() <= RANKS_MAX);
        let sent = topology.encode();
        if sent.len() <= LAYOUT_MAX {
            let again = Topology::decode(&sent);
            assert_eq!(again.as_ref(), Ok(&topology), "it survives being sent on");
        }
        let mut ranks: Vec<Vec<Held>> = (0..topology.ranks()).map(|_| Vec::new()).collect();
        let few = held(&topology).take(HELD_MAX + 1).count() <= HELD_MAX;
        held(&topology).take(HELD_MAX).for_each(|held| ranks[held.rank].push(held));
        let layouts: Option<Vec<_>> = ranks.iter().map(|held| layout(held)).collect();
        let layouts = layouts.filter(|_| few);
        if let Some(layouts) = &layouts {
            let same = Topology::new(layouts).expect("they are one engine");
            assert_eq!(same.fingerprint(), topology.fingerprint());
            let routing = |topology| Routing::new(topology, topology);
            assert_eq!(routing(&same), routing(&topology), "how it was written does not matter");
        }
        Some(Self { topology, ranks: few.then_some(ranks), layouts })
    }

    /// Some ranks, in some of which is all that a script wants to be there; `None` if not all of the
    /// model is.
    fn read(model: &Model, script: &mut Script<'_>) -> Option<Self> {
        let (block_tokens, size) = (script.pick(&[8, 16, 48]), script.pick(&[1, 1, 2, 3]));
        let interleave = match size {
            1 => block_tokens,
            _ => script.pick(&[2, 4, block_tokens]),
        };
        let whole = script.flip();
        let count = 1 + script.below(6);
        let mut ranks: Vec<Vec<Held>> = Vec::new();
        for rank in 0..count {
            let context =
                ContextShard { rank: script.below(size as usize) as u32, size, interleave };
            ranks.push(model.some(rank, block_tokens, context, script));
        }
        for rank in 0..if whole { size } else { 0 } {
            let context = ContextShard { rank, size, interleave };
            ranks.push(model.all(count + rank as usize, block_tokens, context));
        }
        let layouts: Vec<_> = ranks.iter().filter_map(|held| layout(held)).collect();
        let topology = Topology::new(&layouts).ok()?;
        let engine = Self::decode(&topology.encode()).expect("others see the same");
        assert_eq!(engine.topology, topology);
        Some(engine)
    }
}

/// Properties that engines must have in common.
struct Model(Vec<LayerSpec>);

impl Model {
    fn read(script: &mut Script<'_>) -> Self {
        let layers = 1 + script.below(6);
        Self((0..layers).map(|number| Self::layer(number, script)).collect())
    }

    fn layer(number: usize, script: &mut Script<'_>) -> LayerSpec {
        let kind = script.pick(&[Kind::Full, Kind::Full, Kind::State]);
        let density = match kind {
            Kind::State => RowDensity { rows: 2, tokens: 0 },
            _ => RowDensity { rows: 1, tokens: script.pick(&[1, 2]) },
        };
        let planes = ["k", "v"][..1 + script.below(2)].iter().map(|role| PlaneSpec {
            role: (*role).to_owned(),
            encoding: Encoding::new("bfloat16", 16),
            heads: script.pick(&[1, 2, 3, 8]),
            content: 4,
            density,
        });
        LayerSpec { name: format!("l.{number}"), kind, planes: planes.collect() }
    }

    /// Some heads of some layers.
    fn some(
        &self,
        rank: usize,
        block_tokens: u32,
        context: ContextShard,
        script: &mut Script<'_>,
    ) -> Vec<Held> {
        let all = self.all(rank, block_tokens, context).into_iter();
        let mut some: Vec<Held> = all.filter(|_| !script.flip()).collect();
        for heads in some.iter_mut().flat_map(|held| &mut held.heads) {
            let start = script.below(heads.end as usize) as u32;
            *heads = start..start + 1 + script.below((heads.end - start) as usize) as u32;
        }
        some
    }

    fn all(&self, rank: usize, block_tokens: u32, context: ContextShard) -> Vec<Held> {
        let held = |layer: &LayerSpec| Held {
            rank,
            layer: layer.clone(),
            block_tokens,
            heads: layer.planes.iter().map(|plane| 0..plane.heads).collect(),
            context: match layer.kind {
                Kind::State => ContextShard { interleave: block_tokens, ..ContextShard::WHOLE },
                _ => context,
            },
        };
        self.0.iter().map(held).collect()
    }
}

/// A layout for what a rank holds, with one block; `None` if it would be too large.
fn layout(held: &[Held]) -> Option<Layout> {
    let mut groups: Vec<Group> = Vec::new();
    let mut layers = Vec::new();
    for Held { layer, block_tokens, heads, context, .. } in held {
        let (kind, block_tokens) = (layer.kind, *block_tokens);
        let name = groups.len().to_string();
        let group = Group { name, kind, block_tokens, blocks: 1, context: *context };
        let alike = |other: &Group| Group { name: group.name.clone(), ..other.clone() } == group;
        let at = groups.iter().position(alike).unwrap_or(groups.len());
        if at == groups.len() {
            groups.push(group);
        }
        let planes = layer.planes.iter().zip(heads).map(|(plane, heads)| {
            let per_block = block_tokens.checked_div(plane.density.tokens).unwrap_or(1);
            let rows = plane.density.rows.checked_mul(per_block)?;
            let head_stride = u64::from(rows) * u64::from(plane.content);
            head_stride.checked_mul(heads.len() as u64)?;
            Some(Plane {
                role: plane.role.clone(),
                encoding: plane.encoding.clone(),
                heads: Heads {
                    total: plane.heads,
                    start: heads.start,
                    count: heads.end - heads.start,
                },
                rows,
                content: plane.content,
                view: View {
                    region: 0,
                    base: 0,
                    block_stride: 0,
                    kernel_blocks: 1,
                    kernel_stride: 0,
                    head_stride,
                    row_stride: plane.content.into(),
                },
            })
        });
        let planes = planes.collect::<Option<_>>()?;
        layers.push(Layer { name: layer.name.clone(), group: at, planes });
    }
    let regions = vec![Region { id: RegionId(1), len: u64::MAX }];
    let few = groups.len() <= GROUPS_MAX;
    few.then(|| Layout::new(regions, groups, layers).expect("what a rank may hold"))
}

/// A routing exists if the models are the same; it then reads everything once.
fn routed(producers: &Engine, consumers: &Engine) {
    let routing = Routing::new(&producers.topology, &consumers.topology);
    let same = producers.topology.fingerprint() == consumers.topology.fingerprint();
    let routing = match routing {
        Ok(routing) => routing,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            let why = &error.difference;
            let bridged = matches!(
                why,
                Difference::BlockTokens(..) | Difference::TooMany { .. } | Difference::Ranks(..)
            );
            assert_eq!(bridged, same, "{error}");
            return;
        }
    };
    assert!(same, "the models are not the same");
    mutual(&routing, producers.topology.ranks(), consumers.topology.ranks());
    if let (Some(from), Some(to)) = (&producers.ranks, &consumers.ranks) {
        everything_once(&routing, from, to);
    }
    if let (Some(from), Some(to)) = (&producers.layouts, &consumers.layouts) {
        let mut items = 0;
        for (producer, from) in from.iter().enumerate() {
            for &consumer in routing.readers_of(producer) {
                let share = routing.share(producer, consumer);
                items += share.items().take(ITEMS_MAX).count();
                if items < ITEMS_MAX {
                    map(from, &to[consumer], &share);
                }
            }
        }
    }
}

/// Readers and sources are the same pairs, in order, and every producer has one.
fn mutual(routing: &Routing, producers: usize, consumers: usize) {
    let mut pairs = Vec::new();
    for producer in 0..producers {
        let readers = routing.readers_of(producer);
        assert!(!readers.is_empty() && readers.is_sorted_by(|a, b| a < b));
        pairs.extend(readers.iter().map(|&consumer| (consumer, producer)));
    }
    pairs.sort_unstable();
    let sources = (0..consumers).flat_map(|consumer| {
        routing.sources_of(consumer).iter().map(move |&producer| (consumer, producer))
    });
    assert!(sources.eq(pairs), "readers and sources are the same pairs");
}

/// Checks that each consumer reads each head that it holds from one producer for each share of the tokens that both
/// have, from producers that hold it, and nothing else.
fn everything_once(routing: &Routing, from: &[Vec<Held>], to: &[Vec<Held>]) {
    let dealt: HashMap<&str, ContextShard> =
        from.iter().flatten().map(|held| (held.layer.name.as_str(), held.context)).collect();
    let mut items = 0;
    for (consumer, wanted) in to.iter().enumerate() {
        // By layer, role, and the context-parallel rank that it comes from.
        let mut read: BTreeMap<(String, String, u32), Vec<Range<u32>>> = BTreeMap::new();
        for &producer in routing.sources_of(consumer) {
            for (layer, role, heads) in routing.share(producer, consumer).items() {
                let held = from[producer].iter().find(|held| held.layer.name == layer);
                let held = held.expect("the producer has the layer");
                let plane = held.layer.planes.iter().position(|plane| plane.role == role);
                let its = &held.heads[plane.expect("a plane of the layer")];
                assert!(its.start <= heads.start && heads.end <= its.end && !heads.is_empty());
                let key = (layer.to_owned(), role.to_owned(), held.context.rank);
                read.entry(key).or_default().push(heads);
                items += 1;
                if items > ITEMS_MAX {
                    return;
                }
            }
        }
        for held in wanted {
            let theirs = dealt[held.layer.name.as_str()];
            for (plane, heads) in held.layer.planes.iter().zip(&held.heads) {
                for rank in 0..theirs.size {
                    let key = (held.layer.name.clone(), plane.role.clone(), rank);
                    let mut cells = read.remove(&key).unwrap_or_default();
                    cells.sort_unstable_by_key(|cell| cell.start);
                    let end = cells
                        .iter()
                        .try_fold(heads.start, |at, cell| (cell.start == at).then_some(cell.end));
                    let all = end == Some(heads.end);
                    let met = meet(ContextShard { rank, ..theirs }, held.context);
                    let sound = if met.unwrap_or(all) { all } else { cells.is_empty() };
                    assert!(sound, "{key:?} of {consumer}: {cells:?} of {heads:?}");
                }
            }
        }
        assert!(read.is_empty(), "{consumer} reads what it does not hold: {read:?}");
    }
}

/// Whether some token is in both, unless that takes long to find out.
fn meet(a: ContextShard, b: ContextShard) -> Option<bool> {
    let period = |it: ContextShard| u64::from(it.interleave) * u64::from(it.size);
    let holds = |it: ContextShard, token: u64| {
        token / u64::from(it.interleave) % u64::from(it.size) == u64::from(it.rank)
    };
    let short = period(a).max(period(b)) <= TOKENS_MAX;
    let recur = short.then(|| least_common_multiple(period(a), period(b)))?;
    let mut tokens = 0..Some(recur).filter(|&recur| recur <= TOKENS_MAX)?;
    Some(tokens.any(|token| holds(a, token) && holds(b, token)))
}
