//! The traits of a transport, except those that move bytes; see the parent module.

use crate::core::Core;
use crate::error::{Error, Result};
use crate::memory::gate::Gate;
use crate::quota::Permit;
use crate::reactor::Cx;
use crate::stats::Stats;
use crate::sync::Arc;
use crate::transfer::kind::Transport;
use crate::transfer::link::Link;
use crate::transport::settings::{TransportSetting, TransportSettings};
use kvferry_proto::{Guard, ProofLabel, StreamHello, StreamId, WireCode};
use kvferry_sys::socket::Socket;
use std::any::Any;
use std::net::SocketAddr;

/// The start of a transport in an agent.
pub(crate) trait Start: Transport {
    /// Whether the transport uses kvferry's own sessions.
    fn is_native(&self) -> bool {
        true
    }

    /// Whether the transport's shares copy memory by the processor. Then the agent has threads for them
    /// beside its I/O threads.
    fn has_copiers(&self) -> bool {
        false
    }

    /// The transport's settings. [`Startup::settings`] has their values.
    fn settings(&self) -> &'static [TransportSetting] {
        &[]
    }

    /// Starts the part that serves peers. Called if the transport is permitted.
    ///
    /// # Errors
    /// An error that prevents the agent's start. A transport that merely can't be used on this host
    /// starts, and gives the reason when it is asked to attach.
    fn start(&self, cx: &Startup<'_>) -> Result<Arc<dyn Service>>;
}

/// An agent at the start of its transports.
pub(crate) struct Startup<'a> {
    pub(crate) core: &'a Arc<Core>,
    pub(crate) settings: &'a TransportSettings,
    /// Peers must prove a secret.
    pub(crate) has_secret: bool,
    /// Payload must carry checksums.
    pub(crate) must_check: bool,
    /// The agent uses kvferry's own sessions.
    pub(crate) speaks_native: bool,
    pub(crate) local_addr: SocketAddr,
    /// The `host:port` that is advertised to peers.
    pub(crate) advertised: &'a str,
    pub(crate) directory: &'a Arc<dyn Directory>,
}

/// The operations on an agent's sessions that transports need.
pub(crate) trait Directory: Send + Sync {
    /// Adds a link, so that the suspend detector runs and the link ends with the agent.
    fn add(&self, link: &Arc<Link>);

    /// The session whose key the hello of a connection proves, under the transport's label.
    fn verify(&self, label: ProofLabel, hello: &StreamHello) -> Result<Arc<Link>, WireCode>;
}

/// Called exactly once: with `None` if there is a route now, else with the reason why there is
/// none.
pub(crate) type Attached = Box<dyn FnOnce(Option<String>) + Send>;

/// The body of the answer to a request, or the code that refuses it.
pub(crate) type Answer = Result<Vec<u8>, WireCode>;

/// A transport of one running agent. What users of the transport call gets it by its type
/// ([`Services::get`](super::Services::get)).
pub(crate) trait Service: Any + Send + Sync {
    /// Capability bits that the native handshake announces.
    fn announces(&self) -> u64 {
        0
    }

    /// Adds a route to the link of a native session that this side initiated, if possible. Called
    /// only for transports that use kvferry's own sessions.
    fn attach(&self, _link: &Arc<Link>, attached: Attached) {
        attached(None);
    }

    /// Answers a request of the transport's own kind, such as for what a peer needs to reach a region.
    /// `None` for other kinds. Called on the control thread.
    fn answer(&self, _link: &Arc<Link>, _kind: u16, _body: &[u8]) -> Option<Answer> {
        None
    }

    /// Adds figures that the agent's own counters do not have, such as those of processes that copy by
    /// themselves.
    fn count(&self, _stats: &mut Stats) {}

    /// The transport's own handshake, if it has one.
    fn dialer(&self) -> Option<&dyn Dialer> {
        None
    }

    /// The part that serves data streams of native sessions, if this is the transport of which they
    /// are.
    fn streams(&self) -> Option<&dyn Streams> {
        None
    }

    /// Whether a connection on the agent's port is of this transport's protocol. Its first eight bytes are
    /// `first`, little-endian, and not the native magic.
    fn speaks(&self, _first: u64) -> bool {
        false
    }

    /// Serves a connection of this transport's protocol, whose first eight bytes were read.
    fn accept(&self, _socket: Socket, _first: u64, _cx: &Cx<'_>) {}
}

/// Serves the data streams that peers open in native sessions.
pub(crate) trait Streams {
    /// Serves a stream until its end. Called on the control thread.
    fn accept(&self, stream: AcceptedStream);
}

/// A data stream that a peer has opened: it has proved its session's key, and was told that it is
/// accepted.
pub(crate) struct AcceptedStream {
    pub(crate) link: Arc<Link>,
    pub(crate) id: StreamId,
    pub(crate) socket: Arc<Socket>,
    /// Memory is touched for the peer inside this gate only. The session shuts it when the peer revokes
    /// the stream.
    pub(crate) gate: Arc<Gate>,
    /// The protection of its frames.
    pub(crate) guard: Guard,
    /// Bytes that arrived behind the hello.
    pub(crate) early: Vec<u8>,
    /// The stream's place in the agent's quota.
    pub(crate) permit: Permit,
}

/// Connects to peers by a transport's own handshake.
pub(crate) trait Dialer {
    /// Connects to the peer at `addr`, which the user calls `address`; calls `dialed` exactly once,
    /// on any thread. With `native_too` the handshake also detects peers that speak the native
    /// protocol.
    fn dial(&self, address: &str, addr: SocketAddr, native_too: bool, dialed: OnDialed);
}

/// The result of a handshake.
pub(crate) enum Dialed {
    Link(Arc<Link>),
    /// The peer speaks the native protocol.
    Native,
    Failed(Error),
}

/// Called exactly once with the result of a handshake.
pub(crate) type OnDialed = Box<dyn FnOnce(Dialed) + Send>;
