//! Noticing that this process itself was away: stopped, suspended, or starved.
//!
//! While there are sessions, the control thread stores the time several times per silence window.
//! Whoever is about to touch memory for a peer looks at that time first: if it is older than it
//! can be with everybody awake, the peer may have given us up long ago, and what its bytes are
//! meant for may be somebody else's by now. The control thread checks the same before it stores a
//! new time, and then ends every session first (I6).
//!
//! What remains is the time between the look and the system call that follows it, some
//! nanoseconds; a process stopped exactly there applies at most one chunk.

use crate::agent::Core;
use crate::reactor::{Cause, Cx, Handler, Next, now};
use kvferry_proto::Timestamp;
use kvferry_sys::poll::Interest;
use std::os::fd::BorrowedFd;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Pulse {
    last: AtomicU64,
    every: Duration,
    limit: Duration,
}

impl Pulse {
    /// For a silence window: a beat every quarter, and away after a beat and half a window.
    pub(crate) fn new(silence: Duration, now: Timestamp) -> Self {
        let every = silence / 4;
        Self { last: AtomicU64::new(now.as_nanos()), every, limit: every + silence / 2 }
    }

    /// Whether this process was awake all the time lately.
    pub(crate) fn is_fresh(&self, now: Timestamp) -> bool {
        let last = Timestamp::from_nanos(self.last.load(Ordering::Acquire));
        now.saturating_since(last) <= self.limit
    }

    pub(crate) fn beat(&self, now: Timestamp) {
        self.last.store(now.as_nanos(), Ordering::Release);
    }
}

/// The control thread's side: beats while there are sessions.
pub(crate) struct PulseTimer {
    core: Weak<Core>,
    beating: bool,
}

impl PulseTimer {
    pub(crate) fn new(core: Weak<Core>) -> Self {
        Self { core, beating: false }
    }
}

impl Handler for PulseTimer {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        // Not when the wait ended: it is the time since then that counts.
        let at = now();
        let Some(core) = self.core.upgrade() else { return Next::Close };
        if self.beating && !core.pulse.is_fresh(at) {
            core.counters.slept.one();
            tracing::warn!("this process was away; all sessions are void");
            core.void_sessions();
        }
        // Only now: whoever saw the old time until here touches nothing.
        core.pulse.beat(at);
        self.beating = core.has_sessions();
        let deadline = self.beating.then(|| at + core.pulse.every);
        Next::Wait { interest: Interest::None, deadline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_of_a_whole_silence_window_is_always_noticed() {
        let silence = Duration::from_secs(3);
        let start = Timestamp::from_nanos(1_000_000_000_000);
        let pulse = Pulse::new(silence, start);
        // The latest beat can be just before the stop.
        assert!(!pulse.is_fresh(start + silence));
        // A beat that is merely late is not a stop.
        assert!(pulse.is_fresh(start + pulse.every * 2));
    }
}
