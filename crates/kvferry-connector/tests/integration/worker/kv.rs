//! Memory of KV, of the host or of a GPU.

use kvferry::{Access, After, Agent, Region};
#[cfg(debug_assertions)]
use kvferry_sys::cuda::{DeviceAllocation, Stream};

pub(crate) enum Kv {
    Host(Region),
    #[cfg(debug_assertions)]
    Gpu(OnGpu),
}

/// Memory of a fake GPU, with the stream on which the engine uses it.
#[cfg(debug_assertions)]
pub(crate) struct OnGpu {
    pub(crate) region: Region,
    pub(crate) allocation: DeviceAllocation,
    pub(crate) stream: Stream,
}

impl Kv {
    pub(crate) fn new(agent: &Agent, len: usize, gpu: Option<i32>) -> Self {
        match gpu {
            None => Self::Host(agent.allocate(len, Access::READ).expect("memory")),
            #[cfg(debug_assertions)]
            Some(device) => Self::Gpu(OnGpu::new(agent, len, device)),
            #[cfg(not(debug_assertions))]
            Some(_) => unreachable!("tests with GPUs have debug assertions"),
        }
    }

    pub(crate) fn region(&self) -> &Region {
        match self {
            Self::Host(region) => region,
            #[cfg(debug_assertions)]
            Self::Gpu(gpu) => &gpu.region,
        }
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        match self {
            Self::Host(region) => region.write_at(at, bytes).expect("inside"),
            #[cfg(debug_assertions)]
            Self::Gpu(gpu) => gpu.write(at, bytes),
        }
    }

    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) {
        match self {
            Self::Host(region) => region.read_at(at, bytes).expect("inside"),
            #[cfg(debug_assertions)]
            Self::Gpu(gpu) => gpu.read(at, bytes),
        }
    }

    /// The engine's work, which fetches come after.
    pub(crate) fn after(&self) -> Result<After, String> {
        match self {
            Self::Host(_) => Ok(After::default()),
            #[cfg(debug_assertions)]
            Self::Gpu(gpu) => gpu.after(),
        }
    }
}
