//! The backend of a link with a native session.

use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gate;
use crate::memory::region::RemoteRegion;
use crate::quota::{Permit, Quota};
use crate::reactor::now;
use crate::session::lane;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, OnceLock, Weak};
use crate::transfer::job::RevokeDone;
use crate::transfer::link::{Answered, Backend, Link};
use crate::transfer::requests::{PROBE, REGION, REGIONS, RegionsPage, RegionsQuery, encode};
use crate::transfer::slot::Slot;
use kvferry_proto::auth::MAC_LEN;
use kvferry_proto::{
    CloseReason, PeerInfo, ProofLabel, Session, Side, StreamId, Timestamp, WireCode,
};
use kvferry_sys::socket::Socket;
use rustc_hash::FxHashMap;
use std::io;
use std::net::Shutdown;
use std::time::Duration;

/// The largest number of regions listed for one peer: its answers must not fill our memory.
const REGIONS_MAX: usize = 1 << 20;

/// A data stream that the peer opened.
#[derive(Debug)]
pub(crate) struct InboundLane {
    /// The stream's socket; `None` once the stream has ended.
    pub(crate) socket: Option<Arc<Socket>>,
    pub(crate) gate: Arc<Gate>,
}

impl InboundLane {
    fn shut(self) -> Arc<Gate> {
        self.gate.shut();
        if let Some(socket) = self.socket {
            socket.shutdown(Shutdown::Both);
        }
        self.gate
    }
}

/// Bytes of frames that leave in one system call, or one frame if it is longer.
const WRITTEN_TOGETHER: usize = 64 * 1024;

/// Outcome of writing the session's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    All,
    /// The socket takes no more now.
    Full,
    /// The connection is lost; the session knows.
    Lost,
}

/// The control connection to the peer, and the frames that wait for it.
#[derive(Default)]
struct Wire {
    /// The control connection; `None` when the session is over.
    socket: Option<Arc<Socket>>,
    /// Frames of which `at` bytes were written.
    out: Vec<u8>,
    at: usize,
    /// Bytes of this side's requests in `out`.
    asked: usize,
}

/// The quota has no room for another stream.
pub(crate) struct Full;

/// A native session, and the requests and revokes that its peer has not answered.
pub(crate) struct Native {
    /// A reference to this value, for handlers that open lanes.
    this: Weak<Self>,
    session: Mutex<Session>,
    /// Set while a thread writes the session's frames, including those that other threads queue meanwhile.
    writing: AtomicBool,
    wire: Mutex<Wire>,
    /// The token of the control connection's handler, on the control thread.
    token: u64,
    info: OnceLock<PeerInfo>,
    inbound: Mutex<FxHashMap<StreamId, InboundLane>>,
    /// Revokes that the peer has not confirmed, each with its deadline.
    revokes: Mutex<FxHashMap<u64, (Timestamp, RevokeDone)>>,
    requests: Mutex<FxHashMap<u64, Answered>>,
    /// The descriptor of an accepted session. None is left to one that gave its place to another session.
    permit: Mutex<Option<Permit>>,
    /// The session ends without waiting for the peer's answer.
    is_displaced: AtomicBool,
    /// Set when the session is over: later requests fail at once.
    ended: OnceLock<()>,
}

