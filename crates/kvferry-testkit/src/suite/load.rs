//! Many transfers at once: all bytes arrive, no transfer starves, nothing leaks.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub(super) fn ten_callers_at_once_all_land(rig: &Rig<'_>) -> Result {
    let (callers, blocks, block) = (10, rig.amount(200, 60), 4 * KIB);
    let regions = (0..callers).map(|_| rig.both(blocks * block)).collect::<Result<Vec<_>>>()?;
    thread::scope(|scope| {
        let running: Vec<_> = regions
            .iter()
            .enumerate()
            .map(|(caller, (near, far))| {
                scope.spawn(move || -> Result {
                    let moves: Vec<_> = (0..blocks)
                        .map(|i| Move::new(near, i * block, far, (blocks - 1 - i) * block, block))
                        .collect();
                    for round in 0..rig.amount(10, 4) {
                        let what = format!("batch {round} of caller {caller}");
                        let (way, source) =
                            if (round + caller) % 3 == 0 { (Read, far) } else { (Write, near) };
                        source.memory.refill();
                        rig.moved(way, &moves, &what)?;
                        near.memory.check(&what)?;
                        far.memory.check(&what)?;
                    }
                    Ok(())
                })
            })
            .collect();
        running.into_iter().try_for_each(|r| r.join().expect("callers don't panic"))
    })
}

pub(super) fn hundreds_of_transfers_in_flight_all_end(rig: &Rig<'_>) -> Result {
    let (count, slot) = (rig.amount(400, 150), 40 * KIB);
    let (near, far) = rig.both(count * slot)?;
    let moves: Vec<_> =
        (0..count).map(|i| [Move::new(&near, i * slot, &far, i * slot, slot - i)]).collect();
    let handles: Vec<_> = moves.iter().map(|m| rig.start(Write, m)).collect();
    for (i, (handle, moves)) in handles.iter().zip(&moves).enumerate() {
        let what = format!("transfer {i} of {count}");
        done(rig.ended(&**handle, &what)?, moves, &what)?;
        moves[0].expect(Write);
    }
    Ok(())
}

pub(super) fn a_small_batch_is_not_starved_by_big_ones(rig: &Rig<'_>) -> Result {
    let (bigs, len) = (8, rig.amount(24 * MIB, 8 * MIB));
    let big = (0..bigs).map(|_| rig.both(len)).collect::<Result<Vec<_>>>()?;
    let (near, far) = rig.both(4 * KIB)?;
    let small = [Move::new(&near, 0, &far, 0, 4 * KIB)];
    rig.moved(Write, &small, "a first write")?;
    // One round may be unlucky on a busy machine. A transport that serves in the order of arrival
    // is unlucky in every round.
    for _ in 0..6 {
        let started = big.iter().map(|(near, far)| {
            let moves = [Move::new(near, 0, far, 0, len)];
            moves[0].expect(Write);
            rig.start(Write, &moves)
        });
        let handles: Vec<_> = started.collect();
        rig.moved(Write, &small, "a small write among big ones")?;
        let running = handles.iter().filter(|h| h.poll().is_none()).count();
        for handle in &handles {
            let outcome = rig.ended(&**handle, "a big write")?;
            outcome.map_err(|e| Violation::new(format!("a big write failed: {e}")))?;
        }
        if running > 0 {
            return Ok(());
        }
    }
    Err(Violation::new(format!("a small write waited for {bigs} big ones, in each of six rounds")))
}

pub(super) fn callers_take_turns(rig: &Rig<'_>) -> Result {
    let (callers, len, rounds) = (6, rig.amount(4 * MIB, MIB), 20);
    let big = (0..callers).map(|_| rig.both(len)).collect::<Result<Vec<_>>>()?;
    let (near, far) = rig.both(4 * KIB)?;
    let small = [Move::new(&near, 0, &far, 0, 4 * KIB)];
    rig.moved(Write, &small, "a first write")?;
    // Each caller one turn before ours, and as much again for what the scheduler does.
    let allowed = 2 * callers * rounds;
    let mut waited_for = Vec::new();
    // A caller that does not run for a while lets many others pass. With a transport that prefers others, that many pass
    // in every try.
    while waited_for.len() < 6 {
        let passed = passed_by(rig, &big, &small, rounds)?;
        if passed <= allowed {
            return Ok(());
        }
        waited_for.push(passed);
    }
    Err(Violation::new(format!(
        "{rounds} small writes of one caller waited for {waited_for:?} big ones of {callers} others"
    )))
}

