//! Threads that call `pread` and `pwrite`, for systems that forbid io_uring.

use super::engine::{Operation, Queue};
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
}

impl Pool {
    pub(super) fn new() -> Self {
        let threads_max = (2 * thread::cores()).clamp(4, THREADS_MAX);
        let (work, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(State { work, changed, threads_max }))
    }

    fn start(&self, tasks: &mut Vec<Task>) -> io::Result<()> {
        let mut work = lock(&self.0.work);
        let wanted = (work.queue.len() + tasks.len()).min(self.0.threads_max);
        while work.threads < wanted && work.sleeping < tasks.len() {
            let state = Arc::clone(&self.0);
            let name = format!("kvferry-file-{}", work.threads);
            match thread::spawn(name, move || state.run()) {
                Ok(_) => work.threads += 1,
                // Those that there are do the work.
                Err(_) if work.threads > 0 => break,
                Err(e) => return Err(e),
            }
        }
        work.queue.extend(tasks.drain(..));
        drop(work);
        self.0.changed.notify_all();
        Ok(())
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
                Way::Read => file.read_at(span, operation.offset),
                Way::Write => file.write_at(span, operation.offset),
            };
            lock(&results.ended).push_back((operation, moved));
            results.event.signal();
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
        let results = Results { ended: Mutex::default(), event: EventFd::new()? };
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
        match self.pushed.is_empty() {
            true => Ok(()),
            false => self.pool.start(&mut self.pushed),
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
        Some(done)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.results.event.as_fd()
    }
}
