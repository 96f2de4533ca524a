//! Contexts: what a thread must have current to call the driver for a device.
//!
//! The engine's libraries use each device's primary context. So does this module: it makes no context of
//! another kind, and the primary context of a device only if the caller names that device.

use super::abi::*;
use super::device::Device;
use super::error::Result;
use super::load::{Driver, call};
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// A context of the driver. Streams, events and allocations keep theirs.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    device: Device,
    handle: CUcontext,
    /// This value retained the device's primary context.
    retained: bool,
}

impl Context {
    /// The device's primary context, retained until the last clone of this value is dropped. The driver makes
    /// it if no library of the process has done so, which takes some hundred MB of device memory.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn primary(device: Device) -> Result<Self> {
        let mut handle = CUcontext::default();
        // SAFETY: the driver writes a handle.
        unsafe { call!(device.driver(), primary_retain(&raw mut handle, device.ordinal())) }?;
        Ok(Self(Arc::new(Inner { device, handle, retained: true })))
    }

    /// The context `handle` of the device. It is retained if it is the device's primary context, else
    /// borrowed from its owner.
    pub(super) fn existing(device: Device, handle: CUcontext) -> Result<Self> {
        if device.has_primary_context()? {
            let primary = Self::primary(device)?;
            if primary.0.handle == handle {
                return Ok(primary);
            }
        }
        Ok(Self(Arc::new(Inner { device, handle, retained: false })))
    }

    /// The calling thread's current context.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn current(driver: &'static Driver) -> Result<Option<Self>> {
        let mut handle = CUcontext::default();
        // SAFETY: the driver writes a handle.
        unsafe { call!(driver, ctx_get_current(&raw mut handle)) }?;
        if handle == CUcontext::default() {
            return Ok(None);
        }
        Self::of_handle(driver, handle).map(Some)
    }

    /// The context `handle`, whose device the driver tells only of the current context.
    pub(super) fn of_handle(driver: &'static Driver, handle: CUcontext) -> Result<Self> {
        let mode = push(driver, handle)?;
        let mut device = 0;
        // SAFETY: the driver writes one integer.
        let asked = unsafe { call!(driver, ctx_get_device(&raw mut device)) };
        pop(driver, mode);
        asked?;
        Self::existing(Device::from_ordinal(driver, device), handle)
    }

    /// The context's device.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// The driver that has the context.
    pub fn driver(&self) -> &'static Driver {
        self.0.device.driver()
    }

    /// Whether this value keeps the context: it is the device's primary one.
    pub fn is_retained(&self) -> bool {
        self.0.retained
    }

    /// Makes the context current on this thread and its capture mode relaxed, until the guard is dropped.
    /// Then the thread's former context is current again, in its former mode. Meanwhile the thread calls
    /// no other library that changes its current context.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child. The thread's context and mode are as before.
    pub fn enter(&self) -> Result<Entered<'_>> {
        let driver = self.driver();
        driver.check_process()?;
        let handle = self.0.handle;
        let is_current =
            |entered: &Vec<Entry>| entered.last().is_some_and(|it| it.handle == handle);
        // Within a guard of the same context there is nothing to do, which makes small steps cheap.
        let nested = ENTERED.try_with(|entered| is_current(&entered.borrow())).unwrap_or(false);
        let restore = if nested { None } else { Some(push(driver, handle)?) };
        let depth = ENTERED.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            entered.push(Entry { handle, restore, left: false });
            entered.len()
        });
        let place = depth.map_or(Place::Unlisted { restore }, |depth| Place::Listed { depth });
        Ok(Entered { driver, place, _context: PhantomData, _this_thread: PhantomData })
    }

    /// Waits until all work of the context has run. For tests and for the end of a device's use: it waits for
    /// the work of other libraries, too.
    ///
    /// # Errors
    /// The first error of that work, if the driver refuses, or in a forked child.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: only waits.
        unsafe { call!(self.driver(), ctx_synchronize()) }
    }

    /// Waits until writes of network devices that have arrived are visible to this device, or to all.
    ///
    /// # Errors
    /// If the driver or the device can't, or in a forked child.
    pub fn flush_rdma_writes(&self, to_all_devices: bool) -> Result<()> {
        let scope = if to_all_devices {
            CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
        } else {
            CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        };
        let _entered = self.enter()?;
        let target = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        // SAFETY: only waits.
        unsafe { call!(self.driver(), flush_rdma_writes(target, scope)) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.retained {
            // SAFETY: retained once by this value. Nothing of the context is used any more: its streams,
            // events and allocations hold a clone.
            let _ = unsafe { call!(self.device.driver(), primary_release(self.device.ordinal())) };
        }
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.0.handle == other.0.handle
    }
}

