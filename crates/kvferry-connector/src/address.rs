//! Addresses of producing engines, each in one form only.
//!
//! A client chooses the address in a request's parameters and can spell it in any number of ways:
//! `10.0.0.5:07000`, `[::ffff:10.0.0.5]:7000`, `Prefill-0:7000`. Sessions, engines and lookups are kept by
//! address, so both types here hold the canonical form: another spelling is the same value.

use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Borrow;
use std::fmt::{self, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::str::FromStr;
use thiserror::Error;

/// The longest `host:port`, in bytes. A host name has 253 at most.
const ADDRESS_MAX: usize = 259;

const SCHEME: &str = "http://";

/// `host:port` of an agent, in its canonical form.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct AgentAddress(String);

/// The address at which a producing engine is asked: `host:port` of an agent of it, or `http://host:port` of its
/// bootstrap server, in its canonical form.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct ProducerAddress(String);

/// A text is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it is neither host:port nor http://host:port")]
pub struct AddressError;

impl AgentAddress {
    /// The text, `host:port`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True if the host is an IP address, so that no name must be looked up.
    pub fn is_literal(&self) -> bool {
        is_literal(&self.0)
    }
}

impl ProducerAddress {
    /// The address of a bootstrap server, with or without `http://` and a slash at its end.
    ///
    /// # Errors
    /// [`AddressError`] if the text is not `host:port`.
    pub fn bootstrap(text: &str) -> Result<Self, AddressError> {
        let bare = text.strip_prefix(SCHEME).unwrap_or(text).trim_end_matches('/');
        let AgentAddress(bare) = bare.parse()?;
        Ok(Self(format!("{SCHEME}{bare}")))
    }

    /// The text, `host:port` or `http://host:port`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True if the address is that of a bootstrap server.
    pub fn is_bootstrap(&self) -> bool {
        self.0.starts_with(SCHEME)
    }

    /// `host:port`, without the scheme.
    pub fn host_and_port(&self) -> &str {
        self.0.strip_prefix(SCHEME).unwrap_or(&self.0)
    }
}

impl FromStr for AgentAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        canonical(text).map(Self).ok_or(AddressError)
    }
}

impl FromStr for ProducerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text.starts_with(SCHEME) {
            return Self::bootstrap(text);
        }
        canonical(text).map(Self).ok_or(AddressError)
    }
}

impl<'de> Deserialize<'de> for AgentAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse(deserializer)
    }
}

impl<'de> Deserialize<'de> for ProducerAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse(deserializer)
    }
}

fn parse<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err = AddressError>,
{
    struct Text<T>(std::marker::PhantomData<T>);

    impl<T: FromStr<Err = AddressError>> serde::de::Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("host:port or http://host:port")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
    }

    deserializer.deserialize_str(Text(std::marker::PhantomData))
}

impl From<AgentAddress> for ProducerAddress {
    fn from(agent: AgentAddress) -> Self {
        Self(agent.0)
    }
}

