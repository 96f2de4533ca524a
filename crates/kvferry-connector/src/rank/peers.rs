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
//!
//! The place of an address is *needed* while a handoff or an engine handshake waits for it; hosts share the room for such
//! places ([`super::room`]). A place is *telling* if nothing needs it and a producer there does not know yet that a handoff
//! has ended. Telling takes no room from places that are needed, nor waits for it: few sessions at a time are opened for it,
//! also beyond the limit. Other places are *idle*, and are kept as long as their sessions live and their room is not needed.

mod place;

use super::room::{Counts, sessions_max};
use kvferry::{Channel, Incarnation, Peer, Watch};
use kvferry_proto::handoff::{PeerId, Refusal};
use kvferry_proto::rank_message::ReaderKey;
use kvferry_proto::{Origin, Timestamp};
use kvferry_sys::fd;
pub(super) use place::Place;
use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// How long to wait before connecting again to a peer that must get a message, at first and at most.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_secs(15);
/// Sessions that end sooner as [`ErrorKind::Busy`], and how many of them in a row are opened again at once: a peer that
/// is short of memory ends each.
const BRIEF: Duration = Duration::from_secs(1);
const BRIEF_MAX: u32 = 3;

/// Addresses without a session that are kept at most to tell producers of ends. If there are more, the oldest of the host
/// with most goes: its producers free their blocks by timer.
const TELLING_MAX: usize = 1024;

/// Sessions that are opened at a time at most only to tell producers of ends.
const OPENING_TO_TELL_MAX: usize = 16;

/// Engines that are learned at a time at most, only to tell their ranks of ends, where there is no room for others.
const SPARE_MAX: usize = 16;

/// Addresses of one incarnation on one host that are kept at most, each with a session. An engine has a name and an
/// address, or a few of them.
pub(super) const PLACES_OF_INCARNATION: usize = 8;

/// The host that a peer's address leads to.
pub(crate) fn host_of(peer: &Peer) -> Option<Origin> {
    peer.socket_addrs().first().map(|address| Origin::from(address.ip()))
}

