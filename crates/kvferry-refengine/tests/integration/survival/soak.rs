//! Thousands of handoffs with random kills, stops, partitions, flipped bytes and aborts: every token is right, every request ends, and all blocks are given back.

use crate::basics::Random;
use crate::survival::process::{EngineProcess, Setup};
use crate::survival::relay::Relay;
use kvferry_connector::{ConsumerParams, HandoffId, producer_params};
use kvferry_refengine::continuation;
use kvferry_refengine::pair::prompt;
use kvferry_testkit::process::Resources;
use kvferry_testkit::{PATIENCE, Watchdog};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Handoffs by default; the environment overrides it.
const HANDOFFS: usize = 10_000;
/// Requests under way at a time.
const TOGETHER: usize = 24;
const MAX_TOKENS: usize = 3;
/// Different prompts. The model's output for each is computed once.
const PROMPTS: usize = 64;

struct Prefill {
    engine: EngineProcess,
    relays: Vec<Relay>,
    /// When it is resumed or reconnected.
    away: Option<Instant>,
}

struct Flight {
    prefill: usize,
    decode: usize,
    prompt: usize,
    began: Instant,
    aborted: bool,
}

/// Counts of faults and of how requests ended.
type Tally = BTreeMap<&'static str, usize>;

struct Soak {
    prefill: Vec<Prefill>,
    decode: Vec<EngineProcess>,
    flights: BTreeMap<String, Flight>,
    prompts: Vec<(Vec<u32>, Vec<u32>)>,
    random: Random,
    tally: Tally,
    begun: usize,
}

impl Soak {
    fn new(seed: u64) -> Self {
        let base = |tp| Setup {
            checksum: true,
            blocks: 512,
            timeout_ms: 15_000,
            offer_ttl_ms: 5_000,
            silence_ms: 1_000,
            ..Setup::new(tp)
        };
        let prefill = [2, 1].map(|tp| {
            let relays: Vec<_> = (0..tp).map(|_| Relay::new()).collect();
            let advertise = relays.iter().map(|relay| relay.address.clone()).collect();
            let engine = EngineProcess::start(&Setup { advertise, ..base(tp) });
            relays.iter().zip(&engine.listening).for_each(|(relay, target)| relay.to(target));
            Prefill { engine, relays, away: None }
        });
        // One fails requests that it can't load, the other computes them.
        let decode = [(1, false), (2, true)]
            .map(|(tp, recompute)| EngineProcess::start(&Setup { recompute, ..base(tp) }));
        let model = Setup::model();
        let prompts = (0..PROMPTS).map(|n| {
            let prompt = prompt(n as u64, 20 + n * 3);
            let right = continuation(&model, &prompt, MAX_TOKENS);
            (prompt, right)
        });
        Self {
            prompts: prompts.collect(),
            prefill: prefill.into(),
            decode: decode.into(),
            flights: BTreeMap::new(),
            random: Random::new(seed),
            tally: Tally::default(),
            begun: 0,
        }
    }

    fn count(&mut self, what: &'static str, by: usize) {
        *self.tally.entry(what).or_default() += by;
    }

    fn begin(&mut self) {
        let id = format!("r{}", self.begun);
        self.begun += 1;
        let flight = Flight {
            prefill: self.random.below(self.prefill.len()),
            decode: self.random.below(self.decode.len()),
            prompt: self.random.below(PROMPTS),
            began: Instant::now(),
            aborted: false,
        };
        let transfer = HandoffId::new(&format!("xfer-{id}")).expect("short");
        let (prompt, _) = &self.prompts[flight.prompt];
        let prefill = &mut self.prefill[flight.prefill];
        let rank = self.random.below(prefill.relays.len());
        let address = prefill.relays[rank].address.parse().expect("an address");
        let offered =
            ConsumerParams { transfer: transfer.clone(), address, engine: None, tokens: None };
        let params = Some(offered.to_params());
        let there = format!("{id}-prefill");
        if self.random.percent(50) {
            self.decode[flight.decode].submit(&id, prompt, MAX_TOKENS, params);
            prefill.engine.submit(&there, prompt, 1, Some(producer_params(Some(&transfer))));
        } else {
            prefill.engine.submit(&there, prompt, 1, Some(producer_params(Some(&transfer))));
            self.decode[flight.decode].submit(&id, prompt, MAX_TOKENS, params);
        }
        self.flights.insert(id, flight);
    }

    fn collect(&mut self) {
        for prefill in &mut self.prefill {
            drop(prefill.engine.take_ended());
        }
        for at in 0..self.decode.len() {
            for (id, ended) in self.decode[at].take_ended() {
                let Some(flight) = self.flights.remove(&id) else { continue };
                let (_, right) = &self.prompts[flight.prompt];
                let recompute = self.decode[at].setup.recompute;
                match ended.reason.as_str() {
                    "length" => {
                        assert_eq!(&ended.tokens, right, "{id}: a wrong token");
                        self.count("right", 1);
                    }
                    "abort" => {
                        assert!(flight.aborted, "{id}: it was not aborted");
                        self.count("aborted", 1);
                    }
                    "error" => {
                        assert!(!recompute, "{id}: missing tokens must be computed");
                        self.count("failed", 1);
                    }
                    other => panic!("{id} ended with {other}"),
                }
            }
        }
        for (id, flight) in &self.flights {
            assert!(flight.began.elapsed() < PATIENCE, "{id} never ends");
        }
    }

