//! Two engines that hand prompts over through their exchanges, in virtual time, with random faults at random moments. What
//! must hold:
//!
//! * what a look-up calls fetched is the KV of the transfer that it asked for, on all ranks, then and while it is kept (I2,
//!   I7);
//! * nothing is copied to slots of an offer that is gone, or read into slots of a fetch that is over (I2);
//! * all slots come back in bounded time, and at the end nothing is kept (I1, I8);
//! * once the faults are over, a prompt is handed over at the first attempt.
//!
//! Engines are killed and started again, and stopped for longer or shorter than the silence limit; sessions between ranks,
//! or of the directory, are reset or partitioned. Each rank is its handoff machine with a worker in miniature: the real one
//! needs agents, threads and clocks. So nothing here says that the worker or the driver of an exchange is right, or that a
//! caller is woken by its deadline; the tests of real processes do.
//!
//! Decisions and faults are read from bytes: random ones in the test below, a fuzzer's in the target `exchange_model`.

mod decode;
mod prefill;
mod time;

use super::Prompt;
use super::machine::{Event as Copy, Machine};
use crate::prompt::PromptId;
use crate::scheduler::{GroupRule, Scheduler, SchedulerConfig};
use decode::{Decode, LookUp};
use kvferry_proto::directory::{ContentKey, DirectoryMessage, Limits as DirectoryLimits, Place};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::fuzzing::Script;
use kvferry_proto::handoff::{HandoffId, HandoffMessage, Limits, PeerId, ReadId};
use kvferry_proto::layout::Kind;
use kvferry_proto::{Incarnation, Origin, Timestamp, WireCode};
use prefill::{Computing, Prefill};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::time::Duration;

const SLOTS: u32 = 10;
const PROMPTS: usize = 4;
/// How long a prompt is kept for other engines.
const TIMEOUT: Duration = Duration::from_secs(20);
const LOOK_UP: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(3);
const THERE: Place = Place(0);

const STATES: [&str; 5] = ["nothing", "computing", "told", "fetching", "kept"];
/// Each with the states in which it can strike.
const FAULTS: [(&str, &[&str]); 10] = [
    ("kill prefill", &STATES),
    ("kill decode", &STATES),
    ("stop prefill", &STATES),
    ("stop decode", &STATES),
    ("nap prefill", &STATES),
    ("nap decode", &STATES),
    ("reset", &STATES),
    ("partition", &STATES),
    ("a copy is lost", &["computing", "fetching", "kept"]),
    ("reads are slow", &["fetching"]),
];

