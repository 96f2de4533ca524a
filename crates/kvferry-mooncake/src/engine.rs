//! The calls of Mooncake's transfer engine.
//!
//! Calls take addresses and return Mooncake's codes. Like Mooncake, the engine accepts local memory
//! that is not registered, empty batches, empty pieces and a second `initialize`. The differences: a
//! call that failed has stopped copying when it returns; ids are unique; a peer that restarted is
//! connected to again; a call before `initialize` fails instead of crashing.

use crate::codes::{self, status};
use crate::interrupt::{CHECK_INTERVAL, Interrupt, NoAnswer, run_interruptible};
use crate::memory::{self, Orders, Owner};
use crate::metadata::Directory;
use crate::refusal::{Answer, Refusal};
use crate::running::{Running, size};
use kvferry::{Access, Batch, ErrorKind, Notification};
use kvferry_cuda::Order;
use kvferry_sys::sync::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The pieces that a transfer moves, and the direction.
#[derive(Debug)]
pub struct Moves {
    /// True: to the peer's memory; false: from it.
    pub write: bool,
    /// The peer's name.
    pub target: String,
    /// The pieces, or the error for malformed lists.
    pub batch: Result<Batch, String>,
}

/// Mooncake's `TransferEngine`.
#[derive(Debug)]
pub struct MooncakeEngine {
    running: Mutex<Option<Arc<Running>>>,
    last_error: Mutex<String>,
    pid: u32,
    identity: u64,
}

impl Default for MooncakeEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl MooncakeEngine {
    /// An engine before `initialize`.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            running: Mutex::default(),
            last_error: Mutex::default(),
            pid: std::process::id(),
            identity: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Starts an agent for this engine; shuts down the one before.
    pub fn initialize(
        &self,
        local_hostname: &str,
        metadata_server: &str,
        protocol: &str,
        interrupt: Interrupt<'_>,
    ) -> i32 {
        self.code(self.try_initialize(local_hostname, "", metadata_server, protocol, interrupt))
    }

    /// Starts the engine like [`Self::initialize`], with the host that peers connect to if it is not the name's.
    pub fn initialize_at(&self, name: &str, host: &str, metadata_server: &str) -> i32 {
        self.code(self.try_initialize(name, host, metadata_server, "", &|| false))
    }

    fn try_initialize(
        &self,
        local_hostname: &str,
        host: &str,
        metadata_server: &str,
        protocol: &str,
        interrupt: Interrupt<'_>,
    ) -> Answer<()> {
        self.must_not_be_forked()?;
        if protocol == "xgmi" {
            // Mooncake fails, too.
            return Err(Refusal::invalid("kvferry does not support the protocol \"xgmi\""));
        }
        let directory = Directory::parse(metadata_server).map_err(Refusal::invalid)?;
        let running = Arc::new(Running::start(local_hostname, host, directory)?);
        if let Directory::Http(_) = running.directory {
            let published = Arc::clone(&running);
            run_interruptible(interrupt, move || published.publish())?
                .map_err(Refusal::uncoded)
                .inspect_err(|_| running.end())?;
        }
        let before = self.running.lock().replace(running);
        if let Some(before) = before {
            before.end();
        }
        Ok(())
    }

    /// Shuts the agent down, if there is one.
    pub fn shutdown(&self) {
        if self.must_not_be_forked().is_err() {
            return;
        }
        let before = self.running.lock().take();
        if let Some(before) = before {
            before.end();
        }
    }

    /// Whether `initialize` has succeeded and the engine was not shut down.
    pub fn is_running(&self) -> bool {
        self.running().is_ok()
    }

    /// [`kvferry::Agent::take_warning`] of the engine's agent.
    pub fn take_warning(&self) -> Option<String> {
        self.running().ok()?.agent.take_warning()
    }

    /// A number that identifies this engine while it runs, else 0.
    pub fn identity(&self) -> u64 {
        if self.is_running() { self.identity } else { 0 }
    }

