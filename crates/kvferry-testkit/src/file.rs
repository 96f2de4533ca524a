//! The fabric over files: what one agent writes to a file, the other reads.
//!
//! A transfer takes two steps, each a transfer of an agent with the file: the agent whose memory is read
//! writes its bytes to a place in the file, then the other agent reads them. The place belongs to the
//! transfer until it has ended, and is a hole when a transfer gets it: bytes that an earlier one left there
//! would pass for those that a first step lost. Files know nothing of access, of addresses in other processes and of
//! notifications, so this module adds them.

use crate::agent::{Memories, failure, region_of};
use crate::fabric::{
    Aim, Effort, Endpoint, Fabric, Failure, Handle, Move, Outcome, Pair, Region, TransferStats, Way,
};
use crate::memory::Memory;
use kvferry::{
    Access, After, Agent, Batch, FileOptions, FileRegion, Notification, Options, Result, Transfer,
};
use kvferry_sys::poll::EventFd;
use kvferry_sys::sync::{Condvar, Mutex};
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the file, which has holes: more than any scenario has under way.
const FILE_BYTES: u64 = 64 << 30;
/// Places begin at multiples of this, so that no two share a page.
const PLACE_ALIGNMENT: u64 = 64 << 10;

/// Makes pairs of agents with a file between them.
#[derive(Clone, Debug)]
pub struct FileFabric {
    /// The setting `file_engine` of both agents.
    pub engine: &'static str,
}

impl FileFabric {
    fn agent(&self, name: &str, file: &fs::File) -> Result<(Agent, FileRegion)> {
        // No scenario is about silence; a loaded device takes its time.
        let builder = Agent::builder().name(name).silence(self.patience() / 5);
        let agent = builder.setting("file_engine", self.engine).start()?;
        let fd = file.try_clone().expect("the process has descriptors left");
        let options = FileOptions::read_write().range(0, FILE_BYTES).name(name);
        let file = agent.register_file(fd.into(), &options)?;
        Ok((agent, file))
    }
}

impl Fabric for FileFabric {
    fn name(&self) -> String {
        format!("agents with a file between them, engine {}", self.engine)
    }

    /// An agent has at most 256 transfers with files under way.
    fn effort(&self) -> Effort {
        Effort::Brief
    }

    fn pair(&self) -> std::result::Result<Pair, Failure> {
        let agent_pair = self.agent_pair()?;
        let [near, far] = [0, 1].map(|side| FileEnd {
            agent_pair: Arc::clone(&agent_pair),
            side,
            memories: Memories::default(),
            closed: AtomicBool::new(false),
        });
        Ok(Pair { near: Arc::new(near), far: Arc::new(far) })
    }
}

impl FileFabric {
    fn agent_pair(&self) -> std::result::Result<Arc<AgentPair>, Failure> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvferry-between-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut options = fs::OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path);
        let file = file.expect("a folder for temporary files");
        fs::remove_file(&path).expect("made above");
        file.set_len(FILE_BYTES).expect("the file system has files with holes");
        let (near, near_file) = self.agent("near", &file).map_err(failure)?;
        let (far, far_file) = self.agent("far", &file).map_err(failure)?;
        Ok(Arc::new(AgentPair {
            agents: [near, far],
            files: [near_file, far_file],
            file,
            notes: Default::default(),
            places: Mutex::default(),
        }))
    }
}

/// Two agents, each with its region of the file.
struct AgentPair {
    agents: [Agent; 2],
    files: [FileRegion; 2],
    file: fs::File,
    /// What was sent to each agent.
    notes: [Notes; 2],
    /// The places of transfers: start and end.
    places: Mutex<BTreeMap<u64, u64>>,
}

#[derive(Default)]
struct Notes {
    arrived: Mutex<VecDeque<Notification>>,
    changed: Condvar,
}

impl Notes {
    fn push(&self, note: Notification) {
        self.arrived.lock().push_back(note);
        self.changed.notify_all();
    }
}

/// A transfer's place in the file.
struct Place {
    agent_pair: Arc<AgentPair>,
    start: u64,
    len: u64,
}

impl AgentPair {
    /// Takes the first gap that is long enough. It is a hole.
    fn place(self: &Arc<Self>, len: u64) -> Place {
        let len = len.max(1);
        let mut places = self.places.lock();
        let mut start = 0;
        for (taken, end) in places.iter() {
            if start + len <= *taken {
                break;
            }
            start = end.next_multiple_of(PLACE_ALIGNMENT);
        }
        assert!(start + len <= FILE_BYTES, "the file is too short for the scenario");
        places.insert(start, start + len);
        Place { agent_pair: Arc::clone(self), start, len }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Where the file system makes no holes, no other transfer gets the place.
        if fallocate(&self.agent_pair.file, flags, self.start, self.len).is_ok() {
            self.agent_pair.places.lock().remove(&self.start);
        }
    }
}

