//! One rank's handoffs over its agent.
//!
//! Both state machines are behind one lock, which is held for no longer than a step of theirs
//! takes. One thread does what they ask for: it sends, reads, opens channels and keeps the time; it
//! sleeps while there is nothing to do. Calls, messages and reads that end only tell the machines,
//! and wake it.

use crate::codes::{code_of, may_return};
use crate::peers::{Numbers, Peers};
use kvferry::{Agent, Batch, Channel, Correspondent, Error, ErrorKind, Options, Peer, Transfer};
use kvferry_proto::handoff::{
    BlockTable, Consumer, ConsumerAction, HandoffId, HandoffMessage, Limits, Outcome, PeerId,
    Producer, ProducerAction, ProducerRank, Progress, ReadId, Refusal, Slice,
};
use kvferry_proto::introduction::{
    Failure, IntroductionAction, IntroductionMessage, Introductions, OwnEngine, Pairing,
};
use kvferry_proto::{Incarnation, Timestamp, WireCode};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    /// This process is a child of the one that began it.
    #[error("handoffs can't be used in a child of the process that began them")]
    Forked,
    /// The operating system has no thread for it.
    #[error("the thread for handoffs can't be started")]
    Thread(#[source] std::io::Error),
}

/// How long beyond its handoff a read may take.
const BEYOND: Duration = Duration::from_secs(3);

/// How often a handoff's reads are tried again over a session that lives, but for their streams:
/// whatever took one of them may have taken all that there are to a peer.
const RETRIES_MAX: u32 = 64;

/// Introductions that wait at most; beyond that consumers ask again when their connection does.
const INBOX_MAX: usize = 4096;

/// Who is told of what happens on a rank, as it happens.
///
/// Called on the rank's thread, one call after the other, without any lock of the rank's.
pub(crate) trait Observer: Send + Sync {
    /// Something has ended.
    fn ended(&self, event: Event);

    /// An introduction has ended: see [`Rank::meet`].
    fn met(&self, ticket: u64, result: Result<Arc<Pairing>, Failure>);

    /// A life of a peer is over, or out of reach for now.
    fn lost(&self, incarnation: Incarnation);

    /// [`Rank::call`] was called since the last time.
    fn called(&self);

    /// A part of what is wanted has been read; before its end is told.
    fn read(&self, id: &HandoffId, part: ReadPart);
}

/// What has been read at once of a handoff.
#[derive(Clone, Copy, Debug)]
pub struct ReadPart {
    /// How much.
    pub bytes: u64,
    /// When it was begun.
    pub began: Instant,
    /// When it was found to have ended.
    pub ended: Instant,
}

/// One rank's handoffs. Dropping it ends them all.
pub struct Rank {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Where the thread is.
    process: u32,
}

/// What an observer has to hear.
enum News {
    Ended(Event),
    Met(u64, Result<Arc<Pairing>, Failure>),
    Lost(Incarnation),
    Called,
    Read(HandoffId, ReadPart),
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank").field("agent", &self.shared.agent).finish_non_exhaustive()
    }
}

struct Shared {
    agent: Agent,
    state: Mutex<State>,
    /// Something is to be done.
    alarm: Alarm,
    arrived: Condvar,
    /// Reads that have moved on.
    woken: Mutex<Vec<ReadId>>,
    /// Who hears of what happens, if not by asking.
    observer: Option<Weak<dyn Observer>>,
}

struct State {
    producer: Producer,
    consumer: Consumer,
    introductions: Introductions,
    peers: Peers,
    /// What maps a handoff that is wanted; taken out while it is asked.
    mappers: FxHashMap<HandoffId, Box<dyn Mapper>>,
    reads: FxHashMap<ReadId, Running>,
    /// How often reads of a handoff were tried again over the session that they had failed on.
    retried: FxHashMap<HandoffId, u32>,
    events: VecDeque<Event>,
    /// For the observer.
    news: VecDeque<News>,
    /// Lives that are gone: said after what they have said.
    lost: Vec<Incarnation>,
    /// Introductions that wait for this rank's thread: working them out may take a while.
    inbox: VecDeque<(Channel, IntroductionMessage)>,
    closed: bool,
}

/// A read under way.
struct Running {
    transfer: Transfer,
    id: HandoffId,
    bytes: u64,
    began: Instant,
    from: PeerId,
    /// How the peer was talked to when it began.
    channel: Option<Channel>,
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
    Open { address: String, peer: Peer },
}

