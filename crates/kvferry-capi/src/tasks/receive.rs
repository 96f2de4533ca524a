//! Receive tasks.

use crate::error::kvferry_error;
use crate::guard;
use crate::handles::{self, OwnedRecv};
use crate::tasks::driver::Endpoint;
use crate::tasks::endpoint::{self, kvferry_task_options, kvferry_task_part, kvferry_tasks};
use crate::tasks::state::Places;
use kvferry_proto::tasks::Wanted;
use std::ffi::{c_char, c_int};
use std::sync::Arc;

/// A receive task. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_recv_task(());

/// Adds a receive task: blocks to be filled by the sender that offers `key`. The sender may have come
/// before. Blocks that the sender offers and this list lacks are ignored.
///
/// The memory may be written until the task has ended, by this process alone, and is not after that.
/// `KVFERRY_DUPLICATE`: the key has a task, which is not changed.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `key` is text, `parts` has `count` elements; `options` and `error` are null or structures whose field
/// `size` is right; `task` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_recv_task_start(
    tasks: *const kvferry_tasks,
    key: *const c_char,
    parts: *const kvferry_task_part,
    count: usize,
    options: *const kvferry_task_options,
    task: *mut *mut kvferry_recv_task,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let owner: Arc<Endpoint> = handles::look_up(tasks)?;
        // SAFETY: the caller's promise; the place is tried before anything is started.
        let (key, parts, wish) = unsafe {
            guard::store(task, std::ptr::null_mut(), "the place for the task")?;
            (
                guard::text(key, "the task's key")?,
                guard::array(parts, count, "the list of parts")?,
                endpoint::read(options, owner.agent())?,
            )
        };
        let places: Result<Places, _> =
            parts.iter().map(|part| endpoint::place(owner.agent(), part)).collect();
        let places = places?;
        // SAFETY: the caller's promise.
        let after = unsafe { wish.order(&places) }?;
        let mut at = 0;
        let wanted = endpoint::blocks(parts).map(|block| {
            let lens = block.iter().zip(&places[at..]);
            let lens = lens.map(|(part, place)| place.as_ref().map_or(0, |_| part.len)).collect();
            at += block.len();
            Wanted { key: block[0].key, lens }
        });
        let wanted = wanted.collect();
        let started = owner.recv(key, wanted, (places, after), wish.budget, wish.done);
        let (id, end) = started.map_err(endpoint::refused)?;
        let handle = handles::pointer(handles::add(OwnedRecv { owner, id, end }));
        // SAFETY: the caller's promise.
        unsafe { guard::store(task, handle, "the place for the task") }?;
        Ok(0)
    })
}

/// The task's outcome, as `kvferry_send_task_wait`. Anything but `KVFERRY_PENDING` says that nothing
/// writes to the task's memory any more.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_recv_task_wait(
    task: *const kvferry_recv_task,
    timeout_ms: u64,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || endpoint::wait(&handles::look_up::<OwnedRecv, _>(task)?.end, timeout_ms))
}

/// Cancels the task. It has ended when this returns, unless its memory is being written: then it ends
/// when that has stopped. Without effect on a task that has ended.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_recv_task_cancel(
    task: *mut kvferry_recv_task,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let recv = handles::look_up::<OwnedRecv, _>(task)?;
        recv.owner.cancel_recv(recv.id);
        Ok(0)
    })
}

/// Cancels the task if it runs, waits until its memory is not written any more, and frees the handle.
/// Another task may have the key then. Until it has, senders that come to the key of a cancelled task are
/// refused, as long as the task's time has not passed.
///
/// Any thread, callbacks included. Blocks. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_recv_task_free(
    task: *mut kvferry_recv_task,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let recv = handles::take::<OwnedRecv, _>(task)?;
        recv.owner.free(recv.id, &recv.end);
        Ok(0)
    })
}
