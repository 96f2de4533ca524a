//! The search for a peer: when to try which address, and which error callers get meanwhile.
//!
//! A state machine without clock and sockets. The driver reports events ([`Search::ask`],
//! [`Search::answered`], [`Search::connected`], [`Search::failed`]), then runs the steps of
//! [`Search::poll`] until [`Step::Wait`].
//!
//! **Several addresses.** The next address is tried 250 ms after the one before (RFC 8305, 5), or at
//! once when that has failed. The first attempt whose handshake is answered goes on; the others are
//! dropped.
//!
//! **Full listeners.** If the peer has no place for a connection, or closes it without an answer, the
//! attempt is made again after a random back-off.
//!
//! **Silence.** A peer that answers at no address, or has stopped answering, is silent. A call to it
//! starts an attempt and waits for the answer, 200 ms at most. Within 500 ms after a refused call,
//! calls are refused at once. A caller that blocks no thread may wait for longer: the peer may have been
//! stopped and run again by now. In the background, at most one attempt every 500 ms probes the peer,
//! until 30 s after the last call.

use crate::error::{Error, ErrorKind};
use kvferry_proto::Timestamp;
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// Time after which the next address is tried as well if an address has not answered.
const STAGGER: Duration = Duration::from_millis(250);

/// The longest first back-off; each further back-off is twice as long.
const BACKOFF: Duration = Duration::from_millis(20);

/// The longest back-off.
const BACKOFF_MAX: Duration = Duration::from_millis(320);

/// Number of further attempts if the peer closes the connection without an answer.
pub(super) const LOST_MAX: u32 = 3;

/// The shortest time between two background probes of a silent peer.
const PROBE_EVERY: Duration = Duration::from_millis(500);

/// The largest number of concurrent attempts to a silent peer; a further one replaces the oldest.
const PROBES_MAX: usize = 4;

/// Longest wait of a call for the answer of a silent peer.
const ANSWER_WAIT: Duration = Duration::from_millis(200);

/// Time after the last call for which a silent peer is probed.
const PROBE_FOR: Duration = Duration::from_secs(30);

/// Next action of the driver. `W` is a waiting caller.
#[derive(Debug)]
pub(super) enum Step<W> {
    /// Start an attempt to connect to the address of this number.
    Start { id: u64, address: usize },
    /// Stop an attempt that is not needed any more.
    Drop(u64),
    /// Fail these callers with this error. The search goes on.
    Refuse(Vec<W>, Error),
    /// Fail these callers with this error. The search is over.
    GiveUp(Vec<W>, Error),
    /// Poll again at this time or after the next event.
    Wait(Option<Timestamp>),
}

#[derive(Debug)]
struct Attempt {
    id: u64,
    address: usize,
}

#[derive(Debug)]
struct Silence {
    since: Timestamp,
    /// Time at which a caller last asked for the peer.
    asked: Timestamp,
    /// Time at which the waiting callers are refused.
    refuse_at: Option<Timestamp>,
    /// Time at which callers were last refused.
    refused: Option<Timestamp>,
    /// Attempts so far.
    probes: usize,
}

#[derive(Debug)]
pub(super) struct Search<W> {
    begun: Timestamp,
    /// End of the time in which attempts are repeated because the peer has no place.
    retry_until: Timestamp,
    addresses: usize,
    waiting: Vec<W>,
    /// Callers that wait for a silent peer until a time of their own.
    patient: Vec<(Timestamp, W)>,
    /// Attempts that run, oldest first.
    running: VecDeque<Attempt>,
    dropped: Vec<u64>,
    /// Addresses to try, the first of them at `next_at`.
    queue: VecDeque<usize>,
    next_at: Timestamp,
    /// The attempt that the peer answers. While it is set, no other attempt starts.
    answered: Option<u64>,
    /// Attempts that the peer had no place for.
    busy: u32,
    /// Attempts that may still be repeated after an unanswered close.
    lost_left: u32,
    /// The error to report if all attempts fail.
    failure: Option<Error>,
    /// An error that ends the search.
    verdict: Option<Error>,
    /// Set while attempts wait for [`Search::release`].
    is_held: bool,
    silence: Option<Silence>,
}

impl<W> Search<W> {
    /// A search among `addresses` addresses, at least one. While the peer has no place, attempts are
    /// repeated for `patience`.
    pub(super) fn new(
        addresses: usize,
        patience: Duration,
        waiting: Vec<W>,
        now: Timestamp,
    ) -> Self {
        Self {
            begun: now,
            retry_until: now + patience,
            addresses,
            waiting,
            patient: Vec::new(),
            running: VecDeque::new(),
            dropped: Vec::new(),
            queue: (0..addresses).collect(),
            next_at: now,
            answered: None,
            busy: 0,
            lost_left: 0,
            failure: None,
            verdict: None,
            is_held: false,
            silence: None,
        }
    }

