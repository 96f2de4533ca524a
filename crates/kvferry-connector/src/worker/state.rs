//! The inside of a worker half, and what is behind its lock.

use super::engines::Engines;
use super::events::{EventQueue, Job};
use super::names::{LookUp, Names};
use super::pieces::Pieces;
use super::producer_engine::Memory;
use super::request::{Part, ProducedRequest};
use super::types::{ComputeEvent, WorkerConfig, WorkerObserver};
use crate::metadata::{Cancel, Claim, FetchRequest, Free, RequestOutcome};
use crate::rank::Rank;
use crate::sync::lock;
use kvferry_proto::Timestamp;
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{HandoffId, Limits};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

pub(super) struct Inner {
    pub(super) me: Weak<Inner>,
    pub(super) config: WorkerConfig,
    pub(super) metadata: Vec<u8>,
    pub(super) memory: Arc<Memory>,
    pub(super) look_up: LookUp,
    pub(super) rank: OnceLock<Rank>,
    pub(super) queue: Arc<EventQueue>,
    pub(super) state: Mutex<State>,
    pub(super) arrived: Condvar,
    pub(super) observer: OnceLock<Arc<dyn WorkerObserver>>,
}

#[derive(Default)]
pub(super) struct State {
    /// How many ranks this rank's engine has, once that is known.
    pub(super) ranks: Option<usize>,
    pub(super) engines: Engines,
    pub(super) names: Names,
    /// Actions that wait for an engine handshake, by its ticket.
    pub(super) learning: FxHashMap<u64, PendingAction>,
    pub(super) tickets: u64,
    pub(super) fetches: FxHashMap<String, Stage>,
    /// The request of each handoff that is being fetched, and the producing engine's address.
    pub(super) fetched_for: FxHashMap<HandoffId, (String, String)>,
    pub(super) produced: FxHashMap<String, (HandoffId, Arc<ProducedRequest>)>,
    pub(super) produced_as: FxHashMap<HandoffId, String>,
    /// What [`super::Worker::apply`] was given for the next [`super::Worker::fetch`].
    pub(super) requested: Vec<Action>,
    pub(super) cancels: Vec<Cancel>,
    /// What is done when the rank calls its observer next, in this order.
    pub(super) pending: Vec<PendingAction>,
    /// What the current step computes: `parts` until the engine reports its first layer.
    pub(super) parts: Vec<Part>,
    pub(super) step: Option<Arc<[Part]>>,
    /// How the parts of the current step are announced, each way once.
    pub(super) pieces: Vec<Pieces>,
    /// Layers of the current step with which a piece has ended.
    pub(super) announced: u32,
    pub(super) sent: Vec<String>,
    pub(super) fetched: Vec<RequestOutcome>,
    pub(super) lost: Vec<RequestOutcome>,
    pub(super) closed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The producing engine is being learned.
    Pending,
    /// The rank fetches it as this handoff.
    Fetching(HandoffId),
}

/// An action that waits for what it needs to know.
pub(super) struct PendingAction {
    pub(super) deadline: Timestamp,
    pub(super) action: Action,
}

pub(super) enum Action {
    Claim(Claim),
    Fetch(FetchRequest),
    Free(Free),
}

impl Inner {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

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

    /// Has the names of a producing engine looked up again when they are needed next.
    pub(super) fn forget_names(&mut self, address: &str) {
        self.names.forget(address);
        for source in self.engines.addresses(address) {
            self.names.forget(&source);
        }
    }
}

impl Action {
    /// Turns the fetch of a request into a free: its producer is only told that it is not needed.
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

    pub(super) fn address(&self) -> &str {
        match self {
            Self::Claim(claim) => &claim.address,
            Self::Fetch(fetch) => &fetch.address,
            Self::Free(free) => &free.address,
        }
    }

    /// Replaces the address of a bootstrap server by an engine behind it and an agent of that engine.
    pub(super) fn set_engine(&mut self, (id, agent): (EngineId, String)) {
        let (engine, address) = match self {
            Self::Claim(claim) => (&mut claim.engine, &mut claim.address),
            Self::Fetch(fetch) => (&mut fetch.engine, &mut fetch.address),
            Self::Free(free) => (&mut free.engine, &mut free.address),
        };
        (*engine, *address) = (Some(id), agent);
    }
}
