//! Prompts from one engine to another through slots of staging memory, found by their content.
//!
//! For an engine that gives its connector no parameters of a request, and can't be told later that a load has failed: a
//! prompt is in the slots of the decode engine before it is promised. A slot has room for one block of all ranks and
//! groups. The [`Directory`] says which handoff has which prompt; the handoff itself is a request of a [`Scheduler`] that
//! the ranks' [`Worker`]s carry out, all in one process.
//!
//! One thread takes what the workers report, and what ranks have copied to slots; it sleeps until there is something.
//! Only [`Exchange::fetch`] waits, for the time that its caller gives. Locks: the exchange's, then the directory's or a
//! worker's. Workers call the observer with theirs held; it only wakes the thread.

mod machine;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod model;
mod steps;

use crate::directory::{Directory, DirectoryConfig, DirectoryError};
use crate::producers::Producers;
use crate::prompt::PromptId;
use crate::scheduler::{GroupRule, Scheduler, SchedulerConfig};
use crate::wakeup::Wakeup;
use crate::worker::{Announce, Worker, WorkerConfig, WorkerError, WorkerObserver};
use kvferry::{Agent, Region};
use kvferry_proto::WireCode;
use kvferry_proto::directory::{ContentKey, Limits as DirectoryLimits, Place};
use kvferry_proto::engine_handshake::{EngineId, Model};
use kvferry_proto::handoff::{HandoffId, Limits};
use kvferry_proto::layout::{Kind, Layout};
use kvferry_sys::fd;
use kvferry_sys::sync::{Condvar, Mutex, MutexGuard};
use machine::{Event, Machine};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Settings of an [`Exchange`].
#[derive(Clone, Debug)]
pub struct ExchangeConfig {
    /// Groups of layers.
    pub groups: usize,
    /// Tokens of a block of each group.
    pub block_tokens: u32,
    /// Slots of staging memory.
    pub slots: u32,
    /// Time for which a prompt is kept for other engines.
    pub timeout: Duration,
    /// What the engine computes with.
    pub model: Model,
    /// The producers that KV is fetched from; `None` for [`Producers::of_agent`].
    pub producers: Option<Producers>,
    /// Whether other engines may follow this one.
    pub publishes: bool,
    /// `host:port` of the engines that this one follows.
    pub follows: Vec<String>,
}

/// A rank, with its part of the slots.
#[derive(Debug)]
pub struct StagedRank {
    /// An agent of the rank's own.
    pub agent: Agent,
    /// Slots are its blocks.
    pub layout: Layout,
    /// The memory of the slots.
    pub region: Region,
}

/// An exchange can't be started.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the sources say what they are")]
pub enum ExchangeError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error(transparent)]
    Engine(#[from] crate::metadata::EngineError),
    #[error("the exchange's thread can't be started, or there are no random bytes: {0}")]
    System(#[from] std::io::Error),
}

/// The full blocks of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    /// Names its content.
    pub key: ContentKey,
    /// The identity of its tokens.
    pub identity: PromptId,
    /// How many it has.
    pub blocks: u32,
}

/// Why a prompt that is on offer was not fetched, or one that is computed is not offered.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Missed {
    /// There is no run of as many free slots.
    #[error("there are no {blocks} slots")]
    NoRoom {
        /// Slots that were asked for.
        blocks: u32,
    },
    /// The fetch has failed.
    #[error("{0}")]
    Failed(String),
    /// The fetch took all its time, which was most of the look-up's. Nothing is fetched from its publisher for a while.
    #[error("{address} has not handed the prompt over in time")]
    TimedOut {
        /// The publisher, as [`ExchangeConfig::follows`] names it.
        address: String,
        /// For how long it is not asked.
        pause: Duration,
    },
}

/// Hands prompts over, in both directions. Calls may be made from any thread; all but [`Exchange::fetch`] and
/// [`Exchange::close`] return at once. In a forked child they do nothing.
pub struct Exchange {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    forks: u32,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("workers", &self.shared.workers).finish_non_exhaustive()
    }
}

