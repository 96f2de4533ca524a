//! Many transfers at once: all bytes arrive, no transfer starves, nothing leaks.

use super::rig::{Rig, Side, done, ended};
use crate::fabric::{Access, Aim, Fabric, Move, Note, Options};
use crate::memory::MemoryKind;
use crate::violation::{Violation, ensure};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

pub(super) fn ten_callers_at_once_all_land(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (callers, blocks, block) = (10, rig.amount(200, 60), 4 * KIB);
    let regions = (0..callers).map(|_| rig.both(blocks * block)).collect::<Result<Vec<_>>>()?;
    thread::scope(|scope| {
        let running: Vec<_> = regions
            .iter()
            .enumerate()
            .map(|(caller, (near, far))| {
                let rig = &rig;
                scope.spawn(move || -> Result {
                    let moves: Vec<_> = (0..blocks)
                        .map(|i| Move::new(near, i * block, far, (blocks - 1 - i) * block, block))
                        .collect();
                    for round in 0..rig.amount(10, 4) {
                        let what = format!("batch {round} of caller {caller}");
                        if (round + caller) % 3 == 0 {
                            far.memory.refill();
                            rig.fetched(&moves, &what)?;
                        } else {
                            near.memory.refill();
                            rig.written(&moves, &what)?;
                        }
                        near.memory.check(&what)?;
                        far.memory.check(&what)?;
                    }
                    Ok(())
                })
            })
            .collect();
        running.into_iter().try_for_each(|r| r.join().expect("callers don't panic"))
    })?;
    rig.finish()
}

pub(super) fn hundreds_of_transfers_in_flight_all_end(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (count, slot) = (rig.amount(400, 150), 40 * KIB);
    let (near, far) = rig.both(count * slot)?;
    let moves: Vec<_> =
        (0..count).map(|i| [Move::new(&near, i * slot, &far, i * slot, slot - i)]).collect();
    let handles: Vec<_> = moves.iter().map(|m| rig.near.write_async(m, &rig.options())).collect();
    for (i, (handle, moves)) in handles.iter().zip(&moves).enumerate() {
        let outcome = ended(&rig, &**handle, &format!("transfer {i} of {count}"))?;
        done(outcome, moves, &format!("transfer {i} of {count}"))?;
        moves[0].expect_written();
    }
    rig.finish()
}

pub(super) fn a_small_batch_is_not_starved_by_big_ones(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (bigs, len) = (8, rig.amount(24 * MIB, 8 * MIB));
    let big = (0..bigs).map(|_| rig.both(len)).collect::<Result<Vec<_>>>()?;
    let (near, far) = rig.both(4 * KIB)?;
    let small = [Move::new(&near, 0, &far, 0, 4 * KIB)];
    rig.written(&small, "a first write")?;
    let mut left = Vec::new();
    // One round may be unlucky on a busy machine. A transport that serves in the order of arrival
    // is unlucky in every round.
    for _ in 0..6 {
        let handles: Vec<_> = big
            .iter()
            .map(|(near, far)| {
                let moves = [Move::new(near, 0, far, 0, len)];
                moves[0].expect_written();
                rig.near.write_async(&moves, &rig.options())
            })
            .collect();
        rig.written(&small, "a small write among big ones")?;
        let running = handles.iter().filter(|h| h.poll().is_none()).count();
        for handle in &handles {
            let outcome = ended(&rig, &**handle, "a big write")?;
            outcome.map_err(|e| Violation::new(format!("a big write failed: {e}")))?;
        }
        left.push(running);
        if running > 0 {
            return rig.finish();
        }
    }
    Err(Violation::new(format!(
        "a small write waited for {bigs} big ones: when it was done, {left:?} of them were not"
    )))
}

