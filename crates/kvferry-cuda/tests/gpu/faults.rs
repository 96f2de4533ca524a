//! Faults of the driver and the GPU: nothing hangs, nothing is reused too early, others go on.

use crate::hardware::alone;
use crate::kit::*;
use crate::machine::Kernel;
use kvferry::{Access, ErrorKind, TransportKind};
use kvferry_cuda::gpu::Settings;
use kvferry_cuda::{Edge, Error, Gpu};
use kvferry_fakecuda::Fault;
use kvferry_fakecuda::control::ALL_ENGINES;
use kvferry_sys::cuda::{DeviceAllocation, Stream};
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, eventually};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

const KINDS: [TransportKind; 2] = [TransportKind::TCP, TransportKind::LOCAL];

#[test]
fn a_sticky_error_ends_all_transfers_of_its_gpu_and_no_others() {
    let _bound = Watchdog::new(LIMIT);
    for kind in KINDS {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let (near, far) = (agent(kind), agent(kind));
        let (lost, well) = (rig.memory(0, 8192, 1), rig.memory(1, 8192, 2));
        let [lost_region, well_region] = [&lost, &well].map(|it| register(&near, it));
        let to = far.allocate(8192, Access::READ_WRITE).expect("memory");
        let peer = peer_of(&near, &far);
        let batches = [&lost_region, &well_region].map(|it| scattered(it, &to, 4, 1024));
        for batch in &batches {
            peer.write(batch, &options()).expect("written");
        }
        rig.fake.fault(Fault::IllegalAddress, 1, 1);
        let error = peer.write(&batches[0], &options()).expect_err("illegal address");
        assert!(format!("{error:?}").contains("ILLEGAL_ADDRESS"), "{error:?}");
        assert_eq!(error.quiesced(), Some(true), "{error}");
        rig.fake.clear_faults();
        // What comes later fails at once, and the other GPU goes on.
        let error = peer.read(&batches[0], &options()).expect_err("it is lost");
        assert!(format!("{error:?}").contains("restart the process"), "{error:?}");
        peer.write(&batches[1], &options()).expect("written");
        let refused = kvferry_cuda::memory(lost.address(), 8192, None);
        assert!(
            refused.is_err_and(|error| matches!(
                error,
                Error::Lost { device: 0, .. } | Error::Driver(_)
            ))
        );
        near.unregister(&lost_region).expect("nothing copies");
        near.unregister(&well_region).expect("nothing copies");
        drop((batches, lost_region, well_region));
        eventually("no GPU is in use", || Gpu::all().is_empty());
    }
}

#[test]
fn a_gpu_that_is_removed_ends_its_transfers_and_what_comes_later_says_that_it_is_lost() {
    let _bound = Watchdog::new(LIMIT);
    // What a driver reports then is not documented. Errors that say nothing of copies are in `files.rs`.
    for (i, code) in ["4", "214", "999"].into_iter().enumerate() {
        let Some(rig) = FakeRig::new(&[("removed_code", code)]) else { return };
        let kind = KINDS[i % 2];
        let (near, far) = (agent(kind), agent(kind));
        let (lost, well) =
            ([1, 2, 3, 4].map(|seed| rig.memory(0, 8192, seed)), rig.memory(1, 8192, 5));
        let regions = lost.each_ref().map(|it| register(&near, it));
        let well_region = register(&near, &well);
        let to = [(); 4].map(|()| far.allocate(8192, Access::READ_WRITE).expect("memory"));
        let peer = peer_of(&near, &far);
        let batches = [0, 1, 2, 3].map(|i| scattered(&regions[i], &to[i], 4, 1024));
        let compute = Stream::new(&rig.context(0)).expect("a stream");
        rig.fake.hold(ALL_ENGINES);
        let running = [0, 1, 2, 3].map(|i| match i % 2 {
            0 => peer.write_async(&batches[i], &options()),
            _ => peer.read_async(&batches[i], &options()),
        });
        eventually("the driver has a copy", || rig.fake.counter("pending") > 0);
        rig.fake.fault(Fault::DeviceRemoved, 1, 1);
        rig.release();
        let is_told = |text: &str| {
            text.contains(&format!("({code})")) || text.contains("restart the process")
        };
        for transfer in &running {
            let error = ended(transfer).expect_err("the GPU is gone");
            assert_eq!(error.quiesced(), Some(true), "{code}: {error}");
            assert_ne!(error.kind(), ErrorKind::Deadline, "{code}: {error}");
            assert!(is_told(&format!("{error:?}")), "{code}: {error:?}");
        }
        let gpu = Gpu::all().into_iter().find(|gpu| gpu.device() == 0).expect("it is in use");
        assert!(gpu.is_lost() && gpu.counters().leaked == 0, "{code}: {gpu:?}");
        let later = peer.write(&batches[0], &options()).expect_err("it is lost");
        assert!(format!("{later:?}").contains("restart the process"), "{code}: {later:?}");
        let is_lost = |error: Error| matches!(error, Error::Lost { device: 0, .. });
        assert!(kvferry_cuda::memory(lost[0].address(), 8192, None).is_err_and(is_lost), "{code}");
        // SAFETY: the stream exists.
        let edge = unsafe { Edge::after_stream(compute.raw(), 0) };
        assert!(edge.is_err_and(is_lost), "{code}");
        peer.write(&scattered(&well_region, &to[0], 4, 1024), &options()).expect("the other GPU");
        for region in regions.iter().chain([&well_region]) {
            near.unregister(region).expect("nothing copies");
        }
        rig.fake.clear_faults();
        drop((gpu, running, batches, regions, well_region, compute, lost, well));
        eventually("no GPU is in use", || Gpu::all().is_empty());
        assert_eq!(rig.findings(), Vec::<String>::new());
    }
}

