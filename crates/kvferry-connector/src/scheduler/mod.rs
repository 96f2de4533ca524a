//! The scheduler half: decides, where requests are scheduled, what is handed over.
//!
//! One per engine. It has no threads, no clock and no sockets: the engine's calls go in, [`ConnectorMetadata`]
//! for the worker halves come out, as plain data. It never waits, and what it does per step grows
//! with what the step has that concerns handoffs, not with the requests there are.
//!
//! The state of a request is here alone: it has an entry from `arrived`, or `refuse`, to `finished`, and
//! later calls name it by its id. An adapter keeps no copy of its parameters, prompt or progress.
//!
//! # A producer's request
//! The engine calls `arrived`, `step` whenever it computes a part of the request, and `finished`. A
//! request that ends after its prompt was computed, by its length or by a stop token, is handed over;
//! its blocks are held until all ranks report it sent. Any other end withdraws it; if it was offered,
//! its blocks are held until all ranks have done so. Computing beyond the prompt withdraws it too if
//! that overwrites what is handed over: a state changes in place, and blocks that leave a window are
//! reused.
//!
//! # A consumer's request
//! The engine calls `arrived`, `matched` any number of times, `allocated` once with tokens to fetch, and
//! `finished` at any time. KV that is not fetched, because it is in the cache, or because the request
//! ended or was rejected before it got blocks, is freed at the producer. A fetch that fails on one rank
//! is cancelled on the others, so that all ranks report it soon. A failed fetch is not retried: the
//! engine computes the request. Of several live requests with one handoff (`n > 1`) the first that gets
//! blocks fetches it; the others wait for that.
//!
//! # Refusals
//! A request whose parameters can't be served is computed as if it had none: see [`Refused`].

mod consumed;
mod idle;
mod produced;
mod refused;
mod stats;

use crate::address::AgentAddress;
use crate::metadata::{ConnectorMetadata, EngineError, EngineMetadata, Notes};
use crate::params::{ConsumerParams, Params, Role};
use crate::producers::Producers;
use crate::prompt::PromptId;
use consumed::Consumed;
pub use idle::IdleLimit;
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{BLOCKS_MAX, BlockTable, HandoffId, NULL_BLOCK};
use kvferry_proto::layout::Kind;
use produced::{End, Produced};
pub use refused::Refused;
use refused::{Refusal, Refusals};
use serde_bytes::ByteBuf;
use serde_json::json;
pub use stats::Stats;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Settings of a scheduler half.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The engine's groups, in the order of its block tables.
    pub groups: Vec<GroupRule>,
    /// Number of the engine's ranks.
    pub ranks: usize,
    /// Time limit of a fetch, from `allocated` to its end.
    pub timeout: Duration,
    /// True: the handoff of a request that generates one token is complete with the last token of the
    /// prompt, one step earlier. Else it is complete with the request's end, and may carry side data:
    /// the engine may reuse blocks of a request that goes on before the worker halves learn of it.
    pub eager: bool,
    /// Smallest number of tokens at the end of a prompt that the consumer computes again: as many as a drafter of
    /// several tokens looks ahead (vLLM: `num_prefill_lookahead_tokens - 1`). With states, windows or chunks it is at
    /// least 1: what the last token of the prompt reads is not kept beyond that token.
    pub recomputed_tokens: u32,
    /// The number that stands for no block in the engine's tables, besides [`NULL_BLOCK`].
    pub null_block: Option<u32>,
    /// Limit of the blocks that may be kept for other engines that do nothing with them; `None`: any number.
    pub idle: Option<IdleLimit>,
}

/// A group of layers that share block tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRule {
    /// Kind of content of the group's blocks.
    pub kind: Kind,
    /// Tokens of a logical block, of all context-parallel ranks together, at least 1.
    pub block_tokens: u32,
}

/// A request as the engine knows it.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The engine's id, unique among live requests.
    pub id: &'a str,
    /// Tokens of its prompt before any cut.
    pub prompt_tokens: u64,
    /// Largest number of tokens that the request generates.
    pub max_tokens: u64,
    /// The request's `kv_transfer_params`.
    pub params: Option<&'a Params>,
    /// The identity of its prompt before any cut. `None` if it is not known, as with prompt embeddings: then
    /// the KV of another prompt is not recognised.
    pub prompt: Option<PromptId>,
}

