//! The driver's one state, its lock, and how a caller waits under it.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::abi::{Error, Result};
use crate::config::Config;
use crate::counters::Counters;
use crate::devices::{Device, Primary, visible};
use crate::faults::{Fault, Faults};
use crate::memory::{Kind, Memory, VmmHandle};
use crate::modules::Module;
use crate::ops::{Callback, Work};
use crate::races::Checker;
use crate::streams::{Event, Stream};
use crate::thread;
use crate::timeline::Timeline;

/// Everything the driver knows, behind one lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) initialized: bool,
    /// The scheduler's choices.
    pub(crate) rng: fastrand::Rng,
    /// Choices that a call makes, apart from the scheduler's, so that each repeats by itself.
    pub(crate) call_rng: fastrand::Rng,
    /// Devices by visible ordinal.
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Memory,
    pub(crate) streams: FxHashMap<usize, Stream>,
    /// Per-thread default streams by device and thread.
    pub(crate) thread_streams: FxHashMap<(usize, u64), usize>,
    pub(crate) events: FxHashMap<usize, Event>,
    pub(crate) modules: FxHashMap<usize, Module>,
    /// Streams and events that a context took with it.
    pub(crate) orphans: FxHashSet<usize>,
    /// Graphs that captures made.
    pub(crate) graphs: FxHashSet<usize>,
    pub(crate) vmm: FxHashMap<u64, VmmHandle>,
    pub(crate) faults: Faults,
    pub(crate) counters: Counters,
    pub(crate) checker: Checker,
    pub(crate) timeline: Timeline,
    /// Operations that have not completed.
    pub(crate) pending: FxHashSet<u64>,
    /// Operations that complete only when the faults are cleared.
    pub(crate) stuck: Vec<u64>,
    /// Engines that start nothing, by [`crate::timeline::Engine::bit`].
    pub(crate) held: u32,
    pub(crate) next_op: u64,
    next_handle: usize,
    pub(crate) callbacks: Option<Sender<Callback>>,
    /// The text of an error in `FAKECUDA`, which `cuInit` reports.
    pub(crate) broken_config: Option<String>,
}

/// Handles begin here, so that none looks like a default stream or a small number.
const FIRST_HANDLE: usize = 0x7c0d_0000_0000;
const HANDLE_STEP: usize = 0x10;

static DRIVER: OnceLock<Driver> = OnceLock::new();
/// Threads that wait for the lock. The scheduler lets them go first.
static WAITING: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Driver {
    state: Mutex<State>,
    /// Something completed.
    host: Condvar,
    /// Something can run.
    work: Condvar,
}

fn driver() -> &'static Driver {
    DRIVER.get_or_init(|| Driver {
        state: Mutex::new(State::from_environment()),
        host: Condvar::new(),
        work: Condvar::new(),
    })
}

/// The lock, held.
#[derive(Debug)]
pub(crate) struct Session {
    guard: Option<MutexGuard<'static, State>>,
}

impl Session {
    pub(crate) fn lock() -> Self {
        WAITING.fetch_add(1, Ordering::Relaxed);
        let guard = driver().state.lock().unwrap_or_else(PoisonError::into_inner);
        WAITING.fetch_sub(1, Ordering::Relaxed);
        Self { guard: Some(guard) }
    }

    /// Waits until `ready`, without the lock.
    pub(crate) fn wait_until(&mut self, mut ready: impl FnMut(&mut State) -> bool) {
        while !ready(self) {
            let guard = self.guard.take().expect("a session holds the lock");
            let guard = driver().host.wait(guard).unwrap_or_else(PoisonError::into_inner);
            self.guard = Some(guard);
        }
    }

    /// Lets the scheduler wait for something to run, at most until `timeout`.
    pub(crate) fn wait_for_work(&mut self, timeout: Option<std::time::Duration>) {
        let guard = self.guard.take().expect("a session holds the lock");
        let work = &driver().work;
        let guard = match timeout {
            Some(timeout) => {
                work.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0
            }
            None => work.wait(guard).unwrap_or_else(PoisonError::into_inner),
        };
        self.guard = Some(guard);
    }

    /// Waits for an operation. The error that a lost device leaves is the caller's to look for.
    pub(crate) fn wait_op(&mut self, op: u64) {
        self.wait_until(|state| !state.pending.contains(&op));
    }
}

impl Deref for Session {
    type Target = State;

