//! Place of each row, found one row at a time: the oracle for plans.

use super::request::Request;
use crate::decoders::{greatest_common_divisor, least_common_multiple};
use kvferry_proto::RegionId;
use kvferry_proto::layout::{Group, Kind, Layer, Layout, Plane};
use kvferry_proto::plan::Unfilled;
use std::collections::BTreeMap;
use std::ops::Range;

/// A byte's region and offset.
pub(super) type Place = (RegionId, u64);

/// Bytes that are moved, by the regions and how far apart both ends are, as ranges of the
/// consumer's region.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Moves(BTreeMap<(RegionId, RegionId, u64), Vec<(u64, u64)>>);

impl Moves {
    pub(super) fn add(&mut self, from: Place, to: Place, len: u64) {
        let apart = to.1.wrapping_sub(from.1);
        self.0.entry((from.0, to.0, apart)).or_default().push((to.1, to.1 + len));
    }

    /// Merges ranges that touch or overlap.
    pub(super) fn merged(mut self) -> Self {
        for ranges in self.0.values_mut() {
            ranges.sort_unstable();
            ranges.dedup_by(|next, last| {
                let meets = next.0 <= last.1;
                if meets {
                    last.1 = last.1.max(next.1);
                }
                meets
            });
        }
        self
    }

    pub(super) fn and(mut self, other: Self) -> Self {
        for (apart, ranges) in other.0 {
            self.0.entry(apart).or_default().extend(ranges);
        }
        self.merged()
    }

    pub(super) fn bytes(&self) -> u128 {
        self.0.values().flatten().map(|(start, end)| u128::from(end - start)).sum()
    }

    /// Whether all of `other` is here, if both are merged.
    pub(super) fn covers(&self, other: &Self) -> bool {
        other.0.iter().all(|(apart, ranges)| {
            let ours = self.0.get(apart).map(Vec::as_slice).unwrap_or_default();
            ranges.iter().all(|&(start, end)| {
                let next = ours.partition_point(|&(ours, _)| ours <= start);
                ours[..next].last().is_some_and(|&(_, ours)| end <= ours)
            })
        })
    }
}

/// A plane at one end.
#[derive(Clone, Copy)]
struct Side<'a> {
    layout: &'a Layout,
    group: usize,
    plane: &'a Plane,
}

impl<'a> Side<'a> {
    fn of((layout, layer): (&'a Layout, &'a Layer), role: &str) -> Option<Self> {
        let plane = layer.planes.iter().find(|plane| plane.role == role)?;
        Some(Self { layout, group: layer.group, plane })
    }

    fn group(&self) -> &'a Group {
        &self.layout.groups()[self.group]
    }

    fn tokens(&self) -> u64 {
        self.group().block_tokens.into()
    }

    /// Rows for tokens, in lowest terms.
    fn density(&self) -> (u64, u64) {
        let (rows, tokens) = (u64::from(self.plane.rows), self.tokens());
        let common = greatest_common_divisor(rows, tokens);
        (rows / common, tokens / common)
    }

    fn place(&self, id: u32, head: u32, row: u64) -> Place {
        let view = &self.plane.view;
        let kernel_rows = u64::from(self.plane.rows / view.kernel_blocks);
        let at = |steps: u64, stride: u64| steps.checked_mul(stride).expect("in the region");
        let offset = view.base
            + at(id.into(), view.block_stride)
            + at(row / kernel_rows, view.kernel_stride)
            + at((head - self.plane.heads.start).into(), view.head_stride)
            + at(row % kernel_rows, view.row_stride);
        (self.layout.regions()[view.region].id, offset)
    }

    /// Tokens of a run that is dealt to one rank.
    fn run(&self) -> u64 {
        match self.group().context.interleave {
            0 => self.tokens(),
            _ if self.group().context.size == 1 => self.tokens(),
            run => run.into(),
        }
    }

    /// The token of the request that is the `local`-th of the rank.
    fn token(&self, local: u64) -> u64 {
        let (run, context) = (self.run(), self.group().context);
        (local / run * u64::from(context.size) + u64::from(context.rank)) * run + local % run
    }
}

/// A row of a consumer's block.
pub(super) struct Row {
    /// Index of the block among the request's blocks.
    block: u64,
    /// The block's id, and which of its rows.
    to: (u32, u64),
    /// The same at the producer; `None` if it lacks the block.
    from: Option<(u32, u64)>,
    /// Whether the row is asked for, and not only not to be left alone.
    pub(super) wanted: bool,
    /// End of the row's tokens that are asked for.
    after: u64,
}

