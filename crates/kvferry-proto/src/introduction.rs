//! What the ranks of two engines have to know of each other before a handoff, and how they learn it.
//!
//! A consumer is given one address of the producing engine, any rank's. It says there what its own
//! engine looks like, and hears what that engine looks like: who its ranks are, where they listen,
//! how their blocks lie. From the two topologies both sides compute the same [`Routing`]. Engines
//! that do not fit are refused, with the two numbers that differ, and both sides say so.
//!
//! ```text
//! consumer rank                                   a rank of the producing engine
//!   Introduce: our topology, which rank I am  ──>   do the two fit?
//!             <── Introduced: engine, topology, addresses, cards of some ranks
//!   Introduce: cards of the ranks I read from ──>   (only if they were not among them)
//!             <── Introduced
//! ```
//!
//! It is done once per pair of engine lives; handoffs need nothing of it afterwards. A rank that
//! does not know its own engine yet answers when it does.
//!
//! [`Introductions`] is one rank's side of it, as both, in the style of [`crate::handoff`]. What a
//! card says is not for it to know.

use crate::code::WireCode;
use crate::handoff::PeerId;
use crate::message::{BODY_MAX, Check, DETAIL_MAX, MessageError, at_most, bodies, messages};
use crate::plan::{RANKS_MAX, Routing, Topology};
use crate::text::truncated;
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The longest address, in bytes.
const ADDRESS_MAX: usize = crate::message::ADVERTISED_MAX;

/// Bytes of cards in one answer at most, but for the first.
const CARDS_MAX: usize = BODY_MAX / 2;

/// Ranks that wait for an answer at most, until this one knows its own engine, and the bytes that
/// may be kept for that.
const WAITING_MAX: usize = 4 * RANKS_MAX;
const WAITING_BYTES_MAX: usize = 64 * 1024 * 1024;

/// A life of an engine: drawn when its scheduler half starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineId(pub u128);

impl EngineId {
    /// The id that is shown as `digits`.
    pub fn parse(digits: &str) -> Option<Self> {
        let plain = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        plain.then(|| u128::from_str_radix(digits, 16).ok().map(Self)).flatten()
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Consumer rank to a rank of the producing engine: who are you? May be said again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduce {
    /// [`Topology::encode`] of the consumer's engine.
    #[serde(with = "serde_bytes")]
    pub topology: Vec<u8>,
    /// Ranks whose cards are wanted; if none, whichever fit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduced {
    /// This life of the engine.
    pub engine: EngineId,
    /// [`Topology::encode`] of it.
    #[serde(with = "serde_bytes")]
    pub topology: Vec<u8>,
    /// Where the agent of each rank listens, `host:port`; at most [`RANKS_MAX`].
    pub addresses: Vec<String>,
    /// What some of the ranks say of themselves, by the number of the rank.
    pub cards: BTreeMap<u32, ByteBuf>,
}

/// The answer to an engine that this one can't hand anything to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turned {
    /// Why.
    pub code: WireCode,
    /// Why, in words; at most [`DETAIL_MAX`] bytes.
    pub detail: String,
    /// Where the agent of each rank of the producing engine listens; at most [`RANKS_MAX`]. They
    /// still have to be told that what they keep is not needed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
}

messages! {
    /// A message of an introduction.
    IntroductionMessage, "introduction":
    "introduce" => /** See [`Introduce`]. */ Introduce;
    "introduced" => /** See [`Introduced`]. */ Introduced;
    "turned" => /** See [`Turned`]. */ Turned;
}

bodies!(IntroductionMessage);

impl Check for Introduce {
    fn check(&self) -> Result<(), MessageError> {
        at_most("ranks", self.ranks.len(), RANKS_MAX)
    }
}

impl Check for Introduced {
    fn check(&self) -> Result<(), MessageError> {
        at_most("cards", self.cards.len(), RANKS_MAX)?;
        check_addresses(&self.addresses)
    }
}

impl Check for Turned {
    fn check(&self) -> Result<(), MessageError> {
        at_most("detail", self.detail.len(), DETAIL_MAX)?;
        if self.code.is_ok() {
            let detail = "turned away for no reason".to_owned();
            return Err(MessageError::Malformed { kind: "turned", detail });
        }
        check_addresses(&self.addresses)
    }
}

fn check_addresses(addresses: &[String]) -> Result<(), MessageError> {
    at_most("addresses", addresses.len(), RANKS_MAX)?;
    at_most("address", addresses.iter().map(String::len).max().unwrap_or(0), ADDRESS_MAX)
}

/// An engine as one of its ranks knows it.
#[derive(Clone, Debug)]
pub struct OwnEngine {
    /// This life of it.
    pub id: EngineId,
    /// Which of its ranks this is.
    pub rank: usize,
    /// All of it.
    pub topology: Arc<Topology>,
    /// Where the agent of each rank listens.
    pub addresses: Vec<String>,
    /// What each rank says of itself.
    pub cards: Vec<Vec<u8>>,
}

/// What a consumer rank has learned of a producing engine.
#[derive(Clone, Debug)]
pub struct Pairing {
    /// Which life of it.
    pub engine: EngineId,
    /// Who reads what from whom.
    pub routing: Routing,
    /// Where the agent of each rank listens.
    pub addresses: Vec<String>,
    /// What the ranks say of themselves that this rank deals with, by their numbers.
    pub cards: BTreeMap<usize, Vec<u8>>,
}

/// Why there is no [`Pairing`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub code: WireCode,
    /// Why, in words.
    pub detail: String,
    /// Where ranks of the other engine listen, as far as that is known.
    pub addresses: Vec<String>,
}

