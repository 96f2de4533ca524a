//! Mooncake's C API: batches of tasks, and notifications.

#![allow(non_snake_case, reason = "the names are Mooncake's")]

use crate::error;
use crate::failure::Failure;
use crate::guard;
use crate::transfer_engine::{code, segment_id_t, transfer_engine_t, with};
use kvferry::Notification;
use kvferry_mooncake::batches::{self, Request, TaskState};
use kvferry_mooncake::codes;
use std::ffi::{CStr, c_char, c_int, c_void};

/// A batch's number. Numbers are never used again.
pub type batch_id_t = u64;

/// The engine's own segment.
pub const LOCAL_SEGMENT: c_int = 0;
/// No batch.
pub const INVALID_BATCH: batch_id_t = u64::MAX;
/// Copies from the segment to local memory.
pub const OPCODE_READ: c_int = 0;
/// Copies from local memory to the segment.
pub const OPCODE_WRITE: c_int = 1;
/// Not returned.
pub const STATUS_WAITING: c_int = 0;
/// The task's bytes move, or wait to be moved.
pub const STATUS_PENDING: c_int = 1;
/// Not returned.
pub const STATUS_INVALID: c_int = 2;
/// Not returned.
pub const STATUS_CANCELED: c_int = 3;
/// The task's bytes have arrived.
pub const STATUS_COMPLETED: c_int = 4;
/// Not returned: a task that ran out of time has failed.
pub const STATUS_TIMEOUT: c_int = 5;
/// The transfer failed, and nothing touches the task's local memory any more.
pub const STATUS_FAILED: c_int = 6;

/// One task.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct transfer_request {
    pub opcode: c_int,
    pub source: *mut c_void,
    pub target_id: segment_id_t,
    pub target_offset: u64,
    pub length: u64,
}
pub type transfer_request_t = transfer_request;

/// How far a task is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct transfer_status {
    pub status: c_int,
    pub transferred_bytes: u64,
}
pub type transfer_status_t = transfer_status;

/// A notification: two texts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct notify_msg {
    pub name: *mut c_char,
    pub msg: *mut c_char,
}
pub type notify_msg_t = notify_msg;

/// Makes a batch. Its size is not a limit: a batch holds up to 1 048 576 tasks. An engine has at most
/// 16 384 batches; beyond that, the oldest one whose tasks have all ended is dropped.
#[unsafe(export_name = "kvferry_mooncake_allocateBatchID")]
pub extern "C" fn allocateBatchID(engine: transfer_engine_t, batch_size: usize) -> batch_id_t {
    let _ = batch_size;
    with(engine, INVALID_BATCH, |engine| {
        let number = engine.allocate_batch();
        if number == batches::INVALID_BATCH {
            error::remember(&engine.last_error());
        }
        Ok(number)
    })
}

/// Frees a batch whose tasks have ended. -4: some have not.
#[unsafe(export_name = "kvferry_mooncake_freeBatchID")]
pub extern "C" fn freeBatchID(engine: transfer_engine_t, batch_id: batch_id_t) -> c_int {
    code(engine, |engine| Ok(engine.free_batch(batch_id)))
}

/// # Safety
/// `entries` has `count` elements, whose memory stays valid until the tasks have ended.
unsafe fn submit(
    engine: transfer_engine_t,
    batch_id: batch_id_t,
    entries: *const transfer_request,
    count: usize,
    notify: Option<Notification>,
) -> c_int {
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        let entries = unsafe { guard::array(entries, count, "the list of requests") }?;
        let request = |entry: &transfer_request| {
            let write = match entry.opcode {
                OPCODE_READ => false,
                OPCODE_WRITE => true,
                other => return Err(Failure::invalid(format!("{other} is no OPCODE_"))),
            };
            Ok(Request {
                write,
                local: entry.source.expose_provenance() as u64,
                segment: entry.target_id,
                remote: entry.target_offset,
                len: entry.length,
            })
        };
        let requests = entries.iter().map(request).collect::<Result<Vec<_>, _>>()?;
        Ok(engine.submit_tasks(batch_id, &requests, notify))
    })
}

/// Adds tasks to a batch and starts them: all, or none if the code is not 0. Task numbers go on counting.
/// The tasks of one call that go to one segment in one direction end alike.
///
/// Any thread.
///
/// # Safety
/// `entries` has `count` elements, whose memory stays valid until the tasks have ended.
#[unsafe(export_name = "kvferry_mooncake_submitTransfer")]
pub unsafe extern "C" fn submitTransfer(
    engine: transfer_engine_t,
    batch_id: batch_id_t,
    entries: *mut transfer_request,
    count: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { submit(engine, batch_id, entries, count, None) }
}

/// Does what `submitTransfer` does. The message goes to the owner of the first task's segment when all tasks of this
/// call are complete, and not if one fails.
///
/// # Safety
/// As `submitTransfer`; the texts of `notify_msg` are null or text.
#[unsafe(export_name = "kvferry_mooncake_submitTransferWithNotify")]
pub unsafe extern "C" fn submitTransferWithNotify(
    engine: transfer_engine_t,
    batch_id: batch_id_t,
    entries: *mut transfer_request,
    count: usize,
    notify_msg: notify_msg_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        match texts(notify_msg) {
            Ok((name, message)) => {
                let notify = Notification::new(name, message);
                submit(engine, batch_id, entries, count, Some(notify))
            }
            Err(failure) => {
                error::remember(&failure.text);
                codes::INVALID
            }
        }
    }
}

