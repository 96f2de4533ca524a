//! A notification tells the target what has happened: after it, in order, once.

use super::rig::{Rig, Side, ended};
use crate::fabric::{Access, Aim, Fabric, Move, Note};
use crate::memory::MemoryKind;
use crate::violation::{Violation, ensure};
use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// How long to wait for what must not come.
const NOTHING_COMES: Duration = Duration::from_millis(40);

fn number(note: &Note) -> Result<usize> {
    String::from_utf8_lossy(&note.message)
        .parse()
        .map_err(|_| Violation::new(format!("a notification that was not sent: {note:?}")))
}

pub(super) fn a_notification_comes_after_its_data_exactly_once(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (count, slot) = (rig.amount(60, 24), 200 * KIB + 3);
    let (near, far) = rig.both(count * slot)?;
    let mut order: Vec<_> = (0..count).collect();
    rig.rng().shuffle(&mut order);
    let handles: Vec<_> = order
        .iter()
        .map(|&i| {
            let moves = [Move::new(&near, i * slot, &far, i * slot, slot)];
            let options = rig.options().noting(Note::new("slot", i.to_string()));
            moves[0].expect_written();
            rig.near.write_async(&moves, &options)
        })
        .collect();
    let mut seen = vec![false; count];
    for _ in 0..count {
        let note = rig.far.wait_note(rig.patience());
        let arrived = seen.iter().filter(|s| **s).count();
        let note =
            note.ok_or_else(|| Violation::new(format!("only {arrived} of {count} notified")))?;
        let i = number(&note)?;
        let there = far.memory.load(i * slot, slot);
        ensure!(there == near.memory.load(i * slot, slot), "a notification came before its data");
        ensure!(!std::mem::replace(&mut seen[i], true), "notification {i} came twice");
    }
    for handle in handles {
        let outcome = ended(&rig, &*handle, "a write with a notification")?;
        outcome.map_err(|e| Violation::new(format!("a write with a notification failed: {e}")))?;
    }
    let more = rig.far.wait_note(NOTHING_COMES);
    ensure!(more.is_none(), "one more notification than was sent: {more:?}");
    rig.finish()
}

pub(super) fn notifications_keep_the_order_of_their_caller(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (callers, count) = (4, rig.amount(80, 40));
    let slot = 3000;
    let (near, far) = rig.both(callers * slot)?;
    let received = thread::scope(|scope| {
        let sent: Vec<_> = (0..callers)
            .map(|caller| {
                let (rig, near, far) = (&rig, &near, &far);
                scope.spawn(move || -> Result {
                    let moves = [Move::new(near, caller * slot, far, caller * slot, slot)];
                    for i in 0..count {
                        let note = Note::new(format!("caller-{caller}"), i.to_string());
                        let outcome = if i % 3 == 0 {
                            rig.near.notify(note, &rig.options())
                        } else {
                            let options = rig.options().noting(note);
                            rig.near.write(&moves, &options).map(drop)
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
    for caller in 0..callers {
        let numbers = received.get(&format!("caller-{caller}")).cloned().unwrap_or_default();
        ensure!(
            numbers.iter().copied().eq(0..count),
            "caller {caller} sent 0..{count} in order, and {numbers:?} arrived"
        );
        Move::new(&near, caller * slot, &far, caller * slot, slot).expect_written();
    }
    let more = rig.far.take_notes();
    ensure!(more.is_empty(), "more notifications than were sent: {more:?}");
    rig.finish()
}

pub(super) fn a_failed_batch_notifies_nobody(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(64 * KIB)?;
    let read_only = rig.area(Side::Far, 4 * KIB, Access::READ)?;
    let refused = [
        Move::new(&near, 0, &far, far.len - 10, 20).aimed(Aim::Forged),
        Move::new(&near, 0, &read_only, 0, 20).aimed(Aim::Forged),
    ];
    for m in refused {
        let moves = [Move::new(&near, 0, &far, 0, 100), m];
        let options = rig.options().noting(Note::new("refused", "0"));
        let outcome = rig.near.write(&moves, &options);
        ensure!(outcome.is_err(), "a refused batch was done");
        let note = rig.far.wait_note(NOTHING_COMES);
        ensure!(note.is_none(), "a batch failed and its notification came");
        far.memory.accept_range(0, 100);
    }
    rig.finish()
}

pub(super) fn a_cancelled_batch_notifies_only_with_all_of_its_data(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(rig.amount(8 * MIB, 2 * MIB))?;
    for us in [0, 100, 600, 2_000, 5_000] {
        near.memory.refill();
        let moves = [Move::new(&near, 0, &far, 0, far.len)];
        let options = rig.options().noting(Note::new("maybe", us.to_string()));
        let handle = rig.near.write_async(&moves, &options);
        thread::sleep(Duration::from_micros(us));
        handle.cancel();
        let outcome = ended(&rig, &*handle, "a cancelled write")?;
        match outcome {
            Ok(_) => {
                let note = rig.far.wait_note(rig.patience());
                ensure!(note.is_some(), "a write was done and its notification never came");
            }
            Err(_) => {
                // A cancel may have crossed the answer on its way: then all of it is there.
                if rig.far.wait_note(NOTHING_COMES).is_some() {
                    let there = far.memory.load(0, far.len);
                    ensure!(
                        there == near.memory.load(0, far.len),
                        "a cancelled write's notification came without its data"
                    );
                    let again = rig.far.wait_note(NOTHING_COMES);
                    ensure!(again.is_none(), "a cancelled write's notification came twice");
                }
            }
        }
        far.memory.accept();
    }
    rig.finish()
}
