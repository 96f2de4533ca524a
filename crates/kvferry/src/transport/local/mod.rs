//! Copies within one host: the initiator copies, the peer takes no part.
//!
//! Bytes move by `process_vm_writev` and `process_vm_readv`. Memory that the peer allocated through
//! kvferry is mapped into this process, and copied to and from directly. There is no message per
//! transfer: the peer keeps a table in shared memory of the ranges that may be touched
//! ([`registry`]).
//!
//! **Fence.** Reads write this process's memory, inside a gate of this process: `Local`. Writes are
//! one-sided into standing registered memory: `PeerExit`. The initiator copies a bounded piece at a
//! time inside a gate that the peer can see ([`writers`]); the peer's `unregister`
//! clears the region's entry and waits until the gate was left or the initiator's process is gone.
//! If neither happens within the silence limit, the range is quarantined.
//!
//! **Identity.** A pid proves nothing. The initiator finds the peer by a name that only the peer's
//! incarnation listens at, and both prove the session's key. Then the initiator reads random bytes
//! by the peer's pid, at an address that only the peer knows and has sent. From then on the pid
//! leads to that memory until the peer's process exits or runs another program. In either case the
//! kernel first sets a mark in the peer's table (`kvferry_sys::alive`), which is checked right
//! before every copy by pid.
//!
//! The remaining gap: this process may be stopped between that check and the system call, for as
//! long as it takes the peer to run another program, or to exit and its pid to be reused by a
//! process of the same user. Then one piece of at most [`CHUNK`] bytes would be copied there, if
//! something is mapped at its address.

mod attach;
mod copier;
mod copy;
mod direct;
mod maps;
mod own;
mod registry;
mod route;
mod serve;
mod share;
mod writers;

use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gate;
use crate::stats::Stats;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::transfer::kind::{Capabilities, Fence, Transport, TransportKind};
use crate::transfer::link::Link;
use crate::transport::service::{Attached, Service, Start, Startup};
use crate::transport::settings::TransportSetting;
use kvferry_proto::{CAPABILITY_LOCAL, Incarnation, LocalPacket, RegionId, Timestamp};
use kvferry_sys::fd::Fd;
use kvferry_sys::shared::Shared;
use kvferry_sys::unix::Channel;
use maps::Maps;
use own::OwnMemory;
use registry::{Index, RegistryView};
use std::time::Duration;
use writers::WriterPage;

/// Bytes copied inside a gate at a time: an unregistering peer waits for one such piece, a tenth of
/// a millisecond. Larger pieces are no faster.
pub(crate) const CHUNK: usize = 512 * 1024;

/// Packets that a handler takes in one call, so that other handlers go on: each may cost several system
/// calls.
const PACKETS_PER_CALL: usize = 64;

const ENDED: &str = "the peer's process is gone, or runs another program";

/// Interval at which the connection to the peer is checked while bytes are copied.
const CHECK_EVERY: Duration = Duration::from_millis(1);

/// The abstract name that an agent listens at.
fn name_of(incarnation: Incarnation) -> String {
    format!("kvferry/{incarnation}")
}

/// The transport.
pub(crate) struct Local;

impl Local {
    pub(crate) const KIND: TransportKind = TransportKind::new("local");
}

impl Transport for Local {
    fn kind(&self) -> TransportKind {
        Self::KIND
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["native", "kvferry"]
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_fence: Fence::PeerExit,
            read_fence: Fence::Local,
            notifications: true,
            checksums: false,
        }
    }
}

static PTRACER_ANY: TransportSetting = TransportSetting::switch(
    "ptracer_any",
    Some("KVFERRY_PTRACER_ANY"),
    "let any process of this user attach to this one, until it ends: `local` needs that under Yama's \
     `ptrace_scope` 1. Debuggers may attach as well",
);

impl Start for Local {
    fn has_copiers(&self) -> bool {
        true
    }

    fn settings(&self) -> &'static [TransportSetting] {
        std::slice::from_ref(&PTRACER_ANY)
    }

    fn start(&self, cx: &Startup<'_>) -> Result<Arc<dyn Service>> {
        if cx.settings.is_on(&PTRACER_ANY)
            && let Err(e) = kvferry_sys::unix::let_any_process_attach()
        {
            tracing::debug!(error = %e, "ptracer_any has no effect: this kernel has no Yama");
        }
        let memory = if cx.must_check {
            Err("checksums are on, and copies within a host have none".to_owned())
        } else {
            serve::listen(cx.core, cx.directory).map_err(|e| {
                tracing::warn!(error = %e, "transfers within the host take another route");
                e.to_string()
            })
        };
        Ok(Arc::new(LocalService { memory }))
    }
}

