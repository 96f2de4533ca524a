//! The orders of axes that engines use for dense caches.

use super::View;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The order of a cache's axes in memory, the slowest first: layer, block, head, row (N), content.
///
/// A packing makes the views of a dense cache. An engine that can be asked for strides should be
/// asked: pages may be padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Packing {
    /// Layer, block, head, row; also called HND.
    Lbhnc,
    /// Layer, block, row, head; also called NHD.
    Lbnhc,
    /// Layer, head, block, row.
    Lhbnc,
    /// Block, layer, head, row.
    Blhnc,
    /// Block, layer, row, head.
    Blnhc,
    /// Block, head, layer, row.
    Bhlnc,
}

/// The size of a dense cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Layers that lie together.
    pub layers: u32,
    /// Logical blocks.
    pub blocks: u32,
    /// Heads on this rank.
    pub heads: u32,
    /// Rows of a logical block.
    pub rows: u32,
    /// Bytes of one head and row.
    pub content: u32,
    /// Kernel blocks of a logical block; divides the rows.
    pub kernel_blocks: u32,
}

impl Shape {
    /// Bytes of the whole cache; `None` beyond 2⁶⁴.
    pub fn bytes(&self) -> Option<u64> {
        [self.layers, self.blocks, self.heads, self.rows, self.content]
            .into_iter()
            .try_fold(1u64, |bytes, count| bytes.checked_mul(count.into()))
    }
}

/// An axis of a dense cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Layers that lie together.
    Layer,
    /// Kernel blocks.
    Block,
    /// Heads on this rank.
    Head,
    /// Rows of a kernel block.
    Row,
}

impl Packing {
    /// Every packing.
    pub const ALL: [Self; 6] =
        [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// The packing's name, as in `LBHNC`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// The views of a dense cache's layers, in their order: the cache begins `base` bytes into the
    /// region of that index.
    ///
    /// `None` if the kernel blocks do not divide the rows, a count is zero, or the cache would end
    /// beyond 2⁶⁴ bytes.
    pub fn views(self, shape: &Shape, region: usize, base: u64) -> Option<Vec<View>> {
        let Shape { layers, blocks, heads, rows, content, kernel_blocks } = *shape;
        let sound = kernel_blocks > 0 && rows > 0 && rows.is_multiple_of(kernel_blocks);
        if !sound || layers == 0 || blocks == 0 || heads == 0 || content == 0 {
            return None;
        }
        shape.bytes()?.checked_add(base)?;
        let mut strides = [0u64; 4];
        let mut stride = u64::from(content);
        for axis in self.axes().into_iter().rev() {
            strides[axis as usize] = stride;
            stride *= match axis {
                Axis::Layer => u64::from(layers),
                Axis::Block => u64::from(blocks) * u64::from(kernel_blocks),
                Axis::Head => u64::from(heads),
                Axis::Row => u64::from(rows / kernel_blocks),
            };
        }
        let [layer_stride, kernel_stride, head_stride, row_stride] = strides;
        let view = |layer: u32| View {
            region,
            base: base + u64::from(layer) * layer_stride,
            block_stride: kernel_stride * u64::from(kernel_blocks),
            kernel_blocks,
            kernel_stride,
            head_stride,
            row_stride,
        };
        Some((0..layers).map(view).collect())
    }

    /// The axes, the slowest first; content follows them.
    pub const fn axes(self) -> [Axis; 4] {
        use Axis::{Block, Head, Layer, Row};
        match self {
            Self::Lbhnc => [Layer, Block, Head, Row],
            Self::Lbnhc => [Layer, Block, Row, Head],
            Self::Lhbnc => [Layer, Head, Block, Row],
            Self::Blhnc => [Block, Layer, Head, Row],
            Self::Blnhc => [Block, Layer, Row, Head],
            Self::Bhlnc => [Block, Head, Layer, Row],
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Not the name of a packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("not one of LBHNC (HND), LBNHC (NHD), LHBNC, BLHNC, BLNHC, BHLNC")]
pub struct UnknownPacking;

impl FromStr for Packing {
    type Err = UnknownPacking;

    /// Takes the names of [`Packing::name`] and the older `HND` and `NHD`.
    fn from_str(name: &str) -> Result<Self, UnknownPacking> {
        match name {
            "HND" => Ok(Self::Lbhnc),
            "NHD" => Ok(Self::Lbnhc),
            _ => Self::ALL.into_iter().find(|it| it.name() == name).ok_or(UnknownPacking),
        }
    }
}
