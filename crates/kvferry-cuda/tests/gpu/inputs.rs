//! Bad inputs of the Rust interface: each is refused by its kind, with what to do; and odd ones that work.

use crate::kit::*;
use crate::machine::Kernel;
use kvferry::{Access, After, Batch, ErrorKind, TransportKind};
use kvferry_cuda::gpu::PIECES_MAX;
use kvferry_cuda::{Error, Order, memory, order};
use kvferry_sys::cuda::{self, Event, RawEvent, RawStream, Stream};
use kvferry_testkit::Watchdog;
use kvferry_testkit::pattern::Pattern;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::without_provenance_mut;
use std::time::Duration;

const LEN: usize = 64 << 10;

/// Managed memory of the GPU whose context is current.
struct Managed {
    address: u64,
    free: unsafe extern "C" fn(u64) -> c_int,
}

impl Managed {
    fn new(rig: &Rig) -> Self {
        type Allocate = unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int;
        type Free = unsafe extern "C" fn(u64) -> c_int;
        const ATTACH_GLOBAL: c_uint = 1;
        let (allocate, free) = (rig.symbol("cuMemAllocManaged"), rig.symbol("cuMemFree_v2"));
        // SAFETY: the symbols have these signatures.
        let (allocate, free) = unsafe {
            (
                std::mem::transmute::<*mut c_void, Allocate>(allocate),
                std::mem::transmute::<*mut c_void, Free>(free),
            )
        };
        let mut address = 0;
        // SAFETY: the driver writes an address.
        assert_eq!(unsafe { allocate(&raw mut address, LEN, ATTACH_GLOBAL) }, 0);
        Self { address, free }
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: nothing uses the memory.
        unsafe { (self.free)(self.address) };
    }
}

#[test]
fn managed_memory_is_refused_as_memory_of_a_gpu_and_of_the_host() {
    let rig = Rig::new(&[]);
    let context = rig.context(0);
    let _current = context.enter().expect("current");
    let managed = Managed::new(&rig);
    let address = managed.address;
    let refused = memory(address, LEN as u64, None).expect_err("managed");
    assert_eq!(refused, Error::Managed { address });
    assert!(refused.to_string().contains("allocate it with cudaMalloc"), "{refused}");
    let agent = agent(TransportKind::TCP);
    let at = without_provenance_mut(address as usize);
    // SAFETY: the memory stays allocated.
    let refused = unsafe { agent.register(at, LEN, Access::READ) }.expect_err("managed");
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    assert!(agent.regions().is_empty());
}

#[test]
fn an_address_of_a_gpu_is_refused_as_host_memory_with_what_to_register() {
    let rig = Rig::new(&[]);
    let gpu = rig.memory(0, LEN, 1);
    let (agent, mut host) = (agent(TransportKind::TCP), vec![0; LEN]);
    let first = without_provenance_mut(gpu.address() as usize);
    let last = without_provenance_mut(gpu.address() as usize + LEN - 1);
    for (at, len) in [(first, LEN), (last, 1)] {
        for access in [Access::NONE, Access::READ, Access::READ_WRITE] {
            let ranges = [(host.as_mut_ptr(), LEN), (at, len)];
            // SAFETY: all of the memory outlives the agent's regions.
            let refused = unsafe {
                [
                    agent.register(at, len, access).expect_err("memory of a GPU"),
                    agent.register_batch(&ranges, access).expect_err("memory of a GPU"),
                ]
            };
            for refused in refused {
                assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
                let text = refused.to_string();
                assert!(text.contains("register it as memory of its GPU"), "{text}");
            }
        }
    }
    assert!(agent.regions().is_empty());
    let _region = register(&agent, &gpu);
}

/// The error of an order for a batch, which stays as it is.
fn refused(batch: &mut Batch, after: &[Order]) -> Error {
    batch.set_after(After::default());
    // SAFETY: the fake driver looks handles up, and dereferences none.
    let refused = unsafe { order(batch, after) }.expect_err("it is refused");
    assert!(batch.after().edges().is_empty());
    refused
}

