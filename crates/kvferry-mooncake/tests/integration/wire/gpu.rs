//! Memory of GPUs, on the fake driver: named by address, between kvferry's engines and with stock peers.

use crate::wire::fake::{BASE, Behaviour, Fake as StockPeer};
use crate::wire::target::{OK, READ, V2, WRITE, connect_at, request, status, write_request};
use crate::wire::{NEVER, PAGE, handshake, pattern};
use kvferry::Batch;
use kvferry_cuda::Order;
use kvferry_cuda::gpu::Settings;
use kvferry_fakecuda::control::{COMPUTE, DEVICE_TO_HOST, Fake, FakeKernel, library_path};
use kvferry_mooncake::{MooncakeEngine, Moves};
use kvferry_sys::cuda::{Context, DeviceAllocation, Driver, Stream};
use std::fs;
use std::io::{Read, Write};
use std::sync::OnceLock;
use std::time::Duration;

const LEN: usize = 64 * PAGE;

fn use_fake_driver() {
    // SAFETY: each test sets the same values before the driver is looked for.
    unsafe {
        std::env::set_var("KVFERRY_LIBCUDA", library_path());
        // No test is about measurements of copies, or about the silence limit: a loaded machine delays heartbeats.
        std::env::set_var("KVFERRY_GPU_CALIBRATE", "off");
        std::env::set_var("KVFERRY_SILENCE_MS", NEVER.as_millis().to_string());
    }
}

/// The fake driver, loaded as an engine of the process has loaded its driver.
pub(crate) fn loaded() -> Fake {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    *FAKE.get_or_init(|| {
        use_fake_driver();
        Fake::load(&library_path()).expect("the fake driver loads")
    })
}

pub(crate) fn context(device: i32) -> Context {
    let driver = Driver::get().expect("the fake driver");
    Context::primary(driver.device(device).expect("a device")).expect("a context")
}

fn memory(fake: Fake, device: i32, seed: u8) -> DeviceAllocation {
    let memory = DeviceAllocation::new(&context(device), LEN).expect("memory");
    fake.write(memory.address(), &pattern(seed, LEN)).expect("it is mapped");
    memory
}

fn bytes(fake: Fake, memory: &DeviceAllocation) -> Vec<u8> {
    fake.read(memory.address(), LEN).expect("it is mapped")
}

fn engine() -> MooncakeEngine {
    let engine = MooncakeEngine::new();
    assert_eq!(engine.initialize_at("127.0.0.1", "", "P2PHANDSHAKE"), 0, "{}", engine.last_error());
    engine
}

fn address(engine: &MooncakeEngine) -> String {
    engine.address().expect("it runs")
}

/// Every second page of the local memory, and the page at the same place of the peer's.
fn moves(write: bool, target: &str, local: u64, remote: u64) -> Moves {
    let mut batch = Batch::new();
    for at in (0..LEN as u64).step_by(2 * PAGE) {
        let here = std::ptr::with_exposed_provenance_mut((local + at) as usize);
        // SAFETY: the memory is registered, and outlives the transfer.
        unsafe { batch.push_raw(here, remote + at, PAGE as u64) }.expect("a range");
    }
    Moves { write, target: target.to_owned(), batch: Ok(batch) }
}

/// Every second page of `new`, between those of `old`.
fn woven(new: &[u8], old: &[u8]) -> Vec<u8> {
    let pages = new.chunks(PAGE).zip(old.chunks(PAGE)).enumerate();
    pages.flat_map(|(i, (new, old))| if i % 2 == 0 { new } else { old }).copied().collect()
}

fn transfer(engine: &MooncakeEngine, moves: Moves) {
    assert_eq!(engine.transfer(moves, None, &|| false), 0, "{}", engine.last_error());
}

#[test]
fn memory_of_gpus_and_of_the_host_is_moved_by_address_between_engines() {
    let fake = loaded();
    let (near, far) = (engine(), engine());
    let (ours, theirs) = (memory(fake, 0, 1), memory(fake, 1, 2));
    let mut host = pattern(3, LEN);
    let host_at = host.as_mut_ptr().expose_provenance() as u64;
    let ranges = [ours.address(), host_at];
    assert_eq!(near.register(&ranges, &[LEN as u64; 2], "*"), 0, "{}", near.last_error());
    assert_eq!(far.register(&[theirs.address()], &[LEN as u64], "*"), 0, "{}", far.last_error());
    assert_eq!(near.register(&[ours.address()], &[16], "cuda:0"), -7, "it overlaps");
    assert!(near.is_gpu_memory(ours.address() + 5) && !near.is_gpu_memory(host_at));

    let target = address(&far);
    transfer(&near, moves(true, &target, ours.address(), theirs.address()));
    assert!(bytes(fake, &theirs) == woven(&pattern(1, LEN), &pattern(2, LEN)));
    // Writes memory of the host to the GPU, and reads it back.
    transfer(&near, moves(true, &target, host_at, theirs.address()));
    assert!(bytes(fake, &theirs) == woven(&pattern(3, LEN), &pattern(2, LEN)));
    let id = near.submit(moves(false, &target, ours.address(), theirs.address()), &|| false);
    assert_eq!(near.wait(&[id], &|| false), 0, "{}", near.last_error());
    assert!(bytes(fake, &ours) == woven(&pattern(3, LEN), &pattern(1, LEN)));

    assert_eq!(near.unregister(&ranges), 0);
    assert_eq!(near.unregister(&[ours.address()]), -3);
    let unregistered = moves(true, &target, ours.address(), theirs.address());
    assert_eq!(near.transfer(unregistered, None, &|| false), -1);
    assert!(near.last_error().contains("not registered"), "{}", near.last_error());
    assert_eq!(far.unregister(&[theirs.address()]), 0);
    assert_eq!(fake.findings(), Vec::<String>::new());
}

