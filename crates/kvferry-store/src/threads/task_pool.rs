//! Threads that carry out operations in the background.
//!
//! Tasks begin in the order in which they are submitted. A task may come with bounds, beyond which it is not taken, and
//! with a time until which it must have begun. A task whose [`Ticket`] is known can be cancelled until it has begun.
//! Each task is called exactly once: with [`Turn::Begun`] on a thread of the pool, or with [`Turn::GivenUp`] on the
//! thread that has refused it, cancelled it, or noticed that its time has passed.

use crate::error::{Error, Result};
use kvferry_sys::sync::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
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
/// A device that hangs holds the threads whose operations it does not answer. One more thread, the watcher, carries out
/// none: it gives up tasks whose time has passed, and starts further threads where no task has begun for some time. There
/// are twice as many then at most, as nothing more is given to such a device. A thread that has nothing to do ends if so
/// many others have nothing to do at the same time as there usually are; under load, all go on.
pub(crate) struct TaskPool(Arc<Shared>);

/// A thread of a pool.
fn start(serve: Serve) -> io::Result<JoinHandle<()>> {
    kvferry_sys::thread::spawn("kvferry-store-io".into(), serve)
}

struct Shared {
    threads_max: usize,
    /// Time in which no task begins, although some wait, after which another thread is started.
    patience: Duration,
    start: fn(Serve) -> io::Result<JoinHandle<()>>,
    servers: Mutex<Vec<JoinHandle<()>>>,
    watcher: Mutex<Option<JoinHandle<()>>>,
    tasks: Mutex<Tasks>,
    changed: Condvar,
    /// Wakes the watcher: the pool is closed, or a task must begin before the watcher's next look.
    watch: Condvar,
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
    /// Time of the watcher's next look. `None`: there is no watcher.
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
    pool: Weak<Shared>,
    number: u64,
}

impl Ticket {
    /// Gives the task up. False if it has begun, or was given up before.
    pub(crate) fn cancel(&self) -> bool {
        let removed = self.pool.upgrade().and_then(|pool| pool.tasks.lock().remove(self.number));
        // Without the lock: the end of the task may wake anything.
        removed.map(|it| (it.task)(Turn::GivenUp)).is_some()
    }
}

/// The time at which `wait` has passed since `since`; a century later if the clock can't tell it.
pub(crate) fn after(since: Instant, wait: Duration) -> Instant {
    since.checked_add(wait).unwrap_or_else(|| since + Duration::from_secs(u32::MAX.into()))
}

impl TaskPool {
    /// Creates a pool that starts another thread while no task begins for the time of `patience`.
    pub(crate) fn new(threads_max: usize, patience: Duration) -> Self {
        Self::with(threads_max, patience, start)
    }

    fn with(
        threads_max: usize,
        patience: Duration,
        start: fn(Serve) -> io::Result<JoinHandle<()>>,
    ) -> Self {
        let (servers, watcher, tasks, changed, watch) = Default::default();
        let shared =
            Shared { threads_max, patience, start, servers, watcher, tasks, changed, watch };
        Self(Arc::new(shared))
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
    /// is not within `bounds` with it. It is taken if no task with a load waits. Returns `None` if it was given up.
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
        if tasks.load.blocks == 0 || tasks.load.with(load).is_within(bounds) {
            return Ok(Some(self.add(tasks, Waiting { task, load, until })));
        }
        drop(tasks);
        task(Turn::GivenUp);
        Ok(None)
    }

