//! Two values per column, side by side: two marks on a line, or a bar below a limit.

use crate::units;

use super::canvas::{Anchor, Canvas};
use super::scale::Scale;

/// A column's name below the axis, and its two values, both above zero.
pub type Column = (String, [f64; 2]);

/// Words around the columns.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the fields are the parts of a picture")]
pub struct Words<'a> {
    pub title: &'a str,
    pub subtitle: &'a str,
    /// Unit of the values.
    pub unit: &'a str,
    /// Names of the two values.
    pub legend: [&'a str; 2],
    /// Title of the axis below the columns.
    pub axis: &'a str,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 92.0;
const BOTTOM: f64 = 64.0;
/// Vertical position of the legend.
const LEGEND: f64 = TOP - 20.0;
/// Width of a character of the legend, about.
const CHARACTER: f64 = 6.6;
/// The shapes of marks.
const CIRCLE: usize = 0;
const SQUARE: usize = 3;
/// Distance between a mark and the figure beside it.
const BESIDE: f64 = 11.0;
const BAR: f64 = 34.0;

/// A filled and a hollow mark per column, on a line between them; logarithmic.
pub fn ranges(words: &Words<'_>, columns: &[Column]) -> Canvas {
    let scale = Scale::logarithmic(columns.iter().flat_map(|(_, values)| *values));
    let mut canvas = framed(words, &scale);
    let mut at = LEFT;
    for (class, text) in ["mark ours", "hollow limit"].into_iter().zip(words.legend) {
        canvas.mark(class, CIRCLE, (at + 6.0, LEGEND), text);
        at = legend_text(&mut canvas, at + 18.0, text);
    }
    for (number, (name, values)) in columns.iter().enumerate() {
        let x = column(&mut canvas, number, columns.len(), name);
        let [filled, hollow] = values.map(|value| y(&scale, value));
        let [filled_text, hollow_text] = values.map(units::figure);
        canvas.line("range limit", (x, filled), (x, hollow));
        let says = |what: &str, text: &str| format!("{name}: {what} {text} {}", words.unit);
        canvas.mark("hollow limit", CIRCLE, (x, hollow), &says(words.legend[1], &hollow_text));
        canvas.mark("mark ours", CIRCLE, (x, filled), &says(words.legend[0], &filled_text));
        let [filled, hollow] = apart(filled, hollow);
        canvas.text("value", (x + BESIDE, hollow + 4.0), Anchor::Start, &hollow_text);
        canvas.text("value label ours", (x + BESIDE, filled + 4.0), Anchor::Start, &filled_text);
    }
    canvas
}

/// A bar per column for the first value, and a dashed line for the second, its limit; from zero.
pub fn bars(words: &Words<'_>, columns: &[Column]) -> Canvas {
    let all = columns.iter().flat_map(|(_, values)| *values);
    let scale = Scale::from_zero(all.fold(0.0, f64::max));
    let mut canvas = framed(words, &scale);
    canvas.mark("mark ours", SQUARE, (LEFT + 6.0, LEGEND), words.legend[0]);
    let at = legend_text(&mut canvas, LEFT + 18.0, words.legend[0]);
    canvas.line("cap", (at, LEGEND), (at + 28.0, LEGEND));
    legend_text(&mut canvas, at + 35.0, words.legend[1]);
    for (number, (name, values)) in columns.iter().enumerate() {
        let x = column(&mut canvas, number, columns.len(), name);
        let [bar, cap] = values.map(|value| y(&scale, value));
        let [ours, best] = values.map(units::figure);
        let says = format!("{name}: {ours} {} of {best}", words.unit);
        canvas.bar("bar", (x - BAR / 2.0, bar), (BAR, HEIGHT - BOTTOM - bar), &says);
        canvas.line("cap", (x - BAR * 0.8, cap), (x + BAR * 0.8, cap));
        let ([bar, cap], beside) = (apart(bar, cap), x + BAR * 0.8 + 5.0);
        canvas.text("value label ours", (beside, bar + 4.0), Anchor::Start, &ours);
        canvas.text("beside", (beside, cap + 4.0), Anchor::Start, &best);
    }
    canvas
}

fn framed(words: &Words<'_>, scale: &Scale) -> Canvas {
    let mut canvas = Canvas::new(WIDTH, HEIGHT, words.title, words.subtitle);
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    canvas.text("axis small", (middle, HEIGHT - 16.0), Anchor::Middle, words.axis);
    for (tick, number) in scale.labels() {
        canvas.level((LEFT, WIDTH - RIGHT), y(scale, tick), &number);
    }
    canvas
}

fn y(scale: &Scale, value: f64) -> f64 {
    HEIGHT - BOTTOM - scale.place(value) * (HEIGHT - BOTTOM - TOP)
}

/// Returns where the next entry begins.
fn legend_text(canvas: &mut Canvas, x: f64, text: &str) -> f64 {
    canvas.text("tick", (x, LEGEND + 4.5), Anchor::Start, text);
    x + 26.0 + CHARACTER * text.chars().count() as f64
}

/// Draws a column's name. Returns the column's horizontal position.
fn column(canvas: &mut Canvas, number: usize, of: usize, name: &str) -> f64 {
    let x = LEFT + (WIDTH - LEFT - RIGHT) * (number as f64 + 0.5) / of as f64;
    canvas.text("tick", (x, HEIGHT - BOTTOM + 22.0), Anchor::Middle, name);
    x
}

/// Heights of two labels: as given, but a line apart.
fn apart(one: f64, other: f64) -> [f64; 2] {
    const LINE: f64 = 15.0;
    let short = LINE - (one - other).abs();
    if short <= 0.0 {
        return [one, other];
    }
    let shift = if one >= other { short / 2.0 } else { -short / 2.0 };
    [one + shift, other - shift]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_two_marks_never_overlap_and_keep_their_order() {
        for (one, other) in [(100.0, 100.0), (100.0, 104.0), (104.0, 100.0), (100.0, 300.0)] {
            let [a, b] = apart(one, other);
            assert!((a - b).abs() >= 14.9, "{a} {b}");
            assert!(one == other || (one > other) == (a > b));
        }
    }
}
