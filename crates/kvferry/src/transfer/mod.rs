//! Transfers: batches, options, handles, and the two ways to drive them.

pub(crate) mod batch;
pub(crate) mod drive;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub(crate) mod job;

pub use batch::Batch;
pub use job::Moved;

use crate::error::{Error, ErrorKind, Result};
use crate::notify::Notification;
use job::Job;
use std::fmt;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// How a transfer is to be made.
#[derive(Clone, Default)]
pub struct Options<'a> {
    /// How long it may take, connecting included; the agent's `timeout` if not given.
    pub timeout: Option<Duration>,
    /// Delivered at the peer once all bytes are in place there.
    pub notify: Option<Notification>,
    /// Asked at least every 100 ms while a call blocks; `true` cancels the transfer, with
    /// quiesce, and the call ends with `Interrupted`. Asynchronous transfers ignore it.
    pub interrupt: Option<&'a (dyn Fn() -> bool + Sync)>,
    /// Streams to divide the batch among, at most the agent's `streams_per_peer`. If not given,
    /// the size of the batch decides.
    pub streams: Option<usize>,
}

impl fmt::Debug for Options<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("timeout", &self.timeout)
            .field("notify", &self.notify)
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

/// A transfer under way. Clones are the same transfer; dropping them does not cancel it.
///
/// It ends exactly once, and everybody who asks gets the same answer.
#[derive(Clone, Debug)]
pub struct Transfer(pub(crate) Arc<Job>);

impl Transfer {
    /// The outcome, or `None` while it runs.
    pub fn poll(&self) -> Option<Result<Moved>> {
        self.0.outcome()
    }

    /// Waits for the outcome for at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<Result<Moved>> {
        self.0.wait(timeout)
    }

    /// Asks for the transfer to end. Its outcome is `Cancelled`, or another if it was too late;
    /// it comes when the peer has confirmed that nothing lands any more, or can't
    /// ([`Error::quiesced`]).
    pub fn cancel(&self) {
        self.0.stop(Error::new(ErrorKind::Cancelled, "the transfer was cancelled"));
    }

    /// A descriptor that is readable once the transfer ended.
    ///
    /// # Errors
    /// `Io` if the process has no descriptor left.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.event_fd()
    }
}

impl Future for Transfer {
    type Output = Result<Moved>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.poll(cx.waker()) {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }
}
