//! Batches of numbered tasks, as the C API has them.
//!
//! The tasks of one call that go to one segment in one direction are one transfer, and share its
//! outcome. When a transfer ends, its thread stores the outcome where [`MooncakeEngine::task`] reads
//! it: callers poll every task once per millisecond, and that takes no lock of the data path.
//!
//! Callers leave batches whose transfers failed. The oldest batch whose transfers have all ended is
//! dropped when there are too many. Numbers are counted up and never used again, so a stale, freed or
//! invented number is an error.

use crate::codes;
use crate::engine::MooncakeEngine;
use crate::notifier::Message;
use crate::refusal::{Answer, Refusal};
use crate::running::{Running, pointer};
use crate::transport::KIND;
use kvferry::{Batch, Error, Notification, Peer, TransferStats};
use kvferry_sys::sync::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};

/// Stands for no batch.
pub const INVALID_BATCH: u64 = u64::MAX;

/// The most batches of an engine.
const BATCHES_MAX: usize = 16_384;
/// The most tasks of a batch. Mooncake's limit is what the caller gave to `allocateBatchID`.
const TASKS_MAX: usize = 1 << 20;

/// A task, which copies bytes between local memory and a segment.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// True: to the segment's memory; false: from it.
    pub write: bool,
    /// The address in this process.
    pub local: u64,
    /// The segment's number.
    pub segment: i32,
    /// The address in the segment owner's process.
    pub remote: u64,
    /// Bytes to move. A task of no bytes completes at once.
    pub len: u64,
}

/// Progress of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Bytes move, or wait to be moved.
    Running,
    /// The bytes have arrived. The count is the task's length.
    Completed(u64),
    /// The transfer failed, and kvferry does not touch the task's local memory any more.
    Failed,
}

/// A transfer that several tasks share.
#[derive(Debug, Default)]
struct Group(OnceLock<Result<(), Error>>);

#[derive(Debug)]
struct Task {
    len: u64,
    group: Arc<Group>,
}

#[derive(Debug, Default)]
struct Tasks(RwLock<Vec<Task>>);

impl Tasks {
    fn have_ended(&self) -> bool {
        let tasks = self.0.read();
        tasks.iter().all(|task| task.group.0.get().is_some())
    }

    fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }
}

/// The batches of one engine, by number.
#[derive(Debug, Default)]
pub(crate) struct Batches(RwLock<BTreeMap<u64, Arc<Tasks>>>);

impl Batches {
    fn get(&self, number: u64) -> Answer<Arc<Tasks>> {
        let batches = self.0.read();
        let unknown = || Refusal::invalid(format_args!("no batch has the number {number}"));
        batches.get(&number).cloned().ok_or_else(unknown)
    }

    fn allocate(&self) -> Answer<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut batches = self.0.write();
        if batches.len() >= BATCHES_MAX {
            let ended = |tasks: &Tasks| !tasks.is_empty() && tasks.have_ended();
            let oldest = batches.iter().find(|(_, tasks)| ended(tasks)).map(|(number, _)| *number);
            let oldest = oldest.ok_or_else(|| {
                Refusal::new(codes::TOO_MANY, format_args!("{BATCHES_MAX} batches are in use"))
            })?;
            batches.remove(&oldest);
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        batches.insert(number, Arc::default());
        Ok(number)
    }

    fn free(&self, number: u64) -> Answer<()> {
        if !self.get(number)?.have_ended() {
            let why = format_args!("transfers of the batch {number} are not complete");
            return Err(Refusal::new(codes::BUSY, why));
        }
        self.0.write().remove(&number);
        Ok(())
    }
}

impl MooncakeEngine {
    /// The number of a new batch, or [`INVALID_BATCH`].
    pub fn allocate_batch(&self) -> u64 {
        let number = self.running().and_then(|running| running.batches.allocate());
        self.note(number).unwrap_or(INVALID_BATCH)
    }

    /// Frees a batch whose transfers have all ended.
    pub fn free_batch(&self, number: u64) -> i32 {
        self.code(self.running().and_then(|running| running.batches.free(number)))
    }

    /// Adds tasks to a batch and starts them: all, or none if the return code is not 0. The
    /// notification goes to the owner of the first task's segment when all tasks of this call are
    /// complete, and not if one fails.
    ///
    /// The caller's promise: the local memory stays valid until the tasks have ended.
    pub fn submit_tasks(
        &self,
        number: u64,
        requests: &[Request],
        notify: Option<Notification>,
    ) -> i32 {
        self.code(self.running().and_then(|running| running.submit_tasks(number, requests, notify)))
    }

