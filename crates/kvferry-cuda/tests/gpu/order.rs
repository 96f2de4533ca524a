//! Transfers come after the work that they name, and never make a stream wait.

use crate::kit::*;
use crate::machine::Kernel;
use kvferry::{Access, After, ErrorKind, Options, Transfer, TransportKind};
use kvferry_cuda::{Edge, Order};
use kvferry_fakecuda::Fault;
use kvferry_sys::cuda::{DeviceAllocation, Event, RawStream, Stream};
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, eventually};
use std::ffi::{c_int, c_void};
use std::time::Duration;

const LEN: usize = 256 << 10;

/// The memory that the kernels of these tests use.
fn all(gpu: &DeviceAllocation) -> Option<(u64, u64)> {
    Some((gpu.address(), LEN as u64))
}

#[test]
fn a_write_comes_after_the_kernel_that_computes_its_bytes() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    for fill in 1..=20 {
        rig.hold();
        let kernel = Kernel {
            name: "attention",
            writes: all(&gpu),
            fill,
            delay_ns: 200_000,
            ..Kernel::default()
        };
        rig.launch(&compute, &kernel);
        let mut batch = whole(&region, &to, LEN);
        let edge = if fill % 2 == 0 {
            // SAFETY: the stream exists.
            unsafe { Edge::after_stream(compute.raw(), 0) }
        } else {
            let event = Event::new(&rig.context(0)).expect("an event");
            event.record(&compute).expect("recorded");
            // SAFETY: the event exists. It may be destroyed afterwards.
            unsafe { Edge::after_event(event.raw(), 0) }
        };
        batch.set_after(Edge::all([edge.expect("an edge")]));
        let transfer = peer.write_async(&batch, &options());
        assert!(transfer.wait(Duration::from_millis(20)).is_none(), "the kernel has not run");
        rig.release();
        ended(&transfer).expect("written");
        let mut got = vec![0; LEN];
        to.read_at(0, &mut got).expect("inside");
        assert!(got.iter().all(|byte| *byte == fill), "kernel {fill}");
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn an_error_that_a_look_at_an_edge_did_not_cause_does_not_fail_the_edge() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    // SAFETY: the stream exists.
    let edge = unsafe { Edge::after_stream(compute.raw(), 0) }.expect("an edge");
    eventually("the edge", || edge.has_happened() == Ok(true));
    for at in 1..=2 {
        rig.fake.fault(Fault::ForeignError, at, 1);
        assert_eq!(edge.has_happened(), Ok(true), "call {at}");
        rig.fake.clear_faults();
    }
}

#[test]
fn without_the_edge_the_race_is_found() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    // A real driver has no checker of races: there, the wrong bytes arrive before the kernel has run.
    let kernel = Kernel { name: "attention", writes: all(&gpu), fill: 7, ..Kernel::default() };
    if !rig.is_fake() {
        // The first write pins a stage, which may wait for a kernel that is held.
        peer.write(&whole(&region, &to, LEN), &options()).expect("written");
        rig.hold();
    }
    rig.launch(&compute, &kernel);
    peer.write(&whole(&region, &to, LEN), &options()).expect("written");
    if rig.is_fake() {
        let findings = rig.findings();
        assert!(findings.iter().any(|it| it.contains("attention")), "{findings:?}");
        rig.clear_findings();
    } else {
        let mut got = vec![0; LEN];
        to.read_at(0, &mut got).expect("inside");
        assert!(got == Pattern::new(1).bytes(LEN), "the transfer has waited for the kernel");
        rig.release();
        compute.synchronize().expect("it runs");
        assert_eq!(rig.findings(), Vec::<String>::new());
        assert!(rig.bytes(&gpu, 0, LEN).iter().all(|byte| *byte == 7));
    }
}

