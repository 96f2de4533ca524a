//! The map between two layouts: a compact program that any block table can be applied to.

use super::ask::{self, Ask, PlanError};
use super::copies::{Batch, Plan, Run, Table};
use super::kernel::{Axis, Form, Kernel, Step, Template, compile};
use super::topology::Share;
use crate::id::RegionId;
use crate::layout::{
    self, Context, Difference, Group, Kind, Layer, Layout, Mismatch, MismatchSides, Plane,
    RowDensity, gcd,
};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// The most units that blocks of all planes may fall into together: one per plane being usual, and a
/// thousand where tokens are dealt out one by one.
const PIECES_MAX: u64 = 1 << 22;

/// Turns blocks of one producer rank into blocks of one consumer rank.
///
/// It depends on the two layouts and what they share, so it is made once for a pair of peers and
/// kept; [`Map::plan`] applies it to the block tables of a request.
#[derive(Debug)]
pub struct Map {
    pub(super) producer: Vec<Group>,
    pub(super) consumer: Vec<Group>,
    pub(super) pairs: Vec<Pair>,
    layers: u32,
    pieces: u64,
}

/// The copies from one group of the producer to one of the consumer.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) from: usize,
    pub(super) to: usize,
    /// Tokens that can only be written together: those of the longest rows.
    pub(super) granule: u32,
    pub(super) sections: Vec<Section>,
}

/// Planes that are copied in units of the same size.
#[derive(Debug)]
pub(super) struct Section {
    /// Tokens of a unit: the largest piece that lies in one kernel block of one rank at both ends.
    /// Of a state, 1: the whole state is one unit.
    pub(super) unit: u32,
    steps: Arc<[Step]>,
    templates: Vec<Template>,
    /// Kernels for all layers.
    kernels: Arc<[Kernel]>,
    order: Vec<usize>,
}

impl Map {
    /// The map for what a consumer rank reads from a producer rank.
    ///
    /// # Errors
    /// The layouts do not fit, or do not hold what the share says.
    pub fn new(producer: &Layout, consumer: &Layout, share: &Share) -> Result<Self, Mismatch> {
        layout::compatible(producer, consumer)?;
        let (ours, theirs) = (places(producer), places(consumer));
        let mut pairs: BTreeMap<(usize, usize), PairBuilder> = BTreeMap::new();
        let mut pieces = 0;
        for (name, role, heads) in share.items() {
            let at = (ours.get(name).copied(), theirs.get(name).copied());
            let (first, second) = (producer.layers().len(), consumer.layers().len());
            let (place, other) = match at {
                (Some(place), Some(other)) => (place, other),
                (None, _) => {
                    return Err(refuse(name, role, Difference::OnlySecond { first, second }));
                }
                (_, None) => {
                    return Err(refuse(name, role, Difference::OnlyFirst { first, second }));
                }
            };
            let from = Side::of(producer, place, role, &heads)?;
            let to = Side::of(consumer, other, role, &heads)?;
            let pair = pairs.entry((from.layer.group, to.layer.group)).or_default();
            // Of all planes, also of those that come from another rank.
            pair.granule = to.layer.planes.iter().fold(pair.granule.max(1), |granule, plane| {
                let tokens = RowDensity::of(plane, to.group).tokens.max(1);
                granule / gcd(granule, tokens) * tokens
            });
            let unit = unit(&from, &to);
            pieces += from.pieces(unit) + to.pieces(unit);
            if pieces > PIECES_MAX {
                let (what, count, limit) = ("pieces of blocks", pieces, PIECES_MAX);
                return Err(refuse(name, role, Difference::TooMany { what, count, limit }));
            }
            pair.add(place as u32, role, &heads, unit, &from, &to);
        }
        let layers = producer.layers().len() as u32;
        let pairs = pairs.into_iter().map(|((from, to), pair)| pair.finish(from, to, layers));
        Ok(Self {
            producer: producer.groups().to_vec(),
            consumer: consumer.groups().to_vec(),
            pairs: pairs.collect(),
            layers,
            pieces,
        })
    }

    /// Units that blocks of all planes fall into. Making the map takes time in proportion to them.
    pub const fn pieces(&self) -> u64 {
        self.pieces
    }

    /// Bytes that the positions of units take. Planes that are alike share them.
    pub fn size(&self) -> usize {
        let steps = self.pairs.iter().flat_map(|it| &it.sections).flat_map(|it| &*it.steps);
        steps.map(|it| size_of_val(&*it.from_units) + size_of_val(&*it.to_units)).sum()
    }

