//! Calls user code on the agent's threads.
//!
//! A panic in a user's callback must not end the thread that called it, because the thread serves
//! others. The caller fails the work that the callback belonged to and goes on.

/// Runs `call`. If it panics, logs one line that names `what`, and returns `None`.
pub(crate) fn contain<T>(what: &'static str, call: impl FnOnce() -> T) -> Option<T> {
    if cfg!(all(loom, test)) {
        // Under loom, a model fails by panicking.
        return Some(call());
    }
    // The state that the call left inconsistent belongs to it; every caller drops or fails that
    // state.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) {
        Ok(value) => Some(value),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
            tracing::error!(panic = text, "{what} panicked");
            // Dropping the panic's payload may panic, too.
            std::mem::forget(panic);
            None
        }
    }
}
