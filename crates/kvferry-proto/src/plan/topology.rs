//! The ranks of an engine, and the share that each consumer rank reads from each producer rank.

mod wire;

#[cfg(feature = "fuzzing")]
use crate::layout::ContextShard;
use crate::layout::{
    Context, DecodeError, Difference, Fingerprint, LAYERS_MAX, LayerSpec, Layout, Mismatch,
    MismatchSides, blocks_fit, fingerprint_of, from_bytes, natural_order,
};
use crate::pack;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// The most ranks of an engine.
pub const RANKS_MAX: usize = 1024;

/// The most producer ranks that one consumer rank may read from or release. With 16 pipeline stages and 64
/// tensor-parallel ranks each, a producing engine has so many for each of 8 consumer ranks.
pub const SOURCES_MAX: usize = 128;

/// The most comparisons of ranks that one routing or check may need, which take tens of milliseconds. Most need
/// thousands. Two engines of 64 tensor-parallel ranks in 16 stages need almost as many for 128 layers that have
/// 64 and 32 heads by turns.
const WORK_MAX: u64 = 1 << 21;

/// The most runs of layers that the shares of one routing may be made of; real ones need thousands.
const PARTS_MAX: u64 = 1 << 21;

/// The share of the model that each rank of an engine holds, without positions in memory.
///
/// The other engine needs it of all ranks; it needs a [`Layout`] only of the ranks that it reads
/// from. Every topology is complete: every head of every layer is on some rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "wire::Topology", into = "wire::Topology")]
pub struct Topology {
    /// Layers of the model, in natural order of their names.
    layers: Vec<ModelLayer>,
    ranks: Vec<Holding>,
}

/// A layer of the model, as all ranks have it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ModelLayer {
    spec: LayerSpec,
    block_tokens: u32,
}

/// The share of a rank: slices of the model, ascending and disjoint.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holding(Vec<Slice>);

/// Layers in a row of which a rank holds the same share.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Slice {
    layers: Range<u32>,
    /// Heads of each plane, in the order of the spec.
    heads: Vec<Range<u32>>,
    context: Context,
}

