//! The worker half: one per rank, in the process that has the rank's KV memory.
//!
//! It carries out the scheduler half's [`ConnectorMetadata`] and reports what has ended. Calls of the
//! engine's thread return at once; one that changes a request or two sends their messages by itself.
//! What takes time happens on other threads:
//!
//! | thread | does |
//! |---|---|
//! | threads of the agent | answer messages, begin reads, handle the ends of fetches |
//! | `kvferry-handoff`, of the [`Rank`] | keeps the time, learns producing engines, sends for steps that change many requests |
//! | `kvferry-events` | waits for events of the device |
//! | `kvferry-plan`, one at most, short-lived | plans the copies from engines that were learned |
//! | `kvferry-lookup`, one per address, short-lived | looks host names up, asks bootstrap servers |
//!
//! Locks are taken in this order: the worker's state, a produced request, the rank.

mod bootstrap;
mod consumer;
mod engines;
mod events;
mod loads;
mod names;
mod pieces;
mod planning;
mod producer;
mod producer_engine;
mod request;
mod state;
#[cfg(test)]
mod tests;
mod types;
mod unplanned;

use crate::clock::now;
use crate::metadata::{Cancel, ConnectorMetadata, Ending, EndingKind, EngineMetadata, Notes};
use crate::producers::Producers;
use crate::rank::{Event, Rank, RankError, RankObserver, ReadPart};
use crate::rank_metadata::RankMetadata;
use consumer::failure;
use events::Job;
use kvferry::{After, Agent, ErrorKind, Region};
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::{Failure, OwnEngine, Pairing};
use kvferry_proto::handoff::HandoffId;
use kvferry_proto::layout::Layout;
use kvferry_sys::sync::{Condvar, Mutex};
pub use loads::{Load, Loads};
use names::LookUp;
use producer_engine::Memory;
use state::{Action, Inner, PendingAction, Stage, State};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
pub use types::{Announce, ComputeEvent, Reports, WorkerConfig, WorkerError, WorkerObserver};

/// The reason of what ends because a step can't be read.
const UNREADABLE: &str = "a rank could not read a step of its engine";

/// The worker half of one rank. All calls may be made from any thread and return at once.
pub struct Worker {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl Worker {
    /// Starts the worker half of a rank whose KV lies in `regions` of `agent`, as `layout` describes.
    /// It receives the agent's messages from now on.
    ///
    /// # Errors
    /// [`WorkerError::RankMetadata`]; [`WorkerError::Rank`].
    pub fn start(
        agent: &Agent,
        layout: Layout,
        regions: &[Region],
        config: WorkerConfig,
    ) -> Result<Self, WorkerError> {
        let resolver = agent.clone();
        let look_up = Arc::new(move |address: &str| resolver.peer(address));
        Self::start_with(agent, layout, regions, config, look_up)
    }

    fn start_with(
        agent: &Agent,
        layout: Layout,
        regions: &[Region],
        config: WorkerConfig,
        look_up: LookUp,
    ) -> Result<Self, WorkerError> {
        let (address, model) = (agent.advertised(), config.model.clone());
        let metadata = RankMetadata::new(address, model, layout.clone(), regions)?;
        let limits = config.limits.clone();
        let producers = config.producers.clone();
        let producers = producers.unwrap_or_else(|| Producers::of_agent(agent));
        let inner = Arc::new_cyclic(|me: &Weak<Inner>| Inner {
            me: Weak::clone(me),
            producers,
            config,
            metadata: metadata.encode(),
            memory: Arc::new(Memory::new(layout, regions)),
            look_up,
            rank: OnceLock::new(),
            queue: Arc::default(),
            state: Mutex::default(),
            arrived: Condvar::new(),
            observer: OnceLock::new(),
        });
        let observer: Weak<dyn RankObserver> = Weak::clone(&inner.me) as _;
        let rank = Rank::observed(agent, &limits, Some(observer))?;
        inner.rank.set(rank).expect("only this call sets it");
        let worker = Self { inner };
        let queue = Arc::clone(&worker.inner.queue);
        let inner = Arc::downgrade(&worker.inner);
        let serve = move || queue.serve(&inner);
        kvferry_sys::thread::spawn("kvferry-events".into(), serve).map_err(RankError::Thread)?;
        Ok(worker)
    }

    /// Encoded [`RankMetadata`] of this rank, which the engine carries to the scheduler half.
    pub fn rank_metadata(&self) -> &[u8] {
        &self.inner.metadata
    }

    /// The producers that KV is fetched from.
    pub fn producers(&self) -> &Producers {
        &self.inner.producers
    }

