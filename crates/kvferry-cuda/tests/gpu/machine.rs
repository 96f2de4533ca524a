//! The interface of the tests to a driver: the fake one, or a real one with a GPU.
//!
//! | `KVFERRY_TEST_GPU` | driver | work that takes a while |
//! |---|---|---|
//! | not set | the fake one | the fake's kernels |
//! | `real` | `libcuda.so.1` | a kernel that spins |
//! | `host` | what `KVFERRY_LIBCUDA` names, through the functions that a real one has | a host function that waits |

use crate::fake::FakeMachine;
use crate::real::RealMachine;
use kvferry_sys::cuda::{Context, Stream};
use std::ffi::c_void;
use std::sync::OnceLock;

/// A driver and its GPUs. A process uses one.
pub(crate) trait Machine: Send + Sync {
    /// The number of GPUs.
    fn devices(&self) -> i32;

    /// The primary context of a GPU.
    fn context(&self, device: i32) -> Context;

    /// Reads memory of a GPU.
    fn read(&self, context: &Context, address: u64, bytes: &mut [u8]);

    /// Writes memory of a GPU.
    fn write(&self, context: &Context, address: u64, bytes: &[u8]);

    /// Runs a kernel after the stream's earlier work.
    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>);

    /// Keeps the kernels of [`Self::launch`] from starting.
    fn hold(&self);

    /// Lets kernels start again.
    fn release(&self);

    /// The findings of kernels, and of a checker of races if there is one.
    fn findings(&self) -> Vec<String>;

    /// Forgets the findings.
    fn clear_findings(&self);

    /// A function of the driver's library.
    fn symbol(&self, name: &str) -> *mut c_void;

    /// Checks that nothing of the driver is left.
    fn ends_clean(&self);
}

/// A kernel that reads one range and fills another one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kernel<'a> {
    /// The name in findings.
    pub(crate) name: &'a str,
    /// The range that it reads once, after its delay: address and length.
    pub(crate) reads: Option<(u64, u64)>,
    /// The byte that all it reads must have. Another byte is a finding.
    pub(crate) expect: Option<u8>,
    /// The range that it fills with `fill` then.
    pub(crate) writes: Option<(u64, u64)>,
    /// The byte that it writes.
    pub(crate) fill: u8,
    /// Time before it reads, in ns.
    pub(crate) delay_ns: u64,
}

/// How the process reaches a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Fake,
    Real,
    Host,
}

impl Mode {
    /// The mode that `KVFERRY_TEST_GPU` names.
    pub(crate) fn get() -> Self {
        match std::env::var("KVFERRY_TEST_GPU").as_deref() {
            Ok("real") => Self::Real,
            Ok("host") => Self::Host,
            Ok(other) => panic!("KVFERRY_TEST_GPU={other}: it is `real`, `host` or not set"),
            Err(_) => Self::Fake,
        }
    }
}

/// The machine of this process.
pub(crate) fn machine() -> &'static dyn Machine {
    static MACHINE: OnceLock<Box<dyn Machine>> = OnceLock::new();
    &**MACHINE.get_or_init(|| match Mode::get() {
        Mode::Fake => Box::new(FakeMachine::get()),
        mode => Box::new(RealMachine::new(mode)),
    })
}

#[test]
fn tests_for_a_real_gpu_pass_on_the_fake_driver_through_its_public_functions() {
    if Mode::get() != Mode::Fake {
        return;
    }
    let tests = [
        "order::without_the_edge_the_race_is_found",
        "order::a_read_comes_after_the_last_reader_of_the_memory_that_it_writes",
        "stress::without_edges_some_rounds_have_wrong_bytes",
        "hardware::a_kernel_with_an_illegal_address_loses_the_gpu_and_host_transfers_go_on",
        "suite::tcp::gpu::scattered_blocks_land_where_they_were_aimed",
    ];
    for test in tests {
        let ran = std::process::Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", test, "--nocapture"])
            .env("KVFERRY_TEST_GPU", "host")
            .env("KVFERRY_LIBCUDA", kvferry_fakecuda::control::library_path())
            .env("KVFERRY_TEST_ROUNDS", "5")
            .output()
            .expect("it starts");
        let [out, err] = [&ran.stdout, &ran.stderr].map(|it| String::from_utf8_lossy(it));
        assert!(ran.status.success() && out.contains("1 passed"), "{test}: {out}{err}");
    }
}
