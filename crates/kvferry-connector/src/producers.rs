//! The producers that an engine accepts.
//!
//! The parameters of a request come from a client and name the producer of its KV. Without this check a
//! client could have the engine connect to any host, or load KV of its own making, which the engine's
//! cache would then serve to other clients. Addresses are checked before anything is sent; a name is
//! checked again by what it was resolved to, and only those addresses are connected to.

use crate::address::{ProducerAddress, is_host_name};
use kvferry::Agent;
use kvferry_sys::net::InterfaceAddress;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use thiserror::Error;

/// The producers that an engine fetches KV from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Producers {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// Every unicast address that is not link-local.
    Any,
    Network(Network),
    /// A name in lower case, without a dot at its end.
    Name(String),
    /// Every name below this one.
    Below(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    base: IpAddr,
    prefix_len: u8,
}

/// A list of producers has an entry that names no producer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("producers: {0:?} is no address, network (10.1.0.0/16), host name, *.domain or *")]
pub struct ProducersError(String);

/// A producer that is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{address} is not among the producers that this engine accepts: {accepted}")]
pub struct ForbiddenProducer {
    address: String,
    accepted: String,
}

impl Producers {
    /// Parses a list: addresses, networks as `10.1.0.0/16`, host names, `*.domain`, `*` for all.
    ///
    /// # Errors
    /// An entry is none of these.
    pub fn parse<T: AsRef<str>>(list: &[T]) -> Result<Self, ProducersError> {
        let rules = list.iter().map(|entry| Rule::parse(entry.as_ref()));
        Ok(Self { rules: rules.collect::<Result<_, _>>()? })
    }

    /// Returns the producers of an engine whose operator has named none: with a secret all, since a peer proves it;
    /// else this host, and the network that the agent listens in.
    pub fn of_agent(agent: &Agent) -> Self {
        if agent.config().secret.is_some() {
            return Self { rules: vec![Rule::Any] };
        }
        let own = kvferry_sys::net::interface_addresses().unwrap_or_default();
        Self::of_host(agent.local_addr().ip(), agent.advertised(), &own)
    }

    /// This host, with the addresses `own`, and the network of the interface that has the address `listening`: of each
    /// interface, if that names none. `advertised`: the `host:port` that peers connect to.
    fn of_host(listening: IpAddr, advertised: &str, own: &[InterfaceAddress]) -> Self {
        let mut networks = vec![
            Network { base: IpAddr::from([127, 0, 0, 0]), prefix_len: 8 },
            Network::host(std::net::Ipv6Addr::LOCALHOST.into()),
            Network::host(listening),
        ];
        for own in own {
            networks.push(Network::host(own.address));
            let named = own.address == listening || listening.is_unspecified();
            if named && !own.address.is_loopback() && !is_link_local(own.address) {
                networks.push(Network { base: own.address, prefix_len: own.prefix_len });
            }
        }
        let mut rules: Vec<_> = networks.into_iter().map(Rule::Network).collect();
        if let Some((host, _)) = advertised.rsplit_once(':') {
            rules.extend(Rule::parse(host));
        }
        rules.dedup();
        Self { rules }
    }

    /// The list, for [`Producers::parse`].
    pub fn list(&self) -> Vec<String> {
        self.rules.iter().map(Rule::to_string).collect()
    }

    /// Checks a `host:port` or `http://host:port` without a lookup. A name passes if it may resolve to
    /// an accepted address: see [`Producers::check_found`].
    ///
    /// # Errors
    /// The address, or every address that the name could have, is not accepted.
    pub fn check(&self, address: &str) -> Result<(), ForbiddenProducer> {
        let Ok(parsed) = address.parse::<ProducerAddress>() else {
            return Err(self.forbidden(address));
        };
        match self.may_be(parsed.host_and_port()) {
            true => Ok(()),
            false => Err(self.forbidden(address)),
        }
    }

    /// Checks, as [`Producers::check`] does, the text of a [`ProducerAddress`] or of an agent's address: it is in its
    /// canonical form.
    pub(crate) fn check_canonical(&self, address: &str) -> Result<(), ForbiddenProducer> {
        match self.may_be(host_and_port(address)) {
            true => Ok(()),
            false => Err(self.forbidden(address)),
        }
    }

    fn may_be(&self, bare: &str) -> bool {
        match bare.parse::<SocketAddr>() {
            Ok(found) => self.accepts(found.ip()),
            Err(_) => {
                let by_address = |it: &Rule| !matches!(it, Rule::Name(_) | Rule::Below(_));
                self.names(bare) || self.rules.iter().any(by_address)
            }
        }
    }