/// Tokens of a request that can be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Not known yet: ask again in a later step.
    Unknown,
    /// So many tokens beyond the computed ones, fetched while other requests compute.
    Tokens(u64),
}

impl Match {
    /// No tokens.
    pub const NONE: Self = Self::Tokens(0);
}

/// A request in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled<'a> {
    /// The engine's id of the request.
    pub request: &'a str,
    /// Tokens in the cache before the step.
    pub computed: u64,
    /// Tokens that the step computes.
    pub tokens: u64,
    /// True if `blocks` are all it has: it is new, or has lost its blocks. Else they are those that it
    /// got since the last step that it was in.
    pub all: bool,
    /// Block numbers per group; [`NULL_BLOCK`] or the engine's own null block where there is none.
    pub blocks: Vec<Vec<u32>>,
}

/// The reason of a request's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The request has generated as many tokens as it may.
    Length,
    /// The request has generated a stop token.
    Stop,
    /// The request was aborted or rejected.
    Abort,
    /// The request failed.
    Error,
}

/// Instructions to the engine for a request that ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// Keep its blocks until all ranks report it sent.
    pub held: bool,
    /// `kv_transfer_params` of the response.
    pub params: Option<Params>,
}

/// The scheduler half of a connector.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    id: EngineId,
    /// `host:port` of the agent of rank 0, once it is known.
    address: Option<AgentAddress>,
    /// The random keys with which ids of handoffs are drawn.
    names: RandomState,
    /// Number of handoff ids drawn so far.
    drawn: u64,
    produced: Produced,
    consumed: Consumed,
    refused: Refusals,
    /// The producers that the ranks allow; `None` before the ranks are known.
    producers: Option<Producers>,
    metadata: ConnectorMetadata,
}

impl Scheduler {
    /// Creates a scheduler half. `id` is drawn at random for each incarnation of the engine.
    pub fn new(config: SchedulerConfig, id: EngineId) -> Self {
        let budget_ms = u32::try_from(config.timeout.as_millis()).unwrap_or(u32::MAX);
        Self {
            id,
            address: None,
            names: RandomState::new(),
            drawn: 0,
            produced: Produced::new(config.idle),
            consumed: Consumed::new(config.ranks, budget_ms, config.idle),
            refused: Refusals::default(),
            producers: None,
            metadata: ConnectorMetadata::default(),
            config,
        }
    }

    /// Sets [`crate::Worker::rank_metadata`] of all ranks, in their order, once. The next metadata take
    /// all of it to the worker halves.
    ///
    /// # Errors
    /// All of [`EngineError`].
    pub fn set_ranks(&mut self, metadata: Vec<Vec<u8>>) -> Result<(), EngineError> {
        let (given, ranks) = (metadata.len(), self.config.ranks);
        if given != ranks {
            return Err(EngineError::Ranks { given, ranks });
        }
        let ranks = metadata.into_iter().map(ByteBuf::from).collect();
        let engine = EngineMetadata { id: self.id, ranks };
        let (ranks, _) = engine.read()?;
        self.address = ranks.into_iter().next().map(|rank| rank.address);
        self.metadata.engine = Some(engine);
        Ok(())
    }

    /// Sets the producers that requests may name. The ranks check each again, with what names resolve to;
    /// here a request is refused before it gets blocks.
    pub fn set_producers(&mut self, producers: Producers) {
        self.producers = Some(producers);
    }

    /// A request that the adapter failed with, or that only it can tell to be unfit: it is computed as if it
    /// had no parameters. One that has arrived is given up, and not counted as refused.
    pub fn refuse(&mut self, request: &str, reason: Refused) {
        if !self.is_known(request) {
            self.refused.add(request, &Refusal::new(reason));
            return;
        }
        self.give_up([request]);
        if self.waits_for_blocks(request) {
            self.consumed.close(request, WireCode::NotNeeded, &mut self.metadata);
        }
    }

