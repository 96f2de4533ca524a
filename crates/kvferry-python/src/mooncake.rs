//! What `kvferry.mooncake` needs of the native side: [`MooncakeEngine`] as a Python class.
//!
//! The signatures of `mooncake.engine` are in `python/kvferry/mooncake.py`. The calls here take
//! plain arguments: numbers that are negative or have a fraction are a `TypeError`, as with the
//! pybind11 module of Mooncake, and text may be bytes.

use crate::batch::{Table, TableError, numbers};
use crate::blocking::{self, Stop};
use crate::error::Failure;
use crate::order::Orders;
use kvferry_mooncake::interrupt::Interrupt;
use kvferry_mooncake::{MooncakeEngine, Moves};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use std::ops::Deref;
use std::sync::Arc;

/// Text as pybind11 takes it: `str`, or `bytes` that hold UTF-8.
struct Text(String);

impl FromPyObject<'_, '_> for Text {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = obj.cast::<PyString>() {
            return Ok(Self(text.to_str()?.to_owned()));
        }
        if let Ok(bytes) = obj.cast::<PyBytes>() {
            return Ok(Self(String::from_utf8(bytes.as_bytes().to_vec())?));
        }
        Err(PyTypeError::new_err("expected str or bytes"))
    }
}

/// An address, length or id.
struct Number(u64);

impl FromPyObject<'_, '_> for Number {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        obj.extract().map(Self).map_err(|e| type_error(obj.py(), e))
    }
}

/// A sequence of them.
struct Numbers(Vec<u64>);

impl FromPyObject<'_, '_> for Numbers {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        numbers(&obj).map(Self).map_err(|e| type_error(obj.py(), e))
    }
}

/// Turns the error of a number that does not fit 64 bits without a sign into pybind11's.
fn type_error(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(py) || error.is_instance_of::<PyValueError>(py) {
        return PyTypeError::new_err(format!(
            "incompatible function arguments: {}",
            error.value(py)
        ));
    }
    error
}

/// An engine that Python owns. Its end closes sessions and calls the metadata server; the thread
/// detaches from the interpreter for it.
struct Owned(Option<Arc<MooncakeEngine>>);

impl Deref for Owned {
    type Target = Arc<MooncakeEngine>;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref().expect("taken only when dropped")
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let engine = self.0.take();
        // Without an interpreter the closure is dropped, and the engine with it.
        Python::try_attach(|py| py.detach(|| drop(engine)));
    }
}

impl Stop for MooncakeEngine {
    fn stop(&self) {
        self.shutdown();
    }
}

/// The engine behind `kvferry.mooncake.TransferEngine`. Calls return Mooncake's codes.
#[pyclass(frozen, name = "MooncakeEngine", module = "kvferry._kvferry")]
pub(crate) struct NativeEngine(Owned);

impl NativeEngine {
    /// Runs a call detached from the interpreter. Only what a signal handler raises (Ctrl-C) is an
    /// exception.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&MooncakeEngine, Interrupt<'_>) -> T + Send,
    ) -> PyResult<T> {
        let engine = &**self.0;
        blocking::run(py, |interrupt| Ok::<T, Failure>(call(engine, interrupt)))
    }
}

