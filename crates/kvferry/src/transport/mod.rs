//! Transports move the bytes of a batch. Each transport is one folder, one line in the table below,
//! and one line in the conformance suite (`tests/conformance.rs`); nothing else in the agent knows
//! a transport's name.
//!
//! A transport consists of:
//!
//! * a [`Start`], one static value: its names, its capabilities, and how it starts with an agent;
//! * a [`Service`], one per agent: what it announces, how it gets a route to a peer, and what it
//!   does with connections that peers open;
//! * a [`Route`](crate::transfer::link::Route), one per peer: how a batch moves. A transport whose
//!   shares each use a connection is an [`OnLanes`](crate::transfer::drive::OnLanes); a share is a
//!   [`Drive`](crate::transfer::drive::Drive), driven by the caller's thread or by an I/O thread.
//!
//! A transport reaches a peer in one of three ways. It uses the native session of a peer and gets
//! its route once that is established ([`Service::attach`]: `tcp`, `local`; queue pairs would be
//! set up here). It has a handshake of its own ([`Service::dialer`]: `mooncake`). Or it has no
//! peer, and makes its [`Link`](crate::transfer::link::Link) itself (files). A completion queue is
//! a `Drive`'s descriptor. A transport that supports device memory takes it from the batch's
//! pieces; the others see only host spans.
//!
//! A transport hears of regions, and keeps keys of them, through `crate::memory::user`. Its settings are
//! declared in its folder ([`settings`](mod@settings)).

pub(crate) mod refusal;
pub(crate) mod service;
pub(crate) mod settings;

use crate::error::{Error, Result};
use crate::stats::Stats;
use crate::sync::Arc;
use crate::transfer::kind::TransportKind;
use crate::transfer::link::Link;
use serde::{Deserialize, Serialize};
use service::{Answer, Dialer, Service, Start, Startup, Streams};
use settings::TransportSetting;
use std::any::Any;
use std::fmt;

