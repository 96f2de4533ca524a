//! Sends notifications that follow several transfers, or a transfer with a stock peer.
//!
//! The thread that ends the last of the transfers must not wait for a peer, so a thread of its own
//! sends. It starts with the first such notification, and ends with the engine.

use kvferry::{Notification, Options, Peer};
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// The most notifications that wait to be sent; then the next one is refused.
const WAITING_MAX: usize = 4_096;

#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) peer: Peer,
    pub(crate) notification: Notification,
    pub(crate) timeout: Duration,
}

/// The sending end of the thread's queue.
#[derive(Debug, Default)]
pub(crate) struct Notifier(OnceLock<SyncSender<Message>>);

impl Notifier {
    /// The queue; starts the thread.
    pub(crate) fn queue(&self) -> std::io::Result<SyncSender<Message>> {
        if let Some(queue) = self.0.get() {
            return Ok(queue.clone());
        }
        let (queue, messages) = sync_channel::<Message>(WAITING_MAX);
        kvferry_sys::thread::spawn("kvferry-notify".to_owned(), move || {
            for Message { peer, notification, timeout } in messages {
                let options = Options { timeout: Some(timeout), ..Options::default() };
                if let Err(error) = peer.notify(notification, &options) {
                    tracing::warn!(peer = peer.address(), %error, "a notification was not delivered");
                }
            }
        })?;
        // If another thread was faster, this queue and its thread end here.
        let _ = self.0.set(queue);
        Ok(self.0.get().expect("set above").clone())
    }
}
