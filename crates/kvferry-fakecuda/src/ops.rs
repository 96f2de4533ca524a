//! Operations of streams.

use std::sync::Arc;
use std::time::Instant;

use crate::abi::HostFn;
use crate::ptx::Launch;
use crate::races::{Point, Touch};
use crate::timeline::Engine;

/// An operation that is submitted and has not completed.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) id: u64,
    pub(crate) work: Work,
    pub(crate) engine: Engine,
    /// Operations of other streams that must complete first.
    pub(crate) after: Vec<u64>,
    pub(crate) point: Arc<Point>,
    pub(crate) started: bool,
    /// The operation does not start unless the faults are cleared.
    pub(crate) stalled: bool,
    /// The real time before which the next step does not run.
    pub(crate) not_before: Option<Instant>,
}

#[derive(Debug)]
pub(crate) enum Work {
    /// An event's record, or a wait for another operation.
    Marker,
    Move(Move),
    Host {
        function: HostFn,
        user: usize,
    },
    Kernel(Box<Kernel>),
}

/// A host function that is due.
#[derive(Debug)]
pub(crate) struct Callback {
    pub(crate) function: HostFn,
    pub(crate) user: usize,
    pub(crate) stream: usize,
    pub(crate) op: u64,
    pub(crate) point: Arc<Point>,
}

/// A PTX kernel in the course of its run.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) launch: Launch,
    /// Threads that have not run, in the order in which they will.
    pub(crate) threads: Vec<u64>,
    /// The accesses are recorded when the kernel ends: its dry run failed.
    pub(crate) unknown: bool,
    /// Ranges that the threads so far have touched; `read_only` has those read as read-only.
    pub(crate) touches: Vec<Touch>,
    pub(crate) read_only: Vec<Touch>,
}

/// Bytes that move: a copy, a batch of copies, a fill, or what a fake kernel does.
#[derive(Debug, Default)]
pub(crate) struct Move {
    pub(crate) entries: Vec<Entry>,
    /// Entries whose source is still to be read before the operation's turn.
    pub(crate) early: Vec<usize>,
    /// The destinations are poisoned; what a fake kernel reads is read before.
    pub(crate) poisoned: bool,
    /// Parts that have not moved, the next one last.
    pub(crate) parts: Vec<Part>,
    /// Ranges that a fake kernel reads, by address and length.
    pub(crate) reads: Vec<(u64, u64)>,
    /// The byte that all of `reads` must have.
    pub(crate) expect: Option<u8>,
    /// The real time that a fake kernel takes before it reads, in ns.
    pub(crate) delay_ns: u64,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) destination: u64,
    pub(crate) len: u64,
    pub(crate) source: Source,
}

#[derive(Debug)]
pub(crate) enum Source {
    Byte(u8),
    /// Memory that is read part by part when the copy runs.
    Memory {
        address: u64,
        host: bool,
    },
    /// Memory in any order: read at the call, or between it and the copy.
    Early {
        address: u64,
        host: bool,
        bytes: Option<Vec<u8>>,
    },
    /// Bytes that were read during the call.
    Taken(Vec<u8>),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) entry: usize,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The accesses of an operation, by when they may happen.
#[derive(Debug, Default)]
pub(crate) struct Touches {
    /// Accesses in stream order.
    pub(crate) ordered: Vec<Touch>,
    /// Reads at any time from the call on.
    pub(crate) any: Vec<Touch>,
    /// Reads during the call.
    pub(crate) during: Vec<Touch>,
    /// The entries have no order among themselves.
    pub(crate) batch: bool,
}

/// The largest part of a copy.
const PART: u64 = 256 << 10;

impl Move {
    /// Cuts all entries into parts in a random order.
    pub(crate) fn tear(&mut self, rng: &mut fastrand::Rng) {
        for (index, entry) in self.entries.iter().enumerate() {
            let mut offset = 0;
            while offset < entry.len {
                let rest = entry.len - offset;
                let mut len = rest.min(PART);
                if rest > 16 && rng.u8(..) < 128 {
                    len = rng.u64(1..=len);
                }
                self.parts.push(Part { entry: index, offset, len });
                offset += len;
            }
        }
        rng.shuffle(&mut self.parts);
    }
}

impl Entry {
    /// The address that is still to be read.
    pub(crate) fn reads(&self) -> impl Iterator<Item = u64> {
        match &self.source {
            Source::Memory { address, .. } | Source::Early { address, bytes: None, .. } => {
                Some(*address)
            }
            _ => None,
        }
        .into_iter()
    }
}
