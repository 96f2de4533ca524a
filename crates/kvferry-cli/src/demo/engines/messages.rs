//! What the router and an engine's process say to each other, a line each.

use kvferry_connector::Announce;
use kvferry_refengine::{EngineConfig, Params};
use serde::{Deserialize, Serialize};

use crate::cli::AnnounceWhen;

/// To an engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Be this engine; once, and first. Answered by [`Event::Ready`].
    Open(Box<Setup>),
    /// Take a request.
    Submit(Submit),
    /// Give a request up.
    Abort { id: String },
    /// No more requests come. Answered by [`Event::Left`].
    Finish,
}

/// What an engine is like.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) name: String,
    pub(super) config: EngineConfig,
    /// As in `KVFERRY_TRANSPORTS`.
    pub(super) transports: String,
    pub(super) announce: When,
    /// How long a fetch may take.
    pub(super) timeout_ms: u64,
}

/// [`Announce`], on its way to a process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum When {
    Layers { pieces: u32 },
    Chunks,
    End,
}

impl From<AnnounceWhen> for When {
    fn from(when: AnnounceWhen) -> When {
        match when {
            AnnounceWhen::Layers => When::Layers { pieces: 2 },
            AnnounceWhen::Chunks => When::Chunks,
            AnnounceWhen::End => When::End,
        }
    }
}

impl From<When> for Announce {
    fn from(when: When) -> Announce {
        match when {
            When::Layers { pieces } => Announce::Layers { pieces },
            When::Chunks => Announce::Chunks,
            When::End => Announce::End,
        }
    }
}

/// A request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Submit {
    pub(super) id: String,
    pub(super) prompt: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) params: Params,
    /// Flip a byte of its KV once it has been computed.
    pub(super) flip: bool,
}

/// From an engine. Times are nanoseconds of the clock that all processes share.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Event {
    /// It takes requests; where the agent of its first rank listens.
    Ready { address: String },
    /// A request has said something, or ended.
    Said(Said),
    /// A rank has read a part of what a request fetches.
    Read { id: String, part: Part },
    /// A rank knows that all of a request is there, or why it will not come.
    Received { id: String, at_ns: u64, failure: Option<String> },
    /// Nothing is under way any more: what is held that should not be.
    Left { held: Vec<String> },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Said {
    pub(super) id: String,
    pub(super) tokens: Vec<u32>,
    pub(super) ended: Option<Ended>,
    /// When the last layer of the step was computed.
    pub(super) computed_ns: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ended {
    /// Why not, if it did not say all it has to say.
    pub(super) failure: Option<String>,
    /// `kv_transfer_params` of the response.
    pub(super) params: Option<Params>,
}

/// Bytes that one rank read at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) bytes: u64,
    pub(super) began_ns: u64,
    pub(super) ended_ns: u64,
}
