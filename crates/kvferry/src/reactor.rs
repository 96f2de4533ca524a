//! A thread that waits for descriptors, timers and wake-ups, and calls their handlers.
//!
//! The control thread and every I/O thread are reactors. A handler never blocks; it does a bounded
//! amount of work, returns what it waits for, and is called again. No wake-up is lost: a command is
//! queued before the wake-up descriptor is signalled, and the descriptor is cleared before the
//! queue is read.
//!
//! A handler that panics is dropped, which fails its work; the thread goes on.

use crate::callback::contain;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::poll::{Epoll, EventFd};
use crate::sync::thread::{self, JoinHandle, ThreadId};
use crate::sync::{Arc, Mutex};
use kvferry_proto::Timestamp;
use kvferry_sys::clock;
use kvferry_sys::poll::{Event, Interest, Ready};
use rustc_hash::FxHashMap;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The agent's clock: `CLOCK_BOOTTIME`.
pub fn now() -> Timestamp {
    Timestamp::from_nanos(clock::boottime_ns())
}

/// Time for which a thread that moves data polls before it sleeps. Waking a sleeping processor
/// costs 10 to 100 µs on virtual machines, as much as moving a small batch; polling costs at most
/// this much per burst of work, and nothing when idle.
pub(crate) const LINGER: Duration = Duration::from_micros(50);

/// The reason for a handler's call: its descriptor is ready. Nothing is ready if the handler is
/// new, was woken, or its deadline has passed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cause {
    /// The events of the handler's descriptor.
    pub ready: Ready,
}

/// Connections that a listener's handler accepts in one call, so that other handlers go on.
pub const ACCEPTS_PER_CALL: usize = 64;

/// Action that a handler asks the reactor for when a call returns.
#[derive(Debug)]
pub enum Next {
    /// Call it again on one of these events.
    Wait {
        /// Events of its descriptor.
        interest: Interest,
        /// The time of the next call if no event comes.
        deadline: Option<Timestamp>,
    },
    /// Call it again soon, after the other handlers.
    Again,
    /// Drop it.
    Close,
    /// Remove it and pass it to [`Handler::detached`].
    Detach,
}

/// The context of a handler's call.
#[derive(Debug)]
pub struct Cx<'a> {
    /// The time at which the reactor's wait ended.
    pub now: Timestamp,
    /// The handler's token.
    pub token: u64,
    /// The reactor that calls the handler.
    pub remote: &'a Remote,
}

/// A handler that a reactor calls. Its descriptor never changes. A handler that panics is dropped.
pub trait Handler: Send {
    /// The descriptor that [`Next::Wait`] waits for, if there is one.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Does a bounded amount of work without blocking; returns what the handler waits for.
    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next;

    /// Called after [`Next::Detach`], once the descriptor is not watched any more.
    fn detached(self: Box<Self>, _cx: &Cx<'_>) {}
}

enum Command {
    Add(u64, Box<dyn Handler>),
    Wake(u64),
}

struct Shared {
    commands: Mutex<Vec<Command>>,
    wakeup: EventFd,
    stopping: AtomicBool,
    next_token: AtomicU64,
    /// Handlers that were added and not dropped.
    handlers: AtomicUsize,
}

/// A handle to a reactor, for any thread.
#[derive(Clone)]
pub struct Remote(Arc<Shared>);

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Remote")
    }
}