/// What the driver of [`Introductions`] has to do.
#[derive(Clone, Debug)]
pub enum IntroductionAction {
    /// Send a message. If the connection is gone, drop it: what matters is said again.
    Send {
        /// To whom.
        to: PeerId,
        /// What.
        message: IntroductionMessage,
    },
    /// Have the peer met, and watched by heartbeat, because something is expected of it; or no
    /// longer.
    Watch {
        /// Whom.
        peer: PeerId,
        /// From now on, or no longer.
        on: bool,
    },
    /// An introduction has ended. Said exactly once for every [`Introductions::meet`].
    Met {
        /// What was given to `meet`.
        ticket: u64,
        /// How.
        result: Result<Arc<Pairing>, Failure>,
    },
    /// Somebody was refused who wanted something of this engine.
    Refused {
        /// Who.
        peer: PeerId,
        /// Why, in words.
        detail: String,
    },
}

/// One rank's introductions.
#[derive(Debug)]
pub struct Introductions {
    own: Option<OwnEngine>,
    /// How long a connection that was lost may take to come back.
    reconnect: Duration,
    meetings: HashMap<PeerId, Meeting>,
    /// Who has asked before this rank knew its own engine.
    waiting: HashMap<PeerId, Introduce>,
    actions: VecDeque<IntroductionAction>,
}

/// A producing engine that is being met.
#[derive(Debug)]
struct Meeting {
    /// Who waits for it, and until when.
    tickets: Vec<(u64, Timestamp)>,
    connected: bool,
    /// Since when the connection is gone: it is given up then, for that reason.
    lost: Option<(Timestamp, WireCode)>,
    heard: Option<Heard>,
}

/// What it has said so far.
#[derive(Debug)]
struct Heard {
    engine: EngineId,
    routing: Routing,
    addresses: Vec<String>,
    cards: BTreeMap<usize, Vec<u8>>,
}

impl Introductions {
    /// A rank that does not know its own engine yet.
    pub fn new(reconnect: Duration) -> Self {
        Self {
            own: None,
            reconnect,
            meetings: HashMap::new(),
            waiting: HashMap::new(),
            actions: VecDeque::new(),
        }
    }

    /// Says what this rank's engine is, or is from now on. Who has waited for that is answered, and
    /// what was heard by another engine is asked for again.
    pub fn know(&mut self, own: OwnEngine) {
        self.own = Some(own);
        for (peer, introduce) in std::mem::take(&mut self.waiting) {
            self.introduced_to(peer, &introduce);
        }
        self.meetings.values_mut().for_each(|meeting| meeting.heard = None);
        let meetings: Vec<_> = self.meetings.keys().copied().collect();
        meetings.into_iter().for_each(|peer| self.say(peer));
    }

    /// Wants to know the engine one of whose ranks is `peer`.
    pub fn meet(
        &mut self,
        ticket: u64,
        peer: PeerId,
        connected: bool,
        budget: Duration,
        now: Timestamp,
    ) {
        let is_new = !self.meetings.contains_key(&peer);
        let meeting = self.meetings.entry(peer).or_insert_with(|| Meeting {
            tickets: Vec::new(),
            connected,
            lost: None,
            heard: None,
        });
        meeting.tickets.push((ticket, now + budget));
        if is_new {
            self.actions.push_back(IntroductionAction::Watch { peer, on: true });
            self.say(peer);
        }
    }

    /// A message came from a peer.
    pub fn receive(&mut self, from: PeerId, message: IntroductionMessage) {
        match message {
            IntroductionMessage::Introduce(introduce) => self.introduced_to(from, &introduce),
            IntroductionMessage::Introduced(it) => self.heard(from, it),
            IntroductionMessage::Turned(turned) => {
                // What was not asked for is no answer.
                if self.own.is_none() {
                    return;
                }
                let Turned { code, detail, addresses } = turned;
                let code = if code.is_ok() { WireCode::Malformed } else { code };
                self.end(from, &Err(Failure { code, detail, addresses }));
            }
            IntroductionMessage::Unknown { .. } => {}
        }
    }

