//! Memory returns to its owner only when no copier can access it.

use super::rig::{Rig, Side, done, ended, failed, needs_device, watch};
use crate::fabric::{Access, Fabric, Move};
use crate::memory::MemoryKind;
use crate::pattern::Pattern;
use crate::violation::{Violation, ensure};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const WATCHED: Duration = Duration::from_millis(40);
const GONE: [&str; 2] = ["revoked", "not_registered"];

fn delays(rig: &Rig) -> Vec<Duration> {
    [0, 100, 300, 700, 1_500, 3_000, 6_000][..rig.amount(7, 4)]
        .iter()
        .map(|us| Duration::from_micros(*us))
        .collect()
}

pub(super) fn nothing_lands_after_unregister_returned(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let len = rig.amount(16 * MIB, 4 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    for (i, delay) in delays(&rig).into_iter().enumerate() {
        let far = rig.area(Side::Far, len, Access::BOTH)?;
        let piece = if i % 2 == 0 { len } else { 4 * KIB };
        let moves: Vec<_> =
            (0..len / piece).map(|i| Move::new(&near, i * piece, &far, i * piece, piece)).collect();
        let handle = rig.near.write_async(&moves, &rig.options());
        thread::sleep(delay);
        let began = Instant::now();
        rig.unregister(Side::Far, &far)?;
        ensure!(began.elapsed() < rig.patience(), "unregister took {:?}", began.elapsed());
        let at_return = far.memory.load(0, len);
        far.memory.refill();
        watch(&far.memory, WATCHED, "memory after unregister returned")?;
        let outcome = ended(&rig, &*handle, "a write to a region that was unregistered")?;
        far.memory.check("memory after unregister returned and the write ended")?;
        if outcome.is_ok() {
            done(outcome, &moves, "a write that was faster than unregister")?;
            ensure!(
                at_return == near.memory.load(0, len),
                "a write was done whose bytes had not arrived when the region was unregistered"
            );
        } else {
            failed(outcome, &GONE, "a write to a region that was unregistered")?;
        }
        far.memory.check_misuse()?;
    }
    rig.finish()
}

pub(super) fn nothing_is_read_after_unregister_returned(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let len = rig.amount(16 * MIB, 4 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    for delay in delays(&rig) {
        let far = rig.area(Side::Far, len, Access::READ)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        let handle = rig.near.read_async(&moves, &rig.options());
        thread::sleep(delay);
        rig.unregister(Side::Far, &far)?;
        far.memory.mark();
        let outcome = ended(&rig, &*handle, "a read of a region that was unregistered")?;
        thread::sleep(Duration::from_millis(15));
        ensure!(
            !near.memory.holds_marker(),
            "a read took bytes that were written after unregister returned ({outcome:?})"
        );
        if outcome.is_err() {
            failed(outcome, &GONE, "a read of a region that was unregistered")?;
        }
        near.memory.accept();
    }
    rig.finish()
}

pub(super) fn a_local_region_is_left_alone_after_unregister_returned(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let len = rig.amount(16 * MIB, 4 * MIB);
    let far = rig.area(Side::Far, len, Access::BOTH)?;
    for (i, delay) in delays(&rig).into_iter().enumerate() {
        let near = rig.area(Side::Near, len, Access::NONE)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        let write = i % 2 == 0;
        let handle = if write {
            rig.near.write_async(&moves, &rig.options())
        } else {
            rig.near.read_async(&moves, &rig.options())
        };
        thread::sleep(delay);
        rig.unregister(Side::Near, &near)?;
        if write {
            near.memory.mark();
        } else {
            near.memory.refill();
        }
        let outcome = ended(&rig, &*handle, "a transfer whose local region was unregistered")?;
        watch(&near.memory, WATCHED, "local memory after unregister returned")?;
        ensure!(
            !far.memory.holds_marker(),
            "a write sent bytes that were there only after unregister returned ({outcome:?})"
        );
        if outcome.is_err() {
            let kinds = [GONE[0], GONE[1], "cancelled"];
            failed(outcome, &kinds, "a transfer whose local region was unregistered")?;
        }
        far.memory.accept();
    }
    rig.finish()
}

pub(super) fn unregister_waits_for_the_device(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    if !needs_device(kind, "unregister while a device copies") {
        return Ok(());
    }
    let rig = Rig::new(fabric, kind)?;
    let near = rig.area(Side::Near, MIB, Access::NONE)?;
    for write in [true, false] {
        let far = rig.area(Side::Far, MIB, Access::BOTH)?;
        let device = far.memory.device().expect("the kind is slow").clone();
        device.hold();
        let moves = [Move::new(&near, 0, &far, 0, MIB)];
        let handle = if write {
            rig.near.write_async(&moves, &rig.options())
        } else {
            rig.near.read_async(&moves, &rig.options())
        };
        let give_up = Instant::now() + rig.patience();
        while device.pending() == 0 && Instant::now() < give_up {
            thread::sleep(Duration::from_millis(1));
        }
        let (tell, told) = mpsc::channel();
        let early = thread::scope(|scope| {
            scope.spawn(|| drop(tell.send(rig.unregister(Side::Far, &far))));
            let early = told.recv_timeout(Duration::from_millis(50)).is_ok();
            device.release();
            early
        });
        ensure!(!early, "unregister returned while the device was copying");
        told.recv().map_err(|_| Violation::new("unregister panicked"))??;
        device.free();
        far.memory.refill();
        let outcome = ended(&rig, &*handle, "a transfer with a held device")?;
        watch(&far.memory, WATCHED, "device memory after unregister returned")?;
        if outcome.is_err() {
            failed(outcome, &GONE, "a transfer with a held device")?;
        }
        far.memory.check_misuse()?;
        near.memory.accept();
    }
    rig.finish()
}

pub(super) fn regions_come_and_go(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let near = rig.area(Side::Near, 64 * KIB, Access::NONE)?;
    for _ in 0..rig.amount(100, 30) {
        let far = rig.area(Side::Far, 64 * KIB, Access::BOTH)?;
        rig.written(&[Move::new(&near, 0, &far, 100, 5000)], "a write to a new region")?;
        rig.unregister(Side::Far, &far)?;
        far.memory.check("a region that was just unregistered")?;
        let again = rig.far.unregister(&far);
        failed(
            again.map(|()| crate::fabric::TransferStats { bytes: 0, descriptors: 0 }),
            &["not_registered"],
            "a second unregister",
        )?;
    }
    rig.finish()
}

pub(super) fn unregister_leaves_no_copier_inside(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let len = MIB;
    let near = rig.area(Side::Near, len, Access::NONE)?;
    let poison = Pattern::fresh().bytes(len);
    for round in 0..rig.amount(60, 25) {
        let far = rig.area(Side::Far, len, Access::WRITE)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        near.memory.refill();
        let handle = rig.near.write_async(&moves, &rig.options());
        // From the first byte on, a copier is inside most of the time.
        let give_up = Instant::now() + rig.patience();
        let untouched = far.memory.load(len - 64 * KIB, 8);
        while far.memory.load(len - 64 * KIB, 8) == untouched
            && handle.poll().is_none()
            && round % 4 != 0
            && Instant::now() < give_up
        {
            thread::yield_now();
        }
        rig.unregister(Side::Far, &far)?;
        far.memory.store(0, &poison);
        let outcome = ended(&rig, &*handle, "a write to a region that was unregistered")?;
        thread::sleep(Duration::from_millis(2));
        far.memory.check("memory right after unregister returned")?;
        if outcome.is_err() {
            failed(outcome, &GONE, "a write to a region that was unregistered")?;
        }
    }
    rig.finish()
}
