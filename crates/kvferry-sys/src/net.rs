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
    /// Number of leading bits of the address that name its network; all of them if the kernel does
    /// not report it.
    pub prefix_len: u8,
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
        // SAFETY: the member's address, which is not null, and its mask, which may be.
        let (address, mask) = unsafe { (ip(entry.ifa_addr), ip(entry.ifa_netmask)) };
        let Some(address) = address else { continue };
        let prefix_len = match (address, mask) {
            (IpAddr::V4(_), Some(IpAddr::V4(mask))) => mask.to_bits().leading_ones(),
            (IpAddr::V6(_), Some(IpAddr::V6(mask))) => mask.to_bits().leading_ones(),
            (IpAddr::V4(_), _) => 32,
            (IpAddr::V6(_), _) => 128,
        } as u8;
        // SAFETY: a C string that lives as long as the list.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
        let interface = name.to_string_lossy().into_owned();
        found.push(InterfaceAddress { interface, address, prefix_len });
    }
    // SAFETY: the list of the call above, freed once; nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// The internet address at `at`; `None` if it is null or of another family.
///
/// # Safety
/// `at` is null, or a socket address as long as its family says.
unsafe fn ip(at: *const libc::sockaddr) -> Option<IpAddr> {
    if at.is_null() {
        return None;
    }
    // SAFETY: every address starts with its family, and each of these two families implies the type that
    // is read; the kernel's list is only guaranteed to be aligned for bytes.
    unsafe {
        match i32::from(at.cast::<libc::sa_family_t>().read_unaligned()) {
            libc::AF_INET => {
                let v4 = at.cast::<libc::sockaddr_in>().read_unaligned();
                Some(IpAddr::from(u32::from_be(v4.sin_addr.s_addr).to_be_bytes()))
            }
            libc::AF_INET6 => {
                let v6 = at.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(IpAddr::from(v6.sin6_addr.s6_addr))
            }
            _ => None,
        }
    }
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

    #[test]
    fn loopback_has_the_prefix_of_its_network() {
        let found = interface_addresses().expect("the interfaces can be listed");
        let loopback = found.iter().find(|it| it.address == IpAddr::from(Ipv4Addr::LOCALHOST));
        assert!(loopback.is_none_or(|it| it.prefix_len == 8), "{found:?}");
    }
}