impl Topology {
    /// The topology of an engine whose ranks have these layouts.
    ///
    /// # Errors
    /// Two ranks contradict each other, or a head of a layer is on no rank.
    pub fn new<'a>(layouts: impl IntoIterator<Item = &'a Layout>) -> Result<Self, Mismatch> {
        let layouts: Vec<&Layout> = layouts.into_iter().collect();
        let mut first_held: HashMap<&str, (usize, usize)> = HashMap::new();
        for (rank, layout) in layouts.iter().enumerate() {
            for (at, layer) in layout.layers().iter().enumerate() {
                let &mut (first, its) = first_held.entry(&layer.name).or_insert((rank, at));
                if first != rank {
                    same_layer(layouts[first], its, layout, at, MismatchSides::Ranks(first, rank))?;
                }
            }
        }
        limit("ranks", layouts.len() as u64, RANKS_MAX as u64)?;
        limit("layers", first_held.len() as u64, LAYERS_MAX as u64)?;
        let mut names: Vec<&str> = first_held.keys().copied().collect();
        names.sort_unstable_by(|a, b| natural_order(a, b));
        let layers = names
            .iter()
            .map(|name| {
                let (rank, at) = first_held[name];
                let block_tokens = group_of(layouts[rank], at).block_tokens;
                ModelLayer { spec: layouts[rank].spec(at), block_tokens }
            })
            .collect();
        let places: HashMap<&str, u32> = names.iter().copied().zip(0..).collect();
        let ranks = layouts.iter().map(|layout| Holding::of(layout, &places)).collect();
        let topology = Self { layers, ranks };
        topology.check_whole(&mut Work::default())?;
        Ok(topology)
    }

    /// Number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The names of the model's layers, in natural order.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.layers.iter().map(|layer| layer.spec.name.as_str())
    }

    /// The hash of what must be equal at both ends of a handoff.
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of(self.layers.iter().map(|layer| layer.spec.clone()).collect())
    }

    /// The encoded topology.
    pub fn encode(&self) -> Vec<u8> {
        pack::encode(self)
    }

    /// Decodes a topology. The bytes may come from an unauthenticated peer.
    ///
    /// # Errors
    /// The bytes are longer than [`crate::layout::LAYOUT_MAX`], of a later version, malformed, or
    /// describe a topology that is not sound.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        from_bytes(bytes)
    }

    /// See [`crate::fuzzing::held`].
    #[cfg(feature = "fuzzing")]
    pub(crate) fn held(&self) -> impl Iterator<Item = crate::fuzzing::Held> {
        self.ranks.iter().enumerate().flat_map(move |(rank, holding)| {
            holding.0.iter().flat_map(move |slice| {
                let Context { rank: at, size, run } = slice.context;
                slice.layers.clone().map(move |layer| {
                    let ModelLayer { spec, block_tokens } = self.layers[layer as usize].clone();
                    let context = ContextShard { rank: at, size, interleave: run };
                    let heads = slice.heads.clone();
                    crate::fuzzing::Held { rank, layer: spec, block_tokens, heads, context }
                })
            })
        })
    }

    /// Checks that each head of each layer is on some rank, for each share of the tokens.
    fn check_whole(&self, work: &mut Work) -> Result<(), Mismatch> {
        for layers in segments(&[self]) {
            let known = &self.layers[layers.start as usize];
            work.compare(self.ranks.len())?;
            let holders = self.holders(layers.start);
            for (plane, spec) in known.spec.planes.iter().enumerate() {
                let Some(&(_, Slice { context, .. })) = holders.first() else { continue };
                for rank in 0..context.size {
                    work.compare(holders.len())?;
                    let mut held: Vec<_> = holders
                        .iter()
                        .filter(|(_, slice)| slice.context.rank == rank)
                        .map(|(_, slice)| slice.heads[plane].clone())
                        .collect();
                    held.sort_unstable_by_key(|heads| heads.start);
                    let reached = held.iter().fold(0, |end: u32, heads| {
                        if heads.start <= end { end.max(heads.end) } else { end }
                    });
                    if reached < spec.heads {
                        let (head, total) = (reached, spec.heads);
                        let (context, contexts) = (rank, context.size);
                        let difference = Difference::Unheld { head, total, context, contexts };
                        return Err(mismatch(&known.spec.name, &spec.role, difference));
                    }
                }
            }
        }
        Ok(())
    }

    /// The ranks that hold a layer, and their slice with it.
    fn holders(&self, layer: u32) -> Vec<(usize, &Slice)> {
        let held = self.ranks.iter().enumerate();
        held.filter_map(|(rank, holding)| Some((rank, holding.slice(layer)?))).collect()
    }
}

impl Holding {
    /// The slice that a layer is in.
    fn slice(&self, layer: u32) -> Option<&Slice> {
        let next = self.0.partition_point(|slice| slice.layers.start <= layer);
        self.0[..next].last().filter(|slice| slice.layers.contains(&layer))
    }

    fn of(layout: &Layout, places: &HashMap<&str, u32>) -> Self {
        let mut held: Vec<(u32, usize)> = layout
            .layers()
            .iter()
            .enumerate()
            .map(|(at, layer)| (places[layer.name.as_str()], at))
            .collect();
        held.sort_unstable();
        let mut slices: Vec<Slice> = Vec::new();
        for (place, at) in held {
            let mut planes: Vec<_> = layout.layers()[at].planes.iter().collect();
            planes.sort_unstable_by(|a, b| a.role.cmp(&b.role));
            let heads: Vec<_> = planes.iter().map(|plane| plane.heads.range()).collect();
            let group = group_of(layout, at);
            let context = Context::of(group);
            match slices.last_mut() {
                Some(last)
                    if last.layers.end == place
                        && last.heads == heads
                        && last.context == context =>
                {
                    last.layers.end += 1;
                }
                _ => slices.push(Slice { layers: place..place + 1, heads, context }),
            }
        }
        Self(slices)
    }
}

fn group_of(layout: &Layout, layer: usize) -> &crate::layout::Group {
    &layout.groups()[layout.layers()[layer].group]
}

