//! A peer, and moving bytes to and from it.

use crate::agent::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::region::RemoteRegion;
use crate::notify::Notification;
use crate::reactor::now;
use crate::session::connect::PeerState;
use crate::session::link::Link;
use crate::session::service::{self, RegionsPage, RegionsQuery};
use crate::transfer::batch::Batch;
use crate::transfer::drive::{self, Slot};
use crate::transfer::job::{Job, Moved, Op};
use crate::transfer::{Options, Transfer};
use crate::transport::TransportKind;
use kvferry_proto::{Incarnation, Limits, Timestamp, WireCode};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// Regions that are listed of one peer: what it says must not fill our memory.
const REGIONS_MAX: usize = 1 << 20;

/// What is known of a peer after meeting it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerSummary {
    /// The peer's name; the address for stock Mooncake peers.
    pub name: String,
    /// This life of the peer; none for stock Mooncake peers.
    pub incarnation: Option<Incarnation>,
    /// How bytes move to it.
    pub transport: TransportKind,
    /// The protocol version of the session; 0 for stock Mooncake peers.
    pub version: u16,
    /// Whether both sides proved a shared secret.
    pub authenticated: bool,
    /// Whether payload carries checksums.
    pub checksum: bool,
    /// Why bytes do not go the fastest way within one host (`local`), for people; none if they do.
    pub fallback: Option<String>,
}

/// A peer of an agent, by address. Clones are the same peer.
///
/// A peer that restarts at its address is met afresh by the next call; handles that belong to
/// its earlier life are refused with `StaleIncarnation`.
#[derive(Clone, Debug)]
pub struct Peer {
    pub(crate) core: Arc<Core>,
    pub(crate) state: Arc<PeerState>,
}

impl Peer {
    pub(crate) fn new(core: Arc<Core>, state: Arc<PeerState>) -> Self {
        Self { core, state }
    }

    /// The peer's `host:port`, as given.
    pub fn address(&self) -> &str {
        &self.state.address
    }

    pub(crate) fn link(&self, timeout: Duration) -> Result<Arc<Link>> {
        self.core.check()?;
        self.state.wait_link(now() + timeout, None)
    }

    /// Meets the peer now, if no session with it is live.
    ///
    /// # Errors
    /// `Unreachable`, `AuthRequired`, `AuthUnsupported`, `AuthFailed`, `VersionMismatch`,
    /// `Deadline`, …
    pub fn connect(&self, timeout: Duration) -> Result<PeerSummary> {
        let link = self.link(timeout)?;
        let summary = match link.info() {
            Some(info) => PeerSummary {
                name: info.name.clone(),
                incarnation: Some(info.incarnation),
                transport: link.kind(),
                version: info.version,
                authenticated: info.authenticated,
                checksum: info.checksum,
                fallback: link.obstacle().map(str::to_owned),
            },
            None => PeerSummary {
                name: link.address.clone(),
                incarnation: None,
                transport: link.transport.kind(),
                version: 0,
                authenticated: false,
                checksum: false,
                fallback: Some("the peer is not a kvferry agent".to_owned()),
            },
        };
        Ok(summary)
    }

    /// The transport of the live session, if there is one.
    pub fn transport(&self) -> Option<TransportKind> {
        self.state.live().map(|link| link.kind())
    }

    /// Ends the live session; the next call meets the peer afresh. Transfers under way fail.
    pub fn disconnect(&self) {
        if let Some(link) = self.state.take_live() {
            let what = "this agent disconnected from the peer";
            link.close(Error::new(ErrorKind::PeerClosed, what).with("peer", &link.address));
        }
    }

    fn ask(
        &self,
        link: &Arc<Link>,
        kind: u16,
        body: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        let slot = Slot::new();
        let fill = Arc::clone(&slot);
        link.request(kind, body, timeout, Box::new(move |code, body| fill.fill((code, body))));
        link.begin();
        let answer = slot.wait(now() + timeout, None);
        link.finish();
        match answer.map_err(|e| e.with("peer", &link.address))? {
            (WireCode::Ok, body) => Ok(body),
            (WireCode::Closed, _) if link.end().is_some() => {
                Err(link.end().cloned().expect("checked in the guard"))
            }
            (code, _) => Err(Error::new(
                ErrorKind::from_wire(code),
                format!("the peer did not answer a request: {code}"),
            )
            .with("peer", &link.address)),
        }
    }