impl Eq for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.0.device.ordinal())
            .field("retained", &self.0.retained)
            .finish()
    }
}

/// A context that a guard of this thread has made current.
struct Entry {
    handle: CUcontext,
    /// The thread's former capture mode; `None` if the context was current already.
    restore: Option<CUstreamCaptureMode>,
    /// Its guard was dropped, before a guard that was made later.
    left: bool,
}

thread_local! {
    static ENTERED: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
}

/// A context that is current on this thread.
#[must_use = "the context is current only until this value is dropped"]
pub struct Entered<'a> {
    driver: &'static Driver,
    place: Place,
    _context: PhantomData<&'a Context>,
    _this_thread: PhantomData<*mut ()>,
}

/// Where a guard's entry is.
#[derive(Debug)]
enum Place {
    /// The entry is in the thread's list, which had `depth` entries with it.
    Listed { depth: usize },
    /// There is no entry: the thread is ending, and its list is gone.
    Unlisted { restore: Option<CUstreamCaptureMode> },
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        match self.place {
            Place::Unlisted { restore } => {
                restore.into_iter().for_each(|mode| pop(self.driver, mode))
            }
            // If the list is gone meanwhile, so is the thread: nothing uses its context.
            Place::Listed { depth } => {
                let _ = ENTERED.try_with(|entered| self.leave(depth, entered));
            }
        }
    }
}

impl Entered<'_> {
    /// Contexts are popped in the order in which they were pushed: this one now, or with a later guard.
    fn leave(&self, depth: usize, entered: &RefCell<Vec<Entry>>) {
        if let Some(entry) = entered.borrow_mut().get_mut(depth - 1) {
            entry.left = true;
        }
        loop {
            let last = entered.borrow_mut().pop_if(|last| last.left);
            let Some(last) = last else { return };
            if let Some(mode) = last.restore {
                pop(self.driver, mode);
            }
        }
    }
}

impl fmt::Debug for Entered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entered").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Makes a context current, and the thread's capture mode relaxed. Returns the former mode.
fn push(driver: &'static Driver, handle: CUcontext) -> Result<CUstreamCaptureMode> {
    // SAFETY: the context is retained, or its owner keeps it, as the maker of the `Context` promised.
    unsafe { call!(driver, ctx_push(handle)) }?;
    let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the driver exchanges one integer.
    let exchanged = unsafe { call!(driver, exchange_capture_mode(&raw mut mode)) };
    if let Err(error) = exchanged {
        let mut popped = CUcontext::default();
        // SAFETY: undoes the push.
        let _ = unsafe { call!(driver, ctx_pop(&raw mut popped)) };
        return Err(error);
    }
    Ok(mode)
}

/// Undoes a push. Errors of the device do not matter here: both calls change only this thread's state.
fn pop(driver: &'static Driver, mut mode: CUstreamCaptureMode) {
    let mut popped = CUcontext::default();
    // SAFETY: the driver exchanges one integer, and writes a handle.
    unsafe {
        let _ = call!(driver, exchange_capture_mode(&raw mut mode));
        let _ = call!(driver, ctx_pop(&raw mut popped));
    }
}
