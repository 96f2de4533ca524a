//! Thousands of handoffs between engines that are killed, stopped, cut off, lied to and aborted at
//! random: every token that is said is right, every request ends, everything comes back.

use crate::basics::{Dice, prompt};
use crate::process::{EngineProcess, Setup};
use crate::relay::Relay;
use kvferry_connector::{HandoffId, Offered, produce};
use kvferry_refengine::{ModelSpec, continuation};
use kvferry_testkit::{Watchdog, stretched};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Handoffs, unless the environment says otherwise.
const HANDOFFS: usize = 10_000;
/// Requests under way at a time.
const TOGETHER: usize = 24;
const SAYS: usize = 3;
/// Prompts that there are: the model's answers to them are computed once.
const PROMPTS: usize = 64;

struct Prefill {
    engine: EngineProcess,
    relays: Vec<Relay>,
    /// Until when it is stopped or cut off.
    away: Option<Instant>,
}

struct Flight {
    prefill: usize,
    decode: usize,
    prompt: usize,
    began: Instant,
    aborted: bool,
}

#[derive(Debug, Default)]
struct Tally {
    right: usize,
    failed: usize,
    aborted: usize,
    lost: usize,
    kills: usize,
    stops: usize,
    cuts: usize,
    holds: usize,
    flips: usize,
    aborts: usize,
}

struct Soak {
    prefill: Vec<Prefill>,
    decode: Vec<EngineProcess>,
    flights: BTreeMap<String, Flight>,
    prompts: Vec<(Vec<u32>, Vec<u32>)>,
    dice: Dice,
    tally: Tally,
    begun: usize,
}