/// The transport of one agent.
struct LocalService {
    /// This agent's memory for other processes, or the reason why it can't use transfers within the host.
    memory: Result<Arc<OwnMemory>, String>,
}

impl Service for LocalService {
    fn announces(&self) -> u64 {
        if self.memory.is_ok() { CAPABILITY_LOCAL } else { 0 }
    }

    fn attach(&self, link: &Arc<Link>, attached: Attached) {
        match &self.memory {
            Err(obstacle) => attached(Some(obstacle.clone())),
            Ok(_) => attach::attach(link, attached),
        }
    }

    /// Adds the counts of the processes that copy by themselves.
    fn count(&self, stats: &mut Stats) {
        let Ok(memory) = &self.memory else { return };
        memory.writers.forget_gone();
        stats.writers = memory.writers.count() as u64;
        let theirs = memory.writers.totals();
        stats.bytes_received = stats.bytes_received.wrapping_add(theirs.written);
        stats.bytes_served = stats.bytes_served.wrapping_add(theirs.read);
        stats.requests_served = stats.requests_served.wrapping_add(theirs.batches);
    }
}

/// A peer on this host whose memory can be reached.
#[derive(Debug)]
struct LocalPeer {
    pid: i32,
    /// Whether the kernel permits copies by pid, and why not.
    vm: Result<(), String>,
    channel: Arc<Channel>,
    /// The handler of the channel, on the control thread.
    pub(crate) handler: u64,
    pidfd: Fd,
    registry: RegistryView,
    page: WriterPage,
    maps: Maps,
    /// Free gates for this process's memory.
    gates: Mutex<Vec<Arc<Gate>>>,
    seen_alive: AtomicU64,
    /// No further copy may start.
    detached: AtomicBool,
}

impl LocalPeer {
    /// The reason why the kernel does not permit copies by pid, if it does not.
    pub(crate) fn obstacle(&self) -> Option<&str> {
        self.vm.as_ref().err().map(String::as_str)
    }

    /// Prevents further copies; does not wait for those in progress.
    pub(crate) fn detach(&self) {
        self.detached.store(true, Ordering::SeqCst);
    }

    /// Whether copies may start.
    pub(crate) fn is_attached(&self) -> bool {
        !self.detached.load(Ordering::SeqCst)
    }

    /// Whether the peer was alive at the last check, or the error that it is gone.
    fn check_alive(&self, now: Timestamp) -> Result<()> {
        let seen = Timestamp::from_nanos(self.seen_alive.load(Ordering::Relaxed));
        if now.saturating_since(seen) < CHECK_EVERY && now >= seen {
            return Ok(());
        }
        self.look()?;
        // The time before the check.
        self.seen_alive.store(now.as_nanos(), Ordering::Relaxed);
        Ok(())
    }

    fn look(&self) -> Result<(), Error> {
        if self.registry.is_closed() || self.channel.is_gone(&self.pidfd) {
            return Err(self.loss(ENDED.into()));
        }
        Ok(())
    }

    /// The error of a peer that is gone: its goodbye, or else a reset.
    fn loss(&self, how: String) -> Error {
        self.farewell().unwrap_or_else(|| Error::new(ErrorKind::PeerReset, how))
    }

    /// The error of a peer that was shut down.
    fn farewell(&self) -> Option<Error> {
        let closed = self.registry.is_closed();
        closed.then(|| Error::new(ErrorKind::PeerClosed, "the peer was shut down"))
    }

    /// A gate for this process's memory.
    fn take_gate(&self, core: &Core) -> Arc<Gate> {
        self.gates.lock().pop().unwrap_or_else(|| core.memory.gates.gate())
    }

    /// Keeps the gate for the next share, unless copies of a device that does not answer are still counted by it.
    fn put_gate(&self, gate: Arc<Gate>) {
        if !gate.has_copies() {
            self.gates.lock().push(gate);
        }
    }

    /// The memory of a shared region, if it is mapped; otherwise requests it from the peer, once.
    fn map_of(&self, index: &Index, region: RegionId) -> Option<Arc<Shared>> {
        let is_live = |id| index.known(id).is_some_and(|seen| self.registry.is_current(seen));
        let ask = || self.channel.send(&LocalPacket::Map { region }.encode(), &[]).is_ok();
        self.maps.find(region, is_live, ask)
    }
}

