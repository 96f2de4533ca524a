//! Runs the state machine of tasks with an agent.
//!
//! One lock guards the machine. Any thread that holds it carries out what the machine says: messages are
//! queued and transfers are started without waiting. What comes back, from peers and transfers, goes into
//! the inbox, and a thread of the endpoint takes it from there. That thread alone calls the program's
//! callbacks, without the lock.

use crate::failure::{Failure, KVFERRY_IO};
use kvferry::{
    Agent, Batch, Channel, ErrorKind, Message, MessageHandler, Options, Peer, Receipt, Region,
    RemoteRegion, Transfer, Watch,
};
use kvferry_proto::{Origin, Timestamp};
use kvferry_tasks::{Action, Conn, Gauges, Offered, Outcome, RecvId, SendId, Tasks, Wanted};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// Addresses of senders that are remembered.
const PEERS_MAX: usize = 4096;
/// Bytes that ended sessions leave for the endpoint's thread, at most. Those of live sessions are bounded by the
/// peers' windows: a message is acknowledged when that thread has taken it.
const LEFT_BYTES_MAX: usize = 64 * 1024 * 1024;
/// What a message that was left counts beside its bytes, and what an ended session counts: more than they take.
const LEFT_MESSAGE: usize = 512;
const LEFT_SESSION: usize = 16 * 1024;
/// How much longer than its task a read may take. The task stops it at the deadline, and the outcome is
/// that of the task; a deadline of the read's own that comes first would be a failed read.
const AFTER_DEADLINE: Duration = Duration::from_secs(5);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now() -> Timestamp {
    Timestamp::from_nanos(kvferry_sys::clock::boottime_ns())
}

/// Called once with a task's outcome, by the endpoint's thread.
pub(crate) type Done = Box<dyn FnOnce(&Outcome) + Send>;

/// Outcome of a task, once the task has ended.
#[derive(Debug, Default)]
pub(crate) struct End {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

impl End {
    fn set(&self, outcome: Outcome) {
        *lock(&self.outcome) = Some(outcome);
        self.changed.notify_all();
    }