#[test]
fn memory_of_a_gpu_is_moved_to_and_from_a_stock_peer() {
    let fake = loaded();
    for version in [1, 2] {
        let stock = StockPeer::start(LEN, Behaviour { version, ..Behaviour::default() });
        stock.fill(&pattern(9, LEN));
        let (engine, memory) = (engine(), memory(fake, 0, 1));
        assert_eq!(engine.register(&[memory.address()], &[LEN as u64], "cuda:0"), 0);
        transfer(&engine, moves(false, &stock.address(), memory.address(), BASE));
        assert!(bytes(fake, &memory) == woven(&pattern(9, LEN), &pattern(1, LEN)), "{version}");
        fake.write(memory.address(), &pattern(4, LEN)).expect("it is mapped");
        transfer(&engine, moves(true, &stock.address(), memory.address(), BASE));
        assert!(stock.memory() == woven(&pattern(4, LEN), &pattern(9, LEN)), "{version}");
        engine.shutdown();
    }
    assert_eq!(fake.findings(), Vec::<String>::new());
}

#[test]
fn two_stages_of_a_gpu_are_enough_for_transfers_of_engines_and_stock_peers_at_a_time() {
    let fake = loaded();
    let few = Settings { stages: Some(2), is_uncalibrated: true, ..Settings::default() };
    Settings::give(Some(few));
    let stock = StockPeer::start(LEN, Behaviour::default());
    stock.fill(&pattern(9, LEN));
    let (near, far) = (engine(), engine());
    let ours = [1, 2, 3].map(|seed| memory(fake, 0, seed));
    let theirs = [4, 5].map(|seed| memory(fake, 1, seed));
    for (engine, memories) in [(&near, &ours[..]), (&far, &theirs[..])] {
        let addresses: Vec<u64> = memories.iter().map(DeviceAllocation::address).collect();
        let lens = vec![LEN as u64; addresses.len()];
        assert_eq!(engine.register(&addresses, &lens, "*"), 0, "{}", engine.last_error());
    }
    let (to_far, to_near, to_stock) = (address(&far), address(&near), stock.address());
    for _ in 0..20 {
        let near_ids = [
            near.submit(moves(true, &to_far, ours[0].address(), theirs[0].address()), &|| false),
            near.submit(moves(false, &to_stock, ours[2].address(), BASE), &|| false),
        ];
        let far_id =
            far.submit(moves(true, &to_near, theirs[1].address(), ours[1].address()), &|| false);
        assert_eq!(near.wait(&near_ids, &|| false), 0, "{}", near.last_error());
        assert_eq!(far.wait(&[far_id], &|| false), 0, "{}", far.last_error());
    }
    assert!(bytes(fake, &theirs[0]) == woven(&pattern(1, LEN), &pattern(4, LEN)));
    assert!(bytes(fake, &ours[1]) == woven(&pattern(5, LEN), &pattern(2, LEN)));
    assert!(bytes(fake, &ours[2]) == woven(&pattern(9, LEN), &pattern(3, LEN)));
    [near, far].iter().for_each(MooncakeEngine::shutdown);
    Settings::give(None);
    assert_eq!(fake.findings(), Vec::<String>::new());
}

