//! Numbers of peers.
//!
//! The protocol knows lives of peers by numbers ([`PeerId`]). A life that was met has an incarnation;
//! before that a consumer knows an address, which has a number already. Two lives at one address have
//! two numbers; two sessions with one life have one.
//!
//! Clients name addresses, and any number of addresses may lead to one life. So addresses are bounded, in all
//! and for each life, and those of one life share one session: see [`Peers::met_at`].

use kvferry::{Channel, Incarnation, Peer, Watch};
use kvferry_proto::Timestamp;
use kvferry_proto::handoff::{PeerId, Refusal};
use rustc_hash::{FxHashMap, FxHashSet};
use std::time::Duration;

/// How long to wait before connecting again to a peer that must get a message, at first and at most.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_secs(15);

/// Addresses that are kept at most. If there are more, the sessions of those that nothing needs end, the least
/// recently used first; if all are needed, more are refused.
pub(super) const PLACES_MAX: usize = 1024;

/// Addresses of one life that are kept at most: each of its messages is handled once for each of them. An
/// engine has a name and an address, or a few of them.
pub(super) const PLACES_OF_LIFE: usize = 8;

/// An address that is consumed from.
#[derive(Debug)]
pub(super) struct Place {
    /// The peer at this address, or at another one that leads to the same life and has a session with it.
    pub(super) peer: Peer,
    /// The number of the life that was, or will be, met there.
    id: PeerId,
    life: Option<Incarnation>,
    pub(super) opening: bool,
    /// Connect once, although no handoff needs it: a message is waiting.
    connect_once: bool,
    /// Handoffs need it.
    watched: bool,
    /// An engine handshake needs it, whichever life it is.
    watched_handshake: bool,
    /// When to connect again to deliver a message, and the delay that led there.
    retry: Option<(Timestamp, Duration)>,
    /// The session that was opened for this address.
    session: Option<Channel>,
    /// The call that used it last.
    used: u64,
}

impl Place {
    const fn is_watched(&self) -> bool {
        self.watched || self.watched_handshake
    }

    fn is_up(&self, lives: &FxHashMap<Incarnation, Life>) -> bool {
        let life = self.life.and_then(|life| lives.get(&life));
        life.is_some_and(|life| !life.channels.is_empty())
    }

    /// Whether a handoff, a handshake or the opening of a channel needs it. A message that waits for a
    /// connection may be given up: peers end by timer what they are not told of.
    const fn is_needed(&self) -> bool {
        self.is_watched() || self.opening
    }

    fn live_session(&self) -> Option<&Channel> {
        self.session.as_ref().filter(|session| session.end().is_none())
    }
}

/// The outcome of opening a channel to an address.
pub(super) enum Met {
    /// The number that is valid from now on, and the number of the life that was there before if it was
    /// another.
    At(PeerId, Option<PeerId>),
    /// The life has too many addresses already. The number of this one.
    Refused(PeerId),
}

#[derive(Debug)]
struct Life {
    /// Its number as a consumer of ours.
    reader: PeerId,
    /// The addresses it is consumed from: more than one if it has several names.
    places: Vec<String>,
    channels: Vec<Channel>,
    watched: bool,
    watch: Option<Watch>,
}

#[derive(Debug, Default)]
pub(super) struct Numbers {
    /// As a consumer of ours.
    pub(super) reader: Option<PeerId>,
    /// As a producer of ours, one for each of its addresses.
    pub(super) suppliers: Vec<PeerId>,
}

#[derive(Debug, Default)]
pub(super) struct Peers {
    numbers: u64,
    places: FxHashMap<String, Place>,
    lives: FxHashMap<Incarnation, Life>,
    /// [`Peers::take_unmet`], [`Peers::retry`] and [`Peers::forget_idle`] may find something.
    changed: bool,
    /// Whether any place has a `retry`.
    retrying: bool,
    /// Calls that used places.
    uses: u64,
    /// Peers with sessions that nothing needs.
    unneeded: Vec<Peer>,
    place_of: FxHashMap<PeerId, String>,
    life_of: FxHashMap<PeerId, Incarnation>,
}

/// The number of a life as a consumer of ours. It stays the same when the life comes back: what the
/// life confirmed is remembered for longer than its connection.
fn reader_of(Incarnation(life): Incarnation) -> PeerId {
    // An incarnation is random, so half of it is unique enough. Other numbers count up from 1.
    PeerId(life as u64 | 1 << 63)
}

impl Peers {
    fn number(&mut self) -> PeerId {
        self.numbers += 1;
        PeerId(self.numbers)
    }

