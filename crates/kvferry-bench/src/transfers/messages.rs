//! Messages between the two sides of a bench. Each connection starts with a [`Hello`]. A control
//! connection is answered by a [`Challenge`]: the measuring side's agent must send the nonce to the
//! target's agent as a notification. Where a secret is configured, only an agent that holds it can. Then
//! [`Ask`]s follow, one answer each.

use serde::{Deserialize, Serialize};

use crate::lines::Described;

use super::tables::Pair;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Hello {
    /// Answered by a [`Challenge`].
    Control,
    /// One raw stream; the token is that of the control connection it belongs to. Several at once
    /// need memory of their own, of so many bytes.
    Raw { token: u64, own: Option<usize> },
    /// A stream of a floor program, with this socket buffer; which of them decides on its memory.
    Floor { token: u64, buffer: Option<usize>, lane: usize },
}

/// The target's agent, and the nonce that it must receive before the target does anything.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Challenge {
    pub(super) agent: String,
    pub(super) nonce: u64,
}

/// Notifications of this name carry the nonce of a challenge.
pub(super) const PROOF: &str = "bench";

/// A memory of either side, by the program that uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Program {
    /// Private memory registered with the agent.
    Kvferry,
    /// Memory that the agent allocated, which it may share with peers.
    Shared,
    /// Memory of the plain programs.
    Floor,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Give each program its memory. Answered by [`Opened`].
    Open(Sizes),
    /// The source.
    Fill { program: Program, seed: u64, span: usize },
    /// The destination. The poison stays secret.
    Poison { program: Program, span: usize },
    /// Answered by what is wrong with a destination that was poisoned before, if anything.
    Check { program: Program, seed: u64, span: usize, pairs: Vec<Pair> },
    /// Bytes of the floor's I/O calls from now on, and the streams that share a table.
    Floor { chunk: usize, streams: usize },
    /// Start so many more agents. Answered by as many [`Reach`].
    Agents(usize),
    /// Answered by [`super::usage::Usage`] of the process so far.
    Usage,
}

/// Bytes of memory for each program; none for what is not measured.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Sizes {
    pub(super) arena: usize,
    pub(super) shared: usize,
    pub(super) floor: usize,
    /// Streams of the floor, each with so much memory at the target.
    pub(super) floor_streams: usize,
}

impl Sizes {
    pub(super) fn total(self) -> usize {
        self.arena + self.shared + self.floor * self.floor_streams
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Opened {
    /// Streams that belong to this bench carry it.
    pub(super) token: u64,
    pub(super) region: Described,
    pub(super) shared: Option<Described>,
    /// The address of the floor's memory in the target's process.
    pub(super) floor_address: u64,
}

/// Address of an additional agent, and memory of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Reach {
    pub(super) agent: String,
    pub(super) region: Described,
}
