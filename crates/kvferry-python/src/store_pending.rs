//! Operations of a store: their results, and those in the background.

use crate::blocking::{self, seconds};
use crate::error;
use crate::store::Open;
use pyo3::intern;
use pyo3::prelude::*;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// What became of the blocks of a put. They add up to the blocks that were given.
#[pyclass(frozen, eq, module = "kvferry")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Put(pub(crate) kvferry_store::Put);

#[pymethods]
impl Put {
    /// Stored now.
    #[getter]
    fn stored(&self) -> usize {
        self.0.stored
    }

    /// Not stored, because they were there.
    #[getter]
    fn present(&self) -> usize {
        self.0.present
    }

    /// Not stored, for one of the reasons below.
    #[getter]
    fn refused(&self) -> usize {
        self.0.refused
    }

    /// Blocks refused because no segment was free.
    #[getter]
    fn refused_no_space(&self) -> usize {
        self.0.refused_no_space
    }

    /// Blocks refused because a stopped process holds a lock of the index.
    #[getter]
    fn refused_contended(&self) -> usize {
        self.0.refused_contended
    }

    /// Blocks refused because the index had no room.
    #[getter]
    fn refused_index_full(&self) -> usize {
        self.0.refused_index_full
    }

    /// Blocks refused before the put began: too much waited, the put has waited for too long, or it
    /// was cancelled.
    #[getter]
    fn refused_waiting(&self) -> usize {
        self.0.refused_waiting
    }

    /// Not stored, because of a device's error.
    #[getter]
    fn failed(&self) -> usize {
        self.0.failed
    }

    fn __repr__(&self) -> String {
        let kvferry_store::Put { stored, present, refused, failed, .. } = self.0;
        format!(
            "<kvferry.Put {stored} stored, {present} present, {refused} refused, {failed} failed>"
        )
    }
}

/// A result that Python gets.
pub(crate) trait Value: Copy + Send + Sync + 'static {
    fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>>;
}

impl Value for usize {
    fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.into_pyobject(py)?.into_any().unbind())
    }
}

impl Value for kvferry_store::Put {
    fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(Put(self).into_pyobject(py)?.into_any().unbind())
    }
}

/// An operation of either kind.
trait Operation: Send + Sync {
    fn outcome(&self, py: Python<'_>) -> Option<PyResult<Py<PyAny>>>;
    fn is_done(&self) -> bool;
    /// Waits for at most `slice`; `None` if it still runs then.
    fn wait(&self, slice: Duration) -> Option<()>;
    fn event_fd(&self) -> io::Result<BorrowedFd<'_>>;
    fn cancel(&self) -> bool;
}

impl<T: Value> Operation for kvferry_store::Pending<T> {
    fn outcome(&self, py: Python<'_>) -> Option<PyResult<Py<PyAny>>> {
        self.outcome().map(|outcome| match outcome.as_ref() {
            Ok(value) => value.into_python(py),
            Err(error) => Err(error::store_exception(py, error)),
        })
    }

    fn is_done(&self) -> bool {
        self.outcome().is_some()
    }

    fn wait(&self, slice: Duration) -> Option<()> {
        self.wait(Some(slice)).map(drop)
    }

    fn event_fd(&self) -> io::Result<BorrowedFd<'_>> {
        self.event_fd()
    }

    fn cancel(&self) -> bool {
        self.cancel()
    }
}

/// An operation of a store in the background. It has exactly one outcome. Dropping the object does
/// not stop it.
#[pyclass(frozen, generic, module = "kvferry")]
pub(crate) struct Pending {
    operation: Box<dyn Operation>,
    /// Keeps the store open.
    open: Arc<Open>,
}

impl Pending {
    pub(crate) fn new(operation: kvferry_store::Pending<impl Value>, open: &Arc<Open>) -> Self {
        Self { operation: Box::new(operation), open: Arc::clone(open) }
    }
}

#[pymethods]
impl Pending {
    /// True if the outcome is known.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.open.check(py)?;
        Ok(self.operation.is_done())
    }

    /// The result, or None while the operation runs. Raises if it failed.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.open.check(py)?;
        self.operation.outcome(py).transpose()
    }

    /// Waits for the result; None if the operation still runs after `timeout` seconds. Raises if it
    /// failed.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        self.open.check(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        blocking::wait(py, timeout, |slice| self.operation.wait(slice))?;
        self.operation.outcome(py).transpose()
    }

    /// A file descriptor that becomes readable when the outcome is known. It belongs to the
    /// operation: do not close it.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.open.check(py)?;
        Ok(self.operation.event_fd()?.as_raw_fd())
    }

    /// Ends a put that has not begun: its blocks are refused. False for one that has begun or ended, and
    /// for other operations.
    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        self.open.check(py)?;
        Ok(py.detach(|| self.operation.cancel()))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        slf.get().open.check(py)?;
        let outcome =
            py.import(intern!(py, "kvferry._asyncio"))?.getattr(intern!(py, "outcome"))?;
        outcome.call1((slf,))?.call_method0(intern!(py, "__await__"))
    }

    fn __repr__(&self) -> String {
        let state = if self.operation.is_done() { "done" } else { "running" };
        format!("<kvferry.Pending {state}>")
    }
}