impl Remote {
    /// A token for a handler that will be added.
    pub fn token(&self) -> u64 {
        self.0.next_token.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a handler, which is called once at once. After the reactor has stopped, the handler is
    /// dropped.
    pub fn add(&self, token: u64, handler: Box<dyn Handler>) {
        self.0.handlers.fetch_add(1, Ordering::Relaxed);
        self.send(Command::Add(token, handler));
    }

    /// Handlers that the reactor has, or that wait to be added.
    fn load(&self) -> usize {
        self.0.handlers.load(Ordering::Relaxed)
    }

    /// A callback that calls a handler soon, from any thread.
    pub fn waker(&self, token: u64) -> Arc<dyn Fn() + Send + Sync> {
        let remote = self.clone();
        Arc::new(move || remote.wake(token))
    }

    /// Calls a handler soon. Tokens of dropped handlers are ignored.
    pub fn wake(&self, token: u64) {
        self.send(Command::Wake(token));
    }

    fn send(&self, command: Command) {
        let mut commands = self.0.commands.lock();
        if self.0.stopping.load(Ordering::SeqCst) {
            drop(commands);
            // Dropping the handler may take other locks, so this one is released first.
            drop(command);
            return;
        }
        let ring = commands.is_empty();
        commands.push(command);
        drop(commands);
        if ring {
            self.0.wakeup.signal();
        }
    }
}

#[cfg(all(loom, test))]
impl Remote {
    /// A reactor without a thread: a model makes its calls with [`Remote::play`].
    pub(crate) fn without_thread() -> Self {
        Self(Arc::new(Shared {
            commands: Mutex::new(Vec::new()),
            wakeup: EventFd::new().expect("a model's event descriptor"),
            stopping: AtomicBool::new(false),
            next_token: AtomicU64::new(FIRST + 1),
            handlers: AtomicUsize::new(0),
        }))
    }

    /// The tokens of the handlers to be called, in order.
    pub(crate) fn wakes(&self) -> Vec<u64> {
        let commands = self.0.commands.lock();
        let token = |command: &Command| match command {
            Command::Add(token, _) | Command::Wake(token) => *token,
        };
        commands.iter().map(token).collect()
    }

