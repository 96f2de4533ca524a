//! The one way from Python into a call that may block, and the end of such calls when the
//! interpreter exits.
//!
//! At exit, `atexit` runs [`stop_agents`]: it shuts every agent down, which ends the calls of all
//! threads. Those threads return to Python, so that a later `atexit` callback can join them, but
//! every error they would raise is replaced by `SystemExit`: that ends a thread without a traceback
//! on stderr.

use crate::error::{self, Failure};
use kvferry_mooncake::interrupt::{CHECK_INTERVAL, Interrupt, NoAnswer, run_interruptible};
use kvferry_sys::sync::Mutex;
use pyo3::prelude::*;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// A time in seconds, which may have a fraction.
pub(crate) fn seconds(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    /// Ten years, well within the clock's range. Longer times mean the same.
    const LONGEST: f64 = 10.0 * 365.0 * 86_400.0;
    if seconds.is_nan() || seconds < 0.0 {
        return Err(error::invalid(
            py,
            &format!("a time in seconds can't be negative or not a number: {seconds}"),
        ));
    }
    Ok(Duration::from_secs_f64(seconds.min(LONGEST)))
}

/// Runs `call` detached from the interpreter.
///
/// If a Python signal handler raises meanwhile (Ctrl-C), the interrupt returns true, the call ends
/// its transfer in an orderly way, and Python sees the handler's exception.
pub(crate) fn run<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    call: impl FnOnce(Interrupt<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let signals = Signals::default();
    let result = py.detach(|| call(&|| signals.should_stop()));
    if let Some(raised) = signals.into_raised() {
        return Err(raised);
    }
    result.map_err(|failure| failure.into().into_exception(py))
}

/// Runs a call that has a time limit but takes no interrupt; see [`run_interruptible()`].
pub(crate) fn run_on_own_thread<T: Send + 'static, E: Into<Failure> + Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> PyResult<T> {
    run(py, |interrupt| match run_interruptible(interrupt, call) {
        Ok(result) => result.map_err(Into::into),
        Err(NoAnswer::Interrupted) => Err(Failure::Interrupted),
        Err(NoAnswer::Thread(error)) => Err(Failure::Thread(error)),
    })
}

/// Repeats `wait`, which gets slices of at most [`CHECK_INTERVAL`], until it returns something, the
/// time is up (`None`) or a signal handler raises.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    wait: impl Fn(Duration) -> Option<T> + Send + Sync,
) -> PyResult<Option<T>> {
    // A time beyond the clock's range is no limit.
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    run(py, |interrupt| {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if let Some(found) = wait(left.map_or(CHECK_INTERVAL, |left| left.min(CHECK_INTERVAL)))
            {
                return Ok(Some(found));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
            if interrupt() {
                return Err(Failure::Interrupted);
            }
        }
    })
}

/// The exception that Python's signal handlers raised during one call, if any.
#[derive(Default)]
struct Signals(Mutex<SignalState>);

#[derive(Default)]
struct SignalState {
    raised: Option<PyErr>,
    checked: Option<Instant>,
}

impl Signals {
    /// Whether the call should end. Cheap to call often: it runs Python's handlers at most once per
    /// [`CHECK_INTERVAL`].
    fn should_stop(&self) -> bool {
        if thread_must_end() {
            return true;
        }
        let now = Instant::now();
        {
            let mut state = self.0.lock();
            if state.raised.is_some() {
                return true;
            }
            if state.checked.is_some_and(|at| now.duration_since(at) < CHECK_INTERVAL) {
                return false;
            }
            state.checked = Some(now);
        }
        // Handlers run only on Python's main thread; on other threads this does nothing.
        match Python::try_attach(|py| py.check_signals()) {
            Some(Ok(())) => false,
            Some(Err(raised)) => {
                self.0.lock().raised = Some(raised);
                true
            }
            // The interpreter is gone.
            None => true,
        }
    }

    fn into_raised(self) -> Option<PyErr> {
        self.0.into_inner().raised
    }
}

/// Something that must stop before the interpreter is gone.
pub(crate) trait Stop: Send + Sync {
    fn stop(&self);
}

static LIVE: Mutex<Vec<Weak<dyn Stop>>> = Mutex::new(Vec::new());
/// The thread that ends the interpreter. Set when [`stop_agents`] runs.
static EXITING_THREAD: OnceLock<ThreadId> = OnceLock::new();

/// Whether the interpreter exits and this is not the thread that ends it.
pub(crate) fn thread_must_end() -> bool {
    EXITING_THREAD.get().is_some_and(|exiting| *exiting != std::thread::current().id())
}

/// Makes the interpreter's exit call `it.stop()`, if `it` still lives then.
pub(crate) fn stop_at_exit<T: Stop + 'static>(_py: Python<'_>, it: &Arc<T>) {
    let mut live = LIVE.lock();
    live.retain(|other| other.strong_count() > 0);
    let weak: Weak<T> = Arc::downgrade(it);
    live.push(weak);
}

/// Registers [`stop_agents`] with Python's `atexit`.
pub(crate) fn stop_agents_at_exit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let stop = pyo3::wrap_pyfunction!(stop_agents, module)?;
    py.import("atexit")?.call_method1("register", (stop,))?;
    Ok(())
}

/// Closes sessions and ends native threads while the interpreter is still whole.
#[pyfunction]
fn stop_agents(py: Python<'_>) {
    let live: Vec<_> = LIVE.lock().iter().filter_map(Weak::upgrade).collect();
    let _ = EXITING_THREAD.set(std::thread::current().id());
    // In reverse order: what was made later may need what was made before, as a store needs its agent.
    py.detach(|| live.iter().rev().for_each(|it| it.stop()));
}