#[test]
fn a_gpu_that_goes_while_its_copies_have_all_stages_ends_the_transfers_that_wait_for_one() {
    // The process never gets a GPU back that has gone. By this error, its copies may still write to their stages.
    alone(|| {
        let _bound = Watchdog::new(LIMIT);
        let Some(rig) = FakeRig::new(&[("removed_code", "46")]) else { return };
        let stages = Some(2);
        Settings::give(Some(Settings { stages, is_uncalibrated: true, ..Settings::default() }));
        let gpu = rig.memory(0, 8192, 1);
        let pairs = [0, 1, 2, 3, 4].map(|i| Pair::new(KINDS[i % 2], &gpu));
        let batches = pairs.each_ref().map(|it| scattered(&it.region, &it.to, 4, 1024));
        rig.fake.hold(ALL_ENGINES);
        let running = [0, 1].map(|i| pairs[i].peer.write_async(&batches[i], &options()));
        eventually("the driver has both stages", || counters().batches == 2);
        let waiting = [2, 3].map(|i| match i {
            2 => pairs[i].peer.write_async(&batches[i], &options()),
            _ => pairs[i].peer.read_async(&batches[i], &options()),
        });
        for transfer in &waiting {
            assert!(transfer.wait(Duration::from_millis(200)).is_none(), "no stage is free");
        }
        rig.fake.fault(Fault::DeviceRemoved, 1, 1);
        rig.release();
        let is_told = |error: &kvferry::Error| {
            assert_ne!(error.kind(), ErrorKind::Deadline, "{error}");
            assert_eq!(error.quiesced(), Some(true), "{error}");
            assert!(format!("{error:?}").contains("restart the process"), "{error:?}");
        };
        for transfer in &waiting {
            is_told(&ended(transfer).expect_err("the GPU is gone"));
        }
        is_told(&pairs[4].peer.write(&batches[4], &options()).expect_err("it is lost"));
        is_told(&pairs[4].peer.read(&batches[4], &options()).expect_err("it is lost"));
        eventually("copies that may still run are lost", || counters().leaked > 0);
        // The transfers with lost copies end when their agents' limit of silence has passed.
        std::mem::forget((running, waiting, batches, pairs, gpu));
    });
}

#[test]
fn a_batch_call_that_fails_in_the_middle_fails_its_transfer_after_what_it_has_begun() {
    let _bound = Watchdog::new(LIMIT);
    for kind in KINDS {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let len = 2 * 300 * 1024;
        let gpu = rig.memory(0, len, 1);
        let Pair { near, far: _far, region, to, peer } = Pair::new(kind, &gpu);
        let batch = scattered(&region, &to, 300, 1024);
        for write in [true, false] {
            rig.fake.fault(Fault::BatchEntry, 1, 1);
            let outcome = match write {
                true => peer.write(&batch, &options()).map(drop),
                false => peer.read(&batch, &options()).map(drop),
            };
            let error = outcome.expect_err("an entry fails");
            assert_eq!(error.quiesced(), Some(true), "{error}");
            rig.fake.clear_faults();
            peer.write(&batch, &options()).expect("written");
        }
        near.unregister(&region).expect("nothing copies");
        assert_eq!(rig.findings(), Vec::<String>::new());
    }
}