    /// Takes a step's metadata, before anything is computed or overwritten. When it returns, no
    /// consumer will accept what it still reads of requests that lost their blocks or are not held. For blocks in host
    /// memory: fetches into memory of a device fail, see [`Worker::apply_after`].
    ///
    /// # Errors
    /// [`WorkerError::Metadata`], after which nothing is handed over that was offered before, since requests may lose
    /// their blocks in this step; and fetches that were not reported fail, since the step may cancel them. What the step
    /// itself has is reported only after [`Worker::lose_step`]. [`WorkerError::Engine`] and [`WorkerError::Misuse`] for the
    /// metadata that describe the engine, after the rest has been carried out; [`RankError::Forked`] in a fork.
    pub fn apply(&self, metadata: &[u8]) -> Result<(), WorkerError> {
        self.apply_after(metadata, || Ok(After::default()))
    }

    /// Applies a step as [`Worker::apply`] does. If the step has fetches, `after` is called without a lock. It returns the
    /// work of a device that used the blocks before, and the fetches write their blocks after that work;
    /// [`After::host`] if the caller has waited for it. If it returns an error, the fetches fail, and write nothing.
    ///
    /// # Errors
    /// Those of [`Worker::apply`].
    pub fn apply_after(
        &self,
        metadata: &[u8],
        after: impl FnOnce() -> Result<After, String>,
    ) -> Result<(), WorkerError> {
        if self.is_forked() {
            return Err(RankError::Forked.into());
        }
        let metadata = match ConnectorMetadata::decode(metadata) {
            Ok(metadata) => metadata,
            Err(error) => {
                self.withdraw_all(UNREADABLE);
                return Err(error.into());
            }
        };
        let ConnectorMetadata {
            engine,
            restarts,
            endings,
            reclaims,
            computes,
            expects,
            claims,
            fetches,
            frees,
            cancels,
        } = metadata;
        let after = if fetches.is_empty() { Ok(After::default()) } else { after() };
        let inner = &self.inner;
        let _together = inner.rank().hold();
        let engine = engine.map_or(Ok(()), |engine| inner.set_own_engine(engine));
        let mut state = inner.state.lock();
        for request in &restarts {
            if let Some((_, produced)) = state.produced.get(request) {
                produced.restart(inner.rank());
            }
        }
        for ending in endings {
            inner.end(&mut state, ending);
        }
        for request in &reclaims {
            if let Some((_, produced)) = state.produced.get(request) {
                produced.reclaim(inner.rank());
            }
        }
        (state.step, state.announced) = (None, 0);
        state.parts.clear();
        state.pieces.clear();
        for compute in computes {
            inner.compute(&mut state, compute);
        }
        for expect in &expects {
            inner.expect(expect);
        }
        let claims = claims.into_iter().map(Action::Claim);
        let fetches = fetches.into_iter().map(Action::Fetch);
        let frees = frees.into_iter().map(Action::Free);
        let actions = claims.chain(fetches).chain(frees);
        state.requested.extend(actions.map(|action| (action, after.clone())));
        state.cancels.extend(cancels);
        engine
    }

    /// Begins the claims and fetches of the step's metadata. The blocks of their requests belong to this half
    /// until they are reported as received.
    pub fn fetch(&self) {
        if self.is_forked() {
            return;
        }
        let inner = &self.inner;
        let _together = inner.rank().hold();
        let mut state = inner.state.lock();
        let requested = std::mem::take(&mut state.requested);
        let actions = requested.len();
        for (action, after) in requested {
            if let Action::Fetch(fetch) = &action {
                let before = state.fetches.insert(fetch.request.clone(), Stage::Pending);
                debug_assert!(before.is_none(), "a request is fetched once");
            }
            let deadline = now() + action.budget(&inner.config.limits);
            let pending = PendingAction::new(action, deadline);
            match after {
                Ok(after) => state.pending.push(PendingAction { after, ..pending }),
                Err(why) => inner.begin_unordered(&mut state, pending, why),
            }
        }
        for cancel in std::mem::take(&mut state.cancels) {
            inner.cancel(&mut state, cancel);
        }
        if state.closed {
            inner.end_fetches(&mut state);
        }
        drop(state);
        inner.rank().call_observer(actions);
    }

    /// Whether [`Worker::layer_computed`] would announce anything at the end of this layer. If not, an
    /// engine need neither record an event nor make that call.
    pub fn wants_layer(&self, layer: usize) -> bool {
        !self.is_forked() && self.inner.ends_piece(&self.inner.state.lock(), layer)
    }

