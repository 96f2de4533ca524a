//! Memory on both sides, and streams.

use crate::error::Error;
use crate::pinned::Pinned;
use kvferry_sys::cuda::{
    Context, DeviceAllocation, DeviceInfo, Driver, Event, Function, HostRegistration, Module,
    Stream, fill_async,
};
use kvferry_sys::map::Mapping;
use std::time::{Duration, Instant};

/// The driver's context of a device, by its number in this process.
///
/// # Errors
/// If the driver can't be used, or there is no such device.
pub fn context(device: i32) -> Result<Context, Error> {
    Ok(Context::primary(Driver::get()?.device(device)?)?)
}

/// What the driver reports of a device, and the driver's version.
///
/// # Errors
/// If the driver can't be used, or there is no such device.
pub fn device(device: i32) -> Result<(DeviceInfo, i32), Error> {
    let driver = Driver::get()?;
    Ok((driver.device(device)?.info()?, driver.version()))
}

/// Pinned host memory of at least `bytes`, whose pages are populated.
pub(super) fn pinned(context: &Context, bytes: usize) -> Result<Pinned, Error> {
    let memory = Mapping::populated(bytes.next_multiple_of(PAGE));
    let memory = memory.map_err(|error| no_memory(context, &error))?;
    // SAFETY: each method of this module waits for its copies, so that none runs when the memory is dropped.
    Ok(unsafe { Pinned::new(context, memory) }?)
}

const PAGE: usize = 4096;

fn no_memory(context: &Context, error: &std::io::Error) -> Error {
    Error::Host { device: context.device().ordinal(), why: error.to_string() }
}

/// Memory of a device and pinned host memory, with streams for each direction and for kernels.
#[derive(Debug)]
pub struct Buffers {
    pub(super) context: Context,
    pub(super) out: Stream,
    pub(super) into: Stream,
    pub(super) kernels: Stream,
    /// Recorded behind one stream's work, for another to wait for.
    pub(super) passed: Event,
    pub(super) device: DeviceAllocation,
    /// Memory for gathered bytes, as long as the host memory.
    pub(super) staging: DeviceAllocation,
    pub(super) host: Pinned,
    pub(super) loaded: Vec<Kernel>,
}

/// A kernel that copies jobs.
#[derive(Debug)]
pub(super) struct Kernel {
    name: String,
    pub(super) function: Function,
    pub(super) threads: u32,
    /// Threads that share a job.
    pub(super) threads_of_job: u32,
}

impl Buffers {
    /// Allocates buffers of this many bytes on each side.
    ///
    /// # Errors
    /// If the driver refuses, or the system has less memory.
    pub fn new(context: &Context, device_bytes: usize, host_bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            out: Stream::new(context)?,
            into: Stream::new(context)?,
            kernels: Stream::new(context)?,
            passed: Event::new(context)?,
            device: DeviceAllocation::new(context, device_bytes)?,
            staging: DeviceAllocation::new(context, host_bytes)?,
            host: pinned(context, host_bytes)?,
            loaded: Vec::new(),
            context: context.clone(),
        })
    }

    /// Compiles a kernel that copies jobs: its parameters are the address of an array of [`Job`](crate::Job)s and their
    /// number, a `u32`. A block has `threads`, of which `threads_of_job` share a job. Returns the kernel's number.
    /// The kernel is trusted, as this program's own code is, to touch nothing but the jobs and the memory that they name.
    ///
    /// # Errors
    /// The compiler's messages, or the driver's error if the text has no such entry.
    pub fn load_kernel(
        &mut self,
        text: &str,
        entry: &str,
        threads: u32,
        threads_of_job: u32,
    ) -> Result<usize, String> {
        let module = Module::load_ptx(&self.context, text).map_err(|error| error.to_string())?;
        let function = module.function(entry).map_err(|error| format!("{entry}: {error}"))?;
        let name = entry.to_owned();
        self.loaded.push(Kernel { name, function, threads, threads_of_job });
        Ok(self.loaded.len() - 1)
    }

    /// The entry of a kernel.
    pub fn kernel_name(&self, kernel: usize) -> &str {
        &self.loaded[kernel].name
    }

    /// The device memory's address, to register it.
    pub fn device_address(&self) -> u64 {
        self.device.address()
    }

    /// Bytes of the device memory.
    pub fn device_len(&self) -> usize {
        self.device.len()
    }

    /// Bytes of the host memory.
    pub fn host_len(&self) -> usize {
        self.host.memory().len()
    }

    /// Copies `bytes` to the host memory.
    ///
    /// # Panics
    /// If the bytes do not fit.
    pub fn write_host(&self, at: usize, bytes: &[u8]) {
        self.host.memory().span(at, bytes.len()).copy_from(bytes);
    }

    /// Copies bytes of the host memory to all of `bytes`.
    ///
    /// # Panics
    /// If the host memory has fewer bytes from `at` on.
    pub fn read_host(&self, at: usize, bytes: &mut [u8]) {
        self.host.memory().span(at, bytes.len()).copy_to(bytes);
    }

    /// Sets every byte of the device memory.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn fill_device(&self, byte: u8) -> Result<(), Error> {
        // SAFETY: the allocation is ours, no other work runs, and the stream is waited for.
        let filled =
            unsafe { fill_async(&self.into, self.device.address(), byte, self.device.len()) };
        self.into.synchronize()?;
        Ok(filled?)
    }
}

/// Measures the time to pin `bytes` of host memory, whose pages are populated, in registrations of `part` bytes.
///
/// # Errors
/// If the driver refuses, or the system has less memory.
pub fn pin_time(context: &Context, bytes: usize, part: usize) -> Result<Duration, Error> {
    let (part, memory) = (part.next_multiple_of(PAGE), Mapping::populated(bytes));
    let memory = memory.map_err(|error| no_memory(context, &error))?;
    let mut registrations = Vec::with_capacity(bytes.div_ceil(part));
    let began = Instant::now();
    for at in (0..bytes).step_by(part) {
        let span = memory.span(at, part.min(bytes - at));
        // SAFETY: the registrations are dropped before the mapping, and no copy uses them.
        registrations.push(unsafe { HostRegistration::new(context, span) }?);
    }
    let took = began.elapsed();
    drop(registrations);
    Ok(took)
}
