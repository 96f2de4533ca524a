//! Which peer is which.
//!
//! The protocol numbers lives of peers ([`PeerId`]). A life is known by its incarnation once it was
//! met; before, a consumer knows an address, which has a number already. Two lives at one address
//! have two numbers; two sessions with one life have one.

use kvferry::{Channel, Incarnation, Peer, Watch};
use kvferry_proto::handoff::PeerId;
use rustc_hash::FxHashMap;

/// An address that something is consumed from.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) peer: Peer,
    /// The number of whoever is, or will be, met there.
    pub(crate) id: PeerId,
    pub(crate) life: Option<Incarnation>,
    /// It is being met.
    pub(crate) opening: bool,
    /// Handoffs want something of it.
    pub(crate) watched: bool,
}

/// A life of a peer that there are channels to.
#[derive(Debug)]
pub(crate) struct Life {
    /// Its number as one that consumes from us.
    pub(crate) reader: PeerId,
    /// Where it is consumed from, if it is.
    pub(crate) place: Option<String>,
    channels: Vec<Channel>,
    watched: bool,
    watch: Option<Watch>,
}

#[derive(Debug, Default)]
pub(crate) struct Peers {
    numbers: u64,
    places: FxHashMap<String, Place>,
    lives: FxHashMap<Incarnation, Life>,
    /// Addresses and lives by their numbers.
    place_of: FxHashMap<PeerId, String>,
    life_of: FxHashMap<PeerId, Incarnation>,
}

impl Peers {
    fn number(&mut self) -> PeerId {
        self.numbers += 1;
        PeerId(self.numbers)
    }

    /// The place with this address, and whether it can be talked to now.
    pub(crate) fn place(
        &mut self,
        address: &str,
        peer: impl FnOnce() -> kvferry::Result<Peer>,
    ) -> kvferry::Result<(PeerId, bool)> {
        if !self.places.contains_key(address) {
            let peer = peer()?;
            let id = self.number();
            let place = Place { peer, id, life: None, opening: false, watched: false };
            self.places.insert(address.to_owned(), place);
            self.place_of.insert(id, address.to_owned());
        }
        let place = &self.places[address];
        let life = place.life.and_then(|life| self.lives.get(&life));
        Ok((place.id, life.is_some_and(|life| !life.channels.is_empty())))
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

    /// A channel began. The numbers of its life: as a reader, if this is its first channel; and as
    /// one that is consumed from.
    pub(crate) fn began(&mut self, channel: &Channel) -> (Option<PeerId>, Option<PeerId>) {
        let incarnation = channel.incarnation();
        if !self.lives.contains_key(&incarnation) {
            let reader = self.number();
            let life =
                Life { reader, place: None, channels: Vec::new(), watched: false, watch: None };
            self.lives.insert(incarnation, life);
            self.life_of.insert(reader, incarnation);
        }
        let life = self.lives.get_mut(&incarnation).expect("there now");
        if life.channels.contains(channel) {
            return (None, None);
        }
        let is_first = life.channels.is_empty();
        life.channels.push(channel.clone());
        let supplier = life.place.as_ref().and_then(|place| self.places.get(place));
        let supplier =
            supplier.filter(|place| place.life == Some(incarnation)).map(|place| place.id);
        let reader = life.reader;
        self.keep_watch(incarnation);
        if is_first { (Some(reader), supplier) } else { (None, None) }
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
                self.place_of.remove(&gone);
                self.place_of.insert(fresh, address.to_owned());
                Some(gone)
            }
            _ => None,
        };
        let id = place.id;
        if let Some(life) = self.lives.get_mut(&incarnation) {
            life.place = Some(address.to_owned());
        }
        self.keep_watch(incarnation);
        Some((id, gone))
    }

    /// The numbers of whoever is at the other end of a channel: as a reader, and as one that is
    /// consumed from.
    pub(crate) fn numbers_of(&self, channel: &Channel) -> (Option<PeerId>, Option<PeerId>) {
        let incarnation = channel.incarnation();
        let Some(life) = self.lives.get(&incarnation) else { return (None, None) };
        let place = life.place.as_ref().and_then(|address| self.places.get(address));
        let supplier = place.filter(|place| place.life == Some(incarnation)).map(|place| place.id);
        (Some(life.reader), supplier)
    }

    /// A channel ended. The numbers of a life that there is no channel to any more.
    pub(crate) fn ended(&mut self, channel: &Channel) -> (Option<PeerId>, Option<PeerId>) {
        let numbers = self.numbers_of(channel);
        let incarnation = channel.incarnation();
        let Some(life) = self.lives.get_mut(&incarnation) else { return (None, None) };
        life.channels.retain(|other| other != channel);
        if !life.channels.is_empty() {
            self.keep_watch(incarnation);
            return (None, None);
        }
        life.watch = None;
        numbers
    }

    /// Has a peer watched, or no longer; forgets who is neither watched nor connected.
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
        if !on {
            self.forget_idle();
        }
    }

    fn keep_watch(&mut self, incarnation: Incarnation) {
        let Some(life) = self.lives.get_mut(&incarnation) else { return };
        let place = life.place.as_ref().and_then(|address| self.places.get(address));
        let consumed = place.is_some_and(|place| place.watched && place.life == Some(incarnation));
        if !(life.watched || consumed) {
            life.watch = None;
        } else if let Some(channel) = life.channels.last() {
            // Of the channel that is used.
            life.watch = Some(channel.watch());
        }
    }

    /// Addresses and lives that nothing is expected of, and that there is no channel to.
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
            let keep = place.watched || place.opening || is_met;
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
