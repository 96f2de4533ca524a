//! Rows of figures, their bounds, and the report as a table.

use std::borrow::Cow;

use kvferry::PeerSummary;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::options::{Op, Size};
use crate::stats::Spread;
use crate::{table, units};

use super::{Measured, Settings};

/// A name that this program knows, or that was read from a report.
pub(super) type Text = Cow<'static, str>;

/// A line of the report.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) part: Text,
    pub(super) transport: String,
    pub(super) work: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) op: Option<Op>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) size: Option<Size>,
    pub(super) unit: Text,
    /// kvferry's first, then the others of the same rounds.
    pub(super) figures: Vec<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) floor_settings: Option<Choice>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) judged: Vec<Judged>,
}

/// A subject's figure, or why it has none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Figure {
    pub(super) who: Text,
    #[serde(flatten)]
    pub(super) spread: Option<Spread>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) failed: Option<String>,
    /// Figures of the caller's process and of the target's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sides: Option<[Spread; 2]>,
}

impl Figure {
    pub(super) fn of(who: &'static str, spread: Spread) -> Figure {
        Figure { who: who.into(), spread: Some(spread), failed: None, sides: None }
    }

    pub(super) fn failed(who: &'static str, why: String) -> Figure {
        Figure { who: who.into(), spread: None, failed: Some(why), sides: None }
    }
}

/// The settings with which the floor was fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Choice {
    pub(super) chunk: usize,
    /// `null`: left to the kernel.
    pub(super) buffer: Option<usize>,
    #[serde(default = "one_stream")]
    pub(super) streams: usize,
}

/// Number of the floor's streams in older reports.
fn one_stream() -> usize {
    1
}

/// The bound of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Bound {
    pub(crate) fn holds(self, value: f64) -> bool {
        match self {
            Bound::AtLeast(bound) => value >= bound,
            Bound::AtMost(bound) => value <= bound,
        }
    }

    pub(crate) fn describe(self) -> String {
        match self {
            Bound::AtLeast(bound) => format!("≥ {bound}"),
            Bound::AtMost(bound) => format!("≤ {bound}"),
        }
    }
}

/// A figure with its bound.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Judged {
    pub(super) what: String,
    /// Denominator of a ratio; `null` when the figure itself is judged.
    pub(super) of: Option<Text>,
    pub(super) unit: Text,
    pub(super) required: Bound,
    pub(super) reached: Spread,
    pub(super) ok: bool,
}

impl Judged {
    /// `≥ 0.95 of floor`, `≤ 2 µs`.
    pub(super) fn requirement(&self) -> String {
        match &self.of {
            Some(of) => format!("{} of {of}", self.required.describe()),
            None => format!("{} {}", self.required.describe(), self.unit),
        }
    }

    /// Format of the numbers.
    pub(super) fn show(&self) -> fn(f64) -> String {
        if self.of.is_some() { units::ratio } else { units::figure }
    }
}

impl Row {
    /// A row with kvferry's figure.
    pub(super) fn new(
        part: &'static str,
        work: impl Into<String>,
        unit: &'static str,
        kvferry: Spread,
    ) -> Row {
        Row::with(part, work, unit, vec![Figure::of("kvferry", kvferry)])
    }

    pub(super) fn with(
        part: &'static str,
        work: impl Into<String>,
        unit: &'static str,
        figures: Vec<Figure>,
    ) -> Row {
        Row {
            part: part.into(),
            transport: String::new(),
            work: work.into(),
            op: None,
            size: None,
            unit: unit.into(),
            figures,
            floor_settings: None,
            judged: Vec::new(),
        }
    }

    pub(super) fn beside(mut self, what: &'static str, figure: Spread) -> Row {
        self.figures.push(Figure::of(what, figure));
        self
    }

    /// Judges the median of a ratio to another figure of the row, if there is one.
    pub(super) fn judge(
        &mut self,
        what: String,
        of: &'static str,
        reached: Option<Spread>,
        required: Bound,
    ) {
        if let Some(reached) = reached {
            let ok = required.holds(reached.median);
            let (of, unit) = (Some(of.into()), self.unit.clone());
            self.judged.push(Judged { what, of, unit, required, reached, ok });
        }
    }

    pub(super) fn judged(mut self, of: &'static str, reached: Spread, required: Bound) -> Row {
        self.judge(self.work.clone(), of, Some(reached), required);
        self
    }

    /// Judges the median of kvferry's figure.
    pub(super) fn judged_itself(mut self, required: Bound) -> Row {
        let reached = self.figures[0].spread.clone().expect("a row has kvferry's figure");
        let (what, unit) = (self.work.trim().to_string(), self.unit.clone());
        let ok = required.holds(reached.median);
        self.judged.push(Judged { what, of: None, unit, required, reached, ok });
        self
    }

    pub(super) fn figure(&self, who: &str) -> Option<&Spread> {
        self.figures.iter().find(|figure| figure.who == who)?.spread.as_ref()
    }
}

/// The session between the two agents.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) transport: String,
    checksum: bool,
    authenticated: bool,
}

