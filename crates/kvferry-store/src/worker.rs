//! The thread of a process that seals its segments and, in the keeper, frees space.

use crate::core::Core;
use crate::keeper::Keeper;
use crate::membership::Keep;
use crate::sync::lock;
use crate::writer::{Which, Writer};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// No put for so long is a pause.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Worker {
    core: Arc<Core>,
    pub(crate) writer: Writer,
    tasks: Mutex<Tasks>,
    changed: Condvar,
    /// Ends the freeing of space early.
    is_stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Tasks {
    look: bool,
    /// This process has become the keeper.
    begin: bool,
    /// Processes have left: there may be something to repair.
    repair: bool,
    stop: bool,
}

impl Tasks {
    fn is_pause(&self) -> bool {
        !(self.look || self.begin || self.repair || self.stop)
    }
}

impl Worker {
    pub(crate) fn start(core: Arc<Core>) -> io::Result<Arc<Self>> {
        let worker = Arc::new(Self {
            core,
            writer: Writer::default(),
            tasks: Mutex::default(),
            changed: Condvar::new(),
            is_stopping: AtomicBool::new(false),
            thread: Mutex::default(),
        });
        let run = Arc::clone(&worker);
        let thread = kvferry_sys::thread::spawn("kvferry-store-gc".into(), move || run.run())?;
        *lock(&worker.thread) = Some(thread);
        Ok(worker)
    }

    /// Has the thread look whether there is something to do.
    pub(crate) fn wake(&self) {
        self.ask(|tasks| tasks.look = true);
    }

    /// Seals what this process has written, and ends the thread. Idempotent.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.ask(|tasks| tasks.stop = true);
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }

    fn ask(&self, change: impl FnOnce(&mut Tasks)) {
        change(&mut lock(&self.tasks));
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut is_keeper = false;
        let mut keeper: Option<Keeper> = None;
        let mut begun = 0;
        loop {
            let tasks = self.next_tasks();
            let is_quiet = self.writer.begun() == begun;
            begun = self.writer.begun();
            if tasks.stop {
                break;
            }
            is_keeper |= tasks.begin;
            if tasks.begin {
                keeper = None;
            }
            let work = || {
                // First: the keeper frees sealed segments only, and would evict more than it must.
                let which = if is_quiet || self.is_short() { Which::Full } else { Which::Excess };
                self.writer.seal(&self.core, which);
                if tasks.is_pause() {
                    return;
                }
                if is_keeper {
                    let new = || Keeper::new(Arc::clone(&self.core));
                    let keeper = keeper.get_or_insert_with(new);
                    if tasks.repair {
                        keeper.repair();
                    }
                    keeper.look(&self.is_stopping);
                }
            };
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                // What it knows may be half changed. The index is as it was: all processes change it so that it
                // is right at each moment.
                tracing::error!("the store's thread that frees space has panicked; it begins anew");
                keeper = None;
            }
        }
        if let Some(keeper) = &mut keeper {
            keeper.stop();
        }
        self.writer.seal(&self.core, Which::All);
    }

    /// Whether the keeper may soon need the space of segments that are not sealed.
    fn is_short(&self) -> bool {
        self.core.free_segments() <= 2 * self.core.wanted_segments()
    }

    /// Waits for tasks; while segments wait to be sealed, for no longer than puts pause.
    fn next_tasks(&self) -> Tasks {
        let idle = |tasks: &mut Tasks| tasks.is_pause();
        let tasks = lock(&self.tasks);
        let mut tasks = if self.writer.has_full() {
            let waited = self.changed.wait_timeout_while(tasks, PAUSE, idle);
            waited.unwrap_or_else(PoisonError::into_inner).0
        } else {
            let waited = self.changed.wait_while(tasks, idle);
            waited.unwrap_or_else(PoisonError::into_inner)
        };
        std::mem::take(&mut *tasks)
    }
}

impl Keep for Worker {
    fn became_keeper(&self) {
        self.ask(|tasks| tasks.begin = true);
    }

    fn left(&self) {
        self.ask(|tasks| tasks.repair = true);
    }

    fn woken(&self) {
        self.wake();
    }
}
