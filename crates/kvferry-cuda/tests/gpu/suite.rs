//! The conformance suite on memory of a GPU.

use crate::machine::{Machine, machine};
use kvferry::DeviceMemory;
use kvferry_sys::cuda::DeviceAllocation;
use kvferry_testkit::memory::{ProvidedMemory, provide};
use kvferry_testkit::{AgentFabric, Effort, FileFabric};
use std::sync::Arc;

struct GpuMemory {
    machine: &'static dyn Machine,
    allocation: DeviceAllocation,
}

impl GpuMemory {
    fn at(&self, at: usize) -> u64 {
        self.allocation.address() + at as u64
    }
}

impl ProvidedMemory for GpuMemory {
    fn load(&self, at: usize, bytes: &mut [u8]) {
        self.machine.read(self.allocation.context(), self.at(at), bytes);
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        self.machine.write(self.allocation.context(), self.at(at), bytes);
    }

    fn memory(&self, at: usize, len: usize) -> DeviceMemory {
        kvferry_cuda::memory(self.at(at), len as u64, None).expect("memory of a GPU")
    }

    fn address(&self, _: usize) -> Option<u64> {
        None
    }

    fn misuse(&self) -> Vec<String> {
        self.machine.findings()
    }
}

/// Makes the provided memory that of the GPU. A scenario has the process for itself.
fn provide_gpu() {
    provide(|len| {
        let machine = machine();
        let allocation = DeviceAllocation::new(&machine.context(0), len).expect("memory");
        Arc::new(GpuMemory { machine, allocation })
    });
}

fn on_gpu(transports: &'static str) -> AgentFabric {
    provide_gpu();
    AgentFabric { effort: Effort::Brief, ..AgentFabric::new(transports) }
}

fn file_on_gpu() -> FileFabric {
    provide_gpu();
    FileFabric { engine: "auto" }
}

kvferry_testkit::conformance!(tcp, on_gpu("tcp"), gpu: Provided);
// `local` has no path to memory of the peer's GPU: the far side's memory is in the host.
kvferry_testkit::conformance!(
    local,
    AgentFabric { far_in_host: true, ..on_gpu("local,tcp") },
    gpu: Provided
);
kvferry_testkit::conformance!(file, file_on_gpu(), gpu: Provided);
