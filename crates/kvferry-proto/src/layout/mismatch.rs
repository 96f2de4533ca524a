//! Differences for which two engines, or two ranks of one engine, do not fit, in words and numbers.

use super::{Encoding, Fingerprint, Kind, RowDensity};
use std::fmt;

/// An end of a handoff: one of its two engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum End {
    /// The engine that has the blocks.
    Producer,
    /// The engine that reads them.
    Consumer,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Producer => "producer",
            Self::Consumer => "consumer",
        })
    }
}

/// A pairing that cannot work: where, and the two values that do not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The sides that differ.
    pub sides: MismatchSides,
    /// The layer; empty if the model as a whole differs.
    pub layer: Box<str>,
    /// The plane of the layer; empty if the layer as a whole differs.
    pub plane: Box<str>,
    /// The property that differs, with both values.
    pub difference: Difference,
}

impl Mismatch {
    pub(crate) fn new(
        sides: MismatchSides,
        layer: &str,
        plane: &str,
        difference: Difference,
    ) -> Self {
        Self { sides, layer: layer.into(), plane: plane.into(), difference }
    }
}

impl std::error::Error for Mismatch {}

/// The two sides that differ: the first and the second of a [`Difference`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MismatchSides {
    /// The producer and the consumer.
    Ends,
    /// Two ranks of one engine.
    Ranks(usize, usize),
}

/// The property that differs. Pairs hold the value of the first and of the second.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "`Display` names the fields")]
pub enum Difference {
    /// Heads in the model.
    Heads(u32, u32),
    /// Number format or quantisation.
    Encoding(Encoding, Encoding),
    /// Bytes of one head and row.
    Content(u32, u32),
    /// Rows per tokens, or per state.
    Rows(RowDensity, RowDensity),
    /// The tokens that attention covers.
    Kind(Kind, Kind),
    /// The roles of a layer's planes.
    Planes(Vec<String>, Vec<String>),
    /// Block sizes in tokens of which neither divides the other; of two ranks, that differ.
    BlockTokens(u32, u32),
    /// Context parallelism: the number of ranks, and the tokens of a run.
    Context((u32, u32), (u32, u32)),
    /// A layer that only the first has, and how many layers each has.
    OnlyFirst { first: usize, second: usize },
    /// A layer that only the second has, and how many layers each has.
    OnlySecond { first: usize, second: usize },
    /// A head that is on no rank of an engine at that context-parallel rank.
    Unheld { head: u32, total: u32, context: u32, contexts: u32 },
    /// An engine without ranks.
    Ranks(usize, usize),
    /// More than can be planned.
    TooMany { what: &'static str, count: u64, limit: u64 },
    /// A share of the work that the layouts do not have: the first head and their number.
    NotHeld { wanted: (u32, u32), held: (u32, u32) },
    /// The fingerprints.
    Fingerprint(Fingerprint, Fingerprint),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.layer, &*self.plane) {
            ("", _) => {}
            (layer, "") => write!(f, "layer {layer}: ")?,
            (layer, plane) => write!(f, "layer {layer} ({plane}): ")?,
        }
        let (a, b) = match self.sides {
            MismatchSides::Ends => (End::Producer.to_string(), End::Consumer.to_string()),
            MismatchSides::Ranks(a, b) => (format!("rank {a}"), format!("rank {b}")),
        };
        match &self.difference {
            Difference::Heads(x, y) => write!(f, "{a} has {x} KV heads, {b} {y}"),
            Difference::Encoding(x, y) => write!(
                f,
                "{a} stores {} ({} bits), {b} {} ({} bits)",
                x.name, x.bits, y.name, y.bits
            ),
            Difference::Content(x, y) => {
                write!(f, "{a} has {x} bytes per head and row, {b} {y}")
            }
            Difference::Rows(x, y) => write!(f, "{a} has {x}, {b} {y}"),
            Difference::Kind(x, y) => write!(f, "{a} keeps {x}, {b} {y}"),
            Difference::Planes(x, y) => write!(
                f,
                "{a} has {} planes ({}), {b} {} ({})",
                x.len(),
                x.join(", "),
                y.len(),
                y.join(", ")
            ),
            Difference::BlockTokens(x, y) => {
                write!(f, "blocks of {a} have {x} tokens, those of {b} {y}")?;
                let divides = *x > 0 && *y > 0 && (x % y == 0 || y % x == 0);
                if divides { Ok(()) } else { write!(f, ": neither divides the other") }
            }
            Difference::Context(x, y) => write!(
                f,
                "{a} deals {} tokens in turn to {} ranks, {b} {} to {}",
                x.1, x.0, y.1, y.0
            ),
            Difference::OnlyFirst { first, second } => {
                write!(f, "{a} has it among {first} layers, {b} not among {second}")
            }
            Difference::OnlySecond { first, second } => {
                write!(f, "{b} has it among {second} layers, {a} not among {first}")
            }
            Difference::Unheld { head, total, context, contexts } => {
                write!(f, "no rank holds KV head {head} of {total}")?;
                if *contexts > 1 {
                    write!(f, " at context-parallel rank {context} of {contexts}")?;
                }
                Ok(())
            }
            Difference::Ranks(x, y) => write!(f, "{a} has {x} ranks, {b} {y}"),
            Difference::TooMany { what, count, limit } => {
                write!(f, "{count} {what} are beyond the limit of {limit}")
            }
            Difference::NotHeld { wanted, held } => write!(
                f,
                "the share has heads {} to {}, the rank {} to {}",
                wanted.0,
                wanted.0 + wanted.1,
                held.0,
                held.0 + held.1
            ),
            Difference::Fingerprint(x, y) => {
                write!(f, "the models differ: {a} has {x}, {b} {y}")
            }
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("all tokens"),
            Self::Window { tokens } => write!(f, "a window of {tokens} tokens"),
            Self::Chunk { tokens } => write!(f, "chunks of {tokens} tokens"),
            Self::State => f.write_str("a state"),
        }
    }
}
