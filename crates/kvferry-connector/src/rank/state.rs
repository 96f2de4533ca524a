//! What is behind a rank's lock: the state machines, the peers, the reads under way.

use super::peers::{Numbered, Peers};
use super::thread::{Action, Outgoing};
use super::types::{Event, RankObserver, ReadFrom, ReadMapper, ReadPart};
use crate::clock::now;
use crate::wakeup::Wakeup;
use kvferry::{Agent, Channel, Incarnation, Peer, Transfer};
use kvferry_proto::engine_handshake::{EngineHandshakes as Handshakes, Failure, Pairing};
use kvferry_proto::handoff::{
    Consumer, HandoffId, Limits, Outcome, PeerId, Producer, ProducerRank, ReadId, Refusal,
};
use kvferry_proto::{Origin, Timestamp};
use kvferry_sys::sync::{Condvar, Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// How often reads of a handoff are tried again over a session that lives but for their streams. A
/// fault that resets one stream of a peer may have reset all of them.
const RETRIES_MAX: u32 = 64;

/// Blocks of a handoff whose reads are left to the rank's thread: mapping them takes longer than
/// waking it.
const BLOCKS_LONG: usize = 256;

/// Changes that the thread which made them carries out by itself.
const FEW: usize = 2;

/// The thread that drives the machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrivingThread {
    RankThread,
    /// A thread of the agent, on which something has happened.
    Agent,
    /// A thread of the engine, which stays no longer than its own call needs.
    Caller,
}

/// Changes are carried out when this is dropped. See [`super::Rank::hold`].
pub(crate) struct HeldChanges<'a>(Option<&'a Arc<Shared>>);

pub(super) struct Shared {
    pub(super) agent: Agent,
    pub(super) state: Mutex<State>,
    pub(super) wakeup: Wakeup,
    /// Signals `State::events` and `State::closed`.
    pub(super) arrived: Condvar,
    /// Reads to poll again.
    pub(super) woken: Mutex<Vec<ReadId>>,
    pub(super) observer: Option<Weak<dyn RankObserver>>,
}

pub(super) struct State {
    pub(super) producer: Producer,
    pub(super) consumer: Consumer,
    /// The rank's thread takes their messages one by one and works them out without the lock: the agent's
    /// control thread, which takes the lock for each message, must not wait for that.
    pub(super) handshakes: Handshakes,
    pub(super) peers: Peers,
    /// The mapper of each fetch; taken out while it is called.
    pub(super) mappers: FxHashMap<HandoffId, Box<dyn ReadMapper>>,
    pub(super) reads: FxHashMap<ReadId, Running>,
    pub(super) unquiet: Unquiet,
    /// How often reads of a handoff were tried again over the session that they failed on.
    pub(super) retried: FxHashMap<HandoffId, u32>,
    pub(super) events: VecDeque<Event>,
    pub(super) notices: VecDeque<Notice>,
    /// First messages of new sessions, which leave before all others.
    pub(super) greetings: Vec<Outgoing>,
    /// Reads that are left to the rank's thread.
    pub(super) left: Vec<Action>,
    /// The thread that does what the machines ask for.
    pub(super) driver: Option<ThreadId>,
    /// Another thread has left work to the driver.
    pub(super) is_left_more: bool,
    /// The rank's thread waits for the driver to end.
    pub(super) is_awaited: bool,
    /// When the rank's thread wakes up by itself.
    pub(super) due: Option<Timestamp>,
    /// When the observer is called by itself.
    pub(super) observer_due: Option<Timestamp>,
    /// Number of [`HeldChanges`].
    held: usize,
    /// Changes meanwhile.
    changes: usize,
    pub(super) closed: bool,
}

pub(super) struct Running {
    pub(super) transfer: Transfer,
    pub(super) id: HandoffId,
    pub(super) bytes: u64,
    pub(super) began: Instant,
    pub(super) from: PeerId,
    /// The channel to the peer when the read began.
    pub(super) channel: Option<Channel>,
}

/// Reads that have ended while a device that does not answer still copies for them.
#[derive(Default)]
pub(super) struct Unquiet {
    pub(super) reads: Vec<ReadId>,
    /// When to look at them again, if there are any.
    pub(super) at: Option<Timestamp>,
}

pub(super) enum Notice {
    Ended(Event),
    LearnedEngine(u64, Result<Arc<Pairing>, Failure>),
    LostPeer(String),
    Answered(HandoffId),
    Called,
    Read(HandoffId, ReadPart),
}

