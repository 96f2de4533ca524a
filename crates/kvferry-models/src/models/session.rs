//! Random operations on both sides of a session and random faults between them. What must hold: one
//! `Closed` on each side and nothing after it; each request answered exactly once, with the peer's
//! answer if the peer answered; no revoke confirmed that the peer did not confirm; bounded queues;
//! the same outcome on both sides.
//!
//! Without a secret the protocol does not detect faults that change bytes after the handshake (a frame
//! lost, doubled, swapped, cut, damaged or forged). After such a fault only the rules of each side
//! alone are checked, and that two established sides agree on the content of the handshake. With a
//! secret, no such fault makes a side believe anything that its peer did not say.

use super::Model;
use crate::decoders::messages::every_message;
use crate::pair::{A, B, INCARNATION, Pair, SESSION, config, ms};
use kvferry_proto::fuzzing::{Met, Script};
use kvferry_proto::message::encode;
use kvferry_proto::{
    ChecksumPolicy, Incarnation, PeerInfo, Secret, SessionConfig, SessionEvent, StreamId, WireCode,
};
use std::collections::BTreeMap;
use std::time::Duration;

pub const MODEL: Model = Model {
    name: "session_model",
    run,
    rows: &[
        STALL, PARTITION, CUT, KILL, RESTART, NAP, SLEEP, CLOCK_BACK, DELAY, GARBAGE, DROP, DOUBLE,
        SWAP, TRUNCATE, CORRUPT, FORGE, SECRETS, VERSIONS, LAYOUTS, STALE,
    ],
    columns: &[
        "hello?",
        "challenge?",
        "proof?",
        "ready?",
        "idle",
        "active",
        "requesting",
        "revoking",
        "closing",
        "closed",
    ],
    unreachable: &[
        (SECRETS, &["challenge?"], "if only one side has a secret, the acceptor has refused first"),
        (SECRETS, &["ready?"], "the acceptor looks at the proof first"),
        (SECRETS, &LATER, "secrets are compared in the handshake"),
        (
            VERSIONS,
            &["challenge?", "proof?", "ready?"],
            "the acceptor chooses, from the first message",
        ),
        (VERSIONS, &LATER, "versions are compared in the handshake"),
        (LAYOUTS, &["hello?", "challenge?", "ready?"], "the acceptor compares, after the proof"),
        (LAYOUTS, &LATER, "layouts are compared in the handshake"),
        (STALE, &["hello?", "proof?", "ready?"], "the initiator compares, in the first answer"),
        (STALE, &LATER, "who answers is compared in the handshake"),
    ],
    cases: (6000, 160),
};

/// The states after the handshake.
const LATER: [&str; 6] = ["idle", "active", "requesting", "revoking", "closing", "closed"];

const STALL: &str = "stall";
const PARTITION: &str = "partition";
const CUT: &str = "disconnect";
const KILL: &str = "kill";
const RESTART: &str = "restart";
const NAP: &str = "nap";
const SLEEP: &str = "sleep";
const CLOCK_BACK: &str = "clock back";
const DELAY: &str = "delay";
const GARBAGE: &str = "garbage";
const DROP: &str = "drop";
const DOUBLE: &str = "duplicate";
const SWAP: &str = "reorder";
const TRUNCATE: &str = "truncate";
const CORRUPT: &str = "corrupt";
const FORGE: &str = "forge";
const SECRETS: &str = "secrets differ";
const VERSIONS: &str = "versions differ";
const LAYOUTS: &str = "layouts differ";
const STALE: &str = "peer restarted";

/// Faults that happen while a session runs.
const FAULTS: [&str; 16] = [
    STALL, PARTITION, CUT, KILL, RESTART, NAP, SLEEP, CLOCK_BACK, DELAY, GARBAGE, DROP, DOUBLE,
    SWAP, TRUNCATE, CORRUPT, FORGE,
];

