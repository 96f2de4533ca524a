//! Threads that call `pread` and `pwrite`, for systems that forbid io_uring.
//!
//! A thread waits for its device, for ever if that hangs. So each file system has a lane of its own, which takes a part
//! of the threads at most: operations on others are carried out by the rest.

use super::engine::{Operation, Queue};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex};
use kvferry_sys::poll::EventFd;
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
/// File systems that may take as many threads as they can at the same time.
const LANES_BUSY_MAX: usize = 8;
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
    ends: bool,
}

/// The tasks of one file system.
#[derive(Default)]
struct Lane {
    queue: VecDeque<Task>,
    /// Tasks that are being carried out.
    busy: usize,
}

struct Task {
    operation: Operation,
    results: Arc<Results>,
}

impl Work {
    /// Threads that have something to do.
    fn wanted(&self, lane_max: usize) -> usize {
        let of = |lane: &Lane| (lane.busy + lane.queue.len()).min(lane_max);
        self.lanes.values().map(of).sum::<usize>().min(lane_max * LANES_BUSY_MAX)
    }

    /// A task of the lane that has the fewest threads, and the lane's number.
    fn take(&mut self, lane_max: usize) -> Option<(u64, Task)> {
        let may_begin = |lane: &Lane| lane.busy < lane_max && !lane.queue.is_empty();
        let (number, lane) = self
            .lanes
            .iter_mut()
            .filter(|(_, lane)| may_begin(lane))
            .min_by_key(|(_, lane)| lane.busy)?;
        lane.busy += 1;
        Some((*number, lane.queue.pop_front().expect("it has one")))
    }

    /// A task of a lane has ended.
    fn ended(&mut self, number: u64) {
        if let Entry::Occupied(mut lane) = self.lanes.entry(number) {
            lane.get_mut().busy -= 1;
            if lane.get().busy == 0 && lane.get().queue.is_empty() {
                lane.remove();
            }
        }
    }
}

/// The completions of one queue.
struct Results {
    ended: Mutex<VecDeque<(Operation, io::Result<usize>)>>,
    event: EventFd,
    /// Operations that have not begun are not to be carried out.
    stopped: AtomicBool,
}

impl Results {
    fn end(&self, operation: Operation, moved: io::Result<usize>) {
        self.ended.lock().push_back((operation, moved));
        self.event.signal();
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
            work.lanes.entry(task.operation.file.device()).or_default().queue.push_back(task);
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
                    for Task { operation, results } in lanes.into_values().flat_map(|it| it.queue) {
                        let why = format!("no thread can be started: {e}");
                        results.end(operation, Err(io::Error::new(e.kind(), why)));
                    }
                    return;
                }
            }
        }
        drop(work);
        self.0.changed.notify_all();
    }
}

impl State {
    fn run(&self) {
        let mut work = self.work.lock();
        loop {
            let Some((lane, Task { operation, results })) = work.take(self.lane_max) else {
                if work.ends {
                    break;
                }
                work = self.changed.wait(work, None);
                continue;
            };
            drop(work);
            let (file, span) = (&operation.file, operation.span);
            let moved = match operation.way {
                _ if results.stopped.load(Ordering::Acquire) => {
                    Err(io::ErrorKind::Interrupted.into())
                }
                Way::Read => file.read_at(span, operation.offset),
                Way::Write => file.write_at(span, operation.offset),
            };
            results.end(operation, moved);
            work = self.work.lock();
            work.ended(lane);
        }
        work.threads -= 1;
        drop(work);
        self.changed.notify_all();
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
        let (ended, stopped) = (Mutex::default(), AtomicBool::new(false));
        let results = Results { ended, event: EventFd::new()?, stopped };
        let (pool, results) = (Arc::clone(pool), Arc::new(results));
        Ok(Self { pool, results, pushed: Vec::new(), in_flight: 0 })
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
        self.results.stopped.store(true, Ordering::Release);
        for Task { operation, results } in self.pushed.drain(..) {
            results.end(operation, Err(io::ErrorKind::Interrupted.into()));
        }
    }

    fn completed(&mut self) -> Option<(Operation, io::Result<usize>)> {
        let mut ended = self.results.ended.lock();
        if ended.is_empty() {
            // Under the lock: a thread signals after it has added its result.
            self.results.event.clear();
        }
        let done = ended.pop_front()?;
        drop(ended);
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
