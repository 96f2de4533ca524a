//! Random operations on both sides, random faults between them, and what must hold all the same:
//! one `Closed` on each side and nothing after it, each request answered exactly once and with
//! what the peer said if the peer said anything, no revoke confirmed that was not, bounded queues,
//! and two ends that tell the same story.

use crate::pair::{A, B, Pair, config, ms};
use kvferry_proto::{SessionEvent, StreamId, WireCode};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

const CASES: u32 = 4000;

#[derive(Clone, Copy, Debug)]
enum Op {
    Wait(u64),
    Active(usize, bool),
    Request(usize, u64),
    /// More requests at once than may be out.
    Burst(usize),
    /// Answers the oldest request of the peer.
    Respond(usize),
    Revoke(usize),
    /// Confirms the oldest revoke of the peer.
    Confirm(usize),
    Close(usize),
    Fault(usize, Fault),
    Heal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Stall,
    Partition,
    Cut,
    Kill,
    Nap,
    Sleep,
    Delay,
    Garbage,
}

const FAULTS: [Fault; 8] = [
    Fault::Stall,
    Fault::Partition,
    Fault::Cut,
    Fault::Kill,
    Fault::Nap,
    Fault::Sleep,
    Fault::Delay,
    Fault::Garbage,
];

/// What the side a fault hits is doing just then; the first that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Doing {
    Handshake,
    Closing,
    Revoking,
    Requesting,
    Active,
    Idle,
    Closed,
}

const DOINGS: [Doing; 7] = [
    Doing::Handshake,
    Doing::Closing,
    Doing::Revoking,
    Doing::Requesting,
    Doing::Active,
    Doing::Idle,
    Doing::Closed,
];

type Coverage = BTreeMap<(Fault, Doing), u64>;

/// What one side has done and heard.
#[derive(Debug, Default)]
struct Side {
    active: bool,
    closing: bool,
    /// Our requests, and the answer once there is one.
    requests: BTreeMap<u64, Option<WireCode>>,
    /// Our revokes, and whether they were confirmed.
    revokes: BTreeMap<u64, bool>,
    /// The peer's, not yet answered, oldest first.
    owed: Vec<u64>,
    owed_revokes: Vec<u64>,
    /// What we have answered the peer.
    answered: BTreeMap<u64, WireCode>,
    confirmed: Vec<u64>,
    seen: usize,
    closed: usize,
}

struct World<'a> {
    pair: Pair,
    sides: [Side; 2],
    faults: usize,
    answers: u16,
    coverage: &'a RefCell<Coverage>,
}

