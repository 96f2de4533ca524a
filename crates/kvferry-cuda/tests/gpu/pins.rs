//! Stages are pinned ahead while a GPU has nothing to copy, and there are as many as a setting allows. Those beyond are
//! unpinned once nothing was copied for a while.

use crate::kit::*;
use kvferry::TransportKind;
use kvferry_cuda::gpu::{STAGE_BYTES, Settings};
use kvferry_cuda::{Gpu, Method};
use kvferry_fakecuda::Fault;
use kvferry_fakecuda::control::DEVICE_TO_HOST;
use kvferry_sys::HostSpan;
use kvferry_sys::cuda::{DeviceAllocation, HostRegistration};
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, eventually};
use std::ops::Range;
use std::time::Duration;

/// Settings that hold until the value is dropped.
struct Given;

impl Given {
    fn new(stages: Option<usize>, pin_ahead: usize) -> Self {
        // The copy engine pins no memory of its own.
        let method = Some(Method::Batch);
        Settings::give(Some(Settings { method, stages, pin_ahead, ..Settings::default() }));
        Self
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        Settings::give(None);
    }
}

/// Times that the GPU's thread has gone to sleep. `None` while it can't be told.
fn sleeps() -> Option<u64> {
    let mut threads = std::fs::read_dir("/proc/self/task").expect("this is Linux");
    let status = threads.find_map(|thread| {
        let thread = thread.ok()?.path();
        let name = std::fs::read_to_string(thread.join("comm")).ok()?;
        let is_gpus = name.trim_end() == "kvferry-gpu";
        is_gpus.then(|| std::fs::read_to_string(thread.join("status")).ok())?
    })?;
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

/// Calls of the driver that have pinned memory.
fn pins(rig: &FakeRig) -> u64 {
    rig.fake.counter("call:cuMemHostRegister_v2")
}

#[test]
fn stages_are_pinned_while_nothing_is_copied_and_the_first_transfers_pin_none() {
    let _bound = Watchdog::new(LIMIT);
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _given = Given::new(None, 4);
        let (len, before) = (1 << 20, pins(&rig));
        let gpu = rig.memory(0, len, 1);
        let pair = Pair::new(kind, &gpu);
        eventually("stages are pinned", || counters().pinned_stages == 4);
        rig.becomes_idle(Duration::from_millis(500));
        assert_eq!(pins(&rig), before + 4, "{kind}");
        let batch = whole(&pair.region, &pair.to, len);
        pair.peer.write(&batch, &options()).expect("written");
        pair.peer.read(&batch, &options()).expect("read");
        assert_eq!(pins(&rig), before + 4, "{kind}: a transfer has pinned a stage");
        assert_eq!(counters().pinned_stages, 4, "{kind}");
        // An agent with memory of a GPU and without transfers calls no driver.
        rig.becomes_idle(Duration::from_secs(2));
        drop((pair, batch, gpu));
        rig.ends_clean();
    }
}

#[test]
fn stages_that_were_pinned_ahead_and_never_used_are_given_back_with_the_last_memory() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(None, 4);
    let gpu = rig.memory(0, 1 << 20, 1);
    let agent = agent(TransportKind::TCP);
    let region = register(&agent, &gpu);
    eventually("stages are pinned", || counters().pinned_stages == 4);
    assert_eq!(rig.fake.counter("streams"), 0, "nothing is copied");
    agent.unregister(&region).expect("nothing copies");
    drop((region, agent, gpu));
    rig.ends_clean();
}

#[test]
fn two_stages_move_64_mib_both_ways_and_no_more_memory_is_pinned() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 8);
    let len = 64 << 20;
    let gpu = rig.memory(0, len, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    eventually("stages are pinned", || counters().pinned_stages == 2);
    let batch = whole(&pair.region, &pair.to, len);
    pair.peer.write(&batch, &options()).expect("written");
    let sent = Pattern::new(1).bytes(len);
    let mut got = vec![0; len];
    pair.to.read_at(0, &mut got).expect("inside");
    assert!(got == sent, "out");
    let sent = Pattern::new(2).bytes(len);
    pair.to.write_at(0, &sent).expect("inside");
    pair.peer.read(&batch, &options()).expect("read");
    assert!(rig.bytes(&gpu, 0, len) == sent, "in");
    assert_eq!(rig.fake.counter("host_registered_bytes"), 2 * STAGE_BYTES as u64);
    assert_eq!((counters().pinned_stages, counters().unpinned_stages), (2, 0));
    drop((pair, batch, gpu));
    rig.ends_clean();
}

