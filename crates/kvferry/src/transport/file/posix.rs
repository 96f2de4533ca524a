//! Threads that call `preadv` and `pwritev`: for systems that forbid io_uring, and for writes that it would serialise.
//!
//! A thread waits for its device, for ever if that hangs. So each file system has a lane of its own, which takes a part
//! of the threads at most: operations on others are carried out by the rest.
//!
//! Operations of a transfer that come one after the other, and are neighbours in a file, are one call. Most file systems
//! write to a file through the page cache for one thread at a time; so one thread does so here, and no other waits for it.

use super::queue::{OPERATION_BYTES_MAX, Operation, Queue};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex};
use kvferry_sys::file::SPANS_MAX;
use kvferry_sys::poll::EventFd;
use kvferry_sys::span::HostSpan;
use kvferry_sys::thread;
use kvferry_sys::uring::Way;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Threads for one file system at most: a device works on several operations at once.
const LANE_MAX: usize = 16;
/// File systems that may take as many threads as they can at the same time. Each further one has a thread, too.
const LANES_BUSY_MAX: usize = 8;
/// Tasks that a thread takes at once, at most: few enough that the transfer adds others meanwhile.
const RUN_TASKS_MAX: usize = 64;
const _: () = assert!(RUN_TASKS_MAX <= SPANS_MAX);
/// Bytes of the tasks that a thread takes at once, at most, where several threads may take a part of them each.
const SHARED_BYTES_MAX: u64 = 256 << 10;
/// Longest wait of a pool that ends for its threads. A thread whose device does not answer ends
/// later.
const JOIN_MAX: Duration = Duration::from_secs(1);

/// Threads that are started as operations come, and sleep in between.
pub(super) struct Pool(Arc<State>);

struct State {
    work: Mutex<Work>,
    changed: Condvar,
    /// Threads for one file system.
    lane_max: usize,
}

#[derive(Default)]
struct Work {
    /// Tasks by device number of the file system. Lanes without tasks are removed.
    lanes: FxHashMap<u64, Lane>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    /// Runs that were taken so far.
    runs: u64,
    ends: bool,
}

/// The tasks of one file system.
#[derive(Default)]
struct Lane {
    turns: VecDeque<Turn>,
    /// Writes through the page cache, by file. A file stays here, also without further writes, while a thread writes to it.
    writes: FxHashMap<FileKey, VecDeque<Task>>,
    /// Threads that carry out tasks.
    busy: usize,
    /// The number of the last run, or of the run before the lane began: the order of lanes with as many threads.
    last_run: u64,
}

/// The next work of a thread.
enum Turn {
    Task(Task),
    /// Writes through the page cache. The file has one turn at a time.
    Writes(FileKey),
}

/// The number of a file in its file system.
type FileKey = u64;

struct Task {
    operation: Operation,
    results: Arc<Results>,
}

impl Task {
    /// The file of a write through the page cache.
    fn write_key(&self) -> Option<FileKey> {
        let Operation { way, is_direct, file, .. } = &self.operation;
        (*way == Way::Write && !is_direct).then(|| file.inode())
    }

    /// True if both belong to one transfer, and both read or both write one open file.
    fn is_like(&self, other: &Self) -> bool {
        let (this, that) = (&self.operation, &other.operation);
        Arc::ptr_eq(&self.results, &other.results)
            && Arc::ptr_eq(&this.file, &that.file)
            && this.way == that.way
    }

    /// True if `next` begins in the file where this task ends.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.operation.offset + self.operation.span.len() as u64 == next.operation.offset
    }
}

/// Tasks of one transfer and one file, which a thread carries out one after the other. Not empty.
struct Run {
    lane: u64,
    /// The file, if it is written to through the page cache.
    writes: Option<FileKey>,
    tasks: Vec<Task>,
}

impl Run {
    /// The tasks that `next` gives, until it has none that `may_follow` the last one or the run is long enough.
    fn take(
        bytes_max: u64,
        may_follow: impl Fn(&Task, &Task) -> bool,
        mut next: impl FnMut(&dyn Fn(&Task) -> bool) -> Option<Task>,
    ) -> Vec<Task> {
        let mut tasks: Vec<Task> = Vec::new();
        let mut left = bytes_max;
        while tasks.len() < RUN_TASKS_MAX {
            let fits = |task: &Task| {
                tasks.last().is_none_or(|last| {
                    task.operation.span.len() as u64 <= left && may_follow(last, task)
                })
            };
            let Some(task) = next(&fits) else { break };
            left = left.saturating_sub(task.operation.span.len() as u64);
            tasks.push(task);
        }
        tasks
    }
}

