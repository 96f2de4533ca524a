//! The time of a store: milliseconds since it was made.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Read from the system once, then from a clock that no one sets: a jump of the system's clock does not reach a
/// store that is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    began: Instant,
    offset: Duration,
}

impl Clock {
    /// A store that was made at `created_ms`, Unix time. A clock that is earlier than that counts as equal.
    pub(crate) fn new(created_ms: u64) -> Self {
        let created = Duration::from_millis(created_ms);
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { began: Instant::now(), offset: unix.saturating_sub(created) }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        u64::try_from((self.offset + self.began.elapsed()).as_millis()).unwrap_or(u64::MAX)
    }

    /// In seconds, as the index has it.
    pub(crate) fn now_s(&self) -> u32 {
        u32::try_from(self.now_ms() / 1000).unwrap_or(u32::MAX)
    }

    /// Milliseconds since 1970 now.
    pub(crate) fn unix_ms() -> u64 {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(unix.as_millis()).unwrap_or(u64::MAX)
    }
}