#[test]
fn a_stage_that_can_not_be_pinned_ahead_ends_the_pinning_and_no_transfer() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(None, 4);
    rig.fake.fault(Fault::PinOom, 2, 1);
    let len = 1 << 20;
    let gpu = rig.memory(0, len, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    eventually("a stage is refused", || counters().unpinned_stages == 1);
    rig.becomes_idle(Duration::from_millis(500));
    assert_eq!((counters().pinned_stages, counters().unpinned_memory), (1, 1));
    pair.peer.write(&whole(&pair.region, &pair.to, len), &options()).expect("written");
    let mut got = vec![0; len];
    pair.to.read_at(0, &mut got).expect("inside");
    assert!(got == Pattern::new(1).bytes(len));
    rig.fake.clear_faults();
}

/// Time without a copy after which stages are unpinned here.
const BRIEF: Duration = Duration::from_millis(50);
/// Agents that write at the same time, each from four stages or more.
const WRITERS: usize = 4;

#[test]
fn stages_beyond_those_pinned_ahead_are_unpinned_when_the_gpu_is_idle_and_pinned_when_used_again() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let given = Settings {
        method: Some(Method::Batch),
        pin_ahead: 8,
        unpin_after: Some(BRIEF),
        ..Settings::default()
    };
    Settings::give(Some(given));
    let _given = Given;
    let len = (64 << 20) / WRITERS;
    let gpus: Vec<_> = (0..WRITERS).map(|_| rig.memory(0, len, 1)).collect();
    let pairs: Vec<_> = gpus.iter().map(|gpu| Pair::new(TransportKind::TCP, gpu)).collect();
    for seed in [2, 3] {
        eventually("stages are pinned ahead", || counters().pinned_stages == 8);
        let calls = pins(&rig);
        gpus.iter().for_each(|gpu| rig.write(gpu, 0, &Pattern::new(seed).bytes(len)));
        rig.fake.hold(DEVICE_TO_HOST);
        let transfers: Vec<_> = pairs
            .iter()
            .map(|pair| {
                let batch = whole(&pair.region, &pair.to, len);
                (pair.peer.write_async(&batch, &options()), batch)
            })
            .collect();
        eventually("copies are held in 16 stages", || counters().pinned_stages >= 16);
        let used = counters().pinned_stages;
        std::thread::sleep(10 * BRIEF);
        assert!(counters().pinned_stages >= used, "a stage that a copy has was unpinned");
        rig.release();
        for (transfer, _) in &transfers {
            ended(transfer).expect("written");
        }
        for pair in &pairs {
            let mut got = vec![0; len];
            pair.to.read_at(0, &mut got).expect("inside");
            assert!(got == Pattern::new(seed).bytes(len), "seed {seed}");
        }
        assert!(pins(&rig) >= calls + 8, "stages were pinned anew");
        drop(transfers);
        let pinned = || rig.fake.counter("host_registered_bytes");
        eventually("stages are unpinned", || pinned() == 8 * STAGE_BYTES as u64);
        eventually("they are not counted", || counters().pinned_stages == 8);
        assert_eq!((counters().unpinned_stages, rig.fake.counter("unpinned_in_use")), (0, 0));
    }
    // Nothing wakes the thread any more.
    rig.becomes_idle(Duration::from_millis(500));
    eventually("the thread sleeps", || {
        let before = sleeps();
        std::thread::sleep(10 * BRIEF);
        before.is_some() && sleeps() == before
    });
    drop((pairs, gpus));
}

#[test]
fn the_first_use_of_a_stage_that_was_not_pinned_ahead_pins_it() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 2);
    rig.fake.fault(Fault::PinOom, 1, 1);
    let gpu = rig.memory(0, 64 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    eventually("a stage is refused", || counters().unpinned_memory == 1);
    moves_both_ways(&rig, &pair, &gpu);
    assert_eq!((counters().pinned_stages, counters().unpinned_stages), (1, 1));
    drop((pair, gpu));
    rig.ends_clean();
}