    /// A request has arrived. Returns the number of tokens of its prompt that the engine prefills: a producer
    /// leaves out those that the consumer computes again ([`SchedulerConfig::recomputed_tokens`]). A second call
    /// for a request changes nothing, and returns the same.
    pub fn arrived(&mut self, request: &Request<'_>) -> u64 {
        if !self.is_known(request.id)
            && let Err(refusal) = self.add(request)
        {
            self.refused.add(request.id, &refusal);
        }
        self.produced.tokens(request.id).map_or(request.prompt_tokens, u64::from)
    }

    /// Adds a request that asks for a handoff.
    fn add(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        let Some(role) = self.role(request)? else { return Ok(()) };
        let tokens = u32::try_from(self.prefill(request.prompt_tokens));
        let tokens = tokens.map_err(|_| Refusal::new(Refused::LongPrompt))?;
        // No rank could read a step with a longer table.
        let blocks = self.config.groups.iter().map(|group| group.blocks(request.prompt_tokens));
        if blocks.max().is_some_and(|most| most > BLOCKS_MAX as u64) {
            return Err(Refusal::new(Refused::LongPrompt));
        }
        match role {
            Role::Produce { transfer } => self.produce(request, transfer, tokens),
            Role::Consume(from) => {
                let prompt = request.prompt_tokens;
                self.consumed.add(request.id, from, prompt, prompt - self.recomputed(prompt));
                Ok(())
            }
        }
    }

    /// Returns how much of a request can be fetched if `computed` of its tokens are cached. Nothing of one that
    /// has not arrived.
    pub fn matched(&mut self, request: &str, computed: u64) -> Match {
        let found = self.consumed.matched(request, computed);
        if let Some(found) = self.consumed.admit(request, found) {
            return found;
        }
        self.consumed.close(request, WireCode::Busy, &mut self.metadata);
        self.refused.count(request, &Refusal::new(Refused::Busy));
        Match::NONE
    }

    /// A request has got blocks: all of them per group, with [`NULL_BLOCK`] or the engine's own null block
    /// where nothing is fetched. `external` tokens after those that were cached at its last match are to be
    /// fetched.
    pub fn allocated(&mut self, request: &str, external: u64, blocks: &[Vec<u32>]) {
        let Some(computed) = self.consumed.computed(request) else { return };
        let tokens = u32::try_from(computed)
            .and_then(|start| Ok((start, u32::try_from(computed.saturating_add(external))?)));
        match tokens {
            Ok(tokens) => {
                let null = self.config.null_block;
                let blocks = blocks.iter().map(|blocks| holes(blocks.clone(), null));
                let tables = blocks.zip(&self.config.groups);
                let tables: Vec<_> =
                    tables.map(|(blocks, group)| group.table(blocks, tokens.1)).collect();
                let new = tables.iter().zip(&self.config.groups);
                let new = new.map(|(table, group)| group.blocks_from(table, tokens.0)).sum();
                self.consumed.allocated(request, tokens, tables, new, &mut self.metadata);
            }
            Err(_) => {
                tracing::warn!(?request, computed, external, "too many tokens to fetch");
            }
        }
    }

    /// True if a request asks for a handoff, or was refused one, and has not ended.
    fn is_known(&self, request: &str) -> bool {
        self.produced.contains(request)
            || self.consumed.contains(request)
            || self.refused.contains(request)
    }

    /// True if [`Scheduler::allocated`] of this request would change anything.
    pub fn waits_for_blocks(&self, request: &str) -> bool {
        self.consumed.is_open(request)
    }

    /// True if [`Scheduler::step`] must get the steps of this request. Others may be left out.
    pub fn produces(&self, request: &str) -> bool {
        self.produced.is_followed(request, &self.config.groups)
    }

    /// True if [`Scheduler::step`] must get the steps of this request that have all its blocks
    /// ([`Scheduled::all`]), also if it does not [`Scheduler::produces`]: the worker halves know other ones.
    pub fn may_restart(&self, request: &str) -> bool {
        self.produced.is_open(request)
    }

