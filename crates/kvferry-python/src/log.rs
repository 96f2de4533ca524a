//! Logging: silent, unless `KVFERRY_LOG` says what is wanted (`debug`, `kvferry=trace`, …).

use tracing_subscriber::EnvFilter;

/// Sends the core's events to stderr if `KVFERRY_LOG` is set. A directive it does not understand is
/// left out, and a subscriber that is there already stays: logging must never keep a program from
/// starting.
pub(crate) fn start() {
    let Some(wanted) = std::env::var("KVFERRY_LOG").ok().filter(|wanted| !wanted.is_empty()) else {
        return;
    };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::builder().parse_lossy(wanted))
        .with_writer(std::io::stderr)
        .try_init();
}
