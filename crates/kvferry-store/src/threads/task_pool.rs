//! Threads that carry out operations in the background.
//!
//! Tasks begin in the order in which they are submitted. A task may come with bounds, beyond which it is not taken, and
//! with a time until which it must have begun. A task whose [`Ticket`] is known can be cancelled until it has begun.
//! Each task is called exactly once: with [`Turn::Begun`] on a thread of the pool, or with [`Turn::GivenUp`] on the
//! thread that has refused it, cancelled it, or noticed that its time has passed.

use crate::error::{Error, Result};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval at which waiting threads look whether a thread has ended, or a directory hangs.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Whether a task is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Begun,
    /// The task was refused or cancelled, or it has waited for too long.
    GivenUp,
}

pub(crate) type Task = Box<dyn FnOnce(Turn) + Send>;
type Serve = Box<dyn FnOnce() + Send>;

/// What tasks hold of their callers: the sum of those that wait, or its upper bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    pub(crate) bytes: u64,
    pub(crate) blocks: usize,
}

impl Load {
    fn with(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, blocks: self.blocks + other.blocks }
    }

    fn without(self, other: Self) -> Self {
        Self { bytes: self.bytes - other.bytes, blocks: self.blocks - other.blocks }
    }

    fn is_within(self, bounds: Self) -> bool {
        self.bytes <= bounds.bytes && self.blocks <= bounds.blocks
    }
}

/// Threads that carry out operations in the background. They are started with the first one.
///
/// A device that hangs holds the threads whose operations it does not answer. Others take their place where nothing
/// else was carried out for some time: as many at most, as nothing more is given to such a device.
pub(crate) struct TaskPool {
    threads_max: usize,
    /// Time without progress after which another thread takes part.
    patience: Duration,
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    substitutes: Mutex<Vec<JoinHandle<()>>>,
    start: fn(Serve) -> io::Result<JoinHandle<()>>,
}

/// A thread of a pool.
fn start(serve: Serve) -> io::Result<JoinHandle<()>> {
    kvferry_sys::thread::spawn("kvferry-store-io".into(), serve)
}

#[derive(Default)]
struct Queue {
    tasks: Mutex<Tasks>,
    changed: Condvar,
    /// Wakes the substitute: the pool is closed, or a task must begin before the substitute's next look.
    substitute: Condvar,
}

#[derive(Default)]
struct Tasks {
    /// By their numbers, which are given in order.
    waiting: BTreeMap<u64, Waiting>,
    /// What waits holds in all.
    load: Load,
    /// Number of the next task.
    next: u64,
    idle: usize,
    /// Counts the tasks that have left the queue in their turn.
    begun: u64,
    /// Time of the next look of the substitute: the thread that waits to take the place of one that is held, and gives
    /// up tasks whose time has passed. `None`: there is no such thread.
    next_look: Option<Instant>,
    is_closed: bool,
}

struct Waiting {
    task: Task,
    load: Load,
    /// The task is given up if it has not begun by then.
    until: Option<Instant>,
}

impl Tasks {
    fn remove(&mut self, number: u64) -> Option<Waiting> {
        let removed = self.waiting.remove(&number)?;
        self.load = self.load.without(removed.load);
        Some(removed)
    }

    fn remove_first(&mut self) -> Option<Waiting> {
        let (&number, _) = self.waiting.first_key_value()?;
        self.remove(number)
    }

    /// Removes the tasks whose time has passed.
    fn remove_late(&mut self, now: Instant) -> Vec<Waiting> {
        let is_late = |it: &Waiting| it.until.is_some_and(|until| until <= now);
        let late: Vec<_> =
            self.waiting.iter().filter(|(_, it)| is_late(it)).map(|(number, _)| *number).collect();
        late.into_iter().filter_map(|number| self.remove(number)).collect()
    }
}

/// A task that was submitted, while it waits. It does not keep the pool.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    queue: Weak<Queue>,
    number: u64,
}

