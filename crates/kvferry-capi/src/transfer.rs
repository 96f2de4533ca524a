//! Transfers with peers and with files, and their ends.

use crate::agent::kvferry_agent;
use crate::batch::kvferry_batch;
use crate::error::{self, kvferry_error};
use crate::failure::{Failure, KVFERRY_PENDING};
use crate::guard::{self, Outcome};
use crate::handles::{self, SharedBatch};
use crate::peer::{kvferry_peer, limit};
use crate::structs::{self, Versioned};
use kvferry::{Agent, Batch, Notification, Options, Peer, Transfer, TransferStats};
use kvferry_cuda::Order;
use kvferry_sys::cuda::{RawEvent, RawStream};
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// A transfer that was started. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_transfer(());

/// Called once, when a transfer has ended. `error` is NULL if all bytes arrived, else `stats` is NULL;
/// neither lives longer than the call.
///
/// Runs on a thread of kvferry with all signals blocked, or within the call that starts or cancels the
/// transfer. It must not block and must not throw: other transfers wait for the thread. It may call every
/// function that does not block.
pub type kvferry_done = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        error: *const kvferry_error,
        stats: *const kvferry_transfer_stats,
    ),
>;

/// Figures of a transfer. Set `size` to `sizeof(kvferry_transfer_stats)`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_transfer_stats {
    pub size: usize,
    pub bytes: u64,
    /// Pairs of the batch.
    pub pairs: u64,
    /// Streams or copying threads that moved the bytes.
    pub streams: u32,
    pub reserved: u32,
    /// `local`, `tcp`, …; empty if there was nothing to move.
    pub transport: [c_char; 24],
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers only.
unsafe impl Versioned for kvferry_transfer_stats {}

/// The caller has waited for what uses the memory of GPUs.
pub const KVFERRY_AFTER_HOST: u32 = 0;
/// Work that a stream (`CUstream`, `cudaStream_t`) has when the transfer is started. 0 and 1 are the default stream, 2 the
/// calling thread's.
pub const KVFERRY_AFTER_STREAM: u32 = 1;
/// Work before the last record of an event (`CUevent`, `cudaEvent_t`).
pub const KVFERRY_AFTER_EVENT: u32 = 2;

/// Work that a transfer of memory of GPUs comes after. Set all of it, `reserved` to zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_after {
    /// `KVFERRY_AFTER_`.
    pub kind: u32,
    pub reserved: u32,
    /// The stream or the event; 0 for `KVFERRY_AFTER_HOST`.
    pub handle: u64,
}

/// Settings of a transfer. Set `size` to `sizeof(kvferry_transfer_options)`, and the rest to zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_transfer_options {
    pub size: usize,
    /// Time for the whole transfer, connecting included; 0 is the agent's.
    pub timeout_ms: u64,
    /// Name of a notification that is delivered when all bytes are in place at the peer. May be NULL.
    pub notify_name: *const c_char,
    pub notify_message: *const u8,
    pub notify_len: usize,
    /// Streams to divide the batch among; 0: its size decides.
    pub streams: u32,
    pub reserved: u32,
    /// Called at the end of an asynchronous transfer. May be NULL.
    pub done: kvferry_done,
    /// Passed to `done`.
    pub user: *mut c_void,
    /// Work that the transfer comes after, one entry at least, where local memory is a GPU's. Streams and events exist until the
    /// call returns.
    pub after: *const kvferry_after,
    pub after_count: usize,
}

// SAFETY: `repr(C)`, begins with its size; zeroes are no function. Other bytes are what the caller wrote.
unsafe impl Versioned for kvferry_transfer_options {}

/// The caller's options, copied.
struct TransferOptions {
    options: Options<'static>,
    done: kvferry_done,
    user: *mut c_void,
    after: Vec<Order>,
}

/// # Safety
/// `options` is null or a structure whose pointers are what it says.
unsafe fn read(options: *const kvferry_transfer_options) -> Result<TransferOptions, Failure> {
    // SAFETY: the caller's promise.
    let theirs = unsafe { structs::read(options, "the transfer's options") }?;
    // SAFETY: the caller's promise.
    let (name, message, after) = unsafe {
        let message = guard::array(theirs.notify_message, theirs.notify_len, "the message")?;
        let after = guard::array(theirs.after, theirs.after_count, "after")?;
        (guard::optional_text(theirs.notify_name, "the notification's name")?, message, after)
    };
    let after = after.iter().map(order_of).collect::<Result<_, _>>()?;
    let notify = name.map(|name| Notification::new(name, message));
    let streams = (theirs.streams > 0).then_some(theirs.streams as usize);
    let timeout = limit(theirs.timeout_ms);
    let options = Options { timeout, notify, streams, ..Options::default() };
    Ok(TransferOptions { options, done: theirs.done, user: theirs.user, after })
}