/// Heads of a plane that both ends have.
pub(super) struct Common<'a> {
    from: Side<'a>,
    to: Side<'a>,
    /// Layer of the consumer.
    layer: &'a Layer,
    heads: Range<u32>,
}

impl<'a> Common<'a> {
    pub(super) fn of(
        from: (&'a Layout, &'a Layer),
        to: (&'a Layout, &'a Layer),
        role: &str,
    ) -> Option<Self> {
        let layer = to.1;
        let (from, to) = (Side::of(from, role)?, Side::of(to, role)?);
        let (a, b) = (from.plane.heads.range(), to.plane.heads.range());
        let heads = a.start.max(b.start)..a.end.min(b.end);
        (!heads.is_empty()).then_some(Self { from, to, layer, heads })
    }

    pub(super) fn groups(&self) -> (usize, usize) {
        (self.from.group, self.to.group)
    }

    pub(super) fn content(&self) -> u64 {
        self.to.plane.content.into()
    }

    /// Tokens that are written together if those in a row are, in all planes of the layer.
    pub(super) fn row_tokens(&self) -> u64 {
        let planes = self.layer.planes.iter().map(|plane| Side { plane, ..self.to });
        planes.map(|side| side.density().1).fold(1, least_common_multiple)
    }

    /// Rows of these heads in the blocks that the consumer lists.
    pub(super) fn listed_rows(&self, request: &Request) -> u128 {
        let blocks = request.consumer[self.to.group].len() as u128;
        blocks * self.heads.len() as u128 * u128::from(self.to.plane.rows)
    }

    pub(super) fn listed_bytes(&self, request: &Request) -> u128 {
        self.listed_rows(request) * u128::from(self.content())
    }

    /// The rows of the consumer's blocks that come from this producer and may be sent.
    pub(super) fn rows(&self, request: &Request, granule: u64) -> Vec<Row> {
        let blocks = request.consumer[self.to.group].there(self.to.group()).into_iter();
        let rows = 0..u64::from(self.to.plane.rows);
        blocks
            .flat_map(|to| rows.clone().filter_map(move |row| self.row(request, granule, to, row)))
            .collect()
    }

    /// A row of a consumer's block, of that place in the request and id; `None` if it is another
    /// producer's or must not be sent.
    fn row(&self, request: &Request, granule: u64, to: (u64, u32), row: u64) -> Option<Row> {
        let (block, id) = to;
        let (group, table) = (self.from.group(), &request.producer[self.from.group]);
        let Range { start, end } = request.tokens;
        if group.kind == Kind::State {
            let from = table.there(group).pop().map(|(_, id)| (id, row));
            return Some(Row { block, to: (id, row), from, wanted: true, after: end });
        }
        let (rows, tokens) = self.to.density();
        let (together, within) = (row / rows, row % rows);
        let local = block * self.to.tokens();
        if self.to.token(local) >= end {
            return None;
        }
        let token = self.to.token(local + together * tokens);
        let first = token + within * tokens / rows;
        let after = token + ((within + 1) * tokens).div_ceil(rows);
        let local = group.local_tokens(token);
        let held = group.local_tokens(token + 1) > local;
        if !held || after <= start - start % granule {
            return None;
        }
        let from = table.id(group, local / self.from.tokens());
        let from = from.map(|id| (id, local % self.from.tokens() / tokens * rows + within));
        Some(Row { block, to: (id, row), from, wanted: first < end, after: after.min(end) })
    }

    /// Source and destination of each head of a row.
    pub(super) fn places(&self, row: &Row) -> impl Iterator<Item = (Place, Place)> {
        let (to_id, to_row) = row.to;
        let from = row.from.into_iter();
        from.flat_map(move |(id, row)| {
            let place =
                move |head| (self.from.place(id, head, row), self.to.place(to_id, head, to_row));
            self.heads.clone().map(place)
        })
    }

    /// Asserts that each block of these rows is written once, and that missing rows are skipped and
    /// their blocks reported as unfilled.
    pub(super) fn check(&self, rows: &[Row], request: &Request, unfilled: &[Unfilled]) {
        let wanted = || rows.iter().filter(|row| row.wanted);
        let mut blocks: Vec<(u32, u64)> = wanted().map(|row| (row.to.0, row.block)).collect();
        blocks.sort_unstable();
        blocks.dedup();
        assert!(blocks.is_sorted_by(|a, b| a.0 < b.0), "a block is written twice: {blocks:?}");
        let group = self.to.group;
        let horizon = self.to.group().kind.horizon(request.tokens.end);
        for row in wanted().filter(|row| row.from.is_none()) {
            assert!(row.after <= horizon, "token {} is not there", row.after - 1);
            assert!(unfilled.contains(&Unfilled { group, block: row.block }));
        }
    }
}
