//! Random histories of two processes against the rules that hold in all of them.

use crate::*;
use fastrand::Rng;
use kvferry_proto::Timestamp;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::Duration;

/// A process: its tasks, and the state of its driver.
#[derive(Default)]
struct Process {
    tasks: Tasks,
    /// Messages to this process, in order.
    inbox: VecDeque<Vec<u8>>,
    sends: BTreeMap<SendId, Option<Outcome>>,
    recvs: BTreeMap<RecvId, Option<Outcome>>,
    reading: Vec<RecvId>,
    /// Number of the other side's send that a task reads, by task. The offset in an offer is the
    /// number of the send.
    sources: BTreeMap<RecvId, u64>,
    numbers: Vec<SendId>,
    forgotten: HashSet<RecvId>,
    connecting: Vec<SendId>,
}

/// Two processes with one connection at a time. Each one sends to the other and receives from it.
struct World {
    rng: Rng,
    now: Timestamp,
    both: [Process; 2],
    conn: Conn,
    /// Reads whose task had ended before they did: always empty.
    late: usize,
}

const KEYS: [&str; 3] = ["a", "b", "c"];

impl World {
    fn new(seed: u64) -> Self {
        let both = [Process::default(), Process::default()];
        Self { rng: Rng::with_seed(seed), now: Timestamp::default(), both, conn: Conn(1), late: 0 }
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        self.rng.choice(from).cloned()
    }

    /// Carries out the actions of a process; messages, connections and reads wait for their turn.
    fn act(&mut self, who: usize) {
        while let Some(action) = self.both[who].tasks.poll() {
            let (conn, process) = (self.conn, &mut self.both[who]);
            match action {
                Action::Connect { send, .. } => process.connecting.push(send),
                Action::Offer { to, bytes, .. } | Action::Message { to, bytes } if to == conn => {
                    self.both[1 - who].inbox.push_back(bytes);
                }
                Action::Offer { .. } | Action::Message { .. } => {}
                Action::Read { task, copies, .. } => {
                    assert_eq!(process.recvs[&task], None, "a task that has ended is read");
                    let known = process.sources.insert(task, copies[0].from.1);
                    assert_eq!(known, None, "a task is read once");
                    process.reading.push(task);
                }
                Action::StopRead { task } => assert!(process.reading.contains(&task)),
                Action::SendEnded { id, outcome } => {
                    assert_eq!(process.sends.insert(id, Some(outcome)), Some(None));
                }
                Action::RecvEnded { id, outcome } => {
                    assert_eq!(process.recvs.insert(id, Some(outcome)), Some(None));
                    self.late += usize::from(process.reading.contains(&id));
                }
            }
        }
    }

    fn step(&mut self) {
        let who = self.rng.usize(..2);
        let what = self.rng.usize(..100);
        let key = self.rng.choice(KEYS).expect("three");
        let budget = Duration::from_millis(1 + self.rng.usize(..50) as u64);
        let now = self.now;
        let process = &self.both[who];
        let sends: Vec<_> = process.sends.keys().copied().collect();
        let recvs: Vec<_> =
            process.recvs.keys().copied().filter(|id| !process.forgotten.contains(id)).collect();
        let (reading, connecting) = (process.reading.clone(), process.connecting.clone());
        let (send, recv) = (self.pick(&sends), self.pick(&recvs));
        let (read, connect) = (self.pick(&reading), self.pick(&connecting));
        let process = &mut self.both[who];
        match what {
            0..15 => {
                // One in four sends lacks what receivers ask for.
                let block = i64::from(what >= 12);
                let number = process.numbers.len() as u64;
                let blocks = vec![Offered(block, vec![Part(0, number, 8)])];
                let id = process.tasks.send("there", key, vec![], blocks, budget, now);
                let id = id.expect("the arguments are valid");
                process.numbers.push(id);
                process.sends.insert(id, None);
            }
            15..30 => {
                let wanted = vec![Wanted { key: 0, lens: vec![8] }];
                if let Ok(id) = process.tasks.recv(key, wanted, budget, now) {
                    process.recvs.insert(id, None);
                }
            }
            30..34 => send.into_iter().for_each(|id| process.tasks.cancel_send(id)),
            34..38 => recv.into_iter().for_each(|id| process.tasks.cancel_recv(id)),
            38..41 => process.tasks.steal(key),
            41..46 => {
                if let Some(id) = recv
                    && process.tasks.forget(id)
                {
                    process.forgotten.insert(id);
                }
            }
            46..60 => {
                if let Some(id) = connect {
                    process.connecting.retain(|other| *other != id);
                    let conn = if what == 46 { Err("refused".to_owned()) } else { Ok(self.conn) };
                    process.tasks.opened(id, conn, now);
                }
            }
            60..80 => {
                if let Some(bytes) = process.inbox.pop_front() {
                    let taken = process.tasks.received(self.conn, super::here(), &bytes, now);
                    taken.expect("the output of the other side");
                }
            }
            80..92 => {
                if let Some(id) = read {
                    process.reading.retain(|other| *other != id);
                    let result = if what < 82 { Err("broken".to_owned()) } else { Ok(()) };
                    process.tasks.read_ended(id, result, now);
                }
            }
            92..99 => {
                self.now = now + Duration::from_millis(self.rng.usize(..10) as u64);
                let now = self.now;
                self.both.iter_mut().for_each(|process| process.tasks.expire(now));
            }
            _ => self.lose(),
        }
        self.act(0);
        self.act(1);
    }

