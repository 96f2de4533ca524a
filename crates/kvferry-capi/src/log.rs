//! What the library does once per process: threads' processors, and logging to stderr, which the
//! environment variable `KVFERRY_LOG` turns on (`debug`, `kvferry=trace,info`).

use crate::guard::contain;
use kvferry_sys::stderr::Stderr;
use kvferry_sys::sync::Mutex;
use std::ffi::{CString, c_char, c_void};
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
            let lines = tracing_subscriber::fmt::layer().with_writer(|| Stderr);
            // Fails if the program has a subscriber already.
            let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
        }
        if let Err(error) = kvferry_sys::thread::choose_cpus() {
            tracing::warn!(%error, "threads run where their creators run");
        }
    });
}

/// Called with a warning for the operator, one line. `text` does not live longer than the call.
///
/// Runs on the thread that starts the agent. It must not throw.
pub type kvferry_warning = Option<unsafe extern "C" fn(user: *mut c_void, text: *const c_char)>;

struct Receiver {
    warning: kvferry_warning,
    user: *mut c_void,
}

// SAFETY: the pointer is the program's, and only passed back to it.
unsafe impl Send for Receiver {}

static RECEIVER: Mutex<Receiver> =
    Mutex::new(Receiver { warning: None, user: std::ptr::null_mut() });

/// Sets who gets warnings about settings that let strangers in: an agent without a secret that listens
/// beyond loopback, or on loopback where the kernel does not tell the users of connections; or a short
/// secret. Each is said once per process. Without a receiver, or with NULL, they go to stderr.
///
/// Any thread, before agents are started.
///
/// # Safety
/// `user` is what `warning` expects.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_on_warning(warning: kvferry_warning, user: *mut c_void) {
    *RECEIVER.lock() = Receiver { warning, user };
}

/// Passes a warning on.
pub(crate) fn warn(text: Option<String>) {
    let Some(text) = text else { return };
    let (warning, user) = {
        let receiver = RECEIVER.lock();
        (receiver.warning, receiver.user)
    };
    match (warning, CString::new(text)) {
        (Some(warning), Ok(text)) => {
            // SAFETY: the promise of the program that set it.
            let _ = contain(|| unsafe { warning(user, text.as_ptr()) });
        }
        // With KVFERRY_LOG the log has it.
        (None, Ok(text))
            if std::env::var_os("KVFERRY_LOG").is_none_or(|filter| filter.is_empty()) =>
        {
            use std::io::Write;
            let line = format!("{}\n", text.to_string_lossy());
            // It never fails.
            let _ = Stderr.write_all(line.as_bytes());
        }
        _ => {}
    }
}
