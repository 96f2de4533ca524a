//! What the conformance suite needs of a transport: two endpoints that know each other.

use crate::memory::{Memory, MemoryKind};
use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// A way to connect two endpoints: one per transport and setting.
pub trait Fabric: Send + Sync {
    /// What it is called in reports.
    fn name(&self) -> String;

    /// Two new endpoints that can reach each other's memory.
    ///
    /// # Errors
    /// If the endpoints can't be made.
    fn pair(&self, memory: MemoryKind) -> Result<Pair, Failure>;

    /// How much work the scenarios should do.
    fn effort(&self) -> Effort {
        Effort::Full
    }

    /// Whether a transfer names regions, each of one life; otherwise it names addresses, and
    /// whoever is refused is told no more than that there is nothing to reach there.
    fn names_regions(&self) -> bool {
        true
    }

    /// Whether a peer that is there confirms that nothing lands any more; otherwise what its kernel
    /// had received may still land, soon.
    fn confirms_cancel(&self) -> bool {
        true
    }

    /// The longest that one healthy operation may take on a loaded machine.
    fn patience(&self) -> Duration {
        Duration::from_secs(20)
    }
}

/// How much work the scenarios do. Every scenario makes its point with either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// 70 000 descriptors, more than 64 MiB, many rounds.
    Full,
    /// A tenth of that: for tables with many fabrics.
    Brief,
}

/// Two endpoints.
#[derive(Clone)]
pub struct Pair {
    /// The one that scenarios start most transfers from.
    pub near: Arc<dyn Endpoint>,
    /// The other one.
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

    /// Takes a region back; returns when nothing on this side can touch it any more.
    ///
    /// # Errors
    /// If the region is not registered.
    fn unregister(&self, region: &Region) -> Result<(), Failure>;

    /// Writes local bytes to the other side, and returns with the outcome.
    fn write(&self, moves: &[Move], options: &Options) -> Outcome;

    /// Reads the other side's bytes, and returns with the outcome.
    fn read(&self, moves: &[Move], options: &Options) -> Outcome;

    /// Starts a write.
    fn write_async(&self, moves: &[Move], options: &Options) -> Box<dyn Handle>;

    /// Starts a read.
    fn read_async(&self, moves: &[Move], options: &Options) -> Box<dyn Handle>;

    /// Sends a notification.
    ///
    /// # Errors
    /// If it could not be delivered.
    fn notify(&self, note: Note, options: &Options) -> Result<(), Failure>;

    /// Takes the notifications that have arrived here.
    fn take_notes(&self) -> Vec<Note>;

    /// Waits for one notification and takes it.
    fn wait_note(&self, timeout: Duration) -> Option<Note>;

    /// Everything that must be zero while nothing is registered, running or queued.
    fn gauges(&self) -> Vec<(String, u64)>;

    /// Ends this side; its gauges then count what any living endpoint has, too.
    fn close(&self);
}

/// A running transfer. Dropping it does not cancel the transfer.
pub trait Handle: Send + Sync {
    /// The outcome, if there is one.
    fn poll(&self) -> Option<Outcome>;

    /// Waits for the outcome.
    fn wait(&self, timeout: Duration) -> Option<Outcome>;

    /// Asks for an early end.
    fn cancel(&self);

    /// Readable once there is an outcome.
    fn event_fd(&self) -> BorrowedFd<'_>;
}

/// What a peer may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Read it.
    pub read: bool,
    /// Write it.
    pub write: bool,
}

impl Access {
    /// Nothing: the region is for transfers of its owner.
    pub const NONE: Self = Self { read: false, write: false };
    /// Only read.
    pub const READ: Self = Self { read: true, write: false };
    /// Only write.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Both.
    pub const BOTH: Self = Self { read: true, write: true };
}

/// A registered range of some memory.
#[derive(Clone)]
pub struct Region {
    /// The memory it is a range of.
    pub memory: Memory,
    /// Where it starts in the memory.
    pub offset: usize,
    /// Bytes in the region.
    pub len: usize,
    /// What the peer may do.
    pub access: Access,
    /// The transport's own idea of the region.
    pub inner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}..{} of {:?})", self.offset, self.offset + self.len, self.memory)
    }
}

/// How a move names its remote bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// By the region as its owner described it: the initiator can check.
    Honest,
    /// By a description with the bounds and rights forged: only the target can check.
    Forged,
    /// By address in the target's process: only the target can check. Host memory only.
    Address,
}

/// One descriptor.
#[derive(Clone, Debug)]
pub struct Move {
    /// The region of the initiator.
    pub local: Region,
    /// Where in it.
    pub local_offset: u64,
    /// The region of the other side.
    pub remote: Region,
    /// Where in it; with [`Aim::Address`], wrapping, so that bytes before it can be named.
    pub remote_offset: u64,
    /// Bytes to move.
    pub len: u64,
    /// How the remote bytes are named.
    pub aim: Aim,
}

impl Move {
    /// A move that is honest about its target.
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

    /// The same move, aimed differently.
    pub fn aimed(mut self, aim: Aim) -> Self {
        self.aim = aim;
        self
    }

    /// Tells the remote memory's model that this write happened.
    pub fn expect_written(&self) {
        self.remote.memory.expect_copy(
            self.remote.offset + self.remote_offset as usize,
            &self.local.memory,
            self.local.offset + self.local_offset as usize,
            self.len as usize,
        );
    }

    /// Tells the local memory's model that this read happened.
    pub fn expect_read(&self) {
        self.local.memory.expect_copy(
            self.local.offset + self.local_offset as usize,
            &self.remote.memory,
            self.remote.offset + self.remote_offset as usize,
            self.len as usize,
        );
    }
}

/// How a transfer is asked for.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The deadline; the endpoint's own if not given.
    pub timeout: Option<Duration>,
    /// Delivered after the data.
    pub note: Option<Note>,
}

impl Options {
    /// With a deadline.
    pub fn within(timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..Self::default() }
    }

    /// With a notification after the data.
    pub fn noting(mut self, note: Note) -> Self {
        self.note = Some(note);
        self
    }
}

/// A notification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// What it is called.
    pub name: String,
    /// What it says.
    pub message: Vec<u8>,
}

impl Note {
    /// A notification.
    pub fn new(name: impl Into<String>, message: impl Into<Vec<u8>>) -> Self {
        Self { name: name.into(), message: message.into() }
    }
}

/// What a finished transfer moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Payload bytes.
    pub bytes: u64,
    /// Descriptors of the batch.
    pub descriptors: usize,
}

/// How a transfer ended.
pub type Outcome = Result<Moved, Failure>;

/// Why a transfer failed, in the words that all transports share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind in snake case, as `kvferry::ErrorKind::as_str` gives it.
    pub kind: String,
    /// Whether it is certain that nothing lands any more; `Some(false)` if not.
    pub quiesced: Option<bool>,
    /// For people.
    pub text: String,
}

impl Failure {
    /// A failure with no more to say.
    pub fn new(kind: impl Into<String>) -> Self {
        let kind = kind.into();
        Self { text: kind.clone(), kind, quiesced: None }
    }

    /// Whether it is certain that nothing lands any more.
    pub fn is_quiet(&self) -> bool {
        self.quiesced != Some(false)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {} (quiesced: {:?})", self.kind, self.text, self.quiesced)
    }
}
