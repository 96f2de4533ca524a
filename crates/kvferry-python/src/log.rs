//! Logging to stderr, which `KVFERRY_LOG` turns on (`debug`, `kvferry=trace`, …).

use kvferry_sys::stderr::Stderr;
use pyo3::prelude::*;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// What the HTTP client of object stores says at lower levels has headers, and so credentials. A filter that names
/// these crates itself still gets it.
const QUIET: &str =
    "h2=warn,hyper=warn,hyper_util=warn,object_store=warn,reqwest=warn,rustls=warn,tower=warn";

/// Writes the core's events to stderr if `KVFERRY_LOG` is set.
pub(crate) fn start() {
    if let Some(filter) = std::env::var("KVFERRY_LOG").ok().filter(|filter| !filter.is_empty()) {
        log_to_stderr(&filter);
    }
}

/// Writes the core's events that pass the filter to stderr, unless they are written already. Ignores
/// directives that it can't parse: logging must never keep a program from starting.
#[pyfunction]
pub(crate) fn log_to_stderr(filter: &str) {
    let directives = QUIET.split(',').chain(filter.split(',')).map(str::trim);
    let parsed = directives.filter(|it| !it.is_empty() && it.parse::<Targets>().is_ok());
    let targets = parsed.collect::<Vec<_>>().join(",").parse::<Targets>().unwrap_or_default();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| Stderr)
        // It would be reported on stderr, and panics where nothing reads that.
        .log_internal_errors(false);
    let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
}

/// Passes a warning for the operator to Python's logger `kvferry`, which is seen without any setting: where a
/// program configures no logging, Python writes warnings to stderr.
pub(crate) fn warn(py: Python<'_>, text: Option<String>) -> PyResult<()> {
    let Some(text) = text else { return Ok(()) };
    let logger = py.import("logging")?.call_method1("getLogger", ("kvferry",))?;
    logger.call_method1("warning", ("%s", text)).map(drop)
}
