//! Plans: which bytes of a producer rank become which bytes of a consumer rank.
//!
//! Four steps, each a value, from what changes least to what changes most:
//!
//! | | made of | made |
//! |---|---|---|
//! | [`Topology`] | all layouts of an engine | when the engine starts |
//! | [`Routing`] | the topologies of both engines: which rank reads what from which | once per peer engine |
//! | [`Map`] | two layouts and the [`Share`] between them: a compact program of strided copies | once per pair of ranks |
//! | [`Plan`] | a map and the block tables of a request | per request, or per part of one |
//!
//! A plan is pure data. It yields its copies one by one while they are sent ([`Plan::copies`]), and
//! holds far less than they would take: a few strided loops and the blocks of the request.
//!
//! # What a plan guarantees
//!
//! * Every byte of the tokens that the consumer asked for is written exactly once, over all producer
//!   ranks it reads from, and nothing outside of the blocks that either side listed is touched.
//! * The consumer's list is authoritative: blocks the producer has besides are ignored; one that is
//!   missing is a [`PlanError`] that names it.
//! * Tokens that the consumer has already are not written. Of the last block only the tokens asked
//!   for are, unless taking the rest of it along saves copies.
//! * No two successive copies could have been one.

mod ask;
mod copies;
mod kernel;
mod map;
mod topology;

pub use ask::{Ask, Blocks, PlanError, Unfilled};
pub use copies::{Copies, CopyOp, Cursor, Plan, Spot};
pub use map::Map;
pub use topology::{RANKS_MAX, Routing, SOURCES_MAX, Share, Topology};