impl Chore {
    fn is_read(&self, wanted: ReadId) -> bool {
        matches!(self, Self::Read { read, .. } if *read == wanted)
    }
}

impl Rank {
    /// The handoffs of the rank whose agent this is. From now on it receives the agent's messages.
    ///
    /// # Errors
    /// The agent's `InvalidArgument` if somebody receives them already; [`Fault::Thread`].
    pub fn start(agent: &Agent, limits: &Limits) -> Result<Self, Fault> {
        Self::observed(agent, limits, None)
    }

    /// The same, with somebody who hears of what happens: [`Rank::events`] has nothing to say then.
    pub(crate) fn observed(
        agent: &Agent,
        limits: &Limits,
        observer: Option<Weak<dyn Observer>>,
    ) -> Result<Self, Fault> {
        let state = State {
            producer: Producer::new(limits.clone()),
            consumer: Consumer::new(limits.clone()),
            introductions: Introductions::new(limits.reconnect),
            peers: Peers::default(),
            mappers: FxHashMap::default(),
            reads: FxHashMap::default(),
            retried: FxHashMap::default(),
            events: VecDeque::new(),
            news: VecDeque::new(),
            lost: Vec::new(),
            inbox: VecDeque::new(),
            closed: false,
        };
        let shared = Arc::new(Shared {
            agent: agent.clone(),
            state: Mutex::new(state),
            alarm: Alarm::default(),
            arrived: Condvar::new(),
            woken: Mutex::default(),
            observer,
        });
        agent.correspond(Arc::new(Ear(Arc::downgrade(&shared))))?;
        let worker = Arc::clone(&shared);
        let thread = kvferry_sys::thread::spawn("kvferry-handoff".into(), move || worker.run())
            .map_err(Fault::Thread)?;
        let thread = Mutex::new(Some(thread));
        Ok(Self { shared, thread, process: std::process::id() })
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
        self.check_process()?;
        let shared = &self.shared;
        let peers = shared.peers(from)?;
        let mut state = shared.lock();
        let now = shared.now();
        let places = state.places(from, &peers);
        let rank = |(&(peer, connected), source): (&(PeerId, bool), &Source)| ProducerRank {
            peer,
            readers: source.readers,
            connected,
        };
        let ranks: Vec<_> = places.iter().zip(from).map(rank).collect();
        let wanted = state.consumer.want(id, &ranks, budget, now);
        if wanted.is_ok() {
            state.mappers.insert(id.clone(), mapper);
        }
        drop(state);
        shared.alarm.ring();
        Ok(wanted?)
    }

    /// Tells producers that nobody here will want this: it is in the cache already, or its request
    /// was aborted or rejected before it was scheduled.
    ///
    /// # Errors
    /// [`Refusal::InUse`], [`Refusal::Ended`]; the agent's for an address that is none.
    pub fn free(
        &self,
        id: &HandoffId,
        from: &[Source],
        code: WireCode,
        detail: &str,
    ) -> Result<(), Fault> {
        self.check_process()?;
        let shared = &self.shared;
        let peers = shared.peers(from)?;
        let mut state = shared.lock();
        let now = shared.now();
        let places = state.places(from, &peers);
        let peers: Vec<_> = places.iter().map(|(peer, _)| *peer).collect();
        let freed = state.consumer.free(id, &peers, code, detail, now);
        if freed.is_ok() {
            for peer in peers {
                if let Some((_, place)) = state.peers.place_of(peer) {
                    place.addressed = true;
                }
            }
        }
        drop(state);
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

    /// Says which engine this rank is of. Until then, peers that ask wait for the answer.
    pub(crate) fn know(&self, own: OwnEngine) -> Result<(), Fault> {
        self.tell(|state, _| {
            state.introductions.know(own);
            Ok(())
        })
    }

    /// Wants to know the engine of whoever is at an address: [`Observer::met`] says it.
    pub(crate) fn meet(&self, ticket: u64, address: &str, budget: Duration) -> Result<(), Fault> {
        self.check_process()?;
        let peer = self.shared.agent.peer(address)?;
        self.tell(|state, now| {
            let (id, connected) = state.peers.place(address, &peer);
            state.introductions.meet(ticket, id, connected, budget, now);
            Ok(())
        })
    }

    /// Has [`Observer::called`] called soon, on the rank's thread.
    pub(crate) fn call(&self) {
        if std::process::id() != self.process {
            return;
        }
        let mut state = self.shared.lock();
        if !matches!(state.news.back(), Some(News::Called)) {
            state.news.push_back(News::Called);
        }
        drop(state);
        self.shared.alarm.ring();
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
        of_machines.chain(state.introductions.gauges()).chain(own).collect()
    }

    fn tell(
        &self,
        what: impl FnOnce(&mut State, Timestamp) -> Result<(), Refusal>,
    ) -> Result<(), Fault> {
        self.check_process()?;
        let mut state = self.shared.lock();
        let told = what(&mut state, self.shared.now());
        drop(state);
        self.shared.alarm.ring();
        Ok(told?)
    }
}

impl Rank {
    /// A child of the process that started it has neither the thread nor, maybe, the lock.
    fn check_process(&self) -> Result<(), Fault> {
        if std::process::id() == self.process { Ok(()) } else { Err(Fault::Forked) }
    }