/// Whether two ranks of one engine mean the same by a layer.
fn same_layer(
    a: &Layout,
    at_a: usize,
    b: &Layout,
    at_b: usize,
    sides: MismatchSides,
) -> Result<(), Mismatch> {
    let spec = a.spec(at_a);
    spec.agree(&b.spec(at_b), sides)?;
    let (x, y) = (group_of(a, at_a), group_of(b, at_b));
    let differ = |difference| Err(Mismatch::new(sides, &spec.name, "", difference));
    if x.block_tokens != y.block_tokens {
        return differ(Difference::BlockTokens(x.block_tokens, y.block_tokens));
    }
    let (x, y) = (Context::of(x), Context::of(y));
    if (x.size, x.run) != (y.size, y.run) {
        return differ(Difference::Context((x.size, x.run), (y.size, y.run)));
    }
    Ok(())
}

/// The layers in runs within which every rank of these engines, who have the same layers, holds the
/// same share and the layers are alike.
fn segments(engines: &[&Topology]) -> Vec<Range<u32>> {
    let layers = &engines[0].layers;
    let mut cuts: Vec<u32> = vec![0, layers.len() as u32];
    for engine in engines {
        for slice in engine.ranks.iter().flat_map(|rank| &rank.0) {
            cuts.extend([slice.layers.start, slice.layers.end]);
        }
        let heads =
            |layer: &ModelLayer| layer.spec.planes.iter().map(|p| p.heads).collect::<Vec<_>>();
        let unlike = |pair: &[ModelLayer]| heads(&pair[0]) != heads(&pair[1]);
        cuts.extend(
            (1..).zip(engine.layers.windows(2)).filter(|(_, p)| unlike(p)).map(|(at, _)| at),
        );
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// Bounds the work and the memory that a topology from a peer can cost.
#[derive(Default)]
struct Work {
    /// Comparisons of ranks, and planes of layers that a rank says it holds.
    comparisons: u64,
    parts: u64,
}

impl Work {
    fn compare(&mut self, ranks: usize) -> Result<(), Mismatch> {
        self.comparisons += ranks as u64;
        limit("comparisons of ranks", self.comparisons, WORK_MAX)
    }

    fn keep(&mut self, parts: usize) -> Result<(), Mismatch> {
        self.parts += parts as u64;
        limit("runs of layers", self.parts, PARTS_MAX)
    }
}

fn limit(what: &'static str, count: u64, limit: u64) -> Result<(), Mismatch> {
    if count <= limit {
        return Ok(());
    }
    Err(mismatch("", "", Difference::TooMany { what, count, limit }))
}

fn mismatch(layer: &str, plane: &str, difference: Difference) -> Mismatch {
    Mismatch::new(MismatchSides::Ends, layer, plane, difference)
}

/// The share that each consumer rank reads from each producer rank.
///
/// A function of the two topologies and nothing else: both ends compute the same. Every head, layer
/// and token that a consumer rank holds comes from exactly one producer rank. Where several hold
/// the same (replicated heads, latents), the consumers are dealt out over them evenly, with as few
/// pairs as that takes: a consumer is served by two replicas only to share its layers between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing {
    names: Arc<[Names]>,
    shares: BTreeMap<(usize, usize), Vec<Part>>,
    readers: Vec<Vec<usize>>,
    sources: Vec<Vec<usize>>,
}

/// Names of a layer and of its planes.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    layer: String,
    roles: Vec<String>,
}

/// A run of layers of which a consumer rank reads the same heads of a plane from a producer rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    layers: (u32, u32),
    plane: u32,
    heads: (u32, u32),
}

/// The share that one consumer rank reads from one producer rank: heads of planes of layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    names: Arc<[Names]>,
    parts: Vec<Part>,
}

