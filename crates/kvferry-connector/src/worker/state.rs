//! The inside of a worker half, and what is behind its lock.

use super::engines::Engines;
use super::events::{EventQueue, Job};
use super::names::{LookUp, Names};
use super::pieces::Pieces;
use super::producer_engine::{Memory, ProducerEngine};
use super::request::{Part, ProducedRequest};
use super::types::{ComputeEvent, WorkerConfig, WorkerObserver};
use super::unplanned::Unplanned;
use crate::address::{AgentAddress, ProducerAddress};
use crate::metadata::{Cancel, Claim, FetchRequest, Free, RequestOutcome};
use crate::producers::Producers;
use crate::rank::Rank;
use kvferry::After;
use kvferry_proto::Timestamp;
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::{EngineId, Failure};
use kvferry_proto::handoff::{HandoffId, Limits};
use kvferry_sys::sync::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// How often the engine at an address is learned anew for one action.
const RESTARTS_MAX: u32 = 3;

/// Interval in which failed fetches with one code are logged once.
const FAILURE_LOG: Duration = Duration::from_secs(10);

pub(super) struct Inner {
    pub(super) me: Weak<Inner>,
    pub(super) config: WorkerConfig,
    pub(super) metadata: Vec<u8>,
    pub(super) memory: Arc<Memory>,
    pub(super) look_up: LookUp,
    pub(super) producers: Producers,
    pub(super) rank: OnceLock<Rank>,
    pub(super) queue: Arc<EventQueue>,
    pub(super) state: Mutex<State>,
    pub(super) arrived: Condvar,
    pub(super) observer: OnceLock<Arc<dyn WorkerObserver>>,
}

#[derive(Default)]
pub(super) struct State {
    /// Number of ranks of this rank's engine, once it is known.
    pub(super) ranks: Option<usize>,
    pub(super) engines: Engines,
    pub(super) names: Names,
    /// Actions that wait for an engine handshake, then for the plan of the copies, by the ticket of the handshake.
    pub(super) learning: FxHashMap<u64, PendingAction>,
    pub(super) unplanned: Unplanned,
    /// A thread plans the copies from engines, one after the other, until none waits.
    pub(super) is_planning: bool,
    pub(super) tickets: u64,
    pub(super) fetches: FxHashMap<String, Stage>,
    pub(super) fetched_for: FxHashMap<HandoffId, FetchedFor>,
    /// The requests of claims and fetches whose producers have not answered. A claim that fails stays until
    /// its request is fetched or freed.
    pub(super) unanswered: FxHashMap<HandoffId, String>,
    /// The requests whose producers have answered since the last report, and which are not fetched yet.
    pub(super) answered: FxHashMap<HandoffId, String>,
    pub(super) produced: FxHashMap<String, (HandoffId, Arc<ProducedRequest>)>,
    pub(super) produced_as: FxHashMap<HandoffId, String>,
    /// Actions that [`super::Worker::apply`] received for the next [`super::Worker::fetch`], with the work
    /// that their reads come after, or the error of `after`.
    pub(super) requested: Vec<(Action, Result<After, String>)>,
    pub(super) cancels: Vec<Cancel>,
    /// Actions that are done when the rank calls its observer next, in this order.
    pub(super) pending: Vec<PendingAction>,
    /// Parts that the current step computes: `parts` until the engine reports its first layer, then `step`.
    pub(super) parts: Vec<Part>,
    pub(super) step: Option<Arc<[Part]>>,
    /// The ways in which the parts of the current step are announced, without duplicates.
    pub(super) pieces: Vec<Pieces>,
    /// Layers of the current step with which a piece has ended.
    pub(super) announced: u32,
    pub(super) sent: Vec<String>,
    pub(super) fetched: Vec<RequestOutcome>,
    pub(super) lost: Vec<RequestOutcome>,
    pub(super) closed: bool,
    /// Logging of failures by the number of their code: the time until which they are not logged, and how many were
    /// not.
    failures_logged: FxHashMap<u16, (Timestamp, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The producing engine is being learned.
    Pending,
    /// The rank fetches it as this handoff.
    Fetching(HandoffId),
}

/// The request that a handoff is fetched for, with the source of its producer's address.
pub(super) struct FetchedFor {
    pub(super) request: String,
    /// The producing engine's address.
    pub(super) address: ProducerAddress,
    /// The bootstrap server that named the engine.
    pub(super) bootstrap: Option<ProducerAddress>,
    /// The reason why the scheduler half has cancelled it. It may have succeeded by then.
    pub(super) cancelled: Option<Failure>,
    /// The fetch, to run at the engine that is at the address if the known one was restarted since. `None` once a
    /// producer has answered, and for a request that names the engine's incarnation.
    pub(super) again: Option<PendingAction>,
}

/// An action that waits for what it needs to know.
#[derive(Clone)]
pub(super) struct PendingAction {
    pub(super) deadline: Timestamp,
    pub(super) action: Action,
    /// The bootstrap server that named the engine, and the id that it was asked for.
    pub(super) bootstrap: Option<(ProducerAddress, Option<EngineId>)>,
    /// How often the engine that was known at the address turned out to be restarted since, or was lost before it was known.
    pub(super) restarts: u32,
    /// The work that the reads of a fetch come after.
    pub(super) after: After,
}

#[derive(Clone)]
pub(super) enum Action {
    Claim(Claim),
    Fetch(FetchRequest),
    Free(Free),
}

impl Inner {
    pub(super) fn rank(&self) -> &Rank {
        self.rank.get().expect("set before the worker half is returned")
    }

