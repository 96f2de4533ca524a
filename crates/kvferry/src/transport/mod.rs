//! How bytes move. One folder per transport, one trait, one place that chooses.

pub(crate) mod local;
pub(crate) mod mooncake;
pub(crate) mod tcp;

use crate::error::{Error, ErrorKind, Result};
use crate::session::link::{Lane, Link};
use crate::transfer::batch::Batch;
use crate::transfer::job::Job;
use kvferry_proto::{Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use serde::Serialize;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Payload bytes sent in one system call.
///
/// A sender whose call is long takes the acknowledgements that arrive meanwhile itself, at its end,
/// so the pages of what was acknowledged are freed where the next are needed, warm in its cache;
/// a receiver whose calls are short acknowledges often. Against calls of 256 KiB both ways, that is
/// worth a factor of two on loopback under BBR and a tenth under Reno; from 512 KiB to 1 MiB, and
/// from 64 to 128 KiB, it is there.
pub(crate) const SEND_CHUNK: usize = 768 * 1024;

/// Payload bytes received in one system call; see [`SEND_CHUNK`].
pub(crate) const RECEIVE_CHUNK: usize = 96 * 1024;

/// Payload bytes one stream moves before others of the same thread have their turn.
pub(crate) const TURN: usize = 4 * 1024 * 1024;

/// A way for bytes to move between two agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TransportKind {
    /// kvferry's own protocol over TCP.
    Tcp,
    /// Copies between the memories of two processes of one host and one user.
    Local,
    /// Mooncake's protocol over TCP, for stock Mooncake peers.
    Mooncake,
}

impl TransportKind {
    /// The transport's name, as in `KVFERRY_TRANSPORTS`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Local => "local",
            Self::Mooncake => "mooncake",
        }
    }

    const fn bit(self) -> u8 {
        match self {
            Self::Tcp => 1,
            Self::Mooncake => 2,
            Self::Local => 4,
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A set of transports that may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transports(u8);

impl Transports {
    /// Every transport this build has.
    pub const ALL: Self =
        Self(TransportKind::Tcp.bit() | TransportKind::Mooncake.bit() | TransportKind::Local.bit());

    /// The set with one transport.
    pub const fn only(kind: TransportKind) -> Self {
        Self(kind.bit())
    }

    /// This set and one more.
    #[must_use]
    pub const fn with(self, kind: TransportKind) -> Self {
        Self(self.0 | kind.bit())
    }

    /// Whether a transport is in the set.
    pub const fn contains(self, kind: TransportKind) -> bool {
        self.0 & kind.bit() != 0
    }

    /// Parses names separated by commas: `tcp`, `local`, `native` (also `kvferry`; both of them),
    /// `mooncake` (also `mooncake-tcp`), `all`. Case does not matter.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that is unknown, or none at all.
    pub fn parse(text: &str) -> Result<Self> {
        let mut set = Self(0);
        for name in text.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            set = match name.to_ascii_lowercase().as_str() {
                "tcp" => set.with(TransportKind::Tcp),
                "local" => set.with(TransportKind::Local),
                "native" | "kvferry" => set.with(TransportKind::Tcp).with(TransportKind::Local),
                "mooncake" | "mooncake-tcp" => set.with(TransportKind::Mooncake),
                "all" => Self::ALL,
                _ => {
                    return Err(Error::new(
                        ErrorKind::InvalidArgument,
                        "unknown transport; there are tcp, local, mooncake and all",
                    )
                    .with("transport", name));
                }
            };
        }
        if set.0 == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "no transport is named"));
        }
        Ok(set)
    }
}

impl fmt::Display for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = [TransportKind::Tcp, TransportKind::Local, TransportKind::Mooncake]
            .into_iter()
            .filter(|kind| self.contains(*kind))
            .map(TransportKind::as_str)
            .collect();
        f.write_str(&names.join(","))
    }
}

/// How a peer is to be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Approach {
    /// By the native handshake; nothing else is tried.
    Native,
    /// By Mooncake's handshake; nothing else is tried.
    Mooncake,
    /// By Mooncake's handshake, whose answer tells whether the peer is native.
    Either,
}

/// The one place that chooses: from what is allowed, whether Mooncake peers are talked to at all,
/// and whether a secret is set (which Mooncake's protocol can't prove).
pub(crate) fn choose(allowed: Transports, compatibility: bool, secret: bool) -> Result<Approach> {
    let native = allowed.contains(TransportKind::Tcp) || allowed.contains(TransportKind::Local);
    let mooncake = allowed.contains(TransportKind::Mooncake);
    match (native, mooncake, secret, compatibility) {
        (true, true, false, true) => Ok(Approach::Either),
        (true, _, _, _) => Ok(Approach::Native),
        (false, true, false, _) => Ok(Approach::Mooncake),
        (false, true, true, _) => Err(Error::new(
            ErrorKind::Unsupported,
            "a secret is set, and the only transport allowed can't prove one",
        )),
        (false, false, _, _) => Err(Error::new(ErrorKind::Unsupported, "no transport is allowed")),
    }
}

