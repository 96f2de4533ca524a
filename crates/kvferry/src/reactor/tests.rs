//! Handlers, deadlines and wake-ups on one thread.

use super::*;
use std::sync::mpsc;

struct Probe {
    calls: mpsc::Sender<bool>,
    /// After a call of this number, and those that follow.
    deadline: Option<(usize, Duration)>,
    due: Option<Timestamp>,
    called: usize,
}

impl Handler for Probe {
    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let is_due = self.due.is_some_and(|due| cx.now >= due);
        let _ = self.calls.send(is_due);
        if is_due {
            return Next::Close;
        }
        let number = self.called;
        self.called += 1;
        self.due =
            self.deadline.filter(|(from, _)| *from <= number).map(|(_, after)| cx.now + after);
        Next::Wait { interest: Interest::None, deadline: self.due }
    }
}

/// Always asks for a deadline that has passed.
struct Late;

impl Handler for Late {
    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        Next::Wait { interest: Interest::None, deadline: Some(cx.now) }
    }
}

#[test]
fn a_deadline_that_has_passed_does_not_starve_other_handlers() {
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    reactor.remote().add(reactor.remote().token(), Box::new(Late));
    let (calls, called) = mpsc::channel();
    let other = Probe { calls, deadline: None, due: None, called: 0 };
    reactor.remote().add(reactor.remote().token(), Box::new(other));
    assert_eq!(called.recv_timeout(Duration::from_secs(60)), Ok(false));
    reactor.stop();
}

#[test]
fn a_handler_is_called_at_once_on_every_wake_and_at_its_deadline() {
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    let (calls, called) = mpsc::channel();
    let token = reactor.remote().token();
    // Whatever time a thread takes, a wake comes before a deadline that is set by its call.
    let deadline = Some((1, Duration::from_millis(50)));
    reactor.remote().add(token, Box::new(Probe { calls, deadline, due: None, called: 0 }));
    let wait = Duration::from_secs(60);
    assert_eq!(called.recv_timeout(wait), Ok(false), "on arrival");
    reactor.remote().wake(token);
    assert_eq!(called.recv_timeout(wait), Ok(false), "woken");
    assert_eq!(called.recv_timeout(wait), Ok(true), "deadline");
    assert!(called.recv_timeout(wait).is_err(), "closed: the sender is gone");
    reactor.stop();
}

#[test]
fn a_handler_that_nothing_wakes_is_called_at_the_deadline_of_its_arrival() {
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    let (calls, called) = mpsc::channel();
    let deadline = Some((0, Duration::from_millis(50)));
    let probe = Probe { calls, deadline, due: None, called: 0 };
    reactor.remote().add(reactor.remote().token(), Box::new(probe));
    let wait = Duration::from_secs(60);
    assert_eq!(called.recv_timeout(wait), Ok(false), "on arrival");
    assert_eq!(called.recv_timeout(wait), Ok(true), "deadline");
    assert!(called.recv_timeout(wait).is_err(), "closed: the sender is gone");
    reactor.stop();
}

/// Waits on a connection and counts its calls.
struct Waiting {
    socket: std::os::unix::net::UnixStream,
    interest: Interest,
    calls: std::sync::Arc<AtomicU64>,
}

impl Handler for Waiting {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(std::os::fd::AsFd::as_fd(&self.socket))
    }

    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Next::Wait { interest: self.interest, deadline: None }
    }
}

#[test]
fn a_closed_connection_does_not_call_its_handler_again_and_again() {
    use std::io::Write;
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    for (interest, how) in
        [(Interest::Write, std::net::Shutdown::Write), (Interest::None, std::net::Shutdown::Both)]
    {
        let (mut socket, peer) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
        socket.set_nonblocking(true).expect("a socket");
        // The peer does not read, so the send buffer is full.
        while socket.write(&[0; 4096]).is_ok() {}
        let calls = std::sync::Arc::new(AtomicU64::new(0));
        let waiting = Waiting { socket, interest, calls: std::sync::Arc::clone(&calls) };
        reactor.remote().add(reactor.remote().token(), Box::new(waiting));
        peer.shutdown(how).expect("connected");
        std::thread::sleep(Duration::from_millis(100));
        let calls = calls.load(Ordering::SeqCst);
        assert!(calls <= 4, "{interest:?}: {calls} calls in 100 ms");
    }
    reactor.stop();
}

