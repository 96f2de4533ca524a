//! One agent of a full mesh: writes to every other one and reads it back, all at once and for as
//! long as it is asked to, and keeps a record of what went wrong.
//!
//! One thread drives it all: a transfer under way is a future whose waker says whose it is.

use crate::pattern::Pattern;
use kvferry::{
    Access, Agent, Batch, Error, ErrorKind, Incarnation, Options, Peer, Region, RemoteRegion,
    Transfer,
};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// An agent of the mesh, as the others know it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Its place.
    pub index: usize,
    /// Where it can be called.
    pub address: String,
    /// Its memory: one slot per member, each written by that member only.
    pub remote: Vec<u8>,
}

/// Who is in a mesh, and how much a transfer moves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The place of the agent that is told this.
    pub me: usize,
    /// Everybody, this agent too.
    pub members: Vec<Member>,
    /// Bytes that are written to each other member in one transfer.
    pub slot: usize,
    /// In blocks of this size, in reverse order.
    pub block: usize,
    /// How long one transfer may take.
    pub timeout_ms: u64,
    /// After so many writes one is read back, and what is written changes: to make patterns and to
    /// compare them costs more than to move them.
    pub writes_per_read: u32,
}

/// An outcome that was no success.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fault {
    /// The other member.
    pub member: usize,
    /// The life of it that was meant.
    pub life: String,
    /// When it was known, by the clock that all processes share.
    pub at_ns: u64,
    /// The error's kind and words.
    pub error: String,
    /// The life that the session was with, if it was another one than the batch was for: news of a
    /// restart may be faster than the end of a session.
    pub session: Option<String>,
}

/// What happened since the mesh began; faults only since the last report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Nanoseconds of the clock that all processes share.
    pub at_ns: u64,
    /// Bytes moved with each member, both ways.
    pub bytes: Vec<u64>,
    /// Reads that brought back something else than was written.
    pub wrong: u64,
    /// The longest that a transfer took.
    pub longest_us: u64,
    /// Transfers that failed.
    pub faults: Vec<Fault>,
}

enum Event {
    /// A transfer with that member may have ended.
    Woken(usize),
    /// That member is there, for the first time or again.
    Met(Member),
    Stop,
}

