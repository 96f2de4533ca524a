//! Both ends of a session and the network between them, in virtual time.

use kvferry_proto::message::{Decoder, Message};
use kvferry_proto::session::{EVENTS_MAX, OUTBOX_MAX, REQUESTS_MAX};
use kvferry_proto::{
    CONTROL_MAX, CloseReason, Guard, Incarnation, PeerInfo, Secret, Session, SessionConfig,
    SessionEvent, SessionId, Sniff, Sniffer, StreamId, Timestamp, WireCode,
};
use std::collections::VecDeque;
use std::time::Duration;

/// The initiator.
pub const A: usize = 0;
/// The acceptor.
pub const B: usize = 1;

/// The session's id at the acceptor.
pub const SESSION: SessionId = SessionId(77);
pub const INCARNATION: [Incarnation; 2] = [Incarnation(0xa), Incarnation(0xb)];

pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn config(side: usize) -> SessionConfig {
    SessionConfig::new(INCARNATION[side], ["alice", "bob"][side])
}

pub fn with_secret(side: usize, secret: &str) -> SessionConfig {
    SessionConfig { secret: Secret::new(secret), ..config(side) }
}

/// The guards of the first stream of a session, for the initiator and the acceptor. The same keys each
/// time.
pub fn guards(keyed: bool) -> [Guard; 2] {
    let config = |side| if keyed { with_secret(side, "a secret of a test") } else { config(side) };
    let mut pair = Pair::new(config(A), config(B));
    pair.establish();
    [A, B].map(|side| pair.session(side).stream_guard(StreamId(1)).expect("established"))
}

#[derive(Debug)]
enum Item {
    Bytes(Vec<u8>),
    End,
}

/// A direction of the network.
#[derive(Debug, Default)]
struct Link {
    latency: Duration,
    /// Holds everything, in order, as a full socket buffer or a lost route does.
    stalled: bool,
    /// Takes nothing more: its sender has closed it, or the connection was reset.
    ended: bool,
    items: VecDeque<(Timestamp, Item)>,
    /// Everything ever sent, with the time it was sent at.
    log: Vec<(Timestamp, Vec<u8>)>,
}

impl Link {
    fn new() -> Self {
        Self { latency: ms(1), ..Self::default() }
    }

    fn push(&mut self, item: Item, now: Timestamp) {
        if self.ended {
            return;
        }
        self.ended = matches!(item, Item::End);
        // In order, even if the latency was just lowered.
        let at = self.items.back().map_or(now, |(at, _)| *at).max(now + self.latency);
        self.items.push_back((at, item));
    }
}

/// An end and its events so far.
#[derive(Debug)]
pub struct End {
    pub session: Session,
    pub events: Vec<SessionEvent>,
    sniffer: Option<Sniffer>,
    asleep_until: Option<Timestamp>,
    dead: bool,
}

impl End {
    fn runs(&self) -> bool {
        !self.dead && self.asleep_until.is_none()
    }

    fn is_told_closed(&self) -> bool {
        matches!(self.events.last(), Some(SessionEvent::Closed(_)))
    }
}

/// Two sessions, two links, one clock.
#[derive(Debug)]
pub struct Pair {
    pub now: Timestamp,
    pub ends: [End; 2],
    links: [Link; 2],
    /// Bytes come out of the socket in pieces of at most this.
    pub chunk: usize,
}

impl Pair {
    pub fn new(a: SessionConfig, b: SessionConfig) -> Self {
        Self::expecting(None, a, b)
    }

    /// The same, with an initiator that expects one incarnation of the acceptor.
    pub fn expecting(expected: Option<Incarnation>, a: SessionConfig, b: SessionConfig) -> Self {
        let now = Timestamp::from_nanos(0) + Duration::from_secs(1000);
        let end = |session, sniffer| End {
            session,
            events: Vec::new(),
            sniffer,
            asleep_until: None,
            dead: false,
        };
        Self {
            now,
            ends: [
                end(Session::initiator(a, expected, [1; 32], now), None),
                end(Session::acceptor(b, SESSION, [2; 32], now), Some(Sniffer::new())),
            ],
            links: [Link::new(), Link::new()],
            chunk: usize::MAX,
        }
    }

    /// Established, with nothing under way and the events of that taken.
    pub fn established() -> Self {
        let mut pair = Self::new(config(A), config(B));
        pair.establish();
        pair
    }

