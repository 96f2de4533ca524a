//! Calls that have a time limit but can't be interrupted.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Asks whether a call that waits should end.
pub(crate) type Interrupt<'a> = &'a (dyn Fn() -> bool + Sync);

/// How long a call that waits may go without asking: so long may Ctrl-C be left unanswered.
pub(crate) const ASK: Duration = Duration::from_millis(100);

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The interrupt said stop. The call goes on to its limit, unheard.
    Interrupted,
    /// The call's thread could not start, or did not survive.
    Thread(std::io::Error),
}

/// Runs `call` on a thread of its own and asks `interrupt` meanwhile. For calls that only look and
/// move no bytes: when interrupted they are left to their own limit.
pub(crate) fn aside<T: Send + 'static>(
    interrupt: Interrupt<'_>,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoAnswer> {
    let (answer, answered) = mpsc::sync_channel(1);
    kvferry_sys::thread::spawn("kvferry-call".to_owned(), move || {
        // After an interrupt nobody listens any more.
        let _ = answer.send(call());
    })
    .map_err(NoAnswer::Thread)?;
    loop {
        match answered.recv_timeout(ASK) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) if interrupt() => return Err(NoAnswer::Interrupted),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(NoAnswer::Thread(std::io::Error::other("the call panicked")));
            }
        }
    }
}
