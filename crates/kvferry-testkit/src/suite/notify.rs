//! A notification tells the target what has happened: after it, in order, once.

use super::*;
use std::collections::BTreeMap;

/// Time to wait for a notification that must not come.
const NOTHING_COMES: Duration = Duration::from_millis(40);

fn number(note: &Notification) -> Result<usize> {
    String::from_utf8_lossy(&note.message)
        .parse()
        .map_err(|_| Violation::new(format!("a notification that was not sent: {note:?}")))
}

pub(super) fn a_notification_comes_after_its_data_exactly_once(rig: &Rig<'_>) -> Result {
    let (count, slot) = (rig.amount(60, 24), 200 * KIB + 3);
    let (near, far) = rig.both(count * slot)?;
    let mut order: Vec<_> = (0..count).collect();
    rig.rng().shuffle(&mut order);
    let started = order.into_iter().map(|i| {
        let moves = [Move::new(&near, i * slot, &far, i * slot, slot)];
        moves[0].expect(Write);
        rig.near.start(Write, &moves, &rig.noting("slot", i))
    });
    let handles: Vec<_> = started.collect();
    let mut seen = vec![false; count];
    for arrived in 0..count {
        let none = || Violation::new(format!("only {arrived} of {count} notified"));
        let i = number(&rig.far.wait_note(rig.patience()).ok_or_else(none)?)?;
        let there = far.memory.load(i * slot, slot);
        ensure!(there == near.memory.load(i * slot, slot), "a notification came before its data");
        ensure!(!std::mem::replace(&mut seen[i], true), "notification {i} came twice");
    }
    for handle in handles {
        let outcome = rig.ended(&*handle, "a write with a notification")?;
        outcome.map_err(|e| Violation::new(format!("a write with a notification failed: {e}")))?;
    }
    let more = rig.far.wait_note(NOTHING_COMES);
    ensure!(more.is_none(), "one more notification than was sent: {more:?}");
    Ok(())
}

pub(super) fn notifications_keep_the_order_of_their_caller(rig: &Rig<'_>) -> Result {
    let (callers, count, slot) = (4, rig.amount(80, 40), 3000);
    let (near, far) = rig.both(callers * slot)?;
    let slots = pieces(&near, &far, slot);
    let received = thread::scope(|scope| {
        let sent: Vec<_> = slots
            .chunks(1)
            .enumerate()
            .map(|(caller, moves)| {
                scope.spawn(move || -> Result {
                    let name = format!("caller-{caller}");
                    for i in 0..count {
                        let outcome = if i % 3 == 0 {
                            let note = Notification::new(&*name, i.to_string());
                            rig.near.notify(note, &rig.options())
                        } else {
                            rig.near.transfer(Write, moves, &rig.noting(&name, i)).map(drop)
                        };
                        outcome.map_err(|e| Violation::new(format!("notification {i}: {e}")))?;
                    }
                    Ok(())
                })
            })
            .collect();
        let mut received: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        while received.values().map(Vec::len).sum::<usize>() < callers * count {
            let Some(note) = rig.far.wait_note(rig.patience()) else { break };
            received.entry(note.name.clone()).or_default().push(number(&note)?);
        }
        sent.into_iter().try_for_each(|s| s.join().expect("callers don't panic"))?;
        Ok(received)
    })?;
    for (caller, slot) in slots.iter().enumerate() {
        let numbers = received.get(&format!("caller-{caller}")).cloned().unwrap_or_default();
        ensure!(
            numbers.iter().copied().eq(0..count),
            "caller {caller} sent 0..{count} in order, and {numbers:?} arrived"
        );
        slot.expect(Write);
    }
    let more = rig.far.take_notes();
    ensure!(more.is_empty(), "more notifications than were sent: {more:?}");
    Ok(())
}

pub(super) fn a_failed_batch_notifies_nobody(rig: &Rig<'_>) -> Result {
    let near = rig.area(Side::Near, 64 * KIB, Access::NONE)?;
    let read_only = rig.area(Side::Far, 4 * KIB, Access::READ)?;
    for is_protected in [false, true] {
        let far = rig.area(Side::Far, 64 * KIB, Access::READ_WRITE)?;
        let refused = match is_protected {
            false => Move::new(&near, 0, &far, far.len - 10, 20),
            true => Move::new(&near, 0, &read_only, 0, 20),
        };
        let moves = [Move::new(&near, 0, &far, 0, 100), refused.aimed(Aim::Forged)];
        let outcome = rig.near.transfer(Write, &moves, &rig.noting("refused", 0));
        ensure!(outcome.is_err(), "a refused batch was done");
        let note = rig.far.wait_note(NOTHING_COMES);
        ensure!(note.is_none(), "a batch failed and its notification came");
        // The first descriptor may land until then.
        rig.unregister(Side::Far, &far)?;
        far.memory.accept_range(0, 100);
        far.memory.check("after a refused batch")?;
    }
    Ok(())
}

pub(super) fn a_cancelled_batch_notifies_only_with_all_of_its_data(rig: &Rig<'_>) -> Result {
    let len = rig.amount(8 * MIB, 2 * MIB);
    let mut batches = Vec::new();
    for (batch, us) in [0, 100, 600, 2_000, 5_000].into_iter().enumerate() {
        let (near, far) = rig.both(len)?;
        let moves = [Move::new(&near, 0, &far, 0, len)];
        let handle = rig.near.start(Write, &moves, &rig.noting("maybe", batch));
        batches.push((near, far.clone(), false));
        thread::sleep(Duration::from_micros(us));
        handle.cancel();
        if rig.ended(&*handle, "a cancelled write")?.is_ok() {
            while !batches[batch].2 {
                let came = whole_batch_notifies(rig, &mut batches, rig.patience())?;
                ensure!(came, "a write was done and its notification never came");
            }
        }
        while whole_batch_notifies(rig, &mut batches, NOTHING_COMES)? {}
        rig.unregister(Side::Far, &far)?;
    }
    Ok(())
}

/// Takes a notification of one of these batches, if one comes in this time: their sources, their targets, and whether
/// each has notified. That of a cancelled batch may come late: the cancel crossed the answer on its way.
fn whole_batch_notifies(
    rig: &Rig<'_>,
    batches: &mut [(Region, Region, bool)],
    time: Duration,
) -> Result<bool> {
    let Some(note) = rig.far.wait_note(time) else { return Ok(false) };
    let batch = batches.get_mut(number(&note)?);
    let (near, far, has_notified) =
        batch.ok_or_else(|| Violation::new(format!("of no batch: {note:?}")))?;
    ensure!(
        far.memory.load(0, far.len) == near.memory.load(0, near.len),
        "a cancelled write's notification came without its data"
    );
    ensure!(!std::mem::replace(has_notified, true), "a cancelled write's notification came twice");
    Ok(true)
}
