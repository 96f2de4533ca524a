//! Prompts on offer, between the agents of engines: the driver of [`kvferry_proto::directory`].
//!
//! A message is handled on the agent's control thread, which also sends what follows from it. The directory's own thread
//! keeps the time and opens sessions; it sleeps until something is due. A name is looked up on a thread of its own, one at
//! a time for each publisher: the name service of one must not delay the lease of another. No call waits for a peer.
//!
//! The lock is held while messages are queued, so that they leave in the order of the machines' actions, and over no call
//! that may call back: sessions are opened and ended without it.

use crate::address::is_literal;
use crate::clock::now;
use crate::wakeup::Wakeup;
use kvferry::{Agent, Channel, Error, ErrorKind, Message, MessageHandler, Peer, Watch};
use kvferry_proto::Origin;
use kvferry_proto::Timestamp;
use kvferry_proto::directory::{
    ContentKey, DirectoryMessage, Found, Limits, Place, Publisher, PublisherAction, Subscriber,
    SubscriberAction,
};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{HandoffId, PeerId, Refusal};
use kvferry_sys::fd;
use kvferry_sys::sync::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;
use thiserror::Error;

/// Settings of a [`Directory`].
#[derive(Clone, Debug)]
pub struct DirectoryConfig {
    /// This engine's incarnation.
    pub engine: EngineId,
    /// Where the agent of this engine's rank 0 listens, if other engines may follow this one.
    pub publishes: Option<String>,
    /// `host:port` of the publishers that this engine follows.
    pub follows: Vec<String>,
    /// Bounds of the protocol.
    pub limits: Limits,
}

/// A directory can't be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The agent has a message handler already.
    #[error(transparent)]
    Agent(#[from] Error),
    /// There are no more threads.
    #[error("the directory's thread can't be started: {0}")]
    Thread(#[source] std::io::Error),
}

/// Tells followers which prompts this engine has on offer, and finds those of the engines that it follows.
///
/// Calls may be made from any thread and return at once. In a forked child they do nothing. Dropping it ends it.
pub struct Directory {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    forks: u32,
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Directory").field("agent", &self.shared.agent).finish_non_exhaustive()
    }
}

struct Shared {
    agent: Agent,
    /// Addresses of the publishers, in the order of their numbers.
    follows: Vec<String>,
    state: Mutex<State>,
    wakeup: Wakeup,
}

struct State {
    /// `None` if this engine does not publish.
    publisher: Option<Publisher>,
    subscriber: Subscriber,
    /// Sessions whose peers have asked to follow, by the publisher's number, and their numbers.
    followers: FxHashMap<PeerId, Channel>,
    numbers: FxHashMap<Channel, PeerId>,
    last: u64,
    /// Sessions to the publishers, in the order of their numbers.
    sessions: Vec<Session>,
    /// How often an engine was not admitted as a follower.
    refused: u64,
    /// When the thread wakes up by itself.
    due: Option<Timestamp>,
    closed: bool,
}

#[derive(Default)]
struct Session {
    channel: Option<Channel>,
    /// The heartbeat, while an answer is due.
    watch: Option<Watch>,
    /// The last failure was logged; the next one is not, until a session is there again.
    is_failure_logged: bool,
}

/// What is done without the lock.
#[derive(Default)]
struct Later {
    connect: Vec<Place>,
    close: Vec<(Channel, Error)>,
}

struct Handler(Weak<Shared>);