#[cfg(test)]
mod tests {
    use super::registry::Registry;
    use super::route::LocalRoute;
    use super::*;
    use crate::memory::region::Access;
    use crate::reactor::now;
    use crate::transfer::drive;
    use crate::transfer::job::{Job, Op};
    use crate::transfer::link::tests::NoPeer;
    use crate::transfer::slot::Watch;
    use crate::{Agent, Batch, Transports};

    /// A peer in this process, and its end of the connection.
    pub(super) fn peer(registry: &Registry, vm: Result<(), String>) -> (Arc<LocalPeer>, Channel) {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvferry-local-{}-{number}", std::process::id());
        let listener = Channel::listen(name.as_bytes()).expect("a free name");
        let here = Channel::connect(name.as_bytes()).expect("just made");
        let there = listener.accept().expect("connected");
        let fd = registry.fd().try_clone_to_owned().expect("a descriptor");
        let peer = LocalPeer {
            pid: std::process::id().try_into().expect("a pid is positive"),
            vm,
            pidfd: here.peer_pidfd().expect("this process"),
            channel: Arc::new(here),
            handler: 0,
            registry: RegistryView::open(fd).expect("ours"),
            page: WriterPage::create().expect("memory"),
            maps: Maps::default(),
            gates: Mutex::default(),
            seen_alive: AtomicU64::new(0),
            detached: AtomicBool::new(false),
        };
        (Arc::new(peer), there)
    }

    pub(super) fn link(agent: &Agent) -> Arc<Link> {
        let at = agent.local_addr();
        Link::new(Arc::clone(agent.core()), "peer".into(), at, Arc::new(NoPeer::default()), 1)
    }

    #[test]
    fn a_peer_that_is_gone_is_not_reported_as_unsupported_where_only_local_is_permitted() {
        let transports = Transports::parse("local").expect("a name");
        let agent = Agent::builder().transports(transports).start().expect("an agent");
        let region = agent.allocate(4096, Access::READ_WRITE).expect("memory");
        let mut registry = Registry::create().expect("memory");
        registry.publish(&region.0);
        let mut batch = Batch::new();
        batch.push(&region, 0, &region.remote(), 0, 4096).expect("inside");
        for op in [Op::Write, Op::Read] {
            let link = link(&agent);
            let (peer, there) = peer(&registry, Err("this is a test".into()));
            link.add_route(Arc::new(LocalRoute(peer)));
            let moved = || {
                let timeout = Duration::from_secs(60);
                let core = Arc::clone(agent.core());
                let job = Job::new(core, op, batch.clone(), None, timeout, None);
                drive::run(&Arc::new(job), &link, None).map(drop).map_err(|e| e.kind())
            };
            assert_eq!(moved(), Err(ErrorKind::Unsupported), "the peer is alive but out of reach");
            drop(there);
            assert_eq!(moved(), Err(ErrorKind::PeerReset));
        }
        agent.shutdown();
    }

    #[test]
    fn no_copy_is_made_by_the_pid_of_a_process_that_runs_another_program() {
        let agent = Agent::builder().start().expect("an agent");
        let region = agent.allocate_private(4096, Access::READ_WRITE).expect("memory");
        let mut registry = Registry::create().expect("memory");
        registry.publish(&region.0);
        let mut batch = Batch::new();
        let ours = agent.allocate_private(4096, Access::NONE).expect("memory");
        batch.push(&ours, 0, &region.remote(), 0, 4096).expect("inside");
        let (peer, _there) = peer(&registry, Ok(()));
        let link = link(&agent);
        let copy = || {
            // The peer was checked a moment ago.
            peer.seen_alive.store(now().as_nanos(), Ordering::Relaxed);
            let watch = Watch::new(now() + Duration::from_secs(60), None, now());
            let copied = direct::copy_all(&link, &peer, Op::Write, &batch, watch, Arc::new(|| {}));
            copied.expect("it is within reach").map_err(|e| e.kind())
        };
        copy().expect("the process is this one");
        // The mark of a thread that ends is the same as that of a process that runs another
        // program.
        let registry = Arc::new(registry);
        let owner = Arc::clone(&registry);
        let thread = std::thread::spawn(move || std::mem::forget(owner.mark_alive()));
        thread.join().expect("no panic");
        assert_eq!(copy(), Err(ErrorKind::PeerReset));
        agent.shutdown();
    }
}