impl Lane {
    fn push(&mut self, task: Task) {
        let Some(key) = task.write_key() else {
            self.turns.push_back(Turn::Task(task));
            return;
        };
        let writes = self.writes.entry(key).or_insert_with(|| {
            self.turns.push_back(Turn::Writes(key));
            VecDeque::new()
        });
        writes.push_back(task);
    }

    /// The tasks of the next turn. The lane has one.
    fn take(&mut self, lane: u64) -> Run {
        self.busy += 1;
        if let Some(Turn::Writes(key)) = self.turns.front() {
            let key = *key;
            self.turns.pop_front();
            let queue = self.writes.get_mut(&key).expect("it has a turn");
            let tasks = Run::take(OPERATION_BYTES_MAX, Task::is_like, |fits| {
                queue.front().is_some_and(fits).then(|| queue.pop_front()).flatten()
            });
            return Run { lane, writes: Some(key), tasks };
        }
        // Other threads may carry out what does not belong to one call.
        let may_follow = |last: &Task, next: &Task| last.is_like(next) && last.is_followed_by(next);
        let tasks = Run::take(SHARED_BYTES_MAX, may_follow, |fits| {
            let fits = matches!(self.turns.front()?, Turn::Task(task) if fits(task));
            match fits.then(|| self.turns.pop_front()).flatten()? {
                Turn::Task(task) => Some(task),
                Turn::Writes(_) => None,
            }
        });
        Run { lane, writes: None, tasks }
    }

    /// A run has ended.
    fn ended(&mut self, writes: Option<FileKey>) {
        self.busy -= 1;
        if let Some(key) = writes
            && let Entry::Occupied(queue) = self.writes.entry(key)
        {
            match queue.get().is_empty() {
                true => drop(queue.remove()),
                false => self.turns.push_back(Turn::Writes(key)),
            }
        }
    }

    /// Takes the tasks of one transfer that no thread has taken.
    fn withdraw(&mut self, results: &Arc<Results>) -> Vec<Task> {
        let is_of = |task: &Task| Arc::ptr_eq(&task.results, results);
        let mut withdrawn = Vec::new();
        for queue in self.writes.values_mut().filter(|queue| queue.iter().any(is_of)) {
            let (of, others): (VecDeque<_>, _) = std::mem::take(queue).into_iter().partition(is_of);
            withdrawn.extend(of);
            *queue = others;
        }
        let is_to_go = |turn: &Turn| match turn {
            Turn::Task(task) => is_of(task),
            Turn::Writes(_) => !withdrawn.is_empty(),
        };
        if !self.turns.iter().any(is_to_go) {
            return withdrawn;
        }
        for turn in std::mem::take(&mut self.turns) {
            match turn {
                Turn::Task(task) if is_of(&task) => withdrawn.push(task),
                Turn::Writes(key) if self.writes.get(&key).is_some_and(VecDeque::is_empty) => {
                    self.writes.remove(&key);
                }
                turn => self.turns.push_back(turn),
            }
        }
        withdrawn
    }

    fn into_tasks(self) -> impl Iterator<Item = Task> {
        let tasks = self.turns.into_iter().filter_map(|turn| match turn {
            Turn::Task(task) => Some(task),
            Turn::Writes(_) => None,
        });
        tasks.chain(self.writes.into_values().flatten())
    }
}

impl Work {
    /// Threads that have something to do. A lane has one at least: those of all others may hang, as the mounts of one
    /// server do.
    fn wanted(&self, lane_max: usize) -> usize {
        let of = |lane: &Lane| (lane.busy + lane.turns.len()).min(lane_max);
        let most = self.lanes.values().map(of).sum::<usize>().min(lane_max * LANES_BUSY_MAX);
        let least = |lane: &Lane| lane.busy.max(lane.turns.len().min(1));
        most.max(self.lanes.values().map(least).sum())
    }

    fn push(&mut self, number: u64, task: Task) {
        let last_run = self.runs;
        let new = || Lane { last_run, ..Lane::default() };
        self.lanes.entry(number).or_insert_with(new).push(task);
    }

