//! Memory returns to its owner only when no copier can access it.

use super::*;
use crate::fabric::TransferStats;
use crate::pattern::Pattern;

const WATCHED: Duration = Duration::from_millis(40);
const GONE: [&str; 2] = ["revoked", "not_registered"];

fn delays(rig: &Rig<'_>) -> impl Iterator<Item = (usize, Duration)> {
    let us = [0, 100, 300, 700, 1_500, 3_000, 6_000];
    us.into_iter().map(Duration::from_micros).take(rig.amount(7, 4)).enumerate()
}

pub(super) fn nothing_lands_after_unregister_returned(rig: &Rig<'_>) -> Result {
    let len = rig.amount(16 * MIB, 4 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    for (i, delay) in delays(rig) {
        let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
        let moves = pieces(&near, &far, if i % 2 == 0 { len } else { 4 * KIB });
        let handle = rig.start(Write, &moves);
        thread::sleep(delay);
        let began = Instant::now();
        rig.unregister(Side::Far, &far)?;
        ensure!(began.elapsed() < rig.patience(), "unregister took {:?}", began.elapsed());
        let at_return = far.memory.load(0, len);
        far.memory.refill();
        watch(&far.memory, WATCHED, "memory after unregister returned")?;
        let what = "a write to a region that was unregistered";
        let is_done = rig.ended_or_failed(&*handle, &moves, &GONE, what)?;
        far.memory.check("memory after unregister returned and the write ended")?;
        ensure!(
            !is_done || at_return == near.memory.load(0, len),
            "a write was done whose bytes had not arrived when the region was unregistered"
        );
        far.memory.check_misuse()?;
    }
    Ok(())
}

pub(super) fn nothing_is_read_after_unregister_returned(rig: &Rig<'_>) -> Result {
    let len = rig.amount(16 * MIB, 4 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    for (_, delay) in delays(rig) {
        let far = rig.area(Side::Far, len, Access::READ)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        let handle = rig.start(Read, &moves);
        thread::sleep(delay);
        rig.unregister(Side::Far, &far)?;
        far.memory.mark();
        let what = "a read of a region that was unregistered";
        rig.ended_or_failed(&*handle, &moves, &GONE, what)?;
        thread::sleep(Duration::from_millis(15));
        ensure!(
            !near.memory.holds_marker(),
            "a read took bytes that were written after unregister returned"
        );
        near.memory.accept();
    }
    Ok(())
}

pub(super) fn a_local_region_is_left_alone_after_unregister_returned(rig: &Rig<'_>) -> Result {
    let len = rig.amount(16 * MIB, 4 * MIB);
    for (i, delay) in delays(rig) {
        let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
        let near = rig.area(Side::Near, len, Access::NONE)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        let way = Way::ALL[i % 2];
        let handle = rig.start(way, &moves);
        thread::sleep(delay);
        rig.unregister(Side::Near, &near)?;
        match way {
            Write => near.memory.mark(),
            Read => near.memory.refill(),
        }
        let what = format!("a {way} whose local region was unregistered");
        let kinds = [GONE[0], GONE[1], "cancelled"];
        rig.ended_or_failed(&*handle, &moves, &kinds, &what)?;
        watch(&near.memory, WATCHED, "local memory after unregister returned")?;
        ensure!(
            !far.memory.holds_marker(),
            "a write sent bytes that were there only after unregister returned"
        );
        rig.unregister(Side::Far, &far)?;
    }
    Ok(())
}

pub(super) fn unregister_waits_for_the_device(rig: &Rig<'_>) -> Result {
    if !needs_far_device(rig, "unregister while a device copies") {
        return Ok(());
    }
    let near = rig.area(Side::Near, MIB, Access::NONE)?;
    for way in Way::ALL {
        let far = rig.area(Side::Far, MIB, Access::READ_WRITE)?;
        let device = far.device();
        device.hold();
        let moves = [Move::new(&near, 0, &far, 0, MIB)];
        let handle = rig.start(way, &moves);
        rig.wait_for_copies(device)?;
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
        let outcome = rig.ended(&*handle, "a transfer with a held device")?;
        watch(&far.memory, WATCHED, "device memory after unregister returned")?;
        if outcome.is_err() {
            failed(outcome, &GONE, "a transfer with a held device")?;
        }
        far.memory.check_misuse()?;
        near.memory.accept();
    }
    Ok(())
}

pub(super) fn regions_come_and_go(rig: &Rig<'_>) -> Result {
    let near = rig.area(Side::Near, 64 * KIB, Access::NONE)?;
    for _ in 0..rig.amount(100, 30) {
        let far = rig.area(Side::Far, 64 * KIB, Access::READ_WRITE)?;
        rig.moved(Write, &[Move::new(&near, 0, &far, 100, 5000)], "a write to a new region")?;
        rig.unregister(Side::Far, &far)?;
        far.memory.check("a region that was just unregistered")?;
        let again = rig.far.unregister(&far).map(|()| TransferStats { bytes: 0, descriptors: 0 });
        failed(again, &["not_registered"], "a second unregister")?;
    }
    Ok(())
}

pub(super) fn unregister_leaves_no_copier_inside(rig: &Rig<'_>) -> Result {
    let len = MIB;
    let near = rig.area(Side::Near, len, Access::NONE)?;
    let poison = Pattern::fresh().bytes(len);
    for round in 0..rig.amount(60, 25) {
        let far = rig.area(Side::Far, len, Access::WRITE)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        near.memory.refill();
        let handle = rig.start(Write, &moves);
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
        let what = "a write to a region that was unregistered";
        rig.ended_or_failed(&*handle, &moves, &GONE, what)?;
        thread::sleep(Duration::from_millis(2));
        far.memory.check("memory right after unregister returned")?;
    }
    Ok(())
}
