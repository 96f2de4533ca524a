//! What a GPU and its driver do when they are tried, for the doctor.

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

/// What works on a GPU, tried out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trial {
    /// Whether the driver compiles the kernel, or why not.
    pub kernel: Result<(), String>,
    /// Bytes of host memory that the driver pins in a second, or why it pins none.
    pub pinned_per_second: Result<u64, String>,
    /// Whether an allocation has a handle for another process, or why not.
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
        let exported = DeviceAllocation::new(&context, EXPORTED_BYTES)
            .and_then(|memory| IpcHandle::of_allocation(&context, memory.address()));
        let name = device.name()?;
        let costs = match settings.method {
            Some(_) => CostSource::Setting,
            None if Calibration::of_model(&name).out.kernel.is_some() => CostSource::Model,
            None => CostSource::Unknown,
        };
        Ok(Self {
            kernel: kernel.map(|_| ()).map_err(|refusal| refusal.to_string()),
            pinned_per_second: pinned_per_second(&context),
            ipc: exported.map(|_| ()).map_err(|error| error.to_string()),
            costs,
            is_measured: settings.method.is_none() && !settings.is_uncalibrated,
        })
    }
}

/// Pins stages whose pages the system has given already, as many as a short measurement takes.
fn pinned_per_second(context: &Context) -> Result<u64, String> {
    let mut stages = Vec::with_capacity(PINS);
    let mut spent = Duration::ZERO;
    for _ in 0..PINS {
        let memory = Mapping::populated(STAGE_BYTES).map_err(|error| error.to_string())?;
        let began = Instant::now();
        // SAFETY: nothing copies from or to the memory.
        let pinned = unsafe { Pinned::new(context, memory) };
        spent += began.elapsed();
        stages.push(pinned.map_err(|error| error.to_string())?);
    }
    let bytes = (PINS * STAGE_BYTES) as u128;
    let per_second = bytes * 1_000_000_000 / spent.as_nanos().max(1);
    Ok(u64::try_from(per_second).unwrap_or(u64::MAX))
}
