//! What the scheduler half tells the worker halves, step by step.
//!
//! MessagePack maps keyed by name: a field of a later version is ignored, one of an earlier is
//! absent. Engines carry them as opaque bytes, every step's to every rank.

use crate::card::RankCard;
use crate::scheduler::EngineError;
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId};
use kvferry_proto::introduction::EngineId;
use kvferry_proto::pack;
use kvferry_proto::plan::Topology;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A step's orders. A worker half carries them out in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// The engine as its ranks described themselves; once, with the first orders after that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineCard>,
    /// Producer: requests that lost their blocks, which must not be read when the worker half has
    /// gone over this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restarts: Vec<String>,
    /// Producer: requests that ended. Those that are not held must not be read any more, either.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endings: Vec<Ending>,
    /// Producer: requests that this step computes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub computes: Vec<Compute>,
    /// Consumer: requests whose KV is to be fetched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wants: Vec<Want>,
    /// Consumer: handoffs that nobody here needs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frees: Vec<Free>,
    /// Consumer: requests whose fetching is to end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cancels: Vec<Cancel>,
}

/// An engine, as its scheduler half knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineCard {
    /// This life of the engine.
    pub id: EngineId,
    /// What each rank said of itself ([`crate::Worker::card`]), in the order of the ranks.
    pub ranks: Vec<serde_bytes::ByteBuf>,
}

impl EngineCard {
    /// What its ranks say, and what they are together.
    ///
    /// # Errors
    /// They make no engine.
    pub(crate) fn read(&self) -> Result<(Vec<RankCard>, Topology), EngineError> {
        let decode = |(rank, card): (usize, &serde_bytes::ByteBuf)| {
            RankCard::decode(card).map_err(|error| EngineError::Card { rank, error })
        };
        let cards = self.ranks.iter().enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;
        let topology = Topology::new(cards.iter().map(|card| &card.layout))?;
        for (second, card) in cards.iter().enumerate() {
            if let Some(first) = cards[..second].iter().position(|it| it.address == card.address) {
                let address = card.address.clone();
                return Err(EngineError::Address { first, second, address });
            }
        }
        Ok((cards, topology))
    }
}

/// A producer's request in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compute {
    /// The engine's name for it.
    pub request: String,
    /// What is to be known of it the first time, and again after it lost its blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offer: Option<Offer>,
    /// Tokens whose KV is there after the step.
    pub until: u32,
    /// Per group, the blocks that are new; or no groups at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockTable>,
}

/// What is offered of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The handoff.
    pub transfer: HandoffId,
    /// How many of its tokens are handed over.
    pub tokens: u32,
    /// Whether it is complete with these tokens; else with its [`Ending`].
    pub eager: bool,
}

/// The end of a producer's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// The engine's name for it.
    pub request: String,
    /// The handoff, also if it was never offered.
    pub transfer: HandoffId,
    /// How it ended.
    pub how: How,
}

/// How a producer's request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// Its blocks are kept until they have been fetched, or will not be.
    Held {
        /// For the consumer's engine; only if it is not complete yet.
        #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
        side_data: Option<Vec<u8>>,
    },
    /// There is nothing to fetch.
    Withdrawn {
        /// Why.
        code: WireCode,
        /// In words.
        detail: String,
    },
}

/// A consumer's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// The engine's name for it.
    pub request: String,
    /// The handoff.
    pub transfer: HandoffId,
    /// `host:port` of an agent of the producing engine.
    pub address: String,
    /// Which life of that engine, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineId>,
    /// The tokens that are fetched: from the first that is not here.
    pub tokens: (u32, u32),
    /// Per group, the request's blocks here.
    pub blocks: Vec<BlockTable>,
    /// Milliseconds that it may take.
    pub budget_ms: u32,
}

/// A handoff that nobody here needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Free {
    /// Which.
    pub transfer: HandoffId,
    /// `host:port` of an agent of the producing engine.
    pub address: String,
    /// Which life of that engine, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineId>,
    /// Why.
    pub code: WireCode,
    /// Milliseconds that telling it may take.
    pub budget_ms: u32,
}

/// A consumer's request that is not to be fetched any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// The engine's name for it.
    pub request: String,
    /// Why.
    pub code: WireCode,
    /// In words.
    pub detail: String,
}

/// Orders that are none.
#[derive(Debug, Error)]
#[error("these are not the orders of a scheduler half")]
pub struct OrdersError(#[from] rmp_serde::decode::Error);

impl Orders {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The orders as bytes; none if there are none.
    pub fn encode(&self) -> Vec<u8> {
        if self.is_empty() { Vec::new() } else { pack::encode(self) }
    }

    /// What [`Orders::encode`] made.
    ///
    /// # Errors
    /// They are something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, OrdersError> {
        if bytes.is_empty() { Ok(Self::default()) } else { Ok(pack::decode(bytes)?) }
    }
}

/// What a worker half tells the scheduler half, where the engine carries that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// Fetches that ended on this rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fetched: Vec<Fetched>,
    /// Producer's requests whose handoff ended on this rank before the engine said that they have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<Fetched>,
}

/// How something ended on a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// The engine's name for the request.
    pub request: String,
    /// How.
    pub code: WireCode,
    /// In words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// What the producers' engine sent along.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub side_data: Vec<serde_bytes::ByteBuf>,
}

impl Notes {
    /// Whether there is nothing to say.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The notes as bytes.
    pub fn encode(&self) -> Vec<u8> {
        pack::encode(self)
    }

    /// What [`Notes::encode`] made.
    ///
    /// # Errors
    /// They are something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, OrdersError> {
        Ok(pack::decode(bytes)?)
    }
}