impl Native {
    pub(crate) fn new(session: Session, socket: &Arc<Socket>, token: u64) -> Arc<Self> {
        let wire = Wire { socket: Some(Arc::clone(socket)), ..Wire::default() };
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            session: Mutex::new(session),
            writing: AtomicBool::new(false),
            wire: Mutex::new(wire),
            token,
            info: OnceLock::new(),
            inbound: Mutex::default(),
            revokes: Mutex::default(),
            requests: Mutex::default(),
            permit: Mutex::default(),
            is_displaced: AtomicBool::new(false),
            ended: OnceLock::new(),
        })
    }

    pub(crate) fn session(&self) -> crate::sync::MutexGuard<'_, Session> {
        self.session.lock()
    }

    pub(crate) fn set_info(&self, info: PeerInfo) {
        let _ = self.info.set(info);
    }

    /// Has this thread write the session's frames, those that any thread queues from now on, too:
    /// it must call [`Native::write`]. False if another thread does.
    pub(crate) fn begin_writing(&self) -> bool {
        !self.writing.swap(true, Ordering::SeqCst)
    }

    /// Writes the session's frames. Only after [`Native::begin_writing`], which it ends. Unless it
    /// wrote all of them, the control thread has to go on.
    pub(crate) fn write(&self, core: &Core, now: Timestamp) -> WriteOutcome {
        loop {
            let wrote = self.write_frames(core, now);
            self.writing.store(false, Ordering::SeqCst);
            // A thread that found `writing` set has left its frame to this one.
            if wrote != WriteOutcome::All || !self.session().has_frames() || !self.begin_writing() {
                return wrote;
            }
        }
    }

    fn write_frames(&self, core: &Core, now: Timestamp) -> WriteOutcome {
        let mut wire = self.wire.lock();
        // Frames may be left: with `All`, `write` would try again for ever.
        let Wire { socket: Some(socket), out, at, asked } = &mut *wire else {
            return WriteOutcome::Lost;
        };
        loop {
            if *at == out.len() {
                (*at, *asked, *out) = (0, 0, Vec::new());
                let mut session = self.session();
                let (said_bytes, asked_bytes) = (session.said_bytes(), session.asked_bytes());
                while out.len() < WRITTEN_TOGETHER
                    && let Some(frame) = session.poll_transmit()
                {
                    if out.is_empty() { *out = frame } else { out.extend(frame) }
                }
                *asked = asked_bytes - session.asked_bytes();
                core.counters.control_bytes_sent.add(session.said_bytes() - said_bytes);
                if out.is_empty() {
                    return WriteOutcome::All;
                }
            }
            match socket.send(&out[*at..]) {
                Ok(n) => *at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return WriteOutcome::Full,
                Err(_) => {
                    (*at, *asked, *out) = (0, 0, Vec::new());
                    self.session().transport_closed(now);
                    return WriteOutcome::Lost;
                }
            }
        }
    }

    /// Bytes that the peer makes this side hold: what it sends, and answers that it does not read.
    pub(crate) fn held_bytes(&self) -> usize {
        let unwritten = {
            let wire = self.wire.lock();
            (wire.out.len() - wire.at).min(wire.out.len() - wire.asked)
        };
        unwritten + self.session().held_bytes()
    }

    /// Nothing is read or written any more; the descriptor is given back, and the memory of messages.
    pub(crate) fn hang_up(&self) {
        *self.wire.lock() = Wire::default();
        *self.permit.lock() = None;
        self.session().hang_up();
    }

    /// Keeps the session's permit until the connection ends or another session gets it.
    pub(crate) fn keep_permit(&self, permit: Permit) {
        *self.permit.lock() = Some(permit);
    }

    pub(crate) fn has_permit(&self) -> bool {
        self.permit.lock().is_some()
    }

    /// Ends the session and takes its permit for another one. The control thread says goodbye to the peer
    /// and closes the connection at its next turn.
    pub(crate) fn displace(&self, link: &Link, why: &str) -> Option<Permit> {
        let permit = self.permit.lock().take()?;
        self.is_displaced.store(true, Ordering::SeqCst);
        let what = format!("closed, {why}, for a newer session: connect again");
        self.session().close(WireCode::Busy, &what, now());
        link.terminate(Error::new(ErrorKind::Busy, what).with("peer", &link.address));
        self.wake(&link.core);
        Some(permit)
    }

    pub(crate) fn is_displaced(&self) -> bool {
        self.is_displaced.load(Ordering::SeqCst)
    }

    /// Registers a stream that the peer opened, if the quota has room for it. `None` if the session
    /// is over.
    pub(crate) fn add_inbound(
        &self,
        stream: StreamId,
        lane: InboundLane,
        quota: &Quota,
    ) -> Option<Result<Permit, Full>> {
        let mut inbound = self.inbound.lock();
        if self.ended.get().is_some() {
            return None;
        }
        let streams = inbound.values().filter(|lane| lane.socket.is_some()).count();
        let Some(permit) = quota.stream(streams) else { return Some(Err(Full)) };
        inbound.insert(stream, lane);
        Some(Ok(permit))
    }

    /// Shuts the gates of streams that the peer revokes. A gate is quiet once no copier is inside.
    pub(crate) fn shut_inbound(&self, streams: &[StreamId]) -> Vec<Arc<Gate>> {
        let lanes = {
            let mut inbound = self.inbound.lock();
            streams.iter().filter_map(|stream| inbound.remove(stream)).collect::<Vec<_>>()
        };
        lanes.into_iter().map(InboundLane::shut).collect()
    }

    /// Removes the callback of a revoke that the peer has answered.
    pub(crate) fn take_revoke(&self, id: u64) -> Option<RevokeDone> {
        self.revokes.lock().remove(&id).map(|(_, done)| done)
    }

    /// Removes the callback of a request that the peer has answered.
    pub(crate) fn take_request(&self, id: u64) -> Option<Answered> {
        self.requests.lock().remove(&id)
    }

    /// Sends a request and blocks until its answer. The heartbeat runs meanwhile.
    fn call(
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
                format!("the peer refused a request: {code}"),
            )
            .with("peer", &link.address)),
        }
    }
}

