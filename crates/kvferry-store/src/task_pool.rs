//! Threads that carry out operations in the background.

use crate::error::{Error, Result};
use crate::sync::lock;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval at which waiting threads look whether a thread has ended, or a directory hangs.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(1);

type Task = Box<dyn FnOnce() + Send>;

/// Threads that carry out operations in the background. They are started with the first one.
///
/// A device that hangs holds the threads whose operations it does not answer. Others take their place where nothing
/// else was carried out for some time: as many at most, as nothing more is given to such a device.
pub(crate) struct TaskPool {
    threads_max: usize,
    /// Bytes that may wait, unless nothing does.
    bytes_max: u64,
    /// Time without progress after which another thread takes part.
    patience: Option<Duration>,
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    substitutes: Mutex<Vec<JoinHandle<()>>>,
    start: fn(Task) -> io::Result<JoinHandle<()>>,
}

/// A thread of a pool.
fn start(serve: Task) -> io::Result<JoinHandle<()>> {
    kvferry_sys::thread::spawn("kvferry-store-io".into(), serve)
}

#[derive(Default)]
struct Queue {
    tasks: Mutex<Tasks>,
    changed: Condvar,
    closed: Condvar,
}

#[derive(Default)]
struct Tasks {
    waiting: VecDeque<(u64, Task)>,
    bytes: u64,
    idle: usize,
    /// Counts the tasks that were begun.
    begun: u64,
    /// A thread waits to take the place of one that is held.
    has_substitute: bool,
    is_closed: bool,
}

impl TaskPool {
    pub(crate) fn new(threads_max: usize, bytes_max: u64) -> Self {
        let (queue, threads, substitutes) = Default::default();
        Self { threads_max, bytes_max, patience: None, queue, threads, substitutes, start }
    }

    /// Has another thread take part while nothing was carried out for so long.
    #[must_use]
    pub(crate) fn patience(self, longest: Duration) -> Self {
        Self { patience: Some(longest), ..self }
    }

    /// Has a task of `bytes` carried out. False if too many bytes wait and `may_refuse`: the task is dropped. If the
    /// first thread can't be started, such as beyond the limit of threads, the caller's thread carries it out.
    ///
    /// # Errors
    /// `Closed`.
    pub(crate) fn submit(&self, bytes: u64, may_refuse: bool, task: Task) -> Result<bool> {
        let mut tasks = lock(&self.queue.tasks);
        if tasks.is_closed {
            return Err(Error::Closed);
        }
        if may_refuse && !tasks.waiting.is_empty() && tasks.bytes + bytes > self.bytes_max {
            return Ok(false);
        }
        tasks.waiting.push_back((bytes, task));
        tasks.bytes += bytes;
        let is_short = tasks.idle < tasks.waiting.len();
        drop(tasks);
        self.queue.changed.notify_one();
        if is_short {
            self.start_one();
        }
        Ok(true)
    }

    fn start_one(&self) {
        let mut threads = lock(&self.threads);
        if threads.len() >= self.threads_max {
            return self.start_substitute();
        }
        let queue = Arc::clone(&self.queue);
        match (self.start)(Box::new(move || queue.serve())) {
            Ok(new) => threads.push(new),
            Err(_) if threads.is_empty() => {
                drop(threads);
                drop(self.queue.carry_out());
            }
            // The tasks wait for those that run.
            Err(_) => {}
        }
    }

    fn start_substitute(&self) {
        let mut substitutes = lock(&self.substitutes);
        let Some(patience) = self.patience else { return };
        if substitutes.len() >= self.threads_max {
            substitutes.retain(|it| !it.is_finished());
        }
        if substitutes.len() >= self.threads_max
            || std::mem::replace(&mut lock(&self.queue.tasks).has_substitute, true)
        {
            return;
        }
        let queue = Arc::clone(&self.queue);
        match (self.start)(Box::new(move || queue.substitute(patience))) {
            Ok(new) => substitutes.push(new),
            Err(_) => lock(&self.queue.tasks).has_substitute = false,
        }
    }