    pub(super) fn observe(&self, what: impl FnOnce(&dyn WorkerObserver)) {
        if let Some(observer) = self.observer.get() {
            what(&**observer);
        }
    }

    /// Runs a job after all earlier ones and once `computed` has happened.
    pub(super) fn run_job(&self, computed: Option<Box<dyn ComputeEvent>>, job: Job) {
        self.queue.run(computed, job, self.rank(), self.config.announce);
    }
}

impl State {
    pub(super) fn has_reports(&self) -> bool {
        !(self.sent.is_empty() && self.fetched.is_empty() && self.lost.is_empty())
    }

    /// The request's producer is asked, and has not answered.
    pub(super) fn wait_for_answer(&mut self, request: String, transfer: HandoffId) {
        self.unanswered.insert(transfer, request);
    }

    /// Records that a producer of the handoff has answered. The next report has its request, unless it reports the end
    /// of its fetch.
    pub(super) fn answered_by_producer(&mut self, transfer: &HandoffId) {
        if let Some(fetched) = self.fetched_for.get_mut(transfer) {
            fetched.again = None;
        }
        self.answered.extend(self.unanswered.remove_entry(transfer));
    }

    /// Forgets the answer to a handoff that was freed, or whose fetch has ended: the next report has only its end.
    /// Other handoffs of a request with this id are not affected.
    pub(super) fn forget_answer(&mut self, transfer: &HandoffId) {
        self.unanswered.remove(transfer);
        self.answered.remove(transfer);
    }

    /// Does what [`State::forget_answer`] does, for a request that was claimed at most.
    pub(super) fn forget_claim(&mut self, request: &str) {
        self.unanswered.retain(|_, of| of != request);
        self.answered.retain(|_, of| of != request);
    }

    /// Logs why a fetch failed: once for all that fail alike within [`FAILURE_LOG`], since a peer's death
    /// or a client can fail any number.
    pub(super) fn log_failure(
        &mut self,
        request: &str,
        producer: &str,
        code: WireCode,
        detail: &str,
    ) {
        let now = crate::clock::now();
        let (until, left_out) = self
            .failures_logged
            .entry(match code {
                WireCode::Other(_) => u16::MAX,
                code => code.to_u16(),
            })
            .or_default();
        if *until > now {
            *left_out += 1;
            tracing::debug!(request, producer, %code, detail, "KV can't be fetched");
            return;
        }
        *until = now + FAILURE_LOG;
        let more = std::mem::take(left_out);
        tracing::warn!(request, producer, %code, detail, more, "KV can't be fetched");
    }

    /// Keeps the engine that is being planned, unless it was lost since. Returns the engines that have gone for it.
    pub(super) fn keep_planned(
        &mut self,
        engine: &Arc<ProducerEngine>,
    ) -> Vec<Arc<ProducerEngine>> {
        let Some(((address, host), learned)) = self.unplanned.planned_as() else {
            return Vec::new();
        };
        self.engines.insert(address, host, engine, learned)
    }