    pub fn establish(&mut self) {
        self.run_for(ms(100));
        for side in [A, B] {
            let events = self.take_events(side);
            assert!(
                matches!(events.as_slice(), [SessionEvent::Established(_)]),
                "not established: {events:?}"
            );
        }
    }

    pub fn session(&mut self, side: usize) -> &mut Session {
        &mut self.ends[side].session
    }

    /// The events of that side since the last call.
    pub fn take_events(&mut self, side: usize) -> Vec<SessionEvent> {
        assert!(!self.ends[side].is_told_closed(), "would lose the last event");
        std::mem::take(&mut self.ends[side].events)
    }

    pub fn established_peer(&self, side: usize) -> Option<&PeerInfo> {
        self.ends[side].events.iter().find_map(|event| match event {
            SessionEvent::Established(peer) => Some(peer),
            _ => None,
        })
    }

    /// Reason for the end of that side's session, if it has ended.
    pub fn closed(&self, side: usize) -> Option<&CloseReason> {
        match self.ends[side].events.last() {
            Some(SessionEvent::Closed(reason)) => Some(reason),
            _ => None,
        }
    }

    /// Code and `by_peer` of the end's `Closed`.
    #[track_caller]
    pub fn ended(&self, side: usize) -> (WireCode, bool) {
        let reason = self.closed(side).unwrap_or_else(|| panic!("side {side} has not ended"));
        (reason.code, reason.by_peer)
    }

    // Faults.

    pub fn latency(&mut self, from: usize, latency: Duration) {
        self.links[from].latency = latency;
    }

    /// Bytes from that side are held, not lost.
    pub fn stall(&mut self, from: usize, stalled: bool) {
        self.links[from].stalled = stalled;
    }

    /// Holds bytes in both directions. As with TCP they arrive after the partition heals.
    pub fn partition(&mut self, partitioned: bool) {
        self.stall(A, partitioned);
        self.stall(B, partitioned);
    }

    /// Resets the connection: bytes under way are lost, and both ends notice at once.
    pub fn cut(&mut self) {
        for link in &mut self.links {
            link.items.clear();
            if !link.ended {
                link.items.push_back((self.now, Item::End));
                link.ended = true;
            }
        }
    }

    /// Kills the process of that side: its kernel closes the connection.
    pub fn kill(&mut self, side: usize) {
        self.ends[side].dead = true;
        let now = self.now;
        self.links[side].push(Item::End, now);
    }

    /// Suspends the machine of that side.
    pub fn sleep(&mut self, side: usize, duration: Duration) {
        self.ends[side].asleep_until = Some(self.now + duration);
    }

    /// Whether that side is neither killed nor suspended.
    pub fn runs(&self, side: usize) -> bool {
        self.ends[side].runs()
    }

    /// Puts bytes on the wire as if that side had sent them.
    pub fn inject(&mut self, from: usize, bytes: &[u8]) {
        let now = self.now;
        self.links[from].push(Item::Bytes(bytes.to_vec()), now);
    }

    /// Changes the frames that that side has sent and the other has not received, in order. Their
    /// arrival times stay; an added frame arrives with the last one.
    pub fn in_flight<T>(&mut self, from: usize, change: impl FnOnce(&mut Vec<Vec<u8>>) -> T) -> T {
        let link = &mut self.links[from];
        let mut times = Vec::new();
        let mut frames = Vec::new();
        let mut end = None;
        for (at, item) in link.items.drain(..) {
            match item {
                Item::Bytes(bytes) => {
                    times.push(at);
                    frames.push(bytes);
                }
                Item::End => end = Some((at, Item::End)),
            }
        }
        let result = change(&mut frames);
        let last = times.last().copied().unwrap_or_default();
        for (index, frame) in frames.into_iter().enumerate() {
            let at = times.get(index).copied().unwrap_or(last);
            link.items.push_back((at, Item::Bytes(frame)));
        }
        link.items.extend(end);
        result
    }

    // Time.

    pub fn run_for(&mut self, duration: Duration) {
        self.run_until(self.now + duration);
    }

    pub fn run_until(&mut self, until: Timestamp) {
        while self.step(until) {}
        self.now = until;
    }

    /// Runs until no event is due any more, or for an hour.
    pub fn run_until_idle(&mut self) {
        let until = self.now + Duration::from_secs(3600);
        while self.step(until) {}
    }

