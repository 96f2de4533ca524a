//! The scheduler half: what is to be handed over, decided where requests are scheduled.
//!
//! One per engine. It has no threads, no clock and no sockets: the engine's calls go in, [`Orders`]
//! for the worker halves come out, as plain data. It never waits, and what it does per step grows
//! with what the step has that concerns handoffs, not with the requests there are.
//!
//! # A producer's request
//! `arrived` (its parameters say so), `step` whenever it is computed (blocks, tokens), `finished`:
//! only what ended by its length is handed over; its blocks are kept until all ranks report it sent.
//! Anything else withdraws it, whether it was offered before or not.
//!
//! # A consumer's request
//! `matched` (may be asked again and again), `allocated` once with tokens to fetch, then `finished`
//! at any time. What it does not fetch, because all is in the cache, or because it ended or was
//! rejected before it got blocks, is freed at the producer. A fetch that one rank reports as failed
//! is cancelled on all others, so that all ranks end soon: an engine counts a request when all ranks
//! are through with it, and it failed if it did on any. What failed is not tried again under the
//! same name: the engine computes it.

use crate::orders::Orders;
use crate::params::Params;
use kvferry_proto::introduction::EngineId;
use kvferry_proto::layout::Kind;
use std::time::Duration;
use thiserror::Error;

/// How a connector works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The engine's groups, in the order of its block tables.
    pub groups: Vec<GroupRule>,
    /// The engine's ranks.
    pub ranks: usize,
    /// How long a fetch may take, from its order to its end, rendezvous included.
    pub timeout: Duration,
    /// Whether a producer's request is complete with the last token of its prompt: its consumer need
    /// not wait for another step of the engine. Else it is complete with its end, which may carry
    /// side data.
    pub eager: bool,
}

/// What a scheduler half has to know of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRule {
    /// What its blocks are for.
    pub kind: Kind,
    /// Tokens of a logical block.
    pub block_tokens: u32,
}

/// A request, as an engine sees it.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The engine's name for it, no other live request's.
    pub id: &'a str,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Its `kv_transfer_params`.
    pub params: Option<&'a Params>,
}

/// What can be fetched of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// It is not known yet; ask again in a later step.
    Unknown,
    /// So many tokens beyond those that are computed, fetched while others compute.
    Tokens(u64),
}

/// A request in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled<'a> {
    /// Its name.
    pub request: &'a str,
    /// Tokens in the cache before the step.
    pub computed: u64,
    /// Tokens that the step computes.
    pub tokens: u64,
    /// Whether `blocks` are all it has, because it is new or has lost its blocks before; else they
    /// are those that it got since the last step it was in.
    pub all: bool,
    /// Per group, blocks by their numbers; [`crate::NULL_BLOCK`] where there is none.
    pub blocks: Vec<Vec<u32>>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It said as many tokens as it may.
    Length,
    /// It said a token to stop at.
    Stop,
    /// Somebody aborted it, or it was rejected.
    Abort,
    /// Something went wrong.
    Error,
}

/// What becomes of a request that ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// Its blocks are kept until all ranks report it sent.
    pub held: bool,
    /// `kv_transfer_params` of the response.
    pub params: Option<Params>,
}

/// Why an engine's ranks make no engine.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// More or fewer than there are.
    #[error("{given} ranks have said what they are, of {ranks}")]
    Ranks {
        /// How many have.
        given: usize,
        /// How many there are.
        ranks: usize,
    },
    /// What a rank said of itself cannot be read.
    #[error("rank {rank}: {error}")]
    Card {
        /// Which.
        rank: usize,
        /// What is wrong.
        error: crate::card::CardError,
    },
    /// The ranks contradict each other.
    #[error(transparent)]
    Topology(#[from] kvferry_proto::layout::Mismatch),
}

/// The scheduler half.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    id: EngineId,
    orders: Orders,
}

impl Scheduler {
    /// A scheduler half of an engine's life that has that `id`, drawn at random.
    pub fn new(config: SchedulerConfig, id: EngineId) -> Self {
        Self { config, id, orders: Orders::default() }
    }
}

#[allow(unused_variables, clippy::todo, clippy::unused_self, reason = "being built")]
impl Scheduler {
    /// What each rank's worker half says of itself ([`crate::Worker::card`]), in the order of the
    /// ranks: once. The worker halves are told of all with the next orders.
    ///
    /// # Errors
    /// The ranks make no engine.
    pub fn introduce(&mut self, cards: Vec<Vec<u8>>) -> Result<(), EngineError> {
        todo!()
    }

    /// A request has arrived. May be left out: what needs to be known is learned later, too.
    pub fn arrived(&mut self, request: &Request<'_>) {
        todo!()
    }

    /// How much of its prompt is to be prefilled: a producer that keeps a state leaves out the last
    /// token, which the consumer computes again, and which cannot be taken back from a state.
    pub fn prompt_tokens_to_prefill(&self, request: &Request<'_>) -> u64 {
        todo!()
    }

    /// How much of a request can be fetched, if `computed` of its tokens are here. No side effects
    /// but for counting.
    pub fn matched(&self, request: &Request<'_>, computed: u64) -> Match {
        todo!()
    }

    /// A request has blocks: per group all of them, with [`crate::NULL_BLOCK`] where nothing is to
    /// be fetched. `external` of its tokens, after those that are computed, are to be fetched.
    pub fn allocated(
        &mut self,
        request: &Request<'_>,
        computed: u64,
        external: u64,
        blocks: &[Vec<u32>],
    ) {
        todo!()
    }

    /// Whether the KV of a request of that name is to be handed over: only those have to be in the
    /// steps that are told.
    pub fn produces(&self, request: &str) -> bool {
        todo!()
    }

    /// A step: what it computes of requests that are produced here, and which of all requests lost
    /// their blocks in it.
    pub fn step<'a>(
        &mut self,
        scheduled: impl IntoIterator<Item = Scheduled<'a>>,
        preempted: impl IntoIterator<Item = &'a str>,
    ) -> Orders {
        todo!()
    }

    /// A request ended, with these blocks; also one that was never heard of.
    pub fn finished(
        &mut self,
        request: &Request<'_>,
        how: Finish,
        side_data: Option<Vec<u8>>,
    ) -> Finished {
        todo!()
    }

    /// What a rank's worker half noted ([`crate::Reports::notes`]).
    pub fn reported(&mut self, rank: usize, notes: &[u8]) {
        todo!()
    }

    /// All ranks have reported these as sent.
    pub fn sent<'a>(&mut self, requests: impl IntoIterator<Item = &'a str>) {
        todo!()
    }

    /// All ranks have reported these as received.
    pub fn received<'a>(&mut self, requests: impl IntoIterator<Item = &'a str>) {
        todo!()
    }

    /// What came along with a request's KV, if it did and has not been asked for: one per producer
    /// rank that sent some.
    pub fn take_side_data(&mut self, request: &str) -> Vec<Vec<u8>> {
        todo!()
    }

    /// Whether the engine has to go on stepping although no request runs: something is to be said to
    /// the worker halves, or to be heard from them.
    pub fn has_pending_work(&self) -> bool {
        todo!()
    }

    /// What is kept, by name: zero when nothing is under way.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        todo!()
    }
}
