//! Numbers of peers.
//!
//! The protocol knows a peer by a number ([`PeerId`]), which is of one incarnation of it. A peer names its incarnation
//! itself, and any peer can name that of another one. So a number depends on the session, too.
//!
//! * A *supplier* is an address that is consumed from. It is spoken to over the session that was opened to that
//!   address, and what arrives over another session is not the supplier's. Two incarnations at one address have two
//!   numbers.
//! * A *reader* is a session that asks for what is produced here. All sessions that name one [`ReaderKey`] are one
//!   reader, which may come back in another session. Each rank draws a key for each of its suppliers, and sends it to
//!   that supplier alone.
//!
//! Clients name addresses, and any number of addresses may lead to one incarnation. So addresses are bounded, in all and
//! for each incarnation on each host: an incarnation that another host claims takes no place of its own host.

use kvferry::{Channel, Incarnation, Peer, Watch};
use kvferry_proto::handoff::{PeerId, Refusal};
use kvferry_proto::rank_message::ReaderKey;
use kvferry_proto::{Origin, Timestamp};
use rustc_hash::{FxHashMap, FxHashSet};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// How long to wait before connecting again to a peer that must get a message, at first and at most.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_secs(15);
/// Sessions that end sooner as [`ErrorKind::Busy`], and how many of them in a row are opened again at once: a peer that
/// is short of memory ends each.
const BRIEF: Duration = Duration::from_secs(1);
const BRIEF_MAX: u32 = 3;

/// Addresses that are kept at most. If there are more, the sessions of those that nothing needs end, the least
/// recently used first; if all are needed, more are refused.
pub(super) const PLACES_MAX: usize = 1024;

/// Addresses of one incarnation on one host that are kept at most, each with a session. An engine has a name and an
/// address, or a few of them.
pub(super) const PLACES_OF_INCARNATION: usize = 8;

/// An address that is consumed from.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) peer: Peer,
    /// The number of the last incarnation that was met there, or of the next one.
    id: PeerId,
    /// The incarnation with this number, once a session has shown it. What another engine says of the address shows
    /// nothing.
    incarnation: Option<Incarnation>,
    /// Where the last session led.
    origin: Option<Origin>,
    /// The key by which the supplier knows this rank as a reader, and the supplier's incarnation for which it was drawn.
    key: Option<(Incarnation, ReaderKey)>,
    opening: bool,
    /// Connect once, although no handoff needs it: a message is waiting.
    connect_once: bool,
    /// Handoffs need it.
    watched: bool,
    /// An engine handshake needs it, with any incarnation.
    watched_handshake: bool,
    /// When to connect again to deliver a message, and the delay that led there.
    retry: Option<(Timestamp, Duration)>,
    /// The session that was opened for this address, until its end was reported.
    session: Option<Channel>,
    watch: Option<Watch>,
    /// When its last session began, and how many in a row have ended soon as [`ErrorKind::Busy`].
    began: Timestamp,
    brief: u32,
    /// The call that used it last.
    used: u64,
}

impl Place {
    const fn is_watched(&self) -> bool {
        self.watched || self.watched_handshake
    }

    const fn is_up(&self) -> bool {
        self.session.is_some()
    }

    /// Whether a handoff, a handshake or the opening of a channel needs it. A message that waits for a
    /// connection may be given up: peers end by timer what they are not told of.
    const fn is_needed(&self) -> bool {
        self.is_watched() || self.opening
    }

    fn update_watch(&mut self) {
        let session = self.session.as_ref().filter(|_| self.is_watched());
        self.watch = session.map(Channel::watch);
    }
}

/// A peer's number, and the incarnation that there is a channel to.
pub(super) type Numbered = Result<(PeerId, Option<Incarnation>), Refusal>;

/// The outcome of opening a channel to an address.
pub(super) enum Met {
    At {
        /// The number that is valid from now on.
        id: PeerId,
        /// The number of the incarnation that was there before, if it was another one.
        gone: Option<PeerId>,
        /// The end of the session before this one has not been reported yet, and will not be.
        is_replaced: bool,
        /// The key that the first message of the session names.
        key: Option<ReaderKey>,
    },
    /// The incarnation has too many addresses on its host already. The number of this one.
    Refused(PeerId),
}