#[test]
fn a_stage_that_was_refused_is_pinned_when_it_is_used_later() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 0);
    rig.fake.fault(Fault::PinOom, 1, 1);
    let gpu = rig.memory(0, 64 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let batch = whole(&pair.region, &pair.to, gpu.len());
    pair.peer.write(&batch, &options()).expect("written");
    let counted = counters();
    assert_eq!((counted.pinned_stages, counted.unpinned_memory), (0, 1));
    eventually("the stage is tried again", || {
        pair.peer.write(&batch, &options()).expect("written");
        counters().pinned_stages == 1
    });
    moves_both_ways(&rig, &pair, &gpu);
    assert_eq!((counters().pinned_stages, counters().unpinned_stages), (1, 1));
    rig.fake.clear_faults();
    drop((pair, batch, gpu));
    rig.ends_clean();
}

/// A registration of bytes of the first stage, in the place of one of other memory that was unmapped later.
fn stale(rig: &FakeRig, gpu: &DeviceAllocation, bytes: Range<usize>) -> HostRegistration {
    let memory = kvferry_cuda::memory(gpu.address(), gpu.len() as u64, None).expect("a GPU");
    let at = memory.stages().as_ptr().wrapping_add(bytes.start);
    // SAFETY: the stages stay mapped as long as a region of the GPU, and the span is only registered.
    let span = unsafe { HostSpan::new(at, bytes.len()) };
    // SAFETY: as above.
    unsafe { HostRegistration::new(&rig.context(0), span) }.expect("registered")
}

/// Reads and writes all of the memory, and checks the bytes.
fn moves_both_ways(rig: &FakeRig, pair: &Pair, gpu: &DeviceAllocation) {
    let batch = whole(&pair.region, &pair.to, gpu.len());
    let sent = Pattern::new(2).bytes(gpu.len());
    pair.to.write_at(0, &sent).expect("inside");
    pair.peer.read(&batch, &options()).expect("read");
    assert!(rig.bytes(gpu, 0, gpu.len()) == sent, "in");
    let sent = Pattern::new(3).bytes(gpu.len());
    rig.write(gpu, 0, &sent);
    pair.peer.write(&batch, &options()).expect("written");
    let mut got = vec![0; gpu.len()];
    pair.to.read_at(0, &mut got).expect("inside");
    assert!(got == sent, "out");
}

#[test]
fn a_registration_that_has_outlived_its_memory_is_ended_and_the_stage_there_is_pinned() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 0);
    let gpu = rig.memory(0, 64 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let stale = stale(&rig, &gpu, 0..8192);
    moves_both_ways(&rig, &pair, &gpu);
    let counted = counters();
    assert_eq!((counted.pinned_stages, counted.unpinned_stages), (1, 0));
    assert_eq!(rig.fake.counter("host_registered_bytes"), STAGE_BYTES as u64);
    drop(pair);
    eventually("the stage is unpinned", || rig.fake.counter("host_registrations") == 0);
    drop((stale, gpu));
    rig.ends_clean();
}

#[test]
fn nothing_is_copied_through_a_stage_that_the_driver_has_for_registered() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 0);
    let gpu = rig.memory(0, 64 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    // It does not begin where the stage does, so that it can't be ended.
    let stale = stale(&rig, &gpu, 4096..8192);
    moves_both_ways(&rig, &pair, &gpu);
    let counted = counters();
    assert_eq!((counted.pinned_stages, counted.unpinned_stages), (1, 1));
    assert_eq!(counted.unpinned_registered, 1);
    assert_eq!(rig.fake.counter("host_registered_bytes"), STAGE_BYTES as u64 + 4096);
    drop(pair);
    eventually("the stage is unpinned", || rig.fake.counter("host_registrations") == 1);
    drop((stale, gpu));
    rig.ends_clean();
}

#[test]
fn a_stage_that_the_driver_has_for_registered_fails_no_transfer_though_all_others_are_in_use() {
    let _bound = Watchdog::new(LIMIT);
    // Each transfer has one batch and one stage. The last stage is the bad one.
    for stages in [2, 8] {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _given = Given::new(Some(stages), 0);
        let gpu = rig.memory(0, 64 << 10, 1);
        let pairs: Vec<_> = (0..stages).map(|_| Pair::new(TransportKind::TCP, &gpu)).collect();
        let begin = (stages - 1) * STAGE_BYTES;
        let stale = stale(&rig, &gpu, begin + 4096..begin + 8192);
        rig.fake.hold(DEVICE_TO_HOST);
        let transfers: Vec<_> = pairs
            .iter()
            .map(|pair| {
                let batch = whole(&pair.region, &pair.to, gpu.len());
                (pair.peer.write_async(&batch, &options()), batch)
            })
            .collect();
        eventually("all stages are in use", || counters().batches == stages as u64);
        assert_eq!(counters().unpinned_registered, 1, "{stages}");
        assert_eq!(counters().pinned_stages, stages as u64, "one in reserve has its place");
        rig.release();
        for (transfer, _) in &transfers {
            ended(transfer).expect("written");
        }
        for pair in &pairs {
            let mut got = vec![0; gpu.len()];
            pair.to.read_at(0, &mut got).expect("inside");
            assert!(got == Pattern::new(1).bytes(gpu.len()), "{stages}");
        }
        drop((transfers, pairs));
        eventually("the stages are unpinned", || rig.fake.counter("host_registrations") == 1);
        drop((stale, gpu));
        rig.ends_clean();
    }
}

