//! A thread that waits for many descriptors, timers and wake-ups, and calls their handlers.
//!
//! The control thread and every I/O thread are reactors. A handler never blocks; it does a bounded
//! amount of work, says what it waits for, and is called again. Wake-ups are not lost: a command
//! is queued before the bell rings, and the bell is cleared before the queue is read.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::poll::{Epoll, EventFd};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Mutex, PoisonError};
use kvferry_proto::Timestamp;
use kvferry_sys::clock;
use kvferry_sys::poll::{Event, Interest, Ready};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The agent's clock: `CLOCK_BOOTTIME`.
pub(crate) fn now() -> Timestamp {
    Timestamp::from_nanos(clock::boottime_ns())
}

/// How long a thread that moves data looks again before it sleeps. Waking a sleeping processor
/// costs 10 to 100 µs on virtual machines, as much as moving a small batch; looking costs at most
/// this much per burst of work, and nothing when idle.
pub(crate) const LINGER: Duration = Duration::from_micros(50);

/// Why a handler is called: readiness of its descriptor, or none of it when it is new, woken, or
/// its deadline has passed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cause {
    pub(crate) ready: Ready,
}

/// What a handler wants next.
#[derive(Debug)]
pub(crate) enum Next {
    /// To be called when one of these happens.
    Wait { interest: Interest, deadline: Option<Timestamp> },
    /// To be called again soon, after others had their turn.
    Again,
    /// To be dropped.
    Close,
    /// To be taken out and handed to [`Handler::detached`].
    Detach,
}

/// Where and when a handler is called.
#[derive(Debug)]
pub(crate) struct Cx<'a> {
    pub(crate) now: Timestamp,
    pub(crate) token: u64,
    pub(crate) remote: &'a Remote,
}

/// Something a reactor calls. Its descriptor never changes.
pub(crate) trait Handler: Send {
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next;
    /// Called after [`Next::Detach`], when the descriptor is not watched any more.
    fn detached(self: Box<Self>, _cx: &Cx<'_>) {}
}

enum Command {
    Add(u64, Box<dyn Handler>),
    Wake(u64),
}

struct Shared {
    commands: Mutex<Vec<Command>>,
    bell: EventFd,
    stopping: AtomicBool,
    next_token: AtomicU64,
}

/// A handle on a reactor, for any thread.
#[derive(Clone)]
pub(crate) struct Remote(Arc<Shared>);

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Remote")
    }
}

impl Remote {
    /// A token for a handler that is going to be added.
    pub(crate) fn token(&self) -> u64 {
        self.0.next_token.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands over a handler; it is called once at once. After the reactor stopped, the handler
    /// is dropped.
    pub(crate) fn add(&self, token: u64, handler: Box<dyn Handler>) {
        self.send(Command::Add(token, handler));
    }

    /// Calls a handler soon. Tokens of handlers that are gone are ignored.
    pub(crate) fn wake(&self, token: u64) {
        self.send(Command::Wake(token));
    }

    fn send(&self, command: Command) {
        let mut commands = self.0.commands.lock().unwrap_or_else(PoisonError::into_inner);
        if self.0.stopping.load(Ordering::SeqCst) {
            drop(commands);
            // The handler's drop may take locks of its own: not under ours.
            drop(command);
            return;
        }
        let ring = commands.is_empty();
        commands.push(command);
        drop(commands);
        if ring {
            self.0.bell.signal();
        }
    }
}

#[cfg(all(loom, test))]
impl Remote {
    /// A reactor that never runs: models call what it is told to, with [`Remote::play`].
    pub(crate) fn without_thread() -> Self {
        Self(Arc::new(Shared {
            commands: Mutex::new(Vec::new()),
            bell: EventFd::new().expect("the bell of a model"),
            stopping: AtomicBool::new(false),
            next_token: AtomicU64::new(FIRST + 1),
        }))
    }

    /// Which handlers are to be called, in order.
    pub(crate) fn wakes(&self) -> Vec<u64> {
        let commands = self.0.commands.lock().unwrap_or_else(PoisonError::into_inner);
        let token = |command: &Command| match command {
            Command::Add(token, _) | Command::Wake(token) => *token,
        };
        commands.iter().map(token).collect()
    }

    /// Calls every new handler until it is done.
    pub(crate) fn play(&self) {
        loop {
            let commands = std::mem::take(
                &mut *self.0.commands.lock().unwrap_or_else(PoisonError::into_inner),
            );
            if commands.is_empty() {
                return;
            }
            for command in commands {
                let Command::Add(token, mut handler) = command else { continue };
                let cx = Cx { now: now(), token, remote: self };
                while !matches!(handler.handle(Cause::default(), &cx), Next::Close) {
                    thread::yield_now();
                }
            }
        }
    }
}

/// A running reactor.
#[derive(Debug)]
pub(crate) struct Reactor {
    remote: Remote,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reactor {
    /// Starts a thread. After work it looks for more for `linger` before it sleeps.
    pub(crate) fn start(name: String, linger: Duration) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let shared = Arc::new(Shared {
            commands: Mutex::new(Vec::new()),
            bell: EventFd::new()?,
            stopping: AtomicBool::new(false),
            next_token: AtomicU64::new(FIRST + 1),
        });
        epoll.add(&shared.bell, BELL, Interest::Read)?;
        let remote = Remote(shared);
        let mut run = Run {
            remote: remote.clone(),
            epoll,
            entries: FxHashMap::default(),
            timers: BTreeSet::new(),
            again: Vec::new(),
            called_again: Vec::new(),
            taken: Vec::new(),
            due: Vec::new(),
            linger,
            linger_until: Timestamp::default(),
        };
        let thread = thread::spawn(name, move || run.run())?;
        Ok(Self { remote, thread: Mutex::new(Some(thread)) })
    }

