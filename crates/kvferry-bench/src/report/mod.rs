//! What a bench has measured: rows of figures, their verdicts, and how both are shown as text, JSON and a page.

mod page;
mod row;
mod section;

use kvferry::PeerSummary;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::plot::canvas::Canvas;
use crate::table;

pub(crate) use row::{Bound, Choice, Figure, Judged, Row};

/// The name of the page with all that a report says.
pub const PAGE_NAME: &str = "report.html";

/// The session between the two agents.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Session {
    pub(crate) transport: String,
    checksum: bool,
    authenticated: bool,
}

impl Session {
    pub(crate) fn of(summary: &PeerSummary) -> Session {
        Session {
            transport: summary.transport.to_string(),
            checksum: summary.checksum,
            authenticated: summary.authenticated,
        }
    }

    /// True if bytes are copied within a host.
    pub(crate) fn is_local(&self) -> bool {
        self.transport == "local"
    }

    fn describe(&self) -> String {
        let checksum = if self.checksum { "checksums" } else { "no checksums" };
        let authenticated = if self.authenticated { "authenticated" } else { "no secret" };
        format!("{} ({checksum}, {authenticated})", self.transport)
    }
}

/// The result of a bench. It serializes as what `--json` prints, in the form that its schema names.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    schema: String,
    version: String,
    machine: Machine,
    /// Hosts of the two agents of transfers; `None` for all else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hosts: Option<u8>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sessions: Vec<Session>,
    /// `None` if parts have different numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rounds: Option<usize>,
    quick: bool,
    /// Whether bytes or tokens were compared. A wrong one ends a bench without a report.
    verified: bool,
    ok: bool,
    /// Measurements that were not possible here, with the reason.
    #[serde(default)]
    pub(crate) skipped: Vec<String>,
    /// Parts of the options that were not carried out, and other remarks.
    #[serde(default)]
    remarks: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

impl Report {
    /// `schema` names the form of the JSON.
    pub(crate) fn new(
        schema: &'static str,
        quick: bool,
        remarks: Vec<String>,
        rows: Vec<Row>,
    ) -> Report {
        Report {
            schema: schema.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: Machine::here(),
            hosts: None,
            sessions: Vec::new(),
            rounds: None,
            quick,
            verified: true,
            ok: rows.iter().flat_map(|row| &row.judged).all(|judged| judged.ok),
            skipped: Vec::new(),
            remarks,
            rows,
        }
    }

    /// Marks the report as one of a replay: no bytes are verified. A replay has one round and the same figures each
    /// time.
    #[must_use]
    pub(crate) fn of_replay(self) -> Report {
        Report { verified: false, ..self }
    }

    /// A report of one of `schemas` from its own JSON.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the text.
    pub fn from_json(text: &str, schemas: &[&str]) -> Result<Report, String> {
        let report: Report = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if !schemas.contains(&report.schema.as_str()) {
            return Err(format!("its schema is {}, not {}", report.schema, schemas.join(" or ")));
        }
        for row in &report.rows {
            // A figure without rounds is read as one without a spread.
            let lacks = |figure: &Figure| figure.spread.is_none() && figure.failed.is_none();
            if row.figures.is_empty() || row.figures.iter().any(lacks) {
                return Err(format!("the row {:?} lacks a figure, or a figure's rounds", row.work));
            }
        }
        Ok(report)
    }

    pub(crate) fn judged(&self) -> impl Iterator<Item = (&Row, &Judged)> {
        self.rows.iter().flat_map(|row| row.judged.iter().map(move |judged| (row, judged)))
    }

    /// Count of the figures that miss their bounds: `3 of 90 figures miss their bounds`.
    fn count(&self) -> String {
        let all = self.judged().count();
        match self.judged().filter(|(_, judged)| !judged.ok).count() {
            0 if all == 0 => "no figure has a bound".to_owned(),
            0 => format!("all {all} figures meet their bounds"),
            short => format!("{short} of {all} figures miss their bounds"),
        }
    }

    /// One line that names every figure that misses its bound; `None` if there is none.
    pub fn shortfall(&self) -> Option<String> {
        let short: Vec<String> = self
            .judged()
            .filter(|(_, judged)| !judged.ok)
            .map(|(row, judged)| {
                let of = judged.of.as_ref().map_or(String::new(), |of| format!(" (to {of})"));
                format!("{}{of}", row.name(judged))
            })
            .collect();
        (!short.is_empty()).then(|| format!("{}: {}", self.count(), short.join("; ")))
    }

