//! The engine's calls as the C API has them: segments, batches and tasks have numbers.

use crate::batches::{Group, INVALID_BATCH, Request, TASKS_MAX, Task, TaskState};
use crate::codes;
use crate::engine::MooncakeEngine;
use crate::notifier::Message;
use crate::refusal::{Answer, Refusal};
use crate::running::{Running, pointer};
use crate::segments::LOCAL_SEGMENT;
use crate::transport::KIND;
use kvferry::{Batch, Error, Notification, Peer, TransferStats};
use kvferry_sys::sync::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;

impl MooncakeEngine {
    /// The number of a segment, or a negative code. Connects to the peer unless a session is live.
    pub fn open_segment(&self, name: &str) -> i32 {
        let opened = self.running().and_then(|running| {
            // Mooncake ignores slashes around a name.
            let name = name.trim_matches('/');
            if name.is_empty() {
                return Err(Refusal::invalid("the name of a segment is empty"));
            }
            if running.own_names.iter().any(|own| own == name) {
                return Ok(LOCAL_SEGMENT);
            }
            let peer = running.peer(name, &|| false)?;
            running.connect(&peer, &|| false).inspect_err(|why| running.forget(name, why))?;
            running.segments.lock().number(name)
        });
        self.note(opened).unwrap_or_else(|code| code)
    }

    /// Checks that a segment is known. It stays open, as with Mooncake.
    pub fn close_segment(&self, segment: i32) -> i32 {
        self.code(self.running().and_then(|running| running.segment(segment).map(drop)))
    }

    /// Forgets what is known of a peer's address; the next call looks it up again.
    pub fn forget_segment(&self, name: &str) -> i32 {
        self.code(self.running().map(|running| running.forget_name(name)))
    }

    /// Sends a notification to a segment's owner, after all transfers to it that are complete.
    pub fn notify(&self, segment: i32, name: String, message: Vec<u8>) -> i32 {
        self.code(self.running().and_then(|running| {
            let peer = running.segment(segment)?;
            let options = running.options(&kvferry::Batch::new());
            Ok(peer.notify(Notification::new(name, message), &options)?)
        }))
    }

    /// The `host:port` that peers connect to.
    pub fn address(&self) -> Option<String> {
        let address = self.running().map(|running| running.agent.advertised().to_owned());
        self.note(address).ok()
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
        for part in &mut parts {
            self.prepare(&mut part.batch)?;
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

/// True if one of kvferry's own transports reaches the peer: its transfers can carry notifications.
fn speaks_natively(peer: &Peer) -> bool {
    peer.transport().is_some_and(|transport| transport != KIND)
}
