//! One request's KV moving from a producer rank to the consumer ranks that need it.
//!
//! Two state machines, one per side: [`Producer`] and [`Consumer`]. They know nothing of layouts,
//! memory or sockets.
//!
//! # How a driver runs them
//!
//! The methods of both fall into four classes, as those of [`crate::session`] do.
//!
//! * **What happened** goes in: what the engine wants ([`Producer::expect`], [`Producer::offer`],
//!   [`Producer::advance`], [`Producer::complete`], [`Producer::restart`], [`Producer::withdraw`];
//!   [`Consumer::claim`], [`Consumer::want`], [`Consumer::free`], [`Consumer::cancel`]), messages of
//!   peers (`receive`), the state of the connections to them (`met`, `lost`), and reads that have
//!   ended ([`Consumer::read_ended`]).
//! * **What to do** comes out of `poll`, one action at a time.
//! * **Time**: `expire` is due at `next_timeout`.
//! * **Queries** change nothing, such as [`Consumer::table`] and `gauges`.
//!
//! After each call of a method of the first or third class the driver polls until there is no
//! action left, and carries the actions out in order.
//!
//! # Who moves the bytes
//!
//! The consumer reads. It alone decides which of its blocks are filled with what (its block list is
//! authoritative), its own reads are stopped by itself, and the producer need not know where they
//! land. The producer *announces* what is ready: blocks, and how far they are computed. Announcing
//! early is pushing while computing; announcing once is pushing at the end; an offer that waits for
//! its consumer is pulling. It is the same protocol.
//!
//! ```text
//! producer rank                                      consumer rank
//!   expect ─────────┐                       ┌──────── claim      the request arrives; in either order
//!                   │  <──────── Ask ───────┘
//!                   └──────── Expected ─────>         it may wait in the producer's queue
//!   offer ─────────────────────── Offer ────>         blocks, how far they are ready
//!                                                     want       has blocks now, and begins to read
//!   advance ──────────────────── Ready ─────>         read ... read
//!   complete ─────────────────── Ready, last >        read the rest
//!                      <──────── Confirm ───          was the generation valid throughout?
//!   ended: done  ─────────────── Confirmed ──>        ended: done
//! ```
//!
//! Either side may skip its first step: `offer` without `expect`, `want` without `claim`.
//!
//! # Who waits for whom, and how long
//!
//! Requests wait in the queues of both engines, for minutes if the engines are busy. So there are
//! three times, not one budget:
//!
//! * Until the other side's *request has arrived*: [`Limits::rendezvous`] for a consumer whose producer
//!   neither offers nor expects the handoff, [`Limits::offer_ttl`] for a complete offer that no
//!   consumer has asked for.
//! * While both wait, heartbeats run. A peer that is silent or gone ends the wait, as does either
//!   request's end.
//! * [`Limits::cap`] bounds all of it.
//!
//! # Why a block is never reused too early, and a wrong one never served
//!
//! * The consumer's blocks are written by its own reads only. [`ConsumerAction::Ended`] comes after
//!   the driver has said of every read it was asked for that it has ended.
//! * The producer's blocks are only read. Giving them back means retiring a *generation*, which
//!   takes effect at once and needs no consent. A consumer publishes only confirmed bytes, and
//!   confirmed bytes were valid from before the first read until after the last.
//!
//! # Agreement
//!
//! The producer decides. It says *done* when all readers have sent `Confirm`, and remembers that in
//! a tombstone, from which a repeated `Confirm` is answered the same way; so a lost `Confirmed` is
//! recovered as soon as the two are connected again. What cannot be recovered: the consumer's
//! engine dies, or the connection does not come back within the consumer's reconnect window, after
//! the producer has said *done*. Then the consumer says *failed*, and computes what it did not get.
//! The other way round, a consumer that is done while its producer is not, is impossible.
//!
//! # Bounds
//!
//! Everything that is kept has a cap and an end in time: [`Limits`]. Names that only peers speak of have caps of
//! their own, and peers share them ([`Shares`](crate::Shares)): invented ones push out neither what this engine has nor
//! what others ask for. The driver says where each peer is, since its number is for a session, and a peer may open many.
//!
//! # Names are capabilities
//!
//! A producer is not told which engine its consumer will be: routers choose it, and with some the consumer asks
//! first. So a peer that has a session and knows a name may ask for the handoff first, or end it before another has asked.
//! Once a reader has asked for it, readers alone get messages about it and end it. The driver's numbers must not be what a peer can
//! claim: an incarnation is no proof, see [`ReaderKey`](crate::rank_message::ReaderKey).
//! Before that a handoff is safe from other peers as long as they can't know its name: the connector draws one of 128 random bits where the
//! router gives none, and routers draw UUIDs. A router that takes `transfer_id` from its clients gives that up.

