//! Which peer is which.
//!
//! The protocol numbers lives of peers ([`PeerId`]). A life is known by its incarnation once it was
//! met; before, a consumer knows an address, which has a number already. Two lives at one address
//! have two numbers; two sessions with one life have one.

use kvferry::{Channel, Incarnation, Peer, Watch};
use kvferry_proto::Timestamp;
use kvferry_proto::handoff::PeerId;
use rustc_hash::{FxHashMap, FxHashSet};
use std::time::Duration;

/// An address that something is consumed from.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) peer: Peer,
    /// The number of whoever is, or will be, met there.
    pub(crate) id: PeerId,
    pub(crate) life: Option<Incarnation>,
    /// It is being met.
    pub(crate) opening: bool,
    /// It is to be met although nothing is wanted of it: it has to hear something.
    pub(crate) addressed: bool,
    /// Handoffs want something of it.
    pub(crate) watched: bool,
    /// An introduction wants something of it, whoever it is.
    pub(crate) introducing: bool,
    /// It has to hear something, and could not be met: it is tried again then, and after how long
    /// the next time.
    retry: Option<(Timestamp, Duration)>,
}

/// How long after a peer could not be met it is tried again, at first and at most.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_secs(15);

impl Place {
    /// Whether something is expected of it.
    const fn is_watched(&self) -> bool {
        self.watched || self.introducing
    }

    /// Whether there is a channel to whoever is there.
    fn is_up(&self, lives: &FxHashMap<Incarnation, Life>) -> bool {
        let life = self.life.and_then(|life| lives.get(&life));
        life.is_some_and(|life| !life.channels.is_empty())
    }
}

/// A life of a peer that there are channels to.
#[derive(Debug)]
struct Life {
    /// Its number as one that consumes from us.
    reader: PeerId,
    /// Where it is consumed from: more than one if it has several names.
    places: Vec<String>,
    channels: Vec<Channel>,
    watched: bool,
    watch: Option<Watch>,
}

/// The numbers of a life.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// As one that consumes from us.
    pub(crate) reader: Option<PeerId>,
    /// As one that is consumed from.
    pub(crate) suppliers: Vec<PeerId>,
}

#[derive(Debug, Default)]
pub(crate) struct Peers {
    numbers: u64,
    places: FxHashMap<String, Place>,
    lives: FxHashMap<Incarnation, Life>,
    /// Whether any address is tried again.
    retrying: bool,
    /// Addresses and lives by their numbers.
    place_of: FxHashMap<PeerId, String>,
    life_of: FxHashMap<PeerId, Incarnation>,
}

/// The number of a life as one that consumes from us. It is the same whenever that life comes back:
/// what it confirmed is remembered for longer than that there was a connection to it.
fn reader_of(Incarnation(life): Incarnation) -> PeerId {
    // Drawn at random, so that half of it is as good; others are counted from the other end.
    PeerId(life as u64 | 1 << 63)
}

impl Peers {
    fn number(&mut self) -> PeerId {
        self.numbers += 1;
        PeerId(self.numbers)
    }

    /// The number of whoever is at an address, and whether he can be talked to now.
    pub(crate) fn place(&mut self, address: &str, peer: &Peer) -> (PeerId, bool) {
        if !self.places.contains_key(address) {
            let id = self.number();
            let place = Place {
                peer: peer.clone(),
                id,
                life: None,
                opening: false,
                addressed: false,
                watched: false,
                introducing: false,
                retry: None,
            };
            self.places.insert(address.to_owned(), place);
            self.place_of.insert(id, address.to_owned());
        }
        let place = self.places.get_mut(address).expect("there now");
        let is_up = place.is_up(&self.lives);
        if !is_up && !place.watched {
            // Whoever was there may be gone, and nothing is wanted of him any more: whoever is met
            // is the one that is meant.
            place.life = None;
        }
        (place.id, is_up)
    }

    /// Addresses that somebody has to be met at; from now on they are being met.
    pub(crate) fn take_unmet(&mut self) -> Vec<(String, Peer)> {
        let mut unmet = Vec::new();
        for (address, place) in &mut self.places {
            let wanted = place.is_watched() || place.addressed;
            if wanted && !place.opening && !place.is_up(&self.lives) {
                place.opening = true;
                unmet.push((address.clone(), place.peer.clone()));
            }
            place.addressed = false;
        }
        unmet
    }

