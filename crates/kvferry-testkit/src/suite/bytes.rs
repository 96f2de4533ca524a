//! A transfer moves exactly the bytes of its descriptors.

use super::rig::{Rig, Side, done, ended};
use crate::fabric::{Access, Fabric, Move, Note};
use crate::memory::MemoryKind;
use crate::violation::{Violation, ensure};
use std::thread;
use std::time::Instant;

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Sizes around every boundary that a transport may have.
const SIZES: [usize; 24] = [
    1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 4095, 4096, 4097, 16_383, 65_535, 65_536, 65_537, 131_073,
    262_143, 262_144, 262_145, 1_048_575, 1_048_577, 5_000_011,
];

pub(super) fn every_byte_lands_and_nothing_else(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(3 * MIB)?;
    let mut rng = rig.rng();
    for round in 0..rig.amount(8, 3) {
        near.memory.refill();
        far.memory.refill();
        // Destinations in random steps with random gaps between them, never overlapping.
        let (mut moves, mut at) = (Vec::new(), rng.usize(..100));
        loop {
            let longest = if rng.usize(..8) == 0 { 300 * KIB } else { 9000 };
            let len = 1 + rng.usize(..longest);
            if at + len > far.len {
                break;
            }
            moves.push(Move::new(&near, rng.usize(..near.len - len), &far, at, len));
            at += len + rng.usize(..3) * rng.usize(..50);
        }
        rng.shuffle(&mut moves);
        rig.written(&moves, "a scattered write")?;
        rig.check(&format!("a scattered write, round {round}"))?;
    }
    rig.finish()
}

pub(super) fn done_means_all_bytes_are_there(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let longest = SIZES.into_iter().max().unwrap_or(1);
    let (near, far) = rig.both(longest)?;
    for len in SIZES {
        for write in [true, false] {
            near.memory.refill();
            far.memory.refill();
            let moves = [Move::new(&near, longest - len, &far, 0, len)];
            let handle = if write {
                rig.near.write_async(&moves, &rig.options())
            } else {
                rig.near.read_async(&moves, &rig.options())
            };
            let give_up = Instant::now() + rig.patience();
            let outcome = loop {
                if let Some(outcome) = handle.poll() {
                    break outcome;
                }
                ensure!(Instant::now() < give_up, "a transfer of {len} bytes did not end");
                thread::yield_now();
            };
            done(outcome, &moves, &format!("a transfer of {len} bytes"))?;
            if write {
                moves[0].expect_written();
                far.memory.check(&format!("a write of {len} bytes, when it was done"))?;
            } else {
                moves[0].expect_read();
                near.memory.check(&format!("a read of {len} bytes, when it was done"))?;
            }
        }
    }
    rig.finish()
}

pub(super) fn more_than_64_mib_land_whole(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let len = rig.amount(65 * MIB, 6 * MIB) + 13;
    let (near, far) = rig.both(len)?;
    let whole = [Move::new(&near, 0, &far, 0, len)];
    rig.written(&whole, "one big write")?;
    far.memory.check("one big write")?;
    far.memory.refill();
    rig.fetched(&whole, "one big read")?;
    near.memory.check("one big read")?;
    let piece = 96 * KIB + 7;
    let mut pieces: Vec<_> =
        (0..len / piece).map(|i| Move::new(&near, i * piece, &far, i * piece, piece)).collect();
    rig.rng().shuffle(&mut pieces);
    near.memory.refill();
    rig.written(&pieces, "a big write of big pieces")?;
    rig.finish()
}