/// Reads what a transfer moves. `lists`: local addresses, peer addresses, lengths in bytes.
fn moves(target: Text, write: bool, lists: [&Bound<'_, PyAny>; 3]) -> PyResult<Moves> {
    let py = lists[0].py();
    let read = || {
        let table = Table::of_sequences(lists)?;
        let mut batch = kvferry::Batch::new();
        if !table.is_even() {
            table.check_numbers()?;
            return Ok(Err(
                "the lists of buffers, peer addresses and lengths differ in length".into()
            ));
        }
        // Mooncake accepts pieces of no bytes.
        match table.push_addresses(&mut batch, |len| len > 0) {
            Ok(()) => Ok(Ok(batch)),
            Err(TableError::Row(error)) => Ok(Err(error.to_string())),
            Err(TableError::Number(error)) => Err(error),
        }
    };
    Ok(Moves { write, target: target.0, batch: read().map_err(|e| type_error(py, e))? })
}

#[pymethods]
impl NativeEngine {
    #[new]
    fn new(py: Python<'_>) -> Self {
        let engine = Arc::new(MooncakeEngine::new());
        blocking::stop_at_exit(py, &engine);
        Self(Owned(Some(engine)))
    }

    fn initialize(
        &self,
        py: Python<'_>,
        local_hostname: Text,
        metadata_server: Text,
        protocol: Text,
    ) -> PyResult<i32> {
        let code = self.run(py, |engine, interrupt| {
            engine.initialize(&local_hostname.0, &metadata_server.0, &protocol.0, interrupt)
        })?;
        crate::log::warn(py, self.0.take_warning())?;
        Ok(code)
    }

    #[getter]
    fn is_running(&self) -> bool {
        self.0.is_running()
    }

    #[getter]
    fn rpc_port(&self) -> u16 {
        self.0.rpc_port()
    }

    #[getter]
    fn identity(&self) -> u64 {
        self.0.identity()
    }

    #[getter]
    fn last_error(&self) -> String {
        self.0.last_error()
    }

    fn register(
        &self,
        py: Python<'_>,
        addresses: Numbers,
        lengths: Numbers,
        location: Text,
    ) -> PyResult<i32> {
        self.run(py, |engine, _| engine.register(&addresses.0, &lengths.0, &location.0))
    }

    /// Makes later transfers of memory of GPUs come after `after`.
    fn set_after(&self, py: Python<'_>, after: &Bound<'_, PyAny>) -> PyResult<i32> {
        let orders = Arc::new(Orders::read(after)?);
        let owner = Arc::clone(&orders);
        // SAFETY: the Python caller names streams and events that exist; the owner has their objects.
        self.run(py, |engine, _| unsafe { engine.set_after(orders.all(), Some(owner)) })
    }

    fn is_gpu_memory(&self, address: Number) -> bool {
        self.0.is_gpu_memory(address.0)
    }

    fn unregister(&self, py: Python<'_>, addresses: Numbers) -> PyResult<i32> {
        self.run(py, |engine, _| engine.unregister(&addresses.0))
    }

    /// Moves bytes and waits. The memory must stay valid during the call.
    #[pyo3(signature = (write, target, buffers, peer_addresses, lengths, notify = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
    fn transfer(
        &self,
        py: Python<'_>,
        write: bool,
        target: Text,
        buffers: &Bound<'_, PyAny>,
        peer_addresses: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        notify: Option<(String, String)>,
    ) -> PyResult<i32> {
        let moves = moves(target, write, [buffers, peer_addresses, lengths])?;
        self.run(py, |engine, interrupt| engine.transfer(moves, notify, interrupt))
    }

    /// Starts moving bytes: an id, or 0. The memory must stay valid until the outcome.
    fn submit(
        &self,
        py: Python<'_>,
        write: bool,
        target: Text,
        buffers: &Bound<'_, PyAny>,
        peer_addresses: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let moves = moves(target, write, [buffers, peer_addresses, lengths])?;
        self.run(py, |engine, interrupt| engine.submit(moves, interrupt))
    }

    fn wait(&self, py: Python<'_>, ids: Numbers) -> PyResult<i32> {
        self.run(py, |engine, interrupt| engine.wait(&ids.0, interrupt))
    }

    fn check(&self, py: Python<'_>, transfer_id: Number) -> PyResult<i32> {
        self.run(py, |engine, _| engine.check(transfer_id.0))
    }

    fn allocate(&self, py: Python<'_>, length: Number) -> PyResult<u64> {
        self.run(py, |engine, _| engine.allocate(length.0))
    }

    fn free(&self, py: Python<'_>, address: Number) -> PyResult<i32> {
        self.run(py, |engine, _| engine.free(address.0))
    }

    fn first_address(&self, py: Python<'_>, segment: Text) -> PyResult<u64> {
        self.run(py, |engine, interrupt| engine.first_address(&segment.0, interrupt))
    }

    /// Takes the notifications that have arrived: names and messages.
    fn notifications(&self) -> Vec<(String, String)> {
        self.0.notifications()
    }

    fn probe(&self, py: Python<'_>, target: Text) -> PyResult<i32> {
        self.run(py, |engine, interrupt| engine.probe(&target.0, interrupt))
    }
}
