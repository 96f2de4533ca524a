//! Transports move the bytes of a batch: those of this crate, and the seam for those of others.
//!
//! A transport consists of:
//!
//! * a [`Start`], one static value: its names, its capabilities, its settings, and how it starts with an
//!   agent;
//! * a [`Service`], one per agent: what it announces, how it gets a route to a peer, and what it
//!   does with connections that peers open;
//! * a route, one per peer: how a batch moves. A transport whose shares each use a connection is an
//!   [`OnLanes`], and gives it to the [`Link`] with [`Link::add_lanes`]. A share is a [`Drive`], driven by the
//!   caller's thread or by an I/O thread.
//!
//! A transport reaches a peer in one of three ways. It uses the native session of a peer and gets
//! its route once that is established ([`Service::attach`]: `tcp`, `local`; queue pairs would be
//! set up here). It has a handshake of its own ([`Service::dialer`]): for peers of another protocol. Or it has no
//! peer, and makes its [`Link`] itself (files). A completion queue is
//! a `Drive`'s descriptor. A transport that supports device memory takes it from the batch's
//! pieces; the others see only host spans.
//!
//! Each transport of this crate is one folder and one line in the table below; nothing else in the agent knows a
//! transport's name. Inside of this crate, a transport can also implement `Route` for shares without a connection,
//! and keep keys of regions (`memory/user.rs`).
//!
//! # What a transport uses
//!
//! | for | there is |
//! |---|---|
//! | being a transport of the program | [`link`] |
//! | its settings | [`TransportSetting`], [`TransportSettings::is_on`] |
//! | the agent | [`Startup`], [`Core`] with its counters and threads |
//! | work on the agent's threads | [`Handler`], [`Next`], [`Remote`] |
//! | a peer | [`Link`]; [`Backend`] is how the transport asks the peer; [`Dialer`] connects |
//! | moving a batch | [`Job`], [`Frame`], [`Lane`], [`Yielding`] |
//! | memory of either side | [`Cursor`], [`Gate`], [`Core::cursor_at`] |
//!
//! # What a transport promises
//!
//! * A handler, a share, and every method of a [`Service`] and a [`Backend`] that takes no time limit do not block:
//!   they do a bounded amount of work and say what they wait for.
//! * Memory is touched only through a [`Cursor`], inside the call of [`Cursor::lend`]. A span is an address: the
//!   compiler does not see that it ends with the call. A transport that keeps one touches memory that its owner uses
//!   for something else. No cursor of a job is used once its share has ended. So link only transports that you would
//!   trust with an `unsafe` block.
//! * A share ends with exactly one of [`Job::share_ended`] and [`Job::share_yielded`], and names its lane as dirty
//!   while the peer may still apply a request of it. That of a stopped job may wait for its device's copies before
//!   ([`Progress::Memory`]); if they take as long as a peer may be silent, its driver ends it in its place.
//! * A share that begins to wait for its peer without a call of [`Cursor::lend`] that would block calls
//!   [`Cursor::park`], so that memory which was read ahead delays no other transfer.
//! * Bytes of a peer are applied only while [`Core::is_awake`], and while the link has not ended.
//! * What peers make the agent hold is bounded and counted ([`Core::account`], [`Core::connections_max`]), and every
//!   gauge returns to zero.
//!
//! The conformance suite of `kvferry-testkit` checks what can be checked: one line per transport.

pub(crate) mod refusal;
pub(crate) mod service;
pub(crate) mod settings;

pub use crate::core::Core;
pub use crate::host::prepare;
pub use crate::memory::cursor::{Cursor, Lent, lent};
pub use crate::memory::device::Direction;
pub use crate::memory::gate::Gate;
pub use crate::memory::pieces::{Fault, MemoryFault};
pub use crate::memory::stages::Wake;
pub use crate::peer_memory::Account;
pub use crate::reactor::{ACCEPTS_PER_CALL, Cause, Cx, Handler, Next, Remote, Threads, now};
pub use crate::stats::{Counter, Counters};
pub use crate::transfer::batch::{Frame, Part, Parts};
pub use crate::transfer::drive::{
    Drive, OnLanes, Progress, RECEIVE_CHUNK, SEND_CHUNK, STEP_BYTES, Yielding,
};
pub use crate::transfer::job::{Job, Op};
pub use crate::transfer::kind::Transport;
pub use crate::transfer::lanes::Lane;
pub use crate::transfer::link::{Backend, Link, unreachable_peer};
pub use crate::users::Owner;
pub use refusal::local_fault;
pub use service::{Answer, Attached, Dialed, Dialer, Directory, OnDialed, Service, Start, Startup};
pub use settings::{TransportSetting, TransportSettings};

use crate::error::{Error, Result};
use crate::stats::Stats;
use crate::sync::{Arc, OnceLock};
use crate::transfer::kind::TransportKind;
use serde::{Deserialize, Serialize};
use service::Streams;
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
            /// Every transport to peers that the program has.
            pub const ALL: Self = Self(u32::MAX);
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
    }
    without a peer {
        /// Transfers between memory and files of this host.
        FILE = file::File;
    }
}

// The transports of other crates that version 1 of the configuration knows, whatever the program has linked: earlier
// versions of this crate had them, and wrote their names and settings.
static ELSEWHERE: &[Elsewhere] = &[Elsewhere {
    names: &["mooncake", "mooncake-tcp"],
    setting: TransportSetting::switch(
        "mooncake",
        None,
        "connect to Mooncake's peers, and serve them",
    ),
    link: "kvferry_mooncake::link()",
}];

