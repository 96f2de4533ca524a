//! Functions of the host that a stream calls.

use super::error::Result;
use super::load::call;
use super::stream::Stream;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

type Callback = Box<dyn FnOnce() + Send>;

/// Calls `function` on a thread of the driver after the stream's earlier work. Later work of the stream waits
/// for it. The function must not call the driver, and must not wait for a thread that does: that can block
/// for ever. A panic ends the function and goes no further.
///
/// If the device is lost before the stream reaches the function, it is never called, nor dropped.
///
/// # Errors
/// If the driver refuses, or in a forked child. Then the function is dropped without a call.
pub fn host_function(stream: &Stream, function: Callback) -> Result<()> {
    let _entered = stream.context().enter()?;
    // One more box, because a pointer to a trait object takes two words.
    let data: *mut Callback = Box::into_raw(Box::new(function));
    // SAFETY: `run` takes the box, and the driver calls it once.
    let queued = unsafe {
        call!(stream.context().driver(), launch_host_func(stream.handle(), run, data.cast()))
    };
    if queued.is_err() {
        // SAFETY: the driver did not take the pointer, which came from a box.
        drop(unsafe { Box::from_raw(data) });
    }
    queued
}

/// # Safety
/// `data` is a box of a [`Callback`], as a raw pointer that nothing else uses.
unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: the caller keeps the promise of this function.
    let function = unsafe { Box::from_raw(data.cast::<Callback>()) };
    // A panic must not unwind into the driver.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(function)) {
        // The drop of what was thrown may panic as well.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(panic)));
    }
}
