//! The messages of an engine handshake.

use crate::code::WireCode;
use crate::message::{DETAIL_MAX, MessageError, at_most, bodies, messages, refused};
use crate::plan::RANKS_MAX;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use std::collections::BTreeMap;
use std::fmt;

/// The longest address, in bytes.
const ADDRESS_MAX: usize = crate::message::ADVERTISED_MAX;

/// Bounds of a [`Model`]: properties, and bytes of the name or the value of one.
const PROPERTIES_MAX: usize = 16;
const PROPERTY_LEN_MAX: usize = 1024;

/// An incarnation of an engine, drawn when its scheduler half starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineId(pub u128);

impl EngineId {
    /// Parses the 32 hexadecimal digits that `Display` prints.
    pub fn parse(digits: &str) -> Option<Self> {
        let plain = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        plain.then(|| u128::from_str_radix(digits, 16).ok().map(Self)).flatten()
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What an engine computes with: the values of named properties, such as `model`, `revision`,
/// `quantization` and `hash`. KV of one model is worthless to another, even if the layouts match.
///
/// At most 16 properties; names and values have at most 1024 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Model(pub BTreeMap<String, String>);

impl Model {
    /// True for a model without properties.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if number and lengths of the properties are within the bounds.
    pub fn is_sound(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), MessageError> {
        let len = self.0.iter().flat_map(|(name, value)| [name.len(), value.len()]).max();
        at_most("model", self.0.len(), PROPERTIES_MAX)?;
        at_most("model", len.unwrap_or(0), PROPERTY_LEN_MAX)
    }

    /// The properties that a producer and a consumer both give, with different values; in words.
    pub(super) fn compare(producer: &Self, consumer: &Self) -> Result<(), String> {
        let differ = producer.0.iter().filter_map(|(name, theirs)| {
            let ours = consumer.0.get(name).filter(|ours| *ours != theirs)?;
            Some(format!("{name:?} is {theirs:?} at the producer and {ours:?} at the consumer"))
        });
        let differ: Vec<_> = differ.collect();
        if differ.is_empty() { Ok(()) } else { Err(differ.join(", ")) }
    }
}

/// Consumer rank to a rank of the producing engine: asks for its engine. May be repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduce {
    /// [`Topology::encode`](crate::plan::Topology::encode) of the consumer's engine.
    #[serde(with = "serde_bytes")]
    pub topology: Vec<u8>,
    /// The model of the consumer's engine.
    #[serde(default, skip_serializing_if = "Model::is_empty")]
    pub model: Model,
    /// Ranks whose cards are requested. If empty, as many as fit into the answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
}

/// The answer of a rank whose engine fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduced {
    /// The engine's incarnation.
    pub engine: EngineId,
    /// [`Topology::encode`](crate::plan::Topology::encode) of it.
    #[serde(with = "serde_bytes")]
    pub topology: Vec<u8>,
    /// The model of it.
    #[serde(default, skip_serializing_if = "Model::is_empty")]
    pub model: Model,
    /// Where the agent of each rank listens, `host:port`; at most [`RANKS_MAX`].
    pub addresses: Vec<String>,
    /// Cards of some of the ranks, by rank number.
    pub cards: BTreeMap<u32, ByteBuf>,
}

/// The answer of a rank whose engine does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turned {
    /// Why.
    pub code: WireCode,
    /// Why, in words; at most [`DETAIL_MAX`] bytes.
    pub detail: String,
    /// Where the agent of each rank of the producing engine listens; at most [`RANKS_MAX`]. The
    /// consumer needs them to decline the handoffs that these ranks keep.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
}

messages! {
    /// A message of an engine handshake.
    EngineHandshakeMessage, "engine_handshake":
    "introduce" => /** See [`Introduce`]. */ Introduce;
    "introduced" => /** See [`Introduced`]. */ Introduced;
    "turned" => /** See [`Turned`]. */ Turned;
}

bodies!(EngineHandshakeMessage);

impl EngineHandshakeMessage {
    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Introduce(m) => {
                m.model.check()?;
                at_most("ranks", m.ranks.len(), RANKS_MAX)
            }
            Self::Introduced(m) => {
                m.model.check()?;
                at_most("cards", m.cards.len(), RANKS_MAX)?;
                check_addresses(&m.addresses)
            }
            Self::Turned(m) => {
                at_most("detail", m.detail.len(), DETAIL_MAX)?;
                if m.code.is_ok() {
                    return Err(refused("turned", "refused with the code for success"));
                }
                check_addresses(&m.addresses)
            }
            Self::Unknown { .. } => Ok(()),
        }
    }
}

fn check_addresses(addresses: &[String]) -> Result<(), MessageError> {
    at_most("addresses", addresses.len(), RANKS_MAX)?;
    at_most("address", addresses.iter().map(String::len).max().unwrap_or(0), ADDRESS_MAX)
}