#[test]
fn a_read_comes_after_the_last_reader_of_the_memory_that_it_writes() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let gpu = rig.memory(0, LEN, 1);
    rig.write(&gpu, 0, &vec![9; LEN]);
    let region = register(&near, &gpu);
    let from = far.allocate(LEN, Access::READ).expect("memory");
    from.write_at(0, &vec![4; LEN]).expect("inside");
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    let kernel = Kernel {
        name: "reader",
        reads: all(&gpu),
        expect: Some(9),
        delay_ns: 3_000_000,
        ..Kernel::default()
    };
    rig.launch(&compute, &kernel);
    let mut batch = whole(&region, &from, LEN);
    // SAFETY: the stream exists.
    batch.set_after(Edge::all([unsafe { Edge::after_stream(compute.raw(), 0) }.expect("an edge")]));
    peer_of(&near, &far).read(&batch, &options()).expect("read");
    assert!(rig.bytes(&gpu, 0, LEN).iter().all(|byte| *byte == 4));
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn an_event_that_never_happens_ends_the_transfer_at_its_deadline_and_holds_up_no_other() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let gpu = rig.memory(0, 2 * LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    rig.hold();
    let kernel = Kernel { name: "stuck", ..Kernel::default() };
    rig.launch(&compute, &kernel);
    let event = Event::new(&rig.context(0)).expect("an event");
    event.record(&compute).expect("recorded");
    // SAFETY: the event exists.
    let stuck = unsafe { Edge::after_event(event.raw(), 0) }.expect("an edge");
    let mut batch = whole(&region, &to, LEN);
    batch.set_after(Edge::all([stuck]));
    let brief = Options { timeout: Some(Duration::from_millis(100)), ..Options::default() };
    let error = peer.write(&batch, &brief).expect_err("it never happens");
    assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
    assert_eq!(error.quiesced(), Some(true), "{error}");
    let named =
        format!("it still waited for event {:#x}, waited for on GPU 0; look at", event.raw().0);
    assert!(error.to_string().contains(&named), "{error}");
    // Another one, whose event does happen.
    let other = Stream::new(&rig.context(0)).expect("a stream");
    let mut batch = whole(&region, &to, LEN);
    // SAFETY: the stream exists.
    batch.set_after(Edge::all([unsafe { Edge::after_stream(other.raw(), 0) }.expect("an edge")]));
    peer.write(&batch, &options()).expect("written");
    rig.release();
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn the_error_of_a_deadline_names_the_stream_or_event_that_the_transfer_still_waited_for() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    // The first write pins a stage, which may wait for a kernel that is held.
    peer.write(&whole(&region, &to, LEN), &options()).expect("written");
    let [idle, compute] = [(); 2].map(|()| Stream::new(&rig.context(0)).expect("a stream"));
    rig.hold();
    rig.launch(&compute, &Kernel { name: "stuck", ..Kernel::default() });
    let event = Event::new(&rig.context(0)).expect("an event");
    event.record(&compute).expect("recorded");
    let stream = |stream: &Stream| {
        // SAFETY: the stream exists.
        unsafe { Edge::after_stream(stream.raw(), 0) }.expect("an edge")
    };
    let brief = Options { timeout: Some(Duration::from_millis(50)), ..Options::default() };
    for is_event in [true, false] {
        let ended = stream(&idle);
        eventually("the idle stream has no work", || ended.has_happened() == Ok(true));
        // SAFETY: the event exists.
        let by_event = || unsafe { Edge::after_event(event.raw(), 0) }.expect("an edge");
        let stuck = if is_event { by_event() } else { stream(&compute) };
        let name = match is_event {
            true => format!("event {:#x}, waited for on GPU 0", event.raw().0),
            false => format!("stream {:#x} of GPU 0", compute.raw().0),
        };
        let mut batch = whole(&region, &to, LEN);
        batch.set_after(Edge::all([ended, stuck]));
        for error in [
            peer.write(&batch, &brief).expect_err("it never happens"),
            peer.read(&batch, &brief).expect_err("it never happens"),
            ended_with(&peer.write_async(&batch, &brief)),
            ended_with(&peer.read_async(&batch, &brief)),
        ] {
            assert_eq!((error.kind(), error.quiesced()), (ErrorKind::Deadline, Some(true)));
            let text = error.to_string();
            assert!(
                text.contains(&format!("it still waited for {name} (edge 2 of 2); look at")),
                "{text}"
            );
        }
    }
    rig.release();
    assert_eq!(rig.findings(), Vec::<String>::new());
}

/// The error of a transfer that is expected to fail.
fn ended_with(transfer: &Transfer) -> kvferry::Error {
    ended(transfer).expect_err("it never happens")
}

