//! The side of an engine that prefills: its followers, and the prompts that it has on offer.

use super::{
    ContentKey, DirectoryMessage, Follow, Followed, Gone, Limits, NotFollowed, OFFERS_MAX, Offer,
    Offered,
};
use crate::code::WireCode;
use crate::engine_handshake::EngineId;
use crate::handoff::{HandoffId, PeerId, Refusal};
use crate::origin::Origin;
use crate::shares::Shares;
use crate::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

/// What the driver of a [`Publisher`] has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum PublisherAction {
    /// Send a message. If the session has no room for it, end the session: the follower connects again, and
    /// gets everything that is on offer then.
    Send { to: PeerId, message: DirectoryMessage },
    /// A follower was refused for want of room, this one or an earlier one. For the log, and to be counted.
    Refused { peer: PeerId },
    /// A follower has not said again that it follows. End the session: what waits to be sent to it takes memory.
    Disconnect { peer: PeerId },
}

/// Tells followers which prompts this engine has on offer.
#[derive(Debug)]
pub struct Publisher {
    engine: EngineId,
    address: String,
    limits: Limits,
    followers: BTreeMap<PeerId, Follower>,
    room: Shares<PeerId>,
    terms: u64,
    /// Offers in the order in which they were made.
    offers: BTreeMap<u64, Published>,
    by_transfer: HashMap<HandoffId, u64>,
    by_time: BTreeSet<(Timestamp, u64)>,
    last: u64,
    actions: VecDeque<PublisherAction>,
}

#[derive(Debug)]
struct Follower {
    until: Timestamp,
    term: u64,
}

#[derive(Debug)]
struct Published {
    key: ContentKey,
    transfer: HandoffId,
    until: Timestamp,
}

impl Published {
    fn offer(&self, now: Timestamp) -> Offer {
        let budget_ms = millis(self.until.saturating_since(now));
        Offer { key: self.key, transfer: self.transfer.clone(), budget_ms }
    }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

impl Publisher {
    /// A publisher without followers and offers. `address`: where the agent of the engine's rank 0 listens.
    pub fn new(engine: EngineId, address: String, limits: Limits) -> Self {
        Self {
            engine,
            address,
            room: Shares::new(limits.followers),
            limits,
            followers: BTreeMap::new(),
            terms: 0,
            offers: BTreeMap::new(),
            by_transfer: HashMap::new(),
            by_time: BTreeSet::new(),
            last: 0,
            actions: VecDeque::new(),
        }
    }

    /// Tells all followers that a handoff has this prompt, until it is retracted, but not for longer than
    /// [`Limits::offer_ttl`].
    ///
    /// # Errors
    /// [`Refusal::InUse`] if it is on offer; [`Refusal::Full`].
    pub fn publish(
        &mut self,
        key: ContentKey,
        transfer: &HandoffId,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        if self.by_transfer.contains_key(transfer) {
            return Err(Refusal::InUse);
        }
        if self.offers.len() >= self.limits.offers {
            return Err(Refusal::Full { limit: self.limits.offers });
        }
        self.last += 1;
        let until = now + self.limits.offer_ttl;
        let published = Published { key, transfer: transfer.clone(), until };
        let message = Offered { offers: vec![published.offer(now)] }.into();
        self.by_transfer.insert(transfer.clone(), self.last);
        self.by_time.insert((until, self.last));
        self.offers.insert(self.last, published);
        self.send_to_all(&message);
        Ok(())
    }

    /// The handoff has ended: no follower can fetch it. Nothing happens if it is not on offer.
    pub fn retract(&mut self, transfer: &HandoffId) {
        let Some(number) = self.by_transfer.get(transfer).copied() else { return };
        self.remove(number);
        self.send_to_all(&Gone { transfer: transfer.clone() }.into());
    }

    /// A message arrived over the session with the number `from`, whose peer is at `origin`.
    pub fn receive(
        &mut self,
        from: PeerId,
        origin: Origin,
        message: &DirectoryMessage,
        now: Timestamp,
    ) {
        match message {
            DirectoryMessage::Follow(follow) => self.follow(from, origin, follow, now),
            DirectoryMessage::Followed(_)
            | DirectoryMessage::NotFollowed(_)
            | DirectoryMessage::Offered(_)
            | DirectoryMessage::Gone(_)
            | DirectoryMessage::Unknown { .. } => {}
        }
    }

