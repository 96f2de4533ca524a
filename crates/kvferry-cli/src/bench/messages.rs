//! What the two sides of a bench say to each other. Each connection starts with a [`Hello`]. One for
//! control is answered by a [`Door`], on which the measuring side must knock: its agent sends the
//! nonce to the target's agent as a notification. Where a secret is configured, only an agent that
//! holds it gets that far. Then [`Ask`]s follow, one answer each.

use serde::{Deserialize, Serialize};

use crate::lines::Described;

use super::tables::Pair;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Hello {
    /// Answered by a [`Door`].
    Control,
    /// One raw stream; the token is that of the control connection it belongs to. Several at once
    /// need memory of their own, of so many bytes.
    Raw { token: u64, own: Option<usize> },
    /// A floor program, with this socket buffer.
    Floor { token: u64, buffer: Option<usize> },
}

/// Where the target's agent is, and what it must be told before anything is done.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Door {
    pub(super) agent: String,
    pub(super) nonce: u64,
}

/// Notifications of this name carry the nonce of a door.
pub(super) const KNOCK: &str = "bench";

/// Which memory at either side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Program {
    /// Private memory registered with the agent.
    Kvferry,
    /// Memory that the agent allocated, which it may share with peers.
    Shared,
    /// What the limits work on.
    Floor,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Give each program its memory. Answered by [`Opened`].
    Open(Sizes),
    /// The source.
    Fill { program: Program, seed: u64, span: usize },
    /// The destination. What it is poisoned with is not told.
    Poison { program: Program, span: usize },
    /// Answered by what is wrong of a destination poisoned before, if anything.
    Check { program: Program, seed: u64, span: usize, pairs: Vec<Pair> },
    /// The size of the floor's I/O calls from now on.
    Chunk(usize),
    /// Start so many more agents. Answered by as many [`Reach`].
    Agents(usize),
    /// Answered by what the process has used so far.
    Usage,
}

/// Bytes of memory for each program; none for what is not measured.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Sizes {
    pub(super) arena: usize,
    pub(super) shared: usize,
    pub(super) floor: usize,
}

impl Sizes {
    pub(super) fn total(self) -> usize {
        self.arena + self.shared + self.floor
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Opened {
    /// Which streams belong to this bench.
    pub(super) token: u64,
    pub(super) region: Described,
    pub(super) shared: Option<Described>,
    /// The floor's memory, for who may reach it from outside.
    pub(super) floor_address: u64,
}

/// All that is needed to move bytes to and from one more agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Reach {
    pub(super) agent: String,
    pub(super) region: Described,
}