impl Backend for Native {
    fn info(&self) -> Option<&PeerInfo> {
        self.info.get()
    }

    fn open_lane(&self, link: &Arc<Link>) {
        if self.session().side() == Side::Acceptor {
            let what = "only the side that opened a session opens its streams: the peer";
            return link.lanes.failed(&Error::new(ErrorKind::Unsupported, what));
        }
        if let Some(native) = self.this.upgrade() {
            lane::open(&native, link);
        }
    }

    fn wake(&self, core: &Core) {
        core.threads.control.wake(self.token);
    }

    /// Fails if the peer does not confirm within the silence limit.
    fn revoke(&self, link: &Link, streams: Vec<StreamId>, done: RevokeDone) {
        {
            let mut session = self.session();
            let mut revokes = self.revokes.lock();
            let id = if self.ended.get().is_some() { 0 } else { session.revoke(streams, now()) };
            if id != 0 {
                revokes.insert(id, (now() + link.core.settings.silence, done));
                drop(revokes);
                drop(session);
                return self.wake(&link.core);
            }
        }
        done(false);
    }

    fn request(&self, link: &Link, kind: u16, body: Vec<u8>, budget: Duration, answered: Answered) {
        {
            let mut session = self.session();
            let mut requests = self.requests.lock();
            let had_events = session.has_events();
            let id = if self.ended.get().is_some() {
                0
            } else {
                session.request(kind, body, budget, now())
            };
            if id != 0 {
                requests.insert(id, answered);
                drop(requests);
                let is_refused = !had_events && session.has_events();
                drop(session);
                if is_refused {
                    // The session has answered by itself.
                    self.wake(&link.core);
                }
                return;
            }
        }
        answered(WireCode::Closed, Vec::new());
    }

    fn flush(&self, link: &Link) {
        if self.info.get().is_none() {
            return self.wake(&link.core);
        }
        if self.begin_writing() && self.write(&link.core, now()) != WriteOutcome::All {
            return self.wake(&link.core);
        }
        // While the heartbeat runs, the control thread looks at the deadlines of requests by itself.
        link.watch();
    }

    fn acknowledge(&self, link: &Link, id: u64) {
        let is_written = {
            let mut session = self.session();
            session.acknowledge(id, now());
            session.has_frames()
        };
        if is_written && self.begin_writing() && self.write(&link.core, now()) == WriteOutcome::All
        {
            return;
        }
        // The control thread writes what is left, when it is due.
        self.wake(&link.core);
    }

    fn regions(&self, link: &Arc<Link>, timeout: Duration) -> Result<Vec<RemoteRegion>> {
        let until = now() + timeout;
        let mut all: Vec<RemoteRegion> = Vec::new();
        loop {
            let after = all.last().map_or(0, |r| r.id.0);
            let left = until.saturating_since(now());
            let body = encode(&RegionsQuery { after });
            let answer = self.call(link, REGIONS, body, left)?;
            let page = RegionsPage::parse(&answer, after).map_err(|e| {
                Error::new(ErrorKind::Protocol, "malformed list of regions from the peer")
                    .with("peer", &link.address)
                    .caused_by(e)
            })?;
            let more = page.more && !page.regions.is_empty();
            all.extend(page.regions);
            if !more {
                return Ok(all);
            }
            if all.len() > REGIONS_MAX {
                let what = "the peer has too many regions to list";
                return Err(Error::new(ErrorKind::TooLarge, what)
                    .with("peer", &link.address)
                    .with("listed", all.len()));
            }
        }
    }

