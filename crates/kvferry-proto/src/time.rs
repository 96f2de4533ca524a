//! Explicit time. The protocol reads no clock; the driver passes the time in.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point on the driver's clock, in nanoseconds since an arbitrary origin.
///
/// Agents use `CLOCK_BOOTTIME`, which goes on while the machine is suspended. Timestamps of two
/// machines are never compared: relative budgets cross the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// A timestamp `ns` nanoseconds after the clock's origin.
    pub const fn from_nanos(ns: u64) -> Self {
        Self(ns)
    }

    /// Nanoseconds since the clock's origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time passed since `earlier`; zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// Saturates at the end of the clock (584 years), so that "never" can be added safely.
    fn add(self, rhs: Duration) -> Self {
        let ns = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(ns))
    }
}

impl Sub<Duration> for Timestamp {
    type Output = Self;

    fn sub(self, rhs: Duration) -> Self {
        let ns = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(ns))
    }
}
