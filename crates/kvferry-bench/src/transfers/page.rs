//! The page with everything that a report says.

use std::fmt::Write;

use crate::options::Op;
use crate::plot::canvas::escape;
use crate::plot::page::Page;
use crate::units;

use super::pictures::Picture;
use super::report::{Judged, Report, Row, Section};

const METHOD: &str = "Every figure is the median of the rounds, with the first and third quartile. In each round \
all subjects move the same block table in turn, in a new random order; ratios are taken round by round. Processes of \
other engines are stopped outside their turns. Bytes are verified outside the timed parts, against a poisoned \
destination. The floor is plain code that does the same work over sockets with kvferry's options; call size, socket \
buffers and number of streams are the fastest of a trial for each size.";

pub(super) fn html(report: &Report, pictures: &[Picture]) -> String {
    let (mut summary, mut details) = (String::new(), String::new());
    tiles(&mut summary, report);
    verdicts(&mut details, report);
    put(&mut details, "<h2>Tables</h2>");
    for section in report.sections() {
        table(&mut details, &section);
    }
    list(&mut details, "What failed beside kvferry", &report.failures());
    list(&mut details, "What was skipped", &report.skipped);
    Page {
        title: if report.compares() { "kvferry beside other engines" } else { "kvferry bench" },
        facts: &report.facts(),
        verdict: (report.shortfall().is_none(), &report.count()),
        summary: &summary,
        pictures: pictures.iter().map(|picture| &picture.canvas).collect(),
        details: &details,
        method: METHOD,
    }
    .html()
}

/// The ratio to the best other engine, for the smallest and the largest blocks written.
fn tiles(page: &mut String, report: &Report) {
    let mut tiles = Vec::new();
    let mut transports: Vec<&str> = report.rows.iter().map(|row| row.transport.as_str()).collect();
    transports.dedup();
    for transport in transports {
        for (part, what) in [("throughput", "as fast as"), ("cpu", "of the processor time of")] {
            let beside: Vec<(&Row, &Judged)> = report
                .judged()
                .filter(|(row, judged)| {
                    let other = judged.of.as_ref().is_some_and(|of| of.ends_with("other engine"));
                    row.transport == transport
                        && row.part == part
                        && row.op == Some(Op::Write)
                        && other
                })
                .collect();
            let last = beside.last().filter(|_| beside.len() > 1);
            for (row, judged) in beside.first().into_iter().chain(last) {
                let (times, of) = (judged.reached.median, judged.of.as_deref().unwrap_or_default());
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
    put(page, "<h2>Figures with bounds</h2><div class=\"scroll\"><table><thead><tr><th></th>");
    put(page, "<th>required</th><th>reached</th><th>quartiles</th><th></th></tr></thead><tbody>");
    for [what, required, reached, quartiles, verdict] in verdicts {
        let cells = [what, required, reached, quartiles].map(|cell| escape(&cell));
        let class = if verdict == "ok" { "ok" } else { "short" };
        let cells = cells.join("</td><td>");
        put(page, &format!("<tr><td>{cells}</td><td class=\"{class}\">{verdict}</td></tr>"));
    }
    put(page, "</tbody></table></div>");
}

/// Medians; pointing at one shows its quartiles.
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
