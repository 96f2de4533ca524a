//! The tables of a report. Rows of one part over one transport are a table.

use crate::units;

use super::row::{Figure, Row, spread_text};

/// Parts in the order in which their tables are shown, with the titles.
const TITLES: [(&str, &str); 41] = [
    ("throughput", "Batches of scattered blocks"),
    ("cpu", "The same: processor time of both sides together"),
    ("waits", "The same: times that a thread of either side slept and was woken"),
    ("python-call", "The cost of a call from Python"),
    ("callers", "Concurrent callers, 100 to 500 blocks of 32 KiB each, all together"),
    ("pair", "Two callers with large blocks, together"),
    ("churn", "Memory registered and unregistered beside callers"),
    ("latency", "One block at a time"),
    ("setup", "Before the first byte"),
    ("idle", "Live sessions, nothing to do"),
    ("sessions", "Many live sessions on one agent"),
    ("faults", "Faults"),
    ("exposed", "What is left of a handoff when prefill has been computed"),
    ("second", "A second handoff between two engines"),
    ("step", "What the connector costs a scheduler step"),
    ("plan", "Planning between engines of unequal tensor parallelism"),
    ("control", "Control messages of a handoff"),
    ("one block", "Handoffs of one block"),
    ("invented", "Handoffs beside a client that makes up the parameters of its requests"),
    ("file", "Blocks to a file and back"),
    ("store", "Blocks through the store"),
    ("full", "Puts into a full store"),
    ("kept", "What a full store keeps, and copies for it"),
    ("events", "From a change of the store until another process takes its report"),
    ("around", "The store beside puts and gets"),
    ("index", "The index by itself"),
    ("hits", "Hits of a trace"),
    ("segments", "The same in a store of segments"),
    ("offload", "Blocks offloaded and onboarded"),
    ("scheduler", "Calls on the scheduler's thread"),
    ("manager", "The block manager by itself, for one block"),
    ("idle processes", "Processes with nothing to do"),
    ("gpu contiguous", "Memory of the GPU in one piece, to host memory (out) and back (in)"),
    ("gpu scattered", "Blocks of the GPU's memory, to host memory (out) and back (in)"),
    ("gpu peers", "From GPU to GPU between two processes, beside host memory"),
    ("gpu exposed", "A handoff of layers beside their computation"),
    ("gpu beside", "A computation beside copies that never pause"),
    ("gpu cpu", "Processor time of copies"),
    ("gpu first", "The first copy of a process, and what it takes"),
    ("gpu file", "Memory of the GPU to a file and back"),
    ("gpu parts", "Measurements"),
];

/// A table of the report: rows with the same columns.
pub(super) struct Section<'a> {
    pub(super) title: String,
    pub(super) header: Vec<&'a str>,
    pub(super) rows: Vec<&'a Row>,
    /// Each row is one figure that is judged by itself, if at all: bounds and verdicts are columns.
    pub(super) is_judged_inline: bool,
}

/// The tables of `rows`: transport by transport in the order of their first rows, parts in the order of [`TITLES`].
pub(super) fn sections(rows: &[Row]) -> Vec<Section<'_>> {
    let place = |part: &str| TITLES.iter().position(|(known, _)| *known == part);
    let mut transports: Vec<_> = rows.iter().map(|row| &row.transport).collect();
    dedup(&mut transports);
    let mut sections = Vec::new();
    for transport in transports {
        let rows = || rows.iter().filter(|row| row.transport == *transport);
        let mut parts: Vec<&str> = rows().map(|row| &*row.part).collect();
        parts.sort_by_key(|part| place(part).unwrap_or(TITLES.len()));
        dedup(&mut parts);
        for part in parts {
            let title = place(part).map_or(part, |place| TITLES[place].1);
            let rows = rows().filter(|row| row.part == part).collect();
            sections.push(Section::new(title, transport.as_deref(), rows));
        }
    }
    sections
}

/// Keeps the first of equal items.
fn dedup<T: PartialEq + Copy>(items: &mut Vec<T>) {
    let mut kept = Vec::new();
    items.retain(|item| {
        let is_new = !kept.contains(item);
        kept.extend(is_new.then_some(*item));
        is_new
    });
}

impl<'a> Section<'a> {
    fn new(title: &str, transport: Option<&str>, rows: Vec<&'a Row>) -> Section<'a> {
        let alone = |row: &&Row| match &row.figures[..] {
            [only] => only.failed.is_none() && row.judged.iter().all(|judged| judged.of.is_none()),
            _ => false,
        };
        let is_judged_inline = rows.iter().all(alone);
        let mut header = vec![""];
        if is_judged_inline {
            let rounds = rows.iter().flat_map(|row| &row.figures).flat_map(|it| &it.spread);
            if rows.iter().any(|row| !row.judged.is_empty()) {
                header.extend(["required", "reached", QUARTILES, VERDICT]);
            } else {
                header.extend(["measured", QUARTILES]);
            }
            if rounds.into_iter().all(|spread| spread.rounds.len() == 1) {
                header.retain(|name| *name != QUARTILES);
            }
        } else {
            header.extend(rows.iter().flat_map(|row| &row.figures).map(|figure| &*figure.who));
            dedup(&mut header);
        }
        let mut title = title.to_owned();
        if let Some(transport) = transport {
            title.push_str(&format!(", over {transport}"));
        }
        let unit = &*rows[0].unit;
        match rows.iter().all(|row| row.unit == unit) {
            true if unit.is_empty() => {}
            true => title.push_str(&format!(", {unit}")),
            false => {
                let place = header.iter().position(|name| *name == VERDICT);
                header.insert(place.unwrap_or(header.len()), UNIT);
            }
        }
        Section { title, header, rows, is_judged_inline }
    }

    /// A row's cells, one per column.
    pub(super) fn cells(&self, row: &Row) -> Vec<String> {
        let cell = |&name: &&str| match name {
            "" => row.work.clone(),
            UNIT => row.unit.to_string(),
            _ if self.is_judged_inline => inline(row, name),
            who => match row.figures.iter().find(|figure| figure.who == who) {
                Some(Figure { spread: Some(spread), .. }) => units::figure(spread.median),
                Some(_) => "failed".to_string(),
                None => String::new(),
            },
        };
        self.header.iter().map(cell).collect()
    }
}

const UNIT: &str = "unit";
const QUARTILES: &str = "[quartiles]";
/// The column with `ok` or `SHORT`; its title is a space, which the first column's is not.
const VERDICT: &str = " ";

/// The cell of a row with one figure.
fn inline(row: &Row, column: &str) -> String {
    let judged = row.judged.first();
    let spread = row.figures[0].spread.as_ref().expect("it has not failed");
    let [median, quartiles] = spread_text(spread, units::figure);
    match column {
        "required" => judged.map(|judged| judged.requirement()).unwrap_or_default(),
        QUARTILES => quartiles,
        VERDICT => judged.map_or("", |judged| judged.verdict()).to_owned(),
        _ => median,
    }
}
