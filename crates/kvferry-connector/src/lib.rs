//! What a connector does between an engine's scheduler and its workers, independent of the engine.
//!
//! A connector has two halves, in different processes. The [`Scheduler`] decides, where requests are
//! scheduled, what is handed over, and returns it as [`ConnectorMetadata`], plain data that the engine
//! carries with each step. The [`Worker`] of each rank carries it out: it announces what is computed,
//! fetches what a request needs, and reports what has ended. Adapters of engines only translate.
//!
//! ```text
//! engine of a producer                                     engine of a consumer
//!   Scheduler ── ConnectorMetadata ─> Worker of a rank     Worker of a rank <─ ConnectorMetadata ── Scheduler
//!                              announces layer by layer    fetches what is announced,
//!                                     what is computed <── by a plan between the two layouts
//! ```
//!
//! Below that, a [`Rank`] is one rank's side of all its handoffs: it drives the state machines of
//! [`kvferry_proto::handoff`] over the agent's channels and reads over its transports. Its caller maps
//! blocks onto bytes ([`ReadMapper`]).
//!
//! | for | open |
//! |---|---|
//! | the protocol and its guarantees | `kvferry_proto::handoff` |
//! | what two engines learn of each other first | `kvferry_proto::engine_handshake`, `rank_metadata.rs` |
//! | deciding; counting the ranks' reports | `scheduler/`, `quorum.rs` |
//! | the parameters of a request; what the halves send each other | `params.rs`, `prompt.rs`, `metadata.rs` |
//! | addresses of producers; which of them an engine accepts | `address.rs`, `producers.rs` |
//! | prompts that are found by their content | `kvferry_proto::directory`, `exchange.rs`, `directory.rs` |
//! | announcing what is computed | `worker/producer.rs`, `worker/request.rs`, `worker/events.rs` |
//! | fetching | `worker/consumer.rs`, `worker/producer_engine.rs` |
//! | driving the protocol: messages, reads, timers, peers | `rank/` |

mod address;
mod clock;
mod codes;
mod directory;
mod exchange;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod metadata;
mod params;
mod producers;
mod prompt;
mod quorum;
mod rank;
mod rank_metadata;
mod scheduler;
mod wakeup;
mod worker;

pub use address::{AddressError, AgentAddress, ProducerAddress};
pub use directory::{Directory, DirectoryConfig, DirectoryError};
pub use exchange::{Exchange, ExchangeConfig, ExchangeError, Missed, Prompt, StagedRank};
pub use kvferry_proto::WireCode;
pub use kvferry_proto::directory::{ContentKey, Found, Limits as DirectoryLimits, Place};
pub use kvferry_proto::engine_handshake::{EngineId, Model};
pub use kvferry_proto::handoff::{
    BlockTable, HandoffId, Limits, NULL_BLOCK, Outcome, Progress, Rectangle, Refusal, Slice,
};
pub use kvferry_proto::layout::{Kind, Layout};
pub use metadata::{
    Cancel, Claim, Compute, ConnectorMetadata, Ending, EndingKind, EngineError, EngineMetadata,
    Expect, FetchRequest, Free, MetadataError, Notes, Offer, RequestOutcome,
};
pub use params::{ConsumerParams, Params, ParamsError, Role, producer_params};
pub use producers::{ForbiddenProducer, Producers, ProducersError};
pub use prompt::{PromptHasher, PromptId};
pub use rank::{Event, Rank, RankError, ReadMapper, ReadPart, ReadRequest, SideData, Source};
pub use rank_metadata::{RankMetadata, RankMetadataError};
pub use scheduler::{
    FinishReason, Finished, GroupRule, IdleLimit, Match, Refused, Request, Scheduled, Scheduler,
    SchedulerConfig, Stats,
};
pub use worker::{
    Announce, ComputeEvent, Load, Loads, Reports, Worker, WorkerConfig, WorkerError, WorkerObserver,
};