    fn region(&self, link: &Arc<Link>, name: &str, timeout: Duration) -> Result<RemoteRegion> {
        let answer = self.call(link, REGION, name.as_bytes().to_vec(), timeout);
        let named = answer.and_then(|answer| RemoteRegion::from_bytes(&answer));
        named.map_err(|e| e.with("name", name))
    }

    fn probe(&self, link: &Arc<Link>, timeout: Duration) -> Result<Duration> {
        let start = now();
        self.call(link, PROBE, Vec::new(), timeout)?;
        Ok(now().saturating_since(start))
    }

    fn close(&self, code: WireCode) {
        self.session().close(code, "", now());
    }

    fn closing(&self, link: &Link) -> Option<Error> {
        Some(close_error(&self.session().close_reason()?, &link.address))
    }

    fn ended(&self) {
        let inbound: Vec<_> = {
            let mut inbound = self.inbound.lock();
            let _ = self.ended.set(());
            inbound.drain().collect()
        };
        for (_, lane) in inbound {
            lane.shut();
        }
        let revokes: Vec<_> = self.revokes.lock().drain().collect();
        for (_, (_, done)) in revokes {
            done(false);
        }
        let requests: Vec<_> = self.requests.lock().drain().collect();
        for (_, answered) in requests {
            answered(WireCode::Closed, Vec::new());
        }
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.revokes.lock().values().map(|(until, _)| *until).min()
    }

    fn expire(&self, link: &Link, now: Timestamp) {
        let late: Vec<_> = self.revokes.lock().extract_if(|_, (until, _)| *until <= now).collect();
        for (id, (_, done)) in late {
            // The peer answers heartbeats, but a copy on its side does not end: a device is stuck.
            warn_limited!(peer = %link.address, revoke = id, "the peer did not confirm a revoke in time");
            done(false);
        }
    }

    fn prove(&self, label: ProofLabel) -> Option<(StreamId, Vec<u8>)> {
        self.session().prove(label)
    }

    fn answer_proof(&self, label: ProofLabel, stream: StreamId) -> Option<[u8; MAC_LEN]> {
        self.session().answer_proof(label, stream)
    }

    /// Keeps the gate of a stream while a device still copies for it, so that a revoke that arrives
    /// after the stream's reset is confirmed only when the copies have ended.
    fn inbound_ended(&self, stream: StreamId) {
        let mut inbound = self.inbound.lock();
        if let Some(lane) = inbound.get_mut(&stream) {
            lane.socket = None;
        }
        inbound.retain(|_, lane| lane.socket.is_some() || !lane.gate.is_quiet());
    }
}

/// The error for users of a session that ended.
pub(super) fn close_error(reason: &CloseReason, address: &str) -> Error {
    let code = reason.code.to_string();
    let (kind, what) = match reason.code {
        WireCode::Closed if reason.by_peer && reason.established => {
            (ErrorKind::PeerReset, "the connection to the peer was lost")
        }
        WireCode::Closed if reason.by_peer => (
            ErrorKind::PeerReset,
            "the peer closed the connection during the handshake; check that it is a kvferry agent",
        ),
        WireCode::Deadline if !reason.by_peer && !reason.established => {
            (ErrorKind::PeerSilent, "the peer did not answer the handshake in time")
        }
        WireCode::Silent => (ErrorKind::PeerSilent, "the peer sent nothing for the silence limit"),
        WireCode::Slept => {
            (ErrorKind::PeerSilent, "this process was suspended for longer than the silence limit")
        }
        WireCode::Shutdown if !reason.by_peer => (ErrorKind::Shutdown, "the agent was shut down"),
        other => (ErrorKind::from_wire(other), code.as_str()),
    };
    let error = Error::new(kind, what).with("peer", address);
    if reason.detail.is_empty() { error } else { error.with("detail", &reason.detail) }
}
