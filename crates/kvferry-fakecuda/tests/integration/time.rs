//! The virtual clock, and what the seed decides.

use crate::driver::{Driver, STREAM, pattern, ready};
use kvferry_fakecuda::control::{ALL_ENGINES, FakeKernel};

const MIB: usize = 1 << 20;

/// The virtual ns that `work` and a wait for the device take.
fn took(cuda: &Driver, work: impl FnOnce()) -> u64 {
    let begun = cuda.fake.now();
    work();
    cuda.synchronize().unwrap();
    cuda.fake.now() - begun
}

#[test]
fn copies_in_both_directions_overlap_and_those_in_one_do_not() {
    let cuda = ready(&[]);
    let (host, device) = (cuda.alloc_host(64 * MIB).unwrap(), cuda.alloc(64 * MIB).unwrap());
    let (a, b) = (cuda.stream().unwrap(), cuda.stream().unwrap());
    let half = 32 * MIB as u64;
    let up = |stream, at| cuda.copy(device + at, host + at, 32 * MIB, stream).unwrap();
    let down = |stream, at| cuda.copy(host + at, device + at, 32 * MIB, stream).unwrap();
    let one = took(cuda, || up(a, 0));
    assert_eq!(one, 500 + 1500 + 20 + 32 * MIB as u64 / 50);
    let same_way = took(cuda, || {
        up(a, 0);
        up(b, half);
    });
    let both_ways = took(cuda, || {
        up(a, 0);
        down(b, half);
    });
    assert!(same_way > one * 19 / 10, "{same_way} against {one}");
    assert!(both_ways < one * 11 / 10, "{both_ways} against {one}");
}

#[test]
fn small_entries_of_a_batch_pay_the_cliff() {
    let cuda = ready(&[]);
    let (host, device) = (cuda.alloc_host(4 * MIB).unwrap(), cuda.alloc(4 * MIB).unwrap());
    let stream = cuda.stream().unwrap();
    let batch = |len: usize| {
        let entries = (0..4 * MIB / len).map(|i| ((i * len) as u64, len));
        let copies: Vec<crate::driver::Copy> =
            entries.map(|(at, len)| (device + at, host + at, len)).collect();
        took(cuda, || cuda.batch(&copies, STREAM, stream).unwrap())
    };
    assert!(batch(4096) > 5 * batch(64 << 10));
}

#[test]
fn work_of_the_host_hides_a_copy_and_waits_are_no_longer_than_the_work() {
    let cuda = ready(&[]);
    let (host, device) = (cuda.alloc_host(MIB).unwrap(), cuda.alloc(MIB).unwrap());
    let stream = cuda.stream().unwrap();
    let hidden = took(cuda, || {
        cuda.copy(device, host, MIB, stream).unwrap();
        cuda.fake.advance(1_000_000);
    });
    assert_eq!(hidden, 1_000_500);
}

#[test]
fn a_kernel_and_a_copy_behind_an_event_follow_one_another() {
    let cuda = ready(&[]);
    let (host, device) = (cuda.alloc_host(MIB).unwrap(), cuda.alloc(MIB).unwrap());
    let (compute, copies) = (cuda.stream().unwrap(), cuda.stream().unwrap());
    let kernel = || {
        let writes = [(device, MIB as u64)];
        let kernel =
            FakeKernel { name: "k", writes: &writes, delay_ns: 1_000_000, ..FakeKernel::default() };
        cuda.fake.launch(compute, &kernel).unwrap();
    };
    let alone = took(cuda, kernel);
    let copy = took(cuda, || cuda.copy(host, device, MIB, copies).unwrap());
    let chained = took(cuda, || {
        kernel();
        cuda.stream_after(copies, cuda.mark(compute)).unwrap();
        cuda.copy(host, device, MIB, copies).unwrap();
    });
    assert!(chained + 1000 > alone + copy && chained < alone + copy + 1000);
}

/// A program of many streams, copies and edges that the seed chooses.
fn program(cuda: &Driver, seed: u64) -> Vec<u64> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let streams: Vec<usize> = (0..4).map(|_| cuda.stream().unwrap()).collect();
    let (host, device) = (cuda.alloc_host(MIB).unwrap(), cuda.alloc(MIB).unwrap());
    let mut times = Vec::new();
    for _ in 0..200 {
        let stream = streams[rng.usize(..4)];
        let (at, len) = (rng.u64(..MIB as u64 / 2), rng.usize(1..MIB / 2));
        match rng.u8(..6) {
            0 => cuda.copy(device + at, host + at, len, stream).unwrap(),
            1 => cuda.copy(host + at, device + at, len, stream).unwrap(),
            2 => cuda.fill(device + at, 1, len, stream).unwrap(),
            3 => cuda.stream_after(stream, cuda.mark(streams[rng.usize(..4)])).unwrap(),
            4 => cuda.wait_stream(stream).unwrap(),
            _ => cuda.fake.advance(rng.u64(..100_000)),
        }
        times.push(cuda.fake.now());
    }
    cuda.synchronize().unwrap();
    times.push(cuda.fake.now());
    times
}

#[test]
fn the_same_program_takes_the_same_virtual_time_whatever_the_scheduler_does() {
    let mut runs = Vec::new();
    for scheduler in ["1", "2", "3"] {
        let cuda = ready(&[("seed", scheduler), ("races", "off")]);
        runs.push(program(cuda, 11));
    }
    assert!(runs[0].last() > Some(&100_000));
    assert_eq!(runs[0], runs[1]);
    assert_eq!(runs[0], runs[2]);
    let cuda = ready(&[("races", "off")]);
    assert_ne!(program(cuda, 12), runs[0]);
}

/// Bytes that two racing streams leave behind, from a held start.
fn outcome(seed: &str) -> Vec<u8> {
    let cuda = ready(&[("seed", seed), ("delay_us", "0"), ("races", "off")]);
    let device = cuda.alloc(MIB).unwrap();
    let (a, b) = (cuda.alloc(MIB).unwrap(), cuda.alloc(MIB).unwrap());
    cuda.fake.write(a, &pattern(MIB, 1)).unwrap();
    cuda.fake.write(b, &pattern(MIB, 2)).unwrap();
    let (one, two) = (cuda.stream().unwrap(), cuda.stream().unwrap());
    cuda.fake.hold(ALL_ENGINES);
    cuda.copy(device, a, MIB, one).unwrap();
    cuda.copy(device, b, MIB, two).unwrap();
    cuda.fake.release();
    cuda.synchronize().unwrap();
    cuda.fake.read(device, MIB).unwrap()
}

#[test]
fn racing_copies_mix_their_bytes_as_the_seed_decides() {
    let first = outcome("5");
    assert_eq!(first, outcome("5"));
    let others = ["6", "7", "8"].map(outcome);
    assert!(others.iter().any(|other| *other != first));
    let (a, b) = (pattern(MIB, 1), pattern(MIB, 2));
    let from = |bytes: &[u8]| {
        let mut all = others.iter().chain([&first]);
        all.any(|mix| {
            let same = mix.iter().zip(bytes).filter(|(x, y)| x == y).count();
            (MIB / 10..MIB).contains(&same)
        })
    };
    assert!(from(&a) && from(&b), "no outcome is torn");
}