    /// Calls every new handler until it ends.
    pub(crate) fn play(&self) {
        loop {
            let commands = std::mem::take(&mut *self.0.commands.lock());
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

/// Handles to an agent's threads.
#[derive(Debug)]
pub struct Threads {
    /// Runs sessions, handshakes and heartbeats.
    pub control: Remote,
    /// The I/O threads (inbound streams, asynchronous transfers), then the threads that only copy.
    all: Vec<Remote>,
    io: usize,
    next: AtomicUsize,
}

impl Threads {
    /// `copy` are threads besides the I/O threads, for shares that keep a core busy by themselves.
    pub(crate) fn new(control: Remote, io: Vec<Remote>, copy: Vec<Remote>) -> Self {
        let (count, mut all) = (io.len(), io);
        all.extend(copy);
        Self { control, all, io: count, next: AtomicUsize::new(0) }
    }

    /// The I/O thread with the fewest handlers; round robin among equals.
    pub fn io(&self) -> Remote {
        self.least_loaded(&self.all[..self.io])
    }

    /// The thread with the fewest handlers among all, including those that only copy.
    pub(crate) fn copier(&self) -> Remote {
        self.least_loaded(&self.all)
    }

    fn least_loaded(&self, threads: &[Remote]) -> Remote {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let turn = (0..threads.len()).map(|i| &threads[(first + i) % threads.len()]);
        turn.min_by_key(|remote| remote.load()).expect("an agent has I/O threads").clone()
    }
}

#[derive(Debug)]
pub(crate) struct Reactor {
    remote: Remote,
    id: ThreadId,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reactor {
    /// Starts a thread. After work it polls for `linger` before it sleeps.
    pub(crate) fn start(name: String, linger: Duration) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let shared = Arc::new(Shared {
            commands: Mutex::new(Vec::new()),
            wakeup: EventFd::new()?,
            stopping: AtomicBool::new(false),
            next_token: AtomicU64::new(FIRST + 1),
            handlers: AtomicUsize::new(0),
        });
        epoll.add(&shared.wakeup, WAKEUP, Interest::Read)?;
        let remote = Remote(shared);
        let mut run = Run {
            remote: remote.clone(),
            epoll,
            entries: FxHashMap::default(),
            timers: BTreeSet::new(),
            again: VecDeque::new(),
            taken: Vec::new(),
            due: Vec::new(),
            linger,
            linger_until: Timestamp::default(),
        };
        let thread = thread::spawn(name, move || run.run())?;
        Ok(Self { remote, id: thread.thread().id(), thread: Mutex::new(Some(thread)) })
    }

    /// Whether the calling thread is this reactor's.
    pub(crate) fn is_current(&self) -> bool {
        thread::current().id() == self.id
    }

    pub(crate) fn remote(&self) -> &Remote {
        &self.remote
    }

    /// Stops the thread, which drops its handlers. Idempotent.
    #[cfg(test)]
    pub(crate) fn stop(&self) {
        assert!(self.stop_by(Timestamp::from_nanos(u64::MAX)), "it ends");
    }

    /// Has the thread end soon. Does not wait for it.
    pub(crate) fn tell_to_stop(&self) {
        {
            let _commands = self.remote.0.commands.lock();
            self.remote.0.stopping.store(true, Ordering::SeqCst);
        }
        self.remote.0.wakeup.signal();
    }

    /// As [`Reactor::stop`], but leaves a thread behind that has not ended by `until`: it hangs in a copy.
    /// Returns whether the thread has ended, or is this one.
    pub(crate) fn stop_by(&self, until: Timestamp) -> bool {
        self.tell_to_stop();
        let thread = self.thread.lock().take();
        // If a handler of this thread dropped the last handle of the agent, the thread ends when
        // that handler returns.
        if let Some(thread) = thread
            && !self.is_current()
        {
            while !crate::sync::thread::is_finished(&thread) {
                if now() >= until {
                    return false;
                }
                std::thread::sleep(JOIN_EVERY);
            }
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
        true
    }

    /// Drops the thread handle without joining: in a forked child the thread does not exist. Takes
    /// no lock, because a thread of the parent may have held it at the fork.
    pub(crate) fn abandon(&mut self) {
        let thread = self.thread.get_mut().take();
        std::mem::forget(thread);
    }
}

/// Interval at which a caller that joins a thread checks whether it has ended.
const JOIN_EVERY: Duration = Duration::from_micros(100);

const WAKEUP: u64 = 0;

/// The token of the handler whose deadline comes first: before descriptors that became ready at the
/// same time, and between any two other handlers. At most one per reactor.
pub(crate) const FIRST: u64 = 1;

/// Capacity that the queue of commands keeps after a burst.
const COMMANDS_KEPT: usize = 1024;

struct Entry {
    handler: Box<dyn Handler>,
    interest: Interest,
    deadline: Option<Timestamp>,
    /// The handler got the event that the peer closed its side, and still waits to write. Its
    /// descriptor is then watched without that event, which the kernel would report again and again.
    half_closed: bool,
    /// The handler's token is in `Run::again`, where it must be once: otherwise a handler whose
    /// descriptor is ready, too, would get one more turn in every round.
    again: bool,
}

struct Run {
    remote: Remote,
    epoll: Epoll,
    entries: FxHashMap<u64, Entry>,
    timers: BTreeSet<(Timestamp, u64)>,
    /// Handlers that have more work, in the order in which they said so.
    again: VecDeque<u64>,
    // Empty between rounds; kept for their capacity.
    taken: Vec<Command>,
    due: Vec<u64>,
    linger: Duration,
    /// Polls until this time before it sleeps.
    linger_until: Timestamp,
}

impl Run {
    fn run(&mut self) {
        let mut events: Vec<Event> = Vec::new();
        // Checked before every wait: a thread that clears the wake-up of `stop` comes back here
        // before it sleeps.
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
                    // Lets other threads use this processor.
                    thread::yield_now();
                }
            }
            self.fire_first(at);
            // Where more descriptors are ready than a wait reports, the wake-up may be among the others.
            if events.len() >= Epoll::EVENTS_MAX {
                self.commands(at);
            }
            for event in &events {
                if event.token == WAKEUP {
                    self.commands(at);
                } else {
                    self.call(event.token, Cause { ready: event.ready }, at);
                }
            }
            self.fire(at);
            self.call_again(at);
        }
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.again.is_empty() || now() < self.linger_until {
            return Some(Duration::ZERO);
        }
        self.timers.first().map(|(at, _)| at.saturating_since(now()))
    }

    fn commands(&mut self, at: Timestamp) {
        self.remote.0.wakeup.clear();
        let mut taken = std::mem::take(&mut self.taken);
        {
            let mut queue = self.remote.0.commands.lock();
            std::mem::swap(&mut *queue, &mut taken);
        }
        for command in taken.drain(..) {
            match command {
                Command::Add(token, handler) => self.add(token, handler, at),
                Command::Wake(token) => self.call(token, Cause::default(), at),
            }
        }
        taken.shrink_to(COMMANDS_KEPT);
        self.taken = taken;
    }

    /// Calls as many handlers that have more work as a wait reports descriptors: with all of them, a descriptor that is ready
    /// beside thousands would wait for thousands of turns in each of many rounds.
    fn call_again(&mut self, at: Timestamp) {
        for _ in 0..self.again.len().min(Epoll::EVENTS_MAX) {
            let Some(token) = self.again.pop_front() else { return };
            if let Some(entry) = self.entries.get_mut(&token) {
                entry.again = false;
            }
            self.call(token, Cause::default(), at);
        }
    }

    fn add(&mut self, token: u64, handler: Box<dyn Handler>, at: Timestamp) {
        if let Some(fd) = handler.fd()
            && let Err(e) = self.epoll.add(fd, token, Interest::None)
        {
            tracing::error!(error = %e, "a descriptor can't be watched");
            self.remote.0.handlers.fetch_sub(1, Ordering::Relaxed);
            contain("the end of a handler", || drop(handler));
            return;
        }
        let interest = Interest::None;
        let entry = Entry { handler, interest, deadline: None, half_closed: false, again: false };
        self.entries.insert(token, entry);
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
        // Calls each due handler once: one that asks for a time that has passed must not starve the
        // others and the descriptors.
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

    /// Calls a handler; `at` is when the reactor's wait ended.
    fn call(&mut self, token: u64, cause: Cause, at: Timestamp) {
        if token != FIRST {
            // Between any two handlers: on an overloaded machine, one round may take seconds.
            self.fire_first(now());
        }
        let Some(entry) = self.entries.get_mut(&token) else { return };
        let cx = Cx { now: at, token, remote: &self.remote };
        let next = contain("a handler", || entry.handler.handle(cause, &cx));
        match next.unwrap_or(Next::Close) {
            Next::Wait { interest, deadline } => {
                let mut interest = interest;
                if interest == Interest::Write && (entry.half_closed || cause.ready.peer_closed) {
                    entry.half_closed = true;
                    interest = Interest::WriteOnly;
                }
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
                        self.close(token);
                    }
                }
            }
            Next::Again => {
                if !std::mem::replace(&mut entry.again, true) {
                    self.again.push_back(token);
                }
            }
            Next::Close => self.close(token),
            Next::Detach => {
                if let Some(handler) = self.remove(token) {
                    let cx = Cx { now: now(), token, remote: &self.remote };
                    contain("a handler", || handler.detached(&cx));
                }
            }
        }
    }