impl Routing {
    /// The routing between two engines.
    ///
    /// # Errors
    /// The engines do not have the same model, or block sizes of which neither divides the other; or a consumer rank
    /// would have more than [`SOURCES_MAX`] producer ranks.
    pub fn new(producers: &Topology, consumers: &Topology) -> Result<Self, Mismatch> {
        same_model(producers, consumers)?;
        let mut classes: BTreeMap<Class, Vec<Segment>> = BTreeMap::new();
        let mut work = Work::default();
        for layers in segments(&[producers, consumers]) {
            work.compare(producers.ranks.len() + consumers.ranks.len())?;
            let from = producers.holders(layers.start);
            let to = consumers.holders(layers.start);
            let mut cells: BTreeMap<Class, Vec<Cell>> = BTreeMap::new();
            let planes = producers.layers[layers.start as usize].spec.planes.len();
            for plane in 0..planes {
                for heads in elementary(&from, &to, plane) {
                    for context in 0..from[0].1.context.size {
                        work.compare(from.len() + to.len())?;
                        let Some(class) = Class::of(&from, &to, plane, &heads, context) else {
                            continue;
                        };
                        cells.entry(class).or_default().push((plane as u32, heads.clone()));
                    }
                }
            }
            for (class, cells) in cells {
                classes.entry(class).or_default().push((layers.clone(), cells));
            }
        }
        let mut shares = BTreeMap::new();
        for (class, segments) in &classes {
            class.deal(segments, &mut shares, &mut work)?;
        }
        for parts in shares.values_mut() {
            join(parts, &mut work)?;
        }
        let names = producers.layers.iter().map(|layer| Names {
            layer: layer.spec.name.clone(),
            roles: layer.spec.planes.iter().map(|plane| plane.role.clone()).collect(),
        });
        let routing =
            Self::with_idle(names.collect(), shares, producers.ranks(), consumers.ranks());
        let sources = routing.sources.iter().map(Vec::len).max().unwrap_or(0);
        limit("producer ranks for one consumer rank", sources as u64, SOURCES_MAX as u64)?;
        Ok(routing)
    }

    /// Assigns each producer rank without a reader to a consumer rank, in turn.
    fn with_idle(
        names: Arc<[Names]>,
        shares: BTreeMap<(usize, usize), Vec<Part>>,
        producers: usize,
        consumers: usize,
    ) -> Self {
        let mut readers = vec![Vec::new(); producers];
        for &(producer, consumer) in shares.keys() {
            readers[producer].push(consumer);
        }
        let idle = readers.iter_mut().filter(|readers| readers.is_empty());
        for (readers, consumer) in idle.zip((0..consumers).cycle()) {
            readers.push(consumer);
        }
        let mut sources = vec![Vec::new(); consumers];
        for (producer, readers) in readers.iter().enumerate() {
            for &consumer in readers {
                sources[consumer].push(producer);
            }
        }
        Self { names, shares, readers, sources }
    }

    /// The readers of a producer rank, ascending and at least one: the producer rank keeps its blocks
    /// until all of them have confirmed.
    ///
    /// A producer rank whose bytes are not needed has one reader that reads nothing and releases it.
    ///
    /// # Panics
    /// There is no such rank.
    pub fn readers_of(&self, producer: usize) -> &[usize] {
        &self.readers[producer]
    }

    /// The producer ranks of a consumer rank, ascending: those that it reads from and those that it
    /// only releases.
    ///
    /// # Panics
    /// There is no such rank.
    pub fn sources_of(&self, consumer: usize) -> &[usize] {
        &self.sources[consumer]
    }

    /// The share that a consumer rank reads from a producer rank; empty if it reads nothing.
    pub fn share(&self, producer: usize, consumer: usize) -> Share {
        let parts = self.shares.get(&(producer, consumer)).cloned().unwrap_or_default();
        Share { names: Arc::clone(&self.names), parts }
    }
}

impl Share {
    /// Everything that both ranks hold, for a pair that needs no routing.
    ///
    /// # Errors
    /// As [`crate::layout::compatible`].
    pub fn overlap(producer: &Layout, consumer: &Layout) -> Result<Self, Mismatch> {
        crate::layout::compatible(producer, consumer)?;
        let mut names = Vec::new();
        let mut parts = Vec::new();
        let theirs: HashMap<_, _> =
            consumer.layers().iter().map(|layer| (layer.name.as_str(), layer)).collect();
        for layer in producer.layers() {
            let Some(other) = theirs.get(layer.name.as_str()) else { continue };
            let at = names.len() as u32;
            for (number, plane) in layer.planes.iter().enumerate() {
                let other = other.planes.iter().find(|other| other.role == plane.role);
                let (a, b) = (plane.heads.range(), other.expect("compatible").heads.range());
                let heads = (a.start.max(b.start), a.end.min(b.end));
                if heads.0 < heads.1 {
                    parts.push(Part { layers: (at, at + 1), plane: number as u32, heads });
                }
            }
            let roles = layer.planes.iter().map(|plane| plane.role.clone()).collect();
            names.push(Names { layer: layer.name.clone(), roles });
        }
        Ok(Self { names: names.into(), parts })
    }

