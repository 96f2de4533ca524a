//! Every transfer has one outcome, in time.

use super::*;
use crate::slow::SlowMemory;
use kvferry_sys::poll::{Interest, wait_one};

/// Allowed delay of a deadline. A transfer waits for a live peer's confirmation until the silence
/// window has passed.
fn slack(rig: &Rig<'_>) -> Duration {
    rig.patience()
}

/// Reads the outcome again and again until `time` after the end, and expects it not to change.
fn only_outcome(handle: &dyn Handle, patience: Duration, time: Duration) -> Result<Outcome> {
    let give_up = Instant::now() + patience;
    let first = loop {
        if let Some(outcome) = handle.poll() {
            break outcome;
        }
        ensure!(Instant::now() < give_up, "a transfer did not end within {patience:?}");
        thread::sleep(Duration::from_micros(200));
    };
    let end = Instant::now() + time;
    while Instant::now() < end {
        for (how, again) in [("poll", handle.poll()), ("wait", handle.wait(Duration::ZERO))] {
            ensure!(
                again.as_ref() == Some(&first),
                "{how} changed its answer: {again:?} after {first:?}"
            );
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(first)
}

pub(super) fn an_outcome_never_changes(rig: &Rig<'_>) -> Result {
    let near = rig.area(Side::Near, MIB, Access::NONE)?;
    for round in 0..rig.amount(12, 6) {
        let far = rig.area(Side::Far, MIB, Access::READ_WRITE)?;
        let whole = [Move::new(&near, 0, &far, 0, MIB)];
        let outside = [Move::new(&near, 0, &far, MIB, 64).aimed(Aim::Forged)];
        let (moves, cancelled) = match round % 3 {
            0 => (&whole, false),
            1 => (&outside, false),
            _ => (&whole, true),
        };
        let handle = rig.start(Write, moves);
        if cancelled {
            handle.cancel();
        }
        let seen: Vec<_> = thread::scope(|scope| {
            let watchers: Vec<_> = (0..3)
                .map(|_| {
                    scope
                        .spawn(|| only_outcome(&*handle, rig.patience(), Duration::from_millis(25)))
                })
                .collect();
            watchers.into_iter().map(|w| w.join().expect("watchers don't panic")).collect()
        });
        let seen = seen.into_iter().collect::<Result<Vec<_>>>()?;
        ensure!(seen.iter().all(|o| *o == seen[0]), "watchers saw different outcomes: {seen:?}");
        ensure!(!(round % 3 == 0 && seen[0].is_err()), "a healthy write failed: {:?}", seen[0]);
        ensure!(!(round % 3 == 1 && seen[0].is_ok()), "a write out of bounds was done");
        rig.unregister(Side::Far, &far)?;
    }
    Ok(())
}

pub(super) fn the_event_fd_is_readable_once_it_ended(rig: &Rig<'_>) -> Result {
    let len = 2 * MIB;
    let near = rig.area(Side::Near, len, Access::NONE)?;
    for (is_healthy, cancel, after_end) in
        [(true, false, false), (true, false, true), (false, false, false), (true, true, false)]
    {
        let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
        let moves = match is_healthy {
            true => [Move::new(&near, 0, &far, 0, len)],
            false => [Move::new(&near, 0, &far, len, 1).aimed(Aim::Forged)],
        };
        let handle = rig.start(Write, &moves);
        if cancel {
            handle.cancel();
        }
        if after_end {
            rig.ended(&*handle, "a write")?.map_err(|e| Violation::new(e.to_string()))?;
        }
        let give_up = Instant::now() + rig.patience();
        loop {
            let left = give_up.saturating_duration_since(Instant::now());
            let ready = wait_one(handle.event_fd(), Interest::Read, Some(left));
            let ready = ready.map_err(|e| Violation::new(format!("the event fd: {e}")))?;
            if ready.read {
                break;
            }
            ensure!(
                Instant::now() < give_up,
                "the event fd never became readable; the outcome is {:?}",
                handle.poll()
            );
        }
        ensure!(handle.poll().is_some(), "the event fd is readable before there is an outcome");
        rig.unregister(Side::Far, &far)?;
    }
    // Not readable while the transfer runs: only a held device makes certain that it does.
    let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
    if let Some(device) = far.memory.device() {
        let healthy = [Move::new(&near, 0, &far, 0, len)];
        device.hold();
        let handle = rig.start(Write, &healthy);
        let ready = wait_one(handle.event_fd(), Interest::Read, Some(Duration::from_millis(40)));
        let early = ready.is_ok_and(|r| r.read);
        device.release();
        ensure!(!early, "the event fd was readable while the device was held");
        done(rig.ended(&*handle, "the held write")?, &healthy, "the held write")?;
        healthy[0].expect(Write);
    }
    Ok(())
}

pub(super) fn waiting_does_not_end_a_transfer(rig: &Rig<'_>) -> Result {
    let len = rig.amount(16 * MIB, 4 * MIB);
    let (near, far) = rig.both(len)?;
    let moves = [Move::new(&near, 0, &far, 0, len)];
    if let Some(device) = far.memory.device() {
        device.hold();
    }
    let handle = rig.start(Write, &moves);
    let waited = Instant::now();
    let early = handle.wait(Duration::from_millis(30));
    if let Some(device) = far.memory.device() {
        ensure!(early.is_none(), "a write ended while its device was held: {early:?}");
        ensure!(waited.elapsed() >= Duration::from_millis(29), "wait did not wait");
        device.release();
    }
    for _ in 0..5 {
        drop(handle.wait(Duration::ZERO));
        drop(handle.wait(Duration::from_micros(50)));
    }
    done(rig.ended(&*handle, "a write that was waited for")?, &moves, "a write")?;
    moves[0].expect(Write);
    Ok(())
}

pub(super) fn a_wait_ends_with_its_transfer(rig: &Rig<'_>) -> Result {
    let len = rig.amount(8 * MIB, 2 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    let allowed = rig.patience();
    // Longer than anything that may be waited for here.
    let timeout = rig.patience() + Duration::from_secs(3600);
    for (is_healthy, cancel) in [(true, false), (false, false), (true, true)] {
        let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
        let moves = match is_healthy {
            true => [Move::new(&near, 0, &far, 0, len)],
            false => [Move::new(&near, 0, &far, len, 1).aimed(Aim::Forged)],
        };
        let handle = rig.start(Write, &moves);
        let late = thread::scope(|scope| {
            let (tell, told) = mpsc::channel();
            for _ in 0..3 {
                let (tell, handle) = (tell.clone(), &handle);
                scope.spawn(move || {
                    // In pieces, so that the scenario ends although a wait oversleeps; each is
                    // longer than allowed, so that oversleeping is noticed.
                    let mut left = timeout;
                    while left > Duration::ZERO && handle.poll().is_none() {
                        let piece = left.min(2 * allowed);
                        drop(handle.wait(piece));
                        left -= piece;
                    }
                    let _ = tell.send(());
                });
            }
            if cancel {
                thread::sleep(Duration::from_millis(1));
                handle.cancel();
            }
            let give_up = Instant::now() + rig.patience();
            while handle.poll().is_none() && Instant::now() < give_up {
                thread::sleep(Duration::from_millis(1));
            }
            (0..3).any(|_| told.recv_timeout(allowed).is_err())
        });
        ensure!(!late, "a transfer has an outcome and a thread that waits for it does not notice");
        rig.unregister(Side::Far, &far)?;
    }
    Ok(())
}

pub(super) fn dropped_handles_neither_cancel_nor_leak(rig: &Rig<'_>) -> Result {
    let (count, slot) = (rig.amount(40, 12), 128 * KIB);
    let (near, far) = rig.both(count * slot)?;
    for i in 0..count {
        let moves = [Move::new(&near, i * slot, &far, i * slot, slot)];
        drop(rig.near.start(Write, &moves, &rig.noting("dropped", i)));
        moves[0].expect(Write);
    }
    for i in 0..count {
        let note = rig.far.wait_note(rig.patience());
        ensure!(note.is_some(), "only {i} of {count} dropped transfers were done");
    }
    Ok(())
}

/// A blocking and an asynchronous write, at once, to a device that makes no progress.
fn deadlines_while_held(rig: &Rig<'_>, near: &Region, far: &Region, device: &SlowMemory) -> Result {
    let timeout = Duration::from_millis(120);
    let (options, half) = (&within(timeout), near.len / 2);
    let halves = [0, half].map(|at| [Move::new(near, at, far, at, half)]);
    device.hold();
    let ended = thread::scope(|scope| {
        let [blocking, asynchronous] = &halves;
        let run = |write: fn(&Rig<'_>, &[Move], &Options<'_>) -> Option<Outcome>, moves| {
            let (tell, told) = mpsc::channel();
            scope.spawn(move || {
                let began = Instant::now();
                drop(tell.send((write(rig, moves, options), began.elapsed())));
            });
            told
        };
        let told = [
            run(|rig, moves, options| Some(rig.near.transfer(Write, moves, options)), blocking),
            run(
                |rig, moves, options| rig.near.start(Write, moves, options).wait(rig.patience()),
                asynchronous,
            ),
        ];
        let ended = told.map(|told| told.recv_timeout(timeout + slack(rig)).ok());
        // Before the threads are joined: a transport that ignores the deadline waits for the device.
        device.release();
        ended
    });
    for ended in ended {
        let (outcome, took) = ended
            .and_then(|(outcome, took)| Some((outcome?, took)))
            .ok_or_else(|| Violation::new(format!("a deadline of {timeout:?} was not honoured")))?;
        failed(outcome, &["deadline"], "a write to a held device")?;
        ensure!(
            took >= timeout.mul_f32(0.9) && took < timeout + slack(rig),
            "a deadline of {timeout:?} was answered after {took:?}"
        );
    }
    rig.settle()
}

pub(super) fn a_deadline_is_honoured(rig: &Rig<'_>) -> Result {
    let len = rig.amount(24 * MIB, 8 * MIB);
    let near = rig.area(Side::Near, len, Access::NONE)?;
    // Most are too short; a transfer that was fast enough succeeds.
    for (i, timeout) in [0, 1, 1, 3, 6, 12].into_iter().map(Duration::from_millis).enumerate() {
        // What was sent before the deadline may arrive until the region is unregistered.
        let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        let began = Instant::now();
        let options = within(timeout);
        let outcome = match i % 3 {
            0 => rig.near.transfer(Write, &moves, &options),
            1 => rig.near.transfer(Read, &moves, &options),
            _ => {
                let handle = rig.near.start(Write, &moves, &options);
                rig.ended(&*handle, "a write with a deadline")?
            }
        };
        let took = began.elapsed();
        ensure!(
            took < timeout + slack(rig),
            "a deadline of {timeout:?} was answered after {took:?}"
        );
        if outcome.is_err() {
            failed(outcome, &["deadline"], &format!("a transfer with {timeout:?}"))?;
        }
        rig.settle()?;
        rig.unregister(Side::Far, &far)?;
    }
    near.memory.accept();
    let held = rig.area(Side::Far, len, Access::READ_WRITE)?;
    if let Some(device) = held.memory.device() {
        deadlines_while_held(rig, &near, &held, device)?;
    }
    rig.unregister(Side::Far, &held)?;
    let far = rig.area(Side::Far, len, Access::READ_WRITE)?;
    let moves = [Move::new(&near, 0, &far, 0, len)];
    rig.moved(Write, &moves, "a write after all those deadlines")
}

pub(super) fn a_failing_device_fails_its_transfer(rig: &Rig<'_>) -> Result {
    let cases = [(Side::Near, Write), (Side::Near, Read), (Side::Far, Write), (Side::Far, Read)];
    let cases = with_devices(rig, cases, "a failing device");
    let (near, mut far) = rig.both(MIB)?;
    for (side, way) in cases {
        let failing = if side == Side::Near { &near } else { &far };
        failing.device().fail_next(1);
        ensure!(
            rig.transfer(way, &[Move::new(&near, 0, &far, 0, MIB)]).is_err(),
            "a copy failed on the device and the transfer says done"
        );
        // What the peer has not read yet it serves later, as long as the region is registered.
        rig.unregister(Side::Far, &far)?;
        far = match rig.fabric.names_regions() {
            // Late requests name the region before. The device is the same.
            true => rig.register(Side::Far, &far.memory, 0, MIB, Access::READ_WRITE)?,
            false => rig.area(Side::Far, MIB, Access::READ_WRITE)?,
        };
        near.memory.accept();
        far.memory.accept();
        let moves = [Move::new(&near, 0, &far, 0, MIB)];
        rig.lands(Write, &moves, "a write after the device failed one copy")?;
    }
    Ok(())
}

pub(super) fn a_stuck_device_does_not_stop_other_regions(rig: &Rig<'_>) -> Result {
    if !needs_far_device(rig, "a stuck device") {
        return Ok(());
    }
    let (near, far) = rig.both(MIB)?;
    let stuck = rig.area(Side::Far, MIB, Access::READ_WRITE)?;
    let other = [Move::new(&near, 0, &far, 0, MIB)];
    rig.moved(Write, &other, "a first write")?;
    let device = stuck.device();
    device.hold();
    let moves = [Move::new(&near, 0, &stuck, 0, MIB)];
    let held = rig.start(Write, &moves);
    let result = rig.wait_for_copies(device).and_then(|()| {
        (0..5).try_for_each(|_| {
            near.memory.accept();
            rig.moved(Write, &other, "a write to a healthy region while a device is stuck")
        })
    });
    device.release();
    result?;
    done(rig.ended(&*held, "the held write")?, &moves, "the held write")?;
    moves[0].expect(Write);
    Ok(())
}