    /// Checks what an address was resolved to. Each of the addresses found must be accepted, unless
    /// the list has the name.
    ///
    /// # Errors
    /// One of them is not accepted.
    pub fn check_found(
        &self,
        address: &str,
        found: &[SocketAddr],
    ) -> Result<(), ForbiddenProducer> {
        let bare = host_and_port(address);
        if self.names(bare) || found.iter().all(|it| self.accepts(it.ip())) {
            return Ok(());
        }
        Err(self.forbidden(address))
    }

    fn accepts(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        let is_one_host = match ip {
            IpAddr::V4(v4) => !(v4.is_unspecified() || v4.is_multicast() || v4.is_broadcast()),
            IpAddr::V6(v6) => !(v6.is_unspecified() || v6.is_multicast()),
        };
        is_one_host
            && self.rules.iter().any(|rule| match rule {
                Rule::Any => !is_link_local(ip),
                // Clouds serve credentials at link-local addresses: they are named, or not reached.
                Rule::Network(network) => {
                    network.has(ip) && (!is_link_local(ip) || is_link_local(network.base))
                }
                Rule::Name(_) | Rule::Below(_) => false,
            })
    }

    fn names(&self, bare: &str) -> bool {
        let host = bare.rsplit_once(':').map_or(bare, |(host, _)| host);
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        is_host_name(&host)
            && self.rules.iter().any(|rule| match rule {
                Rule::Name(name) => *name == host,
                Rule::Below(domain) => host
                    .strip_suffix(domain.as_str())
                    .is_some_and(|it| it.len() > 1 && it.ends_with('.')),
                Rule::Any | Rule::Network(_) => false,
            })
    }

    fn forbidden(&self, address: &str) -> ForbiddenProducer {
        let accepted =
            if self.rules.is_empty() { "none".to_owned() } else { self.list().join(", ") };
        let address = address.chars().take(256).filter(|it| !it.is_control()).collect();
        ForbiddenProducer { address, accepted }
    }
}

impl Rule {
    fn parse(entry: &str) -> Result<Self, ProducersError> {
        let wrong = || ProducersError(entry.to_owned());
        if entry == "*" {
            return Ok(Self::Any);
        }
        if let Ok(ip) = entry.trim_matches(['[', ']']).parse::<IpAddr>() {
            return Ok(Self::Network(Network::host(ip.to_canonical())));
        }
        if let Some((base, len)) = entry.split_once('/') {
            let base: IpAddr = base.parse().map_err(|_| wrong())?;
            let prefix_len = len.parse().map_err(|_| wrong())?;
            let most = if base.is_ipv4() { 32 } else { 128 };
            let network = Self::Network(Network { base, prefix_len });
            return if prefix_len <= most { Ok(network) } else { Err(wrong()) };
        }
        let name = entry.trim_end_matches('.').to_ascii_lowercase();
        let (name, below) = match name.strip_prefix("*.") {
            Some(domain) => (domain, true),
            None => (name.as_str(), false),
        };
        if !is_host_name(name) {
            return Err(wrong());
        }
        Ok(if below { Self::Below(name.to_owned()) } else { Self::Name(name.to_owned()) })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Network(Network { base, prefix_len }) => {
                let whole = if base.is_ipv4() { 32 } else { 128 };
                if *prefix_len == whole {
                    write!(f, "{base}")
                } else {
                    write!(f, "{base}/{prefix_len}")
                }
            }
            Self::Name(name) => f.write_str(name),
            Self::Below(domain) => write!(f, "*.{domain}"),
        }
    }
}

impl Network {
    const fn host(base: IpAddr) -> Self {
        Self { base, prefix_len: if base.is_ipv4() { 32 } else { 128 } }
    }

