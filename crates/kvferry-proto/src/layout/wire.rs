//! Encoded layouts: MessagePack maps, versioned and keyed by name.
//!
//! Unknown fields are ignored; if a later version adds one that must not be ignored, the version of
//! the whole changes. What layers have in common, which is all but the base, is sent once.

use super::{
    Encoding, GROUPS_MAX, Group, Heads, Kind, LAYERS_MAX, LayoutError, PLANES_MAX, REGIONS_MAX,
    Region, SHORT_NAME_MAX, View, check,
};
use crate::pack;
use serde::de::{DeserializeOwned, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use thiserror::Error;

/// The longest encoded layout or topology, in bytes.
pub const LAYOUT_MAX: usize = 1 << 20;

/// The version of this encoding.
const VERSION: u16 = 1;

/// The most different shapes of planes: each plane may have its own.
const SHAPES_MAX: usize = LAYERS_MAX * PLANES_MAX;

/// Error for bytes that are not a valid layout or topology.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum DecodeError {
    /// Longer than [`LAYOUT_MAX`].
    #[error("{len} bytes are beyond the limit of {limit}")]
    TooLong { len: usize, limit: usize },
    /// No MessagePack map, wrong fields, or a layout that is not sound.
    #[error("malformed: {0}")]
    Malformed(String),
}

/// Parses `bytes` as exactly one value.
pub(crate) fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    let (len, limit) = (bytes.len(), LAYOUT_MAX);
    if len > limit {
        return Err(DecodeError::TooLong { len, limit });
    }
    pack::decode(bytes).map_err(|e| DecodeError::Malformed(e.to_string()))
}

/// A version that this build reads.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Version(u16);

impl Version {
    pub(crate) const CURRENT: Self = Self(VERSION);
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let version = u16::deserialize(deserializer)?;
        if (1..=VERSION).contains(&version) {
            return Ok(Self(version));
        }
        Err(D::Error::custom(format_args!("version {version}, this build reads up to {VERSION}")))
    }
}

/// A list of at most `MAX` values. Those beyond are not parsed.
pub(crate) fn at_most<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Bounded<T, const MAX: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Bounded<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
            // Grown as values arrive: a length alone allocates nothing.
            let mut values = Vec::new();
            while let Some(value) = seq.next_element()? {
                if values.len() == MAX {
                    return Err(A::Error::invalid_length(MAX + 1, &self));
                }
                values.push(value);
            }
            Ok(values)
        }
    }

    deserializer.deserialize_seq(Bounded::<T, MAX>(PhantomData))
}

/// See [`super::Layout`].
#[derive(Serialize, Deserialize)]
pub(super) struct Layout {
    v: Version,
    #[serde(deserialize_with = "at_most::<_, _, REGIONS_MAX>")]
    regions: Vec<Region>,
    #[serde(deserialize_with = "at_most::<_, _, GROUPS_MAX>")]
    groups: Vec<Group>,
    #[serde(deserialize_with = "at_most::<_, _, SHAPES_MAX>")]
    shapes: Vec<PlaneShape>,
    #[serde(deserialize_with = "at_most::<_, _, LAYERS_MAX>")]
    layers: Vec<Layer>,
}

/// A [`Kind`] as fields of a map.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct KindFields {
    kind: String,
    #[serde(default, skip_serializing_if = "is_default")]
    window: u32,
}

impl From<Kind> for KindFields {
    fn from(kind: Kind) -> Self {
        let (kind, window) = match kind {
            Kind::Full => ("full", 0),
            Kind::Window { tokens } => ("window", tokens),
            Kind::Chunk { tokens } => ("chunk", tokens),
            Kind::State => ("state", 0),
        };
        Self { kind: kind.to_owned(), window }
    }
}

impl TryFrom<KindFields> for Kind {
    type Error = String;

    fn try_from(fields: KindFields) -> Result<Self, String> {
        match fields.kind.as_str() {
            "full" => Ok(Self::Full),
            "window" => Ok(Self::Window { tokens: fields.window }),
            "chunk" => Ok(Self::Chunk { tokens: fields.window }),
            "state" => Ok(Self::State),
            other => Err(format!("unknown kind of group: {:?}", super::printable(other))),
        }
    }
}

