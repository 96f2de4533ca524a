//! Data connections to a stock peer: opening them, and detecting their end while they are idle.
//!
//! Each lane has a handler on the control thread as long as it lives. The handler waits only for
//! the peer to close, so that a peer's death is known before the lane is used again: the peer's
//! last lane ends the link, and the next call connects again. The handler holds the lane, and the
//! socket is closed with its last holder, so a thread that ends a lane must wake the handler
//! ([`drop_lane`]).

use super::KEEPALIVE;
use super::peer::{MooncakePeer, end};
use kvferry::transport::{Cause, Cx, Handler, Lane, Link, Next, prepare, unreachable_peer};
use kvferry::{Error, ErrorKind};
use kvferry_proto::{Guard, StreamId, Timestamp};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use kvferry_sys::sync::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The keepers of a link's lanes, by lane.
#[derive(Debug, Default)]
pub(super) struct LaneKeepers {
    last: AtomicU32,
    tokens: Mutex<FxHashMap<StreamId, u64>>,
}

impl LaneKeepers {
    fn tokens(&self) -> MutexGuard<'_, FxHashMap<StreamId, u64>> {
        self.tokens.lock()
    }

    fn add(&self, token: u64) -> StreamId {
        let id = StreamId(self.last.fetch_add(1, Ordering::Relaxed));
        self.tokens().insert(id, token);
        id
    }
}

pub(super) fn open_lane(peer: &MooncakePeer, link: &Arc<Link>) {
    match Socket::connect(peer.data) {
        Ok(socket) => {
            let control = &link.core.threads.control;
            let token = control.token();
            let keeper = LaneKeeper {
                link: Arc::clone(link),
                keepers: Arc::clone(peer.lanes()),
                data: peer.data,
                stage: Stage::Connecting(socket),
                id: peer.lanes().add(token),
                deadline: None,
            };
            control.add(token, Box::new(keeper));
        }
        Err(e) => failed(link, peer.data, &unreachable_peer(e)),
    }
}

fn failed(link: &Arc<Link>, data: SocketAddr, error: &Error) {
    let error = error.clone().with("peer", &link.address).with("address", data);
    // Before the waiters get the error, because they may connect again at once.
    if !link.has_lanes(1) {
        end(link, error.clone());
    }
    link.lane_failed(&error);
}

/// Ends a lane and its keeper.
pub(super) fn drop_lane(peer: &MooncakePeer, link: &Arc<Link>, lane: &Lane) {
    link.kill(lane);
    let token = peer.lanes().tokens().get(&lane.id).copied();
    if let Some(token) = token {
        link.core.threads.control.wake(token);
    }
}

/// Replaces a lane that the peer ended because it refused a range.
pub(super) fn replace_lane(peer: &MooncakePeer, link: &Arc<Link>, lane: &Lane) {
    drop_lane(peer, link, lane);
    if link.end().is_none() {
        link.open_ahead();
    }
}

enum Stage {
    Connecting(Socket),
    Open(Arc<Lane>),
    Gone,
}

struct LaneKeeper {
    link: Arc<Link>,
    keepers: Arc<LaneKeepers>,
    data: SocketAddr,
    stage: Stage,
    id: StreamId,
    deadline: Option<Timestamp>,
}

impl LaneKeeper {
    fn fail(&mut self, error: &Error) -> Next {
        self.stage = Stage::Gone;
        failed(&self.link, self.data, error);
        Next::Close
    }

    fn connecting(&mut self, cause: Cause, now: Timestamp) -> Next {
        let Stage::Connecting(socket) = &self.stage else {
            unreachable!("the handler is only called while connecting")
        };
        let deadline = *self.deadline.get_or_insert(now + self.link.core.handshake_timeout());
        if let Some(ended) = self.link.end() {
            let ended = ended.clone();
            return self.fail(&ended);
        }
        if cause.ready.any()
            && let Err(e) = socket.error()
        {
            return self.fail(&unreachable_peer(e));
        }
        if now >= deadline {
            return self.fail(&unreachable_peer(io::ErrorKind::TimedOut.into()));
        }
        if !cause.ready.write {
            return Next::Wait { interest: Interest::Write, deadline: Some(deadline) };
        }
        if let Err(e) = self.link.core.check_target(socket) {
            return self.fail(&e);
        }
        let Stage::Connecting(socket) = std::mem::replace(&mut self.stage, Stage::Gone) else {
            unreachable!("checked above")
        };
        prepare(&socket);
        let _ = socket.set_keepalive(KEEPALIVE);
        let gate = self.link.core.gate();
        let lane = Lane::new(self.id, socket, gate, Guard::Crc);
        self.stage = Stage::Open(Arc::clone(&lane));
        self.link.lane_opened(lane);
        Next::Wait { interest: Interest::Hangup, deadline: None }
    }

    fn open(&self, lane: &Lane, cause: Cause) -> Next {
        if lane.gate.is_shut() || self.link.end().is_some() {
            return Next::Close;
        }
        if !cause.ready.closed && !cause.ready.peer_closed {
            return Next::Wait { interest: Interest::Hangup, deadline: None };
        }
        if self.link.retire(lane) && !self.link.has_lanes(0) {
            let error = Error::new(ErrorKind::PeerReset, "the peer closed its connections");
            end(&self.link, error.with("peer", &self.link.address));
        }
        Next::Close
    }
}

impl Handler for LaneKeeper {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Stage::Connecting(socket) => Some(socket.as_fd()),
            Stage::Open(lane) => Some(lane.socket.as_fd()),
            Stage::Gone => None,
        }
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        match &self.stage {
            Stage::Connecting(_) => self.connecting(cause, cx.now),
            Stage::Open(lane) => self.open(lane, cause),
            Stage::Gone => Next::Close,
        }
    }
}

impl Drop for LaneKeeper {
    fn drop(&mut self) {
        self.keepers.tokens().remove(&self.id);
        if matches!(self.stage, Stage::Connecting(_)) {
            self.link.lane_failed(&Error::shutdown());
        }
    }
}

/// The control thread's handler for a link as a whole: fails transfers whose wait for a lane has
/// become too long.
pub(super) struct LinkKeeper {
    pub(super) link: Arc<Link>,
}

impl Handler for LinkKeeper {
    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let link = &self.link;
        if link.end().is_some() {
            return Next::Close;
        }
        link.expire(cx.now);
        let deadline = link.is_active().then(|| cx.now + link.core.ping_interval());
        Next::Wait { interest: Interest::None, deadline }
    }
}

impl Drop for LinkKeeper {
    fn drop(&mut self) {
        let link = &self.link;
        link.core.counters.sessions.less_one();
        if link.end().is_none() {
            end(link, Error::shutdown());
        }
    }
}
