//! One rank's handoffs over its agent.
//!
//! Both state machines are behind one lock, which is held for no longer than a step of theirs
//! takes. One thread does what they ask for: it sends, reads, opens channels and keeps the time; it
//! sleeps while there is nothing to do. Calls, messages and reads that end only tell the machines,
//! and wake it.

use crate::codes::{code_of, may_return};
use crate::peers::Peers;
use kvferry::{Agent, Batch, Channel, Correspondent, Error, ErrorKind, Options, Transfer};
use kvferry_proto::handoff::{
    BlockTable, Consumer, ConsumerAction, HandoffId, HandoffMessage, Limits, Outcome, PeerId,
    Producer, ProducerAction, ProducerRank, Progress, ReadId, Refusal, Slice,
};
use kvferry_proto::{Timestamp, WireCode};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// What came with a handoff, by the address it came from.
pub type SideData = Vec<(String, Vec<u8>)>;

/// How a handoff ended on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// What was offered is not read any more: its blocks may be reused.
    Produced {
        /// Which.
        id: HandoffId,
        /// How.
        outcome: Outcome,
    },
    /// What was wanted is there, or will not come, and nothing is written to its blocks any more.
    Consumed {
        /// Which.
        id: HandoffId,
        /// How.
        outcome: Outcome,
        /// What came with it, if it is done.
        side_data: SideData,
    },
}

/// A producer rank that something is wanted from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Where its agent listens, `host:port`.
    pub address: String,
    /// How many consumer ranks read this handoff from it, this one included.
    pub readers: u32,
}

/// A part of a handoff that is to be read now.
#[derive(Debug)]
pub struct Read<'a> {
    /// Where the producer rank's agent listens, as given in its [`Source`].
    pub from: &'a str,
    /// The producer's blocks as far as they are known, group by group.
    pub tables: &'a [BlockTable],
    /// What became ready.
    pub slice: Slice,
}

