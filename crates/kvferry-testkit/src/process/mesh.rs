//! One agent of a full mesh. It writes to every other member at once, reads back what it wrote, and
//! repeats that until it is stopped. It records the transfers that failed and the bytes that differ.
//!
//! One thread drives all transfers of the agent: each is a future whose waker names the member.

use crate::pattern::Pattern;
use kvferry::{
    Access, Agent, Batch, Error, ErrorKind, Incarnation, Options, Peer, Region, RemoteRegion,
    Transfer,
};
use kvferry_sys::sync::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// An agent of the mesh.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Index of the agent among the members.
    pub index: usize,
    /// Address where the agent listens.
    pub address: String,
    /// The description of its region: one slot per member, written by that member only.
    pub remote: Vec<u8>,
}

/// The members of a mesh, and how much a transfer moves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The index of the agent that receives this plan.
    pub me: usize,
    /// The members of the mesh, this agent included.
    pub members: Vec<Member>,
    /// Bytes that one transfer writes to another member.
    pub slot: usize,
    /// Bytes of a block; blocks of a slot are written in reverse order.
    pub block: usize,
    /// The deadline of one transfer.
    pub timeout_ms: u64,
    /// After this many writes the last one is read back and compared, and the pattern changes:
    /// making and comparing patterns costs more than moving them.
    pub writes_per_read: u32,
}

/// A transfer that failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fault {
    /// The other member.
    pub member: usize,
    /// The incarnation of the member that the transfer was for.
    pub incarnation: String,
    /// Time when the outcome was known, in nanoseconds of `CLOCK_BOOTTIME`.
    pub at_ns: u64,
    /// The error's kind and text.
    pub error: String,
    /// The incarnation that the session was with, if it differs from `incarnation`: this agent may learn
    /// of a restart before the old session ends.
    pub session: Option<String>,
}

/// Counters and faults since the mesh started.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Time of the report, in nanoseconds of `CLOCK_BOOTTIME`.
    pub at_ns: u64,
    /// Bytes moved with each member, in both directions.
    pub bytes: Vec<u64>,
    /// Reads whose bytes differ from what was written.
    pub wrong: u64,
    /// The longest duration of a transfer.
    pub longest_us: u64,
    /// Transfers that failed since the last report.
    pub faults: Vec<Fault>,
}

enum Event {
    /// A transfer with that member may have ended.
    Woken(usize),
    /// A member has started or restarted.
    Joined(Member),
    Stop,
}

#[derive(Default)]
struct Events {
    queue: Mutex<VecDeque<Event>>,
    some: Condvar,
}

impl Events {
    fn put(&self, event: Event) {
        self.queue.lock().push_back(event);
        self.some.notify_one();
    }

    fn take(&self) -> Event {
        let mut queue = self.queue.lock();
        loop {
            if let Some(event) = queue.pop_front() {
                return event;
            }
            queue = self.some.wait(queue, None);
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

/// State of this agent's transfers with another member.
struct Pairing {
    peer: Peer,
    remote: RemoteRegion,
    waker: Waker,
    running: Option<Transfer>,
    reading: bool,
    began: Instant,
    /// The incarnation of the peer that the running transfer is for.
    incarnation: Incarnation,
    /// Pattern that is being written; `writes` counts its writes.
    pattern: Pattern,
    writes: u32,
}

/// The running mesh agent of this process.
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
            events.put(Event::Joined(member));
        }
        let thread = std::thread::spawn(move || driver.run());
        Ok(Self { events, report, thread })
    }

    pub(super) fn join(&self, member: Member) {
        self.events.put(Event::Joined(member));
    }

    pub(super) fn report(&self) -> Report {
        let mut report = self.report.lock();
        let faults = std::mem::take(&mut report.faults);
        Report { at_ns: kvferry_sys::clock::boottime_ns(), faults, ..report.clone() }
    }

    /// Starts no more transfers, and waits for those that run.
    pub(super) fn stop(self) -> Report {
        self.events.put(Event::Stop);
        self.thread.join().expect("the driver of a mesh does not panic");
        let mut report = self.report.lock();
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
                Event::Woken(member) => self.poll(member),
                Event::Joined(member) => self.join(member),
                Event::Stop => self.stopping = true,
            }
            let running = || self.pairings.iter().flatten().any(|p| p.running.is_some());
            if self.stopping && !running() {
                return;
            }
        }
    }

    fn join(&mut self, member: Member) {
        let index = member.index;
        if index == self.plan.me {
            return;
        }
        let remote = RemoteRegion::from_bytes(&member.remote)
            .expect("the parent passes on what the member sent");
        // If a transfer with the member's earlier incarnation still runs, the next one starts when
        // that has ended.
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
                incarnation: Incarnation(0),
                pattern: Pattern::new(0),
                writes: 0,
            });
        }
        self.write(index);
    }

    fn batch(&self, index: usize, local: &Region) -> Batch {
        let (slot, block) = (self.plan.slot, self.plan.block);
        let remote = &self.pairings[index].as_ref().expect("the member has joined").remote;
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
        let pairing = self.pairings[index].as_mut().expect("the member has joined");
        if pairing.writes == 0 {
            pairing.pattern = Pattern::fresh();
            let at = index * self.plan.slot;
            let bytes = pairing.pattern.bytes(self.plan.slot);
            self.from.write_at(at, &bytes).expect("owned memory");
        }
        pairing.writes += 1;
        pairing.reading = false;
        pairing.began = Instant::now();
        pairing.incarnation = pairing.remote.incarnation;
        pairing.running = Some(pairing.peer.write_async(&batch, &options));
        // The first poll registers the waker.
        self.events.put(Event::Woken(index));
    }

    fn read(&mut self, index: usize) {
        let (batch, options) = (self.batch(index, &self.back), self.options());
        let pairing = self.pairings[index].as_mut().expect("the member has joined");
        pairing.reading = true;
        pairing.writes = 0;
        pairing.began = Instant::now();
        pairing.incarnation = pairing.remote.incarnation;
        pairing.running = Some(pairing.peer.read_async(&batch, &options));
        self.events.put(Event::Woken(index));
    }

    fn poll(&mut self, index: usize) {
        let Some(pairing) = self.pairings[index].as_mut() else { return };
        let Some(running) = pairing.running.as_mut() else { return };
        let mut cx = Context::from_waker(&pairing.waker);
        let Poll::Ready(outcome) = Future::poll(Pin::new(running), &mut cx) else { return };
        pairing.running = None;
        let (reading, took) = (pairing.reading, pairing.began.elapsed());
        let (pattern, incarnation) = (pairing.pattern, pairing.incarnation);
        let restarted = pairing.remote.incarnation != incarnation;
        let again = pairing.writes < self.plan.writes_per_read;
        {
            let mut report = self.report.lock();
            report.longest_us = report.longest_us.max(took.as_micros() as u64);
            match &outcome {
                Ok(moved) => report.bytes[index] += moved.bytes,
                Err(error) => report.faults.push(Fault {
                    member: index,
                    incarnation: incarnation.to_string(),
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
                    self.report.lock().wrong += 1;
                }
                self.write(index);
            }
            Ok(_) if restarted => self.write(index),
            Ok(_) if self.stopping => {}
            Ok(_) if again => self.write(index),
            Ok(_) => self.read(index),
            Err(_) if restarted => self.write(index),
            Err(error) if error.kind() == ErrorKind::StaleIncarnation => {
                // The session with the earlier incarnation has not ended yet, but will soon.
                std::thread::sleep(Duration::from_millis(5));
                self.write(index);
            }
            // The next transfer starts when the member has restarted.
            Err(_) => {}
        }
    }
}