#[derive(Default)]
struct Events {
    queue: Mutex<VecDeque<Event>>,
    some: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Events {
    fn put(&self, event: Event) {
        lock(&self.queue).push_back(event);
        self.some.notify_one();
    }

    fn take(&self) -> Event {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(event) = queue.pop_front() {
                return event;
            }
            queue = self.some.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct Ended {
    member: usize,
    events: Arc<Events>,
}

impl Wake for Ended {
    fn wake(self: Arc<Self>) {
        self.events.put(Event::Woken(self.member));
    }
}

/// What this agent does with another one.
struct Pairing {
    peer: Peer,
    remote: RemoteRegion,
    waker: Waker,
    running: Option<Transfer>,
    reading: bool,
    began: Instant,
    /// The life of the peer that the running transfer is with.
    life: Incarnation,
    /// What was written last, and how often.
    pattern: Pattern,
    writes: u32,
}

/// A running mesh of this process.
pub(super) struct Mesh {
    events: Arc<Events>,
    report: Arc<Mutex<Report>>,
    thread: JoinHandle<()>,
}

impl Mesh {
    pub(super) fn start(agent: &Agent, plan: Plan) -> Result<Self, Error> {
        let count = plan.members.len();
        let events = Arc::new(Events::default());
        let report = Report { bytes: vec![0; count], ..Report::default() };
        let report = Arc::new(Mutex::new(report));
        let mut driver = Driver {
            from: agent.allocate(count * plan.slot, Access::NONE)?,
            back: agent.allocate(count * plan.slot, Access::NONE)?,
            pairings: (0..count).map(|_| None).collect(),
            agent: agent.clone(),
            events: Arc::clone(&events),
            report: Arc::clone(&report),
            stopping: false,
            plan,
        };
        for member in std::mem::take(&mut driver.plan.members) {
            events.put(Event::Met(member));
        }
        let thread = std::thread::spawn(move || driver.run());
        Ok(Self { events, report, thread })
    }

    pub(super) fn met(&self, member: Member) {
        self.events.put(Event::Met(member));
    }

    pub(super) fn report(&self) -> Report {
        let mut report = lock(&self.report);
        let faults = std::mem::take(&mut report.faults);
        Report { at_ns: kvferry_sys::clock::boottime_ns(), faults, ..report.clone() }
    }

    /// Starts nothing more, and waits for what runs.
    pub(super) fn stop(self) -> Report {
        self.events.put(Event::Stop);
        self.thread.join().expect("the driver of a mesh does not panic");
        let mut report = lock(&self.report);
        std::mem::take(&mut report)
    }
}

struct Driver {
    agent: Agent,
    plan: Plan,
    from: Region,
    back: Region,
    pairings: Vec<Option<Pairing>>,
    events: Arc<Events>,
    report: Arc<Mutex<Report>>,
    stopping: bool,
}

impl Driver {
    fn run(mut self) {
        loop {
            match self.events.take() {
                Event::Woken(member) => self.look(member),
                Event::Met(member) => self.meet(member),
                Event::Stop => self.stopping = true,
            }
            let running = || self.pairings.iter().flatten().any(|p| p.running.is_some());
            if self.stopping && !running() {
                return;
            }
        }
    }

    fn meet(&mut self, member: Member) {
        let index = member.index;
        if index == self.plan.me {
            return;
        }
        let remote = RemoteRegion::from_bytes(&member.remote).expect("the parent passes it on");
        // One that is met again while a transfer with its earlier life still runs begins when that
        // has ended.
        if let Some(pairing) = &mut self.pairings[index] {
            pairing.remote = remote;
            if pairing.running.is_some() {
                return;
            }
        } else {
            let ended = Ended { member: index, events: Arc::clone(&self.events) };
            self.pairings[index] = Some(Pairing {
                peer: self.agent.peer(&member.address).expect("an address"),
                remote,
                waker: Arc::new(ended).into(),
                running: None,
                reading: false,
                began: Instant::now(),
                life: Incarnation(0),
                pattern: Pattern::new(0),
                writes: 0,
            });
        }
        self.write(index);
    }

    fn batch(&self, index: usize, local: &Region) -> Batch {
        let (slot, block) = (self.plan.slot, self.plan.block);
        let remote = &self.pairings[index].as_ref().expect("met").remote;
        let count = slot / block;
        let mut batch = Batch::with_capacity(count);
        for k in 0..count {
            let here = index * slot + k * block;
            let there = self.plan.me * slot + (count - 1 - k) * block;
            batch
                .push(local, here as u64, remote, there as u64, block as u64)
                .expect("a slot is inside both");
        }
        batch
    }

    fn options(&self) -> Options<'static> {
        let timeout = Some(Duration::from_millis(self.plan.timeout_ms));
        Options { timeout, ..Options::default() }
    }

    fn write(&mut self, index: usize) {
        if self.stopping {
            return;
        }
        let (batch, options) = (self.batch(index, &self.from), self.options());
        let pairing = self.pairings[index].as_mut().expect("met");
        if pairing.writes == 0 {
            pairing.pattern = Pattern::fresh();
            let at = index * self.plan.slot;
            let bytes = pairing.pattern.bytes(self.plan.slot);
            self.from.write_at(at, &bytes).expect("owned memory");
        }
        pairing.writes += 1;
        pairing.reading = false;
        pairing.began = Instant::now();
        pairing.life = pairing.remote.incarnation;
        pairing.running = Some(pairing.peer.write_async(batch, options));
        // Its waker is set by looking at it.
        self.events.put(Event::Woken(index));
    }

    fn read(&mut self, index: usize) {
        let (batch, options) = (self.batch(index, &self.back), self.options());
        let pairing = self.pairings[index].as_mut().expect("met");
        pairing.reading = true;
        pairing.writes = 0;
        pairing.began = Instant::now();
        pairing.life = pairing.remote.incarnation;
        pairing.running = Some(pairing.peer.read_async(batch, options));
        self.events.put(Event::Woken(index));
    }

    fn look(&mut self, index: usize) {
        let Some(pairing) = self.pairings[index].as_mut() else { return };
        let Some(running) = pairing.running.as_mut() else { return };
        let mut cx = Context::from_waker(&pairing.waker);
        let Poll::Ready(outcome) = Future::poll(Pin::new(running), &mut cx) else { return };
        pairing.running = None;
        let (reading, took) = (pairing.reading, pairing.began.elapsed());
        let (pattern, life) = (pairing.pattern, pairing.life);
        let met_again = pairing.remote.incarnation != life;
        let again = pairing.writes < self.plan.writes_per_read;
        {
            let mut report = lock(&self.report);
            report.longest_us = report.longest_us.max(took.as_micros() as u64);
            match &outcome {
                Ok(moved) => report.bytes[index] += moved.bytes,
                Err(error) => report.faults.push(Fault {
                    member: index,
                    life: life.to_string(),
                    at_ns: kvferry_sys::clock::boottime_ns(),
                    error: format!("{}: {error}", error.kind()),
                    session: error.context("live").map(str::to_owned),
                }),
            }
        }
        match outcome {
            Ok(_) if reading => {
                let mut bytes = vec![0; self.plan.slot];
                let at = index * self.plan.slot;
                self.back.read_at(at, &mut bytes).expect("owned memory");
                if bytes != pattern.bytes(self.plan.slot) {
                    lock(&self.report).wrong += 1;
                }
                self.write(index);
            }
            Ok(_) if met_again => self.write(index),
            Ok(_) if self.stopping => {}
            Ok(_) if again => self.write(index),
            Ok(_) => self.read(index),
            Err(_) if met_again => self.write(index),
            Err(error) if error.kind() == ErrorKind::StaleIncarnation => {
                // The session of the earlier life is about to be found dead.
                std::thread::sleep(Duration::from_millis(5));
                self.write(index);
            }
            // Until it is met again.
            Err(_) => {}
        }
    }
}
