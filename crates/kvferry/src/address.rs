//! The address that an agent listens on, and the address that it tells its peers.
//!
//! The second is the first of:
//!
//! 1. `advertise` of the configuration, with or without a port;
//! 2. the first of `KVFERRY_ADVERTISE`, `HOST_IP` and `POD_IP` that is set, unless the agent listens
//!    on loopback only: peers could not reach it there;
//! 3. the listening address, if it belongs to one interface;
//! 4. the source address of the default route, if the agent listens on every interface.
//!
//! A peer on another host never gets a loopback address. It gets the address that it connected to.

use crate::error::{Error, ErrorKind, Result};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// Parses `host:port`, `[v6]:port`, `:port` (every interface) or a bare port.
pub(crate) fn parse_listen(text: &str) -> Result<SocketAddr> {
    let bad = |why: &str| {
        Error::invalid(format!("malformed address to listen on: {why}")).with("address", text)
    };
    if let Ok(addr) = text.parse::<SocketAddr>() {
        return Ok(addr);
    }
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok((ip, 0).into());
    }
    if let Ok(port) = text.trim_start_matches(':').parse::<u16>() {
        return Ok((std::net::Ipv4Addr::UNSPECIFIED, port).into());
    }
    let mut addrs = text.to_socket_addrs().map_err(|e| bad(&e.to_string()))?;
    addrs.next().ok_or_else(|| bad("the name has no address"))
}

/// Resolves a peer's `host:port`. The order is the resolver's.
pub(crate) fn resolve_peer(text: &str) -> Result<Vec<SocketAddr>> {
    if let Ok(addr) = text.parse::<SocketAddr>() {
        return Ok(vec![addr]);
    }
    let found: Vec<_> = text
        .to_socket_addrs()
        .map_err(|e| {
            let kind = match e.kind() {
                std::io::ErrorKind::InvalidInput => ErrorKind::InvalidArgument,
                _ => ErrorKind::Unreachable,
            };
            Error::new(kind, "the peer's address can't be resolved; write host:port")
                .with("peer", text)
                .caused_by(e)
        })?
        .collect();
    if found.is_empty() {
        return Err(
            Error::new(ErrorKind::Unreachable, "the peer's name has no address").with("peer", text)
        );
    }
    Ok(found)
}

/// The rule that chose the address that an agent tells its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdvertisedBy {
    /// `advertise` of the configuration.
    Option,
    /// The environment variable of this name.
    Variable(&'static str),
    /// The listening address.
    Listening,
    /// The default route; the agent listens on every interface.
    DefaultRoute,
}

/// The `host:port` that the agent tells its peers, and the rule that chose it.
pub(crate) fn advertised(
    option: Option<&str>,
    listening: SocketAddr,
) -> Result<(String, AdvertisedBy)> {
    let port = listening.port();
    if let Some(text) = option {
        return Ok((with_port(text, port)?, AdvertisedBy::Option));
    }
    if !listening.ip().is_loopback() {
        for name in ["KVFERRY_ADVERTISE", "HOST_IP", "POD_IP"] {
            if let Some(text) = std::env::var(name).ok().filter(|v| !v.is_empty()) {
                return Ok((with_port(&text, port)?, AdvertisedBy::Variable(name)));
            }
        }
    }
    let (ip, by) = if listening.ip().is_unspecified() {
        let ip = kvferry_sys::net::default_route_source()
            .map_err(|e| Error::io("no interface has an address to advertise", e))?;
        (ip, AdvertisedBy::DefaultRoute)
    } else {
        (listening.ip(), AdvertisedBy::Listening)
    };
    Ok((SocketAddr::new(ip, port).to_string(), by))
}

fn with_port(text: &str, port: u16) -> Result<String> {
    if text.parse::<SocketAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port).to_string());
    }
    let (host, own_port) = match text.rsplit_once(':') {
        Some((host, p)) => (host, Some(p)),
        None => (text, None),
    };
    let named = !host.is_empty()
        && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
    let port = match own_port {
        Some(p) => p.parse::<u16>().ok(),
        None => Some(port),
    };
    match port {
        Some(port) if named => Ok(format!("{host}:{port}")),
        _ => Err(Error::invalid("malformed address to advertise; write host or host:port")
            .with("address", text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn the_option_wins_and_gets_the_listening_port_if_it_has_none() {
        for (option, advertised_as) in [
            ("10.0.0.7", "10.0.0.7:4000"),
            ("10.0.0.7:5", "10.0.0.7:5"),
            ("node-3.cluster", "node-3.cluster:4000"),
            ("node-3:17", "node-3:17"),
            ("fd00::7", "[fd00::7]:4000"),
        ] {
            let (address, _) = advertised(Some(option), on("0.0.0.0:4000")).expect(option);
            assert_eq!(address, advertised_as);
        }
        assert!(advertised(Some("a b"), on("0.0.0.0:4000")).is_err());
    }

    #[test]
    fn the_address_of_one_interface_is_advertised_unchanged() {
        let advertised = advertised(None, on("127.0.0.1:9")).expect("loopback");
        assert_eq!(advertised, ("127.0.0.1:9".to_owned(), AdvertisedBy::Listening));
    }

    #[test]
    fn a_listening_address_may_lack_host_or_port() {
        for (text, addr) in [
            ("127.0.0.1:7", "127.0.0.1:7"),
            (":7", "0.0.0.0:7"),
            ("7", "0.0.0.0:7"),
            ("127.0.0.1", "127.0.0.1:0"),
            ("[::1]:7", "[::1]:7"),
            ("::1", "[::1]:0"),
        ] {
            assert_eq!(parse_listen(text).expect(text), on(addr));
        }
        assert_eq!(
            parse_listen("nonsense").expect_err("nonsense").kind(),
            ErrorKind::InvalidArgument
        );
    }
}