mod blocks;
mod consumer;
mod declined;
mod farewells;
mod message;
mod producer;
mod progress;
mod schedule;
mod tombstones;
mod watched;

pub use blocks::{BLOCKS_MAX, BlockTable, NULL_BLOCK, PackedTable, TableError};
pub use consumer::{Consumer, ConsumerAction, Need, ProducerRank, ReadId, Slice};
pub use message::{
    Announced, Ask, Confirm, Confirmed, Expected, GROUPS_MAX, HandoffMessage, Offer, Ready,
    SIDE_DATA_MAX, Stop,
};
pub use producer::{Producer, ProducerAction};
pub use progress::{Progress, Rectangle};
pub(crate) use watched::Watched;

use crate::code::WireCode;
use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// The longest name of a handoff, in bytes.
pub const ID_MAX: usize = 256;

/// The name of a handoff, which both sides were given: what routers call `transfer_id`.
///
/// 1 to [`ID_MAX`] bytes. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HandoffId(Arc<str>);

impl HandoffId {
    /// # Errors
    /// The text is empty or longer than [`ID_MAX`] bytes.
    pub fn new(text: &str) -> Result<Self, Refusal> {
        match text.len() {
            1..=ID_MAX => Ok(Self(text.into())),
            len => Err(Refusal::BadId { len }),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The router's part of the name: what stands before the last `#`, if the 32 hexadecimal digits of
    /// a prompt follow; else all of it.
    pub fn transfer(&self) -> &str {
        let is_prompt =
            |it: &str| it.len() == 32 && it.bytes().all(|byte| byte.is_ascii_hexdigit());
        match self.0.rsplit_once('#') {
            Some((transfer, prompt)) if is_prompt(prompt) => transfer,
            _ => &self.0,
        }
    }
}

impl TryFrom<String> for HandoffId {
    type Error = Refusal;

    fn try_from(text: String) -> Result<Self, Refusal> {
        Self::new(&text)
    }
}

impl From<HandoffId> for String {
    fn from(id: HandoffId) -> Self {
        id.0.as_ref().to_owned()
    }
}

impl Borrow<str> for HandoffId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::text::sanitized(&self.0, ID_MAX))
    }
}

/// The driver's number for one incarnation of another rank: before the first connection, for the one that will be met.
/// A restarted rank is another peer. The driver may use the number again for another incarnation where no handoff waits
/// for the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u64);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Identifies the contents of a producer's blocks. Counts up over all handoffs of a producer's incarnation and is never
/// reused. Zero is no generation.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Generation(pub u64);

/// The end of a handoff on one rank. Exactly one per handoff and rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// [`WireCode::Ok`] if the bytes are in place and were confirmed, [`WireCode::Cancelled`] or
    /// [`WireCode::NotNeeded`] if an engine ended it, else what went wrong.
    pub code: WireCode,
    /// Explanation of a failure. May be empty.
    pub detail: String,
    /// The peer that reported the failure or was lost.
    pub peer: Option<PeerId>,
}

impl Outcome {
    /// The bytes were handed over.
    pub const DONE: Self = Self { code: WireCode::Ok, detail: String::new(), peer: None };

    /// An outcome that this side decided.
    pub fn here(code: WireCode, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), peer: None }
    }

    /// An outcome that a peer reported or caused.
    pub fn of(peer: PeerId, code: WireCode, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), peer: Some(peer) }
    }

    /// Whether the bytes were handed over.
    pub const fn is_done(&self) -> bool {
        self.code.is_ok()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.code)?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        self.peer.map_or(Ok(()), |peer| write!(f, " (peer {peer})"))
    }
}

