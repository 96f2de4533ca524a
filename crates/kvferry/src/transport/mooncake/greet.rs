//! The target's side of the handshake: one frame in, one frame out, one connection each.
//!
//! Stock peers serve handshakes one after another on one thread, so that three idle connections
//! delay everybody by fifteen seconds. Here each is a handler of its own, with a deadline and a
//! place among a bounded number; when all are taken the oldest makes room.

use super::wire::{
    Alive, Buffer, Caller, Descriptor, Kind, Mark, NoEndpoint, Notify, REQUEST_MAX, SUCCESS, frame,
    split,
};
use crate::agent::Core;
use crate::memory::region::Backing;
use crate::notify::Notification;
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::transport::TransportKind;
use kvferry_proto::{Handshakes, Limits, Timestamp};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a peer may take for one handshake, its closing of the connection included.
const DEADLINE: Duration = Duration::from_secs(5);
/// Bytes read at a time. Memory grows with what came, not with what was announced.
const READ: usize = 16 * 1024;

/// The handshakes being served.
#[derive(Debug, Default)]
pub(super) struct Lobby(Mutex<Handshakes<u64>>);

impl Lobby {
    fn lock(&self) -> MutexGuard<'_, Handshakes<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves a connection on the shared port that began with a length of Mooncake's.
pub(crate) fn greet(core: &Arc<Core>, socket: Socket, len: u64, cx: &Cx<'_>) {
    let from = socket.peer_addr().ok();
    if core.mooncake_port.is_none() {
        let secret = core.has_secret();
        tracing::debug!(?from, secret, "a Mooncake handshake was turned away: not served here");
        return;
    }
    let Some(len) = usize::try_from(len).ok().filter(|_| len <= REQUEST_MAX) else {
        core.counters.handshakes_failed.one();
        tracing::debug!(?from, len, "a Mooncake handshake is too long");
        return;
    };
    let token = cx.remote.token();
    let evicted = core.mooncake.lobby.lock().admit(token, cx.now);
    if let Some(evicted) = evicted {
        // Its handler finds that it has no place any more.
        cx.remote.wake(evicted);
    }
    core.counters.handshakes_pending.one();
    let guest = Guest {
        core: Arc::clone(core),
        socket,
        from,
        token,
        deadline: cx.now + DEADLINE,
        state: State::Reading { len, bytes: Vec::new() },
    };
    cx.remote.add(token, Box::new(guest));
}

enum State {
    Reading {
        len: usize,
        bytes: Vec<u8>,
    },
    Answering {
        bytes: Vec<u8>,
        at: usize,
    },
    /// Stock peers close when they have read the answer; to close first could lose it.
    Parting,
}

struct Guest {
    core: Arc<Core>,
    socket: Socket,
    from: Option<SocketAddr>,
    token: u64,
    deadline: Timestamp,
    state: State,
}

impl Guest {
    fn step(&mut self) -> io::Result<Interest> {
        loop {
            match &mut self.state {
                State::Reading { len, bytes } => {
                    if bytes.len() < *len {
                        let mut buffer = [0; READ];
                        let want = (*len - bytes.len()).min(READ);
                        match self.socket.recv(&mut buffer[..want]) {
                            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                            Ok(n) => bytes.extend_from_slice(&buffer[..n]),
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                                return Ok(Interest::Read);
                            }
                            Err(e) => return Err(e),
                        }
                        continue;
                    }
                    let request = std::mem::take(bytes);
                    let bytes = self.answer(&request)?;
                    self.state = State::Answering { bytes, at: 0 };
                }
                State::Answering { bytes, at } => match self.socket.send(&bytes[*at..]) {
                    Ok(n) => {
                        *at += n;
                        if *at == bytes.len() {
                            self.socket.shutdown(Shutdown::Write);
                            self.state = State::Parting;
                        }
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Interest::Write),
                    Err(e) => return Err(e),
                },
                State::Parting => match self.socket.discard(READ) {
                    // The end, or bytes that nobody asked for: either way it is over.
                    Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Interest::Read),
                    Err(e) => return Err(e),
                },
            }
        }
    }

    fn answer(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        let malformed = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let parse = |e: serde_json::Error| malformed(e.to_string());
        let (kind, json) =
            split(request).ok_or_else(|| malformed("a handshake of no known type".into()))?;
        tracing::debug!(from = ?self.from, ?kind, "a Mooncake handshake");
        match kind {
            Kind::Connection => Ok(frame(
                kind,
                &NoEndpoint {
                    local_nic_path: "",
                    peer_nic_path: "",
                    qp_num: [],
                    reply_msg: "this endpoint has TCP only",
                },
            )),
            Kind::Metadata => {
                let caller: Caller = serde_json::from_slice(json).map_err(parse)?;
                Ok(self.descriptor(&caller).into_answer())
            }
            Kind::Notify => {
                let notify: Notify = serde_json::from_slice(json).map_err(parse)?;
                let said = if self.deliver(notify) { SUCCESS } else { "the queue is full" };
                Ok(frame(kind, &Notify { name: String::new(), notify_msg: said.into() }))
            }
            Kind::Probe => Ok(frame(kind, &Alive { status: SUCCESS.into() })),
        }
    }

    fn deliver(&self, notify: Notify) -> bool {
        if notify.name.len() + notify.notify_msg.len() > Limits::default().notify_max as usize {
            return false;
        }
        let queued = self.core.inbox.push(Notification {
            from: self.from.map_or_else(String::new, |a| a.to_string()),
            name: notify.name,
            message: notify.notify_msg.into_bytes(),
        });
        if queued {
            self.core.counters.notifications_received.one();
        }
        queued
    }

    /// How we are reached. A kvferry agent that recognises us will use the native protocol, and
    /// is spared the list of buffers.
    fn descriptor(&self, caller: &Caller) -> Descriptor {
        let core = &*self.core;
        let native = core.config.transports().is_ok_and(|all| all.contains(TransportKind::Tcp));
        let brief = native && caller.kvferry.is_some();
        Descriptor {
            tcp_data_host: self.data_host(),
            buffers: if brief { Vec::new() } else { buffers(core) },
            kvferry: native.then(|| Mark::new(core.incarnation)),
            ..own(core)
        }
    }

    /// The host this peer reaches the data port at: on one host the address it came to; else the
    /// advertised one, unless that is loopback.
    fn data_host(&self) -> String {
        let here = self.socket.local_addr().ok().map(|a| a.ip().to_canonical());
        let from = self.from.map(|a| a.ip().to_canonical());
        let advertised = host_of(&self.core.advertised);
        let usable = match advertised.parse::<IpAddr>() {
            Ok(ip) => !ip.is_loopback() && !ip.is_unspecified(),
            Err(_) => true,
        };
        match here {
            Some(here) if !usable || from.is_none_or(|f| f == here || f.is_loopback()) => {
                here.to_string()
            }
            _ => advertised.to_owned(),
        }
    }
}

