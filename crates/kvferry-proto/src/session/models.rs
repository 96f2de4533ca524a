//! The session's private parts, compared with simple oracles.

use super::SessionEvent;
use super::heartbeat::Heartbeat;
use super::queues::{
    EVENT_BYTES_MAX, EVENTS_MAX, Full, Inbox, OUTBOX_BYTES_MAX, OUTBOX_MAX, Outbox, WAITING_MAX,
};
use super::streams::StreamWindow;
use crate::fuzzing::{Met, Script};
use crate::id::StreamId;
use crate::message::{CONTROL_MAX, Decoder, Message, Ping, Pong};
use crate::time::Timestamp;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// A length that is short most of the time, and now and then fills a queue at once.
fn length(script: &mut Script<'_>) -> usize {
    match script.below(8) {
        0 => 0,
        1 => 512 * 1024,
        2 => CONTROL_MAX,
        _ => usize::from(script.byte()),
    }
}

/// Number of times that an operation is done in a row, so that the longest queues are reached.
fn times(script: &mut Script<'_>) -> usize {
    match script.byte() {
        0..2 => 5000,
        2..6 => 700,
        _ => 1,
    }
}

fn fullness(len: usize, max: usize, is_long: bool) -> &'static str {
    match (len, is_long) {
        (0, _) => "empty",
        (len, _) if len >= max => "full",
        (_, true) => "long",
        (_, false) => "some",
    }
}

/// A frame of the model: its number, which it begins with, and its length.
type Numbered = (u64, usize);

/// The bytes that the frames of the queue must come out as.
#[derive(Debug, Default)]
struct OutboxOracle {
    frames: VecDeque<Numbered>,
    bytes: usize,
    pinned: usize,
    ping: Option<u64>,
    pong: Option<u64>,
    waiting: VecDeque<Numbered>,
}

impl OutboxOracle {
    fn fits(&self, (_, len): Numbered) -> bool {
        let frames = self.frames.len() + self.waiting.len();
        frames < OUTBOX_MAX && self.bytes + len <= OUTBOX_BYTES_MAX
    }

    fn push(&mut self, frame: Numbered) {
        self.bytes += frame.1;
        self.frames.push_back(frame);
    }

    /// Removes the first frame. Waiting frames then follow it.
    fn pop(&mut self) -> Option<Result<Numbered, Message>> {
        let popped = self.pop_next();
        if popped.is_some() {
            self.release();
        }
        popped
    }

    fn release(&mut self) {
        self.frames.append(&mut self.waiting);
    }

    fn pop_next(&mut self) -> Option<Result<Numbered, Message>> {
        if self.pinned == 0 {
            let pong = self.pong.take().map(|seq| Message::Pong(Pong { seq }));
            let beat = pong.or_else(|| {
                self.ping
                    .take()
                    .map(|seq| Message::Ping(Ping { seq, active: seq.is_multiple_of(2) }))
            });
            if let Some(beat) = beat {
                return Some(Err(beat));
            }
        }
        self.pinned = self.pinned.saturating_sub(1);
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.1;
        Some(Ok(frame))
    }
}

