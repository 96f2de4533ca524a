//! The core's errors as Python exceptions: `kvferry._errors` defines one class per kind.

use crate::blocking;
use kvferry::ErrorKind;
use pyo3::exceptions::PySystemExit;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// The reason why a call has no result.
#[derive(Debug)]
pub(crate) enum Failure {
    Core(kvferry::Error),
    Store(kvferry_store::Error),
    /// A signal handler raised. Python sees the handler's exception instead.
    Interrupted,
    Thread(std::io::Error),
}

impl From<kvferry::Error> for Failure {
    fn from(error: kvferry::Error) -> Self {
        Self::Core(error)
    }
}

impl From<kvferry_store::Error> for Failure {
    fn from(error: kvferry_store::Error) -> Self {
        Self::Store(error)
    }
}

impl Failure {
    pub(crate) fn into_exception(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Core(error) => exception(py, &error),
            Self::Store(error) => store_exception(py, &error),
            Self::Interrupted => new(py, ErrorKind::Interrupted, "the call was interrupted"),
            Self::Thread(error) => new(
                py,
                ErrorKind::Io,
                &format!("the call needs a thread, which can't be started: {error}"),
            ),
        }
    }
}

/// The exception for an error of the core; `SystemExit` in a thread that must end because the
/// interpreter exits.
pub(crate) fn exception(py: Python<'_>, error: &kvferry::Error) -> PyErr {
    if blocking::thread_must_end() {
        return PySystemExit::new_err(());
    }
    let facts = || -> PyResult<_> {
        let context = PyDict::new(py);
        for (key, value) in error.facts() {
            context.set_item(key, value)?;
        }
        let attributes = PyDict::new(py);
        attributes.set_item(intern!(py, "quiesced"), error.quiesced())?;
        attributes.set_item(intern!(py, "context"), context)?;
        Ok(attributes)
    };
    facts()
        .and_then(|facts| class(py, error.kind())?.call((error.to_string(),), Some(&facts)))
        .map_or_else(|unable| unable, PyErr::from_value)
}

/// The exception for an error of a store.
pub(crate) fn store_exception(py: Python<'_>, error: &kvferry_store::Error) -> PyErr {
    use kvferry_store::Error;
    let kind = match error {
        Error::Agent(error) => return exception(py, error),
        Error::InvalidArgument(_) => ErrorKind::InvalidArgument,
        Error::Directory { .. }
        | Error::Format { .. }
        | Error::NoStore { .. }
        | Error::Objects { .. } => ErrorKind::Io,
        Error::Busy { .. } => ErrorKind::Busy,
        Error::Closed => ErrorKind::Shutdown,
        _ => ErrorKind::Internal,
    };
    new(py, kind, &error.to_string())
}

/// An exception with no error of the core behind it; `SystemExit` as for [`exception`].
pub(crate) fn new(py: Python<'_>, kind: ErrorKind, what: &str) -> PyErr {
    if blocking::thread_must_end() {
        return PySystemExit::new_err(());
    }
    class(py, kind)
        .and_then(|class| class.call1((what,)))
        .map_or_else(|unable| unable, PyErr::from_value)
}

pub(crate) fn invalid(py: Python<'_>, what: &str) -> PyErr {
    new(py, ErrorKind::InvalidArgument, what)
}

fn class(py: Python<'_>, kind: ErrorKind) -> PyResult<Bound<'_, PyType>> {
    static BY_KIND: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let by_kind = BY_KIND
        .get_or_try_init(py, || {
            let errors = py.import(intern!(py, "kvferry._errors"))?;
            Ok::<_, PyErr>(errors.getattr(intern!(py, "BY_KIND"))?.cast_into::<PyDict>()?.unbind())
        })?
        .bind(py);
    // A kind that the Python package does not know is a plain `kvferry.Error`.
    let found = match by_kind.get_item(kind.as_str())? {
        Some(class) => class,
        None => py.import(intern!(py, "kvferry._errors"))?.getattr(intern!(py, "Error"))?,
    };
    Ok(found.cast_into::<PyType>()?)
}
