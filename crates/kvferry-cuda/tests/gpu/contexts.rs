//! Contexts: none is made on another GPU, and a caller's thread keeps its context and its capture mode.

use crate::kit::*;
use kvferry::{Access, After, Batch, FileOptions, Region, TransportKind};
use kvferry_cuda::{Edge, Gpu, Order, order};
use kvferry_sys::cuda::{Event, RawStream, Stream};
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, eventually};
use std::ffi::{c_int, c_void};

const LEN: usize = 256 << 10;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;

/// State of the calling thread in the driver.
struct Thread {
    get: unsafe extern "C" fn(*mut usize) -> c_int,
    set: unsafe extern "C" fn(usize) -> c_int,
    exchange: unsafe extern "C" fn(*mut c_int) -> c_int,
}

impl Thread {
    fn new(rig: &Rig) -> Self {
        type Get = unsafe extern "C" fn(*mut usize) -> c_int;
        type Set = unsafe extern "C" fn(usize) -> c_int;
        type Exchange = unsafe extern "C" fn(*mut c_int) -> c_int;
        let [get, set, exchange] =
            ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"]
                .map(|name| rig.symbol(name));
        // SAFETY: the symbols have these signatures.
        unsafe {
            Self {
                get: std::mem::transmute::<*mut c_void, Get>(get),
                set: std::mem::transmute::<*mut c_void, Set>(set),
                exchange: std::mem::transmute::<*mut c_void, Exchange>(exchange),
            }
        }
    }

    /// The handle of the current context; zero if there is none.
    fn context(&self) -> usize {
        let mut context = 0;
        // SAFETY: the driver writes a handle.
        assert_eq!(unsafe { (self.get)(&raw mut context) }, 0);
        context
    }

    fn set_context(&self, context: usize) {
        // SAFETY: it is a context that exists, or none.
        assert_eq!(unsafe { (self.set)(context) }, 0);
    }

    /// Sets the capture mode, and returns the former one.
    fn set_mode(&self, mut mode: c_int) -> c_int {
        // SAFETY: the driver exchanges one integer.
        assert_eq!(unsafe { (self.exchange)(&raw mut mode) }, 0);
        mode
    }

    /// The current context and the capture mode.
    fn state(&self) -> (usize, c_int) {
        let mode = self.set_mode(RELAXED);
        self.set_mode(mode);
        (self.context(), mode)
    }

    /// Makes a call that changes nothing of the thread.
    fn keeps<T>(&self, what: &str, call: impl FnOnce() -> T) -> T {
        let before = self.state();
        let outcome = call();
        assert_eq!(self.state(), before, "{what}");
        outcome
    }
}

/// A batch of all of the memory, ordered as told.
fn ordered(thread: &Thread, mut batch: Batch, after: &[Order]) -> Batch {
    batch.set_after(After::default());
    // SAFETY: the streams and events exist.
    let made = thread.keeps("order", || unsafe { order(&mut batch, after) });
    made.unwrap_or_else(|error| panic!("{after:?}: {error}"));
    batch
}