    /// The regions that the peer lets us reach.
    ///
    /// A stock Mooncake peer is asked each time. Its regions have an address only
    /// ([`RegionId::ABSOLUTE`](crate::RegionId::ABSOLUTE)) and belong to no named life: whether
    /// the peer has restarted since can't be told from them.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub fn regions(&self, timeout: Duration) -> Result<Vec<RemoteRegion>> {
        let until = now() + timeout;
        let link = self.link(timeout)?;
        if let Some(mooncake) = &link.mooncake {
            return mooncake.regions(&link, until.saturating_since(now()));
        }
        let mut all: Vec<RemoteRegion> = Vec::new();
        loop {
            let after = all.last().map_or(0, |r| r.id.0);
            let left = until.saturating_since(now());
            let body = service::encode(&RegionsQuery { after });
            let answer = self.ask(&link, service::REGIONS, body, left)?;
            let page = RegionsPage::parse(&answer, after).map_err(|e| {
                Error::new(ErrorKind::Protocol, "the peer's list of regions is malformed")
                    .with("peer", &link.address)
                    .caused_by(e)
            })?;
            let more = page.more && !page.regions.is_empty();
            all.extend(page.regions);
            if !more {
                return Ok(all);
            }
            if all.len() > REGIONS_MAX {
                return Err(Error::new(
                    ErrorKind::TooLarge,
                    "the peer has too many regions to list",
                )
                .with("peer", &link.address)
                .with("listed", all.len()));
            }
        }
    }

    /// Measures one round trip to the peer's control thread.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub fn probe(&self, timeout: Duration) -> Result<Duration> {
        let link = self.link(timeout)?;
        if let Some(mooncake) = &link.mooncake {
            return mooncake.probe(&link, timeout);
        }
        let start = now();
        self.ask(&link, service::PROBE, Vec::new(), timeout)?;
        Ok(now().saturating_since(start))
    }

    fn timeout(&self, options: &Options<'_>) -> Duration {
        options.timeout.unwrap_or_else(|| self.core.config.timeout())
    }

    fn job(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Arc<Job> {
        let (notify, timeout) = (options.notify.clone(), self.timeout(options));
        if let Some(mut job) = self.state.live().and_then(|link| link.ended_job())
            && let Some(alone) = Arc::get_mut(&mut job)
        {
            alone.renew(op, batch.clone(), notify, timeout, options.streams);
            return job;
        }
        Job::new(Arc::clone(&self.core), op, batch.clone(), notify, timeout, options.streams)
    }

    /// What can be refused before anything is sent.
    fn check(&self, link: &Link, batch: &Batch, notify: Option<&Notification>) -> Result<()> {
        if let Some(named) = batch.incarnation
            && link.incarnation() != Some(named)
        {
            return Err(Error::new(
                ErrorKind::StaleIncarnation,
                "the batch names regions of an earlier life of the peer; ask for its regions again",
            )
            .with("peer", &link.address)
            .with("named", named)
            .with("live", link.incarnation().map_or_else(|| "-".into(), |i| i.to_string())));
        }
        if notify.is_some() && !link.transport.capabilities().notifications {
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
        let len = 4 + notify.name.len() + notify.message.len();
        let max = Limits::default().notify_max as usize;
        if len > max {
            return Err(Error::new(ErrorKind::TooLarge, "the notification is too long")
                .with("len", len)
                .with("max", max));
        }
        Ok(())
    }

    fn blocking(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Result<Moved> {
        self.core.check()?;
        Self::check_notification(options.notify.as_ref())?;
        if batch.is_empty() && options.notify.is_none() {
            return Ok(Moved { bytes: 0, descriptors: 0, streams: 0, transport: None });
        }
        // A peer that is known and within reach takes no more than copying.
        if let Some(link) = self.state.live()
            && self.check(&link, batch, options.notify.as_ref()).is_ok()
            && let Some(outcome) =
                drive::run_direct(&link, op, batch, options, self.timeout(options))
        {
            return outcome;
        }
        let job = self.job(op, batch, options);
        let mut link = match self.state.wait_link(job.deadline, options.interrupt) {
            Ok(link) => link,
            Err(e) => return finished(&job, e),
        };
        let mut checked = self.check(&link, &job.batch, job.notify.as_ref());
        if checked.as_ref().is_err_and(is_stale) && !self.is_there(&link, job.deadline) {
            // The session was the stale one.
            link = match self.state.wait_link(job.deadline, options.interrupt) {
                Ok(link) => link,
                Err(e) => return finished(&job, e),
            };
            checked = self.check(&link, &job.batch, job.notify.as_ref());
        }
        if let Err(e) = checked {
            return finished(&job, e);
        }
        let outcome = drive::run(&job, &link, options.interrupt);
        link.keep_job(job);
        outcome
    }

    fn asynchronous(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Transfer {
        let job = self.job(op, batch, options);
        let refused =
            self.core.check().and_then(|()| Self::check_notification(options.notify.as_ref()));
        if let Err(e) = refused {
            job.finish(Err(e));
        } else if batch.is_empty() && options.notify.is_none() {
            job.finish(Ok(Moved { bytes: 0, descriptors: 0, streams: 0, transport: None }));
        } else {
            let (peer, job) = (self.clone(), Arc::clone(&job));
            self.state.link(Box::new(move |link| peer.submit(link, &job, true)));
        }
        Transfer(job)
    }

    /// Goes on with a job when its peer was met. A session that a batch's regions do not belong to
    /// may itself be the one of an earlier life, whose end is not known yet: that is found out
    /// once, by asking.
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
                link.request(service::PROBE, Vec::new(), budget, Box::new(answered));
            }
            Err(e) => job.finish(Err(e)),
        }
    }

    /// Whether the peer of a session answers; if not, the session has ended.
    fn is_there(&self, link: &Arc<Link>, deadline: Timestamp) -> bool {
        let left = deadline.saturating_since(now());
        self.ask(link, service::PROBE, Vec::new(), left).is_ok() || link.end().is_none()
    }

    /// Writes a batch to the peer's memory. Blocks; this thread moves the bytes.
    ///
    /// When it returns, the local memory is not read any more. With an error, [`Error::quiesced`]
    /// tells whether it is certain that nothing of the batch lands at the peer any more; what had
    /// landed before stays.
    ///
    /// # Errors
    /// Of the peer: `Unreachable`, `PeerReset`, `PeerSilent`, `PeerClosed`, authentication. Of the
    /// batch, with the descriptor's number: `OutOfBounds`, `NotRegistered`, `AccessDenied`,
    /// `Revoked`, `StaleIncarnation`. Of time: `Deadline`, `Interrupted`. Of the bytes:
    /// `Checksum`.
    pub fn write(&self, batch: &Batch, options: &Options<'_>) -> Result<Moved> {
        self.blocking(Op::Write, batch, options)
    }

    /// Reads a batch from the peer's memory. Blocks; this thread moves the bytes.
    ///
    /// When it returns, the local memory is not written any more, with or without an error.
    ///
    /// # Errors
    /// As [`Peer::write`].
    pub fn read(&self, batch: &Batch, options: &Options<'_>) -> Result<Moved> {
        self.blocking(Op::Read, batch, options)
    }

    /// Like [`Peer::write`], but returns at once; the I/O threads move the bytes. Every error is
    /// the transfer's outcome.
    pub fn write_async(&self, batch: Batch, options: Options<'_>) -> Transfer {
        self.asynchronous(Op::Write, &batch, &options)
    }

    /// Like [`Peer::read`], but returns at once; the I/O threads move the bytes. Every error is
    /// the transfer's outcome.
    pub fn read_async(&self, batch: Batch, options: Options<'_>) -> Transfer {
        self.asynchronous(Op::Read, &batch, &options)
    }

    /// Sends a notification without data. Returns when the peer has queued it.
    ///
    /// # Errors
    /// As [`Peer::write`]; `Busy` if the peer's queue is full.
    pub fn notify(&self, notification: Notification, options: &Options<'_>) -> Result<()> {
        if self.state.live().is_some_and(|link| link.mooncake.is_some())
            || self.core.approach == crate::transport::Approach::Mooncake
        {
            let link = self.link(self.timeout(options))?;
            if let Some(mooncake) = &link.mooncake {
                return mooncake.notify(&link, &notification, self.timeout(options));
            }
        }
        let options = Options { notify: Some(notification), ..options.clone() };
        self.blocking(Op::Write, &Batch::new(), &options).map(drop)
    }
}

fn is_stale(error: &Error) -> bool {
    error.kind() == ErrorKind::StaleIncarnation
}

fn finished(job: &Job, error: Error) -> Result<Moved> {
    job.finish(Err(error.clone()));
    Err(error)
}
