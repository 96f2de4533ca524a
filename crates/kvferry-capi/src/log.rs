//! What the library does once per process: threads' processors, and logging to stderr, which the
//! environment variable `KVFERRY_LOG` turns on (`debug`, `kvferry=trace,info`).

use std::sync::Once;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Prepares the process. Does nothing from the second call on.
pub(crate) fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let filter = std::env::var("KVFERRY_LOG").unwrap_or_default();
        if !filter.is_empty()
            && let Ok(targets) = filter.parse::<Targets>()
        {
            let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
            // Fails if the program has a subscriber already.
            let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
        }
        if let Err(error) = kvferry_sys::thread::choose_cpus() {
            tracing::warn!(%error, "threads run where their creators run");
        }
    });
}
