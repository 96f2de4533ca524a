//! Breaches of the contract.

use crate::config::Rank;
use crate::layout::BlockId;
use crate::request::RequestId;
use std::fmt;
use thiserror::Error;

/// List in which a rank reports the end of an operation. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// `finished_sending`.
    Sending,
    /// `finished_recving`.
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

/// A breach of the contract by a connector. The report that contains it is ignored.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Violation {
    /// vLLM: `assert req_id in self.requests`, which ends the engine core.
    #[error("rank {rank} reports as {channel} {id}, which this engine does not know")]
    UnknownId { rank: Rank, channel: Channel, id: String },
    /// vLLM counts reports down: the second counts as another rank's.
    #[error("rank {rank} reports {id} twice as {channel}")]
    ReportedTwice { rank: Rank, channel: Channel, id: RequestId },
    /// The request has ended, and its blocks may belong to another.
    #[error("rank {rank} reports as {channel} {id}, which has ended and been freed")]
    AlreadyEnded { rank: Rank, channel: Channel, id: RequestId },
    /// The connector did not ask for its blocks to be kept.
    #[error("rank {rank} reports as {channel} {id}, whose request_finished returned false")]
    NotHeld { rank: Rank, channel: Channel, id: RequestId },
    /// The request still runs.
    #[error("rank {rank} reports as {channel} {id}, which has not finished")]
    NotFinished { rank: Rank, channel: Channel, id: RequestId },
    /// The request waits for no load, or its load has ended.
    #[error("rank {rank} reports as {channel} {id}, which waits for no load")]
    NotLoading { rank: Rank, channel: Channel, id: RequestId },
    /// A failed load must be reported as finished, too, or its blocks are never freed.
    #[error("rank {rank} reports {id} as failed without reporting it as finished")]
    FailedWithoutFinished { rank: Rank, id: RequestId },
    /// vLLM: `RuntimeError`; hybrid models report requests, not blocks.
    #[error("rank {rank} reports blocks with load errors, and there are {groups} groups")]
    BlockErrorsOfGroups { rank: Rank, groups: usize },
    /// There is no such block.
    #[error("rank {rank} reports a load error of block {}, of {blocks}", .block.0)]
    UnknownBlock { rank: Rank, block: BlockId, blocks: usize },
    /// "Must be False when 0".
    #[error("{id} matched no tokens, but is to be loaded asynchronously")]
    AsyncWithoutTokens { id: RequestId },
    /// A request has no more tokens, or something must be left to compute.
    #[error("{id} matched {tokens} tokens, at most {available} can")]
    TooManyTokens { id: RequestId, tokens: usize, available: usize },
    /// A prompt can be cut to at least one token, and not lengthened.
    #[error("{tokens} of {prompt} prompt tokens of {id} are to be prefilled")]
    PromptCut { id: RequestId, tokens: usize, prompt: usize },
}