    /// Has the names of a producing engine looked up again when they are needed next.
    pub(super) fn doubt_names(&mut self, address: &str) {
        self.names.doubt(address);
        for source in self.engines.addresses(address) {
            self.names.doubt(&source);
        }
    }

    /// Does what [`State::doubt_names`] does, after a failure by which the engine may have moved. A cancelled request,
    /// which costs a client nothing, is none: each would have the names of a producer that works looked up again. For
    /// the same reason a request that means another engine than the one that is found is not passed on to here.
    pub(super) fn doubt_names_after(&mut self, code: WireCode, address: &str) {
        let may_have_moved = match code {
            WireCode::Closed
            | WireCode::Silent
            | WireCode::Shutdown
            | WireCode::StaleIncarnation
            | WireCode::UnknownRegion
            // Something else may listen at its old address.
            | WireCode::Malformed
            | WireCode::VersionMismatch
            | WireCode::AuthRequired
            | WireCode::AuthUnsupported
            | WireCode::AuthFailed => true,
            _ => false,
        };
        if may_have_moved {
            self.doubt_names(address);
        }
    }
}

impl PendingAction {
    pub(super) fn new(action: Action, deadline: Timestamp) -> Self {
        Self { deadline, action, bootstrap: None, restarts: 0, after: After::default() }
    }

    /// This action as it was before its engine was found, which turned out to be restarted since. `None` if the action
    /// names the incarnation that is gone, or was begun anew too often.
    pub(super) fn again(&self) -> Option<Self> {
        let asked = self.bootstrap.as_ref().map_or(self.action.engine(), |(_, asked)| *asked);
        let means_it = asked.is_some() && asked == self.action.engine();
        if means_it || !self.may_learn_again() {
            return None;
        }
        let mut again = Self { restarts: self.restarts + 1, ..self.clone() };
        if let Some((url, asked)) = again.bootstrap.take() {
            again.action.set_place(asked, url);
        }
        Some(again)
    }

    /// True if its engine may be learned anew.
    pub(super) const fn may_learn_again(&self) -> bool {
        self.restarts < RESTARTS_MAX
    }

    /// Replaces the address of a bootstrap server by an engine behind it and an agent of that engine.
    pub(super) fn set_engine(&mut self, (id, agent): (EngineId, AgentAddress)) {
        let asked = self.action.engine();
        let url = self.action.set_place(Some(id), agent.into());
        self.bootstrap = Some((url, asked));
    }
}

impl Action {
    /// Replaces the engine and its address. Returns the address before.
    fn set_place(&mut self, id: Option<EngineId>, to: ProducerAddress) -> ProducerAddress {
        let (engine, address) = match self {
            Self::Claim(claim) => (&mut claim.engine, &mut claim.address),
            Self::Fetch(fetch) => (&mut fetch.engine, &mut fetch.address),
            Self::Free(free) => (&mut free.engine, &mut free.address),
        };
        *engine = id;
        std::mem::replace(address, to)
    }

    /// Replaces the fetch of a request by a free, which tells the producer that it is not needed.
    pub(super) fn give_up(&mut self, request: &str, code: WireCode) {
        if let Self::Fetch(fetch) = self
            && fetch.request == request
        {
            *self = Self::Free(Free {
                transfer: fetch.transfer.clone(),
                address: fetch.address.clone(),
                engine: fetch.engine,
                code,
                budget_ms: fetch.budget_ms,
            });
        }
    }

    pub(super) const fn engine(&self) -> Option<EngineId> {
        match self {
            Self::Claim(claim) => claim.engine,
            Self::Fetch(fetch) => fetch.engine,
            Self::Free(free) => free.engine,
        }
    }

    pub(super) const fn budget(&self, limits: &Limits) -> Duration {
        Duration::from_millis(match self {
            // Its engine must be found in this time; from then on the claim has its own.
            Self::Claim(_) => return limits.rendezvous,
            Self::Fetch(fetch) => fetch.budget_ms as u64,
            Self::Free(free) => free.budget_ms as u64,
        })
    }

    pub(super) const fn address(&self) -> &ProducerAddress {
        match self {
            Self::Claim(claim) => &claim.address,
            Self::Fetch(fetch) => &fetch.address,
            Self::Free(free) => &free.address,
        }
    }
}