/// Says which bytes of a producer belong where, for one handoff.
///
/// Called on the rank's thread, which waits for the answer; once for each part that became ready.
pub trait Mapper: Send {
    /// The copies that a part takes: local ranges of this rank's agent, and remote ones of the
    /// producer's. May be empty.
    ///
    /// # Errors
    /// The handoff fails with that code and reason.
    fn map(&mut self, read: &Read<'_>) -> Result<Batch, (WireCode, String)>;
}

impl<F> Mapper for F
where
    F: FnMut(&Read<'_>) -> Result<Batch, (WireCode, String)> + Send,
{
    fn map(&mut self, read: &Read<'_>) -> Result<Batch, (WireCode, String)> {
        self(read)
    }
}

/// Why a call was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Fault {
    /// By the protocol.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// By the agent.
    #[error(transparent)]
    Agent(#[from] Error),
    /// The operating system has no thread for it.
    #[error("the thread for handoffs can't be started")]
    Thread(#[source] std::io::Error),
}

/// One rank's handoffs. Dropping it ends them all.
pub struct Rank {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank").field("agent", &self.shared.agent).finish_non_exhaustive()
    }
}

struct Shared {
    agent: Agent,
    began: Instant,
    state: Mutex<State>,
    /// Something is to be done.
    alarm: Alarm,
    arrived: Condvar,
    /// Reads that have moved on.
    woken: Mutex<Vec<ReadId>>,
}

struct State {
    producer: Producer,
    consumer: Consumer,
    peers: Peers,
    /// What maps a handoff that is wanted; taken out while it is asked.
    mappers: FxHashMap<HandoffId, Box<dyn Mapper>>,
    reads: FxHashMap<ReadId, Transfer>,
    events: VecDeque<Event>,
    closed: bool,
}

/// A doorbell that remembers.
#[derive(Default)]
struct Alarm {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Alarm {
    fn ring(&self) {
        let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut rung, true) {
            self.changed.notify_one();
        }
    }

    fn wait(&self, timeout: Option<Duration>) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rung = match timeout {
            None => {
                self.changed.wait_while(rung, |rung| !*rung).unwrap_or_else(PoisonError::into_inner)
            }
            Some(timeout) => {
                let waited = self.changed.wait_timeout_while(rung, timeout, |rung| !*rung);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *rung = false;
    }
}

/// What is done without the lock.
enum Chore {
    Read { read: ReadId, id: HandoffId, from: PeerId, slice: Slice },
    Open { address: String },
}

impl Rank {
    /// The handoffs of the rank whose agent this is. From now on it receives the agent's messages.
    ///
    /// # Errors
    /// The agent's `InvalidArgument` if somebody receives them already; [`Fault::Thread`].
    pub fn start(agent: &Agent, limits: &Limits) -> Result<Self, Fault> {
        let state = State {
            producer: Producer::new(limits.clone()),
            consumer: Consumer::new(limits.clone()),
            peers: Peers::default(),
            mappers: FxHashMap::default(),
            reads: FxHashMap::default(),
            events: VecDeque::new(),
            closed: false,
        };
        let shared = Arc::new(Shared {
            agent: agent.clone(),
            began: Instant::now(),
            state: Mutex::new(state),
            alarm: Alarm::default(),
            arrived: Condvar::new(),
            woken: Mutex::default(),
        });
        agent.correspond(Arc::new(Ear(Arc::downgrade(&shared))))?;
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvferry-handoff".into())
            .spawn(move || worker.run())
            .map_err(Fault::Thread)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Offers a request's KV, of which nothing needs to be ready yet: its blocks are not to be
    /// reused until [`Event::Produced`], or [`Rank::restart`] or [`Rank::withdraw`] is called.
    ///
    /// # Errors
    /// [`Refusal::Ended`] if its consumer does not need it, or has given up; [`Refusal::InUse`];
    /// [`Refusal::Full`].
    pub fn offer(&self, id: &HandoffId) -> Result<(), Fault> {
        self.tell(|state, now| state.producer.offer(id, now))
    }

    /// Says that more is ready. See [`Producer::advance`].
    ///
    /// # Errors
    /// [`Refusal::Unknown`] if it has ended; [`Refusal::Misuse`].
    pub fn advance(
        &self,
        id: &HandoffId,
        tables: Vec<BlockTable>,
        progress: Progress,
    ) -> Result<(), Fault> {
        self.tell(|state, _| state.producer.advance(id, tables, progress))
    }

    /// Says that all is ready, with what else the consumer's engine should know.
    ///
    /// # Errors
    /// As [`Rank::advance`].
    pub fn complete(
        &self,
        id: &HandoffId,
        tables: Vec<BlockTable>,
        progress: Progress,
        side_data: Option<Vec<u8>>,
    ) -> Result<(), Fault> {
        self.tell(|state, now| state.producer.complete(id, tables, progress, side_data, now))
    }

    /// The engine takes the blocks back, now, and will compute the request again.
    ///
    /// # Errors
    /// As [`Rank::advance`].
    pub fn restart(&self, id: &HandoffId) -> Result<(), Fault> {
        self.tell(|state, _| state.producer.restart(id))
    }

    /// Ends an offer, or a handoff that was to be offered, from this side; its blocks may be reused
    /// now.
    ///
    /// # Errors
    /// [`Refusal::Ended`].
    pub fn withdraw(&self, id: &HandoffId, code: WireCode, detail: &str) -> Result<(), Fault> {
        self.tell(|state, now| state.producer.withdraw(id, code, detail, now))
    }

    /// Wants a request's KV, whose blocks here are allocated: they are not to be touched until
    /// [`Event::Consumed`].
    ///
    /// # Errors
    /// [`Refusal::InUse`], [`Refusal::Ended`], [`Refusal::Full`], [`Refusal::Misuse`]; the agent's
    /// for an address that is none.
    pub fn want(
        &self,
        id: &HandoffId,
        from: &[Source],
        budget: Duration,
        mapper: Box<dyn Mapper>,
    ) -> Result<(), Fault> {
        let shared = &self.shared;
        let mut state = shared.lock();
        let now = shared.now();
        let places = shared.places(&mut state, from)?;
        let rank = |(&(peer, connected), source): (&(PeerId, bool), &Source)| ProducerRank {
            peer,
            readers: source.readers,
            connected,
        };
        let ranks: Vec<_> = places.iter().zip(from).map(rank).collect();
        let wanted = state.consumer.want(id, &ranks, budget, now);
        let chores = match wanted {
            Ok(()) => {
                state.mappers.insert(id.clone(), mapper);
                state.openings(&places)
            }
            Err(_) => Vec::new(),
        };
        state.peers.forget_idle();
        drop(state);
        chores.into_iter().for_each(|chore| shared.do_chore(chore));
        shared.alarm.ring();
        Ok(wanted?)
    }

    /// Tells producers that nobody here will want this: it is in the cache already, or its request
    /// was aborted or rejected before it was scheduled.
    ///
    /// # Errors
    /// [`Refusal::InUse`], [`Refusal::Ended`]; the agent's for an address that is none.
    pub fn free(&self, id: &HandoffId, from: &[Source], code: WireCode) -> Result<(), Fault> {
        let shared = &self.shared;
        let mut state = shared.lock();
        let now = shared.now();
        let places = shared.places(&mut state, from)?;
        let peers: Vec<_> = places.iter().map(|(peer, _)| *peer).collect();
        let freed = state.consumer.free(id, &peers, code, now);
        let chores = if freed.is_ok() { state.openings(&places) } else { Vec::new() };
        state.peers.forget_idle();
        drop(state);
        chores.into_iter().for_each(|chore| shared.do_chore(chore));
        shared.alarm.ring();
        Ok(freed?)
    }

    /// Ends what was wanted. Its blocks are free when [`Event::Consumed`] says so.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: it has ended already.
    pub fn cancel(&self, id: &HandoffId, code: WireCode, detail: &str) -> Result<(), Fault> {
        self.tell(|state, now| state.consumer.cancel(id, code, detail, now))
    }

    /// What has ended since this was asked last.
    pub fn events(&self) -> Vec<Event> {
        self.shared.lock().events.drain(..).collect()
    }

    /// Waits for something to end; `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<Event> {
        let state = self.shared.lock();
        let none = |state: &mut State| state.events.is_empty() && !state.closed;
        let waited = self.shared.arrived.wait_timeout_while(state, timeout, none);
        waited.unwrap_or_else(PoisonError::into_inner).0.events.pop_front()
    }

    /// What is kept, by name. All but tombs, and peers that are connected, is zero when nothing is
    /// under way.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        let state = self.shared.lock();
        let own = [
            ("peers", state.peers.len()),
            ("mappers", state.mappers.len()),
            ("transfers", state.reads.len()),
            ("events", state.events.len()),
        ];
        let of_machines = state.producer.gauges().into_iter().chain(state.consumer.gauges());
        of_machines.chain(own).collect()
    }

    fn tell(
        &self,
        what: impl FnOnce(&mut State, Timestamp) -> Result<(), Refusal>,
    ) -> Result<(), Fault> {
        let mut state = self.shared.lock();
        let told = what(&mut state, self.shared.now());
        drop(state);
        self.shared.alarm.ring();
        Ok(told?)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.alarm.ring();
        self.shared.arrived.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panics on a broken invariant only, and has said so.
            drop(thread.join());
        }
    }
}

impl State {
    /// Has an address met, unless that is under way.
    fn opening(&mut self, id: PeerId) -> Option<Chore> {
        let (address, place) = self.peers.place_of(id)?;
        let address = address.to_owned();
        (!std::mem::replace(&mut place.opening, true)).then_some(Chore::Open { address })
    }

