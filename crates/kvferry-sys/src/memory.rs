//! The limit of the memory that the process may use.

/// Bytes of memory of the machine, or of the process's control group if that is less; `None` if neither
/// is known.
pub fn limit() -> Option<usize> {
    // SAFETY: the call takes a number and returns one.
    let of = |name| u64::try_from(unsafe { libc::sysconf(name) }).ok();
    let machine = of(libc::_SC_PHYS_PAGES)
        .zip(of(libc::_SC_PAGE_SIZE))
        .and_then(|(pages, bytes)| pages.checked_mul(bytes));
    // A container sees its own group as the root; version 2 first, then version 1. "max" is no number.
    let files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let group =
        files.iter().filter_map(|file| std::fs::read_to_string(file).ok()?.trim().parse().ok());
    machine
        .into_iter()
        .chain(group)
        .filter(|bytes| *bytes > 0)
        .min()
        .map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_limit_is_known_and_no_more_than_the_machine_has() {
        let limit = super::limit().expect("Linux tells the memory of the machine");
        let text = std::fs::read_to_string("/proc/meminfo").expect("of every Linux");
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("a line");
        let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
        // The kernel counts a little memory as its own in one of the two.
        assert!(limit > 1 << 20 && limit <= (kib << 10) + (64 << 20), "{limit} of {kib} KiB");
    }
}
