//! What this machine has: enough to choose sizes and to say in a report where it was measured.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Where figures were measured. No host name and no path: reports are shared.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) cpus: usize,
    pub(crate) cpu: String,
    pub(crate) kernel: String,
    pub(crate) memory_bytes: u64,
}

impl Machine {
    pub(crate) fn here() -> Machine {
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu =
            cpu_info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Machine {
            cpus: cpus(),
            cpu: cpu
                .map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.to_string()),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            memory_bytes: memory_line("MemTotal:").unwrap_or(0),
        }
    }
}

/// Cores this process may use.
pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes that can be allocated without pushing anything out: the kernel's estimate, or what is left
/// in our control group if that is less.
pub(crate) fn available_memory() -> u64 {
    let free = memory_line("MemAvailable:").unwrap_or(u64::MAX);
    free.min(control_group_room().unwrap_or(u64::MAX))
}

fn memory_line(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?;
    kib.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn control_group_room() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let read = |file: &str| -> Option<u64> {
        // Inside a container the path is that of the host; the container's own root is the limit.
        let at = |dir: &str| fs::read_to_string(format!("/sys/fs/cgroup{dir}/{file}")).ok();
        at(path).or_else(|| at(""))?.trim().parse().ok()
    };
    Some(read("memory.max")?.saturating_sub(read("memory.current")?))
}

/// Processor time this process has used, all threads together, to the nanosecond.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// A clock that all processes of this host share.
pub(crate) fn shared_clock() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described() {
        let machine = Machine::here();
        assert!(machine.cpus >= 1 && machine.memory_bytes > 1 << 28, "{machine:?}");
        assert!(!machine.kernel.is_empty());
        assert!(available_memory() > 1 << 20);
    }

    #[test]
    fn working_takes_processor_time() {
        let before = cpu_time();
        let mut state = 1u64;
        while cpu_time() - before < Duration::from_millis(1) {
            state = std::hint::black_box(crate::blocks::mix(state));
        }
        assert!(shared_clock() > Duration::ZERO);
    }
}
