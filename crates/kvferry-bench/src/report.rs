//! Rows of figures, with or without a bound.

use serde::Serialize;

use crate::machine::Machine;
use crate::stats::Spread;
use crate::transfers::report::Bound;
use crate::{table, units};

/// A row, with one figure.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    /// The measure.
    part: &'static str,
    /// `null` where no transport is involved.
    transport: Option<String>,
    what: String,
    unit: &'static str,
    /// `null`: the figure has no bound.
    required: Option<Bound>,
    reached: Spread,
    ok: Option<bool>,
}

impl Row {
    pub(crate) fn new(
        part: &'static str,
        what: impl Into<String>,
        unit: &'static str,
        reached: Spread,
    ) -> Row {
        let what = what.into();
        Row { part, transport: None, what, unit, required: None, reached, ok: None }
    }

    pub(crate) fn over(mut self, transport: &str) -> Row {
        self.transport = Some(transport.to_owned());
        self
    }

    /// Judges the median.
    pub(crate) fn at_most(self, bound: f64) -> Row {
        self.judged(Bound::AtMost(bound))
    }

    /// Judges the median.
    pub(crate) fn at_least(self, bound: f64) -> Row {
        self.judged(Bound::AtLeast(bound))
    }

    fn judged(mut self, required: Bound) -> Row {
        self.ok = Some(required.holds(self.reached.median));
        self.required = Some(required);
        self
    }

    fn name(&self) -> String {
        match &self.transport {
            Some(transport) => format!("{}, {transport}: {}", self.part, self.what),
            None => format!("{}: {}", self.part, self.what),
        }
    }
}

/// The figures of a bench.
#[derive(Debug, Serialize)]
pub struct Report {
    schema: &'static str,
    version: &'static str,
    machine: Machine,
    quick: bool,
    /// Whether bytes or tokens were compared. A wrong one ends a bench without a report.
    verified: bool,
    ok: bool,
    /// Parts of the options that were not carried out, and other remarks.
    remarks: Vec<String>,
    rows: Vec<Row>,
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
            schema,
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            quick,
            verified: true,
            ok: rows.iter().all(|row| row.ok != Some(false)),
            remarks,
            rows,
        }
    }

    /// One line that names every figure that misses its bound; `None` if there is none.
    pub fn shortfall(&self) -> Option<String> {
        let short: Vec<_> = self.rows.iter().filter(|row| row.ok == Some(false)).collect();
        let names: Vec<_> = short.iter().map(|row| row.name()).collect();
        let judged = self.rows.iter().filter(|row| row.ok.is_some()).count();
        let count = format!("{} of {judged} figures miss their bounds", short.len());
        (!short.is_empty()).then(|| format!("{count}: {}", names.join("; ")))
    }

    /// Marks the report as one of a replay: no bytes are verified. A replay has one round and the same figures each
    /// time.
    #[must_use]
    pub(crate) fn of_replay(self) -> Report {
        Report { verified: false, ..self }
    }

    /// The report for people.
    pub fn to_table(&self) -> String {
        let machine = &self.machine;
        let quick = if self.quick { "; --quick is too short to judge by" } else { "" };
        let figures = match self.verified {
            true => format!("medians of rounds [quartiles]{quick}"),
            false => "the same in every run".to_owned(),
        };
        let mut text = format!(
            "kvferry {} on {}, {} cores, Linux {}\n{figures}\n\n",
            self.version, machine.cpu, machine.cpus, machine.kernel
        );
        let line = |row: &Row| {
            let reached = &row.reached;
            let required = row.required.map(Bound::describe).unwrap_or_default();
            let verdict = match row.ok {
                Some(true) => "ok",
                Some(false) => "SHORT",
                None => "",
            };
            let spread = format!("[{} {}]", units::figure(reached.q1), units::figure(reached.q3));
            let spread = if self.verified { spread } else { String::new() };
            let (unit, verdict) = (row.unit.to_owned(), verdict.to_owned());
            vec![row.name(), required, units::figure(reached.median), spread, unit, verdict]
        };
        let lines: Vec<_> = self.rows.iter().map(line).collect();
        let spread = if self.verified { "[quartiles]" } else { "" };
        text.push_str(&table::aligned(&["", "required", "reached", spread, "", ""], &lines));
        for remark in &self.remarks {
            text.push_str(&format!("\nnote: {remark}\n"));
        }
        let verdict = self.shortfall().unwrap_or_else(|| "all figures meet their bounds".into());
        let verified = if self.verified { "all bytes verified; " } else { "" };
        text.push_str(&format!("\n{verified}{verdict}\n"));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_beyond_its_bound_is_named_and_one_without_a_bound_is_shown() {
        let row = |what, value| Row::new("control", what, "KiB", Spread::of(vec![value]));
        let good = vec![row("few", 4.0).over("tcp").at_most(4.0), row("shown", 9.0)];
        assert!(Report::new("test/1", false, vec![], good).shortfall().is_none());
        let bad = vec![row("many", 4.1).over("tcp").at_most(4.0), row("few", 1.0).at_most(4.0)];
        let report = Report::new("test/1", false, vec!["less memory".into()], bad);
        let short = report.shortfall().expect("one");
        assert_eq!(short, "1 of 2 figures miss their bounds: control, tcp: many");
        let text = report.to_table();
        assert!(text.contains("SHORT") && text.contains("note: less memory"), "{text}");
    }
}
