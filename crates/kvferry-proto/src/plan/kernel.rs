//! Strided copies of one unit: the part of a block that both ends have in one piece.
//!
//! A *template* is a plane of some layers before it is known which of its axes lie in a row. For
//! the layers that are asked for it is folded into a *kernel*: bytes that are contiguous at both ends
//! become one copy, the rest becomes loops. Kernels that continue each other are joined.

use crate::id::RegionId;
use crate::layout::RowDensity;
use std::ops::Range;

/// Steps of an axis: their number, and the distance from a step to the next at each end.
///
/// Offsets are computed modulo 2⁶⁴: layers may lie in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Axis {
    pub(super) count: u32,
    pub(super) from: u64,
    pub(super) to: u64,
}

impl Axis {
    /// An axis of one step.
    pub(super) const ONE: Self = Self { count: 1, from: 0, to: 0 };

    /// An axis in its only form: that of one step goes nowhere.
    pub(super) const fn new(count: u32, from: u64, to: u64) -> Self {
        if count == 1 { Self::ONE } else { Self { count, from, to } }
    }

    /// Whether each step continues `len` bytes, at both ends.
    const fn continues(self, len: u64) -> bool {
        self.count > 1 && self.from == len && self.to == len
    }
}

/// Strides of blocks and offsets of their units, at both ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Step {
    /// Bytes from a block to the next.
    pub(super) from_block: u64,
    pub(super) to_block: u64,
    /// Offset of each unit from the start of its block, in bytes.
    pub(super) from_units: Box<[u64]>,
    pub(super) to_units: Box<[u64]>,
}

impl Step {
    /// Whether units of `len` bytes follow each other without a gap, over blocks that do.
    fn is_dense(&self, len: u64) -> bool {
        let dense = |units: &[u64], block: u64| {
            let next = (0u64..).map(|n| n.wrapping_mul(len));
            units.iter().copied().zip(next).all(|(unit, at)| unit == at)
                && block == (units.len() as u64).wrapping_mul(len)
        };
        dense(&self.from_units, self.from_block) && dense(&self.to_units, self.to_block)
    }
}

/// Properties that all planes of a template share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Form {
    pub(super) role: String,
    pub(super) from: RegionId,
    pub(super) to: RegionId,
    pub(super) heads: Axis,
    /// Rows of a unit.
    pub(super) rows: Axis,
    pub(super) density: RowDensity,
    /// Bytes of one head and row.
    pub(super) content: u64,
    /// Index into the section's steps.
    pub(super) step: usize,
}

/// A plane of layers that are evenly spaced at both ends.
#[derive(Clone, Debug)]
pub(super) struct Template {
    pub(super) form: Form,
    /// Ascending places of the layers in the producer's order.
    pub(super) places: Vec<u32>,
    /// Offset of the first layer, in bytes.
    pub(super) from: u64,
    pub(super) to: u64,
    /// Distances from a layer to the next. The count is not used.
    pub(super) layers: Axis,
}

/// Copies of one unit: `len` bytes each, for all steps of the loops and rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) from_region: RegionId,
    pub(super) to_region: RegionId,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) len: u64,
    /// Outer and inner.
    pub(super) loops: [Axis; 2],
    pub(super) rows: Rows,
    pub(super) density: RowDensity,
    pub(super) step: usize,
    /// Whether units that follow each other at both ends do so in memory.
    pub(super) dense: bool,
    /// The templates it was made of: a range of what [`compile`] returns besides.
    pub(super) made_of: (usize, usize),
}

/// Treatment of a unit of which not all rows are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// Rows are not apart from each other: all or none.
    Whole,
    /// The copy is so many rows of so many bytes, one after the other.
    Prefix { bytes: u64 },
    /// Rows are copied one by one.
    Each(Axis),
}

