//! The fabric over agents: two of them in this process, connected over loopback.

use crate::fabric::{
    Aim, Effort, Endpoint, Fabric, Failure, Handle, Move, Outcome, Pair, Region, TransferStats, Way,
};
use crate::memory::{Memory, MemoryKind};
use crate::region::moved;
use kvferry::{
    Access, After, Agent, AgentBuilder, Batch, Checksum, Incarnation, Notification, Options, Peer,
    RegionId, RemoteRegion, Transfer, Transports,
};
use kvferry_sys::sync::Mutex;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Makes pairs of agents with these settings.
#[derive(Clone, Debug)]
pub struct AgentFabric {
    /// The names of the transports that the agents may use, separated by commas, the fastest first. A transfer goes over
    /// the first; over the last, if it names device memory of the other side. A transfer over another one fails.
    pub transports: &'static str,
    /// Whether the far side has its memory in the host, whatever the memory under test.
    pub far_in_host: bool,
    /// Settings of the transports, with their values.
    pub settings: &'static [(&'static str, &'static str)],
    /// Whether the agents have kvferry's own sessions with each other. Without one, a peer confirms no cancel, and
    /// its regions are named by their addresses.
    pub has_sessions: bool,
    /// Whether payload carries checksums.
    pub checksum: Checksum,
    /// The most streams between two agents.
    pub streams: Option<usize>,
    /// I/O threads of each agent.
    pub io_threads: Option<usize>,
    /// The secret of both agents.
    pub secret: Option<&'static str>,
    /// Amount of work that the scenarios do.
    pub effort: Effort,
    /// The longest that one healthy operation may take on a loaded machine.
    pub patience: Duration,
}

impl AgentFabric {
    /// Agents that use only these transports, and defaults otherwise.
    pub const fn new(transports: &'static str) -> Self {
        Self {
            transports,
            far_in_host: false,
            settings: &[],
            has_sessions: true,
            checksum: Checksum::Auto,
            streams: None,
            io_threads: None,
            secret: None,
            effort: Effort::Full,
            patience: Duration::from_secs(60),
        }
    }

    fn builder(&self, name: &str) -> Result<AgentBuilder, kvferry::Error> {
        let mut builder = Agent::builder()
            .name(name)
            .listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .transports(Transports::parse(self.transports)?)
            // No scenario is about silence; a loaded machine delays heartbeats.
            .silence(self.patience() / 5)
            .checksum(self.checksum);
        for (name, value) in self.settings {
            builder = builder.setting(name, value);
        }
        if let Some(streams) = self.streams {
            builder = builder.streams_per_peer(streams);
        }
        if let Some(threads) = self.io_threads {
            builder = builder.io_threads(threads);
        }
        if let Some(secret) = self.secret {
            builder = builder.secret(secret.as_bytes());
        }
        Ok(builder)
    }
}

impl Fabric for AgentFabric {
    fn name(&self) -> String {
        format!("agents over {}, checksum {:?}", self.transports, self.checksum)
    }

    fn effort(&self) -> Effort {
        self.effort
    }

    fn far_kind(&self, kind: MemoryKind) -> MemoryKind {
        if self.far_in_host { MemoryKind::Host } else { kind }
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn confirms_cancel(&self) -> bool {
        self.has_sessions
    }

    fn names_regions(&self) -> bool {
        self.has_sessions
    }

    fn pair(&self) -> Result<Pair, Failure> {
        let near = self.builder("near").and_then(AgentBuilder::start).map_err(failure)?;
        let far = self.builder("far").and_then(AgentBuilder::start).map_err(failure)?;
        let end = |agent: &Agent, other: &Agent| -> Result<Arc<dyn Endpoint>, Failure> {
            let peer = agent.peer(other.advertised()).map_err(failure)?;
            Ok(Arc::new(AgentEnd {
                agent: agent.clone(),
                peer,
                memories: Memories::default(),
                closed: AtomicBool::new(false),
                by_address: !self.names_regions(),
                transports: self.transports,
                with_peer_device: AtomicU64::new(0),
            }))
        };
        Ok(Pair { near: end(&near, &far)?, far: end(&far, &near)? })
    }
}

/// An error as the suite compares it.
pub(crate) fn failure(error: kvferry::Error) -> Failure {
    Failure {
        kind: error.kind().as_str().to_owned(),
        quiesced: error.quiesced(),
        text: error.to_string(),
    }
}

/// The outcome of a transfer that should go over `transport`.
fn outcome(result: Result<kvferry::TransferStats, kvferry::Error>, transport: &str) -> Outcome {
    let stats = result.map_err(failure)?;
    if stats.bytes > 0 && stats.transport.is_none_or(|over| over.as_str() != transport) {
        let text = format!("bytes went over {:?}, not over {transport}", stats.transport);
        return Err(Failure { kind: "another_transport".to_owned(), quiesced: None, text });
    }
    Ok(TransferStats { bytes: stats.bytes, descriptors: stats.descriptors })
}

/// The memory that was registered with an agent. Kept until the agent ends: if it fails to stop a copier,
/// the suite finds the bytes, and the process does not crash.
#[derive(Default)]
pub(crate) struct Memories(Mutex<Vec<Memory>>);

impl Memories {
    /// Registers a part of some memory.
    pub(crate) fn register(
        &self,
        agent: &Agent,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Region, Failure> {
        self.0.lock().push(memory.clone());
        let inner = match memory.device_memory() {
            Some(device) => {
                assert_eq!((offset, len), (0, memory.len()), "a device is registered as a whole");
                agent.register_device(device, access)
            }
            // SAFETY: this value keeps the memory mapped until the agent is gone, it is writable, and no
            // reference to its bytes exists.
            None => unsafe { agent.register(memory.span(offset, len).as_ptr(), len, access) },
        };
        let inner = Arc::new(inner.map_err(failure)?);
        Ok(Region { memory: memory.clone(), offset, len, access, inner })
    }
}

struct AgentEnd {
    agent: Agent,
    peer: Peer,
    memories: Memories,
    closed: AtomicBool,
    by_address: bool,
    /// See [`AgentFabric::transports`].
    transports: &'static str,
    /// Transfers that named device memory of the other side.
    with_peer_device: AtomicU64,
}

impl AgentEnd {
    /// Returns the transport of a transfer that begins.
    fn transport(&self, moves: &[Move]) -> &'static str {
        let mut names = self.transports.split(',');
        let first = names.next().expect("a name");
        if moves.iter().all(|m| m.remote.memory.kind() == MemoryKind::Host) {
            return first;
        }
        self.with_peer_device.fetch_add(1, Ordering::SeqCst);
        names.next_back().unwrap_or(first)
    }

