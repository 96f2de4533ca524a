//! Latencies: for each contender the median and the 99th percentile of single calls, on a line.

use crate::units;

use super::canvas::{Anchor, Canvas};
use super::chart::{logarithmic, short};
use super::style::Look;

/// One contender, by its microseconds.
#[derive(Debug)]
pub(super) struct Dots {
    pub(super) look: Look,
    pub(super) p50: f64,
    pub(super) p99: f64,
}

const WIDTH: f64 = 860.0;
const LEFT: f64 = 200.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 84.0;
const ROW: f64 = 34.0;
const BOTTOM: f64 = 58.0;

pub(super) fn draw(title: &str, subtitle: &str, all: &[Dots]) -> Canvas {
    let height = TOP + BOTTOM + ROW * all.len() as f64;
    let mut canvas = Canvas::new(WIDTH, height, title);
    canvas.text("heading", (20.0, 32.0), Anchor::Start, title);
    canvas.text("sub", (20.0, 53.0), Anchor::Start, subtitle);
    let low = all.iter().map(|dots| dots.p50.min(dots.p99)).fold(f64::INFINITY, f64::min);
    let high = all.iter().map(|dots| dots.p50.max(dots.p99)).fold(0.0, f64::max);
    let (ticks, place) = logarithmic(low, high);
    let x = |value: f64| LEFT + place(value) * (WIDTH - LEFT - RIGHT);
    let bottom = height - BOTTOM;
    for (number, &tick) in ticks.iter().enumerate() {
        canvas.line("grid", (x(tick), TOP - 8.0), (x(tick), bottom));
        // With many decades, only the powers of ten have room.
        let power = tick.log10();
        if ticks.len() <= 10 || (power - power.round()).abs() < 1e-9 || number == 0 {
            canvas.text("tick", (x(tick), bottom + 18.0), Anchor::Middle, &short(tick));
        }
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