pub(crate) fn order_of(after: &kvferry_after) -> Result<Order, Failure> {
    let has_handle = after.kind != KVFERRY_AFTER_HOST;
    if after.reserved != 0 || (after.handle != 0 && !has_handle) {
        return Err(Failure::invalid("set the fields of after that its kind does not use to zero"));
    }
    match after.kind {
        KVFERRY_AFTER_HOST => Ok(Order::Host),
        KVFERRY_AFTER_STREAM => Ok(Order::Stream(RawStream(after.handle))),
        KVFERRY_AFTER_EVENT => Ok(Order::Event(RawEvent(after.handle))),
        kind => Err(Failure::invalid(format!("{kind} is no KVFERRY_AFTER_"))),
    }
}

fn stats_of(stats: &TransferStats) -> kvferry_transfer_stats {
    kvferry_transfer_stats {
        size: size_of::<kvferry_transfer_stats>(),
        bytes: stats.bytes,
        pairs: stats.descriptors as u64,
        streams: u32::try_from(stats.streams).unwrap_or(u32::MAX),
        reserved: 0,
        transport: structs::fixed(stats.transport.map_or("", |transport| transport.as_str())),
    }
}

/// Reports an outcome: its figures, or its error.
///
/// # Safety
/// `stats` is null or a structure whose field `size` is right.
unsafe fn report(
    outcome: kvferry::Result<TransferStats>,
    stats: *mut kvferry_transfer_stats,
) -> Outcome {
    let moved = stats_of(&outcome?);
    // SAFETY: the caller's promise.
    unsafe { structs::write(stats, &moved, "the transfer's figures") }?;
    Ok(0)
}

/// A callback of the caller, to be called once from any thread.
struct Callback {
    done: unsafe extern "C" fn(*mut c_void, *const kvferry_error, *const kvferry_transfer_stats),
    user: *mut c_void,
}

// SAFETY: the header says that the callback runs on any thread; the pointer is passed on, not used.
unsafe impl Send for Callback {}

impl Callback {
    fn call(self, outcome: kvferry::Result<TransferStats>) {
        let (error, stats) = match outcome {
            Ok(stats) => (None, Some(stats_of(&stats))),
            Err(error) => (Some(error::of(&Failure::from(error))), None),
        };
        let error = error.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let stats = stats.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the caller gave a function of this type, to be called with `user`.
        unsafe { (self.done)(self.user, error, stats) }
    }
}

/// Whom a transfer is with, and which way it goes.
#[derive(Clone, Copy)]
pub(crate) enum Route {
    Write(*const kvferry_peer),
    Read(*const kvferry_peer),
    WriteFile(*const kvferry_agent),
    ReadFile(*const kvferry_agent),
}

impl Route {
    fn run(self, batch: &Batch, options: &Options<'_>) -> Result<TransferStats, Failure> {
        Ok(match self {
            Self::Write(peer) => handles::look_up::<Peer, _>(peer)?.write(batch, options),
            Self::Read(peer) => handles::look_up::<Peer, _>(peer)?.read(batch, options),
            Self::WriteFile(agent) => {
                handles::look_up::<Agent, _>(agent)?.files().write(batch, options)
            }
            Self::ReadFile(agent) => {
                handles::look_up::<Agent, _>(agent)?.files().read(batch, options)
            }
        }?)
    }

    fn start(self, batch: &Batch, options: &Options<'_>) -> Result<Transfer, Failure> {
        Ok(match self {
            Self::Write(peer) => handles::look_up::<Peer, _>(peer)?.write_async(batch, options),
            Self::Read(peer) => handles::look_up::<Peer, _>(peer)?.read_async(batch, options),
            Self::WriteFile(agent) => {
                handles::look_up::<Agent, _>(agent)?.files().write_async(batch, options)
            }
            Self::ReadFile(agent) => {
                handles::look_up::<Agent, _>(agent)?.files().read_async(batch, options)
            }
        })
    }
}

/// Copies the batch, ordered behind `after`: the caller may change the batch while the transfer runs. The memory that it
/// names by address may be a GPU's.
///
/// # Safety
/// Streams and events in `after` exist.
unsafe fn snapshot(
    route: Route,
    batch: *const kvferry_batch,
    after: &[Order],
) -> Result<Batch, Failure> {
    let mut batch = handles::look_up::<SharedBatch, _>(batch)?.lock().clone();
    if let Route::Write(peer) | Route::Read(peer) = route {
        handles::look_up::<Peer, _>(peer)?.find_device_memory(&mut batch)?;
    }
    // SAFETY: the caller's promise.
    unsafe { kvferry_cuda::order(&mut batch, after) }
        .map_err(|error| Failure::invalid(error.to_string()))?;
    Ok(batch)
}

