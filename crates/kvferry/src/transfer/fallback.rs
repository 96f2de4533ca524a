//! Transfers that a faster route leaves to a slower one: the reason, its counter, and one log line for each peer.

use crate::stats::{Counter, Counters};
use crate::sync::OnceLock;
use crate::transfer::kind::TransportKind;
// Bits, which need no memory order.
use std::sync::atomic::{AtomicU8, Ordering};

/// The reason why a route leaves a batch to the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fallback {
    /// The batch names device memory of the peer.
    PeerDevice,
    /// The kernel does not let this process reach memory of the peer that is not shared.
    OutOfReach,
    /// The peer has more regions than the table that the route looks them up in.
    Unlisted,
}

impl Fallback {
    /// The words for people: "a route has …".
    pub(crate) const fn in_words(self) -> &'static str {
        match self {
            Self::PeerDevice => "no path to device memory of the peer",
            Self::OutOfReach => "no path to memory of the peer that is not shared",
            Self::Unlisted => "no entry for one of the peer's many regions",
        }
    }

    const fn counter(self, counters: &Counters) -> &Counter {
        match self {
            Self::PeerDevice => &counters.fallbacks_peer_device,
            Self::OutOfReach => &counters.fallbacks_out_of_reach,
            Self::Unlisted => &counters.fallbacks_unlisted,
        }
    }
}

/// The fallbacks of one link.
#[derive(Debug, Default)]
pub(crate) struct Fallbacks {
    /// The reasons that were logged, a bit for each.
    logged: AtomicU8,
    /// The first reason, in words.
    first: OnceLock<String>,
}

impl Fallbacks {
    /// Counts a batch that `from` leaves to `to`. The first one of each reason is logged.
    pub(crate) fn count(
        &self,
        why: Fallback,
        (from, to): (TransportKind, TransportKind),
        peer: &str,
        counters: &Counters,
    ) {
        why.counter(counters).one();
        let bit = 1 << (why as u8);
        if self.logged.load(Ordering::Relaxed) & bit != 0
            || self.logged.fetch_or(bit, Ordering::Relaxed) & bit != 0
        {
            return;
        }
        let reason = format!("{from} has {}; such transfers go over {to}", why.in_words());
        warn_limited!(%peer, %reason, "transfers do not take the fastest transport to the peer");
        let _ = self.first.set(reason);
    }

    /// The reason of the first fallback, in words.
    pub(crate) fn first(&self) -> Option<&str> {
        self.first.get().map(String::as_str)
    }
}
