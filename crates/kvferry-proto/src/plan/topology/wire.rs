//! Topologies as they cross the wire: like layouts, with layers that are alike described once.

use super::{Holding, LAYERS_MAX, ModelLayer, RANKS_MAX, Slice, Work};
use crate::layout::{
    CONTEXT_MAX, Context, Encoding, Kind, LAYER_NAME_MAX, LayerSpec, Mismatch, PLANES_MAX,
    PlaneSpec, RowDensity, SHORT_NAME_MAX, Table, Version, at_most, gcd, is_name, natural_order,
    printable,
};
use serde::{Deserialize, Serialize};

/// See [`super::Topology`].
#[derive(Serialize, Deserialize)]
pub(super) struct Topology {
    v: Version,
    #[serde(deserialize_with = "at_most::<_, _, LAYERS_MAX>")]
    shapes: Vec<Shape>,
    #[serde(deserialize_with = "at_most::<_, _, LAYERS_MAX>")]
    layers: Vec<Layer>,
    #[serde(deserialize_with = "at_most::<_, _, RANKS_MAX>")]
    ranks: Vec<Rank>,
}

/// A layer's properties, without its name.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Shape {
    #[serde(flatten)]
    kind: Kind,
    block_tokens: u32,
    #[serde(deserialize_with = "at_most::<_, _, PLANES_MAX>")]
    planes: Vec<Plane>,
}

#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Plane {
    role: String,
    encoding: String,
    bits: u32,
    heads: u32,
    content: u32,
    rows: u32,
    row_tokens: u32,
}

#[derive(Serialize, Deserialize)]
struct Layer {
    name: String,
    shape: usize,
}

#[derive(Serialize, Deserialize)]
struct Rank {
    #[serde(deserialize_with = "at_most::<_, _, LAYERS_MAX>")]
    slices: Vec<SliceFields>,
}

#[derive(Serialize, Deserialize)]
struct SliceFields {
    first: u32,
    count: u32,
    /// First head and number of heads of each plane, in order of the roles.
    #[serde(deserialize_with = "at_most::<_, _, PLANES_MAX>")]
    heads: Vec<(u32, u32)>,
    context_rank: u32,
    context_size: u32,
    context_run: u32,
}

impl From<super::Topology> for Topology {
    fn from(topology: super::Topology) -> Self {
        let mut shapes = Table::default();
        let layers = topology
            .layers
            .into_iter()
            .map(|ModelLayer { spec, block_tokens }| {
                let planes = spec.planes.into_iter().map(Plane::from).collect();
                let shape = Shape { kind: spec.kind, block_tokens, planes };
                Layer { name: spec.name, shape: shapes.index(shape) }
            })
            .collect();
        let ranks = topology
            .ranks
            .into_iter()
            .map(|rank| Rank { slices: rank.0.into_iter().map(SliceFields::from).collect() })
            .collect();
        Self { v: Version::CURRENT, shapes: shapes.values, layers, ranks }
    }
}

impl From<PlaneSpec> for Plane {
    fn from(plane: PlaneSpec) -> Self {
        Self {
            role: plane.role,
            encoding: plane.encoding.name,
            bits: plane.encoding.bits,
            heads: plane.heads,
            content: plane.content,
            rows: plane.density.rows,
            row_tokens: plane.density.tokens,
        }
    }
}

impl From<Slice> for SliceFields {
    fn from(Slice { layers, heads, context }: Slice) -> Self {
        Self {
            first: layers.start,
            count: layers.end - layers.start,
            heads: heads.into_iter().map(|heads| (heads.start, heads.end - heads.start)).collect(),
            context_rank: context.rank,
            context_size: context.size,
            context_run: context.run,
        }
    }
}

