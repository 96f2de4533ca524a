//! Reports of peers and transfers, until the endpoint's thread takes them.

use super::end::Done;
use kvferry::{Channel, Message, MessageHandler, Receipt, Transfer};
use kvferry_proto::tasks::{Outcome, RecvId, SendId};
use kvferry_sys::sync::{Condvar, Mutex};
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Bytes that ended sessions leave for the endpoint's thread, at most. Those of live sessions are bounded by the
/// peers' windows: a message is acknowledged when that thread has taken it.
const LEFT_BYTES_MAX: usize = 64 * 1024 * 1024;
/// What a message that was left counts beside its bytes, and what an ended session counts: more than they take.
const LEFT_MESSAGE: usize = 512;
const LEFT_SESSION: usize = 16 * 1024;

pub(super) enum Event {
    Message(Channel, Vec<u8>, Receipt),
    Lost(Channel, String),
    Opened(SendId, Result<Channel, String>),
    ReadEnded(RecvId, Result<(), String>),
    /// A read has failed while a device that does not answer still copies for it.
    ReadGivenUp(RecvId, Transfer, String),
    Ended(Done, Outcome),
}

#[derive(Default)]
struct Events {
    events: VecDeque<Event>,
    /// Bytes of the messages among `events` whose sessions have ended.
    left_bytes: usize,
    /// Live sessions of which the endpoint's thread has taken an event.
    known: HashSet<Channel>,
    /// Timeouts may have changed.
    poked: bool,
    stops: bool,
}

/// Events for the endpoint's thread, from any thread.
#[derive(Default)]
pub(super) struct Inbox {
    events: Mutex<Events>,
    changed: Condvar,
}

impl Inbox {
    /// A handler that puts the peers' messages into the inbox.
    pub(super) fn handler(self: &Arc<Self>) -> Arc<dyn MessageHandler> {
        Arc::new(Handler(Arc::downgrade(self)))
    }

    pub(super) fn push(&self, event: Event) {
        self.change(|inbox| inbox.events.push_back(event));
    }

    /// Puts callbacks in front of all other events, in their order.
    pub(super) fn put_back(&self, due: Vec<(Done, Outcome)>) {
        let due = due.into_iter().rev().map(|(done, outcome)| Event::Ended(done, outcome));
        self.change(|inbox| due.for_each(|event| inbox.events.push_front(event)));
    }

    /// Wakes the thread: its next timeout may be an earlier one.
    pub(super) fn poke(&self) {
        self.change(|inbox| inbox.poked = true);
    }

    /// Ends the thread once it has taken what is there.
    pub(super) fn stop(&self) {
        self.change(|inbox| inbox.stops = true);
    }

    fn change(&self, change: impl FnOnce(&mut Events)) {
        change(&mut self.events.lock());
        self.changed.notify_one();
    }

    /// Waits for events, `left` at most, and takes all. `None` when the thread has to stop.
    pub(super) fn take(&self, left: Option<Duration>) -> Option<VecDeque<Event>> {
        let is_idle = |inbox: &mut Events| inbox.events.is_empty() && !inbox.poked && !inbox.stops;
        let mut inbox = self.changed.wait_while(self.events.lock(), left, is_idle);
        inbox.poked = false;
        let events = inbox.take();
        (!events.is_empty() || !inbox.stops).then_some(events)
    }

    /// Bytes of the messages that wait.
    #[cfg(test)]
    pub(super) fn message_bytes(&self) -> usize {
        let bytes = |event: &Event| match event {
            Event::Message(_, bytes, _) => bytes.len(),
            _ => 0,
        };
        self.events.lock().events.iter().map(bytes).sum()
    }
}

impl Events {
    /// A session has ended. Its messages that are still here are dropped if there is too much of such
    /// sessions: what depends on them fails as the session does.
    fn lose(&mut self, channel: &Channel, why: String) {
        let is_known = self.known.remove(channel);
        let counts = |event: &Event| match event {
            Event::Message(of, bytes, _) if of == channel => Some(bytes.len() + LEFT_MESSAGE),
            _ => None,
        };
        let of_session = self.events.iter().filter_map(counts).sum::<usize>() + LEFT_SESSION;
        if self.left_bytes + of_session <= LEFT_BYTES_MAX {
            self.left_bytes += of_session;
        } else {
            self.events.retain(|event| counts(event).is_none());
            let is_opened =
                |event: &Event| matches!(event, Event::Opened(_, Ok(of)) if of == channel);
            if !is_known && !self.events.iter().any(is_opened) {
                // Nothing depends on a session that the thread has heard nothing of.
                return;
            }
        }
        self.events.push_back(Event::Lost(channel.clone(), why));
    }

    fn take(&mut self) -> VecDeque<Event> {
        self.left_bytes = 0;
        for event in &self.events {
            match event {
                // The session has ended, and its end was reported before. The opening shows it.
                Event::Opened(_, Ok(of)) if of.end().is_some() => {}
                Event::Message(of, ..) | Event::Opened(_, Ok(of)) => {
                    self.known.insert(of.clone());
                }
                Event::Lost(of, _) => {
                    self.known.remove(of);
                }
                _ => {}
            }
        }
        std::mem::take(&mut self.events)
    }
}

struct Handler(Weak<Inbox>);

impl MessageHandler for Handler {
    fn began(&self, _: &Channel) {}

    fn received(&self, channel: &Channel, message: Message<'_>) {
        if let Some(inbox) = self.0.upgrade() {
            let (bytes, receipt) = message.take_later();
            inbox.push(Event::Message(channel.clone(), bytes, receipt));
        }
    }

    fn ended(&self, channel: &Channel, error: &kvferry::Error) {
        if let Some(inbox) = self.0.upgrade() {
            inbox.change(|events| events.lose(channel, error.to_string()));
        }
    }
}
