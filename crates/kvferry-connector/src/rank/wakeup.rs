//! Wakes the rank's thread.

use crate::sync::{lock, wait_while};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A wake-up before the wait counts: the wait returns at once.
#[derive(Default)]
pub(super) struct Wakeup {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    pending: bool,
    /// How many [`Held`] there are.
    held: u32,
}

/// The thread stays asleep while this lives. See [`Wakeup::hold`].
pub(crate) struct Held<'a>(&'a Wakeup);

impl Wakeup {
    pub(super) fn wake(&self) {
        let mut state = lock(&self.state);
        let is_first = !std::mem::replace(&mut state.pending, true);
        if is_first && state.held == 0 {
            self.changed.notify_one();
        }
    }

    /// Postpones wake-ups until the guard is dropped: for many changes in a row, which would wait for
    /// the lock that the thread takes for each of them.
    pub(super) fn hold(&self) -> Held<'_> {
        lock(&self.state).held += 1;
        Held(self)
    }

    pub(super) fn wait(&self, timeout: Option<Duration>) {
        let state = lock(&self.state);
        let asleep = |state: &mut State| !state.pending || state.held > 0;
        wait_while(&self.changed, state, timeout, asleep).pending = false;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.held -= 1;
        if state.pending && state.held == 0 {
            self.0.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_held_wakeup_wakes_when_it_is_released_and_not_before() {
        let (wakeup, short) = (Wakeup::default(), Duration::from_millis(5));
        let held = wakeup.hold();
        wakeup.wake();
        std::thread::scope(|scope| {
            let woken = scope.spawn(|| {
                wakeup.wait(None);
                Instant::now()
            });
            std::thread::sleep(short);
            let released = Instant::now();
            drop(held);
            assert!(woken.join().expect("no panic") >= released);
        });
    }
}
