//! Notifications.

use crate::agent::kvferry_agent;
use crate::error::kvferry_error;
use crate::failure::{Failure, KVFERRY_IO, KVFERRY_PENDING};
use crate::guard;
use crate::handles;
use crate::peer::{kvferry_peer, limit};
use crate::structs::{self, Versioned};
use kvferry::{Agent, Notification, Options, Peer};
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd;

/// A message that arrived. Set `size` to `sizeof(kvferry_notification)`, and the rest to zero. The
/// pointers are valid until `kvferry_notification_clear`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_notification {
    pub size: usize,
    /// The sender's name.
    pub from: *const c_char,
    /// The message's name.
    pub name: *const c_char,
    /// Any bytes, and a NUL that `message_len` does not count.
    pub message: *const u8,
    pub message_len: usize,
    /// Memory that `kvferry_notification_clear` frees.
    pub memory: *mut c_void,
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers and addresses only.
unsafe impl Versioned for kvferry_notification {}

/// Sends a notification without a batch, after all transfers to the peer that are complete. Waits until
/// the peer has queued it, for `timeout_ms` at most; 0 is the agent's time limit.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `name` is text, `message` has `message_len` bytes; `error` is null or a structure whose field `size` is
/// right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_notify(
    peer: *const kvferry_peer,
    name: *const c_char,
    message: *const u8,
    message_len: usize,
    timeout_ms: u64,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let (name, message) = unsafe {
            let message = guard::array(message, message_len, "the message")?;
            (guard::text(name, "the notification's name")?, message)
        };
        let options = Options { timeout: limit(timeout_ms), ..Options::default() };
        handles::look_up::<Peer, _>(peer)?.notify(Notification::new(name, message), &options)?;
        Ok(0)
    })
}

/// Takes the oldest notification, waiting for it for `timeout_ms` at most; 0 does not wait.
/// `KVFERRY_PENDING` if none came in time. The caller frees what is filled in, with
/// `kvferry_notification_clear`.
///
/// Any thread; each notification goes to one. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `notification` is a structure whose field `size` is right; `error` is null or such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_notification_take(
    agent: *const kvferry_agent,
    timeout_ms: u64,
    notification: *mut kvferry_notification,
    error: *mut kvferry_error,
) -> c_int {
    const PLACE: &str = "the place for the notification";
    guard::run(error, || {
        if notification.is_null() {
            return Err(Failure::invalid(format!("{PLACE} is NULL")));
        }
        let nothing = filled(std::ptr::null_mut(), 0, 0, 0);
        // SAFETY: the caller's promise; the place is tried before anything is taken.
        unsafe {
            if notification.cast::<usize>().read_unaligned() < size_of::<kvferry_notification>() {
                return Err(Failure::invalid(format!("{PLACE}: set its field size to sizeof")));
            }
            structs::write(notification, &nothing, PLACE)?;
        }
        let agent = handles::look_up::<Agent, _>(agent)?;
        let wait = limit(timeout_ms).unwrap_or_default();
        let Some(taken) = agent.wait_notification(wait)? else { return Ok(KVFERRY_PENDING) };
        let copied = copy(&taken)?;
        // SAFETY: the caller's promise.
        unsafe { structs::write(notification, &copied, PLACE) }?;
        Ok(0)
    })
}

/// Frees the memory of a notification. Without effect on one that was cleared, and on NULL.
///
/// Any thread; also after a fork.
///
/// # Safety
/// `notification` is null, or a structure whose field `size` is right and that
/// `kvferry_notification_take` filled in or that is zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_notification_clear(notification: *mut kvferry_notification) {
    // SAFETY: the caller's promise.
    unsafe {
        if notification.is_null()
            || notification.cast::<usize>().read_unaligned() < size_of::<kvferry_notification>()
        {
            return;
        }
        let memory = (*notification).memory;
        let _ = structs::write(notification, &filled(std::ptr::null_mut(), 0, 0, 0), "it");
        libc::free(memory);
    }
}

/// A descriptor for `poll` that is readable while notifications are queued. It belongs to the agent: do
/// not close it, and do not use it after `kvferry_agent_free`.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `fd` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_notification_fd(
    agent: *const kvferry_agent,
    fd: *mut c_int,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let agent = handles::look_up::<Agent, _>(agent)?;
        let descriptor = agent.notification_fd()?.as_raw_fd();
        // SAFETY: the caller's promise.
        unsafe { guard::store(fd, descriptor, "the place for the descriptor") }?;
        Ok(0)
    })
}

/// The structure for memory that holds three texts, each with a NUL.
fn filled(memory: *mut u8, from: usize, name: usize, message: usize) -> kvferry_notification {
    kvferry_notification {
        size: 0,
        from: memory.cast(),
        name: memory.wrapping_add(if memory.is_null() { 0 } else { from + 1 }).cast(),
        message: memory.wrapping_add(if memory.is_null() { 0 } else { from + name + 2 }),
        message_len: message,
        memory: memory.cast(),
    }
}

/// Copies a notification into memory of `malloc`.
fn copy(taken: &Notification) -> Result<kvferry_notification, Failure> {
    let parts = [taken.from.as_bytes(), taken.name.as_bytes(), &taken.message];
    let total: usize = parts.iter().map(|part| part.len() + 1).sum();
    // SAFETY: `malloc` has no conditions.
    let memory: *mut u8 = unsafe { libc::malloc(total) }.cast();
    if memory.is_null() {
        return Err(Failure::new(KVFERRY_IO, "there is no memory for a notification"));
    }
    let mut at = memory;
    for part in parts {
        // SAFETY: the parts with their NULs have `total` bytes together.
        unsafe {
            at.copy_from_nonoverlapping(part.as_ptr(), part.len());
            at.add(part.len()).write(0);
            at = at.add(part.len() + 1);
        }
    }
    Ok(filled(memory, taken.from.len(), taken.name.len(), taken.message.len()))
}
