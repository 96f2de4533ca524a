//! An engine whose blocks kvferry's block manager decides on, with offloading to host memory and to directories.
//!
//! The manager's primary pool are the engine's blocks; its copies are made by [`kvferry_offload::Driver`], on threads of
//! its own. All groups have the same number of tokens in a block, and no group keeps a state.
//!
//! ```
//! use kvferry_offload::Options;
//! use kvferry_refengine::offload::Offload;
//! use kvferry_refengine::{Engine, EngineConfig, GroupSpec, ModelSpec, Request};
//!
//! let agent = kvferry::Agent::builder().name("engine").start()?;
//! let model = ModelSpec::new(vec![GroupSpec::full(2, 8)], 4);
//! let offload = Offload::new(&agent, 256);
//! let mut engine = Engine::with_offload(EngineConfig::new(model), offload)?;
//! engine.submit(Request::new("a", vec![1, 2, 3], 5))?;
//! while engine.has_work() {
//!     engine.step()?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod managed;
mod pages;

pub(crate) use managed::{Managed, ManagedRequest};
pub use pages::EnginePages;

use kvferry::Agent;
use kvferry_offload::Options;
use kvferry_store::Namespace;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use thiserror::Error;

/// Settings for an engine that offloads.
#[derive(Clone, Debug)]
pub struct Offload {
    pub(crate) agent: Agent,
    pub(crate) secondary_blocks: u32,
    pub(crate) options: Options,
    pub(crate) clock: Clock,
}

impl Offload {
    /// Pages and secondary blocks are memory of `agent`. `secondary_blocks` are those of each group.
    pub fn new(agent: &Agent, secondary_blocks: u32) -> Self {
        Self {
            agent: agent.clone(),
            secondary_blocks,
            options: Options::new(Namespace::new("kvferry-refengine")),
            clock: Clock::default(),
        }
    }

    /// Sets the options of the driver.
    #[must_use]
    pub fn options(self, options: Options) -> Self {
        Self { options, ..self }
    }

    /// Sets the clock by which retentions end.
    #[must_use]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }
}

/// Milliseconds for the block manager.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    System(Instant),
    Manual(Arc<AtomicU64>),
}

impl Default for Clock {
    fn default() -> Self {
        Self(Source::System(Instant::now()))
    }
}

impl Clock {
    /// A clock that shows what the caller stores: for tests.
    pub fn manual(now_ms: Arc<AtomicU64>) -> Self {
        Self(Source::Manual(now_ms))
    }

    pub(crate) fn now_ms(&self) -> u64 {
        match &self.0 {
            Source::System(began) => u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
            Source::Manual(now_ms) => now_ms.load(Ordering::Relaxed),
        }
    }
}

/// An engine that can't offload as asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// The engine's settings.
    #[error(transparent)]
    Config(#[from] crate::ConfigError),
    /// The engine's settings need something that the block manager does not support.
    #[error("the block manager does not support {what}")]
    Unsupported {
        /// The unsupported setting.
        what: &'static str,
    },
    /// The block manager.
    #[error(transparent)]
    Manager(#[from] kvferry_blocks::Error),
    /// Memory for the pages.
    #[error("memory for the engine's pages: {0}")]
    Memory(#[from] kvferry::Error),
    /// The driver of the copies.
    #[error(transparent)]
    Driver(#[from] kvferry_offload::Error),
}
