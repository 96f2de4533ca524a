//! The scheduler half: what is to be handed over, decided where requests are scheduled.
//!
//! One per engine. It has no threads, no clock and no sockets: the engine's calls go in, [`Orders`]
//! for the worker halves come out, as plain data. It never waits, and what it does per step grows
//! with what the step has that concerns handoffs, not with the requests there are.
//!
//! # A producer's request
//! `arrived` (its parameters say so), `step` whenever it is computed (blocks, tokens), `finished`:
//! only what ended by its length is handed over; its blocks are kept until all ranks report it sent.
//! Anything else withdraws it, whether it was offered before or not. So does going on computing once
//! the prompt is, where that spoils what is handed over: a state is carried on in place, and blocks
//! that leave a window are given to others.
//!
//! # A consumer's request
//! `matched` (may be asked again and again), `allocated` once with tokens to fetch, then `finished`
//! at any time. What it does not fetch, because all is in the cache, or because it ended or was
//! rejected before it got blocks, is freed at the producer. A fetch that one rank reports as failed
//! is cancelled on all others, so that all ranks end soon: an engine counts a request when all ranks
//! are through with it, and it failed if it did on any. What failed is not tried again under the
//! same name: the engine computes it.

mod consumed;
mod produced;

use crate::orders::{EngineCard, Notes, Orders};
use crate::params::{Offered, Params, Role};
use consumed::Consumed;
use kvferry_proto::WireCode;
use kvferry_proto::handoff::HandoffId;
use kvferry_proto::introduction::EngineId;
use kvferry_proto::layout::Kind;
use produced::{Held, Produced};
use rustc_hash::FxHashSet;
use serde_bytes::ByteBuf;
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
    /// Tokens of a logical block, at least 1; of all context-parallel ranks together.
    pub block_tokens: u32,
}

/// A request, as an engine sees it.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The engine's name for it, no other live request's.
    pub id: &'a str,
    /// Tokens of its prompt. What an engine has cut them to, because
    /// [`Scheduler::prompt_tokens_to_prefill`] said so, is known already and not cut again.
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

impl Match {
    /// Nothing.
    pub const NONE: Self = Self::Tokens(0);
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
    /// Two ranks are known by one address, which can lead to one of them only.
    #[error("ranks {first} and {second} are both known by {address}: give each its own")]
    Address {
        /// The one.
        first: usize,
        /// The other.
        second: usize,
        /// The address.
        address: String,
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
    /// Where an agent of this engine listens, once that is known.
    address: Option<String>,
    /// Handoffs that were named here.
    drawn: u64,
    produced: Produced,
    consumed: Consumed,
    /// Live requests that ask for something that cannot be done: nothing is done.
    refused: FxHashSet<String>,
    orders: Orders,
}

impl Scheduler {
    /// A scheduler half of an engine's life that has that `id`, drawn at random.
    pub fn new(config: SchedulerConfig, id: EngineId) -> Self {
        let budget_ms = u32::try_from(config.timeout.as_millis()).unwrap_or(u32::MAX);
        Self {
            id,
            address: None,
            drawn: 0,
            produced: Produced::default(),
            consumed: Consumed::new(config.ranks, budget_ms),
            refused: FxHashSet::default(),
            orders: Orders::default(),
            config,
        }
    }

    /// What each rank's worker half says of itself ([`crate::Worker::card`]), in the order of the
    /// ranks: once. The worker halves are told of all with the next orders.
    ///
    /// # Errors
    /// The ranks make no engine.
    pub fn introduce(&mut self, cards: Vec<Vec<u8>>) -> Result<(), EngineError> {
        let (given, ranks) = (cards.len(), self.config.ranks);
        if given != ranks {
            return Err(EngineError::Ranks { given, ranks });
        }
        let ranks = cards.into_iter().map(ByteBuf::from).collect();
        let engine = EngineCard { id: self.id, ranks };
        let (cards, _) = engine.read()?;
        self.address = cards.into_iter().next().map(|card| card.address);
        self.orders.engine = Some(engine);
        Ok(())
    }