#[test]
fn the_thread_of_the_gpu_destroys_the_events_of_edges() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    for write in [true, false] {
        let mut batch = whole(&region, &to, LEN);
        // SAFETY: the stream exists.
        unsafe { kvferry_cuda::order(&mut batch, &[Order::Stream(compute.raw())]) }.expect("edges");
        let of_all = || rig.fake.counter("call:cuEventDestroy_v2");
        let of_this_thread = || rig.fake.counter("own_call:cuEventDestroy_v2");
        let (before, own) = (of_all(), of_this_thread());
        batch.set_after(After::host());
        assert_eq!(
            of_this_thread(),
            own,
            "this thread may hold what a call of the driver waits for"
        );
        match write {
            true => peer.write(&batch, &options()),
            false => peer.read(&batch, &options()),
        }
        .expect("moved");
        eventually("the event is destroyed", || of_all() > before);
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn a_stream_in_a_graph_capture_is_refused_and_its_capture_goes_on() {
    type Begin = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
    type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
    let rig = Rig::new(&[]);
    let context = rig.context(0);
    let stream = Stream::new(&context).expect("a stream");
    let handle = std::ptr::without_provenance_mut::<c_void>(stream.raw().0 as usize);
    let symbol = |name| rig.symbol(name);
    let (begin, end) = (symbol("cuStreamBeginCapture_v2"), symbol("cuStreamEndCapture"));
    let entered = context.enter().expect("current");
    // SAFETY: the symbols have these signatures.
    let (begin, end) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Begin>(begin),
            std::mem::transmute::<*mut c_void, End>(end),
        )
    };
    // SAFETY: the stream exists.
    assert_eq!(unsafe { begin(handle, 0) }, 0);
    // SAFETY: as above.
    let refused = unsafe { Edge::after_stream(stream.raw(), 0) }.expect_err("it is in a capture");
    assert!(refused.to_string().contains("graph capture"), "{refused}");
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { end(handle, &raw mut graph) }, 0, "the capture was not disturbed");
    assert!(!graph.is_null());
    drop(entered);
}

#[test]
fn a_default_stream_is_ordered_after_and_a_gpu_that_is_not_there_is_refused() {
    let _rig = Rig::new(&[]);
    let names = ["the default stream", "the default stream", "the calling thread's default stream"];
    for (default, name) in [0, 1, 2].map(RawStream).into_iter().zip(names) {
        // SAFETY: default streams always exist.
        let edge = unsafe { Edge::after_stream(default, 0) }.expect("an edge");
        assert_eq!(edge.to_string(), format!("{name} of GPU 0"));
        // SAFETY: as above.
        let missing = unsafe { Edge::after_stream(default, 9) }.expect_err("no such device");
        assert!(missing.to_string().contains("no CUDA device 9"), "{missing}");
    }
}

/// An edge of another device, which panics when it is dropped.
struct Foreign(std::sync::Arc<std::sync::atomic::AtomicUsize>);

impl Drop for Foreign {
    fn drop(&mut self) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        if std::thread::current().name() == Some("kvferry-gpu") {
            panic!("dropped on the thread of the GPU");
        }
    }
}

#[test]
fn edges_of_other_devices_never_reach_the_thread_of_the_gpu() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    peer.write(&whole(&region, &to, LEN), &options()).expect("written");
    let compute = Stream::new(&rig.context(0)).expect("a stream");
    rig.hold();
    rig.launch(&compute, &Kernel { name: "stuck", ..Kernel::default() });
    let dropped = std::sync::Arc::default();
    {
        // SAFETY: the stream exists.
        let stuck = unsafe { Edge::after_stream(compute.raw(), 0) }.expect("an edge");
        let edges: [std::sync::Arc<dyn std::any::Any + Send + Sync>; 2] = [
            std::sync::Arc::new(stuck),
            std::sync::Arc::new(Foreign(std::sync::Arc::clone(&dropped))),
        ];
        let mut batch = whole(&region, &to, LEN);
        batch.set_after(kvferry::After::all(edges));
        let error = peer.write(&batch, &options()).expect_err("the GPU does not know it");
        assert!(format!("{error:?}").contains("not of a GPU"), "{error:?}");
    }
    kvferry_testkit::eventually("it is dropped", || {
        dropped.load(std::sync::atomic::Ordering::SeqCst) == 1
    });
    rig.release();
    peer.write(&whole(&region, &to, LEN), &options()).expect("written");
}
