//! Properties of this machine, to choose sizes and to name the machine in a report.

use std::fs;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The machine that figures were measured on. No host name and no path: reports are shared.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    pub cpus: usize,
    pub cpu: String,
    pub kernel: String,
    pub memory_bytes: u64,
}

impl Machine {
    /// The machine that this process runs on.
    pub fn here() -> Machine {
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
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes that can be allocated without swapping: the kernel's estimate, or what is left in this
/// process's control group if that is less.
pub fn available_memory() -> u64 {
    let free = memory_line("MemAvailable:").unwrap_or(u64::MAX);
    free.min(control_group_rest().unwrap_or(u64::MAX))
}

fn memory_line(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?;
    kib.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn control_group_rest() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let read = |file: &str| -> Option<u64> {
        // Inside a container the path is that of the host; the container's own root is the limit.
        let at = |dir: &str| fs::read_to_string(format!("/sys/fs/cgroup{dir}/{file}")).ok();
        at(path).or_else(|| at(""))?.trim().parse().ok()
    };
    Some(read("memory.max")?.saturating_sub(read("memory.current")?))
}

/// Processor time of the threads of this process's agents.
pub(crate) fn agent_time() -> std::io::Result<Duration> {
    time_of_threads("kvferry-")
}

/// The number of times that threads of this process's agents have slept and been woken.
pub(crate) fn agent_waits() -> std::io::Result<u64> {
    let mut waits = 0;
    for status in files_of_threads("kvferry-", "status")? {
        waits += waits_in(&status)?;
    }
    Ok(waits)
}

/// The number of threads of this process other than the main one, and of the times that they have slept and been woken.
pub(crate) fn waits_of_others() -> std::io::Result<(usize, u64)> {
    let (mut threads, mut waits) = (0, 0);
    let main = format!("\nPid:\t{}\n", std::process::id());
    for status in files_of_threads("", "status")? {
        if !status.contains(&main) {
            threads += 1;
            waits += waits_in(&status)?;
        }
    }
    Ok((threads, waits))
}

/// The times that a thread has slept, from its status.
fn waits_in(status: &str) -> std::io::Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    let count = line.and_then(|count| count.trim().parse().ok());
    count.ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

fn time_of_threads(prefix: &str) -> std::io::Result<Duration> {
    let mut time = Duration::ZERO;
    for used in files_of_threads(prefix, "schedstat")? {
        let used = used.split(' ').next().and_then(|ns| ns.parse().ok());
        time += Duration::from_nanos(used.ok_or(std::io::ErrorKind::InvalidData)?);
    }
    Ok(time)
}

/// The contents of this file of the kernel for each thread whose name has the prefix.
fn files_of_threads(prefix: &str, file: &str) -> std::io::Result<Vec<String>> {
    let mut files = Vec::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        let contents = std::fs::read_to_string(task.join("comm")).and_then(|name| {
            let counts = name.starts_with(prefix);
            counts.then(|| std::fs::read_to_string(task.join(file))).transpose()
        });
        match contents {
            Ok(contents) => files.extend(contents),
            Err(error) if has_ended(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(files)
}

/// True if the error says that the thread whose file was to be read has ended.
fn has_ended(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

/// Raises this process's limit of open files to the most that it may have.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // A process that may not raise it keeps what it has.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// A number that no other process can compute: what a destination is poisoned with must not be
/// known to the sender.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel gives eight random bytes without a condition");
    u64::from_ne_bytes(bytes)
}

/// A clock that all processes of this host share.
pub fn shared_clock() -> Duration {
    time_of(ClockId::Monotonic)
}

/// Processor time of the calling thread.
pub(crate) fn thread_time() -> Duration {
    time_of(ClockId::ThreadCPUTime)
}

/// Processor time of all threads of the process.
pub(crate) fn process_time() -> Duration {
    time_of(ClockId::ProcessCPUTime)
}

fn time_of(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
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
    fn only_threads_with_the_prefix_count() {
        let work = || {
            let used = || time_of_threads("counted-").expect("this process has tasks");
            let before = used();
            let until = shared_clock() + Duration::from_millis(20);
            let mut state = 1u64;
            while shared_clock() < until {
                state = std::hint::black_box(state.wrapping_mul(3));
            }
            used() - before
        };
        // First: a thread that is joined may still be listed for a moment, and then no longer.
        assert_eq!(std::thread::spawn(work).join().expect("no panic"), Duration::ZERO);
        let named = std::thread::Builder::new().name("counted-1".into()).spawn(work);
        assert!(named.expect("a thread").join().expect("no panic") > Duration::ZERO);
    }
}
