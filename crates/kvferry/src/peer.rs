//! [`Peer`]: connecting to a peer, and moving bytes to and from it.

use crate::callback::contain;
use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::region::RemoteRegion;
use crate::notify::Notification;
use crate::reactor::now;
use crate::session::channel::Channel;
use crate::session::connect::PeerState;
use crate::transfer::batch::Batch;
use crate::transfer::drive;
use crate::transfer::edges;
use crate::transfer::job::{Job, Op, TransferStats};
use crate::transfer::kind::{Capabilities, TransportKind};
use crate::transfer::link::Link;
use crate::transfer::requests::PROBE;
use crate::transfer::slot::Interrupt;
use crate::transfer::{Options, Transfer};
use kvferry_proto::{Incarnation, Limits, Timestamp, WireCode};
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Description of a connected peer, as its agent sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerSummary {
    /// The peer's name; for a peer of another protocol, its address.
    pub name: String,
    /// The id that the peer drew when it started; `None` for a peer of another protocol.
    pub incarnation: Option<Incarnation>,
    /// The transport that moves the bytes.
    pub transport: TransportKind,
    /// The protocol version of the session; 0 for a peer of another protocol.
    pub version: u16,
    /// Whether both sides proved that they know the secret.
    pub authenticated: bool,
    /// Whether payload carries CRC32C checksums.
    pub checksum: bool,
    /// The reason why the session does not use `local`, the fastest transport within one host, or why a transfer of the
    /// session did not, such as one with device memory of the peer; `None` if all went over it. Text for people.
    pub fallback: Option<String>,
}

/// A peer of an agent, by address. Clones are the same peer. All methods may be called from any
/// thread.
///
/// After a peer has restarted at its address, the next call connects to it again. The peer refuses
/// handles of regions from before the restart with `StaleIncarnation`.
#[derive(Clone, Debug)]
pub struct Peer {
    pub(crate) core: Arc<Core>,
    pub(crate) state: Arc<PeerState>,
}

impl Peer {
    pub(crate) fn new(core: Arc<Core>, state: Arc<PeerState>) -> Self {
        Self { core, state }
    }

    /// The `host:port` that was passed to [`Agent::peer`](crate::Agent::peer).
    pub fn address(&self) -> &str {
        &self.state.address
    }

    /// The socket addresses that calls connect to: what [`Peer::address`] was resolved to.
    pub fn socket_addrs(&self) -> &[SocketAddr] {
        self.state.addrs()
    }

    /// The time limit of a call: the caller's, else the agent's `timeout`.
    fn limit(&self, timeout: impl Into<Option<Duration>>) -> Duration {
        timeout.into().unwrap_or(self.core.settings.timeout)
    }

    pub(crate) fn link(&self, timeout: impl Into<Option<Duration>>) -> Result<Arc<Link>> {
        let timeout = self.limit(timeout);
        self.core.check()?;
        self.state.wait_link(now() + timeout, None)
    }

    /// Connects to the peer, if there is no live session with it. Blocks for `timeout` at most; `None`
    /// means the agent's `timeout`.
    ///
    /// # Errors
    /// `Unreachable`, `PeerSilent`, `PeerReset`, `AuthRequired`, `AuthUnsupported`, `AuthFailed`,
    /// `VersionMismatch`, `Deadline`, `Shutdown`; `Busy` if the peer's process has no descriptors
    /// for one more session.
    pub fn connect(&self, timeout: impl Into<Option<Duration>>) -> Result<PeerSummary> {
        let link = self.link(timeout)?;
        let Some(transport) = link.kind() else { return Err(ended(&link)) };
        let summary = match link.info() {
            Some(info) => PeerSummary {
                name: info.name.clone(),
                incarnation: Some(info.incarnation),
                transport,
                version: info.version,
                authenticated: info.authenticated,
                checksum: info.checksum,
                fallback: link.obstacle(),
            },
            None => PeerSummary {
                name: link.address.clone(),
                incarnation: None,
                transport,
                version: 0,
                authenticated: false,
                checksum: false,
                fallback: Some("the peer is not a kvferry agent".to_owned()),
            },
        };
        Ok(summary)
    }