/// A plane's properties, without its region and base.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct PlaneShape {
    role: String,
    encoding: String,
    bits: u32,
    heads_total: u32,
    head_start: u32,
    heads: u32,
    rows: u32,
    content: u32,
    block_stride: u64,
    kernel_blocks: u32,
    kernel_stride: u64,
    head_stride: u64,
    row_stride: u64,
}

#[derive(Serialize, Deserialize)]
struct Layer {
    name: String,
    group: usize,
    #[serde(deserialize_with = "at_most::<_, _, PLANES_MAX>")]
    planes: Vec<PlaneAt>,
}

/// A plane: the index of its shape, and where it lies.
#[derive(Serialize, Deserialize)]
struct PlaneAt {
    shape: usize,
    region: usize,
    base: u64,
}

impl From<super::Layout> for Layout {
    fn from(layout: super::Layout) -> Self {
        let mut shapes = Table::default();
        let layers = layout
            .layers
            .into_iter()
            .map(|layer| Layer {
                name: layer.name,
                group: layer.group,
                planes: layer
                    .planes
                    .into_iter()
                    .map(|plane| PlaneAt {
                        region: plane.view.region,
                        base: plane.view.base,
                        shape: shapes.index(PlaneShape::from(plane)),
                    })
                    .collect(),
            })
            .collect();
        let (regions, groups) = (layout.regions, layout.groups);
        Self { v: Version::CURRENT, regions, groups, shapes: shapes.values, layers }
    }
}

impl From<super::Plane> for PlaneShape {
    fn from(plane: super::Plane) -> Self {
        Self {
            role: plane.role,
            encoding: plane.encoding.name,
            bits: plane.encoding.bits,
            heads_total: plane.heads.total,
            head_start: plane.heads.start,
            heads: plane.heads.count,
            rows: plane.rows,
            content: plane.content,
            block_stride: plane.view.block_stride,
            kernel_blocks: plane.view.kernel_blocks,
            kernel_stride: plane.view.kernel_stride,
            head_stride: plane.view.head_stride,
            row_stride: plane.view.row_stride,
        }
    }
}

impl PlaneShape {
    fn at(self, region: usize, base: u64) -> super::Plane {
        super::Plane {
            role: self.role,
            encoding: Encoding { name: self.encoding, bits: self.bits },
            heads: Heads { total: self.heads_total, start: self.head_start, count: self.heads },
            rows: self.rows,
            content: self.content,
            view: View {
                region,
                base,
                block_stride: self.block_stride,
                kernel_blocks: self.kernel_blocks,
                kernel_stride: self.kernel_stride,
                head_stride: self.head_stride,
                row_stride: self.row_stride,
            },
        }
    }
}

/// Error for a map that is not a valid layout.
#[derive(Debug, Error)]
pub(super) enum InvalidLayout {
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("a plane has shape {0}, and there are {1}")]
    NoShape(usize, usize),
}

impl TryFrom<Layout> for super::Layout {
    type Error = InvalidLayout;

    fn try_from(wire: Layout) -> Result<Self, InvalidLayout> {
        for shape in &wire.shapes {
            // Before a shape is multiplied by the planes that have it.
            check::name("plane", &shape.role, SHORT_NAME_MAX)?;
            check::name("encoding", &shape.encoding, SHORT_NAME_MAX)?;
        }
        let plane = |at: PlaneAt| {
            let shape = wire.shapes.get(at.shape).cloned();
            let shape = shape.ok_or(InvalidLayout::NoShape(at.shape, wire.shapes.len()))?;
            Ok::<_, InvalidLayout>(shape.at(at.region, at.base))
        };
        let layers = wire
            .layers
            .into_iter()
            .map(|layer| {
                let planes = layer.planes.into_iter().map(plane).collect::<Result<_, _>>()?;
                Ok(super::Layer { name: layer.name, group: layer.group, planes })
            })
            .collect::<Result<_, InvalidLayout>>()?;
        Ok(Self::new(wire.regions, wire.groups, layers)?)
    }
}

/// Values, each once, in the order in which they were first seen.
pub(crate) struct Table<T> {
    pub(crate) values: Vec<T>,
    indices: HashMap<T, usize>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { values: Vec::new(), indices: HashMap::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Table<T> {
    pub(crate) fn index(&mut self, value: T) -> usize {
        *self.indices.entry(value).or_insert_with_key(|value| {
            self.values.push(value.clone());
            self.values.len() - 1
        })
    }
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