    fn follow(&mut self, from: PeerId, origin: Origin, follow: &Follow, now: Timestamp) {
        if follow.engine == self.engine {
            return self.refuse(from, WireCode::Unsupported, "an engine does not follow itself");
        }
        let until = now + self.limits.lease;
        if let Some(follower) = self.followers.get_mut(&from) {
            follower.until = until;
            let term = follower.term;
            return self.answer(from, term);
        }
        self.terms += 1;
        self.followers.insert(from, Follower { until, term: self.terms });
        self.room.add(&from, origin, from.0, 1);
        while let Some(peer) = self.room.excess(&from) {
            self.forget(peer);
            self.actions.push_back(PublisherAction::Refused { peer });
            self.refuse(peer, WireCode::Busy, "too many engines follow this one");
        }
        if self.followers.contains_key(&from) {
            self.answer(from, self.terms);
            self.list(from, now);
        }
    }

    fn answer(&mut self, to: PeerId, term: u64) {
        let (engine, address) = (self.engine, self.address.clone());
        let lease_ms = millis(self.limits.lease);
        let message = Followed { engine, address, lease_ms, term }.into();
        self.actions.push_back(PublisherAction::Send { to, message });
    }

    fn refuse(&mut self, to: PeerId, code: WireCode, detail: &str) {
        let message = NotFollowed { code, detail: detail.to_owned() }.into();
        self.actions.push_back(PublisherAction::Send { to, message });
    }

    /// Tells a new follower of everything that is on offer.
    fn list(&mut self, to: PeerId, now: Timestamp) {
        let all: Vec<Offer> = self.offers.values().map(|it| it.offer(now)).collect();
        for offers in all.chunks(OFFERS_MAX) {
            let message = Offered { offers: offers.to_vec() }.into();
            self.actions.push_back(PublisherAction::Send { to, message });
        }
    }

    fn send_to_all(&mut self, message: &DirectoryMessage) {
        let to_each = |to: &PeerId| PublisherAction::Send { to: *to, message: message.clone() };
        self.actions.extend(self.followers.keys().map(to_each));
    }

    /// A session has ended. Nothing happens if its peer did not follow.
    pub fn lost(&mut self, peer: PeerId) {
        self.forget(peer);
    }

    fn forget(&mut self, peer: PeerId) {
        self.followers.remove(&peer);
        self.room.remove(&peer);
    }

    fn remove(&mut self, number: u64) {
        if let Some(offer) = self.offers.remove(&number) {
            self.by_transfer.remove(&offer.transfer);
            self.by_time.remove(&(offer.until, number));
        }
    }

    /// The next action.
    pub fn poll(&mut self) -> Option<PublisherAction> {
        self.actions.pop_front()
    }

    /// When [`Publisher::expire`] is due.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        let lease = self.followers.values().map(|it| it.until).min();
        [lease, self.by_time.first().map(|(until, _)| *until)].into_iter().flatten().min()
    }

    /// Forgets followers that have not said again that they follow, and offers that were kept for long enough: their
    /// followers have forgotten them, too.
    pub fn expire(&mut self, now: Timestamp) {
        let is_over = |(peer, it): (&PeerId, &Follower)| (it.until <= now).then_some(*peer);
        let over: Vec<PeerId> = self.followers.iter().filter_map(is_over).collect();
        for peer in over {
            self.forget(peer);
            self.actions.push_back(PublisherAction::Disconnect { peer });
        }
        while let Some((until, number)) = self.by_time.first().copied()
            && until <= now
        {
            self.remove(number);
        }
    }

    /// How many engines follow this one.
    pub fn followers(&self) -> usize {
        self.followers.len()
    }

    /// Sizes of the collections, by name.
    pub fn gauges(&self) -> [(&'static str, usize); 2] {
        [("followers", self.followers.len()), ("published", self.offers.len())]
    }
}
