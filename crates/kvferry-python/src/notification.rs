//! Notifications.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

/// A short message between agents, delivered after the data that it follows.
#[pyclass(frozen, eq, hash, module = "kvferry")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Notification(pub(crate) kvferry::Notification);

#[pymethods]
impl Notification {
    #[new]
    #[pyo3(signature = (name, message = Message(Vec::new())), text_signature = "(name, message=b'')")]
    fn new(name: String, message: Message) -> Self {
        Self(kvferry::Notification::new(name, message.0))
    }

    /// The name of the agent that sent it; empty before it is sent.
    #[getter]
    fn sender(&self) -> &str {
        &self.0.from
    }

    /// The IP address that the sender's connection comes from; empty before it is sent. Unlike `sender`, which the
    /// sender chooses, it can't be made up.
    #[getter]
    fn host(&self) -> String {
        self.0.from_ip.map_or_else(String::new, |ip| ip.to_canonical().to_string())
    }

    /// The name that the sender gave the notification, such as a request's.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// Any bytes.
    #[getter]
    fn message<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.message)
    }

    fn __repr__(&self) -> String {
        format!(
            "<kvferry.Notification {:?} from {:?}, {} bytes>",
            self.0.name,
            self.0.from,
            self.0.message.len()
        )
    }
}

/// Bytes, or text, which is sent as UTF-8.
pub(crate) struct Message(Vec<u8>);

impl FromPyObject<'_, '_> for Message {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = obj.cast::<PyString>() {
            return Ok(Self(text.to_str()?.as_bytes().to_vec()));
        }
        obj.extract().map(Self)
    }
}

/// An argument that is a notification: an object, or a pair `(name, message)`.
pub(crate) struct Notice(pub(crate) kvferry::Notification);

impl FromPyObject<'_, '_> for Notice {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(notification) = obj.cast::<Notification>() {
            return Ok(Self(notification.get().0.clone()));
        }
        if obj.cast::<PyTuple>().is_ok() {
            let (name, message): (String, Message) = obj.extract()?;
            return Ok(Self(Notification::new(name, message).0));
        }
        Err(PyTypeError::new_err(
            "a notification must be a kvferry.Notification or a pair (name, message)",
        ))
    }
}