#[test]
fn a_copy_that_never_ends_leaves_its_memory_in_quarantine_and_its_transfer_ends() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let [near, far] = [(); 2].map(|()| impatient(TransportKind::TCP, Duration::from_millis(500)));
    let gpu = rig.memory(0, 8192, 1);
    let region = register(&near, &gpu);
    let to = far.allocate(8192, Access::READ_WRITE).expect("memory");
    let batch = scattered(&region, &to, 4, 1024);
    let peer = peer_of(&near, &far);
    let error = stalled(&rig, &peer, &batch);
    assert_eq!(error.quiesced(), Some(false), "{error}");
    let refused = near.unregister(&region).expect_err("the GPU may copy");
    assert_eq!(refused.kind(), ErrorKind::Quarantined);
    // The stream goes on: nothing is lost for ever.
    rig.fake.clear_faults();
    eventually("the copy has ended", || !region.is_quarantined() || counters_are_quiet());
}

fn counters_are_quiet() -> bool {
    Gpu::all().is_empty() || counters().leaked == 0
}

#[test]
fn memory_that_can_not_be_pinned_is_copied_one_piece_after_the_other() {
    let _bound = Watchdog::new(LIMIT);
    for fault in [Fault::PinOom, Fault::PinTooLong] {
        let Some(rig) = FakeRig::new(&[]) else { return };
        rig.fake.fault(fault, 1, u64::MAX / 2);
        let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
        let (count, piece) = (200, 1024);
        let len = 2 * count * piece;
        let gpu = rig.memory(0, len, 1);
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let batch = scattered(&register(&near, &gpu), &to, count, piece);
        let peer = peer_of(&near, &far);
        peer.write(&batch, &options()).expect("written");
        peer.read(&batch, &options()).expect("read");
        let (mut got, sent) = (vec![0; len], Pattern::new(1).bytes(len));
        to.read_at(0, &mut got).expect("inside");
        assert!(
            (0..count).map(|i| 2 * i * piece).all(|at| got[at..at + piece] == sent[at..at + piece])
        );
        let counters = counters();
        assert!(counters.unpinned_stages > 0 && counters.pinned_stages == 0, "{counters:?}");
        let by_reason = match fault {
            Fault::PinOom => counters.unpinned_memory,
            _ => counters.unpinned_other,
        };
        assert_eq!(by_reason, counters.unpinned_stages, "{fault:?}: {counters:?}");
        assert_eq!(counters.batch_calls, 0, "{fault:?}");
        rig.fake.clear_faults();
        drop((near, far, batch, peer, to));
        eventually("no GPU is in use", || Gpu::all().is_empty());
    }
}

#[test]
fn a_context_that_is_destroyed_under_load_ends_all_transfers_of_its_gpu_and_no_others() {
    let _bound = Watchdog::new(LIMIT);
    for kind in KINDS {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let (near, far) = (agent(kind), agent(kind));
        let (lost, well) = ([(); 8].map(|()| rig.memory(0, 8192, 1)), rig.memory(1, 8192, 2));
        let lost_regions = lost.each_ref().map(|it| register(&near, it));
        let well_region = register(&near, &well);
        let to = [(); 8].map(|()| far.allocate(8192, Access::READ_WRITE).expect("memory"));
        let peer = peer_of(&near, &far);
        let batches =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|i| scattered(&lost_regions[i], &to[i], 4, 1024));
        rig.fake.hold(ALL_ENGINES);
        let running: Vec<_> = (0..8)
            .map(|i| match i % 2 {
                0 => peer.write_async(&batches[i], &options()),
                _ => peer.read_async(&batches[i], &options()),
            })
            .collect();
        eventually("the driver has a copy", || rig.fake.counter("pending") > 0);
        rig.fake.destroy_context(0);
        for transfer in &running {
            let error = ended(transfer).expect_err("the context is gone");
            assert_eq!(error.quiesced(), Some(true), "{error}");
            let text = format!("{error:?}");
            let is_told = ["CONTEXT_IS_DESTROYED", "restart the process"];
            assert!(is_told.iter().any(|it| text.contains(it)), "{text}");
        }
        rig.release();
        let batch = scattered(&well_region, &to[0], 4, 1024);
        peer.write(&batch, &options()).expect("written");
        for region in lost_regions.iter().chain([&well_region]) {
            near.unregister(region).expect("nothing copies");
        }
        drop((running, batches, batch, lost_regions, well_region, lost, well));
        rig.releases_contexts();
        assert_eq!(rig.findings(), Vec::<String>::new());
    }
}

