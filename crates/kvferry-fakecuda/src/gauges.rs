//! Counters by their names.

use crate::counters::fork_violations;
use crate::faults::Fault;
use crate::memory::Kind;
use crate::state::State;
use crate::thread;

/// Names of [`State::counter`], fault hits and calls by symbol excepted.
pub(crate) const NAMES: [&str; 29] = [
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
    "early_reads",
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
    /// A number by its name: one of [`NAMES`], `call:SYMBOL`, `own_call:SYMBOL` for those of
    /// the calling thread, `hit:FAULT`, or `device_used:N`.
    pub(crate) fn counter(&self, name: &str) -> Option<u64> {
        if let Some(symbol) = name.strip_prefix("call:") {
            return Some(self.counters.calls.get(symbol).copied().unwrap_or(0));
        }
        if let Some(symbol) = name.strip_prefix("own_call:") {
            return Some(thread::with(|local| local.calls.get(symbol).copied().unwrap_or(0)));
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
            "early_reads" => counters.early_reads,
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
