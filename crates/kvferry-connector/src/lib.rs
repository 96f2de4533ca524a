//! Handoffs of KV between engine ranks, free of any engine.
//!
//! A [`Rank`] is one rank's side of all its handoffs, as producer and as consumer: it drives the
//! state machines of [`kvferry_proto::handoff`] over an agent's channels, and reads over its
//! transports. What belongs where is the caller's to say ([`Mapper`]).
//!
//! | for | open |
//! |---|---|
//! | the protocol, and why it keeps its promises | `kvferry_proto::handoff` |
//! | driving it: messages, reads, timers, peers that come and go | `rank.rs` |
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
