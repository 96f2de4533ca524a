//! Two processes send to each other and receive from each other at a few keys, with random faults, in virtual time. What
//! must hold:
//!
//! * each task ends once, and a receive task not before its read has ended (I1, I2);
//! * each receive task that ends well has the bytes of one send, which has ended well, and no two have those of one (I3);
//! * the peer is watched while an offer of it waits or is read, and at the end no peer is (I6, I10);
//! * at the end nothing is kept (I8).
//!
//! A connection is lost with what is under way; reads fail; time passes; keys are used again.

use super::Model;
use crate::engines::here;
use crate::pair::ms;
use kvferry_proto::Timestamp;
use kvferry_proto::fuzzing::{Met, Script};
use kvferry_proto::handoff::PeerId;
use kvferry_proto::tasks::{Action, Code, Gauges, Offered, Part, RecvId, SendId, Tasks, Wanted};
use std::collections::{BTreeMap, HashSet, VecDeque};

pub const MODEL: Model = Model {
    name: "tasks_model",
    run,
    rows: &[SEND, RECEIVE],
    columns: &[
        "done",
        "cancelled",
        "timeout",
        "mismatch",
        "duplicate",
        "unreachable",
        "peer lost",
        "read failed",
    ],
    unreachable: &[(
        RECEIVE,
        &["duplicate", "unreachable"],
        "a second task of a key is refused at once, and a receiver connects to no peer",
    )],
    cases: (2000, 1500),
};

const SEND: &str = "a send ends";
const RECEIVE: &str = "a receive task ends";

const KEYS: [&str; 3] = ["a", "b", "c"];

fn name(code: Code) -> &'static str {
    match code {
        Code::Done => "done",
        Code::Cancelled => "cancelled",
        Code::Timeout => "timeout",
        Code::Mismatch => "mismatch",
        Code::Duplicate => "duplicate",
        Code::Unreachable => "unreachable",
        Code::PeerLost => "peer lost",
        Code::ReadFailed => "read failed",
        _ => "other",
    }
}

/// A process: its tasks, and the state of its driver.
#[derive(Default)]
struct Process {
    tasks: Tasks,
    /// Messages to this process, in order.
    inbox: VecDeque<Vec<u8>>,
    sends: BTreeMap<SendId, Option<Code>>,
    /// Receive tasks that were not forgotten, and those that were.
    recvs: BTreeMap<RecvId, Option<Code>>,
    forgotten: HashSet<RecvId>,
    connecting: Vec<SendId>,
    reading: Vec<RecvId>,
    watched: HashSet<PeerId>,
    /// Number of the other side's send that a task reads, by task. The offset in an offer is the number of the send.
    sources: BTreeMap<RecvId, u64>,
    /// Sends, by their numbers.
    numbers: Vec<SendId>,
}

/// Two processes with one connection at a time.
struct World<'a> {
    script: Script<'a>,
    now: Timestamp,
    both: [Process; 2],
    peer: PeerId,
}

fn run(bytes: &[u8], met: Met<'_>) {
    let mut world = World {
        script: Script::new(bytes),
        now: Timestamp::default(),
        both: Default::default(),
        peer: PeerId(1),
    };
    while !world.script.is_empty() {
        world.step();
    }
    world.settle();
    for process in &world.both {
        process.sends.values().flatten().for_each(|code| met(SEND, name(*code)));
        process.recvs.values().flatten().for_each(|code| met(RECEIVE, name(*code)));
    }
}