/// The kernels of those templates, for the layers in `places` and the rows of a unit's tokens
/// `clip` (`None` for all), and the order of templates that [`Kernel::made_of`] refers to.
pub(super) fn compile(
    templates: &[Template],
    steps: &[Step],
    places: &Range<u32>,
    clip: Option<(u32, u32)>,
) -> (Vec<Kernel>, Vec<usize>) {
    let folded = templates.iter().enumerate().filter_map(|(at, template)| {
        let mut kernel = template.kernel(places, clip)?;
        kernel.fold();
        Some((kernel, at))
    });
    let mut folded: Vec<(Kernel, usize)> = folded.collect();
    folded.sort_by_key(|(kernel, _)| (kernel.to_region, kernel.to));
    let order: Vec<usize> = folded.iter().map(|&(_, at)| at).collect();
    let mut kernels: Vec<Kernel> = folded.into_iter().map(|(kernel, _)| kernel).collect();
    for (at, kernel) in kernels.iter_mut().enumerate() {
        kernel.made_of = (at, at + 1);
    }
    loop {
        let before = kernels.len();
        kernels.dedup_by(|next, last| last.join(next));
        if kernels.len() == before {
            break;
        }
        for kernel in &mut kernels {
            kernel.fold();
        }
    }
    for kernel in &mut kernels {
        kernel.dense = steps[kernel.step].is_dense(kernel.len);
    }
    (kernels, order)
}

impl Template {
    fn kernel(&self, places: &Range<u32>, clip: Option<(u32, u32)>) -> Option<Kernel> {
        let first = self.places.partition_point(|&place| place < places.start);
        let end = self.places.partition_point(|&place| place < places.end);
        let layers = u32::try_from(end.checked_sub(first)?).ok().filter(|&layers| layers > 0)?;
        let Form { from, to, heads, rows, density, content, step, .. } = self.form;
        let (skip, count) = match clip {
            Some((skip, take)) => {
                let (first, end) = density.rows(skip, take);
                (first, end - first)
            }
            None => (0, rows.count),
        };
        let skipped = |layer: u64, row: u64| {
            let layers = (first as u64).wrapping_mul(layer);
            layers.wrapping_add(u64::from(skip).wrapping_mul(row))
        };
        let rows = Axis::new(count, rows.from, rows.to);
        Some(Kernel {
            from_region: from,
            to_region: to,
            from: self.from.wrapping_add(skipped(self.layers.from, self.form.rows.from)),
            to: self.to.wrapping_add(skipped(self.layers.to, self.form.rows.to)),
            len: content,
            loops: [Axis::new(layers, self.layers.from, self.layers.to), heads],
            rows: if rows.count == 1 { Rows::Whole } else { Rows::Each(rows) },
            density,
            step,
            dense: false,
            made_of: (0, 0),
        })
    }
}

impl Kernel {
    /// Joins the copies that are contiguous at both ends.
    fn fold(&mut self) {
        loop {
            if let Rows::Each(rows) = self.rows
                && rows.continues(self.len)
            {
                self.rows = Rows::Prefix { bytes: self.len };
                self.len *= u64::from(rows.count);
                continue;
            }
            let Some(axis) = self.loops.iter_mut().find(|axis| axis.continues(self.len)) else {
                return;
            };
            self.len *= u64::from(axis.count);
            *axis = Axis::ONE;
            if let Rows::Prefix { .. } = self.rows {
                self.rows = Rows::Whole;
            }
        }
    }

    /// Takes `next` in if it goes on where this ends, in every step of the loops.
    fn join(&mut self, next: &Self) -> bool {
        let alike = (self.from_region, self.to_region, self.loops, self.step)
            == (next.from_region, next.to_region, next.loops, next.step);
        let adjacent = self.from.wrapping_add(self.len) == next.from
            && self.to.wrapping_add(self.len) == next.to;
        let rows = match (self.rows, next.rows) {
            (Rows::Each(a), Rows::Each(b)) if a == b && self.density == next.density => self.rows,
            (Rows::Each(_), _) | (_, Rows::Each(_)) => return false,
            _ => Rows::Whole,
        };
        if !alike || !adjacent {
            return false;
        }
        self.len += next.len;
        self.rows = rows;
        self.made_of.1 = next.made_of.1;
        true
    }

    /// Number of times that the kernel's copies of a unit are repeated.
    pub(super) const fn repeats(&self) -> u64 {
        self.loops[0].count as u64 * self.loops[1].count as u64
    }
}

impl RowDensity {
    /// The rows that tokens `start..end` of a unit are in, which are all rows of a state.
    pub(super) const fn rows(self, start: u32, end: u32) -> (u32, u32) {
        if self.tokens == 0 {
            return (0, self.rows);
        }
        let (rows, tokens) = (self.rows as u64, self.tokens as u64);
        // Rows of a unit are fewer than those of a block, which fit.
        ((start as u64 * rows / tokens) as u32, (end as u64 * rows).div_ceil(tokens) as u32)
    }
}
