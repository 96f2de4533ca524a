//! The fabric over agents: two of them in this process, connected over loopback.

use crate::fabric::{
    Access, Aim, Effort, Endpoint, Fabric, Failure, Handle, Move, Note, Options, Outcome, Pair,
    Region, TransferStats,
};
use crate::memory::{Memory, MemoryKind};
use crate::slow::{Direction, SlowMemory};
use kvferry::{
    Agent, AgentBuilder, Batch, Checksum, CopyDone, DeviceMemory, HostSpan, Incarnation,
    Notification, Peer, RegionId, RemoteRegion, Transfer, Transports,
};
use kvferry_sys::poll::EventFd;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Makes pairs of agents with these settings.
#[derive(Clone, Debug)]
pub struct AgentFabric {
    transports: &'static str,
    checksum: Checksum,
    streams: Option<usize>,
    io_threads: Option<usize>,
    secret: Option<&'static str>,
    effort: Effort,
}

impl AgentFabric {
    /// Agents that use only the named transports, separated by commas.
    pub const fn new(transports: &'static str) -> Self {
        Self {
            transports,
            checksum: Checksum::Auto,
            streams: None,
            io_threads: None,
            secret: None,
            effort: Effort::Full,
        }
    }

    /// Asks for less work per scenario.
    #[must_use]
    pub const fn brief(mut self) -> Self {
        self.effort = Effort::Brief;
        self
    }

    /// With or without checksums.
    #[must_use]
    pub const fn checksum(mut self, checksum: Checksum) -> Self {
        self.checksum = checksum;
        self
    }

    /// The most streams between two agents.
    #[must_use]
    pub const fn streams(mut self, streams: usize) -> Self {
        self.streams = Some(streams);
        self
    }

    /// I/O threads of each agent.
    #[must_use]
    pub const fn io_threads(mut self, threads: usize) -> Self {
        self.io_threads = Some(threads);
        self
    }

    /// The secret of both agents.
    #[must_use]
    pub const fn secret(mut self, secret: &'static str) -> Self {
        self.secret = Some(secret);
        self
    }

    fn builder(&self, name: &str) -> Result<AgentBuilder, kvferry::Error> {
        let mut builder = Agent::builder()
            .name(name)
            .listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .transports(Transports::parse(self.transports)?)
            .mooncake(self.transports.contains("mooncake"))
            // No scenario is about silence; a loaded machine delays heartbeats.
            .silence(self.patience() / 5)
            .checksum(self.checksum);
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

    fn confirms_cancel(&self) -> bool {
        self.transports != "mooncake"
    }

    fn names_regions(&self) -> bool {
        self.transports != "mooncake"
    }

    fn pair(&self, _: MemoryKind) -> Result<Pair, Failure> {
        let near = self.builder("near").and_then(AgentBuilder::start).map_err(failure)?;
        let far = self.builder("far").and_then(AgentBuilder::start).map_err(failure)?;
        let end = |agent: &Agent, other: &Agent| -> Result<Arc<dyn Endpoint>, Failure> {
            let peer = agent.peer(other.advertised()).map_err(failure)?;
            Ok(Arc::new(AgentEnd {
                agent: agent.clone(),
                peer,
                memories: Mutex::default(),
                closed: AtomicBool::new(false),
                by_address: !self.names_regions(),
            }))
        };
        Ok(Pair { near: end(&near, &far)?, far: end(&far, &near)? })
    }
}

/// An error as the suite compares it.
pub fn failure(error: kvferry::Error) -> Failure {
    Failure {
        kind: error.kind().as_str().to_owned(),
        quiesced: error.quiesced(),
        text: error.to_string(),
    }
}

fn outcome(result: Result<kvferry::TransferStats, kvferry::Error>) -> Outcome {
    result.map(|m| TransferStats { bytes: m.bytes, descriptors: m.descriptors }).map_err(failure)
}

impl DeviceMemory for SlowMemory {
    fn len(&self) -> u64 {
        Self::len(self) as u64
    }

    fn copy_out(&self, offset: u64, to: HostSpan, done: CopyDone) {
        self.start(Direction::Out, offset, to, Box::new(|result| done.complete(result)));
    }

