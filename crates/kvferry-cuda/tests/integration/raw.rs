//! Plain copies for benches, and stages without a peer, on the fake driver.

use kvferry::{Access, Agent, Batch, TransportKind, Transports, staged};
use kvferry_cuda::raw::{self, Buffers, Compute, Method, Piece, Table};
use kvferry_cuda::{Direction, ptx};
use kvferry_fakecuda::control::{Fake, library_path};
use kvferry_sys::cuda::MemoryInfo;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, eventually};
use std::time::Duration;

const LIMIT: Duration = kvferry_testkit::PATIENCE;

fn fake() -> Fake {
    let path = library_path();
    // SAFETY: this test has a process of its own, and sets it before kvferry reads it.
    unsafe { std::env::set_var("KVFERRY_LIBCUDA", &path) };
    Fake::load(&path).expect("the fake driver loads")
}

/// Pieces of these lengths, one after the other on the host, and from the end on in the device's memory.
fn pieces(lengths: &[usize]) -> Vec<Piece> {
    let all: usize = lengths.iter().sum();
    let mut host_at = 0;
    let piece = |&len: &usize| {
        let piece = Piece { device_at: all - host_at - len, host_at, len };
        host_at += len;
        piece
    };
    lengths.iter().map(piece).collect()
}

fn agent() -> Agent {
    Agent::builder().transports(Transports::only(TransportKind::TCP)).start().expect("it starts")
}

#[test]
fn each_method_copies_a_table_out_and_in() {
    let _bound = Watchdog::new(LIMIT);
    let fake = fake();
    let context = raw::context(0).expect("a device");
    let (small, large) = (vec![4096; 130], vec![17 << 20, 16, 80_000]);
    let len = large.iter().sum();
    let mut buffers = Buffers::new(&context, len, len).expect("memory");
    let kernel = buffers.load_kernel(ptx::TEXT, ptx::ENTRY, ptx::THREADS, 32).expect("it compiles");
    assert!(buffers.load_kernel(ptx::TEXT, "another", 256, 32).is_err());
    let mut methods = raw::supported().expect("a driver");
    assert_eq!(methods.len(), 4, "single copies, and three numbers of copies of a batch");
    methods.extend([Method::Kernel(kernel, 2), Method::Gather(kernel, 3)]);
    copies_out_and_in(&fake, &buffers, &pieces(&small), &methods);
    // More than is gathered before a copy.
    copies_out_and_in(&fake, &buffers, &pieces(&large), &methods[5..]);
    buffers.fill_device(7).expect("filled");
    assert_eq!(fake.read(buffers.device_address() + 5, 2).expect("mapped"), [7, 7]);
    assert!(buffers.copy_both_ways(len / 2 / 16 * 16).is_ok());
    assert_eq!(fake.findings(), Vec::<String>::new());
}

fn copies_out_and_in(fake: &Fake, buffers: &Buffers, pieces: &[Piece], methods: &[Method]) {
    let len = pieces.iter().map(|piece| piece.len).sum();
    let table = |direction| Table::new(buffers, direction, pieces).expect("lists");
    let (out, into) = (table(Direction::Out), table(Direction::In));
    for (seed, &method) in (1..).zip(methods) {
        let sent = Pattern::new(seed).bytes(len);
        buffers.write_host(0, &sent);
        buffers.copy(&into, method).expect("copied");
        for piece in pieces {
            let there = buffers.device_address() + piece.device_at as u64;
            let got = fake.read(there, piece.len).expect("it is mapped");
            assert!(got == sent[piece.host_at..piece.host_at + piece.len], "{method:?}");
        }
        buffers.write_host(0, &vec![0; len]);
        buffers.copy(&out, method).expect("copied");
        let mut got = vec![0; len];
        buffers.read_host(0, &mut got);
        assert!(got == sent, "{method:?}");
    }
}

#[test]
fn bytes_go_through_stages_without_a_peer_and_only_those_of_a_device() {
    let _bound = Watchdog::new(LIMIT);
    let fake = fake();
    let context = raw::context(0).expect("a device");
    let (pieces, len) = (pieces(&[4096, 9 << 20, 12, 5000]), 4096 + (9 << 20) + 12 + 5000);
    let buffers = Buffers::new(&context, len, 4096).expect("memory");
    let agent = agent();
    let memory = kvferry_cuda::memory(buffers.device_address(), len as u64, None).expect("a GPU's");
    let region = agent.register_device(memory, Access::NONE).expect("a region");
    let mut batch = Batch::new();
    for piece in &pieces {
        let (at, len) = (piece.device_at as u64, piece.len as u64);
        batch.push(&region, at, &region.remote(), at, len).expect("inside");
    }
    let sent = Pattern::new(3).bytes(len);
    let mut at = 0;
    staged::copy_in(&batch, &mut |stage| {
        stage.copy_from(&sent[at..at + stage.len()]);
        at += stage.len();
    })
    .expect("copied");
    assert_eq!(at, len);
    for piece in &pieces {
        let there = buffers.device_address() + piece.device_at as u64;
        let got = fake.read(there, piece.len).expect("it is mapped");
        assert!(got == sent[piece.host_at..piece.host_at + piece.len]);
    }
    let mut got = Vec::new();
    staged::copy_out(&batch, &mut |stage| {
        let mut bytes = vec![0; stage.len()];
        stage.copy_to(&mut bytes);
        got.extend(bytes);
    })
    .expect("copied");
    assert!(got == sent);
    let host = agent.allocate(4096, Access::NONE).expect("memory");
    batch.push(&host, 0, &region.remote(), 0, 16).expect("inside");
    let refused = staged::copy_out(&batch, &mut |_| ()).expect_err("host memory");
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
    agent.unregister(&region).expect("no copy is left");
    assert_eq!(fake.findings(), Vec::<String>::new());
}

#[test]
fn a_computation_is_waited_for_and_takes_longer_with_more_rounds() {
    let _bound = Watchdog::new(LIMIT);
    let fake = fake();
    let context = raw::context(0).expect("a device");
    let compute = Compute::new(&context, 1).expect("it compiles");
    let mut rounds = 0;
    // A thread that stops makes a round seem slow.
    eventually("more than one round", || {
        rounds = compute.rounds_for(Duration::from_millis(200)).expect("it runs");
        rounds > 1
    });
    compute.start(rounds).expect("launched");
    assert_eq!(compute.after().expect("an edge").edges().len(), 1);
    compute.wait().expect("it has run");
    assert_eq!(fake.findings(), Vec::<String>::new());
}

#[test]
fn device_memory_that_is_allocated_is_missing_from_what_is_free() {
    let _fake = fake();
    let context = raw::context(0).expect("a device");
    let MemoryInfo { free: before, total } = context.memory_info().expect("a driver");
    let buffers = Buffers::new(&context, 1 << 20, 4096).expect("memory");
    let after = context.memory_info().expect("a driver").free;
    assert!(before - after >= 1 << 20 && before <= total, "{before} - {after} of {total}");
    drop(buffers);
    assert_eq!(context.memory_info().expect("a driver").free, before);
    assert!(raw::pin_time(&context, 1 << 20, 64 << 10).expect("pinned") > Duration::ZERO);
}