/// Who can stop a copier for certain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The side whose memory is written, by itself.
    Local,
    /// Only the writer, or its exit.
    PeerExit,
}

/// What a transport can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The fence when this side writes to the peer.
    pub write_fence: Fence,
    /// The fence when this side reads from the peer.
    pub read_fence: Fence,
    /// Whether the peer confirms that a cancelled write has stopped.
    pub confirms_cancel: bool,
    /// Whether notifications travel with the data.
    pub notifications: bool,
    /// Whether payload can carry checksums.
    pub checksums: bool,
    /// Whether descriptors name regions; if not, only addresses.
    pub regions: bool,
}

/// What a drive waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing: there is more to do at once, but others should have their turn.
    Again,
    /// The lane's socket.
    Wait(Interest),
    /// The memory: its waker will be called.
    Memory,
    /// Nothing: the lane was given back because others wait for one, and the job has more to
    /// move: it has to wish for a lane again.
    Yielded,
    /// Nothing: the lane was given back and the job was told.
    Done,
}

/// One lane's share of a transfer, moved on by whoever has time: the caller or an I/O thread.
pub(crate) trait Drive: Send {
    /// What [`Progress::Wait`] waits for; the same all the time.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// Does what can be done without waiting, in bounded time.
    fn progress(&mut self, now: Timestamp) -> Progress;

    /// When to call again even if nothing happened.
    fn check_at(&self) -> Option<Timestamp> {
        None
    }
}

/// A way of moving bytes.
pub(crate) trait Transport: Send + Sync + fmt::Debug {
    fn kind(&self) -> TransportKind;

    fn capabilities(&self) -> Capabilities;

    /// Begins a lane's share of a job. `wake` is called when memory that was waited for may be
    /// ready.
    fn drive(
        &self,
        link: &Arc<Link>,
        lane: Arc<Lane>,
        job: Arc<Job>,
        wake: crate::memory::device::Wake,
    ) -> Moving;
}

/// A share of some transport, where it need not be allocated.
#[expect(clippy::large_enum_variant, reason = "there are a few at a time, on the stack")]
pub(crate) enum Moving {
    Tcp(tcp::Share),
    Local(local::LocalShare),
    Other(Box<dyn Drive>),
}

impl Moving {
    fn drive(&self) -> &dyn Drive {
        match self {
            Self::Tcp(share) => share,
            Self::Local(share) => share,
            Self::Other(share) => &**share,
        }
    }
}

impl Drive for Moving {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.drive().fd()
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        match self {
            Self::Tcp(share) => share.progress(now),
            Self::Local(share) => share.progress(now),
            Self::Other(share) => share.progress(now),
        }
    }

    fn check_at(&self) -> Option<Timestamp> {
        self.drive().check_at()
    }
}

/// What a peer's refusal, or a look at its regions that foresees it, means for a batch.
pub(crate) fn refusal(link: &Link, batch: &Batch, code: WireCode, pair: Option<usize>) -> Error {
    let kind = ErrorKind::from_wire(code);
    let error = Error::new(kind, format!("the peer refused: {code}")).with("peer", &link.address);
    let Some(pair) = pair else { return error };
    let error = error.with("descriptor", pair);
    match (batch.local.pieces.get(pair), batch.remote.get(pair)) {
        (Some(piece), Some(remote)) => error
            .with("region", remote.region)
            .with("offset", format_args!("{:#x}", remote.offset))
            .with("len", piece.len),
        _ => error,
    }
}

/// Memory of ours went away under a transfer.
pub(crate) fn local_fault(code: WireCode, index: u32) -> Error {
    let what = "local memory of the transfer can't be used any more";
    Error::new(ErrorKind::from_wire(code), what).with("descriptor", index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_is_the_same_for_every_way_to_say_it() {
        let both = Transports::ALL;
        let tcp = Transports::parse("TCP").expect("a name");
        let mooncake = Transports::parse("Mooncake-TCP").expect("alias");
        assert_eq!(choose(both, true, false).expect("ok"), Approach::Either);
        assert_eq!(choose(both, false, false).expect("ok"), Approach::Native);
        assert_eq!(choose(both, true, true).expect("ok"), Approach::Native);
        for (compatibility, secret) in [(true, true), (true, false), (false, true), (false, false)]
        {
            // An explicit `tcp` probes nothing else.
            assert_eq!(choose(tcp, compatibility, secret).expect("ok"), Approach::Native);
        }
        assert_eq!(choose(mooncake, false, false).expect("ok"), Approach::Mooncake);
        assert!(choose(mooncake, true, true).is_err());
        assert!(Transports::parse("rdma").is_err());
        assert!(Transports::parse(" , ").is_err());
    }
}