    /// The connection to a peer is gone. `gone` says that it will not come back.
    pub fn lost(&mut self, peer: PeerId, code: WireCode, gone: bool, now: Timestamp) {
        self.waiting.remove(&peer);
        let Some(meeting) = self.meetings.get_mut(&peer) else { return };
        meeting.connected = false;
        let until = if gone { now } else { now + self.reconnect };
        let until = meeting.lost.map_or(until, |(before, _)| before.min(until));
        meeting.lost = Some((until, code));
        self.expire(now);
    }

    /// There is a connection to a peer: the first, or a new one.
    pub fn met(&mut self, peer: PeerId) {
        if let Some(meeting) = self.meetings.get_mut(&peer) {
            (meeting.connected, meeting.lost) = (true, None);
            self.say(peer);
        }
    }

    /// Whoever is met where `before` was expected is `now`: another life.
    pub fn moved(&mut self, before: PeerId, now: PeerId) {
        if let Some(mut meeting) = self.meetings.remove(&before) {
            meeting.heard = None;
            self.meetings.insert(now, meeting);
        }
    }

    /// When [`Introductions::expire`] has something to do next.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        self.meetings.values().filter_map(Meeting::due).min()
    }

    /// Ends what is overdue.
    pub fn expire(&mut self, now: Timestamp) {
        let due = |meeting: &Meeting| meeting.due().is_some_and(|due| due <= now);
        let overdue: Vec<_> =
            self.meetings.iter().filter(|(_, it)| due(it)).map(|(peer, _)| *peer).collect();
        for peer in overdue {
            let addresses = self.addresses_of(peer);
            let meeting = self.meetings.get_mut(&peer).expect("found just now");
            if let Some((_, code)) = meeting.lost.filter(|(until, _)| *until <= now) {
                let detail = "the producing engine can't be reached".to_owned();
                self.end(peer, &Err(Failure { code, detail, addresses }));
                continue;
            }
            let (late, rest) = meeting.tickets.drain(..).partition(|(_, until)| *until <= now);
            meeting.tickets = rest;
            let why = match (&self.own, meeting.connected) {
                (None, _) => "this rank does not know its own engine",
                (_, false) => "the producing engine can't be reached",
                _ => "the producing engine does not say what it is",
            };
            let late: Vec<(u64, Timestamp)> = late;
            for (ticket, _) in late {
                let failure = Failure {
                    code: WireCode::Deadline,
                    detail: why.to_owned(),
                    addresses: addresses.clone(),
                };
                let met = IntroductionAction::Met { ticket, result: Err(failure) };
                self.actions.push_back(met);
            }
            self.forget_if_unwanted(peer);
        }
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<IntroductionAction> {
        self.actions.pop_front()
    }

    /// What is kept, by name; zero when nothing is under way.
    pub fn gauges(&self) -> [(&'static str, usize); 2] {
        [("meetings", self.meetings.len()), ("introductions", self.waiting.len())]
    }

    /// Asks a producing engine for what is not known of it yet.
    fn say(&mut self, peer: PeerId) {
        let (Some(own), Some(meeting)) = (&self.own, self.meetings.get(&peer)) else { return };
        if !meeting.connected {
            return;
        }
        let ranks = meeting.heard.as_ref().map_or_else(Vec::new, |heard| heard.missing(own.rank));
        let introduce = Introduce { topology: own.topology.encode(), ranks };
        self.actions.push_back(IntroductionAction::Send { to: peer, message: introduce.into() });
    }

    /// Somebody wants to consume from this engine.
    fn introduced_to(&mut self, from: PeerId, introduce: &Introduce) {
        let Some(own) = &self.own else {
            let bytes: usize = self.waiting.values().map(|it| it.topology.len()).sum();
            if self.waiting.len() < WAITING_MAX
                && bytes + introduce.topology.len() <= WAITING_BYTES_MAX
            {
                self.waiting.insert(from, introduce.clone());
                return;
            }
            let detail = "too many wait for this rank to know its own engine".to_owned();
            let turned = Turned { code: WireCode::Busy, detail, addresses: Vec::new() };
            let turned = IntroductionAction::Send { to: from, message: turned.into() };
            return self.actions.push_back(turned);
        };
        let fits = match Topology::decode(&introduce.topology) {
            Ok(theirs) => Routing::new(&own.topology, &theirs).map(drop).map_err(|e| e.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let message = match fits {
            Ok(()) => own.card_of(&introduce.ranks).into(),
            Err(detail) => {
                let code = WireCode::LayoutMismatch;
                let said = truncated(&detail, DETAIL_MAX).to_owned();
                let refused = IntroductionAction::Refused { peer: from, detail };
                let addresses = own.addresses.clone();
                let turned = Turned { code, detail: said, addresses };
                self.actions.push_back(refused);
                turned.into()
            }
        };
        self.actions.push_back(IntroductionAction::Send { to: from, message });
    }

    /// A producing engine has said what it is.
    fn heard(&mut self, from: PeerId, it: Introduced) {
        let (Some(own), Some(meeting)) = (&self.own, self.meetings.get_mut(&from)) else { return };
        let addresses = it.addresses.clone();
        let known = meeting.heard.take().filter(|heard| heard.engine == it.engine);
        let is_first = known.is_none();
        let mut heard = match known {
            Some(heard) => heard,
            None => match Heard::new(own, &it) {
                Ok(heard) => heard,
                Err(detail) => {
                    let code = WireCode::LayoutMismatch;
                    return self.end(from, &Err(Failure { code, detail, addresses }));
                }
            },
        };
        let missing = heard.missing(own.rank);
        let shows_none = it.cards.is_empty();
        let news = it.cards.into_iter().filter(|(rank, _)| missing.contains(rank));
        let news: Vec<_> = news.map(|(rank, card)| (rank as usize, card.into_vec())).collect();
        let is_news = is_first || !news.is_empty();
        heard.cards.extend(news);
        if heard.missing(own.rank).is_empty() {
            let Heard { engine, routing, addresses, cards } = heard;
            return self.end(from, &Ok(Arc::new(Pairing { engine, routing, addresses, cards })));
        }
        meeting.heard = Some(heard);
        if is_news {
            // Those that fitted may be none that this rank deals with: now it can say which.
            self.say(from);
        } else if shows_none {
            let detail = "the producing engine does not show all of its ranks".to_owned();
            let code = WireCode::Malformed;
            self.end(from, &Err(Failure { code, detail, addresses }));
        }
        // Else it is an answer that was given before. What is missing has been asked for since.
    }

    fn addresses_of(&self, peer: PeerId) -> Vec<String> {
        let heard = self.meetings.get(&peer).and_then(|meeting| meeting.heard.as_ref());
        heard.map_or_else(Vec::new, |heard| heard.addresses.clone())
    }

    fn end(&mut self, peer: PeerId, result: &Result<Arc<Pairing>, Failure>) {
        let Some(meeting) = self.meetings.get_mut(&peer) else { return };
        for (ticket, _) in meeting.tickets.drain(..) {
            self.actions.push_back(IntroductionAction::Met { ticket, result: result.clone() });
        }
        self.forget_if_unwanted(peer);
    }

    fn forget_if_unwanted(&mut self, peer: PeerId) {
        if self.meetings.get(&peer).is_some_and(|meeting| meeting.tickets.is_empty()) {
            self.meetings.remove(&peer);
            self.actions.push_back(IntroductionAction::Watch { peer, on: false });
        }
    }
}

impl OwnEngine {
    /// What it says of itself, with the cards of these ranks, or of whichever fit.
    fn card_of(&self, ranks: &[u32]) -> Introduced {
        let mut cards = BTreeMap::new();
        let mut bytes = 0;
        let all = 0..self.cards.len() as u32;
        let wanted: Vec<u32> = if ranks.is_empty() { all.collect() } else { ranks.to_vec() };
        for rank in wanted {
            let Some(card) = self.cards.get(rank as usize) else { continue };
            bytes += card.len();
            if bytes > CARDS_MAX && !cards.is_empty() {
                break;
            }
            cards.insert(rank, ByteBuf::from(card.clone()));
        }
        Introduced {
            engine: self.id,
            topology: self.topology.encode(),
            addresses: self.addresses.clone(),
            cards,
        }
    }
}

impl Meeting {
    fn due(&self) -> Option<Timestamp> {
        let first = self.tickets.iter().map(|(_, until)| *until).min();
        [first, self.lost.map(|(until, _)| until)].into_iter().flatten().min()
    }
}

impl Heard {
    fn new(own: &OwnEngine, it: &Introduced) -> Result<Self, String> {
        let topology = Topology::decode(&it.topology).map_err(|e| e.to_string())?;
        let routing = Routing::new(&topology, &own.topology).map_err(|e| e.to_string())?;
        if it.addresses.len() != topology.ranks() {
            let (ranks, addresses) = (topology.ranks(), it.addresses.len());
            return Err(format!(
                "the producing engine has {ranks} ranks, and {addresses} addresses"
            ));
        }
        let (engine, addresses) = (it.engine, it.addresses.clone());
        Ok(Self { engine, routing, addresses, cards: BTreeMap::new() })
    }

    /// Ranks that rank `reader` deals with, and that have not shown their cards.
    fn missing(&self, reader: usize) -> Vec<u32> {
        let sources = self.routing.sources_of(reader).iter();
        sources.filter(|rank| !self.cards.contains_key(rank)).map(|rank| *rank as u32).collect()
    }
}