    /// True if any request may be one that [`Scheduler::may_restart`].
    pub fn has_producers(&self) -> bool {
        self.produced.requests.len() > self.produced.held
    }

    /// True if [`Scheduler::finished`] of this request reads its blocks.
    pub fn reads_blocks(&self, request: &str) -> bool {
        self.produced.contains(request)
    }

    /// Has these producers' requests not handed over: the adapter can't say what it computed of them, or it is
    /// wrong. Those that have ended stay offered. Each counts as withdrawn at its end.
    pub fn give_up<'a>(&mut self, requests: impl IntoIterator<Item = &'a str>) {
        for request in requests {
            let why = "the engine gave the request's handoff up";
            self.produced.give_up(request, why, &mut self.metadata);
        }
    }

    /// Has nothing that has arrived handed over or fetched any more, as when the engine's weights have changed, or
    /// may have. Offers and running fetches end as with [`Scheduler::reset_cache`]; requests without blocks are
    /// computed as if they had no parameters.
    pub fn give_up_all(&mut self) {
        self.reset_cache();
        self.produced
            .give_up_all("the engine's weights may have changed since the request arrived");
        self.consumed.give_up_all(&mut self.metadata);
    }

    /// Returns the metadata of a step. `scheduled` is what the step computes of requests that
    /// [`Scheduler::produces`]; `preempted` are requests that lost their blocks.
    pub fn step<'a>(
        &mut self,
        scheduled: impl IntoIterator<Item = Scheduled<'a>>,
        preempted: impl IntoIterator<Item = &'a str>,
    ) -> ConnectorMetadata {
        for request in preempted {
            self.produced.preempted(request, &mut self.metadata);
        }
        let SchedulerConfig { groups, null_block, .. } = &self.config;
        let scheduled = scheduled.into_iter();
        self.metadata.computes.reserve(scheduled.size_hint().0);
        for mut scheduled in scheduled {
            for blocks in &mut scheduled.blocks {
                *blocks = holes(std::mem::take(blocks), *null_block);
            }
            self.produced.computed(scheduled, groups, &mut self.metadata);
        }
        self.produced.expect(&mut self.metadata);
        self.consumed.claim(&mut self.metadata);
        std::mem::take(&mut self.metadata)
    }

    /// A request has ended. `blocks` are all that it has at its end, per group, if the engine says so: a request
    /// whose offered blocks it has freed or moved is withdrawn. `side_data` is for the consumer's engine; it is
    /// dropped if the handoff is complete already.
    ///
    /// `None` if the request is not known here: it asks for no handoff, or was rejected before it arrived. For a
    /// rejected one the adapter calls [`Scheduler::arrived`] and then `finished` once more: that frees the producer's KV.
    pub fn finished(
        &mut self,
        request: &str,
        how: FinishReason,
        blocks: Option<&[Vec<u32>]>,
        side_data: Option<Vec<u8>>,
    ) -> Option<Finished> {
        if !self.is_known(request) {
            return None;
        }
        self.refused.remove(request);
        let code = match how {
            FinishReason::Abort | FinishReason::Error => WireCode::Cancelled,
            FinishReason::Length | FinishReason::Stop => WireCode::NotNeeded,
        };
        self.consumed.finished(request, code, &mut self.metadata);
        let null = self.config.null_block;
        let real = |blocks: &[Vec<u32>]| {
            blocks.iter().map(|blocks| holes(blocks.clone(), null)).collect::<Vec<_>>()
        };
        let blocks = blocks.filter(|_| self.reads_blocks(request)).map(real);
        let (blocks, groups) = (blocks.as_deref(), &self.config.groups);
        let metadata = &mut self.metadata;
        Some(match self.produced.finished(request, how, blocks, groups, side_data, metadata) {
            End::Free => Finished::default(),
            End::Withdrawn => Finished { held: true, params: None },
            End::Offered(transfer, tokens) => {
                Finished { held: true, params: self.offered(transfer, tokens) }
            }
        })
    }

    /// Takes [`crate::Reports::notes`] of a rank, before [`Scheduler::received`] and
    /// [`Scheduler::sent`] of the same step.
    pub fn reported(&mut self, rank: usize, notes: &[u8]) {
        let notes = match Notes::decode(notes) {
            Ok(notes) if rank < self.config.ranks => notes,
            Ok(_) => return tracing::warn!(rank, "notes of a rank that does not exist"),
            Err(error) => return tracing::warn!(rank, %error, "malformed notes"),
        };
        for fetched in notes.fetched {
            self.consumed.reported(rank, fetched, &mut self.metadata);
        }
        for request in notes.answered {
            self.consumed.answered(&request);
        }
        for lost in notes.lost {
            self.produced.lost(&lost.request, lost.code, lost.detail);
        }
    }

    /// Ends these requests, which all ranks have reported as sent.
    pub fn sent<'a>(&mut self, requests: impl IntoIterator<Item = &'a str>) {
        for request in requests {
            self.produced.sent(request);
        }
    }

    /// Records that all ranks have reported these requests as received.
    pub fn received<'a>(&mut self, requests: impl IntoIterator<Item = &'a str>) {
        for request in requests {
            self.consumed.received(request);
        }
    }

    /// Takes the side data of a request: in the order of the ranks here, one from each producer rank
    /// that the rank fetched from. Dropped when the request ends.
    pub fn take_side_data(&mut self, request: &str) -> Vec<Vec<u8>> {
        self.consumed.take_side_data(request)
    }

    /// Whether the engine must go on stepping although no request runs: metadata wait for the worker
    /// halves, or reports from them are due.
    pub fn has_pending_work(&self) -> bool {
        self.produced.held > 0 || self.consumed.fetching > 0 || !self.metadata.is_empty()
    }

    /// Counts of how fetches ended, if the engine carries notes: [`WireCode::Ok`] on all ranks, or the
    /// code of the first failure.
    pub fn outcomes(&self) -> &[(WireCode, u64)] {
        &self.consumed.outcomes
    }

    /// The engine drops its cache, since its weights have changed, for example. Withdraws all offers,
    /// complete or not, and cancels all running fetches. Blocks are held and requests awaited as before.
    pub fn reset_cache(&mut self) {
        let detail = "the engine has dropped its cache";
        self.produced.reset(detail, &mut self.metadata);
        self.consumed.reset(detail, &mut self.metadata);
    }

    /// Takes what was counted since the last call.
    pub fn take_stats(&mut self) -> Stats {
        let mut stats = std::mem::take(&mut self.produced.stats);
        stats.add(&std::mem::take(&mut self.consumed.stats));
        stats.add(&std::mem::take(&mut self.refused.stats));
        stats
    }

    /// Counts of requests that got no handoff, by reason.
    pub fn refusals(&self) -> &[(Refused, u64)] {
        self.refused.counts()
    }

    /// Counts of what is kept, by name. All are zero when nothing is under way.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("produced", self.produced.requests.len()),
            ("held", self.produced.held),
            ("held_blocks", self.produced.held_blocks.len()),
            ("unclaimed_blocks", self.produced.held_blocks.unclaimed()),
            ("consumed", self.consumed.requests.len()),
            ("fetching", self.consumed.fetching),
            ("waiting_loads", self.consumed.waiting.loads()),
            ("deferred", self.consumed.deferred),
            ("unreported", self.consumed.quorum.len()),
            ("refused", self.refused.len()),
        ]
    }

    /// The role that a request has in a handoff, if its producer is accepted.
    fn role(&self, request: &Request<'_>) -> Result<Option<Role>, Refusal> {
        let role = role(request)?;
        if let (Some(Role::Consume(from)), Some(producers)) = (&role, &self.producers) {
            producers.check(from.address.as_str())?;
        }
        Ok(role)
    }

    /// Returns the number of tokens at the end of a prompt that the consumer computes again.
    fn recomputed(&self, prompt_tokens: u64) -> u64 {
        let least = self.config.groups.iter().any(|group| group.kind != Kind::Full);
        u64::from(self.config.recomputed_tokens.max(least.into())).min(prompt_tokens)
    }

    /// Returns the number of tokens of a prompt that a producer prefills, at least one.
    fn prefill(&self, prompt_tokens: u64) -> u64 {
        let left_out = self.recomputed(prompt_tokens).min(prompt_tokens.saturating_sub(1));
        prompt_tokens - left_out
    }

    /// Adds a producer's request.
    fn produce(
        &mut self,
        request: &Request<'_>,
        transfer: Option<HandoffId>,
        tokens: u32,
    ) -> Result<(), Refusal> {
        let named = transfer.is_some();
        let eager = self.config.eager && request.max_tokens <= 1;
        let transfer = transfer.unwrap_or_else(|| self.draw(request.prompt));
        let added = self.produced.add(request.id, transfer, named, tokens, eager);
        if added { Ok(()) } else { Err(Refusal::new(Refused::Duplicate)) }
    }

    /// Draws the id of a handoff. It is unique among all engines, and can't be guessed: a peer that knows the id of a
    /// handoff may ask for it.
    fn draw(&mut self, prompt: Option<PromptId>) -> HandoffId {
        self.drawn += 1;
        let half = |number: u64| self.names.hash_one((self.drawn, number));
        let id = HandoffId::new(&format!("{:016x}{:016x}", half(0), half(1))).expect("32 bytes");
        prompt.map_or(id.clone(), |prompt| prompt.identify(id).expect("short, without digits"))
    }

    /// The parameters for the consumer's request.
    fn offered(&self, transfer: HandoffId, tokens: u32) -> Option<Params> {
        let (address, tokens) = (self.address.clone()?.into(), Some(tokens.into()));
        let from = ConsumerParams { transfer, address, engine: Some(self.id), tokens };
        let mut params = from.to_params();
        // Routers pass these on as they do NIXL's. The worker halves exchange what they stand for.
        let no_blocks = vec![json!([]); self.config.groups.len()];
        params.insert("remote_block_ids".to_owned(), json!(no_blocks));
        params.insert("tp_size".to_owned(), json!(self.config.ranks));
        Some(params)
    }
}

