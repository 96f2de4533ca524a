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
use std::fmt;
use std::net::SocketAddr;

/// The start of a transport in an agent.
pub trait Start: Transport {
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
#[non_exhaustive]
pub struct Startup<'a> {
    /// The agent's state.
    pub core: &'a Arc<Core>,
    /// The values of all settings of transports.
    pub settings: &'a TransportSettings,
    /// Peers must prove a secret.
    pub has_secret: bool,
    /// Payload must carry checksums.
    pub must_check: bool,
    /// The agent uses kvferry's own sessions.
    pub speaks_native: bool,
    /// The address that the agent listens on.
    pub local_addr: SocketAddr,
    /// The `host:port` that is advertised to peers.
    pub advertised: &'a str,
    /// The agent's sessions. A transport that keeps it longer than the agent lives keeps it weakly.
    pub directory: &'a Arc<dyn Directory>,
}

impl fmt::Debug for Startup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Startup[{}]", self.advertised)
    }
}

/// The operations on an agent's sessions that transports need.
pub trait Directory: Send + Sync {
    /// Adds a link, so that the suspend detector runs and the link ends with the agent.
    fn add(&self, link: &Arc<Link>);

    /// The session whose key the hello of a connection proves, under the transport's label.
    ///
    /// # Errors
    /// The code to refuse the connection with.
    fn verify(&self, label: ProofLabel, hello: &StreamHello) -> Result<Arc<Link>, WireCode>;
}

/// Called exactly once: with `None` if there is a route now, else with the reason why there is
/// none.
pub type Attached = Box<dyn FnOnce(Option<String>) + Send>;

/// The body of the answer to a request, or the code that refuses it.
pub type Answer = Result<Vec<u8>, WireCode>;

/// A transport of one running agent.
pub trait Service: Any + Send + Sync {
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

    /// The transport's own handshake, if it has one. An agent uses that of the first of its transports that has one.
    fn dialer(&self) -> Option<&dyn Dialer> {
        None
    }

    /// The part that serves data streams of native sessions, if this is the transport of which they
    /// are. There is one such transport.
    #[doc(hidden)]
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
pub trait Streams {
    /// Serves a stream until its end. Called on the control thread.
    fn accept(&self, stream: AcceptedStream);
}

/// A data stream that a peer has opened: it has proved its session's key, and was told that it is
/// accepted.
pub struct AcceptedStream {
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

impl fmt::Debug for AcceptedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AcceptedStream[{} of {}]", self.id, self.link.address)
    }
}

/// Connects to peers by a transport's own handshake.
pub trait Dialer {
    /// Connects to the peer at `addr`, which the user calls `address`; calls `dialed` exactly once,
    /// on any thread. With `native_too` the handshake also detects peers that speak the native
    /// protocol.
    fn dial(&self, address: &str, addr: SocketAddr, native_too: bool, dialed: OnDialed);
}

/// The result of a handshake.
#[derive(Debug)]
pub enum Dialed {
    /// The link to the peer, with its routes.
    Link(Arc<Link>),
    /// The peer speaks the native protocol.
    Native,
    /// There is no connection.
    Failed(Error),
}

/// Called exactly once with the result of a handshake.
pub type OnDialed = Box<dyn FnOnce(Dialed) + Send>;
