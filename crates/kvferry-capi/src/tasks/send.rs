//! Send tasks.

use crate::error::kvferry_error;
use crate::failure::Failure;
use crate::guard;
use crate::handles::{self, OwnedSend};
use crate::tasks::driver::Endpoint;
use crate::tasks::endpoint::{self, kvferry_task_options, kvferry_task_part, kvferry_tasks};
use crate::tasks::state::Places;
use kvferry::{Agent, RegionId};
use kvferry_proto::tasks::{Offered, Part};
use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::sync::Arc;

/// A send. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_send_task(());

/// The blocks that a send offers.
struct Offer {
    /// Descriptions of the regions that hold the parts.
    regions: Vec<Vec<u8>>,
    blocks: Vec<Offered>,
    /// A place in each of the regions.
    places: Places,
}

fn offer(agent: &Agent, parts: &[kvferry_task_part]) -> Result<Offer, Failure> {
    let mut regions = Vec::new();
    let mut places = Places::new();
    let mut numbers = HashMap::<RegionId, u32>::new();
    let mut blocks = Vec::new();
    for block in endpoint::blocks(parts) {
        let mut ranges = Vec::with_capacity(block.len());
        for part in block {
            let Some((region, offset)) = endpoint::place(agent, part)? else {
                ranges.push(Part(0, 0, 0));
                continue;
            };
            let number = *numbers.entry(region.id()).or_insert_with(|| {
                regions.push(region.remote().to_bytes());
                places.push(Some((region.clone(), offset)));
                regions.len() as u32 - 1
            });
            ranges.push(Part(number, offset, part.len));
        }
        blocks.push(Offered(block[0].key, ranges));
    }
    Ok(Offer { regions, blocks, places })
}

/// Offers blocks under a key to the receiver at `address`, which reads them. The task ends when the
/// receiver has them, or can't have them any more; the memory is free again then, and must stay
/// registered, readable for peers and unchanged until then. Memory of a GPU is offered once the work in `after` of the
/// options has run.
///
/// `KVFERRY_MISMATCH`: the receiver wants a block that is not offered, or of another length.
/// `KVFERRY_DUPLICATE`: another sender has the key. `task` may be NULL if there is a callback.
///
/// Any thread. Blocks while a host name is resolved. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `address` and `key` are text, `parts` has `count` elements; `options` and `error` are null or
/// structures whose field `size` is right; `task` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_send_task_start(
    tasks: *const kvferry_tasks,
    address: *const c_char,
    key: *const c_char,
    parts: *const kvferry_task_part,
    count: usize,
    options: *const kvferry_task_options,
    task: *mut *mut kvferry_send_task,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let owner: Arc<Endpoint> = handles::look_up(tasks)?;
        // SAFETY: the caller's promise.
        let (address, key, parts, wish) = unsafe {
            (
                guard::text(address, "the receiver's address")?,
                guard::text(key, "the task's key")?,
                guard::array(parts, count, "the list of parts")?,
                endpoint::read(options, owner.agent())?,
            )
        };
        if wish.done.is_none() && task.is_null() {
            let what = "the place for the task is NULL, and there is no callback";
            return Err(Failure::invalid(what));
        }
        let Offer { regions, blocks, places } = offer(owner.agent(), parts)?;
        // SAFETY: the caller's promise.
        let after = unsafe { wish.order(&places) }?;
        let peer = owner.agent().peer(address)?;
        let started = owner.send(peer, key, (regions, blocks, after), wish.budget, wish.done);
        let (id, end) = started.map_err(endpoint::refused)?;
        if !task.is_null() {
            let handle = handles::pointer(handles::add(OwnedSend { owner, id, end }));
            // SAFETY: the caller's promise.
            unsafe { guard::store(task, handle, "the place for the task") }?;
        }
        Ok(0)
    })
}

/// The task's outcome, waiting for it for `timeout_ms` at most; 0 does not wait, `UINT64_MAX` waits
/// without limit. `KVFERRY_PENDING` while it runs.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_send_task_wait(
    task: *const kvferry_send_task,
    timeout_ms: u64,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || endpoint::wait(&handles::look_up::<OwnedSend, _>(task)?.end, timeout_ms))
}

/// Ends the task as cancelled. The receiver does not use what it has read. Without effect on a task that
/// has ended.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_send_task_cancel(
    task: *mut kvferry_send_task,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let send = handles::look_up::<OwnedSend, _>(task)?;
        send.owner.cancel_send(send.id);
        Ok(0)
    })
}

/// Frees the handle. A task that runs goes on, and its callback is called.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_send_task_free(
    task: *mut kvferry_send_task,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::take::<OwnedSend, _>(task)?;
        Ok(0)
    })
}