pub(super) fn callers_take_turns(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (callers, len, rounds) = (6, rig.amount(4 * MIB, MIB), 20);
    let big = (0..callers).map(|_| rig.both(len)).collect::<Result<Vec<_>>>()?;
    let (near, far) = rig.both(4 * KIB)?;
    let small = [Move::new(&near, 0, &far, 0, 4 * KIB)];
    rig.written(&small, "a first write")?;
    let (ended, bigs) = (AtomicBool::new(false), AtomicUsize::new(0));
    let waited_for = thread::scope(|scope| {
        let (rig, ended, bigs) = (&rig, &ended, &bigs);
        let running: Vec<_> = big
            .iter()
            .map(|(near, far)| {
                scope.spawn(move || -> Result {
                    let moves = [Move::new(near, 0, far, 0, len)];
                    while !ended.load(Ordering::Relaxed) {
                        rig.written(&moves, "a big write")?;
                        bigs.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(20));
        let before = bigs.load(Ordering::Relaxed);
        let outcome = (0..rounds).try_for_each(|_| rig.written(&small, "a small write"));
        let waited_for = bigs.load(Ordering::Relaxed) - before;
        ended.store(true, Ordering::Relaxed);
        running.into_iter().try_for_each(|r| r.join().expect("callers don't panic"))?;
        outcome.map(|()| waited_for)
    })?;
    // Each caller one turn before ours, and as much again for what the scheduler does.
    let allowed = 2 * callers * rounds;
    ensure!(
        waited_for <= allowed,
        "{rounds} small writes of one caller waited for {waited_for} big ones of {callers} others"
    );
    rig.finish()
}

pub(super) fn gauges_return_to_zero(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(MIB)?;
    let doomed = rig.area(Side::Far, MIB, Access::BOTH)?;
    let whole = [Move::new(&near, 0, &far, 0, MIB)];
    let outside = [Move::new(&near, 0, &far, MIB - 1, 2).aimed(Aim::Forged)];
    let to_doomed = [Move::new(&near, 0, &doomed, 0, MIB)];
    // Every way to end, then `finish` looks at the gauges.
    for round in 0..rig.amount(12, 5) {
        let healthy = rig.near.write_async(&whole, &rig.options());
        let refused = rig.near.write_async(&outside, &rig.options());
        ended(&rig, &*healthy, "a write")?.map_err(|e| Violation::new(e.to_string()))?;
        drop(ended(&rig, &*refused, "a refused write")?);
        let cancelled = rig.near.read_async(&whole, &rig.options());
        cancelled.cancel();
        drop(ended(&rig, &*cancelled, "a cancelled read")?);
        let late = rig.near.write_async(&whole, &Options::within(Duration::from_micros(300)));
        drop(ended(&rig, &*late, "a late write")?);
        let note = rig.options().noting(Note::new("done", round.to_string()));
        drop(rig.near.write_async(&to_doomed, &note));
        drop(rig.far.wait_note(rig.patience()));
        rig.settle()?;
    }
    let last = rig.near.write_async(&to_doomed, &rig.options());
    rig.unregister(Side::Far, &doomed)?;
    drop(ended(&rig, &*last, "a write to a region that was unregistered")?);
    near.memory.accept();
    far.memory.accept();
    rig.finish()
}

pub(super) fn nothing_is_left_of_endpoints_that_were_closed(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    for round in 0..8 {
        let rig = Rig::new(fabric, kind)?;
        let (near, far) = rig.both(MIB)?;
        let whole = [Move::new(&near, 0, &far, 0, MIB)];
        rig.written(&whole, "a write")?;
        let running = (round % 2 == 1).then(|| rig.near.write_async(&whole, &rig.options()));
        let (first, second) =
            if round % 4 < 2 { (&rig.near, &rig.far) } else { (&rig.far, &rig.near) };
        first.close();
        if let Some(handle) = running {
            drop(ended(&rig, &*handle, "a write while an end was closed")?);
        }
        second.close();
        rig.expect_zero("after both ends were closed")?;
    }
    Ok(())
}