    /// Returns a task's state, or the code of why it is not known. The reason of a failure is stored for
    /// [`MooncakeEngine::last_error`].
    pub fn task(&self, number: u64, task: usize) -> Result<TaskState, i32> {
        let looked_up = self.running().and_then(|running| {
            let tasks = running.batches.get(number)?;
            let tasks = tasks.0.read();
            let unknown = || {
                Refusal::invalid(format_args!(
                    "the batch {number} has {} tasks, and no task {task}",
                    tasks.len()
                ))
            };
            let found = tasks.get(task).ok_or_else(unknown)?;
            Ok((found.len, found.group.0.get().cloned()))
        });
        let (len, outcome) = self.note(looked_up)?;
        Ok(match outcome {
            None => TaskState::Running,
            Some(Ok(())) => TaskState::Completed(len),
            Some(Err(error)) => {
                self.set_last_error(error.to_string());
                TaskState::Failed
            }
        })
    }
}

/// The tasks of one call that become one transfer.
struct Part {
    key: (i32, bool),
    peer: Peer,
    batch: Batch,
    group: Arc<Group>,
}

/// The message that is sent when all transfers of a call are complete.
struct Farewell {
    /// Transfers that have not ended.
    left: AtomicUsize,
    message: Mutex<Option<(SyncSender<Message>, Message)>>,
}

impl Farewell {
    /// A transfer has ended. The last one sends; one that failed takes the message away.
    fn ended(&self, failed: bool) {
        if failed {
            self.message.lock().take();
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some((queue, message)) = self.message.lock().take()
            && let Err(refused) = queue.try_send(message)
        {
            tracing::warn!(error = %refused, "a notification was not sent: too many wait");
        }
    }
}

impl Running {
    fn submit_tasks(
        &self,
        number: u64,
        requests: &[Request],
        notify: Option<Notification>,
    ) -> Answer<()> {
        let tasks = self.batches.get(number)?;
        let (mut parts, mut added) = (Vec::<Part>::new(), Vec::with_capacity(requests.len()));
        for request in requests {
            let part = self.part(&mut parts, request)?;
            if request.len > 0 {
                let local = pointer(request.local)?;
                // SAFETY: the caller promises the memory until the outcome, as with Mooncake.
                unsafe { part.batch.push_raw(local, request.remote, request.len) }?;
            }
            added.push(Task { len: request.len, group: Arc::clone(&part.group) });
        }
        if notify.is_some() && parts.is_empty() {
            return Err(Refusal::invalid("a notification without a task has no receiver"));
        }
        let carried = notify.is_some() && parts.len() == 1 && speaks_natively(&parts[0].peer);
        let (carried, later) = if carried { (notify, None) } else { (None, notify) };
        let message = match later {
            None => None,
            Some(notification) => {
                let (peer, timeout) = (parts[0].peer.clone(), self.timeout);
                let queue = self.notifier.queue().map_err(|error| {
                    Refusal::invalid(format_args!(
                        "a notification needs a thread, which can't be started: {error}"
                    ))
                });
                Some((queue?, Message { peer, notification, timeout }))
            }
        };
        {
            let mut tasks = tasks.0.write();
            if tasks.len() + added.len() > TASKS_MAX {
                let why = format_args!("a batch holds {TASKS_MAX} tasks");
                return Err(Refusal::new(codes::TOO_MANY, why));
            }
            tasks.append(&mut added);
        }
        let farewell = Arc::new(Farewell {
            left: AtomicUsize::new(parts.len()),
            message: Mutex::new(message),
        });
        for part in parts {
            let mut options = self.options(&part.batch);
            options.notify.clone_from(&carried);
            let transfer = if part.key.1 {
                part.peer.write_async(&part.batch, &options)
            } else {
                part.peer.read_async(&part.batch, &options)
            };
            let (group, farewell) = (part.group, Arc::clone(&farewell));
            transfer.on_end(move |outcome| conclude(&group, &farewell, outcome));
        }
        Ok(())
    }

    /// The part of a call that a task belongs to.
    fn part<'a>(&self, parts: &'a mut Vec<Part>, request: &Request) -> Answer<&'a mut Part> {
        let key = (request.segment, request.write);
        let at = match parts.iter().rposition(|part| part.key == key) {
            Some(at) => at,
            None => {
                let peer = self.segment(request.segment)?;
                parts.push(Part { key, peer, batch: Batch::new(), group: Arc::default() });
                parts.len() - 1
            }
        };
        Ok(&mut parts[at])
    }
}

fn conclude(group: &Group, farewell: &Farewell, outcome: Result<TransferStats, Error>) {
    if let Err(error) = &outcome {
        tracing::warn!(%error, "a transfer failed");
    }
    let failed = outcome.is_err();
    let _ = group.0.set(outcome.map(drop));
    farewell.ended(failed);
}

/// Whether a transfer with this peer can carry a notification.
fn speaks_natively(peer: &Peer) -> bool {
    peer.transport().is_some_and(|transport| transport != KIND)
}