    /// A layer of the step was launched, numbered as in the rank's layout; `computed` tells when it is
    /// done, `None` if it is. In the order of the layers. Layers may be left out: what ends with them
    /// is announced with the next one, and the last with [`Worker::step_computed`].
    pub fn layer_computed(&self, layer: usize, computed: Option<Box<dyn ComputeEvent>>) {
        if self.is_forked() {
            return;
        }
        let inner = &self.inner;
        let mut state = inner.state.lock();
        if inner.ends_piece(&state, layer)
            && let Some(parts) = state.step()
        {
            let done = layer as u32 + 1;
            let before = std::mem::replace(&mut state.announced, done);
            drop(state);
            inner.run_job(computed, Job::Layers(parts, before..done));
        }
    }

    /// Reports that all layers of the step were launched, once per step. `computed` is the event of their completion;
    /// `None` if they are complete.
    pub fn step_computed(&self, computed: Option<Box<dyn ComputeEvent>>) {
        if self.is_forked() {
            return;
        }
        let inner = &self.inner;
        let mut state = inner.state.lock();
        if let Some(parts) = state.step() {
            state.step = None;
            state.pieces.clear();
            drop(state);
            inner.run_job(computed, Job::Step(parts));
        }
    }

    /// The step was given up before all of it was launched: withdraws the requests that it computes on
    /// this rank, so that none of their blocks is taken for computed. Instead of
    /// [`Worker::step_computed`]. `detail` says why, in words; their consumers get it.
    pub fn step_failed(&self, detail: &str) {
        if self.is_forked() {
            return;
        }
        let inner = &self.inner;
        let _together = inner.rank().hold();
        let mut state = inner.state.lock();
        let Some(parts) = state.step() else { return };
        state.step = None;
        state.pieces.clear();
        drop(state);
        // Not after the events of earlier steps: what waits for one is dropped with the withdrawal.
        for part in parts.iter() {
            part.request().withdraw(inner.rank(), WireCode::Internal, detail);
        }
    }

    /// Withdraws all that is offered, gives up the step before, and cancels all fetches that were not reported.
    fn withdraw_all(&self, detail: &str) {
        let inner = &self.inner;
        let _together = inner.rank().hold();
        let mut state = inner.state.lock();
        (state.step, state.announced) = (None, 0);
        state.parts.clear();
        state.pieces.clear();
        for (_, produced) in state.produced.values() {
            produced.withdraw(inner.rank(), WireCode::Internal, detail);
        }
        for (action, after) in &mut state.requested {
            if matches!(action, Action::Fetch(_)) {
                *after = Err(detail.to_owned());
            }
        }
        let succeeded = state.fetched.iter().filter(|it| it.code.is_ok()).map(|it| &it.request);
        let requests: Vec<_> = state.fetches.keys().chain(succeeded).cloned().collect();
        for request in requests {
            let (code, detail) = (WireCode::Internal, detail.to_owned());
            inner.cancel(&mut state, Cancel { request, code, detail });
        }
    }

    /// Ends what a step has that [`Worker::apply`] could not decode, so that the engine does not wait for reports of it:
    /// fetches are reported as failed, and endings withdraw their handoffs. Both as [`ConnectorMetadata::awaited`] returned
    /// them. Only after [`WorkerError::Metadata`]: after other errors the step was carried out, and each is reported once.
    pub fn lose_step(&self, fetches: Vec<String>, endings: Vec<(String, HandoffId, bool)>) {
        if self.is_forked() {
            return;
        }
        let inner = &self.inner;
        let _together = inner.rank().hold();
        let mut state = inner.state.lock();
        for request in fetches {
            let how = failure(WireCode::Internal, UNREADABLE.to_owned());
            inner.fetched(&mut state, request, how, Vec::new());
        }
        for (request, transfer, held) in endings {
            let (code, detail) = (WireCode::Internal, UNREADABLE.to_owned());
            let how = EndingKind::Withdrawn { code, detail, held };
            inner.end(&mut state, Ending { request, transfer, how });
        }
    }

    /// Takes what has ended on this rank since the last call; nothing in a fork.
    pub fn reports(&self) -> Reports {
        if self.is_forked() {
            return Reports::default();
        }
        let mut state = self.inner.state.lock();
        let notes = Notes {
            fetched: std::mem::take(&mut state.fetched),
            answered: std::mem::take(&mut state.answered).into_values().collect(),
            lost: std::mem::take(&mut state.lost),
        };
        let failed = notes.fetched.iter().filter(|it| !it.code.is_ok());
        Reports {
            sent: std::mem::take(&mut state.sent),
            received: notes.fetched.iter().map(|it| it.request.clone()).collect(),
            failed: failed.map(|it| it.request.clone()).collect(),
            notes: (!notes.is_empty()).then(|| notes.encode()),
        }
    }

