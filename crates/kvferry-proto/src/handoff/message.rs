//! The messages of the handoff protocol: MessagePack maps, as in [`crate::message`].

use super::blocks::KnownTable;
use super::{BLOCKS_MAX, Generation, HandoffId, Need, PackedTable, Progress, TableError};
use crate::code::WireCode;
use crate::message::{DETAIL_MAX, MessageError, at_most, bodies, messages, refused};
use serde::de::{self, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The most KV groups of a model.
pub const GROUPS_MAX: usize = 64;

/// The most side data of a handoff, in bytes: first token, draft tokens, hidden states.
pub const SIDE_DATA_MAX: usize = 256 * 1024;

/// Consumer to producer: asks for a request's KV. May be repeated after a reconnection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Id of the handoff.
    pub id: HandoffId,
    /// Consumer ranks that ask this producer rank, this one included. At least 1, and the same in
    /// the messages of all of them: the producer is done when all have confirmed.
    pub readers: u32,
    /// Milliseconds from now on that the consumer waits.
    pub budget_ms: u32,
}

/// Producer to consumer, in answer to [`Ask`] or later: the request has arrived at the producer's engine
/// and will be offered. It may wait there for minutes before it is computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Id of the handoff.
    pub id: HandoffId,
}

/// The content of an announcement: everything in an [`Offer`], the addition in a [`Ready`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// Counts the announcements of this generation. A gap shows that a [`Ready`] was lost with a
    /// connection.
    #[serde(rename = "s")]
    pub count: u32,
    /// Blocks, group by group; at most [`GROUPS_MAX`] groups. In an [`Offer`] all blocks, in a
    /// [`Ready`] the added ones, or no groups.
    #[serde(default, deserialize_with = "tables", skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<PackedTable>,
    /// Progress up to which the blocks are ready.
    #[serde(rename = "p")]
    pub progress: Progress,
    /// True in the last announcement.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last: bool,
    /// Data for the consumer's engine, in the last announcement; at most [`SIDE_DATA_MAX`] bytes.
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub side_data: Option<Vec<u8>>,
}

/// Producer to consumer, in answer to [`Ask`]: everything that is announced so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Id of the handoff.
    pub id: HandoffId,
    /// Generation of the blocks.
    #[serde(rename = "g")]
    pub generation: Generation,
    /// Everything announced so far.
    #[serde(flatten)]
    pub announced: Announced,
}

/// Producer to consumer: more is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Id of the handoff.
    pub id: HandoffId,
    /// Generation of the blocks.
    #[serde(rename = "g")]
    pub generation: Generation,
    /// The addition since the previous announcement.
    #[serde(flatten)]
    pub announced: Announced,
}

/// Consumer to producer: everything of this generation is read. Asks whether it was valid throughout.
/// May be repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirm {
    /// Id of the handoff.
    pub id: HandoffId,
    /// Generation that was read.
    #[serde(rename = "g")]
    pub generation: Generation,
}

/// Producer to consumer: the generation was valid until [`Confirm`] arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirmed {
    /// Id of the handoff.
    pub id: HandoffId,
    /// Generation that was valid.
    #[serde(rename = "g")]
    pub generation: Generation,
}

/// Sent by either side: the handoff has ended there, or is to end. A producer answers a consumer's `Stop` with a
/// `Stop`; a producer's needs no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stop {
    /// Id of the handoff.
    pub id: HandoffId,
    /// Whether a consumer sends it to a producer. Two ranks may be both to each other.
    #[serde(rename = "c", default, skip_serializing_if = "std::ops::Not::not")]
    pub by_consumer: bool,
    /// Result code.
    pub code: WireCode,
    /// Explanation; at most [`DETAIL_MAX`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

messages! {
    /// A message of the handoff protocol.
    ///
    /// Exhaustive on purpose: both sides must decide about each in each state.
    HandoffMessage, "handoff":
    "ask" => /** See [`Ask`]. */ Ask;
    "expected" => /** See [`Expected`]. */ Expected;
    "offer" => /** See [`Offer`]. */ Offer;
    "ready" => /** See [`Ready`]. */ Ready;
    "confirm" => /** See [`Confirm`]. */ Confirm;
    "confirmed" => /** See [`Confirmed`]. */ Confirmed;
    "stop" => /** See [`Stop`]. */ Stop;
}

bodies!(HandoffMessage);