#[test]
fn streams_and_events_that_do_not_exist_are_refused_by_their_handles() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let mut batch = whole(&region, &to, LEN);
    let context = rig.context(0);
    let (stream, event) = (Stream::new(&context).expect("one"), Event::new(&context).expect("one"));
    let (dead_stream, dead_event) = (stream.raw(), event.raw());
    drop((stream, event));
    let living = Stream::new(&context).expect("a stream");
    for stream in [dead_stream, RawStream(0x1234)] {
        // One that works does not hide the other.
        for after in
            [vec![Order::Stream(stream)], vec![Order::Stream(living.raw()), Order::Stream(stream)]]
        {
            let refused = refused(&mut batch, &after);
            assert_eq!(refused, Error::Driver(cuda::Error::UnknownStream(stream.0)));
            assert!(refused.to_string().contains("name one that exists"), "{refused}");
        }
    }
    for event in [dead_event, RawEvent(0x1234)] {
        let refused = refused(&mut batch, &[Order::Event(event)]);
        assert_eq!(refused, Error::Driver(cuda::Error::UnknownEvent(event.0)));
        assert!(refused.to_string().contains("name one that exists"), "{refused}");
    }
    let unrecorded = refused(&mut batch, &[Order::Event(RawEvent(0))]);
    assert_eq!(unrecorded, Error::Driver(cuda::Error::NullEvent));
    assert!(unrecorded.to_string().contains("record the event"), "{unrecorded}");
    let nothing = refused(&mut batch, &[]);
    assert_eq!(nothing, Error::NoOrder { device: 0 });
    assert!(nothing.to_string().contains("say what the transfer comes after"), "{nothing}");
    let error = peer.write(&batch, &options()).expect_err("it names nothing");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    batch.set_after(After::host());
    peer.write(&batch, &options()).expect("written");
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn an_event_that_was_recorded_in_a_graph_capture_is_refused() {
    type Begin = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
    type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
    let Some(rig) = FakeRig::new(&[]) else { return };
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let mut batch = whole(&region, &to, LEN);
    let context = rig.context(0);
    let (stream, event) = (Stream::new(&context).expect("one"), Event::new(&context).expect("one"));
    let handle = without_provenance_mut::<c_void>(stream.raw().0 as usize);
    let (begin, end) = (rig.symbol("cuStreamBeginCapture_v2"), rig.symbol("cuStreamEndCapture"));
    // SAFETY: the symbols have these signatures.
    let (begin, end) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Begin>(begin),
            std::mem::transmute::<*mut c_void, End>(end),
        )
    };
    let entered = context.enter().expect("current");
    // SAFETY: the stream exists.
    assert_eq!(unsafe { begin(handle, 0) }, 0);
    event.record(&stream).expect("recorded");
    let captured = refused(&mut batch, &[Order::Event(event.raw())]);
    assert_eq!(captured, Error::Driver(cuda::Error::CapturedEvent(event.raw().0)));
    assert!(captured.to_string().contains("record one outside of it"), "{captured}");
    let mut graph = std::ptr::null_mut();
    // The question about the event has ended the capture: drivers do so.
    // SAFETY: as above.
    assert_ne!(unsafe { end(handle, &raw mut graph) }, 0);
    drop(entered);
    batch.set_after(After::host());
    peer.write(&batch, &options()).expect("written");
}

#[test]
fn an_event_of_another_gpu_is_waited_for() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let gpu = rig.memory(0, LEN, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let other = Stream::new(&rig.context(1)).expect("a stream");
    let event = Event::new(&rig.context(1)).expect("an event");
    for is_event in [true, false] {
        rig.hold();
        let writes = Some((gpu.address(), LEN as u64));
        rig.launch(&other, &Kernel { name: "other", writes, fill: 7, ..Kernel::default() });
        let after = match is_event {
            true => {
                event.record(&other).expect("recorded");
                Order::Event(event.raw())
            }
            false => Order::Stream(other.raw()),
        };
        let mut batch = whole(&region, &to, LEN);
        // SAFETY: both exist.
        unsafe { order(&mut batch, &[after]) }.expect("they work");
        let transfer = peer.write_async(&batch, &options());
        assert!(transfer.wait(Duration::from_millis(20)).is_none(), "the kernel has not run");
        rig.release();
        ended(&transfer).expect("written");
        let mut got = vec![0; LEN];
        to.read_at(0, &mut got).expect("inside");
        assert!(got.iter().all(|byte| *byte == 7), "{after:?}");
        rig.write(&gpu, 0, &vec![0; LEN]);
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn memory_that_is_source_and_destination_of_a_transfer_keeps_its_bytes() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let len = 9 << 20;
    let gpu = rig.memory(0, len, 1);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let (ours, theirs) = (register(&near, &gpu), register(&far, &gpu));
    let peer = peer_of(&near, &far);
    for _ in 0..3 {
        peer.write(&whole(&ours, &theirs, len), &options()).expect("written");
        peer.read(&whole(&ours, &theirs, len), &options()).expect("read");
        assert!(rig.bytes(&gpu, 0, len) == Pattern::new(1).bytes(len));
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn a_batch_has_more_pieces_than_a_device_takes_at_once() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let (count, piece) = (3 * PIECES_MAX + 1, 16);
    let len = 2 * count * piece;
    let gpu = rig.memory(0, len, 1);
    let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
    let batch = scattered(&region, &to, count, piece);
    peer.write(&batch, &options()).expect("written");
    let (mut got, sent) = (vec![0; len], Pattern::new(1).bytes(len));
    to.read_at(0, &mut got).expect("inside");
    assert!(
        (0..count).map(|i| 2 * i * piece).all(|at| got[at..at + piece] == sent[at..at + piece])
    );
    let counters = counters();
    assert!(counters.batches > 3 && counters.failed == 0, "{counters:?}");
}
