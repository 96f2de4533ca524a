//! Pictures of a report of transfers: an SVG per figure, and one page with all of them that loads nothing.

use crate::options::Op;
use crate::plot::canvas::Canvas;
use crate::plot::chart::{self, Axis, Line};
use crate::plot::dots::{self, Dots};
use crate::plot::style::looks;
use crate::report::{PAGE_NAME, Report, Row};

/// A picture, and the name of its file.
struct Picture {
    name: String,
    canvas: Canvas,
}

const METHOD: &str = "In each round \
all subjects move the same block table in turn, in a new random order. Processes of \
other engines are stopped outside their turns. Bytes are verified outside the timed parts, against a poisoned \
destination. The floor is plain code that does the same work over sockets with kvferry's options; call size, socket \
buffers and number of streams are the fastest of a trial for each size.";

/// Names and contents of the files that show a report of transfers: an SVG per figure, then [`PAGE_NAME`], which loads
/// nothing.
pub fn drawings(report: &Report) -> Vec<(String, String)> {
    let pictures = pictures(report);
    let page = report.page(pictures.iter().map(|it| &it.canvas).collect(), METHOD);
    let files = pictures.into_iter().map(|it| (format!("{}.svg", it.name), it.canvas.file()));
    files.chain([(PAGE_NAME.to_owned(), page)]).collect()
}

/// Subjects of the main pictures; checksums have a picture of their own.
fn main_figure(who: &str) -> bool {
    who != "checksums"
}

fn pictures(report: &Report) -> Vec<Picture> {
    let mut transports: Vec<&str> = Vec::new();
    for transport in report.rows.iter().flat_map(|row| &row.transport) {
        if !transports.contains(&&**transport) {
            transports.push(transport);
        }
    }
    transports.into_iter().flat_map(|transport| of_transport(report, transport)).collect()
}

/// Pictures of one transport: writing beside reading, kind after kind.
fn of_transport(report: &Report, transport: &str) -> Vec<Picture> {
    let place = match transport {
        "local" => "within a host".to_string(),
        other => format!("over {other}"),
    };
    let ops = [(Op::Write, "Writing"), (Op::Read, "Reading")];
    let name = |op: Op, what: &str| format!("{transport}-{}{what}", op.name());
    let mut pictures = Vec::new();
    let cost = "processor seconds per GB, both sides together; lower is better";
    for (what, part, subtitle, axis) in [
        ("", "throughput", "GB/s, higher is better", Axis::FromZero),
        ("-cpu", "cpu", cost, Axis::Logarithmic),
    ] {
        for (op, verb) in ops {
            let title = match part {
                "cpu" => format!("What it costs: {} {place}", verb.to_lowercase()),
                _ => format!("{verb} scattered blocks {place}"),
            };
            let rows = select(report, part, transport, op);
            let name = name(op, what);
            pictures.extend(over_sizes(name, [&title, subtitle], axis, &rows, main_figure));
        }
    }
    for (op, verb) in ops {
        let rows = select(report, "latency", transport, op);
        pictures.extend(latencies(name(op, "-latency"), &rows, verb, &place));
    }
    for (op, verb) in ops {
        let title = format!("With and without checksums: {} {place}", verb.to_lowercase());
        let subtitle = "GB/s, higher is better; CRC32C per 256 KiB, computed and compared";
        let rows = select(report, "throughput", transport, op);
        if rows.iter().any(|row| row.figure("checksums").is_some()) {
            let drawn = |who: &str| matches!(who, "kvferry" | "checksums" | "floor");
            let name = name(op, "-checksums");
            pictures.extend(over_sizes(name, [&title, subtitle], Axis::FromZero, &rows, drawn));
        }
    }
    pictures
}

fn select<'a>(report: &'a Report, part: &str, transport: &str, op: Op) -> Vec<&'a Row> {
    let of = |row: &&Row| {
        row.part == part && row.transport.as_deref() == Some(transport) && row.op == Some(op)
    };
    report.rows.iter().filter(of).collect()
}

