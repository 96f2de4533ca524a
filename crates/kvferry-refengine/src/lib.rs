//! A small deterministic paged-attention engine that tests connectors.
//!
//! A model of wrapping integers computes on paged KV caches, with TP and PP ranks, several groups,
//! chunked prefill, a prefix cache and preemption, and drives a connector as vLLM does.
//! Every byte that a token attends to determines it: a wrong KV byte is a wrong token. There is no
//! floating point and no GPU, and outside [`kvferry_adapter`] and [`pair`] no network and no clock: the same requests
//! always make the same steps.
//!
//! # What is where
//!
//! * [`ModelSpec`], [`GroupSpec`]: the model; [`continuation`] computes its output without an engine.
//! * [`EngineConfig`]: ranks, blocks, layouts, limits; [`RankLayout`]: the place of every byte.
//! * [`Engine`]: requests in, tokens out, step by step.
//! * [`contract`]: the connector seam, and the violations of its contract.
//! * [`kvferry_adapter`]: kvferry's own connector behind it.
//! * [`pair`]: a prefill and a decode engine, and the router between them.
//! * [`offload`]: kvferry's block manager instead of the engine's own.
//!
//! ```
//! use kvferry_refengine::{Connector, Engine, EngineConfig, GroupSpec, ModelSpec, Request};
//!
//! let model = ModelSpec::new(vec![GroupSpec::full(2, 8)], 4);
//! let mut engine = Engine::new(EngineConfig::new(model.clone()), Connector::None)?;
//! engine.submit(Request::new("a", vec![1, 2, 3], 5))?;
//! while engine.has_work() {
//!     engine.step()?;
//! }
//! let output: Vec<u32> = engine.take_outputs().into_iter().flat_map(|it| it.tokens).collect();
//! assert_eq!(output, kvferry_refengine::continuation(&model, &[1, 2, 3], 5));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod block_pool;
mod cache;
mod config;
pub mod contract;
mod digest;
mod engine;
pub mod kvferry_adapter;
mod layout;
mod lockstep;
mod memory;
mod model;
pub mod offload;
mod oracle;
pub mod pair;
mod quorum;
mod request;
mod scheduler;
mod worker;

pub use block_pool::{BlockHash, BlockPins};
pub use config::{ConfigError, EngineConfig, GroupCache, Launch, LoadFailurePolicy, Rank, Storage};
pub use engine::{Connector, Engine, Leak, StepReport};
pub use kvferry_proto::layout::Packing;
pub use layout::{BlockId, GroupView, HeadRange, KvCaches, LayerView, PlaneView, RankLayout};
pub use memory::{HeapMemory, KvMemory};
pub use model::{Attention, GroupSpec, ModelSpec, PlaneSpec};
pub use oracle::continuation;
pub use request::{
    FinishReason, Finished, Output, Params, Request, RequestId, RequestStatus, SubmitError,
};
pub use worker::LayerEvent;