/// Panics when it is called.
struct Panicking(mpsc::Sender<bool>);

impl Handler for Panicking {
    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        panic!("a panic in handle")
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        let _ = self.0.send(true);
        panic!("a panic in drop");
    }
}

#[test]
fn a_handler_that_panics_is_dropped_and_the_others_go_on() {
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    let (calls, called) = mpsc::channel();
    let wait = Duration::from_secs(60);
    for _ in 0..3 {
        reactor.remote().add(reactor.remote().token(), Box::new(Panicking(calls.clone())));
        assert_eq!(called.recv_timeout(wait), Ok(true), "dropped");
    }
    let token = reactor.remote().token();
    reactor.remote().add(token, Box::new(Probe { calls, deadline: None, due: None, called: 0 }));
    assert_eq!(called.recv_timeout(wait), Ok(false), "called");
    reactor.stop();
}

/// Panics when it is dropped; its descriptor can't be watched by epoll.
struct Unwatchable {
    file: std::fs::File,
    dropped: mpsc::Sender<bool>,
}

impl Handler for Unwatchable {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(std::os::fd::AsFd::as_fd(&self.file))
    }

    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        Next::Close
    }
}

impl Drop for Unwatchable {
    fn drop(&mut self) {
        let _ = self.dropped.send(true);
        panic!("a panic in drop");
    }
}

#[test]
fn a_handler_that_cannot_be_watched_and_panics_in_its_drop_leaves_the_thread_running() {
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    let (dropped, was_dropped) = mpsc::channel();
    let wait = Duration::from_secs(60);
    let file = std::fs::File::open("/proc/self/exe").expect("a regular file");
    let handler = Unwatchable { file, dropped };
    reactor.remote().add(reactor.remote().token(), Box::new(handler));
    assert_eq!(was_dropped.recv_timeout(wait), Ok(true));
    let (calls, called) = mpsc::channel();
    let probe = Probe { calls, deadline: None, due: None, called: 0 };
    reactor.remote().add(reactor.remote().token(), Box::new(probe));
    assert_eq!(called.recv_timeout(wait), Ok(false), "the thread goes on");
    reactor.stop();
}

/// Has work without end, and a descriptor that is always ready.
struct Endless {
    socket: std::os::unix::net::UnixStream,
    calls: std::sync::Arc<AtomicU64>,
}

impl Handler for Endless {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(std::os::fd::AsFd::as_fd(&self.socket))
    }

    fn handle(&mut self, cause: Cause, _cx: &Cx<'_>) -> Next {
        if self.calls.fetch_add(1, Ordering::SeqCst) == 0 && !cause.ready.any() {
            return Next::Wait { interest: Interest::Read, deadline: None };
        }
        Next::Again
    }
}

/// One of many handlers that, like [`Endless`], have work without end and a descriptor that is always ready.
struct Always {
    socket: std::os::unix::net::UnixStream,
    is_watched: bool,
    calls: std::sync::Arc<AtomicU64>,
}

impl Handler for Always {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(std::os::fd::AsFd::as_fd(&self.socket))
    }

    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        if !std::mem::replace(&mut self.is_watched, true) {
            return Next::Wait { interest: Interest::Read, deadline: None };
        }
        self.calls.fetch_add(1, Ordering::SeqCst);
        Next::Again
    }
}

/// Counts the calls of another handler between two of its own.
struct Turns {
    calls: std::sync::Arc<AtomicU64>,
    before: u64,
    most: mpsc::Sender<u64>,
}

impl Handler for Turns {
    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        let calls = self.calls.load(Ordering::SeqCst);
        let _ = self.most.send(calls - self.before);
        self.before = calls;
        Next::Again
    }
}

