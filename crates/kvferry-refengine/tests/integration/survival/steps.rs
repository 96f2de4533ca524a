//! Each fault at each step of a handoff.

use crate::survival::process::{EngineProcess, PATIENT_MS, Setup};
use crate::survival::relay::Relay;
use kvferry_connector::{ConsumerParams, HandoffId, producer_params};
use kvferry_refengine::continuation;
use kvferry_refengine::pair::prompt;
use kvferry_testkit::{PATIENCE, Watchdog};
use std::time::{Duration, Instant};

/// Tokens of a prompt, and steps of its prefill.
const TOKENS: usize = 300;
const CHUNKS: usize = 5;
const SAYS: usize = 4;

/// The silence limit where it ends a request. A thread of a healthy process may stop for half of it.
const SILENCE_MS: u64 = 6_000;

fn bounded() -> Watchdog {
    Watchdog::new(2 * PATIENCE)
}

/// The stage of a handoff. In all but the last the consumer is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The consumer has asked; the producer does not know the request.
    Asked,
    /// The producer's request waits to be scheduled.
    Queued,
    /// Two chunks are computed and read.
    Computing,
    /// All is computed, and its last bytes are in flight.
    Reading,
    /// All is computed; the consumer has not asked.
    Complete,
}

impl Stage {
    const ALL: [Self; 5] =
        [Self::Asked, Self::Queued, Self::Computing, Self::Reading, Self::Complete];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill,
    Stop,
    /// The relay forwards nothing.
    Partition,
    /// All connections are reset. New ones are forwarded.
    Reset,
}

impl Fault {
    /// Settings whose limits end a request only where the fault must end it.
    fn setup(self) -> Setup {
        let setup = Setup::new(1);
        match self {
            Self::Kill => setup,
            Self::Stop | Self::Partition => Setup { silence_ms: SILENCE_MS, ..setup },
            Self::Reset => Setup { reconnect_ms: PATIENT_MS, ..setup },
        }
    }
}

/// A prefill engine of two ranks behind relays, and a decode engine of one.
struct World {
    relays: Vec<Relay>,
    prefill: EngineProcess,
    decode: EngineProcess,
}

impl World {
    /// Prefill steps only on command.
    fn new(base: &Setup) -> Self {
        let setup = |tp| Setup { tp, listen: Setup::new(tp).listen, ..base.clone() };
        let relays = vec![Relay::new(), Relay::new()];
        let advertise = relays.iter().map(|relay| relay.address.clone()).collect();
        let prefill = EngineProcess::start(&Setup { manual: true, advertise, ..setup(2) });
        let mut world = Self { relays, prefill, decode: EngineProcess::start(&setup(1)) };
        for (relay, target) in world.relays.iter().zip(&world.prefill.listening) {
            relay.to(target);
        }
        world.works("before", 1);
        world
    }

    fn ask(&mut self, id: &str, n: u64) {
        ask(&mut self.decode, &self.relays[0].address, id, n);
    }

    fn give(&mut self, id: &str, n: u64) {
        give(&mut self.prefill, id, n);
    }

    /// Brings a handoff to a stage.
    fn reach(&mut self, stage: Stage, id: &str, n: u64) {
        let settle = || std::thread::sleep(Duration::from_millis(100));
        if stage != Stage::Complete {
            self.ask(id, n);
            settle();
        }
        if stage == Stage::Asked {
            return;
        }
        self.give(id, n);
        match stage {
            Stage::Asked | Stage::Queued => {}
            Stage::Computing => self.prefill.steps(2),
            Stage::Reading => {
                self.prefill.steps(CHUNKS - 1);
                settle();
                self.relays.iter().for_each(|relay| relay.hold_data(true));
                self.prefill.steps(1);
            }
            Stage::Complete => self.prefill.steps(CHUNKS),
        }
        settle();
    }

    fn heal(&mut self) {
        for relay in &self.relays {
            relay.hold_data(false);
            relay.hold(false);
        }
    }

    /// A handoff from beginning to end.
    fn works(&mut self, id: &str, n: u64) {
        self.ask(id, n);
        self.give(id, n);
        self.prefill.steps(CHUNKS);
        self.ends_right(id, n);
    }

    fn ends_right(&mut self, id: &str, n: u64) {
        let ended = self.decode.ends(id);
        assert_eq!(ended.reason, "length", "{id}: {:?}", self.decode.status().outcomes);
        assert_eq!(ended.tokens, continuation(&Setup::model(), &prompt(n, TOKENS), SAYS));
    }

