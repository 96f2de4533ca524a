//! Batches: pairs of local and remote ranges that one transfer moves.

use crate::error::kvferry_error;
use crate::failure::Failure;
use crate::guard;
use crate::handles::{self, OwnedRegion, SharedBatch};
use crate::region::{kvferry_region, kvferry_remote};
use kvferry::Batch;
use kvferry_sys::sync::Mutex;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Pairs of ranges. A handle, not an address. A batch may be used in many transfers.
#[derive(Debug)]
pub struct kvferry_batch(());

/// A range of a local region and its place in a remote one, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_range {
    pub local_offset: u64,
    pub remote_offset: u64,
    pub len: u64,
}

/// Local memory, registered or not, and its address in the peer's process.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_addresses {
    pub local: *mut c_void,
    pub remote: u64,
    pub len: u64,
}

/// Makes an empty batch with room for `capacity` pairs.
///
/// Any thread; also after a fork.
///
/// # Safety
/// `batch` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_batch_new(
    capacity: usize,
    batch: *mut *mut kvferry_batch,
    error: *mut kvferry_error,
) -> c_int {
    /// More than this is taken when it is needed.
    const CAPACITY_MAX: usize = 1 << 20;
    guard::run(error, || {
        // SAFETY: the caller's promise.
        unsafe { guard::store(batch, std::ptr::null_mut(), "the place for the batch") }?;
        let new = Batch::with_capacity(capacity.min(CAPACITY_MAX));
        let handle = handles::add::<SharedBatch>(Arc::new(Mutex::new(new)));
        // SAFETY: the caller's promise.
        unsafe { guard::store(batch, handles::pointer(handle), "the place for the batch") }?;
        Ok(0)
    })
}

/// Adds `count` ranges of `local` with their places in `remote`: all, or none on an error.
///
/// One thread at a time; a second one waits. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `remote` is null or a description, `ranges` has `count` elements; `error` is null or a structure whose
/// field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_batch_push(
    batch: *mut kvferry_batch,
    local: *const kvferry_region,
    remote: *const kvferry_remote,
    ranges: *const kvferry_range,
    count: usize,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let (remote, ranges) = unsafe {
            (guard::array(remote, 1, "the description")?, guard::array(ranges, count, "ranges")?)
        };
        let batch = handles::look_up::<SharedBatch, _>(batch)?;
        let local = handles::look_up::<OwnedRegion, _>(local)?;
        let remote = remote[0].to_remote();
        let mut batch = batch.lock();
        let pairs = ranges.iter().map(|range| (range.local_offset, range.remote_offset, range.len));
        batch.extend(&local.1, &remote, pairs)?;
        Ok(0)
    })
}

/// Adds `count` pairs by address: all, or none on an error. The peer checks that its addresses are
/// registered. Transfers move such batches with kvferry and stock Mooncake peers. The caller registers local memory
/// of a GPU with the agent before a transfer, which names in `after` the work that it comes after.
///
/// One thread at a time; a second one waits. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// The local memory stays valid until the end of every transfer that the batch is used in; `pairs` has
/// `count` elements; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_batch_push_addresses(
    batch: *mut kvferry_batch,
    pairs: *const kvferry_addresses,
    count: usize,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let pairs = unsafe { guard::array(pairs, count, "pairs") }?;
        let batch = handles::look_up::<SharedBatch, _>(batch)?;
        let pairs = pairs.iter().map(|pair| Ok((pair.local.cast(), pair.remote, pair.len)));
        // SAFETY: the caller promises the local memory.
        unsafe { batch.lock().extend_raw::<Failure>(pairs) }?;
        Ok(0)
    })
}

/// How many pairs the batch has, and their bytes. Each place may be NULL.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `pairs` and `bytes` are null or can be written; `error` is null or a structure whose field `size` is
/// right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_batch_size(
    batch: *const kvferry_batch,
    pairs: *mut usize,
    bytes: *mut u64,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let batch = handles::look_up::<SharedBatch, _>(batch)?;
        let (len, sum) = {
            let batch = batch.lock();
            (batch.len(), batch.bytes())
        };
        // SAFETY: the caller's promise.
        unsafe {
            if !pairs.is_null() {
                guard::store(pairs, len, "pairs")?;
            }
            if !bytes.is_null() {
                guard::store(bytes, sum, "bytes")?;
            }
        }
        Ok(0)
    })
}

/// Removes all pairs. Transfers that use the batch are not changed.
///
/// One thread at a time; a second one waits. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_batch_clear(
    batch: *mut kvferry_batch,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::look_up::<SharedBatch, _>(batch)?.lock().clear();
        Ok(0)
    })
}

/// Frees the handle. Transfers that use the batch go on.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_batch_free(
    batch: *mut kvferry_batch,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::take::<SharedBatch, _>(batch)?;
        Ok(0)
    })
}
