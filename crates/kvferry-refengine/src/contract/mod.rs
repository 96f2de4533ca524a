//! The contract between an engine and a connector.
//!
//! Two families of traits, [`vllm`] and [`trt`], each with the calls of the engine it is named after:
//! same names, same order, same guarantees. What crosses processes there, metadata and handshakes, is
//! bytes here, so that it can only be plain data.
//!
//! Where a real engine would crash, this one reports a [`Violation`].

pub mod trt;
mod violation;
pub mod vllm;

pub use violation::{Channel, Violation};

use crate::block_pool::BlockHash;
use crate::request::{Params, RequestId, RequestStatus};

/// The two halves of a connector: see [`vllm::Connector`], [`trt::Connector`].
pub struct Connector<S: ?Sized, W: ?Sized> {
    /// The scheduler half.
    pub scheduler: Box<S>,
    /// The worker half of each rank, in the order of [`crate::EngineConfig::ranks`].
    pub workers: Vec<Box<W>>,
}

impl<S: ?Sized, W: ?Sized> std::fmt::Debug for Connector<S, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("workers", &self.workers.len()).finish_non_exhaustive()
    }
}

/// A request as a connector's scheduler half sees it.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say the rest")]
pub struct RequestView<'a> {
    /// Id of the request in vLLM.
    pub id: &'a RequestId,
    /// Id of the request in TensorRT-LLM: a number that no other request of this engine ever has.
    pub number: u64,
    pub prompt: &'a [u32],
    /// Prompt and generated tokens so far.
    pub tokens: &'a [u32],
    /// Number of `tokens` that are in the cache.
    pub computed: usize,
    /// Largest number of tokens that the request generates.
    pub max_tokens: usize,
    pub params: Option<&'a Params>,
    pub status: RequestStatus,
    /// The hash of every block that its tokens fill, per group.
    pub block_hashes: &'a [Vec<BlockHash>],
}
