//! Nothing of a transfer happens after its cancel or its deadline.

use super::*;

const WATCHED: Duration = Duration::from_millis(40);

/// A batch of one big descriptor, or of many small ones.
fn batch(near: &Region, far: &Region, many: bool) -> Vec<Move> {
    pieces(near, far, if many { 8 * KIB } else { near.len })
}

/// Delays between the start of a transfer and its cancel: at once, in its middle, near its end.
fn delays(rig: &Rig<'_>) -> impl Iterator<Item = (usize, Duration)> {
    let us = [0, 40, 150, 400, 900, 2_000, 4_500, 9_000];
    us.into_iter().map(Duration::from_micros).take(rig.amount(8, 5)).enumerate()
}

fn pause(time: Duration) {
    // A sleep overshoots by more than the shortest delay.
    let end = Instant::now() + time;
    while Instant::now() < end {
        thread::yield_now();
    }
}

pub(super) fn a_cancelled_transfer_ends_as_cancelled_or_done(rig: &Rig<'_>) -> Result {
    let len = rig.amount(12 * MIB, 3 * MIB);
    for (i, delay) in delays(rig) {
        let (near, far) = rig.both(len)?;
        let moves = batch(&near, &far, i % 2 == 1);
        let way = if i % 4 < 2 { Write } else { Read };
        let handle = rig.start(way, &moves);
        pause(delay);
        handle.cancel();
        handle.cancel();
        let outcome = rig.ended(&*handle, "a cancelled transfer")?;
        if outcome.is_ok() {
            done(outcome, &moves, "a transfer cancelled too late")?;
            moves.iter().for_each(|m| m.expect(way));
            rig.check("a transfer cancelled too late")?;
        } else {
            let failure = failed(outcome, &["cancelled"], "a cancelled transfer")?;
            ensure!(
                failure.is_quiet() || !rig.fabric.confirms_cancel(),
                "the peer is live and did not confirm: {failure}"
            );
        }
        handle.cancel();
        rig.unregister(Side::Near, &near)?;
        rig.unregister(Side::Far, &far)?;
    }
    let (near, far) = rig.both(len)?;
    rig.moved(Write, &batch(&near, &far, true), "a write after all those cancels")
}

pub(super) fn nothing_lands_after_a_confirmed_cancel(rig: &Rig<'_>) -> Result {
    for (i, delay) in delays(rig) {
        let (near, far) = rig.both(rig.amount(16 * MIB, 4 * MIB))?;
        let moves = batch(&near, &far, i % 2 == 0);
        let (way, target) = if i % 4 != 3 { (Write, &far) } else { (Read, &near) };
        let handle = rig.start(way, &moves);
        pause(delay);
        handle.cancel();
        let outcome = rig.ended(&*handle, "a cancelled transfer")?;
        println!("cancelled after {delay:?}: {outcome:?}");
        if !outcome.as_ref().is_err_and(|e| !e.is_quiet()) {
            target.memory.refill();
            let what = format!("memory after a cancelled transfer ended ({outcome:?})");
            watch(&target.memory, WATCHED, &what)?;
        }
        rig.unregister(Side::Near, &near)?;
        rig.unregister(Side::Far, &far)?;
    }
    Ok(())
}

pub(super) fn a_cancel_is_not_confirmed_while_the_device_copies(rig: &Rig<'_>) -> Result {
    if !needs_far_device(rig, "a cancel while a device copies") {
        return Ok(());
    }
    let near = rig.area(Side::Near, MIB, Access::NONE)?;
    for _ in 0..3 {
        let far = rig.area(Side::Far, MIB, Access::READ_WRITE)?;
        let moves = batch(&near, &far, false);
        let device = far.device();
        device.hold();
        let handle = rig.start(Write, &moves);
        rig.wait_for_copies(device)?;
        handle.cancel();
        let early = handle.wait(Duration::from_millis(60));
        let confirmed = matches!(&early, Some(Err(e)) if e.is_quiet());
        if confirmed {
            far.memory.refill();
        }
        device.release();
        if confirmed {
            let what = format!("device memory after a confirmed cancel ({early:?})");
            watch(&far.memory, WATCHED, &what)?;
        }
        rig.ended_or_failed(&*handle, &moves, &["cancelled"], "a cancelled write")?;
        rig.unregister(Side::Far, &far)?;
        if confirmed {
            far.memory.check("device memory after a confirmed cancel, when nothing copies")?;
        }
    }
    Ok(())
}

/// Fills the source with the marker right after a transfer ended, and looks for it at the target. Unregisters the target.
fn source_is_left_alone(rig: &Rig<'_>, near: &Region, far: &Region, outcome: &Outcome) -> Result {
    near.memory.mark();
    let end = Instant::now() + WATCHED;
    while Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
        ensure!(
            !far.memory.holds_marker(),
            "what was written to the source after the call returned arrived ({outcome:?})"
        );
    }
    rig.unregister(Side::Far, far)?;
    near.memory.refill();
    Ok(())
}

pub(super) fn a_source_is_never_read_after_its_call_returned(rig: &Rig<'_>) -> Result {
    let len = rig.amount(24 * MIB, 8 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    for (i, ms) in [0, 1, 1, 2, 5, 10, 20_000].into_iter().enumerate() {
        let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
        let timeout = Duration::from_millis(ms).min(rig.patience());
        let moves = batch(&near, &far, i % 2 == 1);
        let outcome = rig.near.transfer(Write, &moves, &within(timeout));
        source_is_left_alone(rig, &near, &far, &outcome)?;
        if outcome.is_err() {
            failed(outcome, &["deadline"], "a write with a short deadline")?;
        }
    }
    Ok(())
}

pub(super) fn a_source_is_never_read_after_a_confirmed_cancel(rig: &Rig<'_>) -> Result {
    let len = rig.amount(16 * MIB, 4 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    for (i, delay) in delays(rig) {
        let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
        let handle = rig.start(Write, &batch(&near, &far, i % 2 == 0));
        pause(delay);
        handle.cancel();
        let outcome = rig.ended(&*handle, "a cancelled write")?;
        source_is_left_alone(rig, &near, &far, &outcome)?;
    }
    Ok(())
}

pub(super) fn nothing_lands_after_done(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(2 * MIB)?;
    for i in 0..rig.amount(6, 4) {
        let len = [1, 4096, 300 * KIB, 2 * MIB][i % 4];
        let moves = [Move::new(&near, 0, &far, far.len - len, len)];
        done(rig.transfer(Write, &moves), &moves, "a write")?;
        far.memory.refill();
        near.memory.mark();
        watch(&far.memory, WATCHED, "memory that its owner uses again after a write was done")?;
        near.memory.refill();
        done(rig.transfer(Read, &moves), &moves, "a read")?;
        near.memory.refill();
        watch(&near.memory, WATCHED, "memory that its owner uses again after a read was done")?;
    }
    Ok(())
}
