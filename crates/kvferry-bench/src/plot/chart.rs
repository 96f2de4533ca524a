//! Figures over the size of a block: one line per subject, the median of its rounds, with whiskers
//! from the first to the third quartile.

use crate::options::Size;
use crate::stats::Spread;
use crate::units;

use super::canvas::{Anchor, Canvas};
use super::scale::Scale;
use super::style::Look;

/// The line of a subject.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) look: Look,
    pub(crate) points: Vec<(Size, Spread)>,
}

/// The vertical axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    FromZero,
    Logarithmic,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 500.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 212.0;
const TOP: f64 = 76.0;
const BOTTOM: f64 = 66.0;
/// Distance between neighbours at the same size, so that their whiskers do not overlap.
const DODGE: f64 = 5.0;
const LABEL_STEP: f64 = 17.0;

pub(crate) fn draw([title, subtitle]: [&str; 2], axis: Axis, lines: &[Line]) -> Canvas {
    let mut canvas = Canvas::new(WIDTH, HEIGHT, title, subtitle);
    let axes = Axes::new(axis, lines);
    axes.draw(&mut canvas);
    // The first line is drawn last, on top.
    for (number, line) in lines.iter().enumerate().rev() {
        axes.line(&mut canvas, line, (number as f64 - (lines.len() - 1) as f64 / 2.0) * DODGE);
    }
    axes.labels(&mut canvas, lines);
    canvas
}

struct Axes {
    sizes: Vec<Size>,
    scale: Scale,
}

impl Axes {
    fn new(axis: Axis, lines: &[Line]) -> Axes {
        let points = || lines.iter().flat_map(|line| &line.points);
        let mut sizes: Vec<Size> = Vec::new();
        points().for_each(|(size, _)| {
            if !sizes.contains(size) {
                sizes.push(*size);
            }
        });
        sizes.sort_by_key(|size| (size.block, size.count));
        let quartiles = points().flat_map(|(_, spread)| [spread.q1, spread.q3]);
        let scale = match axis {
            Axis::FromZero => Scale::from_zero(quartiles.fold(0.0, f64::max)),
            Axis::Logarithmic => Scale::logarithmic(quartiles),
        };
        Axes { sizes, scale }
    }

    /// Sizes differ by factors, so the axis is logarithmic.
    fn x(&self, size: &Size) -> f64 {
        let at = |size: &Size| (size.block as f64).log2();
        let (first, last) = (at(&self.sizes[0]), at(&self.sizes[self.sizes.len() - 1]));
        let inner = (LEFT + 46.0, WIDTH - RIGHT - 34.0);
        if first == last {
            return (inner.0 + inner.1) / 2.0;
        }
        inner.0 + (at(size) - first) / (last - first) * (inner.1 - inner.0)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.scale.place(value) * (HEIGHT - BOTTOM - TOP)
    }

    fn draw(&self, canvas: &mut Canvas) {
        let (left, right, bottom) = (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (tick, number) in self.scale.labels() {
            canvas.level((left, right), self.y(tick), &number);
        }
        canvas.line("base", (left, bottom), (right, bottom));
        for size in &self.sizes {
            let x = self.x(size);
            canvas.line("base", (x, bottom), (x, bottom + 5.0));
            let block = units::bytes(size.block as u64);
            canvas.text("tick", (x, bottom + 21.0), Anchor::Middle, &block);
            let count = format!("× {}", size.count);
            canvas.text("tick small", (x, bottom + 36.0), Anchor::Middle, &count);
        }
        let middle = (left + right) / 2.0;
        let axis = "size of a block (logarithmic) × blocks in a batch";
        canvas.text("axis small", (middle, bottom + 55.0), Anchor::Middle, axis);
    }

    fn line(&self, canvas: &mut Canvas, line: &Line, dodge: f64) {
        let class = line.look.class;
        let at = |(size, spread): &(Size, Spread)| (self.x(size) + dodge, self.y(spread.median));
        let points: Vec<(f64, f64)> = line.points.iter().map(at).collect();
        canvas.polyline(class, &points);
        for ((size, spread), &(x, y)) in line.points.iter().zip(&points) {
            let (top, bottom) = (self.y(spread.q3), self.y(spread.q1));
            let whisker = format!("whisker {class}");
            canvas.line(&whisker, (x, top), (x, bottom));
            for end in [top, bottom] {
                canvas.line(&whisker, (x - 2.2, end), (x + 2.2, end));
            }
            let says = format!(
                "{}, {} × {}: {} [{} – {}]",
                line.look.name,
                units::bytes(size.block as u64),
                size.count,
                units::figure(spread.median),
                units::figure(spread.q1),
                units::figure(spread.q3)
            );
            // Points of limits have no marks.
            let mark = if line.look.is_limit() { "point" } else { "mark" };
            canvas.mark(&format!("{mark} {class}"), line.look.shape, (x, y), &says);
        }
    }

    /// Names beside the ends of the lines, moved apart where they would overlap.
    fn labels(&self, canvas: &mut Canvas, lines: &[Line]) {
        let mut ends: Vec<(&Line, f64, f64)> = lines
            .iter()
            .filter_map(|line| {
                let (_, spread) = line.points.last()?;
                let y = self.y(spread.median);
                Some((line, y, y))
            })
            .collect();
        ends.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut labels: Vec<f64> = ends.iter().map(|end| end.2).collect();
        spread_out(&mut labels, TOP + 4.0, HEIGHT - BOTTOM);
        let right = WIDTH - RIGHT;
        for ((line, y, _), label) in ends.into_iter().zip(labels) {
            let class = line.look.class;
            let end = line.points.last().expect("lines without points were left out");
            let from = self.x(&end.0) + 20.0;
            canvas.line(&format!("leader {class}"), (from, y), (right + 8.0, label));
            canvas.polyline(class, &[(right + 12.0, label), (right + 34.0, label)]);
            if !line.look.is_limit() {
                let at = (right + 23.0, label);
                canvas.mark(&format!("mark {class}"), line.look.shape, at, line.look.name);
            }
            let bold = if class == "ours" { "label ours" } else { "label" };
            canvas.text(bold, (right + 41.0, label + 4.5), Anchor::Start, line.look.name);
        }
    }
}

/// Moves sorted places at least a line apart, and no farther than necessary.
fn spread_out(places: &mut [f64], top: f64, bottom: f64) {
    for _ in 0..200 {
        let mut moved = false;
        for at in 1..places.len() {
            let overlap = LABEL_STEP - (places[at] - places[at - 1]);
            if overlap > 0.01 {
                places[at - 1] -= overlap / 2.0;
                places[at] += overlap / 2.0;
                moved = true;
            }
        }
        if let Some(first) = places.first_mut() {
            *first = first.max(top);
        }
        if let Some(last) = places.last_mut() {
            *last = last.min(bottom);
        }
        if !moved {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_do_not_overlap_and_stay_within() {
        let mut places = vec![100.0, 100.0, 101.0, 300.0, 399.0, 400.0];
        spread_out(&mut places, 90.0, 400.0);
        for two in places.windows(2) {
            assert!(two[1] - two[0] > LABEL_STEP - 1.0, "{places:?}");
        }
        assert!(places[0] >= 89.0 && places[5] <= 401.0 && (places[3] - 300.0).abs() < 1.0);
    }
}
