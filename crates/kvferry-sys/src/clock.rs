//! `CLOCK_BOOTTIME`, which advances while the machine is suspended, so that a deadline that passed
//! during the suspension counts as passed.

/// Nanoseconds since the machine booted.
pub fn boottime_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // Neither field is negative on a clock that starts at zero.
    (t.tv_sec as u64) * 1_000_000_000 + t.tv_nsec as u64
}

/// Processor time of another process so far, the sum of all its threads.
///
/// # Errors
/// The kernel's error, e.g. if there is no such process.
pub fn process_cpu_time(pid: u32) -> std::io::Result<std::time::Duration> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one clock id to a local variable.
    let refused = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) };
    if refused != 0 {
        return Err(std::io::Error::from_raw_os_error(refused));
    }
    // SAFETY: writes one time to a local variable.
    crate::check(unsafe { libc::clock_gettime(clock, &raw mut time) } as libc::ssize_t)?;
    Ok(std::time::Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_of_an_unknown_process_is_an_error() {
        let here = process_cpu_time(std::process::id()).expect("this process exists");
        let own = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        assert!(here.as_nanos() > 0 && here.as_secs() <= own.tv_sec as u64);
        assert!(process_cpu_time(0x7fff_fff0).is_err());
    }
}
