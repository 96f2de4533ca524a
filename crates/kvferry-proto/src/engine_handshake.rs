//! The handshake of two engines: what a consumer rank learns of the producing engine before the
//! first handoff.
//!
//! A consumer rank knows one address of the producing engine, of any of its ranks. It connects there,
//! sends the topology of its own engine, and receives the topology of the producing engine, the
//! addresses of its ranks, and their cards. From the two topologies both sides compute the same
//! [`Routing`]. An engine that does not fit, or computes with another [`Model`], is refused, with the two
//! numbers or texts that differ, and both sides log it.
//!
//! ```text
//! consumer rank                                   a rank of the producing engine
//!   Introduce: own topology, model            ──>   do the two fit?
//!             <── Introduced: engine, topology, model, addresses, cards of some ranks
//!   Introduce: ranks whose cards are missing  ──>   (only if some are)
//!             <── Introduced
//! ```
//!
//! The handshake happens once per pair of incarnations of engines; handoffs do not need it again. A rank that
//! does not know its own engine yet answers when it does. Cards are not interpreted here.
//!
//! Messages wait until the driver works them out; of each peer, the last one of its kind does. Peers share the room
//! for them ([`crate::Shares`]): the peer that has most of it gets [`WireCode::Busy`] where another one needs room. Their
//! networks, hosts and peers take turns. Cards that have arrived while others are missing have room of their own, which
//! producing engines share likewise.
//!
//! # How a driver runs it
//!
//! [`EngineHandshakes`] is one rank's side, in both roles. Its methods fall into five classes, as those
//! of [`crate::session`] do.
//!
//! * **What happened** goes in: [`EngineHandshakes::meet`], [`EngineHandshakes::set_own`],
//!   [`EngineHandshakes::arrived`], [`EngineHandshakes::met`], [`EngineHandshakes::lost`],
//!   [`EngineHandshakes::moved`].
//! * **Messages that wait** are worked out one by one: [`EngineHandshakes::examine`], [`Examination::run`],
//!   [`EngineHandshakes::accept`].
//! * **What to do** comes out of [`EngineHandshakes::poll`], one action at a time.
//! * **Time**: [`EngineHandshakes::expire`] is due at [`EngineHandshakes::next_timeout`].
//! * **Queries** change nothing: [`EngineHandshakes::has_work`], [`EngineHandshakes::gauges`].
//!
//! After each call that is not a query the driver polls until there is no action left, and carries the
//! actions out in order.
//!
//! Decoding a topology and routing between two of them takes milliseconds for engines of hundreds of
//! ranks. [`Examination::run`] does that, and needs no lock behind which the driver keeps the machine.
//! [`EngineHandshakes::know`] and [`EngineHandshakes::receive`] do all of it in one call.

mod message;
mod waiting;

pub use self::message::{EngineHandshakeMessage, EngineId, Introduce, Introduced, Model, Turned};
use self::waiting::{Kind, Waiting};
use crate::code::WireCode;
use crate::handoff::PeerId;
use crate::message::{BODY_MAX, DETAIL_MAX};
use crate::origin::Origin;
use crate::plan::{Routing, Topology};
use crate::shares::Shares;
use crate::text::truncated;
use crate::time::Timestamp;
use serde_bytes::ByteBuf;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of cards in one answer at most. One longer card may be sent alone.
const CARDS_MAX: usize = BODY_MAX / 2;

/// Bytes of the cards of one engine that a rank takes at most. A card of a rank with 128 layers has tens of KiB.
const CARDS_OF_ENGINE_MAX: usize = 16 * 1024 * 1024;

/// Bytes of cards that may be kept while others are missing, of all engines together.
const CARDS_KEPT_MAX: usize = 64 * 1024 * 1024;

/// The engine of this rank.
#[derive(Clone, Debug)]
pub struct OwnEngine {
    /// The engine's incarnation.
    pub id: EngineId,
    /// The number of this rank.
    pub rank: usize,
    /// Of the whole engine.
    pub topology: Arc<Topology>,
    /// What it computes with.
    pub model: Model,
    /// Where the agent of each rank listens.
    pub addresses: Vec<String>,
    /// The card of each rank.
    pub cards: Vec<Vec<u8>>,
}

