//! A plan, and the copies it yields one by one.

use super::ask::Unfilled;
use super::kernel::{Axis, Kernel, Rows, Step};
use super::map::Map;
use crate::id::RegionId;
use std::iter::FusedIterator;
use std::mem;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// Bytes that go from one place to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyOp {
    /// Source, at the producer.
    pub from: Spot,
    /// Destination, at the consumer.
    pub to: Spot,
    /// Bytes, at least 1.
    pub len: u64,
}

/// A place in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spot {
    /// Id of the region.
    pub region: RegionId,
    /// Bytes from its start.
    pub offset: u64,
}

impl CopyOp {
    /// Joins `next` if it continues this at both ends.
    #[inline]
    fn join(&mut self, next: &Self) -> bool {
        let joins = self.to.offset + self.len == next.to.offset
            && self.from.offset + self.len == next.from.offset
            && self.to.region == next.to.region
            && self.from.region == next.from.region;
        if joins {
            self.len += next.len;
        }
        joins
    }
}

/// Units that follow each other at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) from_block: u32,
    pub(super) from_unit: u32,
    pub(super) to_block: u32,
    pub(super) to_unit: u32,
    /// Number of units: at least 1, and 1 if there is a `clip`.
    pub(super) units: u32,
    /// The tokens of the unit that are wanted, first and end, if these are not all.
    pub(super) clip: Option<(u32, u32)>,
}

impl Run {
    /// Whether the first tokens of the unit are not wanted.
    pub(super) const fn begins_late(&self) -> bool {
        matches!(self.clip, Some((1.., _)))
    }
}

/// The runs of a section of the map.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) pair: usize,
    pub(super) section: usize,
    pub(super) runs: Arc<[Run]>,
}

/// Kernels, and the runs that each of them copies.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) kernels: Arc<[Kernel]>,
    pub(super) steps: Arc<[Step]>,
    pub(super) runs: Arc<[Run]>,
}

/// The copies from one rank to another for one request, or a part of it.
///
/// Cheap to clone and to keep: its size is that of the block tables, not that of the copies.
#[derive(Clone, Debug)]
pub struct Plan {
    map: Arc<Map>,
    tables: Arc<[Table]>,
    unfilled: Arc<[Unfilled]>,
    places: Range<u32>,
    batches: Arc<[Batch]>,
}

impl Plan {
    pub(super) fn new(
        map: Arc<Map>,
        tables: Arc<[Table]>,
        unfilled: Vec<Unfilled>,
        places: Range<u32>,
    ) -> Self {
        let batches = map.batches(&tables, &places).into();
        Self { map, tables, unfilled: unfilled.into(), places, batches }
    }

    /// The same for those of its layers that are in `layers`, which counts as
    /// [`crate::layout::Layout::layers`] of the producer does.
    ///
    /// Plans for disjoint layers that cover all of them copy together what this plan copies.
    pub fn for_layers(&self, layers: Range<usize>) -> Self {
        let bound = |layer: usize| {
            let all = &self.places;
            u32::try_from(layer).map_or(all.end, |layer| layer.clamp(all.start, all.end))
        };
        let places = bound(layers.start)..bound(layers.end.max(layers.start));
        let batches = self.map.batches(&self.tables, &places).into();
        Self { batches, places, ..self.clone() }
    }

