//! After a cancel or a deadline, nothing of the transfer happens.

use super::rig::{Rig, done, ended, failed, needs_device, watch};
use crate::fabric::{Fabric, Move, Options, Outcome, Region};
use crate::memory::MemoryKind;
use crate::violation::{Violation, ensure};
use std::thread;
use std::time::{Duration, Instant};

/// The time in which the bytes that an unconfirmed cancel left in a kernel have landed.
const SOON: Duration = Duration::from_millis(100);

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const WATCHED: Duration = Duration::from_millis(40);

/// A batch of one big descriptor, or of many small ones.
fn batch(near: &Region, far: &Region, many: bool) -> Vec<Move> {
    let len = near.len.min(far.len);
    let piece = if many { 8 * KIB } else { len };
    (0..len / piece).map(|i| Move::new(near, i * piece, far, i * piece, piece)).collect()
}

/// Delays between the start of a transfer and its cancel: at once, in its middle, near its end.
fn delays(rig: &Rig) -> Vec<Duration> {
    [0, 40, 150, 400, 900, 2_000, 4_500, 9_000][..rig.amount(8, 5)]
        .iter()
        .map(|us| Duration::from_micros(*us))
        .collect()
}

fn pause(time: Duration) {
    // A sleep overshoots by more than the shortest delay.
    let end = Instant::now() + time;
    while Instant::now() < end {
        thread::yield_now();
    }
}

pub(super) fn a_cancelled_transfer_ends_as_cancelled_or_done(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(rig.amount(12 * MIB, 3 * MIB))?;
    for (i, delay) in delays(&rig).into_iter().enumerate() {
        near.memory.refill();
        far.memory.refill();
        let moves = batch(&near, &far, i % 2 == 1);
        let write = i % 4 < 2;
        let handle = if write {
            rig.near.write_async(&moves, &rig.options())
        } else {
            rig.near.read_async(&moves, &rig.options())
        };
        pause(delay);
        handle.cancel();
        handle.cancel();
        let outcome = ended(&rig, &*handle, "a cancelled transfer")?;
        if outcome.is_ok() {
            done(outcome, &moves, "a transfer cancelled too late")?;
            moves.iter().for_each(if write { Move::expect_written } else { Move::expect_read });
            rig.check("a transfer cancelled too late")?;
        } else {
            let failure = failed(outcome, &["cancelled"], "a cancelled transfer")?;
            if fabric.confirms_cancel() {
                ensure!(failure.is_quiet(), "the peer is live and did not confirm: {failure}");
            } else {
                thread::sleep(SOON);
            }
            rig.settle()?;
            near.memory.accept();
            far.memory.accept();
        }
        handle.cancel();
    }
    rig.written(&batch(&near, &far, true), "a write after all those cancels")?;
    rig.finish()
}

pub(super) fn nothing_lands_after_a_confirmed_cancel(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(rig.amount(16 * MIB, 4 * MIB))?;
    let mut cancelled = 0;
    for (i, delay) in delays(&rig).into_iter().enumerate() {
        let moves = batch(&near, &far, i % 2 == 0);
        let write = i % 4 != 3;
        let (handle, target) = if write {
            (rig.near.write_async(&moves, &rig.options()), &far.memory)
        } else {
            (rig.near.read_async(&moves, &rig.options()), &near.memory)
        };
        pause(delay);
        handle.cancel();
        let outcome = ended(&rig, &*handle, "a cancelled transfer")?;
        cancelled += usize::from(outcome.is_err());
        if outcome.as_ref().is_err_and(|e| !e.is_quiet()) {
            rig.settle()?;
            thread::sleep(WATCHED);
            target.accept();
            continue;
        }
        target.refill();
        watch(target, WATCHED, &format!("memory after a cancelled transfer ended ({outcome:?})"))?;
    }
    println!("{cancelled} of {} transfers were cancelled before their end", delays(&rig).len());
    rig.finish()
}

pub(super) fn a_cancel_is_not_confirmed_while_the_device_copies(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    if !needs_device(kind, "a cancel while a device copies") {
        return Ok(());
    }
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(MIB)?;
    let moves = batch(&near, &far, false);
    let device = far.memory.device().expect("the kind is slow").clone();
    for _ in 0..3 {
        device.hold();
        let handle = rig.near.write_async(&moves, &rig.options());
        let give_up = Instant::now() + rig.patience();
        while device.pending() == 0 && Instant::now() < give_up {
            thread::sleep(Duration::from_millis(1));
        }
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
        let outcome = ended(&rig, &*handle, "a cancelled write")?;
        if outcome.is_err() {
            failed(outcome, &["cancelled"], "a cancelled write")?;
        }
        rig.settle()?;
        thread::sleep(Duration::from_millis(10));
        far.memory.accept();
    }
    rig.finish()
}

/// Fills the source with the marker right after a transfer ended, and looks for it at the target.
fn source_is_left_alone(rig: &Rig, near: &Region, far: &Region, outcome: &Outcome) -> Result {
    near.memory.mark();
    let end = Instant::now() + WATCHED;
    while Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
        ensure!(
            !far.memory.holds_marker(),
            "what was written to the source after the call returned arrived ({outcome:?})"
        );
    }
    rig.settle()?;
    far.memory.accept();
    near.memory.refill();
    Ok(())
}

pub(super) fn a_source_is_never_read_after_its_call_returned(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(rig.amount(24 * MIB, 8 * MIB))?;
    for (i, ms) in [0, 1, 1, 2, 5, 10, 20_000].into_iter().enumerate() {
        let timeout = Duration::from_millis(ms).min(rig.patience());
        let moves = batch(&near, &far, i % 2 == 1);
        let outcome = rig.near.write(&moves, &Options::within(timeout));
        source_is_left_alone(&rig, &near, &far, &outcome)?;
        if outcome.is_err() {
            failed(outcome, &["deadline"], "a write with a short deadline")?;
        }
    }
    rig.finish()
}

pub(super) fn a_source_is_never_read_after_a_confirmed_cancel(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(rig.amount(16 * MIB, 4 * MIB))?;
    for (i, delay) in delays(&rig).into_iter().enumerate() {
        let handle = rig.near.write_async(&batch(&near, &far, i % 2 == 0), &rig.options());
        pause(delay);
        handle.cancel();
        let outcome = ended(&rig, &*handle, "a cancelled write")?;
        source_is_left_alone(&rig, &near, &far, &outcome)?;
    }
    rig.finish()
}

pub(super) fn nothing_lands_after_done(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(2 * MIB)?;
    for i in 0..rig.amount(6, 4) {
        let len = [1, 4096, 300 * KIB, 2 * MIB][i % 4];
        let moves = [Move::new(&near, 0, &far, far.len - len, len)];
        done(rig.near.write(&moves, &rig.options()), &moves, "a write")?;
        far.memory.refill();
        near.memory.mark();
        watch(&far.memory, WATCHED, "memory that its owner uses again after a write was done")?;
        near.memory.refill();
        done(rig.near.read(&moves, &rig.options()), &moves, "a read")?;
        near.memory.refill();
        watch(&near.memory, WATCHED, "memory that its owner uses again after a read was done")?;
    }
    rig.finish()
}