impl Directory {
    /// Starts following and being followed over the agent's sessions. It receives the agent's messages from now on.
    ///
    /// # Errors
    /// [`DirectoryError::Agent`] with `InvalidArgument` if the agent has a message handler already;
    /// [`DirectoryError::Thread`].
    pub fn start(agent: &Agent, config: DirectoryConfig) -> Result<Self, DirectoryError> {
        let DirectoryConfig { engine, publishes, follows, limits } = config;
        let publisher = publishes.map(|address| Publisher::new(engine, address, limits.clone()));
        let state = State {
            publisher,
            subscriber: Subscriber::new(engine, follows.len(), limits, now()),
            followers: FxHashMap::default(),
            numbers: FxHashMap::default(),
            last: 0,
            sessions: follows.iter().map(|_| Session::default()).collect(),
            refused: 0,
            due: None,
            closed: false,
        };
        let (state, wakeup) = (Mutex::new(state), Wakeup::default());
        let shared = Arc::new(Shared { agent: agent.clone(), follows, state, wakeup });
        agent.set_message_handler(Arc::new(Handler(Arc::downgrade(&shared))))?;
        let runner = Arc::clone(&shared);
        let thread = kvferry_sys::thread::spawn("kvferry-directory".into(), move || runner.run())
            .map_err(DirectoryError::Thread)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), forks: fd::forks() })
    }

    /// Tells all followers that a handoff of this engine's ranks has a prompt, until it is retracted.
    ///
    /// # Errors
    /// Those of [`Publisher::publish`]; [`Refusal::Misuse`] if this engine does not publish.
    pub fn publish(&self, key: ContentKey, transfer: &HandoffId) -> Result<(), Refusal> {
        self.change(Err(Refusal::Misuse("the directory was forked")), |state, now| {
            let publisher = state.publisher.as_mut();
            let publisher = publisher.ok_or(Refusal::Misuse("this engine does not publish"))?;
            publisher.publish(key, transfer, now)
        })
    }

    /// The handoff has ended. Nothing happens if it is not on offer.
    pub fn retract(&self, transfer: &HandoffId) {
        self.change((), |state, _| {
            if let Some(publisher) = &mut state.publisher {
                publisher.retract(transfer);
            }
        });
    }

    /// Takes the newest offer of a prompt, of a publisher that is not paused. `None` if there is none.
    pub fn take(&self, key: &ContentKey) -> Option<Found> {
        self.change(None, |state, now| state.subscriber.take(key, now))
    }

    /// A fetch from a publisher has taken a part of the `whole` time of a look-up, and has no result. Returns for how
    /// long nothing is taken from the publisher, if it had at least half of that time.
    pub fn failed(&self, place: Place, took: Duration, whole: Duration) -> Option<Duration> {
        self.change(None, |state, now| state.subscriber.failed(place, took, whole, now))
    }

    /// A fetch from a publisher has succeeded.
    pub fn worked(&self, place: Place) {
        self.change((), |state, _| state.subscriber.worked(place));
    }

    /// How many engines follow this one. 0 in a fork.
    pub fn followers(&self) -> usize {
        self.change(0, |state, _| state.publisher.as_ref().map_or(0, Publisher::followers))
    }

    /// How often an engine was not admitted as a follower, or lost its place to another one.
    pub fn refused(&self) -> u64 {
        self.change(0, |state, _| state.refused)
    }

    /// Counts of what is kept, by name. None in a fork.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        self.change(Vec::new(), |state, _| {
            let publisher = state.publisher.as_ref().map(Publisher::gauges);
            publisher.into_iter().flatten().chain(state.subscriber.gauges()).collect()
        })
    }

    /// Ends it: nothing is offered or heard any more. May be called again.
    pub fn close(&self) {
        if self.is_forked() {
            return;
        }
        self.shared.state.lock().closed = true;
        self.shared.wakeup.wake();
        if let Some(thread) = self.thread.lock().take() {
            // It panics only on a broken invariant, and the panic has been reported.
            drop(thread.join());
        }
    }

    fn is_forked(&self) -> bool {
        fd::forked_since(self.forks)
    }

    /// Changes the machines, and has that carried out. `otherwise` is returned in a fork, whose lock may be held for
    /// ever.
    fn change<T>(&self, otherwise: T, change: impl FnOnce(&mut State, Timestamp) -> T) -> T {
        if self.is_forked() {
            return otherwise;
        }
        let mut state = self.shared.state.lock();
        let changed = change(&mut state, now());
        self.shared.carry_out(state);
        changed
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if !self.is_forked() {
            self.close();
        } else {
            std::mem::forget(self.thread.get_mut().take());
        }
    }
}

impl Shared {
    fn address(&self, place: Place) -> &str {
        self.follows.get(place.0).map_or("", String::as_str)
    }

