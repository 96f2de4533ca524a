//! Device memory that the CPU can't address, copied through bounded staging buffers.
//!
//! Ownership: a staging buffer belongs to the copy that uses it. A copy is in progress from its
//! start until its [`Stage`] is completed or dropped; the cursor that started it only observes it. So a cursor may be dropped at any time, and the device still writes into live memory.
//!
//! Wake-up: a cursor that finds no ready bytes returns `NotReady`; the completion of any of its
//! copies calls the waker afterwards. A completion before that check is seen by the check, because
//! the state is set before the waker is called.

use crate::memory::gate::Gate;
use crate::memory::region::RegionInner;
use crate::sync::atomic::{AtomicU8, Ordering};
use crate::sync::{Arc, Mutex, lock};
use kvferry_sys::map::Mapping;
use kvferry_sys::span::HostSpan;
use std::io;

/// Memory that is read and written by asynchronous copies: a GPU's, or memory that behaves alike.
///
/// Offsets count from the start of the memory. Copies may complete in any order, on any thread, or
/// before the call returns. A call that panics fails its transfer.
pub trait DeviceMemory: Send + Sync + 'static {
    /// Bytes of the memory; constant.
    fn len(&self) -> u64;

    /// Whether the memory has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Starts to copy `to.len()` bytes at `offset` of the device to `to`, and completes it when they
    /// are there.
    fn copy_out(&self, offset: u64, to: Stage);

    /// Starts to copy `from` to `offset` of the device, and completes it when the bytes are there.
    fn copy_in(&self, offset: u64, from: Stage);
}

/// Called when memory that was not ready may be ready.
pub(crate) type Wake = Arc<dyn Fn() + Send + Sync>;

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

pub(crate) struct Copy {
    buffer: Mapping,
    state: AtomicU8,
    error: Mutex<Option<io::Error>>,
    region: Arc<RegionInner>,
    gate: Arc<Gate>,
    wake: Wake,
}

impl Copy {
    /// Marks a copy as started. The caller is inside `gate` and has seen `region` alive.
    pub(crate) fn start(
        buffer: Mapping,
        region: &Arc<RegionInner>,
        gate: &Arc<Gate>,
        wake: &Wake,
    ) -> Arc<Self> {
        region.copies.fetch_add(1, Ordering::SeqCst);
        gate.copy_started();
        Arc::new(Self {
            buffer,
            state: AtomicU8::new(RUNNING),
            error: Mutex::new(None),
            region: Arc::clone(region),
            gate: Arc::clone(gate),
            wake: Arc::clone(wake),
        })
    }

    pub(crate) fn span(&self, offset: usize, len: usize) -> HostSpan {
        self.buffer.span(offset, len)
    }

    /// The outcome of the copy, or `None` while it is in progress.
    pub(crate) fn outcome(&self) -> Option<io::Result<()>> {
        match self.state.load(Ordering::Acquire) {
            RUNNING => None,
            DONE => Some(Ok(())),
            _ => {
                let error = lock(&self.error).take();
                Some(Err(error.unwrap_or_else(|| io::Error::other("a device copy failed"))))
            }
        }
    }

    /// Returns the buffer if the copy has ended and no other reference to it is left.
    pub(crate) fn into_buffer(self: Arc<Self>) -> Option<Mapping> {
        Arc::try_unwrap(self).ok().map(|copy| copy.buffer)
    }

    fn end(&self, state: u8) {
        self.state.store(state, Ordering::Release);
        self.region.copies.fetch_sub(1, Ordering::SeqCst);
        self.gate.copy_ended();
        (self.wake)();
    }
}

/// The staging buffer of one device's copy, which ends with it.
///
/// A device that holds the stage owns its bytes; one that has completed or dropped it can't name them any
/// more. Dropping it without [`Stage::complete`] fails the copy.
///
/// A copy by [`Stage::as_ptr`], such as a GPU's, must have ended before the stage is completed or dropped:
/// a device that loses track of it must leak the stage (`std::mem::forget`), which leaves the region in
/// quarantine.
///
/// The bytes can't outlive the stage:
/// ```compile_fail
/// fn keep(stage: kvferry::Stage) -> impl Fn(&[u8]) {
///     let kept = &stage;
///     stage.complete(Ok(()));
///     move |bytes| kept.copy_from(0, bytes)
/// }
/// ```
#[derive(Debug)]
pub struct Stage {
    /// The copy of the stage; `None` only while it is dropped.
    copy: Option<Arc<Copy>>,
    len: usize,
}

impl Stage {
    pub(crate) fn new(copy: &Arc<Copy>, len: usize) -> Self {
        Self { copy: Some(Arc::clone(copy)), len }
    }

    fn span(&self, at: usize, len: usize) -> HostSpan {
        let is_inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "the range is outside the stage");
        self.copy.as_ref().expect("there until it is dropped").span(at, len)
    }

    /// Bytes to be copied.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes to be copied.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes are in this process, for the calls of a device's driver.
    pub fn as_ptr(&self) -> *mut u8 {
        self.span(0, self.len).as_ptr()
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

    /// Ends the copy.
    pub fn complete(mut self, result: io::Result<()>) {
        if let Some(copy) = self.copy.take() {
            match result {
                Ok(()) => copy.end(DONE),
                Err(e) => {
                    *lock(&copy.error) = Some(e);
                    copy.end(FAILED);
                }
            }
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(copy) = self.copy.take() {
            copy.end(FAILED);
        }
    }
}

impl std::fmt::Debug for Copy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Copy[{:?} state {}]", self.region, self.state.load(Ordering::Relaxed))
    }
}
