//! Both ends of a lane, their memories and the network between them, in virtual time.
//!
//! A test gives the initiator requests, sets the faults, and runs until nothing happens any more.
//! Everything that must hold of any run is checked on the way and in [`LanePair::check`].

use crate::pair::guards;
use kvferry_proto::frame::Notification;
use kvferry_proto::lane::{Begin, Initiator, Next, Outcome, Placed, Receive, Target, Transmit};
use kvferry_proto::{
    Limits, Op, PieceDigest, RegionId, RequestHeader, Timestamp, TransferId, WireCode,
    WireDescriptor,
};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

pub const REQUESTS: usize = 0;
pub const ANSWERS: usize = 1;

const TRANSFER: TransferId = TransferId(0x7a);
const REGION: RegionId = RegionId(3);

/// A request of the initiator.
#[derive(Clone, Debug)]
pub struct Order {
    pub op: Op,
    /// Offset of the bytes in the initiator's memory.
    pub near: usize,
    /// Ranges of the target's memory; those beyond its end are refused.
    pub far: Vec<Range<usize>>,
    pub note: Option<Vec<u8>>,
}

impl Order {
    fn payload_len(&self) -> usize {
        self.far.iter().map(Range::len).sum()
    }

    fn head(&self) -> Vec<u8> {
        let mut head = vec![0; RequestHeader::LEN];
        for range in &self.far {
            let (offset, len) = (range.start as u64, range.len() as u32);
            WireDescriptor { offset, len, region: REGION }.write_to(&mut head);
        }
        if let Some(message) = &self.note {
            let note = Notification { name: "near".to_owned(), message: message.clone() };
            note.write_to(&mut head, &Limits::default()).unwrap();
        }
        head
    }
}

/// Outcome of a request for the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Done,
    /// The target refused: code, and index of the descriptor.
    Refused(WireCode, u32),
    Damaged,
    Lost,
}

/// One direction of the network: bytes, each with the time at which it arrives.
#[derive(Debug, Default)]
pub struct Wire {
    bytes: VecDeque<(Timestamp, u8)>,
    pub sent: u64,
    /// No more bytes than that are on their way; then the sender waits.
    pub window: usize,
    /// Bytes from this offset of the stream on arrive a millisecond after those before it.
    pub splits: BTreeSet<u64>,
    /// Bits that are flipped in the byte at this offset of the stream.
    pub flip: Option<(u64, u8)>,
    /// The connection is reset when so many bytes were sent.
    pub reset_at: Option<u64>,
    /// The sender has ended its direction; what it sent arrives.
    ended: bool,
}

impl Wire {
    fn new() -> Self {
        Self { window: usize::MAX, ..Self::default() }
    }

    fn room(&self) -> usize {
        let until_reset = self.reset_at.map_or(u64::MAX, |at| at - self.sent);
        let room = self.window.saturating_sub(self.bytes.len());
        room.min(usize::try_from(until_reset).unwrap_or(usize::MAX))
    }

    fn push(&mut self, bytes: impl IntoIterator<Item = u8>, now: Timestamp) {
        for mut byte in bytes {
            if let Some((at, bits)) = self.flip
                && at == self.sent
            {
                byte ^= bits;
            }
            let splits = self.splits.range(..=self.sent).count() as u64;
            self.bytes.push_back((now + Duration::from_millis(1 + splits), byte));
            self.sent += 1;
        }
    }

    fn arrived(&self, now: Timestamp) -> usize {
        self.bytes.iter().take_while(|(at, _)| *at <= now).count()
    }

    fn pop(&mut self, n: usize) -> impl Iterator<Item = u8> {
        self.bytes.drain(..n).map(|(_, byte)| byte)
    }
}

/// The memory of the request that an end is moving payload for.
#[derive(Debug, Default)]
struct Moving {
    /// Payload bytes moved.
    at: usize,
    /// Bytes that were received and are copied into memory by the time of `ready`.
    staged: Vec<u8>,
    /// The memory has to be waited for until then.
    ready: Timestamp,
}