    /// The connection ends, with what is on its way; the next one has another number.
    fn lose(&mut self) {
        let lost = self.conn;
        for process in &mut self.both {
            process.inbox.clear();
            process.tasks.lost(lost, "reset");
        }
        self.conn = Conn(lost.0 + 1);
    }

    /// Ends what is open, and checks that nothing is left.
    fn end(mut self, seen: &mut HashSet<Code>) {
        let now = self.now;
        for who in [0, 1] {
            for id in std::mem::take(&mut self.both[who].connecting) {
                self.both[who].tasks.opened(id, Err("refused".to_owned()), now);
            }
            self.act(who);
        }
        while self.both.iter().any(|process| {
            !process.inbox.is_empty()
                || !process.reading.is_empty()
                || process.tasks.next_timeout().is_some()
        }) {
            self.now = self.now + Duration::from_millis(1);
            let now = self.now;
            for who in [0, 1] {
                if let Some(bytes) = self.both[who].inbox.pop_front() {
                    let taken =
                        self.both[who].tasks.received(self.conn, super::here(), &bytes, now);
                    taken.expect("the output of the other side");
                }
                self.act(who);
                if let Some(id) = self.both[who].reading.pop() {
                    self.both[who].tasks.read_ended(id, Ok(()), now);
                }
                self.both[who].tasks.expire(now);
                self.act(0);
                self.act(1);
            }
        }
        for process in &mut self.both {
            let ids: Vec<_> = process.recvs.keys().copied().collect();
            assert!(ids.into_iter().all(|id| process.tasks.forget(id)), "a task did not end");
            process.tasks.expire(self.now + Duration::from_secs(1));
            assert_eq!(process.tasks.gauges(), Gauges::default());
            assert!((1..=self.conn.0).all(|conn| !process.tasks.is_used(Conn(conn))));
            assert!(process.sends.values().all(Option::is_some), "a send did not end");
        }
        assert_eq!(self.late, 0, "a task ended while its memory was written");
        for process in &self.both {
            let ends = process.sends.values().chain(process.recvs.values());
            seen.extend(ends.flatten().map(|outcome| outcome.code));
        }
        // Each task that ended well read a send that ended well, and no other task did.
        for (ours, theirs) in [(&self.both[0], &self.both[1]), (&self.both[1], &self.both[0])] {
            let ended_well = |end: &Option<Outcome>| {
                end.as_ref().is_some_and(|outcome| outcome.code == Code::Done)
            };
            let done = ours.recvs.iter().filter(|(_, end)| ended_well(end));
            let read: Vec<_> = done.map(|(id, _)| ours.sources[id]).collect();
            let sends: HashSet<_> =
                read.iter().map(|number| theirs.numbers[*number as usize]).collect();
            assert_eq!(sends.len(), read.len(), "two tasks have the bytes of one send");
            assert!(
                sends.iter().all(|id| ended_well(&theirs.sends[id])),
                "a send ended differently"
            );
        }
    }
}

#[test]
fn random_histories_end_every_task_once_when_its_memory_is_quiet_and_leave_nothing() {
    let mut seen = HashSet::new();
    for seed in 0..2000 {
        let mut world = World::new(seed);
        for _ in 0..400 {
            world.step();
        }
        world.end(&mut seen);
    }
    use Code::{Cancelled, Done, Duplicate, Mismatch, PeerLost, ReadFailed, Timeout, Unreachable};
    let all = [Cancelled, Done, Duplicate, Mismatch, PeerLost, ReadFailed, Timeout, Unreachable];
    assert_eq!(seen, HashSet::from(all));
}
