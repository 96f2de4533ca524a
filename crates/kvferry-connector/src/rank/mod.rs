//! One rank's handoffs over its agent.
//!
//! The state machines of the protocol are behind one lock, which is held for one step of theirs at a
//! time. A message arrives, or a read ends, on a thread of the agent. That thread changes the machines
//! and then does what they ask for: it sends messages, begins reads and calls the observer. No other
//! thread is woken for that. Only one thread at a time does this, the *driver*; the others leave their
//! work to it. The rank's own thread keeps the time, opens channels, and does long work and what calls
//! of the engine ask for.
//!
//! | for | open |
//! |---|---|
//! | calls | `mod.rs`, `types.rs` |
//! | what is behind the lock | `state.rs`, `peers.rs`, `room.rs` |
//! | what the machines ask for, the rank's thread | `thread.rs`, `reads.rs` |
//! | what the agent's control thread reports | `messages.rs` |

mod messages;
mod peers;
mod reads;
mod room;
mod state;
#[cfg(test)]
mod tests;
mod thread;
mod types;

use kvferry::{Agent, Error, Incarnation, Peer, Region};
use kvferry_proto::engine_handshake::OwnEngine;
use kvferry_proto::handoff::{BlockTable, HandoffId, Limits, Need, Progress, Refusal};
use kvferry_proto::{Origin, Timestamp, WireCode};
use kvferry_sys::fd;
use kvferry_sys::sync::Mutex;
use messages::Handler;
pub(crate) use peers::host_of;
use state::{HeldChanges, Notice, Shared, State};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;
pub use types::{Event, RankError, ReadMapper, ReadPart, ReadRequest, SideData, Source};
pub(crate) use types::{RankObserver, ReadFrom};

/// One rank's handoffs. Dropping it ends them all.
pub struct Rank {
    shared: Arc<Shared>,
    /// Locked until it is joined.
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: ThreadId,
    /// The forks before the process that the thread is in. A fork of it has neither the thread nor a usable lock.
    forks: u32,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank").field("agent", &self.shared.agent).finish_non_exhaustive()
    }
}

impl Rank {
    /// Starts the thread of the rank that `agent` belongs to, and receives the agent's messages from
    /// now on.
    ///
    /// # Errors
    /// The agent's `InvalidArgument` if it has a message handler already; [`RankError::Thread`].
    pub fn start(agent: &Agent, limits: &Limits) -> Result<Self, RankError> {
        Self::observed(agent, limits, None)
    }

    /// As [`Rank::start`]. An observer gets the events; [`Rank::events`] is empty then.
    pub(crate) fn observed(
        agent: &Agent,
        limits: &Limits,
        observer: Option<Weak<dyn RankObserver>>,
    ) -> Result<Self, RankError> {
        let shared = Arc::new(Shared::new(agent, limits, observer));
        agent.set_message_handler(Arc::new(Handler(Arc::downgrade(&shared))))?;
        let runner = Arc::clone(&shared);
        let thread = kvferry_sys::thread::spawn("kvferry-handoff".into(), move || runner.run())
            .map_err(RankError::Thread)?;
        let (thread_id, thread) = (thread.thread().id(), Mutex::new(Some(thread)));
        Ok(Self { shared, thread, thread_id, forks: fd::forks() })
    }

    /// Says that a request has arrived at this engine and will be offered; it may wait in a queue.
    ///
    /// # Errors
    /// As [`Rank::offer`].
    pub fn expect(&self, id: &HandoffId) -> Result<(), RankError> {
        self.change(|state, now| state.producer.expect(id, now))
    }

    /// Offers a request's KV before any of it is ready. Its blocks must not be reused until
    /// [`Event::Produced`], or until [`Rank::restart`] or [`Rank::withdraw`] is called.
    ///
    /// # Errors
    /// [`Refusal::Ended`] if its consumer does not need it or has given up; [`Refusal::InUse`];
    /// [`Refusal::Full`].
    pub fn offer(&self, id: &HandoffId) -> Result<(), RankError> {
        self.change(|state, now| state.producer.offer(id, now))
    }

