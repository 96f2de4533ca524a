//! Time of a secret: a request's frames have keyed tags instead of CRCs, at both ends of a lane.

use std::hint::black_box;
use std::time::Instant;

use kvferry_proto::lane::{Begin, Initiator, Next, Receive, Target};
use kvferry_proto::{
    Guard, Incarnation, Limits, MAGIC, Op, RegionId, RequestHeader, Secret, Session, SessionConfig,
    SessionId, StreamId, Timestamp, TransferId, WireCode, WireDescriptor,
};

use crate::report::Row;
use crate::stats::{Spread, median};

/// Rounds of a quick bench, too: a round takes milliseconds.
const ROUNDS_MIN: usize = 7;

/// Turns of each kind of lane within a round.
const TURNS: usize = 10;

/// Bound of the time that keyed tags add to a request.
const US_MAX: f64 = 1.0;

const PAYLOAD: u32 = 4096;
const WRITE: Begin =
    Begin { op: Op::Write, descriptors: 1, payload_len: PAYLOAD as u64, budget_ms: 1000 };

/// The time of a request with a secret, without the time of one that has none. `requests` of each are made
/// in a round, in turns.
pub(super) fn row(rounds: usize, requests: usize) -> Row {
    let mut kinds = [true, false].map(Ends::new);
    let rounds = (0..rounds.max(ROUNDS_MIN)).map(|_| {
        let mut turns = [Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            for (ends, turns) in kinds.iter_mut().zip(&mut turns) {
                turns.push(ends.turn(requests / TURNS));
            }
        }
        let [keyed, plain] = turns.map(|turns| median(&turns));
        keyed - plain
    });
    let more = Spread::of(rounds.collect());
    Row::new("latency", "a secret's part of a request, both ends", "µs", more).at_most(US_MAX)
}

/// Both ends of a lane, without memory or network.
struct Ends {
    initiator: Initiator<()>,
    target: Target,
    head: Vec<u8>,
}

impl Ends {
    fn new(keyed: bool) -> Ends {
        let [near, far] = guards(keyed);
        let limits = Limits::default();
        let mut head = vec![0; RequestHeader::LEN];
        WireDescriptor { offset: 0, len: PAYLOAD, region: RegionId(1) }.write_to(&mut head);
        Ends {
            initiator: Initiator::new(TransferId(7), false, limits, near),
            target: Target::new(limits, false, far, Vec::new()),
            head,
        }
    }

    /// Microseconds of a request, on average.
    fn turn(&mut self, requests: usize) -> f64 {
        let started = Instant::now();
        for _ in 0..requests {
            self.request();
        }
        started.elapsed().as_secs_f64() * 1e6 / requests as f64
    }

    /// A write of one descriptor, without its payload's bytes, and its answer.
    fn request(&mut self) {
        self.initiator.begin(WRITE, std::mem::take(&mut self.head), ());
        let head = self.initiator.transmit().expect("a request was begun").bytes;
        let Next::Receive(into) = self.target.poll().expect("nothing was received yet") else {
            unreachable!("the target is between two requests");
        };
        into[..head.len()].copy_from_slice(head);
        let len = head.len();
        self.target.received(len);
        self.head = self.initiator.sent(len + PAYLOAD as usize).expect("all of it");
        assert!(matches!(self.target.poll().expect("a valid head"), Next::Decide(_)));
        self.target.accept();
        self.target.received(PAYLOAD as usize);
        assert!(matches!(self.target.poll().expect("all of the payload"), Next::Flush));
        self.target.placed();
        self.target.answer(WireCode::Ok);
        let Next::Transmit(answer) = self.target.poll().expect("the request is answered") else {
            unreachable!("there is an answer to send");
        };
        let Receive::Bytes { into, .. } = self.initiator.receive() else {
            unreachable!("an answer is outstanding");
        };
        into.copy_from_slice(answer.bytes);
        let len = answer.bytes.len();
        self.target.sent(len);
        black_box(self.initiator.received(len).expect("a valid answer").expect("all of it"));
    }
}

/// The guards of a stream for the initiator and the target, of a session with a secret or without.
fn guards(keyed: bool) -> [Guard; 2] {
    let now = Timestamp::from_nanos(1_000_000_000);
    let config = |id, name: &str| {
        let secret = if keyed { Secret::new(*b"the secret of both ends") } else { None };
        SessionConfig { secret, ..SessionConfig::new(Incarnation(id), name) }
    };
    let mut near = Session::initiator(config(1, "near"), None, [1; 32], now);
    let mut far = Session::acceptor(config(2, "far"), SessionId(1), [2; 32], now);
    let hello = near.poll_transmit().expect("says hello");
    far.receive(&hello[MAGIC.len()..], now);
    near.receive(&far.poll_transmit().expect("challenges"), now);
    far.receive(&near.poll_transmit().expect("proves"), now);
    near.receive(&far.poll_transmit().expect("is ready"), now);
    [near, far].map(|side| side.stream_guard(StreamId(1)).expect("established"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Bound;

    #[test]
    fn requests_with_a_secret_have_keyed_tags_and_others_have_not() {
        for keyed in [true, false] {
            assert!(guards(keyed).iter().all(|guard| matches!(guard, Guard::Keyed(_)) == keyed));
            assert!(Ends::new(keyed).turn(3) > 0.0);
        }
    }

    #[test]
    fn the_difference_is_judged_over_seven_rounds_or_more() {
        let row = row(1, TURNS);
        let [judged] = &row.judged[..] else { panic!("one bound: {:?}", row.judged) };
        assert_eq!((judged.of.as_ref(), judged.required), (None, Bound::AtMost(US_MAX)));
        assert_eq!(judged.reached.rounds.len(), ROUNDS_MIN);
    }
}
