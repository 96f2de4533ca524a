//! A transfer moves exactly the bytes of its descriptors.

use super::*;

/// Sizes around every boundary that a transport may have.
const SIZES: [usize; 24] = [
    1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 4095, 4096, 4097, 16_383, 65_535, 65_536, 65_537, 131_073,
    262_143, 262_144, 262_145, 1_048_575, 1_048_577, 5_000_011,
];

/// Targets in random steps with random gaps between them, never overlapping, from random sources.
fn scattered(rig: &Rig<'_>, way: Way) -> Result {
    let (near, far) = rig.both(3 * MIB)?;
    let mut rng = rig.rng();
    for round in 0..rig.amount(8, 3) {
        near.memory.refill();
        far.memory.refill();
        let (mut moves, mut at) = (Vec::new(), rng.usize(..100));
        loop {
            let longest = if rng.usize(..8) == 0 { 300 * KIB } else { 9000 };
            let len = 1 + rng.usize(..longest);
            if at + len > far.len {
                break;
            }
            let source = rng.usize(..near.len - len);
            moves.push(match way {
                Write => Move::new(&near, source, &far, at, len),
                Read => Move::new(&near, at, &far, source, len),
            });
            at += len + rng.usize(..3) * rng.usize(..50);
        }
        rng.shuffle(&mut moves);
        rig.lands(way, &moves, &format!("a scattered {way}, round {round}"))?;
    }
    Ok(())
}

pub(super) fn every_byte_lands_and_nothing_else(rig: &Rig<'_>) -> Result {
    scattered(rig, Write)
}

pub(super) fn reads_take_every_byte_and_touch_nothing_else(rig: &Rig<'_>) -> Result {
    scattered(rig, Read)
}

pub(super) fn done_means_all_bytes_are_there(rig: &Rig<'_>) -> Result {
    let longest = SIZES.into_iter().max().unwrap_or(1);
    let (near, far) = rig.both(longest)?;
    for len in SIZES {
        for way in Way::ALL {
            near.memory.refill();
            far.memory.refill();
            let moves = [Move::new(&near, longest - len, &far, 0, len)];
            let what = format!("a {way} of {len} bytes, when it was done");
            let handle = rig.start(way, &moves);
            let give_up = Instant::now() + rig.patience();
            let outcome = loop {
                if let Some(outcome) = handle.poll() {
                    break outcome;
                }
                ensure!(Instant::now() < give_up, "a {way} of {len} bytes did not end");
                thread::yield_now();
            };
            done(outcome, &moves, &what)?;
            moves[0].expect(way);
            rig.check(&what)?;
        }
    }
    Ok(())
}

/// Writes these moves, then reads the same; checks both.
fn there_and_back(rig: &Rig<'_>, moves: &[Move], far: &Region, what: &str) -> Result {
    rig.lands(Write, moves, &format!("a write of {what}"))?;
    far.memory.refill();
    rig.lands(Read, moves, &format!("a read of {what}"))
}

pub(super) fn more_than_64_mib_land_whole(rig: &Rig<'_>) -> Result {
    let len = rig.amount(65 * MIB, 6 * MIB) + 13;
    let (near, far) = rig.both(len)?;
    there_and_back(rig, &[Move::new(&near, 0, &far, 0, len)], &far, "one big range")?;
    let mut moves = pieces(&near, &far, 96 * KIB + 7);
    rig.rng().shuffle(&mut moves);
    near.memory.refill();
    rig.moved(Write, &moves, "a big write of big pieces")
}

pub(super) fn seventy_thousand_descriptors_land_whole(rig: &Rig<'_>) -> Result {
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
    there_and_back(rig, &moves, &far, &format!("{count} descriptors"))?;
    // The batch takes several messages. One notification arrives, after all of the data.
    near.memory.refill();
    done(rig.near.transfer(Write, &moves, &rig.noting("all of them", "")), &moves, "a write")?;
    moves.iter().for_each(|m| m.expect(Write));
    ensure!(rig.far.wait_note(rig.patience()).is_some(), "a write did not notify");
    far.memory.check("when the notification came")?;
    ensure!(rig.far.take_notes().is_empty(), "one batch notified twice");
    Ok(())
}

