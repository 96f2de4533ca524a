//! The kernel copies small pieces, in the order and with the care of the copy engine.

use crate::fake::FakeMachine;
use crate::kit::*;
use crate::machine::Kernel;
use kvferry::{Access, Batch, ErrorKind, TransportKind};
use kvferry_cuda::gpu::Settings;
use kvferry_cuda::{Counters, Edge, Gpu, Method};
use kvferry_fakecuda::Fault;
use kvferry_sys::cuda::Stream;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, eventually};
use std::time::Duration;

const KINDS: [TransportKind; 2] = [TransportKind::TCP, TransportKind::LOCAL];
const BY_KERNEL: [Method; 2] = [Method::Kernel, Method::Gather];

/// Makes GPUs copy everything by one method, until it is dropped.
struct Only;

impl Only {
    fn by(method: Method) -> Self {
        Settings::give(Some(Settings { method: Some(method), ..Settings::default() }));
        Self
    }
}

impl Drop for Only {
    fn drop(&mut self) {
        Settings::give(None);
    }
}

impl Pair {
    /// Pieces of these offsets and lengths, the same on both sides.
    fn batch(&self, pieces: &[(usize, usize)]) -> Batch {
        let mut batch = Batch::new();
        batch.set_after(kvferry::After::host());
        for &(at, len) in pieces {
            let at = at as u64;
            batch.push(&self.region, at, &self.to.remote(), at, len as u64).expect("inside");
        }
        batch
    }
}

/// Launches of the kernel, both ways.
fn launches(counters: &Counters) -> u64 {
    counters.kernel_calls + counters.gather_calls
}

/// Pieces of odd lengths, with odd gaps, up to `len`.
fn odd_pieces(random: &mut fastrand::Rng, len: usize) -> Vec<(usize, usize)> {
    let (mut at, mut pieces) = (0, Vec::new());
    let is_aligned = random.bool();
    loop {
        at += random.usize(1..300);
        let mut piece =
            if random.u8(..8) == 0 { random.usize(1..40_000) } else { random.usize(1..700) };
        if is_aligned {
            (at, piece) = (at.next_multiple_of(16), piece.next_multiple_of(16));
        }
        if at + piece > len {
            return pieces;
        }
        pieces.push((at, piece));
        at += piece;
    }
}

#[test]
fn pieces_of_any_length_and_alignment_are_copied_exactly_by_the_kernel() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let mut random = fastrand::Rng::with_seed(7);
    let len = 300_000;
    for method in BY_KERNEL {
        let only = Only::by(method);
        for kind in KINDS {
            let gpu = rig.memory(0, len, 1);
            let pair = Pair::new(kind, &gpu);
            for _ in 0..3 {
                let pieces = odd_pieces(&mut random, len);
                let (sent, left) = (Pattern::new(1).bytes(len), Pattern::new(2).bytes(len));
                rig.write(&gpu, 0, &sent);
                pair.to.write_at(0, &left).expect("inside");
                let batch = pair.batch(&pieces);
                pair.peer.write(&batch, &options()).expect("written");
                let mut got = vec![0; len];
                pair.to.read_at(0, &mut got).expect("inside");
                assert!(got == mixed(&pieces, &sent, &left), "{method:?} {kind}: out");
                rig.write(&gpu, 0, &left);
                pair.to.write_at(0, &sent).expect("inside");
                pair.peer.read(&batch, &options()).expect("read");
                let got = rig.bytes(&gpu, 0, len);
                assert!(got == mixed(&pieces, &sent, &left), "{method:?} {kind}: in");
            }
            let counters = counters();
            let calls = [counters.kernel_calls, counters.gather_calls].map(|count| count > 0);
            let wanted = [method == Method::Kernel, method == Method::Gather];
            assert_eq!((calls, counters.batch_calls), (wanted, 0), "{counters:?}");
        }
        drop(only);
    }
    rig.ends_clean();
    ends_without_modules(&rig);
}

/// The bytes of `inside` in the pieces, and those of `outside` elsewhere.
fn mixed(pieces: &[(usize, usize)], inside: &[u8], outside: &[u8]) -> Vec<u8> {
    let mut bytes = outside.to_vec();
    for &(at, len) in pieces {
        bytes[at..at + len].copy_from_slice(&inside[at..at + len]);
    }
    bytes
}