    pub(crate) fn remote(&self) -> &Remote {
        &self.remote
    }

    /// Stops the thread; its handlers are dropped there. Idempotent.
    pub(crate) fn stop(&self) {
        {
            let _commands = self.remote.0.commands.lock().unwrap_or_else(PoisonError::into_inner);
            self.remote.0.stopping.store(true, Ordering::SeqCst);
        }
        self.remote.0.bell.signal();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            if thread.thread().id() == thread::current().id() {
                // The last handle of an agent was dropped by a handler of this very thread: it
                // ends by itself when that handler returns.
                return;
            }
            // A panic of the thread was reported by its hook; there is nobody to tell again.
            let _ = thread.join();
        }
    }

    /// Forgets the thread without joining it: in a forked child it does not exist.
    pub(crate) fn abandon(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        std::mem::forget(thread);
    }
}

const BELL: u64 = 0;

/// The token of the handler whose deadline goes before everything else that is due: before
/// descriptors that became ready at the same time, and between any two other handlers. At most one
/// per reactor.
pub(crate) const FIRST: u64 = 1;

/// Commands for which a reactor keeps room, after a burst of more.
const ROOM_KEPT: usize = 1024;

struct Entry {
    handler: Box<dyn Handler>,
    interest: Interest,
    deadline: Option<Timestamp>,
}

struct Run {
    remote: Remote,
    epoll: Epoll,
    entries: FxHashMap<u64, Entry>,
    timers: BTreeSet<(Timestamp, u64)>,
    again: Vec<u64>,
    // Empty between rounds, and kept for their room.
    called_again: Vec<u64>,
    taken: Vec<Command>,
    due: Vec<u64>,
    linger: Duration,
    /// Until when to look for more work before sleeping.
    linger_until: Timestamp,
}

impl Run {
    fn run(&mut self) {
        let mut events: Vec<Event> = Vec::new();
        // Looked at right before every wait: whoever clears the bell after `stop` rang it comes by
        // here before it sleeps.
        while !self.remote.0.stopping.load(Ordering::SeqCst) {
            events.clear();
            let timeout = self.timeout();
            if let Err(e) = self.epoll.wait(&mut events, timeout) {
                tracing::error!(error = %e, "waiting for events failed");
                thread::sleep(Duration::from_millis(10));
            }
            let at = now();
            if !self.linger.is_zero() {
                if !events.is_empty() {
                    self.linger_until = at + self.linger;
                } else if timeout == Some(Duration::ZERO) {
                    // Whoever else wants this processor is to have it.
                    thread::yield_now();
                }
            }
            self.fire_first(at);
            for event in &events {
                if event.token == BELL {
                    self.commands(at);
                } else {
                    self.call(event.token, Cause { ready: event.ready }, at);
                }
            }
            self.fire(at);
            self.call_again(at);
        }
        self.finish();
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.again.is_empty() || now() < self.linger_until {
            return Some(Duration::ZERO);
        }
        self.timers.first().map(|(at, _)| at.saturating_since(now()))
    }

    fn commands(&mut self, at: Timestamp) {
        self.remote.0.bell.clear();
        let mut taken = std::mem::take(&mut self.taken);
        {
            let mut queue = self.remote.0.commands.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::swap(&mut *queue, &mut taken);
        }
        for command in taken.drain(..) {
            match command {
                Command::Add(token, handler) => self.add(token, handler, at),
                Command::Wake(token) => self.call(token, Cause::default(), at),
            }
        }
        taken.shrink_to(ROOM_KEPT);
        self.taken = taken;
    }

    fn call_again(&mut self, at: Timestamp) {
        let mut tokens = std::mem::take(&mut self.called_again);
        std::mem::swap(&mut self.again, &mut tokens);
        for token in tokens.drain(..) {
            self.call(token, Cause::default(), at);
        }
        self.called_again = tokens;
    }

    fn add(&mut self, token: u64, handler: Box<dyn Handler>, at: Timestamp) {
        if let Some(fd) = handler.fd()
            && let Err(e) = self.epoll.add(fd, token, Interest::None)
        {
            tracing::error!(error = %e, "a descriptor can't be watched");
            return;
        }
        self.entries.insert(token, Entry { handler, interest: Interest::None, deadline: None });
        self.call(token, Cause::default(), at);
    }