    /// The same for the layers whose name `keep` accepts.
    #[must_use]
    pub fn retain(&self, keep: impl Fn(&str) -> bool) -> Self {
        let mut parts: Vec<Part> = Vec::new();
        for part in &self.parts {
            let mut goes_on = false;
            for layer in part.layers.0..part.layers.1 {
                let kept = keep(&self.names[layer as usize].layer);
                match parts.last_mut() {
                    Some(last) if kept && goes_on => last.layers.1 = layer + 1,
                    _ if kept => parts.push(Part { layers: (layer, layer + 1), ..part.clone() }),
                    _ => {}
                }
                goes_on = kept;
            }
        }
        Self { names: Arc::clone(&self.names), parts }
    }

    /// Whether nothing is read.
    pub const fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Layer, role of the plane and heads of everything that is read.
    pub fn items(&self) -> impl Iterator<Item = (&str, &str, Range<u32>)> {
        self.parts.iter().flat_map(|part| {
            (part.layers.0..part.layers.1).map(|layer| {
                let names = &self.names[layer as usize];
                let role = names.roles[part.plane as usize].as_str();
                (names.layer.as_str(), role, part.heads.0..part.heads.1)
            })
        })
    }
}

/// A plane and heads of it.
type Cell = (u32, Range<u32>);

/// Layers in a row, and cells that each of them has.
type Segment = (Range<u32>, Vec<Cell>);

/// Producer ranks that hold the same, and the consumer ranks that read it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    replicas: Vec<usize>,
    readers: Vec<usize>,
}

impl Class {
    /// The holders and the readers of `heads` of `plane`, of the tokens of that context-parallel rank
    /// of the producer. `None` without readers.
    fn of(
        from: &[(usize, &Slice)],
        to: &[(usize, &Slice)],
        plane: usize,
        heads: &Range<u32>,
        context: u32,
    ) -> Option<Self> {
        let with_heads = |slice: &Slice| {
            let held = &slice.heads[plane];
            held.start <= heads.start && heads.end <= held.end
        };
        let holds =
            |&&(_, slice): &&(usize, &Slice)| slice.context.rank == context && with_heads(slice);
        let dealt = Context { rank: context, ..from[0].1.context };
        let wants =
            |&&(_, slice): &&(usize, &Slice)| with_heads(slice) && dealt.meets(slice.context);
        let readers: Vec<_> = to.iter().filter(wants).map(|&(rank, _)| rank).collect();
        let replicas = from.iter().filter(holds).map(|&(rank, _)| rank).collect();
        (!readers.is_empty()).then_some(Self { replicas, readers })
    }

    /// Cuts what the readers read, reader after reader and layer after layer, into equal runs, one
    /// for each replica.
    fn deal(
        &self,
        segments: &[Segment],
        shares: &mut BTreeMap<(usize, usize), Vec<Part>>,
        work: &mut Work,
    ) -> Result<(), Mismatch> {
        let layers: u64 = segments.iter().map(|(layers, _)| layers.len() as u64).sum();
        let replicas = self.replicas.len() as u64;
        let total = layers * self.readers.len() as u64;
        for (reader, consumer) in (0u64..).zip(&self.readers) {
            // Most replicas are read by few readers, so those before and after are not looked at.
            let first = reader * replicas / self.readers.len() as u64;
            for (replica, producer) in (0u64..).zip(&self.replicas).skip(first as usize) {
                let cut = |replica: u64| {
                    let at = (replica * total).div_ceil(replicas);
                    at.saturating_sub(reader * layers).min(layers)
                };
                let run = cut(replica)..cut(replica + 1);
                if run.start == layers {
                    break;
                }
                let mut before = 0;
                for (layers, cells) in segments {
                    let within = |at: u64| {
                        let at = at.clamp(before, before + layers.len() as u64) - before;
                        layers.start + at as u32
                    };
                    let layers_read = (within(run.start), within(run.end));
                    before += layers.len() as u64;
                    if layers_read.0 == layers_read.1 {
                        continue;
                    }
                    let parts = cells.iter().map(|(plane, heads)| Part {
                        layers: layers_read,
                        plane: *plane,
                        heads: (heads.start, heads.end),
                    });
                    work.keep(parts.len())?;
                    shares.entry((*producer, *consumer)).or_default().extend(parts);
                }
            }
        }
        Ok(())
    }
}