    /// A search for a peer that has been silent since `since`.
    pub(super) fn silent(addresses: usize, since: Timestamp, now: Timestamp) -> Self {
        let mut search = Self::new(addresses, Duration::ZERO, Vec::new(), now);
        search.begin_silence(since, now);
        search
    }

    /// Repeats an attempt, [`LOST_MAX`] times, if the peer closes the connection without an answer.
    /// Not for agents that also speak foreign protocols: a foreign peer closes every connection.
    pub(super) fn retry_lost(&mut self) {
        self.lost_left = LOST_MAX;
    }

    // ---- events ----

    /// Starts no attempt before [`Search::release`].
    pub(super) fn hold(&mut self) {
        self.is_held = true;
    }

    pub(super) fn release(&mut self, now: Timestamp) {
        self.is_held = false;
        self.next_at = now;
    }

    /// A caller asks for the peer, and waits for `patience` if the peer is silent; without patience, for
    /// [`ANSWER_WAIT`]. Returns the caller with an error if it must not wait.
    pub(super) fn ask(
        &mut self,
        waiter: W,
        patience: Duration,
        now: Timestamp,
    ) -> Option<(W, Error)> {
        let Some(silence) = &mut self.silence else {
            self.waiting.push(waiter);
            return None;
        };
        silence.asked = now;
        if !patience.is_zero() {
            if self.patient.is_empty() && silence.refuse_at.is_none() {
                self.next_at = now;
            }
            self.patient.push((now + patience, waiter));
            return None;
        }
        let was_refused = silence.refused.is_some_and(|at| now < at + PROBE_EVERY);
        if was_refused && self.answered.is_none() {
            let error = silence.error(now);
            return Some((waiter, error));
        }
        if silence.refuse_at.is_none() {
            silence.refuse_at = Some(now + ANSWER_WAIT);
            self.next_at = now;
        }
        self.waiting.push(waiter);
        None
    }

    /// Whether an attempt is still needed.
    pub(super) fn is_running(&self, id: u64) -> bool {
        self.running.iter().any(|attempt| attempt.id == id)
    }

    /// The peer answers an attempt. Returns whether this attempt goes on.
    pub(super) fn answered(&mut self, id: u64) -> bool {
        let is_first = self.answered.is_none() && self.is_running(id);
        if is_first {
            self.answered = Some(id);
            let others = self.running.iter().map(|attempt| attempt.id).filter(|other| *other != id);
            self.dropped.extend(others);
            self.running.retain(|attempt| attempt.id == id);
        }
        is_first || self.answered == Some(id)
    }

    /// An attempt has established a session. Returns the waiting callers, and the search is over.
    /// Returns `None` if the attempt was dropped and the session is not needed.
    pub(super) fn connected(&mut self, id: u64) -> Option<Vec<W>> {
        self.is_running(id).then(|| self.take_waiting())
    }

    pub(super) fn take_waiting(&mut self) -> Vec<W> {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.extend(self.patient.drain(..).map(|(_, waiter)| waiter));
        waiting
    }

    /// An attempt has failed. A refusal by the peer ends the search.
    pub(super) fn failed(&mut self, id: u64, error: Error, now: Timestamp) {
        let Some(at) = self.running.iter().position(|attempt| attempt.id == id) else { return };
        let address = self.running.remove(at).expect("found").address;
        self.answered = self.answered.filter(|answered| *answered != id);
        let is_silent = self.silence.is_some();
        match error.kind() {
            _ if is_silence(&error) => self.failure = Some(error),
            ErrorKind::Busy | ErrorKind::PeerReset if is_silent => return,
            // The error of one address says nothing about the others.
            ErrorKind::Unreachable if is_silent && self.addresses > 1 => return,
            // A peer that gives a reason has no descriptors left, which does not pass by itself.
            ErrorKind::Busy if now < self.retry_until && error.context("detail").is_none() => {
                self.busy += 1;
                return self.retry(address, self.busy, id, now);
            }
            ErrorKind::PeerReset if self.lost_left > 0 => {
                self.lost_left -= 1;
                return self.retry(address, LOST_MAX - self.lost_left, id, now);
            }
            ErrorKind::Unreachable | ErrorKind::Busy | ErrorKind::PeerReset if !is_silent => {
                // Prefer the error of a silent address.
                if !self.failure.as_ref().is_some_and(is_silence) {
                    self.failure = Some(error);
                }
            }
            _ => self.verdict = Some(error),
        }
        if !is_silent && !self.queue.is_empty() {
            self.next_at = now;
        }
    }