    /// Keeps the time.
    fn run(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            if state.closed {
                return;
            }
            let now = now();
            if let Some(publisher) = &mut state.publisher {
                publisher.expire(now);
            }
            state.subscriber.expire(now);
            self.carry_out(state);
            let mut state = self.state.lock();
            state.due = state.next_timeout();
            let left = state.due.map(|due| due.saturating_since(crate::clock::now()));
            drop(state);
            self.wakeup.wait(left);
        }
    }

    /// Does what the machines ask for.
    fn carry_out(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let mut later = Later::default();
        let mut sent: Vec<Channel> = Vec::new();
        state.take_actions(self, &mut later, &mut sent);
        sent.iter().for_each(Channel::flush);
        let is_earlier = match (state.next_timeout(), state.due) {
            (Some(next), Some(due)) => next < due,
            (next, _) => next.is_some(),
        };
        drop(state);
        if is_earlier {
            self.wakeup.wake();
        }
        for (channel, error) in later.close {
            channel.close(error);
        }
        for place in later.connect {
            self.connect(place);
        }
    }

    fn connect(self: &Arc<Self>, place: Place) {
        let address = self.address(place);
        if is_literal(address) {
            return self.open(place, self.agent.peer(address));
        }
        let (shared, name) = (Arc::downgrade(self), address.to_owned());
        let agent = self.agent.clone();
        let look_up = move || {
            let found = agent.peer(name.as_str());
            if let Some(shared) = shared.upgrade() {
                shared.open(place, found);
            }
        };
        if let Err(error) = kvferry_sys::thread::spawn("kvferry-lookup".into(), look_up) {
            let what = "a thread that looks a name up can't be started";
            self.opened(place, Err(Error::new(ErrorKind::Internal, what).with("error", error)));
        }
    }

    fn open(self: &Arc<Self>, place: Place, peer: kvferry::Result<Peer>) {
        let shared = Arc::downgrade(self);
        match peer {
            Ok(peer) => peer.open_channel(Box::new(move |opened| {
                if let Some(shared) = shared.upgrade() {
                    shared.opened(place, opened);
                }
            })),
            Err(error) => self.opened(place, Err(error)),
        }
    }

    fn opened(self: &Arc<Self>, place: Place, opened: kvferry::Result<Channel>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        // The end of a session that has ended by now would not be reported again.
        let opened = opened.and_then(|channel| channel.end().cloned().map_or(Ok(channel), Err));
        match opened {
            Ok(channel) => {
                let origin = Origin::from(channel.peer_ip());
                state.sessions[place.0].channel = Some(channel);
                state.subscriber.opened(place, origin, now());
            }
            Err(error) => self.lost(&mut state, place, &error),
        }
        self.carry_out(state);
    }

    /// There is no session to a publisher.
    fn lost(&self, state: &mut State, place: Place, error: &Error) {
        let session = &mut state.sessions[place.0];
        (session.channel, session.watch) = (None, None);
        if !std::mem::replace(&mut session.is_failure_logged, true) {
            let publisher = self.address(place);
            tracing::warn!(publisher, %error, "an engine that prefills can't be reached; it is tried again");
        }
        state.subscriber.lost(place, now());
    }
}

impl State {
    fn next_timeout(&self) -> Option<Timestamp> {
        let publisher = self.publisher.as_ref().and_then(Publisher::next_timeout);
        publisher.into_iter().chain(self.subscriber.next_timeout()).min()
    }

    /// Queues the messages of the machines' actions, and leaves what may call back for later.
    fn take_actions(&mut self, shared: &Shared, later: &mut Later, sent: &mut Vec<Channel>) {
        loop {
            if let Some(action) = self.subscriber.poll() {
                self.follow(shared, action, later, sent);
            } else if let Some(action) = self.publisher.as_mut().and_then(Publisher::poll) {
                self.tell(action, later, sent);
            } else {
                return;
            }
        }
    }

