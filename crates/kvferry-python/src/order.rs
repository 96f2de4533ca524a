//! `after`: what transfers of memory of a GPU come after.

use crate::error;
use kvferry_cuda::Order;
use kvferry_sys::cuda::{RawEvent, RawStream};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

/// The values of `after`, in their order.
#[derive(Default)]
pub(crate) struct Orders(Vec<Order>);

impl Orders {
    /// None, "host", a stream, an event, or a list or tuple of these.
    pub(crate) fn read(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut orders = Self::default();
        if value.is_none() {
            return Ok(orders);
        }
        if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            for item in value.try_iter()? {
                orders.0.push(one(&item?)?);
            }
        } else {
            orders.0.push(one(value)?);
        }
        Ok(orders)
    }

    /// Has transfers of a batch come after them. A batch with memory of a GPU needs at least one.
    pub(crate) fn apply(&self, py: Python<'_>, batch: &mut kvferry::Batch) -> PyResult<()> {
        if batch.devices().is_empty() {
            return Ok(());
        }
        // SAFETY: the Python caller names streams and events that exist, and holds them during the call.
        unsafe { kvferry_cuda::order(batch, &self.0) }
            .map_err(|e| error::invalid(py, &e.to_string()))
    }
}

/// A stream is named by its handle, or by what torch (`cuda_stream`), cupy (`ptr`) and cuda.core (`__cuda_stream__`) give; an
/// event by torch's `cuda_event`.
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
    if let Some(stream) = value.getattr_opt(intern!(py, "ptr"))? {
        return Ok(Order::Stream(RawStream(stream.extract()?)));
    }
    value.extract().map(|stream| Order::Stream(RawStream(stream))).map_err(|_| {
        let kind = value.get_type();
        PyTypeError::new_err(format!("after must be a stream, an event or \"host\", not {kind}"))
    })
}
