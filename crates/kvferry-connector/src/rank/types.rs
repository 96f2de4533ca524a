//! Arguments, events, errors and observers of a rank.

use crate::address::AgentAddress;
use kvferry::{Batch, Error, Incarnation, Peer};
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::{Failure, Pairing};
use kvferry_proto::handoff::{BlockTable, HandoffId, Need, Outcome, Refusal, Slice};
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Side data of a handoff, each with the address of the producer rank that sent it.
pub type SideData = Vec<(String, Vec<u8>)>;

/// The end of a handoff on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are what their types say")]
pub enum Event {
    /// No consumer reads the offered blocks any more: they may be reused.
    Produced { id: HandoffId, outcome: Outcome },
    /// The fetch is done or has failed, and nothing writes to its blocks any more.
    Consumed {
        id: HandoffId,
        outcome: Outcome,
        /// Empty if the fetch failed.
        side_data: SideData,
    },
}

/// A producer rank to fetch from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Where its agent listens.
    pub address: AgentAddress,
    /// How many consumer ranks read this handoff from it, this one included.
    pub readers: u32,
}

/// A producer rank to fetch from, found.
#[derive(Debug)]
pub(crate) struct ReadFrom {
    pub(crate) peer: Peer,
    /// The incarnation that is meant; `None` for the one that is there.
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) readers: u32,
    pub(crate) need: Need,
}

/// A part of a handoff that became ready to read.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// The address of the producer rank, as in its [`Source`].
    pub from: &'a str,
    /// The producer's blocks that are known so far, one table per group.
    pub tables: &'a [BlockTable],
    /// The tokens and layers that became ready.
    pub slice: Slice,
}

/// Maps what became ready of one handoff onto byte ranges.
///
/// Called once per [`ReadRequest`], and the calling thread waits for the result. It is the rank's thread
/// or, if the handoff has few blocks, a thread of the agent or of the engine.
pub trait ReadMapper: Send {
    /// Copies from the producer's regions to regions of this rank's agent. May be empty.
    ///
    /// # Errors
    /// The handoff fails with this code and reason.
    fn map(&mut self, read: &ReadRequest<'_>) -> Result<Batch, (WireCode, String)>;
}

impl<F> ReadMapper for F
where
    F: FnMut(&ReadRequest<'_>) -> Result<Batch, (WireCode, String)> + Send,
{
    fn map(&mut self, read: &ReadRequest<'_>) -> Result<Batch, (WireCode, String)> {
        self(read)
    }
}

/// One read of a handoff that succeeded.
#[derive(Clone, Copy, Debug)]
pub struct ReadPart {
    /// Payload bytes.
    pub bytes: u64,
    /// When the read was submitted.
    pub began: Instant,
    /// When the rank saw that it had ended.
    pub ended: Instant,
}

/// Why a call of a rank was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RankError {
    /// The handoff protocol refused it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The agent failed.
    #[error(transparent)]
    Agent(#[from] Error),
    /// This process is a fork of the one that started the rank.
    #[error("handoffs can't be used in a child of the process that started them")]
    Forked,
    /// The operating system refused to start a thread.
    #[error("the thread for handoffs can't be started")]
    Thread(#[source] std::io::Error),
}

/// Hears of a rank's events as they happen.
///
/// Called on the rank's thread, or on a thread of the agent or of the engine, one call after the other,
/// without any lock of the rank. It must not block.
pub(crate) trait RankObserver: Send + Sync {
    fn ended(&self, event: Event);

    /// The engine handshake that [`super::Rank::learn_engine`] began with `ticket` has ended.
    fn learned_engine(&self, ticket: u64, result: Result<Arc<Pairing>, Failure>);

    /// The session with the supplier at this address has ended.
    fn lost_peer(&self, address: &str);

    /// A producer of a claim or fetch has said that it has, or will have, the KV. Comes before the handoff's end.
    fn answered(&self, id: &HandoffId);

    /// [`super::Rank::call_observer`] was called since the last time.
    fn called(&self);

    /// A part of a handoff was read. Comes before the handoff's end.
    fn read(&self, id: &HandoffId, part: ReadPart);
}