    fn deref(&self) -> &State {
        self.guard.as_ref().expect("a session holds the lock")
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut State {
        self.guard.as_mut().expect("a session holds the lock")
    }
}

/// Whether another thread wants the lock.
pub(crate) fn contended() -> bool {
    WAITING.load(Ordering::Relaxed) > 0
}

/// Wakes the scheduler.
pub(crate) fn wake_scheduler() {
    driver().work.notify_one();
}

/// Wakes the threads that wait for completions.
pub(crate) fn wake_hosts() {
    driver().host.notify_all();
}

impl State {
    fn from_environment() -> Self {
        let text = std::env::var("FAKECUDA").unwrap_or_default();
        let mut faults = Faults::default();
        let mut broken = None;
        let config = match Config::parse(&text) {
            Ok((config, others)) => {
                for (key, value) in others {
                    broken = broken.or(arm(&mut faults, &key, &value).err());
                }
                config
            }
            Err(error) => {
                broken = Some(error);
                Config::default()
            }
        };
        let devices = visible(config.devices);
        Self {
            initialized: false,
            rng: fastrand::Rng::with_seed(config.seed),
            call_rng: fastrand::Rng::with_seed(config.seed),
            timeline: Timeline::new(devices.len()),
            devices,
            memory: Memory::default(),
            streams: FxHashMap::default(),
            thread_streams: FxHashMap::default(),
            events: FxHashMap::default(),
            modules: FxHashMap::default(),
            orphans: FxHashSet::default(),
            graphs: FxHashSet::default(),
            vmm: FxHashMap::default(),
            faults,
            counters: Counters::default(),
            checker: Checker::default(),
            pending: FxHashSet::default(),
            stuck: Vec::new(),
            held: 0,
            next_op: 0,
            next_handle: FIRST_HANDLE,
            callbacks: None,
            broken_config: broken,
            config,
        }
    }

    /// Drops everything but the threads. Handles go on, so that no old one means something new.
    pub(crate) fn reset(&mut self) {
        for device in 0..self.devices.len() {
            self.destroy_context(device);
        }
        let (next_op, next_handle) = (self.next_op, self.next_handle);
        let callbacks = self.callbacks.take();
        *self = Self { next_op, next_handle, callbacks, ..Self::from_environment() };
    }

    pub(crate) fn new_handle(&mut self) -> usize {
        self.next_handle += HANDLE_STEP;
        self.next_handle
    }

    /// Whether the driver has ever made this handle.
    fn was_handle(&self, handle: usize) -> bool {
        (FIRST_HANDLE..=self.next_handle).contains(&handle)
    }

    pub(crate) fn new_op(&mut self) -> u64 {
        self.next_op += 1;
        self.next_op
    }

    /// An operation that no stream has, and that completes when the faults are cleared.
    pub(crate) fn new_stuck_op(&mut self) -> u64 {
        let op = self.new_op();
        self.pending.insert(op);
        self.stuck.push(op);
        op
    }

    /// Pending operations that are in no stream.
    pub(crate) fn stuck_events(&self) -> usize {
        let queued = self.streams.values().flat_map(|stream| &stream.queue).map(|op| op.id);
        let queued: FxHashSet<u64> = queued.collect();
        self.pending.iter().filter(|op| !queued.contains(op)).count()
    }

    /// The key of the calling thread's vector clock.
    pub(crate) fn host_key(&self) -> u64 {
        if self.config.joined_hosts { 0 } else { thread::with(|local| local.id) }
    }

    pub(crate) fn device(&self, ordinal: i32) -> Result<usize> {
        let index = usize::try_from(ordinal).map_err(|_| Error::INVALID_DEVICE)?;
        if index < self.devices.len() { Ok(index) } else { Err(Error::INVALID_DEVICE) }
    }

    pub(crate) fn primary(&mut self, device: usize) -> Result<&mut Primary> {
        self.devices[device].primary.as_mut().ok_or(Error::CONTEXT_IS_DESTROYED)
    }

    /// The device of a context handle that is alive.
    pub(crate) fn context_device(&self, handle: usize) -> Result<usize> {
        let is_it = |device: &Device| device.primary.as_ref().is_some_and(|p| p.handle == handle);
        match self.devices.iter().position(is_it) {
            Some(device) => Ok(device),
            None if self.was_handle(handle) => Err(Error::CONTEXT_IS_DESTROYED),
            None => Err(Error::INVALID_CONTEXT),
        }
    }

    /// The device of the current context, with the errors that any call on it reports.
    pub(crate) fn current(&mut self) -> Result<usize> {
        let handle = thread::with(|local| local.contexts.last().copied());
        let device = self.context_device(handle.ok_or(Error::INVALID_CONTEXT)?)?;
        if self.faults.hit(Fault::ContextDestroyed) {
            self.destroy_context(device);
            return Err(Error::CONTEXT_IS_DESTROYED);
        }
        if self.faults.hit(Fault::ForeignError) {
            return Err(Error::LAUNCH_TIMEOUT);
        }
        self.check_lost(device)?;
        Ok(device)
    }

    /// The error that sticks to the device's context.
    pub(crate) fn check_lost(&self, device: usize) -> Result {
        match &self.devices[device].primary {
            Some(primary) => primary.lost.map_or(Ok(()), Err),
            None => Err(Error::CONTEXT_IS_DESTROYED),
        }
    }

