//! Bytes that copies move, and what the program sees of them meanwhile.

use crate::driver::{ANY, DURING, Driver, STREAM, pattern, ready};
use kvferry_fakecuda::control::{ALL_ENGINES, FakeKernel, HOST_TO_DEVICE};
use kvferry_fakecuda::{FREED, IN_FLIGHT, UNWRITTEN};

const LEN: usize = 100_000;

/// Pinned memory with a pattern, and device memory of the same size.
fn pair(cuda: &Driver, seed: u64) -> (u64, u64, Vec<u8>) {
    let (host, device) = (cuda.alloc_host(LEN).unwrap(), cuda.alloc(LEN).unwrap());
    let bytes = pattern(LEN, seed);
    cuda.fake.write(host, &bytes).unwrap();
    (host, device, bytes)
}

#[test]
fn bytes_go_to_the_device_and_back() {
    let cuda = ready(&[]);
    let (a, x, bytes) = pair(cuda, 1);
    let (b, y, _) = pair(cuda, 2);
    let stream = cuda.stream().unwrap();
    cuda.copy(x, a, LEN, stream).unwrap();
    cuda.copy(y, x, LEN, stream).unwrap();
    cuda.copy(b, y, LEN, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.fake.read(b, LEN).unwrap(), bytes);
    assert_eq!(cuda.fake.findings(), [""; 0]);
}

#[test]
fn device_memory_has_a_poison_before_it_is_written_and_another_after_it_is_freed() {
    let cuda = ready(&[("reuse", "100")]);
    let x = cuda.alloc(LEN).unwrap();
    assert_eq!(cuda.fake.read(x, LEN).unwrap(), vec![UNWRITTEN; LEN]);
    cuda.free(x).unwrap();
    assert!(cuda.fake.read(x, 1).is_err());
    let y = cuda.alloc(LEN).unwrap();
    assert_eq!(y, x);
    assert_eq!(cuda.fake.read(y, LEN).unwrap(), vec![FREED; LEN]);
}

#[test]
fn a_destination_is_poisoned_from_the_start_of_its_copy_and_filled_in_torn_parts() {
    // The copy is torn for 15 pauses: longer than any thread stops.
    let cuda = ready(&[("delay_us", "0"), ("step_us", "1000000")]);
    let len = 4 << 20;
    let (host, device) = (cuda.alloc_host(len).unwrap(), cuda.alloc(len).unwrap());
    cuda.fake.write(host, &vec![1; len]).unwrap();
    cuda.fake.write(device, &vec![2; len]).unwrap();
    let stream = cuda.stream().unwrap();
    cuda.copy(device, host, len, stream).unwrap();
    let mut torn = false;
    while cuda.query_stream(stream) == Err(600) {
        let bytes = cuda.fake.read(device, len).unwrap();
        let count = |byte| bytes.iter().filter(|&&b| b == byte).count();
        assert_eq!(count(1) + count(2) + count(IN_FLIGHT), len);
        assert!(count(2) == 0 || count(2) == len, "the poison covers the whole destination");
        if count(1) > 0 && count(IN_FLIGHT) > 0 {
            torn = true;
            // The remaining steps are made without pauses.
            cuda.fake.set("step_us", "0");
        }
    }
    assert!(torn, "a copy of 4 MiB takes many steps");
}

#[test]
fn a_held_engine_starts_nothing_and_others_go_on() {
    let cuda = ready(&[]);
    let (host, device, _) = pair(cuda, 1);
    let (back, other, _) = pair(cuda, 2);
    let (up, down) = (cuda.stream().unwrap(), cuda.stream().unwrap());
    cuda.fake.hold(HOST_TO_DEVICE);
    cuda.copy(device, host, LEN, up).unwrap();
    cuda.copy(back, other, LEN, down).unwrap();
    cuda.wait_stream(down).unwrap();
    assert_eq!(cuda.query_stream(up), Err(600));
    assert_eq!(cuda.fake.read(device, 1).unwrap(), [UNWRITTEN]);
    cuda.fake.release();
    cuda.wait_stream(up).unwrap();
}

