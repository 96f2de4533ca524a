//! The worker half: one per rank, in the process whose memory the rank's KV lies in.
//!
//! It carries out the scheduler half's [`Orders`], and says what has ended. The engine's thread is
//! never waited for, and never waits: what takes time happens on the thread of the [`Rank`], which
//! also begins a fetch the moment its producer is known, and on one that waits for events of the
//! device.
//!
//! A name in an address is looked up on a thread of its own, since that may take long.
//!
//! Locks are taken in this order: the worker's state, a produced request, the rank.

use crate::card::{CardError, RankCard};
use crate::orders::{
    Cancel, Compute, Ending, EngineCard, Fetched, Free, How, Notes, Orders, OrdersError, Want,
};
use crate::paired::{Fetch, Memory, Paired, to_be_told};
use crate::produced::{Job, Part, Produced, Queue};
use crate::quorum::bounded;
use crate::rank::{Event, Fault, Observer, Rank, ReadPart, SideData};
use crate::scheduler::EngineError;
use kvferry::{Agent, Incarnation, Region};
use kvferry_proto::handoff::{HandoffId, Limits, Outcome, Refusal};
use kvferry_proto::introduction::{EngineId, Failure, OwnEngine, Pairing};
use kvferry_proto::layout::Layout;
use kvferry_proto::{Timestamp, WireCode};
use rustc_hash::{FxHashMap, FxHashSet};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use thiserror::Error;

/// Addresses that are looked up at a time at most: each takes a thread.
const LOOKUPS_MAX: usize = 32;

/// Producing engines that are remembered at most: the one that was not used longest goes first.
const PAIRED_MAX: usize = 1024;

/// How a producer's worker half says that something is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announce {
    /// While prefill computes: each chunk in so many pieces of layers, at least 1. More pieces
    /// expose less of the transfer, and cost a control message each.
    Layers {
        /// Pieces of a chunk.
        pieces: u32,
    },
    /// After each chunk.
    Chunks,
    /// Once, when all is ready.
    End,
}

/// How a worker half works.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Which of the engine's ranks this is.
    pub rank: usize,
    /// How much of a prefill is said to be ready when.
    pub announce: Announce,
    /// Bounds of the protocol.
    pub limits: Limits,
}

/// Says when something that was launched has been computed: a CUDA event, say.
pub trait Computed: Send {
    /// Whether it has. Must not block.
    fn is_ready(&self) -> bool;

    /// Returns when it has. Called on a thread of the worker half's.
    fn wait(&self);
}

/// What is over, since the last time that was asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reports {
    /// Producer's requests whose blocks are not read any more on this rank: once each, and only
    /// those that were held.
    pub sent: Vec<String>,
    /// Consumer's requests whose blocks are not written any more on this rank: once each, for each
    /// that was to be fetched.
    pub received: Vec<String>,
    /// Those of `received` whose blocks are not what they should be.
    pub failed: Vec<String>,
    /// For the scheduler half ([`crate::Scheduler::reported`]), where the engine has a way for it.
    pub notes: Option<Vec<u8>>,
}

/// Who watches a worker half: to wake an engine that waits for it, or for figures. Called as things
/// happen, with locks held: it must return soon, and not call the worker half.
pub trait Watch: Send + Sync {
    /// What a consumer's request fetches is there on this rank, or will not come:
    /// [`Worker::reports`] says so from now on.
    fn received(&self, request: &str, code: WireCode, detail: &str);

    /// A producer's request is not read any more on this rank, or cannot be: [`Worker::reports`]
    /// says so from now on.
    fn sent(&self, request: &str);

    /// A part of what a consumer's request fetches has been read.
    fn read(&self, _request: &str, _part: ReadPart) {}
}