impl World<'_> {
    fn apply(&mut self, op: Op) {
        match op {
            Op::Wait(wait) => self.pair.run_for(ms(wait)),
            Op::Heal => self.heal(),
            Op::Fault(side, fault) => self.fault(side, fault),
            Op::Active(side, _)
            | Op::Request(side, _)
            | Op::Burst(side)
            | Op::Respond(side)
            | Op::Revoke(side)
            | Op::Confirm(side)
            | Op::Close(side) => {
                if self.pair.runs(side) {
                    self.operate(side, op);
                }
            }
        }
        self.pair.pump();
        self.listen();
    }

    fn operate(&mut self, side: usize, op: Op) {
        let now = self.pair.now;
        let (session, side) = (self.pair.session(side), &mut self.sides[side]);
        match op {
            Op::Active(_, active) => {
                session.set_active(active, now);
                side.active = active;
            }
            Op::Request(_, budget) => {
                let id = session.request(1, vec![3; 100], ms(budget), now);
                side.note_request(id);
            }
            Op::Burst(_) => {
                for _ in 0..1100 {
                    let id = session.request(1, vec![3; 100], ms(5000), now);
                    side.note_request(id);
                }
            }
            Op::Respond(_) => {
                if !side.owed.is_empty() {
                    let id = side.owed.remove(0);
                    self.answers += 1;
                    let code = WireCode::Other(1000 + self.answers);
                    session.respond(id, code, vec![]);
                    side.answered.insert(id, code);
                }
            }
            Op::Revoke(_) => {
                let id = session.revoke(vec![StreamId(1)], now);
                if id != 0 {
                    assert_eq!(side.revokes.insert(id, false), None);
                }
            }
            Op::Confirm(_) => {
                if !side.owed_revokes.is_empty() {
                    let id = side.owed_revokes.remove(0);
                    session.confirm_revoked(id);
                    side.confirmed.push(id);
                }
            }
            Op::Close(_) => {
                session.close(WireCode::Shutdown, "", now);
                side.closing = true;
            }
            Op::Wait(_) | Op::Fault(..) | Op::Heal => {}
        }
    }

    fn fault(&mut self, side: usize, fault: Fault) {
        let doing = self.doing(side);
        *self.coverage.borrow_mut().entry((fault, doing)).or_default() += 1;
        self.faults += 1;
        match fault {
            Fault::Stall => self.pair.stall(side, true),
            Fault::Partition => self.pair.partition(true),
            Fault::Cut => self.pair.cut(),
            Fault::Kill => self.pair.kill(side),
            Fault::Nap => self.pair.sleep(side, ms(1200)),
            Fault::Sleep => self.pair.sleep(side, Duration::from_secs(60)),
            Fault::Delay => self.pair.latency(side, ms(900)),
            Fault::Garbage => self.pair.inject(1 - side, &[0xff; 9]),
        }
    }

    fn doing(&mut self, side: usize) -> Doing {
        let session = self.pair.session(side);
        let state = &self.sides[side];
        if session.is_closed() {
            Doing::Closed
        } else if state.closing {
            Doing::Closing
        } else if !session.is_established() {
            Doing::Handshake
        } else if state.revokes.values().any(|confirmed| !confirmed) {
            Doing::Revoking
        } else if state.requests.values().any(Option::is_none) {
            Doing::Requesting
        } else if state.active {
            Doing::Active
        } else {
            Doing::Idle
        }
    }

    fn heal(&mut self) {
        self.pair.partition(false);
        self.pair.latency(A, ms(1));
        self.pair.latency(B, ms(1));
    }

    /// Checks and books every event that is new.
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
        let [a, b] = &mut self.sides;
        let (side, peer) = if at == A { (a, b) } else { (b, a) };
        assert_eq!(side.closed, 0, "{event:?} after the end");
        match event {
            SessionEvent::Established(_) => {
                let first = self.pair.ends[at].events.iter().find(|event| {
                    // Requests made too early are answered at once, before anything else.
                    !matches!(event, SessionEvent::Response { code: WireCode::Closed, .. })
                });
                assert!(matches!(first, Some(SessionEvent::Established(_))));
            }
            SessionEvent::Request { id, kind, body } => {
                assert_eq!((kind, body.len()), (1, 100));
                assert!(peer.requests.contains_key(&id), "nobody asked that");
                assert!(!side.owed.contains(&id) && !side.answered.contains_key(&id), "twice");
                side.owed.push(id);
            }
            SessionEvent::Response { id, code, .. } => {
                let answer = side.requests.get_mut(&id).expect("an answer to a question");
                assert_eq!(answer.replace(code), None, "answered twice");
                match code {
                    WireCode::Other(_) => assert_eq!(peer.answered.get(&id), Some(&code)),
                    WireCode::Deadline | WireCode::Closed | WireCode::Busy => {}
                    code => panic!("{code:?} is nobody's answer"),
                }
            }
            SessionEvent::RevokeRequested { id, streams } => {
                assert_eq!(streams, [StreamId(1)]);
                assert!(peer.revokes.contains_key(&id));
                assert!(!side.owed_revokes.contains(&id) && !side.confirmed.contains(&id));
                side.owed_revokes.push(id);
            }
            SessionEvent::Revoked { id } => {
                assert!(peer.confirmed.contains(&id), "confirmed by nobody");
                assert_eq!(side.revokes.insert(id, true), Some(false), "confirmed twice");
            }
            SessionEvent::Closed(_) => {
                side.closed += 1;
                let open = side.requests.values().filter(|answer| answer.is_none()).count();
                assert_eq!(open, 0, "requests end before their session");
            }
        }
    }

    /// Heals everything, ends what still goes on, and compares the two stories.
    fn settle(mut self) {
        self.heal();
        self.pair.run_for(Duration::from_secs(70));
        self.listen();
        for side in [A, B] {
            if self.pair.runs(side) && !self.pair.session(side).is_closed() {
                self.apply(Op::Close(side));
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
            let [a, b] = [A, B].map(|side| self.pair.closed(side).expect("both ended"));
            assert!(b.established || !a.established, "the acceptor is established first");
            for (reason, other) in [(a, b), (b, a)] {
                // Who says that the peer ended it says what the peer says, unless the connection
                // was lost and nobody could say anything.
                if reason.by_peer && reason.code != WireCode::Closed {
                    assert_eq!((other.code, other.by_peer), (reason.code, false));
                }
            }
            if self.faults == 0 {
                assert_eq!(a.code, WireCode::Shutdown);
                assert_eq!(b.code, WireCode::Shutdown);
                assert!(!(a.by_peer && b.by_peer));
            }
        }
    }
}

