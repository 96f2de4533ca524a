//! The sender's side.

use super::{
    Action, Code, Message, Offered, Outcome, SendId, Tasks, Timer, check_count, check_key,
};
use crate::handoff::PeerId;
use crate::message::BODY_MAX;
use crate::pack;
use crate::time::Timestamp;
use serde_bytes::ByteBuf;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Send {
    key: String,
    until: Timestamp,
    /// The receiver; `None` until it is connected.
    peer: Option<PeerId>,
    /// Empty once the offer was sent.
    regions: Vec<ByteBuf>,
    blocks: Vec<Offered>,
}

impl Tasks {
    /// Offers blocks to a receiver.
    ///
    /// # Errors
    /// [`Code::Invalid`] for a key or a list that is empty, [`Code::Busy`].
    pub fn send(
        &mut self,
        key: &str,
        regions: Vec<ByteBuf>,
        blocks: Vec<Offered>,
        budget: Duration,
        now: Timestamp,
    ) -> Result<SendId, Outcome> {
        check_key(key)?;
        if blocks.iter().all(|block| block.1.iter().all(|part| part.2 == 0)) {
            return Err(Outcome::new(Code::Invalid, format!("the send of {key} has no bytes")));
        }
        check_count(self.sends.len(), "sends")?;
        let id = SendId(self.number());
        let until = now + budget;
        let send = Send { key: key.to_owned(), until, peer: None, regions, blocks };
        self.sends.insert(id, send);
        self.timers.insert((until, Timer::Send(id)));
        self.actions.push_back(Action::Connect { send: id });
        Ok(id)
    }

    /// The receiver of a send is connected, or can't be.
    pub fn opened(&mut self, id: SendId, peer: Result<PeerId, String>, now: Timestamp) {
        let Some(send) = self.sends.get_mut(&id) else { return };
        let peer = match peer {
            Ok(peer) => peer,
            Err(text) => return self.end_send(id, Outcome::new(Code::Unreachable, text)),
        };
        send.peer = Some(peer);
        let budget = send.until.saturating_since(now).as_millis();
        let offer = Message::Offer {
            id: id.0,
            key: send.key.clone(),
            budget_ms: u64::try_from(budget).unwrap_or(u64::MAX),
            regions: std::mem::take(&mut send.regions),
            blocks: std::mem::take(&mut send.blocks),
        };
        self.watch(peer, true);
        let bytes = pack::encode(&offer);
        if bytes.len() > BODY_MAX {
            let len = bytes.len();
            let text = format!(
                "the list of blocks has {len} bytes, {BODY_MAX} are allowed; send fewer blocks"
            );
            return self.end_send(id, Outcome::new(Code::TooLarge, text));
        }
        self.actions.push_back(Action::Offer { to: peer, send: id, bytes });
    }

    /// Ends a send whose offered bytes are never computed, for the reason in `text`.
    pub fn not_computed(&mut self, id: SendId, text: &str) {
        let text = format!("the work that computes what is sent has failed: {text}");
        self.end_send(id, Outcome::new(Code::NotComputed, text));
    }

    /// There was no room for the offer of a send, for the reason in `text`.
    pub fn unsent(&mut self, id: SendId, text: String) {
        self.end_send(id, Outcome::new(Code::Busy, text));
    }

    /// Ends a send and sends `Withdraw`: the receiver stops, and does not use the bytes that it has
    /// read.
    pub fn cancel_send(&mut self, id: SendId) {
        self.withdraw(id, Outcome::new(Code::Cancelled, "the send was cancelled"));
    }

    pub(super) fn send_expired(&mut self, id: SendId) {
        let Some(send) = self.sends.get(&id) else { return };
        let text = match send.peer {
            None => format!("the receiver of {} was not connected to in time", send.key),
            Some(_) => format!("the receiver did not take {} in time", send.key),
        };
        self.withdraw(id, Outcome::new(Code::Timeout, text));
    }

    fn withdraw(&mut self, id: SendId, outcome: Outcome) {
        if let Some(&Send { peer: Some(peer), .. }) = self.sends.get(&id) {
            let (code, text) = (outcome.code.to_wire(), outcome.text.clone());
            self.say(peer, &Message::Withdraw { id: id.0, code, text });
        }
        self.end_send(id, outcome);
    }

    /// The offer is still valid if the send has not ended. It ends now: its memory is free again.
    pub(super) fn confirm(&mut self, from: PeerId, id: SendId) {
        let valid = self.sends.get(&id).is_some_and(|send| send.peer == Some(from));
        self.say(from, &Message::Confirmed { id: id.0, valid });
        if valid {
            self.end_send(id, Outcome::done());
        }
    }

    pub(super) fn refused(&mut self, from: PeerId, id: SendId, mut outcome: Outcome) {
        if outcome.code == Code::Done {
            outcome.code = Code::Other(0);
        }
        if self.sends.get(&id).is_some_and(|send| send.peer == Some(from)) {
            self.end_send(id, outcome);
        }
    }

    pub(super) fn sends_lost(&mut self, peer: PeerId, why: &str) {
        if !self.watched.contains(peer) {
            return;
        }
        let of = |send: &Send| send.peer == Some(peer);
        let lost: Vec<_> =
            self.sends.iter().filter(|(_, send)| of(send)).map(|(id, _)| *id).collect();
        for id in lost {
            self.end_send(id, Outcome::new(Code::PeerLost, why));
        }
    }

    fn end_send(&mut self, id: SendId, outcome: Outcome) {
        let Some(send) = self.sends.remove(&id) else { return };
        self.timers.remove(&(send.until, Timer::Send(id)));
        if let Some(peer) = send.peer {
            self.watch(peer, false);
        }
        self.actions.push_back(Action::SendEnded { id, outcome });
    }
}
