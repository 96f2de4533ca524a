//! What a connector may not do.

use crate::config::Rank;
use crate::layout::BlockId;
use crate::request::RequestId;
use std::fmt;
use thiserror::Error;

/// Where a rank reports the end of something. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// `finished_sending`; TensorRT-LLM: `saved`.
    Sending,
    /// `finished_recving`; TensorRT-LLM: `loaded`.
    Recving,
    /// `failed_recving`.
    Failed,
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sending => "finished sending",
            Self::Recving => "finished receiving",
            Self::Failed => "failed receiving",
        })
    }
}

/// A promise that a connector broke. The report it was found in counts as not made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// vLLM: `assert req_id in self.requests`, and the engine core is gone.
    #[error("rank {rank} reports as {channel} {id}, which this engine does not know")]
    UnknownId {
        /// Whose report.
        rank: Rank,
        /// Where.
        channel: Channel,
        /// What it calls it.
        id: String,
    },
    /// vLLM counts reports down: the second takes the place of another rank's first.
    #[error("rank {rank} reports {id} twice as {channel}")]
    ReportedTwice {
        /// Whose report.
        rank: Rank,
        /// Where.
        channel: Channel,
        /// The request.
        id: RequestId,
    },
    /// The request is over, its blocks may be somebody else's.
    #[error("rank {rank} reports as {channel} {id}, which has ended and been freed")]
    AlreadyEnded {
        /// Whose report.
        rank: Rank,
        /// Where.
        channel: Channel,
        /// The request.
        id: RequestId,
    },
    /// Nobody asked for its blocks to be kept.
    #[error("rank {rank} reports as {channel} {id}, whose request_finished returned false")]
    NotHeld {
        /// Whose report.
        rank: Rank,
        /// Where.
        channel: Channel,
        /// The request.
        id: RequestId,
    },
    /// It still computes.
    #[error("rank {rank} reports as {channel} {id}, which has not finished")]
    NotFinished {
        /// Whose report.
        rank: Rank,
        /// Where.
        channel: Channel,
        /// The request.
        id: RequestId,
    },
    /// Nothing is loaded for it, or nothing any more.
    #[error("rank {rank} reports as {channel} {id}, which waits for no load")]
    NotLoading {
        /// Whose report.
        rank: Rank,
        /// Where.
        channel: Channel,
        /// The request.
        id: RequestId,
    },
    /// A failed load must be reported as finished, too, or its blocks are never freed.
    #[error("rank {rank} reports {id} as failed without reporting it as finished")]
    FailedWithoutFinished {
        /// Whose report.
        rank: Rank,
        /// The request.
        id: RequestId,
    },
    /// vLLM: `RuntimeError`; hybrid models report requests, not blocks.
    #[error("rank {rank} reports blocks with load errors, and there are {groups} groups")]
    BlockErrorsOfGroups {
        /// Whose report.
        rank: Rank,
        /// How many groups.
        groups: usize,
    },
    /// There is no such block.
    #[error("rank {rank} reports a load error of block {}, of {blocks}", .block.0)]
    UnknownBlock {
        /// Whose report.
        rank: Rank,
        /// The block.
        block: BlockId,
        /// How many there are.
        blocks: usize,
    },
    /// "Must be False when 0".
    #[error("a load of no tokens of {id} is said to be asynchronous")]
    AsyncWithoutTokens {
        /// The request.
        id: RequestId,
    },
    /// A request has no more tokens, or something must be left to compute.
    #[error("{tokens} tokens of {id} are said to match, of {available} that can")]
    TooManyTokens {
        /// The request.
        id: RequestId,
        /// How many.
        tokens: usize,
        /// How many there are besides those computed, without the last unless the load is
        /// asynchronous and no group keeps a state.
        available: usize,
    },
    /// A prompt can be cut, not lengthened, and not to nothing.
    #[error("{tokens} tokens of the prompt of {id} are to be prefilled, of {prompt}")]
    PromptCut {
        /// The request.
        id: RequestId,
        /// How many.
        tokens: usize,
        /// How many it has.
        prompt: usize,
    },
    /// TensorRT-LLM: only ids that were handed in may come back.
    #[error("rank {rank} reports as {channel} {number}, which it was not handed")]
    NotHandedIn {
        /// Whose report.
        rank: Rank,
        /// Where.
        channel: Channel,
        /// The request.
        number: u64,
    },
}
