//! Faults that any driver with a GPU can have, the fake one included: each ends its transfers, and nothing writes late.

use crate::kit::*;
use crate::machine::Kernel;
use kvferry::{Access, Batch, Options, TransportKind};
use kvferry_cuda::{Edge, Error, Gpu, ptx};
use kvferry_sys::cuda::{
    DeviceAllocation, Event, Grid, HostRegistration, Module, Stream, copy_async, launch,
};
use kvferry_sys::map::Mapping;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::process::{Child, ChildRegion, Resources};
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Names the test whose body this process runs.
const ALONE: &str = "KVFERRY_GPU_TEST_ALONE";

/// Runs `body` in a process of its own, which a fault may leave unusable.
pub(crate) fn alone(body: impl FnOnce()) {
    let thread = std::thread::current();
    let test = thread.name().expect("the test's name");
    if std::env::var(ALONE).is_ok_and(|name| name == test) {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().expect("a program"));
    let command = command.args(["--exact", test, "--include-ignored", "--nocapture"]);
    let ran = command.env(ALONE, test).output().expect("it starts");
    let text = [&ran.stdout, &ran.stderr].map(|it| String::from_utf8_lossy(it).into_owned());
    println!("{}", text[0]);
    assert!(ran.status.success(), "{}: {}{}", ran.status, text[0], text[1]);
    assert!(text[0].contains("1 passed"), "{test} did not run: {}", text[0]);
}

/// Stores to an address that no memory has.
const ILLEGAL: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry illegal(.param .u64 address)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [address];
    st.global.u32 [%rd1], 1;
    ret;
}
";

