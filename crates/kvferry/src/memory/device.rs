//! Device memory that the CPU can't address, copied in batches through the stages of its device.
//!
//! Ownership: the device owns a batch ([`DeviceCopy`]), with its stage and its regions, until it completes or
//! drops it; the cursor that started it only observes it. So a cursor may be dropped at any time, and the device
//! still writes into live memory. The stage of a batch that was copied from the device goes to the cursor, which
//! sends it; any other goes back to the pool.
//!
//! Wake-up: a cursor that finds no ready bytes returns `NotReady`; the end of any of its copies calls the waker
//! afterwards. An end before that check is seen by the check, because the outcome is set before the waker is called.
//! The waker writes to a descriptor: the reactor's, or that of the caller who drives the transfer.

use crate::callback::contain;
use crate::memory::gate::Gate;
use crate::memory::region::RegionUse;
use crate::memory::stages::{Stage, StagePool, Wake};
use crate::sync::{Arc, Mutex};
use kvferry_sys::span::HostSpan;
use smallvec::SmallVec;
use std::any::Any;
use std::{fmt, io};

/// A GPU, or something that behaves alike: it copies between its own memory and host memory.
///
/// No method may wait for the device: an I/O thread of the agent calls it. Copies complete later, in any order,
/// on a thread of the device or of its driver, or before the call returns. A call that panics fails its transfer.
/// A device that is lost completes every batch with an error, and ends its stages ([`StagePool::end`]).
pub trait Device: Send + Sync + 'static {
    /// The stages of the device's copies, the same for each call. They also tell devices apart: memories with
    /// the same stages are copied by the same device.
    fn stages(&self) -> Arc<StagePool>;

    /// Pieces of one batch, at most; constant. The device may divide a batch among several calls of its driver.
    fn pieces_max(&self) -> usize;

    /// Starts to copy all pieces of a batch from the device to its stage, and completes it when all bytes are there.
    fn copy_out(&self, copy: DeviceCopy);

    /// Starts to copy the stage of a batch to its pieces on the device, and completes it when all bytes are there.
    fn copy_in(&self, copy: DeviceCopy);

    /// Completes `happened` once all edges of `after` have happened, on a thread of the device, or before the call
    /// returns. The transfer begins after that, so that neither a stage nor a connection waits for an edge: what an
    /// edge stands for may itself wait for another transfer. The device forgets waits that are not needed any more
    /// ([`Happened::is_needed`]).
    fn wait_for(&self, _after: &After, happened: Happened) {
        let what =
            "the device knows no edges: wait for what uses the memory, and pass After::host()";
        happened.complete(Err(io::Error::new(io::ErrorKind::Unsupported, what)));
    }

    /// Names the edge that a wait of [`Device::wait_for`] has still to see happen, for the error of a transfer whose time
    /// is over: its stream or event, and its place among the edges. `None` if the device can't tell.
    fn awaited(&self, _after: &After) -> Option<String> {
        None
    }
}

/// Memory of a device.
#[derive(Clone)]
pub struct DeviceMemory {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) stages: Arc<StagePool>,
    pub(crate) pieces_max: usize,
    address: u64,
    len: u64,
    has_process_addresses: bool,
}

impl DeviceMemory {
    /// `len` bytes of a device's memory from `address` on. Addresses mean something to the device only, except with
    /// [`DeviceMemory::with_process_addresses`].
    pub fn new(device: Arc<dyn Device>, address: u64, len: u64) -> Self {
        let (stages, pieces_max) = (device.stages(), device.pieces_max().max(1));
        Self { device, stages, pieces_max, address, len, has_process_addresses: false }
    }

    /// Declares that the memory's addresses are addresses of this process: no other memory has them. Callers name a
    /// region of such memory by address, as a region of host memory. The region does not overlap another.
    #[must_use]
    pub fn with_process_addresses(self) -> Self {
        Self { has_process_addresses: true, ..self }
    }

    /// The start address in this process; zero if the addresses are the device's own.
    pub(crate) fn process_address(&self) -> u64 {
        if self.has_process_addresses { self.address } else { 0 }
    }

    /// Bytes of the memory.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The stages of its device: the same for each memory of the device, and for no other device's.
    pub fn stages(&self) -> &Arc<StagePool> {
        &self.stages
    }

    /// Whether its end is beyond the last address.
    pub(crate) fn is_wrapped(&self) -> bool {
        self.address.checked_add(self.len).is_none()
    }

    /// The device's address of the byte at `offset`.
    pub(crate) fn at(&self, offset: u64) -> u64 {
        self.address + offset
    }

    /// Whether one batch can have pieces of both memories.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.stages, &other.stages)
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory[{:#x}+{:#x}]", self.address, self.len)
    }
}

/// A contiguous piece of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePiece {
    /// The device's address of the first byte.
    pub address: u64,
    /// Bytes, not zero.
    pub len: usize,
}

/// What has to happen before a device may touch memory: edges, such as the event after a kernel. An edge is of a
/// type that the device knows, and is kept until the transfers that wait for it have ended. [`After::host`] has no edges:
/// the caller has waited. The default names nothing, which is an error for memory of a device.
#[derive(Clone, Default)]
pub struct After(Named);