/// The configurations of both sides.
struct Setting {
    configs: [SessionConfig; 2],
    expected: Option<Incarnation>,
    /// Reason for which they can establish no session, and the code of the side that refuses.
    fault: Option<(&'static str, WireCode)>,
}

/// Draws the secrets, versions and other settings of both sides; most of the time they agree.
fn setting(script: &mut Script<'_>) -> Setting {
    let mut configs = [config(A), config(B)];
    if script.flip() {
        configs.iter_mut().for_each(|c| c.secret = Secret::new("hush"));
    }
    if script.flip() {
        configs[script.below(2)].checksum = ChecksumPolicy::On;
        configs[A].capabilities = 0b0110;
        configs[B].capabilities = 0b0011;
    }
    let mut setting = Setting { configs, expected: None, fault: None };
    let [a, b] = &mut setting.configs;
    match script.below(24) {
        0 => {
            a.secret = Secret::new("one");
            b.secret = Secret::new("another");
            setting.fault = Some((SECRETS, WireCode::AuthFailed));
        }
        1 => {
            let with = script.below(2);
            setting.configs[with].secret = Secret::new("hush");
            setting.configs[1 - with].secret = None;
            let codes = [WireCode::AuthUnsupported, WireCode::AuthRequired];
            setting.fault = Some((SECRETS, codes[with]));
        }
        2 => {
            (a.versions, b.versions) =
                if script.flip() { ((1, 1), (2, 3)) } else { ((2, 2), (1, 1)) };
            setting.fault = Some((VERSIONS, WireCode::VersionMismatch));
        }
        3 => {
            a.fingerprint = Some(b"fp16".to_vec());
            b.fingerprint = Some(vec![8; 1000]);
            setting.fault = Some((LAYOUTS, WireCode::LayoutMismatch));
        }
        4 => {
            setting.expected = Some(Incarnation(0xdead));
            setting.fault = Some((STALE, WireCode::StaleIncarnation));
        }
        5 => setting.expected = Some(INCARNATION[B]),
        6 => (a.versions, b.versions) = ((1, 9), (1, 4)),
        7 => {
            for config in &mut setting.configs {
                config.fingerprint = Some(b"bf16, 16 tokens".to_vec());
            }
        }
        _ => {}
    }
    setting
}

/// Operations and events of one side.
#[derive(Debug, Default)]
struct Side {
    active: bool,
    closing: bool,
    peer: Option<PeerInfo>,
    /// Requests of this side, with their answers.
    requests: BTreeMap<u64, Option<WireCode>>,
    /// Revokes of this side, and whether they were confirmed.
    revokes: BTreeMap<u64, bool>,
    /// The peer's, not yet answered, oldest first.
    owed: Vec<u64>,
    owed_revokes: Vec<u64>,
    /// Answers of this side to the peer.
    answered: BTreeMap<u64, WireCode>,
    confirmed: Vec<u64>,
    seen: usize,
    closed: usize,
}

impl Side {
    fn note_request(&mut self, id: u64) {
        if id != 0 {
            assert_eq!(self.requests.insert(id, None), None, "an id is used once");
        }
    }
}

struct World<'a> {
    pair: Pair,
    sides: [Side; 2],
    setting: Setting,
    faults: usize,
    /// True if the bytes on the wire are not those that were sent.
    tampered: bool,
    restarted: bool,
    answers: u16,
    met: Met<'a>,
}

/// Seeds with each setting, in a quiet hundred milliseconds and in a busy one.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = super::random_seeds();
    for setting in 0..9 {
        for choice in 0..2 {
            // Secrets or not, no checksums, the setting and its choice, latency, chunk.
            let start = [choice, 0, setting, choice, 0, 0];
            let wait = [0, 0, 5];
            let requests_and_revokes = [0, 20, 2, 1, 26, 1, 0, 30, 1, 0, 1, 0, 3, 1, 24, 0, 28];
            let quiet = [&start[..], &wait].concat();
            seeds.push([&quiet[..], &requests_and_revokes, &wait].concat());
            seeds.push(quiet);
        }
    }
    seeds
}

fn run(bytes: &[u8], met: Met<'_>) {
    let mut script = Script::new(bytes);
    let setting = setting(&mut script);
    let [a, b] = setting.configs.clone();
    let mut pair = Pair::expecting(setting.expected, a, b);
    // Long handshakes often enough, so that faults meet them.
    let latency = ms(script.pick(&[1, 30]));
    pair.latency(A, latency);
    pair.latency(B, latency);
    pair.chunk = script.pick(&[usize::MAX, usize::MAX, 1, 7, 64]);
    let mut world = World {
        pair,
        sides: Default::default(),
        setting,
        faults: 0,
        tampered: false,
        restarted: false,
        answers: 0,
        met,
    };
    // What costs most, not often.
    let mut bursts = 1;
    while !script.is_empty() {
        world.step(&mut script, &mut bursts);
    }
    world.settle();
}