impl Session {
    pub(super) fn of(summary: &PeerSummary) -> Session {
        Session {
            transport: summary.transport.to_string(),
            checksum: summary.checksum,
            authenticated: summary.authenticated,
        }
    }

    /// Whether bytes are copied within a host.
    pub(super) fn is_local(&self) -> bool {
        self.transport == "local"
    }

    pub(super) fn describe(&self) -> String {
        let checksum = if self.checksum { "checksums" } else { "no checksums" };
        let authenticated = if self.authenticated { "authenticated" } else { "no secret" };
        format!("{} ({checksum}, {authenticated})", self.transport)
    }
}

/// Results of transfers; the JSON is `kvferry.bench/2`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    schema: String,
    version: String,
    machine: Machine,
    hosts: u8,
    sessions: Vec<Session>,
    rounds: usize,
    quick: bool,
    /// Always true: a wrong byte ends a bench without a report.
    verified: bool,
    ok: bool,
    /// Measurements that were not possible here, with the reason.
    pub(super) skipped: Vec<String>,
    pub(super) rows: Vec<Row>,
}

/// Parts in the order in which they are shown, with the titles of their tables.
const TITLES: [(&str, &str); 12] = [
    ("throughput", "Batches of scattered blocks, GB/s"),
    ("cpu", "The same, seconds of processor time per GB, both sides together"),
    ("waits", "The same, times that a thread slept and was woken, per batch, both sides together"),
    ("python-call", "The cost of a call from Python"),
    ("callers", "Concurrent callers, 100 to 500 blocks of 32 KiB each, GB/s in total"),
    ("pair", "Two callers with large blocks, GB/s in total"),
    ("churn", "Memory registered and unregistered beside callers"),
    ("latency", "One block at a time, µs"),
    ("setup", "Before the first byte"),
    ("idle", "Live sessions, nothing to do"),
    ("sessions", "Many live sessions on one agent"),
    ("faults", "Faults"),
];

/// A table of the report: rows with the same columns.
pub(super) struct Section<'a> {
    pub(super) title: String,
    pub(super) header: Vec<&'a str>,
    pub(super) rows: Vec<&'a Row>,
}

impl Section<'_> {
    /// A row's cells: its work, a median per column, and the unit unless it is in the title.
    pub(super) fn cells(&self, row: &Row) -> Vec<String> {
        let mut cells = vec![row.work.clone()];
        cells.extend(self.header[1..].iter().map_while(|&who| {
            let figure = row.figures.iter().find(|figure| figure.who == who);
            Some(match figure {
                Some(Figure { spread: Some(spread), .. }) => units::figure(spread.median),
                Some(_) => "failed".to_string(),
                None if who == "unit" => row.unit.to_string(),
                None => String::new(),
            })
        }));
        cells
    }
}

const SCHEMA: &str = "kvferry.bench/2";

impl Report {
    /// A report from its own JSON.
    ///
    /// # Errors
    /// What is wrong with the text, in words.
    pub fn from_json(text: &str) -> Result<Report, String> {
        let report: Report = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match report.schema.as_str() {
            SCHEMA => Ok(report),
            other => Err(format!("its schema is {other}, not {SCHEMA}")),
        }
    }

    pub(super) fn new(settings: &Settings, measured: Measured) -> Report {
        let Measured { sessions, rows, skipped } = measured;
        Report {
            schema: SCHEMA.to_string(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            machine: Machine::here(),
            hosts: if settings.options.target.is_some() { 2 } else { 1 },
            sessions,
            rounds: settings.rounds,
            quick: settings.options.quick,
            verified: true,
            ok: rows.iter().flat_map(|row| &row.judged).all(|judged| judged.ok),
            skipped,
            rows,
        }
    }

    pub(super) fn judged(&self) -> impl Iterator<Item = (&Row, &Judged)> {
        self.rows.iter().flat_map(|row| row.judged.iter().map(move |judged| (row, judged)))
    }

    /// Count of the figures that miss their bounds: `3 of 90 figures miss their bounds`.
    pub(super) fn count(&self) -> String {
        let all = self.judged().count();
        match self.judged().filter(|(_, judged)| !judged.ok).count() {
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
                format!("{}: {}{of}", row.transport, judged.what)
            })
            .collect();
        (!short.is_empty()).then(|| format!("{}: {}", self.count(), short.join("; ")))
    }

    /// Version, machine, sessions and rounds, a line each.
    pub(super) fn facts(&self) -> Vec<String> {
        let machine = &self.machine;
        let sessions: Vec<String> = self.sessions.iter().map(Session::describe).collect();
        let quick = if self.quick { "; --quick is too short to judge by" } else { "" };
        vec![
            format!(
                "kvferry {} on {}, {} cores, Linux {}",
                self.version, machine.cpu, machine.cpus, machine.kernel
            ),
            format!("sessions: {}", sessions.join(", ")),
            format!("medians of {} rounds [quartiles]{quick}", self.rounds),
        ]
    }

