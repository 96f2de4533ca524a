//! Requests and outputs of an engine.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// The caller's id of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// The text of the id.
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

/// `kv_transfer_params`: what a router and the connectors exchange through requests and responses.
/// Opaque to the engine.
pub type Params = serde_json::Map<String, serde_json::Value>;

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Unique among live requests.
    pub id: RequestId,
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Largest number of tokens to generate, at least 1.
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

/// Reason for the end of a request. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The request generated [`Request::max_tokens`] tokens.
    Length,
    /// The request generated its stop token.
    Stop,
    /// The request was aborted or rejected.
    Abort,
    /// The request's KV could not be loaded, under [`crate::LoadFailurePolicy::Fail`].
    Error,
}

/// The state of a request. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestStatus {
    /// Not admitted yet, or admitted again after its KV has been loaded.
    Waiting,
    /// A connector loads into its blocks.
    WaitingForRemoteKvs,
    /// Steps compute some of the request's tokens.
    Running,
    /// The request lost its blocks to other requests and waits.
    Preempted,
    /// The request ended; a connector may still hold its blocks.
    Finished(FinishReason),
}

/// Output of a request in one step.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say the rest")]
pub struct Output {
    pub id: RequestId,
    pub tokens: Vec<u32>,
    /// Reason and parameters, if the request ended with these tokens.
    pub finished: Option<Finished>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Reason for the end.
    pub reason: FinishReason,
    /// `kv_transfer_params` of the response: what the connector returned.
    pub params: Option<Params>,
}

/// Error for a request that is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum SubmitError {
    /// A prompt needs a token.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// `max_tokens` is 0.
    #[error("max_tokens is 0")]
    NoTokens,
    /// The request would exceed the limit of tokens even alone.
    #[error("{tokens} tokens exceed the limit of {most}")]
    TooLong { tokens: usize, most: usize },
    /// The request would not find enough blocks even alone.
    #[error("it needs {blocks} blocks, the pool has {capacity}")]
    TooLarge { blocks: usize, capacity: usize },
    /// A token must be in the vocabulary.
    #[error("token {token} is not below the vocabulary size {vocab}")]
    Vocabulary { token: u32, vocab: u32 },
    /// Ids of live requests are unique.
    #[error("request {id} is still live")]
    Duplicate { id: RequestId },
}