    /// The capabilities of the live session's transport; `None` without a live session.
    pub fn capabilities(&self) -> Option<Capabilities> {
        self.state.live().and_then(|link| link.capabilities())
    }

    /// The transport of the live session; `None` without a live session.
    pub fn transport(&self) -> Option<TransportKind> {
        self.state.live().and_then(|link| link.kind())
    }

    /// Ends the live session; its transfers fail with `PeerClosed`. The next call connects again.
    pub fn disconnect(&self) {
        if let Some(link) = self.state.take_live() {
            let what = "this agent disconnected from the peer";
            let error = Error::new(ErrorKind::PeerClosed, what).with("peer", &link.address);
            link.close(WireCode::Closed, error);
        }
    }

    /// The regions of the peer that this agent may read or write. Blocks for one round trip per 4096
    /// regions, for `timeout` at most.
    ///
    /// The regions of a peer of another protocol have an address only
    /// ([`RegionId::ABSOLUTE`](crate::RegionId::ABSOLUTE)) and no incarnation, so a transfer to them
    /// does not notice that the peer has restarted.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub fn regions(&self, timeout: impl Into<Option<Duration>>) -> Result<Vec<RemoteRegion>> {
        let timeout = self.limit(timeout);
        let until = now() + timeout;
        let link = self.link(timeout)?;
        link.backend().regions(&link, until.saturating_since(now()))
    }

    /// The peer's region with this name, which the peer gave it with
    /// [`Agent::name_region`](crate::Agent::name_region). Blocks for one round trip.
    ///
    /// # Errors
    /// As [`Peer::connect`]; `NotRegistered` if the peer has no region of this name, or the region's
    /// access is [`Access::NONE`](crate::Access::NONE); `Unsupported` for a peer of another protocol.
    pub fn region(&self, name: &str, timeout: impl Into<Option<Duration>>) -> Result<RemoteRegion> {
        let timeout = self.limit(timeout);
        let until = now() + timeout;
        let link = self.link(timeout)?;
        link.backend().region(&link, name, until.saturating_since(now()))
    }

    /// Measures the time of one round trip to the peer's control thread. Blocks for `timeout` at most.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub fn probe(&self, timeout: impl Into<Option<Duration>>) -> Result<Duration> {
        let timeout = self.limit(timeout);
        let link = self.link(timeout)?;
        link.backend().probe(&link, timeout)
    }

    /// The channel to this peer. Connects if there is no live session; blocks for `timeout` at most.
    ///
    /// # Errors
    /// As [`Peer::connect`]; `Unsupported` for a peer of another protocol.
    pub fn channel(&self, timeout: impl Into<Option<Duration>>) -> Result<Channel> {
        Channel::of(&self.link(timeout)?)
    }

    /// Like [`Peer::channel`], but returns at once. Calls `opened` once, with the channel or the
    /// error, on any thread; on the calling thread, before this returns, if the outcome is known.
    /// `opened` must not block. A peer that has been silent gets the time of a handshake to answer: it may
    /// have been stopped, and run again by now.
    pub fn open_channel(&self, opened: Box<dyn FnOnce(Result<Channel>) + Send>) {
        if let Err(error) = self.core.check() {
            return opened(Err(error));
        }
        let linked = move |link: Result<Arc<Link>>| {
            let channel = link.and_then(|link| Channel::of(&link));
            contain("the callback of `Peer::open_channel`", || opened(channel));
        };
        self.state.link_patiently(Box::new(linked));
    }

    fn job(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Arc<Job> {
        let (core, timeout) = (Arc::clone(&self.core), self.limit(options.timeout));
        let job =
            Job::new(core, op, batch.clone(), options.notify.clone(), timeout, options.streams);
        if let Some(mut ended) = self.state.ended_job()
            && let Some(alone) = Arc::get_mut(&mut ended)
        {
            *alone = job;
            return ended;
        }
        Arc::new(job)
    }

    /// Refuses what can be refused before anything is sent.
    fn check(&self, link: &Link, batch: &Batch, notify: Option<&Notification>) -> Result<()> {
        if let Some(named) = batch.incarnation
            && link.incarnation() != Some(named)
        {
            return Err(Error::new(
                ErrorKind::StaleIncarnation,
                "the batch names regions from before the peer restarted; ask the peer for its regions again",
            )
            .with("peer", &link.address)
            .with("named", named)
            .with("live", link.incarnation().map_or_else(|| "-".into(), |i| i.to_string())));
        }
        if notify.is_some() && link.capabilities().is_some_and(|all| !all.notifications) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this peer's transport carries no notifications with data",
            )
            .with("peer", &link.address));
        }
        Ok(())
    }

    fn check_notification(notify: Option<&Notification>) -> Result<()> {
        let Some(notify) = notify else { return Ok(()) };
        let len = notify.wire_len();
        let max = Limits::default().notify_max as usize;
        if len > max {
            return Err(Error::new(ErrorKind::TooLarge, "the notification is too long")
                .with("len", len)
                .with("max", max));
        }
        Ok(())
    }

    fn blocking(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Result<TransferStats> {
        self.core.check()?;
        Self::check_notification(options.notify.as_ref())?;
        if batch.is_empty() && options.notify.is_none() {
            return Ok(TransferStats { bytes: 0, descriptors: 0, streams: 0, transport: None });
        }
        // The fast path: a live session whose transport copies directly needs no job and no lane.
        if !batch.local.has_edges()
            && let Some(link) = self.state.live()
            && self.check(&link, batch, options.notify.as_ref()).is_ok()
            && let Some(outcome) = link.run_direct(op, batch, options, self.limit(options.timeout))
        {
            return outcome;
        }
        batch.local.check_order()?;
        let job = self.job(op, batch, options);
        if !edges::have_happened(&job, options.interrupt) {
            return drive::outcome(&job, options.interrupt);
        }
        let link = match self.link_for(&job, options.interrupt) {
            Ok(link) => link,
            Err(e) => {
                job.finish(Err(e.clone()));
                return Err(e);
            }
        };
        let outcome = drive::run(&job, &link, options.interrupt);
        self.state.keep_job(job);
        outcome
    }

    /// A link to the incarnation of the peer that the job's batch names.
    fn link_for(&self, job: &Job, interrupt: Interrupt<'_>) -> Result<Arc<Link>> {
        let link = self.state.wait_link(job.deadline, interrupt)?;
        match self.check(&link, &job.batch, job.notify.as_ref()) {
            Err(e) if is_stale(&e) && !self.is_there(&link, job.deadline) => {
                // The session was stale, not the batch: connect again.
                let link = self.state.wait_link(job.deadline, interrupt)?;
                self.check(&link, &job.batch, job.notify.as_ref()).map(|()| link)
            }
            checked => checked.map(|()| link),
        }
    }

    fn asynchronous(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Transfer {
        let job = self.job(op, batch, options);
        let refused = self
            .core
            .check()
            .and_then(|()| Self::check_notification(options.notify.as_ref()))
            .and_then(|()| batch.local.check_order());
        if let Err(e) = refused {
            job.finish(Err(e));
        } else if batch.is_empty() && options.notify.is_none() {
            job.finish(Ok(TransferStats { bytes: 0, descriptors: 0, streams: 0, transport: None }));
        } else {
            let (state, peer) = (Arc::clone(&self.state), self.clone());
            let submitted = Arc::clone(&job);
            edges::when_happened(&job, move || {
                state.link(Box::new(move |link| peer.submit(link, &submitted, true)));
            });
        }
        Transfer(job)
    }

    /// Submits a job on the link to its peer.
    ///
    /// If the regions of the batch belong to another incarnation than the session, the session may
    /// be the stale one: the peer may have restarted without our noticing. With `asks`, a probe
    /// finds that out, once.
    fn submit(self, link: Result<Arc<Link>>, job: &Arc<Job>, asks: bool) {
        let link = match link {
            Ok(link) => link,
            Err(e) => return job.finish(Err(e)),
        };
        match self.check(&link, &job.batch, job.notify.as_ref()) {
            Ok(()) => drive::submit(job, &link),
            Err(e) if asks && is_stale(&e) => {
                let (job, asked) = (Arc::clone(job), Arc::clone(&link));
                let budget = job.deadline.saturating_since(now());
                let answered = move |_, _| {
                    if asked.end().is_none() {
                        return job.finish(Err(e));
                    }
                    let (peer, job) = (self.clone(), Arc::clone(&job));
                    self.state.link(Box::new(move |link| peer.submit(link, &job, false)));
                };
                link.request(PROBE, Vec::new(), budget, Box::new(answered));
            }
            Err(e) => job.finish(Err(e)),
        }
    }

    /// Whether the peer still answers on a session. False if the session has ended.
    fn is_there(&self, link: &Arc<Link>, deadline: Timestamp) -> bool {
        let left = deadline.saturating_since(now());
        link.backend().probe(link, left).is_ok() || link.end().is_none()
    }

    /// Finds local memory of a device in a batch of this peer's agent: see [`Batch::find_device_memory`].
    ///
    /// # Errors
    /// Those of [`Batch::find_device_memory`].
    pub fn find_device_memory(&self, batch: &mut Batch) -> Result<()> {
        batch.find_device_memory_of(&self.core)
    }

    /// Writes a batch to the peer's memory. Blocks; the calling thread moves the bytes.
    ///
    /// After it returns, kvferry does not read the local memory. After an error,
    /// [`Error::quiesced`] says whether it is certain that no more bytes of the batch land at the
    /// peer; bytes that landed before stay.
    ///
    /// # Errors
    /// The peer: `Unreachable`, `PeerReset`, `PeerSilent`, `PeerClosed`, and those of authentication.
    /// The batch, with the number of the descriptor: `OutOfBounds`, `NotRegistered`, `AccessDenied`,
    /// `Revoked`, `StaleIncarnation`; `InvalidArgument` for memory of a device without an order ([`Batch::set_after`]).
    /// Time: `Deadline`, `Interrupted`. Damaged bytes: `Checksum`.
    pub fn write(&self, batch: &Batch, options: &Options<'_>) -> Result<TransferStats> {
        self.blocking(Op::Write, batch, options)
    }

    /// Reads a batch from the peer's memory. Blocks; the calling thread moves the bytes.
    ///
    /// After it returns, with or without an error, kvferry does not write the local memory.
    ///
    /// # Errors
    /// As [`Peer::write`].
    pub fn read(&self, batch: &Batch, options: &Options<'_>) -> Result<TransferStats> {
        self.blocking(Op::Read, batch, options)
    }

    /// Like [`Peer::write`], but returns at once; the I/O threads move the bytes. An error is the
    /// outcome of the transfer.
    pub fn write_async(&self, batch: &Batch, options: &Options<'_>) -> Transfer {
        self.asynchronous(Op::Write, batch, options)
    }

    /// Like [`Peer::read`], but returns at once; the I/O threads move the bytes. An error is the
    /// outcome of the transfer.
    pub fn read_async(&self, batch: &Batch, options: &Options<'_>) -> Transfer {
        self.asynchronous(Op::Read, batch, options)
    }

    /// Sends a notification without a batch. Blocks until the peer has queued it.
    ///
    /// # Errors
    /// As [`Peer::write`]; `Busy` if the peer's queue is full.
    pub fn notify(&self, notification: Notification, options: &Options<'_>) -> Result<()> {
        let link = self.link(self.limit(options.timeout))?;
        if let Some(sent) = link.backend().notify(&link, &notification, self.limit(options.timeout))
        {
            return sent;
        }
        let options = Options { notify: Some(notification), ..options.clone() };
        self.blocking(Op::Write, &Batch::new(), &options).map(drop)
    }
}

fn ended(link: &Link) -> Error {
    let closed = || Error::new(ErrorKind::PeerClosed, "the session has ended");
    link.end().cloned().unwrap_or_else(closed).with("peer", &link.address)
}

fn is_stale(error: &Error) -> bool {
    error.kind() == ErrorKind::StaleIncarnation
}
