//! The side of an engine that decodes: the publishers that it follows, and what it has heard from them.

use super::heard::{HeardOffer, HeardOffers};
use super::{Backoff, ContentKey, DirectoryMessage, Follow, Followed, Limits, Offered};
use crate::code::WireCode;
use crate::engine_handshake::EngineId;
use crate::handoff::HandoffId;
use crate::origin::Origin;
use crate::time::Timestamp;
use std::collections::VecDeque;
use std::time::Duration;

/// The shortest lease that a subscriber renews in time. With a shorter one, it is forgotten and follows again.
const LEASE_MIN: Duration = Duration::from_secs(1);

/// A publisher that the operator has named, by its number in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub usize);

/// What the driver of a [`Subscriber`] has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum SubscriberAction {
    /// Open a session to a publisher. [`Subscriber::opened`] or [`Subscriber::lost`] tells how that ended.
    Connect { place: Place },
    /// Send a message over the session of a publisher.
    Send { place: Place, message: DirectoryMessage },
    /// Start the heartbeat of the session, or stop it. It runs while an answer is due.
    Watch { place: Place, on: bool },
    /// The publisher has not answered. End the session.
    Disconnect { place: Place },
    /// A publisher does not tell this engine of prompts. For the log.
    Refused { place: Place, code: WireCode, detail: String },
}

/// A prompt that a publisher has on offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The publisher that offers it.
    pub place: Place,
    /// Name of the handoff.
    pub transfer: HandoffId,
    /// The publisher's engine.
    pub engine: EngineId,
    /// Where the agent of the engine's rank 0 listens.
    pub address: String,
}

/// Follows publishers, and finds prompts among what they have on offer.
#[derive(Debug)]
pub struct Subscriber {
    engine: EngineId,
    limits: Limits,
    publishers: Vec<Followee>,
    heard: HeardOffers,
    /// The pause of all publishers that are not proven.
    pause: Pause,
    /// What fetches without a result have taken since that pause began, or since one has worked.
    lost: Duration,
    actions: VecDeque<SubscriberAction>,
}

/// A publisher that this engine follows.
#[derive(Debug)]
struct Followee {
    state: State,
    retry: Backoff,
    /// What the publisher has said of itself in the current term.
    term: Option<Term>,
    pause: Pause,
    /// A fetch has worked, and neither this publisher nor one that was proven has hung since.
    is_proven: bool,
}

/// A time without fetches, which doubles until one works.
#[derive(Clone, Copy, Debug, Default)]
struct Pause {
    length: Backoff,
    until: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// There is no session.
    Away { connect_at: Timestamp },
    /// The driver opens a session.
    Connecting,
    /// An answer to [`Follow`] is due.
    Asking { origin: Origin, until: Timestamp },
    /// The publisher has answered.
    Answered { origin: Origin, ask_at: Timestamp },
}

#[derive(Clone, Debug)]
struct Term {
    number: u64,
    engine: EngineId,
    address: String,
}

impl Subscriber {
    /// A subscriber that is about to connect to `publishers` publishers.
    pub fn new(engine: EngineId, publishers: usize, limits: Limits, now: Timestamp) -> Self {
        let followee = || Followee {
            state: State::Away { connect_at: now },
            retry: Backoff::default(),
            term: None,
            pause: Pause::default(),
            is_proven: false,
        };
        Self {
            engine,
            heard: HeardOffers::new(&limits),
            limits,
            publishers: std::iter::repeat_with(followee).take(publishers).collect(),
            pause: Pause::default(),
            lost: Duration::ZERO,
            actions: VecDeque::new(),
        }
    }

    /// A session to a publisher, which is at `origin`, was opened.
    pub fn opened(&mut self, place: Place, origin: Origin, now: Timestamp) {
        if self.state(place) == Some(State::Connecting) {
            self.ask(place, origin, now);
        }
    }

    /// The session to a publisher has ended, or could not be opened. Nothing happens if there is none.
    pub fn lost(&mut self, place: Place, now: Timestamp) {
        match self.state(place) {
            None | Some(State::Away { .. }) => {}
            Some(state) => self.leave(place, state, now),
        }
    }