impl HandoffMessage {
    /// The handoff that the message is about.
    pub fn id(&self) -> Option<&HandoffId> {
        match self {
            Self::Ask(m) => Some(&m.id),
            Self::Expected(m) => Some(&m.id),
            Self::Offer(m) => Some(&m.id),
            Self::Ready(m) => Some(&m.id),
            Self::Confirm(m) => Some(&m.id),
            Self::Confirmed(m) => Some(&m.id),
            Self::Stop(m) => Some(&m.id),
            Self::Unknown { .. } => None,
        }
    }

    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Ask(m) if m.readers == 0 => Err(refused("ask", "no readers")),
            Self::Offer(Offer { announced, .. }) | Self::Ready(Ready { announced, .. }) => {
                let side_data = announced.side_data.as_ref().map_or(0, Vec::len);
                at_most("tables", announced.tables.len(), GROUPS_MAX)?;
                at_most("side_data", side_data, SIDE_DATA_MAX)?;
                if !announced.progress.is_sound() {
                    return Err(refused("handoff", "inconsistent progress"));
                }
                Ok(())
            }
            Self::Stop(m) => at_most("detail", m.detail.len(), DETAIL_MAX),
            Self::Ask(_)
            | Self::Expected(_)
            | Self::Confirm(_)
            | Self::Confirmed(_)
            | Self::Unknown { .. } => Ok(()),
        }
    }
}

/// Reads at most [`GROUPS_MAX`] groups with at most [`BLOCKS_MAX`] blocks together: a few bytes can stand for a million
/// blocks.
fn tables<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PackedTable>, D::Error> {
    struct Tables;

    impl<'de> Visitor<'de> for Tables {
        type Value = Vec<PackedTable>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "at most {GROUPS_MAX} block tables with {BLOCKS_MAX} blocks in all")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let (mut tables, mut blocks) = (Vec::new(), 0);
            while let Some(table) = seq.next_element::<PackedTable>()? {
                blocks += table.blocks();
                if tables.len() == GROUPS_MAX || blocks > BLOCKS_MAX {
                    return Err(A::Error::custom(format_args!(
                        "more than {}",
                        &self as &dyn de::Expected
                    )));
                }
                tables.push(table);
            }
            Ok(tables)
        }
    }

    deserializer.deserialize_seq(Tables)
}

/// Announcements of a generation so far, without the parts that are not needed.
#[derive(Clone, Debug, Default)]
pub(super) struct Announcements {
    pub(super) count: u32,
    pub(super) tables: Vec<KnownTable>,
    pub(super) progress: Progress,
    pub(super) last: bool,
    pub(super) side_data: Option<Vec<u8>>,
}

impl Announcements {
    /// Bytes of memory that the announcements take: a few bytes of a message can stand for many blocks.
    pub(super) fn bytes(&self) -> usize {
        self.table_bytes() + self.side_data.as_ref().map_or(0, Vec::len)
    }

    fn table_bytes(&self) -> usize {
        let blocks: usize = self.tables.iter().map(|it| it.table.blocks.len()).sum();
        size_of::<u32>() * blocks
    }

    /// Drops the tables: all that they name is read. Returns how many bytes they took.
    pub(super) fn drop_tables(&mut self) -> usize {
        let bytes = self.table_bytes();
        self.tables = Vec::new();
        bytes
    }

    /// Returns everything as one announcement.
    pub(super) fn announced(&self) -> Announced {
        Announced {
            count: self.count,
            tables: self.tables.iter().map(|it| PackedTable::from(&it.table)).collect(),
            progress: self.progress,
            last: self.last,
            side_data: self.side_data.clone(),
        }
    }

    /// Adds a later announcement, as far as it is needed.
    ///
    /// # Errors
    /// The tables contradict what is known. Nothing was added.
    pub(super) fn merge(&mut self, news: &Announced, need: Need) -> Result<(), TableError> {
        if !news.tables.is_empty() {
            let groups = news.tables.len();
            let is_first = self.tables.is_empty();
            if groups > need.groups as usize || !(is_first || groups == self.tables.len()) {
                return Err(TableError::Malformed);
            }
            for (known, more) in self.tables.iter().zip(&news.tables) {
                known.check(more)?;
            }
            if is_first {
                self.tables.resize_with(groups, KnownTable::default);
            }
            for (known, more) in self.tables.iter_mut().zip(&news.tables) {
                known.add(more, need.blocks);
            }
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
