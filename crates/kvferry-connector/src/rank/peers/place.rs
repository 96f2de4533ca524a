//! The place of an address that is consumed from.

use super::ReaderKey;
use kvferry::{Channel, Incarnation, Peer, Watch};
use kvferry_proto::handoff::PeerId;
use kvferry_proto::{Origin, Timestamp};
use std::time::Duration;

/// An address that is consumed from.
#[derive(Debug)]
pub(in crate::rank) struct Place {
    pub(in crate::rank) peer: Peer,
    /// The number of the last incarnation that was met there, or of the next one.
    pub(super) id: PeerId,
    /// The incarnation with this number, once a session has shown it. What another engine says of the address shows
    /// nothing.
    pub(super) incarnation: Option<Incarnation>,
    /// Where the last session led.
    pub(super) origin: Option<Origin>,
    /// The host that the place counts for: that of the engine by which it was needed last.
    pub(super) host: Origin,
    /// The key by which the supplier knows this rank as a reader, and the supplier's incarnation for which it was drawn.
    pub(super) key: Option<(Incarnation, ReaderKey)>,
    pub(super) opening: bool,
    /// The session that is being opened is needed for a message only.
    pub(super) opens_to_tell: bool,
    /// Connect once, although no handoff needs it: a message is waiting.
    pub(super) connect_once: bool,
    /// A producer there does not know yet that a handoff has ended.
    pub(super) unheard: bool,
    /// A call has got its number. What the machines need of it is known once their actions were taken.
    pub(super) reserved: bool,
    /// It is needed only to tell producers of an end, and counts among [`super::SPARE_MAX`].
    pub(super) spare: bool,
    /// Handoffs need it.
    pub(super) watched: bool,
    /// An engine handshake needs it, with any incarnation.
    pub(super) watched_handshake: bool,
    /// When to connect again to deliver a message, and the delay that led there.
    pub(super) retry: Option<(Timestamp, Duration)>,
    /// The session that was opened for this address, until its end was reported.
    pub(super) session: Option<Channel>,
    pub(super) watch: Option<Watch>,
    /// When its last session began, and how many in a row have ended soon as [`ErrorKind::Busy`].
    pub(super) began: Timestamp,
    pub(super) brief: u32,
    /// The call that used it last.
    pub(super) used: u64,
}

impl Place {
    pub(super) fn new(peer: &Peer, id: PeerId, host: Origin) -> Self {
        Self {
            peer: peer.clone(),
            id,
            incarnation: None,
            origin: None,
            host,
            key: None,
            opening: false,
            opens_to_tell: false,
            connect_once: false,
            unheard: false,
            reserved: false,
            spare: false,
            watched: false,
            watched_handshake: false,
            retry: None,
            session: None,
            watch: None,
            began: Timestamp::default(),
            brief: 0,
            used: 0,
        }
    }

    pub(super) const fn is_watched(&self) -> bool {
        self.watched || self.watched_handshake
    }

    pub(super) const fn is_up(&self) -> bool {
        self.session.is_some()
    }

    /// True if a handoff or a handshake needs it, or may do so soon, or has begun to open its session.
    pub(super) const fn is_needed(&self) -> bool {
        self.is_watched() || self.reserved || (self.opening && !self.opens_to_tell)
    }

    /// True if it is needed, and takes room from others.
    pub(super) const fn takes_room(&self) -> bool {
        self.is_needed() && !self.spare
    }

    /// True if it has a session, or will have one soon.
    pub(super) const fn takes_session(&self) -> bool {
        self.is_needed() || self.opening || self.is_up()
    }

    /// True if it waits without a session for a message to leave.
    pub(super) const fn waits_to_tell(&self) -> bool {
        !self.takes_session() && (self.unheard || self.connect_once)
    }

    /// The call number `used` reserves it. `reserved`: the places that are.
    pub(super) fn reserve(&mut self, used: u64, reserved: &mut Vec<PeerId>) {
        self.used = used;
        if !std::mem::replace(&mut self.reserved, true) {
            reserved.push(self.id);
        }
    }

    pub(super) fn update_watch(&mut self) {
        let session = self.session.as_ref().filter(|_| self.is_watched());
        self.watch = session.map(Channel::watch);
    }
}
