//! Transfers in the background.

use crate::blocking::{self, seconds};
use crate::error;
use crate::shared::Shared;
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
    /// True if the outcome is known.
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

    /// Whether the transfer has ended and nothing reads or writes its local memory any more. A transfer that has failed
    /// may still be using it: a device that does not answer ends its copies later.
    fn is_quiet(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.agent(py)?;
        Ok(self.transfer.is_quiet())
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

/// The result of a transfer.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct TransferStats(pub(crate) kvferry::TransferStats);

#[pymethods]
impl TransferStats {
    /// Bytes that were moved.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes
    }

    /// Number of pairs in the batch.
    #[getter]
    fn descriptors(&self) -> usize {
        self.0.descriptors
    }

    /// Connections that carried it; for "local", threads that copied.
    #[getter]
    fn streams(&self) -> usize {
        self.0.streams
    }

    /// "tcp", "local" or "mooncake"; None for an empty batch.
    #[getter]
    fn transport(&self) -> Option<&'static str> {
        self.0.transport.map(kvferry::TransportKind::as_str)
    }

    fn __repr__(&self) -> String {
        let kvferry::TransferStats { bytes, descriptors, streams, .. } = self.0;
        let transport = self.transport().unwrap_or("none");
        format!(
            "<kvferry.TransferStats {bytes} bytes in {descriptors} descriptors over {streams} streams of \
             {transport}>"
        )
    }
}
