//! Stages overlap: a long transfer takes about as long as the slower of its two parts, in the fake device's virtual time.
//!
//! The virtual clock is the host's. It moves when bytes are sent, here by a call in the place of the network, and when the
//! thread of the GPU sees that a copy has ended. That thread and the one that sends run in real time: where one stops, the
//! other may see more ends than it would on a device, and the transfer takes longer than it would there. So the bound
//! holds if one of several transfers meets it: one that copies and sends in turns never does.

use crate::hardware::alone;
use crate::kit::*;
use kvferry::{Access, Batch, HostSpan, Region, TransportKind, staged};
use kvferry_cuda::Direction;
use kvferry_sys::cuda::DeviceAllocation;
use kvferry_testkit::Watchdog;

const MIB: u64 = 1 << 20;
const LEN: u64 = 256 * MIB;
/// Bytes that the GPU copies in a virtual ns.
const COPY_RATE: u64 = 50;
/// Transfers of which one has to meet the bound.
const TRIES: usize = 20;

/// The virtual ns of a transfer of everything. Each call of the stages gets `at_once` bytes, and the network moves `rate`
/// bytes in a virtual ns.
fn took(rig: &FakeRig, region: &Region, direction: Direction, rate: u64, at_once: u64) -> u64 {
    let begun = rig.fake.now();
    let mut moved = 0;
    let mut network = |span: HostSpan| {
        moved += span.len() as u64;
        rig.fake.advance(span.len() as u64 / rate);
    };
    for at in (0..LEN).step_by(at_once as usize) {
        let mut batch = Batch::new();
        batch.set_after(kvferry::After::host());
        batch.push(region, at, &region.remote(), at, at_once).expect("inside");
        let copied = match direction {
            Direction::Out => staged::copy_out(&batch, &mut network),
            Direction::In => staged::copy_in(&batch, &mut network),
        };
        copied.expect("copied");
    }
    assert_eq!(moved, LEN);
    rig.fake.now() - begun
}

#[test]
fn a_transfer_takes_a_tenth_longer_than_its_slowest_part_at_most_and_one_without_overlap_takes_more()
 {
    alone(|| {
        let _bound = Watchdog::new(5 * LIMIT);
        let settings = [
            ("op_ns", "0"),
            ("entry_ns", "0"),
            ("call_ns", "0"),
            ("d2h_gbps", "50"),
            ("h2d_gbps", "50"),
            ("delay_us", "0"),
            ("races", "off"),
        ];
        let Some(rig) = FakeRig::new(&settings) else { return };
        let near = agent(TransportKind::TCP);
        let gpu = DeviceAllocation::new(&rig.context(0), LEN as usize).expect("memory");
        let memory = kvferry_cuda::memory(gpu.address(), LEN, None).expect("a GPU");
        let region = near.register_device(memory, Access::READ_WRITE).expect("a region");
        for direction in [Direction::Out, Direction::In] {
            // The network is slower than the copies, as fast, or faster.
            for rate in [COPY_RATE / 2, COPY_RATE, 2 * COPY_RATE] {
                let slowest = (LEN / COPY_RATE).max(LEN / rate);
                let is_met = |ns: u64| 10 * ns <= 11 * slowest;
                let tries = (0..TRIES).map(|_| took(&rig, &region, direction, rate, LEN));
                let ratios = tries.map(|ns| (ns as f64 / slowest as f64, is_met(ns)));
                let mut seen = Vec::new();
                let has_met = ratios.inspect(|it| seen.push(it.0)).any(|it| it.1);
                println!("FIGURE: {direction:?} at {rate} GB/s: {seen:.3?} of the slowest part");
                assert!(has_met, "{direction:?} at {rate} GB/s: {seen:.3?} of the slowest part");
                // One stage at a time: the smallest batch, which is copied and sent in turns.
                let in_turns = took(&rig, &region, direction, rate, MIB);
                assert!(!is_met(in_turns), "{direction:?} at {rate} GB/s: {in_turns} ns in turns");
            }
        }
        near.unregister(&region).expect("no copy is left");
    });
}