    fn follow(
        &mut self,
        shared: &Shared,
        action: SubscriberAction,
        later: &mut Later,
        sent: &mut Vec<Channel>,
    ) {
        match action {
            SubscriberAction::Connect { place } => later.connect.push(place),
            SubscriberAction::Send { place, message } => {
                if let Some(channel) = &self.sessions[place.0].channel {
                    queue(channel, &message, later, sent);
                }
            }
            SubscriberAction::Watch { place, on } => {
                let session = &mut self.sessions[place.0];
                session.watch = session.channel.as_ref().filter(|_| on).map(Channel::watch);
            }
            SubscriberAction::Disconnect { place } => {
                let what = "the peer does not answer whether it tells of prompts";
                let error =
                    Error::new(ErrorKind::Deadline, what).with("peer", shared.address(place));
                if let Some(channel) = self.sessions[place.0].channel.clone() {
                    later.close.push((channel, error.clone()));
                }
                shared.lost(self, place, &error);
            }
            SubscriberAction::Refused { place, code, detail } => {
                let publisher = shared.address(place);
                kvferry::warn_limited!(publisher, %code, detail, "an engine that prefills does not tell of its prompts");
            }
        }
    }

    fn tell(&mut self, action: PublisherAction, later: &mut Later, sent: &mut Vec<Channel>) {
        match action {
            PublisherAction::Send { to, message } => {
                if let Some(channel) = self.followers.get(&to) {
                    queue(channel, &message, later, sent);
                }
            }
            PublisherAction::Refused { peer } => {
                self.refused += 1;
                let follower = self.followers.get(&peer).map_or("", Channel::peer_name);
                kvferry::warn_limited!(
                    follower,
                    "an engine that decodes is not told of prompts: too many follow this one, and most of its network"
                );
            }
            PublisherAction::Disconnect { peer } => {
                if let Some(channel) = self.followers.remove(&peer) {
                    self.numbers.remove(&channel);
                    let what = "the peer has not said again that it follows";
                    later.close.push((channel, Error::new(ErrorKind::Deadline, what)));
                }
            }
        }
    }

    /// The number of a session whose peer follows, or asks to.
    fn number(&mut self, channel: &Channel) -> PeerId {
        if let Some(known) = self.numbers.get(channel) {
            return *known;
        }
        self.last += 1;
        let number = PeerId(self.last);
        self.numbers.insert(channel.clone(), number);
        self.followers.insert(number, channel.clone());
        number
    }

    fn place(&self, channel: &Channel) -> Option<Place> {
        let is_it = |session: &Session| session.channel.as_ref() == Some(channel);
        self.sessions.iter().position(is_it).map(Place)
    }
}

/// Queues a message. A peer that takes its messages too slowly loses its session; the next one begins with all that
/// matters.
fn queue(
    channel: &Channel,
    message: &DirectoryMessage,
    later: &mut Later,
    sent: &mut Vec<Channel>,
) {
    match channel.queue_if_room(message.encode()) {
        Ok(()) if sent.contains(channel) => {}
        Ok(()) => sent.push(channel.clone()),
        // The end of the session is reported.
        Err(_) if channel.end().is_some() => {}
        Err(error) => later.close.push((channel.clone(), error)),
    }
}

impl MessageHandler for Handler {
    /// A session means nothing before a peer follows over it.
    fn began(&self, _channel: &Channel) {}

    fn received(&self, channel: &Channel, message: Message<'_>) {
        let Some(shared) = self.0.upgrade() else { return };
        let message = match DirectoryMessage::decode(&message) {
            Ok(message) => message,
            Err(error) => {
                let peer = channel.peer_name();
                return kvferry::warn_limited!(peer, %error, "skipped a malformed message");
            }
        };
        let mut state = shared.state.lock();
        if state.closed {
            return;
        }
        if matches!(message, DirectoryMessage::Follow(_)) {
            let (number, origin) = (state.number(channel), Origin::from(channel.peer_ip()));
            if let Some(publisher) = &mut state.publisher {
                publisher.receive(number, origin, &message, now());
            }
        } else if let Some(place) = state.place(channel) {
            if matches!(message, DirectoryMessage::Followed(_)) {
                state.sessions[place.0].is_failure_logged = false;
            }
            state.subscriber.receive(place, message, now());
        }
        shared.carry_out(state);
    }

    fn ended(&self, channel: &Channel, error: &Error) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.state.lock();
        if let Some(number) = state.numbers.remove(channel) {
            state.followers.remove(&number);
            if let Some(publisher) = &mut state.publisher {
                publisher.lost(number);
            }
        }
        if let Some(place) = state.place(channel) {
            shared.lost(&mut state, place, error);
        }
        shared.carry_out(state);
    }
}