    fn harm(&mut self) {
        for prefill in &mut self.prefill {
            if prefill.away.is_some_and(|until| until <= Instant::now()) {
                prefill.away = None;
                prefill.engine.signal("-CONT");
                prefill.relays.iter().for_each(|relay| relay.hold(false));
            }
        }
        let victim = self.random.below(self.prefill.len());
        match self.random.below(4000) {
            0..4 => {
                self.count("kills", 1);
                self.restart_prefill(victim);
            }
            4..6 => {
                self.count("kills", 1);
                self.restart_decode();
            }
            6..10 if self.prefill[victim].away.is_none() => {
                self.count("stops", 1);
                self.prefill[victim].engine.signal("-STOP");
                self.away(victim);
            }
            10..14 if self.prefill[victim].away.is_none() => {
                self.count("holds", 1);
                self.prefill[victim].relays.iter().for_each(|relay| relay.hold(true));
                self.away(victim);
            }
            14..40 => {
                self.count("cuts", 1);
                self.prefill[victim].relays.iter().for_each(Relay::cut);
            }
            40..80 => {
                self.count("flips", 1);
                let (rank, after) = (self.random.below(2), self.random.below(60_000));
                let relays = &self.prefill[victim].relays;
                relays[rank % relays.len()].flip_after(after);
            }
            80..400 => self.abort(),
            _ => {}
        }
    }

    fn away(&mut self, victim: usize) {
        let time = Duration::from_millis(200 + self.random.below(1800) as u64);
        self.prefill[victim].away = Some(Instant::now() + time);
    }

    fn restart_prefill(&mut self, victim: usize) {
        let prefill = &mut self.prefill[victim];
        prefill.relays.iter().for_each(|relay| relay.hold(false));
        prefill.away = None;
        prefill.engine.restart();
        // Its next incarnation does not know the requests of the last one. Their consumers wait for their
        // deadline, which this test does not check.
        for (id, flight) in &mut self.flights {
            if flight.prefill == victim && !flight.aborted {
                flight.aborted = true;
                self.decode[flight.decode].abort(id);
            }
        }
    }

    /// The second engine is never killed.
    fn restart_decode(&mut self) {
        self.decode[0].restart();
        let before = self.flights.len();
        self.flights.retain(|_, flight| flight.decode != 0);
        self.count("lost", before - self.flights.len());
    }

    fn abort(&mut self) {
        if self.flights.is_empty() {
            return;
        }
        self.count("aborts", 1);
        let at = self.random.below(self.flights.len());
        let (id, flight) = self.flights.iter_mut().nth(at).expect("in range");
        if self.random.percent(50) {
            flight.aborted = true;
            self.decode[flight.decode].abort(id);
        } else {
            self.prefill[flight.prefill].engine.abort(&format!("{id}-prefill"));
        }
    }

    fn run(&mut self, handoffs: usize) {
        let mut outputs = Instant::now();
        while self.begun < handoffs || !self.flights.is_empty() {
            if self.begun < handoffs && self.flights.len() < TOGETHER {
                self.begin();
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.harm();
            self.collect();
            if outputs.elapsed() > Duration::from_secs(5) {
                outputs = Instant::now();
                let oldest = self.flights.iter().max_by_key(|(_, it)| it.began.elapsed());
                let oldest = oldest.map(|(id, it)| (id, it.prefill, it.decode, it.began.elapsed()));
                println!("{} begun, oldest {oldest:?}, {:?}", self.begun, self.tally);
            }
        }
    }

    /// Ends all faults and asserts that everything was given back.
    fn assert_empty(&mut self) {
        for prefill in &mut self.prefill {
            if prefill.away.take().is_some() {
                prefill.engine.signal("-CONT");
                prefill.relays.iter().for_each(|relay| relay.hold(false));
            }
            prefill.relays.iter().for_each(|relay| relay.flip_after(usize::MAX));
        }
        let (prefill, decode) =
            (self.prefill.iter_mut().map(|it| &mut it.engine), &mut self.decode);
        for engine in prefill.chain(decode) {
            let emptied = engine.emptied(PATIENCE);
            emptied.expect("everything is given back");
        }
    }
}

fn resident_kib(soak: &Soak) -> u64 {
    Resources::of(soak.decode[1].pid()).memory_bytes / 1024
}

#[test]
#[ignore = "slow: make test-slow"]
fn thousands_of_handoffs_with_random_faults_end_right_and_leave_nothing() {
    let handoffs = std::env::var("KVFERRY_SOAK_HANDOFFS").ok();
    let handoffs = handoffs.and_then(|n| n.parse().ok()).unwrap_or(HANDOFFS);
    let _bounded = Watchdog::new(5 * PATIENCE);
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut soak = Soak::new(seed);
    let began = Instant::now();
    // Allocators and caches of peers have reached their size by then.
    soak.run(handoffs / 4);
    soak.assert_empty();
    let before = resident_kib(&soak);
    for part in 2..=4 {
        soak.run(handoffs * part / 4);
    }
    soak.assert_empty();
    let after = resident_kib(&soak);
    println!("{:?}, RSS {before} -> {after} KiB: {:#?}", began.elapsed(), soak.tally);
    println!("{:?}", soak.decode[1].status().outcomes);
    assert!(soak.tally["right"] > handoffs / 2, "most handoffs have no fault");
    if handoffs >= HANDOFFS {
        let all = ["kills", "stops", "cuts", "holds", "flips", "aborts"];
        assert!(all.iter().all(|what| soak.tally.contains_key(what)), "{:?}", soak.tally);
    }
    assert!(after < before + before / 10 + 4096, "it grows: {before} -> {after} KiB");
}
