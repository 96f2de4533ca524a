//! Calls that have a time limit but cannot be interrupted.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Returns true if the waiting call should end.
pub type Interrupt<'a> = &'a (dyn Fn() -> bool + Sync);

/// The longest time between two checks of the interrupt, and so the longest delay of Ctrl-C.
pub const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Reason why a call has no result.
#[derive(Debug)]
pub enum NoAnswer {
    /// The interrupt asked for the end. The call runs on to its own time limit; its result is lost.
    Interrupted,
    /// The thread could not start, or the call panicked.
    Thread(std::io::Error),
}

/// Runs `call` on a thread of its own and checks `interrupt` while it waits for the result.
///
/// Only for calls that move no bytes: an interrupted call keeps running until its own time limit.
pub fn run_interruptible<T: Send + 'static>(
    interrupt: Interrupt<'_>,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoAnswer> {
    let (sender, receiver) = mpsc::sync_channel(1);
    kvferry_sys::thread::spawn("kvferry-call".to_owned(), move || {
        // After an interrupt the receiver is gone.
        let _ = sender.send(call());
    })
    .map_err(NoAnswer::Thread)?;
    loop {
        match receiver.recv_timeout(CHECK_INTERVAL) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) if interrupt() => return Err(NoAnswer::Interrupted),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(NoAnswer::Thread(std::io::Error::other("the call panicked")));
            }
        }
    }
}
