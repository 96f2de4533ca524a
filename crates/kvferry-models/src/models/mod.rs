//! Models of state machines. A model reads operations and faults from bytes: with random bytes it is
//! a property test, with bytes from a fuzzer it is a fuzz target.

pub mod admission;
pub mod directory;
pub mod engine_handshake;
pub mod handoff;
pub mod lane;
pub mod parts;
pub mod session;
pub mod tasks;

use fastrand::Rng;
use kvferry_proto::fuzzing::Met;
use std::collections::BTreeMap;

/// A model, and the combinations that a run of it must try.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Name of the model in [`crate::TARGETS`].
    pub name: &'static str,
    /// Panics on a finding, and reports each operation or fault with the state it was applied in.
    pub run: fn(&[u8], Met<'_>),
    pub rows: &'static [&'static str],
    pub columns: &'static [&'static str],
    /// Combinations that can't occur: row, columns, reason.
    pub unreachable: &'static [(&'static str, &'static [&'static str], &'static str)],
    /// Random scripts in a run of the tests, and their longest length in bytes.
    pub cases: (u32, usize),
}

impl Model {
    /// Runs the model as a fuzz target.
    pub fn fuzz(&self, bytes: &[u8]) {
        (self.run)(bytes, &mut |_, _| {});
    }
}

pub const MODELS: &[Model] = &[
    session::MODEL,
    admission::MODEL,
    lane::MODEL,
    handoff::MODEL,
    engine_handshake::MODEL,
    directory::MODEL,
    tasks::MODEL,
    parts::OUTBOX,
    parts::INBOX,
    parts::HEARTBEAT,
    parts::STREAM_WINDOW,
];

/// Number of times that each operation or fault was applied in each state.
#[derive(Clone, Debug, Default)]
pub struct Table(BTreeMap<(&'static str, &'static str), u64>);

impl Table {
    pub fn note(&mut self, row: &'static str, column: &'static str) {
        *self.0.entry((row, column)).or_default() += 1;
    }

    /// The table as text, and its faults: reachable combinations that never occurred, and unreachable
    /// ones that did.
    pub fn against(&self, model: &Model) -> (String, Vec<String>) {
        let why = |row: &str, column: &str| {
            let listed =
                model.unreachable.iter().find(|(r, c, _)| *r == row && c.contains(&column));
            listed.map(|(.., why)| *why)
        };
        let width = model.columns.iter().map(|c| c.len()).max().unwrap_or(0).max(6) + 2;
        let first = model.rows.iter().map(|r| r.len()).max().unwrap_or(0);
        let mut text = format!("{:first$}", "");
        let mut missing = Vec::new();
        model.columns.iter().for_each(|column| text += &format!("{column:>width$}"));
        for row in model.rows {
            text += &format!("\n{row:first$}");
            for column in model.columns {
                let count = self.0.get(&(row, column)).copied().unwrap_or(0);
                let cell = match (why(row, column), count) {
                    (Some(_), 0) => "-".to_owned(),
                    (Some(why), _) => {
                        missing.push(format!("{row:?} met {column:?}, which can't be: {why}"));
                        count.to_string()
                    }
                    (None, _) => {
                        if count == 0 {
                            missing.push(format!("{row:?} never met {column:?}"));
                        }
                        count.to_string()
                    }
                };
                text += &format!("{cell:>width$}");
            }
        }
        for (row, column) in self.0.keys() {
            if !model.rows.contains(row) || !model.columns.contains(column) {
                missing.push(format!("{row:?} in {column:?} is not in the table"));
            }
        }
        for (row, columns, why) in model.unreachable {
            text += &format!("\n  - {row} in {}: {why}", columns.join(", "));
        }
        (text, missing)
    }
}

pub fn random_seeds() -> Vec<Vec<u8>> {
    let mut rng = Rng::with_seed(1);
    let mut script = || {
        let mut script = vec![0; rng.usize(1..=300)];
        rng.fill(&mut script);
        script
    };
    (0..8).map(|_| script()).collect()
}
