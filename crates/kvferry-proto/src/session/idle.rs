//! Bounds what a peer may send that asks for nothing: heartbeats, unknown messages, answers to no
//! request. Such frames queue nothing, so no queue's limit stops a peer that sends them without end.

use crate::time::Timestamp;

/// Frames that ask for nothing, per second; a peer that sends more ends the session as `Busy`. At the
/// shortest heartbeat interval, 1 ms, an honest peer sends a ping and a pong per interval.
pub const IDLE_FRAMES_PER_SECOND: u64 = 8192;

/// A longer frame counts once for each started multiple of these bytes.
const COUNTED_BYTES: usize = 256;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// A bucket of one second's frames, refilled with time.
#[derive(Clone, Debug)]
pub(super) struct IdleFrames {
    /// Nanoseconds of refilling that the frames so far have used up; at most a second.
    used: u64,
    at: Timestamp,
}

impl IdleFrames {
    pub(super) const fn new(now: Timestamp) -> Self {
        Self { used: 0, at: now }
    }

    /// Counts a frame. False if it is one too many.
    pub(super) fn count(&mut self, frame_bytes: usize, now: Timestamp) -> bool {
        let passed = now.saturating_since(self.at).as_nanos();
        self.used = self.used.saturating_sub(u64::try_from(passed).unwrap_or(u64::MAX));
        self.at = now;
        let frames = frame_bytes.div_ceil(COUNTED_BYTES).max(1) as u64;
        self.used = self.used.saturating_add(frames * (NANOS_PER_SECOND / IDLE_FRAMES_PER_SECOND));
        self.used <= NANOS_PER_SECOND
    }
}