    /// Announces that more is ready. See [`kvferry_proto::handoff::Producer::advance`].
    ///
    /// # Errors
    /// [`Refusal::Unknown`] if it has ended; [`Refusal::Misuse`].
    pub fn advance(
        &self,
        id: &HandoffId,
        tables: Vec<BlockTable>,
        progress: Progress,
    ) -> Result<(), RankError> {
        self.change(|state, _| state.producer.advance(id, tables, progress))
    }

    /// Announces that all is ready. `side_data` is for the consumer's engine.
    ///
    /// # Errors
    /// As [`Rank::advance`].
    pub fn complete(
        &self,
        id: &HandoffId,
        tables: Vec<BlockTable>,
        progress: Progress,
        side_data: Option<Vec<u8>>,
    ) -> Result<(), RankError> {
        self.change(|state, now| state.producer.complete(id, tables, progress, side_data, now))
    }

    /// Takes the blocks back now. The engine will compute the request again.
    ///
    /// # Errors
    /// As [`Rank::advance`].
    pub fn restart(&self, id: &HandoffId) -> Result<(), RankError> {
        self.change(|state, _| state.producer.restart(id))
    }

    /// Ends an offer, or a handoff that was to be offered, from this side. Its blocks may be reused
    /// now.
    ///
    /// # Errors
    /// [`Refusal::Ended`].
    pub fn withdraw(&self, id: &HandoffId, code: WireCode, detail: &str) -> Result<(), RankError> {
        self.change(|state, now| state.producer.withdraw(id, code, detail, now))
    }

    /// Withdraws an offer that no consumer has asked for; [`Event::Produced`] says so.
    pub(crate) fn reclaim(&self, id: &HandoffId, detail: &str) {
        let reclaimed = self.change(|state, now| {
            state.producer.reclaim(id, detail, now);
            Ok(())
        });
        // A fork has no offers.
        drop(reclaimed);
    }

    /// Fetches a request's KV into allocated blocks, which must not be touched until
    /// [`Event::Consumed`]. Looks names up, which may block.
    ///
    /// # Errors
    /// [`Refusal::InUse`], [`Refusal::Ended`], [`Refusal::Full`], [`Refusal::Misuse`]; the agent's
    /// if an address cannot be resolved.
    pub fn fetch(
        &self,
        id: &HandoffId,
        from: &[Source],
        budget: Duration,
        mapper: Box<dyn ReadMapper>,
    ) -> Result<(), RankError> {
        let readers = from.iter().map(|source| source.readers);
        let found = self.resolve(from)?.into_iter().zip(readers);
        let found = found.map(|(peer, readers)| ReadFrom {
            peer,
            incarnation: None,
            readers,
            need: Need::ALL,
        });
        let from: Vec<_> = found.collect();
        self.fetch_from(id, None, &from, budget, mapper)
    }

    /// As [`Rank::fetch`], from producer ranks that were found. `host` is that of the address by which their engine was
    /// named: their addresses count for it, or each for its own. Never blocks. Only the incarnation of a rank that is meant
    /// is asked. If another one is found before any rank has answered, the handoff ends as
    /// [`WireCode::StaleIncarnation`], and may be fetched again.
    ///
    /// # Errors
    /// Those of [`Rank::fetch`], and [`Refusal::Restarted`] if another incarnation of a rank is there.
    pub(crate) fn fetch_from(
        &self,
        id: &HandoffId,
        host: Option<Origin>,
        from: &[ReadFrom],
        budget: Duration,
        mapper: Box<dyn ReadMapper>,
    ) -> Result<(), RankError> {
        self.change(|state, now| {
            let ranks = state.producer_ranks(host, from)?;
            state.consumer.want(id, &ranks, budget, now)?;
            state.mappers.insert(id.clone(), mapper);
            Ok(())
        })
    }