    fn retry(&mut self, address: usize, times: u32, seed: u64, now: Timestamp) {
        if self.queue.is_empty() {
            self.next_at = now + backoff(times, seed ^ now.as_nanos());
        }
        self.queue.push_back(address);
    }

    fn begin_silence(&mut self, since: Timestamp, now: Timestamp) {
        let (refuse_at, refused) = (None, None);
        self.silence = Some(Silence { since, asked: now, refuse_at, refused, probes: 0 });
        self.queue.clear();
        self.next_at = now + PROBE_EVERY / 2;
    }

    // ---- steps ----

    /// The next step. `fresh` returns the number of a new attempt.
    pub(super) fn poll(&mut self, now: Timestamp, fresh: impl FnOnce() -> u64) -> Step<W> {
        if let Some(id) = self.dropped.pop() {
            return Step::Drop(id);
        }
        if let Some(error) = self.verdict.take() {
            return Step::GiveUp(self.take_waiting(), error);
        }
        if self.is_held || self.answered.is_some() {
            return Step::Wait(None);
        }
        if self.silence.is_some() {
            return self.poll_silent(now, fresh);
        }
        match self.queue.front() {
            Some(_) if now < self.next_at => Step::Wait(Some(self.next_at)),
            Some(&address) => {
                self.queue.pop_front();
                self.next_at = now + STAGGER;
                self.start(address, fresh())
            }
            None if !self.running.is_empty() => Step::Wait(None),
            None => {
                let failure = self.failure.take().unwrap_or_else(|| {
                    Error::new(ErrorKind::Internal, "a search ended without an attempt")
                });
                if !is_silence(&failure) {
                    return Step::GiveUp(self.take_waiting(), failure);
                }
                self.begin_silence(self.begun, now);
                Step::Refuse(self.take_waiting(), failure)
            }
        }
    }

    fn poll_silent(&mut self, now: Timestamp, fresh: impl FnOnce() -> u64) -> Step<W> {
        let silence = self.silence.as_mut().expect("called only during silence");
        if silence.refuse_at.take_if(|at| *at <= now).is_some() {
            silence.refused = Some(now);
            let error = silence.error(now);
            return Step::Refuse(std::mem::take(&mut self.waiting), error);
        }
        let tired: Vec<W> =
            self.patient.extract_if(.., |(until, _)| *until <= now).map(|(_, it)| it).collect();
        if !tired.is_empty() {
            return Step::Refuse(tired, silence.error(now));
        }
        let stop_at = silence.asked + PROBE_FOR;
        if stop_at <= now && self.waiting.is_empty() && self.patient.is_empty() {
            let error = silence.error(now);
            return Step::GiveUp(Vec::new(), error);
        }
        if now < self.next_at {
            let tired = self.patient.iter().map(|(until, _)| *until);
            let deadline = tired.chain(silence.refuse_at).fold(self.next_at, Timestamp::min);
            return Step::Wait(Some(deadline));
        }
        let address = silence.probes % self.addresses;
        silence.probes += 1;
        // Random, so that peers of a silent host do not all probe it at the same time.
        self.next_at = now + spread(PROBE_EVERY, now.as_nanos());
        if self.running.len() >= PROBES_MAX {
            self.dropped.extend(self.running.pop_front().map(|attempt| attempt.id));
        }
        self.start(address, fresh())
    }

    fn start(&mut self, address: usize, id: u64) -> Step<W> {
        self.running.push_back(Attempt { id, address });
        Step::Start { id, address }
    }
}

impl Silence {
    fn error(&self, now: Timestamp) -> Error {
        let since = now.saturating_since(self.since).as_secs_f64();
        Error::new(ErrorKind::PeerSilent, "the peer is silent; it is probed in the background")
            .with("since", format_args!("{since:.1} s ago"))
    }
}

/// Whether an attempt failed because the peer did not answer in time.
fn is_silence(error: &Error) -> bool {
    let by_kernel = |e: &io::Error| {
        matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable)
    };
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>());
    error.kind() == ErrorKind::PeerSilent || source.is_some_and(by_kernel)
}

/// The random back-off after `tries` attempts.
pub(super) fn backoff(tries: u32, seed: u64) -> Duration {
    spread((BACKOFF * 2u32.pow((tries - 1).min(8))).min(BACKOFF_MAX), seed)
}