/// Draws the figures over the sizes. `None` if no row has a size.
fn over_sizes(
    name: String,
    words: [&str; 2],
    axis: Axis,
    rows: &[&Row],
    drawn: fn(&str) -> bool,
) -> Option<Picture> {
    let sized: Vec<&&Row> = rows.iter().filter(|row| row.size.is_some()).collect();
    let has = |who: &str| drawn(who) && sized.iter().any(|row| row.figure(who).is_some());
    let lines: Vec<Line> = looks(has)
        .into_iter()
        .map(|look| {
            let point = |row: &&&Row| Some((row.size?, row.figure(look.who)?.clone()));
            Line { look, points: sized.iter().filter_map(point).collect() }
        })
        .collect();
    (!lines.is_empty()).then(|| Picture { name, canvas: chart::draw(words, axis, &lines) })
}

/// Latencies of calls on cores that the kernel chose, where they were measured; else with a core for
/// each process.
fn latencies(name: String, rows: &[&Row], verb: &str, place: &str) -> Option<Picture> {
    let placed = |row: &&&Row, how: &str| row.work.contains(how);
    let (apart, free): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| placed(row, "core each") || placed(row, "one core"));
    let rows: Vec<&&Row> = match free.is_empty() {
        true => apart.into_iter().filter(|row| placed(row, "core each")).collect(),
        false => free,
    };
    let [p50, p99] = ["p50", "p99"].map(|part| rows.iter().find(|row| row.work.ends_with(part)));
    let (p50, p99) = (p50?, p99?);
    let both = |who: &str| Some((p50.figure(who)?.median, p99.figure(who)?.median));
    let all: Vec<Dots> = looks(|who| both(who).is_some())
        .into_iter()
        .filter_map(|look| both(look.who).map(|(p50, p99)| Dots { look, p50, p99 }))
        .collect();
    let title = format!("{verb} one block of 4 KiB {place}");
    let subtitle = "µs of a single call, lower is better; medians of the rounds";
    (!all.is_empty()).then(|| Picture { name, canvas: dots::draw(&title, subtitle, &all) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Size;
    use crate::report::{Figure, tests::report};
    use crate::stats::Spread;

    fn row(part: &'static str, block: usize, who: &[&'static str]) -> Row {
        let figures = who.iter().map(|who| Figure::of(who, Spread::of(vec![1.0, 2.0, 4.0])));
        let mut row = Row::with(part, "write", "GB/s", figures.collect()).over("tcp");
        row.op = Some(Op::Write);
        row.size = Some(Size { block, count: 16 });
        row
    }

    #[test]
    fn a_report_becomes_pictures_and_a_page_that_loads_nothing() {
        let who = ["kvferry", "floor", "checksums", "NIXL"];
        let mut rows = vec![row("throughput", 4096, &who), row("throughput", 1 << 20, &who)];
        rows.push(row("cpu", 4096, &who));
        let report = report(rows);
        let pictures = pictures(&report);
        let names: Vec<&str> = pictures.iter().map(|picture| picture.name.as_str()).collect();
        assert_eq!(names, ["tcp-write", "tcp-write-cpu", "tcp-write-checksums"]);
        let svg = pictures[0].canvas.file();
        assert!(svg.contains("NIXL") && !svg.contains("kvferry, checksums"), "{svg}");
        let (name, page) = drawings(&report).pop().expect("a page");
        assert_eq!(name, PAGE_NAME);
        assert_eq!(page.matches("<svg").count(), 3);
        for outside in ["http://", "https://", "src=", "@import", "url("] {
            let outside = page.replace("http://www.w3.org/2000/svg", "").contains(outside);
            assert!(!outside, "the page loads something");
        }
    }

    #[test]
    fn a_report_without_sizes_has_no_pictures() {
        assert!(pictures(&report(Vec::new())).is_empty());
    }
}
