//! Messages between the router and an engine's process, a line each.

use kvferry_connector::Announce;
use kvferry_refengine::{EngineConfig, Params};
use serde::{Deserialize, Serialize};

use super::args::AnnounceWhen;

/// Commands to an engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Starts the engine. Sent once, first. Answered by [`Event::Ready`].
    Open(Box<Setup>),
    /// Adds a request.
    Submit(Submit),
    /// Aborts a request.
    Abort { id: String },
    /// There are no more requests. Answered by [`Event::Left`].
    Finish,
}

/// Settings of an engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) name: String,
    pub(super) config: EngineConfig,
    /// Transports, written as in `KVFERRY_TRANSPORTS`.
    pub(super) transports: String,
    pub(super) announce: AnnounceWhen,
    /// Budget of a fetch.
    pub(super) timeout_ms: u64,
    /// Number of the GPU whose memory has the caches.
    pub(super) gpu: Option<i32>,
}

impl From<AnnounceWhen> for Announce {
    fn from(when: AnnounceWhen) -> Announce {
        match when {
            AnnounceWhen::Layers => Announce::LAYERS,
            AnnounceWhen::Chunks => Announce::Chunks,
            AnnounceWhen::End => Announce::End,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Submit {
    pub(super) id: String,
    pub(super) prompt: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) params: Params,
    /// Flip a byte of its KV once it has been computed.
    pub(super) flip: bool,
}

/// Events from an engine. Times are nanoseconds of the clock that all processes share.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Event {
    /// The engine takes requests; the address of the agent of its first rank.
    Ready { address: String },
    /// A request has produced tokens, or ended.
    Output(RequestOutput),
    /// A rank has read a part of a request's KV.
    Read { id: String, part: Part },
    /// A rank has received all of a request, or its fetch has failed.
    Received { id: String, at_ns: u64, failure: Option<String> },
    /// Answers [`Command::Finish`], when all requests have ended or the time for that is over: what is still held.
    Left { held: Vec<String> },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RequestOutput {
    pub(super) id: String,
    pub(super) tokens: Vec<u32>,
    pub(super) ended: Option<Ended>,
    /// Time at which the last layer of the step was computed.
    pub(super) computed_ns: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ended {
    /// Reason of the request's failure, if it failed.
    pub(super) failure: Option<String>,
    /// `kv_transfer_params` of the response.
    pub(super) params: Option<Params>,
}

/// Bytes that one rank read in one transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) bytes: u64,
    pub(super) began_ns: u64,
    pub(super) ended_ns: u64,
}
