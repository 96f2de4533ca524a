//! Connections that have not proved themselves: each leaves exactly once, the oldest first.

use super::Model;
use crate::pair::ms;
use kvferry_proto::fuzzing::{Met, Script};
use kvferry_proto::{Handshakes, Timestamp};
use std::time::Duration;

const CAPACITY: usize = 8;
const DEADLINE: Duration = Duration::from_secs(5);

pub const MODEL: Model = Model {
    name: "admission_model",
    run,
    rows: &["admit", "done", "done twice", "expire", "wait", "clock back"],
    columns: &["empty", "some", "full", "expired"],
    unreachable: &[(
        "done twice",
        &["empty"],
        "without an admitted connection there is none that has left",
    )],
    cases: (4000, 200),
};

fn run(bytes: &[u8], met: Met<'_>) {
    let mut script = Script::new(bytes);
    let mut pending = Handshakes::new(CAPACITY, DEADLINE);
    // Who is inside, in the order they came, and until when.
    let mut inside: Vec<(u64, Timestamp)> = Vec::new();
    let mut now = Timestamp::default() + Duration::from_secs(1000);
    let mut next = 0;
    let mut gone = None;
    while !script.is_empty() {
        let state = match inside.as_slice() {
            [] => "empty",
            [(_, until), ..] if *until <= now => "expired",
            all if all.len() == CAPACITY => "full",
            _ => "some",
        };
        let mut op = script.pick(&[
            "admit",
            "admit",
            "admit",
            "done",
            "done twice",
            "expire",
            "wait",
            "clock back",
        ]);
        if op == "done twice" && (gone.is_none() || inside.is_empty()) {
            op = "admit";
        }
        met(op, state);
        match op {
            "admit" => {
                next += 1;
                let evicted = (inside.len() == CAPACITY).then(|| inside.remove(0).0);
                assert_eq!(pending.admit(next, now), evicted, "the oldest makes room");
                inside.push((next, now + DEADLINE));
                gone = evicted.or(gone);
            }
            "done" => {
                let at = script.below(CAPACITY);
                let key = inside.get(at).map_or(u64::MAX, |(key, _)| *key);
                let known = at < inside.len();
                assert_eq!(pending.contains(&key), known);
                assert_eq!(pending.done(&key), known);
                if known {
                    gone = Some(inside.remove(at).0);
                }
            }
            "done twice" => {
                let key = gone.expect("looked at before");
                assert!(!pending.done(&key) && !pending.contains(&key), "a connection leaves once");
            }
            "expire" => {
                // Only the oldest is looked at: with a clock that goes forward it is the first due.
                let due = inside.first().is_some_and(|(_, until)| *until <= now);
                let expired = due.then(|| inside.remove(0).0);
                assert_eq!(pending.pop_expired(now), expired);
                gone = expired.or(gone);
            }
            "wait" => now = now + ms(u64::from(script.byte()) * 40),
            _ => now = now - ms(u64::from(script.byte())),
        }
        assert_eq!((pending.len(), pending.is_empty()), (inside.len(), inside.is_empty()));
        assert!(pending.len() <= CAPACITY);
        assert_eq!(pending.next_timeout(), inside.first().map(|(_, until)| *until));
    }
}