pub(super) fn seventy_thousand_descriptors_land_whole(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let count = rig.amount(70_000, 7_000);
    let slot = 48;
    let (near, far) = rig.both(count * slot)?;
    let mut rng = rig.rng();
    let mut order: Vec<_> = (0..count).collect();
    rng.shuffle(&mut order);
    let moves: Vec<_> = order
        .into_iter()
        .enumerate()
        .map(|(i, j)| Move::new(&near, i * slot, &far, j * slot, 1 + rng.usize(..slot)))
        .collect();
    rig.written(&moves, &format!("a write of {count} descriptors"))?;
    rig.check("after the write")?;
    far.memory.refill();
    rig.fetched(&moves, &format!("a read of {count} descriptors"))?;
    rig.finish()
}

pub(super) fn scattered_blocks_land_where_they_were_aimed(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let mut rng = rig.rng();
    for block in [512, 4 * KIB, 32 * KIB, 100 * KIB] {
        let count = rig.amount(64, 32);
        let (near, far) = rig.both(2 * count * block)?;
        let (mut from, mut to): (Vec<_>, Vec<_>) = (0..2 * count).map(|i| (i, i)).unzip();
        rng.shuffle(&mut from);
        rng.shuffle(&mut to);
        let moves: Vec<_> = from[..count]
            .iter()
            .zip(&to)
            .map(|(i, j)| Move::new(&near, i * block, &far, j * block, block))
            .collect();
        rig.written(&moves, &format!("a write of {block}-byte blocks"))?;
        rig.check(&format!("a write of {block}-byte blocks"))?;
        far.memory.refill();
        rig.fetched(&moves, &format!("a read of {block}-byte blocks"))?;
        rig.check(&format!("a read of {block}-byte blocks"))?;
    }
    rig.finish()
}

pub(super) fn overlapping_sources_are_read_as_often_as_asked(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let far = rig.area(Side::Far, MIB, Access::BOTH)?;
    let near = rig.area(Side::Near, MIB, Access::NONE)?;
    let step = 3001;
    // Each source overlaps the next by two thirds; the first is asked for ten times more.
    let mut moves: Vec<_> =
        (0..100).map(|i| Move::new(&near, i * step / 3, &far, i * step, step)).collect();
    moves.extend((100..110).map(|i| Move::new(&near, 0, &far, i * step, step)));
    rig.written(&moves, "a write from overlapping sources")?;
    rig.check("a write from overlapping sources")?;
    let moves: Vec<_> =
        (0..100).map(|i| Move::new(&near, i * step, &far, i * step / 3, step)).collect();
    rig.fetched(&moves, "a read of overlapping sources")?;
    rig.finish()
}

pub(super) fn misaligned_ends_land_whole(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let slot = 12 * KIB;
    let count = 17 * 17;
    let (near, far) = rig.both(count * slot)?;
    let mut rng = rig.rng();
    let mut moves = Vec::new();
    for from in 0..17 {
        for to in 0..17 {
            let at = (from * 17 + to) * slot;
            let len = 4096 - 9 + rng.usize(..18) + rng.usize(..2) * 4096;
            moves.push(Move::new(&near, at + from, &far, at + to, len));
        }
    }
    rig.written(&moves, "a misaligned write")?;
    rig.check("a misaligned write")?;
    far.memory.refill();
    rig.fetched(&moves, "a misaligned read")?;
    rig.finish()
}

pub(super) fn zero_length_descriptors_move_nothing(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(64 * KIB)?;
    let zero = |at| Move::new(&near, at, &far, at, 0);
    let batches = [
        vec![zero(0)],
        vec![zero(64 * KIB)],
        vec![zero(0), zero(1), zero(4096)],
        vec![Move::new(&near, 0, &far, 0, 100), zero(500), Move::new(&near, 0, &far, 900, 100)],
        vec![zero(7), Move::new(&near, 0, &far, 4000, 1000), zero(9)],
    ];
    for (i, moves) in batches.iter().enumerate() {
        near.memory.refill();
        let outcome = rig.near.write(moves, &rig.options());
        match outcome {
            // They move nothing, or the batch is refused.
            Ok(_) => {
                done(outcome, moves, "a batch with zero-length descriptors")?;
                moves.iter().for_each(Move::expect_written);
            }
            Err(failure) => {
                ensure!(
                    failure.kind == "invalid_argument",
                    "zero length is a typed error or nothing, not: {failure}"
                );
                for m in moves {
                    far.memory.accept_range(m.remote_offset as usize, m.len as usize);
                }
            }
        }
        rig.check(&format!("batch {i} with zero-length descriptors"))?;
    }
    rig.written(&[Move::new(&near, 0, &far, 0, 64 * KIB)], "a healthy write afterwards")?;
    rig.finish()
}