#[derive(Debug)]
pub struct LanePair {
    pub now: Timestamp,
    /// Requests, by their number.
    pub orders: Vec<Order>,
    pub ended: Vec<(usize, Ended)>,
    /// Notifications that the target's user got.
    pub delivered: Vec<Vec<u8>>,
    pub wires: [Wire; 2],
    /// The memory of either side takes so long to give or to take a piece. Zero for host memory.
    pub memory_delay: Duration,
    /// Payload bytes that either side moves in one call at most.
    pub chunk: usize,
    /// The target's memory fails when so many payload bytes of that request were moved.
    pub fails: Option<(usize, usize)>,
    /// The target's user takes no notification.
    pub busy: bool,
    pub outstanding_max: usize,
    near: Vec<u8>,
    far: Vec<u8>,
    initiator: Initiator<usize>,
    target: Target,
    checksum: bool,
    keyed: bool,
    begun: usize,
    decided: usize,
    source: Moving,
    sink: Moving,
    server: Moving,
    broken: bool,
}

fn near_byte(at: usize) -> u8 {
    (at.wrapping_mul(0x9e37_79b1) >> 11) as u8
}

fn far_byte(at: usize) -> u8 {
    !near_byte(at.wrapping_mul(3) + 1)
}

impl LanePair {
    /// Two ends with so many bytes of memory each, and the first bytes of the stream if they came
    /// with its opening.
    pub fn new(memory: usize, checksum: bool, orders: Vec<Order>) -> Self {
        Self::with_guard(memory, checksum, false, orders)
    }

    /// The same; with `keyed`, in a session with a secret.
    pub fn with_guard(memory: usize, checksum: bool, keyed: bool, orders: Vec<Order>) -> Self {
        let [near_guard, far_guard] = guards(keyed);
        Self {
            now: Timestamp::from_nanos(0) + Duration::from_secs(1000),
            orders,
            ended: Vec::new(),
            delivered: Vec::new(),
            wires: [Wire::new(), Wire::new()],
            memory_delay: Duration::ZERO,
            chunk: usize::MAX,
            fails: None,
            busy: false,
            outstanding_max: 0,
            near: (0..memory).map(near_byte).collect(),
            far: (0..memory).map(far_byte).collect(),
            initiator: Initiator::new(TRANSFER, checksum, Limits::default(), near_guard),
            target: Target::new(Limits::default(), checksum, far_guard, Vec::new()),
            checksum,
            keyed,
            begun: 0,
            decided: 0,
            source: Moving::default(),
            sink: Moving::default(),
            server: Moving::default(),
            broken: false,
        }
    }

    /// Moves the bytes that are on their way to the target into its opening.
    pub fn open_with_early_bytes(&mut self, n: usize) {
        while self.pump_initiator() {}
        let n = n.min(self.wires[REQUESTS].bytes.len());
        let early = self.wires[REQUESTS].pop(n).collect();
        let [_, guard] = guards(self.keyed);
        self.target = Target::new(Limits::default(), self.checksum, guard, early);
    }

    pub fn run(&mut self) {
        while self.step() {}
    }

    /// Does what can be done now, then goes to the next time at which something happens; whether
    /// there is one.
    pub fn step(&mut self) -> bool {
        let mut goes_on = true;
        while goes_on && !self.broken {
            goes_on = self.pump_initiator() | self.pump_target();
            self.notice_end();
        }
        if self.broken {
            return false;
        }
        let arrivals = self.wires.iter().filter_map(|wire| wire.bytes.front()).map(|(at, _)| *at);
        let ready = [&self.source, &self.sink, &self.server].map(|memory| memory.ready);
        let next = arrivals.chain(ready).filter(|at| *at > self.now).min();
        next.inspect(|next| self.now = *next).is_some()
    }

    /// The connection is reset: what is on its way is lost, and both ends stop.
    pub fn reset(&mut self) {
        self.broken = true;
        self.wires.iter_mut().for_each(|wire| wire.bytes.clear());
        // A request that has not begun to leave has not begun.
        for request in self.ended.len()..self.begun {
            self.ended.push((request, Ended::Lost));
        }
    }