    /// A request has arrived. May be left out: what needs to be known is learned later, too.
    pub fn arrived(&mut self, request: &Request<'_>) {
        if self.is_known(request.id) {
            return;
        }
        let tokens = u32::try_from(self.prefill(request.prompt_tokens));
        let refused = match (Role::parse(request.params), tokens) {
            (Ok(None), _) => return,
            (Err(error), _) => Some(error.to_string()),
            (Ok(Some(_)), Err(_)) => Some("its prompt is too long to be handed over".to_owned()),
            (Ok(Some(Role::Produce { transfer })), Ok(tokens)) => {
                self.produce(request.id, transfer, tokens)
            }
            (Ok(Some(Role::Consume(from))), Ok(_)) => {
                let (transfer, owns) = (from.transfer.clone(), self.consumed.add(request.id, from));
                if !owns {
                    tracing::warn!(request = ?request.id, %transfer, "another request fetches it");
                }
                None
            }
        };
        if let Some(reason) = refused {
            tracing::warn!(request = ?request.id, "no handoff: {reason}");
            self.refused.insert(request.id.to_owned());
        }
    }

    /// How much of its prompt is to be prefilled: a producer that keeps a state leaves out the last
    /// token, which the consumer computes again, and which cannot be taken back from a state. An
    /// engine that cuts prompts to this has said before that the request has arrived.
    pub fn prompt_tokens_to_prefill(&self, request: &Request<'_>) -> u64 {
        if let Some(tokens) = self.produced.tokens(request.id) {
            return u64::from(tokens);
        }
        let produces = !self.is_known(request.id)
            && matches!(Role::parse(request.params), Ok(Some(Role::Produce { .. })));
        if produces { self.prefill(request.prompt_tokens) } else { request.prompt_tokens }
    }

    /// How much of a request can be fetched, if `computed` of its tokens are here. No side effects.
    pub fn matched(&self, request: &Request<'_>, computed: u64) -> Match {
        let usable = request.prompt_tokens - self.recomputed(request.prompt_tokens);
        if let Some(known) = self.consumed.matched(request.id, computed, usable) {
            return known;
        }
        if self.is_known(request.id) || u32::try_from(usable).is_err() {
            return Match::NONE;
        }
        match Role::parse(request.params) {
            Ok(Some(Role::Consume(from))) => self.consumed.matched_unseen(&from, computed, usable),
            _ => Match::NONE,
        }
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
        self.arrived(request);
        let tokens = u32::try_from(computed)
            .and_then(|start| Ok((start, u32::try_from(computed.saturating_add(external))?)));
        match tokens {
            Ok(tokens) => self.consumed.allocated(request.id, tokens, blocks, &mut self.orders),
            Err(_) => {
                tracing::warn!(request = ?request.id, computed, external, "too many tokens");
            }
        }
    }

    /// Whether it matters to a handoff if a step computes something of the request of that name:
    /// only those have to be in the steps that are told.
    pub fn produces(&self, request: &str) -> bool {
        self.produced.is_followed(request, &self.config.groups)
    }

    /// A step: what it computes of requests that are produced here, and which of all requests lost
    /// their blocks in it.
    pub fn step<'a>(
        &mut self,
        scheduled: impl IntoIterator<Item = Scheduled<'a>>,
        preempted: impl IntoIterator<Item = &'a str>,
    ) -> Orders {
        for request in preempted {
            self.produced.preempted(request, &mut self.orders);
        }
        let SchedulerConfig { groups, eager, .. } = &self.config;
        let scheduled = scheduled.into_iter();
        self.orders.computes.reserve(scheduled.size_hint().0);
        for scheduled in scheduled {
            self.produced.computed(scheduled, groups, *eager, &mut self.orders);
        }
        std::mem::take(&mut self.orders)
    }

    /// A request ended; also one that was never heard of. `side_data` is for the consumer's engine,
    /// if the request is handed over and was not complete before.
    pub fn finished(
        &mut self,
        request: &Request<'_>,
        how: Finish,
        side_data: Option<Vec<u8>>,
    ) -> Finished {
        self.arrived(request);
        self.refused.remove(request.id);
        let code = match how {
            Finish::Abort | Finish::Error => WireCode::Cancelled,
            Finish::Length | Finish::Stop => WireCode::NotNeeded,
        };
        self.consumed.finished(request.id, code, &mut self.orders);
        let side_data = side_data.filter(|_| !self.config.eager);
        let held = self.produced.finished(request.id, how, side_data, &mut self.orders);
        let params = held.as_ref().and_then(|held| self.offered(held));
        Finished { held: held.is_some(), params }
    }

