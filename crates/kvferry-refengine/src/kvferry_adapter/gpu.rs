//! KV caches in memory of a GPU that peers may read.

use crate::memory::KvMemory;
use kvferry::{Access, Agent, Region};
use kvferry_cuda::Error;
use kvferry_sys::cuda::{Context, DeviceAllocation, Driver, Stream};

/// Bytes that one copy clears.
const CLEARED: usize = 1 << 20;

/// Memory of a GPU as memory of a KV cache. Each read and write is a copy by the driver that the engine waits for: what
/// the engine has computed is in the GPU's memory when the layer's event happens.
#[derive(Debug)]
pub struct GpuMemory {
    /// The memory, which is freed once nothing copies from or to it.
    allocation: Option<DeviceAllocation>,
    stream: Stream,
    agent: Agent,
    region: Region,
}

impl GpuMemory {
    /// Allocates `len` zeroed bytes of the GPU with this number, and registers them with `agent`.
    ///
    /// # Errors
    /// If the GPU can't be used, or has too little memory.
    pub fn new(agent: &Agent, device: i32, len: usize) -> Result<Self, Error> {
        let context = Context::primary(Driver::get()?.device(device)?)?;
        let allocation = DeviceAllocation::new(&context, len)?;
        let stream = Stream::new(&context)?;
        let zeroes = vec![0; CLEARED.min(len)];
        for at in (0..len).step_by(CLEARED) {
            allocation.write(&stream, at, &zeroes[..CLEARED.min(len - at)])?;
        }
        let memory = kvferry_cuda::memory(allocation.address(), len as u64, Some(device))?;
        let region = agent.register_device(memory, Access::READ);
        let region = region.map_err(|error| Error::Host { device, why: error.to_string() })?;
        Ok(Self { allocation: Some(allocation), stream, agent: agent.clone(), region })
    }

    fn allocation(&self) -> &DeviceAllocation {
        self.allocation.as_ref().expect("there until the value is dropped")
    }

    /// The region that peers read.
    pub fn region(&self) -> &Region {
        &self.region
    }
}

impl KvMemory for GpuMemory {
    fn bytes(&self) -> usize {
        self.allocation().len()
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        let read = self.allocation().read(&self.stream, at, out);
        read.expect("the GPU copies, within its memory");
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let written = self.allocation().write(&self.stream, at, bytes);
        written.expect("the GPU copies, within its memory");
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        // If the agent is shut down, the shutdown unregisters it, and waits for the copies.
        let _ = self.agent.unregister(&self.region);
        if self.region.is_in_use() {
            // A copy from or to the memory may still run.
            std::mem::forget(self.allocation.take());
        }
    }
}
