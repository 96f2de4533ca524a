//! Threads that carry out operations on files for callers that do not wait for a device that hangs.
//!
//! A thread is started where none is idle, so a thread that waits for a device keeps no other operation from being
//! carried out. Nothing is given to a directory that is known to hang, so they are no more than the callers that had
//! begun by then.

use kvferry_sys::sync::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;

/// Threads that wait for the next job, at most.
const IDLE_MAX: usize = 4;

pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(crate) struct Helpers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    idle: usize,
    is_closed: bool,
}

impl Helpers {
    /// Has a thread carry out a job, at once.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn submit(self: &Arc<Self>, job: Job) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.idle > state.waiting.len() {
            state.waiting.push_back(job);
            drop(state);
            self.changed.notify_one();
            return Ok(());
        }
        drop(state);
        let helpers = Arc::clone(self);
        kvferry_sys::thread::spawn("kvferry-store-io".into(), move || helpers.serve(job))?;
        Ok(())
    }

    /// Threads end once they have nothing to do.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn serve(&self, first: Job) {
        first();
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                drop(state);
                job();
                state = self.state.lock();
            } else if state.is_closed || state.idle >= IDLE_MAX {
                return;
            } else {
                state.idle += 1;
                state = self.changed.wait(state, None);
                state.idle -= 1;
            }
        }
    }
}

impl fmt::Debug for Helpers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Helpers[{} idle]", self.state.lock().idle)
    }
}