    /// Transfers that did not take the first transport although they could.
    fn missed(&self, stats: &kvferry::Stats) -> u64 {
        let device = stats.fallbacks_peer_device;
        device.saturating_sub(self.with_peer_device.load(Ordering::SeqCst))
            + stats.fallbacks_out_of_reach
            + stats.fallbacks_unlisted
    }
}

pub(crate) fn region_of(region: &Region) -> kvferry::Region {
    let region = Arc::clone(&region.inner).downcast::<kvferry::Region>();
    (*region.expect("regions of this fabric are agents' regions")).clone()
}

fn batch(moves: &[Move], by_address: bool) -> Result<Batch, Failure> {
    let mut batch = Batch::with_capacity(moves.len());
    batch.set_after(After::host());
    for m in moves {
        let (local, remote) = (region_of(&m.local), region_of(&m.remote));
        let mut named = remote.remote();
        if by_address {
            // As the regions of a stock peer are named: by address, without an incarnation.
            (named.id, named.incarnation) = (RegionId::ABSOLUTE, Incarnation(0));
        }
        let pushed = match m.aim {
            Aim::Honest => batch.push(&local, m.local_offset, &named, m.remote_offset, m.len),
            Aim::Forged => {
                let access = Access::READ_WRITE;
                let forged = RemoteRegion { len: u64::MAX, access, ..named };
                batch.push(&local, m.local_offset, &forged, m.remote_offset, m.len)
            }
            Aim::Address => {
                let address = (remote.addr() as u64).wrapping_add(m.remote_offset);
                batch.push_to_address(&local, m.local_offset, address, m.len)
            }
        };
        pushed.map_err(failure)?;
    }
    Ok(batch)
}

impl Endpoint for AgentEnd {
    fn register(
        &self,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Region, Failure> {
        self.memories.register(&self.agent, memory, offset, len, access)
    }

    fn unregister(&self, region: &Region) -> Result<(), Failure> {
        self.agent.unregister(&region_of(region)).map_err(failure)
    }

    fn transfer(&self, way: Way, moves: &[Move], how: &Options<'_>) -> Outcome {
        let (batch, over) = (batch(moves, self.by_address)?, self.transport(moves));
        outcome(moved(way, &self.peer, &batch, how), over)
    }

    fn start(&self, way: Way, moves: &[Move], how: &Options<'_>) -> Box<dyn Handle> {
        let batch = batch(moves, self.by_address).expect("scenarios start only what fits itself");
        let over = self.transport(moves);
        let transfer = match way {
            Way::Write => self.peer.write_async(&batch, how),
            Way::Read => self.peer.read_async(&batch, how),
        };
        Box::new(Running { transfer, over })
    }

    fn notify(&self, note: Notification, how: &Options<'_>) -> Result<(), Failure> {
        self.peer.notify(note, how).map_err(failure)
    }

    fn take_notes(&self) -> Vec<Notification> {
        self.agent.notifications()
    }

    fn wait_note(&self, timeout: Duration) -> Option<Notification> {
        self.agent.wait_notification(timeout).ok().flatten()
    }

    fn gauges(&self) -> Vec<(&'static str, u64)> {
        let stats = self.agent.stats();
        let mut gauges = vec![
            ("transfers_in_flight", stats.transfers_in_flight),
            ("requests_in_flight", stats.requests_in_flight),
            ("handshakes_pending", stats.handshakes_pending),
            ("regions", stats.regions),
            ("transfers over another transport", self.missed(&stats)),
            ("notifications", self.agent.notifications().len() as u64),
        ];
        if self.closed.load(Ordering::SeqCst) {
            gauges.push(("sessions", stats.sessions));
            gauges.push(("streams", stats.streams));
            gauges.push(("gates", stats.gates));
        }
        gauges
    }

    fn close(&self) {
        self.agent.shutdown();
        self.closed.store(true, Ordering::SeqCst);
    }
}

struct Running {
    transfer: Transfer,
    /// The transport that the bytes should go over.
    over: &'static str,
}

impl Handle for Running {
    fn poll(&self) -> Option<Outcome> {
        self.transfer.outcome().map(|it| outcome(it, self.over))
    }

    fn wait(&self, timeout: Duration) -> Option<Outcome> {
        self.transfer.wait(timeout).map(|it| outcome(it, self.over))
    }

    fn cancel(&self) {
        self.transfer.cancel();
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.transfer.event_fd().expect("the process has descriptors left")
    }
}
