//! Does what the state machines ask for, and calls the observer: on the thread that has changed
//! them, or on the rank's thread, which keeps the time.

use super::state::{DrivingThread, Notice, Shared, State};
use super::types::Event;
use crate::codes::code_of;
use kvferry::{Channel, ErrorKind, Peer, Transfer};
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineHandshakeAction as HandshakeAction;
use kvferry_proto::handoff::{
    ConsumerAction, HandoffId, HandoffMessage, PeerId, ProducerAction, ReadId, Slice,
};
use kvferry_proto::rank_message::{Reader, ReaderKey, ReaderMessage};
use kvferry_sys::sync::MutexGuard;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What is done without the lock.
pub(super) enum Action {
    Read { read: ReadId, id: HandoffId, from: PeerId, slice: Slice },
    CancelRead(Transfer),
}

/// A message, and the handoff that it announces.
pub(super) struct Outgoing {
    channel: Channel,
    bytes: Vec<u8>,
    announced: Option<HandoffId>,
}

impl Shared {
    /// Keeps the time, looks after peers, and does what other threads leave to this one.
    pub(super) fn run(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            if state.closed && state.driver.is_none() {
                return self.close(state);
            }
            let now = self.now();
            state.producer.expire(now);
            state.consumer.expire(now);
            state.handshakes.expire(now);
            if state.observer_due.is_some_and(|due| due <= now) {
                state.observer_due = None;
                state.notices.push_back(Notice::Called);
            }
            self.work_out_handshake(state);
            // The machines name the peers that they need while a thread carries out their requests.
            // Another thread that is still doing so wakes this one at its end.
            let Some(mut state) = self.carry_out(DrivingThread::RankThread) else {
                self.wakeup.wait(None);
                continue;
            };
            let State { peers, consumer, .. } = &mut *state;
            let retry = peers.retry(consumer.unheard(), now);
            let unmet = state.peers.take_unmet(now);
            state.peers.forget_idle();
            let unneeded = state.peers.take_unneeded();
            state.due = state.next_timeout().into_iter().chain(retry).min();
            let left = state.due.map(|due| due.saturating_since(self.now()));
            let is_idle = unmet.is_empty() && !state.handshakes.has_work();
            drop(state);
            unneeded.iter().for_each(Peer::disconnect);
            for (address, peer) in unmet {
                self.open(address, &peer);
            }
            if is_idle {
                self.wakeup.wait(left);
            }
        }
    }

    /// Does what the machines ask for, on a thread that has changed them. If another thread is at it,
    /// that one goes on to do it: messages and notices keep their order. What may take long is left to
    /// the rank's thread. Called without any lock of the rank and of its observer.
    pub(super) fn drive(self: &Arc<Self>, by: DrivingThread) {
        let Some(mut state) = self.carry_out(by) else { return };
        let is_left = state.is_to_leave(by);
        state.is_awaited = false;
        if is_left || state.needs_thread() {
            drop(state);
            self.wakeup.wake();
        }
    }

    /// Does what the machines ask for. Returns when they ask for nothing more, still locked, or if this
    /// thread should not stay; `None` if another thread is at it.
    fn carry_out(self: &Arc<Self>, by: DrivingThread) -> Option<MutexGuard<'_, State>> {
        let _driving = Driving::new(self);
        let mut state = self.state.lock();
        let me = std::thread::current().id();
        let is_thread = by == DrivingThread::RankThread;
        if state.driver.is_some() || state.closed {
            state.is_left_more |= state.driver != Some(me);
            state.is_awaited |= is_thread;
            return None;
        }
        state.driver = Some(me);
        state.is_left_more = false;
        while !(state.closed || state.is_to_leave(by)) {
            self.poll_reads(&mut state, self.now());
            let (messages, mut actions) = self.take_actions(&mut state);
            if is_thread {
                actions.append(&mut state.left);
            } else {
                let (long, short) = actions.into_iter().partition(|it| state.takes_long(it));
                actions = short;
                state.left.extend::<Vec<_>>(long);
            }
            let lost = state.peers.take_lost();
            if self.observer.is_some() {
                // The observer gets them after all earlier notices.
                state.notices.extend(lost.into_iter().map(Notice::LostPeer));
            }
            // When an engine was learned, a thread is started that plans the copies.
            let is_long = |notice: &Notice| matches!(notice, Notice::LearnedEngine(..));
            let until = state.notices.iter().position(|it| !is_thread && is_long(it));
            let until = until.unwrap_or(state.notices.len());
            let notices: Vec<_> = state.notices.drain(..until).collect();
            if messages.is_empty() && actions.is_empty() && notices.is_empty() {
                break;
            }
            drop(state);
            self.send(messages);
            self.notify(notices);
            for action in actions {
                match action {
                    Action::Read { read, id, from, slice } => {
                        self.begin_read(read, &id, from, slice);
                    }
                    Action::CancelRead(transfer) => transfer.cancel(),
                }
            }
            state = self.state.lock();
        }
        state.driver = None;
        Some(state)
    }

    /// Works out the next message of an engine handshake, without the lock.
    fn work_out_handshake(&self, mut state: MutexGuard<'_, State>) {
        let Some(examination) = state.handshakes.examine() else { return };
        drop(state);
        let examination = examination.run();
        self.state.lock().handshakes.accept(examination);
    }

    fn notify(&self, notices: Vec<Notice>) {
        let Some(observer) = self.observer.as_ref().and_then(Weak::upgrade) else { return };
        for notice in notices {
            let notified = catch_unwind(AssertUnwindSafe(|| match notice {
                Notice::Ended(event) => observer.ended(event),
                Notice::LearnedEngine(ticket, result) => observer.learned_engine(ticket, result),
                Notice::LostPeer(address) => observer.lost_peer(&address),
                Notice::Answered(id) => observer.answered(&id),
                Notice::Called => observer.called(),
                Notice::Read(id, part) => observer.read(&id, part),
            }));
            if notified.is_err() {
                tracing::error!("an observer of handoffs panicked; other handoffs go on");
            }
        }
    }

    /// Nothing is read any more when this returns.
    fn close(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        // Tells peers that wait for this rank that it ends.
        let now = self.now();
        state.producer.close(now);
        state.consumer.close(now);
        let (messages, _) = self.take_actions(&mut state);
        let reads: Vec<_> = state.reads.drain().map(|(_, running)| running.transfer).collect();
        drop(state);
        self.send(messages);
        reads.iter().for_each(Transfer::cancel);
        for transfer in reads {
            // The agent ends a cancelled read after the silence limit at the latest.
            while transfer.wait(Duration::from_secs(1)).is_none() {}
        }
    }

    /// What the machines ask for: messages, which are sent first, and what follows.
    fn take_actions(&self, state: &mut State) -> (Vec<Outgoing>, Vec<Action>) {
        let (mut messages, mut actions) = (std::mem::take(&mut state.greetings), Vec::new());
        while let Some(action) = state.producer.poll() {
            match action {
                ProducerAction::Send { to, message } => {
                    let is_announcement =
                        matches!(message, HandoffMessage::Offer(_) | HandoffMessage::Ready(_));
                    let announced = message.id().filter(|_| is_announcement);
                    messages.extend(Outgoing::new(state, to, announced, || message.encode()));
                }
                ProducerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ProducerAction::Ended { id, outcome } => {
                    let outcome = state.with_address(outcome);
                    self.report(state, Event::Produced { id, outcome });
                }
            }
        }
        while let Some(action) = state.consumer.poll() {
            match action {
                ConsumerAction::Send { to, message } => {
                    messages.extend(Outgoing::new(state, to, None, || message.encode()));
                }
                ConsumerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ConsumerAction::Read { read, id, from, slice } => {
                    actions.push(Action::Read { read, id, from, slice });
                }
                ConsumerAction::CancelRead(read) => {
                    if let Some(running) = state.reads.get(&read) {
                        actions.push(Action::CancelRead(running.transfer.clone()));
                    } else {
                        // It has not begun.
                        let is_it = |it: &Action| matches!(it, Action::Read { read: of, .. } if *of == read);
                        actions.retain(|action| !is_it(action));
                        state.left.retain(|action| !is_it(action));
                        let unread = Err((WireCode::Cancelled, String::new()));
                        state.consumer.read_ended(read, unread, self.now());
                    }
                }
                ConsumerAction::Answered { id } => {
                    if self.observer.is_some() {
                        state.notices.push_back(Notice::Answered(id));
                    }
                }
                ConsumerAction::Ended { id, outcome, side_data } => {
                    state.mappers.remove(&id);
                    state.retried.remove(&id);
                    let with_address = side_data.into_iter().map(|(peer, data)| {
                        let place = state.peers.place_of(peer);
                        (place.map_or("", |(address, _)| address).to_owned(), data)
                    });
                    let side_data = with_address.collect();
                    let outcome = state.with_address(outcome);
                    self.report(state, Event::Consumed { id, outcome, side_data });
                }
            }
        }
        while let Some(action) = state.handshakes.poll() {
            match action {
                HandshakeAction::Send { to, message } => {
                    messages.extend(Outgoing::new(state, to, None, || message.encode()));
                }
                HandshakeAction::Watch { peer, on } => state.peers.watch_handshake(peer, on),
                HandshakeAction::Met { ticket, result } => {
                    state.notices.push_back(Notice::LearnedEngine(ticket, result));
                }
                HandshakeAction::Refused { peer, detail } => {
                    let peer = state.peers.channel(peer).map_or("", Channel::peer_name);
                    kvferry::warn_limited!(peer, detail, "an engine was refused as a consumer");
                }
            }
        }
        state.peers.settle();
        (messages, actions)
    }

    /// Passes an event to the observer, or keeps it until the engine asks.
    fn report(&self, state: &mut State, event: Event) {
        if self.observer.is_some() {
            state.notices.push_back(Notice::Ended(event));
        } else {
            state.events.push_back(event);
            self.arrived.notify_all();
        }
    }

    fn send(&self, messages: Vec<Outgoing>) {
        let mut channels: Vec<Channel> = Vec::new();
        for Outgoing { channel, bytes, announced } in messages {
            // An announcement may be refused. Other messages may not: the one that tells its readers is among them.
            let queued = match announced {
                Some(_) => channel.queue_if_room(bytes),
                None => channel.queue(bytes),
            };
            if !channels.contains(&channel) {
                channels.push(channel.clone());
            }
            let Err(error) = queued else { continue };
            if channel.end().is_some() {
                // The machines repeat what matters over the next session.
                continue;
            }
            kvferry::warn_limited!(peer = channel.peer_name(), %error, "a rank's message can't be sent");
            let why = match error.kind() {
                ErrorKind::TooLarge => "its blocks and side data are too much for a message",
                _ => "its announcement finds no room beside other messages",
            };
            match announced {
                // An announcement costs its handoff, whose readers are told.
                Some(id) => {
                    let (code, mut state) = (code_of(error.kind()), self.state.lock());
                    drop(state.producer.withdraw(&id, code, why, self.now()));
                }
                // The peer takes no messages. The next session begins with what matters.
                None => channel.close(error),
            }
        }
        channels.iter().for_each(Channel::flush);
    }
}

/// If the thread that drives the machines panics while it does so, another one goes on.
struct Driving<'a> {
    shared: &'a Shared,
    /// The thread drives as it unwinds. The lock may be held when this is dropped.
    was_panicking: bool,
}

impl<'a> Driving<'a> {
    fn new(shared: &'a Shared) -> Self {
        Self { shared, was_panicking: std::thread::panicking() }
    }
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_panicking {
            let mut state = self.shared.state.lock();
            if state.driver == Some(std::thread::current().id()) {
                state.driver = None;
            }
            drop(state);
            self.shared.wakeup.wake();
        }
    }
}

impl Outgoing {
    /// The first message to a supplier: the key of this rank.
    pub(super) fn greeting(channel: Channel, key: ReaderKey) -> Self {
        let bytes = ReaderMessage::from(Reader { key }).encode();
        Self { channel, bytes, announced: None }
    }

    /// `None` if there is no channel to the peer.
    fn new(
        state: &State,
        to: PeerId,
        announced: Option<&HandoffId>,
        encode: impl FnOnce() -> Vec<u8>,
    ) -> Option<Self> {
        let channel = state.peers.channel(to)?.clone();
        Some(Self { channel, bytes: encode(), announced: announced.cloned() })
    }
}
