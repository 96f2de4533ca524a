//! Latencies: the median and the 99th percentile of each subject's calls, on a line.

use crate::units;

use super::canvas::{Anchor, Canvas};
use super::scale::Scale;
use super::style::Look;

/// A subject's latencies, in microseconds.
#[derive(Debug)]
pub(crate) struct Dots {
    pub(crate) look: Look,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

const WIDTH: f64 = 860.0;
const LEFT: f64 = 200.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 84.0;
const ROW: f64 = 34.0;
const BOTTOM: f64 = 58.0;

pub(crate) fn draw(title: &str, subtitle: &str, all: &[Dots]) -> Canvas {
    let height = TOP + BOTTOM + ROW * all.len() as f64;
    let mut canvas = Canvas::new(WIDTH, height, title, subtitle);
    let scale = Scale::logarithmic(all.iter().flat_map(|dots| [dots.p50, dots.p99]));
    let x = |value: f64| LEFT + scale.place(value) * (WIDTH - LEFT - RIGHT);
    let bottom = height - BOTTOM;
    for &tick in scale.ticks() {
        canvas.line("grid", (x(tick), TOP - 8.0), (x(tick), bottom));
    }
    for (tick, number) in scale.labels() {
        canvas.text("tick", (x(tick), bottom + 18.0), Anchor::Middle, &number);
    }
    canvas.text("tick small", (WIDTH - 20.0, TOP - 14.0), Anchor::End, "p50 / p99");
    canvas.line("base", (LEFT, bottom), (WIDTH - RIGHT, bottom));
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let axis = "µs (logarithmic): filled p50, hollow p99";
    canvas.text("axis small", (middle, bottom + 40.0), Anchor::Middle, axis);
    for (number, dots) in all.iter().enumerate() {
        let y = TOP + ROW * (number as f64 + 0.5) - 6.0;
        let (class, shape) = (dots.look.class, dots.look.shape);
        let bold = if class == "ours" { "label ours" } else { "label" };
        canvas.text(bold, (LEFT - 16.0, y + 4.5), Anchor::End, dots.look.name);
        canvas.line(&format!("range {class}"), (x(dots.p50), y), (x(dots.p99), y));
        let (p50, p99) = (units::figure(dots.p50), units::figure(dots.p99));
        let says = format!("{}: p99 {p99} µs", dots.look.name);
        canvas.mark(&format!("hollow {class}"), shape, (x(dots.p99), y), &says);
        let says = format!("{}: p50 {p50} µs", dots.look.name);
        canvas.mark(&format!("mark {class}"), shape, (x(dots.p50), y), &says);
        let figures = format!("{p50} / {p99}");
        canvas.text("tick", (WIDTH - 20.0, y + 4.5), Anchor::End, &figures);
    }
    canvas
}
