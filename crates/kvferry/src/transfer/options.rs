//! The settings of one transfer.

use crate::notify::Notification;
use std::fmt;
use std::time::Duration;

/// Options of a transfer.
#[derive(Clone, Default)]
pub struct Options<'a> {
    /// Time for the whole call, connecting included; the agent's `timeout` if not given.
    pub timeout: Option<Duration>,
    /// Delivered at the peer once all bytes are in place there.
    pub notify: Option<Notification>,
    /// Called at least every 100 ms while a call blocks. If it returns `true`, the transfer is
    /// cancelled, with quiesce, and the call returns `Interrupted`. Asynchronous transfers ignore
    /// it.
    pub interrupt: Option<&'a (dyn Fn() -> bool + Sync)>,
    /// Streams to divide the batch among, at most the agent's `streams_per_peer`. If not given, the
    /// size of the batch decides.
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
