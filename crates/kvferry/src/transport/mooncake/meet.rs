//! Meeting a peer by Mooncake's handshake: the answer tells what the peer is and how its memory
//! is reached.

use super::Mooncake;
use super::exchange::{Failure, ask};
use super::greet::own;
use super::lanes::{DataLanes, LinkKeeper};
use super::peer::MooncakePeer;
use super::wire::{Descriptor, Kind, Mark, frame};
use crate::agent::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::session::connect::PeerState;
use crate::session::link::Link;
use crate::transport::Approach;
use std::sync::Arc;

/// Meets a peer by Mooncake's handshake.
pub(crate) fn meet(core: &Arc<Core>, peer: &Arc<PeerState>, at: usize) {
    let addr = peer.addr(at);
    let peer = Arc::clone(peer);
    ask(
        core,
        addr,
        Kind::Metadata,
        introduction(core),
        core.handshake_timeout(),
        Box::new(move |core, answer| answered(core, &peer, at, answer)),
    );
}

/// Our own descriptor, without buffers: stock peers ignore what they are sent, and a kvferry
/// agent asks for more when it needs it. The mark says that we would like to be recognised.
pub(super) fn introduction(core: &Core) -> Vec<u8> {
    let mark = (core.approach == Approach::Either).then(|| Mark::new(core.incarnation));
    frame(Kind::Metadata, &Descriptor { kvferry: mark, ..own(core) })
}

fn answered(
    core: &Arc<Core>,
    peer: &Arc<PeerState>,
    at: usize,
    answer: std::result::Result<Vec<u8>, Failure>,
) {
    let native_too = core.approach == Approach::Either;
    let descriptor = match answer {
        // A native agent without this compatibility, or with a secret, hangs up.
        Err(Failure::TurnedAway(_)) if native_too => return peer.meet_native(core, at),
        Err(failure) => Err(failure.into_error()),
        Ok(json) => understood(&json),
    };
    let native = |d: &Descriptor| native_too && d.kvferry.is_some();
    let link = match descriptor {
        Ok(descriptor) if native(&descriptor) => return peer.meet_native(core, at),
        Ok(descriptor) => stock(core, peer, at, descriptor),
        Err(e) => Err(e),
    };
    if let Err(e) = &link {
        core.counters.handshakes_failed.one();
        tracing::warn!(peer = %peer.address, reason = %e, "a Mooncake handshake failed");
    }
    peer.met(core, at, link);
}

/// A link to a stock peer.
fn stock(
    core: &Arc<Core>,
    peer: &Arc<PeerState>,
    at: usize,
    descriptor: Descriptor,
) -> Result<Arc<Link>> {
    let addr = peer.addr(at);
    let keeper = core.control.token();
    let mooncake = MooncakePeer::new(descriptor, addr, keeper)
        .map_err(|e| e.with("peer", &peer.address).with("address", addr))?;
    tracing::info!(
        peer = %peer.address, data = %mooncake.data, acknowledges = mooncake.acknowledges,
        "met a Mooncake peer"
    );
    let link = Link::new(
        Arc::clone(core),
        peer.address.clone(),
        addr,
        Arc::new(Mooncake),
        None,
        Some(mooncake),
        Arc::new(DataLanes),
    );
    core.counters.sessions.one();
    core.counters.sessions_opened.one();
    core.add_session(&link);
    core.control.add(keeper, Box::new(LinkKeeper(Arc::clone(&link))));
    link.open_ahead();
    Ok(link)
}

/// The descriptor in the answer to a metadata request.
pub(super) fn understood(json: &[u8]) -> Result<Descriptor> {
    serde_json::from_slice(json).map_err(|e| {
        Error::new(ErrorKind::Protocol, "the peer's segment descriptor is malformed").caused_by(e)
    })
}
