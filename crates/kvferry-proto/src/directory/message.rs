//! The messages of the directory: MessagePack maps, as in [`crate::message`].

use crate::code::WireCode;
use crate::engine_handshake::EngineId;
use crate::handoff::HandoffId;
use crate::message::{
    ADVERTISED_MAX, DETAIL_MAX, MessageError, at_most, bodies, messages, refused,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The most offers in one message.
pub const OFFERS_MAX: usize = 256;

/// Names the content of a prompt: a hash of its tokens and of what else its KV depends on. Engines compare their models
/// and layouts when they hand over, so that a key need not name these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ContentKey(#[serde(with = "serde_bytes")] pub [u8; 32]);

impl fmt::Debug for ContentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Subscriber to publisher: asks to be told of prompts, or to be told of them for longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follow {
    /// The subscriber's engine.
    pub engine: EngineId,
}

/// Publisher to subscriber, in answer to [`Follow`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Followed {
    /// The publisher's engine.
    pub engine: EngineId,
    /// Where the agent of the engine's rank 0 listens; at most [`ADVERTISED_MAX`] bytes.
    pub address: String,
    /// Milliseconds from now on after which the publisher forgets the subscriber.
    pub lease_ms: u32,
    /// Number of the term. Another one than before begins with everything that is on offer.
    pub term: u64,
}

/// Publisher to subscriber, in answer to [`Follow`] or later: it is not told of prompts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotFollowed {
    /// Why.
    pub code: WireCode,
    /// Why, in words; at most [`DETAIL_MAX`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// A prompt that the publisher's ranks hand over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Names the prompt.
    #[serde(rename = "k")]
    pub key: ContentKey,
    /// Name of the handoff.
    #[serde(rename = "h")]
    pub transfer: HandoffId,
    /// Milliseconds from now on for which it is kept.
    #[serde(rename = "b")]
    pub budget_ms: u32,
}

/// Publisher to its followers: prompts on offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offered {
    /// At most [`OFFERS_MAX`], the oldest first.
    pub offers: Vec<Offer>,
}

/// Publisher to its followers: an offer has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gone {
    /// Name of the handoff.
    pub transfer: HandoffId,
}

messages! {
    /// A message of the directory.
    ///
    /// Exhaustive on purpose: both sides must decide about each in each state.
    DirectoryMessage, "directory":
    "follow" => /** See [`Follow`]. */ Follow;
    "followed" => /** See [`Followed`]. */ Followed;
    "not_followed" => /** See [`NotFollowed`]. */ NotFollowed;
    "offered" => /** See [`Offered`]. */ Offered;
    "gone" => /** See [`Gone`]. */ Gone;
}

bodies!(DirectoryMessage);

impl DirectoryMessage {
    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Followed(m) => at_most("address", m.address.len(), ADVERTISED_MAX),
            Self::NotFollowed(m) if m.code.is_ok() => {
                Err(refused("not_followed", "refused with the code for success"))
            }
            Self::NotFollowed(m) => at_most("detail", m.detail.len(), DETAIL_MAX),
            Self::Offered(m) => at_most("offers", m.offers.len(), OFFERS_MAX),
            Self::Follow(_) | Self::Gone(_) | Self::Unknown { .. } => Ok(()),
        }
    }
}