    /// The numbers of the lives at the addresses of `peers`, each with whether there is a channel to it.
    ///
    /// # Errors
    /// [`Refusal::Addresses`].
    pub(super) fn places<'a>(
        &mut self,
        peers: impl IntoIterator<Item = &'a Peer>,
    ) -> Result<Vec<(PeerId, bool)>, Refusal> {
        self.uses += 1;
        peers.into_iter().map(|peer| self.place(peer)).collect()
    }

    fn place(&mut self, peer: &Peer) -> Result<(PeerId, bool), Refusal> {
        let address = peer.address();
        if !self.places.contains_key(address) {
            if self.places.len() >= PLACES_MAX && !self.make_room(|_| true) {
                return Err(Refusal::Addresses { limit: PLACES_MAX });
            }
            let id = self.number();
            let place = Place {
                peer: peer.clone(),
                id,
                life: None,
                opening: false,
                connect_once: false,
                watched: false,
                watched_handshake: false,
                retry: None,
                session: None,
                used: self.uses,
            };
            self.places.insert(address.to_owned(), place);
            self.place_of.insert(id, address.to_owned());
        }
        let place = self.places.get_mut(address).expect("there now");
        place.used = self.uses;
        let is_up = place.is_up(&self.lives);
        if !is_up {
            // The name may have been looked up again since.
            place.peer = peer.clone();
            if !place.watched {
                // No handoff needs the life that was there: the caller means the next one.
                place.life = None;
            }
        }
        Ok((place.id, is_up))
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
        let life = place.life.and_then(|life| self.lives.get_mut(&life));
        let mut heirs = Vec::new();
        if let Some(life) = life {
            life.places.retain(|of_life| *of_life != address);
            heirs.clone_from(&life.places);
        }
        if place.live_session().is_some() {
            // Other addresses of this life share the session.
            let heir = heirs.iter().find(|heir| {
                let heir = self.places.get(*heir);
                heir.is_some_and(|heir| heir.life == place.life)
            });
            match heir.and_then(|heir| self.places.get_mut(heir)) {
                Some(heir) => (heir.peer, heir.session) = (place.peer, place.session),
                None => self.end_session(place.peer),
            }
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
            if is_needed && !place.opening && !place.is_up(&self.lives) {
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
            if !unheard.contains(&place.id) || place.is_up(&self.lives) || place.opening {
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

    /// The channel to an address did not open: the number there, and whether the peer connected to us
    /// meanwhile.
    pub(super) fn not_met_at(&mut self, address: &str) -> Option<(PeerId, bool)> {
        self.changed = true;
        let place = self.places.get_mut(address)?;
        place.opening = false;
        Some((place.id, place.is_up(&self.lives)))
    }

    /// The address of a number, and what is there.
    pub(super) fn place_of(&mut self, id: PeerId) -> Option<(&str, &mut Place)> {
        let address = self.place_of.get(&id)?;
        let place = self.places.get_mut(address)?;
        (place.id == id).then_some((address.as_str(), place))
    }

    /// A channel to a peer, by either of its numbers.
    pub(super) fn channel(&self, id: PeerId) -> Option<&Channel> {
        let life = match self.life_of.get(&id) {
            Some(life) => *life,
            None => self.places.get(self.place_of.get(&id)?).filter(|place| place.id == id)?.life?,
        };
        self.lives.get(&life)?.channels.last()
    }

    /// A channel began: the numbers of its life if this is the life's only channel.
    pub(super) fn began(&mut self, channel: &Channel) -> Numbers {
        let incarnation = channel.incarnation();
        if !self.lives.contains_key(&incarnation) {
            let reader = reader_of(incarnation);
            let is_here = |(_, place): &(&String, &Place)| place.life == Some(incarnation);
            let places = self.places.iter().filter(is_here).map(|(name, _)| name.clone()).collect();
            let life = Life { reader, places, channels: Vec::new(), watched: false, watch: None };
            self.lives.insert(incarnation, life);
            self.life_of.insert(reader, incarnation);
        }
        let life = self.lives.get_mut(&incarnation).expect("there now");
        if life.channels.contains(channel) {
            return Numbers::default();
        }
        life.channels.push(channel.clone());
        let is_first = life.channels.len() == 1;
        self.update_watch(incarnation);
        if is_first { self.numbers_of(channel) } else { Numbers::default() }
    }

    /// A channel to an address opened. If another address has led to the same life before, its session is
    /// used, and the new one ends.
    pub(super) fn met_at(&mut self, address: &str, channel: &Channel) -> Option<Met> {
        let fresh = self.number();
        let incarnation = channel.incarnation();
        let place = self.places.get_mut(address)?;
        place.opening = false;
        let (id, opened) = (place.id, place.peer.clone());
        let others = self.lives.get(&incarnation).map_or(&[][..], |life| &life.places);
        let others = others.iter().filter(|other| *other != address);
        let others = others.filter_map(|other| self.places.get(other));
        let others: Vec<_> = others.filter(|other| other.life == Some(incarnation)).collect();
        let shared = others.iter().find_map(|other| {
            let session = other.live_session()?;
            Some((other.peer.clone(), session == channel))
        });
        let is_full = others.len() >= PLACES_OF_LIFE;
        if is_full && !self.make_room(|place| place.life == Some(incarnation) && place.id != id) {
            if shared.is_none_or(|(_, is_it)| !is_it) {
                self.end_session(opened);
            }
            return Some(Met::Refused(id));
        }
        let place = self.places.get_mut(address)?;
        place.session = None;
        let spare = match shared {
            Some((peer, is_it)) => {
                place.peer = peer;
                (!is_it).then_some(opened)
            }
            None => {
                place.session = Some(channel.clone());
                None
            }
        };
        let gone = match place.life.replace(incarnation) {
            Some(before) if before != incarnation => {
                let gone = std::mem::replace(&mut place.id, fresh);
                // The handoffs with the other life end. Those with this one set `watched` again.
                place.watched = false;
                self.place_of.remove(&gone);
                self.place_of.insert(fresh, address.to_owned());
                Some(gone)
            }
            _ => None,
        };
        let id = place.id;
        if let Some(life) = self.lives.get_mut(&incarnation)
            && !life.places.iter().any(|place| place == address)
        {
            life.places.push(address.to_owned());
        }
        self.update_watch(incarnation);
        if let Some(spare) = spare {
            self.end_session(spare);
        }
        Some(Met::At(id, gone))
    }

    /// The numbers of the peer of a channel.
    pub(super) fn numbers_of(&self, channel: &Channel) -> Numbers {
        let incarnation = channel.incarnation();
        let Some(life) = self.lives.get(&incarnation) else { return Numbers::default() };
        let places = life.places.iter().filter_map(|address| self.places.get(address));
        let places = places.filter(|place| place.life == Some(incarnation));
        Numbers { reader: Some(life.reader), suppliers: places.map(|place| place.id).collect() }
    }

    /// A channel ended: the numbers of its life, and whether there is another channel to it.
    pub(super) fn ended(&mut self, channel: &Channel) -> (Numbers, bool) {
        let numbers = self.numbers_of(channel);
        let incarnation = channel.incarnation();
        self.changed = true;
        let Some(life) = self.lives.get_mut(&incarnation) else { return (numbers, false) };
        life.channels.retain(|other| other != channel);
        let is_up = !life.channels.is_empty();
        if is_up {
            self.update_watch(incarnation);
        } else {
            life.watch = None;
        }
        (numbers, is_up)
    }

    /// Starts or stops the heartbeat to a peer for its handoffs.
    pub(super) fn watch(&mut self, id: PeerId, on: bool) {
        self.changed |= self.channel(id).is_none();
        if let Some(incarnation) = self.life_of.get(&id).copied() {
            if let Some(life) = self.lives.get_mut(&incarnation) {
                life.watched = on;
            }
            self.update_watch(incarnation);
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
        if let Some(incarnation) = place.life {
            self.update_watch(incarnation);
        }
    }

    fn update_watch(&mut self, incarnation: Incarnation) {
        let Some(life) = self.lives.get_mut(&incarnation) else { return };
        let mut places = life.places.iter().filter_map(|address| self.places.get(address));
        let is_consumed = places.any(|place| place.is_watched() && place.life == Some(incarnation));
        if !(life.watched || is_consumed) {
            life.watch = None;
        } else if let Some(channel) = life.channels.last() {
            // The channel that messages go over.
            life.watch = Some(channel.watch());
        }
    }

    /// Forgets addresses and lives that nothing needs and that have no channel.
    pub(super) fn forget_idle(&mut self) {
        let Self { lives, life_of, places, place_of, .. } = self;
        lives.retain(|_, life| {
            let keep = life.watched || life.watch.is_some() || !life.channels.is_empty();
            if !keep {
                life_of.remove(&life.reader);
            }
            keep
        });
        places.retain(|_, place| {
            let is_met = place.life.is_some_and(|life| lives.contains_key(&life));
            let is_needed = place.is_watched() || place.connect_once || place.retry.is_some();
            let keep = is_needed || place.opening || is_met;
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
        self.places.len() + self.lives.len()
    }
}