/// A transport of another crate, for a program that has not linked it.
pub(crate) struct Elsewhere {
    names: &'static [&'static str],
    setting: TransportSetting,
    /// The call that links it.
    link: &'static str,
}

impl Elsewhere {
    pub(crate) fn of_setting(name: &str) -> Option<&'static Self> {
        ELSEWHERE.iter().find(|it| it.setting.name() == name)
    }

    pub(crate) const fn setting(&self) -> &TransportSetting {
        &self.setting
    }

    /// What to do where the transport is needed.
    pub(crate) fn is_not_linked(&self) -> Error {
        let (name, link) = (self.names[0], self.link);
        Error::invalid(format!(
            "this program has not linked the transport {name}: call {link} before the configuration is read"
        ))
    }
}

/// The transports that the program has linked, in the order of the calls.
static LINKED: [OnceLock<&'static dyn Start>; LINKED_MAX] = [const { OnceLock::new() }; LINKED_MAX];
const LINKED_MAX: usize = 16;

/// Adds a transport to peers to those of the program, until the process ends; returns its kind. Agents that
/// start after this call have it, unless their settings exclude it. So the program calls this before it reads a
/// configuration: [`Transports::parse`], [`Config`](crate::Config), its environment and its JSON know the names and
/// settings of the transports that are linked at the time. A transport whose name the program has already is not
/// added again. May be called on any thread.
///
/// Transports that are linked count as faster than those of this crate, a later one as faster than an earlier one.
///
/// # Panics
/// If 16 other transports are linked.
pub fn link(transport: &'static dyn Start) -> TransportKind {
    let kind = transport.kind();
    let is_it = |known: &dyn Start| known.kind() == kind;
    let is_own = TABLE.iter().chain(WITHOUT_PEER).any(|own| is_it(*own));
    let is_known = is_own || LINKED.iter().any(|place| is_it(*place.get_or_init(|| transport)));
    assert!(is_known, "at most {LINKED_MAX} transports can be linked; {kind} is one more");
    kind
}

/// The transports to peers that the program has, slowest first.
fn table() -> impl DoubleEndedIterator<Item = &'static dyn Start> {
    TABLE.iter().copied().chain(LINKED.iter().filter_map(|place| place.get().copied()))
}

/// A set of permitted transports to peers. Files are not among them: an agent that may use `tcp` only
/// can open files. [`link`] adds to the transports of the program.
#[derive(Clone, Copy)]
pub struct Transports(u32);

impl PartialEq for Transports {
    fn eq(&self, other: &Self) -> bool {
        table().all(|it| self.contains(it.kind()) == other.contains(it.kind()))
    }
}

impl Eq for Transports {}

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
        table().any(|transport| self.contains(transport.kind()) && is_such(transport))
    }

    /// The transports of the set.
    pub fn iter(self) -> impl Iterator<Item = TransportKind> {
        table().map(|transport| transport.kind()).filter(move |kind| self.contains(*kind))
    }

    /// Parses names separated by commas: a transport's name ([`TransportKind::as_str`]), one of its
    /// aliases, or `all`. `native` (also `kvferry`) stands for all transports that use kvferry's
    /// own sessions. Case does not matter. `mooncake` is taken also where the program has not linked that transport, and
    /// adds nothing then.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown name, for an empty list, and for a list without any transport that the program has.
    pub fn parse(text: &str) -> Result<Self> {
        let (mut set, mut not_linked) = (0, None);
        for name in text.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            let is_name = |known: &str| known.eq_ignore_ascii_case(name);
            let named = table().filter(|transport| {
                is_name(transport.kind().as_str())
                    || transport.aliases().iter().any(|it| is_name(it))
            });
            let all = if is_name("all") { Self::ALL.0 } else { 0 };
            let bits = named.fold(all, |bits, transport| bits | bit(transport.kind()));
            if bits == 0 {
                let known = ELSEWHERE.iter().find(|it| it.names.iter().any(|it| is_name(it)));
                not_linked = Some(known.ok_or_else(|| {
                    let what = format!("unknown transport; known are {} and all", Self::ALL);
                    Error::invalid(what).with("transport", name)
                })?);
            }
            set |= bits;
        }
        match (set, not_linked) {
            (0, None) => Err(Error::invalid("the list of transports is empty")),
            (0, Some(elsewhere)) => Err(elsewhere.is_not_linked()),
            _ => Ok(Self(set)),
        }
    }
}

/// The settings of all transports of the program.
fn settings() -> impl Iterator<Item = &'static TransportSetting> {
    table().chain(WITHOUT_PEER.iter().copied()).flat_map(|transport| transport.settings())
}

/// Zero for a transport without a peer, and for one that is not linked.
fn bit(kind: TransportKind) -> u32 {
    table().position(|transport| transport.kind() == kind).map_or(0, |at| 1 << at)
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
        for transport in table().filter(|transport| allowed.contains(transport.kind())) {
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
        let fastest = table().rfind(|transport| transport.is_native())?.kind();
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
        assert!(Transports::ALL.to_string().starts_with("tcp,local"));
        assert!(Transports::parse("rdma").is_err());
        assert!(Transports::parse(" , ").is_err());
    }
}