/// The queue of frames to the peer.
pub fn outbox(script: &mut Script<'_>, met: Met<'_>) {
    let mut outbox = Outbox::default();
    let mut oracle = OutboxOracle::default();
    let mut n = 0u64;
    while !script.is_empty() {
        let state = fullness(oracle.frames.len(), OUTBOX_MAX, outbox.is_long());
        let op = script
            .pick(&["push", "push", "push", "wait", "pop", "pop", "pin", "ping", "pong", "other"]);
        let op = if op == "other" { script.pick(&["calm", "clear", "release"]) } else { op };
        met(op, state);
        let times = times(script);
        // Large ones one at a time: many small ones fill the queue in another way.
        let len = if times > 1 { 8 } else { length(script) };
        for _ in 0..times {
            n += 1;
            let numbered = |len: usize| (n, 8 + len);
            let frame = |len: usize| {
                // Zeros of the kernel, which take no time.
                let mut frame = vec![0; 8 + len];
                frame[..8].copy_from_slice(&n.to_le_bytes());
                frame
            };
            match op {
                "push" => {
                    let fits = oracle.fits(numbered(len));
                    let is_asked = n.is_multiple_of(2);
                    let push = if is_asked { Outbox::push_asked } else { Outbox::push };
                    let expected = if fits { Ok(()) } else { Err(Full) };
                    assert_eq!(push(&mut outbox, frame(len)), expected);
                    if fits {
                        oracle.push(numbered(len));
                    } else {
                        break;
                    }
                }
                "wait" => {
                    let fits = oracle.fits(numbered(len));
                    let queued = outbox.push_waiting(frame(len));
                    assert_eq!(queued, if fits { Ok(()) } else { Err(Full) });
                    if fits {
                        oracle.bytes += 8 + len;
                        oracle.waiting.push_back(numbered(len));
                        if oracle.waiting.len() == WAITING_MAX {
                            oracle.release();
                        }
                    }
                    break;
                }
                "release" => {
                    outbox.release();
                    oracle.release();
                }
                "pin" => {
                    // Only what a handshake says: a handful.
                    if oracle.frames.len() < 4 {
                        outbox.push_pinned(frame(0));
                        oracle.push(numbered(0));
                        oracle.pinned = oracle.frames.len();
                    }
                    break;
                }
                "ping" => {
                    outbox.set_ping(Ping { seq: n, active: n.is_multiple_of(2) });
                    oracle.ping = Some(n);
                }
                "pong" => {
                    outbox.set_pong(Pong { seq: n });
                    oracle.pong = Some(n);
                }
                "calm" => {
                    outbox.clear_optional();
                    (oracle.ping, oracle.pong) = (None, None);
                    oracle.bytes -= oracle.waiting.drain(..).map(|(_, len)| len).sum::<usize>();
                }
                "clear" => {
                    outbox.clear();
                    oracle = OutboxOracle::default();
                }
                _ => pop_both(&mut outbox, &mut oracle),
            }
        }
        assert_eq!(outbox.is_long(), oracle.frames.len() > OUTBOX_MAX / 2);
        assert_eq!(
            outbox.has_room_for(1000),
            oracle.frames.len() < OUTBOX_MAX / 2 && oracle.bytes + 1000 <= OUTBOX_BYTES_MAX / 2
        );
        assert!(oracle.bytes <= OUTBOX_BYTES_MAX);
        let beats = oracle.ping.is_some() || oracle.pong.is_some();
        assert_eq!(outbox.is_empty(), oracle.frames.is_empty() && !beats);
        assert_eq!(outbox.has_waiting(), !oracle.waiting.is_empty());
    }
    outbox.release();
    oracle.release();
    while !oracle.frames.is_empty() || oracle.ping.is_some() || oracle.pong.is_some() {
        pop_both(&mut outbox, &mut oracle);
    }
    assert_eq!(outbox.pop(), None);
    assert_eq!((outbox.bytes(), outbox.asked_bytes()), (0, 0));
}

fn pop_both(outbox: &mut Outbox, oracle: &mut OutboxOracle) {
    match (outbox.pop(), oracle.pop()) {
        (None, None) => {}
        (Some(frame), Some(Ok((number, len)))) => {
            assert_eq!((&frame[..8], frame.len()), (&number.to_le_bytes()[..], len));
        }
        (Some(frame), Some(Err(expected))) => {
            let message = Decoder::new(CONTROL_MAX).read(&mut &frame[..]);
            assert_eq!(message, Ok(Some(expected)), "pong, then ping, then the queue");
        }
        (frame, expected) => panic!("{frame:?} where {expected:?} was due"),
    }
}

/// The queue of events to the driver.
pub fn inbox(script: &mut Script<'_>, met: Met<'_>) {
    let mut inbox = Inbox::default();
    let mut oracle: VecDeque<SessionEvent> = VecDeque::new();
    let weigh = |event: &SessionEvent| match event {
        SessionEvent::Request { body, .. } => body.len(),
        SessionEvent::RevokeRequested { streams, .. } => streams.len() * 4,
        _ => 0,
    };
    let mut weight = 0;
    let mut id = 0;
    while !script.is_empty() {
        let state = fullness(oracle.len(), EVENTS_MAX, inbox.is_long());
        let op = script.pick(&["request", "request", "revoke", "answer", "pop", "pop"]);
        met(op, state);
        for _ in 0..times(script) {
            id += 1;
            let event = match op {
                "request" => SessionEvent::Request { id, kind: 1, body: vec![0; length(script)] },
                "revoke" => {
                    let streams = vec![StreamId(1); usize::from(script.byte()) * 16];
                    SessionEvent::RevokeRequested { id, streams }
                }
                "answer" => {
                    // Bounded by the requests that are out, of which there are 1024 at most.
                    let event = SessionEvent::Revoked { id };
                    if oracle.len() < EVENTS_MAX + 1024 {
                        inbox.push_unbounded(event.clone());
                        oracle.push_back(event);
                    }
                    continue;
                }
                _ => {
                    let (popped, expected) = (inbox.pop(), oracle.pop_front());
                    weight -= expected.as_ref().map_or(0, weigh);
                    assert_eq!(popped, expected);
                    continue;
                }
            };
            let more = weigh(&event);
            let fits = oracle.len() < EVENTS_MAX && weight + more <= EVENT_BYTES_MAX;
            assert_eq!(inbox.push(event.clone()), if fits { Ok(()) } else { Err(Full) });
            if !fits {
                break;
            }
            weight += more;
            oracle.push_back(event);
        }
        assert_eq!(inbox.is_full(), oracle.len() >= EVENTS_MAX);
        assert_eq!(inbox.is_long(), oracle.len() > EVENTS_MAX / 2 || weight > EVENT_BYTES_MAX / 2);
        assert!(weight <= EVENT_BYTES_MAX);
    }
    while let Some(expected) = oracle.pop_front() {
        assert_eq!(inbox.pop(), Some(expected));
    }
    assert_eq!(inbox.pop(), None);
}