    /// Version, machine, sessions and rounds, a line each.
    fn facts(&self) -> Vec<String> {
        let machine = &self.machine;
        let mut facts = vec![format!(
            "kvferry {} on {}, {} cores, Linux {}",
            self.version, machine.cpu, machine.cpus, machine.kernel
        )];
        if !self.sessions.is_empty() {
            let sessions: Vec<String> = self.sessions.iter().map(Session::describe).collect();
            facts.push(format!("sessions: {}", sessions.join(", ")));
        }
        let quick = if self.quick { "; --quick is too short to judge by" } else { "" };
        facts.push(match (self.verified, self.rounds) {
            (false, _) => "the same in every run".to_owned(),
            (true, None) => format!("medians of the rounds [quartiles]{quick}"),
            (true, Some(rounds)) => format!("medians of {rounds} rounds [quartiles]{quick}"),
        });
        facts
    }

    /// A line per figure with a bound that no table shows beside it: what, required, reached, quartiles, verdict.
    fn verdicts(&self) -> Vec<[String; 5]> {
        let sections = section::sections(&self.rows);
        let rows = sections.iter().filter(|it| !it.is_judged_inline).flat_map(|it| &it.rows);
        rows.flat_map(|row| row.judged.iter().map(move |judged| (row, judged)))
            .map(|(row, judged)| {
                let [median, quartiles] = judged.reached();
                let (what, required) = (row.name(judged), judged.requirement());
                [what, required, median, quartiles, judged.verdict().to_owned()]
            })
            .collect()
    }

    /// Figures of other engines that failed: whose, of what, and why.
    fn failures(&self) -> Vec<String> {
        let mut failures: Vec<String> = Vec::new();
        for row in &self.rows {
            let over = row.transport.iter().map(|transport| format!(", {transport}"));
            let over: String = over.collect();
            for figure in &row.figures {
                if let Some(why) = &figure.failed {
                    failures.push(format!("{}{over}: {}: {why}", figure.who, row.work));
                }
            }
        }
        failures.dedup();
        failures
    }

    /// The report for people.
    pub fn to_table(&self) -> String {
        let mut text = self.facts().join("\n");
        text.push('\n');
        for section in section::sections(&self.rows) {
            text.push_str(&format!("\n{}\n", section.title));
            let cells: Vec<_> = section.rows.iter().map(|row| section.cells(row)).collect();
            text.push_str(&table::aligned(&section.header, &cells));
        }
        let verdicts = self.verdicts().into_iter().map(Vec::from).collect::<Vec<_>>();
        if !verdicts.is_empty() {
            text.push_str("\nFigures with bounds\n");
            let header = ["", "required", "reached", "[quartiles]", ""];
            text.push_str(&table::aligned(&header, &verdicts));
        }
        let failed = self.failures().into_iter().map(|failure| format!("FAILED {failure}"));
        let skipped = self.skipped.iter().map(|skipped| format!("SKIPPED {skipped}"));
        let remarks = self.remarks.iter().map(|remark| format!("note: {remark}"));
        let lines: String = failed.chain(skipped).chain(remarks).map(|line| line + "\n").collect();
        if !lines.is_empty() {
            text.push_str(&format!("\n{lines}"));
        }
        let verdict = self.shortfall().unwrap_or_else(|| self.count());
        // A failed figure of kvferry's may have had a wrong byte.
        let mut ours =
            self.rows.iter().flat_map(|row| &row.figures).filter(|it| it.who == "kvferry");
        let is_verified = self.verified && ours.all(|figure| figure.failed.is_none());
        let verified = if is_verified { "all bytes verified; " } else { "" };
        text.push_str(&format!("\n{verified}{verdict}\n"));
        text
    }

    /// The page with all that the report says, and with `pictures`. It loads nothing. `method` says how figures
    /// were measured, beyond [`page::METHOD`].
    pub(crate) fn page(&self, pictures: Vec<&Canvas>, method: &str) -> String {
        page::html(self, pictures, method)
    }

