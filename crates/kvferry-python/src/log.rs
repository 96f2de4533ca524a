//! Logging to stderr, which `KVFERRY_LOG` turns on (`debug`, `kvferry=trace`, …).

use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

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
    let _ = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::builder().parse_lossy(filter))
        .with_writer(std::io::stderr)
        .try_init();
}
