//! Rows of figures, how they are judged, and how they are shown.

use kvferry::PeerSummary;
use serde::Serialize;

use crate::machine::Machine;
use crate::stats::Spread;
use crate::{table, units};

use super::Settings;

/// One line of the report.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) part: &'static str,
    pub(super) work: String,
    pub(super) unit: &'static str,
    pub(super) kvferry: Spread,
    /// Measured in the same rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    beside: Vec<Beside>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ratios: Vec<Ratio>,
    #[serde(skip_serializing_if = "Option::is_none")]
    floor_settings: Option<Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    judged: Option<Judged>,
}

#[derive(Debug, Serialize)]
struct Beside {
    what: &'static str,
    figure: Spread,
}

/// kvferry over something else, round by round.
#[derive(Debug, Serialize)]
struct Ratio {
    of: &'static str,
    ratio: Spread,
}

/// What the floor was run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Choice {
    pub(super) chunk: usize,
    /// `null`: left to the kernel.
    pub(super) buffer: Option<usize>,
}

/// What a figure must reach.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Bound::AtLeast(bound) => value >= bound,
            Bound::AtMost(bound) => value <= bound,
        }
    }

    fn describe(self) -> String {
        match self {
            Bound::AtLeast(bound) => format!("≥ {bound}"),
            Bound::AtMost(bound) => format!("≤ {bound}"),
        }
    }
}

#[derive(Debug, Serialize)]
struct Judged {
    /// What the ratio is to; `null` when the figure itself is judged.
    of: Option<&'static str>,
    required: Bound,
    reached: Spread,
    ok: bool,
}

impl Row {
    pub(super) fn new(
        part: &'static str,
        work: impl Into<String>,
        unit: &'static str,
        kvferry: Spread,
    ) -> Row {
        Row {
            part,
            work: work.into(),
            unit,
            kvferry,
            beside: Vec::new(),
            ratios: Vec::new(),
            floor_settings: None,
            judged: None,
        }
    }

    pub(super) fn beside(mut self, what: &'static str, figure: Spread) -> Row {
        self.beside.push(Beside { what, figure });
        self
    }

    pub(super) fn of(mut self, of: &'static str, ratio: Spread) -> Row {
        self.ratios.push(Ratio { of, ratio });
        self
    }

    pub(super) fn floor_settings(mut self, choice: Choice) -> Row {
        self.floor_settings = Some(choice);
        self
    }

    /// By the median of its ratio to something measured beside it.
    pub(super) fn judged(mut self, of: &'static str, reached: Spread, required: Bound) -> Row {
        let ok = required.holds(reached.median);
        self.judged = Some(Judged { of: Some(of), required, reached, ok });
        self
    }

    /// By the median of the figure.
    pub(super) fn judged_itself(mut self, required: Bound) -> Row {
        let ok = required.holds(self.kvferry.median);
        self.judged = Some(Judged { of: None, required, reached: self.kvferry.clone(), ok });
        self
    }

    fn falls_short(&self) -> bool {
        self.judged.as_ref().is_some_and(|judged| !judged.ok)
    }
}

/// How the two agents talk.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Session {
    transport: String,
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

    fn describe(&self) -> String {
        let checksum = if self.checksum { "checksums" } else { "no checksums" };
        let authenticated = if self.authenticated { "authenticated" } else { "no secret" };
        format!("{}, {checksum}, {authenticated}", self.transport)
    }
}

/// `kvferry bench --json`.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: &'static str,
    version: &'static str,
    machine: Machine,
    hosts: u8,
    session: Session,
    rounds: usize,
    quick: bool,
    /// Every configuration was verified before and after its rounds, or there would be no report.
    verified: bool,
    ok: bool,
    /// Parts that could not be measured here, and why.
    skipped: Vec<String>,
    rows: Vec<Row>,
}

/// Parts in the order they are shown, with the name of their table.
const TITLES: [(&str, &str); 8] = [
    ("throughput", "Batches of scattered blocks"),
    ("python", "The same from Python, lists of addresses"),
    ("python-call", "The cost of a call from Python"),
    ("callers", "Concurrent callers, 100 to 500 blocks of 32 KiB each"),
    ("latency", "One block at a time"),
    ("setup", "Before the first byte"),
    ("idle", "Nothing to do"),
    ("faults", "Faults"),
];

impl Report {
    pub(super) fn new(
        settings: &Settings,
        session: Session,
        rows: Vec<Row>,
        skipped: Vec<String>,
    ) -> Report {
        Report {
            schema: "kvferry.bench/1",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            hosts: if settings.args.target.is_some() { 2 } else { 1 },
            session,
            rounds: settings.rounds,
            quick: settings.args.quick,
            verified: true,
            ok: !rows.iter().any(Row::falls_short),
            skipped,
            rows,
        }
    }

