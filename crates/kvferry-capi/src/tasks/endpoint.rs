//! The tasks of an agent.

use crate::agent::kvferry_agent;
use crate::error::{self, kvferry_error};
use crate::failure::{self, Failure};
use crate::guard::{self, Outcome};
use crate::handles;
use crate::structs::{self, Versioned};
use crate::tasks::driver::Endpoint;
use crate::tasks::end::{Done, End};
use crate::tasks::state::Places;
use crate::transfer::{kvferry_after, order_of};
use kvferry::{After, Agent, Batch, ErrorKind, Region};
use kvferry_cuda::Order;
use kvferry_proto::tasks::{self, Code};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

/// The send and receive tasks of an agent. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_tasks(());

/// A part of a block. Parts of one block follow each other and have one key; they meet by their place.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_task_part {
    /// The key of the block.
    pub key: i64,
    /// Memory in one registered region of the agent, the host's or a GPU's; NULL if there is no such part.
    pub address: *mut c_void,
    pub len: u64,
}

/// Called once, when a task has ended. `error` is NULL if all bytes are in place; it does not live longer
/// than the call.
///
/// Runs on the thread of the tasks, with all signals blocked. It must not throw, and should not block:
/// other tasks wait for the thread.
pub type kvferry_task_done =
    Option<unsafe extern "C" fn(user: *mut c_void, error: *const kvferry_error)>;

/// Settings of a task. Set `size` to `sizeof(kvferry_task_options)`, and the rest to zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_task_options {
    pub size: usize,
    /// Time for the whole task, the wait for the other side included; 0 is the agent's.
    pub timeout_ms: u64,
    pub done: kvferry_task_done,
    /// Passed to `done`.
    pub user: *mut c_void,
    /// The work that the task comes after, at least one element if the task has memory of a GPU: the work that computes
    /// the sent bytes, or that used the memory of the receive task. The task waits for it; the call does not. Streams
    /// and events exist until the call returns.
    pub after: *const kvferry_after,
    pub after_count: usize,
}

// SAFETY: `repr(C)`, begins with its size; zeroes are no function. Other bytes are what the caller wrote.
unsafe impl Versioned for kvferry_task_options {}

/// Counts of what the tasks of an agent hold. Set `size` to `sizeof(kvferry_task_gauges)`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_task_gauges {
    pub size: usize,
    /// Sends that have not ended.
    pub sends: u64,
    /// Receive tasks that were not freed.
    pub receives: u64,
    /// Offers of senders that wait for a task.
    pub parked: u64,
    /// Keys that were stolen or whose task was cancelled, until the time of the task has passed.
    pub given_up: u64,
    /// Tasks whose memory is being written.
    pub reads: u64,
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers only.
unsafe impl Versioned for kvferry_task_gauges {}

/// A callback of the caller, to be called once from any thread.
struct Callback {
    done: unsafe extern "C" fn(*mut c_void, *const kvferry_error),
    user: *mut c_void,
}

// SAFETY: the header says that the callback runs on any thread; the pointer is passed on, not used.
unsafe impl Send for Callback {}

/// The caller's options.
pub(crate) struct TaskOptions {
    pub(crate) budget: Duration,
    pub(crate) done: Option<Done>,
    after: Vec<Order>,
}

impl TaskOptions {
    /// The work that a task with memory in these places waits for.
    ///
    /// # Safety
    /// The streams and events of the options exist.
    pub(crate) unsafe fn order(&self, places: &Places) -> Result<After, Failure> {
        let mut batch = Batch::new();
        for (region, _) in places.iter().flatten().filter(|(region, _)| region.is_device()) {
            batch.push_to_address(region, 0, 1, 1)?;
        }
        // SAFETY: the caller's promise.
        unsafe { kvferry_cuda::order(&mut batch, &self.after) }
            .map_err(|error| Failure::invalid(error.to_string()))?;
        Ok(batch.after().clone())
    }
}

/// # Safety
/// `options` is null or a structure that is what it says.
pub(crate) unsafe fn read(
    options: *const kvferry_task_options,
    agent: &Agent,
) -> Result<TaskOptions, Failure> {
    // SAFETY: the caller's promise.
    let theirs = unsafe { structs::read(options, "the task's options") }?;
    let user = theirs.user;
    let done = theirs.done.map(|done| {
        let callback = Callback { done, user };
        let done: Done = Box::new(move |outcome| callback.call(outcome));
        done
    });
    let own = Duration::from_millis(agent.config().timeout_ms);
    // SAFETY: the caller's promise.
    let after = unsafe { guard::array(theirs.after, theirs.after_count, "after") }?;
    let after = after.iter().map(order_of).collect::<Result<_, _>>()?;
    Ok(TaskOptions { budget: crate::peer::limit(theirs.timeout_ms).unwrap_or(own), done, after })
}

impl Callback {
    fn call(self, outcome: &tasks::Outcome) {
        let error = failure(outcome).map(|failure| error::of(&failure));
        let error = error.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the caller gave a function of this type, to be called with `user`.
        unsafe { (self.done)(self.user, error) }
    }
}

