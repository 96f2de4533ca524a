//! Detects that a peer is silent.

use kvferry_proto::Timestamp;
use kvferry_sys::socket::Socket;
use std::time::Duration;

/// Checks of the socket per window. A byte that moved counts as moved right after the previous
/// check, and the window ends an eighth early: the kernel of a stopped peer takes what its buffers
/// hold, the last of it after a probe 0.2 s later, which must not delay the error.
const LOOKS: u32 = 32;

/// Detects that the peer moves no byte while it owes an answer.
pub(super) struct StallDetector {
    pub(super) silence: Duration,
    /// Bytes that the socket has accepted.
    pub(super) sent: u64,
    /// Bytes received from the socket.
    pub(super) received: u64,
    /// The bytes moved at the last check.
    seen: u64,
    /// The last check before a byte moved.
    moved_at: Option<Timestamp>,
    looked_at: Timestamp,
    next: Timestamp,
}

impl StallDetector {
    pub(super) fn new(silence: Duration) -> Self {
        let (looked_at, next) = (Timestamp::from_nanos(0), Timestamp::from_nanos(0));
        Self { silence, sent: 0, received: 0, seen: 0, moved_at: None, looked_at, next }
    }

    /// Starts again: ignores everything until now.
    pub(super) fn rest(&mut self) {
        self.moved_at = None;
        self.next = Timestamp::from_nanos(0);
    }

    /// The next check, while the detector is active.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.moved_at.map(|_| self.next)
    }

    /// Whether the peer was silent for too long. May be called at any time; checks the socket
    /// several times per window.
    pub(super) fn is_over(&mut self, socket: &Socket, now: Timestamp) -> bool {
        let Some(moved_at) = self.moved_at else {
            self.look(socket);
            self.moved_at = Some(now);
            self.looked_at = now;
            self.next = now + self.silence / LOOKS;
            return false;
        };
        if now < self.next {
            return false;
        }
        // A check that is late by half a window means that this process was suspended, not that the
        // peer is silent.
        let late = now.saturating_since(self.next) > self.silence / 2;
        let looked_at = std::mem::replace(&mut self.looked_at, now);
        let moved_at = match (self.look(socket), late) {
            (_, true) => now,
            (true, false) => looked_at,
            (false, false) => moved_at,
        };
        self.moved_at = Some(moved_at);
        let end = moved_at + self.silence * 7 / 8;
        self.next = end.min(now + self.silence / LOOKS);
        now >= end
    }

    /// Whether a byte moved since the last check.
    fn look(&mut self, socket: &Socket) -> bool {
        let unacknowledged = socket.unacknowledged().unwrap_or(0) as u64;
        let moved = self.received + self.sent.saturating_sub(unacknowledged);
        let more = moved > self.seen;
        self.seen = self.seen.max(moved);
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_sys::poll::{Interest, wait_one};
    use std::net::SocketAddr;
    use std::os::fd::AsFd;

    const SILENCE: Duration = Duration::from_secs(8);

    fn second(n: u64) -> Timestamp {
        Timestamp::from_nanos(1_000_000_000) + Duration::from_secs(n)
    }

    fn socket() -> (Socket, Socket) {
        let any: SocketAddr = "127.0.0.1:0".parse().expect("a literal address");
        let listener = Socket::listen(any).expect("a port");
        let socket = Socket::connect(listener.local_addr().expect("bound")).expect("listening");
        wait_one(socket.as_fd(), Interest::Write, None).expect("it connects");
        (socket, listener)
    }

    fn assert_fresh(detector: &mut StallDetector, socket: &Socket, seconds: std::ops::Range<u64>) {
        for n in seconds {
            assert!(!detector.is_over(socket, second(n)), "second {n}");
        }
    }

    #[test]
    fn the_window_starts_at_the_check_before_the_last_byte_moved() {
        let (socket, _listener) = socket();
        let mut stall_detector = StallDetector::new(SILENCE);
        assert_fresh(&mut stall_detector, &socket, 0..7);
        stall_detector.received += 1;
        assert_fresh(&mut stall_detector, &socket, 7..13);
        assert!(stall_detector.is_over(&socket, second(13)));
    }

    #[test]
    fn a_suspended_process_does_not_blame_the_peer() {
        let (socket, _listener) = socket();
        let mut stall_detector = StallDetector::new(SILENCE);
        assert!(!stall_detector.is_over(&socket, second(0)));
        assert!(!stall_detector.is_over(&socket, second(100)), "a late check");
        assert_fresh(&mut stall_detector, &socket, 101..107);
        assert!(stall_detector.is_over(&socket, second(107)));
    }

    #[test]
    fn silence_before_a_restart_does_not_count() {
        let (socket, _listener) = socket();
        let mut stall_detector = StallDetector::new(SILENCE);
        assert!(!stall_detector.is_over(&socket, second(0)));
        assert!(!stall_detector.is_over(&socket, second(6)));
        stall_detector.rest();
        assert_fresh(&mut stall_detector, &socket, 7..14);
        assert!(stall_detector.is_over(&socket, second(14)));
    }
}