/// Waits until no module and no memory is left. Only the fake driver counts them.
fn ends_without_modules(rig: &Rig) {
    let fake = rig.is_fake().then(|| FakeMachine::get().fake);
    for name in ["modules", "allocated_bytes", "host_registered_bytes"] {
        eventually(name, || fake.is_none_or(|fake| fake.counter(name) == 0));
    }
}

#[test]
fn the_kernel_copies_large_pieces_in_slices_and_between_gpus() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    for method in BY_KERNEL {
        let _only = Only::by(method);
        let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
        let (count, piece) = (3, 200_001);
        let len = 2 * count * piece;
        let (ours, theirs) = (rig.memory(0, len, 1), rig.memory(1, len, 2));
        let batch = scattered(&register(&near, &ours), &register(&far, &theirs), count, piece);
        peer_of(&near, &far).write(&batch, &options()).expect("written");
        let (sent, left) = (Pattern::new(1).bytes(len), Pattern::new(2).bytes(len));
        let pieces: Vec<_> = (0..count).map(|i| (2 * i * piece, piece)).collect();
        assert!(rig.bytes(&theirs, 0, len) == mixed(&pieces, &sent, &left), "{method:?}");
        assert!(Gpu::all().iter().all(|gpu| launches(&gpu.counters()) > 0));
    }
    rig.ends_clean();
}

#[test]
fn a_thousand_scattered_blocks_take_at_most_eight_calls_of_the_driver() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let (count, piece) = (1024, 256);
    let len = 2 * count * piece;
    for method in [Method::Batch, Method::Kernel, Method::Gather] {
        let _only = Only::by(method);
        let gpu = rig.memory(0, len, 1);
        let pair = Pair::new(TransportKind::TCP, &gpu);
        let batch = scattered(&pair.region, &pair.to, count, piece);
        for write in [true, false] {
            let transfer = || match write {
                true => pair.peer.write(&batch, &options()).map(drop),
                false => pair.peer.read(&batch, &options()).map(drop),
            };
            // These transfers make all that is made once: both streams, events, stages, tables.
            (0..4).for_each(|_| transfer().expect("copied"));
            let (before, batches) = (calls(&rig), counters().batches);
            transfer().expect("copied");
            assert_eq!(counters().batches, batches + 1, "one stage takes all");
            let made = calls(&rig) - before;
            let wanted = match (method, write) {
                (Method::Batch, _) => 8,
                (Method::Gather, _) => 2,
                _ => 1,
            };
            assert_eq!(made, wanted, "{method:?}, write {write}");
        }
    }
}

/// Calls of the driver, without those for the events of batches, and those by which late ones are looked at.
fn calls(rig: &FakeRig) -> u64 {
    let calls = rig.calls();
    let is_look = |name: &str| name.starts_with("call:cuEvent") || name == "call:cuStreamQuery";
    let others = calls.iter().filter(|(name, _)| !is_look(name));
    others.map(|(_, count)| count).sum()
}

#[test]
fn a_kernel_that_is_refused_is_refused_once_and_its_batches_go_by_copies() {
    let _bound = Watchdog::new(LIMIT);
    for method in BY_KERNEL {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _only = Only::by(method);
        rig.fake.fault(Fault::JitRefused, 1, u64::MAX);
        let loads = rig.fake.counter("call:cuModuleLoadDataEx");
        let gpu = rig.memory(0, 256 << 10, 1);
        let pair = Pair::new(TransportKind::TCP, &gpu);
        let batch = scattered(&pair.region, &pair.to, 100, 1024);
        for _ in 0..3 {
            pair.peer.write(&batch, &options()).expect("written");
            pair.peer.read(&batch, &options()).expect("read");
        }
        let counters = counters();
        assert_eq!((launches(&counters), counters.kernel_refused), (0, 1), "{counters:?}");
        assert_eq!(counters.kernel_refused_jit, 1, "{counters:?}");
        assert_eq!((counters.failed, counters.staging_bytes), (0, 0), "{counters:?}");
        assert_eq!(rig.fake.counter("call:cuModuleLoadDataEx"), loads + 1, "{method:?}");
        rig.fake.clear_faults();
        drop((pair, batch, gpu));
        rig.ends_clean();
    }
}

