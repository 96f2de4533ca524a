//! The meaning of a layout's bytes: the part that must be equal at both ends.

use super::{
    Difference, Encoding, Group, Kind, Layer, Layout, Mismatch, MismatchSides, Plane, gcd,
};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;

/// Sets this use of the hash apart from all others.
const FINGERPRINT_CONTEXT: &str = "kvferry 2025 layout fingerprint 1";

/// A hash of 128 bits over everything that must be equal for bytes to mean the same at both ends.
///
/// It covers names of layers and planes, encodings, heads in total, bytes per head and row, rows
/// per token or state, and what each layer attends to. It does not cover what a plan can bridge:
/// ranks, strides, order of axes, block sizes, number of blocks, groups; nor any engine's version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fingerprint(#[serde(with = "serde_bytes")] pub [u8; 16]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A layer's name, kind and planes, without positions in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerSpec {
    /// The layer's name.
    pub name: String,
    /// Kind of the layer's attention, or state.
    pub kind: Kind,
    /// The layer's planes, sorted by role.
    pub planes: Vec<PlaneSpec>,
}

/// A plane's role, format and sizes, without positions in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaneSpec {
    /// The plane's role.
    pub role: String,
    /// Number format of an element.
    pub encoding: Encoding,
    /// Heads in the model.
    pub heads: u32,
    /// Bytes of one head and row.
    pub content: u32,
    /// Number of rows for a number of tokens.
    pub density: RowDensity,
}

/// The rows of a plane: `rows` per `tokens` tokens, in lowest terms. For a state, `tokens` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowDensity {
    /// Number of rows, at least 1.
    pub rows: u32,
    /// Tokens that these rows are for; 0 for a state.
    pub tokens: u32,
}

impl RowDensity {
    pub(crate) const fn of(plane: &Plane, group: &Group) -> Self {
        if matches!(group.kind, Kind::State) {
            return Self { rows: plane.rows, tokens: 0 };
        }
        let common = gcd(plane.rows, group.block_tokens);
        Self { rows: plane.rows / common, tokens: group.block_tokens / common }
    }
}

impl fmt::Display for RowDensity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tokens {
            0 => write!(f, "{} rows per state", self.rows),
            tokens => write!(f, "{} row(s) per {tokens} token(s)", self.rows),
        }
    }
}

impl LayerSpec {
    pub(crate) fn of(layer: &Layer, group: &Group) -> Self {
        let mut planes: Vec<_> = layer
            .planes
            .iter()
            .map(|plane| PlaneSpec {
                role: plane.role.clone(),
                encoding: plane.encoding.clone(),
                heads: plane.heads.total,
                content: plane.content,
                density: RowDensity::of(plane, group),
            })
            .collect();
        planes.sort_by(|a, b| a.role.cmp(&b.role));
        Self { name: layer.name.clone(), kind: group.kind, planes }
    }

    /// Checks that this layer and `other`, which has the same name, are equal. Returns the first
    /// difference.
    pub(crate) fn agree(&self, other: &Self, sides: MismatchSides) -> Result<(), Mismatch> {
        let differ =
            |plane: &str, difference| Err(Mismatch::new(sides, &self.name, plane, difference));
        if self.kind != other.kind {
            return differ("", Difference::Kind(self.kind, other.kind));
        }
        if !self.planes.iter().map(|p| &p.role).eq(other.planes.iter().map(|p| &p.role)) {
            let roles = |spec: &Self| spec.planes.iter().map(|plane| plane.role.clone()).collect();
            return differ("", Difference::Planes(roles(self), roles(other)));
        }
        for (a, b) in self.planes.iter().zip(&other.planes) {
            let difference = if a.encoding != b.encoding {
                Difference::Encoding(a.encoding.clone(), b.encoding.clone())
            } else if a.heads != b.heads {
                Difference::Heads(a.heads, b.heads)
            } else if a.content != b.content {
                Difference::Content(a.content, b.content)
            } else if a.density != b.density {
                Difference::Rows(a.density, b.density)
            } else {
                continue;
            };
            return differ(&a.role, difference);
        }
        Ok(())
    }
}