    /// Peers that have to hear something, if they can be met; the others have heard it. When to look
    /// again.
    pub(crate) fn retry(
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
                    place.addressed = true;
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

    /// Nobody could be met at an address: the number of whoever was meant, unless he was met
    /// meanwhile.
    pub(crate) fn not_met_at(&mut self, address: &str) -> Option<PeerId> {
        let place = self.places.get_mut(address)?;
        place.opening = false;
        (!place.is_up(&self.lives)).then_some(place.id)
    }

    /// The number of whoever is at an address, if there is a channel to him.
    pub(crate) fn up_at(&self, address: &str) -> Option<PeerId> {
        self.places.get(address).filter(|place| place.is_up(&self.lives)).map(|place| place.id)
    }

    /// The address of a number, and what is there.
    pub(crate) fn place_of(&mut self, id: PeerId) -> Option<(&str, &mut Place)> {
        let address = self.place_of.get(&id)?;
        let place = self.places.get_mut(address)?;
        (place.id == id).then_some((address.as_str(), place))
    }

    /// A channel to a peer, by either of its numbers.
    pub(crate) fn channel(&self, id: PeerId) -> Option<&Channel> {
        let life = match self.life_of.get(&id) {
            Some(life) => *life,
            None => self.places.get(self.place_of.get(&id)?).filter(|place| place.id == id)?.life?,
        };
        self.lives.get(&life)?.channels.last()
    }

    /// A channel began: the numbers of its life, if it is the first that there is to it.
    pub(crate) fn began(&mut self, channel: &Channel) -> Numbers {
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
        self.keep_watch(incarnation);
        if is_first { self.numbers_of(channel) } else { Numbers::default() }
    }

    /// Somebody was met at an address: the number that is good for him from now on, and the number
    /// of the life that was there before, if that was another.
    pub(crate) fn met_at(
        &mut self,
        address: &str,
        incarnation: Incarnation,
    ) -> Option<(PeerId, Option<PeerId>)> {
        let fresh = self.number();
        let place = self.places.get_mut(address)?;
        place.opening = false;
        let gone = match place.life.replace(incarnation) {
            Some(before) if before != incarnation => {
                let gone = std::mem::replace(&mut place.id, fresh);
                // What was wanted of the other life ends; whoever wants something of this one says
                // so.
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
        self.keep_watch(incarnation);
        Some((id, gone))
    }

    /// The numbers of whoever is at the other end of a channel.
    pub(crate) fn numbers_of(&self, channel: &Channel) -> Numbers {
        let incarnation = channel.incarnation();
        let Some(life) = self.lives.get(&incarnation) else { return Numbers::default() };
        let places = life.places.iter().filter_map(|address| self.places.get(address));
        let places = places.filter(|place| place.life == Some(incarnation));
        Numbers { reader: Some(life.reader), suppliers: places.map(|place| place.id).collect() }
    }

    /// A channel ended: the numbers of its life, and whether there is another channel to it.
    pub(crate) fn ended(&mut self, channel: &Channel) -> (Numbers, bool) {
        let numbers = self.numbers_of(channel);
        let incarnation = channel.incarnation();
        let Some(life) = self.lives.get_mut(&incarnation) else { return (numbers, false) };
        life.channels.retain(|other| other != channel);
        let is_up = !life.channels.is_empty();
        if is_up {
            self.keep_watch(incarnation);
        } else {
            life.watch = None;
        }
        (numbers, is_up)
    }

    /// Has a peer watched, or no longer.
    pub(crate) fn watch(&mut self, id: PeerId, on: bool) {
        if let Some(incarnation) = self.life_of.get(&id).copied() {
            if let Some(life) = self.lives.get_mut(&incarnation) {
                life.watched = on;
            }
            self.keep_watch(incarnation);
        } else if let Some((_, place)) = self.place_of(id) {
            place.watched = on;
            if let Some(incarnation) = place.life {
                self.keep_watch(incarnation);
            }
        }
    }

    /// Has whoever is at an address watched for an introduction, or no longer.
    pub(crate) fn introduce(&mut self, id: PeerId, on: bool) {
        let Some((_, place)) = self.place_of(id) else { return };
        place.introducing = on;
        if let Some(incarnation) = place.life {
            self.keep_watch(incarnation);
        }
    }

    fn keep_watch(&mut self, incarnation: Incarnation) {
        let Some(life) = self.lives.get_mut(&incarnation) else { return };
        let mut places = life.places.iter().filter_map(|address| self.places.get(address));
        let consumed = places.any(|place| place.is_watched() && place.life == Some(incarnation));
        if !(life.watched || consumed) {
            life.watch = None;
        } else if let Some(channel) = life.channels.last() {
            // Of the channel that is used.
            life.watch = Some(channel.watch());
        }
    }

    /// Forgets addresses and lives that nothing is expected of, and that there is no channel to.
    pub(crate) fn forget_idle(&mut self) {
        let lives = &mut self.lives;
        let life_of = &mut self.life_of;
        lives.retain(|_, life| {
            let keep = life.watched || life.watch.is_some() || !life.channels.is_empty();
            if !keep {
                life_of.remove(&life.reader);
            }
            keep
        });
        let place_of = &mut self.place_of;
        self.places.retain(|_, place| {
            let is_met = place.life.is_some_and(|life| lives.contains_key(&life));
            let awaited = place.is_watched() || place.addressed || place.retry.is_some();
            let keep = awaited || place.opening || is_met;
            if !keep {
                place_of.remove(&place.id);
            }
            keep
        });
    }

    /// Addresses and lives that are kept.
    pub(crate) fn len(&self) -> usize {
        self.places.len() + self.lives.len()
    }
}
