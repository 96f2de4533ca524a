//! A page with three figures of a demo, which needs nothing else: what a handoff adds to a request,
//! how much of the transfer that is, and how near the machine's own limit it comes.

use crate::bench::plot::canvas::{Anchor, Canvas, escape};
use crate::bench::plot::chart::{linear_ticks, logarithmic, short};
use crate::bench::plot::style::{PAGE, SVG};
use crate::cli::DemoTransport;
use crate::units;

use super::report::{Figures, Report};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 92.0;
const BOTTOM: f64 = 64.0;
/// The shapes of marks.
const CIRCLE: usize = 0;
/// Between a mark and the figure beside it.
const BESIDE: f64 = 11.0;
const BAR: f64 = 34.0;

/// Colours of what only this page has.
const OWN: &str = "
.chart .bar { fill: var(--ours); } .chart .cap { stroke: var(--limit); stroke-width: 2.5; stroke-dasharray: 6 4; }
.chart .value { font-size: 12px; font-variant-numeric: tabular-nums; }
.chart .beside { fill: var(--soft); font-size: 12px; }
";

pub(super) fn html(report: &Report) -> String {
    let sizes: Vec<(u64, &Figures)> =
        report.sizes.iter().filter_map(|size| Some((size.bytes, size.figures.as_ref()?))).collect();
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>kvferry demo</title><style>{PAGE}{SVG}{OWN}</style></head><body><main>\n\
         <h1>kvferry demo</h1>\n"
    );
    for fact in report.facts() {
        page += &format!("<p class=\"soft\">{}</p>\n", escape(&fact));
    }
    let class = if report.complaint().is_none() { "ok" } else { "short" };
    page += &format!("<p class=\"verdict {class}\">{}</p>\n", escape(&report.summary()));
    for line in report.complaint().iter().flat_map(|why| why.lines()) {
        page += &format!("<p>{}</p>\n", escape(line));
    }
    if !sizes.is_empty() {
        page += "<h2>Figures</h2><div class=\"figures\">\n";
        for canvas in [latency(&sizes), exposure(&sizes), throughput(&sizes, report.transport)] {
            page += &format!("<figure>{}</figure>\n", canvas.inline());
        }
        page += "</div>\n";
    }
    page += &format!("<h2>Method</h2><p class=\"soft wide\">{METHOD}</p>\n</main></body></html>\n");
    page
}

const METHOD: &str = "Engines are processes with a scheduler, a small model of integers and a paged KV cache; every \
byte of KV that a token may see goes into it, so that a wrong byte is a wrong token. All times are on one clock. A \
handoff's latency begins when prefill has computed the last layer of the prompt and ends when the last decode rank \
knows that it has everything; the transfer begins with the first read. Throughput is a request's bytes by the time \
in which any of them were being read, while the engines compute on the same cores; the machine's own limit was \
measured just before, with nothing else running.";

/// The two times of a figure: one part of the other, or beyond it.
struct Two {
    filled: f64,
    hollow: f64,
}

fn latency(sizes: &[(u64, &Figures)]) -> Canvas {
    let two = |it: &Figures| Two { filled: it.latency_p50_ms, hollow: it.latency_p99_ms };
    let legend = ["p50", "p99"];
    let title = "Handoff latency";
    let subtitle =
        "ms from the last layer computed to everything received, logarithmic; lower is better";
    times(title, subtitle, legend, sizes, two)
}

fn exposure(sizes: &[(u64, &Figures)]) -> Canvas {
    let two = |it: &Figures| Two { filled: it.latency_p50_ms, hollow: it.transfer_ms };
    let legend = ["exposed: after prefill computed", "whole transfer"];
    let title = "Exposed and whole transfer";
    let subtitle =
        "ms, medians, logarithmic; what lies between them was hidden behind prefill's computing";
    times(title, subtitle, legend, sizes, two)
}

