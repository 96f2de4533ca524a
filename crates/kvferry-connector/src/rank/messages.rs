//! Channels and their messages. All but `open` runs on the agent's control thread. That thread also
//! does what the machines then ask for, so answering a message wakes no other thread.

use super::peers::{Ended, EndedReader, Met};
use super::state::{DrivingThread, Shared};
use super::thread::Outgoing;
use crate::codes::{code_of, may_return};
use kvferry::{Channel, Error, ErrorKind, Message, MessageHandler, Peer};
use kvferry_proto::engine_handshake::EngineHandshakeMessage as HandshakeMessage;
use kvferry_proto::handoff::HandoffMessage;
use kvferry_proto::rank_message::{RankMessage, ReaderMessage};
use kvferry_proto::{Origin, WireCode};
use std::sync::{Arc, Weak};

pub(super) struct Handler(pub(super) Weak<Shared>);

impl MessageHandler for Handler {
    /// A session means nothing before the peer has sent a message over it, or this rank has opened it.
    fn began(&self, _channel: &Channel) {}

    fn received(&self, channel: &Channel, message: Message<'_>) {
        let Some(shared) = self.0.upgrade() else { return };
        let peer = channel.peer_name();
        match RankMessage::decode(&message) {
            Ok(RankMessage::Handoff(message)) => shared.received_handoff(channel, message),
            Ok(RankMessage::EngineHandshake(message)) => {
                shared.received_handshake(channel, message);
            }
            Ok(RankMessage::Reader(ReaderMessage::Reader(reader))) => {
                let mut state = shared.state.lock();
                if let Some(id) = state.peers.came(channel, &reader.key) {
                    state.producer.met(id);
                }
            }
            Ok(
                RankMessage::Reader(ReaderMessage::Unknown { kind })
                | RankMessage::Unknown { kind },
            ) => {
                kvferry::warn_limited!(peer, kind, "skipped a message of an unknown kind");
            }
            Err(error) => kvferry::warn_limited!(peer, %error, "skipped a malformed message"),
        }
        shared.drive(DrivingThread::Agent);
    }

    fn ended(&self, channel: &Channel, error: &Error) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.state.lock();
        let now = shared.now();
        // A session that gave its place to a newer one, or ended for want of memory: its peer lives.
        let is_displaced = error.kind() == ErrorKind::Busy;
        let (code, is_alive) = (code_of(error.kind()), may_return(error.kind()));
        let Ended { reader, supplier, gives_place } = state.peers.ended(channel, is_displaced, now);
        if let Some(EndedReader { id, is_up, may_return }) = reader {
            // Messages under way are lost even if there is another channel. Both sides repeat them there.
            let gone = !((is_alive || is_displaced) && may_return || is_up);
            state.producer.lost(id, code, gone, now);
            if is_up {
                // A question that waits may have come over the other channel, and is answered there.
                state.producer.met(id);
            } else {
                state.handshakes.lost(id, code, gone, now);
            }
        }
        if let Some(supplier) = supplier {
            let gone = !(is_alive || gives_place);
            state.consumer.lost(supplier, code, gone, now);
            state.handshakes.lost(supplier, code, gone, now);
        }
        drop(state);
        // The rank's thread connects again at once to a peer that is still needed: it may live.
        shared.drive(DrivingThread::Agent);
    }
}

impl Shared {
    fn received_handoff(&self, channel: &Channel, message: HandoffMessage) {
        let (mut state, now) = (self.state.lock(), self.now());
        let origin = Origin::from(channel.peer_ip());
        let is_for_producer = match &message {
            HandoffMessage::Ask(_) | HandoffMessage::Confirm(_) => true,
            HandoffMessage::Stop(stop) => stop.by_consumer,
            _ => false,
        };
        if is_for_producer {
            let reader = state.peers.reader(channel);
            state.producer.receive(reader, origin, message, now);
        } else if let Some(supplier) = state.peers.supplier(channel) {
            state.consumer.receive(supplier, origin, message, now);
        }
    }

    fn received_handshake(&self, channel: &Channel, message: HandshakeMessage) {
        let mut state = self.state.lock();
        let is_question = matches!(message, HandshakeMessage::Introduce(_));
        let from = match is_question {
            true => Some(state.peers.reader(channel)),
            false => state.peers.supplier(channel),
        };
        if let Some(from) = from {
            state.handshakes.arrived(from, Origin::from(channel.peer_ip()), message);
        }
    }

    /// Connects to a peer. On the rank's thread.
    pub(super) fn open(self: &Arc<Self>, address: String, peer: &Peer) {
        let shared = Arc::downgrade(self);
        peer.open_channel(Box::new(move |opened| {
            if let Some(shared) = shared.upgrade() {
                shared.opened(&address, opened);
            }
        }));
    }

    fn opened(self: &Arc<Self>, address: &str, opened: kvferry::Result<Channel>) {
        let mut state = self.state.lock();
        let now = self.now();
        // The end of a channel that has ended by now would not be reported again.
        let opened = opened.and_then(|channel| channel.end().cloned().map_or(Ok(channel), Err));
        match opened {
            Ok(channel) => match state.peers.met_at(address, &channel, now) {
                Some(Met::At { id, gone, is_replaced, key }) => {
                    let incarnation = channel.incarnation();
                    if let Some(key) = key {
                        state.greetings.push(Outgoing::greeting(channel, key));
                    }
                    if is_replaced {
                        state.consumer.lost(id, WireCode::Closed, false, now);
                        state.handshakes.lost(id, WireCode::Closed, false, now);
                    }
                    if let Some(gone) = gone {
                        state.consumer.lost(gone, WireCode::StaleIncarnation, true, now);
                        state.handshakes.moved(gone, id);
                    }
                    state.consumer.met(id, incarnation, now);
                    state.handshakes.met(id);
                }
                Some(Met::Refused(id)) => {
                    state.consumer.lost(id, WireCode::Busy, true, now);
                    state.handshakes.lost(id, WireCode::Busy, true, now);
                }
                None => {}
            },
            Err(error) => {
                if let Some(id) = state.peers.not_met_at(address) {
                    state.consumer.lost(id, code_of(error.kind()), true, now);
                    state.handshakes.lost(id, code_of(error.kind()), true, now);
                }
            }
        }
        drop(state);
        self.drive(DrivingThread::Agent);
    }
}
