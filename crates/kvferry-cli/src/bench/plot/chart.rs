//! Figures over the size of a block: one line per contender, the median of its rounds, with whiskers
//! from the first to the third quartile.

use crate::cli::Size;
use crate::stats::Spread;
use crate::units;

use super::canvas::{Anchor, Canvas};
use super::style::Look;

/// One contender's line.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) look: Look,
    pub(super) points: Vec<(Size, Spread)>,
}

/// How the figures go up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    FromZero,
    Logarithmic,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 500.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 212.0;
const TOP: f64 = 76.0;
const BOTTOM: f64 = 66.0;
/// Between neighbours at the same size, so that their whiskers can be told apart.
const DODGE: f64 = 5.0;
const LABEL_STEP: f64 = 17.0;

/// Words around the lines.
#[derive(Debug)]
pub(super) struct Words<'a> {
    pub(super) title: &'a str,
    pub(super) subtitle: &'a str,
}

pub(super) fn draw(words: &Words<'_>, scale: Scale, lines: &[Line]) -> Canvas {
    let mut canvas = Canvas::new(WIDTH, HEIGHT, words.title);
    canvas.text("heading", (20.0, 32.0), Anchor::Start, words.title);
    canvas.text("sub", (20.0, 53.0), Anchor::Start, words.subtitle);
    let axes = Axes::new(scale, lines);
    axes.draw(&mut canvas);
    // What matters most is drawn last, on top.
    for (number, line) in lines.iter().enumerate().rev() {
        axes.line(&mut canvas, line, (number as f64 - (lines.len() - 1) as f64 / 2.0) * DODGE);
    }
    axes.labels(&mut canvas, lines);
    canvas
}

struct Axes {
    sizes: Vec<Size>,
    scale: Scale,
    ticks: Vec<f64>,
    low: f64,
    high: f64,
}

impl Axes {
    fn new(scale: Scale, lines: &[Line]) -> Axes {
        let points = || lines.iter().flat_map(|line| &line.points);
        let mut sizes: Vec<Size> = Vec::new();
        points().for_each(|(size, _)| {
            if !sizes.contains(size) {
                sizes.push(*size);
            }
        });
        sizes.sort_by_key(|size| (size.block, size.count));
        let top = points().map(|(_, spread)| spread.q3).fold(0.0, f64::max);
        let bottom = points().map(|(_, spread)| spread.q1).fold(f64::INFINITY, f64::min);
        let ticks = match scale {
            Scale::FromZero => linear_ticks(top),
            Scale::Logarithmic => logarithmic_ticks(bottom, top),
        };
        let (low, high) = (ticks[0], *ticks.last().expect("there are two ticks at least"));
        Axes { sizes, scale, ticks, low, high }
    }

    /// Sizes are a factor apart, so they are drawn by their logarithm.
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
        let part = match self.scale {
            Scale::FromZero => value / self.high,
            Scale::Logarithmic => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        HEIGHT - BOTTOM - part * (HEIGHT - BOTTOM - TOP)
    }

    fn draw(&self, canvas: &mut Canvas) {
        let (left, right, bottom) = (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM);
        for &tick in &self.ticks {
            let y = self.y(tick);
            canvas.line("grid", (left, y), (right, y));
            canvas.text("tick", (left - 8.0, y + 4.0), Anchor::End, &short(tick));
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
            // A limit is a line to be near to, not one more that takes part.
            let mark = if line.look.is_limit() { "point" } else { "mark" };
            canvas.mark(&format!("{mark} {class}"), line.look.shape, (x, y), &says);
        }
    }

    /// Beside the ends of the lines, moved apart where they would overlap.
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

/// Sorted places, at least a line apart, as near to where they were as that allows.
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

/// Zero, and round steps to above `top`.
pub(crate) fn linear_ticks(top: f64) -> Vec<f64> {
    let rough = (top / 6.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|of| of * power).into_iter().find(|&s| s >= rough);
    let step = step.expect("ten times the power is above");
    let steps = (top / step).ceil().max(1.0) as usize;
    (0..=steps).map(|at| at as f64 * step).collect()
}

/// 1, 2, 5, 10, … around both.
fn logarithmic_ticks(bottom: f64, top: f64) -> Vec<f64> {
    let (bottom, top) = (bottom.max(1e-9), top.max(2e-9));
    let from = bottom.log10().floor() as i32;
    let to = top.log10().ceil() as i32;
    let all: Vec<f64> =
        (from..=to).flat_map(|power| [1.0, 2.0, 5.0].map(|of| of * 10f64.powi(power))).collect();
    let first = all.iter().rposition(|&tick| tick <= bottom).unwrap_or(0);
    let last = all.iter().position(|&tick| tick >= top).unwrap_or(all.len() - 1);
    all[first..=last.max(first + 1)].to_vec()
}

/// A tick's number without zeros that say nothing.
pub(crate) fn short(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// Ticks and a place between 0 and 1 for values on a logarithmic axis.
pub(crate) fn logarithmic(bottom: f64, top: f64) -> (Vec<f64>, impl Fn(f64) -> f64) {
    let ticks = logarithmic_ticks(bottom, top);
    let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
    (ticks, move |value: f64| (value / low).ln() / (high / low).ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_hold_every_value_and_are_round() {
        assert_eq!(linear_ticks(5.6), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(linear_ticks(0.0).len(), 2);
        assert_eq!(logarithmic_ticks(0.3, 7.0), [0.2, 0.5, 1.0, 2.0, 5.0, 10.0]);
        assert_eq!(logarithmic_ticks(1.0, 1.0), [1.0, 2.0]);
        assert_eq!(
            (short(0.25), short(10.0), short(0.0)),
            ("0.25".into(), "10".into(), "0".into())
        );
    }

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
