//! Connects to a peer by Mooncake's handshake, whose answer describes the peer and its memory.

use super::accept::own;
use super::exchange::{Failure, ask};
use super::lanes::LinkKeeper;
use super::peer::MooncakePeer;
use super::wire::{Descriptor, Kind, Mark, frame};
use super::{MooncakeServer, OnStockPeer};
use kvferry::transport::{Dialed, Link, OnDialed};
use kvferry::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::sync::Arc;

/// Connects to the peer at `addr`.
pub(super) fn connect(
    server: &Arc<MooncakeServer>,
    address: &str,
    addr: SocketAddr,
    native_too: bool,
    dialed: OnDialed,
) {
    let (of, address) = (Arc::clone(server), address.to_owned());
    ask(
        &server.core,
        addr,
        Kind::Metadata,
        handshake_request(server, native_too),
        server.core.handshake_timeout(),
        Box::new(move |_, answer| dialed(answered(&of, &address, addr, native_too, answer))),
    );
}

/// This agent's descriptor, without buffers: stock peers ignore it, and a kvferry agent asks for
/// more when it needs them. The mark asks a kvferry agent to identify itself.
pub(super) fn handshake_request(server: &MooncakeServer, native_too: bool) -> Vec<u8> {
    let mark = native_too.then(|| Mark::new(server.core.incarnation));
    frame(Kind::Metadata, &Descriptor { kvferry: mark, ..own(server) })
}

fn answered(
    server: &Arc<MooncakeServer>,
    address: &str,
    addr: SocketAddr,
    native_too: bool,
    answer: Result<Vec<u8>, Failure>,
) -> Dialed {
    let descriptor = match answer {
        // A native agent without this compatibility, or with a secret, closes the connection.
        Err(Failure::TurnedAway(_)) if native_too => return Dialed::Native,
        Err(failure) => Err(failure.into_error()),
        Ok(json) => understood(&json),
    };
    let link = match descriptor {
        Ok(descriptor) if native_too && descriptor.kvferry.is_some() => return Dialed::Native,
        Ok(descriptor) => stock(server, address, addr, descriptor),
        Err(e) => Err(e),
    };
    match link {
        Ok(link) => Dialed::Link(link),
        Err(e) => {
            server.core.counters.handshakes_failed.one();
            kvferry::warn_limited!(peer = %address, reason = %e, "a Mooncake handshake failed");
            Dialed::Failed(e)
        }
    }
}

/// A link to a stock peer.
fn stock(
    server: &Arc<MooncakeServer>,
    address: &str,
    addr: SocketAddr,
    descriptor: Descriptor,
) -> Result<Arc<Link>> {
    let core = &server.core;
    let keeper = core.threads.control.token();
    let mooncake = MooncakePeer::new(descriptor, addr, keeper, Some(server))
        .map_err(|e| e.with("peer", address).with("address", addr))?;
    tracing::info!(
        peer = %address, data = %mooncake.data, acknowledges = mooncake.acknowledges,
        "connected to a Mooncake peer"
    );
    let mooncake = Arc::new(mooncake);
    // The number of connections that a stock peer can serve well is unknown, so permits do not
    // limit them.
    let permits_max = usize::MAX;
    let link = Link::new(
        Arc::clone(core),
        address.to_owned(),
        addr,
        Arc::clone(&mooncake) as _,
        permits_max,
    );
    link.add_lanes(OnStockPeer(mooncake));
    core.counters.sessions.one();
    core.counters.sessions_opened.one();
    let handler = LinkKeeper { link: Arc::clone(&link) };
    core.threads.control.add(keeper, Box::new(handler));
    link.open_ahead();
    Ok(link)
}

/// The descriptor in the answer to a metadata request.
pub(super) fn understood(json: &[u8]) -> Result<Descriptor> {
    serde_json::from_slice(json).map_err(|e| {
        Error::new(ErrorKind::Protocol, "the peer's segment descriptor is malformed").caused_by(e)
    })
}
