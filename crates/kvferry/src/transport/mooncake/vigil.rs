//! Noticing that a peer is silent.

use kvferry_proto::Timestamp;
use kvferry_sys::socket::Socket;
use std::time::Duration;

/// Looks at the socket per window. A byte that moved is taken to have moved right after the look
/// before, and the window ends an eighth early: a stopped peer's kernel goes on to take what it
/// has room for, the last of it when it is probed 0.2 s later, which is not to make the error
/// late.
const LOOKS: u32 = 32;

/// Watches that the peer moves something while it owes something.
pub(super) struct Vigil {
    pub(super) silence: Duration,
    /// Bytes given to the socket.
    pub(super) sent: u64,
    /// Bytes taken from the socket.
    pub(super) received: u64,
    /// What it had moved at the last look.
    seen: u64,
    /// The last look that came before it moved.
    moved_at: Option<Timestamp>,
    looked_at: Timestamp,
    /// When to look again.
    next: Timestamp,
}

impl Vigil {
    pub(super) fn new(silence: Duration) -> Self {
        let (looked_at, next) = (Timestamp::from_nanos(0), Timestamp::from_nanos(0));
        Self { silence, sent: 0, received: 0, seen: 0, moved_at: None, looked_at, next }
    }

    /// Begins anew: what happened until now does not count.
    pub(super) fn rest(&mut self) {
        self.moved_at = None;
        self.next = Timestamp::from_nanos(0);
    }

    /// When to look again, while it watches.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.moved_at.map(|_| self.next)
    }

    /// Whether the peer was silent for too long. Called any number of times; looks at the socket
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
        // A look that comes late by half a window means that we were away, not the peer.
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

    /// Whether something moved since the last look.
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
        let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let listener = Socket::listen(any).expect("a port");
        let socket = Socket::connect(listener.local_addr().expect("bound")).expect("listening");
        wait_one(socket.as_fd(), Interest::Write, None).expect("it connects");
        (socket, listener)
    }

    #[test]
    fn silence_is_over_a_window_after_the_look_before_the_last_byte_moved() {
        let (socket, _listener) = socket();
        let mut vigil = Vigil::new(SILENCE);
        for n in 0..7 {
            assert!(!vigil.is_over(&socket, second(n)), "second {n}");
        }
        vigil.received += 1;
        for n in 7..13 {
            assert!(!vigil.is_over(&socket, second(n)), "second {n}");
        }
        assert!(vigil.is_over(&socket, second(13)));
    }

    #[test]
    fn who_was_away_itself_accuses_nobody() {
        let (socket, _listener) = socket();
        let mut vigil = Vigil::new(SILENCE);
        assert!(!vigil.is_over(&socket, second(0)));
        assert!(!vigil.is_over(&socket, second(100)), "a look that came too late");
        for n in 101..107 {
            assert!(!vigil.is_over(&socket, second(n)), "second {n}");
        }
        assert!(vigil.is_over(&socket, second(107)));
    }

    #[test]
    fn what_came_before_a_rest_does_not_count() {
        let (socket, _listener) = socket();
        let mut vigil = Vigil::new(SILENCE);
        assert!(!vigil.is_over(&socket, second(0)));
        assert!(!vigil.is_over(&socket, second(6)));
        vigil.rest();
        for n in 7..14 {
            assert!(!vigil.is_over(&socket, second(n)), "second {n}");
        }
        assert!(vigil.is_over(&socket, second(14)));
    }
}