#[test]
fn a_stock_peer_finds_memory_of_a_gpu_in_the_segment_and_reads_and_writes_it() {
    let fake = loaded();
    let (engine, memory) = (engine(), memory(fake, 0, 1));
    assert_eq!(engine.register(&[memory.address()], &[LEN as u64], "*"), 0);
    let segment = handshake::descriptor_of(&address(&engine));
    let buffers = segment["buffers"].as_array().expect("a list");
    assert_eq!(buffers.len(), 1, "{segment}");
    assert_eq!(buffers[0]["addr"].as_u64(), Some(memory.address()));
    assert_eq!(buffers[0]["length"].as_u64(), Some(LEN as u64));

    let mut stream = connect_at(&segment);
    let at = usize::try_from(memory.address()).expect("an address of this process");
    stream.write_all(&write_request(WRITE | V2, at + PAGE, &pattern(7, LEN / 2))).expect("written");
    assert_eq!(status(&mut stream), OK);
    stream.write_all(&request(READ | V2, at, LEN as u64)).expect("written");
    assert_eq!(status(&mut stream), OK);
    let mut read = vec![0; LEN];
    stream.read_exact(&mut read).expect("payload");
    let mut expected = pattern(1, LEN);
    expected[PAGE..PAGE + LEN / 2].copy_from_slice(&pattern(7, LEN / 2));
    assert!(read == expected && read == bytes(fake, &memory));
    engine.shutdown();
    assert_eq!(fake.findings(), Vec::<String>::new());
}

#[test]
#[ignore = "slow: make test-slow"]
fn a_stock_peer_waits_for_a_gpu_longer_than_a_peer_may_stall() {
    let fake = loaded();
    let (engine, memory) = (engine(), memory(fake, 0, 1));
    assert_eq!(engine.register(&[memory.address()], &[LEN as u64], "*"), 0);
    let mut stream = connect_at(&handshake::descriptor_of(&address(&engine)));
    stream.set_read_timeout(Some(kvferry_testkit::PATIENCE)).expect("a socket");
    fake.hold(DEVICE_TO_HOST);
    let at = usize::try_from(memory.address()).expect("an address of this process");
    stream.write_all(&request(READ | V2, at, LEN as u64)).expect("written");
    // A peer that stalls for 60 s is closed.
    std::thread::sleep(Duration::from_secs(65));
    fake.release();
    assert_eq!(status(&mut stream), OK);
    let mut read = vec![0; LEN];
    stream.read_exact(&mut read).expect("payload");
    assert!(read == pattern(1, LEN));
    engine.shutdown();
    assert_eq!(fake.findings(), Vec::<String>::new());
}

#[test]
fn transfers_come_after_the_stream_that_the_engine_was_given() {
    let fake = loaded();
    let stock = StockPeer::start(LEN, Behaviour::default());
    let (engine, memory) = (engine(), memory(fake, 0, 1));
    assert_eq!(engine.register(&[memory.address()], &[LEN as u64], "*"), 0);
    let stream = Stream::new(&context(0)).expect("a stream");
    // SAFETY: the stream outlives the engine.
    assert_eq!(unsafe { engine.set_after(&[Order::Stream(stream.raw())], None) }, 0);
    fake.hold(COMPUTE);
    let entered = stream.context().enter().expect("current");
    let writes = [(memory.address(), LEN as u64)];
    let kernel = FakeKernel { name: "fill", writes: &writes, fill: 6, ..FakeKernel::default() };
    fake.launch(stream.raw().0 as usize, &kernel).expect("it is launched");
    drop(entered);
    let write = moves(true, &stock.address(), memory.address(), BASE);
    let id = engine.submit(write, &|| false);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((engine.check(id), stock.requests()), (0, 0), "the kernel has not run");
    fake.release();
    assert_eq!(engine.wait(&[id], &|| false), 0, "{}", engine.last_error());
    assert!(stock.memory() == woven(&[6; LEN], &[0; LEN]));
    engine.shutdown();
    assert_eq!(fake.findings(), Vec::<String>::new());
}

/// Whether the process has mapped the driver.
fn is_loaded() -> bool {
    let maps = fs::read_to_string("/proc/self/maps").expect("a list");
    maps.contains("fakecuda.so")
}

#[test]
fn a_process_without_a_driver_loads_one_for_a_location_that_names_a_gpu_only() {
    use_fake_driver();
    // Tests that share the process may have loaded the driver before.
    let is_alone = !is_loaded();
    let engine = engine();
    let mut host = vec![0; LEN];
    let at = host.as_mut_ptr().expose_provenance() as u64;
    for location in ["*", "cpu:0", ""] {
        assert_eq!(engine.register(&[at], &[LEN as u64], location), 0, "{}", engine.last_error());
        assert_eq!(engine.unregister(&[at]), 0);
    }
    assert!(!is_alone || !is_loaded());
    // A location is a hint: the memory is the host's.
    assert_eq!(engine.register(&[at], &[LEN as u64], "cuda:0"), 0, "{}", engine.last_error());
    assert!(is_loaded() && !engine.is_gpu_memory(at));
    assert_eq!(engine.unregister(&[at]), 0);
    let nowhere = 1 << 46;
    assert_eq!(engine.register(&[nowhere], &[16], "cuda:0"), -1);
    assert!(engine.last_error().contains("not memory of a GPU either"), "{}", engine.last_error());
}