    fn open(&self) -> Result<MutexGuard<'_, Tasks>> {
        let tasks = self.0.tasks.lock();
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
        self.0.changed.notify_one();
        if is_urgent {
            self.0.watch.notify_one();
        }
        if is_short {
            self.0.start_one();
        }
        Ticket { pool: Arc::downgrade(&self.0), number }
    }

    /// Carries out what waits, and ends the threads. Idempotent. A thread of the pool that calls it ends later, and so do
    /// those that are at work when `gives_up` says so. Tasks whose time passes meanwhile are given up as before.
    pub(crate) fn close_unless(&self, gives_up: impl Fn() -> bool) {
        let Shared { tasks, changed, watch, servers, watcher, .. } = &*self.0;
        tasks.lock().is_closed = true;
        changed.notify_all();
        watch.notify_all();
        let this = std::thread::current().id();
        let join = |thread: JoinHandle<()>| {
            if thread.thread().id() != this {
                join_unless(thread, &gives_up);
            }
        };
        let servers = std::mem::take(&mut *servers.lock());
        servers.into_iter().for_each(join);
        // The watcher ends when nothing waits.
        self.0.serve();
        let watcher = watcher.lock().take();
        watcher.into_iter().for_each(join);
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

impl Shared {
    /// Has a further task wait for no longer than it must.
    fn start_one(self: &Arc<Self>) {
        if self.start_server(self.threads_max) {
            return;
        }
        if self.servers.lock().is_empty() {
            drop(self.carry_out());
        } else {
            self.start_watcher();
        }
    }

    /// Starts a thread that carries out tasks. False if there are `most` of them, the pool is closed, or it can't be
    /// started.
    fn start_server(self: &Arc<Self>, most: usize) -> bool {
        let mut servers = self.servers.lock();
        if servers.len() >= most {
            servers.retain(|it| !it.is_finished());
        }
        // Under the lock: closing joins all that were started.
        if servers.len() >= most || self.tasks.lock().is_closed {
            return false;
        }
        let pool = Arc::clone(self);
        let server = (self.start)(Box::new(move || pool.serve()));
        server.map(|new| servers.push(new)).is_ok()
    }

    fn start_watcher(self: &Arc<Self>) {
        let mut watcher = self.watcher.lock();
        let mut tasks = self.tasks.lock();
        if tasks.next_look.is_some() || tasks.is_closed {
            return;
        }
        tasks.next_look = Some(Instant::now());
        drop(tasks);
        let pool = Arc::clone(self);
        match (self.start)(Box::new(move || pool.watch_tasks())) {
            Ok(new) => *watcher = Some(new),
            Err(_) => self.tasks.lock().next_look = None,
        }
    }

    /// Carries out tasks until the pool is closed and none is left, or enough other threads are idle.
    fn serve(&self) {
        loop {
            let mut tasks = self.carry_out();
            if tasks.is_closed {
                self.watch.notify_one();
                return;
            }
            if tasks.idle >= self.threads_max {
                return;
            }
            tasks.idle += 1;
            tasks = self.changed.wait(tasks, None);
            tasks.idle -= 1;
        }
    }

    /// Carries out tasks until none waits.
    fn carry_out(&self) -> MutexGuard<'_, Tasks> {
        let mut tasks = self.tasks.lock();
        while let Some(Waiting { task, until, .. }) = tasks.remove_first() {
            tasks.begun += 1;
            drop(tasks);
            let is_late = until.is_some_and(|until| until <= Instant::now());
            call(task, if is_late { Turn::GivenUp } else { Turn::Begun });
            tasks = self.tasks.lock();
        }
        tasks
    }

    /// Gives up tasks whose time has passed, and starts a thread each time that none has begun for the time of `patience`
    /// although tasks wait. Ends at a look at which none waits; once the pool is closed, as soon as none does.
    fn watch_tasks(self: &Arc<Self>) {
        let mut tasks = self.tasks.lock();
        let (mut begun, mut look) = (tasks.begun, after(Instant::now(), self.patience));
        loop {
            let now = Instant::now();
            let late = tasks.remove_late(now);
            if !late.is_empty() {
                drop(tasks);
                late.into_iter().for_each(|it| call(it.task, Turn::GivenUp));
                tasks = self.tasks.lock();
                continue;
            }
            let is_due = look <= now;
            if tasks.waiting.is_empty() && (is_due || tasks.is_closed) {
                break;
            }
            if is_due {
                let is_held = tasks.begun == begun;
                (begun, look) = (tasks.begun, after(now, self.patience));
                if is_held {
                    drop(tasks);
                    self.start_server(2 * self.threads_max);
                    tasks = self.tasks.lock();
                    continue;
                }
            }
            let first = tasks.waiting.values().filter_map(|it| it.until).min();
            let next_look = first.map_or(look, |until| until.min(look));
            tasks.next_look = Some(next_look);
            tasks = self.watch.wait(tasks, next_look.duration_since(now));
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
        write!(f, "TaskPool[{} threads]", self.0.threads_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pending::Pending;
    use kvferry_testkit::{PATIENCE, eventually};
    use std::sync::mpsc::{Receiver, Sender, channel};

    const HOUR: Duration = Duration::from_secs(3600);
    const LOAD: Load = Load { bytes: 10, blocks: 1 };
    const MANY: Load = Load { bytes: 1000, blocks: 1000 };

    /// A pool whose threads are all held by a task, until the sender is dropped.
    fn held(threads: usize, patience: Duration) -> (TaskPool, Sender<()>) {
        let pool = TaskPool::new(threads, patience);
        let release = hold(&pool, threads);
        (pool, release)
    }

    /// Has so many threads held by a task each, until the sender is dropped.
    fn hold(pool: &TaskPool, threads: usize) -> Sender<()> {
        let (release, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (begun, begins) = channel();
        for _ in 0..threads {
            let (held, begun) = (Arc::clone(&held), begun.clone());
            let task = move || {
                let _ = begun.send(());
                let _ = held.lock().recv();
            };
            pool.submit(task).expect("it is open");
        }
        (0..threads).for_each(|_| begins.recv_timeout(PATIENCE).expect("it begins"));
        release
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
    fn further_threads_end_once_there_is_nothing_to_do() {
        let pool = TaskPool::new(2, Duration::from_millis(1));
        let at_work = || pool.0.servers.lock().iter().filter(|it| !it.is_finished()).count();
        let release = hold(&pool, 4);
        assert_eq!(at_work(), 4);
        drop(release);
        eventually("two are left", || at_work() == 2);
        pool.close_unless(|| false);
    }

    #[test]
    fn a_task_beyond_either_bound_is_given_up_at_once_unless_no_load_waits() {
        let (pool, release) = held(1, HOUR);
        let tight = Load { bytes: 1, blocks: 1 };
        pool.submit(|| ()).expect("it is open");
        let (first, first_calls) = submit(&pool, tight, LOAD, None);
        assert!(first.is_some(), "what waited has no load");
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
    fn a_late_task_is_given_up_while_all_further_threads_are_held_too_however_often() {
        let pool = TaskPool::new(2, Duration::from_millis(1));
        for _ in 0..3 {
            let release = hold(&pool, 4);
            let (_, stays) = submit(&pool, MANY, LOAD, None);
            let soon = Instant::now() + Duration::from_millis(20);
            let (_, late) = submit(&pool, MANY, LOAD, Some(soon));
            assert_eq!(turn(&late), Turn::GivenUp);
            assert!(stays.try_recv().is_err(), "all threads are held");
            drop(release);
            assert_eq!(turn(&stays), Turn::Begun);
        }
        pool.close_unless(|| false);
    }

    #[test]
    fn a_late_task_is_given_up_while_closing_waits_for_a_thread() {
        let (pool, release) = held(1, HOUR);
        let soon = Instant::now() + Duration::from_millis(100);
        let (_, late) = submit(&pool, MANY, LOAD, Some(soon));
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| pool.close_unless(|| false));
            assert_eq!(turn(&late), Turn::GivenUp);
            assert!(!closing.is_finished());
            drop(release);
        });
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
        let pool = TaskPool::with(2, Duration::from_millis(1), refuses);
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