#[test]
fn a_long_transfer_succeeds_with_two_stages_of_which_one_can_not_be_used() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 0);
    let gpu = rig.memory(0, 16 << 20, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let stale = stale(&rig, &gpu, STAGE_BYTES + 4096..STAGE_BYTES + 8192);
    let batch = whole(&pair.region, &pair.to, gpu.len());
    rig.fake.hold(DEVICE_TO_HOST);
    let running = pair.peer.write_async(&batch, &options());
    eventually("both stages are in use", || counters().batches == 2);
    rig.release();
    ended(&running).expect("written");
    moves_both_ways(&rig, &pair, &gpu);
    assert_eq!((counters().unpinned_registered, counters().failed), (1, 0));
    drop((running, batch, pair));
    eventually("the stages are unpinned", || rig.fake.counter("host_registrations") == 1);
    drop((stale, gpu));
    rig.ends_clean();
}

/// Registrations of bytes of every stage in reserve, so that none takes the place of another stage.
fn stale_reserve(rig: &FakeRig, gpu: &DeviceAllocation) -> Vec<HostRegistration> {
    let memory = kvferry_cuda::memory(gpu.address(), gpu.len() as u64, None).expect("a GPU");
    let reserve = memory.stages().stages()..memory.stages().all_stages();
    let begins = reserve.map(|stage| stage * STAGE_BYTES);
    begins.map(|begin| stale(rig, gpu, begin + 4096..begin + 8192)).collect()
}

#[test]
fn without_a_reserve_a_stage_that_can_not_be_used_fails_one_transfer_and_no_later_one() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 0);
    let gpu = rig.memory(0, 64 << 10, 1);
    let [well, bad, later] = [(); 3].map(|()| Pair::new(TransportKind::TCP, &gpu));
    let reserve = stale_reserve(&rig, &gpu);
    let stale = stale(&rig, &gpu, STAGE_BYTES + 4096..STAGE_BYTES + 8192);
    let batches = [&well, &bad, &later].map(|it| whole(&it.region, &it.to, gpu.len()));
    rig.fake.hold(DEVICE_TO_HOST);
    let running = well.peer.write_async(&batches[0], &options());
    eventually("the first stage is in use", || counters().batches == 1);
    let error = bad.peer.write(&batches[1], &options()).expect_err("no stage");
    assert!(format!("{error:?}").contains("has no host memory to copy through"), "{error:?}");
    // It waits for the first stage, or gets it later.
    let next = later.peer.write_async(&batches[2], &options());
    rig.release();
    ended(&running).expect("written");
    ended(&next).expect("written");
    for _ in 0..3 {
        moves_both_ways(&rig, &bad, &gpu);
    }
    assert_eq!((counters().failed, counters().pinned_stages), (1, 1));
    drop((running, next, batches, well, bad, later));
    let left = reserve.len() as u64 + 1;
    eventually("the stages are unpinned", || rig.fake.counter("host_registrations") == left);
    drop((stale, reserve, gpu));
    rig.ends_clean();
}

#[test]
fn a_stage_that_the_driver_has_for_registered_does_not_end_the_pinning_ahead() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(None, 4);
    rig.fake.fault(Fault::PinTwice, 2, 2);
    let gpu = rig.memory(0, 64 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    eventually("the others are pinned", || counters().pinned_stages == 3);
    rig.becomes_idle(Duration::from_millis(500));
    assert_eq!((counters().pinned_stages, counters().unpinned_registered), (3, 1));
    let memory = kvferry_cuda::memory(gpu.address(), gpu.len() as u64, None).expect("a GPU");
    eventually("a stage in reserve is free", || memory.stages().free() == memory.stages().stages());
    moves_both_ways(&rig, &pair, &gpu);
    assert_eq!(counters().failed, 0);
    rig.fake.clear_faults();
    drop((pair, memory, gpu));
    rig.ends_clean();
}

