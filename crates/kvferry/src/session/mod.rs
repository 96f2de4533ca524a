//! Sessions: meeting peers, and staying in touch with them, on the control thread.
//!
//! The protocol itself is `kvferry_proto::session`, a value without clock or socket; here it gets
//! both.

pub(crate) mod connect;
pub(crate) mod control;
pub(crate) mod greet;
pub(crate) mod link;
pub(crate) mod pulse;
pub(crate) mod service;

use crate::agent::is_same_host;
use kvferry_sys::socket::Socket;

/// Settings of a socket that data moves on, once it is connected.
///
/// Both are there to be fast, and a kernel that refuses one is no reason to fail. Within one host
/// there is no congestion, and what a system chose against it elsewhere can be in the way: BBR
/// paces, which halves what loopback carries. Reno does nothing unless bytes are lost, is part of
/// every kernel, and everybody may choose it.
pub(crate) fn prepare(socket: &Socket) {
    let _ = socket.set_nodelay();
    if let (Ok(here), Ok(there)) = (socket.local_addr(), socket.peer_addr())
        && is_same_host(here.ip(), there)
        && let Err(e) = socket.set_congestion_control("reno")
    {
        tracing::debug!(error = %e, "the system's congestion control stays");
    }
}
