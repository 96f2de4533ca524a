//! Native threads with signals blocked, on the processors that the process was started with.
//!
//! A thread inherits its creator's affinity. Engines pin the threads that compute, and call kvferry on
//! them; kvferry's threads would then share one processor with a thread that never sleeps.
//! [`choose_cpus`] is called once, when kvferry is loaded; where it is not called, threads inherit.
//!
//! Engines also have threads that poll and never sleep. Beside such a thread, a thread with the usual time
//! slice of milliseconds waits for up to that long each time that it wakes up: kvferry's have a shorter one.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

/// The processors of [`spawn`]'s threads.
static CPUS: OnceLock<CpuSet> = OnceLock::new();

/// The time slice of [`spawn`]'s threads: the shortest that Linux accepts. They get no larger share of
/// a processor by it. Linux before 6.12 has one slice for all threads.
const SLICE: Duration = Duration::from_micros(100);

/// Has the threads of [`spawn`] run on these processors, independent of the affinity of their creators:
///
/// 1. those of the environment variable `KVFERRY_CPUS`, such as `0-3,8`;
/// 2. if the environment has OpenMP bind threads, which it did to this one when its library was
///    loaded: those of the parent process;
/// 3. those of this thread.
///
/// Only the first call has an effect.
///
/// # Errors
/// `InvalidInput` if `KVFERRY_CPUS` is malformed.
pub fn choose_cpus() -> io::Result<()> {
    let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let parent = || sched_getaffinity(rustix::process::getppid()).ok();
    let cpus = match var("KVFERRY_CPUS") {
        Some(list) => parse(&list).ok_or_else(|| {
            let why = format!("KVFERRY_CPUS is a list of processors such as 0-3,8, not {list:?}");
            io::Error::new(io::ErrorKind::InvalidInput, why)
        })?,
        None => match parent().filter(|_| openmp_binds(var)) {
            Some(parent) => parent,
            None => sched_getaffinity(None)?,
        },
    };
    let _ = CPUS.set(cpus);
    Ok(())
}

/// Signals that stay open: the kernel raises them for what a thread itself does, a crash handler wants
/// its stack, and a profiler its samples. The handlers of all others never run on the thread.
const OPEN: [libc::c_int; 8] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGABRT,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGPROF,
];

/// Starts a thread with every signal blocked but those of faults and profilers, so that the host process's signal
/// handlers do not run on it.
///
/// # Errors
/// If the thread can't be started.
pub fn spawn<T: Send + 'static>(
    name: String,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let body = move || {
        leave_creators_cpus();
        shorten_slice();
        body()
    };
    // A new thread inherits its creator's signal mask: block, start, restore.
    // SAFETY: the sets are initialised by the calls before they are read.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        for signal in OPEN {
            libc::sigdelset(&raw mut all, signal);
        }
        let rc = libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        if rc != 0 {
            return Err(io::Error::from_raw_os_error(rc));
        }
        let handle = std::thread::Builder::new().name(name).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        handle
    }
}

/// Processors that the threads of [`spawn`] may run on, at least one.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    let count = || std::thread::available_parallelism().map_or(1, usize::from);
    if CPUS.get().is_none() {
        return count();
    }
    *CORES.get_or_init(|| {
        // This counts what the calling thread may use.
        let counted = spawn("kvferry-cores".into(), count).map(JoinHandle::join);
        counted.map_or(1, |counted| counted.unwrap_or(1))
    })
}

fn leave_creators_cpus() {
    if let Some(cpus) = CPUS.get() {
        // If none of them is available any more, the thread stays where its creator is.
        let _ = sched_setaffinity(None, cpus);
    }
}

/// Gives this thread [`SLICE`], unless it has a real-time or idle policy.
fn shorten_slice() {
    if let Some(before) = scheduling()
        && before.sched_policy == libc::SCHED_OTHER as u32
    {
        let attributes = libc::sched_attr { sched_runtime: SLICE.as_nanos() as u64, ..before };
        // SAFETY: the kernel reads `attributes`, whose size it has.
        // Where it is refused, the thread has the usual slice.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

/// Returns the scheduling attributes of this thread.
fn scheduling() -> Option<libc::sched_attr> {
    let len = size_of::<libc::sched_attr>();
    // SAFETY: all fields are integers, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `len` bytes.
    let rc = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, len, 0) };
    (rc == 0).then_some(attributes)
}