    pub fn is_between(&self) -> bool {
        self.initiator.is_between() && self.target.is_between()
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Has the memory of the request that the target serves fail when so many more of its payload
    /// bytes were moved.
    pub fn fail_memory(&mut self, after: usize) {
        self.fails = Some((self.decided.saturating_sub(1), self.server.at + after));
    }

    /// Names the target's current step, for tables of what a run has tried.
    pub fn doing(&mut self) -> &'static str {
        if self.broken {
            return "broken";
        }
        if self.target.is_between() {
            return "between";
        }
        match self.target.poll() {
            Ok(Next::Receive(_) | Next::Grow { .. }) => "head or trailer",
            Ok(Next::Payload { .. }) => "payload",
            Ok(Next::Discard(_)) => "discard",
            Ok(Next::Flush) => "flush",
            Ok(Next::Transmit(_)) => "answer",
            Ok(Next::Decide(_) | Next::Nothing) | Err(_) => "broken",
        }
    }

    // ---- the network ----

    fn notice_end(&mut self) {
        let reset = self.wires.iter().any(|wire| wire.reset_at == Some(wire.sent));
        // An end notices that the other has ended when it has taken everything.
        let ended = self.wires.iter().any(|wire| wire.ended && wire.bytes.is_empty());
        if reset || ended {
            self.reset();
        }
    }

    // ---- the initiator ----

    fn pump_initiator(&mut self) -> bool {
        if self.broken {
            return false;
        }
        let mut progress = false;
        if self.initiator.can_begin() && self.begun < self.orders.len() {
            self.begin();
            progress = true;
        }
        self.outstanding_max = self.outstanding_max.max(self.initiator.outstanding());
        progress | self.pump_requests() | self.pump_answers()
    }

    fn begin(&mut self) {
        let order = &self.orders[self.begun];
        let descriptors = order.far.len() as u32;
        let begin = Begin {
            op: order.op,
            descriptors,
            payload_len: order.payload_len() as u64,
            budget_ms: 1000,
        };
        self.initiator.begin(begin, order.head(), self.begun);
        self.source = Moving { ready: self.now + self.memory_delay, ..Moving::default() };
        self.begun += 1;
    }

    fn pump_requests(&mut self) -> bool {
        let (now, wire) = (self.now, &mut self.wires[REQUESTS]);
        let near = self.begun.checked_sub(1).map_or(0, |request| self.orders[request].near);
        let Some(transmit) = self.initiator.transmit() else { return false };
        let memory = |at: usize| self.near[near + at];
        let n = send(transmit, wire, &mut self.source, self.chunk, self.memory_delay, now, memory);
        self.initiator.sent(n);
        n > 0
    }

    fn pump_answers(&mut self) -> bool {
        let request = self.initiator.answering();
        let wire = &mut self.wires[ANSWERS];
        let arrived = wire.arrived(self.now);
        let n = match self.initiator.receive() {
            Receive::Nothing => return false,
            Receive::Bytes { into, payload } => {
                let of_head = arrived.min(into.len());
                into[..of_head].iter_mut().zip(wire.pop(of_head)).for_each(|(to, byte)| *to = byte);
                // Host memory takes payload in the same call.
                let may = if self.memory_delay.is_zero() && of_head == into.len() {
                    (arrived - of_head).min(self.chunk).min(payload as usize)
                } else {
                    0
                };
                self.sink.staged.extend(wire.pop(may));
                self.sink.at += may;
                of_head + may
            }
            Receive::Payload { left, digest } => {
                if self.sink.ready > self.now {
                    return false;
                }
                let n = arrived.min(self.chunk).min(left as usize);
                let bytes: Vec<u8> = wire.pop(n).collect();
                digest.into_iter().for_each(|digest| digest.update(&bytes));
                self.sink.staged.extend(bytes);
                self.sink.at += n;
                self.sink.ready = self.now + self.memory_delay;
                n
            }
            Receive::Flush => {
                if self.sink.ready > self.now {
                    return false;
                }
                let outcome = self.initiator.placed();
                self.take_answered(request.unwrap());
                self.outcome(outcome);
                return true;
            }
        };
        match self.initiator.received(n) {
            Ok(Some(outcome)) => {
                assert_eq!(self.sink.at, 0, "payload of an answer that has none");
                self.outcome(outcome);
            }
            Ok(None) => {}
            Err(_) => self.reset(),
        }
        n > 0
    }

    /// Puts what was received into the initiator's memory.
    fn take_answered(&mut self, request: usize) {
        let order = &self.orders[request];
        let sink = std::mem::take(&mut self.sink);
        assert_eq!((order.op, sink.staged.len()), (Op::Read, order.payload_len()));
        self.near[order.near..][..sink.staged.len()].copy_from_slice(&sink.staged);
    }