pub(super) fn scattered_blocks_land_where_they_were_aimed(rig: &Rig<'_>) -> Result {
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
        there_and_back(rig, &moves, &far, &format!("{block}-byte blocks"))?;
    }
    Ok(())
}

pub(super) fn overlapping_sources_are_read_as_often_as_asked(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(MIB)?;
    let step = 3001;
    // Each source overlaps the next by two thirds; the first is asked for ten times more.
    let mut moves: Vec<_> =
        (0..100).map(|i| Move::new(&near, i * step / 3, &far, i * step, step)).collect();
    moves.extend((100..110).map(|i| Move::new(&near, 0, &far, i * step, step)));
    rig.lands(Write, &moves, "a write from overlapping sources")?;
    let moves: Vec<_> =
        (0..100).map(|i| Move::new(&near, i * step, &far, i * step / 3, step)).collect();
    rig.moved(Read, &moves, "a read of overlapping sources")
}

pub(super) fn misaligned_ends_land_whole(rig: &Rig<'_>) -> Result {
    let slot = 12 * KIB;
    let (near, far) = rig.both(17 * 17 * slot)?;
    let mut rng = rig.rng();
    let mut moves = Vec::new();
    for from in 0..17 {
        for to in 0..17 {
            let at = (from * 17 + to) * slot;
            let len = 4096 - 9 + rng.usize(..18) + rng.usize(..2) * 4096;
            moves.push(Move::new(&near, at + from, &far, at + to, len));
        }
    }
    there_and_back(rig, &moves, &far, "misaligned ranges")
}

pub(super) fn zero_length_descriptors_move_nothing(rig: &Rig<'_>) -> Result {
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
        let what = format!("batch {i} with zero-length descriptors");
        let outcome = rig.transfer(Write, moves);
        // They move nothing, or the batch is refused.
        if outcome.is_ok() {
            done(outcome, moves, &what)?;
            moves.iter().for_each(|m| m.expect(Write));
        } else {
            failed(outcome, &["invalid_argument"], &what)?;
            for m in moves {
                far.memory.accept_range(m.remote_offset as usize, m.len as usize);
            }
        }
        rig.check(&what)?;
    }
    rig.moved(Write, &[Move::new(&near, 0, &far, 0, 64 * KIB)], "a healthy write afterwards")
}

pub(super) fn an_empty_batch_ends_at_once(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(KIB)?;
    rig.moved(Write, &[Move::new(&near, 0, &far, 0, KIB)], "a first write")?;
    let noting = rig.near.start(Write, &[], &rig.noting("empty", "batch"));
    for handle in [rig.start(Write, &[]), rig.start(Read, &[]), noting] {
        rig.ended_or_failed(&*handle, &[], &["invalid_argument"], "an empty batch")?;
    }
    while rig.far.wait_note(Duration::from_millis(50)).is_some() {}
    Ok(())
}

pub(super) fn reads_fetch_the_bytes_of_now(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(64 * KIB)?;
    let moves =
        [Move::new(&near, 0, &far, 0, 4096), Move::new(&near, 10_000, &far, 10_000, 50_000)];
    for round in 0..rig.amount(50, 10) {
        let what = format!("read {round} of bytes that the owner changed since the last");
        rig.lands(Read, &moves, &what)?;
        far.memory.refill();
    }
    Ok(())
}

pub(super) fn both_directions_at_once(rig: &Rig<'_>) -> Result {
    let len = rig.amount(6 * MIB, MIB);
    let (near, far) = rig.both(len)?;
    let there = [Move::new(&near, 0, &far, 0, len)];
    let far = rig.area(Side::Far, len, Access::NONE)?;
    let near = rig.area(Side::Near, len, Access::READ_WRITE)?;
    let back = [Move::new(&far, 0, &near, 0, len)];
    for round in 0..rig.amount(6, 2) {
        let way = Way::ALL[round % 2];
        let handles = [(Side::Near, &there), (Side::Far, &back)].map(|(side, moves)| {
            moves[0].local.memory.refill();
            moves[0].remote.memory.refill();
            moves[0].expect(way);
            (rig.end(side).start(way, moves, &rig.options()), moves)
        });
        for (handle, moves) in handles {
            done(rig.ended(&*handle, "one of two directions")?, moves, "one of two directions")?;
        }
        rig.check("both directions at once")?;
    }
    Ok(())
}