    /// Asserts that both sides give back all blocks.
    fn assert_emptied(&mut self) {
        self.decode.assert_emptied();
        self.prefill.assert_emptied();
    }
}

fn transfer(id: &str) -> HandoffId {
    HandoffId::new(&format!("xfer-{id}")).expect("short")
}

fn ask(decode: &mut EngineProcess, address: &str, id: &str, n: u64) {
    let (transfer, address) = (transfer(id), address.parse().expect("an address"));
    let offered = ConsumerParams { transfer, address, engine: None, tokens: None };
    decode.submit(id, &prompt(n, TOKENS), SAYS, Some(offered.to_params()));
}

fn give(prefill: &mut EngineProcess, id: &str, n: u64) {
    let params = producer_params(Some(&transfer(id)));
    prefill.submit(id, &prompt(n, TOKENS), 1, Some(params));
}

/// Injects a fault into the prefill engine at each stage. The consumer does not wait for long.
fn a_producer_with(fault: Fault) {
    let (_bounded, mut world) = (bounded(), World::new(&fault.setup()));
    for (n, stage) in (10..).zip(Stage::ALL) {
        let id = format!("{fault:?}-{stage:?}");
        world.reach(stage, &id, n);
        let began = Instant::now();
        match fault {
            Fault::Kill => world.prefill.kill(),
            Fault::Stop => world.prefill.signal("-STOP"),
            Fault::Partition => world.relays.iter().for_each(|relay| relay.hold(true)),
            Fault::Reset => world.relays.iter().for_each(Relay::cut),
        }
        if stage == Stage::Complete {
            world.ask(&id, n);
        }
        if fault == Fault::Reset {
            // The connection comes back, and the handoff continues.
            world.heal();
            if stage == Stage::Asked {
                world.give(&id, n);
            }
            world.prefill.steps(CHUNKS + 1);
            world.ends_right(&id, n);
        } else {
            let ended = world.decode.ended(&id, PATIENCE / 2).unwrap_or_else(|| {
                panic!("{id} has not ended after {:?}", began.elapsed());
            });
            println!("{id}: {:?}", began.elapsed());
            assert_eq!((ended.reason.as_str(), ended.tokens.len()), ("error", 0), "{id}");
            world.heal();
            match fault {
                Fault::Kill => world.prefill.restart(),
                Fault::Stop => world.prefill.signal("-CONT"),
                Fault::Partition | Fault::Reset => {}
            }
            if fault != Fault::Kill && stage != Stage::Asked {
                world.prefill.steps(CHUNKS);
            }
        }
        world.decode.assert_emptied();
        world.works(&format!("after-{id}"), n + 100);
        world.assert_emptied();
    }
    let outcomes = world.decode.status().outcomes;
    println!("{fault:?}: {outcomes:?}");
    // What the consumer had asked for before the fault, at four stages, ended with the fault's reason.
    let (reason, least) = match fault {
        Fault::Kill => ("closed", 4),
        Fault::Stop | Fault::Partition => ("peer is silent", 4),
        Fault::Reset => ("done", 11),
    };
    assert!(outcomes.iter().any(|(code, n)| code == reason && *n >= least), "{outcomes:?}");
}

#[test]
fn a_producer_killed_at_any_step_ends_the_request_soon_and_its_next_incarnation_serves() {
    a_producer_with(Fault::Kill);
}

#[test]
fn a_producer_stopped_at_any_step_ends_the_request_after_the_silence_limit() {
    a_producer_with(Fault::Stop);
}

#[test]
fn a_partition_at_any_step_ends_the_request_after_the_silence_limit() {
    a_producer_with(Fault::Partition);
}

#[test]
fn connections_reset_at_any_step_come_back_and_the_request_succeeds() {
    a_producer_with(Fault::Reset);
}

#[test]
fn streams_reset_within_a_session_are_replaced_and_the_request_succeeds() {
    let (_bounded, mut world) = (bounded(), World::new(&Fault::Reset.setup()));
    for n in 10..14 {
        let id = format!("streams-{n}");
        world.reach(Stage::Reading, &id, n);
        world.relays.iter().for_each(Relay::cut_data);
        world.heal();
        world.ends_right(&id, n);
    }
    world.assert_emptied();
    let outcomes = world.decode.status().outcomes;
    assert!(outcomes.iter().all(|(code, _)| code == "done"), "{outcomes:?}");
}