impl Side {
    fn note_request(&mut self, id: u64) {
        if id != 0 {
            assert_eq!(self.requests.insert(id, None), None, "an id is used once");
        }
    }
}

fn op() -> impl Strategy<Value = Op> {
    let side = || prop_oneof![Just(A), Just(B)];
    prop_oneof![
        8 => prop_oneof![0u64..4, Just(10), Just(100), Just(700), Just(1700), Just(3100)]
            .prop_map(Op::Wait),
        3 => (side(), any::<bool>()).prop_map(|(side, active)| Op::Active(side, active)),
        4 => (side(), prop_oneof![Just(5u64), Just(200), Just(20_000)])
            .prop_map(|(side, budget)| Op::Request(side, budget)),
        3 => side().prop_map(Op::Respond),
        2 => side().prop_map(Op::Revoke),
        3 => side().prop_map(Op::Confirm),
        1 => side().prop_map(Op::Close),
        1 => Just(Op::Heal),
        2 => (side(), proptest::sample::select(&FAULTS[..]))
            .prop_map(|(side, fault)| Op::Fault(side, fault)),
    ]
}

fn case() -> impl Strategy<Value = (u64, usize, Vec<Op>)> {
    let burst = prop_oneof![
        19 => Just(None),
        1 => prop_oneof![Just(A), Just(B)].prop_map(|side| Some(Op::Burst(side))),
    ];
    let chunk = prop_oneof![Just(usize::MAX), Just(1), Just(7), Just(64)];
    // Long handshakes often enough, so that faults meet them.
    let latency = prop_oneof![Just(1u64), Just(30)];
    (latency, chunk, vec(op(), 1..30), burst).prop_map(|(latency, chunk, mut ops, burst)| {
        ops.extend(burst);
        (latency, chunk, ops)
    })
}

#[test]
fn i1_whatever_happens_each_side_ends_once_and_both_tell_the_same_story() {
    let coverage = RefCell::new(Coverage::new());
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let runner_config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let result =
        TestRunner::new_with_rng(runner_config, rng).run(&case(), |(latency, chunk, ops)| {
            let mut pair = Pair::new(config(A), config(B));
            pair.chunk = chunk;
            pair.latency(A, ms(latency));
            pair.latency(B, ms(latency));
            let mut world = World {
                pair,
                sides: Default::default(),
                faults: 0,
                answers: 0,
                coverage: &coverage,
            };
            for op in ops {
                world.apply(op);
            }
            world.settle();
            Ok(())
        });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    let coverage = coverage.into_inner();
    print!("{:>12}", "");
    DOINGS.iter().for_each(|doing| print!("{:>12}", format!("{doing:?}")));
    println!();
    for fault in FAULTS {
        print!("{:>12}", format!("{fault:?}"));
        for doing in DOINGS {
            let times = coverage.get(&(fault, doing)).copied().unwrap_or(0);
            print!("{times:>12}");
        }
        println!();
    }
    for fault in FAULTS {
        for doing in DOINGS {
            assert!(coverage.contains_key(&(fault, doing)), "{fault:?} never met {doing:?}");
        }
    }
}