    /// The port that peers connect to; 0 while the engine does not run.
    pub fn rpc_port(&self) -> u16 {
        self.running().map_or(0, |running| running.agent.local_addr().port())
    }

    /// Registers ranges of host memory and of memory of GPUs, all or none. Ignores lengths beyond the number of
    /// addresses, as Mooncake does.
    ///
    /// The CUDA driver tells whose memory an address is. This call loads the driver only if the location names a GPU, as
    /// in `cuda:0`; a process that has memory of a GPU has loaded it before.
    pub fn register(&self, addrs: &[u64], lengths: &[u64], location: &str) -> i32 {
        self.register_with(addrs, lengths, location, Access::READ_WRITE)
    }

    /// Registers memory like [`Self::register`]; `access` is what peers may do with it.
    pub fn register_with(
        &self,
        addrs: &[u64],
        lengths: &[u64],
        location: &str,
        access: Access,
    ) -> i32 {
        self.code(self.running().and_then(|running| {
            if lengths.len() < addrs.len() {
                return Err(Refusal::invalid("there are fewer capacities than addresses"));
            }
            if addrs.is_empty() {
                return Ok(());
            }
            let ranges = addrs.iter().copied().zip(lengths.iter().copied());
            // SAFETY: the caller promises that the memory stays mapped until it is unregistered, as in
            // Mooncake.
            let regions = unsafe { memory::register(&running, ranges, location, access) }?;
            running.publish_segment().inspect_err(|_| {
                // Memory that peers can't find out about does not stay registered.
                let _ = running.agent.unregister_batch(&regions);
            })
        }))
    }

    /// Makes later transfers of memory of GPUs come after these orders: the work that a stream has at the time of the
    /// transfer's call, or an event. Without orders, the caller has waited for the work that uses the memory, as in
    /// Mooncake.
    ///
    /// # Safety
    /// The streams and events exist until `owner` is dropped. Without an owner, they exist until another call of this
    /// method has returned, with the calls of transfers that began before it, or until the engine has ended.
    pub unsafe fn set_after(&self, after: &[Order], owner: Option<Owner>) -> i32 {
        let orders = Orders::new(after, owner);
        self.code(self.running().map(|running| *running.after.lock() = orders))
    }

    /// Whether a registered range that holds this address is memory of a GPU, which the processor can't access.
    pub fn is_gpu_memory(&self, addr: u64) -> bool {
        let held = |running: Arc<Running>| running.agent.region_holding(size(addr).ok()?, 1);
        self.running().ok().and_then(held).is_some_and(|region| region.is_device())
    }

    /// Unregisters ranges, each even if another fails. Returns the first failure.
    pub fn unregister(&self, addrs: &[u64]) -> i32 {
        self.code(self.running().and_then(|running| {
            let mut first = Ok(());
            for addr in addrs {
                let region = size(*addr).ok().and_then(|addr| running.agent.region_at(addr));
                let result = match region {
                    Some(region) => running.agent.unregister(&region).map_err(Refusal::from),
                    None => Err(Refusal::new(
                        codes::NOT_REGISTERED,
                        format_args!("nothing is registered at {addr:#x}"),
                    )),
                };
                first = first.and(result);
            }
            first.and(running.publish_segment())
        }))
    }

    /// Moves bytes and waits for the outcome. The notification, a name and a message, follows them.
    pub fn transfer(
        &self,
        moves: Moves,
        notify: Option<(String, String)>,
        interrupt: Interrupt<'_>,
    ) -> i32 {
        let Moves { write, target, batch } = moves;
        let done = self.running().and_then(|running| {
            let peer = running.peer(&target, interrupt)?;
            let mut batch = batch.map_err(Refusal::invalid)?;
            running.prepare(&mut batch)?;
            running
                .run(&peer, write, &batch, notify, interrupt)
                .inspect_err(|refusal| running.forget(&target, refusal))
        });
        self.code(done.map_err(Refusal::uncoded))
    }