    /// Layers of the producer rank: plans select them by their place in [`Layout::layers`].
    pub const fn layers(&self) -> usize {
        self.layers as usize
    }

    /// Whether nothing goes from this producer rank to this consumer rank.
    pub const fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// The plan for a request, or the part of it that `ask` names, with all layers.
    ///
    /// # Errors
    /// The block tables are not what the layouts need, or the producer does not list what the
    /// consumer asks for.
    pub fn plan(self: &Arc<Self>, ask: &Ask<'_>) -> Result<Plan, PlanError> {
        let (tables, unfilled) = ask::tables(self, ask)?;
        Ok(Plan::new(Arc::clone(self), tables.into(), unfilled, 0..self.layers))
    }

    /// The batches that send these tables' blocks of the layers at `places`.
    pub(super) fn batches(&self, tables: &[Table], places: &Range<u32>) -> Vec<Batch> {
        let mut batches = Vec::new();
        for table in tables {
            let section = &self.pairs[table.pair].sections[table.section];
            let partial;
            let (kernels, order) = if *places == (0..self.layers) {
                (Arc::clone(&section.kernels), &section.order)
            } else {
                let (kernels, order) = compile(&section.templates, &section.steps, places, None);
                partial = order;
                (kernels.into(), &partial)
            };
            // A unit of which the first tokens are not wanted, and which kernels take as a whole,
            // has kernels of its own.
            for run in table.runs.iter().filter(|run| run.begins_late()) {
                let whole = kernels.iter().filter(|kernel| kernel.takes_whole());
                let whole = whole.flat_map(|kernel| &order[kernel.made_of.0..kernel.made_of.1]);
                let templates: Vec<_> =
                    whole.map(|&template| section.templates[template].clone()).collect();
                let (kernels, _) = compile(&templates, &section.steps, places, run.clip);
                let (kernels, runs) = (kernels.into(), Arc::new([Run { clip: None, ..*run }]));
                batches.push(Batch { kernels, steps: Arc::clone(&section.steps), runs });
            }
            let (steps, runs) = (Arc::clone(&section.steps), Arc::clone(&table.runs));
            batches.push(Batch { kernels, steps, runs });
        }
        batches
    }
}

/// A plane at one of the two ends, with its layer and group.
struct Side<'a> {
    layer: &'a Layer,
    group: &'a Group,
    plane: &'a Plane,
    region: RegionId,
    /// Kernel blocks and the strides of kernel block and row, in the simplest form that says the
    /// same.
    split: (u32, u64, u64),
}

impl<'a> Side<'a> {
    fn of(
        layout: &'a Layout,
        place: usize,
        role: &str,
        heads: &Range<u32>,
    ) -> Result<Self, Mismatch> {
        let layer = &layout.layers()[place];
        let plane = layer.planes.iter().find(|plane| plane.role == role);
        let wanted = (heads.start, heads.end.saturating_sub(heads.start));
        let held = plane.map_or(0..0, |plane| plane.heads.range());
        let inside = held.start <= heads.start && heads.end <= held.end && !heads.is_empty();
        let Some(plane) = plane.filter(|_| inside) else {
            let held = (held.start, held.end - held.start);
            return Err(refuse(&layer.name, role, Difference::NotHeld { wanted, held }));
        };
        let view = &plane.view;
        let rows = plane.rows / view.kernel_blocks;
        let split = if rows == 1 {
            (1, 0, view.kernel_stride)
        } else if view.kernel_blocks == 1
            || u64::from(rows).checked_mul(view.row_stride) == Some(view.kernel_stride)
        {
            (1, 0, view.row_stride)
        } else {
            (view.kernel_blocks, view.kernel_stride, view.row_stride)
        };
        let (group, region) = (&layout.groups()[layer.group], layout.regions()[view.region].id);
        Ok(Self { layer, group, plane, region, split })
    }

    /// Tokens of a kernel block.
    const fn kernel_tokens(&self) -> u32 {
        self.group.block_tokens / self.split.0
    }

    /// Units of a block.
    fn pieces(&self, unit: u32) -> u64 {
        let state = self.group.kind == Kind::State;
        if state { 1 } else { u64::from(self.group.block_tokens / unit) }
    }

    /// Offset of head `head` of the model, in bytes from the region's start.
    const fn base(&self, head: u32) -> u64 {
        let head = (head - self.plane.heads.start) as u64;
        self.plane.view.base + if head == 0 { 0 } else { head * self.plane.view.head_stride }
    }