/// The two steps of a transfer.
struct Steps {
    place: Place,
    /// Whose memory is read.
    source: usize,
    write: Batch,
    read: Batch,
    stats: TransferStats,
}

impl Steps {
    /// Refuses what either agent would refuse, before a byte moves.
    fn new(end: &FileEnd, way: Way, moves: &[Move]) -> std::result::Result<Self, Failure> {
        let agent_pair = &end.agent_pair;
        let stats = TransferStats {
            bytes: moves.iter().fold(0u64, |sum, m| sum.saturating_add(m.len)),
            descriptors: moves.len(),
        };
        let (source, target) = match way {
            Way::Write => (end.side, 1 - end.side),
            Way::Read => (1 - end.side, end.side),
        };
        // Bytes beyond any memory are refused below, for the range that has them.
        let place = agent_pair.place(stats.bytes.min(FILE_BYTES / 64));
        let (mut write, mut read) = (Batch::new(), Batch::new());
        write.set_after(After::host());
        read.set_after(After::host());
        let mut at = place.start;
        for m in moves {
            let local = (region_of(&m.local), m.local_offset);
            let remote = end.remote(way, m)?;
            let (from, to) = match way {
                Way::Write => (local, remote),
                Way::Read => (remote, local),
            };
            let push = |batch: &mut Batch, (region, offset): (kvferry::Region, u64), side| {
                let file: &FileRegion = &agent_pair.files[side];
                batch.push(&region, offset, &file.remote(), at, m.len).map_err(failure)
            };
            push(&mut write, from, source)?;
            push(&mut read, to, target)?;
            at += m.len;
        }
        Ok(Self { place, source, write, read, stats })
    }

    fn agent_pair(&self) -> &AgentPair {
        &self.place.agent_pair
    }

    fn target(&self) -> &Agent {
        &self.agent_pair().agents[1 - self.source]
    }

    /// A step has failed. While its device may still write, nothing else gets the place.
    fn failed(self, error: kvferry::Error) -> Failure {
        let failure = failure(error);
        if !failure.is_quiet() {
            std::mem::forget(self.place);
        }
        failure
    }
}

struct FileEnd {
    agent_pair: Arc<AgentPair>,
    side: usize,
    memories: Memories,
    closed: AtomicBool,
}

impl FileEnd {
    fn agent(&self) -> &Agent {
        &self.agent_pair.agents[self.side]
    }

    fn other(&self) -> usize {
        1 - self.side
    }

    /// The remote side of a move, if its owner permits it.
    fn remote(&self, way: Way, m: &Move) -> std::result::Result<(kvferry::Region, u64), Failure> {
        let named = region_of(&m.remote);
        let (region, offset) = match m.aim {
            Aim::Honest | Aim::Forged => (named, m.remote_offset),
            Aim::Address => {
                let address = (named.addr() as u64).wrapping_add(m.remote_offset);
                let owner = &self.agent_pair.agents[self.other()];
                let at = usize::try_from(address).expect("a 64-bit system");
                let holding = owner.region_holding(at, m.len);
                let region = holding.ok_or_else(|| Failure::new("not_registered"))?;
                let offset = address - region.addr() as u64;
                (region, offset)
            }
        };
        if !region.is_registered() {
            return Err(Failure::new("not_registered"));
        }
        let is_allowed = match way {
            Way::Write => region.access().write,
            Way::Read => region.access().read,
        };
        if !is_allowed {
            return Err(Failure::new("access_denied"));
        }
        Ok((region, offset))
    }

    fn deliver(&self, options: &Options<'_>) {
        if let Some(note) = &options.notify {
            self.agent_pair.notes[self.other()].push(note.clone());
        }
    }
}

/// The same options with the time that is left, and without the notification.
fn within<'a>(options: &Options<'a>, began: Instant) -> Options<'a> {
    let timeout = options.timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
    Options { timeout, notify: None, ..options.clone() }
}