/// A producing engine, as a consumer rank knows it after the handshake.
#[derive(Clone, Debug)]
pub struct Pairing {
    /// The engine's incarnation.
    pub engine: EngineId,
    /// Which consumer rank reads what from which producer rank.
    pub routing: Routing,
    /// Where the agent of each rank listens.
    pub addresses: Vec<String>,
    /// Cards of the ranks that this rank reads from, by rank number.
    pub cards: BTreeMap<usize, Vec<u8>>,
}

/// Why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub code: WireCode,
    /// Why, in words.
    pub detail: String,
    /// Where ranks of the producing engine listen. Empty if that is not known.
    pub addresses: Vec<String>,
}

/// What the driver of [`EngineHandshakes`] has to do.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum EngineHandshakeAction {
    /// Send a message. If the connection is gone, drop it: [`EngineHandshakes::met`] queues it again.
    Send { to: PeerId, message: EngineHandshakeMessage },
    /// Connect to a rank of the producing engine and start the heartbeat, or stop it. The heartbeat
    /// must run while a handshake waits for the peer.
    Watch { peer: PeerId, on: bool },
    /// A handshake has ended, with the engine or with the reason for its failure. Exactly once for
    /// every [`EngineHandshakes::meet`], with its ticket.
    Met { ticket: u64, result: Result<Arc<Pairing>, Failure> },
    /// This rank refused an engine, a rank of which asked for this one. For the log: at most 4 KiB.
    Refused { peer: PeerId, detail: String },
}

/// A received message, together with the part of its handling that takes long.
#[derive(Debug)]
pub struct Examination {
    from: PeerId,
    origin: Origin,
    message: EngineHandshakeMessage,
    /// This rank's engine when the examination began.
    own: Option<Arc<OwnEngine>>,
    /// Whether the routing between the two engines is known already.
    is_known: bool,
    finding: Finding,
}

/// The longest reason for the log, in bytes.
const LOGGED_MAX: usize = 4 * 1024;

/// The result of an examination.
#[derive(Debug)]
enum Finding {
    /// None was needed, or it has not run.
    None,
    /// The answer to a question. For a refused engine, also the reason.
    Answer(EngineHandshakeMessage, Option<String>),
    /// The producing engine that an answer describes.
    Heard(Result<EngineAnswers, Misfit>),
}

/// Why two engines do not fit.
type Misfit = (WireCode, String);

/// The engine handshakes of one rank, in both roles.
#[derive(Debug)]
pub struct EngineHandshakes {
    own: Option<Arc<OwnEngine>>,
    /// A handshake fails if a lost connection does not come back within this time.
    reconnect: Duration,
    /// The silence limit of the sessions; see [`EngineHandshakes::lost`].
    silence: Duration,
    meetings: HashMap<PeerId, Meeting>,
    /// Bytes of the cards in [`Meeting::heard`].
    cards: Shares<PeerId>,
    waiting: Waiting,
    actions: VecDeque<EngineHandshakeAction>,
}

/// A handshake with a producing engine.
#[derive(Debug)]
struct Meeting {
    /// Tickets that wait for it, with their deadlines.
    tickets: Vec<(u64, Timestamp)>,
    /// When the latest ticket began.
    began: Timestamp,
    connected: bool,
    /// The connection is lost: when the handshake fails, and with which code.
    lost: Option<(Timestamp, WireCode)>,
    heard: Option<EngineAnswers>,
}

/// What the producing engine has answered so far.
#[derive(Debug)]
struct EngineAnswers {
    engine: EngineId,
    routing: Routing,
    addresses: Vec<String>,
    cards: BTreeMap<usize, Vec<u8>>,
}

impl EngineHandshakes {
    /// A rank that does not know its own engine yet. `silence` is the silence limit of its sessions.
    pub fn new(reconnect: Duration, silence: Duration) -> Self {
        Self {
            own: None,
            reconnect,
            silence,
            meetings: HashMap::new(),
            cards: Shares::new(CARDS_KEPT_MAX),
            waiting: Waiting::default(),
            actions: VecDeque::new(),
        }
    }