/// Copies while the host changes the source after the call, and after `early` sources were read
/// in between. Tells whether the copy shows the bytes of the call.
fn shows_the_call(cuda: &Driver, order: i32, early: u64) -> bool {
    let (host, device, before) = pair(cuda, 1);
    let stream = cuda.stream().unwrap();
    cuda.fake.hold(ALL_ENGINES);
    cuda.batch(&[(device, host, LEN)], order, stream).unwrap();
    while cuda.fake.counter("early_reads") < early {
        std::thread::yield_now();
    }
    cuda.fake.write(host, &vec![0x99; LEN]).unwrap();
    cuda.fake.release();
    cuda.wait_stream(stream).unwrap();
    let arrived = cuda.fake.read(device, LEN).unwrap();
    assert!(arrived == before || arrived == vec![0x99; LEN]);
    arrived == before
}

#[test]
fn stream_sources_are_read_at_execution_and_sources_of_the_call_during_it() {
    let cuda = ready(&[]);
    for _ in 0..5 {
        assert!(!shows_the_call(cuda, STREAM, 0));
        assert!(shows_the_call(cuda, DURING, 0));
    }
}

#[test]
fn sources_in_any_order_are_read_at_the_call_between_or_at_execution() {
    let cuda = ready(&[("any_order", "call")]);
    assert!(shows_the_call(cuda, ANY, 0));
    cuda.fake.set("any_order", "between");
    assert!(shows_the_call(cuda, ANY, 1));
    cuda.fake.set("any_order", "execution");
    assert!(!shows_the_call(cuda, ANY, 1));
    assert_eq!(cuda.fake.counter("early_reads"), 1);
    cuda.fake.set("any_order", "seeded");
    let early = (0..30).filter(|_| shows_the_call(cuda, ANY, 0)).count();
    assert!((5..30).contains(&early), "{early} of 30 were read before the copy ran");
}

#[test]
fn a_source_in_any_order_is_read_before_earlier_work_of_the_stream_has_written_it() {
    let cuda = ready(&[("any_order", "call"), ("delay_us", "0")]);
    let (host, device, _) = pair(cuda, 1);
    let stream = cuda.stream().unwrap();
    let kernel = FakeKernel {
        name: "producer",
        writes: &[(device, LEN as u64)],
        fill: 0x11,
        delay_ns: 5_000_000,
        ..FakeKernel::default()
    };
    cuda.fake.launch(stream, &kernel).unwrap();
    cuda.batch(&[(host, device, LEN)], ANY, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.fake.read(host, 1).unwrap(), [UNWRITTEN]);
    assert_eq!(cuda.fake.findings().len(), 1, "{:?}", cuda.fake.findings());
}

#[test]
fn a_host_source_that_changes_before_the_end_of_its_copy_is_a_finding() {
    let cuda = ready(&[]);
    for order in [STREAM, ANY] {
        cuda.fake.set("any_order", "call");
        let (host, device, _) = pair(cuda, 1);
        let stream = cuda.stream().unwrap();
        cuda.batch(&[(device, host, LEN)], order, stream).unwrap();
        cuda.wait_stream(stream).unwrap();
        assert_eq!(cuda.fake.counter("source_changed"), 0);
    }
    let (host, device, _) = pair(cuda, 1);
    let stream = cuda.stream().unwrap();
    cuda.fake.hold(ALL_ENGINES);
    cuda.batch(&[(device, host, LEN)], ANY, stream).unwrap();
    cuda.fake.write(host + 77, &[0xff]).unwrap();
    cuda.fake.release();
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.fake.counter("source_changed"), 1);
    assert!(cuda.fake.findings()[0].contains("changed before the end"));
}