    fn close(&mut self, token: u64) {
        let handler = self.remove(token);
        contain("the end of a handler", || drop(handler));
    }

    fn remove(&mut self, token: u64) -> Option<Box<dyn Handler>> {
        let entry = self.entries.remove(&token)?;
        self.remote.0.handlers.fetch_sub(1, Ordering::Relaxed);
        if let Some(deadline) = entry.deadline {
            self.timers.remove(&(deadline, token));
        }
        if let Some(fd) = entry.handler.fd() {
            // Another owner may hold the socket, so closing it here would not end the watching.
            let _ = self.epoll.delete(fd);
        }
        Some(entry.handler)
    }
}

impl Drop for Run {
    /// Drops all handlers, also those in the queue, however the thread ends: no caller may wait for
    /// a handler that will never be called.
    fn drop(&mut self) {
        #[cfg(all(loom, test))]
        if std::thread::panicking() {
            // The model has failed, and loom's locks can't be taken any more.
            return;
        }
        let commands = {
            let mut queue = self.remote.0.commands.lock();
            self.remote.0.stopping.store(true, Ordering::SeqCst);
            std::mem::take(&mut *queue)
        };
        let added = commands.into_iter().filter_map(|command| match command {
            Command::Add(_, handler) => Some(handler),
            Command::Wake(_) => None,
        });
        let entries = std::mem::take(&mut self.entries);
        for handler in entries.into_values().map(|entry| entry.handler).chain(added) {
            contain("the end of a handler", || drop(handler));
        }
    }
}

#[cfg(test)]
mod tests;