    /// What a rank's worker half noted ([`crate::Reports::notes`]); before what the same step says
    /// of [`Scheduler::received`] and [`Scheduler::sent`].
    pub fn reported(&mut self, rank: usize, notes: &[u8]) {
        let notes = match Notes::decode(notes) {
            Ok(notes) if rank < self.config.ranks => notes,
            Ok(_) => return tracing::warn!(rank, "notes of a rank that is none"),
            Err(error) => return tracing::warn!(rank, %error, "notes that cannot be read"),
        };
        for fetched in notes.fetched {
            self.consumed.reported(rank, fetched, &mut self.orders);
        }
        for lost in notes.lost {
            self.produced.lost(&lost.request, lost.code, lost.detail);
        }
    }

    /// All ranks have reported these as sent.
    pub fn sent<'a>(&mut self, requests: impl IntoIterator<Item = &'a str>) {
        for request in requests {
            self.produced.sent(request);
        }
    }

    /// All ranks have reported these as received.
    pub fn received<'a>(&mut self, requests: impl IntoIterator<Item = &'a str>) {
        for request in requests {
            self.consumed.received(request);
        }
    }

    /// What came along with a request's KV, if it did and has not been asked for: in the order of
    /// the ranks here, from each producer rank that one fetched from. Dropped with the request's end.
    pub fn take_side_data(&mut self, request: &str) -> Vec<Vec<u8>> {
        self.consumed.take_side_data(request)
    }

    /// Whether the engine has to go on stepping although no request runs: something is to be said to
    /// the worker halves, or to be heard from them.
    pub fn has_pending_work(&self) -> bool {
        self.produced.held() > 0 || self.consumed.fetching() > 0 || !self.orders.is_empty()
    }

    /// How many fetches ended how so far, where the engine carries notes: [`WireCode::Ok`] on all
    /// ranks, or as on the first that failed.
    pub fn outcomes(&self) -> &[(WireCode, u64)] {
        self.consumed.outcomes()
    }

    /// What is kept, by name: zero when nothing is under way.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("produced", self.produced.len()),
            ("held", self.produced.held()),
            ("consumed", self.consumed.len()),
            ("fetching", self.consumed.fetching()),
            ("unreported", self.consumed.unreported()),
            ("refused", self.refused.len()),
        ]
    }

    fn is_known(&self, request: &str) -> bool {
        self.produced.contains(request)
            || self.consumed.contains(request)
            || self.refused.contains(request)
    }

    /// How many tokens at the end of a prompt the consumer computes from the state before them.
    fn recomputed(&self, prompt_tokens: u64) -> u64 {
        let state = self.config.groups.iter().any(|group| group.kind == Kind::State);
        u64::from(state).min(prompt_tokens)
    }

    /// How much of a prompt is prefilled where it is handed over: something in any case.
    fn prefill(&self, prompt_tokens: u64) -> u64 {
        let left_out = self.recomputed(prompt_tokens).min(prompt_tokens.saturating_sub(1));
        prompt_tokens - left_out
    }

    /// Adds a request that is produced here; why it cannot be.
    fn produce(
        &mut self,
        request: &str,
        transfer: Option<HandoffId>,
        tokens: u32,
    ) -> Option<String> {
        let named = transfer.is_some();
        let transfer = transfer.unwrap_or_else(|| self.draw());
        let added = self.produced.add(request, transfer.clone(), named, tokens);
        (!added).then(|| format!("another request is handed over as {transfer}"))
    }

    /// A name that no other handoff of any engine has, unless somebody means harm.
    fn draw(&mut self) -> HandoffId {
        self.drawn += 1;
        let name = format!("{}-{}", self.id, self.drawn);
        HandoffId::new(&name).expect("32 digits, a dash and at most 20 digits")
    }

    /// What the consumer's request has to carry.
    fn offered(&self, held: &Held) -> Option<Params> {
        let (transfer, tokens) = (held.transfer.clone(), Some(u64::from(held.tokens)));
        let address = self.address.clone()?;
        Some(Offered { transfer, address, engine: Some(self.id), tokens }.to_params())
    }
}
