//! Requests that get no handoff.

use super::Stats;
use crate::params::ParamsError;
use crate::producers::ForbiddenProducer;
use crate::prompt::Unidentified;
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};

/// The reason why a request gets no handoff. It is computed as if it had no parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refused {
    /// The request's parameters are invalid.
    InvalidParams,
    /// The request's producer runs another connector.
    ForeignProducer,
    /// The request's `transfer_id` belongs to a request with another prompt.
    OtherPrompt,
    /// The request's prompt has more than `u32::MAX` tokens, or more blocks of one group than a handoff may have
    /// ([`BLOCKS_MAX`](kvferry_proto::handoff::BLOCKS_MAX)).
    LongPrompt,
    /// Another live request of this producer has its `transfer_id`.
    Duplicate,
    /// The request's producer is not among those that this engine accepts.
    ForbiddenProducer,
    /// The engine's adapter failed with the request.
    Internal,
    /// Too many requests wait for producers that have not answered.
    Busy,
    /// The request's prompt may grow after it was computed, as in a session.
    Resumable,
    /// The request asks for the logprobs of its prompt, of which this engine would leave out the
    /// last tokens.
    PromptLogprobs,
    /// The engine's weights may have changed, and have no name that the other side could compare.
    ChangedWeights,
}

impl Refused {
    /// Every reason, in the order of the variants.
    pub const ALL: &[Self] = &[
        Self::InvalidParams,
        Self::ForeignProducer,
        Self::OtherPrompt,
        Self::LongPrompt,
        Self::Duplicate,
        Self::ForbiddenProducer,
        Self::Internal,
        Self::Busy,
        Self::Resumable,
        Self::PromptLogprobs,
        Self::ChangedWeights,
    ];
}

/// A reason, in words too.
#[derive(Debug)]
pub(super) struct Refusal {
    reason: Refused,
    detail: String,
}

impl Refusal {
    pub(super) fn new(reason: Refused) -> Self {
        let detail = match reason {
            Refused::LongPrompt => "the prompt is too long",
            Refused::Duplicate => "another live request has this transfer_id",
            Refused::Resumable => "its prompt may grow",
            Refused::PromptLogprobs => "it asks for the logprobs of its whole prompt",
            Refused::ChangedWeights => "the engine's weights may have changed",
            Refused::Busy => "too many requests wait for producers that have not answered",
            _ => "",
        };
        Self { reason, detail: detail.to_owned() }
    }
}

impl From<ParamsError> for Refusal {
    fn from(error: ParamsError) -> Self {
        let foreign = error.is_foreign();
        let reason = if foreign { Refused::ForeignProducer } else { Refused::InvalidParams };
        Self { reason, detail: error.to_string() }
    }
}

impl From<ForbiddenProducer> for Refusal {
    fn from(error: ForbiddenProducer) -> Self {
        Self { reason: Refused::ForbiddenProducer, detail: error.to_string() }
    }
}

impl From<Unidentified> for Refusal {
    fn from(error: Unidentified) -> Self {
        let reason = match error {
            Unidentified::OtherPrompt => Refused::OtherPrompt,
            Unidentified::TooLong => Refused::InvalidParams,
        };
        Self { reason, detail: error.to_string() }
    }
}

/// Live requests that get no handoff, and how many there have been.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    live: FxHashSet<String>,
    counts: Vec<(Refused, u64)>,
    pub(super) stats: Stats,
}

impl Refusals {
    /// Counts a request, and remembers it until it ends.
    pub(super) fn add(&mut self, request: &str, refusal: &Refusal) {
        self.live.insert(request.to_owned());
        self.count(request, refusal);
    }

    /// Counts a request that is remembered elsewhere.
    pub(super) fn count(&mut self, request: &str, refusal: &Refusal) {
        let Refusal { reason, detail } = refusal;
        self.stats.count_refusal(*reason);
        let at = self.counts.iter().position(|(other, _)| other == reason);
        let at = at.unwrap_or_else(|| {
            self.counts.push((*reason, 0));
            self.counts.len() - 1
        });
        let count = &mut self.counts[at].1;
        *count += 1;
        if is_logged(*count) {
            let count = *count;
            tracing::warn!(request, ?reason, detail, count, "the request gets no handoff");
        }
    }

    pub(super) fn contains(&self, request: &str) -> bool {
        self.live.contains(request)
    }

    pub(super) fn remove(&mut self, request: &str) {
        self.live.remove(request);
    }

    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    pub(super) fn counts(&self) -> &[(Refused, u64)] {
        &self.counts
    }
}

/// Whether the line of the `count`th event of a kind is logged: a client may cause one with each of its
/// requests.
pub(super) const fn is_logged(count: u64) -> bool {
    count.is_power_of_two() || count.is_multiple_of(1024)
}
