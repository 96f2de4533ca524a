//! The conformance suite on memory of a GPU.

use crate::kit::Rig;
use kvferry::DeviceMemory;
use kvferry_fakecuda::control::Fake;
use kvferry_sys::cuda::DeviceAllocation;
use kvferry_testkit::memory::{ProvidedMemory, provide};
use kvferry_testkit::{AgentFabric, Effort};
use std::sync::Arc;

struct GpuMemory {
    fake: Fake,
    allocation: DeviceAllocation,
}

impl ProvidedMemory for GpuMemory {
    fn load(&self, at: usize, bytes: &mut [u8]) {
        let read = self.fake.read(self.allocation.address() + at as u64, bytes.len());
        bytes.copy_from_slice(&read.expect("it is mapped"));
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        self.fake.write(self.allocation.address() + at as u64, bytes).expect("it is mapped");
    }

    fn memory(&self, at: usize, len: usize) -> DeviceMemory {
        let address = self.allocation.address() + at as u64;
        kvferry_cuda::memory(address, len as u64, None).expect("memory of a GPU")
    }

    fn misuse(&self) -> Vec<String> {
        self.fake.findings()
    }
}

/// A fabric whose provided memory is the fake GPU's. A scenario has the process for itself.
fn on_gpu(transports: &'static str) -> AgentFabric {
    provide(|len| {
        let rig = Rig::shared();
        let allocation = DeviceAllocation::new(&rig.context(0), len).expect("memory");
        Arc::new(GpuMemory { fake: rig.fake, allocation })
    });
    AgentFabric { effort: Effort::Brief, ..AgentFabric::new(transports) }
}

kvferry_testkit::conformance!(tcp, on_gpu("tcp"), gpu: Provided);
kvferry_testkit::conformance!(local, on_gpu("local,tcp"), gpu: Provided);
