//! Requests and revokes, of either side.

use super::{Session, SessionEvent};
use crate::code::WireCode;
use crate::id::StreamId;
use crate::message::{
    BODY_MAX, Message, REVOKE_STREAMS_MAX, Request, Response, Revoke, Revoked, encode,
};
use crate::time::Timestamp;
use std::time::Duration;

/// Requests outstanding in one direction of a session.
pub const REQUESTS_MAX: usize = 1024;
/// Longest time that an answer waits for another frame. See [`Session::acknowledge`].
pub const ANSWER_DELAY: Duration = Duration::from_millis(10);

/// Revokes outstanding in one direction of a session.
pub const REVOKES_MAX: usize = 1024;

impl Session {
    /// Demands that the peer stops touching memory through these streams. Returns the demand's id.
    ///
    /// The answer is [`SessionEvent::Revoked`], or the end of the session. Returns 0, which is
    /// never an id, if nothing was sent: the session is not established, 1024 revokes are
    /// outstanding, or more than 4096 streams are named. The memory then stays in quarantine.
    pub fn revoke(&mut self, streams: Vec<StreamId>, now: Timestamp) -> u64 {
        if !self.wake(now)
            || !self.is_established()
            || self.revokes.len() >= REVOKES_MAX
            || streams.len() > REVOKE_STREAMS_MAX
        {
            return 0;
        }
        let id = self.fresh_id();
        self.revokes.insert(id);
        self.send(&Message::Revoke(Revoke { id, streams }));
        self.rewatch();
        id
    }

    /// Confirms a revoke of the peer: nothing on this side touches memory through its streams.
    pub fn confirm_revoked(&mut self, id: u64) {
        if self.owed_revokes.remove(&id) {
            self.send(&Message::Revoked(Revoked { id }));
        }
    }

    /// Sends a request to the layers above at the peer. Returns the request's id.
    ///
    /// Each request has exactly one [`SessionEvent::Response`]: from the peer, or from this session
    /// with `Deadline` after `budget`, `Closed` if the session is not established or ends,
    /// `TooLarge` for a body over 1 MiB less 1 KiB, `Busy` if 1024 requests are outstanding or the
    /// peer does not read. Returns 0, which is never an id and has no answer, if the session is
    /// closed or thousands of events were not polled.
    pub fn request(&mut self, kind: u16, body: Vec<u8>, budget: Duration, now: Timestamp) -> u64 {
        if !self.wake(now) || self.inbox.is_full() {
            return 0;
        }
        let id = self.fresh_id();
        let refusal = if !self.is_established() {
            Some(WireCode::Closed)
        } else if body.len() > BODY_MAX {
            Some(WireCode::TooLarge)
        } else if self.requests.len() >= REQUESTS_MAX || !self.outbox.has_room_for(body.len()) {
            Some(WireCode::Busy)
        } else {
            None
        };
        if let Some(code) = refusal {
            self.answer_ourselves(id, code);
            return id;
        }
        self.requests.insert(id, self.now + budget);
        let budget_ms = u32::try_from(budget.as_millis()).unwrap_or(u32::MAX).max(1);
        let request = Message::Request(Request { id, kind, budget_ms, body });
        let queued = self.outbox.push_asked(encode(&request));
        self.check_sent(queued);
        self.rewatch();
        id
    }

    /// Answers a request of the peer. No effect if it was answered or the session ended.
    ///
    /// If the body is too long or the queue is full, the peer gets `TooLarge` or `Busy` instead.
    pub fn respond(&mut self, id: u64, code: WireCode, body: Vec<u8>) {
        if self.owed_responses.remove(&id).is_none() {
            return;
        }
        let (code, body) = if body.len() > BODY_MAX {
            (WireCode::TooLarge, Vec::new())
        } else if !body.is_empty() && !self.outbox.has_room_for(body.len()) {
            (WireCode::Busy, Vec::new())
        } else {
            (code, body)
        };
        self.send(&Message::Response(Response { id, code, body }));
    }

    /// Answers a request of the peer with `Ok` and no body, when it costs least: behind the next frame,
    /// with [`WAITING_MAX`](super::WAITING_MAX) such answers, or after [`ANSWER_DELAY`]. No effect if it was answered or the
    /// session ended.
    pub fn acknowledge(&mut self, id: u64, now: Timestamp) {
        if !self.wake(now) {
            return;
        }
        let until = self.now + ANSWER_DELAY;
        match self.owed_responses.get(&id) {
            // The peer waits no longer than that.
            Some(deadline) if *deadline <= until => {
                return self.respond(id, WireCode::Ok, Vec::new());
            }
            Some(_) => drop(self.owed_responses.remove(&id)),
            None => return,
        }
        if !self.outbox.has_waiting() {
            self.waits_until = Some(until);
        }
        let response = Response { id, code: WireCode::Ok, body: Vec::new() };
        let queued = self.outbox.push_waiting(encode(&Message::Response(response)));
        self.check_sent(queued);
    }

    pub(super) fn on_revoke(&mut self, revoke: Revoke) {
        let Revoke { id, streams } = revoke;
        if self.owed_revokes.len() >= REVOKES_MAX {
            return self.abort(WireCode::Busy, "too many revokes outstanding");
        }
        if !self.owed_revokes.insert(id) {
            return self.abort(WireCode::Malformed, "a revoke's id is in use");
        }
        self.tell(SessionEvent::RevokeRequested { id, streams });
    }

    /// Whether this side waits for the confirmation.
    pub(super) fn on_revoked(&mut self, revoked: &Revoked) -> bool {
        let is_awaited = self.revokes.remove(&revoked.id);
        if is_awaited {
            self.tell(SessionEvent::Revoked { id: revoked.id });
        }
        is_awaited
    }

    pub(super) fn on_request(&mut self, request: Request) {
        let Request { id, kind, budget_ms, body } = request;
        if self.owed_responses.len() >= REQUESTS_MAX {
            // The peer does not wait for an answer to these any more.
            self.owed_responses.retain(|_, until| *until > self.now);
        }
        if self.owed_responses.contains_key(&id) {
            return self.abort(WireCode::Malformed, "a request's id is in use");
        }
        if self.owed_responses.len() >= REQUESTS_MAX {
            let busy = Response { id, code: WireCode::Busy, body: Vec::new() };
            return self.send(&Message::Response(busy));
        }
        let budget = match budget_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms.into()),
        };
        self.owed_responses.insert(id, self.now + budget);
        self.tell(SessionEvent::Request { id, kind, body });
    }

    /// Whether it answers a request of this side. An answer after `Deadline` is late, and no breach of
    /// the protocol.
    pub(super) fn on_response(&mut self, response: Response) -> bool {
        let Response { id, code, body } = response;
        if self.requests.remove(&id).is_some() {
            self.tell(SessionEvent::Response { id, code, body });
            return true;
        }
        let is_late = self.late_answers > 0;
        self.late_answers = self.late_answers.saturating_sub(1);
        is_late
    }

    fn fresh_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}