/// A random time between `most / 2` and `most`.
fn spread(most: Duration, seed: u64) -> Duration {
    let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
    most / 2 + most / 2 * u32::try_from(random).expect("8 bits") / 256
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_nanos((1_000_000 + ms) * 1_000_000)
    }

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, "a test error")
    }

    /// A search and the number of its latest attempt.
    struct Rig(Search<&'static str>, u64);

    impl Rig {
        fn new(addresses: usize) -> Self {
            Self(Search::new(addresses, Duration::from_secs(3), vec!["first"], at(0)), 0)
        }

        fn poll(&mut self, now: Timestamp) -> Step<&'static str> {
            let last = &mut self.1;
            self.0.poll(now, || {
                *last += 1;
                *last
            })
        }

        fn assert_starts(&mut self, now: u64, address: usize) -> u64 {
            match self.poll(at(now)) {
                Step::Start { id, address: started } if started == address => id,
                other => panic!("at {now} ms: {other:?}"),
            }
        }

        /// Runs the search until `until`. Returns the number of attempts and the refused callers.
        fn run(&mut self, mut now: Timestamp, until: Timestamp) -> (usize, Vec<&'static str>) {
            let (mut starts, mut refused) = (0, Vec::new());
            while now <= until {
                match self.poll(now) {
                    Step::Start { .. } => starts += 1,
                    Step::Drop(_) => {}
                    Step::Refuse(waiting, _) | Step::GiveUp(waiting, _) => refused.extend(waiting),
                    Step::Wait(next) => now = next.unwrap_or(until + Duration::from_nanos(1)),
                }
                assert!(self.0.running.len() <= PROBES_MAX);
            }
            (starts, refused)
        }
    }

    #[test]
    fn the_next_address_is_tried_after_250_ms_and_slower_attempts_are_dropped() {
        let mut rig = Rig::new(3);
        let first = rig.assert_starts(0, 0);
        assert!(matches!(rig.poll(at(249)), Step::Wait(Some(next)) if next == at(250)));
        let second = rig.assert_starts(250, 1);
        // After a failure, the next address is tried at once.
        rig.0.failed(second, error(ErrorKind::Unreachable), at(260));
        let third = rig.assert_starts(260, 2);
        assert!(rig.0.answered(third) && rig.0.answered(third) && !rig.0.answered(first));
        assert!(matches!(rig.poll(at(270)), Step::Drop(dropped) if dropped == first));
        assert_eq!(rig.0.connected(first), None);
        assert_eq!(rig.0.connected(third), Some(vec!["first"]));
    }

    #[test]
    fn attempts_to_a_busy_peer_are_repeated_until_the_handshake_times_out() {
        let mut rig = Rig::new(1);
        let (mut now, mut tries) = (at(0), 0);
        let refused = loop {
            match rig.poll(now) {
                Step::Start { id, .. } => {
                    tries += 1;
                    rig.0.failed(id, error(ErrorKind::Busy), now);
                }
                Step::Wait(next) => now = next.expect("a time"),
                Step::GiveUp(waiting, e) => {
                    assert_eq!(e.kind(), ErrorKind::Busy);
                    break waiting;
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(refused, ["first"]);
        assert!((10..30).contains(&tries), "{tries} attempts");
        assert!(now >= at(3000) && now < at(3400), "{now:?}");
    }

    #[test]
    fn a_busy_peer_that_gives_a_reason_is_not_called_again() {
        let mut rig = Rig::new(1);
        let id = rig.assert_starts(0, 0);
        rig.0.failed(id, error(ErrorKind::Busy).with("detail", "too many sessions"), at(1));
        let Step::GiveUp(waiting, e) = rig.poll(at(1)) else { panic!("the search goes on") };
        assert_eq!((waiting, e.kind()), (vec!["first"], ErrorKind::Busy));
    }

    #[test]
    fn a_refusal_ends_the_search_at_once_and_an_unanswered_close_within_200_ms() {
        let mut rig = Rig::new(2);
        let id = rig.assert_starts(0, 0);
        rig.0.failed(id, error(ErrorKind::AuthFailed), at(1));
        assert!(matches!(rig.poll(at(1)), Step::GiveUp(_, e) if e.kind() == ErrorKind::AuthFailed));
        let mut rig = Rig::new(1);
        rig.0.retry_lost();
        let mut now = at(0);
        loop {
            match rig.poll(now) {
                Step::Start { id, .. } => rig.0.failed(id, error(ErrorKind::PeerReset), now),
                Step::Wait(next) => now = next.expect("a time"),
                Step::GiveUp(_, e) => break assert_eq!(e.kind(), ErrorKind::PeerReset),
                other => panic!("{other:?}"),
            }
        }
        assert!(now < at(200), "{now:?}");
    }

    #[test]
    fn a_silent_peer_is_probed_until_30_s_after_the_last_call() {
        let mut rig = Rig::new(1);
        let id = rig.assert_starts(0, 0);
        rig.0.failed(id, error(ErrorKind::PeerSilent), at(3000));
        assert!(matches!(rig.poll(at(3000)), Step::Refuse(waiting, _) if waiting == ["first"]));
        let (starts, refused) = rig.run(at(3000), at(13_000));
        assert!((20..=41).contains(&starts) && refused.is_empty(), "{starts} {refused:?}");
        assert!(rig.0.ask("later", Duration::ZERO, at(13_000)).is_none());
        rig.run(at(13_000), at(42_900));
        assert!(matches!(rig.poll(at(42_990)), Step::Wait(Some(_)) | Step::Start { .. }));
        rig.run(at(42_990), at(42_999));
        assert!(matches!(rig.poll(at(43_000)), Step::GiveUp(waiting, _) if waiting.is_empty()));
    }

    #[test]
    fn a_call_to_a_silent_peer_fails_after_200_ms_and_the_next_calls_at_once() {
        let mut search = Search::silent(1, at(0), at(3000));
        assert!(search.ask("first", Duration::ZERO, at(4000)).is_none());
        let mut rig = Rig(search, 0);
        rig.assert_starts(4000, 0);
        assert!(rig.0.ask("beside", Duration::ZERO, at(4100)).is_none());
        let (_, refused) = rig.run(at(4001), at(4200));
        assert_eq!(refused, ["first", "beside"]);
        let (_, e) = rig.0.ask("at once", Duration::ZERO, at(4300)).expect("refused");
        assert_eq!((e.kind(), e.context("since")), (ErrorKind::PeerSilent, Some("4.3 s ago")));
        // A later call waits again, and goes on once the peer answers.
        assert!(rig.0.ask("later", Duration::ZERO, at(4700)).is_none());
        rig.run(at(4700), at(4710));
        let probe = rig.1;
        assert!(rig.0.answered(probe));
        let (_, refused) = rig.run(at(4710), at(6000));
        assert!(refused.is_empty(), "{refused:?}");
        assert_eq!(rig.0.connected(probe), Some(vec!["later"]));
    }

    #[test]
    fn a_patient_caller_of_a_silent_peer_gets_the_session_of_a_later_attempt() {
        let mut rig = Rig(Search::silent(1, at(0), at(3000)), 0);
        let patience = Duration::from_secs(3);
        // A call that was refused a moment ago does not refuse it.
        assert!(rig.0.ask("refused", Duration::ZERO, at(4000)).is_none());
        let (_, refused) = rig.run(at(4000), at(4200));
        assert_eq!(refused, ["refused"]);
        assert!(rig.0.ask("patient", patience, at(4210)).is_none());
        let (starts, refused) = rig.run(at(4210), at(6500));
        assert!(starts >= 4 && refused.is_empty(), "{starts} {refused:?}");
        let probe = rig.1;
        assert!(rig.0.answered(probe));
        assert_eq!(rig.0.connected(probe), Some(vec!["patient"]));
    }

    #[test]
    fn a_patient_caller_is_refused_when_its_patience_ends() {
        let mut rig = Rig(Search::silent(1, at(0), at(3000)), 0);
        let patience = Duration::from_secs(3);
        assert!(rig.0.ask("patient", patience, at(4000)).is_none());
        assert!(rig.0.ask("later", patience, at(5000)).is_none());
        let (_, refused) = rig.run(at(4000), at(6999));
        assert!(refused.is_empty(), "{refused:?}");
        assert_eq!(rig.run(at(6999), at(7000)).1, ["patient"]);
        assert_eq!(rig.run(at(7000), at(8000)).1, ["later"]);
    }

    #[test]
    fn a_call_that_joins_an_answered_attempt_to_a_silent_peer_is_refused_when_the_attempt_fails() {
        for kind in [ErrorKind::PeerSilent, ErrorKind::PeerReset] {
            let mut rig = Rig(Search::silent(1, at(0), at(3000)), 0);
            rig.run(at(3000), at(3300));
            let probe = rig.1;
            assert!(rig.0.answered(probe));
            assert!(rig.0.ask("joins", Duration::ZERO, at(3400)).is_none());
            let (_, refused) = rig.run(at(3400), at(6000));
            assert!(refused.is_empty(), "{refused:?}");
            rig.0.failed(probe, error(kind), at(6000));
            let (_, refused) = rig.run(at(6000), at(6200));
            assert_eq!(refused, ["joins"], "{kind:?}");
        }
    }
}
