//! The rank's thread: keeps the time, does what the state machines ask for, and calls the observer.

use super::state::{Notice, Shared, State};
use super::types::Event;
use kvferry::{Channel, ErrorKind, Peer, Transfer};
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::{
    EngineHandshakeAction as HandshakeAction, EngineHandshakeMessage as HandshakeMessage,
};
use kvferry_proto::handoff::{
    ConsumerAction, HandoffId, HandoffMessage, PeerId, ProducerAction, ReadId, Slice,
};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

/// What the thread does without the lock.
enum Action {
    Read { read: ReadId, id: HandoffId, from: PeerId, slice: Slice },
    Open { address: String, peer: Peer },
}

type Outgoing = (Channel, HandoffMessage);

impl Shared {
    pub(super) fn run(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            if state.closed {
                return self.close(state);
            }
            let now = self.now();
            state.producer.expire(now);
            state.consumer.expire(now);
            state.handshakes.expire(now);
            self.poll_reads(&mut state, now);
            let mut state = self.work_out_handshake(state);
            let (mut actions, outgoing) = self.take_actions(&mut state);
            let State { peers, consumer, .. } = &mut *state;
            let retry = peers.retry(consumer.unheard(), now);
            let unmet = state.peers.take_unmet().into_iter();
            actions.extend(unmet.map(|(address, peer)| Action::Open { address, peer }));
            state.peers.forget_idle();
            let due = state.next_timeout().into_iter().chain(retry).min();
            let lost = std::mem::take(&mut state.lost);
            state.notices.extend(lost.into_iter().map(Notice::LostPeer));
            let notices = std::mem::take(&mut state.notices);
            let is_idle = actions.is_empty() && notices.is_empty() && state.inbox.is_empty();
            drop(state);
            self.send(outgoing);
            self.notify(notices);
            if is_idle {
                self.wakeup.wait(due.map(|due| due.saturating_since(self.now())));
            }
            for action in actions {
                match action {
                    Action::Read { read, id, from, slice } => {
                        self.begin_read(read, &id, from, slice);
                    }
                    Action::Open { address, peer } => self.open(address, &peer),
                }
            }
        }
    }

    /// Works out the next message of an engine handshake, without the lock.
    fn work_out_handshake<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let Some((from, message)) = state.inbox.pop_front() else { return state };
        let examination = state.handshakes.examine(from, message);
        drop(state);
        let examination = examination.run();
        let mut state = self.lock();
        state.handshakes.accept(examination);
        state
    }

    fn notify(&self, notices: VecDeque<Notice>) {
        let Some(observer) = self.observer.as_ref().and_then(Weak::upgrade) else { return };
        for notice in notices {
            let notified = catch_unwind(AssertUnwindSafe(|| match notice {
                Notice::Ended(event) => observer.ended(event),
                Notice::LearnedEngine(ticket, result) => observer.learned_engine(ticket, result),
                Notice::LostPeer(incarnation) => observer.lost_peer(incarnation),
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
        let (_, outgoing) = self.take_actions(&mut state);
        let reads: Vec<_> = state.reads.drain().map(|(_, running)| running.transfer).collect();
        drop(state);
        self.send(outgoing);
        reads.iter().for_each(Transfer::cancel);
        for transfer in reads {
            // The agent ends a cancelled read after the silence limit at the latest.
            while transfer.wait(Duration::from_secs(1)).is_none() {}
        }
    }

    /// Does what the machines ask for, and returns what needs the lock to be free.
    fn take_actions(&self, state: &mut State) -> (Vec<Action>, Vec<Outgoing>) {
        let (mut actions, mut outgoing) = (Vec::new(), Vec::new());
        let mut send = |state: &State, to, message| {
            outgoing.extend(state.peers.channel(to).cloned().map(|it| (it, message)));
        };
        while let Some(action) = state.producer.poll() {
            match action {
                ProducerAction::Send { to, message } => send(state, to, message),
                ProducerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ProducerAction::Ended { id, outcome } => {
                    let outcome = state.with_address(outcome);
                    self.report(state, Event::Produced { id, outcome });
                }
            }
        }
        while let Some(action) = state.consumer.poll() {
            match action {
                ConsumerAction::Send { to, message } => send(state, to, message),
                ConsumerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ConsumerAction::Read { read, id, from, slice } => {
                    actions.push(Action::Read { read, id, from, slice });
                }
                ConsumerAction::CancelRead(read) => {
                    if let Some(running) = state.reads.get(&read) {
                        running.transfer.cancel();
                    } else {
                        // It has not begun.
                        let is_it = |it: &Action| matches!(it, Action::Read { read: of, .. } if *of == read);
                        actions.retain(|action| !is_it(action));
                        let unread = Err((WireCode::Cancelled, String::new()));
                        state.consumer.read_ended(read, unread, self.now());
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
                HandshakeAction::Send { to, message } => send_handshake(state, to, &message),
                HandshakeAction::Watch { peer, on } => state.peers.watch_handshake(peer, on),
                HandshakeAction::Met { ticket, result } => {
                    state.notices.push_back(Notice::LearnedEngine(ticket, result));
                }
                HandshakeAction::Refused { peer, detail } => {
                    let peer = state.peers.channel(peer).map_or("", Channel::peer_name);
                    tracing::warn!(peer, detail, "an engine was refused as a consumer");
                }
            }
        }
        (actions, outgoing)
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

    /// Encodes and sends messages, without the lock: calls of the engine need it meanwhile.
    fn send(&self, outgoing: Vec<Outgoing>) {
        for (channel, message) in outgoing {
            let Err(error) = channel.send(message.encode()) else { continue };
            if channel.end().is_some() {
                // The machines repeat what matters over the next session.
                continue;
            }
            tracing::warn!(peer = channel.peer_name(), %error, "a handoff's message can't be sent");
            match (error.kind(), message.id()) {
                (ErrorKind::TooLarge, Some(id)) => {
                    let why = "its blocks and side data are too much for a message";
                    let withdrawn =
                        self.lock().producer.withdraw(id, WireCode::TooLarge, why, self.now());
                    drop(withdrawn);
                    self.wakeup.wake();
                }
                // The peer takes no messages. The next session begins with what matters.
                _ => channel.close(error),
            }
        }
    }
}

fn send_handshake(state: &State, to: PeerId, message: &HandshakeMessage) {
    let Some(channel) = state.peers.channel(to) else { return };
    if let Err(error) = channel.send(message.encode())
        && channel.end().is_none()
    {
        let peer = channel.peer_name();
        tracing::warn!(peer, %error, "a message of an engine handshake can't be sent");
        channel.close(error);
    }
}