    /// A message arrived over the session to a publisher.
    pub fn receive(&mut self, place: Place, message: DirectoryMessage, now: Timestamp) {
        let Some(origin) = self.state(place).and_then(State::origin) else { return };
        match message {
            DirectoryMessage::Followed(it) => self.followed(place, origin, it, now),
            DirectoryMessage::NotFollowed(it) => {
                self.forget_term(place);
                self.answered(place, origin, now + self.limits.retry.1);
                let (code, detail) = (it.code, it.detail);
                self.actions.push_back(SubscriberAction::Refused { place, code, detail });
            }
            DirectoryMessage::Offered(it) => self.offered(place, origin, it, now),
            DirectoryMessage::Gone(it) => self.heard.remove_transfer(place, &it.transfer),
            DirectoryMessage::Follow(_) | DirectoryMessage::Unknown { .. } => {}
        }
    }

    fn followed(&mut self, place: Place, origin: Origin, it: Followed, now: Timestamp) {
        let Followed { engine, address, lease_ms, term: number } = it;
        let Some(publisher) = self.publishers.get_mut(place.0) else { return };
        publisher.retry = Backoff::default();
        let known = publisher.term.as_ref();
        if known.is_none_or(|known| (known.number, known.engine) != (number, engine)) {
            self.heard.remove_place(place);
        }
        publisher.term = Some(Term { number, engine, address });
        let lease = Duration::from_millis(lease_ms.into()).max(LEASE_MIN);
        self.answered(place, origin, now + lease / 3);
    }

    fn offered(&mut self, place: Place, origin: Origin, it: Offered, now: Timestamp) {
        let term = self.publishers.get(place.0).and_then(|publisher| publisher.term.as_ref());
        if term.is_none_or(|term| term.engine == self.engine) {
            return;
        }
        for offer in it.offers {
            let budget = Duration::from_millis(offer.budget_ms.into()).min(self.limits.offer_ttl);
            let (key, transfer, until) = (offer.key, offer.transfer, now + budget);
            self.heard.add(origin, HeardOffer { place, key, transfer, until });
        }
        self.heard.expire(now);
    }

    /// Takes the newest offer of a prompt, of a publisher that is not paused. `None` if there is none.
    pub fn take(&mut self, key: &ContentKey, now: Timestamp) -> Option<Found> {
        let (publishers, all) = (&self.publishers, self.pause);
        // Publishers that have hung must not have each turn: others come first, for as long as the pause was.
        let others = publishers.iter().enumerate().any(|(number, it)| {
            !it.is_proven && !it.pause.has_begun() && self.heard.has_offers(Place(number))
        });
        let until_of_hung = if others { all.until + all.length.0 } else { all.until };
        let may_be_asked = |place: Place| {
            publishers.get(place.0).is_some_and(|it| match it.pause.has_begun() {
                _ if it.is_proven => true,
                true => it.pause.is_over(now) && until_of_hung <= now,
                false => all.is_over(now),
            })
        };
        let HeardOffer { place, transfer, .. } = self.heard.take(key, now, may_be_asked)?;
        let term = self.publishers.get(place.0)?.term.as_ref()?;
        Some(Found { place, transfer, engine: term.engine, address: term.address.clone() })
    }

    /// A fetch from a publisher has taken a part of the `whole` time of a look-up, and has no result. Returns for how
    /// long nothing is taken from the publisher, if it had at least half of that time.
    ///
    /// Where such fetches had half of a look-up's time together, publishers that are not proven are paused, too. If the
    /// last of them was from a proven publisher, none is proven any more: others may hang for the same reason.
    pub fn failed(
        &mut self,
        place: Place,
        took: Duration,
        whole: Duration,
        now: Timestamp,
    ) -> Option<Duration> {
        let limits = self.limits.pause;
        let publisher = self.publishers.get_mut(place.0)?;
        let was_proven = publisher.is_proven;
        let pause = (took >= whole / 2).then(|| {
            publisher.is_proven = false;
            publisher.pause.begin(limits, now)
        });
        self.lost = self.lost.saturating_add(took);
        if self.lost >= whole / 2 {
            self.lost = Duration::ZERO;
            // A loss after so long a time without one has another cause.
            if self.pause.is_over(now - limits.1) {
                self.pause = Pause::default();
            }
            self.pause.begin(limits, now);
            if was_proven {
                self.publishers.iter_mut().for_each(|it| it.is_proven = false);
            }
        }
        pause
    }

