//! The one way from Python into a call that may block, and what happens to such calls when Python
//! ends.

use crate::aside::{ASK, Interrupt, NoAnswer, aside};
use crate::error::Failure;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Runs `call` detached from the interpreter.
///
/// If a signal handler raises meanwhile (Ctrl-C's does), the interrupt says so to the call, which
/// ends in good order, and the handler's exception is what Python sees.
pub(crate) fn run<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    call: impl FnOnce(Interrupt<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let signals = Signals::default();
    let result = py.detach(|| {
        let result = call(&|| signals.stop());
        never_return_into_an_ending_interpreter();
        result
    });
    if let Some(raised) = signals.into_raised() {
        return Err(raised);
    }
    result.map_err(|failure| failure.into().into_exception(py))
}

/// Runs a call that has a time limit but can't be interrupted; see [`aside()`].
pub(crate) fn run_aside<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, kvferry::Error> + Send + 'static,
) -> PyResult<T> {
    run(py, |interrupt| match aside(interrupt, call) {
        Ok(result) => result.map_err(Failure::Core),
        Err(NoAnswer::Interrupted) => Err(Failure::Interrupted),
        Err(NoAnswer::Thread(error)) => Err(Failure::Thread(error)),
    })
}

/// Repeats `wait`, which is given slices of at most [`ASK`], until it has something, time is up
/// (`None`) or a signal handler raises.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    wait: impl Fn(Duration) -> Option<T> + Send + Sync,
) -> PyResult<Option<T>> {
    // A limit beyond the clock's range is no limit.
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    run(py, |interrupt| {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if let Some(found) = wait(left.map_or(ASK, |left| left.min(ASK))) {
                return Ok(Some(found));
            }
            if left.is_some_and(|left| left <= ASK)
                && until.is_some_and(|until| Instant::now() >= until)
            {
                return Ok(None);
            }
            if interrupt() {
                return Err(Failure::Interrupted);
            }
        }
    })
}

/// What Python's signal handlers had to say during one call.
#[derive(Default)]
struct Signals(Mutex<Heard>);

#[derive(Default)]
struct Heard {
    raised: Option<PyErr>,
    asked: Option<Instant>,
}

impl Signals {
    /// Whether the call should end. Cheap to ask often: Python is asked every [`ASK`] only.
    fn stop(&self) -> bool {
        let now = Instant::now();
        {
            let mut heard = lock(&self.0);
            if heard.raised.is_some() {
                return true;
            }
            if heard.asked.is_some_and(|asked| now.duration_since(asked) < ASK) {
                return false;
            }
            heard.asked = Some(now);
        }
        // Only on Python's main thread do handlers run; elsewhere this is a look and no more.
        match Python::try_attach(|py| py.check_signals()) {
            Some(Ok(())) => false,
            Some(Err(raised)) => {
                lock(&self.0).raised = Some(raised);
                true
            }
            // The interpreter is going away, and the call should with it.
            None => true,
        }
    }

    fn into_raised(self) -> Option<PyErr> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).raised
    }
}

/// Something that must end before the interpreter does.
pub(crate) trait Stop: Send + Sync {
    fn stop(&self);
}

static LIVE: Mutex<Vec<Weak<dyn Stop>>> = Mutex::new(Vec::new());
static ENDED_BY: OnceLock<ThreadId> = OnceLock::new();

/// Has `it` stopped when the interpreter ends, if it still lives then.
pub(crate) fn stop_at_exit<T: Stop + 'static>(_py: Python<'_>, it: &Arc<T>) {
    let mut live = lock(&LIVE);
    live.retain(|other| other.strong_count() > 0);
    let weak: Weak<T> = Arc::downgrade(it);
    live.push(weak);
}

/// Registers, with Python's `atexit`, the end of everything [`stop_at_exit`] was told of.
pub(crate) fn stop_agents_at_exit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let stop = pyo3::wrap_pyfunction!(stop_agents, module)?;
    py.import("atexit")?.call_method1("register", (stop,))?;
    Ok(())
}

/// Says goodbye to peers and ends the native threads while the interpreter is still whole.
#[pyfunction]
fn stop_agents(py: Python<'_>) {
    // Waiting for somebody who is attached, with the lock held for a moment, is all this can do.
    let live: Vec<_> = lock(&LIVE).iter().filter_map(Weak::upgrade).collect();
    let _ = ENDED_BY.set(std::thread::current().id());
    py.detach(|| live.iter().for_each(|it| it.stop()));
}

/// Holds threads that are not to see the interpreter again: at this point only daemon threads are
/// left beside the one that ends it, and what they were about to raise would be printed into a
/// finished program. The process's end takes them along, as newer Pythons do with every daemon
/// thread.
fn never_return_into_an_ending_interpreter() {
    while ENDED_BY.get().is_some_and(|ender| *ender != std::thread::current().id()) {
        std::thread::park();
    }
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
