//! What the two sides of a bench say to each other. Each connection starts with a [`Hello`]. One for
//! control is answered by a [`Door`], on which the measuring side must knock: its agent sends the
//! nonce to the target's agent as a notification. Where a secret is configured, only an agent that
//! holds it gets that far. Then [`Ask`]s follow, one answer each.

use serde::{Deserialize, Serialize};

use crate::lines::Described;

use super::verify::Blocks;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Hello {
    /// Answered by a [`Door`].
    Control,
    /// One raw stream; the token is that of the control connection it belongs to.
    Raw {
        token: u64,
    },
    Floor {
        token: u64,
        buffer: Option<usize>,
    },
}

/// Where the target's agent is, and what it must be told before anything is done.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Door {
    pub(super) agent: String,
    pub(super) nonce: u64,
}

/// Notifications of this name carry the nonce of a door.
pub(super) const KNOCK: &str = "bench";

/// Which of the two programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Program {
    Kvferry,
    Floor,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Give each program its memory. Answered by [`Opened`].
    Open {
        arena: usize,
        floor: usize,
    },
    Fill {
        program: Program,
        seed: u64,
        blocks: Blocks,
    },
    Poison {
        program: Program,
        blocks: Blocks,
    },
    /// Answered by what is wrong, if anything.
    Check {
        program: Program,
        seed: u64,
        blocks: Blocks,
    },
    /// The size of the floor's I/O calls from now on.
    Chunk(usize),
    /// Start so many more agents. Answered by as many [`Reach`].
    Agents(usize),
    /// Answered by the processor time used so far, in nanoseconds.
    CpuTime,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Opened {
    /// Which streams belong to this bench.
    pub(super) token: u64,
    pub(super) region: Described,
}

/// All that is needed to move bytes to and from one more agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Reach {
    pub(super) agent: String,
    pub(super) region: Described,
}
