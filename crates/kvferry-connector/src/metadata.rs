//! What the scheduler half and the worker halves send each other, step by step.
//!
//! MessagePack maps keyed by name: a decoder ignores fields of later versions. Engines carry them as
//! opaque bytes; every rank gets the metadata of every step.

use crate::address::{AgentAddress, ProducerAddress};
use crate::rank_metadata::{RankMetadata, RankMetadataError};
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{BlockTable, HandoffId};
use kvferry_proto::pack;
use kvferry_proto::plan::Topology;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A step's metadata. A worker half carries out its fields in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectorMetadata {
    /// The engine, once, after all its ranks have described themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineMetadata>,
    /// Producer: requests that lost their blocks. No consumer may accept reads of the blocks once the
    /// worker half has applied this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restarts: Vec<String>,
    /// Producer: requests that ended. The same holds for those that are not held.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endings: Vec<Ending>,
    /// Producer: held requests whose blocks the engine needs. Those that no consumer has asked for are
    /// withdrawn, and reported as sent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reclaims: Vec<String>,
    /// Producer: requests that this step computes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub computes: Vec<Compute>,
    /// Producer: requests that have arrived and will be offered in a later step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expects: Vec<Expect>,
    /// Consumer: requests that have arrived and will be fetched, or freed, in a later step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<Claim>,
    /// Consumer: requests to fetch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fetches: Vec<FetchRequest>,
    /// Consumer: handoffs that this engine does not need.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frees: Vec<Free>,
    /// Consumer: fetches to end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cancels: Vec<Cancel>,
}

/// An engine as its scheduler half knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineMetadata {
    /// Drawn when the scheduler half starts: a restarted engine has another.
    pub id: EngineId,
    /// [`crate::Worker::rank_metadata`] of each rank, by its number.
    pub ranks: Vec<serde_bytes::ByteBuf>,
}

impl EngineMetadata {
    /// The ranks' metadata and the topology that they form.
    ///
    /// # Errors
    /// All but [`EngineError::Ranks`].
    pub(crate) fn read(&self) -> Result<(Vec<RankMetadata>, Topology), EngineError> {
        let decode = |(rank, bytes): (usize, &serde_bytes::ByteBuf)| {
            RankMetadata::decode(bytes).map_err(|error| EngineError::Rank { rank, error })
        };
        let ranks = self.ranks.iter().enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;
        let topology = Topology::new(ranks.iter().map(|rank| &rank.layout))?;
        for (second, rank) in ranks.iter().enumerate() {
            if rank.model != ranks[0].model {
                return Err(EngineError::Model { first: 0, second });
            }
            if let Some(first) = ranks[..second].iter().position(|it| it.address == rank.address) {
                let address = rank.address.clone();
                return Err(EngineError::Address { first, second, address });
            }
        }
        Ok((ranks, topology))
    }
}

/// The reason why the ranks' metadata describe no engine.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are in the messages")]
pub enum EngineError {
    /// More or fewer ranks than configured.
    #[error("expected metadata from {ranks} ranks, got {given}")]
    Ranks { given: usize, ranks: usize },
    /// A rank's metadata cannot be decoded.
    #[error("rank {rank}: {error}")]
    Rank { rank: usize, error: RankMetadataError },
    /// Two ranks have one address, which can lead to only one of them.
    #[error("ranks {first} and {second} both have the address {address}: give each its own")]
    Address { first: usize, second: usize, address: AgentAddress },
    /// Two ranks compute with different models.
    #[error("ranks {first} and {second} have different models")]
    Model { first: usize, second: usize },
    /// The ranks' layouts contradict each other.
    #[error(transparent)]
    Topology(#[from] kvferry_proto::layout::Mismatch),
}

/// A producer's request in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compute {
    /// The engine's id of the request.
    pub request: String,
    /// Set in the first step of the request, and in the first after it lost its blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offer: Option<Offer>,
    /// Tokens whose KV exists after the step.
    pub until: u32,
    /// New blocks, one table per group; empty if no group has any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockTable>,
}

/// A producer's request that has arrived, whose handoff's id the router knows. It may wait for minutes
/// before its first [`Compute`]; its [`Ending`] comes in any case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expect {
    /// The engine's id of the request.
    pub request: String,
    /// The handoff.
    pub transfer: HandoffId,
}

/// A consumer's request that has arrived. It may wait for minutes before a [`FetchRequest`] or [`Free`]
/// of its handoff ends the claim. A later claim of the same handoff replaces this one: the request has
/// ended, and another one with the same handoff takes its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The engine's id of the request.
    pub request: String,
    /// The handoff.
    pub transfer: HandoffId,
    /// The producer's address, as in [`FetchRequest::address`].
    pub address: ProducerAddress,
    /// The incarnation of the producing engine that is meant, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineId>,
    /// Tokens of the prompt: no more will be fetched.
    pub tokens: u32,
}