#[test]
fn calls_for_memory_of_one_gpu_make_no_context_and_leave_the_callers_thread_as_it_was() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let gpu = rig.memory(1, LEN, 1);
    let compute = Stream::new(gpu.context()).expect("a stream");
    let event = Event::new(gpu.context()).expect("an event");
    event.record(&compute).expect("recorded");
    let thread = Thread::new(&rig);
    let entered = gpu.context().enter().expect("current");
    let own = thread.context();
    drop(entered);
    let created = || rig.fake.counter("contexts_created");
    let before = created();
    assert_eq!(rig.fake.counter("contexts"), 1, "the test has none on another GPU");
    let path = std::env::temp_dir().join(format!("kvferry-gpu-contexts-{}", std::process::id()));
    let orders = [
        vec![Order::Host],
        vec![Order::Stream(compute.raw())],
        vec![Order::Event(event.raw())],
        vec![Order::Stream(RawStream(0))],
        vec![Order::Stream(RawStream::LEGACY)],
        vec![Order::Stream(RawStream::PER_THREAD)],
        vec![Order::Event(event.raw()), Order::Stream(compute.raw()), Order::Host],
    ];
    for context in [0, own] {
        thread.set_context(context);
        let mode = thread.set_mode(THREAD_LOCAL);
        let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
        let region = thread.keeps("register", || register(&near, &gpu));
        let to = far.allocate(LEN, Access::READ_WRITE).expect("memory");
        let file = near.open_file(&path, &FileOptions::create(LEN as u64)).expect("a file");
        let peer = peer_of(&near, &far);
        for after in &orders {
            let what = format!("{after:?}, context {context:#x}");
            let to_peer = ordered(&thread, whole(&region, &to, LEN), after);
            thread.keeps("write", || peer.write(&to_peer, &options())).expect(&what);
            let to_peer = ordered(&thread, to_peer, after);
            thread.keeps("read", || peer.read(&to_peer, &options())).expect(&what);
            let to_peer = ordered(&thread, to_peer, after);
            let transfer = thread.keeps("write_async", || peer.write_async(&to_peer, &options()));
            thread.keeps("wait", || ended(&transfer)).expect(&what);
            let mut batch = Batch::new();
            batch.push(&region, 0, &file.remote(), 0, LEN as u64).expect("inside");
            let to_file = ordered(&thread, batch, after);
            thread.keeps("files.write", || near.files().write(&to_file, &options())).expect(&what);
            let to_file = ordered(&thread, to_file, after);
            thread.keeps("files.read", || near.files().read(&to_file, &options())).expect(&what);
            thread.keeps("clear", || drop((to_peer, to_file)));
        }
        refusals(&thread, &near, &region);
        thread.keeps("unregister", || near.unregister(&region)).expect("nothing copies");
        assert!(rig.bytes(&gpu, 0, LEN) == Pattern::new(1).bytes(LEN));
        thread.set_mode(mode);
        thread.set_context(0);
        thread.keeps("shutdown", || drop((near, far, peer, region, to, file)));
        assert_eq!((created(), rig.fake.counter("contexts")), (before, 1));
    }
    let _ = std::fs::remove_file(path);
    assert_eq!(rig.findings(), Vec::<String>::new());
}

/// Calls that fail leave the thread as it was, too.
fn refusals(thread: &Thread, near: &kvferry::Agent, region: &Region) {
    let host = vec![0u8; 4096];
    let refused = thread.keeps("memory", || kvferry_cuda::memory(host.as_ptr() as u64, 4096, None));
    refused.expect_err("host memory");
    // SAFETY: the fake driver looks handles up, and dereferences none.
    let unknown = thread.keeps("a stream", || unsafe { Edge::after_stream(RawStream(0x1234), 1) });
    unknown.expect_err("no such stream");
    let memory = region.device_memory().expect("memory of a GPU").clone();
    thread.keeps("twice", || near.register_device(memory, Access::READ).map(drop)).expect("twice");
}

#[test]
fn counters_of_a_gpu_are_the_sums_of_those_of_its_contexts() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    eventually("no GPU is in use", || Gpu::all().is_empty());
    let gpu = rig.memory(0, LEN, 1);
    let first = Pair::new(TransportKind::TCP, &gpu);
    let batch = whole(&first.region, &first.to, LEN);
    first.peer.write(&batch, &options()).expect("written");
    // The agent has memory of the context that is gone, and memory of the next one.
    rig.fake.destroy_context(0);
    first.peer.write(&batch, &options()).expect_err("the context is gone");
    let again = rig.memory(0, LEN, 2);
    let second = Pair::new(TransportKind::TCP, &again);
    let next = whole(&second.region, &second.to, LEN);
    second.peer.write(&next, &options()).expect("written");
    let each: Vec<_> =
        Gpu::all().iter().map(|gpu| (gpu.counters().bytes_out, gpu.is_lost())).collect();
    assert_eq!(each.len(), 2);
    let named = Gpu::named_counters();
    let values = |name: &str| -> Vec<u64> {
        named.iter().filter(|(known, _)| known == name).map(|(_, value)| *value).collect()
    };
    assert_eq!(values("gpu0_bytes_out"), [each[0].0 + each[1].0]);
    assert_eq!(values("gpu0_lost"), [u64::from(each[0].1 || each[1].1)]);
    drop((batch, next, first, second, again, gpu));
    rig.releases_contexts();
}
