//! Logging to stderr, which `KVFERRY_LOG` turns on (`debug`, `kvferry=trace`, …).

use tracing_subscriber::EnvFilter;

/// Writes the core's events to stderr if `KVFERRY_LOG` is set. Ignores directives that it can't parse
/// and keeps an existing subscriber: logging must never keep a program from starting.
pub(crate) fn start() {
    let Some(filter) = std::env::var("KVFERRY_LOG").ok().filter(|filter| !filter.is_empty()) else {
        return;
    };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::builder().parse_lossy(filter))
        .with_writer(std::io::stderr)
        .try_init();
}