/// Error for a map that is not a valid topology.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidTopology {
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    #[error("the name of a {0} is empty, too long or cannot be shown: {1:?}")]
    Name(&'static str, String),
    #[error("layers are out of order or named twice")]
    Order,
    #[error("{0} is out of its range")]
    Range(&'static str),
}

impl TryFrom<Topology> for super::Topology {
    type Error = InvalidTopology;

    fn try_from(wire: Topology) -> Result<Self, InvalidTopology> {
        let shapes = wire
            .shapes
            .into_iter()
            .map(Shape::checked)
            .collect::<Result<Vec<_>, InvalidTopology>>()?;
        let layers = wire
            .layers
            .into_iter()
            .map(|layer| {
                name("layer", &layer.name, LAYER_NAME_MAX)?;
                let shape =
                    shapes.get(layer.shape).ok_or(InvalidTopology::Range("a layer's shape"))?;
                let mut known = shape.clone();
                known.spec.name = layer.name;
                Ok(known)
            })
            .collect::<Result<Vec<_>, InvalidTopology>>()?;
        let in_order =
            |pair: &[ModelLayer]| natural_order(&pair[0].spec.name, &pair[1].spec.name).is_lt();
        if !layers.windows(2).all(in_order) {
            return Err(InvalidTopology::Order);
        }
        // How tokens are dealt out is the engine's, not a rank's.
        let mut contexts = vec![None; layers.len()];
        let mut work = Work::default();
        let ranks = wire
            .ranks
            .into_iter()
            .map(|rank| rank.checked(&layers, &mut contexts, &mut work))
            .collect::<Result<_, InvalidTopology>>()?;
        let topology = Self { layers, ranks };
        if contexts.iter().any(Option::is_none) {
            return Err(InvalidTopology::Range("a layer that no rank holds"));
        }
        topology.check_whole(&mut work)?;
        Ok(topology)
    }
}

impl Shape {
    /// The layer this is, but for its name.
    fn checked(self) -> Result<ModelLayer, InvalidTopology> {
        let kind = self.kind;
        let planes = self
            .planes
            .into_iter()
            .map(|plane| {
                name("plane", &plane.role, SHORT_NAME_MAX)?;
                name("encoding", &plane.encoding, SHORT_NAME_MAX)?;
                let numbers = [plane.bits, plane.heads, plane.content, plane.rows];
                let state = plane.row_tokens == 0;
                let lowest = state || gcd(plane.rows, plane.row_tokens) == 1;
                if numbers.contains(&0) || state != (kind == Kind::State) || !lowest {
                    return Err(InvalidTopology::Range("a number of a plane"));
                }
                Ok(PlaneSpec {
                    role: plane.role,
                    encoding: Encoding { name: plane.encoding, bits: plane.bits },
                    heads: plane.heads,
                    content: plane.content,
                    density: RowDensity { rows: plane.rows, tokens: plane.row_tokens },
                })
            })
            .collect::<Result<Vec<_>, InvalidTopology>>()?;
        if planes.is_empty() || !planes.is_sorted_by(|a, b| a.role < b.role) {
            return Err(InvalidTopology::Order);
        }
        if self.block_tokens == 0 {
            return Err(InvalidTopology::Range("the size of a block"));
        }
        if matches!(kind, Kind::Window { tokens: 0 } | Kind::Chunk { tokens: 0 }) {
            return Err(InvalidTopology::Range("a window"));
        }
        let spec = LayerSpec { name: String::new(), kind, planes };
        Ok(ModelLayer { spec, block_tokens: self.block_tokens })
    }
}

impl Rank {
    fn checked(
        self,
        layers: &[ModelLayer],
        contexts: &mut [Option<(u32, u32)>],
        work: &mut Work,
    ) -> Result<Holding, InvalidTopology> {
        let mut next = 0;
        let slices = self
            .slices
            .into_iter()
            .map(|fields| {
                let slice = fields.checked(next, layers, work)?;
                next = slice.layers.end;
                for layer in slice.layers.clone() {
                    let dealt = (slice.context.size, slice.context.run);
                    if *contexts[layer as usize].get_or_insert(dealt) != dealt {
                        return Err(InvalidTopology::Range("how tokens are dealt out"));
                    }
                }
                Ok(slice)
            })
            .collect::<Result<_, _>>()?;
        Ok(Holding(slices))
    }
}

impl SliceFields {
    fn checked(
        self,
        next: u32,
        layers: &[ModelLayer],
        work: &mut Work,
    ) -> Result<Slice, InvalidTopology> {
        let end = self.first.checked_add(self.count).filter(|&end| end as usize <= layers.len());
        let end = end.filter(|_| self.first >= next && self.count > 0);
        let range = self.first..end.ok_or(InvalidTopology::Range("a run of layers"))?;
        let range_of = |&(start, count): &(u32, u32)| {
            start.checked_add(count).filter(|_| count > 0).map(|end| start..end)
        };
        let heads: Option<Vec<_>> = self.heads.iter().map(range_of).collect();
        let heads = heads.ok_or(InvalidTopology::Range("heads"))?;
        let context =
            Context { rank: self.context_rank, size: self.context_size, run: self.context_run };
        if context.rank >= context.size || context.size > CONTEXT_MAX || context.run == 0 {
            return Err(InvalidTopology::Range("a context-parallel rank"));
        }
        work.compare(range.len() * self.heads.len().max(1))?;
        for known in &layers[range.start as usize..range.end as usize] {
            let planes = &known.spec.planes;
            let held = planes.len() == heads.len()
                && planes.iter().zip(&heads).all(|(plane, heads)| heads.end <= plane.heads);
            if !held {
                return Err(InvalidTopology::Range("heads"));
            }
            if !known.is_dealt(context) {
                return Err(InvalidTopology::Range("how tokens are dealt out"));
            }
        }
        Ok(Slice { layers: range, heads, context })
    }
}

impl ModelLayer {
    /// Whether the layers of a layout can be dealt out like that.
    fn is_dealt(&self, context: Context) -> bool {
        let Self { spec, block_tokens } = self;
        let dealt = if context.size == 1 {
            context.run == *block_tokens
        } else {
            spec.kind != Kind::State && block_tokens.is_multiple_of(context.run)
        };
        let whole = |plane: &PlaneSpec| {
            plane.density.tokens == 0 || context.run.is_multiple_of(plane.density.tokens)
        };
        dealt && spec.planes.iter().all(whole)
    }
}

fn name(what: &'static str, name: &str, limit: usize) -> Result<(), InvalidTopology> {
    if is_name(name, limit) { Ok(()) } else { Err(InvalidTopology::Name(what, printable(name))) }
}