macro_rules! transports {
    (
        to peers { $($(#[$doc:meta])* $name:ident = $module:ident::$transport:ident;)* }
        without a peer {
            $($(#[$own_doc:meta])* $own:ident = $own_module:ident::$own_transport:ident;)*
        }
    ) => {
        $(pub(crate) mod $module;)*
        $(pub(crate) mod $own_module;)*

        static TABLE: &[&dyn Start] = &[$(&$module::$transport),*];
        static WITHOUT_PEER: &[&dyn Start] = &[$(&$own_module::$own_transport),*];

        impl TransportKind {
            $($(#[$doc])* pub const $name: Self = $module::$transport::KIND;)*
            $($(#[$own_doc])* pub const $own: Self = $own_module::$own_transport::KIND;)*
        }

        impl Transports {
            /// Every transport to peers that this build has.
            pub const ALL: Self = Self((1 << [$(stringify!($name)),*].len()) - 1);
        }
    };
}

// The table of transports, those to peers slowest first. Those without a peer need no permission.
transports! {
    to peers {
        /// kvferry's own protocol over TCP.
        TCP = tcp::Tcp;
        /// Copies between the memories of two processes of one host and one user.
        LOCAL = local::Local;
        /// Mooncake's protocol over TCP, for stock Mooncake peers.
        MOONCAKE = mooncake::Mooncake;
    }
    without a peer {
        /// Transfers between memory and files of this host.
        FILE = file::File;
    }
}

/// A set of permitted transports to peers. Files are not among them: an agent that may use `tcp` only
/// can open files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Transports(u32);

impl Transports {
    /// The set with one transport.
    pub fn only(kind: TransportKind) -> Self {
        Self(bit(kind))
    }

    /// Returns the set with one more transport.
    #[must_use]
    pub fn with(self, kind: TransportKind) -> Self {
        Self(self.0 | bit(kind))
    }

    /// Whether a transport is in the set.
    pub fn contains(self, kind: TransportKind) -> bool {
        self.0 & bit(kind) != 0
    }

    /// Whether the set has a transport that uses kvferry's own sessions.
    pub(crate) fn has_native(self) -> bool {
        self.any(|transport| transport.is_native())
    }

    /// Whether the set has a transport whose shares copy memory by the processor.
    pub(crate) fn has_copiers(self) -> bool {
        self.any(|transport| transport.has_copiers())
    }

    fn any(self, is_such: fn(&dyn Start) -> bool) -> bool {
        TABLE.iter().any(|transport| self.contains(transport.kind()) && is_such(*transport))
    }

    /// The transports of the set.
    pub fn iter(self) -> impl Iterator<Item = TransportKind> {
        TABLE.iter().map(|transport| transport.kind()).filter(move |kind| self.contains(*kind))
    }

    /// Parses names separated by commas: a transport's name ([`TransportKind::as_str`]), one of its
    /// aliases, or `all`. `native` (also `kvferry`) stands for all transports that use kvferry's
    /// own sessions. Case does not matter.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown name, and for an empty list.
    pub fn parse(text: &str) -> Result<Self> {
        let mut set = 0;
        for name in text.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            let named = TABLE.iter().filter(|transport| {
                let names = [transport.kind().as_str(), "all"];
                let mut names = names.iter().chain(transport.aliases());
                names.any(|known| known.eq_ignore_ascii_case(name))
            });
            let bits = named.fold(0, |bits, transport| bits | bit(transport.kind()));
            if bits == 0 {
                let what = format!("unknown transport; known are {} and all", Self::ALL);
                return Err(Error::invalid(what).with("transport", name));
            }
            set |= bits;
        }
        if set == 0 {
            return Err(Error::invalid("the list of transports is empty"));
        }
        Ok(Self(set))
    }
}

/// The settings of all transports of this build.
fn settings() -> impl Iterator<Item = &'static TransportSetting> {
    TABLE.iter().chain(WITHOUT_PEER).flat_map(|transport| transport.settings())
}

/// Zero for a transport without a peer.
fn bit(kind: TransportKind) -> u32 {
    TABLE.iter().position(|transport| transport.kind() == kind).map_or(0, |at| 1 << at)
}

impl fmt::Display for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(TransportKind::as_str).collect();
        f.write_str(&names.join(","))
    }
}

impl Serialize for Transports {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Transports {
    /// `null` stands for all transports.
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let names = Option::<String>::deserialize(from)?;
        names.map_or(Ok(Self::ALL), |names| Self::parse(&names).map_err(serde::de::Error::custom))
    }
}

impl fmt::Debug for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transports({self})")
    }
}

/// The transports of one running agent.
pub(crate) struct Services {
    allowed: Transports,
    /// Services that use kvferry's own sessions, slowest first.
    native: Vec<Arc<dyn Service>>,
    /// Services with a handshake of their own.
    foreign: Vec<Arc<dyn Service>>,
    without_peer: Vec<Arc<dyn Service>>,
}

impl Services {
    /// Starts the permitted transports, and those without a peer.
    pub(crate) fn start(allowed: Transports, cx: &Startup<'_>) -> Result<Self> {
        let (mut native, mut foreign) = (Vec::new(), Vec::new());
        for transport in TABLE.iter().filter(|transport| allowed.contains(transport.kind())) {
            let services = if transport.is_native() { &mut native } else { &mut foreign };
            services.push(transport.start(cx)?);
        }
        let without_peer = WITHOUT_PEER.iter().map(|transport| transport.start(cx));
        let without_peer = without_peer.collect::<Result<_>>()?;
        Ok(Self { allowed, native, foreign, without_peer })
    }

    /// The running transport of this type; `None` if the agent does not have it.
    pub(crate) fn get<T: Service>(&self) -> Option<Arc<T>> {
        self.all().find_map(|service| {
            let service: Arc<dyn Any + Send + Sync> = Arc::clone(service) as _;
            service.downcast().ok()
        })
    }

    fn all(&self) -> impl Iterator<Item = &Arc<dyn Service>> {
        self.native.iter().chain(&self.foreign).chain(&self.without_peer)
    }

    pub(crate) fn announces(&self) -> u64 {
        self.all().map(|service| service.announces()).fold(0, |all, bits| all | bits)
    }

    /// Adds the figures that only the transports know.
    pub(crate) fn count(&self, stats: &mut Stats) {
        self.all().for_each(|service| service.count(stats));
    }

    /// Answers a request of a transport's own kind; `None` if it is of no transport's.
    pub(crate) fn answer(&self, link: &Arc<Link>, kind: u16, body: &[u8]) -> Option<Answer> {
        self.all().find_map(|service| service.answer(link, kind, body))
    }

    /// The transport of data streams, if it is permitted.
    pub(crate) fn streams(&self) -> Option<&dyn Streams> {
        self.native.iter().find_map(|service| service.streams())
    }

    /// The handshake to try before the native one, or instead of it.
    pub(crate) fn dialer(&self) -> Option<&dyn Dialer> {
        self.foreign.iter().find_map(|service| service.dialer())
    }

    /// The reason why sessions do not use the fastest transport although both ends may have it.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let fastest = TABLE.iter().rfind(|transport| transport.is_native())?.kind();
        (!self.allowed.contains(fastest)).then(|| format!("this agent does not allow {fastest}"))
    }

    /// The services that use native sessions, slowest first.
    pub(crate) fn native(&self) -> impl Iterator<Item = &dyn Service> {
        self.native.iter().map(|service| &**service)
    }

    /// The transport whose protocol a connection begins with `first`: see [`Service::speaks`].
    pub(crate) fn speaking(&self, first: u64) -> Option<&dyn Service> {
        self.foreign.iter().map(|service| &**service).find(|service| service.speaks(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_names_for_a_set_parse_to_the_same_set() {
        let both = Transports::only(TransportKind::TCP).with(TransportKind::LOCAL);
        for text in ["tcp,local", "native", "Kvferry", " LOCAL , tcp "] {
            assert_eq!(Transports::parse(text).expect("names"), both, "{text}");
        }
        assert_eq!(Transports::parse("all").expect("a name"), Transports::ALL);
        assert_eq!(Transports::ALL.to_string(), "tcp,local,mooncake");
        let mooncake = Transports::only(TransportKind::MOONCAKE);
        assert_eq!(Transports::parse("Mooncake-TCP").expect("an alias"), mooncake);
        assert!(Transports::parse("rdma").is_err());
        assert!(Transports::parse(" , ").is_err());
    }
}