/// The number of big writes, each region's by a caller of its own, that end during `rounds` small ones.
fn passed_by(
    rig: &Rig<'_>,
    big: &[(Region, Region)],
    small: &[Move],
    rounds: usize,
) -> Result<usize> {
    let (ended, bigs) = (&AtomicBool::new(false), &AtomicUsize::new(0));
    thread::scope(|scope| {
        let running: Vec<_> = big
            .iter()
            .map(|(near, far)| {
                scope.spawn(move || -> Result {
                    let moves = [Move::new(near, 0, far, 0, near.len)];
                    while !ended.load(Ordering::Relaxed) {
                        rig.moved(Write, &moves, "a big write")?;
                        bigs.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        // Until the big ones are under way, or fail.
        while bigs.load(Ordering::Relaxed) < big.len() && !running.iter().any(|r| r.is_finished()) {
            thread::sleep(Duration::from_millis(1));
        }
        let before = bigs.load(Ordering::Relaxed);
        let outcome = (0..rounds).try_for_each(|_| rig.moved(Write, small, "a small write"));
        let passed = bigs.load(Ordering::Relaxed) - before;
        ended.store(true, Ordering::Relaxed);
        running.into_iter().try_for_each(|r| r.join().expect("callers don't panic"))?;
        outcome.map(|()| passed)
    })
}

pub(super) fn gauges_return_to_zero(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(MIB)?;
    let doomed = rig.area(Side::Far, MIB, Access::READ_WRITE)?;
    let whole = [Move::new(&near, 0, &far, 0, MIB)];
    let outside = [Move::new(&near, 0, &far, MIB - 1, 2).aimed(Aim::Forged)];
    let to_doomed = [Move::new(&near, 0, &doomed, 0, MIB)];
    // Every way to end, then `finish` looks at the gauges.
    for round in 0..rig.amount(12, 5) {
        let healthy = rig.start(Write, &whole);
        let refused = rig.start(Write, &outside);
        rig.ended(&*healthy, "a write")?.map_err(|e| Violation::new(e.to_string()))?;
        drop(rig.ended(&*refused, "a refused write")?);
        // The peer may serve at any time what was sent before a cancel or a deadline: in regions of their own.
        let [source, target] = [(); 2].map(|()| rig.area(Side::Far, MIB, Access::READ_WRITE));
        let (source, target) = (source?, target?);
        let cancelled = rig.start(Read, &[Move::new(&near, 0, &source, 0, MIB)]);
        cancelled.cancel();
        drop(rig.ended(&*cancelled, "a cancelled read")?);
        let to_target = [Move::new(&near, 0, &target, 0, MIB)];
        let late = rig.near.start(Write, &to_target, &within(Duration::from_micros(300)));
        drop(rig.ended(&*late, "a late write")?);
        rig.unregister(Side::Far, &source)?;
        rig.unregister(Side::Far, &target)?;
        drop(rig.near.start(Write, &to_doomed, &rig.noting("done", round)));
        drop(rig.far.wait_note(rig.patience()));
        rig.settle()?;
    }
    let last = rig.start(Write, &to_doomed);
    rig.unregister(Side::Far, &doomed)?;
    drop(rig.ended(&*last, "a write to a region that was unregistered")?);
    near.memory.accept();
    far.memory.accept();
    Ok(())
}

pub(super) fn nothing_is_left_of_endpoints_that_were_closed(rig: &Rig<'_>) -> Result {
    for round in 0..8 {
        let rig = Rig::new(rig.fabric, rig.kind)?;
        let (near, far) = rig.both(MIB)?;
        let whole = [Move::new(&near, 0, &far, 0, MIB)];
        rig.moved(Write, &whole, "a write")?;
        let running = (round % 2 == 1).then(|| rig.start(Write, &whole));
        let (first, second) =
            if round % 4 < 2 { (&rig.near, &rig.far) } else { (&rig.far, &rig.near) };
        first.close();
        if let Some(handle) = running {
            drop(rig.ended(&*handle, "a write while an end was closed")?);
        }
        second.close();
        rig.expect_zero("after both ends were closed")?;
    }
    Ok(())
}