    /// Starts moving bytes. Returns the id that [`Self::wait`] and [`Self::check`] take, or
    /// [`codes::NO_ID`].
    pub fn submit(&self, moves: Moves, interrupt: Interrupt<'_>) -> u64 {
        let Moves { write, target, batch } = moves;
        let submitted = self.running().and_then(|running| {
            let peer = running.peer(&target, interrupt)?;
            let mut batch = batch.map_err(Refusal::invalid)?;
            running.prepare(&mut batch)?;
            if running.handles.lock().is_full() {
                return Err(Refusal::invalid(TOO_MANY_IDS));
            }
            // Report an unreachable peer at once: callers test the id, and may never ask for the
            // status.
            running
                .connect(&peer, interrupt)
                .inspect_err(|refusal| running.forget(&target, refusal))?;
            let options = running.options(&batch);
            let transfer = if write {
                peer.write_async(&batch, &options)
            } else {
                peer.read_async(&batch, &options)
            };
            running.handles.lock().add(transfer).map_err(|transfer| {
                transfer.cancel();
                Refusal::invalid(TOO_MANY_IDS)
            })
        });
        self.note(submitted).unwrap_or(codes::NO_ID)
    }

    /// Waits for the outcome of all ids and uses them up. If interrupted, the ids left stay valid.
    pub fn wait(&self, ids: &[u64], interrupt: Interrupt<'_>) -> i32 {
        if ids.is_empty() {
            return codes::OK;
        }
        self.code(self.running().and_then(|running| {
            let mut first = Ok(());
            for id in ids {
                let Some(transfer) = running.handles.lock().take(*id) else {
                    let unknown = Refusal::invalid(format_args!("no transfer has the id {id}"));
                    first = first.and(Err(unknown));
                    continue;
                };
                loop {
                    if let Some(outcome) = transfer.wait(CHECK_INTERVAL) {
                        first = first.and(outcome.map(drop).map_err(Refusal::from));
                        break;
                    }
                    if interrupt() {
                        running.handles.lock().put_back(*id, transfer);
                        return Err(NoAnswer::Interrupted.into());
                    }
                }
            }
            first.map_err(Refusal::uncoded)
        }))
    }

    /// The status of an id: 0 while the transfer runs, 1 when it is done, -1 if it has failed, -2 if it timed out.
    pub fn check(&self, id: u64) -> i32 {
        let checked = self.running().and_then(|running| {
            let mut handles = running.handles.lock();
            let Some(transfer) = handles.get(id) else {
                return Err(Refusal::new(
                    status::FAILED,
                    format_args!("no transfer has the id {id}"),
                ));
            };
            match transfer.outcome() {
                None => Ok(status::RUNNING),
                Some(Ok(_)) => {
                    handles.take(id);
                    Ok(status::DONE)
                }
                // The id stays valid, as in Mooncake: callers ask again, or wait for it.
                Some(Err(error)) if error.kind() == ErrorKind::Deadline => {
                    Err(Refusal::coded(status::OUT_OF_TIME, &error))
                }
                Some(Err(error)) => {
                    handles.take(id);
                    Err(Refusal::coded(status::FAILED, &error))
                }
            }
        });
        self.note(checked).unwrap_or_else(|code| code)
    }

    /// Allocates registered memory; its address, or 0.
    pub fn allocate(&self, len: u64) -> u64 {
        let allocated = self.running().and_then(|running| {
            let len = size(len)?;
            let addr = running.managed.lock().allocate(&running.agent, len)?;
            running.publish_segment()?;
            Ok(addr)
        });
        self.note(allocated).map_or(0, |addr| addr as u64)
    }

    /// Frees memory of [`Self::allocate`].
    pub fn free(&self, addr: u64) -> i32 {
        self.code(self.running().and_then(|running| {
            let freed = running.managed.lock().free(size(addr)?);
            match freed {
                None => Err(Refusal::invalid(format_args!("no buffer was allocated at {addr:#x}"))),
                Some(None) => Ok(()),
                Some(Some(region)) => {
                    running.agent.unregister(&region)?;
                    running.publish_segment()
                }
            }
        }))
    }