pub(super) fn an_empty_batch_ends_at_once(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(KIB)?;
    rig.written(&[Move::new(&near, 0, &far, 0, KIB)], "a first write")?;
    let options = rig.options().noting(Note::new("empty", "batch"));
    let handles = [
        rig.near.write_async(&[], &rig.options()),
        rig.near.read_async(&[], &rig.options()),
        rig.near.write_async(&[], &options),
    ];
    for handle in handles {
        match ended(&rig, &*handle, "an empty batch")? {
            Err(failure) if failure.kind == "invalid_argument" => {}
            outcome => drop(done(outcome, &[], "an empty batch")?),
        }
    }
    while rig.far.wait_note(std::time::Duration::from_millis(50)).is_some() {}
    rig.finish()
}

pub(super) fn reads_fetch_the_bytes_of_now(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(64 * KIB)?;
    let moves =
        [Move::new(&near, 0, &far, 0, 4096), Move::new(&near, 10_000, &far, 10_000, 50_000)];
    for round in 0..rig.amount(50, 10) {
        rig.fetched(&moves, "a read")?;
        rig.check(&format!("read {round} of bytes that the owner changed since the last"))?;
        far.memory.refill();
    }
    rig.finish()
}

pub(super) fn reads_take_every_byte_and_touch_nothing_else(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(2 * MIB)?;
    let mut rng = rig.rng();
    for round in 0..rig.amount(8, 3) {
        far.memory.refill();
        let (mut moves, mut at) = (Vec::new(), rng.usize(..100));
        loop {
            let longest = if rng.usize(..8) == 0 { 200 * KIB } else { 7000 };
            let len = 1 + rng.usize(..longest);
            if at + len > near.len {
                break;
            }
            moves.push(Move::new(&near, at, &far, rng.usize(..far.len - len), len));
            at += len + rng.usize(..40);
        }
        rng.shuffle(&mut moves);
        rig.fetched(&moves, "a scattered read")?;
        rig.check(&format!("a scattered read, round {round}"))?;
    }
    rig.finish()
}

pub(super) fn both_directions_at_once(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let len = rig.amount(6 * MIB, MIB);
    let a = (rig.area(Side::Near, len, Access::NONE)?, rig.area(Side::Far, len, Access::BOTH)?);
    let b = (rig.area(Side::Far, len, Access::NONE)?, rig.area(Side::Near, len, Access::BOTH)?);
    let there = [Move::new(&a.0, 0, &a.1, 0, len)];
    let back = [Move::new(&b.0, 0, &b.1, 0, len)];
    for round in 0..rig.amount(6, 2) {
        for region in [&a.0, &a.1, &b.0, &b.1] {
            region.memory.refill();
        }
        let handles = if round % 2 == 0 {
            there[0].expect_written();
            back[0].expect_written();
            [
                rig.near.write_async(&there, &rig.options()),
                rig.far.write_async(&back, &rig.options()),
            ]
        } else {
            there[0].expect_read();
            back[0].expect_read();
            [rig.near.read_async(&there, &rig.options()), rig.far.read_async(&back, &rig.options())]
        };
        for (handle, moves) in handles.iter().zip([&there, &back]) {
            let outcome = ended(&rig, &**handle, "one of two directions")?;
            done(outcome, moves, "one of two directions")?;
        }
        rig.check("both directions at once")?;
    }
    rig.finish()
}