/// Why a call of a worker half was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// By the protocol's driver or the agent.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The layout and the regions do not belong together.
    #[error(transparent)]
    Card(#[from] CardError),
    /// The orders cannot be read.
    #[error(transparent)]
    Orders(#[from] OrdersError),
    /// The engine's ranks make no engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// It was called in another order than it can be.
    #[error("{0}")]
    Misuse(&'static str),
}

/// The worker half. All calls may be made from any thread; they return at once.
pub struct Worker {
    inner: Arc<Inner>,
}

struct Inner {
    me: Weak<Inner>,
    config: WorkerConfig,
    card: Vec<u8>,
    memory: Arc<Memory>,
    agent: Agent,
    rank: OnceLock<Rank>,
    queue: Arc<Queue>,
    state: Mutex<State>,
    /// There is something to report.
    arrived: Condvar,
    watch: OnceLock<Arc<dyn Watch>>,
}

#[derive(Default)]
struct State {
    /// How many ranks this rank's engine has, once that is known.
    ranks: Option<usize>,
    /// Producing engines by the address that they are known by, and when each was used last.
    paired: FxHashMap<String, (Arc<Paired>, u64)>,
    uses: u64,
    /// Introductions under way, by their tickets, with who waits for them.
    meetings: FxHashMap<u64, Meeting>,
    tickets: u64,
    /// Addresses that are being looked up, with who waits for them, and those that were.
    lookups: FxHashMap<String, Vec<Meeting>>,
    looked_up: FxHashSet<String>,
    /// The consumer's requests, and which of them a handoff is for, from where.
    fetches: FxHashMap<String, Stage>,
    fetched_for: FxHashMap<HandoffId, (String, String)>,
    /// The producer's requests, and which of them a handoff is of.
    produced: FxHashMap<String, (HandoffId, Arc<Produced>)>,
    produced_as: FxHashMap<HandoffId, String>,
    /// Orders whose time has not come.
    wants: Vec<Want>,
    frees: Vec<Free>,
    cancels: Vec<Cancel>,
    /// What is to be done on the rank's thread, in this order.
    errands: Vec<Meeting>,
    /// What the step at hand computes.
    parts: Vec<Part>,
    step: Option<Arc<[Part]>>,
    sent: Vec<String>,
    fetched: Vec<Fetched>,
    lost: Vec<Fetched>,
}

/// How far a fetch is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// Its producer is looked for.
    Pending,
    /// It is the protocol's.
    Wanted(HandoffId),
}

/// Something that is to be done at a producing engine.
struct Meeting {
    until: Timestamp,
    errand: Errand,
}

enum Errand {
    Want(Want),
    Free(Free),
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl Worker {
    /// The worker half of a rank whose KV lies in `regions` of `agent`'s, as `layout` says. From now
    /// on it receives the agent's messages.
    ///
    /// # Errors
    /// [`WorkerError::Card`]; [`WorkerError::Fault`].
    pub fn start(
        agent: &Agent,
        layout: Layout,
        regions: &[Region],
        config: WorkerConfig,
    ) -> Result<Self, WorkerError> {
        let card = RankCard::new(agent.advertised().to_owned(), layout.clone(), regions)?;
        let (limits, announce) = (config.limits.clone(), config.announce);
        let inner = Arc::new_cyclic(|me: &Weak<Inner>| Inner {
            me: Weak::clone(me),
            config,
            card: card.encode(),
            memory: Arc::new(Memory::new(layout, regions)),
            agent: agent.clone(),
            rank: OnceLock::new(),
            queue: Arc::default(),
            state: Mutex::default(),
            arrived: Condvar::new(),
            watch: OnceLock::new(),
        });
        let observer: Weak<dyn Observer> = Weak::clone(&inner.me) as _;
        let rank = Rank::observed(agent, &limits, Some(observer))?;
        inner.rank.set(rank).expect("nobody else has it");
        let worker = Self { inner };
        let queue = Arc::clone(&worker.inner.queue);
        // It must not keep alive what it waits for: a device may never come to an end.
        let inner = Arc::downgrade(&worker.inner);
        let serve = move || {
            queue.serve(announce, |with| {
                if let Some(inner) = inner.upgrade() {
                    with(inner.rank());
                }
            });
        };
        kvferry_sys::thread::spawn("kvferry-events".into(), serve).map_err(Fault::Thread)?;
        Ok(worker)
    }

    /// What this rank says of itself: for the scheduler half, by whichever way the engine has.
    pub fn card(&self) -> &[u8] {
        &self.inner.card
    }

    /// A step's orders: before anything is computed or overwritten. When it returns, what is still
    /// read of requests that lost their blocks, or are not held, will be taken for valid by nobody.
    ///
    /// # Errors
    /// [`WorkerError::Orders`]; [`WorkerError::Engine`] for the orders that introduce the engine.
    pub fn obey(&self, orders: &[u8]) -> Result<(), WorkerError> {
        let Orders { engine, restarts, endings, computes, wants, frees, cancels } =
            Orders::decode(orders)?;
        let inner = &self.inner;
        if let Some(engine) = engine {
            inner.know(engine)?;
        }
        let mut state = inner.lock();
        for request in &restarts {
            if let Some((_, produced)) = state.produced.get(request) {
                produced.restart(inner.rank());
            }
        }
        for ending in endings {
            inner.end(&mut state, ending);
        }
        state.step = None;
        state.parts.clear();
        for compute in computes {
            inner.compute(&mut state, compute);
        }
        state.wants.extend(wants);
        state.frees.extend(frees);
        state.cancels.extend(cancels);
        Ok(())
    }

    /// Begins to fetch what the step's orders say. Blocks of those requests are this half's until
    /// they are reported as received.
    pub fn fetch(&self) {
        let inner = &self.inner;
        let mut state = inner.lock();
        let (wants, frees) = (std::mem::take(&mut state.wants), std::mem::take(&mut state.frees));
        let cancels = std::mem::take(&mut state.cancels);
        let wants = wants.into_iter().map(Errand::Want);
        let mut is_busy = false;
        for errand in wants.chain(frees.into_iter().map(Errand::Free)) {
            if let Errand::Want(want) = &errand {
                let before = state.fetches.insert(want.request.clone(), Stage::Pending);
                debug_assert!(before.is_none(), "a request is fetched once");
            }
            let until = now() + errand.budget();
            state.errands.push(Meeting { until, errand });
            is_busy = true;
        }
        for cancel in cancels {
            inner.cancel(&mut state, cancel);
        }
        drop(state);
        if is_busy {
            inner.rank().call();
        }
    }

    /// A layer of the step, counted as in the rank's layout, has been computed once `computed` says
    /// so; `None` if it has been. In the order of the layers.
    pub fn layer_computed(&self, layer: usize, computed: Option<Box<dyn Computed>>) {
        let inner = &self.inner;
        let Announce::Layers { pieces } = inner.config.announce else { return };
        let layers = inner.memory.layout.layers().len();
        let (done, pieces) = (layer + 1, (pieces as usize).clamp(1, layers));
        // The last piece is the step's.
        let ends_piece = done * pieces / layers > layer * pieces / layers;
        if done >= layers || !ends_piece {
            return;
        }
        let Some(parts) = inner.step() else { return };
        inner.queue.run(
            computed,
            Job::Layers(parts, done as u32),
            inner.rank(),
            inner.config.announce,
        );
    }

    /// All layers of the step have been computed once `computed` says so. Once per step.
    pub fn step_computed(&self, computed: Option<Box<dyn Computed>>) {
        let inner = &self.inner;
        let Some(parts) = inner.step() else { return };
        inner.lock().step = None;
        inner.queue.run(computed, Job::Step(parts), inner.rank(), inner.config.announce);
    }

    /// What has ended on this rank since this was asked last.
    pub fn reports(&self) -> Reports {
        let mut state = self.inner.lock();
        let notes = Notes {
            fetched: std::mem::take(&mut state.fetched),
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

    /// Waits until [`Worker::reports`] has something to say; whether it has.
    pub fn wait(&self, timeout: Duration) -> bool {
        let state = self.inner.lock();
        let none = |state: &mut State| !state.has_reports();
        let waited = self.inner.arrived.wait_timeout_while(state, timeout, none);
        waited.unwrap_or_else(PoisonError::into_inner).0.has_reports()
    }

    /// Has somebody told of what happens from now on: the first who asks for it.
    pub fn watch(&self, watch: Arc<dyn Watch>) {
        drop(self.inner.watch.set(watch));
    }

    /// What is kept, by name: all but tombs, and peers that are connected, is zero when nothing is
    /// under way.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        let of_rank = self.inner.rank().gauges();
        let state = self.inner.lock();
        let own = [
            ("paired", state.paired.len()),
            ("errands", state.errands.len() + state.meetings.len()),
            ("fetches", state.fetches.len()),
            ("produced", state.produced.len()),
            ("orders", state.wants.len() + state.frees.len() + state.cancels.len()),
            ("lookups", state.lookups.len()),
            ("reports", state.sent.len() + state.fetched.len() + state.lost.len()),
            ("jobs", self.inner.queue.len()),
        ];
        of_rank.into_iter().chain(own).collect()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.inner.queue.close();
        self.inner.rank().close();
    }
}

impl State {
    fn has_reports(&self) -> bool {
        !(self.sent.is_empty() && self.fetched.is_empty() && self.lost.is_empty())
    }

    /// A producing engine, if it is known and no other life of it is meant.
    fn paired(&mut self, address: &str, engine: Option<EngineId>) -> Option<Arc<Paired>> {
        self.uses += 1;
        let (paired, used) = self.paired.get_mut(address)?;
        if engine.is_some_and(|engine| engine != paired.engine) {
            return None;
        }
        *used = self.uses;
        Some(Arc::clone(paired))
    }

    fn remember(&mut self, address: String, paired: &Arc<Paired>) {
        self.uses += 1;
        self.paired.insert(address, (Arc::clone(paired), self.uses));
        if self.paired.len() > PAIRED_MAX {
            let oldest = self.paired.iter().min_by_key(|(_, (_, used))| *used);
            let oldest = oldest.map(|(address, _)| address.clone()).expect("more than none");
            self.paired.remove(&oldest);
        }
    }
}

/// As a producer.
impl Inner {
    /// The step's part that is computed here, if there is one.
    fn step(&self) -> Option<Arc<[Part]>> {
        let mut state = self.lock();
        if state.step.is_none() && !state.parts.is_empty() {
            state.step = Some(std::mem::take(&mut state.parts).into());
        }
        state.step.clone()
    }

    fn compute(&self, state: &mut State, compute: Compute) {
        let Compute { request, offer, until, blocks } = compute;
        if let Some(offer) = &offer
            && !state.produced.contains_key(&request)
        {
            let transfer = offer.transfer.clone();
            let produced = Arc::new(Produced::new(transfer.clone()));
            state.produced_as.insert(transfer.clone(), request.clone());
            state.produced.insert(request.clone(), (transfer, produced));
        }
        let Some((_, produced)) = state.produced.get(&request) else { return };
        match produced.compute(self.rank(), offer, until, blocks) {
            Ok(part) => state.parts.extend(part),
            Err(error) => {
                tracing::warn!(request, %error, "a request's KV can't be offered");
                let code = match &error {
                    Fault::Refused(refusal) => refusal.code(),
                    _ => WireCode::Internal,
                };
                let detail = error.to_string();
                self.lost(state, request, code, detail);
            }
        }
    }

    fn end(&self, state: &mut State, ending: Ending) {
        let Ending { request, transfer, how } = ending;
        let known = state.produced.get(&request).map(|(_, produced)| Arc::clone(produced));
        match (how, known) {
            (How::Withdrawn { code, detail }, known) => {
                let produced = known.unwrap_or_else(|| Arc::new(Produced::new(transfer.clone())));
                produced.withdraw(self.rank(), code, &detail);
                self.forget(state, &request);
            }
            (How::Held { side_data }, Some(produced)) => {
                let job = Job::Finish(Arc::clone(&produced), side_data);
                self.queue.run(None, job, self.rank(), self.config.announce);
                if produced.hold(self.rank()) {
                    self.sent(state, request);
                }
            }
            // The scheduler half has not heard yet that it was never offered here.
            (How::Held { .. }, None) => self.sent(state, request),
        }
    }

    fn sent(&self, state: &mut State, request: String) {
        self.forget(state, &request);
        self.tell(|watch| watch.sent(&request));
        state.sent.push(request);
        self.arrived.notify_all();
    }

    /// What is offered cannot be handed over any more.
    fn lost(&self, state: &mut State, request: String, code: WireCode, detail: String) {
        self.tell(|watch| watch.sent(&request));
        state.lost.push(Fetched { request, code, detail, side_data: Vec::new() });
        self.arrived.notify_all();
    }

    fn forget(&self, state: &mut State, request: &str) {
        if let Some((transfer, _)) = state.produced.remove(request) {
            state.produced_as.remove(&transfer);
        }
    }

    /// What was offered is not read any more.
    fn produced(&self, id: &HandoffId, outcome: Outcome) {
        let mut state = self.lock();
        let Some(request) = state.produced_as.get(id).cloned() else { return };
        let Some((_, produced)) = state.produced.get(&request) else { return };
        let is_done = outcome.is_done();
        let (code, detail) = (outcome.code, outcome.detail.clone());
        if produced.ended(outcome) {
            self.sent(&mut state, request);
        } else if !is_done {
            self.lost(&mut state, request, code, detail);
        }
    }
}

/// As a consumer.
impl Inner {
    /// Does an errand at a producing engine, or meets that first. On the rank's thread.
    fn pursue(&self, state: &mut State, meeting: Meeting) {
        let address = meeting.errand.address();
        let paired = state.paired(address, meeting.errand.engine());
        let needed = match &paired {
            Some(paired) => paired.sources().into_iter().map(|source| source.address).collect(),
            None => vec![address.to_owned()],
        };
        let unknown = |address: &String| {
            address.parse::<SocketAddr>().is_err() && !state.looked_up.contains(address)
        };
        let unknown: Vec<_> = needed.into_iter().filter(unknown).collect();
        if !unknown.is_empty() {
            return self.look_up(state, meeting, unknown);
        }
        if let Some(paired) = paired {
            return self.run_errand(state, meeting, &paired);
        }
        state.tickets += 1;
        let ticket = state.tickets;
        let left = meeting.until.saturating_since(now());
        let met = self.rank().meet(ticket, address, left);
        match met {
            Ok(()) => drop(state.meetings.insert(ticket, meeting)),
            Err(error) => self.fail_errand(state, meeting.errand, &failure_of(&error)),
        }
    }

    /// Has names looked up on a thread of its own, then goes on.
    fn look_up(&self, state: &mut State, meeting: Meeting, names: Vec<String>) {
        let key = meeting.errand.address().to_owned();
        if state.lookups.len() >= LOOKUPS_MAX && !state.lookups.contains_key(&key) {
            let detail = format!("{LOOKUPS_MAX} addresses are being looked up");
            let failure = Failure { code: WireCode::Busy, detail, addresses: Vec::new() };
            return self.fail_errand(state, meeting.errand, &failure);
        }
        let until = meeting.until;
        let waiting = state.lookups.entry(key.clone()).or_default();
        waiting.push(meeting);
        if waiting.len() > 1 {
            return;
        }
        let missed = key.clone();
        let (agent, me) = (self.agent.clone(), Weak::clone(&self.me));
        let thread = kvferry_sys::thread::spawn("kvferry-lookup".into(), move || {
            let found = names.iter().try_for_each(|name| {
                if now() >= until {
                    let detail = format!("looking up {name} took too long");
                    let (code, addresses) = (WireCode::Deadline, Vec::new());
                    return Err(Failure { code, detail, addresses });
                }
                agent.peer(name).map(drop).map_err(|e| failure_of(&Fault::Agent(e)))
            });
            let Some(inner) = me.upgrade() else { return };
            inner.looked_up(&key, names, found);
        });
        if let Err(error) = thread {
            let failure = failure_of(&Fault::Thread(error));
            for meeting in state.lookups.remove(&missed).unwrap_or_default() {
                self.fail_errand(state, meeting.errand, &failure);
            }
        }
    }

    fn looked_up(&self, key: &str, names: Vec<String>, found: Result<(), Failure>) {
        let mut state = self.lock();
        let waiting = state.lookups.remove(key).unwrap_or_default();
        match found {
            Ok(()) => {
                if state.looked_up.len() > PAIRED_MAX {
                    state.looked_up.clear();
                }
                state.looked_up.extend(names);
                state.errands.extend(waiting);
                drop(state);
                self.rank().call();
            }
            Err(failure) => {
                for meeting in waiting {
                    self.fail_errand(&mut state, meeting.errand, &failure);
                }
            }
        }
    }

    fn run_errand(&self, state: &mut State, meeting: Meeting, paired: &Arc<Paired>) {
        let sources = paired.sources();
        match meeting.errand {
            Errand::Free(free) => {
                if let Err(error) = self.rank().free(&free.transfer, &sources, free.code, "") {
                    tracing::debug!(transfer = %free.transfer, %error, "it can't be freed");
                }
            }
            Errand::Want(want) => {
                let budget = meeting.until.saturating_since(now());
                let (start, end) = want.tokens;
                let fetch = Fetch {
                    memory: Arc::clone(&self.memory),
                    paired: Arc::clone(paired),
                    tokens: start.into()..end.into(),
                    blocks: want.blocks,
                };
                match self.rank().want(&want.transfer, &sources, budget, Box::new(fetch)) {
                    Ok(()) => {
                        let stage = Stage::Wanted(want.transfer.clone());
                        state.fetches.insert(want.request.clone(), stage);
                        state.fetched_for.insert(want.transfer, (want.request, want.address));
                    }
                    Err(error) => {
                        let failure = failure_of(&error);
                        let known = Refusal::InUse.code();
                        if failure.code != known {
                            // Its sources need not wait for what will not come.
                            let (id, why) = (&want.transfer, failure.detail.as_str());
                            drop(self.rank().free(id, &sources, failure.code, why));
                        }
                        self.fetched(state, want.request, &failure, Vec::new());
                    }
                }
            }
        }
    }

    fn fail_errand(&self, state: &mut State, errand: Errand, failure: &Failure) {
        match errand {
            Errand::Free(free) => {
                // The producer's offer ends by its timer.
                tracing::debug!(transfer = %free.transfer, code = %failure.code, "it can't be freed");
            }
            Errand::Want(want) => {
                tracing::warn!(
                    request = want.request, producer = want.address, code = %failure.code,
                    detail = failure.detail, "KV can't be fetched"
                );
                let ranks = state.ranks.unwrap_or(1);
                // Names are not looked up for this: whoever is known by one frees by his timer.
                state.looked_up.remove(&want.address);
                let mut told = to_be_told(&failure.addresses, self.config.rank, ranks);
                told.retain(|source| source.address.parse::<SocketAddr>().is_ok());
                let (id, code) = (&want.transfer, failure.code);
                if !told.is_empty()
                    && let Err(error) = self.rank().free(id, &told, code, &failure.detail)
                {
                    tracing::debug!(transfer = %id, %error, "the producer can't be told");
                }
                let detail = format!("{} (producer {})", failure.detail, want.address);
                let failure = Failure { code, detail, addresses: Vec::new() };
                self.fetched(state, want.request, &failure, Vec::new());
            }
        }
    }

    /// A fetch has ended on this rank.
    fn fetched(&self, state: &mut State, request: String, how: &Failure, side_data: SideData) {
        state.fetches.remove(&request);
        let side_data = bounded(side_data.into_iter().map(|(_, data)| data.into())).collect();
        let (code, detail) = (how.code, how.detail.clone());
        self.tell(|watch| watch.received(&request, code, &detail));
        state.fetched.push(Fetched { request, code, detail, side_data });
        self.arrived.notify_all();
    }

    fn cancel(&self, state: &mut State, cancel: Cancel) {
        let Cancel { request, code, detail } = cancel;
        match state.fetches.get(&request) {
            None => {}
            Some(Stage::Wanted(id)) => {
                // If it has ended just now, that is said.
                drop(self.rank().cancel(id, code, &detail));
            }
            Some(Stage::Pending) => {
                let looked_up = state.lookups.values_mut().flatten();
                let all = state.errands.iter_mut().chain(state.meetings.values_mut());
                for meeting in all.chain(looked_up) {
                    meeting.errand.give_up(&request, code);
                }
                let failure = Failure { code, detail, addresses: Vec::new() };
                self.fetched(state, request, &failure, Vec::new());
            }
        }
    }

    fn consumed(&self, id: &HandoffId, outcome: &Outcome, side_data: SideData) {
        let mut state = self.lock();
        let Some((request, address)) = state.fetched_for.remove(id) else { return };
        let (code, detail) = (outcome.code, outcome.detail.clone());
        if !matches!(code, WireCode::Ok | WireCode::Cancelled | WireCode::NotNeeded) {
            tracing::warn!(request, producer = address, %code, detail, "KV can't be fetched");
        }
        if matches!(code, WireCode::StaleIncarnation | WireCode::UnknownRegion) {
            // One of its ranks is not what its engine said.
            state.paired.remove(&address);
        }
        self.fetched(
            &mut state,
            request,
            &Failure { code, detail, addresses: Vec::new() },
            side_data,
        );
    }
}

impl Inner {
    fn tell(&self, what: impl FnOnce(&dyn Watch)) {
        if let Some(watch) = self.watch.get() {
            what(&**watch);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rank(&self) -> &Rank {
        self.rank.get().expect("set before anybody has the worker half")
    }

    /// Introduces this rank's own engine to it.
    fn know(&self, engine: EngineCard) -> Result<(), WorkerError> {
        let (cards, topology) = engine.read()?;
        let rank = self.config.rank;
        if engine.ranks.get(rank).is_none_or(|card| **card != self.card) {
            return Err(WorkerError::Misuse(
                "this rank is not the one of that number in its engine",
            ));
        }
        self.lock().ranks = Some(cards.len());
        let own = OwnEngine {
            id: engine.id,
            rank,
            topology: Arc::new(topology),
            addresses: cards.into_iter().map(|card| card.address).collect(),
            cards: engine.ranks.into_iter().map(serde_bytes::ByteBuf::into_vec).collect(),
        };
        Ok(self.rank().know(own)?)
    }
}

impl Observer for Inner {
    fn ended(&self, event: Event) {
        match event {
            Event::Produced { id, outcome } => self.produced(&id, outcome),
            Event::Consumed { id, outcome, side_data } => self.consumed(&id, &outcome, side_data),
        }
    }

    fn met(&self, ticket: u64, result: Result<Arc<Pairing>, Failure>) {
        let Some((address, engine)) = self
            .lock()
            .meetings
            .get(&ticket)
            .map(|meeting| (meeting.errand.address().to_owned(), meeting.errand.engine()))
        else {
            return;
        };
        // Others may have waited for the same engine.
        let known = self.lock().paired(&address, None);
        let paired = result.and_then(|pairing| match known {
            Some(known) if known.engine == pairing.engine => Ok(known),
            _ => self.pair(&pairing),
        });
        let mut state = self.lock();
        let Some(meeting) = state.meetings.remove(&ticket) else { return };
        match paired {
            Ok(paired) => {
                state.remember(address, &paired);
                if engine.is_some_and(|engine| engine != paired.engine) {
                    let detail = "the producing engine was restarted".to_owned();
                    let code = WireCode::StaleIncarnation;
                    let failure = Failure { code, detail, addresses: Vec::new() };
                    self.fail_errand(&mut state, meeting.errand, &failure);
                } else {
                    self.pursue(&mut state, meeting);
                }
            }
            Err(failure) => self.fail_errand(&mut state, meeting.errand, &failure),
        }
    }

    fn called(&self) {
        let mut state = self.lock();
        for meeting in std::mem::take(&mut state.errands) {
            self.pursue(&mut state, meeting);
        }
    }

    fn lost(&self, incarnation: Incarnation) {
        self.lock().paired.retain(|_, (paired, _)| !paired.is_with(incarnation));
    }

    fn read(&self, id: &HandoffId, part: ReadPart) {
        self.tell(|watch| {
            if let Some((request, _)) = self.lock().fetched_for.get(id) {
                watch.read(request, part);
            }
        });
    }
}

impl Inner {
    fn pair(&self, pairing: &Pairing) -> Result<Arc<Paired>, Failure> {
        let pair = || Paired::new(&self.memory, self.config.rank, pairing);
        let paired = catch_unwind(AssertUnwindSafe(pair))
            .unwrap_or_else(|_| Err((WireCode::Internal, "pairing panicked".to_owned())));
        paired.map(Arc::new).map_err(|(code, detail)| {
            let addresses = pairing.addresses.clone();
            Failure { code, detail, addresses }
        })
    }
}

impl Errand {
    /// If it is to fetch this request's KV, its producer is only told that it is not needed.
    fn give_up(&mut self, request: &str, code: WireCode) {
        if let Self::Want(want) = self
            && want.request == request
        {
            *self = Self::Free(Free {
                transfer: want.transfer.clone(),
                address: want.address.clone(),
                engine: want.engine,
                code,
                budget_ms: want.budget_ms,
            });
        }
    }

    const fn engine(&self) -> Option<EngineId> {
        match self {
            Self::Want(want) => want.engine,
            Self::Free(free) => free.engine,
        }
    }

    const fn budget(&self) -> Duration {
        Duration::from_millis(match self {
            Self::Want(want) => want.budget_ms as u64,
            Self::Free(free) => free.budget_ms as u64,
        })
    }

    fn address(&self) -> &str {
        match self {
            Self::Want(want) => &want.address,
            Self::Free(free) => &free.address,
        }
    }
}

/// The clock that goes on while the machine sleeps, as everywhere in the protocol.
fn now() -> Timestamp {
    Timestamp::from_nanos(kvferry_sys::clock::boottime_ns())
}

fn failure_of(error: &Fault) -> Failure {
    let code = match error {
        Fault::Refused(refusal) => refusal.code(),
        Fault::Agent(error) => crate::codes::code_of(error.kind()),
        Fault::Forked => WireCode::Shutdown,
        Fault::Thread(_) => WireCode::Internal,
    };
    Failure { code, detail: error.to_string(), addresses: Vec::new() }
}