    /// Has those met that there is no connection to.
    fn openings(&mut self, places: &[(PeerId, bool)]) -> Vec<Chore> {
        let unmet = places.iter().filter(|(_, connected)| !connected);
        unmet.filter_map(|(peer, _)| self.opening(*peer)).collect()
    }

    fn next_timeout(&self) -> Option<Timestamp> {
        [self.producer.next_timeout(), self.consumer.next_timeout()].into_iter().flatten().min()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        let since = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // Not the origin: times before now can be said, too.
        Timestamp::from_nanos(since) + Duration::from_secs(3600)
    }

    /// The peers at some addresses, and whether there is a connection to each.
    fn places(&self, state: &mut State, from: &[Source]) -> Result<Vec<(PeerId, bool)>, Error> {
        let place = |source: &Source| {
            state.peers.place(&source.address, || self.agent.peer(&source.address))
        };
        from.iter().map(place).collect()
    }

    fn run(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            if state.closed {
                return self.close(state);
            }
            let now = self.now();
            state.producer.expire(now);
            state.consumer.expire(now);
            self.look_at_reads(&mut state, now);
            let chores = self.work(&mut state);
            let due = state.next_timeout();
            drop(state);
            if chores.is_empty() {
                self.alarm.wait(due.map(|due| due.saturating_since(self.now())));
            }
            chores.into_iter().for_each(|chore| self.do_chore(chore));
        }
    }

    /// Nothing is read any more when this returns.
    fn close(&self, mut state: MutexGuard<'_, State>) {
        let reads: Vec<_> = state.reads.drain().collect();
        drop(state);
        for (_, transfer) in &reads {
            transfer.cancel();
        }
        for (_, transfer) in reads {
            // The agent's promise: a cancelled read ends, at the latest with the silence limit.
            while transfer.wait(Duration::from_secs(1)).is_none() {}
        }
    }