    /// Asks for a request's KV that will be fetched or freed later: it waits in this engine's queue.
    /// Never blocks. There is no event of its end.
    ///
    /// # Errors
    /// Those of [`Rank::fetch_from`].
    pub(crate) fn claim_from(
        &self,
        id: &HandoffId,
        host: Option<Origin>,
        from: &[ReadFrom],
    ) -> Result<(), RankError> {
        self.change(|state, now| {
            let ranks = state.producer_ranks(host, from)?;
            state.consumer.claim(id, &ranks, now)
        })
    }

    /// Tells producers that no rank of this engine needs a handoff: it is in the cache already, or its
    /// request was aborted or rejected before it was scheduled. Looks names up, which may block.
    ///
    /// # Errors
    /// [`Refusal::InUse`], [`Refusal::Ended`]; the agent's if an address cannot be resolved.
    pub fn free(
        &self,
        id: &HandoffId,
        from: &[Source],
        code: WireCode,
        detail: &str,
    ) -> Result<(), RankError> {
        let from: Vec<_> = self.resolve(from)?.into_iter().map(|peer| (peer, None)).collect();
        self.free_at(id, None, &from, code, detail)
    }

    /// As [`Rank::free`], at the incarnations that are meant; `None` for the one that is there. `host` is as for
    /// [`Rank::fetch_from`]. Never blocks, and needs no room for sessions.
    pub(crate) fn free_at(
        &self,
        id: &HandoffId,
        host: Option<Origin>,
        from: &[(Peer, Option<Incarnation>)],
        code: WireCode,
        detail: &str,
    ) -> Result<(), RankError> {
        self.change(|state, now| {
            let ranks = state.ranks_to_tell(host, from);
            state.consumer.free(id, &ranks, code, detail, now)?;
            ranks.into_iter().for_each(|(peer, _)| state.peers.connect_once(peer));
            Ok(())
        })
    }

    /// Ends a fetch or a claim. The blocks of a fetch are free when [`Event::Consumed`] says so.
    ///
    /// # Errors
    /// [`Refusal::Unknown`] if it has ended already.
    pub fn cancel(&self, id: &HandoffId, code: WireCode, detail: &str) -> Result<(), RankError> {
        self.change(|state, now| state.consumer.cancel(id, code, detail, now))
    }

    /// Sets the engine that this rank belongs to. Until then, peers that ask for it wait.
    pub(crate) fn set_own_engine(&self, own: OwnEngine) -> Result<(), RankError> {
        self.change(|state, _| {
            state.handshakes.set_own(own);
            Ok(())
        })
    }

    /// Learns the engine of a peer: [`RankObserver::learned_engine`] gets it with the `ticket`. `to_free` if its ranks will
    /// only be told that they may free blocks.
    pub(crate) fn learn_engine(
        &self,
        ticket: u64,
        peer: &Peer,
        to_free: bool,
        budget: Duration,
    ) -> Result<(), RankError> {
        self.change(|state, now| {
            let (id, connected) = state.peers.place_to_learn(peer, to_free)?;
            state.handshakes.meet(ticket, id, connected.is_some(), budget, now);
            Ok(())
        })
    }

    /// Has [`RankObserver::called`] called soon, for so many actions.
    pub(crate) fn call_observer(&self, actions: usize) {
        // In a fork there is no observer to call.
        if actions == 0 || self.is_forked() {
            return;
        }
        let mut state = self.shared.state.lock();
        if !matches!(state.notices.back(), Some(Notice::Called)) {
            state.notices.push_back(Notice::Called);
        }
        self.shared.changed(state, actions);
    }

    /// Has [`RankObserver::called`] called at this time, or earlier if it was asked to be.
    pub(crate) fn call_observer_at(&self, at: Timestamp) {
        if self.is_forked() {
            return;
        }
        let mut state = self.shared.state.lock();
        if state.observer_due.is_none_or(|due| at < due) {
            state.observer_due = Some(at);
            self.shared.changed(state, 1);
        }
    }