    pub(super) fn sections(&self) -> Vec<Section<'_>> {
        let mut sections = Vec::new();
        for session in &self.sessions {
            for (part, title) in TITLES {
                let of = |row: &&Row| row.part == part && row.transport == session.transport;
                let rows: Vec<&Row> = self.rows.iter().filter(of).collect();
                if rows.is_empty() {
                    continue;
                }
                let mut header = vec![""];
                for figure in rows.iter().flat_map(|row| &row.figures) {
                    if !header.contains(&&*figure.who) {
                        header.push(&figure.who);
                    }
                }
                let one_unit = title.contains(&*rows[0].unit) || rows[0].unit.starts_with("per ");
                let one_unit = one_unit || rows[0].unit == "CPU s/GB";
                if !one_unit {
                    header.push("unit");
                }
                let title = format!("{title}, over {}", session.transport);
                sections.push(Section { title, header, rows });
            }
        }
        sections
    }

    /// A line per figure with a bound: what, required, reached, quartiles, verdict.
    pub(super) fn verdicts(&self) -> Vec<[String; 5]> {
        self.judged()
            .map(|(row, judged)| {
                let show = judged.show();
                [
                    format!("{}: {}", row.transport, judged.what),
                    judged.requirement(),
                    show(judged.reached.median),
                    format!("[{} {}]", show(judged.reached.q1), show(judged.reached.q3)),
                    if judged.ok { "ok" } else { "SHORT" }.to_string(),
                ]
            })
            .collect()
    }

    /// Figures of other engines that failed: whose, of what, and why.
    pub(super) fn failures(&self) -> Vec<String> {
        let mut failures: Vec<String> = Vec::new();
        for row in &self.rows {
            for figure in &row.figures {
                if let Some(why) = &figure.failed {
                    failures
                        .push(format!("{}, {}: {}: {why}", figure.who, row.transport, row.work));
                }
            }
        }
        failures.dedup();
        failures
    }

    /// Whether another engine was measured.
    pub(super) fn compares(&self) -> bool {
        let engine = |who: &str| who.starts_with("Mooncake") || who.starts_with("NIXL");
        self.rows.iter().flat_map(|row| &row.figures).any(|figure| engine(&figure.who))
    }

    pub(super) fn verdict(&self) -> String {
        self.shortfall().unwrap_or_else(|| self.count())
    }

    /// The report for people.
    pub fn to_table(&self) -> String {
        let mut text = self.facts().join("\n");
        text.push('\n');
        for section in self.sections() {
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
        for failure in self.failures() {
            text.push_str(&format!("\nFAILED {failure}\n"));
        }
        for skipped in &self.skipped {
            text.push_str(&format!("\nSKIPPED {skipped}\n"));
        }
        text.push_str(&format!("\nbytes verified before and after; {}\n", self.verdict()));
        text
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn row(ratio: f64, bound: Bound) -> Row {
        let spread = Spread::of(vec![4.0, 5.0, 6.0]);
        let mut row = Row::new("throughput", "write 4 KiB × 1024", "GB/s", spread)
            .beside("floor", Spread::of(vec![5.0]))
            .judged("floor", Spread::of(vec![ratio]), bound);
        row.transport = "tcp".into();
        row.figures.push(Figure::failed("Mooncake", "it crashed".into()));
        row
    }

    /// A report of one session over tcp.
    pub(in crate::transfers) fn report(rows: Vec<Row>) -> Report {
        let session = Session { transport: "tcp".into(), checksum: false, authenticated: true };
        Report {
            schema: SCHEMA.to_string(),
            version: "0".into(),
            machine: Machine::here(),
            hosts: 1,
            sessions: vec![session],
            rounds: 3,
            quick: false,
            verified: true,
            ok: true,
            skipped: vec!["local: not today".into()],
            rows,
        }
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
        let line = |of: &str| text.lines().find(|line| line.starts_with(of)).expect(of).to_string();
        let words = |line: String| line.split_whitespace().map(str::to_string).collect::<Vec<_>>();
        assert_eq!(words(line("write"))[5..], ["5.00", "5.00", "failed"]);
        let verdict = words(line("tcp: write")).join(" ");
        assert_eq!(verdict, "tcp: write 4 KiB × 1024 ≥ 0.95 of floor 0.800 [0.800 0.800] SHORT");
        assert!(text.contains("FAILED Mooncake, tcp: write 4 KiB × 1024: it crashed"), "{text}");
        assert!(text.contains("SKIPPED local: not today"), "{text}");
        let last = text.lines().last().expect("a last line");
        assert!(last.contains("1 of 2 figures miss their bounds: tcp: write"), "{last}");
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
        let read = Report::from_json(&text).expect("well formed");
        assert_eq!(read.to_table(), written.to_table());
        assert!(Report::from_json("{}").is_err());
        let other = text.replace(SCHEMA, "kvferry.bench/1");
        let why = Report::from_json(&other).expect_err("another schema");
        assert!(why.contains("kvferry.bench/1"), "{why}");
    }
}
