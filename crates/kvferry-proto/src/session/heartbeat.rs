//! The heartbeat: times the pings, and takes a silent peer for gone.

use crate::time::Timestamp;
use std::time::Duration;

/// The heartbeat of one side. Runs only while watched: an idle session costs nothing.
#[derive(Clone, Debug)]
pub(super) struct Heartbeat {
    interval: Duration,
    silence: Duration,
    last_receive: Timestamp,
    /// Events of the session waited for longer than one turn of the driver, which does not read meanwhile.
    behind: bool,
    watch: Option<Watch>,
    pings: u64,
}

#[derive(Clone, Copy, Debug)]
struct Watch {
    since: Timestamp,
    next_ping: Timestamp,
}

impl Heartbeat {
    pub(super) const fn new(interval: Duration, silence: Duration, now: Timestamp) -> Self {
        Self { interval, silence, last_receive: now, behind: false, watch: None, pings: 0 }
    }

    /// Starts or stops watching the peer. Starting begins a whole silence window.
    pub(super) fn watch(&mut self, watch: bool, now: Timestamp) {
        self.watch = match (watch, self.watch) {
            (false, _) => None,
            (true, Some(watch)) => Some(watch),
            (true, None) => Some(Watch { since: now, next_ping: now + self.interval }),
        };
    }

    /// Bytes arrived.
    pub(super) fn received(&mut self, now: Timestamp) {
        self.last_receive = self.last_receive.max(now);
    }

    /// Records that this side does not read what the peer sends, so the peer is not taken for
    /// silent.
    pub(super) const fn fall_behind(&mut self) {
        self.behind = true;
    }

    /// Records that this side reads again. The silence window begins anew.
    pub(super) fn catch_up(&mut self, now: Timestamp) {
        if std::mem::take(&mut self.behind) {
            self.received(now);
        }
    }

    pub(super) const fn last_receive(&self) -> Timestamp {
        self.last_receive
    }

    pub(super) fn next_timeout(&self) -> Option<Timestamp> {
        let next_ping = self.watch?.next_ping;
        Some(self.silent_at().map_or(next_ping, |at| at.min(next_ping)))
    }

    /// Whether the silence window has passed.
    pub(super) fn is_silent(&self, now: Timestamp) -> bool {
        self.silent_at().is_some_and(|at| at <= now)
    }

    /// The number of the ping to send now, if one is due.
    pub(super) fn next_ping(&mut self, now: Timestamp) -> Option<u64> {
        let watch = self.watch.as_mut().filter(|watch| watch.next_ping <= now)?;
        // From now, not from when it was due: after a delay there is one ping, not a burst.
        watch.next_ping = now + self.interval;
        self.pings += 1;
        Some(self.pings)
    }

    /// The number of a ping beside those that are due.
    pub(super) const fn last_ping(&mut self) -> u64 {
        self.pings += 1;
        self.pings
    }

    fn silent_at(&self) -> Option<Timestamp> {
        let since = self.watch.filter(|_| !self.behind)?.since;
        Some(self.last_receive.max(since) + self.silence)
    }
}
