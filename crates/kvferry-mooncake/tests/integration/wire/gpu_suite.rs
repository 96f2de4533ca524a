//! The conformance suite for stock Mooncake's protocol on memory of GPUs, on the fake driver.

use crate::wire::gpu::{context, loaded};
use kvferry::DeviceMemory;
use kvferry_fakecuda::control::Fake;
use kvferry_sys::cuda::DeviceAllocation;
use kvferry_testkit::memory::{ProvidedMemory, provide};
use kvferry_testkit::{AgentFabric, Effort, PATIENCE};
use std::sync::Arc;

struct GpuMemory {
    fake: Fake,
    allocation: DeviceAllocation,
}

impl GpuMemory {
    fn at(&self, at: usize) -> u64 {
        self.allocation.address() + at as u64
    }
}

impl ProvidedMemory for GpuMemory {
    fn load(&self, at: usize, bytes: &mut [u8]) {
        let read = self.fake.read(self.at(at), bytes.len()).expect("it is mapped");
        bytes.copy_from_slice(&read);
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        self.fake.write(self.at(at), bytes).expect("it is mapped");
    }

    fn memory(&self, at: usize, len: usize) -> DeviceMemory {
        let memory = kvferry_cuda::memory(self.at(at), len as u64, None).expect("memory of a GPU");
        memory.with_process_addresses()
    }

    fn address(&self, at: usize) -> Option<u64> {
        Some(self.at(at))
    }

    fn misuse(&self) -> Vec<String> {
        self.fake.findings()
    }
}

fn on_gpu() -> AgentFabric {
    provide(|len| {
        let fake = loaded();
        let allocation = DeviceAllocation::new(&context(0), len).expect("memory");
        Arc::new(GpuMemory { fake, allocation })
    });
    kvferry_mooncake::link();
    AgentFabric {
        settings: &[("mooncake", "true")],
        has_sessions: false,
        effort: Effort::Brief,
        // Each descriptor is a request of its own, and a copy of the GPU: 7000 take a minute on an idle machine.
        patience: 2 * PATIENCE,
        ..AgentFabric::new("mooncake")
    }
}

kvferry_testkit::conformance!(mooncake, on_gpu(), gpu: Provided);
