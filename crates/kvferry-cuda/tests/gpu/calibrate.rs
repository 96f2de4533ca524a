//! What copies take is measured in the background, once for each GPU of the process.

use crate::kit::*;
use crate::machine::Kernel;
use kvferry::{Access, Options, TransportKind};
use kvferry_cuda::gpu::Settings;
use kvferry_cuda::{Calibration, DeviceKey, Gpu, Method};
use kvferry_fakecuda::Fault;
use kvferry_sys::cuda::Stream;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::time::Duration;

/// Batches of small pieces after which a GPU is measured.
const BATCHES: usize = 16;

/// Settings for a fake GPU, which interprets its kernels: each point is measured once, and may take any time.
const PATIENT: Settings = Settings {
    method: None,
    is_uncalibrated: false,
    blocks_max: None,
    stages: None,
    pin_ahead: 0,
    unpin_after: None,
    patience: Some(PATIENCE),
};

/// The time after which a measurement that waits for a kernel is given up: longer than a thread stops before.
const STUCK: Duration = Duration::from_secs(5);
/// The timeout of writes while a kernel is held.
const BRIEF: Duration = Duration::from_secs(60);

/// Writes from GPU 0, with memory that is registered until the value is dropped.
struct Writes {
    _agents: [kvferry::Agent; 2],
    peer: kvferry::Peer,
    batch: kvferry::Batch,
    _gpu: kvferry_sys::cuda::DeviceAllocation,
}

impl Writes {
    fn new(rig: &FakeRig, count: usize, piece: usize) -> Self {
        let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
        let len = 2 * count * piece;
        let gpu = rig.memory(0, len, 1);
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let batch = scattered(&register(&near, &gpu), &to, count, piece);
        let peer = peer_of(&near, &far);
        Self { _agents: [near, far], peer, batch, _gpu: gpu }
    }

    fn write(&self, times: usize) {
        (0..times).for_each(|_| _ = self.peer.write(&self.batch, &options()).expect("written"));
    }
}

fn calibration() -> Calibration {
    Gpu::all().first().expect("a GPU is in use").calibration()
}

fn key(rig: &FakeRig) -> DeviceKey {
    let context = rig.context(0);
    let uuid = context.device().uuid().expect("a UUID").0;
    DeviceKey::new(uuid, context.driver().version().unsigned_abs())
}

#[test]
fn a_gpu_is_measured_once_after_some_batches_of_small_pieces() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[("delay_us", "0")]) else { return };
    Settings::give(Some(PATIENT));
    let writes = Writes::new(&rig, 40, 1024);
    let allocated = || rig.fake.counter("allocated_bytes");
    let before = allocated();
    writes.write(BATCHES - 1);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(calibration(), Calibration::default(), "as is assumed of an unknown model");
    writes.write(1);
    eventually("it is measured", || {
        // The transfers of others go on meanwhile.
        writes.write(1);
        calibration().is_of(&key(&rig))
    });
    let measured = calibration();
    let has = |costs: &kvferry_cuda::Costs| Method::ALL.map(|method| costs.of(method).is_some());
    assert_eq!(has(&measured.out), [true; 4]);
    assert_eq!(has(&measured.into), [true; 4]);
    let stated = counters().staging_bytes;
    assert!(stated >= 2 * kvferry_cuda::samples::BYTES_MAX, "{stated}");
    assert_eq!(allocated(), before + stated, "all memory that is taken is stated");
    assert_eq!(rig.fake.findings(), Vec::<String>::new());
    drop(writes);
    rig.ends_clean();
    // The result stays.
    let writes = Writes::new(&rig, 40, 1024);
    let samples = |rig: &FakeRig| rig.fake.counter("call:cuEventRecord");
    writes.write(1);
    assert_eq!(calibration(), measured);
    let before = samples(&rig);
    writes.write(BATCHES);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(samples(&rig), before + BATCHES as u64, "an event for each batch");
    Settings::give(None);
}