impl GroupRule {
    /// Returns the number of blocks of so many tokens.
    fn blocks(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.block_tokens.max(1)))
    }

    /// The blocks of a request whose first `tokens` tokens are fetched. The block of a state is the one
    /// of its last token: later ones are scratch space of speculative decoding.
    fn table(&self, mut blocks: Vec<u32>, tokens: u32) -> BlockTable {
        // Those behind have nothing of the prompt.
        blocks.truncate(BLOCKS_MAX);
        let at = tokens.saturating_sub(1) / self.block_tokens.max(1);
        match blocks.get(at as usize) {
            Some(&block) if self.kind == Kind::State => BlockTable::new(at, vec![block]),
            _ => BlockTable::new(0, blocks),
        }
    }

    /// Returns the number of blocks of a request's table that hold tokens after the first `tokens`.
    fn blocks_from(&self, table: &BlockTable, tokens: u32) -> u64 {
        let from = tokens / self.block_tokens.max(1);
        let left = from.saturating_sub(table.first) as usize;
        table.blocks.iter().skip(left).filter(|block| **block != NULL_BLOCK).count() as u64
    }
}

/// Returns the role that a request's parameters ask for, with the handoff of its own prompt.
fn role(request: &Request<'_>) -> Result<Option<Role>, Refusal> {
    let identify = |transfer| match request.prompt {
        Some(prompt) => Ok(prompt.identify(transfer)?),
        None => Ok::<_, Refusal>(transfer),
    };
    Ok(match Role::parse(request.params)? {
        Some(Role::Produce { transfer: Some(transfer) }) => {
            Some(Role::Produce { transfer: Some(identify(transfer)?) })
        }
        Some(Role::Consume(from)) => {
            let transfer = identify(from.transfer)?;
            Some(Role::Consume(ConsumerParams { transfer, ..from }))
        }
        role => role,
    })
}

/// Blocks with [`NULL_BLOCK`] for the engine's own null block.
fn holes(mut blocks: Vec<u32>, null: Option<u32>) -> Vec<u32> {
    if let Some(null) = null {
        blocks.iter_mut().filter(|block| **block == null).for_each(|block| *block = NULL_BLOCK);
    }
    blocks
}
