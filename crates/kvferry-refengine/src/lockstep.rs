//! Ranks that do the same at the same time.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Barrier, Mutex, PoisonError};

/// Has every rank do each phase, and waits for all of them before the next: one after the other,
/// or each in a thread of its own. `perform` is told whether the rank is the first.
///
/// # Panics
/// If a rank does, once all have done everything else.
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
                    // A rank that is gone still meets the others, or they would wait for ever.
                    if alive {
                        let done = catch_unwind(AssertUnwindSafe(|| perform(rank, phase, at == 0)));
                        if let Err(payload) = done {
                            alive = false;
                            *panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
                        }
                    }
                    barrier.wait();
                }
            });
        }
    });
    if let Some(payload) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(payload);
    }
}