    fn copy_in(&self, offset: u64, from: HostSpan, done: CopyDone) {
        self.start(Direction::In, offset, from, Box::new(|result| done.complete(result)));
    }
}

struct AgentEnd {
    agent: Agent,
    peer: Peer,
    // Kept until the agent ends: if it fails to stop a copier, the suite finds the bytes, and the
    // process does not crash.
    memories: Mutex<Vec<Memory>>,
    closed: AtomicBool,
    by_address: bool,
}

fn region_of(region: &Region) -> kvferry::Region {
    let region = Arc::clone(&region.inner).downcast::<kvferry::Region>();
    (*region.expect("regions of this fabric are agents' regions")).clone()
}

fn batch(moves: &[Move], by_address: bool) -> Result<Batch, Failure> {
    let mut batch = Batch::with_capacity(moves.len());
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
                let access = kvferry::Access::READ_WRITE;
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

fn options(options: &Options) -> kvferry::Options<'static> {
    kvferry::Options {
        timeout: options.timeout,
        notify: options.note.clone().map(|n| Notification::new(n.name, n.message)),
        ..kvferry::Options::default()
    }
}

fn note(notification: Notification) -> Note {
    Note::new(notification.name, notification.message)
}

impl Endpoint for AgentEnd {
    fn register(
        &self,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Region, Failure> {
        let rights = kvferry::Access { read: access.read, write: access.write };
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).push(memory.clone());
        let inner = match memory.device() {
            Some(device) => {
                assert_eq!((offset, len), (0, memory.len()), "a device is registered as a whole");
                self.agent.register_device(Arc::new(device.clone()), rights)
            }
            // SAFETY: the memory is kept mapped by `memories` until the agent is gone, it is
            // writable, and no reference to its bytes exists.
            None => unsafe { self.agent.register(memory.span(offset, len).as_ptr(), len, rights) },
        };
        let inner = Arc::new(inner.map_err(failure)?);
        Ok(Region { memory: memory.clone(), offset, len, access, inner })
    }

    fn unregister(&self, region: &Region) -> Result<(), Failure> {
        self.agent.unregister(&region_of(region)).map_err(failure)
    }

    fn write(&self, moves: &[Move], how: &Options) -> Outcome {
        outcome(self.peer.write(&batch(moves, self.by_address)?, &options(how)))
    }

    fn read(&self, moves: &[Move], how: &Options) -> Outcome {
        outcome(self.peer.read(&batch(moves, self.by_address)?, &options(how)))
    }

    fn write_async(&self, moves: &[Move], how: &Options) -> Box<dyn Handle> {
        match batch(moves, self.by_address) {
            Ok(batch) => Box::new(Running(self.peer.write_async(&batch, &options(how)))),
            Err(failure) => Box::new(Refused::new(failure)),
        }
    }

    fn read_async(&self, moves: &[Move], how: &Options) -> Box<dyn Handle> {
        match batch(moves, self.by_address) {
            Ok(batch) => Box::new(Running(self.peer.read_async(&batch, &options(how)))),
            Err(failure) => Box::new(Refused::new(failure)),
        }
    }

    fn notify(&self, note: Note, how: &Options) -> Result<(), Failure> {
        let notification = Notification::new(note.name, note.message);
        self.peer.notify(notification, &options(how)).map_err(failure)
    }

    fn take_notes(&self) -> Vec<Note> {
        self.agent.notifications().into_iter().map(note).collect()
    }

    fn wait_note(&self, timeout: Duration) -> Option<Note> {
        self.agent.wait_notification(timeout).ok().flatten().map(note)
    }

    fn gauges(&self) -> Vec<(String, u64)> {
        let stats = self.agent.stats();
        let mut gauges = vec![
            ("transfers_in_flight".to_owned(), stats.transfers_in_flight),
            ("requests_in_flight".to_owned(), stats.requests_in_flight),
            ("handshakes_pending".to_owned(), stats.handshakes_pending),
            ("regions".to_owned(), stats.regions),
            ("notifications".to_owned(), self.agent.notifications().len() as u64),
        ];
        if self.closed.load(Ordering::SeqCst) {
            gauges.push(("sessions".to_owned(), stats.sessions));
            gauges.push(("streams".to_owned(), stats.streams));
            gauges.push(("gates".to_owned(), stats.gates));
        }
        gauges
    }

    fn close(&self) {
        self.agent.shutdown();
        self.closed.store(true, Ordering::SeqCst);
    }
}

struct Running(Transfer);

impl Handle for Running {
    fn poll(&self) -> Option<Outcome> {
        self.0.outcome().map(outcome)
    }

    fn wait(&self, timeout: Duration) -> Option<Outcome> {
        self.0.wait(timeout).map(outcome)
    }

    fn cancel(&self) {
        self.0.cancel();
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.0.event_fd().expect("the process has descriptors left")
    }
}

/// A transfer whose batch was refused before it began.
struct Refused {
    failure: Failure,
    event: EventFd,
}

impl Refused {
    fn new(failure: Failure) -> Self {
        let event = EventFd::new().expect("the process has descriptors left");
        event.signal();
        Self { failure, event }
    }
}

impl Handle for Refused {
    fn poll(&self) -> Option<Outcome> {
        Some(Err(self.failure.clone()))
    }

    fn wait(&self, _: Duration) -> Option<Outcome> {
        self.poll()
    }

    fn cancel(&self) {}

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