    /// Waits for the end; without a limit if `timeout` is `None`.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut outcome = lock(&self.outcome);
        while outcome.is_none() {
            outcome = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(outcome).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return None,
                Some(left) => {
                    let waited = self.changed.wait_timeout(outcome, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        outcome.clone()
    }
}

/// The place of each part of a receive task, in order; `None` is a part that is not wanted.
pub(crate) type Places = Vec<Option<(Region, u64)>>;

struct Ending {
    end: Arc<End>,
    done: Option<Done>,
}

struct Receiving {
    ending: Ending,
    places: Places,
    read: Option<Transfer>,
    /// The program has freed its handle.
    freed: bool,
}

enum Event {
    Message(Channel, Vec<u8>, Receipt),
    Lost(Channel, String),
    Opened(SendId, Result<Channel, String>),
    ReadEnded(RecvId, Result<(), String>),
    Ended(Done, Outcome),
}

#[derive(Default)]
struct Inbox {
    events: VecDeque<Event>,
    /// Bytes of the messages among `events` whose sessions have ended.
    left_bytes: usize,
    /// Live sessions of which the endpoint's thread has taken an event.
    known: HashSet<Channel>,
    /// Timeouts may have changed.
    poked: bool,
    stops: bool,
}

#[derive(Default)]
struct State {
    tasks: Tasks,
    conns: HashMap<Conn, (Channel, Option<Watch>)>,
    last_conn: u64,
    /// The receivers that sends are to connect to.
    dialing: HashMap<SendId, Peer>,
    /// Senders, by the address that they advertise.
    peers: HashMap<String, Peer>,
    sends: HashMap<SendId, Ending>,
    recvs: HashMap<RecvId, Receiving>,
    closed: bool,
}

#[derive(Default)]
struct Queue {
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

impl Inbox {
    /// A session has ended. Its messages that are still here are dropped if there is too much of such
    /// sessions: what depends on them fails as the session does.
    fn lose(&mut self, channel: &Channel, why: String) {
        let is_known = self.known.remove(channel);
        let counts = |event: &Event| match event {
            Event::Message(of, bytes, _) if of == channel => Some(bytes.len() + LEFT_MESSAGE),
            _ => None,
        };
        let of_session = self.events.iter().filter_map(counts).sum::<usize>() + LEFT_SESSION;
        if self.left_bytes + of_session <= LEFT_BYTES_MAX {
            self.left_bytes += of_session;
        } else {
            self.events.retain(|event| counts(event).is_none());
            let is_opened =
                |event: &Event| matches!(event, Event::Opened(_, Ok(of)) if of == channel);
            if !is_known && !self.events.iter().any(is_opened) {
                // Nothing depends on a session that the thread has heard nothing of.
                return;
            }
        }
        self.events.push_back(Event::Lost(channel.clone(), why));
    }

    fn take(&mut self) -> VecDeque<Event> {
        self.left_bytes = 0;
        for event in &self.events {
            match event {
                // The session has ended, and its end was reported before. The opening shows it.
                Event::Opened(_, Ok(of)) if of.end().is_some() => {}
                Event::Message(of, ..) | Event::Opened(_, Ok(of)) => {
                    self.known.insert(of.clone());
                }
                Event::Lost(of, _) => {
                    self.known.remove(of);
                }
                _ => {}
            }
        }
        std::mem::take(&mut self.events)
    }
}

impl Queue {
    fn push(&self, event: Event) {
        lock(&self.inbox).events.push_back(event);
        self.changed.notify_one();
    }

    fn poke(&self) {
        lock(&self.inbox).poked = true;
        self.changed.notify_one();
    }
}

/// The tasks of an agent.
pub(crate) struct Endpoint {
    agent: Agent,
    state: Mutex<State>,
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: OnceLock<ThreadId>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").finish_non_exhaustive()
    }
}

/// Puts the peers' messages into the inbox.
struct Handler(Weak<Queue>);

impl MessageHandler for Handler {
    fn began(&self, _: &Channel) {}

    fn received(&self, channel: &Channel, message: Message<'_>) {
        if let Some(queue) = self.0.upgrade() {
            let (bytes, receipt) = message.take_later();
            queue.push(Event::Message(channel.clone(), bytes, receipt));
        }
    }

    fn ended(&self, channel: &Channel, error: &kvferry::Error) {
        if let Some(queue) = self.0.upgrade() {
            lock(&queue.inbox).lose(channel, error.to_string());
            queue.changed.notify_one();
        }
    }
}

impl Endpoint {
    pub(crate) fn start(agent: Agent) -> Result<Arc<Self>, Failure> {
        let queue = Arc::<Queue>::default();
        agent.set_message_handler(Arc::new(Handler(Arc::downgrade(&queue))))?;
        let state = Mutex::default();
        let endpoint = Arc::new(Self {
            agent,
            state,
            queue,
            thread: Mutex::default(),
            thread_id: OnceLock::new(),
        });
        let runs = Arc::clone(&endpoint);
        let spawned = kvferry_sys::thread::spawn("kvferry-tasks".to_owned(), move || runs.run());
        let thread = spawned.map_err(|error| {
            Failure::new(KVFERRY_IO, format!("the thread of tasks can't start: {error}"))
        })?;
        let _ = endpoint.thread_id.set(thread.thread().id());
        *lock(&endpoint.thread) = Some(thread);
        Ok(endpoint)
    }

    pub(crate) const fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Starts a send to `peer`.
    pub(crate) fn send(
        &self,
        peer: Peer,
        key: &str,
        (regions, blocks): (Vec<Vec<u8>>, Vec<Offered>),
        budget: Duration,
        done: Option<Done>,
    ) -> Result<(SendId, Arc<End>), Outcome> {
        let mut state = self.open()?;
        let regions = regions.into_iter().map(serde_bytes::ByteBuf::from).collect();
        let id = state.tasks.send(peer.address(), key, regions, blocks, budget, now())?;
        let end = Arc::<End>::default();
        state.sends.insert(id, Ending { end: Arc::clone(&end), done });
        state.dialing.insert(id, peer);
        self.act(&mut state);
        Ok((id, end))
    }

    pub(crate) fn recv(
        &self,
        key: &str,
        wanted: Vec<Wanted>,
        places: Places,
        budget: Duration,
        done: Option<Done>,
    ) -> Result<(RecvId, Arc<End>), Outcome> {
        let mut state = self.open()?;
        let id = state.tasks.recv(key, wanted, budget, now())?;
        let end = Arc::<End>::default();
        let ending = Ending { end: Arc::clone(&end), done };
        state.recvs.insert(id, Receiving { ending, places, read: None, freed: false });
        self.act(&mut state);
        Ok((id, end))
    }

    pub(crate) fn cancel_send(&self, id: SendId) {
        let mut state = lock(&self.state);
        state.tasks.cancel_send(id);
        self.act(&mut state);
    }

    pub(crate) fn cancel_recv(&self, id: RecvId) {
        let mut state = lock(&self.state);
        state.tasks.cancel_recv(id);
        self.act(&mut state);
    }

    pub(crate) fn steal(&self, key: &str) {
        let mut state = lock(&self.state);
        state.tasks.steal(key);
        self.act(&mut state);
    }

    /// Cancels a receive task, waits until nothing writes to its memory, and drops it.
    ///
    /// A callback runs on the endpoint's thread, which is the one that notices the end of the task's read. If a callback
    /// calls this, that thread goes on with its work in here; callbacks that become due meanwhile come after this one.
    pub(crate) fn free(&self, id: RecvId, end: &End) {
        self.forget(id);
        if !self.is_own_thread(std::thread::current().id()) {
            end.wait(None);
            return;
        }
        let mut due = Vec::new();
        while end.wait(Some(Duration::ZERO)).is_none() {
            // The endpoint does not stop before its receive tasks have ended.
            due.extend(self.turn().unwrap_or_default());
        }
        let mut inbox = lock(&self.queue.inbox);
        for (done, outcome) in due.into_iter().rev() {
            inbox.events.push_front(Event::Ended(done, outcome));
        }
    }

    fn forget(&self, id: RecvId) {
        let mut state = lock(&self.state);
        if let Some(receiving) = state.recvs.get_mut(&id) {
            receiving.freed = true;
        }
        state.tasks.forget(id);
        self.act(&mut state);
        if state.tasks.forget(id) {
            state.recvs.remove(&id);
        }
    }

    pub(crate) fn gauges(&self) -> Gauges {
        lock(&self.state).tasks.gauges()
    }

    pub(crate) fn is_own_thread(&self, thread: ThreadId) -> bool {
        self.thread_id.get() == Some(&thread)
    }

    /// Cancels everything, waits until no memory is written, and ends the thread.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let sends: Vec<_> = state.sends.keys().copied().collect();
        sends.iter().for_each(|id| state.tasks.cancel_send(*id));
        let recvs: Vec<_> = state.recvs.keys().copied().collect();
        recvs.iter().for_each(|id| state.tasks.cancel_recv(*id));
        let ends: Vec<_> =
            state.recvs.values().map(|receiving| Arc::clone(&receiving.ending.end)).collect();
        self.act(&mut state);
        drop(state);
        for end in ends {
            end.wait(None);
        }
        lock(&self.queue.inbox).stops = true;
        self.queue.changed.notify_one();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn open(&self) -> Result<MutexGuard<'_, State>, Outcome> {
        let state = lock(&self.state);
        if state.closed {
            let what = "the tasks of this agent were freed";
            return Err(Outcome::new(kvferry_tasks::Code::Invalid, what));
        }
        Ok(state)
    }

    /// The endpoint's thread.
    fn run(&self) {
        while let Some(ended) = self.turn() {
            for (done, outcome) in ended {
                done(&outcome);
            }
        }
    }

    /// Waits for events and handles them. Returns the callbacks that are due; `None` when the thread has to
    /// stop.
    fn turn(&self) -> Option<Vec<(Done, Outcome)>> {
        let due = lock(&self.state).tasks.next_timeout();
        let left = due.map(|due| due.saturating_since(now()));
        let mut inbox = lock(&self.queue.inbox);
        if inbox.events.is_empty() && !inbox.poked && !inbox.stops {
            inbox = match left {
                Some(left) => {
                    let waited = self.queue.changed.wait_timeout(inbox, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.queue.changed.wait(inbox).unwrap_or_else(PoisonError::into_inner),
            };
        }
        inbox.poked = false;
        let events = inbox.take();
        if events.is_empty() && inbox.stops {
            return None;
        }
        drop(inbox);
        let (mut ended, mut receipts) = (Vec::new(), Vec::new());
        let mut state = lock(&self.state);
        for event in events {
            match event {
                Event::Ended(done, outcome) => ended.push((done, outcome)),
                Event::Message(channel, bytes, receipt) => {
                    state.message(&channel, &bytes);
                    receipts.push(receipt);
                }
                other => state.happened(other),
            }
        }
        state.tasks.expire(now());
        self.carry_out(&mut state);
        drop(state);
        // The senders' windows open again.
        drop(receipts);
        Some(ended)
    }

    /// Carries out what a call of the program caused; its deadline may be the next one.
    fn act(&self, state: &mut State) {
        self.carry_out(state);
        self.queue.poke();
    }

    fn carry_out(&self, state: &mut State) {
        while let Some(action) = state.tasks.poll() {
            match action {
                Action::Connect { send, .. } => self.connect(state, send),
                Action::Offer { to, send, bytes } => self.offer(state, to, send, bytes),
                Action::Message { to, bytes } => self.say(state, to, bytes),
                Action::Read { task, from, regions, copies, budget } => {
                    let started = state.batch(task, from, &regions, &copies).and_then(|batch| {
                        let peer = state.peer_of(&self.agent, from)?;
                        let timeout = Some(budget.saturating_add(AFTER_DEADLINE));
                        let options = Options { timeout, ..Options::default() };
                        Ok(peer.read_async(&batch, &options))
                    });
                    let queue = Arc::clone(&self.queue);
                    match started {
                        Err(text) => queue.push(Event::ReadEnded(task, Err(text))),
                        Ok(transfer) => {
                            if let Some(receiving) = state.recvs.get_mut(&task) {
                                receiving.read = Some(transfer.clone());
                            }
                            transfer.on_end(move |outcome| {
                                let outcome = outcome.map(drop).map_err(|error| error.to_string());
                                queue.push(Event::ReadEnded(task, outcome));
                            });
                        }
                    }
                }
                Action::StopRead { task } => {
                    let read = state.recvs.get(&task).and_then(|receiving| receiving.read.as_ref());
                    if let Some(read) = read {
                        read.cancel();
                    }
                }
                Action::SendEnded { id, outcome } => {
                    state.dialing.remove(&id);
                    if let Some(ending) = state.sends.remove(&id) {
                        self.ended(ending.end, ending.done, outcome);
                    }
                }
                Action::RecvEnded { id, outcome } => {
                    let Some(receiving) = state.recvs.get_mut(&id) else { continue };
                    receiving.read = None;
                    receiving.places = Places::new();
                    let (end, done) =
                        (Arc::clone(&receiving.ending.end), receiving.ending.done.take());
                    let freed = receiving.freed;
                    self.ended(end, done, outcome);
                    if freed {
                        state.tasks.forget(id);
                        state.recvs.remove(&id);
                    }
                }
            }
        }
        state.watch();
    }

    fn ended(&self, end: Arc<End>, done: Option<Done>, outcome: Outcome) {
        if let Some(done) = done {
            self.queue.push(Event::Ended(done, outcome.clone()));
        }
        end.set(outcome);
    }

    fn connect(&self, state: &mut State, send: SendId) {
        let Some(peer) = state.dialing.remove(&send) else { return };
        let queue = Arc::clone(&self.queue);
        peer.open_channel(Box::new(move |channel| {
            queue.push(Event::Opened(send, channel.map_err(|error| error.to_string())));
        }));
    }

    /// Sends an offer, if the peer takes its messages. Offers leave half of the queue to answers: if an answer
    /// is lost, so is the session.
    fn offer(&self, state: &mut State, to: Conn, send: SendId, bytes: Vec<u8>) {
        let Some((channel, _)) = state.conns.get(&to) else { return };
        let (messages, queued_bytes) = channel.queued();
        let has_room = messages < Channel::QUEUE_MAX / 2
            && queued_bytes + bytes.len() <= Channel::QUEUE_BYTES_MAX / 2;
        let text = if !has_room {
            format!("{messages} messages wait until the receiver takes them")
        } else {
            match channel.queue_if_room(bytes).inspect(|()| channel.flush()) {
                Err(error) if error.kind() == ErrorKind::Busy && channel.end().is_none() => {
                    error.to_string()
                }
                sent => return self.said(channel, sent),
            }
        };
        state.tasks.unsent(send, text);
    }

    fn say(&self, state: &State, to: Conn, bytes: Vec<u8>) {
        let Some((channel, _)) = state.conns.get(&to) else { return };
        self.said(channel, channel.send(bytes));
    }

    fn said(&self, channel: &Channel, sent: kvferry::Result<()>) {
        if let Err(error) = sent {
            self.queue.push(Event::Lost(channel.clone(), error.to_string()));
            // The peer does not take its messages: what depends on them can't go on.
            channel.close(error);
        }
    }
}

impl State {
    fn happened(&mut self, event: Event) {
        match event {
            Event::Lost(channel, why) => {
                let known = self.conns.iter().find(|(_, (known, _))| *known == channel);
                if let Some(conn) = known.map(|(conn, _)| *conn) {
                    self.conns.remove(&conn);
                    self.tasks.lost(conn, &why);
                }
            }
            Event::Opened(send, Err(text)) => self.tasks.opened(send, Err(text), now()),
            Event::Opened(send, Ok(channel)) => {
                let opened = match channel.end() {
                    Some(error) => Err(error.to_string()),
                    None => Ok(self.conn(&channel)),
                };
                self.tasks.opened(send, opened, now());
            }
            Event::ReadEnded(task, result) => self.tasks.read_ended(task, result, now()),
            Event::Message(..) | Event::Ended(..) => {}
        }
    }

    fn message(&mut self, channel: &Channel, bytes: &[u8]) {
        let conn = self.conn(channel);
        let origin = Origin::from(channel.peer_ip());
        if let Err(text) = self.tasks.received(conn, origin, bytes, now()) {
            kvferry::warn_limited!(peer = channel.peer_name(), "dropped a {text}");
        }
    }

    fn conn(&mut self, channel: &Channel) -> Conn {
        let known = self.conns.iter().find(|(_, (known, _))| known == channel);
        if let Some((conn, _)) = known {
            return *conn;
        }
        self.last_conn += 1;
        let conn = Conn(self.last_conn);
        self.conns.insert(conn, (channel.clone(), None));
        conn
    }

    /// Runs the heartbeat to the peers that something waits for.
    fn watch(&mut self) {
        for (conn, (channel, watch)) in &mut self.conns {
            match (self.tasks.is_used(*conn), &watch) {
                (true, None) => *watch = Some(channel.watch()),
                (false, Some(_)) => *watch = None,
                _ => {}
            }
        }
    }

    fn peer_of(&mut self, agent: &Agent, conn: Conn) -> Result<Peer, String> {
        let (channel, _) = self.conns.get(&conn).ok_or("the sender is gone")?;
        let address = channel.peer_address();
        if let Some(peer) = self.peers.get(address) {
            return Ok(peer.clone());
        }
        if address.is_empty() {
            return Err("the sender's agent accepts no connections".to_owned());
        }
        if address.parse::<SocketAddr>().is_err() {
            // Resolving a name may take seconds, under the lock that calls of the program wait for, and
            // the peer chooses the name.
            return Err(format!(
                "the sender advertises the name {address}, not an address; set KVFERRY_ADVERTISE there"
            ));
        }
        if self.peers.len() >= PEERS_MAX {
            self.peers.clear();
        }
        let peer = agent.peer(address).map_err(|error| error.to_string())?;
        self.peers.insert(address.to_owned(), peer.clone());
        Ok(peer)
    }

    /// What a task reads. All of it is the sender's own memory: it can't have this agent read what a third one lends.
    fn batch(
        &self,
        task: RecvId,
        from: Conn,
        regions: &[serde_bytes::ByteBuf],
        copies: &[kvferry_tasks::Copy],
    ) -> Result<Batch, String> {
        let receiving = self.recvs.get(&task).ok_or("the task is gone")?;
        let regions: Result<Vec<_>, _> =
            regions.iter().map(|bytes| RemoteRegion::from_bytes(bytes)).collect();
        let regions = regions.map_err(|error| error.to_string())?;
        let sender = self.conns.get(&from).ok_or("the sender is gone")?.0.incarnation();
        if let Some(foreign) = regions.iter().find(|region| region.incarnation != sender) {
            let owner = foreign.incarnation;
            return Err(format!(
                "the sender {sender} offers memory of another agent, {owner}; a sender offers its own memory"
            ));
        }
        let mut batch = Batch::with_capacity(copies.len());
        for copy in copies {
            let kvferry_tasks::Part(region, offset, len) = copy.from;
            let remote = regions.get(region as usize).ok_or("the offer names no such region")?;
            let place = receiving.places.get(copy.local).and_then(Option::as_ref);
            let (local, at) = place.ok_or("the task has no such part")?;
            let pushed = batch.push(local, *at, remote, offset, len);
            pushed.map_err(|error| error.to_string())?;
        }
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry::Access;
    use kvferry_sys::map::Mapping;
    use kvferry_tasks::{Code, Part};
    use kvferry_testkit::ports::ClosedPort;
    use kvferry_testkit::slow::SlowMemory;
    use kvferry_testkit::{PATIENCE, Watchdog, eventually};
    use std::sync::mpsc;

    /// An hour: nothing in these tests ends by a deadline.
    const NEVER: Duration = Duration::from_secs(3600);

    /// An agent of TCP, whose requests of its own would time out soon.
    fn agent() -> Agent {
        let builder =
            Agent::builder().listen(([127, 0, 0, 1], 0)).timeout(Duration::from_millis(200));
        builder
            .transports(kvferry::Transports::parse("tcp").expect("a name"))
            .start()
            .expect("an agent")
    }

    fn endpoint(agent: &Agent) -> Arc<Endpoint> {
        let endpoint = Endpoint::start(agent.clone()).map_err(|failure| failure.text);
        endpoint.expect("an endpoint")
    }

    /// A send of one part of a region.
    fn send(endpoint: &Endpoint, to: &Agent, key: &str, region: &Region) -> Arc<End> {
        let peer = endpoint.agent().peer(to.advertised()).expect("an address");
        let blocks = vec![Offered(1, vec![Part(0, 0, region.len() as u64)])];
        let what = (vec![region.remote().to_bytes()], blocks);
        endpoint.send(peer, key, what, NEVER, None).expect("there is room").1
    }

    /// A send that fails, whose callback runs on the endpoint's thread.
    fn call_back(endpoint: &Endpoint, done: impl FnOnce() + Send + 'static) {
        let closed = ClosedPort::new();
        let peer = endpoint.agent().peer(closed.address()).expect("an address");
        let blocks = vec![Offered(1, vec![Part(0, 0, 1)])];
        let done: Done = Box::new(move |_| {
            drop(closed);
            done();
        });
        endpoint
            .send(peer, "nobody", (Vec::new(), blocks), NEVER, Some(done))
            .expect("there is room");
    }

    #[test]
    fn a_sender_that_floods_a_slow_callback_waits_and_all_its_offers_arrive() {
        const OFFERS: usize = 4000;
        let _bound = Watchdog::new(PATIENCE);
        let (sends, receives) = (agent(), agent());
        let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
        let memory = sends.allocate(4096, Access::READ).expect("memory");
        let (release, released) = mpsc::channel();
        let (began, begins) = mpsc::channel();
        call_back(&receiver, move || {
            began.send(()).expect("the test waits");
            let _ = released.recv();
        });
        begins.recv().expect("the callback is called");
        let ends: Vec<_> = (0..OFFERS)
            .map(|number| send(&sender, &receives, &format!("{number:01000}"), &memory))
            .collect();
        let held = || {
            let inbox = lock(&receiver.queue.inbox);
            let bytes = |event: &Event| match event {
                Event::Message(_, bytes, _) => bytes.len(),
                _ => 0,
            };
            inbox.events.iter().map(bytes).sum::<usize>()
        };
        eventually("the window is full", || held() > 200 * 1000);
        // Longer than the time limit of the sender's requests.
        std::thread::sleep(Duration::from_millis(600));
        assert!(held() <= Channel::WINDOW_BYTES, "{} bytes wait", held());
        assert_eq!(sends.stats().sessions, 1, "the session goes on");
        release.send(()).expect("the callback waits");
        eventually("all offers have arrived", || receiver.gauges().parked == OFFERS);
        assert_eq!((sends.stats().sessions_opened, sends.stats().sessions), (1, 1));
        assert!(ends.iter().all(|end| end.wait(Some(Duration::ZERO)).is_none()));
        sender.close();
        receiver.close();
    }

    #[test]
    fn sends_to_a_receiver_that_takes_no_message_end_as_busy_and_its_session_goes_on() {
        const OFFERS: usize = 40_000;
        let _bound = Watchdog::new(PATIENCE);
        let (sends, receives) = (agent(), agent());
        let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
        let memory = sends.allocate(4096, Access::READ).expect("memory");
        let held = lock(&receiver.state);
        let ends: Vec<_> = (0..OFFERS)
            .map(|number| send(&sender, &receives, &number.to_string(), &memory))
            .collect();
        eventually("some are refused", || sender.gauges().sends < OFFERS);
        let busy = ends.iter().filter_map(|end| end.wait(Some(Duration::ZERO))).next();
        assert_eq!(busy.map(|outcome| outcome.code), Some(Code::Busy));
        assert_eq!(sends.stats().sessions, 1, "the session goes on");
        drop(held);
        eventually("the others arrive", || {
            let (waiting, arrived) = (sender.gauges().sends, receiver.gauges().parked);
            waiting == arrived && arrived >= Channel::QUEUE_MAX / 2
        });
        sender.close();
        receiver.close();
    }

    /// A task that waits for one part, of `len` bytes.
    fn receive(endpoint: &Endpoint, key: &str, len: usize) -> Arc<End> {
        let into = endpoint.agent().allocate(len, Access::NONE).expect("memory");
        let wanted = vec![Wanted { key: 1, lens: vec![len as u64] }];
        let received = endpoint.recv(key, wanted, vec![Some((into, 0))], NEVER, None);
        received.expect("there is room").1
    }

    fn outcome(end: &End) -> String {
        end.wait(Some(PATIENCE / 2)).expect("it ends").text
    }

    #[test]
    fn a_sender_can_not_offer_the_memory_of_a_third_agent() {
        let _bound = Watchdog::new(PATIENCE);
        let (sends, receives, third) = (agent(), agent(), agent());
        let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
        let foreign = third.allocate(4096, Access::READ).expect("memory");
        let end = receive(&receiver, "k", 4096);
        let _sent = send(&sender, &receives, "k", &foreign);
        assert!(outcome(&end).contains("offers memory of another agent"), "{}", outcome(&end));
        assert_eq!(third.stats().sessions_opened, 0, "it is not asked");
        sender.close();
        receiver.close();
    }

    #[test]
    fn a_sender_that_advertises_a_name_is_not_looked_up() {
        let _bound = Watchdog::new(PATIENCE);
        let sends = Agent::builder().listen(([127, 0, 0, 1], 0)).advertise("sender.invalid:1");
        let (sends, receives) = (sends.start().expect("an agent"), agent());
        let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
        let memory = sends.allocate(4096, Access::READ).expect("memory");
        let end = receive(&receiver, "k", 4096);
        let _sent = send(&sender, &receives, "k", &memory);
        let text = outcome(&end);
        assert!(text.contains("advertises the name sender.invalid:1, not an address"), "{text}");
        sender.close();
        receiver.close();
    }

    #[test]
    fn a_callback_may_free_a_task_whose_memory_is_being_written() {
        const LEN: usize = 65_536;
        let _bound = Watchdog::new(PATIENCE);
        let (sends, receives) = (agent(), agent());
        let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
        let mapping = Arc::new(Mapping::anonymous(LEN).expect("memory"));
        let device = SlowMemory::new(mapping, 0, LEN, 1);
        device.hold();
        let from = sends.register_device(device.memory(), Access::READ).expect("a region");
        let into = receives.allocate(LEN, Access::NONE).expect("memory");
        let wanted = vec![Wanted { key: 1, lens: vec![LEN as u64] }];
        let places = vec![Some((into, 0))];
        let (task, end) = receiver.recv("k", wanted, places, NEVER, None).expect("there is room");
        let _sent = send(&sender, &receives, "k", &from);
        eventually("it is read", || receiver.gauges().reads == 1 && device.pending() > 0);
        let (freed, frees) = mpsc::channel();
        let (of, at) = (Arc::clone(&receiver), Arc::clone(&end));
        call_back(&receiver, move || {
            of.free(task, &at);
            freed.send(at.wait(Some(Duration::ZERO)).is_some()).expect("the test waits");
        });
        assert!(frees.recv().expect("the callback returns"), "nothing writes to the memory");
        assert_eq!(receiver.gauges().recvs, 0);
        // Later callbacks come.
        let (called, calls) = mpsc::channel();
        call_back(&receiver, move || called.send(()).expect("the test waits"));
        calls.recv().expect("it is called");
        device.release();
        sender.close();
        receiver.close();
    }
}
