//! Data connections to a stock peer: opening them, and noticing their end while they are idle.
//!
//! A lane has a handler on the control thread for as long as it lives. It waits for nothing but
//! the peer's closing, so that a peer that died is known before it is used: its last lane ends
//! the link, and the next call meets whoever is there then. The handler holds the lane, whose
//! socket is closed with the last holder; so whoever kills a lane wakes it ([`drop_lane`]).

use super::KEEPALIVE;
use super::peer::{MooncakePeer, end};
use crate::error::{Error, ErrorKind};
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::session::connect::unreachable_peer;
use crate::session::link::{Lane, Link, OpenLane};
use kvferry_proto::{StreamId, Timestamp};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use rustc_hash::FxHashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The keepers of a link's lanes, by lane.
#[derive(Debug, Default)]
pub(super) struct LaneKeepers {
    last: AtomicU32,
    tokens: Mutex<FxHashMap<StreamId, u64>>,
}

impl LaneKeepers {
    fn tokens(&self) -> MutexGuard<'_, FxHashMap<StreamId, u64>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, token: u64) -> StreamId {
        let id = StreamId(self.last.fetch_add(1, Ordering::Relaxed));
        self.tokens().insert(id, token);
        id
    }
}

/// Opens lanes to the data port.
pub(super) struct DataLanes;

impl OpenLane for DataLanes {
    fn open_lane(&self, link: &Arc<Link>) {
        let peer = link.mooncake.as_ref().expect("lanes of a Mooncake link");
        match Socket::connect(peer.data) {
            Ok(socket) => {
                let control = &link.core.control;
                let token = control.token();
                let keeper = LaneKeeper {
                    link: Arc::clone(link),
                    stage: Stage::Connecting(socket),
                    id: peer.lanes().add(token),
                    deadline: None,
                };
                control.add(token, Box::new(keeper));
            }
            Err(e) => failed(link, &unreachable_peer(e)),
        }
    }
}

fn failed(link: &Arc<Link>, error: &Error) {
    let data = link.mooncake.as_ref().map(|peer| peer.data.to_string()).unwrap_or_default();
    let error = error.clone().with("peer", &link.address).with("address", data);
    // Before those who wait are told: their next call is to meet the peer afresh.
    if !link.has_lanes(1) {
        end(link, error.clone());
    }
    link.lane_failed(&error);
}

/// Kills a lane for good, the keeper's hold of it included.
pub(super) fn drop_lane(link: &Arc<Link>, lane: &Lane) {
    link.kill(lane);
    let keepers = link.mooncake.as_ref().map(MooncakePeer::lanes);
    if let Some(token) = keepers.and_then(|keepers| keepers.tokens().get(&lane.id).copied()) {
        link.core.control.wake(token);
    }
}

/// Replaces a lane that the peer ended because it refused a range.
pub(super) fn replace_lane(link: &Arc<Link>, lane: &Lane) {
    drop_lane(link, lane);
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
    stage: Stage,
    id: StreamId,
    deadline: Option<Timestamp>,
}

impl LaneKeeper {
    fn fail(&mut self, error: &Error) -> Next {
        self.stage = Stage::Gone;
        failed(&self.link, error);
        Next::Close
    }

    fn connecting(&mut self, cause: Cause, now: Timestamp) -> Next {
        let Stage::Connecting(socket) = &self.stage else {
            unreachable!("called while connecting")
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
        let Stage::Connecting(socket) = std::mem::replace(&mut self.stage, Stage::Gone) else {
            unreachable!("looked at above")
        };
        crate::session::prepare(&socket);
        let _ = socket.set_keepalive(KEEPALIVE);
        let gate = self.link.core.gates.gate();
        let lane = Lane::new(self.id, socket, gate);
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
        if let Some(peer) = &self.link.mooncake {
            peer.lanes().tokens().remove(&self.id);
        }
        if matches!(self.stage, Stage::Connecting(_)) {
            let error = Error::new(ErrorKind::Shutdown, "the agent was shut down");
            self.link.lane_failed(&error);
        }
    }
}

/// What the control thread does for a link as a whole: those who wait for a lane give up in time.
pub(super) struct LinkKeeper(pub(super) Arc<Link>);

impl Handler for LinkKeeper {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let link = &self.0;
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
        let link = &self.0;
        link.core.counters.sessions.less_one();
        if link.end().is_none() {
            end(link, Error::new(ErrorKind::Shutdown, "the agent was shut down"));
        }
    }
}