#[test]
fn without_memory_of_the_gpu_to_gather_in_its_pieces_are_copied_singly() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _only = Only::by(Method::Gather);
    let gpu = rig.memory(0, 256 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let batch = scattered(&pair.region, &pair.to, 100, 1024);
    rig.fake.fault(Fault::AllocOom, 1, 1);
    pair.peer.write(&batch, &options()).expect("written");
    let counters = counters();
    assert_eq!((counters.kernel_refused, counters.staging_bytes, counters.gather_calls), (1, 0, 0));
    assert_eq!(counters.kernel_refused_memory, 1, "{counters:?}");
    assert_eq!(counters.failed, 0);
}

#[test]
fn the_memory_to_gather_in_is_stated_and_given_back() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _only = Only::by(Method::Gather);
    let gpu = rig.memory(0, 256 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let batch = scattered(&pair.region, &pair.to, 100, 1024);
    let before = rig.fake.counter("allocated_bytes");
    for (write, most) in [(false, 10 << 20), (true, 20 << 20), (true, 20 << 20)] {
        match write {
            true => pair.peer.write(&batch, &options()).map(drop),
            false => pair.peer.read(&batch, &options()).map(drop),
        }
        .expect("copied");
        let stated = counters().staging_bytes;
        assert!((1..=most).contains(&stated), "{stated}");
        assert_eq!(rig.fake.counter("allocated_bytes"), before + stated);
    }
    drop((pair, batch, gpu));
    rig.ends_clean();
    ends_without_modules(&rig);
}

#[test]
fn pageable_stages_are_never_copied_by_the_kernel() {
    let _bound = Watchdog::new(LIMIT);
    for method in BY_KERNEL {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _only = Only::by(method);
        rig.fake.fault(Fault::PinOom, 1, u64::MAX);
        let gpu = rig.memory(0, 256 << 10, 1);
        let pair = Pair::new(TransportKind::TCP, &gpu);
        let batch = scattered(&pair.region, &pair.to, 100, 1024);
        pair.peer.write(&batch, &options()).expect("written");
        pair.peer.read(&batch, &options()).expect("read");
        let counters = counters();
        assert_eq!((launches(&counters), counters.batch_calls), (0, 0), "{counters:?}");
        assert!(counters.unpinned_stages > 0 && counters.single_calls >= 200, "{counters:?}");
        rig.fake.clear_faults();
    }
}

#[test]
fn a_launch_that_is_refused_is_made_up_for_by_copies_and_three_in_a_row_end_the_kernel() {
    let _bound = Watchdog::new(LIMIT);
    for method in BY_KERNEL {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _only = Only::by(method);
        let gpu = rig.memory(0, 256 << 10, 1);
        let pair = Pair::new(TransportKind::TCP, &gpu);
        let batch = scattered(&pair.region, &pair.to, 100, 1024);
        let write = || {
            pair.to.write_at(0, &vec![0; 256 << 10]).expect("inside");
            pair.peer.write(&batch, &options()).expect("written");
            let mut got = vec![0; 256 << 10];
            pair.to.read_at(0, &mut got).expect("inside");
            let sent = Pattern::new(1).bytes(256 << 10);
            let pieces = (0..100).map(|i| 2048 * i..2048 * i + 1024);
            pieces.for_each(|piece| assert!(got[piece.clone()] == sent[piece]));
        };
        rig.fake.fault(Fault::LaunchRefused, 1, 2);
        (0..3).for_each(|_| write());
        let counted = counters();
        assert_eq!((launches(&counted), counted.kernel_refused), (3, 0), "{counted:?}");
        rig.fake.fault(Fault::LaunchRefused, 1, u64::MAX);
        (0..5).for_each(|_| write());
        let counted = counters();
        assert_eq!((launches(&counted), counted.kernel_refused), (6, 1), "{counted:?}");
        assert_eq!(counted.kernel_refused_launch, 1, "{counted:?}");
        assert_eq!((counted.failed, counted.leaked), (0, 0), "{counted:?}");
        rig.fake.clear_faults();
        assert_eq!(rig.fake.findings(), Vec::<String>::new());
    }
}