    fn outcome(&mut self, outcome: Outcome<usize>) {
        let (request, ended) = match outcome {
            Outcome::Done(request) => (request, Ended::Done),
            Outcome::Refused { request, code, index } => (request, Ended::Refused(code, index)),
            Outcome::Damaged { request, .. } => (request, Ended::Damaged),
        };
        assert_eq!(request, self.ended.len(), "requests end in their order, each once");
        self.ended.push((request, ended));
    }

    // ---- the target ----

    fn pump_target(&mut self) -> bool {
        if self.broken {
            return false;
        }
        let (now, chunk, delay) = (self.now, self.chunk, self.memory_delay);
        let serving = self.decided.saturating_sub(1);
        let fails = self.fails.filter(|(of, _)| *of == serving && self.decided > 0);
        let until_failure = fails.map_or(usize::MAX, |(_, at)| at.saturating_sub(self.server.at));
        let fails = until_failure == 0;
        let [requests, answers] = &mut self.wires;
        let arrived = requests.arrived(now);
        match self.target.poll() {
            Err(malformed) => {
                let answer = malformed.answer.as_ref();
                let room = answers.room().min(answer.len());
                answers.push(answer[..room].iter().copied(), now);
                answers.ended = true;
            }
            Ok(Next::Nothing) => return false,
            Ok(Next::Receive(into)) => {
                let n = arrived.min(into.len());
                into[..n].iter_mut().zip(requests.pop(n)).for_each(|(to, byte)| *to = byte);
                self.target.received(n);
                return n > 0;
            }
            Ok(Next::Grow { have, .. }) => self.target.grow(2 * have),
            Ok(Next::Decide(request)) => {
                let (entries, rest) = request.table.as_chunks();
                assert!(rest.is_empty());
                let memory = 0..self.far.len() as u64;
                let bad = entries.iter().map(WireDescriptor::read).position(|descriptor| {
                    let end = descriptor.offset.saturating_add(descriptor.len.into());
                    descriptor.region != REGION || descriptor.len == 0 || end > memory.end
                });
                self.server = Moving { ready: now + delay, ..Moving::default() };
                self.decided += 1;
                match bad {
                    Some(index) => self.target.refuse(WireCode::OutOfBounds, index as u32),
                    None => self.target.accept(),
                }
            }
            Ok(Next::Payload { .. } | Next::Flush) if fails => {
                self.fails = None;
                self.server.staged.clear();
                self.target.fail(WireCode::Revoked, 1);
            }
            Ok(Next::Transmit(transmit)) if fails && transmit.payload > 0 => {
                self.fails = None;
                // The reason goes over the control connection, then the stream is closed.
                self.target.abandon();
                answers.ended = true;
            }
            Ok(Next::Payload { early, left, digest }) => {
                if self.server.ready > now {
                    return false;
                }
                let most = chunk.min(left as usize).min(until_failure);
                let n = if early.is_empty() { arrived.min(most) } else { early.len().min(most) };
                let bytes: Vec<u8> = match early {
                    [] => requests.pop(n).collect(),
                    early => early[..n].to_vec(),
                };
                digest.into_iter().for_each(|digest| digest.update(&bytes));
                self.server.staged.extend(bytes);
                self.server.at += n;
                self.server.ready = now + delay;
                self.target.received(n);
                return n > 0;
            }
            Ok(Next::Discard(left)) => {
                let n = arrived.min(left as usize).min(chunk);
                drop(requests.pop(n));
                self.target.received(n);
                return n > 0;
            }
            Ok(Next::Flush) => {
                if self.server.ready > now {
                    return false;
                }
                if let Placed::Written { notification, bytes } = self.target.placed() {
                    self.take_written(serving, bytes, notification);
                    self.target.answer(if self.busy { WireCode::Busy } else { WireCode::Ok });
                }
            }
            Ok(Next::Transmit(transmit)) => {
                let far: Vec<usize> = self.orders[serving].far.iter().cloned().flatten().collect();
                let memory = |at: usize| self.far[far[at]];
                let server = &mut self.server;
                let n =
                    send(transmit, answers, server, chunk.min(until_failure), delay, now, memory);
                self.target.sent(n);
                return n > 0;
            }
        }
        true
    }