    /// A fetch from a publisher has succeeded: the publisher is proven.
    pub fn worked(&mut self, place: Place) {
        let Some(publisher) = self.publishers.get_mut(place.0) else { return };
        self.lost = Duration::ZERO;
        publisher.is_proven = true;
        // The pause of all begins anew only where one that hung works: between publishers that hang, others may work
        // for the first time.
        if std::mem::take(&mut publisher.pause).has_begun() {
            self.pause = Pause::default();
        }
    }

    /// The next action.
    pub fn poll(&mut self) -> Option<SubscriberAction> {
        self.actions.pop_front()
    }

    /// When [`Subscriber::expire`] is due.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        let of_publishers = self.publishers.iter().filter_map(|it| it.state.due()).min();
        [of_publishers, self.heard.next_timeout()].into_iter().flatten().min()
    }

    /// Connects, asks again, and forgets what is over by now.
    pub fn expire(&mut self, now: Timestamp) {
        self.heard.expire(now);
        for place in (0..self.publishers.len()).map(Place) {
            let Some(state) = self.state(place) else { continue };
            if state.due().is_none_or(|due| due > now) {
                continue;
            }
            match state {
                State::Away { .. } => {
                    self.set(place, State::Connecting);
                    self.actions.push_back(SubscriberAction::Connect { place });
                }
                State::Asking { .. } => {
                    self.leave(place, state, now);
                    self.actions.push_back(SubscriberAction::Disconnect { place });
                }
                State::Answered { origin, .. } => self.ask(place, origin, now),
                State::Connecting => {}
            }
        }
    }

    /// Sizes of the collections, by name; `following` counts the publishers that tell this engine of prompts.
    pub fn gauges(&self) -> [(&'static str, usize); 2] {
        let is_following = |it: &&Followee| it.term.is_some() && it.state.origin().is_some();
        let following = self.publishers.iter().filter(is_following).count();
        [("heard", self.heard.len()), ("following", following)]
    }

    fn ask(&mut self, place: Place, origin: Origin, now: Timestamp) {
        self.set(place, State::Asking { origin, until: now + self.limits.answer });
        let message = Follow { engine: self.engine }.into();
        self.actions.push_back(SubscriberAction::Watch { place, on: true });
        self.actions.push_back(SubscriberAction::Send { place, message });
    }

    fn answered(&mut self, place: Place, origin: Origin, ask_at: Timestamp) {
        if let Some(State::Asking { .. }) = self.state(place) {
            self.actions.push_back(SubscriberAction::Watch { place, on: false });
        }
        self.set(place, State::Answered { origin, ask_at });
    }

    fn leave(&mut self, place: Place, state: State, now: Timestamp) {
        if matches!(state, State::Asking { .. }) {
            self.actions.push_back(SubscriberAction::Watch { place, on: false });
        }
        if let Some(publisher) = self.publishers.get_mut(place.0) {
            let wait = publisher.retry.next(self.limits.retry);
            publisher.state = State::Away { connect_at: now + wait };
        }
    }

    /// Forgets what was heard in the current term: no message tells which of it ends.
    fn forget_term(&mut self, place: Place) {
        self.heard.remove_place(place);
        if let Some(publisher) = self.publishers.get_mut(place.0) {
            publisher.term = None;
        }
    }

    fn state(&self, place: Place) -> Option<State> {
        self.publishers.get(place.0).map(|publisher| publisher.state)
    }

    fn set(&mut self, place: Place, state: State) {
        if let Some(publisher) = self.publishers.get_mut(place.0) {
            publisher.state = state;
        }
    }
}

impl Pause {
    /// Returns its length.
    fn begin(&mut self, limits: (Duration, Duration), now: Timestamp) -> Duration {
        let length = self.length.next(limits);
        self.until = now + length;
        length
    }

    fn is_over(&self, now: Timestamp) -> bool {
        self.until <= now
    }

    /// There was a pause since a fetch has worked.
    fn has_begun(&self) -> bool {
        !self.length.0.is_zero()
    }
}

impl State {
    const fn due(self) -> Option<Timestamp> {
        match self {
            Self::Away { connect_at } => Some(connect_at),
            Self::Connecting => None,
            Self::Asking { until, .. } => Some(until),
            Self::Answered { ask_at, .. } => Some(ask_at),
        }
    }

    /// The host of the publisher, while there is a session to it.
    const fn origin(self) -> Option<Origin> {
        match self {
            Self::Asking { origin, .. } | Self::Answered { origin, .. } => Some(origin),
            Self::Away { .. } | Self::Connecting => None,
        }
    }
}
