//! The Python module `kvferry._kvferry`. Everything in it comes from the `kvferry-python` library.

use pyo3::prelude::*;

#[pymodule]
fn _kvferry(module: &Bound<'_, PyModule>) -> PyResult<()> {
    kvferry_python::add_to(module)
}