/// A consumer of what is produced here.
#[derive(Debug, Default)]
struct Reader {
    /// The reader has named a key, so another session can be recognised as its own.
    has_key: bool,
    channels: Vec<Channel>,
    watched: bool,
    watch: Option<Watch>,
}

impl Reader {
    fn update_watch(&mut self) {
        // Over the channel that messages go over.
        let channel = self.channels.last().filter(|_| self.watched);
        self.watch = channel.map(Channel::watch);
    }
}

/// The reader and the supplier of a session whose end was reported.
#[derive(Debug, Default)]
pub(super) struct Ended {
    pub(super) reader: Option<EndedReader>,
    /// The number of the address that it was opened to.
    pub(super) supplier: Option<PeerId>,
    /// The supplier gave the session up, and has not done so with several before it soon after they began.
    pub(super) gives_place: bool,
}

#[derive(Debug)]
pub(super) struct EndedReader {
    pub(super) id: PeerId,
    /// The reader has another session.
    pub(super) is_up: bool,
    pub(super) may_return: bool,
}

#[derive(Debug, Default)]
pub(super) struct Peers {
    numbers: u64,
    places: FxHashMap<String, Place>,
    place_of: FxHashMap<PeerId, String>,
    readers: FxHashMap<PeerId, Reader>,
    /// The readers of sessions that have asked for something or have named a key.
    reader_of: FxHashMap<Channel, PeerId>,
    /// The suppliers of sessions that were opened to them.
    supplier_of: FxHashMap<Channel, PeerId>,
    /// Numbers of readers with keys.
    hasher: RandomState,
    /// [`Peers::take_unmet`], [`Peers::retry`] and [`Peers::forget_idle`] may find something.
    changed: bool,
    /// Whether any place has a `retry`.
    retrying: bool,
    /// Calls that used places.
    uses: u64,
    /// Peers with sessions that nothing needs.
    unneeded: Vec<Peer>,
    /// Addresses whose sessions have ended in a way after which another incarnation may be there.
    lost: Vec<String>,
}

impl Peers {
    fn number(&mut self) -> PeerId {
        self.numbers += 1;
        PeerId(self.numbers)
    }

