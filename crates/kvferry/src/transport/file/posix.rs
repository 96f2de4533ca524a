//! Threads that call `pread` and `pwrite`, for systems that forbid io_uring.

use super::engine::{Operation, Queue};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex, lock, wait, wait_timeout};
use kvferry_sys::poll::EventFd;
use kvferry_sys::thread;
use kvferry_sys::uring::Way;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Threads at most: a device works on several operations at once.
const THREADS_MAX: usize = 16;
/// How long a pool that ends waits for its threads. A thread whose device does not answer ends later.
const JOIN_MAX: Duration = Duration::from_secs(1);

/// Threads that are started as operations come, and sleep in between.
pub(super) struct Pool(Arc<State>);

struct State {
    work: Mutex<Work>,
    changed: Condvar,
    threads_max: usize,
}

#[derive(Default)]
struct Work {
    queue: VecDeque<Task>,
    threads: usize,
    sleeping: usize,
    ends: bool,
}

struct Task {
    operation: Operation,
    results: Arc<Results>,
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
        lock(&self.ended).push_back((operation, moved));
        self.event.signal();
    }
}

impl Pool {
    pub(super) fn new() -> Self {
        let threads_max = (2 * thread::cores()).clamp(4, THREADS_MAX);
        let (work, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(State { work, changed, threads_max }))
    }

    /// Has the threads carry out tasks. If there is none, and none can be started, the tasks fail.
    fn start(&self, tasks: &mut Vec<Task>) {
        let mut work = lock(&self.0.work);
        let busy = work.threads - work.sleeping;
        let wanted = (busy + work.queue.len() + tasks.len()).min(self.0.threads_max);
        while work.threads < wanted {
            let state = Arc::clone(&self.0);
            let name = format!("kvferry-file-{}", work.threads);
            match thread::spawn(name, move || state.run()) {
                Ok(_) => work.threads += 1,
                // Those that there are do the work.
                Err(_) if work.threads > 0 => break,
                Err(e) => {
                    for Task { operation, results } in tasks.drain(..) {
                        let why = format!("no thread can be started: {e}");
                        results.end(operation, Err(io::Error::new(e.kind(), why)));
                    }
                    return;
                }
            }
        }
        work.queue.extend(tasks.drain(..));
        drop(work);
        self.0.changed.notify_all();
    }
}

impl State {
    fn run(&self) {
        let mut work = lock(&self.work);
        loop {
            let Some(Task { operation, results }) = work.queue.pop_front() else {
                if work.ends {
                    break;
                }
                work.sleeping += 1;
                work = wait(&self.changed, work);
                work.sleeping -= 1;
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
            work = lock(&self.work);
        }
        work.threads -= 1;
        drop(work);
        self.changed.notify_all();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let until = Instant::now() + JOIN_MAX;
        let mut work = lock(&self.0.work);
        work.ends = true;
        self.0.changed.notify_all();
        while work.threads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(threads = work.threads, "threads still wait for a file");
                return;
            }
            work = wait_timeout(&self.0.changed, work, left);
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
        let mut ended = lock(&self.results.ended);
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
