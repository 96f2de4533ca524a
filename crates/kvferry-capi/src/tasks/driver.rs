//! Runs the state machine of tasks with an agent.
//!
//! One lock guards the machine. Any thread that holds it carries out what the machine says: messages are
//! queued and transfers are started without waiting. What comes back, from peers and transfers, goes into
//! the inbox, and a thread of the endpoint takes it from there. That thread alone calls the program's
//! callbacks, without the lock.

use super::end::{Done, End, Ending};
use super::inbox::{Event, Inbox};
use super::state::{Places, Receiving, State, now};
use crate::failure::{Failure, KVFERRY_IO};
use kvferry::{After, Agent, Channel, ErrorKind, Options, Peer, Transfer, TransferStats};
use kvferry_proto::handoff::PeerId;
use kvferry_proto::tasks::{Action, Code, Gauges, Offered, Outcome, RecvId, SendId, Wanted};
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// How much longer than its task a read may take. The task stops it at the deadline, and the outcome is
/// that of the task; a deadline of the read's own that comes first would be a failed read.
const AFTER_DEADLINE: Duration = Duration::from_secs(5);

/// The tasks of an agent.
pub(crate) struct Endpoint {
    agent: Agent,
    state: Mutex<State>,
    inbox: Arc<Inbox>,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: OnceLock<ThreadId>,
}

/// The end of a read, or why it is none yet: its memory is written until a device ends its copies.
fn end_of_read(task: RecvId, read: Transfer, outcome: kvferry::Result<TransferStats>) -> Event {
    match outcome {
        Err(error) if error.quiesced() == Some(false) && !read.is_quiet() => {
            Event::ReadGivenUp(task, read, error.to_string())
        }
        outcome => Event::ReadEnded(task, outcome.map(drop).map_err(|error| error.to_string())),
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").finish_non_exhaustive()
    }
}

impl Endpoint {
    pub(crate) fn start(agent: Agent) -> Result<Arc<Self>, Failure> {
        let inbox = Arc::<Inbox>::default();
        agent.set_message_handler(inbox.handler())?;
        let state = Mutex::default();
        let endpoint = Arc::new(Self {
            agent,
            state,
            inbox,
            thread: Mutex::default(),
            thread_id: OnceLock::new(),
        });
        let runs = Arc::clone(&endpoint);
        let spawned = kvferry_sys::thread::spawn("kvferry-tasks".to_owned(), move || runs.run());
        let thread = spawned.map_err(|error| {
            Failure::new(KVFERRY_IO, format!("the thread of tasks can't start: {error}"))
        })?;
        let _ = endpoint.thread_id.set(thread.thread().id());
        *endpoint.thread.lock() = Some(thread);
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
        (regions, blocks, after): (Vec<Vec<u8>>, Vec<Offered>, After),
        budget: Duration,
        done: Option<Done>,
    ) -> Result<(SendId, Arc<End>), Outcome> {
        let mut state = self.open()?;
        let regions = regions.into_iter().map(serde_bytes::ByteBuf::from).collect();
        let id = state.tasks.send(key, regions, blocks, budget, now())?;
        let end = Arc::<End>::default();
        state.sends.insert(id, Ending { end: Arc::clone(&end), done });
        state.dialing.insert(id, peer);
        if !after.edges().is_empty() {
            state.computed.insert(id, after);
        }
        self.act(&mut state);
        Ok((id, end))
    }

    pub(crate) fn recv(
        &self,
        key: &str,
        wanted: Vec<Wanted>,
        (places, after): (Places, After),
        budget: Duration,
        done: Option<Done>,
    ) -> Result<(RecvId, Arc<End>), Outcome> {
        let mut state = self.open()?;
        let id = state.tasks.recv(key, wanted, budget, now())?;
        let end = Arc::<End>::default();
        let ending = Ending { end: Arc::clone(&end), done };
        state.recvs.insert(id, Receiving { ending, places, after, read: None, freed: false });
        self.act(&mut state);
        Ok((id, end))
    }

    pub(crate) fn cancel_send(&self, id: SendId) {
        let mut state = self.state.lock();
        state.tasks.cancel_send(id);
        self.act(&mut state);
    }

    pub(crate) fn cancel_recv(&self, id: RecvId) {
        let mut state = self.state.lock();
        state.tasks.cancel_recv(id);
        self.act(&mut state);
    }

    pub(crate) fn steal(&self, key: &str) {
        let mut state = self.state.lock();
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
        self.inbox.put_back(due);
    }

    fn forget(&self, id: RecvId) {
        let mut state = self.state.lock();
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
        self.state.lock().tasks.gauges()
    }

    pub(crate) fn is_own_thread(&self, thread: ThreadId) -> bool {
        self.thread_id.get() == Some(&thread)
    }

