//! The oracle for cutting a batch into frames; see `crate::fuzzing`.

use super::batch::{Batch, Cutter};
use crate::memory::region::{Access, Backing};
use crate::memory::table::RegionTable;
use kvferry_proto::fuzzing::Script;
use kvferry_proto::{Incarnation, WireDescriptor};

/// Longer than one descriptor's maximum.
const REGION_LEN: u64 = 3 << 30;
const PAIRS_MAX: usize = 200;
const FRAMES_MAX: usize = 2000;

/// Cuts a batch of any shape into frames of any size: each byte must be in exactly one frame, in
/// order, and no frame may exceed the requested size.
pub fn cutter(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let bytes_max = 1 + u64::from(script.short()) * script.pick(&[1, 4096, 1 << 20]);
    let descriptors_max = 1 + u32::from(script.byte());
    let (batch, expected) = batch(&mut script);
    let mut cutter = Cutter::new(&batch);
    let mut covered: Vec<(usize, u64, u64)> = Vec::new();
    for _ in 0..FRAMES_MAX {
        let Some(frame) = cutter.next(&batch, bytes_max, descriptors_max) else {
            assert!(cutter.is_done());
            let covered: Vec<_> = covered.into_iter().map(|(_, from, to)| (from, to)).collect();
            assert_eq!(covered, expected);
            return;
        };
        let mut table = Vec::new();
        frame.write_table(&batch, &mut table);
        assert_eq!(table.len(), frame.descriptors as usize * WireDescriptor::LEN);
        assert!((1..=bytes_max).contains(&frame.bytes) && frame.descriptors <= descriptors_max);
        assert_eq!(frame.whole, frame.bytes == batch.bytes());
        let (mut index, mut sum) = (0, 0);
        frame.for_each_part(&batch, |pair, _, offset, len| {
            assert!(len > 0);
            if index == frame.descriptors / 2 {
                assert_eq!(frame.pair_of(&batch, index), pair);
            }
            match covered.last_mut() {
                Some((last, _, to)) if *last == pair => {
                    assert_eq!(*to, offset, "in order, without a gap");
                    *to += u64::from(len);
                }
                _ => covered.push((pair, offset, offset + u64::from(len))),
            }
            index += 1;
            sum += u64::from(len);
        });
        assert_eq!((index, sum), (frame.descriptors, frame.bytes));
    }
}

/// Cuts a batch of `pairs` pairs into frames and writes their descriptor tables, as a write does;
/// returns the bytes of the tables. For counting instructions.
pub fn cut(pairs: usize, len: u64) -> usize {
    let regions = RegionTable::default();
    let region = regions
        .insert(Incarnation(7), 0x1000, REGION_LEN as usize, Access::NONE, Backing::Borrowed)
        .expect("the first region overlaps none");
    let mut batch = Batch::with_capacity(pairs);
    for i in 0..pairs as u64 {
        batch.push_to_address(&region, i * len, 0x1000 + 2 * i * len, len).expect("inside");
    }
    let mut cutter = Cutter::new(&batch);
    let mut table = Vec::new();
    while let Some(frame) = cutter.next(&batch, 64 << 20, 1 << 16) {
        frame.write_table(&batch, &mut table);
    }
    table.len()
}

/// A batch, and the remote range of each pair. The memory does not exist and is never touched.
fn batch(script: &mut Script<'_>) -> (Batch, Vec<(u64, u64)>) {
    let regions = RegionTable::default();
    let region = regions
        .insert(Incarnation(7), 0x1000, REGION_LEN as usize, Access::NONE, Backing::Borrowed)
        .expect("the first region overlaps none");
    let (mut batch, mut expected) = (Batch::new(), Vec::new());
    let scale = script.pick(&[1, 4096, 40_000]);
    let mut remote = 0x1000;
    while !script.is_empty() && expected.len() < PAIRS_MAX {
        let len = 1 + u64::from(script.short()) * scale;
        batch.push_to_address(&region, 0, remote, len).expect("inside the region");
        expected.push((remote, remote + len));
        remote += len + u64::from(script.byte());
    }
    (batch, expected)
}