    /// One line that names every figure that falls short.
    pub(super) fn shortfall(&self) -> Option<String> {
        let short: Vec<&str> =
            self.rows.iter().filter(|row| row.falls_short()).map(|row| row.work.as_str()).collect();
        (!short.is_empty()).then(|| {
            format!("{} of {} figures fall short: {}", short.len(), self.judged(), short.join("; "))
        })
    }

    fn judged(&self) -> usize {
        self.rows.iter().filter(|row| row.judged.is_some()).count()
    }

    pub(super) fn to_table(&self) -> String {
        let mut text = format!(
            "kvferry {} on {}, {} cores, Linux {}; {}\nmedians of {} rounds [quartiles]{}\n",
            self.version,
            self.machine.cpu,
            self.machine.cpus,
            self.machine.kernel,
            self.session.describe(),
            self.rounds,
            if self.quick { "; --quick is too short to judge by" } else { "" },
        );
        for (part, title) in TITLES {
            let rows: Vec<&Row> = self.rows.iter().filter(|row| row.part == part).collect();
            if let Some(first) = rows.first() {
                text.push_str(&format!("\n{title}\n"));
                text.push_str(&table::aligned(&header(first), &cells(&rows)));
            }
        }
        for skipped in &self.skipped {
            text.push_str(&format!("\nSKIPPED {skipped}\n"));
        }
        let verdict = match self.shortfall() {
            None => format!("all {} figures reach what they must", self.judged()),
            Some(shortfall) => shortfall,
        };
        text.push_str(&format!("\nbytes verified before and after; {verdict}\n"));
        text
    }
}

/// Rows of one part have the same columns.
fn header(row: &Row) -> Vec<&'static str> {
    let mut header = vec!["", "kvferry"];
    header.extend(row.beside.iter().map(|beside| beside.what));
    header.extend(row.ratios.iter().map(|ratio| match ratio.of {
        "raw" => "of raw",
        other => other,
    }));
    header.extend(["unit", "required", "reached", "[quartiles]", ""]);
    header
}

fn cells(rows: &[&Row]) -> Vec<Vec<String>> {
    rows.iter().map(|row| line(row)).collect()
}

fn line(row: &Row) -> Vec<String> {
    let mut line = vec![row.work.clone(), units::figure(row.kvferry.median)];
    line.extend(row.beside.iter().map(|beside| units::figure(beside.figure.median)));
    line.extend(row.ratios.iter().map(|ratio| units::figure(ratio.ratio.median)));
    line.push(row.unit.to_string());
    match &row.judged {
        None => line.extend(["".into(), "".into(), spread(&row.kvferry, units::figure), "".into()]),
        Some(judged) => {
            let of = judged.of.map_or(String::new(), |of| format!(" of {of}"));
            line.push(format!("{}{of}", judged.required.describe()));
            let show = if judged.of.is_some() { units::ratio } else { units::figure };
            line.push(show(judged.reached.median));
            line.push(spread(&judged.reached, show));
            line.push(if judged.ok { "ok" } else { "SHORT" }.to_string());
        }
    }
    line
}

fn spread(spread: &Spread, show: fn(f64) -> String) -> String {
    format!("[{} {}]", show(spread.q1), show(spread.q3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ratio: f64, bound: Bound) -> Row {
        Row::new("throughput", "write 4 KiB × 1024", "GB/s", Spread::of(vec![4.0, 5.0, 6.0]))
            .beside("floor", Spread::of(vec![5.0]))
            .judged("floor", Spread::of(vec![ratio]), bound)
    }

    #[test]
    fn a_bound_is_met_by_its_own_value() {
        assert!(!row(0.95, Bound::AtLeast(0.95)).falls_short());
        assert!(row(0.949, Bound::AtLeast(0.95)).falls_short());
        assert!(!row(1.1, Bound::AtMost(1.1)).falls_short());
        assert!(row(1.101, Bound::AtMost(1.1)).falls_short());
    }

    #[test]
    fn a_row_shows_required_reached_and_spread() {
        let cells = line(&row(0.8, Bound::AtLeast(0.95)));
        let expected = [
            "write 4 KiB × 1024",
            "5.00",
            "5.00",
            "GB/s",
            "≥ 0.95 of floor",
            "0.800",
            "[0.800 0.800]",
            "SHORT",
        ];
        assert_eq!(cells, expected);
    }

    #[test]
    fn programs_read_the_bound_and_every_round() {
        let value = serde_json::to_value(row(0.8, Bound::AtLeast(0.95))).expect("serializes");
        assert_eq!(value["judged"]["required"]["at_least"], 0.95);
        assert_eq!(value["judged"]["of"], "floor");
        assert_eq!(value["kvferry"]["rounds"].as_array().expect("an array").len(), 3);
    }
}
