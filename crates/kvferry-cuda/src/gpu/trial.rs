//! Trial of a GPU and its driver, for the doctor.

#![allow(unsafe_code, reason = "the driver pins memory that the trial owns")]

use super::STAGE_BYTES;
use super::kernel::Kernels;
use super::settings::Settings;
use crate::calibration::Calibration;
use crate::pinned::Pinned;
use kvferry_sys::cuda::{self, Context, Device, DeviceAllocation, IpcHandle};
use kvferry_sys::map::Mapping;
use std::time::{Duration, Instant};

/// Stages that are pinned for the measurement: 64 MiB.
const PINS: usize = 16;

/// Bytes of the GPU's memory that is exported to another process.
const EXPORTED_BYTES: usize = 2 << 20;

/// Results of the trial of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trial {
    /// `Ok` if the driver compiles the kernel, else why not.
    pub kernel: Result<(), String>,
    /// Bytes of host memory that the driver pins in a second, or why it does not pin all that was tried.
    pub pinned_per_second: Result<u64, String>,
    /// Bytes of host memory that the driver has pinned.
    pub pinned_bytes: u64,
    /// `Ok` if an allocation has a handle for another process, else why not.
    pub ipc: Result<(), String>,
    /// The costs of copies.
    pub costs: CostSource,
    /// The costs are measured once enough batches of small pieces have come.
    pub is_measured: bool,
}

/// Where the costs of copies come from, as long as they are not measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CostSource {
    /// `KVFERRY_GPU_METHOD` names the only method.
    Setting,
    /// Figures of the GPU's model are known.
    Model,
    /// Nothing is known of the model: the kernel is not used before it is measured.
    Unknown,
}

impl Trial {
    /// Tries a GPU. Until the call returns, it takes the GPU's primary context, which is some hundred MB of the GPU's
    /// memory if no library of the process has made it.
    ///
    /// # Errors
    /// If the driver refuses the context, or in a forked child.
    pub fn of(device: Device) -> Result<Self, cuda::Error> {
        let context = Context::primary(device)?;
        let settings = Settings::get();
        let kernel = Kernels::new(&context, settings).prepare(true, None);
        let (pinned_bytes, pinned_per_second) = pin(&context);
        let name = device.name()?;
        let costs = match settings.method {
            Some(_) => CostSource::Setting,
            None if Calibration::of_model(&name).out.kernel.is_some() => CostSource::Model,
            None => CostSource::Unknown,
        };
        Ok(Self {
            kernel: kernel.map(|_| ()).map_err(|refusal| refusal.to_string()),
            pinned_per_second,
            pinned_bytes,
            ipc: export(&context),
            costs,
            is_measured: settings.method.is_none() && !settings.is_uncalibrated,
        })
    }
}

/// Exports an allocation.
fn export(context: &Context) -> Result<(), String> {
    let memory = DeviceAllocation::new(context, EXPORTED_BYTES).map_err(|error| {
        format!("{} MiB of the GPU's memory can't be allocated: {error}", EXPORTED_BYTES >> 20)
    })?;
    let handle = IpcHandle::of_allocation(context, memory.address());
    handle.map(|_| ()).map_err(|error| error.to_string())
}

/// Pins stages whose pages the system has given already, as many as a short measurement takes. Returns how many bytes were
/// pinned, and the rate.
fn pin(context: &Context) -> (u64, Result<u64, String>) {
    let mut stages = Vec::with_capacity(PINS);
    let mut spent = Duration::ZERO;
    let refused = (0..PINS).find_map(|_| {
        let memory = match Mapping::populated(STAGE_BYTES) {
            Ok(memory) => memory,
            Err(error) => return Some(format!("the system has no memory for it: {error}")),
        };
        let began = Instant::now();
        // SAFETY: nothing copies from or to the memory.
        let pinned = unsafe { Pinned::new(context, memory) };
        spent += began.elapsed();
        pinned.map(|stage| stages.push(stage)).err().map(|error| error.to_string())
    });
    let bytes = (stages.len() * STAGE_BYTES) as u64;
    let per_second = || {
        let rate = u128::from(bytes) * 1_000_000_000 / spent.as_nanos().max(1);
        u64::try_from(rate).unwrap_or(u64::MAX)
    };
    (bytes, refused.map_or_else(|| Ok(per_second()), Err))
}
