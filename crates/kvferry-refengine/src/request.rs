//! What goes into an engine, and what comes out.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// A request, as whoever made it calls it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for RequestId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

impl From<String> for RequestId {
    fn from(id: String) -> Self {
        Self(id.into())
    }
}

impl From<RequestId> for String {
    fn from(id: RequestId) -> Self {
        id.as_str().to_owned()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `kv_transfer_params`: what a router and the connectors say to each other through requests and
/// responses. Opaque to the engine.
pub type Params = serde_json::Map<String, serde_json::Value>;

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its id, no other live request's.
    pub id: RequestId,
    /// What to go on from; not empty.
    pub prompt: Vec<u32>,
    /// How many tokens to say at most; at least 1.
    pub max_tokens: usize,
    /// A token to stop at.
    pub stop_token: Option<u32>,
    /// `kv_transfer_params`.
    pub params: Option<Params>,
}

impl Request {
    /// A request for `max_tokens` tokens, without parameters.
    pub fn new(id: impl Into<RequestId>, prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self { id: id.into(), prompt, max_tokens, stop_token: None, params: None }
    }

    /// The same with `kv_transfer_params`.
    #[must_use]
    pub fn with_params(mut self, params: Params) -> Self {
        self.params = Some(params);
        self
    }
}

/// Why a request ended. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// It said as much as it may.
    Length,
    /// It said its stop token.
    Stop,
    /// Somebody aborted it.
    Abort,
    /// Its KV could not be loaded, under [`crate::LoadFailurePolicy::Fail`].
    Error,
}

/// Where a request is. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestStatus {
    /// Not admitted yet, or admitted again after its KV has been loaded.
    Waiting,
    /// It has blocks into which a connector loads.
    WaitingForRemoteKvs,
    /// Each step computes some of its tokens.
    Running,
    /// It lost its blocks to others, and waits.
    Preempted,
    /// It ended; a connector may still hold its blocks.
    Finished(FinishReason),
}

/// One thing that a request has to say.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Which request.
    pub id: RequestId,
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Whether it ended with them, and how.
    pub finished: Option<Finished>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// `kv_transfer_params` of the response: what the connector returned.
    pub params: Option<Params>,
}

/// Why a request is not taken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// There is nothing to go on from.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// It asks for nothing.
    #[error("no token is asked for")]
    NoTokens,
    /// It would not fit, even alone.
    #[error("{tokens} tokens, more than the {most} that fit")]
    TooLong {
        /// Its prompt and what it may say.
        tokens: usize,
        /// The most that the engine takes.
        most: usize,
    },
    /// It would not find enough blocks, even alone.
    #[error("it needs {blocks} blocks, of {capacity}")]
    TooLarge {
        /// Blocks that it may need at once.
        blocks: usize,
        /// Blocks of the pool.
        capacity: usize,
    },
    /// A token is none of the model's.
    #[error("token {token}, of a vocabulary of {vocab}")]
    Vocabulary {
        /// The token.
        token: u32,
        /// The vocabulary.
        vocab: u32,
    },
    /// A live request is called so.
    #[error("there is a request {id}")]
    Duplicate {
        /// How.
        id: RequestId,
    },
}
