//! The page with everything that a report says.

use std::fmt::Write;

use crate::options::Op;
use crate::plot::canvas::{Canvas, escape};
use crate::plot::page::Page;
use crate::units;

use super::section::{Section, sections};
use super::{Judged, Report, Row};

/// Sentences of every page on how its figures are measured.
const METHOD: &str = "Every figure is the median of the rounds, with the first and third quartile; ratios are taken \
round by round.";

pub(super) fn html(report: &Report, pictures: Vec<&Canvas>, method: &str) -> String {
    let (mut summary, mut details) = (String::new(), String::new());
    tiles(&mut summary, report);
    verdicts(&mut details, report);
    put(&mut details, "<h2>Tables</h2>");
    for section in sections(&report.rows) {
        table(&mut details, &section);
    }
    list(&mut details, "What failed beside kvferry", &report.failures());
    list(&mut details, "What was skipped", &report.skipped);
    list(&mut details, "Notes", &report.remarks);
    let engine = |who: &str| who.starts_with("Mooncake") || who.starts_with("NIXL");
    let compares = report.rows.iter().flat_map(|row| &row.figures).any(|it| engine(&it.who));
    Page {
        title: if compares { "kvferry beside other engines" } else { "kvferry bench" },
        facts: &report.facts(),
        verdict: (report.shortfall().is_none(), &report.count()),
        summary: &summary,
        pictures,
        details: &details,
        method: &format!("{METHOD} {method}"),
    }
    .html()
}

/// The ratio to the best other engine, for the smallest and the largest blocks written.
fn tiles(page: &mut String, report: &Report) {
    let mut tiles = Vec::new();
    let mut transports: Vec<_> = report.rows.iter().flat_map(|row| &row.transport).collect();
    transports.dedup();
    for transport in transports {
        for (part, what) in [("throughput", "as fast as"), ("cpu", "of the processor time of")] {
            let beside: Vec<(&Row, &Judged)> = report
                .judged()
                .filter(|(row, judged)| {
                    let other = judged.of.as_ref().is_some_and(|of| of.ends_with("other engine"));
                    row.transport.as_ref() == Some(transport)
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
                "ok" => " class=\"ok\"",
                "SHORT" => " class=\"short\"",
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