#[test]
fn batches_of_few_or_of_large_pieces_and_a_setting_keep_a_gpu_from_being_measured() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let off = Settings { is_uncalibrated: true, ..PATIENT };
    for (settings, count, piece) in [(PATIENT, 15, 1024), (PATIENT, 16, 130 << 10), (off, 40, 1024)]
    {
        Settings::give(Some(settings));
        let writes = Writes::new(&rig, count, piece);
        writes.write(BATCHES + 1);
        let allocations = || rig.fake.counter("call:cuMemAlloc_v2");
        let before = allocations();
        rig.becomes_idle(Duration::from_millis(50));
        assert_eq!(allocations(), before, "{count} pieces of {piece}");
        assert_eq!(calibration(), Calibration::default());
        drop(writes);
        eventually("no GPU is in use", || Gpu::all().is_empty());
    }
    Settings::give(None);
}

#[test]
fn a_slow_gpu_is_not_measured_for_longer_than_the_limit() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    Settings::give(Some(Settings { patience: None, ..PATIENT }));
    let writes = Writes::new(&rig, 40, 1024);
    writes.write(BATCHES - 1);
    rig.fake.set("delay_us", "6000");
    let of_test = rig.fake.counter("call:cuMemAlloc_v2");
    writes.write(1);
    eventually("measurements begin", || rig.fake.counter("call:cuMemAlloc_v2") > of_test);
    rig.becomes_idle(Duration::from_millis(50));
    assert_eq!(calibration(), Calibration::default());
    rig.fake.set("delay_us", "0");
    writes.write(2);
    drop(writes);
    rig.ends_clean();
    Settings::give(None);
}

#[test]
fn a_gpu_that_fails_while_it_is_measured_fails_no_transfer() {
    let _bound = Watchdog::new(LIMIT);
    for fault in [Fault::AllocOom, Fault::PinOom, Fault::JitRefused, Fault::LaunchRefused] {
        let Some(rig) = FakeRig::new(&[("delay_us", "0")]) else { return };
        Settings::give(Some(PATIENT));
        let writes = Writes::new(&rig, 40, 1024);
        writes.write(BATCHES - 1);
        rig.fake.fault(fault, 1, u64::MAX);
        writes.write(1);
        std::thread::sleep(Duration::from_millis(100));
        rig.fake.clear_faults();
        writes.write(2);
        assert_eq!(counters().failed, 0, "{fault:?}");
        drop(writes);
        eventually("no GPU is in use", || Gpu::all().is_empty());
    }
    Settings::give(None);
}

#[test]
fn the_end_of_a_measurement_does_not_wait_for_a_kernel_that_runs() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[("delay_us", "0")]) else { return };
    Settings::give(Some(PATIENT));
    let writes = Writes::new(&rig, 40, 1024);
    writes.write(BATCHES - 1);
    let stuck = Stream::new(&rig.context(0)).expect("a stream");
    rig.hold();
    rig.launch(&stuck, &Kernel { name: "stuck", ..Kernel::default() });
    // The measurement ends at its first launch.
    rig.fake.fault(Fault::LaunchRefused, 1, u64::MAX);
    let launches = rig.fake.counter("call:cuLaunchKernel");
    writes.write(1);
    eventually("it ends", || rig.fake.counter("call:cuLaunchKernel") > launches);
    let brief = Options { timeout: Some(BRIEF), ..options() };
    let outcome = (0..20).try_for_each(|_| {
        std::thread::sleep(Duration::from_millis(2));
        writes.peer.write(&writes.batch, &brief).map(drop)
    });
    rig.fake.clear_faults();
    rig.release();
    outcome.expect("written while the kernel runs");
    stuck.synchronize().expect("it has run");
    drop((writes, stuck));
    eventually("no GPU is in use", || Gpu::all().is_empty());
    Settings::give(None);
}

#[test]
fn a_measurement_that_waits_for_a_kernel_holds_up_no_batch_of_the_copy_engine() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[("delay_us", "0")]) else { return };
    Settings::give(Some(Settings { patience: Some(STUCK), ..PATIENT }));
    let writes = Writes::new(&rig, 40, 1024);
    writes.write(BATCHES - 1);
    // A kernel of the engine takes the whole GPU.
    rig.hold();
    let launches = rig.fake.counter("call:cuLaunchKernel");
    writes.write(1);
    eventually("a launch is measured", || rig.fake.counter("call:cuLaunchKernel") > launches);
    let brief = Options { timeout: Some(BRIEF), ..options() };
    let outcome = (0..20).try_for_each(|_| writes.peer.write(&writes.batch, &brief).map(drop));
    rig.release();
    outcome.expect("written while the kernel runs");
    drop(writes);
    rig.ends_clean();
    Settings::give(None);
}
