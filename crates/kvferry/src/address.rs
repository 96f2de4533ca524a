//! Which address an agent listens on, and which one it tells its peers.
//!
//! The rule, in order:
//!
//! 1. what the configuration says (`advertise`, with or without a port);
//! 2. `KVFERRY_ADVERTISE`, `HOST_IP`, `POD_IP`, the first that is set;
//! 3. the address listened on, if it is one interface's;
//! 4. if every interface is listened on, the address that the default route leaves by.
//!
//! 2 is left out when the agent listens on loopback only: no peer could reach it there. And
//! loopback is never told to a peer on another host: a control connection that comes from
//! elsewhere is told the address it came to.

use crate::error::{Error, ErrorKind, Result};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// Parses `host:port`, `[v6]:port`, `:port` (every interface) or a bare port.
pub(crate) fn parse_listen(text: &str) -> Result<SocketAddr> {
    let bad = |why: &str| {
        Error::new(ErrorKind::InvalidArgument, format!("not an address to listen on: {why}"))
            .with("address", text)
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
            Error::new(kind, "the peer's address can't be resolved; it is host:port")
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

/// Which rule gave the address that peers are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdvertisedBy {
    /// The configuration.
    Option,
    /// This environment variable.
    Variable(&'static str),
    /// The address listened on.
    Listening,
    /// The default route, because every interface is listened on.
    DefaultRoute,
}

/// What peers are told, as `host:port`.
pub(crate) fn advertised(option: Option<&str>, listening: SocketAddr) -> Result<String> {
    advertised_by(option, listening).map(|(address, _)| address)
}

/// What peers are told, and by which rule.
pub(crate) fn advertised_by(
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
            .map_err(|e| Error::io("no interface address can be found", e))?;
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
        _ => Err(Error::new(ErrorKind::InvalidArgument, "not an address to advertise")
            .with("address", text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(text: &str) -> SocketAddr {
        text.parse().expect("a test's address")
    }

    #[test]
    fn an_option_wins_and_gets_the_port_if_it_has_none() {
        for (option, told) in [
            ("10.0.0.7", "10.0.0.7:4000"),
            ("10.0.0.7:5", "10.0.0.7:5"),
            ("node-3.cluster", "node-3.cluster:4000"),
            ("node-3:17", "node-3:17"),
            ("fd00::7", "[fd00::7]:4000"),
        ] {
            assert_eq!(advertised(Some(option), on("0.0.0.0:4000")).expect(option), told);
        }
        assert!(advertised(Some("a b"), on("0.0.0.0:4000")).is_err());
    }

    #[test]
    fn one_interface_is_told_as_it_is() {
        let told = advertised(None, on("127.0.0.1:9")).expect("loopback");
        assert_eq!(told, "127.0.0.1:9");
    }

    #[test]
    fn listen_takes_the_usual_forms() {
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