/// The host that a place counts for.
fn count_for(host: Option<Origin>, peer: &Peer) -> Origin {
    // The addresses of each peer that was looked up are known.
    let unknown = || Origin::from(IpAddr::from(Ipv4Addr::UNSPECIFIED));
    host.or_else(|| host_of(peer)).unwrap_or_else(unknown)
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
    /// A place may be `unheard` or have a `retry`.
    retrying: bool,
    /// A place waits until a session may be opened to tell its producer.
    waits_to_tell: bool,
    /// Calls that used places.
    uses: u64,
    /// The numbers of places that are reserved.
    reserved: Vec<PeerId>,
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

    /// The numbers of the incarnations at the addresses of `peers`, each with the one that there is a channel to, for a
    /// caller that needs them. Until one is met there, all that mean different ones have one number. The places count for
    /// `host`, or each for its own.
    ///
    /// # Errors
    /// [`Refusal::Addresses`]; [`Refusal::Restarted`] if there is a channel to another incarnation there, or handoffs wait
    /// for another one that was met.
    pub(super) fn places<'a>(
        &mut self,
        host: Option<Origin>,
        peers: impl IntoIterator<Item = (&'a Peer, Option<Incarnation>)>,
    ) -> Vec<Numbered> {
        self.uses += 1;
        let mut counts = None;
        let number = |(peer, meant)| {
            self.reserve(&mut counts, host, peer, false)?;
            self.number_at(peer, meant)
        };
        peers.into_iter().map(number).collect()
    }

    /// The number of a peer whose engine is learned, as [`Peers::places`] returns it: `to_tell` if only for the message of
    /// an end, which a few get where there is no room.
    ///
    /// # Errors
    /// Those of [`Peers::places`].
    pub(super) fn place_to_learn(&mut self, peer: &Peer, to_tell: bool) -> Numbered {
        self.uses += 1;
        self.reserve(&mut None, None, peer, to_tell)?;
        self.number_at(peer, None)
    }

    /// The numbers of peers that get a message of an end, as [`Peers::places`] returns them. They need no room.
    ///
    /// # Errors
    /// Those of [`Peers::places`]; [`Refusal::Addresses`] only if the call itself has too many.
    pub(super) fn places_to_tell<'a>(
        &mut self,
        host: Option<Origin>,
        peers: impl IntoIterator<Item = (&'a Peer, Option<Incarnation>)>,
    ) -> Vec<Numbered> {
        self.uses += 1;
        let (mut counts, mut is_full) = (None, false);
        let number = |(peer, meant): (&'a Peer, _)| {
            if !self.places.contains_key(peer.address()) {
                if is_full {
                    return Err(Refusal::Addresses { limit: TELLING_MAX });
                }
                let host = count_for(host, peer);
                let room = self.make_room_to_tell(&mut counts, host);
                is_full = room.is_err();
                room?;
                self.enter(peer, host);
            }
            let place = self.places.get_mut(peer.address()).expect("there now");
            (place.used, place.unheard) = (self.uses, true);
            self.retrying = true;
            self.number_at(peer, meant)
        };
        peers.into_iter().map(number).collect()
    }

    /// Has a place for a peer that the caller needs, unless its host has too many; `may_be_spare` if it may be one of the few
    /// beyond. `counts` are of places that take room, and of those that have a session or will have one.
    fn reserve(
        &mut self,
        counts: &mut Option<(Counts, Counts)>,
        host: Option<Origin>,
        peer: &Peer,
        may_be_spare: bool,
    ) -> Result<(), Refusal> {
        let before = self.places.get_mut(peer.address());
        let before_is_up = before.as_ref().is_some_and(|place| place.is_up());
        if let Some(place) = before.filter(|it| it.takes_room() || may_be_spare && it.is_needed()) {
            place.reserve(self.uses, &mut self.reserved);
            return Ok(());
        }
        let (host, limit) = (count_for(host, peer), sessions_max(fd::limit()));
        let (needed, up) = counts.get_or_insert_with(|| {
            (self.count(Place::takes_room), self.count(Place::takes_session))
        });
        // Sessions that open, which may lead nowhere, do not keep out one that there is.
        let is_up = |place: &Place| place.takes_room() && place.is_up();
        let may_be_beyond = before_is_up && needed.all() < limit - limit / 8;
        let has_room = needed.has_room_for(host, limit)
            || (may_be_beyond && self.count(is_up).has_room_for(host, limit / 2));
        let may_be_spare = may_be_spare && up.all() < limit + SPARE_MAX + OPENING_TO_TELL_MAX;
        let is_spare = || {
            let spare = self.count(|place| place.is_needed() && place.spare);
            may_be_spare && spare.has_room_for(host, SPARE_MAX)
        };
        if !has_room && !is_spare() {
            return Err(Refusal::Addresses { limit });
        }
        match self.places.get(peer.address()) {
            Some(place) if place.takes_session() => up.remove(place.host),
            Some(_) => {}
            None => self.enter(peer, host),
        }
        let place = self.places.get_mut(peer.address()).expect("there now");
        place.reserve(self.uses, &mut self.reserved);
        (place.spare, place.host) = (!has_room, host);
        // What remains beyond the limit are few sessions, needed only to tell producers of ends.
        while up.all() >= limit && self.end_unneeded(up, |_| true) {}
        up.add(host);
        if has_room {
            needed.add(host);
        }
        Ok(())
    }

    /// The machines have said what they need of the places that calls have got so far.
    pub(super) fn settle(&mut self) {
        let mut ids = std::mem::take(&mut self.reserved);
        for id in ids.drain(..) {
            if let Some((_, place)) = self.place_of(id) {
                place.reserved = false;
                // It may be one to forget.
                self.changed |= !place.takes_session();
            }
        }
        self.reserved = ids;
    }

    fn enter(&mut self, peer: &Peer, host: Origin) {
        let id = self.number();
        self.places.insert(peer.address().to_owned(), Place::new(peer, id, host));
        self.place_of.insert(id, peer.address().to_owned());
    }

    fn number_at(&mut self, peer: &Peer, incarnation: Option<Incarnation>) -> Numbered {
        let place = self.places.get_mut(peer.address()).expect("the caller has entered it");
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

    fn count(&self, which: impl Fn(&Place) -> bool) -> Counts {
        self.places.values().filter(|place| which(place)).map(|place| place.host).collect()
    }

    /// Ends a session that nothing needs, of those that `may_go`: one that has told its producer all, of the host with most
    /// sessions in the network with most, the least recently used first. Those that have not are opened again. False if
    /// there is none. `up` are the counts of sessions.
    fn end_unneeded(&mut self, up: &mut Counts, may_go: impl Fn(&Place) -> bool) -> bool {
        let Some(address) = self.unneeded_session(up, may_go) else { return false };
        let place = self.places.get_mut(&address).expect("found above");
        up.remove(place.host);
        if !place.unheard {
            self.forget(&address);
            return true;
        }
        place.watch = None;
        if let Some(session) = place.session.take() {
            self.supplier_of.remove(&session);
        }
        let peer = place.peer.clone();
        self.retrying = true;
        self.end_session(peer);
        true
    }

    fn unneeded_session(&self, up: &Counts, may_go: impl Fn(&Place) -> bool) -> Option<String> {
        let is_unneeded = |place: &Place| place.is_up() && !place.is_needed() && !place.opening;
        let unneeded = self.places.iter().filter(|(_, it)| is_unneeded(it) && may_go(it));
        let first = unneeded
            .min_by_key(|(_, place)| (place.unheard, Reverse(up.of(place.host)), place.used));
        first.map(|(address, _)| address.clone())
    }

    /// Forgets a place that nothing needs, and ends its session.
    fn forget(&mut self, address: &str) {
        let Some(place) = self.places.remove(address) else { return };
        self.place_of.remove(&place.id);
        if let Some(session) = &place.session {
            self.supplier_of.remove(session);
            self.end_session(place.peer);
        }
    }

    /// Forgets a place that waits to tell its producer, if there are as many as may be: the oldest one of the host with most.
    /// `counts` are of those that wait, as this call and those before it have left them. The next place, for `host`, counts.
    fn make_room_to_tell(
        &mut self,
        counts: &mut Option<Counts>,
        host: Origin,
    ) -> Result<(), Refusal> {
        if counts.is_none() && self.places.len() < TELLING_MAX {
            return Ok(());
        }
        let counts = counts.get_or_insert_with(|| self.count(Place::waits_to_tell));
        if counts.all() < TELLING_MAX {
            counts.add(host);
            return Ok(());
        }
        let now = self.uses;
        let waiting = self.places.iter();
        let waiting = waiting.filter(|(_, place)| place.waits_to_tell() && place.used < now);
        let oldest = waiting.min_by_key(|(_, it)| (Reverse(counts.of(it.host)), it.used));
        let Some(oldest) = oldest.map(|(address, _)| address.clone()) else {
            return Err(Refusal::Addresses { limit: TELLING_MAX });
        };
        counts.remove(self.places[&oldest].host);
        counts.add(host);
        self.forget(&oldest);
        Ok(())
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

    /// Has the peer connected to once, to get a message of an end.
    pub(super) fn connect_once(&mut self, id: PeerId) {
        if let Some((_, place)) = self.place_of(id) {
            place.connect_once = true;
        }
        self.changed = true;
    }

    /// Peers to open a channel to; each counts as being opened from now on. The machines have said what they need.
    pub(super) fn take_unmet(&mut self, now: Timestamp) -> Vec<(String, Peer)> {
        self.settle();
        self.changed = false;
        let mut unmet = Vec::new();
        for (address, place) in &mut self.places {
            if place.is_watched() && !place.opening && !place.is_up() {
                place.opening = true;
                unmet.push((address.clone(), place.peer.clone()));
            }
            place.connect_once &= !place.opening && !place.is_up();
        }
        self.open_to_tell(&mut unmet, now);
        unmet
    }

    /// Begins to open sessions to peers that only get messages: to those of the hosts with fewest first.
    fn open_to_tell(&mut self, unmet: &mut Vec<(String, Peer)>, now: Timestamp) {
        self.waits_to_tell = self.places.values().any(|place| place.connect_once);
        if !self.waits_to_tell {
            return;
        }
        let limit = sessions_max(fd::limit());
        let mut up = self.count(Place::takes_session);
        let mut opening = self.count(|place| place.opening && place.opens_to_tell);
        // A session has this long to get its messages through.
        let may_go = |place: &Place| !place.unheard || place.began + BRIEF <= now;
        while opening.all() < OPENING_TO_TELL_MAX {
            let waiting = self.places.iter().filter(|(_, place)| place.connect_once);
            let next = waiting.min_by_key(|(_, place)| (opening.of(place.host), place.used));
            let Some(address) = next.map(|(address, _)| address.clone()) else {
                self.waits_to_tell = false;
                return;
            };
            let is_full = up.all() >= limit && !self.end_unneeded(&mut up, may_go);
            if is_full && up.all() >= limit + SPARE_MAX + OPENING_TO_TELL_MAX {
                return;
            }
            let place = self.places.get_mut(&address).expect("found above");
            (place.opening, place.opens_to_tell, place.connect_once) = (true, true, false);
            opening.add(place.host);
            up.add(place.host);
            unmet.push((address, place.peer.clone()));
        }
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
            place.unheard = unheard.contains(&place.id);
            self.retrying |= place.unheard;
            if !place.unheard || place.is_up() || place.opening {
                place.retry = place.retry.filter(|_| place.opening);
                self.retrying |= place.retry.is_some();
                continue;
            }
            let (at, wait) = match place.retry {
                None => (now + RETRY_FIRST, RETRY_FIRST),
                Some((at, wait)) if at <= now => {
                    // One that still waits for its turn was not tried since.
                    let wait = if place.connect_once { wait } else { (2 * wait).min(RETRY_LAST) };
                    place.connect_once = true;
                    (now + wait, wait)
                }
                Some(later) => later,
            };
            place.retry = Some((at, wait));
            next = Some(next.map_or(at, |next: Timestamp| next.min(at)));
        }
        next
    }

    /// The channel to an address did not open: the number there.
    pub(super) fn not_met_at(&mut self, address: &str) -> Option<PeerId> {
        self.changed = true;
        let place = self.places.get_mut(address)?;
        (place.opening, place.opens_to_tell) = (false, false);
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
        self.changed |= self.waits_to_tell;
        let place = self.places.get_mut(address)?;
        (place.opening, place.opens_to_tell) = (false, false);
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
                if place.reserved {
                    self.reserved.push(fresh);
                }
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
        if others < PLACES_OF_INCARNATION {
            return true;
        }
        let other = self.unneeded_session(&Counts::default(), is_other);
        other.is_some_and(|other| {
            self.forget(&other);
            true
        })
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

    /// Forgets addresses and readers that nothing needs and that have no channel. The machines have said what they need.
    pub(super) fn forget_idle(&mut self) {
        let Self { readers, places, place_of, .. } = self;
        readers.retain(|_, reader| reader.watched || !reader.channels.is_empty());
        places.retain(|_, place| {
            let tells = place.unheard || place.connect_once || place.retry.is_some();
            let keep = tells || place.takes_session();
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
mod tests;
