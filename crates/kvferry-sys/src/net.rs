//! Addresses of this host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

/// The address of the interface that the default route leaves by, or loopback if there is none.
///
/// Nothing is sent: a datagram socket is connected, which makes the kernel choose a source.
///
/// # Errors
/// If no datagram socket can be made.
pub fn default_route_source() -> io::Result<IpAddr> {
    // Any global unicast address asks for the default route; this one is for documentation only
    // (RFC 5737), so that nobody's host is named.
    source_towards(SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 9)))
}

/// The address this host would use to talk to `peer`; loopback if there is no route.
///
/// # Errors
/// If no datagram socket can be made.
pub fn source_towards(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    match socket.connect(peer) {
        Ok(()) => Ok(socket.local_addr()?.ip()),
        Err(_) => Ok(Ipv4Addr::LOCALHOST.into()),
    }
}
