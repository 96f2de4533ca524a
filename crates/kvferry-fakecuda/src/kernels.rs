//! How kernels run on the driver's memory.

use std::sync::Arc;

use crate::abi::Result;
use crate::host;
use crate::memory::{Kind, Memory};
use crate::ops::Kernel;
use crate::ptx::{Bus, Launch, Trap, run_thread};
use crate::races::Touch;
use crate::segments::Segment;
use crate::state::State;

/// Instructions that one thread may take, and that a dry run may take altogether.
const THREAD_BUDGET: u64 = 20_000_000;
const DRY_BUDGET: u64 = 100_000_000;
/// Ranges that are kept before they are merged.
const MERGE_AT: usize = 1 << 16;

/// Findings of a kernel's dry run.
#[derive(Debug, Default)]
pub(crate) struct Forecast {
    pub(crate) touches: Vec<Touch>,
    pub(crate) bytes: u64,
    /// The kernel touches host memory.
    pub(crate) host: bool,
}

impl State {
    /// Runs a kernel without its writes. `None`: it fails, or takes too long, and what it will
    /// touch is not known.
    pub(crate) fn forecast(&self, device: usize, launch: &Launch) -> Option<Forecast> {
        let mut bus = DeviceBus::new(self, device, true);
        let mut budget = DRY_BUDGET;
        for thread in 0..launch.threads() {
            run_thread(launch, thread, &mut bus, &mut budget).ok()?;
        }
        let (bytes, host) = (bus.bytes, bus.host);
        Some(Forecast { touches: bus.into_touches(), bytes, host })
    }

    /// Runs threads of a kernel. A trap is a finding, and the error that sticks.
    pub(crate) fn run_threads(
        &mut self,
        device: usize,
        kernel: &mut Kernel,
        threads: &[u64],
    ) -> Result {
        let mut bus = DeviceBus::new(self, device, false);
        let mut trapped = None;
        for &thread in threads {
            let mut budget = THREAD_BUDGET;
            if let Err(trap) = run_thread(&kernel.launch, thread, &mut bus, &mut budget) {
                trapped = Some((thread, trap));
                break;
            }
        }
        let read_only = bus.read_only.clone();
        let touches = bus.into_touches();
        kernel.read_only.extend(read_only);
        kernel.touches.extend(touches);
        merge(&mut kernel.touches);
        merge(&mut kernel.read_only);
        let Some((thread, Trap { error, line, address })) = trapped else { return Ok(()) };
        let name = &kernel.launch.function.name;
        self.checker.find(format!(
            "kernel `{name}`, line {line}, thread {thread}: error {} at address {address:#x}",
            error.0
        ));
        Err(error)
    }

    /// Whether a kernel wrote what it read as read-only.
    pub(crate) fn check_read_only(&mut self, kernel: &Kernel) {
        let written = kernel.touches.iter().filter(|touch| touch.write);
        let mut both = kernel.read_only.clone();
        both.extend(written);
        let name = &kernel.launch.function.name;
        self.checker.check_within(&only_mixed(both), &format!("kernel `{name}` (ld.global.nc)"));
    }
}

/// The ranges, unless no range reads.
fn only_mixed(touches: Vec<Touch>) -> Vec<Touch> {
    if touches.iter().all(|touch| touch.write) { Vec::new() } else { touches }
}

/// Sorts the ranges and joins those that meet.
fn merge(touches: &mut Vec<Touch>) {
    touches.sort_by_key(|touch| (touch.write, touch.start));
    touches.dedup_by(|next, kept| {
        let joins = next.write == kept.write && next.start <= kept.end;
        if joins {
            kept.end = kept.end.max(next.end);
        }
        joins
    });
}

/// A mapping or pinned range that the kernel used last.
#[derive(Debug, Clone)]
struct Window {
    start: u64,
    end: u64,
    bytes: Backing,
}

#[derive(Debug, Clone)]
enum Backing {
    /// The segment's offset of the window's first byte.
    Device(Arc<Segment>, u64),
    Host,
}

