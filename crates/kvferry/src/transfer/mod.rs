//! Transfers: batches, options, handles, and the two ways to drive them.

pub(crate) mod batch;
pub(crate) mod caller;
pub(crate) mod drive;
pub(crate) mod edges;
pub(crate) mod fallback;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub(crate) mod job;
pub(crate) mod kind;
pub(crate) mod lanes;
pub(crate) mod link;
pub(crate) mod messages;
mod options;
pub(crate) mod requests;
pub(crate) mod slot;
pub mod staged;
pub(crate) mod still_moving;

pub use batch::Batch;
pub use job::TransferStats;
pub use kind::{Capabilities, Fence, TransportKind};
pub use options::Options;

use crate::error::{Error, ErrorKind, Result};
use job::Job;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// A transfer in progress. Clones are the same transfer; dropping them does not cancel it.
///
/// It ends exactly once, and every call returns the same outcome.
#[derive(Clone, Debug)]
pub struct Transfer(pub(crate) Arc<Job>);

impl Transfer {
    /// The outcome, or `None` while it runs.
    pub fn outcome(&self) -> Option<Result<TransferStats>> {
        self.0.outcome()
    }

    /// Waits for the outcome, for at most `timeout` if given; `None` if the time passed first.
    pub fn wait(&self, timeout: impl Into<Option<Duration>>) -> Option<Result<TransferStats>> {
        self.0.wait(timeout.into())
    }

    /// Cancels the transfer. Its outcome is `Cancelled`, or another if the cancellation came too
    /// late. The outcome comes once the peer has confirmed that no bytes arrive any more, or can't
    /// confirm it ([`Error::quiesced`]).
    pub fn cancel(&self) {
        self.0.stop(Error::new(ErrorKind::Cancelled, "the transfer was cancelled"));
    }

    /// True once the transfer has ended and nothing reads or writes its local memory any more.
    ///
    /// It stays false after the end while a device performs a copy, or a file system a read or write, that the transfer has
    /// given up: its error is not quiesced ([`Error::quiesced`]). Memory that is used again before lets such a copy read or
    /// write what is not its own. Unregistering the memory waits for it, too.
    pub fn is_quiet(&self) -> bool {
        self.0.is_quiet()
    }

    /// Calls `done` once, with the outcome: on the thread that ends the transfer, which is one of the
    /// agent's or a caller's, or at once if the transfer has ended. `done` must not block: other
    /// transfers wait for its thread.
    pub fn on_end(&self, done: impl FnOnce(Result<TransferStats>) + Send + 'static) {
        self.0.on_end(job::Callback(Box::new(done)));
    }

    /// A descriptor that is readable once the transfer has ended.
    ///
    /// # Errors
    /// `Io` if the process has no free descriptor.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.event_fd()
    }
}

impl Future for Transfer {
    type Output = Result<TransferStats>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.poll(cx.waker()) {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }
}