    /// Names and contents of the files that show a report without pictures: [`PAGE_NAME`], which loads nothing.
    pub fn drawings(&self) -> Vec<(String, String)> {
        vec![(PAGE_NAME.to_owned(), self.page(Vec::new(), ""))]
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::stats::Spread;

    const SCHEMA: &str = "kvferry.bench/2";

    fn row(ratio: f64, bound: Bound) -> Row {
        let spread = Spread::of(vec![4.0, 5.0, 6.0]);
        let mut row = Row::new("throughput", "write 4 KiB × 1024", "GB/s", spread)
            .over("tcp")
            .beside("floor", Spread::of(vec![5.0]))
            .judged("floor", Spread::of(vec![ratio, ratio]), bound);
        row.figures.push(Figure::failed("Mooncake", "it crashed".into()));
        row
    }

    /// A report of one session over tcp.
    pub(crate) fn report(rows: Vec<Row>) -> Report {
        let session = Session { transport: "tcp".into(), checksum: false, authenticated: true };
        Report {
            hosts: Some(1),
            sessions: vec![session],
            rounds: Some(3),
            skipped: vec!["local: not today".into()],
            ..Report::new(SCHEMA, false, Vec::new(), rows)
        }
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn a_bound_is_met_by_its_own_value() {
        let ok = |ratio, bound| row(ratio, bound).judged[0].ok;
        assert!(ok(0.95, Bound::AtLeast(0.95)) && !ok(0.949, Bound::AtLeast(0.95)));
        assert!(ok(1.1, Bound::AtMost(1.1)) && !ok(1.101, Bound::AtMost(1.1)));
    }

    #[test]
    fn the_table_shows_figures_verdicts_failures_and_what_was_skipped() {
        let report = report(vec![row(0.8, Bound::AtLeast(0.95)), row(0.95, Bound::AtLeast(0.95))]);
        let text = report.to_table();
        let line = |of: &str| words(text.lines().find(|line| line.starts_with(of)).expect(of));
        assert!(text.contains("\nBatches of scattered blocks, over tcp, GB/s\n"), "{text}");
        assert_eq!(line("write")[5..], ["5.00", "5.00", "failed"]);
        let verdict = line("tcp: write").join(" ");
        assert_eq!(verdict, "tcp: write 4 KiB × 1024 ≥ 0.95 of floor 0.800 [0.800 0.800] SHORT");
        assert!(text.contains("FAILED Mooncake, tcp: write 4 KiB × 1024: it crashed"), "{text}");
        assert!(text.contains("SKIPPED local: not today"), "{text}");
        let last = text.lines().last().expect("a last line");
        assert!(last.contains("1 of 2 figures miss their bounds: tcp: write"), "{last}");
    }

    #[test]
    fn a_figure_that_is_judged_by_itself_stands_beside_its_bound() {
        let row = |work, values: &[f64]| Row::new("setup", work, "ms", Spread::of(values.to_vec()));
        let rows = vec![row("connect", &[4.1, 4.1]).at_most(4.0), row("build", &[9.0, 9.0])];
        let report = Report::new(SCHEMA, false, vec!["less memory".into()], rows);
        let short = report.shortfall().expect("one");
        assert_eq!(short, "1 of 1 figures miss their bounds: connect");
        let text = report.to_table();
        let line = |of: &str| words(text.lines().find(|line| line.starts_with(of)).expect(of));
        assert_eq!(line("connect"), ["connect", "≤", "4", "ms", "4.10", "[4.10", "4.10]", "SHORT"]);
        assert_eq!(line("build"), ["build", "9.00", "[9.00", "9.00]"]);
        assert!(text.contains("note: less memory") && !text.contains("with bounds"), "{text}");
        assert!(text.contains("\nBefore the first byte, ms\n"), "{text}");
    }

    #[test]
    fn one_round_has_no_quartiles_and_other_units_have_a_column() {
        let row = |work, unit, value| Row::new("hits", work, unit, Spread::of(vec![value]));
        let rows = vec![row("hits", "%", 12.0), row("refused", "blocks", 0.0)];
        let text = Report::new(SCHEMA, false, Vec::new(), rows).of_replay().to_table();
        assert!(text.contains("unit") && !text.contains('['), "{text}");
        assert!(text.ends_with("\nno figure has a bound\n"), "{text}");
    }

    #[test]
    fn programs_read_the_bound_and_every_round() {
        let value = serde_json::to_value(row(0.8, Bound::AtLeast(0.95))).expect("serializes");
        assert_eq!(value["judged"][0]["required"]["at_least"], 0.95);
        assert_eq!(value["judged"][0]["of"], "floor");
        assert_eq!(value["figures"][0]["rounds"].as_array().expect("an array").len(), 3);
        assert_eq!(value["figures"][2]["failed"], "it crashed");
    }

    #[test]
    fn a_report_that_was_written_is_read_as_it_was() {
        let written = report(vec![row(0.8, Bound::AtLeast(0.95))]);
        let text = serde_json::to_string(&written).expect("serializes");
        let read = Report::from_json(&text, &[SCHEMA]).expect("well formed");
        assert_eq!(read.to_table(), written.to_table());
        assert!(Report::from_json("{}", &[SCHEMA]).is_err());
        let other = text.replace(SCHEMA, "kvferry.bench/1");
        let why = Report::from_json(&other, &[SCHEMA]).expect_err("another schema");
        assert!(why.contains("kvferry.bench/1"), "{why}");
    }

    #[test]
    fn a_report_with_a_figure_without_rounds_is_refused() {
        let mut value =
            serde_json::to_value(report(vec![row(0.8, Bound::AtLeast(0.95))])).expect("JSON");
        let figure = value["rows"][0]["figures"][0].as_object_mut().expect("a figure");
        figure.remove("rounds").expect("they were there");
        let why = Report::from_json(&value.to_string(), &[SCHEMA]).expect_err("no rounds");
        assert!(why.contains("a figure's rounds"), "{why}");
        value["rows"][0]["figures"] = serde_json::json!([]);
        Report::from_json(&value.to_string(), &[SCHEMA]).expect_err("no figure");
    }
}