#[derive(Clone, Default)]
enum Named {
    #[default]
    Nothing,
    Host,
    Edges(Arc<[Arc<dyn Any + Send + Sync>]>),
}

impl After {
    /// After all of these edges. Without an edge, the same as the default.
    pub fn all(edges: impl IntoIterator<Item = Arc<dyn Any + Send + Sync>>) -> Self {
        let edges: Arc<[_]> = edges.into_iter().collect();
        Self(if edges.is_empty() { Named::Nothing } else { Named::Edges(edges) })
    }

    /// The order is kept on the host: the caller has waited for what uses the memory.
    pub fn host() -> Self {
        Self(Named::Host)
    }

    /// The edges; none if the order is kept on the host.
    pub fn edges(&self) -> &[Arc<dyn Any + Send + Sync>] {
        match &self.0 {
            Named::Edges(edges) => edges,
            Named::Nothing | Named::Host => &[],
        }
    }

    /// True for edges, and for [`After::host`].
    pub(crate) fn is_named(&self) -> bool {
        !matches!(self.0, Named::Nothing)
    }
}

impl fmt::Debug for After {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Named::Nothing => f.write_str("After[nothing named]"),
            Named::Host => f.write_str("After[host]"),
            Named::Edges(edges) => write!(f, "After[{} edges]", edges.len()),
        }
    }
}

/// A transfer's wait for edges, which the device completes. Dropping it fails the transfer.
#[derive(Debug)]
pub struct Happened(Arc<Wait>);

/// The wait, as the transfer sees it.
pub(crate) struct Wait {
    wake: Wake,
    /// `None` until the device has completed the wait.
    pub(crate) outcome: Mutex<Option<io::Result<()>>>,
}

impl Wait {
    /// Asks the device to complete a wait, which then calls `wake`.
    pub(crate) fn start(device: &dyn Device, after: &After, wake: &Wake) -> Arc<Self> {
        let wait = Arc::new(Self { wake: Arc::clone(wake), outcome: Mutex::new(None) });
        let happened = Happened(Arc::clone(&wait));
        contain("a device's wait", || device.wait_for(after, happened));
        wait
    }
}

impl Happened {
    /// Whether the transfer still waits.
    pub fn is_needed(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Ends the wait. An error, such as for an edge that the device does not know, fails the transfer.
    pub fn complete(self, result: io::Result<()>) {
        *self.0.outcome.lock() = Some(result);
    }
}

impl Drop for Happened {
    fn drop(&mut self) {
        let dropped = || Err(io::Error::other("the device dropped a wait for edges"));
        self.0.outcome.lock().get_or_insert_with(dropped);
        (self.0.wake)();
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wait[{:?}]", self.outcome.lock())
    }
}

/// Whether a cursor's memory is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The memory is read: its bytes are sent.
    Out,
    /// The memory is written: it receives bytes.
    In,
}

/// Regions of a batch: of a model with a region for each layer, a batch touches many.
pub(crate) type Regions = SmallVec<[RegionUse; 2]>;

/// What became of a batch: its stage, if that has bytes of the device.
type Outcome = io::Result<Option<Stage>>;

/// A batch that was given to a device, as its cursor sees it.
pub(crate) struct Copy {
    pub(crate) direction: Direction,
    pub(crate) memory: DeviceMemory,
    pub(crate) pieces: Vec<DevicePiece>,
    /// Bytes of all pieces.
    pub(crate) len: usize,
    pub(crate) gate: Arc<Gate>,
    pub(crate) wake: Wake,
    /// `None` until the device has completed or dropped the batch, and once the cursor has taken it.
    pub(crate) outcome: Mutex<Option<Outcome>>,
}

impl Copy {
    /// Gives the batch, with its stage and its regions, to the device. The caller is inside the gate.
    pub(crate) fn start(self: &Arc<Self>, stage: Stage, regions: Regions) {
        self.gate.copy_started();
        let copy = DeviceCopy { owned: Some((Arc::clone(self), stage, regions)) };
        let device = &self.memory.device;
        // If the call panics, the copy fails once the device drops or completes the batch.
        contain("a device's copy", || match self.direction {
            Direction::Out => device.copy_out(copy),
            Direction::In => device.copy_in(copy),
        });
    }

    pub(crate) fn is_running(&self) -> bool {
        self.outcome.lock().is_none()
    }

    /// The outcome of the batch, or `None` while it is in progress.
    pub(crate) fn take_outcome(&self) -> Option<Outcome> {
        self.outcome.lock().take()
    }

    fn end(&self, stage: Stage, regions: Regions, result: io::Result<()>) {
        let outcome = match self.direction {
            Direction::Out => result.map(|()| Some(stage)),
            Direction::In => {
                drop(stage);
                result.map(|()| None)
            }
        };
        *self.outcome.lock() = Some(outcome);
        drop(regions);
        self.gate.copy_ended();
        (self.wake)();
    }
}