#[test]
fn an_error_that_a_launch_did_not_cause_fails_no_transfer_of_others() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[("delay_us", "200")]) else { return };
    let _only = Only::by(Method::Gather);
    let gpu = rig.memory(0, 256 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let batch = scattered(&pair.region, &pair.to, 20, 1024);
    for at in 1..=24 {
        rig.fake.fault(Fault::ForeignError, at, 1);
        for write in [true, false] {
            let outcome = match write {
                true => pair.peer.write(&batch, &options()).map(drop),
                false => pair.peer.read(&batch, &options()).map(drop),
            };
            if let Err(error) = outcome {
                assert_eq!(error.quiesced(), Some(true), "call {at}: {error}");
                // Nothing copies any more, so that the test may use the memory.
                rig.fake.write(gpu.address(), &[at as u8; 8192]).expect("mapped");
            }
        }
        rig.fake.clear_faults();
        pair.peer.write(&batch, &options()).expect("written");
        assert_eq!(counters().leaked, 0, "call {at}");
    }
    assert_eq!(rig.fake.findings(), Vec::<String>::new());
}

#[test]
fn a_sticky_error_of_a_kernel_loses_its_gpu_and_no_other() {
    let _bound = Watchdog::new(LIMIT);
    for (method, fault) in
        [(Method::Kernel, Fault::IllegalAddress), (Method::Gather, Fault::LaunchFailed)]
    {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let only = Only::by(method);
        let (lost, well) = (rig.memory(0, 64 << 10, 1), rig.memory(1, 64 << 10, 2));
        let pairs = [&lost, &well].map(|gpu| Pair::new(TransportKind::TCP, gpu));
        let batches = [0, 1].map(|at| scattered(&pairs[at].region, &pairs[at].to, 20, 1024));
        for at in [0, 1] {
            pairs[at].peer.write(&batches[at], &options()).expect("written");
        }
        rig.fake.fault(fault, 1, 1);
        let error = pairs[0].peer.write(&batches[0], &options()).expect_err("the kernel fails");
        assert_eq!(error.quiesced(), Some(true), "{error}");
        rig.fake.clear_faults();
        let error = pairs[0].peer.read(&batches[0], &options()).expect_err("it is lost");
        assert!(format!("{error:?}").contains("restart the process"), "{error:?}");
        pairs[1].peer.write(&batches[1], &options()).expect("written");
        pairs.iter().for_each(|pair| pair.near.unregister(&pair.region).expect("nothing copies"));
        drop((pairs, batches, only));
        eventually("no GPU is in use", || Gpu::all().is_empty());
    }
}

#[test]
fn a_kernel_that_never_ends_leaves_its_memory_in_quarantine_and_its_transfer_ends() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _only = Only::by(Method::Kernel);
    let [near, far] = [(); 2].map(|()| impatient(TransportKind::TCP, Duration::from_millis(500)));
    let gpu = rig.memory(0, 64 << 10, 1);
    let region = register(&near, &gpu);
    let to = far.allocate(64 << 10, Access::READ_WRITE).expect("memory");
    let batch = scattered(&region, &to, 20, 1024);
    let peer = peer_of(&near, &far);
    let error = stalled(&rig, &peer, &batch);
    assert_eq!(error.quiesced(), Some(false), "{error}");
    let refused = near.unregister(&region).expect_err("the GPU may copy");
    assert_eq!(refused.kind(), ErrorKind::Quarantined);
    rig.fake.clear_faults();
    eventually("the kernel has ended", || !region.is_quarantined());
}

#[test]
fn a_transfer_that_is_cancelled_waits_for_its_kernels() {
    let _bound = Watchdog::new(LIMIT);
    for method in BY_KERNEL {
        let Some(rig) = FakeRig::new(&[("delay_us", "3000")]) else { return };
        let _only = Only::by(method);
        let len = 1 << 20;
        let gpu = rig.memory(0, len, 1);
        let pair = Pair::new(TransportKind::TCP, &gpu);
        let batch = scattered(&pair.region, &pair.to, 500, 1024);
        for write in [true, false] {
            let running = match write {
                true => pair.peer.write_async(&batch, &options()),
                false => pair.peer.read_async(&batch, &options()),
            };
            std::thread::sleep(Duration::from_millis(2));
            running.cancel();
            let _ = ended(&running);
        }
        pair.near.unregister(&pair.region).expect("nothing copies");
        // A late copy would change what is written now, or be found as a race.
        rig.fake.write(gpu.address(), &vec![5; len]).expect("mapped");
        std::thread::sleep(Duration::from_millis(50));
        assert!(rig.bytes(&gpu, 0, len).iter().all(|byte| *byte == 5), "{method:?}");
        assert_eq!(rig.fake.findings(), Vec::<String>::new());
    }
}