#[test]
fn a_handler_that_always_has_work_gets_no_more_turns_in_each_round() {
    use std::io::Write;
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    let (socket, mut peer) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
    peer.write_all(b"ready").expect("connected");
    let calls = std::sync::Arc::new(AtomicU64::new(0));
    let endless = Endless { socket, calls: std::sync::Arc::clone(&calls) };
    reactor.remote().add(reactor.remote().token(), Box::new(endless));
    let (most, turns) = mpsc::channel();
    reactor.remote().add(reactor.remote().token(), Box::new(Turns { calls, before: 0, most }));
    // The first turn comes when the handler was added, and the other one has run until then.
    turns.recv_timeout(Duration::from_secs(60)).expect("its turn comes");
    for round in 1..1000 {
        let calls = turns.recv_timeout(Duration::from_secs(60)).expect("its turn comes");
        assert!(calls <= 4, "{calls} calls of the other handler in round {round}");
    }
    reactor.stop();
}

/// In its first turn makes another handler's descriptor ready, and wakes a third one.
struct Signals {
    calls: std::sync::Arc<AtomicU64>,
    ready: Option<std::os::unix::net::UnixStream>,
    remote: Remote,
    woken: u64,
    at: std::sync::Arc<AtomicU64>,
}

impl Handler for Signals {
    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        use std::io::Write;
        // The others may all have been added in this round, and have no turn yet.
        if self.calls.load(Ordering::SeqCst) == 0 {
            return Next::Again;
        }
        if let Some(mut ready) = self.ready.take() {
            self.at.store(self.calls.load(Ordering::SeqCst), Ordering::SeqCst);
            ready.write_all(b"ready").expect("connected");
            self.remote.wake(self.woken);
        }
        Next::Wait { interest: Interest::None, deadline: None }
    }
}

/// Says how many calls the others got between the turn of [`Signals`] and its own.
struct Signalled {
    socket: Option<std::os::unix::net::UnixStream>,
    calls: std::sync::Arc<AtomicU64>,
    at: std::sync::Arc<AtomicU64>,
    waited: mpsc::Sender<u64>,
}

impl Handler for Signalled {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        let at = self.at.load(Ordering::SeqCst);
        if at == 0 {
            return Next::Wait { interest: Interest::Read, deadline: None };
        }
        let _ = self.waited.send(self.calls.load(Ordering::SeqCst) - at);
        Next::Close
    }
}

#[test]
fn beside_hundreds_of_handlers_that_always_have_work_a_descriptor_and_a_command_wait_for_few_turns()
{
    use std::io::Write;
    const BUSY: usize = 640;
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    let remote = reactor.remote();
    let pair = || std::os::unix::net::UnixStream::pair().expect("a socket pair");
    let (socket, mut peer) = pair();
    peer.write_all(b"ready").expect("connected");
    let (calls, at) = (std::sync::Arc::default(), std::sync::Arc::default());
    for _ in 0..BUSY {
        // Descriptors of one socket: all of them are ready.
        let socket = socket.try_clone().expect("a descriptor");
        let calls = std::sync::Arc::clone(&calls);
        remote.add(remote.token(), Box::new(Always { socket, is_watched: false, calls }));
    }
    let (watched, ready) = pair();
    let (descriptor, waited_descriptor) = mpsc::channel();
    let (command, waited_command) = mpsc::channel();
    let woken = remote.token();
    for (token, socket, waited) in
        [(remote.token(), Some(watched), descriptor), (woken, None, command)]
    {
        let (calls, at) = (std::sync::Arc::clone(&calls), std::sync::Arc::clone(&at));
        remote.add(token, Box::new(Signalled { socket, calls, at, waited }));
    }
    let signals = Signals { calls, ready: Some(ready), remote: remote.clone(), woken, at };
    remote.add(remote.token(), Box::new(signals));

    let wait = Duration::from_secs(60);
    let round = 2 * Epoll::EVENTS_MAX as u64;
    let waited = waited_command.recv_timeout(wait).expect("its turn comes");
    assert!(waited <= 2 * round, "{waited} calls before that of a handler that was woken");
    let rounds = BUSY.div_ceil(Epoll::EVENTS_MAX) as u64 + 2;
    let waited = waited_descriptor.recv_timeout(wait).expect("its turn comes");
    assert!(waited <= rounds * round, "{waited} calls before that of a descriptor that was ready");
    reactor.stop();
}

#[test]
fn a_stopped_reactor_drops_handlers_that_are_added() {
    let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
    reactor.stop();
    let (calls, called) = mpsc::channel();
    reactor.remote().add(9, Box::new(Probe { calls, deadline: None, due: None, called: 0 }));
    assert!(called.recv().is_err());
}