    /// Collects the changes that follow until the guard is dropped: few are carried out by the thread
    /// that drops it, which takes no longer than waking another one, many by the rank's thread, so that
    /// an engine's step does not pay for their messages. If the rank's thread runs for another reason,
    /// it carries them out earlier. The guard is dropped without any lock of the observer.
    pub(crate) fn hold(&self) -> HeldChanges<'_> {
        HeldChanges::new((!self.is_forked()).then_some(&self.shared))
    }

    /// Takes the events since the last call; none in a fork.
    pub fn events(&self) -> Vec<Event> {
        if self.is_forked() {
            return Vec::new();
        }
        self.shared.state.lock().events.drain(..).collect()
    }

    /// Waits for the next event; `None` after `timeout`, and at once in a fork.
    pub fn wait(&self, timeout: Duration) -> Option<Event> {
        if self.is_forked() {
            return None;
        }
        let none = |state: &mut State| state.events.is_empty() && !state.closed;
        let state = self.shared.state.lock();
        self.shared.arrived.wait_while(state, timeout, none).events.pop_front()
    }

    /// Counts of what is kept, by name. All but tombstones and connected peers are zero when nothing
    /// is under way. None in a fork.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        if self.is_forked() {
            return Vec::new();
        }
        let state = self.shared.state.lock();
        let own = [
            ("peers", state.peers.len()),
            ("mappers", state.mappers.len()),
            ("transfers", state.reads.len()),
            ("unquiet", state.unquiet.reads.len()),
            ("events", state.events.len()),
        ];
        let of_machines = state.producer.gauges().into_iter().chain(state.consumer.gauges());
        of_machines.chain(state.handshakes.gauges()).chain(own).collect()
    }

    /// Ends everything. Nothing is read any more when this returns, unless the observer calls it, or a device does not end
    /// its copies. False in a fork, where there is nothing to end.
    pub(crate) fn close(&self) -> bool {
        if self.is_forked() {
            return false;
        }
        let me = std::thread::current().id();
        let mut state = self.shared.state.lock();
        state.closed = true;
        // The thread must end before the rank's thread does.
        let is_driver = state.driver == Some(me);
        drop(state);
        self.shared.wakeup.wake();
        self.shared.arrived.notify_all();
        if !is_driver
            && me != self.thread_id
            && let thread = &mut *self.thread.lock()
            && let Some(thread) = thread.take()
        {
            // It panics only on a broken invariant, and the panic has been reported.
            drop(thread.join());
        }
        true
    }

    /// Takes memory away from peers. Nothing reads or writes it when this returns.
    pub(crate) fn unregister(&self, regions: &[Region]) -> kvferry::Result<()> {
        self.shared.agent.unregister_batch(regions)
    }

    /// Changes the machines under the lock, and has that carried out.
    fn change(
        &self,
        change: impl FnOnce(&mut State, Timestamp) -> Result<(), Refusal>,
    ) -> Result<(), RankError> {
        self.check_process()?;
        let mut state = self.shared.state.lock();
        let changed = change(&mut state, self.shared.now());
        self.shared.changed(state, 1);
        Ok(changed?)
    }

    fn resolve(&self, from: &[Source]) -> Result<Vec<Peer>, RankError> {
        self.check_process()?;
        let peers = from.iter().map(|source| self.shared.agent.peer(source.address.as_str()));
        Ok(peers.collect::<Result<_, Error>>()?)
    }

    fn check_process(&self) -> Result<(), RankError> {
        if self.is_forked() { Err(RankError::Forked) } else { Ok(()) }
    }

    /// Whether this is a child that was forked since: another thread may have had any lock then.
    pub(crate) fn is_forked(&self) -> bool {
        fd::forked_since(self.forks)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if !self.is_forked() {
            self.close();
        } else {
            std::mem::forget(self.thread.get_mut().take());
        }
    }
}