    /// Waits until [`Worker::reports`] has something to return. False after `timeout`, and at once in a fork.
    pub fn wait(&self, timeout: Duration) -> bool {
        if self.is_forked() {
            return false;
        }
        let none = |state: &mut State| !state.has_reports();
        let state = self.inner.state.lock();
        self.inner.arrived.wait_while(state, timeout, none).has_reports()
    }

    /// Calls `observer` for what happens from now on. Only the first call has an effect.
    pub fn set_observer(&self, observer: Arc<dyn WorkerObserver>) {
        drop(self.inner.observer.set(observer));
    }

    /// Ends everything, and unregisters the regions: nothing reads or writes KV memory when this
    /// returns, except a device that does not end its copies, which is logged. It takes at most the agent's silence limit.
    /// Fetches that are under way, and later ones, are reported as failed. May be called again; dropping the half calls it.
    pub fn close(&self) {
        if self.is_forked() {
            return;
        }
        let inner = &self.inner;
        inner.queue.close();
        if !inner.rank().close() {
            return;
        }
        // An agent that was shut down has taken all memory back, and has said what it could not.
        let is_gone = |kind| matches!(kind, ErrorKind::NotRegistered | ErrorKind::Shutdown);
        if let Err(error) = inner.rank().unregister(&inner.memory.regions())
            && !is_gone(error.kind())
        {
            tracing::error!(%error, "KV memory can't be taken away from a peer or a device");
        }
        let mut state = inner.state.lock();
        state.closed = true;
        inner.end_fetches(&mut state);
    }

    /// Counts of what is kept, by name. All but tombstones, known engines and connected peers are zero
    /// when nothing is under way. None in a fork.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        if self.is_forked() {
            return Vec::new();
        }
        let of_rank = self.inner.rank().gauges();
        let state = self.inner.state.lock();
        let own = [
            ("engines", state.engines.known.len()),
            ("pending", state.pending.len() + state.learning.len()),
            ("fetches", state.fetches.len()),
            ("produced", state.produced.len()),
            ("metadata", state.requested.len() + state.cancels.len()),
            ("lookups", state.names.lookups()),
            ("reports", state.sent.len() + state.fetched.len() + state.lost.len()),
            ("jobs", self.inner.queue.len()),
        ];
        of_rank.into_iter().chain(own).collect()
    }

    fn is_forked(&self) -> bool {
        self.inner.rank().is_forked()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn set_own_engine(&self, engine: EngineMetadata) -> Result<(), WorkerError> {
        let (ranks, topology) = engine.read()?;
        let rank = self.config.rank;
        if engine.ranks.get(rank).is_none_or(|metadata| **metadata != self.metadata) {
            return Err(WorkerError::Misuse("the engine has another rank of this rank's number"));
        }
        self.state.lock().ranks = Some(ranks.len());
        let own = OwnEngine {
            id: engine.id,
            rank,
            topology: Arc::new(topology),
            model: ranks[0].model.clone(),
            addresses: ranks.into_iter().map(|rank| rank.address.into()).collect(),
            cards: engine.ranks.into_iter().map(serde_bytes::ByteBuf::into_vec).collect(),
        };
        Ok(self.rank().set_own_engine(own)?)
    }
}

impl RankObserver for Inner {
    fn ended(&self, event: Event) {
        match event {
            Event::Produced { id, outcome } => self.produced(&id, outcome),
            Event::Consumed { id, outcome, side_data } => self.consumed(&id, &outcome, side_data),
        }
    }

    fn learned_engine(&self, ticket: u64, result: Result<Arc<Pairing>, Failure>) {
        self.engine_learned(ticket, result);
    }

    fn lost_peer(&self, address: &str) {
        let mut state = self.state.lock();
        for address in state.engines.reached_at(address) {
            state.doubt_names(address.as_str());
            state.engines.known.remove(&address);
        }
        self.lost_unplanned(&mut state, address);
    }

    fn answered(&self, id: &HandoffId) {
        self.state.lock().answered_by_producer(id);
    }

    fn called(&self) {
        let mut state = self.state.lock();
        self.expire_lookups(&mut state);
        self.expire_unplanned(&mut state);
        for pending in std::mem::take(&mut state.pending) {
            self.run_whatever_happens(&mut state, pending);
        }
    }

    fn read(&self, id: &HandoffId, part: ReadPart) {
        self.observe(|observer| {
            if let Some(fetched) = self.state.lock().fetched_for.get(id) {
                observer.read(&fetched.request, part);
            }
        });
    }
}
