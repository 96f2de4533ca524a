//! What an engine and a connector promise each other.
//!
//! Two families of traits, [`vllm`] and [`trt`], each with the calls of the engine it is named
//! after: same names, same order, same promises. What crosses between processes there, metadata
//! and handshakes, crosses here as bytes, so that nothing but plain data can.
//!
//! Where an engine would die of a connector's mistake, this one names it: see [`Violation`].

pub mod trt;
mod violation;
pub mod vllm;

pub use violation::{Channel, Violation};

use crate::block_pool::BlockHash;
use crate::request::{Params, RequestId, RequestStatus};

/// A request, as a connector's scheduler half sees it.
#[derive(Clone, Debug)]
pub struct RequestView<'a> {
    /// Its id in vLLM.
    pub id: &'a RequestId,
    /// Its id in TensorRT-LLM: a number that no other request of this engine ever has.
    pub number: u64,
    /// Its prompt.
    pub prompt: &'a [u32],
    /// Its prompt and what it has said so far.
    pub tokens: &'a [u32],
    /// How many of these are in the cache.
    pub computed: usize,
    /// Its `kv_transfer_params`.
    pub params: Option<&'a Params>,
    /// Where it is.
    pub status: RequestStatus,
    /// Per group, the hash of every block that its tokens fill.
    pub block_hashes: &'a [Vec<BlockHash>],
}
