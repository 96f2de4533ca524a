//! Addresses of this host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

/// The address of the interface that the default route leaves by, or loopback if there is none.
///
/// Sends nothing: connecting a datagram socket makes the kernel choose the source address.
///
/// # Errors
/// If no datagram socket can be made.
pub fn default_route_source() -> io::Result<IpAddr> {
    // Any global unicast address selects the default route. This one is reserved for documentation
    // (RFC 5737), so it belongs to no host.
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

/// An address of one of this host's interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub interface: String,
    /// The address.
    pub address: IpAddr,
}

/// The addresses of all interfaces, in the kernel's order.
pub fn interface_addresses() -> io::Result<Vec<InterfaceAddress>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the call writes one pointer, to a list that this function owns until it frees it
    // below.
    crate::check(unsafe { libc::getifaddrs(&raw mut first) } as libc::ssize_t)?;
    let mut found = Vec::new();
    let mut at = first;
    while !at.is_null() {
        // SAFETY: a member of the list, which is freed only below.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: every address starts with its family, and each of these two families implies the
        // type that is read; the list is only guaranteed to be aligned for bytes.
        let address = unsafe {
            match i32::from(entry.ifa_addr.cast::<libc::sa_family_t>().read_unaligned()) {
                libc::AF_INET => {
                    let v4 = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    IpAddr::from(u32::from_be(v4.sin_addr.s_addr).to_be_bytes())
                }
                libc::AF_INET6 => {
                    let v6 = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    IpAddr::from(v6.sin6_addr.s6_addr)
                }
                _ => continue,
            }
        };
        // SAFETY: a C string that lives as long as the list.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
        found.push(InterfaceAddress { interface: name.to_string_lossy().into_owned(), address });
    }
    // SAFETY: the list of the call above, freed once; nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_route_source_is_an_address_of_an_interface() {
        let found = interface_addresses().expect("the interfaces can be listed");
        let source = default_route_source().expect("a socket");
        assert!(found.is_empty() || found.iter().any(|f| f.address == source), "{found:?}");
    }
}