    /// Offset of each unit from the start of its block, in bytes.
    fn units(&self, unit: u32, density: RowDensity) -> Box<[u64]> {
        if density.tokens == 0 {
            return Box::new([0]);
        }
        let (_, kernel_stride, row_stride) = self.split;
        let offset = |token: u32| {
            let kernel = u64::from(token / self.kernel_tokens());
            let (row, _) = density.rows(token % self.kernel_tokens(), 0);
            kernel * kernel_stride + u64::from(row) * row_stride
        };
        (0..self.group.block_tokens / unit).map(|n| offset(n * unit)).collect()
    }
}

#[derive(Default)]
struct PairBuilder {
    granule: u32,
    sections: BTreeMap<u32, SectionBuilder>,
}

#[derive(Default)]
struct SectionBuilder {
    steps: layout::Table<Step>,
    /// Places and beginnings of layers.
    forms: BTreeMap<Form, Vec<(u32, u64, u64)>>,
}

impl PairBuilder {
    /// Adds heads of a plane.
    fn add(
        &mut self,
        place: u32,
        role: &str,
        heads: &Range<u32>,
        unit: u32,
        from: &Side<'_>,
        to: &Side<'_>,
    ) {
        let density = RowDensity::of(from.plane, from.group);
        let section = self.sections.entry(unit).or_default();
        let step = section.steps.index(Step {
            from_block: from.plane.view.block_stride,
            to_block: to.plane.view.block_stride,
            from_units: from.units(unit, density),
            to_units: to.units(unit, density),
        });
        let rows = density.rows(0, unit).1;
        let form = Form {
            role: role.to_owned(),
            from: from.region,
            to: to.region,
            heads: Axis::new(
                heads.end - heads.start,
                from.plane.view.head_stride,
                to.plane.view.head_stride,
            ),
            rows: Axis::new(rows, from.split.2, to.split.2),
            density,
            content: from.plane.content.into(),
            step,
        };
        let at = (place, from.base(heads.start), to.base(heads.start));
        section.forms.entry(form).or_default().push(at);
    }

    fn finish(self, from: usize, to: usize, layers: u32) -> Pair {
        let sections = self.sections.into_iter().map(|(unit, section)| {
            let mut templates = Vec::new();
            for (form, mut at) in section.forms {
                at.sort_unstable();
                evenly_spaced(&form, &at, &mut templates);
            }
            let steps: Arc<[Step]> = section.steps.values.into();
            let (kernels, order) = compile(&templates, &steps, &(0..layers), None);
            Section { unit, steps, templates, kernels: kernels.into(), order }
        });
        Pair { from, to, granule: self.granule, sections: sections.collect() }
    }
}

/// The largest unit of both ends' tokens: within one kernel block and one context-parallel run.
fn unit(from: &Side<'_>, to: &Side<'_>) -> u32 {
    if from.group.kind == Kind::State {
        return 1;
    }
    let (a, b) = (Context::of(from.group), Context::of(to.group));
    let kernels = gcd(from.kernel_tokens(), to.kernel_tokens());
    // Ranks that hold the same tokens number them alike, however they were dealt out.
    if a == b { kernels } else { gcd(kernels, gcd(a.run, b.run)) }
}

/// Cuts layers into templates, within each of which the next layer is always as far away.
fn evenly_spaced(form: &Form, mut layers: &[(u32, u64, u64)], templates: &mut Vec<Template>) {
    let apart =
        |a: &(u32, u64, u64), b: &(u32, u64, u64)| (b.1.wrapping_sub(a.1), b.2.wrapping_sub(a.2));
    while let Some(first) = layers.first() {
        let stride = layers.get(1).map_or((0, 0), |second| apart(first, second));
        let pairs = layers.windows(2).take_while(|pair| apart(&pair[0], &pair[1]) == stride);
        let (even, rest) = layers.split_at(1 + pairs.count());
        templates.push(Template {
            form: form.clone(),
            places: even.iter().map(|&(place, ..)| place).collect(),
            from: first.1,
            to: first.2,
            layers: Axis { count: even.len() as u32, from: stride.0, to: stride.1 },
        });
        layers = rest;
    }
}

fn places(layout: &Layout) -> HashMap<&str, usize> {
    layout.layers().iter().zip(0..).map(|(layer, at)| (layer.name.as_str(), at)).collect()
}

fn refuse(layer: &str, plane: &str, difference: Difference) -> Mismatch {
    Mismatch::new(MismatchSides::Ends, layer, plane, difference)
}
