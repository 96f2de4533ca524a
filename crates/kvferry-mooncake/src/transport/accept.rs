//! The target's side of the handshake: one connection with one frame in and one frame out.
//!
//! Stock peers serve handshakes one after another on one thread, so that three idle connections
//! delay all others by fifteen seconds. Here each connection has its own handler with a deadline.
//! Their number is bounded; beyond it, the oldest is closed.

use super::MooncakeServer;
use super::wire::{
    Alive, Buffer, Caller, Descriptor, Kind, Mark, NoEndpoint, Notify, REQUEST_MAX, STATUS_VERSION,
    SUCCESS, frame, split,
};
use kvferry::transport::{Account, Cause, Cx, Handler, Next};
use kvferry::{Notification, Region};
use kvferry_proto::{Handshakes, Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use kvferry_sys::sync::Mutex;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The time for one handshake, until the peer has closed the connection.
const DEADLINE: Duration = Duration::from_secs(5);
/// Longest handshake that any Mooncake peer sends, in bytes. Other first bytes are of another protocol.
const HANDSHAKE_MAX: u64 = 128 << 20;
/// Bytes read at a time. Memory grows with the received bytes, not with the announced length.
const READ: usize = 16 * 1024;

/// The handshakes being served.
#[derive(Debug, Default)]
pub(super) struct PendingHandshakes(Mutex<Handshakes<u64>>);

/// Whether the first eight bytes of a connection are the length of a handshake.
pub(super) fn is_handshake(first: u64) -> bool {
    (1..=HANDSHAKE_MAX).contains(&first)
}

/// Serves a connection on the shared port with a handshake of `len` bytes.
pub(super) fn accept(server: &Arc<MooncakeServer>, socket: Socket, len: u64, cx: &Cx<'_>) {
    let from = socket.peer_addr().ok();
    let core = &server.core;
    if server.data_port.is_none() {
        tracing::debug!(?from, "refused a Mooncake handshake: stock peers are not served");
        return;
    }
    let Some(len) = usize::try_from(len).ok().filter(|_| len <= REQUEST_MAX) else {
        core.counters.handshakes_failed.one();
        tracing::debug!(?from, len, "a Mooncake handshake is too long");
        return;
    };
    let token = cx.remote.token();
    let evicted = server.pending.0.lock().admit(token, cx.now);
    if let Some(evicted) = evicted {
        // Its handler finds that it was closed.
        cx.remote.wake(evicted);
    }
    core.counters.handshakes_pending.one();
    let address = from.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |from| from.ip());
    let conn = HandshakeConn {
        server: Arc::clone(server),
        socket,
        from,
        token,
        deadline: cx.now + DEADLINE,
        state: State::Reading { len, bytes: Vec::new() },
        account: core.account(address),
    };
    cx.remote.add(token, Box::new(conn));
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
    /// Waiting for the peer to close, as stock peers do once they have read the answer. If this
    /// side closed first, the answer could be lost.
    Closing,
}

struct HandshakeConn {
    server: Arc<MooncakeServer>,
    socket: Socket,
    from: Option<SocketAddr>,
    token: u64,
    deadline: Timestamp,
    state: State,
    account: Account,
}