impl Shared {
    pub(super) fn new(
        agent: &Agent,
        limits: &Limits,
        observer: Option<Weak<dyn RankObserver>>,
    ) -> Self {
        let silence = Duration::from_millis(agent.config().silence_ms);
        let limits = Limits { silence, ..limits.clone() };
        let state = State {
            producer: Producer::new(limits.clone()),
            consumer: Consumer::new(limits.clone()),
            handshakes: Handshakes::new(limits.reconnect, silence),
            peers: Peers::default(),
            mappers: FxHashMap::default(),
            reads: FxHashMap::default(),
            unquiet: Unquiet::default(),
            retried: FxHashMap::default(),
            events: VecDeque::new(),
            notices: VecDeque::new(),
            greetings: Vec::new(),
            left: Vec::new(),
            driver: None,
            is_left_more: false,
            is_awaited: false,
            due: None,
            observer_due: None,
            held: 0,
            changes: 0,
            closed: false,
        };
        Self {
            agent: agent.clone(),
            state: Mutex::new(state),
            wakeup: Wakeup::default(),
            arrived: Condvar::new(),
            woken: Mutex::default(),
            observer,
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        now()
    }

    /// Has so many changes carried out: by this thread if it drives, by who holds them, or by the rank's
    /// thread.
    pub(super) fn changed(&self, mut state: MutexGuard<'_, State>, changes: usize) {
        if state.driver == Some(std::thread::current().id()) {
            // This thread has called the observer, which changed something. It goes on driving.
        } else if state.held > 0 {
            state.changes += changes;
        } else {
            drop(state);
            self.wakeup.wake();
        }
    }
}

impl<'a> HeldChanges<'a> {
    /// Without `shared`, there is nothing to hold.
    pub(super) fn new(shared: Option<&'a Arc<Shared>>) -> Self {
        if let Some(shared) = shared {
            shared.state.lock().held += 1;
        }
        Self(shared)
    }
}

impl Drop for HeldChanges<'_> {
    fn drop(&mut self) {
        let Some(shared) = self.0 else { return };
        let mut state = shared.state.lock();
        state.held -= 1;
        if state.held > 0 {
            return;
        }
        let changes = std::mem::take(&mut state.changes);
        drop(state);
        match changes {
            0 => {}
            1..=FEW => shared.drive(DrivingThread::Caller),
            _ => shared.wakeup.wake(),
        }
    }
}

impl State {
    /// Producer ranks as the machine knows them.
    ///
    /// # Errors
    /// The errors of [`Peers::places`].
    pub(super) fn producer_ranks(
        &mut self,
        host: Option<Origin>,
        from: &[ReadFrom],
    ) -> Result<Vec<ProducerRank>, Refusal> {
        let peers = from.iter().map(|from| (&from.peer, from.incarnation));
        let places = self.peers.places(host, peers);
        let rank = |(from, place): (&ReadFrom, Numbered)| {
            let (peer, connected) = place?;
            Ok(ProducerRank {
                peer,
                incarnation: from.incarnation.or(connected),
                readers: from.readers,
                connected: connected.is_some(),
                need: from.need,
            })
        };
        from.iter().zip(places).map(rank).collect()
    }

    /// Producer ranks that get the message of an end, each with the incarnation that is meant. An address with another
    /// incarnation gets none: the one that is meant has ended and keeps nothing, or no session has met it yet, and it
    /// keeps its blocks for the lifetime of an offer. So do those beyond the number that can be told at a time.
    pub(super) fn ranks_to_tell(
        &mut self,
        host: Option<Origin>,
        to: &[(Peer, Option<Incarnation>)],
    ) -> Vec<(PeerId, Option<Incarnation>)> {
        let peers = to.iter().map(|(peer, meant)| (peer, *meant));
        let places = self.peers.places_to_tell(host, peers);
        let told = |((_, meant), place): (&(Peer, Option<Incarnation>), Numbered)| {
            let (id, connected) = place.ok()?;
            Some((id, meant.or(connected)))
        };
        to.iter().zip(places).filter_map(told).collect()
    }

    /// Whether to try a read again that lost its stream.
    pub(super) fn may_retry(&mut self, id: &HandoffId) -> bool {
        if self.consumer.deadline(id).is_none() {
            return false;
        }
        let retries = self.retried.entry(id.clone()).or_default();
        *retries += 1;
        *retries <= RETRIES_MAX
    }

    /// Adds the address of the peer that an outcome is due to: its number is known only here.
    pub(super) fn with_address(&mut self, mut outcome: Outcome) -> Outcome {
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

    /// Whether the driver should leave what remains to the rank's thread.
    pub(super) fn is_to_leave(&self, by: DrivingThread) -> bool {
        match by {
            DrivingThread::RankThread => false,
            DrivingThread::Agent => self.is_awaited,
            DrivingThread::Caller => self.is_left_more,
        }
    }

    /// Whether an action is left to the rank's thread.
    pub(super) fn takes_long(&self, action: &Action) -> bool {
        let Action::Read { id, from, .. } = action else { return false };
        let tables = self.consumer.table(id, *from).into_iter().flatten();
        tables.map(|table| table.blocks.len()).sum::<usize>() > BLOCKS_LONG
    }

    /// Whether the rank's thread has something to do before it wakes up by itself.
    pub(super) fn needs_thread(&self) -> bool {
        let is_earlier = match (self.next_timeout(), self.due) {
            (Some(next), Some(due)) => next < due,
            (next, _) => next.is_some(),
        };
        let is_left = !(self.left.is_empty() && self.notices.is_empty());
        let has_work = is_left || self.handshakes.has_work();
        let is_unheard = self.consumer.unheard().next().is_some();
        self.closed || is_earlier || has_work || is_unheard || self.peers.are_changed()
    }

    pub(super) fn next_timeout(&self) -> Option<Timestamp> {
        let machines = [
            self.producer.next_timeout(),
            self.consumer.next_timeout(),
            self.handshakes.next_timeout(),
            self.observer_due,
            self.unquiet.at,
        ];
        machines.into_iter().flatten().min()
    }
}