    /// The copies, in an order that follows memory.
    pub fn copies(&self) -> Copies<'_> {
        Copies { plan: self, cursor: Cursor::default() }
    }

    /// The next copy behind `cursor`, which is advanced. Like [`Plan::copies`], for a caller that
    /// keeps the plan and its place in it.
    pub fn next(&self, cursor: &mut Cursor) -> Option<CopyOp> {
        let mut next = None;
        self.drive(cursor, |op| {
            next = Some(op);
            ControlFlow::Break(())
        });
        next
    }

    /// Appends the next copies behind `cursor`, at most `limit` of them. Returns how many: fewer
    /// than `limit` if these were the last.
    ///
    /// The fastest way to a list of descriptors, of which a message has only so many.
    pub fn fill(&self, cursor: &mut Cursor, limit: usize, out: &mut Vec<CopyOp>) -> usize {
        let before = out.len();
        if limit > 0 {
            self.drive(cursor, |op| {
                out.push(op);
                if out.len() - before < limit {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            });
        }
        out.len() - before
    }

    /// Passes copies to `sink` until it stops the walk.
    #[inline]
    fn drive(&self, cursor: &mut Cursor, mut sink: impl FnMut(CopyOp) -> ControlFlow<()>) {
        while let Some(batch) = self.batches.get(cursor.batch) {
            while let Some(kernel) = batch.kernels.get(cursor.kernel) {
                let step = &batch.steps[kernel.step];
                let [outer, inner] = &kernel.loops;
                let outer = outer.offset(cursor.outer.into());
                let inner = inner.offset(cursor.inner.into());
                while let Some(stretch) = cursor.walk.step(kernel, step, &batch.runs) {
                    let op = stretch.at(kernel, outer, inner);
                    match &mut cursor.pending {
                        Some(pending) => {
                            if !pending.join(&op) && sink(mem::replace(pending, op)).is_break() {
                                return;
                            }
                        }
                        none => *none = Some(op),
                    }
                }
                cursor.next_step(kernel);
            }
            (cursor.batch, cursor.kernel) = (cursor.batch + 1, 0);
        }
        if let Some(last) = cursor.pending.take() {
            // There is nothing left to be stopped.
            let _ = sink(last);
        }
    }

    /// Exact number of copies; the largest number for beyond 2⁶⁴. Takes time in proportion to the
    /// blocks, not the copies.
    pub fn len(&self) -> u64 {
        let mut count: u128 = 0;
        let mut last: Option<CopyOp> = None;
        for (batch, kernel) in self.kernels() {
            let Some(sweep) = Sweep::of(batch, kernel) else { continue };
            count += sweep.copies();
            if last.is_some_and(|mut last| last.join(&sweep.first)) {
                count -= 1;
            }
            last = Some(sweep.last_of_all());
        }
        u64::try_from(count).unwrap_or(u64::MAX)
    }

    /// Exact number of bytes to copy; the largest number for beyond 2⁶⁴. Takes time in proportion
    /// to the blocks.
    pub fn bytes(&self) -> u64 {
        self.kernels()
            .map(|(batch, kernel)| {
                let bytes = batch.runs.iter().map(|run| kernel.bytes(run));
                bytes.fold(0, u64::saturating_add).saturating_mul(kernel.repeats())
            })
            .fold(0, u64::saturating_add)
    }

    /// Whether nothing is copied.
    pub fn is_empty(&self) -> bool {
        self.bytes() == 0
    }

    /// Blocks of the consumer that stay unfilled, over all layers.
    pub fn unfilled(&self) -> &[Unfilled] {
        &self.unfilled
    }

    fn kernels(&self) -> impl Iterator<Item = (&Batch, &Kernel)> {
        self.batches
            .iter()
            .flat_map(|batch| batch.kernels.iter().map(move |kernel| (batch, kernel)))
    }
}

impl Kernel {
    /// Whether a unit is copied with all its rows or not at all.
    pub(super) const fn takes_whole(&self) -> bool {
        matches!(self.rows, Rows::Whole)
    }

    /// Bytes of a run, in one step of the loops.
    fn bytes(&self, run: &Run) -> u64 {
        let rows = || run.clip.map(|(skip, take)| self.density.rows(skip, take));
        let unit = match self.rows {
            Rows::Whole if run.begins_late() => 0,
            Rows::Whole => self.len,
            Rows::Prefix { bytes } => {
                rows().map_or(self.len, |(first, end)| u64::from(end - first) * bytes)
            }
            Rows::Each(axis) => {
                let (first, end) = rows().unwrap_or((0, axis.count));
                u64::from(end - first) * self.len
            }
        };
        unit * u64::from(run.units)
    }
}