/// The heartbeat.
pub fn heartbeat(script: &mut Script<'_>, met: Met<'_>) {
    const INTERVAL: Duration = Duration::from_millis(500);
    const SILENCE: Duration = Duration::from_millis(3000);
    let mut now = Timestamp::default() + Duration::from_secs(1000);
    let mut beat = Heartbeat::new(INTERVAL, SILENCE, now);
    let (mut heard, mut since, mut pinged, mut count) = (now, None::<Timestamp>, now, 0);
    while !script.is_empty() {
        let silent_at = since.map(|since| heard.max(since) + SILENCE);
        let state = match silent_at {
            None => "unwatched",
            Some(at) if at <= now => "silent",
            Some(_) if pinged + INTERVAL <= now => "ping due",
            Some(_) => "watched",
        };
        assert_eq!(beat.is_silent(now), state == "silent");
        let next = silent_at.map(|at| at.min(pinged + INTERVAL));
        assert_eq!(beat.next_timeout(), next, "the first of ping and silence, or nothing");
        let op =
            script.pick(&["watch", "unwatch", "hear", "hear late", "tick", "wait", "clock back"]);
        met(op, state);
        let step = Duration::from_millis(u64::from(script.byte()) * 10);
        match op {
            "watch" => {
                beat.watch(true, now);
                if since.is_none() {
                    (since, pinged) = (Some(now), now);
                }
            }
            "unwatch" => {
                beat.watch(false, now);
                since = None;
            }
            "hear" => {
                beat.received(now);
                heard = heard.max(now);
            }
            // A driver may pass in a time that it read before the latest one.
            "hear late" => {
                beat.received(now - step);
                heard = heard.max(now - step);
            }
            "tick" => {
                let due = since.is_some() && pinged + INTERVAL <= now;
                count += u64::from(due);
                assert_eq!(beat.next_ping(now), due.then_some(count), "one ping, however late");
                if due {
                    pinged = now;
                }
            }
            "wait" => now = now + step,
            _ => now = now - step,
        }
    }
}

/// The window of used stream ids.
pub fn stream_window(script: &mut Script<'_>, met: Met<'_>) {
    let mut window = StreamWindow::new();
    let mut used = BTreeSet::new();
    let mut highest = None::<u32>;
    while !script.is_empty() {
        let base = highest.unwrap_or(0);
        let op = script.pick(&[
            "next",
            "next",
            "same",
            "below",
            "far below",
            "ahead",
            "far ahead",
            "any",
        ]);
        let step = u32::from(script.byte());
        let id = match op {
            "next" => base.saturating_add(1),
            "same" => base,
            "below" => base.saturating_sub(step * 4),
            "far below" => base.saturating_sub(1020 + step),
            "ahead" => base.saturating_add(step),
            "far ahead" => base.saturating_add(900 + step),
            _ => u32::from_le_bytes(std::array::from_fn(|_| script.byte())),
        };
        let recent = highest.is_none_or(|highest| u64::from(id) + 1024 > u64::from(highest));
        let fresh = !used.contains(&id);
        met(
            op,
            match (highest, fresh, recent) {
                (None, ..) => "first",
                (_, true, true) => "new",
                (_, false, _) => "used",
                (_, true, false) => "too old",
            },
        );
        assert_eq!(window.use_up(StreamId(id)), fresh && recent, "{id}");
        used.insert(id);
        highest = highest.max(Some(id));
    }
}