/// The name and the bytes of a message; null is empty.
///
/// # Safety
/// The texts are null or text.
unsafe fn texts(message: notify_msg_t) -> Result<(String, Vec<u8>), Failure> {
    let bytes = |text: *const c_char| {
        if text.is_null() {
            return Vec::new();
        }
        // SAFETY: not null, and the caller promises text.
        unsafe { CStr::from_ptr(text) }.to_bytes().to_vec()
    };
    let name = String::from_utf8(bytes(message.name))
        .map_err(|_| Failure::invalid("the notification's name is not UTF-8"))?;
    Ok((name, bytes(message.msg)))
}

/// Says how far a task is. After `STATUS_FAILED`, `kvferry_last_error` has the reason.
///
/// Any thread. Does not block, and takes no lock that transfers hold.
///
/// # Safety
/// `status` can be written.
#[unsafe(export_name = "kvferry_mooncake_getTransferStatus")]
pub unsafe extern "C" fn getTransferStatus(
    engine: transfer_engine_t,
    batch_id: batch_id_t,
    task_id: usize,
    status: *mut transfer_status,
) -> c_int {
    code(engine, |engine| {
        let state = match engine.task(batch_id, task_id) {
            Ok(state) => state,
            Err(code) => return Ok(code),
        };
        let (status_now, transferred_bytes) = match state {
            TaskState::Running => (STATUS_PENDING, 0),
            TaskState::Completed(len) => (STATUS_COMPLETED, len),
            TaskState::Failed => {
                error::remember(&engine.last_error());
                (STATUS_FAILED, 0)
            }
        };
        let now = transfer_status { status: status_now, transferred_bytes };
        // SAFETY: the caller's promise.
        unsafe { guard::store(status, now, "the place for the status") }?;
        Ok(codes::OK)
    })
}

/// Sends a message to the owner of a segment, after all tasks for it that are complete. Waits until the
/// peer has queued it.
///
/// # Safety
/// The texts of `notify_msg` are null or text.
#[unsafe(export_name = "kvferry_mooncake_genNotifyInEngine")]
pub unsafe extern "C" fn genNotifyInEngine(
    engine: transfer_engine_t,
    target_id: u64,
    notify_msg: notify_msg_t,
) -> c_int {
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        let (name, message) = unsafe { texts(notify_msg) }?;
        let unknown = |_| Failure::invalid(format!("no segment has the number {target_id}"));
        Ok(engine.notify(i32::try_from(target_id).map_err(unknown)?, name, message))
    })
}

/// Takes the messages that have arrived, in memory of `malloc`, for `freeNotifsMsgBuf`. NULL, and 0 in
/// `*size`, if there are none or on an error.
///
/// # Safety
/// `size` can be written.
#[unsafe(export_name = "kvferry_mooncake_getNotifsFromEngine")]
pub unsafe extern "C" fn getNotifsFromEngine(
    engine: transfer_engine_t,
    size: *mut c_int,
) -> *mut notify_msg_t {
    if !size.is_null() {
        // SAFETY: the caller's promise. Never negative, also without an engine.
        unsafe { size.write(0) };
    }
    with(engine, std::ptr::null_mut(), |engine| {
        // SAFETY: the caller's promise; the place is tried before anything is taken.
        unsafe { guard::store(size, 0, "the place for the number of messages") }?;
        let taken = engine.take_notifications();
        if taken.is_empty() {
            return Ok(std::ptr::null_mut());
        }
        let count =
            c_int::try_from(taken.len()).map_err(|_| Failure::invalid("too many messages"))?;
        // SAFETY: `malloc` has no conditions. The result is used only if it is not null.
        let list = unsafe { libc::malloc(taken.len() * size_of::<notify_msg_t>()) };
        let list = list.cast::<notify_msg_t>();
        if list.is_null() {
            return Err(Failure::invalid("there is no memory for the messages"));
        }
        for (at, message) in taken.iter().enumerate() {
            let entry =
                notify_msg { name: copied(message.name.as_bytes()), msg: copied(&message.message) };
            // SAFETY: the list has room for all of them.
            unsafe { list.add(at).write(entry) };
        }
        // SAFETY: as above.
        unsafe { guard::store(size, count, "the place for the number of messages") }?;
        Ok(list)
    })
}

/// Text of `malloc` up to the first NUL; null if there is no memory.
fn copied(bytes: &[u8]) -> *mut c_char {
    let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    // SAFETY: room for the bytes and a NUL.
    unsafe {
        let text: *mut u8 = libc::malloc(len + 1).cast();
        if !text.is_null() {
            text.copy_from_nonoverlapping(bytes.as_ptr(), len);
            text.add(len).write(0);
        }
        text.cast()
    }
}

/// Frees what `getNotifsFromEngine` returned. Accepts NULL.
///
/// # Safety
/// `msg` is null, or what `getNotifsFromEngine` returned, with `size` messages.
#[unsafe(export_name = "kvferry_mooncake_freeNotifsMsgBuf")]
pub unsafe extern "C" fn freeNotifsMsgBuf(msg: *mut notify_msg_t, size: c_int) -> c_int {
    if msg.is_null() {
        return codes::OK;
    }
    // SAFETY: the caller's promise.
    unsafe {
        for at in 0..usize::try_from(size).unwrap_or(0) {
            let entry = msg.add(at).read();
            libc::free(entry.name.cast());
            libc::free(entry.msg.cast());
        }
        libc::free(msg.cast());
    }
    codes::OK
}
