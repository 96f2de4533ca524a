//! The connections that belong to a session, and their proofs. Each stream id may open one stream.

use super::{Session, Side, State};
use crate::auth::{
    MAC_LEN, ProofLabel, SessionKey, macs_equal, stream_answer_mac, stream_mac, stream_seals,
};
use crate::code::WireCode;
use crate::frame::MAGIC;
use crate::id::{SessionId, StreamId};
use crate::keyed::Guard;
use crate::message::{Message, StreamHello, encode};

impl Session {
    /// Acceptor: whether a connection may become a stream of this session. Uses up the stream id.
    ///
    /// # Errors
    /// The code to refuse the connection with: `UnknownSession` (also while not established),
    /// `StaleIncarnation`, `AuthFailed`, or `StreamReplayed`.
    pub fn verify_stream(&mut self, hello: &StreamHello) -> Result<(), WireCode> {
        self.verify_hello(hello, stream_mac)
    }

    /// Acceptor: whether a connection of the transport with this label belongs to this session.
    /// Uses up the stream id.
    ///
    /// # Errors
    /// As [`Session::verify_stream`].
    pub fn verify_proof(&mut self, label: ProofLabel, hello: &StreamHello) -> Result<(), WireCode> {
        self.verify_hello(hello, |key, session, stream| label.hello_mac(key, session, stream))
    }

    fn verify_hello(
        &mut self,
        hello: &StreamHello,
        mac: impl FnOnce(&SessionKey, SessionId, StreamId) -> [u8; MAC_LEN],
    ) -> Result<(), WireCode> {
        if hello.incarnation != self.cfg.incarnation {
            return Err(WireCode::StaleIncarnation);
        }
        let (State::Established, Side::Acceptor, Some(key), Some(peer)) =
            (&self.state, self.side, &self.key, &self.peer)
        else {
            return Err(WireCode::UnknownSession);
        };
        if hello.session != peer.session {
            return Err(WireCode::UnknownSession);
        }
        // Before the id: without the key a caller can neither use up ids nor learn used ones.
        if !macs_equal(&mac(key, hello.session, hello.stream), &hello.mac) {
            return Err(WireCode::AuthFailed);
        }
        if self.streams.use_up(hello.stream) { Ok(()) } else { Err(WireCode::StreamReplayed) }
    }

    /// Initiator: the first bytes of a new connection that is to become a stream of this session,
    /// magic included. `None` unless established.
    pub fn stream_hello(&mut self) -> Option<(StreamId, Vec<u8>)> {
        self.hello(stream_mac)
    }

    /// Initiator: the first bytes of a connection of the transport with this label. They open no data
    /// stream. `None` unless established.
    pub fn prove(&mut self, label: ProofLabel) -> Option<(StreamId, Vec<u8>)> {
        self.hello(|key, session, stream| label.hello_mac(key, session, stream))
    }

    fn hello(
        &mut self,
        mac: impl FnOnce(&SessionKey, SessionId, StreamId) -> [u8; MAC_LEN],
    ) -> Option<(StreamId, Vec<u8>)> {
        let (State::Established, Side::Initiator, Some(key), Some(peer)) =
            (&self.state, self.side, &self.key, &self.peer)
        else {
            return None;
        };
        self.last_stream = self.last_stream.checked_add(1)?;
        let stream = StreamId(self.last_stream);
        let hello = encode(&Message::StreamHello(StreamHello {
            session: peer.session,
            stream,
            incarnation: peer.incarnation,
            mac: mac(key, peer.session, stream),
        }));
        Some((stream, [&MAGIC[..], &hello].concat()))
    }

    /// Returns the protection of the heads of a stream of this session, for the lane at this end. To be called once for
    /// each stream: a second guard would count the frames from the start again. `None` unless established.
    pub fn stream_guard(&self, stream: StreamId) -> Option<Guard> {
        let (State::Established, Some(key), Some(peer)) = (&self.state, &self.key, &self.peer)
        else {
            return None;
        };
        Some(if peer.authenticated {
            Guard::Keyed(Box::new(stream_seals(key, peer.session, stream, self.side)))
        } else {
            Guard::Crc
        })
    }

    /// Acceptor: the proof in the answer to the opening of a stream, of a session with a secret. `code` is
    /// [`WireCode::Ok`] if the stream is accepted.
    pub fn stream_answer(&self, stream: StreamId, code: WireCode) -> Option<Vec<u8>> {
        self.answer_mac(stream, code).map(Vec::from)
    }

    /// Initiator: whether the answer to the opening of a stream is the acceptor's. Always, where the
    /// session has no secret.
    pub fn is_stream_answer(&self, stream: StreamId, code: WireCode, mac: Option<&[u8]>) -> bool {
        match self.answer_mac(stream, code) {
            Some(ours) => {
                mac.and_then(|it| it.try_into().ok()).is_some_and(|it| macs_equal(&ours, it))
            }
            None => self.peer.as_ref().is_none_or(|peer| !peer.authenticated),
        }
    }

    fn answer_mac(&self, stream: StreamId, code: WireCode) -> Option<[u8; MAC_LEN]> {
        let (key, peer) = (self.key.as_ref()?, self.peer.as_ref()?);
        peer.authenticated.then(|| stream_answer_mac(key, peer.session, stream, code))
    }

    /// The proof in the acceptor's answer to the hello of [`Session::prove`], for both sides. `None`
    /// unless established.
    pub fn answer_proof(&self, label: ProofLabel, stream: StreamId) -> Option<[u8; MAC_LEN]> {
        let (key, peer) = (self.key.as_ref()?, self.peer.as_ref()?);
        Some(label.answer_mac(key, peer.session, stream))
    }
}

/// Ids less than this below the highest one are tracked; lower ones count as used.
const WINDOW: usize = 1024;
const WORD: usize = u64::BITS as usize;

/// A sliding window over the ids of a session, as for replay protection in packet protocols. The
/// initiator counts up, connections may arrive out of order, and the memory is fixed.
#[derive(Clone, Debug)]
pub(super) struct StreamWindow {
    /// The highest id seen, plus one.
    end: u64,
    /// Bit `id % WINDOW` of each id in `end - WINDOW..end`: used.
    used: [u64; WINDOW / WORD],
}

impl StreamWindow {
    pub(super) const fn new() -> Self {
        Self { end: 0, used: [0; WINDOW / WORD] }
    }

    /// Marks `stream` used; `false` if it was used before, or is too old to tell.
    pub(super) fn use_up(&mut self, stream: StreamId) -> bool {
        let id = u64::from(stream.0);
        if id >= self.end {
            // The skipped ids and this one replace ids that leave the window.
            for fresh in self.end.max((id + 1).saturating_sub(WINDOW as u64))..=id {
                self.set(fresh, false);
            }
            self.end = id + 1;
        } else if id + (WINDOW as u64) < self.end || self.is_set(id) {
            return false;
        }
        self.set(id, true);
        true
    }

    fn is_set(&self, id: u64) -> bool {
        let (word, bit) = Self::place(id);
        self.used[word] & bit != 0
    }

    fn set(&mut self, id: u64, used: bool) {
        let (word, bit) = Self::place(id);
        if used {
            self.used[word] |= bit;
        } else {
            self.used[word] &= !bit;
        }
    }

    const fn place(id: u64) -> (usize, u64) {
        let slot = (id % WINDOW as u64) as usize;
        (slot / WORD, 1 << (slot % WORD))
    }
}