#[test]
fn a_call_that_finds_its_context_destroyed_fails_its_transfers_at_most_and_leaks_nothing() {
    let _bound = Watchdog::new(LIMIT);
    for at in 1..=24 {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let gpu = rig.memory(0, 8192, 1);
        let Pair { near, far, region, to, peer } = Pair::new(KINDS[at % 2], &gpu);
        let batch = scattered(&region, &to, 4, 1024);
        rig.fake.fault(Fault::ContextDestroyed, at as u64, 1);
        for write in [true, false, true] {
            let outcome = match write {
                true => peer.write(&batch, &options()).map(drop),
                false => peer.read(&batch, &options()).map(drop),
            };
            if let Err(error) = outcome {
                assert_eq!(error.quiesced(), Some(true), "call {at}: {error}");
            }
        }
        assert_eq!(counters().leaked, 0, "call {at}");
        near.unregister(&region).expect("nothing copies");
        drop((near, far, region, to, peer, batch, gpu));
        rig.releases_contexts();
        rig.fake.clear_faults();
        assert_eq!(rig.findings(), Vec::<String>::new(), "call {at}");
    }
}

#[test]
fn a_slow_stream_of_one_gpu_slows_no_other_gpu() {
    let _bound = Watchdog::new(LIMIT);
    // A call of a slow stream takes up to 11 days.
    let Some(rig) = FakeRig::new(&[("delay_us", "1000"), ("slow_times", "1000000000")]) else {
        return;
    };
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let len = 2 * 32 * 4096;
    let gpus = [0, 1].map(|device| rig.memory(device, len, 1 + device as u64));
    let regions = gpus.each_ref().map(|it| register(&near, it));
    let to = [(); 2].map(|()| far.allocate(len, Access::READ_WRITE).expect("memory"));
    let peer = peer_of(&near, &far);
    let [slow, quick] = [0, 1].map(|i| scattered(&regions[i], &to[i], 32, 4096));
    // Two streams for each direction.
    rig.fake.fault(Fault::StreamSlow, 1, 4);
    let running = peer.write_async(&slow, &options());
    eventually("the driver has a copy", || rig.fake.counter("pending") > 0);
    assert_eq!(rig.fake.counter("hit:stream_slow"), 4);
    for _ in 0..5 {
        peer.write(&quick, &options()).expect("written");
        peer.read(&quick, &options()).expect("read");
    }
    assert!(running.wait(Duration::ZERO).is_none(), "it takes days");
    rig.fake.clear_faults();
    ended(&running).expect("written");
    for (to, seed) in to.iter().zip([1, 2]) {
        let (mut got, sent) = (vec![0; len], Pattern::new(seed).bytes(len));
        to.read_at(0, &mut got).expect("inside");
        let mut pieces = (0..32).map(|i| 2 * i * 4096);
        assert!(pieces.all(|at| got[at..at + 4096] == sent[at..at + 4096]), "{seed}");
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn an_agent_that_is_shut_down_while_the_gpu_is_slow_waits_for_its_copies() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[("delay_us", "3000")]) else { return };
    let len = 8 << 20;
    let gpu = rig.memory(0, len, 1);
    let Pair { near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let batch = scattered(&region, &to, 1000, 4096);
    for write in [true, false] {
        let running = match write {
            true => peer.write_async(&batch, &options()),
            false => peer.read_async(&batch, &options()),
        };
        std::thread::sleep(Duration::from_millis(2));
        running.cancel();
        let _ = ended(&running);
    }
    near.unregister(&region).expect("nothing copies");
    // A late copy would change what is written now, or be found as a race.
    rig.write(&gpu, 0, &vec![5; len]);
    std::thread::sleep(Duration::from_millis(50));
    assert!(rig.bytes(&gpu, 0, len).iter().all(|byte| *byte == 5));
    near.shutdown();
    let memory: &DeviceAllocation = &gpu;
    assert_eq!(memory.len(), len);
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn an_error_that_a_call_did_not_cause_fails_its_transfer_at_most() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[("delay_us", "200")]) else { return };
    let gpu = rig.memory(0, 8192, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let batch = scattered(&region, &to, 4, 1024);
    for at in 1..=30 {
        rig.fake.fault(Fault::ForeignError, at, 1);
        for write in [true, false] {
            let outcome = match write {
                true => peer.write(&batch, &options()).map(drop),
                false => peer.read(&batch, &options()).map(drop),
            };
            if let Err(error) = outcome {
                assert_eq!(error.quiesced(), Some(true), "call {at}: {error}");
                // Nothing copies, so that the memory may be used.
                rig.write(&gpu, 0, &[at as u8; 8192]);
            }
        }
        rig.fake.clear_faults();
        let outcome = peer.write(&batch, &options());
        assert!(outcome.is_ok(), "call {at}: {outcome:?}");
        assert_eq!(counters().leaked, 0, "call {at}");
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn an_event_that_never_signals_holds_up_no_batch_behind_it() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let (gpu, other) = (rig.memory(0, 8192, 1), rig.memory(0, 8192, 2));
    let Pair { near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let behind = Pair::new(TransportKind::TCP, &other);
    let batch = scattered(&region, &to, 4, 1024);
    peer.write(&batch, &options()).expect("written");
    let records = || rig.fake.counter("call:cuEventRecord");
    let before = records();
    rig.fake.hold(ALL_ENGINES);
    rig.fake.fault(Fault::EventNeverSignals, 1, 1);
    let first = peer.write_async(&batch, &options());
    eventually("the driver has the first", || records() == before + 1);
    let second = peer.write_async(&batch, &options());
    eventually("the driver has the second", || records() == before + 2);
    // The stream never comes to its end meanwhile.
    let stalls = || rig.fake.counter("hit:stream_stalls");
    let stalled = stalls();
    rig.fake.fault(Fault::StreamStalls, 1, 1);
    let third = scattered(&behind.region, &behind.to, 4, 1024);
    let third = behind.peer.write_async(&third, &options());
    eventually("the stream stalls", || stalls() == stalled + 1);
    rig.release();
    ended(&second).expect("written");
    ended(&first).expect("what was before it in the stream has ended, too");
    assert!(third.wait(Duration::ZERO).is_none(), "its copy has stalled");
    rig.fake.clear_faults();
    ended(&third).expect("written");
    near.unregister(&region).expect("nothing copies");
}

#[test]
fn a_batch_alone_ends_though_its_event_never_signals() {
    let _bound = Watchdog::new(LIMIT);
    for kind in KINDS {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let gpu = rig.memory(0, 8192, 1);
        let Pair { near, far: _far, region, to, peer } = Pair::new(kind, &gpu);
        let batch = scattered(&region, &to, 4, 1024);
        let hits = || rig.fake.counter("hit:event_never_signals");
        let before = hits();
        rig.fake.fault(Fault::EventNeverSignals, 1, 2);
        peer.write(&batch, &options()).expect("the stream tells of its end");
        peer.read(&batch, &options()).expect("the stream tells of its end");
        assert_eq!(hits(), before + 2);
        assert_eq!(counters().leaked, 0);
        near.unregister(&region).expect("nothing copies");
        rig.fake.clear_faults();
        assert_eq!(rig.findings(), Vec::<String>::new());
    }
}

/// Panics at each warning, as a broken subscriber of a program may, while a test has said so.
struct Panics;

static PANICS: AtomicBool = AtomicBool::new(false);

impl tracing::Subscriber for Panics {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let is_of_gpu = event.metadata().target().starts_with("kvferry_cuda::gpu");
        if is_of_gpu && PANICS.swap(false, SeqCst) {
            panic!("a subscriber panics");
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_panic_of_the_thread_of_a_gpu_ends_what_no_driver_has() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let gpu = rig.memory(0, 8192, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    rig.hold();
    rig.launch(&compute, &Kernel { name: "stuck", ..Kernel::default() });
    let mut batch = scattered(&region, &to, 4, 1024);
    // SAFETY: the stream exists.
    batch.set_after(Edge::all([unsafe { Edge::after_stream(compute.raw(), 0) }.expect("an edge")]));
    let waits = peer.write_async(&batch, &options());
    assert!(waits.wait(Duration::from_millis(20)).is_none(), "the kernel has not run");
    tracing::subscriber::set_global_default(Panics).expect("the first");
    PANICS.store(true, SeqCst);
    rig.fake.fault(Fault::PinOom, 1, 1);
    let error = peer.write(&scattered(&region, &to, 4, 1024), &options()).expect_err("a panic");
    assert_eq!(error.quiesced(), Some(true), "{error}");
    let error = ended(&waits).expect_err("the thread is gone");
    assert!(format!("{error:?}").contains("has panicked"), "{error:?}");
    rig.release();
}
