//! Layouts that no engine has: those of engines, with some numbers changed.

use kvferry_proto::fuzzing::Script;
use kvferry_proto::layout::{Group, Kind, Layer, Layout, LayoutError, Region};

/// The most changes to a pair of layouts.
const CHANGES_MAX: usize = 8;

/// Applies a script's changes to a pair of layouts. Returns each layout after the last change that
/// left it sound.
pub(super) fn changed(pair: &[Layout; 2], script: &mut Script<'_>) -> [Layout; 2] {
    let mut sound = pair.clone();
    let mut parts = pair.each_ref().map(Parts::of);
    for _ in 0..script.below(CHANGES_MAX + 1) {
        let change = Change::read(script);
        for ((parts, sound), changed) in parts.iter_mut().zip(&mut sound).zip(change.ends) {
            if !changed {
                continue;
            }
            parts.apply(&change);
            match parts.layout() {
                Ok(layout) => *sound = layout,
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
    sound
}

/// A change of one number, with the ends at which it applies.
struct Change {
    ends: [bool; 2],
    layer: usize,
    plane: usize,
    number: usize,
    how: usize,
    by: u64,
}

impl Change {
    fn read(script: &mut Script<'_>) -> Self {
        let ends = script.pick(&[[true, true], [true, false], [false, true]]);
        let (layer, plane, number) = (script.below(256), script.below(256), script.below(256));
        let how = script.below(6);
        let by = if how == 5 { script.word() } else { script.short().into() };
        Self { ends, layer, plane, number, how, by }
    }

    const fn of(&self, number: u64) -> u64 {
        match self.how {
            0 => number.wrapping_add(self.by),
            1 => number.wrapping_sub(self.by),
            2 => number.wrapping_mul(self.by),
            3 => number / if self.by == 0 { 2 } else { self.by },
            _ => self.by,
        }
    }
}

/// The regions, groups and layers of a layout.
struct Parts {
    regions: Vec<Region>,
    groups: Vec<Group>,
    layers: Vec<Layer>,
}

impl Parts {
    fn of(layout: &Layout) -> Self {
        Self {
            regions: layout.regions().to_vec(),
            groups: layout.groups().to_vec(),
            layers: layout.layers().to_vec(),
        }
    }

    fn layout(&self) -> Result<Layout, LayoutError> {
        Layout::new(self.regions.clone(), self.groups.clone(), self.layers.clone())
    }

    fn apply(&mut self, change: &Change) {
        let at = change.layer % self.layers.len();
        let layer = &mut self.layers[at];
        let at = layer.group % self.groups.len();
        let group = &mut self.groups[at];
        let at = change.plane % layer.planes.len();
        let plane = &mut layer.planes[at];
        let at = plane.view.region % self.regions.len();
        let region = &mut self.regions[at];
        let long = |number: &mut u64| *number = change.of(*number);
        let short = |number: &mut u32| *number = change.of((*number).into()) as u32;
        let index = |number: &mut usize| *number = change.of(*number as u64) as usize;
        let view = &mut plane.view;
        match change.number % 20 {
            0 => long(&mut region.len),
            1 => long(&mut view.base),
            2 => long(&mut view.block_stride),
            3 => long(&mut view.kernel_stride),
            4 => long(&mut view.head_stride),
            5 => long(&mut view.row_stride),
            6 => short(&mut view.kernel_blocks),
            7 => index(&mut view.region),
            8 => short(&mut plane.rows),
            9 => short(&mut plane.content),
            10 => short(&mut plane.heads.total),
            11 => short(&mut plane.heads.start),
            12 => short(&mut plane.heads.count),
            13 => short(&mut group.block_tokens),
            14 => short(&mut group.blocks),
            15 => short(&mut group.context.rank),
            16 => short(&mut group.context.size),
            17 => short(&mut group.context.interleave),
            18 => index(&mut layer.group),
            _ => match &mut group.kind {
                Kind::Window { tokens } | Kind::Chunk { tokens } => short(tokens),
                other => *other = Kind::Window { tokens: change.by as u32 },
            },
        }
    }
}
