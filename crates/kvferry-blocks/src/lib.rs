//! kvferry's block manager: which blocks of KV a sequence gets, which are reused, offloaded, onboarded and evicted.
//!
//! It does what TensorRT-LLM's KV cache manager does. It is a value: no clock, no I/O, no thread. The engine gives events
//! and the time, and makes the copies that the manager asks for; no call waits for anything.
//!
//! # Blocks
//!
//! Each group of layers (or attention window) has two pools. Blocks of the *primary* pool are the engine's pages; blocks
//! of the *secondary* pool are in host memory, or stand for files. A sequence has as many blocks in each group, and reuses
//! the prefix that all groups have.
//!
//! Stored blocks form a radix tree over their keys, which are chained hashes. A block can be evicted when no sequence
//! holds it and no block in the same pool is behind it. The block of the lowest priority leaves first, among equals
//! the one that was used least recently. A block that leaves primary is offloaded if its priority is high enough, and
//! secondary has a block that is free or not worth more; otherwise it is removed. A block in secondary that is reused
//! moves back.
//!
//! A priority may be limited in time ([`Retention::duration_ms`]). The time begins when the last sequence lets the block
//! go, so it never ends while the block is in use. Then the block has the default priority and the age that it had.
//!
//! # Driving it
//!
//! - *Events in*: [`allocate`], [`append`], [`store`], [`free`], [`pin`], [`unpin`], [`finished`], [`advance`],
//!   [`reset`].
//! - *Actions out*: [`poll_action`], after each of these, until there is none.
//! - *Queries*: [`blocks`], [`is_ready`], [`reused_tokens`], [`find_prefix`], [`usage`], [`poll_event`].
//!
//! A block that is under transfer may already belong to a sequence, which must not use its blocks before
//! [`Action::Ready`]. The manager hands a copy out when the copies that it depends on have ended, so the caller may make
//! all that it has got at the same time. A copy that fails costs hits only: a sequence keeps the longest prefix that
//! was copied ([`Action::Cut`]).
//!
//! ```
//! use kvferry_blocks::{Action, BlockManager, Config, GroupConfig, Key, Outcome, Request, RetentionConfig};
//!
//! let group = GroupConfig { primary_blocks: 4, secondary_blocks: 4 };
//! let mut manager = BlockManager::new(&Config::new(16, [group]))?;
//! let retention = RetentionConfig::default();
//! let keys = [Key([1, 1]), Key([1, 2]), Key([1, 3])];
//! let prompt = Request { prompt_tokens: 50, keys: &keys, tokens: &[], salt: 0, retention: &retention };
//!
//! // The first time, everything is computed.
//! let first = manager.allocate(&prompt, 0)?;
//! assert_eq!((first.reused_tokens, first.is_ready), (0, true));
//! manager.free(first.sequence, &keys, &[], 1)?;
//!
//! // Another prompt needs the pages: three blocks are offloaded.
//! let others = [4, 5, 6].map(|n| Key([2, n]));
//! let other = Request { keys: &others, ..prompt };
//! let second = manager.allocate(&other, 2)?;
//! assert!(!second.is_ready);
//! let mut copies = 0;
//! while let Some(action) = manager.poll_action() {
//!     match action {
//!         Action::Copy(transfer) => {
//!             copies += 1;
//!             manager.finished(transfer.id, Outcome::Done, 3)?;
//!         }
//!         Action::Ready { sequence, .. } => assert_eq!(sequence, second.sequence),
//!         _ => unreachable!("no copy has failed"),
//!     }
//! }
//! assert_eq!(copies, 3);
//! manager.free(second.sequence, &[], &[], 4)?;
//!
//! // The first prompt again: its blocks are onboarded.
//! let third = manager.allocate(&prompt, 5)?;
//! assert_eq!((third.reused_tokens, third.is_ready), (48, false));
//! # Ok::<(), kvferry_blocks::Error>(())
//! ```
//!
//! # What the caller must see to
//!
//! - A [`Key`] covers all that the KV depends on. Tokens, which are compared for the reuse of a part of a block, must
//!   determine the KV together with [`Request::salt`] and the blocks before.
//! - A copy is made whole before [`Outcome::Done`] is reported.
//! - In file modes, a file has the name [`Transfer::file_name`], which says what is in it. Files of one name are written,
//!   read and removed in the order of the actions.
//!
//! [`allocate`]: BlockManager::allocate
//! [`append`]: BlockManager::append
//! [`store`]: BlockManager::store
//! [`free`]: BlockManager::free
//! [`pin`]: BlockManager::pin
//! [`unpin`]: BlockManager::unpin
//! [`finished`]: BlockManager::finished
//! [`advance`]: BlockManager::advance
//! [`reset`]: BlockManager::reset
//! [`poll_action`]: BlockManager::poll_action
//! [`poll_event`]: BlockManager::poll_event
//! [`blocks`]: BlockManager::blocks
//! [`is_ready`]: BlockManager::is_ready
//! [`reused_tokens`]: BlockManager::reused_tokens
//! [`find_prefix`]: BlockManager::find_prefix
//! [`usage`]: BlockManager::usage
#![forbid(unsafe_code)]

mod config;
mod events;
mod group;
mod heap;
mod key;
mod manager;
mod retention;
mod sequence;
mod shared;
mod transfer;
mod tree;

pub use config::{Config, Error, GroupConfig};
pub use events::{Diff, Event, EventKind, Tier};
pub use key::Key;
pub use manager::{Allocation, BlockManager, Match, PinId, Request, Usage};
pub use retention::{
    DIRECTORY_MAX, FORMAT_VERSION, PRIORITY_DEFAULT, PRIORITY_MAX, RANGES_MAX, Retention,
    RetentionConfig, RetentionError, TokenRange, TransferMode, Warning, WireError,
};
pub use sequence::SequenceId;
pub use transfer::{Action, Block, Discard, Outcome, Transfer, TransferId};

/// No node, block or transfer of this number.
const NONE: u32 = u32::MAX;
