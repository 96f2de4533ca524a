//! Offers that a subscriber has heard of.

use super::{ContentKey, Limits, Place};
use crate::handoff::HandoffId;
use crate::origin::Origin;
use crate::shares::Shares;
use crate::time::Timestamp;
use std::collections::{BTreeSet, HashMap};

/// Offers by their prompts, each for a limited time. Publishers share the room for them; the oldest are dropped first.
#[derive(Debug)]
pub(super) struct HeardOffers {
    of_prompt_max: usize,
    offers: HashMap<u64, HeardOffer>,
    /// Numbers of the offers of each prompt. No set is empty.
    by_key: HashMap<ContentKey, BTreeSet<u64>>,
    /// Numbers of the offers of each publisher. No map is empty.
    by_transfer: HashMap<Place, HashMap<HandoffId, u64>>,
    by_time: BTreeSet<(Timestamp, u64)>,
    room: Shares<u64>,
    last: u64,
}

#[derive(Clone, Debug)]
pub(super) struct HeardOffer {
    pub(super) place: Place,
    pub(super) key: ContentKey,
    pub(super) transfer: HandoffId,
    pub(super) until: Timestamp,
}

impl HeardOffers {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            of_prompt_max: limits.heard_of_prompt.max(1),
            offers: HashMap::new(),
            by_key: HashMap::new(),
            by_transfer: HashMap::new(),
            by_time: BTreeSet::new(),
            room: Shares::new(limits.heard),
            last: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.offers.len()
    }

    pub(super) fn has_offers(&self, place: Place) -> bool {
        self.by_transfer.contains_key(&place)
    }

    /// Adds an offer of the publisher at `heard.place`, whose host is `origin`, in place of an earlier one of the same
    /// handoff.
    pub(super) fn add(&mut self, origin: Origin, heard: HeardOffer) {
        self.remove_transfer(heard.place, &heard.transfer);
        self.last += 1;
        let number = self.last;
        self.by_transfer.entry(heard.place).or_default().insert(heard.transfer.clone(), number);
        self.by_time.insert((heard.until, number));
        self.room.add(&number, origin, heard.place.0 as u64, 1);
        let of_prompt = self.by_key.entry(heard.key).or_default();
        of_prompt.insert(number);
        let excess = (of_prompt.len() > self.of_prompt_max).then(|| of_prompt.first().copied());
        self.offers.insert(number, heard);
        if let Some(oldest) = excess.flatten() {
            self.remove(oldest);
        }
        while let Some(oldest) = self.room.oldest_excess(&number) {
            self.remove(oldest);
        }
    }

    /// Takes the newest offer of a prompt whose publisher `may_be_asked`: earlier ones may be other publishers'.
    pub(super) fn take(
        &mut self,
        key: &ContentKey,
        now: Timestamp,
        may_be_asked: impl Fn(Place) -> bool,
    ) -> Option<HeardOffer> {
        let is_usable = |number: &&u64| {
            let offer = &self.offers[number];
            offer.until > now && may_be_asked(offer.place)
        };
        let found = *self.by_key.get(key)?.iter().rev().find(is_usable)?;
        self.remove(found)
    }

    pub(super) fn remove_transfer(&mut self, place: Place, transfer: &HandoffId) {
        let number = self.by_transfer.get(&place).and_then(|of_place| of_place.get(transfer));
        if let Some(number) = number.copied() {
            self.remove(number);
        }
    }

    /// Removes all offers of a publisher.
    pub(super) fn remove_place(&mut self, place: Place) {
        let of_place = self.by_transfer.get(&place).into_iter().flat_map(HashMap::values);
        let of_place: Vec<u64> = of_place.copied().collect();
        for number in of_place {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u64) -> Option<HeardOffer> {
        let heard = self.offers.remove(&number)?;
        if let Some(of_prompt) = self.by_key.get_mut(&heard.key) {
            of_prompt.remove(&number);
            if of_prompt.is_empty() {
                self.by_key.remove(&heard.key);
            }
        }
        if let Some(of_place) = self.by_transfer.get_mut(&heard.place) {
            of_place.remove(&heard.transfer);
            if of_place.is_empty() {
                self.by_transfer.remove(&heard.place);
            }
        }
        self.by_time.remove(&(heard.until, number));
        self.room.remove(&number);
        Some(heard)
    }

    pub(super) fn next_timeout(&self) -> Option<Timestamp> {
        self.by_time.first().map(|(until, _)| *until)
    }

    pub(super) fn expire(&mut self, now: Timestamp) {
        while let Some((until, number)) = self.by_time.first().copied()
            && until <= now
        {
            self.remove(number);
        }
    }
}