/// Two times per size, on a line between them.
fn times(
    title: &str,
    subtitle: &str,
    legend: [&str; 2],
    sizes: &[(u64, &Figures)],
    two: fn(&Figures) -> Two,
) -> Canvas {
    let mut canvas = headed(title, subtitle);
    let all = || sizes.iter().map(|(_, figures)| two(figures));
    let low = all().map(|it| it.filled.min(it.hollow)).fold(f64::INFINITY, f64::min);
    let high = all().map(|it| it.filled.max(it.hollow)).fold(0.0, f64::max);
    let (ticks, place) = logarithmic(low, high);
    let y = |value: f64| HEIGHT - BOTTOM - place(value) * (HEIGHT - BOTTOM - TOP);
    // With many decades, only the powers of ten have room.
    let is_power = |tick: f64| (tick.log10() - tick.log10().round()).abs() < 1e-9;
    for (number, &tick) in ticks.iter().enumerate() {
        if ticks.len() <= 10 || is_power(tick) || number == 0 {
            level(&mut canvas, y(tick), &short(tick));
        }
    }
    let mut at = LEFT;
    for (class, words) in [("mark ours", legend[0]), ("hollow limit", legend[1])] {
        canvas.mark(class, CIRCLE, (at + 6.0, TOP - 20.0), words);
        canvas.text("tick", (at + 18.0, TOP - 15.5), Anchor::Start, words);
        at += 50.0 + 6.6 * words.chars().count() as f64;
    }
    for (number, (bytes, figures)) in sizes.iter().enumerate() {
        let (x, it) = (column(&mut canvas, number, sizes.len(), *bytes), two(figures));
        canvas.line("range limit", (x, y(it.filled)), (x, y(it.hollow)));
        let words = [units::figure(it.filled), units::figure(it.hollow)];
        let name = units::bytes(*bytes);
        let says = format!("{name}: {} {} ms", legend[1], words[1]);
        canvas.mark("hollow limit", CIRCLE, (x, y(it.hollow)), &says);
        let says = format!("{name}: {} {} ms", legend[0], words[0]);
        canvas.mark("mark ours", CIRCLE, (x, y(it.filled)), &says);
        // Beside their marks, apart where these are near each other.
        let [filled, hollow] = apart(y(it.filled), y(it.hollow));
        canvas.text("value", (x + BESIDE, hollow + 4.0), Anchor::Start, &words[1]);
        canvas.text("value label ours", (x + BESIDE, filled + 4.0), Anchor::Start, &words[0]);
    }
    canvas
}

fn throughput(sizes: &[(u64, &Figures)], transport: DemoTransport) -> Canvas {
    let limit = match transport {
        DemoTransport::Local => "process_vm_readv by itself",
        DemoTransport::Tcp => "plain readv over loopback",
    };
    let mut canvas = headed("Throughput while reading", "GB/s, higher is better");
    let high = sizes.iter().map(|(_, it)| it.gb_per_s.max(it.limit_gb_per_s)).fold(0.0, f64::max);
    let ticks = linear_ticks(high);
    let top = *ticks.last().expect("there are two ticks at least");
    let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP);
    for &tick in &ticks {
        level(&mut canvas, y(tick), &short(tick));
    }
    canvas.mark("mark ours", 3, (LEFT + 6.0, TOP - 20.0), "kvferry");
    canvas.text(
        "tick",
        (LEFT + 18.0, TOP - 15.5),
        Anchor::Start,
        "kvferry, beside computing engines",
    );
    canvas.line("cap", (LEFT + 262.0, TOP - 20.0), (LEFT + 290.0, TOP - 20.0));
    let words = format!("{limit}, nothing else running");
    canvas.text("tick", (LEFT + 297.0, TOP - 15.5), Anchor::Start, &words);
    for (number, (bytes, it)) in sizes.iter().enumerate() {
        let x = column(&mut canvas, number, sizes.len(), *bytes);
        let (ours, best) = (units::figure(it.gb_per_s), units::figure(it.limit_gb_per_s));
        let says = format!("{}: {ours} GB/s of {best}", units::bytes(*bytes));
        let (bar, cap) = (y(it.gb_per_s), y(it.limit_gb_per_s));
        canvas.bar("bar", (x - BAR / 2.0, bar), (BAR, HEIGHT - BOTTOM - bar), &says);
        canvas.line("cap", (x - BAR * 0.8, cap), (x + BAR * 0.8, cap));
        let [ours_at, best_at] = apart(bar, cap);
        canvas.text("value label ours", (x + BAR * 0.8 + 5.0, ours_at + 4.0), Anchor::Start, &ours);
        canvas.text("beside", (x + BAR * 0.8 + 5.0, best_at + 4.0), Anchor::Start, &best);
    }
    canvas
}

fn headed(title: &str, subtitle: &str) -> Canvas {
    let mut canvas = Canvas::new(WIDTH, HEIGHT, title);
    canvas.text("heading", (20.0, 30.0), Anchor::Start, title);
    canvas.text("sub", (20.0, 51.0), Anchor::Start, subtitle);
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    canvas.text("axis small", (middle, HEIGHT - 16.0), Anchor::Middle, "KV of the request");
    canvas
}

/// A line of the grid.
fn level(canvas: &mut Canvas, y: f64, words: &str) {
    canvas.line("grid", (LEFT, y), (WIDTH - RIGHT, y));
    canvas.text("tick", (LEFT - 8.0, y + 4.0), Anchor::End, words);
}

/// Where a size is drawn.
fn column(canvas: &mut Canvas, number: usize, of: usize, bytes: u64) -> f64 {
    let x = LEFT + (WIDTH - LEFT - RIGHT) * (number as f64 + 0.5) / of as f64;
    canvas.text("tick", (x, HEIGHT - BOTTOM + 22.0), Anchor::Middle, &units::bytes(bytes));
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