    /// Tells the machines of reads that have ended.
    fn look_at_reads(self: &Arc<Self>, state: &mut State, now: Timestamp) {
        let woken = std::mem::take(&mut *self.woken.lock().unwrap_or_else(PoisonError::into_inner));
        for read in woken {
            let Some(transfer) = state.reads.get_mut(&read) else { continue };
            let waker = self.waker(read);
            let polled = Future::poll(Pin::new(transfer), &mut Context::from_waker(&waker));
            if let Poll::Ready(outcome) = polled {
                state.reads.remove(&read);
                let result = outcome.map(drop).map_err(|e| (code_of(e.kind()), e.to_string()));
                state.consumer.read_ended(read, result, now);
            }
        }
    }

    fn waker(self: &Arc<Self>, read: ReadId) -> Waker {
        Waker::from(Arc::new(ReadWaker { shared: Arc::downgrade(self), read }))
    }

    /// Does what the machines ask for; what can't be done under the lock is the answer.
    fn work(&self, state: &mut State) -> Vec<Chore> {
        let mut chores = Vec::new();
        while let Some(action) = state.producer.poll() {
            match action {
                ProducerAction::Send { to, message } => Self::send(state, to, &message),
                ProducerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ProducerAction::Ended { id, outcome } => {
                    state.events.push_back(Event::Produced { id, outcome });
                    self.arrived.notify_all();
                }
            }
        }
        while let Some(action) = state.consumer.poll() {
            match action {
                ConsumerAction::Send { to, message } => Self::send(state, to, &message),
                ConsumerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ConsumerAction::Read { read, id, from, slice } => {
                    chores.push(Chore::Read { read, id, from, slice });
                }
                ConsumerAction::CancelRead(read) => {
                    if let Some(transfer) = state.reads.get(&read) {
                        transfer.cancel();
                    }
                    // Else it is not begun: it will be asked for once more.
                    chores.retain(
                        |chore| !matches!(chore, Chore::Read { read: other, .. } if *other == read),
                    );
                    if !state.reads.contains_key(&read) {
                        let unread = Err((WireCode::Cancelled, String::new()));
                        state.consumer.read_ended(read, unread, self.now());
                    }
                }
                ConsumerAction::Ended { id, outcome, side_data } => {
                    state.mappers.remove(&id);
                    let mut side = Vec::with_capacity(side_data.len());
                    for (peer, data) in side_data {
                        let place = state.peers.place_of(peer);
                        side.push((place.map_or("", |(address, _)| address).to_owned(), data));
                    }
                    let side_data = side;
                    state.events.push_back(Event::Consumed { id, outcome, side_data });
                    self.arrived.notify_all();
                }
            }
        }
        chores
    }

    fn send(state: &State, to: PeerId, message: &HandoffMessage) {
        let Some(channel) = state.peers.channel(to) else { return };
        if let Err(error) = channel.send(message.encode()) {
            // What matters is said again when there is a session again.
            tracing::debug!(peer = channel.peer_name(), %error, "a handoff's message was not sent");
        }
    }

    fn do_chore(self: &Arc<Self>, chore: Chore) {
        match chore {
            Chore::Read { read, id, from, slice } => self.begin_read(read, &id, from, slice),
            Chore::Open { address } => self.open(address),
        }
    }

    fn begin_read(self: &Arc<Self>, read: ReadId, id: &HandoffId, from: PeerId, slice: Slice) {
        let mut state = self.lock();
        let mapper = state.mappers.remove(id);
        let place = state
            .peers
            .place_of(from)
            .map(|(address, place)| (address.to_owned(), place.peer.clone()));
        let tables = state.consumer.table(id, from).map(<[_]>::to_vec);
        drop(state);
        let (Some(mut mapper), Some((address, peer)), Some(tables)) = (mapper, place, tables)
        else {
            return self.read_ended(read, Err((WireCode::Closed, String::new())));
        };
        let mapped = mapper.map(&Read { from: &address, tables: &tables, slice });
        let transfer = match mapped {
            Ok(batch) if batch.is_empty() => Err(Ok(())),
            Ok(batch) => Ok(peer.read_async(batch, Options::default())),
            Err(refused) => Err(Err(refused)),
        };
        let mut state = self.lock();
        state.mappers.insert(id.clone(), mapper);
        match transfer {
            Ok(transfer) => {
                state.reads.insert(read, transfer);
                drop(state);
                self.wake(read);
            }
            Err(result) => {
                drop(state);
                self.read_ended(read, result);
            }
        }
    }

