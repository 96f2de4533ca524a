//! The fake driver as a machine.

use crate::machine::{Kernel, Machine};
use kvferry_fakecuda::control::{COMPUTE, Fake, FakeKernel, library_path};
use kvferry_sys::cuda::{Context, Driver, Stream};
use kvferry_testkit::eventually;
use std::ffi::c_void;
use std::sync::OnceLock;

/// The fake driver, loaded once.
#[derive(Clone, Copy)]
pub(crate) struct FakeMachine {
    pub(crate) fake: Fake,
}

impl FakeMachine {
    pub(crate) fn get() -> Self {
        static FAKE: OnceLock<Fake> = OnceLock::new();
        let fake = FAKE.get_or_init(|| {
            let path = library_path();
            // SAFETY: they are set once, and kvferry reads them after that.
            unsafe {
                std::env::set_var("KVFERRY_LIBCUDA", &path);
                // Tests of calibrations turn measurements on, and tests of pins the stages that are pinned ahead.
                std::env::set_var("KVFERRY_GPU_CALIBRATE", "off");
                std::env::set_var("KVFERRY_GPU_PIN_AHEAD", "0");
            }
            Fake::load(&path).expect("the fake driver loads")
        });
        Self { fake: *fake }
    }
}

/// Counters of what a program makes and ends.
const OBJECTS: [&str; 11] = [
    "streams",
    "events",
    "modules",
    "host_registrations",
    "host_allocations",
    "ipc_mappings",
    "vmm_handles",
    "vmm_mappings",
    "pending",
    "contexts",
    "allocations",
];

impl Machine for FakeMachine {
    fn devices(&self) -> i32 {
        Driver::get().expect("the fake driver").device_count().expect("they are counted")
    }

    fn context(&self, device: i32) -> Context {
        let driver = Driver::get().expect("the fake driver");
        Context::primary(driver.device(device).expect("a device")).expect("a context")
    }

    fn read(&self, _: &Context, address: u64, bytes: &mut [u8]) {
        let read = self.fake.read(address, bytes.len()).expect("it is mapped");
        bytes.copy_from_slice(&read);
    }

    fn write(&self, _: &Context, address: u64, bytes: &[u8]) {
        self.fake.write(address, bytes).expect("it is mapped");
    }

    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) {
        let (reads, writes) = (Vec::from_iter(kernel.reads), Vec::from_iter(kernel.writes));
        let kernel = FakeKernel {
            name: kernel.name,
            reads: &reads,
            writes: &writes,
            fill: kernel.fill,
            expect: kernel.expect,
            delay_ns: kernel.delay_ns,
        };
        let _current = stream.context().enter().expect("current");
        self.fake.launch(stream.raw().0 as usize, &kernel).expect("it is launched");
    }

    fn hold(&self) {
        self.fake.hold(COMPUTE);
    }

    fn release(&self) {
        self.fake.release();
    }

    fn findings(&self) -> Vec<String> {
        self.fake.findings()
    }

    fn clear_findings(&self) {
        self.fake.clear_findings();
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        self.fake.symbol(name).expect("the driver has it")
    }

    fn ends_clean(&self) {
        for name in OBJECTS {
            eventually(name, || self.fake.counter(name) == 0);
        }
    }
}
