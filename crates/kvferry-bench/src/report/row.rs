//! Rows of figures, and the bounds that judge them.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::options::{Op, Size};
use crate::stats::Spread;
use crate::units;

/// A name that this program knows, or that was read from a report.
pub(crate) type Text = Cow<'static, str>;

/// A line of a report: the figures of all that did one piece of work in the same rounds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// The measure. Its rows are one table, for each transport.
    pub(crate) part: Text,
    /// `null` where no transport is involved.
    #[serde(default)]
    pub(crate) transport: Option<String>,
    pub(crate) work: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) op: Option<Op>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) size: Option<Size>,
    pub(crate) unit: Text,
    /// kvferry's first, then the others of the same rounds.
    pub(crate) figures: Vec<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) floor_settings: Option<Choice>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) judged: Vec<Judged>,
}

/// A subject's figure, or why it has none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) who: Text,
    #[serde(flatten)]
    pub(crate) spread: Option<Spread>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<String>,
    /// Figures of the caller's process and of the target's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sides: Option<[Spread; 2]>,
}

impl Figure {
    pub(crate) fn of(who: &'static str, spread: Spread) -> Figure {
        Figure { who: who.into(), spread: Some(spread), failed: None, sides: None }
    }

    pub(crate) fn failed(who: &'static str, why: String) -> Figure {
        Figure { who: who.into(), spread: None, failed: Some(why), sides: None }
    }
}

/// The settings with which the floor was fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Choice {
    pub(crate) chunk: usize,
    /// `null`: left to the kernel.
    pub(crate) buffer: Option<usize>,
    #[serde(default = "one_stream")]
    pub(crate) streams: usize,
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

/// A figure with its bound.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Judged {
    pub(crate) what: String,
    /// Denominator of a ratio; `null` when the figure itself is judged.
    pub(crate) of: Option<Text>,
    pub(crate) unit: Text,
    pub(crate) required: Bound,
    pub(crate) reached: Spread,
    pub(crate) ok: bool,
}

impl Judged {
    /// `≥ 0.95 of floor`, `≤ 2 µs`.
    pub(super) fn requirement(&self) -> String {
        let required = self.required.describe();
        match &self.of {
            Some(of) => format!("{required} of {of}"),
            None => format!("{required} {}", self.unit).trim_end().to_owned(),
        }
    }

    /// The median as text, and the quartiles.
    pub(super) fn reached(&self) -> [String; 2] {
        spread_text(&self.reached, if self.of.is_some() { units::ratio } else { units::figure })
    }

    pub(super) fn verdict(&self) -> &'static str {
        if self.ok { "ok" } else { "SHORT" }
    }
}

/// A median as text, and its quartiles, unless there was only one round.
pub(super) fn spread_text(spread: &Spread, show: fn(f64) -> String) -> [String; 2] {
    let quartiles = match spread.rounds.len() {
        1 => String::new(),
        _ => format!("[{} {}]", show(spread.q1), show(spread.q3)),
    };
    [show(spread.median), quartiles]
}

impl Row {
    /// A row with kvferry's figure.
    pub(crate) fn new(
        part: &'static str,
        work: impl Into<String>,
        unit: &'static str,
        kvferry: Spread,
    ) -> Row {
        Row::with(part, work, unit, vec![Figure::of("kvferry", kvferry)])
    }

    pub(crate) fn with(
        part: &'static str,
        work: impl Into<String>,
        unit: &'static str,
        figures: Vec<Figure>,
    ) -> Row {
        Row {
            part: part.into(),
            transport: None,
            work: work.into(),
            op: None,
            size: None,
            unit: unit.into(),
            figures,
            floor_settings: None,
            judged: Vec::new(),
        }
    }

    pub(crate) fn over(mut self, transport: &str) -> Row {
        self.transport = Some(transport.to_owned());
        self
    }

    pub(crate) fn beside(mut self, who: &'static str, figure: Spread) -> Row {
        self.figures.push(Figure::of(who, figure));
        self
    }

    /// Judges the median of a ratio to another figure of the row, if there is one.
    pub(crate) fn judge(
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

    pub(crate) fn judged(mut self, of: &'static str, reached: Spread, required: Bound) -> Row {
        self.judge(self.work.clone(), of, Some(reached), required);
        self
    }

    /// Adds a figure of the same rounds, and judges the median of the ratio of kvferry's figures to it.
    pub(crate) fn at_least_of(self, part: f64, who: &'static str, theirs: Spread) -> Row {
        let ratio = Spread::ratio(&self.kvferry().rounds, &theirs.rounds);
        self.beside(who, theirs).judged(who, ratio, Bound::AtLeast(part))
    }

    /// Judges the median of kvferry's figure.
    pub(crate) fn at_most(self, bound: f64) -> Row {
        self.judged_itself(Bound::AtMost(bound))
    }

    /// Judges the median of kvferry's figure.
    pub(crate) fn at_least(self, bound: f64) -> Row {
        self.judged_itself(Bound::AtLeast(bound))
    }

    fn judged_itself(mut self, required: Bound) -> Row {
        let reached = self.kvferry().clone();
        let (what, unit) = (self.work.trim().to_string(), self.unit.clone());
        let ok = required.holds(reached.median);
        self.judged.push(Judged { what, of: None, unit, required, reached, ok });
        self
    }

    fn kvferry(&self) -> &Spread {
        self.figures[0].spread.as_ref().expect("a row has kvferry's figure")
    }

    pub(crate) fn figure(&self, who: &str) -> Option<&Spread> {
        self.figures.iter().find(|figure| figure.who == who)?.spread.as_ref()
    }

    /// `tcp: write 4 KiB`: what was judged, with the transport if there is one.
    pub(super) fn name(&self, judged: &Judged) -> String {
        let transport = self.transport.iter().map(|transport| format!("{transport}: "));
        transport.chain([judged.what.clone()]).collect()
    }
}