/// An iterator over a plan's copies.
#[derive(Clone, Debug)]
pub struct Copies<'a> {
    plan: &'a Plan,
    cursor: Cursor,
}

impl Iterator for Copies<'_> {
    type Item = CopyOp;

    #[inline]
    fn next(&mut self) -> Option<CopyOp> {
        self.plan.next(&mut self.cursor)
    }

    fn fold<B, F: FnMut(B, CopyOp) -> B>(mut self, init: B, mut f: F) -> B {
        let mut folded = Some(init);
        self.plan.drive(&mut self.cursor, |op| {
            folded = folded.take().map(|so_far| f(so_far, op));
            ControlFlow::Continue(())
        });
        folded.expect("each step puts back what it took")
    }
}

impl FusedIterator for Copies<'_> {}

/// A place in a plan's copies. It means nothing in another plan.
#[derive(Clone, Debug, Default)]
pub struct Cursor {
    batch: usize,
    kernel: usize,
    /// Steps of the kernel's loops.
    outer: u32,
    inner: u32,
    walk: Walk,
    /// Last copy so far, which the next bytes may extend.
    pending: Option<CopyOp>,
}

impl Cursor {
    /// Advances to the next step of the loops, or to the next kernel.
    fn next_step(&mut self, kernel: &Kernel) {
        self.walk = Walk::default();
        self.inner += 1;
        if self.inner == kernel.loops[1].count {
            self.inner = 0;
            self.outer += 1;
            if self.outer == kernel.loops[0].count {
                self.outer = 0;
                self.kernel += 1;
            }
        }
    }
}

impl Axis {
    /// Distance that `steps` steps cover, at each end.
    #[inline]
    const fn offset(&self, steps: u64) -> (u64, u64) {
        (self.from.wrapping_mul(steps), self.to.wrapping_mul(steps))
    }
}

/// Contiguous bytes of one kernel and one step of its loops, from their beginnings.
#[derive(Clone, Copy)]
struct Stretch {
    from: u64,
    to: u64,
    len: u64,
}

impl Stretch {
    #[inline]
    const fn at(&self, kernel: &Kernel, outer: (u64, u64), inner: (u64, u64)) -> CopyOp {
        let from = kernel.from.wrapping_add(outer.0).wrapping_add(inner.0);
        let to = kernel.to.wrapping_add(outer.1).wrapping_add(inner.1);
        CopyOp {
            from: Spot { region: kernel.from_region, offset: from.wrapping_add(self.from) },
            to: Spot { region: kernel.to_region, offset: to.wrapping_add(self.to) },
            len: self.len,
        }
    }
}

/// A walk over the units of a list of runs.
#[derive(Clone, Debug, Default)]
struct Walk {
    run: usize,
    /// Index of the unit within the run.
    unit: u32,
    /// Index of the row within the unit, if rows are copied one by one.
    row: u32,
    from_block: u32,
    from_unit: u32,
    to_block: u32,
    to_unit: u32,
}