/// # Safety
/// As the functions that call it.
pub(crate) unsafe fn run(
    route: Route,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    stats: *mut kvferry_transfer_stats,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let wish = unsafe { read(options) }?;
        if wish.done.is_some() {
            return Err(Failure::invalid("a call that waits takes no callback"));
        }
        // SAFETY: the caller's promise.
        let batch = unsafe { snapshot(route, batch, &wish.after) }?;
        let moved = route.run(&batch, &wish.options)?;
        // SAFETY: the caller's promise.
        unsafe { report(Ok(moved), stats) }
    })
}

/// # Safety
/// As the functions that call it.
pub(crate) unsafe fn start(
    route: Route,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    transfer: *mut *mut kvferry_transfer,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let wish = unsafe { read(options) }?;
        if wish.done.is_none() && transfer.is_null() {
            let what = "the place for the transfer is NULL, and there is no callback";
            return Err(Failure::invalid(what));
        }
        // SAFETY: the caller's promise.
        let batch = unsafe { snapshot(route, batch, &wish.after) }?;
        let started = route.start(&batch, &wish.options)?;
        if !transfer.is_null() {
            let handle = handles::pointer(handles::add(started.clone()));
            // SAFETY: the caller's promise.
            unsafe { guard::store(transfer, handle, "the place for the transfer") }?;
        }
        // Last, because the callback may run within this call and use the handle.
        if let Some(done) = wish.done {
            let callback = Callback { done, user: wish.user };
            started.on_end(move |outcome| callback.call(outcome));
        }
        Ok(0)
    })
}

/// Writes a batch to the peer's memory and waits. `options` and `stats` may be NULL.
///
/// When it returns, kvferry does not read the local memory any more. After an error, `quiesced` says
/// whether it is certain that no more bytes arrive at the peer.
///
/// Any thread; moves the bytes on this one. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options`, `stats` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_write(
    peer: *const kvferry_peer,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    stats: *mut kvferry_transfer_stats,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run(Route::Write(peer), batch, options, stats, error) }
}

/// Reads a batch from the peer's memory and waits, as `kvferry_write`. When it returns, kvferry does not
/// write the local memory any more.
///
/// Any thread; moves the bytes on this one. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options`, `stats` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_read(
    peer: *const kvferry_peer,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    stats: *mut kvferry_transfer_stats,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run(Route::Read(peer), batch, options, stats, error) }
}

/// Starts writing a batch and returns. The transfer's end is seen by `options->done`, by
/// `kvferry_transfer_fd`, or by asking. `transfer` may be NULL if there is a callback. The batch may be
/// changed or freed at once; local memory that is not registered stays valid until the end.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options` and `error` are null or structures whose field `size` is right; `transfer` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_write_async(
    peer: *const kvferry_peer,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    transfer: *mut *mut kvferry_transfer,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { start(Route::Write(peer), batch, options, transfer, error) }
}

/// Starts reading a batch, as `kvferry_write_async`.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options` and `error` are null or structures whose field `size` is right; `transfer` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_read_async(
    peer: *const kvferry_peer,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    transfer: *mut *mut kvferry_transfer,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { start(Route::Read(peer), batch, options, transfer, error) }
}

/// The transfer's outcome, waiting for it for `timeout_ms` at most; 0 does not wait, `UINT64_MAX` waits
/// without limit. `KVFERRY_PENDING` while it runs. Every call returns the same outcome. `stats` may be
/// NULL.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `stats` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_transfer_wait(
    transfer: *const kvferry_transfer,
    timeout_ms: u64,
    stats: *mut kvferry_transfer_stats,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let transfer = handles::look_up::<Transfer, _>(transfer)?;
        let outcome = match timeout_ms {
            0 => transfer.outcome(),
            u64::MAX => transfer.wait(None),
            some => transfer.wait(limit(some).unwrap_or(Duration::ZERO)),
        };
        match outcome {
            None => Ok(KVFERRY_PENDING),
            // SAFETY: the caller's promise.
            Some(outcome) => unsafe { report(outcome, stats) },
        }
    })
}

/// Cancels the transfer. Its outcome comes once the peer has confirmed that no bytes arrive any more, or
/// can't confirm it.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_transfer_cancel(
    transfer: *mut kvferry_transfer,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::look_up::<Transfer, _>(transfer)?.cancel();
        Ok(0)
    })
}

/// A descriptor for `poll` that is readable once the transfer has ended. It belongs to the handle: do not
/// close it, and do not use it after `kvferry_transfer_free`.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `fd` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_transfer_fd(
    transfer: *const kvferry_transfer,
    fd: *mut c_int,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let transfer = handles::look_up::<Transfer, _>(transfer)?;
        let descriptor = transfer.event_fd()?.as_raw_fd();
        // SAFETY: the caller's promise.
        unsafe { guard::store(fd, descriptor, "the place for the descriptor") }?;
        Ok(0)
    })
}

/// Frees the handle. A transfer that runs goes on, and its callback is called.
///
/// Any thread; also from the transfer's callback. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_transfer_free(
    transfer: *mut kvferry_transfer,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::take::<Transfer, _>(transfer)?;
        Ok(0)
    })
}