    /// Carries out what waits, and ends the threads. Idempotent. A thread of the pool that calls it ends later, and so do
    /// those that are at work when `gives_up` says so.
    pub(crate) fn close_unless(&self, gives_up: impl Fn() -> bool) {
        lock(&self.queue.tasks).is_closed = true;
        self.queue.changed.notify_all();
        self.queue.closed.notify_all();
        let this = std::thread::current().id();
        let mut threads = std::mem::take(&mut *lock(&self.threads));
        threads.append(&mut lock(&self.substitutes));
        for thread in threads {
            if thread.thread().id() != this {
                join_unless(thread, &gives_up);
            }
        }
        self.queue.serve();
    }
}

/// Waits until a thread has ended, or `gives_up` says so.
pub(crate) fn join_unless(thread: JoinHandle<()>, gives_up: impl Fn() -> bool) {
    while !thread.is_finished() {
        if gives_up() {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let _ = thread.join();
}

impl Queue {
    /// Carries out tasks until the pool is closed and none is left.
    fn serve(&self) {
        loop {
            let mut tasks = self.carry_out();
            if tasks.is_closed {
                return;
            }
            tasks.idle += 1;
            tasks = self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner);
            tasks.idle -= 1;
        }
    }

    /// Carries out tasks until none waits.
    fn carry_out(&self) -> MutexGuard<'_, Tasks> {
        let mut tasks = lock(&self.tasks);
        while let Some((bytes, task)) = tasks.waiting.pop_front() {
            tasks.bytes -= bytes;
            tasks.begun += 1;
            drop(tasks);
            // A panic ends the task, whose promise says so, and not the thread.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
            tasks = lock(&self.tasks);
        }
        tasks
    }

    /// Waits until nothing was carried out for so long although tasks wait, and carries out tasks then. Ends if none
    /// waits.
    fn substitute(&self, patience: Duration) {
        let mut tasks = lock(&self.tasks);
        loop {
            let begun = tasks.begun;
            let open = |tasks: &mut Tasks| !tasks.is_closed;
            let waited = self.closed.wait_timeout_while(tasks, patience, open);
            tasks = waited.unwrap_or_else(PoisonError::into_inner).0;
            if tasks.waiting.is_empty() || tasks.is_closed {
                tasks.has_substitute = false;
                return;
            }
            if tasks.begun == begun {
                break;
            }
        }
        tasks.has_substitute = false;
        drop(tasks);
        self.serve();
    }
}

impl std::fmt::Debug for TaskPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TaskPool[{} threads]", self.threads_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pending::Pending;
    use kvferry_testkit::PATIENCE;

    #[test]
    fn tasks_are_carried_out_while_a_device_holds_all_threads() {
        let pool = TaskPool::new(2, 100).patience(Duration::from_millis(1));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        for _ in 0..2 {
            let held = Arc::clone(&held);
            let task = move || {
                let _ = lock(&held).recv();
            };
            pool.submit(0, false, Box::new(task)).expect("it is open");
        }
        let (pendings, promises): (Vec<_>, Vec<_>) = (0..9).map(|_| Pending::new()).unzip();
        for promise in promises {
            pool.submit(0, false, Box::new(move || promise.finish(Ok(())))).expect("it is open");
        }
        for pending in pendings {
            let outcome = pending.wait(Some(PATIENCE / 2)).expect("an outcome");
            assert!(outcome.is_ok(), "{outcome:?}");
        }
        pool.close_unless(|| true);
        assert!(pool.submit(0, false, Box::new(|| ())).is_err());
        drop(release);
    }

    #[test]
    fn without_a_thread_the_caller_carries_out_its_task() {
        let refuses = |_: Task| Err(io::Error::from_raw_os_error(11));
        let pool =
            TaskPool { start: refuses, ..TaskPool::new(2, 100).patience(Duration::from_millis(1)) };
        for _ in 0..3 {
            let (pending, promise) = Pending::new();
            let task = Box::new(move || promise.finish(Ok(())));
            assert!(pool.submit(10, true, task).expect("it is open"));
            assert!(pending.outcome().is_some());
        }
        pool.close_unless(|| false);
    }

    #[test]
    fn a_task_may_close_its_pool() {
        let pool = Arc::new(TaskPool::new(2, 100));
        let (pending, promise) = Pending::new();
        let closes = Arc::clone(&pool);
        let task = move || {
            closes.close_unless(|| false);
            promise.finish(Ok(()));
        };
        pool.submit(0, false, Box::new(task)).expect("it is open");
        let outcome = pending.wait(Some(PATIENCE / 2)).expect("an outcome");
        assert!(outcome.is_ok(), "{outcome:?}");
    }
}