    /// Makes the error stick; nothing that was submitted to the device runs any more.
    pub(crate) fn lose(&mut self, device: usize, error: Error) {
        if let Some(primary) = &mut self.devices[device].primary {
            primary.lost.get_or_insert(error);
        }
        self.drop_work(device);
    }

    /// Ends the device's work. The host learns of it: nothing touches what was submitted any more.
    fn drop_work(&mut self, device: usize) {
        self.join_device(device);
        for stream in self.streams.values_mut().filter(|stream| stream.device == device) {
            for op in stream.queue.drain(..) {
                self.pending.remove(&op.id);
                let kernel = matches!(&op.work, Work::Kernel(kernel) if kernel.unknown);
                self.checker.unknown -= u64::from(kernel);
            }
        }
        self.devices[device].busy = Default::default();
        wake_hosts();
    }

    /// Ends the primary context with all that belongs to it.
    pub(crate) fn destroy_context(&mut self, device: usize) {
        self.drop_work(device);
        let streams = self.streams.extract_if(|_, stream| stream.device == device);
        self.orphans.extend(streams.map(|(handle, _)| handle));
        self.thread_streams.retain(|(d, _), _| *d != device);
        let events = self.events.extract_if(|_, event| event.device == device);
        self.orphans.extend(events.map(|(handle, _)| handle));
        self.modules.retain(|_, module| module.device != device);
        let all = self.memory.mappings.values().filter(|m| m.device == device);
        let owned = all.filter(|m| !matches!(m.kind, Kind::Vmm(_)));
        let bases: Vec<u64> = owned.map(|m| m.base).collect();
        for base in bases {
            if let Ok(mapping) = self.memory.free(base) {
                self.checker.forget_range(mapping.base, mapping.len);
            }
        }
        let hosts = self.memory.hosts.values().filter(|h| h.device == device).copied();
        for range in hosts.collect::<Vec<_>>() {
            self.memory.hosts.remove(&range.base);
            if range.allocated {
                crate::memory::free_host(range);
            }
        }
        self.devices[device].primary = None;
        let handles = self.vmm.values().filter(|h| h.device == device && h.charged);
        self.devices[device].used = handles.map(|h| h.segment.len()).sum();
    }

    /// All operations of the device that are submitted so far: the host has seen their end.
    pub(crate) fn join_device(&mut self, device: usize) {
        let host = self.host_key();
        let streams = self.streams.values().filter(|stream| stream.device == device);
        for stream in streams {
            self.checker.host_join(host, &stream.clock);
            self.timeline.reach(stream.end);
        }
    }

    /// The host has seen the end of the stream's operations submitted so far.
    pub(crate) fn join(&mut self, clock: &Arc<crate::clocks::Clock>, end: u64) {
        let host = self.host_key();
        self.checker.host_join(host, clock);
        self.timeline.reach(end);
    }
}

/// Arms the fault `key` from the value `AT` or `AT:COUNT`.
fn arm(faults: &mut Faults, key: &str, value: &str) -> std::result::Result<(), String> {
    let fault = Fault::named(key).ok_or(format!("`{key}` is no setting and no fault"))?;
    let (at, count) = value.split_once(':').unwrap_or((value, "1"));
    let count = if count == "ever" { Ok(u64::MAX) } else { count.parse() };
    match (at.parse(), count) {
        (Ok(at), Ok(count)) => {
            faults.arm(fault, at, count);
            Ok(())
        }
        _ => Err(format!("`{value}` is no occasion of `{key}`")),
    }
}

impl State {
    /// Takes device memory, or finds it exhausted.
    pub(crate) fn charge(&mut self, device: usize, len: u64) -> Result {
        let all = self.config.memory.saturating_add(self.config.context_charge);
        let used = self.devices[device].used.checked_add(len).ok_or(Error::OUT_OF_MEMORY)?;
        if used > all {
            return Err(Error::OUT_OF_MEMORY);
        }
        self.devices[device].used = used;
        Ok(())
    }

    /// Whether two devices reach each other, unless a fault denies it.
    pub(crate) fn peer(&mut self, a: usize, b: usize) -> bool {
        let (from, to) = (self.devices[a].physical, self.devices[b].physical);
        self.config.peer(from, to) && !(a != b && self.faults.hit(Fault::PeerRefused))
    }

    /// A finding when an operation still needs the pinned range that is given up.
    pub(crate) fn check_unpinned(&mut self, range: crate::memory::HostRange) {
        let inside = |address: u64| (range.base..range.base + range.len).contains(&address);
        let mut users = Vec::new();
        for op in self.streams.values().flat_map(|stream| &stream.queue) {
            let Work::Move(moving) = &op.work else { continue };
            if moving.entries.iter().any(|e| inside(e.destination) || e.reads().any(inside)) {
                users.push(op.point.what.clone());
            }
        }
        for user in users {
            self.counters.unpinned_in_use += 1;
            self.checker.find(format!(
                "host memory {:#x}+{:#x} was unregistered before the end of {user}",
                range.base, range.len
            ));
        }
    }
}
