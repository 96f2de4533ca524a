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

mod codes;
mod peers;
mod rank;

pub use kvferry_proto::handoff::{
    BlockTable, HandoffId, Limits, NULL_BLOCK, Outcome, Progress, Rectangle, Refusal, Slice,
};
pub use rank::{Event, Fault, Mapper, Rank, Read, SideData, Source};
