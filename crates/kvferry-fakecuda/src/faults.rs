//! Faults that a test switches on by name.

/// A fault. [`Fault::name`] is what `fakecuda_fault` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// `cuInit` finds no device (100).
    NoDevice,
    /// `cuInit` finds a kernel driver of another version (803).
    DriverMismatch,
    /// `cuGetProcAddress` denies the symbol.
    MissingSymbol,
    /// A device allocation fails (2).
    AllocOom,
    /// A host registration or pinned allocation fails (2).
    PinOom,
    /// A host registration fails as if the range were registered (712).
    PinTwice,
    /// A host registration fails as one of 512 GiB does (1).
    PinTooLong,
    /// A primary context cannot be created (2).
    ContextOom,
    /// A stream cannot be created (2).
    StreamOom,
    /// An event cannot be created (2).
    EventOom,
    /// The call destroys the current primary context and fails (709).
    ContextDestroyed,
    /// A copy, an entry of a batch, or a kernel ends with 700, which sticks.
    IllegalAddress,
    /// A copy, an entry of a batch, or a kernel ends with 719, which sticks.
    LaunchFailed,
    /// The device goes: a copy, an entry of a batch, or a kernel ends with `removed_code`, 46 if it is not set. The error
    /// sticks, and the device gets no new context.
    DeviceRemoved,
    /// A recorded event never completes, though its stream goes on.
    EventNeverSignals,
    /// A stream stops before an operation and never goes on.
    StreamStalls,
    /// The operations of a stream take `slow_times` their time, 100 if it is not set.
    StreamSlow,
    /// A batch copy fails at one entry, after some of those before it were submitted.
    BatchEntry,
    /// A call on a context fails once with an error that it did not cause.
    ForeignError,
    /// Memory handles between processes are refused (801), as in separate PID namespaces.
    IpcRefused,
    /// Memory handles find their exporter dead (400).
    IpcExporterDead,
    /// Memory handles name memory that is free (205).
    IpcFreed,
    /// The table of IPC mappings is full (2).
    IpcFull,
    /// An allocation cannot become a memory handle (1).
    IpcNotCapable,
    /// A VMM allocation cannot become a file descriptor (801).
    VmmNotExportable,
    /// Peer access is denied (217).
    PeerRefused,
    /// The device exports no dma-buf (801).
    DmabufUnsupported,
    /// The device refuses the dma-buf flag for PCIe (801).
    DmabufFlagRefused,
    /// The kernel refuses the dma-buf with ENOTSUPP (304).
    DmabufNotSupp,
    /// The JIT compiler refuses PTX (222).
    JitRefused,
    /// A kernel launch is refused (701).
    LaunchRefused,
}

/// What becomes of copies between a device's memory and the host's that a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// They succeed, in a slower way.
    Succeed,
    /// They fail at most, and later ones of the device succeed.
    Fail,
    /// They fail, and so does each later one of the device.
    Lose,
    /// They do not end until the fault is cleared.
    Hang,
    /// It strikes none, for this reason.
    Miss(&'static str),
}

impl Fault {
    /// All faults.
    pub const ALL: [Self; 31] = [
        Self::NoDevice,
        Self::DriverMismatch,
        Self::MissingSymbol,
        Self::AllocOom,
        Self::PinOom,
        Self::PinTwice,
        Self::PinTooLong,
        Self::ContextOom,
        Self::StreamOom,
        Self::EventOom,
        Self::ContextDestroyed,
        Self::IllegalAddress,
        Self::LaunchFailed,
        Self::DeviceRemoved,
        Self::EventNeverSignals,
        Self::StreamStalls,
        Self::StreamSlow,
        Self::BatchEntry,
        Self::ForeignError,
        Self::IpcRefused,
        Self::IpcExporterDead,
        Self::IpcFreed,
        Self::IpcFull,
        Self::IpcNotCapable,
        Self::VmmNotExportable,
        Self::PeerRefused,
        Self::DmabufUnsupported,
        Self::DmabufFlagRefused,
        Self::DmabufNotSupp,
        Self::JitRefused,
        Self::LaunchRefused,
    ];