macro_rules! text {
    ($type:ty) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<$type> for String {
            fn from(address: $type) -> Self {
                address.0
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

text!(AgentAddress);
text!(ProducerAddress);

/// True if the host of a `host:port` is an IP address, so that no name must be looked up.
pub(crate) fn is_literal(host_and_port: &str) -> bool {
    host_and_port.parse::<SocketAddr>().is_ok()
}

/// True if `host` may be looked up as a name. A host that ends in a number is no name: the resolver takes it for an
/// address, in any number of spellings (`127.1`, `0x7f.1`, `2130706433`). The resolver reads other texts in ways of its
/// own, and they would also reach the head of a bootstrap server's request.
pub(crate) fn is_host_name(host: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let is_label = |label: &str| !label.is_empty() && label.bytes().all(is_allowed);
    // With a dot at its end a name is looked up without the host's search domains.
    let relative = host.strip_suffix('.').unwrap_or(host);
    let last = relative.rsplit('.').next().unwrap_or_default();
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit())
        || last
            .strip_prefix("0x")
            .or_else(|| last.strip_prefix("0X"))
            .is_some_and(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
    relative.split('.').all(is_label) && !is_number
}

/// The canonical form of a `host:port`; `None` if it is none.
fn canonical(text: &str) -> Option<String> {
    if text.len() > ADDRESS_MAX {
        return None;
    }
    let mut form = String::with_capacity(text.len());
    if let Ok(address) = text.parse::<SocketAddr>() {
        write!(form, "{}", canonical_socket_addr(address)).ok()?;
        return Some(form);
    }
    let (host, port) = text.rsplit_once(':')?;
    let port = Some(port).filter(|it| it.bytes().all(|byte| byte.is_ascii_digit()))?;
    let port: u16 = port.parse().ok()?;
    if !is_host_name(host) {
        return None;
    }
    form.push_str(host);
    form.make_ascii_lowercase();
    write!(form, ":{port}").ok()?;
    Some(form)
}

fn canonical_socket_addr(address: SocketAddr) -> SocketAddr {
    match (address, address.ip().to_canonical()) {
        (SocketAddr::V6(given), IpAddr::V6(ip)) => {
            // Only a link-local address needs an interface. With any other the number means nothing.
            let scope = if ip.is_unicast_link_local() { given.scope_id() } else { 0 };
            SocketAddrV6::new(ip, given.port(), 0, scope).into()
        }
        (given, ip) => SocketAddr::new(ip, given.port()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_an_address_is_one_value() {
        for (form, spellings) in [
            (
                "10.0.0.5:7000",
                &[
                    "10.0.0.5:7000",
                    "10.0.0.5:07000",
                    "10.0.0.5:000000007000",
                    "[::ffff:10.0.0.5]:7000",
                    "[::ffff:a00:5]:7000",
                    "[0:0::ffff:0a00:5]:7000",
                    "[::ffff:10.0.0.5%1]:7000",
                    "[::ffff:10.0.0.5%2]:7000",
                ][..],
            ),
            ("[fd00::1]:7", &["[fd00::1]:7", "[FD00:0::1]:007", "[fd00::1%3]:7"]),
            ("prefill-0.svc:7", &["prefill-0.svc:7", "Prefill-0.SVC:07"]),
        ] {
            for spelling in spellings {
                let agent: AgentAddress = spelling.parse().expect(spelling);
                assert_eq!(agent.as_str(), form, "{spelling}");
                let url = ProducerAddress::bootstrap(&format!("http://{spelling}//"));
                assert_eq!(url.expect(spelling).as_str(), format!("http://{form}"), "{spelling}");
            }
        }
    }

    #[test]
    fn addresses_that_lead_elsewhere_stay_apart() {
        for (one, other) in [
            ("[fe80::1%2]:7", "[fe80::1%3]:7"),
            ("prefill.:7", "prefill:7"),
            ("prefill:7", "http://prefill:7"),
            ("10.0.0.5:7", "10.0.0.5:8"),
        ] {
            let [one, other] = [one, other].map(|it| it.parse::<ProducerAddress>().expect(it));
            assert_ne!(one, other);
        }
    }

    #[test]
    fn what_only_the_resolver_takes_for_an_address_is_none() {
        let long = format!("{}.svc:80", "x".repeat(256));
        for wrong in [
            "127.1:7",
            "2130706433:7",
            "0x7f000001:7",
            "0X7F.1:7",
            "0177.0.0.1:7",
            "010.0.0.5:7",
            "10.0.0.5.:7",
            "prefill..:7",
            "a..b:7",
            ".:7",
            ":7",
            "a:",
            "a:+7",
            "a:65536",
            "a b:7",
            "a",
            &long,
        ] {
            assert_eq!(wrong.parse::<AgentAddress>(), Err(AddressError), "{wrong}");
        }
    }
}