    /// Ends everything. Nothing is read any more when this returns, unless it is called by an
    /// observer.
    pub(crate) fn close(&self) {
        if std::process::id() != self.process {
            return;
        }
        self.shared.lock().closed = true;
        self.shared.alarm.ring();
        self.shared.arrived.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // It panics on a broken invariant only, and has said so.
            drop(thread.join());
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            self.close();
        } else {
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(thread.take());
        }
    }
}

impl State {
    /// The numbers of those at some addresses, and whether there is a connection to each.
    fn places(&mut self, from: &[Source], peers: &[Peer]) -> Vec<(PeerId, bool)> {
        let both = from.iter().zip(peers);
        both.map(|(source, peer)| self.peers.place(&source.address, peer)).collect()
    }

    /// A channel began, or is found to have.
    fn began(&mut self, channel: &Channel, now: Timestamp) {
        let Numbers { reader, suppliers } = self.peers.began(channel);
        if let Some(reader) = reader {
            self.producer.met(reader);
        }
        suppliers.into_iter().for_each(|supplier| self.met(supplier, now));
    }

    /// There is a channel to somebody who is consumed from. If he is being met, that is not over
    /// before it is found whether he is on this host.
    fn met(&mut self, supplier: PeerId, now: Timestamp) {
        if self.peers.place_of(supplier).is_some_and(|(_, place)| !place.opening) {
            self.consumer.met(supplier, now);
            self.introductions.met(supplier);
        }
    }

    /// Whether a read that lost its stream is tried again.
    fn tries_again(&mut self, id: &HandoffId) -> bool {
        if self.consumer.deadline(id).is_none() {
            return false;
        }
        let tries = self.retried.entry(id.clone()).or_default();
        *tries += 1;
        *tries <= RETRIES_MAX
    }

    /// Takes in one of the introductions that wait, if any.
    fn introduce(&mut self) {
        let Some((channel, message)) = self.inbox.pop_front() else { return };
        let Numbers { reader, suppliers } = self.peers.numbers_of(&channel);
        if matches!(message, IntroductionMessage::Introduce(_)) {
            if let Some(reader) = reader {
                self.introductions.receive(reader, message);
            }
        } else {
            for supplier in suppliers {
                self.introductions.receive(supplier, message.clone());
            }
        }
    }

    /// There is a channel to whoever is at an address, which was being met.
    fn up_at(&mut self, address: &str, now: Timestamp) {
        if let Some(supplier) = self.peers.up_at(address) {
            self.met(supplier, now);
        }
    }

    /// An outcome that says where the peer is that it is due to: its number means nothing to others.
    fn named(&mut self, mut outcome: Outcome) -> Outcome {
        let Some(peer) = outcome.peer else { return outcome };
        let address = match self.peers.place_of(peer) {
            Some((address, _)) => address.to_owned(),
            None => self.peers.channel(peer).map_or("", Channel::peer_address).to_owned(),
        };
        if !address.is_empty() {
            let separator = if outcome.detail.is_empty() { "" } else { " " };
            outcome.detail += &format!("{separator}(peer {address})");
        }
        outcome
    }

    /// Something has ended: the engine hears of it by asking, or by its observer.
    fn ended(&mut self, event: Event, observed: bool) {
        if observed {
            self.news.push_back(News::Ended(event));
        } else {
            self.events.push_back(event);
        }
    }

    fn next_timeout(&self) -> Option<Timestamp> {
        let machines = [
            self.producer.next_timeout(),
            self.consumer.next_timeout(),
            self.introductions.next_timeout(),
        ];
        machines.into_iter().flatten().min()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_nanos(kvferry_sys::clock::boottime_ns())
    }

