//! The interface that the conformance suite needs of a transport: two connected endpoints.

use crate::memory::{Memory, MemoryKind};
use crate::slow::SlowMemory;
use kvferry::{Access, Notification, Options};
use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Makes pairs of endpoints over one transport with one setting.
pub trait Fabric: Send + Sync {
    /// The name in reports.
    fn name(&self) -> String;

    /// Two new endpoints that can reach each other's memory.
    ///
    /// # Errors
    /// If the endpoints can't be made.
    fn pair(&self) -> Result<Pair, Failure>;

    /// Amount of work that the scenarios should do.
    fn effort(&self) -> Effort {
        Effort::Full
    }

    /// The kind of memory of the far side, for scenarios on memory of `kind`.
    fn far_kind(&self, kind: MemoryKind) -> MemoryKind {
        kind
    }

    /// Whether a transfer names regions of one incarnation. Otherwise it names addresses, and every
    /// refusal is `not_registered`.
    fn names_regions(&self) -> bool {
        true
    }

    /// Whether a live peer confirms a cancel, after which nothing lands. Otherwise the bytes that its
    /// kernel has received may still land shortly after.
    fn confirms_cancel(&self) -> bool {
        true
    }

    /// The longest that one healthy operation may take on a loaded machine.
    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }
}

/// Amount of work that the scenarios do. Either amount proves each promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// 70 000 descriptors, more than 64 MiB, many rounds.
    Full,
    /// A tenth of that: for many fabrics.
    Brief,
}

/// Two endpoints.
#[derive(Clone)]
pub struct Pair {
    /// Starts most transfers.
    pub near: Arc<dyn Endpoint>,
    /// The other endpoint.
    pub far: Arc<dyn Endpoint>,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pair")
    }
}

/// One side of a pair. Transfers go between its regions and those of the other side.
pub trait Endpoint: Send + Sync {
    /// Registers `len` bytes of `memory` from `offset` on; slow memory only as a whole.
    ///
    /// # Errors
    /// If the transport refuses.
    fn register(
        &self,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Region, Failure>;

    /// Takes a region back, and returns when no copier of this side can access it.
    ///
    /// # Errors
    /// If the region is not registered.
    fn unregister(&self, region: &Region) -> Result<(), Failure>;

    /// Moves bytes between regions of this side and of the other, and returns with the outcome.
    fn transfer(&self, way: Way, moves: &[Move], options: &Options<'_>) -> Outcome;

    /// Starts such a transfer.
    fn start(&self, way: Way, moves: &[Move], options: &Options<'_>) -> Box<dyn Handle>;

    /// Sends a notification.
    ///
    /// # Errors
    /// If it could not be delivered.
    fn notify(&self, note: Notification, options: &Options<'_>) -> Result<(), Failure>;

    /// Takes the notifications that have arrived here.
    fn take_notes(&self) -> Vec<Notification>;

    /// Waits for one notification and takes it.
    fn wait_note(&self, timeout: Duration) -> Option<Notification>;

    /// Gauges that must be zero while nothing is registered, running or queued.
    fn gauges(&self) -> Vec<(&'static str, u64)>;

    /// Shuts this endpoint down; its gauges then include what a live endpoint has, such as sessions.
    fn close(&self);
}

/// A running transfer. Dropping it does not cancel the transfer.
pub trait Handle: Send + Sync {
    /// The outcome, if there is one.
    fn poll(&self) -> Option<Outcome>;

    /// Waits for the outcome.
    fn wait(&self, timeout: Duration) -> Option<Outcome>;

    /// Requests a cancel, and returns.
    fn cancel(&self);

    /// Readable once there is an outcome.
    fn event_fd(&self) -> BorrowedFd<'_>;
}

/// The direction of a transfer, seen from its initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Copies from the initiator's regions to the other side's.
    Write,
    /// Copies from the other side's regions to the initiator's.
    Read,
}

impl Way {
    /// The two directions.
    pub const ALL: [Self; 2] = [Self::Write, Self::Read];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "write",
            Self::Read => "read",
        })
    }
}

/// A registered range of some memory.
#[derive(Clone)]
pub struct Region {
    /// The memory that contains the region.
    pub memory: Memory,
    /// Offset of the region in the memory, in bytes.
    pub offset: usize,
    /// Bytes in the region.
    pub len: usize,
    /// Access that the peer has.
    pub access: Access,
    /// The transport's own handle.
    pub inner: Arc<dyn Any + Send + Sync>,
}

impl Region {
    /// The device behind slow memory.
    pub fn device(&self) -> &SlowMemory {
        self.memory.device().expect("the memory is slow")
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}..{} of {:?})", self.offset, self.offset + self.len, self.memory)
    }
}

/// Form in which a move names its remote bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// Names the region as its owner described it: the initiator can check bounds and access.
    Honest,
    /// Uses a description with forged bounds and access: only the target can check them.
    Forged,
    /// Uses an address in the target's process: only the target can check it. Only for memory that
    /// has one ([`Memory::address`]).
    Address,
}

/// A descriptor.
#[derive(Clone, Debug)]
pub struct Move {
    /// The region of the initiator.
    pub local: Region,
    /// Bytes from the start of `local`.
    pub local_offset: u64,
    /// The region of the other side.
    pub remote: Region,
    /// Bytes from the start of `remote`; it wraps with [`Aim::Address`], to name bytes before it.
    pub remote_offset: u64,
    /// Bytes to move.
    pub len: u64,
    /// Form in which the remote bytes are named.
    pub aim: Aim,
}

impl Move {
    /// A move with [`Aim::Honest`].
    pub fn new(
        local: &Region,
        local_offset: usize,
        remote: &Region,
        remote_offset: usize,
        len: usize,
    ) -> Self {
        Self {
            local: local.clone(),
            local_offset: local_offset as u64,
            remote: remote.clone(),
            remote_offset: remote_offset as u64,
            len: len as u64,
            aim: Aim::Honest,
        }
    }

    /// The same move with another aim.
    pub fn aimed(mut self, aim: Aim) -> Self {
        self.aim = aim;
        self
    }

    /// Updates the model of the memory that this move changes.
    pub fn expect(&self, way: Way) {
        let local = (&self.local, self.local_offset as usize);
        let remote = (&self.remote, self.remote_offset as usize);
        let ((to, to_offset), (from, from_offset)) = match way {
            Way::Write => (remote, local),
            Way::Read => (local, remote),
        };
        let (at, source_at) = (to.offset + to_offset, from.offset + from_offset);
        to.memory.expect_copy(at, &from.memory, source_at, self.len as usize);
    }
}

/// Bytes and descriptors that a finished transfer moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferStats {
    /// Payload bytes.
    pub bytes: u64,
    /// Descriptors of the batch.
    pub descriptors: usize,
}

/// Outcome of a transfer.
pub type Outcome = Result<TransferStats, Failure>;

/// Reason for a failed transfer, with kinds that all transports share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind in snake case, as `kvferry::ErrorKind::as_str` gives it.
    pub kind: String,
    /// Whether it is certain that no byte lands from here on; `None` if it was never in doubt.
    pub quiesced: Option<bool>,
    /// The error as it is displayed.
    pub text: String,
}

impl Failure {
    /// A failure whose text is its kind.
    pub fn new(kind: impl Into<String>) -> Self {
        let kind = kind.into();
        Self { text: kind.clone(), kind, quiesced: None }
    }

    /// Whether it is certain that no byte lands from here on.
    pub fn is_quiet(&self) -> bool {
        self.quiesced != Some(false)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {} (quiesced: {:?})", self.kind, self.text, self.quiesced)
    }
}
