//! Plain Python values as JSON values, and back.

use kvferry_connector::Params;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde_json::Value;

/// Largest depth of nested values; deeper ones count as null.
const DEPTH_MAX: usize = 16;

/// A dict of plain values. What has no JSON value counts as null: parameters of other connectors may
/// be in the same dict.
pub(super) fn params(dict: Option<&Bound<'_, PyDict>>) -> Option<Params> {
    dict.map(|dict| object(dict, DEPTH_MAX))
}

fn object(dict: &Bound<'_, PyDict>, depth: usize) -> Params {
    let mut object = Params::new();
    for (key, value) in dict {
        if let Ok(key) = key.extract::<String>() {
            object.insert(key, json(&value, depth));
        }
    }
    object
}

fn json(value: &Bound<'_, PyAny>, depth: usize) -> Value {
    let Some(depth) = depth.checked_sub(1) else { return Value::Null };
    if let Ok(flag) = value.cast::<PyBool>() {
        Value::Bool(flag.is_true())
    } else if value.is_instance_of::<PyInt>() {
        let signed = || value.extract::<i64>().map_or(Value::Null, Value::from);
        value.extract::<u64>().map_or_else(|_| signed(), Value::from)
    } else if let Ok(number) = value.cast::<PyFloat>() {
        Value::from(number.value())
    } else if let Ok(text) = value.cast::<PyString>() {
        text.to_str().map_or(Value::Null, Value::from)
    } else if let Ok(dict) = value.cast::<PyDict>() {
        Value::Object(object(dict, depth))
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter().into_iter().flatten().filter_map(Result::ok);
        Value::Array(items.map(|item| json(&item, depth)).collect())
    } else {
        Value::Null
    }
}

/// A JSON value as a Python object.
pub(super) fn python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (None, Some(number)) => number.into_pyobject(py)?.into_any(),
            (None, None) => number.as_f64().unwrap_or(f64::NAN).into_pyobject(py)?.into_any(),
        },
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(python(py, item)?)?;
            }
            list.into_any()
        }
        Value::Object(object) => dict(py, object)?.into_any(),
    })
}

/// Parameters as a Python dict.
pub(super) fn dict<'py>(py: Python<'py>, object: &Params) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (key, value) in object {
        dict.set_item(key, python(py, value)?)?;
    }
    Ok(dict)
}
