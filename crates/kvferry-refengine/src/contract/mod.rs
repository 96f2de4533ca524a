//! The contract between an engine and a connector.
//!
//! The traits of [`vllm`] have the calls of the engine they are named after: same names, same order, same
//! guarantees. What crosses processes there, metadata and handshakes, is bytes here, so that it can only be
//! plain data.
//!
//! Where a real engine would crash, this one reports a [`Violation`].

mod violation;
pub mod vllm;

pub use violation::{Channel, Violation};

use crate::block_pool::BlockHash;
use crate::request::{Params, RequestId, RequestStatus};

/// A request as a connector's scheduler half sees it.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say the rest")]
pub struct RequestView<'a> {
    pub id: &'a RequestId,
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
