//! What tests count.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use crate::faults::Fault;
use crate::memory::Kind;
use crate::state::State;

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

/// Names of [`State::counter`], fault hits and calls by symbol excepted.
pub(crate) const NAMES: [&str; 28] = [
    "contexts",
    "contexts_created",
    "streams",
    "events",
    "modules",
    "allocations",
    "allocated_bytes",
    "host_registrations",
    "host_registered_bytes",
    "host_allocations",
    "ipc_mappings",
    "vmm_handles",
    "vmm_reservations",
    "vmm_mappings",
    "pending",
    "submitted",
    "completed",
    "captured",
    "captured_batches",
    "copied_bytes",
    "source_changed",
    "kernel_mismatches",
    "kernel_threads",
    "callback_calls",
    "unpinned_in_use",
    "fork_violations",
    "findings",
    "calls",
];

impl State {
    /// A number by its name: one of [`NAMES`], `call:SYMBOL`, `hit:FAULT`, or `device_used:N`.
    pub(crate) fn counter(&self, name: &str) -> Option<u64> {
        if let Some(symbol) = name.strip_prefix("call:") {
            return Some(self.counters.calls.get(symbol).copied().unwrap_or(0));
        }
        if let Some(fault) = name.strip_prefix("hit:") {
            return Fault::named(fault).map(|fault| self.faults.hits(fault));
        }
        if let Some(ordinal) = name.strip_prefix("device_used:") {
            return self.devices.get(ordinal.parse::<usize>().ok()?).map(|device| device.used);
        }
        let counters = &self.counters;
        let memory = &self.memory;
        let kinds = |wanted: fn(Kind) -> bool| {
            memory.mappings.values().filter(|m| wanted(m.kind)).count() as u64
        };
        Some(match name {
            "contexts" => self.devices.iter().filter(|d| d.primary.is_some()).count() as u64,
            "contexts_created" => counters.contexts_created,
            "streams" => self.streams.values().filter(|s| s.owned && !s.dying).count() as u64,
            "events" => self.events.len() as u64,
            "modules" => self.modules.len() as u64,
            "allocations" => kinds(|kind| matches!(kind, Kind::Allocation | Kind::Managed)),
            "allocated_bytes" => memory
                .mappings
                .values()
                .filter(|m| matches!(m.kind, Kind::Allocation | Kind::Managed))
                .map(|m| m.len)
                .sum(),
            "host_registrations" => memory.hosts.values().filter(|h| !h.allocated).count() as u64,
            "host_registered_bytes" => {
                memory.hosts.values().filter(|h| !h.allocated).map(|h| h.len).sum()
            }
            "host_allocations" => memory.hosts.values().filter(|h| h.allocated).count() as u64,
            "ipc_mappings" => kinds(|kind| kind == Kind::Ipc),
            "vmm_handles" => self.vmm.values().filter(|h| h.references > 0).count() as u64,
            "vmm_reservations" => memory.reservations.len() as u64,
            "vmm_mappings" => kinds(|kind| matches!(kind, Kind::Vmm(_))),
            "pending" => (self.pending.len() - self.stuck_events()) as u64,
            "submitted" => counters.submitted,
            "completed" => counters.completed,
            "captured" => counters.captured,
            "captured_batches" => counters.captured_batches,
            "copied_bytes" => counters.copied_bytes,
            "source_changed" => counters.source_changed,
            "kernel_mismatches" => counters.kernel_mismatches,
            "kernel_threads" => counters.kernel_threads,
            "callback_calls" => counters.callback_calls,
            "unpinned_in_use" => counters.unpinned_in_use,
            "fork_violations" => fork_violations(),
            "findings" => self.checker.found,
            "calls" => counters.calls.values().sum(),
            _ => return None,
        })
    }
}

/// The process that loaded the driver, and a number that its forked children share.
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

/// True in a child that was forked after the driver was loaded; the call is counted then.
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
fn fork_violations() -> u64 {
    violations().map_or(0, |violations| violations.load(Ordering::Relaxed))
}