/// Origin of both engines.
fn here() -> Origin {
    Origin::from(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A prompt as one transfer hands it over.
#[derive(Clone, Copy, Debug)]
struct Content {
    prompt: usize,
    transfer: u64,
}

impl Content {
    /// The KV of a block on a rank.
    const fn kv(self, block: u32, rank: usize) -> u64 {
        assert!(block < 16 && rank < 16 && self.prompt < 16, "each has four bits");
        ((1 + self.transfer) << 12)
            | ((self.prompt as u64) << 8)
            | ((block as u64) << 4)
            | rank as u64
    }

    fn name(self) -> HandoffId {
        HandoffId::new(&format!("x{}", self.transfer)).expect("short")
    }

    fn of(prompt: usize, name: &HandoffId) -> Self {
        let number = name.as_str().strip_prefix('x').and_then(|number| number.parse().ok());
        Self { prompt, transfer: number.expect("the prefill engine has named it") }
    }
}

fn prompt(number: usize) -> Prompt {
    let identity = PromptId::new(&[], &[number as u32]);
    Prompt { key: ContentKey([number as u8; 32]), identity, blocks: 1 + number as u32 }
}

fn limits() -> Limits {
    Limits { cap: TIMEOUT, rendezvous: TIMEOUT, offer_ttl: TIMEOUT, ..Limits::default() }
}

fn directory_limits() -> DirectoryLimits {
    DirectoryLimits { offer_ttl: TIMEOUT, ..DirectoryLimits::default() }
}

fn machine(engine: EngineId, ranks: usize) -> Machine {
    let config = SchedulerConfig {
        groups: vec![GroupRule { kind: Kind::Full, block_tokens: 1 }],
        ranks,
        timeout: TIMEOUT,
        eager: true,
        recomputed_tokens: 0,
        null_block: Some(SLOTS),
        idle: None,
    };
    Machine::new(Scheduler::new(config, engine), ranks, 1, 1, SLOTS)
}

#[derive(Clone, Debug)]
enum Event {
    Handoff {
        wire: usize,
        from: PeerId,
        to: PeerId,
        message: HandoffMessage,
        connection: u64,
    },
    Directory {
        to_prefill: bool,
        message: DirectoryMessage,
        connection: u64,
    },
    Copied {
        engine: EngineId,
        offer: u64,
        content: Content,
        blocks: Range<u32>,
        copy: u64,
        lost: bool,
    },
    Read {
        rank: usize,
        to: PeerId,
        read: ReadId,
    },
    Reconnect(usize),
    Refused(EngineId),
    Silent(usize, u64),
    Wake(EngineId),
    LookUpEnds {
        engine: EngineId,
        request: String,
    },
    Give {
        engine: EngineId,
        slots: Range<u32>,
        content: Content,
        first: u32,
    },
}

/// The session of a producer and a consumer rank, or that of the directory.
#[derive(Clone)]
struct Wire {
    up: bool,
    /// Nothing arrives, and no end is noticed before the silence limit.
    dead: bool,
    connection: u64,
    peers: [PeerId; 2],
    /// The prefill engine that it leads to.
    engine: EngineId,
    /// When the last message arrives, each way: none overtakes another.
    busy: [Timestamp; 2],
}

/// What happened in all cases.
#[derive(Default)]
struct Met {
    /// Faults that struck, each with the state that it struck in.
    faults: BTreeMap<(&'static str, &'static str), u64>,
    ends: BTreeMap<&'static str, u64>,
}

/// Events that wait for an engine that is stopped, in order.
type Waiting = VecDeque<Event>;

struct World<'a> {
    script: Script<'a>,
    now: Timestamp,
    events: BTreeMap<(Timestamp, u64), Event>,
    numbers: u64,
    ranks: usize,
    prefill: Prefill,
    decode: Decode,
    /// One for each rank, and the directory's.
    wires: Vec<Wire>,
    lose_next_copy: bool,
    /// Reads take a look-up's time until then.
    slow_until: Timestamp,
    met: &'a mut Met,
}

impl<'a> World<'a> {
    fn new(bytes: &'a [u8], met: &'a mut Met) -> Self {
        let mut script = Script::new(bytes);
        let now = Timestamp::default() + Duration::from_secs(1000);
        let ranks = 1 + script.below(2);
        let mut numbers = 0;
        let prefill = Prefill::new(&mut numbers, ranks, now);
        let decode = Decode::new(&mut numbers, ranks, now);
        let wire = |at: usize| Wire {
            up: at < ranks,
            dead: false,
            connection: 0,
            peers: [prefill.peer(at), decode.peer(at)],
            engine: prefill.engine,
            busy: [now; 2],
        };
        let wires = (0..=ranks).map(wire).collect();
        let events = BTreeMap::new();
        let (lose_next_copy, slow_until) = (false, now);
        let mut world = Self {
            script,
            now,
            events,
            numbers,
            ranks,
            prefill,
            decode,
            wires,
            lose_next_copy,
            slow_until,
            met,
        };
        world.decode.side.subscriber.expire(now);
        world.work();
        world
    }

    fn at(&mut self, when: Timestamp, event: Event) {
        self.numbers += 1;
        self.events.insert((when, self.numbers), event);
    }

    fn act(&mut self) {
        let pause = match self.script.below(4) {
            0 => 0,
            1 => self.script.below(5) as u64,
            2 => self.script.below(100) as u64,
            _ => self.script.below(100) as u64 * 30,
        };
        self.pass(ms(pause));
        let number = self.script.below(PROMPTS);
        match self.script.below(26) {
            0..4 => self.offer(number),
            4..9 => self.compute(),
            9..11 => self.end_one(),
            11..16 => self.look_up(number),
            16..19 => {
                // To the end, and looked for at once.
                self.offer(number);
                (0..4).for_each(|_| self.compute());
                self.pass(ms(200));
                self.look_up(number);
            }
            _ => {
                let (fault, _) = self.script.pick(&FAULTS);
                self.disturb(fault);
            }
        }
        self.work();
    }

    fn state(&self) -> &'static str {
        if !self.decode.look_ups.is_empty() {
            "fetching"
        } else if !self.decode.kept.is_empty() {
            "kept"
        } else if !self.prefill.computing.is_empty() {
            "computing"
        } else if self.prefill.machine.all_offered().next().is_some() {
            "told"
        } else {
            "nothing"
        }
    }

    fn struck(&mut self, fault: &'static str) {
        *self.met.faults.entry((fault, self.state())).or_default() += 1;
    }

    fn disturb(&mut self, fault: &'static str) {
        let wire = self.script.below(self.ranks + 1);
        let strikes = match fault {
            "stop prefill" | "nap prefill" => !self.prefill.side.stopped,
            "stop decode" | "nap decode" => !self.decode.side.stopped,
            "reset" | "partition" => self.wires[wire].up && !self.wires[wire].dead,
            // They strike with the next copy, or read.
            "a copy is lost" | "reads are slow" => false,
            _ => true,
        };
        if strikes {
            self.struck(fault);
        }
        match fault {
            "kill prefill" => self.kill(true),
            "kill decode" => self.kill(false),
            "stop prefill" => self.stop(true, SILENCE * 2),
            "stop decode" => self.stop(false, SILENCE * 2),
            "nap prefill" => self.stop(true, ms(300)),
            "nap decode" => self.stop(false, ms(300)),
            "reset" => self.cut(wire, WireCode::Closed, false),
            "partition" => {
                self.wires[wire].dead = true;
                let connection = self.wires[wire].connection;
                self.at(self.now + SILENCE, Event::Silent(wire, connection));
            }
            "reads are slow" => self.slow_until = self.now + LOOK_UP * 2,
            _ => self.lose_next_copy = true,
        }
    }

    // What engines do.

    fn offer(&mut self, number: usize) {
        let Prefill { machine, side, computing, .. } = &mut self.prefill;
        if side.stopped || side.publisher.followers() == 0 || computing.len() > 2 {
            return;
        }
        side.now = self.now;
        self.numbers += 1;
        let content = Content { prompt: number, transfer: self.numbers };
        if let Ok((offer, _)) = machine.offer(side, &prompt(number), content.name()) {
            computing.push(Computing { offer, content, blocks: 0, copy: 0 });
        }
    }

    /// A forward pass computes some blocks of a prompt; the ranks copy them to slots a while after.
    fn compute(&mut self) {
        let Prefill { machine, side, computing, copies, engine, .. } = &mut self.prefill;
        if side.stopped || computing.is_empty() {
            return;
        }
        let at = self.script.below(computing.len());
        let it = &mut computing[at];
        let left = prompt(it.content.prompt).blocks - it.blocks;
        if left == 0 {
            return;
        }
        let blocks = it.blocks..it.blocks + 1 + self.script.below(left as usize) as u32;
        *copies += 1;
        (it.blocks, it.copy) = (blocks.end, *copies);
        let (offer, copy, content) = (it.offer, *copies, it.content);
        machine.push(Copy { copy, offer, blocks: Some(blocks.clone()) });
        let lost = std::mem::take(&mut self.lose_next_copy);
        let engine = *engine;
        let when = self.now + ms(self.script.below(40) as u64);
        let when = when.max(side.busy + ms(1));
        side.busy = when;
        self.at(when, Event::Copied { engine, offer, content, blocks, copy, lost });
        if lost {
            self.struck("a copy is lost");
        }
    }

    /// A request ends, perhaps before its prompt is computed.
    fn end_one(&mut self) {
        let Prefill { machine, side, computing, .. } = &mut self.prefill;
        if side.stopped || computing.is_empty() {
            return;
        }
        let Computing { offer, copy, .. } = computing.remove(self.script.below(computing.len()));
        machine.push(Copy { copy, offer, blocks: None });
        side.now = self.now;
        machine.announce(side);
    }

    fn look_up(&mut self, number: usize) {
        if self.decode.side.stopped {
            return;
        }
        let blocks = prompt(number).blocks;
        let first =
            if self.script.below(4) == 0 { self.script.below(blocks as usize + 1) } else { 0 };
        self.ask(number, first as u32, self.now + LOOK_UP, Vec::new());
    }

    /// Asks the publishers of a prompt, one after the other, until one is fetched from. `missed`: what each attempt before
    /// has taken.
    fn ask(&mut self, number: usize, first: u32, until: Timestamp, missed: Vec<Duration>) {
        self.tell_decode();
        let Decode { machine, side, look_ups, engine, .. } = &mut self.decode;
        let mut begun = None;
        while let Some(found) = side.subscriber.take(&prompt(number).key, self.now) {
            if let Ok(Some(request)) = machine.begin(side, &prompt(number), first, &found) {
                let content = Content::of(number, &found.transfer);
                begun = Some((*engine, request, content));
                break;
            }
            if first >= prompt(number).blocks {
                break;
            }
        }
        let Some((engine, request, content)) = begun else {
            side.misses(&missed);
            return;
        };
        side.poison(machine.fetched(&request).expect("it has slots"));
        let began = self.now;
        let id = request.clone();
        look_ups.push(LookUp { request: id, content, first, began, until, missed });
        self.at(until, Event::LookUpEnds { engine, request });
    }

    /// Ends a look-up: its fetch has ended, or its time is over.
    fn end_look_up(&mut self, at: usize) {
        self.tell_decode();
        let LookUp { request, content, first, began, until, mut missed } =
            self.decode.look_ups.remove(at);
        let Decode { machine, side, engine, kept, .. } = &mut self.decode;
        let took = self.now.saturating_since(began);
        if machine.abandon(side, &request) {
            *self.met.ends.entry("abandoned").or_default() += 1;
            missed.push(took);
            return side.misses(&missed);
        }
        let Some(slots) = machine.take(side, &request) else {
            *self.met.ends.entry("failed").or_default() += 1;
            missed.push(took);
            if self.now < until {
                return self.ask(content.prompt, first, until, missed);
            }
            return side.misses(&missed);
        };
        *self.met.ends.entry("fetched").or_default() += 1;
        side.misses(&missed);
        side.subscriber.worked(THERE);
        kept.push(slots.clone());
        let (engine, after) = (*engine, ms(self.script.below(100) as u64 * 20));
        self.decode.check(content, first, &slots);
        self.at(self.now + after, Event::Give { engine, slots, content, first });
    }

    // Faults.

    fn kill(&mut self, prefill: bool) {
        let now = self.now;
        if prefill {
            self.prefill = Prefill::new(&mut self.numbers, self.ranks, now);
        } else {
            self.decode = Decode::new(&mut self.numbers, self.ranks, now);
            self.decode.side.subscriber.expire(now);
        }
        // A host that dies is missed; of a process that does, the kernel tells.
        let is_told = self.script.flip();
        for wire in 0..=self.ranks {
            if is_told || (wire == self.ranks && !prefill) {
                self.cut(wire, WireCode::Closed, true);
            } else {
                self.wires[wire].dead = true;
                let connection = self.wires[wire].connection;
                self.at(now + SILENCE, Event::Silent(wire, connection));
            }
        }
    }

    fn stop(&mut self, prefill: bool, time: Duration) {
        let until = self.now + time;
        let engine = if prefill {
            self.prefill.side.stopped = true;
            self.prefill.engine
        } else {
            self.decode.side.stopped = true;
            self.decode.engine
        };
        if time > SILENCE {
            for wire in 0..=self.ranks {
                let connection = self.wires[wire].connection;
                self.at(self.now + SILENCE, Event::Silent(wire, connection));
            }
        }
        self.at(until, Event::Wake(engine));
    }

    /// A session ends. `gone`: its peer is known to be gone.
    fn cut(&mut self, at: usize, code: WireCode, gone: bool) {
        let wire = &mut self.wires[at];
        let was_up = std::mem::replace(&mut wire.up, false);
        wire.dead = false;
        wire.connection += 1;
        let [producer, consumer] = wire.peers;
        if !was_up {
            return;
        }
        if at == self.ranks {
            if self.prefill.peer(at) == producer {
                self.prefill.side.publisher.lost(consumer);
            }
            if self.decode.peer(at) == consumer {
                self.decode.side.subscriber.lost(THERE, self.now);
            }
            return;
        }
        if self.prefill.peer(at) == producer {
            let machine = &mut self.prefill.side.ranks[at].machine;
            machine.lost(consumer, code, gone, self.now);
        }
        if self.decode.peer(at) == consumer {
            let machine = &mut self.decode.side.ranks[at].machine;
            machine.lost(producer, code, gone, self.now);
        }
        let after = ms(self.script.below(100) as u64 * 10);
        self.at(self.now + after, Event::Reconnect(at));
    }

    fn reconnect(&mut self, at: usize) {
        if self.wires[at].up {
            return;
        }
        if self.prefill.side.stopped || self.decode.side.stopped {
            let later = self.now + ms(100);
            return self.at(later, Event::Reconnect(at));
        }
        let (producer, consumer) = (self.prefill.peer(at), self.decode.peer(at));
        let wire = &mut self.wires[at];
        (wire.up, wire.peers, wire.engine) = (true, [producer, consumer], self.prefill.engine);
        wire.busy = [self.now; 2];
        self.prefill.side.ranks[at].machine.met(consumer);
        let incarnation = Incarnation(producer.0.into());
        self.decode.side.ranks[at].machine.met(producer, incarnation, self.now);
    }

    /// No more faults: everything ends, and prompts are handed over again.
    fn settle(&mut self) {
        (self.lose_next_copy, self.slow_until) = (false, self.now);
        self.pass(SILENCE * 3);
        while !self.prefill.computing.is_empty() {
            self.end_one();
        }
        self.pass(TIMEOUT * 3 + Duration::from_secs(60));
        self.assert_nothing_is_kept();
        let fetched = self.met.ends.get("fetched").copied();
        self.offer(PROMPTS - 1);
        assert_eq!(self.prefill.computing.len(), 1, "the engines have found each other");
        (0..PROMPTS).for_each(|_| self.compute());
        self.pass(ms(500));
        // However long look-ups have been made to wait, its publisher is asked again by now.
        self.ask(PROMPTS - 1, 0, self.now + LOOK_UP, Vec::new());
        self.end_one();
        self.pass(LOOK_UP);
        assert_ne!(self.met.ends.get("fetched").copied(), fetched, "the prompt is handed over");
        self.pass(TIMEOUT * 3 + Duration::from_secs(60));
        self.assert_nothing_is_kept();
    }

    fn assert_nothing_is_kept(&self) {
        assert!(self.decode.look_ups.is_empty(), "I1: each look-up has ended");
        let mut all = [self.prefill.machine.gauges(), self.decode.machine.gauges()].concat();
        // The directory still follows.
        let directory =
            [self.prefill.side.publisher.gauges(), self.decode.side.subscriber.gauges()];
        all.extend(
            directory.concat().iter().filter(|(name, _)| ["published", "heard"].contains(name)),
        );
        for rank in &self.prefill.side.ranks {
            assert!(rank.produced.is_empty(), "I8: {:?}", rank.produced.keys());
            all.extend(rank.machine.gauges());
        }
        for rank in &self.decode.side.ranks {
            assert!(rank.fetches.is_empty() && rank.reads.is_empty(), "I8: fetches and reads");
            all.extend(rank.machine.gauges());
        }
        // Ends are remembered for longer, and may be.
        for (name, count) in all.into_iter().filter(|(name, _)| *name != "tombstones") {
            assert_eq!(count, 0, "I8: {name}");
        }
    }
}

