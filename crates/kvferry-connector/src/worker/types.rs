//! Settings, reports, errors and observers of a worker half.

use crate::metadata::{EngineError, MetadataError};
use crate::producers::Producers;
use crate::rank::{RankError, ReadPart};
use crate::rank_metadata::RankMetadataError;
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::Model;
use kvferry_proto::handoff::Limits;
use thiserror::Error;

/// Granularity at which a producer's worker half announces that KV is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announce {
    /// While prefill computes, in pieces of layers. The last piece of a prompt is halved until it is a 64th of the
    /// prompt: all earlier ones are read before the prompt has been computed. Each piece costs a control message.
    Layers {
        /// Pieces of layers, at least 1, of the first chunk and of the last two. Others are whole.
        pieces: u32,
        /// A piece has about as many bytes at least; a chunk with fewer is one piece.
        least_bytes: u64,
    },
    /// Announces after each chunk of a prefill.
    Chunks,
    /// Announces once, when all is ready.
    End,
}

impl Announce {
    /// Two pieces per chunk, for engines that report layers.
    pub const LAYERS: Self = Self::Layers { pieces: 2, least_bytes: Self::LEAST_BYTES };
    /// 1 MiB: the announcement and the read of a piece cost about the time that copying this takes.
    pub const LEAST_BYTES: u64 = 1 << 20;
}

/// Settings of a worker half.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The number of this rank in its engine, from 0.
    pub rank: usize,
    /// Settings that determine what the engine computes. Engines of different models refuse each other. Empty if
    /// unknown.
    pub model: Model,
    /// Granularity at which a prefill is announced.
    pub announce: Announce,
    /// Bounds of the protocol.
    pub limits: Limits,
    /// The producers that KV is fetched from; `None` for [`Producers::of_agent`].
    pub producers: Option<Producers>,
}

/// Tells when a launched computation is done: a CUDA event, for example.
pub trait ComputeEvent: Send {
    /// Whether it is done. Must not block.
    fn is_ready(&self) -> bool;

    /// Returns when the computation is done, or soon after `is_over` has become true: then no caller waits for it any
    /// more. Called on a thread of the worker half.
    fn wait(&self, is_over: &dyn Fn() -> bool);

    /// The reason why the computation will never be done, if so. Called after [`ComputeEvent::wait`]. The requests
    /// whose KV it computes are withdrawn.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// Requests that have ended since the last call of [`crate::Worker::reports`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reports {
    /// Held requests of a producer whose blocks are no longer read on this rank: once each.
    pub sent: Vec<String>,
    /// Requests of a consumer whose blocks are no longer written on this rank: once per fetch.
    pub received: Vec<String>,
    /// Those of `received` whose fetch failed: the content of their blocks is undefined.
    pub failed: Vec<String>,
    /// Bytes for [`crate::Scheduler::reported`], if the engine can carry them.
    pub notes: Option<Vec<u8>>,
}

/// Hears of a worker half's events as they happen, to wake a waiting engine or to measure.
///
/// Called with locks held: it must return soon and must not call the worker half.
pub trait WorkerObserver: Send + Sync {
    /// The fetch of a consumer's request has ended on this rank; [`crate::Worker::reports`] returns
    /// it from now on.
    fn received(&self, request: &str, code: WireCode, detail: &str);

    /// No consumer reads a producer's request on this rank any more, or none can;
    /// [`crate::Worker::reports`] returns it from now on.
    fn sent(&self, request: &str);

    /// A part of a fetch was read.
    fn read(&self, _request: &str, _part: ReadPart) {}
}

/// The reason why a call of a worker half was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The handoff protocol or the agent failed.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// The layout does not match the regions.
    #[error(transparent)]
    RankMetadata(#[from] RankMetadataError),
    /// The metadata cannot be decoded.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The engine's ranks contradict each other.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A call came out of order.
    #[error("{0}")]
    Misuse(&'static str),
}
