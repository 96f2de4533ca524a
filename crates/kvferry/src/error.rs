//! The error of this crate: a kind, context, and a source.

use kvferry_proto::WireCode;
use std::fmt;
use std::sync::Arc;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Kind of an error, for programs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $($(#[$doc])* $name,)*
        }

        impl ErrorKind {
            /// Every kind, for tables and exhaustive tests.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The kind's name in snake case, as in metrics and JSON.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

kinds! {
    /// An argument is invalid: a zero length, lists of different lengths, a bad address.
    InvalidArgument = "invalid_argument",
    /// A range overlaps a registered one.
    Overlap = "overlap",
    /// A range or region is not registered, or not any more.
    NotRegistered = "not_registered",
    /// A descriptor reaches beyond its region.
    OutOfBounds = "out_of_bounds",
    /// The region does not permit the access.
    AccessDenied = "access_denied",
    /// The region was unregistered while it was in use.
    Revoked = "revoked",
    /// An unresponsive process may still write to memory that was unregistered.
    Quarantined = "quarantined",
    /// No connection to the peer could be made.
    Unreachable = "unreachable",
    /// The connection to the peer broke.
    PeerReset = "peer_reset",
    /// The peer is connected but silent.
    PeerSilent = "peer_silent",
    /// The peer ended the session.
    PeerClosed = "peer_closed",
    /// The peer requires a secret and this agent has none.
    AuthRequired = "auth_required",
    /// The peer has no secret and this agent has one.
    AuthUnsupported = "auth_unsupported",
    /// The secrets of the two agents differ.
    AuthFailed = "auth_failed",
    /// The two agents share no protocol version.
    VersionMismatch = "version_mismatch",
    /// A handle belongs to an earlier incarnation of the peer.
    StaleIncarnation = "stale_incarnation",
    /// The operation did not end within its time.
    Deadline = "deadline",
    /// The caller cancelled the operation.
    Cancelled = "cancelled",
    /// The caller's interrupt check asked to stop.
    Interrupted = "interrupted",
    /// The received bytes differ from the sent bytes.
    Checksum = "checksum",
    /// A limit of the protocol was exceeded.
    TooLarge = "too_large",
    /// A bounded queue is full.
    Busy = "busy",
    /// The agent is shut down.
    Shutdown = "shutdown",
    /// The process was forked from the one that started the agent.
    Forked = "forked",
    /// No permitted transport or protocol supports the operation.
    Unsupported = "unsupported",
    /// The peer violated the protocol.
    Protocol = "protocol",
    /// The operating system reported an error.
    Io = "io",
    /// A defect in kvferry.
    Internal = "internal",
}

impl ErrorKind {
    pub(crate) fn from_wire(code: WireCode) -> Self {
        match code {
            WireCode::OutOfBounds | WireCode::Straddles | WireCode::Overflow => Self::OutOfBounds,
            WireCode::UnknownRegion => Self::NotRegistered,
            WireCode::AccessDenied => Self::AccessDenied,
            WireCode::Revoked => Self::Revoked,
            WireCode::ZeroLength | WireCode::UnknownHandoff | WireCode::Duplicate => {
                Self::InvalidArgument
            }
            WireCode::Malformed
            | WireCode::Ok
            | WireCode::Other(_)
            | WireCode::StreamReplayed
            | WireCode::Forged => Self::Protocol,
            WireCode::TooLarge => Self::TooLarge,
            WireCode::Checksum => Self::Checksum,
            WireCode::Cancelled | WireCode::NotNeeded => Self::Cancelled,
            WireCode::Deadline | WireCode::Expired => Self::Deadline,
            WireCode::Busy => Self::Busy,
            WireCode::VersionMismatch => Self::VersionMismatch,
            WireCode::AuthRequired => Self::AuthRequired,
            WireCode::AuthUnsupported => Self::AuthUnsupported,
            WireCode::AuthFailed => Self::AuthFailed,
            WireCode::StaleIncarnation => Self::StaleIncarnation,
            WireCode::Silent | WireCode::Slept => Self::PeerSilent,
            WireCode::UnknownSession | WireCode::Closed | WireCode::Shutdown => Self::PeerClosed,
            WireCode::Internal => Self::Internal,
            WireCode::LayoutMismatch
            | WireCode::ModelMismatch
            | WireCode::ForbiddenProducer
            | WireCode::Unsupported => Self::Unsupported,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error of kvferry; displayed on one line.
///
/// Cheap to clone, because every holder of a handle gets the same outcome.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    what: String,
    context: Vec<(&'static str, String)>,
    quiesced: Option<bool>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error that a layer above the agent gives to it, as to [`Channel::close`](crate::Channel::close), or that a
    /// transport reports.
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            what: what.into(),
            context: Vec::new(),
            quiesced: None,
            source: None,
        }))
    }

    /// An error of the kind `InvalidArgument`.
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, what)
    }

    /// The error of calls to an agent that was shut down.
    pub fn shutdown() -> Self {
        Self::new(ErrorKind::Shutdown, "the agent was shut down")
    }

    /// An error of the kind `Io`, caused by `source`.
    pub fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::new(ErrorKind::Io, what).caused_by(source)
    }

    fn edit(mut self, f: impl FnOnce(&mut Inner)) -> Self {
        f(Arc::make_mut(&mut self.0));
        self
    }

    /// Adds a fact. The first fact under a key stays: it was added closest to the cause.
    #[must_use]
    pub fn with(self, key: &'static str, value: impl fmt::Display) -> Self {
        if self.context(key).is_some() {
            return self;
        }
        let value = value.to_string();
        self.edit(|e| e.context.push((key, value)))
    }

    /// Sets the cause, which the error's text ends with.
    #[must_use]
    pub fn caused_by(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.edit(|e| e.source = Some(Arc::new(source)))
    }

    pub(crate) fn with_quiesced(self, quiesced: bool) -> Self {
        self.edit(|e| e.quiesced = Some(quiesced))
    }

    /// Kind of the error, for programs.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The value of one fact, such as `"peer"`, `"descriptor"` or `"region"`.
    pub fn context(&self, key: &str) -> Option<&str> {
        self.0.context.iter().find(|(k, _)| *k == key).map(|(_, v)| v.as_str())
    }

    /// Returns the keys and values of the error's facts.
    pub fn facts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.context.iter().map(|(k, v)| (*k, v.as_str()))
    }

    /// For a transfer that ended early: whether it is certain that none of its bytes arrive any
    /// more.
    ///
    /// `None` if nothing was in progress. `Some(true)` if the peer has confirmed it, or refused the
    /// request as a whole. `Some(false)` if the peer could not be asked: bytes that its kernel had
    /// received may still be applied.
    pub fn quiesced(&self) -> Option<bool> {
        self.0.quiesced
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.what)?;
        for (i, (key, value)) in self.0.context.iter().enumerate() {
            write!(f, "{}{key}={value}", if i == 0 { " (" } else { ", " })?;
        }
        if !self.0.context.is_empty() {
            f.write_str(")")?;
        }
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        if self.0.quiesced == Some(false) {
            f.write_str("; the peer could not confirm that nothing lands any more")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error[{}]({self})", self.kind())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|s| s.as_ref() as &(dyn std::error::Error + 'static))
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
