//! The backend of a link with a native session.

use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gate;
use crate::memory::region::RemoteRegion;
use crate::quota::{Permit, Quota};
use crate::reactor::now;
use crate::session::control::close_error;
use crate::session::lane;
use crate::sync::{Arc, Mutex, OnceLock, Weak, lock};
use crate::transfer::job::RevokeDone;
use crate::transfer::link::{Answered, Backend, Link};
use crate::transfer::requests::{PROBE, REGION, REGIONS, RegionsPage, RegionsQuery, encode};
use crate::transfer::slot::Slot;
use kvferry_proto::auth::MAC_LEN;
use kvferry_proto::{PeerInfo, Session, Side, StreamId, Timestamp, WireCode};
use kvferry_sys::socket::Socket;
use rustc_hash::FxHashMap;
use std::net::Shutdown;
use std::time::Duration;

/// The largest number of regions listed for one peer: its answers must not fill our memory.
const REGIONS_MAX: usize = 1 << 20;

/// A data stream that the peer opened.
#[derive(Debug)]
pub(crate) struct InboundLane {
    /// `None` once the stream has ended.
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

/// The quota has no room for another stream.
pub(crate) struct Full;

/// A native session, and the requests and revokes that its peer has not answered.
pub(crate) struct Native {
    /// A reference to this value, for handlers that open lanes.
    this: Weak<Self>,
    session: Mutex<Session>,
    /// The token of the control connection's handler, on the control thread.
    token: u64,
    info: OnceLock<PeerInfo>,
    inbound: Mutex<FxHashMap<StreamId, InboundLane>>,
    /// Revokes that the peer has not confirmed, each with its deadline.
    revokes: Mutex<FxHashMap<u64, (Timestamp, RevokeDone)>>,
    requests: Mutex<FxHashMap<u64, Answered>>,
    /// Set when the session is over: later requests fail at once.
    ended: OnceLock<()>,
}

impl Native {
    pub(crate) fn new(session: Session, token: u64) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            session: Mutex::new(session),
            token,
            info: OnceLock::new(),
            inbound: Mutex::default(),
            revokes: Mutex::default(),
            requests: Mutex::default(),
            ended: OnceLock::new(),
        })
    }

    pub(crate) fn session(&self) -> crate::sync::MutexGuard<'_, Session> {
        lock(&self.session)
    }

    pub(crate) fn set_info(&self, info: PeerInfo) {
        let _ = self.info.set(info);
    }

    /// Registers a stream that the peer opened, if the quota has room for it. `None` if the session
    /// is over.
    pub(crate) fn add_inbound(
        &self,
        stream: StreamId,
        lane: InboundLane,
        quota: &Quota,
    ) -> Option<Result<Permit, Full>> {
        let mut inbound = lock(&self.inbound);
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
            let mut inbound = lock(&self.inbound);
            streams.iter().filter_map(|stream| inbound.remove(stream)).collect::<Vec<_>>()
        };
        lanes.into_iter().map(InboundLane::shut).collect()
    }

    /// Removes the callback of a revoke that the peer has answered.
    pub(crate) fn take_revoke(&self, id: u64) -> Option<RevokeDone> {
        lock(&self.revokes).remove(&id).map(|(_, done)| done)
    }

    /// Removes the callback of a request that the peer has answered.
    pub(crate) fn take_request(&self, id: u64) -> Option<Answered> {
        lock(&self.requests).remove(&id)
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
            let mut revokes = lock(&self.revokes);
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
            let mut requests = lock(&self.requests);
            let id = if self.ended.get().is_some() {
                0
            } else {
                session.request(kind, body, budget, now())
            };
            if id != 0 {
                requests.insert(id, answered);
                drop(requests);
                drop(session);
                return self.wake(&link.core);
            }
        }
        answered(WireCode::Closed, Vec::new());
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
            let mut inbound = lock(&self.inbound);
            let _ = self.ended.set(());
            inbound.drain().collect()
        };
        for (_, lane) in inbound {
            lane.shut();
        }
        let revokes: Vec<_> = lock(&self.revokes).drain().collect();
        for (_, (_, done)) in revokes {
            done(false);
        }
        let requests: Vec<_> = lock(&self.requests).drain().collect();
        for (_, answered) in requests {
            answered(WireCode::Closed, Vec::new());
        }
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        lock(&self.revokes).values().map(|(until, _)| *until).min()
    }

    fn expire(&self, link: &Link, now: Timestamp) {
        let late: Vec<_> = lock(&self.revokes).extract_if(|_, (until, _)| *until <= now).collect();
        for (id, (_, done)) in late {
            // The peer answers heartbeats, but a copy on its side does not end: a device is stuck.
            tracing::warn!(peer = %link.address, revoke = id, "the peer did not confirm a revoke in time");
            done(false);
        }
    }

    fn local_hello(&self) -> Option<(StreamId, Vec<u8>)> {
        self.session().local_hello()
    }

    fn local_mac(&self, stream: StreamId) -> Option<[u8; MAC_LEN]> {
        self.session().local_mac(stream)
    }

    /// Keeps the gate of a stream while a device still copies for it, so that a revoke that arrives
    /// after the stream's reset is confirmed only when the copies have ended.
    fn inbound_ended(&self, stream: StreamId) {
        let mut inbound = lock(&self.inbound);
        if let Some(lane) = inbound.get_mut(&stream) {
            lane.socket = None;
        }
        inbound.retain(|_, lane| lane.socket.is_some() || !lane.gate.is_quiet());
    }
}