#[test]
fn the_kernel_comes_after_the_work_that_a_transfer_names_and_without_it_the_race_is_found() {
    let _bound = Watchdog::new(LIMIT);
    let len = 64 << 10;
    for method in BY_KERNEL {
        for is_ordered in [true, false] {
            let Some(rig) = FakeRig::new(&[]) else { return };
            let _only = Only::by(method);
            let gpu = rig.memory(0, len, 1);
            let pair = Pair::new(TransportKind::TCP, &gpu);
            // A first copy loads the kernel, which frees memory, and so waits for the device.
            let other = rig.memory(0, len, 2);
            let first = register(&pair.near, &other);
            pair.peer.write(&scattered(&first, &pair.to, 20, 1024), &options()).expect("written");
            let compute = Stream::new(&rig.context(0)).expect("a stream");
            if is_ordered {
                rig.hold();
            }
            let all = Some((gpu.address(), len as u64));
            let kernel = Kernel { name: "attention", writes: all, fill: 7, ..Kernel::default() };
            rig.launch(&compute, &kernel);
            let mut batch = scattered(&pair.region, &pair.to, 20, 1024);
            if is_ordered {
                // SAFETY: the stream exists.
                let edge = unsafe { Edge::after_stream(compute.raw(), 0) }.expect("an edge");
                batch.set_after(Edge::all([edge]));
            }
            let transfer = pair.peer.write_async(&batch, &options());
            if is_ordered {
                assert!(transfer.wait(Duration::from_millis(20)).is_none(), "it has not run");
                rig.release();
            }
            ended(&transfer).expect("written");
            let findings = rig.fake.findings();
            let is_found = findings.iter().any(|it| it.contains("attention"));
            assert_eq!((is_found, findings.is_empty()), (!is_ordered, is_ordered), "{findings:?}");
            rig.fake.clear_findings();
        }
    }
}

#[test]
fn batches_in_flight_have_tables_and_staging_of_their_own() {
    let _bound = Watchdog::new(LIMIT);
    for method in BY_KERNEL {
        let rig = Rig::new(&[("delay_us", "300")]);
        let only = Only::by(method);
        let (count, piece, len) = (200, 512, 256 << 10);
        let gpus: Vec<_> = (0..6).map(|seed| rig.memory(0, len, seed)).collect();
        let pairs: Vec<_> = gpus.iter().map(|gpu| Pair::new(TransportKind::TCP, gpu)).collect();
        for _ in 0..3 {
            let started: Vec<_> = pairs
                .iter()
                .map(|pair| {
                    let batch = scattered(&pair.region, &pair.to, count, piece);
                    pair.peer.write_async(&batch, &options())
                })
                .collect();
            started.iter().for_each(|transfer| ended(transfer).expect("written"));
        }
        for (seed, pair) in pairs.iter().enumerate() {
            let (mut got, sent) = (vec![0; len], Pattern::new(seed as u64).bytes(len));
            pair.to.read_at(0, &mut got).expect("inside");
            let mut pieces = (0..count).map(|i| 2 * i * piece..(2 * i + 1) * piece);
            assert!(pieces.all(|piece| got[piece.clone()] == sent[piece]), "{method:?} {seed}");
        }
        drop((pairs, gpus, only));
        rig.ends_clean();
        ends_without_modules(&rig);
    }
}

#[test]
fn an_idle_agent_that_has_used_the_kernel_calls_no_driver() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _only = Only::by(Method::Gather);
    let gpu = rig.memory(0, 64 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let batch = scattered(&pair.region, &pair.to, 20, 1024);
    pair.peer.write(&batch, &options()).expect("written");
    assert!(launches(&counters()) > 0);
    rig.becomes_idle(Duration::from_secs(2));
}