    /// Advances to the next event until `until`. Returns whether there was one.
    pub fn step(&mut self, until: Timestamp) -> bool {
        self.pump();
        let Some(next) = self.next_wakeup().filter(|next| *next <= until) else {
            return false;
        };
        self.now = self.now.max(next);
        for side in [A, B] {
            let end = &mut self.ends[side];
            end.asleep_until = end.asleep_until.filter(|until| *until > self.now);
            self.deliver(side);
            self.fire(side);
        }
        self.pump();
        true
    }

    /// Polls the sessions that run for frames and events.
    pub fn pump(&mut self) {
        for (end, link) in self.ends.iter_mut().zip(&mut self.links) {
            if !end.runs() {
                continue;
            }
            let (mut frames, mut events) = (0, 0);
            while let Some(bytes) = end.session.poll_transmit() {
                frames += 1;
                link.log.push((self.now, bytes.clone()));
                link.push(Item::Bytes(bytes), self.now);
            }
            while let Some(event) = end.session.poll_event() {
                events += 1;
                assert!(!end.is_told_closed(), "{event:?} after the end");
                end.events.push(event);
            }
            assert!(frames <= OUTBOX_MAX + 4 && events <= EVENTS_MAX + REQUESTS_MAX + 1);
            if end.is_told_closed() {
                assert!(end.session.is_closed());
                assert_eq!(end.session.next_timeout(), None, "the end wants nothing more");
                link.push(Item::End, self.now);
            }
        }
    }

    fn next_wakeup(&self) -> Option<Timestamp> {
        let mut wakeups = Vec::new();
        for side in [A, B] {
            let (end, inbound) = (&self.ends[side], &self.links[1 - side]);
            if end.dead {
                continue;
            }
            if let Some(until) = end.asleep_until {
                wakeups.push(until);
                continue;
            }
            wakeups.extend(end.session.next_timeout());
            if !inbound.stalled {
                wakeups.extend(inbound.items.front().map(|(at, _)| *at));
            }
        }
        wakeups.into_iter().min()
    }

    fn deliver(&mut self, side: usize) {
        let (end, inbound) = (&mut self.ends[side], &mut self.links[1 - side]);
        while end.runs() && !inbound.stalled {
            if inbound.items.front().is_none_or(|(at, _)| *at > self.now) {
                return;
            }
            let Some((_, item)) = inbound.items.pop_front() else { return };
            match item {
                Item::Bytes(bytes) => {
                    for piece in bytes.chunks(self.chunk) {
                        let mut piece = piece;
                        if let Some(sniffer) = &mut end.sniffer {
                            let (magic, rest) = piece.split_at(piece.len().min(sniffer.wanted()));
                            match sniffer.feed(magic) {
                                Sniff::NeedMore => continue,
                                Sniff::Native => {}
                                // Another protocol: a listener drops the connection.
                                _ => end.session.transport_closed(self.now),
                            }
                            end.sniffer = None;
                            piece = rest;
                        }
                        end.session.receive(piece, self.now);
                    }
                }
                Item::End => end.session.transport_closed(self.now),
            }
        }
    }

    fn fire(&mut self, side: usize) {
        let end = &mut self.ends[side];
        if end.runs() && end.session.next_timeout().is_some_and(|at| at <= self.now) {
            end.session.handle_timeout(self.now);
            assert!(
                end.session.next_timeout().is_none_or(|at| at > self.now),
                "a timer that was handled does not stay due"
            );
        }
    }

    // What crossed the wire.

    /// Every message that side has sent, and when.
    pub fn sent(&self, side: usize) -> Vec<(Timestamp, Message)> {
        let mut messages = Vec::new();
        for (index, (at, bytes)) in self.links[side].log.iter().enumerate() {
            let magic = if side == A && index == 0 { 8 } else { 0 };
            // A frame may have a tag behind it.
            let message = Decoder::new(CONTROL_MAX).read(&mut &bytes[magic..]);
            messages.push((*at, message.expect("sessions speak properly").expect("whole frames")));
        }
        messages
    }

    pub fn frames_sent(&self, side: usize) -> usize {
        self.links[side].log.len()
    }

    pub fn pings_sent(&self, side: usize) -> Vec<Timestamp> {
        self.sent(side)
            .into_iter()
            .filter_map(|(at, message)| matches!(message, Message::Ping(_)).then_some(at))
            .collect()
    }
}