    /// Sets this rank's engine and works out what waited for it: [`EngineHandshakes::set_own`] and
    /// [`EngineHandshakes::work_out`].
    pub fn know(&mut self, own: OwnEngine) {
        self.set_own(own);
        self.work_out();
    }

    /// Sets this rank's engine: what has arrived can be worked out. Repeats its own questions, because
    /// earlier answers were for another engine.
    pub fn set_own(&mut self, own: OwnEngine) {
        self.own = Some(Arc::new(own));
        let meetings: Vec<_> = self.meetings.keys().copied().collect();
        meetings.iter().for_each(|peer| drop(self.forget_heard(*peer)));
        meetings.into_iter().for_each(|peer| self.say(peer));
    }

    /// Begins a handshake with the engine of the rank `peer`. It ends with
    /// [`EngineHandshakeAction::Met`], at the latest after `budget`.
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
            began: now,
            connected,
            lost: None,
            heard: None,
        });
        meeting.tickets.push((ticket, now + budget));
        meeting.began = now;
        if is_new {
            self.actions.push_back(EngineHandshakeAction::Watch { peer, on: true });
            self.say(peer);
        }
    }

    /// A message arrived from a peer, whose session comes from `origin`. It waits, in place of an earlier one
    /// of its kind. An answer that no handshake waits for is dropped.
    pub fn arrived(&mut self, from: PeerId, origin: Origin, message: EngineHandshakeMessage) {
        let is_wanted = match &message {
            EngineHandshakeMessage::Introduce(_) => true,
            EngineHandshakeMessage::Introduced(_) | EngineHandshakeMessage::Turned(_) => {
                self.own.is_some() && self.meetings.contains_key(&from)
            }
            EngineHandshakeMessage::Unknown { .. } => false,
        };
        if is_wanted {
            for (peer, kind) in self.waiting.add(from, origin, message) {
                self.drop_message(peer, kind);
            }
        }
    }

    /// There is no room for a message of a peer that has more of it than others.
    fn drop_message(&mut self, peer: PeerId, kind: Kind) {
        let code = WireCode::Busy;
        let detail = "too many messages of engine handshakes wait".to_owned();
        if kind == Kind::Introduce {
            let message = Turned { code, detail, addresses: Vec::new() }.into();
            self.actions.push_back(EngineHandshakeAction::Send { to: peer, message });
        } else {
            let addresses = self.addresses_of(peer);
            self.end(peer, &Err(Failure { code, detail, addresses }));
        }
    }

    /// [`EngineHandshakes::arrived`], and works out what has arrived.
    pub fn receive(&mut self, from: PeerId, origin: Origin, message: EngineHandshakeMessage) {
        self.arrived(from, origin, message);
        self.work_out();
    }

    /// Works out what has arrived.
    pub fn work_out(&mut self) {
        while let Some(examination) = self.examine() {
            self.accept(examination.run());
        }
    }

    /// True if [`EngineHandshakes::examine`] returns a message.
    pub fn has_work(&self) -> bool {
        self.own.is_some() && self.waiting.len() > 0
    }

    /// Begins to handle the message whose turn it is. `None` if there is none, or if this rank does not
    /// know its own engine. Takes microseconds, as [`EngineHandshakes::accept`] does.
    pub fn examine(&mut self) -> Option<Examination> {
        self.own.as_ref()?;
        let (from, origin, message) = self.waiting.pop()?;
        Some(self.examination(from, origin, message))
    }

    fn examination(
        &self,
        from: PeerId,
        origin: Origin,
        message: EngineHandshakeMessage,
    ) -> Examination {
        let heard = self.meetings.get(&from).and_then(|meeting| meeting.heard.as_ref());
        let is_known = heard.is_some_and(|heard| {
            matches!(&message, EngineHandshakeMessage::Introduced(it) if it.engine == heard.engine)
        });
        let own = self.own.clone();
        Examination { from, origin, message, own, is_known, finding: Finding::None }
    }

    /// Acts on an examined message. If this rank's engine has changed since the examination began,
    /// runs it again.
    pub fn accept(&mut self, examination: Examination) {
        let is_same = match (&examination.own, &self.own) {
            (Some(then), Some(now)) => Arc::ptr_eq(then, now),
            (then, now) => then.is_none() && now.is_none(),
        };
        let examination = if is_same {
            examination
        } else {
            let Examination { from, origin, message, .. } = examination;
            self.examination(from, origin, message).run()
        };
        let Examination { from, origin, message, finding, .. } = examination;
        match (message, finding) {
            (EngineHandshakeMessage::Introduce(_), Finding::Answer(message, refusal)) => {
                let refused =
                    refusal.map(|detail| EngineHandshakeAction::Refused { peer: from, detail });
                self.actions.extend(refused);
                self.actions.push_back(EngineHandshakeAction::Send { to: from, message });
            }
            (EngineHandshakeMessage::Introduced(it), finding) => {
                self.heard(from, origin, it, finding);
            }
            (EngineHandshakeMessage::Turned(turned), _) => {
                let Turned { code, detail, addresses } = turned;
                let code = if code.is_ok() { WireCode::Malformed } else { code };
                self.end(from, &Err(Failure { code, detail, addresses }));
            }
            (EngineHandshakeMessage::Introduce(_) | EngineHandshakeMessage::Unknown { .. }, _) => {}
        }
    }

    /// The connection to a peer was lost. `gone` means that it will not come back. A handshake that began
    /// less than a silence window before its session ended in silence waits for the rest of the window, as
    /// a handoff does.
    pub fn lost(&mut self, peer: PeerId, code: WireCode, gone: bool, now: Timestamp) {
        self.waiting.remove(peer, Kind::Introduce);
        let Some(meeting) = self.meetings.get_mut(&peer) else { return };
        meeting.connected = false;
        let until = match gone {
            true if code == WireCode::Silent => now.max(meeting.began + self.silence),
            true => now,
            false => now + self.reconnect,
        };
        let until = meeting.lost.map_or(until, |(before, _)| before.min(until));
        meeting.lost = Some((until, code));
        self.expire(now);
    }

    /// A connection to a peer is up: the first, or another one.
    pub fn met(&mut self, peer: PeerId) {
        if let Some(meeting) = self.meetings.get_mut(&peer) {
            (meeting.connected, meeting.lost) = (true, None);
            self.say(peer);
        }
    }

    /// The rank at the address of `before` has restarted and is now the peer `now`.
    pub fn moved(&mut self, before: PeerId, now: PeerId) {
        self.forget_heard(before);
        if let Some(meeting) = self.meetings.remove(&before) {
            self.meetings.insert(now, meeting);
        }
    }

    /// When [`EngineHandshakes::expire`] is due.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        self.meetings.values().filter_map(Meeting::due).min()
    }

    /// Ends the handshakes whose deadlines have passed.
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
                _ => "the producing engine did not answer",
            };
            let late: Vec<(u64, Timestamp)> = late;
            for (ticket, _) in late {
                let failure = Failure {
                    code: WireCode::Deadline,
                    detail: why.to_owned(),
                    addresses: addresses.clone(),
                };
                let met = EngineHandshakeAction::Met { ticket, result: Err(failure) };
                self.actions.push_back(met);
            }
            self.forget_if_unwanted(peer);
        }
    }

    /// The next action.
    pub fn poll(&mut self) -> Option<EngineHandshakeAction> {
        self.actions.pop_front()
    }

    /// Sizes of the collections, by name. Zero when no handshake is under way.
    pub fn gauges(&self) -> [(&'static str, usize); 2] {
        [("meetings", self.meetings.len()), ("engine_handshakes", self.waiting.len())]
    }

    /// Asks a producing engine for what it has not answered yet.
    fn say(&mut self, peer: PeerId) {
        let (Some(own), Some(meeting)) = (&self.own, self.meetings.get(&peer)) else { return };
        if !meeting.connected {
            return;
        }
        let ranks = meeting.heard.as_ref().map_or_else(Vec::new, |heard| heard.missing(own.rank));
        let (topology, model) = (own.topology.encode(), own.model.clone());
        let introduce = Introduce { topology, model, ranks };
        self.actions.push_back(EngineHandshakeAction::Send { to: peer, message: introduce.into() });
    }

    /// A producing engine has described itself.
    fn heard(&mut self, from: PeerId, origin: Origin, it: Introduced, finding: Finding) {
        let known = self.forget_heard(from).filter(|heard| heard.engine == it.engine);
        let (Some(own), true) = (&self.own, self.meetings.contains_key(&from)) else { return };
        let is_first = known.is_none();
        let heard = match (known, finding) {
            (Some(known), _) => Ok(known),
            (None, Finding::Heard(heard)) => heard,
            // What was known when the examination began has been forgotten since.
            (None, _) => EngineAnswers::new(own, &it),
        };
        let mut heard = match heard {
            Ok(heard) => heard,
            Err((code, detail)) => {
                let addresses = it.addresses;
                return self.end(from, &Err(Failure { code, detail, addresses }));
            }
        };
        let missing = heard.missing(own.rank);
        let shows_none = it.cards.is_empty();
        let news = it.cards.into_iter().filter(|(rank, _)| missing.contains(rank));
        let news: Vec<_> = news.map(|(rank, card)| (rank as usize, card.into_vec())).collect();
        let is_news = is_first || !news.is_empty();
        heard.cards.extend(news);
        let bytes = heard.bytes();
        if bytes > CARDS_OF_ENGINE_MAX {
            let detail = format!(
                "the metadata of the producing engine's ranks have {bytes} bytes so far, beyond the limit of \
                 {CARDS_OF_ENGINE_MAX}"
            );
            let (code, addresses) = (WireCode::TooLarge, heard.addresses);
            return self.end(from, &Err(Failure { code, detail, addresses }));
        }
        if heard.missing(own.rank).is_empty() {
            let EngineAnswers { engine, routing, addresses, cards } = heard;
            return self.end(from, &Ok(Arc::new(Pairing { engine, routing, addresses, cards })));
        }
        self.keep_heard(from, origin, heard);
        if is_news {
            // The cards may all be of ranks that this rank does not read from. It names those now.
            self.say(from);
        } else if shows_none {
            let detail = "the producing engine does not show all of its ranks".to_owned();
            let (code, addresses) = (WireCode::Malformed, it.addresses);
            self.end(from, &Err(Failure { code, detail, addresses }));
        }
        // Else the answer repeats an earlier one. The missing cards have been asked for since.
    }

    /// Keeps what a producing engine has answered so far. If there is no room for it, ends the handshakes with the engines
    /// that have most of it.
    fn keep_heard(&mut self, from: PeerId, origin: Origin, heard: EngineAnswers) {
        let Some(meeting) = self.meetings.get_mut(&from) else { return };
        self.cards.add(&from, origin, from.0, heard.bytes());
        meeting.heard = Some(heard);
        while let Some(peer) = self.cards.excess(&from) {
            let code = WireCode::Busy;
            let detail = "too many engines describe their ranks at once".to_owned();
            let addresses = self.addresses_of(peer);
            self.forget_heard(peer);
            self.end(peer, &Err(Failure { code, detail, addresses }));
        }
    }

    /// Forgets what a producing engine has answered so far, and returns it.
    fn forget_heard(&mut self, peer: PeerId) -> Option<EngineAnswers> {
        self.cards.remove(&peer);
        self.meetings.get_mut(&peer)?.heard.take()
    }

    fn addresses_of(&self, peer: PeerId) -> Vec<String> {
        let heard = self.meetings.get(&peer).and_then(|meeting| meeting.heard.as_ref());
        heard.map_or_else(Vec::new, |heard| heard.addresses.clone())
    }

    fn end(&mut self, peer: PeerId, result: &Result<Arc<Pairing>, Failure>) {
        let Some(meeting) = self.meetings.get_mut(&peer) else { return };
        for (ticket, _) in meeting.tickets.drain(..) {
            self.actions.push_back(EngineHandshakeAction::Met { ticket, result: result.clone() });
        }
        self.forget_if_unwanted(peer);
    }

    fn forget_if_unwanted(&mut self, peer: PeerId) {
        if self.meetings.get(&peer).is_some_and(|meeting| meeting.tickets.is_empty()) {
            self.forget_heard(peer);
            self.meetings.remove(&peer);
            self.actions.push_back(EngineHandshakeAction::Watch { peer, on: false });
        }
    }
}