struct Shared {
    follows: Vec<String>,
    directory: Directory,
    workers: Vec<Worker>,
    state: Mutex<State>,
    /// Signals the end of a fetch, and [`State::closed`].
    ended: Condvar,
    observer: Arc<Observer>,
}

/// What the workers tell.
#[derive(Default)]
struct Observer {
    wakeup: Wakeup,
    /// Why fetches have failed, by their requests.
    failures: Mutex<FxHashMap<String, String>>,
}

struct State {
    machine: Machine,
    closed: bool,
}

impl Exchange {
    /// Starts it. `control` is the agent that followers know, and no rank's.
    ///
    /// # Errors
    /// All of [`ExchangeError`].
    pub fn start(
        control: &Agent,
        ranks: Vec<StagedRank>,
        config: ExchangeConfig,
    ) -> Result<Self, ExchangeError> {
        let ExchangeConfig { groups, block_tokens, slots, timeout, model, .. } = config;
        let engine = EngineId(u128::from_le_bytes(kvferry_sys::random::bytes()?));
        let rules = vec![GroupRule { kind: Kind::Full, block_tokens }; groups];
        let scheduler_config = SchedulerConfig {
            groups: rules,
            ranks: ranks.len(),
            timeout,
            eager: true,
            recomputed_tokens: 0,
            null_block: Some(slots),
            idle: None,
        };
        let mut scheduler = Scheduler::new(scheduler_config, engine);
        let limits =
            Limits { cap: timeout, rendezvous: timeout, offer_ttl: timeout, ..Limits::default() };
        let publishes = ranks.first().map(|rank| rank.agent.advertised().to_owned());
        let mut workers = Vec::new();
        for (rank, StagedRank { agent, layout, region }) in ranks.into_iter().enumerate() {
            let config = WorkerConfig {
                rank,
                model: model.clone(),
                announce: Announce::Chunks,
                limits: limits.clone(),
                producers: config.producers.clone(),
            };
            workers.push(Worker::start(&agent, layout, &[region], config)?);
        }
        scheduler.set_ranks(workers.iter().map(|it| it.rank_metadata().to_vec()).collect())?;
        if let Some(first) = workers.first() {
            scheduler.set_producers(first.producers().clone());
        }
        let directory = DirectoryConfig {
            engine,
            publishes: publishes.filter(|_| config.publishes),
            follows: config.follows.clone(),
            limits: DirectoryLimits { offer_ttl: timeout, ..DirectoryLimits::default() },
        };
        let directory = Directory::start(control, directory)?;
        let observer = Arc::new(Observer::default());
        for worker in &workers {
            worker.set_observer(Arc::<Observer>::clone(&observer));
        }
        let machine = Machine::new(scheduler, workers.len(), groups, block_tokens, slots);
        let state = State { machine, closed: false };
        let shared = Arc::new(Shared {
            follows: config.follows,
            directory,
            workers,
            state: Mutex::new(state),
            ended: Condvar::new(),
            observer,
        });
        shared.state.lock().machine.carry(&mut shared.seam(false), None);
        let runner = Arc::downgrade(&shared);
        let wakeup = Arc::clone(&shared.observer);
        let run = move || Shared::run(&runner, &wakeup.wakeup);
        let thread = kvferry_sys::thread::spawn("kvferry-exchange".into(), run)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), forks: fd::forks() })
    }

    /// The directory, for queries.
    pub fn directory(&self) -> &Directory {
        &self.shared.directory
    }

    /// This engine computes a prompt, and will tell its followers. Returns a number for it and its first slot; `None` if
    /// none follows.
    ///
    /// # Errors
    /// [`Missed::NoRoom`].
    pub fn offer(&self, prompt: &Prompt) -> Result<Option<(u64, u32)>, Missed> {
        let Some(mut state) = self.lock() else { return Ok(None) };
        let state = &mut *state;
        if state.closed || self.shared.directory.followers() == 0 {
            return Ok(None);
        }
        let name: Option<[u8; 16]> = kvferry_sys::random::bytes().ok();
        let name =
            name.map(|bytes| HandoffId::new(&format!("{:032x}", u128::from_le_bytes(bytes))));
        // Without random bytes, a name could be known to others.
        let Some(Ok(transfer)) = name else { return Ok(None) };
        state.machine.offer(&mut self.shared.seam(false), prompt, transfer).map(Some)
    }

    /// All ranks copy blocks of an offer to its slots in the copy with this number: the next one, or one before.
    pub fn copies(&self, offer: u64, blocks: Range<u32>, copy: u64) {
        self.push(Event { copy, offer, blocks: Some(blocks) });
    }

    /// The request of an offer has ended; `copy`: the last one that has blocks of it. What was not computed by then is
    /// not handed over.
    pub fn ended(&self, offer: u64, copy: u64) {
        self.push(Event { copy, offer, blocks: None });
    }

    fn push(&self, event: Event) {
        let Some(mut state) = self.lock() else { return };
        state.machine.push(event);
        drop(state);
        self.shared.observer.wakeup.wake();
    }

    /// `copied`: the last copy that all ranks have made; `lost`: the last that a rank has not made, and those before it.
    pub fn made(&self, copied: u64, lost: u64) {
        let Some(mut state) = self.lock() else { return };
        state.machine.made(copied, lost);
        drop(state);
        self.shared.observer.wakeup.wake();
    }

    /// Fetches the blocks of a prompt from `first` on, from the engines that offer it, one after the other. Waits until
    /// they are here, `timeout` at most, and not for long after `is_interrupted` says so. Returns their slots, and why
    /// others have not handed it over; no slots if `is_interrupted` has said so.
    pub fn fetch(
        &self,
        prompt: &Prompt,
        first: u32,
        timeout: Duration,
        is_interrupted: &dyn Fn() -> bool,
    ) -> (Option<Range<u32>>, Vec<Missed>) {
        // A time beyond the clock's range is no limit.
        let deadline = Instant::now().checked_add(timeout);
        let is_late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let (mut fetched, mut missed) = (None, Vec::new());
        while let Some(found) = self.shared.directory.take(&prompt.key) {
            let Some(state) = self.lock().filter(|state| !state.closed) else { break };
            let (began, until) = (Instant::now(), (deadline, is_interrupted));
            match self.shared.fetch(state, prompt, first, &found, until) {
                Ok(Some(slots)) => {
                    fetched = Some((slots, found.place));
                    break;
                }
                Ok(None) => {}
                Err(why) => missed.push((why, found.place, began.elapsed())),
            }
            if first >= prompt.blocks || is_late() || is_interrupted() {
                break;
            }
        }
        // Pauses are for the look-ups that follow: for this one, each publisher of the prompt is asked.
        let missed =
            missed.into_iter().map(|(why, place, took)| self.missed(why, place, took, timeout));
        let missed = missed.collect();
        let slots = fetched.map(|(slots, place)| {
            self.shared.directory.worked(place);
            slots
        });
        (slots, missed)
    }

    /// Has a publisher paused for what it has cost of the `whole` time of a look-up.
    fn missed(&self, why: Missed, place: Place, took: Duration, whole: Duration) -> Missed {
        if let Missed::NoRoom { .. } = why {
            return why;
        }
        let pause = self.shared.directory.failed(place, took, whole);
        match (why, pause) {
            (Missed::TimedOut { address, .. }, Some(pause)) => Missed::TimedOut { address, pause },
            (Missed::TimedOut { address, .. }, None) => Missed::Failed(format!(
                "{address} has not handed the prompt over in the {took:.1?} that others had left"
            )),
            (why, Some(pause)) => {
                let address = self.shared.address(place);
                Missed::Failed(format!(
                    "{why}; this took {took:.1?}, and {address} is not asked for {pause:?}"
                ))
            }
            (why, None) => why,
        }
    }

    /// Gives slots back that [`Exchange::fetch`] has returned.
    pub fn give(&self, slots: Range<u32>) {
        if let Some(mut state) = self.lock() {
            state.machine.give(slots);
        }
    }

    /// Counts of what is under way, by name: all zero when nothing is. None in a fork.
    pub fn gauges(&self) -> Vec<(&'static str, usize)> {
        let Some(state) = self.lock() else { return Vec::new() };
        let own = state.machine.gauges();
        drop(state);
        own.into_iter().chain(self.shared.directory.gauges()).collect()
    }

    /// Ends everything: peers learn that nothing is offered, and a fetch that waits returns. May be called again.
    pub fn close(&self) {
        let Some(mut state) = self.lock() else { return };
        state.closed = true;
        drop(state);
        self.shared.ended.notify_all();
        self.shared.observer.wakeup.wake();
        if let Some(thread) = self.thread.lock().take() {
            // It panics only on a broken invariant, and the panic has been reported.
            drop(thread.join());
        }
        self.shared.directory.close();
        self.shared.workers.iter().for_each(Worker::close);
    }

    /// `None` in a fork, whose lock may be held for ever.
    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        (!fd::forked_since(self.forks)).then(|| self.shared.state.lock())
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if !fd::forked_since(self.forks) {
            self.close();
        } else {
            std::mem::forget(self.thread.get_mut().take());
        }
    }
}