/// Injects a fault into the decode engine at each stage. The prefill engine gets its blocks back soon.
fn a_consumer_with(fault: Fault) {
    let (_bounded, mut world) = (bounded(), World::new(&fault.setup()));
    for (n, stage) in (10..).zip(&Stage::ALL[..4]) {
        let id = format!("{fault:?}-{stage:?}");
        world.reach(*stage, &id, n);
        let began = Instant::now();
        match fault {
            Fault::Kill => world.decode.kill(),
            Fault::Stop => world.decode.signal("-STOP"),
            Fault::Partition | Fault::Reset => unreachable!("the same as for a producer"),
        }
        if *stage != Stage::Asked {
            world.prefill.steps(CHUNKS);
            // An offer that a consumer has asked for ends with the consumer.
            world.prefill.emptied(PATIENCE / 2).unwrap_or_else(|status| {
                panic!("{id}: after {:?}: {status:?}", began.elapsed());
            });
            println!("{id}: {:?}", began.elapsed());
        }
        world.heal();
        match fault {
            Fault::Kill => world.decode.restart(),
            _ => world.decode.signal("-CONT"),
        }
        if fault == Fault::Stop && *stage == Stage::Asked {
            // The session survived, and the answer comes now.
            world.give(&id, n);
            world.prefill.steps(CHUNKS);
            world.ends_right(&id, n);
        } else if fault == Fault::Stop {
            assert_eq!(world.decode.ends(&id).reason, "error", "{id}");
        }
        world.works(&format!("after-{id}"), n + 100);
        world.assert_emptied();
    }
}

#[test]
fn a_producer_gets_its_blocks_back_soon_when_its_consumer_is_killed_at_any_step() {
    a_consumer_with(Fault::Kill);
}

#[test]
fn a_producer_gets_its_blocks_back_when_its_consumer_is_stopped_at_any_step() {
    a_consumer_with(Fault::Stop);
}

#[test]
fn a_byte_flipped_in_flight_is_detected_and_the_request_is_computed() {
    let base = Setup { checksum: true, recompute: true, ..Setup::new(1) };
    let (_bounded, mut world) = (bounded(), World::new(&base));
    for n in 0..24 {
        // Anywhere in a rank's bytes of a handoff: headers, payload, checksums.
        world.relays[n % 2].flip_after((n * 1_733) % 30_000);
        world.works(&format!("flip-{n}"), 10 + n as u64);
    }
    world.assert_emptied();
    let outcomes = world.decode.status().outcomes;
    assert!(outcomes.iter().any(|(code, _)| code.contains("checksum")), "{outcomes:?}");
}

#[test]
fn a_killed_or_stopped_engine_on_the_same_host_is_noticed() {
    let _bounded = bounded();
    let local = |tp, fault: Fault| {
        let base = fault.setup();
        Setup { transports: "local,tcp".to_owned(), silence_ms: base.silence_ms, ..Setup::new(tp) }
    };
    for faults in [[Fault::Kill, Fault::Kill], [Fault::Stop, Fault::Kill]] {
        let mut prefill = EngineProcess::start(&Setup { manual: true, ..local(2, faults[0]) });
        let mut decode = EngineProcess::start(&local(1, faults[0]));
        for (n, fault) in (1..).zip(faults) {
            neighbours_with(fault, n, &mut prefill, &mut decode);
        }
    }
}

/// Injects a fault into a prefill engine that has computed a part of a request.
fn neighbours_with(fault: Fault, n: u64, prefill: &mut EngineProcess, decode: &mut EngineProcess) {
    let id = format!("{fault:?}-{n}");
    ask(decode, &prefill.addresses[1], &id, n);
    give(prefill, &id, n);
    prefill.steps(2);
    std::thread::sleep(Duration::from_millis(100));
    let began = Instant::now();
    if fault == Fault::Kill {
        prefill.kill();
    } else {
        prefill.signal("-STOP");
    }
    let ended = decode.ended(&id, PATIENCE / 2);
    let ended = ended.unwrap_or_else(|| panic!("{id}: {:?}", began.elapsed()));
    println!("{id}: {:?}", began.elapsed());
    assert_eq!(ended.reason, "error");
    if fault == Fault::Kill {
        prefill.restart();
    } else {
        prefill.signal("-CONT");
        prefill.steps(CHUNKS);
        prefill.assert_emptied();
    }
    decode.assert_emptied();
}