/// The memory as a kernel of one device sees it.
struct DeviceBus<'a> {
    memory: &'a Memory,
    device: usize,
    /// Devices whose memory the kernel reaches, its own included.
    reach: u8,
    dry: bool,
    reading: Option<Window>,
    writing: Option<Window>,
    touches: Vec<Touch>,
    read_only: Vec<Touch>,
    bytes: u64,
    host: bool,
}

impl<'a> DeviceBus<'a> {
    fn new(state: &'a State, device: usize, dry: bool) -> Self {
        Self {
            memory: &state.memory,
            device,
            reach: state.devices[device].enabled | 1 << device,
            dry,
            reading: None,
            writing: None,
            touches: Vec::new(),
            read_only: Vec::new(),
            bytes: 0,
            host: false,
        }
    }

    fn into_touches(mut self) -> Vec<Touch> {
        merge(&mut self.touches);
        self.touches
    }

    /// The window that holds the whole access.
    fn window(&self, address: u64, len: u64, write: bool) -> std::result::Result<Window, ()> {
        let end = address.checked_add(len).ok_or(())?;
        if let Some(mapping) = self.memory.mapping(address) {
            let allowed = match mapping.kind {
                Kind::Vmm(_) if write => mapping.writable >> self.device & 1 == 1,
                Kind::Vmm(_) => mapping.readable >> self.device & 1 == 1,
                Kind::Managed | Kind::Ipc => true,
                Kind::Allocation => self.reach >> mapping.device & 1 == 1,
            };
            if !allowed || end > mapping.base + mapping.len {
                return Err(());
            }
            let bytes = Backing::Device(mapping.segment.clone(), mapping.offset);
            return Ok(Window { start: mapping.base, end: mapping.base + mapping.len, bytes });
        }
        let range = self.memory.host(address).ok_or(())?;
        if end > range.base + range.len {
            return Err(());
        }
        Ok(Window { start: range.base, end: range.base + range.len, bytes: Backing::Host })
    }

    fn note(&mut self, address: u64, len: u64, write: bool, read_only: bool, host: bool) {
        self.bytes += len;
        self.host |= host;
        let touch = Touch::new(address, len, write);
        note_in(&mut self.touches, touch);
        if read_only {
            note_in(&mut self.read_only, touch);
        }
    }
}

/// Adds a range to the last one where it goes on from it.
fn note_in(touches: &mut Vec<Touch>, touch: Touch) {
    match touches.last_mut() {
        Some(last) if last.end == touch.start && last.write == touch.write => last.end = touch.end,
        _ => touches.push(touch),
    }
    if touches.len() >= MERGE_AT && touches.len().is_multiple_of(MERGE_AT) {
        merge(touches);
    }
}

impl Bus for DeviceBus<'_> {
    fn read(
        &mut self,
        address: u64,
        into: &mut [u8],
        read_only: bool,
    ) -> std::result::Result<(), ()> {
        let len = into.len() as u64;
        let fits = |w: &Window| w.start <= address && address + len <= w.end;
        if !self.reading.as_ref().is_some_and(fits) {
            self.reading = Some(self.window(address, len, false)?);
        }
        let window = self.reading.as_ref().ok_or(())?;
        let host = match &window.bytes {
            Backing::Device(segment, offset) => {
                segment.read(offset + (address - window.start), into);
                false
            }
            Backing::Host => {
                host::read(address, into).map_err(|_| ())?;
                true
            }
        };
        self.note(address, len, false, read_only, host);
        Ok(())
    }

    fn write(&mut self, address: u64, from: &[u8]) -> std::result::Result<(), ()> {
        let len = from.len() as u64;
        let fits = |w: &Window| w.start <= address && address + len <= w.end;
        if !self.writing.as_ref().is_some_and(fits) {
            self.writing = Some(self.window(address, len, true)?);
        }
        let window = self.writing.as_ref().ok_or(())?;
        let host = matches!(window.bytes, Backing::Host);
        match &window.bytes {
            _ if self.dry => {}
            Backing::Device(segment, offset) => {
                segment.write(offset + (address - window.start), from);
            }
            Backing::Host => host::write(address, from).map_err(|_| ())?,
        }
        self.note(address, len, true, false, host);
        Ok(())
    }
}
