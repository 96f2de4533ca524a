//! The worker half: one per rank, in the process whose memory the rank's KV lies in.

use crate::card::CardError;
use crate::orders::OrdersError;
use crate::rank::Fault;
use kvferry::{Agent, Region};
use kvferry_proto::handoff::Limits;
use kvferry_proto::layout::Layout;
use std::time::Duration;
use thiserror::Error;

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
    Engine(#[from] crate::scheduler::EngineError),
    /// It was called in another order than it can be.
    #[error("{0}")]
    Misuse(&'static str),
}

/// The worker half. All calls may be made from any thread; they return at once.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
}

#[allow(unused_variables, clippy::todo, reason = "the interface, while it is being built")]
impl Worker {
    /// The worker half of a rank whose KV lies in `regions` of `agent`'s, as `layout` says.
    ///
    /// # Errors
    /// [`WorkerError::Card`]; [`WorkerError::Fault`].
    pub fn start(
        agent: &Agent,
        layout: Layout,
        regions: &[Region],
        config: WorkerConfig,
    ) -> Result<Self, WorkerError> {
        todo!()
    }

    /// What this rank says of itself: for the scheduler half, by whichever way the engine has.
    pub fn card(&self) -> &[u8] {
        todo!()
    }

    /// A step's orders: before anything is computed or overwritten. When it returns, nothing reads
    /// blocks of requests that lost them or are not held, in the sense that what is read of them
    /// will not be taken for valid.
    ///
    /// # Errors
    /// [`WorkerError::Orders`]; [`WorkerError::Engine`] for the orders that introduce the engine.
    pub fn obey(&self, orders: &[u8]) -> Result<(), WorkerError> {
        todo!()
    }

    /// Begins to fetch what the step's orders say. Blocks of those requests are this half's until
    /// they are reported as received.
    pub fn fetch(&self) {
        todo!()
    }

    /// A layer of the step, counted as in the rank's layout, has been computed once `computed` says
    /// so; `None` if it has been. In the order of the layers.
    pub fn layer_computed(&self, layer: usize, computed: Option<Box<dyn Computed>>) {
        todo!()
    }

    /// All layers of the step have been computed once `computed` says so. Once per step.
    pub fn step_computed(&self, computed: Option<Box<dyn Computed>>) {
        todo!()
    }

    /// What has ended on this rank since this was asked last.
    pub fn reports(&self) -> Reports {
        todo!()
    }

    /// Waits until [`Worker::reports`] has something to say; whether it has.
    pub fn wait(&self, timeout: Duration) -> bool {
        todo!()
    }

    /// What is kept, by name: all but tombs, and peers that are connected, is zero when nothing is
    /// under way.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        todo!()
    }
}