impl HandshakeConn {
    fn step(&mut self) -> io::Result<Interest> {
        loop {
            match &mut self.state {
                State::Reading { len, bytes } => {
                    if bytes.len() < *len {
                        let mut buffer = [0; READ];
                        let want = (*len - bytes.len()).min(READ);
                        match self.socket.recv(&mut buffer[..want]) {
                            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                            Ok(n) => {
                                bytes.extend_from_slice(&buffer[..n]);
                                if !self.account.hold(bytes.capacity()) {
                                    self.server.core.counters.peer_memory_refused.one();
                                    return Err(io::ErrorKind::OutOfMemory.into());
                                }
                            }
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
                            self.state = State::Closing;
                        }
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Interest::Write),
                    Err(e) => return Err(e),
                },
                State::Closing => match self.socket.discard(READ) {
                    // The end of the stream, or unexpected bytes: either way the handshake is over.
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
            split(request).ok_or_else(|| malformed("a handshake of an unknown type".into()))?;
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
                let result = match self.deliver(notify) {
                    WireCode::Ok => SUCCESS,
                    WireCode::TooLarge => "the notification is too long",
                    _ => "the queue is full",
                };
                Ok(frame(kind, &Notify { name: String::new(), notify_msg: result.into() }))
            }
            Kind::Probe => Ok(frame(kind, &Alive { status: SUCCESS.into() })),
        }
    }

    fn deliver(&self, notify: Notify) -> WireCode {
        self.server.core.deliver(Notification {
            from: self.from.map_or_else(String::new, |a| a.to_string()),
            from_ip: self.from.map(|from| from.ip()),
            name: notify.name,
            message: notify.notify_msg.into_bytes(),
        })
    }

    /// How to reach this agent. A kvferry agent that recognises this one will use the native
    /// protocol and needs no list of buffers.
    fn descriptor(&self, caller: &Caller) -> Descriptor {
        let (server, core) = (&*self.server, &*self.server.core);
        let native = server.native_too;
        let brief = native && caller.kvferry.is_some();
        if caller.writes_without_status() {
            server.has_met_version_1.store(true, Ordering::Relaxed);
        }
        Descriptor {
            tcp_data_host: self.data_host(),
            buffers: if brief { Vec::new() } else { buffers(server) },
            kvferry: native.then(|| Mark::new(core.incarnation)),
            ..own(server)
        }
    }

    /// The host at which this peer reaches the data port: on one host the address of its
    /// connection; else the advertised host, unless that is loopback.
    fn data_host(&self) -> String {
        let here = self.socket.local_addr().ok().map(|a| a.ip().to_canonical());
        let from = self.from.map(|a| a.ip().to_canonical());
        let advertised = host_of(&self.server.advertised);
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

/// The part of the descriptor that is the same for every peer.
pub(super) fn own(server: &MooncakeServer) -> Descriptor {
    Descriptor {
        name: server.advertised.clone(),
        protocol: "tcp".into(),
        tcp_data_host: host_of(&server.advertised).to_owned(),
        tcp_data_port: server.data_port.unwrap_or(0),
        tcp_proto_version: STATUS_VERSION,
        ..Descriptor::default()
    }
}

fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_matches(['[', ']'])
}

/// The memory that peers may access and name by address.
fn buffers(server: &MooncakeServer) -> Vec<Buffer> {
    let all = server.core.regions();
    let reachable = all.iter().filter(|r| (r.access().read || r.access().write) && r.addr() != 0);
    let buffer = |r: &Region| Buffer {
        name: server.advertised.clone(),
        addr: r.addr() as u64,
        length: r.len() as u64,
    };
    reachable.map(buffer).collect()
}

impl Handler for HandshakeConn {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        if cx.now >= self.deadline || !self.server.pending.0.lock().contains(&self.token) {
            return Next::Close;
        }
        match self.step() {
            // A peer that has closed its side while the answer does not fit into the socket will
            // not read it.
            Ok(Interest::Write) if cause.ready.peer_closed || cause.ready.closed => Next::Close,
            Ok(interest) => Next::Wait { interest, deadline: Some(self.deadline) },
            Err(e) => {
                if !matches!(self.state, State::Closing) {
                    self.server.core.counters.handshakes_failed.one();
                    tracing::debug!(from = ?self.from, error = %e, "a Mooncake handshake failed");
                }
                Next::Close
            }
        }
    }
}

impl Drop for HandshakeConn {
    fn drop(&mut self) {
        self.server.pending.0.lock().done(&self.token);
        self.server.core.counters.handshakes_pending.less_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_of_other_protocols_are_no_length_of_a_handshake() {
        assert!(is_handshake(1) && is_handshake(HANDSHAKE_MAX));
        for first in
            [kvferry_proto::MAGIC, *b"GET / HT", *b"\x16\x03\x01\x02\x00\x01\x00\x01", [0; 8]]
        {
            assert!(!is_handshake(u64::from_le_bytes(first)), "{first:?}");
        }
        assert!(!is_handshake(HANDSHAKE_MAX + 1));
    }

    #[test]
    fn the_host_of_an_address_is_without_port_and_brackets() {
        for (address, host) in
            [("10.0.0.7:1", "10.0.0.7"), ("[fd00::7]:1", "fd00::7"), ("node-3:1", "node-3")]
        {
            assert_eq!(host_of(address), host);
        }
    }
}