/// Error of a refused call. A refused call changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Refusal {
    /// The name is empty or too long.
    #[error("a handoff's name has 1 to {ID_MAX} bytes, not {len}")]
    BadId { len: usize },
    /// A handoff of this name is under way.
    #[error("a handoff of this name is under way")]
    InUse,
    /// A handoff of this name has ended, or its peer withdrew it before it began.
    #[error("a handoff of this name has ended ({0})")]
    Ended(WireCode),
    /// There is no handoff of this name.
    #[error("there is no handoff of this name")]
    Unknown,
    /// The limit of handoffs is reached.
    #[error("{limit} handoffs are under way, which is the limit")]
    Full { limit: usize },
    /// Another incarnation than the caller means is at the peer's address.
    #[error("the peer was restarted")]
    Restarted,
    /// The limit on addresses of peers is reached, or the part of it that one host may have.
    #[error(
        "too many addresses of peers are in use: {limit} may be, and of one host no more than are left"
    )]
    Addresses { limit: usize },
    /// The call contradicts earlier calls.
    #[error("{0}")]
    Misuse(&'static str),
}

impl Refusal {
    /// The code for the peer.
    pub const fn code(&self) -> WireCode {
        match self {
            Self::BadId { .. } | Self::Misuse(_) => WireCode::Malformed,
            Self::InUse => WireCode::Duplicate,
            Self::Ended(WireCode::Ok) => WireCode::Duplicate,
            Self::Ended(code) => *code,
            Self::Unknown => WireCode::UnknownHandoff,
            Self::Restarted => WireCode::StaleIncarnation,
            Self::Full { .. } | Self::Addresses { .. } => WireCode::Busy,
        }
    }
}

/// Bounds on what a side keeps, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Handoffs under way on one side of one rank. A producer keeps as many again that were asked
    /// for, and neither expected nor offered yet; peers share these ([`Shares`](crate::Shares)).
    pub handoffs: usize,
    /// Ended handoffs that are remembered, so that late messages get the same answer. A producer remembers as
    /// many names again that peers have ended before it knew them; peers share these.
    pub tombstones: usize,
    /// Time for which ended handoffs are remembered.
    pub tomb_ttl: Duration,
    /// Time that a consumer waits until its producer offers or expects the handoff.
    pub rendezvous: Duration,
    /// Time that a complete offer waits until a consumer asks for it.
    pub offer_ttl: Duration,
    /// Longest time that anything waits: an expectation until it is offered, a claim until it is fetched, a producer
    /// for a consumer that has asked.
    pub cap: Duration,
    /// Time after the loss of a connection at which the handoffs that need it fail, unless it comes back. They fail at
    /// once if the peer is known to be gone, but see [`Limits::silence`].
    pub reconnect: Duration,
    /// The silence limit of the sessions. A handoff that began less than this before its session ended
    /// in silence waits for the rest of it, so that another session can take over.
    pub silence: Duration,
    /// Time after the end of its budget for which a consumer waits for the answer to `Confirm`, and a producer keeps
    /// what the consumer may still read.
    pub grace: Duration,
    /// Memory that the announcements of all handoffs take at a consumer, in bytes; producers share it. A handoff
    /// that has to give its part up fails as `Busy`. One that has been read from a producer keeps only that one's side
    /// data, and loses it instead.
    pub announced_bytes: usize,
    /// Concurrent reads of one handoff from one peer.
    pub reads: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handoffs: 16 * 1024,
            tombstones: 64 * 1024,
            tomb_ttl: Duration::from_secs(3600),
            rendezvous: Duration::from_secs(30),
            offer_ttl: Duration::from_secs(30),
            cap: Duration::from_secs(480),
            reconnect: Duration::from_millis(750),
            silence: Duration::from_secs(3),
            grace: Duration::from_secs(3),
            // 16 384 handoffs of 128 Ki tokens in blocks of 16 tokens.
            announced_bytes: 512 * 1024 * 1024,
            reads: 4,
        }
    }
}

/// Cuts a reason to the length that may cross the wire.
fn cut(detail: &str) -> String {
    crate::text::truncated(detail, crate::message::DETAIL_MAX).to_owned()
}