/// The error of an outcome; `None` if the task ended well.
pub(crate) fn failure(outcome: &tasks::Outcome) -> Option<Failure> {
    let code = match outcome.code {
        Code::Done => return None,
        Code::Cancelled => failure::code(ErrorKind::Cancelled),
        Code::Timeout => failure::code(ErrorKind::Deadline),
        Code::Mismatch => failure::KVFERRY_MISMATCH,
        Code::Duplicate => failure::KVFERRY_DUPLICATE,
        Code::Unreachable => failure::code(ErrorKind::Unreachable),
        Code::PeerLost => failure::code(ErrorKind::PeerReset),
        Code::ReadFailed => failure::code(ErrorKind::Io),
        Code::Busy => failure::code(ErrorKind::Busy),
        Code::Invalid => failure::code(ErrorKind::InvalidArgument),
        Code::TooLarge => failure::code(ErrorKind::TooLarge),
        // The same code as for transfers that come after work which fails.
        Code::NotComputed => failure::code(ErrorKind::Internal),
        // A code of a later version.
        _ => failure::code(ErrorKind::Protocol),
    };
    Some(Failure::new(code, outcome.text.clone()))
}

pub(crate) fn refused(outcome: tasks::Outcome) -> Failure {
    failure(&outcome).unwrap_or_else(|| Failure::invalid(outcome.text))
}

/// Waits for a task's end and reports it.
pub(crate) fn wait(end: &End, timeout_ms: u64) -> Outcome {
    let timeout = match timeout_ms {
        u64::MAX => None,
        some => Some(Duration::from_millis(some)),
    };
    match end.wait(timeout) {
        None => Ok(failure::KVFERRY_PENDING),
        Some(outcome) => failure(&outcome).map_or(Ok(0), Err),
    }
}

/// The region that holds a part, and the offset in it; `None` for a part that is not there.
pub(crate) fn place(
    agent: &Agent,
    part: &kvferry_task_part,
) -> Result<Option<(Region, u64)>, Failure> {
    if part.address.is_null() || part.len == 0 {
        return Ok(None);
    }
    let (address, key) = (part.address.addr(), part.key);
    let held = agent.region_holding(address, part.len);
    let held = held.ok_or_else(|| {
        let len = part.len;
        let text = format!(
            "{len} bytes at {address:#x} of block {key} are not in one registered region; register them"
        );
        Failure::new(failure::code(ErrorKind::NotRegistered), text)
    })?;
    let offset = (address - held.addr()) as u64;
    Ok(Some((held, offset)))
}

/// Splits parts into blocks: parts that follow each other and have one key.
pub(crate) fn blocks(parts: &[kvferry_task_part]) -> impl Iterator<Item = &[kvferry_task_part]> {
    parts.chunk_by(|one, next| one.key == next.key)
}

/// Starts the tasks of an agent. An agent has them once; its peers' messages go to them.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `tasks` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_tasks_start(
    agent: *const kvferry_agent,
    tasks: *mut *mut kvferry_tasks,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise; the place is tried before anything is started.
        unsafe { guard::store(tasks, std::ptr::null_mut(), "the place for the tasks") }?;
        let endpoint = Endpoint::start(handles::look_up::<Agent, _>(agent)?)?;
        let handle = handles::pointer(handles::add(endpoint));
        // SAFETY: the caller's promise.
        unsafe { guard::store(tasks, handle, "the place for the tasks") }?;
        Ok(0)
    })
}

/// Cancels all tasks, waits until no memory is written and all callbacks have returned, and frees the
/// handle. Handles of tasks stay valid and are freed on their own.
///
/// Any thread; not from a callback. Before the agent is freed. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_tasks_free(
    tasks: *mut kvferry_tasks,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let endpoint = handles::look_up::<Arc<Endpoint>, _>(tasks)?;
        not_from_callback(&endpoint)?;
        handles::take::<Arc<Endpoint>, _>(tasks)?.close();
        Ok(0)
    })
}

pub(crate) fn not_from_callback(endpoint: &Endpoint) -> Result<(), Failure> {
    if endpoint.is_own_thread(std::thread::current().id()) {
        return Err(Failure::invalid("this call waits for callbacks; a callback can't make it"));
    }
    Ok(())
}

/// Counts what the tasks hold. All are zero once every task has ended and was freed, and their time has
/// passed.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `gauges` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_tasks_held(
    tasks: *const kvferry_tasks,
    gauges: *mut kvferry_task_gauges,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let held = handles::look_up::<Arc<Endpoint>, _>(tasks)?.gauges();
        let ours = kvferry_task_gauges {
            size: 0,
            sends: held.sends as u64,
            receives: held.recvs as u64,
            parked: held.parked as u64,
            given_up: held.taken as u64,
            reads: held.reads as u64,
        };
        // SAFETY: the caller's promise.
        unsafe { structs::write(gauges, &ours, "the gauges of tasks") }?;
        Ok(0)
    })
}

/// Takes a key from the receiver: no sender that comes later finds its task, and a new task may use the
/// key. A task that no sender has found ends as cancelled; one whose memory is being written goes on.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `key` is text; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_tasks_steal(
    tasks: *const kvferry_tasks,
    key: *const c_char,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let key = unsafe { guard::text(key, "the task's key") }?;
        handles::look_up::<Arc<Endpoint>, _>(tasks)?.steal(key);
        Ok(0)
    })
}
