//! What the two sides of a handoff say to each other: MessagePack maps, as in [`crate::message`].

use super::{BLOCKS_MAX, BlockTable, Generation, HandoffId, Progress, TableError};
use crate::code::WireCode;
use crate::message::{Check, DETAIL_MAX, MessageError, at_most, bodies, messages};
use serde::de::{Error as _, Expected, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The most KV groups of a model.
pub const GROUPS_MAX: usize = 64;

/// The most side data of a handoff, in bytes: first token, draft tokens, hidden states.
pub const SIDE_DATA_MAX: usize = 256 * 1024;

/// Consumer to producer: I need this request's KV. May be said again, after a reconnection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Which.
    pub id: HandoffId,
    /// How many consumer ranks ask this producer rank, this one included. At least 1, and the same
    /// from all of them: the producer is done when all have confirmed.
    pub readers: u32,
    /// Milliseconds the consumer will wait from now on.
    pub budget_ms: u32,
}

/// What a producer says of what it has; all of it, or what is new.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// How often something was announced of this generation, this included: a [`Ready`] that does
    /// not follow what is known shows that one was lost with a connection.
    #[serde(rename = "s")]
    pub count: u32,
    /// Blocks, group by group; at most [`GROUPS_MAX`]. In an [`Offer`] all of them, in a [`Ready`]
    /// those that were added, or no groups at all.
    #[serde(default, deserialize_with = "tables", skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<BlockTable>,
    /// How far they are ready.
    #[serde(rename = "p")]
    pub progress: Progress,
    /// Nothing more will come.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last: bool,
    /// For the consumer's engine, with the last; at most [`SIDE_DATA_MAX`] bytes.
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub side_data: Option<Vec<u8>>,
}

/// Producer to consumer, in answer to [`Ask`]: what there is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Which.
    pub id: HandoffId,
    /// Which contents.
    #[serde(rename = "g")]
    pub generation: Generation,
    /// Everything so far.
    #[serde(flatten)]
    pub announced: Announced,
}

/// Producer to consumer: more is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Which.
    pub id: HandoffId,
    /// Which contents.
    #[serde(rename = "g")]
    pub generation: Generation,
    /// What is new.
    #[serde(flatten)]
    pub announced: Announced,
}

/// Consumer to producer: I have read all I need of this generation. Was it valid throughout? May be
/// said again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirm {
    /// Which.
    pub id: HandoffId,
    /// What was read.
    #[serde(rename = "g")]
    pub generation: Generation,
}

/// Producer to consumer: it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirmed {
    /// Which.
    pub id: HandoffId,
    /// What was valid.
    #[serde(rename = "g")]
    pub generation: Generation,
}

/// From either: this handoff has ended here, or shall. The producer answers a consumer's in kind;
/// a producer's needs no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stop {
    /// Which.
    pub id: HandoffId,
    /// Whether a consumer says so, to a producer. Two ranks may be both to each other.
    #[serde(rename = "c", default, skip_serializing_if = "std::ops::Not::not")]
    pub by_consumer: bool,
    /// How.
    pub code: WireCode,
    /// Why, in words; at most [`DETAIL_MAX`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

messages! {
    /// A message of the handoff protocol.
    ///
    /// Exhaustive on purpose: both sides must decide about each in each state.
    HandoffMessage, "handoff":
    "ask" => /** See [`Ask`]. */ Ask;
    "offer" => /** See [`Offer`]. */ Offer;
    "ready" => /** See [`Ready`]. */ Ready;
    "confirm" => /** See [`Confirm`]. */ Confirm;
    "confirmed" => /** See [`Confirmed`]. */ Confirmed;
    "stop" => /** See [`Stop`]. */ Stop;
}

bodies!(HandoffMessage);

impl HandoffMessage {
    /// The handoff it is about.
    pub fn id(&self) -> Option<&HandoffId> {
        match self {
            Self::Ask(m) => Some(&m.id),
            Self::Offer(m) => Some(&m.id),
            Self::Ready(m) => Some(&m.id),
            Self::Confirm(m) => Some(&m.id),
            Self::Confirmed(m) => Some(&m.id),
            Self::Stop(m) => Some(&m.id),
            Self::Unknown { .. } => None,
        }
    }
}

/// As many groups as there may be, with as many blocks together as one may have: a few bytes stand
/// for a million blocks, and are not to fill the memory.
fn tables<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<BlockTable>, D::Error> {
    struct Tables;

    impl<'de> Visitor<'de> for Tables {
        type Value = Vec<BlockTable>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "at most {GROUPS_MAX} block tables with {BLOCKS_MAX} blocks in all")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let (mut tables, mut blocks) = (Vec::new(), 0);
            while let Some(table) = seq.next_element::<BlockTable>()? {
                blocks += table.blocks.len();
                if tables.len() == GROUPS_MAX || blocks > BLOCKS_MAX {
                    return Err(A::Error::custom(format_args!(
                        "more than {}",
                        &self as &dyn Expected
                    )));
                }
                tables.push(table);
            }
            Ok(tables)
        }
    }

    deserializer.deserialize_seq(Tables)
}

fn refused(kind: &'static str, detail: &str) -> MessageError {
    MessageError::Malformed { kind, detail: detail.to_owned() }
}

impl Check for Ask {
    fn check(&self) -> Result<(), MessageError> {
        if self.readers == 0 { Err(refused("ask", "no readers")) } else { Ok(()) }
    }
}

impl Check for Announced {
    fn check(&self) -> Result<(), MessageError> {
        at_most("tables", self.tables.len(), GROUPS_MAX)?;
        at_most("side_data", self.side_data.as_ref().map_or(0, Vec::len), SIDE_DATA_MAX)?;
        if !self.progress.is_sound() {
            return Err(refused("handoff", "progress that can't be"));
        }
        Ok(())
    }
}

impl Check for Offer {
    fn check(&self) -> Result<(), MessageError> {
        self.announced.check()
    }
}

impl Check for Ready {
    fn check(&self) -> Result<(), MessageError> {
        self.announced.check()
    }
}

impl Check for Stop {
    fn check(&self) -> Result<(), MessageError> {
        at_most("detail", self.detail.len(), DETAIL_MAX)
    }
}

impl Check for Confirm {}
impl Check for Confirmed {}

impl Announced {
    /// Takes in what came later, or all there is.
    ///
    /// # Errors
    /// The tables do not fit what is known; nothing was taken in.
    pub(super) fn merge(&mut self, news: &Self) -> Result<(), TableError> {
        if self.tables.is_empty() {
            self.tables.clone_from(&news.tables);
        } else if !news.tables.is_empty() {
            if self.tables.len() != news.tables.len() {
                return Err(TableError::Malformed);
            }
            let mut tables = self.tables.clone();
            for (known, more) in tables.iter_mut().zip(&news.tables) {
                known.merge(more)?;
            }
            self.tables = tables;
        }
        self.count = news.count;
        self.progress = self.progress.max(news.progress);
        if news.last && !self.last {
            self.last = true;
            self.side_data.clone_from(&news.side_data);
        }
        Ok(())
    }
}
