//! The page with everything a report says.

use std::fmt::Write;

use crate::bench::report::{Judged, Report, Row, Section};
use crate::cli::Op;
use crate::units;

use super::Picture;
use super::canvas::escape;
use super::style::{PAGE, SVG};

const METHOD: &str = "Every figure is the median of the rounds, with the first and third quartile. In each round \
all contenders move the same block table in turn, in an order drawn anew each time; ratios are taken \
round by round. Processes of other engines are stopped while it is not their turn. Bytes are verified outside the \
timed parts, against a poisoned destination. The floor is the plainest program that does the same work over one \
socket, its call size and socket buffers chosen by trial.";

pub(super) fn html(report: &Report, pictures: &[Picture]) -> String {
    let mut page = String::new();
    let facts = report.facts();
    let title = if report.compares() { "kvferry beside its peers" } else { "kvferry bench" };
    let class = if report.shortfall().is_none() { "ok" } else { "short" };
    put(&mut page, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    put(&mut page, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
    put(&mut page, &format!("<title>{title}</title><style>{PAGE}{SVG}</style></head><body><main>"));
    put(&mut page, &format!("<h1>{title}</h1>"));
    for fact in facts {
        put(&mut page, &format!("<p class=\"soft\">{}</p>", escape(&fact)));
    }
    put(&mut page, &format!("<p class=\"verdict {class}\">{}</p>", escape(&report.count())));
    tiles(&mut page, report);
    if !pictures.is_empty() {
        put(&mut page, "<h2>Figures</h2><div class=\"figures\">");
        for picture in pictures {
            put(&mut page, &format!("<figure>{}</figure>", picture.canvas.inline()));
        }
        put(&mut page, "</div>");
    }
    verdicts(&mut page, report);
    put(&mut page, "<h2>Tables</h2>");
    for section in report.sections() {
        table(&mut page, &section);
    }
    list(&mut page, "What failed beside kvferry", &report.failures());
    list(&mut page, "What was skipped", &report.skipped);
    put(&mut page, &format!("<h2>Method</h2><p class=\"soft wide\">{METHOD}</p>"));
    put(&mut page, "</main></body></html>");
    page
}

/// How far ahead of the best other engine, for the smallest and the largest blocks written.
fn tiles(page: &mut String, report: &Report) {
    let mut tiles = Vec::new();
    let mut transports: Vec<&str> = report.rows.iter().map(|row| row.transport.as_str()).collect();
    transports.dedup();
    for transport in transports {
        for (part, what) in [("throughput", "as fast as"), ("cpu", "of the processor time of")] {
            let beside: Vec<(&Row, &Judged)> = report
                .judged()
                .filter(|(row, judged)| {
                    let other = judged.of.is_some_and(|of| of.ends_with("other engine"));
                    row.transport == transport
                        && row.part == part
                        && row.op == Some(Op::Write)
                        && other
                })
                .collect();
            let last = beside.last().filter(|_| beside.len() > 1);
            for (row, judged) in beside.first().into_iter().chain(last) {
                let (times, of) = (judged.reached.median, judged.of.unwrap_or_default());
                let times = match part {
                    "cpu" if times < 1.0 => format!("1 / {}", units::figure(1.0 / times)),
                    _ => format!("{} ×", units::figure(times)),
                };
                let (work, transport) = (escape(&row.work), escape(transport));
                tiles.push(format!(
                    "<div class=\"tile\"><b>{times}</b><span class=\"soft\">{what} {of}: {work}, \
                     {transport}</span></div>"
                ));
            }
        }
    }
    if !tiles.is_empty() {
        put(page, &format!("<div class=\"tiles\">{}</div>", tiles.join("\n")));
    }
}

fn put(page: &mut String, text: &str) {
    page.push_str(text);
    page.push('\n');
}

fn verdicts(page: &mut String, report: &Report) {
    let verdicts = report.verdicts();
    if verdicts.is_empty() {
        return;
    }
    put(page, "<h2>What must be reached</h2><div class=\"scroll\"><table><thead><tr><th></th>");
    put(page, "<th>required</th><th>reached</th><th>quartiles</th><th></th></tr></thead><tbody>");
    for [what, required, reached, quartiles, verdict] in verdicts {
        let cells = [what, required, reached, quartiles].map(|cell| escape(&cell));
        let class = if verdict == "ok" { "ok" } else { "short" };
        let cells = cells.join("</td><td>");
        put(page, &format!("<tr><td>{cells}</td><td class=\"{class}\">{verdict}</td></tr>"));
    }
    put(page, "</tbody></table></div>");
}

/// Medians, with the quartiles to be seen by pointing.
fn table(page: &mut String, section: &Section<'_>) {
    put(
        page,
        &format!("<h3>{}</h3><div class=\"scroll\"><table><thead><tr>", escape(&section.title)),
    );
    for name in &section.header {
        put(page, &format!("<th>{}</th>", escape(name)));
    }
    put(page, "</tr></thead><tbody>");
    for row in &section.rows {
        let mut line = String::from("<tr>");
        for (who, cell) in section.header.iter().zip(section.cells(row)) {
            let spread = row.figure(who);
            let title = spread.map_or(String::new(), |spread| {
                let (q1, q3) = (units::figure(spread.q1), units::figure(spread.q3));
                format!(" title=\"[{q1} – {q3}]\"")
            });
            let class = match cell.as_str() {
                "failed" => " class=\"failed\"",
                _ if *who == "kvferry" => " class=\"mine\"",
                _ => "",
            };
            write!(line, "<td{class}{title}>{}</td>", escape(&cell)).expect("memory takes it");
        }
        put(page, &format!("{line}</tr>"));
    }
    put(page, "</tbody></table></div>");
}

fn list(page: &mut String, title: &str, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    put(page, &format!("<h3>{title}</h3><ul>"));
    for line in lines {
        put(page, &format!("<li>{}</li>", escape(line)));
    }
    put(page, "</ul>");
}