impl WorkerObserver for Observer {
    fn received(&self, request: &str, code: WireCode, detail: &str) {
        if !code.is_ok() {
            let separator = if detail.is_empty() { "" } else { ": " };
            self.failures.lock().insert(request.to_owned(), format!("{code}{separator}{detail}"));
        }
        self.wakeup.wake();
    }

    fn sent(&self, _request: &str) {
        self.wakeup.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_testkit::{PATIENCE, Watchdog, eventually};

    fn agent() -> Agent {
        let listen = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        Agent::builder().listen(listen).silence(PATIENCE).start().expect("it starts")
    }

    #[test]
    fn a_fetch_that_ends_while_it_is_interrupted_keeps_no_slots() {
        let _bounded = Watchdog::new(PATIENCE);
        let (publisher, control) = (agent(), agent());
        let config = DirectoryConfig {
            engine: EngineId(7),
            publishes: Some(publisher.advertised().to_owned()),
            follows: Vec::new(),
            limits: DirectoryLimits::default(),
        };
        let directory = Directory::start(&publisher, config).expect("no other message handler");
        let config = ExchangeConfig {
            groups: 1,
            block_tokens: 4,
            slots: 8,
            timeout: PATIENCE,
            model: Model::default(),
            producers: None,
            publishes: false,
            follows: vec![publisher.advertised().to_owned()],
        };
        // Without ranks, a fetch ends when this test says so.
        let exchange = Exchange::start(&control, Vec::new(), config).expect("it starts");
        let key = ContentKey([1; 32]);
        let transfer = HandoffId::new("offered").expect("short");
        directory.publish(key, &transfer).expect("room");
        let gauge = |name: &str| {
            let gauges = exchange.gauges();
            gauges.into_iter().find(|(it, _)| *it == name).map_or(0, |(_, count)| count)
        };
        eventually("the offer is heard", || gauge("heard") == 1);
        let prompt = Prompt { key, identity: PromptId::new(&[], &[1]), blocks: 2 };
        let interrupt = || {
            exchange.shared.state.lock().machine.received(0, "d1", false);
            true
        };
        assert_eq!(exchange.fetch(&prompt, 0, PATIENCE, &interrupt), (None, vec![]));
        assert_eq!((gauge("fetches"), gauge("slots")), (0, 0));
    }
}
