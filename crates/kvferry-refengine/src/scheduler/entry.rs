//! A live request.

use crate::block_pool::BlockHash;
use crate::cache::Tables;
use crate::contract::RequestView;
use crate::offload::ManagedRequest;
use crate::request::{Params, RequestId, RequestStatus};
use kvferry_blocks::RetentionConfig;

/// An asynchronous load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Tokens in the cache when it is done.
    pub(super) tokens: usize,
    /// Leading tokens without a reported failure.
    pub(super) valid: usize,
    pub(super) done: bool,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) number: u64,
    pub(super) id: RequestId,
    pub(super) prompt_len: usize,
    /// The prompt and the generated tokens.
    pub(super) tokens: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) stop_token: Option<u32>,
    pub(super) params: Option<Params>,
    pub(super) status: RequestStatus,
    pub(super) computed: usize,
    /// Tokens that were in the cache when the request was admitted.
    pub(super) cached: usize,
    pub(super) tables: Tables,
    pub(super) hashes: Vec<Vec<BlockHash>>,
    pub(super) load: Option<Load>,
    pub(super) preempted: bool,
    /// True after the end while the connector still holds the blocks, to send them (`sending`) or
    /// because it still loads (`receiving`).
    pub(super) sending: bool,
    pub(super) receiving: bool,
    /// Tokens that the connector loads or has loaded for its admission.
    pub(super) external: usize,
    /// Retention of the request's blocks, for the block manager.
    pub(super) retention: RetentionConfig,
    /// Blocks that the request holds in the block manager.
    pub(super) held: Option<ManagedRequest>,
}

impl Entry {
    pub(super) fn view(&self) -> RequestView<'_> {
        RequestView {
            id: &self.id,
            prompt: &self.tokens[..self.prompt_len],
            tokens: &self.tokens,
            computed: self.computed,
            max_tokens: self.max_tokens,
            params: self.params.as_ref(),
            status: self.status,
            block_hashes: &self.hashes,
        }
    }

    pub(super) fn is_loading(&self) -> bool {
        self.status == RequestStatus::WaitingForRemoteKvs && self.load.is_some_and(|it| !it.done)
    }
}