/// The heads of a plane, cut wherever a rank begins or ends to hold them.
fn elementary(from: &[(usize, &Slice)], to: &[(usize, &Slice)], plane: usize) -> Vec<Range<u32>> {
    let held = from.iter().chain(to).map(|(_, slice)| &slice.heads[plane]);
    let mut cuts: Vec<u32> = held.flat_map(|heads| [heads.start, heads.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// Joins heads next to each other of the same plane and layers, then layers in a row with the same
/// heads.
fn join(parts: &mut Vec<Part>, work: &mut Work) -> Result<(), Mismatch> {
    let mut cuts: Vec<u32> = parts.iter().flat_map(|part| [part.layers.0, part.layers.1]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    // Parts of the same layers or of none in common.
    let within = |part: &Part| {
        let from = cuts.partition_point(|&cut| cut < part.layers.0);
        let to = cuts.partition_point(|&cut| cut <= part.layers.1);
        cuts[from..to].windows(2)
    };
    let mut apart = Vec::new();
    for part in &*parts {
        work.keep(within(part).len())?;
        apart.extend(within(part).map(|cut| Part { layers: (cut[0], cut[1]), ..part.clone() }));
    }
    *parts = apart;
    parts.sort_unstable();
    parts.dedup_by(|next, last| {
        let joins =
            (last.layers, last.plane, last.heads.1) == (next.layers, next.plane, next.heads.0);
        if joins {
            last.heads.1 = next.heads.1;
        }
        joins
    });
    parts.sort_unstable_by_key(|part| (part.plane, part.heads, part.layers));
    parts.dedup_by(|next, last| {
        let joins =
            (last.plane, last.heads, last.layers.1) == (next.plane, next.heads, next.layers.0);
        if joins {
            last.layers.1 = next.layers.1;
        }
        joins
    });
    Ok(())
}

fn same_model(producers: &Topology, consumers: &Topology) -> Result<(), Mismatch> {
    let (first, second) = (producers.layers.len(), consumers.layers.len());
    if producers.ranks() == 0 || consumers.ranks() == 0 {
        let difference = Difference::Ranks(producers.ranks(), consumers.ranks());
        return Err(mismatch("", "", difference));
    }
    let (mut ours, mut theirs) = (producers.layers.iter(), consumers.layers.iter());
    loop {
        match (ours.next(), theirs.next()) {
            (None, None) => return Ok(()),
            (Some(a), Some(b)) if a.spec.name == b.spec.name => {
                a.spec.agree(&b.spec, MismatchSides::Ends)?;
                blocks_fit(&a.spec.name, a.spec.kind, a.block_tokens, b.block_tokens)?;
            }
            (a, b) => {
                let name = |layer: Option<&ModelLayer>| layer.map(|it| it.spec.name.clone());
                let (a, b) = (name(a), name(b));
                // Both lists are in order, so the lesser name is the one that the other lacks.
                let ours = match (&a, &b) {
                    (Some(a), Some(b)) => natural_order(a, b).is_lt(),
                    (a, _) => a.is_some(),
                };
                let difference = if ours {
                    Difference::OnlyFirst { first, second }
                } else {
                    Difference::OnlySecond { first, second }
                };
                let layer = if ours { a } else { b }.unwrap_or_default();
                return Err(mismatch(&layer, "", difference));
            }
        }
    }
}