/// What is always said about this agent.
pub(super) fn own(core: &Core) -> Descriptor {
    Descriptor {
        name: core.advertised.clone(),
        protocol: "tcp".into(),
        tcp_data_host: host_of(&core.advertised).to_owned(),
        tcp_data_port: core.mooncake_port.unwrap_or(0),
        tcp_proto_version: 2,
        ..Descriptor::default()
    }
}

fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_matches(['[', ']'])
}

/// The host memory that peers may reach.
fn buffers(core: &Core) -> Vec<Buffer> {
    let all = core.regions.all();
    let reachable = all.iter().filter(|r| {
        (r.access().read || r.access().write) && !matches!(r.0.backing, Backing::Device(_))
    });
    let buffer = |r: &crate::memory::region::Region| Buffer {
        name: core.advertised.clone(),
        addr: r.addr() as u64,
        length: r.len() as u64,
    };
    reachable.map(buffer).collect()
}

impl Handler for Guest {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        if cx.now >= self.deadline || !self.core.mooncake.lobby.lock().contains(&self.token) {
            return Next::Close;
        }
        match self.step() {
            // Whoever closed its side while the answer does not fit is not going to read it.
            Ok(Interest::Write) if cause.ready.peer_closed || cause.ready.closed => Next::Close,
            Ok(interest) => Next::Wait { interest, deadline: Some(self.deadline) },
            Err(e) => {
                if !matches!(self.state, State::Parting) {
                    self.core.counters.handshakes_failed.one();
                    tracing::debug!(from = ?self.from, error = %e, "a Mooncake handshake failed");
                }
                Next::Close
            }
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.core.mooncake.lobby.lock().done(&self.token);
        self.core.counters.handshakes_pending.less_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_an_address_has_no_port_and_no_brackets() {
        for (address, host) in
            [("10.0.0.7:1", "10.0.0.7"), ("[fd00::7]:1", "fd00::7"), ("node-3:1", "node-3")]
        {
            assert_eq!(host_of(address), host);
        }
    }
}