    fn has(&self, ip: IpAddr) -> bool {
        match (self.base, ip) {
            (IpAddr::V4(base), IpAddr::V4(ip)) => {
                let differ = base.to_bits() ^ ip.to_bits();
                differ.leading_zeros() >= u32::from(self.prefix_len)
            }
            (IpAddr::V6(base), IpAddr::V6(ip)) => {
                let differ = base.to_bits() ^ ip.to_bits();
                differ.leading_zeros() >= u32::from(self.prefix_len)
            }
            _ => false,
        }
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

fn host_and_port(address: &str) -> &str {
    address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Producers {
        Producers::parse(entries).expect("a list of producers")
    }

    fn found(addresses: &[&str]) -> Vec<SocketAddr> {
        addresses.iter().map(|it| it.parse().expect("an address")).collect()
    }

    #[test]
    fn only_addresses_of_the_list_are_accepted_in_every_spelling() {
        let producers = list(&["10.1.0.0/16", "fd00::/8", "192.168.7.9"]);
        for address in [
            "10.1.255.1:7",
            "http://10.1.0.1:8998",
            "[fd12::1]:7",
            "[::ffff:10.1.2.3]:7",
            "192.168.7.9:1",
        ] {
            assert_eq!(producers.check(address), Ok(()), "{address}");
        }
        for address in [
            "10.2.0.1:7",
            "http://10.2.0.1:8998/",
            "[::1]:7",
            "127.0.0.1:7",
            "0.0.0.0:7",
            "[::ffff:127.0.0.1]:7",
        ] {
            assert!(producers.check(address).is_err(), "{address}");
        }
    }

    #[test]
    fn a_name_that_resolves_to_another_host_is_refused_unless_the_list_has_it() {
        let producers = list(&["10.1.0.0/16", "Prefill-0", "*.prefill.svc"]);
        assert!(producers.check_found("evil:7", &found(&["10.1.0.1:7", "127.0.0.1:7"])).is_err());
        assert!(producers.check_found("evil:7", &found(&["10.1.0.1:7"])).is_ok());
        for named in ["prefill-0:7", "PREFILL-0.:7", "http://a.prefill.svc:7"] {
            assert!(producers.check_found(named, &found(&["127.0.0.1:7"])).is_ok(), "{named}");
        }
        for other in ["prefill.svc:7", "xprefill.svc:7", "prefill-0.evil:7"] {
            assert!(producers.check_found(other, &found(&["127.0.0.1:7"])).is_err(), "{other}");
        }
        // The resolver takes these for addresses, so they are checked by what they resolve to.
        assert!(producers.check_found("2130706433:7", &found(&["127.0.0.1:7"])).is_err());
        assert!(producers.check("2130706433:7").is_err());
    }

    #[test]
    fn a_list_of_names_refuses_other_names_without_a_lookup() {
        assert!(list(&["prefill-0"]).check("evil:7").is_err());
        assert!(list(&["prefill-0"]).check("prefill-0:7").is_ok());
        assert!(list(&[]).check("10.0.0.1:7").is_err());
    }

    #[test]
    fn what_is_no_host_name_passes_no_rule_of_names() {
        let producers = list(&["*.prefill.svc", "*"]);
        for wrong in [
            "127.0.0.1 x.prefill.svc:80",
            "127.0.0.1\tx.prefill.svc:80",
            "127.0.0.1/x.prefill.svc:80",
            "a@x.prefill.svc:80",
            "a\r\nx.prefill.svc:80",
            "x.prefill.svc:+80",
            "x.prefill.svc:",
            "x.prefill.svc",
            ":80",
            &format!("{}.prefill.svc:80", "x".repeat(256)),
        ] {
            assert!(producers.check(wrong).is_err(), "{wrong:?}");
            assert!(producers.check(&format!("http://{wrong}")).is_err(), "{wrong:?}");
        }
        let named = list(&["*.prefill.svc"]);
        let loopback = found(&["127.0.0.1:80"]);
        assert!(named.check_found("127.0.0.1 x.prefill.svc:80", &loopback).is_err());
        assert!(producers.check("x.prefill.svc:80").is_ok());
    }

    #[test]
    fn link_local_addresses_are_reached_only_if_the_list_names_them() {
        for producers in [list(&["*"]), list(&["0.0.0.0/0", "::/0"])] {
            assert!(producers.check("8.8.8.8:7").is_ok());
            assert!(producers.check("169.254.169.254:80").is_err());
            assert!(producers.check("[fe80::1]:80").is_err());
            assert!(producers.check("224.0.0.1:80").is_err());
        }
        assert!(list(&["169.254.0.0/16"]).check("169.254.0.7:80").is_ok());
    }

    #[test]
    fn an_agent_without_a_secret_accepts_its_own_host_and_its_network_and_nothing_else() {
        let agent = |secret: Option<&str>| {
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            let builder = Agent::builder().listen(any);
            let builder = match secret {
                Some(secret) => builder.secret(secret.as_bytes()),
                None => builder,
            };
            builder.start().expect("an agent")
        };
        let open = Producers::of_agent(&agent(None));
        assert!(open.check("127.0.0.1:7").is_ok());
        assert!(open.check("192.0.2.1:7").is_err());
        assert_eq!(Producers::parse(&open.list()), Ok(open));
        let secured = Producers::of_agent(&agent(Some("a secret of the test, long enough")));
        assert!(secured.check("192.0.2.1:7").is_ok());
        assert!(secured.check("169.254.169.254:80").is_err());
    }

    /// `lo`, `eth0` and `ib0` of a host, each with IPv4 and IPv6.
    fn interfaces() -> Vec<InterfaceAddress> {
        let of = |&(interface, address, prefix_len): &(&str, &str, u8)| InterfaceAddress {
            interface: interface.to_owned(),
            address: address.parse().expect("an address"),
            prefix_len,
        };
        let table = [
            ("lo", "127.0.0.1", 8),
            ("lo", "::1", 128),
            ("eth0", "192.0.2.5", 24),
            ("eth0", "2001:db8:a::5", 64),
            ("eth0", "fe80::5", 64),
            ("ib0", "10.9.0.5", 16),
            ("ib0", "2001:db8:b::5", 64),
            ("usb0", "169.254.7.5", 16),
        ];
        table.iter().map(of).collect()
    }

    /// Addresses that are accepted, of one of each kind.
    fn accepted(listening: &str, advertised: &str) -> Vec<&'static str> {
        let listening = listening.parse().expect("an address");
        let producers = Producers::of_host(listening, advertised, &interfaces());
        assert_eq!(Producers::parse(&producers.list()), Ok(producers.clone()));
        let one_of_each = [
            "127.0.0.2:7",
            "[::1]:7",
            // This host, by its other interfaces.
            "192.0.2.5:7",
            "10.9.0.5:7",
            // Neighbours.
            "192.0.2.77:7",
            "[2001:db8:a::77]:7",
            "10.9.3.77:7",
            "[2001:db8:b::77]:7",
            // Others.
            "192.0.3.77:7",
            "10.10.0.77:7",
            "[2001:db8:c::77]:7",
            "[fe80::77]:7",
            "169.254.7.77:7",
            "169.254.169.254:80",
            "0.0.0.0:7",
        ];
        one_of_each.into_iter().filter(|it| producers.check(it).is_ok()).collect()
    }

    #[test]
    fn an_agent_without_a_secret_accepts_its_own_host_and_the_network_of_the_interface_that_was_named()
     {
        let host = ["127.0.0.2:7", "[::1]:7", "192.0.2.5:7", "10.9.0.5:7"];
        let with = |network: &[&'static str]| [&host[..], network].concat();
        let ib = with(&["10.9.3.77:7"]);
        assert_eq!(accepted("10.9.0.5", "10.9.0.5:7000"), ib);
        assert_eq!(accepted("192.0.2.5", "192.0.2.5:7000"), with(&["192.0.2.77:7"]));
        assert_eq!(
            accepted("2001:db8:b::5", "[2001:db8:b::5]:7000"),
            with(&["[2001:db8:b::77]:7"])
        );
        // What is advertised says who the agent is, and opens no network.
        assert_eq!(accepted("10.9.0.5", "192.0.2.5:7000"), ib);
        assert_eq!(accepted("127.0.0.1", "127.0.0.1:7000"), host);
        assert_eq!(accepted("fe80::5", "[fe80::5]:7000"), host);
    }

    #[test]
    fn an_agent_that_listens_on_all_interfaces_without_a_secret_accepts_their_networks_and_no_other()
     {
        let all = [
            "127.0.0.2:7",
            "[::1]:7",
            "192.0.2.5:7",
            "10.9.0.5:7",
            "192.0.2.77:7",
            "[2001:db8:a::77]:7",
            "10.9.3.77:7",
            "[2001:db8:b::77]:7",
        ];
        assert_eq!(accepted("0.0.0.0", "192.0.2.5:7000"), all);
        assert_eq!(accepted("::", "192.0.2.5:7000"), all);
    }

    #[test]
    fn what_is_no_producer_is_named() {
        for wrong in
            ["10.0.0.0/33", "http://a:1", "a b", "", "10.0.0.1:7", "2130706433", "*.", "/8"]
        {
            assert!(Producers::parse(&[wrong]).is_err(), "{wrong:?}");
        }
    }
}