    /// Looks addresses up, which may take a while.
    fn peers(&self, from: &[Source]) -> Result<Vec<Peer>, Error> {
        from.iter().map(|source| self.agent.peer(&source.address)).collect()
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
            state.introductions.expire(now);
            self.look_at_reads(&mut state, now);
            state.introduce();
            let mut chores = self.work(&mut state);
            let State { peers, consumer, .. } = &mut *state;
            let retry = peers.retry(consumer.unheard(), now);
            let unmet = state.peers.take_unmet().into_iter();
            chores.extend(unmet.map(|(address, peer)| Chore::Open { address, peer }));
            state.peers.forget_idle();
            let due = state.next_timeout().into_iter().chain(retry).min();
            let lost = std::mem::take(&mut state.lost);
            state.news.extend(lost.into_iter().map(News::Lost));
            let news = std::mem::take(&mut state.news);
            let all_met = state.inbox.is_empty();
            drop(state);
            let is_idle = chores.is_empty() && news.is_empty() && all_met;
            self.inform(news);
            if is_idle {
                self.alarm.wait(due.map(|due| due.saturating_since(self.now())));
            }
            chores.into_iter().for_each(|chore| self.do_chore(chore));
        }
    }

    fn inform(&self, news: VecDeque<News>) {
        let Some(observer) = self.observer.as_ref().and_then(Weak::upgrade) else { return };
        for news in news {
            let told = catch_unwind(AssertUnwindSafe(|| match news {
                News::Ended(event) => observer.ended(event),
                News::Met(ticket, result) => observer.met(ticket, result),
                News::Lost(incarnation) => observer.lost(incarnation),
                News::Called => observer.called(),
                News::Read(id, part) => observer.read(&id, part),
            }));
            if told.is_err() {
                // All other handoffs go on.
                tracing::error!("an observer of handoffs panicked");
            }
        }
    }

    /// Nothing is read any more when this returns.
    fn close(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        // Whoever waits for something of this rank hears that it will not come.
        let now = self.now();
        state.producer.close(now);
        state.consumer.close(now);
        drop(self.work(&mut state));
        let reads: Vec<_> = state.reads.drain().map(|(_, running)| running.transfer).collect();
        drop(state);
        reads.iter().for_each(Transfer::cancel);
        for transfer in reads {
            // The agent's promise: a cancelled read ends, at the latest with the silence limit.
            while transfer.wait(Duration::from_secs(1)).is_none() {}
        }
    }

    /// Tells the machines of reads that have ended.
    fn look_at_reads(self: &Arc<Self>, state: &mut State, now: Timestamp) {
        let woken = std::mem::take(&mut *self.woken.lock().unwrap_or_else(PoisonError::into_inner));
        for read in woken {
            let Some(running) = state.reads.get_mut(&read) else { continue };
            let waker = self.waker(read);
            let transfer = Pin::new(&mut running.transfer);
            let Poll::Ready(outcome) = Future::poll(transfer, &mut Context::from_waker(&waker))
            else {
                continue;
            };
            let Running { id, bytes, began, from, channel: before, .. } =
                state.reads.remove(&read).expect("it was there");
            if outcome.is_ok() && self.observer.is_some() {
                let part = ReadPart { bytes, began, ended: Instant::now() };
                state.news.push_back(News::Read(id.clone(), part));
            }
            let result = outcome.map(drop).map_err(|e| match code_of(e.kind()) {
                // Its own time is not over before the handoff's: a stream did not open.
                WireCode::Deadline => (WireCode::Silent, e.to_string()),
                code => (code, e.to_string()),
            });
            let is_lost = matches!(&result, Err((WireCode::Closed | WireCode::Silent, _)));
            state.consumer.read_ended(read, result, now);
            let channel = state.peers.channel(from).filter(|channel| channel.end().is_none());
            if is_lost && channel.is_some() {
                // It failed with a session that there is a successor of already; or it lost its
                // stream, and the session lives.
                let is_new = channel != before.as_ref();
                if is_new || state.tries_again(&id) {
                    state.consumer.met(from, now);
                }
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
                ProducerAction::Send { to, message } => self.send(state, to, &message),
                ProducerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ProducerAction::Ended { id, outcome } => {
                    let outcome = state.named(outcome);
                    state.ended(Event::Produced { id, outcome }, self.observer.is_some());
                    self.arrived.notify_all();
                }
            }
        }
        while let Some(action) = state.consumer.poll() {
            match action {
                ConsumerAction::Send { to, message } => self.send(state, to, &message),
                ConsumerAction::Watch { peer, on } => state.peers.watch(peer, on),
                ConsumerAction::Read { read, id, from, slice } => {
                    chores.push(Chore::Read { read, id, from, slice });
                }
                ConsumerAction::CancelRead(read) => {
                    if let Some(running) = state.reads.get(&read) {
                        running.transfer.cancel();
                    } else {
                        // It has not begun.
                        chores.retain(|chore| !chore.is_read(read));
                        let unread = Err((WireCode::Cancelled, String::new()));
                        state.consumer.read_ended(read, unread, self.now());
                    }
                }
                ConsumerAction::Ended { id, outcome, side_data } => {
                    state.mappers.remove(&id);
                    state.retried.remove(&id);
                    let named = side_data.into_iter().map(|(peer, data)| {
                        let place = state.peers.place_of(peer);
                        (place.map_or("", |(address, _)| address).to_owned(), data)
                    });
                    let side_data = named.collect();
                    let outcome = state.named(outcome);
                    let event = Event::Consumed { id, outcome, side_data };
                    state.ended(event, self.observer.is_some());
                    self.arrived.notify_all();
                }
            }
        }
        while let Some(action) = state.introductions.poll() {
            match action {
                IntroductionAction::Send { to, message } => {
                    self.send_introduction(state, to, &message);
                }
                IntroductionAction::Watch { peer, on } => state.peers.introduce(peer, on),
                IntroductionAction::Met { ticket, result } => {
                    state.news.push_back(News::Met(ticket, result));
                }
                IntroductionAction::Refused { peer, detail } => {
                    let channel = state.peers.channel(peer);
                    let name = channel.map_or("", Channel::peer_name);
                    tracing::warn!(peer = name, detail, "an engine was refused as a consumer");
                }
            }
        }
        chores
    }

    fn send_introduction(&self, state: &State, to: PeerId, message: &IntroductionMessage) {
        let Some(channel) = state.peers.channel(to) else { return };
        if let Err(error) = channel.send(message.encode())
            && channel.end().is_none()
        {
            let peer = channel.peer_name();
            tracing::warn!(peer, %error, "an introduction can't be sent");
            channel.close(error);
        }
    }

    fn send(&self, state: &mut State, to: PeerId, message: &HandoffMessage) {
        let Some(channel) = state.peers.channel(to) else { return };
        let Err(error) = channel.send(message.encode()) else { return };
        if channel.end().is_some() {
            // What matters is said again when there is a session again.
            return;
        }
        tracing::warn!(peer = channel.peer_name(), %error, "a handoff's message can't be sent");
        match (error.kind(), message.id()) {
            (ErrorKind::TooLarge, Some(id)) => {
                let why = "its blocks and side data are too much for a message";
                drop(state.producer.withdraw(id, WireCode::TooLarge, why, self.now()));
            }
            // It takes nothing any more. Another session begins with what matters.
            _ => channel.close(error),
        }
    }

    fn do_chore(self: &Arc<Self>, chore: Chore) {
        match chore {
            Chore::Read { read, id, from, slice } => self.begin_read(read, &id, from, slice),
            Chore::Open { address, peer } => self.open(address, &peer),
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
        let channel = state.peers.channel(from).cloned();
        // The machine cancels it when the handoff's time is over; this is for the case that it
        // can't be cancelled.
        let left = state.consumer.deadline(id).map(|at| at.saturating_since(self.now()));
        let timeout = left.map(|left| left + BEYOND);
        drop(state);
        let (Some(mut mapper), Some((address, peer)), Some(tables)) = (mapper, place, tables)
        else {
            return self.read_ended(read, Err((WireCode::Closed, String::new())));
        };
        let part = Read { from: &address, tables: &tables, slice };
        let mapped = catch_unwind(AssertUnwindSafe(|| mapper.map(&part)));
        let mapped =
            mapped.unwrap_or_else(|_| Err((WireCode::Internal, "its mapper panicked".to_owned())));
        let began = Instant::now();
        let begun = mapped.map(|batch| {
            let bytes = batch.bytes();
            (bytes > 0)
                .then(|| (bytes, peer.read_async(batch, Options { timeout, ..Options::default() })))
        });
        let mut state = self.lock();
        state.mappers.insert(id.clone(), mapper);
        if let Ok(Some((bytes, transfer))) = begun {
            let id = id.clone();
            state.reads.insert(read, Running { transfer, id, bytes, began, from, channel });
            drop(state);
            self.wake(read);
        } else {
            drop(state);
            self.read_ended(read, begun.map(drop));
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
    fn open(self: &Arc<Self>, address: String, peer: &Peer) {
        let shared = Arc::downgrade(self);
        peer.open_channel(Box::new(move |met| {
            if let Some(shared) = shared.upgrade() {
                shared.opened(&address, met);
            }
        }));
    }

    /// A message that is none of a handoff's.
    fn introduced(&self, channel: &Channel, message: &[u8]) {
        let message = match IntroductionMessage::decode(message) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!(peer = channel.peer_name(), %error, "a message was not understood");
                return;
            }
        };
        let mut state = self.lock();
        state.began(channel, self.now());
        // What it said before and nobody has looked at means nothing any more.
        let kind = message.kind().to_owned();
        state.inbox.retain(|(of, waits)| of != channel || waits.kind() != kind);
        if state.inbox.len() < INBOX_MAX {
            state.inbox.push_back((channel.clone(), message));
        } else {
            tracing::warn!(peer = channel.peer_name(), "too many introductions at once");
        }
        drop(state);
        self.alarm.ring();
    }

    fn opened(&self, address: &str, met: kvferry::Result<Channel>) {
        let mut state = self.lock();
        let now = self.now();
        // Its end would not be told again.
        let met = met.and_then(|channel| channel.end().cloned().map_or(Ok(channel), Err));
        match met {
            Ok(channel) => {
                state.began(&channel, now);
                if let Some((id, gone)) = state.peers.met_at(address, channel.incarnation()) {
                    if let Some(gone) = gone {
                        state.consumer.lost(gone, WireCode::StaleIncarnation, true, now);
                        state.introductions.moved(gone, id);
                    }
                    state.consumer.met(id, now);
                    state.introductions.met(id);
                }
            }
            Err(error) => {
                if let Some(id) = state.peers.not_met_at(address) {
                    state.consumer.lost(id, code_of(error.kind()), true, now);
                    state.introductions.lost(id, code_of(error.kind()), true, now);
                } else {
                    // It has met us meanwhile.
                    state.up_at(address, now);
                }
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
        state.began(channel, now);
        drop(state);
        shared.alarm.ring();
    }

    fn received(&self, channel: &Channel, message: &[u8]) {
        let Some(shared) = self.0.upgrade() else { return };
        let message = match HandoffMessage::decode(message) {
            Ok(HandoffMessage::Unknown { .. }) => return shared.introduced(channel, message),
            Ok(message) => message,
            Err(error) => {
                tracing::warn!(peer = channel.peer_name(), %error, "a message was not understood");
                return;
            }
        };
        let mut state = shared.lock();
        let now = shared.now();
        // It may have begun before anybody listened.
        state.began(channel, now);
        let Numbers { reader, suppliers } = state.peers.numbers_of(channel);
        let is_for_producer = match &message {
            HandoffMessage::Ask(_) | HandoffMessage::Confirm(_) => true,
            HandoffMessage::Stop(stop) => stop.by_consumer,
            _ => false,
        };
        if is_for_producer {
            if let Some(reader) = reader {
                state.producer.receive(reader, message, now);
            }
        } else {
            for supplier in suppliers {
                state.consumer.receive(supplier, message.clone(), now);
            }
        }
        drop(state);
        shared.alarm.ring();
    }

    fn ended(&self, channel: &Channel, error: &Error) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.lock();
        let now = shared.now();
        let (code, gone) = (code_of(error.kind()), !may_return(error.kind()));
        let (Numbers { reader, suppliers }, is_up) = state.peers.ended(channel);
        // What was on its way is lost, also if there is another channel: both say it again there.
        let gone = gone && !is_up;
        if let Some(reader) = reader {
            state.producer.lost(reader, code, gone, now);
            state.introductions.lost(reader, code, gone, now);
            if is_up {
                state.producer.met(reader);
            }
        }
        for supplier in suppliers {
            state.consumer.lost(supplier, code, gone, now);
            state.introductions.lost(supplier, code, gone, now);
            if is_up {
                state.met(supplier, now);
            }
        }
        if shared.observer.is_some() && !is_up {
            state.lost.push(channel.incarnation());
        }
        drop(state);
        // Whoever is still wanted is met again at once: he may only have been cut off.
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