#[test]
fn pageable_memory_is_staged_during_the_call_and_copies_to_it_are_synchronous() {
    let cuda = ready(&[]);
    let device = cuda.alloc(LEN).unwrap();
    let stream = cuda.stream().unwrap();
    let bytes = pattern(LEN, 3);
    let mut source = bytes.clone();
    cuda.copy(device, source.as_ptr() as u64, LEN, stream).unwrap();
    source.fill(0);
    let mut back = vec![0; LEN];
    cuda.copy(back.as_mut_ptr() as u64, device, LEN, stream).unwrap();
    assert_eq!(back, bytes);
    assert_eq!(cuda.query_stream(stream), Ok(()));
}

#[test]
fn a_fill_writes_every_byte_of_its_range_and_no_other() {
    let cuda = ready(&[]);
    let device = cuda.alloc(LEN).unwrap();
    let stream = cuda.stream().unwrap();
    cuda.fill(device + 1, 7, LEN - 2, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    let bytes = cuda.fake.read(device, LEN).unwrap();
    assert_eq!((bytes[0], bytes[LEN - 1]), (UNWRITTEN, UNWRITTEN));
    assert!(bytes[1..LEN - 1].iter().all(|&byte| byte == 7));
}

#[test]
fn a_copy_outside_of_one_allocation_or_registration_is_refused_at_the_call() {
    let cuda = ready(&[]);
    let (host, device, _) = pair(cuda, 1);
    let stream = cuda.stream().unwrap();
    assert_eq!(cuda.copy(device + 1, host, LEN, stream), Err(1));
    assert_eq!(cuda.copy(device, host + 4096, LEN, stream), Err(1));
    let pages = cuda.alloc_host(3 * 4096).unwrap();
    cuda.free_host(pages).unwrap();
    let block = vec![0_u8; 4 * 4096];
    let start = (block.as_ptr() as u64).next_multiple_of(4096);
    cuda.register(start, 4096).unwrap();
    cuda.register(start + 4096, 4096).unwrap();
    assert_eq!(cuda.register(start + 4096, 1), Err(712));
    assert_eq!(cuda.copy(device, start + 2048, 4096, stream), Err(1));
    cuda.copy(device, start + 4096, 4096, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    cuda.unregister(start).unwrap();
    assert_eq!(cuda.unregister(start), Err(713));
    cuda.unregister(start + 4096).unwrap();
}

#[test]
fn unregistering_memory_under_a_copy_is_a_finding() {
    let cuda = ready(&[]);
    let device = cuda.alloc(4096).unwrap();
    let block = vec![0_u8; 8192];
    cuda.register(block.as_ptr() as u64, 8192).unwrap();
    let stream = cuda.stream().unwrap();
    cuda.fake.hold(ALL_ENGINES);
    cuda.copy(device, block.as_ptr() as u64, 4096, stream).unwrap();
    cuda.unregister(block.as_ptr() as u64).unwrap();
    assert_eq!(cuda.fake.counter("unpinned_in_use"), 1);
    cuda.fake.release();
    cuda.wait_stream(stream).unwrap();
}

#[test]
fn scattered_batches_move_every_entry_in_both_forms_of_the_call() {
    for version in ["12.8", "13.0"] {
        let cuda = ready(&[("version", version)]);
        let (host, device, bytes) = pair(cuda, 5);
        let mut rng = fastrand::Rng::with_seed(9);
        let mut slots: Vec<usize> = (0..LEN / 100).collect();
        rng.shuffle(&mut slots);
        let copy = |(index, &slot): (usize, &usize)| {
            (device + index as u64 * 100, host + slot as u64 * 100, rng.usize(1..=100))
        };
        let copies: Vec<crate::driver::Copy> = slots.iter().enumerate().map(copy).collect();
        let stream = cuda.stream().unwrap();
        cuda.batch(&copies, STREAM, stream).unwrap();
        cuda.wait_stream(stream).unwrap();
        let arrived = cuda.fake.read(device, LEN).unwrap();
        for &(to, from, len) in &copies {
            let (to, from) = ((to - device) as usize, (from - host) as usize);
            assert_eq!(arrived[to..to + len], bytes[from..from + len]);
            assert!(arrived[to + len..].iter().take(100 - len).all(|&b| b == UNWRITTEN));
        }
        assert_eq!(cuda.fake.findings(), [""; 0]);
    }
}