/// Whether OpenMP's libraries pin the thread that loads them.
fn openmp_binds(var: impl Fn(&str) -> Option<String>) -> bool {
    let bind = var("OMP_PROC_BIND").is_some_and(|how| !how.eq_ignore_ascii_case("false"));
    let binds = |name: &str| var(name).is_some();
    bind || binds("GOMP_CPU_AFFINITY") || binds("KMP_AFFINITY") || binds("OMP_PLACES")
}

fn parse(list: &str) -> Option<CpuSet> {
    let mut cpus = CpuSet::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= CpuSet::MAX_CPU {
            return None;
        }
        (first..=last).for_each(|cpu| cpus.set(cpu));
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_listed_one_by_one_or_in_ranges() {
        let cpus = parse("0-2, 8").expect("valid");
        assert_eq!((0..20).filter(|cpu| cpus.is_set(*cpu)).collect::<Vec<_>>(), [0, 1, 2, 8]);
        for malformed in ["", "a", "3-1", "1-", "99999", "0,,1"] {
            assert!(parse(malformed).is_none(), "{malformed:?}");
        }
    }

    #[test]
    fn i9_threads_block_signals_but_those_of_crash_handlers_and_profilers() {
        let is_blocked = |signal| {
            // SAFETY: the set is initialised by the call before it is read.
            unsafe {
                let mut now = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut now);
                libc::sigismember(&raw const now, signal) == 1
            }
        };
        let here = is_blocked(libc::SIGTERM);
        let there = spawn("signals".into(), move || {
            let closed = [libc::SIGINT, libc::SIGTERM, libc::SIGCHLD, libc::SIGUSR1, libc::SIGALRM];
            (closed.map(is_blocked), OPEN.map(is_blocked))
        });
        let there = there.expect("it starts").join().expect("no panic");
        assert_eq!(there, ([true; 5], [false; 8]));
        assert_eq!(is_blocked(libc::SIGTERM), here, "the creator's are as before");
    }

    #[test]
    fn threads_have_a_short_time_slice_and_their_creator_keeps_its_own() {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("Linux");
        let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        let mut next = || parts.next().and_then(Result::ok).unwrap_or(0_u32);
        if (next(), next()) < (6, 12) {
            return eprintln!("SKIPPED: Linux {release} has one time slice for all threads");
        }
        let slice = || scheduling().expect("this thread").sched_runtime;
        let before = slice();
        let there = spawn("short".into(), slice).expect("it starts").join().expect("no panic");
        assert_eq!((there, slice()), (100_000, before));
        assert!(before > there);
    }

    #[test]
    fn openmp_binds_threads_if_the_environment_says_where_and_not_that_it_must_not() {
        let binds = |set: &'static [(&str, &str)]| {
            openmp_binds(|name| Some(set.iter().find(|(key, _)| *key == name)?.1.to_owned()))
        };
        assert!(!binds(&[]) && !binds(&[("OMP_PROC_BIND", "false")]));
        assert!(binds(&[("OMP_PROC_BIND", "true")]) && binds(&[("GOMP_CPU_AFFINITY", "0")]));
    }

    #[test]
    fn threads_run_on_all_processors_of_the_process_although_their_creator_is_pinned_to_one() {
        let (all, before) = (sched_getaffinity(None).expect("this thread"), cores());
        choose_cpus().expect("no list in the environment");
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).expect("one at least");
        let mut one = CpuSet::new();
        one.set(first);
        sched_setaffinity(None, &one).expect("it runs there");
        let there = spawn("free".into(), || sched_getaffinity(None).expect("this thread"));
        assert!(there.expect("it starts").join().expect("no panic") == all);
        assert_eq!(cores(), before);
        assert!(sched_getaffinity(None).expect("this thread") == one, "the creator stays");
    }
}