#[test]
fn without_a_stage_that_can_be_used_transfers_fail_and_say_so() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 0);
    rig.fake.fault(Fault::PinTwice, 1, u64::MAX / 2);
    let gpu = rig.memory(0, 64 << 10, 1);
    let pair = Pair::new(TransportKind::TCP, &gpu);
    let memory = kvferry_cuda::memory(gpu.address(), gpu.len() as u64, None).expect("a GPU");
    let all = memory.stages().all_stages() as u64;
    let batch = whole(&pair.region, &pair.to, gpu.len());
    for write in [true, false, true] {
        let outcome = match write {
            true => pair.peer.write(&batch, &options()).map(drop),
            false => pair.peer.read(&batch, &options()).map(drop),
        };
        let error = outcome.expect_err("no stage");
        assert_eq!(error.quiesced(), Some(true), "{error}");
        assert!(format!("{error:?}").contains("has no host memory to copy through"), "{error:?}");
    }
    let counted = counters();
    assert_eq!((counted.unpinned_registered, counted.unpinned_stages), (all, all));
    assert_eq!((counted.batches, counted.failed), (0, 3));
    rig.fake.clear_faults();
    drop((pair, batch, memory, gpu));
    rig.ends_clean();
}

#[test]
fn pinning_that_finds_the_context_destroyed_loses_the_gpu_before_anything_is_copied() {
    let _bound = Watchdog::new(LIMIT);
    let mut found = 0;
    for at in 1..=24 {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _given = Given::new(Some(2), 0);
        let gpu = rig.memory(0, 64 << 10, 1);
        let pair = Pair::new(TransportKind::TCP, &gpu);
        let batch = whole(&pair.region, &pair.to, gpu.len());
        rig.fake.fault(Fault::ContextDestroyed, at, 1);
        let outcome = pair.peer.write(&batch, &options());
        rig.fake.clear_faults();
        let counted = counters();
        if counted.unpinned_stages > 0 {
            found += 1;
            outcome.expect_err("the context is gone");
            assert_eq!((counted.unpinned_other, counted.batches), (1, 0), "call {at}");
        }
        drop((pair, batch, gpu));
        eventually("no GPU is in use", || Gpu::all().is_empty());
        rig.releases_contexts();
    }
    assert!(found > 0, "no call that pins was struck");
}

/// Everything of one GPU to another at the same time as everything of that one to this.
#[test]
fn two_stages_of_each_gpu_are_enough_for_two_pairs_of_gpus_at_a_time() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let _given = Given::new(Some(2), 0);
    let len = 16 << 20;
    let gpus = [(0, 1), (1, 2), (1, 3), (0, 4)].map(|(device, seed)| rig.memory(device, len, seed));
    let agents = [(); 4].map(|()| agent(TransportKind::TCP));
    let regions = [0, 1, 2, 3].map(|i| register(&agents[i], &gpus[i]));
    // The first of each pair writes to the second, and reads from it.
    let pairs = [(0, 1), (2, 3)];
    let peers = pairs.map(|(near, far)| peer_of(&agents[near], &agents[far]));
    let batches = pairs.map(|(near, far)| whole(&regions[near], &regions[far], len));
    let written = [0, 1].map(|i| peers[i].write_async(&batches[i], &options()));
    written.iter().for_each(|transfer| ended(transfer).expect("written"));
    for ((near, far), seed) in pairs.into_iter().zip([1, 3]) {
        assert!(rig.bytes(&gpus[far], 0, len) == Pattern::new(seed).bytes(len), "{near} to {far}");
        rig.write(&gpus[far], 0, &Pattern::new(10 + seed).bytes(len));
    }
    let read = [0, 1].map(|i| peers[i].read_async(&batches[i], &options()));
    read.iter().for_each(|transfer| ended(transfer).expect("read"));
    for ((near, far), seed) in pairs.into_iter().zip([11, 13]) {
        assert!(rig.bytes(&gpus[near], 0, len) == Pattern::new(seed).bytes(len), "{far} to {near}");
    }
    assert!(rig.fake.counter("host_registered_bytes") <= 4 * STAGE_BYTES as u64);
    drop((written, read, batches, peers, regions, agents, gpus));
    rig.ends_clean();
}