    /// The first address that a peer registered, or 0.
    pub fn first_address(&self, segment: &str, interrupt: Interrupt<'_>) -> u64 {
        let found = self.running().and_then(|running| {
            if running.own_names.iter().any(|own| own == segment) {
                return Ok(running
                    .agent
                    .regions()
                    .first()
                    .map_or(0, |region| region.addr() as u64));
            }
            let peer = running.peer(segment, interrupt)?;
            let timeout = running.timeout;
            let regions = run_interruptible(interrupt, move || peer.regions(timeout))??;
            Ok(regions.first().map_or(0, |region| region.addr))
        });
        self.note(found).unwrap_or(0)
    }

    /// Takes the notifications that have arrived: names and messages.
    pub fn notifications(&self) -> Vec<(String, String)> {
        let text = |notification: Notification| {
            (notification.name, String::from_utf8_lossy(&notification.message).into_owned())
        };
        self.take_notifications().into_iter().map(text).collect()
    }

    /// Takes the notifications that have arrived, with their bytes.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.running().map(|running| running.agent.notifications()).unwrap_or_default()
    }

    /// Checks that a peer answers.
    pub fn probe(&self, target: &str, interrupt: Interrupt<'_>) -> i32 {
        self.code(self.running().and_then(|running| {
            let peer = running.peer(target, interrupt)?;
            let timeout = running.timeout;
            run_interruptible(interrupt, move || peer.probe(timeout))?
                .map(drop)
                .map_err(|error| Refusal::coded(codes::SOCKET, &error))
                .inspect_err(|refusal| running.forget(target, refusal))
        }))
    }

    /// The reason of the last failure; empty if no call failed.
    pub fn last_error(&self) -> String {
        if self.must_not_be_forked().is_err() {
            return FORKED.to_owned();
        }
        self.last_error.lock().clone()
    }

    pub(crate) fn set_last_error(&self, why: String) {
        *self.last_error.lock() = why;
    }

    pub(crate) fn running(&self) -> Answer<Arc<Running>> {
        self.must_not_be_forked()?;
        self.running.lock().clone().ok_or_else(|| Refusal::invalid("the engine is not initialized"))
    }

    /// Check this before any lock: another thread may have held the lock at the fork.
    fn must_not_be_forked(&self) -> Answer<()> {
        if std::process::id() == self.pid { Ok(()) } else { Err(Refusal::invalid(FORKED)) }
    }

    pub(crate) fn code(&self, answer: Answer<()>) -> i32 {
        self.note(answer).map_or_else(|code| code, |()| codes::OK)
    }

    /// Stores the reason of a failure and returns its code.
    pub(crate) fn note<T>(&self, answer: Answer<T>) -> Result<T, i32> {
        answer.map_err(|refusal| {
            tracing::warn!(code = refusal.code, "{}", refusal.why);
            if self.must_not_be_forked().is_ok() {
                self.set_last_error(refusal.why);
            }
            refusal.code
        })
    }
}

impl Drop for MooncakeEngine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

const TOO_MANY_IDS: &str = "too many transfers have an outcome that was never asked for";
pub(crate) const FORKED: &str =
    "this process was forked from the one that created the engine; create another here";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_the_hosts_is_refused_and_last_error_says_so() {
        let engine = MooncakeEngine::new();
        assert_eq!(engine.initialize_at("127.0.0.1", "", "P2PHANDSHAKE"), codes::OK);
        let mut host = vec![0u8; 4096];
        let base = host.as_mut_ptr() as u64;
        // Where nothing is mapped: as the addresses of a device are.
        let elsewhere = 1 << 46;
        assert_ne!(engine.register(&[elsewhere], &[4096], "*"), codes::OK);
        assert!(engine.last_error().contains("not host memory"), "{}", engine.last_error());
        assert_ne!(engine.register(&[base, elsewhere], &[4096, 4096], "*"), codes::OK);
        assert_eq!(engine.register(&[base], &[4096], "*"), codes::OK, "none was registered");
        assert_eq!(engine.unregister(&[base]), codes::OK);
        engine.shutdown();
    }
}
