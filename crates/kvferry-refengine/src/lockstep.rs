//! Runs phases on all ranks, each phase on all before the next.

use kvferry_sys::sync::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;

/// Performs each phase on every rank before the next phase begins: rank by rank, or with a thread per
/// rank. The last argument of `perform` is true for the first rank.
///
/// # Panics
/// If a rank panics, after the others have performed all phases.
pub(crate) fn lockstep<T: Send, P: Sync>(
    threads: bool,
    ranks: &mut [T],
    phases: &[P],
    perform: impl Fn(&mut T, &P, bool) + Sync,
) {
    if !threads {
        for phase in phases {
            for (at, rank) in ranks.iter_mut().enumerate() {
                perform(rank, phase, at == 0);
            }
        }
        return;
    }
    let barrier = Barrier::new(ranks.len());
    let panic = Mutex::new(None);
    std::thread::scope(|scope| {
        for (at, rank) in ranks.iter_mut().enumerate() {
            let (barrier, panic, perform) = (&barrier, &panic, &perform);
            scope.spawn(move || {
                let mut alive = true;
                for phase in phases {
                    // A rank that has panicked still waits at the barrier, or the others would hang.
                    if alive {
                        let done = catch_unwind(AssertUnwindSafe(|| perform(rank, phase, at == 0)));
                        if let Err(payload) = done {
                            alive = false;
                            *panic.lock() = Some(payload);
                        }
                    }
                    barrier.wait();
                }
            });
        }
    });
    if let Some(payload) = panic.lock().take() {
        resume_unwind(payload);
    }
}