    fn fire_first(&mut self, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(&FIRST)
            && let Some(due) = entry.deadline.take_if(|due| *due <= now)
        {
            self.timers.remove(&(due, FIRST));
            self.call(FIRST, Cause::default(), now);
        }
    }

    fn fire(&mut self, now: Timestamp) {
        // Each that is due once: one that asks to be called at a time that has passed must not
        // keep the others, and the descriptors, from having their turn.
        let mut due = std::mem::take(&mut self.due);
        while let Some(&(at, token)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            due.push(token);
            if let Some(entry) = self.entries.get_mut(&token) {
                entry.deadline = None;
            }
        }
        for token in due.drain(..) {
            self.call(token, Cause::default(), now);
        }
        self.due = due;
    }

    /// Calls a handler; `at` is when the wait for what it is called for ended.
    fn call(&mut self, token: u64, cause: Cause, at: Timestamp) {
        if token != FIRST {
            // Between any two: on a machine with too much to do, one round may take seconds.
            self.fire_first(now());
        }
        let Some(entry) = self.entries.get_mut(&token) else { return };
        let cx = Cx { now: at, token, remote: &self.remote };
        match entry.handler.handle(cause, &cx) {
            Next::Wait { interest, deadline } => {
                if deadline != entry.deadline {
                    if let Some(old) = entry.deadline {
                        self.timers.remove(&(old, token));
                    }
                    if let Some(new) = deadline {
                        self.timers.insert((new, token));
                    }
                    entry.deadline = deadline;
                }
                if interest != entry.interest {
                    entry.interest = interest;
                    if let Some(fd) = entry.handler.fd()
                        && let Err(e) = self.epoll.modify(fd, token, interest)
                    {
                        tracing::error!(error = %e, "a descriptor can't be watched any more");
                        drop(self.remove(token));
                    }
                }
            }
            Next::Again => self.again.push(token),
            Next::Close => drop(self.remove(token)),
            Next::Detach => {
                if let Some(handler) = self.remove(token) {
                    handler.detached(&Cx { now: now(), token, remote: &self.remote });
                }
            }
        }
    }

    fn remove(&mut self, token: u64) -> Option<Box<dyn Handler>> {
        let entry = self.entries.remove(&token)?;
        if let Some(deadline) = entry.deadline {
            self.timers.remove(&(deadline, token));
        }
        if let Some(fd) = entry.handler.fd() {
            // Others may hold the socket too, so closing it would not stop the watching.
            let _ = self.epoll.delete(fd);
        }
        Some(entry.handler)
    }

    fn finish(&mut self) {
        self.entries.clear();
        self.timers.clear();
        let commands = {
            let mut queue = self.remote.0.commands.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *queue)
        };
        drop(commands);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    struct Probe {
        calls: mpsc::Sender<bool>,
        deadline: Option<Duration>,
        due: Option<Timestamp>,
    }

    impl Handler for Probe {
        fn fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }

        fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
            let is_due = self.due.is_some_and(|due| cx.now >= due);
            let _ = self.calls.send(is_due);
            if is_due {
                return Next::Close;
            }
            self.due = self.deadline.map(|after| cx.now + after);
            Next::Wait { interest: Interest::None, deadline: self.due }
        }
    }

    /// Asks to be called at a time that has passed.
    struct Late;

    impl Handler for Late {
        fn fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }

        fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
            Next::Wait { interest: Interest::None, deadline: Some(cx.now) }
        }
    }

    #[test]
    fn a_deadline_that_has_passed_keeps_nobody_from_having_a_turn() {
        let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
        reactor.remote().add(reactor.remote().token(), Box::new(Late));
        let (calls, called) = mpsc::channel();
        let other = Probe { calls, deadline: None, due: None };
        reactor.remote().add(reactor.remote().token(), Box::new(other));
        assert_eq!(called.recv_timeout(Duration::from_secs(5)), Ok(false));
        reactor.stop();
    }

    #[test]
    fn a_handler_is_called_at_once_on_every_wake_and_at_its_deadline() {
        let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
        let (calls, called) = mpsc::channel();
        let token = reactor.remote().token();
        let deadline = Some(Duration::from_millis(50));
        reactor.remote().add(token, Box::new(Probe { calls, deadline, due: None }));
        let wait = Duration::from_secs(5);
        assert_eq!(called.recv_timeout(wait), Ok(false), "on arrival");
        reactor.remote().wake(token);
        assert_eq!(called.recv_timeout(wait), Ok(false), "woken");
        assert_eq!(called.recv_timeout(wait), Ok(true), "deadline");
        assert!(called.recv_timeout(wait).is_err(), "closed: the sender is gone");
        reactor.stop();
    }

    #[test]
    fn a_stopped_reactor_drops_what_it_is_given() {
        let reactor = Reactor::start("test".into(), Duration::ZERO).expect("descriptors are there");
        reactor.stop();
        let (calls, called) = mpsc::channel();
        reactor.remote().add(9, Box::new(Probe { calls, deadline: None, due: None }));
        assert!(called.recv().is_err());
    }
}
