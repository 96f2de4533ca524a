//! The sender's side.

use super::{Action, Conn, SendId, Tasks, Timer, check_count, check_key};
use crate::blocks::Offered;
use crate::code::{Code, Outcome};
use crate::message::Message;
use kvferry_proto::message::BODY_MAX;
use kvferry_proto::{Timestamp, pack};
use serde_bytes::ByteBuf;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Send {
    key: String,
    until: Timestamp,
    /// Connection to the receiver; `None` while it is being opened.
    conn: Option<Conn>,
    /// Empty once the offer was sent.
    regions: Vec<ByteBuf>,
    blocks: Vec<Offered>,
}

impl Tasks {
    /// Offers blocks to the receiver at `address`.
    ///
    /// # Errors
    /// [`Code::Invalid`] for a key or a list that is empty, [`Code::Busy`].
    pub fn send(
        &mut self,
        address: &str,
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
        let send = Send { key: key.to_owned(), until, conn: None, regions, blocks };
        self.sends.insert(id, send);
        self.timers.insert((until, Timer::Send(id)));
        self.actions.push_back(Action::Connect { send: id, address: address.to_owned() });
        Ok(id)
    }

    /// A connection was opened for a send, or could not be.
    pub fn opened(&mut self, id: SendId, conn: Result<Conn, String>, now: Timestamp) {
        let Some(send) = self.sends.get_mut(&id) else { return };
        let conn = match conn {
            Ok(conn) => conn,
            Err(text) => return self.end_send(id, Outcome::new(Code::Unreachable, text)),
        };
        send.conn = Some(conn);
        let budget = send.until.saturating_since(now).as_millis();
        let offer = Message::Offer {
            id: id.0,
            key: send.key.clone(),
            budget_ms: u64::try_from(budget).unwrap_or(u64::MAX),
            regions: std::mem::take(&mut send.regions),
            blocks: std::mem::take(&mut send.blocks),
        };
        self.use_conn(conn);
        let bytes = pack::encode(&offer);
        if bytes.len() > BODY_MAX {
            let len = bytes.len();
            let text = format!(
                "the list of blocks has {len} bytes, {BODY_MAX} are allowed; send fewer blocks"
            );
            return self.end_send(id, Outcome::new(Code::TooLarge, text));
        }
        self.actions.push_back(Action::Offer { to: conn, send: id, bytes });
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
        let text = match send.conn {
            None => format!("the receiver of {} was not connected to in time", send.key),
            Some(_) => format!("the receiver did not take {} in time", send.key),
        };
        self.withdraw(id, Outcome::new(Code::Timeout, text));
    }

    fn withdraw(&mut self, id: SendId, outcome: Outcome) {
        if let Some(&Send { conn: Some(conn), .. }) = self.sends.get(&id) {
            let (code, text) = (outcome.code.to_wire(), outcome.text.clone());
            self.say(conn, &Message::Withdraw { id: id.0, code, text });
        }
        self.end_send(id, outcome);
    }

    /// The offer is still valid if the send has not ended. It ends now: its memory is free again.
    pub(super) fn confirm(&mut self, from: Conn, id: SendId) {
        let valid = self.sends.get(&id).is_some_and(|send| send.conn == Some(from));
        self.say(from, &Message::Confirmed { id: id.0, valid });
        if valid {
            self.end_send(id, Outcome::done());
        }
    }

    pub(super) fn refused(&mut self, from: Conn, id: SendId, mut outcome: Outcome) {
        if outcome.code == Code::Done {
            outcome.code = Code::Other(0);
        }
        if self.sends.get(&id).is_some_and(|send| send.conn == Some(from)) {
            self.end_send(id, outcome);
        }
    }

    pub(super) fn sends_lost(&mut self, conn: Conn, why: &str) {
        let of = |send: &Send| send.conn == Some(conn);
        let lost: Vec<_> =
            self.sends.iter().filter(|(_, send)| of(send)).map(|(id, _)| *id).collect();
        for id in lost {
            self.end_send(id, Outcome::new(Code::PeerLost, why));
        }
    }

    fn end_send(&mut self, id: SendId, outcome: Outcome) {
        let Some(send) = self.sends.remove(&id) else { return };
        self.timers.remove(&(send.until, Timer::Send(id)));
        if let Some(conn) = send.conn {
            self.free_conn(conn);
        }
        self.actions.push_back(Action::SendEnded { id, outcome });
    }
}
