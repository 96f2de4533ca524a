//! Each fault of the driver in a transfer between a GPU and a file: the transfer ends with every byte or an error, no byte
//! comes late, and transfers of other GPUs go on.

use crate::hardware::alone;
use crate::kit::*;
use kvferry::{
    After, Agent, Batch, Error, ErrorKind, FileOptions, FileRegion, Options, Region, TransportKind,
};
use kvferry_cuda::gpu::Settings;
use kvferry_cuda::{Gpu, Method};
use kvferry_fakecuda::{Effect, Fault};
use kvferry_sys::cuda::DeviceAllocation;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The method by which copies make the calls that the fault is about.
fn method(fault: Fault) -> Option<Method> {
    match fault {
        Fault::AllocOom => Some(Method::Gather),
        Fault::JitRefused | Fault::LaunchRefused => Some(Method::Kernel),
        Fault::BatchEntry => Some(Method::Batch),
        _ => None,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// A write: bytes go from the GPU to the file.
    Put,
    /// A read: bytes go from the file to the GPU.
    Get,
}

/// Bytes of a piece. Pieces are apart from each other on the GPU and follow each other in the file.
const PIECE: usize = 8 << 10;
/// Pieces of a transfer: more than a stage holds.
const PIECES: usize = 576;
/// Pieces of a transfer by the kernel, which the fake driver interprets.
const FEW: usize = 16;
/// The byte that stands where a late copy would be seen.
const POISON: u8 = 0x5a;

/// An agent with memory of a GPU and a file.
struct Copier {
    agent: Agent,
    gpu: DeviceAllocation,
    region: Region,
    file: FileRegion,
    path: PathBuf,
    /// Number of pieces of a transfer.
    pieces: usize,
}

impl Copier {
    fn new(rig: &FakeRig, device: i32, pieces: usize, silence: Duration) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Relaxed);
        let name = format!("kvferry-gpu-files-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let agent = impatient(TransportKind::TCP, silence);
        let gpu = rig.memory(device, 2 * pieces * PIECE, 0);
        let region = register(&agent, &gpu);
        let options = FileOptions::create((pieces * PIECE) as u64);
        let file = agent.open_file(&path, &options).expect("a file");
        Self { agent, gpu, region, file, path, pieces }
    }

    fn batch(&self) -> Batch {
        let mut batch = Batch::new();
        batch.set_after(After::host());
        let file = self.file.remote();
        for at in (0..self.pieces).map(|i| (i * PIECE) as u64) {
            batch.push(&self.region, 2 * at, &file, at, PIECE as u64).expect("inside");
        }
        batch
    }

    /// The addresses of the pieces on the GPU.
    fn addresses(&self) -> impl Iterator<Item = u64> {
        let base = self.gpu.address();
        (0..self.pieces).map(move |i| base + (2 * i * PIECE) as u64)
    }

    /// Fills the GPU's memory. A destroyed context has taken it with it.
    fn fill_gpu(&self, rig: &FakeRig, bytes: &[u8]) {
        for (address, piece) in self.addresses().zip(bytes.chunks(PIECE)) {
            let _ = rig.fake.write(address, piece);
        }
    }

    /// The pieces on the GPU, if the memory is there.
    fn gpu_bytes(&self, rig: &FakeRig) -> Option<Vec<u8>> {
        let pieces = self.addresses().map(|address| rig.fake.read(address, PIECE).ok());
        Some(pieces.collect::<Option<Vec<_>>>()?.concat())
    }

    fn file_bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).expect("the file is there")
    }

    /// Moves the pattern of a seed. Checks that a success has moved every byte.
    fn run(&self, rig: &FakeRig, op: Op, seed: u64, timeout: Duration) -> Result<(), Error> {
        let sent = Pattern::new(seed).bytes(self.pieces * PIECE);
        let options = Options { timeout: Some(timeout), ..Options::default() };
        let batch = self.batch();
        match op {
            Op::Put => {
                self.fill_gpu(rig, &sent);
                self.agent.files().write(&batch, &options)?;
                assert!(self.file_bytes() == sent, "{op:?}, {seed}");
            }
            Op::Get => {
                std::fs::write(&self.path, &sent).expect("written");
                self.agent.files().read(&batch, &options)?;
                let is_right = self.gpu_bytes(rig).is_none_or(|bytes| bytes == sent);
                assert!(is_right, "{op:?}, {seed}");
            }
        }
        Ok(())
    }

    /// Puts poison where a late copy of a transfer that has ended would be seen.
    fn poison(&self, rig: &FakeRig) {
        // A copy that still runs is a finding.
        rig.fake.host_access(self.gpu.address(), self.gpu.len(), true);
        let poison = vec![POISON; self.pieces * PIECE];
        self.fill_gpu(rig, &poison);
        std::fs::write(&self.path, &poison).expect("written");
    }

    fn has_poison(&self, rig: &FakeRig) -> bool {
        let is_poison = |bytes: &[u8]| bytes.iter().all(|byte| *byte == POISON);
        self.gpu_bytes(rig).is_none_or(|bytes| is_poison(&bytes)) && is_poison(&self.file_bytes())
    }

    /// Unregisters the memory, which nothing may use then.
    fn give_back(&self, rig: &FakeRig) {
        self.agent.unregister(&self.region).expect("nothing copies");
        self.poison(rig);
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.agent.shutdown();
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Deadline of a transfer whose copy never ends, and its agent's limit of silence.
const BRIEF: Duration = Duration::from_millis(200);
const SILENCE: Duration = Duration::from_millis(300);

/// Has the fault strike at the occasion `at` of a transfer. False if the transfer has fewer occasions.
fn strike(rig: &FakeRig, fault: Fault, effect: Effect, op: Op, at: u64) -> bool {
    let what = format!("{fault:?}, {op:?}, occasion {at}");
    let (timeout, silence) = match effect {
        Effect::Hang => (BRIEF, SILENCE),
        _ => (PATIENCE, PATIENCE / 5),
    };
    let pieces = match method(fault) {
        Some(Method::Kernel | Method::Gather) => FEW,
        _ => PIECES,
    };
    let mut struck = Copier::new(rig, 0, pieces, silence);
    let other = Copier::new(rig, 1, pieces, PATIENCE / 5);
    let hits = || rig.fake.counter(&format!("hit:{}", fault.name()));
    let before = hits();
    rig.fake.fault(fault, at, 1);
    let mut outcome = struck.run(rig, op, 1, timeout);
    // On a loaded machine, a brief transfer may end before the fault strikes.
    while effect == Effect::Hang && outcome.is_err() && hits() == before {
        outcome = struck.run(rig, op, 1, timeout);
    }
    if hits() == before {
        rig.fake.clear_faults();
        outcome.unwrap_or_else(|error| panic!("{what}: no fault has struck: {error:?}"));
        return false;
    }
    let is_quiet = match (&outcome, effect) {
        (Ok(()), _) => true,
        (Err(error), Effect::Succeed) => panic!("{what}: {error:?}"),
        (Err(error), Effect::Fail | Effect::Lose) => {
            assert_eq!(
                (error.kind(), error.quiesced()),
                (ErrorKind::Internal, Some(true)),
                "{what}"
            );
            assert!(std::error::Error::source(error).is_some(), "{what}: {error:?}");
            true
        }
        (Err(error), Effect::Hang) => {
            assert_eq!(error.kind(), ErrorKind::Deadline, "{what}: {error:?}");
            error.quiesced() == Some(true)
        }
        (Err(error), Effect::Miss(_)) => panic!("{what}: {error:?}"),
    };
    other.run(rig, op, 2, PATIENCE).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    if effect == Effect::Lose {
        let error = struck.run(rig, op, 3, PATIENCE).expect_err("the GPU is lost");
        let text = format!("{error:?}");
        let is_told = ["CONTEXT_IS_DESTROYED", "restart the process"];
        assert!(is_told.iter().any(|it| text.contains(it)), "{what}: {text}");
    }
    if is_quiet {
        struck.give_back(rig);
    } else {
        let error = struck.agent.unregister(&struck.region).expect_err("the GPU may copy");
        assert_eq!(error.kind(), ErrorKind::Quarantined, "{what}: {error}");
        assert!(struck.region.is_quarantined(), "{what}");
    }
    rig.fake.clear_faults();
    eventually("the GPU goes on", || rig.fake.counter("pending") == 0);
    if is_quiet {
        assert!(struck.has_poison(rig), "{what}: a late byte");
    } else {
        eventually("the copy has ended", || !struck.region.is_quarantined());
    }
    if effect != Effect::Lose {
        struck.region = register(&struck.agent, &struck.gpu);
        struck.run(rig, op, 4, PATIENCE).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    }
    assert!(Gpu::all().iter().all(|gpu| gpu.counters().leaked == 0), "{what}");
    drop((struck, other));
    rig.releases_contexts();
    rig.ends_clean();
    true
}

/// The most occasions of a fault that are tried.
const OCCASIONS_MAX: u64 = 8;

fn faults_strike(op: Op) {
    let _bound = Watchdog::new(3 * LIMIT);
    for fault in Fault::ALL {
        let effect = match fault {
            // These transfers have no edges, whose events the driver may lose. Where that of a copy is lost, its stream tells.
            Fault::EventNeverSignals => Effect::Succeed,
            other => other.on_copies(),
        };
        if let Effect::Miss(why) = effect {
            println!("{}: in no transfer with a file: {why}", fault.name());
            continue;
        }
        // A device that is gone by another error keeps memory in quarantine, see below.
        let Some(rig) = FakeRig::new(&[("removed_code", "999")]) else { return };
        let method = method(fault);
        Settings::give(Some(Settings { method, is_uncalibrated: true, ..Settings::default() }));
        let max = if effect == Effect::Hang { 3 } else { OCCASIONS_MAX };
        let struck = (1..=max).take_while(|at| strike(&rig, fault, effect, op, *at)).count();
        Settings::give(None);
        println!("{}: struck at {struck} occasions", fault.name());
        assert!(struck > 0, "{fault:?} strikes no transfer");
    }
}

#[test]
fn each_fault_of_a_driver_ends_a_transfer_from_a_gpu_to_a_file_and_no_byte_is_late() {
    faults_strike(Op::Put);
}

#[test]
fn each_fault_of_a_driver_ends_a_transfer_from_a_file_to_a_gpu_and_no_byte_is_late() {
    faults_strike(Op::Get);
}

#[test]
fn two_stages_are_enough_for_a_file_and_a_peer_at_a_time() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let stages = Some(2);
    Settings::give(Some(Settings { stages, is_uncalibrated: true, ..Settings::default() }));
    let copier = Copier::new(&rig, 0, PIECES, PATIENCE / 5);
    let len = 16 << 20;
    let gpu = rig.memory(0, len, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let batch = whole(&pair.region, &pair.to, len);
    for (seed, op) in (10..).zip([Op::Put, Op::Get].repeat(3)) {
        let sent = Pattern::new(seed).bytes(len);
        rig.write(&gpu, 0, &sent);
        let running = pair.peer.write_async(&batch, &options());
        copier.run(&rig, op, seed, PATIENCE).expect("moved");
        ended(&running).expect("written");
        let mut got = vec![0; len];
        pair.to.read_at(0, &mut got).expect("inside");
        assert!(got == sent, "{op:?}, {seed}");
    }
    assert!(Gpu::all().iter().all(|gpu| gpu.counters().pinned_stages <= 2));
    Settings::give(None);
    drop((copier, batch, pair, gpu));
    rig.ends_clean();
}

/// Begins a transfer whose copy never ends, and returns its error.
fn hung(rig: &FakeRig, copier: &Copier, op: Op) -> Error {
    let hits = || rig.fake.counter("hit:stream_stalls");
    let before = hits();
    rig.fake.fault(Fault::StreamStalls, 1, u64::MAX / 2);
    loop {
        let error = copier.run(rig, op, 1, BRIEF).expect_err("the copy never ends");
        if hits() > before {
            return error;
        }
    }
}

#[test]
fn a_copy_that_never_ends_ends_a_transfer_with_a_file_and_a_shutdown_and_keeps_the_memory() {
    for op in [Op::Put, Op::Get] {
        let _bound = Watchdog::new(LIMIT);
        let Some(rig) = FakeRig::new(&[]) else { return };
        let copier = Copier::new(&rig, 0, PIECES, SILENCE);
        let began = Instant::now();
        let error = hung(&rig, &copier, op);
        assert_eq!((error.kind(), error.quiesced()), (ErrorKind::Deadline, Some(false)), "{op:?}");
        assert!(began.elapsed() >= BRIEF + SILENCE, "{op:?}: it has not waited for the GPU");
        let refused = copier.agent.unregister(&copier.region).expect_err("the GPU may copy");
        assert_eq!(refused.kind(), ErrorKind::Quarantined, "{op:?}");
        copier.agent.shutdown();
        assert!(copier.region.is_quarantined(), "{op:?}");
        rig.fake.clear_faults();
        eventually("the copy has ended", || !copier.region.is_quarantined());
        copier.poison(&rig);
        eventually("the GPU goes on", || rig.fake.counter("pending") == 0);
        assert!(copier.has_poison(&rig), "{op:?}: a late byte");
        drop(copier);
        rig.ends_clean();
    }
}

/// The GPU goes, by an error that says nothing of the copies that it has begun.
fn a_gpu_goes(code: &str) {
    let _bound = Watchdog::new(2 * LIMIT);
    // The process never gets a GPU back that has gone.
    for (device, op) in [(0, Op::Put), (1, Op::Get)] {
        let Some(rig) = FakeRig::new(&[("removed_code", code)]) else { return };
        let what = format!("{code}, {op:?}");
        let struck = Copier::new(&rig, device, PIECES, SILENCE);
        rig.fake.fault(Fault::DeviceRemoved, 1, 1);
        let error = struck.run(&rig, op, 1, PATIENCE).expect_err("the GPU is gone");
        assert_eq!((error.kind(), error.quiesced()), (ErrorKind::Internal, Some(false)), "{what}");
        let text = format!("{error:?}");
        assert!(text.contains(&format!("({code})")), "{what}: {text}");
        let in_use = Gpu::all().into_iter().find(|gpu| gpu.device() == device);
        let gpu = in_use.expect("its memory is registered");
        assert!(gpu.is_lost() && gpu.counters().leaked > 0, "{what}: {gpu:?}");
        let later = struck.run(&rig, op, 2, PATIENCE).expect_err("the GPU is lost");
        assert!(format!("{later:?}").contains("restart the process"), "{what}: {later:?}");
        assert_eq!(later.quiesced(), Some(true), "{what}: {later}");
        if device == 0 {
            let other = Copier::new(&rig, 1, PIECES, PATIENCE / 5);
            other.run(&rig, op, 3, PATIENCE).expect("the other GPU");
        }
        let refused = struck.agent.unregister(&struck.region).expect_err("the GPU may copy");
        assert_eq!(refused.kind(), ErrorKind::Quarantined, "{what}");
        assert!(struck.region.is_quarantined(), "{what}");
        // Nothing gives the memory back.
        rig.fake.clear_faults();
        eventually("the GPU does nothing", || rig.fake.counter("pending") == 0);
        assert!(struck.region.is_quarantined(), "{what}");
        assert_eq!(rig.findings(), Vec::<String>::new());
    }
}

#[test]
fn a_gpu_that_is_unavailable_ends_its_transfers_and_keeps_their_memory() {
    alone(|| a_gpu_goes("46"));
}

#[test]
fn a_gpu_that_no_driver_sees_ends_its_transfers_and_keeps_their_memory() {
    alone(|| a_gpu_goes("100"));
}

#[test]
fn a_gpu_whose_number_is_refused_ends_its_transfers_and_keeps_their_memory() {
    alone(|| a_gpu_goes("101"));
}

#[test]
fn a_process_ends_whatever_copies_of_its_gpu_never_end() {
    alone(|| {
        let _bound = Watchdog::new(LIMIT);
        let Some(rig) = FakeRig::new(&[]) else { return };
        let copiers = [Op::Put, Op::Get].map(|op| {
            let copier = Copier::new(&rig, 0, PIECES, SILENCE);
            let error = hung(&rig, &copier, op);
            assert_eq!(error.quiesced(), Some(false), "{op:?}");
            let _ = std::fs::remove_file(&copier.path);
            copier
        });
        copiers.iter().for_each(|copier| copier.agent.shutdown());
        // A driver frees memory once its copies have ended, so nothing frees it here.
        std::mem::forget(copiers);
    });
}