    /// Puts what was received into the target's memory, then delivers the notification.
    fn take_written(&mut self, request: usize, bytes: u64, notification: Option<Notification>) {
        let order = &self.orders[request];
        let staged = std::mem::take(&mut self.server.staged);
        let expects = if order.op == Op::Write { order.payload_len() } else { 0 };
        assert_eq!((staged.len(), bytes), (expects, order.payload_len() as u64));
        for (at, byte) in order.far.iter().cloned().flatten().zip(staged) {
            self.far[at] = byte;
        }
        if let Some(notification) = notification {
            assert_eq!(Some(&notification.message), order.note.as_ref());
            if !self.busy {
                self.delivered.push(notification.message);
            }
        }
    }

    // ---- what must hold ----

    /// Checks what must hold after any run. The ranges of all orders are disjoint.
    pub fn check(&self) {
        // A flipped bit in a head breaks the lane; in payload, only checksums notice it.
        let damaged = self.wires.iter().any(|wire| wire.flip.is_some_and(|(at, _)| at < wire.sent));
        let bytes_hold = self.checksum || !damaged;
        let mut near: Vec<u8> = (0..self.near.len()).map(near_byte).collect();
        let mut far: Vec<u8> = (0..self.far.len()).map(far_byte).collect();
        let mut may_differ = [BTreeSet::new(), BTreeSet::new()];
        let mut owed = Vec::new();
        let mut may = BTreeSet::new();
        for (request, ended) in &self.ended {
            let order = &self.orders[*request];
            let near_range = order.near..order.near + order.payload_len();
            let places = near_range.clone().zip(order.far.iter().cloned().flatten());
            match (order.op, ended) {
                (Op::Write, Ended::Done) if bytes_hold => {
                    places.for_each(|(from, to)| far[to] = near_byte(from));
                }
                (Op::Read, Ended::Done) if bytes_hold => {
                    places.for_each(|(to, from)| near[to] = far_byte(from));
                }
                (_, Ended::Refused(WireCode::OutOfBounds, _)) | (Op::Notify, _) => {}
                (Op::Write, _) => may_differ[1].extend(places.map(|(_, to)| to)),
                (Op::Read, _) => may_differ[0].extend(near_range),
            }
            match (&order.note, ended) {
                (Some(note), Ended::Done) => owed.push(note.clone()),
                (Some(note), Ended::Lost) => drop(may.insert(note.clone())),
                _ => {}
            }
        }
        let same = |what: &str, is: &[u8], should: &[u8], may: &BTreeSet<usize>| {
            let wrong = (0..is.len()).find(|at| is[*at] != should[*at] && !may.contains(at));
            assert_eq!(wrong, None, "the {what} memory differs");
        };
        same("near", &self.near, &near, &may_differ[0]);
        same("far", &self.far, &far, &may_differ[1]);
        let sure: Vec<_> = self.delivered.iter().filter(|note| !may.contains(*note)).collect();
        assert_eq!(sure, owed.iter().collect::<Vec<_>>(), "notifications, each once and in order");
        let once: BTreeSet<_> = self.delivered.iter().collect();
        assert_eq!(once.len(), self.delivered.len(), "a notification is delivered once");
        if self.busy {
            assert!(self.delivered.is_empty());
        }
    }
}

/// Sends one call's worth of what an end offers; how many bytes that is.
fn send(
    transmit: Transmit<'_>,
    wire: &mut Wire,
    memory: &mut Moving,
    chunk: usize,
    delay: Duration,
    now: Timestamp,
    byte: impl Fn(usize) -> u8,
) -> usize {
    let Transmit { bytes, payload, digest } = transmit;
    let of_bytes = wire.room().min(bytes.len());
    wire.push(bytes[..of_bytes].iter().copied(), now);
    if of_bytes < bytes.len() || memory.ready > now {
        return of_bytes;
    }
    let n = wire.room().min(chunk).min(payload as usize);
    let payload: Vec<u8> = (memory.at..memory.at + n).map(byte).collect();
    if let Some(digest) = digest {
        PieceDigest::update(digest, &payload);
    }
    wire.push(payload, now);
    memory.at += n;
    if n > 0 {
        memory.ready = now + delay;
    }
    of_bytes + n
}