impl Ticket {
    /// Gives the task up. False if it has begun, or was given up before.
    pub(crate) fn cancel(&self) -> bool {
        let removed = self.queue.upgrade().and_then(|queue| lock(&queue.tasks).remove(self.number));
        // Without the lock: the end of the task may wake anything.
        removed.map(|it| (it.task)(Turn::GivenUp)).is_some()
    }
}

/// The time at which `wait` has passed since `since`; a century later if the clock can't tell it.
pub(crate) fn after(since: Instant, wait: Duration) -> Instant {
    since.checked_add(wait).unwrap_or_else(|| since + Duration::from_secs(u32::MAX.into()))
}

impl TaskPool {
    /// Creates a pool in which another thread takes part while nothing was carried out for the time of `patience`.
    pub(crate) fn new(threads_max: usize, patience: Duration) -> Self {
        let (queue, threads, substitutes) = Default::default();
        Self { threads_max, patience, queue, threads, substitutes, start }
    }

    /// Has a task carried out. If the first thread can't be started, such as beyond the limit of threads, the caller's
    /// thread carries it out.
    ///
    /// # Errors
    /// `Closed`.
    pub(crate) fn submit(&self, task: impl FnOnce() + Send + 'static) -> Result<()> {
        let waiting = Waiting { task: Box::new(|_| task()), load: Load::default(), until: None };
        self.add(self.open()?, waiting);
        Ok(())
    }

    /// Like [`TaskPool::submit`], for a task that is given up if it has not begun at `until`, or at once if what waits
    /// is not within `bounds` with it. It is taken if nothing waits. Returns `None` if it was given up.
    ///
    /// # Errors
    /// `Closed`.
    pub(crate) fn submit_within(
        &self,
        bounds: Load,
        load: Load,
        until: Option<Instant>,
        task: Task,
    ) -> Result<Option<Ticket>> {
        let tasks = self.open()?;
        if tasks.waiting.is_empty() || tasks.load.with(load).is_within(bounds) {
            return Ok(Some(self.add(tasks, Waiting { task, load, until })));
        }
        drop(tasks);
        task(Turn::GivenUp);
        Ok(None)
    }

    fn open(&self) -> Result<MutexGuard<'_, Tasks>> {
        let tasks = lock(&self.queue.tasks);
        if tasks.is_closed { Err(Error::Closed) } else { Ok(tasks) }
    }

    fn add(&self, mut tasks: MutexGuard<'_, Tasks>, waiting: Waiting) -> Ticket {
        let number = tasks.next;
        tasks.next += 1;
        tasks.load = tasks.load.with(waiting.load);
        let is_urgent =
            waiting.until.zip(tasks.next_look).is_some_and(|(until, look)| until < look);
        tasks.waiting.insert(number, waiting);
        let is_short = tasks.idle < tasks.waiting.len();
        drop(tasks);
        self.queue.changed.notify_one();
        if is_urgent {
            self.queue.substitute.notify_one();
        }
        if is_short {
            self.start_one();
        }
        Ticket { queue: Arc::downgrade(&self.queue), number }
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
        if substitutes.len() >= self.threads_max {
            substitutes.retain(|it| !it.is_finished());
        }
        if substitutes.len() >= self.threads_max {
            return;
        }
        let mut tasks = lock(&self.queue.tasks);
        if tasks.next_look.is_some() {
            return;
        }
        tasks.next_look = Some(Instant::now());
        drop(tasks);
        let (queue, patience) = (Arc::clone(&self.queue), self.patience);
        match (self.start)(Box::new(move || queue.substitute(patience))) {
            Ok(new) => substitutes.push(new),
            Err(_) => lock(&self.queue.tasks).next_look = None,
        }
    }

    /// Carries out what waits, and ends the threads. Idempotent. A thread of the pool that calls it ends later, and so do
    /// those that are at work when `gives_up` says so.
    pub(crate) fn close_unless(&self, gives_up: impl Fn() -> bool) {
        lock(&self.queue.tasks).is_closed = true;
        self.queue.changed.notify_all();
        self.queue.substitute.notify_all();
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
        while let Some(Waiting { task, until, .. }) = tasks.remove_first() {
            tasks.begun += 1;
            drop(tasks);
            let is_late = until.is_some_and(|until| until <= Instant::now());
            call(task, if is_late { Turn::GivenUp } else { Turn::Begun });
            tasks = lock(&self.tasks);
        }
        tasks
    }

    /// Gives up tasks whose time has passed, until nothing was carried out for the time of `patience` although tasks
    /// wait, and carries out tasks then. Ends if none waits.
    fn substitute(&self, patience: Duration) {
        let mut tasks = lock(&self.tasks);
        let (mut begun, mut look) = (tasks.begun, after(Instant::now(), patience));
        while !tasks.is_closed {
            let now = Instant::now();
            let late = tasks.remove_late(now);
            if !late.is_empty() {
                drop(tasks);
                late.into_iter().for_each(|it| call(it.task, Turn::GivenUp));
                tasks = lock(&self.tasks);
                continue;
            }
            if look <= now {
                if tasks.waiting.is_empty() {
                    break;
                }
                if tasks.begun == begun {
                    tasks.next_look = None;
                    drop(tasks);
                    return self.serve();
                }
                (begun, look) = (tasks.begun, after(now, patience));
            }
            let first = tasks.waiting.values().filter_map(|it| it.until).min();
            let next_look = first.map_or(look, |until| until.min(look));
            tasks.next_look = Some(next_look);
            let waited = self.substitute.wait_timeout(tasks, next_look.duration_since(now));
            tasks = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        tasks.next_look = None;
    }
}