impl Examination {
    /// Does the part that takes long: milliseconds for engines of hundreds of ranks.
    #[must_use]
    pub fn run(mut self) -> Self {
        if let Some(own) = self.own.as_ref().filter(|_| !self.is_known) {
            self.finding = match &self.message {
                EngineHandshakeMessage::Introduce(introduce) => own.answer(introduce),
                EngineHandshakeMessage::Introduced(it) => {
                    Finding::Heard(EngineAnswers::new(own, it))
                }
                _ => Finding::None,
            };
        }
        self
    }
}

impl OwnEngine {
    /// The answer to a rank that wants to consume from this engine.
    fn answer(&self, introduce: &Introduce) -> Finding {
        let layouts = |detail: String| (WireCode::LayoutMismatch, detail);
        let fits = compare_models(&self.model, &introduce.model).and_then(|()| {
            let theirs =
                Topology::decode(&introduce.topology).map_err(|e| layouts(e.to_string()))?;
            Routing::new(&self.topology, &theirs).map_err(|e| layouts(e.to_string()))
        });
        let Err((code, detail)) = fits else {
            return Finding::Answer(self.card_of(&introduce.ranks).into(), None);
        };
        let said = truncated(&detail, DETAIL_MAX).to_owned();
        let addresses = self.addresses.clone();
        let turned = Turned { code, detail: said, addresses };
        Finding::Answer(turned.into(), Some(truncated(&detail, LOGGED_MAX).to_owned()))
    }