    /// The numbers of the incarnations at the addresses of `peers`, each with the one that there is a channel to. Until
    /// one is met there, all that mean different ones have one number.
    ///
    /// # Errors
    /// [`Refusal::Addresses`]; [`Refusal::Restarted`] if there is a channel to another incarnation there, or handoffs wait
    /// for another one that was met.
    pub(super) fn places<'a>(
        &'a mut self,
        peers: impl IntoIterator<Item = (&'a Peer, Option<Incarnation>)> + 'a,
    ) -> impl Iterator<Item = Numbered> + 'a {
        self.uses += 1;
        peers.into_iter().map(|(peer, incarnation)| self.place(peer, incarnation))
    }

    fn place(&mut self, peer: &Peer, incarnation: Option<Incarnation>) -> Numbered {
        let address = peer.address();
        if !self.places.contains_key(address) {
            if self.places.len() >= PLACES_MAX && !self.make_room(|_| true) {
                return Err(Refusal::Addresses { limit: PLACES_MAX });
            }
            let id = self.number();
            let place = Place {
                peer: peer.clone(),
                id,
                incarnation: None,
                origin: None,
                key: None,
                opening: false,
                connect_once: false,
                watched: false,
                watched_handshake: false,
                retry: None,
                session: None,
                watch: None,
                began: Timestamp::default(),
                brief: 0,
                used: self.uses,
            };
            self.places.insert(address.to_owned(), place);
            self.place_of.insert(id, address.to_owned());
        }
        let place = self.places.get_mut(address).expect("there now");
        place.used = self.uses;
        let is_up = place.is_up();
        if !is_up {
            // The name may have been looked up again since.
            place.peer = peer.clone();
            if !place.watched {
                // No handoff needs the incarnation that was there: the caller means the next one, or this one. What is
                // left to say to it is said to no other one.
                place.incarnation = None;
            }
        }
        if let (Some(meant), Some(met)) = (incarnation, place.incarnation)
            && meant != met
        {
            return Err(Refusal::Restarted);
        }
        Ok((place.id, place.incarnation.filter(|_| is_up)))
    }

    /// Forgets the least recently used address that nothing needs, of those that `may_go`. False if there
    /// is none. Those of the current call stay.
    fn make_room(&mut self, may_go: impl Fn(&Place) -> bool) -> bool {
        let now = self.uses;
        let is_idle = |place: &Place| !place.is_needed() && place.used < now && may_go(place);
        let idle = self.places.iter().filter(|(_, place)| is_idle(place));
        let oldest = idle.min_by_key(|(_, place)| place.used).map(|(address, _)| address.clone());
        let Some(address) = oldest else { return false };
        let place = self.places.remove(&address).expect("found above");
        self.place_of.remove(&place.id);
        if let Some(session) = &place.session {
            self.supplier_of.remove(session);
            self.end_session(place.peer);
        }
        true
    }

    fn end_session(&mut self, peer: Peer) {
        self.unneeded.push(peer);
        self.changed = true;
    }

    /// Peers whose sessions are to be ended.
    pub(super) fn take_unneeded(&mut self) -> Vec<Peer> {
        std::mem::take(&mut self.unneeded)
    }

    /// Addresses at which another incarnation may be: their sessions have ended since the last call, and not for want of
    /// places.
    pub(super) fn take_lost(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lost)
    }

    /// Has the peer connected to once, to get a message.
    pub(super) fn connect_once(&mut self, id: PeerId) {
        if let Some((_, place)) = self.place_of(id) {
            place.connect_once = true;
        }
        self.changed = true;
    }

    /// Peers to open a channel to; each counts as being opened from now on.
    pub(super) fn take_unmet(&mut self) -> Vec<(String, Peer)> {
        self.changed = false;
        let mut unmet = Vec::new();
        for (address, place) in &mut self.places {
            let is_needed = place.is_watched() || place.connect_once;
            if is_needed && !place.opening && !place.is_up() {
                place.opening = true;
                unmet.push((address.clone(), place.peer.clone()));
            }
            place.connect_once = false;
        }
        unmet
    }

    /// Schedules connections to the peers in `unheard`, which must get a message; all others have got
    /// theirs. Returns when to call this again.
    pub(super) fn retry(
        &mut self,
        unheard: impl Iterator<Item = PeerId>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let unheard: FxHashSet<PeerId> = unheard.collect();
        if unheard.is_empty() && !self.retrying {
            return None;
        }
        self.retrying = false;
        let mut next = None;
        for place in self.places.values_mut() {
            if !unheard.contains(&place.id) || place.is_up() || place.opening {
                place.retry = place.retry.filter(|_| place.opening);
                self.retrying |= place.retry.is_some();
                continue;
            }
            let (at, wait) = match place.retry {
                None => (now + RETRY_FIRST, RETRY_FIRST),
                Some((at, wait)) if at <= now => {
                    place.connect_once = true;
                    let wait = (2 * wait).min(RETRY_LAST);
                    (now + wait, wait)
                }
                Some(later) => later,
            };
            place.retry = Some((at, wait));
            self.retrying = true;
            next = Some(next.map_or(at, |next: Timestamp| next.min(at)));
        }
        next
    }

    /// The channel to an address did not open: the number there.
    pub(super) fn not_met_at(&mut self, address: &str) -> Option<PeerId> {
        self.changed = true;
        let place = self.places.get_mut(address)?;
        place.opening = false;
        Some(place.id)
    }

    /// The address of a number, and what is there.
    pub(super) fn place_of(&mut self, id: PeerId) -> Option<(&str, &mut Place)> {
        let address = self.place_of.get(&id)?;
        let place = self.places.get_mut(address)?;
        (place.id == id).then_some((address.as_str(), place))
    }

    /// The channel to a reader or a supplier.
    pub(super) fn channel(&self, id: PeerId) -> Option<&Channel> {
        if let Some(reader) = self.readers.get(&id) {
            return reader.channels.last();
        }
        let place = self.places.get(self.place_of.get(&id)?)?;
        place.session.as_ref().filter(|_| place.id == id)
    }

    /// A channel to an address opened.
    pub(super) fn met_at(
        &mut self,
        address: &str,
        channel: &Channel,
        now: Timestamp,
    ) -> Option<Met> {
        let fresh = self.number();
        let incarnation = channel.incarnation();
        let origin = Origin::from(channel.peer_ip());
        let place = self.places.get_mut(address)?;
        place.opening = false;
        let id = place.id;
        if !self.has_room_for(incarnation, origin, id) {
            let place = self.places.get(address)?;
            self.end_session(place.peer.clone());
            return Some(Met::Refused(id));
        }
        let place = self.places.get_mut(address)?;
        place.origin = Some(origin);
        place.began = now;
        let before = place.session.replace(channel.clone());
        let is_replaced = before.as_ref().is_some_and(|before| before != channel);
        let gone = match place.incarnation.replace(incarnation) {
            Some(before) if before != incarnation => {
                let gone = std::mem::replace(&mut place.id, fresh);
                // The handoffs with the other incarnation end. Those with this one set `watched` again.
                place.watched = false;
                self.place_of.remove(&gone);
                self.place_of.insert(fresh, address.to_owned());
                Some(gone)
            }
            _ => None,
        };
        if place.key.is_none_or(|(of, _)| of != incarnation) {
            // Without random bytes, the peer takes each session of this rank for another reader.
            let key = kvferry_sys::random::bytes().ok().map(ReaderKey);
            place.key = key.map(|key| (incarnation, key));
        }
        let key = place.key.map(|(_, key)| key).filter(|_| before.as_ref() != Some(channel));
        place.update_watch();
        let id = place.id;
        if let Some(before) = before {
            self.supplier_of.remove(&before);
        }
        self.supplier_of.insert(channel.clone(), id);
        Some(Met::At { id, gone, is_replaced, key })
    }

    /// Whether the incarnation of a host may have the address with this number beside its others. Forgets one of these if
    /// need be.
    fn has_room_for(&mut self, incarnation: Incarnation, origin: Origin, id: PeerId) -> bool {
        let is_other = |place: &Place| {
            place.incarnation == Some(incarnation) && place.origin == Some(origin) && place.id != id
        };
        let others = self.places.values().filter(|place| is_other(place)).count();
        others < PLACES_OF_INCARNATION || self.make_room(is_other)
    }

    /// The number of the address that a channel was opened to.
    pub(super) fn supplier(&self, channel: &Channel) -> Option<PeerId> {
        self.supplier_of.get(channel).copied()
    }

    /// The number of a channel's peer as a reader. A peer that has named no key is another reader in each session.
    pub(super) fn reader(&mut self, channel: &Channel) -> PeerId {
        if let Some(reader) = self.reader_of.get(channel) {
            return *reader;
        }
        let id = self.number();
        self.enter_reader(id, channel, false);
        id
    }

    /// The peer of a channel has named its key: its number, unless the channel has a reader already.
    pub(super) fn came(&mut self, channel: &Channel, key: &ReaderKey) -> Option<PeerId> {
        if self.reader_of.contains_key(channel) {
            return None;
        }
        // The same for as long as this rank lives: what the reader confirmed is remembered for longer than its
        // session. Other numbers count up from 1.
        let id = PeerId(self.hasher.hash_one(key) | 1 << 63);
        self.enter_reader(id, channel, true);
        Some(id)
    }

    fn enter_reader(&mut self, id: PeerId, channel: &Channel, has_key: bool) {
        self.reader_of.insert(channel.clone(), id);
        let reader = self.readers.entry(id).or_default();
        reader.has_key = has_key;
        reader.channels.push(channel.clone());
        reader.update_watch();
    }

    /// A channel ended; `is_displaced`: an idle session that gave its place to a newer one, of a peer that lives.
    pub(super) fn ended(&mut self, channel: &Channel, is_displaced: bool, now: Timestamp) -> Ended {
        self.changed = true;
        let supplier = self.supplier_of.remove(channel);
        let mut gives_place = false;
        if let Some((address, place)) = supplier.and_then(|id| self.place_of(id)) {
            (place.session, place.watch) = (None, None);
            let is_brief = is_displaced && now < place.began + BRIEF;
            place.brief = if is_brief { place.brief + 1 } else { 0 };
            gives_place = is_displaced && place.brief <= BRIEF_MAX;
            if !is_displaced {
                let address = address.to_owned();
                self.lost.push(address);
            }
        }
        let reader = self.reader_of.remove(channel).and_then(|id| {
            let reader = self.readers.get_mut(&id)?;
            reader.channels.retain(|other| other != channel);
            reader.update_watch();
            let is_up = !reader.channels.is_empty();
            Some(EndedReader { id, is_up, may_return: reader.has_key })
        });
        Ended { reader, supplier, gives_place }
    }

    /// Starts or stops the heartbeat to a peer for its handoffs.
    pub(super) fn watch(&mut self, id: PeerId, on: bool) {
        if let Some(reader) = self.readers.get_mut(&id) {
            self.changed |= reader.channels.is_empty();
            reader.watched = on;
            reader.update_watch();
        } else {
            self.watch_place(id, |place| place.watched = on);
        }
    }

    /// Starts or stops the heartbeat to a peer for an engine handshake.
    pub(super) fn watch_handshake(&mut self, id: PeerId, on: bool) {
        self.watch_place(id, |place| place.watched_handshake = on);
    }

    fn watch_place(&mut self, id: PeerId, change: impl FnOnce(&mut Place)) {
        self.changed |= self.channel(id).is_none();
        let Some((_, place)) = self.place_of(id) else { return };
        change(place);
        place.update_watch();
    }

    /// Forgets addresses and readers that nothing needs and that have no channel.
    pub(super) fn forget_idle(&mut self) {
        let Self { readers, places, place_of, .. } = self;
        readers.retain(|_, reader| reader.watched || !reader.channels.is_empty());
        places.retain(|_, place| {
            let is_needed = place.is_watched() || place.connect_once || place.retry.is_some();
            let keep = is_needed || place.opening || place.is_up();
            if !keep {
                place_of.remove(&place.id);
            }
            keep
        });
    }

    /// Whether the rank's thread has to look after peers.
    pub(super) const fn are_changed(&self) -> bool {
        self.changed
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() + self.readers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry::Agent;
    use std::net::IpAddr;

    #[test]
    fn addresses_that_claim_an_incarnation_from_another_host_leave_its_own_host_its_addresses() {
        let agent = Agent::builder().listen(([127, 0, 0, 1], 0)).start().expect("an agent");
        let mut peers = Peers::default();
        let incarnation = Incarnation(7);
        let origin = |host: u8| Origin::from(IpAddr::from([10, 0, 0, host]));
        let number = |peers: &mut Peers, peer: &Peer| {
            let place = peers.places([(peer, None)]).next().expect("one for each");
            place.expect("there is room").0
        };
        for n in 0..PLACES_OF_INCARNATION {
            let peer = agent.peer(&format!("10.0.0.9:{}", 1 + n)).expect("an address");
            let id = number(&mut peers, &peer);
            assert!(peers.has_room_for(incarnation, origin(9), id));
            let (_, place) = peers.place_of(id).expect("it is there");
            (place.incarnation, place.origin, place.watched) =
                (Some(incarnation), Some(origin(9)), true);
        }
        let peer = agent.peer("10.0.0.1:1").expect("an address");
        let id = number(&mut peers, &peer);
        assert!(peers.has_room_for(incarnation, origin(1), id), "its own host");
        assert!(!peers.has_room_for(incarnation, origin(9), id), "all of its addresses are needed");
    }
}
