//! How long blocks are to stay, and how they are offloaded: the block manager's retention configuration.

use crate::error;
use kvferry_blocks::{
    PRIORITY_DEFAULT, PRIORITY_MAX, Retention, RetentionConfig as Config, RetentionError,
    TokenRange, TransferMode, Warning,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// A range of tokens: start, end or `None`, priority, duration in milliseconds or `None`.
type Range = (i64, Option<i64>, i64, Option<u64>);

/// The same as Python gives it: the duration may be left out.
struct GivenRange(Range);

impl FromPyObject<'_, '_> for GivenRange {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match obj.extract::<(i64, Option<i64>, i64)>() {
            Ok((start, end, priority)) => Ok(Self((start, end, priority, None))),
            Err(_) => obj.extract().map(Self),
        }
    }
}

/// Retention that a request asks for its blocks.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct RetentionConfig(pub(crate) Config);

fn refused(py: Python<'_>, why: &RetentionError) -> PyErr {
    error::invalid(py, &why.to_string())
}

fn token(py: Python<'_>, what: &str, token: i64) -> PyResult<u32> {
    u32::try_from(token).map_err(|_| {
        let most = u32::MAX;
        error::invalid(py, &format!("a token range's {what} is {token}: it must be 0 to {most}"))
    })
}

fn retention(py: Python<'_>, priority: i64, duration_ms: Option<u64>) -> PyResult<Retention> {
    match u8::try_from(priority) {
        Ok(priority) => Ok(Retention { priority, duration_ms }),
        Err(_) => {
            let what =
                format!("retention priority {priority}: it must be between 0 and {PRIORITY_MAX}");
            Err(error::invalid(py, &what))
        }
    }
}

fn parse_mode(py: Python<'_>, text: &str) -> PyResult<TransferMode> {
    match text {
        "dram" => Ok(TransferMode::Dram),
        "gds" => Ok(TransferMode::Gds),
        "posix_debug_fallback" => Ok(TransferMode::PosixDebugFallback),
        other => {
            let what = format!(
                "transfer_mode must be \"dram\", \"gds\" or \"posix_debug_fallback\", not {other:?}"
            );
            Err(error::invalid(py, &what))
        }
    }
}

#[pymethods]
impl RetentionConfig {
    #[new]
    #[pyo3(
        signature = (ranges = Vec::new(), *, decode_priority = PRIORITY_DEFAULT.into(), decode_duration_ms = None, transfer_mode = "dram", directory = None),
        text_signature = "(ranges=(), *, decode_priority=35, decode_duration_ms=None, transfer_mode='dram', directory=None)"
    )]
    fn new(
        py: Python<'_>,
        ranges: Vec<GivenRange>,
        decode_priority: i64,
        decode_duration_ms: Option<u64>,
        transfer_mode: &str,
        directory: Option<PathBuf>,
    ) -> PyResult<Self> {
        let range = |GivenRange((start, end, priority, duration_ms)): GivenRange| {
            Ok(TokenRange {
                start: token(py, "start", start)?,
                end: end.map(|end| token(py, "end", end)).transpose()?,
                retention: retention(py, priority, duration_ms)?,
            })
        };
        let ranges = ranges.into_iter().map(range).collect::<PyResult<Vec<_>>>()?;
        let directory = match &directory {
            None => None,
            Some(path) => Some(path.to_str().ok_or_else(|| {
                let what = format!("the directory {} is not UTF-8", path.display());
                error::invalid(py, &what)
            })?),
        };
        let (decode, mode) =
            (retention(py, decode_priority, decode_duration_ms)?, parse_mode(py, transfer_mode)?);
        Config::new(ranges)
            .and_then(|config| config.decode(decode))
            .and_then(|config| config.transfer(mode, directory))
            .map(Self)
            .map_err(|why| refused(py, &why))
    }

    /// Decodes what `to_bytes` encoded.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        Config::decode_bytes(data).map(Self).map_err(|why| error::invalid(py, &why.to_string()))
    }

    /// Encodes the configuration, in a form that has a version.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    /// In the order of their tokens: start, end or None, priority, duration in milliseconds or None.
    #[getter]
    fn ranges(&self) -> Vec<Range> {
        let range = |range: &TokenRange| {
            let Retention { priority, duration_ms } = range.retention;
            (range.start.into(), range.end.map(i64::from), priority.into(), duration_ms)
        };
        self.0.ranges().iter().map(range).collect()
    }

    /// Priority of blocks whose first token is behind the prompt.
    #[getter]
    fn decode_priority(&self) -> u8 {
        self.0.decode_retention().priority
    }

    /// Milliseconds for which `decode_priority` holds; None is for ever.
    #[getter]
    fn decode_duration_ms(&self) -> Option<u64> {
        self.0.decode_retention().duration_ms
    }

    /// Tier that blocks are offloaded to: "dram", "gds" or "posix_debug_fallback".
    #[getter]
    fn transfer_mode(&self) -> &'static str {
        match self.0.mode() {
            TransferMode::Dram => "dram",
            TransferMode::Gds => "gds",
            TransferMode::PosixDebugFallback => "posix_debug_fallback",
        }
    }

    /// The directory of `gds` and `posix_debug_fallback`, or None.
    #[getter]
    fn directory(&self) -> Option<&str> {
        self.0.directory()
    }

    /// What the block manager warns of: a mode that needs a directory has none.
    #[getter]
    fn warning(&self) -> Option<String> {
        let mode = self.0.mode();
        let is_missing = mode != TransferMode::Dram && self.0.directory().is_none();
        is_missing.then(|| Warning::DirectoryMissing { mode }.to_string())
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let py = slf.py();
        let from_bytes = py.get_type::<Self>().getattr(intern!(py, "from_bytes"))?;
        Ok((from_bytes, PyTuple::new(py, [slf.get().to_bytes(py)])?))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| self.0 == other.get().0)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.to_bytes().hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let Retention { priority, duration_ms } = self.0.decode_retention();
        let duration = duration_ms.map(|ms| format!(" for {ms} ms")).unwrap_or_default();
        format!(
            "<kvferry.RetentionConfig {} ranges, decode priority {priority}{duration}, {}>",
            self.0.ranges().len(),
            self.transfer_mode()
        )
    }
}