/// A producer's offer of a request's KV.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The handoff.
    pub transfer: HandoffId,
    /// Number of tokens of the request that are handed over.
    pub tokens: u32,
    /// Complete when these tokens are computed; else with its [`Ending`].
    pub eager: bool,
}

/// The end of a producer's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// The engine's id of the request.
    pub request: String,
    /// The handoff, even if it was never offered.
    pub transfer: HandoffId,
    /// The end of the request, which decides what happens to its blocks.
    pub how: EndingKind,
}

/// The way in which a producer's request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndingKind {
    /// The request's blocks are kept until they have been fetched, or until it is certain that they
    /// will not be.
    Held {
        /// Side data for the consumer's engine, unless the handoff is complete already.
        #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
        side_data: Option<Vec<u8>>,
    },
    /// Nothing can be fetched.
    Withdrawn {
        /// The code of the reason.
        code: WireCode,
        /// The reason in words.
        detail: String,
        /// The engine keeps its blocks until all ranks have withdrawn it and report it sent.
        #[serde(default, skip_serializing_if = "is_false")]
        held: bool,
    },
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// A consumer's request to fetch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchRequest {
    /// The engine's id of the request.
    pub request: String,
    /// The handoff.
    pub transfer: HandoffId,
    /// An agent of the producing engine, or its bootstrap server.
    pub address: ProducerAddress,
    /// The incarnation of that engine that is meant, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineId>,
    /// First token to fetch, and the one after the last.
    pub tokens: (u32, u32),
    /// The consumer's block tables of the request, one per group.
    pub blocks: Vec<BlockTable>,
    /// Time limit of the fetch, in milliseconds.
    pub budget_ms: u32,
}

/// A handoff that this engine does not need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Free {
    /// The handoff.
    pub transfer: HandoffId,
    /// The producer's address, as in [`FetchRequest::address`].
    pub address: ProducerAddress,
    /// The incarnation of that engine that is meant, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineId>,
    /// The code of the reason why it is not needed.
    pub code: WireCode,
    /// Time limit for reaching the producer, in milliseconds.
    pub budget_ms: u32,
}

/// A fetch to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// The engine's id of the request.
    pub request: String,
    /// The code of the reason for the end.
    pub code: WireCode,
    /// The reason in words.
    pub detail: String,
}

/// Bytes that are no metadata.
#[derive(Debug, Error)]
#[error("malformed connector metadata: {0}")]
pub struct MetadataError(#[from] rmp_serde::decode::Error);

impl ConnectorMetadata {
    /// Whether a worker half would do nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Reports for which an engine waits that gives this to a worker half: of these fetches, and of these endings, each with
    /// its handoff and whether its blocks are held. For [`crate::Worker::lose_step`], beside the bytes.
    pub fn awaited(&self) -> (Vec<String>, Vec<(String, HandoffId, bool)>) {
        let fetches = self.fetches.iter().map(|fetch| fetch.request.clone());
        let endings = self.endings.iter().map(|Ending { request, transfer, how }| {
            let held = match how {
                EndingKind::Held { .. } => true,
                EndingKind::Withdrawn { held, .. } => *held,
            };
            (request.clone(), transfer.clone(), held)
        });
        (fetches.collect(), endings.collect())
    }

    /// The metadata as bytes; empty if there is nothing to do.
    pub fn encode(&self) -> Vec<u8> {
        if self.is_empty() { Vec::new() } else { pack::encode(self) }
    }

    /// Decodes what [`ConnectorMetadata::encode`] returned.
    ///
    /// # Errors
    /// The bytes are malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, MetadataError> {
        if bytes.is_empty() { Ok(Self::default()) } else { Ok(pack::decode(bytes)?) }
    }
}

/// Notes of a worker half to the scheduler half, if the engine can carry them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// Fetches that ended on this rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fetched: Vec<RequestOutcome>,
    /// Claims and fetches whose producer has offered the handoff, or has its request in a queue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub answered: Vec<String>,
    /// Producer's requests whose handoff ended on this rank before the request did, or while it was held
    /// for a consumer that has not asked for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<RequestOutcome>,
}

/// Outcome of a fetch or a handoff on a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestOutcome {
    /// The engine's id of the request.
    pub request: String,
    /// [`WireCode::Ok`], or why it failed.
    pub code: WireCode,
    /// The reason of a failure, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Side data of the producer ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub side_data: Vec<serde_bytes::ByteBuf>,
}

impl Notes {
    /// Whether nothing has ended.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Encodes the notes.
    pub fn encode(&self) -> Vec<u8> {
        pack::encode(self)
    }

    /// Decodes what [`Notes::encode`] returned.
    ///
    /// # Errors
    /// The bytes are malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, MetadataError> {
        Ok(pack::decode(bytes)?)
    }
}