    fn read_ended(&self, read: ReadId, result: Result<(), (WireCode, String)>) {
        self.lock().consumer.read_ended(read, result, self.now());
        self.alarm.ring();
    }

    fn wake(&self, read: ReadId) {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner).push(read);
        self.alarm.ring();
    }

    /// Meets whoever is at an address now.
    fn open(self: &Arc<Self>, address: String) {
        let mut state = self.lock();
        let Ok((id, _)) = state.peers.place(&address, || self.agent.peer(&address)) else { return };
        let Some(peer) = state.peers.place_of(id).map(|(_, place)| place.peer.clone()) else {
            return;
        };
        drop(state);
        let shared = Arc::downgrade(self);
        peer.open_channel(Box::new(move |met| {
            if let Some(shared) = shared.upgrade() {
                shared.opened(&address, met);
            }
        }));
    }

    fn opened(&self, address: &str, met: kvferry::Result<Channel>) {
        let mut state = self.lock();
        let now = self.now();
        match met {
            Ok(channel) => {
                let (reader, _) = state.peers.began(&channel);
                if let Some(reader) = reader {
                    state.producer.met(reader);
                }
                if let Some((id, gone)) = state.peers.met_at(address, channel.incarnation()) {
                    if let Some(gone) = gone {
                        state.consumer.lost(gone, WireCode::StaleIncarnation, true, now);
                    }
                    state.consumer.met(id, now);
                }
            }
            Err(error) => {
                let place = state.peers.place(address, || Err(error.clone()));
                if let Ok((id, connected)) = place {
                    if let Some((_, place)) = state.peers.place_of(id) {
                        place.opening = false;
                    }
                    if !connected {
                        state.consumer.lost(id, code_of(error.kind()), true, now);
                    }
                }
                state.peers.forget_idle();
            }
        }
        drop(state);
        self.alarm.ring();
    }
}

/// Tells the rank of what the agent's sessions do.
struct Ear(Weak<Shared>);

impl Correspondent for Ear {
    fn began(&self, channel: &Channel) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.lock();
        let now = shared.now();
        let (reader, supplier) = state.peers.began(channel);
        if let Some(reader) = reader {
            state.producer.met(reader);
        }
        // If we are meeting it, that is not over before it is found whether it is on this host.
        let is_met =
            |id: &PeerId| state.peers.place_of(*id).is_some_and(|(_, place)| !place.opening);
        if let Some(supplier) = supplier.filter(is_met) {
            state.consumer.met(supplier, now);
        }
        drop(state);
        shared.alarm.ring();
    }

    fn received(&self, channel: &Channel, message: &[u8]) {
        let Some(shared) = self.0.upgrade() else { return };
        let message = match HandoffMessage::decode(message) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!(peer = channel.peer_name(), %error, "a message was not understood");
                return;
            }
        };
        let mut state = shared.lock();
        let now = shared.now();
        let (reader, supplier) = state.peers.numbers_of(channel);
        match (&message, supplier) {
            (HandoffMessage::Ask(_) | HandoffMessage::Confirm(_), _) => {
                if let Some(reader) = reader {
                    state.producer.receive(reader, message, now);
                }
            }
            (HandoffMessage::Stop(stop), _) if stop.by_consumer => {
                if let Some(reader) = reader {
                    state.producer.receive(reader, message, now);
                }
            }
            (_, Some(supplier)) => state.consumer.receive(supplier, message, now),
            (_, None) => {}
        }
        drop(state);
        shared.alarm.ring();
    }

    fn ended(&self, channel: &Channel, error: &Error) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.lock();
        let now = shared.now();
        let (code, gone) = (code_of(error.kind()), !may_return(error.kind()));
        let (reader, supplier) = state.peers.ended(channel);
        if let Some(reader) = reader {
            state.producer.lost(reader, code, gone, now);
        }
        let mut chore = None;
        if let Some(supplier) = supplier {
            state.consumer.lost(supplier, code, gone, now);
            let watched = state.peers.place_of(supplier).is_some_and(|(_, place)| place.watched);
            if watched && error.kind() != ErrorKind::Shutdown {
                chore = state.opening(supplier);
            }
        }
        state.peers.forget_idle();
        drop(state);
        // Tried again at once: whoever was only cut off is still there.
        if let Some(chore) = chore {
            shared.do_chore(chore);
        }
        shared.alarm.ring();
    }
}

struct ReadWaker {
    shared: Weak<Shared>,
    read: ReadId,
}

impl Wake for ReadWaker {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.wake(self.read);
        }
    }
}
