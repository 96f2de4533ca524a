//! `CLOCK_BOOTTIME`: it counts a suspended machine's sleep, so a deadline that passed while the
//! host slept is seen as passed.

/// Nanoseconds since the machine booted.
pub fn boottime_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // Neither field is negative on a clock that starts at zero.
    (t.tv_sec as u64) * 1_000_000_000 + t.tv_nsec as u64
}