    /// Tasks of the lane that has the fewest threads. Of several, the one that has waited longest: with fewer threads than
    /// lanes, each has its turn.
    fn take(&mut self, lane_max: usize) -> Option<Run> {
        let may_begin = |lane: &Lane| lane.busy < lane_max && !lane.turns.is_empty();
        let (number, lane) = self
            .lanes
            .iter_mut()
            .filter(|(_, lane)| may_begin(lane))
            .min_by_key(|(_, lane)| (lane.busy, lane.last_run))?;
        self.runs += 1;
        lane.last_run = self.runs;
        Some(lane.take(*number))
    }

    /// Takes the tasks of one transfer that no thread has taken.
    fn withdraw(&mut self, results: &Arc<Results>) -> Vec<Task> {
        let withdrawn = self.lanes.values_mut().flat_map(|lane| lane.withdraw(results)).collect();
        self.lanes.retain(|_, lane| lane.busy > 0 || !lane.turns.is_empty());
        withdrawn
    }

    /// A run of a lane has ended.
    fn ended(&mut self, number: u64, writes: Option<FileKey>) {
        if let Entry::Occupied(mut lane) = self.lanes.entry(number) {
            lane.get_mut().ended(writes);
            if lane.get().busy == 0 && lane.get().turns.is_empty() {
                lane.remove();
            }
        }
    }
}

/// Operations that have ended, in that order, with what they moved.
type Ended = VecDeque<(Operation, io::Result<usize>)>;

/// The completions of one queue.
struct Results {
    /// `None` once the queue was dropped: nothing takes results any more.
    ended: Mutex<Option<Ended>>,
    event: EventFd,
    /// Operations that have not begun are not to be carried out.
    stopped: AtomicBool,
}

impl Results {
    fn new() -> io::Result<Self> {
        let ended = Mutex::new(Some(Ended::new()));
        Ok(Self { ended, event: EventFd::new()?, stopped: AtomicBool::new(false) })
    }

    fn end(&self, ended: impl IntoIterator<Item = (Operation, io::Result<usize>)>) {
        let mut results = self.ended.lock();
        // Without a queue, the memory is free now, also while another operation hangs.
        let Some(results) = results.as_mut() else { return };
        // Else it is readable.
        let was_empty = results.is_empty();
        results.extend(ended);
        if was_empty && !results.is_empty() {
            self.event.signal();
        }
    }
}

impl Pool {
    pub(super) fn new() -> Self {
        let lane_max = (2 * thread::cores()).clamp(4, LANE_MAX);
        let (work, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(State { work, changed, lane_max }))
    }

    /// Has the threads carry out tasks. If there is none, and none can be started, the tasks fail.
    fn start(&self, tasks: &mut Vec<Task>) {
        let mut work = self.0.work.lock();
        for task in tasks.drain(..) {
            work.push(task.operation.file.device(), task);
        }
        while work.threads < work.wanted(self.0.lane_max) {
            let state = Arc::clone(&self.0);
            let name = format!("kvferry-file-{}", work.threads);
            match thread::spawn(name, move || state.run()) {
                Ok(_) => work.threads += 1,
                // Those that there are do the work.
                Err(_) if work.threads > 0 => break,
                Err(e) => {
                    let lanes = std::mem::take(&mut work.lanes);
                    for Task { operation, results } in
                        lanes.into_values().flat_map(Lane::into_tasks)
                    {
                        let why = format!("no thread can be started: {e}");
                        results.end([(operation, Err(io::Error::new(e.kind(), why)))]);
                    }
                    return;
                }
            }
        }
        let open = |lane: &Lane| lane.turns.len().min(self.0.lane_max - lane.busy);
        let wakes = work.lanes.values().map(open).sum::<usize>().min(work.idle);
        drop(work);
        (0..wakes).for_each(|_| self.0.changed.notify_one());
    }
}

impl State {
    fn run(&self) {
        let mut work = self.work.lock();
        loop {
            let Some(Run { lane, writes, tasks }) = work.take(self.lane_max) else {
                if work.ends {
                    break;
                }
                work.idle += 1;
                work = self.changed.wait(work, None);
                work.idle -= 1;
                continue;
            };
            drop(work);
            carry_out(tasks);
            work = self.work.lock();
            work.ended(lane, writes);
        }
        work.threads -= 1;
        drop(work);
        self.changed.notify_all();
    }
}

