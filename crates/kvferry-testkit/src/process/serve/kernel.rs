//! A child's requests to its kernel about itself: signals, limits, refused system calls, another
//! user.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Has the kernel kill this process, even while it is stopped, when its parent ends.
pub(super) fn die_with_the_parent() {
    // SAFETY: `prctl` with these arguments touches no memory.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
}

extern "C" fn ignore(_: libc::c_int) {}

/// Has `SIGUSR1` interrupt the system call of the thread that receives it.
pub(super) fn catch_signals() {
    // SAFETY: a zeroed action is a valid one; the handler does nothing, so it is safe at any
    // point of any thread. Without `SA_RESTART`, system calls are interrupted.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as libc::sighandler_t;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
    }
}

/// Has the kernel refuse `process_vm_readv` and `process_vm_writev` to every thread of this process.
pub(super) fn deny_process_vm() {
    // A classic filter: load the number of the call, then two comparisons.
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let (equal, end) = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::BPF_RET | libc::BPF_K);
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut steps = [
        step(load, 0, 0, 0),
        step(equal, 2, 0, libc::SYS_process_vm_readv as u32),
        step(equal, 1, 0, libc::SYS_process_vm_writev as u32),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
        step(end, 0, 0, refuse),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program and its steps live until the calls return; the kernel copies them.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    assert_eq!(installed, 0, "{}", std::io::Error::last_os_error());
}

/// Changes from root to the user `uid`. False if the process is not root.
pub(super) fn become_user(uid: u32) -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::setuid(uid) == 0 }
}

/// Limits the number of descriptors that this process may have open.
pub(super) fn limit_descriptors(limit: u64) {
    let limit = Rlimit { current: Some(limit), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("not above the hard limit");
}
