//! Mooncake's protocol over TCP, for stock Mooncake peers.
//!
//! | file | what |
//! |---|---|
//! | `wire` | handshake frames, segment descriptors, heads and statuses: pure |
//! | `accept` | the target's side of the handshake, on the shared port |
//! | `inbound` | the target's side of the data port |
//! | `exchange`, `connect` | the initiator's side of the handshake |
//! | `peer` | a stock peer's data, and requests to it |
//! | `lanes` | data connections to a stock peer: opening them, detecting their end |
//! | `outbound` | the initiator's side of a data connection: one share of a transfer |
//! | `layout`, `stall_detector` | which bytes of a system call belong to which request; detecting a silent peer |
//! | `diagnose` | why a data connection broke |
//!
//! A handshake is one connection with one frame each way, on the port that the native protocol
//! listens on, too. The answer describes the peer: the memory it has registered and its data port.
//! A kvferry agent adds a field by which another one recognises it and switches to the native
//! protocol; stock peers ignore unknown fields.
//!
//! On a data connection, a request is a head of 24 bytes that names one range by its virtual
//! address, and its payload. Stock initiators wait for each answer before the next request. A stock
//! target serves requests in their order, so kvferry sends them ahead, many heads and payloads in
//! one system call.
//!
//! A stock peer can't authenticate itself, has no incarnation, and can't confirm that it has
//! stopped writing. A write that was cancelled or interrupted may still be applied from the bytes
//! that the peer's kernel had received ([`Fence::PeerExit`]); the error reports this (`quiesced` is
//! false).

mod accept;
mod connect;
mod connections;
mod diagnose;
mod exchange;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod inbound;
mod lanes;
mod layout;
mod outbound;
mod peer;
mod stall_detector;
mod wire;

use connections::Connections;
use kvferry::transport::{
    Core, Cx, Dialer, Directory, Job, Lane, Link, OnDialed, OnLanes, Service, Start, Startup,
    Transport, Wake,
};
use kvferry::{Capabilities, Error, ErrorKind, Fence, Result, TransportKind, TransportSetting};
use kvferry_sys::socket::Socket;
use peer::MooncakePeer;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Idle time of a data connection before the kernel probes the peer's host. The protocol itself has
/// no heartbeat.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// The kind of the transport for stock Mooncake peers.
pub const KIND: TransportKind = TransportKind::new("mooncake");

/// Adds the transport for stock Mooncake peers to those of the program; returns its kind. See
/// [`kvferry::transport::link`]: a program calls this before it reads a configuration. It may be called more than
/// once, on any thread.
///
/// With its setting `mooncake`, an agent serves stock peers and connects to them.
pub fn link() -> TransportKind {
    kvferry::transport::link(&Mooncake)
}

/// The transport.
#[derive(Debug)]
struct Mooncake;

impl Transport for Mooncake {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["mooncake-tcp"]
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(Fence::PeerExit, Fence::Local);
        capabilities.notifications = true;
        capabilities
    }
}

static SERVE: TransportSetting = TransportSetting::switch(
    "mooncake",
    None,
    "serve stock Mooncake peers, which opens a second port, and connect to them",
);

impl Start for Mooncake {
    fn settings(&self) -> &'static [TransportSetting] {
        std::slice::from_ref(&SERVE)
    }

    fn is_native(&self) -> bool {
        false
    }

    fn start(&self, cx: &Startup<'_>) -> Result<Arc<dyn Service>> {
        let (has_secret, native_too) = (cx.has_secret, cx.speaks_native);
        let is_on = cx.settings.is_on(&SERVE);
        if has_secret {
            let what = "a secret is set, and Mooncake's protocol has no authentication";
            if !native_too {
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            tracing::debug!("Mooncake's protocol is off: {what}");
        }
        let serves = is_on && !has_secret;
        let data = serves.then(|| inbound::listen(cx.local_addr)).transpose()?;
        let server = Arc::new(MooncakeServer {
            core: Arc::clone(cx.core),
            directory: Arc::downgrade(cx.directory),
            advertised: cx.advertised.to_owned(),
            native_too,
            data_port: data.as_ref().map(|(_, port)| *port),
            pending: accept::PendingHandshakes::default(),
            connections: Connections::default(),
            has_met_version_1: AtomicBool::new(false),
        });
        if let Some((socket, _)) = data {
            inbound::serve(&server, socket);
        }
        let dials = !has_secret && (!native_too || is_on);
        Ok(Arc::new(MooncakeService { server, dials }))
    }
}

/// An agent's state for stock peers in both directions.
struct MooncakeServer {
    core: Arc<Core>,
    directory: Weak<dyn Directory>,
    /// The `host:port` that is advertised to peers.
    advertised: String,
    /// The agent also speaks kvferry's own protocol.
    native_too: bool,
    /// The data port, while stock peers are served.
    data_port: Option<u16>,
    pending: accept::PendingHandshakes,
    connections: Connections,
    /// A peer of a trusted user whose writes come without asking for a status has got the descriptor. Without such a
    /// peer, no connection that its process has closed before it is accepted can hold a write that counts.
    has_met_version_1: AtomicBool,
}

/// The transport of one agent.
struct MooncakeService {
    server: Arc<MooncakeServer>,
    /// Connections to peers start with Mooncake's handshake, which tells whether the peer is
    /// native.
    dials: bool,
}

impl Service for MooncakeService {
    fn dialer(&self) -> Option<&dyn Dialer> {
        self.dials.then_some(self)
    }

    fn speaks(&self, first: u64) -> bool {
        accept::is_handshake(first)
    }

    fn accept(&self, socket: Socket, first: u64, cx: &Cx<'_>) {
        accept::accept(&self.server, socket, first, cx);
    }
}

impl Dialer for MooncakeService {
    fn dial(&self, address: &str, addr: SocketAddr, native_too: bool, dialed: OnDialed) {
        connect::connect(&self.server, address, addr, native_too, dialed);
    }
}

#[derive(Clone)]
struct OnStockPeer(Arc<MooncakePeer>);

impl OnLanes for OnStockPeer {
    type Share = outbound::Share;

    fn transport(&self) -> &'static dyn Transport {
        &Mooncake
    }

    fn share(&self, link: &Arc<Link>, lane: Arc<Lane>, job: &Arc<Job>, wake: Wake) -> Self::Share {
        let (peer, link, job) = (Arc::clone(&self.0), Arc::clone(link), Arc::clone(job));
        outbound::Share::new(peer, link, lane, job, wake)
    }
}