fn run(bytes: &[u8], met: &mut Met) {
    let mut world = World::new(bytes, met);
    while !world.script.is_empty() {
        world.act();
    }
    world.settle();
}

/// Runs the two engines with decisions and faults from bytes; panics on a finding.
pub fn exchange(bytes: &[u8]) {
    run(bytes, &mut Met::default());
}

#[test]
fn a_prompt_is_handed_over_whole_or_not_at_all_whatever_fault_strikes_at_whatever_moment() {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut met = Met::default();
    for case in 0..1000 {
        let mut bytes = vec![0; rng.usize(50..400)];
        rng.fill(&mut bytes);
        let run = std::panic::AssertUnwindSafe(|| run(&bytes, &mut met));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("case {case}");
            std::panic::resume_unwind(panic);
        }
    }
    for (fault, states) in FAULTS {
        for state in states {
            let count = met.faults.get(&(fault, *state)).copied().unwrap_or(0);
            println!("{fault:15} {state:10} {count:6}");
            assert!(count > 0, "{fault}, {state}");
        }
    }
    println!("{:?}", met.ends);
    for end in ["fetched", "failed", "abandoned"] {
        assert!(met.ends.get(end).is_some_and(|count| *count > 100), "{end}: {:?}", met.ends);
    }
}