/// A panic ends the task, whose promise says so, and not the thread.
fn call(task: Task, turn: Turn) {
    let _ = catch_unwind(AssertUnwindSafe(|| task(turn)));
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
    use std::sync::mpsc::{Receiver, Sender, channel};

    const HOUR: Duration = Duration::from_secs(3600);
    const LOAD: Load = Load { bytes: 10, blocks: 1 };
    const MANY: Load = Load { bytes: 1000, blocks: 1000 };

    /// A pool whose threads are all held by a task, until the sender is dropped.
    fn held(threads: usize, patience: Duration) -> (TaskPool, Sender<()>) {
        let pool = TaskPool::new(threads, patience);
        let (release, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (begun, begins) = channel();
        for _ in 0..threads {
            let (held, begun) = (Arc::clone(&held), begun.clone());
            let task = move || {
                let _ = begun.send(());
                let _ = lock(&held).recv();
            };
            pool.submit(task).expect("it is open");
        }
        (0..threads).for_each(|_| begins.recv_timeout(PATIENCE).expect("it begins"));
        (pool, release)
    }

    /// Submits a task that says how it was called.
    fn submit(
        pool: &TaskPool,
        bounds: Load,
        load: Load,
        until: Option<Instant>,
    ) -> (Option<Ticket>, Receiver<Turn>) {
        let (called, calls) = channel();
        let task = Box::new(move |turn| called.send(turn).expect("the test reads it"));
        (pool.submit_within(bounds, load, until, task).expect("it is open"), calls)
    }

    fn turn(calls: &Receiver<Turn>) -> Turn {
        calls.recv_timeout(PATIENCE).expect("one call")
    }

    #[test]
    fn tasks_are_carried_out_while_a_device_holds_all_threads() {
        let (pool, release) = held(2, Duration::from_millis(1));
        let (pendings, promises): (Vec<_>, Vec<_>) = (0..9).map(|_| Pending::new()).unzip();
        for promise in promises {
            pool.submit(move || promise.finish(Ok(()))).expect("it is open");
        }
        for pending in pendings {
            let outcome = pending.wait(Some(PATIENCE / 2)).expect("an outcome");
            assert!(outcome.is_ok(), "{outcome:?}");
        }
        pool.close_unless(|| true);
        assert!(pool.submit(|| ()).is_err());
        drop(release);
    }

    #[test]
    fn a_task_beyond_either_bound_is_given_up_at_once_unless_nothing_waits() {
        let (pool, release) = held(1, HOUR);
        let tight = Load { bytes: 1, blocks: 1 };
        let (first, first_calls) = submit(&pool, tight, LOAD, None);
        assert!(first.is_some(), "nothing waited");
        for bounds in [Load { bytes: 19, ..MANY }, Load { blocks: 1, ..MANY }] {
            let (refused, calls) = submit(&pool, bounds, LOAD, None);
            assert!(refused.is_none(), "{bounds:?}");
            assert_eq!(calls.try_recv(), Ok(Turn::GivenUp));
        }
        let (second, second_calls) = submit(&pool, Load { bytes: 20, blocks: 2 }, LOAD, None);
        assert!(second.is_some());
        // What was cancelled holds nothing.
        assert!(first.expect("taken").cancel());
        let (third, third_calls) = submit(&pool, Load { bytes: 20, blocks: 2 }, LOAD, None);
        assert!(third.is_some());
        drop(release);
        assert_eq!(turn(&first_calls), Turn::GivenUp);
        assert_eq!([turn(&second_calls), turn(&third_calls)], [Turn::Begun; 2]);
        pool.close_unless(|| false);
    }

    #[test]
    fn a_task_is_given_up_when_its_time_has_passed_although_all_threads_are_held() {
        let (pool, release) = held(1, HOUR);
        let (_, stays) = submit(&pool, MANY, LOAD, None);
        // The second one has less time than the thread that looks for such tasks knew of.
        let long = Instant::now() + HOUR;
        let (_, also_stays) = submit(&pool, MANY, LOAD, Some(long));
        let (late, calls) =
            submit(&pool, MANY, LOAD, Some(Instant::now() + Duration::from_millis(20)));
        assert_eq!(turn(&calls), Turn::GivenUp);
        assert!(!late.expect("taken").cancel());
        drop(release);
        assert_eq!([turn(&stays), turn(&also_stays)], [Turn::Begun; 2]);
        pool.close_unless(|| false);
    }

    #[test]
    fn a_task_is_cancelled_once_and_not_after_it_has_begun() {
        let (pool, release) = held(1, HOUR);
        let [first, second, third] = [(); 3].map(|()| submit(&pool, MANY, LOAD, None));
        let ticket = second.0.expect("taken");
        assert_eq!([ticket.cancel(), ticket.cancel()], [true, false]);
        assert_eq!(second.1.try_recv(), Ok(Turn::GivenUp));
        drop(release);
        for (ticket, calls) in [first, third] {
            assert_eq!(turn(&calls), Turn::Begun);
            assert!(!ticket.expect("taken").cancel());
        }
        pool.close_unless(|| false);
        assert!(!ticket.cancel());
    }

    #[test]
    fn closing_carries_out_what_waits_and_gives_up_what_is_late() {
        let (pool, release) = held(1, HOUR);
        let (_, waits) = submit(&pool, MANY, LOAD, Some(Instant::now() + HOUR));
        let (_, late) = submit(&pool, MANY, LOAD, Some(Instant::now()));
        // The pool's thread goes on to wait.
        pool.close_unless(|| true);
        assert_eq!([turn(&waits), turn(&late)], [Turn::Begun, Turn::GivenUp]);
        drop(release);
    }

    #[test]
    fn without_a_thread_the_caller_carries_out_its_task() {
        let refuses = |_: Serve| Err(io::Error::from_raw_os_error(11));
        let pool = TaskPool { start: refuses, ..TaskPool::new(2, Duration::from_millis(1)) };
        for _ in 0..3 {
            let (ticket, calls) = submit(&pool, LOAD, LOAD, None);
            assert!(ticket.is_some());
            assert_eq!(calls.try_recv(), Ok(Turn::Begun));
        }
        pool.close_unless(|| false);
    }

    #[test]
    fn a_task_may_close_its_pool() {
        let pool = Arc::new(TaskPool::new(2, HOUR));
        let (pending, promise) = Pending::new();
        let closes = Arc::clone(&pool);
        let task = move || {
            closes.close_unless(|| false);
            promise.finish(Ok(()));
        };
        pool.submit(task).expect("it is open");
        let outcome = pending.wait(Some(PATIENCE / 2)).expect("an outcome");
        assert!(outcome.is_ok(), "{outcome:?}");
    }
}
