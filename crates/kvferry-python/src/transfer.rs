//! Transfers in the background.

use crate::agent::{Shared, seconds};
use crate::blocking;
use crate::error;
use crate::peer::TransferStats;
use pyo3::intern;
use pyo3::prelude::*;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A transfer in the background. It has exactly one outcome. Dropping the object does not cancel
/// it.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Transfer {
    transfer: kvferry::Transfer,
    shared: Arc<Shared>,
}

impl Transfer {
    pub(crate) fn new(transfer: kvferry::Transfer, shared: &Arc<Shared>) -> Self {
        Self { transfer, shared: Arc::clone(shared) }
    }
}

fn outcome(
    py: Python<'_>,
    outcome: Option<Result<kvferry::TransferStats, kvferry::Error>>,
) -> PyResult<Option<TransferStats>> {
    match outcome {
        None => Ok(None),
        Some(Ok(stats)) => Ok(Some(TransferStats(stats))),
        Some(Err(error)) => Err(error::exception(py, &error)),
    }
}

#[pymethods]
impl Transfer {
    /// Whether the outcome is known.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.agent(py)?;
        Ok(self.transfer.outcome().is_some())
    }

    /// The result, or None while the transfer runs. Raises if it failed.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<TransferStats>> {
        self.shared.agent(py)?;
        outcome(py, self.transfer.outcome())
    }

    /// Waits for the result; None if the transfer still runs after `timeout` seconds. Raises if it
    /// failed.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<TransferStats>> {
        self.shared.agent(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        let ended = blocking::wait(py, timeout, |slice| self.transfer.wait(slice))?;
        outcome(py, ended)
    }

    /// Asks for the end of the transfer. The outcome is then a CancelledError, or the result if the
    /// transfer was done before.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.agent(py)?;
        py.detach(|| self.transfer.cancel());
        Ok(())
    }

    /// A file descriptor that becomes readable when the outcome is known. It belongs to the transfer:
    /// do not close it.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.shared.agent(py)?;
        self.transfer.event_fd().map(|fd| fd.as_raw_fd()).map_err(|e| error::exception(py, &e))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        slf.get().shared.agent(py)?;
        let wait = py.import(intern!(py, "kvferry._asyncio"))?.getattr(intern!(py, "wait"))?;
        wait.call1((slf,))?.call_method0(intern!(py, "__await__"))
    }

    fn __repr__(&self) -> String {
        let state = match self.transfer.outcome() {
            None => "running".to_owned(),
            Some(Ok(stats)) => format!("done, {} bytes", stats.bytes),
            Some(Err(error)) => format!("failed, {}", error.kind()),
        };
        format!("<kvferry.Transfer {state}>")
    }
}
