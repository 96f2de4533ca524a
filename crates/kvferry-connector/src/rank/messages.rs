//! Channels and their messages. All but `open` runs on the agent's control thread. That thread also
//! does what the machines then ask for, so answering a message wakes no other thread.

use super::peers::{Met, Numbers};
use super::state::{By, Shared};
use crate::codes::{code_of, may_return};
use kvferry::{Channel, Error, Message, MessageHandler, Peer};
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineHandshakeMessage as HandshakeMessage;
use kvferry_proto::handoff::HandoffMessage;
use kvferry_proto::rank_message::RankMessage;
use std::sync::{Arc, Weak};

pub(super) struct Handler(pub(super) Weak<Shared>);

impl MessageHandler for Handler {
    fn began(&self, channel: &Channel) {
        let Some(shared) = self.0.upgrade() else { return };
        shared.lock().began(channel, shared.now());
        shared.drive(By::Agent);
    }

    fn received(&self, channel: &Channel, message: Message<'_>) {
        let Some(shared) = self.0.upgrade() else { return };
        let peer = channel.peer_name();
        match RankMessage::decode(&message) {
            Ok(RankMessage::Handoff(message)) => shared.received_handoff(channel, message),
            Ok(RankMessage::EngineHandshake(message)) => {
                shared.received_handshake(channel, message);
            }
            Ok(RankMessage::Unknown { kind }) => {
                tracing::warn!(peer, kind, "skipped a message of an unknown kind");
            }
            Err(error) => tracing::warn!(peer, %error, "skipped a malformed message"),
        }
        shared.drive(By::Agent);
    }

    fn ended(&self, channel: &Channel, error: &Error) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.lock();
        let now = shared.now();
        let (code, gone) = (code_of(error.kind()), !may_return(error.kind()));
        let (Numbers { reader, suppliers }, is_up) = state.peers.ended(channel);
        // Messages under way are lost even if there is another channel. Both sides repeat them there.
        let gone = gone && !is_up;
        if let Some(reader) = reader {
            state.producer.lost(reader, code, gone, now);
            state.handshakes.lost(reader, code, gone, now);
            if is_up {
                state.producer.met(reader);
            }
        }
        for supplier in suppliers {
            state.consumer.lost(supplier, code, gone, now);
            state.handshakes.lost(supplier, code, gone, now);
            if is_up {
                state.met(supplier, now);
            }
        }
        if shared.observer.is_some() && !is_up {
            state.lost.push(channel.incarnation());
        }
        drop(state);
        // The rank's thread connects again at once to a peer that is still needed: it may live.
        shared.drive(By::Agent);
    }
}

impl Shared {
    fn received_handoff(&self, channel: &Channel, message: HandoffMessage) {
        let (mut state, now) = (self.lock(), self.now());
        // The channel may have begun before there was a message handler.
        state.began(channel, now);
        let Numbers { reader, suppliers } = state.peers.numbers_of(channel);
        let is_for_producer = match &message {
            HandoffMessage::Ask(_) | HandoffMessage::Confirm(_) => true,
            HandoffMessage::Stop(stop) => stop.by_consumer,
            _ => false,
        };
        if !is_for_producer {
            let mut suppliers = suppliers.into_iter();
            let last = suppliers.next_back();
            for supplier in suppliers {
                state.consumer.receive(supplier, message.clone(), now);
            }
            if let Some(last) = last {
                state.consumer.receive(last, message, now);
            }
        } else if let Some(reader) = reader {
            state.producer.receive(reader, message, now);
        }
    }

    fn received_handshake(&self, channel: &Channel, message: HandshakeMessage) {
        let mut state = self.lock();
        state.began(channel, self.now());
        let Numbers { reader, suppliers } = state.peers.numbers_of(channel);
        let is_question = matches!(message, HandshakeMessage::Introduce(_));
        let to = if is_question { reader.into_iter().collect() } else { suppliers };
        for peer in to {
            state.queue_handshake(peer, message.clone());
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
        let mut state = self.lock();
        let now = self.now();
        // The end of a channel that has ended by now would not be reported again.
        let opened = opened.and_then(|channel| channel.end().cloned().map_or(Ok(channel), Err));
        match opened {
            Ok(channel) => {
                state.began(&channel, now);
                match state.peers.met_at(address, &channel) {
                    Some(Met::At(id, gone)) => {
                        if let Some(gone) = gone {
                            state.consumer.lost(gone, WireCode::StaleIncarnation, true, now);
                            state.handshakes.moved(gone, id);
                        }
                        state.consumer.met(id, now);
                        state.handshakes.met(id);
                    }
                    Some(Met::Refused(id)) => {
                        state.consumer.lost(id, WireCode::Busy, true, now);
                        state.handshakes.lost(id, WireCode::Busy, true, now);
                    }
                    None => {}
                }
            }
            Err(error) => match state.peers.not_met_at(address) {
                Some((id, false)) => {
                    state.consumer.lost(id, code_of(error.kind()), true, now);
                    state.handshakes.lost(id, code_of(error.kind()), true, now);
                }
                // The peer has connected to us meanwhile.
                Some((id, true)) => state.met(id, now),
                None => {}
            },
        }
        drop(state);
        self.drive(By::Agent);
    }
}
