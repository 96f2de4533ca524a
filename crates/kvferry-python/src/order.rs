//! `after`: what transfers of memory of a GPU come after.

use crate::error;
use kvferry_cuda::{Edge, Order};
use kvferry_sys::cuda::{RawEvent, RawStream};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PyString, PyTuple};

/// The values of `after`, in their order.
#[derive(Default)]
pub(crate) struct Orders {
    orders: Vec<Order>,
    /// The objects that own the streams and events. The caller's list may change meanwhile.
    _owners: Vec<Py<PyAny>>,
}

impl Orders {
    /// None, "host", a stream, an event, or a list or tuple of these.
    pub(crate) fn read(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut orders = Self::default();
        if value.is_none() {
            return Ok(orders);
        }
        if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            for item in value.try_iter()? {
                orders.push(item?)?;
            }
        } else {
            orders.push(value.clone())?;
        }
        Ok(orders)
    }

    pub(crate) fn all(&self) -> &[Order] {
        &self.orders
    }

    fn push(&mut self, value: Bound<'_, PyAny>) -> PyResult<()> {
        self.orders.push(one(&value)?);
        self._owners.push(value.unbind());
        Ok(())
    }

    /// The edges of this work, for memory of the GPUs with these numbers.
    pub(crate) fn edges(
        &self,
        py: Python<'_>,
        devices: &[i32],
    ) -> Result<Vec<Edge>, kvferry_cuda::Error> {
        // Detached, as in `apply`.
        // SAFETY: as in `apply`: the value owns the objects of the streams and events.
        py.detach(|| unsafe { kvferry_cuda::edges(devices, &self.orders) })
    }

    /// The same, as fetches take it.
    pub(crate) fn after(
        &self,
        py: Python<'_>,
        devices: &[i32],
    ) -> Result<kvferry::After, kvferry_cuda::Error> {
        // Detached, as in `apply`.
        // SAFETY: as in `apply`: the value owns the objects of the streams and events.
        py.detach(|| unsafe { kvferry_cuda::after(devices, &self.orders) })
    }

    /// Has transfers of a batch come after them. A batch with memory of a GPU needs at least one.
    pub(crate) fn apply(&self, py: Python<'_>, batch: &mut kvferry::Batch) -> PyResult<()> {
        if batch.devices().is_empty() {
            return Ok(());
        }
        // Detached: a call of the driver may wait for one that itself waits for the interpreter.
        // SAFETY: the Python caller names streams and events that exist, and `_owners` holds their objects.
        let ordered = py.detach(|| unsafe { kvferry_cuda::order(batch, &self.orders) });
        ordered.map_err(|e| error::invalid(py, &e.to_string()))
    }
}

/// A stream is named by its handle, or by what torch (`cuda_stream`), cupy (`ptr`) and cuda.core (`__cuda_stream__`) give; an
/// event by what torch (`cuda_event`) and cupy (`ptr`) give.
fn one(value: &Bound<'_, PyAny>) -> PyResult<Order> {
    let py = value.py();
    if let Ok(text) = value.cast::<PyString>() {
        return match text.to_str()? {
            "host" => Ok(Order::Host),
            other => Err(PyTypeError::new_err(format!(
                "after must be a stream, an event or \"host\", not {other:?}"
            ))),
        };
    }
    if let Some(event) = value.getattr_opt(intern!(py, "cuda_event"))? {
        return Ok(Order::Event(RawEvent(event.extract()?)));
    }
    if let Some(stream) = value.getattr_opt(intern!(py, "cuda_stream"))? {
        return Ok(Order::Stream(RawStream(stream.extract()?)));
    }
    if let Some(protocol) = value.getattr_opt(intern!(py, "__cuda_stream__"))? {
        let (_, stream) = protocol.call0()?.extract::<(u64, u64)>()?;
        return Ok(Order::Stream(RawStream(stream)));
    }
    if let Some(handle) = value.getattr_opt(intern!(py, "ptr"))? {
        // Of the two, only a stream can wait. Memory has neither method.
        if value.hasattr(intern!(py, "wait_event"))? {
            return Ok(Order::Stream(RawStream(handle.extract()?)));
        }
        if value.hasattr(intern!(py, "record"))? {
            return Ok(Order::Event(RawEvent(handle.extract()?)));
        }
        return Err(unknown(value));
    }
    if value.is_instance_of::<PyBool>() {
        // Without this check, `False` and `True` would be the handles of default streams.
        return Err(unknown(value));
    }
    value.extract().map(|stream| Order::Stream(RawStream(stream))).map_err(|_| unknown(value))
}

fn unknown(value: &Bound<'_, PyAny>) -> PyErr {
    let kind = value.get_type();
    PyTypeError::new_err(format!("after must be a stream, an event or \"host\", not {kind}"))
}