impl World<'_> {
    fn step(&mut self, script: &mut Script<'_>, bursts: &mut u32) {
        let side = script.below(2);
        let op = script.below(32);
        match op {
            0..9 => {
                let wait = script.pick(&[0, 1, 2, 3, 10, 100, 700, 1700, 3100]);
                self.pair.run_for(ms(wait));
            }
            9..11 => self.heal(),
            11..18 => self.fault(side, script),
            _ if self.pair.runs(side) => self.operate(side, op, script, bursts),
            _ => {}
        }
        self.pair.pump();
        self.listen();
    }

    fn operate(&mut self, at: usize, op: usize, script: &mut Script<'_>, bursts: &mut u32) {
        let now = self.pair.now;
        let (session, side) = (self.pair.session(at), &mut self.sides[at]);
        match op {
            18..20 => {
                side.active = script.flip();
                session.set_active(side.active, now);
            }
            20..23 => {
                let budget = script.pick(&[5, 200, 20_000]);
                side.note_request(session.request(1, vec![3; 100], ms(budget), now));
            }
            // More at once than may be out.
            23 if *bursts > 0 && script.below(8) == 0 => {
                *bursts -= 1;
                for _ in 0..1100 {
                    side.note_request(session.request(1, vec![3; 100], ms(5000), now));
                }
            }
            24..26 if !side.owed.is_empty() => {
                let id = side.owed.remove(0);
                let code = if script.flip() {
                    session.acknowledge(id, now);
                    WireCode::Ok
                } else {
                    self.answers += 1;
                    let code = WireCode::Other(1000 + self.answers);
                    session.respond(id, code, vec![]);
                    code
                };
                side.answered.insert(id, code);
            }
            26..28 => {
                let id = session.revoke(vec![StreamId(1)], now);
                if id != 0 {
                    assert_eq!(side.revokes.insert(id, false), None);
                }
            }
            28..31 if !side.owed_revokes.is_empty() => {
                let id = side.owed_revokes.remove(0);
                session.confirm_revoked(id);
                side.confirmed.push(id);
            }
            31 if script.below(4) == 0 => {
                session.close(WireCode::Shutdown, "", now);
                side.closing = true;
            }
            _ => {}
        }
    }

    fn fault(&mut self, side: usize, script: &mut Script<'_>) {
        let fault = script.pick(&FAULTS);
        let doing = self.doing(side);
        let mut happened = true;
        match fault {
            STALL => self.pair.stall(side, true),
            PARTITION => self.pair.partition(true),
            CUT => self.pair.cut(),
            KILL => self.pair.kill(side),
            RESTART => {
                self.pair.kill(side);
                self.restart(side);
            }
            NAP => self.pair.sleep(side, ms(1200)),
            SLEEP => self.pair.sleep(side, Duration::from_secs(60)),
            CLOCK_BACK => happened = self.clock_back(side),
            DELAY => self.pair.latency(side, ms(900)),
            GARBAGE => self.pair.inject(1 - side, &[0xff; 9]),
            FORGE => {
                let messages = every_message();
                let message = &messages[script.below(messages.len())];
                self.pair.inject(1 - side, &encode(message));
                self.tampered = true;
            }
            tampering => {
                happened = self.tamper(side, tampering, script);
                self.tampered |= happened;
            }
        }
        if happened {
            (self.met)(fault, doing);
            self.faults += 1;
        }
    }

    /// Changes what is on its way to `side`; whether there was something.
    fn tamper(&mut self, side: usize, fault: &str, script: &mut Script<'_>) -> bool {
        let (which, at, bit) = (script.below(4), usize::from(script.short()), script.below(8));
        self.pair.in_flight(1 - side, |frames| {
            let Some(which) = which.checked_rem(frames.len()) else { return false };
            // What was truncated before may be nothing at all.
            let len = frames[which].len().max(1);
            match fault {
                DROP => drop(frames.remove(which)),
                DOUBLE => {
                    let again = frames[which].clone();
                    frames.insert(which, again);
                }
                SWAP => {
                    if frames.len() == 1 {
                        return false;
                    }
                    let next = (which + 1) % frames.len();
                    frames.swap(which, next);
                }
                TRUNCATE => frames[which].truncate(at % len),
                _ => {
                    let Some(byte) = frames[which].get_mut(at % len) else { return false };
                    *byte ^= 1 << bit;
                }
            }
            true
        })
    }

    fn clock_back(&mut self, side: usize) -> bool {
        if !self.pair.runs(side) {
            return false;
        }
        let earlier = self.pair.now - Duration::from_secs(100);
        let session = self.pair.session(side);
        session.receive(&[], earlier);
        session.handle_timeout(earlier);
        session.set_active(self.sides[side].active, earlier);
        true
    }

    /// Restarts the process of that side as another incarnation. A peer that expects the old one is
    /// refused.
    fn restart(&mut self, side: usize) {
        if self.setting.fault.is_some() || self.restarted {
            return;
        }
        self.restarted = true;
        let mut configs = self.setting.configs.clone();
        configs[side].incarnation = Incarnation(0xfeed);
        let [a, b] = configs;
        if side == B {
            let mut stale = Pair::expecting(Some(INCARNATION[B]), a.clone(), b.clone());
            stale.run_until_idle();
            assert_eq!(stale.ended(A), (WireCode::StaleIncarnation, false));
            assert_eq!(stale.ended(B), (WireCode::StaleIncarnation, true));
        }
        let mut afresh = Pair::new(a, b);
        afresh.run_for(ms(100));
        let reborn = afresh.established_peer(1 - side).map(|peer| peer.incarnation);
        assert_eq!(reborn, Some(Incarnation(0xfeed)));
    }

    /// Names the current activity of the side that a fault hits; the first that applies.
    fn doing(&mut self, at: usize) -> &'static str {
        let handshake = Self::awaited(at, self.pair.frames_sent(at));
        let session = self.pair.session(at);
        let state = &self.sides[at];
        if session.is_closed() {
            "closed"
        } else if state.closing {
            "closing"
        } else if !session.is_established() {
            handshake
        } else if state.revokes.values().any(|confirmed| !confirmed) {
            "revoking"
        } else if state.requests.values().any(Option::is_none) {
            "requesting"
        } else if state.active {
            "active"
        } else {
            "idle"
        }
    }

    /// The message that a side in the handshake waits for, by the number of frames it has sent.
    fn awaited(at: usize, frames_sent: usize) -> &'static str {
        match (at, frames_sent) {
            (A, 0 | 1) => "challenge?",
            (A, _) => "ready?",
            (_, 0) => "hello?",
            _ => "proof?",
        }
    }

    fn heal(&mut self) {
        self.pair.partition(false);
        self.pair.latency(A, ms(1));
        self.pair.latency(B, ms(1));
    }

    fn is_keyed(&self) -> bool {
        self.setting.configs.iter().all(|config| config.secret.is_some())
    }

    /// Checks and records every new event.
    fn listen(&mut self) {
        for at in [A, B] {
            let seen = self.sides[at].seen;
            let news: Vec<_> = self.pair.ends[at].events[seen..].to_vec();
            self.sides[at].seen += news.len();
            for event in news {
                self.hear(at, event);
            }
        }
    }

    fn hear(&mut self, at: usize, event: SessionEvent) {
        let tampered = self.tampered && !self.is_keyed();
        let [a, b] = &mut self.sides;
        let (side, peer) = if at == A { (a, b) } else { (b, a) };
        assert_eq!(side.closed, 0, "{event:?} after the end");
        match event {
            SessionEvent::Established(info) => {
                assert!(self.setting.fault.is_none(), "established all the same");
                let first = self.pair.ends[at].events.iter().find(|event| {
                    // Requests made too early are answered at once, before anything else.
                    !matches!(event, SessionEvent::Response { code: WireCode::Closed, .. })
                });
                assert!(matches!(first, Some(SessionEvent::Established(_))));
                side.peer = Some(info);
                self.agree();
            }
            SessionEvent::Request { id, kind, body } => {
                if !tampered {
                    assert_eq!((kind, body.len()), (1, 100));
                    assert!(peer.requests.contains_key(&id), "the peer made that request");
                    assert!(!side.answered.contains_key(&id), "twice");
                }
                // Of a request that is doubled after its asker has given up, nothing is known any more.
                if !side.owed.contains(&id) {
                    side.owed.push(id);
                } else {
                    assert!(tampered, "twice at the same time");
                }
            }
            SessionEvent::Response { id, code, .. } => {
                let answer = side.requests.get_mut(&id).expect("an answer to a question");
                assert_eq!(answer.replace(code), None, "answered twice");
                match code {
                    _ if tampered => {}
                    WireCode::Ok | WireCode::Other(_) => {
                        assert_eq!(peer.answered.get(&id), Some(&code));
                    }
                    WireCode::Deadline | WireCode::Closed | WireCode::Busy => {}
                    code => panic!("unexpected code {code:?}"),
                }
            }
            SessionEvent::RevokeRequested { id, streams } => {
                if !tampered {
                    assert_eq!(streams, [StreamId(1)]);
                    assert!(peer.revokes.contains_key(&id) && !side.confirmed.contains(&id));
                }
                assert!(!side.owed_revokes.contains(&id));
                side.owed_revokes.push(id);
            }
            SessionEvent::Revoked { id } => {
                assert!(tampered || peer.confirmed.contains(&id), "the peer confirmed it");
                assert_eq!(side.revokes.insert(id, true), Some(false), "confirmed twice");
            }
            SessionEvent::Closed(reason) => {
                side.closed += 1;
                let open = side.requests.values().filter(|answer| answer.is_none()).count();
                assert_eq!(open, 0, "requests end before their session");
                assert_eq!(reason.established, side.peer.is_some());
                if let Some((fault, code)) = self.setting.fault
                    && !reason.by_peer
                    && reason.code == code
                {
                    // Its last word is not one of the handshake.
                    let awaited = Self::awaited(at, self.pair.frames_sent(at) - 1);
                    (self.met)(fault, awaited);
                }
            }
        }
    }

    /// Two established sides agree on the content of the handshake.
    fn agree(&self) {
        if let [Some(a), Some(b)] = [A, B].map(|side| self.sides[side].peer.as_ref()) {
            assert_eq!((a.incarnation, b.incarnation), (INCARNATION[B], INCARNATION[A]));
            assert_eq!((a.session, b.session), (SESSION, SESSION));
            assert_eq!((a.name.as_str(), b.name.as_str()), ("bob", "alice"));
            assert_eq!(
                (a.version, a.capabilities, a.checksum, a.authenticated),
                (b.version, b.capabilities, b.checksum, b.authenticated)
            );
        }
    }

    /// Heals everything, closes both sides, and compares their outcomes.
    fn settle(mut self) {
        self.heal();
        self.pair.run_for(Duration::from_secs(70));
        self.listen();
        for side in [A, B] {
            let now = self.pair.now;
            if self.pair.runs(side) && !self.pair.session(side).is_closed() {
                self.pair.session(side).close(WireCode::Shutdown, "", now);
                self.sides[side].closing = true;
                self.pair.pump();
                self.listen();
                self.pair.run_for(Duration::from_secs(2));
            }
        }
        self.pair.run_until_idle();
        self.listen();

        let alive: Vec<_> = [A, B].into_iter().filter(|&side| self.pair.runs(side)).collect();
        for &side in &alive {
            assert_eq!(self.sides[side].closed, 1, "side {side} ends once");
            assert!(self.sides[side].requests.values().all(Option::is_some));
            assert_eq!(self.pair.session(side).next_timeout(), None);
            assert_eq!(self.pair.session(side).poll_transmit(), None);
        }
        if alive.len() == 2 {
            self.same_story();
        }
    }

    fn same_story(&self) {
        let [a, b] = [A, B].map(|side| self.pair.closed(side).expect("both ended"));
        assert!(b.established || !a.established, "the acceptor is established first");
        for (reason, other) in [(a, b), (b, a)] {
            // A side that was ended by its peer has the peer's code, unless the connection was lost.
            if !self.tampered && reason.by_peer && reason.code != WireCode::Closed {
                assert_eq!((other.code, other.by_peer), (reason.code, false));
            }
        }
        if self.faults > 0 {
            return;
        }
        let expected = self.setting.fault.map_or(WireCode::Shutdown, |(_, code)| code);
        let early = self.sides.iter().any(|side| side.closing);
        for reason in [a, b] {
            // Closed before the mismatch was found. An initiator that closes while it awaits `Ready`
            // has no key for its close, and the acceptor takes that for a lost connection.
            let is_lost = self.is_keyed() && reason.code == WireCode::Closed;
            let is_early = early && (reason.code == WireCode::Shutdown || is_lost);
            assert!(reason.code == expected || is_early, "{reason:?}");
        }
        assert!(!(a.by_peer && b.by_peer));
    }
}