impl World<'_> {
    fn pick<T: Copy>(&mut self, of: Vec<T>) -> Option<T> {
        (!of.is_empty()).then(|| of[self.script.below(of.len().min(256))])
    }

    /// Carries out the actions of a process; messages, connections and reads wait for their turn.
    fn work(&mut self, who: usize) {
        while let Some(action) = self.both[who].tasks.poll() {
            let (peer, process) = (self.peer, &mut self.both[who]);
            match action {
                Action::Connect { send } => process.connecting.push(send),
                Action::Offer { to, bytes, .. } | Action::Message { to, bytes } => {
                    if to == peer {
                        self.both[1 - who].inbox.push_back(bytes);
                    }
                }
                Action::Read { task, copies, .. } => {
                    assert_eq!(process.recvs[&task], None, "a task that has ended is not read");
                    let known = process.sources.insert(task, copies[0].from.1);
                    assert_eq!(known, None, "a task is read once");
                    process.reading.push(task);
                }
                Action::StopRead { task } => assert!(process.reading.contains(&task)),
                Action::Watch { peer, on } => {
                    let changes = match on {
                        true => process.watched.insert(peer),
                        false => process.watched.remove(&peer),
                    };
                    assert!(changes, "a watch begins and ends once");
                }
                Action::SendEnded { id, outcome } => {
                    let before = process.sends.insert(id, Some(outcome.code));
                    assert_eq!(before, Some(None), "a send ends once");
                }
                Action::RecvEnded { id, outcome } => {
                    assert!(!process.reading.contains(&id), "its memory is not written any more");
                    let before = process.recvs.insert(id, Some(outcome.code));
                    assert_eq!(before, Some(None), "a task ends once");
                }
            }
        }
        let Process { tasks, watched, reading, .. } = &self.both[who];
        assert!(tasks.gauges().parked == 0 || watched.contains(&self.peer));
        assert!(reading.is_empty() || !watched.is_empty());
    }

    fn step(&mut self) {
        let who = self.script.below(2);
        let key = self.script.pick(&KEYS);
        let what = self.script.below(100);
        let now = self.now;
        match what {
            0..15 => {
                // One in five sends lacks what receivers ask for.
                let (block, budget) = (i64::from(what >= 12), ms(1 + self.script.below(50) as u64));
                let process = &mut self.both[who];
                let part = Part(0, process.numbers.len() as u64, 8);
                let blocks = vec![Offered(block, vec![part])];
                let id = process.tasks.send(key, vec![], blocks, budget, now).unwrap();
                process.numbers.push(id);
                process.sends.insert(id, None);
            }
            15..30 => {
                let budget = ms(1 + self.script.below(50) as u64);
                let wanted = vec![Wanted { key: 0, lens: vec![8] }];
                let process = &mut self.both[who];
                if let Ok(id) = process.tasks.recv(key, wanted, budget, now) {
                    process.recvs.insert(id, None);
                }
            }
            30..34 => {
                if let Some(id) = self.pick(self.both[who].sends.keys().copied().collect()) {
                    self.both[who].tasks.cancel_send(id);
                }
            }
            34..37 => self.both[who].tasks.steal(key),
            37..46 => {
                let Process { recvs, forgotten, .. } = &self.both[who];
                let kept = recvs.keys().copied().filter(|id| !forgotten.contains(id)).collect();
                let Some(id) = self.pick(kept) else { return };
                let Process { tasks, forgotten, .. } = &mut self.both[who];
                if what < 41 {
                    tasks.cancel_recv(id);
                } else if tasks.forget(id) {
                    forgotten.insert(id);
                }
            }
            46..60 => {
                let Some(id) = self.pick(self.both[who].connecting.clone()) else { return };
                let opened = if what == 46 { Err("refused".to_owned()) } else { Ok(self.peer) };
                self.both[who].connecting.retain(|other| *other != id);
                self.both[who].tasks.opened(id, opened, now);
            }
            60..80 => self.deliver(who),
            80..92 => {
                let result = if what < 82 { Err("broken".to_owned()) } else { Ok(()) };
                if let Some(id) = self.pick(self.both[who].reading.clone()) {
                    self.read_ends(who, id, result);
                }
            }
            92..99 => {
                self.now = now + ms(self.script.below(10) as u64);
                self.expire();
            }
            _ => self.lose(),
        }
        self.work(0);
        self.work(1);
    }

    fn deliver(&mut self, to: usize) {
        if let Some(bytes) = self.both[to].inbox.pop_front() {
            let taken = self.both[to].tasks.receive(self.peer, here(), &bytes, self.now);
            taken.expect("the output of the other side");
        }
    }

    fn read_ends(&mut self, who: usize, id: RecvId, result: Result<(), String>) {
        self.both[who].reading.retain(|other| *other != id);
        self.both[who].tasks.read_ended(id, result, self.now);
    }

    fn expire(&mut self) {
        self.both.iter_mut().for_each(|process| process.tasks.expire(self.now));
    }

    /// The connection ends, with what is on its way; the next one has another number.
    fn lose(&mut self) {
        for process in &mut self.both {
            process.inbox.clear();
            process.tasks.lost(self.peer, "reset");
        }
        self.peer = PeerId(self.peer.0 + 1);
    }

    /// Ends what is open, and checks what is left and how tasks have ended.
    fn settle(&mut self) {
        for who in [0, 1] {
            for id in std::mem::take(&mut self.both[who].connecting) {
                self.both[who].tasks.opened(id, Err("refused".to_owned()), self.now);
            }
            self.work(who);
        }
        let is_busy = |process: &Process| {
            !process.inbox.is_empty()
                || !process.reading.is_empty()
                || process.tasks.next_timeout().is_some()
        };
        while self.both.iter().any(is_busy) {
            self.now = self.now + ms(1);
            self.expire();
            for who in [0, 1] {
                self.work(who);
                self.deliver(who);
                self.work(who);
                if let Some(id) = self.both[who].reading.last().copied() {
                    self.read_ends(who, id, Ok(()));
                }
                self.work(who);
            }
        }
        for Process { tasks, sends, recvs, watched, .. } in &mut self.both {
            assert!(recvs.keys().all(|id| tasks.forget(*id)), "each task has ended");
            assert!(sends.values().all(Option::is_some), "each send has ended");
            tasks.expire(self.now + ms(1000));
            assert_eq!(tasks.gauges(), Gauges::default());
            assert!(watched.is_empty(), "{watched:?} are watched");
        }
        for (ours, theirs) in [(0, 1), (1, 0)] {
            let (ours, theirs) = (&self.both[ours], &self.both[theirs]);
            let done = ours.recvs.iter().filter(|(_, end)| **end == Some(Code::Done));
            let read: Vec<_> = done.map(|(id, _)| ours.sources[id]).collect();
            let sends: HashSet<_> =
                read.iter().map(|number| theirs.numbers[*number as usize]).collect();
            assert_eq!(sends.len(), read.len(), "no two tasks have the bytes of one send");
            let ended_well = |id: &SendId| theirs.sends[id] == Some(Code::Done);
            assert!(sends.iter().all(ended_well), "a send ends as its task does");
        }
    }
}