/// Whether blocks of `producer` can become blocks of `consumer`, as far as both list the same
/// layers.
///
/// A layer that only one of the two ranks lists may be on another rank of a pipeline.
/// [`crate::plan::Routing`], which knows all ranks, checks that no layer is missing.
///
/// # Errors
/// The bytes do not mean the same, or neither block size divides the other.
pub fn compatible(producer: &Layout, consumer: &Layout) -> Result<(), Mismatch> {
    let theirs: HashMap<&str, usize> =
        consumer.layers().iter().zip(0..).map(|(layer, at)| (layer.name.as_str(), at)).collect();
    for (at, layer) in producer.layers().iter().enumerate() {
        let Some(&other) = theirs.get(layer.name.as_str()) else { continue };
        producer.spec(at).agree(&consumer.spec(other), MismatchSides::Ends)?;
        let tokens = |layout: &Layout, at: usize| {
            let group = layout.layers()[at].group;
            layout.groups()[group].block_tokens
        };
        let (ours, theirs) = (tokens(producer, at), tokens(consumer, other));
        blocks_fit(&layer.name, producer.spec(at).kind, ours, theirs)?;
    }
    Ok(())
}

/// Whether blocks of these sizes can be made of each other.
pub(crate) fn blocks_fit(layer: &str, kind: Kind, a: u32, b: u32) -> Result<(), Mismatch> {
    if kind == Kind::State || a.is_multiple_of(b) || b.is_multiple_of(a) {
        return Ok(());
    }
    Err(Mismatch::new(MismatchSides::Ends, layer, "", Difference::BlockTokens(a, b)))
}

/// The fingerprint of a model with these layers, in any order.
pub(crate) fn fingerprint_of(mut layers: Vec<LayerSpec>) -> Fingerprint {
    layers.sort_unstable();
    let mut hash = Fields(blake3::Hasher::new_derive_key(FINGERPRINT_CONTEXT));
    hash.count(layers.len());
    for LayerSpec { name, kind, planes } in &layers {
        hash.text(name);
        let (kind, tokens) = match *kind {
            Kind::Full => (0, 0),
            Kind::Window { tokens } => (1, tokens),
            Kind::Chunk { tokens } => (2, tokens),
            Kind::State => (3, 0),
        };
        hash.number(kind);
        hash.number(tokens);
        hash.count(planes.len());
        for PlaneSpec { role, encoding, heads, content, density } in planes {
            hash.text(role);
            hash.text(&encoding.name);
            for number in [encoding.bits, *heads, *content, density.rows, density.tokens] {
                hash.number(number);
            }
        }
    }
    let mut fingerprint = [0; 16];
    hash.0.finalize_xof().fill(&mut fingerprint);
    Fingerprint(fingerprint)
}

/// A hash of fields with their lengths, so that no two lists of fields hash the same bytes.
struct Fields(blake3::Hasher);

impl Fields {
    fn number(&mut self, number: u32) {
        self.0.update(&number.to_le_bytes());
    }

    fn count(&mut self, count: usize) {
        self.0.update(&(count as u64).to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.0.update(text.as_bytes());
    }
}

/// Natural order of names: `layers.2` is before `layers.10`.
pub(crate) fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a.as_bytes(), b.as_bytes());
    while let (Some((&x, rest_x)), Some((&y, rest_y))) = (left.split_first(), right.split_first()) {
        let order = if x.is_ascii_digit() && y.is_ascii_digit() {
            let (m, n) = (take_digits(&mut left), take_digits(&mut right));
            m.len().cmp(&n.len()).then_with(|| m.cmp(n))
        } else {
            (left, right) = (rest_x, rest_y);
            x.cmp(&y)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    // Names that differ in leading zeros only are still two names.
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Splits a number off the front of `text`: its digits without leading zeros.
fn take_digits<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let len = text.iter().take_while(|c| c.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(len);
    *text = rest;
    let zeros = digits.iter().take_while(|&&c| c == b'0').count();
    &digits[zeros..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ordered_as_people_count() {
        let mut names = ["l.10.a", "l.9.b", "l.9", "l.09", "k.11", "l.9.a", "l", "l.100"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(names, ["k.11", "l", "l.09", "l.9", "l.9.a", "l.9.b", "l.10.a", "l.100"]);
    }
}