    /// This engine's description with the cards of `ranks`, or with as many as fit.
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
            model: self.model.clone(),
            addresses: self.addresses.clone(),
            cards,
        }
    }
}

fn compare_models(producer: &Model, consumer: &Model) -> Result<(), Misfit> {
    Model::compare(producer, consumer).map_err(|detail| (WireCode::ModelMismatch, detail))
}

impl Meeting {
    fn due(&self) -> Option<Timestamp> {
        let first = self.tickets.iter().map(|(_, until)| *until).min();
        [first, self.lost.map(|(until, _)| until)].into_iter().flatten().min()
    }
}

impl EngineAnswers {
    fn new(own: &OwnEngine, it: &Introduced) -> Result<Self, Misfit> {
        compare_models(&it.model, &own.model)?;
        let layouts = |detail: String| (WireCode::LayoutMismatch, detail);
        let topology = Topology::decode(&it.topology).map_err(|e| layouts(e.to_string()))?;
        let routing = Routing::new(&topology, &own.topology).map_err(|e| layouts(e.to_string()))?;
        if it.addresses.len() != topology.ranks() {
            let (ranks, addresses) = (topology.ranks(), it.addresses.len());
            return Err(layouts(format!(
                "the producing engine has {ranks} ranks, and {addresses} addresses"
            )));
        }
        let (engine, addresses) = (it.engine, it.addresses.clone());
        Ok(Self { engine, routing, addresses, cards: BTreeMap::new() })
    }

    /// Bytes of the cards.
    fn bytes(&self) -> usize {
        self.cards.values().map(Vec::len).sum()
    }

    /// Ranks that rank `reader` reads from and whose cards are missing.
    fn missing(&self, reader: usize) -> Vec<u32> {
        let sources = self.routing.sources_of(reader).iter();
        sources.filter(|rank| !self.cards.contains_key(rank)).map(|rank| *rank as u32).collect()
    }
}