impl Endpoint for FileEnd {
    fn register(
        &self,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> std::result::Result<Region, Failure> {
        self.memories.register(self.agent(), memory, offset, len, access)
    }

    fn unregister(&self, region: &Region) -> std::result::Result<(), Failure> {
        self.agent().unregister(&region_of(region)).map_err(failure)
    }

    fn transfer(&self, way: Way, moves: &[Move], options: &Options<'_>) -> Outcome {
        let began = Instant::now();
        let steps = Steps::new(self, way, moves)?;
        let source = self.agent_pair.agents[steps.source].files();
        if let Err(e) = source.write(&steps.write, &within(options, began)) {
            return Err(steps.failed(e));
        }
        let target = steps.target().files();
        if let Err(e) = target.read(&steps.read, &within(options, began)) {
            return Err(steps.failed(e));
        }
        self.deliver(options);
        Ok(steps.stats)
    }

    fn start(&self, way: Way, moves: &[Move], options: &Options<'_>) -> Box<dyn Handle> {
        let note =
            options.notify.clone().map(|note| (Arc::clone(&self.agent_pair), self.other(), note));
        let relay = Arc::new(Relay {
            state: Mutex::default(),
            changed: Condvar::new(),
            event: EventFd::new().expect("the process has descriptors left"),
        });
        match Steps::new(self, way, moves) {
            Err(e) => relay.end(Err(e)),
            Ok(steps) => {
                let (began, timeout) = (Instant::now(), options.timeout);
                let source = self.agent_pair.agents[steps.source].files();
                let first = source.write_async(&steps.write, &within(options, began));
                relay.run(&first);
                let next = Arc::clone(&relay);
                first.on_end(move |outcome| {
                    if let Err(e) = outcome {
                        return next.end(Err(steps.failed(e)));
                    }
                    let left = within(&Options { timeout, ..Options::default() }, began);
                    let second = steps.target().files().read_async(&steps.read, &left);
                    next.run(&second);
                    second.on_end(move |outcome| {
                        let outcome = match outcome {
                            Ok(_) => Ok(steps.stats),
                            Err(e) => Err(steps.failed(e)),
                        };
                        if let (Ok(_), Some((agent_pair, side, note))) = (&outcome, note) {
                            agent_pair.notes[side].push(note);
                        }
                        next.end(outcome);
                    });
                });
            }
        }
        Box::new(Running(relay))
    }

    fn notify(
        &self,
        note: Notification,
        _options: &Options<'_>,
    ) -> std::result::Result<(), Failure> {
        self.agent_pair.notes[self.other()].push(note);
        Ok(())
    }

    fn take_notes(&self) -> Vec<Notification> {
        self.agent_pair.notes[self.side].arrived.lock().drain(..).collect()
    }

    fn wait_note(&self, timeout: Duration) -> Option<Notification> {
        let notes = &self.agent_pair.notes[self.side];
        let arrived = notes.arrived.lock();
        notes.changed.wait_while(arrived, timeout, |notes| notes.is_empty()).pop_front()
    }

    fn gauges(&self) -> Vec<(&'static str, u64)> {
        let stats = self.agent().stats();
        let mut gauges = vec![
            ("transfers_in_flight", stats.transfers_in_flight),
            ("regions", stats.regions),
            ("notifications", self.agent_pair.notes[self.side].arrived.lock().len() as u64),
        ];
        if self.closed.load(Ordering::SeqCst) {
            gauges.push(("gates", stats.gates));
        }
        gauges
    }

    fn close(&self) {
        self.agent().shutdown();
        self.closed.store(true, Ordering::SeqCst);
    }
}

/// A transfer in two steps, of which one is under way.
struct Relay {
    state: Mutex<State>,
    changed: Condvar,
    event: EventFd,
}

#[derive(Default)]
struct State {
    step: Option<Transfer>,
    is_cancelled: bool,
    outcome: Option<Outcome>,
}

impl Relay {
    /// Makes a step the one that a cancel stops.
    fn run(&self, step: &Transfer) {
        let mut state = self.state.lock();
        state.step = Some(step.clone());
        let is_cancelled = state.is_cancelled;
        drop(state);
        if is_cancelled {
            step.cancel();
        }
    }

    fn end(&self, outcome: Outcome) {
        self.state.lock().outcome = Some(outcome);
        self.changed.notify_all();
        self.event.signal();
    }
}

struct Running(Arc<Relay>);

impl Handle for Running {
    fn poll(&self) -> Option<Outcome> {
        self.0.state.lock().outcome.clone()
    }

    fn wait(&self, timeout: Duration) -> Option<Outcome> {
        let state = self.0.state.lock();
        let runs = |state: &mut State| state.outcome.is_none();
        self.0.changed.wait_while(state, timeout, runs).outcome.clone()
    }

    fn cancel(&self) {
        let step = {
            let mut state = self.0.state.lock();
            state.is_cancelled = true;
            state.step.clone()
        };
        if let Some(step) = step {
            step.cancel();
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_place_has_no_bytes_of_the_transfer_before() {
        let agent_pair = FileFabric { engine: "posix" }.agent_pair().expect("two agents");
        let before = agent_pair.place(10);
        agent_pair.file.write_all_at(&[7; 10], before.start).expect("room");
        drop(before);
        let mut bytes = [1; 10];
        agent_pair.file.read_exact_at(&mut bytes, agent_pair.place(10).start).expect("inside");
        assert_eq!(bytes, [0; 10]);
    }
}