    /// The name in `FAKECUDA` and for `fakecuda_fault`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoDevice => "no_device",
            Self::DriverMismatch => "driver_mismatch",
            Self::MissingSymbol => "missing_symbol",
            Self::AllocOom => "alloc_oom",
            Self::PinOom => "pin_oom",
            Self::PinTwice => "pin_twice",
            Self::PinTooLong => "pin_too_long",
            Self::ContextOom => "context_oom",
            Self::StreamOom => "stream_oom",
            Self::EventOom => "event_oom",
            Self::ContextDestroyed => "context_destroyed",
            Self::IllegalAddress => "illegal_address",
            Self::LaunchFailed => "launch_failed",
            Self::DeviceRemoved => "device_removed",
            Self::EventNeverSignals => "event_never_signals",
            Self::StreamStalls => "stream_stalls",
            Self::StreamSlow => "stream_slow",
            Self::BatchEntry => "batch_entry",
            Self::ForeignError => "foreign_error",
            Self::IpcRefused => "ipc_refused",
            Self::IpcExporterDead => "ipc_exporter_dead",
            Self::IpcFreed => "ipc_freed",
            Self::IpcFull => "ipc_full",
            Self::IpcNotCapable => "ipc_not_capable",
            Self::VmmNotExportable => "vmm_not_exportable",
            Self::PeerRefused => "peer_refused",
            Self::DmabufUnsupported => "dmabuf_unsupported",
            Self::DmabufFlagRefused => "dmabuf_flag_refused",
            Self::DmabufNotSupp => "dmabuf_notsupp",
            Self::JitRefused => "jit_refused",
            Self::LaunchRefused => "launch_refused",
        }
    }

    /// The effect on copies of memory that was allocated before, by a program that maps it in no other process, device or
    /// network device.
    #[must_use]
    pub const fn on_copies(self) -> Effect {
        match self {
            Self::AllocOom
            | Self::PinOom
            | Self::PinTwice
            | Self::PinTooLong
            | Self::StreamSlow
            | Self::JitRefused
            | Self::LaunchRefused => Effect::Succeed,
            Self::StreamOom | Self::EventOom | Self::BatchEntry | Self::ForeignError => {
                Effect::Fail
            }
            Self::ContextDestroyed
            | Self::IllegalAddress
            | Self::LaunchFailed
            | Self::DeviceRemoved => Effect::Lose,
            // The event of an edge. In the place of a copy's, its stream tells.
            Self::EventNeverSignals | Self::StreamStalls => Effect::Hang,
            Self::NoDevice | Self::DriverMismatch | Self::MissingSymbol => {
                Effect::Miss("the driver is loaded before a device's memory is allocated")
            }
            Self::ContextOom => Effect::Miss("the memory's context exists as long as the memory"),
            Self::IpcRefused
            | Self::IpcExporterDead
            | Self::IpcFreed
            | Self::IpcFull
            | Self::IpcNotCapable
            | Self::VmmNotExportable => Effect::Miss("no other process maps the memory"),
            Self::PeerRefused => Effect::Miss("no other device maps the memory"),
            Self::DmabufUnsupported | Self::DmabufFlagRefused | Self::DmabufNotSupp => {
                Effect::Miss("no network device or disk reads or writes the memory")
            }
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

/// One fault that waits for its occasions.
#[derive(Debug, Clone, Copy)]
struct Armed {
    fault: Fault,
    /// Occasions that pass unharmed before the first that fails.
    skip: u64,
    /// Occasions that fail then; `u64::MAX` is for ever.
    left: u64,
}

/// The faults that are switched on.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    armed: Vec<Armed>,
    hits: [u64; Fault::ALL.len()],
}

impl Faults {
    /// Lets the `at`-th occasion from now, 1 being the next, and `count` - 1 more fail.
    pub(crate) fn arm(&mut self, fault: Fault, at: u64, count: u64) {
        self.armed.push(Armed { fault, skip: at.saturating_sub(1), left: count });
    }

    pub(crate) fn clear(&mut self) {
        self.armed.clear();
    }

    /// Counts an occasion; true when it must fail.
    pub(crate) fn hit(&mut self, fault: Fault) -> bool {
        let mut fails = false;
        for armed in self.armed.iter_mut().filter(|armed| armed.fault == fault) {
            if armed.skip > 0 {
                armed.skip -= 1;
            } else if armed.left > 0 {
                armed.left -= u64::from(armed.left != u64::MAX);
                fails = true;
            }
        }
        if fails {
            self.hits[fault as usize] += 1;
        }
        fails
    }

    /// Number of times that the fault has struck.
    pub(crate) fn hits(&self, fault: Fault) -> u64 {
        self.hits[fault as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_at_the_stated_occasion_and_as_often_as_stated() {
        let mut faults = Faults::default();
        faults.arm(Fault::AllocOom, 3, 2);
        let struck: Vec<bool> = (0..6).map(|_| faults.hit(Fault::AllocOom)).collect();
        assert_eq!(struck, [false, false, true, true, false, false]);
        assert!(!faults.hit(Fault::PinOom));
        assert_eq!(faults.hits(Fault::AllocOom), 2);
    }

    #[test]
    fn every_fault_is_found_by_its_name_and_numbered_by_its_place() {
        for (place, fault) in Fault::ALL.into_iter().enumerate() {
            assert_eq!(Fault::named(fault.name()), Some(fault));
            assert_eq!(fault as usize, place);
        }
    }
}
