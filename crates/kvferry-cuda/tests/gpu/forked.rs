//! A forked child of a process that uses a GPU: old handles are refused, an agent of its own works, and nothing calls the
//! driver or waits for a thread of the parent.

use crate::hardware::alone;
use crate::kit::*;
use kvferry::{Access, Agent, Batch, ErrorKind, Region, TransportKind};
use kvferry_cuda::{Edge, Error, Gpu, Order};
use kvferry_sys::cuda::{Driver, Stream};
use kvferry_sys::host::LoadedDriver;
use kvferry_testkit::Watchdog;
use kvferry_testkit::forked::in_forked_process;
use kvferry_testkit::pattern::Pattern;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const LEN: usize = 64 << 10;

fn is_forked(outcome: Result<(), kvferry::Error>) -> bool {
    outcome.is_err_and(|why| why.kind() == ErrorKind::Forked)
}

fn is_refused(outcome: Result<(), Error>) -> bool {
    outcome.is_err_and(|why| matches!(why, Error::Driver(it) if it.is_forked()))
}

/// Registers memory of the test with an agent.
fn of_host(agent: &Agent, bytes: &mut [u8]) -> Region {
    // SAFETY: the tests keep the memory until the agent is shut down, or the process ends.
    let region = unsafe { agent.register(bytes.as_mut_ptr(), bytes.len(), Access::NONE) };
    region.expect("host memory")
}

#[test]
fn a_forked_child_calls_no_driver_and_its_own_agent_moves_host_memory() {
    alone(|| {
        let _bound = Watchdog::new(LIMIT);
        let Some(rig) = FakeRig::new(&[]) else { return };
        let (gpu, unused) = (rig.memory(0, LEN, 1), rig.memory(1, LEN, 2));
        let Pair { near, far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
        let batch = whole(&region, &to, LEN);
        peer.write(&batch, &options()).expect("written");
        let stream = Stream::new(&rig.context(0)).expect("a stream");
        let raw = stream.raw();
        // SAFETY: the stream exists.
        let edge = unsafe { Edge::after_stream(raw, 0) }.expect("an edge");
        // The only memory of its GPU, which is dropped with it.
        let only = kvferry_cuda::memory(unused.address(), LEN as u64, None).expect("a GPU");
        let (mut ordered, dropped) = (batch.clone(), (edge, stream, unused, only));
        let (address, base) = (gpu.address(), to.addr() as u64);
        let (near, peer, region, advertised) = (&near, &peer, &region, far.advertised());
        let ended = in_forked_process(move || {
            // SAFETY: the handle is not used: the child has no GPU.
            let order = unsafe { kvferry_cuda::order(&mut ordered, &[Order::Stream(raw)]) };
            // SAFETY: as above.
            let edge = unsafe { Edge::after_stream(raw, 0) };
            let are_refused = is_forked(peer.write(&ordered, &options()).map(drop))
                && is_forked(near.unregister(region))
                && is_refused(edge.map(drop))
                && is_refused(kvferry_cuda::memory(address, 4096, None).map(drop))
                && order.is_ok()
                && Gpu::all().is_empty();
            drop((dropped, ordered));
            let mut bytes = Pattern::new(3).bytes(LEN);
            let fresh = agent(TransportKind::TCP);
            let _registered = of_host(&fresh, &mut bytes);
            let mut batch = Batch::new();
            // SAFETY: the memory stays until the write has ended.
            unsafe { batch.push_raw(bytes.as_mut_ptr(), base, LEN as u64) }.expect("it fits");
            batch.find_device_memory(&fresh).expect("host memory");
            let peer = fresh.peer(advertised).expect("an address");
            peer.write(&batch, &options()).expect("written");
            fresh.shutdown();
            u8::from(are_refused)
        });
        assert_eq!(rig.fake.counter("fork_violations"), 0);
        assert_eq!(ended, Some(1));
        let (mut got, sent) = (vec![0; LEN], Pattern::new(3).bytes(LEN));
        to.read_at(0, &mut got).expect("inside");
        assert!(got == sent, "what the child has written");
        peer.read(&batch, &options()).expect("read");
        assert!(rig.bytes(&gpu, 0, LEN) == sent);
        assert_eq!(rig.findings(), Vec::<String>::new());
    });
}

#[test]
fn a_forked_child_waits_for_no_thread_of_its_parent_that_looks_for_gpus() {
    alone(|| {
        let _bound = Watchdog::new(2 * LIMIT);
        let Some(rig) = FakeRig::new(&[]) else { return };
        let gpu = rig.memory(0, LEN, 1);
        let _memory = kvferry_cuda::memory(gpu.address(), LEN as u64, None).expect("a GPU");
        let ends = AtomicBool::new(false);
        let has_none = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ends.load(Relaxed) && Gpu::all().len() == 1 {
                        std::hint::spin_loop();
                    }
                });
            }
            let look = || u8::from(Gpu::all().is_empty());
            let has_none = (0..50).all(|_| in_forked_process(look) == Some(1));
            ends.store(true, Relaxed);
            has_none
        });
        assert!(has_none, "a child has hung, or has GPUs");
    });
}

/// True if a fresh agent of a process finds out that memory of the test is the host's.
fn registers_host_memory() -> bool {
    let mut bytes = vec![0; LEN];
    let fresh = agent(TransportKind::TCP);
    let region = of_host(&fresh, &mut bytes);
    let is_host = !region.is_device();
    fresh.shutdown();
    is_host
}

#[test]
fn a_forked_child_uses_a_driver_that_its_parent_had_only_loaded() {
    alone(|| {
        let _bound = Watchdog::new(LIMIT);
        let Some(rig) = FakeRig::new(&[]) else { return };
        // The driver is asked, and answers that it is not initialised.
        assert!(registers_host_memory());
        let ended = in_forked_process(|| {
            let gpu = rig.memory(0, LEN, 1);
            let loaded = LoadedDriver::find().expect("it is loaded");
            let is_found = loaded.has_device_memory_at(gpu.address() as usize);
            u8::from(is_found && kvferry_cuda::memory(gpu.address(), 4096, None).is_ok())
        });
        assert_eq!(ended, Some(1));
        assert!(Driver::get().is_ok());
    });
}

#[test]
fn a_forked_child_is_refused_a_driver_that_another_library_of_its_parent_has_used() {
    alone(|| {
        let _bound = Watchdog::new(LIMIT);
        let Some(rig) = FakeRig::new(&[]) else { return };
        type Init = unsafe extern "C" fn(u32) -> i32;
        // SAFETY: the driver's function has this signature.
        let init = unsafe { std::mem::transmute::<*mut c_void, Init>(rig.symbol("cuInit")) };
        // SAFETY: the only flags that exist are zero.
        assert_eq!(unsafe { init(0) }, 0);
        assert!(registers_host_memory());
        let ended =
            in_forked_process(|| u8::from(registers_host_memory() && Driver::get().is_err()));
        assert_eq!((ended, rig.fake.counter("fork_violations")), (Some(1), 0));
        assert!(Driver::get().is_ok());
    });
}
