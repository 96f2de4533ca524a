//! Counters.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The agent's counters since it started. Gauges say so.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.value(),)* }
            }
        }
    };
}

counters! {
    /// Transfers that this agent's users began.
    transfers_started,
    /// Of those, done.
    transfers_done,
    /// Of those, failed.
    transfers_failed,
    /// Of those, cancelled, interrupted or past their deadline.
    transfers_cancelled,
    /// Of those that ended early, the ones whose quiesce the peer could not confirm.
    transfers_unconfirmed,
    /// Gauge: transfers without an outcome yet.
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
    /// Sessions established with peers we called.
    sessions_opened,
    /// Sessions established with peers that called.
    sessions_accepted,
    /// Gauge: live sessions.
    sessions,
    /// Gauge: open data streams, both directions.
    streams,
    /// Handshakes that failed or were refused.
    handshakes_failed,
    /// Gauge: connections that have not said who they are.
    handshakes_pending,
    /// Notifications delivered to this agent.
    notifications_received,
    /// Bytes said to peers over control connections: handshakes, messages and answers, but no
    /// heartbeats. Descriptors of transfers go over other connections.
    control_bytes_sent,
    /// Checksums that did not match.
    checksum_errors,
    /// Gauge: registered regions.
    regions,
    /// Gauge: gates of copiers.
    gates,
    /// Gauge: processes of this host that copy to and from this agent's memory by themselves.
    writers,
    /// Gauge: unregistered regions that a process which does not answer may still write to.
    regions_quarantined,
    /// Times this process was found to have slept past half a silence window.
    slept,
}

/// One counter or gauge.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn one(&self) {
        self.add(1);
    }

    pub(crate) fn less_one(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
