//! Counters.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The agent's counters since it started. Gauges are marked as such.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters of a running agent, by the names of [`Stats`].
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.value(),)* }
            }
        }
    };
}

counters! {
    /// Transfers that this agent's users started.
    transfers_started,
    /// Transfers that completed.
    transfers_done,
    /// Transfers that failed.
    transfers_failed,
    /// Transfers that were cancelled, interrupted or ran into their deadline.
    transfers_cancelled,
    /// Transfers that ended early and whose quiesce the peer could not confirm.
    transfers_unconfirmed,
    /// Transfers within a host that went over another transport than `local`, because they name device memory of the
    /// peer, such as that of a GPU.
    fallbacks_peer_device,
    /// The same, because the kernel does not let this process reach memory of the peer that is not shared.
    fallbacks_out_of_reach,
    /// The same, because the peer has more regions than its table for `local` holds.
    fallbacks_unlisted,
    /// Gauge: transfers without an outcome.
    transfers_in_flight,
    /// Payload bytes this agent's transfers wrote to peers.
    bytes_written,
    /// Payload bytes this agent's transfers read from peers.
    bytes_read,
    /// Payload bytes that peers wrote to this agent.
    bytes_received,
    /// Payload bytes that peers read from this agent.
    bytes_served,
    /// Requests of peers that were served.
    requests_served,
    /// Requests of peers that were refused or failed.
    requests_refused,
    /// Gauge: requests of peers being served.
    requests_in_flight,
    /// Sessions that this agent initiated.
    sessions_opened,
    /// Sessions that peers initiated.
    sessions_accepted,
    /// Gauge: live sessions.
    sessions,
    /// Gauge: open data streams, both directions.
    streams,
    /// Handshakes that failed or were refused.
    handshakes_failed,
    /// Sessions and streams of peers that were refused with `Busy`, because the open ones use their
    /// share of the process's descriptors.
    connections_refused,
    /// Idle sessions of peers that ended with `Busy`, because newer ones needed their places.
    sessions_displaced,
    /// Requests and sessions of peers that ended with `Busy`, because peers hold as much memory as they may.
    peer_memory_refused,
    /// Gauge: bytes that peers make this agent hold, beyond what is free for each connection.
    peer_memory_bytes,
    /// Gauge: connections before the end of their handshake.
    handshakes_pending,
    /// Notifications delivered to this agent.
    notifications_received,
    /// Bytes sent over control connections: handshakes, messages and answers, without heartbeats.
    /// Descriptors of transfers use other connections.
    control_bytes_sent,
    /// Checksums that did not match.
    checksum_errors,
    /// Gauge: registered regions.
    regions,
    /// Gauge: gates of copiers in this process.
    gates,
    /// Gauge: processes of this host that copy to and from this agent's memory directly.
    writers,
    /// Gauge: unregistered regions that an unresponsive process may still write to.
    regions_quarantined,
    /// Times that this process did not run for more than half a silence window.
    slept,
}

/// A counter or a gauge, for any thread.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn one(&self) {
        self.add(1);
    }

    /// Takes one from a gauge.
    pub fn less_one(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
