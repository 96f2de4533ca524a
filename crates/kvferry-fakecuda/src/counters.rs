//! Totals that tests read, and the mark of forked children.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustc_hash::FxHashMap;

/// Totals. Numbers of live objects are counted when they are asked for.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) calls: FxHashMap<&'static str, u64>,
    /// Operations that streams accepted, and those that completed.
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// Operations that captures took.
    pub(crate) captured: u64,
    /// Batch copies that a capture dropped with success.
    pub(crate) captured_batches: u64,
    pub(crate) copied_bytes: u64,
    /// Sources in any order that were read after the call and before their copy's turn.
    pub(crate) early_reads: u64,
    /// Host sources that changed before their copy completed.
    pub(crate) source_changed: u64,
    /// Bytes that a fake kernel expected and did not find.
    pub(crate) kernel_mismatches: u64,
    /// Driver calls from host functions.
    pub(crate) callback_calls: u64,
    /// Host ranges unregistered or freed under a copy.
    pub(crate) unpinned_in_use: u64,
    /// Contexts created since the process began.
    pub(crate) contexts_created: u64,
    pub(crate) kernel_threads: u64,
}

/// The process that initialised the driver, and a number that its forked children share.
static OWNER: AtomicU64 = AtomicU64::new(0);
static VIOLATIONS: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// Makes the calling process the driver's owner, unless one is. Runs under the driver's lock.
pub(crate) fn own_process() {
    if OWNER.load(Ordering::Acquire) != 0 {
        return;
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice, which replaces none.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    if page != libc::MAP_FAILED {
        VIOLATIONS.store(page.cast(), Ordering::Release);
    }
    OWNER.store(u64::from(std::process::id()), Ordering::Release);
}

/// True in a child that was forked after the driver was initialised; the call is counted then.
pub(crate) fn forked() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    if owner == 0 || owner == u64::from(std::process::id()) {
        return false;
    }
    if let Some(violations) = violations() {
        violations.fetch_add(1, Ordering::Relaxed);
    }
    true
}

fn violations() -> Option<&'static AtomicU64> {
    // SAFETY: null, or a zeroed shared page that is never unmapped.
    unsafe { VIOLATIONS.load(Ordering::Acquire).as_ref() }
}

/// Driver calls that forked children made.
pub(crate) fn fork_violations() -> u64 {
    violations().map_or(0, |violations| violations.load(Ordering::Relaxed))
}