/// A batch of pieces and the stage that it is copied to or from, for the device that copies it.
///
/// The pieces lie in the stage one after the other, in their order; they may be copied in any order. The first
/// byte of the stage has the alignment of the first piece's address, up to 128 bytes. So pieces whose addresses and
/// lengths are multiples of the unit of a copy are aligned to it in the stage, too.
///
/// A device that holds the batch owns the bytes of its stage; one that has completed or dropped it can't name
/// them any more. Dropping it without [`DeviceCopy::complete`] fails the copy.
///
/// A copy by [`DeviceCopy::as_ptr`], such as a GPU's, must have ended before the batch is completed or dropped:
/// a device that loses track of it must call [`DeviceCopy::lose`], or leak the batch (`std::mem::forget`). The pool never
/// gets its stage back: once all stages are lost, every transfer of the device's memory waits for one until its deadline,
/// unless the device ends the pool ([`StagePool::end`]).
/// Its regions can be used, but stay in quarantine once they are unregistered. Its transfer ends when the agent's limit of
/// silence has passed since the transfer was stopped, by the error of `lose` or its deadline: it has failed, and
/// [`Error::quiesced`](crate::Error::quiesced) is `Some(false)`.
///
/// A lost copy may still read and write its pieces. Their memory must not be used for anything else, nor registered
/// again, while a region of it is in quarantine ([`Region::is_quarantined`](crate::Region::is_quarantined)): agents
/// refuse that for memory with addresses of the process, but not for other memory of a device.
///
/// The bytes can't outlive the batch:
/// ```compile_fail
/// fn keep(copy: kvferry::DeviceCopy) -> impl Fn(&[u8]) {
///     let kept = &copy;
///     copy.complete(Ok(()));
///     move |bytes| kept.copy_from(0, bytes)
/// }
/// ```
#[derive(Debug)]
pub struct DeviceCopy {
    /// `None` only while it is dropped.
    owned: Option<(Arc<Copy>, Stage, Regions)>,
}

impl DeviceCopy {
    fn copy(&self) -> &Copy {
        &self.owned.as_ref().expect("there until it is dropped").0
    }

    fn span(&self, at: usize, len: usize) -> HostSpan {
        let (copy, stage, _) = self.owned.as_ref().expect("there until it is dropped");
        let is_inside = at.checked_add(len).is_some_and(|end| end <= copy.len);
        assert!(is_inside, "the range is outside the batch");
        stage.span(at, len)
    }

    /// The pieces of the device's memory.
    pub fn pieces(&self) -> &[DevicePiece] {
        &self.copy().pieces
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> usize {
        self.copy().len
    }

    /// Whether there are no bytes to be copied.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the stage is in this process, for the calls of a device's driver.
    pub fn as_ptr(&self) -> *mut u8 {
        self.span(0, self.len()).as_ptr()
    }

    /// Moves the batch to a stage in reserve or a free one, for a device that can't copy from or to the batch's own. The pool
    /// never gets that one back. False if there is no other: the batch is as before, and the pool does not get its stage back
    /// when it ends, unless that is the last one.
    pub fn leave_stage(&mut self) -> bool {
        let (copy, stage, _) = self.owned.as_mut().expect("there until it is dropped");
        let former = stage.span(0, copy.len);
        let is_other = stage.exchange();
        if is_other && copy.direction == Direction::In {
            stage.span(0, copy.len).copy_from_span(&former);
        }
        is_other
    }

    /// Copies `bytes` to the stage's bytes from `at` on.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn copy_from(&self, at: usize, bytes: &[u8]) {
        self.span(at, bytes.len()).copy_from(bytes);
    }

    /// Copies the stage's bytes from `at` on to all of `bytes`.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn copy_to(&self, at: usize, bytes: &mut [u8]) {
        self.span(at, bytes.len()).copy_to(bytes);
    }

    /// Ends the copy. An error fails the transfer, which reports it as its source: the bytes of the pieces, or of
    /// the stage, may be those of before or those that were to be copied.
    pub fn complete(mut self, result: io::Result<()>) {
        self.end(result);
    }

    /// Fails a copy that the device can't follow any more, and that may still run. Its stage and its regions are never given
    /// back.
    pub fn lose(mut self, error: io::Error) {
        if let Some((copy, stage, regions)) = self.owned.take() {
            // Before anything that may panic: a drop would give them back. The gate counts the copy for ever.
            std::mem::forget(regions);
            stage.lose();
            *copy.outcome.lock() = Some(Err(error));
            (copy.wake)();
        }
    }

    fn end(&mut self, result: io::Result<()>) {
        if let Some((copy, stage, regions)) = self.owned.take() {
            copy.end(stage, regions, result);
        }
    }
}

impl Drop for DeviceCopy {
    fn drop(&mut self) {
        if self.owned.is_some() {
            let what = "the device dropped a copy that it had not completed";
            self.end(Err(io::Error::other(what)));
        }
    }
}

impl fmt::Debug for Copy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copy[{} pieces of {:?}]", self.pieces.len(), self.memory)
    }
}