#[test]
fn a_kernel_with_an_illegal_address_loses_the_gpu_and_host_transfers_go_on() {
    alone(|| {
        let _bound = Watchdog::new(LIMIT);
        let rig = Rig::new(&[]);
        let gpu = rig.memory(0, MIB, 1);
        let Pair { near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
        let batch = whole(&region, &to, MIB);
        peer.write(&batch, &options()).expect("written");
        let context = rig.context(0);
        let illegal = Module::load_ptx(&context, ILLEGAL).expect("it compiles");
        let illegal = illegal.function("illegal").expect("it is there");
        let [held, faulty] = [(); 2].map(|()| Stream::new(&context).expect("a stream"));
        // Left out on the fake driver: it holds all kernels, so that none could fail meanwhile.
        let waits = (!rig.is_fake()).then(|| {
            rig.hold();
            rig.launch(&held, &Kernel { name: "held", ..Kernel::default() });
            let mut waits = whole(&region, &to, MIB);
            // SAFETY: the stream exists.
            let edge = unsafe { Edge::after_stream(held.raw(), 0) }.expect("an edge");
            waits.set_after(Edge::all([edge]));
            let waits = peer.write_async(&waits, &options());
            assert!(waits.wait(Duration::from_millis(20)).is_none(), "the kernel is held");
            waits
        });
        let grid = Grid { blocks: 1, threads: 1, shared_bytes: 0 };
        // SAFETY: the kernel touches no memory: there is none at the address.
        unsafe { launch(&faulty, &illegal, grid, &[0x10]) }.expect("launched");
        assert!(faulty.synchronize().expect_err("it fails").is_sticky());
        if let Some(waits) = waits {
            let error = ended(&waits).expect_err("the GPU is lost");
            assert_eq!(error.quiesced(), Some(true), "{error}");
            let text = format!("{error:?}");
            let is_told =
                ["ILLEGAL_ADDRESS", "restart the process"].iter().any(|it| text.contains(it));
            assert!(is_told, "{text}");
        }
        let error = peer.write(&batch, &options()).expect_err("the GPU is lost");
        assert_eq!(error.quiesced(), Some(true), "{error}");
        let error = peer.read(&batch, &options()).expect_err("it stays lost");
        assert!(format!("{error:?}").contains("restart the process"), "{error:?}");
        let refused = kvferry_cuda::memory(gpu.address(), 4096, None);
        let is_refused =
            refused.is_err_and(|why| matches!(why, Error::Lost { .. } | Error::Driver(_)));
        assert!(is_refused, "memory of a lost GPU");
        let host = near.allocate(MIB, Access::NONE).expect("memory");
        host.write_at(0, &Pattern::new(3).bytes(MIB)).expect("inside");
        peer.write(&whole(&host, &to, MIB), &options()).expect("host memory goes on");
        let mut got = vec![0; MIB];
        to.read_at(0, &mut got).expect("inside");
        assert!(got == Pattern::new(3).bytes(MIB));
        near.unregister(&region).expect("nothing copies");
        near.shutdown();
    });
}

#[test]
fn a_forked_child_is_refused_the_gpu_and_its_parent_goes_on() {
    alone(|| {
        let _bound = Watchdog::new(LIMIT);
        let rig = Rig::new(&[]);
        let gpu = rig.memory(0, MIB, 1);
        let Pair { near: _near, far: _far, region, to, peer } = Pair::new(TransportKind::TCP, &gpu);
        let batch = whole(&region, &to, MIB);
        peer.write(&batch, &options()).expect("written");
        let address = gpu.address();
        let is_refused = kvferry_testkit::forked::in_forked_process(|| {
            let refused = kvferry_cuda::memory(address, 4096, None);
            u8::from(refused.is_err_and(|why| matches!(why, Error::Driver(it) if it.is_forked())))
        });
        assert_eq!(is_refused, Some(1), "a forked child");
        peer.read(&batch, &options()).expect("read");
        assert!(rig.bytes(&gpu, 0, MIB) == Pattern::new(1).bytes(MIB));
    });
}

/// The silence limit of peers in these tests: none ends a session by silence.
const SILENCE: Duration = PATIENCE;

/// A peer in a process of its own, with `len` bytes of host memory that hold the pattern of seed 2.
fn peer_process(kind: TransportKind, len: usize) -> (Child, String, ChildRegion) {
    let transports = if kind == TransportKind::TCP { "tcp" } else { "local,tcp" };
    let config =
        json!({"name": "peer", "silence_ms": SILENCE.as_millis() as u64, "transports": transports});
    let (mut child, address) = Child::with_agent(config);
    let region = child.allocate(len, "rw", 2);
    (child, address, region)
}

fn blocks(region: &kvferry::Region, remote: &kvferry::RemoteRegion, block: usize) -> Batch {
    let mut batch = Batch::new();
    batch.set_after(kvferry::After::host());
    for at in (0..remote.len).step_by(block) {
        batch.push(region, at, remote, at, block as u64).expect("inside");
    }
    batch
}

#[test]
fn a_peer_killed_while_it_is_written_or_read_ends_the_transfer_and_no_late_byte_comes() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        for write in [true, false] {
            // All transfers may end before the kill, if this thread stops.
            while killed_during_transfers(&rig, kind, write) == 0 {}
        }
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

/// Kills a peer that is written or read. Returns how many of the transfers its death has ended.
fn killed_during_transfers(rig: &Rig, kind: TransportKind, write: bool) -> usize {
    const LEN: usize = 64 * MIB;
    let near = agent(kind);
    let gpu = rig.memory(0, LEN, 1);
    let region = register(&near, &gpu);
    let (mut child, address, remote) = peer_process(kind, LEN);
    let peer = near.peer(&address).expect("an address");
    let batch = blocks(&region, &remote.remote, 256 << 10);
    peer.write(&batch, &options()).expect("written");
    // Many equal transfers, so that the peer dies in the middle of one.
    let began = Instant::now();
    let mut transfers: Vec<_> = (0..64)
        .map(|_| match write {
            true => peer.write_async(&batch, &options()),
            false => peer.read_async(&batch, &options()),
        })
        .collect();
    // Usually before the last one has ended.
    std::thread::sleep(Duration::from_millis(15));
    child.kill();
    let outcomes: Vec<_> = transfers.drain(..).map(|it| ended(&it)).collect();
    let died = outcomes.iter().filter(|it| it.is_err()).count();
    println!(
        "FIGURE: {kind}, write {write}: {died} of 64 ended with an error, {:?}",
        began.elapsed()
    );
    // After a write, nothing tells that the dead peer's memory is left alone.
    for error in outcomes.into_iter().filter_map(Result::err).filter(|_| !write) {
        assert_eq!(error.quiesced(), Some(true), "{error}");
    }
    rig.write(&gpu, 0, &vec![0xa5; LEN]);
    std::thread::sleep(Duration::from_millis(200));
    assert!(rig.bytes(&gpu, 0, LEN).iter().all(|byte| *byte == 0xa5), "a late byte");
    near.unregister(&region).expect("nothing copies");
    died
}

#[test]
fn a_killed_writer_leaves_no_late_bytes_in_memory_of_a_gpu() {
    let _bound = Watchdog::new(LIMIT);
    const LEN: usize = 32 * MIB;
    let rig = Rig::new(&[]);
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        for block in [LEN, 16 << 10] {
            let near = agent(kind);
            let gpu = rig.memory(0, LEN, 1);
            let region = register(&near, &gpu);
            let (mut child, _, from) = peer_process(kind, LEN);
            let command: Value = json!({
                "op": "keep_writing", "peer": near.advertised(), "region": from.id,
                "remote": region.remote().to_bytes(), "block": block, "count": LEN / block,
            });
            child.call(command);
            let arrived = || Gpu::all().iter().any(|it| it.counters().bytes_in > LEN as u64);
            eventually("something arrives", arrived);
            child.kill();
            eventually("the requests of the dead writer end", || {
                let stats = near.stats();
                (stats.requests_in_flight, stats.sessions) == (0, 0)
            });
            rig.write(&gpu, 0, &vec![0xa5; LEN]);
            std::thread::sleep(Duration::from_millis(200));
            let is_left = rig.bytes(&gpu, 0, LEN).iter().all(|byte| *byte == 0xa5);
            assert!(is_left, "{kind}, {block}: late bytes of a dead writer");
            near.unregister(&region).expect("nothing copies");
        }
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn a_kernel_that_waits_for_the_host_ends_nothing_but_its_own_transfer() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let gpu = rig.memory(0, MIB, 1);
        let Pair { near, far: _far, region, to, peer } = Pair::new(kind, &gpu);
        let stuck = Stream::new(&rig.context(0)).expect("a stream");
        rig.hold();
        rig.launch(&stuck, &Kernel { name: "stuck", ..Kernel::default() });
        let brief = Options { timeout: Some(Duration::from_millis(150)), ..Options::default() };
        for write in [true, false] {
            let mut batch = whole(&region, &to, MIB);
            // SAFETY: the stream exists.
            let edge = unsafe { Edge::after_stream(stuck.raw(), 0) }.expect("an edge");
            batch.set_after(Edge::all([edge]));
            let began = Instant::now();
            let error = match write {
                true => peer.write(&batch, &brief).map(drop),
                false => peer.read(&batch, &brief).map(drop),
            };
            let error = error.expect_err("it never happens");
            assert_eq!(error.kind(), kvferry::ErrorKind::Deadline, "{error}");
            assert_eq!(error.quiesced(), Some(true), "{error}");
            println!("FIGURE: {kind}, write {write}: ended after {:?}", began.elapsed());
            // The memory is the caller's again.
            peer.write(&whole(&region, &to, MIB), &options()).expect("written");
        }
        near.unregister(&region).expect("nothing copies");
        rig.release();
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}

#[test]
fn connecting_and_closing_leaves_the_memory_of_the_gpu_as_it_was() {
    let rig = Rig::new(&[]);
    let _bound = Watchdog::new(2 * LIMIT);
    let context = rig.context(0);
    let gpu = rig.memory(0, 64 << 10, 1);
    let cycle = |kind| {
        let (near, far) = (agent(kind), agent(kind));
        let to = far.allocate(64 << 10, Access::READ_WRITE).expect("memory");
        let batch = scattered(&register(&near, &gpu), &to, 8, 4096);
        let peer = peer_of(&near, &far);
        peer.write(&batch, &options()).expect("written");
        peer.read(&batch, &options()).expect("read");
    };
    // The first cycles load modules and memory that stay.
    (0..5).for_each(|_| cycle(TransportKind::TCP));
    eventually("no GPU is in use", || Gpu::all().is_empty());
    let before = context.memory_info().expect("it is known").free;
    let cycles = rig.rounds();
    for i in 0..cycles {
        cycle(if i % 2 == 0 { TransportKind::TCP } else { TransportKind::LOCAL });
    }
    eventually("no GPU is in use", || Gpu::all().is_empty());
    let after = context.memory_info().expect("it is known").free;
    println!("FIGURE: {cycles} cycles: {before} bytes free before, {after} after");
    assert!(before.abs_diff(after) <= 8 * MIB as u64, "{before} bytes were free, now {after}");
    drop((gpu, context));
    rig.ends_clean();
}

#[test]
fn idle_agents_with_memory_of_a_gpu_use_hardly_any_processor() {
    let rig = Rig::new(&[]);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let gpu = rig.memory(0, MIB, 1);
    let region = register(&near, &gpu);
    let to = far.allocate(MIB, Access::WRITE).expect("memory");
    peer_of(&near, &far).write(&whole(&region, &to, MIB), &options()).expect("written");
    std::thread::sleep(Duration::from_millis(200));
    let used = || Resources::of(std::process::id()).cpu;
    let (before, time) = (used(), Duration::from_secs(2));
    std::thread::sleep(time);
    let share = (used() - before).as_secs_f64() / time.as_secs_f64() * 100.0;
    println!("FIGURE: two idle agents, and the driver: {share:.3} % of a core");
    assert!(share < 1.0, "{share} % of a core");
}

#[test]
fn calls_that_transfers_make_do_not_wait_for_a_kernel_that_runs() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let context = rig.context(0);
    let gpu = rig.memory(0, MIB, 1);
    let map = Mapping::populated(4 * MIB).expect("memory");
    let stuck = Stream::new(&context).expect("a stream");
    rig.hold();
    rig.launch(&stuck, &Kernel { name: "stuck", ..Kernel::default() });
    let timed = |what: &str, call: &mut dyn FnMut()| {
        let began = Instant::now();
        call();
        println!("FIGURE: while a kernel runs, {what} takes {:?}", began.elapsed());
        assert_eq!(stuck.query(), Ok(false), "{what} has waited for the kernel");
    };
    let (mut stream, mut event, mut pinned) = (None, None, None);
    timed("making a stream", &mut || stream = Stream::new(&context).ok());
    timed("making an event", &mut || event = Event::new(&context).ok());
    timed("pinning 4 MiB", &mut || {
        // SAFETY: the mapping outlives the registration, which is dropped before it.
        pinned = unsafe { HostRegistration::new(&context, map.span(0, 4 * MIB)) }.ok();
    });
    timed("classifying an address", &mut || {
        kvferry_cuda::memory(gpu.address(), 4096, None).expect("memory of a GPU");
    });
    let (side, happened) = (stream.take().expect("made"), event.take().expect("made"));
    timed("a copy of 1 MiB", &mut || {
        let to = map.as_ptr() as u64;
        // SAFETY: both ranges live until the stream is synchronised, and nothing else uses them.
        unsafe { copy_async(&side, to, gpu.address(), MIB) }.expect("copied");
        happened.record(&side).expect("recorded");
        happened.synchronize().expect("reached");
    });
    timed("making and destroying an event", &mut || drop(Event::new(&context)));
    timed("unpinning 4 MiB", &mut || drop(pinned.take()));
    let (mut side, mut happened) = (Some(side), Some(happened));
    timed("destroying a stream", &mut || drop((side.take(), happened.take())));
    // The calls that the first small pieces of a process need. Freeing the memory waits for the kernel, so it comes last.
    let later = Stream::new(&context).expect("a stream");
    let (mut function, mut staging) = (None, None);
    timed("compiling the kernel", &mut || {
        let module = Module::load_ptx(&context, ptx::TEXT).expect("it is compiled");
        function = Some(module.function(ptx::ENTRY).expect("it is in the module"));
    });
    let function = function.expect("set above");
    timed("the first launch of the kernel", &mut || {
        let grid = Grid { blocks: 1, threads: ptx::THREADS, shared_bytes: 0 };
        // SAFETY: the kernel has these two parameters. Without jobs, it touches no memory.
        unsafe { launch(&later, &function, grid, &[0, 0]) }.expect("launched");
        if rig.is_real() {
            // The fake driver holds all kernels back.
            later.synchronize().expect("it has run");
        }
    });
    timed("allocating 10 MiB", &mut || {
        staging = Some(DeviceAllocation::new(&context, 10 * MIB).expect("memory"));
    });
    rig.release();
    stuck.synchronize().expect("it has run");
    later.synchronize().expect("it has run");
    drop(staging);
    assert_eq!(rig.findings(), Vec::<String>::new());
}