/// Carries out the tasks of a run: those that are neighbours in the file with one call. After a failed call, the rest is
/// left for the transfer to decide.
fn carry_out(tasks: Vec<Task>) {
    let results = Arc::clone(&tasks[0].results);
    let is_stopped = || results.stopped.load(Ordering::Acquire);
    let counts: Vec<usize> = tasks.chunk_by(Task::is_followed_by).map(<[Task]>::len).collect();
    let mut operations = tasks.into_iter().map(|task| task.operation);
    for count in counts {
        if is_stopped() {
            break;
        }
        let neighbours: Vec<Operation> = operations.by_ref().take(count).collect();
        let spans: Vec<HostSpan> = neighbours.iter().map(|operation| operation.span).collect();
        let mut moved = move_bytes(&neighbours[0], &spans);
        if moved.is_err() && count > 1 && !is_stopped() {
            // The error may be of another one.
            moved = move_bytes(&neighbours[0], &spans[..1]);
        }
        let has_failed = moved.is_err();
        // Each holds its memory until then.
        results.end(neighbours.into_iter().zip(shares(&spans, moved)));
        if has_failed {
            break;
        }
    }
    results.end(operations.map(|operation| (operation, Err(interrupted()))));
}

/// The result of each span of a call.
fn shares(spans: &[HostSpan], moved: io::Result<usize>) -> impl Iterator<Item = io::Result<usize>> {
    let (mut left, mut error) = match moved {
        Ok(moved) => (moved, None),
        Err(e) => (0, Some(e)),
    };
    spans.iter().enumerate().map(move |(place, span)| {
        let moved = left.min(span.len());
        left -= moved;
        match (moved, error.take()) {
            (_, Some(e)) => Err(e),
            // The call ended before it. It is carried out again.
            (0, None) if place > 0 && !span.is_empty() => Err(interrupted()),
            _ => Ok(moved),
        }
    })
}

/// The result of an operation that was not carried out.
fn interrupted() -> io::Error {
    io::ErrorKind::Interrupted.into()
}

/// Moves the bytes of the spans, the first of which is the operation's.
fn move_bytes(operation: &Operation, spans: &[HostSpan]) -> io::Result<usize> {
    match operation.way {
        Way::Read => operation.file.read_at(spans, operation.offset),
        Way::Write => operation.file.write_at(spans, operation.offset),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let until = Instant::now() + JOIN_MAX;
        let mut work = self.0.work.lock();
        work.ends = true;
        self.0.changed.notify_all();
        while work.threads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(threads = work.threads, "threads still wait for a file");
                return;
            }
            work = self.0.changed.wait(work, left);
        }
    }
}

/// A queue whose operations the pool's threads carry out.
pub(super) struct PoolQueue {
    pool: Arc<Pool>,
    results: Arc<Results>,
    pushed: Vec<Task>,
    in_flight: usize,
}

impl PoolQueue {
    pub(super) fn new(pool: &Arc<Pool>) -> io::Result<Self> {
        let (pool, results) = (Arc::clone(pool), Arc::new(Results::new()?));
        Ok(Self { pool, results, pushed: Vec::new(), in_flight: 0 })
    }
}

impl Drop for PoolQueue {
    fn drop(&mut self) {
        let ended = self.results.ended.lock().take();
        // Without the lock: it gives memory back.
        drop(ended);
    }
}

impl Queue for PoolQueue {
    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, operation: Operation) {
        self.in_flight += 1;
        self.pushed.push(Task { operation, results: Arc::clone(&self.results) });
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.pushed.is_empty() {
            self.pool.start(&mut self.pushed);
        }
        Ok(())
    }

    fn stop(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let mut withdrawn = std::mem::take(&mut self.pushed);
        if !self.results.stopped.swap(true, Ordering::AcqRel) {
            // Those that come after others in a file need not wait for them.
            withdrawn.extend(self.pool.0.work.lock().withdraw(&self.results));
        }
        self.results.end(withdrawn.into_iter().map(|task| (task.operation, Err(interrupted()))));
    }

    fn completed(&mut self) -> Option<(Operation, io::Result<usize>)> {
        let mut results = self.results.ended.lock();
        let ended = results.as_mut().expect("until the queue is dropped");
        if ended.is_empty() {
            // Under the lock: a thread signals after it has added its result.
            self.results.event.clear();
        }
        let done = ended.pop_front()?;
        drop(results);
        self.in_flight -= 1;
        if self.in_flight == 0 {
            // The next transfer begins anew.
            self.results.stopped.store(false, Ordering::Release);
        }
        Some(done)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.results.event.as_fd()
    }
}

#[cfg(test)]
mod tests;