impl Walk {
    #[inline]
    fn step(&mut self, kernel: &Kernel, step: &Step, runs: &[Run]) -> Option<Stretch> {
        loop {
            let run = runs.get(self.run)?;
            if self.unit == 0 && self.row == 0 {
                (self.from_block, self.from_unit) = (run.from_block, run.from_unit);
                (self.to_block, self.to_unit) = (run.to_block, run.to_unit);
            }
            let unit = |block: u32, stride: u64, units: &[u64], unit: u32| {
                u64::from(block) * stride + units[unit as usize]
            };
            let from = unit(self.from_block, step.from_block, &step.from_units, self.from_unit);
            let to = unit(self.to_block, step.to_block, &step.to_units, self.to_unit);
            match kernel.rows {
                Rows::Each(axis) => {
                    let (first, end) = run
                        .clip
                        .map_or((0, axis.count), |(skip, take)| kernel.density.rows(skip, take));
                    let row = first + self.row;
                    if row < end {
                        self.row += 1;
                        let (row_from, row_to) = axis.offset(row.into());
                        return Some(Stretch {
                            from: from.wrapping_add(row_from),
                            to: to.wrapping_add(row_to),
                            len: kernel.len,
                        });
                    }
                    self.row = 0;
                    self.next_unit(run, step);
                }
                Rows::Whole if run.begins_late() => self.next_run(),
                Rows::Prefix { bytes } if run.clip.is_some() => {
                    let (skip, take) = run.clip.unwrap_or_default();
                    let (first, end) = kernel.density.rows(skip, take);
                    self.next_run();
                    let skipped = u64::from(first) * bytes;
                    let len = u64::from(end - first) * bytes;
                    return Some(Stretch { from: from + skipped, to: to + skipped, len });
                }
                Rows::Whole | Rows::Prefix { .. } => {
                    let mut len = kernel.len;
                    if kernel.dense {
                        len *= u64::from(run.units);
                        self.next_run();
                    } else {
                        self.next_unit(run, step);
                    }
                    return Some(Stretch { from, to, len });
                }
            }
        }
    }

    #[inline]
    const fn next_run(&mut self) {
        self.run += 1;
        self.unit = 0;
    }

    #[inline]
    const fn next_unit(&mut self, run: &Run, step: &Step) {
        self.unit += 1;
        if self.unit == run.units {
            return self.next_run();
        }
        self.from_unit += 1;
        if self.from_unit as usize == step.from_units.len() {
            self.from_unit = 0;
            self.from_block += 1;
        }
        self.to_unit += 1;
        if self.to_unit as usize == step.to_units.len() {
            self.to_unit = 0;
            self.to_block += 1;
        }
    }
}

/// A step of a kernel's loops. All other steps are the same at other offsets.
struct Sweep {
    loops: [Axis; 2],
    first: CopyOp,
    last: CopyOp,
    copies: u64,
}

impl Sweep {
    /// Measures one step of the kernel's loops. Returns `None` if it copies nothing.
    fn of(batch: &Batch, kernel: &Kernel) -> Option<Self> {
        let step = &batch.steps[kernel.step];
        let mut walk = Walk::default();
        let mut next = || Some(walk.step(kernel, step, &batch.runs)?.at(kernel, (0, 0), (0, 0)));
        let first = next()?;
        let (mut last, mut copies) = (first, 1);
        while let Some(op) = next() {
            if !last.join(&op) {
                copies += 1;
                last = op;
            }
        }
        Some(Self { loops: kernel.loops, first, last, copies })
    }

    /// Copies of all steps, less those that continue the step before.
    fn copies(&self) -> u128 {
        let [outer, inner] = self.loops;
        let inner_end = inner.offset(u64::from(inner.count) - 1);
        let back = (outer.from.wrapping_sub(inner_end.0), outer.to.wrapping_sub(inner_end.1));
        let joins = |by: (u64, u64)| u128::from({ self.last }.join(&shifted(self.first, by)));
        let (i, j) = (u128::from(outer.count), u128::from(inner.count));
        let joined = i * (j - 1) * joins(inner.offset(1)) + (i - 1) * joins(back);
        u128::from(self.copies) * i * j - joined
    }

    fn last_of_all(&self) -> CopyOp {
        let [outer, inner] = self.loops.map(|axis| axis.offset(u64::from(axis.count) - 1));
        shifted(shifted(self.last, outer), inner)
    }
}

const fn shifted(mut op: CopyOp, by: (u64, u64)) -> CopyOp {
    op.from.offset = op.from.offset.wrapping_add(by.0);
    op.to.offset = op.to.offset.wrapping_add(by.1);
    op
}
