//! What a connector does between an engine's scheduler and its workers, free of any engine.
//!
//! A connector has two halves, in different processes. The [`Scheduler`] decides, where requests are
//! scheduled, what is handed over; it says so in [`Orders`], plain data that the engine carries with
//! each step. A [`Worker`] on each rank carries them out: it announces what is computed, fetches
//! what is wanted, and reports what has ended. Adapters of engines translate, and decide nothing.
//!
//! ```text
//! engine of a producer                              engine of a consumer
//!   Scheduler ── Orders ──> Worker of each rank       Worker of each rank <── Orders ── Scheduler
//!                             layer by layer:                fetches what is announced,
//!                             what is computed  <─────────   by a plan between the two layouts
//! ```
//!
//! Below that, a [`Rank`] is one rank's side of all its handoffs: it drives the state machines of
//! [`kvferry_proto::handoff`] over an agent's channels, and reads over its transports; what belongs
//! where is its caller's to say ([`Mapper`]).
//!
//! | for | open |
//! |---|---|
//! | the protocol, and why it keeps its promises | `kvferry_proto::handoff` |
//! | what two engines learn of each other before that | `kvferry_proto::introduction`, `card.rs` |
//! | deciding, and how many ranks' reports are one outcome | `scheduler.rs`, `scheduler/`, `quorum.rs` |
//! | what a request's parameters say, and what halves say to each other | `params.rs`, `orders.rs` |
//! | carrying it out | `worker.rs` |
//! | what was computed, and when that is said | `produced.rs` |
//! | which bytes of which rank go where | `paired.rs` |
//! | driving the protocol: messages, reads, timers, peers that come and go | `rank.rs` |
//! | which peer is which, over restarts and reconnections | `peers.rs` |

mod card;
mod codes;
mod orders;
mod paired;
mod params;
mod peers;
mod produced;
mod quorum;
mod rank;
mod scheduler;
mod worker;

pub use card::{CardError, RankCard};
pub use kvferry_proto::WireCode;
pub use kvferry_proto::handoff::{
    BlockTable, HandoffId, Limits, NULL_BLOCK, Outcome, Progress, Rectangle, Refusal, Slice,
};
pub use kvferry_proto::introduction::EngineId;
pub use orders::{
    Cancel, Compute, Ending, EngineCard, Fetched, Free, How, Notes, Offer, Orders, OrdersError,
    Want,
};
pub use params::{Offered, Params, ParamsError, Role, produce};
pub use rank::{Event, Fault, Mapper, Rank, Read, ReadPart, SideData, Source};
pub use scheduler::{
    EngineError, Finish, Finished, GroupRule, Match, Request, Scheduled, Scheduler, SchedulerConfig,
};
pub use worker::{Announce, Computed, Reports, Watch, Worker, WorkerConfig, WorkerError};
