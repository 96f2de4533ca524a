//! Where a peer is: what is counted for each peer is counted by this.
//!
//! A peer chooses how many sessions it opens, how many incarnations it claims and how many names it uses. It does not
//! choose the address of its host, and the addresses that one user has often are those of one network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The host of a peer and its network, by the address that the peer's connections come from.
///
/// All loopback addresses are one host, since a process may use any of 127.0.0.0/8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin(IpAddr);

impl Origin {
    /// The host's address. An IPv4 address is the same in IPv6 notation.
    pub const fn host(self) -> IpAddr {
        self.0
    }

    /// The network of the host: the /24 of IPv4, the /64 of IPv6.
    pub fn network(self) -> IpAddr {
        match self.0 {
            IpAddr::V4(v4) => Ipv4Addr::from_bits(v4.to_bits() & !0xff).into(),
            IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        }
    }
}

impl From<IpAddr> for Origin {
    fn from(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self(if address.is_loopback() { Ipv4Addr::LOCALHOST.into() } else { address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(address: &str) -> Origin {
        Origin::from(address.parse::<IpAddr>().expect("an address"))
    }

    #[test]
    fn a_host_is_the_same_in_each_notation_and_on_each_loopback_address() {
        assert_eq!(origin("::ffff:10.0.0.1"), origin("10.0.0.1"));
        assert_eq!(origin("127.200.3.4"), origin("127.0.0.1"));
        assert_eq!(origin("::1"), origin("127.0.0.1"));
        assert_ne!(origin("10.0.0.2"), origin("10.0.0.1"));
    }

    #[test]
    fn hosts_of_one_network_share_its_first_bits() {
        assert_eq!(origin("10.0.0.1").network(), origin("10.0.0.200").network());
        assert_ne!(origin("10.0.0.1").network(), origin("10.0.1.1").network());
        assert_eq!(origin("fd00::1").network(), origin("fd00::ffff:1").network());
        assert_ne!(origin("fd00::1").network(), origin("fd00:0:0:1::1").network());
    }
}