    /// Cancels everything, waits until no memory is written, and ends the thread.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
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
        self.inbox.stop();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn open(&self) -> Result<MutexGuard<'_, State>, Outcome> {
        let state = self.state.lock();
        if state.closed {
            let what = "the tasks of this agent were freed";
            return Err(Outcome::new(Code::Invalid, what));
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
        let events = self.inbox.take(self.time_left())?;
        let (mut ended, mut receipts) = (Vec::new(), Vec::new());
        let mut state = self.state.lock();
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
        state.end_quiet();
        state.tasks.expire(now());
        self.carry_out(&mut state);
        for (send, outcome) in state.take_computed() {
            match outcome {
                Ok(()) => self.connect(&mut state, send),
                Err(text) => state.tasks.not_computed(send, &text),
            }
        }
        self.carry_out(&mut state);
        drop(state);
        // The senders' windows open again.
        drop(receipts);
        Some(ended)
    }

    /// Time until the next work that is due without an event.
    fn time_left(&self) -> Option<Duration> {
        let state = self.state.lock();
        let due = [state.tasks.next_timeout(), state.next_computed(), state.next_quiet()];
        let due = due.into_iter().flatten().min();
        due.map(|due| due.saturating_since(now()))
    }

    /// Carries out what a call of the program caused; its deadline may be the next one.
    fn act(&self, state: &mut State) {
        self.carry_out(state);
        self.inbox.poke();
    }

    fn carry_out(&self, state: &mut State) {
        while let Some(action) = state.tasks.poll() {
            match action {
                Action::Connect { send } => self.connect(state, send),
                Action::Offer { to, send, bytes } => self.offer(state, to, send, bytes),
                Action::Message { to, bytes } => self.say(state, to, bytes),
                Action::Read { task, from, regions, copies, budget } => {
                    let started = state.batch(task, from, &regions, &copies).and_then(|batch| {
                        let peer = state.peer_of(&self.agent, from)?;
                        let timeout = Some(budget.saturating_add(AFTER_DEADLINE));
                        let options = Options { timeout, ..Options::default() };
                        Ok(peer.read_async(&batch, &options))
                    });
                    let inbox = Arc::clone(&self.inbox);
                    match started {
                        Err(text) => inbox.push(Event::ReadEnded(task, Err(text))),
                        Ok(transfer) => {
                            if let Some(receiving) = state.recvs.get_mut(&task) {
                                receiving.read = Some(transfer.clone());
                            }
                            let read = transfer.clone();
                            transfer.on_end(move |outcome| {
                                inbox.push(end_of_read(task, read, outcome));
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
                Action::Watch { peer, on } => state.watch(peer, on),
                Action::SendEnded { id, outcome } => {
                    state.dialing.remove(&id);
                    state.computed.remove(&id);
                    if let Some(ending) = state.sends.remove(&id) {
                        self.ended(ending.end, ending.done, outcome);
                    }
                }
                Action::RecvEnded { id, outcome } => {
                    let Some(receiving) = state.recvs.get_mut(&id) else { continue };
                    receiving.read = None;
                    receiving.places = Places::new();
                    receiving.after = After::default();
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
    }

    fn ended(&self, end: Arc<End>, done: Option<Done>, outcome: Outcome) {
        if let Some(done) = done {
            self.inbox.push(Event::Ended(done, outcome.clone()));
        }
        end.set(outcome);
    }

    /// Connects to the receiver of a send, unless a GPU still computes the bytes to send.
    fn connect(&self, state: &mut State, send: SendId) {
        if state.computed.contains_key(&send) {
            return;
        }
        let Some(peer) = state.dialing.remove(&send) else { return };
        let inbox = Arc::clone(&self.inbox);
        peer.open_channel(Box::new(move |channel| {
            inbox.push(Event::Opened(send, channel.map_err(|error| error.to_string())));
        }));
    }

    /// Sends an offer, if the peer takes its messages. Offers leave half of the queue to answers: if an answer
    /// is lost, so is the session.
    fn offer(&self, state: &mut State, to: PeerId, send: SendId, bytes: Vec<u8>) {
        let Some(channel) = state.channel(to) else { return };
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

    fn say(&self, state: &State, to: PeerId, bytes: Vec<u8>) {
        let Some(channel) = state.channel(to) else { return };
        self.said(channel, channel.send(bytes));
    }

    fn said(&self, channel: &Channel, sent: kvferry::Result<()>) {
        if let Err(error) = sent {
            self.inbox.push(Event::Lost(channel.clone(), error.to_string()));
            // The peer does not take its messages: what depends on them can't go on.
            channel.close(error);
        }
    }
}
