//! Detects whether a peer is on this host, and sets up its sockets.

use kvferry_sys::socket::Socket;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Whether an address is this host's.
pub(crate) fn is_on_this_host(peer: SocketAddr) -> bool {
    kvferry_sys::net::source_towards(peer).is_ok_and(|here| is_same_host(here, peer))
}

/// Whether `peer`, to which the connection's local address is `here`, is on this host.
pub(crate) fn is_same_host(here: IpAddr, peer: SocketAddr) -> bool {
    peer.ip().is_loopback() || here == peer.ip()
}

/// Sets up a connected socket that data moves on.
///
/// Both settings are for speed, so a kernel that refuses one causes no error. Within one host there
/// is no congestion, and the system's choice of congestion control can cost throughput: BBR paces,
/// which halves the rate of loopback. Reno has no effect unless bytes are lost, is part of every
/// kernel, and needs no privilege.
pub fn prepare(socket: &Socket) {
    let _ = socket.set_nodelay();
    if let (Ok(here), Ok(there)) = (socket.local_addr(), socket.peer_addr())
        && is_same_host(here.ip(), there)
        && let Err(e) = socket.set_congestion_control("reno")
    {
        tracing::debug!(error = %e, "can't set the congestion control; the default stays");
    }
}

/// The longest idle time before the kernel probes a connection. NATs and firewalls of cloud
/// providers drop an idle connection after four to six minutes.
const KEEPALIVE_MAX: Duration = Duration::from_secs(60);

/// The idle time before the kernel probes a connection, in silence windows.
const KEEPALIVE_WINDOWS: u32 = 20;

/// Keeps an idle connection alive in the network, and has the kernel break it if the peer's host
/// does not answer: after twice the returned time. The heartbeat alone is not enough: it runs only
/// while something is in progress.
pub(crate) fn keep_alive(socket: &Socket, silence: Duration) -> Duration {
    let idle = (silence * KEEPALIVE_WINDOWS).min(KEEPALIVE_MAX);
    if let Err(e) = socket.set_keepalive(idle) {
        tracing::debug!(error = %e, "can't enable keep-alive probes");
    }
    idle
}

/// As [`keep_alive`], for a control connection: the kernel also breaks it if sent bytes stay
/// unacknowledged. Both sides always read control connections, while a lane may wait for slow
/// memory. When a session ends, it shuts its lanes down.
pub(crate) fn keep_control_alive(socket: &Socket, silence: Duration) {
    let idle = keep_alive(socket, silence);
    if let Err(e) = socket.set_user_timeout(2 * idle) {
        tracing::debug!(error = %e, "can't limit how long sent bytes stay unacknowledged");
    }
}