fn rss_kib(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("it has memory");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

impl Soak {
    fn new(seed: u64) -> Self {
        let base = |tp| Setup {
            checksum: true,
            blocks: 512,
            silence_ms: 1000,
            timeout_ms: 15_000,
            offer_ttl_ms: 5_000,
            ..Setup::new(tp)
        };
        let prefill = [2, 1].map(|tp| {
            let relays: Vec<_> = (0..tp).map(|_| Relay::new()).collect();
            let advertise = relays.iter().map(|relay| relay.address.clone()).collect();
            let engine = EngineProcess::start(&Setup { advertise, ..base(tp) });
            relays.iter().zip(&engine.listening).for_each(|(relay, target)| relay.to(target));
            Prefill { engine, relays, away: None }
        });
        // One of them fails what it can't load, the other computes it.
        let decode = [(1, false), (2, true)]
            .map(|(tp, recompute)| EngineProcess::start(&Setup { recompute, ..base(tp) }));
        let model: ModelSpec = decode[0].setup.model();
        let prompts = (0..PROMPTS).map(|n| {
            let prompt = prompt(n as u64, 20 + n * 3);
            let right = continuation(&model, &prompt, SAYS);
            (prompt, right)
        });
        Self {
            prompts: prompts.collect(),
            prefill: prefill.into(),
            decode: decode.into(),
            flights: BTreeMap::new(),
            dice: Dice::new(seed),
            tally: Tally::default(),
            begun: 0,
        }
    }

    fn begin(&mut self) {
        let id = format!("r{}", self.begun);
        self.begun += 1;
        let flight = Flight {
            prefill: self.dice.roll(self.prefill.len()),
            decode: self.dice.roll(self.decode.len()),
            prompt: self.dice.roll(PROMPTS),
            began: Instant::now(),
            aborted: false,
        };
        let transfer = HandoffId::new(&format!("xfer-{id}")).expect("short");
        let (prompt, _) = &self.prompts[flight.prompt];
        let prefill = &mut self.prefill[flight.prefill];
        let rank = self.dice.roll(prefill.relays.len());
        let address = prefill.relays[rank].address.clone();
        let offered = Offered { transfer: transfer.clone(), address, engine: None, tokens: None };
        let params = Some(offered.to_params());
        let there = format!("{id}-prefill");
        if self.dice.percent(50) {
            self.decode[flight.decode].submit(&id, prompt, SAYS, params);
            prefill.engine.submit(&there, prompt, 1, Some(produce(Some(&transfer))));
        } else {
            prefill.engine.submit(&there, prompt, 1, Some(produce(Some(&transfer))));
            self.decode[flight.decode].submit(&id, prompt, SAYS, params);
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
                        self.tally.right += 1;
                    }
                    "abort" => {
                        assert!(flight.aborted, "{id}: nobody has aborted it");
                        self.tally.aborted += 1;
                    }
                    "error" => {
                        assert!(!recompute, "{id}: what is missing is to be computed");
                        self.tally.failed += 1;
                    }
                    other => panic!("{id} ended with {other}"),
                }
            }
        }
        let limit = stretched(Duration::from_secs(40));
        for (id, flight) in &self.flights {
            assert!(flight.began.elapsed() < limit, "{id} never ends");
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
        let victim = self.dice.roll(self.prefill.len());
        match self.dice.roll(4000) {
            0..4 => {
                self.tally.kills += 1;
                self.restart_prefill(victim);
            }
            4..6 => {
                self.tally.kills += 1;
                self.restart_decode();
            }
            6..10 if self.prefill[victim].away.is_none() => {
                self.tally.stops += 1;
                self.prefill[victim].engine.signal("-STOP");
                self.away(victim);
            }
            10..14 if self.prefill[victim].away.is_none() => {
                self.tally.holds += 1;
                self.prefill[victim].relays.iter().for_each(|relay| relay.hold(true));
                self.away(victim);
            }
            14..40 => {
                self.tally.cuts += 1;
                self.prefill[victim].relays.iter().for_each(Relay::cut);
            }
            40..80 => {
                self.tally.flips += 1;
                let (rank, after) = (self.dice.roll(2), self.dice.roll(60_000));
                let relays = &self.prefill[victim].relays;
                relays[rank % relays.len()].flip_after(after);
            }
            80..400 => self.abort(),
            _ => {}
        }
    }

    fn away(&mut self, victim: usize) {
        let time = Duration::from_millis(200 + self.dice.roll(1800) as u64);
        self.prefill[victim].away = Some(Instant::now() + time);
    }

    fn restart_prefill(&mut self, victim: usize) {
        let prefill = &mut self.prefill[victim];
        prefill.relays.iter().for_each(|relay| relay.hold(false));
        prefill.away = None;
        prefill.engine.restart();
        // Its next life does not know what the last one was asked for. Whoever waits for that hears
        // so when the time is over, which is not what is looked at here.
        for (id, flight) in &mut self.flights {
            if flight.prefill == victim && !flight.aborted {
                flight.aborted = true;
                self.decode[flight.decode].abort(id);
            }
        }
    }

    /// The second engine lives through it all.
    fn restart_decode(&mut self) {
        self.decode[0].restart();
        let before = self.flights.len();
        self.flights.retain(|_, flight| flight.decode != 0);
        self.tally.lost += before - self.flights.len();
    }

    fn abort(&mut self) {
        if self.flights.is_empty() {
            return;
        }
        let at = self.dice.roll(self.flights.len());
        let (id, flight) = self.flights.iter_mut().nth(at).expect("one of them");
        self.tally.aborts += 1;
        if self.dice.percent(50) {
            flight.aborted = true;
            self.decode[flight.decode].abort(id);
        } else {
            self.prefill[flight.prefill].engine.abort(&format!("{id}-prefill"));
        }
    }

    fn run(&mut self, handoffs: usize) {
        let mut said = Instant::now();
        while self.begun < handoffs || !self.flights.is_empty() {
            if self.begun < handoffs && self.flights.len() < TOGETHER {
                self.begin();
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.harm();
            self.collect();
            if said.elapsed() > Duration::from_secs(5) {
                said = Instant::now();
                let oldest = self.flights.iter().max_by_key(|(_, it)| it.began.elapsed());
                let oldest = oldest.map(|(id, it)| (id, it.prefill, it.decode, it.began.elapsed()));
                println!("{} begun, oldest {oldest:?}, {:?}", self.begun, self.tally);
            }
        }
    }

    /// Everything is at peace, and everything has come back.
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
            let emptied = engine.emptied(stretched(Duration::from_secs(40)));
            emptied.expect("everything comes back");
        }
    }
}

#[test]
fn thousands_of_handoffs_with_random_faults_end_right_and_nothing_is_left() {
    let handoffs = std::env::var("KVFERRY_SOAK_HANDOFFS").ok();
    let handoffs = handoffs.and_then(|n| n.parse().ok()).unwrap_or(HANDOFFS);
    let _bounded = Watchdog::new(Duration::from_secs(900));
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut soak = Soak::new(seed);
    let began = Instant::now();
    // What allocators and caches of peers take is taken by then.
    soak.run(handoffs / 4);
    soak.assert_empty();
    let before = rss_kib(soak.decode[1].pid());
    for part in 2..=4 {
        soak.run(handoffs * part / 4);
    }
    soak.assert_empty();
    let after = rss_kib(soak.decode[1].pid());
    println!("{:?}, RSS {before} -> {after} KiB: {:#?}", began.elapsed(), soak.tally);
    println!("{:?}", soak.decode[1].status().outcomes);
    let Tally { right, kills, stops, cuts, holds, flips, aborts, .. } = soak.tally;
    assert!(right > handoffs / 2, "most of them are undisturbed");
    if handoffs >= HANDOFFS {
        let all = [kills, stops, cuts, holds, flips, aborts];
        assert!(all.iter().all(|n| *n > 0), "{:?}", soak.tally);
    }
    assert!(after < before + before / 10 + 4096, "it grows: {before} -> {after} KiB");
}
